"""Text under its short name; see `headwise.models`."""

from .models.corpus import *  # noqa: F403

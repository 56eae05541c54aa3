"""Text under its short name; see `headwise.models`."""

from .models.data import *  # noqa: F403

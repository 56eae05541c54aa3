"""See `headwise.tutorial.implementations.split`."""

from ..tutorial.implementations.split import *  # noqa: F403

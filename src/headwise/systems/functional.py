"""See `headwise.tutorial.implementations.functional`."""

from ..tutorial.implementations.functional import *  # noqa: F403

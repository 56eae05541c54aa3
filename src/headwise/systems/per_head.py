"""See `headwise.tutorial.implementations.per_head`."""

from ..tutorial.implementations.per_head import *  # noqa: F403

"""See `headwise.tutorial.implementations.fused`."""

from ..tutorial.implementations.fused import *  # noqa: F403

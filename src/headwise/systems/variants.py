"""See `headwise.tutorial.implementations.variants`."""

from ..tutorial.implementations.variants import *  # noqa: F403

"""See `headwise.tutorial.implementations.max_gpt2`."""

from ..tutorial.implementations.max_gpt2 import *  # noqa: F403

"""The small GPT under its short name; see `headwise.models`."""

from .models.gpt import *  # noqa: F403
from .models.gpt import builtin  # noqa: F401

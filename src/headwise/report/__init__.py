"""Looking: a model and a text in, what every head of it does out."""

from .look import look
from .sample import LookError
from .text import token_texts

__all__ = ["LookError", "look", "token_texts"]

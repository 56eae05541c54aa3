"""Looking: a model and a text in, what every head of it does out."""

from .api import look
from .sample import LookError
from .tokens import token_texts

__all__ = ["LookError", "look", "token_texts"]

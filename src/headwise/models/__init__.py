"""A small GPT: its model, its training, its text, and one that is built in."""

from . import corpus
from .generation import Generation, Piece, Sampling, generate, stream
from .gpt import GPT, FolderError, GPT2Attention, GPTConfig, builtin, load

__all__ = [
    "GPT",
    "FolderError",
    "GPT2Attention",
    "GPTConfig",
    "Generation",
    "Piece",
    "Sampling",
    "builtin",
    "corpus",
    "generate",
    "load",
    "stream",
]

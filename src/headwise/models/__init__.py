"""A small GPT: the model, its training and texts, and a built-in trained model."""

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

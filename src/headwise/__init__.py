"""Multi-head attention whose heads you can see."""

from .attend import Explanation, Seen, attend, explain, observe
from .cache import KVCache
from .convert import convert, detect_layout
from .layer import MultiHeadAttention
from .masks import ALiBi, Bias, Causal, Dense, Documents, Mask, Padding, Prefix, Window
from .patterns import First, Induction, Previous, SameToken, Self
from .rope import RoPE
from .statistics import LSE, Distance, Entropy, Map, Mass, MaxLogit
from .watch import watch

__version__ = "0.1.0"

__all__ = [
    "LSE",
    "ALiBi",
    "Bias",
    "Causal",
    "Dense",
    "Distance",
    "Documents",
    "Entropy",
    "Explanation",
    "First",
    "Induction",
    "KVCache",
    "Map",
    "Mask",
    "Mass",
    "MaxLogit",
    "MultiHeadAttention",
    "Padding",
    "Prefix",
    "Previous",
    "RoPE",
    "SameToken",
    "Seen",
    "Self",
    "Window",
    "attend",
    "convert",
    "detect_layout",
    "explain",
    "observe",
    "watch",
]

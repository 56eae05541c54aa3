"""Multi-head attention whose heads you can see."""

from .attend import Explanation, Seen, attend, explain, observe
from .cache import KVCache
from .check import Verdict, check
from .convert import convert, detect_layout
from .evidence import Statistic
from .layer import MultiHeadAttention
from .masks import ALiBi, Bias, Causal, Dense, Documents, Mask, Padding, Prefix, Window
from .patterns import First, Induction, Previous, SameToken, Self
from .readings import Reading
from .rope import RoPE
from .running import Running
from .statistics import (
    LSE,
    Distance,
    Entropy,
    Map,
    Mass,
    MaxLogit,
    OffsetHistogram,
    OutputNorm,
    Received,
    Similarity,
    Sink,
    TopKeys,
)
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
    "OffsetHistogram",
    "OutputNorm",
    "Padding",
    "Prefix",
    "Previous",
    "Reading",
    "Received",
    "RoPE",
    "Running",
    "SameToken",
    "Seen",
    "Self",
    "Similarity",
    "Sink",
    "Statistic",
    "TopKeys",
    "Verdict",
    "Window",
    "attend",
    "check",
    "convert",
    "detect_layout",
    "explain",
    "observe",
    "watch",
]

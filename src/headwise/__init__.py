"""Multi-head attention whose heads you can see."""

from .attend import Explanation, Seen, attend, explain, observe
from .cache import KVCache
from .check import Verdict, check
from .convert import convert, detect_layout
from .evidence import Statistic
from .layer import MultiHeadAttention
from .looking import look
from .masks import ALiBi, Bias, Causal, Dense, Documents, Mask, Padding, Prefix, Window
from .naming import HeadName, Label, is_delimiter, name_heads, naming_statistics
from .patterns import At, First, Induction, Previous, SameToken, Self
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
from .watching import (
    HeadEffects,
    HeadOutputs,
    Watched,
    ablate,
    ablation_scan,
    head_outputs,
    importance,
    join_tables,
    load_seen,
    watch,
)

__version__ = "0.1.0"

__all__ = [
    "LSE",
    "ALiBi",
    "At",
    "Bias",
    "Causal",
    "Dense",
    "Distance",
    "Documents",
    "Entropy",
    "Explanation",
    "First",
    "HeadEffects",
    "HeadName",
    "HeadOutputs",
    "Induction",
    "KVCache",
    "Label",
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
    "Watched",
    "Window",
    "ablate",
    "ablation_scan",
    "attend",
    "check",
    "convert",
    "detect_layout",
    "explain",
    "head_outputs",
    "importance",
    "is_delimiter",
    "join_tables",
    "load_seen",
    "look",
    "name_heads",
    "naming_statistics",
    "observe",
    "watch",
]

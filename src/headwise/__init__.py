"""Multi-head attention whose heads you can see."""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING, Any

from .attend import attend
from .capture import (
    Accelerated,
    HeadEffects,
    HeadOutputs,
    Watched,
    ablate,
    ablation_scan,
    accelerate,
    attention_of,
    head_outputs,
    importance,
    join_tables,
    load_seen,
    register,
    watch,
)
from .check import Verdict, check
from .core.mask_algebra import Mask
from .core.masks import ALiBi, Bias, Causal, Dense, Documents, Padding, Prefix, Window
from .layers.attention import MultiHeadAttention
from .layers.kv_cache import KVCache
from .layers.rope import RoPE
from .report import look
from .report.head_labels import HeadName, Label, is_delimiter, name_heads, naming_statistics
from .report.page.timeline import timeline
from .stats.accumulate import Running
from .stats.base import Statistic
from .stats.explain import Explanation, explain
from .stats.needs import RowSum
from .stats.observe import observe
from .stats.patterns import At, First, Induction, Previous, SameToken, Self
from .stats.per_head import Map, MaxLogit, Norms, OffsetHistogram, Received, Similarity
from .stats.per_query import LSE, Distance, Entropy, Mass, OutputNorm, Sink, TopKeys
from .stats.results import Reading
from .stats.seen import Seen
from .telemetry import (
    Alarm,
    History,
    LightningMonitor,
    Monitor,
    MonitorCallback,
    Rule,
    StopTraining,
)
from .telemetry.clip import qk_clip_
from .telemetry.floor import EntropyFloor
from .weights.convert import convert
from .weights.detect import detect_layout

__version__ = "0.1.0"

if TYPE_CHECKING:
    from . import parallel

__all__ = [
    "LSE",
    "ALiBi",
    "Accelerated",
    "Alarm",
    "At",
    "Bias",
    "Causal",
    "Dense",
    "Distance",
    "Documents",
    "Entropy",
    "EntropyFloor",
    "Explanation",
    "First",
    "HeadEffects",
    "HeadName",
    "HeadOutputs",
    "History",
    "Induction",
    "KVCache",
    "Label",
    "LightningMonitor",
    "Map",
    "Mask",
    "Mass",
    "MaxLogit",
    "Monitor",
    "MonitorCallback",
    "MultiHeadAttention",
    "Norms",
    "OffsetHistogram",
    "OutputNorm",
    "Padding",
    "Prefix",
    "Previous",
    "Reading",
    "Received",
    "RoPE",
    "RowSum",
    "Rule",
    "Running",
    "SameToken",
    "Seen",
    "Self",
    "Similarity",
    "Sink",
    "Statistic",
    "StopTraining",
    "TopKeys",
    "Verdict",
    "Watched",
    "Window",
    "ablate",
    "ablation_scan",
    "accelerate",
    "attend",
    "attention_of",
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
    "parallel",
    "qk_clip_",
    "register",
    "timeline",
    "watch",
]


def __getattr__(name: str) -> Any:
    if name == "parallel":  # it needs torch.distributed, which takes a while to import
        return _import_module(".parallel", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

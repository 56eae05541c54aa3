"""Multi-head attention whose heads you can see."""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING

from .attend import attend
from .check import check
from .core.mask_algebra import Mask
from .core.masks import ALiBi, Bias, Causal, Dense, Documents, Padding, Prefix, Window
from .layers.attention import MultiHeadAttention
from .layers.kv_cache import KVCache
from .layers.rope import RoPE
from .stats.distance import Distance
from .stats.entropy import Entropy
from .stats.explain import explain
from .stats.lse import LSE, Sink
from .stats.map import Map
from .stats.mass import Mass
from .stats.max_logit import MaxLogit, Norms
from .stats.observe import observe
from .stats.offsets import OffsetHistogram
from .stats.output_norm import OutputNorm
from .stats.patterns import At, First, FirstOfDocument, Induction, Previous, SameToken, Self
from .stats.plan import RowSum
from .stats.received import Received
from .stats.running import Running
from .stats.segments import Segments
from .stats.similarity import Similarity
from .stats.statistic import Statistic
from .stats.top_keys import TopKeys

if _TYPE_CHECKING:
    from . import capture as capture
    from . import integrations as integrations
    from . import models as models
    from . import parallel as parallel
    from . import report as report
    from . import research as research
    from . import stats as stats
    from . import systems as systems
    from . import telemetry as telemetry
    from . import testing as testing
    from . import tutorial as tutorial
    from . import weights as weights
    from .capture import (
        ablate,
        ablation_scan,
        accelerate,
        attention_of,
        edit,
        importance,
        prune_,
        register,
        watch,
    )
    from .layers.torch_attention import replace_attention_
    from .report.look import look
    from .report.page.timeline import timeline
    from .report.trace import trace
    from .research import circuits, head_outputs, patch, relevance, rollout
    from .telemetry import History, Monitor
    from .telemetry.clip import qk_clip_
    from .telemetry.floor import EntropyFloor
    from .weights.convert import convert
    from .weights.detect import detect_layout

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
    "EntropyFloor",
    "First",
    "FirstOfDocument",
    "History",
    "Induction",
    "KVCache",
    "Map",
    "Mask",
    "Mass",
    "MaxLogit",
    "Monitor",
    "MultiHeadAttention",
    "Norms",
    "OffsetHistogram",
    "OutputNorm",
    "Padding",
    "Prefix",
    "Previous",
    "Received",
    "RoPE",
    "RowSum",
    "Running",
    "SameToken",
    "Segments",
    "Self",
    "Similarity",
    "Sink",
    "Statistic",
    "TopKeys",
    "Window",
    "ablate",
    "ablation_scan",
    "accelerate",
    "attend",
    "attention_of",
    "check",
    "circuits",
    "convert",
    "detect_layout",
    "edit",
    "explain",
    "head_outputs",
    "importance",
    "integrations",
    "look",
    "observe",
    "parallel",
    "patch",
    "prune_",
    "qk_clip_",
    "register",
    "relevance",
    "replace_attention_",
    "rollout",
    "timeline",
    "trace",
    "watch",
]

_LAZY_MODULES = """
    capture integrations models parallel report research systems telemetry testing tutorial weights
""".split()
_LAZY_NAMES = {
    "capture": """
        ablate ablation_scan accelerate attention_of edit importance prune_ register watch
    """,
    "layers.torch_attention": "replace_attention_",
    "report.look": "look",
    "report.page.timeline": "timeline",
    "report.trace": "trace",
    "research": "circuits head_outputs patch relevance rollout",
    "telemetry": "History Monitor",
    "telemetry.clip": "qk_clip_",
    "telemetry.floor": "EntropyFloor",
    "weights.convert": "convert",
    "weights.detect": "detect_layout",
}
_MODULE_OF = {name: module for module, names in _LAZY_NAMES.items() for name in names.split()}


def __getattr__(name: str) -> object:
    if name in _LAZY_MODULES:
        return _import_module(f".{name}", __name__)
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(_import_module(f".{_MODULE_OF[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]

"""Watching models: every head of any PyTorch model, while it runs."""

from .ablate import ablate
from .captured import Watched, load_seen
from .effects import HeadEffects, join_tables
from .head_outputs import HeadOutputs, head_outputs
from .importance import ablation_scan, importance
from .watch import watch

__all__ = [
    "HeadEffects",
    "HeadOutputs",
    "Watched",
    "ablate",
    "ablation_scan",
    "head_outputs",
    "importance",
    "join_tables",
    "load_seen",
    "watch",
]

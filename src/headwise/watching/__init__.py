"""Watching models: every head of any PyTorch model, while it runs."""

from .ablate import ablate
from .effects import HeadEffects, join_tables
from .importance import ablation_scan, importance
from .outputs import HeadOutputs, head_outputs
from .seen import Watched, load_seen
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

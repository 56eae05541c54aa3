"""Watching models, and serving them: every head of any PyTorch model, while it runs."""

from .ablate import ablate
from .accelerate import accelerate
from .attention_weights import attention_of
from .captured import Watched
from .effects import HeadEffects, join_tables
from .head_outputs import HeadOutputs, head_outputs
from .importance import ablation_scan, importance
from .prune import prune_
from .register import register
from .serve import Accelerated
from .watch import watch

__all__ = [
    "Accelerated",
    "HeadEffects",
    "HeadOutputs",
    "Watched",
    "ablate",
    "ablation_scan",
    "accelerate",
    "attention_of",
    "head_outputs",
    "importance",
    "join_tables",
    "prune_",
    "register",
    "watch",
]

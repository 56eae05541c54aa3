"""Watch, edit, prune and accelerate the attention heads of any PyTorch model."""

from .ablate import ablate
from .accelerate import accelerate
from .attention_weights import attention_of
from .captured import Watched
from .edit import Edit, Gate, Knockout, Replace, Scale, Shift, edit
from .effects import HeadEffects, join_tables
from .importance import ablation_scan, importance
from .prune import prune_
from .reference import AblationReference, ablation_reference
from .register import register
from .serve import Accelerated
from .watch import watch

__all__ = [
    "AblationReference",
    "Accelerated",
    "Edit",
    "Gate",
    "HeadEffects",
    "Knockout",
    "Replace",
    "Scale",
    "Shift",
    "Watched",
    "ablate",
    "ablation_reference",
    "ablation_scan",
    "accelerate",
    "attention_of",
    "edit",
    "importance",
    "join_tables",
    "prune_",
    "register",
    "watch",
]

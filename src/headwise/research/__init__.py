"""Research on heads: circuits from weights, and what heads write, pass on and depend on."""

from .circuits import Circuits, HeadCircuit, LayerCircuits, circuits
from .detectors import detect_heads
from .flow import relevance, rollout
from .patching import Patched, patch
from .values import HeadValues
from .writes import head_outputs, logit_attribution, weighted_norms

__all__ = [
    "Circuits",
    "HeadCircuit",
    "HeadValues",
    "LayerCircuits",
    "Patched",
    "circuits",
    "detect_heads",
    "head_outputs",
    "logit_attribution",
    "patch",
    "relevance",
    "rollout",
    "weighted_norms",
]

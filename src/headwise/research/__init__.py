"""Research on heads: circuits from weights, and what heads write, pass on and depend on."""

from .circuits import Circuits, HeadCircuit, LayerCircuits, circuits

__all__ = ["Circuits", "HeadCircuit", "LayerCircuits", "circuits"]

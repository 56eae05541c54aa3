"""Callbacks for transformers' `Trainer` and for Lightning's."""

from .trainers import LightningMonitor, MonitorCallback

__all__ = ["LightningMonitor", "MonitorCallback"]

"""Callbacks for trainers: transformers' `Trainer` and Lightning's."""

from .trainers import LightningMonitor, MonitorCallback

__all__ = ["LightningMonitor", "MonitorCallback"]

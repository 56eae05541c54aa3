"""Training with open eyes: a monitor, its history, alarms, trackers and trainers' callbacks."""

from .callbacks import LightningMonitor, MonitorCallback
from .defaults import DEFAULT_STATISTICS
from .history import History, Series
from .monitor import Monitor, StopTraining
from .rules import RULES, Alarm, Rule

__all__ = [
    "DEFAULT_STATISTICS",
    "RULES",
    "Alarm",
    "History",
    "LightningMonitor",
    "Monitor",
    "MonitorCallback",
    "Rule",
    "Series",
    "StopTraining",
]

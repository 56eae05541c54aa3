"""Training with open eyes: a monitor, its history, alarms and trackers."""

from .defaults import DEFAULT_STATISTICS
from .history import History, Series
from .monitor import Monitor, StopTraining
from .rules import RULES, Alarm, Rule

__all__ = [
    "DEFAULT_STATISTICS",
    "RULES",
    "Alarm",
    "History",
    "Monitor",
    "Rule",
    "Series",
    "StopTraining",
]

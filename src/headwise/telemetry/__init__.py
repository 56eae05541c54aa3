"""Monitoring of heads during training: `Monitor`, its history, alarms and trackers."""

from .history import History, Series
from .monitor import DEFAULT_STATISTICS, Monitor, StopTraining
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

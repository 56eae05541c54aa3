"""Labels of heads under their short name; see `headwise.report.head_labels`."""

from .report.head_labels import *  # noqa: F403

"""Look at a model on a text: a report on every head, with labels."""

from .faithful import faithfulness, fit_weights
from .head_labels import (
    NO_LABEL,
    NOT_EVALUATED,
    RULES,
    HeadName,
    Label,
    LabelRule,
    is_delimiter,
    label_head,
    name_heads,
    naming_statistics,
)
from .look import look
from .sample import LookError
from .tokens import token_texts
from .traced import Trace

__all__ = [
    "NOT_EVALUATED",
    "NO_LABEL",
    "RULES",
    "HeadName",
    "Label",
    "LabelRule",
    "LookError",
    "Trace",
    "faithfulness",
    "fit_weights",
    "is_delimiter",
    "label_head",
    "look",
    "name_heads",
    "naming_statistics",
    "token_texts",
]

"""Statistics of every head, over one call or many."""

from .explain import Explanation
from .record import Reading
from .seen import Seen

__all__ = ["Explanation", "Reading", "Seen"]

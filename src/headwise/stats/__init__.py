"""Read what every head did in a call, or in many."""

from .explain import Explanation
from .record import Reading
from .seen import Seen

__all__ = ["Explanation", "Reading", "Seen"]

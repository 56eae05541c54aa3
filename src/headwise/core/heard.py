"""Who hears of the calls that people's own code makes: a watch, while it is out."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from .call import Call

Observer = Callable[[Call, Tensor], Tensor]
"""Hears of a call and its output `[B, H, T, Dv]`, and gives what takes the output's place."""

observers: list[Observer] = []
"""At most one. Code that is being compiled is heard by nobody."""

"""What is others' and is replaced while models are watched."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .net import Net


class Replaced:
    """Something of another library's, replaced while any net is out, of whatever thread.

    `replace` puts the replacement in place, and gives what undoes that.
    """

    def __init__(self, replace: Callable[[], Callable[[], None]]) -> None:
        self._replace = replace
        self._restore: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._out: tuple[Net, ...] = ()

    @contextmanager
    def heard_by(self, net: Net) -> Iterator[None]:
        """Replaced while this lasts; `net` is among those that listen."""
        with self._lock:
            if not self._out:
                self._restore = self._replace()
            self._out = (*self._out, net)
        try:
            yield
        finally:
            with self._lock:
                self._out = tuple(other for other in self._out if other is not net)
                if not self._out:
                    self._restore()

    @property
    def everyone(self) -> tuple[Net, ...]:
        """All nets that are out, of whatever thread."""
        return self._out

    @property
    def nets(self) -> tuple[Net, ...]:
        """Those that listen now, in this thread, outermost first."""
        return tuple(net for net in self._out if net.open)

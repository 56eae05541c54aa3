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
        self.everyone: tuple[Net, ...] = ()  # all nets that are out, of whatever thread

    @contextmanager
    def heard_by(self, net: Net) -> Iterator[None]:
        """Replaced while this lasts; `net` is among those that listen."""
        with self._lock:
            if not self.everyone:
                self._restore = self._replace()
            self.everyone = (*self.everyone, net)
        try:
            yield
        finally:
            with self._lock:
                self.everyone = tuple(other for other in self.everyone if other is not net)
                if not self.everyone:
                    self._restore()

    @property
    def nets(self) -> tuple[Net, ...]:
        """Those that listen now, in this thread, outermost first."""
        return tuple(net for net in self.everyone if net.open)

"""Names whose import failed, in a file that was loaded all the same."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any, NoReturn


class Absent:
    """Stands for such a name: code may speak of it, and gets the error of its import when it
    calls it."""

    def __init__(self, name: str, error: BaseException) -> None:
        self._name, self.error = name, error

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        package = getattr(self.error, "name", None)
        said = f"{self._name} could not be imported: {self.error}"
        raise ImportError(said, name=package) from self.error

    def __getattr__(self, name: str) -> Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self._name}.{name}", self.error)

    def __getitem__(self, index: Any) -> Absent:
        return self

    def __or__(self, other: Any) -> Absent:
        return self

    __ror__ = __or__

    def __bool__(self) -> bool:
        return self()

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return self()


def absent_names(thing: Any) -> list[str]:
    """The names of `Absent` that a class or function speaks of, or what it uses of its file.

    >>> absent_names(absent_names)
    []
    """
    start = thing if inspect.isclass(thing) or inspect.isfunction(thing) else type(thing)
    home = vars(sys.modules.get(start.__module__, sys))
    if not any(isinstance(one, Absent) for one in home.values()):
        return []
    queue, seen, found = [start], set[int](), dict[str, None]()
    for one in queue:
        seen.add(id(one))
        for name in dict.fromkeys(_read(one)):
            value = home.get(name)
            if isinstance(value, Absent):
                found[name] = None
            elif getattr(value, "__module__", None) == start.__module__ and id(value) not in seen:
                queue.append(value)
    return [*found]


def _read(thing: Any) -> Iterator[str]:
    """The global names that the code of a function reads, or of a class and its bases."""
    if isinstance(thing, FunctionType | CodeType):
        code = thing if isinstance(thing, CodeType) else thing.__code__
        yield from code.co_names
        for inner in code.co_consts:
            yield from _read(inner) if isinstance(inner, CodeType) else ()
    elif inspect.isclass(thing):
        yield from (kind.__name__ for kind in thing.__mro__[1:])
        for value in vars(thing).values():
            yield from _read(getattr(value, "__func__", getattr(value, "fget", value)))

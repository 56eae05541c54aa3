"""An attribute that is worked out once, when it is first read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")


class Lazy(Generic[T]):
    """`functools.cached_property` without its lock, which no graph of `torch.compile` can hold.

    >>> class Circle:
    ...     @Lazy
    ...     def area(self) -> int:
    ...         print("worked out")
    ...         return 3
    >>> circle = Circle()
    >>> circle.area + circle.area
    worked out
    6
    """

    def __init__(self, work_out: Callable[[Any], T]) -> None:
        self.work_out, self.name, self.__doc__ = work_out, work_out.__name__, work_out.__doc__

    @overload
    def __get__(self, owner: None, kind: Any) -> Lazy[T]: ...

    @overload
    def __get__(self, owner: object, kind: Any) -> T: ...

    def __get__(self, owner: Any, kind: Any) -> Any:
        if owner is None:
            return self
        value = self.work_out(owner)
        setattr(owner, self.name, value)  # which is found before this, from now on
        return value

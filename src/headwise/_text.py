"""Text for people: checks of names and texts from others, and short `repr`s."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any


class Brief:
    """A dataclass whose `repr` is one short line: arrays by dtype and shape, long parts cut, and
    what is as by default left out.

    It is written `@dataclass(repr=False)`, for a dataclass otherwise makes a `repr` of its own.

    >>> import torch, headwise as hw
    >>> hw.Dense(torch.ones(300, 300, dtype=torch.bool))
    Dense(mask=bool [300, 300])
    """

    def __repr__(self) -> str:
        if not is_dataclass(self):  # a mask of somebody's own may be any class
            return object.__repr__(self)
        parts = [
            f"{field.name}={brief(getattr(self, field.name))}"
            for field in fields(self)
            if field.repr and getattr(self, field.name) is not field.default
        ]
        return f"{type(self).__name__}({', '.join(parts)})"


_SHORT = reprlib.Repr()
_SHORT.maxother = _SHORT.maxstring = 60
_SHORT.maxlevel, _SHORT.maxlist, _SHORT.maxtuple, _SHORT.maxdict = 2, 4, 4, 4


def brief(value: Any) -> str:
    """Return a value in a few words: a tensor or an array by its dtype and shape.

    >>> brief(list(range(100))), brief("so")
    ('[0, 1, 2, 3, ...]', "'so'")
    """
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    own = isinstance(value, Brief) or len(repr(value)) <= 60
    return repr(value) if own else _SHORT.repr(value)


def escaped(text: object) -> str:
    r"""Escape each character of a text that is not printable, as `repr` does.

    So no name moves the cursor, colours the terminal, ends a line, or fails to be encoded.

    >>> print(escaped("naïve\x1b[31m\n" + "\udcff"))  # the last is a byte that is no UTF-8
    naïve\x1b[31m\n\udcff
    """
    return "".join(
        one if one.isprintable() else one.encode("unicode_escape").decode() for one in str(text)
    )


def one_line(text: object) -> str:
    """Return a text in one line, such as the message of an error."""
    return " ".join(str(text).split())


def and_more(items: Sequence[str], most: int = 3) -> str:
    """Return the first of a list, and the number of the others.

    >>> and_more(["one", "two", "three"], most=2)
    'one, two and 1 more'
    """
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(items[:most]) + more


def must_be_text(text: str, name: str) -> None:
    """Check that a string can be encoded.

    Raises:
        ValueError: it has lone surrogates, as Python has for bytes that are no UTF-8.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        at = f"{escaped(text[error.start])} at {error.start}"
        raise ValueError(f"{name} is no text: {at} stands for a byte that is no UTF-8") from None

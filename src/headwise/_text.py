"""Text for display: short `repr`s, escaped strings, and checks of strings."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any


class Brief:
    """A dataclass with a one-line `repr`: arrays by dtype and shape, long values truncated, and
    default values omitted.

    Subclasses use `@dataclass(repr=False)`, as a dataclass would otherwise define its own `repr`.

    >>> import torch, headwise as hw
    >>> hw.Dense(torch.ones(300, 300, dtype=torch.bool))
    Dense(mask=bool [300, 300])
    """

    def __repr__(self) -> str:
        if not is_dataclass(self):  # a custom mask may be any class
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
    """Return a short `repr` of a value; tensors and arrays are shown by dtype and shape.

    >>> brief(list(range(100))), brief("so")
    ('[0, 1, 2, 3, ...]', "'so'")
    """
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    own = isinstance(value, Brief) or len(repr(value)) <= 60
    return repr(value) if own else _SHORT.repr(value)


def escaped(text: object) -> str:
    r"""Escape non-printable characters, as `repr` does.

    A name then cannot move the cursor, color the terminal, end a line, or fail to be encoded.

    >>> print(escaped("naïve\x1b[31m\n" + "\udcff"))  # the last byte is not UTF-8
    naïve\x1b[31m\n\udcff
    """
    return "".join(
        one if one.isprintable() else one.encode("unicode_escape").decode() for one in str(text)
    )


def one_line(text: object) -> str:
    """Return a text, such as an error message, on one line."""
    return " ".join(str(text).split())


def and_more(items: Sequence[str], most: int = 3) -> str:
    """Return the first items of a list, and the number of remaining ones.

    >>> and_more(["one", "two", "three"], most=2)
    'one, two and 1 more'
    """
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(items[:most]) + more


def must_be_text(text: str, name: str) -> None:
    """Check that a string can be encoded.

    Raises:
        ValueError: it contains lone surrogates, which stand for bytes that are not UTF-8.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        at = f"{escaped(text[error.start])} at {error.start}"
        raise ValueError(f"{name} is not valid text: {at} is a byte that is not UTF-8") from None

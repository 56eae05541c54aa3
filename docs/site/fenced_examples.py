"""Extension of griffe: examples in docstrings become blocks of code, as readers of pages expect."""

from __future__ import annotations

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"(?:^[ ]*>>> .*\n?(?:^(?![ ]*$).*\n?)*\n*)+", re.MULTILINE)


def fenced(text: str) -> str:
    """The text, with each example between fences; an example ends at a blank line."""
    return _EXAMPLE.sub(_fence, text)


def _fence(found: re.Match[str]) -> str:
    lines = found[0].rstrip("\n").splitlines()
    indent = " " * (len(lines[0]) - len(lines[0].lstrip()))
    return "\n".join([f"{indent}```pycon", *lines, f"{indent}```", "", ""])


class Examples(griffe.Extension):
    """Fences the examples of every docstring that is loaded."""

    def on_object(self, *, obj: griffe.Object, **known: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)

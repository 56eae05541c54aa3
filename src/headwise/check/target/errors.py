"""Errors of what is checked: what stops a check of it, and an error in one line."""

from __future__ import annotations

import difflib
import inspect
import linecache
import os
import re
import traceback
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..findings.verdict import Finding

OF_ENVIRONMENT = re.compile(r"(?:environ(?:\.get)?[\[(]|getenv\()\s*['\"](\w+)")
"""How code reads a variable of the environment."""


class Broken(Exception):
    """What is to be checked cannot be imported, built or called; `finding` says why."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.message)
        self.finding = finding


def told(error: BaseException, file: Path | None = None) -> str:
    """An exception in one line: what, where in the user's own file, and what stood there.

    The user's own files are all but libraries' and ours, or `file` alone, where it is known.

    >>> told(ValueError("too long"))
    'ValueError: too long'
    """
    text = str(error).strip().splitlines()
    kind = type(error).__name__
    begins = getattr(error, "begins", f"{kind}: ")  # ours say what they are
    said = f"{begins}{text[0]}" if text else kind
    said += _meant(error)
    frames = traceback.walk_tb(error.__traceback__)
    names = ((place, place[0].f_code.co_filename) for place in frames)
    own = [one for one in names if (one[1] == str(file) if file else is_users(one[1]))]
    if not own:
        return said
    (frame, number), name = own[-1]
    line = linecache.getline(name, number, frame.f_globals).strip()
    code = f": `{line}`{''.join(_had(line, frame.f_locals))}" if line else ""
    return f"{said} (line {number} of {Path(name).name}{code})"


def _meant(error: BaseException) -> str:
    """The attribute of a module that is nearest to one that it has not."""
    owner, name = getattr(error, "obj", None), getattr(error, "name", None) or ""
    if isinstance(error, AttributeError) and owner is None:
        found = re.search(r"has no attribute '(\w+)'", str(error))
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        owner, name = frames[-1].f_locals.get("self"), found[1] if found else ""
    whole = isinstance(owner, nn.Module) and "_modules" in vars(owner)
    known = dir(owner) if whole else ()
    near = difflib.get_close_matches(name, known, n=1) if name else []
    return f"; did you mean `{near[0]}`?" if near else ""


def _had(line: str, known: Mapping[str, Any]) -> Iterator[str]:
    """What the tensors of a line are, and how many features its layers take."""
    for name in dict.fromkeys(re.findall(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*", line)):
        first, *parts = name.split(".")
        value = known.get(first)
        for part in parts:
            inside = vars(value).get("_modules", {}) if isinstance(value, nn.Module) else {}
            value = inside.get(part)  # a module whose __init__ was not called has none
        if isinstance(value, Tensor) and isinstance(value.shape, torch.Size):  # else unknown
            yield f"; {name} is {list(value.shape)}"
        elif isinstance(value, nn.Linear) and hasattr(value, "in_features"):
            yield f"; {name} takes {value.in_features} features"


def users_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """The frames of somebody's own files that an error came through, the innermost last."""
    return [one for one in traceback.extract_tb(error.__traceback__) if is_users(one.filename)]


def failing_line(error: BaseException) -> str:
    """The line of somebody's own files that an error came from last; empty where there is none."""
    frames = users_frames(error)
    return (frames[-1].line or "") if frames else ""


def variable_read(error: BaseException) -> str:
    """The variable of the environment that the failing line reads and that is not set; empty where
    there is none.

    >>> variable_read(KeyError("LOCAL_RANK"))
    ''
    """
    read = OF_ENVIRONMENT.search(failing_line(error))
    return read[1] if read and read[1] not in os.environ else ""


def wants_memory(error: BaseException) -> bool:
    """Whether there was not enough memory, in PyTorch's words or in Python's."""
    said = re.search(r"can't allocate memory|not enough memory", str(error), re.IGNORECASE)
    return isinstance(error, MemoryError) or said is not None


@cache
def is_users(filename: str) -> bool:
    """Whether a file is neither a library's nor ours."""
    here = str(Path(__file__).parents[2])
    inside = ("site-packages", "dist-packages", "<frozen", "<@beartype", here)
    standard = str(Path(inspect.__file__).parent)
    return not any(part in filename for part in inside) and not filename.startswith(standard)

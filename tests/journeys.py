"""How many moves between the package's files a call makes: each is a place to look for a reader."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import headwise as hw

_HOME = str(Path(hw.__file__).parent)


def moves(call: Callable[[], object]) -> int:
    """Return how often a warm call goes from one file of the package to another."""
    for _ in range(3):
        call()
    path: list[str] = []

    def follow(frame: FrameType | None, event: str, _: object) -> None:
        if event not in ("call", "return"):
            return
        if event == "return" and frame is not None:
            frame = frame.f_back
        while frame is not None and not frame.f_code.co_filename.startswith(_HOME):
            frame = frame.f_back
        file = "" if frame is None else frame.f_code.co_filename
        if file and (not path or path[-1] != file):
            path.append(file)

    sys.setprofile(follow)
    try:
        call()
    finally:
        sys.setprofile(None)
    return len(path) - 1

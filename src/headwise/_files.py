"""Files that appear whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path


def write_whole(folder: Path, writers: Mapping[str, Callable[[Path], object]]) -> None:
    """Let each writer fill a temporary file in `folder`, then put all of them in place.

    When a writer fails, nothing is left of any of them, and what was there before is untouched.
    """
    temporary = {name: folder / f".{name}.{os.getpid()}.tmp" for name in writers}
    try:
        for name, write in writers.items():
            write(temporary[name])
            # Some libraries make files that only their owner can read.
            temporary[name].chmod(0o666 & ~_umask())
        for name, path in temporary.items():
            os.replace(path, folder / name)
    finally:
        for path in temporary.values():
            path.unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask

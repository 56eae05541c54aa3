"""Results in a safetensors file, with their structure in the header as JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor

from .._io import place_for, write_tensors, write_whole
from .._text import one_line

FORMAT = "headwise.seen"
VERSION = 1

LONGEST_HEADER = 100_000_000
"""In bytes; safetensors reads none that is longer."""


def write_tree(path: Path, content: Any) -> None:
    """Write nested dicts and lists of plain values and tensors; whole or not at all.

    In the header a tensor is `{"tensor": n}`, and the tensor is called `n`.

    Raises:
        OSError: there is no such folder, or no regular file of that name.
        ValueError: too many tensors for a file.
    """
    place_for(path)
    tensors: dict[str, Tensor] = {}
    known: dict[int, tuple[Tensor, str]] = {}

    def numbered(value: Any) -> Any:
        if not isinstance(value, Tensor):
            raise TypeError(f"{type(value).__name__} is no plain value")
        if id(value) not in known:
            name = str(len(tensors))
            known[id(value)] = value, name
            tensors[name] = value.detach().cpu().contiguous().clone()
        return {"tensor": int(known[id(value)][1])}

    header = {"format": FORMAT, "version": str(VERSION)}
    header["content"] = json.dumps(content, default=numbered)

    def save(part: Path) -> None:
        write_tensors(part, tensors, header)
        with part.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
        if size > LONGEST_HEADER:
            raise ValueError(
                f"{path}: {len(tensors):,} tensors are more than one safetensors file can list; "
                f"watch with running=True, which adds calls up."
            )

    write_whole(path.parent, {path.name: save})


def read_tree(path: Path) -> Any:
    """Read a file of `write_tree`, with tensors on the CPU.

    Raises:
        OSError: there is no such file, or it is a folder.
        ValueError: no safetensors file, damaged, or of another kind or a later version.
    """
    from safetensors import SafetensorError, safe_open

    if path.is_dir():
        raise IsADirectoryError(f"{path}: is a folder; name a file in it")
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file")
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: no safetensors file, or damaged ({one_line(error)})") from None
    if header.get("format") != FORMAT:
        raise ValueError(f"{path}: was not written by save() of what watch() has seen")
    if header.get("version") != str(VERSION):
        raise ValueError(
            f"{path}: is of version {header.get('version')}, and this headwise reads {VERSION}"
        )

    def tensor(found: dict[str, Any]) -> Any:
        number = found.get("tensor")
        if len(found) == 1 and isinstance(number, int):
            return tensors[str(number)]
        return found

    try:
        return json.loads(header["content"], object_hook=tensor)
    except (KeyError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: its header is damaged ({error!r})") from None

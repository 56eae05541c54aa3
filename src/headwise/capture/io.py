"""Save results in a safetensors file, with their structure as JSON in the header."""

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
"""The maximum size in bytes of a header that safetensors reads."""


def write_tree(path: Path, content: Any) -> None:
    """Write nested dicts and lists of plain values and tensors, completely or not at all.

    In the header a tensor is represented by `{"tensor": n}`, where `n` is the name of the tensor.

    Raises:
        OSError: the folder does not exist, or the path is not a regular file.
        ValueError: there are too many tensors for one file.
    """
    place_for(path)
    tensors: dict[str, Tensor] = {}
    known: dict[int, tuple[Tensor, str]] = {}

    def numbered(value: Any) -> Any:
        if not isinstance(value, Tensor):
            raise TypeError(f"{type(value).__name__} is not a plain value")
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
    """Read a file written by `write_tree`, with tensors on the CPU.

    Raises:
        OSError: the file does not exist, or is a directory.
        ValueError: the file is damaged, not a safetensors file of `write_tree`, or of a later
            version.
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
        raise ValueError(
            f"{path}: not a safetensors file, or damaged ({one_line(error)})"
        ) from None
    if header.get("format") != FORMAT:
        raise ValueError(f"{path}: was not written by save() of a watch() result")
    if header.get("version") != str(VERSION):
        raise ValueError(
            f"{path}: has version {header.get('version')}, but this headwise reads {VERSION}"
        )

    def tensor(item: dict[str, Any]) -> Any:
        number = item.get("tensor")
        if len(item) == 1 and isinstance(number, int):
            return tensors[str(number)]
        return item

    try:
        return json.loads(header["content"], object_hook=tensor)
    except (KeyError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: its header is damaged ({error!r})") from None

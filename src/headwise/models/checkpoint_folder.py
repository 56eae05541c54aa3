"""Training runs of several ranks on disk: every rank writes its share (PyTorch's DCP).

`checkpoints/` holds a folder for each checkpoint and `latest.json`, which names the last whole one.
DCP writes a folder's `.metadata` when all ranks' files are on the disk; only then does the pointer
move, and only then do older folders go. Any number of ranks reads what any other wrote, also one
alone. The tensors have the names of `checkpoint.safetensors`; random state there is none, as what a
step draws is a function of the seed and the step's number. DCP's `.metadata` is pickled: opening a
stranger's can run code.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .._text import one_line
from ..weights.safetensors_file import FolderError
from .checkpoint import CHECKPOINT, Checkpoint, read, tensors_of
from .ranks import TrainingRanks

FOLDER = "checkpoints"
POINTER = "latest.json"
WHOLE = ".metadata"


def write(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    about: Mapping[str, Any],
    ranks: TrainingRanks,
) -> None:
    """Write a checkpoint, each rank its share; until all of it is on the disk, the last one counts.

    Args:
        about: the step, the settings and the text's fingerprint.

    Raises:
        FolderError: the folder cannot be written.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    place = ranks.shared(lambda: _new_place(folder, int(about["step"])))
    try:
        save(tensors_of(model, optimizer), storage_writer=FileSystemWriter(place))
    except CheckpointException as error:
        raise FolderError(f"{place}: cannot be written, {_first(error)}") from None
    ranks.shared(lambda: _point_to(place, about))


def newest(folder: Path) -> Checkpoint:
    """Read the folder's checkpoint: of one process or of several, whichever has more steps.

    Raises:
        FolderError: there is none, or it is damaged.
    """
    pointer = folder / FOLDER / POINTER
    if not pointer.is_file():
        return read(folder)
    several = _read(pointer)
    if not (folder / CHECKPOINT).is_file():
        return several
    alone = read(folder)
    return several if several.step >= alone.step else alone


def clear(folder: Path) -> None:
    """Remove the checkpoints of several ranks, the pointer first."""
    (folder / FOLDER / POINTER).unlink(missing_ok=True)
    shutil.rmtree(folder / FOLDER, ignore_errors=True)


def _new_place(folder: Path, step: int) -> Path:
    """Make the parent of a folder that there is not yet."""
    try:
        (folder / FOLDER).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FolderError(f"{folder}: cannot be written, {error.strerror}") from None
    return folder / FOLDER / f"step-{step}-{secrets.token_hex(4)}"


def _point_to(place: Path, about: Mapping[str, Any]) -> None:
    """Let the pointer name this checkpoint, then remove all others."""
    pointer, part = place.parent / POINTER, place.parent / f"{POINTER}.tmp"
    try:
        with part.open("w", encoding="utf-8") as file:
            json.dump({"checkpoint": place.name, **about}, file)
            file.flush()
            os.fsync(file.fileno())
        _flush(place)
        os.replace(part, pointer)
        _flush(place.parent)
    except OSError as error:
        raise FolderError(f"{pointer}: cannot be written, {error.strerror}") from None
    for other in place.parent.iterdir():
        if other not in (place, pointer):
            shutil.rmtree(other, ignore_errors=True)


def _flush(folder: Path) -> None:
    """Let a folder's names reach the disk, where the system can."""
    if os.name != "posix":
        return
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _read(pointer: Path) -> Checkpoint:
    """The checkpoint that the pointer names.

    Raises:
        FolderError: the pointer, or the metadata that it leads to, is damaged or missing.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    try:
        about = json.loads(pointer.read_text("utf-8"))
        place = pointer.parent / Path(about["checkpoint"]).name
        step, settings, fingerprint = about["step"], about["settings"], about["text"]
        if not (isinstance(step, int) and step >= 0 and isinstance(settings, dict)):
            raise ValueError(f"step {step!r}, settings {type(settings).__name__}")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise _damaged(pointer, error) from None
    try:
        metadata = FileSystemReader(place).read_metadata().state_dict_metadata
        held = {
            name: (list(tensor.size), tensor.properties.dtype)
            for name, tensor in metadata.items()
            if isinstance(tensor, TensorStorageMetadata)
        }
    except Exception as error:  # whatever unpickling may raise
        raise _damaged(place / WHOLE, error) from None

    def fill(tensors: dict[str, Tensor]) -> None:
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is .*unavailable")
                load(tensors, storage_reader=FileSystemReader(place))
        except CheckpointException as error:
            raise _damaged(place, error) from None

    return Checkpoint(place, step, settings, fingerprint, held, fill)


def _damaged(path: Path, error: BaseException) -> FolderError:
    return FolderError(f"{path}: damaged or truncated ({_first(error)}); start a new run")


def _first(error: BaseException) -> str:
    """In one line, what a rank said of it."""
    failures = getattr(error, "failures", None)
    said = str(next(iter(failures.values()))[0] if failures else error)
    return one_line(said)[:300] or type(error).__name__

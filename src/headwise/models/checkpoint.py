"""Checkpoints of training runs: the complete state that the next step needs.

One process writes `checkpoint.safetensors`: the weights, the two moments of AdamW and, in its
header, the step, the settings and a fingerprint of the text. Nothing in it is pickled.

Several ranks write their parts into `checkpoints/` through PyTorch's DCP: one directory per
checkpoint, and `latest.json` with the name of the last complete one. DCP writes `.metadata` when
the files of all ranks are on disk; then `latest.json` is replaced and older directories are
removed. Tensors have the same names as in `checkpoint.safetensors`. `.metadata` is pickled: opening
it from an untrusted source can run code.

Any number of ranks can read either format. No random state is saved: all random numbers of a step
are a function of the seed and the step's number.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .._io import write_tensors
from .._text import one_line
from ..weights.folders import FolderError, check_values, write_files

CHECKPOINT = "checkpoint.safetensors"
FOLDER, POINTER, COMPLETE = "checkpoints", "latest.json", ".metadata"
_MOMENTS = ("exp_avg", "exp_avg_sq")

ShapeAndDtype = tuple[list[int], torch.dtype]
OnFirstRank = Callable[[Callable[[], Any]], Any]
"""A function that calls its argument on rank 0 on behalf of all ranks."""


@dataclass(frozen=True)
class Checkpoint:
    """An open checkpoint: the state of the run, and the shape and dtype of each tensor.

    fill: reads stored tensors into the given ones, matched by name.
    """

    path: Path
    step: int
    settings: dict[str, Any]
    fingerprint: str
    held: Mapping[str, ShapeAndDtype]
    fill: Callable[[dict[str, Tensor]], None]

    def restore(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Read weights and moments into a model and its optimizer, sharded or not.

        Raises:
            FolderError: the checkpoint does not match the model's tensors, shapes or dtypes, or
                cannot be read.
        """
        self._compare(model)
        for parameter in model.parameters() if self.step else ():  # none before AdamW's first step
            optimizer.state[parameter] = {
                "step": torch.tensor(float(self.step), device=parameter.device),
                **{moment: torch.zeros_like(parameter.detach()) for moment in _MOMENTS},
            }
        with torch.no_grad():
            self.fill(tensors_of(model, optimizer))

    def _compare(self, model: nn.Module) -> None:
        expected = {
            f"{kind}.{name}": (list(parameter.shape), parameter.dtype)
            for kind in (("weight", *_MOMENTS) if self.step else ("weight",))
            for name, parameter in model.named_parameters()
        }
        for name in sorted(expected.keys() ^ self.held.keys()):
            fault = "is missing" if name in expected else "is not a tensor of the model"
            raise FolderError(f"{self.path}: {name} {fault}; start a new run")
        for name, (shape, dtype) in self.held.items():
            if (shape, dtype) != expected[name]:
                raise FolderError(
                    f"{self.path}: {name} is {dtype} of {shape}, but its settings require "
                    f"{expected[name][1]} of {expected[name][0]}; start a new run"
                )


def newest(folder: Path) -> Checkpoint:
    """Open a folder's checkpoint, from one process or several; if both exist, the later one.

    Raises:
        FolderError: the checkpoint is missing or damaged.
    """
    if not (folder / FOLDER / POINTER).is_file():
        return read(folder)
    sharded = _read_sharded(folder / FOLDER / POINTER)
    if not (folder / CHECKPOINT).is_file():
        return sharded
    single = read(folder)
    return sharded if sharded.step >= single.step else single


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return weights and moments by their names in checkpoints; they are not copied."""
    tensors = {}
    for name, parameter in model.named_parameters():
        tensors[f"weight.{name}"] = parameter.detach()
        state = optimizer.state.get(parameter, {})
        tensors |= {f"{moment}.{name}": state[moment] for moment in _MOMENTS if moment in state}
    return tensors


def fingerprint(*ids: Tensor) -> str:
    """Hash token ids, to detect a changed text or tokenizer."""
    digest = hashlib.sha256()
    for row in ids:
        digest.update(len(row).to_bytes(8, "little"))
        digest.update(row.numpy().tobytes())
    return digest.hexdigest()


# ── one process ─────────────────────────────────────────────────────────────────────────────────


def write(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, about: Mapping[str, Any]
) -> None:
    """Write the checkpoint of one process; it replaces the previous one completely or not at all.

    Args:
        about: the step, the settings and the text's fingerprint.

    Raises:
        FolderError: the folder cannot be written.
    """
    tensors = {name: tensor.cpu() for name, tensor in tensors_of(model, optimizer).items()}
    header = {"step": str(about["step"]), "settings": json.dumps(about["settings"])}
    header["text"] = about["text"]
    write_files(folder, {CHECKPOINT: lambda path: write_tensors(path, tensors, header)})


def read(folder: Path) -> Checkpoint:
    """Read the checkpoint of one process.

    Raises:
        FolderError: the checkpoint is missing or damaged.
    """
    from safetensors import SafetensorError, safe_open

    path = folder / CHECKPOINT
    if not path.is_file():
        raise FolderError(f"{folder} does not contain {CHECKPOINT}, so there is no run to resume")
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        about = {"settings": json.loads(header["settings"]), "text": header["text"]}
        about = _checked_header({**about, "step": int(header["step"])})
    except (SafetensorError, OSError, KeyError, ValueError, RecursionError) as error:
        raise _damaged(path, error) from None
    for name, tensor in tensors.items():
        check_values(tensor, f"{path}: {name}")

    def fill(given: dict[str, Tensor]) -> None:
        for name, tensor in given.items():
            tensor.copy_(_sharded_like(tensors[name], tensor))

    held = {name: (list(x.shape), x.dtype) for name, x in tensors.items()}
    return Checkpoint(path, *about, held, fill)


def _sharded_like(value: Tensor, like: Tensor) -> Tensor:
    """Shard a tensor like `like`, without communication; every rank has the whole tensor."""
    if not hasattr(like, "device_mesh"):
        return value
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(like, DTensor)
    here = value.to(like.device)
    return distribute_tensor(here, like.device_mesh, like.placements, src_data_rank=None)


# ── several ranks ───────────────────────────────────────────────────────────────────────────────


def write_sharded(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    about: Mapping[str, Any],
    on_first: OnFirstRank,
) -> None:
    """Write each rank's part; the checkpoint becomes valid once it is complete on disk.

    Args:
        about: the step, the settings and the text's fingerprint.

    Raises:
        FolderError: the folder cannot be written.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    place = on_first(lambda: _new_place(folder, int(about["step"])))
    try:
        save(tensors_of(model, optimizer), storage_writer=FileSystemWriter(place))
    except CheckpointException as error:
        raise FolderError(f"{place} cannot be written: {_first_line(error)}") from None
    on_first(lambda: _point_to(place, about))


def remove_sharded(folder: Path) -> None:
    """Remove the checkpoints of several ranks, the pointer first."""
    (folder / FOLDER / POINTER).unlink(missing_ok=True)
    shutil.rmtree(folder / FOLDER, ignore_errors=True)


def _new_place(folder: Path, step: int) -> Path:
    """Return a path for a new checkpoint folder; create its parent folder."""
    try:
        (folder / FOLDER).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FolderError(f"{folder} cannot be written: {error.strerror}") from None
    return folder / FOLDER / f"step-{step}-{secrets.token_hex(4)}"


def _point_to(place: Path, about: Mapping[str, Any]) -> None:
    """Write the pointer to this checkpoint, then remove all others."""
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
        raise FolderError(f"{pointer} cannot be written: {error.strerror}") from None
    for other in place.parent.iterdir():
        if other not in (place, pointer):
            shutil.rmtree(other, ignore_errors=True)


def _flush(folder: Path) -> None:
    """Flush a directory's entries to the disk, if the system supports it."""
    if os.name != "posix":
        return
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _read_sharded(pointer: Path) -> Checkpoint:
    """Open the checkpoint named by the pointer.

    Raises:
        FolderError: the pointer or the metadata is damaged or missing.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    try:
        header = json.loads(pointer.read_text("utf-8"))
        place = pointer.parent / Path(header["checkpoint"]).name
        about = _checked_header(header)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise _damaged(pointer, error) from None
    try:
        metadata = FileSystemReader(place).read_metadata().state_dict_metadata
        held = {
            name: (list(tensor.size), tensor.properties.dtype)
            for name, tensor in metadata.items()
            if isinstance(tensor, TensorStorageMetadata)
        }
    except Exception as error:  # unpickling may raise anything
        raise _damaged(place / COMPLETE, error) from None

    def fill(tensors: dict[str, Tensor]) -> None:
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is .*unavailable")
                load(tensors, storage_reader=FileSystemReader(place))
        except CheckpointException as error:
            raise _damaged(place, error) from None

    return Checkpoint(place, *about, held, fill)


def _checked_header(header: Mapping[str, Any]) -> tuple[int, dict[str, Any], str]:
    step, settings, text = header["step"], header["settings"], header["text"]
    if not (isinstance(step, int) and step >= 0 and isinstance(settings, dict)):
        raise ValueError(f"step {step!r}, settings {type(settings).__name__}")
    return step, settings, text


def _damaged(path: Path, error: BaseException) -> FolderError:
    return FolderError(f"{path}: damaged or truncated ({_first_line(error)}); start a new run")


def _first_line(error: BaseException) -> str:
    """Return the error of the first rank that failed, in one line."""
    failures = getattr(error, "failures", None)
    message = str(next(iter(failures.values()))[0] if failures else error)
    return one_line(message)[:300] or type(error).__name__

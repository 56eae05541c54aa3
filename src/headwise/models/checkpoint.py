"""Training runs on disk: one file that holds all that the next step depends on.

`checkpoint.safetensors` keeps weights, AdamW's two moments and, in its header, the step, the
settings and a fingerprint of the text. It holds no random state: what a step draws is a
function of the seed and the step's number. Nothing in it is pickled.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .._io import write_tensors
from .._text import one_line
from ..weights.hf_folder import write_files
from ..weights.safetensors_file import FolderError, checked

CHECKPOINT = "checkpoint.safetensors"
_MOMENTS = ("exp_avg", "exp_avg_sq")


Kind = tuple[list[int], torch.dtype]
"""What is known of a tensor that is not read yet: its shape and its dtype."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint: what is known of the run, and of each tensor; `fill` reads them in place."""

    path: Path
    step: int
    settings: dict[str, Any]
    fingerprint: str
    held: Mapping[str, Kind]
    fill: Callable[[dict[str, Tensor]], None]

    def restore(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Put weights and moments back where they came from, or where their shards are now.

        Raises:
            FolderError: there are other tensors than the model's, or of other shapes or dtypes;
                or what is there cannot be read.
        """
        self._compare(model)
        for parameter in model.parameters() if self.step else ():  # AdamW's first step makes them
            optimizer.state[parameter] = {
                "step": torch.tensor(float(self.step), device=parameter.device),
                **{moment: torch.zeros_like(parameter.detach()) for moment in _MOMENTS},
            }
        with torch.no_grad():
            self.fill(tensors_of(model, optimizer))

    def _compare(self, model: nn.Module) -> None:
        kinds = ("weight", *_MOMENTS) if self.step else ("weight",)
        wanted = {
            f"{kind}.{name}": (list(parameter.shape), parameter.dtype)
            for kind in kinds
            for name, parameter in model.named_parameters()
        }
        for name in sorted(wanted.keys() ^ self.held.keys()):
            fault = "is missing" if name in wanted else "has no place in the model"
            raise FolderError(f"{self.path}: {name} {fault}; start a new run")
        for name, (shape, dtype) in self.held.items():
            if (shape, dtype) != wanted[name]:
                raise FolderError(
                    f"{self.path}: {name} is {dtype} of {shape}, and its settings call for "
                    f"{wanted[name][1]} of {wanted[name][0]}; start a new run"
                )


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Weights and moments, by the names that checkpoints give them; not copied."""
    tensors = {}
    for name, parameter in model.named_parameters():
        tensors[f"weight.{name}"] = parameter.detach()
        state = optimizer.state.get(parameter, {})
        tensors |= {f"{moment}.{name}": state[moment] for moment in _MOMENTS if moment in state}
    return tensors


def write(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, about: Mapping[str, Any]
) -> None:
    """Write the checkpoint; it replaces the last one whole or not at all.

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
    """Read the folder's checkpoint.

    Raises:
        FolderError: there is none, or it is damaged.
    """
    from safetensors import SafetensorError, safe_open

    path = folder / CHECKPOINT
    if not path.is_file():
        raise FolderError(f"{folder}: holds no {CHECKPOINT}, so there is no run to resume")
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        step, settings, text = int(header["step"]), json.loads(header["settings"]), header["text"]
        if step < 0 or not isinstance(settings, dict):
            raise ValueError(f"step {step}, settings {type(settings).__name__}")
    except (SafetensorError, OSError, KeyError, ValueError, RecursionError) as error:
        raise FolderError(
            f"{path}: damaged or truncated ({one_line(error)}); start a new run"
        ) from None
    for name, tensor in tensors.items():
        checked(tensor, f"{path}: {name}")

    def fill(given: dict[str, Tensor]) -> None:
        for name, tensor in given.items():
            tensor.copy_(_sharded(tensors[name], tensor))

    held = {name: (list(x.shape), x.dtype) for name, x in tensors.items()}
    return Checkpoint(path, step, settings, text, held, fill)


def _sharded(value: Tensor, like: Tensor) -> Tensor:
    """The value as it is; or sharded as `like` is, which nothing is sent for."""
    if not hasattr(like, "device_mesh"):
        return value
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(like, DTensor)
    here = value.to(like.device)
    return distribute_tensor(here, like.device_mesh, like.placements, src_data_rank=None)


def fingerprint(*ids: Tensor) -> str:
    """A hash of token ids, to notice that text or tokenizer changed between two runs."""
    digest = hashlib.sha256()
    for row in ids:
        digest.update(len(row).to_bytes(8, "little"))
        digest.update(row.numpy().tobytes())
    return digest.hexdigest()

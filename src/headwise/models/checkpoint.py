"""Training runs on disk: one file that holds all that the next step depends on.

`checkpoint.safetensors` keeps weights, AdamW's two moments and, in its header, the step, the
settings and a fingerprint of the text. It holds no random state: what a step draws is a
function of the seed and the step's number. Nothing in it is pickled.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .._io import write_tensors
from ..weights.hf_folder import write_files
from ..weights.safetensors_file import FolderError, checked

CHECKPOINT = "checkpoint.safetensors"
_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint holds."""

    path: Path
    step: int
    settings: dict[str, Any]
    fingerprint: str
    tensors: dict[str, Tensor]

    def restore(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Put weights and moments back where they came from.

        Raises:
            FolderError: there are other tensors than the model's, or of other shapes or dtypes.
        """
        self._compare(model)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(self.tensors[f"weight.{name}"])
                if self.step == 0:
                    continue  # AdamW makes its state at the first step
                optimizer.state[parameter] = {
                    "step": torch.tensor(float(self.step), device=parameter.device),
                    **{
                        m: self.tensors[f"{m}.{name}"].to(parameter.device).clone()
                        for m in _MOMENTS
                    },
                }

    def _compare(self, model: nn.Module) -> None:
        kinds = ("weight", *_MOMENTS) if self.step else ("weight",)
        wanted = {
            f"{kind}.{name}": (list(parameter.shape), parameter.dtype)
            for kind in kinds
            for name, parameter in model.named_parameters()
        }
        held = {name: (list(x.shape), x.dtype) for name, x in self.tensors.items()}
        for name in sorted(wanted.keys() ^ held.keys()):
            fault = "is missing" if name in wanted else "has no place in the model"
            raise FolderError(f"{self.path}: {name} {fault}; start a new run")
        for name, (shape, dtype) in held.items():
            if (shape, dtype) != wanted[name]:
                raise FolderError(
                    f"{self.path}: {name} is {dtype} of {shape}, and its settings call for "
                    f"{wanted[name][1]} of {wanted[name][0]}; start a new run"
                )


def write(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: int,
    settings: Mapping[str, Any],
    fingerprint: str,
) -> None:
    """Write the checkpoint; it replaces the last one whole or not at all.

    Raises:
        FolderError: the folder cannot be written.
    """
    tensors = {}
    for name, parameter in model.named_parameters():
        tensors[f"weight.{name}"] = parameter.detach().cpu()
        state = optimizer.state.get(parameter, {})
        for moment in _MOMENTS:
            if moment in state:
                tensors[f"{moment}.{name}"] = state[moment].cpu()
    header = {"step": str(step), "settings": json.dumps(dict(settings)), "text": fingerprint}
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
        step, settings = int(header["step"]), json.loads(header["settings"])
        if step < 0 or not isinstance(settings, dict):
            raise ValueError(f"step {step}, settings {type(settings).__name__}")
        found = Checkpoint(path, step, settings, header["text"], tensors)
    except (SafetensorError, OSError, KeyError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise FolderError(f"{path}: damaged or truncated ({reason}); start a new run") from None
    for name, tensor in tensors.items():
        checked(tensor, f"{path}: {name}")
    return found


def fingerprint(*ids: Tensor) -> str:
    """A hash of token ids, to notice that text or tokenizer changed between two runs."""
    digest = hashlib.sha256()
    for row in ids:
        digest.update(len(row).to_bytes(8, "little"))
        digest.update(row.numpy().tobytes())
    return digest.hexdigest()

"""Convert weights in safetensors files layer by layer, without the whole model in memory.

Each file is read twice: first to convert everything, so that errors occur before anything is
written and the shapes are known; then to write it.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._io import holds_files, only_writer, place_for, write_whole
from .convert import Conversion, conversions, converted
from .folders import CONFIG, INDEX, WEIGHTS, check_values, weight_files
from .layout_table import LAYOUTS
from .model_config import ModelConfig

# The names of PyTorch's dtypes in safetensors.
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}

_OTHER_FORMATS = {".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".npz", ".onnx", ".msgpack"}

Report = Callable[[float], object]


@dataclass(frozen=True)
class Converted:
    """The result of a conversion.

    Attributes:
        source: the layout before conversion; several layouts are joined by "and".
        target: the layout after conversion.
        layers: the number of converted attention layers.
        tensors: the number of tensors.
        bytes: the size of all tensors.
        files: the paths of the files.
    """

    source: str
    target: str
    layers: int
    tensors: int
    bytes: int
    files: tuple[str, ...]


@dataclass(frozen=True)
class _PlannedTensor:
    """A tensor to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def convert_file(
    source_path: str | Path,
    target_path: str | Path,
    *,
    source: str | None = None,
    target: str,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    bias: bool | None = None,
    rotary_dim: int | None = None,
    qk_norm_eps: float | None = None,
    shard_bytes: int = 5 * 10**9,
    overwrite: bool = False,
    report: Report = lambda share: None,
) -> Converted:
    """Convert the attention layers of a safetensors file, or of a folder of shards.

    Args:
        source_path: a `.safetensors` file, or a folder with `model.safetensors` or with shards
            and their `model.safetensors.index.json`.
        target_path: a `.safetensors` file to write, or a folder to create.
        source, target, num_heads, num_kv_heads, bias, rotary_dim, qk_norm_eps: as
            in `headwise.convert`. Defaults are read from a `config.json` beside the weights.
        shard_bytes: the maximum size of each file in a folder (a larger tensor gets its own file).
        overwrite: replace an existing file, or write into a folder that is not empty.
        report: called with the completed fraction of the work.

    Raises:
        ValueError: an error of `headwise.convert`; a file is not in the safetensors format; the
            target exists; or the source contradicts the config.
        OSError: the file system fails. No partial files are left after any error.
    """
    source_path, target_path = Path(source_path), Path(target_path)
    _check_target(source_path, target_path, overwrite)
    with ExitStack() as stack:
        if target_path.suffix != ".safetensors":
            stack.enter_context(only_writer(target_path))
            if holds_files(target_path) and not overwrite:
                raise ValueError(
                    f"{target_path} is not empty; name a new directory, or pass --overwrite"
                )
        tensors = _Stored(source_path, stack)
        config = ModelConfig.read_beside(source_path)
        options = num_kv_heads, bias, rotary_dim, qk_norm_eps
        plan_of = conversions(tensors.shapes, source, target, num_heads, options, config.layout)
        layers = [(layer, _as_configured(one, config.at(layer.prefix))) for layer, one in plan_of]
        call = str(layers[0][1]) if layers else f"convert(target={target!r})"
        tensors.weights = {name for layer, _ in layers for name in layer.names}
        stream = partial(converted, tensors.shapes, tensors.read, layers)
        done = {name: number / len(tensors.shapes) for number, name in enumerate(tensors.shapes, 1)}
        plan = []
        for origin, name, tensor in stream():
            plan.append(_PlannedTensor(name, tuple(tensor.shape), tensor.dtype))
            report(done[origin] / 2)
        _check_plan(plan, call)
        flow = stream()

        def following(planned: list[_PlannedTensor]) -> Iterator[Tensor]:
            for one, (origin, name, tensor) in zip(planned, flow, strict=False):
                assert name == one.name
                report(0.5 + done[origin] / 2)
                yield tensor

        if target_path.suffix == ".safetensors":
            folder, parts = target_path.parent, {target_path.name: plan}
        else:
            folder, parts = target_path, _shards(plan, shard_bytes)
        writers: dict[str, Callable[[Path], object]] = {
            name: partial(_write, planned=planned, tensors=following, metadata=tensors.metadata)
            for name, planned in parts.items()
        }
        total = sum(planned.bytes for planned in plan)
        if len(parts) > 1:
            places = {planned.name: name for name, part in parts.items() for planned in part}
            index = {"metadata": {"total_size": total}, "weight_map": places}
            writers[INDEX] = lambda path: path.write_text(json.dumps(index, indent=2) + "\n")
        write_whole(folder, writers, replace=overwrite)
    sources = " and ".join(dict.fromkeys(one.source for _, one in layers))
    paths = tuple(str(folder / name) for name in writers)
    return Converted(sources, target, len(layers), len(plan), total, paths)


class _Stored:
    """The tensors of one safetensors file or of shards, read on demand.

    Tensors named in `weights` must be finite; other tensors are not checked.
    """

    weights: Collection[str] = ()

    def __init__(self, path: Path, stack: ExitStack) -> None:
        from safetensors import SafetensorError, safe_open

        self.path = path
        self.metadata: dict[str, str] = {}
        self._files: dict[str, Any] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for file in _files_of(path):
            try:
                opened = stack.enter_context(safe_open(file, framework="pt"))
            except SafetensorError as error:
                raise ValueError(f"{file}: not a safetensors file, or damaged: {error}") from None
            self.metadata |= opened.metadata() or {}
            for name in opened.keys():  # noqa: SIM118 (not a dict)
                if name in self._files:
                    raise ValueError(f"{path}: two files contain {name}")
                self._files[name] = opened
                self.shapes[name] = tuple(opened.get_slice(name).get_shape())

    def read(self, name: str) -> Tensor:
        from safetensors import SafetensorError

        try:
            tensor = self._files[name].get_tensor(name)
        except SafetensorError as error:
            raise ValueError(f"{self.path}: {name} cannot be read: {error}") from None
        return check_values(tensor, f"{self.path}: {name}") if name in self.weights else tensor


def _files_of(path: Path) -> list[Path]:
    if path.is_file():
        if path.suffix != ".safetensors":
            raise ValueError(f"{path}: not a .safetensors file; only those are read")
        return [path]
    if not path.exists():
        raise ValueError(f"{path}: no such file or directory")
    return weight_files(path)


def _as_configured(conversion: Conversion, config: ModelConfig) -> Conversion:
    """Add the head counts, the rotation and the eps of the config beside the weights.

    Raises:
        ValueError: the config contradicts the source, the rotation differs between layers, or the
            target cannot store the norms.
    """
    if config.other_norms and conversion.new.holds("q_norm.weight"):
        norms = f"the norms of q and k {config.other_norms}"
        raise ValueError(f"{conversion}: according to {CONFIG}, {norms}")
    conversion = replace(
        conversion,
        num_heads=conversion.num_heads or config.num_heads,
        num_kv_heads=conversion.num_kv_heads or config.num_kv_heads,
    )
    twin = None if config.layout is None else LAYOUTS[config.layout].twin
    if twin is not None and conversion.source == twin[0]:
        raise ValueError(
            f"{conversion}: according to {CONFIG}, the layout is {config.layout!r}, whose "
            f"names and shapes are those of {conversion.source!r}; omit the source (--from)"
        )
    without_eps = conversion.old.holds("q_norm.weight") and not conversion.old.holds("q_norm.eps")
    if without_eps and conversion.qk_norm_eps is None:
        conversion = replace(conversion, qk_norm_eps=config.qk_norm_eps)
    if conversion.rotary_dim is not None:
        return conversion
    if conversion.moves and len(config.rotary_shares) > 1:
        shares = ", ".join(f"{share:g}" for share in sorted(config.rotary_shares))
        raise ValueError(
            f"{conversion}: the rotated features of a head move, and according to {CONFIG} "
            f"layers rotate different shares of a head ({shares}), which is not supported"
        )
    share = next(iter(config.rotary_shares), None)
    return replace(conversion, rotary_dim=config.rotary_dim, rotary_share=share)


def _check_plan(plan: list[_PlannedTensor], call: str) -> None:
    names = set()
    for planned in plan:
        if planned.name in names:
            raise ValueError(f"{call}: the state contains {planned.name!r} already")
        if planned.dtype not in _DTYPES:
            raise ValueError(f"{call}: {planned.name} is {planned.dtype}, which cannot be written")
        names.add(planned.name)


def _check_target(source: Path, target: Path, overwrite: bool) -> None:
    if os.path.realpath(source) == os.path.realpath(target):
        raise ValueError(f"{target} is also the source; name another target")
    if not target.parent.is_dir():
        raise ValueError(f"{target}: there is no folder {target.parent}; create it first")
    if target.suffix in _OTHER_FORMATS:
        raise ValueError(f"{target} must end in .safetensors")
    if target.suffix == ".safetensors":
        place_for(target)
        if target.exists() and not overwrite:
            raise ValueError(f"{target} exists already; --overwrite replaces it")
    elif target.exists() and not target.is_dir():
        raise ValueError(f"{target} is a file; name a directory, or a file ending in .safetensors")


def _shards(plan: list[_PlannedTensor], limit: int) -> dict[str, list[_PlannedTensor]]:
    """Return the tensors of each file, in order, by its name in Hugging Face's scheme."""
    parts: list[list[_PlannedTensor]] = [[]]
    size = 0
    for planned in plan:
        if parts[-1] and size + planned.bytes > limit:
            parts.append([])
            size = 0
        parts[-1].append(planned)
        size += planned.bytes
    if len(parts) == 1:
        return {WEIGHTS: parts[0]}
    return {
        f"model-{number:05}-of-{len(parts):05}.safetensors": part
        for number, part in enumerate(parts, 1)
    }


def _write(
    path: Path,
    *,
    planned: list[_PlannedTensor],
    tensors: Callable[[list[_PlannedTensor]], Iterator[Tensor]],
    metadata: Mapping[str, str],
) -> None:
    """Write a safetensors file tensor by tensor (`save_file` needs all of them in memory).

    The format is the length of the header in eight bytes, the header as JSON, then the bytes of the
    tensors.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    start = 0
    for one in planned:
        end = start + one.bytes
        header[one.name] = {
            "dtype": _DTYPES[one.dtype],
            "shape": list(one.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for tensor in filter(Tensor.numel, tensors(planned)):
            file.write(tensor.contiguous().flatten().view(torch.uint8).numpy().data)

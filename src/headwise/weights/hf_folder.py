"""Folders of models as Hugging Face lays them out: reading, checking and writing.

A folder holds `config.json`, the weights in `model.safetensors` (or in shards that
`model.safetensors.index.json` lists) and `tokenizer.json`. Whatever can be wrong with one is a
`FolderError` of one line that names the folder, what is wrong with it and what to do.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._io import only_writer, write_tensors, write_whole
from .._text import and_more, one_line
from .safetensors_file import FolderError, Stored, checked, headers

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
TOKENIZER = "tokenizer.json"
HEAD, EMBEDDING = "lm_head.weight", "transformer.wte.weight"

# Causal masks that old checkpoints carry as buffers; they are not weights.
_BUFFERS = re.compile(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)")


def read_config(folder: str | Path) -> dict[str, Any]:
    """What the folder's `config.json` says.

    Raises:
        FolderError: no such folder, no `config.json` in it, or no JSON object in that.
    """
    folder = Path(folder)
    if not folder.is_dir():
        kind = "is a file, and a folder was expected" if folder.exists() else "no such folder"
        raise FolderError(f"{folder}: {kind}; name one that holds {CONFIG} and {WEIGHTS}")
    return _read_json(folder / CONFIG)


def read_headers(folder: str | Path) -> dict[str, Stored]:
    """Where the folder's weights lie, by their `transformer.`-prefixed names; none is read.

    Raises:
        FolderError: weights are pickled, missing, truncated or stored twice.
    """
    found: dict[str, Stored] = {}
    for one in headers(weight_files(Path(folder))):
        known = one.name.startswith(("transformer.", "lm_head."))
        full = one.name if known else f"transformer.{one.name}"
        if _BUFFERS.fullmatch(full):
            continue
        if full in found:
            raise FolderError(f"{one.path}: {one.name} is stored twice, also in {found[full].path}")
        found[full] = one
    return found


def read_weights(
    folder: str | Path,
    stored: Mapping[str, Stored],
    shapes: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """The weights whose headers `read_headers` gave: exactly those in `shapes`.

    Names and shapes are compared before any tensor is read. If `shapes` has no head (it is tied
    to the embedding), a head that is stored all the same must be equal to the embedding.

    Raises:
        FolderError: weights are missing, extra, of another shape, no floats, or not finite.
    """
    folder, stored = Path(folder), dict(stored)
    twin = stored.pop(HEAD, None) if HEAD not in shapes else None
    _compare(folder, stored, shapes)
    weights = {
        name: checked(stored[name].read().to(dtype), f"{stored[name].path}: {name}")
        for name in shapes
    }
    if twin is not None and not torch.equal(twin.read().to(dtype), weights[EMBEDDING]):
        raise FolderError(
            f"{twin.path}: {HEAD} differs from {EMBEDDING}, but {CONFIG} ties them; "
            f'set "tie_word_embeddings": false if the head is its own'
        )
    return weights


def read_tokenizer(folder: str | Path) -> Tokenizer:
    """The folder's tokenizer.

    Raises:
        FolderError: there is no `tokenizer.json`, or it is damaged.
    """
    from tokenizers import Tokenizer

    path = Path(folder) / TOKENIZER
    if not path.is_file():
        raise FolderError(f"{folder}: holds no {TOKENIZER}; copy the model's tokenizer there")
    try:
        return Tokenizer.from_str(path.read_text("utf-8"))
    except Exception as error:  # the Rust library raises plain Exception
        raise FolderError(f"{path}: no tokenizer can be read, {one_line(error)}") from None


def write_folder(
    folder: str | Path,
    config: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    tokenizer: Tokenizer | None = None,
) -> None:
    """Write config, weights and tokenizer; each file appears whole or not at all.

    Raises:
        FolderError: the folder cannot be made or written.
    """
    folder = Path(folder)
    tensors = {name: tensor.detach().contiguous().cpu() for name, tensor in weights.items()}
    # `format` tells transformers that the tensors are PyTorch's.
    writers: dict[str, Callable[[Path], object]] = {
        CONFIG: lambda path: path.write_text(json.dumps(config, indent=2) + "\n"),
        WEIGHTS: lambda path: write_tensors(path, tensors, {"format": "pt"}),
    }
    if tokenizer is not None:
        text = tokenizer.to_str(pretty=True)
        writers[TOKENIZER] = lambda path: path.write_text(text, "utf-8")
    write_files(folder, writers)


def write_files(folder: Path, writers: Mapping[str, Callable[[Path], object]]) -> None:
    """Let each writer fill a temporary file, then put all of them in place.

    Raises:
        FolderError: the folder cannot be made or written; what was there before is untouched.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FolderError(f"{folder}: cannot be made, {error.strerror}") from None
    try:
        write_whole(folder, writers)
    except OSError as error:
        raise FolderError(f"{folder}: cannot be written, {one_line(error)}") from None


@contextmanager
def only_run(folder: Path) -> Iterator[None]:
    """Make `folder` and keep others from writing into it, as `only_writer` does.

    Raises:
        FolderError: another run is writing into it, or it cannot be made or written.
    """
    if folder.exists() and not folder.is_dir():
        raise FolderError(f"{folder}: is a file, and a folder was expected")
    with ExitStack() as stack:
        try:
            stack.enter_context(only_writer(folder))
        except BlockingIOError as error:
            raise FolderError(str(error)) from None
        except OSError as error:
            raise FolderError(f"{folder}: cannot be written, {error.strerror}") from None
        yield


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FolderError(f"{path.parent}: holds no {path.name}; is this a model's folder?")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise FolderError(f"{path}: no JSON can be read, {one_line(error)}") from None
    if not isinstance(value, dict):
        raise FolderError(f"{path}: holds {type(value).__name__}, and a JSON object was expected")
    return value


def weight_files(folder: Path, model_class: str = "GPT2LMHeadModel") -> list[Path]:
    """The folder's safetensors files: one, or the shards that its index lists.

    Args:
        model_class: of `transformers`, for how to convert pickled weights.

    Raises:
        FolderError: there are none, or one that is listed is not there.
    """
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if (folder / INDEX).is_file():
        files = _read_json(folder / INDEX).get("weight_map")
        if not isinstance(files, dict) or not files:
            raise FolderError(f"{folder / INDEX}: lists no weights under weight_map")
        shards = sorted({str(file) for file in files.values()})
        for shard in shards:
            if Path(shard).name != shard or not os.path.isfile(folder / shard):
                raise FolderError(f"{folder}: {INDEX} names {shard:.80}, which is not there")
        return [folder / shard for shard in shards]
    pickled = sorted([*folder.glob("pytorch_model*.bin"), *folder.glob("*.pt")])
    if pickled:
        target = shlex.quote(str(folder))
        code = (
            f"import sys; from transformers import {model_class} as M; "
            "M.from_pretrained(sys.argv[1]).save_pretrained(sys.argv[1])"
        )
        raise FolderError(
            f"{pickled[0]}: pickled weights can run code when opened and are not read; if you "
            f'trust them, convert them with: python -c "{code}" {target}'
        )
    raise FolderError(f"{folder}: holds no {WEIGHTS} and no {INDEX}")


def _compare(
    folder: Path, stored: Mapping[str, Stored], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    missing, extra = sorted(shapes.keys() - stored.keys()), sorted(stored.keys() - shapes.keys())
    if missing:
        raise FolderError(
            f"{folder}: {_list(missing)} missing from the weights, which {CONFIG} calls for"
        )
    if extra:
        names = _list([stored[name].name for name in extra])
        raise FolderError(
            f"{folder}: {names} in the weights, which a GPT-2 of this {CONFIG} has no place for"
        )
    for name, shape in shapes.items():
        held = stored[name]
        if held.shape != shape:
            raise FolderError(
                f"{held.path}: {held.name} has shape {list(held.shape)}, "
                f"and {CONFIG} calls for {list(shape)}"
            )
        if held.dtype not in ("F64", "F32", "F16", "BF16"):
            raise FolderError(f"{held.path}: {held.name} is stored as {held.dtype}, not as floats")


def _list(names: list[str]) -> str:
    return and_more(names) + (" are" if len(names) > 1 else " is")

"""Model folders in Hugging Face format: reading, checking and writing.

A folder holds `config.json`, the weights in `model.safetensors` (or in shards listed by
`model.safetensors.index.json`) and `tokenizer.json`. Every error is a one-line `FolderError`.
"""

from __future__ import annotations

import json
import math
import os
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .._io import only_writer, write_tensors, write_whole
from .._text import one_line

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
TOKENIZER = "tokenizer.json"

LARGEST_WEIGHT = 2.0**64
"""The limit on weights, whose square overflows float32; only flipped bits give larger values."""

SIZE_FACTOR = 4
"""The largest allowed ratio of the weights that a config needs to those in the files."""


class FolderError(ValueError):
    """A model folder that cannot be read or written."""


# ── reading ─────────────────────────────────────────────────────────────────────────────────────


def read_config(folder: str | Path) -> dict[str, Any]:
    """Read the folder's `config.json`.

    Raises:
        FolderError: the directory or `config.json` is missing, or the file is not a JSON object.
    """
    folder = Path(folder)
    if not folder.is_dir():
        kind = "is a file, not a directory" if folder.exists() else "does not exist"
        raise FolderError(f"{folder} {kind}; name a directory with {CONFIG} and {WEIGHTS}")
    return _read_json(folder / CONFIG)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FolderError(f"{path.parent} does not contain {path.name}; is this a model directory?")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise FolderError(f"{path}: not valid JSON: {one_line(error)}") from None
    if not isinstance(value, dict):
        raise FolderError(f"{path} must contain a JSON object, got {type(value).__name__}")
    return value


def read_tokenizer(folder: str | Path) -> Tokenizer:
    """Read the folder's tokenizer.

    Raises:
        FolderError: there is no `tokenizer.json`, or it is damaged.
    """
    from tokenizers import Tokenizer

    path = Path(folder) / TOKENIZER
    if not path.is_file():
        raise FolderError(f"{folder} does not contain {TOKENIZER}; copy the model's there")
    try:
        return Tokenizer.from_str(path.read_text("utf-8"))
    except Exception as error:  # the Rust library raises plain Exception
        raise FolderError(f"{path}: the tokenizer cannot be read: {one_line(error)}") from None


def weight_files(folder: Path, model_class: str = "GPT2LMHeadModel") -> list[Path]:
    """Return the folder's safetensors files: one, or the shards that its index lists.

    Args:
        model_class: the class of `transformers` that converts pickled weights.

    Raises:
        FolderError: there are none, or a listed file is missing.
    """
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if (folder / INDEX).is_file():
        files = _read_json(folder / INDEX).get("weight_map")
        if not isinstance(files, dict) or not files:
            raise FolderError(f"{folder / INDEX} lists no weights under weight_map")
        shards = sorted({str(file) for file in files.values()})
        for shard in shards:
            if Path(shard).name != shard or not os.path.isfile(folder / shard):
                raise FolderError(f"{folder}: {INDEX} lists {shard:.80}, which is missing")
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
    raise FolderError(f"{folder} contains neither {WEIGHTS} nor {INDEX}")


@dataclass(frozen=True)
class StoredTensor:
    """The entry of a tensor in the header of a safetensors file, without its values."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    def read(self) -> Tensor:
        from safetensors import safe_open

        with safe_open(self.path, framework="pt") as file:
            return file.get_tensor(self.name)


def read_headers(files: Iterable[Path]) -> Iterator[StoredTensor]:
    """Yield every tensor of safetensors files from their headers alone.

    Raises:
        FolderError: a file is damaged or not a safetensors file.
    """
    from safetensors import SafetensorError, safe_open

    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a dict
                    part = file.get_slice(name)
                    yield StoredTensor(path, name, tuple(part.get_shape()), part.get_dtype())
        except (SafetensorError, OSError) as error:
            raise FolderError(
                f"{path}: damaged or truncated ({one_line(error)}); copy or download it again"
            ) from None


def check_values(tensor: Tensor, where: str) -> Tensor:
    """Return the tensor, if its values are plausible weights.

    Raises:
        FolderError: a value is NaN, infinite, or too large for a weight.
    """
    if not tensor.is_floating_point() or not tensor.numel() or tensor.is_meta:
        return tensor
    values = tensor.detach()
    values = values if values.dtype.itemsize > 1 else values.float()
    low, high = values.aminmax()
    if float(low) > -LARGEST_WEIGHT and float(high) < LARGEST_WEIGHT:  # false for NaN
        return tensor
    wrong = ~(values.abs() < LARGEST_WEIGHT)
    first = float(values[wrong][0])
    raise FolderError(
        f"{where} contains {first:.3g}, which is not a valid weight ({int(wrong.sum()):,} of "
        f"{values.numel():,} values): damaged, or training diverged; copy or download it again"
    )


def check_size(called: int, held: int, where: str) -> None:
    """Compare the number of weights that a config needs with that in the files, before allocation.

    Raises:
        FolderError: the config needs far more weights than the files contain.
    """
    if called > SIZE_FACTOR * held:
        raise FolderError(
            f"{where}: its sizes require {called:,} weights, but the files contain {held:,}"
        )


# ── writing ─────────────────────────────────────────────────────────────────────────────────────


def write_folder(
    folder: str | Path,
    config: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    tokenizer: Tokenizer | None = None,
) -> None:
    """Write config, weights and tokenizer; each file is written completely or not at all.

    Raises:
        FolderError: the folder cannot be created or written.
    """
    tensors = {name: tensor.detach().contiguous().cpu() for name, tensor in weights.items()}
    # transformers requires `format`.
    writers: dict[str, Callable[[Path], object]] = {
        CONFIG: lambda path: path.write_text(json.dumps(config, indent=2) + "\n"),
        WEIGHTS: lambda path: write_tensors(path, tensors, {"format": "pt"}),
    }
    if tokenizer is not None:
        text = tokenizer.to_str(pretty=True)
        writers[TOKENIZER] = lambda path: path.write_text(text, "utf-8")
    write_files(Path(folder), writers)


def write_files(folder: Path, writers: Mapping[str, Callable[[Path], object]]) -> None:
    """Call each writer with a temporary file, then move all files to their places.

    Raises:
        FolderError: the folder cannot be created or written; existing files are then unchanged.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FolderError(f"{folder} cannot be created: {error.strerror}") from None
    try:
        write_whole(folder, writers)
    except OSError as error:
        raise FolderError(f"{folder} cannot be written: {one_line(error)}") from None


@contextmanager
def only_run(folder: Path) -> Iterator[None]:
    """Create `folder` and lock it against other writers, as `only_writer` does.

    Raises:
        FolderError: another run is writing into it, or it cannot be created or written.
    """
    if folder.exists() and not folder.is_dir():
        raise FolderError(f"{folder} is a file, not a directory")
    with ExitStack() as stack:
        try:
            stack.enter_context(only_writer(folder))
        except BlockingIOError as error:
            raise FolderError(str(error)) from None
        except OSError as error:
            raise FolderError(f"{folder} cannot be written: {error.strerror}") from None
        yield

"""Read model folders: GPT-2 without `transformers`, any other architecture with it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from torch import nn

from .._text import and_more
from ..models import gpt
from ..weights.folders import (
    CONFIG,
    FolderError,
    check_values,
    read_config,
    read_headers,
    weight_files,
)

OURS = (["GPT2LMHeadModel"], ["GPT2Model"])

_ON_THE_HUB = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?", re.ASCII)
_SNAPSHOT = re.compile(r"models--(.+)")
_CARD = "README.md"
_COUNTED = re.compile(r"(^|_)(layers?|depths?|blocks|stages|experts|labels)$")
MOST_LABELS = 1_000_000  # labels may have no weights: a model can be stored without its head
LONGEST_NAME = 60  # the longest heading of a model card, in characters, that is used as a name


def folder_of(model: str | Path) -> Path:
    """Return the folder at a path, or else the newest snapshot of the model with that name in
    Hugging Face's local cache. Nothing is downloaded.

    Raises:
        FolderError: neither exists; the message names the command that downloads the model.
    """
    path = Path(model)
    name = str(model)
    if path.exists() or not _ON_THE_HUB.fullmatch(name):
        return path  # reading it reports any problem
    cache = _cache()
    owned = [cache / f"models--{name.replace('/', '--')}"]
    if "/" not in name:  # bert-base-uncased is the old name of google-bert/bert-base-uncased
        owned += sorted(cache.glob(f"models--*--{name}"))
    found = [snapshot for one in owned if (snapshot := _snapshot(one)) is not None]
    if not found:
        raise FolderError(
            f"{name}: no such folder, and Hugging Face's local cache ({cache}) has no model of "
            f"that name; download it with: hf download {name}"
        )
    return found[0]


def _cache() -> Path:
    """Return Hugging Face's cache folder, as set by its documented environment variables."""
    if hub := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(hub).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("HF_HOME") or f"{base}/huggingface").expanduser() / "hub"


def _snapshot(repository: Path) -> Path | None:
    """Return the snapshot of `main`, or the newest one; None if none has a config."""
    main = repository / "refs" / "main"
    named = [repository / "snapshots" / main.read_text("ascii").strip()] if main.is_file() else []
    others = sorted(
        repository.glob("snapshots/*"), key=lambda one: one.stat().st_mtime, reverse=True
    )
    return next((one for one in (*named, *others) if (one / CONFIG).exists()), None)


def name_of(folder: str | Path) -> str:
    """Return the name of a folder's model: its name on the Hub if the folder is in Hugging Face's
    cache, else the heading of its model card, else the folder's name.

    >>> name_of("/hub/models--google-bert--bert-base-uncased/snapshots/86b5e093")
    'google-bert/bert-base-uncased'
    """
    path = Path(os.path.abspath(folder))
    if path.parent.name == "snapshots" and (found := _SNAPSHOT.fullmatch(path.parents[1].name)):
        return found[1].replace("--", "/", 1)
    return _heading(path / _CARD) or Path(os.path.realpath(folder)).name


def _heading(card: Path) -> str | None:
    """Return the first heading of a model card if it can be a model's name."""
    try:
        text = card.read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    body = re.sub(r"\A---\n.*?\n---\n", "", text, flags=re.DOTALL)
    found = re.search(r"^# +(.+?)[ #]*$", body, re.MULTILINE)
    if found is None:
        return None
    name = re.sub(r"^model card (for|of) +", "", found[1].strip(), flags=re.IGNORECASE)
    named = name.isprintable() and len(name) <= LONGEST_NAME and name.lower() != "model card"
    return name if named else None


def load_folder(
    folder: str | Path, *, dtype: torch.dtype | None = None, device: str = "cpu"
) -> tuple[nn.Module, Any]:
    """Load a model and its tokenizer, or its image processor, from a Hugging Face folder.

    The class is given by `architectures` in `config.json`. Weights are read from safetensors only,
    and no code in the folder is run.

    Args:
        dtype: the dtype of the weights. Default: float32.

    Raises:
        FolderError: the folder cannot be read; the message is one line.
    """
    folder = Path(folder)
    config = read_config(folder)
    named = config.get("architectures") or [None]
    dtype = torch.float32 if dtype is None else dtype
    if config.get("model_type") == "gpt2" and named in ([None], *OURS):
        model, tokenizer = gpt.load(folder)
        return model.to(device, dtype), tokenizer
    name = named[0] if isinstance(named, list) else named
    if not (name is None or (isinstance(name, str) and name.isidentifier())):
        raise FolderError(
            f"{folder / CONFIG}: architectures must be a list of class names, got {named!r}"
        )
    numbers = sum(one.size for one in read_headers(weight_files(folder, name or "AutoModel")))
    _check_counts(config, numbers, folder / CONFIG)
    transformers = _transformers(folder)
    with _one_line(folder), _quiet(transformers):
        model_class = _class_of(transformers, folder, config, name)
        model, loading_info = model_class.from_pretrained(
            folder,
            dtype=dtype,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
        _check_weights(folder, loading_info)
        for weight, values in model.named_parameters():
            check_values(values, f"{folder}: {weight}")
        reader = _reader(transformers, folder, images=model.main_input_name == "pixel_values")
    return model.to(device).eval(), reader


def _check_counts(config: Any, numbers: int, where: Path) -> None:
    """Raise FolderError if a config has more layers or experts than the weights have numbers, or
    far more labels: `transformers` creates a list entry for each while it reads the config.
    """
    entries = config.items() if isinstance(config, dict) else enumerate(config)
    for key, value in entries:
        if isinstance(value, dict | list):
            _check_counts(value, numbers, where)
        elif isinstance(value, int) and (found := _COUNTED.search(str(key))):
            most = max(numbers, MOST_LABELS) if found[2] == "labels" else numbers
            if value > most:
                raise FolderError(
                    f"{where}: {key}={value:,}, but the weights have only {numbers:,} numbers"
                )


def _reader(transformers: Any, folder: Path, *, images: bool) -> Any:
    """Load the folder's image processor or its tokenizer."""
    kind, what = transformers.AutoTokenizer, "tokenizer"
    files = ("tokenizer.json", "*vocab*", "*.model")
    if images:
        kind, what = transformers.AutoImageProcessor, "image processor"
        files = ("preprocessor_config.json", "processor_config.json")
    missing = FolderError(f"{folder}: contains no {what}; copy the model's {files[0]} there")
    try:
        reader = kind.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception:
        if any(any(folder.glob(pattern)) for pattern in files):
            raise
        raise missing from None
    if not images and len(reader) <= len(reader.all_special_ids):
        raise missing
    return reader


def _transformers(folder: Path) -> Any:
    try:
        import transformers
    except ModuleNotFoundError:
        raise FolderError(
            f"{folder}: reading models other than GPT-2 requires the transformers package: "
            f"pip install 'headwise[hf]'"
        ) from None
    return transformers


def _class_of(transformers: Any, folder: Path, config: dict[str, Any], name: str | None) -> Any:
    if name is None:
        return transformers.AutoModel
    found = getattr(transformers, name, None)
    if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
        return found
    own = "; code in a model's folder is not run" if "auto_map" in config else ""
    raise FolderError(
        f"{folder / CONFIG}: architectures names {name}, which is not a model of transformers "
        f"{transformers.__version__}{own}"
    )


def _check_weights(folder: Path, loading_info: dict[str, Any]) -> None:
    """Raise FolderError for missing or mismatched weights, which would be initialized at random.

    Poolers are exempt: they come after the attention, and base models are often stored without one.
    """
    missing = sorted(name for name in loading_info["missing_keys"] if "pooler" not in name)
    reshaped = sorted(str(one[0]) for one in loading_info.get("mismatched_keys", ()))
    for names, fault in ((missing, "missing from the weights"), (reshaped, "of another shape")):
        if names:
            raise FolderError(f"{folder}: {and_more(names)}: {fault}, but required by {CONFIG}")


@contextmanager
def _one_line(folder: Path) -> Iterator[None]:
    """Re-raise errors of `transformers` as a FolderError with a one-line message."""
    try:
        yield
    except FolderError:
        raise
    except Exception as error:  # damaged folders cause errors of many types
        message = shorten(str(error), 300, placeholder=" …") or type(error).__name__
        raise FolderError(f"{folder}: transformers cannot read it ({message})") from None


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Suppress progress bars and warnings of `transformers`."""
    logging = transformers.utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()

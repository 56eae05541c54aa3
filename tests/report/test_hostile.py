"""Files that are damaged or made to harm: each is refused in one line, before it takes memory."""

from __future__ import annotations

import base64
import copy
import gzip
import json
import os
import re
import shutil
import struct
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import headwise as hw
from headwise.capture.captured import Watched
from headwise.cli.main import main
from headwise.models.gpt import GPT, FolderError
from headwise.models.run import TrainConfig
from headwise.models.training import train
from headwise.report.schema import Look, LookFileError, load
from headwise.weights.folders import CONFIG, INDEX, TOKENIZER, WEIGHTS
from looks import decoder

CHECKPOINT = "checkpoint.safetensors"
HUGE = 10**12
EMBEDDING = "transformer.wte.weight"
Spoil = Callable[[Path], object]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of two steps in `good`, and its text."""
    folder = tmp_path_factory.mktemp("hostile")
    text = folder / "text.txt"
    text.write_text("".join(f"{n} times {n} is {n * n}\n" for n in range(50)))
    sizes = {"context": 13, "layers": 2, "heads": 3, "width": 15, "vocab": 263}
    config = TrainConfig((str(text),), steps=4, batch=2, **sizes)  # type: ignore[arg-type]
    train(folder / "good", config, stop_after=2)
    return folder


# ── how a folder is spoilt ──────────────────────────────────────────────────────────────────────


def _put(name: str, content: bytes) -> Spoil:
    return lambda folder: (folder / name).write_bytes(content)


def _file(header: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header + data


def _header(change: Callable[[dict[str, Any]], object]) -> Spoil:
    """Another header before the same data."""

    def spoil(folder: Path) -> None:
        content = (folder / WEIGHTS).read_bytes()
        (size,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + size])
        change(header)
        (folder / WEIGHTS).write_bytes(_file(json.dumps(header).encode(), content[8 + size :]))

    return spoil


def _weight(name: str, value: float) -> Spoil:
    """One number of a tensor is another."""

    def spoil(folder: Path) -> None:
        weights = load_file(folder / WEIGHTS)
        weights[name].view(-1)[3] = value
        save_file(weights, folder / WEIGHTS, {"format": "pt"})

    return spoil


def _config(**changes: object) -> Spoil:
    def spoil(folder: Path) -> None:
        config = json.loads((folder / CONFIG).read_text())
        (folder / CONFIG).write_text(json.dumps(config | changes))

    return spoil


def _index(index: object) -> Spoil:
    """Shards that an index lists, in place of one file."""

    def spoil(folder: Path) -> None:
        (folder / WEIGHTS).rename(folder / "a.safetensors")
        (folder / INDEX).write_text(index if isinstance(index, str) else json.dumps(index))

    return spoil


def _saved(change: Callable[[dict[str, Tensor], dict[str, str]], object]) -> Spoil:
    """Another checkpoint."""

    def spoil(folder: Path) -> None:
        with safe_open(folder / CHECKPOINT, "pt") as file:
            header = file.metadata()
        tensors = load_file(folder / CHECKPOINT)
        change(tensors, header)
        save_file(tensors, folder / CHECKPOINT, header)

    return spoil


def _settings(**changes: object) -> Spoil:
    def change(tensors: object, header: dict[str, str]) -> None:
        header["settings"] = json.dumps(json.loads(header["settings"]) | changes)

    return _saved(change)


def _tokenizer(vocab: dict[str, int]) -> Spoil:
    made = {"version": "1.0", "model": {"type": "BPE", "vocab": vocab, "merges": []}}
    return _put(TOKENIZER, json.dumps(made).encode())


def _no_file(name: str, kind: str) -> Spoil:
    """A folder, a pipe or a symlink to itself in the place of a file."""

    def spoil(folder: Path) -> None:
        (folder / name).unlink()
        make = {"folder": os.mkdir, "pipe": os.mkfifo, "loop": lambda path: os.symlink(path, path)}
        make[kind](folder / name)

    return spoil


DEEP = b"[" * 100_000
LAYER = "weight.transformer.h.0.ln_1.weight"
ATTENTION = "transformer.h.0.attn.c_attn.weight"
ESCAPE = "\x1b[31m\u202e"

DAMAGED: dict[str, tuple[Spoil, str]] = {
    "empty": (_put(WEIGHTS, b""), "damaged"),
    "cut in its length": (_put(WEIGHTS, b"12345"), "damaged"),
    "header of 2^63 bytes": (_put(WEIGHTS, struct.pack("<Q", 2**63) + b"{}"), "damaged"),
    "header of a gigabyte": (_put(WEIGHTS, struct.pack("<Q", 10**9) + b"{}"), "damaged"),
    "header of nothing": (_put(WEIGHTS, struct.pack("<Q", 0)), "damaged"),
    "header that is no JSON": (_put(WEIGHTS, _file(b"nothing")), "damaged"),
    "header of a list": (_put(WEIGHTS, _file(b"[1]")), "damaged"),
    "nested header": (_put(WEIGHTS, _file(b'{"a":' * 100_000)), "damaged"),
    "overlapping": (
        _header(lambda h: h["transformer.wpe.weight"].update(data_offsets=[0, 780])),
        "damaged",
    ),
    "too small a shape": (_header(lambda h: h[EMBEDDING].update(shape=[1, 15])), "damaged"),
    "negative shape": (_header(lambda h: h[EMBEDDING].update(shape=[-263, -15])), "damaged"),
    "beyond the end": (
        _header(lambda h: h[EMBEDDING].update(data_offsets=[0, HUGE])),
        "damaged",
    ),
    "unknown dtype": (_header(lambda h: h[EMBEDDING].update(dtype="F31")), "damaged"),
    "too long": (lambda folder: os.truncate(folder / WEIGHTS, HUGE), "damaged"),
    "not a number": (_weight(ATTENTION, float("nan")), f"{ATTENTION} contains nan"),
    "infinity": (_weight(ATTENTION, float("inf")), f"{ATTENTION} contains inf"),
    "a flipped bit": (_weight(ATTENTION, -3e38), f"{ATTENTION} contains -3e+38"),
    **{
        f"weights: {kind}": (_no_file(WEIGHTS, kind), "contains neither model.safetensors")
        for kind in ("folder", "pipe", "loop")
    },
    "index of nothing": (_index({}), "lists no weights"),
    "index of a list": (_index([]), "must contain a JSON object"),
    "nested index": (_index("[" * 100_000), "not valid JSON"),
    "index outside": (_index({"weight_map": {"a": "../good/x"}}), "which is missing"),
    "index of a number": (_index({"weight_map": {"a": 5}}), "which is missing"),
    "index of an escape": (_index({"weight_map": {"a": ESCAPE}}), "lists \\x1b[31m\\u202e, which"),
    "index of a surrogate": (_index({"weight_map": {"a": "\ud800"}}), "lists \\ud800, which"),
    "index of a long name": (_index({"weight_map": {"a": "x" * 5000}}), "which is missing"),
}
"""Weights, which `look`, `generate` and `convert` read."""

CONFIGS: dict[str, tuple[Spoil, str]] = {
    "layers": (_config(n_layer=HUGE), "sizes require 2,895,000,000,004,170 weights, but the"),
    "a million layers": (_config(n_layer=10**6), "its sizes require"),
    "width": (_config(n_embd=HUGE, n_head=1), "its sizes require"),
    "width of thirty digits": (_config(n_embd=3 * 10**30), "its sizes require"),
    "vocabulary": (_config(vocab_size=HUGE), "its sizes require"),
    "positions": (_config(n_positions=HUGE), "its sizes require"),
    "feed-forward": (_config(n_inner=HUGE), "its sizes require"),
    "twice the positions": (
        _config(n_positions=26),
        "has shape [13, 15], but config.json requires",
    ),
    "heads": (_config(n_head=HUGE), "must be a multiple"),
    "fewer than no layers": (_config(n_layer=-1), "at least 1"),
    "nested config": (_put(CONFIG, DEEP), "not valid JSON"),
    "config of 5,000 digits": (_put(CONFIG, b'{"n_layer":' + b"9" * 5000 + b"}"), "not valid JSON"),
    "config of another alphabet": (_put(CONFIG, b'{"a":"\xff"}'), "not valid JSON"),
    "config of a list": (_put(CONFIG, b"[]"), "must contain a JSON object"),
    "empty config": (_put(CONFIG, b""), "not valid JSON"),
    "infinite": (_config(layer_norm_epsilon=float("inf")), "between 0 and 1"),
    "escape": (
        _config(activation_function=ESCAPE),
        "got '\\x1b[31m\\u202e'",
    ),
    **{
        f"config: {kind}": (_no_file(CONFIG, kind), "does not contain config")
        for kind in ("pipe", "loop")
    },
    "empty tokenizer": (_put(TOKENIZER, b""), "the tokenizer cannot be read"),
    "tokenizer of a list": (_put(TOKENIZER, b"[]"), "the tokenizer cannot be read"),
    "nested tokenizer": (_put(TOKENIZER, DEEP), "the tokenizer cannot be read"),
    "tokenizer of another alphabet": (_put(TOKENIZER, b"\xff"), "the tokenizer cannot be read"),
    "tokenizer: pipe": (_no_file(TOKENIZER, "pipe"), "does not contain tokenizer.json"),
    "tokens that the model lacks": (_tokenizer({"7": 10**9}), "1000000000"),
    "negative token": (_tokenizer({"7": -1}), "the tokenizer cannot be read"),
}
"""What `look` and `generate` read besides."""

RUNS: dict[str, tuple[Spoil, str]] = {
    "no checkpoint": (lambda folder: (folder / CHECKPOINT).unlink(), "no run to resume"),
    "a model for one": (lambda f: shutil.copy(f / WEIGHTS, f / CHECKPOINT), "damaged"),
    "checkpoint: pipe": (_no_file(CHECKPOINT, "pipe"), "no run to resume"),
    "step": (_saved(lambda t, h: h.update(step="x")), "damaged or truncated"),
    "step below 0": (_saved(lambda t, h: h.update(step="-3")), "damaged or truncated"),
    "settings of a list": (_saved(lambda t, h: h.update(settings="[]")), "damaged"),
    "nested settings": (_saved(lambda t, h: h.update(settings=DEEP.decode())), "damaged"),
    "layers": (_settings(layers=2**31 - 1), "its sizes require"),
    "more layers": (_settings(layers=HUGE), "layers must be at most 2147483647, got 1000000000000"),
    "context": (_settings(context=10**9), "its sizes require"),
    "batch": (_settings(batch=10**30), "must be at most 2147483647"),
    "texts": (_settings(texts=5), "texts must be a list of files, got 5"),
    "rate": (_settings(lr=None), "lr must be a float, got None"),
    "seed": (_settings(seed="a"), "seed must be a whole number, got 'a'"),
    "device": (_settings(device="meta"), "device='meta' has no values"),
    "a missing tensor": (_saved(lambda t, h: t.pop(LAYER)), f"{LAYER} is missing"),
    "a missing moment": (
        _saved(lambda t, h: t.pop("exp_avg.transformer.ln_f.bias")),
        "exp_avg.transformer.ln_f.bias is missing",
    ),
    "one tensor too many": (
        _saved(lambda t, h: t.update(x=torch.ones(1))),
        "x is not a tensor of the model",
    ),
    "one number for fifteen": (
        _saved(lambda t, h: t.update({LAYER: torch.ones(1)})),
        "is torch.float32 of [1], but its settings require torch.float32 of [15]",
    ),
    "another dtype": (_saved(lambda t, h: t.update({LAYER: t[LAYER].half()})), "is torch.float16"),
    "not a number": (
        _saved(lambda t, h: t.update({LAYER: t[LAYER] * float("nan")})),
        f"{LAYER} contains nan",
    ),
    "no place for the weights": (_no_file(WEIGHTS, "pipe"), "only a file can be replaced"),
}
"""What a run is resumed from."""


@pytest.fixture
def spoilt(place: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(place / "good", folder)
    return folder


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line of a call that exits with 2, prints nothing else and takes no time."""
    capsys.readouterr()
    before = time.process_time()
    assert main([str(argument) for argument in arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("headwise: ")
    assert err.endswith("\n")
    assert err[:-1].isprintable(), err
    assert time.process_time() - before < 60  # building 10^12 layers takes longer
    return err


@pytest.mark.parametrize(("spoil", "says"), DAMAGED.values(), ids=DAMAGED)
def test_damaged_weights(
    place: Path, spoilt: Path, spoil: Spoil, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(spoilt)
    before = sorted(spoilt.parent.iterdir()), sorted(spoilt.iterdir())
    to = spoilt.parent / "out.safetensors"
    for call in (
        ("look", "--model", spoilt, "--text", place / "text.txt", "--json"),
        ("generate", "7", "--model", spoilt, "--tokens", 2),
        ("convert", spoilt, to, "--to", "headwise", "--heads", 3),
        ("convert", spoilt, to.with_suffix(""), "--to", "headwise", "--heads", 3),
    ):
        assert says in refused(capsys, *call)
        assert (sorted(spoilt.parent.iterdir()), sorted(spoilt.iterdir())) == before


@pytest.mark.parametrize(("spoil", "says"), CONFIGS.values(), ids=CONFIGS)
def test_hostile_configs_and_tokenizers(
    place: Path, spoilt: Path, spoil: Spoil, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(spoilt)
    look = ("look", "--model", spoilt, "--text", place / "text.txt", "--json")
    assert says in refused(capsys, *look)
    assert says in refused(capsys, "generate", "7", "--model", spoilt)


@pytest.mark.parametrize(("spoil", "says"), RUNS.values(), ids=RUNS)
def test_hostile_checkpoints(
    spoilt: Path, spoil: Spoil, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(spoilt)
    before = sorted(spoilt.iterdir())
    assert says in refused(capsys, "train", "--resume", "--out", spoilt)
    assert sorted(spoilt.iterdir()) == before


def test_a_config_that_is_a_pipe_does_not_stop_a_conversion(spoilt: Path) -> None:
    _no_file(CONFIG, "pipe")(spoilt)
    to = spoilt.parent / "out.safetensors"
    assert main(["convert", str(spoilt), str(to), "--to", "headwise", "--heads", "3"]) == 0


def test_weights_that_overflow_on_the_way_are_named(spoilt: Path) -> None:
    weights = {name: tensor.double() for name, tensor in load_file(spoilt / WEIGHTS).items()}
    weights[ATTENTION][0, 0] = 1e6
    save_file(weights, spoilt / WEIGHTS)
    assert GPT.from_pretrained(spoilt)
    with pytest.raises(FolderError, match=f"{ATTENTION} contains inf, which is not a valid weight"):
        GPT.from_pretrained(spoilt, dtype=torch.float16)


def test_not_enough_memory_is_one_line(
    place: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # In PyTorch's own words, and without filling this machine.
    monkeypatch.setattr(GPT, "forward", lambda *inputs, **options: torch.empty(2**60))
    sizes = ("--context", 5, "--layers", 1, "--heads", 3, "--width", 15, "--vocab", 263)
    call = ("train", place / "text.txt", "--out", tmp_path / "model", *sizes)
    assert "not enough memory" in refused(capsys, *call, "--steps", 2, "--batch", 2)


# ── results of earlier looks and watches ────────────────────────────────────────────────────────


def look_with(change: Callable[[dict[str, Any]], object]) -> str:
    made = json.loads(decoder(1, 2, 5).to_json())
    change(made)
    return json.dumps(made)


def page_with(content: bytes) -> str:
    packed = base64.b64encode(gzip.compress(content)).decode()
    return f'<script type="text/plain" id="results">{packed}</script>'


LOOKS = {
    "nested": ("[" * 100_000, "recursion"),
    "rows of numbers": (look_with(lambda m: m.update(rows=[1, 2])), "'int' object"),
    "a text for a figure": (
        look_with(lambda m: m["rows"][0].update(entropy="x")),
        "entropy is str, expected int | float | None",
    ),
    "a list for a head": (look_with(lambda m: m["rows"][0].update(head=[1])), "head is list"),
    "a text for a label": (look_with(lambda m: m["rows"][0].update(labels=["x"])), "indices"),
    "facts": (look_with(lambda m: m.update(provenance=5)), "provenance is int"),
    "a list for a name": (look_with(lambda m: m["provenance"].update(model=[])), "model is list"),
    "columns": (look_with(lambda m: m.update(columns=5)), "columns is int"),
    "a number for a token": (look_with(lambda m: m["streams"][0].update(tokens=[1] * 5)), "token"),
    "the stream before the first": (
        look_with(lambda m: m["layers"][0].update(queries=-1)),
        "negative stream index",
    ),
    "likeness": (
        look_with(lambda m: m.update(similarity={"heads": HUGE} | m["layers"][0]["maps"])),
        "not a look that headwise saved",
    ),
    "nested page": (page_with(b"[" * 100_000), "recursion"),
    "page of a number": (page_with(b"5"), "is int, expected list"),
    "page of nothing": (page_with(b"[null]"), "does not begin with the format"),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("text", "says"), LOOKS.values(), ids=LOOKS)
def test_hostile_looks(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "look.json"
    path.write_text(text)
    with pytest.raises(LookFileError, match=re.escape(says)) as refused:
        load(path)
    assert str(refused.value).startswith(f"{path}: ")
    assert "\n" not in str(refused.value)


def test_names_in_a_look_are_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = decoder(1, 2, 5)
    name = f"{ESCAPE}\n\udcff"
    rows = [row | {"labels": [{"label": name}], "module": name} for row in made.rows]
    layers = [replace(layer, name=name) for layer in made.layers]
    seen = Look(rows, layers, made.streams, made.provenance | {"model": name}, made.columns)
    one, page = seen.save(tmp_path / "one.json"), tmp_path / "page.html"
    again = load(one)
    assert again.provenance["model"] == again.layers[0].name == name
    assert main(["look", "--compare", str(one), str(one), "--out", str(page)]) == 0
    out, err = capsys.readouterr()
    assert "\\x1b[31m\\u202e\\n\\udcff on " in out
    assert all(letter.isprintable() or letter == "\n" for letter in out + err)
    assert ESCAPE not in page.read_text("utf-8")


def seen_with(change: Callable[[dict[str, Any], dict[str, Tensor]], object], path: Path) -> None:
    """A file of what was seen, changed."""
    with safe_open(path, "pt") as file:
        header = file.metadata()
    tensors, content = load_file(path), json.loads(header["content"])
    changed = change(content, tensors)
    header["content"] = changed if isinstance(changed, str) else json.dumps(content)
    save_file(tensors, path, header)


def _call(content: dict[str, Any]) -> dict[str, Any]:
    return content["modules"][0]["calls"][0]["entropy"]


SEEN: dict[str, Callable[[dict[str, Any], dict[str, Tensor]], object]] = {
    "nested": lambda content, tensors: "[" * 100_000,
    "modules": lambda content, tensors: content.update(modules=5),
    "rows": lambda content, tensors: _call(content).update(rows=5),
    "rows that are figures": lambda content, tensors: _call(content).update(rows={"tensor": 0}),
    "rows of other sizes": lambda content, tensors: tensors.update(
        {"1": torch.ones(9, 9, 9, dtype=torch.bool)}
    ),
    "one figure": lambda content, tensors: tensors.update({"0": torch.ones(())}),
    "no tensor": lambda content, tensors: _call(content).update(values={"tensor": 99}),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("change", SEEN.values(), ids=SEEN)
def test_hostile_files_of_what_was_seen(
    change: Callable[[dict[str, Any], dict[str, Tensor]], object], tmp_path: Path
) -> None:
    layer, path = hw.MultiHeadAttention(24, num_heads=3), tmp_path / "seen"
    with torch.no_grad(), hw.watch(layer, hw.Entropy()) as seen:
        layer(torch.randn(2, 7, 24), mask=hw.Causal())
    seen.save(path)
    seen_with(lambda content, tensors: None, path)
    assert Watched.load(path).table() == seen.table()
    seen_with(copy.copy(change), path)
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))}: its header is damaged"):
        Watched.load(path)

"""The GPT against `transformers`, and every way a folder can be wrong."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from headwise import Causal, Padding
from headwise.layers.kv_cache import KVCache
from headwise.models.gpt import GPT, FolderError, GPT2Attention, GPTConfig, load
from headwise.weights.folders import write_files

SIZES: dict[str, Any] = {
    "vocab_size": 53,
    "n_positions": 29,
    "n_embd": 15,
    "n_layer": 2,
    "n_head": 3,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "n_inner": {"n_inner": 17},
    "gelu": {"activation_function": "gelu"},
    "relu": {"activation_function": "relu"},
    "silu": {"activation_function": "silu"},
    "quick_gelu": {"activation_function": "quick_gelu"},
    "gelu_fast": {"activation_function": "gelu_fast"},
    "tanh": {"activation_function": "tanh"},
    "unscaled": {"scale_attn_weights": False},
    "inverse layer": {"scale_attn_by_inverse_layer_idx": True, "n_layer": 3},
    "upcast": {"reorder_and_upcast_attn": True},
    "epsilon": {"layer_norm_epsilon": 0.1},
    "untied": {"tie_word_embeddings": False},
    "one head": {"n_head": 1},
}


def reference(**changes: Any) -> Any:
    """Hugging Face's model with every weight, biases and norms too, at random."""
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**{**SIZES, **changes})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sound folder, as `transformers` writes it."""
    reference().save_pretrained(tmp_path)
    return tmp_path


def ids(rows: int = 2, length: int = 7) -> torch.Tensor:
    return torch.randint(0, SIZES["vocab_size"], (rows, length))


@pytest.mark.parametrize("changes", CONFIGS.values(), ids=CONFIGS)
def test_logits_equal_those_of_transformers(changes: dict[str, Any], tmp_path: Path) -> None:
    theirs = reference(**changes)
    theirs.save_pretrained(tmp_path)
    ours = GPT.from_pretrained(tmp_path)
    assert not ours.training
    x = ids()
    with torch.no_grad():
        torch.testing.assert_close(ours(x), theirs(x).logits, atol=1e-5, rtol=0)
        exact = GPT.from_pretrained(tmp_path, dtype=torch.float64)(x)
        torch.testing.assert_close(exact, theirs.double()(x).logits, atol=1e-11, rtol=0)


@pytest.mark.parametrize("changes", CONFIGS.values(), ids=CONFIGS)
def test_transformers_reads_back_what_is_saved(changes: dict[str, Any], tmp_path: Path) -> None:
    changes = {k: v for k, v in changes.items() if k != "reorder_and_upcast_attn"}
    torch.manual_seed(1)
    ours = GPT(GPTConfig(**{**SIZES, "initializer_range": 0.4, **changes})).eval()
    ours.save_pretrained(tmp_path)
    read_back: Any = transformers.GPT2LMHeadModel.from_pretrained
    theirs, report = read_back(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    x = ids()
    with torch.no_grad():
        torch.testing.assert_close(ours(x), theirs(x).logits, atol=1e-5, rtol=0)
        torch.testing.assert_close(ours(x), GPT.from_pretrained(tmp_path)(x), atol=0, rtol=0)


def test_names_are_those_of_transformers() -> None:
    ours = GPT(GPTConfig(**SIZES))
    theirs = reference()
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    for name, value in theirs.state_dict().items():
        assert ours.state_dict()[name].shape == value.shape, name
    assert isinstance(ours.get_submodule("transformer.h.0.attn"), GPT2Attention)
    assert ours.lm_head.weight is ours.transformer.wte.weight


def test_gradients_equal_those_of_transformers(folder: Path) -> None:
    theirs = reference().double()
    ours = GPT.from_pretrained(folder, dtype=torch.float64)
    x = ids()
    weight = torch.randn(2, 7, SIZES["vocab_size"], dtype=torch.float64)
    (ours(x) * weight).sum().backward()
    (theirs(x).logits * weight).sum().backward()
    wanted = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name].grad, atol=1e-9, rtol=0)


def test_bare_names_and_mask_buffers_of_old_checkpoints(folder: Path) -> None:
    expected = GPT.from_pretrained(folder).state_dict()
    weights = load_file(folder / "model.safetensors")
    bare = {name.removeprefix("transformer."): value for name, value in weights.items()}
    for layer in range(SIZES["n_layer"]):
        bare[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 29, 29).tril()
        bare[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(bare, folder / "model.safetensors")
    for name, value in GPT.from_pretrained(folder).state_dict().items():
        assert torch.equal(value, expected[name]), name


def test_shards(folder: Path) -> None:
    expected = GPT.from_pretrained(folder).state_dict()
    (folder / "model.safetensors").unlink()
    reference().save_pretrained(folder, max_shard_size="6KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    for name, value in GPT.from_pretrained(folder).state_dict().items():
        assert torch.equal(value, expected[name]), name
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(FolderError, match=f"lists {shard.name}, which is missing"):
        GPT.from_pretrained(folder)


def test_a_head_stored_beside_a_tied_embedding(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    head = weights["transformer.wte.weight"].clone()
    save_file({**weights, "lm_head.weight": head}, folder / "model.safetensors")
    GPT.from_pretrained(folder)
    save_file({**weights, "lm_head.weight": head + 1}, folder / "model.safetensors")
    with pytest.raises(FolderError, match=r"lm_head\.weight differs from transformer\.wte\.weight"):
        GPT.from_pretrained(folder)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_weights_come_as_float32(folder: Path, dtype: torch.dtype) -> None:
    reference().to(dtype).save_pretrained(folder)
    ours = GPT.from_pretrained(folder)
    assert {p.dtype for p in ours.parameters()} == {torch.float32}
    wanted = reference().transformer.wte.weight.to(dtype).float()
    assert torch.equal(ours.transformer.wte.weight, wanted)


def _change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    weights = load_file(folder / "model.safetensors")
    edit(weights)
    save_file(weights, folder / "model.safetensors")


def _configure(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def _cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), "does not contain config.json"),
    "config cut": (lambda f: _cut(f / "config.json", 20), "config.json: not valid JSON"),
    "config a list": (
        lambda f: (f / "config.json").write_text("[1]"),
        "must contain a JSON object, got list",
    ),
    "llama": (
        lambda f: _configure(f, model_type="llama"),
        "model_type must be 'gpt2', got 'llama'",
    ),
    "no model type": (
        lambda f: (f / "config.json").write_text("{}"),
        "model_type must be 'gpt2', got None",
    ),
    "cross attention": (
        lambda f: _configure(f, add_cross_attention=True),
        "add_cross_attention=True is not supported",
    ),
    "quantised": (
        lambda f: _configure(f, quantization_config={"bits": 4}),
        "quantization_config=.* is not supported",
    ),
    "activation": (
        lambda f: _configure(f, activation_function="mish"),
        "activation_function must be one of gelu_new, .*, got 'mish'",
    ),
    "heads": (lambda f: _configure(f, n_head=4), "n_embd must be a multiple of n_head=4, got 15"),
    "text for a number": (
        lambda f: _configure(f, n_layer="two"),
        "n_layer must be a whole number, got 'two'",
    ),
    "list for a number": (lambda f: _configure(f, eos_token_id=[1, 2]), "must be a whole number"),
    "text for a float": (
        lambda f: _configure(f, attn_pdrop="0"),
        "attn_pdrop must be a float, got '0'",
    ),
    "number for a bool": (lambda f: _configure(f, scale_attn_weights=1), "must be a bool, got 1"),
    "number for text": (lambda f: _configure(f, activation_function=3), "must be a str, got 3"),
    "no layers": (lambda f: _configure(f, n_layer=0), "n_layer must be at least 1, got 0"),
    "no weights": (
        lambda f: (f / "model.safetensors").unlink(),
        "contains neither model.safetensors",
    ),
    "missing": (
        lambda f: _change(f, lambda w: w.pop("transformer.h.1.ln_1.weight")),
        "transformer.h.1.ln_1.weight is missing",
    ),
    "many missing": (
        lambda f: _configure(f, n_layer=3),
        "transformer.h.2.attn.c_attn.bias, .* and 9 more are missing",
    ),
    "extra": (
        lambda f: _change(f, lambda w: w.update({"transformer.h.0.attn.q.weight": torch.ones(3)})),
        "transformer.h.0.attn.q.weight is in the weights",
    ),
    "layers left over": (lambda f: _configure(f, n_layer=1), "and 9 more are in the weights"),
    "shape": (
        lambda f: _change(f, lambda w: w.update({"transformer.wpe.weight": torch.ones(31, 15)})),
        re.escape("transformer.wpe.weight has shape [31, 15], but config.json requires [29, 15]"),
    ),
    "transposed": (
        lambda f: _change(
            f,
            lambda w: w.update(
                {"transformer.h.0.attn.c_attn.weight": torch.ones(45, 15)},
            ),
        ),
        re.escape("has shape [45, 15], but config.json requires [15, 45]"),
    ),
    "integers": (
        lambda f: _change(
            f, lambda w: w.update({"transformer.ln_f.bias": torch.ones(15, dtype=torch.int64)})
        ),
        "transformer.ln_f.bias must hold floats, got I64",
    ),
    "cut in the middle": (
        lambda f: _cut(f / "model.safetensors", 9000),
        "model.safetensors: damaged or truncated",
    ),
    "cut in the header": (
        lambda f: _cut(f / "model.safetensors", 5),
        "model.safetensors: damaged or truncated",
    ),
    "twice": (
        lambda f: _change(f, lambda w: w.update({"wpe.weight": torch.ones(29, 15)})),
        "wpe.weight is stored twice",
    ),
}


@pytest.mark.parametrize(("spoil", "message"), FAULTS.values(), ids=FAULTS)
def test_a_faulty_folder_is_refused_in_one_line(
    folder: Path, spoil: Callable[[Path], object], message: str
) -> None:
    GPT.from_pretrained(folder)
    spoil(folder)
    with pytest.raises(FolderError, match=message) as refused:
        GPT.from_pretrained(folder)
    assert str(folder) in str(refused.value)
    assert "\n" not in str(refused.value)
    assert isinstance(refused.value, ValueError)


def test_a_whole_number_where_a_float_is_meant(folder: Path) -> None:
    _configure(folder, attn_pdrop=0)
    assert GPT.from_pretrained(folder).config.attn_pdrop == 0.0


def test_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(FolderError, match="nowhere does not exist"):
        GPT.from_pretrained(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(FolderError, match="file is a file, not a directory"):
        GPT.from_pretrained(tmp_path / "file")


@pytest.mark.slow
def test_pickled_weights_are_refused_with_a_command_that_converts_them(tmp_path: Path) -> None:
    folder = tmp_path / "a model's folder"
    theirs = reference()
    theirs.save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    torch.save(theirs.state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(FolderError, match="pickled weights can run code") as refused:
        GPT.from_pretrained(folder)
    command = shlex.split(str(refused.value).partition("convert them with: ")[2])
    assert command[0] == "python"
    subprocess.run([sys.executable, *command[1:]], check=True, capture_output=True)
    x = ids()
    with torch.no_grad():
        ours = GPT.from_pretrained(folder)(x)
        torch.testing.assert_close(ours, theirs(x).logits, atol=1e-5, rtol=0)


def test_a_tokenizer_of_another_model_is_refused(folder: Path) -> None:
    from headwise.models.corpus import train_tokenizer

    with pytest.raises(FolderError, match=r"does not contain tokenizer\.json"):
        load(folder)
    train_tokenizer(["abc"], 257).save(str(folder / "tokenizer.json"))
    with pytest.raises(FolderError, match="has 257 tokens but the model 53"):
        load(folder)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(FolderError, match="the tokenizer cannot be read"):
        load(folder)


def test_nothing_is_half_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def full(*arguments: Any, **keywords: Any) -> None:
        Path(arguments[1]).write_bytes(b"some")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(FolderError, match=r"cannot be written: .*No space left"):
        GPT(GPTConfig(**SIZES)).save_pretrained(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FolderError, match="model cannot be created: Not a directory"):
        write_files(tmp_path / "file" / "model", {"a": lambda path: path.touch()})


def test_prefill_and_decode_with_a_cache_give_the_full_forward(folder: Path) -> None:
    model = GPT.from_pretrained(folder, dtype=torch.float64)
    x = ids(2, 11)
    cache = model.new_cache()
    with torch.no_grad():
        parts = [model(x[:, :5], cache=cache), model(x[:, 5:8], cache=cache)]
        parts += [model(x[:, t : t + 1], cache=cache) for t in range(8, 11)]
        torch.testing.assert_close(torch.cat(parts, 1), model(x), atol=1e-12, rtol=0)
        torch.testing.assert_close(model.next_logits(x), model(x)[:, -1], atol=1e-12, rtol=0)


def test_left_padding_changes_nothing_for_the_real_tokens(folder: Path) -> None:
    model = GPT.from_pretrained(folder, dtype=torch.float64)
    x = ids(2, 7)
    padded = torch.cat([torch.zeros(2, 3, dtype=torch.long), x], dim=1)
    positions = (torch.arange(10) - 3).clamp(min=0)
    mask = Padding(torch.tensor([7, 7]), side="left")
    with torch.no_grad():
        out = model(padded, mask=mask, positions=positions)
        torch.testing.assert_close(out[:, 3:], model(x), atol=1e-12, rtol=0)
    assert out.isfinite().all()


@pytest.mark.parametrize("given", [torch.tensor([1, 2]), torch.ones(1, 2), [[1, 2]]])
def test_ids_of_another_kind_are_named(given: Any, unchecked: None) -> None:
    model = GPT(GPTConfig(vocab_size=11, n_positions=7, n_embd=6, n_layer=1, n_head=3))
    with pytest.raises(ValueError, match=r"GPT\(ids .*\): token ids must be integers \[B, T\]"):
        model(given)


def test_bad_calls_are_named(folder: Path) -> None:
    model = GPT.from_pretrained(folder)
    with pytest.raises(ValueError, match="30 tokens exceed the model's context of 29"):
        model(ids(1, 30))
    with pytest.raises(ValueError, match="ids must be below vocab_size=53, got 0 to 53"):
        model(torch.tensor([[0, 53]]))
    with pytest.raises(ValueError, match="got -1 to 4"):
        model(torch.tensor([[-1, 4]]))
    with pytest.raises(ValueError, match="cache has 1 parts but the model 2 layers"):
        model(ids(), cache=model.new_cache()[:1])
    with pytest.raises(ValueError, match="30 tokens exceed"):
        model(ids(1, 2), positions=torch.tensor([28, 29]))
    cache = model.new_cache()
    with torch.no_grad():
        model(ids(1, 29), cache=cache)
        with pytest.raises(ValueError, match="30 tokens exceed"):
            model(ids(1, 1), cache=cache)
    with pytest.raises(ValueError, match="does not take a context"):
        model.get_submodule("transformer.h.0.attn")(
            torch.ones(1, 2, 15), torch.ones(1, 2, 15), mask=Causal()
        )


def test_dropout_is_on_in_training_only() -> None:
    model = GPT(GPTConfig(**SIZES))
    x = ids()
    model.train()
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))


def test_a_call_that_fails_leaves_no_layer_ahead_of_another():
    model = GPT(GPTConfig(vocab_size=11, n_positions=17, n_embd=6, n_layer=2, n_head=3)).eval()
    cache = [KVCache(), KVCache(max_length=3)]
    with torch.no_grad(), pytest.raises(ValueError, match="max_length=3"):
        model(torch.tensor([[1, 2, 3, 4, 5]]), cache=cache)
    assert [part.length for part in cache] == [0, 0]


@pytest.mark.parametrize(
    "change",
    [
        {"n_embd": 10**13, "n_head": 1},
        {"vocab_size": 10**20},
        {"initializer_range": -1.0},
        {"layer_norm_epsilon": -1.0},
        {"resid_pdrop": 5.0},
        {"attn_pdrop": 1.0},
    ],
    ids=str,
)
def test_sizes_that_no_model_has_are_the_folders_fault(tmp_path, change):
    model = GPT(GPTConfig(vocab_size=11, n_positions=17, n_embd=6, n_layer=1, n_head=3))
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(FolderError, match=r"config\.json: ") as caught:
        GPT.from_pretrained(tmp_path)
    assert "\n" not in str(caught.value)

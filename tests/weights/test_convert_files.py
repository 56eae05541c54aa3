"""`headwise convert`: files and shards, layer by layer; what it refuses leaves nothing behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import fresh
import headwise as hw
from headwise.cli.main import main
from headwise.weights.files import convert_file


def a_model(layers: int = 3, width: int = 12) -> dict[str, Tensor]:
    """A model in Llama's layout, bfloat16, with tensors of other kinds beside."""
    state = {"model.embed_tokens.weight": torch.randn(20, width).bfloat16()}
    for layer in range(layers):
        at = f"model.layers.{layer}."
        for part, rows in zip("qkvo", (width, width // 2, width // 2, width), strict=True):
            state[f"{at}self_attn.{part}_proj.weight"] = torch.randn(rows, width).bfloat16()
        state[f"{at}mlp.up_proj.weight"] = torch.randn(5, width).half()
    return state | {"counts": torch.arange(7), "flag": torch.tensor(True), "none": torch.ones(0, 3)}


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main(["convert", *map(str, arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


def test_a_file_there_and_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = a_model()
    one, two, three = (tmp_path / f"{name}.safetensors" for name in "abc")
    save_file(state, one, metadata={"format": "pt", "by": "us"})
    assert main(["convert", str(one), str(two), "--to", "headwise", "--heads", "6"]) == 0
    assert "3 attention layers from llama to headwise: 13 tensors" in capsys.readouterr().out
    wanted = hw.convert(state, source="llama", target="headwise", num_heads=6)
    made = load_file(two)
    assert made.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert made[name].dtype == tensor.dtype
        assert torch.equal(made[name], tensor)
    with safe_open(two, "pt") as file:
        assert file.metadata() == {"format": "pt", "by": "us"}
    arguments = [str(two), str(three), "--from", "headwise", "--to", "llama", "--heads", "6"]
    assert main(["convert", *arguments, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["layers"] == 3
    assert said["files"] == [str(three)]
    back = load_file(three)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in state.items())


def test_shards_in_and_out(tmp_path: Path) -> None:
    state = a_model()
    source, target = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    names = sorted(state)  # q and v of a layer come to lie in different files
    places = {name: f"part-{index % 3}.safetensors" for index, name in enumerate(names)}
    for file in set(places.values()):
        save_file({name: state[name] for name in names if places[name] == file}, source / file)
    index = {"metadata": {}, "weight_map": places}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    (source / "config.json").write_text(
        json.dumps({"num_attention_heads": 6, "num_key_value_heads": 3})
    )
    done = convert_file(source, target, target="llama_meta", shard_bytes=1000)
    assert done.source == "llama"
    shards = sorted(target.glob("*.safetensors"))
    assert len(shards) > 2
    assert shards[0].name == f"model-00001-of-{len(shards):05}.safetensors"
    found: dict[str, Tensor] = {}
    for shard in shards:
        part = load_file(shard)
        assert sum(x.nbytes for x in part.values()) <= 1000 or len(part) == 1
        assert not part.keys() & found.keys()
        found |= part
    wanted = hw.convert(state, source="llama", target="llama_meta", num_heads=6)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    listed = json.loads((target / "model.safetensors.index.json").read_text())
    assert listed["weight_map"].keys() == wanted.keys()
    assert listed["metadata"]["total_size"] == sum(x.nbytes for x in wanted.values())

    back = convert_file(target, tmp_path / "back", target="llama", num_heads=6)
    assert back.files == (str(tmp_path / "back" / "model.safetensors"),)
    again = load_file(tmp_path / "back" / "model.safetensors")
    assert all(torch.equal(again[name], tensor) for name, tensor in state.items())


def test_no_more_than_a_layer_is_in_memory(tmp_path: Path) -> None:
    """24 layers of 4 MiB are 96 MiB; converting them may hold a few of them at a time."""
    state = {}
    for layer in range(24):
        for part in "qkvo":
            state[f"layers.{layer}.attention.w{part}.weight"] = torch.randn(512, 512)
    save_file(state, tmp_path / "in.safetensors")
    code = f"""
from pathlib import Path
from headwise.weights.files import convert_file

def resident(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))

before = resident("RssAnon")
most = 0
def report(share):
    global most
    most = max(most, resident("RssAnon") - before)
convert_file({str(tmp_path / "in.safetensors")!r}, {str(tmp_path / "out.safetensors")!r},
             source="llama_meta", target="headwise", num_heads=8, report=report)
print(most)
"""
    done = fresh.run(code)
    assert int(done.stdout) < 48 * 2**20


def test_refusals_leave_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    save_file(a_model(), one)
    (tmp_path / "text.txt").write_text("x")
    (tmp_path / "broken.safetensors").write_bytes(b"12345678 nothing")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    before = sorted(tmp_path.rglob("*"))
    heads = ["--heads", "6"]
    assert "no layout 'lama'; layouts: microgpt" in refused(capsys, one, two, "--to", "lama")
    assert "grouped heads" in refused(capsys, one, two, "--to", "gpt2", *heads)
    assert "pass num_heads" in refused(capsys, one, two, "--to", "headwise")
    assert "no such file" in refused(capsys, tmp_path / "no", two, "--to", "gpt2")
    assert "only those are read" in refused(capsys, tmp_path / "text.txt", two, "--to", "gpt2")
    assert "damaged" in refused(capsys, tmp_path / "broken.safetensors", two, "--to", "gpt2")
    assert "is also the source" in refused(capsys, one, one, "--to", "headwise", *heads)
    assert "not empty" in refused(capsys, one, tmp_path / "full", "--to", "headwise", *heads)
    assert "is a file" in refused(capsys, one, tmp_path / "text.txt", "--to", "headwise", *heads)
    assert "create it first" in refused(
        capsys, one, tmp_path / "no" / "x", "--to", "headwise", *heads
    )
    assert "must end in .safetensors" in refused(
        capsys, one, tmp_path / "x.bin", "--to", "headwise", *heads
    )
    assert "contains neither model.safetensors" in refused(
        capsys, tmp_path / "full", two, "--to", "gpt2"
    )
    assert sorted(tmp_path.rglob("*")) == before


def test_an_existing_target_is_kept_unless_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    save_file(a_model(), one)
    two.write_text("precious")
    arguments = [one, two, "--to", "headwise", "--heads", "6"]
    assert "--overwrite" in refused(capsys, *arguments)
    assert two.read_text() == "precious"
    assert main(["convert", *map(str, arguments), "--overwrite"]) == 0
    assert len(load_file(two)) == 13


def test_a_failure_while_writing_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    save_file(a_model(), one)
    two.write_text("precious")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch.Tensor, "numpy", full)  # while the tensors are written
    arguments = [one, two, "--to", "headwise", "--heads", "6", "--overwrite"]
    assert "No space left" in refused(capsys, *arguments)
    assert two.read_text() == "precious"
    assert len(list(tmp_path.iterdir())) == 2


# ── what the config beside the weights tells ────────────────────────────────────────────────────


def saved(kind: str, folder: Path, **more: Any) -> dict[str, Tensor]:
    """The state of a small model of transformers, and the model in a folder."""
    import transformers

    sizes = {
        "hidden_size": 24,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "num_hidden_layers": 2,
        "intermediate_size": 8,
        "vocab_size": 9,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    config = getattr(transformers, f"{kind}Config")(**sizes | more)
    model = getattr(transformers, f"{kind}Model")(config)
    model.save_pretrained(folder)
    return model.state_dict()


def test_the_config_tells_gpt_bigcode_from_nanogpt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = tmp_path / "in", tmp_path / "out.safetensors"
    state = saved("GPTBigCode", folder, multi_query=False, n_positions=16)
    capsys.readouterr()
    done = convert_file(folder, out, target="torch")
    assert done.source == "gpt_bigcode"
    wanted = hw.convert(state, source="gpt_bigcode", target="torch", num_heads=3)
    made = load_file(out)
    assert made.keys() == wanted.keys()
    assert all(torch.equal(made[name], tensor) for name, tensor in wanted.items())
    err = refused(capsys, folder, tmp_path / "b.safetensors", "--to", "torch", "--from", "nanogpt")
    assert "according to config.json, the layout is 'gpt_bigcode'" in err
    (folder / "config.json").unlink()
    err = refused(capsys, folder, tmp_path / "b.safetensors", "--to", "torch", "--heads", "3")
    assert "source='nanogpt' or source='gpt_bigcode' (--from)" in err


@pytest.mark.parametrize(
    ("kind", "more", "rotary_dim"),
    [
        ("Llama", {}, 8),
        ("StableLm", {}, 2),
        ("StableLm", {"partial_rotary_factor": 0.5}, 4),
        ("GPTNeoX", {"rotary_pct": 0.5, "attention_bias": False}, 4),
        ("Nemotron", {}, 4),
        ("Glm", {"head_dim": 8}, 0),  # turns neighbours already
        ("Cohere", {}, 0),
        ("Helium", {"head_dim": 8}, 0),
        ("Ernie4_5", {}, 0),
    ],
)
def test_the_config_tells_what_is_rotated(
    tmp_path: Path, kind: str, more: dict[str, Any], rotary_dim: int
) -> None:
    folder, out = tmp_path / "in", tmp_path / "out.safetensors"
    state = saved(kind, folder, **more)
    done = convert_file(folder, out, target="llama_meta")
    wanted = hw.convert(
        state, source=done.source, target="llama_meta", num_heads=3, rotary_dim=rotary_dim
    )
    made = load_file(out)
    assert made.keys() == wanted.keys()
    assert all(torch.equal(made[name], tensor) for name, tensor in wanted.items())


@pytest.mark.parametrize("kind", ["Qwen3", "Exaone4"])
def test_the_config_tells_the_eps_of_norms(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    folder, out = tmp_path / "in", tmp_path / "out.safetensors"
    state = saved(kind, folder, head_dim=8, rms_norm_eps=1e-5)
    capsys.readouterr()
    wanted = hw.convert(state, target="headwise", num_heads=3, qk_norm_eps=1e-5)
    convert_file(folder, out, target="headwise")
    made = load_file(out)
    assert made.keys() == wanted.keys()
    assert all(torch.equal(made[name], tensor) for name, tensor in wanted.items())
    # Weights that hold it need no config, and one beside them is not asked.
    (tmp_path / "config.json").write_text('{"layer_norm_eps": 1e-12}')
    convert_file(out, tmp_path / "same.safetensors", target="headwise", num_heads=3)
    assert (tmp_path / "same.safetensors").read_bytes() == out.read_bytes()
    (folder / "config.json").unlink()
    arguments = [folder, tmp_path / "b.safetensors", "--to", "headwise", "--heads", "3"]
    assert "pass qk_norm_eps=… (--qk-norm-eps), which is rms_norm_eps" in refused(
        capsys, *arguments
    )
    assert main(["convert", *map(str, arguments), "--qk-norm-eps", "1e-5"]) == 0
    assert (tmp_path / "b.safetensors").read_bytes() == out.read_bytes()


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("minimax_m3_vl_text", "multiply by 1 + weight; add 1"),
        ("t5gemma2_text", "multiply by 1 + weight; add 1"),
        ("gemma4_text", "come with a norm of the values"),
        ("gemma3n_text", "come with a norm of the values"),
        ("nanochat", "have no weights and therefore no names"),
    ],
)
def test_the_config_tells_of_other_norms(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, what: str
) -> None:
    folder, out = tmp_path / "in", tmp_path / "out.safetensors"
    saved("Llama" if kind == "nanochat" else "Qwen3", folder, head_dim=8)
    capsys.readouterr()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": kind}))
    err = refused(capsys, folder, out, "--to", "headwise", "--qk-norm-eps", "1e-6")
    assert f"according to config.json, the norms of q and k {what}" in err


def test_layers_that_rotate_different_shares(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_file(a_model(), tmp_path / "model.safetensors")
    each = {"full": {"partial_rotary_factor": 0.5}, "sliding": {"rope_theta": 10000.0}}
    said = {"num_attention_heads": 6, "rope_parameters": each}
    (tmp_path / "config.json").write_text(json.dumps(said))
    err = refused(capsys, tmp_path, tmp_path / "b.safetensors", "--to", "llama_meta")
    assert "layers rotate different shares of a head (0.5, 1)" in err
    assert main(["convert", str(tmp_path), str(tmp_path / "c.safetensors"), "--to", "qwen"]) == 0

"""The attention modules that people bring: equal outputs after conversion, and back bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import headwise as hw
from brought import BUILDERS, Brought, X, randomised


def close(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("build", BUILDERS, ids=lambda build: build.__name__)
def test_a_module_of_transformers_and_headwises_layer_are_equal(
    build: Callable[[], Brought],
) -> None:
    case = build()
    randomised(case.module)
    state = case.module.state_dict()
    options = {"num_heads": 4, **case.convert}
    ours = hw.convert(state, source=case.source, target="headwise", **options)
    back = hw.convert(ours, source="headwise", target=case.source, bias=None, **options)
    assert all(torch.equal(back[name], tensor) for name, tensor in state.items())
    assert not any(back[name].any() for name in back.keys() - state.keys())
    layer = hw.MultiHeadAttention(24, 4, **case.layer).eval()
    layer.load_state_dict({name: x for name, x in ours.items() if name not in case.beside})
    mask = case.mask() if callable(case.mask) else case.mask
    with torch.no_grad():
        close(layer(X, mask=mask), case.call())


# ── libraries that are not installed here: their names and shapes ───────────────────────────────

E, H, D = 24, 4, 6


def linear(name: str, rows: int = E, inputs: int = E, bias: bool = True) -> dict[str, Tensor]:
    state = {f"{name}.weight": torch.randn(rows, inputs) * 0.3}
    return state | ({f"{name}.bias": torch.randn(rows) * 0.3} if bias else {})


def rows_of(state: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    """What a linear layer gives, head by head, `[B, H, T, D]`."""
    y = F.linear(x, state[f"{name}.weight"], state.get(f"{name}.bias"))
    return y.unflatten(-1, (H, D)).transpose(1, 2)


def attended(state: dict[str, Tensor], names: str, x: Tensor, context: Tensor) -> Tensor:
    """Textbook attention through the layers q, k, v and out of these names."""
    q, k, v, out = names.split()
    parts = rows_of(state, q, x), rows_of(state, k, context), rows_of(state, v, context)
    y = F.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2)
    return F.linear(y, state[f"{out}.weight"], state.get(f"{out}.bias"))


NAMED: dict[str, tuple[str, str, dict[str, Tensor], dict[str, Any]]] = {
    "openai-whisper 20250625": (
        "whisper_openai",
        "query key value out",
        linear("query") | linear("key", bias=False) | linear("value") | linear("out"),
        {},
    ),
    "fair-esm 2.0.0": (
        "bart",
        "q_proj k_proj v_proj out_proj",
        linear("k_proj") | linear("v_proj") | linear("q_proj") | linear("out_proj"),
        {},
    ),
    "diffusers 0.42.1, cross-attention of UNet": (
        "diffusers",
        "to_q to_k to_v to_out.0",
        linear("to_q", bias=False)
        | linear("to_k", inputs=10, bias=False)
        | linear("to_v", inputs=10, bias=False)
        | linear("to_out.0"),
        {"kv_dim": 10, "bias": False, "out_bias": True},
    ),
}


@pytest.mark.parametrize("library", NAMED)
def test_names_of_other_libraries(library: str) -> None:
    source, names, state, options = NAMED[library]
    prefixed = {f"blocks.0.attn.{name}": x for name, x in state.items()}
    assert hw.detect_layout(prefixed) == hw.detect_layout(state) == source
    ours = hw.convert(state, target="headwise", num_heads=H)
    back = hw.convert(ours, target=source, num_heads=H)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], x) for name, x in state.items())
    layer = hw.MultiHeadAttention(E, H, **options)
    layer.load_state_dict(ours)
    context = torch.randn(2, 5, options.get("kv_dim", E))
    close(layer(X, context), attended(state, names, X, context))


def test_fair_esm_with_a_learned_key_is_refused() -> None:
    state = NAMED["fair-esm 2.0.0"][2] | {"bias_k": torch.ones(1, 1, E)}  # ESM-1
    with pytest.raises(ValueError, match="does not contain bias_k"):
        hw.convert(state, source="bart", target="headwise", num_heads=H)


def rotated_pairs(x: Tensor) -> Tensor:
    """Turn neighbouring features by the position times 0.1, as Flux does with its own angles."""
    angle = 0.1 * torch.arange(x.shape[2])[:, None]
    a, b = x[..., ::2], x[..., 1::2]
    both = a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()
    return torch.stack(both, -1).flatten(-2)


@pytest.mark.parametrize("norms", [True, False], ids=["Flux, SD3.5", "SD3"])
def test_two_streams_of_diffusers(norms: bool) -> None:
    """The names and shapes of `FluxAttention` and SD3's `Attention` in diffusers 0.42.1."""
    state = {}
    for name in "to_q to_k to_v add_k_proj add_v_proj add_q_proj to_out.0 to_add_out".split():
        state |= linear(name)
    for name in "norm_q norm_k norm_added_q norm_added_k".split() if norms else ():
        state[f"{name}.weight"] = torch.rand(D) + 0.5
    assert hw.detect_layout(state) == "diffusers"
    keywords: dict[str, Any] = {"num_heads": H, "qk_norm_eps": 1e-6 if norms else None}
    ours = hw.convert(state, target="headwise", rotary_dim=0, **keywords)
    back = hw.convert(ours, target="diffusers", rotary_dim=0, num_heads=H)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], x) for name, x in state.items())
    moved = hw.convert(ours, target="diffusers", num_heads=H)  # halves to neighbours
    assert not torch.equal(moved["add_q_proj.weight"], state["add_q_proj.weight"])

    layers = [hw.MultiHeadAttention(E, H, qk_norm=norms) for _ in range(2)]
    image = {name: x for name, x in ours.items() if not name.startswith("added.")}
    layers[0].load_state_dict(image)
    added = {name.removeprefix("added."): x for name, x in ours.items() if name not in image}
    layers[1].load_state_dict(added)
    streams = torch.randn(2, 8, E), torch.randn(2, 5, E)
    joint: list[Tensor] = []
    for names in (("to_q", "add_q_proj"), ("to_k", "add_k_proj"), ("to_v", "add_v_proj")):
        y = [rows_of(state, name, x) for name, x in zip(names, streams, strict=True)]
        if norms and names[0] != "to_v":
            kind = names[0][-1]
            gains = state[f"norm_{kind}.weight"], state[f"norm_added_{kind}.weight"]
            y = [F.rms_norm(one, (D,), gain, 1e-6) for one, gain in zip(y, gains, strict=True)]
        joint.append(torch.cat(y[::-1], 2))  # the text first
    q, k, v = rotated_pairs(joint[0]), rotated_pairs(joint[1]), joint[2]
    wanted = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    ours_joint: list[list[Tensor]] = [[], [], []]
    for layer, x in zip(layers[::-1], streams[::-1], strict=True):
        parts = [y.unflatten(-1, (H, D)).transpose(1, 2) for y in layer.qkv(x).chunk(3, -1)]
        if layer.q_norm is not None and layer.k_norm is not None:
            parts[:2] = layer.q_norm(parts[0]), layer.k_norm(parts[1])
        for part, rows in zip(ours_joint, parts, strict=True):
            part.append(rows)
    q, k, v = (torch.cat(rows, 2) for rows in ours_joint)
    got = hw.attend(rotated_pairs(q), rotated_pairs(k), v).transpose(1, 2).flatten(2)
    close(layers[0].out(got[:, 5:]), linear_of(state, "to_out.0", wanted[:, 5:]))
    close(layers[1].out(got[:, :5]), linear_of(state, "to_add_out", wanted[:, :5]))


def linear_of(state: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return F.linear(x, state[f"{name}.weight"], state[f"{name}.bias"])


def test_a_stream_that_ends_and_a_block_without_an_output_projection() -> None:
    """SD3's last block has no `to_add_out`, Flux's single blocks no `to_out`."""
    state = {}
    for name in "to_q to_k to_v add_k_proj add_v_proj add_q_proj to_out.0".split():
        state |= {f"transformer_blocks.0.attn.{n}": x for n, x in linear(name).items()}
    for name in "to_q to_k to_v".split():
        state |= {f"single_transformer_blocks.0.attn.{n}": x for n, x in linear(name).items()}
    ours = hw.convert(state, target="headwise", num_heads=H)
    assert ours["transformer_blocks.0.attn.added.qkv.weight"].shape == (3 * E, E)
    back = hw.convert(ours, target="diffusers", num_heads=H)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], x) for name, x in state.items())
    broken = {name: x for name, x in state.items() if not name.endswith("add_k_proj.weight")}
    with pytest.raises(ValueError, match=r"'diffusers' misses .*to_k.weight.* under .*attn.added"):
        hw.convert(broken, target="headwise", num_heads=H)


# ── parts of a model ────────────────────────────────────────────────────────────────────────────


def llava() -> Any:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig
    from transformers import LlavaForConditionalGeneration as Llava

    sizes: dict[str, Any] = {"hidden_size": E, "num_hidden_layers": 2, "intermediate_size": 8}
    vision = CLIPVisionConfig(**sizes, num_attention_heads=3, image_size=8, patch_size=4)
    text = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, vocab_size=40)
    return randomised(Llava(LlavaConfig(vision_config=vision, text_config=text, image_token_id=39)))


LAYER = "layers.1.self_attn"


def test_each_part_of_a_model_by_its_own_layout() -> None:
    state = llava().state_dict()
    with pytest.raises(
        ValueError, match=r"2 layouts, '(bart|llama)' at .*detects the layout of each layer"
    ):
        hw.detect_layout(state)
    heads = {"vision_tower": 3, "": 4}
    ours = hw.convert(state, target="headwise", num_heads=heads)
    for part, rows in (("vision_tower.encoder", 72), ("language_model", 48)):
        assert ours[f"model.{part}.{LAYER}.qkv.weight"].shape == (rows, E)
    targets = {"vision_tower": "bart", "language_model": "llama"}
    back = hw.convert(ours, source="headwise", target=targets, num_heads=heads)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], x) for name, x in state.items())
    # Layers of other parts stay.
    some = hw.convert(state, target={"language_model": "llama_meta"}, num_heads=heads)
    assert f"model.language_model.{LAYER}.wq.weight" in some
    name = f"model.vision_tower.encoder.{LAYER}.q_proj.weight"
    assert torch.equal(some[name], state[name])
    with pytest.raises(ValueError, match="no attention layer has 'visoin' in its name"):
        hw.convert(state, target="headwise", num_heads={"visoin": 3})
    with pytest.raises(ValueError, match=r"at '.*vision_tower.*': .*pass num_heads"):
        hw.convert(state, target="headwise", num_heads={"language_model": 4})
    broken = {n: x for n, x in state.items() if "layers.1.self_attn.k_proj" not in n or "vis" in n}
    with pytest.raises(ValueError, match=r"'llama' misses k_proj.weight under '.*layers.1"):
        hw.convert(broken, target="headwise", num_heads=heads)


def test_the_parts_of_a_config(tmp_path: Any) -> None:
    from safetensors.torch import load_file

    from headwise.weights.files import convert_file

    llava().save_pretrained(tmp_path / "llava")
    done = convert_file(tmp_path / "llava", tmp_path / "ours.safetensors", target="headwise")
    assert (done.source, done.layers) == ("bart and llama", 4)
    stored = load_file(tmp_path / "llava" / "model.safetensors")
    wanted = hw.convert(stored, target="headwise", num_heads={"vision_tower": 3, "": 4})
    got = load_file(tmp_path / "ours.safetensors")
    assert got.keys() == wanted.keys()
    assert all(torch.equal(got[name], x) for name, x in wanted.items())


def test_an_encoder_and_a_decoder_of_several_head_counts(tmp_path: Any) -> None:
    from safetensors.torch import load_file
    from transformers import BartConfig, BartModel

    from headwise.weights.files import convert_file

    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8}
    config = BartConfig(
        d_model=E, encoder_attention_heads=3, decoder_attention_heads=4, vocab_size=40, **sizes
    )
    BartModel(config).save_pretrained(tmp_path / "bart")
    convert_file(tmp_path / "bart", tmp_path / "keras.safetensors", target="keras")
    got = load_file(tmp_path / "keras.safetensors")
    assert got["encoder.layers.0.self_attn.query/kernel"].shape == (E, 3, 8)
    assert got["decoder.layers.0.encoder_attn.query/kernel"].shape == (E, 4, 6)


def test_a_norm_beside_the_projections_stays() -> None:
    layer = hw.MultiHeadAttention(E, H)
    theirs = hw.convert(layer.state_dict(), target="bart", num_heads=H)
    norm = {"layer_norm.weight": torch.ones(E), "layer_norm.bias": torch.zeros(E)}
    ours = hw.convert(theirs | norm, target="headwise", num_heads=H)
    assert ours.keys() == layer.state_dict().keys() | norm.keys()
    for name in ("q_layernorm.weight", "k_norm.weight", "norm_q.weight"):
        with pytest.raises(ValueError, match=f"(does not contain|misses) .*{name[0]}"):
            hw.convert(
                theirs | {name: torch.ones(D)}, source="bart", target="headwise", num_heads=H
            )


def test_names_without_biases_are_gptjs_or_opts() -> None:
    state = {
        name: x
        for part in ("q_proj", "k_proj", "v_proj", "out_proj")
        for name, x in linear(part, bias=False).items()
    }
    with pytest.raises(ValueError, match=r"rotate only a part of each head \(GPT-J; .*Galactica"):
        hw.convert(state, target="headwise", num_heads=H)
    galactica = {f"model.decoder.layers.0.self_attn.{name}": x for name, x in state.items()}
    assert hw.detect_layout(galactica) == "bart"
    gptj = {f"transformer.h.0.attn.{name}": x for name, x in state.items()}
    assert hw.detect_layout(gptj) == "gptj"

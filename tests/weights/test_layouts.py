"""Weights from any layout to any other: exact, and equal in the modules they belong to."""

from __future__ import annotations

import copy
import re
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn

import headwise as hw
from headwise.weights.layout_table import LAYOUTS
from headwise.weights.layout_types import LayerForm, LayerSizes, Layout
from headwise.weights.packing import refusals, written


def some_parts(sizes: LayerSizes, biases: str, norms: bool, out: bool) -> dict[str, Tensor]:
    """Random parts of those sizes, with the biases of `biases` (of q, k, v and o)."""
    parts = {
        f"{part}.weight": torch.randn(
            sizes.heads_of(part), sizes.dim_of(part), sizes.input_of(part)
        )
        for part in "qkv"
    }
    for part in set(biases) & set("qkv"):
        parts[f"{part}.bias"] = torch.randn(sizes.heads_of(part), sizes.dim_of(part))
    if out:
        parts["out.weight"] = torch.randn(sizes.out_width, sizes.num_heads, sizes.value_dim)
        if "o" in biases:
            parts["out.bias"] = torch.randn(sizes.out_width)
    if norms:
        parts |= {f"{part}_norm.weight": torch.randn(sizes.head_dim) for part in "qk"}
    return parts


def form_for(layout: Layout, parts: dict[str, Tensor], sizes: LayerSizes) -> LayerForm | None:
    """The form in which a layout holds these parts."""
    return next((form for form in layout.forms if not refusals(parts, sizes, form)), None)


@st.composite
def layers(draw: st.DrawFn) -> tuple[LayerSizes, dict[str, Tensor]]:
    kv_heads = draw(st.integers(1, 3))
    heads = kv_heads * draw(st.sampled_from([1, 1, 2]))
    dim = 2 * draw(st.integers(1, 3))
    value_dim = draw(st.sampled_from([dim, dim, dim + 1]))
    width = draw(st.sampled_from([heads * dim, heads * dim, dim, 7]))
    context = draw(st.sampled_from([(width, width), (width, width), (5, 5), (5, 6)]))
    out = draw(st.booleans())
    out_width = draw(st.sampled_from([width, width, heads * value_dim, 9]))
    out_width = out_width if out else heads * value_dim
    sizes = LayerSizes(heads, kv_heads, dim, value_dim, width, *context, out_width)
    biases = draw(st.sampled_from(["", "qkvo", "qkv", "qv", "o"]))
    torch.manual_seed(draw(st.integers(0, 99)))
    return sizes, some_parts(sizes, biases, draw(st.booleans()), out)


def plain(state: dict[str, Any]) -> dict[str, Tensor]:
    return {name: torch.as_tensor(value).float() for name, value in state.items()}


@given(layers(), st.integers(0, 99))
def test_there_and_back_is_exact_or_refused(
    layer: tuple[LayerSizes, dict[str, Tensor]], which: int
) -> None:
    sizes, parts = layer
    fitting = [name for name in sorted(LAYOUTS) if form_for(LAYOUTS[name], parts, sizes)]
    assume(fitting)
    source = fitting[which % len(fitting)]
    form = form_for(LAYOUTS[source], parts, sizes)
    assert form is not None
    eps = {f"{part}_norm.eps": torch.tensor(1e-5, dtype=torch.float64) for part in "qk"}
    state = dict(written(parts | eps if "q_norm.weight" in parts else parts, sizes, form))
    keywords: dict[str, Any] = {"num_heads": sizes.num_heads, "rotary_dim": sizes.head_dim}
    keywords["qk_norm_eps"] = 1e-5
    for target, layout in LAYOUTS.items():
        if form_for(layout, parts, sizes) is None:
            with pytest.raises(ValueError, match=f"'{target}' cannot hold"):
                hw.convert(state, source=source, target=target, **keywords)
            continue
        there = hw.convert(state, source=source, target=target, **keywords)
        back = plain(hw.convert(there, source=target, target=source, **keywords))
        for name, tensor in plain(state).items():
            assert torch.equal(back[name], tensor), (target, name)
        # A target that always has biases gives zeros back, unless they are not wanted.
        assert not any(back[name].any() for name in back.keys() - state.keys())
        exact = hw.convert(there, source=target, target=source, bias=False, **keywords)
        assert exact.keys() <= state.keys()
        assert not any(state[name].any() for name in state.keys() - exact.keys())


@given(layers())
def test_a_detected_layout_reads_the_same(layer: tuple[LayerSizes, dict[str, Tensor]]) -> None:
    sizes, parts = layer
    for name, layout in LAYOUTS.items():
        form = form_for(layout, parts, sizes)
        if form is None:
            continue
        state = dict(written(parts, sizes, form))
        try:
            found = hw.detect_layout(state)
        except ValueError:
            if name not in ("nanogpt", "gpt_bigcode"):  # which are told apart by who knows
                raise
            continue
        if found == name:
            continue
        # Another row has the very same tensors: then it must also mean the same by them.
        keywords: dict[str, Any] = {"target": "keras", "num_heads": sizes.num_heads}
        if any("norm" in part for part in parts):
            keywords |= {"target": "headwise", "qk_norm_eps": 1e-5}
        if found == "gptj":  # it asks how many features rotate; BART and OPT rotate none
            keywords["rotary_dim"] = 0
        one = hw.convert(state, source=name, **keywords)
        two = hw.convert(state, source=found, **keywords)
        assert all(torch.equal(one[key], two[key]) for key in one.keys() | two.keys())


def randomised(module: nn.Module) -> nn.Module:
    """With weights and biases that are all different, so that none can be mixed up."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    return module.eval()


def ours(
    module: nn.Module, source: str, eps: float | None = None, **sizes: Any
) -> hw.MultiHeadAttention:
    """Our layer with the module's weights, which must fit it entirely."""
    layer = hw.MultiHeadAttention(**sizes)
    keywords: dict[str, Any] = {"source": source, "num_heads": layer.num_heads, "qk_norm_eps": eps}
    state = hw.convert(module.state_dict(), target="headwise", **keywords)
    layer.load_state_dict(state)
    back = hw.convert(
        layer.state_dict(), source="headwise", target=source, num_heads=layer.num_heads
    )
    assert all(torch.equal(back[name], tensor) for name, tensor in module.state_dict().items())
    module.load_state_dict(back)
    return layer.eval()


def close(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


X = (2, 7, 24)


def test_torch() -> None:
    theirs = randomised(nn.MultiheadAttention(24, 4, batch_first=True))
    x = torch.randn(X)
    close(ours(theirs, "torch", embed_dim=24, num_heads=4)(x), theirs(x, x, x)[0])


def test_torch_without_biases() -> None:
    theirs = randomised(nn.MultiheadAttention(24, 4, batch_first=True, bias=False))
    x = torch.randn(X)
    close(ours(theirs, "torch", embed_dim=24, num_heads=4, bias=False)(x), theirs(x, x, x)[0])


def test_torch_across_widths() -> None:
    theirs = randomised(nn.MultiheadAttention(24, 4, kdim=10, vdim=10, batch_first=True))
    layer = ours(theirs, "torch", embed_dim=24, num_heads=4, kv_dim=10)
    x, context = torch.randn(X), torch.randn(2, 5, 10)
    close(layer(x, context), theirs(x, context, context)[0])


def test_a_whole_torch_encoder() -> None:
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(24, 4), 2, enable_nested_tensor=False
    )
    state = hw.convert(encoder.state_dict(), target="headwise", num_heads=4)
    assert state["layers.1.self_attn.qkv.weight"].shape == (72, 24)
    assert torch.equal(
        state["layers.0.linear1.weight"], encoder.state_dict()["layers.0.linear1.weight"]
    )
    back = hw.convert(state, source="headwise", target="torch", num_heads=4)
    encoder.load_state_dict(back)


def gpt2_config(**more: Any) -> Any:
    from transformers import GPT2Config

    return GPT2Config(n_embd=24, n_head=4, n_layer=2, vocab_size=30, n_positions=16, **more)


def test_gpt2() -> None:
    from transformers.models.gpt2.modeling_gpt2 import GPT2Attention

    theirs = randomised(GPT2Attention(gpt2_config(_attn_implementation="eager"), layer_idx=0))
    x = torch.randn(X)
    causal = torch.full((7, 7), -torch.inf).triu(1)[None, None]
    wanted = theirs(x, attention_mask=causal)[0]
    close(ours(theirs, "gpt2", embed_dim=24, num_heads=4)(x, mask=hw.Causal()), wanted)


def test_gpt2_cross_attention_and_the_masks_of_old_checkpoints() -> None:
    from transformers import GPT2Model

    model = randomised(GPT2Model(gpt2_config(add_cross_attention=True)))
    state = model.state_dict()
    old = state | {"h.0.attn.bias": torch.ones(1, 1, 16, 16).tril().bool()}
    old |= {"h.0.attn.masked_bias": torch.tensor(-1e4)}
    made = hw.convert(old, source="gpt2", target="headwise", num_heads=4)
    assert "h.0.attn.bias" not in made
    assert torch.equal(
        made["h.0.crossattention.qkv.weight"][:24], state["h.0.crossattention.q_attn.weight"].T
    )
    back = hw.convert(made, source="headwise", target="gpt2", num_heads=4)
    model.load_state_dict(back)
    assert all(torch.equal(back[name], tensor) for name, tensor in state.items())


def test_a_whole_gpt2_for_nanogpt() -> None:
    from transformers import GPT2LMHeadModel

    state = GPT2LMHeadModel(gpt2_config()).state_dict()
    made = hw.convert(state, source="gpt2", target="nanogpt", num_heads=4)
    assert made.keys() == state.keys()
    for name, tensor in state.items():
        turned = name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
        assert torch.equal(made[name], tensor.T if turned else tensor), name
    back = hw.convert(made, source="nanogpt", target="gpt2", num_heads=4)
    assert all(torch.equal(back[name], tensor) for name, tensor in state.items())
    assert hw.detect_layout(state) == "gpt2"
    with pytest.raises(ValueError, match=r"layout 'nanogpt' or 'gpt_bigcode'"):
        hw.detect_layout(made)


def test_bert() -> None:
    from transformers import BertConfig, BertModel
    from transformers.models.bert.modeling_bert import BertAttention

    config = BertConfig(
        hidden_size=24,
        num_attention_heads=4,
        num_hidden_layers=2,
        intermediate_size=12,
        vocab_size=9,
        _attn_implementation="eager",
    )
    theirs = randomised(BertAttention(config))
    state = hw.convert(theirs.state_dict(), source="bert", target="headwise", num_heads=4)
    layer = hw.MultiHeadAttention(24, 4)
    norm = [state.pop(f"output.LayerNorm.{name}") for name in ("weight", "bias")]
    layer.load_state_dict(state)
    x = torch.randn(X)
    got = nn.functional.layer_norm(x + layer(x), (24,), *norm, eps=config.layer_norm_eps)
    close(got, theirs(x)[0])
    model = BertModel(config).state_dict()
    there = hw.convert(model, source="bert", target="torch", num_heads=4)
    back = hw.convert(there, source="torch", target="bert", num_heads=4)
    assert back.keys() == model.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in model.items())


def test_vit_and_its_older_names(tmp_path: Any) -> None:
    from safetensors.torch import load_file
    from transformers import ViTConfig, ViTModel
    from transformers.models.vit.modeling_vit import ViTAttention

    config = ViTConfig(
        hidden_size=24,
        num_attention_heads=4,
        num_hidden_layers=1,
        intermediate_size=12,
        _attn_implementation="eager",
    )
    theirs = randomised(ViTAttention(config))
    x = torch.randn(X)
    close(ours(theirs, "vit", embed_dim=24, num_heads=4)(x), theirs(x)[0])

    model = randomised(ViTModel(config))
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    stored = load_file(tmp_path / "model.safetensors")
    assert hw.detect_layout(stored) == "vit"
    assert hw.detect_layout(model.state_dict()) == "vit"
    one = hw.convert(stored, target="timm", num_heads=4)
    two = hw.convert(model.state_dict(), target="timm", num_heads=4)
    name = "attention.qkv.weight"
    assert torch.equal(one[f"encoder.layer.0.{name}"], two[f"layers.0.{name}"])


ROPE = {"rope_type": "default", "rope_theta": 10000.0}
GROUPED_SIZES: dict[str, Any] = {
    "hidden_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 8,
    "head_dim": 6,
    "vocab_size": 9,
}


def modeling(kind: str) -> Any:
    """The module of transformers that has a kind of model."""
    return import_module(f"transformers.models.{kind.lower()}.modeling_{kind.lower()}")


@pytest.mark.parametrize("eps", [1e-6, 0.5])
@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("Llama", {"bias": False}),
        ("Qwen2", {"bias": True, "out_bias": False}),
        ("Qwen3", {"bias": False, "qk_norm": True}),
        ("Exaone4", {"bias": False, "qk_norm": True}),
        ("Apertus", {"bias": False, "qk_norm": True}),
    ],
)
def test_decoders_with_grouped_heads(kind: str, more: dict[str, Any], eps: float) -> None:
    module = modeling(kind)
    config = getattr(module, f"{kind}Config")(
        **GROUPED_SIZES, rms_norm_eps=eps, rope_parameters=ROPE, _attn_implementation="eager"
    )
    theirs = randomised(getattr(module, f"{kind}Attention")(config, 0))
    source = "llama" if kind == "Llama" else "qwen"
    layer = ours(
        theirs,
        source,
        eps,
        embed_dim=24,
        num_heads=4,
        num_kv_heads=2,
        head_dim=6,
        rope=hw.RoPE(6),
        **more,
    )
    x = torch.randn(X)
    rotary = getattr(module, f"{kind}RotaryEmbedding")(config)(x, torch.arange(7)[None])
    causal = torch.full((7, 7), -torch.inf).triu(1)[None, None]
    wanted = theirs(x, rotary, causal)[0]
    close(layer(x, mask=hw.Causal()), wanted)
    assert hw.detect_layout(theirs.state_dict()) == source


NORMED = hw.MultiHeadAttention(24, 4, bias=False, qk_norm=True, qk_norm_eps=0.5)


def test_the_eps_of_norms_is_given_or_stored() -> None:
    state = NORMED.state_dict()
    qwen = hw.convert(state, target="qwen", num_heads=4)
    assert "q_norm.weight" in qwen
    keywords: dict[str, Any] = {"target": "headwise", "num_heads": 4}
    with pytest.raises(ValueError, match=r"pass qk_norm_eps=… \(--qk-norm-eps\), .*rms_norm_eps"):
        hw.convert(qwen, **keywords)
    made = hw.convert(qwen, qk_norm_eps=0.5, **keywords)
    assert made.keys() == state.keys()
    layer = hw.MultiHeadAttention(24, 4, bias=False, qk_norm=True)
    layer.load_state_dict(made)
    x = torch.randn(X)
    assert torch.equal(layer(x), NORMED(x))
    assert torch.equal(copy.deepcopy(layer)(x), NORMED(x))
    # Where the weights have it, it is not asked for, and not contradicted.
    layer = hw.MultiHeadAttention(24, 4, bias=False, qk_norm=True)
    layer.load_state_dict(hw.convert(state, **keywords))
    assert torch.equal(layer(x), NORMED(x))
    with pytest.raises(ValueError, match=r"qk_norm_eps=0.25\): q_norm.eps in the weights is 0.5"):
        hw.convert(state, qk_norm_eps=0.25, **keywords)
    # Weights that were saved without it leave the layer's own.
    bare = {name: tensor for name, tensor in state.items() if "extra" not in name}
    assert hw.convert(bare, **keywords).keys() == bare.keys()
    layer = hw.MultiHeadAttention(24, 4, bias=False, qk_norm=True, qk_norm_eps=0.5)
    layer.load_state_dict(bare)
    assert torch.equal(layer(x), NORMED(x))


@pytest.mark.parametrize("eps", [-1e-6, float("nan"), float("inf"), True, "small"])
def test_an_eps_is_a_number(eps: Any) -> None:
    match = f"qk_norm_eps must be a finite number of at least 0, got {eps!r}"
    with pytest.raises(ValueError, match=match):
        hw.convert(NORMED.state_dict(), target="qwen", num_heads=4, qk_norm_eps=eps)
    with pytest.raises(ValueError, match=match):
        hw.MultiHeadAttention(24, 4, qk_norm=True, qk_norm_eps=eps)


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ("Gemma4TextDecoderLayer", r"Gemma 4's come with a norm of the values"),
        ("Gemma3nTextDecoderLayer", r"Gemma 3n's come with a norm of the values"),
        ("T5Gemma2EncoderLayer", r"Gemma 3's multiply by 1 \+ weight; add 1"),
        ("Olmo2DecoderLayer", r"q_norm.weight has shape \[24\].*norms over all heads"),
    ],
)
def test_other_norms_under_the_names_of_qwen_3(block: str, message: str) -> None:
    kind = re.sub("(Text|Encoder|Decoder).*", "", block)
    module = modeling(kind)
    config_of = getattr(module, f"{kind}{'Text' if 'Gemma' in kind else ''}Config")
    more = {"num_kv_shared_layers": 0, "dropout_rate": 0.0} if kind != "Gemma4" else {}
    state = getattr(module, block)(config_of(**GROUPED_SIZES, **more), 0).state_dict()
    keywords: dict[str, Any] = {"target": "headwise", "num_heads": 4, "qk_norm_eps": 1e-6}
    with pytest.raises(ValueError, match=message):
        hw.convert(state, **keywords)
    # A layer alone has Qwen 3's names: it is for the caller to know.
    alone = {n.removeprefix("self_attn."): x for n, x in state.items() if "self_attn." in n}
    del keywords["qk_norm_eps"]
    asked = r"pass qk_norm_eps=….* not times 1 \+ weight \(Gemma 3\).*\(Gemma 3n, Gemma 4\)"
    with pytest.raises(ValueError, match=message if kind == "Olmo2" else asked):
        hw.convert(alone, **keywords)


def test_gemma_3_has_other_norms_under_the_names_of_qwen_3() -> None:
    from transformers.models.gemma3 import modeling_gemma3

    config = modeling_gemma3.Gemma3TextConfig(
        hidden_size=24,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=1,
        intermediate_size=8,
        head_dim=6,
        query_pre_attn_scalar=9,
        _attn_implementation="eager",
    )
    block = randomised(modeling_gemma3.Gemma3DecoderLayer(config, 0))
    for state in (block.state_dict(), {f"h.0.{n}": x for n, x in block.state_dict().items()}):
        with pytest.raises(ValueError, match=r"Gemma 3's multiply by 1 \+ weight; add 1"):
            hw.detect_layout(state)
        with pytest.raises(ValueError, match=r"norms of q and k under .*self_attn.* not .*'qwen'"):
            hw.convert(state, source="qwen", target="headwise", num_heads=4)
    state = {n: x + 1 if "norm" in n else x for n, x in block.self_attn.state_dict().items()}
    layer = hw.MultiHeadAttention(
        24, 4, num_kv_heads=2, head_dim=6, bias=False, qk_norm=True, scale=1 / 3
    )
    layer.load_state_dict(hw.convert(state, target="headwise", num_heads=4, qk_norm_eps=1e-6))
    x, causal = torch.randn(X), torch.full((7, 7), -torch.inf).triu(1)[None, None]
    unturned = torch.ones(1, 7, 6), torch.zeros(1, 7, 6)
    close(layer(x, mask=hw.Causal()), block.self_attn(x, unturned, causal)[0])


@pytest.mark.parametrize("layers", [("0", "1"), ("0",)])
def test_adapters_are_to_be_merged_first(layers: tuple[str, ...]) -> None:
    import transformers

    config = transformers.GPT2Config(
        n_embd=12, n_head=3, n_layer=2, vocab_size=7, n_positions=5, attn_pdrop=0.0
    )
    state, adapted = transformers.GPT2Model(config).state_dict(), {}
    for name, x in state.items():
        here = any(f"h.{n}.attn.c_attn." in name for n in layers)
        adapted[name.replace("c_attn.", "c_attn.base_layer.") if here else name] = x
    for source in (None, "gpt2"):
        with pytest.raises(ValueError, match=r"c_attn.base_layer.weight .* merge_and_unload"):
            hw.convert(adapted, source=source, target="headwise", num_heads=3)
    # One on another layer goes through as it is.
    other = {name.replace("c_fc.", "c_fc.base_layer."): x for name, x in state.items()}
    assert "h.0.mlp.c_fc.base_layer.weight" in hw.convert(other, target="headwise", num_heads=3)


def test_metas_rotation_turns_neighbours() -> None:
    halves = hw.MultiHeadAttention(24, 4, num_kv_heads=2, bias=False, rope=hw.RoPE(6))
    pairs = hw.MultiHeadAttention(
        24, 4, num_kv_heads=2, bias=False, rope=hw.RoPE(6, interleaved=True)
    )
    meta = hw.convert(halves.state_dict(), source="headwise", target="llama_meta", num_heads=4)
    # Read with the rotation left out of account, they are the weights of the other convention.
    same_order = {f"{name[1]}_proj.weight": tensor for name, tensor in meta.items()}
    pairs.load_state_dict(hw.convert(same_order, source="llama", target="headwise", num_heads=4))
    x = torch.randn(X)
    close(pairs(x, mask=hw.Causal()), halves(x, mask=hw.Causal()))


def test_a_whole_llama_under_metas_names() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=24,
        intermediate_size=20,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=2,
        vocab_size=30,
    )
    state = LlamaForCausalLM(config).state_dict()
    made = hw.convert(state, source="llama", target="llama_meta", num_heads=4)
    layer = {"attention_norm", "ffn_norm", *(f"attention.w{part}" for part in "qkvo")}
    layer |= {f"feed_forward.w{part}" for part in "123"}
    wanted = {f"layers.{n}.{name}.weight" for n in range(2) for name in layer}
    assert made.keys() == wanted | {"tok_embeddings.weight", "norm.weight", "output.weight"}
    back = hw.convert(made, source="llama_meta", target="llama", num_heads=4)
    assert back.keys() == state.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in state.items())


def test_neox_packs_head_by_head() -> None:
    from transformers import GPTNeoXConfig
    from transformers.models.gpt_neox import modeling_gpt_neox as neox

    config = GPTNeoXConfig(
        hidden_size=24,
        num_attention_heads=4,
        rotary_pct=1.0,
        _attn_implementation="eager",
    )
    theirs = randomised(neox.GPTNeoXAttention(config, 0))
    layer = ours(theirs, "neox", embed_dim=24, num_heads=4, rope=hw.RoPE(6))
    x = torch.randn(X)
    rotary = neox.GPTNeoXRotaryEmbedding(config)(x, torch.arange(7)[None])
    causal = torch.full((7, 7), -torch.inf).triu(1)[None, None]
    wanted = theirs(x, causal, position_embeddings=rotary)[0]
    close(layer(x, mask=hw.Causal()), wanted)


def bigcode(multi_query: bool, **more: Any) -> Any:
    from transformers import GPTBigCodeConfig

    return GPTBigCodeConfig(
        n_embd=24,
        n_head=4,
        n_layer=2,
        n_positions=16,
        vocab_size=9,
        multi_query=multi_query,
        _attn_implementation="eager",
        **more,
    )


@pytest.mark.parametrize("multi_query", [True, False])
def test_gpt_bigcode(multi_query: bool) -> None:
    from transformers.models.gpt_bigcode.modeling_gpt_bigcode import GPTBigCodeAttention

    theirs = randomised(GPTBigCodeAttention(bigcode(multi_query), layer_idx=0))
    x, causal = torch.randn(X), torch.full((7, 7), -torch.inf).triu(1)[None, None]
    layer = ours(
        theirs, "gpt_bigcode", embed_dim=24, num_heads=4, num_kv_heads=1 if multi_query else 4
    )
    close(layer(x, mask=hw.Causal()), theirs(x, attention_mask=causal)[0])


def test_names_that_are_nanogpts_and_gpt_bigcodes_alike() -> None:
    from transformers import GPTBigCodeModel

    state = randomised(GPTBigCodeModel(bigcode(multi_query=False))).state_dict()
    match = (
        r"c_attn.weight \[72, 24\] may have layout 'nanogpt' or 'gpt_bigcode'.*"
        r"source='nanogpt' or source='gpt_bigcode' \(--from\)"
    )
    with pytest.raises(ValueError, match=match):
        hw.convert(state, target="headwise", num_heads=4)
    with pytest.raises(ValueError, match=match):
        hw.detect_layout(state)
    one, two = (
        hw.convert(state, source=source, target="torch", num_heads=4)["h.1.attn.in_proj_weight"]
        for source in ("nanogpt", "gpt_bigcode")
    )
    assert not torch.equal(one, two)
    # Only one of the two has a single key/value head, goes without biases, or keeps a mask.
    single = GPTBigCodeModel(bigcode(multi_query=True)).state_dict()
    assert hw.detect_layout(single) == "gpt_bigcode"
    bare = {name: x for name, x in state.items() if not name.endswith("bias")}
    assert hw.detect_layout(bare) == "nanogpt"
    masks = {f"h.{n}.attn.bias": torch.ones(1, 1, 16, 16).tril() for n in range(2)}
    assert hw.detect_layout(state | masks) == "nanogpt"


def rotating(dim: int, interleaved: bool) -> hw.MultiHeadAttention:
    rope = hw.RoPE(dim, interleaved=interleaved)
    return hw.MultiHeadAttention(24, 3, num_kv_heads=3, bias=False, rope=rope)


def turning_neighbours(meta: dict[str, Tensor], dim: int) -> hw.MultiHeadAttention:
    """A layer with the rows of Meta's names as they lie, of which so many turn as neighbours."""
    layer = rotating(dim, interleaved=True)
    rows = [meta[f"w{part}.weight"] for part in "qkv"]
    layer.load_state_dict({"qkv.weight": torch.cat(rows), "out.weight": meta["wo.weight"]})
    return layer.eval()


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
def test_neox_rotates_a_part_of_each_head(share: float) -> None:
    from transformers import GPTNeoXConfig
    from transformers.models.gpt_neox import modeling_gpt_neox as neox

    config = GPTNeoXConfig(
        hidden_size=24,
        num_attention_heads=3,
        rotary_pct=share,
        attention_bias=False,
        _attn_implementation="eager",
    )
    theirs = randomised(neox.GPTNeoXAttention(config, 0))
    with pytest.raises(
        ValueError, match=r"may rotate only a part of each head .Pythia.*rotary_dim=…"
    ):
        hw.convert(theirs.state_dict(), source="neox", target="llama_meta", num_heads=3)
    dim = int(8 * share)
    keywords: dict[str, Any] = {"num_heads": 3, "rotary_dim": dim}
    meta = hw.convert(theirs.state_dict(), source="neox", target="llama_meta", **keywords)
    x = torch.randn(X)
    rotary = neox.GPTNeoXRotaryEmbedding(config)(x, torch.arange(7)[None])
    causal = torch.full((7, 7), -torch.inf).triu(1)[None, None]
    wanted = theirs(x, causal, position_embeddings=rotary)[0]
    close(turning_neighbours(meta, dim)(x, mask=hw.Causal()), wanted)
    back = hw.convert(meta, source="llama_meta", target="neox", bias=False, **keywords)
    assert all(torch.equal(back[name], tensor) for name, tensor in theirs.state_dict().items())


def test_names_beside_a_layer_that_may_rotate_a_part() -> None:
    import transformers

    sizes = {
        "hidden_size": 24,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "num_hidden_layers": 1,
        "intermediate_size": 8,
        "vocab_size": 9,
        "pad_token_id": 0,
    }
    for kind in ("StableLm", "Nemotron", "Glm", "Glm4"):
        config = getattr(transformers, f"{kind}Config")(**sizes, head_dim=8)
        state = getattr(transformers, f"{kind}Model")(config).state_dict()
        with pytest.raises(ValueError, match=r"may rotate only a part of each head .*8 for all"):
            hw.convert(state, target="llama_meta", num_heads=3)
        hw.convert(state, target="headwise", num_heads=3)  # moves nothing


def test_rotated_features_are_fewer_than_a_head_has() -> None:
    for dim, message in (
        (3, "rotary_dim must be an even number"),
        (-2, "rotary_dim must be an even number"),
        (True, "rotary_dim must be an even number"),
        (10, "rotary_dim=10.*10 features cannot rotate in heads of width 8"),
    ):
        state = rotating(8, interleaved=False).state_dict()
        with pytest.raises(ValueError, match=message):
            hw.convert(state, source="headwise", target="llama_meta", num_heads=3, rotary_dim=dim)
    same = hw.convert(state, source="headwise", target="llama_meta", num_heads=3, rotary_dim=0)
    assert torch.equal(same["wq.weight"], state["qkv.weight"][:24])


def test_groups_are_packed_query_heads_first() -> None:
    # InternLM 2: "b q (h gs d)" with gs = queries per group + 2, keys second to last, values last.
    weight = torch.arange(2 * (3 + 2) * 2.0)[:, None].expand(-1, 12).clone()  # row numbers
    state = {"wqkv.weight": weight, "wo.weight": torch.randn(12, 12)}
    made = hw.convert(state, source="internlm2", target="llama", num_heads=6)
    assert made["q_proj.weight"][:, 0].tolist() == [0, 1, 2, 3, 4, 5, 10, 11, 12, 13, 14, 15]
    assert made["k_proj.weight"][:, 0].tolist() == [6, 7, 16, 17]
    assert made["v_proj.weight"][:, 0].tolist() == [8, 9, 18, 19]


def test_lists_arrays_and_scalars_that_hold_data() -> None:
    class Value:
        def __init__(self, data: float) -> None:
            self.data = data

    weights = {f"attn_w{part}": torch.randn(8, 8, dtype=torch.float64) for part in "qkvo"}
    lists = {name: tensor.tolist() for name, tensor in weights.items()}
    values = {
        f"layer0.{name}": [[Value(x) for x in row] for row in rows] for name, rows in lists.items()
    }
    values["layer0.mlp_fc1"] = values["wte"] = [[Value(1.0)]]
    arrays = {name: np.array(rows) for name, rows in lists.items()}
    for state, prefix in ((lists, ""), (values, "layer0."), (arrays, ""), (weights, "")):
        made = hw.convert(state, source="microgpt", target="torch", num_heads=2, bias=False)
        assert torch.equal(made[f"{prefix}in_proj_weight"][8:16], weights["attn_wk"])
        back = hw.convert(made, source="torch", target="microgpt", num_heads=2)
        assert back[f"{prefix}attn_wo"] == lists["attn_wo"]
        assert hw.detect_layout(state) == "microgpt"


def test_nothing_is_shared_with_the_source_and_dtypes_stay() -> None:
    theirs = nn.MultiheadAttention(8, 2, dtype=torch.bfloat16)
    made = hw.convert(theirs.state_dict(), source="torch", target="split", num_heads=2)
    storages = {tensor.untyped_storage().data_ptr() for tensor in made.values()}
    assert len(storages) == len(made)
    assert {tensor.dtype for tensor in made.values()} == {torch.bfloat16}
    kept = theirs.in_proj_weight.clone()
    made["W_query.weight"].zero_()
    assert torch.equal(theirs.in_proj_weight, kept)


def test_what_says_nothing_is_added_and_left_out() -> None:
    heads = {
        f"heads.{h}.W_{part}.weight": torch.randn(3, 12)
        for h in range(4)
        for part in ("query", "key", "value")
    }
    made = hw.convert(heads, source="per_head", target="gpt2")
    assert torch.equal(made["c_proj.weight"], torch.eye(12))
    assert not made["c_attn.bias"].any()
    back = hw.convert(made, source="gpt2", target="per_head", num_heads=4, bias=False)
    assert back.keys() == heads.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in heads.items())
    with_zeros = hw.convert(heads, source="per_head", target="nanogpt", bias=True)
    assert not with_zeros["c_attn.bias"].any()


SPLIT = {
    **{f"W_{part}.weight": torch.randn(12, 12) for part in ("query", "key", "value")},
    "out_proj.weight": torch.randn(12, 12),
    "out_proj.bias": torch.randn(12),
}
GROUPED = {
    "q_proj.weight": torch.randn(12, 12),
    "k_proj.weight": torch.randn(6, 12),
    "v_proj.weight": torch.randn(6, 12),
    "o_proj.weight": torch.randn(12, 12),
}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("state", "keywords", "message"),
    [
        (
            SPLIT,
            {"source": "splitt", "target": "torch"},
            "no layout 'splitt'; layouts: microgpt, per_head",
        ),
        (SPLIT, {"source": "split", "target": "tensorflow"}, "no layout 'tensorflow'; layouts:"),
        (SPLIT, {"source": "split", "target": "torch"}, "pass num_heads"),
        (
            SPLIT,
            {"source": "split", "target": "torch", "num_heads": 5},
            r"W_query.weight \[12, 12\] does not fit num_heads=5",
        ),
        (
            SPLIT,
            {"source": "split", "target": "torch", "num_heads": 0},
            "num_heads must be an integer of at least 1",
        ),
        (
            SPLIT,
            {"source": "torch", "target": "split", "num_heads": 3},
            "no layer of layout 'torch'.*looks like 'split'",
        ),
        (
            SPLIT,
            {"source": "split", "target": "llama_meta", "num_heads": 3},
            "cannot hold the bias of the output .out_proj.bias",
        ),
        (
            SPLIT,
            {"source": "split", "target": "per_head", "num_heads": 3},
            "cannot hold an output projection .out_proj.weight",
        ),
        (
            {name: x for name, x in SPLIT.items() if "key" not in name},
            {"source": "split", "target": "torch", "num_heads": 3},
            "layout 'split' misses W_key.weight",
        ),
        (
            SPLIT | {"gate.weight": torch.ones(3)},
            {"source": "split", "target": "torch", "num_heads": 3},
            "does not contain gate.weight",
        ),
        (
            {f"h.0.attn.{name}": x for name, x in SPLIT.items()}
            | {"h.0.attn.lora.A": torch.ones(3)},
            {"source": "split", "target": "torch", "num_heads": 3},
            "does not contain h.0.attn.lora.A",
        ),
        (
            SPLIT | {"W_key.weight": torch.randn(12, 11)},
            {"source": "split", "target": "headwise", "num_heads": 3},
            "keys from an input of width 11 and values from one of 12",
        ),
        (
            SPLIT | {"out_proj.bias": torch.randn(11)},
            {"source": "split", "target": "headwise", "num_heads": 3},
            r"out_proj.bias \[11\] and out_proj.weight \[12, 12\] do not fit",
        ),
        (
            SPLIT | {"W_query.weight": torch.randn(12)},
            {"source": "split", "target": "headwise", "num_heads": 3},
            r"W_query.weight has shape \[12\].*2 axes there, \(n d\) i",
        ),
        (
            GROUPED,
            {"source": "llama", "target": "torch", "num_heads": 4},
            "cannot hold grouped heads .num_kv_heads=2 for num_heads=4",
        ),
        (
            GROUPED,
            {"source": "llama", "target": "headwise", "num_heads": 4, "num_kv_heads": 4},
            "make 2 key/value heads of width 3, and num_kv_heads=4",
        ),
        (
            GROUPED,
            {"source": "llama", "target": "headwise", "num_heads": 3},
            r"k_proj.weight \[6, 12\] does not fit head_dim=4",
        ),
        (
            GROUPED,
            {"source": "llama", "target": "llama_meta", "num_heads": 4},
            "heads of width 3 cannot be rotated in pairs",
        ),
        (
            {"a": torch.ones(2)},
            {"target": "torch"},
            "none of the known layouts has the names a; layouts: microgpt",
        ),
        (
            {"attn_wq": [["x"]]},
            {"source": "microgpt", "target": "torch"},
            "attn_wq must be a matrix of numbers",
        ),
        (
            {"attn_wq": "x"},
            {"source": "microgpt", "target": "torch"},
            "array, got str",
        ),
        (
            {f"heads.{h}.W_{part}": torch.randn(4, 4) for h in (0, 2) for part in "qkv"},
            {"source": "notebook", "target": "torch"},
            "numbers its heads from 0; here .* 0, 2",
        ),
        (
            {f"heads.{h}.W_{part}": torch.randn(4, 4 + h) for h in (0, 1) for part in "qkv"},
            {"source": "notebook", "target": "torch"},
            "do not fit",
        ),
    ],
)
def test_refusals(state: dict[str, Any], keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        hw.convert(state, **keywords)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("unchecked")
def test_what_is_no_state_is_refused_in_words() -> None:
    layer = nn.MultiheadAttention(12, 3)
    sparse = {name: x.to_sparse() if x.dim() == 2 else x for name, x in layer.state_dict().items()}
    for state, says in [
        (layer, r"pass its .state_dict\(\)"),
        ({}, "the state is empty"),
        ({3: torch.ones(2)}, "names of tensors must be str, got 3"),
        (
            layer.state_dict() | {"foo": torch.ones(2)},
            "nearest: layout 'torch' does not contain foo",
        ),
        (
            nn.MultiheadAttention(12, 3, add_bias_kv=True).state_dict(),
            "does not contain bias_k, bias_v",
        ),
        (sparse, "must be a dense tensor"),
    ]:
        for call in (hw.detect_layout, lambda state: hw.convert(state, target="gpt2", num_heads=3)):
            with pytest.raises(ValueError, match=says) as caught:
                call(state)  # type: ignore[arg-type]
            assert "\n" not in str(caught.value)
    for count in (3.0, "3", True):
        with pytest.raises(ValueError, match="num_heads must be an integer"):
            hw.convert(layer.state_dict(), source="torch", target="gpt2", num_heads=count)  # type: ignore[arg-type]


def test_meta_tensors_convert_without_their_numbers() -> None:
    state = nn.MultiheadAttention(12, 3, device="meta").state_dict()
    made = hw.convert(state, source="torch", target="gpt2", num_heads=3, bias=False)
    assert made["c_attn.weight"].is_meta
    assert made["c_attn.weight"].shape == (12, 36)


def test_a_bias_of_some_sections_does_not_say_whose_it_is() -> None:
    layer = hw.MultiHeadAttention(12, 3, bias=(True, False, True))
    with pytest.raises(ValueError, match="is ambiguous"):
        hw.convert(layer.state_dict(), source="headwise", target="torch", num_heads=3)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=lambda layout: layout.name)
def test_rows_are_whole(layout: Layout) -> None:
    for form in layout.forms:
        held = [part for parts, _ in form.tensors.values() for part in parts.split(".")[:1]]
        weights = "".join(
            p
            for p, (parts, _) in zip(held, form.tensors.values(), strict=True)
            if parts.endswith("weight") and "norm" not in p
        )
        assert sorted(weights.replace("out", "")) == ["k", "q", "v"]
        for group in form.optional:
            assert set(group) <= form.tensors.keys()
    assert layout.description
    assert layout.rope in (None, "half", "interleaved")

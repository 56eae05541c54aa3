"""No false alarm: right layers that others wrote, and the ladder's, have no ❌."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, GPT2Config, LlamaConfig, ViTConfig
from transformers.models.bert.modeling_bert import BertSelfAttention
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.vit.modeling_vit import ViTAttention
from x_transformers.x_transformers import Attention

from headwise.attend import attend
from headwise.check import Verdict, check
from headwise.core.masks import Causal
from headwise.layers.attention import MultiHeadAttention
from headwise.layers.rope import RoPE
from headwise.systems.functional import MultiHead, scaled_dot_product_attention
from headwise.systems.fused import GPT2MultiHeadAttention
from headwise.systems.per_head import (
    CausalAttention,
    MultiHeadedAttentionWrapper,
    NotebookCausalAttention,
    NotebookMultiHead,
)
from headwise.systems.split import MultiHeadAttn
from headwise.systems.variants import (
    Einsum,
    FusedQKV,
    SDPAFlag,
    SDPAMask,
    TorchAttention,
)


def assert_right(verdict: Verdict, *but: str) -> Verdict:
    """Nothing wrong, the weights were read, and nothing but `but` was left out."""
    assert verdict.passed, str(verdict)
    skipped = {one.rule for one in verdict.results if one.severity == "skipped"}
    assert skipped <= set(but)
    return verdict


@pytest.mark.parametrize(
    "layer",
    [
        CausalAttention,
        MultiHeadedAttentionWrapper,
        NotebookCausalAttention,
        NotebookMultiHead,
        MultiHeadAttn,
        GPT2MultiHeadAttention,
        MultiHead,
        FusedQKV,
        Einsum,
        SDPAFlag,
        SDPAMask,
        TorchAttention,
        MultiHeadAttention,
    ],
)
def test_the_ladder_is_right(layer: type[nn.Module]) -> None:
    verdict = assert_right(check(layer))
    assert verdict["definition"].severity == "passed"
    assert verdict["causality"].severity == "passed"


def test_the_ladders_functions_are_right() -> None:
    for function in (scaled_dot_product_attention, attend):
        assert assert_right(check(function))["causality"].severity == "passed"
        assert_right(check(function, causal=False), "causality")
        assert_right(check(function, num_heads=6, num_kv_heads=6))
    assert_right(check(attend, num_heads=6, num_kv_heads=3))


@pytest.mark.parametrize(
    "options",
    [
        {"rope": RoPE(8)},
        {"qk_norm": True},
        {"bias": (True, False, True)},
        {"out_dim": 20},
        {"softcap": 5.0},
        {"dropout": 0.3},
    ],
    ids=lambda options: next(iter(options)),
)
def test_our_layers_options_are_right(options: dict[str, Any]) -> None:
    layer = MultiHeadAttention(24, 3, **options)
    for causal in (True, False):
        assert_right(check(layer, causal=causal), "causality", "order", "cross", "definition")
    assert_right(check(MultiHeadAttention(24, 6, num_kv_heads=3), causal=True))


@pytest.mark.parametrize("causal", [True, False, None])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_pytorchs_layer_is_right(bias: bool, batch_first: bool, causal: bool | None) -> None:
    layer = nn.MultiheadAttention(24, 3, bias=bias, batch_first=batch_first)
    verdict = assert_right(check(layer, causal=causal), "causality")
    assert verdict["definition"].severity == "passed"
    assert verdict["weights"].severity == "passed"
    assert verdict["padding"].severity == "passed"
    assert verdict["cross"].severity == "passed"


def test_pytorchs_layer_is_right_without_weights() -> None:
    def without(layer: nn.MultiheadAttention, x: Tensor) -> Tensor:
        return layer(x, x, x, need_weights=False)[0]

    apart = ("causality", "equal-tokens", "one-token", "parameter-count", "definition")
    for extra in ("add_zero_attn", "add_bias_kv"):  # a key that belongs to no token
        layer = nn.MultiheadAttention(24, 3, batch_first=True, **{extra: True})
        assert_right(check(layer, causal=False), *apart)
    layer = nn.MultiheadAttention(24, 3, batch_first=True)
    verdict = assert_right(check(layer, call=without), "causality")
    assert "weights" not in {one.rule for one in verdict.results}


def config(kind: type, implementation: str, **sizes: Any) -> Any:
    return kind(hidden_size=24, attn_implementation=implementation, **sizes)


def layers(implementation: str) -> dict[str, nn.Module]:
    gpt2 = config(GPT2Config, implementation, num_attention_heads=3)
    llama = config(LlamaConfig, implementation, num_attention_heads=6, num_key_value_heads=3)
    bert = config(BertConfig, implementation, num_attention_heads=3)
    vit = config(ViTConfig, implementation, num_attention_heads=3)
    return {
        "gpt2": GPT2Attention(gpt2, layer_idx=0),
        "llama": LlamaAttention(llama, layer_idx=0),
        "bert": BertSelfAttention(bert),
        "vit": ViTAttention(vit),
    }


@pytest.mark.parametrize("causal", [True, False, None])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["gpt2", "bert", "vit"])
def test_hugging_faces_layers_are_right(
    name: str, implementation: str, causal: bool | None
) -> None:
    if causal is False and implementation == "sdpa" and name == "gpt2":
        return  # without a mask it hides later tokens by itself: there is nothing to ask
    verdict = check(layers(implementation)[name], causal=causal)
    # its Conv1D takes a view of x
    assert {one.rule for one in verdict.errors} <= ({"contiguous"} if name == "gpt2" else set())
    assert verdict["definition"].severity == "passed"
    returns = {one.rule for one in verdict.results if one.rule == "weights"}
    assert bool(returns) == (implementation == "eager")


def test_a_layer_that_needs_tables_is_asked_about() -> None:
    layer = layers("eager")["llama"]
    with pytest.raises(ValueError, match='--call "lambda layer, x: layer'):
        check(layer)

    def call(layer: nn.Module, x: Tensor, start: int, allow: Tensor) -> Any:
        places = torch.arange(start, start + x.shape[1])
        angles = torch.outer(places, 10000.0 ** (-torch.arange(0, 4, 2) / 4))
        both = torch.cat((angles, angles), -1).to(x)[None]
        hidden = torch.zeros(allow.shape).masked_fill(~allow, -torch.inf).to(x)
        return layer(x, (both.cos(), both.sin()), hidden[None, None])

    verdict = check(layer, call=call)
    assert_right(verdict, "definition", "cache", "order")
    assert verdict["rotary"].severity == verdict["mask"].severity == "passed"


def test_caches_are_used() -> None:
    for layer in (
        layers("eager")["gpt2"],
        MultiHeadAttention(24, 3),
        GPT2MultiHeadAttention(GPT2Config(n_embd=24, n_head=3)),
    ):
        assert check(layer, causal=True)["cache"].severity == "passed"


def test_a_layer_called_by_hand_is_right() -> None:
    layer = MultiHeadAttention(24, 3)
    assert_right(check(layer, call=lambda layer, x: layer(x, mask=Causal())))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("groups", "flash"), [(1, False), (2, False), (6, False), (2, True)])
def test_x_transformers_layer_is_right(groups: int, flash: bool, causal: bool) -> None:
    sizes = {"heads": 6, "kv_heads": groups, "dim_head": 4, "causal": causal, "flash": flash}
    verdict = check(Attention(24, **sizes), causal=causal)
    assert verdict.passed, str(verdict)
    assert verdict["definition"].severity == "passed"


@pytest.mark.parametrize("option", ["num_mem_kv", "qk_norm", "gate_values", "one_kv_head"])
def test_x_transformers_options_are_no_mistakes(option: str) -> None:
    given = {option: 2 if option == "num_mem_kv" else True}
    verdict = check(Attention(24, heads=3, dim_head=8, causal=True, **given))
    assert verdict.passed, str(verdict)

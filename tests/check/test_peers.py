"""No false alarm: right layers that others wrote, and the ladder's, have no ❌."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, GPT2Config, LlamaConfig, ViTConfig
from transformers.models.bert.modeling_bert import BertAttention, BertSelfAttention
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.vit.modeling_vit import ViTAttention

from headwise.attend import attend
from headwise.check import Verdict, check
from headwise.core.masks import Causal
from headwise.layers.attention import MultiHeadAttention
from headwise.layers.rope import RoPE
from headwise.tutorial.implementations import scalar
from headwise.tutorial.implementations.functional import MultiHead, scaled_dot_product_attention
from headwise.tutorial.implementations.fused import GPT2MultiHeadAttention
from headwise.tutorial.implementations.per_head import (
    CausalAttention,
    MultiHeadedAttentionWrapper,
    NotebookCausalAttention,
    NotebookMultiHead,
)
from headwise.tutorial.implementations.split import MultiHeadAttn
from headwise.tutorial.implementations.variants import (
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


class Scalar(nn.Module):
    """The ladder's first rung, number by number."""

    def __init__(self, n_embd: int, n_head: int) -> None:
        super().__init__()
        self.n_head = n_head
        for name in ("wq", "wk", "wv", "wo"):
            self.register_buffer(name, torch.randn(n_embd, n_embd))

    def forward(self, x: Tensor) -> Tensor:
        wq, wk, wv, wo = (
            scalar.as_values(self.get_buffer(name).tolist()) for name in ("wq", "wk", "wv", "wo")
        )
        rows = []
        for sequence in x:
            keys: list[Any] = []
            values: list[Any] = []
            tokens = [
                scalar.attention(token, wq, wk, wv, wo, keys, values, self.n_head)
                for token in scalar.as_values(sequence.tolist())
            ]
            rows.append([[value.data for value in token] for token in tokens])
        return torch.tensor(rows, dtype=x.dtype)


def test_the_scalar_rung_is_right() -> None:
    verdict = check(Scalar, embed_dim=6, num_heads=3)
    assert_right(verdict, "definition", "gradients")
    assert verdict["causality"].severity == "passed"


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
        "bert with its norm": BertAttention(bert),
        "vit": ViTAttention(vit),
    }


@pytest.mark.parametrize("causal", [True, False, None])
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "bert with its norm", "vit"])
def test_hugging_faces_layers_are_right(
    name: str, implementation: str, causal: bool | None
) -> None:
    if causal is False and implementation == "sdpa" and name in ("gpt2", "llama"):
        return  # without a mask these hide later tokens by themselves: there is nothing to ask
    layer = layers(implementation)[name]
    verdict = check(layer, causal=causal)
    assert_right(verdict, "causality", "cross", "cache", "one-token", "dropout", "context", "order")
    assert verdict["definition"].severity == "passed"
    returns = {one.rule for one in verdict.results if one.rule == "weights"}
    assert bool(returns) == (implementation == "eager")


def test_caches_are_driven() -> None:
    eager = layers("eager")
    for layer in (
        eager["gpt2"],
        eager["llama"],
        MultiHeadAttention(24, 3),
        GPT2MultiHeadAttention(GPT2Config(n_embd=24, n_head=3)),
    ):
        assert check(layer, causal=True)["cache"].severity == "passed"


def test_a_layer_called_by_hand_is_right() -> None:
    layer = MultiHeadAttention(24, 3)
    assert_right(check(layer, call=lambda layer, x: layer(x, mask=Causal())))

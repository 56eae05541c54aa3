"""MultiHeadAttention beside the layers people come from: PyTorch's, Llama's and Qwen 3's."""

import copy
import math

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, Qwen3Config
from transformers.models.llama import modeling_llama
from transformers.models.qwen3 import modeling_qwen3

from headwise.core.masks import Causal, Padding
from headwise.layers.attention import MultiHeadAttention
from headwise.layers.rope import RoPE

EPS32, EPS64 = torch.finfo(torch.float32).eps, torch.finfo(torch.float64).eps
B, T, S, D, C = 2, 7, 11, 10, 13


def inputs(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", ["self", "cross", "kdim"])
def test_equals_pytorchs_layer(kind, bias):
    width = C if kind == "kdim" else 21
    theirs = nn.MultiheadAttention(
        21, 3, bias=bias, kdim=width, vdim=width, batch_first=True, dtype=torch.float64
    )
    ours = MultiHeadAttention(21, 3, bias=bias, kv_dim=width, dtype=torch.float64)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_()
        ours.out.load_state_dict(theirs.out_proj.state_dict())
        if kind == "kdim":
            ours.q.weight.copy_(theirs.q_proj_weight)
            ours.kv.weight.copy_(torch.cat((theirs.k_proj_weight, theirs.v_proj_weight)))
        else:
            ours.qkv.weight.copy_(theirs.in_proj_weight)
        if bias:
            mine = [ours.q.bias, ours.kv.bias] if kind == "kdim" else [ours.qkv.bias]
            for part, given in zip(
                mine, theirs.in_proj_bias.split([len(p) for p in mine]), strict=True
            ):
                part.copy_(given)
    x = inputs(B, T, 21)
    context = None if kind == "self" else inputs(B, S, width)
    source = x if context is None else context
    lengths = torch.tensor([4, 6])
    hidden = torch.arange(source.shape[1]) >= lengths[:, None]  # in PyTorch True means hidden
    expected = theirs(x, source, source, key_padding_mask=hidden, need_weights=False)[0]
    found = ours(x, context, mask=Padding(lengths))
    # weights of deviation 1 make scores of order 21·sqrt(7), whose rounding the softmax takes over
    assert (found - expected).abs().max() <= 256 * EPS64 * expected.abs().max()


ROPE_KINDS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 5},
}


def hugging_face(config_class, attention, rotary, scaling: dict):
    """Their attention module, its angles, and ours with the same weights, in float64."""
    torch.manual_seed(5)
    config = config_class(
        hidden_size=18,  # Llama's config wants a multiple of the heads
        head_dim=D,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=5,
        attention_bias=False,
        attn_implementation="eager",
        rope_parameters={**scaling, "rope_theta": 50.0},
    )
    theirs = attention(config, layer_idx=0).double()
    ours = MultiHeadAttention(
        18,
        6,
        head_dim=D,
        num_kv_heads=2,
        bias=False,
        rope=RoPE.from_config(config),
        qk_norm=hasattr(theirs, "q_norm"),
        dtype=torch.float64,
    )
    with torch.no_grad():
        joined = [theirs.q_proj.weight, theirs.k_proj.weight, theirs.v_proj.weight]
        ours.qkv.weight.copy_(torch.cat(joined))
        ours.out.weight.copy_(theirs.o_proj.weight)
        for mine, his in (("q_norm", "q_norm"), ("k_norm", "k_norm")):
            if hasattr(theirs, his):
                getattr(theirs, his).weight.uniform_(0.5, 2.0)
                getattr(ours, mine).weight.copy_(getattr(theirs, his).weight)
    return ours, theirs, rotary(config)


@pytest.mark.parametrize("kind", ROPE_KINDS)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_equals_llama_and_qwen3(family, kind):
    parts = {
        "llama": (LlamaConfig, modeling_llama.LlamaAttention, modeling_llama.LlamaRotaryEmbedding),
        "qwen3": (Qwen3Config, modeling_qwen3.Qwen3Attention, modeling_qwen3.Qwen3RotaryEmbedding),
    }
    ours, theirs, rotary = hugging_face(*parts[family], ROPE_KINDS[kind])
    x = inputs(B, T, 18)
    hidden = torch.full((T, T), -math.inf, dtype=torch.float64).triu(1)
    angles = rotary(x, torch.arange(T)[None])
    expected = theirs(x, position_embeddings=angles, attention_mask=hidden)[0].detach()
    found = ours(x, mask=Causal())
    # They turn (and Qwen normalises) in float32: an angle up to T is off by T·eps, times the
    # rounding of its frequency; weights follow scores, which are of order 1.
    tolerance = 8 * T * EPS32 * float(expected.abs().max())
    assert (found - expected).abs().max() <= tolerance
    without = copy.deepcopy(ours)
    without.rope = RoPE(D, base=50.0, interleaved=True)  # the other convention is another layer
    assert (without(x, mask=Causal()) - expected).abs().max() > 100 * tolerance

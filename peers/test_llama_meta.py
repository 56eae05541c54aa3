"""Meta's Llama rotates neighbouring features, Hugging Face's the two halves of a head.

Meta's model is no package to install. `meta_attention` is its formula: rotation by products of
complex numbers, keys and values repeated for the heads that share them.
"""

import pytest
import torch
from carrying import B, T, came_back, carry, error, some_layer
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

import headwise as hw

WIDTH, HEADS, DIM, BASE = 36, 6, 8, 10_000.0


def meta_attention(state: dict[str, Tensor], x: Tensor, groups: int) -> Tensor:
    """`[B, T, WIDTH]` to the same, causal, with Meta's names of weights."""
    length = x.shape[1]
    steps = BASE ** -(torch.arange(0, DIM, 2, dtype=torch.float64) / DIM)
    angles = torch.outer(torch.arange(length, dtype=torch.float64), steps)
    turns = torch.polar(torch.ones_like(angles), angles)

    def heads(name: str, number: int) -> Tensor:
        return (x.double() @ state[name].double().T).view(*x.shape[:2], number, DIM)

    def rotated(heads: Tensor) -> Tensor:
        pairs = torch.view_as_complex(heads.reshape(*heads.shape[:-1], DIM // 2, 2))
        return torch.view_as_real(pairs * turns[None, :, None]).flatten(-2)

    q, k, v = heads("wq.weight", HEADS), heads("wk.weight", groups), heads("wv.weight", groups)
    shared = HEADS // groups
    q, k = rotated(q).transpose(1, 2), rotated(k).repeat_interleave(shared, 2).transpose(1, 2)
    v = v.repeat_interleave(shared, 2).transpose(1, 2)
    scores = q @ k.transpose(-1, -2) / DIM**0.5
    scores += torch.full((length, length), -torch.inf).triu(1)
    out = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
    return (out @ state["wo.weight"].double().T).float()


@pytest.mark.parametrize("groups", [1, 2, 6])
def test_meta_and_hugging_face_and_ours_agree(groups: int) -> None:
    ours = some_layer(
        WIDTH,
        num_heads=HEADS,
        num_kv_heads=groups,
        head_dim=DIM,
        bias=False,
        rope=hw.RoPE(DIM, BASE),
    )
    x = torch.randn(B, T, WIDTH)
    meta = {name: torch.tensor(array) for name, array in carry(ours, "llama_meta").items()}
    expected = meta_attention(meta, x, groups)
    assert error(ours(x, mask=hw.Causal()), expected) < 1e-5
    assert came_back(ours, meta, "llama_meta")

    config = LlamaConfig(
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        num_key_value_heads=groups,
        head_dim=DIM,
        rope_parameters={"rope_type": "default", "rope_theta": BASE},
    )
    config._attn_implementation = "eager"
    theirs = LlamaAttention(config, layer_idx=0).eval()
    theirs.load_state_dict(
        hw.convert(meta, source="llama_meta", target="llama", num_heads=HEADS, num_kv_heads=groups)
    )
    position = LlamaRotaryEmbedding(config)(x, torch.arange(T)[None].expand(B, T))
    mask = torch.full((1, 1, T, T), -torch.inf).triu(1)
    assert error(theirs(x, position_embeddings=position, attention_mask=mask)[0], expected) < 1e-5


def test_the_order_of_the_rotated_features_matters() -> None:
    """Loaded without reordering, Meta's weights give other numbers: so the test above can fail."""
    ours = some_layer(WIDTH, num_heads=HEADS, head_dim=DIM, bias=False, rope=hw.RoPE(DIM, BASE))
    x = torch.randn(B, T, WIDTH)
    straight = hw.convert(ours.state_dict(), source="headwise", target="llama", num_heads=HEADS)
    renamed = {f"w{name[0]}.weight": tensor for name, tensor in straight.items()}
    assert error(meta_attention(renamed, x, HEADS), ours(x, mask=hw.Causal())) > 1e-2

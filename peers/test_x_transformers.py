"""x-transformers' `Attention` with our weights, and theirs with us."""

from typing import Any

import pytest
import torch
from carrying import B, E, S, T, came_back, carry, error, some_layer
from torch import Tensor
from x_transformers.x_transformers import Attention

import headwise as hw


def theirs_with(state: dict[str, Any], **sizes: Any) -> Attention:
    module = Attention(E, **sizes).eval()
    module.load_state_dict({name: torch.tensor(array) for name, array in state.items()})
    return module


def output(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("flash", [True, False])
@pytest.mark.parametrize("groups", [1, 2, 3, 6])
def test_self_attention_with_grouped_heads(groups: int, flash: bool, causal: bool) -> None:
    ours = some_layer(num_heads=6, num_kv_heads=groups, bias=False)
    sizes = {"heads": 6, "kv_heads": groups, "dim_head": 4, "causal": causal, "flash": flash}
    theirs = theirs_with(carry(ours, "x_transformers"), **sizes)
    x = torch.randn(B, T, E)
    mask = hw.Causal() if causal else None
    assert error(output(theirs(x)), ours(x, mask=mask)) < 1e-5
    assert came_back(ours, theirs.state_dict(), "x_transformers")


@pytest.mark.parametrize("groups", [2, 6])
def test_cross_attention_of_other_widths(groups: int) -> None:
    ours = some_layer(
        num_heads=6, num_kv_heads=groups, head_dim=5, kv_dim=10, out_dim=13, bias=False
    )
    sizes = {"heads": 6, "kv_heads": groups, "dim_head": 5, "dim_context": 10, "dim_out": 13}
    theirs = theirs_with(carry(ours, "x_transformers"), **sizes)
    x, context = torch.randn(B, T, E), torch.randn(B, S, 10)
    assert error(output(theirs(x, context=context)), ours(x, context)) < 1e-5
    assert came_back(ours, theirs.state_dict(), "x_transformers")


def test_what_they_have_no_place_for_is_refused() -> None:
    with pytest.raises(ValueError, match="'x_transformers' cannot hold"):
        carry(some_layer(num_heads=3), "x_transformers")  # biases
    extras = (
        {"num_mem_kv": 2},
        {"gate_values": True},
        {"qk_norm": True, "qk_norm_dim_scale": True},
    )
    for extra in extras:
        state = Attention(E, heads=3, dim_head=8, **extra).state_dict()
        with pytest.raises(ValueError, match=r"mem_k|to_v_gate|qk_norm_q_scale"):
            hw.convert(state, source="x_transformers", target="headwise", num_heads=3)

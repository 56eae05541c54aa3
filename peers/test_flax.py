"""Flax: `nnx.MultiHeadAttention` with our weights, and theirs with us."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from carrying import B, E, S, T, came_back, carry, error, inside, some_layer
from flax import nnx

import headwise as hw


def weights(module: nnx.Module) -> dict[str, np.ndarray]:
    flat = nnx.to_flat_state(nnx.state(module, nnx.Param))
    return {".".join(map(str, path)): np.asarray(value[...]) for path, value in flat}


def theirs_with(state: dict[str, np.ndarray], **sizes: Any) -> nnx.MultiHeadAttention:
    """Their layer of those sizes, with these weights and no others."""
    module = nnx.MultiHeadAttention(**sizes, decode=False, rngs=nnx.Rngs(0))
    shapes = {name: array.shape for name, array in weights(module).items()}
    assert shapes == {name: array.shape for name, array in state.items()}
    flat = nnx.to_flat_state(nnx.state(module, nnx.Param))
    changed = [
        (path, value.replace(jnp.asarray(state[".".join(map(str, path))]))) for path, value in flat
    ]
    nnx.update(module, nnx.from_flat_state(changed))
    return module


def jax(x: torch.Tensor) -> Any:
    return jnp.asarray(x.numpy())


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_self_attention(bias: bool, causal: bool) -> None:
    ours = some_layer(num_heads=3, bias=bias)
    theirs = theirs_with(carry(ours, "flax"), num_heads=3, in_features=E, use_bias=bias)
    x = torch.randn(B, T, E)
    mask = nnx.make_causal_mask(jnp.ones((B, T))) if causal else None
    assert error(theirs(jax(x), mask=mask), ours(x, mask=hw.Causal() if causal else None)) < 1e-5
    assert came_back(ours, weights(theirs), "flax")


def test_cross_attention_of_other_widths() -> None:
    ours = some_layer(num_heads=3, head_dim=5, kv_dim=10, out_dim=13)
    sizes = {"in_features": E, "qkv_features": 15, "in_kv_features": 10, "out_features": 13}
    theirs = theirs_with(carry(ours, "flax"), num_heads=3, **sizes)
    x, context = torch.randn(B, T, E), torch.randn(B, S, 10)
    assert error(theirs(jax(x), jax(context)), ours(x, context)) < 1e-5
    assert came_back(ours, weights(theirs), "flax")


@pytest.mark.parametrize("groups", [1, 2, 6])
def test_grouped_heads(groups: int) -> None:
    ours = some_layer(num_heads=6, num_kv_heads=groups)
    theirs = theirs_with(carry(ours, "flax"), num_heads=6, num_kv_heads=groups, in_features=E)
    x = torch.randn(B, T, E)
    mask = nnx.make_causal_mask(jnp.ones((B, T)))
    assert error(theirs(jax(x), mask=mask), ours(x, mask=hw.Causal())) < 1e-5
    assert came_back(ours, weights(theirs), "flax")


def test_their_norms_of_q_and_k_are_others_and_refused() -> None:
    module = nnx.MultiHeadAttention(3, E, normalize_qk=True, decode=False, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="query_ln"):
        hw.convert(weights(module), source="flax", target="headwise", num_heads=3)
    with pytest.raises(ValueError, match="'flax' cannot hold"):
        carry(some_layer(num_heads=3, qk_norm=True), "flax")


def test_every_layer_of_a_model() -> None:
    class Block(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.attn = nnx.MultiHeadAttention(3, E, decode=False, rngs=rngs)
            self.ln = nnx.LayerNorm(E, rngs=rngs)
            self.mlp = nnx.Linear(E, 5, rngs=rngs)

    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.blocks = nnx.List([Block(rngs) for _ in range(2)])

    model = Model(nnx.Rngs(0))
    state = weights(model)
    assert hw.detect_layout(state) == "flax"
    converted = hw.convert(state, target="headwise")
    x = torch.randn(B, T, E)
    for number, block in enumerate(model.blocks):
        ours = hw.MultiHeadAttention(E, num_heads=3).eval()
        ours.load_state_dict(inside(converted, f"blocks.{number}.attn."))
        assert error(block.attn(jax(x)), ours(x)) < 1e-5
        assert np.array_equal(converted[f"blocks.{number}.mlp.kernel"], block.mlp.kernel[...])

"""Keras: `MultiHeadAttention` and `GroupQueryAttention` with our weights, and theirs with us."""

from typing import Any

import keras
import numpy as np
import pytest
import torch
from carrying import B, E, S, T, came_back, carry, error, inside, some_layer

import headwise as hw


def weights(layer: Any) -> dict[str, np.ndarray]:
    """The layer's weights by their paths, without the layer's own name."""
    return {
        weight.path.removeprefix(f"{layer.name}/"): keras.ops.convert_to_numpy(weight)
        for weight in layer.weights
    }


def load(layer: Any, state: dict[str, np.ndarray]) -> None:
    places = {weight.path.removeprefix(f"{layer.name}/"): weight for weight in layer.weights}
    assert state.keys() == places.keys()
    for name, weight in places.items():
        assert weight.shape == state[name].shape
        weight.assign(state[name])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_self_attention(bias: bool, causal: bool) -> None:
    ours = some_layer(num_heads=3, bias=bias)
    theirs = keras.layers.MultiHeadAttention(3, 8, use_bias=bias)
    theirs.build((B, T, E), (B, T, E))
    load(theirs, carry(ours, "keras"))
    x = torch.randn(B, T, E)
    mask = hw.Causal() if causal else None
    assert error(theirs(x, x, use_causal_mask=causal), ours(x, mask=mask)) < 1e-5
    assert came_back(ours, weights(theirs), "keras")


def test_cross_attention_of_other_widths() -> None:
    ours = some_layer(num_heads=3, head_dim=5, kv_dim=10, out_dim=13)
    theirs = keras.layers.MultiHeadAttention(3, 5, output_shape=13)
    theirs.build((B, T, E), (B, S, 10))
    load(theirs, carry(ours, "keras"))
    x, context = torch.randn(B, T, E), torch.randn(B, S, 10)
    assert error(theirs(x, context), ours(x, context)) < 1e-5
    assert came_back(ours, weights(theirs), "keras")


@pytest.mark.parametrize("groups", [1, 2, 6])
def test_grouped_heads(groups: int) -> None:
    ours = some_layer(num_heads=6, num_kv_heads=groups)
    theirs = keras.layers.GroupQueryAttention(4, 6, groups)
    theirs.build((B, T, E), (B, T, E))
    load(theirs, carry(ours, "keras"))
    x = torch.randn(B, T, E)
    assert error(theirs(x, x, use_causal_mask=True), ours(x, mask=hw.Causal())) < 1e-5
    assert came_back(ours, weights(theirs), "keras")


def test_a_padding_mask_means_the_same() -> None:
    ours = some_layer(num_heads=3)
    theirs = keras.layers.MultiHeadAttention(3, 8)
    theirs.build((B, T, E), (B, T, E))
    load(theirs, carry(ours, "keras"))
    x, lengths = torch.randn(B, T, E), torch.tensor([4, 7])
    seen = torch.arange(T)[None, None] < lengths[:, None, None]
    padded = theirs(x, x, attention_mask=seen.expand(B, T, T))
    assert error(padded, ours(x, mask=hw.Padding(lengths))) < 1e-5


def test_values_of_another_width_are_refused() -> None:
    theirs = keras.layers.MultiHeadAttention(3, 8, value_dim=5)
    theirs.build((B, T, E), (B, T, E))
    with pytest.raises(ValueError, match="'headwise' cannot hold"):
        hw.convert(weights(theirs), source="keras", target="headwise", num_heads=3)


def test_every_layer_of_a_model() -> None:
    entry = keras.Input((T, E))
    hidden = keras.layers.MultiHeadAttention(3, 8, name="first")(entry, entry)
    hidden = keras.layers.LayerNormalization()(hidden)
    hidden = keras.layers.MultiHeadAttention(3, 8, name="second")(hidden, hidden)
    model = keras.Model(entry, keras.layers.Dense(5)(hidden))
    state = {weight.path: keras.ops.convert_to_numpy(weight) for weight in model.weights}
    assert hw.detect_layout(state) == "keras"
    converted = hw.convert(state, target="headwise")
    x = torch.randn(B, T, E)
    for name in ("first", "second"):
        ours = hw.MultiHeadAttention(E, num_heads=3).eval()
        ours.load_state_dict(inside(converted, f"{name}/"))
        assert error(model.get_layer(name)(x, x), ours(x)) < 1e-5
    others = {name for name in state if not name.startswith(("first/", "second/"))}
    assert len(others) == 4
    assert all(np.array_equal(converted[name], state[name]) for name in others)

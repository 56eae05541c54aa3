"""What the peers' tests share: layers with random weights, carried to a peer and back."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

import headwise as hw

# Every axis has its own size, so that a swapped one fails.
B, T, S, E = 2, 7, 11, 24


def some_layer(embed_dim: int = E, **options: Any) -> hw.MultiHeadAttention:
    """A layer whose weights and biases are all different, so that none can be mixed up."""
    layer = hw.MultiHeadAttention(embed_dim, **options).eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    return layer


def carry(layer: hw.MultiHeadAttention, target: str) -> dict[str, np.ndarray]:
    """The layer's weights in the peer's layout."""
    state = hw.convert(
        layer.state_dict(),
        source="headwise",
        target=target,
        num_heads=layer.num_heads,
        num_kv_heads=layer.num_kv_heads,
    )
    return {name: tensor.numpy() for name, tensor in state.items()}


def came_back(layer: hw.MultiHeadAttention, state: dict[str, Any], source: str) -> bool:
    """Whether the peer's own weights give the layer's again, bit for bit."""
    back = hw.convert(
        state,
        source=source,
        target="headwise",
        num_heads=layer.num_heads,
        num_kv_heads=layer.num_kv_heads,
    )
    ours = layer.state_dict()
    return back.keys() == ours.keys() and all(torch.equal(back[name], ours[name]) for name in ours)


def inside(state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors under a prefix, without it."""
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in state.items()
        if name.startswith(prefix)
    }


def error(theirs: Any, ours: Tensor) -> float:
    """The largest difference of two outputs that are not all near zero."""
    if isinstance(theirs, Tensor):
        theirs = theirs.detach().numpy()
    given, wanted = np.asarray(theirs), ours.detach().numpy()
    assert given.shape == wanted.shape
    assert np.abs(wanted).mean() > 0.05
    return float(np.abs(given - wanted).max())

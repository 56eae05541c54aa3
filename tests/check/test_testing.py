"""`headwise.testing.assert_attention`: it fails in the words of `check`, or at a difference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise as hw
from headwise.check import check
from headwise.layers.attention import MultiHeadAttention
from headwise.systems.per_head import NotebookCausalAttention
from headwise.systems.split import MultiHeadAttn
from headwise.testing import assert_attention


class Fast(nn.Module):
    """Attention by SDPA; `wrong` is a mistake that `check` cannot know of."""

    wrong = ""

    def __init__(self, dim: int = 24, heads: int = 3) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))

    def parts(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (
            part(rows).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part, rows in ((self.q, x), (self.k, memory), (self.v, memory))
        )
        return q, k, v

    def forward(self, x: Tensor, memory: Tensor | None = None, mask: Any = None) -> Tensor:
        q, k, v = self.parts(x, x if memory is None else memory)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.o(out.transpose(1, 2).flatten(2))


def slow(
    layer: Fast, x: Tensor, memory: Tensor | None = None, mask: Tensor | None = None
) -> Tensor:
    """The same, as the textbook writes it."""
    q, k, v = layer.parts(x, x if memory is None else memory)
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return layer.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


CALLS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "x": (lambda layer, x: layer(x), lambda layer, x: slow(layer, x)),
    "keep": (
        lambda layer, x, keep: layer(x, mask=keep[:, None, None]),
        lambda layer, x, keep: slow(layer, x, mask=keep[:, None, None]),
    ),
    "allow": (
        lambda layer, x, allow: layer(x, mask=allow),
        lambda layer, x, allow: slow(layer, x, mask=allow),
    ),
    "memory": (
        lambda layer, x, memory: layer(x, memory),
        lambda layer, x, memory: slow(layer, x, memory),
    ),
    "memory, keep": (
        lambda layer, x, memory, keep: layer(x, memory, keep[:, None, None]),
        lambda layer, x, memory, keep: slow(layer, x, memory, keep[:, None, None]),
    ),
}


@pytest.mark.parametrize("names", CALLS)
def test_a_layer_equals_its_reference(names: str) -> None:
    call, reference = CALLS[names]
    verdict = assert_attention(Fast(), call=call, reference=reference)
    assert verdict.passed
    assert assert_attention(Fast, 24, 3, call=call, reference=reference).passed


def other(layer: Fast, x: Tensor) -> Tensor:
    """A reference with another scale."""
    q, k, v = layer.parts(x, x)
    return layer.o(((q @ k.mT / 3.0).softmax(-1) @ v).transpose(1, 2).flatten(2))


class Detached(Fast):
    """The right output, and another gradient at x."""

    def forward(self, x: Tensor, memory: Tensor | None = None, mask: Any = None) -> Tensor:
        out = super().forward(x, memory, mask)
        return out + (x * 0.1).sum(-1, keepdim=True) - (x.detach() * 0.1).sum(-1, keepdim=True)


@pytest.mark.parametrize(
    ("layer", "reference", "says"),
    [
        (Fast, other, r"x \[2, 7, 24\]: the output differs from the reference by [\d.]+"),
        (Detached, slow, r"x \[2, 7, 24\]: the gradient at x differs from the reference"),
        (Fast, lambda layer, x: slow(layer, x)[..., :8], r"the output is \[2, 7, 24\], the ref"),
        (Fast, lambda layer, x: slow(layer, x) * torch.nan, "differs from the reference by nan"),
    ],
)
def test_where_it_differs_is_said(
    layer: type[Fast], reference: Callable[..., Any], says: str
) -> None:
    def wanted(layer: Fast, x: Tensor) -> Tensor:
        out: Tensor = reference(layer, x)
        return out

    with pytest.raises(AssertionError, match=says):
        assert_attention(layer(), call=lambda layer, x: layer(x), reference=wanted)


def test_padding_is_compared_at_real_tokens_alone() -> None:
    def call(layer: nn.Module, x: Tensor, keep: Tensor) -> Tensor:
        return layer(x, mask=keep[:, None, None])

    def zeroed(layer: Fast, x: Tensor, keep: Tensor) -> Tensor:
        return slow(layer, x, mask=keep[:, None, None]) * keep[..., None]

    def inverted(layer: Fast, x: Tensor, keep: Tensor) -> Tensor:
        return slow(layer, x, mask=keep.flip(1)[:, None, None])

    assert assert_attention(Fast(), call=call, reference=zeroed).passed
    with pytest.raises(AssertionError, match=r"with padding: the output differs"):
        assert_attention(Fast(), call=call, reference=inverted)


def test_the_tolerance_is_a_share_of_the_largest_number() -> None:
    def near(layer: Fast, x: Tensor) -> Tensor:
        return slow(layer, x) * (1 + 1e-3)

    def call(layer: nn.Module, x: Tensor) -> Tensor:
        return layer(x)

    with pytest.raises(AssertionError, match=r"differs.*\(allowed: 0.0001\)"):
        assert_attention(Fast(), call=call, reference=near)
    assert assert_attention(Fast(), call=call, reference=near, tolerance=1e-2).passed


def test_a_causal_layer_gets_its_mask() -> None:
    layer = MultiHeadAttention(24, num_heads=3)
    same = nn.MultiheadAttention(24, 3, batch_first=True)
    weights = hw.convert(layer.state_dict(), source="headwise", target="torch", num_heads=3)
    same.load_state_dict(weights)

    def reference(x: Tensor, keep: Tensor) -> Tensor:
        out: Tensor = same(x, x, x, key_padding_mask=~keep)[0]
        return out

    assert assert_attention(
        layer,
        call=lambda layer, x, keep: layer(x, mask=hw.Padding(keep.sum(-1))),
        reference=reference,
    ).passed


def test_it_passes_and_fails_with_the_words_of_the_check() -> None:
    assert assert_attention(MultiHeadAttn, embed_dim=24, num_heads=3, causal=True).passed
    with pytest.raises(AssertionError) as failure:
        assert_attention(NotebookCausalAttention, faithful=True)
    wrong = check(NotebookCausalAttention, faithful=True)
    assert str(wrong.errors[0]) in str(failure.value)
    assert wrong.summary() in str(failure.value)
    with pytest.raises(ValueError, match="call= has mask among its parameters"):
        assert_attention(Fast(), call=lambda layer, x, mask: layer(x))

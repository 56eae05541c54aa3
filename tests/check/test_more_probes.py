"""What lists of layers that others wrote showed to be missing: each on a layer of a few lines."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.check import check

Past = tuple[Tensor, Tensor] | None


class Decoder(nn.Module):
    """Causal attention by PyTorch's function; padding, if it is given, is hidden as well."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.w_q, self.w_k, self.w_v, self.w_o = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, x: Tensor, key_mask: Tensor | None = None) -> Tensor:
        q, k, v = (
            w(x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
            for w in (self.w_q, self.w_k, self.w_v)
        )
        out = self.attend(q, k, v, None if key_mask is None else key_mask[:, None, None, :])
        return self.w_o(out.transpose(1, 2).flatten(2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None) -> Tensor:
        causal = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()
        return F.scaled_dot_product_attention(q, k, v, causal if keep is None else causal & keep)


class OneOrTheOther(Decoder):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, keep, is_causal=keep is None)


class HidesAfter(Decoder):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None) -> Tensor:
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        return (weights if keep is None else weights.masked_fill(~keep, 0.0)) @ v


class InBlocks(Decoder):
    """The softmax in blocks of four keys, with a running maximum."""

    rescaled = True

    def attend(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None) -> Tensor:
        high, total, out = q.new_full((*q.shape[:3], 1), -torch.inf), 0.0, torch.zeros_like(q)
        keep = torch.ones_like(k[:1, :1, None, :, 0], dtype=torch.bool) if keep is None else keep
        for some, values, real in zip(k.split(4, 2), v.split(4, 2), keep.split(4, 3), strict=True):
            scores = (q @ some.mT / q.shape[-1] ** 0.5).masked_fill(~real, -1e30)
            before, high = high, torch.maximum(high, scores.amax(-1, keepdim=True))
            p, less = torch.exp(scores - high), torch.exp(before - high)
            total = total * less + p.sum(-1, keepdim=True)
            out = (out * less if self.rescaled else out) + p @ values
        return out / total


class NotRescaled(InBlocks):
    rescaled = False


@pytest.mark.parametrize(
    ("layer", "rule", "says"),
    [
        (OneOrTheOther, "causality", "Once `key_mask` is given, later tokens are seen"),
        (HidesAfter, "padding", "comes after the softmax"),
        (NotRescaled, "equal-tokens", "With all values equal"),
    ],
)
def test_it_is_named(layer: Any, rule: str, says: str) -> None:
    first = check(layer(24, 3)).errors[0]
    assert first.rule == rule
    assert says in first.message


@pytest.mark.parametrize("layer", [Decoder, InBlocks])
def test_right_ones_pass(layer: Any) -> None:
    assert check(layer(24, 3)).passed


class Cached(Decoder):
    def forward(self, x: Tensor, past: Past = None) -> tuple[Tensor, Past]:  # type: ignore[override]
        q, k, v = (
            w(x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
            for w in (self.w_q, self.w_k, self.w_v)
        )
        if past is not None:
            k, v = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
        allowed = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
        out = F.scaled_dot_product_attention(q, k, v, allowed.tril(k.shape[2] - q.shape[2]))
        return self.w_o(out.transpose(1, 2).flatten(2)), (k, v)


def test_past_may_be_what_was_beside_the_output() -> None:
    for call in (
        lambda layer, x, past: layer(x, past),
        lambda layer, x, past: layer(x, past[1] if past else None),
    ):
        verdict = check(Cached(24, 3), call=call)
        assert verdict.passed, str(verdict)
        assert "· cache" in str(verdict)


class KVCache:
    """A class of the file's own with a known name."""

    def __init__(self, *kept: Tensor) -> None:
        self.kept = kept


class OwnCache(Cached):
    def forward(self, x: Tensor, cache: KVCache | None = None) -> tuple[Tensor, Any]:  # type: ignore[override]
        out, kept = super().forward(x, None if cache is None else cache.kept)  # type: ignore[arg-type]
        return out, KVCache(*kept)


class Latents(Decoder):
    """Keys and values of normed vectors, queries as they are; `d` is no width of the input."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__(d_model, n_heads)
        self.d, self.norm_context = 5, nn.LayerNorm(d_model)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        context = self.norm_context(x)
        q, k, v = (
            w(rows).unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
            for w, rows in ((self.w_q, x), (self.w_k, context), (self.w_v, context))
        )
        out = F.scaled_dot_product_attention(q, k, v)
        return self.w_o(out.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("layer", [OwnCache, Latents])
def test_no_right_one_is_accused(layer: Any) -> None:
    verdict = check(layer(24, 3))
    assert verdict.passed, str(verdict)

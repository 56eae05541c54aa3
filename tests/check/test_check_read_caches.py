"""Mistakes about caches of keys and values that the code tells."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headwise.check import check
from headwise.check.diagnosis.static_checks import read_off


class Reading(nn.Module):
    mask: Tensor

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads, self.head_dim = n_heads, d_model // n_heads
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.last = nn.Linear(d_model, d_model)
        self.register_buffer("mask", torch.ones(64, 64, dtype=torch.bool).tril())

    def parts(self, x: Tensor) -> list[Tensor]:
        return [
            one.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
            for one in self.qkv(x).chunk(3, -1)
        ]

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT / self.head_dim**0.5

    def joined(self, scores: Tensor, v: Tensor) -> Tensor:
        return self.last((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class CutFromTheStart(Reading):
    def forward(self, x: Tensor, past_kv: Any = None) -> Any:
        B, T, C = x.shape
        q, k, v = self.parts(x)
        if past_kv is not None:
            past_k, past_v = past_kv
            k = torch.cat([past_k, k], dim=2)
            v = torch.cat([past_v, v], dim=2)
        S = k.shape[2]
        scores = self.scores(q, k)
        scores = scores.masked_fill(~self.mask[:T, :S], float("-inf"))
        return self.joined(scores, v).reshape(B, T, C), (k, v)


class CutAtTheEnd(Reading):
    def forward(self, x: Tensor, past_kv: Any = None) -> Any:
        B, T, C = x.shape
        q, k, v = self.parts(x)
        if past_kv is not None:
            k = torch.cat([past_kv[0], k], dim=2)
            v = torch.cat([past_kv[1], v], dim=2)
        S = k.shape[2]
        scores = self.scores(q, k)
        scores = scores.masked_fill(~self.mask[S - T : S, :S], float("-inf"))
        return self.joined(scores, v).reshape(B, T, C), (k, v)


class CutWhereNothingIsCached(Reading):
    def forward(self, x: Tensor, past_kv: Any = None) -> Any:
        B, T, C = x.shape
        q, k, v = self.parts(x)
        if past_kv is not None:
            k = torch.cat([past_kv[0], k], dim=2)
            v = torch.cat([past_kv[1], v], dim=2)
        S = k.shape[2]
        scores = self.scores(q, k)
        if past_kv is None:
            scores = scores.masked_fill(~self.mask[:T, :S], float("-inf"))
        return self.joined(scores, v).reshape(B, T, C), (k, v)


class CutTwice(Reading):
    def forward(self, x: Tensor, past_kv: Any = None) -> Any:
        B, T, C = x.shape
        q, k, v = self.parts(x)
        if past_kv is not None:
            k = torch.cat([past_kv[0], k], dim=2)
            v = torch.cat([past_kv[1], v], dim=2)
        S = k.shape[2]
        scores = self.scores(q, k)
        seen = self.mask[:T, :S]
        if S > T:
            seen = self.mask[S - T : S, :S]
        scores = scores.masked_fill(~seen, float("-inf"))
        return self.joined(scores, v).reshape(B, T, C), (k, v)


class TriangleFromTheStart(Reading):
    def forward(self, x: Tensor, cache: Any = None) -> Any:
        q, k, v = self.parts(x)
        if cache is not None:
            k, v = torch.cat((cache[0], k), 2), torch.cat((cache[1], v), 2)
        later = torch.triu(torch.ones(q.size(2), k.size(2), device=x.device), diagonal=1).bool()
        scores = self.scores(q, k).masked_fill(later, -torch.inf)
        return self.joined(scores, v), (k, v)


class TriangleAtTheEnd(Reading):
    def forward(self, x: Tensor, cache: Any = None) -> Any:
        q, k, v = self.parts(x)
        if cache is not None:
            k, v = torch.cat((cache[0], k), 2), torch.cat((cache[1], v), 2)
        before = k.size(2) - q.size(2)
        later = torch.triu(torch.ones(q.size(2), k.size(2), device=x.device), 1 + before).bool()
        scores = self.scores(q, k).masked_fill(later, -torch.inf)
        return self.joined(scores, v), (k, v)


class StoredOnce(Reading):
    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__(d_model, n_heads)
        self.past_k: Any = None
        self.past_v: Any = None

    def forward(self, x: Tensor, step: int) -> Tensor:
        q, k, v = self.parts(x[:, step : step + 1])
        if self.past_k is None:
            self.past_k, self.past_v = k, v
        else:
            k = torch.cat((self.past_k, k), dim=2)
            v = torch.cat((self.past_v, v), dim=2)
        weights = self.scores(q, k).softmax(-1)
        return self.last((weights @ v).transpose(1, 2).flatten(2))


class StoredAlways(Reading):
    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__(d_model, n_heads)
        self.past_k: Any = None
        self.past_v: Any = None

    def forward(self, x: Tensor, step: int) -> Tensor:
        q, k, v = self.parts(x[:, step : step + 1])
        if self.past_k is None:
            self.past_k, self.past_v = k, v
        else:
            k = torch.cat((self.past_k, k), dim=2)
            v = torch.cat((self.past_v, v), dim=2)
            self.past_k, self.past_v = k, v
        weights = self.scores(q, k).softmax(-1)
        return self.last((weights @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (CutFromTheStart, "`self.mask[:T, :S]` starts at the first key"),
        (CutAtTheEnd, ""),
        (CutWhereNothingIsCached, ""),
        (CutTwice, ""),
        (TriangleFromTheStart, "`triu` starts at the first key"),
        (TriangleAtTheEnd, ""),
        (StoredOnce, "`self.past_k` is set while it is None"),
        (StoredAlways, ""),
    ],
)
def test_a_cache_is_read_off_the_code(layer: type[nn.Module], said: str) -> None:
    messages = [one.message for one in read_off(layer, "cache")]
    assert len(messages) == bool(said)
    assert all(said in one for one in messages)


class MovedElsewhere(Reading):
    """Reads as if its mask started at the first key; what is behind a cache is shown the whole."""

    def forward(self, x: Tensor, past_kv: Any = None) -> Any:
        B, T, C = x.shape
        q, k, v = self.parts(x)
        if past_kv is not None:
            k = torch.cat([past_kv[0], k], dim=2)
            v = torch.cat([past_kv[1], v], dim=2)
        S = k.shape[2]
        q = torch.cat((q.new_zeros(B, self.n_heads, S - T, self.head_dim), q), 2)
        scores = self.scores(q, k)
        T, new = S, T
        scores = scores.masked_fill(~self.mask[:T, :S], float("-inf"))
        mixed = (scores.softmax(-1) @ v)[:, :, S - new :]
        return self.last(mixed.transpose(1, 2).reshape(B, new, C)), (k, v)


def test_what_was_tried_outweighs_what_was_read() -> None:
    assert [one.rule for one in check(MovedElsewhere).errors] == []
    wrong = check(CutFromTheStart)
    assert [one.message[:6] for one in wrong.results if one.rule == "cache"] == ["`self."]

"""Tests, flags and masks that are the wrong way round, and what comes to nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headwise.check import check
from headwise.check.diagnosis.static_checks import read_off
from headwise.check.target.names import building_role
from headwise.check.target.resolve import resolve


class Heads(nn.Module):
    """Right attention; each subclass has a mistake, or what looks like one."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.last = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.drop = nn.Dropout(dropout)

    def parts(self, x: Tensor) -> tuple[Tensor, ...]:
        rows = self.qkv(x).chunk(3, -1)
        return tuple(one.unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in rows)

    def stored(self, k: Tensor, v: Tensor, store: Any) -> tuple[Tensor, Tensor]:
        if store is None:
            return k, v
        store.update(0, k, v)
        return store.keys[0], store.values[0]

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT / q.shape[-1] ** 0.5

    def out(self, weights: Tensor, v: Tensor) -> Tensor:
        return self.last((weights @ v).transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.parts(x)
        return self.out(self.scores(q, k).softmax(-1), v)


class TestTurned(Heads):
    __test__ = False

    def forward(self, x: Tensor, kv_cache: Tensor | None = None) -> Tensor:
        q, k, v = self.parts(x)
        if not kv_cache:
            old_k, old_v = kv_cache.unbind(0)  # type: ignore[union-attr]
            k, v = torch.cat((old_k, k), -2), torch.cat((old_v, v), -2)
        return self.out(self.scores(q, k).softmax(-1), v)


class EmptyList(Heads):
    """A list that is empty may be filled."""

    def forward(self, x: Tensor, store: list[Any] | None = None) -> Tensor:
        q, k, v = self.parts(x)
        store = [] if store is None else store
        if not store:
            store.append((k, v))
        return self.out(self.scores(q, k).softmax(-1), v)


class AlignedToTheStart(Heads):
    def forward(self, x: Tensor, kv_cache: Any = None) -> Tensor:
        q, k, v = self.parts(x)
        k, v = self.stored(k, v, kv_cache)
        scores = self.scores(q, k)
        mask = torch.triu(torch.ones_like(scores), diagonal=1).bool()
        return self.out(scores.masked_fill(mask, float("-inf")).softmax(-1), v)


class AlignedToTheEnd(Heads):
    def forward(self, x: Tensor, kv_cache: Any = None) -> Tensor:
        q, k, v = self.parts(x)
        k, v = self.stored(k, v, kv_cache)
        scores = self.scores(q, k)
        later = 1 + scores.shape[-1] - scores.shape[-2]
        mask = torch.ones_like(scores).triu(later).bool()
        return self.out(scores.masked_fill(mask, float("-inf")).softmax(-1), v)


class WithoutACache(AlignedToTheEnd):
    def forward(self, x: Tensor, kv_cache: Any = None) -> Tensor:
        q, k, v = self.parts(x)
        scores = self.scores(q, k)
        if kv_cache is None:
            scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), float("-inf"))
        else:
            k, v = kv_cache.put(k, v)
            scores = self.scores(q, k)
        return self.out(scores.softmax(-1), v)


class Idle(Heads):
    def forward(self, x: Tensor) -> Tensor:
        rows = (one.unflatten(-1, (self.heads, -1)) for one in self.qkv(x).chunk(3, -1))
        q, k, v = (one.permute(0, 1, 2, 3) for one in rows)
        return self.last((self.scores(q, k).softmax(-1) @ v).flatten(2))


@pytest.mark.parametrize(
    ("kind", "rule", "said"),
    [
        (TestTurned, "runs", "kv_cache is None there"),
        (AlignedToTheStart, "cache", "a single new token sees the first key alone"),
        (Idle, "definition", "`permute(0, 1, 2, 3)` leaves all axes where they are"),
    ],
)
def test_what_is_turned_round_is_read(kind: type[nn.Module], rule: str, said: str) -> None:
    assert [one.rule for one in read_off(kind) if said in one.message] == [rule]
    assert not check(kind).passed


@pytest.mark.parametrize("kind", [EmptyList, AlignedToTheEnd, WithoutACache])
def test_what_only_looks_like_it_is_not(kind: type[nn.Module]) -> None:
    assert [*read_off(kind)] == []


class FlagTurned(Heads):
    def forward(self, x: Tensor, causal: bool = False) -> Tensor:
        q, k, v = self.parts(x)
        scores = self.scores(q, k)
        if causal:
            later = torch.ones_like(scores).triu().bool()
            scores = scores.masked_fill(~later, float("-inf"))
        return self.out(scores.softmax(-1), v)


def test_a_flag_that_hides_what_came_before_is_turned_round() -> None:
    (one, *_) = check(FlagTurned).errors
    assert one.rule in ("causality", "causal-mask")
    assert "inverted" in one.message


class DropsQueries(Heads):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.drop(one) for one in self.parts(x))
        return self.out(self.scores(q, k).softmax(-1), v)


class DropsScores(Heads):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.parts(x)
        return self.out(self.drop(self.scores(q, k)).softmax(-1), v)


def test_queries_may_be_dropped_and_scores_may_not() -> None:
    assert check(DropsQueries)["dropout"].severity == "warning"
    assert check(DropsQueries).passed
    assert check(DropsScores)["dropout"].severity == "error"


class Routed(Heads):
    """Experts that a gate selects, by its order alone."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.gate = nn.Linear(width, 2, bias=False)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def weighs(self, gates: Tensor, chosen: Tensor) -> Tensor:
        return chosen.float()

    def forward(self, x: Tensor) -> Tensor:
        out, gates = super().forward(x), self.gate(x)
        _, best = gates.topk(1)
        which = [self.weighs(gates, best == n) for n in range(2)]
        return sum(one * of(out) for one, of in zip(which, self.experts, strict=True))


class Weighted(Routed):
    def weighs(self, gates: Tensor, chosen: Tensor) -> Tensor:
        return chosen * gates.sigmoid().amax(-1, keepdim=True)


def test_a_gate_that_nothing_is_weighed_with_is_a_mistake() -> None:
    assert check(Routed).errors[0].rule == "gradients"
    assert check(Weighted).passed, str(check(Weighted))


def test_widths_of_outputs_are_no_flags() -> None:
    roles = [building_role(f"output_{one}", True) for one in ("dimension", "filters", "scores")]
    assert roles == ["out_width", "width", "flag"]


class NotAssigned(Heads):
    """Its causal mask comes to nothing, so that it is right attention to all tokens."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.parts(x)
        scores = self.scores(q, k)
        later = torch.ones_like(scores).triu(1).bool()
        scores.masked_fill(later, float("-inf"))
        return self.out(scores.softmax(-1), v)


def test_a_mask_that_is_lost_is_a_mistake_though_the_rest_is_right() -> None:
    assert [one.rule for one in check(NotAssigned).errors] == ["unused-result"]


class Misspelt(Heads):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.parts(x)
        return self.out(torch.Softmax(self.scores(q, k), dim=-1), v)  # type: ignore[attr-defined]


class CallsAModule(Heads):
    def __init__(self, width: int, heads: int, other: Any) -> None:
        super().__init__(width, heads)
        self.one = pytest(width)  # type: ignore[operator]


def test_names_of_pytorch_are_looked_up() -> None:
    (one,) = check(Misspelt).errors
    assert (one.rule, "torch.softmax" in one.hint) == ("runs", True)
    assert [one.rule for one in check(CallsAModule).errors] == ["builds"]


class Blocks(Heads):
    """Heads under a name that might be a count of anything."""

    def __init__(self, d_model: int, sent_len: int, n_blocks: int) -> None:
        assert d_model % n_blocks == 0
        super().__init__(d_model, n_blocks)
        self.sent_len = sent_len


def test_what_shares_the_width_is_a_number_of_heads() -> None:
    subject = resolve(Blocks)
    assert (subject.num_heads, subject.embed_dim, subject.made_up) == (3, 24, {})

"""Mistakes about masks, the softmax and heads that are read off the code."""

from __future__ import annotations

import math
from typing import Any

import einops
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.check import check
from headwise.check.diagnosis.static_checks import read_off


class Parts(nn.Module):
    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads, self.wide = num_heads, dim // num_heads
        self.w_q, self.w_k, self.w_v, self.out = (nn.Linear(dim, dim) for _ in range(4))

    def split(self, rows: Tensor) -> Tensor:
        return rows.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def scores(self, x: Tensor) -> Tensor:
        return self.split(self.w_q(x)) @ self.split(self.w_k(x)).mT * self.wide**-0.5

    def joined(self, weights: Tensor, x: Tensor) -> Tensor:
        return self.out((weights @ self.split(self.w_v(x))).transpose(1, 2).flatten(2))


class Asked(Parts):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        scores = self.scores(x)
        if mask:
            scores = scores.masked_fill(mask, float("-inf"))
        return self.joined(scores.softmax(-1), x)


class AskedByFlag(Parts):
    def forward(self, x: Tensor, mask: bool = False) -> Tensor:
        scores = self.scores(x)
        if mask:
            later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
            scores = scores.masked_fill(later, float("-inf"))
        return self.joined(scores.softmax(-1), x)


class Crossed(Parts):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """mask: [batch, seq, seq] or [seq, seq]"""
        scores = self.scores(x)
        if mask is not None:
            if mask.dim() == 2:  # noqa: SIM108
                mask = mask.unsqueeze(1).unsqueeze(1)
            else:
                mask = mask.unsqueeze(1)
            scores = scores.masked_fill(mask == 0, float("-inf"))
        return self.joined(scores.softmax(-1), x)


class OfPadding(Parts):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """mask: [batch, seq, seq] or [batch, seq]"""
        scores = self.scores(x)
        if mask is not None:
            if mask.dim() == 2:  # noqa: SIM108
                mask = mask.unsqueeze(1).unsqueeze(1)
            else:
                mask = mask.unsqueeze(1)
            scores = scores.masked_fill(mask == 0, float("-inf"))
        return self.joined(scores.softmax(-1), x)


class Multiplied(Parts):
    def forward(self, x: Tensor, bias: Tensor, batch_mask: Tensor) -> Tensor:
        scores = self.scores(x)
        scores = (scores + bias) * batch_mask
        return self.joined(scores.softmax(-1), x)


class NoAxis(Parts):
    def forward(self, base: Tensor, top: Tensor, combined: Tensor) -> Tensor:
        scores = torch.bmm(base, top)
        weights = F.softmax(scores)
        return torch.bmm(weights, combined)


class NoAxisBuilt(Parts):
    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__(dim, num_heads)
        self.soft = nn.Softmax()

    def forward(self, base: Tensor, top: Tensor, combined: Tensor) -> Tensor:
        scores = torch.bmm(base, top)
        return torch.bmm(self.soft(scores), combined)


class OnePair(Parts):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        scores = torch.einsum("bchw,bchw->bhw", x, y) * self.wide**-0.5
        return torch.einsum("bchw,bhw->bchw", x, scores.softmax(-1))


class OfNeighbours(Parts):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        near = y.unfold(1, 3, 1)
        x = x[..., None].expand_as(near)
        scores = torch.einsum("btdn,btdn->btn", x, near)
        return torch.einsum("btn,btdn->btd", scores.softmax(-1), near)


class Pieces(Parts):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            torch.cat(torch.split(f(x), self.num_heads, dim=-1), dim=0)
            for f in (self.w_q, self.w_k, self.w_v)
        )
        weights = (q @ k.mT * self.wide**-0.5).softmax(-1)
        return self.out(torch.cat(torch.split(weights @ v, x.shape[0], dim=0), dim=-1))


class ByWidth(Parts):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            torch.cat(torch.split(f(x), self.wide, dim=-1), dim=0)
            for f in (self.w_q, self.w_k, self.w_v)
        )
        weights = (q @ k.mT * self.wide**-0.5).softmax(-1)
        return self.out(torch.cat(torch.split(weights @ v, x.shape[0], dim=0), dim=-1))


WRONG = [
    (Asked, "runs"),
    (Crossed, "mask"),
    (Multiplied, "mask-fill"),
    (NoAxis, "softmax"),
    (NoAxisBuilt, "softmax"),
    (OnePair, "softmax"),
    (Pieces, "head-split"),
]


@pytest.mark.parametrize(("kind", "rule"), WRONG)
def test_what_is_read(kind: type[nn.Module], rule: str) -> None:
    assert [one.rule for one in read_off(kind)] == [rule]


@pytest.mark.parametrize("kind", [AskedByFlag, OfPadding, OfNeighbours, ByWidth])
def test_what_is_right(kind: type[nn.Module]) -> None:
    assert not [*read_off(kind)]


@pytest.mark.parametrize("kind", [AskedByFlag, OfPadding, ByWidth])
def test_what_is_right_runs(kind: type[nn.Module]) -> None:
    verdict = check(kind)
    assert verdict.passed, verdict


class Unread(Parts):
    """Of a call that is guessed, for what it is given beside x."""

    def forward(self, x: Tensor, temp: float, mask: Tensor | None = None) -> Tensor:
        return self.joined((self.scores(x) * temp).softmax(-1), x)


class Needed(Parts):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        hidden = (mask == 0).view(len(x), 1, -1, x.shape[1])  # type: ignore[union-attr]
        return self.joined(self.scores(x).masked_fill(hidden, float("-inf")).softmax(-1), x)


@pytest.mark.parametrize(("kind", "rule"), [(Unread, "mask"), (Needed, "runs")])
def test_masks_of_a_call(kind: type[nn.Module], rule: str) -> None:
    verdict = check(kind)
    assert verdict.findings[0].rule == rule, verdict
    assert not verdict.passed


def softmax(x: Tensor, dim: int) -> Tensor:
    """Subtracts where it should divide."""
    raised = torch.exp(x - torch.max(x, dim=dim, keepdim=True).values)
    return raised - torch.sum(raised, dim=dim, keepdim=True)


def stable_softmax(x: Tensor, dim: int) -> Tensor:
    raised = torch.exp(x - torch.max(x, dim=dim, keepdim=True).values)
    return raised / torch.sum(raised, dim=dim, keepdim=True)


def by_own_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return softmax(q @ k.mT / q.shape[-1] ** 0.5, -1) @ v


def by_right_softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return stable_softmax(q @ k.mT / q.shape[-1] ** 0.5, -1) @ v


class Diagonal(Parts):
    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__(dim, num_heads)
        self.w = nn.Parameter(torch.randn(dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.einsum("...sd,dd->...sd", x, self.w)
        return self.joined(self.scores(x).softmax(-1), x)


class Named(Parts):
    """Axes with whole words for names, in which letters come again."""

    def forward(self, x: Tensor) -> Tensor:
        scores = einops.einsum(
            self.split(self.w_q(x)),
            self.split(self.w_k(x)),
            "b head query dd, b head key dd -> b head query key",
        )
        return self.joined((scores * self.wide**-0.5).softmax(-1), x)


def test_a_softmax_of_one_s_own() -> None:
    assert check(by_own_softmax).findings[0].rule == "softmax"
    assert check(by_right_softmax).passed


def test_the_diagonal_of_a_weight() -> None:
    assert [one.rule for one in read_off(Diagonal)] == ["definition"]
    assert check(Named).passed


class Plain:
    """No module, and a name that is spelled in two ways."""

    def __init__(self, width: int) -> None:
        self.v_att = nn.Linear(width, 1)

    def forward(self, x: Tensor, keys: Tensor) -> Tensor:
        return self.v_attn(x + keys)  # type: ignore[attr-defined]


class Unset(nn.Module):
    def __init__(self, params: Any) -> None:
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(4, 4) for _ in params.n_head])
        self.out = nn.Linear(self.hidden_dim, self.hidden_dim)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.cat([head(x) for head in self.heads], -1))


@pytest.mark.parametrize(("kind", "rule"), [(Plain, "runs"), (Unset, "builds")])
def test_attributes_that_nothing_sets(kind: type, rule: str) -> None:
    assert {one.rule for one in read_off(kind)} == {rule}


class ViewedApart(nn.Module):
    """Heads whose number a view works out, of a whole projection."""

    def __init__(self, dim: int, wide: int, R: Tensor) -> None:
        super().__init__()
        self.wide, self.r, self.whole = wide, R, nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        return self.whole(x).view(batch, -1, length, self.wide) + self.r


def test_heads_that_a_view_works_out() -> None:
    assert [one.rule for one in read_off(ViewedApart)] == ["head-split"]


class OfQueriesToo(Parts):
    """Padded tokens are hidden as keys and as queries."""

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """padding_mask: [batch, seq], True for real tokens"""
        scores = self.scores(x)
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
        if padding_mask is not None:
            scores = scores.masked_fill(~padding_mask[:, None, None], -torch.inf)
            scores = scores.masked_fill(~padding_mask[:, None, :, None], -torch.inf)
        return self.joined(scores.softmax(-1), x)


class OfKeysAlone(Parts):
    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """padding_mask: [batch, seq], True for real tokens"""
        scores = self.scores(x)
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
        if padding_mask is not None:
            scores = scores.masked_fill(~padding_mask[:, None, None], -1e30)
        return self.joined(scores.softmax(-1), x)


def test_padded_queries_that_are_nan() -> None:
    first = check(OfQueriesToo).findings[0]
    assert (first.rule, "is NaN" in first.message) == ("padding", True)
    assert check(OfKeysAlone).passed


class Takes(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(mask == 0, -1e9)
        return scores.softmax(-1) @ v


def test_a_mask_that_a_function_of_queries_wants() -> None:
    assert check(Takes).passed


class Floats(Parts):
    """A method beside forward that divides into a float, and one that rounds it."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__(dim, num_heads)
        self.dim = dim
        return

    def step(self, x: Tensor, heads: int) -> Tensor:
        d = self.dim / heads
        return x.view([*x.shape[:2], heads, d])

    def rounded(self, x: Tensor, heads: int) -> Tensor:
        m = self.dim / heads
        return x.view(*x.shape[:2], heads, math.ceil(m))


def test_sizes_that_are_no_whole_numbers() -> None:
    found = [*read_off(Floats)]
    assert [one.rule for one in found] == ["runs"]
    assert "`self.dim / heads`" in found[0].message


def subsequent_mask(size: int) -> Tensor:
    return torch.tril(torch.ones(size, size), diagonal=1)


def causal_mask(size: int) -> Tensor:
    return torch.tril(torch.ones(size, size))


def test_functions_that_make_a_mask() -> None:
    assert [one.rule for one in check(subsequent_mask).findings] == ["causality"]
    with pytest.raises(ValueError, match="name what computes attention"):
        check(causal_mask)


class AttentionFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:  # type: ignore[override]
        return slope


class Applied(Parts):
    """Calls a method of a class that speaks of attention, and that no tensor has."""

    def forward(self, x: Tensor) -> Tensor:
        return AttentionFunction.apply(x)  # type: ignore[no-any-return]


def test_methods_of_classes() -> None:
    assert not [*read_off(Applied)]


class Exchanged(Parts):
    """One of two classes that are called alike, of which this one needs no mask."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        kept = k.softmax(-2).mT @ v
        return self.out(q.softmax(-1) @ kept)


class Counterpart(Parts):
    def forward(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        scores = q @ k.mT * self.wide**-0.5
        scores = scores if attn_mask is None else scores.masked_fill(attn_mask, -torch.inf)
        return self.out(scores.softmax(-1) @ v)


def test_an_argument_that_others_of_the_file_read() -> None:
    rules = [one.rule for one in check(Exchanged).errors]
    assert "mask" not in rules


class TurnedTwice(Parts):
    """Of numbers, 1 is made True where it hides, and turned once more; bools are taken as they
    are."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        scores = self.scores(x)
        if mask is not None:
            if mask.dtype != torch.bool:
                mask = mask == 0
            scores = scores.masked_fill(mask == 0, -torch.inf)
        return self.joined(scores.softmax(-1), x)


class TurnedOnce(Parts):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        scores = self.scores(x)
        if mask is not None:
            mask = mask if mask.dtype == torch.bool else mask != 0
            scores = scores.masked_fill(~mask, -torch.inf)
        return self.joined(scores.softmax(-1), x)


class FilledWithout(Parts):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        hidden = mask == 0
        return self.joined(self.scores(x).masked_fill(hidden, -1e9).softmax(-1), x)


class Fresh(Parts):
    """A dropout that is made in each call."""

    def weigh(self, scores: Tensor, rate: float | None = None) -> Tensor:
        weights = scores.softmax(-1)
        return weights if rate is None else nn.Dropout(rate)(weights)

    def forward(self, x: Tensor, rate: float | None = None) -> Tensor:
        return self.joined(self.weigh(self.scores(x), rate), x)


class InnerFunction(Parts):
    """A function within forward, which is no method."""

    def forward(self, x: Tensor) -> Tensor:
        def calc_attention(scores: Tensor) -> Tensor:
            return scores.softmax(-1)

        del calc_attention
        return self.joined(self.calc_attention(self.scores(x)), x)  # type: ignore[operator]


class RolledCaches(Parts):
    """Two caches, each of which makes room."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__(dim, num_heads)
        self.past_k, self.past_v = torch.zeros(2, 8, dim), torch.zeros(2, 8, dim)

    def room(self, count: int) -> None:
        self.past_k = torch.roll(self.past_k, shifts=-count, dims=1)
        self.past_v = torch.roll(self.past_v, shifts=-count, dims=1)


class OwnLinear(nn.Linear):
    """A Linear that did not begin as one."""

    def __init__(self, wide: int) -> None:
        nn.Module.__init__(self)
        self.weight = nn.Parameter(torch.randn(wide, wide) / wide**0.5)
        self.register_parameter("bias", None)


class OfOwnLinear(Parts):
    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__(dim, num_heads)
        self.w_q = OwnLinear(dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.joined(self.scores(x).softmax(-1), x)


def test_masks_of_numbers_and_of_bools() -> None:
    assert "the other way round" in check(TurnedTwice).findings[0].message
    assert check(TurnedOnce).passed
    assert check(FilledWithout).findings[0].rule == "runs"


def test_layers_and_functions_that_are_made_within_a_call() -> None:
    assert [one.rule for one in read_off(Fresh)] == ["dropout-in-eval"]
    assert [one.rule for one in read_off(InnerFunction)] == ["runs"]
    assert not [*read_off(RolledCaches)]


def test_a_linear_that_has_no_sizes() -> None:
    assert check(OfOwnLinear).passed


class Free(Parts):
    """Takes what all layers of a library are called with."""

    def forward(
        self, x: Tensor, temp: float, attention_mask: Tensor | None = None, **more: Any
    ) -> Tensor:
        return self.joined((self.scores(x) * temp).softmax(-1), x)


def test_an_argument_that_a_library_hands_to_all() -> None:
    assert check(Free).passed


class Pools(nn.Module):
    """One output for a sequence; what is filling is left out before the softmax."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.score = nn.Sequential(nn.Linear(dim, dim), nn.Tanh(), nn.Linear(dim, 1))

    def forward(self, hidden: Tensor, attention_mask: Tensor) -> Tensor:
        scores = self.score(hidden).masked_fill(attention_mask.unsqueeze(-1) == 0, -torch.inf)
        return (torch.softmax(scores, dim=1) * hidden).sum(1)


class PoolsLate(Pools):
    """It is left out behind it."""

    def forward(self, hidden: Tensor, attention_mask: Tensor) -> Tensor:
        w = torch.softmax(self.score(hidden), dim=1)
        w = w.masked_fill(attention_mask.unsqueeze(-1) == 0, 0.0)
        return (w * hidden).sum(1)


def test_a_mask_behind_the_softmax_of_a_pooling() -> None:
    assert check(Pools).passed
    assert [one.rule for one in check(PoolsLate).errors] == ["mask-fill"]

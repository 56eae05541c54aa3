"""Every probe, on a right layer that passes it and on one that breaks exactly what it looks at."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_check_paths import MergesNothing, SeesAll, TwoPaths
from test_check_relative import RelativeKeys, Sums
from torch import Tensor, nn

from headwise.check import probes
from headwise.check.findings.rules import PROBE_RULES, RULES
from headwise.check.findings.verdict import Finding
from headwise.check.target.resolve import resolve


class Right(nn.Module):
    """Causal attention with nothing wrong; every method is one place to go wrong."""

    def __init__(
        self, d_model: int, num_heads: int, context_length: int, dropout: float = 0.0
    ) -> None:
        super().__init__()
        if d_model % num_heads:
            raise ValueError(f"d_model={d_model} is no multiple of num_heads={num_heads}")
        self.num_heads, self.context_length = num_heads, context_length
        self.head_dim = d_model // num_heads
        self.query = nn.Linear(d_model, d_model)
        self.key = nn.Linear(d_model, d_model)
        self.value = nn.Linear(d_model, d_model)
        self.out = nn.Linear(d_model, d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > self.context_length:
            raise ValueError(f"{x.shape[1]} tokens do not fit {self.context_length}")
        q, k, v = (self.split(part(x)) for part in (self.query, self.key, self.value))
        weights = self.dropout(self.softmax(self.hide(self.scores(q, k))))
        return self.out(self.merge(weights @ v))

    def split(self, rows: Tensor) -> Tensor:
        return rows.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def merge(self, heads: Tensor) -> Tensor:
        return heads.transpose(1, 2).flatten(2)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.transpose(-2, -1) / self.head_dim**0.5

    def later(self, scores: Tensor) -> Tensor:
        ones = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
        return ones.triu(1)

    def hide(self, scores: Tensor) -> Tensor:
        return scores.masked_fill(self.later(scores), -torch.inf)

    def softmax(self, scores: Tensor) -> Tensor:
        return torch.softmax(scores, dim=-1)


class Unbuildable(Right):
    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__(d_model, num_heads, context_lenght=9)  # type: ignore[call-arg]


class Crashing(Right):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k


class NothingReturned(Right):
    def forward(self, x: Tensor) -> Tensor:
        super().forward(x)
        return None  # type: ignore[return-value]


class Unmerged(Right):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).unflatten(-1, (self.num_heads, -1))


class Squeezing(Right):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).squeeze()


class FixedBatch(Right):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).view(2, x.shape[1], -1)


class HidesItself(Right):
    def later(self, scores: Tensor) -> Tensor:
        return torch.ones(scores.shape[-2:]).triu(0).bool()


class UpsideDown(Right):
    def later(self, scores: Tensor) -> Tensor:
        return torch.ones(scores.shape[-2:]).tril(-1).bool()


class NextTokenToo(Right):
    def later(self, scores: Tensor) -> Tensor:
        return super().later(scores).triu(2)


class SmallMask(Right):
    def hide(self, scores: Tensor) -> Tensor:
        return scores.masked_fill(self.later(scores), -100.0)


class FarMask(Right):
    def hide(self, scores: Tensor) -> Tensor:
        return scores.masked_fill(self.later(scores), -1e4)


class MaskedAfter(Right):
    def hide(self, scores: Tensor) -> Tensor:
        return scores

    def softmax(self, scores: Tensor) -> Tensor:
        return super().softmax(scores).masked_fill(self.later(scores), 0.0)


class OwnTokenOnly(Right):
    def later(self, scores: Tensor) -> Tensor:
        return ~torch.eye(scores.shape[-1], dtype=torch.bool)


class ScaledByLength(Right):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.transpose(-2, -1) / k.shape[-2] ** 0.5


class MixesBatch(Right):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return super().scores(q, k.mean(0, keepdim=True))


class Activated(Right):
    def merge(self, heads: Tensor) -> Tensor:
        return torch.tanh(super().merge(heads))


class Reversed(Right):
    """Weighs the past by its place, without a word of positions."""

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return super().scores(q, k) * torch.arange(1, k.shape[-2] + 1, dtype=q.dtype)


class LosesAHead(Right):
    def merge(self, heads: Tensor) -> Tensor:
        return super().merge(torch.cat((heads[:, :2], heads[:, :1]), dim=1))


class Detached(Right):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return super().scores(q.detach(), k)


class Overflowing(Right):
    def softmax(self, scores: Tensor) -> Tensor:
        raised = scores.exp()
        return raised / raised.sum(-1, keepdim=True)


class ColumnWeights(Right):
    def forward(self, x: Tensor) -> Any:
        q, k, v = (self.split(part(x)) for part in (self.query, self.key, self.value))
        scores = self.scores(q, k)
        weights = self.softmax(self.hide(scores))
        return self.out(self.merge(weights @ v)), torch.softmax(scores, dim=-2)


class WritesIntoX(Right):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        x += 1
        return out


class Strided(Right):
    def forward(self, x: Tensor) -> Tensor:
        _, tokens, width = x.shape
        return super().forward(x.as_strided(x.shape, (tokens * width, width, 1)))


class HeadsInAList(Right):
    def __init__(self, d_model: int, num_heads: int, context_length: int) -> None:
        super().__init__(d_model, num_heads, context_length)
        self.extra = [nn.Linear(d_model, d_model) for _ in range(2)]

    def merge(self, heads: Tensor) -> Tensor:
        merged = super().merge(heads)
        return sum((part(merged) for part in self.extra), torch.zeros_like(merged))


class PlainMask(Right):
    def __init__(self, d_model: int, num_heads: int, context_length: int) -> None:
        super().__init__(d_model, num_heads, context_length)
        self.mask = torch.ones(context_length, context_length).triu(1).bool()

    def later(self, scores: Tensor) -> Tensor:
        return self.mask[: scores.shape[-1], : scores.shape[-1]]


class FixedDtype(Right):
    def hide(self, scores: Tensor) -> Tensor:
        zeros = torch.zeros(scores.shape[-2:], device=scores.device)
        return scores + zeros.masked_fill(self.later(scores), -torch.inf)


class HiddenWeight(Right):
    """A number that matters, kept where no state_dict sees it."""

    def __init__(self, d_model: int, num_heads: int, context_length: int) -> None:
        super().__init__(d_model, num_heads, context_length)
        self.gain = float(torch.rand(()))

    def merge(self, heads: Tensor) -> Tensor:
        return super().merge(heads) * (1 + self.gain)


class HugeFill(Right):
    def hide(self, scores: Tensor) -> Tensor:
        return scores.masked_fill(self.later(scores), -1e9)


class BufferedMask(Right):
    mask: Tensor

    def __init__(self, d_model: int, num_heads: int, context_length: int) -> None:
        super().__init__(d_model, num_heads, context_length)
        self.register_buffer("mask", torch.ones(context_length, context_length).triu(1).bool())
        self.context_length = 10**9

    def later(self, scores: Tensor) -> Tensor:
        return self.mask[: scores.shape[-1], : scores.shape[-1]]


class EndsSilently(Right):
    def forward(self, x: Tensor) -> Tensor:
        limit, self.context_length = self.context_length, 10**9
        out = super().forward(x)
        self.context_length = limit
        return out

    def hide(self, scores: Tensor) -> Tensor:
        return scores if scores.shape[-1] > 16 else super().hide(scores)


class Asserting(Right):
    def __init__(self, d_model: int, num_heads: int, context_length: int) -> None:
        assert d_model % num_heads == 0, "d_model must be a multiple of num_heads"
        super().__init__(d_model, num_heads, context_length)


class FailsLate(Right):
    def __init__(self, d_model: int, num_heads: int, context_length: int) -> None:
        super().__init__(d_model, 1, context_length)
        self.num_heads, self.head_dim = num_heads, d_model // num_heads

    def split(self, rows: Tensor) -> Tensor:
        batch, tokens, _ = rows.shape
        return rows.view(batch, tokens, self.num_heads, self.head_dim).transpose(1, 2)


class TooWide(Right):
    def __init__(self, d_model: int, num_heads: int, context_length: int) -> None:
        super().__init__(d_model, num_heads, context_length)
        self.out = nn.Linear(d_model, 2 * d_model)  # type: ignore[assignment]
        self.narrow = nn.Linear(2 * d_model, d_model)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(super().forward(x))


class MaskedInTrainingOnly(Right):
    def hide(self, scores: Tensor) -> Tensor:
        return scores if self.training else super().hide(scores)


class DroppedScores(Right):
    def hide(self, scores: Tensor) -> Tensor:
        return super().hide(self.dropout(scores))


class KeepsWhatItIsToDrop(Right):
    def __init__(self, d_model: int, num_heads: int, context_length: int, dropout: float = 0.0):
        super().__init__(d_model, num_heads, context_length, 1 - dropout)


class DropoutAlways(Right):
    def softmax(self, scores: Tensor) -> Tensor:
        return F.dropout(super().softmax(scores), 0.3)


class UnusedDropout(Right):
    def forward(self, x: Tensor) -> Tensor:
        kept, self.dropout.p = self.dropout.p, 0.0
        out = super().forward(x)
        self.dropout.p = kept
        return out


class ReorderedWeights(Right):
    """What comes back is the mean over heads of weights [T, S, B, H] that a view made out to be
    [B, H, T, S]."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        q, k, v = (self.split(part(x)) for part in (self.query, self.key, self.value))
        weights = self.softmax(self.hide(self.scores(q, k)))
        told = weights.permute(2, 3, 0, 1).contiguous().view(weights.shape)
        return self.out(self.merge(weights @ v)), told.mean(1)


class PositiveWeights(Right):
    def __init__(self, d_model: int, num_heads: int, context_length: int) -> None:
        super().__init__(d_model, num_heads, context_length)
        self.query.weight.data.uniform_()


class Masked(Right):
    """Takes a mask, True where a key is hidden, and masks nothing by itself."""

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__(d_model, num_heads, context_length=10**9)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        self.given = None if mask is None else mask
        out = super().forward(x)
        del self.given
        return out

    def hide(self, scores: Tensor) -> Tensor:
        if self.given is None:
            return scores
        return scores.masked_fill(self.given, -torch.inf)


class MaskIgnored(Masked):
    def hide(self, scores: Tensor) -> Tensor:
        return scores


class TriangleWhateverIsAsked(Masked):
    def hide(self, scores: Tensor) -> Tensor:
        if self.given is None:
            return scores
        return Right.hide(self, scores + 0.0 * self.given)


class Padded(Masked):
    def forward(  # type: ignore[override]
        self, x: Tensor, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        given = None if key_padding_mask is None else key_padding_mask[:, None, None]
        return super().forward(x, given)


class PaddingOnFirst(Padded):
    """Hides what is padded from the first query alone."""

    def hide(self, scores: Tensor) -> Tensor:
        if self.given is None:
            return scores
        first = torch.arange(scores.shape[-2])[:, None] == 0
        return scores.masked_fill(self.given & first, -torch.inf)


class Cross(Right):
    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__(d_model, num_heads, context_length=10**9)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:  # type: ignore[override]
        q, k, v = self.query(query), self.key(key), self.value(value)
        weights = self.dropout(self.softmax(self.scores(self.split(q), self.split(k))))
        return self.out(self.merge(weights @ self.split(v)))


class CrossWithQueriesLength(Cross):
    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        batch, tokens, width = query.shape
        return super().forward(query, key.view(batch, tokens, width), value)


class CrossThatLooksBack(Cross):
    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return super().forward(query, query, query) + 0.0 * (key.sum() + value.sum())


class Cached(Right):
    """Keys and values come back and go in again."""

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__(d_model, num_heads, context_length=10**9)

    def forward(self, x: Tensor, past_kv: Any = None) -> Any:  # type: ignore[override]
        q, k, v = (self.split(part(x)) for part in (self.query, self.key, self.value))
        if past_kv is not None:
            k = torch.cat((past_kv[0], k), dim=2)
            v = torch.cat((past_kv[1], v), dim=2)
        weights = self.dropout(self.softmax(self.hide(self.scores(q, k))))
        return self.out(self.merge(weights @ v)), (k, v)

    def later(self, scores: Tensor) -> Tensor:
        tokens, keys = scores.shape[-2:]
        ones = torch.ones(tokens, keys, dtype=torch.bool, device=scores.device)
        return ones.triu(1 + self.past(tokens, keys))

    def past(self, tokens: int, keys: int) -> int:
        return keys - tokens


class CachedWithSquareMask(Cached):
    """Right for one token at a time only: of several, the mask starts at the front."""

    def past(self, tokens: int, keys: int) -> int:
        return keys if tokens == 1 else 0


class CachedInFront(Cached):
    def forward(self, x: Tensor, past_kv: Any = None) -> Any:
        out, (k, v) = super().forward(x, past_kv)
        return out, (k.flip(2), v)


class Rotary(Right):
    turned = "qk"

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        parts = {"q": self.query, "k": self.key, "v": self.value}
        heads = {
            name: part(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for name, part in parts.items()
        }
        for name in self.turned:
            first, second = heads[name].chunk(2, dim=-1)
            heads[name] = heads[name] * cos + torch.cat((-second, first), dim=-1) * sin
        scores = heads["q"] @ heads["k"].mT / heads["q"].shape[-1] ** 0.5
        later = torch.ones(scores.shape[-2:], device=x.device, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(later, -torch.inf).softmax(-1)
        return self.out((weights @ heads["v"]).transpose(1, 2).flatten(2))


class QueriesTurned(Rotary):
    turned = "q"


class NothingTurned(Rotary):
    turned = ""


@functools.cache
def results_of(thing: Any) -> list[Finding]:
    return probes.run(resolve(thing))


def found(thing: Any, rule: str) -> Finding:
    results = [one for one in results_of(thing) if one.rule == rule]
    assert len(results) == 1, f"{rule} was not tried"
    return results[0]


RIGHT: dict[str, type[nn.Module]] = {rule.id: Right for rule in PROBE_RULES}
RIGHT |= {"mask": Masked, "padding": Padded, "cross": Cross, "cache": Cached, "rotary": Rotary}
RIGHT |= {"relative": RelativeKeys}
RIGHT |= {"assert": Right, "weights": Cached, "half": Right, "paths": TwoPaths}


@pytest.mark.parametrize(
    "rule", [rule.id for rule in PROBE_RULES if rule.id not in ("builds", "runs", "weights")]
)
def test_a_right_layer_passes(rule: str) -> None:
    assert found(RIGHT[rule], rule).severity == "passed"


def test_right_layers_have_no_findings() -> None:
    for layer in (Right, Masked, Padded, Cross, Cached):
        results = results_of(layer)
        assert not [one for one in results if one.severity in ("error", "warning")], layer


BROKEN: list[tuple[str, type[nn.Module], str, str]] = [
    # rule, layer, severity, words of its message
    ("paths", SeesAll, "error", "With flash=True the same weights"),
    ("paths", MergesNothing, "error", "With flash=True the same call fails"),
    ("shape", Squeezing, "error", r"For x \[1, 7, 24\] it returns .* \[7, 24\]"),
    ("shape", FixedBatch, "error", r"For x \[1, 7, 24\] it returns"),
    ("finite", HidesItself, "error", "The output of token 0 is NaN"),
    ("causality", UpsideDown, "error", "inverted"),
    ("causality", NextTokenToo, "error", "right after it: the mask is off by one"),
    ("causality", SmallMask, "error", "20 times as large"),
    ("causality", FarMask, "warning", "1000 times as large"),
    ("causality", MaskedAfter, "error", "Output 0 changes when token 1"),
    ("past-used", OwnTokenOnly, "error", "does not depend on any other token"),
    ("past-used", UpsideDown, "error", "Output 1 does not depend"),
    ("prefix", ScaledByLength, "error", "in a sequence of 7"),
    ("batch", MixesBatch, "error", "alone than in a batch"),
    ("equal-tokens", MaskedAfter, "error", "outputs differ"),
    ("one-token", Activated, "error", "not affine"),
    ("order", Reversed, "warning", "in another order"),
    ("gradients", LosesAHead, "error", r"rows 16 to 23 of value.weight \(head 2\)"),
    ("gradients", Detached, "error", "query.weight"),
    ("large-inputs", Overflowing, "error", "NaN or infinite"),
    ("weights", ColumnWeights, "error", "over queries"),
    ("weights", ReorderedWeights, "error", "in another order"),
    ("input-kept", WritesIntoX, "error", "no longer what it was"),
    ("contiguous", Strided, "error", "another memory order"),
    ("deterministic", DropoutAlways, "error", "two calls"),
    ("registered", HeadsInAList, "error", "extra is a Python list of modules"),
    ("registered", PlainMask, "error", "mask is a plain tensor"),
    ("move", PlainMask, "error", "On another device"),
    ("move", FixedDtype, "warning", "bfloat16"),
    ("half", HugeFill, "warning", "In float16 the call fails"),
    ("reload", HiddenWeight, "error", "gives another output"),
    ("context", BufferedMask, "warning", r"17 tokens in a context of 16 end in RuntimeError"),
    ("context", EndsSilently, "error", "raise no error"),
    ("heads-divide", FailsLate, "warning", "5 heads .* end in RuntimeError"),
    ("parameter-count", TooWide, "warning", "an output projection 576 more"),
    ("train-eval", MaskedInTrainingOnly, "error", "though nothing is dropped"),
    ("dropout", DroppedScores, "error", "On average"),
    ("dropout", UnusedDropout, "warning", "changes nothing"),
    ("dropout", KeepsWhatItIsToDrop, "error", "dropout drops 0.75: the share that is to be kept"),
    ("init", PositiveWeights, "warning", "query.weight are positive"),
    ("buffer", BufferedMask, "warning", "mask, 16 × 16 numbers"),
    ("assert", Asserting, "warning", "head count"),
    ("mask", MaskIgnored, "error", "mask changes nothing"),
    ("mask", TriangleWhateverIsAsked, "error", "still depends on it"),
    ("padding", PaddingOnFirst, "error", "no form in which it hides"),
    ("cross", CrossWithQueriesLength, "error", "7 queries with 11 keys"),
    ("cross", CrossThatLooksBack, "error", "changes nothing"),
    ("rotary", QueriesTurned, "error", "5 further on"),
    ("rotary", NothingTurned, "error", "any positions"),
    ("relative", Sums, "error", "as far away"),
    ("cache", CachedWithSquareMask, "error", "differs from token 3 on"),
    ("cache", CachedInFront, "error", "differs from token"),
]


@pytest.mark.parametrize(
    ("rule", "layer", "severity", "words"),
    BROKEN,
    ids=[f"{rule}-{layer.__name__}" for rule, layer, _, _ in BROKEN],
)
def test_a_broken_layer_is_caught(
    rule: str, layer: type[nn.Module], severity: str, words: str
) -> None:
    one = found(layer, rule)
    assert one.severity == severity
    with pytest.raises(ValueError, match=words):
        raise ValueError(one.message)
    assert one.hint


def test_every_probe_can_fail() -> None:
    caught = {rule for rule, *_ in BROKEN} | {"builds", "runs"}  # these two: test_check.py
    assert caught == {rule.id for rule in PROBE_RULES}
    assert set(probes.PROBES) | {"builds", "runs"} == caught


def test_nothing_is_compared_where_numbers_are_no_numbers() -> None:
    results = {one.rule: one for one in results_of(HidesItself)}
    assert results["finite"].severity == "error"
    assert results["prefix"].severity == "skipped"
    assert results["init"].severity == "passed"


def test_chunks_of_one_token_hide_what_chunks_of_several_show() -> None:
    assert "aligned to the end" in found(CachedWithSquareMask, "cache").hint


def test_examples_say_where_outputs_part() -> None:
    one = found(MaskedAfter, "causality")
    assert one.example is not None
    assert len(one.example.expected) == 2  # the tokens before the one that was changed
    assert one.example.expected != one.example.actual
    assert one.example.where.startswith(f"token {one.example.token}, feature")


@pytest.mark.parametrize("names", [("q", "k", "v"), ("Q", "K", "V"), ("query", "key", "value")])
def test_functions_are_probed_too(names: tuple[str, str, str]) -> None:
    space: dict[str, Any] = {"torch": torch}
    code = (
        "def f({0}, {1}, {2}):\n"
        "    weights = torch.softmax({0} @ {1}.mT / 8**0.5, dim={3})\n"
        "    return weights @ {2}"
    )
    exec(code.format(*names, -1), space)
    right: Callable[..., Tensor] = space["f"]
    assert not [one for one in results_of(right) if one.severity == "error"]
    exec(code.format(*names, -2), space)
    assert found(space["f"], "equal-tokens").severity == "error"


def test_rules_are_told_apart() -> None:
    assert len(RULES) == len({rule.says for rule in RULES.values()})
    for rule in PROBE_RULES:
        assert rule.evidence == "probe"
        assert rule.says.endswith(".")
        assert rule.lesson.endswith(".")

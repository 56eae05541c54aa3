"""Every probe, on a right layer that passes it and on layers that break exactly what it looks
at."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.check import Verdict, check
from headwise.check.rules import RULES


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


class MaskedInTrainingOnly(Right):
    def hide(self, scores: Tensor) -> Tensor:
        return scores if self.training else super().hide(scores)


class DropoutAlways(Right):
    def softmax(self, scores: Tensor) -> Tensor:
        return F.dropout(super().softmax(scores), 0.3)


class UnusedDropout(Right):
    def forward(self, x: Tensor) -> Tensor:
        kept, self.dropout.p = self.dropout.p, 0.0
        out = super().forward(x)
        self.dropout.p = kept
        return out


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

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__(d_model, num_heads, context_length=10**9)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # type: ignore[override]
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
        weights = self.dropout(scores.masked_fill(later, -torch.inf).softmax(-1))
        return self.out((weights @ heads["v"]).transpose(1, 2).flatten(2))


class QueriesTurned(Rotary):
    turned = "q"


class NothingTurned(Rotary):
    turned = ""


def tables(x: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """Rotary tables of the positions from `start` on, for heads of width 8."""
    angles = torch.arange(start, start + x.shape[1])[:, None] * 10000.0 ** -(
        torch.arange(0, 8, 2) / 8
    )
    both = torch.cat((angles, angles), -1).to(x.dtype)
    return both.cos(), both.sin()


CALLS: dict[type[nn.Module], Callable[..., Any]] = dict.fromkeys(
    (Rotary, QueriesTurned, NothingTurned),
    lambda layer, x, start: layer(x, *tables(x, start)),
)


@functools.cache
def verdict_of(thing: Any) -> Verdict:
    return check(thing, call=CALLS.get(thing))


RIGHT: dict[str, type[nn.Module]] = {
    "mask": Masked,
    "padding": Padded,
    "cross": Cross,
    "cache": Cached,
    "rotary": Rotary,
}
NOT_HERE = {"builds", "runs", "weights", "context", "positions", "order", "shared-heads"}


@pytest.mark.parametrize(
    "rule",
    [rule.id for rule in RULES.values() if rule.evidence == "probe" and rule.id not in NOT_HERE],
)
def test_a_right_layer_passes(rule: str) -> None:
    assert verdict_of(RIGHT.get(rule, Right))[rule].severity == "passed"


@pytest.mark.parametrize("layer", [Right, Masked, Padded, Cross, Cached, Rotary])
def test_right_layers_have_no_findings(layer: type[nn.Module]) -> None:
    assert verdict_of(layer).findings == ()


BROKEN: list[tuple[str, type[nn.Module], str, str]] = [
    # rule, layer, severity, words of its message
    (
        "shape",
        Squeezing,
        "error",
        r"For x \[1, 7, 24\] the call fails: Unusable: it returns .* \[7, 24\]",
    ),
    ("shape", FixedBatch, "error", r"For x \[1, 7, 24\] the call fails"),
    ("finite", HidesItself, "error", "The output of token 0 is NaN"),
    ("causality", UpsideDown, "error", "inverted"),
    ("causality", NextTokenToo, "error", "right after it: the mask is off by one"),
    ("causality", SmallMask, "error", "20 times as large"),
    ("causality", FarMask, "warning", "1000 times as large"),
    ("past-used", OwnTokenOnly, "error", "does not depend on any other token"),
    ("prefix", ScaledByLength, "error", "different outputs alone and within 7"),
    ("batch", MixesBatch, "error", "alone and in a batch"),
    ("equal-tokens", MaskedAfter, "error", "weights of a row do not sum to 1"),
    ("one-token", Activated, "skipped", "more than attention: tanh"),
    ("gradients", LosesAHead, "error", r"rows 16 to 23 of value.weight"),
    ("gradients", Detached, "error", "query.weight"),
    ("large-inputs", Overflowing, "error", "NaN or infinite"),
    ("weights", ColumnWeights, "error", "along the queries"),
    ("input-kept", WritesIntoX, "error", "changes x in place"),
    ("contiguous", Strided, "error", "not contiguous"),
    ("deterministic", DropoutAlways, "error", "two calls"),
    ("registered", HeadsInAList, "error", "extra is a plain list of modules"),
    ("move", PlainMask, "error", "mask is a plain tensor"),
    ("reload", HiddenWeight, "error", "gives a different output"),
    ("context", EndsSilently, "warning", "the outputs of the first tokens change"),
    ("train-eval", MaskedInTrainingOnly, "error", "in training mode and in eval mode differ"),
    ("dropout", UnusedDropout, "warning", "nothing is dropped"),
    ("mask", MaskIgnored, "error", "`mask` changes nothing"),
    ("padding", PaddingOnFirst, "error", "leaks|still|depend on padded tokens"),
    ("cross", CrossWithQueriesLength, "error", r"another sequence \[2, 11, 24\] the call fails"),
    ("cross", CrossThatLooksBack, "error", "changes nothing"),
    ("rotary", QueriesTurned, "error", "by 5 positions changes the output"),
    ("cache", CachedWithSquareMask, "error", "its mask is not aligned to the end"),
    ("cache", CachedInFront, "error", "differs"),
]


@pytest.mark.parametrize(
    ("rule", "layer", "severity", "words"),
    BROKEN,
    ids=[f"{rule}-{layer.__name__}" for rule, layer, _, _ in BROKEN],
)
def test_a_broken_layer_is_caught(
    rule: str, layer: type[nn.Module], severity: str, words: str
) -> None:
    one = verdict_of(layer)[rule]
    assert one.severity == severity, str(verdict_of(layer))
    with pytest.raises(ValueError, match=words):
        raise ValueError(one.message)
    assert one.hint or severity == "skipped"


def test_nothing_is_compared_where_numbers_are_no_numbers() -> None:
    verdict = verdict_of(HidesItself)
    assert verdict.errors[0].rule == "finite"
    assert verdict["prefix"].severity == "skipped"


def test_examples_say_where_outputs_differ() -> None:
    one = verdict_of(SmallMask)["causality"]
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
    assert check(space["f"]).passed
    exec(code.format(*names, -2), space)
    assert check(space["f"]).errors[0].rule == "softmax"


def test_rules_are_told_apart() -> None:
    assert len(RULES) == len({rule.statement for rule in RULES.values()})
    for rule in RULES.values():
        assert rule.statement.endswith(".")
        assert rule.lesson.rstrip().endswith((".", ")"))

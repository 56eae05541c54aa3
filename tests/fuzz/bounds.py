"""How far the native kernel may be from exact arithmetic, derived from the sizes of the numbers.

Let u = 2⁻²⁴ be half a unit in the last place of float32. A sum of n products errs by at most n·u
times the sum of their magnitudes, in any order and with or without fused multiply-adds (Higham
2002, §3.1). All bounds follow from that. Counts of roundings are upper bounds, a few higher than
they need be, which covers terms of second order and the u's of the kernel's constants.

*Scores.* `s = scale · q·k` errs by (D + 2)·u·|scale|·Σ|q||k| + 2u·|s|, and not at all where all
products are multiples of one power of two that 24 bits can count, and the scale is one, too.
Softcap maps the ends of this range and rounds 6 times; where s/c is below normal numbers, 2⁻¹⁴⁸·c
is lost. A bias adds u·(|s| + |b|); but where the
exact sum is a number of float32, and what went before is far below its spacing, rounding gives just
that number. Where all keys of a head are the same, the error of q·k is the same for all: it moves
the maximum and the log-sum-exp, and no weight. What the kernel does with differences of scores errs
by 4u·|s − max|.

*Weights.* Let each score be anywhere in `s ± δ`. A probability is largest where its own score is at
the upper end and all others are at the lower one, `p ≤ 1 / (1 + Σ_{l≠j} e^{s_l − δ_l − s_j −
δ_j})`, and smallest the other way round, for any δ, however large. Into δ go also the error of 2^t
(4u) and of each rescaling by a later block of keys with a larger score (6u). Weights below 2⁻¹²⁶ of
the largest may be 0. Sums over queries and gradients make p again from the same scores: less the
log-sum-exp, with its error and rounding, where that is at most 4096; less the maximum and the log
of the sum beyond, and that log is off by what the δ of all scores make of it.

*Forward.* `out`: Σ E_p·|v|, the rounding of a sum over keys, and one rounding to the dtype. In
pairs of bfloat16 each weight is rounded to 8 bits (2⁻⁸·Σ p·|v|), and numbers below 2⁻¹²⁶ are read
as 0. `lse`: that of both ends of the ranges. `entropy`: the range of −p·log p for each p, and the
rounding of Σ p·(max − s). `ahead`: Σ E_p·|j − i|; masses: E_p itself; sums over queries likewise.

*Backward.* See `gradients`.

Where a score leaves float32 the kernel may refuse the call; if it does not, other rows keep their
bounds, and there is no NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.kernels.interface import STATISTICS

from .rounding import (
    FLUSHED,
    LEAST,
    UNITS,
    VANISHING,
    U,
    apart,
    between,
    entropy_apart,
    factor_apart,
)
from .scores import Scores
from .truth import Truth, by_blocks

LARGE = 4096.0
"""A log-sum-exp beyond this (the kernel's LARGE) is not what weights are made from again."""

BLOCK = 96
"""Keys to a block of the kernel, at most; the least is 48."""


class Bounds:
    """The largest error that is allowed, for each result of a case, in the shape of the result.

    `pairs` says whether bfloat16 is multiplied in pairs.
    """

    def __init__(self, truth: Truth, pairs: bool) -> None:
        self.truth, self.pairs = truth, pairs
        self.case, self.call = truth.inputs.case, truth.call
        self.least = FLUSHED if pairs else LEAST
        self.v = truth.call.v.detach().abs().repeat_interleave(self.case.group, dim=1)
        self.allowed, self.alive = truth.full.allowed, truth.alive
        keys = truth.call.extent.keys
        self.turns = keys // 48 + keys // 1024 + 2  # blocks of keys, and parts that are merged
        self.adding = min(keys, BLOCK) + self.turns + 24  # roundings of a sum of weights
        self.scores = Scores(truth, pairs)
        self.overflow = self.scores.overflow
        self._weights()
        self._weights_again()
        self.found = self._figures() | self._sums()
        if self.case.output:
            self.found["out"] = self._out()

    def held(self, name: str) -> Tensor:
        """Where a result must keep its bound: not where scores overflow."""
        rows, shape = ~self.overflow, self.found[name].shape
        if name in ("out", *STATISTICS):
            return rows.view(*rows.shape, *[1] * (len(shape) - 3)).expand(shape)
        heads = rows.all(-1)
        return heads.view(*heads.shape, *[1] * (len(shape) - 2)).expand(shape)

    def stored(self, error: Tensor, exact: Tensor) -> Tensor:
        """The error of what is rounded to the dtype."""
        unit = UNITS[self.case.dtype]
        smallest = torch.finfo(self.truth.inputs.dtype).smallest_normal * unit
        return error + unit * (exact.abs() + error) + smallest

    # ── weights ─────────────────────────────────────────────────────────────────────────────────

    def _weights(self) -> None:
        """`columns` are the scores and the sink's, from `low` to `high` their probabilities."""
        alive, truth, common = self.alive, self.truth, self.scores.common
        s = self.s = torch.where(self.allowed, truth.logits, -torch.inf)
        top = self.top = s.amax(-1).masked_fill(~alive, 0.0)
        below = torch.where(self.allowed, top[..., None] - s, 0.0)
        delta = self.scores.error + U * (4 * below + 4 + 6 * self.turns)
        highest, self.sink_error = top, torch.zeros_like(top)
        if self.call.sinks is not None:
            sink = self.call.sinks.detach()[:, None].expand_as(top)
            rough = 0.0 if self.scores.exact_scale else 2 * U * top.abs()
            error = common + rough + 3 * U * (sink - top).abs().clamp(max=1e30)
            self.sink_error = torch.where(sink == -torch.inf, 0.0, error)
            sink = sink.masked_fill(~alive, -torch.inf)
            highest = torch.maximum(top, sink)
            s = torch.cat([s, sink[..., None]], -1)
            delta = torch.cat([delta, self.sink_error[..., None]], -1)
        there = s > -torch.inf
        self.columns, (self.low, self.high) = s, between(s, delta)
        # Relative to the largest: float64 has no digits for the log of a sum beside 1e20 either.
        s = torch.where(there, s - highest[..., None], -torch.inf)
        total, low, high = (
            torch.logsumexp(torch.where(there, s + d, s), -1).masked_fill(~alive, 0.0)
            for d in (0.0, -delta, delta)
        )
        self.log_p = torch.where(there, s - total[..., None], 0.0)
        self.log_sum, self.moved = total, apart(total, low, high)
        self.p, keys = truth.p, truth.p.shape[-1]
        far = torch.where(self.allowed, highest[..., None] - self.s, 0.0) + delta[..., :keys]
        lost = torch.where(far > VANISHING, self.p, 0.0) + LEAST
        error = apart(self.p, self.low[..., :keys], self.high[..., :keys]) + lost
        self.p_error = error.masked_fill(~alive[..., None], 0.0)
        self.lse = truth.figures["lse"].masked_fill(~alive, 0.0)
        rounding = self.adding + 6 * highest.abs() + 3 * self.lse.abs() + 4 * self.log_sum + 4
        self.lse_error = (self.moved + common + U * rounding).masked_fill(~alive, 0.0)

    def _weights_again(self) -> None:
        """Errors of the weights in gradients and sums over queries, and of their logarithms."""
        sums = U * (self.adding + 6 * self.log_sum + 8) + self.sink_error
        from_top = sums + self.moved
        from_lse = sums + self.scores.common + self.lse_error + 3 * U * self.lse.abs()
        row = torch.where(self.lse.abs() - self.lse_error > LARGE, from_top, from_lse)
        log_p = self.log_p[..., : self.p.shape[-1]]
        logs = self.scores.error + row[..., None] + U * (4 * log_p.abs() + 4)
        self.row_again, self.logs_again = row, torch.where(self.allowed, logs, 0.0)
        lost = torch.where(self.logs_again - log_p > VANISHING, self.p, 0.0) + LEAST
        error = factor_apart(log_p, self.logs_again) + lost
        self.p_again = torch.where(self.allowed, error, 0.0)

    # ── results ─────────────────────────────────────────────────────────────────────────────────

    def _out(self) -> Tensor:
        keys = self.p.shape[-1]
        each = (keys + self.adding + 2 * self.turns + 6) * U + (2.0**-8 if self.pairs else 0.0)
        error = self.p_error @ self.v + each * (self.p @ self.v) + (keys + 2) * self.least
        return self.stored(error, self.truth.figures["out"])

    def _figures(self) -> dict[str, Tensor]:
        few = U * (self.adding + 8 * self.turns + 10)
        error, keys = self.scores.error, torch.arange(self.p.shape[-1])
        low, high = ((self.s + e).amax(-1) for e in (-error, error))
        largest = apart(self.truth.figures["max"], low, high) + self.scores.common
        p = torch.where(self.columns > -torch.inf, self.log_p.exp(), 0.0)
        mean = -(p * self.log_p).sum(-1) + 2 * self.log_sum + 1
        position = self.truth.inputs.position[:, None]
        away = (keys - position).abs().double()
        at = {"first": keys == 0, "previous": keys == position - 1, "self": keys == position}
        each = self.p_error + few * self.p
        found = {
            "lse": self.lse_error,
            "max": largest + 6 * U * self.top.abs(),
            "entropy": entropy_apart(p, self.low, self.high).sum(-1) + few * mean,
            "ahead": (self.p_error * away + few * self.p * (away + 2 * BLOCK)).sum(-1),
            **{name: torch.where(chosen, each, 0.0).sum(-1) for name, chosen in at.items()},
        }
        return {name: torch.where(self.alive, x, 0.0) for name, x in found.items()}

    def _sums(self) -> dict[str, Tensor]:
        weight = self.truth.inputs.weight
        counts = 1.0 if weight is None else weight.double().abs()[:, None]
        t, s = self.p.shape[2:]
        error, size = self.p_again * counts, self.p * counts
        received = error.sum(2) + (min(t, 48) + t // 48 + 4) * U * size.sum(2)
        blocks = (*self.truth.inputs.blocks, self.case.blocks)
        table = by_blocks(error, *blocks) + (t + 64 + s // 64) * U * by_blocks(size, *blocks)
        return {"received": received, "map": table}

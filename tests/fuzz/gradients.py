"""How far the kernel's gradients may be off.

With what comes in for the output (dO), entropy (g_H), E[j − i] (g_J), masses and the log-sum-exp,

    dS = p ∘ B · scale,   B = dP − g_H·log p + g_J·(j − i) + points − D,   dP = dO·vᵀ,
    D = dO·out + g_H·H + g_J·E[j − i] + Σ g·mass − g_lse.

The error of B is that of dP (a sum of Dv products), of log p, and of D, which is made of figures
with the errors of the forward pass, `out` as it was rounded to its dtype; and 8u times the sizes of
all of them. That of dS is E_p·|B| + p·E_B; under a softcap also that of 1 − tanh². Products carry
it on: dQ = dS·k, dK = dSᵀ·q, dV = pᵀ·dO, each with the rounding of its sum and one to the dtype. In
pairs of bfloat16, p and dS are rounded to 8 bits first. A sink's gradient is −p_sink·(g_H·log
p_sink + D), summed over queries. A product below normal numbers errs by 2⁻¹⁴⁹ beside. Where one of
these sizes leaves float32, its head is not looked at.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .bounds import Bounds
from .rounding import FLUSHED, LEAST, MOST, VANISHING, U, factor_apart


class GradientBounds:
    """The largest error that is allowed for each gradient of a case, by its name."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds, self.truth, self.case = bounds, bounds.truth, bounds.case
        self.given = {n: g.double() for n, g in self.truth.inputs.incoming.items()}
        self.rough = 2.0**-8 if bounds.pairs else 0.0  # as a number becomes bfloat16
        p = bounds.p
        self.beyond = torch.zeros(p.shape[:2], dtype=torch.bool)
        self._row()
        self._bracket()
        wanted, stored = self.truth.gradients, bounds.stored
        found = self._of_queries_and_keys() | {"v": self._of_values()}
        self.found = {n: stored(x, wanted[n]) for n, x in found.items() if n in wanted}
        if "sinks" in wanted:
            self.found["sinks"] = self._of_sinks()

    def held(self, name: str) -> Tensor:
        """Where a gradient must keep its bound."""
        heads = ~(self.beyond | self.bounds.overflow.any(-1))
        if name == "sinks":
            return heads.all(0)
        if name in "kv":
            heads = heads.unflatten(1, (self.case.kv_heads, -1)).all(2)
        return heads[..., None, None].expand(self.found[name].shape)

    def _must_fit(self, size: Tensor) -> Tensor:
        """Note the heads in which a number of this size leaves float32."""
        self.beyond |= (size > MOST).flatten(2).any(-1)
        return size

    # ── what p is multiplied by ─────────────────────────────────────────────────────────────────

    def _row(self) -> None:
        """D of each row, its size and its error."""
        figures, found = self.truth.figures, self.bounds.found
        value = size = error = torch.zeros(self.bounds.p.shape[:3], dtype=torch.float64)
        for name, g in self.given.items():
            if name == "lse":
                value, size = value - g, size + g.abs()
            elif name == "out":
                value = value + (g * figures[name]).sum(-1)
                of_out = (g.abs() * figures[name].abs()).sum(-1)
                size, error = size + of_out, error + (g.abs() * found[name]).sum(-1)
                error = error + (self.case.wide + 2) * (U * of_out + LEAST)
            else:
                value, size = value + g * figures[name], size + (g * figures[name]).abs()
                error = error + g.abs() * found[name] + LEAST
        self.row, self.row_size = value, self._must_fit(size)
        self.row_error = error + 8 * U * size

    def _bracket(self) -> None:
        """B, its size and its error."""
        b, given = self.bounds, self.given
        keys = torch.arange(b.p.shape[-1])
        away = (keys - self.truth.inputs.position[:, None]).double()
        # Below e^-200 nothing is left of p.
        logs = torch.where(b.allowed, b.log_p[..., : b.p.shape[-1]].clamp(min=-200), 0.0)
        features = {
            "entropy": -logs,
            "ahead": away,
            "first": (keys == 0).double(),
            "previous": (away == -1).double(),
            "self": (away == 0).double(),
        }
        value, size = -self.row[..., None], self.row_size[..., None]
        error = self.row_error[..., None]
        if "out" in given:
            v = self.truth.call.v.detach().repeat_interleave(self.case.group, dim=1)
            of_out = given["out"].abs() @ v.abs().mT
            value, size = value + given["out"] @ v.mT, size + of_out
            error = error + (self.case.wide + 2) * U * of_out + (self.case.wide + 1) * b.least
            if b.pairs:  # numbers that are read as 0
                g, v = given["out"].abs(), v.abs()
                small_g, small_v = (torch.where(x < FLUSHED, x, 0.0) for x in (g, v))
                error = error + small_g @ v.mT + g @ small_v.mT
        for name, feature in features.items():
            if name in given:
                g = given[name][..., None]
                value, size = value + g * feature, size + (g * feature).abs()
                error = error + LEAST
        if "entropy" in given:
            error = error + given["entropy"].abs()[..., None] * b.logs_again
        self.value, self.size = value, self._must_fit(size)
        self.error = error + 8 * U * size

    # ── gradients ───────────────────────────────────────────────────────────────────────────────

    def _of_queries_and_keys(self) -> dict[str, Tensor]:
        b = self.bounds
        size, scores = b.p * self.value.abs(), b.scores
        error = b.p_again * (self.value.abs() + self.error) + b.p * self.error + 8 * U * size
        error = error + 2 * LEAST  # of the products with p and, under a softcap, its slope
        if self.truth.call.softcap is not None:
            curve = 1 - scores.share**2
            error = error * curve + (size + error) * 3 * scores.share_error
            size = size * curve
        scale = abs(self.truth.call.scale)
        lost = scores.scale_lost * (size + error) + LEAST
        size, error = size * scale, (error + 6 * U * size) * scale + lost
        if b.pairs:
            error = error + self.rough * (size + error) + FLUSHED
        size, error = (torch.where(b.allowed, x, 0.0) for x in (size, error))
        self._must_fit(size + error)
        keys, rows = b.p.shape[-1] + 6, b.p.shape[2] * self.case.group + 6
        of_queries = error @ scores.k + keys * (U * (size @ scores.k) + b.least)
        of_keys = error.mT @ scores.q + rows * (U * (size.mT @ scores.q) + b.least)
        if b.pairs:  # numbers that are read as 0
            q, k = (torch.where(x < FLUSHED, x, 0.0) for x in (scores.q, scores.k))
            of_queries, of_keys = of_queries + size @ k, of_keys + size.mT @ q
        self._must_fit(of_queries + size @ scores.k)
        self._must_fit(of_keys + size.mT @ scores.q)
        return {"q": of_queries, "k": self._of_group(of_keys)}

    def _of_values(self) -> Tensor:
        b, rows = self.bounds, self.bounds.p.shape[2] * self.case.group + 6
        if "out" not in self.given:
            return torch.zeros_like(self.truth.call.v)
        g = self.given["out"].abs()
        size = self._must_fit(b.p.mT @ g)
        error = b.p_again.mT @ g + (rows * U + self.rough) * size + rows * b.least
        if b.pairs:  # weights that are read as 0
            error = error + FLUSHED * g.sum(2, keepdim=True)
        return self._of_group(error)

    def _of_group(self, x: Tensor) -> Tensor:
        """Sums over the query heads of each key/value head."""
        return x.unflatten(1, (self.case.kv_heads, self.case.group)).sum(2)

    def _of_sinks(self) -> Tensor:
        b, sinks = self.bounds, self.truth.call.sinks
        assert sinks is not None
        sink = sinks.detach()[:, None].expand_as(b.lse)
        there = (sink > -torch.inf) & b.alive
        logs = torch.where(there, b.log_p[..., -1], 0.0)
        p = torch.where(there, logs.exp(), 0.0)
        logs_error = b.row_again + U * (4 * logs.abs().clamp(max=1e30) + 4)
        lost = torch.where(logs_error - logs > VANISHING, p, 0.0)
        p_error = torch.where(there, factor_apart(logs, logs_error), 0.0) + lost
        value, size, error = self.row, self.row_size, self.row_error
        if "entropy" in self.given:
            g, kept = self.given["entropy"], logs.clamp(min=-200)
            value, size = value + g * kept, size + (g * kept).abs()
            error = error + g.abs() * logs_error
        self._must_fit(size)
        total = p_error * (value.abs() + error) + p * (error + 8 * U * size) + 3 * LEAST
        rows = b.p.shape[0] * b.p.shape[2] + 6
        return torch.where(b.alive, total + rows * U * (p * value.abs() + total), 0.0).sum((0, 2))

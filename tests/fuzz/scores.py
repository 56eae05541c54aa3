"""How far scores may be off: products, scale, softcap, and what is added to them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headwise.core.mask_algebra import And
from headwise.core.masks import ALiBi, Bias

from .rounding import FLUSHED, LEAST, MOST, U, lowest_bit
from .truth import Truth


class Scores:
    """Errors of the scores of a case; see `bounds` for what they are made of.

    `error` `[B, H, T, S]` is that of single scores, `common` `[B, H, T]` one that all scores of a
    row share. `overflow` are the rows of which a score may leave float32 on its way. `share` is
    tanh's value under a softcap, `share_error` its error.
    """

    def __init__(self, truth: Truth, pairs: bool) -> None:
        self.truth, self.pairs = truth, pairs
        self.case, call = truth.inputs.case, truth.call
        k = call.k.detach().repeat_interleave(self.case.group, dim=1)
        self.q, self.k = call.q.detach().abs(), k.abs()
        scale = abs(call.scale)
        lost = abs(float(torch.tensor(scale)) - scale)  # as the scale becomes float32
        self.exact_scale = scale == 0 or (math.frexp(scale)[0] == 0.5 and lost == 0)
        raw, size = call.q.detach() @ k.mT, self.q @ self.k.mT
        error, exact = self._products(size)
        s = raw * call.scale
        self.scale_lost = lost if lost > U * scale else 0.0  # of a scale below normal numbers
        error = scale * error + 2 * U * s.abs() + self.scale_lost * size + LEAST
        if self.exact_scale:
            error = error.masked_fill((exact & (s.abs() >= FLUSHED)) | (size * scale == 0), 0.0)
        if call.softcap is not None:
            error, s = self._capped(s, error, call.softcap)
        twins = (k == k[:, :, :1]).flatten(2).all(-1)[..., None]
        self.common = torch.where(twins, error.amax(-1), 0.0)
        error = error.masked_fill(twins[..., None], 0.0)
        self.error, added = self._added(s, error)
        beyond = (size > MOST) | (size * scale > MOST) | (s.abs() + added > MOST)
        self.overflow = (beyond & truth.full.allowed).any(-1)

    def _products(self, size: Tensor) -> tuple[Tensor, Tensor]:
        """The error of q·k, and where it is exact."""
        least = FLUSHED if self.pairs else LEAST
        error = (self.case.dim + 2) * U * size + (self.case.dim + 1) * least
        grid = lowest_bit(self.q)[..., :, None] * lowest_bit(self.k)[..., None, :]
        exact = (size <= 2.0**24 * grid) & (grid >= least)
        if self.pairs:  # numbers that are read as 0
            q, k = (torch.where(x < FLUSHED, x, 0.0) for x in (self.q, self.k))
            lost = q @ self.k.mT + self.q @ k.mT
            error, exact = error + lost, exact & (lost == 0)
        return error.masked_fill(exact, 0.0), exact

    def _capped(self, s: Tensor, error: Tensor, cap: float) -> tuple[Tensor, Tensor]:
        size = s.abs()
        s = cap * torch.tanh(s / cap)
        up = cap * torch.tanh((size + error) / cap) - s.abs()
        down = s.abs() - cap * torch.tanh((size - error).clamp(min=0) / cap)
        moved = torch.maximum(up, down) + U * (2 * size).clamp(max=cap)  # x · tanh′(x) < 1/2
        moved = moved + 2 * LEAST * cap  # s/c and its tanh, where they are below normal numbers
        self.share, self.share_error = s / cap, moved / cap + 6 * U
        return moved + 6 * U * s.abs() + LEAST, s

    def _added(self, s: Tensor, error: Tensor) -> tuple[Tensor, Tensor]:
        """The error with all that is added to the scores, and the size of that."""
        inputs, size, rough = self.truth.inputs, torch.zeros(()).double(), torch.zeros(()).double()
        i, j = torch.arange(self.case.queries)[:, None], torch.arange(self.case.keys)[None]
        i = i if inputs.rows is None else inputs.rows[:, None]
        count = 0
        for part in inputs.mask.parts if isinstance(inputs.mask, And) else (inputs.mask,):
            if part is None or not part.biased:
                continue
            x = part.bias(i, j, inputs.whole).double().abs()  # type: ignore[union-attr]
            x = torch.where(x == torch.inf, 0.0, x)
            size, count = size + x, count + 1
            if not isinstance(part, Bias) or part.values.dtype == torch.float64:
                rough = rough + (2 if isinstance(part, ALiBi) else 1) * U * x
        if not count:
            return error, size
        final = torch.where(self.truth.full.allowed, self.truth.logits, 0.0)
        before = error + self.common[..., None] + rough
        spacing = (final.abs() * 2 * U).clamp(min=LEAST)
        met = (final.float().double() == final) & (before + (count - 1) * U * size < spacing / 4)
        error = error + rough + count * U * (s.abs() + size)
        return error.masked_fill(met, 0.0), size

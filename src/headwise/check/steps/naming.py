"""Name the mistake where `check` cannot run the code itself, by what the known ones give."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..diagnosis.faults import faults, words_of
from ..diagnosis.fit import FITS
from ..diagnosis.projections import Matrix, Projections
from ..diagnosis.search import double, single
from ..diagnosis.variants import MERGES, Variant, attend, error, rebuild, sizes_of
from ..findings.verdict import Finding

CAUSAL = Variant(mask="causal")

Give = Callable[[Variant], Tensor]


def is_right(give: Give, out: Tensor) -> bool:
    """Whether an output is what causal attention gives."""
    return error(out, give(CAUSAL)) <= FITS


def named(give: Give, out: Tensor, reading: Projections, tokens: int) -> Finding | None:
    """The known mistake, or the first of two, that gives this output.

    Args:
        give: what a variant gives for the same input.
        out: what somebody's code gives.
        reading: the projections, for the words.
        tokens: T of the input.
    """

    def fits(variant: Variant) -> bool:
        try:
            return error(out, give(variant)) <= FITS
        except (RuntimeError, ValueError, IndexError):
            return False

    known = {CAUSAL: list(faults(reading, CAUSAL))}
    explained = single(known, fits) or double(known, fits)
    if explained is None:
        return None
    row, words = explained[1][0], words_of(reading, tokens)
    return Finding(row.rule, row.severity, row.message.format(**words), row.hint.format(**words))


def from_weights(reading: Projections, x: Tensor) -> Give:
    """What variants give for x `[B, T, E]`, with the weights of a reading."""
    return lambda variant: rebuild(reading, x, variant)


def from_heads(q: Tensor, k: Tensor, v: Tensor) -> Give:
    """What variants give for queries, keys and values `[B, H, T, D]`, as `[B, H, T, D]`."""
    sizes = sizes_of(heads_reading(q), MERGES["heads"](q))

    def give(variant: Variant) -> Tensor:
        heads = {"q": q, "k": k, "v": v}
        first, second, third = (heads[role] for role in variant.roles)
        return attend(first, second, third, variant, sizes)

    return give


def heads_reading(q: Tensor) -> Projections:
    """Sizes for words where there are no projections."""
    heads, dim = q.shape[1], q.shape[-1]
    names = {"q": "query", "k": "key", "v": "value"}
    sources = tuple(Matrix(name, part, torch.empty(0, 0)) for part, name in names.items())
    return Projections(sources, None, heads, heads, dim, dim, heads * dim)

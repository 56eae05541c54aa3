"""Naming the mistake where `check` cannot run the code itself, by what the known ones give."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import combinations

import torch
from torch import Tensor

from ..diagnosis.faults import Mistake
from ..diagnosis.projections import Matrix, Reading
from ..diagnosis.rearranged import mistakes
from ..diagnosis.variants import Variant, attend, error, merged, rebuild, sizes_of
from ..findings.verdict import Finding

FITS = 1e-4  # largest share of the output that is rounding
SECONDS = 2.5  # how long pairs of mistakes are tried
CAUSAL = Variant(mask="causal")

Give = Callable[[Variant], Tensor]


def is_right(give: Give, out: Tensor) -> bool:
    """Whether an output is what causal attention gives."""
    return error(out, give(CAUSAL)) <= FITS


def named(give: Give, out: Tensor, reading: Reading, tokens: int) -> Finding | None:
    """The known mistake, or two of them, that give this output.

    Args:
        give: what a variant gives for the same input.
        out: what somebody's code gives.
        reading: the projections, for the words.
        tokens: T of the input.
    """
    rows = list(mistakes(reading, CAUSAL))
    for row in rows:
        if _gives(give, row.on(CAUSAL), out):
            return _finding(row, reading, tokens)
    until = time.monotonic() + SECONDS
    for first, second in combinations(rows, 2):
        if time.monotonic() > until:
            return None
        if first.adds_to(second) and _gives(give, second.on(first.on(CAUSAL)), out):
            return _finding(first, reading, tokens)
    return None


def _gives(give: Give, variant: Variant, out: Tensor) -> bool:
    try:
        return error(out, give(variant)) <= FITS
    except (RuntimeError, ValueError, IndexError):
        return False


def _finding(row: Mistake, reading: Reading, tokens: int) -> Finding:
    words: dict[str, str | int] = {part: reading.name(part) for part in "qkvo"}
    words |= {"E": reading.embed_dim, "H": reading.num_heads, "G": reading.num_kv_heads}
    words |= {"R": reading.num_heads // reading.num_kv_heads, "D": reading.head_dim}
    words |= {"Dv": reading.value_dim, "T": tokens}
    words |= {"W": reading.num_heads * reading.head_dim}
    return Finding(row.rule, row.severity, row.message.format(**words), row.hint.format(**words))


def from_weights(reading: Reading, x: Tensor) -> Give:
    """What variants give for x `[B, T, E]`, with the weights of a reading."""
    return lambda variant: rebuild(reading, x, variant)


def from_heads(q: Tensor, k: Tensor, v: Tensor) -> Give:
    """What variants give for queries, keys and values `[B, H, T, D]`, as `[B, H, T, D]`."""
    sizes = sizes_of(heads_reading(q), merged(q, CAUSAL))

    def give(variant: Variant) -> Tensor:
        heads = {"q": q, "k": k, "v": v}
        first, second, third = (heads[role] for role in variant.roles)
        return attend(first, second, third, variant, sizes)

    return give


def heads_reading(q: Tensor) -> Reading:
    """Sizes for words where there are no projections."""
    heads, dim = q.shape[1], q.shape[-1]
    names = {"q": "query", "k": "key", "v": "value"}
    sources = tuple(Matrix(name, part, torch.empty(0, 0)) for part, name in names.items())
    return Reading(sources, None, heads, heads, dim, dim, heads * dim)

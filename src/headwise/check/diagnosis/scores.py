"""Mistakes that already show in the scores: what a softmax is taken of, before anything else."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain, combinations, islice

import torch
from torch import Tensor

from ..target.checked_target import Target
from .call_lines import recorded
from .faults import Fault, faults
from .fit import FITS, Case
from .variants import MADE_OF, Variant, allowed_of, heads_of, products, scale_of, sizes_of

FIELDS = set("order packing turned unbiased roles split turned_keys share merge rotated".split())
"""Fields of a variant in which faults of the scores lie; `merge` goes with some splits."""
BASES, PAIRS = 8, 2000
"""How many textbook variants and pairs of mistakes are tried."""


def named_by_scores(case: Case, bases: Sequence[Variant], sure: bool) -> list[Fault]:
    """The mistakes that give the subject's scores from its weights: in how queries and keys are
    made, one or two, and in the scale. Empty where the scores are right, or nothing gives them.

    Args:
        sure: whether it is known that it must be causal, or must not be.
    """
    seen = list(scores_of(case))
    if not seen:
        return []
    known = {base: list(faults(case.reading, base, sure)) for base in bases[:BASES]}
    rows = {
        base: [row for row in its if row.change.keys() <= FIELDS] for base, its in known.items()
    }
    several: Iterator[tuple[Variant, tuple[Fault, ...]]] = chain(
        ((base, ()) for base in rows),
        ((base, (row,)) for base, its in rows.items() for row in its),
        ((bases[0], pair) for pair in islice(combinations(rows[bases[0]], 2), PAIRS)),
    )
    for base, chosen in several:
        variant = base
        for row in chosen:
            variant = row.on(variant)
        if (scale := _scale(case, variant, seen)) is not None:
            return [*chosen, *_of_scale(case, base, scale, known[base])]
    return []


def _of_scale(case: Case, base: Variant, scale: float, known: Sequence[Fault]) -> list[Fault]:
    """The fault whose scale this is; none for the textbook's, for no scale at all, which has its
    reasons in others' attention, and for one without a name.
    """
    sizes = sizes_of(case.reading, case.inputs[1])

    def is_it(name: str | float) -> bool:
        return math.isclose(scale, scale_of(name, sizes), rel_tol=1e-4)

    if any(is_it(name) for name in (base.scale, "√D", "nothing")):
        return []
    rows = (row for row in known if row.change.keys() == {"scale"})
    return [row for row in rows if is_it(row.change["scale"])][:1]


def _scale(case: Case, variant: Variant, seen: Sequence[Tensor]) -> float | None:
    """The number by which a variant's products become the scores that were seen."""
    x, key = case.inputs[1], (1, *MADE_OF(variant))
    try:
        if key not in case.heads:
            case.heads[key] = heads_of(case.reading, x, variant)
        q, k, _ = case.heads[key]
        wanted = products(q, k, variant)
    except Exception:  # shapes that do not fit; somebody's norm may be no norm
        return None
    allowed = allowed_of(variant.mask, x.shape[1], x.shape[1]).expand(wanted.shape)
    wanted = wanted[allowed]
    for scores in seen:
        if scores.shape != allowed.shape:
            continue
        given = scores[allowed].to(wanted)
        scale = float((given @ wanted) / (wanted @ wanted).clamp(min=1e-30))
        if scale and float((given - scale * wanted).abs().max()) <= FITS * float(given.abs().max()):
            return scale
    return None


def heads_seen(subject: Target) -> int | None:
    """How many heads the scores of a call have; None where none are seen."""
    x = subject.input()
    taken = [call.scores.shape for call in recorded(subject, x) if call.scores is not None]
    if not taken:
        return None
    first, calls = taken[0], sum(shape == taken[0] for shape in taken)
    if len(first) == 4 and len(x) in first[:2]:
        heads = first[1 if first[0] == len(x) else 0]
    elif len(first) == 3 and not first[0] % len(x):
        heads = first[0] // len(x)
    else:
        return None
    return calls if heads == 1 else heads  # one after the other, or all of them in each call


def scores_of(case: Case) -> Iterator[Tensor]:
    """The scores of a call, `[B, H, T, T]`, in every order of their batch and heads."""
    heads, (batch, _, _) = case.reading.num_heads, case.inputs[1].shape
    taken = [
        call.scores
        for call in recorded(case.subject, case.inputs[1], case.drops)
        if call.scores is not None
    ]
    if len(taken) == heads > 1 and all(one.shape == taken[0].shape for one in taken):
        taken = [torch.stack(taken, 1)]
    for scores in taken[:1]:
        if scores.ndim == 3 and len(scores) == batch * heads:
            yield scores.unflatten(0, (batch, heads))
            yield scores.unflatten(0, (heads, batch)).transpose(0, 1)
        elif scores.ndim == 4 and scores.shape[0] == heads and scores.shape[1] == batch:
            yield scores.transpose(0, 1)
        elif scores.ndim == 3 and heads == 1:
            yield scores[:, None]
        else:
            yield scores

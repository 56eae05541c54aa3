"""A subject with random weights, read, and compared with what variants make of the same weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from torch import Tensor

from ..target.checked_target import Target
from .call_lines import Calls
from .faults import Fault
from .projections import Matrix, Projections, Unreadable, read
from .variants import (
    MADE_OF,
    SOFTMAXES,
    WEIGHED_BY,
    Heads,
    Variant,
    allowed_of,
    error,
    heads_of,
    rebuild,
    sizes_of,
    weights_from,
)

FITS = 1e-4
"""Largest share of the output by which a rebuilt one may differ: rounding in float32 inside a
module stays far below, and every mistake moves some number by more than this."""


@dataclass
class Case:
    """A subject with random weights, its reading, and what it gives for a few inputs; what was made
    of these is remembered, and forgotten where a case is made of another."""

    subject: Target
    reading: Projections
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    drops: bool = False
    seen: dict[Variant, bool] = field(default_factory=dict, init=False)
    heads: dict[tuple[Any, ...], Heads] = field(default_factory=dict, init=False)
    weights: dict[tuple[Any, ...], Tensor] = field(default_factory=dict, init=False)

    def call(self, x: Tensor) -> Tensor:
        """What the subject gives, nothing dropped."""
        return undropped(self.subject, x, self.drops)

    def fits(self, variant: Variant) -> bool:
        """Whether the variant gives what the subject gives, for one token and for several."""
        several = range(1, len(self.inputs))
        return self.fits_one_token(variant) and all(self.gap(variant, i) <= FITS for i in several)

    def fits_one_token(self, variant: Variant) -> bool:
        """The same for one token only; remembered, as many variants are alike there."""
        if not bool(allowed_of(variant.mask, 1, 1)):
            return True  # it sees nothing, so that nothing can be compared
        single = _for_one_token(variant)
        if single not in self.seen:
            self.seen[single] = self.gap(single, 0) <= FITS
        return self.seen[single]

    def pairs(self, base: Variant, rows: Sequence[Fault]) -> Iterator[tuple[Fault, Fault]]:
        """Two mistakes at a time, in their order, without those that one token rules out: most
        mistakes make no difference there, so that one alone settles it, or none."""
        alone = _for_one_token(base)
        made = [row.on(base) for row in rows]
        fits = [self.fits_one_token(one) for one in made]
        changes = [_for_one_token(one) != alone for one in made]
        open_ = [_is_open(one) for one in made]
        base_fits = self.fits_one_token(base)
        for i, j in combinations(range(len(rows)), 2):
            settled = not (open_[i] or open_[j] or (changes[i] and changes[j]))
            possible = fits[i] if changes[i] else fits[j] if changes[j] else base_fits
            if (possible or not settled) and rows[i].adds_to(rows[j]):
                yield rows[i], rows[j]

    def gap(self, variant: Variant, place: int) -> float:
        """How far a variant's output for one of the inputs is from the subject's."""
        x, key = self.inputs[place], (place, *MADE_OF(variant))
        whole = (*key, *WEIGHED_BY(variant))
        try:
            if key not in self.heads:
                self.heads[key] = heads_of(self.reading, x, variant)
            q, k, _ = heads = self.heads[key]
            if whole not in self.weights:
                sizes = sizes_of(self.reading, x)
                self.weights[whole] = weights_from(q, k, variant, sizes)
            wanted = rebuild(self.reading, x, variant, heads, self.weights[whole])
        except Exception:  # somebody's norm may be no norm
            return math.inf
        return error(self.outputs[place], wanted, _seen(variant, x))


def case_of(subject: Target, drops: bool = False) -> Case:
    """Give a subject random weights, read them, and call it on a few inputs.

    Args:
        drops: whether it drops numbers in eval mode, which is switched off then.

    Raises:
        Unreadable: there is no reading, or a call fails.
    """
    trial = subject.randomised().double()
    reading = projections_of(trial)
    if trial.only:
        raise Unreadable(f"it takes {trial.most_tokens} tokens, and no other number")
    lengths = _lengths(trial, reading)
    inputs = tuple(trial.input(tokens=t, batch=_batch(reading), seed=t) for t in lengths)
    try:
        outputs = tuple(undropped(trial, x, drops).detach() for x in inputs)
    except Exception as fault:  # what is checked may raise anything; the probes say what and where
        raise Unreadable(f"a call fails ({type(fault).__name__})") from fault
    return Case(trial, reading, inputs, outputs, drops)


def projections_of(subject: Target) -> Projections:
    """The projections of a module, or those that are put before a plain function."""
    if subject.projections is not None:
        parts = {part: weight.to(subject.dtype).T for part, weight in subject.projections.items()}
        sources = tuple(Matrix(part, part, weight) for part, weight in parts.items())
        heads = subject.num_heads
        groups = subject.num_kv_heads or heads
        dim, value_dim = parts["q"].shape[1] // heads, parts["v"].shape[1] // groups
        return Projections(sources, None, heads, groups, dim, value_dim, subject.embed_dim)
    if subject.module is None:
        raise Unreadable("it is no nn.Module, which would tell its weights")
    sizes = subject.embed_dim, subject.num_heads, subject.num_kv_heads
    return read(subject.module, *sizes, subject.idle)


def _batch(reading: Projections) -> int:
    return 3 if reading.num_heads == 2 else 2


def _lengths(subject: Target, reading: Projections) -> tuple[int, ...]:
    """One token, and two numbers of tokens that are no other axis's size."""
    others = {reading.num_heads, reading.num_kv_heads, reading.head_dim, reading.value_dim}
    others |= {subject.embed_dim, _batch(reading), reading.num_heads * reading.head_dim}
    longest = subject.context_length or 64
    free = [t for t in (7, 5, 11, 6, 9, 4, 3, 2) if t not in others and t <= longest]
    return (1, *(free or [min(7, longest)])[:2])


def gap(reading: Projections, x: Tensor, out: Tensor, variant: Variant) -> float:
    """How far a variant's output is from this one, as a share of the largest number."""
    try:
        return error(out, rebuild(reading, x, variant), _seen(variant, x))
    except (RuntimeError, ValueError, IndexError):
        return math.inf


def _seen(variant: Variant, x: Tensor) -> Tensor:
    """The tokens that the mask leaves something to see."""
    return allowed_of(variant.mask, x.shape[1], x.shape[1]).any(-1)


def undropped(subject: Target, x: Tensor, drops: bool) -> Tensor:
    """What a subject gives; with `drops`, everything that drops numbers switched off."""
    with Calls(x.shape[1], dropless=True) if drops else nullcontext():
        return subject(x)


def _is_open(variant: Variant) -> bool:
    """Whether other mistakes may make a difference for one token beside this one, or none at all
    is seen."""
    mixes = variant.over == "heads" or variant.softmax in _UNSURE
    return mixes or not bool(allowed_of(variant.mask, 1, 1))


def _for_one_token(variant: Variant) -> Variant:
    """The same without what makes no difference where a token sees only itself."""
    if variant.over == "heads" or variant.softmax in _UNSURE:
        return variant
    split = variant.split if isinstance(variant.split, str) else variant.split[2]
    return variant.but(
        turned=_for_values(variant.turned),
        unbiased=_for_values(variant.unbiased),
        roles="qk" + variant.roles[2],
        split="heads" if split == "view" else split,
        share="repeat" if variant.share.endswith(" keys") else variant.share,
        scale=variant.scale if str(variant.scale).startswith("after") else "√D",
        softcap=None,
        mask="none",
        fill="-inf",
        rope=variant.rope if "v" in variant.rotated else None,
        turned_keys="transposed",
        softmax="keys",
        merge="heads" if variant.merge == "view" else variant.merge,
    )


def _for_values(parts: str) -> str:
    """Without what is done to queries and keys alone."""
    return parts if "v" in parts else "".join(set(parts) & {"o"})


_UNSURE = {*SOFTMAXES} - {"keys", "queries", "both", "twice"}
"""What stands for a softmax and gives a single token another weight than 1."""

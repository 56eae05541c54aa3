"""Search for the variant that gives a target's output: the textbook's, or one with mistakes.

The target gets random weights and runs on a few inputs. Its outputs are compared with those of
variants with the same weights. The first one or two mistakes that give the same outputs are named.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, permutations, product
from typing import Any

import torch
from torch import Tensor, nn

from ..call import ShownCall
from ..code import numbers_in, rotations
from ..target import Target
from .faults import Fault, faults, fill_of
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
"""The tolerance for equal outputs, as a relative difference: more than rounding in float32, less
than the effect of any mistake."""
FITS_LARGE = 0.05
"""The tolerance for scores so large that float32 keeps only four digits."""
SPREADS = (30.0, 75.0, 150.0, 300.0, 750.0, 1.5e3, 3e3, 7.5e3, 1.5e4, 3e4)
"""The standard deviations of the large test scores; the largest exceed a fill of −10000."""
BASES = 16
"""The largest number of textbook variants on which mistakes are tried."""
SCALES = [10 ** (n / 5) for n in range(-15, 11)]
NUMBERS = [10 ** (n / 4) for n in range(-4, 25)]
"""The first values tried for a scale and for a negative fill."""
SECONDS = 1.0
"""The time limit for trying pairs of mistakes."""
FEED_FORWARD = re.compile(r"(mlp|ffn?|feed_?forward|feedforward|ff_?net|fc_?net|ffwd)_?\d*")
"""Names of the feed-forward part of a block, which processes each token separately."""
SCALING = re.compile(r"scal|multiplier|alpha|temperature|factor")
"""Names of possible factors of the scores."""


@dataclass
class Case:
    """A target with random weights, its projections, inputs and outputs; intermediate results of
    variants are cached."""

    target: Target
    reading: Projections
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    seen: dict[Variant, bool] = field(default_factory=dict, init=False)
    heads: dict[tuple[Any, ...], Heads] = field(default_factory=dict, init=False)
    weights: dict[tuple[Any, ...], Tensor] = field(default_factory=dict, init=False)

    def fits(self, variant: Variant) -> bool:
        """Return True if the variant gives the target's output, for one token and for several."""
        several = range(1, len(self.inputs))
        return self.fits_one_token(variant) and all(self.gap(variant, i) <= FITS for i in several)

    def fits_one_token(self, variant: Variant) -> bool:
        """Return True if the variant gives the output for one token, where many variants agree."""
        if not bool(allowed_of(variant.mask, 1, 1)):
            return True  # it sees no key, so nothing can be compared
        single = _for_one_token(variant)
        if single not in self.seen:
            self.seen[single] = self.gap(single, 0) <= FITS
        return self.seen[single]

    def pairs(self, base: Variant, rows: Sequence[Fault]) -> Iterator[tuple[Fault, Fault]]:
        """Yield pairs of mistakes, except those that the output for one token rules out."""
        alone = _for_one_token(base)
        variants = [row.on(base) for row in rows]
        fits = [self.fits_one_token(one) for one in variants]
        changes = [_for_one_token(one) != alone for one in variants]
        open_ = [_is_open(one) for one in variants]
        base_fits = self.fits_one_token(base)
        for i, j in combinations(range(len(rows)), 2):
            settled = not (open_[i] or open_[j] or (changes[i] and changes[j]))
            possible = fits[i] if changes[i] else fits[j] if changes[j] else base_fits
            if (possible or not settled) and not set(rows[i].change) & set(rows[j].change):
                yield rows[i], rows[j]

    def gap(self, variant: Variant, place: int) -> float:
        """Return the error of a variant's output for one input, relative to the target's output."""
        x, key = self.inputs[place], (place, *MADE_OF(variant))
        whole = (*key, *WEIGHED_BY(variant))
        try:
            if key not in self.heads:
                self.heads[key] = heads_of(self.reading, x, variant)
            q, k, _ = heads = self.heads[key]
            if whole not in self.weights:
                self.weights[whole] = weights_from(q, k, variant, sizes_of(self.reading, x))
            wanted = rebuild(self.reading, x, variant, heads, self.weights[whole])
        except Exception:  # a module named norm may compute something else
            return math.inf
        return error(self.outputs[place], wanted, _seen(variant, x))


def case_of(target: Target) -> Case:
    """Give a target random weights, read them, and call it on a few inputs.

    Raises:
        Unreadable: the projections cannot be read, or a call fails.
    """
    trial = target.randomised().double()
    _silence_feed_forward(trial.layer)
    reading = projections_of(trial)
    inputs = tuple(
        trial.input(tokens=t, batch=_batch(reading), seed=t) for t in _lengths(trial, reading)
    )
    try:
        with torch.no_grad():
            outputs = tuple(trial(x) for x in inputs)
    except Exception as fault:  # reported by the probes
        raise Unreadable(f"a call fails ({type(fault).__name__})") from fault
    return Case(trial, reading, inputs, outputs)


def _silence_feed_forward(layer: nn.Module) -> None:
    """Zero the weights of the feed-forward part of a block, so that it adds nothing."""
    for name, child in layer.named_children():
        linear = sum(isinstance(one, nn.Linear) for one in child.modules())
        if linear > 1 and FEED_FORWARD.fullmatch(name.lower()):
            for parameter in child.parameters():
                parameter.zero_()


def projections_of(target: Target) -> Projections:
    """Return the projections of a layer."""
    sizes = target.embed_dim, target.num_heads, target.num_kv_heads
    return read(target.layer, *sizes, _idle(target))


def _idle(target: Target) -> set[str]:
    """Return the names of parameters that have no effect on the call."""
    layer = target.layer
    named = dict(layer.named_parameters())
    try:
        with torch.enable_grad():
            out = target(target.input(5))
            ends = torch.autograd.grad(out.sum(), [*named.values()], allow_unused=True)
    except Exception:  # reported by another probe
        return set()
    unused = {name for name, slope in zip(named, ends, strict=True) if slope is None}
    kept = {name.rpartition(".")[0] for name in named if name not in unused}
    return {
        name for name in unused if name.rpartition(".")[0] not in kept and "memory" in target.takes
    }


def _batch(reading: Projections) -> int:
    return 3 if reading.num_heads == 2 else 2


def _lengths(target: Target, reading: Projections) -> tuple[int, ...]:
    """Return the input lengths: one token, and two lengths that differ from all other sizes."""
    others = {reading.num_heads, reading.num_kv_heads, reading.head_dim, reading.value_dim}
    others |= {target.embed_dim, _batch(reading), reading.num_heads * reading.head_dim}
    longest = target.context_length or 64
    free = [t for t in (7, 5, 11, 6, 9, 4, 3, 2) if t not in others and t <= longest]
    return (1, *(free or [min(7, longest)])[:2])


def _seen(variant: Variant, x: Tensor) -> Tensor:
    """Return True for tokens with a visible key."""
    return allowed_of(variant.mask, x.shape[1], x.shape[1]).any(-1)


def gap(reading: Projections, x: Tensor, out: Tensor, variant: Variant) -> float:
    """Return the relative error of a variant's output, compared with `out`."""
    try:
        return error(out, rebuild(reading, x, variant), _seen(variant, x))
    except (RuntimeError, ValueError, IndexError):
        return math.inf


def _is_open(variant: Variant) -> bool:
    """Return True if a second mistake may change the effect of this one on a single token."""
    mixes = variant.over == "heads" or variant.softmax in _UNSURE
    return mixes or not bool(allowed_of(variant.mask, 1, 1))


def _for_one_token(variant: Variant) -> Variant:
    """Return the variant without changes that have no effect on a single token."""
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
        slopes=(),
    )


def _for_values(parts: str) -> str:
    return parts if "v" in parts else "".join(set(parts) & {"o"})


_UNSURE = {*SOFTMAXES} - {"keys", "queries", "both", "twice"}
"""Replacements of the softmax that give a single token a weight other than 1."""


# --- the textbook's variants ----------------------------------------------------------------------


def textbook(target: Target, reading: Projections) -> Iterator[Variant]:
    """Yield the textbook's variants: several if names do not identify the weights."""
    masks = ["causal", "none"] if target.causal else ["none", "causal"]
    if target.causal_from not in ("seen", "unknown"):
        masks = masks[:1]
    shares = ["tile", "repeat"] if reading.turns else ["repeat"]
    unsure = "".join(one.parts for one in reading.matrices if not one.sure)
    orders = ["qkv"] if reading.named else ["".join(order) for order in permutations("qkv")]
    name = "order" if any(len(source.parts) == 3 for source in reading.sources) else "roles"
    layer, call = target.layer, target.call
    sizes = dict.fromkeys(int(n) for n in numbers_in(layer, r"window|local") if 0 < n < 12)
    windows = [f"window {size + more}" for size in sizes for more in (0, 1)]
    caps = list(numbers_in(layer, r"soft_?cap|logit_?cap|softclamp.*value"))
    spoken = call.spoken if isinstance(call, ShownCall) else getattr(call, "parameters", ())
    ropes = list(rotations(layer, reading.head_dim, spoken))
    for rope, order, share, turned, residual, cap, mask, slopes in product(
        [*ropes[:2], None, *ropes[2:]],
        orders,
        shares,
        dict.fromkeys(("", unsure)),
        _surroundings(reading),
        [None, *caps],
        [*masks, *windows],
        [*_slopes(target, reading), ()],
    ):
        own = {"mask": mask, "share": share, "turned": turned, "residual": residual}
        base = Variant(**own, rope=rope, softcap=cap, slopes=slopes)
        base = base if order == "qkv" else replace(base, **{name: order})
        yield base
        if rope is not None and reading.norms:
            yield replace(base, normed="after")
        if {"q", "k"} <= set(reading.norms):  # the gains of the norms can replace 1/√D
            yield replace(base, scale="nothing")


def _slopes(target: Target, reading: Projections) -> list[tuple[float, ...]]:
    """Return the slopes of ALiBi, if the layer has some or mentions ALiBi."""
    heads = reading.num_heads
    for child in target.layer.modules():
        for name, value in {**vars(child), **child._buffers}.items():
            if "slope" in name.lower() and isinstance(value, Tensor) and value.numel() == heads:
                return [tuple(value.flatten().double().tolist())]
    words = (type(target.layer).__name__ + " ".join(vars(target.layer))).lower()
    return [tuple(2.0 ** (-8 * (n + 1) / heads) for n in range(heads))] if "alibi" in words else []


def _surroundings(reading: Projections) -> tuple[str, ...]:
    """Return the possible positions of a norm over the full width."""
    around = ("", "x, then norm", "norm", "inside", "before", "before queries", "before keys")
    return (*around, "before and x", "before queries and x") if "x" in reading.norms else ("",)


# --- mistakes -------------------------------------------------------------------------------------

Known = Mapping[Variant, Sequence[Fault]]
Explained = tuple[Variant, list[Fault]]
Pairs = Callable[[Variant, Sequence[Fault]], Iterable[tuple[Fault, Fault]]]


def named(case: Case, bases: Sequence[Variant], sure: bool, twice: bool = True) -> Explained | None:
    """Find the base and the mistakes, one or two, that give the target's output.

    Args:
        sure: True if causality is known.
        twice: also try pairs of mistakes, which takes longer.
    """
    bases = sorted(bases[:BASES], key=lambda base: not case.fits_one_token(base))
    known = {base: list(faults(case.reading, base, sure)) for base in bases}
    one = single(known, case.fits) or _solved(case, bases)
    return one or (double(known, case.fits, case.pairs) if twice else None)


def single(known: Known, fits: Callable[[Variant], bool]) -> Explained | None:
    """Find the one mistake that fits."""
    for base, rows in known.items():
        for row in rows:
            if fits(row.on(base)):
                return base, [row]
    return None


def double(known: Known, fits: Callable[[Variant], bool], pairs: Pairs) -> Explained | None:
    """Find two mistakes that fit together, within `SECONDS`."""
    until = time.thread_time() + SECONDS
    for base, rows in known.items():
        for first, second in pairs(base, rows):
            if time.thread_time() > until:
                return None
            if fits(second.on(first.on(base))):
                return base, [first, second]
    return None


def _solved(case: Case, bases: Sequence[Variant]) -> Explained | None:
    """Search for an unknown scale, or for an unknown fill of masked scores."""
    for base in bases:
        if not case.fits_one_token(base):
            continue
        scale = _nearest(lambda one, b=base: case.gap(replace(b, scale=one), 1), SCALES)
        if case.fits(replace(base, scale=scale)):
            return base, [_other_scale(case, scale)]
        if base.mask == "none":
            continue
        fill = _nearest(lambda one, b=base: case.gap(replace(b, fill=repr(-one)), 1), NUMBERS)
        if case.fits(replace(base, fill=repr(-fill))):
            return base, [fill_of(case.reading, fill, _scale_of(case, base))]
    return None


def _nearest(gap: Callable[[float], float], numbers: Iterable[float]) -> float:
    """Return the number with the smallest gap, refining the search around the best."""
    tried, best = sorted(numbers), 0.0
    for _ in range(9):
        far = [gap(number) for number in tried]
        place = far.index(min(far))
        best, around = tried[place], tried[max(0, place - 1) : place + 2]
        between = torch.linspace(math.log(around[0]), math.log(around[-1]), 9).exp().tolist()
        tried = sorted({best, *between})
    return best


def _scale_of(case: Case, base: Variant) -> float:
    return base.scale if isinstance(base.scale, float) else case.reading.head_dim**-0.5


def _other_scale(case: Case, scale: float) -> Fault:
    known = stated(case, scale)
    scale = scale if known is None else known
    return Fault(
        "scale",
        {"scale": scale},
        f"The scores are multiplied by {scale:.4g}; the textbook divides them by √{{D}}, the root "
        f"of one head's width, a factor of {case.reading.head_dim**-0.5:.4g}.",
        "If this number is not intended, write `scores / keys.shape[-1] ** 0.5`, with the keys "
        "split into heads.",
        "error" if known is None else "warning",
    )


def stated(case: Case, scale: float) -> float | None:
    """Return this scale as stated in an attribute of the layer, as factor or divisor."""
    numbers = list(numbers_in(case.target.layer, SCALING.pattern))
    numbers += [1 / number for number in numbers if number]
    return next((number for number in numbers if math.isclose(scale, number, rel_tol=1e-3)), None)


def leaking(case: Case, base: Variant) -> Fault | None:
    """Find a finite number in place of −inf, which large scores reveal."""
    if base.mask == "none" or base.slopes:
        return None
    x = case.inputs[1]
    q, k, _ = heads_of(case.reading, x, base)
    spread = max(float(q.std() * k.std()), 1e-6)
    for wanted in SPREADS:
        times = (wanted / spread) ** 0.5
        try:
            with torch.no_grad():
                out = case.target(times * x)
        except Exception:  # reported elsewhere
            return None
        near = FITS_LARGE if wanted > 5e3 else 0.1 * FITS_LARGE
        if not torch.isfinite(out).all():
            return None
        if gap(case.reading, times * x, out, base) <= near:
            continue
        scale, wide = _scale_of(case, base), times * x

        def far(fill: float, out: Tensor = out, wide: Tensor = wide) -> float:
            return gap(case.reading, wide, out, replace(base, fill=repr(-fill)))

        usual = [10.0**power * before for power in range(6) for before in (1.0, scale)]
        fill = min((*usual, _nearest(far, NUMBERS)), key=lambda one: round(far(one), 4))
        return fill_of(case.reading, fill, scale) if far(fill) <= near else None
    return None


__all__ = ["Case", "Matrix", "case_of", "leaking", "named", "projections_of", "textbook"]

"""The search for the variant that gives a subject's output: the textbook's, else a mistaken one."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, permutations, product

import torch

from ..target.checked_target import Target
from ..target.introspect import numbers_in, rotations
from .faults import Fault, faults, finite_fills
from .fit import Case, gap
from .projections import Projections
from .variants import Variant, heads_of

FITS_LARGE = 0.05
"""Largest share of the output by which a rebuilt one may differ where scores are so large that
float32 leaves them four digits."""
SPREADS = (30.0, 300.0, 3e3, 3e4)
"""How far scores are spread in the tests with large ones: up to beyond −10000, and within the
digits of float32."""
BASES = 16
"""How many textbook variants mistakes are tried on."""
SECONDS = 3.0
"""How long pairs of mistakes are tried."""
SCALING = re.compile(r"scal|multiplier|alpha|temperature")
"""Names of numbers that somebody may mean scores to be multiplied by."""


def textbook(subject: Target, reading: Projections) -> Iterator[Variant]:
    """The textbook's variants: more than one where names do not say which weights are which."""
    masks = ["causal", "none"] if subject.causal else ["none", "causal"]
    if subject.causal_from not in ("seen", "unknown"):
        masks = masks[:1]
    shares = ["tile", "repeat"] if reading.turns else ["repeat"]
    unsure = "".join(one.parts for one in reading.matrices if not one.sure)
    orders = ["qkv"] if reading.named else ["".join(order) for order in permutations("qkv")]
    name = "order" if any(len(source.parts) == 3 for source in reading.sources) else "roles"
    module = subject.module
    windows = caps = ropes = ()
    if module is not None:
        sizes = dict.fromkeys(int(n) for n in numbers_in(module, r"window|local") if 0 < n < 12)
        windows = [f"window {size + more}" for size in sizes for more in (0, 1)]
        caps = list(numbers_in(module, r"soft_?cap|logit_?cap|softclamp.*value"))
        ropes = list(rotations(module, reading.head_dim, subject.caller.parameters))
    for rope, order, share, turned, residual, cap, mask in product(
        [*ropes[:2], None, *ropes[2:]],
        orders,
        shares,
        dict.fromkeys(("", unsure)),
        _surroundings(reading),
        [None, *caps],
        [*masks, *windows],
    ):
        base = Variant(
            mask=mask, share=share, turned=turned, residual=residual, rope=rope, softcap=cap
        )
        base = base if order == "qkv" else replace(base, **{name: order})
        yield base
        if rope is not None and reading.norms:
            yield replace(base, normed="after")
        if {"q", "k"} <= set(reading.norms):  # normed with gains: their product needs no root
            yield replace(base, scale="nothing")


def _surroundings(reading: Projections) -> tuple[str, ...]:
    """Ways in which a norm of the whole width may stand around the attention."""
    return (
        (
            "",
            "x, then norm",
            "norm",
            "inside",
            "before",
            "before queries",
            "before and x",
            "before queries and x",
        )
        if "x" in reading.norms
        else ("",)
    )


Known = Mapping[Variant, Sequence[Fault]]  # the faults that can be made on each base
Explained = tuple[Variant, list[Fault]]


def named(case: Case, bases: Sequence[Variant], sure: bool) -> Explained | None:
    """Find the base and the faults, one or two, that give the subject's output.

    Args:
        sure: whether it is known that it must be causal, or must not be.
    """
    bases = bases[:BASES]
    known = {base: list(faults(case.reading, base, sure)) for base in bases}
    return single(known, case.fits) or _solved(case, bases) or double(known, case.fits)


def single(known: Known, fits: Callable[[Variant], bool]) -> Explained | None:
    """Find the one fault that fits."""
    for base, rows in known.items():
        for row in rows:
            if fits(row.on(base)):
                return base, [row]
    return None


def double(known: Known, fits: Callable[[Variant], bool]) -> Explained | None:
    """Find two faults that fit together, for as long as that takes no more than `SECONDS`."""
    until = time.process_time() + SECONDS
    for base, rows in known.items():
        for first, second in combinations(rows, 2):
            if time.process_time() > until:
                return None
            if first.adds_to(second) and fits(second.on(first.on(base))):
                return base, [first, second]
    return None


def _solved(case: Case, bases: Sequence[Variant]) -> Explained | None:
    """A scale that is none of the known ones, found by trying numbers ever nearer."""
    for base in bases:
        if not case.fits_one_token(base):
            continue
        low, high, best = math.log(1e-3), math.log(1e2), 0.0
        for count in (25, *[9] * 8):
            tried = torch.linspace(low, high, count).tolist()
            far = [case.gap(replace(base, scale=math.exp(t)), 1) for t in tried]
            best, step = tried[far.index(min(far))], (high - low) / (count - 1)
            low, high = best - step, best + step
        scale = math.exp(best)
        if case.fits(replace(base, scale=scale)):
            return base, [_other_scale(case, scale)]
    return None


def _other_scale(case: Case, scale: float) -> Fault:
    said = stated(case, scale)
    scale = scale if said is None else said
    return Fault(
        "scale",
        {"scale": scale},
        f"The scores are multiplied by {scale:.4g}; the textbook divides them by √{{D}}, the root "
        f"of one head's width, which is to multiply by {case.reading.head_dim**-0.5:.4g}.",
        "If this number is not meant, write `scores / keys.shape[-1] ** 0.5`, with the keys split "
        "into heads.",
        "error" if said is None else "warning",
    )


def stated(case: Case, scale: float) -> float | None:
    """This scale as an attribute of the module says it outright, itself or as a divisor."""
    module = case.subject.module
    said = [] if module is None else list(numbers_in(module, SCALING.pattern))
    if module is not None and any(vars(m).get("scale") is False for m in module.modules()):
        said.append(1.0)
    said += [1 / number for number in said if number]
    return next((number for number in said if math.isclose(scale, number, rel_tol=1e-3)), None)


def leaking(case: Case, base: Variant) -> Fault | None:
    """A finite number in the place of −inf, which large scores tell apart.

    The first scores to show it are about as large as the number, and tell it from others.
    """
    if base.mask == "none":
        return None
    x = case.inputs[1]
    q, k, _ = heads_of(case.reading, x, base)
    spread = max(float(q.std() * k.std()), 1e-6)
    for wanted in SPREADS:
        times = (wanted / spread) ** 0.5
        try:
            out = case.call(times * x)
        except Exception:  # another finding
            return None
        near = FITS_LARGE if wanted == SPREADS[-1] else 0.1 * FITS_LARGE
        if not torch.isfinite(out).all():
            return None
        if gap(case.reading, times * x, out, base) <= near:
            continue
        scale = base.scale if isinstance(base.scale, float) else case.reading.head_dim**-0.5
        rows = finite_fills(case.reading, scale)
        far = [gap(case.reading, times * x, out, row.on(base)) for row in rows]
        best = far.index(min(far))
        return rows[best] if far[best] <= near else None
    return None

"""The search for the variant that gives a subject's output: the textbook's, else a mistaken one."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, permutations, product

import torch
from torch import Tensor

from ..target.checked_target import Target
from ..target.introspect import numbers_in, rotations
from .faults import Fault, faults, fill_of
from .fit import Case, gap
from .projections import Projections
from .variants import Variant, heads_of

FITS_LARGE = 0.05
"""Largest share of the output by which a rebuilt one may differ where scores are so large that
float32 leaves them four digits."""
SPREADS = (30.0, 75.0, 150.0, 300.0, 750.0, 1.5e3, 3e3, 7.5e3, 1.5e4, 3e4)
"""How far scores are spread in the tests with large ones: up to beyond −10000, and within the
digits of float32."""
BASES = 16
"""How many textbook variants mistakes are tried on."""
SCALES = [10 ** (n / 5) for n in range(-15, 11)]
NUMBERS = [10 ** (n / 4) for n in range(-4, 25)]
"""What is tried first for a scale, and for how far below 0 hidden scores are."""
SECONDS = 1.5
"""How long pairs of mistakes are tried."""
SCALING = re.compile(r"scal|multiplier|alpha|temperature|factor")
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
Pairs = Callable[[Variant, Sequence[Fault]], Iterable[tuple[Fault, Fault]]]


def named(case: Case, bases: Sequence[Variant], sure: bool, twice: bool = True) -> Explained | None:
    """Find the base and the faults, one or two, that give the subject's output.

    Args:
        sure: whether it is known that it must be causal, or must not be.
        twice: whether two are looked for, which takes seconds.
    """
    bases = bases[:BASES]
    known = {base: list(faults(case.reading, base, sure)) for base in bases}
    if not _fills(case):
        known = {b: [one for one in rows if "fill" not in one.change] for b, rows in known.items()}
    one = single(known, case.fits) or _solved(case, bases)
    return one or (double(known, case.fits, case.pairs) if twice else None)


def _fills(case: Case) -> bool:
    """Whether it hides scores itself, by a number of its own: not where it adds a mask of −inf that
    it is handed."""
    form = case.subject.mask_form
    return form is None or form.kind != "added"


def single(known: Known, fits: Callable[[Variant], bool]) -> Explained | None:
    """Find the one fault that fits."""
    for base, rows in known.items():
        for row in rows:
            if fits(row.on(base)):
                return base, [row]
    return None


def every(base: Variant, rows: Sequence[Fault]) -> Iterator[tuple[Fault, Fault]]:
    """All pairs of faults that can be made at once."""
    return (pair for pair in combinations(rows, 2) if pair[0].adds_to(pair[1]))


def double(known: Known, fits: Callable[[Variant], bool], pairs: Pairs = every) -> Explained | None:
    """Find two faults that fit together, for as long as that takes no more than `SECONDS`."""
    until = time.thread_time() + SECONDS
    for base, rows in known.items():
        for first, second in pairs(base, rows):
            if time.thread_time() > until:
                return None
            if fits(second.on(first.on(base))):
                return base, [first, second]
    return None


def _solved(case: Case, bases: Sequence[Variant]) -> Explained | None:
    """A scale, or a number that fills hidden scores, that is none of the known ones."""
    for base in bases:
        if not case.fits_one_token(base):
            continue
        scale = _nearest(lambda one, b=base: case.gap(replace(b, scale=one), 1), SCALES)
        if case.fits(replace(base, scale=scale)):
            return base, [_other_scale(case, scale)]
        if base.mask == "none" or not _fills(case):
            continue
        fill = _nearest(lambda one, b=base: case.gap(replace(b, fill=repr(-one)), 1), NUMBERS)
        if case.fits(replace(base, fill=repr(-fill))):
            return base, [fill_of(case.reading, fill, _scale_of(case, base))]
    return None


def _nearest(gap: Callable[[float], float], numbers: Iterable[float]) -> float:
    """The number for which a gap is smallest, found by trying ever more of them around the best."""
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
    said = stated(case, scale)
    scale = scale if said is None else said
    return Fault(
        "scale",
        {"scale": scale},
        f"The scores are multiplied by {scale:.4g}; the textbook divides them by √{{D}}, the root "
        f"of one head's width, which is to multiply by {case.reading.head_dim**-0.5:.4g}.",
        "If this number is not meant, write `scores / keys.shape[-1] ** 0.5`, with the keys split "
        "into heads.",
        "error" if said is None or _is_odd_power(said, case.reading.head_dim) else "warning",
    )


def _is_odd_power(scale: float, width: int) -> bool:
    """Whether it is a power of the head's width of one decimal, `width ** 0.2`, where the root was
    meant."""
    tenths = 10 * math.log(scale) / math.log(width) if scale > 0 and width > 1 else 0.0
    return math.isclose(tenths, round(tenths), abs_tol=1e-4) and round(tenths) % 5 != 0


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
    if base.mask == "none" or not _fills(case):
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

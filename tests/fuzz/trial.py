"""A case run on the kernel, by every unit and number of threads, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headwise.backends.native import Native
from headwise.core.call import check_scores
from headwise.kernels import ctypes_api as cpu
from headwise.kernels.ctypes_api import BFLOAT16_ONLY, STATISTICS

from .bounds import Bounds
from .case import Case, Inputs
from .gradients import GradientBounds
from .truth import Truth

Results = dict[str, Tensor]


class Wrong(AssertionError):
    """A result of the kernel is outside its bound, or breaks another promise."""


@dataclass
class Seen:
    """What was compared: calls, numbers, and for each result the largest share of its bound.

    A share of 1 where rounding to the dtype is all of the bound says nothing; in the other results
    it would say that the bound is narrow.
    """

    calls: int = 0
    refused: int = 0  # as scores overflow
    numbers: int = 0
    shares: dict[str, tuple[float, str]] = field(default_factory=dict)

    def note(self, name: str, share: float, count: int, where: str) -> None:
        self.shares[name] = max(self.shares.get(name, (0.0, "")), (share, where))
        self.numbers += count

    def join(self, other: Seen) -> None:
        """Add what another has seen."""
        self.calls, self.refused = self.calls + other.calls, self.refused + other.refused
        for name, (share, where) in other.shares.items():
            self.note(name, share, 0, where)
        self.numbers += other.numbers


def units() -> tuple[str, ...]:
    """The instruction sets that this machine has, richest first."""
    library = cpu.library()
    return library.usable if library else ()


def check(case: Case, chosen: tuple[str, ...] = (), seen: Seen | None = None) -> None:
    """Run a case on these units (on all by default) and compare.

    Raises:
        Wrong: naming the result, the unit, where it is off and by how much.
    """
    seen = seen or Seen()
    inputs = Inputs(case)
    reasons = Native().refuse(inputs.call(grad=True))
    if reasons:
        raise Wrong(f"refused: {'; '.join(reasons)}")
    truth = Truth(inputs)
    bounds: dict[bool, Bounds] = {}
    for unit in chosen or units():
        pairs = unit in BFLOAT16_ONLY and case.dtype == "bfloat16"
        if pairs not in bounds:
            bounds[pairs] = Bounds(truth, pairs)
        try:
            with cpu.instructions(unit):
                results = everything(inputs)
                _compare(unit, results, bounds[pairs], seen)
                others = _on_threads(2, inputs) if case.threads == 2 else results
        except ValueError as error:
            if "are not finite in" in str(error) and bool(bounds[pairs].overflow.any()):
                seen.refused += 1
                continue
            raise
        for name, x in results.items():
            if not _same(x, others[name]):
                raise Wrong(f"{unit}: {name} is not the same on one thread and on two")
            if name.endswith(" alone") and not _same(x, results[name.removesuffix(" alone")]):
                raise Wrong(f"{unit}: {name} is not the same as with figures")
        seen.calls += 1


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether all numbers are equal; gradients beyond float32 are none, on both sides."""
    return torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True)


# ── what the kernel gives ───────────────────────────────────────────────────────────────────────


def everything(inputs: Inputs) -> Results:
    """All that the case asks for, in memory that was full of NaN."""
    case, native, call = inputs.case, Native(), inputs.call(grad=True)
    with poisoned():
        needs = {*case.figures, *case.incoming} - {"out"}
        figures = (native.observe if case.output else native.statistics)(call, needs)
        check_scores(call, figures.lse)
        found = {n: getattr(figures, n) for n in ("out", *STATISTICS)}
        found = {n: x for n, x in found.items() if x is not None}
        gradients = _gradients(inputs, call, found)
        found = {n: x.detach() for n, x in found.items()}
        if case.output:
            found["out alone"], found["lse alone"] = native.run(inputs.call())
        lse, weight = found["lse"], inputs.weight
        found["received"] = native.received(call, lse, weight)
        found["map"] = native.block_map(call, lse, *inputs.blocks, case.blocks, weight)
    return found | {f"gradient of {n}": g for n, g in gradients.items()}


def _gradients(inputs: Inputs, call, found: Results) -> Results:
    leaves = {n: getattr(call, n) for n in ("q", "k", "v", "sinks")}
    leaves = {n: x for n, x in leaves.items() if x is not None and x.requires_grad}
    asked = {n: g for n, g in inputs.incoming.items() if n in found and found[n].requires_grad}
    if not leaves or not asked:
        return {}
    grads = torch.autograd.grad(
        [found[n] for n in asked], list(leaves.values()), list(asked.values()), allow_unused=True
    )
    pairs = zip(leaves.items(), grads, strict=True)
    return {n: torch.zeros_like(x) if g is None else g for (n, x), g in pairs}


def _on_threads(count: int, inputs: Inputs) -> Results:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        return everything(inputs)
    finally:
        torch.set_num_threads(before)


@contextmanager
def poisoned() -> Iterator[None]:
    """Memory for results comes full of NaN."""
    before = cpu.empty, cpu.empty_like
    cpu.empty = lambda *a, **k: torch.full(*a, torch.nan, **k)
    cpu.empty_like = lambda like: torch.full_like(like, torch.nan)
    try:
        yield
    finally:
        cpu.empty, cpu.empty_like = before


# ── comparing ───────────────────────────────────────────────────────────────────────────────────


def _compare(unit: str, results: Results, bounds: Bounds, seen: Seen) -> None:
    truth = bounds.truth
    exact = truth.figures | truth.sums
    for name, got in results.items():
        if name in exact:
            triple = (exact[name], bounds.found[name], bounds.held(name))
            seen.note(name, *_share(f"{unit}: {name}", got, *triple), unit)
    if not truth.gradients:
        return
    gradients = GradientBounds(bounds)
    for name, wanted in truth.gradients.items():
        told = f"gradient of {name}"
        triple = (wanted, gradients.found[name], gradients.held(name))
        seen.note(told, *_share(f"{unit}: {told}", results[told], *triple), unit)


def _share(
    where: str, got: Tensor, exact: Tensor, bound: Tensor, held: Tensor
) -> tuple[float, int]:
    """The largest error as a share of its bound, and how many numbers were compared."""
    if got.shape != exact.shape:
        raise Wrong(f"{where} is {list(got.shape)} and must be {list(exact.shape)}")
    none = got.isnan() if "gradient" not in where else got.isnan() & held
    if bool(none.any()):
        raise Wrong(f"{where} has {int(none.sum())} NaN")
    wide = got.double()
    held = held & (exact.abs() + bound < torch.finfo(got.dtype).max)
    dead = exact == -torch.inf
    if not torch.equal((wide == -torch.inf) & held, dead & held):
        raise Wrong(f"{where} is −inf elsewhere than in rows that may attend to nothing")
    error = torch.where(held & ~dead, (wide - exact).abs(), 0.0)
    share = torch.where(error > 0, error / bound, 0.0)
    worst = float(share.max())
    if not worst <= 1:
        at = tuple(int(i) for i in torch.unravel_index(share.argmax(), share.shape))
        raise Wrong(
            f"{where}{list(at)} is {float(wide[at]):.9g} and should be {float(exact[at]):.9g}: "
            f"{float(error[at]):.3g} off, {worst:.3g} times the bound of {float(bound[at]):.3g}"
        )
    return worst, int(held.sum())

"""Faults planted around the kernel, as a wrong one would have them, for the comparison to see."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headwise.kernels import ctypes_api as cpu
from headwise.kernels.interface import STATISTICS, Problem

Found = list[Tensor | None]
Forward = Callable[..., Found]


@dataclass(frozen=True)
class Fault:
    """What a function of `kernels.cpu` becomes, and which results must then be named."""

    function: str
    change: Callable[[Forward], Forward]
    named: tuple[str, ...]


@contextmanager
def planted(fault: Fault) -> Iterator[None]:
    """Compute with the fault."""
    before = getattr(cpu, fault.function)
    setattr(cpu, fault.function, fault.change(before))
    try:
        yield
    finally:
        setattr(cpu, fault.function, before)


def _called(change: Callable[[Problem], Problem]) -> Callable[[Forward], Forward]:
    """The kernel asked about another problem."""
    return lambda kernel: lambda problem, *rest: kernel(change(problem), *rest)


def _terms(**change: Callable[[Problem], Any]) -> Callable[[Forward], Forward]:
    """The kernel asked about other terms."""

    def other(problem: Problem) -> Problem:
        new = {name: of(problem) for name, of in change.items()}
        return problem._replace(terms=problem.terms._replace(**new))

    return _called(other)


def _given(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Forward], Forward]:
    """A result that comes out changed."""
    place = ("out", *STATISTICS).index(name)

    def wrong(kernel: Forward) -> Forward:
        def run(*args: Any) -> Found:
            found = kernel(*args)
            x = found[place]
            if x is not None:
                found[place] = torch.where(x == -torch.inf, x, change(x))
            return found

        return run

    return wrong


def _gradient(place: int, change: Callable[[Tensor, Problem], Tensor]):
    """A gradient that comes out changed."""

    def wrong(kernel: Forward) -> Forward:
        def run(problem: Problem, *rest: Any) -> Found:
            found = kernel(problem, *rest)
            x = found[place]
            found[place] = None if x is None else change(x, problem)
            return found

        return run

    return wrong


def _shifted(problem: Problem) -> Problem:
    """Keys and values of a block of 48 that begins one too early."""

    def shift(x: Tensor | None) -> Tensor | None:
        if x is None or x.shape[2] <= 48:
            return x
        return torch.cat([x[:, :, :48], x[:, :, 47:-1]], dim=2)

    return problem._replace(k=shift(problem.k), v=shift(problem.v))


def _but_the_last(problem: Problem) -> Tensor:
    keys, high = problem.k.shape[2], problem.terms.high
    most = torch.full((1, 1, 1), max(1, keys - 1))
    return most if high is None else torch.minimum(high, most)


def _unshrunk(kernel: Forward) -> Forward:
    """Sums of an earlier block that stay relative to its own largest score."""

    def run(problem: Problem, needs: int) -> Found:
        found = kernel(problem, needs)
        keys, terms = problem.k.shape[2], problem.terms
        if keys < 4 or terms.low is not None or terms.high is not None:
            return found
        edge = torch.full((1, 1, 1), keys // 2)
        plain = problem._replace(sinks=None)
        first = kernel(plain._replace(terms=terms._replace(high=edge)), 3)
        second = kernel(plain._replace(terms=terms._replace(low=edge)), 3)
        (lse, top), (more, high) = (x[1:3] for x in (first, second))
        both = (lse > -torch.inf) & (more > -torch.inf)
        total = torch.maximum(top, high) + ((lse - top).exp() + (more - high).exp()).log()
        found[1] = torch.where(both, total, found[1])
        return found

    return run


def _without_mean(kernel: Forward) -> Forward:
    """A gradient of the entropy without the part that is the same along a row."""

    def run(problem: Problem, out: Any, figures: dict, *rest: Any) -> Found:
        entropy = figures["entropy"]
        zero = None if entropy is None else torch.zeros_like(entropy)
        return kernel(problem, out, figures | {"entropy": zero}, *rest)

    return run


def _toward_zero(out: Tensor) -> Tensor:
    """Numbers of half precision that were cut off in place of rounded: one unit nearer to zero."""
    if out.dtype == torch.float32:
        return out
    return (out.view(torch.int16) - (out != 0).to(torch.int16)).view(out.dtype)


def _of_one_head(x: Tensor, problem: Problem) -> Tensor:
    """A gradient to which only one query head of each group came: about its share."""
    group = problem.q.shape[1] // problem.k.shape[1]
    return x / group


def _swapped(kernel: Forward) -> Forward:
    def run(*args: Any) -> Found:
        found = kernel(*args)
        a, b = (1 + STATISTICS.index(name) for name in ("previous", "self"))
        if found[a] is not None and found[b] is not None:
            found[a], found[b] = found[b], found[a]
        return found

    return run


def _summed(change: Callable[..., tuple]) -> Callable[[Forward], Forward]:
    return lambda kernel: lambda *args: change(kernel, *args)


def _unweighted(kernel: Forward, problem: Problem, lse: Tensor, weight: Any, *rest: Any) -> tuple:
    return kernel(problem, lse, None, *rest)  # type: ignore[return-value]


def _transposed(kernel: Forward, *args: Any) -> tuple:
    received, table = kernel(*args)
    return received, None if table is None else table.mT


def _first_rows_bias(problem: Problem) -> Tensor | None:
    bias = problem.terms.bias
    return None if bias is None else bias[:, :, :1]


KEY_FIGURES = ("out", "lse", "max", "entropy", "ahead", "first", "previous", "self")
FAULTS: dict[str, Fault] = {
    "a block that begins one key too early": Fault("forward", _called(_shifted), KEY_FIGURES),
    "the last key left out": Fault("forward", _terms(high=_but_the_last), KEY_FIGURES),
    "a causal edge one too far": Fault(
        "forward", _terms(offset=lambda p: p.terms.offset + 1), KEY_FIGURES
    ),
    "a window one too wide": Fault(
        "forward", _terms(window=lambda p: p.terms.window and p.terms.window + 1), KEY_FIGURES
    ),
    "the bias of the first query for all": Fault(
        "forward", _terms(bias=_first_rows_bias), KEY_FIGURES
    ),
    "a slope of another sign": Fault(
        "forward",
        _terms(slopes=lambda p: None if p.terms.slopes is None else -p.terms.slopes),
        KEY_FIGURES,
    ),
    "a sink that takes no part": Fault(
        "forward", _called(lambda p: p._replace(sinks=None)), KEY_FIGURES
    ),
    "a sum relative to another maximum": Fault("forward", _unshrunk, ("lse",)),
    "lse off by a hundred-thousandth": Fault(
        "forward", _given("lse", lambda x: x + 1e-5), ("lse",)
    ),
    "a maximum off by one part in 10,000": Fault(
        "forward", _given("max", lambda x: x * 1.0001), ("max",)
    ),
    "entropy off by 1 %": Fault("forward", _given("entropy", lambda x: x * 1.01), ("entropy",)),
    "entropy off by one part in 10,000": Fault(
        "forward", _given("entropy", lambda x: x * 1.0001), ("entropy",)
    ),
    "distances from the next key": Fault("forward", _given("ahead", lambda x: x - 1), ("ahead",)),
    "previous and self in each other's place": Fault("forward", _swapped, ("previous", "self")),
    "half precision cut off": Fault("forward", _given("out", _toward_zero), ("out",)),
    "a last row that is not written": Fault(
        "forward",
        _given(
            "out",
            lambda x: torch.where(
                torch.arange(len(x[0, 0]))[:, None] + 1 < len(x[0, 0]), x, torch.nan
            ),
        ),
        ("out",),
    ),
    "an output that depends on threads": Fault(
        "forward",
        _given(
            "out",
            lambda x: (
                x
                if torch.get_num_threads() == 1
                else x.nextafter(x + 1)
                if x.dtype == torch.float32
                else x
            ),
        ),
        ("out is not the same on", "out alone is not the same on"),
    ),
    "an output that depends on figures": Fault(
        "forward",
        lambda kernel: (
            lambda problem, needs: [
                x if i or x is None or needs == 1 else x * 1.5
                for i, x in enumerate(kernel(problem, needs))
            ]
        ),
        ("out",),
    ),
    "a gradient without the scale": Fault(
        "backward", _gradient(0, lambda x, p: x / p.scale if p.scale else x), ("gradient of q",)
    ),
    "a gradient of one query head of each group": Fault(
        "backward", _gradient(1, _of_one_head), ("gradient of k",)
    ),
    "a gradient without the last query": Fault(
        "backward", _gradient(2, lambda x, p: x * (1 - 1 / p.q.shape[2])), ("gradient of v",)
    ),
    "a gradient without the softcap's slope": Fault(
        "backward", _called(lambda p: p._replace(softcap=p.softcap * 4)), ("gradient of",)
    ),
    "an entropy's gradient without its mean": Fault("backward", _without_mean, ("gradient of",)),
    "a sink's gradient of another sign": Fault(
        "backward", _gradient(3, lambda x, p: -x), ("gradient of sinks",)
    ),
    "sums that count all queries alike": Fault("sums", _summed(_unweighted), ("received", "map")),
    "a map on its side": Fault("sums", _summed(_transposed), ("map",)),
    "keys that receive one part in 10,000 too much": Fault(
        "sums",
        _summed(lambda kernel, *args: tuple(x if x is None else x * 1.0001 for x in kernel(*args))),
        ("received", "map"),
    ),
}
"""Wrong kernels by their names."""

"""What is worked out once for calls of a kind never shows in another call."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.core.mask_algebra import Interval, Mask
from headwise.core.reference import attention
from headwise.core.shapes import Extent
from support import qkv, truth

BACKENDS = ["native", "sdpa", "blocked", "eager"]


class FirstKeys(hw.Causal):
    """A mask of somebody's own with a state that no dataclass knows of."""

    def __init__(self, count: int) -> None:
        object.__setattr__(self, "count", count)

    def allowed(self, i: Tensor, j: Tensor, extent: Extent) -> Tensor:
        return (j < self.count) & (i >= 0)

    def interval(self, i: Tensor, extent: Extent) -> Interval:
        return torch.zeros_like(i), torch.full_like(i, self.count)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_subclass_of_a_mask_is_asked_every_time(backend: str) -> None:
    q, k, v = qkv()
    for count in (2, 5, 2):
        mask = FirstKeys(count)
        assert not mask.free
        assert not (mask & hw.Window(8)).free
        exact = attention(q.double(), k.double(), v.double(), mask=mask)
        seen = hw.observe(q, k, v, hw.Entropy(), mask=mask, backend=backend)
        torch.testing.assert_close(seen.out.double(), exact.out, rtol=1e-4, atol=1e-5)
        want = torch.special.entr(exact.weights).sum(-1)
        torch.testing.assert_close(seen["entropy"].double(), want, rtol=1e-4, atol=1e-5)


class Middle(Mask):
    """A range of keys that does not begin at the first."""

    def allowed(self, i: Tensor, j: Tensor, extent: Extent) -> Tensor:
        return (j >= 2) & (j < 4) & (i >= 0)

    def interval(self, i: Tensor, extent: Extent) -> Interval:
        return torch.full_like(i, 2), torch.full_like(i, 4)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("union", [Middle() | hw.Prefix(1), FirstKeys(3) | Middle()])
def test_a_union_with_a_range_of_somebodys_own_is_no_range(backend: str, union: Mask) -> None:
    q, k, v = qkv()
    exact = attention(q.double(), k.double(), v.double(), mask=union)
    seen = hw.observe(q, k, v, hw.Entropy(), mask=union, backend=backend)
    torch.testing.assert_close(seen.out.double(), exact.out, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("wrong", [{"scale": True}, {"dropout": False}, {"softcap": True}])
@pytest.mark.usefixtures("unchecked")
def test_what_equals_a_right_number_is_still_refused(wrong: dict[str, bool]) -> None:
    q, k, v = qkv()
    right = {name: float(value) for name, value in wrong.items()}
    hw.attend(q, k, v, **right)
    with pytest.raises(ValueError, match=next(iter(wrong))):
        hw.attend(q, k, v, **wrong)  # type: ignore[arg-type]


def test_bad_sinks_are_refused_every_time() -> None:
    q, k, v = qkv()
    sinks = torch.zeros(q.shape[1])
    hw.attend(q, k, v, sinks=sinks)
    sinks[1] = torch.inf
    with pytest.raises(ValueError, match=r"sinks must be finite.* got inf for head 1"):
        hw.attend(q, k, v, sinks=sinks)


@pytest.mark.parametrize("backend", BACKENDS)
def test_calls_with_and_without_sinks_are_planned_apart(backend: str) -> None:
    q, k, v = qkv()
    statistics = [hw.Entropy(), hw.Distance(absolute=True)]
    for sinks in (None, torch.randn(q.shape[1]), None):
        seen = hw.observe(q, k, v, *statistics, mask=hw.Causal(), sinks=sinks, backend=backend)
        exact = truth(q, k, v, mask=hw.Causal(), sinks=sinks)
        for statistic in statistics:
            for name, want in statistic.define(exact).items():
                torch.testing.assert_close(seen[name].double(), want.double(), rtol=1e-3, atol=1e-4)


def test_the_choice_follows_the_graph_and_the_name() -> None:
    q, k, v = qkv()
    for _ in range(2):
        for needs_grad in (False, True):
            x = q.clone().requires_grad_(needs_grad)
            out = hw.attend(x, k, v, mask=hw.Causal())
            assert out.requires_grad == needs_grad
            with torch.no_grad():
                assert not hw.attend(x, k, v, mask=hw.Causal()).requires_grad
        with pytest.raises(ValueError, match="'sdpa' cannot run this call"):
            hw.attend(q, k, v, softcap=2.0, backend="sdpa")
        hw.attend(q, k, v, softcap=2.0)


def test_rows_are_the_callers_own() -> None:
    q, k, v = qkv()
    seen = hw.observe(q, k, v, hw.Entropy(), mask=hw.Causal())
    before = seen.table()
    again = hw.observe(q, k, v, hw.Entropy(), mask=hw.Causal())
    again.rows.zero_()
    again.record.counts.zero_()
    assert hw.observe(q, k, v, hw.Entropy(), mask=hw.Causal()).table() == before


def test_nothing_of_inference_mode_stays() -> None:
    q, k, v = qkv()
    for backend in BACKENDS:
        with torch.inference_mode():
            hw.observe(q, k, v, hw.Entropy(), mask=hw.Window(3), backend=backend).table()
        x = q.clone().requires_grad_()
        seen = hw.observe(x, k, v, hw.Entropy(), hw.Distance(), mask=hw.Window(3), backend=backend)
        (seen["entropy"].sum() + seen["distance"].sum()).backward()
        assert x.grad is not None


def test_ids_are_not_kept() -> None:
    q, k, v = qkv(t=11)
    ids = torch.arange(k.shape[2])
    gone = weakref.ref(ids)
    hw.observe(q, k, v, hw.Mass(hw.Induction(ids)), hw.Entropy())
    hw.explain(q, k, v, hw.Mass(hw.SameToken(ids)))
    del ids
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("backend", BACKENDS)
def test_figures_are_the_same_whenever_they_are_read(backend: str) -> None:
    q, k, v = qkv()
    statistics = [
        hw.LSE(),
        hw.Entropy(),
        hw.MaxLogit(),
        hw.Distance(absolute=True),
        hw.Mass(hw.First()),
        hw.Mass(hw.Previous()),
        hw.Mass(hw.Self()),
    ]
    at_once = hw.observe(q, k, v, *statistics, mask=hw.Causal(), backend=backend)
    read = {name: at_once[name].clone() for name in at_once.names}
    held = [x.clone() for x in (q, k, v)]
    later = hw.observe(*held, *statistics, mask=hw.Causal(), backend=backend)
    for x in held:
        x.fill_(torch.nan)
    assert later.table() == at_once.table()
    assert list(later.names) == list(read)
    for name, want in read.items():
        assert torch.equal(later[name], want), name

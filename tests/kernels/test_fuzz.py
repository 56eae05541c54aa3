"""Random calls of the native kernel through Python, and proofs that their comparison can fail."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings

import headwise as hw
from ci import in_ci
from fuzz.case import Case
from fuzz.drawing import cases
from fuzz.large import EDGE, far_apart, zeros
from fuzz.planted import FAULTS, planted
from fuzz.rounding import between
from fuzz.trial import Wrong, check, units
from headwise.backends import Call
from headwise.backends.native import Native
from headwise.kernels import ctypes_api as cpu
from headwise.kernels.interface import STATISTICS

needs_library = pytest.mark.skipif(not units() and not in_ci(), reason=cpu.why_not())
derandomized = settings(
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=[Phase.generate, Phase.shrink],
)


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@needs_library
@settings(derandomized, max_examples=100)
@given(case=cases())
def test_random_calls(case: Case) -> None:
    """Each by one of the units in turn; `make fuzz` runs many by all, `make calls` most quickly."""
    check(case, (units()[case.seed % len(units())],))


# ── the comparison can fail ─────────────────────────────────────────────────────────────────────


@functools.cache
def drawn(count: int) -> list[Case]:
    found: list[Case] = []

    @settings(derandomized, max_examples=count)
    @given(case=cases())
    def collect(case: Case) -> None:
        found.append(case)

    collect()
    return found


@pytest.mark.slow
@needs_library
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_named(name: str) -> None:
    fault = FAULTS[name]
    for case in drawn(400)[50:]:
        try:
            with planted(fault):
                check(case, units()[:1])
        except Wrong as error:
            found = str(error)
            break
    else:
        pytest.fail(f"nobody saw {name}")
    assert any(result in found for result in fault.named), found


# ── more than 2³¹ numbers ───────────────────────────────────────────────────────────────────────


def far(x: torch.Tensor, axis: int) -> torch.Tensor:
    found = far_apart(x, axis)
    if found is None:
        pytest.skip("the machine gives out no 9 GiB of addresses")
    return found


def everything_of(q, k, v, bias, table):
    call = Call.of(q, k, v, mask=hw.Bias(bias) & hw.Dense(table))
    seen = Native().observe(call, STATISTICS[1:])
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = Native().run(call.with_(q=leaves[0], k=leaves[1], v=leaves[2]))[0]
    grads = torch.autograd.grad(out, leaves, torch.ones(()).expand(out.shape).to(out.dtype))
    found = [getattr(seen, name).detach() for name in ("out", *STATISTICS)]
    return [*found, *grads, Native().received(call, seen.lse)]


@needs_library
@pytest.mark.parametrize("unit", units() or ["none"])
@pytest.mark.parametrize("axis", range(3))
@pytest.mark.parametrize("queries", [1, 9])
def test_rows_more_than_2_31_numbers_apart(unit: str, axis: int, queries: int) -> None:
    b, h, s, d = 2, 2, 70, 32
    q, k, v = (torch.randn(b, h, n, d).bfloat16() for n in (queries, s, s))
    bias, table = torch.randn(b, h, queries, s), torch.rand(b, h, queries, s) > 0.2
    near = [q, k, v, bias, table]
    apart = [x if x.shape[axis] == 1 else far(x, axis) for x in (q, k, v, bias)]
    apart.append(table)
    with cpu.instructions(unit):
        for a, c in zip(everything_of(*near), everything_of(*apart), strict=True):
            assert torch.equal(a, c)


@pytest.mark.slow
@needs_library
@pytest.mark.parametrize("unit", units() or ["none"])
def test_more_than_2_31_dense_numbers(unit: str) -> None:
    """All keys are zero but the last ones, which are beyond 2³¹."""
    d = 256
    s = EDGE // d + 100
    room = zeros(s * d, torch.bfloat16)
    if room is None:
        pytest.skip("the machine gives out no 4 GiB of addresses")
    k = room.view(1, 1, s, d)
    k[0, 0, -3:, 0] = torch.tensor([20.0, 21.0, 22.0]).bfloat16()
    q = torch.zeros(1, 1, 1, d).bfloat16()
    q[..., 0] = 1.0
    with cpu.instructions(unit):
        seen = Native().observe(Call.of(q, k, k, scale=1.0), ("ahead", "self", "entropy"))
    weights = torch.tensor([20.0, 21.0, 22.0]).double().exp()
    total = weights.sum() + s - 3
    assert float(seen.lse) == pytest.approx(float(total.log()), rel=1e-5)
    assert float(seen.self) == pytest.approx(float(weights[2] / total), rel=1e-4)
    out = float((weights * torch.tensor([20.0, 21.0, 22.0]).double()).sum() / total)
    assert float(seen.out[0, 0, 0, 0]) == pytest.approx(out, rel=1e-2)
    assert float(seen.out[0, 0, 0, 1:].abs().max()) == 0


def test_a_bound_sees_small_weights_beside_a_large_one() -> None:
    scores, moved = torch.tensor([30.0, 0.0]).double(), torch.tensor([30.0, 0.0]).double()
    low, high = between(scores, moved)  # the first score may be anywhere from 0 to 60
    assert low[0] == pytest.approx(0.5)
    assert high[1] == pytest.approx(0.5)

"""Figures written into a given buffer: `headwise::statistics`, eager and in compiled graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from headwise.kernels import ctypes_api as cpu
from headwise.kernels import torch_ops
from headwise.kernels.interface import STATISTICS, Problem, Terms
from headwise.kernels.torch_ops import BIT

pytestmark = pytest.mark.skipif(cpu.library() is None, reason=cpu.why_not())

WISHES = BIT["entropy"] | BIT["max"] | BIT["self"]
NAMES = [name for name in STATISTICS if WISHES & BIT[name]]


def problem(sinks: Tensor | None = None, **terms: Any) -> Problem:
    q, k = torch.randn(2, 4, 30, 16), torch.randn(2, 2, 40, 16)
    return Problem(q, k, None, sinks, Terms(offset=10, causal=True, **terms), 0.25, 0.0)


@pytest.mark.parametrize("sunk", [False, True])
def test_what_is_written(sunk: bool) -> None:
    call = problem(torch.randn(4) if sunk else None, window=7)
    want = dict(zip(STATISTICS, cpu.forward(call, 127)[1:], strict=True))
    layers = torch.full((3, len(NAMES), 2, 4, 30), torch.nan)
    torch_ops.statistics(call, WISHES, layers[1], want["lse"])
    for name, got in zip(NAMES, layers[1], strict=True):
        assert torch.equal(got, want[name]), name  # type: ignore[arg-type]
    assert layers[::2].isnan().all()


def test_switched_off() -> None:
    into = torch.full((len(NAMES), 2, 4, 30), torch.nan)
    torch_ops.statistics(problem(), WISHES, into, on=torch.zeros((), dtype=torch.int32))
    assert into.isnan().all()
    torch_ops.statistics(problem(), WISHES, into, on=torch.ones((), dtype=torch.int32))
    assert not into.isnan().any()


def test_no_graph_is_left() -> None:
    call = problem()
    call.q.requires_grad_()
    into = torch.zeros(len(NAMES), 2, 4, 30)
    torch_ops.statistics(call, WISHES, into)
    assert not into.requires_grad


@pytest.mark.parametrize(
    "into",
    [
        torch.zeros(2, 2, 4, 30),
        torch.zeros(3, 2, 4, 30, dtype=torch.float64),
        torch.zeros(3, 2, 30, 4).transpose(2, 3),
        torch.zeros(3, 2, 4, 30, device="meta"),
    ],
    ids=["rows", "dtype", "order", "device"],
)
def test_buffers_that_do_not_fit(into: Tensor) -> None:
    with pytest.raises(ValueError, match=r"native kernel: into must be float32 .*, got"):
        cpu.statistics(problem(), WISHES, into)


def test_in_a_compiled_graph() -> None:
    """One graph that writes into a buffer; switching it on and off compiles nothing again."""
    call, layers = problem(), torch.zeros(2, len(NAMES), 2, 4, 30)
    on = torch.ones((), dtype=torch.int32)
    graphs = CompileCounterWithBackend("aot_eager")

    @torch.compile(backend=graphs, fullgraph=True)
    def step(q: Tensor, k: Tensor, layers: Tensor, on: Tensor) -> Tensor:
        at = Problem(2 * q, k, None, None, call.terms, call.scale, call.softcap)
        torch_ops.statistics(at, WISHES, layers[1], on=on)
        return q.sum()

    want = cpu.forward(call._replace(q=2 * call.q), WISHES)
    step(call.q, call.k, layers, on)
    for got, right in zip(layers[1], [x for x in want if x is not None], strict=True):
        assert torch.equal(got, right)
    assert not layers[0].any()
    layers.zero_()
    step(call.q, call.k, layers, torch.zeros_like(on))
    assert not layers.any()
    assert graphs.frame_count == 1


def test_the_operator_is_as_its_schema_says() -> None:
    call, into = problem(torch.randn(4)), torch.zeros(len(NAMES), 2, 4, 30)
    q, k, _, sinks, terms, scale, softcap, *_ = call
    on = torch.ones((), dtype=torch.int32)
    given = (q, k, sinks, *terms, scale, softcap, None, into, on, WISHES)
    torch.library.opcheck(torch.ops.headwise.statistics.default, given)

"""Dropout in the native kernel: the definition's weights on every unit, in both directions."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import headwise as hw
from ci import in_ci
from headwise.backends import Call
from headwise.backends.blocked import Blocked
from headwise.backends.native import Native, _problem
from headwise.core.dropout import dropped_of, dropped_weights
from headwise.core.index import grid
from headwise.core.masks import as_mask
from headwise.core.reference import rows
from headwise.kernels import ctypes_api as cpu
from headwise.kernels import torch_ops as cpu_ops

LIBRARY = cpu.library()
pytestmark = pytest.mark.skipif(LIBRARY is None and not in_ci(), reason=cpu.why_not())
every_set = pytest.mark.parametrize("instructions", LIBRARY.usable if LIBRARY else ["none"])
HALVES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

SOME = torch.rand(71, 73, generator=torch.Generator().manual_seed(0)) > 0.4

# Masks; queries, keys, key/value heads, group; and what else there is.
CALLS: dict[str, tuple[hw.Mask | None, tuple[int, int, int, int], dict[str, Any]]] = {
    "whole": (None, (67, 131, 1, 2), {}),
    "causal": (hw.Causal(), (131, 131, 2, 1), {}),
    "groups": (hw.Causal(), (37, 101, 2, 3), {}),
    "window": (hw.Causal() & hw.Window(19), (90, 199, 1, 1), {}),
    "padding": (hw.Padding(torch.tensor([3, 101])), (9, 101, 1, 2), {}),
    "bias": (hw.ALiBi() & hw.Dense(SOME), (71, 73, 2, 1), {}),
    "sinks": (hw.Causal(), (65, 97, 1, 3), {"sinks": torch.tensor([0.3, -torch.inf, 2.0])}),
    "softcap": (hw.Window(30), (50, 50, 1, 2), {"softcap": 2.0, "scale": -0.7}),
    "one query": (None, (1, 103, 2, 4), {}),
    "a row of keys": (hw.Causal(), (3, 131, 1, 3), {}),
    "more queries": (None, (129, 5, 1, 2), {}),
}


def call_of(name: str, dtype: torch.dtype, *, wide: int | None = None, **options: Any) -> Call:
    """A call with a seed; its values are the identity where `wide` is not given."""
    mask, (t, s, g, group), more = CALLS[name]
    random = torch.Generator().manual_seed(len(name))
    q = torch.randn(2, g * group, t, 16, generator=random).to(dtype)
    k = torch.randn(2, g, s, 16, generator=random).to(dtype)
    v = torch.eye(s, dtype=dtype).expand(2, g, s, s)
    if wide is not None:
        v = torch.randn(2, g, s, wide, generator=random).to(dtype)
    call = Call.of(q, k, v, **({"mask": mask, "dropout": 0.3} | more | options))
    return replace(call, seed=torch.tensor(20_260_817))


def dropped_in(call: Call) -> Tensor:
    e = call.extent
    assert call.seed is not None
    i, j = torch.arange(e.queries)[:, None], torch.arange(e.keys)[None]
    return dropped_weights(e.batch, e.heads, dropped_of(call.dropout), call.seed, i, j)


@contextmanager
def threads(n: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# ── the output ──────────────────────────────────────────────────────────────────────────────────


@every_set
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", CALLS)
def test_every_unit_drops_the_same_weights(name: str, dtype: str, instructions: str) -> None:
    """With the identity as values the output is the weights themselves."""
    call = call_of(name, HALVES[dtype], scale=0.1)
    plain = replace(call, dropout=0.0)
    with cpu.instructions(instructions):
        found, whole = Native().run(call)[0].float(), Native().run(plain)[0].float()
    gone = dropped_in(call)
    assert bool((found[gone] == 0).all())
    kept = torch.where(gone, 0.0, whole) * (65536 / (65536 - dropped_of(0.3)))
    eps = torch.finfo(HALVES[dtype]).eps
    torch.testing.assert_close(found, kept, rtol=2 * eps, atol=1e-7)
    assert torch.equal(found == 0, gone | (whole == 0))
    blocked = Blocked().run(call)[0].float()
    assert torch.equal(blocked == 0, found == 0)


@every_set
def test_parts_of_many_keys_drop_the_same_weights(instructions: str) -> None:
    """Of few queries on many keys, as where they are split, 256 columns of weights at a time."""
    q, k = torch.randn(1, 2, 5, 16), torch.randn(1, 1, 3003, 16)
    mask = hw.Causal() & hw.Window(2901)
    for start in (0, 1490, 2747):
        v = torch.zeros(1, 1, 3003, 256)
        v[:, :, start : start + 256] = torch.eye(256)
        call = replace(Call.of(q, k, v, mask=mask, dropout=0.5), seed=torch.tensor(11))
        with cpu.instructions(instructions):
            found = Native().run(call)[0]
        torch.testing.assert_close(found, Blocked().run(call)[0], rtol=1e-5, atol=1e-9)
        seen = mask.dense(1, 2, 5, 3003)
        gone = (dropped_in(call) | ~seen)[..., start : start + 256]
        assert torch.equal(found == 0, gone)


@every_set
@pytest.mark.parametrize("name", ["causal", "groups", "one query"])
def test_figures_are_those_without_dropout(name: str, instructions: str) -> None:
    call = call_of(name, torch.float32, wide=9)
    # As calls of blocks of queries too: those with dropout never take the way of decoding.
    call = replace(call, q=call.q[..., :15], k=call.k[..., :15], prepared=None)
    with cpu.instructions(instructions):
        dropped = Native().observe(call, cpu.STATISTICS)
        plain = Native().observe(replace(call, dropout=0.0), cpu.STATISTICS)
        assert dropped.out is not None
        assert plain.out is not None
        assert not torch.equal(dropped.out, plain.out)
        for figure in cpu.STATISTICS:
            assert torch.equal(getattr(dropped, figure), getattr(plain, figure)), figure
        assert dropped.lse is not None
        received = (Native().received(x, dropped.lse) for x in (call, replace(call, dropout=0.0)))
        assert torch.equal(*received)


def test_a_rate_that_rounds_to_nothing_changes_no_bit() -> None:
    call = call_of("causal", torch.float32, wide=9)
    none, least = (Native().run(replace(call, dropout=rate))[0] for rate in (0.0, 1e-6))
    assert torch.equal(none, least)
    most = Native().run(call_of("causal", torch.float32, scale=0.0, dropout=0.999999))[0]
    assert int((most != 0).sum()) == int(
        (~dropped_in(replace(call, dropout=0.999999)) & hw.Causal().dense(1, 1, 131, 131)).sum()
    )


@every_set
def test_threads_change_no_bit(instructions: str) -> None:
    for name in ("groups", "window"):
        found: list[list[Tensor]] = []
        for n in (1, 2):
            with threads(n), cpu.instructions(instructions):
                found.append(gradients(Native(), call_of(name, torch.float32, wide=9)))
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


# ── gradients ───────────────────────────────────────────────────────────────────────────────────


def leaves(call: Call) -> tuple[Call, list[Tensor]]:
    parts = {name: getattr(call, name) for name in ("q", "k", "v", "sinks")}
    own = {n: x.detach().clone().requires_grad_() for n, x in parts.items() if x is not None}
    return call.with_(**own), list(own.values())


def gradients(backend: Any, call: Call) -> list[Tensor]:
    """The output, and the gradients of it and of the log-sum-exp."""
    call, wanted = leaves(call)
    out, lse = backend.run(call, True)
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    total = (out * weight).sum() + lse.masked_fill(lse == -torch.inf, 0.0).cos().sum()
    return [out.detach(), *torch.autograd.grad(total, wanted)]


def in_double(call: Call) -> Call:
    sinks = None if call.sinks is None else call.sinks.double()
    return call.with_(q=call.q.double(), k=call.k.double(), v=call.v.double(), sinks=sinks)


@every_set
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", CALLS)
def test_gradients_are_the_definitions_with_the_same_mask(
    name: str, dtype: str, instructions: str
) -> None:
    call = call_of(name, HALVES[dtype], wide=9)
    exact = gradients(Blocked(), in_double(call))
    with cpu.instructions(instructions):
        found = gradients(Native(), call)
    near = 1e-5 if dtype == "float32" else 8 * torch.finfo(HALVES[dtype]).eps
    for got, want in zip(found, exact, strict=True):
        size = float(want.abs().max())
        torch.testing.assert_close(got.double(), want, rtol=near, atol=near * max(size, 1.0))


@every_set
def test_figures_have_their_gradients_beside_dropout(instructions: str) -> None:
    """Of all figures at once, and a second derivative: both by way of the definition."""
    wished = [name for name in cpu.STATISTICS if name != "max"]
    found: list[list[Tensor]] = []
    for again in (False, True):
        call, wanted = leaves(call_of("sinks", torch.float32, wide=9, dropout=0.2, sinks=None))
        with cpu.instructions(instructions):
            if again:
                every = cpu_again(call)
            else:
                seen = Native().observe(call, wished)
                every = [getattr(seen, name) for name in ("out", *wished)]
            total = sum((x * torch.linspace(0, 1, x.numel()).view(x.shape)).sum() for x in every)
            assert isinstance(total, Tensor)
            first = torch.autograd.grad(total, wanted, create_graph=True)
            norm = sum(x.square().sum() for x in first)
            assert isinstance(norm, Tensor)
            found.append([*first, *torch.autograd.grad(norm, wanted)])
    for got, want in zip(*found, strict=True):
        size = float(want.detach().abs().max())
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5 * size)


def cpu_again(call: Call) -> list[Tensor]:
    """All figures from whole rows of the definition."""
    e = call.extent
    full = rows(
        call.q, call.k, call.v, call.mask, e, *grid(e),
        scale=call.scale, dropout=call.dropout, seed=call.seed,
    )  # fmt: skip
    p = full.weights
    away = torch.arange(e.keys) - (torch.arange(e.queries) + e.offset)[:, None]
    entropy = -(p * (full.logits - full.lse[..., None]).masked_fill(p == 0, 0.0)).sum(-1)
    single = [torch.where(where, p, 0.0).sum(-1) for where in (away == -1, away == 0)]
    return [full.out, full.lse, entropy, (p * away).sum(-1), p[..., 0], *single]


# ── PyTorch around it ───────────────────────────────────────────────────────────────────────────


def step(x: Tensor, dropout: float = 0.3, backend: str = "native") -> Tensor:
    q, k, v = x.view(2, 13, 3, 2, 8).permute(2, 0, 3, 1, 4)
    return hw.attend(q, k, v, mask=hw.Causal(), dropout=dropout, backend=backend)


@pytest.mark.parametrize("backend", ["native", "blocked", "eager"])
def test_manual_seed_repeats_and_no_dropout_draws_nothing(backend: str) -> None:
    x = torch.randn(2, 13, 48)
    found = []
    for _ in range(2):
        torch.manual_seed(8)
        found.append([step(x, backend=backend) for _ in range(2)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert not torch.equal(*found[0])
    state = torch.get_rng_state()
    step(x, 0.0, backend)
    q = torch.randn(1, 2, 5, 8, generator=torch.Generator())
    hw.explain(q, q, q, dropout=0.5)
    hw.observe(q, q, q, hw.Entropy(), dropout=0.5, output=False, backend=backend)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("backend", ["native", "blocked"])
def test_checkpoints_drop_the_same_again(backend: str, reentrant: bool) -> None:
    found: list[list[Tensor]] = []
    for again in (False, True):
        x = torch.linspace(-2, 2, 2 * 13 * 48).sin().view(2, 13, 48).requires_grad_()
        torch.manual_seed(4)
        run = step
        if again:
            run = lambda x, **keys: checkpoint(  # noqa: E731
                lambda x: step(x, **keys), x, use_reentrant=reentrant
            )
        first = run(x, backend=backend)
        second = run(x * 2, backend=backend)
        (grad,) = torch.autograd.grad((first * second).sum(), x) if not again else (None,)
        if again:
            (first * second).sum().backward()
            grad = x.grad
        assert grad is not None
        found.append([first.detach(), second.detach(), grad])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_statistics_come_from_the_same_pass() -> None:
    q = torch.randn(2, 3, 21, 8, requires_grad=True)
    torch.manual_seed(2)
    plain = hw.attend(q, q, q, mask=hw.Causal(), dropout=0.4)
    torch.manual_seed(2)
    seen = hw.observe(q, q, q, hw.Entropy(), hw.Mass(hw.Self()), mask=hw.Causal(), dropout=0.4)
    assert torch.equal(seen.out, plain)
    whole = hw.observe(q, q, q, hw.Entropy(), hw.Mass(hw.Self()), mask=hw.Causal())
    assert torch.equal(seen["entropy"], whole["entropy"])
    assert torch.equal(seen["self"], whole["self"])
    said = hw.explain(q, q, q, hw.Entropy(), mask=hw.Causal(), dropout=0.4)
    assert said.chosen == "native"
    assert "kernel" in said.statistics["entropy"]


def operands(call: Call) -> Iterable[Any]:
    q, k, v, sinks, terms, *numbers, seed, _ = _problem(call, call.v)
    return q, k, v, sinks, *terms, *numbers, seed


def test_the_operator_is_what_it_says() -> None:
    call = leaves(call_of("padding", torch.float32, wide=4, mask=as_mask(hw.Causal())))[0]
    needs = sum(cpu_ops.BIT.values())
    torch.library.opcheck(
        torch.ops.headwise.native_forward.default, (*operands(call), needs, needs)
    )


COMPILED = """
import torch, headwise as hw

def step(x):
    q, k, v = x.view(2, 13, 3, 2, 8).permute(2, 0, 3, 1, 4)
    first = hw.attend(q, k, v, mask=hw.Causal(), dropout=0.3, backend="native")
    return hw.attend(first, k, v, mask=hw.Causal(), dropout=0.3, backend="native")

x = torch.linspace(-2, 2, 2 * 13 * 48).sin().view(2, 13, 48)
compiled, found = torch.compile(step, fullgraph=True, backend="aot_eager"), []
for run in (step, compiled, compiled):
    y = x.clone().requires_grad_()
    torch.manual_seed(6)
    out = run(y)
    found.append((out.detach(), *torch.autograd.grad(out.square().sum(), y)))
    assert not torch.equal(run(y), out)
for other in found[1:]:
    for a, b in zip(found[0], other):
        torch.testing.assert_close(a, b)
print("fine")
"""


@pytest.mark.slow
def test_calls_compile_whole_and_draw_as_eager_ones() -> None:
    environment = os.environ | {"PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILED], capture_output=True, text=True, env=environment
    )
    assert done.stdout.strip() == "fine", done.stderr


def test_a_mode_that_follows_operators_sees_the_same() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    x = torch.randn(2, 13, 48)
    torch.manual_seed(1)
    plain = step(x)
    torch.manual_seed(1)
    with FlopCounterMode(display=False) as counter:
        assert torch.equal(step(x), plain)
    assert counter.get_total_flops() > 0

"""The native CPU kernel against the definition, on every instruction set that this machine has."""

from __future__ import annotations

import gc
import itertools
import math
import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

import fresh
import headwise as hw
from ci import in_ci
from headwise.backends import Call
from headwise.backends import native as native_module
from headwise.backends.blocked import Eager
from headwise.backends.native import Native, RowStatistics
from headwise.backends.native_masks import TABLE_LIMIT, table_bytes, terms_of
from headwise.backends.sdpa import Sdpa
from headwise.core.index import grid
from headwise.core.mask_algebra import Mask, Rows
from headwise.core.masks import Everything
from headwise.core.reference import Definition, rows
from headwise.core.shapes import Extent
from headwise.kernels import ctypes_api as cpu
from headwise.kernels import torch_ops as cpu_ops
from headwise.kernels.interface import FAR
from headwise.stats.statistic import Statistic
from support import EPS, assert_as_good

LIBRARY = cpu.library()
needs_library = pytest.mark.skipif(LIBRARY is None and not in_ci(), reason=cpu.why_not())
every_set = pytest.mark.parametrize("instructions", LIBRARY.usable if LIBRARY else ["none"])
CPU = torch.device("cpu")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


# ── cases ───────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class OwnMask(Mask):
    """What a user may write: every third key, and those at hand."""

    def allowed(self, i: Tensor, j: Tensor, extent: Extent) -> Tensor:
        return ((j % 3 == 0) | ((i + extent.offset - j).abs() < 2)) & (j < 90)


@dataclass(frozen=True)
class OwnRange(Mask):
    """A range that is wider than the keys, and a bias of its own."""

    biased = True

    def interval(self, i: Tensor, extent: Extent) -> tuple[Tensor, Tensor]:
        return i - 3, i + 40

    def allowed(self, i: Tensor, j: Tensor, extent: Extent) -> Tensor:
        return (j >= i - 3) & (j < i + 40)

    def bias(self, i: Tensor, j: Tensor, extent: Extent) -> Tensor:
        return torch.sin(i + 2.0 * j)


@dataclass(frozen=True)
class Case:
    """A call to be: sizes, mask, numbers, and how its tensors lie in memory."""

    batch: int = 2
    kv_heads: int = 3
    group: int = 2
    queries: int = 7
    keys: int = 11
    dim: int = 5
    wide: int = 13
    mask: str = "causal"
    dtype: str = "float32"
    scale: float | None = None
    softcap: float | None = None
    sinks: bool = False
    layout: str = "dense"
    seed: int = 0

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    def call(self, dtype: torch.dtype | None = None, requires_grad: bool = False) -> Call:
        """The call on its tensors, or on exactly the same numbers in another dtype."""
        random = torch.Generator().manual_seed(self.seed)
        shapes = [
            (self.batch, self.heads, self.queries, self.dim),
            (self.batch, self.kv_heads, self.keys, self.dim),
            (self.batch, self.kv_heads, self.keys, self.wide),
        ]
        own = DTYPES[self.dtype]
        q, k, v = (
            LAYOUTS[self.layout](torch.randn(shape, generator=random).to(own).to(dtype or own))
            for shape in shapes
        )
        sinks = torch.randn(self.heads, generator=random) if self.sinks else None
        mask = MASKS[self.mask](self, random)
        if requires_grad:
            q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
        if sinks is not None:
            sinks = sinks.to(dtype or torch.float32).requires_grad_(requires_grad)
        return Call.of(q, k, v, mask=mask, scale=self.scale, softcap=self.softcap, sinks=sinks)


def _noise(random: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=random)


def _lengths(c: Case, random: torch.Generator) -> Tensor:
    return torch.randint(0, c.keys + 1, (c.batch,), generator=random)


def _documents(c: Case, random: torch.Generator) -> Tensor:
    return (_noise(random, c.batch, c.keys) > 1).cumsum(1)


def _forbidding(c: Case, random: torch.Generator) -> Tensor:
    bias = _noise(random, c.queries, c.keys)
    return bias.masked_fill(_noise(random, c.queries, c.keys) > 1, -torch.inf)


MASKS: dict[str, Callable[[Case, torch.Generator], Mask | None]] = {
    "none": lambda c, r: None,
    "causal": lambda c, r: hw.Causal(),
    "window": lambda c, r: hw.Window(3),
    "two windows": lambda c, r: hw.Window(60) & hw.Window(9) & hw.Causal(),
    "padding": lambda c, r: hw.Padding(_lengths(c, r)),
    "left padding": lambda c, r: hw.Causal() & hw.Padding(_lengths(c, r), side="left"),
    "prefix": lambda c, r: hw.Causal() | hw.Prefix(_lengths(c, r)),
    "documents": lambda c, r: hw.Documents(_documents(c, r)) & hw.Causal(),
    "shuffled documents": lambda c, r: hw.Documents(_documents(c, r).flip(0, 1)),
    "scattered documents": lambda c, r: hw.Documents(torch.arange(c.keys) % 3) & hw.Causal(),
    "random": lambda c, r: hw.Dense(_noise(r, c.batch, 1, c.queries, c.keys) > 0.7),
    "random per head": lambda c, r: hw.Dense(_noise(r, c.heads, c.queries, c.keys) > 0.7),
    "keys": lambda c, r: hw.Dense(_noise(r, c.batch, 1, 1, c.keys) > 0) & hw.Causal(),
    "queries": lambda c, r: hw.Dense(_noise(r, 1, 1, c.queries, 1) > 0),
    "two tables": lambda c, r: (
        hw.Dense(_noise(r, c.batch, 1, 1, c.keys) > -1)
        & hw.Dense(_noise(r, c.keys, c.queries).mT > -1)
    ),
    "bias": lambda c, r: hw.Bias(_noise(r, c.heads, c.queries, c.keys)) & hw.Causal(),
    "forbidding bias": lambda c, r: hw.Bias(_forbidding(c, r)),
    "two biases": lambda c, r: (
        hw.Bias(_noise(r, c.batch, 1, 1, c.keys).double())
        & hw.Bias(_noise(r, c.keys, c.queries).mT)
    ),
    "alibi": lambda c, r: hw.ALiBi() & hw.Causal(),
    "alibi and more": lambda c, r: hw.ALiBi() & hw.Bias(_forbidding(c, r)) & hw.Window(20),
    "own": lambda c, r: OwnMask() & hw.Causal(),
    "own range": lambda c, r: OwnRange(),
    "nothing": lambda c, r: hw.Dense(torch.zeros(1, 1, 1, 1, dtype=torch.bool)),
}
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": lambda x: x,
    "positions first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "amid others": lambda x: _amid(x),
    "features apart": lambda x: x.mT.contiguous().mT,
    "one for all": lambda x: x[:1].expand(len(x), -1, -1, -1),
}


def _amid(x: Tensor) -> Tensor:
    """The same as a view into rows of odd width, among numbers that must not be read."""
    b, h, t, d = x.shape
    room = x.new_full((b, t + 1, h, d + 3), torch.nan)
    room[:, :t, :, 1 : d + 1] = x.transpose(1, 2)
    return room[:, :t, :, 1 : d + 1].transpose(1, 2)


@st.composite
def cases(draw: st.DrawFn, **fixed: object) -> Case:
    mask = draw(st.sampled_from(sorted(MASKS)))
    queries = draw(st.sampled_from([1, 2, 3, 7, 17, 64, 65, 97, 130]))
    keys = draw(st.sampled_from([1, 2, 5, 11, 47, 49, 64, 95, 131, 150]))
    if "documents" in mask:
        keys = max(keys, queries)
    found = {
        "batch": draw(st.integers(1, 3)),
        "kv_heads": draw(st.integers(1, 3)),
        "group": draw(st.integers(1, 3)),
        "queries": queries,
        "keys": keys,
        "dim": draw(st.sampled_from([1, 2, 5, 8, 13, 16, 31, 64, 67, 128])),
        "wide": draw(st.sampled_from([1, 3, 8, 16, 17, 33, 64, 80])),
        "mask": mask,
        "dtype": draw(st.sampled_from(sorted(DTYPES))),
        "scale": draw(st.sampled_from([None, None, 0.3, -0.2, 0.0])),
        "softcap": draw(st.sampled_from([None, None, 1.5, 30.0])),
        "sinks": draw(st.booleans()),
        "layout": draw(st.sampled_from(sorted(LAYOUTS))),
        "seed": draw(st.integers(0, 1000)),
    }
    return Case(**(found | fixed))  # type: ignore[arg-type]


def whole(call: Call) -> Definition:
    return rows(
        call.q,
        call.k,
        call.v,
        call.mask,
        call.extent,
        *grid(call.extent),
        scale=call.scale,
        softcap=call.softcap,
        sinks=call.sinks,
    )


def defined(call: Call) -> RowStatistics:
    """All figures as the textbook would compute them, from the whole matrix."""
    full = whole(call)
    p, alive = full.weights, full.allowed.any(-1)
    entering = full.logits.masked_fill(~alive[..., None], 0.0)
    outcomes = p
    if full.sink is not None and call.sinks is not None:
        sinks = call.sinks.to(p.dtype)[:, None, None].expand(*p.shape[:3], 1)
        entering = torch.cat([entering, sinks], -1)
        outcomes = torch.cat([p, full.sink[..., None]], -1)
    top = entering.detach().amax(-1, keepdim=True)  # beside it, a logarithm of a sum may be lost
    log_sum = torch.logsumexp(entering - top, -1)
    lse = torch.where(alive, top[..., 0] + log_sum, -torch.inf)
    log_p = entering - top - log_sum[..., None]
    entropy = -torch.where(outcomes > 0, outcomes * log_p, 0.0).sum(-1)
    position = torch.arange(call.extent.queries) + call.extent.offset
    away = torch.arange(call.extent.keys) - position[:, None]
    masses = [
        (p * (chosen & torch.ones_like(full.allowed))).sum(-1)
        for chosen in (torch.arange(call.extent.keys) == 0, away == -1, away == 0)
    ]
    return RowStatistics(full.out, lse, full.logits.amax(-1), entropy, (p * away).sum(-1), *masses)


def peer(call: Call) -> tuple[Tensor, Tensor]:
    """PyTorch's fused kernel in the same dtype; the definition where it does not serve."""
    fused = Sdpa()
    return (Eager() if fused.refuse(call) else fused).run(call, True)


def close(
    name: str, got: Tensor, plain: Tensor, exact: Tensor, dtype: torch.dtype, own: float = 0.0
) -> None:
    try:
        assert_as_good(got, plain, exact, dtype, factor=2.0, own=own)
    except AssertionError as error:
        raise AssertionError(f"{name}: {error}") from error


def all_close(got: RowStatistics, plain: RowStatistics, exact: RowStatistics, call: Call) -> None:
    for name in ("out", *cpu.STATISTICS):
        dtype = call.q.dtype if name == "out" else torch.float32
        unit, own = max(1.0, largest_score(call)), 0.0
        if name == "out":  # a score summed up in another order moves its weight by as much
            unit, own = 1.0, unit * float(call.v.detach().abs().amax()) * 2.0**-24
        if name == "ahead":  # a sum of positions
            unit *= call.extent.keys
        close(name, *(getattr(x, name) / unit for x in (got, plain, exact)), dtype, own)


def largest_score(call: Call) -> float:
    """The largest `|scale| · Σ_d |q_d| |k_d|`, of which a score is a sum with signs."""
    q, k = call.q.detach().double().abs(), call.k.detach().double().abs()
    k = k.repeat_interleave(call.extent.group, dim=1)
    return abs(call.scale) * float((q @ k.mT).amax())


def fields(figures: RowStatistics) -> dict[str, Tensor | None]:
    return {name: getattr(figures, name) for name in ("out", *cpu.STATISTICS)}


# ── forward ─────────────────────────────────────────────────────────────────────────────────────


@needs_library
@every_set
@given(case=cases())
def test_output_and_figures_are_as_exact_as_those_of_torch(instructions: str, case: Case) -> None:
    call = case.call()
    assert Native().refuse(call) == []
    with cpu.instructions(instructions):
        got = Native().observe(call, cpu.STATISTICS)
        alone = Native().statistics(call, cpu.STATISTICS)
    exact, plain = defined(case.call(torch.float64)), defined(call)
    out, lse = peer(call)
    plain = replace(plain, out=out, lse=lse)
    all_close(got, plain, exact, call)
    assert alone.out is None
    all_close(replace(alone, out=got.out), plain, exact, call)
    assert got.out is not None
    assert got.out.transpose(1, 2).is_contiguous()


@needs_library
def test_figures_worked_out_by_hand() -> None:
    q = k = torch.zeros(1, 1, 4, 3)
    v = torch.arange(4.0).view(1, 1, 4, 1)
    seen = Native().observe(Call.of(q, k, v, mask=hw.Causal()), cpu.STATISTICS)
    got = {name: x.flatten().tolist() for name, x in fields(seen).items() if x is not None}
    third = pytest.approx(1 / 3)
    assert got["out"] == pytest.approx([0.0, 0.5, 1.0, 1.5])
    assert got["lse"] == got["entropy"] == pytest.approx([math.log(n) for n in (1, 2, 3, 4)])
    assert got["max"] == [0.0] * 4
    assert got["ahead"] == pytest.approx([0.0, -0.5, -1.0, -1.5])
    assert got["first"] == got["self"] == [1.0, 0.5, third, 0.25]
    assert got["previous"] == [0.0, 0.5, third, 0.25]
    sink = Call.of(q, k, v, mask=hw.Causal(), sinks=torch.zeros(1))
    seen = Native().observe(sink, ("self", "entropy"))
    assert seen.self is not None
    assert seen.self.flatten().tolist() == [0.5, third, 0.25, pytest.approx(0.2)]
    assert seen.entropy is not None
    assert seen.entropy.flatten().tolist() == pytest.approx([math.log(n) for n in (2, 3, 4, 5)])


@needs_library
@every_set
@given(case=cases())
def test_seeing_changes_no_bit(instructions: str, case: Case) -> None:
    call, native = case.call(), Native()
    with cpu.instructions(instructions):
        out, lse = native.run(call)
        every = native.observe(call, cpu.STATISTICS)
        some = native.observe(call, ("max", "first"))
    for seen in (every, some):
        assert torch.equal(seen.out, out)
        assert torch.equal(seen.lse, lse)
    assert some.entropy is None


@needs_library
@every_set
def test_rows_that_see_nothing(instructions: str) -> None:
    case = Case(queries=130, keys=70, sinks=True)  # the first 60 queries stand before every key
    call = case.call(requires_grad=True)
    with cpu.instructions(instructions):
        seen = Native().observe(call, cpu.STATISTICS)
        sum(x.masked_fill(x == -torch.inf, 0).sum() for x in fields(seen).values()).backward()
    for name, x in fields(seen).items():
        of_nothing = -torch.inf if name in ("lse", "max") else 0.0
        assert bool((x[:, :, :60] == of_nothing).all()), name
        assert bool(x[:, :, 60:].isfinite().all()), name
    assert bool((call.q.grad[:, :, :60] == 0).all())
    for x in (call.q, call.k, call.v, call.sinks):
        assert bool(x.grad.isfinite().all())


@needs_library
@every_set
@pytest.mark.parametrize("where", "qkv")
def test_what_is_no_number_shows_in_the_rows_that_see_it(instructions: str, where: str) -> None:
    call = Case(queries=70, keys=70, mask="causal").call()
    spoilt = getattr(call, where).clone()
    spoilt[0, 1, 65, 2] = torch.nan
    call = call.with_(**{where: spoilt})
    with cpu.instructions(instructions):
        out, lse = Native().run(call)
    full = whole(call)
    assert torch.equal(lse.isnan(), full.lse.isnan())
    if where == "v":  # of the other rows the definition itself says 0 · NaN
        assert bool(out[0, 2:4, 65:, 2].isnan().all())
        assert int(full.out.isnan().sum()) >= int(out.isnan().sum())
    else:
        assert torch.equal(out.isnan(), full.out.isnan())


@needs_library
@every_set
@pytest.mark.parametrize("number", [torch.nan, torch.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_that_are_hidden_do_not_show(instructions: str, dtype: str, number: float) -> None:
    """As of a cache's memory that nobody has written yet."""
    for queries, wide in ((130, 13), (130, 64), (1, 64)):
        mask = hw.Causal() & hw.Padding(torch.tensor([90, 90]))
        q, k, v = (torch.randn(2, 2, n, d) for n, d in ((queries, 8), (130, 8), (130, wide)))
        spoilt = v.clone()
        spoilt[:, :, 90:] = spoilt[:, :, 77, 3] = number
        with cpu.instructions(instructions):
            seen, clean = (
                Native().run(Call.of(*(x.to(DTYPES[dtype]) for x in (q, k, x)), mask=mask))[0]
                for x in (spoilt, v)
            )
        first = 130 - queries  # whoever stands before key 77 does not see it
        before = torch.arange(first, 130) < 77
        assert torch.equal(seen[:, :, before], clean[:, :, before])
        assert bool(seen[:, :, ~before, :3].isfinite().all())
        assert not bool(seen[:, :, ~before, 3].isfinite().any())


@needs_library
@every_set
@pytest.mark.parametrize("size", [1e4, 1e-20])
def test_scores_of_any_size(instructions: str, size: float) -> None:
    case = Case(queries=40, keys=130, dim=16)
    call, wide = case.call(), case.call(torch.float64)
    call, wide = (c.with_(q=c.q * size) for c in (call, wide))
    with cpu.instructions(instructions):
        got = Native().observe(call, cpu.STATISTICS)
    all_close(got, defined(call), defined(wide), call)


@needs_library
def test_a_fused_projection_is_read_where_it_lies() -> None:
    x = torch.randn(2, 65, 3, 6, 16, requires_grad=True)
    q, k, v = x.permute(2, 0, 3, 1, 4)
    call = Call.of(q, k, v, mask=hw.Causal())
    started = cpu._start(native_module._problem(call, v))
    assert (started.q, started.k, started.v) == tuple(y.data_ptr() for y in (q, k, v))
    out, _ = Native().run(call)
    plain, _ = peer(call)
    torch.testing.assert_close(out, plain, rtol=1e-5, atol=1e-5)
    assert out.transpose(1, 2).flatten(2).data_ptr() == out.data_ptr()  # merging heads is a view
    got, wanted = (torch.autograd.grad(o.square().sum(), x)[0] for o in (out, plain))
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


@needs_library
def test_long_rows_of_a_fused_projection_are_gathered() -> None:
    rows, others = FAR
    x = torch.randn(1, rows, 3, 2, 8, requires_grad=True)
    q, k, v = x.permute(2, 0, 3, 1, 4)
    few, many = (Call.of(q[:, :, -n:], k, v, mask=hw.Causal()) for n in (others - 1, others))
    for call, gathered in ((few, False), (many, True)):
        started = cpu._start(native_module._problem(call, v))
        assert (started.k != k.data_ptr()) == (started.v != v.data_ptr()) == gathered
        out, expected = Native().run(call)[0], peer(call)[0]
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
        got, wanted = (torch.autograd.grad(o.square().sum(), x)[0] for o in (out, expected))
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    shared = k[:, :1].expand(1, 2, rows, 8)  # one head for all, which is not copied for each
    started = cpu._start(native_module._problem(Call.of(q, shared, v, mask=hw.Causal()), v))
    assert started.k == k.data_ptr()


@needs_library
@pytest.mark.parametrize("mask", sorted(MASKS))
def test_sampled_queries_are_those_of_the_whole_call(mask: str) -> None:
    call = Case(queries=33, keys=49, mask=mask).call()
    few = torch.tensor([0, 3, 4, 17, 32])
    part = call.with_(
        q=call.q[:, :, few],
        mask=Rows(call.mask, few, call.extent),
        extent=replace(call.extent, queries=len(few)),
    )
    assert Native().refuse(part) == []
    whole_call, sampled = (fields(Native().observe(c, cpu.STATISTICS)) for c in (call, part))
    for name, x in sampled.items():
        torch.testing.assert_close(x, whole_call[name][:, :, few], rtol=1e-5, atol=1e-5, msg=name)
    both = part.with_(mask=part.mask & Rows(hw.Window(5), few, call.extent))
    alone = call.with_(mask=call.mask & hw.Window(5))
    for a, b in zip(Native().run(both), Native().run(alone), strict=True):
        torch.testing.assert_close(a, b[:, :, few], rtol=1e-5, atol=1e-5)


# ── backward ────────────────────────────────────────────────────────────────────────────────────

DIFFERENTIABLE = ("out", "lse", "entropy", "ahead", "first", "previous", "self")


def loss(figures: RowStatistics, names: tuple[str, ...]) -> Tensor:
    """Every figure times numbers of its own; dead rows have none."""
    total = torch.zeros((), dtype=torch.float64)
    for number, name in enumerate(names):
        x = getattr(figures, name)
        weight = _weight(x.shape, number) / (30.0 if name == "ahead" else 1.0)
        total = total + (torch.where(x == -torch.inf, 0.0, x).double() * weight).sum()
    return total


def _weight(shape: Sequence[int], number: int) -> Tensor:
    """Numbers that are the same in every dtype."""
    random = torch.Generator().manual_seed(number)
    return torch.randn(tuple(shape), generator=random).bfloat16().double()


def gradients(call: Call, total: Tensor) -> list[Tensor]:
    leaves = [x for x in (call.q, call.k, call.v, call.sinks) if x is not None]
    found = torch.autograd.grad(total, leaves, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)]


@needs_library
@every_set
@given(case=cases(), names=st.sets(st.sampled_from(DIFFERENTIABLE), min_size=1).map(sorted))
@example(case=Case(queries=65, keys=65, sinks=True, softcap=2.0), names=list(DIFFERENTIABLE))
def test_gradients_are_as_exact_as_those_of_torch(
    instructions: str, case: Case, names: list[str]
) -> None:
    call, plain, wide = (
        case.call(dtype, requires_grad=True) for dtype in (None, None, torch.float64)
    )
    chosen = tuple(names)
    see = Native().observe if "out" in chosen else Native().statistics
    with cpu.instructions(instructions):
        got = gradients(call, loss(see(call, set(chosen) - {"out"}), chosen))
    exact = gradients(wide, loss(defined(wide), chosen))
    if set(chosen) <= {"out", "lse"}:
        out, lse = peer(plain)
        figures = replace(defined(plain), out=out, lse=lse)
    else:
        figures = defined(plain)
    theirs = gradients(plain, loss(figures, chosen))
    dtype, e = call.q.dtype, call.extent
    # What cancels leaves its rounding, in each row; a sink's gradient is a sum over rows.
    units = {"sinks": float(e.batch * e.queries)}
    if dtype == torch.float32:
        product = largest_product(call, chosen.index("out")) if "out" in chosen else 0.0
        units |= dict.fromkeys("qkv", largest_score(call) + product)
    for name, *three in zip(("q", "k", "v", "sinks"), got, theirs, exact, strict=False):
        unit = max(1.0, units.get(name, 1.0))
        close(f"gradient of {name}", *(x / unit for x in three), dtype)


def largest_product(call: Call, number: int) -> float:
    """The largest `Σ_d |dO_id| |v_jd|`, of which `dP` and `D` are sums with signs."""
    shape = (*call.q.shape[:3], call.v.shape[3])
    v = call.v.detach().abs().double().repeat_interleave(call.extent.group, dim=1)
    return float((_weight(shape, number).abs() @ v.mT).amax())


@needs_library
@pytest.mark.parametrize("needed", [c for n in (1, 2) for c in itertools.combinations("qkv", n)])
def test_only_gradients_that_are_needed(needed: tuple[str, ...]) -> None:
    case = Case(queries=20, keys=70)
    every = case.call(requires_grad=True)
    grads = gradients(every, loss(Native().observe(every, ()), ("out", "lse")))
    wanted = dict(zip("qkv", grads, strict=True))
    call = case.call()
    for name in needed:
        getattr(call, name).requires_grad_()
    loss(Native().observe(call, ()), ("out", "lse")).backward()
    for name in "qkv":
        got = getattr(call, name).grad
        assert (got is None) == (name not in needed)
        assert got is None or torch.equal(got, wanted[name])


# ── sums over queries ───────────────────────────────────────────────────────────────────────────


@needs_library
@every_set
@given(case=cases(), blocks=st.integers(1, 9), weighted=st.booleans())
def test_column_sums_and_block_maps(
    instructions: str, case: Case, blocks: int, weighted: bool
) -> None:
    call, e = case.call(), case.call().extent
    of_query, of_key = (torch.arange(n) * blocks // n for n in (e.queries, e.keys))
    weight = torch.rand(e.queries) if weighted else None
    with cpu.instructions(instructions):
        lse = Native().run(call)[1]
        received = Native().received(call, lse, weight)
        table = Native().block_map(call, lse, of_query, of_key, blocks, weight)
    wide = case.call(torch.float64)
    found = []
    for each in (call, wide):
        p = whole(each).weights
        p = p if weight is None else p * weight.to(p.dtype)[:, None]
        rows_in = torch.nn.functional.one_hot(of_query, blocks).to(p.dtype)
        keys_in = torch.nn.functional.one_hot(of_key, blocks).to(p.dtype)
        found.append((p.sum(2), rows_in.mT @ p @ keys_in))
    for name, got, plain, exact in zip(("received", "map"), (received, table), *found, strict=True):
        # The log-sum-exp is a number in float32 here, and its rounding moves all of a row.
        shift = EPS[torch.float32] * float(lse.nan_to_num(neginf=0).abs().max())
        room = (1 + shift / EPS[torch.float32]) * torch.ones(())
        error = (got.double() - exact).abs().max().item()
        allowed = 2 * (plain.double() - exact).abs().max().item()
        rounding = 4 * EPS[torch.float32] * float(room) * max(1.0, exact.abs().max().item())
        assert error <= allowed + rounding, f"{name}: error {error:.2e}, allowed {allowed:.2e}"


# ── memory and threads ──────────────────────────────────────────────────────────────────────────


def everything(case: Case) -> list[Tensor]:
    """All that the kernel gives for a case."""
    call = case.call(requires_grad=True)
    native, e = Native(), call.extent
    seen = native.observe(call, cpu.STATISTICS)
    found = gradients(call, loss(seen, DIFFERENTIABLE))
    found += [x.detach() for x in fields(seen).values() if x is not None]
    lse = seen.lse.detach()
    of_query, of_key = (torch.arange(n) * 3 // n for n in (e.queries, e.keys))
    found.append(native.received(call, lse))
    found.append(native.block_map(call, lse, of_query, of_key, 3))
    return found


@needs_library
@every_set
@given(case=cases())
def test_every_result_is_written(instructions: str, case: Case) -> None:
    with cpu.instructions(instructions):
        clean = everything(case)
        with poisoned():
            for a, b in zip(everything(case), clean, strict=True):
                assert torch.equal(a, b)


@contextmanager
def poisoned() -> Iterator[None]:
    """Memory for results comes full of NaN."""
    before = cpu.empty, cpu.empty_like, cpu.empty_strided
    strided = torch.empty_strided
    cpu.empty = lambda *a, **k: torch.full(*a, torch.nan, **k)
    cpu.empty_like = lambda like: torch.full_like(like, torch.nan)
    cpu.empty_strided = lambda *a, **k: strided(*a, **k).fill_(torch.nan)
    try:
        yield
    finally:
        cpu.empty, cpu.empty_like, cpu.empty_strided = before


@needs_library
@pytest.mark.parametrize(
    "statistic", [hw.Entropy(), hw.Mass(hw.Previous())], ids=["entropy", "mass"]
)
def test_what_was_observed_is_freed_at_once(statistic: Statistic) -> None:
    call = Case().call()
    gc.collect()
    gc.disable()
    try:
        seen = hw.observe(call.q, call.k, call.v, statistic, backend="native")
        held = weakref.ref(seen.out)
        del seen
        assert held() is None
    finally:
        gc.enable()


def test_poison_is_seen() -> None:
    with poisoned():
        assert bool(cpu.gradient_like(torch.zeros(1, 2, 3, 4)).isnan().all())


@needs_library
@every_set
@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize(
    "case",
    [
        Case(queries=300, keys=300, dim=16, sinks=True),
        Case(queries=130, keys=200, mask="padding", group=1),
        Case(batch=1, kv_heads=1, group=1, queries=1, keys=1000, mask="none"),
        Case(batch=1, kv_heads=1, group=8, queries=2, keys=700, softcap=5.0),
        Case(queries=90, keys=90, mask="bias"),
    ],
    ids=["causal", "padding", "decode", "few queries", "bias"],
)
def test_no_bit_depends_on_the_number_of_threads(instructions: str, dtype: str, case: Case) -> None:
    before = torch.get_num_threads()
    found = []
    try:
        with cpu.instructions(instructions):
            for threads in (1, 2, 3, 5):
                torch.set_num_threads(threads)
                found.append(everything(replace(case, dtype=dtype)))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        for number, (a, b) in enumerate(zip(found[0], other, strict=True)):
            assert torch.equal(a, b), number


# ── masks as terms ──────────────────────────────────────────────────────────────────────────────

EXTENT = Extent(2, 6, 3, 7, 11)


def tensors_of(mask: Mask | None) -> set[str]:
    terms = terms_of(mask or Everything(), EXTENT, CPU)
    return {name for name, x in terms._asdict().items() if isinstance(x, Tensor)}


def test_each_mask_takes_its_cheapest_form() -> None:
    wanted = {
        "none": set(),
        "causal": set(),
        "two windows": set(),
        "padding": {"high"},
        "left padding": {"low"},
        "prefix": {"low", "high"},
        "documents": {"low", "high"},
        "shuffled documents": {"low", "high"},
        "scattered documents": {"allowed"},
        "random": {"allowed"},
        "forbidding bias": {"bias"},
        "alibi": {"slopes"},
        "alibi and more": {"slopes", "bias"},
        "own": {"allowed"},
        "own range": {"low", "high", "allowed", "bias"},
    }
    for name, tensors in wanted.items():
        mask = MASKS[name](Case(), torch.Generator().manual_seed(0))
        assert tensors_of(mask) == tensors, name
    assert terms_of(hw.Window(9) & hw.Window(4), EXTENT, CPU)[6:] == (4, True, 4)


def test_tables_are_neither_copied_nor_wider_than_they_are() -> None:
    table = torch.rand(2, 1, 7, 11) > 0.5
    terms = terms_of(hw.Dense(table) & hw.Causal(), EXTENT, CPU)
    assert terms.allowed is not None
    assert terms.allowed.data_ptr() == table.data_ptr()
    bias = torch.randn(11)
    terms = terms_of(hw.Bias(bias), EXTENT, CPU)
    assert terms.bias is not None
    assert terms.bias.data_ptr() == bias.data_ptr()
    assert list(terms.bias.shape) == [1, 1, 1, 11]


def test_a_table_that_is_too_large_is_refused_before_it_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    length = 40_000
    extent = Extent(1, 1, 1, length, length)
    scattered = hw.Documents(torch.arange(length) % 2)
    assert table_bytes(scattered, extent, CPU) == length**2
    assert table_bytes(OwnMask(), extent, CPU) == length**2
    assert table_bytes(hw.Documents(torch.arange(length) // 9), extent, CPU) == 0
    assert table_bytes(hw.Causal() & hw.ALiBi(), extent, CPU) == 0
    keys = hw.Dense(torch.ones(1, 1, 1, length, dtype=torch.bool))
    assert table_bytes(keys, extent, CPU) == 0  # taken as it is
    assert table_bytes(keys & keys, extent, CPU) == length
    q = torch.zeros(1, 1, length, 1)
    monkeypatch.setattr(cpu, "why_not", lambda: "")
    (reason,) = Native().refuse(Call.of(q, q, q, mask=scattered))
    assert f"{length**2 / 2**20:.0f} MiB (at most {TABLE_LIMIT / 2**20:.0f} MiB)" in reason


# ── what is refused, and what is missing ────────────────────────────────────────────────────────


def test_refusals_have_their_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "why_not", lambda: "")
    q = torch.zeros(1, 2, 3, 8)

    def reasons(x: Tensor = q, v: Tensor | None = None, **more: object) -> str:
        return "; ".join(Native().refuse(Call.of(x, x, x if v is None else v, **more)))

    assert reasons() == ""
    assert "float64" in reasons(q.double())
    assert reasons(dropout=0.1) == ""
    assert "wider than 256 (257)" in reasons(torch.zeros(1, 2, 3, 257))
    assert "wider than 256 (300)" in reasons(v=torch.zeros(1, 2, 3, 300))
    assert "empty" in reasons(q[:, :, :0])
    assert "empty" in reasons(v=q[..., :0])
    assert "CPU" in reasons(q.to("meta"))
    bias = hw.Bias(torch.zeros(3, 3, requires_grad=True))
    assert "gradient for a bias" in reasons(mask=bias)
    with torch.no_grad():
        assert reasons(mask=bias) == ""


@needs_library
def test_an_instruction_set_that_there_is_not() -> None:
    with (
        pytest.raises(ValueError, match=r"must be one of .*, got 'abacus'"),
        cpu.instructions("abacus"),
    ):
        pass


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        (None, "was not built"),
        ("/nowhere/libheadwise.so", "cannot be loaded"),
        (torch._C.__file__, "is not a library of headwise"),
    ],
    ids=["none", "missing", "another"],
)
def test_without_a_library_calls_are_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, path: str | None, reason: str
) -> None:
    monkeypatch.setattr(cpu, "places", [])
    if path is not None:
        monkeypatch.setattr(cpu, "_find", lambda: Path(path))
    monkeypatch.setattr(cpu, "_LIBRARY", cpu._load())
    q = torch.zeros(1, 1, 2, 4)
    assert cpu.library() is None
    assert reason in cpu.why_not()
    assert Native().refuse(Call.of(q, q, q)) == [cpu.why_not()]
    assert hw.explain(q, q, q).chosen == "sdpa"


def test_the_struct_is_the_headers() -> None:
    """Its fields, in the order in which the header declares them."""
    header = (Path(cpu.__file__).parent / "cpp" / "headwise.h").read_text()
    host, body = re.findall(r"typedef struct {(.*?)} hw_\w+;", header, flags=re.DOTALL)
    assert re.findall(r"\(\*(\w+)\)", host) == [name for name, _ in cpu.CHost._fields_]
    body = re.sub(r"/\*.*?\*/", "", body, flags=re.DOTALL)
    for word in ("const", "void", "float", "uint64_t", "int64_t", "int32_t", "uint8_t", "hw_host"):
        body = body.replace(word, "")
    names = [n.split("[")[0].strip(" *\n") for d in body.split(";") for n in d.split(",")]
    names = [name for name in names if name.isidentifier()]
    assert names == [name for name, _ in cpu.CCall._fields_]


@needs_library
def test_in_ci_the_library_is_there() -> None:
    assert cpu.why_not() == ""


# ── torch.compile ───────────────────────────────────────────────────────────────────────────────


@needs_library
def test_operators_are_what_they_say() -> None:
    case = Case(queries=5, keys=7, dim=8, wide=4, mask="padding", sinks=True)
    call = case.call(requires_grad=True)
    q, k, v, sinks, terms, scale, softcap, *dropout, _ = native_module._problem(call, call.v)
    needs = sum(cpu_ops.BIT.values())
    torch.library.opcheck(
        torch.ops.headwise.native_forward.default,
        (q, k, v, sinks, *terms, scale, softcap, *dropout, needs, needs),
    )
    lse = Native().run(call)[1].detach()
    blocks = (torch.arange(5) // 2, torch.arange(7) // 3, 3)
    torch.library.opcheck(
        torch.ops.headwise.native_sums.default,
        (q.detach(), k.detach(), None, *terms, scale, softcap, lse, None, True, *blocks),
    )


COMPILED = """
import torch, headwise as hw
from headwise.backends import Call
from headwise.backends.native import Native
native = Native()

def step(q, k, sinks, mask):
    call = Call.of(q, k, k, mask=mask, sinks=sinks)
    assert not native.refuse(call)
    seen = native.observe(call, ("entropy", "max", "ahead", "self"))
    alone = native.statistics(call, ("entropy",))
    received = native.received(call, seen.lse)
    blocks = native.block_map(call, seen.lse, torch.arange(7) // 4, torch.arange(11) // 4, 3)
    return (seen.out, seen.lse, seen.entropy, seen.ahead, seen.self, alone.entropy, seen.max,
            received, blocks)

def total(found):
    return sum((x * torch.linspace(0, 1, x.numel()).view(x.shape)).sum() for x in found[:6])

q, k, sinks = torch.randn(2, 6, 7, 5), torch.randn(2, 3, 11, 5), torch.randn(6)
for mask in (hw.Causal() & hw.Window(3) & hw.Documents(torch.arange(11) // 3),
             hw.Padding(torch.tensor([4, 11])) & hw.ALiBi() & hw.Bias(torch.randn(7, 11)),
             hw.Causal() | hw.Prefix(3)):
    torch._dynamo.reset()  # every mask is a graph of its own
    graph = torch.compile(lambda *x: step(*x, mask), fullgraph=True, backend="aot_eager")
    ours, theirs = ([x.clone().requires_grad_() for x in (q, k, sinks)] for _ in "ab")
    a, b = graph(*ours), step(*theirs, mask)
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y)
        assert x.stride() == y.stride()
    total(a).backward(), total(b).backward()
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x.grad, y.grad)
print("fine")
"""


@pytest.mark.slow
@needs_library
def test_calls_compile_whole() -> None:
    done = fresh.run(COMPILED)
    assert done.stdout.strip() == "fine", done.stderr

"""The native CPU kernel at the limits: of numbers, of memory, of patience, and of derivatives."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from test_native import (
    DIFFERENTIABLE,
    MASKS,
    Case,
    defined,
    every_set,
    fields,
    gradients,
    loss,
    needs_library,
)
from torch import Tensor

import fresh
import headwise as hw
from headwise.backends import Call
from headwise.backends.native import Native
from headwise.backends.native_masks import terms_of
from headwise.core import reference
from headwise.core.index import grid, lookup
from headwise.core.mask_algebra import Interval, Mask
from headwise.core.masks import Everything, alibi_slopes
from headwise.core.shapes import Extent
from headwise.kernels import ctypes_api as cpu
from headwise.kernels import torch_ops as cpu_ops
from headwise.kernels.interface import Problem, Terms

LEAST, MOST = torch.finfo(torch.float32).min, torch.finfo(torch.float32).max
CPU = torch.device("cpu")


@pytest.fixture(params=[torch.float64, torch.bfloat16, torch.float16], ids=str)
def default_dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    try:
        yield request.param
    finally:
        torch.set_default_dtype(before)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=random, dtype=torch.float32)


# ── what C is given ─────────────────────────────────────────────────────────────────────────────


@needs_library
def test_no_dtype_by_default_reaches_the_kernel(default_dtype: torch.dtype) -> None:
    q, k = numbers(1, 12, 5, 8), numbers(1, 12, 9, 8, seed=1)
    mask = hw.ALiBi() & hw.Causal()
    exact = hw.attend(q.double(), k.double(), k.double(), mask=mask, backend="eager")
    seen = hw.observe(q, k, k, hw.Entropy(), hw.Map(2), mask=mask, backend="native")
    torch.testing.assert_close(seen.out.double(), exact, rtol=1e-5, atol=1e-6)
    assert seen.lse.dtype == seen["entropy"].dtype == alibi_slopes(12).dtype == torch.float32


@needs_library
def test_no_device_by_default_reaches_the_kernel() -> None:
    q = numbers(1, 3, 5, 8).requires_grad_()
    with torch.device("meta"):
        seen = hw.observe(q, q, q, hw.Entropy(), mask=hw.ALiBi(), backend="native")
        (grad,) = torch.autograd.grad(seen.out.sum() + seen["entropy"].sum(), q)
    for x in (seen.out, seen.lse, seen["entropy"], grad):
        assert x.is_cpu
        assert bool(x.isfinite().all())


B, H, G, T, S, D, DV = 2, 6, 3, 5, 7, 11, 13

GIVEN: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "q": ((B, H, T, D), torch.float32),
    "k": ((B, G, S, D), torch.float32),
    "v": ((B, G, S, DV), torch.float32),
    "sinks": ((H,), torch.float32),
    "position": ((T,), torch.int64),
    "low": ((B, 1, T), torch.int64),
    "high": ((1, H, 1), torch.int64),
    "allowed": ((B, 1, T, S), torch.bool),
    "bias": ((1, H, 1, S), torch.float32),
    "slopes": ((H,), torch.float32),
    "lse": ((B, H, T), torch.float32),
    "weight": ((T,), torch.float32),
    "query_block": ((T,), torch.int32),
    "key_block": ((S,), torch.int32),
    "out": ((B, H, T, DV), torch.float32),
    "grad_out": ((B, H, T, DV), torch.float32),
    "grad_entropy": ((B, H, T), torch.float32),
}


def everything(given: dict[str, Tensor]) -> None:
    """Forward, backward and sums with these tensors."""
    terms = Terms(*(given[name] for name in Terms._fields[:6]), causal=True)
    problem = Problem(*(given[name] for name in ("q", "k", "v", "sinks")), terms, 0.3, 0.0)
    cpu.forward(problem, cpu_ops.BIT["lse"])
    lse, entropy = {"lse": given["lse"]}, {"entropy": given["grad_entropy"]}
    kept = lse | {"entropy": torch.zeros(B, H, T)}
    cpu.backward(problem, given["out"], kept, given["grad_out"], entropy, (True,) * 4)
    blocks = given["query_block"], given["key_block"], 2
    cpu.sums(problem, given["lse"], given["weight"], True, blocks)


def given() -> dict[str, Tensor]:
    return {name: torch.ones(shape).to(dtype) for name, (shape, dtype) in GIVEN.items()}


@needs_library
@pytest.mark.parametrize("name", GIVEN)
def test_every_tensor_is_looked_at(name: str) -> None:
    everything(given())
    x = given()[name]
    spoilt = {
        "shape": x[..., :-1] if x.shape[-1] > 2 else torch.cat([x] * 3, -1),
        "device": x.to("meta"),
    }
    if name not in "qk":
        spoilt["axes"] = x[None]
    if name not in ("lse", "weight", "query_block", "key_block"):  # these are converted
        spoilt["dtype"] = x.to(torch.float64 if x.is_floating_point() else torch.int32)
    for what, other in spoilt.items():
        sizes = name in "qkv" and what == "shape"  # the others are compared with these
        with pytest.raises(ValueError, match="native kernel: " if sizes else f"{name} (is|must)"):
            everything(given() | {name: other})


@needs_library
@pytest.mark.parametrize("name", ["sinks", "position", "slopes", "lse", "weight", "grad_entropy"])
def test_what_lies_with_gaps_is_copied(name: str) -> None:
    whole = given() | {name: torch.arange(GIVEN[name][0][-1]).expand(GIVEN[name][0]) % 3}
    whole[name] = whole[name].to(GIVEN[name][1])
    apart = torch.stack([whole[name], torch.full_like(whole[name], 99)], -1)[..., 0]
    assert not apart.is_contiguous()
    call, other = (results(given() | {name: x}) for x in (whole[name].contiguous(), apart))
    for a, b in zip(call, other, strict=True):
        assert torch.equal(a, b)


def results(of: dict[str, Tensor]) -> list[Tensor]:
    terms = Terms(position=of["position"], slopes=of["slopes"], causal=True)
    q, k = numbers(B, H, T, D), numbers(B, G, S, D, seed=1)
    problem = Problem(q, k, of["v"], of["sinks"], terms, 0.3, 0.0)
    found = cpu.forward(problem, sum(cpu_ops.BIT.values()))
    figures = {"lse": of["lse"], "entropy": of["grad_entropy"]}
    grads = {"entropy": of["grad_entropy"]}
    found += cpu.backward(problem, of["out"], figures, of["grad_out"], grads, (True,) * 4)
    found += cpu.sums(problem, of["lse"], of["weight"], True, None)
    return [x for x in found if x is not None]


@needs_library
@pytest.mark.parametrize("bad", [-1, 3, 2**40])
def test_blocks_that_there_are_not(bad: int) -> None:
    call = Case(queries=5, keys=7).call()
    lse = Native().run(call)[1]
    of_query, of_key = torch.arange(5) // 2, torch.arange(7) // 3
    of_query[-1] = bad
    with pytest.raises(ValueError, match="query_block must be from 0 to 2"):
        Native().block_map(call, lse, of_query, of_key, 3)


# ── tensors without plain memory ────────────────────────────────────────────────────────────────


class Wrapper(torch.Tensor):
    """A tensor around another, with no memory of its own."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        bare = (x.inner if isinstance(x, Wrapper) else x for x in args)
        return func(*bare, **(kwargs or {}))


@needs_library
@pytest.mark.parametrize("where", ["q", "k", "v", "sinks"])
@pytest.mark.parametrize("kind", [torch._neg_view, Wrapper], ids=["negated", "wrapper"])
def test_tensors_with_other_peoples_memory(where: str, kind: Callable[[Tensor], Tensor]) -> None:
    call = Case(sinks=True).call()
    x = getattr(call, where)
    plain = -x if kind is torch._neg_view else x
    got = Native().observe(call.with_(**{where: kind(x)}), cpu.STATISTICS)
    want = Native().observe(call.with_(**{where: plain}), cpu.STATISTICS)
    for name, a in fields(got).items():
        assert torch.equal(a, fields(want)[name]), name


@needs_library
@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_zeros_that_lie_nowhere(where: str) -> None:
    call = Case().call()
    x = getattr(call, where)
    nowhere = torch._efficientzerotensor(x.shape)
    got = Native().run(call.with_(**{where: nowhere}))
    want = Native().run(call.with_(**{where: torch.zeros_like(x)}))
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


@needs_library
def test_biases_with_a_flag_for_their_sign() -> None:
    q, bias = numbers(1, 1, 7, 4), numbers(7, 7)
    got = hw.attend(q, q, q, mask=hw.Bias(torch._neg_view(bias)), backend="native")
    assert torch.equal(got, hw.attend(q, q, q, mask=hw.Bias(-bias), backend="native"))


@needs_library
@pytest.mark.parametrize(
    "kind",
    [
        torch._neg_view,
        lambda g: torch._efficientzerotensor(g.shape),
        lambda g: torch._efficientzerotensor((1, 1, 1, 1)).expand(g.shape),
        lambda g: g.mT.contiguous().mT,
        lambda g: g[:1, :1, :1, :1].expand(g.shape),
    ],
    ids=["negated", "zero", "wide zero", "features apart", "one number"],
)
def test_gradients_come_in_however_they_lie(kind: Callable[[Tensor], Tensor]) -> None:
    call = Case().call(requires_grad=True)
    out, lse = Native().run(call)
    incoming = [kind(numbers(*out.shape)), torch._neg_view(numbers(*lse.shape))]
    plain = [(x + 0 if not x._is_zerotensor() else torch.zeros(x.shape)).clone() for x in incoming]
    leaves = [call.q, call.k, call.v]
    got = torch.autograd.grad([out, lse], leaves, incoming, retain_graph=True)
    want = torch.autograd.grad([out, lse], leaves, plain)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


@needs_library
def test_what_has_no_memory_is_refused() -> None:
    q = numbers(1, 1, 3, 4)
    freed = q.clone()
    freed.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=r"k must have memory of its own, got a Tensor"):
        Native().run(Call.of(q, freed, q))


# ── scores of any size ──────────────────────────────────────────────────────────────────────────

# Few queries, some blocks of them, and keys in several parts.
SIZES = {"few": (3, 70), "blocks": (130, 150), "parts": (2, 2500), "parts of blocks": (65, 2500)}
sizes = pytest.mark.parametrize(("queries", "keys"), SIZES.values(), ids=SIZES)


def as_defined(call: Call, weights: dict[str, Tensor] | None = None) -> None:
    """Compare figures, gradients and sums with those of the definition in float32."""
    native, plain = Native(), defined(call)
    got = native.observe(call, cpu.STATISTICS)
    for name, a in fields(got).items():
        b = getattr(plain, name)
        scale = call.extent.keys if name == "ahead" else 1.0
        torch.testing.assert_close(a / scale, b / scale, rtol=2e-5, atol=1e-5, msg=name)
    ours, theirs = (gradients(call, loss(x, DIFFERENTIABLE)) for x in (got, plain))
    for name, a, b in zip(("q", "k", "v", "sinks"), ours, theirs, strict=False):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * float(b.abs().max()), msg=name)
    p = reference.attention(call.q, call.k, call.v, mask=call.mask, scale=call.scale,
                                sinks=call.sinks).weights.detach()  # fmt: skip
    lse = got.lse.detach()
    torch.testing.assert_close(native.received(call, lse), p.sum(2), rtol=1e-4, atol=1e-5)
    ones = torch.zeros(call.extent.queries).long(), torch.zeros(call.extent.keys).long()
    torch.testing.assert_close(
        native.block_map(call, lse, *ones, 1)[..., 0, 0], p.sum((2, 3)), rtol=1e-4, atol=1e-5
    )


@needs_library
@every_set
@sizes
@pytest.mark.parametrize("huge", [LEAST, MOST, -1e30, 3e9, -2e9])
@pytest.mark.parametrize("sinks", [False, True])
def test_keys_of_equal_and_huge_scores_share(
    instructions: str, queries: int, keys: int, huge: float, sinks: bool
) -> None:
    # A row of nothing but huge scores, one with some, and one with a single key that has none.
    bias = numbers(queries, keys)
    bias[0], bias[1, 5:], bias[-1, :-1] = huge, huge, huge
    case = Case(batch=1, kv_heads=1, group=2, queries=queries, keys=keys, dim=8, wide=8)
    case = replace(case, mask="none", sinks=sinks)
    call = case.call(requires_grad=True).with_(mask=hw.Bias(bias))
    with cpu.instructions(instructions):
        as_defined(call)
        out = Native().run(call)[0]
    if not sinks:
        mean = call.v[:, 0].mean(1)
        torch.testing.assert_close(out[:, 0, 0], mean, rtol=1e-5, atol=1e-5)


@needs_library
@every_set
@sizes
@pytest.mark.parametrize("scale", [1.0, -1.0, 1e-3, 1e30])
def test_products_of_any_size(instructions: str, queries: int, keys: int, scale: float) -> None:
    # Every third key's score is the largest power of two that there is, all others' are far less.
    most = math.floor(math.log2(2.0**126 / max(1.0, abs(scale))))
    case = Case(batch=1, kv_heads=1, group=1, queries=queries, keys=keys, dim=16, wide=16)
    call = replace(case, mask="none", scale=scale).call(requires_grad=True)
    q, k = torch.zeros_like(call.q), torch.zeros_like(call.k)
    q[..., 0], k[..., ::3, 0], k[..., 1::3, 0] = 2.0 ** (most - 60), 2.0**60, 1.0
    q[:, :, ::2] *= -1
    call = call.with_(q=q.requires_grad_(), k=k.requires_grad_())
    with cpu.instructions(instructions):
        got = Native().observe(call, cpu.STATISTICS)
        grads = torch.autograd.grad(got.out.sum(), [call.q, call.k, call.v])
    plain = defined(call)
    for name, a in fields(got).items():
        torch.testing.assert_close(a, getattr(plain, name), rtol=2e-5, atol=2e-5, msg=name)
    wanted = torch.autograd.grad(plain.out.sum(), [call.q, call.k, call.v])
    torch.testing.assert_close(grads[2], wanted[2], rtol=1e-4, atol=1e-4)
    if scale < 1e30:  # with it, what rounding leaves of 0 is beyond float32
        assert all(bool(x.isfinite().all()) for x in grads)


@needs_library
@every_set
@sizes
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_scores_beyond_float32_are_refused(
    instructions: str, queries: int, keys: int, sign: float
) -> None:
    q, k = torch.zeros(1, 2, queries, 8), torch.full((1, 1, keys, 8), 1e30)
    q[0, 1, 1] = sign * 1e30
    with cpu.instructions(instructions):
        with pytest.raises(ValueError, match=r"scores of query 1 .*head 1.* are not finite in"):
            hw.attend(q, k, k, backend="native")
        # Its own −inf is what a bias forbids, and no overflow.
        bias = torch.zeros(queries, 1)
        bias[1] = -math.inf
        out = hw.attend(q, k, torch.ones_like(k), mask=hw.Bias(bias), backend="native")
    assert bool((out[:, :, 1] == 0).all())
    torch.testing.assert_close(out[:, :, 2:], torch.ones_like(out[:, :, 2:]))


@needs_library
@every_set
@sizes
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_no_overflow(
    instructions: str, queries: int, keys: int, number: float
) -> None:
    q, k = torch.ones(1, 1, queries, 8), torch.ones(1, 1, keys, 8)
    q[0, 0, 1, 0] = number
    with cpu.instructions(instructions):
        seen = Native().observe(Call.of(q, k, k), cpu.STATISTICS)
    for name, x in fields(seen).items():
        if name != "max":
            assert bool(x[:, :, 1].isnan().all()), name
        assert bool(x[:, :, [0, *range(2, queries)]].isfinite().all()), name


@needs_library
@every_set
@sizes
def test_masks_alone_make_a_row_dead(instructions: str, queries: int, keys: int) -> None:
    allowed = torch.ones(queries, keys, dtype=torch.bool)
    allowed[0] = False
    allowed[1, :-1] = False
    bias = torch.full((queries, keys), LEAST)
    case = Case(batch=1, kv_heads=1, group=1, queries=queries, keys=keys, dim=8, wide=8)
    call = case.call(requires_grad=True)
    call = call.with_(mask=hw.Dense(allowed) & hw.Bias(bias))
    with cpu.instructions(instructions):
        as_defined(call)
        out, lse = Native().run(call)
    assert bool((out[:, :, 0] == 0).all() & (lse[:, :, 0] == -math.inf).all())
    torch.testing.assert_close(out[:, 0, 1], call.v[:, 0, -1])


@needs_library
@every_set
@sizes
def test_a_hidden_score_that_is_no_number_has_no_gradient(
    instructions: str, queries: int, keys: int
) -> None:
    """∞ − ∞ where products round before they are summed, and from there into a softcap."""
    case = Case(batch=1, kv_heads=1, group=1, queries=queries, keys=keys, dim=8, wide=8)
    case = replace(case, mask="none", softcap=2.0)
    call = case.call()
    q, k = call.q.clone(), call.k.clone()
    q[..., :2], k[:, :, -1, 0], k[:, :, -1, 1] = 10.0, MOST, LEAST
    seen = (torch.arange(keys) < keys - 1)[None]
    leaves = [x.requires_grad_() for x in (q, k, call.v.clone())]
    few = [q, k[:, :, :-1], leaves[2][:, :, :-1]]
    with cpu.instructions(instructions):
        out = hw.attend(*leaves, mask=hw.Dense(seen), softcap=2.0, backend="native")
        got = torch.autograd.grad(out.square().sum(), leaves)
    want = torch.autograd.grad(hw.attend(*few, softcap=2.0).square().sum(), leaves)
    for name, a, b in zip("qkv", got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4, msg=name)


@needs_library
@every_set
@pytest.mark.parametrize("queries", [1, 3, 20])
def test_no_weight_is_more_than_one(instructions: str, queries: int) -> None:
    """Where products cancel, one score comes out differently in passes of different order."""
    k = numbers(1, 2, 40, 32) * 1e9
    q, k = torch.ones(1, 2, queries, 64).requires_grad_(), torch.cat([k, -k.flip(-1)], -1)
    v = numbers(1, 2, 40, 8, seed=1).requires_grad_()
    call = Call.of(q, k, v, scale=1.0)
    with cpu.instructions(instructions):
        seen = Native().observe(call, ("entropy",))
        received = Native().received(call, seen.lse.detach())
        grads = torch.autograd.grad(seen.out.sum() + seen.entropy.sum(), [q, v])
    assert 0 <= float(received.min()) <= float(received.max()) <= queries * (1 + 1e-5)
    assert bool(grads[0].isfinite().all())
    assert float(grads[1].abs().max()) <= queries * (1 + 1e-5)


@needs_library
def test_biases_are_held_within_float32() -> None:
    q, v = numbers(1, 1, 4, 8), numbers(1, 1, 4, 8, seed=1)
    twice = hw.Bias(torch.full((4, 1), LEAST)) & hw.Bias(torch.full((1, 4), LEAST))
    mean = v.mean(2, keepdim=True).expand(v.shape)
    torch.testing.assert_close(hw.attend(q, q, v, mask=twice, backend="native"), mean)
    wide = hw.Bias(torch.full((4, 4), -1e300, dtype=torch.float64))
    torch.testing.assert_close(hw.attend(q, q, v, mask=wide, backend="native"), mean)


@needs_library
@every_set
@sizes
def test_values_of_any_size(instructions: str, queries: int, keys: int) -> None:
    q = torch.zeros(1, 2, queries, 16)
    k, v = torch.zeros(1, 2, keys, 16), torch.full((1, 2, keys, 16), 3e38)
    v[:, 1], v[..., 3], v[..., 5] = -3e38, 1e-38, 7.0
    with cpu.instructions(instructions):
        out = hw.attend(q, k, v, backend="native")
    torch.testing.assert_close(out, v[:, :, :1].expand(out.shape), rtol=1e-4, atol=0)


@needs_library
@pytest.mark.parametrize(
    ("name", "number"),
    [("scale", 1e39), ("scale", math.nan), ("softcap", 1e-50), ("softcap", 1e39)],
)
def test_factors_beyond_float32_are_refused(name: str, number: float) -> None:
    call = Case().call().with_(**{name: number})
    (reason,) = Native().refuse(call)
    assert name in reason


@needs_library
def test_a_window_as_wide_as_there_are_numbers() -> None:
    q = numbers(1, 1, 5, 4)
    terms = terms_of(hw.Window(2**64 + 2), Extent(1, 1, 1, 5, 5), CPU)
    assert terms.causal
    assert 5 <= terms.window < 2**63
    wide, causal = (
        hw.attend(q, q, q, mask=mask, backend="native")
        for mask in (hw.Window(2**64 + 2), hw.Causal())
    )
    assert torch.equal(wide, causal)


# ── Ctrl-C ──────────────────────────────────────────────────────────────────────────────────────

LONG = """
import signal, sys, torch, headwise as hw
from headwise.backends import Call
from headwise.backends.native import Native
from headwise.kernels import ctypes_api as cpu
from headwise.kernels.interface import Problem, Terms
signal.signal(signal.SIGINT, signal.default_int_handler)  # also where a shell said otherwise
torch.set_num_threads(int(sys.argv[2]))
x = torch.zeros(1, 1, 400_000, 16)  # minutes
lse = torch.zeros(1, 1, 400_000)
call = Call.of(x, x, x)
problem = Problem(x, x, x, None, Terms(), 1.0, 0.0)
ways = {
    "forward": lambda: Native().run(call),
    "backward": lambda: cpu.backward(problem, x, {"lse": lse}, x, {}, (True, True, True, False)),
    "received": lambda: Native().received(call, lse),
}
print("starts", flush=True)
try:
    ways[sys.argv[1]]()
except KeyboardInterrupt:
    print("interrupted", flush=True)
    torch.testing.assert_close(hw.attend(*(x[:, :, :9],) * 3, backend="native"), x[:, :, :9])
    print("and well", flush=True)
else:
    print("done", flush=True)
"""


@needs_library
@pytest.mark.parametrize("way", ["forward", "backward", "received"])
@pytest.mark.parametrize("threads", [1, 2])
def test_ctrl_c_ends_a_long_call(way: str, threads: int, tmp_path: Path) -> None:
    process = fresh.begun(tmp_path, LONG, way, str(threads))
    try:
        while not (tmp_path / "out").exists() or not (tmp_path / "out").read_text():
            assert process.exitcode is None, (tmp_path / "err").read_text()
            process.join(0.02)
        process.join(0.3)
        assert process.exitcode is None  # it is at work by then
        os.kill(process.pid, signal.SIGINT)
        process.join(60)
    finally:
        process.kill()
    assert (tmp_path / "out").read_text() == "starts\ninterrupted\nand well\n"


# ── derivatives of derivatives ──────────────────────────────────────────────────────────────────


@dataclass(frozen=True, eq=False)
class OfTerms(Mask):
    """The kernel's terms as a mask."""

    terms: Terms

    def positions(self, i: Tensor) -> Tensor:
        """Where queries stand among the keys."""
        position = self.terms.position
        return i + self.terms.offset if position is None else position[i]

    def allowed(self, i: Tensor, j: Tensor, extent: Extent) -> Tensor:
        found = (j >= 0) & (i >= 0)
        interval = self._range(i, extent)
        found = found & (j >= interval[0]) & (j < interval[1])
        if self.terms.allowed is not None:
            found = found & lookup(self.terms.allowed, i, j, extent)
        if self.terms.bias is not None:
            found = found & ~lookup(self.terms.bias, i, j, extent).isneginf()
        return found

    def bias(self, i: Tensor, j: Tensor, extent: Extent) -> Tensor | None:
        bias, slopes = self.terms.bias, self.terms.slopes
        found = None if bias is None else lookup(bias, i, j, extent)
        if slopes is not None:
            away = -slopes.view(1, -1, 1, 1) * (self.positions(i) - j).abs()
            found = away if found is None else found + away
        return found

    def interval(self, i: Tensor, extent: Extent) -> Interval | None:
        if self.terms.allowed is not None or self.terms.bias is not None:
            return None
        return self._range(i, extent)

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(x for x in self.terms[:6] if isinstance(x, Tensor))

    @property
    def biased(self) -> bool:
        return self.terms.bias is not None or self.terms.slopes is not None

    def _range(self, i: Tensor, extent: Extent) -> Interval:
        """The keys of each query as flags and ranges have them."""
        terms, position = self.terms, self.positions(i)
        low, high = torch.zeros_like(i), torch.full_like(i, extent.keys)
        if terms.causal:
            high = torch.minimum(high, position + 1)
        if terms.window:
            low = torch.maximum(low, position + 1 - terms.window)
        every_key = torch.zeros_like(i)
        if terms.low is not None:
            low = torch.maximum(low, lookup(terms.low[..., None], i, every_key, extent))
        if terms.high is not None:
            high = torch.minimum(high, lookup(terms.high[..., None], i, every_key, extent))
        return low, torch.maximum(low, high)


@pytest.mark.parametrize("name", sorted(MASKS))
def test_terms_are_the_mask(name: str) -> None:
    case = Case()
    mask = MASKS[name](case, torch.Generator().manual_seed(0)) or Everything()
    extent = case.call().extent
    found = OfTerms(terms_of(mask, extent, CPU))
    i, j = grid(extent)
    sizes = (extent.batch, extent.heads, extent.queries, extent.keys)
    allowed = mask.dense(*sizes)
    assert torch.equal(found.dense(*sizes), allowed)
    bias, wanted = (x.bias(i, j, extent) for x in (found, mask))
    if wanted is not None or bias is not None:
        zero = torch.zeros(())
        bias, wanted = (zero if x is None else x.to(torch.float32) for x in (bias, wanted))
        a, b = (torch.where(allowed, x, zero) for x in (bias, wanted))
        torch.testing.assert_close(a, b)
    interval = found.interval(i, extent)
    if interval is not None:
        assert torch.equal((j >= interval[0]) & (j < interval[1]) | ~allowed, torch.ones(sizes) > 0)


def second(call: Call, figures: object, names: tuple[str, ...]) -> list[Tensor]:
    """The gradient of a gradient's size."""
    leaves = [x for x in (call.q, call.k, call.v, call.sinks) if x is not None]
    first = torch.autograd.grad(loss(figures, names), leaves, create_graph=True, allow_unused=True)
    total = sum(x.square().sum() for x in first if x is not None)
    found = torch.autograd.grad(total, leaves, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)]


@needs_library
@pytest.mark.parametrize("mask", ["causal", "padding", "random", "alibi and more", "own range"])
@pytest.mark.parametrize("names", [("out",), ("lse", "entropy"), DIFFERENTIABLE], ids=len)
def test_second_derivatives_are_those_of_the_definition(mask: str, names: tuple[str, ...]) -> None:
    case = Case(queries=6, keys=9, mask=mask, sinks=True, softcap=4.0)
    call = case.call(requires_grad=True)
    see = Native().observe if "out" in names else Native().statistics
    got = second(call, see(call, set(names) - {"out"}), names)
    want = second(call, defined(call), names)
    for name, a, b in zip(("q", "k", "v", "sinks"), got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4, msg=name)


@needs_library
def test_second_derivatives_of_tensors_made_from_one_another() -> None:
    x = numbers(1, 2, 5, 4).requires_grad_()

    def of(backend: str) -> Tensor:
        out = hw.attend(x, 2 * x, x.cos(), mask=hw.Causal(), backend=backend)
        (first,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    torch.testing.assert_close(of("native"), of("eager"), rtol=1e-4, atol=1e-4)


@needs_library
def test_an_operator_says_that_it_has_no_second_derivative() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    x = numbers(1, 2, 5, 4).requires_grad_()
    with FlopCounterMode(display=False):
        out = hw.attend(x, x, x, backend="native")
        (first,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="backend='blocked'"):
            torch.autograd.grad(first.square().sum(), x)


@needs_library
@every_set
def test_a_hidden_key_has_no_slope_however_large_the_incoming_gradient(instructions: str) -> None:
    q, k = (torch.tensor(x).view(1, 1, -1, 1) for x in ([-0.99, 0.5], [0.52, 1.98]))
    q.requires_grad_()
    with cpu.instructions(instructions):
        seen = hw.observe(q, k, k, hw.Entropy(), mask=hw.Causal(), backend="native")
        seen["entropy"].backward(torch.full((1, 1, 2), 1e37))
    assert q.grad is not None
    assert float(q.grad[0, 0, 0]) == 0.0  # it sees one key alone
    assert bool(q.grad.isfinite().all())

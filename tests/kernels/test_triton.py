"""The Triton kernels, interpreted on the CPU, beside the kernel in C++ (`make test-triton`).

On a GPU, tests/backends/test_cuda.py holds them to the definition.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.backends.native_masks import terms_of
from headwise.core.call import as_mask
from headwise.core.shapes import Extent
from headwise.kernels import ctypes_api as cpu
from headwise.kernels import triton_api as cuda
from headwise.kernels.interface import STATISTICS, Problem, Terms
from headwise.kernels.torch_ops import BIT, DIFFERENTIABLE
from support import MASKS_WITH_POSITIONS, B, H, truth

pytestmark = [pytest.mark.triton, pytest.mark.filterwarnings("ignore::RuntimeWarning")]

DTYPES = [torch.float32, torch.float16]  # the interpreter has no products of bfloat16
SHAPES = {
    "square": (37, 37, H, 64, 64, None, False),
    "grouped, softcap, sinks, odd widths": (70, 141, 3, 40, 24, 5.0, True),
    "one query": (1, 41, 2, 16, 64, None, True),
}


def assert_near(got: Tensor | None, want: Tensor | None, dtype: torch.dtype, name: str) -> None:
    assert (got is None) == (want is None), name
    if got is None or want is None:
        return
    assert got.dtype == want.dtype, name
    finite = torch.isfinite(want)
    assert torch.equal(torch.isfinite(got), finite), name
    near = 2e-5 if got.dtype == torch.float32 and dtype == torch.float32 else 3e-3
    size = max(1.0, want[finite].abs().max().item()) if finite.any() else 1.0
    torch.testing.assert_close(got[finite], want[finite], rtol=0, atol=near * size, msg=name)


PAIRWISE = [  # each mask and each shape with each dtype, each mask with each shape
    (name, shape, DTYPES[(row + column) % len(DTYPES)])
    for row, name in enumerate(MASKS_WITH_POSITIONS)
    for column, shape in enumerate(SHAPES)
]


@pytest.mark.parametrize(("name", "shape", "dtype"), PAIRWISE, ids=str)
def test_equal_to_the_kernel_in_c(name: str, shape: str, dtype: torch.dtype) -> None:
    t, s, g, dim, wide, softcap, sunk = SHAPES[shape]
    q, k, v = torch.randn(B, H, t, dim), torch.randn(B, g, s, dim), torch.randn(B, g, s, wide)
    q, k, v = (x.to(dtype) for x in (q, k, v))
    mask = as_mask(MASKS_WITH_POSITIONS[name](t, s))
    terms = terms_of(mask, Extent(B, H, g, t, s), q.device)
    assert_equal(Problem(q, k, v, torch.randn(H) if sunk else None, terms, 0.2, softcap or 0.0))


def test_chosen_queries() -> None:
    q, k, v = torch.randn(B, H, 4, 16), torch.randn(B, 3, 50, 16), torch.randn(B, 3, 50, 16)
    terms = Terms(torch.tensor([0, 7, 20, 49]), causal=True, window=15)
    assert_equal(Problem(q, k, v, None, terms, 0.25, 0.0))


@pytest.mark.parametrize("lift", [0.0, 1e9, -1e9])
def test_scores_that_are_large(lift: float) -> None:
    q, k, v = torch.randn(B, H, 9, 16), torch.randn(B, 3, 20, 16), torch.randn(B, 3, 20, 16)
    assert_equal(Problem(q, k, v, None, Terms(bias=torch.full((1, 1, 9, 20), lift)), 0.25, 0.0))


def assert_equal(problem: Problem) -> None:
    """Output, figures, their gradients, column sums and block maps are those of the C++ kernel."""
    q, k, v, sinks = problem[:4]
    assert v is not None
    dtype, (t, s) = q.dtype, (q.shape[2], k.shape[2])
    want = cpu.forward(problem, 127)
    for name, got, right in zip(
        ("out", *STATISTICS), cuda.forward(problem, 127), want, strict=True
    ):
        assert_near(got, right, dtype, name)
    figures = dict(zip(STATISTICS, want[1:], strict=True))
    assert_statistics_equal(problem, figures)
    figures = {name: figures[name] for name in DIFFERENTIABLE}
    for with_out in (True, False):
        values, out = (v, want[0]) if with_out else (None, None)
        g_out = torch.randn(v.shape[0], H, t, v.shape[3]).to(dtype) if with_out else None
        grads: dict[str, Tensor | None] = {name: torch.randn(B, H, t) for name in DIFFERENTIABLE}
        needed = (True, True, with_out, sinks is not None)
        asked = problem._replace(v=values)
        mine, right = (
            side.backward(asked, out, figures, g_out, grads, needed) for side in (cuda, cpu)
        )
        for name, got, gradient in zip("qkvs", mine, right, strict=True):
            assert_near(got, gradient, dtype, f"gradient in {name}")
    lse, weight = figures["lse"], torch.rand(t)
    assert lse is not None
    blocks = torch.arange(t) * 5 // t, torch.arange(s) * 5 // s, 5
    sums = (side.sums(problem._replace(v=None), lse, weight, True, blocks) for side in (cuda, cpu))
    for name, got, right in zip(("received", "map"), *sums, strict=True):
        assert_near(got, right, torch.float32, name)


def assert_statistics_equal(problem: Problem, want: dict[str, Tensor | None]) -> None:
    """What is written in one launch from the log-sum-exp of another kernel."""
    names = STATISTICS[1:]
    into = torch.full((len(names), *problem.q.shape[:3]), torch.nan)
    cuda.statistics(problem._replace(v=None), sum(BIT[x] for x in names), into, want["lse"])
    for name, got in zip(names, into, strict=True):
        assert_near(got, want[name], problem.q.dtype, f"{name}, where the log-sum-exp is known")


FUSED = {
    "more queries than keys, grouped, softcap, sinks": ("causal", 45, 20, 5.0, True, torch.float32),
    "a window in halves": ("window", 33, 50, None, False, torch.float16),
    "a table in halves, sinks": ("random", 19, 35, None, True, torch.float16),
}


@pytest.mark.parametrize("case", FUSED)
def test_one_launch_against_the_definition(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Output and statistics of one launch, into poisoned memory; rows without a key are dead."""
    name, t, s, softcap, sunk, dtype = FUSED[case]
    b = 2 if name == "random" else 1
    q, k, v = (
        torch.randn(b, heads, n, d).to(dtype)
        for heads, n, d in ((4, t, 24), (2, s, 24), (2, s, 16))
    )
    mask, sinks = as_mask(MASKS_WITH_POSITIONS[name](t, s)), torch.randn(4) if sunk else None
    terms = terms_of(mask, Extent(b, 4, 2, t, s), q.device)
    problem = Problem(q, k, v, sinks, terms, 0.2, softcap or 0.0)
    poison = torch.full((b, 4, t, 16), torch.nan, dtype=dtype)
    monkeypatch.setattr(cuda, "output_like", lambda *_: poison)
    into = torch.full((len(STATISTICS), b, 4, t), torch.nan)
    out = cuda.statistics(problem, 127, into)
    exact = truth(q, k, v, mask=mask, scale=0.2, softcap=softcap, sinks=sinks)
    assert_near(out, exact.out.to(dtype), dtype, "out")
    away = torch.arange(s) - (torch.arange(t)[:, None] + s - t)
    masses = [hw.Mass(pattern) for pattern in (hw.First(), hw.Previous(), hw.Self())]
    want = {
        "lse": exact.lse,
        "max": exact.logits.amax(-1),
        "entropy": hw.Entropy().define(exact)["entropy"],
        "ahead": (exact.weights * away).sum(-1),
        **{one: x for mass in masses for one, x in mass.define(exact).items()},
    }
    for one, got in zip(STATISTICS, into, strict=True):
        assert_near(got, want[one].float(), dtype, one)
    assert exact.lse.isneginf().any() or t <= s


@pytest.mark.parametrize("known", [False, True])
def test_some_figures_and_none(known: bool) -> None:
    q, k = torch.randn(B, H, 9, 16), torch.randn(B, 3, 20, 16)
    problem = Problem(q, k, None, None, Terms(offset=11, causal=True), 0.25, 0.0)
    want = dict(zip(STATISTICS, cpu.forward(problem, 127)[1:], strict=True))
    wished, into = BIT["entropy"] | BIT["self"], torch.full((2, B, H, 9), torch.nan)
    for on in (0, 1):
        assert into.isnan().all(), "it is off"
        switch = torch.tensor(on, dtype=torch.int32)
        cuda.statistics(problem, wished, into, want["lse"] if known else None, switch)
    for name, got in zip(("entropy", "self"), into, strict=True):
        assert_near(got, want[name], q.dtype, name)


def test_heads_whose_memory_is_far_apart() -> None:
    """A head's place times its stride does not fit into 32 bits."""
    apart = 2**30
    try:
        memory = torch.empty(2 * apart + 4096, dtype=torch.float16)
    except RuntimeError:
        pytest.skip("no 4 GiB of address space")
    q, k = (memory[place:].as_strided((1, 3, 8, 16), (0, apart, 16, 1)) for place in (0, 1024))
    for x in (q, k):
        x.copy_(torch.randn(x.shape))
    problem = Problem(q, k, None, None, Terms(causal=True), 0.25, 0.0)
    want = cpu.forward(problem._replace(q=q.contiguous(), k=k.contiguous()), 127)
    for name, got, right in zip(
        ("out", *STATISTICS), cuda.forward(problem, 127), want, strict=True
    ):
        assert_near(got, right, q.dtype, name)


def test_rows_that_are_no_numbers() -> None:
    q, k = torch.randn(1, 2, 40, 16), torch.randn(1, 2, 40, 16)
    q[0, 0, 3] = torch.nan
    q[0, 1, 30] = torch.inf
    problem = Problem(q, k, None, None, Terms(causal=True), 0.25, 0.0)
    want = dict(zip(STATISTICS, cpu.forward(problem, 127)[1:], strict=True))
    into = torch.zeros(3, 1, 2, 40)
    asked = BIT["entropy"] | BIT["ahead"] | BIT["first"]
    cuda.statistics(problem, asked, into, want["lse"])
    for name, got in zip(("entropy", "ahead", "first"), into, strict=True):
        right = want[name]
        assert right is not None
        assert torch.equal(got.isnan(), right.isnan()), name
        assert right.isnan().sum() == 2, name


DRIVER = """
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, jit

class Driver:  # of a GPU that is not there
    launcher_cls = None
    def get_current_target(self): return GPUTarget("cuda", CAPABILITY, 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0
    def get_active_torch_device(self): return torch.device("cpu")
    def map_python_to_cpp_type(self, kind): return kind

driver.set_active(Driver())
from headwise.kernels import triton_api
from headwise.kernels.interface import STATISTICS, Problem, Terms
"""

LENGTHS = """
class Compiled:
    metadata = packed_metadata = function = None
    name = hash = "forward"
    def launch_metadata(self, *_): return None
    def run(self, *_): pass
    def __getitem__(self, grid):
        launched.append(grid)
        return lambda *arguments: lean.append(len(arguments))

def compile(self, key, signature, device, *_):
    compiled.append(key)
    found = self.device_caches[device][0][key] = Compiled()
    return found

jit.JITFunction._do_compile = compile
compiled, launched, lean = [], [], []

for _ in range(3):
    for queries, keys in ((1, 16), (1, 17), (2, 33), (16, 16), (17, 17), (100, 100), (101, 101)):
        q, k = (torch.empty(2, n, 4, 64).transpose(1, 2) for n in (queries, keys))
        terms = Terms(offset=keys - queries, causal=True)
        triton_api.forward(Problem(q, k, k, None, terms, 0.125, 0.0), 127)
arguments = len(triton_api._kernels().forward.arg_names)
print(len(compiled), len(triton_api._PLANS), len(lean), {*lean} == {arguments}, launched[0])
"""

COMPILED = """
import sys
name, dim = sys.argv[1], int(sys.argv[2])
found = []

class Kernel:
    def __init__(self, kernel): self.kernel, self.arg_names = kernel, kernel.arg_names
    def __getitem__(self, grid):
        def launch(*arguments, **options):
            made = self.kernel.warmup(*arguments, grid=grid, **options)
            found.append((self.kernel.__name__, made.asm["cubin"][:4]))
        return launch

kernels = triton_api._kernels()
for one in ("forward", "sampled", "over_queries", "backward_queries"):
    setattr(kernels, one, Kernel(getattr(kernels, one)))
B, H, G, T = 2, 4, 2, 300
masks = {
    "causal": Terms(offset=0, causal=True),
    "window": Terms(causal=True, window=40, low=torch.zeros(B, 1, T).long()),
    "table": Terms(allowed=torch.ones(1, 1, T, T).bool(), slopes=torch.ones(H)),
}
q, k, v = (torch.empty(B, h, T, dim, dtype=torch.bfloat16) for h in (H, G, G))
problem, lse = Problem(q, k, v, None, masks[name], 0.125, 0.0), torch.empty(B, H, T)
triton_api.forward(problem, 127)
triton_api.statistics(problem._replace(v=None), 126, torch.empty(6, B, H, T), lse)
triton_api.sampled(problem._replace(v=None), 127, torch.arange(40), lse, 0b1110010)
triton_api.sums(problem._replace(v=None), lse, None, True, None)
figures = dict.fromkeys(("lse", "entropy", "ahead", "first", "previous", "self"), lse)
triton_api.backward(problem, q, figures, q, figures, (True, True, True, False))
assert {elf for _, elf in found} == {b"\\x7fELF"}
print(*sorted({one for one, _ in found}))
"""


def without_gpu(script: str, *arguments: str, capability: int = 90) -> str:
    """Run a script for a GPU that is not there, where kernels are compiled and not interpreted."""
    own = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    driver = DRIVER.replace("CAPABILITY", str(capability))
    command = [sys.executable, "-c", driver + script, *arguments]
    done = subprocess.run(command, env=own, capture_output=True, text=True, check=False)
    return done.stdout.strip() or done.stderr


def test_other_lengths_compile_nothing_again() -> None:
    """Prefill and each step of decoding run one compiled kernel.

    A call like one before has its arguments ready: Triton does not look at each of them again.
    """
    assert without_gpu(LENGTHS) == "1 7 14 True (8, 1, 1)"


@pytest.mark.parametrize(("name", "dim"), [("causal", 80), ("window", 64), ("table", 128)])
def test_the_compiler_takes_every_kernel(name: str, dim: int) -> None:
    """The interpreter takes more than the compiler, which needs no GPU."""
    every = "backward_queries forward over_queries sampled"
    assert without_gpu(COMPILED, name, str(dim)) == every


SAMPLED = {
    "causal": (40, 53, Terms(offset=13, causal=True)),
    "window": (53, 53, Terms(causal=True, window=9)),
    "ranges": (33, 33, Terms(low=torch.arange(33).sub(7).clamp(0).view(1, 1, 33), causal=True)),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SAMPLED)
def test_sampled_queries(name: str, dtype: torch.dtype) -> None:
    """The figures of some queries and, of all, the largest score and masses of single keys."""
    t, s, terms = SAMPLED[name]
    q, k = torch.randn(B, H, t, 40).to(dtype), torch.randn(B, 2, s, 40).to(dtype)
    problem = Problem(q, k, None, torch.randn(H), terms, 0.25, 0.0)
    figures = dict(zip(STATISTICS, cpu.forward(problem, 127)[1:], strict=True))
    rows, lse = torch.tensor([0, 1, 5, *range(8, 27), t - 2, t - 1]), figures["lse"]
    assert lse is not None
    of_all = ("max", "first", "previous", "self")
    found = cuda.sampled(problem, 127, rows, lse, sum(BIT[one] for one in of_all))
    for one, some, every in zip(STATISTICS, *found, strict=True):
        right = figures[one]
        assert right is not None
        assert_near(some, right[:, :, rows], dtype, f"{one} of the sampled queries")
        assert_near(every, right if one in of_all else None, dtype, f"{one} of all queries")
    some, every = cuda.sampled(problem, BIT["entropy"], rows, lse)
    right = figures["entropy"]
    assert right is not None
    assert_near(some[STATISTICS.index("entropy")], right[:, :, rows], dtype, "entropy alone")
    assert every == [None] * len(STATISTICS)


@pytest.mark.parametrize("name", ["none", "causal", "window", "forbidding bias", "documents"])
def test_blocks_in_which_all_queries_see_all_keys(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small blocks, so that some are open, some masked, and some are skipped."""
    small = {"BM": 16, "BN": 16, "num_warps": 4, "num_stages": 1}
    monkeypatch.setattr(cuda, "_blocks", lambda *_: dict(small))
    cuda._chosen.cache_clear()
    cuda._PLANS.clear()
    try:
        t, s, g = 36, 53, 1
        q, k, v = torch.randn(B, H, t, 40), torch.randn(B, g, s, 40), torch.randn(B, g, s, 24)
        terms = terms_of(as_mask(MASKS_WITH_POSITIONS[name](t, s)), Extent(B, H, g, t, s), q.device)
        assert_equal(Problem(q, k, v, None, terms, 0.2, 0.0))
    finally:
        cuda._chosen.cache_clear()
        cuda._PLANS.clear()

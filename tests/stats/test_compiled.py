"""`observe()` under `torch.compile(fullgraph=True)`: one graph, both ways, with eager figures.

In a fresh process, as no compiler looks into the shape checks of a test run.
"""

from __future__ import annotations

import json

import pytest

import fresh
from support import BACKENDS

SCRIPT = """
import json, sys, traceback, warnings
import torch, headwise as hw
torch.set_num_threads(1)
warnings.simplefilter("ignore")
from torch.utils.cpp_extension import get_cxx_compiler

IDS = torch.arange(22).view(2, 11) * 7 % 5
WEIGHT = torch.linspace(-1, 1, 8 * 30).view(8, 30)
BIAS = torch.linspace(-3, 3, 6 * 7 * 11).view(6, 7, 11).cos()
ALL = [
    hw.LSE(), hw.Entropy(), hw.MaxLogit(), hw.Sink(), hw.Map(3), hw.Received(),
    hw.Mass(hw.First()), hw.Mass(hw.First(3), name="first 3"), hw.Mass(hw.Previous()),
    hw.Mass(hw.Self()), hw.Mass(hw.At(1)), hw.Mass(hw.SameToken(IDS)),
    hw.Mass(hw.Induction(IDS)), hw.Mass(hw.Window(3)), hw.Distance(spread=True, absolute=True),
    hw.TopKeys(3), hw.OffsetHistogram(4, ahead=True), hw.Similarity(4), hw.OutputNorm(WEIGHT),
    hw.Segments({"few": (0, 2), "others": [(2, 3), (4, 9)]}),
    hw.Norms(), hw.MaxLogit(above=0.5),
]
KINDS = {x for name in hw.__all__ if hasattr(x := getattr(hw, name), "define")}
assert {type(statistic) for statistic in ALL} == KINDS - {hw.Statistic}, "one is not compiled"
FEW = [hw.Entropy(), hw.MaxLogit(), hw.Mass(hw.Previous()), hw.Distance()]
DOCUMENTS = hw.Documents(torch.arange(11) // 4)
PADDING = hw.Padding(torch.tensor([4, 11]))
SINKS = torch.linspace(-1, 1, 6)
CASES = {
    "native: causal": (ALL, "native", dict(mask=hw.Causal()), {}),
    "native: documents": (FEW, "native", dict(mask=hw.Causal() & DOCUMENTS, sinks=SINKS), {}),
    "native: bias": ([hw.Entropy(), hw.Received(), hw.Map(3)], "native",
                     dict(mask=hw.Bias(BIAS) & PADDING), {}),
    "sdpa: window, sinks": (ALL, "sdpa", dict(mask=hw.Window(4) & PADDING, sinks=SINKS), {}),
    "sdpa: dynamic": (FEW[:2], "sdpa", dict(mask=hw.Causal()), dict(dynamic=True)),
    "sdpa: drawn": (FEW[:2], "sdpa", dict(queries=3, seed=5, gradients=False), {}),
    "sdpa: named": (FEW[1:3], "sdpa", dict(queries=[1, 4, -1], output=False), {}),
    "blocked: softcap": (FEW, "blocked", dict(mask=hw.ALiBi() & hw.Causal(), softcap=5.0), {}),
    "eager: dense": (FEW[:1], "eager", dict(mask=hw.Dense(BIAS > 0), gradients=False), {}),
    "auto: inductor": (FEW[:3], "auto", dict(mask=hw.Causal()), dict(backend="inductor")),
}

def loss(found):
    total = 0.0
    for name, x in sorted(found.items()):
        if x.requires_grad:
            weight = torch.linspace(-1, 2, x.numel()).view(x.shape)
            total = total + (x.masked_fill(x == -torch.inf, 0.0) * weight).sum()
    return total

def case(statistics, backend, keywords, how):
    torch._dynamo.reset()

    def f(q, k, v):
        seen = hw.observe(q, k, v, *statistics, backend=backend, **keywords)
        found = {name: seen[name] for name in seen.names} | {"lse": seen.lse}
        return found if seen.output is None else found | {"out": seen.out}

    torch.manual_seed(0)
    q, k, v = torch.randn(2, 6, 7, 5), torch.randn(2, 3, 11, 5), torch.randn(2, 3, 11, 5)
    ours, theirs = ([x.clone().requires_grad_() for x in (q, k, v)] for _ in "ab")
    graph = torch.compile(f, fullgraph=True, **{"backend": "aot_eager"} | how)
    got, want = graph(*ours), f(*theirs)
    assert sorted(got) == sorted(want)
    for name in want:
        say = lambda text, name=name: f"{name}: {text}"
        torch.testing.assert_close(got[name], want[name], rtol=1e-5, atol=1e-5, msg=say)
        assert got[name].requires_grad == want[name].requires_grad, name
    if isinstance(total := loss(want), torch.Tensor):
        total.backward(), loss(got).backward()
        for x, y in zip(ours, theirs):
            if y.grad is None:
                assert x.grad is None
            else:
                torch.testing.assert_close(x.grad, y.grad, rtol=1e-4, atol=1e-5)

try:
    compiler = bool(get_cxx_compiler()) and __import__("shutil").which(get_cxx_compiler())
except Exception:
    compiler = None
for name in json.loads(sys.argv[1]):
    said = ""
    if CASES[name][3].get("backend") == "inductor" and not compiler:
        said = "no compiler"
    else:
        try:
            case(*CASES[name])
        except Exception:
            said = traceback.format_exc()
    print(json.dumps([name, said]), flush=True)
"""

NAMES = [
    "native: causal",
    "native: documents",
    "native: bias",
    "sdpa: window, sinks",
    "sdpa: dynamic",
    "sdpa: drawn",
    "sdpa: named",
    "blocked: softcap",
    "eager: dense",
    "auto: inductor",
]
SERVED = [name for name in NAMES if name.partition(":")[0] in (*BACKENDS, "auto")]


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    """What each case said; empty where all was well."""
    done = fresh.run(SCRIPT, json.dumps(SERVED), seconds=600)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))


@pytest.mark.slow
@pytest.mark.parametrize("name", SERVED)
def test_statistics_stay_in_the_graph_of_their_call(name: str, said: dict[str, str]) -> None:
    if said[name] == "no compiler":
        pytest.skip("inductor needs a C++ compiler")
    assert said[name] == ""

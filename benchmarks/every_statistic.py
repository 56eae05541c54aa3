"""What each statistic costs, alone and together, at three lengths; and how far they reach.

    python benchmarks/every_statistic.py [--lengths 512 2048 8192] [--rounds N] [--backend NAME]
        [--only NAME …]
    python benchmarks/every_statistic.py --long

Self-attention, causal, float32, B 1, H 12, D 64, on the CPU. Contenders take turns in every round
and figures are multiples of the plain forward in the same round; equality with the definition is
asserted first. Peers take turns too where they can: PyTorch's compiled FlexAttention, materialised
weights, a second pass in blocks; where one cannot, its row says why. `--only` times some statistics
beside `attend`. `--long` takes the full set at T 32,768 in a process of its own, and 256 drawn
queries of a million keys in bfloat16: seconds and peak memory above the inputs. A run is kept in
`benchmarks/results/`, unless `--no-record`.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import headwise as hw
import recording
from headwise.core.reference import attention
from headwise.tutorial import timing
from statistic_sets import MAP, masses, singles

RESULTS = Path(__file__).parent / "results"
HEADS, DIM = 12, 64
MATERIALISED = 2048  # the longest: at 8,192 every T×T tensor would be 3 GiB
Q_K_V = tuple[Tensor, Tensor, Tensor]
Calls = dict[str, Callable[[], Any]]


def inputs(length: int, heads: int = HEADS, scale: float = 1.0) -> Q_K_V:
    """Random q, k and v; a larger `scale` of q makes peaked heads."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, heads, length, DIM)
    return scale * q, k, v


def sets(length: int) -> dict[str, list[Any]]:
    """The statistics and the groups of them that are timed."""
    cheap = [hw.LSE(), *masses()]
    return singles(length) | {
        "Norms": [hw.Norms()],
        "LSE, masses": cheap,
        "LSE, masses, entropy, distance": [*cheap, hw.Entropy(), hw.Distance()],
        "… and received": [*cheap, hw.Entropy(), hw.Distance(), hw.Received()],
        "the full set": full_set(length),
    }


def full_set(length: int) -> list[Any]:
    """Every statistic there is, but those of sinks and norms."""
    ids = torch.randint(0, max(2, length // 4), (length,), generator=torch.Generator())
    return [
        hw.LSE(),
        hw.Entropy(),
        hw.MaxLogit(),
        hw.Distance(spread=True),
        hw.Map(),
        hw.Mass(hw.First()),
        hw.Mass(hw.Previous()),
        hw.Mass(hw.Self()),
        hw.Mass(hw.SameToken(ids)),
        hw.Mass(hw.Induction(ids)),
        hw.Mass(hw.Window(128)),
        hw.TopKeys(),
        hw.Received(),
        hw.OffsetHistogram(),
        hw.Similarity(),
        hw.OutputNorm(),
    ]


def materialised(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
    """LSE, masses, entropy, distance and received from the T×T matrix, as one would write them."""
    length = q.shape[2]
    scores = (q @ k.mT) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -torch.inf)
    return _figures(scores, 0) | {"out": scores.softmax(-1) @ v}


def two_pass(q: Tensor, k: Tensor, v: Tensor, rows: int = 128) -> dict[str, Tensor]:
    """The fused call, and once more through the scores in blocks of rows for the figures."""
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    length, parts = q.shape[2], []
    for start in range(0, length, rows):
        stop = min(start + rows, length)
        scores = (q[:, :, start:stop] @ k[:, :, :stop].mT) * q.shape[-1] ** -0.5
        later = torch.arange(stop) > torch.arange(start, stop)[:, None]
        figures = _figures(scores.masked_fill(later, -torch.inf), start)
        figures["received"] = torch.nn.functional.pad(figures["received"], (0, length - stop))
        parts.append(figures)
    joined = {
        name: torch.cat([part[name] for part in parts], dim=2)
        for name in parts[0]
        if name != "received"
    }
    return joined | {"received": sum(part["received"] for part in parts), "out": out}  # type: ignore[dict-item]


def _figures(scores: Tensor, start: int) -> dict[str, Tensor]:
    weights = scores.softmax(-1)
    i = torch.arange(start, start + scores.shape[2])
    j = torch.arange(scores.shape[3])
    return {
        "lse": scores.logsumexp(-1),
        "entropy": torch.special.entr(weights).sum(-1),
        "first": weights[..., 0],
        "previous": torch.where(j == i[:, None] - 1, weights, 0.0).sum(-1),
        "self": torch.where(j == i[:, None], weights, 0.0).sum(-1),
        "distance": (weights * (i[:, None] - j)).sum(-1),
        "received": weights.sum(2),
    }


def flex(q: Tensor, k: Tensor, v: Tensor) -> tuple[Calls, dict[str, str]]:
    """What compiled FlexAttention gives on these, as calls; and why it does not, for the rest.

    It has LSE and largest logits as auxiliary outputs, and whatever is linear in P as columns of
    the values.
    """
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

    length = q.shape[2]
    causal = create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, device="cpu")
    torch._dynamo.reset()  # shapes of another length would be compiled as one that varies
    compiled = torch.compile(flex_attention, fullgraph=True, dynamic=False)
    call: Any = partial(compiled, q, k, block_mask=causal)
    j = torch.arange(length)
    position = j.float()[:, None].expand(*v.shape[:2], length, 1)
    block = torch.nn.functional.one_hot(j * MAP // length, MAP).float().expand(*v.shape[:3], MAP)

    def beside(columns: Tensor) -> Tensor:
        return call(torch.cat([v, columns], dim=-1))[..., v.shape[-1] :]

    def mean_rows() -> Tensor:
        return torch.stack([rows.mean(2) for rows in beside(block).tensor_split(MAP, dim=2)], dim=2)

    def largest() -> Tensor:
        return call(v, return_aux=AuxRequest(max_scores=True))[1].max_scores.amax(-1)

    calls: Calls = {
        "FlexAttention": lambda: call(v),
        "FlexAttention, distance": lambda: j - beside(position)[..., 0],
        f"FlexAttention, Map({MAP})": mean_rows,
        "FlexAttention, LSE": lambda: call(v, return_aux=AuxRequest(lse=True))[1].lse,
        "FlexAttention, largest logit": largest,
    }
    refused = {}
    for name, work in calls.items():
        try:
            with torch.no_grad():
                work()
        except (NotImplementedError, RuntimeError) as error:  # the compiler's errors are the latter
            refused[name] = why(error)
    return {name: work for name, work in calls.items() if name not in refused}, refused


def why(error: Exception) -> str:
    """The reason in what PyTorch's compiler says of an error, which it wraps in lines of its own.

    >>> why(RuntimeError("A trace: NotImplementedError: `lse` is not there yet.\\n  args …"))
    '`lse` is not there yet.'
    >>> why(RuntimeError("Observed\\n raised NotImplementedError('No maxima.')\\n"))
    'No maxima.'
    """
    found = re.search(r"NotImplementedError(?:: |\(')(.*?)(?:'\))?$", str(error), re.MULTILINE)
    return found[1] if found else str(error).strip().splitlines()[0]


def assert_equal() -> None:
    """Every contender's figures against the definition in float64."""
    q, k, v = inputs(300)
    wanted = attention(q.double(), k.double(), v.double(), mask=hw.Causal())
    for statistic in full_set(300):
        seen = hw.observe(q, k, v, statistic, mask=hw.Causal())
        for name, want in statistic.define(wanted).items():
            if name != "top_keys":
                torch.testing.assert_close(
                    seen[name].double(), want, rtol=1e-3, atol=1e-3, msg=name
                )
    group = sets(300)["… and received"]
    seen = hw.observe(q, k, v, *group, hw.Map(MAP), mask=hw.Causal())
    for other in (materialised, two_pass):
        for name, got in other(q, k, v).items():
            want = seen.out if name == "out" else seen[name]
            torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3, msg=name)
    theirs = {
        "FlexAttention": seen.out,
        "FlexAttention, distance": seen["distance"],
        "FlexAttention, LSE": seen.lse,
        "FlexAttention, largest logit": hw.observe(q, k, v, hw.MaxLogit(), mask=hw.Causal())[
            "max_logit"
        ],
    }
    with torch.no_grad():
        for name, work in flex(q, k, v)[0].items():
            if name in theirs:
                torch.testing.assert_close(work(), theirs[name], rtol=1e-3, atol=1e-3, msg=name)


def contenders(
    length: int, backend: str = "auto", only: Sequence[str] = ()
) -> tuple[Calls, dict[str, str]]:
    """Everything that takes a turn at one length; and what does not, with the reason."""
    q, k, v = inputs(length)
    keywords: dict[str, Any] = {"mask": hw.Causal(), "backend": backend}
    found: Calls = {"attend": partial(hw.attend, q, k, v, **keywords)}
    for name, statistics in sets(length).items():
        found[name] = partial(hw.observe, q, k, v, *statistics, **keywords)
    if only:
        return {name: found[name] for name in ("attend", *only)}, {}
    peaked = inputs(length, scale=6.0)
    found["MaxLogit, peaked heads"] = partial(hw.observe, *peaked, hw.MaxLogit(), **keywords)
    sinks = torch.zeros(HEADS)
    found["Sink, of learned sinks"] = partial(
        hw.observe, q, k, v, hw.Sink(), sinks=sinks, **keywords
    )
    group = sets(length)["… and received"]
    found["64 drawn queries of those"] = partial(
        hw.observe, q, k, v, *group, queries=64, **keywords
    )
    found["those by two passes"] = lambda: two_pass(q, k, v)
    calls, refused = flex(q, k, v)
    if length <= MATERIALISED:
        found["those from materialised weights"] = lambda: materialised(q, k, v)
    else:
        each = 4 * q.shape[1] * length**2 / 2**30
        refused["those from materialised weights"] = f"every T×T tensor would be {each:.3g} GiB"
    return found | calls, refused


def measure(
    length: int, rounds: int, backend: str, only: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Rows of one length, and their table."""
    calls, refused = contenders(length, backend, only)
    with torch.no_grad():
        taken = timing.interleaved(calls, rounds=rounds)
    rows: list[dict[str, Any]] = []
    lines = []
    for name, seconds in taken.items():
        own, beside = timing.Spread.of(seconds), timing.ratio(taken, name, "attend")
        rows.append({"length": length, "contender": name, "seconds": own, "beside_attend": beside})
        spread = f"{beside.median:.2f} ({beside.low:.2f} to {beside.high:.2f})"
        lines.append([name, f"{1e3 * own.median:.1f}", spread])
    served_by = hw.explain(*inputs(length), mask=hw.Causal()).chosen
    rows[0]["served_by"] = backend = served_by if backend == "auto" else backend
    title = f"B 1, H {HEADS}, T {length}, D {DIM}, causal, float32, backend {backend}"
    recording.show(title, ["", "ms", "× attend"], lines)
    for name, reason in refused.items():
        rows.append({"length": length, "contender": name, "refused": reason})
        print(f"{name}: {reason}")
    return rows


def resident(field: str) -> int:
    """Bytes of this process in memory now (`VmRSS`) or at most (`VmHWM`); Linux."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


def run_long(kind: str) -> None:
    """In a process of its own: prints seconds and peak bytes above the inputs."""
    small = inputs(64)
    if kind == "32k":
        q, k, v = inputs(32_768)
        statistics = full_set(32_768)
        run = partial(hw.observe, q, k, v, *statistics, mask=hw.Causal())
        hw.observe(*small, *full_set(64), mask=hw.Causal())
    else:
        length = 1 << 20
        torch.manual_seed(0)
        q, k = (torch.randn(1, HEADS, length, DIM, dtype=torch.bfloat16) for _ in range(2))
        chosen = [hw.LSE(), hw.Entropy(), hw.Distance(), hw.Mass(hw.First()), hw.Received()]
        keywords: dict[str, Any] = {"mask": hw.Causal(), "queries": 256, "output": False}
        run = partial(hw.observe, q, k, k, *chosen, **keywords)
        hw.observe(*small, *chosen, mask=hw.Causal(), queries=8, output=False)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before, start = resident("VmRSS"), time.perf_counter()
    with torch.no_grad():
        run()
    print(time.perf_counter() - start, resident("VmHWM") - before)


def long() -> list[dict[str, Any]]:
    """The long calls, each in a fresh process."""
    rows = []
    for kind, what in (
        ("32k", "full set, T 32,768"),
        ("million", "256 of 1,048,576 queries, bf16"),
    ):
        done = subprocess.run(
            [sys.executable, __file__, "--run-long", kind],
            capture_output=True,
            text=True,
            check=True,
        )
        seconds, peak = map(float, done.stdout.split())
        rows.append({"call": what, "seconds": seconds, "peak_bytes_above_inputs": peak})
        print(f"{what}: {seconds:.1f} s, {peak / 2**20:,.0f} MiB above the inputs")
    return rows


def main() -> None:
    """Measure, print the tables, and keep the run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--only", nargs="+", default=[], choices=sets(512), metavar="NAME")
    parser.add_argument("--long", action="store_true")
    parser.add_argument("--no-record", action="store_true")
    parser.add_argument("--run-long", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.run_long:
        run_long(chosen.run_long)
        return
    assert_equal()
    settings: dict[str, Any] = {"rounds": chosen.rounds}
    if chosen.long:
        rows = long()
    else:
        settings |= {"backend": chosen.backend} | ({"only": chosen.only} if chosen.only else {})
        rows = [
            row
            for length in chosen.lengths
            for row in measure(length, chosen.rounds, chosen.backend, chosen.only)
        ]
    if not chosen.no_record:
        name = "every_statistic_long" if chosen.long else "every_statistic"
        print(f"kept in {recording.record(name, settings, rows, RESULTS)}")


if __name__ == "__main__":
    main()

"""Measure headwise on a GPU: the CUDA tests, then time, kernels and memory, in one run.

    make gpu                                  # everything, in at most eight minutes
    make gpu PARTS=observe,watch SECONDS=150  # some parts, in a time budget
    PYTHONPATH=src python3 benchmarks/gpu.py --dry  # tiny sizes on the CPU: does the script run?

Without CUDA every run is a dry one. Neither a network nor transformers is needed: without it the
models are headwise's own GPT. Contenders take turns in every round; equality is asserted before the
clock starts. Rows hold medians, quartiles and ratios round by round; `beside` is the contender that
a ratio refers to. A contender that fails is a row with the reason, and the others go on. The run is
written after each row, into `$OUT` where that is set, else into benchmarks/results/.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise as hw
import recording
from headwise.backends import Call, consider
from headwise.tutorial import timing
from observe import materialised

ROOT = Path(__file__).parents[1]
TESTS = "tests/backends/test_cuda.py"
SIZES = [(4, 12, t, 64) for t in (2048, 8192, 32768)] + [(4, 12, t, 128) for t in (2048, 8192)]
FITS = 2048  # the longest context of which the T×T matrix is made
NEVER = 10**9

MASSES = [hw.Mass(hw.First()), hw.Mass(hw.Previous()), hw.Mass(hw.Self())]
ENTROPY = [hw.Entropy(), *MASSES]
SIX = [*ENTROPY, hw.MaxLogit(), hw.Distance()]

Work = Callable[[], Any]


@dataclass
class Run:
    """One run: where it computes, how long it may take, and its rows as they come."""

    dry: bool
    ends: float
    path: Path
    rows: list[dict[str, Any]] = field(default_factory=list)
    limits: Mapping[str, float] = field(default_factory=dict)

    @property
    def device(self) -> str:
        return "cpu" if self.dry else "cuda"

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.dry else torch.bfloat16

    def left(self) -> float:
        """Return the seconds until the run must end."""
        return self.ends - time.monotonic()

    def row(self, part: str, **found: Any) -> None:
        """Print a row, and write the run with it."""
        self.rows.append({"part": part, **found})
        shown = (f"{name} {recording.rounded(x, 4)}" for name, x in found.items())
        print(f"{part}: {', '.join(shown)}", flush=True)
        run = {
            "benchmark": "gpu",
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": timing.machine(),
            "limits": self.limits,
            "settings": {"device": self.device, "dtype": str(self.dtype), "dry": self.dry},
            "rows": self.rows,
        }
        recording.write_run(self.path, run)

    def compare(
        self, part: str, works: Mapping[str, Work], within: float, least: float = 0.02, **about: Any
    ) -> None:
        """Time contenders by turns, the first of which the others are compared to."""
        works = {name: work for name, work in works.items() if self._runs(part, name, work, about)}
        if not works:
            return
        rounds, least = (2, 0.0) if self.dry else (9, least)
        taken = timing.interleaved(works, rounds, least, within=max(1.0, min(within, self.left())))
        beside = next(iter(works))
        for name, seconds in taken.items():
            found = {"seconds": timing.Spread.of(seconds), "beside": beside}
            self.row(
                part, **about, what=name, **found, ratio=timing.ratio(taken, name, beside),
                rounds=len(seconds),
            )  # fmt: skip

    def _runs(self, part: str, name: str, work: Work, about: Mapping[str, Any]) -> bool:
        """Run a contender once, which compiles its kernels; tell of its failure in a row."""
        try:
            work()
            sync()
        except Exception as error:  # the others are measured all the same
            self.row(part, **about, what=name, failed=f"{type(error).__name__}: {error}"[:300])
            return False
        return True


def sync() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def qkv(run: Run, batch: int, heads: int, length: int, dim: int) -> list[Tensor]:
    """Return random q, k and v."""
    torch.manual_seed(0)
    return [*torch.randn(3, batch, heads, length, dim, device=run.device, dtype=run.dtype)]


def read(seen: hw.stats.Seen) -> hw.stats.Seen:
    """Read every metric, which is computed only then."""
    for name in seen.readings.known:
        _ = seen[name]
    return seen


# ── parts ───────────────────────────────────────────────────────────────────────────────────────


def tests(run: Run) -> None:
    """The tests that need CUDA, each against the definition in float64."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", TESTS]
    if importlib.util.find_spec("xdist"):  # most of the time is Triton's compiler
        command += ["-n", str(min(8, os.cpu_count() or 1))]
    if run.dry:
        command.append("--collect-only")
    began, limit = time.monotonic(), max(30.0, min(150.0, run.left() / 2))
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=limit, check=False
        )
        lines = (done.stdout.strip() or done.stderr.strip() or "no output").splitlines()
        found: dict[str, Any] = {"said": lines[-1]}
        if done.returncode:
            found["failed"] = "\n".join(lines[-30:])
    except subprocess.TimeoutExpired:
        found = {"said": f"cut off after {limit:.0f} s, with no failure until then or none seen"}
    run.row("tests", **found, seconds=time.monotonic() - began)


def ceilings(run: Run) -> None:
    """What the card can do: products, copies, and the time of an empty launch."""
    run.limits = {} if run.dry else timing.limits(run.device)
    x = torch.zeros(1, device=run.device)
    seconds = min(timing.interleaved({"add": lambda: x.add_(1)}, 3, 0.01)["add"])
    run.row("ceilings", **run.limits, launch_us=1e6 * seconds)


def observe(run: Run) -> None:
    """Statistics beside the plain call, by length and head dimension."""
    sizes = [(1, 2, 64, 16)] if run.dry else SIZES
    for batch, heads, length, dim in sizes:
        if run.left() < 20:
            return
        q, k, v = qkv(run, batch, heads, length, dim)
        assert_equal(run, q, k, v)
        works = calls(q, k, v)
        works |= flex(run, q, k, v)
        if length <= FITS:
            works["materialized weights"] = lambda q=q, k=k, v=v: materialised(q, k, v)
        shape = f"B {batch}, H {heads}, T {length}, D {dim}, causal"
        run.compare("observe", works, 15, shape=shape)


def calls(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Work]:
    """Return the calls of the grid; each reads its metrics."""
    mask, few = hw.Causal(), min(64, q.shape[2] // 4)

    def observed(*chosen: hw.Statistic, **options: Any) -> Work:
        return lambda: read(hw.observe(q, k, v, *chosen, mask=mask, **options))

    works: dict[str, Work] = {
        "attend": lambda: hw.attend(q, k, v, mask=mask),
        "F.scaled_dot_product_attention": lambda: F.scaled_dot_product_attention(
            q, k, v, is_causal=True
        ),
        "LSE": observed(hw.LSE()),
        "max logit": observed(hw.MaxLogit()),
        "entropy and three masses": observed(*ENTROPY),
        "six statistics": observed(*SIX),
        "received": observed(hw.Received()),
        "six statistics and received": observed(*SIX, hw.Received()),
        f"entropy and three masses, {few} sampled queries": observed(*ENTROPY, queries=few),
        f"six statistics, {few} sampled queries": observed(*SIX, queries=few),
    }
    choices = consider(Call.of(q, k, v, mask=mask))
    if any(choice.name == "native" and not choice.reasons for choice in choices):
        most = hw.LSE(), hw.MaxLogit(), *ENTROPY
        works |= {
            "native: attend": lambda: hw.attend(q, k, v, mask=mask, backend="native"),
            "native: LSE, max logit, entropy, masses": observed(*most, backend="native"),
            "native: six statistics": observed(*SIX, backend="native"),
        }
    return works


def flex(run: Run, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Work]:
    """Return FlexAttention with log-sum-exp and row maxima, where this PyTorch has them."""
    try:
        from torch.nn.attention.flex_attention import (
            AuxRequest,
            create_block_mask,
            flex_attention,
        )
    except ImportError:
        return {}
    if run.dry:  # its CPU kernel takes a minute to compile
        return {}
    n = q.shape[2]
    blocks = create_block_mask(lambda b, h, i, j: i >= j, None, None, n, n, device=run.device)
    work: Any = torch.compile(flex_attention)
    both = AuxRequest(lse=True, max_scores=True)
    return {
        "FlexAttention": lambda: work(q, k, v, block_mask=blocks),
        "FlexAttention, LSE and maxima": lambda: work(q, k, v, block_mask=blocks, return_aux=both),
    }


def assert_equal(run: Run, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Hold what is timed to the definition in float64, at two heads of the first tokens."""
    mask, cut = hw.Causal(), min(q.shape[2], 2048)
    assert torch.equal(hw.observe(q, k, v, *SIX, mask=mask).out, hw.attend(q, k, v, mask=mask))
    q, k, v = (x[:1, :2, :cut] for x in (q, k, v))
    exact = materialised(q.double(), k.double(), v.double())
    seen = hw.observe(q, k, v, *SIX, mask=mask)
    near = 1e-4 if run.dtype == torch.float32 else 2e-2
    for name, want in exact.items():
        got = {"out": seen.out, "lse": seen.lse}.get(name)
        got = seen[name] if got is None else got
        torch.testing.assert_close(got.to(want), want, rtol=near, atol=near, msg=name)


def host(run: Run) -> None:
    """Python's time and the kernels of a call, while nobody waits for the GPU."""
    q, k, v = qkv(run, 1, 12, 256, 64) if not run.dry else qkv(run, 1, 2, 32, 16)
    lengths = torch.tensor([q.shape[2] - 3], device=run.device)

    def observed(mask: hw.Mask, **options: Any) -> hw.stats.Seen:
        return hw.observe(q, k, v, *SIX, mask=mask, **options)

    causal, padded = hw.Causal(), hw.Causal() & hw.Padding(lengths)
    model, ids = build(run, q.shape[2])
    works: dict[str, Work] = {
        "F.scaled_dot_product_attention": lambda: F.scaled_dot_product_attention(
            q, k, v, is_causal=True
        ),
        "attend": lambda: hw.attend(q, k, v, mask=causal),
        "six statistics, not read": lambda: observed(causal),
        "six statistics, read": lambda: read(observed(causal)),
        "six statistics, padding, read": lambda: read(observed(padded)),
        "six statistics, 16 sampled, read": lambda: read(observed(causal, queries=16)),
        "table() of six statistics": lambda: observed(causal).table(),
        "the model": lambda: forward(model, ids),
        "watch, six statistics": lambda: watched(model, ids, *SIX),
        "watch, six statistics, 16 sampled": lambda: watched(model, ids, *SIX, queries=16),
    }
    for name, work in works.items():
        for _ in range(3):
            work()
        turns = []
        for _ in range(2 if run.dry else 7):
            sync()
            start = time.perf_counter()
            for _ in range(2 if run.dry else 10):
                work()
            turns.append((time.perf_counter() - start) / (2 if run.dry else 10) * 1e6)
        run.row("host", what=name, microseconds=timing.Spread.of(turns), **profiled(work))


def profiled(work: Work) -> dict[str, int]:
    """Count the kernels, copies and waits of a call; nothing without CUDA."""
    if not torch.cuda.is_available():
        return {}
    from torch.profiler import ProfilerActivity, profile

    sync()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        work()
    events = found.events() or []
    names = [event.name for event in events]
    on_gpu = [e for e in events if str(e.device_type).endswith("CUDA")]
    return {
        "kernels": sum(not e.name.startswith(("Memcpy", "Memset")) for e in on_gpu),
        "copies": sum("cudaMemcpyAsync" in name for name in names),
        "waits": sum("StreamSynchronize" in name for name in names),
    }


def build(run: Run, length: int, layers: int = 12) -> tuple[nn.Module, Tensor]:
    """Return a model of GPT-2 small's size with random weights, and tokens for it."""
    torch.manual_seed(0)
    vocabulary, sizes = (64, (2, 2, 32)) if run.dry else (1024, (layers, 12, 768))
    sizes = dict(zip(("n_layer", "n_head", "n_embd"), sizes, strict=True))
    sizes |= {"n_positions": length + 64, "vocab_size": vocabulary}
    off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    try:
        from transformers import GPT2Config, GPT2LMHeadModel
    except ImportError:
        from headwise.models import GPT, GPTConfig

        model: Any = GPT(GPTConfig(**sizes, **off))
    else:
        chosen: dict[str, Any] = {"attn_implementation": "sdpa"}
        config = GPT2Config(**sizes, **off, **chosen, bos_token_id=0, eos_token_id=0)
        model = GPT2LMHeadModel(config)
    ids = torch.randint(vocabulary, (1, length), generator=torch.Generator().manual_seed(1))
    return model.to(run.device, run.dtype).eval(), ids.to(run.device)


def forward(model: Any, ids: Tensor) -> Tensor:
    """Run a model without gradients; return its logits."""
    with torch.no_grad():
        found = model(ids, use_cache=False) if is_transformers(model) else model(ids)
    return getattr(found, "logits", found)


def is_transformers(model: Any) -> bool:
    """Return True if the model, compiled or not, is one of transformers."""
    return type(getattr(model, "_orig_mod", model)).__module__.startswith("transformers")


def watched(model: Any, ids: Tensor, *statistics: hw.Statistic, **options: Any) -> Any:
    """Run a model without gradients, watched; return what was seen."""
    with hw.watch(model, *statistics, **options) as seen:
        forward(model, ids)
    return seen


def compiled(run: Run, model: nn.Module) -> Any:
    """Return the model compiled; in a dry run by Dynamo alone."""
    return torch.compile(model, backend="eager") if run.dry else torch.compile(model)


def watch(run: Run) -> None:
    """Watching a model of GPT-2 small's size, as it is written and compiled."""
    length = 32 if run.dry else 1024
    few = min(64, length // 4)
    for way in ("eager", "compiled"):
        model, ids = build(run, length)
        called = model if way == "eager" else compiled(run, model)
        usual = forward(called, ids)
        with hw.watch(called, *SIX) as seen:
            equal = torch.equal(forward(called, ids), usual)
        assert equal or way == "compiled", "watching changed the output"
        name = type(model).__name__
        run.row("watch", model=name, way=way, equal=equal, layers=len(list(seen)))
        works: dict[str, Work] = {
            "plain": lambda m=called, x=ids: forward(m, x),
            "watch, entropy and masses": lambda m=called, x=ids: watched(m, x, *ENTROPY),
            "watch, six statistics": lambda m=called, x=ids: watched(m, x, *SIX),
            f"watch, {few} sampled": lambda m=called, x=ids: watched(m, x, *SIX, queries=few),
            "watch, running": lambda m=called, x=ids: watched(m, x, *SIX, running=True),
            "watch and table()": lambda m=called, x=ids: watched(m, x, *SIX).table(),
        }
        run.compare("watch", works, 20, model=name, way=way, T=length)


def train(run: Run) -> None:
    """A step of training, monitored and not, as it is written and compiled."""
    length, batch = (32, 2) if run.dry else (1024, 8)
    settings = {"plain": None, "monitored, not recorded": NEVER, "every=1": 1}
    for way in ("eager", "compiled"):
        about = {"way": way, "B": batch, "T": length}
        if way == "compiled" and run.left() < 90:
            run.row("train", **about, skipped="no time is left to compile")
            return
        steps = {
            name: training(run, length, batch, way == "compiled", every)
            for name, every in settings.items()
        }
        losses = {name: [step().item() for _ in range(2)] for name, step in steps.items()}
        run.row("train", **about, losses=losses)  # the first step of each monitor is recorded
        equal = all(found == losses["plain"] for found in losses.values())
        assert equal or way == "compiled", "monitoring changed the losses"
        run.compare("train", steps, 20, 0.0, **about)
        found = {
            row["what"]: row
            for row in run.rows
            if row["part"] == "train" and row.get("way") == way and "what" in row
        }
        ratios = [
            found[name]["ratio"].median for name in settings if "ratio" in found.get(name, ())
        ]
        if len(ratios) == len(settings):
            computed = (99 * ratios[1] + ratios[2]) / 100
            run.row("train", **about, what="every=100, computed from both", ratio=computed)


def training(
    run: Run, length: int, batch: int, whole: bool, every: int | None
) -> Callable[[], Tensor]:
    """Return a step of a training of its own, with a monitor or none; it gives the loss."""
    model, ids = build(run, length)
    x = ids.repeat(batch, 1)
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-4, fused=not run.dry)
    called: Any = compiled(run, model) if whole else model
    monitor = None
    if every is not None:
        monitor = hw.Monitor(called, optimizer, every=every, statistics=SIX, queries=None, rules=())
        monitor.pause()  # while others take their turns

    def step() -> Tensor:
        if monitor is not None:
            monitor.resume()
        found = called(x, use_cache=False) if is_transformers(model) else called(x)
        logits = getattr(found, "logits", found)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), x[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if monitor is not None:
            monitor.pause()
        return loss.detach()

    return step


def decode(run: Run) -> None:
    """Tokens one by one with a key-value cache, watched and not."""
    length, tokens = (24, 4) if run.dry else (512, 24)
    model, ids = build(run, length)
    if not is_transformers(model):
        run.row("decode", skipped="transformers is not installed")
        return
    decoder: Any = model

    def work(**options: Any) -> None:
        past = decoder(ids, use_cache=True).past_key_values
        for _ in range(tokens):
            past = decoder(ids[:, -1:], past_key_values=past, use_cache=True).past_key_values

    def seen(**options: Any) -> None:
        with hw.watch(model, *ENTROPY, **options):
            work()

    with torch.no_grad():
        works = {"plain": work, "watch": seen, "watch, running": lambda: seen(running=True)}
        run.compare("decode", works, 20, 0.0, prompt=length, tokens=tokens)


def memory(run: Run) -> None:
    """Peak memory above what was held before the call."""
    for length in (64,) if run.dry else (2048, 8192, 32768):
        q, k, v = qkv(run, 1 if run.dry else 4, 2 if run.dry else 12, length, 64)
        works = calls(q, k, v)
        if length <= FITS:
            works["materialized weights"] = lambda q=q, k=k, v=v: materialised(q, k, v)
        for name, work in works.items():
            work()
            peak = timing.peak_bytes(work, run.device)
            run.row("memory", T=length, what=name, mebibytes=peak / 2**20)


def graphs(run: Run) -> None:
    """What a CUDA graph can hold, and the time of its replay: the GPU's own, without Python's."""
    if run.dry:
        run.row("graphs", skipped="needs CUDA")
        return
    for length in (512, 2048, 8192):
        works = calls(*qkv(run, 4, 12, length, 64))
        captured = {name: replay for name, work in works.items() if (replay := capture(run, work))}
        run.compare("graphs", captured, 6, T=length)


def capture(run: Run, work: Work) -> Work | None:
    """Return the replay of a call in a CUDA graph; tell in a row why there is none."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    try:
        with torch.cuda.stream(stream):
            for _ in range(3):
                work()
        sync()
        with torch.cuda.graph(graph):
            work()
    except Exception as error:
        sync()
        run.row("graphs", failed=f"{type(error).__name__}: {error}"[:200])
        return None
    return graph.replay


PARTS = {
    part.__name__: part
    for part in (tests, ceilings, observe, host, graphs, watch, train, memory, decode)
}
"""In order of worth: a run that ends early has the first ones."""


def main(given: list[str] | None = None) -> int:
    """Run the parts; 1 if a test or a part failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--seconds", type=float, default=460.0)
    chosen = parser.parse_args(given)
    names = chosen.parts.split(",")
    if unknown := set(names) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    dry = chosen.dry or not torch.cuda.is_available()
    folder = Path(os.environ.get("OUT") or Path(__file__).parent / "results")
    path = folder / f"gpu-{'dry-' * dry}{datetime.now(UTC):%Y%m%dT%H%M%SZ}.json"
    run = Run(dry, time.monotonic() + chosen.seconds, path)
    failed = False
    for name in names:
        if run.left() < 10:
            run.row(name, skipped="no time is left")
            continue
        try:
            PARTS[name](run)
        except Exception as error:
            failed = True
            run.row(name, failed=f"{type(error).__name__}: {error}"[:500])
    print(f"kept in {path}")
    return int(failed or any(row["part"] == "tests" and "failed" in row for row in run.rows))


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    sys.exit(main())

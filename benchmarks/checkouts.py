"""Is this checkout as fast as another one? Both take turns, each in a process of its own.

    git worktree add ../before COMMIT        # and compile its kernel
    python benchmarks/checkouts.py ../before [--only PART] [--rounds N] [--no-record]

Layer, fused calls, every statistic, watching, small calls: what both checkouts can do, by public
names that both have. A case is prepared in both processes, their results are compared, and only
then do they take turns; a speed is the other checkout's seconds over this one's, round by round.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HERE = Path(__file__).resolve()
RESULTS = HERE.parent / "results"
HEADS, DIM, WIDTH = 12, 64, 768
LEAST = 0.1
"""Seconds that a turn lasts at least."""
Case = Callable[[], list[Tensor]]


# ── what is timed, in a process of either checkout ──────────────────────────────────────────────


def cases() -> dict[str, Callable[[], Case]]:
    """What prepares each case, by its name."""
    found: dict[str, Callable[[], Case]] = {}
    for batch, length in ((4, 128), (2, 512), (1, 2048)):
        found[f"layer, {batch} × {length}"] = partial(layer, batch, length, False)
        found[f"layer, {batch} × {length}, trained"] = partial(layer, batch, length, True)
    for dtype in (torch.float32, torch.bfloat16):
        for length in (128, 512, 2048):
            for causal in (True, False):
                kind = f"{str(dtype)[6:]}, {'causal' if causal else 'full'}, {length}"
                found[f"attend, {kind}"] = partial(attend, dtype, length, causal, False)
                found[f"attend, {kind}, trained"] = partial(attend, dtype, length, causal, True)
        found[f"attend, {str(dtype)[6:]}, 1 query"] = partial(decode, dtype)
    for length in (512, 2048):
        for name in statistics(length):
            found[f"observe, {length}: {name}"] = partial(observe, length, name)
    found["watch a GPT-2"] = partial(watch, None)
    found["watch a GPT-2, 64 drawn queries"] = partial(watch, 64)
    found |= {"small attend": partial(small, False), "small observe": partial(small, True)}
    return found


def statistics(length: int) -> dict[str, list[Any]]:
    """The statistics and a group of them, by name."""
    import headwise as hw
    from statistic_sets import masses, singles

    several = [hw.LSE(), *masses(), hw.Entropy(), hw.Distance()]
    return singles(length) | {"LSE, masses, entropy, distance": several}


def layer(batch: int, length: int, trained: bool) -> Case:
    """The layer, forward alone or with its backward pass."""
    import headwise as hw

    found = hw.MultiHeadAttention(WIDTH, HEADS)
    return _call(found, torch.randn(batch, length, WIDTH), trained=trained)


def attend(dtype: torch.dtype, length: int, causal: bool, trained: bool) -> Case:
    """A fused call of two rows."""
    import headwise as hw

    q, k, v = torch.randn(3, 2, HEADS, length, DIM).to(dtype)
    mask = hw.Causal() if causal else None
    return _call(lambda *qkv: hw.attend(*qkv, mask=mask), q, k, v, trained=trained)


def decode(dtype: torch.dtype) -> Case:
    """A step of a text's end: one query, many keys."""
    import headwise as hw

    q, k, v = torch.randn(3, 2, HEADS, 2048, DIM).to(dtype)
    return _call(partial(hw.attend, mask=hw.Causal()), q[:, :, -1:], k, v, trained=False)


def observe(length: int, name: str) -> Case:
    """A causal call that sees, and its figures read."""
    q, k, v = torch.randn(3, 1, HEADS, length, DIM)
    return _seen(q, k, v, statistics(length)[name])


def watch(queries: int | None) -> Case:
    """Four layers of transformers' GPT-2, watched."""
    from transformers import GPT2Config, GPT2Model

    import headwise as hw
    from statistic_sets import six

    sizes: dict[str, Any] = {"n_layer": 4, "vocab_size": 512, "attn_implementation": "sdpa"}
    model = GPT2Model(GPT2Config(bos_token_id=0, eos_token_id=0, **sizes)).eval()
    ids = torch.randint(512, (1, 1024))

    def run() -> list[Tensor]:
        with torch.no_grad(), hw.watch(model, *six(), queries=queries) as seen:
            out = model(ids, use_cache=False).last_hidden_state
        return [out, *(seen[module]["entropy"] for module in seen.modules)]

    return run


def small(sees: bool) -> Case:
    """So small a call that only Python counts."""
    import headwise as hw
    from statistic_sets import six

    q, k, v = torch.randn(1, 4, 1, 32), *torch.randn(2, 1, 4, 64, 32)
    if sees:
        return _seen(q, k, v, six())
    return _call(partial(hw.attend, mask=hw.Causal()), q, k, v, trained=False)


def _call(function: Callable[..., Tensor], *inputs: Tensor, trained: bool) -> Case:
    def forward() -> list[Tensor]:
        with torch.no_grad():
            return [function(*inputs)]

    def both() -> list[Tensor]:
        out = function(*inputs)
        return [out, *torch.autograd.grad(out.sum(), inputs)]

    for given in inputs:
        given.requires_grad_(trained)
    return both if trained else forward


def _seen(q: Tensor, k: Tensor, v: Tensor, wanted: list[Any]) -> Case:
    import headwise as hw

    def run() -> list[Tensor]:
        seen = hw.observe(q, k, v, *wanted, mask=hw.Causal())
        return [seen.out, *(seen[name] for name in seen.names)]

    return run


def work() -> None:
    """Serve one line at a time: prepare a case and tell its result, or call it so many times."""
    prepare, case = cases(), None
    for line in sys.stdin:
        asked = json.loads(line)
        if isinstance(asked, str):
            case = None  # so that two are never held
            torch.manual_seed(0)
            case = prepare[asked]()
            answer = [tensor.double().flatten()[:64].tolist() for tensor in case()]
        else:
            assert case is not None
            start = time.perf_counter()
            for _ in range(asked):
                case()
            answer = time.perf_counter() - start
        print(json.dumps(answer), flush=True)


# ── taking turns ────────────────────────────────────────────────────────────────────────────────


class Checkout:
    """The process of a checkout."""

    def __init__(self, folder: Path) -> None:
        if not list((folder / "src" / "headwise" / "kernels").glob("libheadwise.*")):
            raise SystemExit(f"{folder}: its kernel is not compiled; run `make` there first")
        more = {"PYTHONPATH": str(folder / "src"), "OMP_WAIT_POLICY": "passive"}
        self.process = subprocess.Popen(
            [sys.executable, str(HERE), "--work"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | more,
        )

    def ask(self, what: str | int) -> Any:
        """Ask for a case by its name, or to call it so many times."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


def turns(this: Checkout, other: Checkout, rounds: int) -> Iterator[tuple[float, float]]:
    """The seconds of both, a round at a time."""
    once = min(other.ask(1), other.ask(1))
    repeats = max(1, round(LEAST / once))
    for _ in range(rounds):
        taken = {one: one.ask(repeats) / repeats for one in random.sample([this, other], 2)}
        yield taken[this], taken[other]


def assert_equal(name: str, ours: list[list[float]], theirs: list[list[float]]) -> None:
    """Both checkouts have the same results, but for rounding."""
    error = 2e-2 if "bfloat16" in name else 1e-4
    some = slice(
        1 if "64" in name and "queries" in name else None
    )  # which queries are drawn may differ
    for one, other in zip(ours[some], theirs[some], strict=True):
        torch.testing.assert_close(
            torch.tensor(one), torch.tensor(other), rtol=error, atol=error, equal_nan=True, msg=name
        )


def main() -> None:
    """Compare two checkouts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before", type=Path, help="another checkout, its kernel compiled")
    parser.add_argument("--only", default="", help="cases whose names begin so")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--no-record", action="store_true")
    options = parser.parse_args()
    import recording
    from headwise.tutorial import timing

    this, other = Checkout(HERE.parents[1]), Checkout(options.before.resolve())
    rows, lines = [], []
    for name in (name for name in cases() if name.startswith(options.only)):
        assert_equal(name, this.ask(name), other.ask(name))
        taken = list(turns(this, other, options.rounds))
        speed = timing.Spread.of([theirs / ours for ours, theirs in taken])
        seconds = timing.Spread.of([ours for ours, _ in taken])
        rows.append({"case": name, "seconds": seconds, "speed": speed})
        lines.append([name, f"{1e3 * seconds.median:.3f}", f"{speed.median:.3f}"])
        print(*lines[-1], f"{speed.low:.3f} to {speed.high:.3f}", sep="  ", flush=True)
    recording.show("This checkout beside another", ["", "ms", "× its speed"], lines)
    if not options.no_record:
        git = ["git", "-C", str(options.before), "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
        settings = {"before": commit, "only": options.only, "rounds": options.rounds}
        recording.record("checkouts", settings, rows, RESULTS)


if __name__ == "__main__":
    work() if sys.argv[1:] == ["--work"] else main()

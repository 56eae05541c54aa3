"""What watching a model costs: GPT-2 small in size, from transformers, watched and not.

    python benchmarks/watching.py                 # both parts, about 4 minutes on two cores
    python benchmarks/watching.py --part time --rounds 21
    python benchmarks/watching.py --part memory
    python benchmarks/watching.py --part time --device cuda --dtype bfloat16 --length 1024 8192

12 layers of 12 heads, width 768, random weights, by default in float32 on the CPU,
`attn_implementation="sdpa"`; without the language-model head, which would only make the shares
smaller. All contenders take turns in every round; outputs and figures are compared before the clock
starts. Peak memory is above what was held before the call, on the CPU that of a process of its own.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import headwise as hw
import recording
from headwise.tutorial import timing

RESULTS = Path(__file__).parent / "results"
LENGTH, VOCAB = 1024, 1024
SAMPLE = 64
SET = "lse, entropy, first, previous, self"
LENGTHS = (1024, 2048, 4096, 8192)
FITS = 4096  # every layer's weights of 8,192 tokens take 36 GiB


def statistics() -> list[Any]:
    """The set that the comparison is about."""
    masses = [hw.Mass(pattern) for pattern in (hw.First(), hw.Previous(), hw.Self())]
    return [hw.LSE(), hw.Entropy(), *masses]


@dataclass(frozen=True)
class Where:
    """Where models are, and in which dtype."""

    device: str = "cpu"
    dtype: torch.dtype = torch.float32


def build(length: int, attention: str = "sdpa", layers: int = 12, where: Where = Where()) -> Any:
    """A model of GPT-2 small's size for so many tokens; the same weights for either attention."""
    from transformers import GPT2Config, GPT2Model

    torch.manual_seed(0)
    chosen: dict[str, Any] = {"attn_implementation": attention}
    config = GPT2Config(
        n_positions=length,
        vocab_size=VOCAB,
        n_layer=layers,
        bos_token_id=0,
        eos_token_id=0,
        **chosen,
    )
    model = GPT2Model(config).eval()
    with torch.no_grad():  # attention that is not even all over
        for name, weight in model.named_parameters():
            if name.endswith("attn.c_attn.weight"):
                weight.mul_(2.0)
    moved: Any = model  # its own `to` is typed as one that takes nothing
    return moved.to(where.device, where.dtype)


def ids(length: int, device: str = "cpu") -> Tensor:
    """Random tokens `[1, length]`."""
    found = torch.randint(VOCAB, (1, length), generator=torch.Generator().manual_seed(1))
    return found.to(device)


def watched(model: Any, tokens: Tensor, queries: int | None = None) -> tuple[Tensor, Any]:
    """The model's output, and what was seen on the way."""
    with hw.watch(model, *statistics(), queries=queries) as seen:
        out = model(tokens, use_cache=False).last_hidden_state
    return out, seen


def materialised(model: Any, tokens: Tensor) -> list[dict[str, Tensor]]:
    """The same figures as a user would take them from `output_attentions=True`."""
    found = model(tokens, use_cache=False, output_attentions=True)
    return [figures(weights) for weights in found.attentions]


def figures(weights: Tensor) -> dict[str, Tensor]:
    """From one layer's weights `[B, H, T, T]`; its log-sum-exp cannot be had from them."""
    return {
        "entropy": torch.special.entr(weights).sum(-1),
        "first": weights[..., 0],
        "previous": torch.nn.functional.pad(weights.diagonal(-1, -2, -1), (1, 0)),
        "self": weights.diagonal(0, -2, -1),
    }


def assert_equal(sdpa: Any, eager: Any, tokens: Tensor) -> None:
    """Watching leaves the output alone and sees what eager attention gives."""
    out, seen = watched(sdpa, tokens)
    assert torch.equal(out, sdpa(tokens, use_cache=False).last_hidden_state)
    for name, want in zip(seen.modules, materialised(eager, tokens), strict=True):
        for figure, values in want.items():
            torch.testing.assert_close(
                seen[name][figure], values, rtol=1e-4, atol=1e-4, msg=f"{name} {figure}"
            )


def measure_time(rounds: int, length: int, where: Where) -> list[dict[str, Any]]:
    """Every contender in turn; what does not fit into memory is left out."""
    exact = Where(where.device)
    few = ids(min(length, LENGTH), where.device)
    assert_equal(build(LENGTH, where=exact), build(LENGTH, "eager", where=exact), few)
    tokens = ids(length, where.device)
    sdpa, eager = build(length, where=where), build(length, "eager", where=where)
    contenders: dict[str, Callable[[], Any]] = {
        "not watched": lambda: sdpa(tokens, use_cache=False),
        f"watched: {SET}": lambda: watched(sdpa, tokens),
        f"watched: {SET}; {SAMPLE} drawn queries": lambda: watched(sdpa, tokens, SAMPLE),
    }
    if length <= FITS:
        contenders |= {
            "eager, output_attentions=True": lambda: eager(
                tokens, use_cache=False, output_attentions=True
            ),
            "eager, output_attentions=True, and the figures": lambda: materialised(eager, tokens),
        }
    taken = timing.interleaved(contenders, rounds=rounds)
    rows, lines = [], []
    for name, seconds in taken.items():
        time, beside = timing.Spread.of(seconds), timing.ratio(taken, name, "not watched")
        row = {"length": length, "contender": name, "seconds": time, "beside_not_watched": beside}
        if where.device == "cuda":
            row["peak_bytes"] = timing.peak_bytes(contenders[name], "cuda")
        rows.append(row)
        spread = f"{beside.median:.3f} ({beside.low:.3f} to {beside.high:.3f})"
        lines.append([name, f"{1e3 * time.median:.1f}", spread])
    recording.show(
        f"12 layers × 12 heads, width 768, B 1, T {length}, {where.dtype} on {where.device}",
        ["", "ms", "× not watched"],
        lines,
    )
    return rows


def measure_memory() -> list[dict[str, Any]]:
    """The peak of each contender, in a process of its own."""
    rows, lines = [], []
    for kind in ("plain", "watched", "eager"):
        lengths = [n for n in LENGTHS if kind != "eager" or n <= FITS]
        sizes = [peak(kind, n) for n in lengths]
        rows.append({"peak_bytes": kind, "lengths": lengths, "bytes": sizes})
        cells = [f"{size / 2**20:,.0f}" for size in sizes]
        lines.append([kind, *cells, *["–"] * (len(LENGTHS) - len(cells))])
    weights = [12 * 12 * n * n * 4 for n in LENGTHS]
    rows.append({"weights_alone_bytes": "eager", "lengths": list(LENGTHS), "bytes": weights})
    lines.append(["eager: the weights alone", *(f"{size / 2**20:,.0f}" for size in weights)])
    recording.show("peak memory above the model, MiB", ["T", *map(str, LENGTHS)], lines)
    return rows


def peak(kind: str, length: int) -> int:
    """Bytes that a forward adds to the peak of a fresh process."""
    command = [sys.executable, __file__, "--peak", kind, "--length", str(length)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def measure_peak(kind: str, length: int) -> int:
    """In the fresh process: run once, and say by how much the peak rose."""
    model = build(length, "eager" if kind == "eager" else "sdpa")
    run: Callable[[Tensor], Any] = {
        "plain": lambda tokens: model(tokens, use_cache=False),
        "watched": lambda tokens: watched(model, tokens),
        "eager": lambda tokens: model(tokens, use_cache=False, output_attentions=True),
    }[kind]
    with torch.no_grad():
        run(ids(64))  # what is loaded only once must not count
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
        before = resident("VmRSS")
        kept = run(ids(length))
    assert kept is not None
    return resident("VmHWM") - before


def resident(field: str) -> int:
    """Bytes of this process in memory now (`VmRSS`) or at most (`VmHWM`); Linux."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the tables, and keep the run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=("time", "memory"))
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--no-record", action="store_true")
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--length", type=int, nargs="+", default=[LENGTH])
    chosen = parser.parse_args(arguments)
    if chosen.peak:
        print(measure_peak(chosen.peak, chosen.length[0]))
        return
    rows: list[dict[str, Any]] = []
    with torch.no_grad():
        if chosen.part != "memory":
            where = Where(chosen.device, getattr(torch, chosen.dtype))
            for length in chosen.length:
                rows += measure_time(chosen.rounds, length, where)
        if chosen.part != "time" and chosen.device == "cpu":
            rows += measure_memory()
    if not chosen.no_record:
        name = "watching" if chosen.device == "cpu" else f"watching_{chosen.device}"
        settings = {"rounds": chosen.rounds, "device": chosen.device, "dtype": chosen.dtype}
        print(f"kept in {recording.record(name, settings, rows, RESULTS, chosen.device)}")


if __name__ == "__main__":
    main()

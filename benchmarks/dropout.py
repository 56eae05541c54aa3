"""What dropout costs: calls of the native kernel, and training steps of a small GPT.

    python benchmarks/dropout.py [--part calls] [--part steps] [--cpu-time] [--no-record]

Calls: forward and backward of 16 heads, or 4 from T 2048 on, D 64, with dropout 0.1 and without, by
turns. Steps: forward, loss, backward and AdamW of 6 layers, width 384, 6 heads, batch 8 × 256, of
headwise's GPT, of transformers' GPT-2 on its `sdpa` and on `headwise`, and of the same model by
hand on `F.scaled_dot_product_attention`.

Wall time with all threads by default. `--cpu-time` counts what the process itself computes, on one
thread: so that work of others on the machine costs little more than shared caches.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise as hw
import recording
from headwise.models.gpt import GPT, GPTConfig
from headwise.tutorial import timing
from headwise.tutorial.timing import Spread

RESULTS = Path(__file__).parent / "results"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LENGTHS = (256, 512, 2048)
RATE = 0.1
SIZES = {"vocab_size": 512, "n_positions": 256, "n_embd": 384, "n_layer": 6, "n_head": 6}
BATCH = 8


def call(length: int, dtype: torch.dtype, causal: bool, dropout: float) -> Any:
    """Forward and backward of one call."""
    torch.manual_seed(0)
    batch, heads = (2, 8) if length < 2048 else (1, 4)
    shape = batch, heads, length, 64
    q, k, v = (torch.randn(shape, dtype=dtype, requires_grad=True) for _ in "qkv")
    incoming, mask = torch.randn(shape, dtype=dtype), hw.Causal() if causal else None

    def work() -> None:
        out = hw.attend(q, k, v, mask=mask, dropout=dropout, backend="native")
        torch.autograd.grad(out, (q, k, v), incoming)

    return work


def calls(options: argparse.Namespace, clock: Any) -> list[dict[str, Any]]:
    """With dropout beside without, for every shape."""
    rows = []
    for name, dtype in DTYPES.items():
        for length in LENGTHS:
            for causal in (True, False):
                works = {str(p): call(length, dtype, causal, p) for p in (0.0, RATE)}
                taken = timing.interleaved(works, options.rounds, clock=clock)
                row = {"part": "calls", "dtype": name, "T": length, "causal": causal}
                row["milliseconds"] = 1e3 * Spread.of(taken["0.0"]).median
                row["ratio"] = timing.ratio(taken, str(RATE), "0.0")
                rows.append(row)
    cells = [
        [
            f"{row['dtype']} T {row['T']} {'causal' if row['causal'] else 'full'}",
            f"{row['milliseconds']:.2f}",
            f"{row['ratio'].median:.3f}",
        ]
        for row in rows
    ]
    recording.show("forward + backward", ["call", "ms without", "× with dropout"], cells)
    return rows


class ByHand(nn.Module):
    """GPT-2's block as people write it, on PyTorch's fused function."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        width = SIZES["n_embd"]
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        b, t, e = x.shape
        heads = self.qkv(self.ln_1(x)).view(b, t, 3, SIZES["n_head"], -1).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(*heads, dropout_p=self.dropout, is_causal=True)
        x = x + F.dropout(self.out(out.transpose(1, 2).reshape(b, t, e)), self.dropout)
        y = self.down(F.gelu(self.up(self.ln_2(x)), approximate="tanh"))
        return x + F.dropout(y, self.dropout)


class GPTByHand(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        width = SIZES["n_embd"]
        self.tokens = nn.Embedding(SIZES["vocab_size"], width)
        self.places = nn.Embedding(SIZES["n_positions"], width)
        self.blocks = nn.Sequential(*(ByHand(dropout) for _ in range(SIZES["n_layer"])))
        self.norm, self.dropout = nn.LayerNorm(width), dropout

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        return self.norm(self.blocks(F.dropout(x, self.dropout))) @ self.tokens.weight.T


def step(model: nn.Module) -> Any:
    """A training step."""
    torch.manual_seed(0)
    ids = torch.randint(SIZES["vocab_size"], (BATCH, SIZES["n_positions"]))
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-4)

    def work() -> None:
        logits = model(ids)
        logits = logits if isinstance(logits, Tensor) else logits.logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return work


def models(dropout: float) -> dict[str, nn.Module]:
    """The same model in four ways."""
    from transformers import GPT2Config, GPT2LMHeadModel

    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    config = GPT2Config(**SIZES, **rates, use_cache=False)
    found: dict[str, nn.Module] = {"headwise": GPT(GPTConfig(**SIZES, **rates))}  # type: ignore[arg-type]
    hw.register()
    for name in ("sdpa", "headwise"):
        model = GPT2LMHeadModel._from_config(config, attn_implementation=name)
        found[f"transformers on {name}"] = model
    return found | {"by hand": GPTByHand(dropout)}


def steps(options: argparse.Namespace, clock: Any) -> list[dict[str, Any]]:
    """A training step of every model, with dropout and without."""
    works = {f"{name}, {p}": step(model) for p in (0.0, RATE) for name, model in models(p).items()}
    taken = timing.interleaved(works, options.rounds, least=0.0, clock=clock)
    rows, cells = [], []
    for name in taken:
        beside = f"transformers on sdpa, {name.split(', ')[1]}"
        row = {"part": "steps", "model": name, "seconds": Spread.of(taken[name])}
        row["beside transformers on sdpa"] = timing.ratio(taken, name, beside)
        rows.append(row)
        cells.append(
            [
                name,
                f"{row['seconds'].median:.3f}",
                f"{row['beside transformers on sdpa'].median:.3f}",
            ]
        )
    recording.show("a training step", ["model, dropout", "s", "× transformers on sdpa"], cells)
    return rows


def main() -> None:
    """Measure, show and record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--part", choices=("calls", "steps"), action="append")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--cpu-time", action="store_true", help="the process's own, on one thread")
    parser.add_argument("--no-record", action="store_true")
    options = parser.parse_args()
    clock = time.process_time if options.cpu_time else time.perf_counter
    if options.cpu_time:
        torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for part in options.part or ("calls", "steps"):
        rows += {"calls": calls, "steps": steps}[part](options, clock)
    if not options.no_record:
        recording.record("dropout", vars(options), rows, RESULTS)


if __name__ == "__main__":
    main()

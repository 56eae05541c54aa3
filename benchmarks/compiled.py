"""What watching a compiled model costs: a training step of 4 layers of width 768 and 512 tokens.

    python benchmarks/compiled.py [--rounds N] [--tokens T] [--threads N] [--no-record]

A GPT of its own with `F.scaled_dot_product_attention`, compiled by inductor, on the CPU: a step
alone, after it was watched, while it is watched with six statistics of every query, and with a
monitor that records every step. All contenders take turns in every round; losses and gradients are
compared bit for bit before the clock starts, and nothing may be compiled while it runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters

import headwise as hw
import recording
from headwise.tutorial import timing
from statistic_sets import six

RESULTS = Path(__file__).parent / "results"
WIDTH, HEADS, LAYERS, VOCAB = 768, 12, 4, 512
PLAIN = "a step"


class Attention(nn.Module):
    """Causal self-attention by PyTorch's fused function."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(heads.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and two layers of a perceptron, each after a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.attention = nn.LayerNorm(WIDTH), Attention()
        up, down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.rest = nn.Sequential(nn.LayerNorm(WIDTH), up, nn.GELU(), down)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before(x))
        return x + self.rest(x)


class GPT(nn.Module):
    """Blocks between an embedding and logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.blocks(self.embedding(ids)))


def graphs() -> int:
    """How many graphs were compiled so far."""
    return counters["stats"]["unique_graphs"]


def contenders(tokens: int, stack: ExitStack) -> dict[str, Callable[[], list[Tensor]]]:
    """Everything that takes a turn, by the name in the table."""
    ids = torch.randint(VOCAB, (1, tokens), generator=torch.Generator().manual_seed(0))
    models = []
    for _ in range(3):
        torch.manual_seed(0)
        models.append(GPT())
    compiled: list[Any] = [torch.compile(model) for model in models]
    plain, watched, monitored = compiled
    optimizer = torch.optim.SGD(models[2].parameters(), lr=0.0)
    stack.enter_context(hw.Monitor(monitored, optimizer, every=1))

    def step(model: Any) -> list[Tensor]:
        loss = F.cross_entropy(model(ids)[0], ids[0].roll(-1))
        loss.backward()
        found = [loss.detach(), *(p.grad for p in model.parameters())]
        for p in model.parameters():
            p.grad = None
        return found

    def seen() -> list[Tensor]:
        with hw.watch(watched, *six()):
            return step(watched)

    def recorded() -> list[Tensor]:
        found = step(monitored)
        optimizer.step()
        return found

    found = {
        PLAIN: lambda: step(plain),
        "a step of a model that was watched before": lambda: step(watched),
        "a step under watch, six statistics": seen,
        "a step that a monitor records": recorded,
    }
    wanted = found[PLAIN]()
    for one in [*found.values()] * 2:
        assert all(map(torch.equal, one(), wanted))
    return found


def main() -> None:
    """Measure, print the table, and keep the run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--no-record", action="store_true")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    with ExitStack() as stack:
        steps = contenders(chosen.tokens, stack)
        before = graphs()
        taken = timing.interleaved(steps, rounds=chosen.rounds)
        assert graphs() == before
    rows, lines = [], []
    for name, seconds in taken.items():
        time, beside = timing.Spread.of(seconds), timing.ratio(taken, name, PLAIN)
        rows.append({"contender": name, "seconds": time, "beside_a_step": beside})
        spread = f"{beside.median:.3f} ({beside.low:.3f} to {beside.high:.3f})"
        lines.append([name, f"{1e3 * time.median:.1f}", spread])
    said = f"{LAYERS} layers of width {WIDTH}, T {chosen.tokens}, inductor, {chosen.threads} thread"
    recording.show(said, ["", "ms", "× a step"], lines)
    if not chosen.no_record:
        settings = {"rounds": chosen.rounds, "tokens": chosen.tokens, "threads": chosen.threads}
        print(f"kept in {recording.record('compiled', settings, rows, RESULTS)}")


if __name__ == "__main__":
    main()

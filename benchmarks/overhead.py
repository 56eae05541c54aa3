"""What Python costs: calls so small that their arithmetic does not count.

    python benchmarks/overhead.py [--rounds N] [--no-record]

B 1, H 4, T 1, S 64, D 32, float32, on the CPU, one thread, no gradients. And a GPT-2 of
transformers, 6 layers of width 32, 16 tokens: its forward, plain and watched, and its training
step, plain and recorded by a monitor. All contenders take turns in every round; equality is
asserted before the clock starts. Importing is timed in fresh processes, in turns too.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise as hw
import recording
from headwise.backends import choose
from headwise.core.call import Call
from headwise.tutorial import timing
from statistic_sets import six

RESULTS = Path(__file__).parent / "results"
HEADS, DIM, KEYS = 4, 32, 64
LAYERS, FORWARD, STEP = 6, "a GPT-2's forward", "a GPT-2's training step"
NAMES = ("entropy", "max_logit", "distance", "first", "previous", "self")
IMPORTS = {"import torch": "import torch", "import headwise": "import torch, headwise"}


class FusedLayer(nn.Module):
    """Self-attention as people write it: one projection, PyTorch's fused function, another."""

    def __init__(self) -> None:
        super().__init__()
        width = HEADS * DIM
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, HEADS, DIM).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(heads.transpose(1, 2).flatten(2))


def contenders() -> dict[str, Callable[[], Any]]:
    """Everything that takes a turn, by the name in the table."""
    torch.manual_seed(0)
    q = torch.randn(1, HEADS, 1, DIM)
    k, v = torch.randn(2, 1, HEADS, KEYS, DIM)
    x, mask = torch.randn(1, 1, HEADS * DIM), hw.Causal()
    by_hand, layer = FusedLayer(), hw.MultiHeadAttention(HEADS * DIM, num_heads=HEADS)
    state = {"qkv.weight": by_hand.qkv.weight, "qkv.bias": by_hand.qkv.bias}
    state |= {"out.weight": by_hand.out.weight, "out.bias": by_hand.out.bias}
    layer.load_state_dict(state)
    statistics, chosen = six(), choose(Call.of(q, k, v, mask=mask)).name
    plain = F.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(hw.attend(q, k, v, mask=mask), plain)
    seen = hw.observe(q, k, v, *statistics, mask=mask)
    torch.testing.assert_close(seen.out, plain)
    torch.testing.assert_close(seen["entropy"], torch.special.entr(seen.weights()).sum(-1))
    torch.testing.assert_close(layer(x, mask=mask), by_hand(x))

    def read() -> list[Tensor]:
        found = hw.observe(q, k, v, *statistics, mask=mask)
        return [found[name] for name in NAMES]

    return {
        "F.scaled_dot_product_attention": lambda: F.scaled_dot_product_attention(q, k, v),
        "attend": lambda: hw.attend(q, k, v, mask=mask),
        "attend, told the backend": lambda: hw.attend(q, k, v, mask=mask, backend=chosen),
        "observe, six statistics": lambda: hw.observe(q, k, v, *statistics, mask=mask),
        "observe, and the figures read": read,
        "a fused layer by hand": lambda: by_hand(x),
        "MultiHeadAttention": lambda: layer(x, mask=mask),
    }


def models(folder: str, stack: ExitStack) -> dict[str, Callable[[], Any]]:
    """A GPT-2 alone and seen, by the name in the table."""
    from transformers import GPT2Config, GPT2LMHeadModel  # only for this part

    sizes: dict[str, Any] = {"n_embd": 32, "n_head": 4, "n_positions": 64, "vocab_size": 64}
    ids = torch.randint(0, 64, (1, 16), generator=torch.Generator().manual_seed(0))

    def made(train: bool) -> nn.Module:
        torch.manual_seed(0)
        config = GPT2Config(n_layer=LAYERS, bos_token_id=0, eos_token_id=1, **sizes)
        return GPT2LMHeadModel(config).train(train)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
        with torch.enable_grad():
            loss = model(ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    model, seeing = made(False), []

    def watched() -> Tensor:
        with hw.watch(model) as seen:
            logits = model(ids).logits
        seeing[:] = [seen]
        return logits

    torch.testing.assert_close(watched(), model(ids).logits, rtol=0, atol=0)
    trained = [made(True) for _ in range(2)]
    optimizers = [torch.optim.SGD(one.parameters(), lr=1e-3) for one in trained]
    stack.enter_context(
        hw.Monitor(trained[1], optimizers[1], 1, history=f"{folder}/history.sqlite")
    )
    torch.manual_seed(1)
    plain = step(trained[0], optimizers[0])
    torch.manual_seed(1)
    torch.testing.assert_close(step(trained[1], optimizers[1]), plain, rtol=0, atol=0)
    return {
        FORWARD: lambda: model(ids).logits,
        "a forward under watch": watched,
        "its table": lambda: seeing[0].table(),
        STEP: lambda: step(trained[0], optimizers[0]),
        "a step that a monitor records": lambda: step(trained[1], optimizers[1]),
    }


def import_seconds(rounds: int) -> dict[str, list[float]]:
    """How long imports take in fresh processes."""
    taken: dict[str, list[float]] = {name: [] for name in IMPORTS}
    for _ in range(rounds):
        for name, line in IMPORTS.items():
            timed = f"import time; t = time.perf_counter(); {line}; print(time.perf_counter() - t)"
            done = subprocess.run(
                [sys.executable, "-c", timed], capture_output=True, text=True, check=True
            )
            taken[name].append(float(done.stdout))
    return taken


def main() -> None:
    """Measure, print the table, and keep the run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=101)
    parser.add_argument("--no-record", action="store_true")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    with torch.no_grad():
        taken = timing.interleaved(contenders(), rounds=chosen.rounds)
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            seen = timing.interleaved(models(folder, stack), rounds=chosen.rounds)
    sdpa, by_hand = "F.scaled_dot_product_attention", "a fused layer by hand"
    pairs = zip(taken["attend"], taken["attend, told the backend"], strict=True)
    choosing = timing.Spread.of([a - b for a, b in pairs])
    rows, lines = [], []
    for name, seconds in taken.items():
        beside = by_hand if name == "MultiHeadAttention" else sdpa
        time, times = timing.Spread.of(seconds), timing.ratio(taken, name, beside)
        rows.append({"contender": name, "seconds": time, "beside": beside, "ratio": times})
        spread = f"{times.median:.2f} ({times.low:.2f} to {times.high:.2f})"
        lines.append([name, f"{1e6 * time.median:.1f}", f"{spread} × {beside}"])
    above = []
    for name, seconds in seen.items():
        beside = {"a forward under watch": FORWARD, "a step that a monitor records": STEP}.get(name)
        row: dict[str, Any] = {"contender": name, "seconds": timing.Spread.of(seconds)}
        words = ""
        if beside is not None:
            pairs = zip(seconds, seen[beside], strict=True)
            row["above, seconds a layer"] = a = timing.Spread.of(
                [(x - y) / LAYERS for x, y in pairs]
            )
            words = (
                f"{1e3 * a.median:.3f} ({1e3 * a.low:.3f} to {1e3 * a.high:.3f}) ms a layer above"
            )
        rows.append(row)
        above.append([name, f"{1e3 * row['seconds'].median:.2f}", words])
    imports = import_seconds(9)
    over = [b - a for a, b in zip(*imports.values(), strict=True)]
    rows.append({"import headwise, over torch's": timing.Spread.of(over)})
    rows.append({"choosing the backend, seconds": choosing})
    recording.show(f"B 1, H {HEADS}, T 1, S {KEYS}, D {DIM}, one thread", ["", "µs", ""], lines)
    recording.show(f"GPT-2, {LAYERS} layers of width 32, T 16", ["", "ms", ""], above)
    print(f"import headwise takes {timing.Spread.of(over).median:.2f} s over import torch")
    print(f"choosing the backend takes {1e6 * choosing.median:.1f} µs of attend")
    if not chosen.no_record:
        print(f"kept in {recording.record('overhead', {'rounds': chosen.rounds}, rows, RESULTS)}")


if __name__ == "__main__":
    main()

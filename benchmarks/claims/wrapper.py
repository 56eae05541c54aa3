"""Is a module a head slow and heavy? Beside split heads that hold the same weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from headwise.systems.per_head import MultiHeadedAttentionWrapper
from headwise.systems.split import MultiHeadAttn
from headwise.tutorial import timing

from ..pages.words import prose, spread, table, threads

WRAPPER, SPLIT = "a module a head", "split heads"
WORKS = ("forward", "forward and backward")


@dataclass(frozen=True)
class Settings:
    """Sizes are (width, heads, batch, tokens); the compiled layers are timed at each too."""

    sizes: tuple[tuple[int, int, int, int], ...] = (
        (32, 4, 1, 16),
        (256, 8, 4, 64),
        (512, 8, 4, 256),
        (768, 12, 1, 1024),
    )
    rounds: int = 21
    compiled: bool = True


TOY = Settings(((6, 3, 2, 5),), 2, compiled=False)


class Joined(nn.Module):
    """The wrapper with an output projection, so that it is the same function as split heads."""

    def __init__(self, split: MultiHeadAttn) -> None:
        super().__init__()
        width, heads, dim = split.d_in, split.num_heads, split.head_dim
        self.wrapper = MultiHeadedAttentionWrapper(width, dim, split.context_length, 0.0, heads)
        self.out_proj = nn.Linear(width, width)
        self.out_proj.load_state_dict(split.out_proj.state_dict())
        with torch.no_grad():
            for number, head in enumerate(self.wrapper.heads):
                for name in ("W_query", "W_key", "W_value"):
                    rows = getattr(split, name).weight[number * dim : (number + 1) * dim]
                    getattr(head, name).weight.copy_(rows)

    def forward(self, x: Tensor) -> Tensor:
        return self.out_proj(self.wrapper(x))


def pair(width: int, heads: int, tokens: int) -> dict[str, nn.Module]:
    """The two layers with the same weights."""
    torch.manual_seed(0)
    split = MultiHeadAttn(width, width, tokens, 0.0, heads)
    return {WRAPPER: Joined(split), SPLIT: split}


def measure(settings: Settings, told: Callable[[str], None] = print) -> dict[str, Any]:
    """Counts, times and memory at each size, as written and compiled."""
    rows = []
    for width, heads, batch, tokens in settings.sizes:
        told(f"wrapper: width {width}, {heads} heads, {batch} × {tokens} tokens")
        layers = pair(width, heads, tokens)
        x, pull = torch.randn(2, batch, tokens, width)
        assert_same(layers, x, pull)
        row: dict[str, Any] = {"width": width, "heads": heads, "batch": batch, "tokens": tokens}
        row["parameters"] = {name: _size(m.parameters()) for name, m in layers.items()}
        row["buffer_bytes"] = {name: 4 * _size(m.buffers()) for name, m in layers.items()}
        for work in WORKS:
            steps = {name: step_of(layer, x, pull, work) for name, layer in layers.items()}
            row[work] = {
                "operators": {name: operators(step) for name, step in steps.items()},
                "multiply_adds": {n: timing.multiply_adds(step) for n, step in steps.items()},
                "peak_bytes": {name: timing.peak_bytes(step) for name, step in steps.items()},
                **_times(steps, settings.rounds),
            }
            if settings.compiled:
                torch.compiler.reset()
                compiled = {name: torch.compile(layer) for name, layer in layers.items()}
                steps = {name: step_of(run, x, pull, work) for name, run in compiled.items()}
                row[work]["compiled"] = _times(steps, settings.rounds)
        rows.append(row)
    return {"rows": rows}


def assert_same(layers: dict[str, nn.Module], x: Tensor, pull: Tensor) -> None:
    """Outputs and gradients of the input agree within float32's rounding."""
    found = []
    for layer in layers.values():
        leaf = x.clone().requires_grad_()
        out = layer(leaf)
        (grad,) = torch.autograd.grad(out, leaf, pull)
        found.append((out, grad))
    for mine, theirs in zip(*found, strict=True):
        error = (mine - theirs).abs().max() / theirs.abs().max()
        # sums of E and T terms in another order: eps·sqrt(E), and a margin of 4
        assert error < 4 * torch.finfo(x.dtype).eps * x.shape[-1] ** 0.5, error


def step_of(
    run: Callable[[Tensor], Tensor], x: Tensor, pull: Tensor, work: str
) -> Callable[[], None]:
    """The work as a call: without gradients, or with those of weights and input."""
    leaf = x.clone().requires_grad_()

    def forward() -> None:
        with torch.no_grad():
            run(x)

    def both() -> None:
        run(leaf).backward(pull)
        leaf.grad = None

    return forward if work == WORKS[0] else both


class _Operators(TorchDispatchMode):
    """Counts the operators that compute something; views only name what is there."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def operators(work: Callable[[], Any]) -> int:
    """How many of PyTorch's operators a call runs, views left out.

    >>> operators(lambda: (torch.ones(2, 3).T @ torch.ones(2, 5)).relu())
    4
    """
    with _Operators() as counter:
        work()
    return counter.count


def _size(tensors: Any) -> int:
    return sum(tensor.numel() for tensor in tensors)


def _times(steps: dict[str, Callable[[], None]], rounds: int) -> dict[str, Any]:
    taken = timing.interleaved(steps, rounds)
    return {
        "seconds": {name: timing.Spread.of(found) for name, found in taken.items()},
        "ratio": timing.ratio(taken, WRAPPER, SPLIT),
    }


def section(run: dict[str, Any]) -> str:
    """The claim, what was done, what came out."""
    head = [
        "width, heads, batch × tokens",
        "operators",
        "masks kept, MiB",
        "peak, MiB",
        "× time, forward",
        "× time, forward and backward",
    ]
    compiled = run["settings"]["compiled"]
    if compiled:
        head += ["compiled: forward", "forward and backward"]
    lines = []
    for row in run["rows"]:
        both = row[WORKS[1]]
        line = [
            f"{row['width']}, {row['heads']}, {row['batch']} × {row['tokens']}",
            _beside(both["operators"], 1, 0),
            _beside(row["buffer_bytes"], 2**20, 2),
            _beside(both["peak_bytes"], 2**20, 2),
            *(spread(row[work]["ratio"]) for work in WORKS),
        ]
        if compiled:
            line += [spread(row[work]["compiled"]["ratio"]) for work in WORKS]
        lines.append(line)
    return "\n\n".join(
        [
            '## "A module a head is slow and heavy"',
            prose(
                f"""**Experiment.** A loop over heads, each a module with Linears of its own, and
                split heads hold the same weights; outputs and gradients agree before the clock
                starts. The table gives loop / split heads: PyTorch's operators (views left out) in
                forward and backward, the masks that the modules keep, and the peak of memory above
                weights, their gradients and input; then the loop's time over that of split heads,
                medians of {run["settings"]["rounds"]} rounds in turns with quartiles, on
                {threads(run)}."""
            ),
            table(head, lines),
            prose(f"**Verdict.** {verdict(run)}"),
        ]
    )


def _beside(pair: dict[str, float], unit: float, digits: int) -> str:
    return " / ".join(f"{pair[name] / unit:,.{digits}f}" for name in (WRAPPER, SPLIT))


def verdict(run: dict[str, Any]) -> str:
    """What came out, in words that follow the figures."""
    rows = run["rows"]
    for row in rows:
        assert row["parameters"][WRAPPER] == row["parameters"][SPLIT]
        for work in WORKS:
            products = row[work]["multiply_adds"]
            assert products[WRAPPER] == products[SPLIT]
    slow, fast = (f(rows, key=_whole_ratio) for f in (max, min))
    longest = max(rows, key=lambda row: row["tokens"])
    calls = max(_times_as_many(row[WORKS[1]]["operators"]) for row in rows)
    said = ["Slow, yes." if _whole_ratio(fast) > 1 else "Slow only where the layer is small."]
    said.append(
        f"""Weights and multiply-adds are equal, but the loop runs up to {calls:.1f} times as many
        operators, each of them smaller."""
    )
    said.append(f"It takes {_whole_ratio(slow):.2f} times as long at {_size_of(slow)}")
    if fast is not slow:
        said[-1] += f", and {_whole_ratio(fast):.2f} times at {_size_of(fast)}"
    said[-1] += ", forward and backward."
    if run["settings"]["compiled"]:
        ratios = [row[WORKS[1]]["compiled"]["ratio"]["median"] for row in rows]
        said.append(f"Compiled, the ratios are {min(ratios):.2f} to {max(ratios):.2f}.")
    forward, both = (_times_as_many(longest[work]["peak_bytes"]) for work in WORKS)
    said.append(
        f"""Heavy are only the masks, one kept in every module
        ({_times_as_many(longest["buffer_bytes"]):.0f} times as much). The loop forms one head's
        T × T scores at a time: at {_size_of(longest)} its peak is {forward:.2f} times that of split
        heads in the forward pass, and {both:.2f} times with the backward."""
    )
    said.append("All on this CPU: on a GPU, where a call costs more, nothing was measured.")
    return " ".join(said)


def _times_as_many(pair: dict[str, float]) -> float:
    return pair[WRAPPER] / pair[SPLIT]


def _size_of(row: dict[str, Any]) -> str:
    return f"width {row['width']} over {row['batch']} × {row['tokens']:,} tokens"


def _whole_ratio(row: dict[str, Any]) -> float:
    return row[WORKS[1]]["ratio"]["median"]

"""Is one module per head slow and heavy? Compared with split heads that hold the same weights."""

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

from ..pages.words import table

WRAPPER, SPLIT = "a module a head", "split heads"  # keys of the records
WORKS = ("forward", "forward and backward")


@dataclass(frozen=True)
class Settings:
    """Sizes are (width, heads, batch, tokens); compiled layers are timed at each size, too."""

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
    """Return the two layers with the same weights."""
    torch.manual_seed(0)
    split = MultiHeadAttn(width, width, tokens, 0.0, heads)
    return {WRAPPER: Joined(split), SPLIT: split}


def measure(settings: Settings, report: Callable[[str], None] = print) -> dict[str, Any]:
    """Measure counts, times and memory at each size, as written and compiled."""
    rows = []
    for width, heads, batch, tokens in settings.sizes:
        report(f"wrapper: width {width}, {heads} heads, {batch} × {tokens} tokens")
        layers = pair(width, heads, tokens)
        x, pull = torch.randn(2, batch, tokens, width)
        assert_same(layers, x, pull)
        row: dict[str, Any] = {"width": width, "heads": heads, "batch": batch, "tokens": tokens}
        buffers = {name: sum(b.nbytes for b in layer.buffers()) for name, layer in layers.items()}
        row["buffer_bytes"] = buffers
        for work in WORKS:
            steps = {name: step_of(layer, x, pull, work) for name, layer in layers.items()}
            row[work] = {
                "operators": {name: operators(step) for name, step in steps.items()},
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
    """Assert that outputs and input gradients agree within float32's rounding."""
    found = []
    for layer in layers.values():
        leaf = x.clone().requires_grad_()
        out = layer(leaf)
        found.append((out, *torch.autograd.grad(out, leaf, pull)))
    for mine, theirs in zip(*found, strict=True):
        error = (mine - theirs).abs().max() / theirs.abs().max()
        # sums of E and T terms in another order: eps·sqrt(E), and a margin of 4
        assert error < 4 * torch.finfo(x.dtype).eps * x.shape[-1] ** 0.5, error


def step_of(run: Callable[[Tensor], Tensor], x: Tensor, pull: Tensor, work: str) -> Callable:
    """Return the work as a call: without gradients, or with those of weights and input."""
    leaf = x.clone().requires_grad_()

    def forward() -> None:
        with torch.no_grad():
            run(x)

    def both() -> None:
        run(leaf).backward(pull)
        leaf.grad = None

    return forward if work == WORKS[0] else both


class _Operators(TorchDispatchMode):
    """Count the operators that compute something; views are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def operators(work: Callable[[], Any]) -> int:
    """Return how many of PyTorch's operators a call runs, views left out."""
    with _Operators() as counter:
        work()
    return counter.count


def _times(steps: dict[str, Callable[[], None]], rounds: int) -> dict[str, Any]:
    taken = timing.interleaved(steps, rounds)
    return {
        "seconds": {name: timing.Spread.of(found) for name, found in taken.items()},
        "ratio": timing.ratio(taken, WRAPPER, SPLIT),
    }


def tables(run: dict[str, Any]) -> dict[str, str]:
    """Return counts, memory and times as Markdown."""
    head = ["width, heads, batch × tokens", "operators", "peak, MiB"]
    head += ["time: forward", "forward and backward"]
    lines = []
    for row in run["rows"]:
        both, works = row[WORKS[1]], [row[work] for work in WORKS]
        lines.append(
            [
                f"{row['width']}, {row['heads']}, {row['batch']} × {row['tokens']}",
                _both(both["operators"], 1, 0),
                _both(both["peak_bytes"], 2**20, 2),
                *(f"{work['ratio']['median']:.2f}" for work in works),
            ]
        )
    return {"wrapper": table(head, lines)}


def _both(found: dict[str, float], unit: float, digits: int) -> str:
    return " / ".join(f"{found[name] / unit:,.{digits}f}" for name in (WRAPPER, SPLIT))

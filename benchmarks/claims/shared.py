"""Do split heads share one set of weights? Counts, and whose output each row of weights moves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import headwise as hw
from headwise.systems.per_head import MultiHeadedAttentionWrapper
from headwise.systems.split import MultiHeadAttn

from ..pages.words import prose, table

KINDS = ("W_query", "W_key", "W_value")


@dataclass(frozen=True)
class Settings:
    """Widths and numbers of heads to count; gradients are taken at the first."""

    sizes: tuple[tuple[int, int], ...] = ((16, 4), (512, 8), (768, 12))
    tokens: int = 10


TOY = Settings(((6, 3),), 5)


def measure(settings: Settings, told: Callable[[str], None] = print) -> dict[str, Any]:
    """Counts of weights, and how each head's output moves with each head's rows of weights."""
    told("shared: counts and gradients")
    counts = [
        {"width": width, "heads": heads} | _counts(width, heads) for width, heads in settings.sizes
    ]
    width, heads = settings.sizes[0]
    torch.manual_seed(0)
    x = torch.randn(2, settings.tokens, width, dtype=torch.float64)
    split = MultiHeadAttn(width, width, settings.tokens, 0.0, heads).double()
    one_kv = _one_kv(width, heads).double()
    for layer, name in ((split, "out_proj"), (one_kv, "out")):
        layer.add_module(name, nn.Identity())  # a projection would mix the heads
    own = [width // heads] * heads
    return {
        "counts": counts,
        "split": {
            name: pulls(lambda: split(x), getattr(split, name).weight, heads, own) for name in KINDS
        },
        "one_kv": pulls(
            lambda: one_kv(x, mask=hw.Causal()),
            one_kv.qkv.weight,
            heads,
            [*own, width // heads, width // heads],
        ),
    }


def _one_kv(width: int, heads: int) -> hw.MultiHeadAttention:
    """Multi-query attention (Shazeer 2019), where heads do share: one head of keys and values."""
    return hw.MultiHeadAttention(width, heads, num_kv_heads=1, bias=False)


def _counts(width: int, heads: int) -> dict[str, int]:
    """Weights that make queries, keys and values."""
    wrapper = MultiHeadedAttentionWrapper(width, width // heads, 1, 0.0, heads)
    split = MultiHeadAttn(width, width, 1, 0.0, heads)
    return {
        "wrapper": sum(p.numel() for p in wrapper.parameters()),
        "split": sum(getattr(split, name).weight.numel() for name in KINDS),
        "one_kv": _one_kv(width, heads).qkv.weight.numel(),
    }


def pulls(
    run: Callable[[], Tensor], weight: Tensor, heads: int, rows: list[int]
) -> list[list[float]]:
    """How strongly each head's output moves with each part of the weight's rows.

    `[h][part]` is the norm, in that part, of the gradient of the sum of squares of head h's output;
    `run` gives the heads' outputs side by side, `[B, T, H * D]`.
    """
    found = []
    for head in range(heads):
        out = run().chunk(heads, dim=-1)[head]
        (grad,) = torch.autograd.grad(out.square().sum(), weight)
        found.append([float(part.norm()) for part in grad.split(rows)])
    return found


def section(run: dict[str, Any]) -> str:
    """The claim, what was done, what came out."""
    width, heads = run["settings"]["sizes"][0]
    counts = [
        [
            f"{one['width']}, {one['heads']}",
            *(f"{one[kind]:,}" for kind in ("wrapper", "split", "one_kv")),
        ]
        for one in run["counts"]
    ]
    of_heads = [f"head {head}" for head in range(heads)]
    gradients = [
        [of_heads[head], *(_norm(norm) for norm in run["split"]["W_key"][head])]
        + [_norm(run["one_kv"][head][heads])]
        for head in range(heads)
    ]
    return "\n\n".join(
        [
            '## "With split heads, one set of weights is shared by all heads"',
            prose(
                f"""**Experiment.** The weights that make queries, keys and values are counted in
                both layouts, and in one where heads do share: a single head of keys and values.
                Then each head's output is differentiated with respect to every row of the weights,
                in float64, at width {width} with {heads} heads."""
            ),
            table(
                ["width, heads", "a module a head", "split heads", "shared keys and values"], counts
            ),
            "Norm of the gradient of a head's output in rows of `W_key`:",
            table(
                ["output of", *(f"rows of {name}" for name in of_heads), "shared keys"], gradients
            ),
            prose(f"**Verdict.** {verdict(run)}"),
        ]
    )


def _norm(value: float) -> str:
    return "0" if value == 0 else f"{value:.3g}"


def verdict(run: dict[str, Any]) -> str:
    """What came out; the words hold only for these figures, so they are checked."""
    heads = run["settings"]["sizes"][0][1]
    for kind, rows in run["split"].items():
        for head, row in enumerate(rows):
            assert all((norm != 0) == (head == part) for part, norm in enumerate(row)), kind
    assert all(row[heads] and row[heads + 1] for row in run["one_kv"])
    assert all(one["wrapper"] == one["split"] > one["one_kv"] for one in run["counts"])
    return (
        "No. One matrix holds the heads' weights one under the other: the counts are equal, and a "
        "head's output has a gradient of exactly 0 in every row that is not its own (the same for "
        "`W_query` and `W_value`). Where keys and values are shared, the count is lower and all "
        "heads pull at the same rows."
    )

"""Do heads give gradients more paths? One layer in float64, cut into 1, 2, 4 and 8 heads."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import headwise as hw
from headwise.core.reference import Definition, attention

from ..pages.words import percent, table

PARTS = ("x", "q", "k", "v", "o")
LEFT = 0.01  # a query whose score gradient falls below this share has stopped learning


@dataclass(frozen=True)
class Settings:
    """`factors` multiply the scores of heads; the Jacobian has `(tokens · width)²` entries."""

    heads: tuple[int, ...] = (1, 2, 4, 8)
    width: int = 64
    tokens: int = 96
    factors: tuple[float, ...] = (20.0, 1000.0)
    draws: int = 50
    jacobian_tokens: int = 12
    jacobian_width: int = 32
    jacobian_draws: int = 5


TOY = Settings((1, 2), 6, 7, (1e4,), 2, 3, 4, 1)


@dataclass(frozen=True)
class Layer:
    """Weights `[E, E]`, applied as x @ W; the same for every number of heads."""

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor

    @classmethod
    def draw(cls, width: int, generator: torch.Generator) -> Layer:
        """Return normal weights of variance 1 / E: scores of normal inputs have variance 1."""
        drawn = torch.randn(4, width, width, generator=generator, dtype=torch.float64)
        return cls(*(w.requires_grad_() for w in drawn * width**-0.5))

    def attend(self, x: Tensor, heads: int, factors: Tensor | None = None) -> Definition:
        """Compute the heads from x `[T, E]`; `factors` `[H]` multiply their scores."""
        q, k, v = (
            (x @ w).view(1, len(x), heads, -1).transpose(1, 2) for w in (self.q, self.k, self.v)
        )
        if factors is not None:
            q = q * factors[:, None, None]
        return attention(q, k, v, mask=hw.Causal())

    def finish(self, per_head: Tensor) -> Tensor:
        """Join the heads `[1, H, T, D]` and project them, `[T, E]`."""
        return per_head.transpose(1, 2).flatten(2)[0] @ self.o


def measure(settings: Settings, report: Callable[[str], None] = print) -> dict[str, Any]:
    """Measure a row for each number of heads, on the same weights and inputs."""
    rows = []
    for heads in settings.heads:
        report(f"paths: {heads} heads")
        saturated = [_saturated(settings, heads, factor) for factor in settings.factors]
        rows.append({"heads": heads, "saturated": saturated, "ranks": _ranks(settings, heads)})
        rows[-1]["norms"] = _norms(settings, heads)
    return {"rows": rows}


def _samples(count: int, tokens: int, width: int) -> list[tuple[Layer, Tensor, Tensor]]:
    """Return layers with an input and a direction that pulls the output."""
    generator = torch.Generator().manual_seed(0)
    samples = []
    for _ in range(count):
        layer = Layer.draw(width, generator)
        x, pull = torch.randn(2, tokens, width, generator=generator, dtype=torch.float64)
        samples.append((layer, x.requires_grad_(), pull))
    return samples


def _saturated(settings: Settings, heads: int, factor: float) -> dict[str, float]:
    """Multiply the scores of one head, or of all, and return what is left of the gradients.

    `queries`: the share of (head, query) pairs whose score gradient keeps `LEFT` of its norm;
    `squares`: the share of the squared score gradient.
    """
    one = torch.ones(heads, dtype=torch.float64)
    one[0] = factor
    found: dict[str, list[Tensor]] = {"plain": [], "one": [], "all": []}
    for layer, x, pull in _samples(settings.draws, settings.tokens, settings.width):
        for name, factors in (("plain", None), ("one", one), ("all", torch.full_like(one, factor))):
            found[name].append(score_gradients(layer, x, pull, heads, factors))
    before, after, all_after = (torch.stack(gradients) for gradients in found.values())
    alive, all_alive = (gradients >= LEFT**2 * before for gradients in (after, all_after))
    return {
        "factor": factor,
        "queries": float(alive.double().mean()),
        "queries_all": float(all_alive.double().mean()),
        "squares": float(after.sum() / before.sum()),
    }


def score_gradients(
    layer: Layer, x: Tensor, pull: Tensor, heads: int, factors: Tensor | None
) -> Tensor:
    """Return the squared norm of each query's score gradient, `[H, T - 1]`, without the first."""
    found = layer.attend(x, heads, factors)
    (scores,) = torch.autograd.grad((layer.finish(found.out) * pull).sum(), found.logits)
    return scores.square().sum(-1)[0, :, 1:]


def _ranks(settings: Settings, heads: int) -> dict[str, float]:
    """Return the number of patterns, the rank of each, and the ranks of the layer's Jacobian."""
    layer, x, _ = _samples(1, settings.tokens, settings.width)[0]
    with torch.no_grad():
        patterns = torch.linalg.matrix_rank(layer.attend(x, heads).weights[0].flatten(1))
        q, k = ((x @ w).view(len(x), heads, -1).transpose(0, 1) for w in (layer.q, layer.k))
        score = torch.linalg.matrix_rank(q @ k.mT).max()
    passed, effective = [], []
    size = settings.jacobian_tokens, settings.jacobian_width
    for drawn, at, _ in _samples(settings.jacobian_draws, *size):

        def forward(x: Tensor, layer: Layer = drawn) -> Tensor:
            return layer.finish(layer.attend(x, heads).out)

        jacobian = torch.autograd.functional.jacobian(forward, at)
        singular = torch.linalg.svdvals(torch.as_tensor(jacobian).reshape(at.numel(), -1))
        passed.append(int((singular > LEFT * singular[0]).sum()))
        shares = singular / singular.sum()  # effective rank: Roy and Vetterli 2007
        effective.append(float(torch.special.entr(shares).sum().exp()))
    return {
        "patterns": int(patterns),
        "score": int(score),
        "jacobian": statistics.mean(passed),
        "jacobian_effective": statistics.mean(effective),
    }


def _norms(settings: Settings, heads: int) -> dict[str, dict[str, float]]:
    """Return the norms of the gradients at the start: mean over samples and standard error."""
    norms: dict[str, list[float]] = {part: [] for part in PARTS}
    for layer, x, pull in _samples(settings.draws, settings.tokens, settings.width):
        loss = (layer.finish(layer.attend(x, heads).out) * pull).sum()
        grads = torch.autograd.grad(loss, [x, layer.q, layer.k, layer.v, layer.o])
        for part, grad in zip(PARTS, grads, strict=True):
            norms[part].append(float(grad.norm()))
    return {
        part: {"mean": statistics.mean(n), "error": statistics.stdev(n) / len(n) ** 0.5}
        for part, n in norms.items()
    }


def tables(run: dict[str, Any]) -> dict[str, str]:
    """Return the measures as Markdown, a column for each number of heads."""
    rows = run["rows"]
    lines = []
    for number, factor in enumerate(run["settings"]["factors"]):
        sharp = [row["saturated"][number] for row in rows]
        for name, key in (("one head", "queries"), ("all heads", "queries_all")):
            cells = (percent(one[key]) for one in sharp)
            lines.append([f"{name} × {factor:g}: queries that still learn", *cells])
    norms = (row["norms"]["x"] for row in rows)
    cells = (f"{norm['mean']:.1f} ± {norm['error']:.1f}" for norm in norms)
    lines.append(["gradient norm of the input", *cells])
    return {"paths": table(["heads", *(str(row["heads"]) for row in rows)], lines)}

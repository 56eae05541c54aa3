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

from ..pages.words import and_list, percent, prose, table

PARTS = ("q", "k", "v", "o")
LEFT = 0.01  # a query whose gradient falls below this share has stopped learning


@dataclass(frozen=True)
class Settings:
    """`factors` multiply the scores of a head that is to saturate.

    The Jacobian has `(jacobian_tokens · jacobian_width)²` entries.
    """

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
    """Weights `[E, E]` as x @ W; the same whatever the number of heads."""

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor

    @classmethod
    def draw(cls, width: int, generator: torch.Generator) -> Layer:
        """Normal weights of variance 1 / E: scores of normal inputs then have variance 1."""
        drawn = torch.randn(4, width, width, generator=generator, dtype=torch.float64)
        return cls(*(w.requires_grad_() for w in drawn * width**-0.5))

    def attend(self, x: Tensor, heads: int, factors: Tensor | None = None) -> Definition:
        """What the heads compute from x `[T, E]`; `factors` `[H]` multiply the heads' scores."""
        q, k, v = (
            (x @ w).view(1, len(x), heads, -1).transpose(1, 2) for w in (self.q, self.k, self.v)
        )
        if factors is not None:
            q = q * factors[:, None, None]
        return attention(q, k, v, mask=hw.Causal())

    def finish(self, per_head: Tensor) -> Tensor:
        """Heads `[1, H, T, D]` side by side and projected, `[T, E]`."""
        return per_head.transpose(1, 2).flatten(2)[0] @ self.o


def measure(settings: Settings, told: Callable[[str], None] = print) -> dict[str, Any]:
    """A row for each number of heads; every number of heads meets the same weights and inputs."""
    rows = []
    for heads in settings.heads:
        told(f"paths: {heads} heads")
        rows.append(
            {
                "heads": heads,
                "saturated": [_saturated(settings, heads, f) for f in settings.factors],
                "ranks": _ranks(settings, heads),
                "norms": _norms(settings, heads),
            }
        )
    return {"rows": rows}


def _draws(count: int, tokens: int, width: int) -> list[tuple[Layer, Tensor, Tensor]]:
    """Layers with an input and a direction to pull the output in."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for _ in range(count):
        layer = Layer.draw(width, generator)
        x, pull = torch.randn(2, tokens, width, generator=generator, dtype=torch.float64)
        made.append((layer, x.requires_grad_(), pull))
    return made


def _saturated(settings: Settings, heads: int, factor: float) -> dict[str, float]:
    """What is left when the scores of one head, or of all, are multiplied by `factor`.

    `queries`: the share of (head, query) pairs that are alive, their scores' gradient at least
    `LEFT` of its norm before; `squares`: the share of all squared gradient of the scores.
    """
    one = torch.ones(heads, dtype=torch.float64)
    one[0] = factor
    every = torch.full_like(one, factor)
    plain, sharp, all_sharp = [], [], []
    values_before = values_after = 0.0
    for layer, x, pull in _draws(settings.draws, settings.tokens, settings.width):
        scores, through = score_and_value_gradients(layer, x, pull, heads, None)
        plain.append(scores)
        values_before += through
        scores, through = score_and_value_gradients(layer, x, pull, heads, one)
        sharp.append(scores)
        values_after += through
        all_sharp.append(score_and_value_gradients(layer, x, pull, heads, every)[0])
    before, after, all_after = (torch.stack(found) for found in (plain, sharp, all_sharp))
    alive, all_alive = (found >= LEFT**2 * before for found in (after, all_after))
    return {
        "factor": factor,
        "queries_head": float(alive[:, 0].double().mean()),
        "queries": float(alive.double().mean()),
        "queries_all": float(all_alive.double().mean()),
        "squares": float(after.sum() / before.sum()),
        "squares_all": float(all_after.sum() / before.sum()),
        "values": values_after / values_before,
    }


def score_and_value_gradients(
    layer: Layer, x: Tensor, pull: Tensor, heads: int, factors: Tensor | None
) -> tuple[Tensor, float]:
    """Squared norms: of the gradient of each query's scores `[H, T - 1]` (the first query has one
    key and nothing to choose), and of x's gradient through the values alone."""
    found = layer.attend(x, heads, factors)
    (scores,) = torch.autograd.grad((layer.finish(found.out) * pull).sum(), found.logits)
    values = (x @ layer.v).view(1, len(x), heads, -1).transpose(1, 2)
    out = layer.finish(found.weights.detach() @ values)
    (through,) = torch.autograd.grad((out * pull).sum(), x)
    return scores.square().sum(-1)[0, :, 1:], float(through.square().sum())


def _ranks(settings: Settings, heads: int) -> dict[str, float]:
    """How many patterns, how wide each, and how much of the Jacobian there is."""
    layer, x, _ = _draws(1, settings.tokens, settings.width)[0]
    with torch.no_grad():
        found = layer.attend(x, heads)
        patterns = int(torch.linalg.matrix_rank(found.weights[0].flatten(1)))
        q, k = ((x @ w).view(len(x), heads, -1).transpose(0, 1) for w in (layer.q, layer.k))
        score = int(torch.linalg.matrix_rank(q @ k.mT).max())
    open_, effective = [], []
    size = settings.jacobian_tokens, settings.jacobian_width
    for drawn, at, _ in _draws(settings.jacobian_draws, *size):
        whole = torch.linalg.svdvals(jacobian(drawn, at, heads))
        open_.append(int((whole > LEFT * whole[0]).sum()))
        effective.append(effective_rank(whole))
    return {
        "patterns": patterns,
        "score": score,
        "jacobian": statistics.mean(open_),
        "jacobian_effective": statistics.mean(effective),
    }


def jacobian(layer: Layer, x: Tensor, heads: int) -> Tensor:
    """Of the layer's output in its input, `[T·E, T·E]`."""

    def forward(at: Tensor) -> Tensor:
        return layer.finish(layer.attend(at, heads).out)

    found = torch.autograd.functional.jacobian(forward, x)
    assert isinstance(found, Tensor)
    return found.reshape(x.numel(), x.numel())


def effective_rank(singular: Tensor) -> float:
    """`exp` of the entropy of the singular values' shares (Roy and Vetterli 2007).

    >>> round(effective_rank(torch.tensor([3.0, 3.0, 0.0])), 6)
    2.0
    """
    return float(torch.special.entr(singular / singular.sum()).sum().exp())


def _norms(settings: Settings, heads: int) -> dict[str, dict[str, float]]:
    """Norms of the gradients at the start: mean over draws and its standard error."""
    norms: dict[str, list[float]] = {part: [] for part in ("x", *PARTS)}
    for layer, x, pull in _draws(settings.draws, settings.tokens, settings.width):
        loss = (layer.finish(layer.attend(x, heads).out) * pull).sum()
        grads = torch.autograd.grad(loss, [x, *(getattr(layer, part) for part in PARTS)])
        for part, grad in zip(norms, grads, strict=True):
            norms[part].append(float(grad.norm()))
    return {
        part: {
            "mean": statistics.mean(found),
            "error": statistics.stdev(found) / len(found) ** 0.5,
        }
        for part, found in norms.items()
    }


def section(run: dict[str, Any]) -> str:
    """The claim, what was done, what came out."""
    settings, rows = run["settings"], run["rows"]
    side = settings["jacobian_tokens"] * settings["jacobian_width"]
    high = max(settings["factors"])
    factors = " or by ".join(f"{factor:g}" for factor in settings["factors"])
    sharpened = f"The scores of one head, or of all, are multiplied by {factors}."
    return "\n\n".join(
        [
            '## "Several heads give gradients more paths"',
            prose(
                f"""**Experiment.** The sentence can mean three things, so three are measured, in
                float64, on one causal layer of width {settings["width"]} over
                {settings["tokens"]} tokens. Weights are random, the same for
                {and_list(str(row["heads"]) for row in rows)} heads; a random direction pulls the
                output."""
            ),
            prose(
                f"""*A head saturates.* {sharpened} With {high:g} nearly every softmax is one-hot.
                A query is alive if the gradient of its scores keeps at least {percent(LEFT)} of
                its norm. *Ranks*: of the score matrices, and of the heads' patterns P as vectors.
                *The Jacobian* of a layer small enough to write it down ({side} × {side}): the
                directions that pass with at least {percent(LEFT)} of the strongest one's strength,
                and the effective rank (the exponential of the entropy of the singular values'
                shares). *Norms* of the gradients at the start: mean of {settings["draws"]} draws
                with its standard error."""
            ),
            table(["heads", *(str(row["heads"]) for row in rows)], _lines(rows)),
            prose(f"**Verdict.** {verdict(run)}"),
        ]
    )


def _lines(rows: list[dict[str, Any]]) -> list[list[str]]:
    """The table: a line a figure, a column a number of heads."""
    lines = []
    for number, at in enumerate(rows[0]["saturated"]):
        sharp = [row["saturated"][number] for row in rows]
        times = f"× {at['factor']:g}"
        lines += [
            [f"one head {times}: queries alive", *(percent(one["queries"]) for one in sharp)],
            [f"all heads {times}: queries alive", *(percent(one["queries_all"]) for one in sharp)],
            [
                f"one head {times}: squared gradient of the scores left",
                *(percent(one["squares"]) for one in sharp),
            ],
        ]
    ranks = [row["ranks"] for row in rows]
    lines += [
        ["rank of a head's scores", *(str(rank["score"]) for rank in ranks)],
        ["patterns that mix tokens", *(str(rank["patterns"]) for rank in ranks)],
        ["directions through the Jacobian", *(f"{rank['jacobian']:.0f}" for rank in ranks)],
        ["its effective rank", *(f"{rank['jacobian_effective']:.0f}" for rank in ranks)],
    ]
    for part in ("x", *PARTS):
        name = "the input" if part == "x" else f"W_{part}"
        norms = [row["norms"][part] for row in rows]
        shown = (f"{norm['mean']:.1f} ± {norm['error']:.1f}" for norm in norms)
        lines.append([f"norm of the gradient of {name}", *shown])
    return lines


def verdict(run: dict[str, Any]) -> str:
    """What came out, in words that follow the figures."""
    rows = run["rows"]
    first, last = rows[0], rows[-1]
    lone, many = first["saturated"][-1], last["saturated"][-1]
    mild = first["saturated"][0]
    drift = max(
        abs(row["norms"][part]["mean"] / first["norms"][part]["mean"] - 1)
        for row in rows
        for part in ("x", *PARTS)
    )
    assert many["queries"] > lone["queries"], "several heads are no insurance here: reword this"
    assert all(row["ranks"]["patterns"] == row["heads"] for row in rows)
    assert all(one["values"] > 1 for row in rows for one in row["saturated"])
    return f"""Yes as insurance, no as amount. Each head has a softmax of its own: when one is
        one-hot, {percent(many["queries"])} of the (head, query) pairs of {last["heads"]} heads
        still learn where to look, and {percent(lone["queries"])} of a lone head's. If all saturate,
        {last["heads"]} heads are no better off ({percent(many["queries_all"])}). A sharp softmax is
        not a dead one, though: at × {mild["factor"]:g} a lone head keeps {percent(mild["queries"])}
        of its queries and {percent(mild["squares"])} of the squared gradient, and the path through
        the values stays open in every case. There are as many patterns as heads, each narrower
        (scores of rank {last["ranks"]["score"]}, not {first["ranks"]["score"]}):
        {last["ranks"]["jacobian"]:.0f} directions pass the Jacobian beside one head's
        {first["ranks"]["jacobian"]:.0f}. But no more gradient passes: norms at the start differ by
        at most {percent(drift)}."""

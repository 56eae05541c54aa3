"""Activation patching over heads and positions, with its estimate by gradients beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .._tables import HeadTable
from ..capture.edit import Replace, edit
from ..capture.modules import Modules, call_model, check_model
from ..core.numbers import format_value, whole_numbers
from .runs import Score, output_of, run_heads
from .values import HeadValues, joined


class Patched(HeadTable):
    """The result of `patch()`.

    Attributes:
        clean, corrupted: the metric of both runs, `[B]`; `[1]` of a metric that is one number.
        positions: the positions that are patched one at a time; `None` for all at once.
        patched: the metric of each patched run: `patched["L2H9"]` `[B, P]`, with P = 1 for all
            positions at once.
        estimate: to first order, what patching adds to the metric, in the same shape: `[1, P]` of a
            metric that is one number. `None` where it was not computed.
    """

    def __init__(
        self,
        clean: Tensor,
        corrupted: Tensor,
        positions: list[int] | None,
        patched: HeadValues,
        estimate: HeadValues | None,
    ) -> None:
        self.clean, self.corrupted, self.positions = clean, corrupted, positions
        self.patched, self.estimate = patched, estimate

    def __repr__(self) -> str:
        many = "all positions" if self.positions is None else f"{len(self.positions)} positions"
        return f"<Patched: {len(self.patched.modules)} modules, {many}>"

    def table(self) -> list[dict[str, Any]]:
        """Return a row for each head, or for each head and `position`: `layer`, `head`, `module`.

        * `patched`: the metric of the patched run, as a mean over the batch.
        * `effect`: what patching adds to the metric of the corrupted run.
        * `restored`: the effect over the difference of clean and corrupted run; absent where these
          are equal.
        * `estimate`: the effect to first order (Nanda 2023, "attribution patching").
        """
        rows = []
        gap = (self.clean - self.corrupted).double().mean().item()
        for name in self.patched.modules:
            means = self.patched[name].double().mean(0)
            effects = means - self.corrupted.double().mean()
            guess = None if self.estimate is None else self.estimate[name].double().mean(0)
            for head, values in enumerate(means.tolist()):
                for n, value in enumerate(values):
                    row = {"layer": self.patched.numbers[name], "head": head, "module": name}
                    if self.positions is not None:
                        row["position"] = self.positions[n]
                    row |= {"patched": value, "effect": effects[head, n].item()}
                    if gap:
                        row["restored"] = row["effect"] / gap
                    if guess is not None:
                        row["estimate"] = guess[head, n].item()
                    rows.append(row)
        return rows


def patch(
    model: nn.Module,
    clean: Any,
    corrupted: Any,
    metric: Score,
    *,
    positions: bool | Iterable[int] = False,
    estimate: bool = True,
    modules: Modules = None,
    report: Callable[[float], None] | None = None,
) -> Patched:
    """Measure a metric of a corrupted run in which one head's output at a time is the clean run's.

    One forward pass for each head, or for each head and position. Attribution patching estimates
    all of them by one backward pass: `(clean − corrupted) · ∂metric/∂output`.

    Args:
        model: any model that `watch()` sees, in evaluation mode.
        clean, corrupted: what the model is called with, each a dict of keywords, a tuple or list of
            arguments, or the only argument; of the same sizes.
        metric: `metric(output)` for each row of the batch `[B]`, or one number: a difference of
            logits, mostly.
        positions: True patches each position by itself, a list those in it; False all at once.
        estimate: compute the estimate, too; it needs a metric with a gradient.
        modules: patch these alone, as in `watch()`.
        report: called after every forward pass with the completed fraction.

    Raises:
        ValueError: a model in training mode; no attention seen; runs of different sizes; positions
            that there are not; a metric of another shape, or (for the estimate) without a gradient.

    >>> from headwise.models import builtin, load
    >>> model, _ = load(builtin())
    >>> clean, corrupted = torch.tensor([[5, 6, 7, 5, 6]]), torch.tensor([[5, 9, 7, 5, 6]])
    >>> found = patch(model, clean, corrupted, lambda logits: logits[:, -1, 7])
    >>> found, found.patched["L1H1"].shape
    (<Patched: 3 modules, all positions>, torch.Size([1, 1]))
    >>> list(found.table()[0])
    ['layer', 'head', 'module', 'patched', 'effect', 'restored', 'estimate']

    Source: Vig et al. 2020; Meng et al. 2022; Nanda 2023, "Attribution patching".
    """
    quoted = check_model("patch", model)
    training = [name or "the model" for name, module in model.named_modules() if module.training]
    if training:
        raise ValueError(f"{quoted}: {training[0]} is in training mode; call model.eval() first.")
    options = {"keep": output_of, "modules": modules, "score": metric, "named": "metric"}
    run = partial(run_heads, "patch", model, **options)
    of_clean = run(clean)
    of_corrupted = run(corrupted, gradient="full" if estimate else None)
    source, before = (joined(one.names, one.results, quoted) for one in (of_clean, of_corrupted))
    for name, out in before.items():
        if name not in source or source[name].shape != out.shape:
            other = list(source[name].shape) if name in source else "no"
            raise ValueError(
                f"{quoted}: {name!r} gives {list(out.shape)} in the corrupted run and "
                f"{other} outputs in the clean one; give texts of the same length."
            )
    places = _places(positions, min(out.shape[2] for out in before.values()), quoted)
    each: list[list[int] | None] = [None] if places is None else [[p] for p in places]
    heads = [(name, head) for name, out in before.items() for head in range(out.shape[1])]
    patched: dict[str, list[Tensor]] = {}
    for number, (name, head) in enumerate(heads):
        row = []
        for n, place in enumerate(each, start=1):
            replaced = Replace(source[name][:, head], positions=place)
            with torch.no_grad(), edit(model, {(name, head): replaced}):
                row.append(metric(call_model(model, corrupted)).reshape(-1))
            if report is not None:
                report((number + n / len(each)) / len(heads))
        patched.setdefault(name, []).append(torch.stack(row, -1))
    tensors = {name: torch.stack(rows, 1) for name, rows in patched.items()}

    guess = None
    if estimate:
        slopes, guess = joined(of_corrupted.names, of_corrupted.slopes, quoted), {}
        for name, out in before.items():
            parts = torch.einsum("bhtd,bhtd->bht", source[name] - out, slopes[name])
            guess[name] = parts.sum(-1, keepdim=True) if places is None else parts[..., places]
            if of_corrupted.score.dim() == 0:  # one number for all rows
                guess[name] = guess[name].sum(0, keepdim=True)

    def values(metric: str, tensors: dict[str, Tensor]) -> HeadValues:
        return HeadValues(metric, tensors, of_corrupted.numbers, lambda x: x.double().mean((0, 2)))

    return Patched(
        of_clean.score.reshape(-1),
        of_corrupted.score.reshape(-1),
        places,
        values("patched", tensors),
        None if guess is None else values("estimate", guess),
    )


def _places(positions: bool | Iterable[int], length: int, quoted: str) -> list[int] | None:
    if isinstance(positions, bool):
        return list(range(length)) if positions else None
    listed = whole_numbers(positions)  # type: ignore[arg-type]
    if not listed or not all(-length <= one < length for one in listed):
        raise ValueError(
            f"{quoted}: positions={format_value(positions)} must be True, False or positions from "
            f"0 to {length - 1}."
        )
    return [one % length for one in listed]

"""Activation patching over heads and positions, and its gradient estimate."""

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
        clean, corrupted: the metric of each run, `[B]`; `[1]` for a scalar metric.
        positions: the positions that are patched one at a time; `None` for all at once.
        patched: the metric of each patched run: `patched["L2H9"]` `[B, P]`, with P = 1 for all
            positions at once.
        estimate: the first-order effect of patching on the metric, in the same shape; `[1, P]` for
            a scalar metric. `None` if it was not computed.
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

        * `patched`: the metric of the patched run, averaged over the batch.
        * `effect`: the amount by which patching changes the metric of the corrupted run.
        * `restored`: the effect divided by the clean minus the corrupted metric; absent if
          these are equal.
        * `estimate`: the first-order effect (Nanda 2023, "attribution patching").
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
    """Measure a metric of a corrupted run, taking one head's output at a time from the clean run.

    This takes one forward pass for each head, or for each head and position. Attribution patching
    estimates all of them in one backward pass: `(clean − corrupted) · ∂metric/∂output`.

    Args:
        model: any model that `watch()` supports, in evaluation mode.
        clean, corrupted: inputs of the model, each a dict of keywords, a tuple or list of
            arguments, or a single argument; both of the same sizes.
        metric: `metric(output)` for each row of the batch, `[B]`, or a scalar; usually a
            difference of logits.
        positions: True patches each position separately, a list only those positions; False
            patches all at once.
        estimate: also compute the estimate, which requires a metric with a gradient.
        modules: patch only these, as in `watch()`.
        report: called after every forward pass with the completed fraction.

    Raises:
        ValueError: the model is in training mode; no attention was captured; runs have different
            sizes; a position is out of range; the metric has a wrong shape, or no gradient for the
            estimate.

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

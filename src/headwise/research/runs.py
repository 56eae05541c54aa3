"""The attention calls of one run of a model, kept for what is computed afterwards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..capture.call import AttentionCall
from ..capture.modules import Modules, call_model, check_inputs, check_model, chosen, why_left_out
from ..capture.session import catch

Score = Callable[[Any], Tensor]
"""`score(output)`: a number for each row of the batch, `[B]`, or their sum, `[]`."""


@dataclass
class KeptCall:
    """A call without its output: q and k, mask and options; values and output's gradient, if kept.

    `out` is what the model went on with, for gradients.
    """

    call: AttentionCall
    values: Tensor | None = None
    out: Tensor | None = None
    slope: Tensor | None = None
    """The gradient of a score by the heads' outputs, `[B, H, T, Dv]`."""


def kept_calls(
    function: str,
    model: nn.Module,
    inputs: Any,
    modules: Modules = None,
    score: Score | None = None,
    values: bool = False,
) -> list[KeptCall]:
    """Run a model once and return its attention calls in order.

    A score adds its gradients, and the values; `values` these alone.

    Raises:
        ValueError: no attention was seen; heads on other ranks; a score that is no number with a
            gradient.
    """
    quoted = check_model(function, model)
    check_inputs(quoted, inputs)
    wanted, unwanted = chosen(modules), dict[str, None]()
    calls: list[KeptCall] = []

    def listen(call: AttentionCall) -> Tensor | None:
        if call.again:
            return None
        if not wanted(call.name, call.layer):
            unwanted[call.name] = None
            return None
        if call.heads < call.all_heads:
            raise ValueError(
                f"{quoted}: {call.heads} of the {call.all_heads} heads of {call.name!r} are on "
                f"this rank."
            )
        q, k = (x.detach().clone() for x in (call.q, call.k))
        one = KeptCall(replace(call, q=q, k=k, v=k, model_out=_gone, values=None, lse=None))
        one.call.one_pass = one.call.waiting = None
        if score is not None:
            out = call.out
            one.out = out.view_as(out) if out.requires_grad else out.detach().requires_grad_()
        if score is not None or values:
            one.values = call.all_values.detach()
        call.on_complete(lambda _: calls.append(one))
        return one.out

    with torch.set_grad_enabled(score is not None), catch(model, listen, function=function) as net:
        output = call_model(model, inputs)
        if not calls:
            why = why_left_out(modules, unwanted) if unwanted else net.names.why_nothing()
            raise ValueError(f"{quoted}: no attention was seen, for {why}.")
        if score is not None:
            total = total_of(score(output), quoted)
            outs = [one.out for one in calls if one.out is not None]
            slopes = torch.autograd.grad(total, outs, allow_unused=True, materialize_grads=True)
            for one, slope in zip(calls, slopes, strict=True):
                one.slope, one.out = slope, None
    for one in calls:  # a module's number may follow from later calls
        one.call.layer = net.numbers.get(one.call.name, one.call.layer)
    return calls


def total_of(scores: Any, quoted: str) -> Tensor:
    """Return the sum of the scores of all rows.

    Raises:
        ValueError: no tensor of one or no axis, or one without a gradient.
    """
    if not isinstance(scores, Tensor) or scores.dim() > 1:
        given = list(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        raise ValueError(
            f"{quoted}: score(output) gave {given}; it must give a number for each row, [B], or "
            f"their sum, []."
        )
    if not scores.requires_grad:
        raise ValueError(f"{quoted}: the score has no gradient; it must not be detached.")
    return scores.sum()


def _gone() -> Tensor:
    raise RuntimeError("the output of a kept call is not kept")

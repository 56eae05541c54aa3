"""One run of a model: what is kept of its attention calls, and the gradients of a score."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor, nn

from ..capture.call import AttentionCall
from ..capture.catch import catch
from ..capture.modules import Modules, call_model, check_inputs, check_model

Kept = TypeVar("Kept")
Score = Callable[[Any], Tensor]
"""A function of the model's output, giving a number for each row, `[B]`, or one for all, `[]`."""


@dataclass
class HeadRun(Generic[Kept]):
    """The attention calls of one run of a model, in order.

    Attributes:
        names: the names of the modules that made the calls.
        results: what `keep` returned for each.
        slopes: the score's gradient with respect to each output `[B, H, T, Dv]`; empty if none.
        numbers: the layer number of each module, by the module's name.
        score: the score, detached; NaN if none was requested.
    """

    names: list[str] = field(default_factory=list)
    results: list[Kept] = field(default_factory=list)
    slopes: list[Tensor] = field(default_factory=list)
    numbers: dict[str, int] = field(default_factory=dict)
    score: Tensor = field(default_factory=lambda: torch.tensor(torch.nan))


def run_heads(
    function: str,
    model: nn.Module,
    inputs: Any,
    keep: Callable[[AttentionCall], Kept],
    *,
    modules: Modules = None,
    score: Score | None = None,
    gradient: Literal["full", "direct"] | None = None,
    named: str = "score",
) -> HeadRun[Kept]:
    """Run a model once, collect `keep(call)` for each attention call, and compute a score.

    Args:
        gradient: `"full"`: `slopes` has the gradients of the score. `"direct"`: the same, but with
            the heads' outputs detached from the graph that computed them.
        named: the name of the score argument, for error messages.

    Raises:
        ValueError: no attention was seen; the score has the wrong shape, or no gradient.
    """
    quoted = check_model(function, model)
    check_inputs(quoted, inputs)
    run, outs = HeadRun[Kept](), list[Tensor]()

    def listen(call: AttentionCall) -> Tensor | None:
        if call.again:
            return None
        result, out = keep(call), None
        if gradient is not None:
            given = call.out if gradient == "full" else call.out.detach()
            out = given.view_as(given) if given.requires_grad else given.detach().requires_grad_()

        def complete(_: Any) -> None:
            run.names.append(call.name)
            run.results.append(result)
            if out is not None:
                outs.append(out)

        call.on_complete(complete)
        return out

    with (
        torch.set_grad_enabled(gradient is not None),
        catch(model, listen, function=function, modules=modules) as net,
    ):
        output = call_model(model, inputs)
        net.check_seen(run.names, quoted)
        if score is not None:
            value = _checked(score(output), quoted, named, gradient is not None)
            run.score = value.detach()
            if gradient is not None:
                slopes = torch.autograd.grad(
                    value.sum(), outs, allow_unused=True, materialize_grads=True
                )
                run.slopes = list(slopes)
    run.numbers = dict(net.numbers)
    return run


def _checked(value: Any, quoted: str, name: str, gradient: bool) -> Tensor:
    if not isinstance(value, Tensor) or value.dim() > 1:
        given = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(
            f"{quoted}: {name}(output) gave {given}; it must give a number for each row, [B], or "
            f"one for all, []."
        )
    if gradient and not value.requires_grad:
        raise ValueError(f"{quoted}: the {name} has no gradient; it must not be detached.")
    return value


def output_of(call: AttentionCall) -> Tensor:
    """Return a copy of the outputs of a call's heads, without a graph."""
    return call.out.detach().clone()


@dataclass
class KeptCall:
    """A call without its output: q and k, mask and options; values and a gradient, if kept."""

    call: AttentionCall
    values: Tensor | None = None
    slope: Tensor | None = None
    """The gradient of a score with respect to the heads' outputs, `[B, H, T, Dv]`."""


def kept_calls(
    function: str,
    model: nn.Module,
    inputs: Any,
    modules: Modules = None,
    score: Score | None = None,
    values: bool = False,
) -> list[KeptCall]:
    """Run a model once and return its attention calls in order.

    With a score, they also hold its gradients and the values; with `values`, the values and the
    output projections, even if these belong to a different module, as in BERT.

    Raises:
        ValueError: for the same reasons as `run_heads()`; some heads are on other ranks.
    """
    quoted = check_model(function, model)
    unread: list[tuple[AttentionCall, Tensor]] = []

    def keep(call: AttentionCall) -> KeptCall:
        if call.heads < call.all_heads:
            raise ValueError(
                f"{quoted}: {call.heads} of the {call.all_heads} heads of {call.name!r} are on "
                f"this rank."
            )
        q, k = (x.detach().clone() for x in (call.q, call.k))
        one = KeptCall(replace(call, q=q, k=k, v=k, model_out=_gone, values=None, lse=None))
        one.call.one_pass = one.call.waiting = None
        if score is not None or values:
            one.values = call.all_values.detach()
        if values and call.projection is None:
            unread[:] = [(one.call, call.out.detach().transpose(1, 2).flatten(2))]
        return one

    gradient: Literal["full"] | None = None if score is None else "full"
    with _readers(model, unread) if values else nullcontext():
        run = run_heads(
            function, model, inputs, keep, modules=modules, score=score, gradient=gradient
        )
    for one, slope in zip(run.results, run.slopes, strict=False):
        one.slope = slope
    for one in run.results:  # a module's number may follow from later calls
        one.call.layer = run.numbers.get(one.call.name, one.call.layer)
    return run.results


@contextmanager
def _readers(model: nn.Module, unread: list[tuple[AttentionCall, Tensor]]) -> Iterator[None]:
    """Use the first linear layer whose input is exactly a call's output as its projection."""

    def read(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        x = inputs[0] if inputs else None
        if unread and isinstance(x, Tensor) and x.numel() == unread[0][1].numel():
            call, out = unread[0]
            if torch.equal(x.detach().reshape(-1), out.reshape(-1)):
                weight: Any = layer.weight
                call.projection = weight.T if type(layer).__name__ == "Conv1D" else weight
                unread.clear()

    layers = [
        one
        for one in model.modules()
        if isinstance(one, nn.Linear) or type(one).__name__ == "Conv1D"
    ]
    handles = [one.register_forward_pre_hook(read) for one in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _gone() -> Tensor:
    raise RuntimeError("the output of a kept call is not kept")

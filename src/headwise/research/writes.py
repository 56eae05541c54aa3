"""Vectors that heads write: their outputs, their contributions to logits, and weighted norms."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..capture.modules import Modules, call_model, check_inputs, check_model
from .flow import carried, row_of_token
from .norms import NormMap, is_norm
from .runs import Score, kept_calls, output_of, run_heads
from .values import HeadValues, joined


def head_outputs(model: nn.Module, inputs: Any, *, modules: Modules = None) -> HeadValues:
    """Run a model and return the output of every head, before the output projection.

    Args:
        model: any model that `watch()` supports.
        inputs: the inputs: a dict of keywords (the output of a tokenizer), a tuple or list
            of arguments, or a single argument.
        modules: use only these, as in `watch()`.

    Returns:
        `outputs["L2H9"]` `[B, T, Dv]` and `outputs["L2"]` `[B, H, T, Dv]`, without a graph. The
        table has the mean length of each head's output, `output_norm`.

    Raises:
        ValueError: no attention was captured; a module is called with different shapes.

    >>> import headwise as hw
    >>> layer = hw.MultiHeadAttention(24, num_heads=3)
    >>> outputs = hw.head_outputs(layer, torch.randn(2, 7, 24))
    >>> outputs["L0H2"].shape, outputs["L0"].shape
    (torch.Size([2, 7, 8]), torch.Size([2, 3, 7, 8]))
    """
    run = run_heads("head_outputs", model, inputs, output_of, modules=modules)
    outs = joined(run.names, run.results, check_model("head_outputs", model))

    def number(out: Tensor) -> Tensor:
        return torch.linalg.vector_norm(out.float(), dim=-1).mean((0, 2))

    return HeadValues("output_norm", outs, run.numbers, number)


def logit_attribution(model: nn.Module, inputs: Any, score: Score) -> HeadValues:
    """Compute the direct contribution of each head to a logit, or to any function of the logits.

    Only the direct path counts: from a head's output through the output projection, the residual
    stream and the last norm, with a fixed scale, to `score`. Paths through later heads and MLPs are
    cut: at the outputs of heads, and at the norms before MLPs. A score that is not linear in the
    logits is linearized.

    Args:
        model: any model that `watch()` supports, with a residual stream to which blocks add their
            outputs. The last norm is the one that is called last.
        inputs: as in `head_outputs()`.
        score: `score(output)` for each row of the batch `[B]`, or its sum: a logit such as
            `out.logits[:, -1, 7]`, or a difference of logits.

    Returns:
        The contribution of each head's output at each position to the score, `[B, T]`. For a score
        of the last position, other positions are zero. The table has sums over positions, averaged
        over the batch: `attribution`.

    Raises:
        ValueError: no attention was captured; there is no direct path, as in models that normalize
            the stream itself (post-norm); the score has the wrong shape or no gradient.

    >>> from headwise.models import builtin, load
    >>> model, tokenizer = load(builtin())
    >>> ids = torch.tensor([tokenizer.encode("The with statement wraps the block").ids])
    >>> found = logit_attribution(model, ids, lambda logits: logits[:, -1, 7] - logits[:, -1, 9])
    >>> found["L2H1"].shape
    torch.Size([1, 11])

    Source: Elhage et al. 2021; Nanda & Bloom 2022 (`logit_attrs` of TransformerLens).
    """
    function = "logit_attribution"
    quoted = check_model(function, model)
    check_inputs(quoted, inputs)
    norms: list[tuple[nn.Module, int]] = []
    with torch.no_grad(), _norms(model, lambda norm, _, out: norms.append((norm, out.shape[-1]))):
        call_model(model, inputs)
    last = norms[-1][0] if norms else None
    form = NormMap.of(*norms[-1]) if norms else None

    def cut(norm: nn.Module, x: tuple[Tensor, ...], out: Tensor) -> Tensor:
        return out.detach() if form is None or norm is not last else _held(form, x[0], out)

    with _norms(model, cut):
        run = run_heads(function, model, inputs, output_of, score=score, gradient="direct")
    if not any(bool(slope.any()) for slope in run.slopes):
        raise ValueError(
            f"{quoted}: no head has a direct path to the score: the model normalizes the residual "
            f"stream, or what heads write, before the last norm."
        )
    parts = [(out * slope).sum(-1) for out, slope in zip(run.results, run.slopes, strict=True)]
    tensors = joined(run.names, parts, quoted)
    return HeadValues("attribution", tensors, run.numbers, lambda x: x.sum(2).mean(0))


def weighted_norms(
    model: nn.Module, inputs: Any, token: int | Tensor | None = None, *, modules: Modules = None
) -> HeadValues:
    """Compute the weighted norm of each key's value vector, `α_ij ‖W_h v_j‖`, without a T×T matrix.

    Args:
        model: any model that `watch()` supports whose output projection is known.
        inputs: as in `head_outputs()`.
        token: the position of the query, as in `rollout()`. Default: the sum over all queries,
            `‖W_h v_j‖ Σ_i α_ij`.
        modules: use only these, as in `watch()`.

    Returns:
        `[B, S]` for each head. The table has sums over keys, averaged over the batch:
        `weighted_norm`.

    Raises:
        ValueError: no attention was captured; an output projection or the values are not known.

    >>> import headwise as hw
    >>> layer = hw.MultiHeadAttention(24, num_heads=3)
    >>> weighted_norms(layer, torch.randn(2, 7, 24), token=-1)["L0H2"].shape
    torch.Size([2, 7])

    Source: Kobayashi et al. 2020, "Attention is Not Only a Weight", eq. 3.
    """
    quoted = check_model("weighted_norms", model)
    calls = kept_calls("weighted_norms", model, inputs, modules, values=True)
    numbers = {one.call.name: one.call.layer for one in calls}
    names, parts = [one.call.name for one in calls], list[Tensor]()
    while calls:
        one = calls.pop(0)
        call, weight = one.call, one.call.projection
        if weight is None or one.values is None:
            raise ValueError(
                f"{quoted}: the output projection of {call.name!r} is not known; choose others "
                f"with modules=…"
            )
        row = call.q.new_ones(call.batch, call.queries)
        if token is not None:
            row = row_of_token(call, token, quoted)
        v = one.values.repeat_interleave(call.heads // one.values.shape[1], 1).to(weight.dtype)
        each = weight.detach().unflatten(1, (call.heads, -1)).transpose(0, 1)
        triangle = torch.linalg.qr(each.to(row.dtype), mode="r").R
        lengths = torch.linalg.vector_norm(
            torch.einsum("hed,bhsd->bhse", triangle, v.to(row.dtype)), dim=-1
        )
        parts.append(carried(one, row) * lengths)
    tensors = joined(names, parts, quoted)
    return HeadValues("weighted_norm", tensors, numbers, lambda x: x.sum(2).mean(0))


@contextmanager
def _norms(model: nn.Module, hook: Any) -> Iterator[None]:
    """Hook every normalization of a model in a `with` block."""
    handles = [one.register_forward_hook(hook) for one in model.modules() if is_norm(one)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _held(form: NormMap, x: Tensor, out: Tensor) -> Tensor:
    """Return a norm's output, with the gradient for a fixed scale."""
    linear = form.centered(x) * form.gain.to(x.dtype)
    given, plain = (out - form.shift.to(out.dtype)).detach(), linear.detach()
    factor = (given * plain).sum(-1, keepdim=True) / plain.square().sum(-1, keepdim=True)
    linear = linear * factor
    return out.detach() + linear - linear.detach()

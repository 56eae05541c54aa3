"""Detectors of heads with a known pattern, with the scores of TransformerLens' `detect_head`."""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from jaxtyping import Int
from torch import Tensor, nn

from ..capture.modules import call_model
from ..capture.watch import watch
from ..core.index import grid
from ..core.mask_algebra import Mask
from ..core.shapes import Extent
from ..stats.lse import Sink
from ..stats.mass import Mass
from ..stats.patterns import First, Induction, Previous, SameToken, Self
from .values import HeadValues

Kind = Literal["previous_token_head", "duplicate_token_head", "induction_head"]
Measure = Literal["mul", "abs"]


def detect_heads(
    model: nn.Module,
    ids: Int[Tensor, "B T"],
    kind: Kind,
    *,
    exclude_bos: bool = False,
    exclude_current_token: bool = False,
    measure: Measure = "mul",
    inputs: Any = None,
) -> HeadValues:
    """Score how well the attention of each head of a decoder fits a pattern, without a T×T matrix.

    Args:
        model: any causal model that `watch()` supports.
        ids: the tokens of the text, the input of the model unless `inputs` is given.
        kind: `"previous_token_head"` (the key before), `"duplicate_token_head"` (earlier keys of
            the same token) or `"induction_head"` (the keys after these).
        exclude_bos, exclude_current_token: exclude attention to the first key, or to the query's
            own position.
        measure: `"mul"`: the fraction of attention on the pattern. `"abs"`: 1 minus the sum of
            `|A − pattern|` divided by the number of tokens; TransformerLens rounds it to three
            digits.
        inputs: the inputs of the model: keyword or positional arguments, or a single argument.

    Returns:
        The scores of each head, `[B]`, by its address. The table has means over texts, in a
        column named after the kind.

    Raises:
        ValueError: the kind or measure is unknown, or no attention was captured.

    >>> from headwise.models import builtin, load
    >>> model, _ = load(builtin())
    >>> once = torch.randint(512, (1, 20), generator=torch.Generator().manual_seed(0))
    >>> found = detect_heads(model, torch.cat([once, once], 1), "induction_head")
    >>> found["L1H1"].item() > 0.4
    True

    Source: Olsson et al. 2022; Wang et al. 2022; `head_detector` of TransformerLens.
    """
    for name, value, known in (("kind", kind, Kind), ("measure", measure, Measure)):
        if value not in get_args(known):
            some = " or ".join(get_args(known))
            raise ValueError(f"detect_heads(…, {name}={value!r}): give {some}.")
    keys: Mask = {
        "previous_token_head": Previous(),
        "duplicate_token_head": SameToken(ids),
        "induction_head": Induction(ids),
    }[kind]
    for exclude, mask in ((exclude_bos, First()), (exclude_current_token, Self())):
        keys = keys & ~mask if exclude else keys
    left_out = exclude_bos * [Mass(First(), "bos")] + exclude_current_token * [Mass(Self())]
    with torch.no_grad(), watch(model, Mass(keys, "pattern"), Sink(), *left_out) as seen:
        call_model(model, ids if inputs is None else inputs)
    seen.must_not_be_empty()
    length, scores = ids.shape[1], {}
    wanted = _count(keys, ids)[:, None] if measure == "abs" else ids.new_zeros(1, 1)
    for name in seen.modules:
        call = seen[name].calls[0]
        sink, valid = call["sink"].values, call["sink"].rows
        total = ((1 - sink) if valid is None else (1 - sink) * valid).sum(2)
        if exclude_bos:
            total = total - call["bos"].values.sum(2)
        if exclude_current_token:  # the first query's key is subtracted only once
            total = total - call["self"].values[:, :, int(exclude_bos) :].sum(2)
        inside = call["pattern"].values.sum(2)
        share, distance = inside / total, (total - 2 * inside + wanted) / length
        scores[name] = share if measure == "mul" else 1 - distance
    return HeadValues(kind, scores, seen.numbers, lambda x: x.double().mean(0))


def _count(keys: Mask, ids: Tensor) -> Tensor:
    """Return the number of pairs of a pattern among keys up to the query, `[B]`."""
    batch, length = ids.shape
    extent, total = Extent(batch, 1, 1, length, length), ids.new_zeros(batch)
    for start in range(0, length, 256):  # never the whole matrix
        i, j = grid(extent, ids.device, slice(start, min(start + 256, length)), slice(0, length))
        allowed = keys.allowed(i, j, extent)
        assert allowed is not None
        allowed = allowed & (j <= i)
        total = total + allowed.expand(batch, 1, *allowed.shape[-2:]).sum((1, 2, 3))
    return total

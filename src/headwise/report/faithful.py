"""Compare traces with ablations: head weights that predict them, and how faithful a trace is."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import pad

from ..capture.modules import check_model
from ..core.numbers import as_int
from .traced import Trace

RIDGE = 0.1
"""The ridge penalty of `fit_weights`, as a fraction of the mean squared norm of its features."""


def fit_weights(
    model: nn.Module, traces: Sequence[Trace], *, ablations: int = 32, seed: int = 0
) -> Float[Tensor, "L H"]:
    """Fit head weights with which attention to segments predicts the effect of hiding them.

    Random halves of each trace's segments are hidden through the model's attention mask. The drop
    in the answer's log-probability is predicted as the sum over heads of weight × attention to the
    hidden segments, by ridge regression toward equal weights. Pass the weights to
    `trace(…, weights=…)` on prompts of the same kind.

    Args:
        model: the traced model, from transformers.
        traces: at least one, each with two segments or more.
        ablations: the number of ablated forward passes for each trace.
        seed: the seed for choosing the halves.

    Raises:
        ValueError: there is no trace; one has no segments, or has weights; layers have different
            numbers of heads; or the model takes no `attention_mask`.

    Source: Cohen-Wang et al. 2025, "Learning to Attribute with Attention" (AT2).
    """
    if not traces or any(one.head_weights is not None for one in traces):
        raise ValueError(f"fit_weights(…): give traces without weights; got {len(traces)} traces.")
    generator = torch.Generator().manual_seed(seed)
    features, falls = [], []
    for one in traces:
        attention = _attention(one)  # [A, segments]
        whole = log_probability(model, one)
        for _ in range(ablations):
            hidden = torch.rand(len(one.names), generator=generator) < 0.5
            features.append(attention @ hidden.float())
            falls.append(whole - log_probability(model, one, hidden.nonzero()[:, 0].tolist()))
    x, y = torch.stack(features).double(), torch.tensor(falls, dtype=torch.float64)
    mean = x.sum(1)
    equal = (mean @ y) / (mean @ mean).clamp(min=1e-12)
    gram = x @ x.mT
    penalty = RIDGE * gram.diagonal().mean() * torch.eye(len(x), dtype=torch.float64)
    weights = equal + x.mT @ torch.linalg.solve(gram + penalty, y - equal * mean)
    layers = traces[0].by_head.shape[0]
    return weights.float().unflatten(0, (layers, -1))


def faithfulness(
    model: nn.Module, trace: Trace, *, k: int = 1, draws: int = 8, seed: int = 0
) -> list[dict[str, Any]]:
    """Compare hiding the k segments that a trace ranks highest with hiding others instead.

    Args:
        model: the traced model, from transformers.
        trace: a trace with more than k segments.
        k: the number of segments to hide at once.
        draws: the number of random choices to average over.
        seed: the seed for the random choices.

    Returns:
        A row per choice: `hidden`, which is `"weights"` (if the trace has head weights),
        `"attention"` (the mean over heads), `"recent"` (the last k) or `"random"`; `segments`,
        their names; and `fall`, the drop in the answer's log-probability in nats. A trace is
        faithful if its choice causes a larger drop than recent and random segments.

    Raises:
        ValueError: the trace has k or fewer segments, or the model takes no `attention_mask`.
    """
    count = len(trace.names)
    if (number := as_int(k)) is None or not 0 < number < count:
        raise ValueError(f"faithfulness(…, k={k!r:.60}): the trace has {count} segments.")
    attention = _attention(trace)
    generator = torch.Generator().manual_seed(seed)
    choices = {
        "attention": [attention.sum(0).topk(number).indices.tolist()],
        "recent": [list(range(count - number, count))],
        "random": [
            torch.randperm(count, generator=generator)[:number].tolist() for _ in range(draws)
        ],
    }
    if trace.head_weights is not None:
        weighted = trace.head_weights @ attention
        choices = {"weights": [weighted.topk(number).indices.tolist()], **choices}
    whole = log_probability(model, trace)
    rows = []
    for name, every in choices.items():
        falls = [whole - log_probability(model, trace, hidden) for hidden in every]
        names = [] if name == "random" else [trace.names[n] for n in every[0]]
        rows.append({"hidden": name, "segments": names, "fall": sum(falls) / len(falls)})
    return rows


def log_probability(model: nn.Module, trace: Trace, hidden: Collection[int] = ()) -> float:
    """Return the log-probability in nats of a trace's answer, without the segments `hidden`."""
    taken = inspect.signature(model.forward).parameters
    if "attention_mask" not in taken:
        raise ValueError(f"{check_model('fit_weights', model)}: it takes no attention_mask.")
    device = next(model.parameters()).device
    answer, length = torch.tensor([trace.ids]), len(trace.prompt_ids)
    inputs = {  # per-token inputs are 0 for the answer
        name: pad(one, (0, len(trace.ids))) if one.shape == (1, length) else one
        for name, one in trace.inputs.items()
        if isinstance(one, Tensor)
    }
    mask = trace.inputs["attention_mask"].clone()
    place = pad(mask, (0, len(trace.ids)), value=1).cumsum(1) - 1  # padding is not counted
    mask[0, trace.members[:, list(hidden)].any(1)] = 0
    inputs["attention_mask"] = pad(mask, (0, len(trace.ids)), value=1)
    inputs["input_ids"] = torch.cat([trace.inputs["input_ids"], answer], dim=1)
    if "pixel_values" not in inputs and "position_ids" in taken:
        inputs["position_ids"] = place.clamp(min=0)
    few = {"logits_to_keep": len(trace.ids) + 1} if "logits_to_keep" in taken else {}
    with torch.no_grad():
        logits = model(**{name: one.to(device) for name, one in inputs.items()}, **few).logits
    logs = logits[0, -len(trace.ids) - 1 : -1].float().log_softmax(-1)
    return float(logs.gather(-1, answer[0, :, None].to(device)).sum())


def _attention(trace: Trace) -> Float[Tensor, "A n"]:
    """Return the attention of each head to each segment, summed over generated tokens.

    Raises:
        ValueError: the trace has no segments.
    """
    if not trace.names:
        raise ValueError("the trace has no segments: give segments=… to trace()")
    return trace.masses[..., 2 : 2 + len(trace.names)].sum(0).float()

"""Traces held to ablations: weights of heads that predict them, and how faithful a trace is."""

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
"""The penalty of `fit_weights`, as a share of the mean square of its features."""


def fit_weights(
    model: nn.Module, traces: Sequence[Trace], *, ablations: int = 32, seed: int = 0
) -> Float[Tensor, "L H"]:
    """Fit a weight per head, so that weighted attention to segments predicts what hiding them does.

    Random halves of each trace's segments are hidden from the model through its attention mask. The
    fall of the answer's log-probability is predicted as the sum over heads of weight × attention to
    what is hidden, by ridge regression towards equal weights. Give the weights to
    `trace(…, weights=…)` on prompts of the same kind.

    Args:
        model: the model of transformers that was traced.
        traces: at least one, each with two segments or more.
        ablations: forward passes for each trace.
        seed: of the halves.

    Raises:
        ValueError: no trace; one without segments, or with weights; layers of different numbers of
            heads; a model that takes no `attention_mask`.

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
    """Hide the k segments that a trace ranks highest, and others in their place.

    Args:
        model: the model of transformers that was traced.
        trace: a trace with more than k segments.
        k: how many segments are hidden at once.
        draws: random choices, of which the mean is given.
        seed: of the choices.

    Returns:
        A row per choice: `hidden`, which is `"weights"` (of the trace, if it had some),
        `"attention"` (the mean over heads), `"recent"` (the last ones) or `"random"`; `segments`,
        their names; and `fall`, by how many nats the log-probability of the answer falls. A trace
        is faithful if it falls more than by recent and random ones.

    Raises:
        ValueError: k segments that the trace has not; a model that takes no `attention_mask`.
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
    """Return the log-probability of a trace's answer, in nats, with segments `hidden` by number."""
    taken = inspect.signature(model.forward).parameters
    if "attention_mask" not in taken:
        raise ValueError(f"{check_model('fit_weights', model)}: it takes no attention_mask.")
    device = next(model.parameters()).device
    answer, length = torch.tensor([trace.ids]), len(trace.prompt_ids)
    inputs = {  # those of each token are 0 for the answer
        name: pad(one, (0, len(trace.ids))) if one.shape == (1, length) else one
        for name, one in trace.inputs.items()
        if isinstance(one, Tensor)
    }
    mask = trace.inputs["attention_mask"].clone()
    place = pad(mask, (0, len(trace.ids)), value=1).cumsum(1) - 1  # of tokens that are no padding
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

"""Keras' own tests of its attention layers, each call of which headwise makes again.

After a call of the layer its weights go through `convert` into headwise's, which must give the same
output, and the same probabilities where the call returns them.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import keras
import pytest
import torch
import torch.nn.functional as F
from keras.src.layers.attention.grouped_query_attention_test import GroupedQueryAttentionTest
from keras.src.layers.attention.multi_head_attention_test import MultiHeadAttentionTest
from torch import Tensor

import headwise as hw

__all__ = ["GroupedQueryAttentionTest", "MultiHeadAttentionTest"]  # pytest collects these
MULTI, GROUPED = keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention


@pytest.fixture(autouse=True)
def _again(count: Callable[..., None]) -> Iterator[None]:
    """Make every call of Keras' layers again."""
    multi, grouped = again(MULTI.call, count), again(GROUPED.call, count)
    with patch.object(MULTI, "call", multi), patch.object(GROUPED, "call", grouped):
        yield


def again(original: Callable[..., Any], count: Callable[..., None]) -> Callable[..., Any]:
    """A layer's `call`, followed by headwise's own."""

    @functools.wraps(original)
    def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(original).bind(layer, *args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        masks = {name: keras.src.backend.get_keras_mask(given[name]) for name in ("query", "value")}
        given |= {f"{name}_mask": mask for name, mask in masks.items() if mask is not None}
        result = original(layer, *args, **kwargs)
        reason = compare(layer, given, result)
        count(**{f"calls {reason or 'made again'}": 1})
        return result

    return call


@torch.no_grad()
def compare(layer: Any, given: dict[str, Any], result: Any) -> str | None:
    """Compare the layer's result with headwise's, or say why there is none to compare."""
    query, value = given["query"], given["value"]
    key = value if given["key"] is None else given["key"]
    result, scores = result if isinstance(result, tuple) else (result, None)
    if not isinstance(result, Tensor) or result.is_meta:
        return "on shapes, without numbers"
    if query.dim() != 3:
        return "that attend along several axes"
    if layer.dropout and given["training"]:
        return "that drop weights"
    if getattr(layer, "use_gate", False) or getattr(layer, "_use_gate", False):
        return "with gates on the outputs"
    weights = {w.path.removeprefix(f"{layer.path}/"): w.value for w in layer.weights}
    if not {name.partition("/")[2] for name in weights} <= {"kernel", "bias"}:
        return "of quantised or adapted weights"
    sizes = sizes_of(layer)
    try:
        state = hw.convert(weights, source="keras", target="headwise", **sizes)
    except ValueError:
        return "with values wider than keys"
    seen = headwise_again(state, sizes, query, key, value, mask_of(layer, given))
    ours = F.linear(seen.out.transpose(1, 2).flatten(2), state["out.weight"], state.get("out.bias"))
    rows = seen.rows.expand(seen.lse.shape)  # of the others Keras makes a mean of all values
    agree(ours, result, rows.all(1)[..., None])
    if scores is not None:
        agree(seen.weights(), scores, rows[..., None])
    if key is value:
        made = {"embed_dim": query.shape[-1], "kv_dim": value.shape[-1], "out_dim": ours.shape[-1]}
        twin = hw.MultiHeadAttention(
            **made, **sizes, head_dim=seen.out.shape[-1], bias="out.bias" in state
        )
        twin.load_state_dict(state)
        agree(twin(query, value, mask=mask_of(layer, given)), ours, rows.all(1)[..., None])
    return None


def agree(ours: Tensor, theirs: Tensor, rows: Tensor) -> None:
    """Compare those rows; of half precision, both round at each step."""
    tolerance = max(1e-5, 8 * torch.finfo(theirs.dtype).eps)
    ours, theirs = (x.float() * rows for x in (ours, theirs))
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def sizes_of(layer: Any) -> dict[str, int]:
    if isinstance(layer, GROUPED):
        return {"num_heads": layer.num_query_heads, "num_kv_heads": layer.num_key_value_heads}
    return {"num_heads": layer.num_heads, "num_kv_heads": layer.num_heads}


def mask_of(layer: Any, given: dict[str, Any]) -> hw.Mask | None:
    """The masks of the call as one, as Keras joins them."""
    query, value = given["query"], given["value"]
    table = layer._compute_attention_mask(
        query,
        value,
        query_mask=given["query_mask"],
        value_mask=given["value_mask"],
        key_mask=given["key_mask"],
        attention_mask=given["attention_mask"],
        use_causal_mask=given["use_causal_mask"],
    )
    if table is None:
        return None
    table = torch.as_tensor(table).bool()
    queries, keys = query.shape[1], value.shape[1]
    causal = hw.Causal().dense(queries=queries, keys=keys)[0, 0]
    if queries == keys and torch.equal(table, causal.expand(table.shape)):
        return hw.Causal()
    return hw.Dense(table.unsqueeze(1) if table.dim() == 3 else table)


def headwise_again(
    state: dict[str, Tensor],
    sizes: dict[str, int],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: hw.Mask | None,
) -> hw.stats.Seen:
    """The call with the converted weights; key and value may be of different sequences."""
    heads, shared = sizes["num_heads"], sizes["num_kv_heads"]
    rows = state["out.weight"].shape[1] // heads
    lengths = [heads * rows, shared * rows, shared * rows]
    parts: dict[str, list[Tensor | None]] = {}
    for kind in ("weight", "bias"):
        joined = [state[f"{n}.{kind}"] for n in ("qkv", "q", "kv") if f"{n}.{kind}" in state]
        if len(joined) == 2:
            parts[kind] = [joined[0], *joined[1].split(lengths[1:])]
        else:
            parts[kind] = [*joined[0].split(lengths)] if joined else [None] * 3
    q, k, v = (
        F.linear(x, weight, bias).unflatten(-1, (-1, rows)).transpose(1, 2)
        for x, weight, bias in zip((query, key, value), *parts.values(), strict=True)
    )
    return hw.observe(q, k, v, mask=mask)

"""Capture `F.multi_head_attention_forward` and the fused layers of `nn.MultiheadAttention`.

A copy of the composite function runs that does not dispatch to function modes itself, so that the
attention inside it is captured. In evaluation PyTorch uses fused layers whose interior cannot be
intercepted: they run unchanged, and q, k and v are computed a second time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ...backends import Call, choose
from ...core.mask_algebra import Mask
from ...core.shapes import Extent, extent_of
from ..call import AttentionCall
from ..head_axis import Composite, inside
from ..mask_import import MaskMemo, as_mask, without_padding
from ..private_torch import arguments, parameters, without_dispatch
from ..serve import (
    BYPASS,
    AcceleratedCall,
    Accelerator,
    AttentionRequest,
    accelerators,
    note,
    serve,
    watched,
)
from ..session import CaptureSession, Interceptor
from .sdpa import nested_like, padded

_FORWARD: Any = F.multi_head_attention_forward


def multi_head_attention_forward(
    net: CaptureSession, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run the composite function; its `scaled_dot_product_attention` or softmax reports heads."""
    named = dict(zip(_NAMES, args, strict=False)) | kwargs
    if named.get("need_weights", True) and not watched():
        note(_ROUTE, _WEIGHTS)
    behind = (named["bias_k"] is not None) + bool(named["add_zero_attn"])
    own = named["query"] is named["key"]
    of = Composite(named["num_heads"], own, behind, named["out_proj_weight"])
    with inside(of), net.functions:
        return without_dispatch(_FORWARD)(*args, **kwargs)


_NAMES = parameters(_FORWARD)
_ROUTE = "multi_head_attention"
_WEIGHTS = "attention weights are requested (need_weights=True)"


# ── fused layers ────────────────────────────────────────────────────────────────────────────────


def native_multi_head_attention(
    net: CaptureSession, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """`torch._native_multi_head_attention`, which `nn.MultiheadAttention` uses in evaluation."""
    bound_args = arguments(torch.ops.aten._native_multi_head_attention.default, args, kwargs)
    given = [bound_args[name] for name in ("query", "key", "value")]

    def fused() -> _Fused:
        query, allowed = _wide(given[0], bound_args["mask"], bound_args["mask_type"])
        inputs = [query if x is given[0] else x for x in given]
        return _Fused(inputs, bound_args["num_head"], bound_args, allowed, given[0] is given[1])

    refused = _WEIGHTS if bound_args["need_weights"] else _nested(given[0])
    run = partial(function, *args, **kwargs)
    result, new = _attended(net, net.names.current, _ROUTE, run, refused, fused, lambda x: x[0])
    if new is None:
        return result
    projected = _projected(new, bound_args)
    projected = nested_like(projected, given[0]) if given[0].is_nested else projected
    _REPLACED[projected] = new
    return projected, None if result is None else result[1]


def transformer_encoder_layer(
    net: CaptureSession, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """`torch._transformer_encoder_layer_fwd`, for `nn.TransformerEncoderLayer` in evaluation."""
    bound_args = arguments(torch.ops.aten._transformer_encoder_layer_fwd.default, args, kwargs)
    first = bound_args["norm_first"]

    def norm(x: Tensor, number: int) -> Tensor:
        weight, bias = bound_args[f"norm_weight_{number}"], bound_args[f"norm_bias_{number}"]
        return F.layer_norm(x, weight.shape, weight, bias, bound_args["eps"])

    def wide() -> tuple[Tensor, Tensor | None]:
        return _wide(bound_args["src"], bound_args["mask"], bound_args["mask_type"])

    def fused() -> _Fused:
        src, allowed = wide()
        x = norm(src, 1) if first else src
        return _Fused([x, x, x], bound_args["num_heads"], bound_args, allowed, own=True)

    name = ".".join(part for part in (net.names.current, "self_attn") if part)
    run = partial(function, *args, **kwargs)
    refused = _nested(bound_args["src"])
    result, new = _attended(net, name, "transformer_encoder_layer", run, refused, fused)
    if new is None:
        return result
    x = wide()[0] + _projected(new, bound_args)
    x = x if first else norm(x, 1)
    y = F.linear(norm(x, 2) if first else x, bound_args["ffn_weight_1"], bound_args["ffn_bias_1"])
    y = F.gelu(y) if bound_args["use_gelu"] else F.relu(y)
    x = x + F.linear(y, bound_args["ffn_weight_2"], bound_args["ffn_bias_2"])
    x = x if first else norm(x, 2)
    x = nested_like(x, bound_args["src"]) if bound_args["src"].is_nested else x
    _REPLACED[x] = new
    return x


def _attended(
    net: CaptureSession,
    name: str,
    route: str,
    run: Callable[[], Any],
    refused: str,
    fused: Callable[[], _Fused],
    out: Callable[[Any], Tensor] = lambda result: result,
) -> tuple[Any, Tensor | None]:
    """Return the result of a fused layer, and the replacement of its heads' outputs, if any.

    If the result is None, the layer did not run. `refused` is the reason why it is not accelerated.
    """
    captures, served, heads = not isinstance(net, Accelerator), None, None
    ours = bool(accelerators()) and not watched()
    if ours:
        found: AcceleratedCall | str = refused
        if not refused:
            heads = fused()
            found = heads.serve(net.masks)
        served = None if isinstance(found, str) else found
        note(route, found, name)
    if served is not None and not captures:
        return None, served.out()
    result: Any = None
    if served is None:
        with BYPASS if ours else nullcontext():
            result = run()
        if not captures:
            return result, None
    heads = heads or fused()
    outputs: Any = heads.out if result is None else _REPLACED.get(out(result), heads.out)
    return result, heads.emit(net, name, outputs, route, served)


def _nested(x: Tensor) -> str:
    return "nested tensors" if x.is_nested else ""


def _wide(x: Tensor, mask: Tensor | None, mask_type: int | None) -> tuple[Tensor, Tensor | None]:
    """Return the input of a fused layer `[B, T, E]` and the allowed pairs (0 in the mask)."""
    if x.is_nested:
        x, lengths = padded(x)
        allowed = torch.arange(x.shape[1], device=x.device) < lengths[:, None]
    elif mask is None:
        return x, None
    else:
        allowed = ~mask.bool()
        if mask_type != 1:  # [T, S] or [B, H, T, S]
            return x, allowed
    return x, allowed[:, None, None]


def _projected(heads: Tensor, bound_args: dict[str, Any]) -> Tensor:
    """Apply the output projection to heads `[B, H, T, D]`."""
    return F.linear(
        heads.transpose(1, 2).flatten(2), bound_args["proj_weight"], bound_args["proj_bias"]
    )


_REPLACED = WeakIdKeyDictionary()
"""The replaced outputs of heads, by the output of their fused layer, for inner watches."""


class _Fused:
    """The heads of a fused layer; their outputs are computed on demand."""

    def __init__(
        self,
        given: Sequence[Tensor],
        heads: int,
        bound_args: dict[str, Any],
        allowed: Tensor | None,
        own: bool,
    ) -> None:
        self.allowed, self.own, self.heads = allowed, own, heads
        self.projection = bound_args["proj_weight"]
        weights, biases = bound_args["qkv_weight"].chunk(3), bound_args["qkv_bias"].chunk(3)
        self._parts = list(zip(given, weights, biases, strict=True))

    q = functools.cached_property(lambda self: self._split(0))
    k = functools.cached_property(lambda self: self._split(1))
    v = functools.cached_property(lambda self: self._split(2))  # which no statistic reads

    @functools.cached_property
    def mask(self) -> Mask:
        """Return the mask of the call."""
        (batch, heads, queries, _), keys = self.q.shape, self.k.shape[2]
        return as_mask(self.allowed, Extent(batch, heads, heads, queries, keys))

    def _split(self, part: int) -> Tensor:
        """Return queries, keys or values of the heads, `[B, H, T, D]`."""
        x, weight, bias = self._parts[part]
        return F.linear(x, weight, bias).unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def out(self) -> Tensor:
        """Return the heads' outputs; NaN weights give NaN (PyTorch's CPU kernel gives 0)."""
        call = Call.of(self.q, self.k, self.v, mask=self.mask)
        return choose(call).output(call)[0]

    def serve(self, memo: MaskMemo) -> AcceleratedCall | str:
        """Return the accelerated attention of the layer, or the reason why it is not accelerated.

        This is decided with uninitialized tensors, before anything is projected.
        """
        like = [x.new_empty(*x.shape[:2], w.shape[0]) for x, w, _ in self._parts]
        q, k, v = (x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in like)
        found = serve(AttentionRequest(q, k, v, self.allowed), self.out, memo)
        if isinstance(found, str):
            return found
        return serve(AttentionRequest(self.q, self.k, self.v, self.allowed), self.out, memo)

    def emit(
        self,
        net: CaptureSession,
        name: str,
        outputs: Tensor | Callable[[], Tensor],
        route: str,
        served: AcceleratedCall | None,
    ) -> Tensor | None:
        """Report the heads, and return the replacement of their outputs, if any."""
        mask = self.mask
        if self.own:
            mask = without_padding(mask, extent_of(self.q, self.k, self.v), self.q.device)
        q, k, sight = self.q, self.k, {"mask": mask}  # no statistic reads the values
        call = AttentionCall(name, route, q, k, k, outputs, sight, self.projection)
        call.values = lambda: self.v
        if served is None:
            return net.emit(call)
        call = served.attached_to(call)
        new = net.emit(call)
        return call.out if new is None else new


def functions() -> dict[Any, Interceptor]:
    """Return the functions of this file."""
    return {
        _FORWARD: multi_head_attention_forward,
        vars(torch)["_native_multi_head_attention"]: native_multi_head_attention,
        vars(torch)["_transformer_encoder_layer_fwd"]: transformer_encoder_layer,
    }

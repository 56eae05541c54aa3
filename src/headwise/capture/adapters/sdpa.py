"""Capture and accelerate `F.scaled_dot_product_attention`, with all its arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.mask_algebra import Mask
from ...core.masks import is_causal_bias
from ...core.modes import transformed
from ...core.shapes import Extent
from ..call import AttentionCall
from ..head_axis import Leading, composite, keys_behind, leading
from ..mask_import import MaskMemo, as_mask, resolve_padding
from ..parts import PendingCall
from ..private_torch import LogSumExp, table_of
from ..serve import BYPASS, AcceleratedCall, AttentionRequest, accelerators, note, serve, watched
from ..session import CaptureSession, Interceptor


def scaled_dot_product_attention(
    net: CaptureSession, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run `F.scaled_dot_product_attention` on `[…, H, T, D]` and report the call."""
    instead = lse = None
    if accelerators() and not watched():
        found = _instead(net, function, args, kwargs)
        instead, out = (found, found.empty()) if isinstance(found, Instead) else (None, found)
    else:
        query = args[0] if args else kwargs.get("query")
        out, lse = with_lse(query, lambda: function(*args, **kwargs))
    net.refuse_transforms()
    bound_args = _request(*args, **kwargs)
    if is_causal_bias(bound_args["attn_mask"]):
        bound_args |= _causal(bound_args["attn_mask"], bound_args["query"].device)
    if out.is_nested:
        return _of_nested(net, bound_args, out)
    declared = net.heads(net.names.current)
    axes = leading(out.shape, net.names.stack, bound_args["value"], declared=declared)
    if instead is not None and (axes is None or not axes.last):
        instead, out = None, instead.out()
    quote = f"scaled_dot_product_attention giving {list(out.shape)}"
    if axes is None:
        reason = f"{quote}: it is unclear which axis holds heads and which holds blocks"
        net.leave_out(net.names.stack[-1], reason)
        return out
    call = call_of(net, bound_args, out, axes)
    if lse is not None and axes.last:
        call.lse = lse.of(call.heads, call.queries)
    if instead is not None:
        call = instead.served.attached_to(call)
    waiting = None
    if composite() is None:
        known = axes.sure, axes.declared
        waiting = PendingCall(call.name, quote, axes.split(out), out.shape, call.keys, *known)
    new = net.emit(call, waiting)
    if instead is not None:
        out = instead.as_requested(call.out)
        if new is None and waiting is not None:
            waiting.out = axes.split(out)
    return out if new is None else axes.join(new, out.shape)


def with_lse(query: Any, attend: Callable[[], Any]) -> tuple[Any, LogSumExp | None]:
    """Return the result of a call, and on a GPU the log-sum-exp of its kernel."""
    if not isinstance(query, Tensor) or not query.is_cuda or query.is_nested or transformed():
        return attend(), None
    with LogSumExp() as lse:
        return attend(), lse


# ── replacement of the function ─────────────────────────────────────────────────────────────────


@dataclass
class Instead:
    """An accelerated call, and the shape and memory order of the original function's output."""

    served: AcceleratedCall
    shape: torch.Size
    in_order: bool

    def out(self) -> Tensor:
        """Return the output `[…, T, Dv]`."""
        return self.as_requested(self.served.out())

    def empty(self) -> Tensor:
        """Return a meta tensor like the output."""
        return torch.empty(self.shape, dtype=self.served.call.q.dtype, device="meta")

    def as_requested(self, out: Tensor) -> Tensor:
        """Return `[B, H, T, Dv]` with the axes and the memory order of the queries."""
        return (out.contiguous() if self.in_order else out).reshape(self.shape)


def accelerated(
    net: CaptureSession, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run the call on headwise's kernel, if that supports it and no watch captures it."""
    if watched():
        return function(*args, **kwargs)
    found = _instead(net, function, args, kwargs)
    return found.out() if isinstance(found, Instead) else found


def _instead(
    net: CaptureSession, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Instead | Tensor:
    """Return the accelerated call, or the function's own output."""
    found = _plain(function, args, kwargs, net.masks)
    note(_NAME, found if isinstance(found, str) else found.served)
    if isinstance(found, Instead):
        return found
    with BYPASS:
        return function(*args, **kwargs)


def _plain(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], memo: MaskMemo
) -> Instead | str:
    """Return the accelerated call, or the reason why it is not accelerated."""
    bound_args = _request(*args, **kwargs)
    q, k, v, given = (bound_args[name] for name in ("query", "key", "value", "attn_mask"))
    if any(x.is_nested for x in (q, k, v)):
        return "nested tensors"
    if given is not None and bound_args["is_causal"]:
        return "both a mask and is_causal"
    if is_causal_bias(given):
        bound_args |= _causal(given, q.device)
        given = bound_args["attn_mask"]
    groups, ranks = bound_args["enable_gqa"], {x.dim() for x in (q, k, v)}
    leads = {x.shape[:-3] if groups else x.shape[:-2] for x in (q, k, v)}
    if min(ranks) < 2 or (groups and (min(ranks) < 3 or len(leads) > 1)):
        return f"axes {[list(x.shape) for x in (q, k, v)]}"
    lead = q.shape[:-2] if groups or len(leads) == 1 else torch.broadcast_shapes(*leads)
    if given is not None and given.dim() > max(len(lead), 0) + 2:
        return f"a mask {list(given.shape)} with more axes than the queries"
    if given is not None and given.dim() > 2 and len(lead) != 2:
        wide = given.expand(*lead, *given.shape[-2:])
        given = wide.reshape(-1, lead[-1], *given.shape[-2:])

    def four(x: Tensor) -> Tensor:
        wide = x if groups else x.expand(*lead, *x.shape[-2:])
        heads = wide.shape[-3] if wide.dim() > 2 else 1
        return wide if wide.dim() == 4 else wide.reshape(-1, heads, *x.shape[-2:])

    shape = torch.Size((*lead, q.shape[-2], v.shape[-1]))
    call = AttentionRequest(
        *(four(x) for x in (q, k, v)),
        mask=given,
        causal=bound_args["is_causal"],
        scale=bound_args["scale"],
        dropout=bound_args["dropout_p"],
    )
    found = serve(call, lambda: four(function(*args, **kwargs)), memo)
    return found if isinstance(found, str) else Instead(found, shape, q.is_contiguous())


_NAME = "scaled_dot_product_attention"


def _request(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> dict[str, Any]:
    """Return the arguments by name."""
    return locals()


def _causal(bias: Any, device: torch.device) -> dict[str, Any]:
    """Return the arguments that correspond to PyTorch's `CausalBias`."""
    first = bias.variant.name == "UPPER_LEFT" or bias.seq_len_q == bias.seq_len_kv
    return {"attn_mask": None if first else table_of(bias, device), "is_causal": first}


def call_of(
    net: CaptureSession, bound_args: dict[str, Any], out: Tensor, axes: Leading
) -> AttentionCall:
    """Return a call of the function, with its arguments by name, in headwise's terms."""
    # Under autocast, the kernel casts all of them to the dtype of its output.
    q, k, v = (bound_args[name].to(out.dtype) for name in ("query", "key", "value"))
    given = bound_args["attn_mask"]
    if axes.last:
        lead = torch.Size(axes.sizes) if out.dim() > 3 else torch.Size((axes.rows, axes.heads))
        if not bound_args["enable_gqa"] and k.shape[:-2] != v.shape[:-2]:
            k, v = (x.expand(*out.shape[:-2], *x.shape[-2:]) for x in (k, v))
        q, k, v = (_four(x, lead) for x in (q, k, v))
        if k.shape[1] != v.shape[1]:
            k, v = of_all_heads(k, v, q.shape[1])
        given = _table(given, lead)
    else:
        lead = out.shape[:-2]
        q, k, v = (axes.split(_wide(x, lead, bound_args["enable_gqa"])) for x in (q, k, v))
        if given is not None and given.dim() > 2:
            given = axes.split(given.expand(*lead, *given.shape[-2:]))
    heads_out = axes.split(out)
    within, behind = composite(), keys_behind(net.names.stack[-1].module)
    extent = Extent(axes.rows, axes.heads, k.shape[1], q.shape[2], k.shape[2])
    mask, keys, behind = mask_of(net, given, extent, q.device, bound_args["is_causal"], behind)
    k, v, sight = k[:, :, :keys], v[:, :, :keys], {"mask": mask, "scale": bound_args["scale"]}
    weight = within and within.projection
    return AttentionCall(net.names.current, _NAME, q, k, v, heads_out, sight, weight, behind=behind)


def of_all_heads(k: Tensor, v: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Repeat keys and values `[B, G, S, D]` for each head, as their numbers of groups differ."""
    k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    return k, v


def _wide(x: Tensor, lead: torch.Size, groups: bool) -> Tensor:
    """Expand `[…, N, D]` to the leading axes of the output; repeat the keys of groups per head."""
    if groups and x.dim() > 2:
        x = x.repeat_interleave(lead[-1] // x.shape[-3], -3)
    return x.expand(*lead, *x.shape[-2:])


def _four(x: Tensor, lead: torch.Size) -> Tensor:
    """Reshape `[…, N, D]` to `[B, G, N, D]`; `lead` has the leading axes of the queries."""
    if x.dim() == 4 and len(lead) == 2 and x.shape[0] == lead[0]:
        return x
    if x.dim() <= 3 and len(lead) == 2 and x.shape[:-2].numel() == lead.numel():
        return x.reshape(*lead, *x.shape[-2:])
    groups = x.shape[-3] if x.dim() > 2 else 1
    wide = x.expand(*lead[:-1], groups, *x.shape[-2:])
    return wide.reshape(-1, groups, *x.shape[-2:])


def _table(mask: Tensor | None, lead: torch.Size) -> Tensor | None:
    """Reshape a mask so that it broadcasts to `[B, H, T, S]`."""
    if mask is None or mask.dim() <= 2:
        return mask
    if len(lead) == 2 and mask.dim() == 3 and len(mask) == lead.numel():
        return mask.reshape(*lead, *mask.shape[-2:])
    if len(lead) == 2:
        return mask
    return mask.expand(*lead, *mask.shape[-2:]).flatten(0, -4)


def mask_of(
    net: CaptureSession,
    given: Tensor | None,
    extent: Extent,
    device: torch.device,
    causal: bool = False,
    behind: int = 0,
) -> tuple[Mask, int, int]:
    """Return a mask without padded queries, the number of keys, and the number of keys `behind`.

    Same as `resolve_padding()`, but cached for a mask that all layers share.
    """
    within = composite()
    own = within.own if within is not None else (False if net.names.crosses else None)

    def of(sizes: Extent) -> Mask:
        cut = given if given is None or given.shape[-1] == 1 else given[..., : sizes.keys]
        return as_mask(cut, sizes, causal=causal)

    def find() -> tuple[Mask, int, int]:
        return resolve_padding(of, extent, device, own, behind)

    return find() if given is None else net.masks.of(given, (extent, causal, own, behind), find)


def _of_nested(net: CaptureSession, bound_args: dict[str, Any], out: Tensor) -> Tensor:
    """Report rows of different lengths `[B, H, t, D]`, padded, with a mask of their lengths."""
    (q, t), (k, s), (v, _) = (padded(bound_args[name]) for name in ("query", "key", "value"))
    i, j = torch.arange(q.shape[2], device=q.device), torch.arange(k.shape[2], device=q.device)
    allowed = (i[:, None] < t.view(-1, 1, 1, 1)) & (j < s.view(-1, 1, 1, 1))
    if bound_args["is_causal"]:
        allowed = allowed & (j <= i[:, None])
    plain = {"attn_mask": allowed, "is_causal": False, "query": q, "key": k, "value": v}
    wide = padded(out)[0]
    axes = Leading(tuple(wide.shape[:2]), (0, 1), wide.shape[1], sure=True)
    new = net.emit(call_of(net, bound_args | plain, wide, axes))
    return out if new is None else nested_like(new, out)


def padded(nested: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows of different lengths, padded with zeros to one tensor, and the lengths `[B]`.

    The length axis is the second to last.
    """
    rows = nested.unbind()
    lengths = [row.shape[-2] for row in rows]
    wide = [
        torch.nn.functional.pad(row, (0, 0, 0, max(lengths) - length))
        for row, length in zip(rows, lengths, strict=True)
    ]
    return torch.stack(wide), torch.tensor(lengths, device=nested.device)


def nested_like(wide: Tensor, like: Any) -> Tensor:
    """Return padded rows `[B, T, E]` or `[B, H, T, E]` in the nested layout of `like`."""
    rows = [row[..., : part.shape[-2], :] for row, part in zip(wide, like.unbind(), strict=True)]
    if like.layout is not torch.jagged:
        return torch.nested.as_nested_tensor(rows)
    values = torch.cat([row if row.dim() == 2 else row.transpose(0, 1) for row in rows])
    found = torch.nested.nested_tensor_from_jagged(values, offsets=like.offsets())
    return found if like.dim() == 3 else found.transpose(1, 2)


def functions(route: Interceptor = scaled_dot_product_attention) -> dict[Any, Interceptor]:
    """Return the functions of this file, which are captured or `accelerated`."""
    operator = torch.ops.aten.scaled_dot_product_attention
    return dict.fromkeys((F.scaled_dot_product_attention, operator, operator.default), route)

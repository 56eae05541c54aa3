"""PyTorch's fused kernels, through the operators that return the log-sum-exp.

`F.scaled_dot_product_attention` does not return the LSE, but its operators do: one flash kernel on
the CPU, three on CUDA (flash, cuDNN, memory-efficient). This module works around their limits: they
take no general masks (see `tiles.py`), return zeros for rows without a visible key or with NaN
scores, require rows that do not overlap in memory and values as wide as the keys, and have neither
a gradient of the LSE nor a second derivative.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..core import reference as definition
from ..core.call import Call, with_sinks
from ..core.modes import forward_derivatives, readable, traced, transformed
from ..core.shapes import statistics_dtype
from .base import Backend
from .blocked import block_rows, gradients_again
from .tiles import Tile, bias_size, cut, flag, single_tile, tiles, with_bias

BIAS_LIMIT = 256 * 2**20
"""The maximum size in bytes of the bias of a call that cannot be cut into tiles."""

ops = torch.ops.aten


class Sdpa(Backend):
    """The fused kernels of PyTorch: CPU flash; CUDA flash, cuDNN and memory-efficient."""

    name = "sdpa"

    def refuse(self, call: Call) -> list[str]:
        device = call.q.device.type
        if device not in ("cpu", "cuda"):
            return [f"no fused kernel that returns the LSE on {device}"]
        reasons, extent = [], call.extent
        if call.softcap is not None:
            reasons.append("softcap is not linear in the scores")
        if call.q.dtype not in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
            reasons.append(f"no fused kernel for {call.q.dtype}")
        if call.q.dtype == torch.float64 and device == "cuda":
            reasons.append("no fused CUDA kernel for float64")
        if 0 in (extent.batch, extent.queries, extent.keys) or call.v.shape[-1] == 0:
            reasons.append("the kernels do not support empty tensors")
        if any(t.requires_grad for t in call.mask.tensors()) and torch.is_grad_enabled():
            reasons.append("the kernels compute no gradient for a bias")
        if transformed() or forward_derivatives():
            reasons.append("the kernels do not support torch.func or forward derivatives")
        # One tile is used if values cannot be read, or if only the kernel has a gradient.
        if not readable(call.q) or (device != "cpu" and call.needs_grad):
            size = 4 * extent.batch * extent.heads * extent.queries * extent.keys
            if size > BIAS_LIMIT and flag(call.mask, extent, call.q.device) is None:
                size = 4 * bias_size(call.mask, extent, call.q.device)
                if size > BIAS_LIMIT:
                    reasons.append(
                        f"the mask would need a bias of {size / 2**20:.0f} MiB "
                        f"(at most {BIAS_LIMIT / 2**20:.0f} MiB)"
                    )
        if device == "cpu" and call.dropout:
            reasons.append("the CPU kernel does not support dropout")
        return reasons

    def run(self, call: Call, lse_gradient: bool = False) -> tuple[Tensor, Tensor]:
        if call.scale <= 0:
            # The kernels scale after masking, and −inf times a negative scale is +inf: move the
            # sign into the queries instead.
            sign = -1.0 if call.scale < 0 else 0.0
            call = call.with_(q=call.q * sign, scale=-call.scale or 1.0)
        wide = call.v.shape[-1]
        most = max(wide, call.q.shape[-1])
        q, k, v = (_dense_rows(x, most) for x in (call.q, call.k, call.v))
        if not (q is call.q and k is call.k and v is call.v):
            call = call.with_(q=q, k=k, v=v)
        on_cpu, needs_grad = q.device.type == "cpu", call.needs_grad
        through_lse = needs_grad and (lse_gradient or call.sinks is not None)
        only = _only(call)
        # `torch.jit.trace` does not record custom autograd functions such as `_Tiled`.
        own = on_cpu and torch._C._get_tracing_state() is None
        if only is None and needs_grad and not own:
            # Merging tiles uses their log-sum-exps, for which the kernels have no gradient.
            every = slice(0, call.extent.queries), slice(0, call.extent.keys)
            only = with_bias(call.mask, call.extent, q, *every)
        # Compilers differentiate the kernel itself if that suffices.
        if own and needs_grad and (only is None or through_lse or not traced()):
            out, lse = _Tiled.apply(q, k, v, call.sinks, call)
        else:
            out, lse = _tiled(call) if only is None else _tile(call, only)
            if through_lse:
                lse = _with_gradient(call, lse)
            if call.sinks is not None:
                out, lse = with_sinks(out, lse, call.sinks)
        return (out if out.shape[-1] == wide else out[..., :wide]), lse


# ── tiles ───────────────────────────────────────────────────────────────────────────────────────


def _only(call: Call) -> Tile | None:
    """Return the tile that covers the whole call, or `None`."""
    known = call.prepared
    only = None if known is None else known.tile
    if only is None:
        only = single_tile(call.mask, call.extent, call.q.device)
        if known is not None:
            known.tile = only
    if only is not None:
        return only
    for tile in cut(call.mask, call.extent, call.q):
        if only is not None or not tile.covers(call.extent):
            return None
        only = tile
    return only


def _tile(call: Call, tile: Tile) -> tuple[Tensor, Tensor]:
    """Return a tile's output and LSE: 0 and −inf in dead rows, and NaN in rows with NaN scores."""
    q, k, v = call.q[:, :, tile.rows], call.k[:, :, tile.keys], call.v[:, :, tile.keys]
    bias, dead = tile.bias, tile.dead
    if bias is not None and dead is not None:
        # A dead row would be 0/0 in some kernels: let it see all keys, and clear it afterwards.
        bias = bias.masked_fill(dead[..., None], 0.0)
    if q.device.type == "cpu":
        out, lse = ops._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, tile.causal, attn_mask=bias, scale=call.scale
        )
    else:
        out, lse = _cuda(q, k, v, bias, tile.causal, call)
    if dead is not None:
        out = torch.where(dead[..., None], 0.0, out)
        lse = torch.where(dead, -torch.inf, lse)
    if q.device.type == "cpu" and (call.prepared is not None or readable(lse)):
        # The CPU kernel returns zeros and an LSE of 0 for rows whose scores are NaN, or all too
        # small.
        suspect = lse == 0
        if bool(suspect.any()):
            _anew(call, tile, suspect & (out == 0).all(-1), out, lse)
    return out, lse


def _anew(call: Call, place: Tile, which: Tensor, out: Tensor, lse: Tensor) -> None:
    """Replace output and LSE in the rows `which` `[B, H, t]` of a tile with the definition's."""
    queries = torch.arange(call.extent.queries, device=out.device)[place.rows]
    j = torch.arange(call.extent.keys, device=out.device)[place.keys]
    k, v = call.k[:, :, place.keys], call.v[:, :, place.keys]
    for rows in which.any(1).any(0).nonzero()[:, 0].split(block_rows(call.extent)):
        i = queries[rows]
        here = call.mask, call.extent, i[:, None], j[None]
        full = definition.rows(call.q[:, :, i], k, v, *here, scale=call.scale)
        chosen = which[:, :, rows]
        lse[:, :, rows] = torch.where(chosen, full.lse, lse[:, :, rows])
        out[:, :, rows] = torch.where(chosen[..., None], full.out, out[:, :, rows])


def _tiled(call: Call) -> tuple[Tensor, Tensor]:
    """Merge the tiles of a call; rows that are in no tile get output 0 and LSE −inf."""
    e = call.extent
    # This is the kernels' memory order, in which merging heads is a view.
    out = call.q.new_zeros(e.batch, e.queries, e.heads, call.v.shape[-1]).transpose(1, 2)
    lse = torch.full_like(out[..., 0], -torch.inf, dtype=statistics_dtype(call.q.dtype))
    rows, merged = slice(0), (out, lse)
    for tile in cut(call.mask, e, call.q):
        found = _tile(call, tile)
        merged = _merge(merged, found) if tile.rows == rows else found
        rows = tile.rows
        out[:, :, rows], lse[:, :, rows] = merged
    if out.device.type == "cpu" and readable(lse):
        far = _far(lse)
        if bool(far.any()):
            _anew(call, Tile(slice(None), slice(None)), far, out, lse)
    return out, lse


def _merge(one: tuple[Tensor, Tensor], two: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return attention over the union of two sets of keys, from the results for each set."""
    lse = torch.logaddexp(one[1], two[1])
    base = torch.where(lse == -torch.inf, 0.0, lse)
    first, second = (
        out.to(lse.dtype) * torch.exp(part - base)[..., None] for out, part in (one, two)
    )
    return first + second, lse


def _far(lse: Tensor) -> Tensor:
    """Return True for rows whose LSE is so large that its rounding affects the weights.

    In float32, an LSE of 1e8 is accurate only to ±4, so the number of keys has no effect on it.
    """
    return (lse.abs() > 2.0**-12 / torch.finfo(lse.dtype).eps) & (lse != -torch.inf)


class _Tiled(torch.autograd.Function):
    """Tiles on the CPU with their backward pass, including gradients of the LSE and the sinks."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, call: Call
    ) -> tuple[Tensor, Tensor]:
        call = call.with_(q=q, k=k, v=v)
        only = _only(call)
        out, lse = _tiled(call) if only is None else _tile(call, only)
        if sinks is not None:
            out, lse = with_sinks(out, lse, sinks)
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.mask, ctx.extent, ctx.scale = call.mask, call.extent, call.scale
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Compute `dS = P ∘ (dP − D + g_lse)`.

        A column of zeros added to V, with 1 in the output and −g_lse in its gradient, turns the
        kernel's D into `D − g_lse`. The formula also holds for an LSE with a sink; the sink's
        gradient is `p_sink · (g_lse − D)`.
        """
        q, k, v, out, lse, sinks = ctx.saved_tensors
        # The kernel has no second derivative, and it computes P from the LSE.
        if torch.is_grad_enabled() or (readable(lse) and bool(_far(lse).any())):
            call = Call(q, k, v, ctx.mask, ctx.scale, None, 0.0, ctx.extent, sinks)
            return (*gradients_again(call, grads, ctx.needs_input_grad[:4]), None)
        g_out, g_lse = grads
        width, dtype = q.shape[-1], statistics_dtype(q.dtype)
        g_out = torch.zeros_like(out) if g_out is None else g_out.to(out.dtype)
        g_sinks = _gradient_of_sinks(sinks, out, lse, g_out, g_lse) if sinks is not None else None
        if g_lse is not None:
            q, k, v, out, g_out = (F.pad(x, (0, 8)) for x in (q, k, v, out, g_out))
            out[..., width] = 1.0
            g_out[..., width] = torch.where(lse == -torch.inf, 0.0, -g_lse).to(out.dtype)
        # Rows that may attend to nothing: every bias is −inf there, and exp(−inf − 0) is 0.
        lse = torch.where(lse == -torch.inf, 0.0, lse)
        g_q, g_k, g_v = (torch.zeros_like(x, dtype=dtype) for x in (q, k, v))
        for tile in tiles(ctx.mask, ctx.extent, q):
            rows, keys = (
                (slice(None), slice(None), tile.rows),
                (slice(None), slice(None), tile.keys),
            )
            found = ops._scaled_dot_product_flash_attention_for_cpu_backward(
                g_out[rows], q[rows], k[keys], v[keys], out[rows], lse[rows],
                0.0, tile.causal, attn_mask=tile.bias, scale=ctx.scale,
            )  # fmt: skip
            if tile.covers(ctx.extent):
                g_q, g_k, g_v = found
                break
            g_q[rows] += found[0]
            g_k[keys] += found[1]
            g_v[keys] += found[2]
        return (*(x[..., :width].to(q.dtype) for x in (g_q, g_k, g_v)), g_sinks, None)


def _gradient_of_sinks(
    sinks: Tensor, out: Tensor, lse: Tensor, g_out: Tensor, g_lse: Tensor | None
) -> Tensor:
    change = -(g_out.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    if g_lse is not None:
        change = change + g_lse
    dead = lse == -torch.inf
    sink = torch.exp(sinks.to(lse.dtype)[:, None] - lse.masked_fill(dead, torch.inf))
    return (sink * change.masked_fill(dead, 0.0)).sum((0, 2)).to(sinks.dtype)


def _with_gradient(call: Call, lse: Tensor) -> Tensor:
    """Return the LSE with a gradient, using only attention's gradient with respect to the values.

    `∂lse_i/∂q_i = scale · (P K)_i` and `∂lse_i/∂k_j = scale · p_ij q_i`: attention with constant
    scores and the keys as values is linear in the keys and has exactly this gradient.
    """
    q, k = call.q, call.k
    seen, _ = Sdpa().run(call.with_(q=q.detach(), k=k.detach(), v=k, dropout=0.0, sinks=None))
    wide = statistics_dtype(q.dtype)
    change = (q.to(wide) * seen.detach().to(wide)).sum(-1)
    change = change + (q.detach().to(wide) * seen.to(wide)).sum(-1)
    change = call.scale * (change - change.detach())
    return lse.detach() + change.masked_fill(lse == -torch.inf, 0.0)


# ── shapes as the kernels take them ─────────────────────────────────────────────────────────────


def _dense_rows(x: Tensor, width: int) -> Tensor:
    """Return the tensor padded to that width, with rows that do not overlap; copy if necessary.

    Padding with zeros changes neither the scores nor the outputs that are kept.

    If queries overlap, the CPU kernel leaves parts of the output uninitialized: the output gets the
    queries' strides, but each row is written as if it were dense. Its matrix products raise errors
    if rows of keys or values overlap. Batch rows and heads may overlap, with a stride of 0.
    """
    if x.shape[-1] != width:
        return F.pad(x, (0, width - x.shape[-1]))
    if x.is_contiguous():
        return x
    strides = zip(x.shape[:3], x.stride()[:3], (True, True, False), strict=True)
    dense = (n == 1 or step >= width or (shared and step == 0) for n, step, shared in strides)
    return x if x.stride(-1) == 1 and all(dense) else x.contiguous()


# ── kernels ─────────────────────────────────────────────────────────────────────────────────────


def _cuda(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, call: Call
) -> tuple[Tensor, Tensor]:
    half, wide = q.dtype in (torch.float16, torch.bfloat16), q.shape[-1]
    # The kernels read 16 bytes at a time: rows are padded and aligned to multiples of 16 bytes.
    q, k, v = (_in_sixteens(x if wide % 8 == 0 else F.pad(x, (0, -wide % 8))) for x in (q, k, v))
    if half and bias is None and q.shape[-1] <= 256:
        if _cudnn_serves(q):
            found = ops._scaled_dot_product_cudnn_attention(
                q, k, v, None, True, call.dropout, causal, False, scale=call.scale
            )
        else:
            found = ops._scaled_dot_product_flash_attention(
                q, k, v, call.dropout, causal, False, scale=call.scale
            )
    else:
        found = _cuda_efficient(q, k, v, bias, causal, call)
    out, lse = found[0], found[1]
    return out[..., :wide], lse.reshape(*lse.shape[:2], -1)[..., : q.shape[2]]


def _in_sixteens(x: Tensor) -> Tensor:
    """Return the tensor with batch rows, heads and positions at multiples of 16 bytes."""
    steps = zip(x.shape, x.stride(), strict=True)
    whole = all(step * x.element_size() % 16 == 0 for n, step in list(steps)[:3] if n > 1)
    # Fake tensors have no address; storage is aligned to more than 16 bytes.
    start = x.data_ptr() if readable(x) else x.storage_offset() * x.element_size()
    return x if whole and start % 16 == 0 else x.clone(memory_format=torch.contiguous_format)


def _cudnn_serves(q: Tensor) -> bool:
    """Return True if cuDNN's kernel is used, which is faster on Hopper and later."""
    return (
        q.shape[-1] <= 128
        and torch.backends.cuda.cudnn_sdp_enabled()
        and torch.cuda.get_device_capability(q.device) >= (9, 0)
    )


def _cuda_efficient(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, call: Call
) -> tuple[Tensor, Tensor]:
    e = call.extent
    if bias is not None and bias.dtype != q.dtype:  # in q's dtype the bias would be rounded
        dtype, (q, k, v) = q.dtype, (x.to(bias.dtype) for x in (q, k, v))
        out, lse = _cuda_efficient(q, k, v, bias, causal, call)
        return out.to(dtype), lse
    if bias is not None:
        bias = bias.expand(e.batch, e.heads, q.shape[2], k.shape[2])
    if e.group > 1:
        # The kernel does not support groups: each key/value head becomes a batch row, whose heads
        # share it through a stride of 0 instead of copies.
        q = q.unflatten(1, (e.kv_heads, e.group)).flatten(0, 1)
        k, v = (x.flatten(0, 1).unsqueeze(1).expand(-1, e.group, -1, -1) for x in (k, v))
        if bias is not None:
            bias = bias.unflatten(1, (e.kv_heads, e.group)).flatten(0, 1)
    if bias is not None:
        bias = _aligned(bias)
    out, lse, *_ = ops._scaled_dot_product_efficient_attention(
        q, k, v, bias, True, call.dropout, causal, scale=call.scale
    )
    if e.group > 1:
        out, lse = (x.unflatten(0, (e.batch, e.kv_heads)).flatten(1, 2) for x in (out, lse))
    return out, lse


def _aligned(bias: Tensor) -> Tensor:
    """Return the bias with rows that start at multiples of 16 bytes."""
    keys = bias.shape[3]
    if keys % 8 == 0 and all(step % 8 == 0 for step in bias.stride()[:3]) and bias.stride(3) == 1:
        return bias
    shared = [
        n > 1 and step == 0 for n, step in zip(bias.shape[:2], bias.stride()[:2], strict=True)
    ]
    once = bias[: 1 if shared[0] else None, : 1 if shared[1] else None]
    return F.pad(once, (0, -keys % 8))[..., :keys].expand_as(bias)

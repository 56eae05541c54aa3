"""PyTorch's own fused kernels, through the calls that return the log-sum-exp.

`F.scaled_dot_product_attention` hides the LSE; the operators behind it give it. On the CPU that is
one flash kernel, on CUDA there are three (flash, cuDNN, memory-efficient). Their quirks are dealt
with here, each once: a mask is either their causal flag or a float bias, a row that may attend to
nothing or holds NaN comes back as zeros, and the values must be as wide as the keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .._axes import Extent
from .._index import grid
from ..masks import Causal, Everything, Mask
from .base import Call

BIAS_LIMIT = 256 * 2**20
"""Bytes that a mask may take as a float bias; above it the blocked backend serves in O(T)."""

ops = torch.ops.aten


class Sdpa:
    """The fused kernels of PyTorch: CPU flash; CUDA flash, cuDNN and memory-efficient."""

    name = "sdpa"

    def refuse(self, call: Call) -> list[str]:
        device = call.q.device.type
        if device not in ("cpu", "cuda"):
            return [f"no fused kernel that returns the LSE on {device}"]
        reasons = _refuse_anywhere(call)
        if device == "cpu" and call.dropout:
            reasons.append("the CPU kernel has no dropout")
        return reasons

    def run(self, call: Call) -> tuple[Tensor, Tensor]:
        lowered = lower(call.mask, call.extent, call.q)
        if call.scale <= 0:
            # The kernels scale what they have masked already, and −inf times such a scale is no
            # longer −inf: the sign goes into the queries instead.
            sign = -1.0 if call.scale < 0 else 0.0
            call = call.with_(q=call.q * sign, scale=-call.scale or 1.0)
        q, k, v = (_dense_last(x) for x in _equal_widths(call.q, call.k, call.v))
        kernel = _cpu if call.q.device.type == "cpu" else _cuda
        out, lse = kernel(q, k, v, lowered, call)
        if out.shape[-1] != call.v.shape[-1]:
            out = out[..., : call.v.shape[-1]]
        return _settle(out, lse, lowered.dead, call)


def _refuse_anywhere(call: Call) -> list[str]:
    reasons = []
    extent = call.extent
    if call.softcap is not None:
        reasons.append("softcap is not linear in the scores")
    if call.q.dtype not in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        reasons.append(f"no fused kernel for {call.q.dtype}")
    if call.q.dtype == torch.float64 and call.q.device.type == "cuda":
        reasons.append("no fused CUDA kernel for float64")
    if 0 in (extent.batch, extent.queries, extent.keys) or call.v.shape[-1] == 0:
        reasons.append("the kernels do not take empty tensors")
    if any(t.requires_grad for t in call.mask.tensors()) and torch.is_grad_enabled():
        reasons.append("the kernels give no gradient for a bias")
    size = bias_bytes(call.mask, extent, call.q.device)
    if size > BIAS_LIMIT:
        reasons.append(
            f"the mask would need a bias of {size / 2**20:.0f} MiB "
            f"(at most {BIAS_LIMIT / 2**20:.0f} MiB)"
        )
    return reasons


# ── masks as the kernels take them ──────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Lowered:
    """A mask as a kernel takes it: nothing, the causal flag, or a bias; and rows without keys."""

    causal: bool = False
    bias: Tensor | None = None
    dead: Tensor | None = None


def lower(mask: Mask, extent: Extent, like: Tensor) -> Lowered:
    """Turn a mask into what the fused kernels understand."""
    known = _flag(mask, extent, like.device)
    if known is not None:
        return known
    i, j = grid(extent, like.device)
    allowed, bias = mask.allowed(i, j, extent), mask.bias(i, j, extent)
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    if like.device.type != "cpu":
        dtype = like.dtype
    if allowed is None:
        assert bias is not None  # _flag has seen to masks that do nothing
        return Lowered(bias=_four(bias.to(dtype)))
    allowed = _four(allowed)
    # A dead row would be 0/0 in some kernels: let it see everything, and blank it afterwards.
    dead = ~allowed.any(-1, keepdim=True)
    ground = torch.zeros((), dtype=dtype, device=like.device) if bias is None else bias.to(dtype)
    ground = torch.where(allowed, ground, -torch.inf)
    return Lowered(bias=_four(ground.masked_fill(dead, 0.0)), dead=dead[..., 0])


def _flag(mask: Mask, extent: Extent, device: torch.device) -> Lowered | None:
    """The mask without a bias, where the kernel's own flag says the same."""
    square = extent.queries == extent.keys
    if isinstance(mask, Everything) or (isinstance(mask, Causal) and extent.queries == 1):
        return Lowered() if extent.keys else None
    if isinstance(mask, Causal):
        return Lowered(causal=True) if square else None
    if mask.biased or not square:
        return None
    # Anything else may still come to the same, such as a window wider than the sequence.
    i = grid(extent, device)[0]
    interval = mask.interval(i, extent)
    if interval is None or torch.compiler.is_compiling():
        return None
    low, high = interval
    if not bool((low == 0).all()):
        return None
    if bool((high == extent.keys).all()):
        return Lowered()
    return Lowered(causal=True) if bool((high == i + 1).all()) else None


def bias_bytes(mask: Mask, extent: Extent, device: torch.device) -> int:
    """The size of the mask as a float32 bias; 0 if it needs none."""
    small = extent.batch * extent.heads * extent.queries * extent.keys * 4 <= BIAS_LIMIT
    if small or isinstance(mask, Everything):
        return 0
    if isinstance(mask, Causal) and (extent.queries in (1, extent.keys)):
        return 0
    # One row and one column tell which axes the mask has.
    i, j = grid(extent, device, slice(0, 1), slice(0, 1))
    axes = [1, 1]
    for part in (mask.allowed(i, j, extent), mask.bias(i, j, extent)):
        if part is not None:
            axes = [max(a, b) for a, b in zip(axes, _four(part).shape[:2], strict=True)]
    return axes[0] * axes[1] * extent.queries * extent.keys * 4


def _four(x: Tensor) -> Tensor:
    return x[(None,) * (4 - x.dim())]


# ── shapes as the kernels take them ─────────────────────────────────────────────────────────────


def _equal_widths(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pad with zero features, which change neither scores nor the outputs that are kept."""
    wide, narrow = v.shape[-1], q.shape[-1]
    if wide < narrow:
        return q, k, F.pad(v, (0, narrow - wide))
    if wide > narrow:
        return F.pad(q, (0, wide - narrow)), F.pad(k, (0, wide - narrow)), v
    return q, k, v


def _dense_last(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _settle(out: Tensor, lse: Tensor, dead: Tensor | None, call: Call) -> tuple[Tensor, Tensor]:
    """Give dead rows output 0 and LSE −inf, and queries with NaN their NaN back."""
    if dead is not None:
        out = torch.where(dead[..., None], 0.0, out)
        lse = torch.where(dead, -torch.inf, lse)
    # The CPU kernel returns zeros and an LSE of exactly 0 for a query that holds NaN.
    if call.q.device.type == "cpu" and not torch.compiler.is_compiling():
        suspect = lse == 0
        if bool(suspect.any()):
            poisoned = suspect & call.q.detach().isnan().any(-1)
            if bool(poisoned.any()):
                out = torch.where(poisoned[..., None], torch.nan, out)
                lse = torch.where(poisoned, torch.nan, lse)
    return out, lse


# ── kernels ─────────────────────────────────────────────────────────────────────────────────────


def _cpu(q: Tensor, k: Tensor, v: Tensor, mask: Lowered, call: Call) -> tuple[Tensor, Tensor]:
    out, lse = ops._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, mask.causal, attn_mask=mask.bias, scale=call.scale
    )
    return out, lse


def _cuda(q: Tensor, k: Tensor, v: Tensor, mask: Lowered, call: Call) -> tuple[Tensor, Tensor]:
    half = q.dtype in (torch.float16, torch.bfloat16)
    dim = q.shape[-1]
    if half and mask.bias is None and dim % 8 == 0 and dim <= 256:
        if _cudnn_serves(q):
            found = ops._scaled_dot_product_cudnn_attention(
                q, k, v, None, True, call.dropout, mask.causal, False, scale=call.scale
            )
        else:
            found = ops._scaled_dot_product_flash_attention(
                q, k, v, call.dropout, mask.causal, False, scale=call.scale
            )
    else:
        found = _cuda_efficient(q, k, v, mask, call)
    out, lse = found[0], found[1]
    return out, lse.reshape(*lse.shape[:2], -1)[..., : call.extent.queries]


def _cudnn_serves(q: Tensor) -> bool:
    """cuDNN's kernel is the faster one from Hopper on."""
    return (
        q.shape[-1] <= 128
        and torch.backends.cuda.cudnn_sdp_enabled()
        and torch.cuda.get_device_capability(q.device) >= (9, 0)
    )


def _cuda_efficient(
    q: Tensor, k: Tensor, v: Tensor, mask: Lowered, call: Call
) -> tuple[Tensor, Tensor]:
    e = call.extent
    bias = mask.bias
    if bias is not None:
        # The kernel wants rows that start at multiples of 16 bytes.
        bias = F.pad(bias.expand(-1, -1, e.queries, e.keys), (0, -e.keys % 8))[..., : e.keys]
        bias = bias.expand(e.batch, e.heads, -1, -1)
    if e.group > 1:
        # The kernel knows no groups: each key/value head becomes a batch row whose heads all read
        # it, with a stride of 0 instead of copies.
        q = q.unflatten(1, (e.kv_heads, e.group)).flatten(0, 1)
        k, v = (x.flatten(0, 1).unsqueeze(1).expand(-1, e.group, -1, -1) for x in (k, v))
        if bias is not None:
            bias = bias.unflatten(1, (e.kv_heads, e.group)).flatten(0, 1)
    out, lse, *_ = ops._scaled_dot_product_efficient_attention(
        q, k, v, bias, True, call.dropout, mask.causal, scale=call.scale
    )
    if e.group > 1:
        out, lse = (x.unflatten(0, (e.batch, e.kv_heads)).flatten(1, 2) for x in (out, lse))
    return out, lse

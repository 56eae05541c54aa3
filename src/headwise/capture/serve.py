"""Run calls of attention functions on headwise's kernel.

A call is accelerated if `attend()` would choose the native kernel and the kernel supports all its
arguments. Other calls run unchanged, and the account records the reason. On CUDA the native kernel
is always chosen, as it computes output and statistics in one launch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ..backends import Call, choose, consider
from ..core.mask_algebra import Mask
from ..core.masks import Bias
from ..core.shapes import Extent, no_autocast
from .call import AttentionCall, OnePass
from .mask_import import FORBIDDEN_BIAS, MaskMemo, as_mask
from .private_torch import autocast, modes, traced
from .session import CaptureSession, Depth, Functions, RefcountedPatch

NATIVE = "native"
_PLAIN = frozenset({Tensor, nn.Parameter})


# ── active calls ────────────────────────────────────────────────────────────────────────────────


class Accelerated:
    """An account of a model's attention calls: which were accelerated, and why others were not.

    >>> account = Accelerated()
    >>> account.note("decoder.attn", "scaled_dot_product_attention", "nested tensors")
    >>> account.served, account.left
    (0, 1)
    >>> print(account)
      decoder.attn  scaled_dot_product_attention  1 ×  as before: nested tensors
    """

    def __init__(self, own_layers: int = 0) -> None:
        self.calls: dict[tuple[str, str, str | None, str], int] = {}
        self._own_layers = own_layers

    def note(self, module: str, function: str, result: AcceleratedCall | str) -> None:
        """Count a call, with its backend or the reason why it was not accelerated."""
        served = isinstance(result, AcceleratedCall)
        backend, reason = (result.backend, "") if served else (None, result)
        place = (module, function, backend, reason)
        self.calls[place] = self.calls.get(place, 0) + 1

    @property
    def served(self) -> int:
        """The number of calls that headwise computed."""
        return sum(row["calls"] for row in self.table() if row["backend"])

    @property
    def left(self) -> int:
        """The number of calls that ran unchanged."""
        return sum(row["calls"] for row in self.table() if not row["backend"])

    def table(self) -> list[dict[str, Any]]:
        """Return a row for each module, function and outcome.

        The keys are `module`, `function`, `calls`, `backend` (the headwise backend that ran them,
        or `None`) and `reason` (why they ran unchanged).
        """
        return [
            {
                "module": module,
                "function": function,
                "calls": calls,
                "backend": backend,
                "reason": reason,
            }
            for (module, function, backend, reason), calls in list(self.calls.items())
        ]

    def __str__(self) -> str:
        rows = self.table()
        wide = [max((len(row[name]) for row in rows), default=0) for name in ("module", "function")]
        lines = []
        for row in rows:
            arrow, how = " ", f"as before: {row['reason']}"
            if row["backend"]:
                arrow, how = "→", f"served by {row['backend']}"
            who = f"{row['module']:{wide[0]}}  {row['function']:{wide[1]}}"
            lines.append(f"{arrow} {who}  {row['calls']} ×  {how}")
        if not lines:
            lines = [
                "no call of scaled_dot_product_attention or nn.MultiheadAttention was seen "
                "(those in compiled code are not)"
            ]
        if self._own_layers:
            lines.append(
                f"{self._own_layers} layers are headwise's own MultiHeadAttention, which chooses "
                f"its kernel by itself"
            )
        return "\n".join(lines)


BYPASS = Depth()
"""Inside it, calls run unchanged and are not counted."""

SERVED = RefcountedPatch(lambda: lambda: None)
"""The sessions of accelerated models."""


class Accelerator(CaptureSession):
    """A session that accelerates its model; it captures nothing."""

    account: Accelerated

    @property
    def open(self) -> bool:
        """Return True if calls are accelerated now, even inside a captured call.

        Calls in a graph that is being compiled run unchanged.
        """
        return not torch.compiler.is_compiling() and not BYPASS.now and self.names.inside


def accelerators() -> tuple[CaptureSession, ...]:
    """Return the sessions whose model is running in this thread, outermost first."""
    return SERVED.nets if SERVED.everyone else ()


def watched() -> bool:
    """Return True if an outer watch captures the call that this function mode is handling, with
    its statistics from the same pass."""
    outer = (mode.net for mode in modes() if isinstance(mode, Functions))
    return any(net.open for net in outer if not isinstance(net, Accelerator))


def note(function: str, result: AcceleratedCall | str, name: str | None = None) -> None:
    """Count a call in all sessions that accelerate its model."""
    for net in accelerators():
        assert isinstance(net, Accelerator)
        net.account.note(net.names.current if name is None else name, function, result)


# ── a call ──────────────────────────────────────────────────────────────────────────────────────


@dataclass
class AcceleratedCall(OnePass):
    """A call that headwise computes in place of a function.

    `run` calls the original function for its output `[B, H, T, Dv]`; it is used if scores are not
    finite.
    """

    def out(self) -> Float[Tensor, "B H T Dv"]:
        """Compute the outputs of the heads."""
        call = self.call
        with no_autocast(call.q.device) if autocast() else nullcontext():
            out, lse = choose(call, self.backend).output(call.drawn() if call.dropout else call)
        return self.finish(out, lse)

    def finish(self, out: Tensor, lse: Tensor | None) -> Tensor:
        """Return the output; if scores are not finite, that of the original function."""
        if lse is not None and not lse.is_cuda:  # reading it would make the host wait
            total = float(lse.detach().sum())  # −∞ for queries without a visible key
            if total == math.inf or math.isnan(total):
                with BYPASS:
                    return self.run()
        return out

    def attached_to(self, call: AttentionCall) -> AttentionCall:
        """Return a call for a watch, with the output of this one."""
        return replace(call, model_out=self.out, one_pass=self)


@dataclass(frozen=True)
class AttentionRequest:
    """The arguments of a call: q `[B, H, T, D]`, k and v `[B, G, S, D]`, and a mask in the form
    that PyTorch's attention takes (`causal` aligns the first query with the first key)."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None = None
    causal: bool = False
    scale: float | None = None
    dropout: float = 0.0
    softcap: float | None = None
    sinks: Tensor | None = None
    bias: Tensor | None = None

    @property
    def special(self) -> bool:
        """Return True if PyTorch has no function for it."""
        return self.softcap is not None or self.sinks is not None


def serve(
    request: AttentionRequest, original: Callable[[], Tensor], memo: MaskMemo | None
) -> AcceleratedCall | str:
    """Return the accelerated call, or the reason why the call runs unchanged.

    A call with softcap or sinks runs on the backend that `attend()` chooses, any other only on the
    native kernel.
    """
    if reason := _odd(request):
        return reason
    if autocast():
        lowered = {name: _lowered(getattr(request, name)) for name in ("q", "k", "v", "mask")}
        request = replace(request, **lowered)
    try:
        mask = _mask(request, memo)
        if isinstance(mask, str):
            return mask
        options = {n: getattr(request, n) for n in ("scale", "softcap", "dropout", "sinks")}
        call = Call.of(request.q, request.k, request.v, mask=mask, **options)
    except ValueError as error:  # the function reports invalid arguments itself
        return str(error)
    backend = choose(call, "auto").name
    if backend == NATIVE or request.special:
        return AcceleratedCall(call, backend, original, strict=False)
    refused = next(choice.reasons for choice in consider(call) if choice.name == NATIVE)
    return "; ".join(refused) or "PyTorch's kernel was measured faster on CPUs without vector units"


def _odd(request: AttentionRequest) -> str:
    """Return a reason, apart from the mask, why the call must run unchanged, or ""."""
    if traced():
        return "the call is traced"
    for x in (request.q, request.k, request.v, request.mask, request.bias):
        if x is not None and (x.is_nested or type(x) not in _PLAIN):
            return f"a {'nested tensor' if x.is_nested else type(x).__name__}"
    if request.special:
        return ""
    if not torch.backends.cuda.flash_sdp_enabled():
        return "the caller has switched PyTorch's fused kernel off"
    device = request.q.device.type
    if device in ("cpu", "cuda"):
        return ""
    return f"kernels for CPUs and CUDA, and this call is on {device}"


def _lowered(x: Any) -> Any:
    """Return a tensor in the dtype that autocast uses for attention."""
    if x is None or not x.is_floating_point() or x.dtype == torch.float64:
        return x
    kind = x.device.type
    if not torch.is_autocast_enabled(kind):
        return x
    return x.to(torch.get_autocast_dtype(kind))


# ── masks ───────────────────────────────────────────────────────────────────────────────────────


def _mask(request: AttentionRequest, memo: MaskMemo | None) -> Mask | str:
    """Return the mask with its meaning in PyTorch, or the reason why it is not supported."""
    q, k = request.q, request.k
    extent = Extent(q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2])
    given = request.mask
    if given is None:
        found: Mask | str = as_mask(None, extent, causal=request.causal)
    elif memo is None:
        found = _of_tensor(given, extent)
    else:
        found = memo.of(given, ("served", extent), lambda: _of_tensor(given, extent))
    if request.bias is None or isinstance(found, str):
        return found
    if not _all_see(found, extent, q.device):
        return "queries that may attend to nothing, beside a bias"
    return found & Bias(request.bias)


def _of_tensor(given: Tensor, extent: Extent) -> Mask | str:
    """Return a mask of booleans, or of numbers that are added to the scores.

    For a query without a visible key, −∞ and False give an output of 0, and any other number gives
    the mean of all values; numbers are therefore passed to the kernel unchanged.
    """
    if given.dtype == torch.bool:
        return as_mask(given, extent, wait=True)
    if not given.is_floating_point():
        return f"a mask of {given.dtype}"
    table = given[(None,) * (4 - given.dim())]
    wide = table.shape[1] > 1 and table.stride(1) != 0 and table.shape[2] > 1
    if given.requires_grad or wide:
        return Bias(given)
    allowed, least = table == 0, max(FORBIDDEN_BIAS, torch.finfo(given.dtype).min / 2)
    if not bool((allowed | (table <= least)).all()):
        return Bias(given)
    dead = ~allowed.any(-1, keepdim=True)
    if bool((dead & ~table.isneginf()).any()):
        return Bias(given)
    return as_mask(allowed, extent, wait=True)


def _all_see(mask: Mask, extent: Extent, device: torch.device) -> bool:
    """Return True if every query has a visible key."""
    if mask.free:
        return True
    found = mask.key_ranges(extent, device)
    if found is not None:
        return bool((found[0] < found[1]).all())
    sizes = extent.batch, extent.heads, extent.queries, extent.keys
    return bool(mask.dense(*sizes, device=device).any(-1).all())

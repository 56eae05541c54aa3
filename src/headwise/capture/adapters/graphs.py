"""Attention calls inside the graphs that `torch.compile` makes.

While a compiled model is watched, its graphs are compiled a second time, with the operator
`headwise::captured` after each attention call, which passes queries, keys, values and the output to
the session. The compiler keeps both kinds of graphs and selects one by its backend: a model is
compiled once for watching, switching on and off compiles nothing, and the graph without the
operator does not change. The operator reads only arguments and results of the attention function,
so outputs and gradients stay bit-identical.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...core.mask_algebra import Mask
from ...core.masks import ALiBi, Bias, Causal, Dense, Everything, Window
from ...core.shapes import extent_of
from ...kernels.interface import Terms
from ...layers.attention import MultiHeadAttention
from ..call import AttentionCall
from ..head_axis import Leading
from ..mask_import import Ranges, at_the_end
from ..modules import Forward, as_written, attending
from ..parts import PendingCall
from ..private_torch import in_backward, outside_graphs
from ..session import CaptureSession
from .sdpa import call_of
from .transformers import projection_of

# ── the operator ────────────────────────────────────────────────────────────────────────────────

_LIBRARY = torch.library.Library("headwise", "FRAGMENT")
# It is declared to write `order`, which keeps the calls in the graph and in their order.
_LIBRARY.define(
    "captured(Tensor q, Tensor k, Tensor v, Tensor out, Tensor?[] terms, SymInt[] numbers, "
    "float[] scale, Tensor? weight, Tensor(a!) order, int site) -> ()",
    tags=(torch.Tag.cudagraph_unsafe,),  # it runs Python
)


class OperatorArgs(NamedTuple):
    """The arguments of the operator.

    `weight` is a parameter that identifies the module that attends, as modules of the same kind
    share graphs. For `F.scaled_dot_product_attention`, `terms` is its mask and `numbers` its
    `is_causal`; for headwise's kernel, `terms` are sinks and the tensors of `Terms`, and `numbers`
    the other fields.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    terms: Sequence[Tensor | None]
    numbers: Sequence[int]
    scale: Sequence[float]
    weight: Tensor | None


@outside_graphs
def _captured(*args: Any) -> None:
    *given, _, number = args
    site = SITES.get(number)
    if site is None or in_backward():  # checkpointing computes the call again
        return
    for listening in tuple(LISTENING):
        if site.first:
            listening.end()
        with torch.set_grad_enabled(site.graded):
            listening.emit(site, OperatorArgs(*given))
        if site.last:
            listening.end()


_LIBRARY.impl("captured", _captured, "CompositeExplicitAutograd")
torch.library.register_fake("headwise::captured", lambda *_: None, lib=_LIBRARY)


# ── listeners ───────────────────────────────────────────────────────────────────────────────────


class Listening:
    """A session that captures calls in graphs of its model.

    If a graph cannot be captured, `failed` is called before any of it has run; compiled code runs
    in eager mode from then on.
    """

    def __init__(self, net: CaptureSession, failed: Callable[[], None]) -> None:
        self.net, self.model = net, uncompiled_module(net.names.model)
        self.failed = failed
        self._forward: Forward | None = None
        self._modules = {as_written(name): x for name, x in self.model.named_modules()}
        self._weights: dict[int, str] = {}
        self._others: set[tuple[int, int]] = set()  # weights of other models, of this forward

    @contextmanager
    def on(self) -> Iterator[None]:
        """Activate the listener."""
        LISTENING.append(self)
        try:
            yield
        finally:
            self.end()
            LISTENING.remove(self)
            self._name_missing()

    def _name_missing(self) -> None:
        """Leave out modules that are named attention and were not reported by any graph."""
        reported = {*self.net.complete, *self.net.names.left_out}
        for name in attending(self.model) if self.net.complete else ():
            if not any(_related(name, other) for other in reported):
                self.net.names.left_out[name] = _MISSING

    def emit(self, site: Site, given: OperatorArgs) -> None:
        """Report a call of a graph, if it belongs to a module of the model."""
        names = self.net.names
        module = self._module(site, given.weight)
        if module is None:
            return
        if not names.stack:  # the start of the model was not captured
            names.enter(self.model)
            self._forward = names.stack[0] if names.stack else None
        if self.net.open:
            with names.alone(module):
                self._emit(site, given, names.stack[-1])

    def end(self) -> None:
        """End the forward whose start was not captured, if any."""
        forward, self._forward = self._forward, None
        if forward is not None and self.net.names.stack[:1] == [forward]:
            self.net.names.leave(self.model)

    def _module(self, site: Site, weight: Tensor | None) -> nn.Module | None:
        """Return the module that attends; None if it is not a module of the model."""
        if weight is None or site.weight is None:
            module = site.module()
            return module if id(module) in self.net.names.names else None
        name, parameter, holder = site.weight
        at, forward = weight.data_ptr(), self.net.names.calls
        known = self._weights.get(at)
        if known is None or _at(self._modules[known], parameter) != at:
            if (forward, at) in self._others:
                return None
            self._weights = {  # once for most models; shards may move
                _at(module, own): name
                for name, module in self._modules.items()
                for own in module._parameters
            }
            known = self._weights.get(at)
        if known is None:
            self._others = {one for one in self._others if one[0] == forward} | {(forward, at)}
            return None
        return self._modules.get(_moved(name, holder, known))

    def _emit(self, site: Site, given: OperatorArgs, forward: Forward) -> None:
        place = site.number, id(forward.module)
        reason = site.reason
        if place in self.net.in_graphs and given.weight is None:
            reason = _SHARED
        self.net.in_graphs.add(place)
        if reason or site.axes is None:
            self.net.leave_out(forward, reason)
            return
        call = _own_call if site.own else _call
        self.net.emit(call(self.net, site, given), site.whole)


def _related(name: str, other: str) -> bool:
    """Return True if one of two modules is the other or inside of it."""
    return f"{name}.".startswith(f"{other}.") or f"{other}.".startswith(f"{name}.") or not other


def _at(module: nn.Module, name: str) -> int:
    """Return the address of a module's parameter; of a sharded one, that of this rank's shard."""
    x: Any = module._parameters.get(name)
    return 0 if x is None else getattr(x, "_local_tensor", x).data_ptr()


def _moved(module: str, holder: str, other: str) -> str:
    """Return the name of the module that relates to `other` as `module` does to `holder`.

    >>> _moved("blocks.0.attn", "blocks.0.attn.qkv", "blocks.1.attn.qkv")
    'blocks.1.attn'
    >>> _moved("blocks.0.attn", "blocks.0", "blocks.1")
    'blocks.1.attn'
    """
    if holder.startswith(module):
        return other.removesuffix(holder[len(module) :])
    return f"{other}{module[len(holder) :]}"


LISTENING: list[Listening] = []
"""The active listeners, outermost first."""

_SHARED = (
    "modules of its kind may share its compiled graph, and it has no parameter in it or around it "
    "that identifies the one that attends; compile the whole model"
)


_MISSING = (
    "the graphs that ran have no attention call of it: it did not run, or not in a graph, or it "
    "attends by an unknown function"
)


def uncompiled_module(module: nn.Module) -> nn.Module:
    """Return the module inside what `torch.compile(module)` returns; other modules unchanged."""
    while isinstance(inner := module._modules.get("_orig_mod"), nn.Module):
        module = inner
    return module


def _call(net: CaptureSession, site: Site, given: OperatorArgs) -> AttentionCall:
    """Return a call of `F.scaled_dot_product_attention`."""
    assert site.axes is not None
    (mask,), (causal,) = given.terms, given.numbers
    bound_args = {
        **{"query": given.q, "key": given.k, "value": given.v, "enable_gqa": site.groups},
        **{"attn_mask": mask, "is_causal": bool(causal)},
        "scale": given.scale[0] if given.scale else None,
    }
    call = call_of(net, bound_args, given.out, site.axes.resized(given.out.shape))
    module = net.names.stack[-1].module
    if type(module).__module__.startswith("transformers."):
        call.projection = projection_of(module, call.heads * call.v.shape[3])
    return call


def _own_call(net: CaptureSession, site: Site, given: OperatorArgs) -> AttentionCall:
    """Return a call of headwise's kernel."""
    q, k, v, out = given[:4]
    sinks, *tensors = given.terms
    offset, causal, window = given.numbers
    mask = _mask_of(Terms._make((*tensors, offset, bool(causal), window)))
    softcap = given.scale[1] or None
    keywords = {"mask": mask, "scale": given.scale[0], "softcap": softcap, "sinks": sinks}
    keywords["first_query"] = offset
    layer = net.names.stack[-1].module
    call = AttentionCall(net.names.current, "attend", q, k, v, out, keywords)
    extent = extent_of(q, k, v, first_query=offset)
    call.own_positions = not net.names.crosses and at_the_end(mask, extent)
    if isinstance(layer, MultiHeadAttention):
        call.projection, call.first_head = layer.projection, layer.first_head
        call.layer_heads = layer.all_heads
    return call


def _mask_of(terms: Terms) -> Mask:
    """Return a mask with the same meaning as the kernel's terms."""
    mask: Mask = Everything()
    if terms.causal:
        mask = Window(terms.window) if terms.window else Causal()
    if terms.low is not None or terms.high is not None:
        mask &= _ranges(terms.low, terms.high)
    if terms.allowed is not None:
        mask &= Dense(terms.allowed)
    if terms.bias is not None:
        mask &= Bias(terms.bias)
    return mask if terms.slopes is None else mask & ALiBi()


def _ranges(low: Tensor | None, high: Tensor | None) -> Mask:
    """Return a mask of ranges `[B, H, T]` of keys."""
    edge = low if low is not None else high
    assert edge is not None
    low = torch.zeros_like(edge) if low is None else low
    high = torch.full_like(edge, _FAR) if high is None else high
    return Ranges(low[..., None], high[..., None])


_FAR = 2**62
"""Farther than any key."""


# ── attention calls of a graph ──────────────────────────────────────────────────────────────────


@dataclass(eq=False)
class Site:
    """An attention call in a graph.

    module: the module that attends.
    weight: the names of the module, of a parameter, and of the module that holds it.
    own: True for headwise's kernel, False for `F.scaled_dot_product_attention`.
    groups: `enable_gqa` of that function.
    graded: True if the graph is compiled for training.
    axes: the axes of batch rows and heads in the output.
    whole: the pending call, if its total number of queries may exceed its own.
    reason: the reason why the call is left out.
    first, last: True for the first and last call of the graph.
    """

    module: weakref.ref[nn.Module]
    weight: tuple[str, str, str] | None
    own: bool
    groups: bool
    graded: bool
    axes: Leading | None = None
    whole: PendingCall | None = None
    reason: str = ""
    first: bool = False
    last: bool = False
    number: int = field(default_factory=count(1).__next__)


SITES: weakref.WeakValueDictionary[int, Site] = weakref.WeakValueDictionary()
"""The sites by number; only graphs keep them alive."""

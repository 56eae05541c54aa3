"""Attention calls inside the graphs that `torch.compile` makes.

While a compiled model is watched, its graphs are compiled a second time, with the operator
`headwise::captured` after each attention call: it hands queries, keys, values and the output to
the watch. The compiler keeps both kinds of graphs and picks one by its backend: watching compiles
a model once, switching on and off compiles nothing, and the graph without the operator stays as it
was. The operator reads only what the attention function reads or returns, so outputs and gradients
keep their bits.
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
from ..modules import Forward, Names
from ..net import Net
from ..parts import Waiting
from ..private_torch import in_backward, outside_graphs
from .sdpa import call_of

# ── the operator ────────────────────────────────────────────────────────────────────────────────

_LIBRARY = torch.library.Library("headwise", "FRAGMENT")
# It is said to write `order`, which keeps the calls in the graph and in their order.
_LIBRARY.define(
    "captured(Tensor q, Tensor k, Tensor v, Tensor out, Tensor?[] terms, SymInt[] numbers, "
    "float[] scale, Tensor(a!) order, int site) -> ()",
    tags=(torch.Tag.cudagraph_unsafe,),  # it runs Python
)


class Given(NamedTuple):
    """The arguments of the operator.

    Of `F.scaled_dot_product_attention`, `terms` are its mask and `numbers` its `is_causal`; of
    headwise's kernel, `terms` are sinks and the tensors of `Terms`, `numbers` the other ones.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    terms: Sequence[Tensor | None]
    numbers: Sequence[int]
    scale: Sequence[float]


@outside_graphs
def _captured(*args: Any) -> None:
    *given, _, number = args
    site = SITES.get(number)
    if site is None or in_backward():  # checkpointing computes the call again
        return
    for listening in tuple(LISTENING):
        with torch.set_grad_enabled(site.graded):
            listening.emit(site, Given(*given))


_LIBRARY.impl("captured", _captured, "CompositeExplicitAutograd")
torch.library.register_fake("headwise::captured", lambda *_: None, lib=_LIBRARY)


# ── who listens ─────────────────────────────────────────────────────────────────────────────────


class Listening:
    """A net that captures calls in graphs of its model.

    `failed` is called, before anything of a graph has run, where that cannot be; compiled code
    runs as it is written from then on.
    """

    def __init__(self, net: Net, failed: Callable[[], None]) -> None:
        self.net, self.model = net, uncompiled_module(net.names.model)
        self.failed = failed
        self._forward: Forward | None = None

    @contextmanager
    def on(self) -> Iterator[None]:
        """Listen while this lasts."""
        LISTENING.append(self)
        try:
            yield
        finally:
            LISTENING.remove(self)

    def emit(self, site: Site, given: Given) -> None:
        """Let the net hear of a call that a graph has made."""
        names = self.net.names
        if id(site.module()) not in names.names:
            return
        if id(self.model) in site.first and (not names.stack or names.stack[0] is self._forward):
            names.stack.clear()  # no module of the model was seen to start
            names.enter(self.model)
            self._forward = names.stack[0] if names.stack else None
        if not self.net.open:
            return
        if self._forward is not names.stack[0]:
            self._forward = None
        module, sure = site.instance(names)
        with names.alone(module):
            self._tell(site, given, names.stack[-1], sure)
        if id(self.model) in site.last and names.stack[0] is self._forward:
            names.leave(self.model)

    def _tell(self, site: Site, given: Given, forward: Forward, sure: bool) -> None:
        made, names = (site.number, id(forward.module)), self.net.names
        if made in self.net.in_graphs and not sure:
            kind = type(forward.module)
            for module in self.model.modules():
                name = names.names[id(module)]
                if type(module) is kind and name not in self.net.noticed:
                    names.left_out.setdefault(name, _SHARED)
            return
        self.net.in_graphs.add(made)
        if site.reason or site.axes is None:
            self.net.leave_out(forward, site.reason)
            return
        call = _own_call if site.own else _call
        self.net.tell(call(self.net, site, given), site.whole)


LISTENING: list[Listening] = []
"""Those that capture calls in graphs now, outermost first."""

_SHARED = (
    "several modules run the graph in which it attends, and nothing tells which one does; compile "
    "the whole model, or the modules themselves (module.compile())"
)


def uncompiled_module(module: nn.Module) -> nn.Module:
    """Return the module inside what `torch.compile(module)` returns; any other one as it is."""
    while isinstance(inner := module._modules.get("_orig_mod"), nn.Module):
        module = inner
    return module


def _call(net: Net, site: Site, given: Given) -> AttentionCall:
    """Return a call of `F.scaled_dot_product_attention`."""
    assert site.axes is not None
    (mask,), (causal,) = given.terms, given.numbers
    asked = {
        **{"query": given.q, "key": given.k, "value": given.v, "enable_gqa": site.groups},
        **{"attn_mask": mask, "is_causal": bool(causal)},
        "scale": given.scale[0] if given.scale else None,
    }
    return call_of(net, asked, given.out, site.axes.resized(given.out.shape))


def _own_call(net: Net, site: Site, given: Given) -> AttentionCall:
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
    """Return a mask of the same meaning as the kernel's terms."""
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


# ── where a graph attends ───────────────────────────────────────────────────────────────────────


@dataclass(eq=False)
class Site:
    """An attention call in a graph.

    module: the module that attends.
    root: the module whose forward the graph is of; None for another function's.
    own: headwise's kernel computes it, else `F.scaled_dot_product_attention`.
    groups: `enable_gqa` of that function.
    graded: the graph is one for training.
    axes: which axes of the output are batch rows and heads.
    whole: of how many queries the call is one, if not of its own alone.
    reason: why the call is left out.
    first, last: the models, by id, of which it is the first or the last call in the graph.
    """

    module: weakref.ref[nn.Module]
    root: weakref.ref[nn.Module] | None
    own: bool
    groups: bool
    graded: bool
    axes: Leading | None = None
    whole: Waiting | None = None
    reason: str = ""
    first: set[int] = field(default_factory=set)
    last: set[int] = field(default_factory=set)
    number: int = field(default_factory=count(1).__next__)

    def instance(self, names: Names) -> tuple[nn.Module, bool]:
        """Return the module that attends, and True if it is surely this one.

        Parts that were compiled one by one may share a graph.
        """
        module, root = self.module(), None if self.root is None else self.root()
        assert module is not None
        running = [uncompiled_module(forward.module) for forward in names.stack]
        if root is None or any(one is root for one in running):
            return module, True
        if type(running[-1]) is not type(root):
            return module, False
        below = next(name for name, part in root.named_modules() if part is module)
        return running[-1].get_submodule(below), True


SITES: weakref.WeakValueDictionary[int, Site] = weakref.WeakValueDictionary()
"""By number; graphs hold them."""

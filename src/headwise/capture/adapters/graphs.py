"""Attention calls inside the graphs that `torch.compile` makes.

While a compiled model is watched, its graphs are compiled a second time, with the operator
`headwise::captured` after each attention call: it hands queries, keys, values and the output to
the watch. The compiler keeps both kinds of graphs and picks one by its backend: watching compiles
a model once, switching on and off compiles nothing, and the graph without the operator stays as it
was. The operator reads only what the attention function reads or returns, so outputs and gradients
keep their bits.

Which axis of a call is the heads, and whether a call is all that its module attends, is decided
when a graph is compiled: its nodes are replayed as module calls, projections and attention calls,
with numbers in place of an output that show where each of them goes.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from ...core.mask_algebra import Mask
from ...core.masks import ALiBi, Bias, Causal, Dense, Everything, Window
from ...core.shapes import extent_of
from ...kernels.interface import Terms
from ...layers.attention import MultiHeadAttention
from ..call import AttentionCall
from ..head_axis import Leading, leading
from ..mask_import import Ranges, at_the_end
from ..modules import Forward, Names
from ..net import Net
from ..parts import Waiting
from ..private_torch import add_buffer, in_backward
from .mha import functions as composite_functions
from .sdpa import call_of
from .varlen import functions as varlen_functions


class CannotCapture(Exception):
    """A graph attends in a way that is captured only where the model runs as it is written."""


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


def _captured(*args: Any) -> None:
    *given, _, number = args
    site = _SITES.get(number)
    if site is None or in_backward():  # checkpointing computes the call again
        return
    for listening in tuple(LISTENING):
        with torch.set_grad_enabled(site.graded):
            listening.emit(site, Given(*given))


_LIBRARY.impl("captured", _captured, "CompositeExplicitAutograd")
torch.library.register_fake("headwise::captured", lambda *_: None, lib=_LIBRARY)


# ── who listens ─────────────────────────────────────────────────────────────────────────────────


class Listening:
    """A net that captures calls in graphs of its model, and what it has captured of a forward."""

    def __init__(self, net: Net) -> None:
        self.net, self.model = net, uncompiled_module(net.names.model)
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
        if site.model() is not self.model:
            return
        if site.first and (not names.stack or names.stack[0] is self._forward):
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
        if site.last and names.stack[0] is self._forward:
            names.leave(self.model)

    def _tell(self, site: Site, given: Given, forward: Forward, sure: bool) -> None:
        made = (site.number, id(forward.module))
        again = made in self.net.in_graphs and not sure
        self.net.in_graphs.add(made)
        reason = site.reason or (_SHARED if again else "")
        if reason or site.axes is None:
            self.net.leave_out(forward, reason)
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
    mask = _mask_of(Terms(*tensors, offset, bool(causal), window))
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

    model: the model whose graph it is.
    module: the module that attends.
    root: the module whose forward the graph is of; None for another function's.
    own: headwise's kernel computes it, else `F.scaled_dot_product_attention`.
    groups: `enable_gqa` of that function.
    graded: the graph is one for training.
    axes: which axes of the output are batch rows and heads.
    whole: of how many queries the call is one, if not of its own alone.
    reason: why the call is left out.
    first, last: its place in the graph.
    """

    model: weakref.ref[nn.Module]
    module: weakref.ref[nn.Module]
    root: weakref.ref[nn.Module] | None
    own: bool
    groups: bool
    graded: bool
    axes: Leading | None = None
    whole: Waiting | None = None
    reason: str = ""
    first: bool = False
    last: bool = False
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


_SITES: weakref.WeakValueDictionary[int, Site] = weakref.WeakValueDictionary()
"""By number; graphs hold them."""


def instrument(
    graph: fx.GraphModule, model: nn.Module, root: nn.Module | None, told: Callable[[str], Any]
) -> list[Site]:
    """Put the operator behind each attention call of a graph; return where.

    Args:
        graph: what `torch.compile` has recorded.
        model: the model that is watched.
        root: the module whose forward the graph is of.
        told: what somebody has told of a module's heads, by its name.

    Raises:
        CannotCapture: the graph attends in other ways.
    """
    replay = _Replay(model, root, told)
    replay.run(graph, {})
    replay.end()
    calls = replay.calls
    if calls:
        calls[0].site.first = calls[-1].site.last = True
        _insert(graph, {call.node: call for call in calls}, _order(graph))
    for call in calls:
        _SITES[call.site.number] = call.site
    return [call.site for call in calls]


class _Found(NamedTuple):
    """An attention call: its node, the node of its output, and the arguments of the operator."""

    node: fx.Node
    out: fx.Node
    site: Site
    tensors: tuple[Any, Any, Any]
    terms: list[Any]
    numbers: list[Any]
    scale: list[Any]


_SDPA = (F.scaled_dot_product_attention, torch._C._nn.scaled_dot_product_attention)
_OWN = (torch.ops.headwise.native_forward, torch.ops.headwise.native_forward.default)
_SOFTMAX = (F.softmax, torch.softmax, torch._softmax, torch.special.softmax, "softmax")
_PRODUCTS = (torch.matmul, operator.matmul, torch.bmm, torch.baddbmm, torch.einsum)
_PRODUCTS += ("matmul", "bmm", "__matmul__")
_KEEPING = (F.dropout, torch.dropout, operator.mul, operator.truediv, operator.getitem)
_KEEPING += ("to", "type_as", "float", "half", "bfloat16", "view", "reshape", "transpose", "mul")
_VIEWS = (
    "view",
    "reshape",
    "transpose",
    "permute",
    "contiguous",
    "flatten",
    "unflatten",
    "movedim",
)
_VIEWS += ("squeeze", "unsqueeze", "clone", "swapaxes")
_TORCH_VIEWS = tuple(vars(torch)[name] for name in _VIEWS if name in vars(torch))
_TORCH_VIEWS += (torch._C._nn.unflatten,) if hasattr(torch._C._nn, "unflatten") else ()
"""Functions and, by their names, methods of tensors."""


def _joins_values(node: fx.Node, depth: int = 8) -> bool:
    """Return True if a product reads what a node gives, or what becomes of that entry by entry."""
    for user in node.users:
        if user.target in _PRODUCTS:
            return True
        if depth and user.target in _KEEPING and _joins_values(user, depth - 1):
            return True
    return False


class _Replay:
    """Goes over a graph as over the model: modules start and end, projections read, calls attend.

    What a node gives is known by its shape, and what becomes of a call's output by its numbers.
    """

    def __init__(
        self, model: nn.Module, root: nn.Module | None, told: Callable[[str], Any]
    ) -> None:
        self.model, self.root, self.told = model, root, told
        self.net = Net("watch", model, lambda call: None, {}, ())
        self.modules = {id(module): module for module in model.modules()}
        self.calls: list[_Found] = []
        self.unfollowed = {*composite_functions(), *varlen_functions()}
        self._graphs: list[tuple[fx.GraphModule, dict[fx.Node, Any]]] = []

    def run(self, graph: fx.GraphModule, values: dict[fx.Node, Any]) -> Any:
        """Go over the nodes; return what the graph gives."""
        result, stack = None, self.net.names.stack
        depth = len(stack)
        self._graphs.append((graph, values))
        for node in graph.graph.nodes:
            if node.op == "output":
                result = _mapped(node.args[0], values)
            else:
                values[node] = self._value(graph, node, values)
        self._graphs.pop()
        while len(stack) > depth:
            self.net.names.leave(stack[-1].module, output=result)
        return result

    def end(self) -> None:
        """Settle the calls of which nothing is known yet."""
        for site in (call.site for call in self.calls if call.site.whole is not None):
            assert site.whole is not None
            if site.whole.there is None:
                site.reason = self.net.names.left_out.get(site.whole.name, _UNKNOWN)
            elif site.whole.there == site.whole.seen:
                site.whole = None

    def _value(self, graph: fx.GraphModule, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
        self._enter(node)
        target = node.target
        if node.op == "get_attr":
            return getattr(graph, str(target), None)
        if node.op in ("call_function", "call_method"):
            if target in self.unfollowed or (target in _SOFTMAX and _joins_values(node)):
                raise CannotCapture(str(target))
            if isinstance(target, torch._ops.HigherOrderOperator):
                return self._inner(node, values)
            if target in _SDPA:
                return self._attends(node, node, self._sdpa(node))
            if target is operator.getitem:
                source, place = node.args
                if source.target in _OWN and place == 0:
                    return self._attends(source, node, self._own(source))
                if isinstance(values.get(source), tuple | list):
                    return values[source][place]
            if target is F.linear:
                x = _mapped(node.args[0] if node.args else node.kwargs["input"], values)
                self.net.projected(x, _stand_in(node))
            elif (moved := _moved(node, values)) is not None:
                return moved
        return _stand_in(node)

    # ── modules ─────────────────────────────────────────────────────────────────────────────────

    def _enter(self, node: fx.Node) -> None:
        """Let modules start and end, so that those which run are those that the node is of."""
        if node.op not in ("call_function", "call_method"):
            return
        ids = [int(key.split("@")[0]) for key in node.meta.get("nn_module_stack", {})]
        running = [self.modules[one] for one in ids if one in self.modules]
        if self.root is not None and (not running or running[0] is not self.root):
            running.insert(0, self.root)
        stack = self.net.names.stack
        while [one.module for one in stack] != running[: len(stack)]:
            module = stack[-1].module
            self.net.names.leave(module, output=self._output_of(module, node))
        for module in running[len(stack) :]:
            self.net.names.enter(module)

    def _output_of(self, module: nn.Module, after: fx.Node) -> tuple[Any, ...]:
        """Return what a module has made that others read, the last one first."""
        graph, values = self._graphs[-1]
        inside = [node for node in values if _is_of(node, module)]
        out = [node for node in inside if any(not _is_of(user, module) for user in node.users)]
        return tuple(values[node] for node in (out or inside[-1:])[::-1])

    def _inner(self, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
        """Go over a graph inside of a graph, such as a checkpoint's."""
        graph, result = self._graphs[-1][0], _stand_in(node)
        for body, given in _bodies(graph, node):
            before = len(self.calls)
            found = self.run(body, {} if given is None else _arguments(body, given, values))
            if given is not None:
                result = found
            elif len(self.calls) > before:
                raise CannotCapture(str(node.target))
        if "flex_attention" in str(node.target):
            raise CannotCapture(str(node.target))
        return result

    # ── calls ───────────────────────────────────────────────────────────────────────────────────

    def _sdpa(self, node: fx.Node) -> dict[str, Any]:
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        asked = dict(zip(names, node.args, strict=False)) | node.kwargs
        scale = asked.get("scale")
        return {
            "tensors": (asked["query"], asked["key"], asked["value"]),
            "terms": [asked.get("attn_mask")],
            "numbers": [asked.get("is_causal", False)],
            "scale": [] if scale is None else [scale],
            "groups": bool(asked.get("enable_gqa", False)),
        }

    def _own(self, node: fx.Node) -> dict[str, Any]:
        q, k, v, sinks, *rest = node.args
        if v is None:
            raise CannotCapture("native_forward without values")
        terms, (scale, softcap) = rest[:9], rest[9:11]
        return {
            "tensors": (q, k, v),
            "terms": [sinks, *terms[:6]],
            "numbers": terms[6:],
            "scale": [scale, softcap],
            "groups": False,
        }

    def _attends(self, node: fx.Node, out: fx.Node, asked: dict[str, Any]) -> Tensor:
        """Take up an attention call; return numbers that show where its output goes."""
        stack, names = self.net.names.stack, self.net.names
        given = _numbers(_stand_in(out))
        if not stack:  # what attends is none of the model's modules
            return given
        forward = stack[-1]
        module, own = forward.module, node is not out
        site = Site(
            weakref.ref(self.model),
            weakref.ref(module),
            None if self.root is None else weakref.ref(self.root),
            own,
            asked.pop("groups"),
            torch.is_grad_enabled(),
        )
        said = f"{'attend' if own else 'scaled_dot_product_attention'} giving {list(given.shape)}"
        if own:
            axes: Leading | None = Leading(tuple(given.shape[:2]), (0, 1), given.shape[1], True)
        else:
            values = _like(asked["tensors"][2])
            axes = leading(given.shape, stack, values, told=self.told(names.current))
        if axes is None:
            site.reason = f"{said}: nothing tells which axis is heads, and which is blocks"
        else:
            keys = _like(asked["tensors"][1]).shape[-2]
            site.axes = axes
            site.whole = Waiting(
                names.current, said, axes.split(given), given.shape, keys, axes.sure
            )
            forward.waiting.append(site.whole)
            forward.told = True
        self.calls.append(_Found(node, out, site, **asked))
        return given


_UNKNOWN = "nothing tells whether the call is all that its module attends"


def _is_of(node: fx.Node, module: nn.Module) -> bool:
    return any(int(key.split("@")[0]) == id(module) for key in node.meta.get("nn_module_stack", {}))


def _bodies(
    graph: fx.GraphModule, node: fx.Node
) -> Iterator[tuple[fx.GraphModule, list[Any] | None]]:
    """Yield the graphs that a node runs, with the arguments of one that it hands on as they are."""
    inner = [
        (place, getattr(graph, str(one.target)))
        for place, one in enumerate(node.args)
        if isinstance(one, fx.Node)
        and one.op == "get_attr"
        and isinstance(getattr(graph, str(one.target), None), fx.GraphModule)
    ]
    for place, body in inner:
        wanted = len(list(body.graph.find_nodes(op="placeholder")))
        rest = list(node.args[place + 1 :])
        given = rest[len(rest) - wanted :] if len(inner) == 1 and len(rest) >= wanted else None
        yield body, given


def _arguments(
    body: fx.GraphModule, given: list[Any], values: Mapping[fx.Node, Any]
) -> dict[fx.Node, Any]:
    places = body.graph.find_nodes(op="placeholder")
    return dict(zip(places, (_mapped(one, values) for one in given), strict=True))


# ── what nodes give ─────────────────────────────────────────────────────────────────────────────


def _like(node: fx.Node) -> Tensor:
    """Return a tensor without numbers that is like what a node gives."""
    example = node.meta["example_value"]
    sizes, strides = _sizes(example.shape), _sizes(example.stride())
    return torch.empty_strided(sizes, strides, dtype=example.dtype, device="meta")


def _sizes(sizes: Sequence[Any]) -> list[int]:
    """Return sizes as they were when the graph was made."""
    return [size if isinstance(size, int) else size.node.require_hint() for size in sizes]


def _stand_in(node: fx.Node) -> Any:
    """Return zeros of the shape of what a node gives, without memory; no tensors as they are."""
    return fx.node.map_aggregate(node.meta.get("example_value"), _zeros)


def _zeros(example: Any) -> Any:
    if not isinstance(example, Tensor):
        return example
    dtype = torch.float32 if example.is_floating_point() else torch.int32
    return torch.zeros((), dtype=dtype).expand(_sizes(example.shape))


_MOST = 2**24
"""Of more numbers none is told from the others."""


def _numbers(like: Tensor) -> Tensor:
    """Return a tensor of this shape in which all numbers differ, if they are not too many."""
    if like.numel() > _MOST:
        return like
    return torch.arange(like.numel(), dtype=torch.float32).view(like.shape)


def _mapped(given: Any, values: Mapping[fx.Node, Any]) -> Any:
    """Return arguments with the values of their nodes."""
    return fx.node.map_arg(given, lambda node: values[node] if node in values else _stand_in(node))


def _moved(node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    """Return what a node gives that only moves numbers; None of another one."""
    source = values.get(node.args[0]) if node.args and isinstance(node.args[0], fx.Node) else None
    if not isinstance(source, Tensor) or not any(source.stride()):
        return None
    rest = fx.node.map_aggregate(_mapped(tuple(node.args[1:]), values), _size)
    kwargs = fx.node.map_aggregate(_mapped(dict(node.kwargs), values), _size)
    if node.op == "call_method" and node.target in _VIEWS:
        return getattr(source, str(node.target))(*rest, **kwargs)
    if node.op == "call_function" and node.target in _TORCH_VIEWS:
        return node.target(source, *rest, **kwargs)
    return None


def _size(given: Any) -> Any:
    return given.node.require_hint() if isinstance(given, torch.SymInt) else given


# ── putting the operator in ─────────────────────────────────────────────────────────────────────


def _order(graph: fx.GraphModule) -> fx.Node:
    """Return the node of a tensor that the operator is said to write."""
    name = "headwise_order"
    add_buffer(graph, name, torch.zeros((), dtype=torch.int32))
    with graph.graph.inserting_before(next(iter(graph.graph.nodes))):
        return graph.graph.get_attr(name)


def _insert(graph: fx.GraphModule, calls: Mapping[fx.Node, _Found], order: fx.Node) -> bool:
    """Put the operator behind the calls of a graph and of those inside of it."""
    changed = False
    for node in list(graph.graph.nodes):
        if found := calls.get(node):
            _put_behind(graph.graph, found, order)
            changed = True
        elif isinstance(node.target, torch._ops.HigherOrderOperator):
            for body, given in _bodies(graph, node):
                if given is None:
                    continue
                last = [*body.graph.find_nodes(op="placeholder")][-1:]
                with body.graph.inserting_after(*last):
                    place = body.graph.placeholder("headwise_order")
                place.meta["example_value"] = order.meta.get("example_value")
                if _insert(body, calls, place):
                    node.args, changed = (*node.args, order), True
                else:
                    body.graph.erase_node(place)
    if changed:
        graph.graph.lint()
        graph.recompile()
    return changed


def _put_behind(graph: fx.Graph, found: _Found, order: fx.Node) -> None:
    at = found.out
    detached = []
    for node in (*found.tensors, found.out):
        with graph.inserting_after(at):
            at = graph.call_method("detach", (node,))
        detached.append(at)
    terms = []
    for node in found.terms:
        if isinstance(node, fx.Node):
            with graph.inserting_after(at):
                at = graph.call_method("detach", (node,))
            node = at
        terms.append(node)
    args = (*detached, terms, list(found.numbers), found.scale, order, found.site.number)
    with graph.inserting_after(at):
        graph.call_function(torch.ops.headwise.captured.default, args)

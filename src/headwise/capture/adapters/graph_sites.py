"""Find the attention calls in a graph of `torch.compile`, and insert the operator after each.

A graph is replayed like a forward pass of the model, with the start and end of modules, projections
and attention calls. Only the shapes of the nodes' values are known, but the outputs of calls get
distinct numbers, which show where each of them goes. So the rules for eager calls (`head_axis`,
`parts`) apply here too.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate, map_arg

from ..head_axis import Leading, leading
from ..modules import names_of
from ..parts import PendingCall
from ..private_torch import add_buffer, example_of, hint_of
from ..session import CaptureSession
from .graphs import SITES, Site
from .mha import functions as composite_functions
from .sdpa import functions as sdpa_functions
from .varlen import functions as varlen_functions


class CannotCapture(Exception):
    """A graph attends in a way that is captured only in eager mode."""


def instrument(
    graph: fx.GraphModule,
    models: Sequence[nn.Module],
    root: nn.Module | None,
    declared: Callable[[str], Any],
) -> tuple[list[Site], bool]:
    """Insert the operator after each attention call of a graph.

    Return the sites, and True if there is any attention, including outside the models' modules.

    Args:
        graph: the graph recorded by `torch.compile`.
        models: the watched models.
        root: the module whose forward was compiled.
        declared: the user's `heads=` for a module, by its name.

    Raises:
        CannotCapture: the graph has attention of another kind, or a call that cannot be read.
    """
    try:
        return _instrument(graph, models, root, declared)
    except CannotCapture:
        raise
    except Exception as error:  # the model runs in eager mode, so training continues
        raise CannotCapture(f"{type(error).__name__}: {error}") from error


def _instrument(
    graph: fx.GraphModule,
    models: Sequence[nn.Module],
    root: nn.Module | None,
    declared: Callable[[str], Any],
) -> tuple[list[Site], bool]:
    if root is not None and all(root is not x for model in models for x in model.modules()):
        models = [*models, root]  # of another model, which may share the graph
    replay = _Replay(models, root, declared)
    replay.run(graph, {})
    replay.end()
    calls = replay.calls
    if calls:
        calls[0].site.first = calls[-1].site.last = True
        _insert(graph, {call.node: call for call in calls}, _order(graph))
    for call in calls:
        SITES[call.site.number] = call.site
    return [call.site for call in calls], replay.attends


class _Site(NamedTuple):
    """An attention call: its node, the node of its output, and the arguments of the operator."""

    node: fx.Node
    out: fx.Node
    site: Site
    weight: fx.Node | None
    tensors: tuple[Any, Any, Any]
    terms: list[Any]
    numbers: list[Any]
    scale: list[Any]


_SDPA = frozenset(sdpa_functions())
_OWN = (torch.ops.headwise.native_forward, torch.ops.headwise.native_forward.default)
_SOFTMAX = (F.softmax, torch.softmax, torch.special.softmax, "softmax")
_PRODUCTS = (torch.matmul, operator.matmul, torch.bmm, torch.baddbmm, torch.einsum)
_PRODUCTS += ("matmul", "bmm", "__matmul__")
_CHOOSING = (torch.topk, torch.argmax, torch.sort, torch.max, torch.gather, torch.multinomial)
_CHOOSING += ("topk", "argmax", "sort", "max", "gather", "multinomial")
_VIEWS = ("view", "reshape", "transpose", "permute", "contiguous", "flatten", "unflatten", "clone")
_VIEWS += ("movedim", "squeeze", "unsqueeze", "swapaxes")
_TORCH_VIEWS = tuple(vars(torch)[name] for name in _VIEWS if name in vars(torch))
"""Functions, and the names of tensor methods."""


def _weighs(softmax: fx.Node) -> bool:
    """Return True if the result of a softmax, possibly transformed, is a factor of a product."""
    reached, more = {softmax}, [softmax]
    while more and len(reached) < 64:
        for user in more.pop().users:
            if user.target in _PRODUCTS:
                return True
            if user not in reached and user.target not in _CHOOSING:
                reached.add(user)
                more.append(user)
    return False


class _Replay:
    """Walks through a graph as if the model ran: its modules, projections and attention calls.

    Only the shape of a node's value is known; a call's output is tracked by its distinct numbers.
    """

    def __init__(
        self, models: Sequence[nn.Module], root: nn.Module | None, declared: Callable[[str], Any]
    ) -> None:
        self.root, self.declared = root, declared
        self.net = CaptureSession("watch", models[0], lambda call: None, {}, ())
        self.modules = {id(module): module for model in models for module in model.modules()}
        for model in models[1:]:
            self.net.names.names = names_of(model) | self.net.names.names
        self.parameters = {
            id(x): (name, self.net.names.names[place])
            for place, module in self.modules.items()
            for name, x in module._parameters.items()
        }
        self.weights: dict[fx.Node, tuple[str, str]] = {}  # its name, and that of its module
        self.calls: list[_Site] = []
        self.attends = False
        self.unfollowed = {*composite_functions(), *varlen_functions()}
        self._graphs: list[tuple[fx.GraphModule, dict[fx.Node, Any]]] = []

    def run(self, graph: fx.GraphModule, values: dict[fx.Node, Any]) -> Any:
        """Interpret the nodes; return the output of the graph."""
        result, stack = None, self.net.names.stack
        depth = len(stack)
        self._graphs.append((graph, values))
        for node in graph.graph.nodes:
            if node.op == "output":
                result = _mapped(node.args[0], values)
            else:
                values.setdefault(node, self._value(graph, node, values))
        self._graphs.pop()
        while len(stack) > depth:
            self.net.names.leave(stack[-1].module, output=result)
        return result

    def end(self) -> None:
        """Resolve the calls that are still pending."""
        for site in (call.site for call in self.calls if call.site.whole is not None):
            assert site.whole is not None
            if site.whole.total_queries is None:
                site.reason = self.net.names.left_out.get(site.whole.name, _UNKNOWN)
            elif site.whole.total_queries == site.whole.seen:
                site.whole = None

    def _value(self, graph: fx.GraphModule, node: Any, values: dict[fx.Node, Any]) -> Any:
        self._enter(node)
        target = node.target
        if node.op == "placeholder" and (known := self.parameters.get(id(example_of(node)))):
            self.weights[node] = known
        if node.op == "get_attr":
            return getattr(graph, str(target), None)
        if node.op in ("call_function", "call_method"):
            if target in self.unfollowed or (target in _SOFTMAX and _weighs(node)):
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
            if target is F.linear and self.net.names.stack:
                x = _mapped(node.args[0] if node.args else node.kwargs["input"], values)
                self.net.projected(x, _stand_in(node))
            elif (moved := _moved(node, values)) is not None:
                return moved
        return _stand_in(node)

    # ── modules ─────────────────────────────────────────────────────────────────────────────────

    def _enter(self, node: fx.Node) -> None:
        """Enter and leave modules, so that the running modules are those of the node."""
        if node.op not in ("call_function", "call_method"):
            return
        ids = [int(key.split("@")[0]) for key in node.meta.get("nn_module_stack", {})]
        running = [self.modules[one] for one in ids if one in self.modules]
        if self.root is not None and (not running or running[0] is not self.root):
            running.insert(0, self.root)
        stack = self.net.names.stack
        while [one.module for one in stack] != running[: len(stack)]:
            module = stack[-1].module
            self.net.names.leave(module, output=self._output_of(module))
        for module in running[len(stack) :]:
            self.net.names.enter(module)

    def _output_of(self, module: nn.Module) -> tuple[Any, ...]:
        """Return the values of a module that other modules read, last one first."""
        _, values = self._graphs[-1]
        inside = [x for x, value in values.items() if _is_of(x, module) and _gives(x, value)]
        out = [node for node in inside if any(not _is_of(user, module) for user in node.users)]
        return tuple(values[node] for node in (out or inside[-1:])[::-1])

    def _inner(self, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
        """Interpret a graph inside a graph, such as that of a checkpoint."""
        graph, result = self._graphs[-1][0], _stand_in(node)
        for body, given in _bodies(graph, node):
            before, arguments = len(self.calls), {}
            if given is not None:
                places = list(body.graph.find_nodes(op="placeholder"))
                arguments = dict(zip(places, (_mapped(x, values) for x in given), strict=True))
                inside = zip(places, given, strict=True)
                self.weights |= {x: self.weights[y] for x, y in inside if y in self.weights}
            found = self.run(body, arguments)
            if given is not None:
                result = found
            elif len(self.calls) > before:
                raise CannotCapture(str(node.target))
        if "flex_attention" in str(node.target):
            raise CannotCapture(str(node.target))
        return result

    # ── calls ───────────────────────────────────────────────────────────────────────────────────

    def _sdpa(self, node: Any) -> dict[str, Any]:
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        bound_args = dict(zip(names, node.args, strict=False)) | node.kwargs
        scale = bound_args.get("scale")
        return {
            "tensors": (bound_args["query"], bound_args["key"], bound_args["value"]),
            "terms": [bound_args.get("attn_mask")],
            "numbers": [bound_args.get("is_causal", False)],
            "scale": [] if scale is None else [scale],
            "groups": bool(bound_args.get("enable_gqa", False)),
        }

    def _own(self, node: Any) -> dict[str, Any]:
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

    def _attends(self, node: fx.Node, out: fx.Node, bound_args: dict[str, Any]) -> Tensor:
        """Record an attention call; return distinct numbers that show where its output goes."""
        self.attends = True
        stack, names = self.net.names.stack, self.net.names
        given = _numbers(_stand_in(out))
        if not stack:  # no module of the model attends
            return given
        forward = stack[-1]
        module, own, name = forward.module, node is not out, names.current
        weight = self._weight_of(name, node.graph)
        site = Site(
            weakref.ref(module),
            None if weight is None else (name, *self.weights[weight]),
            own,
            bound_args.pop("groups"),
            torch.is_grad_enabled(),
        )
        quote = f"{'attend' if own else 'scaled_dot_product_attention'} giving {list(given.shape)}"
        if own:
            axes: Leading | None = Leading(tuple(given.shape[:2]), (0, 1), given.shape[1], True)
        else:
            values = _like(bound_args["tensors"][2])
            axes = leading(given.shape, stack, values, declared=self.declared(name))
        if axes is None:
            site.reason = f"{quote}: it is unclear which axis holds heads and which holds blocks"
        else:
            keys = _like(bound_args["tensors"][1]).shape[-2]
            site.axes = axes
            known = axes.sure, axes.declared
            site.whole = PendingCall(name, quote, axes.split(given), given.shape, keys, *known)
            forward.waiting.append(site.whole)
            forward.emitted = True
        self.calls.append(_Site(node, out, site, weight, **bound_args))
        return given

    def _weight_of(self, name: str, graph: fx.Graph) -> fx.Node | None:
        """Return the node of a parameter of a module, or of the nearest enclosing module."""
        best, most = None, -1
        for node, (_, holder) in self.weights.items():
            inside = not name or holder == name or holder.startswith(f"{name}.")
            around = not holder or name.startswith(f"{holder}.")
            rank = len(name) + 1 if inside else len(holder) if around else -1
            if node.graph is graph and rank > most:
                best, most = node, rank
        return best


_UNKNOWN = "it is unknown whether the call covers all of its module's attention"


def _gives(node: Any, value: Any) -> bool:
    """Return True if a module may return the value of a node; not for a kernel's statistics."""
    figure = node.target is operator.getitem and node.args[0].target in _OWN and node.args[1] != 0
    return isinstance(value, Tensor | tuple | list) and not figure


def _is_of(node: fx.Node, module: nn.Module) -> bool:
    return any(int(key.split("@")[0]) == id(module) for key in node.meta.get("nn_module_stack", {}))


def _bodies(
    graph: fx.GraphModule, node: fx.Node
) -> Iterator[tuple[fx.GraphModule, list[Any] | None]]:
    """Yield the graphs that a node runs, with the arguments that it passes on unchanged, if any."""
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


# ── values of nodes ─────────────────────────────────────────────────────────────────────────────


def _like(node: fx.Node) -> Tensor:
    """Return a meta tensor like the value of a node."""
    example = node.meta["example_value"]
    sizes, strides = _sizes(example.shape), _sizes(example.stride())
    return torch.empty_strided(sizes, strides, dtype=example.dtype, device="meta")


def _sizes(sizes: Sequence[Any]) -> list[int]:
    """Return sizes as they were when the graph was made."""
    return [size if isinstance(size, int) else hint_of(size) for size in sizes]


def _stand_in(node: fx.Node) -> Any:
    """Return zeros like a node's value, without allocating memory; non-tensors unchanged."""
    return map_aggregate(node.meta.get("example_value"), _zeros)


def _zeros(example: Any) -> Any:
    if not isinstance(example, Tensor):
        return example
    dtype = torch.float32 if example.is_floating_point() else torch.int32
    return torch.zeros((), dtype=dtype).expand(_sizes(example.shape))


_MOST = 2**24
"""The number of consecutive integers that float32 can distinguish."""


def _numbers(like: Tensor) -> Tensor:
    """Return a tensor of this shape in which all numbers differ, unless there are too many."""
    if like.numel() > _MOST:
        return like
    return torch.arange(like.numel(), dtype=torch.float32).view(like.shape)


def _mapped(given: Any, values: Mapping[fx.Node, Any]) -> Any:
    """Return arguments with their nodes replaced by values."""
    return map_arg(given, lambda node: values[node] if node in values else _stand_in(node))


def _moved(node: Any, values: Mapping[fx.Node, Any]) -> Any:
    """Return the value of a node that only rearranges elements; None for other nodes."""
    source = values.get(node.args[0]) if node.args and isinstance(node.args[0], fx.Node) else None
    if not isinstance(source, Tensor) or not any(source.stride()):
        return None
    rest = map_aggregate(_mapped(tuple(node.args[1:]), values), _size)
    kwargs = map_aggregate(_mapped(dict(node.kwargs), values), _size)
    if node.op == "call_method" and node.target in _VIEWS:
        return getattr(source, str(node.target))(*rest, **kwargs)
    if node.op == "call_function" and node.target in _TORCH_VIEWS:
        return node.target(source, *rest, **kwargs)
    return None


def _size(given: Any) -> Any:
    return hint_of(given) if isinstance(given, torch.SymInt) else given


# ── inserting the operator ──────────────────────────────────────────────────────────────────────


def _order(graph: fx.GraphModule) -> fx.Node:
    """Return the node of a tensor that the operator is declared to write."""
    name = "headwise_order"
    add_buffer(graph, name, torch.zeros((), dtype=torch.int32))
    with graph.graph.inserting_before(next(iter(graph.graph.nodes))):
        return graph.graph.get_attr(name)


def _insert(graph: fx.GraphModule, calls: Mapping[fx.Node, _Site], order: fx.Node) -> bool:
    """Insert the operator after each call of a graph and of the graphs inside it."""
    changed = False
    for node in list(graph.graph.nodes):
        if site := calls.get(node):
            _put_behind(graph.graph, site, order)
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


def _put_behind(graph: fx.Graph, site: _Site, order: fx.Node) -> None:
    at = site.out
    detached = []
    for node in (*site.tensors, site.out):
        with graph.inserting_after(at):
            at = graph.call_method("detach", (node,))
        detached.append(at)
    terms = []
    for node in site.terms:
        if isinstance(node, fx.Node):
            with graph.inserting_after(at):
                at = graph.call_method("detach", (node,))
            node = at
        terms.append(node)
    weight = site.weight
    if weight is not None:
        with graph.inserting_after(at):
            weight = at = graph.call_method("detach", (weight,))
    numbers = list(site.numbers)
    args = (*detached, terms, numbers, site.scale, weight, order, site.site.number)
    with graph.inserting_after(at):
        graph.call_function(torch.ops.headwise.captured.default, args)

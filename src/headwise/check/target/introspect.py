"""What a module's attributes say of other ingredients: numbers, and rotary positions."""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Collection, Iterable, Iterator
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from ...layers.rope import RoPE
from .errors import is_users
from .names import building_role
from .signatures import source_of
from .sizes import fields_of

_CONVOLUTIONS = nn.Conv1d, nn.Conv2d, nn.Conv3d

Rotation = tuple[int, float, bool]
"""`RoPE`'s dim, base and interleaved."""

SPEAKS_OF_ROPE = re.compile(
    r"rope|rotar|rotat|rot_?emb|rot_?dim|(^|_)rot(_|$)|freqs?|position_embeddings|theta|"
    r"(^|_)(cos|sin)(_|$)"
)
TURNS = re.compile(r"rotar|rotat|(^|_)rot(_|$)|(^|_)rope|rope(_|$)")
"""Names of functions that turn, and of the classes of what is called to do so."""
IS_MORE = re.compile(r"att|mha|head|block|layer|model|transformer|former$")
"""Classes that do more than turn what they are given."""


def names_in(module: nn.Module) -> Iterator[str]:
    """Names of attributes, buffers and children that are not switched off, and what the module's
    own methods call.
    """
    for child in module.modules():
        for name, value in {**vars(child), **child._buffers, **child._modules}.items():
            if not name.startswith("_") and value is not None and value is not False:
                yield name
        for kind in _own_classes(child):
            for name, value in vars(kind).items():
                if not name.startswith("__") or name == "__init__":
                    yield name
                    yield from getattr(getattr(value, "__code__", None), "co_names", ())


def is_pointwise(module: nn.Module) -> bool:
    """Whether each of its weights works on one token at a time: projections, convolutions of size
    1, norms, and numbers for single features or heads.

    >>> is_pointwise(nn.Sequential(nn.Conv1d(4, 4, 1), nn.LayerNorm(4)))
    True
    >>> is_pointwise(nn.Conv1d(4, 4, 3)), is_pointwise(nn.Embedding(8, 4))
    (False, False)
    """

    def alone(part: nn.Module) -> bool:
        held = [*part.parameters(recurse=False), *part.buffers(recurse=False)]
        vectors = all(max(one.shape, default=1) == one.numel() for one in held)
        if isinstance(part, nn.Linear) or vectors:
            return True
        return isinstance(part, _CONVOLUTIONS) and {*part.kernel_size, *part.stride} == {1}

    return all(map(alone, module.modules()))


def written_code(module: nn.Module) -> str:
    """The code of its classes but PyTorch's own, and of the functions of their files that they
    speak of, without comments and strings; nothing where some of it cannot be read."""
    kinds = {kind for part in module.modules() for kind in type(part).mro()[:-1]}
    own = {kind for kind in kinds if not kind.__module__.startswith("torch.")}
    homes = [vars(sys.modules[name]) for name in {kind.__module__ for kind in own} & {*sys.modules}]
    named = (pair for home in homes for pair in home.items() if inspect.isfunction(pair[1]))
    known = {name: one for name, one in named if is_users(one.__code__.co_filename)}
    read, codes = set[Any](), list[str]()
    while rest := own - read:
        codes += (said := [textwrap.dedent(source_of(one)) for one in rest])
        read |= rest
        own |= {known[name] for name in known if any(name in code for code in said)}
    try:
        trees = [ast.parse(code) for code in codes]
    except SyntaxError:
        return ""
    for one in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(one, ast.Constant) and isinstance(one.value, str):
            one.value = ""
    return "\n".join(map(ast.unparse, trees)) if all(codes) else ""


def names_called(module: nn.Module) -> Iterator[str]:
    """Names that the call of a module and of what is in it reads, and all methods of the plain
    objects that they hold."""
    for child in module.modules():
        yield from _reached(child)
        for held in vars(child).values():
            for kind in _own_classes(held) if type(held).__module__ != "builtins" else ():
                yield from (
                    one for name in vars(kind) if name != "__init__" for one in _read(kind, name)
                )


def is_called(module: nn.Module, layer: str, read: Collection[str]) -> bool:
    """Whether a layer within is among the names that calls read, and so is all that it lies in;
    what PyTorch's own modules hold is.

    Args:
        read: `names_called` of the module.
    """
    for part in layer.split("."):
        if any(True for _ in _own_classes(module)) and part not in read:
            return False
        child = getattr(module, part, None)
        if not isinstance(child, nn.Module):
            return True
        module = child
    return True


def _reached(module: nn.Module) -> Iterator[str]:
    """Names that a module's call reads, and the methods that it calls: not those that only build
    it, or show it."""
    waiting, seen = ["forward", "__call__"], set[str]()
    while waiting:
        name = waiting.pop()
        seen.add(name)
        for kind in _own_classes(module):
            if name in vars(kind):
                read = {*_read(kind, name)}
                yield from read
                methods = vars(kind) if "getattr" in read else ()  # whichever it may be
                waiting += {*read, *methods} - seen - {"__init__"}
                if "super" not in read:
                    break


def _read(kind: type, name: str) -> Iterator[str]:
    """Names that a method reads, or a function in it."""
    value = vars(kind)[name]
    value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    waiting = [getattr(inspect.unwrap(value) if callable(value) else None, "__code__", None)]
    while waiting:
        if (code := waiting.pop()) is not None:
            yield from code.co_names
            waiting += [one for one in code.co_consts if isinstance(one, CodeType)]


def _own_classes(thing: Any) -> Iterator[type]:
    """Its classes below PyTorch's."""
    for kind in type(thing).__mro__:
        if kind.__module__.split(".")[0] in ("torch", "builtins"):
            return
        yield kind


def numbers_in(module: nn.Module, pattern: str) -> Iterator[float]:
    """Numbers among a module's attributes and its config's whose names fit.

    >>> layer = nn.Linear(2, 3)
    >>> layer.window_size = 4
    >>> list(numbers_in(layer, "window"))
    [4.0]
    """
    for child in module.modules():
        config = getattr(child, "config", None)
        classes = (vars(kind) for kind in _own_classes(child))
        for holder in (vars(child), *classes, getattr(config, "__dict__", {})):
            for name, value in holder.items():
                values = {name: value, **(value if isinstance(value, dict) else {})}
                for key, number in values.items():
                    plain = isinstance(number, int | float) and not isinstance(number, bool)
                    if plain and re.search(pattern, str(key)):
                        yield float(number)


def set_dropout(module: nn.Module, p: float) -> bool:
    """Set every probability of dropping; whether there was any."""
    any_found = False
    for child in module.modules():
        own = ["p"] if isinstance(child, nn.modules.dropout._DropoutNd) else []
        for name, value in vars(child).items():
            said = "drop" in name or (building_role(name) == "dropout" and name != "p")
            own += [name] * (said and isinstance(value, float) and 0.0 <= value < 1.0)
        for name in own:
            setattr(child, name, p)
        any_found = any_found or bool(own)
    return any_found


def layer_of(name: str) -> str:
    """A parameter's path without the name of its kind.

    >>> layer_of("heads.0.query.weight")
    'heads.0.query'
    """
    return re.sub(r"\.(weight|bias)$", "", name)


def unregistered(module: nn.Module) -> Iterator[tuple[str, list[Any]]]:
    """Plain lists that hold modules or parameters which PyTorch does not know of."""
    known = {id(one) for one in (*module.parameters(), *module.modules())}
    for path, child in module.named_modules():
        for name, value in vars(child).items():
            if not isinstance(value, (list, tuple, dict)):
                continue
            held = list(value.values()) if isinstance(value, dict) else list(value)
            lost = [one for one in held if isinstance(one, nn.Module | nn.Parameter)]
            hides = name.startswith("_") and len(lost) < 2  # one alone may be kept out on purpose
            if not hides and any(id(one) not in known for one in lost):
                yield f"{path}.{name}" if path else name, held


def rotations(module: nn.Module, head_dim: int, parameters: Iterable[str] = ()) -> list[Rotation]:
    """Rotary positions that may be meant, where anything speaks of them.

    Args:
        parameters: names of what `forward` takes.
    """
    said = [*names_in(module), *parameters]
    if head_dim < 2 or not any(SPEAKS_OF_ROPE.search(name.lower()) for name in said):
        return []
    found = dict.fromkeys(pair for pair in _tables(module) if pair[0] <= head_dim)
    bases = dict.fromkeys(b for b in numbers_in(module, r"theta|rope.*base|rotary.*base") if b > 1)
    dims = [int(n) for n in numbers_in(module, r"rot\w*_dim|rotary_ndims") if 1 < n <= head_dim]
    for dim in dict.fromkeys([*dims, head_dim]):
        for base in bases or ([] if found else [10000.0]):
            found[dim - dim % 2, base] = None
    return [(dim, base, inner) for dim, base in list(found)[:4] for inner in (False, True)]


def _tables(module: nn.Module) -> Iterator[tuple[int, float]]:
    """Width and base of rotations whose frequencies, cosines or complex numbers are kept."""
    for child in module.modules():
        for name, value in {**vars(child), **child._buffers}.items():
            if isinstance(value, RoPE) and value.kind == "default":
                yield value.dim, value.base
            if not isinstance(value, Tensor) or value.ndim == 0 or not value.numel():
                continue
            row = value.detach().reshape(-1, value.shape[-1])
            if value.is_complex() and len(row) > 1:
                radians = row[1].angle()
            elif "freq" in name and value.ndim == 1:
                radians = value.detach()
            elif re.search(r"(^|_)cos(_|$)", name) and len(row) > 1:
                radians = torch.acos(row[1].clamp(-1, 1))
            else:
                continue
            radians = radians.double()
            half = len(radians) // 2
            if "freq" not in name and half and torch.equal(radians[:half], radians[half:]):
                radians = radians[:half]
            if len(radians) > 1 and 0 < radians[1] < radians[0]:
                dim = 2 * len(radians)
                yield dim, round(float((radians[1] / radians[0]) ** (-dim / 2)), 2)


def by_role(pairs: Iterable[tuple[Any, Any]], beside: Collection[str] = ()) -> dict[str, Any]:
    """The first value of each role."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        role = building_role(str(name), beside=beside)
        if role not in (None, "config") and not isinstance(value, list | tuple | dict):
            found.setdefault(role, value)
    return found


def is_number(value: Any) -> bool:
    """Whether it is a whole number, and no flag."""
    return isinstance(value, int) and not isinstance(value, bool)


def facts(thing: Any) -> dict[str, Any]:
    """Sizes that an object tells by its attributes, its config's and its children's, by role.

    >>> facts(nn.MultiheadAttention(24, 3))["heads"]
    3
    """
    configs = (getattr(thing, name, None) for name in ("config", "cfg", "args", "params"))
    inside = list(thing.modules())[1:] if isinstance(thing, nn.Module) else []
    places = (fields_of(place) for place in (thing, *configs, *inside))
    pairs = (pair for fields in places for pair in fields.items())
    return own_sizes(by_role(pair for pair in pairs if is_number(pair[1]) and pair[1] > 0), thing)


def own_sizes(told: dict[str, Any], thing: Any) -> dict[str, Any]:
    """Sizes without a number of heads of the whole width each, where no weight is as wide as all of
    them: in a configuration of several layers it is another's."""
    weights = thing.parameters() if isinstance(thing, nn.Module) else ()
    made = (one for one in weights if not isinstance(one, nn.UninitializedParameter))
    widest = max((side for one in made for side in one.shape), default=0)
    if told.get("head_dim") == told.get("width") == widest > 0:
        return {role: value for role, value in told.items() if role != "heads"}
    return told


def input_width(module: nn.Module) -> int | None:
    """The width of the input, from the first layer that it meets."""
    for child in module.modules():
        if isinstance(child, nn.LazyLinear):
            return None
        if isinstance(child, nn.Linear) and hasattr(child, "in_features"):
            return child.in_features
        weight = getattr(child, "weight", None)
        if type(child).__name__ == "Conv1D" and isinstance(weight, torch.Tensor):
            return weight.shape[0]
    return None


def matrix_width(module: nn.Module) -> int | None:
    """The same where matrices are written raw, as `x @ W`."""
    return next((p.shape[-2] for p in module.parameters() if p.ndim >= 2), None)


def own_backwards(out: Tensor) -> Iterator[tuple[str, int]]:
    """Functions with a backward of somebody's own that an output was made by, and how many inputs
    each has."""
    waiting, seen = [out.grad_fn], set[object]()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [one for one, _ in node.next_functions]
        kind = getattr(node, "_forward_cls", None) if isinstance(node, BackwardCFunction) else None
        if kind is not None and is_users(inspect.getsourcefile(kind) or ""):
            yield kind.__name__, len(node.next_functions)

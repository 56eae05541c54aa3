"""Facts about the checked code: signatures, attributes, and errors with their lines.

This module finds names, numbers and lines; it does not test anything.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import linecache
import re
import sys
import textwrap
import traceback
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..layers.rope import RoPE
from .names import building_role

SPEAKS_OF_ROPE = re.compile(
    r"rope|rotar|rotat|rot_?emb|rot_?dim|(^|_)rot(_|$)|freqs?|position_embeddings|theta|"
    r"(^|_)(cos|sin)(_|$)"
)


class Line(NamedTuple):
    """A line of a user's file."""

    file: str
    number: int

    @property
    def code(self) -> str:
        return linecache.getline(self.file, self.number).strip()

    def __str__(self) -> str:
        return f"line {self.number}, `{self.code}`"


def signature(call: Any) -> list[inspect.Parameter]:
    """Return the parameters of a class or function, without `self`; empty if unavailable."""
    try:
        own = inspect.signature(call).parameters.values()
    except (TypeError, ValueError):
        return []
    return [one for one in own if one.name != "self"]


def required(one: inspect.Parameter) -> bool:
    """Return True if the parameter is required."""
    return one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)


def source_of(thing: Any) -> str:
    """Return the code of a class, function or module; "" if unavailable."""
    try:
        return inspect.getsource(getattr(thing, "__func__", thing))
    except (OSError, TypeError):
        return ""


def class_sources(module: nn.Module) -> str:
    """Return the code of the user's classes in a module, and of the functions that they mention."""
    return "\n".join(map(source_of, own_code(module)))


def name_of(thing: Any) -> str:
    """Return the name of a class or function, or of an object's class."""
    inner = getattr(thing, "func", thing)  # a functools.partial
    name = getattr(inner, "__name__", None) or type(inner).__name__
    return "attention" if name == "<lambda>" else name


def own_classes(thing: Any) -> Iterator[type]:
    """Yield an object's classes, except those of PyTorch and Python."""
    for kind in type(thing).__mro__:
        if kind.__module__.split(".")[0] in ("torch", "builtins"):
            return
        yield kind


@cache
def is_users(filename: str) -> bool:
    """Return True if a file belongs neither to a library nor to headwise."""
    here = str(Path(__file__).parents[1])
    inside = ("site-packages", "dist-packages", "<frozen", "<@beartype", here)
    standard = str(Path(inspect.__file__).parent)
    return not any(part in filename for part in inside) and not filename.startswith(standard)


# --- errors ---------------------------------------------------------------------------------------


def line_of(error: BaseException) -> Line | None:
    """Return the innermost line of a user's file in an error's traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [one for one in frames if is_users(one.filename) and one.lineno]
    return Line(own[-1].filename, own[-1].lineno or 0) if own else None


def describe(error: BaseException) -> str:
    """Return an error in one line: its message, the user's line, and the shapes there.

    >>> describe(ValueError("too long"))
    'ValueError: too long'
    """
    text = " ".join(str(error).split()) or "no message"
    text = text if len(text) < 200 else f"{text[:200]}…"
    message = f"{type(error).__name__}: {text}{_meant(error)}"
    walked = traceback.walk_tb(error.__traceback__)
    frames = [one for one in walked if is_users(one[0].f_code.co_filename)]
    if not frames:
        return message
    frame, number = frames[-1]
    line = Line(frame.f_code.co_filename, number)
    return f"{message} ({line}{''.join(_shapes(line.code, frame.f_locals))})"


def _meant(error: BaseException) -> str:
    """Return a hint about an error: the attribute closest to a misspelled one, or that NumPy code
    received tensors."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    users = [one for one in frames if is_users(one.f_code.co_filename)]
    if isinstance(error, TypeError) and users:
        names = {getattr(one, "__name__", "") for one in users[-1].f_globals.values()}
        if "numpy" in names and "torch" not in names:
            return "; this is NumPy code, but the check passes PyTorch tensors"
    name = getattr(error, "name", None) or ""
    found = re.search(r"has no attribute '(\w+)'", str(error))
    owner = getattr(error, "obj", None)
    if isinstance(error, AttributeError) and owner is None and found:
        owner, name = frames[-1].f_locals.get("self"), found[1]
    known = dir(owner) if isinstance(owner, nn.Module) and "_modules" in vars(owner) else ()
    near = difflib.get_close_matches(name, known, n=1) if name else []
    return f"; did you mean `{near[0]}`?" if near else ""


def _shapes(code: str, known: Mapping[str, Any]) -> Iterator[str]:
    """Yield the shapes of a line's tensors, and the input widths of its linear layers."""
    for name in dict.fromkeys(re.findall(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*", code)):
        first, *parts = name.split(".")
        value = known.get(first)
        for part in parts:
            inside = vars(value).get("_modules", {}) if isinstance(value, nn.Module) else {}
            value = inside.get(part)
        if isinstance(value, Tensor):
            yield f"; {name} is {list(value.shape)}"
        elif isinstance(value, nn.Linear) and hasattr(value, "in_features"):
            yield f"; {name} takes {value.in_features} features"


# --- attributes -----------------------------------------------------------------------------------


def names_in(module: nn.Module) -> Iterator[str]:
    """Yield the names of attributes, buffers and children, and the names that methods use."""
    for child in module.modules():
        for name, value in {**vars(child), **child._buffers, **child._modules}.items():
            if not name.startswith("_") and value is not None and value is not False:
                yield name
        for kind in own_classes(child):
            for name, value in vars(kind).items():
                if not name.startswith("__"):
                    yield name
                    yield from getattr(getattr(value, "__code__", None), "co_names", ())


def numbers_in(module: nn.Module, pattern: str) -> Iterator[float]:
    """Yield the numbers in the attributes of a module and its config whose names match a pattern.

    >>> layer = nn.Linear(2, 3)
    >>> layer.window_size = 4
    >>> list(numbers_in(layer, "window"))
    [4.0]
    """
    for child in module.modules():
        config = getattr(child, "config", None)
        classes = (vars(kind) for kind in own_classes(child))
        for holder in (vars(child), *classes, getattr(config, "__dict__", {})):
            for name, number in holder.items():
                plain = isinstance(number, int | float) and not isinstance(number, bool)
                if plain and re.search(pattern, str(name)):
                    yield float(number)


def sizes_in(thing: Any) -> dict[str, int]:
    """Return the sizes that an object states in its attributes, its config and its children.

    >>> sizes_in(nn.MultiheadAttention(24, 3))["heads"]
    3
    """
    configs = (getattr(thing, name, None) for name in ("config", "cfg", "args", "params"))
    inside = list(thing.modules())[1:] if isinstance(thing, nn.Module) else []
    found: dict[str, int] = {}
    for place in (thing, *configs, *inside):
        fields = place if isinstance(place, Mapping) else getattr(place, "__dict__", {})
        for name, value in fields.items():
            role = building_role(str(name))
            if role is not None and type(value) is int and value > 0:
                found.setdefault(role, value)
    return found


def input_width(module: nn.Module, stated: int | None = None) -> int | None:
    """Return the width of the input, from the first layer or raw matrix.

    Args:
        stated: the width in an attribute; used if a layer takes it, or if no layer shows its width.
    """
    widths = [width for child in module.modules() if isinstance(width := _taken(child), int)]
    if stated is not None and (stated in widths or not widths):
        return stated
    return next(iter((*widths, *(p.shape[-2] for p in module.parameters() if p.ndim >= 2))), None)


def _taken(layer: nn.Module) -> int | None:
    """Return the width that a projection takes."""
    if isinstance(layer, nn.Linear):
        return getattr(layer, "in_features", None)
    weight = getattr(layer, "weight", None)
    if type(layer).__name__ == "Conv1D" and isinstance(weight, Tensor):
        return weight.shape[0]
    return None


def number_of_heads(module: nn.Module) -> int | None:
    """Return the number of heads: a list's length, else 1; None if the constructor may set it."""
    for child in module.modules():
        parts = list(child) if isinstance(child, nn.ModuleList) else []
        if parts and all(any(True for _ in part.parameters()) for part in parts):
            return len(parts)
    roles = {building_role(p.name) for p in signature(type(module))}
    return None if roles & {"heads", "config"} else 1


Rotation = tuple[int, float, bool]
"""The arguments `dim`, `base` and `interleaved` of `RoPE`."""


def rotations(module: nn.Module, head_dim: int, spoken: Iterable[str] = ()) -> list[Rotation]:
    """Return the rotary positions that the module may use, if any name mentions them.

    Args:
        spoken: further names: the arguments of the call, and the names in a shown call.
    """
    home = vars(sys.modules.get(type(module).__module__, re))
    makers = [
        name for name, one in home.items() if callable(one) and SPEAKS_OF_ROPE.search(name.lower())
    ]
    names = [*names_in(module), *spoken]
    if head_dim < 2 or not any(SPEAKS_OF_ROPE.search(name.lower()) for name in names):
        return []
    found = dict.fromkeys(pair for pair in _tables(module) if pair[0] <= head_dim)
    bases = dict.fromkeys(b for b in numbers_in(module, r"theta|rope.*base|rotary.*base") if b > 1)
    dims = [int(n) for n in numbers_in(module, r"rot\w*_dim|rotary_ndims") if 1 < n <= head_dim]
    defaults = [
        one.default
        for name in makers
        for one in signature(home[name])
        if re.search("theta|base", one.name) and isinstance(one.default, int | float)
    ]
    for dim in dict.fromkeys([*dims, head_dim]):
        for base in bases or ([] if found else dict.fromkeys([*map(float, defaults), 10000.0])):
            found[dim - dim % 2, base] = None
    return [(dim, base, inner) for dim, base in list(found)[:4] for inner in (False, True)]


def _tables(module: nn.Module) -> Iterator[tuple[int, float]]:
    """Yield the width and base of rotations whose frequencies or tables are stored."""
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


def set_dropout(module: nn.Module, p: float) -> bool:
    """Set all dropout probabilities; return True if there are any."""
    any_found = False
    for child in module.modules():
        own = ["p"] if isinstance(child, nn.modules.dropout._DropoutNd) else []
        for name, value in vars(child).items():
            drops = "drop" in name or (building_role(name) == "dropout" and name != "p")
            own += [name] * (drops and isinstance(value, float) and 0.0 <= value < 1.0)
        for name in own:
            setattr(child, name, p)
        any_found = any_found or bool(own)
    return any_found


def lines_in(module: nn.Module, pattern: str) -> list[Line]:
    """Return the lines that match a pattern in a module's own classes, and in functions that they
    mention."""
    found = list[Line]()
    for thing in own_code(module):
        try:
            lines, first = inspect.getsourcelines(thing)
            file = inspect.getsourcefile(thing) or ""
        except (OSError, TypeError):
            continue
        text = _docstrings("".join(lines))
        found += [
            Line(file, first + n)
            for n, one in enumerate(lines)
            if n not in text and re.search(pattern, one)
        ]
    return found


def _docstrings(code: str) -> set[int]:
    """Return the line numbers of docstrings, counted from 0."""
    try:
        tree = ast.parse(textwrap.dedent(code))
    except SyntaxError:
        return set()
    exprs = (one for one in ast.walk(tree) if isinstance(one, ast.Expr))
    texts = (one for one in exprs if isinstance(one.value, ast.Constant))
    return {n for one in texts for n in range(one.lineno - 1, one.end_lineno or one.lineno)}


def own_code(module: nn.Module) -> list[Any]:
    """Return the user's classes in a module, and the functions that they mention."""
    parts = [*module.modules()]
    waiting: list[Any] = list(dict.fromkeys(kind for part in parts for kind in own_classes(part)))
    functions = (getattr(part, "function", None) for part in parts)
    waiting += [one for one in functions if inspect.isfunction(one)]
    done = list[Any]()
    while waiting:
        one = waiting.pop(0)
        home = vars(sys.modules.get(one.__module__, re))
        words = set(re.findall(r"\w+", source_of(one)))
        done.append(one)
        waiting += [
            home[name]
            for name in words & set(home)
            if inspect.isfunction(home[name])
            and home[name].__module__ == one.__module__
            and home[name] not in [*done, *waiting]
        ]
    return done

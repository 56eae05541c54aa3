"""What a class or function takes, as its signature and its code tell."""

from __future__ import annotations

import ast
import dis
import functools
import inspect
import re
import sys
import textwrap
import typing
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn


def signature(factory: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters of a class or function; none where Python does not tell. What a class hands
    on with `**kwargs` is what its base class takes, or what another one wants that it builds."""
    if isinstance(factory, torch.ScriptMethod):
        return _of_script(factory)
    try:
        own = inspect.signature(factory).parameters
    except (TypeError, ValueError):
        return []
    own = {name: one for name, one in own.items() if name != "self"}  # a script's method shows it
    open_ = any(p.kind is p.VAR_KEYWORD for p in own.values())
    base = (
        next((kind for kind in inspect.getmro(factory)[1:] if "__init__" in vars(kind)), object)
        if open_ and inspect.isclass(factory)
        else object
    )
    if base in (nn.Module, object):
        within = _wanted_within(factory) if open_ and inspect.isclass(factory) else ()
        return [*own.values(), *(p for p in within if p.name not in own)]
    place, named = _handed_on(factory)
    more = [
        p.replace(kind=p.KEYWORD_ONLY)
        for p in signature(base)[place:]
        if p.name not in {*own, *named} and p.kind in (1, 3)
    ]
    rest = [p for p in own.values() if p.kind is p.VAR_KEYWORD]
    return [*(p for p in own.values() if p not in rest), *more, *rest]


def _handed_on(kind: Any) -> tuple[int, set[str]]:
    """How many arguments a constructor hands its base class by place, and which by name."""
    for call in _constructor(kind):
        if isinstance(call, ast.Call) and re.fullmatch(
            r"super\(.*\)\.__init__", ast.unparse(call.func)
        ):
            plain = not any(isinstance(one, ast.Starred) for one in call.args)
            return len(call.args) * plain, {one.arg for one in call.keywords if one.arg}
    return 0, set()


def _constructor(kind: Any) -> list[ast.AST]:
    """The code of a class's own constructor, node by node; nothing where none can be read."""
    try:
        return [*ast.walk(ast.parse(f"if True:\n{source_of(vars(kind).get('__init__'))}"))]
    except SyntaxError:
        return []


def _of_script(method: torch.ScriptMethod) -> list[inspect.Parameter]:
    """The parameters of a method that PyTorch has compiled, but for the module itself."""
    empty, kind = inspect.Parameter.empty, inspect.Parameter.POSITIONAL_OR_KEYWORD
    defaults = (
        (one.name, one.default_value if one.has_default_value() else empty)
        for one in method.schema.arguments[1:]
    )
    return [inspect.Parameter(name, kind, default=value) for name, value in defaults]


@functools.lru_cache(maxsize=64)
def _wanted_within(kind: type) -> list[inspect.Parameter]:
    """What a constructor takes of its `**kwargs`, and what a class of the same file must be given
    that it builds with them, beside what it is given there."""
    home = vars(sys.modules.get(kind.__module__, typing))
    code, every = source_of(vars(kind).get("__init__")), _constructor(kind)
    if not every:
        return []
    rest = next((n.kwarg.arg for n in every if isinstance(n, ast.arguments) and n.kwarg), "")
    taken = re.findall(rf"\b{rest}\[[\"'](\w+)[\"']\](?! *=[^=])", code)
    own = inspect.Parameter.KEYWORD_ONLY
    wanted = [inspect.Parameter(name, own) for name in dict.fromkeys(taken)]
    for call in every if rest else ():
        if not isinstance(call, ast.Call):
            continue
        given = {one.arg or ast.unparse(one.value) for one in call.keywords}
        inner = home.get(call.func.id) if isinstance(call.func, ast.Name) else None
        if rest in given and inspect.isclass(inner) and inner is not kind:
            wanted += [
                p.replace(kind=p.KEYWORD_ONLY)
                for p in signature(inner)[len(call.args) :]
                if p.default is p.empty and p.kind in (1, 3) and p.name not in given
            ]
    return wanted


def keys_read(target: Any, name: str) -> list[str]:
    """The words under which a call's code looks into an argument: k and v of `cache["k"]`.

    >>> class Layer(nn.Module):
    ...     def forward(self, x, cache=None): ...
    >>> keys_read(Layer(), "cache")
    []
    """
    said = re.findall(rf"(?<![.\w]){name}\[[\"'](\w+)[\"']\]", source_of(entry(target)))
    return [*dict.fromkeys(said)]


def entry(target: Any) -> Any:
    """What takes the arguments of a call: `forward`, or `__call__` where a class defines it
    instead."""
    own = [kind for kind in type(target).__mro__ if kind.__module__.split(".")[0] != "torch"]
    called = next((kind for kind in own if {"forward", "__call__"} & {*vars(kind)}), object)
    if "forward" in vars(called) or isinstance(target, type) or called is object:
        return _undecorated(getattr(target, "forward", target))
    return target.__call__ if isinstance(target, nn.Module) else target


def _undecorated(call: Any) -> Any:
    """The method within decorators that take any arguments and do not say what they wrap."""
    function = getattr(call, "__func__", call)
    while isinstance(function, FunctionType):
        taken = [
            one for one in inspect.signature(function).parameters.values() if one.kind not in (2, 4)
        ]
        held = inspect.getclosurevars(function).nonlocals.values()
        inner = [one for one in held if isinstance(one, FunctionType)]
        if len(taken) > 0 or len(inner) != 1:
            break
        function = inner[0]
    owner = getattr(call, "__self__", None)
    same = function is getattr(call, "__func__", call)
    return call if same or owner is None else MethodType(function, owner)


def other_methods(target: Any) -> list[str]:
    """What a module without `forward` may be called by: its class's methods that take something and
    that none of them calls; none where it has a `forward`.

    >>> class Layer(nn.Module):
    ...     def attend(self, x): return self._scored(x)
    ...     def _scored(self, x): return x
    >>> other_methods(Layer())
    ['attend']
    """
    kind = type(target)
    if getattr(kind, "forward", None) is not nn.Module.forward or "__call__" in vars(kind):
        return []
    own = {name: one for name, one in vars(kind).items() if inspect.isfunction(one)}
    called = {word for name, one in own.items() for word in one.__code__.co_names if word != name}
    free = {name for name in own if name[0] != "_" and name not in {*called, "forward"}}
    return [name for name in own if name in free and len(signature(own[name])) > 0]


def with_forward(module: nn.Module) -> str:
    """Let a module be called by its one other method, where it has no `forward`; its name."""
    kind, names = type(module), other_methods(module)
    if len(names) != 1:
        return ""
    body = {name: getattr(kind, name) for name in ("__module__", "__qualname__")}
    body |= {"forward": vars(kind)[names[0]]}
    module.__class__ = type(kind.__name__, (kind,), body)
    return names[0]


def insisted(function: Callable[..., Any]) -> frozenset[str]:
    """The arguments without which a function refuses every call, whatever their defaults are.

    >>> def forward(x, memory=None):
    ...     assert memory is not None, "memory must be given"
    >>> sorted(insisted(forward))
    ['memory']
    """
    return _refused(source_of(function))


@functools.lru_cache(maxsize=64)
def _refused(code: str) -> frozenset[str]:
    found = set[str]()
    for one in _body(code):
        match one:
            case ast.Assert(ast.Compare(ast.Name(name), [ast.IsNot()], [ast.Constant(None)])):
                found.add(name)
            case ast.If(
                ast.Compare(ast.Name(name), [ast.Is()], [ast.Constant(None)]), [ast.Raise()]
            ):
                found.add(name)
            case _:
                pass
    return frozenset(found)


def _body(code: str) -> list[ast.stmt]:
    """The statements of a function; nothing where the code is of something else, or no code."""
    try:
        first = ast.parse(textwrap.dedent(code)).body[:1]
    except SyntaxError:
        return []
    return [line for one in first if isinstance(one, ast.FunctionDef) for line in one.body]


def is_left_to_callers(function: Callable[..., Any], name: str) -> bool:
    """Whether a function leaves an argument to its callers: it neither makes one up where there is
    none nor hands it on.

    >>> def forward(x, scale=None):
    ...     return x if scale is None else x * scale
    >>> is_left_to_callers(forward, "scale")
    True
    """
    every = [node for one in _body(source_of(function)) for node in ast.walk(one)]
    calls = [one for one in every if isinstance(one, ast.Call)]
    handed = [*(one for call in calls for one in (*call.args, *(k.value for k in call.keywords)))]
    handed += [one for each in every if isinstance(each, ast.BoolOp) for one in each.values]
    spoken = [one for one in every if isinstance(one, ast.Name) and one.id == name]
    kept = any(one in handed or isinstance(one.ctx, ast.Store) for one in spoken)
    return bool(spoken) and not kept


def source_of(factory: Any) -> str:
    """The code of a class, function or module; nothing where there is none."""
    try:
        return _read(getattr(factory, "__func__", factory))  # which keeps no object of a method
    except (OSError, TypeError):  # which an object without a hash raises as well
        return ""


@functools.lru_cache(maxsize=64)
def _read(factory: Any) -> str:
    return inspect.getsource(factory)


@functools.lru_cache(maxsize=64)  # a caller is made anew for every call of some probes
def counted_in(code: str) -> frozenset[str]:
    """What places are compared with, a number for each sequence.

    >>> counted_in("keep = torch.arange(t)[None] < n_frames[:, None]")
    frozenset({'n_frames'})
    """
    places = re.findall(r"(\w+) = torch\.arange\(", code)
    begin = rf"\b(?:{'|'.join(['arange', *places])})\b[^\n<>=]*"
    each = r"(\w+)(?:\[:, None\]|\.unsqueeze\((?:1|-1)\)|\.view\(-1, 1\)|\.reshape\(-1, 1\))"
    return frozenset(re.findall(rf"{begin}[<>]=? *{each}", code))


def is_read(target: Any, name: str) -> bool:
    """Whether the code of its call reads an argument at all."""
    call = entry(target)
    if not hasattr(call, "__code__"):
        return True
    read = [its.argval for its in dis.get_instructions(call) if its.opname.startswith("LOAD")]
    return any(name in (one if isinstance(one, tuple) else (one,)) for one in read)

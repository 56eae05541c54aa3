"""Read mistakes off the code of classes, which need not be built or called for it.

Each reader gives the line and the words of what it finds, and says nothing where it is not sure.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import Any

from torch import nn

from ..files.syntax import Function, Source, names, nodes
from ..target.names import parts_of

Said = tuple[int, dict[str, str]]  # a line, and words for the finding on it

LONG = {"q": "queries", "k": "keys", "v": "values"}
OPEN = {"setattr", "__dict__", "__getattr__", "__getattribute__", "vars"}
"""What gives a class attributes that cannot be read."""


def mixed_roles(kind: ast.ClassDef) -> Iterator[Said]:
    """Queries, keys or values that another one's projection makes, while their own is never used:
    `v = self.w_k(x)`, with a `self.w_v` that nothing reads."""
    given = [(node.lineno, *pair) for node in nodes(ast.Assign, kind) for pair in _pairs(node)]
    read = {one.attr for one in nodes(ast.Attribute, kind) if isinstance(one.ctx, ast.Load)}
    built = (_of_self(target) for _, target, value in given if isinstance(value, ast.Call))
    spare = {_role(name): name for name in built if name not in read}
    for line, target, value in given:
        role = _role(target.id) if isinstance(target, ast.Name) else ""
        made = [name for name in _called(value) if _role(name)]
        if role and role in spare and len(made) == 1 and _role(made[0]) != role:
            words = {"other": f"self.{made[0]}", "own": f"self.{spare[role]}"}
            yield line, {"part": LONG[role], **words}


def lost_roles(kind: ast.ClassDef) -> Iterator[Said]:
    """Queries, keys or values that are made, never read, and made again of another: `v = k.view(…)`
    where `v = v.view(…)` was meant."""
    for function in nodes(ast.FunctionDef, kind):
        inner = [one for one in nodes(ast.AST, function) if _is_function(one) and one != function]
        hidden = names(*inner)
        for block in _blocks(function):
            for place, first in enumerate(block):
                for name in _projected(first) - hidden:
                    line, other = _overwritten(name, block[place + 1 :])
                    if line:
                        yield line, {"part": LONG[_role(name)], "name": name, "other": other}


def late_tests(function: Function) -> Iterator[Said]:
    """Arguments that are None by default, and used before the line that asks whether they are."""
    given = function.args
    usual = [*given.posonlyargs, *given.args]
    last = usual[len(usual) - len(given.defaults) :]
    pairs = zip([*last, *given.kwonlyargs], [*given.defaults, *given.kw_defaults], strict=True)
    for argument, default in pairs:
        if not (isinstance(default, ast.Constant) and default.value is None):
            continue
        for place, statement in enumerate(function.body):
            if argument.arg not in names(statement):
                continue
            rest = function.body[place + 1 :]
            if _needs(argument.arg, statement) and any(_asks(argument.arg, one) for one in rest):
                yield statement.lineno, {"name": argument.arg}
            break


def missing(kind: ast.ClassDef, source: Source, thing: Any) -> Iterator[Said]:
    """What every call of forward takes from self, and nothing in the file defines or could set: a
    method, or an attribute that is spelled nearly as another."""
    homes = {one.__module__ for one in getattr(thing, "__mro__", ())} - {"builtins"}
    foreign = homes - {nn.Module.__module__, getattr(thing, "__module__", "")}
    mentioned = names(kind) | {one.attr for one in nodes(ast.Attribute, kind)}
    forward = source.function(f"{kind.name}.forward")
    if not homes or foreign or OPEN & mentioned or forward is None:
        return
    known = {one.value for one in nodes(ast.Constant, source.tree) if isinstance(one.value, str)}
    known |= {one.name for one in nodes(ast.FunctionDef, source.tree)}
    stores = (one for one in nodes(ast.Attribute, source.tree) if isinstance(one.ctx, ast.Store))
    known |= {one.attr for one in stores} | names(source.tree, context=ast.Store)
    for statement in filter(_is_plain, forward.body):
        called = _called(statement)
        for node in nodes(ast.Attribute, statement):
            name = _of_self(node)
            if not name or name in known or hasattr(thing, name):
                continue
            if name in called or get_close_matches(name, source.attributes(kind.name), 1, 0.85):
                yield node.lineno, {"name": name}


# --- pieces ---------------------------------------------------------------------------------------


def _role(name: str) -> str:
    """q, k or v, where a name speaks of one of them."""
    said = parts_of(name)
    return said if said in LONG else ""


def _of_self(node: ast.AST) -> str:
    """`name` for `self.name`."""
    own = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    return node.attr if own and node.value.id == "self" else ""


def _called(value: ast.AST) -> list[str]:
    """Attributes of self that are called."""
    return [name for call in nodes(ast.Call, value) if (name := _of_self(call.func))]


def _is_function(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)


def _pairs(node: ast.Assign) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Targets and what each is given, where that can be told."""
    for target in node.targets:
        left, right = getattr(target, "elts", None), getattr(node.value, "elts", [])
        if left is None:
            yield target, node.value
        elif len(left) == len(right):
            yield from zip(left, right, strict=True)


def _blocks(function: ast.AST) -> Iterator[list[ast.stmt]]:
    for node in ast.walk(function):
        for block in (getattr(node, name, None) for name in ("body", "orelse")):
            if isinstance(block, list):
                yield block


def _projected(statement: ast.stmt) -> set[str]:
    """Names of queries, keys and values that are made by calling what belongs to self."""
    if not isinstance(statement, ast.Assign) or not _called(statement.value):
        return set()
    return {name for name in names(*statement.targets, context=ast.Store) if _role(name)}


def _overwritten(name: str, rest: Sequence[ast.stmt]) -> tuple[int, str]:
    """The line where a name that nothing has read is made of another role's, and that name."""
    for statement in rest:
        if name not in names(statement):
            continue
        for target, value in _pairs(statement) if isinstance(statement, ast.Assign) else ():
            others = [one for one in names(value) if _role(one) not in ("", _role(name))]
            alone = isinstance(target, ast.Name) and target.id == name
            if alone and name not in names(statement, context=ast.Load) and len(others) == 1:
                return statement.lineno, others[0]
        break
    return 0, ""


def _needs(name: str, statement: ast.stmt) -> bool:
    """Whether a statement asks something of a name that None has not: `name.to(…)`, `name[…]`."""
    kinds = (*nodes(ast.Attribute, statement), *nodes(ast.Subscript, statement))
    used = any(isinstance(one.value, ast.Name) and one.value.id == name for one in kinds)
    return used and _is_plain(statement)


def _is_plain(statement: ast.stmt) -> bool:
    """Whether all of it runs whenever it is reached."""
    kinds = ast.Assign | ast.Expr | ast.AugAssign | ast.AnnAssign | ast.Return
    careful = (ast.IfExp, ast.BoolOp, ast.Lambda, ast.comprehension)
    whole = not any(isinstance(node, careful) for node in ast.walk(statement))
    return isinstance(statement, kinds) and whole


def _asks(name: str, statement: ast.stmt) -> bool:
    """Whether somewhere in it a name is compared with None."""
    return any(
        isinstance(one.left, ast.Name)
        and one.left.id == name
        and isinstance(one.ops[0], ast.Is | ast.IsNot)
        for one in nodes(ast.Compare, statement)
    )

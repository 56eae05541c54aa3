"""Read mistakes off the code of classes, which need not be built or called for it.

Each reader gives the way in which a rule is broken, the line, and words for the finding; it says
nothing where it is not sure.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from difflib import get_close_matches
from typing import Any

from torch import nn

from ..files.syntax import Source, names, nodes, pairs
from ..target.names import parts_of

Said = tuple[str, int, dict[str, str]]

LONG = {"q": "queries", "k": "keys", "v": "values"}
OPEN = {"setattr", "__dict__", "__getattr__", "__getattribute__", "vars"}
"""What gives a class attributes that cannot be read."""
PLAIN = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr, ast.Return)
BRANCHING = (ast.IfExp, ast.BoolOp, ast.Lambda, ast.comprehension)
INNER = (ast.FunctionDef, ast.Lambda)


def mixed_roles(kind: ast.ClassDef) -> Iterator[Said]:
    """Queries, keys or values that another one's projection makes, while their own is never used:
    `v = self.w_k(x)`, with a `self.w_v` that nothing reads."""
    given = [pair for node in nodes(ast.Assign, kind) for pair in pairs(node)]
    read = {one.attr for one in nodes(ast.Attribute, kind) if isinstance(one.ctx, ast.Load)}
    built = (_of_self(target) for target, value in given if isinstance(value, ast.Call))
    spare = {_role(name): name for name in built if name not in read}
    for target, value in given:
        role = _role(target.id) if isinstance(target, ast.Name) else ""
        made = [name for name in _called(value) if _role(name)]
        if role and role in spare and len(made) == 1 and _role(made[0]) != role:
            words = {"other": f"self.{made[0]}", "own": f"self.{spare[role]}"}
            yield "mixed", target.lineno, {"part": LONG[role], **words}


def lost_roles(kind: ast.ClassDef) -> Iterator[Said]:
    """Queries, keys or values that are made, never read, and made again of another: `v = k.view(…)`
    where `v = v.view(…)` was meant."""
    for function in nodes(ast.FunctionDef, kind):
        inner = [one for one in ast.walk(function) if isinstance(one, INNER) and one != function]
        unread: set[str] = set()
        for statement in function.body:
            read, mentioned = names(statement, context=ast.Load), names(statement)
            roles = {role for name in read if (role := _role(name))}
            for name in unread & (mentioned - read):
                alone = isinstance(statement, ast.Assign) and mentioned - read == {name}
                if alone and len(roles) == 1 and roles != {_role(name)}:
                    other = min(one for one in read if _role(one))
                    words = {"part": LONG[_role(name)], "name": name, "other": other}
                    yield "lost", statement.lineno, words
            unread -= mentioned
            if isinstance(statement, ast.Assign) and _called(statement.value):
                unread |= {name for name in mentioned - read if _role(name)} - names(*inner)


def late_tests(part: ast.AST) -> Iterator[Said]:
    """Arguments that are None by default, and used before the line that asks whether they are."""
    for function in nodes(ast.FunctionDef, part):
        given = function.args
        usual = [*given.posonlyargs, *given.args]
        last = [*usual[len(usual) - len(given.defaults) :], *given.kwonlyargs]
        for argument, default in zip(last, [*given.defaults, *given.kw_defaults], strict=True):
            lines = [one for one in function.body if argument.arg in names(one)]
            empty = isinstance(default, ast.Constant) and default.value is None
            asked = any(_asks(argument.arg, one) for one in lines[1:])
            if empty and asked and _is_plain(lines[0]) and _needs(argument.arg, lines[0]):
                yield "none", lines[0].lineno, {"name": argument.arg}


def missing(kind: ast.ClassDef, source: Source, thing: Any) -> Iterator[Said]:
    """What every call of forward takes from self, and nothing in the file defines or could set: a
    method, or an attribute that is spelled nearly as another."""
    homes = {one.__module__ for one in getattr(thing, "__mro__", ())} - {"builtins"}
    foreign = homes - {nn.Module.__module__, getattr(thing, "__module__", "")}
    attributes = [*nodes(ast.Attribute, source.tree)]
    forward = source.function(f"{kind.name}.forward")
    if not homes or foreign or forward is None:
        return
    known = {one.value for one in nodes(ast.Constant, source.tree) if isinstance(one.value, str)}
    known |= {one.name for one in nodes(ast.FunctionDef, source.tree)}
    known |= {one.attr for one in attributes if isinstance(one.ctx, ast.Store)}
    known |= names(source.tree, context=ast.Store)
    if OPEN & (names(kind) | {one.attr for one in attributes}):
        return
    for statement in filter(_is_plain, forward.body):
        for node in nodes(ast.Attribute, statement):
            name = _of_self(node)
            if not name or name in known or hasattr(thing, name):
                continue
            near = get_close_matches(name, source.attributes(kind.name), 1, 0.85)
            if near or name in _called(statement):
                yield "missing", node.lineno, {"name": name}


# --- pieces ---------------------------------------------------------------------------------------


def _role(name: str) -> str:
    """q, k or v, where a name speaks of one of them."""
    said = parts_of(name)
    return said if said in LONG else ""


def _of_self(node: ast.AST) -> str:
    """`name` for `self.name`."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return node.attr if node.value.id == "self" else ""
    return ""


def _called(value: ast.AST | None) -> list[str]:
    """Attributes of self that are called."""
    calls = nodes(ast.Call, value) if value is not None else ()
    return [name for call in calls if (name := _of_self(call.func))]


def _is_plain(statement: ast.stmt) -> bool:
    """Whether all of it runs whenever it is reached."""
    whole = not any(isinstance(node, BRANCHING) for node in ast.walk(statement))
    return isinstance(statement, PLAIN) and whole


def _needs(name: str, statement: ast.stmt) -> bool:
    """Whether a statement asks something of a name that None has not: `name.to(…)`, `name[…]`."""
    parts = (*nodes(ast.Attribute, statement), *nodes(ast.Subscript, statement))
    return any(isinstance(one.value, ast.Name) and one.value.id == name for one in parts)


def _asks(name: str, statement: ast.stmt) -> bool:
    """Whether somewhere in it a name is compared with None."""
    tests = (one for one in nodes(ast.Compare, statement) if isinstance(one.left, ast.Name))
    return any(ast.unparse(one).startswith(f"{name} is ") for one in tests)

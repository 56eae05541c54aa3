"""Facts from the syntax of a file, without running it: names, blanks and uses.

A *part* is a function, `causal_mask`, or a member of a class: the method `Head.forward`, or the
attribute `Head.W_query`, which a method sets. Members inherited from a class of the same file count
as its own.
"""

from __future__ import annotations

import ast
import builtins
import dis
import linecache
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import CodeType
from typing import TypeVar

Function = ast.FunctionDef | ast.AsyncFunctionDef
Node = TypeVar("Node", bound=ast.AST)
NO_RETURN = "returns nothing"
NO_EFFECT = set(
    (
        "masked_fill transpose permute view reshape contiguous softmax flatten unsqueeze squeeze "
        "expand repeat repeat_interleave matmul bmm masked_select detach tril triu"
    ).split()
)
"""Tensor methods that return a new tensor and change nothing."""
SETTERS = {"register_buffer", "register_parameter", "register_module", "add_module"}
LOADS = {"LOAD_NAME", "LOAD_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS"}


@dataclass(frozen=True)
class Blank:
    """A placeholder that is not filled in yet.

    `key` is the name of the variable or attribute that only holds None, or "return"; "" for a
    missing body or return.
    """

    line: int
    text: str
    key: str = ""


class ParsedFile:
    """The text and the syntax tree of a file.

    Raises:
        SyntaxError: the text is not valid Python.

    >>> text = "import math\\nclass Head(Module):\\n    def forward(self, x): return None"
    >>> source = ParsedFile(text)
    >>> source.unbound
    {'Module': 2}
    >>> source.blanks("Head.forward")
    [Blank(line=3, text='`forward` still returns None', key='return')]
    """

    def __init__(self, text: str, file: str = "file.py") -> None:
        self.text, self.file = text, file
        self.tree = ast.parse(text, file)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # importing the file shows them
            self.code = compile(self.tree, file, "exec", dont_inherit=True)

    # --- names ------------------------------------------------------------------------------------

    @cached_property
    def definitions(self) -> dict[str, Function | ast.ClassDef]:
        """The functions and classes of the file, including those inside an `if` or a `try`."""
        statements = _statements(self.tree.body)
        return {one.name: one for one in statements if isinstance(one, Function | ast.ClassDef)}

    @cached_property
    def relative(self) -> int:
        """The most levels that a relative import goes up: 1 for `from .parts import Head`."""
        return max((node.level for node in nodes(ast.ImportFrom, self.tree)), default=0)

    @cached_property
    def imported(self) -> set[str]:
        """The full names of the imported modules: `{"torch.nn", "math"}`."""
        names = [one.name for node in nodes(ast.Import, self.tree) for one in node.names]
        names += [one.module or "" for one in nodes(ast.ImportFrom, self.tree) if not one.level]
        return {*names}

    @cached_property
    def libraries(self) -> set[str]:
        """The top-level names of the imported packages: `{"torch", "math"}`."""
        return {name.partition(".")[0] for name in self.imported}

    @cached_property
    def bound(self) -> set[str]:
        """Names that the file defines, by import, definition or assignment."""
        everywhere = (one for code in _codes(self.code) for one in dis.get_instructions(code))
        declared = {one.argval for one in everywhere if one.opname == "STORE_GLOBAL"}
        return declared | _stored(self.code)

    @cached_property
    def unbound(self) -> dict[str, int]:
        """Names that are used but not defined, with the line of the first use.

        Empty if the file has `from … import *`, which may define any name.
        """
        if any(one.name == "*" for one in nodes(ast.alias, self.tree)):
            return {}
        known = self.bound | set(dir(builtins)) | {"__file__", "__path__", "__annotations__"}
        found: dict[str, int] = {}
        for code in _codes(self.code):
            own = known | _stored(code)  # a class's body has names of its own
            for one in dis.get_instructions(code):
                if one.opname in LOADS and one.argval not in own:
                    line = (one.positions and one.positions.lineno) or code.co_firstlineno
                    found[one.argval] = min(line, found.get(one.argval, line))
        return dict(sorted(found.items(), key=lambda item: item[1]))

    # --- parts ------------------------------------------------------------------------------------

    def function(self, part: str) -> Function | None:
        """Return the function or method of that name, including inherited ones."""
        owner, _, name = part.rpartition(".")
        if not owner:
            known = self.definitions.get(part)
            return known if isinstance(known, Function) else None
        for statement in _statements(one for kind in self._family(owner) for one in kind.body):
            if isinstance(statement, Function) and statement.name == name:
                return statement
            if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Name):
                targets = {one.id for one in statement.targets if isinstance(one, ast.Name)}
                if name in targets - {statement.value.id}:  # __call__ = forward
                    return self.function(f"{owner}.{statement.value.id}")
        return None

    def line(self, part: str) -> int | None:
        """Return the line that defines the part, or None."""
        found = self.function(part) or self.definitions.get(part)
        lines = [found.lineno] if found is not None else [line for line, _ in self._given(part)]
        return lines[0] if lines else None

    def has(self, part: str) -> bool:
        """Return True if the part is defined here, or may come from an import or a base class."""
        owner = part.rpartition(".")[0]
        if not owner:
            return part in self.bound
        if self.line(part) is not None:
            return True
        if owner not in self.definitions:
            return owner in self.bound
        bases = (ast.unparse(base) for kind in self._family(owner) for base in kind.bases)
        known = {"Module", "object", *self.definitions}
        foreign = any(base.rpartition(".")[2] not in known for base in bases)
        return foreign or "setattr" in self.mentions(owner)

    def uses(self, part: str, parts: Collection[str] = ()) -> set[str]:
        """Return the names and attributes that a function mentions: `{"_attn", "softmax", …}`.

        Args:
            parts: functions to leave out; mentions in others that the function calls count too.
        """
        owner, dot, _ = part.rpartition(".")
        found: set[str] = set()
        waiting, met = [part], set(parts) - {part}
        while waiting:
            function = self.function(name := waiting.pop())
            if function is None or name in met:
                continue
            met.add(name)
            words = names(*function.body)
            attributes = {node.attr for node in nodes(ast.Attribute, *function.body)}
            found |= words | attributes
            waiting += words | {f"{owner}{dot}{attribute}" for attribute in attributes}
        return found

    def mentions(self, owner: str) -> set[str]:
        """Return all names that a class mentions."""
        return names(self.definitions[owner]) if owner in self.definitions else set()

    def attributes(self, owner: str) -> set[str]:
        """Return the attributes that the methods of a class set, and the names of methods."""
        methods = (_functions(kind) for kind in self._family(owner))
        return {one.name for some in methods for one in some} | {n for n, *_ in self._set(owner)}

    def local(self, owner: str, name: str) -> int | None:
        """Return the line in which a method assigns a local variable of that name, or None."""
        stores = (node for kind in self._family(owner) for node in nodes(ast.Name, kind))
        lines = (one.lineno for one in stores if (one.id, type(one.ctx)) == (name, ast.Store))
        return min(lines, default=None)

    def calls(self, owner: str, name: str) -> bool:
        """Return True if a class calls `self.<name>(…)`."""
        calls = nodes(ast.Call, *self._family(owner))
        return any(getattr(call.func, "attr", "") == name for call in calls)

    def owner_at(self, line: int) -> tuple[str, Function | None]:
        """Return the class and the function that contain a line: `("Head", <def forward>)`."""
        for name, one in self.definitions.items():
            if _holds(one, line):
                if isinstance(one, Function):
                    return "", one
                return name, next((each for each in _functions(one) if _holds(each, line)), None)
        return "", None

    def blanks(self, part: str) -> list[Blank]:
        """Return the placeholders that are left in a part."""
        function = self.function(part)
        if function is not None:
            return _blanks_of_function(function)
        given, name = self._given(part), part.rpartition(".")[2]
        if given and all(_is_none(value) for _, value in given):
            return [Blank(given[0][0], f"`self.{name}` is still None", name)]
        return []

    def _family(self, owner: str) -> Iterator[ast.ClassDef]:
        """Yield a class of the file and those of its bases that the file defines."""
        waiting, met = [owner], set()
        while waiting:
            name = waiting.pop(0)
            kind = self.definitions.get(name)
            if isinstance(kind, ast.ClassDef) and name not in met:
                met.add(name)
                yield kind
                waiting += [base.id for base in kind.bases if isinstance(base, ast.Name)]

    def _given(self, part: str) -> list[tuple[int, ast.expr | None]]:
        """Return all values that methods assign to the attribute `Class.name`, with their lines."""
        owner, _, name = part.rpartition(".")
        return [(line, value) for one, line, value in self._set(owner) if one == name]

    def _set(self, owner: str) -> Iterator[tuple[str, int, ast.expr | None]]:
        """Yield all attributes that the methods of a class set, with line and value."""
        for kind in self._family(owner):
            for node in ast.walk(kind):
                for target, value in pairs(node):
                    if isinstance(target, ast.Attribute):
                        yield target.attr, target.lineno, value
                if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in SETTERS:
                    first, value, *_ = [*node.args, None, None]
                    if isinstance(first, ast.Constant):
                        yield str(first.value), node.lineno, value


def nodes(kind: type[Node], *roots: ast.AST) -> Iterator[Node]:
    """Return an iterator over all nodes of a type in the given trees."""
    return (node for root in roots for node in ast.walk(root) if isinstance(node, kind))


def names(*roots: ast.AST, context: type[ast.expr_context] = ast.expr_context) -> set[str]:
    """Return the names in the given trees; with the context `ast.Store`, only assigned names."""
    return {node.id for node in nodes(ast.Name, *roots) if isinstance(node.ctx, context)}


def unused(*roots: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield each line whose call has no effect as its result is unused, and the called name."""
    for node in nodes(ast.Expr, *roots):
        name = getattr(getattr(node.value, "func", None), "attr", "")
        if name in NO_EFFECT:
            yield node.lineno, name


def quoted(file: str | Path, line: int) -> str:
    return f"line {line} of {Path(file).name}: `{linecache.getline(str(file), line).strip()}`"


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of a module and of all functions and classes in it."""
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _codes(inner)


def _stored(code: CodeType) -> set[str]:
    """Return the names that a module or the body of a class defines."""
    return {one.argval for one in dis.get_instructions(code) if one.opname == "STORE_NAME"}


def _holds(node: Function | ast.ClassDef, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or line)


def _blanks_of_function(function: Function) -> list[Blank]:
    name, body = function.name, function.body
    if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        body = body[1:]  # the docstring, or `...`
    if all(_does_nothing(statement) for statement in body):
        return [Blank(function.lineno, f"`{name}` has no body yet")]
    own, given = list(_own_nodes(function)), {one.arg for one in nodes(ast.arg, function.args)}
    nones = {one: line for one, line in _nones(own).items() if one not in given}
    found = [Blank(line, f"`{one}` is still None", one) for one, line in nones.items()]
    returns = [node for node in own if isinstance(node, ast.Return)]
    if returns and all(_is_none(node.value) for node in returns):
        found.append(Blank(returns[-1].lineno, f"`{name}` still returns None", "return"))
    elif not returns and not any(isinstance(node, (ast.Yield, ast.YieldFrom)) for node in own):
        found.append(Blank(body[-1].lineno, f"`{name}` {NO_RETURN}"))
    return sorted(found, key=lambda blank: blank.line)


def _nones(own: list[ast.AST]) -> dict[str, int]:
    """Return local variables that are only assigned None or values computed from themselves."""
    nothing: dict[str, list[int]] = {}
    stores: Counter[str] = Counter()
    for node in own:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            stores[node.id] += 1
        if isinstance(node, ast.Assign):  # scores = scores.masked_fill(…)
            stores.subtract(names(*node.targets, context=ast.Store) & names(node.value))
        for target, value in pairs(node):
            if isinstance(target, ast.Name) and _is_none(value):
                nothing.setdefault(target.id, []).append(target.lineno)
    return {name: min(lines) for name, lines in nothing.items() if len(lines) == stores[name]}


def _does_nothing(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Raise):
        raised = statement.exc.func if isinstance(statement.exc, ast.Call) else statement.exc
        return isinstance(raised, ast.Name) and raised.id == "NotImplementedError"
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Constant)
    return isinstance(statement, ast.Pass)


def pairs(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    """Yield each target of an assignment with its value, or with the whole value if unpaired."""
    if isinstance(node, (ast.AnnAssign, ast.NamedExpr)) and node.value:
        yield node.target, node.value
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            inner = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
            parts = getattr(node.value, "elts", []) if inner != [target] else []
            whole = [node.value] * len(inner)
            yield from zip(inner, parts if len(parts) == len(inner) else whole, strict=True)


def _is_none(value: ast.expr | None) -> bool:
    return value is None or (isinstance(value, ast.Constant) and value.value in (None, ...))


def _functions(kind: ast.ClassDef) -> Iterator[Function]:
    return (one for one in _statements(kind.body) if isinstance(one, Function))


def _own_nodes(function: Function) -> Iterator[ast.AST]:
    """Yield all nodes of a function's body except the contents of nested functions and classes."""
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop(0)
        yield node
        if not isinstance(node, Function | ast.ClassDef | ast.Lambda):
            waiting += ast.iter_child_nodes(node)


def _statements(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Yield the statements of a body, including those inside its `if`, `try` and `with` blocks."""
    for one in body:
        yield one
        if isinstance(one, ast.If | ast.Try | ast.With | ast.ExceptHandler):
            for name in ("body", "orelse", "finalbody", "handlers"):
                yield from _statements(getattr(one, name, ()))

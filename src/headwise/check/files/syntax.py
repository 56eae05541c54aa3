"""What the parsed syntax of a file tells, without running it: names, blanks, who uses what.

A *part* is a function, `causal_mask`, or something of a class: the method `Head.forward`, or the
attribute `Head.W_query`, which some method sets. What a class inherits from another class of the
same file is its own, too.
"""

from __future__ import annotations

import ast
import builtins
import symtable
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property

Function = ast.FunctionDef | ast.AsyncFunctionDef
NO_RETURN = "returns nothing"
SCOPES: dict[type[ast.AST], str] = {  # as symtable names those that have no name
    ast.Lambda: "lambda",
    ast.ListComp: "listcomp",
    ast.SetComp: "setcomp",
    ast.DictComp: "dictcomp",
    ast.GeneratorExp: "genexpr",
}
PURE = {"masked_fill", "transpose", "permute", "view", "reshape", "contiguous", "softmax"}
"""Methods of a tensor that leave it as it is, and give a new one."""
SETTERS = {"register_buffer", "register_parameter", "register_module", "add_module"}


@dataclass(frozen=True)
class Blank:
    """A placeholder that is still there.

    `key` is the name of the variable or attribute that holds nothing but None, or "return"; "" is
    a body that is not there.
    """

    part: str
    line: int
    says: str
    key: str = ""


class Source:
    """A file's text and its tree.

    Raises:
        SyntaxError: it is no Python.

    >>> source = Source("import math\\nclass Head(Module):\\n    def forward(self, x): return None")
    >>> source.unbound
    {'Module': 2}
    >>> source.blanks("Head.forward")
    [Blank(part='Head.forward', line=3, says='`forward` still returns None', key='return')]
    """

    def __init__(self, text: str, file: str = "file.py") -> None:
        self.text, self.file = text, file
        self.tree = ast.parse(text, file)

    # --- names ------------------------------------------------------------------------------------

    @cached_property
    def definitions(self) -> dict[str, Function | ast.ClassDef]:
        """Functions and classes of the file itself, also those under an `if` or a `try`."""
        found: dict[str, Function | ast.ClassDef] = {}
        for statement in _statements(self.tree.body):
            if isinstance(statement, Function | ast.ClassDef):
                found[statement.name] = statement
        return found

    @cached_property
    def relative(self) -> int:
        """How many folders up its relative imports reach, `from .parts import Head` one."""
        levels = (n.level for n in ast.walk(self.tree) if isinstance(n, ast.ImportFrom))
        return max(levels, default=0)

    @cached_property
    def bound(self) -> set[str]:
        """Names that the file gives a meaning to, by import, definition or assignment."""
        module = symtable.symtable(self.text, self.file, "exec")
        names = {s.get_name() for s in module.get_symbols() if s.is_assigned() or s.is_imported()}
        names |= {child.get_name() for child in module.get_children()}
        for table in _tables(module):
            names |= {s.get_name() for s in table.get_symbols() if s.is_declared_global()}
        return names

    @cached_property
    def unbound(self) -> dict[str, int]:
        """Names that are used and that nothing gives a meaning to, with the line of the first use.

        Nothing is said where `from … import *` may give them one.
        """
        if any(alias.name == "*" for node in self._imports() for alias in node.names):
            return {}
        known = self.bound | set(dir(builtins)) | {"__file__", "__path__", "__class__"}
        future = (node for node in self._imports() if getattr(node, "module", "") == "__future__")
        lazy = any(alias.name == "annotations" for node in future for alias in node.names)
        annotations = _annotations(self.tree) if lazy else set()
        found: dict[str, int] = {}
        for node, is_global in self._names():
            if is_global and node.id not in known and id(node) not in annotations:
                found[node.id] = min(node.lineno, found.get(node.id, node.lineno))
        return dict(sorted(found.items(), key=lambda item: item[1]))

    def _names(self) -> Iterator[tuple[ast.Name, bool]]:
        """Every name that stands in the file, and whether it is looked up in the module there."""
        tables: dict[tuple[str, int], list[symtable.SymbolTable]] = {}
        for table in _tables(symtable.symtable(self.text, self.file, "exec")):
            tables.setdefault((table.get_name(), table.get_lineno()), []).append(table)
        waiting: list[tuple[ast.AST, list[symtable.SymbolTable]]] = [(self.tree, [])]
        while waiting:
            node, around = waiting.pop()
            if isinstance(node, ast.Name):
                here = next((one for one in around if node.id in one.get_identifiers()), None)
                yield node, here is None or here.lookup(node.id).is_global()
            kind = SCOPES.get(type(node)) or getattr(node, "name", "")
            inner = tables.get((kind, getattr(node, "lineno", 0)), []) if kind else []
            waiting += ((child, [*inner, *around]) for child in ast.iter_child_nodes(node))

    @cached_property
    def libraries(self) -> set[str]:
        """The packages that are imported, by their first name: `{"torch", "math"}`."""
        found = set()
        for node in self._imports():
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif node.module and not node.level:
                found.add(node.module.partition(".")[0])
        return found

    def _imports(self) -> Iterator[ast.Import | ast.ImportFrom]:
        for node in ast.walk(self.tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                yield node

    # --- parts ------------------------------------------------------------------------------------

    def function(self, part: str) -> Function | None:
        """The function or method of that name, one that is inherited within the file too."""
        owner, _, name = part.rpartition(".")
        if not owner:
            known = self.definitions.get(part)
            return known if isinstance(known, Function) else None
        for statement in (one for kind in self._family(owner) for one in _statements(kind.body)):
            if isinstance(statement, Function) and statement.name == name:
                return statement
            if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Name):
                targets = {one.id for one in statement.targets if isinstance(one, ast.Name)}
                if name in targets - {statement.value.id}:  # __call__ = forward
                    return self.function(f"{owner}.{statement.value.id}")
        return None

    def line(self, part: str) -> int | None:
        """Where the part is written; None where it is not."""
        owner, _, name = part.rpartition(".")
        found = self.function(part) or (None if owner else self.definitions.get(part))
        if found is not None:
            return found.lineno
        values = self._assigned(owner, name) if owner else []
        return values[0][0] if values else None

    def has(self, part: str) -> bool:
        """Whether the part is there, or may come from another file: imported, or by a base."""
        owner = part.rpartition(".")[0]
        if not owner:
            return part in self.bound
        if self.line(part) is not None:
            return True
        if owner not in self.definitions:
            return owner in self.bound
        bases = (base for kind in self._family(owner) for base in kind.bases)
        ends = {ast.unparse(base).rpartition(".")[2] for base in bases}
        foreign = ends - {"Module", "object", *self.definitions}
        return bool(foreign) or "setattr" in self.mentions(owner)

    def uses(self, part: str, parts: Collection[str] = ()) -> set[str]:
        """Names and attributes that a function mentions: `{"_attn", "softmax", …}`.

        Args:
            parts: their names. What other functions mention, that it calls, counts as its own.
        """
        owner, dot, _ = part.rpartition(".")
        found: set[str] = set()
        waiting, met = [part], set()
        while waiting:
            function = self.function(name := waiting.pop())
            if function is None or name in met:
                continue
            met.add(name)
            nodes = [node for statement in function.body for node in ast.walk(statement)]
            words = {node.id for node in nodes if isinstance(node, ast.Name)}
            attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
            found |= words | attributes
            called = words | {f"{owner}{dot}{attribute}" for attribute in attributes}
            waiting += called - set(parts)
        return found

    def mentions(self, owner: str) -> set[str]:
        """Names that a class mentions anywhere."""
        found = self.definitions.get(owner)
        nodes = ast.walk(found) if found is not None else ()
        return {node.id for node in nodes if isinstance(node, ast.Name)}

    def attributes(self, owner: str) -> set[str]:
        """Attributes that a class's methods set, and the names of the methods themselves."""
        found = {one.name for kind in self._family(owner) for one in _functions(kind)}
        for node in (inner for kind in self._family(owner) for inner in ast.walk(kind)):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
            elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in SETTERS:
                found |= {str(one.value) for one in node.args[:1] if isinstance(one, ast.Constant)}
        return found

    def thrown(self, part: str) -> Iterator[tuple[int, str]]:
        """Lines of no other effect whose result is thrown away, and what they call."""
        function = self.function(part)
        for node in _own_nodes(function) if function is not None else ():
            call = node.value if isinstance(node, ast.Expr) else None
            if isinstance(call, ast.Call) and getattr(call.func, "attr", "") in PURE:
                yield call.lineno, getattr(call.func, "attr", "")

    def calls(self, owner: str, name: str) -> bool:
        """Whether a class calls `self.<name>(…)`."""
        nodes = (inner for kind in self._family(owner) for inner in ast.walk(kind))
        return any(isinstance(n, ast.Call) and getattr(n.func, "attr", "") == name for n in nodes)

    def owner_at(self, line: int) -> tuple[str, Function | None]:
        """The class and the function that a line stands in: `("Head", <def forward>)`."""
        for name, one in self.definitions.items():
            if one.lineno <= line <= (one.end_lineno or line):
                if isinstance(one, Function):
                    return "", one
                inside = (f for f in _functions(one) if f.lineno <= line <= (f.end_lineno or line))
                return name, next(inside, None)
        return "", None

    def blanks(self, part: str) -> list[Blank]:
        """The placeholders that are left in a part."""
        function = self.function(part)
        if function is not None:
            return _blanks_of_function(part, function)
        owner, _, name = part.rpartition(".")
        values = self._assigned(owner, name) if owner else []
        if values and all(_is_none(value) for _, value in values):
            return [Blank(part, values[0][0], f"`self.{name}` is still None", name)]
        return []

    def _family(self, owner: str) -> Iterator[ast.ClassDef]:
        """A class of the file and those classes of the file that it is built on."""
        waiting, met = [owner], set()
        while waiting:
            name = waiting.pop(0)
            kind = self.definitions.get(name)
            if isinstance(kind, ast.ClassDef) and name not in met:
                met.add(name)
                yield kind
                waiting += [base.id for base in kind.bases if isinstance(base, ast.Name)]

    def _assigned(self, owner: str, name: str) -> list[tuple[int, ast.expr | None]]:
        """Every value that a class's methods give to `self.<name>`, with its line."""
        found: list[tuple[int, ast.expr | None]] = []
        for kind in self._family(owner):
            for node in ast.walk(kind):
                if isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr)):
                    for target, value in _pairs(node):
                        if isinstance(target, ast.Attribute) and target.attr == name:
                            found.append((node.lineno, value))
                elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                    first = node.args[0] if node.args else None
                    named = isinstance(first, ast.Constant) and first.value == name
                    if named and node.func.attr in SETTERS:
                        given = node.args[1] if len(node.args) > 1 else None
                        found.append((node.lineno, given))
        return found


def _blanks_of_function(part: str, function: Function) -> list[Blank]:
    name, body = function.name, function.body
    if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        body = body[1:]  # the docstring, or `...`
    if all(_does_nothing(statement) for statement in body):
        return [Blank(part, function.lineno, f"`{name}` has no body yet")]
    own = list(_own_nodes(function))
    found = [
        Blank(part, line, f"`{local}` is still None", local)
        for local, line in _locals_of_none(own).items()
    ]
    returns = [node for node in own if isinstance(node, ast.Return)]
    if returns and all(_is_none(node.value) for node in returns):
        found.append(Blank(part, returns[-1].lineno, f"`{name}` still returns None", "return"))
    elif not returns and not any(isinstance(node, (ast.Yield, ast.YieldFrom)) for node in own):
        found.append(Blank(part, body[-1].lineno, f"`{name}` {NO_RETURN}"))
    return sorted(found, key=lambda blank: blank.line)


def _locals_of_none(nodes: list[ast.AST]) -> dict[str, int]:
    """Local variables that are given None and nothing else, but what is made of themselves."""
    nothing: dict[str, list[int]] = {}
    for node in nodes:
        for target, value in _pairs(node):
            if isinstance(target, ast.Name) and _is_none(value):
                nothing.setdefault(target.id, []).append(target.lineno)
    stores = Counter(
        node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    )
    for node in nodes:  # scores = scores.masked_fill(…)
        if isinstance(node, ast.Assign):
            read = (one for one in ast.walk(node.value) if isinstance(one, ast.Name))
            stores -= Counter({one.id for one in read} & {one.id for one in _stored(node)})
    return {name: min(lines) for name, lines in nothing.items() if len(lines) == stores[name]}


def _stored(node: ast.AST) -> Iterator[ast.Name]:
    names = (one for one in ast.walk(node) if isinstance(one, ast.Name))
    return (one for one in names if isinstance(one.ctx, ast.Store))


def _does_nothing(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Raise):
        raised = statement.exc.func if isinstance(statement.exc, ast.Call) else statement.exc
        return isinstance(raised, ast.Name) and raised.id == "NotImplementedError"
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Constant)
    return isinstance(statement, ast.Pass)


def _pairs(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    """Each target of an assignment with what it is given; None where that cannot be told."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            if not isinstance(target, (ast.Tuple, ast.List)):
                yield target, node.value
                continue
            parts = node.value.elts if isinstance(node.value, (ast.Tuple, ast.List)) else []
            known = len(parts) == len(target.elts)
            for place, inner in enumerate(target.elts):
                yield inner, parts[place] if known else node.value
    elif isinstance(node, (ast.AnnAssign, ast.NamedExpr, ast.AugAssign)) and node.value:
        yield node.target, node.value


def _is_none(value: ast.expr | None) -> bool:
    return value is None or (isinstance(value, ast.Constant) and value.value in (None, ...))


def _functions(kind: ast.ClassDef) -> Iterator[Function]:
    return (one for one in _statements(kind.body) if isinstance(one, Function))


def _own_nodes(function: Function) -> Iterator[ast.AST]:
    """All nodes of a function's body, without those of functions and classes inside it."""
    inner = Function | ast.ClassDef | ast.Lambda
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop(0)
        yield node
        if not isinstance(node, inner):
            waiting += ast.iter_child_nodes(node)


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a body and of the `if`, `try` and `with` in it."""
    for statement in body:
        yield statement
        for name in ("body", "orelse", "finalbody"):
            if isinstance(statement, (ast.If, ast.Try, ast.With)):
                yield from _statements(getattr(statement, name, []))
        if isinstance(statement, ast.Try):
            for handler in statement.handlers:
                yield from _statements(handler.body)


def _tables(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    yield table
    for child in table.get_children():
        yield from _tables(child)


def _annotations(tree: ast.AST) -> set[int]:
    """The identities of all nodes that stand in annotations."""
    roots: list[ast.expr | None] = []
    for node in ast.walk(tree):
        if isinstance(node, Function):
            roots.append(node.returns)
        elif isinstance(node, (ast.arg, ast.AnnAssign)):
            roots.append(node.annotation)
    return {id(inner) for root in roots if root is not None for inner in ast.walk(root)}

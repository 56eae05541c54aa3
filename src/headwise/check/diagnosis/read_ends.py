"""Read mistakes off the code of what a call takes in and gives back: what stands beside it in the
file and is read in an argument's stead, and nothing that is returned. Readers are as in
`read_code`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ..files.syntax import Source, names, nodes
from ..target.names import calling_role
from .read_pieces import INNER, Known, Said, is_mask, word_of

LEAVES = (ast.Return, ast.Yield, ast.YieldFrom, ast.Raise)
"""What gives a result, or none on purpose."""


def returns_nothing(kind: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """A forward that gives its last result a name, and returns nothing anywhere."""
    for function in nodes(ast.FunctionDef, *getattr(kind, "body", ())):
        *_, last = [one for one in function.body if not _prints(one)] or function.body
        parts = [two for one in function.body for two in ast.walk(one)]
        inner = {two for one in parts if isinstance(one, INNER) for two in ast.walk(one)}
        leaves = [one for one in parts if isinstance(one, LEAVES) and one not in inner]
        value = last.targets[0] if isinstance(last, ast.Assign) else None
        if function.name == "forward" and not leaves and isinstance(value, ast.Name):
            yield "nothing", last.lineno, {"name": function.name, "value": value.id}


def returns_input(kind: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """`return x` behind `out = self.norm(x + h)`: what came in, and nothing that was made of it."""
    for function in nodes(ast.FunctionDef, *getattr(kind, "body", ())):
        match function.body[-2:]:
            case [ast.Assign([ast.Name(made)], ast.Call()) as line, ast.Return(ast.Name(given))]:
                loads = [one.id for one in nodes(ast.Name, function) if one.lineno > line.lineno]
                stored = names(function, context=ast.Store)
                first = [one.arg for one in function.args.args[1:2]]
                changed = re.search(
                    rf"\b{given}(\.\w+_\(|\[.*\] *[-+*/]?=(?!=))", ast.unparse(function)
                )
                untouched = first == [given] and given not in stored and not changed
                if function.name == "forward" and untouched and made not in loads:
                    yield "never", line.lineno, {"name": made}
            case _:
                pass


def fixed_tokens(kind: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """Heads that are split with the number of tokens written down:
    `q.reshape(batch, 50, 3, 16).transpose(1, 2)`."""
    for function in nodes(ast.FunctionDef, *getattr(kind, "body", ())):
        for call in nodes(ast.Call, function) if function.name == "forward" else ():
            match call:
                case ast.Call(
                    ast.Attribute(
                        ast.Call(ast.Attribute(_, "view" | "reshape"), [batch, *sizes]), "transpose"
                    ),
                    [ast.Constant(1), ast.Constant(2)],
                ) if len(sizes) == 3 and not isinstance(batch, ast.Constant):
                    numbers = [getattr(one, "value", None) for one in sizes]
                    if all(type(one) is int and one > 1 for one in numbers):
                        yield "tokens", call.lineno, {"number": str(numbers[0])}
                case _:
                    pass


def breakpoints(part: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """A debugger that each call begins: `import ipdb; ipdb.set_trace()`, under no condition."""
    for function in nodes(ast.FunctionDef, part):
        for one in function.body:
            call = one.value if isinstance(one, ast.Expr) else None
            name = ast.unparse(call.func) if isinstance(call, ast.Call) else ""
            if name == "breakpoint" or name.endswith("set_trace"):
                yield "breakpoint", one.lineno, {"name": name}


def _prints(statement: ast.stmt) -> bool:
    return ast.unparse(statement).startswith("print(")


def masks_beside(part: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """A mask of the file's, of one of its examples, that is read in the stead of an argument:
    `padding_mask`, where `key_padding_mask` is handed in and never read."""
    return (said for said in _beside(part, source) if is_mask(said[2]["name"]))


def positions_beside(part: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """The same, of positions."""
    said = _beside(part, source)
    return (one for one in said if calling_role(one[2]["name"]) == "positions")


def _beside(part: ast.stmt, source: Source) -> Iterator[Said]:
    """What a function, or one that it calls, reads of the file where an argument of the same
    meaning is never read."""
    examples = {
        word_of(target): str(line.lineno)
        for line in source.tree.body
        if isinstance(line, ast.Assign) and isinstance(line.value, ast.Call | ast.Compare)
        for target in line.targets
    }
    for function in nodes(ast.FunctionDef, part):
        read = names(*function.body)
        unread = [one.arg for one in nodes(ast.arg, function) if one.arg not in read]
        called = [source.definitions.get(name) for name in sorted(read)] if unread else []
        for home in (function, *called):
            if not isinstance(home, ast.FunctionDef):
                continue
            own = names(home, context=ast.Store) | {one.arg for one in nodes(ast.arg, home)}
            for one in nodes(ast.Name, *home.body):
                found = one.id in examples and one.id not in own
                for name in unread if found else ():
                    if one.id == name or (home is function and is_mask(name) and is_mask(one.id)):
                        words = {"name": name, "other": one.id, "set": examples[one.id]}
                        yield "beside", one.lineno, words

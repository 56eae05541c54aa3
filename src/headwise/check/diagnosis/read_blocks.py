"""Read mistakes off the code of what stands around attention: sums with what came in, layers one
behind the other, and paths that drop nothing. Readers are as in `read_code`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ..files.syntax import Source, names, nodes
from .call_lines import FUSED
from .read_pieces import WORKED_ON, Known, Said, of_self, word_of

WEIGHTS = re.compile(rf"^att$|{WORKED_ON.pattern}")
"""Names of weights, on their way."""


def added_to_itself(part: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """`x = x + self.dropout(x)`, where x is what attention has just given: what came in is lost."""
    for one in nodes(ast.BinOp, part):
        for first, second in ((one.left, one.right), (one.right, one.left)):
            match first, second:
                case ast.Name(name), ast.Call(called, [ast.Name(dropped)], []):
                    if isinstance(one.op, ast.Add) and name == dropped and _drops(called):
                        yield "itself", one.lineno, {"name": name, "code": ast.unparse(one)}
                case _:
                    pass


def never_handed_on(part: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """`for layer in self.layers: out = layer(x)`: each gets the same, and only the last counts."""
    for function in nodes(ast.FunctionDef, part):
        decorated = function.decorator_list  # by what may take the results of layers
        for loop in nodes(ast.For, function) if not decorated else ():
            match loop:
                case ast.For(
                    ast.Name(layer),
                    ast.Attribute(ast.Name("self")),
                    [ast.Assign([ast.Name(out)], ast.Call(ast.Name(called), [*given])) as line],
                ) if called == layer and given and not any(nodes(ast.Starred, line)):
                    after = [one for one in nodes(ast.Name, function) if one.id == out]
                    read = any(one.lineno > line.lineno for one in after)
                    first = word_of(given[0])
                    if first and out not in names(line.value) and read:
                        yield "each", line.lineno, {"name": first, "out": out, "layer": layer}
                case _:
                    pass


def fused_undropped(part: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """A fused call without dropout_p, beside a path that drops weights."""
    for fork in nodes(ast.If, part):
        for own, other in ((fork.body, fork.orelse), (fork.orelse, fork.body)):
            dropped = [one for one in nodes(ast.Call, *other) if _drops_weights(one)]
            kept = any(_drops(one.func) for one in nodes(ast.Call, *own))
            for call in nodes(ast.Call, *own) if dropped and not kept else ():
                told = len(call.args) > 4 or any(
                    one.arg in ("dropout_p", None) for one in call.keywords
                )
                if ast.unparse(call.func).split(".")[-1] == FUSED and not told:
                    yield "fused", call.lineno, {"code": ast.unparse(dropped[0])}


def _drops_weights(call: ast.Call) -> bool:
    named = len(call.args) == 1 and WEIGHTS.search(word_of(call.args[0]).lower())
    return bool(of_self(call.func) and _drops(call.func) and named)


def _drops(called: ast.expr) -> bool:
    return "drop" in word_of(called).lower()

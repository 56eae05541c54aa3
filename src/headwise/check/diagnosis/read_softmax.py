"""Read mistakes off the code around the softmax: its axis, and which positions its scores pair.
Readers are as in `read_code`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ..files.syntax import Source, nodes
from .read_pieces import PLAIN, Known, Said, goes_into_softmax, of_self, target_of, word_of

OF_THREE = re.compile(r"\b(bmm|baddbmm)\(")
"""What makes tensors of three axes, and no others."""
NEIGHBOURS = re.compile(r"unfold|gather|index|expand|repeat|unsqueeze|scatter|stack|roll|None\b")
"""Code that may lay each query beside the keys of its neighbours, or take these apart."""


def unsaid_axes(part: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """`F.softmax(scores)` of what `bmm` made, for which PyTorch takes the first axis."""
    bare = {
        of_self(one.targets[0])
        for one in nodes(ast.Assign, part)
        if re.fullmatch(r"(\w+\.)*Softmax\(\)", ast.unparse(one.value))
    } - {""}
    for function in nodes(ast.FunctionDef, part):
        made = [one for one in nodes(ast.Assign, function) if OF_THREE.search(ast.unparse(one))]
        of_three = {target_of(one) for one in made}
        for call in nodes(ast.Call, function):
            called = ast.unparse(call.func)
            plain = re.fullmatch(r"(\w+\.)*functional\.softmax|F\.softmax", called)
            if not (plain or of_self(call.func) in bare) or call.keywords:
                continue
            if len(call.args) == 1 and word_of(call.args[0]) in of_three:
                yield "unsaid", call.lineno, {"code": ast.unparse(call)}


def paired_alone(part: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """Scores of an `einsum` that has the same axes twice, "ncwh,ncwh->nwh": each query meets the
    one key of its own place."""
    for function in nodes(ast.FunctionDef, part):
        if NEIGHBOURS.search(ast.unparse(function)):
            continue
        lines = [one for one in ast.walk(function) if isinstance(one, PLAIN)]
        lines.sort(key=lambda one: one.lineno)
        for number, line in enumerate(lines):
            equation = _equation(getattr(line, "value", None))
            sides = equation.replace(" ", "").partition("->")[0].split(",")
            same = len(sides) == 2 and len(sides[0]) > 2 and {*sides[0]} == {*sides[1]}
            if same and goes_into_softmax(target_of(line), lines[number + 1 :]):
                yield "alone", line.lineno, {"equation": equation}


def _equation(value: ast.AST | None) -> str:
    """That of the `einsum` that a value is, or is a multiple of."""
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mult | ast.Div):
        return _equation(value.left) or _equation(value.right)
    match value:
        case ast.Call(func, [ast.Constant(str(equation)), *_]):
            return equation if ast.unparse(func).split(".")[-1] == "einsum" else ""
        case _:
            return ""

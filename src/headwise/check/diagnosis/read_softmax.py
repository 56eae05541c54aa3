"""Read mistakes off the code around the softmax: its axis, and which positions its scores pair.
Readers are as in `read_code`."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..files.syntax import Source, names, nodes, pairs
from .read_pieces import (
    Known,
    Said,
    callables,
    given_before,
    goes_into_softmax,
    in_order,
    number_of,
    of_self,
    target_of,
    word_of,
)

OF_THREE = re.compile(r"\b(bmm|baddbmm)\(")
"""What makes tensors of three axes, and no others."""
LESS = re.compile(r"\bsqueeze\(|\[[^\]]*\b\d\]|(view|reshape|flatten|sum|mean|select)\(")
"""What may leave fewer axes."""
NEIGHBOURS = re.compile(r"unfold|gather|index|expand|repeat|unsqueeze|scatter|stack|roll|None\b")
"""Code that may lay each query beside the keys of its neighbours, or take these apart."""

ONE = re.compile(
    r"^(\w+\.)*Linear\((.*, 1|.*out_features=1)(, bias=\w+)?\)$|"
    r"Sequential\(.*Linear\([^()]*, 1(, bias=\w+)?\)\)$"
)
"""Layers that give one number."""
AT_ONCE = re.compile(r"Linear\([^()]*, 1(, bias=\w+)?\), (\w+\.)*Softmax\((dim=)?-1\)")
"""Such a layer with a softmax of that number behind it."""
CUT = re.compile(r"unsqueeze|expand|None|repeat_interleave|(view|reshape|unflatten)\(")
"""Code that may give a tensor other axes."""
NO_KEYS = re.compile(r"b|bs|bsz|batch([ _]?size)?|(n|num|number of)?[ _]?heads?")
"""What people call the axes of sequences and of heads."""
OWN = re.compile(r"^((my|stable|safe|custom|naive|manual|numerically)_)*softmax(_stable|_fn)?$")
"""Names of functions that compute a softmax and nothing else."""
LOG = re.compile(r"\blog_softmax$")
LARGEST = 1e-3
"""Errors up to it may be rounding, or what keeps a sum from 0."""


def own_softmaxes(part: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """Functions that go by that name, and give no softmax along the axis that they are told."""
    for name, line, softmax in callables(part, known, OWN.search):
        if _is_wrong(softmax):
            yield "own", line, {"name": name}


def _is_wrong(softmax: Callable[..., Any]) -> bool:
    """Whether it takes rows, with or without an axis, and none of what it gives is a softmax."""
    x = torch.linspace(-1.0, 2.0, 24, dtype=torch.float64).sin().reshape(2, 3, 4)
    gave = list[bool]()
    for placed, named in (((), {"dim": -1}), ((), {"axis": -1}), ((-1,), {}), ((), {})):
        try:
            out = softmax(x.clone(), *placed, **named)
        except Exception:  # it is called in another way
            continue
        if not isinstance(out, Tensor) or out.shape != x.shape or not out.isfinite().all():
            return False
        axes = (-1,) if placed or named else (0, 1, 2)
        errors = (float((torch.softmax(x, axis) - out.detach()).abs().max()) for axis in axes)
        gave.append(min(errors) > LARGEST)
    return bool(gave) and all(gave)


def log_weights(part: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """`attn = F.log_softmax(scores, -1)`, and `attn @ v` afterwards."""
    for function in nodes(ast.FunctionDef, part):
        logs = dict[str, int]()
        for line in in_order(function):
            code = ast.unparse(line)
            for log, number in logs.items():
                if re.search(rf"\b{log}\.(bmm|matmul)\(|\b{log} @ |(bmm|matmul)\({log},", code):
                    yield "log", number, {"name": log}
                    return
            if not isinstance(line, ast.Assign) or not (name := target_of(line)):
                continue
            if isinstance(line.value, ast.Call) and LOG.search(ast.unparse(line.value.func)):
                logs[name] = line.lineno
            elif name in logs and ("exp" in code or name not in names(line.value)):
                del logs[name]


def diagonals(part: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """`einsum("...sd,dd->...sd", x, w)`, which multiplies with the diagonal of a weight alone."""
    for call in nodes(ast.Call, part):
        equation = _equation(call)
        sides = _sides(equation)
        twice = [one for one in sides if len({*one} - {"."}) < len(one.replace(".", ""))]
        if len(sides) == 2 and twice:
            yield "diagonal", call.lineno, {"equation": equation, "side": twice[0]}


def said_axes(part: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """`F.softmax(scores, dim=1)` of which is written `# scores = [src len, batch]`: over sequences,
    or over heads."""
    for function in nodes(ast.FunctionDef, part):
        for call in nodes(ast.Call, function):
            taken, axis = _taken(call)
            name = word_of(taken)
            axes = _written(name, call.lineno, function, source) if name else []
            if axis is None or not -len(axes) <= axis < len(axes):
                continue
            if NO_KEYS.fullmatch(over := axes[axis]):
                yield "said", call.lineno, {"name": name, "axes": ", ".join(axes), "axis": over}


def single_numbers(kind: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """`F.softmax(self.score(x), dim=-1)` where score gives one number for each token: it becomes
    1."""
    made = [pair for node in nodes(ast.Assign, kind) for pair in pairs(node)]
    scores = {of_self(to) for to, value in made if value and ONE.search(ast.unparse(value))} - {""}
    axes = {
        of_self(to): int(said[1])
        for to, value in made
        if value and (said := re.fullmatch(r"(?:\w+\.)*Softmax\(dim=(-?\d)\)", ast.unparse(value)))
    }
    for to, value in made:
        if value is not None and of_self(to) and AT_ONCE.search(ast.unparse(value)):
            yield "number", to.lineno, {"name": f"self.{of_self(to)}"}
    for function in nodes(ast.FunctionDef, kind):
        three = re.search(r"\w+, \w+, \w+ = \w+\.(shape|size\(\))\n", ast.unparse(function))
        lines = [one for one in in_order(function) if isinstance(one, ast.Assign)]
        for call in nodes(ast.Call, function):
            taken, axis = _taken(call)
            if of_self(call.func) in axes and call.args:
                taken, axis = call.args[0], axes[of_self(call.func)]
            if isinstance(taken, ast.Name):
                taken = given_before(function, taken.id, call.lineno)
            score = of_self(taken.func) if isinstance(taken, ast.Call) else ""
            code = "\n".join(ast.unparse(one) for one in lines if one.lineno < call.lineno)
            plain = three and not CUT.search(code)
            if score in scores and (axis == -1 or (axis == 2 and plain)):
                yield "number", call.lineno, {"name": f"self.{score}"}


def _taken(call: ast.Call) -> tuple[ast.expr | None, int | None]:
    """What a softmax is taken of, and along which axis."""
    match call:
        case ast.Call(
            ast.Attribute(ast.Name("F" | "torch" | "functional"), "softmax"), [taken, *more]
        ):
            pass
        case ast.Call(ast.Attribute(taken, "softmax"), more):
            pass
        case _:
            return None, None
    said = [one.value for one in call.keywords if one.arg == "dim"] or more
    axis = number_of(said[0], {}) if said else None
    return taken, None if axis is None else int(axis)


def _written(name: str, line: int, function: ast.FunctionDef, source: Source) -> list[str]:
    """The axes that a comment gives a tensor which goes by a name on a line; none where it is moved
    behind the comment."""
    code = source.text.splitlines()
    given = [one for one in in_order(function) if target_of(one) == name and one.lineno < line]
    for one in reversed(given):
        end = min((other.lineno for other in given if other.lineno > one.lineno), default=line)
        here, *below = code[(one.end_lineno or one.lineno) - 1 : end - 1]
        texts = [f"# {name}: {here.partition('#')[2].strip()}", *below]
        for text in texts:
            if said := re.search(rf"#[ \t]*{name}\b[ :=]*[\[(]([^\[\]()]+)[\])]", text):
                axes = [axis.strip().lower() for axis in said[1].split(",")]
                return axes if len(axes) > 1 else []
        if not re.search(rf"\b{name} ?[*/+-]|{name}\.(masked_fill|div|mul|add)", ast.unparse(one)):
            return []
    return []


def unsaid_axes(part: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """`F.softmax(scores)` of what `bmm` made, for which PyTorch takes the first axis."""
    bare = {
        of_self(one.targets[0])
        for one in nodes(ast.Assign, part)
        if re.fullmatch(r"(\w+\.)*Softmax\(\)", ast.unparse(one.value))
    } - {""}
    for function in nodes(ast.FunctionDef, part):
        given = [(one, ast.unparse(one.value)) for one in nodes(ast.Assign, function)]
        made = [one for one, code in given if OF_THREE.search(code) and not LESS.search(code)]
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
        lines = in_order(function)
        for number, line in enumerate(lines):
            equation = _equation(getattr(line, "value", None))
            sides = _sides(equation)
            same = len(sides) == 2 and len(sides[0]) > 2 and {*sides[0]} == {*sides[1]}
            if same and goes_into_softmax(target_of(line), lines[number + 1 :]):
                yield "alone", line.lineno, {"equation": equation}


def _sides(equation: str) -> list[str]:
    """The letters of its factors' axes; nothing where axes have whole words for names."""
    bare = re.sub(r"\s*(,|->)\s*", r"\1", equation.strip())
    words = re.findall(r"[A-Za-z_]\w*", bare) if " " in bare else ()
    if any(len(word) > 1 for word in words):
        return []
    return bare.replace(" ", "").partition("->")[0].split(",")


def _equation(value: ast.AST | None) -> str:
    """That of the `einsum` that a value is, or is a multiple of."""
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mult | ast.Div):
        return _equation(value.left) or _equation(value.right)
    match value:
        case ast.Call(func, [ast.Constant(str(equation)), *_]):
            return equation if ast.unparse(func).split(".")[-1] == "einsum" else ""
        case _:
            return ""

"""Read mistakes off the code of scales: roots of the wrong width, divided by where they should be
multiplied with, or taken of a bias as well. Readers are as in `read_code`."""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator

from ..files.syntax import Source, nodes, pairs
from ..target.names import building_role
from .read_pieces import Known, Said, of_self, word_of
from .read_sizes import sizes_of

ROOTS = re.compile(r"(\w+\.)?(sqrt|rsqrt)")
PRODUCTS = re.compile(r"(matmul|bmm|einsum|baddbmm)\(| @ ")
INVERSE = re.compile(
    r"[\w.]+(?:\(\w+\))? ?\*\* ?\(?-(?:0?\.5|1 / 2)\)?|1(?:\.0?)? / (?:\w+\.)*sqrt\([^()]*\)"
)
"""One over a root, as `ast` writes it."""
SCORES = re.compile(r"score|energy|logit|dots?$|sim$|att")
"""Names of products of queries and keys."""
SCALES = re.compile(r"scal|norm_?fact|temper|inv_sqrt|sqrt_d")
"""Names of what scores are multiplied with or divided by."""


def whole_roots(kind: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """A root of the width that the same class divides among its heads, where scores are scaled."""
    if not isinstance(kind, ast.ClassDef):
        return
    every = (pair for node in nodes(ast.Assign, kind) for pair in pairs(node))
    given = [(target, value) for target, value in every if value is not None]
    wholes: dict[str, str] = {}
    for target, value in given:
        divides = isinstance(value, ast.BinOp) and isinstance(value.op, ast.FloorDiv | ast.Div)
        by = word_of(value.right) if isinstance(value, ast.BinOp) and divides else ""
        if by and isinstance(value, ast.BinOp) and building_role(by) == "heads":
            wholes[word_of(value.left)] = word_of(target)
    wholes.pop("", None)
    for target, value in given:  # which goes by the same name once it is divided
        if word_of(target) in wholes and word_of(value) != word_of(target):
            wholes.pop(word_of(target))
    yield from _merged_roots(kind)
    loads = (one for one in nodes(ast.Attribute, source.tree) if isinstance(one.ctx, ast.Load))
    read = {one.attr for one in loads}
    for target, value in given:
        whole = _root_of(value, wholes) if not of_self(target) or of_self(target) in read else ""
        made = isinstance(value, ast.BinOp) and SCORES.search(word_of(target).lower())
        scales = made or SCALES.search(word_of(target).lower()) or _scaled(value)
        if whole and scales and wholes[whole]:
            yield "whole", value.lineno, {"whole": whole, "one": wholes[whole]}


def _merged_roots(kind: ast.ClassDef) -> Iterator[Said]:
    """The same where heads come in apart: scores of `k.permute(0, 1, 3, 2)`, and a root of the
    width that all heads have when they are merged."""
    for function in nodes(ast.FunctionDef, kind):
        cuts = [call for call in nodes(ast.Call, function) if len(sizes_of(call)) == 3]
        cuts = [one for one in cuts if getattr(one.func, "attr", "") in ("view", "reshape")]
        merged = {word_of(sizes_of(one)[2]): one.lineno for one in cuts} | {"": 0}
        for one in nodes(ast.BinOp, function):
            heads = re.search(r"permute\(0, 1, 3, 2\)", ast.unparse(one.left))
            whole = _root_of(one.right, merged) if isinstance(one.op, ast.Div) and heads else ""
            wide = building_role(whole) == "width" and PRODUCTS.search(ast.unparse(one.left))
            if whole and wide and merged[whole] > one.lineno:
                yield "whole", one.lineno, {"whole": whole, "one": "keys.shape[-1]"}


def inverse_roots(kind: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """`scores / self.scale`, where that is one over a root already: `head_dim ** -0.5`."""
    every = [pair for node in nodes(ast.Assign, kind) for pair in pairs(node)]
    made = dict[str, list[str]]()
    for target, value in every:
        if value is not None:
            made.setdefault(word_of(target), []).append(ast.unparse(value))
    code = ast.unparse(kind)
    for one in nodes(ast.BinOp, kind):
        by = word_of(one.right) if isinstance(one.op, ast.Div) else ""
        scores = SCORES.search(word_of(one.left).lower()) or PRODUCTS.search(ast.unparse(one.left))
        values = [value for value in made.get(by, ()) if value != "None"]
        if isinstance(one.right, ast.Name) and not re.search(rf"[(,=] ?self\.{by}\b", code):
            values = [v for n, v in _local(kind, one) if n == by]  # another thing of that name
        if by and scores and values and all(map(INVERSE.fullmatch, values)):
            yield "inverse", one.lineno, {"code": ast.unparse(one), "value": values[0]}


def _local(kind: ast.stmt, within: ast.AST) -> Iterator[tuple[str, str]]:
    """What the function around a node gives its own names, each as it stands."""
    for function in nodes(ast.FunctionDef, kind):
        if any(one is within for one in ast.walk(function)):
            for node in nodes(ast.Assign, function):
                yield from ((word_of(to), ast.unparse(v)) for to, v in pairs(node) if v)


def scaled_biases(part: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """A bias that is scaled as the product is: `torch.baddbmm(bias, q, k, beta=scale,
    alpha=scale)`."""
    for call in nodes(ast.Call, part):
        said = {one.arg: ast.unparse(one.value) for one in call.keywords}
        by = said.get("beta", "1")
        same = by == said.get("alpha") and not re.fullmatch(r"[\d.]+", by)
        if same and call.args and ast.unparse(call.func).endswith("baddbmm"):
            yield "bias", call.lineno, {"bias": ast.unparse(call.args[0]).split(".")[0], "by": by}


def _root_of(value: ast.expr, among: Collection[str]) -> str:
    """Which of some widths a root within an expression is taken of."""
    for node in nodes(ast.BinOp, value):
        half = ast.unparse(node.right).strip("()") in ("0.5", "-0.5", "1 / 2", "-1 / 2")
        if isinstance(node.op, ast.Pow) and half and word_of(node.left) in among:
            return word_of(node.left)
    for call in nodes(ast.Call, value):
        if ROOTS.fullmatch(ast.unparse(call.func)) and call.args:
            for one in (call.args[0], *getattr(call.args[0], "args", ())):
                if word_of(one) in among:
                    return word_of(one)
    return ""


def _scaled(value: ast.expr) -> bool:
    """Whether an expression divides or multiplies a product, or what goes by the name of one."""
    sides = [one.left for one in nodes(ast.BinOp, value) if isinstance(one.op, ast.Div | ast.Mult)]
    return any(
        PRODUCTS.search(ast.unparse(one)) or SCORES.search(word_of(one).lower()) for one in sides
    )

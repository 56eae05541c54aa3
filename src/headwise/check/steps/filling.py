"""Fill the remaining blanks with headwise's own code, so that the file can run."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping

from ..syntax import ParsedFile, names, nodes


def fill(
    source: ParsedFile, code: Mapping[str, Mapping[str, str]]
) -> tuple[ast.Module, dict[int, set[str]], set[str]]:
    """Fill the blanks of a file; `code` holds, for each part, the code for each blank by its key.

    Returns:
        The syntax tree, in which every statement keeps its line; the filled lines, each with the
        names that it reads; and the parts with a blank that headwise cannot fill.

    >>> source = ParsedFile("def double(x):\\n    y = None\\n    return y")
    >>> print(ast.unparse(fill(source, {"double": {"y": "2 * x"}})[0]))
    def double(x):
        y = 2 * x
        return y
    """
    tree, lines, left = ast.parse(source.text), dict[int, set[str]](), set[str]()
    statements, new = [*nodes(ast.stmt, tree)], dict[ast.AST, list[ast.stmt]]()
    for part, texts in code.items():
        for blank in source.blanks(part):
            old = innermost(statements, blank.line)
            if old is None or blank.key not in texts or not _is_blank(old):
                left.add(part)
            elif old not in new:
                new[old] = _written(old, texts[blank.key])
                span = range(old.lineno, (old.end_lineno or old.lineno) + 1)
                lines |= dict.fromkeys(span, names(*new[old], context=ast.Load))
    for node in [*ast.walk(tree)]:
        for name in ("body", "orelse", "finalbody"):
            if isinstance(body := getattr(node, name, None), list):
                body[:] = [each for one in body for each in new.get(one, [one])]
    return tree, lines, left


def innermost(statements: Iterable[ast.stmt], line: int) -> ast.stmt | None:
    """Return the shortest statement that contains a line."""
    around = [one for one in statements if one.lineno <= line <= (one.end_lineno or one.lineno)]
    return min(around, key=lambda one: (one.end_lineno or 0) - one.lineno, default=None)


def _is_blank(old: ast.stmt) -> bool:
    """Return True if a statement only assigns, returns or registers None."""
    if isinstance(old, (ast.Assign, ast.AnnAssign, ast.Return)):
        many = old.value.elts if isinstance(old.value, (ast.Tuple, ast.List)) else [old.value]
        return all(one is None or getattr(one, "value", one) in (None, ...) for one in many)
    return isinstance(old, ast.Expr)  # register_buffer("mask", None)


def _written(old: ast.stmt, text: str) -> list[ast.stmt]:
    """Return the statements of a text; a single expression replaces the old value."""
    new = ast.parse(text).body
    if len(new) == 1 and isinstance(new[0], ast.Expr):
        old.value = new[0].value  # type: ignore[attr-defined]
        new = [old]
    for node in (inner for one in new for inner in ast.walk(one) if hasattr(inner, "lineno")):
        ast.copy_location(node, old)
    return new

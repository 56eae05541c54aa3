"""Put headwise's own code in the blanks that are left, so that what is written can be run."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ..files.syntax import Source


@dataclass
class Filled:
    """A file without blanks.

    Args:
        tree: its syntax, in which every statement keeps its line.
        lines: those that are not its author's.
        left: parts in which a blank is left, as headwise has no code for it.
    """

    tree: ast.Module
    lines: set[int] = field(default_factory=set)
    left: set[str] = field(default_factory=set)


def fill(source: Source, code: Mapping[str, Mapping[str, str]]) -> Filled:
    """Fill the blanks of a file.

    Args:
        code: for each part, by the key of each blank, an expression or statements.

    >>> source = Source("def double(x):\\n    y = None\\n    return y")
    >>> print(ast.unparse(fill(source, {"double": {"y": "2 * x"}}).tree))
    def double(x):
        y = 2 * x
        return y
    """
    filled = Filled(ast.parse(source.text))
    statements = [node for node in ast.walk(filled.tree) if isinstance(node, ast.stmt)]
    new: dict[int, list[ast.stmt]] = {}
    for part, texts in code.items():
        for blank in source.blanks(part):
            old = innermost(statements, blank.line)
            if old is None or blank.key not in texts or not _is_blank(old):
                filled.left.add(part)
            elif id(old) not in new:
                new[id(old)] = _written(old, texts[blank.key])
                filled.lines |= set(range(old.lineno, (old.end_lineno or old.lineno) + 1))
    _Replace(new).visit(filled.tree)
    return filled


def innermost(statements: Iterable[ast.stmt], line: int) -> ast.stmt | None:
    """The shortest of some statements that a line stands in."""
    around = [one for one in statements if one.lineno <= line <= (one.end_lineno or one.lineno)]
    return min(around, key=lambda one: (one.end_lineno or 0) - one.lineno, default=None)


def _is_blank(old: ast.stmt) -> bool:
    """Whether a statement gives None, and nothing else."""
    if isinstance(old, (ast.Assign, ast.AnnAssign, ast.Return)):
        many = old.value.elts if isinstance(old.value, (ast.Tuple, ast.List)) else [old.value]
        return all(one is None or getattr(one, "value", one) in (None, ...) for one in many)
    return isinstance(old, ast.Expr)  # register_buffer("mask", None)


def _written(old: ast.stmt, text: str) -> list[ast.stmt]:
    """The statements of a text; where it is one expression, in the place of the old one's value."""
    new = ast.parse(text).body
    only = new[0] if len(new) == 1 else None
    if isinstance(only, ast.Expr):
        assert isinstance(old, (ast.Assign, ast.AnnAssign, ast.Return))
        old.value = only.value
        new[:] = [old]
    for node in (inner for one in new for inner in ast.walk(one)):
        if hasattr(node, "lineno") or isinstance(node, (ast.expr, ast.stmt)):
            ast.copy_location(node, old)
    return new


class _Replace(ast.NodeTransformer):
    def __init__(self, new: dict[int, list[ast.stmt]]) -> None:
        self.new = new

    def visit(self, node: ast.AST) -> ast.AST | list[ast.stmt]:
        return self.new[id(node)] if id(node) in self.new else super().generic_visit(node)

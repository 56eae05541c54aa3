"""Load a file for what it defines itself, where its package or what it imports cannot be imported.

The packages around it are left empty, and names whose import fails stand for their error
(`target.absent`): nothing that speaks of them is judged by what they would have done.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from ..target.absent import Absent
from .syntax import Source


def alone(path: Path, name: str, source: Source) -> ModuleType | None:
    """The module, with what could be imported; None where a mistake of its own stands in the way.

    Args:
        name: the module's, in its packages.
    """
    _empty_packages(name, path)
    spec = spec_from_file_location(name, path)
    assert spec is not None
    module = sys.modules[name] = module_from_spec(spec)
    first = [one for one in source.tree.body if getattr(one, "module", "") == "__future__"]
    for statement in _single(source.tree.body):
        code = compile(ast.Module([*first, statement], []), str(path), "exec", dont_inherit=True)
        try:
            exec(code, vars(module))
        except Exception as error:
            known = vars(module)
            names = [*_bound(statement)]
            spoken = {one.id for one in ast.walk(statement) if isinstance(one, ast.Name)}
            lost = any(isinstance(known.get(one), Absent) for one in spoken)
            imports = isinstance(statement, ast.Import | ast.ImportFrom)
            if not (imports or lost or isinstance(error, ImportError)) or "*" in names:
                sys.modules.pop(name, None)
                return None
            known |= {one: Absent(one, error) for one in names}
    return module


def _empty_packages(name: str, path: Path) -> None:
    """Let packages that are not imported be there, with nothing in them."""
    parents = name.split(".")[:-1]
    for depth in range(1, len(parents) + 1):
        package = ".".join(parents[:depth])
        if package not in sys.modules:
            made = sys.modules[package] = ModuleType(package)
            made.__path__ = [str(path.parents[len(parents) - depth])]


def _single(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements, with one import in each."""
    for one in body:
        if isinstance(one, ast.Import | ast.ImportFrom):
            for alias in one.names:
                part = (
                    ast.Import([alias])
                    if isinstance(one, ast.Import)
                    else ast.ImportFrom(one.module, [alias], one.level)
                )
                yield ast.copy_location(part, one)
        else:
            yield one


def _bound(statement: ast.stmt) -> Iterator[str]:
    """The names that a statement gives a meaning to."""
    for one in ast.walk(statement):
        if isinstance(one, ast.alias):
            yield one.asname or one.name.partition(".")[0]
        elif isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store):
            yield one.id
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        yield statement.name

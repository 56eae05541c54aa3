"""Load a file for what it defines itself, where its package or what it imports cannot be imported.

The packages around it are left empty, and names whose import fails stand for their error: nothing
that speaks of them is judged by what they would have done.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from .syntax import Source, names


class Absent:
    """Stands for a name whose import failed: code may speak of it, and gets the error of its import
    when it calls it."""

    def __init__(self, name: str, error: BaseException) -> None:
        self._name, self.error = name, error

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        package = getattr(self.error, "name", None)
        said = f"{self._name} could not be imported: {self.error}"
        raise ImportError(said, name=package) from self.error

    def __getattr__(self, name: str) -> Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self._name}.{name}", self.error)

    def __getitem__(self, index: Any) -> Absent:
        return self

    def __or__(self, other: Any) -> Absent:
        return self

    __ror__, __bool__, __mro_entries__ = __or__, __call__, __call__


def alone(path: Path, name: str, source: Source, why: str) -> ModuleType | None:
    """The module, with what could be imported; None where a mistake of its own stands in the way.

    Its `__alone__` holds `why`, and the absent names that each of its definitions speaks of.

    Args:
        name: the module's, in its packages.
        why: what was raised when it was imported as usual.
    """
    _empty_packages(name, path)
    spec = spec_from_file_location(name, path)
    assert spec is not None
    module = sys.modules[name] = module_from_spec(spec)
    known, lost = vars(module), set[str]()
    first = [one for one in source.tree.body if getattr(one, "module", "") == "__future__"]
    for statement in _single(source.tree.body):
        code = compile(ast.Module([*first, statement], []), str(path), "exec", dont_inherit=True)
        try:
            exec(code, known)
        except Exception as error:
            imports = isinstance(statement, ast.Import | ast.ImportFrom)
            given = set(_bound(statement))
            if "*" in given or not (
                imports or isinstance(error, ImportError) or names(statement) & lost
            ):
                del sys.modules[name]
                return None
            known |= {one: Absent(one, error) for one in given}
            lost |= given
    every = source.definitions
    known["__alone__"] = why, {one: sorted(_spoken(one, every) & lost) for one in every}
    return module


def _spoken(name: str, definitions: Mapping[str, ast.AST]) -> set[str]:
    """The names that a definition speaks of, and those that it uses."""
    queue, found = [name], set[str]()
    for one in queue:
        new = names(definitions[one]) - found
        found |= new
        queue += new & set(definitions)
    return found


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

"""Load a file for what it defines itself, where its package or what it imports cannot be imported.

The packages around it are left empty, and names whose import fails stand for their error: nothing
that speaks of them is judged by what they would have done.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import sys
from collections.abc import Collection, Iterator, Mapping
from importlib import import_module
from importlib.util import module_from_spec, resolve_name, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from torch import nn
from torch.nn import init

from ..target.errors import is_users
from .syntax import Source, names, nodes

INIT = "__init__.py"
DEFINITIONS = (ast.FunctionDef, ast.ClassDef)
QUIET = (*DEFINITIONS, ast.Import, ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.Try)
"""What is run of a file where not all of it can be: what gives names a meaning."""


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

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        if self._name.endswith("Module"):  # PyTorch's own, with what a library adds
            return (nn.Module,)
        return self()

    __ror__, __bool__, __iter__ = __or__, __call__, __call__


def alone(path: Path, name: str, source: Source, why: str, of_another: bool) -> ModuleType | None:
    """The module, with what could be imported; None where a mistake of its own stands in the way.

    Its `__alone__` holds `why`, and the absent names that each of its definitions speaks of; then
    those of them that are more than a base for which PyTorch's own stands.

    Args:
        name: the module's, in its packages.
        why: what was raised when it was imported as usual.
        of_another: whether it was raised for something that the file imports. Else the file reads
            data or trains while it is imported: then only what gives names a meaning is run, and of
            that all but the definitions may fail.
    """
    done = _run(path, name, source.tree) if of_another else None
    done = done or _run(path, name, _quiet(source.tree), spare=True)
    if done is None:
        return None
    module, lost = done
    known = vars(module)
    every = {one: _without_calls(code, lost) for one, code in source.definitions.items()}
    spoken, used = (
        {one: sorted(_spoken(one, every, bases) & lost) for one in every} for bases in (True, False)
    )
    known["__alone__"] = why, spoken, used
    return module


def _quiet(tree: ast.Module) -> ast.Module:
    """The statements that give names a meaning."""
    return ast.Module([one for one in tree.body if isinstance(one, QUIET)], [])


def _run(
    path: Path, name: str, tree: ast.Module, spare: bool = False, beside: bool = False
) -> tuple[ModuleType, set[str]] | None:
    """The module of a file, run one statement after the other, and the names that stand for errors;
    None where a mistake of its own stands in the way.

    Args:
        spare: whether all but the definitions may fail; beside: and imports of all names, too.
    """
    _empty_packages(name, path)
    spec = spec_from_file_location(name, path)
    assert spec is not None
    module = sys.modules[name] = module_from_spec(spec)
    known, lost = vars(module), set[str]()
    first = [one for one in tree.body if getattr(one, "module", "") == "__future__"]
    for statement in _single([one for one in tree.body if one not in first]):
        statement = _without_calls(statement, lost)
        code = compile(ast.Module([*first, statement], []), str(path), "exec", dont_inherit=True)
        imports = isinstance(statement, ast.Import | ast.ImportFrom)
        given = set(_bound(statement))
        try:
            try:
                exec(code, known)
            except (Exception, SystemExit):
                if not imports or not _load_imported(statement, known["__package__"]):
                    raise
                exec(code, known)
        except (Exception, SystemExit) as error:
            spared = spare and not isinstance(statement, DEFINITIONS)
            excused = spared or isinstance(error, ImportError) or names(statement) & lost
            if ("*" in given and not beside) or not (imports or excused):
                del sys.modules[name]
                return None
            known |= {one: _stand_in(one, error) for one in given if one != "*"}
        lost |= {one for one in given if isinstance(known.get(one), Absent)}
    return module, lost


def _without_calls(statement: ast.stmt, lost: Collection[str]) -> ast.stmt:
    """The same without calls of absent names whose result nothing takes: `debugpy.breakpoint()`."""

    class Idle(ast.NodeTransformer):
        def visit_Expr(self, node: ast.Expr) -> ast.stmt:
            called = node.value.func if isinstance(node.value, ast.Call) else None
            while isinstance(called, ast.Attribute):
                called = called.value
            idle = isinstance(called, ast.Name) and called.id in lost
            return ast.copy_location(ast.Pass(), node) if idle else node

    return Idle().visit(copy.deepcopy(statement)) if lost else statement


def _stand_in(name: str, error: BaseException) -> Any:
    """What a name gets whose import failed: PyTorch's own where one that sets initial weights is
    called so, as `trunc_normal_`; where transformers keeps it now, `Conv1D` among them."""
    own = getattr(init, name, None) if name.endswith("_") else None
    if own is None and str(getattr(error, "name", "")).startswith("transformers."):
        with contextlib.suppress(ImportError):
            own = getattr(import_module("transformers.pytorch_utils"), name, None)
    return own or Absent(name, error)


def _load_imported(statement: ast.stmt, package: str) -> bool:
    """Load the file that a statement imports in the same way; whether that could be done.

    Args:
        package: that of the module that imports it.
    """
    imported = statement.names[0].name if isinstance(statement, ast.Import) else ""
    if isinstance(statement, ast.ImportFrom):
        said = "." * statement.level + (statement.module or "")
        imported = resolve_name(said, package)
    if imported in sys.modules:
        return False
    bare = Path(*imported.split("."))
    for path in (Path(folder, one) for folder in sys.path for one in (f"{bare}.py", bare / INIT)):
        if path.is_file() and is_users(str(path)):
            tree = _quiet(ast.parse(path.read_bytes()))
            return _run(path.resolve(), imported, tree, spare=True, beside=True) is not None
    return False


def _spoken(name: str, definitions: Mapping[str, ast.AST], bases: bool) -> set[str]:
    """The names that a definition speaks of, and those that it uses; `bases`: also as bases for
    which PyTorch's module stands."""
    queue, found = [name], set[str]()
    for one in queue:
        new = _read(definitions[one], bases) - found
        found |= new
        queue += new & set(definitions)
    return found


def _read(definition: ast.AST, bases: bool) -> set[str]:
    """The names that a definition reads and does not give a meaning itself, but in annotations."""
    own = names(definition, context=ast.Store) | {one.arg for one in nodes(ast.arg, definition)}
    above = getattr(definition, "bases", []) if not bases else []
    left = [base for base in above if _is_module(base)]
    left += [one.annotation for one in nodes(ast.arg, definition) if one.annotation]
    left += [one.annotation for one in nodes(ast.AnnAssign, definition)]
    left += [one.returns for one in nodes(ast.FunctionDef, definition) if one.returns]
    spared = {id(one) for whole in left for one in ast.walk(whole)}
    read = (one for one in nodes(ast.Name, definition) if id(one) not in spared)
    return {one.id for one in read if isinstance(one.ctx, ast.Load)} - own


def _is_module(base: ast.expr) -> bool:
    return ast.unparse(base).endswith("Module")


def _empty_packages(name: str, path: Path) -> None:
    """Let packages that are not imported be there, with nothing in them."""
    parents, path = name.split(".")[:-1], path.parent if path.name == INIT else path
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

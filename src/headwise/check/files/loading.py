"""Importing a file that somebody wrote, and choosing in it what is to be checked.

All of this runs in the sandbox.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import re
import sys
import traceback
import warnings
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import torch
from torch import nn

from ..findings.rules import found
from ..findings.verdict import Finding
from ..target.errors import Broken, told, users_frames, wants_memory
from ..target.functions import weights_taken
from .alone import Absent, alone
from .syntax import Source, names

ATTENTION = re.compile(r"attention|attn|mha|multi_?head", re.IGNORECASE)
MARKS = (".git", "pyproject.toml")
"""What lies in the uppermost folder of a repository."""
ABOVE = 5
"""How many folders up such names are looked for."""
RECURSION = sys.getrecursionlimit()
IMPORTING, CHECKING = "while it was imported", "while it was checked"


def parsed(path: Path) -> Source:
    """The file's text and its tree.

    Raises:
        Broken: it is no Python.
    """
    try:
        return Source(path.read_bytes().decode("utf-8-sig"), str(path))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise Broken(_no_python(error)) from None


def load(path: Path, code: CodeType | None = None) -> ModuleType:
    """Import a file as if it were run from its own folder; inside a package, as a part of it.

    `code` is run for the file's own text, where it is given.

    What it imports is also looked for in its repository: the nearest folder above with a `.git` or
    a `pyproject.toml`, and `src` in it; and in a folder above that has something of such a name.
    Where its package, or what it imports, cannot be imported, it is loaded alone.

    Raises:
        Broken: it is no Python, or importing it fails.
    """
    source = parsed(path)
    folder, name, level = path.parent, path.stem, source.relative
    while (folder / "__init__.py").exists() or (level > 0 and folder.name.isidentifier()):
        folder, name, level = folder.parent, f"{folder.name}.{name}", level - 1
    root = next(
        (one for one in path.parents if any((one / mark).exists() for mark in MARKS)), folder
    )
    places = dict.fromkeys(map(str, (*_around(path, source), folder, root, root / "src")))
    sys.path[:0] = [one for one in places if Path(one).is_dir()]
    sys.path += [str(path.parent), *_above(path, source.libraries)]
    _as_package(root, source)
    try:
        if "." in name:
            importlib.import_module(name.rpartition(".")[0])
        if code is None and _same_file(sys.modules.get(name), path):
            return sys.modules[name]
        if name in sys.modules:  # a file with the name of something else, such as math.py
            name = f"_checked_{path.stem}"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        if code is None:
            spec.loader.exec_module(module)
        else:
            exec(code, vars(module))
    except MemoryError:
        raise
    except BaseException as error:
        leaves, of_another = isinstance(error, SystemExit), _of_another(error, path)
        if leaves and not of_another:
            raise Broken(left(error, path, IMPORTING)) from None
        if wants_memory(error):
            raise MemoryError from error
        module = None
        if code is None and not isinstance(error, KeyboardInterrupt):
            module = alone(path, name, source, told(error), of_another)
        if module is None or not candidates(module):
            failed = left(error, path, IMPORTING) if leaves else _failed_import(error, path)
            raise Broken(failed) from None
    _usual_settings()
    return module


def _around(path: Path, source: Source) -> Iterator[Path]:
    """Folders that hold the package which a file lies in, by its own words."""
    for name in source.imported:
        top, _, rest = name.partition(".")
        for folder in path.parents[:ABOVE] if rest and top not in sys.modules else ():
            within = folder.joinpath(*rest.split("."))
            if folder.name == top and (within.is_dir() or within.with_suffix(".py").exists()):
                yield folder.parent


def _as_package(root: Path, source: Source) -> None:
    """Let the repository's own folder be the package that the file speaks of, where nothing goes by
    that name and its modules lie in it: clones have folders of any name."""
    for name in source.imported:
        top, _, rest = name.partition(".")
        within = root.joinpath(*rest.split("."))
        if not rest or not (within.is_dir() or within.with_suffix(".py").exists()):
            continue
        with contextlib.suppress(ImportError, ValueError):
            if top not in sys.modules and importlib.util.find_spec(top) is None:
                sys.modules[top] = package = ModuleType(top)
                package.__path__ = [str(root)]


def _above(path: Path, libraries: set[str]) -> Iterator[str]:
    """Folders above that hold what a file imports and Python does not find."""
    for top in libraries - set(sys.modules):
        with contextlib.suppress(ImportError, ValueError):
            if importlib.util.find_spec(top) is None:
                folders = path.parents[1:ABOVE]
                yield from (
                    str(one)
                    for one in folders
                    if (one / top).is_dir() or (one / f"{top}.py").is_file()
                )


def _of_another(error: BaseException, path: Path) -> bool:
    """Whether a file's import failed in another that it imports, or for one that is not there."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame.line or "" for frame in frames if frame.filename == str(path)]
    return isinstance(error, ImportError) or not own or own[-1].startswith(("import ", "from "))


def _same_file(module: ModuleType | None, path: Path) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and Path(file).exists() and Path(file).samefile(path)


def _usual_settings() -> None:
    """What a file may have changed for everybody."""
    sys.setrecursionlimit(RECURSION)
    warnings.resetwarnings()
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.set_default_device(None)


def chosen(module: ModuleType, path: Path, name: str | None) -> Any:
    """What is to be checked: the name that was given, or the one attention of the file.

    Raises:
        ValueError: there is none, or more than one.
    """
    if name is not None:
        try:
            thing = attrgetter(name)(module)
            if isinstance(thing, Absent):
                raise Broken(_failed_import(thing.error, path))
            return thing
        except AttributeError:
            there = ", ".join(candidates(module)) or "no class or function that fits"
            raise ValueError(f"there is no {name} in it; it has {there}") from None
    there = candidates(module)
    named = [each for each in there if ATTENTION.search(each)] or there
    classes = parsed(path).definitions
    uses = {each: names(classes[each]) if each in classes else set() for each in named}
    # The wrapper rather than its heads.
    outer = [each for each in named if not any(each in uses[one] for one in named if one != each)]
    outer = outer or named
    if len(outer) == 1:
        return getattr(module, outer[0])
    if not outer:
        raise ValueError(
            "no attention found in it: define a class that is an nn.Module, or a function of "
            f"(q, k, v), and name it: headwise check {path.name}:MyAttention"
        )
    raise ValueError(
        f"it has {', '.join(outer)}; name the one to check: headwise check {path.name}:{outer[-1]}"
    )


def candidates(module: ModuleType) -> list[str]:
    """The modules and the functions of (q, k, v) that a file itself defines, in its order."""
    return [
        name
        for name, one in vars(module).items()
        if getattr(one, "__module__", None) == module.__name__
        and getattr(one, "__name__", None) == name
        and _fits(one)
    ]


def _fits(thing: Any) -> bool:
    if inspect.isfunction(thing):
        first = list(inspect.signature(thing).parameters)[:3]
        of_qkv = [name[:1].lower() for name in first] == ["q", "k", "v"]
        return of_qkv or bool(weights_taken(thing))
    return inspect.isclass(thing) and issubclass(thing, nn.Module)


def thing_name(thing: Any, name: str | None) -> str:
    return name or getattr(thing, "__name__", type(thing).__name__)


# --- what can go wrong on import ------------------------------------------------------------------


def left(error: BaseException, path: Path, phase: str) -> Finding:
    """A finding on code that asked Python to end."""
    return found("file-exit", "left", phase=phase, line=_line_of(error, path))


def ended_by(error: BaseException, path: Path) -> Finding:
    """A finding on what came through all the way from a call of the code."""
    if isinstance(error, SystemExit):
        return left(error, path, CHECKING)
    said = f"{type(error).__name__}: {' '.join(str(error).split()) or 'no message'}"
    if where := _line_of(error, path):
        return found("file-call", "line", line=where, error=said)
    frame = traceback.extract_tb(error.__traceback__)[-1]
    line = f"{Path(frame.filename).name}, line {frame.lineno}"
    return found("file-call", "ours", error=said, line=line)


def _no_python(error: Exception) -> Finding:
    if isinstance(error, SyntaxError):
        code = (error.text or "").strip()
        said = f"{error.msg}: `{code}`" if code else error.msg
        return found("file-syntax", "line", number=error.lineno, error=said)
    if isinstance(error, UnicodeDecodeError):
        line = error.object.count(b"\n", 0, error.start) + 1
        return found("file-syntax", "encoding", line=line, byte=error.object[error.start])
    return found("file-syntax", "text", error=error)


def _library_that_fails(error: BaseException) -> str:
    """The library in whose own files an import of somebody's ends; else nothing."""
    own, every = users_frames(error), traceback.extract_tb(error.__traceback__)
    said = re.match(r"(?:import|from) (\w+)", own[-1].line or "") if own else None
    return said[1] if said and "site-packages" in every[-1].filename else ""


def _failed_import(error: BaseException, path: Path) -> Finding:
    said = f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(".: ")
    name, way = getattr(error, "name", None) or "", "other"
    if isinstance(error, ModuleNotFoundError) and name:
        way = "module"
        if re.match(r"(step|solution)", name):
            name, way = name.replace(".", "/"), "step"
        elif name in ("max.nn.module_v3", "max.experimental.nn"):
            way = "max"
    elif isinstance(error, NameError) and name:
        way = "name"
    elif isinstance(error, EOFError):
        way = "input"
    elif package := _library_that_fails(error):
        name, way = package, "library"
    words = {"name": name, "python": sys.executable, "line": _line_of(error, path)}
    return found("file-import", way, error=said, **words)


def _line_of(error: BaseException, path: Path) -> str:
    """`, at line 3: code`: the last line of the file that the error went through."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame for frame in frames if frame.filename == str(path)]
    return f", at line {lines[-1].lineno}: `{lines[-1].line}`" if lines else ""

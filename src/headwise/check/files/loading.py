"""Importing a file that somebody wrote, and choosing in it what is to be checked.

All of this runs in the sandbox.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
import sys
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from ..findings.verdict import Finding
from .syntax import Source

ATTENTION = re.compile(r"attention|attn|mha|multi_?head", re.IGNORECASE)
NO_MEMORY = re.compile(r"can't allocate memory|not enough memory", re.IGNORECASE)  # PyTorch's words
RECURSION = sys.getrecursionlimit()
IMPORTING, CHECKING = "while it was imported", "while it was checked"


class Unusable(Exception):
    """The file cannot be imported; `finding` says why."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.message)
        self.finding = finding


def parsed(path: Path) -> Source:
    """The file's text and its tree.

    Raises:
        Unusable: it is no Python.
    """
    try:
        return Source(path.read_bytes().decode("utf-8-sig"), str(path))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise Unusable(_no_python(error)) from None


def load(path: Path) -> ModuleType:
    """Import a file as if it were run from its own folder; inside a package, as a part of it.

    Raises:
        Unusable: it is no Python, or importing it fails.
    """
    parsed(path)
    folder, name = path.parent, path.stem
    while (folder / "__init__.py").exists():
        folder, name = folder.parent, f"{folder.name}.{name}"
    sys.path.insert(0, str(folder))
    try:
        if "." in name:
            importlib.import_module(name.rpartition(".")[0])
        if _same_file(sys.modules.get(name), path):
            return sys.modules[name]
        if name in sys.modules:  # a file with the name of something else, such as math.py
            name = f"_checked_{path.stem}"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    except SystemExit as error:
        raise Unusable(left(error, path, IMPORTING)) from None
    except MemoryError:
        raise
    except BaseException as error:
        if NO_MEMORY.search(str(error)):
            raise MemoryError from error
        raise Unusable(_failed_import(error, path)) from None
    _usual_settings()
    return module


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
        found: Any = module
        for part in name.split("."):
            if not hasattr(found, part):
                there = ", ".join(candidates(module)) or "no class or function that fits"
                raise ValueError(f"there is no {name} in it; it has {there}")
            found = getattr(found, part)
        return found
    there = candidates(module)
    named = [each for each in there if ATTENTION.search(each)] or there
    outermost = list(_outermost(named, parsed(path))) or named
    if len(outermost) == 1:
        return getattr(module, outermost[0])
    if not outermost:
        raise ValueError(
            "no attention found in it: define a class that is an nn.Module, or a function of "
            f"(q, k, v), and name it: headwise check {path.name}:MyAttention"
        )
    raise ValueError(
        f"it has {', '.join(outermost)}; name the one to check: "
        f"headwise check {path.name}:{outermost[-1]}"
    )


def candidates(module: ModuleType) -> list[str]:
    """The modules and the functions of (q, k, v) that a file itself defines, in its order."""
    return [
        name
        for name, value in vars(module).items()
        if getattr(value, "__module__", None) == module.__name__
        and getattr(value, "__name__", None) == name
        and (_is_module_class(value) or (inspect.isfunction(value) and _takes_qkv(value)))
    ]


def _is_module_class(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, nn.Module)


def _takes_qkv(function: Any) -> bool:
    names = list(inspect.signature(function).parameters)[:3]
    return [name[:1].lower() for name in names] == ["q", "k", "v"]


def _outermost(names: list[str], source: Source) -> Iterator[str]:
    """Those that no other of them uses: the wrapper rather than its heads."""
    for name in names:
        others = (source.definitions.get(other) for other in names if other != name)
        mentioned = (
            node.id
            for other in others
            if other is not None
            for node in ast.walk(other)
            if isinstance(node, ast.Name)
        )
        if name not in mentioned:
            yield name


def thing_name(thing: Any, name: str | None) -> str:
    return name or getattr(thing, "__name__", type(thing).__name__)


# --- what can go wrong on import ------------------------------------------------------------------


def left(error: SystemExit, path: Path, phase: str) -> Finding:
    """A finding on code that asked Python to end."""
    return Finding(
        "file-exit",
        "error",
        f"It calls `exit()`, {phase}{_line_of(error, path)}.",
        'Take it out, or put it under `if __name__ == "__main__":`.',
    )


def ended_by(error: BaseException, path: Path) -> Finding:
    """A finding on what came through all the way from a call of the code."""
    if isinstance(error, SystemExit):
        return left(error, path, CHECKING)
    said = " ".join(str(error).split()) or "no message"
    where = _line_of(error, path)
    if where:
        message = f"A call fails{where}: {type(error).__name__}: {said}"
        return Finding("file-call", "error", message, "See what that line needs, and is not given.")
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return Finding(
        "file-call",
        "error",
        f"The check came to no end: {type(error).__name__}: {said} "
        f"({Path(frame.filename).name}, line {frame.lineno}).",
        "That is headwise's fault rather than yours: please report it, with the file.",
    )


def _no_python(error: Exception) -> Finding:
    if isinstance(error, SyntaxError):
        code = (error.text or "").strip()
        message = f"Line {error.lineno} is not Python: {error.msg}" + (
            f": `{code}`." if code else "."
        )
        return Finding(
            "file-syntax", "error", message, "Look at that line and at the one before it."
        )
    what = "it is not UTF-8 text" if isinstance(error, UnicodeDecodeError) else str(error)
    return Finding("file-syntax", "error", f"It cannot be read as Python: {what}.")


def _failed_import(error: BaseException, path: Path) -> Finding:
    said = " ".join(str(error).split())
    message = f"Importing it fails{_line_of(error, path)}: {type(error).__name__}: {said}"
    return Finding("file-import", "error", message.rstrip(".: ") + ".", _import_hint(error, path))


def _import_hint(error: BaseException, path: Path) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name:
        if re.match(r"(step|solution)", error.name):
            return f"Put {error.name.replace('.', '/')}.py beside it, or define what it gives here."
        if error.name in ("max.nn.module_v3", "max.experimental.nn"):
            return "Linear and Module: MAX 25.7 max.nn.module_v3, later ones max.experimental.nn."
        return f"Is {error.name} installed in the Python that runs headwise ({sys.executable})?"
    if isinstance(error, NameError) and error.name:
        return f"Import or define `{error.name}` further up."
    if isinstance(error, EOFError):
        return "It asks for input, and here nobody answers: put that under `if __name__ == …`."
    return (
        "Only definitions should stand at the top of the file; what is run belongs under "
        '`if __name__ == "__main__":`.'
    )


def _line_of(error: BaseException, path: Path) -> str:
    """`, at line 3: code`: the last line of the file that the error went through."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame for frame in frames if frame.filename == str(path)]
    return f", at line {lines[-1].lineno}: `{lines[-1].line}`" if lines else ""

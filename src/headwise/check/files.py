"""`headwise check FILE.py`: load the file in its own process, choose what to check, and check it.

Failures of the file itself (a failing import, an endless loop, an exit) become findings of the
rules `file-…`.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import importlib.util
import inspect
import re
import signal
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import torch
from torch import nn

from . import check
from .build import Broken
from .code import describe, source_of
from .rules import violation
from .sandbox import Limits, Outcome, Report, Send, run
from .syntax import ParsedFile
from .verdict import Finding, Verdict

ATTENTION = re.compile(r"attention|attn|mha|gqa|mqa|multi_?head", re.IGNORECASE)
MARKS = (".git", "pyproject.toml")
"""Names that mark the root directory of a repository."""
IMPORTING, CHECKING = "while it was imported", "while it was checked"
NO_MEMORY = re.compile(r"can't allocate memory|not enough memory", re.IGNORECASE)


def check_file(
    target: str,
    arguments: Mapping[str, str] | None = None,
    limits: Limits | None = None,
    report: Report = lambda seconds: None,
    call: str | None = None,
) -> Verdict:
    """Check the attention in a file.

    Args:
        target: `FILE.py`, or `FILE.py:Name` if it contains several attention layers.
        arguments: arguments of the constructor and of `check`, as typed: `{"num_heads": "3"}`.
            Expressions such as `"nn.GELU"` or `"Config(d_model=24)"` may use `torch` and the
            names defined in the file.
        call: the call, as typed: `"lambda layer, x, keep: layer(x, keep)"`.

    Raises:
        ValueError: the file does not exist, does not contain exactly one attention layer, or needs
            more arguments.
    """
    path, name = split_target(target)
    job = {"file": str(path), "name": name, "call": call, "arguments": dict(arguments or {})}
    done = run(f"{__name__}:_child", job, limits, report=report)
    return judged(done, path, limits or Limits())


def split_target(target: str) -> tuple[Path, str | None]:
    """Split `file.py:Name` into its two parts.

    Raises:
        ValueError: the Python file does not exist.
    """
    matched = re.fullmatch(r"(.+?\.py)(?::([^\W\d][\w.]*))?", target)
    path = Path(matched[1] if matched else target)
    if path.is_dir():
        raise ValueError(f"{path} is a directory; name a Python file in it")
    if not path.exists():
        raise ValueError(f"{path}: no such file")
    if not matched:
        raise ValueError(
            f"{target} must be a Python file or FILE.py:NAME, such as attention.py:MyAttention"
        )
    return path.resolve(), matched[2]


# --- in the parent process ------------------------------------------------------------------------


def judged(done: Outcome, path: Path, limits: Limits) -> Verdict:
    """Return the child's findings, and a finding on an early exit if any, as one verdict.

    Raises:
        ValueError: the child sent an error message.
    """
    subject, phase = path.name, IMPORTING
    results, notes = list[Finding](), list[str]()
    for message in done.messages:
        if "refused" in message:
            raise ValueError(message["refused"])
        subject, phase = message.get("subject", subject), message.get("phase", phase)
        if "verdict" in message:
            verdict = Verdict.from_json(message["verdict"])
            results += verdict.results
            notes += verdict.notes
    if done.ended != "done":
        results.insert(0, _ending(done, path, phase, limits))
        if done.printed.strip():
            notes += ["it printed: " + " | ".join(done.printed.strip().splitlines()[:6])[:300]]
    return Verdict(subject, tuple(results), tuple(notes))


def _ending(done: Outcome, path: Path, phase: str, limits: Limits) -> Finding:
    """Return the finding for a file whose process ended early."""
    rule = "file-crash" if done.ended == "signal" else f"file-{done.ended}"
    known = done.ended == "signal" and done.code in set(signal.Signals)
    code = signal.Signals(done.code).name if known else f"exit code {done.code}"
    return violation(
        rule, "over", phase=phase, code=code, line=_at(done.stack, path), **vars(limits)
    )


def _at(stack: str, path: Path) -> str:
    """Return the innermost line of the file that was running when the process ended, quoted."""
    shown = str(path).encode("ascii", "backslashreplace").decode()  # the format of faulthandler
    place = re.search(rf'File "{re.escape(shown)}", line (\d+) in (.*)', stack)
    if place is None:
        return ""
    inside = "" if place[2] == "<module>" else f" in `{place[2]}`"
    lines = path.read_text("utf-8", "replace").splitlines()
    return f", at line {place[1]}{inside}: `{lines[int(place[1]) - 1].strip()}`"


# --- in the child process -------------------------------------------------------------------------


def _child(
    send: Send, file: str, name: str | None, arguments: Mapping[str, str], call: str | None
) -> None:
    path = Path(file)
    with telling(send, path):
        module = load(path)
        thing = chosen(module, path, name)
        label = name or getattr(thing, "__name__", type(thing).__name__)
        send({"phase": CHECKING, "subject": f"{path.name}:{label}"})
        own = {key: _valued(key, text, module) for key, text in arguments.items()}
        if call is not None:
            own["call"] = _evaluated("--call", call, module)
            if not callable(own["call"]):
                raise ValueError(
                    f'--call {call!r} must be a function, such as "lambda layer, x: layer(x)"'
                )
        verdict = check(thing, **own)
        send({"verdict": verdict.to_json(), "subject": verdict.subject})


@contextmanager
def telling(send: Send, path: Path) -> Iterator[None]:
    """Send an exception as a finding or as an error message."""
    try:
        yield
    except Broken as broken:
        send(alone(broken.finding))
    except ValueError as error:
        send({"refused": f"{path.name}: {error}"})
    except (MemoryError, SystemExit):
        raise
    except BaseException as error:
        if NO_MEMORY.search(str(error)):
            raise MemoryError from error
        send(alone(violation("file-call", "ours", error=describe(error))))


def alone(*findings: Finding) -> dict[str, Any]:
    """Return a message with findings, in a verdict without a subject."""
    return {"verdict": Verdict("", findings).to_json()}


def literal(text: str) -> Any:
    """Return typed text as a value: a Python literal, a boolean, or the text itself.

    >>> literal("24"), literal("true"), literal("(2, 3)"), literal("relu")
    (24, True, (2, 3), 'relu')
    """
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _valued(name: str, text: str, module: ModuleType) -> Any:
    """Return the value of a typed argument: evaluated if it contains a call or begins with a name
    defined in the file, else a literal or the text itself.

    Raises:
        ValueError: the expression fails.
    """
    value = literal(text)
    first = re.match(r"([A-Za-z_]\w*)[.(]", text)
    if not isinstance(value, str) or first is None:
        return value
    known = first[1] in {"torch", "nn", *vars(module)}
    return _evaluated(f"--{name}", text, module) if known or "(" in text else value


def _evaluated(option: str, text: str, module: ModuleType) -> Any:
    try:
        return eval(text, {"torch": torch, "nn": nn, **vars(module), "__builtins__": builtins})
    except Exception as error:
        raise ValueError(f"{option} {text!r}: {type(error).__name__}: {error}") from error


# --- loading --------------------------------------------------------------------------------------


def parsed(path: Path) -> ParsedFile:
    """Return the text and the tree of a file.

    Raises:
        Broken: it is not valid Python.
    """
    try:
        return ParsedFile(path.read_bytes().decode("utf-8-sig"), str(path))
    except SyntaxError as error:
        message = f"{error.msg}: `{(error.text or '').strip()}`"
        raise Broken(violation("file-syntax", "line", number=error.lineno, error=message)) from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        byte = f"0x{error.object[error.start]:02x}"
        raise Broken(violation("file-syntax", "encoding", line=line, byte=byte)) from None
    except (ValueError, RecursionError) as error:
        raise Broken(violation("file-syntax", "text", error=error)) from None


def load(path: Path, code: CodeType | None = None) -> ModuleType:
    """Import a file as if run from its own directory; in a package, as a module of that package.
    Its imports are also looked up in the root of its repository and in the `src` folder there.

    Args:
        code: compiled code to run instead of the file's text.

    Raises:
        Broken: it is not valid Python, or importing it fails.
    """
    parsed(path)
    folder, name = path.parent, path.stem
    while (folder / "__init__.py").exists():
        folder, name = folder.parent, f"{folder.name}.{name}"
    root = next(
        (one for one in path.parents if any((one / mark).exists() for mark in MARKS)), folder
    )
    sys.path[:0] = list(
        dict.fromkeys(str(one) for one in (folder, path.parent, root, root / "src") if one.is_dir())
    )
    try:
        if "." in name:
            importlib.import_module(name.rpartition(".")[0])
        known = sys.modules.get(name)
        file = getattr(known, "__file__", None)
        same = file is not None and Path(file).exists() and path.samefile(file)
        if code is None and known is not None and same:
            return known
        if known is not None:  # a file with the name of another module, such as math.py
            name = f"_checked_{path.stem}"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        exec(code, vars(module)) if code is not None else spec.loader.exec_module(module)
    except SystemExit:
        raise Broken(violation("file-exit", "over", phase=IMPORTING, line="")) from None
    except MemoryError:
        raise
    except BaseException as error:
        if NO_MEMORY.search(str(error)):
            raise MemoryError from error
        raise Broken(_failed_import(error)) from None
    warnings.resetwarnings()
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.set_default_device(None)
    return module


def _failed_import(error: BaseException) -> Finding:
    name, way = getattr(error, "name", None) or "", "fails"
    if isinstance(error, ModuleNotFoundError) and name:
        way = "module"
        if re.match(r"(step|solution)", name):
            name, way = name.replace(".", "/"), "step"
        elif name in ("max.nn.module_v3", "max.experimental.nn"):
            way = "max"
    elif isinstance(error, NameError) and name:
        way = "name"
    return violation("file-import", way, error=describe(error), name=name, python=sys.executable)


def chosen(module: ModuleType, path: Path, name: str | None) -> Any:
    """Return the object to check: the one with the given name, or the file's only attention layer.

    Raises:
        ValueError: there is none, or more than one.
    """
    there = candidates(module)
    if name is not None:
        try:
            return attrgetter(name)(module)
        except AttributeError:
            others = ", ".join(there) or "no module or function of (q, k, v)"
            raise ValueError(f"{name} is not defined; the file defines {others}") from None
    named = [each for each in there if ATTENTION.search(each)] or there
    text = {each: source_of(getattr(module, each)) for each in named}
    # Choose the wrapper rather than its heads.
    outer = [
        each
        for each in named
        if not any(re.search(rf"\b{each}\b", text[one]) for one in named if one != each)
    ] or named
    if len(outer) == 1:
        return getattr(module, outer[0])
    if not outer:
        raise ValueError(
            "no attention found: define an nn.Module or a function of (q, k, v), and name it: "
            f"headwise check {path.name}:MyAttention"
        )
    raise ValueError(
        f"it defines {', '.join(outer)}; name one: headwise check {path.name}:{outer[-1]}"
    )


def candidates(module: ModuleType) -> list[str]:
    """Return the names of modules and of functions of (q, k, v) that a file defines, in order."""
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
        return [name[:1].lower() for name in first] == ["q", "k", "v"]
    return inspect.isclass(thing) and issubclass(thing, nn.Module)

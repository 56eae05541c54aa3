"""`headwise check FILE.py`: the file is run in the sandbox, and checked there.

`check_file` is the parent's side; `_child` runs in the sandbox and sends what it found. What
happens to the file itself (it cannot be imported, runs on without an end, leaves) becomes a finding
like any other, of the rules `file-…`.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from .. import check
from ..findings.rules import found
from ..findings.verdict import Finding, Verdict
from ..target.errors import Broken
from .loading import CHECKING, IMPORTING, chosen, ended_by, load, thing_name
from .sandbox import Limits, Outcome, run
from .syntax import code_at

Send = Callable[[dict[str, Any]], None]
Report = Callable[[float], object]
SAID = 6  # lines that are shown of what a file printed before it ended


def check_file(
    target: str,
    arguments: Mapping[str, str] | None = None,
    limits: Limits | None = None,
    report: Report = lambda seconds: None,
    call: str | None = None,
) -> Verdict:
    """Check the attention in a file.

    Args:
        target: `FILE.py`, or `FILE.py:Name` where it holds several.
        arguments: those of the constructor and of `check`, as typed: `{"num_heads": "3"}`. One with
            a point or a call in it, `"nn.GELU"` or `"Config(d_model=24)"`, may use `torch` and the
            names of the file.
        call: how it is called, as typed: `"lambda layer, x: layer(x, x.shape[1])"`. It may use
            `torch` and the names of the file.

    Raises:
        ValueError: no such file; no, or more than one, attention in it; an argument that is needed
            and cannot be worked out.
    """
    path, name = split_target(target)
    job = {"file": str(path), "name": name, "call": call}
    job |= {"arguments": {key: literal(text) for key, text in (arguments or {}).items()}}
    done = run(f"{__name__}:_child", job, limits, report=report)
    return judged(done, path, limits or Limits())


def split_target(target: str) -> tuple[Path, str | None]:
    """`file.py:Name` to its two parts.

    Raises:
        ValueError: there is no such Python file.
    """
    found = re.fullmatch(r"(.+?\.py)(?::([^\W\d][\w.]*))?", target)
    path = Path(found[1] if found else target)
    if path.is_dir():
        raise ValueError(f"{path}: is a folder; name a Python file in it")
    if not path.exists():
        raise ValueError(f"{path}: no such file")
    if not found:
        raise ValueError(
            f"{target}: give a Python file, or one and a name in it, as in attention.py:MyAttention"
        )
    return path.resolve(), found[2]


def literal(text: str) -> Any:
    """What somebody typed as a value: a Python literal, yes or no in other words, or the text.

    >>> literal("24"), literal("true"), literal("(2, 3)"), literal("relu")
    (24, True, (2, 3), 'relu')
    """
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


# --- the parent's side ----------------------------------------------------------------------------


def judged(done: Outcome, path: Path, limits: Limits) -> Verdict:
    """What the child sent, and how it ended, as one verdict.

    Raises:
        ValueError: the child refused, with its words.
    """
    subject, phase = path.name, IMPORTING
    results: list[Finding] = []
    notes: list[str] = []
    for message in done.messages:
        if "refused" in message:
            raise ValueError(message["refused"])
        subject = message.get("subject", subject)
        phase = message.get("phase", phase)
        if "verdict" in message:
            verdict = Verdict.from_json(message["verdict"])
            results += verdict.results
            notes += verdict.notes
    if done.ended != "done":
        results.insert(0, _ending(done, path, phase, limits))
        if done.printed.strip():
            said = done.printed.strip().splitlines()
            notes.append("It printed:")
            notes += [f"| {line[:100]}" for line in said[:SAID]] + ["| …"] * (len(said) > SAID)
    elif done.printed_bytes:
        notes.append(f"It printed {done.printed_bytes:,} characters, not shown here.")
    return Verdict(subject, tuple(results), tuple(notes))


def _ending(done: Outcome, path: Path, phase: str, limits: Limits) -> Finding:
    """A finding on a file that did not come to its end."""
    rule = "file-crash" if done.ended == "signal" else f"file-{done.ended}"
    known = done.ended == "signal" and done.code in set(signal.Signals)
    words = {
        "limits": limits,
        "megabytes": limits.output / 1e6,
        "line": _at(done.stack, path),
        "code": signal.Signals(done.code).name if known else done.code,
    }
    return found(rule, "over", phase=phase, **words)


def _at(stack: str, path: Path) -> str:
    """The innermost line of the file that was being run, quoted."""
    shown = str(path).encode("ascii", "backslashreplace").decode()  # as faulthandler writes it
    place = re.search(rf'File "{re.escape(shown)}", line (\d+) in (.*)', stack)
    if place is None:
        return ""
    inside = "" if place[2] == "<module>" else f" in `{place[2]}`"
    return f", at line {place[1]}{inside}: `{code_at(path, int(place[1]))}`"


# --- the child's side -----------------------------------------------------------------------------


def _child(
    send: Send,
    file: str,
    name: str | None,
    arguments: Mapping[str, Any],
    call: str | None = None,
) -> None:
    path = Path(file)
    with telling(send, path):
        module = load(path)
        try:
            thing = chosen(module, path, name)
            send({"phase": CHECKING, "subject": f"{path.name}:{thing_name(thing, name)}"})
            own: dict[str, Any] = {} if call is None else {"call": _typed(call, module)}
            own |= {key: _valued(key, value, module) for key, value in arguments.items()}
            verdict = check(thing, **own)
        except ValueError as error:
            send({"refused": f"{path.name}: {error}"})
        else:
            send({"verdict": verdict.to_json(), "subject": verdict.subject})


def _valued(name: str, value: Any, module: ModuleType) -> Any:
    """What somebody typed for an argument: an expression where something is called in it, or where
    it begins with a name that the file, PyTorch or the repository knows; else a word.

    Raises:
        ValueError: the expression fails.
    """
    first = re.match(r"([A-Za-z_]\w*)[.(]|[\[({]", value) if isinstance(value, str) else None
    if first is None:
        return value
    known = _known(value, module)
    return _evaluated(f"--{name}", value, known) if "(" in value or first[1] in known else value


def _typed(call: str, module: ModuleType) -> Callable[..., Any]:
    """The function that somebody typed.

    Raises:
        ValueError: it is none.
    """
    usual = 'as in --call "lambda layer, x: layer(x)"'
    made = _evaluated("--call", call, _known(call, module), f"; {usual}")
    if not callable(made):
        raise ValueError(f"--call {call!r}: is no function; {usual}")
    return made


def _known(text: str, module: ModuleType) -> dict[str, Any]:
    """The names that an expression may use: the file's own, PyTorch's, and the modules of the
    repository that it speaks of, `package.part.Name`."""
    known = {"torch": sys.modules["torch"], "nn": sys.modules["torch.nn"], **vars(module)}
    try:
        parts = [*ast.walk(ast.parse(text, mode="eval"))]
    except SyntaxError:  # which is told where it is evaluated
        return known
    own = {one.arg for one in parts if isinstance(one, ast.arg)} | {*known, *vars(builtins)}
    for dotted in (ast.unparse(one) for one in parts if isinstance(one, ast.Attribute)):
        first, *rest = dotted.split(".")
        if first in own or not re.fullmatch(r"\w+(\.\w+)+", dotted):
            continue
        for end in range(len(rest)):  # as far as it names modules
            with contextlib.suppress(Exception):  # a name may be no module, and one may fail
                importlib.import_module(".".join([first, *rest[:end]]))
                known[first] = sys.modules[first]
    return known


def _evaluated(option: str, text: str, known: dict[str, Any], hint: str = "") -> Any:
    """What an expression gives that somebody typed.

    Raises:
        ValueError: it fails.
    """
    try:
        return eval(text, known)
    except Exception as error:
        raise ValueError(f"{option} {text!r}: {type(error).__name__}: {error}{hint}") from error


@contextlib.contextmanager
def telling(send: Send, path: Path) -> Iterator[None]:
    """Send what ends a check of the file as a finding."""
    try:
        yield
    except Broken as broken:
        send(alone(broken.finding))
    except MemoryError:
        raise
    except BaseException as error:
        finding = ended_by(error, path)
        refused = {"refused": f"{path.name}: {finding.message} {finding.hint}"}
        send(refused if finding.severity == "skipped" else alone(finding))


def alone(*findings: Finding) -> dict[str, Any]:
    """A message of findings without a verdict."""
    return {"verdict": Verdict("", findings).to_json()}

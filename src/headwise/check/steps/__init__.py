"""Step mode: test a step of a tutorial part by part while the file is being filled in.

A step is a list of parts: a class, a layer, a function, a method. They are tested in order of
dependence, and only the first fault is reported; later parts are tested once it is fixed.
Remaining blanks are filled with headwise's own code, so one part can be correct while another
is still blank. Once all parts are correct and no blank is left, all rules of `check` are applied.

A part is correct if it gives the same result as its twin: the same part of the step's template,
filled with headwise's code. Otherwise `tracing.py` follows both line by line, `blame.py` finds the
first variable that differs, and `words.py` describes it. Step data is in `steps.toml`, the calls in
`modules.py`, `scalar.py` and `gpt2_max.py`; the templates are in `../templates/`.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from ..files import IMPORTING, alone, judged, load, parsed, split_target, telling
from ..rules import passed, skipped
from ..sandbox import Limits, Report, Send, run
from ..syntax import NO_RETURN, ParsedFile, names, nodes, quoted
from ..verdict import Finding, Verdict
from .base import Step, StepPart, Trial, template
from .blame import Search, Twin, twin
from .filling import fill
from .gpt2_max import GPT2_MAX
from .modules import GPT2, PER_HEAD, SPLIT
from .scalar import SCALAR
from .tracing import Watch, plain
from .words import failure, near, shape_of, thrown

STEPS: dict[str, Step] = {step.name: step for step in (SCALAR, PER_HEAD, SPLIT, GPT2, GPT2_MAX)}
LEVELS = 3
WAITS = "Skipped until this is fixed."
FILLED = "With headwise's code in the blanks, everything written so far is correct."


def summary(name: str) -> str:
    """Return the summary of a step: the first line of its template."""
    return (ast.get_docstring(ast.parse(template(name))) or "").partition("\n")[0]


def write_template(name: str, path: Path) -> None:
    """Write the file with blanks, unless it exists.

    Raises:
        ValueError: an unknown step, an existing file, or a name that does not end in .py.
    """
    _check_name(name)
    wrong = ""
    if path.suffix != ".py":
        wrong = "give the file a name that ends in .py"
    elif path.exists():
        wrong = "the file exists already; give another name"
    elif not path.absolute().parent.is_dir():
        wrong = f"there is no folder {path.parent}"
    if wrong:
        raise ValueError(f"--new {name} {path}: {wrong}")
    path.write_text(template(name), "utf-8")


def _check_name(name: str) -> None:
    if name not in STEPS:
        close = difflib.get_close_matches(name, STEPS, n=1)
        hint = f"did you mean {close[0]}? The" if close else "the"
        raise ValueError(f"{name}: there is no such step; {hint} steps are {', '.join(STEPS)}")


def check_step(
    name: str,
    target: str,
    limits: Limits | None = None,
    report: Report = lambda seconds: None,
    level: int = 1,
) -> Verdict:
    """Test a file as a step of a tutorial.

    Args:
        name: `scalar`, `per_head`, `split` or `gpt2`; the imports of a `gpt2` file choose between
            the variants for PyTorch and for MAX (`gpt2-max`).
        level: the level of hints: 1 for the purpose of a line, 2 for its method, 3 for the line.

    Raises:
        ValueError: an unknown step, file or level.
    """
    _check_name(name)
    if not 1 <= level <= LEVELS:
        raise ValueError(f"--hint {level}: the levels are 1, 2 and {LEVELS}")
    path, inside = split_target(target)
    if inside is not None:
        raise ValueError(f"{target}: a step determines what is checked; omit :{inside}")
    limits = limits or usual_limits(name, target)
    job = {"file": str(path), "name": name, "level": level}
    return judged(run(f"{__name__}:_child", job, limits, report=report), path, limits)


def usual_limits(name: str, target: str) -> Limits:
    """Return the default limits; they are higher for MAX, which compiles for a minute at first."""
    try:
        source = ParsedFile(Path(target).read_text("utf-8-sig"), target)
    except (OSError, SyntaxError, ValueError):  # reported by check_step
        return Limits()
    compiles = name in STEPS and _variant(name, source) is GPT2_MAX
    return Limits(seconds=300.0, memory=8.0) if compiles else Limits()


def _variant(name: str, source: ParsedFile) -> Step:
    return GPT2_MAX if name == GPT2.name and "max" in source.libraries else STEPS[name]


# --- in the process that runs the file ------------------------------------------------------------


def _child(send: Send, file: str, name: str, level: int = 1) -> None:
    path = Path(file)
    with telling(send, path):
        follower = Follower(send, path, name, level)
        for finding in follower.findings():
            if finding.hint and level < LEVELS:
                finding = replace(finding, hint=f"{finding.hint} (More: --hint {level + 1})")
            send(alone(finding))


class Follower:
    """Test the parts of a file in order, up to the first fault."""

    def __init__(self, send: Send, path: Path, name: str, level: int) -> None:
        self.send, self.level, self.source = send, level, parsed(path)
        self.step, self.names = _variant(name, self.source), dict[str, str]()
        for part in self.step.parts:  # find the name of each part in the file
            before = f"{self.names[part.owner]}." if part.owner else ""
            choices = [f"{before}{name}" for name in (part.short, *part.also)]
            self.names[part.name] = next(filter(self.source.has, choices), choices[0])
        self.trial = Trial(self.step, self.source, path, self.names)
        self.searches: dict[str, Search] = {}  # of classes, to locate their attributes
        send({"subject": f"{path.name}, step {self.step.name}", "phase": IMPORTING})

    def findings(self) -> Iterator[Finding]:
        trial, step = self.trial, self.step
        if (wrong := self._unbound() or self._missing()) is not None:
            yield from (wrong, skipped("step-whole", WAITS))
            return
        yield passed("step-imports", "Every name that is used is imported or defined.")
        left = {one.name: self.source.blanks(self.names[one.name]) for one in step.parts}
        trial.blank = [name for name, blanks in left.items() if blanks]
        if reason := step.refuses():
            self.send({"subject": f"{trial.path.name}, step {step.name}, by its syntax alone"})
            yield from self._blank()
            yield skipped("step-whole", f"Only the syntax was read: {reason}.")
            return
        code = {self.names[one.name]: one.fill for one in step.parts if left[one.name]}
        tree, trial.ours, unknown = fill(self.source, code)
        trial.module = load(trial.path, compile(tree, str(trial.path), "exec"))
        self.twin = twin(trial)
        lacks = {name.rpartition(".")[2] for name in unknown}
        for part in step.parts:
            name = self.names[part.name]
            if name in unknown or self.source.uses(name, self.names.values()) & lacks:
                continue
            if len(left[part.name]) >= max(len(part.fill), 1):  # filled completely by headwise
                continue
            self.send({"phase": f"while `{part.short}` was tested"})
            tried = [*self._tried(part)]
            if any(one.severity == "error" for one in tried):
                yield from (*tried, skipped("step-whole", WAITS))
                return
            yield from tried if part.name not in trial.blank else ()
        yield from self._blank()
        self.send({"phase": "while all parts together were checked"})
        yield from [skipped("step-whole", FILLED)] if trial.blank else step.final(trial)

    # --- findings from the syntax -----------------------------------------------------------------

    def _unbound(self) -> Finding | None:
        """Return a finding on the first undefined name."""
        source, parts = self.source, {part.name for part in self.step.parts}
        for name, line in source.unbound.items():
            owner, function = source.owner_at(line)
            if name in parts:
                continue
            own, inside = source.attributes(owner), [function] if function is not None else []
            known = source.bound | names(*inside) | {one.arg for one in nodes(ast.arg, *inside)}
            meant = name if name in own else near(name, own - known) or near(name, known)
            hint = f"Did you mean `{'self.' * (meant in own)}{meant}`?" if meant else ""
            if name == "self" and function is not None:
                hint = (
                    f"Line {function.lineno}: write `self` first, `def {function.name}(self, …)`."
                )
            hint = self.step.imports.get(name) or hint or "Import or define it further up."
            message = f"Line {line} uses `{name}`, which the file neither imports nor defines"
            message = f"{message} ({quoted(self.trial.path, line)})."
            return Finding("step-imports", "error", message, hint)
        return None

    def _missing(self) -> Finding | None:
        """Return a finding on the first missing part."""
        source, there = self.source, {*self.source.definitions}
        for part in self.step.parts:
            if source.has(self.names[part.name]):
                continue
            owner, hint = self.names.get(part.owner, ""), part.hint(part.short, self.level)
            where, known = f" in `{owner}`" * bool(owner), source.attributes(owner) or there
            meant = near(
                part.short, known - {one.rpartition(".")[2] for one in self.names.values()}
            )
            if meant:
                line = source.line(f"{owner}.{meant}" if owner else meant)
                hint = f"Line {line} has `{meant}`: did you mean `{part.short}`?"
            elif line := source.local(owner, part.short):
                hint = f"Line {line} assigns a local variable: write `self.{part.short} = …`."
            for other in STEPS.values() if not owner else ():
                if {each.name for each in other.parts if not each.owner} <= there:
                    hint = f"This looks like a file for `--step {other.like}`."
            message = f"`{part.short}` is not defined yet{where}."
            return Finding("step-parts", "error", message, hint)
        return None

    def _blank(self) -> Iterator[Finding]:
        """Yield a finding on the first blank, with its hint."""
        parts = [(part, self.names[part.name]) for part in self.step.parts]
        every = [(blank, part) for part, name in parts for blank in self.source.blanks(name)]
        if not every:
            yield passed("step-blanks", "No placeholder is left.")
            return
        blank, part = min(every, key=lambda one: one[0].line)
        hint, lines = part.hint(blank.key, self.level), len({one.line for one, _ in every})
        message = f"Line {blank.line}: {blank.text}{f' ({lines} blanks are left)' * (lines > 1)}."
        rule, function = "step-blanks", self.source.function(self.names[part.name])
        if NO_RETURN in blank.text:
            hint = f"End it with `return …`. {hint}"
            if lost := thrown(self.trial, function, len(self.source.text)):
                rule, message = "step-parts", lost
        yield Finding(rule, "error", message, hint)

    # --- findings from running the parts ----------------------------------------------------------

    def _tried(self, part: StepPart) -> Iterator[Finding]:
        """Call a part and its twin in the same way, and compare the results."""
        trial, out = self.trial, None
        for call in self.step.calls(trial, part):
            watch = Watch(trial, part)
            with torch.random.fork_rng(devices=[]):
                try:
                    out = watch.run(call.run)
                except MemoryError:
                    raise
                except Exception as error:
                    out = error
                search = Search(watch, Twin(self.twin, part, call.run))
            self.searches.setdefault(part.name, search)
            if watch.failed or not search.agrees(out):
                yield self._beside(part, search) or failure(
                    trial, part, call, search, out, self.level
                )
                return
        if (wrong := self._beside(part)) is not None:
            yield wrong
        if wrong is None or wrong.severity != "error":
            shape = f": {shape_of(out)}" if plain(out) is not None else ""
            yield passed(part.rule, f"`{part.name}` is correct{shape}.")

    def _beside(self, part: StepPart, search: Search | None = None) -> Finding | None:
        """Return the finding of the step's own test, with its line."""
        source, built = self.source, self.searches.get(part.owner or part.name)
        wrong = self.step.judge(self.trial, self.twin, part, search)
        if wrong is None:
            return None
        line = wrong.at
        if isinstance(wrong.at, str):
            owner, _, short = wrong.at.rpartition(".")
            line = source.line(f"{self.names[owner]}.{short}" if owner else self.names[short])
            if built is not None:  # the line of a function, or else of an attribute
                line = built.first() or line if short == part.name else line and built.at(line).line
        at = f" ({quoted(self.trial.path, int(line))})" if line else ""
        hint = part.hint(part.short, self.level)
        return Finding(part.rule, wrong.severity, f"{wrong.message}{at}.", hint)

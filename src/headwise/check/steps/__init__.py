"""Step mode: a tutorial's step, followed part by part while the file is still being filled in.

A step is a list of parts: a class, a layer, a method. Of each part the parsed syntax says whether
it is there and whether a placeholder is left in it; then it is run by itself, so that one part can
be right while the next is still blank: headwise's own code stands in the blanks meanwhile. A part
that uses a wrong one waits for it. Once all are right, the whole goes through all rules of `check`.

Where a part is wrong, `watching.py` follows it line by line, `blame.py` finds the first variable
that does not hold what headwise's own code gives it, and `hints.py` says so; slips of the syntax
that explain it, such as a comma too many, are told by `slips.py`. What each part has to do stands
in `steps.toml`, and in `gpt2.py`, `gpt2_max.py`, `layers.py` and `scalar.py`; the files to start
from are in `../templates/`.
"""

from __future__ import annotations

import ast
import difflib
import warnings
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, groupby
from pathlib import Path
from types import CodeType

from ..files import Report, Send, alone, judged, split_target, telling
from ..files.loading import IMPORTING, load, parsed
from ..files.sandbox import Limits, run
from ..files.syntax import NO_RETURN, Blank, Source, code_at, nodes, quoted, unused
from ..findings.rules import found, passed, skipped
from ..findings.verdict import Finding, Verdict
from . import base
from .base import Step, StepPart, Trial
from .filling import fill
from .gpt2 import GPT2
from .gpt2_max import GPT2_MAX
from .hints import failed, has_self, looked, meant
from .layers import PER_HEAD, SPLIT
from .scalar import SCALAR
from .slips import explained, twice

SIGNS = {ast.Div: "/", ast.Mult: "*", ast.Add: "+", ast.Sub: "-", ast.MatMult: "@"}
STEPS: dict[str, Step] = {step.name: step for step in (SCALAR, PER_HEAD, SPLIT, GPT2, GPT2_MAX)}


def template(name: str) -> str:
    """The file with blanks that a step starts from.

    Raises:
        ValueError: there is no such step.
    """
    return base.template(_known(name).name)


def summary(name: str) -> str:
    """What a step is, in a line: the first of its template."""
    return (ast.get_docstring(ast.parse(template(name))) or "").partition("\n")[0]


def write_template(name: str, path: Path) -> None:
    """Write the file with blanks; one that is there is left alone.

    Raises:
        ValueError: there is no such step, or the file exists, or its name is no Python file's.
    """
    text, wrong = template(name), ""
    if path.suffix != ".py":
        wrong = "give the file a name that ends in .py"
    elif path.exists():
        wrong = "the file is there already; give another name"
    elif not path.absolute().parent.is_dir():
        wrong = f"there is no folder {path.parent}"
    if wrong:
        raise ValueError(f"--new {name} {path}: {wrong}")
    path.write_text(text, "utf-8")


def _known(name: str) -> Step:
    if name not in STEPS:
        near = difflib.get_close_matches(name, STEPS, n=1)
        told = f"did you mean {near[0]}? There" if near else "there"
        raise ValueError(f"{name}: there is no such step; {told} are {', '.join(STEPS)}")
    return STEPS[name]


def check_step(
    name: str,
    target: str,
    limits: Limits | None = None,
    report: Report = lambda seconds: None,
) -> Verdict:
    """Follow a step in a file.

    Args:
        name: `scalar`, `per_head`, `split` or `gpt2`; for `gpt2` the file's imports say whether it
            is the variant for PyTorch or, `gpt2-max`, for MAX.
        target: the file.

    Raises:
        ValueError: no such step, no such file.
    """
    _known(name)
    path, inside = split_target(target)
    if inside is not None:
        raise ValueError(f"{target}: a step says itself what is checked; leave out :{inside}")
    limits = limits or usual_limits(name, target)
    done = run(f"{__name__}:_child", {"file": str(path), "name": name}, limits, report=report)
    verdict = judged(done, path, limits)
    # What is written and wrong comes before what is still to be written.
    ordered = sorted(verdict.results, key=lambda one: one.rule == "step-blanks")
    return replace(verdict, results=tuple(ordered))


def usual_limits(name: str, target: str) -> Limits:
    """MAX compiles, which takes a minute the first time, and more memory."""
    try:
        source = Source(Path(target).read_text("utf-8-sig"), target)
    except (OSError, SyntaxError, ValueError):  # check_step says what is wrong with it
        return Limits()
    compiles = name in STEPS and _variant(name, source) is GPT2_MAX
    return Limits(seconds=300.0, memory=8.0) if compiles else Limits()


# --- in the sandbox -------------------------------------------------------------------------------


def _child(send: Send, file: str, name: str) -> None:
    path = Path(file)
    with telling(send, path):
        source = parsed(path)
        step = _variant(name, source)
        send({"subject": f"{path.name}, step {step.name}", "phase": IMPORTING})
        trial = Trial(step, source, path, _names(step, source))
        with warnings.catch_warnings(record=True) as heard:
            for finding in _with_thrown(chain(_read(trial), _run(trial, send)), trial):
                send(alone(finding))
        for one in heard:  # by the file's own lines: what libraries say of themselves is dropped
            if one.filename == str(path):
                said = f"is warned of: {str(one.message).split(' (')[0]}"
                note = f"{quoted(path, one.lineno)} {said}"
                send({"verdict": Verdict("", (), (note,)).to_json()})


def _variant(name: str, source: Source) -> Step:
    return GPT2_MAX if name == GPT2.name and "max" in source.libraries else STEPS[name]


def _names(step: Step, source: Source) -> dict[str, str]:
    """Each part with the name that the file has for it."""
    found: dict[str, str] = {}
    for part in step.parts:
        before = f"{found[part.owner]}." if part.owner else ""
        choices = [f"{before}{name}" for name in (part.short, *part.also)]
        found[part.name] = next((name for name in choices if source.has(name)), choices[0])
    return found


def _read(trial: Trial) -> Iterator[Finding]:
    """What the syntax tells: imports, parts that are not there, placeholders."""
    source, step = trial.source, trial.step
    missing = _missing(trial)
    for name, line in missing.items():
        hint = step.imports.get(name) or f"Import or define `{name}` further up."
        if name == "self" and (function := source.owner_at(line)[1]):
            hint = has_self(function)
        if name not in step.imports and (near := meant(trial, name, line)):
            hint = f"Did you mean `{near}`?"
        function = source.owner_at(line)[1]
        if function and name not in {"self", *step.imports} and (again := twice(function, name)):
            hint = again
        yield found("step-imports", "unbound", name=name, line=line, hint=hint)
    if not missing:
        yield passed("step-imports", "Every name that is used is imported or defined.")
    for part in step.parts:
        name, owner = trial.names[part.name], trial.names.get(part.owner, "")
        if not source.has(name):
            trial.waiting[part.name] = None
            if not owner or source.has(owner):  # else it is said already that its class is missing
                where, more = (f" in `{owner}`", "") if owner else ("", _other_step(trial))
                if line := source.local(owner, part.short):
                    more = (
                        f" Line {line} gives a variable that name: write `self.{part.short} = …`."
                    )
                elif near := _nearly(trial, part):
                    more = f" {near}"
                hint = f"{part.hint}{more}"
                yield found("step-parts", "missing", name=part.short, where=where, hint=hint)
        if left_over := source.blanks(name):
            trial.blank.append(part.name)
            yield from _blanks(part, step, left_over)
    if not trial.blank and not trial.waiting:
        yield passed("step-blanks", "No placeholder is left.")


def _missing(trial: Trial) -> dict[str, int]:
    """Names that nothing gives a meaning to, but for those of parts."""
    parts = {part.name for part in trial.step.parts}
    return {name: line for name, line in trial.source.unbound.items() if name not in parts}


def _nearly(trial: Trial, part: StepPart) -> str:
    """What has nearly the name of a part, and where."""
    source, owner = trial.source, trial.names.get(part.owner, "")
    others = {one.rpartition(".")[2] for one in trial.names.values()}
    known = source.attributes(owner) if owner else {*source.definitions}
    for near in difflib.get_close_matches(part.short, sorted(known - others), 1, 0.75):
        line = source.line(f"{owner}.{near}" if owner else near)
        return f"Line {line} has `{near}`: did you mean `{part.short}`?"
    return ""


def _other_step(trial: Trial) -> str:
    """Where the file is another step's."""
    for name, step in STEPS.items():
        named = {part.name for part in step.parts if not part.owner}
        if name not in (trial.step.name, GPT2_MAX.name) and named <= set(trial.source.definitions):
            return f" This looks like a file for `--step {name}`."
    return ""


def _blanks(part: StepPart, step: Step, blanks: list[Blank]) -> Iterator[Finding]:
    """A finding for each line that has blanks, with the hint that fits."""
    for line, row in groupby(blanks, key=lambda blank: blank.line):
        first, *others = row
        says, hint = first.says, step.hint(part, first.key)
        if others:
            names = [f"`{blank.key}`" for blank in (first, *others)]
            says = f"{', '.join(names[:-1])} and {names[-1]} are still None"
        elif NO_RETURN in says:
            hint = f"End it with `return …`: what is only computed or printed is lost. {hint}"
        yield found("step-blanks", "blank", line=line, says=says, hint=hint)


def _run(trial: Trial, send: Send) -> Iterator[Finding]:
    """What running it tells, part by part, then the whole."""
    step = trial.step
    imports = "nothing can be run before the imports are right"
    if reason := imports if _missing(trial) else step.refuses():
        send({"subject": f"{trial.path.name}, step {step.name}, by its syntax alone"})
        yield from _unused(trial)
        yield skipped("step-whole", f"Only the syntax was read: {reason}.")
        return
    trial.module = load(trial.path, _filled(trial))
    for part in step.parts:
        if not part.test or part.name in trial.waiting or not _begun(trial, part):
            continue
        if needs := _needs(trial, part):
            trial.waiting[part.name] = None
            names = " and ".join(f"`{need.removeprefix(f'{part.owner}.')}`" for need in needs)
            if part.owner not in needs:
                yield skipped(part.rule, f"`{part.short}` waits for {names}.")
            continue
        send({"phase": f"while `{part.short}` was tried"})
        for finding in _tried(trial, part):
            if finding.severity == "error":
                trial.waiting[part.name] = None
            if finding.severity == "error" or part.name not in trial.blank:
                yield finding
    begun = any(part.fill and _begun(trial, part) for part in step.parts)
    if trial.waiting or (trial.blank and not begun):
        yield skipped("step-whole", "The whole is checked once every part is right.")
        return
    send({"phase": "while the whole was checked"})
    findings = [*_tried(trial, StepPart("the whole", "step-whole", test="whole"))]
    if not trial.blank:
        yield from findings
        return
    wrong = [one for one in findings if one.severity == "error"]
    yield from wrong
    said = "is right, as far as it goes" if not wrong else "was checked"
    yield skipped("step-whole", f"With headwise's code in the blanks, what is written {said}.")


def _filled(trial: Trial) -> CodeType | None:
    """The code with its blanks filled; a part with one for which there is no code waits."""
    parts = [part for part in trial.step.parts if part.name in trial.blank]
    code = {trial.names[part.name]: part.fill for part in parts}
    tree, trial.ours, left = fill(trial.source, code)
    trial.waiting |= {part.name: None for part in parts if trial.names[part.name] in left}
    return compile(tree, str(trial.path), "exec") if trial.ours else None


def _begun(trial: Trial, part: StepPart) -> bool:
    """Whether something of a part is written, and not only by headwise."""
    return len(trial.source.blanks(trial.names[part.name])) < max(len(part.fill), 1)


def _with_thrown(findings: Iterator[Finding], trial: Trial) -> Iterator[Finding]:
    """The findings; where something is wrong, first the lines whose result is thrown away."""
    told = False
    for finding in findings:
        if finding.severity == "error" and finding.rule != "step-blanks" and not told:
            told = True
            for line, name in chain(*(_thrown(trial, part) for part in trial.step.parts)):
                words = {"line": line, "name": name, "code": code_at(trial.path, line)}
                yield found("step-parts", "thrown", **words)
        yield finding


def _thrown(trial: Trial, part: StepPart) -> Iterator[tuple[int, str]]:
    """Lines of a part whose result nothing takes, and what they do: call `view`, or divide."""
    function = trial.source.function(trial.names[part.name])
    yield from unused(*([function] if function else []))
    owner = trial.names.get(part.owner, "")
    own = {*trial.names.values(), *(f"self.{one}" for one in trial.source.attributes(owner))}
    for node in nodes(ast.Expr, *([function] if function else [])):
        if isinstance(node.value, ast.BinOp):
            yield node.lineno, SIGNS.get(type(node.value.op), "it")
        elif isinstance(node.value, ast.Call) and ast.unparse(node.value.func) in own:
            yield node.lineno, ast.unparse(node.value.func)


def _unused(trial: Trial) -> Iterator[Finding]:
    """Parts that are written without those that they are expected to use."""
    for part in trial.step.parts:
        if part.name in trial.waiting or not part.uses:
            continue
        used = trial.source.uses(trial.names[part.name], trial.names.values())
        if missing := [f"`{name}`" for name in part.uses if name not in used]:
            said = f"`{part.short}` does not use {' and '.join(missing)}."
            yield Finding(part.rule, "warning", said, part.hint)
        else:
            said = f"`{part.short}` uses {', '.join(f'`{name}`' for name in part.uses)}."
            yield passed(part.rule, said)


def _needs(trial: Trial, part: StepPart) -> list[str]:
    """The unfinished parts that a part's code uses, and its class where that cannot be built."""
    source, names = trial.source, trial.names
    if source.function(names[part.name]) is None:  # a class or a layer: it is only built
        builds = source.uses(f"{names[part.name]}.__init__") - {part.name}
        return [one for one in trial.waiting if one == part.owner or names[one] in builds]
    used = source.uses(names[part.name], names.values()) | _filled_with(trial, part)
    built = source.mentions(names[part.owner]) if part.owner else set()
    needs = []
    for other in trial.waiting:
        kind, _, short = other.rpartition(".")
        if kind == part.owner:
            needed = short in used
        else:  # a class that this one builds: its methods are called, too
            needed = (names[kind] if kind else short) in used | (built if kind else set())
        if needed or other == part.owner:
            needs.append(other)
    return needs


def _filled_with(trial: Trial, part: StepPart) -> set[str]:
    """The attributes that headwise's own code in a part's blanks uses."""
    blanks = (part.fill.get(one.key, "") for one in trial.source.blanks(trial.names[part.name]))
    return {node.attr for node in nodes(ast.Attribute, *map(ast.parse, blanks))}


def _tried(trial: Trial, part: StepPart) -> Iterator[Finding]:
    """What a part's test finds; what it raises is a finding, too."""
    trial.watch = None
    try:
        done = trial.step.tests[part.test](trial, part)
        for one in [done] if isinstance(done, Finding) else done:
            yield explained(trial, part, looked(trial, part, one)) if part.test != "whole" else one
    except MemoryError:
        raise
    except Exception as error:
        if (finding := failed(trial, part, error)) is not None:
            yield explained(trial, part, looked(trial, part, finding))

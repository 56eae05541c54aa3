"""Say what is wrong with a part, at which line, and what belongs there."""

from __future__ import annotations

import ast
import difflib
import re
from dataclasses import replace
from types import TracebackType

from ..files.syntax import Function, names, nodes, quoted
from ..findings.verdict import Finding
from ..target.errors import told
from .base import StepPart, Trial
from .blame import Blame, Expected, blamed, expectations, fits, holds, sources, twin_gives
from .filling import innermost
from .slips import unscaled, without_softmax
from .watching import Watch, changed, given_by, key_at

LETTERS = {
    "B": "rows of the batch",
    "T": "tokens",
    "E": "features of a token",
    "H": "heads",
    "D": "features of one head",
}


def laid(trial: Trial, part: StepPart, named: Finding | None, weak: Finding) -> Finding:
    """The finding on other numbers: the mistake that was named, where it is one of the first
    variable that is wrong, or else that variable."""
    blame, row = blamed(trial), trial.step.mistakes.get(named.rule if named else "", {})
    if named is not None:
        named = replace(named, rule=row.get("rule", named.rule), hint=row.get("hint", named.hint))
    if blame is None:
        return looked(trial, part, named or weak)
    if named is None and blame.key == "return":
        return looked(trial, part, replace(weak, hint=trial.step.hint(part, "return")))
    if named is None or (named.rule == "unused-result" and blame.key != "return"):
        return finding(trial, part, blame)  # what is unused, for which reason
    changes = [one for one in trial.watch.statements if blame.key in changed(one)]
    own = {line for one in changes for line in range(one.lineno, (one.end_lineno or 0) + 1)}
    lines = _lines(named)
    inside = any(holds(trial.watch.function, one) for one in lines)
    if blame.hint and inside:  # what was named is not what these values say
        return finding(trial, part, blame)
    if lines & (own | {blame.line}):
        also = "" if blame.line in lines else f". See also {quoted(trial.path, blame.line)}"
        more = blame.more and f"{'' if also.endswith('.') else '.'}{blame.more}"
        return replace(named, hint=named.hint + also + more)
    if lines & _lines(Finding("", "error", blame.more, "")):
        also = f". It shows in {quoted(trial.path, blame.line)}"
        return replace(named, hint=named.hint + also)
    if blame.key not in row.get("at", ()):
        return finding(trial, part, blame)
    hint = re.sub(r" ?Look at line \d+ of .*", "", named.hint)
    if made := unscaled(trial.watch, blame.key, blame.line) if named.rule == "scale" else 0:
        return replace(named, hint=f"{hint} Look at {quoted(trial.path, made)}")
    look = f" Look at {quoted(trial.path, blame.line)}{blame.more and '.'}{blame.more}"
    return replace(named, hint=hint + look)


def looked(trial: Trial, part: StepPart, finding: Finding) -> Finding:
    """A finding with the line to look at, where it tells none."""
    if finding.severity != "error" or _lines(finding):
        return finding
    blame, line = blamed(trial), trial.source.line(trial.names[part.name])
    if blame is None and trial.source.function(trial.names[part.name]) is not None:
        line = trial.watch.line if trial.watch is not None else None
    if attribute := re.search(r"`self\.(\w+)`", finding.message):
        line = trial.source.line(f"{trial.names[part.owner or part.name]}.{attribute[1]}") or line
    at, more = (blame.line, blame.more) if blame else (line, "")
    if blame is None and at and trial.watch is not None and trial.watch.line == at:
        right = twin_gives(trial)
        more = sources(trial.watch, at, {*expectations(right, trial.watch)} if right else set())
    look = f" Look at {quoted(trial.path, at)}{more and '.'}{more}" if at else ""
    return replace(finding, hint=(finding.hint + look).strip())


def _lines(finding: Finding) -> set[int]:
    said = f"{finding.message} {finding.hint}"
    return {int(one) for one in re.findall(r"\bline (\d+)", said, re.IGNORECASE)}


def finding(trial: Trial, part: StepPart, blame: Blame) -> Finding:
    hint, key = blame.hint or trial.step.hint(part, blame.key), blame.key
    if hint == part.hint and key != "return" and key not in part.fill:
        theirs = trial.watch.twin.statements
        own = [ast.unparse(one).splitlines()[0] for one in theirs if key in given_by(one)]
        hint = f"The template has `{own[0]}`." if own else hint
        hint = f"`{key}` is the number of {LETTERS[key]}." if key in LETTERS else hint
        here = trial.watch.at(blame.line)
        named = names(here, context=ast.Store) if isinstance(here, ast.Assign) else set[str]()
        if key in named & trial.watch.arguments - {*part.same}:
            hint = f"What is below needs `{key}` as it was given: give this a name of its own."
    if not blame.hint and key == "weights" and without_softmax(trial, part):
        hint = "Nothing here is a softmax: `weights = torch.softmax(…, dim=-1)`, then the dropout."
    return Finding(part.rule, "error", blame.said, f"{hint}{blame.more}".strip())


def failed(trial: Trial, part: StepPart, error: BaseException) -> Finding | None:
    """A finding on what a part raised; None where headwise's own code in a blank did."""
    watch: Watch | None = trial.watch
    if watch is not None and watch.failed and (blame := blamed(trial)):
        return finding(trial, part, blame)
    frames = [one for one in _frames(error) if one.tb_frame.f_code.co_filename == str(trial.path)]
    own = [one for one in frames if not _is_done(trial, part, one.tb_lineno)] or frames
    line = own[-1].tb_lineno if own else 0
    if line in trial.ours:
        return None
    if own:  # what it called is of no interest
        error = error.with_traceback(
            TracebackType(None, own[-1].tb_frame, own[-1].tb_lasti, own[-1].tb_lineno)
        )
    said, cure = told(error, trial.path), _cure(trial, part, error, line)
    if cure.startswith("Did you mean"):
        said = re.sub(r"; did you mean `\w+`\?", "", said)  # once is enough
    said, more = f"`{part.short}` fails: {said}.", ""
    hint = _hint(trial, part, line)
    if watch is not None and watch.line == line:
        known = expectations(right, watch) if (right := twin_gives(trial)) else {}
        for name in given_by(watch.at(line)) & {*known} & {*part.shapes}:
            hint = trial.step.hint(part, name) if _is_way(watch, known[name]) else hint
        more = sources(watch, line, {*known})
    return Finding(part.rule, "error", said, cure or hint + more)


def _is_way(watch: Watch, known: Expected) -> bool:
    """Whether a variable, at the end, is still on its way."""
    own = [one for one in watch.given if one.name == known.final[0].name]
    return bool(own) and not any(fits(own[-1], right, False) for right in known.final)


def _frames(error: BaseException) -> list[TracebackType]:
    frames, one = list[TracebackType](), error.__traceback__
    while one is not None:
        frames.append(one)
        one = one.tb_next
    return frames


def _is_done(trial: Trial, part: StepPart, line: int) -> bool:
    """Whether a line is of another part, which is right: what calls it like that is not."""
    owner, function = trial.source.owner_at(line)
    short = function.name if function else ""
    kind = part.owner or (part.name if part.name != short else "")
    if short == "__init__":
        return owner != trial.names.get(kind, kind) and owner in trial.names.values()
    name = f"{owner}.{short}" if owner else short
    return name in trial.names.values() and name != trial.names[part.name]


def _cure(trial: Trial, part: StepPart, error: BaseException, line: int) -> str:
    """What to do about an exception that tells it."""
    if "before Module.__init__() call" in str(error):
        return "Begin `__init__` with `super().__init__()`: it makes room for the layers."
    function = trial.source.function(trial.names[part.name])
    if isinstance(error, TypeError) and part.owner and function and not _takes_self(function):
        return has_self(function)
    unknown = re.search(r"object has no attribute '(\w+)'", str(error))
    if isinstance(error, AttributeError) and unknown:
        own = trial.source.attributes(trial.source.owner_at(line)[0])
        return "".join(f"Did you mean `{one}`?" for one in _near(unknown[1], own))
    if "view size is not compatible" in str(error):
        return (
            "After a transpose, `view` cannot join axes: write `.reshape(…)`, or `.contiguous()` "
            "before the `.view(…)`."
        )
    return ""


def _takes_self(function: Function) -> bool:
    takes = [*function.args.posonlyargs, *function.args.args]
    return bool((takes and takes[0].arg == "self") or function.decorator_list)


def has_self(function: Function) -> str:
    return f"Line {function.lineno}: write `self` first, `def {function.name}(self, …)`."


def _hint(trial: Trial, part: StepPart, line: int) -> str:
    """The hint of the blank to which a line belongs, which may be another part's."""
    inside = trial.source.owner_at(line)[1]
    here = innermost(nodes(ast.stmt, *inside.body), line) if inside is not None else None
    first = here.lineno if here is not None else line
    for other in trial.step.parts:
        name = trial.names[other.name]
        function = trial.source.function(name)
        if function is None:
            if line and other.owner and trial.source.line(name) == first:
                return other.hint
        elif function.lineno < line <= (function.end_lineno or 0):
            return trial.step.hint(other, key_at(function, other, line))
    return part.hint


def meant(trial: Trial, name: str, line: int) -> str:
    """What was meant by a name that nothing gives a meaning to: `self.W_query`, or ``."""
    owner, function = trial.source.owner_at(line)
    own = trial.source.attributes(owner)
    if name in own:
        return f"self.{name}"
    inside = [function] if function is not None else []
    known = names(*inside) - {name} | {node.arg for node in nodes(ast.arg, *inside)}
    known |= trial.source.bound
    return "".join(one if one in known else f"self.{one}" for one in _near(name, known | own))


def _near(name: str, known: set[str]) -> list[str]:
    return difflib.get_close_matches(name, sorted(known - {name}), n=1, cutoff=0.75)

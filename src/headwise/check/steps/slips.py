"""Tell the slips of the syntax that explain a fault, and how to mend them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace

from ..files.syntax import Function, names, nodes, quoted
from ..findings.verdict import Finding
from .base import StepPart, Trial
from .watching import Watch, changed

SHARES = {"softmax", "Softmax", "exp"}


def explained(trial: Trial, part: StepPart, finding: Finding) -> Finding:
    """The finding; where a slip explains it, with the cure for that."""
    function = trial.source.function(trial.names[part.name])
    if finding.severity != "error" or function is None:
        return finding
    if finding.rule == "dropout-in-eval" and (line := _made_anew(function)):
        said = finding.message.replace("(F.dropout)", "(a new nn.Dropout)")
        hint = (
            "A module that is made at each call is always in training mode. Make it once, in "
            "`__init__`, and call `self.dropout(…)` here"
        )
        return replace(finding, message=said, hint=f"{hint}: {quoted(trial.path, line)}")
    told = f"{finding.message} {finding.hint}"
    for line, hint in (*_commas(function), *_returns(trial, function)):
        if f"line {line} of" in told:
            at = "" if f"line {line} of" in finding.message else f" ({quoted(trial.path, line)})"
            return replace(finding, hint=f"{hint}{at}.")
    return finding


def _commas(function: Function) -> Iterator[tuple[int, str]]:
    """Lines that end with a comma, which makes a tuple of one."""
    for node in nodes(ast.stmt, function):
        if isinstance(node, (ast.Assign, ast.Return)) and isinstance(node.value, ast.Tuple):
            bare = isinstance(node, ast.Return) or isinstance(node.targets[0], ast.Name)
            if bare and len(node.value.elts) == 1:
                yield node.lineno, "The comma at the end of the line makes a tuple: take it away"


def _returns(trial: Trial, function: Function) -> Iterator[tuple[int, str]]:
    """The `return` that was reached, where it stands in a loop without a condition."""
    reached = trial.watch.line if trial.watch is not None else 0
    for loop in nodes(ast.For, function):
        for node in loop.body:
            if isinstance(node, ast.Return) and node.lineno == reached:
                said = f"The `return` stands in the loop of line {loop.lineno}, and ends it at its "
                yield node.lineno, f"{said}first turn: indent it as far as the `for`"


def _made_anew(function: Function) -> int:
    """The line that makes a Dropout at each call, or 0."""
    calls = (one for one in nodes(ast.Call, function) if ast.unparse(one.func).endswith("Dropout"))
    return next((one.lineno for one in calls), 0)


def dropped(trial: Trial, told: str) -> str:
    """Where a function drops something, where that is not told."""
    calls = nodes(ast.Call, *trial.watch.body)
    lines = {one.lineno for one in calls if "dropout" in ast.unparse(one.func).lower()}
    said = [quoted(trial.path, one) for one in sorted(lines)]
    if said and all(one in told for one in said):
        return ""
    return f" Here it is at work in {', and in '.join(said)}." if said else " Here nothing drops."


def without_softmax(trial: Trial, part: StepPart) -> bool:
    """Whether neither a function nor what it calls makes shares."""
    return not SHARES & trial.source.uses(trial.names[part.name])


def unscaled(watch: Watch, key: str, line: int) -> int:
    """The line that makes the scores, where that of the weights divides nothing; else 0."""
    here = watch.at(line)
    if key != "weights" or here is None or [*nodes(ast.Div, here), *nodes(ast.Mult, here)]:
        return 0
    made = next((one.line for one in watch.given if one.name == "scores"), 0)
    return 0 if made in watch.trial.ours else made


def twice(function: Function, name: str) -> str:
    """What to say of a variable that nothing sets, where a line sets another one a second time
    before anything reads it."""
    unread: set[str] = set()
    for one in function.body:
        new = changed(one) if isinstance(one, ast.Assign) else set[str]()
        unread -= names(one, context=ast.Load)
        if name in names(one, context=ast.Load):
            return ""
        if again := [each for each in new & unread if isinstance(one, ast.Assign)]:
            said = f"`{name}` is never set; line {one.lineno} sets `{again[0]}` again"
            return f"{said}: did you mean `{name}` there?"
        unread |= new
    return ""

"""Find the line at fault: the first variable that differs from the step's twin.

The twin is the step's template with headwise's code in its blanks. It gets the same calls with the
same weights, and the values of all its expressions are recorded as possible values of variables
in the file. If a part differs from its twin, the search goes back from its result to the first line
that computes a wrong value from correct variables.
"""

from __future__ import annotations

import ast
import contextlib
import itertools
from collections.abc import Callable, Iterator
from copy import copy
from functools import cache, cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch

from ..syntax import ParsedFile, names, nodes
from .base import ROWS, StepPart, Trial, template
from .filling import fill
from .tracing import HIDDEN, LISTS, Event, Numbers, Watch, changed, is_growth, plain

TRIVIAL = torch.tensor([0.0, 1.0, 2.0, 0.5, -1.0, -2.0]).double()


def twin(trial: Trial) -> Trial:
    """Return the trial of the step's template, filled by headwise."""
    step, path = trial.step, Path(f"<{trial.step.name}>")
    code = {row["name"]: row.get("fill", {}) for row in ROWS[step.like]["parts"]}
    source = ParsedFile(ast.unparse(fill(ParsedFile(template(step.like)), code)[0]), str(path))
    module, names = ModuleType(path.name), {part.name: part.name for part in step.parts}
    exec(source.code, vars(module))
    return Trial(step, source, path, names, module, results={"of": trial})


class Twin:
    """The values of variables and expressions in a call of the twin's part."""

    def __init__(self, results: Trial, part: StepPart, call: Callable[[Trial], Any]) -> None:
        self.part, self.watch = part, Watch(results, part)
        self.out = self.watch.run(call)
        body = self.watch.function.body if self.watch.function is not None else []
        blank = ParsedFile(template(results.step.like)).function(part.name)
        self.arguments = {one.arg for one in nodes(ast.arg, self.watch.function or ast.Pass())}
        self.named = names(*(blank.body if blank else []), context=ast.Store) | self.arguments
        self.made_of: dict[str, set[str]] = {}
        for one in nodes(ast.stmt, *body):
            for name in changed(one):
                used = names(one.iter) if isinstance(one, ast.For) else names(one)
                self.made_of[name] = self.made_of.get(name, set()) | used
        self.finals, self.right, self.early = map(cache, (self._finals, self._right, self._early))
        self.above = cache(self._all_above)

    @cached_property
    def seen(self) -> list[tuple[set[str], set[str], Numbers]]:
        return [*self._expressions()]

    @cached_property
    def values(self) -> list[Numbers]:
        """All values, and each row of nested lists."""
        given = [*self.watch.events, *self.watch.returns]
        every = [one.value for one in given if one.value] + [one for *_, one in self.seen]
        return every + [row for one in every for row in _rows(one)]

    def _expressions(self) -> Iterator[tuple[set[str], set[str], Numbers]]:
        """Yield the value of each expression, with its names and the variables that it defines."""
        scope, known, waiting = (
            vars(self.watch.trial.module),
            dict[str, Any](),
            [*self.watch.events],
        )
        for frame, line, time in self.watch.ran:
            while waiting and waiting[0].time < time:
                given = waiting.pop(0)
                known[given.name] = given.raw
            statement = self.watch.statement(frame, line)
            for node in nodes(ast.expr, *([statement] if statement is not None else [])):
                if isinstance(getattr(node, "ctx", ast.Load()), ast.Load):
                    yield from _value(node, scope | known, names(node), changed(statement))
        known |= {one.name: one.raw for one in waiting}
        for name, text in ((name, each) for name, its in self.part.right.items() for each in its):
            yield from _value(ast.parse(text, mode="eval").body, scope | known, {name}, set())

    def _all_above(self, *of: str) -> set[str]:
        """Return the given variables and all variables that they are computed from."""
        known, waiting = set[str](), [*of]
        while waiting:
            known.add(name := waiting.pop())
            waiting += self.made_of.get(name, set()) - known
        return known

    def _finals(self, name: str) -> list[Numbers]:
        """Return the values of a variable; for a growing list, only the final ones."""
        return [one[-1].value for one in self.watch.turns(name) if one[-1].value is not None]

    def _right(self, name: str) -> list[Numbers]:
        """Return the possible values of a variable: its own, or those computed from it."""
        if name == "return":
            return [one.value for one in self.watch.returns if one.value is not None]
        results = [value for used, _, value in self.seen if name in self.above(*used)]
        return [*self.finals(name), *results] if name in self.named else self.values

    def _early(self, name: str) -> list[Numbers]:
        """Return the intermediate values of a variable."""
        own = [one.value for one in self.watch.events if one.name == name and one.value]
        above = self.above(name)
        return [*own, *(value for _, targets, value in self.seen if targets & above)]


def _value(
    node: ast.expr, scope: dict[str, Any], used: set[str], targets: set[str]
) -> Iterator[tuple[set[str], set[str], Numbers]]:
    with contextlib.suppress(Exception):  # large scores, or names in a comprehension
        value = plain(eval(compile(ast.Expression(node), "<twin>", "eval"), scope))
        if value is not None and not isinstance(node, ast.Constant):
            yield used, targets, value


def _rows(value: Numbers) -> list[Numbers]:
    """Return the rows of nested lists."""
    kind = "tensor" if value.kind == "tensors" else value.kind
    many = value.numbers.dim() > 1 and value.kind in LISTS
    return [Numbers(kind, row) for row in value.numbers] if many else []


class BlamedLine(NamedTuple):
    """The line at fault, its statement, and the wrong variable, if any."""

    line: int
    statement: ast.stmt | None
    event: Event | None = None


class Search:
    """Compare a watched call with its twin's, and find the line at fault."""

    def __init__(self, watch: Watch, twin: Twin) -> None:
        self.watch, self.twin = watch, twin
        self.sizes = watch.trial.step.sizes if twin.part.shapes else {}

    def fault(self, drops: bool = False) -> BlamedLine | None:
        """Return the line at fault, or None if it is not in the file.

        Args:
            drops: only dropout differs, so a line with dropout is at fault.
        """
        watch = self.watch
        for one in watch.events if drops else ():
            statement = watch.statement(one.frame, one.line)
            calls = nodes(ast.Call, *([statement] if statement is not None else []))
            drop = any("dropout" in ast.unparse(each.func).lower() for each in calls)
            if drop and self.state(one) == "wrong":
                return BlamedLine(one.line, statement, one)
        if watch.failed is not None and watch.failed[0]:
            frame, line, _ = watch.failed
            return self._back(frame, line, watch.frames[frame].time)
        pairs = [*zip(watch.returns, self.twin.watch.returns, strict=False)]
        for own, right in reversed(pairs):  # the last call is the least ambiguous
            if not _agree(own.value, right.value):
                return self._back(own.frame, own.line, own.time)
        return None

    def at(self, line: int) -> BlamedLine:
        """Return the line at fault in the only call."""
        return self._back(next(iter(self.watch.frames)), line, self.watch.time + 1)

    def first(self) -> int | None:
        """Return the first line that computes a wrong value, or that ends the function."""
        lines = [one.line for one in self.watch.events if self.state(one) == "wrong"]
        return next(iter([*lines, *(one.line for one in self.watch.returns)]), None)

    def agrees(self, out: Any) -> bool:
        """Return True if the result of a call equals the twin's."""
        own, right = plain(out), plain(self.twin.out)
        nothing = own is right and (out is None) == (self.twin.out is None)
        return nothing or _agree(own, right)

    def state(self, one: Event) -> str:
        """Return the state of a variable: "right", "early" (an intermediate value) or "wrong"."""
        value, name, twin = one.value, one.name, self.twin
        is_argument = name != "return" and self.watch.statement(one.frame, one.line) is None
        if is_argument:
            return "right"
        if value is None:
            return "wrong" if twin.finals(name) else "right"
        numbers, is_named = value.numbers, name in twin.named
        if isinstance(one.raw, tuple) and not is_named and len(value.shape) == 1:  # a shape
            shapes = (each.shape[: len(one.raw)] for each in twin.values)
            return "right" if [*one.raw] in shapes else "wrong"
        if name in self.sizes and not value.shape:
            is_size = value.kind == "int" and numbers.item() == self.sizes[name]
            return "right" if is_size else "wrong"
        filled = any(one in turn[:-1] for turn in self.watch.turns(name))  # it is filled in later
        if filled and not bool(numbers.any()):
            return "right"
        if not is_named and not value.shape:
            sizes = torch.tensor([*self.watch.trial.step.sizes.values()]).double()
            every = torch.cat([TRIVIAL, sizes, *(each.numbers.flatten() for each in twin.values)])
            is_known = bool(torch.isclose(every, numbers, rtol=1e-4).any())
            return "right" if is_known or abs(numbers.item()) >= -HIDDEN else "wrong"
        turn = self.turn(one)
        known = twin.right(name) if turn is None else [turn]
        final = value.kind == "tensors" and any(each.kind == "tensors" for each in known)
        rows = [] if is_named or final else _rows(value)
        if value.is_one_of(known) or (rows and all(row.is_one_of(known) for row in rows)):
            return "right"
        grows = filled or is_growth(self.watch.statement(one.frame, one.line))
        if turn is not None and not grows:
            return "wrong"
        early = known if turn is not None else [*known, *twin.early(name)]
        return "early" if any(value.fits(each) for each in early) else "wrong"

    def turn(self, one: Event) -> Numbers | None:
        """Return the value of the twin's variable in the same iteration of a loop, if any."""
        own, right = (each.turns(one.name) for each in (self.watch, self.twin.watch))
        together = len(own) == len(right) or (self.watch.failed and len(own) < len(right))
        if one.name not in self.twin.named or not self.watch.loops(one) or not together:
            return None
        pairs = zip(own, right, strict=False)
        return next((its[-1].value for each, its in pairs if one in each), None)

    def _back(self, frame: int, line: int, time: int, event: Event | None = None) -> BlamedLine:
        """Search back from a line for the first that computes a wrong value from right ones."""
        watch, named = self.watch, self.twin.named
        statement = watch.statement(frame, line)
        if statement is None:
            return BlamedLine(line, None, event)
        before = {one.name: one for one in watch.events if one.frame == frame and one.time < time}
        read = watch.trial.ours.get(line) or _read(statement)
        used = sorted((before[name] for name in read & {*before}), key=lambda e: e.time)
        for one in used:
            if self.state(one) == "wrong":
                return self._back(frame, one.line, one.time, one)
        used = [one for one in used if event is None or one.name != event.name]
        early = [one for one in used if one.name in named and self._is_early(one)]
        early = [one for one in early if not self._is_there(one, before)]
        theirs = self.twin.watch.events
        finals = {one.name: [each.raw for each in theirs if each.name == one.name] for one in early}
        ours = line in watch.trial.ours  # filled by headwise, so right
        if early and (ours or self._is_cured(statement, before, event, finals)):
            deeper = self._back(frame, early[0].line, early[0].time, early[0])
            return self._unfinished(early[0], statement) if deeper.event is early[0] else deeper
        for one in (each for each in used if each.name not in named):
            deeper = self._back(frame, one.line, one.time, one)  # it may be right in another place
            is_named = deeper.event is not None and deeper.event.name in named
            if deeper.event is not one and (is_named or (one.value and not one.value.shape)):
                return deeper
            if self._is_cured(statement, before, event, {one.name: self._instead(one)}):
                return self._unfinished(one, statement)
        for one in watch.events:  # the result of a helper
            if one.name == "return" and one.caller == (frame, time) and one.value:
                hands_on = event is not None and event.value and one.value.fits(event.value)
                if hands_on or not one.value.is_one_of(self.twin.values):
                    return self._back(one.frame, one.line, one.time, one)
        return BlamedLine(line, statement, event)

    def _is_early(self, one: Event) -> bool:
        """Return True if a variable has an intermediate value, or is an argument that changed."""
        given = one.value is None or one.value.is_one_of(self.twin.finals(one.name))
        return self.state(one) == "early" or (one.name in self.twin.arguments and not given)

    def _is_there(self, early: Event, before: dict[str, Event]) -> bool:
        """Return True if another variable holds the final value of an intermediate one."""
        rest = (one.value for one in before.values() if one.name != early.name and one.value)
        return any(value.is_one_of(self.twin.finals(early.name)) for value in rest)

    def _instead(self, one: Event) -> list[Any]:
        """Return other values for a variable that the twin lacks: numbers, the inverted mask,
        and longer lists."""
        value, known = one.value, self.twin.values
        if isinstance(one.raw, torch.Tensor):
            return [~one.raw] if one.raw.dtype == torch.bool and self.twin.part.owner else []
        if value is not None and value.kind in ("int", "float") and one.name not in self.sizes:
            every = {each.numbers.item() for each in known if each.kind == value.kind}
            return [type(one.raw)(each) for each in every]
        if value is None or value.kind not in LISTS or not value.shape:
            return []
        longer = (each for each in known if value.shape[0] < (each.shape or [0])[0])
        return [each.numbers.tolist() for each in longer if value.fits(each)]

    def _is_cured(
        self,
        statement: ast.stmt,
        before: dict[str, Event],
        event: Event | None,
        instead: dict[str, list[Any]],
    ) -> bool:
        """Return True if a statement gives right results with other values of its variables."""
        targets = {event.name} if event is not None else changed(statement)
        if isinstance(statement, ast.Return):
            targets, target = {"return"}, ast.Name("return", ast.Store())
            statement = ast.Assign([target], statement.value or ast.Constant(None))
        code = compile(ast.fix_missing_locations(ast.Module([statement], [])), "<again>", "exec")
        for others in itertools.zip_longest(*instead.values()):
            scope = vars(self.watch.trial.module) | {name: it.raw for name, it in before.items()}
            pairs = zip(instead.items(), others, strict=True)
            scope |= {key: copy(each[-1] if it is None else it) for (key, each), it in pairs}
            with contextlib.suppress(Exception):
                exec(code, scope)
                results = [(name, plain(scope[name])) for name in targets]
                known = {name: [*self.twin.right(name), *self.twin.early(name)] for name in targets}
                if all(value and value.is_one_of(known[name]) for name, value in results):
                    return True
        return False

    def _unfinished(self, one: Event, statement: ast.stmt) -> BlamedLine:
        """Return the line at fault for an intermediate variable: for a short list the `return` that
        ends the loop, or the loop that fills it."""
        here, around = self.watch.statement(one.frame, one.line), self.watch.loops(one)
        if around and is_growth(here):
            ends = isinstance(statement, ast.Return) and statement in ast.walk(around[-1])
            here = statement if ends else around[-1]
        return BlamedLine(here.lineno if here is not None else one.line, here, one)


def _agree(own: Numbers | None, right: Numbers | None) -> bool:
    return bool(own and right and own.shape == right.shape and own.fits(right))


def _read(statement: ast.stmt) -> set[str]:
    """Return the names that a statement reads; for loops and conditions, only in the header."""
    header = {ast.For: "iter", ast.If: "test", ast.While: "test"}.get(type(statement))
    root = getattr(statement, header) if header else statement
    own = names(root.target) if isinstance(root, ast.AugAssign) else set[str]()
    bound = names(*(one.target for one in nodes(ast.comprehension, root)))
    return own | names(root, context=ast.Load) - bound

"""Find the first variable that is wrong, and the line that made it so.

The step's template, with headwise's own code in its blanks, is the file's twin: it is called with
the same input and the same weights, and the file's variables are compared with the twin's. So a
fault is laid to its line, whether the call gave other numbers, another shape, or an error further
down.
"""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..files.syntax import Source, code_at, names, nodes, quoted
from .base import Trial, template
from .filling import fill
from .watching import Given, Plain, Watch, changed, given_by

HIDDEN = -1e4
"""Scores below it are hidden, with whatever number."""
MIXED = {"floats", "Values"}
KEPT = "Take it away: `{name}` stays as it was given. What is made of it gets a name of its own."
NAN = ": 0 times infinity is NaN, and so are inf - inf and inf // 2."


class Blame(NamedTuple):
    """The first variable that is wrong, or "return", the line that made it so, and words on it."""

    key: str
    line: int
    said: str
    more: str = ""  # the lines that feed it
    hint: str = ""  # where the mistake itself is known


# --- the twin -------------------------------------------------------------------------------------


def twin(trial: Trial) -> Trial | None:
    """The trial of the step's template, filled by headwise; None where it has no code for it."""
    step = trial.step
    if "twin" not in trial.made and any(part.fill for part in step.parts):
        path, module = Path(f"<{step.name}>"), ModuleType(step.name)
        code = {part.name: part.fill for part in step.parts}
        source = Source(ast.unparse(fill(Source(template(step.name)), code)[0]), str(path))
        exec(source.code, vars(module))
        parts = {part.name: part.name for part in step.parts}
        trial.made["twin"] = Trial(step, source, path, parts, module)
    return trial.made.get("twin")


def twin_gives(trial: Trial) -> Watch | None:
    """The twin's part, followed in the same call; None where it cannot be called like that."""
    watch, other = trial.watch, twin(trial)
    if watch is None or other is None:
        return None
    if watch.twin is None:
        watch.twin = Watch(other, watch.part, watch.sizes, watch.call)
        try:
            watch.twin.out = watch.twin.run()
        except Exception:  # the file's layers are of other sizes, say, which is another finding
            watch.twin.failed = True
    return None if watch.twin.failed else watch.twin


def agrees(trial: Trial, out: Any) -> bool:
    """Whether what was given is what the twin gives; so too where that has nothing to say."""
    right = twin_gives(trial)
    want = right and right.out
    return not isinstance(want, Tensor) or torch.allclose(out, want, rtol=1e-3, atol=1e-4)


class Expected(NamedTuple):
    """What a variable may hold in the end, the twin's own value first, and on its way."""

    final: list[Given]
    ways: list[Given]
    wrong: Sequence[tuple[Given, str]] = ()  # what known mistakes give, with what to do


# --- the first variable that is wrong -------------------------------------------------------------


def blamed(trial: Trial) -> Blame | None:
    """Whatever made the call that was followed go wrong; None where that cannot be told."""
    watch, right = trial.watch, twin_gives(trial)
    if right is None or not watch.statements:
        return None
    known = expectations(right, watch)
    firsts = [one for name in known if (one := _first_wrong(watch, name, known)) is not None]
    if firsts:
        return min(firsts, key=lambda one: one[0])[1]
    if watch.failed or watch.line in trial.ours:
        return None
    said = f"`{watch.part.short}` gives something else than it should"
    at = quoted(trial.path, watch.line)
    return Blame("return", watch.line, f"{said} ({at}).", sources(watch, watch.line, {*known}))


def expectations(right: Watch, watch: Watch) -> dict[str, Expected]:
    """What each variable of the twin may hold."""
    part, last, known = right.part, right.last, dict[str, Expected]()
    scope = vars(right.trial.module) | {name: value for name, (value, _) in last.items()}

    def made(name: str, texts: Sequence[str]) -> Iterator[Given]:
        for text in texts:
            with contextlib.suppress(Exception):  # of large scores, say
                yield Given.of(0, name, eval(text, scope))

    turns = {one for loop in right.loops() for one in given_by(loop)}
    for name in {*part.same, *right.arguments}.union(*map(given_by, right.statements)):
        own = [one for one in right.given if one.name == name]
        if not own and name in last:
            own = [Given.of(0, name, last[name][0])]
        final = [*own[-1:], *made(name, part.same.get(name, ()))]
        ways = [*own[:-1], *made(name, part.ways.get(name, ()))]
        hints = part.wrong.get(name, {})
        wrong = [(one, hint) for text, hint in hints.items() for one in made(name, [text])]
        known[name] = Expected(final, ways, wrong)
    for letter, size in watch.sizes.items():
        if letter.isupper():
            known.setdefault(letter, Expected([Given.of(0, letter, size)], []))

    def is_judged(name: str) -> bool:
        value = known[name].final[0].value if known[name].final else None
        return value is not None and (value.kind == "int" or name not in turns)

    return {name: one for name, one in known.items() if is_judged(name)}


def _first_wrong(watch: Watch, name: str, known: dict[str, Expected]) -> tuple[int, Blame] | None:
    """The line in which a variable went wrong for good, and the blame for it."""
    final, ways, wrong = known[name]
    theirs = (one for one in watch.given if one.line not in watch.trial.ours)
    events = [one for one in theirs if one.name == name and one.shape is not None]
    if not events or name == "_":
        return None
    strict = hasattr(getattr(watch.trial.module, "Value", None), "backward")
    right = [any(fits(one, each, strict) for each in (*final, *ways)) for one in events]
    last, want = events[-1], final[0]
    if right[-1]:
        arrived = any(fits(last, one, strict) and not _is_short(last, one) for one in final)
        if arrived or not _is_whole(watch, name, _is_short(last, want)):
            return None
    good = max((n for n, ok in enumerate(right) if ok), default=-1)
    time = min(good + 1, len(events) - 1)
    if want.value is not None and want.value.kind in MIXED:
        time = len(events) - 1  # it may be filled number by number
    while good > 0 and good == time and events[time - 1].is_like(events[time]):
        good = time = time - 1  # what changed nothing is not at fault
    one = events[time]
    at = _loop_at(watch, one) if _is_short(last, want) else one.line
    blame = _words(watch, one._replace(line=at), last, want, {*known})
    if time and any(fits(events[time - 1], each, strict) for each in final):
        blame = blame._replace(hint=anew(watch, name, one, events[time - 1]))
    late = [each.line for each in events[time + 1 :] if not each.is_like(one)]
    more = (
        f" Line {late[0]} comes too late: `{code_at(watch.trial.path, late[0])}`." if late else ""
    )
    hints = (hint + more for made, hint in wrong if fits(one, made, strict))
    return one.line, blame._replace(hint=next(hints, blame.hint))


def _is_short(got: Given, right: Given) -> bool:
    """Whether a list holds less than the right one."""
    lists = right.value is not None and right.value.kind in MIXED
    return lists and bool(got.shape) and got.shape < (right.shape or [])


def _is_whole(watch: Watch, name: str, short: bool) -> bool:
    """Whether a variable is what it is to be, where a line failed: nothing below changes it, nor
    the loop's next turn; of a list that is too short, it is enough that nothing below does."""
    below = watch.statements if short else watch.body
    after = [one for one in below if (one.end_lineno or one.lineno) >= watch.line]
    inner = after if short else nodes(ast.stmt, *after)
    return not watch.failed or not any(name in given_by(one) for one in inner)


def fits(got: Given, right: Given, strict: bool) -> bool:
    """Whether a value is the right one, or a list that is on its way to it."""
    one, other = got.value, right.value
    if one is None or other is None:
        return one is other
    if not one.numbers.numel() or not other.numbers.numel():
        return other.kind in MIXED and not one.numbers.numel()
    if (other.kind == "int" != one.kind) or (strict and {one.kind, other.kind} == MIXED):
        return False
    a, b = (value.numbers.clamp(min=HIDDEN) for value in (one, other))
    if other.kind in MIXED:
        if a.dim() != b.dim():
            return False
        b = b[: len(a)]
    a, b = (value.reshape([size for size in value.shape if size > 1]) for value in (a, b))
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-5)


def _loop_at(watch: Watch, one: Given) -> int:
    """The line to blame for a list that is too short: it is begun anew in the loop that fills it,
    a `return` ends that loop, or the loop has too few turns."""
    loops = [loop for loop in watch.loops() if holds(loop, one.line)]
    if not loops or not one.shape or len(one.shape) > 1:
        return one.line
    loop = max(loops, key=lambda each: each.lineno)
    begun = [each.lineno for each in nodes(ast.Assign, loop) if one.name in changed(each)]
    if begun:
        return begun[0]
    ended = holds(loop, watch.line) and isinstance(watch.at(watch.line), ast.Return)
    return watch.line if ended else loop.lineno


def holds(node: ast.stmt, line: int) -> bool:
    return node.lineno < line <= (node.end_lineno or line)


def anew(watch: Watch, name: str, one: Given, before: Given) -> str:
    """What to say of a line that drops what is right, and makes it anew of another variable."""
    here = watch.at(one.line)
    if not isinstance(here, ast.Assign) or name in names(here.value):
        return ""
    known = {"self", *watch.trial.source.bound}
    used = [each for each in nodes(ast.Name, here.value) if each.id not in known]
    if len(used) != 1:
        return ""
    other, used[0].id = used[0].id, name
    meant, used[0].id = ast.unparse(here), other
    return (
        f"It makes `{name}` anew, of `{other}`, and drops the `{name}` of line {before.line}, "
        f"which is right. Did you mean `{meant}`?"
    )


def written(watch: Watch) -> Blame | None:
    """An argument that is changed in place, and so is the caller's."""
    for name, line in watch.written.items():
        said = f"`{name}` is the caller's, and is written into ({quoted(watch.trial.path, line)})."
        return Blame(name, line, said, hint=KEPT.format(name=name))
    return None


# --- words ----------------------------------------------------------------------------------------


def _words(watch: Watch, one: Given, last: Given, final: Given, known: set[str]) -> Blame:
    """What is wrong with what a variable was given."""
    got, want, name = one.value, final.value, one.name
    assert want is not None
    at = quoted(watch.trial.path, one.line)
    if watch.written.get(name) == one.line and (blame := written(watch)):
        return blame
    if got is None:
        return Blame(name, one.line, f"`{name}` holds something else than numbers ({at}).")
    letters = watch.part.shapes.get(name, "").split()
    if got.kind == "int" or want.kind == "int":
        said = f"`{name}` is {got.numbers.item():g}; it should be {want.numbers.item():g} ({at})."
        if got.numbers.equal(want.numbers):
            said = f"`{name}` is a {got.kind}; it should be a whole number ({at})."
        return Blame(name, one.line, said)
    if bool(got.numbers.isnan().any()):
        return Blame(name, one.line, f"`{name}` holds NaN from here on ({at}){NAN}")
    if final.shape not in (one.shape, last.shape):
        right = f"[{', '.join(letters)}], here {final.shape}" if letters else f"{final.shape}"
        right = right if len(final.shape or ()) != 1 else f"a list of {(final.shape or [0])[0]}"
        said = f"`{name}` is {_shape(last.shape, final.shape)}; it should be {right}"
        said += "" if one.shape == last.shape else ", and goes wrong here"
        return Blame(name, one.line, f"{said} ({at}).", sources(watch, one.line, known))
    if {got.kind, want.kind} == MIXED:
        said = f"`{name}` holds plain floats, which remember nothing; Values belong there ({at})."
        return Blame(name, one.line, said)
    said = f"`{name}` holds other numbers than it should ({at})"
    return Blame(name, one.line, f"{said}{_example(got, want)}.", sources(watch, one.line, known))


def _shape(got: list[int] | None, want: list[int] | None) -> str:
    if got is None or len(want or ()) != 1:
        return str(got)
    return f"a list of {got[0]}" if len(got) == 1 else "one number" if not got else f"lists, {got}"


def _example(got: Plain, want: Plain) -> str:
    """The first number that is another."""
    if got.numbers.shape != want.numbers.shape:
        return ""
    apart = ~torch.isclose(got.numbers, want.numbers, rtol=1e-4, atol=1e-5)
    first = tuple(apart.nonzero()[0].tolist()) if bool(apart.any()) else ()
    if not first:
        return ""
    here, right = got.numbers[first].item(), want.numbers[first].item()
    return f": {list(first)} is {here:.4g}, and should be {right:.4g}"


def sources(watch: Watch, line: int, known: set[str]) -> str:
    """The lines that give what a line uses and the template does not name."""
    lines, waiting = {line}, [line]
    while waiting:
        here = watch.at(waiting.pop())
        if here is None:
            continue
        used = names(here.iter if isinstance(here, ast.For) else here) - known
        other = {loop.lineno for loop in watch.loops() if not holds(loop, here.lineno)}
        given = {one.line for one in watch.given if one.name in used} - other
        waiting += given - lines - watch.trial.ours
        lines |= given | _helpers(watch.trial, here)
    said = [f"line {one}: `{code_at(watch.trial.path, one)}`" for one in sorted(lines - {line})]
    return f" What it uses comes from {', '.join(said[-4:])}." if said else ""


def _helpers(trial: Trial, here: ast.stmt) -> set[int]:
    """Where the file's own functions are written that a statement calls, and no part names."""
    calls = {ast.unparse(one.func) for one in nodes(ast.Call, here)}
    owner = trial.source.owner_at(here.lineno)[0]
    full = {one.replace("self", owner, 1) if one.startswith("self.") else one for one in calls}
    written = (trial.source.function(one) for one in full - {*trial.names.values()})
    return {one.lineno for one in written if one is not None}

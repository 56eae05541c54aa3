"""Read off the files around a layer how its callers make the mask that they hand to it: with ones
where a query may attend, or where keys are hidden."""

from __future__ import annotations

import ast
import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..files.loading import MARKS
from ..files.syntax import Source, nodes, pairs
from ..target.signatures import entry, signature
from .read_pieces import word_of

FILES, LONGEST, UP = 60, 60_000, 3
"""How many files are looked into, how long ones (in bytes), and how many folders above."""
ROUNDS = 3
"""How often what is handed on is followed to those who handed it on before."""
PLAIN = set(
    "unsqueeze squeeze expand expand_as repeat view reshape transpose to type type_as bool long "
    "float int half cuda cpu contiguous clone detach".split()
)
"""Methods that leave it open which numbers a mask holds."""
PADS = re.compile(r"pad", re.IGNORECASE)
LENGTHS = re.compile(r"len|size|valid")
TURNED = {"seen": "hidden", "hidden": "seen"}
BOTH = {"logical_and", "mul", "minimum"}


@dataclass(frozen=True)
class Made:
    """A line that makes a mask: whether its ones are "seen" or "hidden", its code, and where."""

    ones: str
    code: str
    place: tuple[str, int]


def made_for(target: Any, name: str) -> Made | None:
    """A line that makes what callers hand to a class as the argument `name`; None where none is
    found, or where two of them do not agree."""
    kind = type(target)
    call = getattr(kind, "forward", None)
    file = getattr(getattr(call, "__code__", None), "co_filename", "")
    if not Path(file).is_file():
        return None
    own = _parsed(Path(file))
    if own is None:
        return None
    sources = [own, *_around(Path(file), kind.__name__)]
    order = [one.name for one in signature(entry(target))]
    found = [*_makers(kind.__name__, name, order, sources)]
    return found[0] if found and len({one.ones for one in found}) == 1 else None


def _makers(kind: str, name: str, order: list[str], sources: list[Source]) -> Iterator[Made]:
    """The lines that make what goes into an argument of a class, straight or through others."""
    waiting, met = [(kind, name, order)], set[tuple[str, str]]()
    for _ in range(ROUNDS):
        handed, waiting = waiting, []
        for owner, argument, places in handed:
            if (owner, argument) in met:
                continue
            met.add((owner, argument))
            for source in sources:
                for inside, value in _given(owner, argument, places, source):
                    function = _home(source, value)
                    taken = {one.arg for one in nodes(ast.arg, function)} if function else set()
                    word = value.id if isinstance(value, ast.Name) else ""
                    scope = _made_in(function) if function else {}
                    if word in taken and word not in scope and inside:
                        every = [one.arg for one in function.args.args] if function else []
                        waiting.append((inside, word, [one for one in every if one != "self"]))
                    elif ones := _ones(value, scope, source):
                        line = scope.get(word, value)
                        place = source.file, line.lineno
                        yield Made(ones, ast.unparse(line), place)


def _given(
    owner: str, argument: str, places: list[str], source: Source
) -> Iterator[tuple[str, ast.expr]]:
    """What calls of a class's objects hand to an argument, and the class that each stands in."""
    held = _held(owner, source)
    for call in nodes(ast.Call, source.tree):
        if word_of(call.func) not in held:
            continue
        inside = source.owner_at(call.lineno)[0]
        if inside == owner:
            continue
        named = next((one.value for one in call.keywords if one.arg == argument), None)
        if named is None and argument in places and len(call.args) > places.index(argument):
            named = call.args[places.index(argument)]
        if named is not None:
            yield inside, named


def _held(owner: str, source: Source) -> set[str]:
    """The names under which a file keeps objects of a class, in a list or by themselves."""
    held = set[str]()
    for target, value in (pair for line in nodes(ast.Assign, source.tree) for pair in pairs(line)):
        made = {word_of(call.func) for call in nodes(ast.Call, *([value] if value else []))}
        held |= {word_of(target)} if owner in made else set()
    for loop in nodes(ast.For, source.tree):
        for target, whole in _steps(loop.target, loop.iter):
            held |= {word_of(target)} if word_of(whole) in held else set()
    return held - {""}


def _steps(target: ast.expr, whole: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    """What a loop sets, and of what each is an element: all of `zip`, one of `enumerate`."""
    match target, whole:
        case ast.Tuple(targets), ast.Call(ast.Name("zip"), wholes):
            yield from zip(targets, wholes, strict=False)
        case ast.Tuple([_, one]), ast.Call(ast.Name("enumerate"), [of, *_]):
            yield from _steps(one, of)
        case _:
            yield target, whole


def _home(source: Source, node: ast.expr) -> ast.FunctionDef | None:
    function = source.owner_at(node.lineno)[1]
    return function if isinstance(function, ast.FunctionDef) else None


def _made_in(function: ast.FunctionDef) -> dict[str, ast.expr]:
    """What a function gives to each name that it sets once."""
    made = dict[str, ast.expr]()
    twice = set[str]()
    for line in nodes(ast.Assign, function):
        for target in line.targets:
            if isinstance(target, ast.Name):
                twice |= {target.id} & {*made}
                made[target.id] = line.value
    return {name: value for name, value in made.items() if name not in twice}


def _ones(value: ast.expr, scope: Mapping[str, ast.expr], source: Source, deep: int = 4) -> str:
    """Whether the ones of a mask are "seen" or "hidden"; nothing where its code does not say."""
    if deep == 0:
        return ""

    def inner(one: ast.expr) -> str:
        return _ones(one, scope, source, deep - 1)

    match value:
        case ast.Name(name) if name in scope:
            return inner(scope[name])
        case ast.Subscript(ast.Name(_) | ast.Attribute(), ast.Constant("attention_mask")):
            return "seen"  # as tokenizers give it
        case ast.Subscript(part, _):
            return inner(part)
        case ast.UnaryOp(ast.Invert() | ast.Not(), part):
            return TURNED.get(inner(part), "")
        case ast.BinOp(ast.Constant(1 | 1.0), ast.Sub(), part):
            return TURNED.get(inner(part), "")
        case ast.BinOp(left, ast.BitAnd() | ast.Mult(), right):
            sides = {inner(left), inner(right)} - {""}
            return "seen" if sides == {"seen"} else ""
        case ast.BinOp(left, ast.BitOr(), right):
            sides = {inner(left), inner(right)} - {""}
            return "hidden" if sides == {"hidden"} else ""
        case ast.Compare(left, [operator], [right]):
            return _compared(_spelt(left, scope), operator, right, inner(left))
        case ast.Call(ast.Attribute(part, "eq" | "ne" as way), [right]):
            equal = ast.Eq() if way == "eq" else ast.NotEq()
            return _compared(_spelt(part, scope), equal, right, inner(part))
        case ast.Call(ast.Attribute(_, "tril"), [part, *_]) if "ones" in ast.unparse(part):
            return "seen"
        case ast.Call(ast.Attribute(part, "tril")) if "ones" in ast.unparse(part):
            return "seen"
        case ast.Call(ast.Attribute(_, "triu")) if re.search(r"ones.*\b1\)", ast.unparse(value)):
            return "hidden"
        case ast.Call(ast.Attribute(_, "logical_and"), [left, right]):
            sides = {inner(left), inner(right)} - {""}
            return "seen" if sides == {"seen"} else ""
        case ast.Call(ast.Attribute(part, way)) if way in PLAIN and not isinstance(part, ast.Call):
            return inner(part)
        case ast.Call(ast.Attribute(ast.Call() as part, way)) if way in PLAIN:
            return inner(part)
        case ast.Call(ast.Name(name) | ast.Attribute(ast.Name("self"), name)):
            return _returned(name, source, deep)
        case _:
            return ""


def _spelt(value: ast.expr, scope: Mapping[str, ast.expr]) -> str:
    """The code of a value, and of the names in it."""
    inside = [scope[one.id] for one in nodes(ast.Name, value) if one.id in scope]
    return " ".join(map(ast.unparse, (value, *inside)))


def _compared(left: str, operator: ast.cmpop, right: ast.expr, ones: str) -> str:
    """The ones of a comparison: of tokens with the filling, of places with lengths, of a mask,
    whose ones are these, with 0 or 1."""
    number = right.value if isinstance(right, ast.Constant) else None
    same, other = isinstance(operator, ast.Eq), isinstance(operator, ast.NotEq)
    if (same or other) and PADS.search(ast.unparse(right)):
        return "hidden" if same else "seen"
    if (same or other) and number in (0, 1):
        return ones if same == (number == 1) else TURNED.get(ones, "")
    if "arange" in left and LENGTHS.search(ast.unparse(right)):
        return {ast.Lt: "seen", ast.GtE: "hidden"}.get(type(operator), "")
    return ""


def _returned(name: str, source: Source, deep: int) -> str:
    """The ones of what a function of the file returns, in all its ways alike."""
    for part in (name, *(f"{kind}.{name}" for kind in source.definitions)):
        function = source.function(part)
        if isinstance(function, ast.FunctionDef):
            scope = _made_in(function)
            ways = [one.value for one in nodes(ast.Return, function) if one.value is not None]
            found = {_ones(one, scope, source, deep - 1) for one in ways}
            return found.pop() if len(found) == 1 else ""
    return ""


def _around(file: Path, kind: str) -> Iterator[Source]:
    """Other files of the repository that speak of a class, or of classes of those that do."""
    above = [*file.parents][: UP + 1]
    root = next((one for one in above if any((one / mark).exists() for mark in MARKS)), above[0])
    texts = dict[Path, str]()
    for path in sorted(root.rglob("*.py"))[: 10 * FILES]:
        if len(texts) < FILES and path != file and path.stat().st_size < LONGEST:
            text = path.read_text("utf-8", "replace")
            if "mask" in text:
                texts[path] = text
    words = {kind}
    for _ in range(ROUNDS - 1):
        spoken = re.compile(rf"\b({'|'.join(map(re.escape, sorted(words)))})\b")
        for path in [path for path, text in texts.items() if spoken.search(text)]:
            text = texts.pop(path)
            words |= set(re.findall(r"^class (\w+)", text, re.MULTILINE))
            if (source := _parsed(path, text)) is not None:
                yield source


def _parsed(path: Path, text: str | None = None) -> Source | None:
    with contextlib.suppress(SyntaxError, ValueError):
        return Source(path.read_text("utf-8", "replace") if text is None else text, str(path))
    return None

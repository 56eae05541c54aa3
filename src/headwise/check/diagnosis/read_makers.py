"""Read off the files around a layer how its callers make the mask that they hand to it: with ones
where a query may attend, or where keys are hidden."""

from __future__ import annotations

import ast
import contextlib
import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..files.loading import MARKS
from ..files.syntax import Source, nodes, pairs
from ..target.errors import is_users
from ..target.signatures import entry, signature
from .read_pieces import word_of

FILES, LONGEST, UP = 60, 60_000, 3
"""How many files are looked into, how long ones (in bytes), and how many folders above."""
MANY = 600
"""How many are asked for their size."""
ROUNDS = 3
"""How far what speaks of a class is followed to what speaks of that."""
NOT_ITS_OWN = re.compile(r"\.|_*v?env|site-packages|node_modules|build$|dist$|__pycache__")
"""Folders that hold others' code, or none that somebody wrote."""
PLAIN = set(
    "unsqueeze squeeze expand expand_as repeat view reshape transpose to type type_as bool long "
    "float int half cuda cpu contiguous clone detach".split()
)
"""Methods that leave it open which numbers a mask holds."""
PADS = re.compile(r"pad", re.IGNORECASE)
LENGTHS = re.compile(r"len|size|valid")
"""Names of the filling, and of how many tokens are real."""
TURNED = {"seen": "hidden", "hidden": "seen"}


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
    own = _parsed(Path(file)) if is_users(file) and Path(file).is_file() else None
    if own is None:
        return None
    sources = [own, *_around(Path(file), kind.__name__)]
    order = tuple(one.name for one in signature(entry(target)))
    found = [*_makers(Argument(kind.__name__, name, order), sources, set())]
    return found[0] if found and len({one.ones for one in found}) == 1 else None


class Argument(NamedTuple):
    """An argument of a class's call, and the names of all of them in their order."""

    owner: str
    name: str
    order: tuple[str, ...]


def _makers(wanted: Argument, sources: Sequence[Source], met: set[Argument]) -> Iterator[Made]:
    """The lines that make what goes into an argument, straight or through others' arguments."""
    if wanted in met:
        return
    met.add(wanted)
    for source in sources:
        for value in _given(wanted, source):
            inside, function = source.owner_at(value.lineno)
            scope = _made_in(function or source.tree)
            taken = function.args.args if function else []
            order, root = tuple(one.arg for one in taken if one.arg != "self"), _root(value, scope)
            if inside and root in order:
                yield from _makers(Argument(inside, root, order), sources, met)
            elif ones := _ones(value, scope, source):
                line = scope.get(word_of(value), value)
                yield Made(ones, ast.unparse(line), (source.file, line.lineno))


def _given(wanted: Argument, source: Source) -> Iterator[ast.expr]:
    """What calls of a class's objects hand to an argument, but those within itself."""
    held = _held(wanted.owner, source)
    place = wanted.order.index(wanted.name) if wanted.name in wanted.order else LONGEST
    for call in nodes(ast.Call, source.tree):
        if word_of(call.func) in held and source.owner_at(call.lineno)[0] != wanted.owner:
            named = [one.value for one in call.keywords if one.arg == wanted.name]
            yield from (named or call.args[place : place + 1])[:1]


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


def _root(value: ast.expr, scope: Mapping[str, ast.expr]) -> str:
    """The name that a value is plainly made of: `mask` of `mask.unsqueeze(1)`."""
    match value:
        case ast.Name(name) if name in scope:
            return _root(scope[name], _without(scope, name))
        case ast.Name(name):
            return name
        case ast.Subscript(part, _):
            return _root(part, scope)
        case ast.Call(ast.Attribute(part, way)) if way in PLAIN:
            return _root(part, scope)
        case _:
            return ""


def _without(scope: Mapping[str, ast.expr], name: str) -> dict[str, ast.expr]:
    """The rest, for what a name is made of itself."""
    return {one: value for one, value in scope.items() if one != name}


def _made_in(part: ast.AST) -> dict[str, ast.expr]:
    """What a function, or a file, gives to each name that it sets once."""
    made, twice = dict[str, ast.expr](), set[str]()
    for line in nodes(ast.Assign, part):
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
            return _ones(scope[name], _without(scope, name), source, deep)
        case ast.Subscript(ast.Name(_) | ast.Attribute(), ast.Constant("attention_mask")):
            return "seen"  # as tokenizers give it
        case ast.Subscript(part, _):
            return inner(part)
        case ast.UnaryOp(ast.Invert() | ast.Not(), part):
            return TURNED.get(inner(part), "")
        case ast.BinOp(ast.Constant(1 | 1.0), ast.Sub(), part):
            return TURNED.get(inner(part), "")
        case ast.BinOp(left, ast.BitAnd() | ast.Mult(), right) | ast.Call(
            ast.Attribute(_, "logical_and"), [left, right]
        ):
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
        case ast.Call(ast.Attribute(_, "tril")) if "ones" in ast.unparse(value):
            return "seen"
        case ast.Call(ast.Attribute(_, "triu")) if re.search(r"ones.*\b1\)", ast.unparse(value)):
            return "hidden"
        case ast.Call(ast.Attribute(part, way)) if way in PLAIN:
            return _ones(part, scope, source, deep)
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
    for path in itertools.islice(_files(root), MANY):
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


def _files(root: Path) -> Iterator[Path]:
    """The Python files of a repository, without those of environments and of what is built."""
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(one for one in folders if not NOT_ITS_OWN.match(one))
        yield from (Path(folder, one) for one in sorted(files) if one.endswith(".py"))


def _parsed(path: Path, text: str | None = None) -> Source | None:
    with contextlib.suppress(SyntaxError, ValueError):
        return Source(path.read_text("utf-8", "replace") if text is None else text, str(path))
    return None

"""Read off the code of a constructor, or off what is written about it, what an argument is for
whose name tells nothing.

`nn.Linear(units, …)` takes the width of the input, `units // num_heads` divides a width, and
`rate` is a dropout where `nn.Dropout(rate)` takes it. What is handed on is what the next one takes
it for.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .names import building_role
from .signatures import source_of
from .sizes import Unknown

WIDTHS = {"width", "head_dim", "kv_width", "out_width"}
"""Roles of what is divided among heads."""
DEEP = 3
"""How many constructors an argument is followed through."""


TOLD = (
    ("head_dim", r"(dim|size|width|features|channels).*\b(each|per|every|single|one)\b|head.?dim"),
    ("heads", r"(number|num|no\.?|count|#) of .*\bheads|\bhead (number|count)"),
    ("dropout", r"drop.?out"),
    ("window", r"window"),
    ("context", r"(sequence|context|maximum|max) .*(length|len|size|tokens|positions)"),
    ("width", r"(dim|size|width|number of).*"),
)
"""What people write of an argument of each role, the plainest first."""
_SEEN = r"(real|valid|keep|kept|attend\w*|visible|actual|present|non-?pad\w*|not (pad|mask)\w*)\b"
_LOST = r"(pad\w*|mask(ed)?( out)?|ignored?|hid(e|den)|blocked|invalid|not attend\w*)\b"
_ONES, _ZEROS = (rf"\b({w})\b[^.;,:\n01]{{0,30}}?\b" for w in ("1s?|true|ones", "0s?|false|zeros"))
SAID = {
    True: re.compile(f"{_ONES}{_SEEN}|{_ZEROS}{_LOST}"),
    False: re.compile(f"{_ONES}{_LOST}|{_ZEROS}{_SEEN}"),
}
"""What people write of a mask whose ones may be seen, and of one whose ones are hidden."""


@dataclass(frozen=True)
class Use:
    """What an argument is used as: a role, or a value that would be taken without it.

    `sure` is whether nothing else can be meant; `divided` whether heads share it.
    """

    role: str = ""
    value: Any = Unknown
    sure: bool = True
    divided: bool = False


def use_of(factory: Callable[..., Any], name: str, deep: int = DEEP) -> Use | None:
    """What a class or function takes an argument for, the surest first; None where it does not
    tell.

    >>> class Layer:
    ...     def __init__(self, units, rate): ...
    >>> use_of(Layer, "units")
    """
    return _surest(_uses(factory, name, deep))


def use_of_field(factory: Callable[..., Any], name: str) -> Use | None:
    """What a class or function takes a field of its configuration for; None where it does not tell.

    >>> class Layer:
    ...     def __init__(self, config): ...
    >>> use_of_field(Layer, "learn_ln")
    """
    if (code := _code(factory)) is None:
        return None
    kind, tree, start = code
    home, every = _home(kind), [*ast.walk(tree)]
    fields = (one for one in every if isinstance(one, ast.Attribute) and one.attr == name)
    words = {ast.unparse(one) for one in fields if ast.unparse(one.value) != "self"}
    words |= {alias for word in words for alias in _aliases(start, word)}
    return _surest(use for node in every for use in _at(node, words, home, DEEP))


def _surest(found: Iterable[Use]) -> Use | None:
    return min(found, key=lambda use: (not use.divided, not use.sure), default=None)


def documented(factory: Callable[..., Any], name: str) -> Use | None:
    """What the docstring or a comment says of an argument: `K: number of attention heads`.

    >>> class Layer:
    ...     def __init__(self, K, d): ...
    >>> documented(Layer, "K")
    """
    for said in said_of(_written(factory), name).splitlines():
        for role, words in TOLD if " " in said else ():
            if re.search(words, said.lower()):
                return Use(role, sure=False)
    return None


def said_of(thing: Any, name: str, whole: bool = False) -> str:
    """What the docstring or a comment of a class or function says of an argument, line by line.

    Args:
        whole: with what stands below, further in.

    >>> said_of(said_of, "whole")
    'with what stands below, further in.'
    """
    code = source_of(thing)
    after = rf"^[ \t#*:\"'-]*(?:param +)?`*{name}`*(?: *\([^)\n]*\)| [^:\n]{{0,40}})?:[ \t]+(.+)$"
    if whole:
        below = rf"^([ \t]*)(?:[#*:\"'-]+ *)?(?:param +)?`*{name}\b.*:.*(?:\n\1[ \t]+\S.*)+"
        code = re.sub(below, _joined, code, count=0, flags=re.MULTILINE)
    beside = rf"^[ \t]*{name}\b[^#\n]*#[ \t]*(.+)$"
    within = rf"\w.*`{name}`[^:\n]{{0,40}}:[ \t]+(.+)$"
    ways = (after, beside, within)
    return "\n".join(said for way in ways for said in re.findall(way, code, re.MULTILINE))


def _joined(paragraph: re.Match[str]) -> str:
    return re.sub(r"\n[ \t]+", " ", paragraph[0])


def as_config(factory: Callable[..., Any], name: str) -> Use | None:
    """Whether the code takes only fields of an argument: then it is a configuration, whatever it is
    called.

    >>> class Layer:
    ...     def __init__(self, flavour): ...
    >>> as_config(Layer, "flavour")
    """
    code = source_of(_written(factory))
    own = re.sub(r"^_\w+?(?=__)", "", name)  # Python's own name for `__C` in a class
    fields = re.findall(rf"(?<![.\w]){own}\.([A-Za-z]\w*)(?![\w(.])", code)
    return Use("config", sure=False) if len(set(fields)) > 1 else None


def is_unread(factory: Callable[..., Any], name: str) -> bool:
    """Whether a constructor at most keeps an argument under a name that nothing reads.

    >>> is_unread(int, "x")
    False
    """
    if (code := _code(factory)) is None:
        return False
    _, tree, start = code
    if name not in {one.arg for one in ast.walk(start.args) if isinstance(one, ast.arg)}:
        return False  # a decorator wrote the constructor
    kept = {one for one in _aliases(start, name) if one != name}
    stored = [one.value for one in ast.walk(start) if isinstance(one, ast.Assign)]
    read = [one for one in ast.walk(tree) if isinstance(getattr(one, "ctx", None), ast.Load)]
    return not any(ast.unparse(one) in kept for one in read) and not any(
        isinstance(one, ast.Name) and one.id == name and one not in stored for one in read
    )


def _code(factory: Callable[..., Any]) -> tuple[Any, ast.AST, ast.FunctionDef] | None:
    """What is written of a class or function: itself, its code, and its constructor's."""
    kind = _written(factory)
    tree = None if kind is None else _tree(kind)
    if tree is None:
        return None
    functions = [one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef)]
    start = next((one for one in functions if one.name == "__init__"), functions[0])
    return kind, tree, start


def _home(kind: Any) -> dict[str, Any]:
    """What names mean in the code of a class or function."""
    return {**vars(sys.modules.get(kind.__module__, ast)), "self": kind}


def _uses(factory: Callable[..., Any], name: str, deep: int) -> Iterator[Use]:
    code = _code(factory) if deep else None
    if code is None:
        return
    kind, tree, start = code
    home, every = _home(kind), [*ast.walk(tree)]
    words = _aliases(start, name)
    inner, fields = {*ast.walk(start)}, {word for word in words if "." in word}
    for node in every:
        yield from _at(node, words if node in inner else fields, home, deep)


def _at(node: ast.AST, words: set[str], home: Mapping[str, Any], deep: int) -> Iterator[Use]:
    """What one place of the code says of something that goes under some words."""

    def spoken(one: ast.AST | None) -> bool:
        return one is not None and ast.unparse(one) in words

    if isinstance(node, ast.BinOp):
        left, right = _role(node.left), _role(node.right)
        if isinstance(node.op, ast.FloorDiv | ast.Mod):
            if spoken(node.left) and right == "heads":
                yield Use("width", divided=True)
            elif spoken(node.right) and left in WIDTHS:
                yield Use("heads")
        elif isinstance(node.op, ast.Mult) and (
            (spoken(node.left) and right == "heads") or (spoken(node.right) and left == "heads")
        ):
            yield Use("head_dim")
    elif isinstance(node, ast.Call):
        for callee, taken, given in _handed(node, home):
            if spoken(given):
                yield from _taken(callee, taken, deep)
    elif any(map(spoken, _tested(node))):
        yield Use("flag", sure=False)
    match node:
        case ast.Assign([target], ast.BinOp(left, ast.FloorDiv(), right)) if _role(
            target
        ) == "head_dim" and (spoken(left) or spoken(right)):
            yield Use("width", divided=True) if spoken(left) else Use("heads")
        case ast.Compare(left, [ast.Eq()], [ast.Constant(str(word))]) if spoken(left):
            yield Use(value=word, sure=False)
        case ast.Compare(ast.Constant(str(word)), [ast.In()], [right]) if spoken(right):
            yield Use(value=word, sure=False)
        case _:
            pass


def _tested(node: ast.AST) -> Iterator[ast.expr]:
    """What a place of the code takes for yes or no."""
    tests: list[ast.expr] = []
    if isinstance(node, ast.If | ast.IfExp):
        tests = [node.test]
    elif isinstance(node, ast.BoolOp):
        tests = node.values
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        tests = [node.operand]
    yield from tests
    yield from (one.left for one in tests if isinstance(one, ast.Compare) and _of_truth(one))


def _of_truth(test: ast.Compare) -> bool:
    """Whether something is compared with True or False."""
    others = (getattr(one, "value", None) for one in test.comparators)
    return any(isinstance(other, bool) for other in others)


def _handed(call: ast.Call, home: Mapping[str, Any]) -> Iterator[tuple[Any, Any, ast.expr]]:
    """What is called, the parameter that takes each argument, and the argument."""
    first, *rest = ast.unparse(call.func).split(".")
    callee = home.get(first)
    for part in rest:
        callee = getattr(callee, part, None)
    known = dict[str, inspect.Parameter]()
    if callable(callee):
        with contextlib.suppress(TypeError, ValueError):  # builtins do not tell
            known = dict(inspect.signature(callee).parameters)
            if first == "self":
                known.pop("self", None)
    if not any(isinstance(one, ast.Starred) for one in call.args):
        for parameter, given in zip(known.values(), call.args, strict=False):
            yield callee, parameter, given
    for one in call.keywords:
        if one.arg is not None:
            named = inspect.Parameter(one.arg, inspect.Parameter.KEYWORD_ONLY)
            yield callee, known.get(one.arg, named), one.value


def _taken(callee: Any, parameter: inspect.Parameter, deep: int) -> Iterator[Use]:
    """What a class or function that is called takes an argument for."""
    role = building_role(parameter.name)
    if role is not None and role != "config":
        yield Use(role, sure=role != "out_width")
    elif parameter.default is not parameter.empty and parameter.default is not None:
        yield Use(value=parameter.default)
    else:
        yield from _uses(callee, parameter.name, deep - 1)


def _role(node: ast.AST) -> str | None:
    """The role of a name or an attribute."""
    word = node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")
    return building_role(word) if word else None


def _aliases(function: ast.FunctionDef, name: str) -> set[str]:
    """A parameter's name, and what a function keeps it as: `self.units`."""
    words = {name}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and ast.unparse(node.value) in words:
            words |= {ast.unparse(target) for target in node.targets}
    return words


def _written(factory: Any) -> Any:
    """The class whose constructor it has, or the function; None where it is PyTorch's."""
    family = inspect.getmro(factory) if inspect.isclass(factory) else [factory]
    builds = (one for one in family if "__init__" in vars(one))
    kind = next(builds, None) if inspect.isclass(factory) else factory
    home = getattr(kind, "__module__", None) or "builtins"
    return None if home.split(".")[0] in ("torch", "builtins") else kind


@functools.lru_cache(maxsize=64)
def _tree(kind: Any) -> ast.AST | None:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    except (OSError, TypeError, SyntaxError):  # nothing that can be read
        return None
    return tree if any(isinstance(one, ast.FunctionDef) for one in ast.walk(tree)) else None

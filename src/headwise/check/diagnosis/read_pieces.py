"""The pieces of code that readers of mistakes look for."""

from __future__ import annotations

import ast
import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ..files.syntax import Source, names, nodes, pairs
from ..target.introspect import SPEAKS_OF_ROPE
from ..target.names import building_role, calling_role, parts_of

Said = tuple[str, int, dict[str, str]]
Known = Mapping[str, Any]
Reader = Callable[[ast.stmt, Source, Known], Iterator[Said]]
"""Takes a class or function, the file that it stands in, and what that file knows."""

LONG = {"q": "queries", "k": "keys", "v": "values"}
PLAIN = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr, ast.Return)
LAYERS = re.compile(r"(\w+\.)*(Linear|LazyLinear)")
"""What makes a projection."""
INNER = (ast.FunctionDef, ast.Lambda)
BRANCHING = (ast.IfExp, ast.BoolOp, ast.Lambda, ast.comprehension)
PRODUCTS = {"matmul", "bmm", "mm", "einsum", "baddbmm"}
BY_CHANCE = re.compile("drop|keep|rand|sample")
"""Names of masks that are drawn."""
WORKED_ON = re.compile(r"score|att(n|ention)|weight|prob|energy|logit")
"""Names of what attention is made of on its way."""
HIDES = re.compile(r"fill|inf|where|\de\d|==")
"""Code that may hide what is 0."""


def qkv_of(name: str) -> str:
    """q, k or v, where a name speaks of one of them."""
    said = parts_of(name)
    return said if said in LONG else ""


def of_self(node: ast.AST) -> str:
    """`name` for `self.name`."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return node.attr if node.value.id == "self" else ""
    return ""


def called_of_self(value: ast.AST | None) -> list[str]:
    """Attributes of self that are called."""
    calls = nodes(ast.Call, value) if value is not None else ()
    return [name for call in calls if (name := of_self(call.func))]


def built_of_self(part: ast.stmt) -> Iterator[str]:
    """Attributes of self that are given what a call makes."""
    for target, value in (pair for node in nodes(ast.Assign, part) for pair in pairs(node)):
        if isinstance(value, ast.Call) and (name := of_self(target)):
            yield name


def in_order(function: ast.FunctionDef) -> list[ast.stmt]:
    """Its plain statements, those of its blocks too, as they stand."""
    lines = [one for one in ast.walk(function) if isinstance(one, PLAIN)]
    return sorted(lines, key=lambda one: one.lineno)


def given_before(function: ast.FunctionDef, name: str, line: int) -> ast.expr | None:
    """What a name was given last before a line."""
    lines = sorted(nodes(ast.Assign, function), key=lambda one: one.lineno)
    every = (pair for one in lines if one.lineno < line for pair in pairs(one))
    given = [value for to, value in every if word_of(to) == name]
    return given[-1] if given else None


def callables(
    part: ast.stmt, known: Known, goes_by: Callable[[str], object]
) -> Iterator[tuple[str, int, Callable[..., Any]]]:
    """Functions and methods that go by such a name: with the line that they end on, and as they
    are called without an object."""
    home = known.get(getattr(part, "name", "")) if isinstance(part, ast.ClassDef) else None
    for function in nodes(ast.FunctionDef, part):
        if goes_by(function.name):
            made = known.get(function.name) if home is None else getattr(home, function.name, None)
            if callable(made):
                bound = [None] * ([one.arg for one in function.args.args[:1]] == ["self"])
                gives = [one.lineno for one in nodes(ast.Return, function)]
                line = gives[-1] if gives else function.lineno
                yield function.name, line, partial(made, *bound)


def is_within(node: ast.AST, *whole: ast.stmt) -> bool:
    return any(one is node for statement in whole for one in ast.walk(statement))


def sized(value: ast.expr) -> ast.expr | None:
    """`x` of `x.shape` and `x.size()`."""
    match value:
        case ast.Attribute(owner, "shape") | ast.Call(ast.Attribute(owner, "size"), []):
            return owner
        case _:
            return None


def is_plain(statement: ast.AST) -> bool:
    """Whether all of it runs whenever it is reached."""
    whole = not any(isinstance(node, BRANCHING) for node in ast.walk(statement))
    return isinstance(statement, (*PLAIN, ast.expr)) and whole


def may_end(statement: ast.stmt) -> bool:
    """Whether what comes after it may never be reached."""
    return any(isinstance(one, ast.Return | ast.Raise | ast.Assert) for one in ast.walk(statement))


def needs(name: str, statement: ast.AST) -> bool:
    """Whether a statement asks something of a name that None has not: `name.to(…)`, `name[…]`."""
    parts = (*nodes(ast.Attribute, statement), *nodes(ast.Subscript, statement))
    return any(isinstance(one.value, ast.Name) and one.value.id == name for one in parts)


def asks(name: str, statement: ast.AST) -> bool:
    """Whether somewhere in it a name is compared with None."""
    tests = (one for one in nodes(ast.Compare, statement) if isinstance(one.left, ast.Name))
    return any(ast.unparse(one).startswith(f"{name} is ") for one in tests)


def target_of(statement: ast.stmt) -> str:
    """The one name that a statement gives a value to, whole or in part; else nothing."""
    targets = statement.targets if isinstance(statement, ast.Assign) else ()
    targets = (statement.target,) if isinstance(statement, ast.AugAssign) else targets
    return word_of(root_of(targets[0])) if len(targets) == 1 else ""


def root_of(node: ast.expr) -> ast.expr:
    """`scores` of `scores[:, 0]`."""
    return root_of(node.value) if isinstance(node, ast.Subscript) else node


def word_of(node: ast.AST | None) -> str:
    """`name` for `name` and `self.name`; else nothing."""
    return node.id if isinstance(node, ast.Name) else of_self(node) if node is not None else ""


def words_in(*parts: ast.AST) -> set[str]:
    """Names, and attributes of self."""
    return names(*parts) | {of_self(one) for one in nodes(ast.Attribute, *parts)} - {""}


def defaults_of(function: ast.FunctionDef) -> dict[str, ast.expr]:
    """The arguments that nobody has to give, with their defaults."""
    given = function.args
    usual = [*given.posonlyargs, *given.args]
    last = [*usual[len(usual) - len(given.defaults) :], *given.kwonlyargs]
    pairs = zip(last, [*given.defaults, *given.kw_defaults], strict=True)
    return {one.arg: value for one, value in pairs if value is not None}


def products(function: ast.FunctionDef) -> Iterator[tuple[ast.expr, ast.expr]]:
    """The two factors of each matrix product."""
    for one in ast.walk(function):
        match one:
            case ast.BinOp(left, ast.MatMult(), right):
                yield left, right
            case ast.Call(ast.Attribute(_, "matmul" | "bmm"), [left, right]):
                yield left, right
            case _:
                pass


def is_set_beside(name: str, kind: str, file: str) -> bool:
    """Whether another file of the folder gives objects of a class an attribute of that name: from
    outside, or as one that derives from it."""
    value = r"\s*(?::[^=\n]+)?=(?!=)"
    outside = re.compile(rf"(?<!\bself)\.{name}{value}|[\"']{name}[\"']")
    heirs, own = re.compile(rf"class \w+\([^)]*\b{kind}\b"), re.compile(rf"\bself\.{name}{value}")
    for path in Path(file).parent.glob("*.py"):
        if path.name != Path(file).name:
            text = path.read_text("utf-8", "replace")
            if outside.search(text) or (heirs.search(text) and own.search(text)):
                return True
    return False


def overwritten(part: ast.stmt) -> Iterator[tuple[str, ast.Assign, ast.Assign]]:
    """Names that are given a value, and another one before anything reads them, with both lines.
    What a constructor prepares is left out."""
    for function in nodes(ast.FunctionDef, part):
        inner = [one for one in ast.walk(function) if isinstance(one, INNER) and one != function]
        bodies = [getattr(one, "body", ()) for one in ast.walk(function)]
        for block in bodies if function.name != "__init__" else ():
            waiting: dict[str, ast.Assign] = {}
            for statement in block if isinstance(block, list) else ():
                mentioned = names(statement)
                made = mentioned - names(statement, context=ast.Load) - names(*inner)
                if isinstance(statement, ast.Assign) and len(made) == 1:
                    yield from ((name, waiting[name], statement) for name in made & {*waiting})
                waiting = {name: one for name, one in waiting.items() if name not in mentioned}
                if isinstance(statement, ast.Assign):
                    waiting |= dict.fromkeys(made | ({target_of(statement)} - {""}), statement)


def softmax_of(statement: ast.AST) -> set[str] | None:
    """The names that a softmax of a statement is taken of; none of products made within it."""
    for call in nodes(ast.Call, statement):
        if "softmax" in ast.unparse(call.func).split(".")[-1].lower():
            inside = [call.func.value] if isinstance(call.func, ast.Attribute) else []
            said = [*inside, *call.args, *(one.value for one in call.keywords)]
            made = any(isinstance(one.op, ast.MatMult) for one in nodes(ast.BinOp, *said))
            calls = nodes(ast.Call, *said)
            made = made or any(getattr(one.func, "attr", "") in PRODUCTS for one in calls)
            return set() if made else words_in(*said)
    return None


def turns(*named: ast.AST) -> bool:
    """Whether a name, or that of what is called, speaks of rotary positions, and not of a whole
    attention."""
    called = [getattr(one, "func", one) for one in named]
    names = [getattr(one, "name", "") or ast.unparse(one).split(".")[-1] for one in called]
    return any(SPEAKS_OF_ROPE.search(one.lower()) and "att" not in one.lower() for one in names)


def is_mask(name: str) -> bool:
    known = calling_role(name) in ("mask", "padding") and re.search("mask|^adj", name.lower())
    return bool(known) and not BY_CHANCE.search(name.lower())


def masked_product(statement: ast.stmt) -> tuple[str, str, str] | None:
    """For `scores *= mask`, `weights = scores * mask` and `weights = scores.masked_fill(mask, 0)`:
    the name that is made, the name that is multiplied (nothing where that is a softmax itself), and
    the mask."""
    sides: list[ast.expr] = []
    match getattr(statement, "value", None):
        case ast.Call(ast.Attribute(other, "masked_fill"), [mask, ast.Constant(0)]) if (
            "score_mask" not in words_in(mask)  # of the experts that are not chosen
        ):
            sides = [other, mask]
        case _:
            pass
    if isinstance(statement, ast.AugAssign) and isinstance(statement.op, ast.Mult):
        sides = [statement.target, statement.value]
    elif isinstance(statement, ast.Assign) and isinstance(statement.value, ast.BinOp):
        value = statement.value
        sides = [value.left, value.right] if isinstance(value.op, ast.Mult) else []
    target = target_of(statement)
    for mask, other in (sides, sides[::-1]) if sides and target else ():
        said = sorted(filter(is_mask, words_in(mask)))
        sums = any(isinstance(one.op, ast.Add) for one in nodes(ast.BinOp, mask))
        word = word_of(root_of(other))
        if isinstance(other, ast.BinOp) and isinstance(other.op, ast.Add):  # `(scores + bias)`
            word = target if target in words_in(other) else ""
        plain = bool(word) or (isinstance(other, ast.Call) and softmax_of(other) is not None)
        if len(said) == 1 and not sums and plain and not any(map(is_mask, words_in(other))):
            return target, word, said[0]
    return None


def goes_into_softmax(name: str, lines: Sequence[ast.stmt]) -> bool:
    """Whether a softmax is taken of it before anything else may hide what is 0 in it."""
    for one in lines:
        if name in (softmax_of(one) or ()):
            return True
        others = any(map(is_mask, words_in(one)))
        if (HIDES.search(ast.unparse(one)) and not others) or name not in read_by(one):
            return False
    return False


def read_by(statement: ast.stmt) -> set[str]:
    """The names that a statement reads, or changes a part of."""
    if isinstance(statement, ast.Assign) and not isinstance(statement.targets[0], ast.Subscript):
        return words_in(statement.value)
    return words_in(statement)


def number_of(value: ast.expr, known: Known) -> float | None:
    """The number that stands there, in words even, `float("-1e9")`, or that goes by a name of the
    file's there: `-settings.EPS`."""
    if isinstance(value, ast.UnaryOp) and isinstance(value.op, ast.USub):
        number = number_of(value.operand, known)
        return None if number is None else -number
    thing: Any = getattr(value, "value", None)
    if isinstance(value, ast.Call) and word_of(value.func) == "float" and value.args:
        with contextlib.suppress(ValueError):
            thing = float(str(getattr(value.args[0], "value", "")))
    if isinstance(value, ast.Name | ast.Attribute):
        first, *rest = ast.unparse(value).split(".")
        thing = known.get(first)
        for part in rest:
            thing = getattr(thing, part, None)
    return float(thing) if type(thing) in (int, float) else None


def kind_of(name: str) -> str:
    """Which of the arguments that nothing else can stand for a name speaks of."""
    built = building_role(name) if len(name) > 1 else ""
    called = calling_role(name) if len(name) > 1 else ""
    if built in ("heads", "dropout"):
        return built
    return "mask" if called in ("mask", "padding") else ""


def parameters_of(call: ast.Call, part: ast.stmt, source: Source) -> list[str]:
    """What the function or class of the same file takes that a call calls; nothing where it stands
    elsewhere."""
    owner, said = getattr(part, "name", ""), ast.unparse(call.func)
    if said.startswith("super(") and said.endswith(".__init__") and isinstance(part, ast.ClassDef):
        bases = [one.id for one in part.bases if isinstance(one, ast.Name)]
        name = f"{bases[0]}.__init__" if bases else ""
    elif said.startswith("self."):
        name = f"{owner}.{said.removeprefix('self.')}"
    else:
        of_class = isinstance(source.definitions.get(said), ast.ClassDef)
        name = f"{said}.__init__" if of_class else said
    function = source.function(name) if name else None
    if function is None or function.args.vararg is not None or function.decorator_list:
        return []
    taken = [one.arg for one in (*function.args.posonlyargs, *function.args.args)]
    return taken[1:] if "." in name else taken

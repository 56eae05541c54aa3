"""Read mistakes off the code of classes and functions, which need not be built or called for it.

Each reader takes a class or function, the file that it stands in, and what that file knows; it
gives the way in which its rule is broken, the line, and words for the finding. It says nothing
where it is not sure.
"""

from __future__ import annotations

import ast
import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from torch import Tensor, nn

from ..files.syntax import NO_EFFECT, Source, names, nodes, pairs, unused
from ..target.names import building_role, calling_role, parts_of

Said = tuple[str, int, dict[str, str]]
Known = Mapping[str, Any]

LONG = {"q": "queries", "k": "keys", "v": "values"}
OPEN = {"setattr", "__dict__", "__getattr__", "__getattribute__", "vars"}
"""What gives a class attributes that cannot be read."""
PLAIN = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr, ast.Return)
BRANCHING = (ast.IfExp, ast.BoolOp, ast.Lambda, ast.comprehension)
PRODUCTS = {"matmul", "bmm", "mm", "einsum", "baddbmm"}
INNER = (ast.FunctionDef, ast.Lambda)
OF_QUERIES = re.compile(r"unsqueeze\((dim=)?-1\)|(\.\.\.|, :), None\]")
"""Code that makes a mask speak of queries, which may come to nothing."""
BY_CHANCE = re.compile("drop|keep|rand|sample")
"""Names of masks that are drawn."""
WORKED_ON = re.compile(r"score|att(n|ention)|weight|prob|energy|logit")
"""Names of what attention is made of on its way."""
HIDES = re.compile(r"fill|inf|where|\de\d|==")
"""Code that may hide what is 0."""


def mixed_roles(kind: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """Queries, keys or values that another one's projection makes, while their own is never used:
    `v = self.w_k(x)`, with a `self.w_v` that nothing reads."""
    if not isinstance(kind, ast.ClassDef):
        return
    given = [pair for node in nodes(ast.Assign, kind) for pair in pairs(node)]
    read = {one.attr for one in nodes(ast.Attribute, kind) if isinstance(one.ctx, ast.Load)}
    built = (_of_self(target) for target, value in given if isinstance(value, ast.Call))
    spare = {_role(name): name for name in built if name not in read}
    for target, value in given:
        role = _role(target.id) if isinstance(target, ast.Name) else ""
        made = [name for name in _called(value) if _role(name)]
        if role and role in spare and len(made) == 1 and _role(made[0]) != role:
            words = {"other": f"self.{made[0]}", "own": f"self.{spare[role]}"}
            yield "mixed", target.lineno, {"part": LONG[role], **words}


def lost_roles(part: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """Queries, keys or values that are made, never read, and made again of another: `v = k.view(…)`
    where `v = v.view(…)` was meant."""
    for name, lost, statement in _overwritten(part):
        others = {one for one in names(statement.value) if _role(one)}
        roles = {_role(one) for one in others}
        if _role(name) and _called(lost.value) and len(roles) == 1 and _role(name) not in roles:
            words = {"part": LONG[_role(name)], "name": name, "other": min(others)}
            yield "lost", statement.lineno, words


def unread_roles(part: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """The queries, keys or values that forward makes or must be given and never reads, though it
    reads the other two."""
    for function in nodes(ast.FunctionDef, part):
        if function.name != "forward":
            continue
        given = function.args.args[: len(function.args.args) - len(function.args.defaults)]
        groups = [(function.lineno, {one.arg for one in given})]
        for one in nodes(ast.Assign, function):
            group = names(*one.targets)
            if _called(one.value) or (len(group) > 1 and isinstance(one.value, ast.Call)):
                groups.append((one.lineno, group))
        read = names(*function.body, context=ast.Load)
        roles = {_role(name) for name in read} - {""}
        for line, group in groups:
            several = len({_role(name) for name in group} - {""}) > 1
            for name in group - read if several or len(group) == 1 else ():
                if (role := _role(name)) and roles == set(LONG) - {role}:
                    yield "unread", line, {"part": LONG[role], "name": name}


def thrown_away(part: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """Results that nothing takes, or that the next value of their name replaces unread."""
    yield from (("lost", line, {"name": name}) for line, name in unused(part))
    for name, lost, _ in _overwritten(part):
        made = getattr(getattr(lost.value, "func", None), "attr", "") in NO_EFFECT
        if (made or isinstance(lost.value, ast.BinOp)) and _target(lost) == name:
            yield "overwritten", lost.lineno, {"name": name}


def never_read(part: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """Results that nothing reads afterwards: `x = self.norm(x)` behind the last x, and scores or
    weights that are worked on for nothing."""
    for function in nodes(ast.FunctionDef, part):
        parts = [*ast.walk(function)][1:]
        inner = [one for one in parts if isinstance(one, (*INNER, ast.For, ast.While))]
        skipped = names(function if function.name == "__init__" else ast.Pass(), *inner)
        loads = [one for one in nodes(ast.Name, function) if isinstance(one.ctx, ast.Load)]
        for one in nodes(ast.Assign, function):
            name = one.targets[0].id if isinstance(one.targets[0], ast.Name) else ""
            if not name or name in skipped or not isinstance(one.value, ast.Call | ast.BinOp):
                continue
            own = name in names(one.value) and bool(_called(one.value))
            read = [load for load in loads if load.id == name and not _within(load, one)]
            later = [load for load in read if not own or load.lineno > one.lineno]
            if not later and len(one.targets) == 1 and (own or WORKED_ON.search(name.lower())):
                yield "never", one.lineno, {"name": name}


def small_fills(part: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """Numbers near 0 that are filled in where a mask hides: −1e-9 for −1e9."""
    for call in nodes(ast.Call, part):
        if getattr(call.func, "attr", "").strip("_") == "masked_fill" and len(call.args) > 1:
            *_, mask, value = call.args
            with contextlib.suppress(ValueError):
                number = ast.literal_eval(value)
                small = isinstance(number, float) and 0 < abs(number) < 0.01
                if small and (said := [*filter(_is_mask, sorted(_mentioned(mask)))]):
                    yield "small", call.lineno, {"name": said[0], "value": f"{number:g}"}


def multiplied_masks(part: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """Masks that scores or weights are multiplied with, and that hide nothing in any other way."""
    for function in nodes(ast.FunctionDef, part):
        lines = [one for one in ast.walk(function) if isinstance(one, PLAIN)]
        lines.sort(key=lambda one: one.lineno)
        for number, line in enumerate(lines):
            if (product := _masked_product(line)) is None:
                continue
            target, other, mask = product
            kin, rest = {mask}, [one for one in lines if one is not line]
            for one in (*rest, *rest):  # what is made of the mask, and what it is made of
                if kin & (said := _mentioned(one)) and not said & {target, other}:
                    kin |= {_target(one), *filter(_is_mask, said)} - {""}
            about = [ast.unparse(one) for one in (line, *rest) if kin & _mentioned(one)]
            used = any(kin & (said := _mentioned(one)) and said & {target, other} for one in rest)
            if used or any(OF_QUERIES.search(code) and "&" not in code for code in about):
                continue
            before = [one for one in lines[:number] if other and _target(one) == other]
            after = [one for one in lines[number + 1 :] if target in _mentioned(one)]
            if not other or (before and _softmax_of(before[-1]) is not None):
                code = "\n".join(map(ast.unparse, after))
                if "/" not in code and "norm" not in code and "softmax" not in code:
                    yield "weights", line.lineno, {"name": mask}
            elif _goes_into_softmax(target, after):
                yield "scores", line.lineno, {"name": mask}


def late_tests(part: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """Arguments that are None by default, and used where nothing has asked yet whether they are,
    though another line asks."""
    for function in nodes(ast.FunctionDef, part):
        given = function.args
        usual = [*given.posonlyargs, *given.args]
        last = [*usual[len(usual) - len(given.defaults) :], *given.kwonlyargs]
        for argument, default in zip(last, [*given.defaults, *given.kw_defaults], strict=True):
            name, empty = argument.arg, isinstance(default, ast.Constant) and default.value is None
            if not empty or not _asks(name, function):
                continue
            for one in function.body:
                branch = one if isinstance(one, ast.If) else None
                first = branch.test if branch else one
                if _is_plain(first) and _needs(name, first):
                    yield "none", one.lineno, {"name": name}
                    break
                asked = f"{name} is not None"
                guarded = branch and not branch.orelse and ast.unparse(branch.test) == asked
                stored = name in names(one, context=ast.Store)
                if not guarded and (stored or _may_end(one)):
                    break


def powers(part: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """`x ** 1 / 2`, which is x divided by 2, since the power is taken first."""
    for quotient in nodes(ast.BinOp, part):
        power = quotient.left
        if not isinstance(quotient.op, ast.Div) or not isinstance(power, ast.BinOp):
            continue
        exponent = ast.unparse(power.right)
        if isinstance(power.op, ast.Pow) and exponent in ("1", "-1"):
            meant = f"{exponent} / {ast.unparse(quotient.right)}"
            words = {"code": f"{ast.unparse(power.left)} ** {meant}", "meant": f"({meant})"}
            yield "power", quotient.lineno, words


def swapped(part: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """Arguments in the place of others: a dropout, heads or a mask that a function of the same file
    takes under such a name, and gets in another place."""
    for call in nodes(ast.Call, part):
        taken = _parameters(call, part, source)
        if any(isinstance(one, ast.Starred) for one in call.args):
            continue
        placed = dict(zip(taken, call.args, strict=False))
        given = placed | {one.arg: one.value for one in call.keywords if one.arg}
        kinds = {name: _kind(_word(value)) for name, value in given.items()}
        for name, value in placed.items():
            own = [one for one in taken if kinds[name] and _kind(one) == kinds[name]]
            if own and name not in own and all(kinds.get(one) != kinds[name] for one in own):
                words = {"given": _word(value), "name": name, "own": own[0]}
                yield "swapped", call.lineno, {**words, "called": ast.unparse(call.func)}


def undefined_names(part: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """Names that nothing defines."""
    for name, line in source.unbound.items():
        if name not in known and part.lineno <= line <= (part.end_lineno or 0):
            yield "undefined", line, {"name": name}


def missing(kind: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """What every call of forward takes from self, and nothing in the file defines or could set: a
    method, or an attribute that is spelled nearly as another."""
    if not isinstance(kind, ast.ClassDef):
        return
    thing = known.get(kind.name)
    homes = {one.__module__ for one in getattr(thing, "__mro__", ())} - {"builtins"}
    foreign = homes - {nn.Module.__module__, getattr(thing, "__module__", "")}
    attributes = [*nodes(ast.Attribute, source.tree)]
    forward = source.function(f"{kind.name}.forward")
    if not homes or foreign or forward is None:
        return
    set_ = {one.value for one in nodes(ast.Constant, source.tree) if isinstance(one.value, str)}
    set_ |= {one.name for one in nodes(ast.FunctionDef, source.tree)}
    set_ |= {one.attr for one in attributes if isinstance(one.ctx, ast.Store)}
    set_ |= names(source.tree, context=ast.Store)
    if OPEN & (names(kind) | {one.attr for one in attributes}):
        return
    for statement in filter(_is_plain, forward.body):
        for node in nodes(ast.Attribute, statement):
            name = _of_self(node)
            if not name or name in set_ or hasattr(thing, name):
                continue
            near = get_close_matches(name, source.attributes(kind.name), 1, 0.85)
            if near or name in _called(statement):
                yield "missing", node.lineno, {"name": name}


def no_methods(part: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """Methods that no tensor has, spelled nearly as one that it has, of what a method of tensors
    gives: `q.permute(0, 2, 1, 3).views(…)`."""
    own = {one.name for one in nodes(ast.FunctionDef, source.tree)}
    own |= {one.attr for one in nodes(ast.Attribute, source.tree) if isinstance(one.ctx, ast.Store)}
    for call in nodes(ast.Call, part):
        name, made = getattr(call.func, "attr", ""), getattr(call.func, "value", None)
        given = getattr(made.func, "attr", "") if isinstance(made, ast.Call) else ""
        if given not in NO_EFFECT or name in own or hasattr(Tensor, name):
            continue
        for meant in get_close_matches(name, dir(Tensor), 1, 0.85):
            yield "method", call.lineno, {"name": name, "meant": meant}


Reader = Callable[[ast.stmt, Source, Known], Iterator[Said]]
READERS: dict[str, tuple[Reader, ...]] = {
    "roles": (mixed_roles, lost_roles, unread_roles),
    "mask": (multiplied_masks, small_fills),
    "scale": (powers,),
    "unused-result": (thrown_away, never_read),
    "runs": (late_tests, missing, undefined_names, no_methods, swapped),
}
"""By rule, who reads mistakes of it."""


# --- pieces ---------------------------------------------------------------------------------------


def _role(name: str) -> str:
    """q, k or v, where a name speaks of one of them."""
    said = parts_of(name)
    return said if said in LONG else ""


def _of_self(node: ast.AST) -> str:
    """`name` for `self.name`."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return node.attr if node.value.id == "self" else ""
    return ""


def _called(value: ast.AST | None) -> list[str]:
    """Attributes of self that are called."""
    calls = nodes(ast.Call, value) if value is not None else ()
    return [name for call in calls if (name := _of_self(call.func))]


def _within(node: ast.Name, whole: ast.stmt) -> bool:
    return any(one is node for one in ast.walk(whole))


def _is_plain(statement: ast.AST) -> bool:
    """Whether all of it runs whenever it is reached."""
    whole = not any(isinstance(node, BRANCHING) for node in ast.walk(statement))
    return isinstance(statement, (*PLAIN, ast.expr)) and whole


def _may_end(statement: ast.stmt) -> bool:
    """Whether what comes after it may never be reached."""
    return any(isinstance(one, ast.Return | ast.Raise | ast.Assert) for one in ast.walk(statement))


def _needs(name: str, statement: ast.AST) -> bool:
    """Whether a statement asks something of a name that None has not: `name.to(…)`, `name[…]`."""
    parts = (*nodes(ast.Attribute, statement), *nodes(ast.Subscript, statement))
    return any(isinstance(one.value, ast.Name) and one.value.id == name for one in parts)


def _asks(name: str, statement: ast.AST) -> bool:
    """Whether somewhere in it a name is compared with None."""
    tests = (one for one in nodes(ast.Compare, statement) if isinstance(one.left, ast.Name))
    return any(ast.unparse(one).startswith(f"{name} is ") for one in tests)


def _target(statement: ast.stmt) -> str:
    """The one name that a statement gives a value to, whole or in part; else nothing."""
    targets = statement.targets if isinstance(statement, ast.Assign) else ()
    targets = (statement.target,) if isinstance(statement, ast.AugAssign) else targets
    return _word(_root(targets[0])) if len(targets) == 1 else ""


def _root(node: ast.expr) -> ast.expr:
    """`scores` of `scores[:, 0]`."""
    return _root(node.value) if isinstance(node, ast.Subscript) else node


def _word(node: ast.AST | None) -> str:
    """`name` for `name` and `self.name`; else nothing."""
    return node.id if isinstance(node, ast.Name) else _of_self(node) if node is not None else ""


def _mentioned(*parts: ast.AST) -> set[str]:
    """Names, and attributes of self."""
    return names(*parts) | {_of_self(one) for one in nodes(ast.Attribute, *parts)} - {""}


def _overwritten(part: ast.stmt) -> Iterator[tuple[str, ast.Assign, ast.Assign]]:
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
                    waiting |= dict.fromkeys(made, statement)


def _softmax_of(statement: ast.AST) -> set[str] | None:
    """The names that a softmax of a statement is taken of; none of products made within it."""
    for call in nodes(ast.Call, statement):
        if "softmax" in ast.unparse(call.func).split(".")[-1].lower():
            inside = [call.func.value] if isinstance(call.func, ast.Attribute) else []
            said = [*inside, *call.args, *(one.value for one in call.keywords)]
            made = any(isinstance(one.op, ast.MatMult) for one in nodes(ast.BinOp, *said))
            calls = nodes(ast.Call, *said)
            made = made or any(getattr(one.func, "attr", "") in PRODUCTS for one in calls)
            return set() if made else _mentioned(*said)
    return None


def _is_mask(name: str) -> bool:
    known = calling_role(name) in ("mask", "padding") and "mask" in name.lower()
    return known and not BY_CHANCE.search(name.lower())


def _masked_product(statement: ast.stmt) -> tuple[str, str, str] | None:
    """For `scores *= mask` and `weights = scores * mask`: the name that is made, the name that is
    multiplied (nothing where that is a softmax itself), and the mask."""
    sides: list[ast.expr] = []
    if isinstance(statement, ast.AugAssign) and isinstance(statement.op, ast.Mult):
        sides = [statement.target, statement.value]
    elif isinstance(statement, ast.Assign) and isinstance(statement.value, ast.BinOp):
        value = statement.value
        sides = [value.left, value.right] if isinstance(value.op, ast.Mult) else []
    target = _target(statement)
    for mask, other in (sides, sides[::-1]) if sides and target else ():
        said = sorted(filter(_is_mask, _mentioned(mask)))
        sums = any(isinstance(one.op, ast.Add) for one in nodes(ast.BinOp, mask))
        word = _word(_root(other))
        plain = bool(word) or (isinstance(other, ast.Call) and _softmax_of(other) is not None)
        if len(said) == 1 and not sums and plain and not any(map(_is_mask, _mentioned(other))):
            return target, word, said[0]
    return None


def _goes_into_softmax(name: str, lines: Sequence[ast.stmt]) -> bool:
    """Whether a softmax is taken of it before anything else may hide what is 0 in it."""
    for one in lines:
        if name in (_softmax_of(one) or ()):
            return True
        others = any(map(_is_mask, _mentioned(one)))
        if (HIDES.search(ast.unparse(one)) and not others) or name not in _read(one):
            return False
    return False


def _read(statement: ast.stmt) -> set[str]:
    """The names that a statement reads, or changes a part of."""
    if isinstance(statement, ast.Assign) and not isinstance(statement.targets[0], ast.Subscript):
        return _mentioned(statement.value)
    return _mentioned(statement)


def _kind(name: str) -> str:
    """Which of the arguments that nothing else can stand for a name speaks of."""
    built = building_role(name) if len(name) > 1 else ""
    called = calling_role(name) if len(name) > 1 else ""
    if built in ("heads", "dropout"):
        return built
    return "mask" if called in ("mask", "padding") else ""


def _parameters(call: ast.Call, part: ast.stmt, source: Source) -> list[str]:
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

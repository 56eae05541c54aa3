"""Read mistakes off the code of classes and functions, which need not be built or called for it.

Each reader takes a class or function, the file that it stands in, and what that file knows; it
gives the way in which its rule is broken, the line, and words for the finding. It says nothing
where it is not sure.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator
from difflib import get_close_matches
from types import ModuleType

from torch import Tensor, nn

from ..files.syntax import NO_EFFECT, Source, names, nodes, pairs, unused
from ..target.names import calling_role
from .read_pieces import (
    INNER,
    WORKED_ON,
    Known,
    Said,
    asks,
    built_of_self,
    called_of_self,
    defaults_of,
    is_mask,
    is_plain,
    is_set_beside,
    is_within,
    kind_of,
    may_end,
    needs,
    of_self,
    overwritten,
    parameters_of,
    qkv_of,
    target_of,
    turns,
    word_of,
)

OPEN = {"setattr", "__dict__", "__getattr__", "__getattribute__", "vars"}
"""What gives a class attributes that cannot be read."""
TRIANGLE = re.compile("^tri[lu]$|causal_mask")
"""What makes a mask of later tokens."""
A_MODULE = nn.Module()
"""What each module has, `training` among it."""


def thrown_away(part: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """Results that nothing takes, or that the next value of their name replaces unread."""
    yield from (("lost", line, {"name": name}) for line, name in unused(part))
    layers = {*built_of_self(part)}
    for name, lost, _ in overwritten(part):
        called = getattr(lost.value, "func", None)
        made = getattr(called, "attr", "") in NO_EFFECT or word_of(called) in layers
        if (made or isinstance(lost.value, ast.BinOp)) and target_of(lost) == name:
            yield "overwritten", lost.lineno, {"name": name}


def never_read(part: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """Results that nothing reads afterwards: `x = self.norm(x)` behind the last x, scores or
    weights that are worked on for nothing, and triangles of a mask that hides nothing."""
    unread = _never_read(part, source)
    yield from (("never", line, {"name": name}) for name, value, line in unread if not turns(value))


def unread_turns(part: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """Queries or keys that rotary positions turn behind the attention: nothing reads them."""
    unread = _never_read(part, source)
    yield from (("unread", line, {"name": name}) for name, value, line in unread if turns(value))


def turned_values(part: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """Values that are turned by their positions: `v = apply_rotary(v, …)`, and
    `q, k, v = map(lambda t: apply_rotary(…, t), (q, k, v))`."""
    asked = [one for one in nodes(ast.If, part) if re.search("value|qkv", ast.unparse(one.test))]
    for line in nodes(ast.Assign, part):
        if is_within(line, *asked):
            continue  # an option, as RoFormer has it
        for target, value in pairs(line):
            name = word_of(target)
            match value:
                case ast.Call(ast.Name("map"), [ast.Lambda(body=ast.Call() as call), *given]):
                    every = {word_of(one) for part in given for one in getattr(part, "elts", ())}
                    whole = turns(call) and name in every
                case ast.Call(args=[*given]):
                    whole = turns(value) and [word_of(one) for one in given].count(name) == 1
                    whole = whole and not any(qkv_of(word_of(one)) in ("q", "k") for one in given)
                case _:
                    continue
            if whole and qkv_of(name) == "v":
                yield "values", line.lineno, {"name": name}


def _never_read(part: ast.stmt, source: Source) -> Iterator[tuple[str, ast.expr, int]]:
    """Names whose value nothing reads afterwards, with the value and the line."""
    for function in nodes(ast.FunctionDef, part):
        parts = [*ast.walk(function)][1:]
        inner = [one for one in parts if isinstance(one, (*INNER, ast.For, ast.While))]
        skipped = names(function if function.name == "__init__" else ast.Pass(), *inner)
        shown = {
            id(load)
            for call in nodes(ast.Call, function)
            if ast.unparse(call.func) == "print"
            for load in nodes(ast.Name, call)
        }
        loads = [one for one in nodes(ast.Name, function) if isinstance(one.ctx, ast.Load)]
        loads = [one for one in loads if id(one) not in shown]
        within = range(function.lineno, (function.end_lineno or 0) + 1)
        lost = [name for name, line in source.unbound.items() if line in within]
        early = _read_early(function)
        lines = ((one, *pair) for one in nodes(ast.Assign, function) for pair in pairs(one))
        for one, target, value in lines:
            single = value is not one.value or target is one.targets[0]  # of no call's several
            name = target.id if isinstance(target, ast.Name) and single else ""
            if not name or name in skipped or not isinstance(value, ast.Call | ast.BinOp):
                continue
            rolls = getattr(getattr(value, "func", None), "attr", "") == "roll"
            given = [word_of(one) for one in getattr(value, "args", ())]
            made_of = is_mask(name) and name in given and len(given) > 1  # of scores and itself
            own = name in names(one.value) and (rolls or made_of or bool(called_of_self(value)))
            read = [load for load in loads if load.id == name and not is_within(load, one)]
            later = [load for load in read if not own or load.lineno > one.lineno]
            if get_close_matches(name, lost, 1, 0.85) or name in early:
                continue  # another reader tells what is wrong with the name
            meant = own or WORKED_ON.search(name.lower()) or _is_triangle(name, value)
            if not later and len(one.targets) == 1 and meant:
                yield name, value, one.lineno


def _is_triangle(name: str, value: ast.expr) -> bool:
    """Whether a mask is given a triangle, or what a method makes of later tokens."""
    calls = [ast.unparse(call.func).split(".")[-1] for call in nodes(ast.Call, value)]
    return is_mask(name) and any(TRIANGLE.search(one) for one in calls)


def late_tests(part: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """Arguments that are None by default, and used where nothing has asked yet whether they are,
    though another line asks."""
    for function in nodes(ast.FunctionDef, part):
        for name, default in defaults_of(function).items():
            empty = isinstance(default, ast.Constant) and default.value is None
            if not empty or not asks(name, function):
                continue
            for one in function.body:
                branch = one if isinstance(one, ast.If) else None
                first = branch.test if branch else one
                if is_plain(first) and needs(name, first):
                    yield "none", one.lineno, {"name": name}
                    break
                asked = f"{name} is not None"
                guarded = branch and not branch.orelse and ast.unparse(branch.test) == asked
                stored = name in names(one, context=ast.Store)
                if not guarded and (stored or may_end(one)):
                    break


def empty_tests(part: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """Arguments that are used where a test has just found that they are None: `if not cache:`."""
    for branch in nodes(ast.If, part):
        match branch.test:
            case ast.Compare(ast.Name(name), [ast.Is()], [ast.Constant(None)]) | ast.UnaryOp(
                ast.Not(), ast.Name(name)
            ):
                first = branch.body[0]
                asked = [one for one in nodes(ast.Attribute, first) if word_of(one.value) == name]
                held = any(hasattr(kind, one.attr) for one in asked for kind in (list, dict, set))
                if is_plain(first) and asked and not held:
                    yield "empty", first.lineno, {"name": name}
            case _:
                pass


def either_tensor(part: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """`values = values or keys`, which asks a tensor of many numbers whether it is true."""
    for function in nodes(ast.FunctionDef, part):
        given = {one.arg for one in nodes(ast.arg, function)}
        for one in nodes(ast.BoolOp, function):
            match one:
                case ast.BoolOp(ast.Or(), [ast.Name(name), ast.Name(other)]):
                    roles = {calling_role(name), calling_role(other)} - {"query", "key", "value"}
                    if {name, other} <= given and not roles:
                        yield "either", one.lineno, {"name": name, "other": other}
                case _:
                    pass


def own_words(part: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """`type == "general"`, where Python's own `type` is compared, and `self.type` was meant."""
    for function in nodes(ast.FunctionDef, part):
        given = {one.arg for one in nodes(ast.arg, function)} | names(function, context=ast.Store)
        for test in nodes(ast.Compare, function):
            match test:
                case ast.Compare(ast.Name(name), [ast.Eq()], [ast.Constant(str())]):
                    if callable(vars(builtins).get(name)) and name not in given | {*known}:
                        yield "builtin", test.lineno, {"code": ast.unparse(test), "name": name}
                case _:
                    pass


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
        taken = parameters_of(call, part, source)
        if any(isinstance(one, ast.Starred) for one in call.args):
            continue
        placed = dict(zip(taken, call.args, strict=False))
        given = placed | {one.arg: one.value for one in call.keywords if one.arg}
        kinds = {name: kind_of(word_of(value)) for name, value in given.items()}
        for name, value in placed.items():
            own = [one for one in taken if kinds[name] and kind_of(one) == kinds[name]]
            if own and name not in own and all(kinds.get(one) != kinds[name] for one in own):
                words = {"given": word_of(value), "name": name, "own": own[0]}
                yield "swapped", call.lineno, {**words, "called": ast.unparse(call.func)}


def undefined_names(part: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """Names that nothing defines."""
    for name, line in source.unbound.items():
        if name not in known and part.lineno <= line <= (part.end_lineno or 0):
            yield "undefined", line, {"name": name}


def missing(kind: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """What methods take from self, and nothing in the file or beside it defines or could set; where
    every call of forward takes it, one that is spelled nearly as another is enough, and one that is
    an argument of the method is one of the file alone."""
    thing = known.get(getattr(kind, "name", ""))
    if not isinstance(kind, ast.ClassDef) or not _is_of_file(thing):
        return
    attributes = [*nodes(ast.Attribute, source.tree)]
    if OPEN & (names(kind) | {one.attr for one in attributes}):
        return
    set_ = _set_for(kind, source)
    forward = source.function(f"{kind.name}.forward")
    reached = filter(is_plain, [] if forward is None else forward.body)
    plain = {one for statement in reached for one in ast.walk(statement)}
    methods = (one for one in kind.body if isinstance(one, INNER))
    named = {getattr(one, "name", ""): one for one in methods}
    begins = getattr(named.pop("__init__", None), "body", [])
    built = [one for one in begins if is_plain(one)]
    plain |= {one for statement in built for one in ast.walk(statement)}
    for node in nodes(ast.Attribute, *built, *named.values()):
        name = of_self(node)
        if not name or name in set_ or hasattr(thing, name) or hasattr(A_MODULE, name):
            continue
        near = get_close_matches(name, source.attributes(kind.name), 1, 0.85)
        always = node in plain
        _, function = source.owner_at(node.lineno)
        own = function is not None and name in {one.arg for one in nodes(ast.arg, function)}
        if (near and always) or own or not is_set_beside(name, kind.name, source.file):
            yield "missing" if always else "unset", node.lineno, {"name": name}


def _is_of_file(thing: object) -> bool:
    """Whether it is a class that derives from nothing but its own file's and PyTorch's modules."""
    if not isinstance(thing, type):
        return False
    homes = {one.__module__ for one in thing.__mro__}
    return homes <= {"builtins", nn.Module.__module__, thing.__module__}


def _set_for(kind: ast.ClassDef, source: Source) -> set[str]:
    """The attributes that a class's family, or the file outside of other classes, may give it."""
    family = _family(kind, source)
    strangers = (one for one in nodes(ast.ClassDef, source.tree) if one not in family)
    strange = {id(one) for each in strangers for one in ast.walk(each)}
    stored = (
        one
        for one in nodes(ast.Attribute, source.tree)
        if isinstance(one.ctx, ast.Store) and (not of_self(one) or id(one) not in strange)
    )
    words = {one.value for one in nodes(ast.Constant, source.tree) if isinstance(one.value, str)}
    every = [*nodes(ast.FunctionDef, *family)]
    inner = {id(one) for each in every for one in nodes(ast.FunctionDef, *each.body)}
    methods = {one.name for one in every if id(one) not in inner}
    return words | methods | names(*family, context=ast.Store) | {one.attr for one in stored}


def _family(kind: ast.ClassDef, source: Source) -> list[ast.ClassDef]:
    """A class as its file has it, those that it derives from, and those that derive from any of
    them."""
    classes = {one.name: one for one in source.tree.body if isinstance(one, ast.ClassDef)}
    bases = {name: names(*one.bases) & classes.keys() for name, one in classes.items()}
    family, size = {kind.name}, 0
    while size < len(family):
        size = len(family)
        for name, above in bases.items():
            if name in family or above & family:
                family |= above | {name}
    return [one for name, one in classes.items() if name in family]


def _read_early(function: ast.FunctionDef) -> dict[str, int]:
    """Local names that nothing sets but lines which read them, with the first of these."""
    given = {one.arg for one in nodes(ast.arg, function)}
    shared = {name for one in nodes(ast.Global, function) for name in one.names}
    shared |= {name for one in nodes(ast.Nonlocal, function) for name in one.names}
    stores = [one for one in nodes(ast.Name, function) if isinstance(one.ctx, ast.Store)]
    lines = [one for one in nodes(ast.Assign, function) if isinstance(one.targets[0], ast.Name)]
    found = dict[str, int]()
    for name in {word_of(one.targets[0]) for one in lines} - given - shared:
        own = [one for one in lines if word_of(one.targets[0]) == name]
        every = [one for one in stores if one.id == name]
        plain = len(own) == len(every) and all(len(one.targets) == 1 for one in own)
        if plain and all(name in names(one.value, context=ast.Load) for one in own):
            found[name] = min(one.lineno for one in own)
    return found


def read_before(part: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """`scores = scores.masked_fill(…)`, where the scores go by another name so far."""
    for function in nodes(ast.FunctionDef, part):
        for name, line in _read_early(function).items():
            yield "unbound", line, {"name": name}


def no_methods(part: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """Methods that no tensor has, spelled nearly as one that it has, of what a method of tensors
    gives: `q.permute(0, 2, 1, 3).views(…)`."""
    own = {one.name for one in nodes(ast.FunctionDef, source.tree)}
    own |= {one.attr for one in nodes(ast.Attribute, source.tree) if isinstance(one.ctx, ast.Store)}
    named = {one.arg for each in nodes(ast.arguments, part) if (one := each.kwarg) is not None}
    for call in nodes(ast.Call, part):
        name, made = getattr(call.func, "attr", ""), getattr(call.func, "value", None)
        given = getattr(made.func, "attr", "") if isinstance(made, ast.Call) else ""
        score = isinstance(made, ast.Name) and WORKED_ON.search(made.id.lower())
        score = score and not re.search(r"args|dict|config|cfg|params|opts", word_of(made).lower())
        if not (given in NO_EFFECT or score) or name in own or hasattr(Tensor, name):
            continue
        if word_of(made) in {*named, *known}:  # `**kwargs`, a class
            continue
        for meant in get_close_matches(name, dir(Tensor), 1, 0.85):
            yield "method", call.lineno, {"name": name, "meant": meant}


def no_functions(part: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """Functions that PyTorch has not, spelled nearly as one that it has: `torch.Softmax(x)`."""
    for call in nodes(ast.Call, part):
        match call.func:
            case ast.Attribute(ast.Name(home), name) if len(name) > 5 and name[0] != "_":
                module = known.get(home)
            case _:
                continue
        ours = isinstance(module, ModuleType) and module.__name__.split(".")[0] == "torch"
        if ours and not hasattr(module, name) and f'"{name}"' not in source.text:
            alike = [one for one in dir(module) if one.lower() == name.lower()]
            for meant in (alike or get_close_matches(name, dir(module), 1, 0.85))[:1]:
                words = {"name": f"{home}.{name}", "meant": f"{home}.{meant}"}
                yield "function", call.lineno, words

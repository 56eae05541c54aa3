"""Read mistakes about caches of keys and values off the code, which need not be called for it."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ..files.syntax import Source, names, nodes
from ..target.names import calling_role
from .read_pieces import (
    WORKED_ON,
    Known,
    Said,
    is_mask,
    is_within,
    may_end,
    of_self,
    qkv_of,
    root_of,
    sized,
    target_of,
    word_of,
    words_in,
)

BEFORE = re.compile(r"past|cache|prev|history")
"""Names of what was kept of tokens before."""
OF_TABLES = re.compile(r"rope|rot|freq|cos|sin|mask|bias|pos")
"""Names of caches of something else."""
OF_ROPE = re.compile(r"rope|rot|freq|cos|sin")
STARTS = re.compile(r"start|offset|position|pos_|_pos|(^| )pos( |$)|past_len|cache_len|seen")
"""Names of tables of rotary positions, and of where the new tokens begin."""
OF_WINDOWS = re.compile(r"^(?!.*[=>] 1\b).*window")
"""Tests that ask for a window, and not for the number of new tokens."""
OF_LENGTHS = re.compile(
    r"past|cache|prev|len|size|shape|start|prefill|decod|training|incremental|[=<>] ?1\b"
)
"""Tests that ask whether there are tokens before, or several new ones."""
Setting = ast.Assign | ast.AugAssign | ast.AnnAssign
SETS = (ast.Assign, ast.AugAssign, ast.AnnAssign)
TRIANGLES = {"triu", "tril"}
JOINS = {"cat", "concat", "concatenate"}
FILLED = {"ones", "full", "zeros"}


@dataclass
class Joined:
    """What a function puts behind cached keys: the joined names, each with its line, and where the
    cached ones come from; and names of lengths, of the new tokens or of all."""

    cached: str = ""
    lines: dict[str, int] = field(default_factory=dict)
    new: set[str] = field(default_factory=set)
    whole: set[str] = field(default_factory=set)

    def length(self, node: ast.AST | None) -> str:
        """ "new" or "whole" for what is the number of new tokens, or of all keys; else nothing."""
        if isinstance(node, ast.Name):
            return "new" if node.id in self.new else "whole" if node.id in self.whole else ""
        name, axis = _axis_of(node)
        if not name or axis in (0, -1, 3):
            return ""
        line = getattr(node, "lineno", 0)
        if name in self.lines:
            return "whole" if line > self.lines[name] else "new"
        return "new" if qkv_of(name) == "q" else ""


def misaligned(part: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """A causal mask that starts at the first key, also behind a cache: a triangle over new tokens
    and all keys on a fixed diagonal, `triu(ones_like(scores), 1)`, or a table that is cut from its
    beginning, `mask[:T, :S]`. A single new token sees the first key alone."""
    for function in nodes(ast.FunctionDef, part):
        joined = _joined(function)
        taken = {one.arg for one in function.args.args if calling_role(one.arg) == "cache"}
        used = sorted(taken & names(*function.body, context=ast.Load))
        given = Counter(target_of(one) for one in nodes(ast.Assign, function))
        for statement in _always(function.body):
            name = target_of(statement)
            if given[name] > 1 and not WORKED_ON.search(name.lower()):  # it may be moved there
                continue
            for call in nodes(ast.Call, statement):
                way, first = _triangle(call)
                like = re.search(r"_like\((\w+)", ast.unparse(first)) if first else None
                if like and used and WORKED_ON.search(like[1].lower()):
                    yield "aligned", call.lineno, {"way": way, "name": used[0]}
                elif first and joined.lines and _sides(first, joined) == ("new", "whole"):
                    spans = "self." in ast.unparse(call).split("diagonal")[-1]
                    which = "span" if spans else "aligned"
                    yield which, call.lineno, {"way": way, "name": joined.cached}
            for cut in nodes(ast.Subscript, statement) if joined.lines else ():
                if _is_table(cut) and _from_start(cut, joined):
                    code = ast.unparse(cut)
                    yield "cut", cut.lineno, {"code": code, "name": joined.cached}


def stored_once(kind: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """Keys that are kept while there are none, and later joined with new ones without being kept:
    `if self.past_k is None: self.past_k = k`, `else: k = cat((self.past_k, k))`."""
    if not isinstance(kind, ast.ClassDef):
        return
    text = ast.unparse(kind)
    every = [one for one in ast.walk(kind) if isinstance(one, SETS)]
    for branch in nodes(ast.If, kind):
        name = _tested(branch.test)
        if not name or not BEFORE.search(name.lower()) or OF_TABLES.search(name.lower()):
            continue
        first = [one for one in every if name in _set_by(one) and is_within(one, *branch.body)]
        joins = [one for call in nodes(ast.Call, *branch.orelse) for one in _parts(call)]
        others = [one for one in every if name in _set_by(one) and one not in first]
        plain = all(map(_is_constant, others))
        open_ = re.search(rf"setattr|__dict__|self\.{name}\.(?!shape|size|dim|dtype)", text)
        held = any(of_self(one) == name for one in joins)
        if first and held and plain and not open_ and not _set_outside(name, kind, source):
            yield "once", branch.lineno, {"name": name}


def stored_astray(kind: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """`self.cache_k[start : start + T] = k`, where `self.cache_k[:B, : start + T]` is read: what is
    kept goes to other sequences of the batch, not to its place."""
    read = dict[tuple[str, str], str]()
    for one in nodes(ast.Subscript, kind):
        match one:
            case ast.Subscript(held, ast.Tuple([ast.Slice(), ast.Slice(upper=end), *_])):
                if isinstance(one.ctx, ast.Load) and end is not None:
                    read[of_self(held), ast.unparse(end)] = ast.unparse(one)
            case _:
                pass
    for line in nodes(ast.Assign, kind):
        match line.targets:
            case [ast.Subscript(held, ast.Slice(lower=ast.expr(), upper=ast.expr() as end)) as to]:
                code = read.get((of_self(held), ast.unparse(end)), "")
                if code and of_self(held):
                    yield "astray", line.lineno, {"code": ast.unparse(to), "read": code}
            case _:
                pass


def first_alone(kind: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """`scaled_dot_product_attention(…, is_causal=True)` behind a cache, whatever is kept in it:
    PyTorch's triangle begins at the first key, so that a single new token sees no other."""
    methods = [*nodes(ast.FunctionDef, kind)]
    cached = next((one.cached for one in map(_joined, methods) if one.lines), "")
    for function in methods if cached else ():
        asked = [one for one in nodes(ast.If, function) if OF_LENGTHS.search(ast.unparse(one.test))]
        for call in nodes(ast.Call, function):
            flag = next((one.value for one in call.keywords if one.arg == "is_causal"), None)
            always = isinstance(flag, ast.Constant) and flag.value is True
            fused = ast.unparse(call.func).endswith("scaled_dot_product_attention")
            if always and fused and not any(is_within(call, branch) for branch in asked):
                yield "first", call.lineno, {"name": cached}


def turned_from_start(part: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """`self.cos[:T]` for T new tokens in a call that is handed a cache: their positions begin at 0
    however many tokens were before them."""
    for function in nodes(ast.FunctionDef, part):
        given = [one.arg for one in nodes(ast.arg, function)]
        taken = [name for name in given if calling_role(name) == "cache"]
        used = names(*function.body, context=ast.Load) & {*taken}
        if not used or STARTS.search(" ".join([*given, *names(function)])):
            continue
        lengths = _joined(function)
        sets = Counter(name for one in nodes(ast.Assign, function) for name in names(*one.targets))
        grown = names(*(one.target for one in nodes(ast.AugAssign, function)))
        for statement in function.body:
            for cut in nodes(ast.Subscript, statement) if not isinstance(statement, ast.If) else ():
                first = cut.slice.elts[0] if isinstance(cut.slice, ast.Tuple) else cut.slice
                match first:
                    case ast.Slice(None, ast.Name(end)) if OF_ROPE.search(of_self(cut.value)):
                        once = sets[end] == 1 and end not in grown
                        if once and lengths.length(first.upper) == "new":
                            words = {"code": ast.unparse(cut), "name": min(used)}
                            yield "start", cut.lineno, words
                            return
                    case _:
                        pass


def _set_outside(name: str, kind: ast.ClassDef, source: Source) -> bool:
    """Whether something else of the file sets it to more than a constant: of another object, or a
    class that is made of this one."""
    heirs = [
        one
        for one in nodes(ast.ClassDef, source.tree)
        if kind.name in {word_of(base) for base in one.bases}
    ]
    own = {id(one) for heir in heirs for one in ast.walk(heir)}
    for one in nodes(ast.Assign, source.tree):
        for part in nodes(ast.Attribute, *one.targets):
            foreign = not of_self(part) or id(one) in own
            if part.attr == name and foreign and not _is_constant(one):
                return True
    return False


def _is_constant(statement: Setting) -> bool:
    """Whether a statement sets something to None or another constant."""
    parts = getattr(statement.value, "elts", [statement.value])
    return all(one is None or isinstance(one, ast.Constant) for one in parts)


def _tested(test: ast.expr) -> str:
    """`name` for `self.name is None`."""
    match test:
        case ast.Compare(left, [ast.Is()], [ast.Constant(None)]):
            return of_self(left)
        case _:
            return ""


def _set_by(statement: Setting) -> set[str]:
    """The attributes of self that a statement sets, whole or in part."""
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    parts = [one for target in targets for one in getattr(target, "elts", [target])]
    return {of_self(root_of(one)) for one in parts} - {""}


def _parts(call: ast.Call) -> list[ast.expr]:
    """What a call puts together."""
    if getattr(call.func, "attr", "") not in JOINS or not call.args:
        return []
    return getattr(call.args[0], "elts", [])


def _joined(function: ast.FunctionDef) -> Joined:
    """What a function puts behind what was cached."""
    ending = [one for one in nodes(ast.If, function) if any(map(may_end, one.body))]
    early = {id(one) for branch in ending for one in ast.walk(branch)}
    found = Joined()
    lines = [one for one in nodes(ast.Assign, function) if id(one) not in early]
    lines.sort(key=lambda one: one.lineno)
    cached = {one.arg: one.arg for one in function.args.args if _is_before(one.arg)}
    inputs = [one.arg for one in function.args.args if one.arg != "self"][:1]
    for one in lines:
        targets = [t for target in one.targets for t in getattr(target, "elts", [target])]
        given = [t.id for t in targets if isinstance(t, ast.Name)]
        said = sorted(words_in(one.value))
        origin = next((cached.get(n, n) for n in said if n in cached or _is_before(n)), "")
        for call in nodes(ast.Call, one.value):
            parts = [word_of(root_of(part)) for part in _parts(call)]
            if len(parts) == 2 and (parts[0] in cached or _is_before(parts[0])) and parts[1]:
                found.cached = found.cached or cached.get(parts[0], parts[0])
                found.lines |= dict.fromkeys((n for n in given if qkv_of(n) == "k"), one.lineno)
        if origin and isinstance(one.value, ast.Name | ast.Subscript | ast.Attribute):
            cached |= dict.fromkeys((n for n in given if n not in found.lines), origin)
        _learn_lengths(one, targets, inputs, found)
    return found


def _learn_lengths(
    line: ast.Assign, targets: Sequence[ast.expr], inputs: Sequence[str], found: Joined
) -> None:
    """Note the lengths that a line names."""
    value = line.value
    if (owner := sized(value)) is not None:
        if word_of(owner) in inputs and len(targets) == 3 and isinstance(targets[1], ast.Name):
            found.new.add(targets[1].id)
        if found.lines and len(targets) == 4 and WORKED_ON.search(word_of(owner).lower()):
            found.new |= {word_of(targets[2])} - {""}
            found.whole |= {word_of(targets[3])} - {""}
    elif len(targets) == 1 and isinstance(targets[0], ast.Name):
        name, axis = _axis_of(value)
        kind = "new" if name in inputs and axis in (1, -2) else found.length(value)
        for known, own in ((found.new, "new"), (found.whole, "whole")):
            known.discard(targets[0].id)
            known |= {targets[0].id} if kind == own else set()


def _is_before(name: str) -> bool:
    """Whether a name speaks of what was kept of tokens before."""
    low = name.lower()
    said = BEFORE.search(low) is not None or calling_role(name) == "cache"
    return said and not OF_TABLES.search(low) and not re.search(r"^use|len|size|idx|layer_id", low)


def _axis_of(node: ast.AST | None) -> tuple[str, int | None]:
    """`("x", 1)` for `x.shape[1]` and `x.size(1)`."""
    match node:
        case ast.Subscript(ast.Attribute(owner, "shape"), index):
            pass
        case ast.Call(ast.Attribute(owner, "size"), [index]):
            pass
        case _:
            return "", None
    try:
        axis = ast.literal_eval(index)
    except ValueError:
        return "", None
    return word_of(owner), axis if isinstance(axis, int) else None


def _triangle(call: ast.Call) -> tuple[str, ast.expr | None]:
    """The name of a function that keeps a triangle on a fixed diagonal, and of what; else
    nothing."""
    way, given = getattr(call.func, "attr", ""), [*call.args]
    if way not in TRIANGLES:
        return "", None
    if isinstance(call.func, ast.Attribute) and word_of(call.func.value) != "torch":
        given.insert(0, call.func.value)
    given += [one.value for one in call.keywords if one.arg == "diagonal"]
    fixed = all(re.fullmatch(r"-?(\d+|self\.\w+)", ast.unparse(one)) for one in given[1:])
    return (way, given[0]) if given and fixed else ("", None)


def _sides(table: ast.expr, joined: Joined) -> tuple[str, ...]:
    """Which lengths the last two axes of a table have that is made on the spot."""
    for call in nodes(ast.Call, table):
        if getattr(call.func, "attr", "") in FILLED and call.args:
            sizes = getattr(call.args[0], "elts", call.args)
            return tuple(map(joined.length, sizes[-2:]))
    return ()


def _is_table(cut: ast.Subscript) -> bool:
    """Whether a part of a mask that the layer keeps is taken."""
    name = of_self(cut.value)
    return bool(name) and (is_mask(name) or name in ("bias", "tril", "mask", "causal"))


def _from_start(cut: ast.Subscript, joined: Joined) -> bool:
    """Whether the last two axes are cut `[:T, :S]`, of new tokens and all keys."""
    index = cut.slice.elts if isinstance(cut.slice, ast.Tuple) else [cut.slice]
    last = [one for one in index[-2:] if isinstance(one, ast.Slice) and one.lower is None]
    ends = [joined.length(one.upper) for one in last]
    return ends == ["new", "whole"]


def _always(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that run whenever a layer is causal and has no kernel of its own."""
    for one in body:
        if not isinstance(one, ast.If):
            yield one
        elif all(calling_role(word) == "causal" for word in words_in(one.test) - {"self"}):
            yield from _always(one.body)
        elif _chooses_kernel(one):
            yield from _always([*one.body, *one.orelse])
        elif OF_WINDOWS.search(ast.unparse(one.test)):
            yield from _always(one.body)


def _chooses_kernel(branch: ast.If) -> bool:
    """Whether a test asks for a kernel, so that either side is attention."""
    return (
        bool(branch.orelse) and re.search(r"flash|sdpa|fused", ast.unparse(branch.test)) is not None
    )

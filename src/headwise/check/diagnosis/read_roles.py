"""Read off the code where queries, keys and values, or parts of them, are taken for one another."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator

from ..files.syntax import Source, names, nodes, pairs
from .read_pieces import (
    LONG,
    WORKED_ON,
    Known,
    Said,
    built_of_self,
    called_of_self,
    given_before,
    in_order,
    of_self,
    overwritten,
    products,
    qkv_of,
    word_of,
)

ROLE = re.compile(r"queries|query|keys?|values?|(^|_)x?[qkv](?=_|$)|^x?[qkv](?=[A-Z])")
WHOLE = re.compile(r"^([a-z]|num|len|dim|seq)_|_(len|dim|size|num)$")
"""Names of numbers, as `t_k` is one of tokens."""


def mixed_roles(kind: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """Queries, keys or values that another one's projection makes, while their own is never used:
    `v = self.w_k(x)`, with a `self.w_v` that nothing reads."""
    if not isinstance(kind, ast.ClassDef):
        return
    given = [pair for node in nodes(ast.Assign, kind) for pair in pairs(node)]
    read = {one.attr for one in nodes(ast.Attribute, kind) if isinstance(one.ctx, ast.Load)}
    spare = {qkv_of(name): name for name in built_of_self(kind) if name not in read}
    for target, value in given:
        role = qkv_of(target.id) if isinstance(target, ast.Name) else ""
        parts = [of_self(one) for one in nodes(ast.Attribute, value)] if value is not None else []
        made = sorted({name for name in parts if qkv_of(name)})
        if role and role in spare and len(made) == 1 and qkv_of(made[0]) != role:
            words = {"other": f"self.{made[0]}", "own": f"self.{spare[role]}"}
            yield "mixed", target.lineno, {"part": LONG[role], **words}


def lost_roles(part: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """Queries, keys or values that are made, never read, and made again of another: `v = k.view(…)`
    where `v = v.view(…)` was meant."""
    for name, lost, statement in overwritten(part):
        others = {one for one in names(statement.value) if qkv_of(one)}
        role, roles = qkv_of(name), {qkv_of(one) for one in others}
        if role and called_of_self(lost.value) and len(roles) == 1 and role not in roles:
            words = {"part": LONG[role], "name": name, "other": min(others)}
            yield "lost", statement.lineno, words


def copied_lines(part: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """`q = norm(q, eps)`, and in the next line `k = norm(q, eps)`, which loses the keys that were
    there."""
    for function in nodes(ast.FunctionDef, part):
        lines = [one for one in in_order(function) if isinstance(one, ast.Assign)]
        for first, second in itertools.pairwise(lines):
            name, other = word_of(second.targets[0]), word_of(first.targets[0])
            there = given_before(function, name, first.lineno) is not None
            read, same = names(second.value), ast.dump(first.value) == ast.dump(second.value)
            if there and same and qkv_of(name) and other in read and name not in read:
                words = {"part": LONG[qkv_of(name)], "name": name, "other": other}
                yield "lost", second.lineno, words


def unread_roles(part: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """The queries, keys or values that forward makes or must be given and never reads, though it
    reads the other two."""
    for function in nodes(ast.FunctionDef, part):
        if function.name != "forward":
            continue
        given = function.args.args[: len(function.args.args) - len(function.args.defaults)]
        handed = {one.arg for one in nodes(ast.arg, function)}
        groups = [(function.lineno, {one.arg for one in given})]
        for one in nodes(ast.Assign, function):
            group = names(*one.targets)
            if called_of_self(one.value) or (len(group) > 1 and isinstance(one.value, ast.Call)):
                groups.append((one.lineno, group))
        read = names(*function.body, context=ast.Load)
        for line, group in groups:
            own = read if group & handed else read - handed
            roles = {qkv_of(name) for name in own} - {""}
            several = len({qkv_of(name) for name in group} - {""}) > 1
            for name in group - read if several or len(group) == 1 else ():
                if (role := qkv_of(name)) and roles == set(LONG) - {role}:
                    yield "unread", line, {"part": LONG[role], "name": name}


def gathered_keys(part: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """`weights @ k`, where there are values that a call could gather."""
    for function in nodes(ast.FunctionDef, part):
        there = names(function)
        if any("grad" in one for one in there):  # it works backwards
            continue
        for weights, gathered in products(function):
            key = gathered.id if isinstance(gathered, ast.Name) else ""
            stem = re.sub("keys?|k", "", key.lower())
            values = [one for one in sorted(there) if qkv_of(one) == "v"]
            meant = [one for one in values if re.sub("values?|v", "", one.lower()) == stem]
            if qkv_of(key) == "k" and meant and WORKED_ON.search(word_of(weights).lower()):
                yield "gathered", gathered.lineno, {"name": key, "meant": meant[0]}


def own_products(part: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """`q @ q.transpose(-2, -1)`, where there are keys that a call could score."""
    for function in nodes(ast.FunctionDef, part):
        given = [one.arg for one in nodes(ast.arg, function)]
        made = [name for name in sorted(names(function)) if not WHOLE.search(name)]
        for left, right in products(function):
            method = right.func if isinstance(right, ast.Call) else None
            name = word_of(left)
            other = word_of(method.value) if isinstance(method, ast.Attribute) else ""
            if name and name == other and (role := qkv_of(name)) in ("q", "k"):
                wanted = "k" if role == "q" else "q"
                meant = next((one for one in (*given, *made) if qkv_of(one) == wanted), None)
                if meant is not None:
                    yield "own", left.lineno, {"name": name, "meant": meant}


def stem_of(name: str) -> str:
    """A part's name without the role: `pass` of `key_pass`.

    >>> stem_of("key_pass"), stem_of("q_nope"), stem_of("k")
    ('pass', 'nope', '')
    """
    return ROLE.sub("", name.lower()).strip("_")


def unread_parts(part: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """A part of the keys or queries that nothing reads, where the other one's is read twice:
    `torch.cat((key_rot, query_pass), -1)`."""
    for function in nodes(ast.FunctionDef, part):
        loads = [one.id for one in nodes(ast.Name, function) if isinstance(one.ctx, ast.Load)]
        for line in nodes(ast.Assign, function):
            group = names(*line.targets) if isinstance(line.targets[0], ast.Tuple) else set[str]()
            cut = [one for one in group if qkv_of(one) in LONG and stem_of(one)]
            for name in cut if len(cut) == len(group) else ():
                role, stem = qkv_of(name), stem_of(name)
                others = {one for one in loads if qkv_of(one) not in ("", role)}
                twice = [one for one in others if stem_of(one) == stem and loads.count(one) > 1]
                if name not in loads and twice and group & {*loads}:
                    words = {"part": LONG[role], "name": name, "other": twice[0]}
                    yield "part", line.lineno, words


def crossed_parts(part: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """Parts of queries and of keys that are joined in another order: `cat([q_nope, q_pe])` and
    `cat([k_pe, k_nope])`."""
    for function in nodes(ast.FunctionDef, part):
        joined = dict[str, tuple[list[str], int]]()
        for call in nodes(ast.Call, function):
            parts = call.args[0] if call.args and ast.unparse(call.func) == "torch.cat" else None
            several = parts.elts if isinstance(parts, ast.List | ast.Tuple) else []
            said = [_first(one) for one in several]
            roles = {qkv_of(one) for one in said}
            if len(said) > 1 and len(roles) == 1 and all(map(stem_of, said)):
                joined[roles.pop()] = [stem_of(one) for one in said], call.lineno
        (one, _), (other, line) = (joined.get(role, ([], 0)) for role in "qk")
        if one != other and sorted(one) == sorted(other):
            yield "crossed", line, {"queries": ", ".join(one), "keys": ", ".join(other)}


def _first(node: ast.expr) -> str:
    """The name that a chain of methods begins with: `k_pe` of `k_pe.expand(-1, 3)`."""
    while isinstance(node, ast.Call | ast.Attribute | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return word_of(node)

"""Read mistakes off the code of layers that cut queries and keys into parts and join them again, as
partial rotary and latent attention do."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ..files.syntax import Source, names, nodes
from .read_pieces import LONG, Known, Said, qkv_of, word_of

ROLE = re.compile(r"queries|query|keys?|values?|(^|_)x?[qkv](?=_|$)|^x?[qkv](?=[A-Z])")


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

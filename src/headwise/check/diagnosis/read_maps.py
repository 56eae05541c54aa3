"""Read mistakes off the code of maps, windows and frames: shifts that are not undone, axes that are
joined in one order and cut in another. Readers are as in `read_code`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ..files.syntax import Source, nodes, pairs
from .read_pieces import LAYERS, Known, Said, of_self, word_of, words_in
from .read_sizes import sizes_of

FEATURES = re.compile(r"c|d|e|f|dh|hd|ch|dim|head_dim|chan\w*|feat\w*|qkv|three|kv|two|\d+")
"""What people call axes of features, which an output projection takes in any order."""


def shifted_twice(part: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """`torch.roll` of windows by one and the same shift before the attention and behind it."""
    for function in nodes(ast.FunctionDef, part):
        rolled, made = dict[tuple[str, ...], set[str]](), dict[str, set[str]]()
        lines = sorted(nodes(ast.Assign, function), key=lambda one: one.lineno)
        for line in lines:
            read, given = (words_in(*one) - {"self"} for one in ([line.value], line.targets))
            origin = read.union(*(made.get(name, ()) for name in read))
            for name in given:
                made[name] = origin
            for call in nodes(ast.Call, line.value):
                if ast.unparse(call.func).split(".")[-1] != "roll":
                    continue
                whole = ast.unparse(call.func) == "torch.roll"
                said = [*call.args[whole:], *(one.value for one in call.keywords)]
                shift = tuple(map(ast.unparse, said))
                before = rolled.get(shift, set())
                if "-" in "".join(shift) and before & origin:
                    yield "shift", line.lineno, {"shift": ", ".join(shift)}
                rolled.setdefault(shift, set()).update(given)


def joined_otherwise(part: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """`rearrange` that cuts `(n t)` where `(t n)` was joined, or joins rows and columns of windows
    the other way round than they were cut."""
    for function in nodes(ast.FunctionDef, part):
        calls = [call for call in nodes(ast.Call, function) if _pattern(call)]
        cut, joined = dict[frozenset[str], str](), dict[frozenset[str], set[str]]()
        for call in sorted(calls, key=lambda one: one.lineno):
            left, right = (_groups(side) for side in _pattern(call).split("->"))
            fresh = {key: said for key, said in left.items() if key not in right}
            other = {key: said for key, said in fresh.items() if key in cut and cut[key] != said}
            other = {key: one for key, one in other.items() if one not in joined.get(key, ())}
            if len(other) == 1 and len(fresh) == 1:
                ((key, said),) = other.items()
                yield "cut", call.lineno, {"said": said, "other": cut[key]}
            for key, said in fresh.items():
                cut[key] = said
            turned = {
                k: said for k, said in right.items() if k not in left and cut.get(k, said) != said
            }
            if len(turned) == 2 and "(" in _pattern(call).split("->")[0]:  # windows, put back
                (key, said), *_ = turned.items()
                yield "joined", call.lineno, {"said": said, "other": cut[key]}
            for key, said in right.items():
                joined.setdefault(key, set()).add(said)
                if key not in left and len(turned) != 2:
                    cut[key] = said


def projected_maps(kind: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """`x = x.view(B, N, H * D)` and `self.proj(x).view(B, C, H, W)`, where proj gives C features:
    tokens and features change places by a view alone."""
    made = {
        of_self(target): word_of(value.args[1])
        for target, value in (pair for node in nodes(ast.Assign, kind) for pair in pairs(node))
        if isinstance(value, ast.Call)
        and LAYERS.fullmatch(ast.unparse(value.func))
        and len(value.args) > 1
    }
    for function in nodes(ast.FunctionDef, kind):
        held = {
            word_of(to): value for node in nodes(ast.Assign, function) for to, value in pairs(node)
        }
        for call in nodes(ast.Call, function):
            match call.func:
                case ast.Attribute(ast.Call(layer, [ast.Name(name)]), "view" | "reshape"):
                    given, last = held.get(name), made.get(of_self(layer), "")
                case _:
                    continue
            cut = getattr(getattr(given, "func", None), "attr", "") in ("view", "reshape")
            sizes = sizes_of(given) if cut and isinstance(given, ast.Call) else []
            before = [word_of(one) for one in sizes]
            after = [word_of(one) for one in sizes_of(call)]
            map_ = len(before) == 3 and len(after) == 4 and last and before[1] not in ("", last)
            if map_ and after[:2] == [before[0], last] and before[1] not in after:
                yield "map", call.lineno, {"name": ast.unparse(call.func.value), "last": last}


def _pattern(call: ast.Call) -> str:
    """`b (n t) d -> (b n) t d`, of a call that has one."""
    said = [getattr(one, "value", "") for one in call.args[1:2]]
    named = ast.unparse(call.func).split(".")[-1] == "rearrange"
    return said[0] if named and said and isinstance(said[0], str) and "->" in said[0] else ""


def _groups(side: str) -> dict[frozenset[str], str]:
    """The axes that stand as one, two at a time, but features: {n, t} of `b (n t) d`."""
    pairs = re.findall(r"\(\s*(\w+)\s+(\w+)\s*\)", side)
    plain = [pair for pair in pairs if not any(FEATURES.fullmatch(one) for one in pair)]
    return {frozenset(pair): f"({' '.join(pair)})" for pair in plain}


def cut_otherwise(part: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """Scores of two directions that are joined, and whose weights are cut in the other order:
    `cat([col, row])`, and `row_weights` from the front."""
    for function in nodes(ast.FunctionDef, part):
        for call in nodes(ast.Call, function):
            given = call.args[0] if call.args and ast.unparse(call.func) == "torch.cat" else None
            parts = [word_of(one) for one in getattr(given, "elts", ())]
            if len(parts) != 2 or not all(parts):
                continue
            for line in nodes(ast.Assign, function):
                to = [word_of(one) for one in getattr(line.targets[0], "elts", ())]
                if line.lineno > call.lineno and len(to) == 2 and _is_crossed(parts, to):
                    words = {"parts": ", ".join(parts), "to": ", ".join(to)}
                    yield "crossed", line.lineno, words


def _is_crossed(parts: list[str], to: list[str]) -> bool:
    """Whether two names begin as two others do, which stand the other way round."""
    words = [[re.split(r"_|\d", one.lower())[0] for one in names_] for names_ in (parts, to)]
    (one, two), (first, second) = words
    return one != two and (first, second) == (two, one)

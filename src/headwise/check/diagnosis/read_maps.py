"""Read mistakes off the code of maps, windows and frames: shifts that are not undone, axes that are
joined in one order and cut in another. Readers are as in `read_code`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ..files.syntax import Source, nodes, pairs
from .read_pieces import LAYERS, Known, Said, given_before, of_self, word_of, words_in
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
        for call in nodes(ast.Call, function):
            match call.func:
                case ast.Attribute(ast.Call(layer, [ast.Name(name)]), "view" | "reshape"):
                    last = made.get(of_self(layer), "")
                case _:
                    continue
            given = given_before(function, name, call.lineno)
            before = [word_of(one) for one in _cut_into(given)]
            after = [word_of(one) for one in sizes_of(call)]
            map_ = len(before) == 3 and len(after) == 4 and last and before[1] not in ("", last)
            if map_ and after[:2] == [before[0], last] and before[1] not in after:
                yield "map", call.lineno, {"name": ast.unparse(call.func.value), "last": last}


def _cut_into(value: ast.expr | None) -> list[ast.expr]:
    """The sizes that a `view` or `reshape` gives; nothing of another call."""
    cut = getattr(getattr(value, "func", None), "attr", "") in ("view", "reshape")
    return sizes_of(value) if cut and isinstance(value, ast.Call) else []


def unfolded_otherwise(part: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """`unfold(x, k).permute(0, 2, 1).reshape(B, H, W, k * k, C)`: the features of each place come
    as C × k², and are read on as k² × C."""
    for function in nodes(ast.FunctionDef, part):
        for call in nodes(ast.Call, function):
            sizes, chain = _cut_into(call), ast.unparse(call.func)
            root = re.match(r"\w+", chain)
            made = given_before(function, root[0], call.lineno) if sizes and root else None
            named = ast.unparse(made.func).split(".")[-1] if isinstance(made, ast.Call) else ""
            if named != "unfold" or len(sizes) < 4:
                continue
            turned = re.search(
                r"\.(permute\(0, 2, 1\)|transpose\((1, 2|2, 1|-1, -2|-2, -1)\)|mT)", chain
            )
            area, features = sizes[-2:] if turned else sizes[1:3]
            if _is_area(area, function, call.lineno) and not _is_area(
                features, function, call.lineno
            ):
                words = {"area": ast.unparse(area), "features": ast.unparse(features)}
                yield "unfolded", call.lineno, words


def _is_area(size: ast.expr, function: ast.FunctionDef, line: int) -> bool:
    """Whether a size is that of a window: `k * k`, `k ** 2`, or a name for it."""
    value = given_before(function, size.id, line) if isinstance(size, ast.Name) else size
    match value:
        case ast.BinOp(left, ast.Mult(), right):
            return ast.unparse(left) == ast.unparse(right)
        case ast.BinOp(_, ast.Pow(), ast.Constant(2)):
            return True
        case _:
            return False


def regions_astray(part: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """Regions of a map that are written on an axis of one place: `mask = torch.zeros(1, 1, H, W)`
    and `mask[:, h, w, :] = n`."""
    for function in nodes(ast.FunctionDef, part):
        for line in nodes(ast.Assign, function):
            match line.targets:
                case [ast.Subscript(ast.Name(name), ast.Tuple([ast.Slice(), row, _, ast.Slice()]))]:
                    made = given_before(function, name, line.lineno)
                case _:
                    continue
            table = isinstance(made, ast.Call) and ast.unparse(made.func) == "torch.zeros"
            sizes = sizes_of(made) if table and isinstance(made, ast.Call) else []
            single = len(sizes) == 4 and ast.unparse(sizes[1]) == "1" != ast.unparse(sizes[2])
            if single and not isinstance(row, ast.Constant | ast.Slice):
                said = ", ".join(map(ast.unparse, sizes))
                yield "regions", line.lineno, {"name": name, "sizes": said}


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

"""Read mistakes off the code that sizes and axes tell: heads that a `view` cuts out of whole
projections, axes that are read on in another order, an `einsum` that sums its factors apart.
Readers are as in `read_code`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping

from ..files.syntax import Source, nodes, pairs
from ..target.layouts import AXES
from ..target.names import building_role
from .call_lines import FUSED
from .read_pieces import LAYERS, WORKED_ON, Known, Said, of_self, products, sized, turns, word_of

FOUR = re.compile(r"(view|reshape)\(\[?[^()\[\]]+(,[^()\[\]]+){3,}\]?\)|unflatten|b h \w \w")
"""Code that cuts a tensor into four axes, or more."""
OPEN = "-1"
"""Stands for the name of an axis whose size a `view` works out."""
SIDE = f"{AXES['H']}|{AXES['W']}"
"""Names of the height and the width of a map."""


def viewed_heads(kind: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """`self.query(x).view(B, H, T, D)`, or `.view(B * H, -1, D)`: a projection that is cut into
    heads by a view alone."""
    if not isinstance(kind, ast.ClassDef):
        return
    linear, others = set[str](), set[str]()
    for target, value in (pair for node in nodes(ast.Assign, source.tree) for pair in pairs(node)):
        made = isinstance(value, ast.Call) and LAYERS.fullmatch(ast.unparse(value.func))
        (linear if made else others).add(of_self(target))
    linear -= {*others, ""}
    for function in nodes(ast.FunctionDef, kind):
        held = [pair for node in nodes(ast.Assign, function) for pair in pairs(node)]
        for call in nodes(ast.Call, function):
            method = call.func
            if not isinstance(method, ast.Attribute) or method.attr not in ("view", "reshape"):
                continue
            sizes = sizes_of(call)
            heads = len(sizes) == 4 and (
                building_role(word_of(sizes[1])) == "heads"
                or (ast.unparse(sizes[1]) == "-1" and word_of(sizes[2]) in _of_tokens(function))
            )
            heads = heads and word_of(sizes[2]).lower() not in ("w", "width")  # a map's height
            heads = heads or (len(sizes) == 3 and _folds_heads(sizes[0]))
            whole, cut = (
                heads and not any(getattr(one, "value", 0) == 1 for one in sizes),
                method.value,
            )
            if word := word_of(cut):
                given = [one for to, one in held if word_of(to) == word and to.lineno < call.lineno]
                cut = given[-1] if given else cut
            if whole and isinstance(cut, ast.Call) and of_self(cut.func) in linear:
                yield "viewed", call.lineno, {}


def _folds_heads(size: ast.expr) -> bool:
    """`batch * num_heads`, in whatever order."""
    both = size if isinstance(size, ast.BinOp) and isinstance(size.op, ast.Mult) else None
    sides = [word_of(both.left), word_of(both.right)] if both is not None else []
    return all(sides) and "heads" in map(building_role, sides)


def _of_tokens(function: ast.FunctionDef) -> set[str]:
    """Names of the second of three sizes: `batch, tokens, _ = x.shape`, `tokens = x.shape[1]`."""
    found = set[str]()
    for line in nodes(ast.Assign, function):
        match line.targets[0], line.value:
            case ast.Tuple([_, ast.Name(name), _]), value if sized(value) is not None:
                found.add(name)
            case ast.Name(name), ast.Subscript(value, ast.Constant(1)) if sized(value) is not None:
                found.add(name)
            case _:
                pass
    return found


def heads_apart(part: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """`q.view(n, H, D) @ k.view(n, H, D).transpose(-2, -1)`: scores between heads, none between
    tokens."""
    for function in nodes(ast.FunctionDef, part):
        cut, last = dict[str, bool](), dict[str, int]()
        lines = sorted(nodes(ast.Assign, function), key=lambda one: one.lineno)
        for target, value in (pair for node in lines for pair in pairs(node)):
            sizes, name = sizes_of(value) if isinstance(value, ast.Call) else [], word_of(target)
            method = getattr(getattr(value, "func", None), "attr", "")
            heads = len(sizes) > 2 and building_role(word_of(sizes[-2])) == "heads"
            cut[name] = heads and method in ("view", "reshape")
            last[name] = target.lineno
        for query, keys in products(function):
            turned = re.fullmatch(r"(\w+)\.(transpose\(-[12], -[12]\)|mT)", ast.unparse(keys))
            names = [word_of(query), turned[1] if turned else ""]
            before = all(last.get(name, keys.lineno) < keys.lineno for name in names)
            if before and all(cut.get(name) for name in names):
                yield "apart", keys.lineno, {}


def summed_apart(part: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """`einsum("bhqk, bhvd -> bhqd")`, which sums k and v each by itself; and weights that lose
    an axis before they meet the values, as in `einsum("bhqk, bhkd -> bhkd")`."""
    for call in nodes(ast.Call, part):
        if not ast.unparse(call.func).endswith("einsum"):
            continue
        said = [one.value for one in call.args if isinstance(one, ast.Constant)]
        equation = said[0] if said and isinstance(said[0], str) else ""
        sides, arrow, out = equation.partition("->")
        axes = [_axes(one) for one in (*sides.split(","), out)]
        if not arrow or len(axes) != 3 or "..." in equation:
            continue
        apart = [axes[0] - axes[1] - axes[2], axes[1] - axes[0] - axes[2]]
        shared = axes[0] & axes[1] - axes[2]
        if all(len(one) == 1 for one in apart) or (all(apart) and not shared):
            one, two = (min(axis) for axis in apart)
            yield "apart", call.lineno, {"equation": equation, "one": one, "two": two}
        for name, lone, kept in zip(call.args[1:], apart, axes[1::-1], strict=False):
            weights = WORKED_ON.search(word_of(name).lower())
            if weights and len(lone) == 1 and not all(apart) and kept == axes[2]:
                words = {"equation": equation, "name": word_of(name), "one": min(lone)}
                yield "alone", call.lineno, words


def read_on(part: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """`b, c, h, w = x.shape` and `x.view(b, h, w, c)`: axes in another order by a view alone; so
    is `x.view(-1, t, d)` of what `x.view(b, t, h, d)` made."""
    yield from (said for said, turned in _read_on(part) if not turned and not _splits(said))


def split_on(part: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """The same, of heads that get before the tokens so."""
    yield from (said for said, turned in _read_on(part) if not turned and _splits(said))


def _splits(said: Said) -> bool:
    """Whether a `view` moves the heads, which stand last but one, to the front."""
    axes, order = (said[2][name].split(", ") for name in ("axes", "order"))
    return len(axes) == 4 and _is_of_heads(axes[2]) and order[1:3] == axes[2:0:-1]


def _is_of_heads(name: str) -> bool:
    return name in ("H", "h") or building_role(name) == "heads"


def read_on_turned(part: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """The same, of what rotary positions turn: those of other tokens, then."""
    yield from (said for said, turned in _read_on(part) if turned)


def _read_on(part: ast.stmt) -> Iterator[tuple[Said, bool]]:
    """What is read on in another order, and whether to be turned by its positions."""
    for function in nodes(ast.FunctionDef, part):
        given = [*nodes(ast.Assign, function)]
        shapes = dict(filter(None, map(_kept_shape, given)))
        branches = [{*ast.walk(one)} for one in nodes(ast.If, function) if not one.orelse]
        turning = [{*ast.walk(one)} for one in nodes(ast.Call, function) if turns(one.func)]
        padded = re.compile(r"\bpad\(|zero_?pad|ZeroPad")  # what a shift reads on, on purpose
        moved = {word_of(one.targets[0]) for one in given if padded.search(ast.unparse(one.value))}
        for call in nodes(ast.Call, function):
            name = word_of(getattr(call.func, "value", None))
            if not name or getattr(call.func, "attr", "") not in ("view", "reshape"):
                continue
            apart = set[ast.AST]().union(*(one for one in branches if call not in one))
            before = [one for one in given if one.lineno < call.lineno and one not in apart]
            for shape in [one for one in before if _named_axes(one, shapes)[0] == name][-1:]:
                axes = _named_axes(shape, shapes)[1]
                order = _whole([*_factors(call)], axes)
                later = (one for one in before if one.lineno > shape.lineno)
                again = {word_of(to) for one in later for to, _ in pairs(one)} & {name, *axes}
                again |= {name} & moved
                if len(axes) > 2 and not again and _is_other_order(_turned(axes), _turned(order)):
                    turned = any(call in one for one in turning) or turns(part, function)
                    words = {"name": name, "axes": ", ".join(axes), "order": ", ".join(order)}
                    yield ("reread", call.lineno, words), turned


def idle_permutes(part: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """`x.permute(0, 1, 2, 3)`, which leaves all axes where they are."""
    for call in nodes(ast.Call, part):
        axes = [getattr(one, "value", None) for one in sizes_of(call)]
        if getattr(call.func, "attr", "") == "permute" and axes == [*range(len(axes))] != []:
            yield "idle", call.lineno, {"call": f"permute({', '.join(map(str, axes))})"}


def _kept_shape(statement: ast.Assign) -> tuple[str, str] | None:
    """The name under which the shape of a tensor is kept, and the tensor's."""
    match statement:
        case ast.Assign([ast.Name(kept)], value) if isinstance(of := sized(value), ast.Name):
            return kept, of.id
        case _:
            return None


def _named_axes(statement: ast.Assign, shapes: Mapping[str, str]) -> tuple[str, list[str]]:
    """A tensor whose axes a statement names, and their names: as it takes them apart, or as it cuts
    them.

    Args:
        shapes: names of shapes that are kept, with that of the tensor.
    """
    match statement:
        case ast.Assign([ast.Tuple(targets)], value):
            of = sized(value)
            name = of.id if isinstance(of, ast.Name) else shapes.get(word_of(value), "")
            return name, [word_of(one) for one in targets]
        case ast.Assign([ast.Name(name)], ast.Call(ast.Attribute(_, "view" | "reshape")) as call):
            axes = [OPEN if ast.unparse(one) == "-1" else word_of(one) for one in sizes_of(call)]
            sure = len(axes) > 3 and all(axes) and axes.count(OPEN) < 2
            return (name, axes) if sure else ("", [])
        case _:
            return "", []


def _whole(sizes: list[ast.expr], axes: list[str]) -> list[str]:
    """The words for sizes, with what is left of the axes where the size is open."""
    words = [word_of(one) for one in sizes]
    rest = [one for one in axes if one not in words]
    for place, one in enumerate(sizes):
        if ast.unparse(one) == "-1" and rest:
            words[place : place + 1] = rest
    return words


def sizes_of(call: ast.Call) -> list[ast.expr]:
    """What `view` or `permute` is given, one by one or as one tuple or list."""
    match call.args:
        case [ast.Tuple(sizes) | ast.List(sizes)]:
            return sizes
        case sizes:
            return sizes


def _factors(call: ast.Call) -> Iterator[ast.expr]:
    """The same, products taken apart."""
    rest = [*sizes_of(call)]
    while rest:
        match rest.pop(0):
            case ast.BinOp(left, ast.Mult(), right):
                rest[:0] = [left, right]
            case one:
                yield one


def _turned(axes: list[str]) -> list[str]:
    """Axes in words of which height and width are one, as they are in a square."""
    return ["side" if re.fullmatch(SIDE, axis.lower()) else axis for axis in axes]


def _is_other_order(axes: list[str], order: list[str]) -> bool:
    """Whether the same axes stand in another order, or `[B, N, C]` is read as `[B, C, H, W]`."""
    if len(axes) == 3 and order[:2] == [axes[0], axes[2]] and "" not in order[:2]:
        return len(order) > 2 and (axes[1] not in order or len(order) == 3)
    return "" not in order and sorted(axes) == sorted(order) and axes != order


def _axes(side: str) -> set[str]:
    """The axes of one side of an equation: words, as `einops` has them, or letters."""
    words = side.split()
    return set(words) if any(len(one) > 1 for one in words) and len(words) > 1 else {*side} - {" "}


def fused_merges(part: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """`F.scaled_dot_product_attention(q, k, v).view(B, T, E)` of `[B, H, T, D]`: heads that are
    merged without a transpose."""
    for function in nodes(ast.FunctionDef, part):
        text = ast.unparse(function)
        heads = re.search(
            r"transpose\((1, 2|2, 1|2, 3|-2, -3|-3, -2)\)|permute\(0, 2, 1, 3\)|b h \w d", text
        )
        cut = FOUR.search(text)  # else there may be one head, in three axes
        single = re.search(r"unsqueeze\((dim=)?1\)|\[:, None\]", text)
        for call in nodes(ast.Call, function) if heads and cut and not single else ():
            views = getattr(call.func, "attr", "") in ("view", "reshape")
            sizes, made = sizes_of(call) if views else [], getattr(call.func, "value", None)
            if made is not None and re.search(r"\)\.(contiguous|to)\([^()]*\)$", ast.unparse(made)):
                made = getattr(getattr(made, "func", None), "value", None)
            fused = isinstance(made, ast.Call) and ast.unparse(made.func).split(".")[-1] == FUSED
            plain = len(sizes) == 3 and (word_of(sizes[0]) or getattr(sizes[0], "id", ""))
            if fused and plain:
                yield "fused", call.lineno, {}


def split_by_heads(kind: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """`torch.split(q, self.num_heads, dim=-1)`, which makes pieces of that width, and not as
    many."""
    text = "\n".join(source.text.splitlines()[kind.lineno - 1 : kind.end_lineno])
    for call in nodes(ast.Call, kind):
        given = [*call.args, *(one.value for one in call.keywords if one.arg != "dim")]
        last = any(one.arg == "dim" and ast.unparse(one.value) == "-1" for one in call.keywords)
        name = word_of(given[-1]) if given else ""
        if not last or ast.unparse(call.func).split(".")[-1] != "split" or not name:
            continue
        written = re.search(rf"\b{name} *:.*\b(number|num) of (attention )?heads", text)
        if building_role(name, needed=True) == "heads" or written:
            yield "pieces", call.lineno, {"name": name}


def float_sizes(part: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """`d = self.width / heads` that goes into a `view`, which takes whole numbers alone."""
    for function in nodes(ast.FunctionDef, part):
        lines = [one for one in nodes(ast.Assign, function) if isinstance(one.targets[0], ast.Name)]
        every = [word_of(one.targets[0]) for one in lines]
        for line in lines:
            name, value = word_of(line.targets[0]), line.value
            if not isinstance(value, ast.BinOp) or not isinstance(value.op, ast.Div):
                continue
            plain = word_of(value.left) and word_of(value.right)
            if not plain or every.count(name) > 1:
                continue
            for call in nodes(ast.Call, function):
                views = getattr(call.func, "attr", "") in ("view", "reshape", "expand", "repeat")
                sizes = map(word_of, sizes_of(call)) if views else ()
                if name in sizes and call.lineno > line.lineno:
                    yield "float", call.lineno, {"name": name, "code": ast.unparse(value)}
                    break

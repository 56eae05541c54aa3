"""Read mistakes off the code of masks: how they are filled in, multiplied, repeated, handed on, and
what is written of them. Readers are as in `read_code`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from ..files.syntax import Source, names, nodes
from ..target.names import building_role
from ..target.uses import SAID
from .call_lines import FUSED
from .read_pieces import (
    HIDES,
    WORKED_ON,
    Known,
    Said,
    defaults_of,
    goes_into_softmax,
    in_order,
    is_mask,
    is_within,
    masked_product,
    number_of,
    of_self,
    softmax_of,
    target_of,
    word_of,
    words_in,
)

OF_QUERIES = re.compile(r"unsqueeze\((dim=)?-1\)|(\.\.\.|, :), None\]")
"""Code that makes a mask speak of queries, which may come to nothing."""

POOLS = re.compile(r"softmax\(.*(?<!-)\b(dim=)?1\)")
"""What makes one weight for each token, `[B, T, 1]`."""
ONES = re.compile(r"torch\.tril\(torch\.ones\(")
"""What makes a mask that is 1 where a query may attend."""
OF_BOOLEANS = re.compile(r"bool|==|!=|<|>|log|fill|inf|where|~|1 - ")
"""Code that makes something else of it."""

ADDED = re.compile(r"inf|masked_fill|where|float|finfo|-1e|zeros")
"""Code that makes numbers that are added to scores."""
PADS = re.compile("pad|valid|mask|^ok$|keep|real|present")
"""Names of what tells real tokens from padding."""
PAIRS = re.compile(r"[\[(](?!Tensor|torch|bool)([A-Za-z_]\w*), ?([A-Za-z_]\w*)[\])]")
"""Two axes, as people write them."""
FOLDED = re.compile(
    r"transpose\(1, 2\)(\.contiguous\(\))?\.(view|reshape)\((\w+\.)*\w+ \* (\w+\.)*\w+, |"
    r"\(b h\) \w+ \w+"
)
"""Code that folds heads into the batch, `[B · H, T, D]`, sequence by sequence."""
UNFOLDED = re.compile(r"permute\(2, 0, 1, 3\)|\(h b\)|torch\.cat\([^()]*\.(split|chunk)\(")
"""Code that does so head by head."""
COLUMN = re.compile(
    r"\[:, None, :, None\]$|\.unsqueeze\(1\)\.unsqueeze\((3|-1)\)$|"
    r"\.(view|reshape)\(\w+, 1, \w+, 1\)$"
)
"""Code that lays one flag a token along the third of four axes."""
ROW = re.compile(r"\[:, None, None, :\]$|\[:, None, None\]$")
"""Code that lays one flag a token along the last of four axes."""
FOUR = re.compile(r"einsum\(['\"][^'\"]*-> ?\w ?\w ?\w ?\w['\"]")
"""Products of four axes."""
LAST_AXIS = re.compile(r"softmax\((\w+, )?(dim=)?(-1|3)\)|softmax\(.*dim=(-1|3)\)")
OTHER_AXIS = re.compile(r"softmax\((\w+, )?(dim=)?(-2|1|2)\)|softmax\(.*dim=(-2|1|2)\)")
"""Softmaxes whose keys lie last, and others."""


def small_fills(part: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """Numbers near 0 that are filled in where a mask hides: −1e-9 for −1e9."""
    for call, mask, value in _fills(part):
        number = number_of(value, known)
        small = number is not None and 0 < abs(number) < 0.01
        words = sorted(words_in(mask))
        if small and (said := [*filter(is_mask, words)] or words):
            yield "small", call.lineno, {"name": said[0], "value": f"{number:g}"}


def no_booleans(part: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """`scores.masked_fill(1 - mask, …)`, which refuses numbers, while of True and False nothing is
    subtracted."""
    for call, mask, _ in _fills(part):
        match mask:
            case ast.BinOp(ast.Constant(1), ast.Sub(), other):
                said = sorted(words_in(other))
                if said and ".bool" not in ast.unparse(other):
                    name = next(filter(is_mask, said), said[0])
                    yield "subtracted", call.lineno, {"name": name, "code": ast.unparse(mask)}
            case _:
                pass


def _fills(part: ast.AST) -> Iterator[tuple[ast.Call, ast.expr, ast.expr]]:
    """Calls of `masked_fill`, with the mask and with what is filled in."""
    for call in nodes(ast.Call, part):
        if getattr(call.func, "attr", "").strip("_") == "masked_fill" and len(call.args) > 1:
            yield call, call.args[-2], call.args[-1]


def zero_fills(part: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """Scores that are set to 0 where a mask hides, and go into a softmax: `scores[mask] = 0`."""
    for function in nodes(ast.FunctionDef, part):
        lines = [one for one in ast.walk(function) if isinstance(one, ast.Assign)]
        lines.sort(key=lambda one: one.lineno)
        for number, line in enumerate(lines):
            target, value = line.targets[0], line.value
            hides = [target.slice] if isinstance(target, ast.Subscript) else []
            filled = next((one for one in _fills(value) if one[0] is value), None)
            if filled is not None:
                hides, value = [filled[1]], filled[2]
            elif isinstance(value, ast.Call):
                continue
            zero = isinstance(value, ast.Constant) and value.value == 0 and value.value is not False
            words = sorted(words_in(*hides)) if zero and hides else []
            said = [*filter(is_mask, words)]
            rest = (one for one in lines if one is not line)
            if words and filled and not any(HIDES.search(ast.unparse(one)) for one in rest):
                said = said or words  # what it fills by is a mask
            name = target_of(line)  # rows in which all is hidden may be filled with anything
            hidden = any(
                target_of(one) == name and HIDES.search(ast.unparse(one))
                for one in lines
                if one is not line
            )
            if said and not hidden and goes_into_softmax(name, lines[number + 1 :]):
                yield "small", line.lineno, {"name": said[0], "value": "0"}


def multiplied_masks(part: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """Masks that scores or weights are multiplied with, and that hide nothing in any other way."""
    for function in nodes(ast.FunctionDef, part):
        lines = in_order(function)
        for number, line in enumerate(lines):
            if (product := masked_product(line)) is None:
                continue
            target, other, mask = product
            kin, rest = {mask}, [one for one in lines if one is not line]
            for one in (*rest, *rest):  # what is made of the mask, and what it is made of
                if kin & (said := words_in(one)) and not said & {target, other}:
                    kin |= {target_of(one), *filter(is_mask, said)} - {""}
            about = [ast.unparse(one) for one in (line, *rest) if kin & words_in(one)]
            used = any(kin & (said := words_in(one)) and said & {target, other} for one in rest)
            before = [one for one in lines[:number] if other and target_of(one) == other]
            pools = any(POOLS.search(ast.unparse(one)) for one in before[-1:])
            of_queries = any(OF_QUERIES.search(code) and "&" not in code for code in about)
            if used or (of_queries and not pools and not mask.startswith("adj")):
                continue  # an edge has an axis of either, and what is pooled one for all features
            after = [one for one in lines[number + 1 :] if target in words_in(one)]
            if not other or (before and _are_shares(before[-1])):
                code = "\n".join(map(ast.unparse, after))
                if "/" not in code and "norm" not in code and "softmax" not in code:
                    yield "weights", line.lineno, {"name": mask}
            elif goes_into_softmax(target, after):
                yield "scores", line.lineno, {"name": mask}


def _are_shares(statement: ast.stmt) -> bool:
    """Whether weights are made there: by a softmax, or `e / e.sum(-1, keepdim=True)`."""
    value = getattr(statement, "value", None)
    divides = isinstance(value, ast.BinOp) and isinstance(value.op, ast.Div)
    whole = ast.unparse(value.right) if isinstance(value, ast.BinOp) and divides else ""
    name = word_of(value.left) if isinstance(value, ast.BinOp) else ""
    by_hand = name != "" and re.match(rf"{name}\.sum\(|torch\.sum\({name}\b", whole) is not None
    return softmax_of(statement) is not None or by_hand


def dropped_masks(part: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """Masks that forward takes and never reads, while it hands on None in their place:
    `self.attention(x, x, x, mask=None)`."""
    for function in nodes(ast.FunctionDef, part):
        given = {one.arg for one in (*function.args.args, *function.args.kwonlyargs)}
        unread = [one for one in given - names(*function.body) if is_mask(one)]
        for call in nodes(ast.Call, function) if function.name == "forward" and unread else ():
            for one in call.keywords:
                if is_mask(one.arg or "") and ast.unparse(one.value) == "None":
                    yield "dropped", call.lineno, {"name": unread[0]}


def asked_masks(part: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """`if mask:`, which asks a tensor of many numbers for one answer."""
    for function in nodes(ast.FunctionDef, part):
        given = {
            one.arg: ast.unparse(one.annotation or ast.Pass()) for one in nodes(ast.arg, function)
        }
        default = {name: ast.unparse(value) for name, value in defaults_of(function).items()}
        for branch in nodes(ast.If, function):
            test = branch.test.operand if isinstance(branch.test, ast.UnaryOp) else branch.test
            name = word_of(test) if isinstance(test, ast.Name) else ""
            own = is_mask(name) and name in given and default.get(name, "None") == "None"
            filled = [one for _, one, _ in _fills(branch)]
            whole = any(word_of(one) == name for one in filled) or "Tensor" in given.get(name, "")
            if own and whole and "bool" not in given[name]:
                yield "asked", branch.lineno, {"name": name}


def crossed_masks(part: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """`if mask.dim() == 2: mask = mask.unsqueeze(1).unsqueeze(1)`, of which is written that it is
    `[seq, seq]`: its queries come to stand where the batch is."""
    for branch in nodes(ast.If, part):
        asked = re.fullmatch(
            r"(\w+)\.(?:dim\(\)|ndim) == 2|len\((\w+)\.shape\) == 2", ast.unparse(branch.test)
        )
        name = (asked[1] or asked[2]) if asked else ""
        body = branch.body[0]
        laid = rf"{name} = {name}(\.unsqueeze\(1\)\.unsqueeze\([12]\)|\[:, None, None(, :)?\])"
        if not is_mask(name) or not re.fullmatch(laid, ast.unparse(body)):
            continue
        lines = source.text.splitlines()[part.lineno - 1 : part.end_lineno]
        about = [line for line in lines if re.search(r"mask", line, re.IGNORECASE)]
        said = [pair for line in about for pair in PAIRS.findall(line)]
        if said and all(one == two for one, two in said):
            yield "crossed", body.lineno, {"name": name, "axis": said[0][0]}


def tiled_masks(kind: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """Masks of [B · H] sequences that are repeated head by head, `mask.repeat(num_heads, 1, 1)`.
    PyTorch's own layer counts them sequence by sequence, and so do heads folded into the batch."""
    code = ast.unparse(kind)
    folds = FOLDED.search(code) and not UNFOLDED.search(code)
    if not isinstance(kind, ast.ClassDef) or not (folds or "nn.MultiheadAttention(" in code):
        return
    for call in nodes(ast.Call, kind):
        sizes = [ast.unparse(one) for one in call.args]
        owner = call.func.value if isinstance(call.func, ast.Attribute) else None
        repeats = owner is not None and getattr(call.func, "attr", "") == "repeat"
        heads = building_role(sizes[0].split(".")[-1], needed=True) if sizes else None
        words = sorted(words_in(owner)) if repeats and owner else []
        masks = [one for one in words if is_mask(one) or PADS.fullmatch(one.lower())]
        if folds:  # [B, 1, T], and none of later tokens alone
            batched = r"\b{0}\b[^\n]*(unsqueeze\((dim=)?1\)|\[:, None)"
            masks = [one for one in masks if re.search(batched.format(one), code)]
        if masks and heads == "heads" and sizes[1:] == ["1", "1"]:
            yield "tiled", call.lineno, {"name": masks[0]}


def misread_by_fused(part: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """Masks of which is written that they are True where a key is hidden, and that go to PyTorch's
    fused attention, which takes True where a query may attend."""
    for function in nodes(ast.FunctionDef, part):
        for call in nodes(ast.Call, function):
            if ast.unparse(call.func).split(".")[-1] != FUSED:
                continue
            given = [one.value for one in call.keywords if one.arg == "attn_mask"] or call.args[3:4]
            name = given[0].id if given and isinstance(given[0], ast.Name) else ""
            made = [one for one in nodes(ast.Assign, function) if target_of(one) == name != ""]
            if len(made) != 1 or ADDED.search(ast.unparse(made[0].value)):
                continue  # turned over in between, or numbers
            line = source.text.splitlines()[(made[0].end_lineno or 1) - 1]
            said = line.partition("#")[2].strip()
            if SAID[False].search(said.lower()) and not SAID[True].search(said.lower()):
                yield "fused", made[0].lineno, {"name": name, "said": said}


def own_masks_by_fused(part: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """Masks of ones where a query may attend, as the same file makes them once for all of its
    layers, that go to PyTorch's fused attention as numbers, or turned over."""
    for function in nodes(ast.FunctionDef, part):
        parameters = {one.arg for one in nodes(ast.arg, function) if is_mask(one.arg)}
        for call in nodes(ast.Call, function):
            if ast.unparse(call.func).split(".")[-1] != FUSED:
                continue
            given = [one.value for one in call.keywords if one.arg == "attn_mask"] or call.args[3:4]
            made = {target_of(one): one.value for one in nodes(ast.Assign, function)}
            handed = made.get(word_of(given[0]), given[0]) if given else None
            match handed:
                case ast.Name(name) if name in parameters and name not in made:
                    way = "numbers"
                case ast.Compare(ast.Name(name), [ast.Eq()], [ast.Constant(0)]):
                    way = "upside"
                case _:
                    continue
            makers = [
                one
                for one in nodes(ast.Assign, source.tree)
                if target_of(one) == name and not is_within(one, function)
            ]
            code = ast.unparse(makers[0].value) if len(makers) == 1 else ""
            if name in parameters and ONES.match(code) and not OF_BOOLEANS.search(code):
                words = {"name": name, "made": code, "code": ast.unparse(handed)}
                yield way, call.lineno, words


def padded_blocks(part: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """`scores[b, n:, n:] = -inf`, which hides the filling from the filling alone."""
    for line in nodes(ast.Assign, part):
        match line.targets[0]:
            case ast.Subscript(scores, ast.Tuple([*_, rows, ast.Slice(ast.expr() as first, None)])):
                whole = ast.unparse(rows) != f"{ast.unparse(first)}:"
                filled = not names(line.value) & names(scores)  # by nothing that is worked out
                if filled and not whole and WORKED_ON.search(ast.unparse(scores)):
                    yield "block", line.lineno, {"first": ast.unparse(first)}
            case _:
                pass


def idle_flags(kind: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """A constructor's flag for a mask that is kept and never read: `self.use_mask = mask`."""
    for function in nodes(ast.FunctionDef, kind):
        given = defaults_of(function).items()
        flags = {name for name, value in given if ast.unparse(value) in ("True", "False")}
        for line in nodes(ast.Assign, function) if function.name == "__init__" else ():
            name, kept = word_of(line.value), of_self(line.targets[0])
            asks = building_role(name) == "causal"
            if kept and name in flags and asks and len(re.findall(rf"\b{kept}\b", source.text)) < 2:
                yield "kept", line.lineno, {"name": name, "kept": kept}


def of_queries_alone(part: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """Padding that is laid along the queries, `[B, 1, T, 1]`, and along no keys: whole rows are
    hidden, and padded keys are seen."""
    for function in nodes(ast.FunctionDef, part):
        made = {target_of(one): one.value for one in nodes(ast.Assign, function)}
        laid = {name for name, value in made.items() if _is_column(value) and PADS.search(name)}
        fills = [mask for _, mask, _ in _fills(function)]
        code = ast.unparse(function) if fills else source.text
        if not LAST_AXIS.search(code) or OTHER_AXIS.search(code):
            continue
        handed = [
            key.value
            for one in nodes(ast.Call, function)
            for key in one.keywords
            if is_mask(key.arg or "")
        ]
        hides = [*fills, *handed]
        if any(word_of(one) == "" and ROW.search(ast.unparse(one)) for one in hides):
            continue  # keys are hidden, too
        for one in hides:
            bare = one.operand if isinstance(one, ast.UnaryOp) else one
            said = sorted(words_in(bare))
            whole = isinstance(bare, ast.Subscript | ast.Call) and _is_column(bare)
            alone = len(hides) == 1 and word_of(bare) in laid
            if alone or (whole and any(map(PADS.search, said))):
                yield "rows", one.lineno, {"name": word_of(bare) or said[0]}


def flat_masks(part: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """`scores.masked_fill(mask[:, None, :], …)` where an einsum has given the scores four axes."""
    for function in nodes(ast.FunctionDef, part):
        four = {
            target_of(line)
            for line in nodes(ast.Assign, function)
            if FOUR.search(ast.unparse(line.value))
        }
        for call, mask, _ in _fills(function):
            bare = mask.operand if isinstance(mask, ast.UnaryOp) else mask
            taken = getattr(call.func, "value", None)
            name = word_of(getattr(bare, "value", None))
            flat = isinstance(bare, ast.Subscript) and ast.unparse(bare.slice) == "(:, None, :)"
            if flat and word_of(taken) in four and PADS.search(name):
                yield "flat", call.lineno, {"name": name, "code": ast.unparse(bare)}


def _is_column(value: ast.expr | None) -> bool:
    return value is not None and COLUMN.search(ast.unparse(value)) is not None


def empty_bands(part: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """`(i - j > left) & (i - j < -right)`, which holds nowhere."""
    for both in nodes(ast.BinOp, part):
        sides = [one for one in (both.left, both.right) if isinstance(one, ast.Compare)]
        if not isinstance(both.op, ast.BitAnd) or len(sides) != 2:
            continue
        ends = {type(one.ops[0]): one.comparators[0] for one in sides if len(one.ops) == 1}
        low = ends.get(ast.Gt) or ends.get(ast.GtE)
        high = ends.get(ast.Lt) or ends.get(ast.LtE)
        same = ast.unparse(sides[0].left) == ast.unparse(sides[1].left)
        below = isinstance(high, ast.UnaryOp) and isinstance(high.op, ast.USub)
        if same and below and low is not None and word_of(low):
            yield "empty", both.lineno, {"code": ast.unparse(both)}

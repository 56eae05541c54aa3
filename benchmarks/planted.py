"""Plant mistakes in right attention that others wrote: a list of them for `others_code.py`.

    python benchmarks/planted.py benchmarks/lists/right.tsv --trees FOLDER planted.tsv
    python benchmarks/others_code.py planted.tsv --trees FOLDER

Each mistake changes one place of an attention of the list, or of what it calls in its file: a
`transpose` that is left out, a softmax along another axis, a mask that is not filled in. The file
with the mistake is written beside the file, in the folder of its repository; `list` holds the
mistake's name. Some are none where they stand (an axis of 1 that another line removes, a path that
is not taken), so what is not caught has to be looked at.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import random
import re
from collections.abc import Iterator
from dataclasses import astuple, dataclass, fields
from itertools import chain
from pathlib import Path

from others_code import Entry, entries

MASKS = "mask-fill,mask,padding,causality,causal-mask,past-used,finite,runs"
SPLITS = "head-split,head-merge,definition,rotary,runs,shape"
ROLES = "roles,gradients,definition,unused-result"
MOVES = {("1", "2"), ("2", "1"), ("0", "2", "1", "3")}
"""Axes of a `transpose` or `permute` that splits heads, or joins them."""
SCALE = re.compile(r"sqrt|\*\* ?-?\(?0\.5|scal|norm_fact|temperature")
OUT = re.compile(r"self\.(?!\w*drop)\w*(out|proj|fc_o|w_o|wo|dense|unify)\w*$")
NARROW = re.compile(r"head|d_k|dk|hd\b|size\(-1\)|shape\[-1\]")
"""A width of one head, where a root of it divides the scores; and one of all heads."""
WIDTH = re.compile(r"self\.(d_model|embed_dim|emb_dim|hidden_size|n_embd|dim|d_out)\b")
TURNS = re.compile(r"rot|rope")
BEFORE = {"k": "q", "key": "query", "keys": "queries", "v": "k", "value": "key", "values": "keys"}
BEFORE |= {"K": "Q", "V": "K"}
"""What queries are called where keys have this name, or keys where values have it."""
WITHIN = re.compile(r"att|head|rot|rope|scaled", re.I)
"""Classes of a file that are part of an attention."""


@dataclass(frozen=True)
class Mistake:
    """One place, what stands there instead, and the rules that name it well."""

    name: str
    rules: str
    place: ast.expr | ast.stmt
    text: str


def mistakes(scope: ast.stmt, code: str) -> Iterator[Mistake]:
    """All mistakes that can be planted in a class or function."""
    built = {
        id(part)
        for one in ast.walk(scope)
        if isinstance(one, ast.FunctionDef) and one.name == "__init__"
        for part in ast.walk(one)
    }
    for node in ast.walk(scope):
        if isinstance(node, ast.Call):
            yield from (_built if id(node) in built else _called)(node, code)
        elif id(node) in built:
            continue
        elif isinstance(node, ast.BinOp):
            left, right = ast.unparse(node.left), ast.unparse(node.right)
            scales = SCALE.search(right) and not SCALE.search(left)
            if isinstance(node.op, ast.Div | ast.Mult) and scales:
                yield Mistake("no-scale", "scale,definition", node, _said(node.left, code))
            if isinstance(node.op, ast.MatMult):
                yield from _multiplied(node.left, node.right, code)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            yield from _turned(node, code)
        elif isinstance(node, ast.Assign) and len(node.targets) == 1:
            yield from _assigned(node, code)
        elif isinstance(node, ast.If) and "mask" in ast.unparse(node.test):
            yield Mistake("mask-ignored", MASKS, node.test, "False")
        elif isinstance(node, ast.Return) and isinstance(node.value, ast.Call):
            call = node.value
            if OUT.search(ast.unparse(call.func)) and len(call.args) == 1:
                rules = "output-projection,gradients,parameter-count"
                yield Mistake("no-projection", rules, call, _said(call.args[0], code))


def _called(call: ast.Call, code: str) -> Iterator[Mistake]:
    """Mistakes in what forward calls."""
    name = ast.unparse(call.func).split(".")[-1]
    args, named = [*map(ast.unparse, call.args)], {one.arg: one.value for one in call.keywords}
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    if name in ("transpose", "permute") and tuple(args) in MOVES and owner is not None:
        yield Mistake("no-transpose", SPLITS, call, f"({_said(owner, code)})")
    if name in ("view", "reshape") and len(args) == 4 and owner is not None:
        order = ", ".join((args[0], args[2], args[1], args[3]))
        yield Mistake("other-order", SPLITS, call, f"{_said(owner, code)}.{name}({order})")
    if name == "softmax" and "dim" in named and ast.unparse(named["dim"]) == "-1":
        for axis in ("-2", "1"):
            yield Mistake(f"softmax{axis}", "softmax,definition,weights", named["dim"], axis)
    if name.strip("_") == "masked_fill" and len(args) > 1:
        for fill in ("-1e-9", "1e-9"):
            yield Mistake("small-fill", MASKS, call.args[-1], fill)
    if name in ("triu", "tril") and "diagonal" not in named and len(args) < 3:
        other = {"triu": "tril", "tril": "triu"}[name]
        yield Mistake("triangle", MASKS, call.func, _said(call.func, code)[:-4] + other)
    if name in ("matmul", "bmm") and len(call.args) == 2:
        left, right = call.args
        yield from _multiplied(left, right, code)
    if name == "unsqueeze" and args == ["2"] and "mask" in ast.unparse(call):
        yield Mistake("masks-queries", MASKS, call.args[0], "3")
    if name == "scaled_dot_product_attention" and "is_causal" in named:
        yield Mistake("not-causal", MASKS, named["is_causal"], "False")
    if name in ("cat", "concat") and call.args and isinstance(call.args[0], ast.List | ast.Tuple):
        yield from _joined(call.args[0], code)
    if name == "sqrt" and len(call.args) == 1 and (wider := WIDTH.search(code)):
        inside = ast.unparse(call.args[0])
        if NARROW.search(inside) and wider[0] not in inside:
            yield Mistake("wide-scale", "scale,definition", call.args[0], wider[0])
    if name == "einsum" and args and re.match(r"'[\w ,]+->[\w ]+'$", args[0]):
        first, result = args[0].strip("'").split("->")
        terms = first.split(",")
        if len(terms) == 2 and terms[0].strip() != terms[1].strip():
            swapped = f'"{terms[1].strip()},{terms[0].strip()}->{result}"'
            yield Mistake("einsum-swapped", ROLES + "," + SPLITS, call.args[0], swapped)
    if name == "repeat_interleave" and owner is not None and len(args) > 1 and args[1] == "1":
        tiled = f"{_said(owner, code)}.repeat(1, {args[0]}, 1, 1)"
        yield Mistake("tiled", "grouped-heads,definition", call, tiled)
    if "training" in named and name == "dropout":
        yield Mistake("drops-in-eval", "dropout-in-eval,deterministic", named["training"], "True")
    role = re.fullmatch(r"self\.(\w*?)(k|v|keys?|values?)(_?\w*)", ast.unparse(call.func))
    if role is not None and len(args) == 1:
        other = f"self.{role[1]}{BEFORE[role[2]]}{role[3]}"
        if re.search(rf"{re.escape(other)}\b", code):
            yield Mistake("other-role", ROLES, call.func, other)


def _multiplied(left: ast.expr, right: ast.expr, code: str) -> Iterator[Mistake]:
    """Two factors: values that are keys, and queries and keys the other way round."""
    query, value = ast.unparse(left), ast.unparse(right)
    if value in ("v", "value", "values", "V"):
        rules = "roles,definition,gradients,one-token"
        yield Mistake("keys-for-values", rules, right, BEFORE[value])
    key = value.partition(".")[0]
    if (
        query in ("q", "query", "queries", "Q")
        and BEFORE.get(key) == query
        and "transpose" in value
    ):
        yield Mistake("other-way", "roles,causality,definition,mask,padding,cross", left, key)


def _joined(parts: ast.List | ast.Tuple, code: str) -> Iterator[Mistake]:
    """What is put side by side: a cache before what is new, two halves that are turned."""
    if len(parts.elts) != 2:
        return
    first, second = (_said(one, code) for one in parts.elts)
    rules = "rotary,rotation" if first.startswith("-") else "cache,past-used,causality,rotary"
    yield Mistake("joined-other-way", rules, parts, f"[{second}, {first}]")


def _turned(node: ast.UnaryOp, code: str) -> Iterator[Mistake]:
    """A sign of a rotation."""
    inside = ast.unparse(node.operand)
    if re.match(r"x\d?\b|\w*(odd|second|half|x2)", inside):
        yield Mistake("no-sign", "rotary,rotation", node, f"({_said(node.operand, code)})")


def _built(call: ast.Call, code: str) -> Iterator[Mistake]:
    """Mistakes in what a constructor makes."""
    name = ast.unparse(call.func).split(".")[-1]
    first = _said(call.args[0], code) if call.args else ""
    if name == "register_buffer" and len(call.args) > 1:
        text = f"setattr(self, {first}, {_said(call.args[1], code)})"
        yield Mistake("no-buffer", "registered,move,reload", call, text)
    if name == "Parameter" and first:
        yield Mistake("no-parameter", "registered,reload,gradients,move", call, f"({first})")
    if name == "ModuleList" and first:
        yield Mistake("plain-list", "registration,registered,gradients", call, f"list({first})")
    if name in ("triu", "tril") and len(call.args) == 1 and not call.keywords:
        diagonal = {"triu": -1, "tril": 1}[name]
        yield Mistake("diagonal", MASKS, call, f"{_said(call.func, code)}({first}, {diagonal})")


def _assigned(line: ast.Assign, code: str) -> Iterator[Mistake]:
    """Lines that are lost."""
    to, value = ast.unparse(line.targets[0]), line.value
    called = ast.unparse(value.func) if isinstance(value, ast.Call) else ""
    name = called.split(".")[-1]
    if name in ("masked_fill", "transpose", "permute") and called.startswith(f"{to}."):
        yield Mistake("lost", f"unused-result,{MASKS},{SPLITS}", line, _said(value, code))
    if TURNS.search(called) and to in ("k", "key", "keys", "K", "xk"):
        yield Mistake("keys-not-turned", "rotary,definition,prefix,order", line, "pass")
    if (
        OUT.search(called)
        and isinstance(value, ast.Call)
        and [*map(ast.unparse, value.args)] == [to]
    ):
        yield Mistake("no-projection", "output-projection,gradients,parameter-count", line, "pass")
    if (
        isinstance(value, ast.BinOp)
        and isinstance(value.op, ast.Add)
        and "mask" in ast.unparse(value)
    ):
        yield Mistake("mask-not-added", MASKS, line, "pass")


def _said(node: ast.expr, code: str) -> str:
    return ast.get_source_segment(code, node) or ast.unparse(node)


def changed(mistake: Mistake, code: str) -> str | None:
    """The code with a mistake in it; None where that is no Python."""
    text, place = code.encode(), mistake.place
    lines = text.splitlines(keepends=True)
    before = [sum(map(len, lines[:number])) for number in range(len(lines) + 1)]
    start = before[place.lineno - 1] + place.col_offset
    end = before[(place.end_lineno or 1) - 1] + (place.end_col_offset or 0)
    made = (text[:start] + mistake.text.encode() + text[end:]).decode()
    try:
        ast.parse(made)
    except SyntaxError:
        return None
    return made


def parts(name: str, tree: ast.Module) -> Iterator[ast.stmt]:
    """An attention, and what it speaks of in its file: functions, and classes that belong to it."""
    known = {one.name: one for one in tree.body if isinstance(one, ast.ClassDef | ast.FunctionDef)}
    waiting, done = [name], set[str]()
    for one in waiting:
        if one in known and one not in done:
            done.add(one)
            if one == name or isinstance(known[one], ast.FunctionDef) or WITHIN.search(one):
                yield known[one]
                waiting += [part.id for part in ast.walk(known[one]) if isinstance(part, ast.Name)]


def plant(entry: Entry, trees: Path, count: int, seed: str, only: str) -> Iterator[Entry]:
    """Files with one mistake each, written beside that of an entry."""
    file = entry.file(trees)
    try:
        code = file.read_text(encoding="utf-8")
        tree = ast.parse(code)
    except (OSError, SyntaxError, UnicodeDecodeError):
        return
    kinds: dict[str, list[Mistake]] = {}
    for one in chain.from_iterable(mistakes(part, code) for part in parts(entry.name, tree)):
        if not only or one.name in only.split(","):
            kinds.setdefault(one.name, []).append(one)
    said = f"{seed} {entry.repository} {entry.path} {entry.name}"
    draw = random.Random(hashlib.sha256(said.encode()).digest())
    for kind in draw.sample(sorted(kinds), min(count, len(kinds))):
        mistake = draw.choice(kinds[kind])
        if (made := changed(mistake, code)) is not None and made != code:
            digest = hashlib.sha256(made.encode()).hexdigest()[:8]
            path = Path(entry.path).with_name(f"{file.stem}_planted_{digest}.py")
            file.with_name(path.name).write_text(made, encoding="utf-8")
            line = code.splitlines()[mistake.place.lineno - 1].strip().replace("\t", " ")
            words = (entry.repository, entry.commit, str(path), entry.name)
            yield Entry("real", kind, *words, mistake.rules, f"line {mistake.place.lineno}: {line}")


def main() -> None:
    """Write the files and the list."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("lists", type=Path, nargs="+")
    parser.add_argument("out", type=Path)
    parser.add_argument("--trees", type=Path, required=True)
    parser.add_argument("--count", type=int, default=2, help="mistakes in each")
    parser.add_argument("--seed", default="0")
    parser.add_argument("--only", default="", help="of these kinds, separated by commas")
    options = parser.parse_args()
    rows = [[one.name for one in fields(Entry)]]
    for entry in entries(options.lists, None):
        if entry.kind == "right" and entry.commit != "site-packages":
            made = plant(entry, options.trees, options.count, options.seed, options.only)
            rows.extend([*astuple(one)] for one in made)
    options.out.write_text("".join("\t".join(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{len(rows) - 1} mistakes in {options.out}")


if __name__ == "__main__":
    main()

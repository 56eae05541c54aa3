"""Read mistakes off how a class makes its parts and uses them: layers in a plain list or made anew
by each call, a dropout that does not ask for the mode, an attribute that is there under a condition
only, tensors that are always made on a GPU. Readers are as in `read_code`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from ..files.syntax import Source, names, nodes, pairs
from ..target.names import building_role
from .call_lines import FUSED
from .read_pieces import (
    INNER,
    LAYERS,
    Known,
    Said,
    called_of_self,
    defaults_of,
    given_before,
    is_plain,
    of_self,
    root_of,
    word_of,
    words_in,
)

FRESH = re.compile(r"(\w+\.)*(Alpha)?Dropout[123]?d?")
"""What makes a layer that drops."""
MISSPELT = re.compile(r"__(int|inti|ini|innit|intit|nit|it)__|_init__|__init_|_init_")
"""Names that stand for `__init__`."""
WORKED_OUT = {"head_dim", "kv_heads"}
"""Roles of numbers that others tell where they are left out."""
GPU = re.compile(r"(torch\.device\()?'cuda")
ASKS_FOR_GPU = re.compile(r"is_available|is_cuda|device_count|autocast")
"""Code that makes tensors on a GPU where there is one."""


def misspelt(kind: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """`def __int__(self, dim)`, where a constructor was meant: nothing calls it."""
    methods = [one for one in getattr(kind, "body", ()) if isinstance(one, ast.FunctionDef)]
    named = {one.name for one in methods}
    for one in methods if isinstance(kind, ast.ClassDef) and "__init__" not in named else ():
        sets = any(of_self(to) for node in nodes(ast.Assign, one) for to, _ in pairs(node))
        called = f".{one.name}(" in source.text
        if MISSPELT.fullmatch(one.name) and sets and not called:
            yield "misspelt", one.lineno, {"name": one.name}


def refused_default(kind: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """`def __init__(self, mode="self_attention")`, and `assert mode in ("self-attention", …)`."""
    for function in nodes(ast.FunctionDef, kind):
        words = {
            name: one.value
            for name, one in defaults_of(function).items()
            if isinstance(one, ast.Constant) and isinstance(one.value, str)
        }
        for line in function.body if function.name == "__init__" else ():
            match line:
                case ast.Assert(ast.Compare(ast.Name(name), [ast.In()], [listed])):
                    pass
                case ast.If(ast.Compare(ast.Name(name), [ast.NotIn()], [listed]), [ast.Raise()]):
                    pass
                case _:
                    continue
            said = [getattr(one, "value", None) for one in getattr(listed, "elts", ())]
            every = bool(said) and all(isinstance(one, str) for one in said)
            if every and words.get(name, said[0]) not in said:
                yield "default", line.lineno, {"name": name, "value": words[name]}


def multiplied_none(kind: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """`head_dim=None`, for what usually is worked out then, and `heads * self.head_dim`."""
    for function in nodes(ast.FunctionDef, kind):
        for name, default in defaults_of(function).items():
            empty = isinstance(default, ast.Constant) and default.value is None
            if function.name != "__init__" or not empty or building_role(name) not in WORKED_OUT:
                continue
            it = rf"(self\.)?{name}\b"
            asks = rf"\b{it} (is|or|if|and|==|!=) |\b(if|not|and|or) {it}|\b{it} = (?!{name}$)"
            if re.search(asks, ast.unparse(kind), re.MULTILINE):
                continue
            sums = [
                one for line in filter(is_plain, function.body) for one in nodes(ast.BinOp, line)
            ]
            for one in [one for one in sums if name in map(word_of, (one.left, one.right))][:1]:
                yield "none", one.lineno, {"name": name, "code": ast.unparse(one)}


def inner_forward(kind: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """`def forward` that stands inside another method, in a class that has none of its own."""
    home = known.get(getattr(kind, "name", ""))
    own = getattr(home, "forward", None) if isinstance(home, type) else None
    if getattr(own, "__name__", "") != "_forward_unimplemented":
        return
    for method in [one for one in getattr(kind, "body", ()) if isinstance(one, ast.FunctionDef)]:
        for one in nodes(ast.FunctionDef, *method.body):
            if one.name == "forward" and one.args.args and one.args.args[0].arg == "self":
                yield "inner", one.lineno, {"name": method.name}


def listed_layers(kind: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """Layers, or weights, that a constructor keeps in a plain list and hands on to nothing that
    knows them."""
    if not isinstance(kind, ast.ClassDef):
        return
    registers = re.search(r"\b(add_module|register_module|setattr)\(", ast.unparse(kind))
    for target, value in (pair for node in nodes(ast.Assign, kind) for pair in pairs(node)):
        made = [value.elt] if isinstance(value, ast.ListComp) else getattr(value, "elts", [])
        if not made and not registers:
            made = list(_appended(kind, of_self(target)))
        kinds = [known.get(word_of(getattr(one, "func", None))) for one in made]
        calls = [ast.unparse(getattr(one, "func", one)) for one in made]
        weights = [one.split(".")[-1] == "Parameter" for one in calls]
        layers = [
            LAYERS.fullmatch(call) or (isinstance(own, type) and issubclass(own, nn.Module))
            for call, own in zip(calls, kinds, strict=True)
        ]
        name = of_self(target)
        code = re.sub(r"\b(len|enumerate|zip)\(", "(", ast.unparse(kind))  # which keep nothing
        handed = re.search(rf"\w\([^()]*self\.{name}\b(?![(\[])", code)
        plain = name and isinstance(value, ast.List | ast.ListComp)
        if plain and made and not handed and (all(layers) or all(weights)):
            what, wanted = ("weights", "Parameter") if all(weights) else ("layers", "Module")
            yield "read", target.lineno, {"name": name, "what": what, "wanted": f"{wanted}List"}


def _appended(kind: ast.ClassDef, name: str) -> Iterator[ast.expr]:
    """What the constructor appends to a list of its own, each as it was made."""
    for function in nodes(ast.FunctionDef, kind) if name else ():
        for call in nodes(ast.Call, function) if function.name == "__init__" else ():
            match call:
                case ast.Call(ast.Attribute(owner, "append"), [one]) if of_self(owner) == name:
                    yield given_before(function, word_of(one), call.lineno) or one
                case _:
                    pass


def made_anew(part: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """Layers with weights that a call makes and uses at once: `proj = nn.Linear(…)` in forward."""
    start = source.function(f"{getattr(part, 'name', '')}.__init__")
    built = {*called_of_self(start)}
    for function in nodes(ast.FunctionDef, part):
        used = {word_of(call.func) for call in nodes(ast.Call, function)} - {""}
        for node in nodes(ast.Assign, function) if function.name != "__init__" else ():
            for target, value in pairs(node):
                made = isinstance(value, ast.Call) and LAYERS.fullmatch(ast.unparse(value.func))
                always = node in function.body and function.name not in built
                kept = isinstance(target, ast.Name) or always  # else once, perhaps
                if made and kept and word_of(target) in used:
                    yield "anew", node.lineno, {"name": word_of(target)}


def on_a_gpu(part: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """Tensors that a call always makes on a GPU, wherever its input lies, and layers that are built
    there: `torch.ones(T, device="cuda")`, `nn.Linear(E, E).cuda()`."""

    def is_gpu(value: ast.expr) -> bool:
        given = known.get(word_of(value))
        fixed = isinstance(given, torch.device) and given.type == "cuda"
        return fixed or GPU.match(ast.unparse(value)) is not None

    for function in nodes(ast.FunctionDef, part):
        built = function.name == "__init__"
        if ASKS_FOR_GPU.search(source.text if built else ast.unparse(function)):
            continue
        for call in nodes(ast.Call, function):
            match call.func:
                case ast.Attribute(ast.Call(made), "cuda" | "to"):
                    fixed = any(map(is_gpu, call.args)) or call.func.attr == "cuda"
                case _:
                    made = call.func
                    fixed = any(is_gpu(one.value) for one in call.keywords if one.arg == "device")
            kind = r"(nn|torch)\.(?!device)\w+$" if built else r"torch\.(?!device)\w+$"
            own = known.get(word_of(made))
            layer = built and isinstance(own, type) and issubclass(own, nn.Module)
            if fixed and (layer or re.match(kind, ast.unparse(made))):
                yield "built" if built else "fixed", call.lineno, {"made": ast.unparse(call)}
                break


def gpu_by_default(kind: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """`def __init__(self, …, device="cuda:0")`, kept as `self.device`, where calls put what they
    make: a layer that is moved, or made where there is no GPU, makes it elsewhere."""
    methods = {one.name: one for one in nodes(ast.FunctionDef, kind)}
    built = methods.pop("__init__", None)
    if built is None or ASKS_FOR_GPU.search(source.text):
        return
    default = {name for name, one in defaults_of(built).items() if GPU.match(ast.unparse(one))}
    kept = {
        of_self(target)
        for target, value in (pair for line in nodes(ast.Assign, built) for pair in pairs(line))
        if of_self(target) and default & names(*([] if value is None else [value]))
    }
    for call in nodes(ast.Call, *methods.values()):
        moved = isinstance(call.func, ast.Attribute) and call.func.attr == "to"
        places = [one.value for one in call.keywords if one.arg == "device"]
        for place in (*(call.args if moved else ()), *places):
            if of_self(place) in kept:
                yield "default", call.lineno, {"made": ast.unparse(call)}
                return


def moved_parameters(kind: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """`self.v = nn.Parameter(…).to(device)`, which on another device is no parameter any more, and
    `nn.Parameter(…) * 0.02`, which is none at all."""
    for target, value in (pair for node in nodes(ast.Assign, kind) for pair in pairs(node)):
        match value:
            case ast.Call(ast.Attribute(ast.Call(made), "to" | "cuda")) if of_self(target):
                if re.fullmatch(r"(\w+\.)*Parameter", ast.unparse(made)):
                    yield "moved", target.lineno, {"name": of_self(target)}
            case ast.BinOp(left, _, right) if of_self(target):
                for one in (left, right):
                    if re.match(r"(\w+\.)*Parameter\(", ast.unparse(one)):
                        yield "sum", target.lineno, {"name": of_self(target)}
            case _:
                pass


def repeated_layers(kind: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """One layer with weights that stands several times in a list: `[nn.Linear(d, d)] * heads`."""
    for one in nodes(ast.BinOp, kind):
        match one:
            case ast.BinOp(ast.List([ast.Call(made)]), ast.Mult(), _):
                own = known.get(word_of(made))
                layer = LAYERS.fullmatch(ast.unparse(made)) is not None
                if layer or (isinstance(own, type) and issubclass(own, nn.Module)):
                    yield "repeated", one.lineno, {"name": ast.unparse(made)}
            case _:
                pass


def worn_out(kind: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """Defaults that a constructor takes something out of, so that the next one lacks it:
    `def __init__(self, drop=dict(p=0.1))` and `drop.pop("p")`."""
    for function in nodes(ast.FunctionDef, kind):
        given = defaults_of(function).items()
        kept = {name for name, value in given if re.match(r"\{|dict\(", ast.unparse(value))}
        made = [to for node in nodes(ast.Assign, function) for to, _ in pairs(node)]
        for call in nodes(ast.Call, function) if function.name == "__init__" else ():
            match call.func:
                case ast.Attribute(ast.Name(name), "pop") if name in kept:
                    before = (to for to in made if to.lineno < call.lineno)
                    own = any(isinstance(to, ast.Name) and to.id == name for to in before)
                    if len(call.args) == 1 and not own:  # else it may be gone, or a copy
                        yield "worn", call.lineno, {"name": name}
                case _:
                    pass


def no_bias(part: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """`bias=False if wanted is False else None`, which is no bias either way."""
    for call in nodes(ast.Call, part):
        for given in call.keywords if LAYERS.fullmatch(ast.unparse(call.func)) else ():
            match given.value:
                case ast.IfExp(test, ast.Constant(False | None), ast.Constant(False | None)):
                    code = f"bias={ast.unparse(given.value)}"
                    if given.arg == "bias" and (said := sorted(words_in(test))):
                        yield "never", call.lineno, {"code": code, "name": said[0]}
                case _:
                    pass


def always_dropped(part: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """Methods that drop numbers, and are not told whether this is training; functions that drop
    half of them, whatever they are handed."""
    method = isinstance(part, ast.ClassDef)
    for function in nodes(ast.FunctionDef, part):
        asked = (*nodes(ast.Attribute, function), *nodes(ast.Name, function))
        if any("training" in (getattr(one, "attr", ""), getattr(one, "id", "")) for one in asked):
            continue
        at_once = {id(one.func) for one in nodes(ast.Call, function)}  # `nn.Dropout(p)(x)`
        forward = function.name == "forward"
        for call in nodes(ast.Call, function):
            name = ast.unparse(call.func)
            given = {one.arg: one.value for one in call.keywords}
            if method and FRESH.fullmatch(name) and (id(call) in at_once or forward):
                yield "fresh", call.lineno, {"call": ast.unparse(call)}
            share = given.get("dropout_p" if name.endswith(FUSED) else "p")
            if method and name.endswith(FUSED) and isinstance(share, ast.Attribute):
                what = f"`dropout_p={ast.unparse(share)} if self.training else 0.0`"
                yield "untold", call.lineno, {"call": FUSED, "what": what}
            elif name in ("F.dropout", "torch.nn.functional.dropout", "functional.dropout"):
                share = call.args[1] if len(call.args) > 1 else share
                told = len(call.args) > 2 or (call.keywords and "p" not in given)
                share = root_of(share) if share is not None else None  # `self.rates[0]`
                if not told and (share is None or (method and isinstance(share, ast.Attribute))):
                    owner = "self.training" if method else "training"
                    words = {"call": "F.dropout", "what": f"`training={owner}`"}
                    yield "untold", call.lineno, words


def set_on_condition(kind: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """What a constructor gives self only where an argument is not left at its default, and every
    call reads."""
    if not isinstance(kind, ast.ClassDef):
        return
    start = next((one for one in kind.body if getattr(one, "name", "") == "__init__"), None)
    forward = next((one for one in kind.body if getattr(one, "name", "") == "forward"), None)
    if not isinstance(start, ast.FunctionDef) or not isinstance(forward, ast.FunctionDef):
        return
    code = ast.unparse(kind)
    for branch in start.body:
        if not isinstance(branch, ast.If) or not _is_off(branch.test, start):
            continue
        there = {of_self(to) for node in ast.walk(branch) for to, _ in pairs(node)}
        other = {of_self(to) for one in branch.orelse for n in ast.walk(one) for to, _ in pairs(n)}
        for name in sorted(there - other - {""}):
            stores = re.findall(rf"self\.{name}\b(?=[^=\n]*=(?!=))|[\"']{name}[\"']", code)
            inside = re.findall(rf"self\.{name}\b(?=[^=\n]*=(?!=))", ast.unparse(branch))
            thing = known.get(kind.name)
            if len(stores) > len(inside) or hasattr(thing, name) or hasattr(nn.Module, name):
                continue
            for read in _always_read(forward.body):
                if of_self(read) == name:
                    words = {"name": name, "test": ast.unparse(branch.test)}
                    yield "condition", read.lineno, words
                    break


def _is_off(test: ast.expr, function: ast.FunctionDef) -> bool:
    """Whether a test of one argument fails with its default: `dropout is not None`, `causal`."""
    defaults = defaults_of(function)
    match test:
        case ast.Compare(ast.Name(name), [ast.IsNot()], [ast.Constant(None)]) | ast.Name(name):
            default = defaults.get(name)
            return isinstance(default, ast.Constant) and default.value in (None, False)
        case _:
            return False


def _always_read(body: Sequence[ast.stmt]) -> Iterator[ast.Attribute]:
    """The attributes of self that a call reads whatever it is given, up to where it may end."""
    for one in body:
        if isinstance(one, INNER):
            continue
        first = one.test if isinstance(one, ast.If) else one
        first = first.values[0] if isinstance(first, ast.BoolOp) else first
        if is_plain(first):
            yield from (node for node in nodes(ast.Attribute, first) if of_self(node))
        if any(isinstance(inner, ast.Return | ast.Raise) for inner in ast.walk(one)):
            return


def handed_up(kind: ast.stmt, source: Source, known: Known) -> Iterator[Said]:
    """`super().__init__(dim, heads)` of a class that derives from `nn.Module` alone, which takes
    nothing."""
    if not isinstance(kind, ast.ClassDef) or len(kind.bases) != 1:
        return
    if ast.unparse(kind.bases[0]) not in ("nn.Module", "torch.nn.Module"):
        return
    for call in nodes(ast.Call, kind):
        up = re.match(r"super\(.*\)\.__init__$", ast.unparse(call.func))
        plain = [one for one in call.args if not isinstance(one, ast.Starred)]
        plain += [one.value for one in call.keywords if one.arg is not None]
        if up and plain:
            yield "up", call.lineno, {"name": kind.name}

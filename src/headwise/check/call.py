"""Call a layer by its signature, or by a call that the user shows.

The plain call passes x once, or as query, key and value, and leaves all other arguments at their
defaults. If an unknown argument is required, a `Question` asks the user to show a call, a lambda.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..core.masks import Causal, Dense
from .code import describe, line_of, name_of, required, signature, source_of
from .names import calling_role
from .target import NAMED, TOKENS, Question

MEANINGS = {
    "memory": "memory [B, S, E], the source of keys and values",
    "keep": "keep [B, S], True = real token",
    "allow": "allow [T, S], True = may attend",
    "start": "start, the position of the first token",
    "past": "past, the result of the last call (None at first)",
}
SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "[T, S]": lambda allowed: allowed[0],
    "[B, 1, T, S]": lambda allowed: allowed[:, None],
    "[B, T, S]": lambda allowed: allowed,
    "[1, 1, T, S]": lambda allowed: allowed[:1, None],
}
KEYS: dict[str, Callable[[Tensor], Tensor]] = {
    "[B, S]": lambda keep: keep,
    "[B, 1, 1, S]": lambda keep: keep[:, None, None],
    "[B, 1, S]": lambda keep: keep[:, None],
}
KINDS = {
    "may": "True = may attend",
    "hidden": "True = hidden",
    "added": "0 or −inf, added to the scores",
    "ones": "1 = may attend",
    "zeros": "1 = hidden",
    "flag": "True = causal",
    "headwise": "a headwise mask",
    "lengths": "number of real tokens",
}
TIME = re.compile(r"t|l|n?_?seq\w*|time\w*|len\w*|n?_?tokens|tgt_len|src_len|s")
BATCH_NAMES = re.compile(r"b|bs|bsz|n|nb|batch\w*")
NEUTRAL: dict[str, Any] = {
    **dict.fromkeys(("mask", "padding", "memory_mask", "cache"), None),
    **dict.fromkeys(("causal", "use_cache", "weights", "training"), False),
    "dropout": 0.0,
    "start": 0,
}
"""Neutral values for required arguments."""


@dataclass(frozen=True)
class Form:
    """One form of a mask argument: its name, its kind and its shape."""

    argument: str
    kind: str
    shape: str = ""
    fill: float = -torch.inf

    def make(self, mask: Tensor, dtype: torch.dtype) -> Any:
        """Return the argument for a mask `[B, T, S]` or, for keys, `[B, S]`; True = may attend."""
        if self.kind == "flag":
            return True
        if self.kind == "lengths":
            return mask.sum(-1)
        if self.kind == "headwise":
            causal = torch.ones_like(mask[0]).tril(mask.shape[2] - mask.shape[1])
            return Causal() if bool((mask == causal).all()) else Dense(mask[:, None])
        given = (SHAPES | KEYS)[self.shape](mask)
        if self.kind == "added":
            zeros = torch.zeros(given.shape, dtype=dtype, device=given.device)
            return zeros.masked_fill(~given, self.fill)
        given = ~given if self.kind in ("hidden", "zeros") else given
        return (given if self.kind in ("may", "hidden") else given.to(dtype)).contiguous()

    def __str__(self) -> str:
        shape = f" {self.shape}" if self.shape else ""
        return f"{self.argument}{shape} ({KINDS[self.kind]})"


@dataclass
class PlainCall:
    """The call that follows from the signature of a layer.

    Attributes:
        inputs: the parameters for x: one, or query, key and value.
        memory: the parameter for another sequence; with three inputs, key and value take it.
        forms: the forms of `allow` and `keep`, once `masks` has found them.
        time_first: x and the output are `[T, B, E]`.
    """

    parameters: dict[str, inspect.Parameter]
    roles: dict[str, str]
    inputs: tuple[str, ...]
    memory: str | None
    time_first: bool = False
    cross_only: bool = False
    forms: dict[str, Form] = field(default_factory=dict)
    fixed: dict[str, Any] = field(default_factory=dict)

    @property
    def takes(self) -> frozenset[str]:
        own = set(self.forms)  # "causal" is a flag
        own |= {"memory"} if self.memory or len(self.inputs) == 3 else set()
        own |= {"start"} if self.named("start") else set()
        return frozenset(own)

    def named(self, role: str) -> list[str]:
        """Return the parameters of a role, in order."""
        return [name for name, its in self.roles.items() if its == role]

    def __call__(self, layer: Any, x: Tensor, given: Mapping[str, Any]) -> Any:
        values = dict(self.fixed)
        memory = given.get("memory")
        keys = x if memory is None else memory
        turn: Callable[[Tensor], Tensor] = (
            (lambda t: t.transpose(0, 1)) if self.time_first else (lambda t: t)
        )
        values |= zip(self.inputs, map(turn, (x, keys, keys)), strict=False)
        if self.memory and (memory is not None or required(self.parameters[self.memory])):
            values[self.memory] = turn(keys)
        for name, role in self.roles.items():
            if name in values or not required(self.parameters[name]):
                continue
            if role == "lengths":
                values[name] = torch.full((len(x),), keys.shape[1], device=x.device)
            elif role in ("tokens", "batch"):
                values[name] = x.shape[1] if role == "tokens" else len(x)
            elif role in NEUTRAL:
                values[name] = NEUTRAL[role]
        allow, keep = given.get("allow"), given.get("keep")
        if allow is not None and allow.ndim == 2:
            allow = allow.expand(len(x), -1, -1)
        if allow is not None and "allow" not in self.forms and "causal" in self.forms:
            values[self.forms["causal"].argument], allow = True, None
        for name, mask in (("allow", allow), ("keep", keep)):
            if mask is not None:
                form = self.forms[name]
                values[form.argument] = form.make(mask, x.dtype)
        if "start" in given:
            values |= dict.fromkeys(self.named("start")[:1], given["start"])
        values |= given.get("extra", {})
        placed = []
        for name, its in self.parameters.items():
            if its.kind == its.POSITIONAL_ONLY and name in values:
                placed.append(values.pop(name))
        return _turned(layer(*placed, **values), self.time_first)


def _turned(raw: Any, time_first: bool) -> Any:
    if not time_first:
        return raw
    if isinstance(raw, Tensor):
        return raw.transpose(0, 1)
    if isinstance(raw, tuple) and raw and isinstance(raw[0], Tensor):
        return (raw[0].transpose(0, 1), *raw[1:])
    return raw


@dataclass
class ShownCall:
    """A call shown by the user: `lambda layer, x, keep: layer(x, mask=keep)`.

    Raises:
        Question: the call fails outside the layer, or a parameter's name is not in `NAMED`.
    """

    shown: Callable[..., Any]
    label: str

    def __post_init__(self) -> None:
        found = signature(self.shown)
        names = [
            one.name for n, one in enumerate(found) if n < 2 or required(one) or one.name in NAMED
        ]
        odd = [name for name in names[2:] if name not in NAMED]
        if len(names) < 2 or odd:
            what = f"{', '.join(odd)} among its parameters" if odd else f"{len(names)} parameters"
            raise Question(
                f"check({self.label}): call= has {what}. The first two are the layer and x; the "
                f"others are any of {', '.join(NAMED)}: lambda layer, x, keep: layer(x, mask=keep)"
            )
        self.takes = frozenset(names[2:])

    @property
    def spoken(self) -> tuple[str, ...]:
        """The names that the call's code mentions."""
        code = getattr(self.shown, "__code__", None)
        return (*getattr(code, "co_names", ()), *getattr(code, "co_varnames", ()))

    def __call__(self, layer: Any, x: Tensor, given: Mapping[str, Any]) -> Any:
        values = {name: _usual(name, x, given) for name in self.takes}
        extra = given.get("extra", {})
        try:
            return self.shown(layer, x, **values, **extra)
        except Exception as error:
            if reached(layer, error):
                raise
            raise Question(
                f"check({self.label}): the given call fails outside the layer: {describe(error)}"
            ) from error


def _usual(name: str, x: Tensor, given: Mapping[str, Any]) -> Any:
    """Return a named input as a probe sets it, or else its default."""
    memory = given.get("memory", x)
    if name in given:
        return given[name]
    if name == "memory":
        return x.clone()
    if name == "keep":
        return torch.ones(memory.shape[:2], dtype=torch.bool)
    if name == "allow":
        return torch.ones(x.shape[1], memory.shape[1], dtype=torch.bool)
    return 0 if name == "start" else None


def reached(layer: Any, error: BaseException) -> bool:
    """Return True if an error came from within the layer, not from the code that calls it."""
    frame = error.__traceback__
    while frame is not None:
        own = frame.tb_frame.f_locals.get("self")
        if isinstance(own, nn.Module) and not frame.tb_frame.f_code.co_name.endswith("_call_impl"):
            return True
        frame = frame.tb_next
    return False


# --- reading a signature --------------------------------------------------------------------------


def plain_call(layer: nn.Module, label: str) -> PlainCall:
    """Return the call that follows from the signature of a layer.

    Raises:
        Question: a required argument cannot be guessed; the message has a lambda to copy.
    """
    forward = getattr(layer, "forward_like", layer.forward)
    found = signature(forward)
    parameters = {
        one.name: one for one in found if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    }
    roles = {name: calling_role(name) or "" for name in parameters}
    for name, its in parameters.items():
        if isinstance(its.default, bool) and roles[name] in ("mask", "padding"):
            roles[name] = "causal"
    names = list(parameters)
    if not names:
        if found:  # def forward(self, *args)
            x = inspect.Parameter("x", inspect.Parameter.POSITIONAL_ONLY)
            return PlainCall({"x": x}, {"x": ""}, ("x",), None)
        shown = show(layer, label, [], [])
        raise Question(f"check({label}): its forward takes no arguments. {shown}")
    first = [roles[name] for name in names[:3]]
    inputs, memory = (names[0],), None
    if set(first) == {"query", "key", "value"}:
        inputs = tuple(sorted(names[:3], key=lambda n: ("query", "key", "value").index(roles[n])))
    elif len(names) > 2 and first[1:] == ["key", "value"]:
        inputs = tuple(names[:3])
    else:
        memory = next((name for name in names[1:] if roles[name] == "memory"), None)
        pairs = [name for name in names[1:] if roles[name] == "key"]
        memory = memory or (pairs[0] if pairs and "value" not in roles.values() else None)
    call = PlainCall(parameters, roles, inputs, memory, _is_time_first(layer))
    must = [name for name in names if required(parameters[name]) and name not in inputs]
    call.cross_only = memory in must
    open_ = [n for n in must if n != memory and not _is_neutral(call, n)]
    if call.cross_only and any(roles[name] in ("mask", "memory_mask", "padding") for name in must):
        open_ = [memory, *(n for n in must if "mask" in roles[n] or roles[n] == "padding")]
    if open_:
        raise Question(show(layer, label, [str(name) for name in open_], must))
    return call


def _is_neutral(call: PlainCall, name: str) -> bool:
    role, its = call.roles[name], call.parameters[name]
    if role in ("tokens", "batch"):
        return its.annotation in (int, "int", its.empty)
    return role in NEUTRAL or role == "lengths"


def show(layer: Any, label: str, unknown: list[str], must: list[str]) -> str:
    """Return the question that requests a call, with a lambda to copy and the shapes."""
    takes = " and ".join(f"`{name}`" for name in unknown)
    begins = f"It takes {takes}, which cannot be guessed. " if unknown else ""
    roles = {name: calling_role(name) or "" for name in must}
    named = {
        "memory": "memory",
        "memory_mask": "keep",
        "padding": "keep",
        "mask": "allow",
        "start": "start",
    }
    named |= {"cache": "past"}
    places = {name: named.get(role, "…") for name, role in roles.items()}
    if "memory" in places.values():  # with another sequence, masks hide its tokens
        places |= {n: "keep" for n, role in roles.items() if role in ("mask", "memory_mask")}
    words = [one for one in dict.fromkeys(places.values()) if one in NAMED]
    arguments = ", ".join(["x", *(places[name] for name in must)])
    head = ", ".join(["layer", "x", *words])
    lines = [
        f"check({label}): {begins}Show one call; x is [2, {TOKENS}, E]:",
        f'  --call "lambda {head}: layer({arguments})"        (in Python: call=lambda …)',
        *(f"  {MEANINGS[word]}" for word in (words or NAMED)),
        "Only the named inputs are tested.",
    ]
    return "\n".join(lines)


def _is_time_first(layer: nn.Module) -> bool:
    """Return True if the layer expects x as [T, B, E], as `batch_first` or the unpacking of x's
    shape in its forward indicates."""
    own = getattr(layer, "batch_first", None)
    if isinstance(own, bool):
        return not own
    code = source_of(type(layer).forward) if isinstance(layer, nn.Module) else ""
    names = [one.name for one in signature(layer.forward)][:1]
    for name in names:
        found = re.search(rf"(\w+), *(\w+), *\w+ *= *{name}\.(?:shape|size\(\))", code)
        letters = re.search(rf"einsum\(\s*[\"'](\w)(\w)\w,[^\"']*[\"'],\s*{name}\b", code)
        if letters and letters[2] == "b":
            return True
        if re.search(
            rf"\b(T|L|N|steps|length|time|seq_len|tgt_len) *= *{name}\.(size\(0\)|shape\[0\])", code
        ):
            return True
        if found:
            return bool(
                TIME.fullmatch(found[1].lower()) and BATCH_NAMES.fullmatch(found[2].lower())
            )
    return False


# --- functions of q, k and v ----------------------------------------------------------------------

AXES = {"heads": "[B, H, T, D]", "tokens": "[B, T, H, D]", "flat": "[B, T, D]"}


class FunctionLayer(nn.Module):
    """A layer that applies headwise's own projections, then a plain function of q, k and v."""

    def __init__(
        self, function: Callable[..., Any], axes: str, width: int, heads: int, groups: int
    ) -> None:
        super().__init__()
        self.function, self.axes = function, axes
        self.num_heads, self.num_kv_heads = heads, groups
        dim = width // heads
        self.query = nn.Linear(width, heads * dim, bias=False)
        self.key = nn.Linear(width, groups * dim, bias=False)
        self.value = nn.Linear(width, groups * dim, bias=False)
        x = inspect.Parameter("x", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        memory = inspect.Parameter("memory", inspect.Parameter.KEYWORD_ONLY, default=None)
        rest = [
            one.replace(kind=one.KEYWORD_ONLY)
            for one in signature(getattr(function, "forward", function))[3:]
            if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)
        ]
        like = lambda: None  # noqa: E731
        like.__signature__ = inspect.Signature([x, memory, *rest])  # type: ignore[attr-defined]
        self.forward_like = like

    def forward(self, x: Tensor, memory: Tensor | None = None, **rest: Any) -> Any:
        memory = x if memory is None else memory
        parts = []
        for layer, rows, heads in (
            (self.query, x, self.num_heads),
            (self.key, memory, self.num_kv_heads),
            (self.value, memory, self.num_kv_heads),
        ):
            part = layer(rows)
            if self.axes != "flat":
                part = part.unflatten(-1, (heads, -1))
                part = part.transpose(1, 2) if self.axes == "heads" else part
            parts.append(part)
        raw = self.function(*parts, **rest)
        if isinstance(raw, Tensor):
            return self._merged(raw)
        if isinstance(raw, tuple | list):
            place = next(
                (
                    n
                    for n, t in enumerate(raw)
                    if isinstance(t, Tensor) and t.shape == parts[0].shape
                ),
                0,
            )
            return tuple(self._merged(t) if n == place else t for n, t in enumerate(raw))
        return raw

    def _merged(self, out: Any) -> Any:
        if not isinstance(out, Tensor) or out.ndim != 4:
            return out
        return (out.transpose(1, 2) if self.axes == "heads" else out).flatten(2)


def is_function_of_qkv(thing: Any) -> bool:
    """Return True for functions, and modules without weights, whose first three arguments are q, k
    and v."""
    if inspect.isclass(thing):
        return False
    if isinstance(thing, nn.Module) and any(True for _ in thing.parameters()):
        return False
    found = signature(getattr(thing, "forward", thing) if isinstance(thing, nn.Module) else thing)
    roles = [calling_role(one.name) for one in found[:3]]
    builtin = (
        not found
        and callable(thing)
        and not inspect.isfunction(thing)
        and not isinstance(thing, nn.Module)
    )
    return set(roles) == {"query", "key", "value"} or builtin


def first_line(error: BaseException) -> str:
    """Return the advice that names the failing line."""
    line = line_of(error)
    return f"If this call is the right one, fix {line}." if line else "Make this call run first."


__all__ = ["FunctionLayer", "PlainCall", "ShownCall", "name_of", "plain_call"]

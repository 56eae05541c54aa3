"""Call what is to be checked, however its `forward` wants to be called.

The parameters of the call are taken by their names (`names.calling_role`): the input once, or as
query, key and value; masks in the form that they are understood in; positions that say nothing;
the attention weights where they come back.
"""

from __future__ import annotations

import inspect
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ...core.masks import Causal, Dense
from .errors import told
from .fills import FILLS, OPTIONAL, SURE, Fill, Place, left_out, no_value
from .layouts import SINGLE, USUAL, Layout, listed
from .names import calling_role
from .on_cpu import OnCPU, wants_gpu
from .signatures import (
    counted_in,
    entry,
    insisted,
    is_left_to_callers,
    signature,
    source_of,
)
from .token_ids import behind

_SHAPED: dict[str, Callable[[Tensor, int], Tensor]] = {
    "[T, S]": lambda allowed, heads: allowed[0],
    "[1, 1, T, S]": lambda allowed, heads: allowed[:1, None],
    "[B, 1, T, S]": lambda allowed, heads: allowed[:, None],
    "[B, T, S]": lambda allowed, heads: allowed,
    "[1, T, S]": lambda allowed, heads: allowed[:1],
    "[B, H, T, S]": lambda allowed, heads: allowed[:, None].expand(-1, heads, -1, -1),
    "[B·H, T, S]": lambda allowed, heads: allowed.repeat_interleave(heads, 0),
    "[B, S]": lambda allowed, heads: allowed[:, 0],
    "[B, 1, 1, S]": lambda allowed, heads: allowed[:, None, :1],
    "[B, 1, S]": lambda allowed, heads: allowed[:, :1],
    "[H·B, T, S]": lambda allowed, heads: allowed.repeat(heads, 1, 1),
    "[T, S, B]": lambda allowed, heads: allowed.permute(1, 2, 0),
    "[T, S, 1]": lambda allowed, heads: allowed[0, ..., None],
    "[B, S - 1]": lambda allowed, heads: allowed[:, 0, 1:],
}
SHAPES = tuple(_SHAPED)[:7]
"""Shapes of masks of queries and keys; the others are for padding, or odd."""
ALL_SHAPES = ("[B, S]", *tuple(_SHAPED)[8:10], *SHAPES, *tuple(_SHAPED)[10:])

KINDS = {
    "may": "True where a query may attend",
    "hidden": "True where a key is hidden",
    "added": "0 where a query may attend and −inf elsewhere, added to the scores",
    "ones": "1 where a query may attend and 0 elsewhere",
    "later": "1 where a key is hidden and 0 elsewhere",
    "headwise": "a mask of headwise",
    "flag": "True for causal attention",
    "lengths": "how many tokens of each sequence are real",
}


NONE, FLAG = r"\b{} is (not )?None", r"\b(if|elif|while|not) {} *(:|and|or|else|\))"
"""How code tests what may be None, and what is yes or no."""
OF_DICTS = re.compile(r"(typing\.)?([Oo]ptional\[)?(typing\.)?([Dd]ict|Mapping)\[")
"""Annotations of what holds several tensors by name: masks of several kinds, or all inputs."""


OWN_QUERIES = re.compile("slot|seed|latent|quer(y|ies)|probes?$|induc|anchor")
"""Names of numbers of queries that a layer makes itself."""


@dataclass(frozen=True)
class MaskForm:
    """How a mask is understood: by which argument, as what, in which shape."""

    argument: str
    kind: str
    shape: str = "[T, S]"

    def make(self, allowed: Tensor, dtype: torch.dtype, heads: int = 1) -> Any:
        """The argument for `allowed`, `[B, T, S]`, True where a query may attend."""
        if self.kind == "flag":
            return True
        if self.kind == "headwise":
            queries, keys = allowed.shape[-2:]
            causal = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
            same = torch.equal(allowed.cpu(), causal.expand(allowed.shape))
            return Causal() if same else Dense(allowed[:, None])
        allowed = _SHAPED[self.shape](allowed, heads)
        if self.kind == "added":
            zeros = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
            return zeros.masked_fill(~allowed, -torch.inf)
        given = ~allowed if self.kind in ("hidden", "later") else allowed
        return (given if self.kind in ("may", "hidden") else given.to(dtype)).contiguous()

    def __str__(self) -> str:
        shape = "" if self.kind in ("flag", "headwise", "lengths") else f", {self.shape}"
        return f"{self.argument} ({KINDS[self.kind]}{shape})"


@dataclass(frozen=True)
class Result:
    """What a call gave: the output, the attention weights if there are any, and everything."""

    out: Tensor
    weights: Tensor | None
    raw: Any


class UnusableResult(Exception):
    """A call went through, but nothing in what it returned can be the output; its first tensor had
    the shape."""

    begins = "it "  # in one line, as in `errors.told`

    def __init__(self, said: str, shape: Sequence[int] = ()) -> None:
        super().__init__(said)
        self.shape = list(shape)


class ShownCallFails(Exception):
    """The call that somebody shows failed outside of what it calls; its words are the error's."""

    begins = ""


@dataclass
class Caller:
    """One way to call a target on x.

    `fills` are how arguments are made that nobody gave, where it is not in the first way of their
    role; `proven` are those of them that numbers have shown to be right; `start` is the position
    of the first token, and `usual` the layout that the target itself says. A `pooled` output is
    one for all tokens, or one for each of the layer's own queries, and stands for that of each. In
    a `turned` call x is the second sequence that the target takes. Heads that come back `behind`
    the tokens went in before them. Arguments of `ids` get those of tokens (`token_ids`).
    """

    target: Callable[..., Any]
    extra: dict[str, Any] = field(default_factory=dict)
    head_dim: int = 1
    heads: int = 1
    layout: Layout = USUAL
    custom: Callable[[Any, Tensor], Any] | None = None
    function: bool = False
    fills: dict[str, Fill] = field(default_factory=dict)
    start: int = 0
    usual: Layout = USUAL
    proven: frozenset[str] = frozenset()
    settled: bool = False
    pooled: bool = False
    turned: bool = False
    behind: bool = False
    ids: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        call = entry(self.target)
        parameters = signature(call)
        self.parameters = {p.name: p for p in parameters}
        self.roles = {name: calling_role(name) or "" for name in self.parameters}
        self.roles |= dict.fromkeys(counted_in(source_of(call)) & {*self.parameters}, "lengths")
        flags = [name for name, p in self.parameters.items() if _is_flag(p)]
        self.roles |= {n: "causal" for n in flags if self.roles[n] in ("mask", "padding")}
        several = [n for n, p in self.parameters.items() if OF_DICTS.match(str(p.annotation))]
        self.roles |= {n: "nothing" for n in several if self.roles[n] in ("mask", "padding")}
        self.insisted = {n for n in insisted(call) if self.roles.get(n) in ("context", "")}
        unset = (n for n in self.named("scale") if self.parameters[n].default is None)
        self.scales = {n for n in unset if n not in self.extra and is_left_to_callers(call, n)}
        self.guessed: list[str] = []
        usual = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        names = [p.name for p in parameters if p.kind in usual]
        self.positional = [name for name in names if name not in self.extra]
        if not self.function:
            self._guess(self.positional[:1])
        self.inputs = self._inputs([name for name in names if self.required(name)])
        one = self.inputs if len(self.inputs) == 1 and not self.function else ()
        self.listed = [role for name in one for role in listed(self.target, name)]
        if len(self.inputs) == 1 and not self.named("value"):  # of (Q, K): values are made of K
            pairs = [n for n in self.named("key") if n not in self.inputs]
            self.roles |= dict.fromkeys(pairs, "context")
        if self.turned:
            first, other = self.pair
            self.inputs, self.roles = [other], {**self.roles, first: "context", other: ""}
            self.guessed.append(first)

    @property
    def pair(self) -> tuple[str, ...]:
        """Its input and the only other sequence that it wants, which may be the other way round: of
        `(query [B, E], keys [B, S, E])` the keys are x. Nothing where there is no such pair."""
        others = [name for name in self.made_up if self.roles[name] == "context"]
        single = len(self.inputs) == len(others) == 1 and self.custom is None
        return (*self.inputs, *others) if single and not self.listed else ()

    def _guess(self, first: list[str]) -> None:
        """Give roles to arguments of unknown names: one that must be given beside x is most likely
        another sequence."""
        code = source_of(type(self.target))
        for name, its in self.parameters.items():
            if self.roles[name] or name in first or name in self.extra or its.kind > 3:
                continue
            told = its.annotation
            if not self.required(name):
                unset = its.default is None and told in (its.empty, "Tensor | None")
                self.roles[name] = "other" * (unset or "Tensor" in str(told))
            elif told in (int, bool, "int", "bool"):
                self.roles[name] = "tokens" if told in (int, "int") else "training"
            elif re.search("None|Optional", str(told)) or re.search(NONE.format(name), code):
                self.roles[name] = "nothing"
            elif re.search(FLAG.format(name), code):
                self.roles[name] = "training"
            elif its.kind != its.VAR_POSITIONAL:
                self.roles[name] = "nothing" if "mask" in name else "context"
                self.guessed.append(name)

    def _inputs(self, required: list[str]) -> list[str]:
        """The parameters that take x: one, or query, key and value."""
        if not self.parameters:
            return []
        names = self.positional[:3]
        if not names:  # all of them by name
            names = [name for name in self.parameters if self.required(name)][:3]
        first = [self.roles[name] for name in names]
        if self.function and (not names or not first[0]):
            return (required or ["q", "k", "v"])[:3]
        if set(first) == {"query", "key", "value"} or set(first[1:]) == {"key", "value"}:
            return sorted(names, key=lambda name: {"key": 1, "value": 2}.get(self.roles[name], 0))
        queries = [name for name in required if self.roles[name] == "query"]
        return queries if len(queries) == 1 and "context" in first else names[:1]

    @property
    def tables(self) -> dict[str, Fill]:
        """The rotary tables that are handed in, by the argument's name."""
        names = [n for n, role in self.roles.items() if role in OPTIONAL and n not in self.extra]
        found = {name: self.fill(name) for name in names}
        return {name: fill for name, fill in found.items() if fill not in (left_out, no_value)}

    def fill(self, name: str) -> Fill:
        """How an argument is made that nobody gave: every such value comes from here, so that
        `guesses` knows of it. `left_out` where the call does without."""
        role = self.roles[name]
        if name in self.fills:
            return self.fills[name]
        if not self.required(name) and role not in OPTIONAL and name not in self.scales:
            return left_out
        options = FILLS[role](self.target, self.head_dim) if role in FILLS else iter(())
        return next(options, no_value if self.required(name) else left_out)

    @property
    def guesses(self) -> list[str]:
        """The arguments whose values are guesses of ours."""

        def sure(name: str) -> bool:
            usual = self.required(name) or name in self.scales
            plain = usual and name not in self.fills and name not in self.guessed
            return name in self.proven or (plain and self.roles[name] in SURE)

        asked = [n for n in self.parameters if n not in {*self.inputs, *self.extra}]
        return [n for n in asked if self.fill(n) is not left_out and not sure(n)]

    def shifted(self, positions: int = 5) -> Caller:
        """The same call with tables of later positions; a cache of its own still starts at 0."""
        starts = dict.fromkeys(self.named("start"), 0)
        return replace(self, start=positions, extra={**starts, **self.extra})

    def pools(self, shape: Sequence[int], lead: Sequence[int]) -> bool:
        """Whether a result has one output for all tokens of each sequence, `[B, E]` or `[B, 1, E]`,
        or one for each of the layer's own queries, `[B, K, E]`."""
        rows = {1, *_learnt_queries(self.target)}
        single = len(shape) == 2 or (len(shape) == 3 and shape[1] in rows)
        return single and shape[0] == lead[0] and tuple(shape) != tuple(lead)

    def named(self, role: str) -> list[str]:
        """The parameters of one role, in order."""
        return [name for name, its in self.roles.items() if its == role]

    def required(self, name: str) -> bool:
        """Whether a call must give it."""
        parameter = self.parameters[name]
        rest = (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        wanted = parameter.default is parameter.empty or name in self.insisted
        return wanted and parameter.kind not in rest

    def takes_values(self, name: str) -> bool:
        """Whether a mask of headwise goes there."""
        return "Mask" in str(self.parameters[name].annotation)

    @property
    def separate(self) -> bool:
        """Whether queries, keys and values are given apart."""
        return len(self.inputs) == 3

    @property
    def streams(self) -> bool:
        """Whether the call was given another sequence that nobody asked for, or packed ones."""
        given = [n for n in self.named("context") if self.required(n) or n in self.fills]
        return bool(given or self.named("packed")) and not self.separate

    @property
    def made_up(self) -> list[str]:
        """What a call must hold beside x, or queries, keys and values under such names."""
        known = {*self.inputs, *self.extra}
        return [n for n in self.parameters if n not in known and self.required(n)]

    def missing(self) -> list[str]:
        """Required parameters that nothing is known about."""
        return [name for name in self.made_up if self.roles[name] not in FILLS]

    def __call__(self, x: Tensor, source: Tensor | None = None, /, **keywords: Any) -> Result:
        """The result on x `[B, T, E]`; keys and values from `source` `[B, S, E]` if it is given.

        `keywords` are further arguments of the call, masks among them.
        """
        memory, cross = (x, False) if source is None else (source, True)
        if self.custom is not None:
            return self.read(self._shown(self.custom, x), x, x)
        if self.layout is SINGLE:
            pairs = zip(x, memory, strict=True)
            return stacked(
                self.read(self.feed((row, rest, rest), cross, **keywords), row, rest)
                for row, rest in pairs
            )
        into = self.layout.into
        feeds = into(x), into(memory), into(memory)
        place = Place(x, memory, self.start, feeds[1])
        return self.read(self.feed(feeds, cross, place, **keywords), x, memory)

    def feed(
        self,
        feeds: tuple[Tensor, Tensor, Tensor],
        cross: bool,
        place: Place | None = None,
        /,
        **keywords: Any,
    ) -> Any:
        """What the target returns for these inputs of queries, keys and values, as it is.

        With `cross`, keys and values are given even where the call could do without.
        """
        values = {**self.extra, **keywords}
        if self.separate:
            for number, (name, tensor) in enumerate(zip(self.inputs, feeds, strict=True)):
                if cross or number == 0 or self.required(name):
                    values[name] = tensor
        elif self.listed:
            parts: dict[str, Tensor] = dict(zip(("query", "key", "value"), feeds, strict=True))
            values[self.inputs[0]] = [parts[role] for role in self.listed]
        elif self.inputs:
            values[self.inputs[0]] = feeds[0]
        place = place or Place(feeds[0], feeds[1], self.start)
        for name in self.roles:
            if name not in values and (fill := self.fill(name)) is not left_out:
                values[name] = fill(place)
        if cross and not self.separate:
            values |= dict.fromkeys(self.named("context")[:1], feeds[1])
        if not self.ids:
            return self._called(values, feeds)
        named = [name for name in values if name in self.ids]
        with behind(self.target, [values[name] for name in named]) as ids:
            return self._called(values | dict(zip(named, ids, strict=True)), feeds)

    def _called(self, values: dict[str, Any], feeds: tuple[Tensor, Tensor, Tensor]) -> Any:
        """What the target returns for arguments by name."""
        if not self.inputs:  # nothing is known of the signature
            return self.target(*(feeds if self.function else feeds[:1]), **values)
        args: list[Any] = []
        for name in self.positional:
            if name not in self.inputs or name not in values:
                break
            args.append(values.pop(name))
        try:
            return self.target(*args, **values)
        except (Exception, KeyboardInterrupt, SystemExit) as error:
            if wants_gpu(error):
                with OnCPU():
                    return self.target(*args, **values)
            if torch.is_grad_enabled() or "register a hook" not in str(error):
                raise
        except BaseException as error:  # transformers' word for a package that is not there
            raise ImportError(type(error).__name__) from error
        with torch.enable_grad():  # it keeps gradients for itself
            return self.target(*args, **values)

    def _shown(self, call: Callable[[Any, Tensor], Any], x: Tensor) -> Any:
        """What the call gives that somebody shows.

        Raises:
            ShownCallFails: it fails outside of the target.
        """
        with behind(self.target, [x]) if self.ids else nullcontext([x]) as (given,):
            try:
                return call(self.target, given)
            except Exception as error:
                if wants_gpu(error):
                    with OnCPU():
                        return call(self.target, given)
                if _reached(self.target, error):
                    raise
                raise ShownCallFails(told(error)) from error

    def read(self, raw: Any, x: Tensor, source: Tensor) -> Result:
        """The output and the weights among what was returned for x `[…, T, E]`."""
        lead, square = tuple(x.shape[:-1]), (x.shape[-2], source.shape[-2])
        turned = len(self.layout.axes) if x.ndim == 3 else 0
        found = [t for t in tensors_in(raw) if t.is_floating_point()]
        if not found:
            none = "None (is a `return` missing?)"
            said = none if raw is None else f"a {type(raw).__name__} without a tensor"
            raise UnusableResult(f"returns {said}")
        if x.ndim == 4 and x.shape[1] != x.shape[2]:  # else it cannot be seen
            self.behind = found[0].shape[:3] == (x.shape[0], x.shape[2], x.shape[1])
        behind = self.behind
        tensors = [
            (t, self.layout.back(t) if t.ndim == turned else _apart(t, x, behind)) for t in found
        ]
        fits = [(t, y) for t, y in tensors if y.ndim == x.ndim and tuple(y.shape[:-1]) == lead]
        if self.pooled and x.ndim == 3:
            alone = [t for t in found if self.pools(t.shape, lead)]
            fits = [(t, t.reshape(len(t), 1, -1).expand(*lead, -1)) for t in alone] or fits
        if not fits:
            shape = list(found[0].shape)
            raise UnusableResult(f"returns a tensor of shape {shape}", shape)
        others = [pair for pair in fits if tuple(pair[1].shape[-2:]) != square]  # no weights
        own, out = (others or fits)[0]
        weights = (t for t in found if t is not own and tuple(t.shape[-2:]) == square)
        return Result(out, next(weights, None), raw)


def _apart(out: Tensor, q: Tensor, turned: bool) -> Tensor:
    """`[B, H, T, D]` of what a function of such a q gives where it merges the heads, `[B, T, H·D]`,
    or puts them behind the tokens; anything else as it is."""
    if turned and out.ndim == q.ndim == 4:
        return out.transpose(1, 2)
    merged = out.ndim == 3 and q.ndim == 4 and out.shape[:2] == (q.shape[0], q.shape[2])
    if not merged or out.shape[2] % q.shape[1]:
        return out
    return out.unflatten(-1, (q.shape[1], -1)).transpose(1, 2)


def _reached(target: Any, error: BaseException) -> bool:
    """Whether an error came in the target or a layer of it."""
    code = getattr(target, "__code__", None)
    for frame, _ in traceback.walk_tb(error.__traceback__):
        own = isinstance(frame.f_locals.get("self"), nn.Module)
        if frame.f_code is code or (own and not frame.f_code.co_name.endswith("_call_impl")):
            return True
    return False


def _learnt_queries(target: Any) -> set[int]:
    """How many queries of its own a layer may have: the rows of an embedding, or of a parameter
    `[K, E]` or `[1, K, E]` of no other layer, or a number of them that it holds."""
    parts = [*target.modules()] if isinstance(target, nn.Module) else []
    own = [p for p in parts if isinstance(p, nn.Embedding) or "torch." not in type(p).__module__]
    tables = [table for one in own for table in one.parameters(recurse=False) if table.ndim > 1]
    rows = {table.shape[-2] for table in tables if table.shape[:-2] in ((), (1,))}
    held = vars(target).items() if isinstance(target, nn.Module) else ()
    return rows | {value for name, value in held if OWN_QUERIES.search(name) and type(value) is int}


def _is_flag(parameter: inspect.Parameter) -> bool:
    """Whether it takes yes or no."""
    return isinstance(parameter.default, bool) or parameter.annotation in (bool, "bool")


def stacked(results: Iterator[Result]) -> Result:
    """The results of single sequences as those of a batch."""
    rows = list(results)
    weights = [row.weights for row in rows if row.weights is not None]
    every = torch.stack(weights) if len(weights) == len(rows) else None
    return Result(torch.stack([row.out for row in rows]), every, [row.raw for row in rows])


def tensors_in(raw: Any) -> Iterator[Tensor]:
    """The tensors of a result, first come first."""
    parts: Any = ()
    if isinstance(raw, Tensor):
        yield raw
    elif isinstance(raw, Mapping):
        parts = raw.values()
    elif isinstance(raw, (tuple, list)):
        parts = raw
    elif hasattr(raw, "__dataclass_fields__"):
        parts = [getattr(raw, name) for name in raw.__dataclass_fields__]
    for part in parts:
        yield from tensors_in(part)


def tensors_of(module: nn.Module) -> Iterator[Tensor]:
    """The tensors that a module and those within it hold: parameters, buffers and attributes."""
    return tensors_in([vars(one) for one in module.modules()])

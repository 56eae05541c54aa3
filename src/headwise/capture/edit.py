"""`edit(model, edits)`: change outputs, queries, keys, values or masks of heads temporarily."""

from __future__ import annotations

import reprlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ..attend import attend
from ..core.mask_algebra import Mask
from ..core.masks import as_mask
from ..core.numbers import real, whole_numbers
from ..core.shapes import Extent, extent_of
from .call import AttentionCall
from .catch import catch
from .head_address import HeadAddress, Layer, as_written, is_head, is_layer, parse_head, parse_layer
from .modules import attending, check_model

At = Literal["output", "query", "key", "value"]
"""The part of a head that is edited; queries and keys are edited after rotation."""

Positions = int | Sequence[int] | Tensor | None
"""Positions along a tensor's token axis; negative ones count from the end; `None` for all."""


@dataclass(frozen=True)
class EditedCall:
    """The heads that an edit changes in a call: their indices, and the index of the call."""

    call: AttentionCall
    heads: tuple[int, ...]
    number: int = 1

    @property
    def index(self) -> Tensor:
        """The indices of the heads as a tensor."""
        return torch.tensor(self.heads, device=self.call.q.device)


@dataclass(frozen=True, eq=False, kw_only=True)
class Edit(ABC):
    """A change of a head's output, queries, keys or values; subclasses define `change()`.

    Args:
        at: the tensor to change: `"output"` (before the output projection), `"query"`, `"key"` or
            `"value"`.
        positions: change only these positions. Default: all.
    """

    at: At = "output"
    positions: Positions = None

    def __post_init__(self) -> None:
        if self.at not in get_args(At):
            raise ValueError(f"{self!r:.80}: at must be one of {', '.join(get_args(At))}.")

    @abstractmethod
    def change(self, x: Float[Tensor, "B h N D"], place: EditedCall) -> Tensor:
        """Return the heads' tensor after the edit, or a tensor that broadcasts to it."""

    def __call__(self, x: Float[Tensor, "B h N D"], place: EditedCall) -> Float[Tensor, "B h N D"]:
        """Apply the edit at its positions; other positions stay bit-identical."""
        new = self.change(x, place)
        try:
            new = new.to(x).expand(x.shape)
        except RuntimeError:
            raise ValueError(
                f"edit(…): {type(self).__name__} gives {list(new.shape)} for the {self.at} of "
                f"{len(place.heads)} heads of {place.call.name!r}, which is {list(x.shape)}."
            ) from None
        if self.positions is None:
            return new
        here = chosen_positions(self.positions, x.shape[2], f"edit(…): {place.call.name!r}")
        return torch.where(here.to(x.device)[:, None], new, x)


@dataclass(frozen=True, eq=False)
class Scale(Edit):
    """Multiply a head by a number.

    >>> Scale(0.5)
    Scale(at='output', positions=None, factor=0.5)
    """

    factor: float

    def change(self, x: Tensor, place: EditedCall) -> Tensor:
        if real(self.factor) is None:
            raise ValueError(
                f"edit(…): Scale({self.factor!r:.60}) takes a number; a tensor with a gradient is "
                f"a Gate."
            )
        return x * self.factor


@dataclass(frozen=True, eq=False)
class Gate(Edit):
    """Multiply heads by a tensor, which gets gradients: `[]`, or `[H]` for all heads of a layer.

    >>> Gate(torch.ones((), requires_grad=True)).at
    'output'
    """

    parameter: Tensor

    def change(self, x: Tensor, place: EditedCall) -> Tensor:
        gate = self.parameter
        if gate.dim() == 1 and len(gate) == place.call.all_heads:
            gate = gate[place.index.to(gate.device) + place.call.first_head, None, None]
        return x * gate.to(x.device)


@dataclass(frozen=True, eq=False)
class Shift(Edit):
    """Add a vector `[D]` to a head, or a tensor that broadcasts to `[B, T, D]`.

    >>> Shift(torch.zeros(8), at="query").at
    'query'
    """

    vector: Tensor

    def change(self, x: Tensor, place: EditedCall) -> Tensor:
        return x + _of_each(self.vector).to(x)


@dataclass(frozen=True, eq=False)
class Replace(Edit):
    """Replace a head's tensor by a source; no gradient flows through the original.

    Args:
        source: a number, a vector `[D]`, a tensor that broadcasts to `[B, T, D]`, or a mapping
            from addresses of heads to such tensors, such as the result of `head_outputs()`.

    >>> Replace(0.0).source
    0.0
    """

    source: Any

    def change(self, x: Tensor, place: EditedCall) -> Tensor:
        if isinstance(self.source, Tensor):
            return _of_each(self.source)
        if real(self.source) is not None:
            return torch.full_like(x, self.source)
        name, first = place.call.name, place.call.first_head
        try:
            return torch.stack([self.source[name, first + head] for head in place.heads], 1)
        except (KeyError, TypeError, IndexError) as error:
            raise ValueError(
                f"edit(…): Replace({type(self.source).__name__}) has nothing for a head of "
                f"{name!r} ({error}); give a tensor, a number, or hw.head_outputs(…)."
            ) from None


def _of_each(x: Tensor) -> Tensor:
    """Add an axis of heads to `[B, T, D]`; return `[D]` and `[T, D]` unchanged."""
    return x if x.dim() < 3 else x.unsqueeze(-3)


@dataclass(frozen=True, eq=False)
class Knockout:
    """Mask pairs of queries and keys exactly.

    The softmax renormalizes the weights of the remaining keys; a query without a remaining key
    gives 0.

    Args:
        queries, keys: positions; all pairs of them are masked.

    >>> Knockout(queries=-1, keys=[0, 3]).keys
    [0, 3]

    Source: Geva et al. 2023, "Dissecting Recall of Factual Associations", §5.
    """

    queries: Positions = None
    keys: Positions = None


Edits = Edit | Knockout | Sequence[Edit | Knockout]


@contextmanager
def edit(model: nn.Module, edits: Mapping[HeadAddress | Layer, Edits]) -> Iterator[None]:
    """Edit heads of a model in a `with` block; other heads' outputs stay bit-identical.

    Edits of outputs change the input of the output projection. For edits of queries, keys and
    values, and for knockouts, the edited heads are recomputed without dropout; keys and values that
    heads share are changed only for the edited head. All edits are differentiable.

    Args:
        model: any model that `watch()` supports.
        edits: edits by address: a head such as `"L2H9"`, `(2, 9)` or `"transformer.h.2.attn:9"`, or
            a layer for all its heads, such as `"L2"` or a pattern of module names. Several edits of
            a head are applied in order, those of queries, keys and values first.

    Raises:
        ValueError: an invalid address; a module or head that does not exist (for heads, when the
            module is called); a source that does not fit; queries, keys or values that are not
            visible; on exit, a module that did not attend.

    >>> import headwise as hw
    >>> from headwise.capture import Gate, Scale
    >>> layer, x = hw.MultiHeadAttention(24, num_heads=3), torch.randn(2, 7, 24)
    >>> gate = torch.ones((), requires_grad=True)
    >>> with hw.edit(layer, {"L0H0": Scale(0.5), "L0H2": Gate(gate)}):
    ...     layer(x).sum().backward()
    >>> gate.grad.shape
    torch.Size([])
    """
    check_model("edit", model)
    quoted = f"edit({type(model).__name__}, {reprlib.repr(dict(edits))})"
    plan: list[tuple[Layer, int | None, tuple[Any, ...]]] = []
    for address, given in edits.items():
        each = tuple(given) if isinstance(given, Sequence) else (given,)
        if wrong := [one for one in each if not isinstance(one, Edit | Knockout)]:
            raise ValueError(
                f"{quoted}: {wrong[0]!r:.60} is not an edit; give Scale, Shift, Gate, Replace or "
                f"Knockout of headwise.capture."
            )
        try:
            single = isinstance(address, tuple | list) or is_head(str(address))
            layer, head = parse_head(address) if single else (parse_layer(address), None)
        except ValueError as error:
            raise ValueError(f"{quoted}: {error}.") from None
        plan.append((layer, head, each))
    with edited(model, plan, quoted, "edit"):
        yield


@contextmanager
def edited(
    model: nn.Module,
    plan: Sequence[tuple[Layer, int | None, tuple[Any, ...]]],
    quoted: str,
    function: str,
) -> Iterator[None]:
    """Apply edits in a `with` block, each to a layer and to a head, or to all heads if it is None.

    Raises:
        ValueError: as for `edit()`.
    """
    check_names(model, [layer for layer, _, _ in plan], quoted)
    past = "ablated" if function == "ablate" else "edited"
    calls: Counter[str] = Counter()
    attended: dict[str, int] = {}  # the numbers of the layers

    def listen(call: AttentionCall) -> Tensor | None:
        name, layer = call.name, call.layer
        calls[name] += not call.again
        call.on_complete(lambda _: attended.update({name: layer}))
        own = [(head, each) for one, head, each in plan if is_layer(one, name, layer)]
        lacking = sorted({head for head, _ in own if head is not None and head >= call.all_heads})
        if lacking:
            raise ValueError(
                f"{quoted}: {name!r} has the heads 0 to {call.all_heads - 1}, and no "
                f"{', '.join(map(str, lacking))}."
            )
        by_head: dict[int, tuple[Any, ...]] = {}
        for here in range(call.heads):
            number = call.first_head + here
            each = tuple(e for head, edits in own if head in (None, number) for e in edits)
            if each:
                by_head[here] = each
        return _changed(call, by_head, calls[name]) if by_head else None

    with catch(model, listen, function=function) as net:
        yield
    layers = [layer for layer, _, _ in plan]
    for name, reason in net.names.left_out.items():
        if any(is_layer(one, name, None) for one in layers):
            raise ValueError(f"{quoted}: {name!r} was not {past} as a whole: {reason}.")
    moved = [name for name, layer in attended.items() if net.numbers[name] != layer]
    if moved and any(isinstance(one, int) for one in layers):
        raise ValueError(
            f"{quoted}: {moved[0]!r} is layer {net.numbers[moved[0]]}, which was not known while "
            f"it ran; give the names of modules."
        )
    idle = [one for one in layers if not any(is_layer(one, *layer) for layer in attended.items())]
    if idle:
        others = ", ".join(map(repr, attended)) or f"none, for {net.names.why_nothing()}"
        names = ", ".join(f"layer {one}" if isinstance(one, int) else repr(one) for one in idle)
        raise ValueError(
            f"{quoted}: nothing was {past} in {names}, which did not attend; those that did: "
            f"{others}."
        )


def _changed(call: AttentionCall, by_head: dict[int, tuple[Any, ...]], number: int) -> Tensor:
    """Return the outputs of all heads, `[B, H, T, Dv]`."""
    out = call.out
    inner = [head for head, each in by_head.items() if any(map(_is_inner, each))]
    if inner:
        place = EditedCall(call, tuple(inner), number)
        out = out.index_copy(1, place.index, _recomputed(place, by_head).to(out))
    alike: dict[tuple[Any, ...], list[int]] = {}
    for head, each in by_head.items():
        if outer := tuple(one for one in each if not _is_inner(one)):
            alike.setdefault(outer, []).append(head)
    for each, heads in alike.items():
        place = EditedCall(call, tuple(heads), number)
        x = out.index_select(1, place.index)
        for one in each:
            x = one(x, place)
        out = out.index_copy(1, place.index, x)
    return out


def _is_inner(one: Edit | Knockout) -> bool:
    """Return True for edits that change the computation of a head's output."""
    return isinstance(one, Knockout) or one.at != "output"


def _recomputed(place: EditedCall, by_head: Mapping[int, tuple[Any, ...]]) -> Tensor:
    """Return the outputs of some heads from their edited parts, `[B, h, T, Dv]`."""
    call, index = place.call, place.index
    kinds = {one.at for head in place.heads for one in by_head[head] if isinstance(one, Edit)}
    if call.hidden and kinds & {"query", "key"}:
        raise ValueError(f"edit(…): {call.name!r}: {call.hidden}; edit values or outputs.")
    groups = index // (call.heads // call.k.shape[1])
    parts = {"query": call.q[:, index], "key": call.k[:, groups]}
    parts["value"] = call.all_values[:, groups].to(call.q.dtype)
    for at, x in parts.items():
        heads = []
        for n, head in enumerate(place.heads):
            one_head = x[:, n : n + 1]
            for one in by_head[head]:
                if isinstance(one, Edit) and one.at == at:
                    one_head = one(one_head, EditedCall(call, (head,), place.number))
            heads.append(one_head)
        parts[at] = torch.cat(heads, 1)
    q, k, v = parts.values()
    options = {x: y for x, y in call.keywords.items() if x not in ("dropout", "backend")}
    if call.behind:
        options["first_query"] = call.keys - call.behind - call.queries
    if options.get("sinks") is not None:
        options["sinks"] = options["sinks"][index]
    whole = extent_of(call.q, call.k, call.v, "edit", options.get("first_query"))
    mask = as_mask(options.pop("mask", None))
    if mask.biased or any(x.dim() > 2 for x in mask.tensors()):
        mask = _OfHeads(mask, index, whole)
    for n, head in enumerate(place.heads):
        for one in by_head[head]:
            if isinstance(one, Knockout):
                pairs = [
                    chosen_positions(some, size, f"edit(…): {call.name!r}").to(q.device)
                    for some, size in ((one.queries, call.queries), (one.keys, call.keys))
                ]
                mask = mask & _Without(n, *pairs)
    return attend(q, k, v, mask=mask, **options)


def chosen_positions(positions: Positions, size: int, quoted: str) -> Tensor:
    """Return the selected positions as booleans `[size]`; all for `None`.

    Raises:
        ValueError: a position is out of range or not an integer.
    """
    if positions is None:
        return torch.ones(size, dtype=torch.bool)
    listed = whole_numbers([positions] if isinstance(positions, int) else positions)
    if listed is None or not all(-size <= one < size for one in listed):
        raise ValueError(
            f"{quoted}: positions {positions!r:.60} must be whole numbers from 0 to {size - 1}, or "
            f"from -1 to {-size}."
        )
    here = torch.zeros(size, dtype=torch.bool)
    here[torch.tensor(listed, dtype=torch.long)] = True
    return here


@dataclass(frozen=True, eq=False, repr=False)
class _OfHeads(Mask):
    """The mask of some heads of a larger call."""

    mask: Mask
    heads: Tensor
    whole: Extent

    def allowed(self, i: Tensor, j: Tensor, extent: Extent) -> Tensor | None:
        return self._of(self.mask.allowed(i, j, self.whole))

    def bias(self, i: Tensor, j: Tensor, extent: Extent) -> Tensor | None:
        return self._of(self.mask.bias(i, j, self.whole))

    def _of(self, table: Tensor | None) -> Tensor | None:
        if table is None or table.dim() < 3 or table.shape[-3] == 1:
            return table
        return table.index_select(-3, self.heads)

    def tensors(self) -> tuple[Tensor, ...]:
        return self.mask.tensors()

    @property
    def biased(self) -> bool:
        return self.mask.biased


@dataclass(frozen=True, eq=False, repr=False)
class _Without(Mask):
    """A mask that hides the pairs of some queries and keys of one head."""

    head: int
    queries: Tensor
    keys: Tensor

    def allowed(self, i: Tensor, j: Tensor, extent: Extent) -> Tensor:
        of_head = torch.arange(extent.heads, device=i.device)[:, None, None] == self.head
        return ~(of_head & self.queries[i] & self.keys[j])


def check_names(model: nn.Module, layers: Iterable[Layer], quoted: str) -> None:
    """Raise ValueError for names and patterns that match no module of the model."""
    names = [as_written(name) for name, _ in model.named_modules()]
    patterns = [one for one in layers if isinstance(one, str)]
    unknown = [one for one in patterns if not any(fnmatchcase(name, one) for name in names)]
    if unknown:
        near = get_close_matches(unknown[0], attending(model), n=6, cutoff=0.0)
        nearest = f"of those that attend, the nearest are: {', '.join(map(repr, near))}"
        if not near:
            near = get_close_matches(unknown[0], [*filter(None, names)], n=6, cutoff=0.0)
            nearest = (
                f"the nearest names are: {', '.join(map(repr, near)) or 'none'}; "
                f"hw.watch(model) lists those that attend"
            )
        raise ValueError(
            f"{quoted}: the model has no module {', '.join(map(repr, unknown))}; {nearest}."
        )

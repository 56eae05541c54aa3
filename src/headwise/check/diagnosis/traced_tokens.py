"""Follow single tokens into the heads and out of them: where the weights cannot be read, it still
shows whether heads were split or merged by a reshape alone, which mixes tokens and features."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..findings.rules import found
from ..findings.verdict import Finding
from ..target.checked_target import Target
from ..target.introspect import is_pointwise
from .call_lines import FUSED, PLAIN_FUNCTIONS, bare_name, lines_of

NORMS = {"layer_norm", "group_norm", "batch_norm", "instance_norm", "rms_norm"}
"""What lets every token change when one does, and is left out of a trace."""
PRODUCTS = {"matmul", "bmm", "einsum"}
ALONE = PLAIN_FUNCTIONS | {"conv1d", "conv2d", "conv3d", "normalize", "clamp", "exp"}
"""Functions that bring no tokens together but in a product of two tensors."""
FEATURES = 5
"""How many features of a token are followed by themselves."""


@dataclass(frozen=True)
class Product:
    """A product of two tensors, with a letter for each axis, as `einsum` has them."""

    sides: tuple[Tensor, Tensor]
    letters: tuple[str, str, str]

    def rows(self, side: int, features: set[str]) -> Tensor | None:
        """A factor with its features last, where they are one axis."""
        if len(features) != 1:
            return None
        axis = self.letters[side].index(min(features))
        return self.sides[side].detach().movedim(axis, -1).clone()


def _product(name: str, args: Any) -> Product | None:
    """What a call multiplies; None where a factor is a weight."""
    equation = args[0].replace(" ", "") if name == "einsum" and isinstance(args[0], str) else ""
    pair = args[1:] if equation else args
    pair = pair[0] if len(pair) == 1 and isinstance(pair[0], list | tuple) else pair
    plain = [one for one in pair if isinstance(one, Tensor) and not isinstance(one, nn.Parameter)]
    if len(plain) != 2 or len(pair) != 2 or plain[0].ndim < 3:
        return None
    left, right = plain
    lead = "abcdef"[: left.ndim - 2]
    sides, _, out = (equation or f"{lead}ik,{lead}kj->{lead}ij").partition("->")
    one, _, two = sides.partition(",")
    fits = (len(one), len(two)) == (left.ndim, right.ndim) and out and "." not in sides
    return Product((left, right), (one, two, out)) if fits else None


class TracedHeads(TorchFunctionMode):
    """Records what the first attention of a call multiplies, and may change what its heads give.

    Attributes:
        rows: of q, k, v and the heads' output, the numbers with their features last.
        called: the names of PyTorch's functions that were called.
        change: of the heads' output, with its features last.
    """

    def __init__(self, change: Callable[[Tensor], Tensor] = lambda out: out) -> None:
        super().__init__()
        self.change, self.rows = change, dict[str, Tensor | None]()
        self.called = set[str]()
        self._scores: Product | None = None
        self._weights: torch.Size | None = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name, kwargs = bare_name(func), dict(kwargs or {})
        self.called.add(name)
        if name in NORMS:
            return args[0] if args else kwargs["input"]
        result = func(*args, **kwargs)
        if "out" in self.rows:
            return result
        product = _product(name, args) if name in PRODUCTS else None
        if name == FUSED and len(args) >= 3:
            self.rows |= {role: one.detach() for role, one in zip("qkv", args, strict=False)}
            return self._given(result, -1)
        if name == "softmax" and self._scores is not None:
            one, two, out = map(set, self._scores.letters)
            self.rows |= {
                role: self._scores.rows(n, one & two - out) for n, role in enumerate("qk")
            }
            self._weights = result.shape[-2:]
        elif product is not None and self._weights is None:
            self._scores = product
        elif product is not None:
            weighs = [side.shape[-2:] == self._weights for side in product.sides]
            one, two, out = map(set, product.letters)
            features = out & (two - one if weighs[0] else one - two)
            if weighs[0] != weighs[1] and len(features) == 1:
                self.rows["v"] = product.rows(weighs.index(False), features)
                return self._given(result, product.letters[2].index(min(features)))
        return result

    def _given(self, out: Tensor, axis: int) -> Tensor:
        self.rows["out"] = out.detach().movedim(axis, -1)
        return self.change(out.movedim(axis, -1)).movedim(-1, axis)


class Followed:
    """A call on x, and what of it changes with a token of the input or of a head's output.

    Attributes:
        rows: `[B, H, T, D]` of q, k, v and the heads' output, in which heads and sequences may have
            been one axis, `[B · H, T, D]`; None where they have others.
        called: the names of PyTorch's functions that were called.
    """

    def __init__(self, subject: Target, x: Tensor) -> None:
        self.subject, self.x = subject, x
        heads = TracedHeads()
        self.out, self.rows = self._call(x, heads)
        self.called = heads.called

    def _call(self, x: Tensor, heads: TracedHeads) -> tuple[Tensor, dict[str, Tensor | None]]:
        with heads:
            out = self.subject(x)
        return out, {role: _headed(rows, x) for role, rows in heads.rows.items()}

    @property
    def is_apart(self) -> bool:
        """Whether nothing but the attention itself may bring tokens together: each weight works on
        one at a time, and no function that was called is one of neighbours."""
        module, tokens = self.subject.module, self.x.shape[1]
        parts = () if module is None else [*module.modules()]
        widths = {getattr(one, "in_features", 0) for one in parts if isinstance(one, nn.Linear)}
        shifts = {"cat", "getitem"} <= self.called
        weights = tokens not in widths and (module is None or is_pointwise(module))
        return weights and not shifts and self.called <= ALONE

    def changed(self, role: str, token: int, feature: int | slice = slice(None)) -> Tensor:
        """`[H, T, D]`: which numbers of the first sequence change with a token of it."""
        x = self.x.clone()
        x[0, token, feature] += 1.0
        before, after = self.rows[role], self._call(x, TracedHeads())[1][role]
        assert before is not None
        assert after is not None
        return _differs(before, after)[0]

    def lands(self, place: tuple[int, ...]) -> list[int]:
        """The tokens whose outputs change with some of what the heads give, `[B, H, T, D]`."""

        def moved(out: Tensor) -> Tensor:
            nudge = torch.zeros_like(out)
            nudge.reshape(len(self.x), -1, *out.shape[-2:])[place] = 1.0
            return out + nudge

        out, _ = self._call(self.x, TracedHeads(moved))
        return _differs(self.out, out)[0].any(-1).nonzero().flatten().tolist()


def traced_tokens(subject: Target) -> list[Finding]:
    """Heads that a reshape alone splits or merges, tokens and features that one confuses, and
    features that are normalised over the tokens or the heads."""
    trial = subject.randomised()
    x = trial.input()
    if min(x.shape[1:]) < 3:  # of one token or two, anything fits
        return []
    with contextlib.suppress(Exception), torch.no_grad():  # the probes say what a call raises
        call = Followed(trial, x)
        for role in "qkv":
            rows = call.rows.get(role)
            if rows is None or rows.shape[1] == x.shape[1]:
                continue
            if _is_split_by_view(call, role):
                return [found("head-split", "traced", line=lines_of(trial, x, "head-split"))]
            if _is_scrambled(call, role):
                return [found("definition", "scrambled", line=lines_of(trial, x, "head-split"))]
            if role != "v" and (over := _normalised_over(rows)):
                line = lines_of(trial, x, "definition")
                return [found("definition", "normalised", over=over, line=line)]
        for way, is_so in (("traced", _is_merged_by_view), ("astray", _is_merged_astray)):
            if is_so(call):
                return [found("head-merge", way, line=lines_of(trial, x, "head-merge"))]
    return []


def _headed(rows: Tensor | None, x: Tensor) -> Tensor | None:
    if rows is None or rows.ndim not in (3, 4) or rows.shape[-2] != x.shape[1]:
        return None
    return rows.reshape(len(x), -1, *rows.shape[-2:]) if len(rows) % len(x) == 0 else None


def _normalised_over(rows: Tensor) -> str:
    """The axis of `[…, H, T, D]` along which vectors have one length, where features have not."""
    axes = {"tokens": -2, "heads": -3} if rows.ndim > 3 else {"tokens": -2}
    even = (name for name, axis in axes.items() if _is_even(rows, axis))
    same = torch.equal(rows, rows[..., :1, :].expand_as(rows))  # made of no token, ones perhaps
    return "" if same or _is_even(rows, -1) else next(even, "")


def _is_even(rows: Tensor, axis: int) -> bool:
    """Whether all vectors along an axis have one length."""
    lengths = rows.double().norm(dim=axis)
    return rows.shape[axis] > 1 and bool((lengths - lengths.mean()).abs().max() < 1e-4)


def _differs(one: Tensor, other: Tensor) -> Tensor:
    """Which numbers differ, but for rounding."""
    return (one - other).abs() > 1e-5 * one.abs().max()


def _sampled(width: int, *among: int) -> list[tuple[int, int]]:
    """Some tokens with some of their features each."""
    features = range(0, width, max(1, width // FEATURES))
    return [(token, feature) for token in among for feature in features]


def _is_split_by_view(call: Followed, role: str) -> bool:
    """Whether a token lies in as many neighbouring rows of `[H, T]` as there are heads."""
    for token in range(call.x.shape[1]):
        rows = call.changed(role, token).any(-1)
        heads, flat = rows.shape[0], rows.flatten().nonzero().flatten().tolist()
        if heads == 1 or flat != [*range(token * heads, (token + 1) * heads)]:
            return False
    return True


def _is_scrambled(call: Followed, role: str) -> bool:
    """Whether the features of one token lie in several rows: where `[E, T]` is read on as `[T, E]`,
    or the other way."""
    tokens, width = call.x.shape[1:]
    seen = dict[tuple[int, int], list[int]]()
    for token, feature in _sampled(width, 0, tokens // 2):
        rows = call.changed(role, token, feature).any(-1).any(0)
        seen[token, feature] = rows.nonzero().flatten().tolist()
    if all(rows == [token] for (token, _), rows in seen.items()):
        return False
    read_on = {(token, n): [(n * tokens + token) // width] for token, n in seen}
    read_back = {(token, n): [(token * width + n) % tokens] for token, n in seen}
    if seen in (read_on, read_back) or _is_read_on(call, role):
        return True
    astray = [rows != [token] for (token, _), rows in seen.items()]
    return call.is_apart and all(astray)


def _is_read_on(call: Followed, role: str) -> bool:
    """The same behind a projection, for all heads or in each: number n of what is read on comes
    from token n modulo T."""
    tokens, together, apart = call.x.shape[1], True, True
    for token in range(tokens):
        changed = call.changed(role, token)  # [H, T, D]
        for numbers in changed.flatten(1):
            apart &= torch.equal(numbers, torch.arange(len(numbers)) % tokens == token)
        numbers = changed.transpose(0, 1).flatten()
        together &= torch.equal(numbers, torch.arange(len(numbers)) % tokens == token)
        if not (together or apart):
            return False
    return True


def _is_merged_by_view(call: Followed) -> bool:
    """Whether row t of head h lands in the token that `[H, T]` has there when it is read on as
    `[T, H]`."""
    rows = call.rows.get("out")
    if rows is None or rows.shape[1] in (1, call.x.shape[1]):
        return False
    heads, tokens = rows.shape[1:3]
    return all(call.lands((0, *divmod(n, tokens))) == [n // heads] for n in range(heads * tokens))


def _is_merged_astray(call: Followed) -> bool:
    """Whether a single head's `[T, E]` is turned to `[E, T]` and read on as `[T, E]` again."""
    rows = call.rows.get("out")
    if rows is None or rows.shape[1] != 1:
        return False
    tokens, width = rows.shape[2:]
    astray = {(t, n): (n * tokens + t) // width for t, n in _sampled(width, 0, tokens - 1)}
    lands = (call.lands((0, 0, *place)) == [row] for place, row in astray.items())
    return any(row != token for (token, _), row in astray.items()) and all(lands)

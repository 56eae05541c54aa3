"""A model under watch, compared with every softmax that it computes.

The model runs by itself, watched, and with a recorder of its softmaxes (of its calls of
`F.scaled_dot_product_attention`, the softmax by definition in float64). Outputs must be the same
bit for bit, and each call that was seen must have the entropy and the first weight of one softmax.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from math import prod
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import headwise as hw

TOLERANCE = 1e-5  # and what float32 makes of logits up to s, 2⁻²⁴ · s²
FUSED = F.scaled_dot_product_attention
SOFTMAXES = {F.softmax, torch.softmax, Tensor.softmax, torch.special.softmax}


class Softmaxes(TorchFunctionMode):
    """Records softmaxes over the last of three or more axes, those of PyTorch's function too."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Tensor] = []

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:  # which is one function for the mode
            with patch.multiple(
                F, **{one.__name__: self._noting(one) for one in (F.softmax, FUSED)}
            ):
                return func(*args, **kwargs)
        return self._noting(func)(*args, **kwargs)

    def _noting(self, func: Any) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            out = func(*args, **kwargs)
            self._note(func, out, args, kwargs)
            return out

        return noted

    def _note(self, func: Any, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if func in SOFTMAXES and out.dim() > 2:
            dim = args[1] if len(args) > 1 else kwargs.get("dim")
            self.found += [out.detach().double()] if dim in (-1, out.dim() - 1) else []
        if func is FUSED:
            self.found.append(defined(*args, **kwargs))


def defined(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return the weights `[…, T, S]` of PyTorch's function by its definition, in float64."""
    q, k = query.detach().double(), key.detach().double()
    if enable_gqa:
        k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        scores = scores.masked_fill(~scores.new_ones(scores.shape[-2:]).bool().tril(), -torch.inf)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    return scores.softmax(-1).nan_to_num()


@dataclass
class Verdict:
    """What was seen of a model.

    seen: how many calls were captured and agree with a softmax of the model.
    wrong: the calls that agree with none, with the distance to the nearest.
    unseen: the shapes of the softmaxes that no call agrees with.
    left_out: the reasons that watch gives, by module.
    """

    seen: int = 0
    wrong: list[str] = field(default_factory=list)
    unseen: list[list[int]] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)


def tensors(given: Any) -> Iterator[Tensor]:
    """Return the tensors of an output."""
    if isinstance(given, Tensor):
        yield given
    elif isinstance(given, dict):
        for part in given.values():
            yield from tensors(part)
    elif isinstance(given, tuple | list):
        for part in given:
            yield from tensors(part)


def same(one: Any, other: Any) -> bool:
    """Return True if two outputs are the same bit for bit, NaN included."""
    pairs = list(zip(tensors(one), tensors(other), strict=True))
    return bool(pairs) and all(
        a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.isnan(), b.isnan())
        and torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs
    )  # fmt: skip


@torch.no_grad()
def verdict_of(model: nn.Module, call: Callable[[nn.Module], Any], **options: Any) -> Verdict:
    """Run a model under watch with `options`, and compare what was seen with its softmaxes."""

    def run() -> Any:
        torch.manual_seed(7)
        return call(model)

    model.eval()
    plain = run()
    assert same(plain, run()), "this model gives two outputs for one input"
    with hw.watch(model, hw.Entropy(), hw.Mass(hw.First()), hw.MaxLogit(), **options) as seen:
        watched = run()
    assert same(plain, watched), "watching changed the output"
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # which computes no softmax of its own
    with Softmaxes() as recorded:
        run()
    torch.backends.mha.set_fastpath_enabled(fast)
    left, verdict = list(recorded.found), Verdict(left_out=dict(seen.left_out))
    for name in seen:
        for number, one in enumerate(seen[name].calls):
            distances = [distance(one, weights) for weights in left]
            nearest = min(range(len(left)), key=distances.__getitem__, default=None)
            largest = one["max_logit"].values.nan_to_num().abs().max().item()
            if nearest is None or not distances[nearest] <= max(TOLERANCE, 2**-24 * largest**2):
                apart = distances[nearest] if nearest is not None else None
                size = list(one["entropy"].values.shape)
                verdict.wrong.append(f"{name} call {number} {size}: {apart} from its nearest")
            else:
                verdict.seen += 1
                left.pop(nearest)
    verdict.unseen = [list(weights.shape) for weights in left]
    return verdict


def distance(call: Any, weights: Tensor) -> float:
    """Return how far a call's entropy and first weight are from those of weights `[…, T, S]`.

    In the queries that count, and in the order of the axes before the last two that fits best;
    infinite if none fits.
    """
    entropy, first = call["entropy"], call["first"]
    batch, heads, queries = entropy.values.shape
    *lead, length, _ = weights.shape
    if length != queries or weights[..., 0, 0].numel() != batch * heads:
        return torch.inf
    sums = torch.stack([torch.special.entr(weights).sum(-1), weights[..., 0]])
    leads = [lead] + ([[lead[0] // heads, heads, *lead[1:]]] if lead[0] % heads == 0 else [])
    best = torch.inf
    for sizes in leads:  # batch and heads may be one axis
        wide = sums.reshape(2, *sizes, queries)
        for order in permutations(range(len(sizes))):
            if heads in (sizes[order[-1]], prod(sizes[axis] for axis in order[-2:])):
                turned = wide.permute(0, *(1 + axis for axis in order), -1)
                best = min(best, _apart((entropy, first), turned.reshape(2, *entropy.values.shape)))
    return best


def _apart(readings: Sequence[Any], wanted: Tensor) -> float:
    """Return the largest difference in the queries that count; infinite if none does."""
    rows = readings[0].rows.expand(wanted.shape[1:])
    if not rows.any():
        return torch.inf
    values = torch.stack([one.values for one in readings])
    return (values - wanted)[:, rows].abs().max().item()


Case = tuple[nn.Module, Callable[[nn.Module], Any]]
"""A model, and a function that runs it."""


def assert_seen(case: Case, **options: Any) -> None:
    """Assert that every softmax of a model was seen, and nothing else."""
    verdict = verdict_of(*case, **options)
    assert verdict.seen > 0, verdict
    assert verdict == Verdict(seen=verdict.seen), verdict


def assert_left_out(case: Case, reason: str, seen: int = 0, **options: Any) -> None:
    """Assert that only `seen` calls of a model were seen, and that watch says why."""
    verdict = verdict_of(*case, **options)
    assert (verdict.seen, verdict.wrong) == (seen, []), verdict
    assert any(reason in why for why in verdict.left_out.values()), verdict

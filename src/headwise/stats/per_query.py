"""One small class a statistic: its definition on P, its reading without P.

Every figure is in float32 at least and describes the probabilities before dropout. Rows are
queries; those that may attend to nothing read 0 and stay out of every mean.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor

from ..core.mask_algebra import Mask
from ..core.modes import readable
from ..core.numbers import check_whole
from ..core.reference import Definition
from .distance import DISTANCE_EITHER_WAY, even_distance
from .engine import Engine
from .execute import Pass
from .needs import (
    ENTROPY,
    HEAD_OUTPUT,
    LOG_SUM_EXP,
    POSITION,
    POSITION_SPREAD,
    SINK_MASS,
    Need,
    Reduced,
)
from .pattern_mass import MassOn, in_sight
from .patterns import Pattern
from .results import Reading
from .score_sweep import Block


@dataclass(frozen=True)
class LSE:
    """Log-sum-exp of each row's scores and learned sink, in nats: `[B, H, T]`, −inf in dead rows.

    Source: Dao et al. 2022, algorithm 1 (kept there for the backward pass).
    """

    names = ("lse",)
    free, formula, as_found = True, True, ("lse",)

    needs = MappingProxyType({"lse": LOG_SUM_EXP})

    def read(self, found: Pass) -> dict[str, Reading]:
        return {"lse": Reading(found[LOG_SUM_EXP], found.valid_rows)}

    def define(self, full: Definition) -> dict[str, Tensor]:
        return {"lse": full.lse}


@dataclass(frozen=True)
class Entropy:
    """Entropy of each row of P in nats, and as a share of its bound `log n_i`: both `[B, H, T]`.

    `H_i = −Σ_j p_ij log p_ij = lse_i − E[s]`. A row with a single key has entropy 0 and no share;
    it stays out of the share's mean. A learned sink is one outcome more: its `−p log p` is in the
    entropy, and the bound is `log(n_i + 1)`.

    Source: Zhai et al. 2023 (entropy collapse); the identity: `log p_ij = s_ij − lse_i`.
    """

    names = ("entropy", "entropy_share")
    free, formula, as_found = True, True, ("entropy",)

    needs = MappingProxyType({"entropy": ENTROPY, "entropy_share": ENTROPY})

    def read(self, found: Pass) -> dict[str, Reading]:
        alive, entropy = found.valid_rows, found[ENTROPY]
        outcomes = found.counts + alive if found.view.has_sinks else found.counts
        bound = outcomes.clamp(min=1).to(entropy.dtype).log()
        shared = outcomes > 1
        share = torch.where(shared, entropy / torch.where(shared, bound, 1.0), 0.0)
        return {
            "entropy": Reading(entropy, alive),
            "entropy_share": Reading(share, shared),
        }

    def define(self, full: Definition) -> dict[str, Tensor]:
        entropy = torch.special.entr(full.weights).sum(-1)
        count = full.allowed.sum(-1)
        if full.sink is not None:
            entropy = entropy + torch.special.entr(full.sink)
            count = count + (count > 0)
        share = torch.where(count > 1, entropy / count.clamp(min=2).to(entropy.dtype).log(), 0.0)
        return {"entropy": entropy, "entropy_share": share}


@dataclass(frozen=True)
class Mass:
    """The attention mass on chosen keys: `[B, H, T]`, between 0 and 1.

    Of a pattern, named as it: `m_i = Σ_{j∈J(i)} p_ij`, from the scores of the chosen keys alone.
    Of a mask, such as `Mass(Window(16), name="near")`: `exp(lse within the mask − lse)`. Its mean
    is over the rows that have a key to look at; their share of the rows is its coverage.

    Args:
        keys: a pattern, or a mask that adds nothing to the scores.
        name: what it is called in results; a mask's default is `mass`.

    Raises:
        ValueError: keys that are neither.

    Source: Olsson et al. 2022 (prefix matching), Clark et al. 2019, §3.
    """

    keys: Pattern | Mask
    name: str | None = None
    formula: ClassVar[bool] = True

    @property
    def free(self) -> bool:
        return vars(type(self.keys)).get("free", False) is True

    def __post_init__(self) -> None:
        if isinstance(self.keys, type) or not isinstance(self.keys, Mask | Pattern):
            given = self.keys if isinstance(self.keys, type | str) else type(self.keys).__name__
            raise ValueError(
                f"Mass({given!r}): keys must be a pattern or a mask, such as Previous() or "
                f"Window(16)."
            )

    @property
    def names(self) -> tuple[str, ...]:
        if self.name is not None:
            return (self.name,)
        return ("mass" if isinstance(self.keys, Mask) else self.keys.name,)

    @property
    def as_found(self) -> tuple[str, ...]:
        return self.names

    @property
    def needs(self) -> dict[str, Need]:
        name = self.names[0]
        return {name: MassOn(self.keys, name)}

    def read(self, found: Pass) -> dict[str, Reading]:
        ((name, need),) = self.needs.items()
        mass, count = found[need]
        if count is None:
            assert not isinstance(self.keys, Mask)
            count = in_sight(self.keys, found.view)
        return {name: Reading(mass, count > 0, among=found.valid_rows)}

    def define(self, full: Definition) -> dict[str, Tensor]:
        device = full.weights.device
        if isinstance(self.keys, Mask):
            e = full.extent
            chosen = self.keys.dense(e.batch, e.heads, e.queries, e.keys, device)
        else:
            chosen = self.keys.keys(full.extent, device)[:, None]
        return {self.names[0]: torch.where(chosen, full.weights, 0.0).sum(-1)}


@dataclass(frozen=True)
class Sink:
    """The attention mass on the learned sink: `[B, H, T]`, `exp(sink_h − lse_i)`.

    What a query gives to no key; 0 in a call without `sinks`. (Of the first token, on which heads
    without a sink of their own tend to rest, the mass is `Mass(First())`.)

    Source: GPT-OSS 2025; Xiao et al. 2023.
    """

    names = ("sink",)
    free, formula, as_found = True, True, ("sink",)

    needs = MappingProxyType({"sink": SINK_MASS})

    def read(self, found: Pass) -> dict[str, Reading]:
        return {"sink": Reading(found[SINK_MASS], found.valid_rows)}

    def define(self, full: Definition) -> dict[str, Tensor]:
        return {"sink": torch.zeros_like(full.lse) if full.sink is None else full.sink}


@dataclass(frozen=True)
class Distance:
    """How far back each query looks on average, in tokens: `[B, H, T]`, `E[i + S − T − j]`.

    Negative where the mask lets a query look ahead and it does. `E[j]` is attention with the key's
    position as the value. What a learned sink takes adds nothing to the distance.

    Args:
        spread: also the standard deviation of the key's position, `distance_spread`, among the
            keys, from a pass over the scores (no gradient).
        absolute: also `distance_absolute`, `E|i + S − T − j|` among the keys, ahead and behind; and
            `distance_share`, the same as a share of what even attention over the keys in sight
            would have (1 as far, over 1 farther), of queries that see more than their own
            position. From a pass over the scores where keys ahead are in sight (no gradient).

    Source: Dosovitskiy et al. 2020, §4.5 (mean attention distance).
    """

    spread: bool = False
    absolute: bool = False
    free: ClassVar[bool] = True
    formula: ClassVar[bool] = True

    @property
    def names(self) -> tuple[str, ...]:
        spread = ("distance_spread",) if self.spread else ()
        return ("distance", *spread, *(_ABSOLUTE if self.absolute else ()))

    @property
    def needs(self) -> dict[str, Need]:
        needs: dict[str, Need] = {"distance": POSITION}
        if self.spread:
            needs["distance_spread"] = POSITION_SPREAD
        if self.absolute:
            needs |= dict.fromkeys(_ABSOLUTE, DISTANCE_EITHER_WAY)
        return needs

    def read(self, found: Pass) -> dict[str, Reading]:
        alive, ahead = found.valid_rows, found[POSITION]
        readings = {"distance": Reading(-ahead, alive)}
        if self.spread:
            readings["distance_spread"] = Reading(found[POSITION_SPREAD], alive)
        if self.absolute:
            away = found[DISTANCE_EITHER_WAY]
            away = -ahead.detach() if away is None else away
            even = even_distance(found.view)
            far = even > 0
            share = torch.where(far, away / torch.where(far, even, 1.0), 0.0)
            readings["distance_absolute"] = Reading(away, alive)
            readings["distance_share"] = Reading(share, far)
        return readings

    def define(self, full: Definition) -> dict[str, Tensor]:
        extent, device = full.extent, full.weights.device
        i = torch.arange(extent.queries, device=device)[:, None] + extent.offset
        back = i - torch.arange(extent.keys, device=device)
        figures = {"distance": (full.weights * back).sum(-1)}
        alive = full.allowed.any(-1, keepdim=True)
        among = torch.softmax(full.logits.masked_fill(~alive, 0.0), dim=-1) * alive
        if self.spread:
            mean = (among * back).sum(-1, keepdim=True)
            figures["distance_spread"] = (among * (back - mean).square()).sum(-1).sqrt()
        if self.absolute:
            away = (among * back.abs()).sum(-1)
            total, count = (full.allowed * back.abs()).sum(-1), full.allowed.sum(-1)
            far = torch.where(total > 0, total, 1)
            figures["distance_absolute"] = away
            figures["distance_share"] = torch.where(total > 0, away * count / far, 0.0)
        return figures


_ABSOLUTE = ("distance_absolute", "distance_share")


@dataclass(frozen=True)
class TopKeys:
    """The keys that each query attends to most: `top_keys` and `top_weights`, `[B, H, T, k]`.

    Exact, from a pass over the scores; in order of weight, the earlier key first among equals.
    Where a query sees fewer than k keys, the rest are key −1 with weight 0; where its weights are
    NaN, all of them are key −1 with weight NaN. No gradient.

    Args:
        k: how many, at least 1.
    """

    k: int = 5
    names = ("top_keys", "top_weights")

    def __post_init__(self) -> None:
        check_whole(self, "k", 1)

    @property
    def needs(self) -> dict[str, Need]:
        return dict.fromkeys(self.names, _Largest(self.k))

    def read(self, found: Pass) -> dict[str, Reading]:
        top, by_head = found[_Largest(self.k)], found.view.by_head
        return {
            "top_keys": Reading(by_head(top.keys), found.valid_rows),
            "top_weights": Reading(by_head(top.weights), found.valid_rows),
        }

    def define(self, full: Definition) -> dict[str, Tensor]:
        order = full.logits.sort(dim=-1, descending=True, stable=True).indices[..., : self.k]
        weights = full.weights.gather(-1, order)
        seen = full.allowed.gather(-1, order)
        keys = torch.where(seen & ~weights.isnan(), order, -1)
        short = self.k - order.shape[-1]
        return {
            "top_keys": torch.nn.functional.pad(keys, (0, short), value=-1),
            "top_weights": torch.nn.functional.pad(torch.where(seen, weights, 0.0), (0, short)),
        }


@dataclass(frozen=True)
class _Largest(Reduced):
    """The k largest entries of each row of P."""

    k: int
    name = "top"

    def make(self, engine: Engine) -> _Top:
        return _Top(engine.view.zeros(engine.view.extent.queries, self.k))


class _Top:
    """The best keys so far of every query."""

    def __init__(self, weights: Tensor) -> None:
        self.keys, self.weights = torch.full_like(weights, -1, dtype=torch.long), weights
        self.logs = torch.full_like(weights, -math.inf)

    def add(self, block: Block) -> None:
        place, k = (block.heads, block.rows), self.keys.shape[-1]
        logs = block.log_p
        if block.hidden is not None:
            logs = logs.masked_fill(block.hidden, -math.inf)
        logs, index = _largest(logs, min(k, logs.shape[-1]))
        keys = torch.where(logs > -math.inf, index + block.keys.start, -1)
        logs = torch.cat([self.logs[place], logs], dim=-1)
        keys = torch.cat([self.keys[place], keys], dim=-1)
        best = logs.sort(dim=-1, descending=True, stable=True).indices[..., :k]
        self.logs[place] = logs.gather(-1, best)
        self.keys[place] = keys.gather(-1, best)
        self.weights[place] = self.logs[place].exp()


def _largest(logs: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest entries of the last axis and where they are; the earlier among equals."""
    if readable(logs):
        found, index = logs.topk(k, dim=-1)  # which takes any among equals
        least = found[..., -1:]
        if not bool((((logs >= least).sum(-1, keepdim=True) > k) & (least > -math.inf)).any()):
            index = index.sort(dim=-1).values
            return logs.gather(-1, index), index
    found, index = logs.sort(dim=-1, descending=True, stable=True)
    return found[..., :k], index[..., :k]


@dataclass(frozen=True, eq=False)
class OutputNorm:
    """Length of each head's output, and of what it adds to the layer's: both `[B, H, T]`.

    `output_norm` is `‖o_h‖`; `contribution` is `‖W_h o_h‖`, with the columns of the output
    projection that read head h (Kobayashi et al. 2020); it is NaN, and in no table, where no
    projection is known.

    Args:
        projection: weight of the output projection, `[O, H · Dv]`; `watch` knows the layer's own.
    """

    projection: Tensor | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return ("output_norm",) if self.projection is None else ("output_norm", "contribution")

    @property
    def needs(self) -> dict[str, Need]:
        return dict.fromkeys(self.names, HEAD_OUTPUT)

    def read(self, found: Pass) -> dict[str, Reading]:
        out, known = found[HEAD_OUTPUT]
        out, alive = out.to(found.view.dtype), found.valid_rows
        norm = Reading(torch.linalg.vector_norm(out, dim=-1), alive)
        weight = known if self.projection is None else self.projection
        if weight is None:
            added = norm.without_values("the weight of the output projection is not known")
        else:
            added = Reading(_contribution(out, weight.detach().to(out.device)), alive)
        return {"output_norm": norm, "contribution": added}

    def define(self, full: Definition) -> dict[str, Tensor]:
        out = full.out.to(full.weights.dtype)
        figures = {"output_norm": torch.linalg.vector_norm(out, dim=-1)}
        if self.projection is not None:
            heads = self.projection.to(out.dtype).unflatten(1, (out.shape[1], -1))
            added = torch.einsum("bhtd,ohd->bhto", out, heads)
            figures["contribution"] = torch.linalg.vector_norm(added, dim=-1)
        return figures


def _contribution(out: Tensor, weight: Tensor) -> Tensor:
    """`‖W_h o‖` through the triangle of `W_h`'s QR: O(T·D²) a head, not O(T·D·O)."""
    heads, width = out.shape[1], out.shape[3]
    if weight.dim() != 2 or weight.shape[1] != heads * width:
        raise ValueError(
            f"OutputNorm(projection {list(weight.shape)}): {heads} heads of width {width} need "
            f"[O, {heads * width}]"
        )
    each = weight.to(out.dtype).unflatten(1, (heads, width)).transpose(0, 1)
    triangle = torch.linalg.qr(each, mode="r").R
    return torch.linalg.vector_norm(torch.einsum("bhtd,hed->bhte", out, triangle), dim=-1)

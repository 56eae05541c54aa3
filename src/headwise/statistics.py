"""One small class a statistic: its definition on P, its reading without P.

Every figure is in float32 at least and describes the probabilities before dropout. Rows are
queries; those that may attend to nothing read 0 and stay out of every mean.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .definition import Definition
from .evidence import Evidence, Pattern
from .masks import Mask
from .readings import Reading
from .sampling import draw
from .sweep import Block


@dataclass(frozen=True)
class LSE:
    """Log-sum-exp of each row's scores, in nats: `[B, H, T]`, −inf in dead rows.

    Source: Dao et al. 2022, algorithm 1 (kept there for the backward pass).
    """

    names = ("lse",)

    def read(self, evidence: Evidence) -> dict[str, Reading]:
        return {"lse": Reading(evidence.lse, evidence.alive)}

    def define(self, full: Definition) -> dict[str, Tensor]:
        return {"lse": full.lse}


@dataclass(frozen=True)
class Entropy:
    """Entropy of each row of P in nats, and as a share of its bound `log n_i`: both `[B, H, T]`.

    `H_i = −Σ_j p_ij log p_ij = lse_i − E[s]`. A row with a single key has entropy 0 and no share;
    it stays out of the share's mean.

    Source: Zhai et al. 2023 (entropy collapse); the identity: `log p_ij = s_ij − lse_i`.
    """

    names = ("entropy", "entropy_share")

    def prepare(self, evidence: Evidence) -> None:
        evidence.wish("entropy")

    def read(self, evidence: Evidence) -> dict[str, Reading]:
        alive = evidence.alive
        entropy = evidence.entropy
        bound = evidence.counts.clamp(min=1).to(entropy.dtype).log()
        shared = evidence.counts > 1
        share = torch.where(shared, entropy / torch.where(shared, bound, 1.0), 0.0)
        return {
            "entropy": Reading(entropy, alive),
            "entropy_share": Reading(share, shared),
        }

    def define(self, full: Definition) -> dict[str, Tensor]:
        entropy = torch.special.entr(full.weights).sum(-1)
        count = full.allowed.sum(-1)
        share = torch.where(count > 1, entropy / count.clamp(min=2).to(entropy.dtype).log(), 0.0)
        return {"entropy": entropy, "entropy_share": share}


@dataclass(frozen=True)
class MaxLogit:
    """The largest score of each head: `[B, H]`, −inf where no query sees a key.

    The score as it enters the softmax: scaled, softcapped, biased.

    Source: Kimi K2 2025 (QK-clip), Dehghani et al. 2023 (logit growth).
    """

    names = ("max_logit",)

    def read(self, evidence: Evidence) -> dict[str, Reading]:
        return {"max_logit": Reading(evidence.max_logit, largest=True)}

    def define(self, full: Definition) -> dict[str, Tensor]:
        return {"max_logit": full.logits.amax((-1, -2))}


@dataclass(frozen=True)
class Mass:
    """The attention mass on chosen keys: `[B, H, T]`, between 0 and 1.

    Of a pattern, named as it: `m_i = Σ_{j∈J(i)} p_ij`, from the scores of the chosen keys alone.
    Of a mask, such as `Mass(Window(16), name="near")`: `exp(lse within the mask − lse)`. Its mean
    is over the rows that have a key to look at; their share of the rows is its coverage.

    Args:
        keys: a pattern, or a mask that adds nothing to the scores.
        name: what it is called in results; a mask's default is `mass`.

    Source: Olsson et al. 2022 (prefix matching), Clark et al. 2019, §3.
    """

    keys: Pattern | Mask
    name: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        if self.name is not None:
            return (self.name,)
        return ("mass" if isinstance(self.keys, Mask) else self.keys.name,)

    def read(self, evidence: Evidence) -> dict[str, Reading]:
        if isinstance(self.keys, Mask):
            mass, count = evidence.mass_of(self.keys)
        else:
            mass, count = evidence.mass(evidence.runs(self.keys))
        return {self.names[0]: Reading(mass.clamp(max=1.0), count > 0, among=evidence.alive)}

    def define(self, full: Definition) -> dict[str, Tensor]:
        device = full.weights.device
        if isinstance(self.keys, Mask):
            e = full.extent
            chosen = self.keys.dense(e.batch, e.heads, e.queries, e.keys, device)
        else:
            chosen = self.keys.keys(full.extent, device)[:, None]
        return {self.names[0]: torch.where(chosen, full.weights, 0.0).sum(-1)}


@dataclass(frozen=True)
class Distance:
    """How far back each query looks on average, in tokens: `[B, H, T]`, `i + S − T − E[j]`.

    Negative where the mask lets a query look ahead and it does. `E[j]` is attention with the key's
    position as the value. With `spread`, also the standard deviation of the key's position,
    `distance_spread`, from a pass over the scores (no gradient).
    """

    spread: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        return ("distance", "distance_spread") if self.spread else ("distance",)

    def prepare(self, evidence: Evidence) -> None:
        evidence.wish("position")
        if self.spread:
            evidence.gather_spread()

    def read(self, evidence: Evidence) -> dict[str, Reading]:
        alive = evidence.alive
        readings = {"distance": Reading(-evidence.position, alive)}
        if self.spread:
            readings["distance_spread"] = Reading(evidence.spread, alive)
        return readings

    def define(self, full: Definition) -> dict[str, Tensor]:
        extent, device = full.extent, full.weights.device
        i = torch.arange(extent.queries, device=device)[:, None] + extent.offset
        j = torch.arange(extent.keys, device=device)
        distance = (full.weights * (i - j)).sum(-1)
        figures = {"distance": distance}
        if self.spread:
            apart = (i - j - distance[..., None]).square()
            figures["distance_spread"] = (full.weights * apart).sum(-1).sqrt()
        return figures


@dataclass(frozen=True)
class TopKeys:
    """The keys that each query attends to most: `top_keys` and `top_weights`, `[B, H, T, k]`.

    Exact, from a pass over the scores; in order of weight, the earlier key first among equals.
    Where a query sees fewer than k keys, the rest are key −1 with weight 0. No gradient.

    Args:
        k: how many, at least 1.
    """

    k: int = 5
    names = ("top_keys", "top_weights")

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ValueError(f"TopKeys({self.k}): at least one key must be asked for.")

    def prepare(self, evidence: Evidence) -> None:
        shape = (evidence.extent.batch * evidence.extent.heads, evidence.extent.queries, self.k)
        evidence.gather("top", _Top(torch.full(shape, -1), evidence.lse.detach().new_zeros(shape)))

    def read(self, evidence: Evidence) -> dict[str, Reading]:
        self.prepare(evidence)
        top = evidence.gathered("top")
        heads = (evidence.extent.batch, evidence.extent.heads)
        return {
            "top_keys": Reading(top.keys.unflatten(0, heads), evidence.alive),
            "top_weights": Reading(top.weights.unflatten(0, heads), evidence.alive),
        }

    def define(self, full: Definition) -> dict[str, Tensor]:
        order = full.logits.sort(dim=-1, descending=True, stable=True).indices[..., : self.k]
        weights = full.weights.gather(-1, order)
        seen = full.allowed.gather(-1, order)
        keys = torch.where(seen, order, -1)
        short = self.k - order.shape[-1]
        return {
            "top_keys": torch.nn.functional.pad(keys, (0, short), value=-1),
            "top_weights": torch.nn.functional.pad(torch.where(seen, weights, 0.0), (0, short)),
        }


class _Top:
    """The best keys so far of every query."""

    def __init__(self, keys: Tensor, weights: Tensor) -> None:
        self.keys, self.weights = keys.to(weights.device), weights
        self.logs = torch.full_like(weights, -math.inf)

    def add(self, block: Block) -> None:
        place, k = (block.heads, block.rows), self.keys.shape[-1]
        logs, index = block.log_p.topk(min(k, block.log_p.shape[-1]), dim=-1)
        keys = torch.where(logs > -1e29, index + block.keys.start, -1)
        logs = torch.where(keys >= 0, logs, -math.inf)
        logs = torch.cat([self.logs[place], logs], dim=-1)
        keys = torch.cat([self.keys[place], keys], dim=-1)
        best = logs.sort(dim=-1, descending=True, stable=True).indices[..., :k]
        self.logs[place] = logs.gather(-1, best)
        self.keys[place] = keys.gather(-1, best)
        self.weights[place] = self.logs[place].exp()


@dataclass(frozen=True)
class Received:
    """The attention that every key receives: `[B, H, S]`, column sums of P. No gradient.

    What heavy-hitter caches keep their keys by. Sums to the number of valid queries.

    Args:
        last: only from the last so many queries (SnapKV's observation window).

    Source: Zhang et al. 2023 (H2O), Li et al. 2024 (SnapKV).
    """

    last: int | None = None
    names = ("received",)

    def __post_init__(self) -> None:
        if self.last is not None and self.last < 1:
            raise ValueError(f"Received(last={self.last}): at least one query must count.")

    def prepare(self, evidence: Evidence) -> None:
        extent = evidence.extent
        zeros = evidence.lse.detach().new_zeros(extent.batch * extent.heads, extent.keys)
        first = 0 if self.last is None else evidence.whole.queries - self.last
        evidence.gather("received", _Columns(zeros, evidence.queries >= first))

    def read(self, evidence: Evidence) -> dict[str, Reading]:
        self.prepare(evidence)
        received = evidence.gathered("received").total
        heads = (evidence.extent.batch, evidence.extent.heads)
        return {"received": Reading(received.unflatten(0, heads))}

    def define(self, full: Definition) -> dict[str, Tensor]:
        first = 0 if self.last is None else max(0, full.extent.queries - self.last)
        return {"received": full.weights[:, :, first:].sum(2)}


class _Columns:
    """Sums of P over queries that count."""

    def __init__(self, total: Tensor, counts: Tensor) -> None:
        self.total, self.counts = total, counts.to(total.dtype)
        self.all = bool(counts.all())

    def add(self, block: Block) -> None:
        weights = self.counts[block.rows]
        if self.all or bool(weights.any()):
            self.total[block.heads, block.keys] += weights @ block.p


@dataclass(frozen=True)
class OffsetHistogram:
    """How much of a head's attention goes how far: `[B, H, bins]`, mass by distance. No gradient.

    Bin 0 is the query's own position, bin b the distances `[2^(b−1), 2^b)` before it; what lies
    farther is in the last bin, and what lies ahead is in none. Means over valid queries.

    Args:
        bins: how many, at least 2; 18 reach back 65,536 tokens and beyond.

    Source: Press et al. 2021, §4 and its kin (effective context).
    """

    bins: int = 18
    names = ("offsets",)

    def __post_init__(self) -> None:
        if self.bins < 2:
            raise ValueError(f"OffsetHistogram({self.bins}): there must be at least two bins.")

    def prepare(self, evidence: Evidence) -> None:
        zeros = evidence.lse.detach().new_zeros(
            evidence.extent.batch * evidence.extent.heads, self.bins
        )
        evidence.gather("offsets", _Offsets(zeros, evidence.positions))

    def read(self, evidence: Evidence) -> dict[str, Reading]:
        self.prepare(evidence)
        extent = evidence.extent
        total = evidence.gathered("offsets").total.unflatten(0, (extent.batch, extent.heads))
        alive = evidence.alive.expand(extent.batch, extent.heads, extent.queries)
        return {"offsets": Reading(total / alive.sum(-1, keepdim=True).clamp(min=1))}

    def define(self, full: Definition) -> dict[str, Tensor]:
        extent, device = full.extent, full.weights.device
        i = torch.arange(extent.queries, device=device)[:, None] + extent.offset
        bins = _bin_of(i - torch.arange(extent.keys, device=device), self.bins)
        total = torch.stack(
            [torch.where(bins == b, full.weights, 0.0).sum((-1, -2)) for b in range(self.bins)], -1
        )
        alive = full.allowed.any(-1).sum(-1, keepdim=True)
        return {"offsets": total / alive.clamp(min=1)}


def _bin_of(distance: Tensor, bins: int) -> Tensor:
    """The bin of each distance; `bins` itself for what lies ahead. Exact: powers are compared."""
    edges = torch.tensor([0, *(1 << b for b in range(bins - 1))], device=distance.device)
    found = torch.bucketize(distance, edges, right=True) - 1
    return torch.where(distance < 0, bins, found)


class _Offsets:
    """Sums of P by distance."""

    def __init__(self, total: Tensor, positions: Tensor) -> None:
        self.total, self.positions = total, positions

    def add(self, block: Block) -> None:
        j = torch.arange(block.keys.start, block.keys.stop, device=self.positions.device)
        bins = _bin_of(self.positions[block.rows, None] - j, self.total.shape[1])
        low, high = int(bins.amin()), int(bins.amax())
        if low == high:
            if low < self.total.shape[1]:
                self.total[block.heads, low] += block.p.sum((-1, -2))
            return
        found = block.p.new_zeros(len(block.p), self.total.shape[1] + 1)
        found.index_add_(1, bins.flatten(), block.p.flatten(1))
        self.total[block.heads] += found[:, :-1]


@dataclass(frozen=True)
class Similarity:
    """How alike two heads of a layer attend: `[B, H, H]`, Jensen–Shannon distance, 0 to 1.

    `√(H(½p + ½r) − ½H(p) − ½H(r))`, entropies in bits, averaged over valid queries among `queries`
    drawn ones (stratified; all there are, if those are fewer). 0 on the diagonal. No gradient.

    Source: Lin 1991; between heads: Clark et al. 2019, §6.
    """

    queries: int = 64
    seed: int = 0
    names = ("similarity",)

    def __post_init__(self) -> None:
        if self.queries < 1:
            raise ValueError(f"Similarity({self.queries}): at least one query must be looked at.")

    def read(self, evidence: Evidence) -> dict[str, Reading]:
        extent = evidence.extent
        sample = draw(self.queries, extent.queries, self.seed, evidence.device)
        rows = torch.arange(extent.queries) if sample is None else sample.rows
        total = evidence.lse.detach().new_zeros(extent.batch, extent.heads, extent.heads)
        count = torch.zeros_like(total)
        size = max(1, (1 << 20) // max(1, extent.batch * extent.heads * extent.keys))
        for some in rows.split(size):
            distances, both = _js_distances(evidence.weights(queries=some.tolist()))
            total += (distances * both).sum(1)
            count += both.sum(1)
        return {"similarity": Reading(total / count.clamp(min=1))}

    def define(self, full: Definition) -> dict[str, Tensor]:
        sample = draw(self.queries, full.extent.queries, self.seed, full.weights.device)
        p = full.weights if sample is None else full.weights[:, :, sample.rows]
        distances, both = _js_distances(p)
        return {"similarity": (distances * both).sum(1) / both.sum(1).clamp(min=1)}


def _js_distances(p: Tensor) -> tuple[Tensor, Tensor]:
    """Between all pairs of heads, and 1 where both see something: both `[B, n, H, H]`.

    `p` is `[B, H, n, S]`.
    """
    heads = p.shape[1]
    p = p.transpose(1, 2)  # [B, n, H, S]
    entropy = torch.special.entr(p).sum(-1)
    valid = (p.sum(-1) > 0).to(p.dtype)
    distances = p.new_zeros(*p.shape[:2], heads, heads)
    for head in range(heads - 1):
        between = torch.special.entr((p[:, :, head, None] + p[:, :, head + 1 :]) / 2).sum(-1)
        apart = between - (entropy[:, :, head, None] + entropy[:, :, head + 1 :]) / 2
        # Rounding may make the least of them negative.
        apart = (apart / math.log(2)).clamp(min=0).sqrt()
        distances[:, :, head, head + 1 :] = apart
        distances[:, :, head + 1 :, head] = apart
    return distances, valid[..., None] * valid[..., None, :]


@dataclass(frozen=True, eq=False)
class OutputNorm:
    """Length of each head's output, and of what it adds to the layer's: both `[B, H, T]`.

    `output_norm` is `‖o_h‖`; `contribution` is `‖W_h o_h‖`, with the columns of the output
    projection that read head h (Kobayashi et al. 2020), and is there only where a projection is
    known.

    Args:
        projection: weight of the output projection, `[O, H · Dv]`; `watch` knows the layer's own.
    """

    projection: Tensor | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return ("output_norm",) if self.projection is None else ("output_norm", "contribution")

    def read(self, evidence: Evidence) -> dict[str, Reading]:
        out = evidence.out.to(evidence.lse.dtype)
        readings = {"output_norm": Reading(torch.linalg.vector_norm(out, dim=-1), evidence.alive)}
        weight = evidence.projection if self.projection is None else self.projection
        if weight is not None:
            length = _contribution(out, weight.detach().to(out.device))
            readings["contribution"] = Reading(length, evidence.alive)
        return readings

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


@dataclass(frozen=True)
class Map:
    """P in small: `[B, H, n, n]`, the mass that a block of queries gives to a block of keys.

    Entry `[a, b]` is the mean over the valid queries of block `a` of their mass on block `b`, so
    rows sum to 1 (to 0 where no query is valid). With as many blocks as tokens it is P itself.
    Attention with the one-hot of the key's block as values: one call for each D blocks.

    Raises:
        ValueError: if `blocks` is under 1.
    """

    blocks: int = 64
    names = ("map",)

    def __post_init__(self) -> None:
        if self.blocks < 1:
            raise ValueError(f"Map({self.blocks}): there must be at least one block.")

    def read(self, evidence: Evidence) -> dict[str, Reading]:
        extent, dtype, device = evidence.extent, evidence.lse.dtype, evidence.device
        of_key = self._block_of(extent.keys, device)
        one_hot = torch.nn.functional.one_hot(of_key, self.blocks).to(dtype)
        seen = evidence.mean_of(one_hot[None, None])
        of_query = self._block_of(evidence.whole.queries, device)[evidence.queries]
        return {"map": Reading(self._mean_rows(seen, evidence.alive, of_query))}

    def define(self, full: Definition) -> dict[str, Tensor]:
        of_key = self._block_of(full.extent.keys, full.weights.device)
        one_hot = torch.nn.functional.one_hot(of_key, self.blocks).to(full.weights.dtype)
        alive = full.allowed.any(-1)
        of_query = self._block_of(full.extent.queries, alive.device)
        return {"map": self._mean_rows(full.weights @ one_hot, alive, of_query)}

    def _block_of(self, length: int, device: torch.device) -> Tensor:
        """The block of each position; blocks differ by at most one position in size."""
        return torch.arange(length, device=device) * self.blocks // max(length, self.blocks)

    def _mean_rows(self, seen: Tensor, alive: Tensor, of_query: Tensor) -> Tensor:
        batch, heads, queries, _ = seen.shape
        alive = alive.expand(batch, heads, queries)
        total = seen.new_zeros(batch, heads, self.blocks, self.blocks)
        total.index_add_(2, of_query, seen * alive[..., None])
        count = seen.new_zeros(batch, heads, self.blocks)
        count.index_add_(2, of_query, alive.to(seen.dtype))
        return total / count.clamp(min=1)[..., None]

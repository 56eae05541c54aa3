"""One small class a statistic: its definition on P, its reading without P.

Every figure is in float32 at least and describes the probabilities before dropout. Rows are
queries; those that may attend to nothing read 0 and stay out of every mean.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .definition import Definition
from .evidence import Evidence, Pattern, Reading


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
    """The attention mass on a pattern's keys: `[B, H, T]`, between 0 and 1, named as the pattern.

    `m_i = Σ_{j∈J(i)} p_ij`, from the scores of the chosen keys alone. Its mean is over the rows
    that have a key to look at; their share of the rows is its coverage.

    Source: Olsson et al. 2022 (prefix matching), Clark et al. 2019, §3.
    """

    pattern: Pattern

    @property
    def names(self) -> tuple[str, ...]:
        return (self.pattern.name,)

    def read(self, evidence: Evidence) -> dict[str, Reading]:
        mass, count = evidence.mass(self.pattern.runs(evidence.extent, evidence.device))
        return {self.pattern.name: Reading(mass.clamp(max=1.0), count > 0, among=evidence.alive)}

    def define(self, full: Definition) -> dict[str, Tensor]:
        chosen = self.pattern.keys(full.extent, full.weights.device)[:, None]
        return {self.pattern.name: torch.where(chosen, full.weights, 0.0).sum(-1)}


@dataclass(frozen=True)
class Distance:
    """How far back each query looks on average, in tokens: `[B, H, T]`, `i + S − T − E[j]`.

    Negative where the mask lets a query look ahead and it does. `E[j]` is attention with the key's
    position as the value.
    """

    names = ("distance",)

    def read(self, evidence: Evidence) -> dict[str, Reading]:
        extent = evidence.extent
        # Positions as digits to the base 4096: no column holds a number over 2^24 for any length
        # below 2^36, so each is exact in float32.
        j = torch.arange(extent.keys, device=evidence.device)
        columns = torch.stack([j % 4096, j // 4096], dim=-1)[None, None]
        low, high = evidence.mean_of(columns.to(evidence.lse.dtype)).unbind(-1)
        position = torch.arange(extent.queries, device=evidence.device) + extent.offset
        distance = torch.where(evidence.alive, (position - 4096 * high) - low, 0.0)
        return {"distance": Reading(distance, evidence.alive)}

    def define(self, full: Definition) -> dict[str, Tensor]:
        extent, device = full.extent, full.weights.device
        i = torch.arange(extent.queries, device=device)[:, None] + extent.offset
        j = torch.arange(extent.keys, device=device)
        return {"distance": (full.weights * (i - j)).sum(-1)}


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
        return {"map": Reading(self._mean_rows(seen, evidence.alive))}

    def define(self, full: Definition) -> dict[str, Tensor]:
        of_key = self._block_of(full.extent.keys, full.weights.device)
        one_hot = torch.nn.functional.one_hot(of_key, self.blocks).to(full.weights.dtype)
        alive = full.allowed.any(-1)
        return {"map": self._mean_rows(full.weights @ one_hot, alive)}

    def _block_of(self, length: int, device: torch.device) -> Tensor:
        """The block of each position; blocks differ by at most one position in size."""
        return torch.arange(length, device=device) * self.blocks // max(length, self.blocks)

    def _mean_rows(self, seen: Tensor, alive: Tensor) -> Tensor:
        batch, heads, queries, _ = seen.shape
        of_query = self._block_of(queries, seen.device)
        alive = alive.expand(batch, heads, queries)
        total = seen.new_zeros(batch, heads, self.blocks, self.blocks)
        total.index_add_(2, of_query, seen * alive[..., None])
        count = seen.new_zeros(batch, heads, self.blocks)
        count.index_add_(2, of_query, alive.to(seen.dtype))
        return total / count.clamp(min=1)[..., None]

"""An entropy floor: a loss term that keeps heads from putting all their weight on one key."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from ..capture.adapters.compiled import refuse_compiled
from ..capture.captured import Watched
from ..capture.modules import Modules, check_model
from ..capture.watch import watch
from ..core.numbers import format_value, real
from ..stats.entropy import Entropy
from ..stats.record import Reading


class EntropyFloor:
    """Penalize heads whose mean entropy is below a floor: `strength · Σ_h relu(floor − H_h)`.

    `H_h` is the mean entropy of head h, in nats, over batch and valid queries of all its calls.
    Use it as a context manager around each forward pass. `loss` is then the term, a differentiable
    scalar, and `entropies` holds the means. The output of the model does not change.

    With activation checkpointing (`use_reentrant=False`), call `backward()` inside the block too.

    Args:
        model: any module that `watch` supports.
        floor: the entropy in nats, above 0; uniform attention to n keys has entropy log n.
        strength: the factor of the term.
        queries: the number of queries to sample in every call, which is cheaper. Default: all.
        modules: the modules to include, as in `watch()`.

    Raises:
        ValueError: `floor` or `strength` is not a finite number above 0; `loss` is read before
            the model is called; or for the same reasons as `watch(gradients=True)`.

    >>> import torch, headwise as hw
    >>> layer, x = hw.MultiHeadAttention(24, num_heads=3), torch.randn(2, 7, 24)
    >>> with hw.EntropyFloor(layer, floor=2.0) as floor:
    ...     out = layer(x)
    >>> (out.square().mean() + floor.loss).backward()
    >>> floor.entropies[""].shape, floor.loss.shape
    (torch.Size([3]), torch.Size([]))

    Source: Zhai et al. 2023 (entropy collapse).
    """

    def __init__(
        self,
        model: nn.Module,
        floor: float = 0.5,
        strength: float = 1.0,
        *,
        queries: int | None = None,
        modules: Modules = None,
    ) -> None:
        self._call = check_model("EntropyFloor", model)
        self.floor, self.strength = real(floor) or 0.0, real(strength) or 0.0
        for name, value in (("floor", floor), ("strength", strength)):
            if not 0 < (real(value) or 0.0) < math.inf:
                raise ValueError(
                    f"{self._call}: {name} must be a finite number above 0, "
                    f"got {format_value(value)}."
                )
        self.model, self.queries, self.modules = model, queries, modules
        self._watching: AbstractContextManager[Watched] | None = None
        self._seen: Watched | None = None
        self._entered = 0

    def __enter__(self) -> EntropyFloor:
        if self._watching is not None:
            raise ValueError(f"{self._call}: it is already entered; exit it first.")
        refuse_compiled("EntropyFloor", self.model)
        self._watching = watch(
            self.model,
            Entropy(),
            queries=self.queries,
            seed=self._entered,
            gradients=True,
            modules=self.modules,
        )
        self._seen = self._watching.__enter__()
        self._entered += 1
        return self

    def __exit__(self, *raised: Any) -> None:
        watching, self._watching = self._watching, None
        assert watching is not None
        watching.__exit__(*raised)

    @property
    def entropies(self) -> dict[str, Float[Tensor, " H"]]:
        """The mean entropy of each head by module, in nats and differentiable; NaN if undefined.

        Raises:
            ValueError: it was not entered, or no attention was captured.
        """
        return {n: mean.masked_fill(of == 0, math.nan) for n, (mean, of) in self._means().items()}

    @property
    def loss(self) -> Float[Tensor, ""]:
        """The term to add to the loss. Heads without a valid query are left out.

        Raises:
            ValueError: as for `entropies`.
        """
        under = [
            torch.where(count > 0, F.relu(self.floor - mean), 0.0).sum()
            for mean, count in self._means().values()
        ]
        return self.strength * torch.stack([one.to(under[0].device) for one in under]).sum()

    def _means(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the mean entropy of each head and its number of queries, both `[H]`."""
        if self._seen is None:
            raise ValueError(f"{self._call}: enter it around the forward pass first.")
        self._seen.must_not_be_empty()
        found = {}
        for name in self._seen:
            readings = [call["entropy"] for call in self._seen[name].calls]
            held = [(r.values, _rows_of(r)) for r in readings]
            total = torch.stack([torch.where(rows, x, 0.0).sum((0, 2)) for x, rows in held])
            count = torch.stack([rows.sum((0, 2)) for _, rows in held]).sum(0)
            found[name] = total.sum(0) / count.clamp(min=1), count
        return found


def _rows_of(reading: Reading) -> Tensor:
    """Return the valid queries, `[B, H, T]`."""
    assert reading.rows is not None  # one entropy per query
    return reading.rows.expand(reading.values.shape)

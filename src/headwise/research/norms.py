"""Normalization layers as affine maps with a fixed scale."""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass

import torch
from torch import Tensor, nn

PROBE = 1e3
"""The size of the numbers used to probe a norm; its eps is negligible next to their square."""


def is_norm(module: nn.Module) -> bool:
    """Return True if the name of a module's class contains "norm", ignoring case.

    >>> is_norm(nn.LayerNorm(4)), is_norm(nn.RMSNorm(4)), is_norm(nn.Linear(4, 4))
    (True, True, False)
    """
    return re.search(r"norm", type(module).__name__, re.IGNORECASE) is not None


@dataclass(frozen=True)
class NormMap:
    """A norm as the map `gain · centered(x) / scale(x) + shift`; RMS norms do not center."""

    gain: Tensor
    shift: Tensor
    centers: bool

    @classmethod
    @torch.no_grad()
    def of(cls, norm: nn.Module, width: int) -> NormMap:
        """Find the map of a norm of any class by applying it to a few vectors.

        Raises:
            ValueError: the module does not compute a norm.

        >>> found = NormMap.of(nn.LayerNorm(6), 6)
        >>> found.centers, found.gain.round(decimals=6).tolist()
        (True, [1.0, 1.0, 1.0, 1.0, 1.0, 1.0])
        """
        like = next(iter(norm.parameters()), torch.zeros(()))
        if like.dtype.itemsize < 4:  # its rounding is not part of the map
            norm = copy.deepcopy(norm).float()
            like = like.float()
        i = torch.arange(width, dtype=like.dtype, device=like.device)
        x = PROBE * (1 - 2 * (i % 2)) * (1 + i / width)  # no number is near the mean
        up, down, moved = norm(torch.stack([x, -x, x + PROBE]))
        shift, centers = (up + down) / 2, torch.allclose(moved, up, rtol=1e-3, atol=1e-3)
        plain = cls(torch.ones_like(x), shift, centers)
        found = cls((up - shift) * plain.scale(x) / plain.centered(x), shift, centers)
        if not torch.allclose(found(x.roll(1)), norm(x.roll(1)), rtol=1e-2, atol=1e-2):
            raise ValueError(
                f"{type(norm).__name__} of width {width} is no layer norm or RMS norm of the last "
                f"axis: it has another map"
            )
        return found

    def centered(self, x: Tensor) -> Tensor:
        """Return `x` minus its mean over features, if the norm subtracts it."""
        return x - x.mean(-1, keepdim=True) if self.centers else x

    def scale(self, x: Tensor) -> Tensor:
        """Return the divisor of `centered(x)`, `[…, 1]`, without an eps."""
        return self.centered(x).square().mean(-1, keepdim=True).sqrt()

    def read_by(self, weight: Tensor) -> Tensor:
        """Convert a weight `[…, E]` for the norm's output to one for its input, up to the scale:
        `W · diag(gain)`, centered."""
        return self.centered(weight * self.gain.to(weight))

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the norm."""
        return self.gain * self.centered(x) / self.scale(x) + self.shift

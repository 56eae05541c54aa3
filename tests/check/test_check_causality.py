"""Later tokens that count in ways other than by their weights, and contexts that insist on all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.check import check


class Causal(nn.Module):
    """Right; each token's own features are normed."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.norm: nn.Module = nn.LayerNorm(dim)

    def heads(self, x: Tensor) -> Tensor:
        q, k, v = (
            one.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for one in self.qkv(x).chunk(3, -1)
        )
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(later, -torch.inf)
        return (torch.softmax(scores, dim=-1) @ v).transpose(1, 2).flatten(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(self.heads(x)))


class NormedOverTime(Causal):
    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__(dim, num_heads)
        self.norm = nn.GroupNorm(num_heads, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(self.heads(x).transpose(1, 2)).transpose(1, 2))


class Kept(nn.Module):
    """A cache, and no mask."""

    causal = False

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.past: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor, use_cache: bool = False) -> Tensor:
        q, k, v = (
            one.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for one in self.qkv(x).chunk(3, -1)
        )
        if use_cache and self.past is not None:
            k, v = (torch.cat(pair, 2) for pair in zip(self.past, (k, v), strict=True))
        if use_cache:
            self.past = k.detach(), v.detach()
        hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=x.device)
        seen = hidden.tril(k.shape[2] - q.shape[2]) if self.causal else None
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return self.out(out.transpose(1, 2).flatten(2))


class KeptAndCausal(Kept):
    causal = True


class KeptWithMasks(Kept):
    """Masks of several kinds, by name."""

    def forward(
        self,
        x: Tensor,
        attention_masks: dict[str, Tensor] | None = None,
        use_cache: bool = False,
    ) -> Tensor:
        return super().forward(x, use_cache)


class Uncut(Causal):
    cut = False

    def __init__(self, dim: int, num_heads: int, contextLength: int) -> None:
        super().__init__(dim, num_heads)
        mask = torch.full((contextLength, contextLength), -torch.inf).triu(1)
        self.register_buffer("mask", mask)

    def heads(self, x: Tensor) -> Tensor:
        q, k, v = (
            one.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for one in self.qkv(x).chunk(3, -1)
        )
        mask = self.mask[: x.shape[1], : x.shape[1]] if self.cut else self.mask
        weights = torch.softmax(q @ k.mT / q.shape[-1] ** 0.5 + mask, dim=-1)
        return (weights @ v).transpose(1, 2).flatten(2)


class Cut(Uncut):
    cut = True


@pytest.mark.parametrize(
    ("kind", "rule", "said"),
    [
        (NormedOverTime, "causality", "something else brings tokens together"),
        (Kept, "causality", "keeps keys"),
        (Uncut, "runs", "must match the size"),
    ],
)
def test_what_is_wrong(kind: type[nn.Module], rule: str, said: str) -> None:
    first = check(kind).findings[0]
    assert (first.rule, first.severity) == (rule, "error")
    assert said in first.message


@pytest.mark.parametrize("kind", [Causal, KeptAndCausal, KeptWithMasks, Cut])
def test_what_is_right(kind: type[nn.Module]) -> None:
    verdict = check(kind)
    assert verdict.passed, verdict


class Repeated(nn.Module):
    """Keys that are repeated as often as there are groups of them: right for 4 heads in 2."""

    times = "groups"

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.heads, self.groups = config.num_attention_heads, config.num_key_value_heads
        self.wide = config.hidden_size // self.heads
        self.q = nn.Linear(config.hidden_size, self.heads * self.wide)
        self.k, self.v = (nn.Linear(config.hidden_size, self.groups * self.wide) for _ in "kv")
        self.o = nn.Linear(self.heads * self.wide, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            f(x).unflatten(-1, (-1, self.wide)).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        times = self.groups if self.times == "groups" else self.heads // self.groups
        k, v = (one.repeat_interleave(times, dim=1) for one in (k, v))
        weights = (q @ k.mT / self.wide**0.5).softmax(-1)
        return self.o((weights @ v).transpose(1, 2).flatten(2))


class RepeatedRight(Repeated):
    times = "heads"


def test_sizes_by_which_a_wrong_repeat_fits() -> None:
    assert not check(Repeated).passed
    assert check(RepeatedRight).passed


class CausalByName(nn.Module):
    """Hides nothing itself; a mask may."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        """x is [bs, seq_len, width], and attention_mask [bs, 1, 1, seq_len]."""
        q, k, v = (
            one.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for one in self.qkv(x).chunk(3, -1)
        )
        scores = q @ k.mT / q.shape[-1] ** 0.5 + attention_mask
        return self.out((torch.softmax(scores, dim=-1) @ v).transpose(1, 2).flatten(2))


class CausalByItsMask(CausalByName):
    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        """x is [bs, seq_len, width], and attention_mask [bs, 1, seq_len, seq_len]."""
        return super().forward(x, attention_mask)


def test_a_flag_for_every_key_hides_no_later_token() -> None:
    (found,) = check(CausalByName, 24, 3).errors
    assert found.rule == "causality"
    assert "written to be [bs, 1, 1, seq_len]" in found.message
    assert check(CausalByItsMask, 24, 3).passed

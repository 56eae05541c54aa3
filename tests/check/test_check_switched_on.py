"""Rotary positions that an option switches on, and positions that a call may be given."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from headwise.check import check
from headwise.check.probes.switched_on import SWITCHES


class RotaryPositions(nn.Module):
    """Rows of `[T, D / 2]`; `per_sequence` gives those of `[B, T]` an axis for the heads."""

    per_sequence = True

    def __init__(self, theta: float, d_k: int, max_seq_len: int) -> None:
        super().__init__()
        angles = torch.arange(max_seq_len)[:, None] * theta ** -(torch.arange(0, d_k, 2) / d_k)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        cos, sin = self.cos[positions].to(x), self.sin[positions].to(x)
        if self.per_sequence and positions.ndim > 1:
            cos, sin = cos[:, None], sin[:, None]
        one, two = x[..., ::2], x[..., 1::2]
        return torch.stack((one * cos - two * sin, one * sin + two * cos), -1).flatten(-2)


class Astray(RotaryPositions):
    per_sequence = False


class Attention(nn.Module):
    """Turned where a length and a base are given."""

    kind: type[RotaryPositions] = RotaryPositions
    crossed = False

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        max_seq_len: int | None = None,
        theta: float | None = None,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q, self.k, self.v, self.o = (nn.Linear(d_model, d_model) for _ in range(4))
        self.rope: RotaryPositions | None = None
        if max_seq_len is not None and theta is not None:
            self.rope = self.kind(theta, d_model // num_heads, max_seq_len)

    def forward(self, x: Tensor, token_positions: Tensor | None = None) -> Tensor:
        """token_positions: [batch, seq]"""
        q, k, v = (
            f(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for f in (self.q, self.k, self.v)
        )
        if self.rope is not None:
            if token_positions is None:
                token_positions = torch.arange(x.shape[1], device=x.device)
            q, k = self.rope(q, token_positions), self.rope(k, token_positions)
            q, k = (k, q) if self.crossed else (q, k)
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        return self.o((weights @ v).transpose(1, 2).flatten(2))


class OfNoSequence(Attention):
    kind = Astray


class Crossed(Attention):
    crossed = True


class Handed(Attention):
    """Turned by a module that is handed in."""

    def __init__(self, d_model: int, num_heads: int, rope: RotaryPositions | None = None) -> None:
        super().__init__(d_model, num_heads)
        self.rope = rope


class HandedAstray(Attention):
    def __init__(self, d_model: int, num_heads: int, rope: Astray | None = None) -> None:
        super().__init__(d_model, num_heads)
        self.rope = rope


class Switched(Attention):
    early = True

    def __init__(self, d_model: int, num_heads: int, use_rope: bool = False) -> None:
        super().__init__(d_model, num_heads, 64 * use_rope or None, 1e4 * use_rope or None)

    def forward(self, x: Tensor) -> Tensor:
        if self.early:
            return super().forward(x)
        rope, self.rope = self.rope, None
        out = super().forward(x)
        self.rope = rope
        return out


class Unheard(Switched):
    early = False


@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        (OfNoSequence, "rotary"),
        (Crossed, "roles"),
        (HandedAstray, "rotary"),
        (Unheard, "rotary"),
    ],
)
def test_what_an_option_switches_on(kind: type[nn.Module], rule: str) -> None:
    first = check(kind).findings[0]
    assert (first.rule, first.severity) == (rule, "error")
    assert first.message.startswith("With ")


@pytest.mark.parametrize("kind", [Attention, Handed, Switched])
def test_what_is_right(kind: type[nn.Module]) -> None:
    verdict = check(kind)
    assert verdict.passed, verdict


class Needed(Attention):
    """Its own positions do not fit, as it lays them along the heads."""

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__(d_model, num_heads, 64, 1e4)

    def forward(self, x: Tensor, position_ids: Tensor | None = None) -> Tensor:
        q, k, v = (
            f(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for f in (self.q, self.k, self.v)
        )
        assert self.rope is not None
        cos, sin = (table[: x.shape[1]].to(x) for table in (self.rope.cos, self.rope.sin))
        if position_ids is not None:
            cos, sin = cos[position_ids], sin[position_ids]
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        turned = []
        for rows in (q, k):
            one, two = rows.chunk(2, -1)
            turned.append(torch.cat((one * cos - two * sin, one * sin + two * cos), -1))
        weights = (turned[0] @ turned[1].mT / q.shape[-1] ** 0.5).softmax(-1)
        return self.o((weights @ v).transpose(1, 2).flatten(2))


def test_positions_without_which_nothing_fits() -> None:
    first = check(Needed).findings[0]
    assert (first.rule, "None by default" in first.message) == ("rotary", True)


class Backends(Attention):
    """One of two words, told apart by `match`."""

    def __init__(self, d_model: int, num_heads: int, backend: str) -> None:
        super().__init__(d_model, num_heads)
        match backend:
            case "base":
                self.attend = super().forward
            case "other":
                self.attend = super().forward

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x)


def test_words_that_cases_tell() -> None:
    assert check(Backends).passed


class Projected(nn.Module):
    """Positions for relative scores that are cut into heads by a view; `rows`: with one for each
    token."""

    rows = False

    def __init__(self, encoder_dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads, self.d_k = num_heads, encoder_dim // num_heads
        self.q, self.k, self.v, self.p, self.o = (
            nn.Linear(encoder_dim, encoder_dim) for _ in range(5)
        )

    def forward(self, query: Tensor, key: Tensor, value: Tensor, pos_embed: Tensor) -> Tensor:
        batch = query.size(0)
        q, k, v = (
            f(x).view(batch, -1, self.num_heads, self.d_k).transpose(1, 2)
            for f, x in ((self.q, query), (self.k, key), (self.v, value))
        )
        tokens = -1 if self.rows else 1
        p = self.p(pos_embed).view(batch, tokens, self.num_heads, self.d_k).transpose(1, 2)
        weights = ((q @ k.mT + q @ p.mT) / self.d_k**0.5).softmax(-1)
        return self.o((weights @ v).transpose(1, 2).reshape(batch, -1, self.num_heads * self.d_k))


class WithRows(Projected):
    rows = True


def test_positions_that_are_the_same_for_all_keys() -> None:
    assert check(Projected).findings[0].rule == "relative"
    assert check(WithRows).passed


@pytest.mark.parametrize(
    ("name", "switches"),
    [
        ("use_rope", True),
        ("rotary_emb", True),
        ("with_rotary_embeddings", True),
        ("rotary_emb_interleaved", False),
        ("rope_scaling", False),
        ("property", False),
    ],
)
def test_names_of_flags_that_switch_them_on(name: str, switches: bool) -> None:
    assert (SWITCHES.search(name) is not None) == switches

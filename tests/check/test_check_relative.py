"""Relative positions of a layer's own: right in many styles, and with one mistake each."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.check.findings.verdict import Finding
from headwise.check.probes import run
from headwise.check.target.resolve import resolve


class Base(nn.Module):
    """Attention of several heads; what positions add to the scores is told by `added`."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.heads, self.width = num_heads, dim // num_heads
        self.to_q, self.to_k, self.to_v = (nn.Linear(dim, dim) for _ in "qkv")
        self.to_out = nn.Linear(dim, dim)

    def split(self, rows: Tensor) -> Tensor:
        return rows.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def added(self, q: Tensor, k: Tensor, *given: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x)

    def attend(self, x: Tensor, *given: Tensor, hidden: Tensor | None = None) -> Tensor:
        q, k, v = (self.split(part(x)) for part in (self.to_q, self.to_k, self.to_v))
        scores = (q @ k.mT + self.added(q, k, *given)) / math.sqrt(self.width)
        if hidden is not None:
            scores = scores.masked_fill(hidden, -torch.inf)
        return self.to_out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


# --- by shifting ----------------------------------------------------------------------------------


class Shifted(Base):
    """Takes the rows of all 2T - 1 distances, the largest first."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__(dim, num_heads)
        self.linear_pos = nn.Linear(dim, dim, bias=False)
        self.pos_bias_v = nn.Parameter(torch.zeros(num_heads, 1, self.width))

    def rel_shift(self, scores: Tensor) -> Tensor:
        *lead, tokens, distances = scores.shape
        scores = F.pad(scores, (1, 0)).view(*lead, distances + 1, tokens)[..., 1:, :]
        return scores.reshape(*lead, tokens, distances)[..., :tokens]

    def added(self, q: Tensor, k: Tensor, *given: Tensor) -> Tensor:
        return self.rel_shift((q + self.pos_bias_v) @ self.split(self.linear_pos(given[0])).mT)

    def forward(self, x: Tensor, pos_emb: Tensor) -> Tensor:  # type: ignore[override]
        return self.attend(x, pos_emb)


class PaddedBehind(Shifted):
    def rel_shift(self, scores: Tensor) -> Tensor:
        batch, heads, tokens, _ = scores.shape
        scores = F.pad(scores, (0, 1)).view(batch, heads, 2 * tokens, tokens)
        return scores[:, :, tokens:]


class ShiftLeftOut(Shifted):
    """Chooses to use one row a key, as some do on purpose."""

    does_shift = False

    def added(self, q: Tensor, k: Tensor, *given: Tensor) -> Tensor:
        scores = (q + self.pos_bias_v) @ self.split(self.linear_pos(given[0])).mT
        return self.rel_shift(scores) if self.does_shift else scores


class ForEarlierKeys(Base):
    """Makes one row a token, and shifts them as is right where later keys are hidden."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__(dim, num_heads)
        self.pos_proj = nn.Linear(dim, dim)

    def _relative_shift(self, scores: Tensor) -> Tensor:
        *lead, tokens, keys = scores.shape
        moved = F.pad(scores, (1, 0)).view(*lead, keys + 1, tokens)
        return moved[..., 1:, :].reshape(scores.shape)

    def added(self, q: Tensor, k: Tensor, *given: Tensor) -> Tensor:
        tokens, dim = q.shape[2], self.heads * self.width
        places = torch.arange(tokens - 1, -1, -1, dtype=q.dtype)[:, None]
        angles = places * 10000 ** (-torch.arange(0, dim, 2, dtype=q.dtype) / dim)
        table = torch.cat((angles.sin(), angles.cos()), -1)
        return self._relative_shift(q @ self.split(self.pos_proj(table)[None]).mT)


class ForEarlierKeysCausal(ForEarlierKeys):
    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x, hidden=torch.ones(x.shape[1], x.shape[1]).triu(1).bool())


class ForEarlierKeysPadded(ForEarlierKeys):
    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
        hidden = None if padding_mask is None else padding_mask[:, None, None].bool()
        return self.attend(x, hidden=hidden)


class Skewed(Base):
    """A row for each distance to earlier keys, as in the Music Transformer."""

    def __init__(self, dim: int, num_heads: int, max_len: int = 16) -> None:
        super().__init__(dim, num_heads)
        self.Er = nn.Parameter(torch.randn(max_len, self.width))

    def skew(self, scores: Tensor) -> Tensor:
        *lead, tokens, _ = scores.shape
        return F.pad(scores, (1, 0)).reshape(*lead, tokens + 1, tokens)[..., 1:, :]

    def added(self, q: Tensor, k: Tensor, *given: Tensor) -> Tensor:
        return self.skew(q @ self.Er[-q.shape[2] :].mT)

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x, hidden=torch.ones(x.shape[1], x.shape[1]).triu(1).bool())


class SkewedTheOtherWay(Skewed):
    def skew(self, scores: Tensor) -> Tensor:
        *lead, tokens, _ = scores.shape
        return F.pad(scores, (0, 1)).reshape(*lead, tokens + 1, tokens)[..., :-1, :]


# --- by looking up --------------------------------------------------------------------------------


class RelativePairs(Base):
    """Takes a row for each pair of tokens."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__(dim, num_heads)
        self.linear_pos = nn.Linear(dim, dim, bias=False)

    def against(self, q: Tensor, table: Tensor) -> Tensor:
        return (q.unsqueeze(-2) * table).sum(-1)

    def added(self, q: Tensor, k: Tensor, *given: Tensor) -> Tensor:
        table = self.linear_pos(given[0]).unflatten(-1, (self.heads, -1)).permute(2, 0, 1, 3)
        return self.against(q, table)

    def forward(self, x: Tensor, position_embeddings: Tensor) -> Tensor:  # type: ignore[override]
        return self.attend(x, position_embeddings)


class RelativePairsByKeys(RelativePairs):
    def against(self, q: Tensor, table: Tensor) -> Tensor:
        return (q.unsqueeze(-3) * table).sum(-1)


class RelativeKeys(Base):
    """A learned key for each distance, up to 4."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__(dim, num_heads)
        self.rel_keys = nn.Embedding(9, self.width)

    def rows(self, tokens: int) -> Tensor:
        places = torch.arange(tokens)
        return self.rel_keys((places[:, None] - places).clamp(-4, 4) + 4)

    def added(self, q: Tensor, k: Tensor, *given: Tensor) -> Tensor:
        return torch.einsum("bhid,ijd->bhij", q, self.rows(q.shape[2]))


class RelativeKeysOfKeys(RelativeKeys):
    def added(self, q: Tensor, k: Tensor, *given: Tensor) -> Tensor:
        return torch.einsum("bhjd,ijd->bhij", q, self.rows(q.shape[2]))


class PositionsToContent(RelativeKeys):
    """Keys are multiplied with positions, as one of DeBERTa's terms is."""

    def added(self, q: Tensor, k: Tensor, *given: Tensor) -> Tensor:
        return torch.einsum("bhjd,ijd->bhij", k, self.rows(q.shape[2]))


class Sums(RelativeKeys):
    def rows(self, tokens: int) -> Tensor:
        places = torch.arange(tokens)
        return self.rel_keys((places[:, None] + places).clamp(max=8))


class WithAbsolute(RelativeKeys):
    """Knows where each token stands, too."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__(dim, num_heads)
        self.wpe = nn.Embedding(16, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x + self.wpe(torch.arange(x.shape[1])))


class FirstApart(RelativeKeys):
    """The first token stands for the whole, and at no distance."""

    def rows(self, tokens: int) -> Tensor:
        rows = super().rows(tokens).clone()
        rows[0], rows[:, 0] = 0.5, 0.25
        return rows


class Points(Base):
    """Tokens are points, and positions their places in space."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__(dim, num_heads)
        self.rel_mlp = nn.Linear(dim, num_heads)

    def added(self, q: Tensor, k: Tensor, *given: Tensor) -> Tensor:
        away = given[0][:, :, None] - given[0][:, None]
        return self.rel_mlp(away).permute(0, 3, 1, 2)

    def forward(self, x: Tensor, coordinates: Tensor) -> Tensor:  # type: ignore[override]
        return self.attend(x, coordinates.expand_as(x))


class ALiBi(Base):
    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__(dim, num_heads)
        self.register_buffer("alibi_slopes", 2.0 ** -torch.arange(1, num_heads + 1))

    def away(self, tokens: int) -> Tensor:
        return (torch.arange(tokens)[:, None] - torch.arange(tokens)).abs()

    def added(self, q: Tensor, k: Tensor, *given: Tensor) -> Tensor:
        slopes: Any = self.alibi_slopes
        return -slopes[:, None, None] * self.away(q.shape[2])


class ALiBiByRank(ALiBi):
    def away(self, tokens: int) -> Tensor:
        return (torch.arange(tokens)[:, None] * torch.arange(tokens)).abs()


# --- windows --------------------------------------------------------------------------------------


class Window(Base):
    """A window of rows and columns, with a table of biases by their differences."""

    def __init__(self, dim: int, window_size: tuple[int, int], num_heads: int) -> None:
        super().__init__(dim, num_heads)
        rows = math.prod(2 * side - 1 for side in window_size)
        self.relative_position_bias_table = nn.Parameter(torch.zeros(rows, num_heads))
        places = torch.stack(torch.meshgrid(*map(torch.arange, window_size), indexing="ij"))
        away = (places.flatten(1)[:, :, None] - places.flatten(1)[:, None]).permute(1, 2, 0)
        away = away + torch.tensor(window_size) - 1
        index = (away * torch.tensor(self.strides(*window_size))).sum(-1)
        self.register_buffer("relative_position_index", index, persistent=False)

    def strides(self, *sides: int) -> list[int]:
        return [2 * sides[1] - 1, 1]

    def added(self, q: Tensor, k: Tensor, *given: Tensor) -> Tensor:
        index: Any = self.relative_position_index
        return self.relative_position_bias_table[index].permute(2, 0, 1)


class WindowOfOneStride(Window):
    def strides(self, *sides: int) -> list[int]:
        return [2, 1]


class SquareWindow(Window):
    """Is right where windows are as wide as high, which is what it is for."""

    def strides(self, *sides: int) -> list[int]:
        return [2 * sides[0] - 1, 1]


class Room(Window):
    def __init__(self, dim: int, window_size: tuple[int, int, int], num_heads: int) -> None:
        super().__init__(dim, window_size, num_heads)  # type: ignore[arg-type]

    def strides(self, *sides: int) -> list[int]:
        return [(2 * sides[1] - 1) * (2 * sides[2] - 1), 2 * sides[2] - 1, 1]


class RoomOfSmallStrides(Room):
    def strides(self, *sides: int) -> list[int]:
        return [3 * sides[1] - 1, 2 * sides[1] - 1, 1]


class WindowByColumns(Window):
    """Its tokens are numbered in another order than the index has them."""

    def added(self, q: Tensor, k: Tensor, *given: Tensor) -> Tensor:
        return super().added(q, k).roll(1, -1)


@functools.cache
def said(layer: type[nn.Module]) -> list[Finding]:
    return [one for one in run(resolve(layer)) if one.rule == "relative"]


@pytest.mark.parametrize(
    "layer",
    [
        Shifted,
        ForEarlierKeysCausal,
        Skewed,
        RelativePairs,
        RelativeKeys,
        PositionsToContent,
        FirstApart,
        ALiBi,
        Window,
        Room,
    ],
)
def test_right_positions_pass(layer: type[nn.Module]) -> None:
    assert [one.severity for one in said(layer)] == ["passed"], said(layer)


@pytest.mark.parametrize("layer", [ShiftLeftOut, WithAbsolute, Points, SquareWindow])
def test_what_others_mean_is_let_be(layer: type[nn.Module]) -> None:
    assert not [one for one in said(layer) if one.severity in ("error", "warning")]


@pytest.mark.parametrize(
    ("layer", "severity", "words"),
    [
        (PaddedBehind, "error", "another score for key"),
        (SkewedTheOtherWay, "error", "query 2 for key 0 is made of token 1"),
        (Sums, "error", "another score for key"),
        (ALiBiByRank, "error", "another score for key"),
        (WindowByColumns, "error", "another score for key"),
        (ForEarlierKeys, "error", "query 0 for key 2 is made of token 1, which is neither"),
        (ForEarlierKeysPadded, "warning", "right for earlier keys only"),
        (RelativePairsByKeys, "error", "the query of token 1"),
        (RelativeKeysOfKeys, "error", "the query of token 1"),
        (WindowOfOneStride, "error", "different differences share one"),
        (RoomOfSmallStrides, "error", "different differences share one"),
    ],
)
def test_wrong_positions_are_found(layer: type[nn.Module], severity: str, words: str) -> None:
    assert [one.severity for one in said(layer)] == [severity], said(layer)
    assert words in said(layer)[0].message
    assert said(layer)[0].hint
    assert said(layer)[0].ground == "any"

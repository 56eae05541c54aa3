"""Layers that are right in a way of their own, beside the mistakes that they look like."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headwise.check import check


class Base(nn.Module):
    """Projections, a split by hand and the textbook's weights; subclasses say how it is called."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(dim, dim) for _ in range(4))

    def attend(self, x: Tensor, source: Tensor, hidden: Tensor | None = None) -> Tensor:
        q, k, v = (
            rows.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for rows in (self.to_q(x), self.to_k(source), self.to_v(source))
        )
        scores = q @ k.mT / q.shape[-1] ** 0.5
        scores = scores if hidden is None else scores.masked_fill(hidden, -torch.inf)
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


class ForAnotherWidth(Base):
    """Uses another sequence only where it was built with that sequence's width."""

    def __init__(self, dim: int, heads: int, dim_context: int | None = None) -> None:
        super().__init__(dim, heads)
        self.other = dim_context is not None

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        if not self.other or context is None:
            context = x
        return self.to_out(self.attend(x, context))


class Deaf(Base):
    """Never uses the other sequence, however it is built."""

    def __init__(self, dim: int, heads: int, dim_context: int | None = None) -> None:
        super().__init__(dim, heads)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        return self.to_out(self.attend(x, x))


class QueriesOfTheSecond(Base):
    """Of (x, y), keys and values are made of x; both are of one length."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.to_out(self.attend(y, x).view(x.shape))


class KeysOfTheQueries(Base):
    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        return self.to_out(self.attend(context, x).view(x.shape))


class OfOneSequence(Base):
    """Takes q, k and v apart, and says that they are of one sequence."""

    is_causal = True

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, heads)
        self.is_causal = True

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        shape = (*q.shape[:2], self.heads, -1)
        queries, keys, values = (
            to(rows).view(shape).transpose(1, 2)
            for to, rows in ((self.to_q, q), (self.to_k, k), (self.to_v, v))
        )
        scores = queries @ keys.mT / queries.shape[-1] ** 0.5
        scores = scores if mask is None else scores + mask
        return self.to_out((scores.softmax(-1) @ values).transpose(1, 2).flatten(2))


class OptionalTable(Base):
    """Rotates only where it was told to, and takes tables in any case."""

    def forward(self, x: Tensor, position_embeddings: Tensor | None = None) -> Tensor:
        return self.to_out(self.attend(x, x))


class NormInside(Base):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, heads)
        self.inner_norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.to_out(self.inner_norm(self.attend(x, x)))


class HeadsUnderAnotherName(Base):
    """`head_size` is how many heads there are."""

    def __init__(self, hidden_size: int, head_size: int = 4) -> None:
        super().__init__(hidden_size, head_size)
        self.head_size = self.__dict__.pop("heads")

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            to(x).unflatten(-1, (self.head_size, -1)).transpose(1, 2)
            for to in (self.to_q, self.to_k, self.to_v)
        )
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        return self.to_out((weights @ v).transpose(1, 2).flatten(2))


class Scores(nn.Module):
    """What a layer is given as its attention inside."""

    def __init__(self, scale: float | None = None) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scale = q.shape[-1] ** -0.5 if self.scale is None else self.scale
        return (scale * q @ k.mT).softmax(-1) @ v


class InnerAttention(Scores):
    """The name by which it is found."""


class GivenItsAttention(Base):
    def __init__(self, attention: nn.Module, dim: int, heads: int, log_weights: bool) -> None:
        super().__init__(dim, heads)
        self.inner, self.log_weights = attention, log_weights

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            to(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for to in (self.to_q, self.to_k, self.to_v)
        )
        return self.to_out(self.inner(q, k, v).transpose(1, 2).flatten(2))


class Between(Base):
    """Its queries come second, lengths must be said, and a residual is handed in."""

    def forward(
        self, memory: Tensor, decoder_input: Tensor, lengths: Tensor, residual: Tensor
    ) -> Tensor:
        hidden = torch.arange(memory.shape[1], device=memory.device) >= lengths[:, None]
        return residual + self.to_out(self.attend(decoder_input, memory, hidden[:, None, None]))


class Convolved(nn.Module):
    """Convolutions of width 1, and a mask of −10000."""

    def __init__(self, channels: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.q, self.k, self.v, self.o = (nn.Conv1d(channels, channels, 1) for _ in range(4))

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        q, k, v = (part(x).unflatten(1, (self.n_heads, -1)).mT for part in (self.q, self.k, self.v))
        scores = q @ k.mT / q.shape[-1] ** 0.5
        scores = scores if attn_mask is None else scores.masked_fill(attn_mask == 0, -1e4)
        return self.o((scores.softmax(-1) @ v).mT.flatten(1, 2))


class Lazy(Base):
    """Its projections learn their widths from the first call."""

    def __init__(self, num_hiddens: int, num_heads: int) -> None:
        super().__init__(num_hiddens, num_heads)
        self.to_q, self.to_k, self.to_v = (nn.LazyLinear(num_hiddens) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.to_out(self.attend(x, x))


class Built(Base):
    """`kv_dim` is the width of keys, not of what they are made of."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, heads)
        self.kv_dim = dim // heads

    def forward(self, x: Tensor) -> Tensor:
        return self.to_out(self.attend(x, x))


class BesideItsInput(Base):
    """The output projection reads the input as well."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, heads)
        self.to_out = nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.to_out(torch.cat((x, self.attend(x, x)), -1))


class MaskOfAnotherClass(Base):
    """What it takes as a mask holds a tensor."""

    def forward(self, x: Tensor, attn_mask: Any = None) -> Tensor:
        hidden = None if attn_mask is None else attn_mask.hides
        return self.to_out(self.attend(x, x, hidden))


class TwoAxes(Base):
    """Each half of a head is turned by its own half of the tables."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (
            to(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for to in (self.to_q, self.to_k, self.to_v)
        )
        q, k = (self.turned(rows, cos, sin) for rows in (q, k))
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        return self.to_out((weights @ v).transpose(1, 2).flatten(2))

    def turned(self, rows: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        halves = zip(rows.chunk(2, -1), cos.chunk(2, -1), sin.chunk(2, -1), strict=True)
        return torch.cat([one * c + half(one) * s for one, c, s in halves], -1)


def half(rows: Tensor) -> Tensor:
    first, second = rows.chunk(2, -1)
    return torch.cat((-second, first), -1)


class RelativeToTheEnd(Base):
    """Adds scores of distances, whose table is read from its end."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, heads)
        self.to_pos = nn.Linear(dim, heads)

    def forward(self, x: Tensor, pos_embedding: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (
            to(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for to in (self.to_q, self.to_k, self.to_v)
        )
        i = torch.arange(x.shape[1])
        far = (len(i) - 1 - i[:, None] + i).clamp(0, len(i) - 1)
        added = self.to_pos(pos_embedding)[:, far].permute(0, 3, 1, 2)
        scores = (q @ k.mT + added) / q.shape[-1] ** 0.5
        scores = scores if mask is None else scores.masked_fill(mask, -torch.inf)
        return self.to_out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    "layer",
    [
        ForAnotherWidth,
        QueriesOfTheSecond,
        OfOneSequence,
        OptionalTable,
        NormInside,
        HeadsUnderAnotherName,
        TwoAxes,
        RelativeToTheEnd,
        GivenItsAttention,
        Between,
        Convolved,
        BesideItsInput,
        Built,
        Lazy,
        MaskOfAnotherClass,
    ],
)
def test_a_way_of_its_own_is_no_mistake(layer: type[nn.Module]) -> None:
    verdict = check(layer)
    assert verdict.passed, str(verdict)


def test_tables_of_two_axes_make_order_count() -> None:
    verdict = check(TwoAxes)
    assert not verdict.findings, str(verdict)
    assert verdict["rotary"].severity == "passed"


def test_other_heads_and_a_norm_inside_are_read() -> None:
    for layer in (NormInside, HeadsUnderAnotherName):
        assert check(layer)["definition"].severity == "passed"


@pytest.mark.parametrize("layer", [Deaf, KeysOfTheQueries])
def test_another_sequence_that_is_not_used_is_one(layer: type[nn.Module]) -> None:
    assert check(layer).errors[0].rule == "cross"


class MasksInTurns(Base):
    """Heads lie before the batch in its scores; its masks are repeated batch first."""

    right = False

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, tokens, _ = x.shape
        q, k, v = (
            to(x).unflatten(-1, (self.heads, -1)).permute(2, 0, 1, 3).flatten(0, 1)
            for to in (self.to_q, self.to_k, self.to_v)
        )
        scores = torch.bmm(q, k.mT) / q.shape[-1] ** 0.5
        if mask is not None:
            rows = (
                mask.repeat(self.heads, 1, 1)
                if self.right
                else mask.repeat_interleave(self.heads, 0)
            )
            scores = scores.masked_fill(rows, -torch.inf)
        heads = torch.bmm(scores.softmax(-1), v).view(self.heads, batch, tokens, -1)
        return self.to_out(heads.permute(1, 2, 0, 3).flatten(2))


class MasksInOrder(MasksInTurns):
    right = True


def test_masks_of_one_sequence_that_reach_another() -> None:
    first = check(MasksInTurns).errors[0]
    assert first.rule == "padding"
    assert "other sequences or heads" in first.message
    assert check(MasksInOrder).passed


class KeepsWhatWas(nn.Module):
    """Causal, with a cache of its own; its mask speaks of the new tokens alone."""

    whole = False

    def __init__(self, d_in: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.W_qkv, self.W_o = nn.Linear(d_in, 3 * d_in), nn.Linear(d_in, d_in)
        self.kept: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor, use_cache: bool = False) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for part in self.W_qkv(x).chunk(3, -1)
        )
        if use_cache:
            if self.kept is not None:
                k, v = (torch.cat(pair, 2) for pair in zip(self.kept, (k, v), strict=True))
            self.kept = (k, v)
        keys = k.shape[2] if self.whole else x.shape[1]
        ones = torch.ones(x.shape[1], keys, dtype=torch.bool, device=x.device)
        later = ones.triu(1 + keys - x.shape[1])
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(later, -torch.inf)
        return self.W_o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class KeepsWhatWasRightly(KeepsWhatWas):
    whole = True


def test_a_cache_of_its_own_that_refuses_chunks() -> None:
    first = check(KeepsWhatWas).errors[0]
    assert first.rule == "cache"
    assert "a chunk of 2 fails" in first.message
    assert check(KeepsWhatWasRightly)["cache"].severity == "passed"

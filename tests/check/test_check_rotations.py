"""Rotations that are none: a sign that is lost, a half on the wrong side, tables of other pairs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from headwise import check


def rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def rotate_half_unsigned(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((second, first), -1)


def rotate_half_aside(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((first, -second), -1)


def rotate_half_back(x: Tensor) -> Tensor:
    """The other way round, which is a rotation as well."""
    first, second = x.chunk(2, -1)
    return torch.cat((second, -first), -1)


class Attention(nn.Module):
    """Attention without a mask, whose queries and keys are turned, or not, by tables from outside
    or its own."""

    half = staticmethod(rotate_half)
    interleaved = False

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q_proj, self.k_proj, self.v_proj, self.out = (nn.Linear(dim, dim) for _ in range(4))

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))

    def table(self, tokens: int, dim: int) -> Tensor:
        angle = torch.arange(tokens)[:, None] / 100.0 ** (torch.arange(0, dim, 2) / dim)
        return angle.repeat_interleave(2, -1) if self.interleaved else angle.repeat(1, 2)

    def apply_rotary(self, x: Tensor) -> Tensor:
        angle = self.table(*x.shape[-2:]).to(x)
        return x * angle.cos() + type(self).half(x) * angle.sin()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split(part(x)) for part in (self.q_proj, self.k_proj, self.v_proj))
        return self.attend(self.apply_rotary(q), self.apply_rotary(k), v)


class Back(Attention):
    half = staticmethod(rotate_half_back)


class Interleaved(Attention):
    """Its tables hold pairs of neighbours, and it turns halves."""

    interleaved = True


class Unsigned(Attention):
    half = staticmethod(rotate_half_unsigned)


class Aside(Attention):
    half = staticmethod(rotate_half_aside)


@pytest.mark.parametrize("kind", [Attention, Back])
def test_rotations_either_way_are_rotations(kind: type[Attention]) -> None:
    verdict = check(kind, dim=24, num_heads=3)
    assert verdict.passed


@pytest.mark.parametrize("kind", [Unsigned, Aside])
def test_a_half_turn_that_is_its_own_inverse(kind: type[Attention]) -> None:
    verdict = check(kind, dim=24, num_heads=3)
    assert verdict.errors[0].rule == "rotation"
    assert "gives vectors of other lengths" in verdict.errors[0].message


def test_tables_of_other_pairs_than_are_turned() -> None:
    verdict = check(Interleaved, dim=24, num_heads=3)
    assert verdict.errors[0].rule == "rotation"
    assert "def apply_rotary" in verdict.errors[0].hint


class Optional(Attention):
    """It turns only where somebody hands in angles, which the check does not."""

    def forward(self, x: Tensor, angles: Tensor | None = None) -> Tensor:
        q, k, v = (self.split(part(x)) for part in (self.q_proj, self.k_proj, self.v_proj))
        if angles is not None:
            q, k = (self.turned(one, angles) for one in (q, k))
        return self.attend(q, k, v)

    def turned(self, x: Tensor, angles: Tensor) -> Tensor:
        return x * angles.cos() + rotate_half(x) * angles.sin()


class OptionalUnsigned(Optional):
    def turned(self, x: Tensor, angles: Tensor) -> Tensor:
        return x * angles.cos() + rotate_half_unsigned(x) * angles.sin()


def test_a_half_turn_on_a_path_that_is_not_taken_is_tried_by_itself() -> None:
    assert check(Optional, dim=24, num_heads=3).passed
    verdict = check(OptionalUnsigned, dim=24, num_heads=3)
    assert verdict.errors[0].rule == "rotation"
    assert "Done twice, rotate_half_unsigned gives back what went in" in verdict.errors[0].message


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + rotate_half(x) * sin


def apply_rope_aside(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((first, -second), -1) * sin


class Handed(Attention):
    """Its tables come from outside."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (self.split(part(x)) for part in (self.q_proj, self.k_proj, self.v_proj))
        return self.attend(apply_rope(q, cos, sin), apply_rope(k, cos, sin), v)


class HandedAside(Handed):
    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (self.split(part(x)) for part in (self.q_proj, self.k_proj, self.v_proj))
        return self.attend(apply_rope_aside(q, cos, sin), apply_rope_aside(k, cos, sin), v)


def test_with_tables_from_outside_no_table_makes_it_a_rotation() -> None:
    assert check(Handed, dim=24, num_heads=3).passed
    verdict = check(HandedAside, dim=24, num_heads=3)
    assert "rotation" in [one.rule for one in verdict.errors]


class Scaled(Attention):
    """Turned, and made longer by one number for all, as YaRN does."""

    def apply_rotary(self, x: Tensor) -> Tensor:
        return 1.1 * super().apply_rotary(x)


def test_one_number_for_all_tokens_is_no_stretching() -> None:
    assert "rotation" not in [one.rule for one in check(Scaled, dim=24, num_heads=3).errors]


class RopeBehindAGate(Attention):
    """A layer of its own that is called as a rotation is; its forward turns nothing."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__(dim, num_heads)
        self.gate = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gate(x).sigmoid()


def test_a_layer_that_is_named_after_a_rotation_is_none() -> None:
    assert check(RopeBehindAGate, dim=24, num_heads=3).passed


class ByHeads(Attention):
    """Each head is turned by its place among the heads."""

    def apply_rotary(self, x: Tensor) -> Tensor:
        return super().apply_rotary(x.transpose(1, 2)).transpose(1, 2)


class ByHeadsAndGated(ByHeads):
    """The same where the weights cannot be read."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh()


@pytest.mark.parametrize("kind", [ByHeads, ByHeadsAndGated])
def test_heads_that_are_turned_for_nothing(kind: type[Attention]) -> None:
    (one,) = check(kind, dim=24, num_heads=3).errors
    assert one.message.startswith("apply_rotary turns queries and keys, and in whatever order")
    assert "def apply_rotary" in one.hint

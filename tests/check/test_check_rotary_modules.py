"""Rotary positions by themselves, and other parts of a model that are no attention."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from headwise import check


class Rotary(nn.Module):
    """Neighbours (2i, 2i + 1) of [B, T, H, D] turned by one angle."""

    def __init__(self, head_dim: int, base: float = 10000.0) -> None:
        super().__init__()
        self.register_buffer("freqs", base ** (-torch.arange(0, head_dim, 2) / head_dim))

    def angles(self, tokens: int) -> Tensor:
        places = torch.arange(tokens, device=self.freqs.device)
        return torch.outer(places, self.freqs).repeat_interleave(2, -1)[:, None]

    def forward(self, x: Tensor) -> Tensor:
        angles = self.angles(x.shape[1])
        turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
        return x * angles.cos() + turned * angles.sin()


class CountedRotary(Rotary):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class RotaryByName(nn.Module):
    """Without a forward."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.rotary = Rotary(dim)

    def apply_rotary(self, x: Tensor) -> Tensor:
        return self.rotary(x)


class RotaryByNames(nn.Module):
    """With two, of which either may be meant."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.rotary = Rotary(dim)

    def apply_to_queries(self, x: Tensor) -> Tensor:
        return self.rotary(x)

    def apply_to_keys(self, x: Tensor) -> Tensor:
        return self.rotary(-x)


class RotaryOfMaps(Rotary):
    def angles(self, tokens: int) -> Tensor:
        height = 1
        return super().angles(tokens // height)


class RotaryOfOtherPairs(Rotary):
    def angles(self, tokens: int) -> Tensor:
        angles = torch.outer(torch.arange(tokens, device=self.freqs.device), self.freqs)
        return torch.cat((angles, angles), -1)[:, None]


class RotaryUneven(Rotary):
    """Angles that grow with the square of the position."""

    def angles(self, tokens: int) -> Tensor:
        places = torch.arange(tokens, device=self.freqs.device) ** 2
        return torch.outer(places, self.freqs).repeat_interleave(2, -1)[:, None]


class RotaryHere(Rotary):
    """Positions on the CPU."""

    def angles(self, tokens: int) -> Tensor:
        return torch.outer(torch.arange(tokens), self.freqs).repeat_interleave(2, -1)[:, None]


class RotaryInPlace(Rotary):
    def forward(self, x: Tensor) -> Tensor:
        return x.copy_(super().forward(x))


class RoPE(nn.Module):
    """Halves of queries and keys [B, H, T, D] at once."""

    sign = 1

    def __init__(self, d_model: int, max_seq_len: int) -> None:
        super().__init__()
        freqs = 10000.0 ** (-torch.arange(0, d_model, 2) / d_model)
        angles = torch.outer(torch.arange(max_seq_len), freqs)
        self.register_buffer("angles", torch.cat((angles, angles), -1), persistent=False)

    def turn(self, x: Tensor, angles: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * angles.cos() + torch.cat((-second, first), -1) * angles.sin()

    def forward(self, q: Tensor, k: Tensor, offset: int = 0) -> tuple[Tensor, Tensor]:
        angles = self.angles[offset : offset + q.shape[-2]]
        return self.turn(q, angles), self.turn(k, self.sign * angles)


class RoPEOtherWay(RoPE):
    sign = -1


class RotaryTables(nn.Module):
    """Gives cosines and sines, which others turn with."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.register_buffer("freqs", 10000.0 ** (-torch.arange(0, dim, 2) / dim))

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None] * torch.cat((self.freqs, self.freqs))
        return angles.cos().expand(x.shape), angles.sin().expand(x.shape)


class PositionalEncoding(nn.Module):
    def __init__(self, d_model: int, max_len: int = 50) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(max_len, d_model))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table[: x.shape[1]]


@pytest.mark.parametrize("kind", [Rotary, RoPE, RotaryByName])
def test_what_turns_well(kind: type[nn.Module]) -> None:
    verdict = check(kind)
    assert [one.rule for one in verdict.results] == ["rotary", "move"]
    assert {one.severity for one in verdict.results} == {"passed"}
    assert "no attention was looked at" in verdict.notes[0]


@pytest.mark.parametrize(
    ("kind", "rule", "said"),
    [
        (RotaryOfOtherPairs, "rotary", "change their length"),
        (RotaryUneven, "rotary", "the distance alone should count"),
        (RoPEOtherWay, "rotary", "the distance alone should count"),
        (RotaryHere, "move", "on the CPU, whatever the input's device"),
        (RotaryInPlace, "input-kept", "no longer what was handed in"),
    ],
)
def test_what_does_not(kind: type[nn.Module], rule: str, said: str) -> None:
    (finding,) = check(kind).findings
    assert finding.rule == rule
    assert said in finding.message


def test_one_that_is_built() -> None:
    assert check(Rotary(16)).passed
    assert not check(RotaryOfOtherPairs(16)).passed
    layer = CountedRotary(16)
    assert check(layer).passed
    assert layer.calls == 0
    assert layer.training


def test_positions_in_two_dimensions_are_asked_about() -> None:
    with pytest.raises(ValueError, match=r"speaks of 'height'.*check the layer that calls it"):
        check(RotaryOfMaps)


@pytest.mark.parametrize("kind", [RotaryTables, RotaryByNames])
def test_what_gives_tables_or_has_several_names_is_asked_about(kind: type[nn.Module]) -> None:
    with pytest.raises(ValueError, match="I do not know how to call it"):
        check(kind)


def test_what_scores_no_tokens_is_asked_about() -> None:
    with pytest.raises(ValueError, match="name what computes attention"):
        check(PositionalEncoding)

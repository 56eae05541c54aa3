"""Attention with more axes than batch and heads: `heads=` says which of them is heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise as hw
from support import truth

B, H, D = 2, 3, 4
E = H * D
STATISTICS = (hw.Entropy(), hw.Mass(hw.First()), hw.Received())
Made = tuple[Tensor, Tensor, Tensor]


def hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT / D**0.5).softmax(-1) @ v


class Attends(nn.Module):
    """Projections, a layout and attention; `taken` keeps q, k, v as `[rows, H, T, D]`."""

    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.qkv, self.out, self.attend = nn.Linear(E, 3 * E), nn.Linear(E, E), attend
        self.taken: Any = None

    def split(self, x: Tensor) -> Any:
        """Return q, k, v with heads in the last axis but one, `[…, H, D]`."""
        return self.qkv(x).unflatten(-1, (3, H, D)).unbind(-3)


class Rows(Attends):
    """AlphaFold's rows `[B, R, H, C, D]`."""

    no_heads = H

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.transpose(-2, -3) for part in self.split(x))
        self.taken = [part.flatten(0, 1) for part in (q, k, v)]
        return self.out(self.attend(q, k, v).transpose(-2, -3).flatten(-2))


class Windows(Attends):
    """Windows `[B, n, H, W, D]` of a padded sequence, as in Twins; or heads first, as in Hiera."""

    def __init__(self, attend: Callable[..., Tensor], heads_first: bool = False) -> None:
        super().__init__(attend)
        self.heads_first = heads_first

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        x = F.pad(x, (0, 0, 0, -length % 4)).unflatten(1, (-1, 4))
        q, k, v = (part.transpose(-2, -3) for part in self.split(x))  # [B, n, H, W, D]
        self.taken = [part.flatten(0, 1) for part in (q, k, v)]
        turn: Any = (lambda part: part.transpose(1, 2)) if self.heads_first else (lambda part: part)
        out = turn(self.attend(*map(turn, (q, k, v))))
        return self.out(out.transpose(-2, -3).flatten(-2).flatten(1, 2)[:, :length])


class Columns(Attends):
    """Columns of an alignment `[H, C, B, R, R]` of rows `[R, C, B, E]`, as in ESM's."""

    num_heads = H

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x.permute(1, 2, 0, 3))
        self.taken = [part.permute(1, 0, 3, 2, 4).flatten(0, 1) for part in (q, k, v)]
        p = (torch.einsum("ncihd,ncjhd->hcnij", q, k) / D**0.5).softmax(-1)
        return self.out(torch.einsum("hcnij,ncjhd->icnhd", p, v).flatten(-2))


class Halo(Attends):
    """Blocks with a halo of neighbours, batch and heads in one axis, as in HaloNet."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.transpose(1, 2).flatten(0, 1) for part in self.split(x))  # [B · H, T, D]
        q = q.unflatten(1, (-1, 4))
        k, v = (F.pad(part, (0, 0, 1, 1)).unfold(1, 6, 4).mT for part in (k, v))
        out = self.attend(q, k, v)  # [B · H, blocks, 4, D]
        self.taken = [part.unflatten(0, (B, H)).transpose(1, 2).flatten(0, 1) for part in (q, k, v)]
        return self.out(out.flatten(1, 2).unflatten(0, (B, H)).transpose(1, 2).flatten(-2))


class Overlaps(Attends):
    """Windows that overlap, whose outputs are added up, as in VOLO."""

    def forward(self, x: Tensor) -> Tensor:
        windows = x.unfold(1, 4, 2).mT  # [B, n, 4, E]
        q, k, v = (part.permute(0, 3, 1, 2, 4) for part in self.split(windows))
        self.taken = [part.transpose(1, 2).flatten(0, 1) for part in (q, k, v)]
        out = self.attend(q, k, v).permute(0, 2, 3, 1, 4).flatten(-2)  # [B, n, 4, E]
        whole = torch.zeros_like(x)
        for n in range(out.shape[1]):
            whole[:, 2 * n : 2 * n + 4] += out[:, n]
        return self.out(whole)


CASES: dict[str, tuple[Callable[[Any], Attends], tuple[int, ...], Any]] = {
    "rows, as many as heads": (Rows, (B, H, 5, E), -3),
    "padded windows": (Windows, (B, 10, E), {"": -3}),
    "windows after heads": (lambda attend: Windows(attend, heads_first=True), (B, 12, E), -4),
    "columns": (Columns, (5, 7, B, E), H),
    "halos": (Halo, (B, 8, E), H),
    "windows that overlap": (Overlaps, (B, 10, E), -4),
}


def assert_right(model: Attends, x: Tensor, **told: Any) -> None:
    plain = model(x)
    with hw.watch(model, *STATISTICS, **told) as seen:
        assert torch.equal(model(x), plain)
    assert seen.left_out == {}
    full = truth(*model.taken)
    for statistic in STATISTICS:
        for name, wanted in statistic.define(full).items():
            got = seen[""][name].double()
            torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("attend", [hand, F.scaled_dot_product_attention])
@pytest.mark.parametrize("name", CASES)
def test_the_axis_of_heads_settles_it(name: str, attend: Callable[..., Tensor]) -> None:
    build, shape, told = CASES[name]
    model, x = build(attend), torch.randn(*shape)
    assert_right(model, x, heads=told)
    with hw.watch(model, hw.Entropy()) as seen:
        model(x)
    assert bool(seen.left_out) is not bool(seen)


@torch.no_grad()
def test_the_name_of_the_number_settles_it_where_axes_differ() -> None:
    assert_right(Rows(hand), torch.randn(B, 4, 5, E))


def test_parts_of_the_queries_stay_parts() -> None:
    class Halves(Attends):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (part.transpose(1, 2)[:, None] for part in self.split(x))  # [B, 1, H, T, D]
            halves = [hand(half, k, v)[:, 0] for half in q.chunk(2, -2)]
            return self.out(torch.cat(halves, 2).transpose(1, 2).flatten(-2))

    model = Halves(hand)
    with hw.watch(model, hw.Entropy(), heads=-3) as seen:
        model(torch.randn(B, 8, E))
    assert list(seen) == []
    assert "is one of 2 products of some queries" in seen.left_out[""]

"""Keys over ranks: outputs and statistics of one call on all of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

import headwise as hw

pytestmark = pytest.mark.ranks

B, H, T, S, D = 2, 4, 5, 24, 6
FIRST_QUERY = {"end": S - T, "middle": 11, "start": 0}
STATISTICS = (
    hw.Entropy(),
    hw.LSE(),
    hw.MaxLogit(),
    hw.Norms(),
    hw.Distance(),
    hw.Sink(),
    hw.Mass(hw.First()),
    hw.Mass(hw.First(9), name="first_9"),
    hw.Mass(hw.Previous()),
    hw.Mass(hw.Self()),
    hw.Mass(hw.Window(4), name="near"),
)
MASKS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "causal": hw.Causal,
    "window": lambda: hw.Window(7),
    "alibi": lambda: hw.Causal() & hw.ALiBi(),
}


def pieces(ranks: int) -> list[int]:
    """Where ranks' keys end: they have different numbers of them."""
    return [S * (2 + rank) // (1 + ranks) for rank in range(ranks)]


def check(
    mesh: DeviceMesh, mask: str, at: str, sinks: bool, dtype: torch.dtype, size: float
) -> None:
    rank, ends = mesh.get_local_rank(), [0, *pieces(mesh.size())]
    q, k, v = (torch.randn(B, n, t, D) for n, t in ((H, T), (2, S), (2, S)))
    q, given = size * q, torch.randn(H) if sinks else None
    exact = hw.observe(
        *(x.double() for x in (q, k, v)),
        *STATISTICS,
        mask=MASKS[mask](),
        sinks=None if given is None else given.double(),
        first_query=FIRST_QUERY[at],
    )
    q, k, v = (x.to(dtype) for x in (q, k, v))
    own = slice(ends[rank], ends[rank + 1])
    seen = hw.parallel.observe_split_keys(
        q,
        k[:, :, own],
        v[:, :, own],
        *STATISTICS,
        mesh=mesh,
        first_key=own.start,
        first_query=FIRST_QUERY[at],
        mask=MASKS[mask](),
        sinks=None if given is None else given.to(dtype),
    )
    near = 1e-10 if dtype == torch.float64 else 3e-5 * max(1.0, size)
    torch.testing.assert_close(seen.out.double(), exact.out, rtol=0, atol=near)
    assert seen.out.dtype == dtype
    for name in exact.names:
        one, right = seen.reading(name), exact.reading(name)
        torch.testing.assert_close(
            one.values.double(), right.values, rtol=near, atol=near, msg=name
        )
        if right.rows is not None:
            assert torch.equal(one.rows.expand(B, H, T), right.rows.expand(B, H, T)), name
    for row, right_row in zip(seen.table(), exact.table(), strict=True):
        assert row == pytest.approx(right_row, abs=near, rel=near), (row, right_row)


def check_refusals(mesh: DeviceMesh) -> None:
    q = k = torch.randn(1, 2, 3, 4)
    split = partial(hw.parallel.observe_split_keys, q, k, k, mesh=mesh, first_key=0, first_query=0)
    for statistic in (
        hw.Received(),
        hw.Distance(spread=True),
        hw.Mass(hw.SameToken(torch.arange(3))),
    ):
        with pytest.raises(ValueError, match="does not merge over ranks"):
            split(statistic)


CHECKS: dict[str, Callable[[DeviceMesh], None]] = {
    f"{mask}, {at}{', sinks' * sinks}, {str(dtype)[6:]}, {size:g}": partial(
        check, mask=mask, at=at, sinks=sinks, dtype=dtype, size=size
    )
    for mask in MASKS
    for at in FIRST_QUERY
    for sinks in (False, True)
    for dtype, size in ((torch.float64, 1.0), (torch.float32, 1.0), (torch.float32, 100.0))
}
CHECKS["refusals"] = check_refusals


@pytest.mark.parametrize("name", CHECKS)
def test_over_ranks(name: str, told: dict[str, str]) -> None:
    assert not told[name], told[name]

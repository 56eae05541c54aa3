"""The fused kernel on tiles: any mask in bounded memory, and an LSE with a gradient."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import headwise as hw
from headwise.backends import Call, sdpa
from headwise.backends import tiles as tiles_module
from headwise.backends.blocked import Blocked
from headwise.core.index import grid
from headwise.core.masks import as_mask
from headwise.core.reference import attention
from headwise.core.shapes import Extent
from support import MASKS_WITH_POSITIONS, B, D, G, H, S, T, assert_as_good, qkv, truth

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture
def small_tiles() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles_module, "ROWS_AT_A_TIME", 3)
        patch.setattr(tiles_module, "BIAS_AT_A_TIME", 40)
        yield


@pytest.mark.parametrize("name", MASKS_WITH_POSITIONS)
@given(t=st.integers(1, 12), s=st.integers(1, 12), rows=st.integers(1, 6), room=st.integers(1, 60))
def test_tiles_say_what_the_mask_says(name: str, t: int, s: int, rows: int, room: int) -> None:
    if name in ("documents", "windowed documents") and t > s:
        return
    mask = as_mask(MASKS_WITH_POSITIONS[name](t, s))
    extent = Extent(B, H, H, t, s)
    want_allowed = mask.dense(B, H, t, s)
    bias = mask.bias(*grid(extent), extent)
    want = torch.zeros(B, H, t, s) if bias is None else bias.expand(B, H, t, s)
    want = want.masked_fill(~want_allowed, -torch.inf)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles_module, "ROWS_AT_A_TIME", rows)
        patch.setattr(tiles_module, "BIAS_AT_A_TIME", room)
        found = list(tiles_module.tiles(mask, extent, torch.zeros(())))
    got = torch.full_like(want, -torch.inf)
    for tile in found:
        part = got[:, :, tile.rows, tile.keys]
        assert part.numel()
        assert bool((part == -torch.inf).all())  # no pair twice
        if tile.causal:
            assert part.shape[2] == part.shape[3]
            part.masked_fill_(torch.ones(part.shape[2:], dtype=torch.bool).tril(), 0.0)
        elif tile.bias is None:
            part.zero_()
        else:
            part.copy_(tile.bias.expand_as(part))
            if tile.dead is not None:
                dead = (part == -torch.inf).all(-1)
                assert torch.equal(tile.dead.expand_as(dead), dead)
    assert torch.equal(got, want)


def test_what_needs_no_bias_gets_none() -> None:
    def of(mask: hw.Mask | None, t: int, s: int) -> list[tiles_module.Tile]:
        return list(tiles_module.tiles(as_mask(mask), Extent(1, 1, 1, t, s), torch.zeros(())))

    assert [tile.causal for tile in of(hw.Causal(), 9, 9)] == [True]
    assert [tile.causal for tile in of(hw.Window(9), 9, 9)] == [True]
    assert [tile.causal for tile in of(hw.Causal(), 4, 9)] == [False, True]
    assert [tile.causal for tile in of(hw.Causal(), 9, 4)] == [True]
    assert [tile.causal for tile in of(None, 4, 9)] == [False]
    assert all(
        tile.bias is None for t, s in ((9, 9), (4, 9), (9, 4)) for tile in of(hw.Causal(), t, s)
    )
    # A long window: rows see their neighbourhood, and most of that without a bias.
    long = of(hw.Window(2048), 8192, 8192)
    scores = sum((x.rows.stop - x.rows.start) * (x.keys.stop - x.keys.start) for x in long)
    assert scores < 0.4 * 8192**2
    assert any(tile.bias is None for tile in long)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("name", MASKS_WITH_POSITIONS)
def test_tiles_are_as_good_as_the_definition(name: str, dtype: torch.dtype) -> None:
    for t, s, g in [(T, S, G), (S, S, 1), (1, S, H)]:
        q, k, v = qkv(t, s, g, dv=D + 2, dtype=dtype)
        mask = MASKS_WITH_POSITIONS[name](t, s)
        exact, plain = truth(q, k, v, mask=mask), attention(q, k, v, mask=mask)
        out, lse = sdpa.Sdpa().run(Call.of(q, k, v, mask=mask))
        assert_as_good(out, plain.out, exact.out, dtype)
        assert_as_good(lse, plain.lse, exact.lse, dtype)


@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("name", MASKS_WITH_POSITIONS)
@pytest.mark.parametrize("which", ["out", "lse", "both"])
def test_gradients_of_output_and_lse(name: str, which: str, tiled: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if tiled:
            patch.setattr(tiles_module, "ROWS_AT_A_TIME", 3)
            patch.setattr(tiles_module, "BIAS_AT_A_TIME", 40)
        for t, s, g in [(T, S, G), (S, S, 1), (S, T, 2)]:
            if t > s and "documents" in name:
                continue
            mask = MASKS_WITH_POSITIONS[name](t, s)
            parts = [x.double().requires_grad_() for x in qkv(t, s, g, dv=D + 2)]
            to_out = torch.randn(B, H, t, D + 2, dtype=torch.float64) * (which != "lse")
            to_lse = torch.randn(B, H, t, dtype=torch.float64) * (which != "out")
            full = attention(*parts, mask=mask)
            want_loss = (full.out * to_out).sum()
            want_loss = want_loss + (full.lse.masked_fill(full.lse == -torch.inf, 0) * to_lse).sum()
            wanted = torch.autograd.grad(want_loss, parts)
            for backend in (sdpa.Sdpa(), Blocked()):
                out, lse = backend.run(Call.of(*parts, mask=mask), lse_gradient=True)
                loss = (lse.masked_fill(lse == -torch.inf, 0) * to_lse).sum()
                if which != "lse":
                    loss = loss + (out * to_out).sum()
                if not loss.requires_grad:
                    continue
                got = torch.autograd.grad(loss, parts, allow_unused=True)
                for one, two, part in zip(got, wanted, parts, strict=True):
                    one = torch.zeros_like(part) if one is None else one
                    torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["none", "causal", "padding", "random", "nothing", "alibi"])
def test_the_lse_gradient_that_needs_no_kernel_of_its_own(name: str) -> None:
    mask = MASKS_WITH_POSITIONS[name](T, S)
    q, k, v = (x.double().requires_grad_() for x in qkv())
    weight = torch.randn(B, H, T, dtype=torch.float64)
    full = attention(q, k, v, mask=mask)
    wanted = torch.autograd.grad(
        (full.lse.masked_fill(full.lse == -torch.inf, 0) * weight).sum(), (q, k)
    )
    lse = sdpa._with_gradient(Call.of(q, k, v, mask=mask), full.lse.detach())
    assert torch.equal(lse, full.lse)
    loss = (lse.masked_fill(lse == -torch.inf, 0) * weight).sum()
    for got, want in zip(torch.autograd.grad(loss, (q, k)), wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-12)


def test_gradcheck_in_float64() -> None:
    q, k, v = (x.double().requires_grad_() for x in qkv(t=4, s=5))

    def both(*parts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return sdpa.Sdpa().run(Call.of(*parts, mask=hw.Causal()), lse_gradient=True)

    assert torch.autograd.gradcheck(both, (q, k, v))


@pytest.mark.parametrize("name", ["none", "causal", "padding", "random", "nothing"])
def test_second_derivatives(name: str) -> None:
    mask = MASKS_WITH_POSITIONS[name](3, 4)
    parts = [x.double().requires_grad_() for x in qkv(t=3, s=4, dv=D + 1)]
    sinks = torch.randn(H, dtype=torch.float64, requires_grad=True)

    def both(q: torch.Tensor, *others: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        k, v, *sinks = others
        call = Call.of(q, k, v, mask=mask, sinks=sinks[0] if sinks else None)
        out, lse = sdpa.Sdpa().run(call, lse_gradient=True)
        return out, lse.masked_fill(lse == -torch.inf, 0.0)

    fast = {"check_batched_grad": False, "fast_mode": True}
    assert torch.autograd.gradgradcheck(both, parts, **fast)
    assert torch.autograd.gradgradcheck(both, (*parts, sinks), **fast)


def test_a_long_window_runs_fused_in_little_memory() -> None:
    q = torch.randn(1, 2, 6000, 16)
    mask = hw.Window(300) & hw.Padding(torch.tensor([5900]))
    got = hw.attend(q, q, q, mask=mask, backend="sdpa")
    want = hw.attend(q, q, q, mask=mask, backend="blocked")
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)

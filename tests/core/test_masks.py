"""Each meaning of a mask, by hand, and the three ways of asking it against each other."""

import pytest
import torch

import headwise as hw
from headwise.core.index import grid
from headwise.core.mask_algebra import Mask
from headwise.core.masks import alibi_slopes, as_mask
from headwise.core.shapes import Extent
from support import MASKS_WITH_POSITIONS, B, H, S, T


def rows(mask: hw.Mask, queries: int, keys: int, batch: int = 1) -> list:
    """The matrix as strings of 0 and 1."""
    dense = mask.dense(batch=batch, queries=queries, keys=keys)
    return ["".join(str(int(x)) for x in row) for row in dense[-1, 0]]


def test_causal_is_aligned_to_the_end() -> None:
    assert rows(hw.Causal(), 3, 3) == ["100", "110", "111"]
    assert rows(hw.Causal(), 2, 4) == ["1110", "1111"]
    assert rows(hw.Causal(), 1, 4) == ["1111"]
    assert rows(hw.Causal(), 4, 2) == ["00", "00", "10", "11"]


def test_a_window_counts_the_queries_own_key() -> None:
    assert rows(hw.Window(1), 3, 3) == ["100", "010", "001"]
    assert rows(hw.Window(2), 3, 3) == ["100", "110", "011"]
    assert rows(hw.Window(2), 1, 4) == ["0011"]
    assert rows(hw.Window(9), 3, 3) == rows(hw.Causal(), 3, 3)


def test_padding_documents_prefix_dense() -> None:
    lengths = torch.tensor([3, 1])
    assert rows(hw.Padding(lengths), 1, 3, batch=2) == ["100"]
    assert rows(hw.Padding(lengths, side="left"), 1, 3, batch=2) == ["001"]
    assert rows(hw.Documents(torch.tensor([7, 7, 2])), 3, 3) == ["110", "110", "001"]
    assert rows(hw.Documents(torch.tensor([7, 7, 2])), 2, 3) == ["110", "001"]
    assert rows(hw.Prefix(2), 2, 3) == ["110", "110"]
    true_means_may_attend = torch.tensor([[True, False]])
    assert rows(hw.Dense(true_means_may_attend), 1, 2) == ["10"]


def test_and_or() -> None:
    assert rows(hw.Causal() & hw.Prefix(1), 3, 3) == ["100", "100", "100"]
    assert rows(hw.Causal() | hw.Prefix(2), 3, 3) == ["110", "110", "111"]
    assert rows((hw.Window(1) | hw.Prefix(1)) & hw.Causal(), 3, 3) == ["100", "110", "101"]


def test_the_complement() -> None:
    assert rows(~hw.Causal(), 3, 3) == ["011", "001", "000"]
    assert rows(~hw.Causal(), 2, 4) == ["0001", "0000"]
    assert rows(~hw.Causal(), 4, 2) == ["11", "11", "01", "00"]
    assert rows(~hw.Window(2) & hw.Causal(), 4, 4) == ["0000", "0000", "1000", "1100"]
    assert rows(~hw.Padding(torch.tensor([3, 1])), 1, 3, batch=2) == ["011"]
    assert rows(~(hw.Causal() & hw.Prefix(1)), 2, 2) == ["01", "01"]
    assert rows(~(hw.Causal() | hw.Prefix(2)), 3, 3) == ["001", "001", "000"]
    assert rows(~hw.First(1), 2, 2) == ["01", "01"]
    assert rows(~as_mask(None), 2, 2) == ["00", "00"]
    mask = hw.Documents(torch.tensor([7, 7, 2]))
    assert ~~mask is mask
    assert ~hw.Causal() == ~hw.Causal() != ~hw.Window(3)


@pytest.mark.parametrize("mask", [hw.ALiBi(), hw.Bias(torch.ones(3, 3)), hw.ALiBi() & hw.Causal()])
def test_what_adds_to_the_scores_has_no_complement(mask: hw.Mask) -> None:
    with pytest.raises(ValueError, match="adds a bias to the scores, which has no complement"):
        _ = ~mask


@pytest.mark.parametrize("backend", ["auto", "sdpa", "blocked", "eager"])
def test_alibi_in_float64_is_not_rounded_to_float32(backend: str) -> None:
    q, k, v = torch.randn(3, 1, 6, 300, 4, dtype=torch.float64)
    place = torch.arange(300.0, dtype=torch.float64)
    slopes = torch.tensor([2 ** (-2.0 * n) for n in (1, 2, 3, 4)] + [2**-1.0, 2**-3.0]).double()
    bias = -slopes[:, None, None] * (place[:, None] - place).abs()
    scores = q @ k.mT / 2 + bias
    seen = hw.observe(q, k, v, hw.Entropy(), mask=hw.ALiBi(), backend=backend)
    torch.testing.assert_close(seen.lse, scores.logsumexp(-1), rtol=1e-13, atol=1e-13)
    # Of another number of heads slopes are no powers of 2.
    steep = 2 ** (-0.5 * torch.arange(1, 17, dtype=torch.float64))
    q, k, v = torch.randn(3, 1, 16, 300, 4, dtype=torch.float64)
    scores = q @ k.mT / 2 - steep[:, None, None] * (place[:, None] - place).abs()
    seen = hw.observe(q, k, v, hw.Entropy(), mask=hw.ALiBi(), backend=backend)
    torch.testing.assert_close(seen.lse, scores.logsumexp(-1), rtol=1e-13, atol=1e-13)
    weights = scores.softmax(-1)
    torch.testing.assert_close(seen.out, weights @ v, rtol=1e-12, atol=1e-13)


def test_alibi_slopes_of_other_head_counts() -> None:
    # Press et al. 2021: 8 heads start at 1/2 and halve; 12 heads are those of 8, then every
    # second one of 16.
    assert alibi_slopes(8).tolist() == [2**-n for n in range(1, 9)]
    assert alibi_slopes(12)[8:].tolist() == pytest.approx([2 ** (-n / 2) for n in (1, 3, 5, 7)])
    bias = hw.ALiBi().bias(*grid(Extent(1, 8, 8, 2, 3)), Extent(1, 8, 8, 2, 3))
    assert bias is not None
    assert bias[0, 0].tolist() == [[-0.5, 0.0, -0.5], [-1.0, -0.5, 0.0]]


@pytest.mark.parametrize("complement", [False, True])
@pytest.mark.parametrize("name", MASKS_WITH_POSITIONS)
@pytest.mark.parametrize(("t", "s"), [(T, S), (S, S), (1, S)])
def test_pairs_blocks_and_intervals_say_what_the_matrix_says(
    name: str, t: int, s: int, complement: bool
) -> None:
    mask = as_mask(MASKS_WITH_POSITIONS[name](t, s))
    extent = Extent(B, H, H, t, s)
    dense = mask.dense(B, H, t, s)
    if complement and not mask.biased:
        mask, dense = ~mask, ~dense
    # single pairs, in any order, different for every batch row and head
    i, j = torch.randint(t, (B, H, 20, 1)), torch.randint(s, (B, H, 20, 1))
    b, h = torch.arange(B).view(-1, 1, 1, 1), torch.arange(H).view(1, -1, 1, 1)
    pairs = mask.allowed(i, j, extent)
    assert torch.equal(
        torch.ones(()).bool().expand(i.shape) if pairs is None else pairs.expand(i.shape),
        dense[b, h, i, j],
    )
    # a block
    block = mask.allowed(*grid(extent, None, slice(t // 2, t), slice(1, s - 1)), extent)
    want = dense[:, :, t // 2 :, 1 : s - 1]
    block = torch.ones(()).bool() if block is None else block  # None: every pair
    assert torch.equal(block.expand(want.shape), want)
    # a range a query
    interval = mask.interval(grid(extent)[0], extent)
    if interval is not None and not isinstance(mask, hw.Bias):
        keys = torch.arange(s)
        inside = (keys >= interval[0]) & (keys < interval[1])
        assert torch.equal(inside.expand(B, H, t, s), dense)


@pytest.mark.usefixtures("unchecked")
def test_faults_are_named() -> None:
    with pytest.raises(ValueError, match="True for 'may attend'"):
        hw.Dense(torch.zeros(3, 3))
    with pytest.raises(ValueError, match="use Dense"):
        hw.Bias(torch.zeros(3, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match="at least 1 "):
        hw.Window(0)
    with pytest.raises(ValueError, match="whole number of keys"):
        hw.Window(2.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must be 'right' or 'left'"):
        hw.Padding(torch.tensor([1]), side="Right")  # type: ignore[arg-type]
    for kind in (hw.Padding, hw.Documents, hw.Dense, hw.Bias):
        with pytest.raises(ValueError, match=r"give a torch\.Tensor"):
            kind([1, 2])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not defined for biases"):
        hw.ALiBi() | hw.Causal()
    with pytest.raises(ValueError, match=r"headwise\.Dense"):
        hw.Causal() & torch.ones(3, 3, dtype=torch.bool)  # type: ignore[operator]
    with pytest.raises(ValueError, match="one document number per key"):
        hw.Documents(torch.zeros(4, dtype=torch.long)).dense(queries=3, keys=3)
    with pytest.raises(ValueError, match="needs a key position"):
        hw.Documents(torch.zeros(3, dtype=torch.long)).dense(queries=4, keys=3)
    with pytest.raises(ValueError, match="one per batch row"):
        hw.Prefix(torch.zeros(3, dtype=torch.long)).dense(batch=2, queries=3, keys=3)


def test_ranges_without_a_meaning_are_refused() -> None:
    with pytest.raises(TypeError, match=r"class Half\(Mask\): interval\(\) is a shortcut for"):

        class Half(Mask):
            def interval(self, i, extent):  # type: ignore[override]
                return torch.zeros_like(i), torch.full_like(i, extent.keys // 2)

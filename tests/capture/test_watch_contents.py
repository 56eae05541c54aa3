"""`watch()` on what is changed in place where PyTorch counts no changes, and on what is chosen."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fresh
import headwise as hw
from headwise.capture.adapters.flex import captured
from headwise.capture.adapters.softmax import checksum
from support import truth

B, H, T, D = 2, 3, 7, 5
LATER = torch.ones(T, T).triu(1) > 0


class Attends(nn.Module):
    """Attention by hand: `change(p, scores)` comes between softmax and product."""

    def __init__(self, change: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.change = change

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT
        p = scores.softmax(-1)
        made = self.change(p, scores)
        return (made if isinstance(made, Tensor) else p) @ v


def renormalised(p: Tensor, scores: Tensor) -> None:
    p.mul_(~LATER)
    p.div_(p.sum(-1, keepdim=True))


def permuted(p: Tensor, scores: Tensor) -> None:
    p.copy_(p.flip(-1))


def behind_the_back(p: Tensor, scores: Tensor) -> None:
    p.data.mul_(~LATER)


def by_numpy(p: Tensor, scores: Tensor) -> None:
    p.detach().numpy()[..., 3:] = 0


def scores_behind_the_back(p: Tensor, scores: Tensor) -> None:
    scores.data.masked_fill_(LATER, -torch.inf)


def in_a_view(p: Tensor, scores: Tensor) -> Tensor:
    flat = p.view(B * H, T, T)
    flat.data[:, 1] = 0
    return flat.view(B, H, T, T)


def into_itself(p: Tensor, scores: Tensor) -> Tensor:
    return torch.mul(p, ~LATER, out=p)


def before_dropout(p: Tensor, scores: Tensor) -> Tensor:
    p.data.mul_(~LATER)
    return F.dropout(p, 0.2)


CHANGES = [renormalised, permuted, behind_the_back, by_numpy, scores_behind_the_back]
CHANGES += [in_a_view, into_itself, before_dropout]
CHANGES += [lambda p, scores: p.fill_(1 / T), lambda p, scores: (scores.sub_(1.0), None)]


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("change", CHANGES)
def test_a_softmax_that_was_changed_is_not_told_as_it_was(
    change: Callable[..., Any], mode: Callable[[], Any]
) -> None:
    torch.manual_seed(0)
    model = Attends(change)
    with mode(), hw.watch(model, hw.Entropy()) as seen:
        model(*torch.randn(3, B, H, T, D))
    assert not seen.modules


@pytest.mark.parametrize("mode", [torch.inference_mode, nullcontext])
@pytest.mark.parametrize(
    "change",
    [
        lambda p, scores: None,
        lambda p, scores: F.dropout(p, 0.2),
        lambda p, scores: F.dropout(p, 0.2, inplace=True),
        lambda p, scores: p.to(torch.float64).to(torch.float32).view(B * H, T, T).view(p.shape),
        lambda p, scores: torch.tensor([1.0, 0.0, 2.0]).view(H, 1, 1) * p,
    ],
)
def test_what_is_still_a_softmax_is_told(
    change: Callable[..., Any], mode: Callable[[], Any]
) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, B, H, T, D)
    model = Attends(change)
    with mode(), hw.watch(model, hw.Entropy(), hw.LSE()) as seen:
        model(q, k, v)
    full = truth(q, k, v, scale=1.0)
    for statistic in (hw.Entropy(), hw.LSE()):
        for name, wanted in statistic.define(full).items():
            torch.testing.assert_close(seen[""][name].double(), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "choose",
    [
        lambda p, zero: torch.where(~LATER, p, 0.0),
        lambda p, zero: torch.where(~LATER, p, zero),
        lambda p, zero: torch.where(LATER, zero, p),
        lambda p, zero: p.where(~LATER, zero),
        lambda p, zero: ~LATER * p,
    ],
)
def test_zeros_where_a_mask_forbids_are_followed(choose: Callable[..., Tensor]) -> None:
    class Masked(nn.Module):
        hidden = True

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            scores = (q @ k.mT).masked_fill(LATER, -1e9) if self.hidden else q @ k.mT
            return choose(scores.softmax(-1), torch.zeros(())) @ v

    torch.manual_seed(0)
    model, (q, k, v) = Masked(), torch.randn(3, B, H, T, D)
    with hw.watch(model, hw.Entropy()) as seen:
        model(q, k, v)
    wanted = hw.Entropy().define(truth(q, k, v, mask=hw.Causal(), scale=1.0))["entropy"]
    torch.testing.assert_close(seen[""]["entropy"].double(), wanted, atol=1e-5, rtol=1e-5)
    model.hidden = False  # what is taken away here was probability
    with hw.watch(model, hw.Entropy()) as seen:
        model(q, k, v)
    assert not seen.modules


class Layer(nn.Module):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, mask)


class Two(nn.Module):
    """Two layers with one mask, which is refilled between them."""

    def __init__(self, refill: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.low, self.high, self.refill = Layer(), Layer(), refill

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(T, T, dtype=torch.bool)
        x = self.low(x, mask)
        self.refill(mask)
        return self.high(x, mask)


REFILLS: list[Callable[[Tensor], Any]] = [
    lambda mask: mask[:, 3:].fill_(False),
    lambda mask: mask.data[:, 3:].fill_(False),
    lambda mask: mask.numpy()[:, 3:].fill(False),
]


@pytest.mark.parametrize("refill", REFILLS)
@pytest.mark.parametrize("mode", [torch.inference_mode, nullcontext])
def test_a_mask_that_was_refilled_is_another_mask(
    refill: Callable[[Tensor], Any], mode: Callable[[], Any]
) -> None:
    model = Two(refill)
    with mode(), hw.watch(model, hw.Received(), padding=False) as seen:
        model(torch.randn(B, H, T, D))
    assert bool((seen["low"]["received"] > 0).all())
    assert bool((seen["high"]["received"][..., 3:] == 0).all())


FLEX = """
import torch, headwise as hw
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

lengths = torch.tensor([7])
blocks = create_block_mask(lambda b, h, i, j: j < lengths[0], None, None, 7, 7, device="cpu")

class Flex(nn.Module):
    def forward(self, x):
        return flex_attention(x, x, x, block_mask=blocks)

class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = Flex(), Flex()

    def forward(self, x):
        lengths.fill_(7)
        x = self.one(x)
        lengths.fill_(3)
        return self.other(x)

model = Two()
with torch.no_grad(), hw.watch(model, hw.Received(), padding=False) as seen:
    model(torch.randn(2, 3, 7, 8))
assert (seen["one"]["received"] > 0).all()
assert (seen["other"]["received"][..., 3:] == 0).all(), seen["other"]["received"]
"""


def test_a_mask_function_that_reads_a_changed_tensor_is_asked_again() -> None:
    run = fresh.run(FLEX)
    assert run.returncode == 0, run.stderr[-2000:]


def test_what_a_function_reads() -> None:
    lengths, kinds = torch.tensor([3]), {"a": 1}

    def inner(j: int) -> bool:
        return bool(j < lengths[0])

    assert captured(inner) == [lengths]
    assert captured(lambda j: inner(j) and j < T) == [T, lengths]
    assert captured(lambda j: kinds["a"]) is None  # who knows who changes it


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.bool])
@pytest.mark.parametrize("size", [6, 7, 8])
def test_sums_tell_contents(dtype: torch.dtype, size: int) -> None:
    torch.manual_seed(0)
    x = (torch.rand(2, 3, 5, size) > 0.5).to(dtype)
    before = checksum(x)
    assert torch.equal(checksum(x.clone()), before)
    assert torch.equal(checksum(x.view(6, 5, size)), before)
    y = x.clone()
    for change in (y.flip(-1), y.flip(-2), y.roll(1, -1), y.logical_not().to(dtype)):
        assert not torch.equal(checksum(change), before)
    y[1, 2, 3, 4] = 1 - y[1, 2, 3, 4].to(torch.float32)
    assert not torch.equal(checksum(y), before)
    assert not torch.equal(checksum(x.expand(4, 2, 3, 5, size)[0].mT.contiguous()), before)

"""The entropy floor as a loss term: right, differentiable, and nothing else changes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import headwise as hw

B, T, H, E = 2, 7, 3, 24


def layer(size: float = 1.0) -> hw.MultiHeadAttention:
    torch.manual_seed(0)
    made = hw.MultiHeadAttention(E, H)
    with torch.no_grad():
        made.qkv.weight *= size
    return made


def by_hand(model: nn.Module, floor: float, *calls: tuple[Tensor, hw.Mask | None]) -> Tensor:
    """The term from entropies of the whole matrix; of one module."""
    total, count = torch.zeros(H), torch.zeros(H)
    for x, mask in calls:
        with hw.watch(model, hw.Entropy(), gradients=True) as seen:
            model(x, mask=mask)
        reading = seen[""].calls[0]["entropy"]
        rows = reading.rows.expand(reading.values.shape)
        total = total + (reading.values * rows).sum((0, 2))
        count = count + rows.sum((0, 2))
    return torch.relu(floor - total / count).sum()


def test_one_row_by_hand() -> None:
    class Even(nn.Module):
        """Heads that attend evenly to 2, 4 and 8 keys."""

        def forward(self, q: Tensor) -> Tensor:
            mask = torch.arange(8) < torch.tensor([2, 4, 8])[:, None]
            mask = mask.view(1, 3, 1, 8)
            k = torch.zeros(1, 3, 8, 4)
            return nn.functional.scaled_dot_product_attention(q, k, k, attn_mask=mask)

    with hw.EntropyFloor(Even(), floor=math.log(4) + 0.25, strength=2.0) as floor:
        floor.model(torch.zeros(1, 3, 1, 4))
    assert floor.entropies[""].tolist() == pytest.approx([math.log(2), math.log(4), math.log(8)])
    assert floor.loss.item() == pytest.approx(2 * (math.log(2) + 0.25 + 0.25))


def test_means_are_over_valid_queries_of_all_calls() -> None:
    model, mask = layer(), hw.Causal() & hw.Padding(torch.tensor([T, 3]))
    calls = (torch.randn(B, T, E), mask), (torch.randn(1, 4, E), None)
    with hw.EntropyFloor(model, floor=1.5) as floor:
        for x, one in calls:
            model(x, mask=one)
    wanted = by_hand(model, 1.5, *calls)
    assert wanted > 0
    torch.testing.assert_close(floor.loss, wanted)
    wide = hw.EntropyFloor(model, floor=1.5, strength=3.0)
    with wide:
        for x, one in calls:
            model(x, mask=one)
    torch.testing.assert_close(wide.loss, 3 * wanted)


def test_the_term_lifts_the_heads_that_are_under_the_floor() -> None:
    model, x = layer(3.0), torch.randn(B, T, E)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    floor = hw.EntropyFloor(model, floor=0.7)
    least = []
    for _ in range(20):
        with floor:
            model(x)
        optimizer.zero_grad()
        floor.loss.backward()
        optimizer.step()
        least.append(floor.entropies[""].min().item())
    assert least[0] < 0.4
    assert least[-1] > 0.68


def test_heads_above_the_floor_are_left_alone() -> None:
    model = layer()
    with hw.EntropyFloor(model, floor=1e-3) as floor:
        model(torch.randn(B, T, E))
    floor.loss.backward()
    assert floor.loss == 0
    assert not model.qkv.weight.grad.any()  # type: ignore[union-attr]


def test_the_output_is_what_it_was() -> None:
    model, x = layer(), torch.randn(B, T, E, requires_grad=True)
    plain = model(x, mask=hw.Causal())
    with hw.EntropyFloor(model, floor=2.0):
        held = model(x, mask=hw.Causal())
    assert torch.equal(held, plain)
    assert torch.equal(*(torch.autograd.grad(out.sum(), x)[0] for out in (held, plain)))


def test_heads_without_a_query_are_left_out() -> None:
    model, x = layer(), torch.randn(1, T, E)
    seen = torch.ones(1, H, T, T, dtype=torch.bool)
    seen[:, 1] = False
    with hw.EntropyFloor(model, floor=9.0) as floor:
        model(x, mask=hw.Dense(seen))
    entropies = floor.entropies[""]
    assert entropies[1].isnan()
    torch.testing.assert_close(floor.loss, (9 - entropies[[0, 2]]).sum())


def test_drawn_queries_are_others_each_time() -> None:
    model, x = layer(), torch.randn(B, 50, E)
    floor = hw.EntropyFloor(model, floor=9.0, queries=5)
    terms = []
    for _ in range(3):
        with floor:
            model(x)
        terms.append(floor.loss.item())
    assert len(set(terms)) == 3
    with hw.EntropyFloor(model, floor=9.0) as whole:
        model(x)
    assert terms == pytest.approx([whole.loss.item()] * 3, rel=0.2)


def test_with_checkpointing_backward_is_in_the_block() -> None:
    model, x = layer(), torch.randn(B, T, E)
    grads = []
    for again in (False, True):
        model.zero_grad()
        with hw.EntropyFloor(model, floor=9.0) as floor:
            out: Any = checkpoint(model, x, use_reentrant=False) if again else model(x)
            (out.square().mean() + floor.loss).backward()
        grads.append(model.qkv.weight.grad)
    torch.testing.assert_close(*grads)


def test_some_modules_alone() -> None:
    model = nn.ModuleList([layer(), layer()])
    model.forward = lambda x: model[1](model[0](x))  # type: ignore[method-assign]
    with hw.EntropyFloor(model, floor=9.0, modules="1") as floor:
        model(torch.randn(B, T, E))
    assert list(floor.entropies) == ["1"]


def test_what_makes_no_term_is_refused() -> None:
    for keywords in ({"floor": 0.0}, {"floor": math.nan}, {"strength": "much"}, {"strength": -1}):
        with pytest.raises(
            ValueError, match=f"{next(iter(keywords))} must be a finite number above 0"
        ):
            hw.EntropyFloor(layer(), **keywords)
    with pytest.raises(ValueError, match=r"is not an nn\.Module"):
        hw.EntropyFloor(0.5)  # type: ignore[arg-type]
    floor = hw.EntropyFloor(layer())
    with pytest.raises(ValueError, match="enter it around the forward pass first"):
        _ = floor.loss
    with floor, pytest.raises(ValueError, match="it is already entered"), floor:
        pass
    with pytest.raises(ValueError, match="the model was not called"):
        _ = floor.loss

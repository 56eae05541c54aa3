"""A part of a sequence that names the key position of its first query is that part of the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import headwise as hw
from support import BACKENDS, IN_DOUBLE

T, H, G, D = 150, 4, 2, 8
PARTS = [(0, 40), (40, 41), (30, 110), (110, 150)]
DENSE = torch.rand(T, T, generator=torch.Generator().manual_seed(1)) < 0.3
STATISTICS = (
    hw.Entropy(),
    hw.MaxLogit(),
    hw.Distance(),
    hw.Mass(hw.First()),
    hw.Mass(hw.Previous()),
    hw.Mass(hw.Self()),
    hw.Mass(hw.Induction(torch.arange(T) % 7)),
    hw.Norms(),
)


def masks(rows: slice) -> dict[str, hw.Mask | None]:
    """Masks of the whole call, or of the part of these queries."""
    return {
        "none": None,
        "causal": hw.Causal(),
        "window": hw.Causal() & hw.Window(17),
        "wide window": hw.Window(43),  # wider than some parts of the keys
        "documents": hw.Causal() & hw.Documents(torch.arange(T) // 35),
        "other documents": hw.Documents(torch.arange(T) // 35),
        "padding": hw.Causal() & hw.Padding(torch.tensor([T, 120])),
        "left padding": hw.Causal() & hw.Padding(torch.tensor([T, 120]), side="left"),
        "prefix": hw.Causal() | hw.Prefix(torch.tensor([50, 3])),
        "alibi": hw.Causal() & hw.ALiBi(),
        "dense": hw.Dense(DENSE[rows]) & hw.Window(90),
    }


@pytest.fixture(scope="module")
def tensors() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(2, H, T, D), torch.randn(2, G, T, D), torch.randn(2, G, T, D)


@pytest.mark.parametrize("name", masks(slice(None)))
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_part_attends_as_in_the_whole(
    backend: str, name: str, tensors: tuple[Tensor, Tensor, Tensor]
) -> None:
    q, k, v = tensors
    whole = hw.observe(q, k, v, *STATISTICS, mask=masks(slice(None))[name], backend="eager")
    for start, stop in PARTS:
        rows, part = slice(start, stop), q[:, :, start:stop]
        keywords: dict[str, Any] = {"mask": masks(rows)[name], "backend": backend}
        keywords["first_query"] = start
        out = hw.attend(part, k, v, **keywords)
        assert torch.allclose(out, whole.out[:, :, rows], atol=2e-6)
        seen = hw.observe(part, k, v, *STATISTICS, **keywords)
        assert torch.equal(seen.out, out)
        assert torch.allclose(seen.lse, whole.lse[:, :, rows], atol=2e-6)
        for figure in whole.names:
            reading, wanted = seen.reading(figure), whole.reading(figure)
            if wanted.values.dim() == 3 and not wanted.per_key:
                assert wanted.rows is not None
                assert reading.rows is not None
                valid = wanted.rows.expand(wanted.values.shape)[:, :, rows]
                assert torch.equal(reading.rows.expand(reading.values.shape), valid), figure
                there = torch.where(valid, wanted.values[:, :, rows], 0.0)
                here = torch.where(valid, reading.values, 0.0)
                assert torch.allclose(here, there, atol=2e-5), figure


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["none", "causal", "window", "wide window", "alibi"])
def test_parts_of_the_keys_merge_to_the_whole(backend: str, name: str) -> None:
    """Also where queries stand before or behind the keys that are looked at."""
    torch.manual_seed(0)
    double = backend in IN_DOUBLE
    q, k, v = torch.randn(3, 1, H, T, D, dtype=torch.float64 if double else torch.float32)
    near = 1e-12 if double else 3e-6
    mask = masks(slice(None))[name]
    whole = hw.observe(q, k, v, mask=mask, backend="eager")
    rows, parts = slice(60, 100), []
    for start, stop in ((0, 30), (30, 70), (70, 90), (90, 150)):
        keys = slice(start, stop)
        keywords: dict[str, Any] = {"mask": mask, "backend": backend, "first_query": 60 - start}
        parts.append(hw.observe(q[:, :, rows], k[:, :, keys], v[:, :, keys], **keywords))
    lse = torch.stack([part.lse for part in parts])
    total = lse.logsumexp(0)
    shares = torch.exp(lse - total)[..., None]
    out = sum(share * part.out for share, part in zip(shares, parts, strict=True))
    assert torch.allclose(total, whole.lse[:, :, rows], atol=near)
    assert torch.allclose(out, whole.out[:, :, rows], atol=near)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_parts_add_up(backend: str, tensors: tuple[Tensor, Tensor, Tensor]) -> None:
    made = [x.clone().requires_grad_() for x in tensors]
    hw.attend(*made, mask=hw.Causal(), backend="eager").square().sum().backward()
    parts = [x.clone().requires_grad_() for x in tensors]
    q, k, v = parts
    for start in range(0, T, 50):
        part = q[:, :, start : start + 50]
        keywords: dict[str, Any] = {"mask": hw.Causal(), "first_query": start}
        hw.attend(part, k, v, backend=backend, **keywords).square().sum().backward()
    for one, other in zip(parts, made, strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.allclose(one.grad, other.grad, atol=2e-5)


def test_the_default_is_the_end() -> None:
    q, k, v = torch.randn(1, 2, 5, 8), *torch.randn(2, 1, 2, 9, 8)
    ended = hw.attend(q, k, v, mask=hw.Causal())
    assert torch.equal(hw.attend(q, k, v, mask=hw.Causal(), first_query=4), ended)
    assert not torch.equal(hw.attend(q, k, v, mask=hw.Causal(), first_query=3), ended)
    assert hw.explain(q, k, v, mask=hw.Causal(), first_query=3).chosen


@pytest.mark.parametrize("given", ["4", 1.5, True])
def test_a_position_is_a_whole_number(given: Any) -> None:
    q = k = v = torch.randn(1, 2, 5, 8)
    with pytest.raises(ValueError, match=r"attend\(q \[1, 2, 5, 8\].*first_query=.*whole number"):
        hw.attend(q, k, v, first_query=given)


@pytest.mark.parametrize("first", [-1, 5])
def test_tokens_and_documents_need_a_key_position(first: int) -> None:
    q, k, v = torch.randn(1, 2, 5, 8), *torch.randn(2, 1, 2, 9, 8)
    ids = torch.arange(9)
    with pytest.raises(ValueError, match="every query needs a key position"):
        hw.attend(q, k, v, mask=hw.Documents(ids), first_query=first)
    with pytest.raises(ValueError, match="token at its key position"):
        hw.observe(q, k, v, hw.Mass(hw.Induction(ids)), first_query=first)

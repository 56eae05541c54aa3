"""Mistakes that the scores alone tell, where the output holds more than attention."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from headwise.check import check


class Gated(nn.Module):
    """What comes out is bent, so that no output of attention's equals it."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.dim = heads, dim
        self.query, self.key, self.value = (nn.Linear(dim, dim) for _ in range(3))

    def cut(self, rows: Tensor) -> Tensor:
        return rows.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def products(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT / (self.dim // self.heads) ** 0.5

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.cut(to(x)) for to in (self.query, self.key, self.value))
        heads = self.products(q, k).softmax(-1) @ v
        return torch.relu(heads.transpose(1, 2).flatten(2) + x)


class ByTheWholeRoot(Gated):
    def products(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT / self.dim**0.5


class Reshaped(Gated):
    def products(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.reshape(*k.shape[:2], k.shape[3], k.shape[2]) / self.dim**0.5


class Viewed(Gated):
    def cut(self, rows: Tensor) -> Tensor:
        return rows.view(len(rows), self.heads, rows.shape[1], -1)


class Folded(Gated):
    """One product for all heads, which stand in the batch's axis."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.cut(to(x)).flatten(0, 1) for to in (self.query, self.key, self.value))
        weights = torch.bmm(q, k.mT / self.dim**0.5).softmax(-1)
        heads = torch.bmm(weights, v).unflatten(0, (len(x), -1))
        return torch.relu(heads.transpose(1, 2).flatten(2) + x)


class Capped(Gated):
    """Scores of another kind are no known mistake."""

    def products(self, q: Tensor, k: Tensor) -> Tensor:
        return torch.tanh(q @ k.mT)


@pytest.mark.parametrize(
    ("layer", "rules"),
    [
        (ByTheWholeRoot, ["scale"]),
        (Folded, ["scale"]),
        (Reshaped, ["head-split", "scale"]),
        (Viewed, ["head-split"]),
    ],
)
def test_the_scores_name_what_the_output_hides(layer: type[Gated], rules: list[str]) -> None:
    errors = check(layer).errors
    assert [one.rule for one in errors][: len(rules)] == rules, str(check(layer))
    assert errors[0].example is None


def test_right_scores_name_nothing() -> None:
    named = {"scale", "head-split", "roles", "orientation", "packing"}
    for layer in (Gated, Capped):
        assert not named & {one.rule for one in check(layer).errors}

"""`check` on layers that give one output for all tokens of a sequence."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from headwise.check import check


class Pool(nn.Module):
    """A learnt query for each head looks at all tokens."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query = nn.Parameter(torch.randn(num_heads, dim // num_heads))
        self.key, self.value = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        k, v = (of(x).unflatten(-1, (self.num_heads, -1)) for of in (self.key, self.value))
        scores = torch.einsum("hd,bthd->bht", self.query, k) / k.shape[-1] ** 0.5
        if mask is not None:
            scores = self.hide(scores, mask)
        return torch.einsum("bht,bthd->bhd", self.soft(scores), v).flatten(1)

    def hide(self, scores: Tensor, mask: Tensor) -> Tensor:
        return scores.masked_fill(mask[:, None] == 0, float("-inf"))

    def soft(self, scores: Tensor) -> Tensor:
        return scores.softmax(-1)


class Single(Pool):
    """The output keeps an axis of one token."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x, mask)[:, None]


class Small(Pool):
    def hide(self, scores: Tensor, mask: Tensor) -> Tensor:
        return scores.masked_fill(mask[:, None] == 0, -1e-9)


class Unused(Pool):
    def hide(self, scores: Tensor, mask: Tensor) -> Tensor:
        scores.masked_fill(mask[:, None] == 0, float("-inf"))
        return scores


class OverBatch(Pool):
    def soft(self, scores: Tensor) -> Tensor:
        return scores.softmax(0)


class OverHeads(Pool):
    def soft(self, scores: Tensor) -> Tensor:
        return scores.softmax(1)


@pytest.mark.parametrize("kind", [Pool, Single])
def test_one_output_for_all_tokens_is_right_as_far_as_seen(kind: type[nn.Module]) -> None:
    verdict = check(kind)
    assert verdict.passed, str(verdict)
    said = str(verdict)
    assert "right as far as seen" in said
    assert "one output for all tokens" in said.partition("\n")[0]
    for rule in ("shape", "past-used", "batch", "padding", "gradients"):
        assert f"✅ {rule}: " in said, said


@pytest.mark.parametrize(
    ("kind", "rule"),
    [
        (Small, "mask-fill"),
        (Unused, "unused-result"),
        (OverBatch, "batch"),
        (OverHeads, "softmax"),
    ],
)
def test_its_mistakes_are_named(kind: type[nn.Module], rule: str) -> None:
    errors = check(kind).errors
    assert errors, "nothing was found"
    assert errors[0].rule == rule, str(errors)


def test_an_output_that_sees_one_token_only_is_asked_about() -> None:
    class Last(Pool):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return self.value(x[:, -1])

    with pytest.raises(ValueError, match="I do not know how to call this"):
        check(Last)


class Labels(nn.Module):
    """Queries of its own, one for each label, look at all tokens.

    `mask` is 1 for real tokens, 0 for padding.
    """

    def __init__(self, dim: int, num_heads: int, num_classes: int = 5) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.labels = nn.Embedding(num_classes, dim)
        self.query, self.key, self.value = (nn.Linear(dim, dim) for _ in range(3))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """
        Args:
            x: tokens.
            mask (Tensor, optional): 1 for real tokens, 0 for padding.
        """
        rows = self.labels.weight.expand(len(x), -1, -1)
        q, k, v = (
            of(given).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for of, given in ((self.query, rows), (self.key, x), (self.value, x))
        )
        scores = q @ k.mT / k.shape[-1] ** 0.5
        if mask is not None:
            scores = self.hide(scores, mask)
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)

    def hide(self, scores: Tensor, mask: Tensor) -> Tensor:
        return scores.masked_fill(mask[:, None, None] == 0, float("-inf"))


class Turned(Labels):
    def hide(self, scores: Tensor, mask: Tensor) -> Tensor:
        return scores.masked_fill(mask[:, None, None] != 0, float("-inf"))


class Unhidden(Labels):
    def hide(self, scores: Tensor, mask: Tensor) -> Tensor:
        return scores.masked_fill(mask.any() & (scores == 0), -1e-9)


def test_an_output_for_each_query_of_the_layer_s_own_is_checked() -> None:
    assert check(Labels).passed
    assert check(Unhidden).errors[0].rule == "mask-fill"


def test_a_mask_that_is_taken_the_other_way_round_than_it_says() -> None:
    one = check(Turned).errors[0]
    assert one.rule == "mask"
    assert "`1 for real`" in one.message


class Asked(nn.Module):
    """One query for each sequence, which comes before the tokens that it looks at."""

    def __init__(self, dim: int, axis: int = 1) -> None:
        super().__init__()
        self.axis = axis
        self.project = nn.Linear(dim, dim)

    def forward(self, user: Tensor, items: Tensor) -> Tensor:
        query = self.project(user)[:, None]
        scores = torch.bmm(query, items.mT).squeeze(1) / items.shape[-1] ** 0.5
        return torch.bmm(scores.softmax(self.axis)[:, None], items).squeeze(1)


def test_a_query_that_comes_before_the_tokens_it_looks_at() -> None:
    verdict = check(Asked)
    assert verdict.passed
    assert verdict["cross"].severity == "skipped"
    assert check(Asked, axis=0)["batch"].open  # not judged for a call that was made up


class Shares(nn.Module):
    """Gives how much each token counts, and no more."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.score = nn.Linear(dim, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.score(x).squeeze(-1).softmax(-1)


def test_weights_alone_are_asked_about() -> None:
    with pytest.raises(ValueError, match="do not know how to call"):
        check(Shares)

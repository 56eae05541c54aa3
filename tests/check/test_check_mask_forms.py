"""Masks in a form that the code or its words speak of, and flags that hide later tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headwise import check


class Attention(nn.Module):
    """Attention with a place for a mask."""

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q_proj, self.k_proj, self.v_proj, self.out = (
            nn.Linear(d_model, d_model) for _ in "qkvo"
        )

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def attend(self, x: Tensor, hidden: Tensor | None) -> Tensor:
        q, k, v = (self.split(part(x)) for part in (self.q_proj, self.k_proj, self.v_proj))
        scores = q @ k.mT / q.shape[-1] ** 0.5
        if hidden is not None:
            scores = scores.masked_fill(hidden, -torch.inf)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class ManyForms(Attention):
    """Masks of two, three and four axes."""

    def flat(self, mask: Tensor) -> Tensor:
        return mask[:, None, None, :]

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is None:
            return self.attend(x, None)
        if mask.dim() == 2:
            mask = self.flat(mask)
        elif mask.dim() == 3:
            mask = mask.unsqueeze(1)
        return self.attend(x, mask == 0)


class OfQueries(ManyForms):
    """One flag a token hides queries."""

    def flat(self, mask: Tensor) -> Tensor:
        return mask[:, None, :, None]


class Misfit(Attention):
    """Masks of two axes never fit."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is None:
            return self.attend(x, None)
        if mask.dim() == 2:
            mask = mask[:, None, :, None].expand(-1, 1, 1, x.shape[1])
        return self.attend(x, mask == 0)


class Refused(Attention):
    """Masks of two axes are refused in words."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is None:
            return self.attend(x, None)
        if mask.dim() == 2:
            raise ValueError("a mask has four axes here")
        return self.attend(x, mask == 0)


class Unheard(Attention):
    """Masks of four axes have five then, and are not filled in."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        hidden = None
        if mask is not None:
            mask = mask.unsqueeze(1)
            if len(mask.shape) == 4:
                hidden = mask == 0
        return self.attend(x, hidden)


class Written(Attention):
    """Its words promise a mask for each sequence."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend.

        Args:
            x (Tensor): tokens (B, N, C)
            mask (BoolTensor): True if ignored (B, N, M)
        """
        return self.attend(x, mask)


class Promised(Attention):
    """Its words promise a mask for each sequence, of the axes that its tokens have."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend.

        Args:
            x (Tensor): tokens (B, N, C)
            mask (BoolTensor): True if ignored (B, N, N)
        """
        return self.attend(x, mask)


class Doubtful(Attention):
    """It asks whether a mask is true, not whether it is there."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.attend(x, mask[:, None] if mask else None)


class Needed(Attention):
    """Without a mask it fails."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        hidden: Any = mask
        return self.attend(x, hidden.repeat(1, 1, 1, 1))


class Asked(Attention):
    """A mask has to be given."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.attend(x, mask.repeat(1, 1, 1, 1))


@pytest.mark.parametrize("kind", [ManyForms, Refused, Asked])
def test_forms_that_go_in_or_are_refused_in_words(kind: type[Attention]) -> None:
    verdict = check(kind, d_model=24, num_heads=3)
    assert verdict.passed, verdict


@pytest.mark.parametrize(
    ("kind", "rule", "said"),
    [
        (OfQueries, "padding", "mask hides queries in the place of keys"),
        (Misfit, "mask", "There is a way for mask with 2 axes"),
        (Unheard, "mask", "One form of mask goes in and hides nothing"),
        (Promised, "mask", "mask is written to be [b, n, n], of the axes that queries and keys"),
        (Doubtful, "mask", "With the mask mask the call fails: RuntimeError: Boolean value"),
        (Needed, "runs", "mask is None by default, and a call without it fails"),
    ],
)
def test_forms_that_do_not(kind: type[Attention], rule: str, said: str) -> None:
    first = check(kind, d_model=24, num_heads=3).errors[0]
    assert (first.rule, first.message[: len(said)]) == (rule, said)


def test_words_that_promise_another_form_are_advice() -> None:
    verdict = check(Written, d_model=24, num_heads=3)
    assert verdict.passed
    assert verdict["mask"].message.startswith("mask is written to be [b, n, m], and no mask")


class Flagged(Attention):
    """A flag of the call hides later tokens, with a mask of padding and without."""

    def forward(self, x: Tensor, padding: Tensor | None = None, is_causal: bool = False) -> Tensor:
        hidden = None if padding is None else padding[:, None, None, :]
        if is_causal:
            later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
            hidden = later if hidden is None else hidden | later
        return self.attend(x, hidden)


class FlaggedBesideAMask(Attention):
    """Its flag counts where there is a mask of padding alone."""

    def forward(self, x: Tensor, padding: Tensor | None = None, is_causal: bool = False) -> Tensor:
        if padding is None:
            return self.attend(x, None)
        hidden = padding[:, None, None, :]
        if is_causal:
            hidden = hidden | torch.ones(
                x.shape[1], x.shape[1], dtype=torch.bool, device=x.device
            ).triu(1)
        return self.attend(x, hidden)


class FlaggedOrMasked(Attention):
    """Its flag counts where there is no mask."""

    def forward(self, x: Tensor, padding: Tensor | None = None, is_causal: bool = False) -> Tensor:
        if padding is not None:
            return self.attend(x, padding[:, None, None, :])
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        return self.attend(x, later if is_causal else None)


class WrittenTwice(Attention):
    """Its words promise two forms, and one of them goes in."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend.

        Args:
            x: tokens [B, N, C]
            mask: optional, [B, N] or [B, N, N]
        """
        if mask is not None and mask.dim() == 2:
            mask = mask[:, None, None]
        return self.attend(x, mask if mask is None else mask == 0)


def test_each_form_that_is_written_must_go_in() -> None:
    (one,) = check(WrittenTwice, d_model=24, num_heads=3).errors
    assert one.message.startswith("mask is written to be [b, n, n], of the axes")


def test_a_flag_that_hides_nothing() -> None:
    assert check(Flagged, d_model=24, num_heads=3).passed
    (one,) = check(FlaggedOrMasked, d_model=24, num_heads=3).errors
    said = "Where padding is given, is_causal=True hides nothing: later tokens are seen."
    assert (one.rule, one.message) == ("mask", said)
    verdict = check(FlaggedBesideAMask, d_model=24, num_heads=3)
    assert (
        verdict["mask"].message == "is_causal=True hides nothing: later tokens are seen as before."
    )


class MadeOnTheCPU(Attention):
    """Without a mask it makes one, on the CPU."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is None:
            mask = torch.ones(x.shape[1], x.shape[1])
        return self.attend(x, mask == 0)


def test_a_mask_that_is_made_where_none_is_given() -> None:
    """Beside a causal mask that the check passes, it is moved without one, too."""
    assert check(MadeOnTheCPU, d_model=24, num_heads=3).errors[0].rule == "move"


class Scores(nn.Module):
    """Queries, keys and values without weights, a scale that callers give, and perhaps a mask."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
        scores = q @ k.mT
        return (scores if scale is None else scores * scale).softmax(-1) @ v


class Divided(nn.Module):
    """The same, with the scale below the scores."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
        scores = torch.bmm(q, k.mT)
        if scale:
            scores = scores / scale
        return torch.bmm(scores.softmax(-1), v)


class OwnScale(nn.Module):
    """It makes up a scale where nobody gives one, and a wrong one."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
        scale = scale or 1.0 / q.shape[-1]
        return (q @ k.mT * scale).softmax(-1) @ v


class MaskGiven(nn.Module):
    """A mask has to be given, `[B, T, S]`, and there is one head."""

    def filled(self, scores: Tensor, mask: Tensor) -> Tensor:
        return scores.masked_fill(mask == 0, -torch.inf)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        scores = torch.bmm(q, k.mT) / q.shape[-1] ** 0.5
        return torch.bmm(self.filled(scores, mask).softmax(-1), v)


class MaskMultiplied(MaskGiven):
    """The mask makes zeros of scores."""

    def filled(self, scores: Tensor, mask: Tensor) -> Tensor:
        return scores * mask


@pytest.mark.parametrize("kind", [Scores, Divided, MaskGiven])
def test_a_scale_or_a_mask_that_callers_give(kind: type[nn.Module]) -> None:
    verdict = check(kind)
    assert verdict.passed, verdict
    assert verdict["definition"].severity == "passed"


@pytest.mark.parametrize(("kind", "rule"), [(OwnScale, "scale"), (MaskMultiplied, "mask-fill")])
def test_a_scale_or_a_mask_that_is_wrong(kind: type[nn.Module], rule: str) -> None:
    assert check(kind).errors[0].rule == rule


class Crossing(Attention):
    """Keys and values may come from another sequence, with a mask of its own."""

    def hidden(self, mask: Tensor) -> Tensor:
        return ~mask[:, None, None, :]

    def forward(
        self, x: Tensor, context: Tensor | None = None, context_mask: Tensor | None = None
    ) -> Tensor:
        other = x if context is None else context
        q, k, v = (
            self.split(part(rows))
            for part, rows in ((self.q_proj, x), (self.k_proj, other), (self.v_proj, other))
        )
        scores = q @ k.mT / q.shape[-1] ** 0.5
        if context_mask is not None:
            scores = scores.masked_fill(self.hidden(context_mask), -torch.inf)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class CrossingQueries(Crossing):
    """The mask of the other sequence hides queries."""

    def hidden(self, mask: Tensor) -> Tensor:
        return ~mask[:, None, :, None]


class CrossingFirst(Crossing):
    """Each sequence gets the mask of the first."""

    def hidden(self, mask: Tensor) -> Tensor:
        return ~mask[:1, None, None, :]


class Remembering(Crossing):
    """A third sequence, which nobody gives, has a mask as well."""

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        mem: Tensor | None = None,
        mem_mask: Tensor | None = None,
    ) -> Tensor:
        if mem is not None and mem_mask is not None:
            x = x + (mem * mem_mask[..., None]).mean(1, keepdim=True)
        return super().forward(x, context)


class Apart(Attention):
    """Queries, keys and values are given apart, with a mask of keys."""

    def hidden(self, mask: Tensor, queries: int) -> Tensor:
        return ~mask[:, None, None, :]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.split(self.q_proj(q)), self.split(self.k_proj(k)), self.split(self.v_proj(v))
        scores = q @ k.mT / q.shape[-1] ** 0.5
        if mask is not None:
            scores = scores.masked_fill(self.hidden(mask, q.shape[2]), -torch.inf)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class ApartSquare(Apart):
    """The mask is spread over as many keys as there are queries."""

    def hidden(self, mask: Tensor, queries: int) -> Tensor:
        return ~mask[:, None, None, :queries].expand(-1, -1, queries, queries)


def test_masks_of_another_sequence() -> None:
    assert check(Crossing, d_model=24, num_heads=3).passed
    assert check(Apart, d_model=24, num_heads=3).passed
    assert check(Remembering, d_model=24, num_heads=3).passed
    wrong = {CrossingQueries: "context_mask goes in where", CrossingFirst: "With keys from another"}
    for kind, said in {**wrong, ApartSquare: "mask goes in where there are as many"}.items():
        (one,) = check(kind, d_model=24, num_heads=3).errors
        assert (one.rule, one.message[: len(said)]) == ("cross", said)


class CausalAndPadded(Attention):
    """Hides later tokens by itself, and asks for a mask of padding."""

    def forward(self, x: Tensor, pad_mask: Tensor) -> Tensor:
        """pad_mask: [B, T], True for what is real."""
        tokens = x.shape[1]
        seen = torch.ones(tokens, tokens, dtype=torch.bool, device=x.device).tril()
        return self.attend(x, ~(seen & pad_mask[:, None, None, :]))


def test_a_mask_of_padding_has_no_place_for_later_tokens() -> None:
    verdict = check(CausalAndPadded, d_model=24, num_heads=3)
    assert verdict.passed, verdict
    assert verdict["definition"].severity == "passed"

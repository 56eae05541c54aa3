"""Mistakes planted in layers as others write them, each beside the same layer without it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise import check


class Layer(nn.Module):
    """Attention with a place for each mistake."""

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        self.heads = num_heads
        self.fc_q, self.fc_k, self.fc_v, self.fc_o = (nn.Linear(d_model, d_model) for _ in range(4))
        self.reset()

    def reset(self) -> None:
        for part in (self.fc_q, self.fc_k, self.fc_v, self.fc_o):
            nn.init.zeros_(part.bias)

    def split(self, rows: Tensor) -> Tensor:
        return rows.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.split(self.fc_q(x)), self.split(self.fc_k(x)), self.split(self.fc_v(x))

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)

    def merged(self, heads: Tensor) -> Tensor:
        return self.fc_o(heads.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.parts(x)
        return self.merged(self.weights(q, k) @ v)


class KeysForValues(Layer):
    """What makes the values is set to zeros, and never called."""

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (self.split(part(x)) for part in (self.fc_q, self.fc_k, self.fc_k))
        return q, k, v


class ForAnotherInput(Layer):
    """What another input goes through is called with that."""

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__(d_model, num_heads)
        self.other = nn.Linear(d_model, d_model)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        return super().forward(x if context is None else x + self.other(context))


def test_a_projection_that_is_filled_and_never_called() -> None:
    assert check(Layer, 24, 3).passed
    verdict = check(KeysForValues, 24, 3)
    assert not verdict.passed
    assert verdict["gradients"].message == "No gradient reaches fc_v.weight and fc_v.bias."
    assert check(ForAnotherInput, 24, 3)["gradients"].severity == "skipped"


class Lazy(nn.Module):
    """Its width is that of what comes first."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.heads = num_heads
        self.query, self.key, self.value = (nn.LazyLinear(24) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.query, self.key, self.values())
        )
        return ((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v).transpose(1, 2).flatten(2)

    def values(self) -> nn.Module:
        return self.value


class LazyKeys(Lazy):
    def values(self) -> nn.Module:
        return self.key


def test_a_lazy_projection_that_no_call_makes() -> None:
    assert check(Lazy, 3).passed
    assert [one.rule for one in check(LazyKeys, 3).errors] == ["gradients"]


class Guessed(Layer):
    """Arguments whose names tell nothing: a flag and a number that change no output."""

    wrong = False

    def __init__(self, d_model: int, num_heads: int, vis: bool, flavours: int) -> None:
        super().__init__(d_model, num_heads)
        self.vis, self.flavours = vis, flavours

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        return (q @ k.mT).softmax(-1) if self.wrong else super().weights(q, k)


class GuessedAndWrong(Guessed):
    wrong = True


class GuessCounts(GuessedAndWrong):
    """Here the number is what the scores are divided by."""

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        return (q @ k.mT / self.flavours).softmax(-1)


def test_a_guess_that_changes_nothing_excuses_nothing() -> None:
    assert check(Guessed).passed
    assert [one.rule for one in check(GuessedAndWrong).errors] == ["scale"]
    assert check(GuessCounts).errors == ()


class AsksAsItIsBuilt(Layer):
    """Without the fused attention it makes a mask of its own."""

    diagonal = 0

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__(d_model, num_heads)
        self.flash = hasattr(torch.nn.functional, "scaled_dot_product_attention")
        if not self.flash:
            self.register_buffer("seen", torch.ones(64, 64).tril(self.diagonal), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.parts(x)
        if self.flash:
            return self.merged(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        scores = q @ k.mT / q.shape[-1] ** 0.5
        hidden = self.get_buffer("seen")[: x.shape[1], : x.shape[1]] == 0
        return self.merged(scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v)


class SeesTheNext(AsksAsItIsBuilt):
    diagonal = 1


class AsksInTheCall(Layer):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.parts(x)
        if hasattr(F, "scaled_dot_product_attention"):
            return self.merged(F.scaled_dot_product_attention(q, k, v))
        return self.merged(self.weights(q, k) @ v)


class OverQueries(AsksInTheCall):
    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-2)


@pytest.mark.parametrize(
    ("right", "wrong"), [(AsksAsItIsBuilt, SeesTheNext), (AsksInTheCall, OverQueries)]
)
def test_the_path_of_a_pytorch_without_fused_attention(right: type, wrong: type) -> None:
    assert check(right, 24, 3).passed
    (one,) = check(wrong, 24, 3).errors
    assert one.rule == "paths"
    assert "no F.scaled_dot_product_attention" in one.message
    assert hasattr(F, "scaled_dot_product_attention")


class MayHide(Layer):
    """Later tokens are hidden where the constructor is told so, beside a mask that is passed."""

    diagonal = 1

    def __init__(self, d_model: int, num_heads: int, mask_future: bool = False) -> None:
        super().__init__(d_model, num_heads)
        self.mask_future = mask_future

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.parts(x)
        scores = q @ k.mT / q.shape[-1] ** 0.5
        if self.mask_future:
            later = torch.ones_like(scores[0, 0]).triu(self.diagonal).bool()
            scores = scores.masked_fill(later, -torch.inf)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, -torch.inf)
        return self.merged(scores.softmax(-1) @ v)


class HidesTooLittle(MayHide):
    diagonal = 2


class UsesMask(MayHide):
    """By this name it may be any mask: what is seen of it counts."""

    def __init__(self, d_model: int, num_heads: int, use_mask: bool = False) -> None:
        super().__init__(d_model, num_heads, use_mask)


class UsesTooLittle(UsesMask):
    diagonal = 2


@pytest.mark.parametrize(("right", "wrong"), [(MayHide, HidesTooLittle), (UsesMask, UsesTooLittle)])
def test_a_flag_of_the_constructor_that_hides_later_tokens(right: type, wrong: type) -> None:
    assert check(right, 24, 3).passed
    (one,) = check(wrong, 24, 3).errors
    assert one.rule == "causal-mask"
    assert "=True: The mask is off by one" in one.message


def flagged(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if is_causal:
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
    return scores.softmax(-1) @ v


def blinded(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    """The last token sees nothing."""
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if is_causal:
        scores = scores.masked_fill(torch.ones_like(scores).tril(1).bool(), -torch.inf)
    return scores.softmax(-1) @ v


def test_a_flag_with_which_outputs_are_no_numbers() -> None:
    assert check(flagged).passed
    assert check(blinded).errors[0].rule == "finite"


class TwoMasks(Layer):
    def forward(
        self, x: Tensor, row_mask: Tensor | None = None, pair_mask: Tensor | None = None
    ) -> Tensor:
        q, k, v = self.parts(x)
        scores = q @ k.mT / q.shape[-1] ** 0.5
        if row_mask is not None:
            scores = scores.masked_fill(row_mask[:, None, None] == 0, -torch.inf)
        if pair_mask is not None:
            scores = self.hidden(scores, pair_mask)
        return self.merged(scores.softmax(-1) @ v)

    def hidden(self, scores: Tensor, mask: Tensor) -> Tensor:
        return scores.masked_fill(mask[:, None] == 0, -torch.inf)


class SecondIgnored(TwoMasks):
    def hidden(self, scores: Tensor, mask: Tensor) -> Tensor:
        return scores


def test_each_of_two_masks_is_judged() -> None:
    assert check(TwoMasks, 24, 3).passed
    (one,) = check(SecondIgnored, 24, 3).errors
    assert (one.rule, "pair_mask" in one.message) == ("mask", True)


class Grouped(Layer):
    """Query heads share keys and values."""

    tiled = ""

    def __init__(self, d_model: int, num_heads: int, num_kv_heads: int) -> None:
        super().__init__(d_model, num_heads)
        self.groups, wide = num_kv_heads, d_model // num_heads * num_kv_heads
        self.fc_k, self.fc_v = nn.Linear(d_model, wide), nn.Linear(d_model, wide)

    def shared(self, rows: Tensor, part: str) -> Tensor:
        heads, times = rows.unflatten(-1, (self.groups, -1)).transpose(1, 2), self.heads
        if part in self.tiled:
            return heads.repeat(1, times // self.groups, 1, 1)
        return heads.repeat_interleave(times // self.groups, 1)

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        keys, values = self.shared(self.fc_k(x), "k"), self.shared(self.fc_v(x), "v")
        return self.split(self.fc_q(x)), keys, values


class TilesKeys(Grouped):
    tiled = "k"


class TilesValues(Grouped):
    tiled = "v"


@pytest.mark.parametrize(("layer", "said"), [(TilesKeys, "key"), (TilesValues, "value")])
def test_keys_or_values_alone_that_are_tiled(layer: type[Grouped], said: str) -> None:
    assert check(Grouped).passed
    (one,) = check(layer).errors
    assert one.rule == "grouped-heads"
    assert one.message.startswith(f"The 3 {said} heads are tiled")


class NeverSplit(Layer):
    def split(self, rows: Tensor) -> Tensor:
        return rows

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        return (q @ k.mT / (q.shape[-1] / self.heads) ** 0.5).softmax(-1)

    def merged(self, heads: Tensor) -> Tensor:
        return self.fc_o(heads)


def test_heads_that_are_never_split() -> None:
    (one,) = check(NeverSplit, 24, 3).errors
    assert one.rule == "head-split"
    assert "one head of 24 features" in one.message


class Twice(Layer):
    """Two attentions beside each other, of the same queries and keys to two kinds of values."""

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__(d_model, num_heads)
        self.to_qkv = nn.Linear(d_model, 4 * d_model)
        self.fc_o = nn.Linear(2 * d_model, d_model)
        del self.fc_q, self.fc_k, self.fc_v

    def reset(self) -> None:
        pass

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, t = (self.split(part) for part in self.to_qkv(x).chunk(4, -1))
        distance = torch.arange(x.shape[1], device=x.device).to(x.dtype)
        near = -(distance[:, None] - distance).abs().expand(len(x), self.heads, -1, -1)
        both = torch.cat((self.weights(q, k) @ v, near.softmax(-1) @ t), -1)
        return self.merged(both)


def test_two_attentions_in_one_call_are_not_twice_as_many_heads() -> None:
    assert [one.rule for one in check(Twice, 24, 3).errors] == []


class Windowed(Layer):
    """Takes the tokens of one window."""

    def __init__(self, d_model: int, window_size: tuple[int, int], num_heads: int) -> None:
        super().__init__(d_model, num_heads)
        area = window_size[0] * window_size[1]
        self.bias = nn.Parameter(torch.zeros(num_heads, area, area))

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        return (q @ k.mT / q.shape[-1] ** 0.5 + self.bias).softmax(-1)


class WindowFails(Windowed):
    def merged(self, heads: Tensor) -> Tensor:
        return self.fc_o(heads @ heads.flatten(2))


def test_a_window_that_fails_with_as_many_tokens_as_it_has() -> None:
    assert [one.rule for one in check(Windowed).errors] == []
    (one,) = check(WindowFails).errors
    assert one.rule == "runs"
    assert "x [2, 10, 24]" in one.message


class Unpacks(Layer):
    """Takes the shape of x for two numbers."""

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens = x.shape
        q, k, v = (part.view(batch, tokens, self.heads, -1) for part in self.parts(x))
        return self.merged(self.weights(q, k) @ v)


def test_a_shape_that_is_taken_for_two_numbers() -> None:
    (one,) = check(Unpacks, 24, 3).errors
    assert one.rule == "runs"
    assert "expected 2" in one.message


class Planes(nn.Module):
    """Channels beside those of the attention, which an output must have room for."""

    def __init__(
        self, in_channels: int, out_channels: int, v_channels: int, num_heads: int
    ) -> None:
        super().__init__()
        self.heads = num_heads
        self.plain = nn.Conv2d(in_channels, out_channels - v_channels, 1)
        self.qkv = nn.Conv2d(in_channels, 3 * v_channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        _, _, h, w = x.shape
        q, k, v = (
            self.qkv(x).flatten(2).mT.unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        )
        heads = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v
        out = heads.transpose(2, 3).flatten(1, 2).unflatten(-1, (h, w))
        return torch.cat((self.plain(x), out), 1)


def test_an_output_gets_room_for_what_stands_beside_it() -> None:
    verdict = check(Planes)
    assert "out_channels=48" in str(verdict)
    assert [one.rule for one in verdict.errors] == []


class Cross(Layer):
    def forward(self, x: Tensor, context: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.split(self.fc_q(x)), self.split(self.fc_k(context)), self.fc_v(context)
        scores = q @ k.mT / q.shape[-1] ** 0.5
        if mask is not None and self.hides():
            scores = scores.masked_fill(mask[:, None, None] == 0, -torch.inf)
        return self.merged(scores.softmax(-1) @ self.split(v))

    def hides(self) -> bool:
        return True


class CrossIgnores(Cross):
    def hides(self) -> bool:
        return False


def test_a_mask_that_does_nothing_in_cross_attention() -> None:
    assert [one.rule for one in check(Cross, 24, 3).errors] == []
    (one,) = check(CrossIgnores, 24, 3).errors
    assert one.rule == "mask"


class OverHeads(Layer):
    """With tables from outside, of which nothing is known."""

    axis = -1

    def forward(self, x: Tensor, pos_embedding: Tensor) -> Tensor:
        q, k, v = self.parts(x + pos_embedding[..., : x.shape[1], :])
        scores: Any = q @ k.mT / q.shape[-1] ** 0.5
        return self.merged(scores.softmax(self.axis) @ v)


class OverTheWrongHeads(OverHeads):
    axis = 1


def test_a_softmax_over_heads_whatever_goes_in() -> None:
    assert [one.rule for one in check(OverHeads, 24, 3).errors] == []
    assert check(OverTheWrongHeads, 24, 3).errors[0].rule == "softmax"


class ReadOn(Layer):
    """The keys' numbers are read on as if their heads came first."""

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        n, tokens, _ = x.shape
        k = self.fc_k(x).view(n, self.heads, tokens, -1).transpose(1, 2).contiguous()
        return self.split(self.fc_q(x)), k.view(n, self.heads, tokens, -1), self.split(self.fc_v(x))


class Sinusoids(Layer):
    """Positions are put in without a parameter."""

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        place = torch.arange(x.shape[1], device=x.device, dtype=x.dtype)[:, None]
        return super().parts(x + (place * torch.arange(x.shape[2], device=x.device)).sin())


def test_where_no_positions_are_put_in_other_numbers_are_a_mistake() -> None:
    (one,) = check(ReadOn, 24, 3).errors
    assert one.rule == "definition"
    assert check(Sinusoids, 24, 3).passed


class HeadsForTokens(Layer):
    """Runs where there are as many tokens as heads, and with one token."""

    def split(self, rows: Tensor) -> Tensor:
        return rows.unflatten(-1, (self.heads, -1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.parts(x)
        scores = torch.einsum("bhtd,bhsd->bhts", q, k.transpose(1, 2)) / q.shape[-1] ** 0.5
        return self.merged(scores.softmax(-1) @ v)


def test_as_many_tokens_as_heads_are_a_chance() -> None:
    assert [one.rule for one in check(HeadsForTokens).errors] == ["runs"]


class OneTokenGoesIn(HeadsForTokens):
    """With one token there is nothing to be mixed up."""

    def __init__(self, d_model: int, num_heads: int) -> None:
        assert num_heads == 2
        super().__init__(d_model, num_heads)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.shape[1] > 1 else self.fc_o(self.parts(x)[2].flatten(2))


def test_two_tokens_for_two_heads_are_no_way_to_call_it() -> None:
    assert [one.rule for one in check(OneTokenGoesIn, num_heads=2).errors] == ["runs"]


class Worded(Layer):
    """What it does is said in a word, and each of them must be right."""

    fill = float("-inf")

    def __init__(self, d_model: int, num_heads: int, hiding: str) -> None:
        super().__init__(d_model, num_heads)
        self.hiding = hiding

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        scores = q @ k.mT / q.shape[-1] ** 0.5
        if self.hiding == "causal":
            scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), self.fill)
        elif self.hiding != "none":
            raise ValueError(f"hiding={self.hiding!r}: it is causal or none")
        return scores.softmax(-1)


class WordedAndWrong(Worded):
    fill = 1e-9


def test_a_word_that_the_code_asks_for_is_no_guess() -> None:
    assert check(Worded).passed
    assert check(WordedAndWrong).errors[0].rule == "mask-fill"


class HidesIfTold(Layer):
    """Later tokens are hidden where it is told so."""

    def __init__(self, d_model: int, num_heads: int, is_masked: bool = False) -> None:
        super().__init__(d_model, num_heads)
        self.is_masked = is_masked

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        scores = q @ k.mT / q.shape[-1] ** 0.5
        return (self.hidden(scores) if self.is_masked else scores).softmax(-1)

    def hidden(self, scores: Tensor) -> Tensor:
        return scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)


class HidesByNumbers(HidesIfTold):
    def hidden(self, scores: Tensor) -> Tensor:
        return scores.masked_fill(torch.ones_like(scores).triu(1), -torch.inf)


def test_a_flag_with_which_a_call_fails() -> None:
    assert check(HidesIfTold, 24, 3).passed
    (one,) = check(HidesByNumbers, 24, 3).errors
    assert one.rule == "runs"
    assert one.message.startswith("With is_masked=True")


class MaskGiven(Layer):
    """Its constructor takes a mask, or anything else for yes."""

    def __init__(self, d_model: int, num_heads: int, mask: Any = None) -> None:
        super().__init__(d_model, num_heads)
        self.mask = mask

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        scores = q @ k.mT / q.shape[-1] ** 0.5
        if self.mask is not None:
            scores = scores.masked_fill(self.later(scores), -torch.inf)
        return scores.softmax(-1)

    def later(self, scores: Tensor) -> Tensor:
        return torch.ones(scores.shape[-2:], device=scores.device).triu(1).bool()


class MaskMadeHere(MaskGiven):
    def later(self, scores: Tensor) -> Tensor:
        return torch.ones(scores.shape[-2:]).triu(1).bool()


def test_a_mask_of_the_constructor_that_stays_on_the_cpu() -> None:
    assert check(MaskGiven, 24, 3).passed
    (one,) = check(MaskMadeHere, 24, 3).errors
    assert one.rule == "move"
    assert one.message.startswith("With mask=True")


class FewerGroups(Layer):
    """Keys and values are made for all heads, and repeated all the same."""

    def __init__(self, d_model: int, num_heads: int, nums_group: int) -> None:
        super().__init__(d_model, num_heads)
        self.times = num_heads // nums_group

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = super().parts(x)
        return q, k.repeat_interleave(self.times, 1), v.repeat_interleave(self.times, 1)


class NeverRepeated(Grouped):
    """One group goes with all heads, and as many as there are heads; no other number does."""

    def shared(self, rows: Tensor, part: str) -> Tensor:
        return rows.unflatten(-1, (self.groups, -1)).transpose(1, 2)


def test_groups_that_are_never_repeated() -> None:
    (one,) = check(NeverRepeated).errors
    assert one.rule in ("runs", "grouped-heads")


def test_grouped_heads_that_run_only_where_they_are_not_grouped() -> None:
    (one,) = check(FewerGroups).errors
    assert one.rule == "runs"
    assert one.message.startswith("With nums_group=1")


class Lengths(Layer):
    """Takes lengths, or a mask of keys for each sequence."""

    def forward(self, x: Tensor, valid_lens: Tensor | None = None) -> Tensor:
        q, k, v = self.parts(x)
        scores = q @ k.mT / q.shape[-1] ** 0.5
        if valid_lens is not None:
            scores = self.filled(scores, valid_lens)
        return self.merged(scores.softmax(-1) @ v)

    def filled(self, scores: Tensor, lengths: Tensor) -> Tensor:
        seen = torch.arange(scores.shape[-1], device=scores.device) < lengths[:, None]
        return scores.masked_fill(~seen[:, None, None], -torch.inf)


class LengthsOfQueries(Lengths):
    def filled(self, scores: Tensor, lengths: Tensor) -> Tensor:
        return scores.masked_fill(~lengths.mT[:, None], -torch.inf)  # wants [B, 1, S]


def test_a_mask_of_keys_that_hides_queries() -> None:
    assert check(Lengths, 24, 3).passed
    (one,) = check(LengthsOfQueries, 24, 3).errors
    assert one.rule == "padding"


class BiasAdded(Layer):
    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        q, k, v = self.parts(x)
        scores = q @ k.mT / q.shape[-1] ** 0.5
        if bias is not None:
            scores = self.added(scores, bias)
        return self.merged(scores.softmax(-1) @ v)

    def added(self, scores: Tensor, bias: Tensor) -> Tensor:
        return scores + bias


class BiasIgnored(BiasAdded):
    def added(self, scores: Tensor, bias: Tensor) -> Tensor:
        return scores


def test_a_bias_that_changes_nothing() -> None:
    assert check(BiasAdded, 24, 3).passed
    (one,) = check(BiasIgnored, 24, 3).errors
    assert one.rule == "mask"


class TriangleForNothing(Layer):
    """Makes a mask, and hides nothing with it."""

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        mask = torch.tril(torch.ones(q.shape[-2], k.shape[-2], device=q.device))  # noqa: F841
        return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)


def test_a_triangle_that_nothing_reads() -> None:
    (one,) = check(TriangleForNothing, 24, 3).errors
    assert one.rule == "unused-result"
    assert "mask becomes there is never read" in one.message


class NoForward(Layer):
    """Its method goes by another name."""

    forward = nn.Module.forward

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = self.parts(x)
        return self.merged(self.weights(q, k) @ v)


class NoForwardButTwo(NoForward):
    """It may be called by either of two methods."""

    def attention(self, x: Tensor) -> Tensor:
        return super().attention(x)

    def other(self, x: Tensor) -> Tensor:
        return x


def test_a_layer_without_forward_is_called_by_its_one_other_method() -> None:
    report = check(NoForward, 24, 3)
    assert report.passed
    assert "it has no forward: its attention is called" in report.notes
    layer = NoForward(24, 3)
    assert check(layer, num_heads=3).passed
    assert type(layer) is NoForward
    with pytest.raises(ValueError, match=r"lambda layer, x: layer\.attention\(x\)"):
        check(NoForwardButTwo, 24, 3)
    assert check(NoForwardButTwo, 24, 3, call=lambda layer, x: layer.attention(x)).passed


class MaskOfAnother(Layer):
    """Takes another sequence, which it can do without, and the mask of that one."""

    def forward(
        self, src: Tensor, ctx: Tensor | None = None, ctx_mask: Tensor | None = None
    ) -> Tensor:
        if ctx is not None and ctx_mask is not None:
            src = src + (ctx * ctx_mask[..., None]).mean(1, keepdim=True)
        return super().forward(src)


class MaskOfItsOwn(Layer):
    """The mask is called after the input itself, and does nothing."""

    def forward(self, src: Tensor, src_mask: Tensor | None = None) -> Tensor:
        return super().forward(src if src_mask is None else src.clone())


def test_a_mask_of_another_input_is_not_judged_by_this_one() -> None:
    assert [one.rule for one in check(MaskOfAnother, 24, 3).errors] == []
    (one,) = check(MaskOfItsOwn, 24, 3).errors
    assert (one.rule, "src_mask changes nothing" in one.message) == ("mask", True)

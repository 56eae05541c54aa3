"""Mistakes that the code or a single call tells, where nothing else can be read or judged."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.check import check
from headwise.check.diagnosis.static_checks import read_off

HEADS = 4


class Projected(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.wide = heads, width // heads
        self.w_q, self.w_k, self.w_v = (nn.Linear(width, width) for _ in range(3))
        self.last = nn.Linear(width, width)

    def split(self, rows: Tensor) -> Tensor:
        return rows.view(*rows.shape[:2], self.heads, self.wide).transpose(1, 2)

    def joined(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = (q @ k.mT / math.sqrt(self.wide)).softmax(-1)
        return self.last((weights @ v).transpose(1, 2).flatten(2))


class Right(Projected):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.spare_k = nn.Identity()  # is never used, and nothing stands in for it

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.w_q(x), self.w_k(x), self.w_v(x)
        q = self.split(q)
        k = self.split(k)
        v = self.split(v)
        scores = q @ k.mT / math.sqrt(self.wide)
        if mask is not None:
            mask = mask.to(x.device)
            scores = scores.masked_fill(mask[:, None, None] == 0, -torch.inf)
        return self.last((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class RightBySum(Projected):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (self.split(f(x)) for f in (self.w_q, self.w_k, self.w_v))
        scores = q @ k.mT / math.sqrt(self.wide)
        if mask is not None:
            mask = mask.to(x)[:, None, None]
            scores = scores * mask
            scores = scores - 1e9 * (1 - mask)
        return self.last((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class RightByShare(Projected):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (self.split(f(x)) for f in (self.w_q, self.w_k, self.w_v))
        weights = (q @ k.mT / math.sqrt(self.wide)).softmax(-1)
        if mask is not None:
            weights = weights * mask.to(x)[:, None, None]
            weights = weights / weights.sum(-1, keepdim=True)
        return self.last((weights @ v).transpose(1, 2).flatten(2))


class RightOfQueries(Projected):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (self.split(f(x)) for f in (self.w_q, self.w_k, self.w_v))
        weights = (q @ k.mT / math.sqrt(self.wide)).softmax(-1)
        if mask is not None:
            weights = weights * mask[:, None, :, None]
        return self.last((weights @ v).transpose(1, 2).flatten(2))


class KeysForValues(Projected):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.value = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q = self.w_q(x).view(64, 320, self.heads, -1)
        k = self.w_k(x).view(64, 320, self.heads, -1)
        v = self.w_k(x).view(64, 320, self.heads, -1)
        return self.joined(q, k, v)


class ValuesLost(Projected):
    def forward(self, x: Tensor, y: Any) -> Tensor:
        q, k, v = self.w_q(x), self.w_k(y), self.w_v(y)
        q = self.split(q)
        k = self.split(k)
        v = k.reshape(*k.shape)
        return self.joined(q, k, v)


class AskedTooLate(Projected):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        mask = mask.to(x.device)
        q, k, v = (self.split(f(x)) for f in (self.w_q, self.w_k, self.w_v))
        if mask is not None:
            k = k * mask[:, None, :, None]
        return self.joined(q, k, v)


class AskedForHalf(Projected):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (self.split(f(x)) for f in (self.w_q, self.w_k, self.w_v))
        scores = q @ k.mT / math.sqrt(self.wide)
        if mask is not None:
            mask = mask[:, None, None]
        if mask.dtype != torch.bool:
            mask = mask > 0
        scores = scores.masked_fill(~mask, -torch.inf)
        return self.last((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class PowerFirst(Projected):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.scale = self.wide**-1 / 2


class NeverDefined(Projected):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split(f(x)) for f in (self.w_q, self.w_k, self.w_v))
        return self.merged_again(self.joined(q, k, v))


class Misspelt(Projected):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split(f(x)) for f in (self.w_q, self.w_k, self.w_v))
        return self.joined(q, k, v).view(*x.shape[:2], self.head * self.wide)


class NoSuchMethod(Projected):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split(f(x)) for f in (self.w_q, self.w_k, self.w_v))
        return self.joined(q, k, v.flatten(2).reshapes(v.shape))


class RootLost(Projected):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split(f(x)) for f in (self.w_q, self.w_k, self.w_v))
        scores = q @ k.mT
        weights = scores / math.sqrt(self.wide)
        weights = scores.softmax(-1)
        return self.last((weights @ v).transpose(1, 2).flatten(2))


class InputForValues(Projected):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = torch.cat([self.w_q(x), self.w_k(x), self.w_v(x)], -1).chunk(3, dim=-1)  # noqa: RUF059
        weights = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)
        return self.last(weights @ x)


class KeysTwice(Projected):
    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        asked, held = self.split(self.w_q(query)), self.split(self.w_k(key))
        weights = (asked @ held.mT / math.sqrt(self.wide)).softmax(-1)
        return self.last((weights @ held).transpose(1, 2).flatten(2))


class TimesMask(Projected):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (self.split(f(x)) for f in (self.w_q, self.w_k, self.w_v))
        scores = q @ k.mT / math.sqrt(self.wide)
        if mask is not None:
            mask = mask[:, None, None]
            scores *= mask.logical_not()
        return self.last((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class TimesMaskLate(Projected):
    def forward(self, x: Tensor, pad_mask: Tensor | None = None) -> Tensor:
        q, k, v = (self.split(f(x)) for f in (self.w_q, self.w_k, self.w_v))
        weights = torch.softmax(torch.matmul(q, k.mT) / math.sqrt(self.wide), -1)
        if pad_mask is not None:
            both = (pad_mask.unsqueeze(1) & pad_mask.unsqueeze(2)).unsqueeze(1)
            both_mask = both.expand(-1, self.heads, -1, -1)
            weights = weights * both_mask
        return self.last((weights @ v).transpose(1, 2).flatten(2))


class SmallFill(Projected):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (self.split(f(x)) for f in (self.w_q, self.w_k, self.w_v))
        scores = q @ k.mT / math.sqrt(self.wide)
        if mask is not None:
            scores = scores.masked_fill(mask[:, None, None] == 0, -1e-9)
        return self.last((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


EPS = 1e-7


class SmallByName(Projected):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (self.split(f(x)) for f in (self.w_q, self.w_k, self.w_v))
        scores = q @ k.mT / math.sqrt(self.wide)
        if mask is not None:
            scores = scores.masked_fill(mask[:, None, None] == 0, -EPS)
        return self.last((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Attending(nn.Module):
    def __init__(self, width: int, bias: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.last, self.drop = nn.Linear(width, width, bias=bias), nn.Dropout(dropout)


class RightlyBuilt(Attending):
    def __init__(self, width: int, dropout_rate: float = 0.1, bias: bool = True) -> None:
        super().__init__(width, bias, dropout_rate)


class MaskDropped(Projected):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.inner = Right(width, heads)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.inner(x, mask=None)


class DropoutForBias(Attending):
    def __init__(self, width: int, dropout_rate: float = 0.1) -> None:
        super().__init__(width, dropout_rate)


class NoSuchList(Projected):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.inner = nn.Modulelist([nn.Linear(width, width)])  # type: ignore[attr-defined]


class NoSuchName(Projected):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.inner = Rihgt(width, heads)  # type: ignore[name-defined]


class SetSometimes(Projected):
    """Its dropout is there only where one is asked for."""

    def __init__(self, width: int, heads: int, rate: float | None = None) -> None:
        super().__init__(width, heads)
        if rate is not None:
            self.drop = nn.Dropout(rate)

    def forward(self, x: Tensor) -> Tensor:
        def part(project: Any) -> Tensor:
            return self.split(project(x))

        weights = (part(self.w_q) @ part(self.w_k).mT / math.sqrt(self.wide)).softmax(-1)
        if self.drop is not None:
            weights = self.drop(weights)
        return self.last((weights @ part(self.w_v)).transpose(1, 2).flatten(2))


class SetEitherWay(Projected):
    def __init__(self, width: int, heads: int, rate: float | None = None) -> None:
        super().__init__(width, heads)
        if rate is not None:
            self.drop = nn.Dropout(rate)
        else:
            self.drop = nn.Identity()  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split(f(x)) for f in (self.w_q, self.w_k, self.w_v))
        return self.joined(self.drop(q), k, v)


class AskedBySame(Projected):
    """The same condition stands before what it sets."""

    def __init__(self, width: int, heads: int, causal: bool = False) -> None:
        super().__init__(width, heads)
        self.causal = causal
        if causal:
            self.register_buffer("later", torch.ones(99, 99).triu(1).bool())
            self.count = 99

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split(f(x)) for f in (self.w_q, self.w_k, self.w_v))
        scores = q @ k.mT / math.sqrt(self.wide)
        if self.causal and self.count:
            later: Any = self.later
            scores = scores.masked_fill(later[: x.shape[1], : x.shape[1]], -torch.inf)
        return self.last((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class LayerLost(Projected):
    """The attention is thrown away: the last line starts from x again."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(self.w_q(x)), self.split(self.w_k(x)), self.split(self.w_v(x))
        output = self.joined(q, k, v)
        output = self.norm(output + x)
        output = self.last(x)
        return output + x


class LayerKept(Projected):
    """A method that is called for what it does, and a layer on one of two ways."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.norm = nn.LayerNorm(width)

    def kept(self, x: Tensor) -> Tensor:
        self.seen = x.detach()
        return x

    def forward(self, x: Tensor) -> Tensor:
        out = self.kept(x)
        out = self.norm(x)
        if self.training:
            out = self.norm(out)
        return self.last(out)


@pytest.mark.parametrize(
    ("layer", "rule", "says"),
    [
        (LayerLost, "unused-result", "output becomes there is replaced"),
        (SetSometimes, "runs", "self.drop is set only where `rate is not None` holds"),
        (NoSuchList, "builds", "There is no nn.Modulelist"),
        (NoSuchName, "builds", "Nothing defines the name Rihgt"),
        (RootLost, "unused-result", "weights becomes there is replaced"),
        (InputForValues, "roles", "nothing reads v"),
        (KeysTwice, "roles", "nothing reads value"),
        (TimesMask, "mask-fill", "scores are multiplied by mask"),
        (TimesMaskLate, "mask-fill", "both_mask sets weights to 0"),
        (MaskDropped, "mask", "mask is taken and never read"),
        (SmallFill, "mask-fill", "filled with -1e-09"),
        (SmallByName, "mask-fill", "filled with -1e-07"),
        (DropoutForBias, "runs", "given dropout_rate for bias"),
        (KeysForValues, "roles", "values are made by self.w_k, and self.value"),
        (ValuesLost, "roles", "values are made, thrown away, and made of k"),
        (AskedTooLate, "runs", "mask is None by default"),
        (AskedForHalf, "runs", "mask is None by default"),
        (PowerFirst, "scale", "self.wide ** -1 / 2 takes the power first"),
        (NoSuchMethod, "runs", "has a method reshapes"),
        (NeverDefined, "runs", "defines self.merged_again"),
        (Misspelt, "runs", "defines self.head"),
    ],
)
def test_the_code_tells(layer: type[nn.Module], rule: str, says: str) -> None:
    (one,) = read_off(layer)
    assert one.rule == rule
    assert says in one.message
    assert "test_check_read.py" in one.hint
    assert one.ground == "any"


class TakesFromItsDefault(Right):
    def __init__(self, width: int, heads: int, drop: dict[str, float] = {"p": 0.1}) -> None:  # noqa: B006
        super().__init__(width, heads)
        self.drop = nn.Dropout(drop.pop("p"))


class TakesFromACopy(Right):
    def __init__(self, width: int, heads: int, drop: dict[str, float] = {"p": 0.1}) -> None:  # noqa: B006
        super().__init__(width, heads)
        drop = dict(drop)
        self.drop = nn.Dropout(drop.pop("p"))


def test_a_default_that_wears_out() -> None:
    (one,) = read_off(TakesFromItsDefault)
    assert (one.rule, "out of drop" in one.message) == ("builds", True)
    assert [*read_off(TakesFromACopy)] == []


def test_what_a_method_does_beside_is_no_lost_result() -> None:
    assert [*read_off(LayerKept)] == []


class FusedTheOtherWay(Projected):
    """What it writes of its mask is not what the fused call takes it for."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.split(self.w_q(x)), self.split(self.w_k(x)), self.split(self.w_v(x))
        bias = (mask == 0)[:, None, None]  # True = ignore
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return self.last(out.transpose(1, 2).flatten(2))


class FusedAsWritten(FusedTheOtherWay):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.split(self.w_q(x)), self.split(self.w_k(x)), self.split(self.w_v(x))
        bias = (mask == 0)[:, None, None]  # True = ignore
        bias = ~bias
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        shown = mask.bool()[:, None, None]  # 0 = hidden
        out = out + F.scaled_dot_product_attention(q, k, v, attn_mask=shown)
        return self.last(out.transpose(1, 2).flatten(2))


def test_a_mask_that_goes_the_other_way_into_the_fused_call_than_is_written() -> None:
    (one,) = read_off(FusedTheOtherWay)
    assert one.rule == "mask"
    assert "True = ignore" in one.message
    (right,) = {one.rule for one in check(FusedAsWritten, 24, 3).results} & {"mask"}
    assert check(FusedAsWritten, 24, 3)[right].severity != "error"


class Spread(Right):
    """Some name what the rest of the arguments are after attention."""

    def forward(self, x: Tensor, mask: Tensor | None = None, **attention_kwargs: Any) -> Tensor:
        known = {name for name, _ in attention_kwargs.items()}
        return super().forward(x, mask if "mask" not in known else None)


def test_the_rest_of_the_arguments_is_no_tensor() -> None:
    assert [*read_off(Spread)] == []


class DropsAndLacks(Right):
    """Two mistakes: a call that fails comes before numbers that are wrong."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is not None:
            x = x * heads_of_it
        return F.dropout(super().forward(x), 0.5)


def test_a_name_that_is_not_there_comes_before_dropout_in_eval() -> None:
    assert [one.rule for one in check(DropsAndLacks, 24, 3).errors] == ["runs", "dropout-in-eval"]


@pytest.mark.parametrize("layer", [NoSuchList, NoSuchName])
def test_what_a_constructor_lacks_comes_before_the_rest(layer: type[nn.Module]) -> None:
    assert [one.rule for one in check(layer, 24, 3).findings] == ["builds", "builds"]


def halved(q: Tensor, k: Tensor, v: Tensor, drop: nn.Module | None = None) -> Tensor:
    weights = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)
    if drop is not None:
        weights = F.dropout(weights)
    return weights @ v


def dropping(q: Tensor, k: Tensor, v: Tensor, rate: float = 0.0, training: bool = False) -> Tensor:
    weights = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)
    weights = F.dropout(F.dropout(weights, rate), training=training)
    return weights @ v


def test_a_function_that_drops_half_whatever_it_is_handed() -> None:
    (one,) = check(halved).errors
    assert one.rule == "dropout-in-eval"
    assert check(dropping).passed


class Remembering(Projected):
    """Refuses to do without what it has a default for."""

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        assert memory is not None, "memory must be given"
        q, k, v = self.w_q(x), self.w_k(memory), self.w_v(memory)
        return self.joined(self.split(q), self.split(k), self.split(v))


class RememberingItsOwn(Remembering):
    """Cuts keys by the number of queries."""

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        if memory is None:
            raise ValueError("memory must be given")

        def split(rows: Tensor) -> Tensor:
            return rows.view(*x.shape[:2], self.heads, self.wide).transpose(1, 2)

        return self.joined(split(self.w_q(x)), split(self.w_k(memory)), split(self.w_v(memory)))


def test_what_a_layer_refuses_to_do_without_is_given() -> None:
    assert check(Remembering(24, 3), num_heads=3).passed
    assert check(RememberingItsOwn(24, 3), num_heads=3).errors[0].rule == "cross"


class MaskedHeads(Projected):
    """Named for a mask that its default leaves out."""

    def __init__(self, width: int, heads: int, mask: bool = False) -> None:
        super().__init__(width, heads)
        self.mask = mask
        wide = width // heads
        self.wqs, self.wks, self.wvs = (
            nn.ModuleList(nn.Linear(width, wide) for _ in range(heads)) for _ in range(3)
        )
        del self.w_q, self.w_k, self.w_v

    def forward(self, x: Tensor) -> Tensor:
        found = []
        for to_q, to_k, to_v in zip(self.wqs, self.wks, self.wvs, strict=True):
            scores = to_q(x) @ to_k(x).mT / math.sqrt(self.wide)
            if self.mask:
                later = torch.ones_like(scores).triu(1)
                scores = scores.masked_fill(later == 1, -torch.inf)
            found.append(scores.softmax(-1) @ to_v(x))
        return self.last(torch.cat(found, -1))


def test_a_layer_that_is_named_for_its_mask_is_built_with_it() -> None:
    verdict = check(MaskedHeads)
    assert verdict.passed
    assert not verdict.unchecked
    assert "mask=True" in str(verdict)


@pytest.mark.parametrize(
    "layer",
    [Right, RightBySum, RightByShare, RightOfQueries, RightlyBuilt, SetEitherWay, AskedBySame],
)
def test_right_code_tells_nothing(layer: type[nn.Module]) -> None:
    assert [*read_off(layer)] == []


@pytest.mark.parametrize("layer", [Right, RightBySum, RightByShare])
def test_right_layers_pass(layer: type[nn.Module]) -> None:
    assert check(layer(24, 3)).passed


def test_what_the_code_tells_comes_before_a_call_that_fails() -> None:
    assert [one.rule for one in check(KeysForValues).errors] == ["roles", "runs"]


class OneHead(nn.Module):
    """One of several heads, told how many there are."""

    def __init__(self, dim: int = 24, heads: int = 3, axis: int = 1) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(dim, dim // heads) for _ in range(3))
        self.root, self.axis = (dim // heads) ** 0.5, axis

    def forward(self, x: Tensor) -> Tensor:
        scores = self.q(x) @ self.k(x).transpose(1, 2) / self.root
        return torch.softmax(scores, dim=self.axis) @ self.v(x)


class HeadsOfTheFile(nn.Module):
    """Its number of heads is a constant of its file."""

    def __init__(self, early: bool = True) -> None:
        super().__init__()
        self.w_q, self.w_k, self.w_v, self.w_o = (nn.Linear(32, 32) for _ in range(4))
        self.drop, self.early = nn.Dropout(0.1), early

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            f(x).view(len(x), -1, HEADS, 8).transpose(1, 2) for f in (self.w_q, self.w_k, self.w_v)
        )
        scores = q @ k.transpose(-1, -2) / math.sqrt(8)
        weights = self.drop(scores).softmax(-1) if self.early else self.drop(scores.softmax(-1))
        return self.w_o((weights @ v).transpose(1, 2).reshape(x.shape))


class Folded(nn.Module):
    """Heads folded into the batch, behind an activation."""

    def __init__(self, dim: int, heads: int, wrong: bool) -> None:
        super().__init__()
        self.heads, self.wrong = heads, wrong
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))

    def fold(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2).flatten(0, 1)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.fold(F.relu(self.q(q))), self.fold(F.relu(self.k(k))), self.fold(self.v(v))
        scores = q @ k.mT / q.shape[-1] ** 0.5
        if mask is not None:
            every = mask.repeat(self.heads, 1, 1)
            every = every if self.wrong else mask.repeat_interleave(self.heads, 0)
            scores = scores.masked_fill(every == 0, -1e9)
        heads = (scores.softmax(-1) @ v).unflatten(0, (-1, self.heads))
        return F.relu(self.o(heads.transpose(1, 2).flatten(2)))


class OverTheBatch(nn.Module):
    """Its one matrix cannot be told from others; its scores lie in one table for all sequences."""

    def __init__(self, dimensions: int, axis: int) -> None:
        super().__init__()
        self.mixing, self.axis = nn.Linear(dimensions, dimensions, bias=False), axis

    def forward(self, query: Tensor, context: Tensor) -> Tensor:
        scores = self.mixing(query) @ context.mT
        table = torch.softmax(scores.reshape(-1, scores.shape[-1]), dim=self.axis)
        return torch.tanh(table.view(scores.shape) @ context)


class Grouped(nn.Module):
    """Two query heads share keys and values, by an einsum."""

    def __init__(self, dim: int, num_heads: int, num_kv_heads: int, into: str) -> None:
        super().__init__()
        self.groups, self.wide, self.into = num_kv_heads, dim // num_heads, into
        self.q_proj, self.out_proj = nn.Linear(dim, dim), nn.Linear(dim, dim)
        if into == "bgts":
            self.out_proj = nn.Linear(num_kv_heads * self.wide, dim)
        self.k_proj, self.v_proj = (nn.Linear(dim, num_kv_heads * self.wide) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q = self.q_proj(x).unflatten(-1, (self.groups, -1, self.wide))
        k, v = (f(x).unflatten(-1, (self.groups, -1)) for f in (self.k_proj, self.v_proj))
        scores = torch.einsum(f"btgrd,bsgd->{self.into}", q, k) / self.wide**0.5
        out = self.into.replace("s", "d").replace("t", "").replace("b", "bt")
        weights = scores.flatten(1, -3).softmax(-1).view(scores.shape)
        return self.out_proj(torch.einsum(f"{self.into},bsgd->{out}", weights, v).flatten(2))


class Biased(Projected):
    """Causal; where a bias is given, wrong forgets the mask."""

    def __init__(self, width: int, heads: int, wrong: bool) -> None:
        super().__init__(width, heads)
        self.wrong = wrong

    def forward(self, x: Tensor, attn_bias: Tensor | None = None) -> Tensor:
        q, k, v = (self.split(f(x)) for f in (self.w_q, self.w_k, self.w_v))
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        if attn_bias is not None:
            mask = attn_bias if self.wrong else attn_bias.masked_fill(later, -torch.inf)
        else:
            mask = ~later
        heads = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.last(heads.transpose(1, 2).flatten(2))


class ByTheLength(nn.Module):
    """Two widths are guessed; that scores are divided by the root of the length is not."""

    def __init__(self, d_model: int, q: int, v: int, h: int, wrong: bool) -> None:
        super().__init__()
        self.h, self.wide, self.wrong = h, q, wrong
        self.W_q, self.W_k = nn.Linear(d_model, q * h), nn.Linear(d_model, q * h)
        self.W_v, self.W_o = nn.Linear(d_model, v * h), nn.Linear(v * h, d_model)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.cat(f(x).chunk(self.h, -1)) for f in (self.W_q, self.W_k, self.W_v))
        scores = q @ k.mT / math.sqrt(x.shape[1] if self.wrong else self.wide)
        return self.W_o(torch.cat((scores.softmax(-1) @ v).chunk(self.h), -1))


@pytest.mark.parametrize(
    ("layer", "wrong", "right", "rule"),
    [
        (OneHead, {"axis": 1}, {"axis": -1}, "softmax"),
        (HeadsOfTheFile, {"early": True}, {"early": False}, "dropout"),
        (Folded, {"wrong": True}, {"wrong": False}, "padding"),
        (OverTheBatch, {"axis": 0}, {"axis": 1}, "softmax"),
        (
            Grouped,
            {"num_heads": 6, "into": "bgts"},
            {"num_heads": 6, "into": "bgrts"},
            "grouped-heads",
        ),
        (Biased, {"wrong": True}, {"wrong": False}, "mask"),
        (ByTheLength, {"wrong": True}, {"wrong": False}, "scale"),
    ],
)
def test_heads_are_counted_in_the_scores_and_guesses_of_sizes_excuse_nothing(
    layer: type[nn.Module], wrong: dict[str, Any], right: dict[str, Any], rule: str
) -> None:
    assert [one.rule for one in check(layer, **wrong).errors] == [rule]
    assert check(layer, **right).errors == ()


class OnlyWithALength(Projected):
    """A buffer that is there for some arguments only."""

    def __init__(self, width: int, heads: int, max_len: int | None = None) -> None:
        super().__init__(width, heads)
        if max_len is not None:
            self.register_buffer("later", torch.ones(max_len, max_len).triu(1).bool())

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split(f(x)) for f in (self.w_q, self.w_k, self.w_v))
        scores = q @ k.mT / self.wide**0.5
        scores = scores.masked_fill(self.later[: x.shape[1], : x.shape[1]], -torch.inf)
        return self.last((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def test_what_a_layer_lacks_as_it_was_built_is_its_mistake() -> None:
    for verdict in (check(OnlyWithALength), check(OnlyWithALength, width=24, heads=3)):
        (one,) = verdict.errors
        assert one.rule == "runs"
        assert "later" in one.message


class FilledWith(Projected):
    def __init__(self, width: int, heads: int, fill: float, steps: float = 0.0) -> None:
        super().__init__(width, heads)
        self.fill, self.steps = fill, steps

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split(f(x)) for f in (self.w_q, self.w_k, self.w_v))
        places = torch.arange(x.shape[1], device=x.device)
        apart = places[None] - places[:, None]
        scores = q @ k.mT / math.sqrt(self.wide) - self.steps * apart.abs()
        scores = scores.masked_fill(apart > 0, self.fill) if self.fill else scores
        return self.last((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def test_a_small_fill_is_a_mask_though_nobody_says_causal() -> None:
    (one,) = check(FilledWith(24, 3, -20.0)).errors
    assert (one.rule, "to −20," in one.message) == ("mask-fill", True)
    (two,) = check(FilledWith(24, 3, -6.0)).errors
    assert (two.rule, "to −6," in two.message) == ("mask-fill", True)
    assert not check(FilledWith(24, 3, 0.0, steps=3.0)).errors  # far tokens count for less


class RelativeOne(nn.Module):
    """Scores of contents and positions, which no reading of the weights explains."""

    def __init__(self, d_model: int, num_heads: int, wrong: bool, early: bool = False) -> None:
        super().__init__()
        self.heads, self.wide, self.early = num_heads, d_model // num_heads, early
        self.root = math.sqrt(d_model if wrong else self.wide)
        self.q, self.k, self.v, self.pos = (nn.Linear(d_model, d_model) for _ in range(4))
        self.u = nn.Parameter(torch.randn(num_heads, self.wide))
        self.out = nn.Linear(d_model, d_model)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)) for f in (self.q, self.k, self.v))
        places = torch.arange(x.shape[1], dtype=x.dtype, device=x.device).view(1, -1, 1)
        far = self.pos(places.sin().expand(1, -1, x.shape[-1])).unflatten(-1, (self.heads, -1))
        if self.early:
            q = q / self.root
        scores = torch.einsum("bthd,bshd->bhts", q + self.u, k)
        scores = scores + q.transpose(1, 2) @ far.permute(0, 2, 3, 1)
        weights = (scores if self.early else scores / self.root).softmax(-1)
        return self.out((weights @ v.transpose(1, 2)).transpose(1, 2).flatten(2))


class OfLengthOfQueries(Projected):
    """Keys of another sequence, split with the number of queries, or with their own."""

    def __init__(self, width: int, heads: int, wrong: bool) -> None:
        super().__init__(width, heads)
        self.wrong = wrong

    def forward(self, x: Tensor, enc_out: Tensor) -> Tensor:
        q, k, v = self.w_q(x), self.w_k(enc_out), self.w_v(enc_out)
        tokens = x.shape[1] if self.wrong else enc_out.shape[1]
        k, v = (one.view(len(x), tokens, self.heads, -1).transpose(1, 2) for one in (k, v))
        return self.joined(self.split(q), k, v)


class Angles(nn.Module):
    def __init__(self, wide: int) -> None:
        super().__init__()
        self.register_buffer("freqs", 100.0 ** -(torch.arange(0, wide, 2) / wide))

    def forward(self, length: int) -> Tensor:
        freqs = self.get_buffer("freqs")
        turned = torch.arange(length, device=freqs.device)[:, None] * freqs
        return torch.cat((turned, turned), -1)


class OwnRotary(Projected):
    """Causal, with rotary positions of its own: of tokens, or of heads, which is wrong."""

    def __init__(self, width: int, heads: int, wrong: bool, fails: bool = False) -> None:
        super().__init__(width, heads)
        self.rotary, self.wrong, self.fails = Angles(width // heads), wrong, fails

    def turned(self, rows: Tensor, angles: Tensor) -> Tensor:
        one, two = rows.chunk(2, dim=-1)
        return rows * angles.cos() + torch.cat((-two, one), -1) * angles.sin()

    def forward(self, x: Tensor, rotary_emb: Tensor | None = None) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)) for f in (self.w_q, self.w_k, self.w_v))
        if rotary_emb is None:
            rotary_emb = self.rotary(self.heads if self.wrong else x.shape[1])
            rotary_emb = rotary_emb if self.wrong and not self.fails else rotary_emb[:, None]
        q, k = self.turned(q, rotary_emb), self.turned(k, rotary_emb)
        later = x.new_ones(x.shape[1], x.shape[1]).triu(1).bool()
        scores = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(self.wide)
        weights = scores.masked_fill(later, -torch.inf).softmax(-1)
        return self.last((weights @ v.transpose(1, 2)).transpose(1, 2).flatten(2))


class ShiftedInTime(OwnRotary):
    """Half of the features are those of the token before; before the first there is none."""

    def forward(self, x: Tensor, rotary_emb: Tensor | None = None) -> Tensor:
        half = x.shape[-1] // 2
        before = F.pad(x[:, :-1, :half], (0, 0, 1, 0))
        return super().forward(torch.cat((before, x[..., half:]), -1), rotary_emb)


class RotaryOfHeads(OwnRotary):
    """Turns [B, T, H, D] as if it were [B, H, T, D]."""

    def turned(self, rows: Tensor, angles: Tensor) -> Tensor:
        batch, tokens, heads, wide = rows.shape
        mixed = rows.reshape(batch * heads, tokens, wide)
        return super().turned(mixed, angles.squeeze(1)).reshape(rows.shape)


def test_equal_tokens_that_are_mixed_with_the_one_before_are_equal_from_the_second_on() -> None:
    assert check(ShiftedInTime, 24, 3, wrong=False).passed


def test_positions_of_heads_explain_another_beginning() -> None:
    verdict = check(RotaryOfHeads, 24, 3, wrong=False)
    (one,) = verdict.errors
    assert one.rule == "rotary"
    assert "[batch, tokens, heads, wide]" in one.message
    assert verdict["prefix"].explained_by == "rotary"


class OneForAll(nn.Module):
    """Queries, keys and values of every head by one Linear, of a head's width or of all heads'."""

    def __init__(self, width: int, heads: int, wrong: bool) -> None:
        super().__init__()
        self.heads, self.wide, self.wrong = heads, width // heads, wrong
        own = self.wide if wrong else width
        self.qkv, self.last = nn.Linear(own, 3 * own), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        cut = (*x.shape[:2], self.heads, -1)
        packed = self.qkv(x.view(cut)).chunk(3, -1) if self.wrong else self.qkv(x).chunk(3, -1)
        q, k, v = (one.reshape(cut).transpose(1, 2) for one in packed)
        weights = (q @ k.mT / math.sqrt(self.wide)).softmax(-1)
        return self.last((weights @ v).transpose(1, 2).flatten(2))


class ScaledLate(nn.Module):
    """Divides scores, or weights, which are then no shares any more; its values are no Linear's."""

    def __init__(self, width: int, heads: int, wrong: bool) -> None:
        super().__init__()
        self.heads, self.root, self.wrong = heads, math.sqrt(width // heads), wrong
        self.w_qk, self.w_v = nn.Linear(width, 2 * width), nn.Conv1d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        parts = *self.w_qk(x).chunk(2, -1), self.w_v(x.mT).mT
        q, k, v = (one.unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in parts)
        scores = q @ k.mT
        weights = scores.softmax(-1) / self.root if self.wrong else (scores / self.root).softmax(-1)
        return (weights @ v).transpose(1, 2).flatten(2)


class DropsNothing(Projected):
    """Returns what is left of the weights, and multiplies the values by all, or by what is left."""

    def __init__(self, width: int, heads: int, wrong: bool, dropout: float = 0.1) -> None:
        super().__init__(width, heads)
        self.dropout, self.wrong = nn.Dropout(dropout), wrong

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = (self.split(f(x)) for f in (self.w_q, self.w_k, self.w_v))
        weights = (q @ k.mT / math.sqrt(self.wide)).softmax(-1)
        left = self.dropout(weights)
        heads = (weights if self.wrong else left) @ v
        return self.last(heads.transpose(1, 2).flatten(2)), left


class ToldTwice(Projected):
    """Calls a layer of PyTorch's with an argument that it has not, whatever its own call gets."""

    def __init__(self, width: int, heads: int, wrong: bool) -> None:
        super().__init__(width, heads)
        self.drop, self.wrong = nn.Dropout(0.1), wrong

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        q, k, v = (f(y) for f, y in ((self.w_q, x), (self.w_k, context), (self.w_v, context)))
        told = {"training": self.training} if self.wrong else {}
        return self.drop(self.joined(*map(self.split, (q, k, v))), **told)


class AxesOfHeads(Projected):
    """Keys are split with the axes of queries that are turned already, or with their own."""

    def __init__(self, width: int, heads: int, wrong: bool) -> None:
        super().__init__(width, heads)
        self.wrong = wrong

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(self.w_q(x)), self.w_k(x), self.w_v(x)
        like = q if self.wrong else k
        k, v = (r.reshape(*like.shape[:2], self.heads, self.wide).transpose(1, 2) for r in (k, v))
        return self.joined(q, k, v)


class WrittenOver(Projected):
    """Drops in place what the softmax keeps for its gradient."""

    def __init__(self, width: int, heads: int, wrong: bool, dropout: float = 0.1) -> None:
        super().__init__(width, heads)
        self.dropout = nn.Dropout(dropout, inplace=wrong)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split(f(x)) for f in (self.w_q, self.w_k, self.w_v))
        weights = self.dropout((q @ k.mT / math.sqrt(self.wide)).softmax(-1))
        return self.last((weights @ v).transpose(1, 2).flatten(2))


class CountedFromTheEnd(ScaledLate):
    """Its mask's diagonal is counted from the queries' place, or from where no key is."""

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.shape[1]
        parts = *self.w_qk(x).chunk(2, -1), self.w_v(F.pad(x.mT, (2, 0))).mT[:, 1:-1]
        q, k, v = (one.unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in parts)
        later = x.new_ones(tokens, tokens).triu(1 + tokens * self.wrong).bool()
        scores = (q @ k.mT / self.root).masked_fill(later, -torch.inf)
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


class MatricesOfItsOwn(nn.Module):
    """Its weights are tensors that PyTorch does not know of, or parameters."""

    def __init__(self, d_model: int, num_heads: int, wrong: bool) -> None:
        super().__init__()
        self.heads = num_heads
        kept = [torch.randn(d_model, d_model) / math.sqrt(d_model) for _ in range(4)]
        self.w_q, self.w_k, self.w_v, self.w_o = kept if wrong else map(nn.Parameter, kept)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = (q @ self.w_q, k @ self.w_k, v @ self.w_v)
        q, k, v = (one.unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in parts)
        weights = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)
        return (weights @ v).transpose(1, 2).flatten(2) @ self.w_o


class FillsNothing(nn.Module):
    """A function of q, k and v that was told another width, and fills without a value."""

    def __init__(self, d_attention: int, wrong: bool) -> None:
        super().__init__()
        self.normalize_factor, self.wrong = d_attention**0.5, wrong

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        scores = q @ k.mT / self.normalize_factor
        if mask is not None:
            value = () if self.wrong else (-torch.inf,)
            scores = torch.masked_fill(scores, mask, *value)
        return scores.softmax(-1) @ v


@pytest.mark.parametrize(
    ("layer", "more", "rule"),
    [
        (RelativeOne, {}, "scale"),
        (RelativeOne, {"early": True}, "scale"),
        (OfLengthOfQueries, {}, "cross"),
        (OwnRotary, {}, "rotary"),
        (OwnRotary, {"fails": True}, "rotary"),
        (FillsNothing, {"d_attention": 6}, "mask"),
        (OneForAll, {}, "shared-heads"),
        (ScaledLate, {}, "scale"),
        (DropsNothing, {}, "unused-result"),
        (ToldTwice, {}, "runs"),
        (AxesOfHeads, {}, "runs"),
        (WrittenOver, {}, "dropout"),
        (CountedFromTheEnd, {}, "causal-mask"),
        (MatricesOfItsOwn, {}, "registered"),
    ],
)
def test_what_a_call_tells_where_weights_do_not(
    layer: type[nn.Module], more: dict[str, Any], rule: str
) -> None:
    assert [one.rule for one in check(layer, wrong=True, **more).errors] == [rule]
    assert check(layer, wrong=False, **more).errors == ()


class RowsWrittenInPlace(nn.Module):
    """Fills rows of its scores while it walks over them, which no gradient goes through."""

    def __init__(self, width: int, wide: int, num_heads: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, wide * num_heads) for _ in range(3))

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        scores = self.q(x) @ self.k(context).mT
        for rows in scores:
            rows[:, int((rows[0] != 0).sum()) :] = -torch.inf
        return scores.softmax(-1) @ self.v(context)


def test_a_call_that_fails_for_its_own_code_is_not_asked_about() -> None:
    (one,) = check(RowsWrittenInPlace, width=24, wide=8, num_heads=3).errors
    assert one.rule == "runs"
    assert "inplace" in one.message


class OwnLinear(nn.Module):
    """Somebody's own, which is not square."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out, width) / math.sqrt(width))
        self.bias = nn.Parameter(torch.zeros(out))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight @ x.unsqueeze(-1)).squeeze(-1) + self.bias


class OneHead(nn.Module):
    def __init__(self, d_model: int = 24, d_head: int = 8, scaled: bool = True) -> None:
        super().__init__()
        self.q, self.k, self.v = (OwnLinear(d_model, d_head) for _ in range(3))
        self.scaled = scaled

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        q = q / math.sqrt(q.shape[-1]) if self.scaled else q
        return (q @ k.mT).softmax(-1) @ v


@pytest.mark.parametrize(("scaled", "rules"), [(True, []), (False, ["scale"])])
def test_linears_of_ones_own_are_read(scaled: bool, rules: list[str]) -> None:
    report = check(OneHead, scaled=scaled)
    assert [one.rule for one in report.findings if one.severity == "error"] == rules


class PartlyRead(Projected):
    """A table that no line reads, in a layer whose other argument has to be guessed."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.relative_table = nn.Parameter(torch.zeros(heads, 7))

    def forward(self, x: Tensor, far: Tensor) -> Tensor:
        q, k, v = (self.split(f(x)) for f in (self.w_q, self.w_k, self.w_v))
        weights = (q @ k.mT / math.sqrt(self.wide) + far).softmax(-1)
        return self.last((weights @ v).transpose(1, 2).flatten(2))


def test_a_guess_of_the_call_excuses_no_parameter_that_no_line_reads() -> None:
    (one,) = check(PartlyRead).errors
    assert (one.rule, one.ground) == ("gradients", "any")
    assert "relative_table" in one.message


class WithResidual(Projected):
    def forward(self, x: Tensor) -> Tensor:
        residual = x
        q, k, v = (self.split(f(x)) for f in (self.w_q, self.w_k, self.w_v))
        return self.joined(q, k, v) + residual


def test_an_input_that_is_called_a_residual_is_meant_to_be_added() -> None:
    verdict = check(WithResidual)
    assert verdict.passed
    assert verdict["residual"].severity == "warning"


class NormedTooLate(Projected):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split(f(x)) for f in (self.w_q, self.w_k, self.w_v))
        x = self.norm(x)
        return self.joined(q, k, v)


class ScaledForNothing(Projected):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split(f(x)) for f in (self.w_q, self.w_k, self.w_v))
        scores = q @ k.mT
        scaled_scores = scores / math.sqrt(self.wide)  # noqa: F841
        return self.last((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class ReadLater(Projected):
    """What is made there is read: in a loop, by a function within, under another condition."""

    def forward(self, x: Tensor, twice: bool = False) -> Tensor:
        for _ in range(2):
            q = self.split(self.w_q(x))
        k = self.split(self.w_k(x))
        scores = q @ k.mT / math.sqrt(self.wide)

        def weights() -> Tensor:
            return scores.softmax(-1)

        v = self.w_v(x)
        if twice:
            v = self.w_v(v)
        return self.last((weights() @ self.split(v)).transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    ("layer", "name"), [(NormedTooLate, "x"), (ScaledForNothing, "scaled_scores"), (ReadLater, "")]
)
def test_what_is_never_read_is_named(layer: type[nn.Module], name: str) -> None:
    verdict = check(layer)
    said = [one.message for one in verdict.findings if one.rule == "unused-result"]
    wanted = f"What {name} becomes there is never read, so that the line does nothing."
    assert said == [wanted] * bool(name)
    assert verdict.passed is (layer is ReadLater)


class DroppedTooLate(Projected):
    """Scores are dropped behind the softmax, and nothing reads them."""

    def __init__(self, width: int, heads: int, dropout: float = 0.1) -> None:
        super().__init__(width, heads)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split(f(x)) for f in (self.w_q, self.w_k, self.w_v))
        scores = q @ k.mT / math.sqrt(self.wide)
        weights = scores.softmax(-1)
        scores = self.dropout(scores)
        return self.last((weights @ v).transpose(1, 2).flatten(2))


def test_dropout_for_nothing_is_no_advice() -> None:
    """The numbers in eval mode are right, and those in training are not."""
    (one,) = check(DroppedTooLate).errors
    assert one.message.startswith("What scores becomes there is never read")


class OddRoot(Projected):
    """A scale that is said outright, and is no root."""

    def __init__(self, width: int, heads: int, power: float = 0.2) -> None:
        super().__init__(width, heads)
        self.temperature = (width // heads) ** power

    def joined(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = (q @ k.mT / self.temperature).softmax(-1)
        return self.last((weights @ v).transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.joined(*(self.split(f(x)) for f in (self.w_q, self.w_k, self.w_v)))


def test_a_power_of_the_width_that_is_no_root() -> None:
    assert [one.rule for one in check(OddRoot).errors] == ["scale"]
    assert check(OddRoot, power=0.5).passed
    assert check(OddRoot, power=1.0 / 3).passed  # 2 for a width of 8: a number that may be meant


class Compared(Projected):
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Compared)


def test_a_layer_without_a_hash_is_no_fault_of_the_check() -> None:
    (one,) = check(Compared).errors
    assert (one.rule, "__hash__" in one.message) == ("builds", True)


class KeptBeside(Projected):
    """Keys are kept in a plain tensor, which is no weight."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.store = torch.randn(9, heads, 99, self.wide)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split(f(x)) for f in (self.w_q, self.w_k, self.w_v))
        with torch.no_grad():
            self.store[: len(x), :, : x.shape[1]] = k
        return self.joined(q, k, v)


def test_a_store_of_keys_is_no_weight() -> None:
    assert check(KeptBeside).passed


class NoMaskWillDo(Projected):
    """Its mask can be neither of truth values nor of numbers."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (self.split(f(x)) for f in (self.w_q, self.w_k, self.w_v))
        scores = q @ k.mT / math.sqrt(self.wide)
        if mask is not None:
            scores = scores.masked_fill(1 - mask[:, None], -torch.inf)
        return self.last((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def test_a_mask_that_no_dtype_suits_is_a_mistake() -> None:
    verdict = check(NoMaskWillDo)
    assert [one.rule for one in verdict.errors] == ["mask"], str(verdict)
    assert "With mask each call fails" in verdict.errors[0].message


class RowsOfItsOwn(Projected):
    """Keys and values of its own stand before those of the input, and the scale is the whole
    width's."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.null_k, self.null_v = (nn.Parameter(torch.randn(1, 1, width)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        b, _, wide = x.shape
        k = torch.cat((self.null_k.expand(b, -1, -1), self.w_k(x)), 1)
        v = torch.cat((self.null_v.expand(b, -1, -1), self.w_v(x)), 1)
        q, k, v = (self.split(rows) for rows in (self.w_q(x), k, v))
        weights = (q @ k.mT * wide**-0.5).softmax(-1)
        return self.last((weights @ v).transpose(1, 2).flatten(2))


def test_the_scale_is_followed_past_rows_of_its_own() -> None:
    verdict = check(RowsOfItsOwn)
    assert verdict.errors[0].rule == "scale", str(verdict)


class PrivateLists(nn.Module):
    """Keeps the layers of its heads in lists that PyTorch does not look into."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        wide = width // heads
        self.wide = wide
        self._parts = [[nn.Linear(width, wide) for _ in range(heads)] for _ in range(3)]
        self._q, self._k, self._v = self._parts
        del self._parts
        self.last = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        found = []
        for to_q, to_k, to_v in zip(self._q, self._k, self._v, strict=True):
            scores = to_q(x) @ to_k(x).mT / math.sqrt(self.wide)
            found.append(scores.softmax(-1) @ to_v(x))
        return self.last(torch.cat(found, -1))


class AsksTheMask(Projected):
    """Takes a mask for yes or no, within a norm of its own."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.norm, self.more = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (self.split(f(x)) for f in (self.w_q, self.w_k, self.w_v))
        scores = q @ k.mT / math.sqrt(self.wide)
        if mask:
            scores = scores.masked_fill(mask == 0, -torch.inf)
        out = self.last((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return self.norm(x + self.more(out).relu())


class Called(Projected):
    """Is called by a method of its own, which makes its layers anew."""

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        made = [nn.Linear(query.shape[-1], query.shape[-1]) for _ in range(3)]
        q, k, v = (self.split(f(t)) for f, t in zip(made, (query, key, value), strict=True))
        return self.joined(q, k, v)


class FailsAndFills(Projected):
    """A name that is not there, and behind it a mask that hides nothing."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (self.split(f(x)) for f in (self.w_q, self.w_k, self.w_v))
        scores = q @ k.mT / math.sqrt(self.wide)
        if mask is not None:
            scores = scores.masked_fill(mask == 0, 1e-9)
        return self.last((scores.softmax(-1) @ v).transpose(1, 2).reshape(q.shape[0], -1, "wide"))


@pytest.mark.parametrize(
    ("layer", "rule"),
    [
        (PrivateLists, "registered"),
        (AsksTheMask, "mask"),
        (Called, "registered"),
        (FailsAndFills, "runs"),
    ],
)
def test_what_comes_first(layer: type[nn.Module], rule: str) -> None:
    assert check(layer, 24, 3).errors[0].rule == rule


class OnAGPU(Projected):
    def forward(self, x: Tensor, edges: Any) -> Tensor:
        least = torch.tensor(-1e9).cuda()
        ones = self.ones(x)
        return (
            self.joined(*(self.split(f(x)) for f in (self.w_q, self.w_k, self.w_v))) + least * ones
        )

    def ones(self, x: Tensor) -> Tensor:
        return torch.ones(x.shape[1], device="cuda")


class OnAGPUIfThere(Projected):
    def forward(self, x: Tensor) -> Tensor:
        ones = torch.ones(1)
        if torch.cuda.is_available():
            ones = torch.ones(1).cuda()
        return self.joined(*(self.split(f(x)) for f in (self.w_q, self.w_k, self.w_v))) * ones.to(x)


class BuiltOnAGPU(Projected):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.scale = torch.sqrt(torch.FloatTensor([self.wide])).cuda()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split(f(x)) for f in (self.w_q, self.w_k, self.w_v))
        return self.last(((q @ k.mT / self.scale).softmax(-1) @ v).transpose(1, 2).flatten(2))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_tensor_that_a_constructor_puts_on_a_gpu_is_one_mistake() -> None:
    """That it is no buffer is advice, and does not explain it away."""
    verdict = check(BuiltOnAGPU, 24, 3)
    assert [one.rule for one in verdict.errors] == ["move"]
    assert "registered" in [one.rule for one in verdict.findings]


def test_tensors_that_are_always_made_on_a_gpu() -> None:
    first, second = read_off(OnAGPU, "move")
    assert first.message.endswith(".cuda()`.")
    assert "device='cuda'" in second.message
    assert not [*read_off(OnAGPUIfThere, "move")]


class HeadsApart(Projected):
    def forward(self, graph: Any, h: Tensor) -> Tensor:
        q, k, v = self.w_q(h), self.w_k(h), self.w_v(h)
        q = q.view(-1, self.heads, self.wide)
        k = k.view(-1, self.heads, self.wide)
        v = v.view(-1, self.heads, self.wide)
        weights = torch.matmul(q, k.transpose(-2, -1)).softmax(-1)
        return torch.matmul(weights, v).flatten(1)


class HeadsBefore(HeadsApart):
    def forward(self, graph: Any, h: Tensor) -> Tensor:
        q, k, v = self.w_q(h), self.w_k(h), self.w_v(h)
        q = q.view(-1, self.heads, self.wide)
        q = q.transpose(0, 1)
        k = k.view(-1, self.heads, self.wide)
        k = k.transpose(0, 1)
        v = v.view(-1, self.heads, self.wide).transpose(0, 1)
        weights = torch.matmul(q, k.transpose(-2, -1)).softmax(-1)
        return torch.matmul(weights, v).transpose(0, 1).flatten(1)


def test_heads_that_are_never_brought_before_the_tokens() -> None:
    assert ["tokens not at all" in one.message for one in read_off(HeadsApart, "head-split")] == [
        True
    ]
    assert not [*read_off(HeadsBefore, "head-split")]


class PaddedBlock(Projected):
    def forward(self, x: Tensor, starts: list[int]) -> Tensor:
        q, k, v = (self.split(f(x)) for f in (self.w_q, self.w_k, self.w_v))
        scores = q @ k.mT / math.sqrt(self.wide)
        for row, start in enumerate(starts):
            scores[row, :, start:, start:] = -torch.inf
        return self.last((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class PaddedKeys(Projected):
    def forward(self, x: Tensor, starts: list[int]) -> Tensor:
        q, k, v = (self.split(f(x)) for f in (self.w_q, self.w_k, self.w_v))
        scores = q @ k.mT / math.sqrt(self.wide)
        for row, start in enumerate(starts):
            scores[row, :, :, start:] = -torch.inf
        return self.last((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def test_padding_that_is_hidden_from_padding_alone() -> None:
    (one,) = read_off(PaddedBlock, "padding")
    assert "Hide the keys from start on for every query" in one.hint
    assert not [*read_off(PaddedKeys, "padding")]


class GathersKeys(Projected):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split(f(x)) for f in (self.w_q, self.w_k, self.w_v))
        attn = (q @ k.mT / math.sqrt(self.wide)).softmax(-1)
        return self.last((attn @ k).transpose(1, 2).flatten(2)) + 0 * v.sum()


class UnreadValues(Projected):
    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q = self.split(self.w_q(query))
        k = self.split(self.w_k(key))
        v = self.w_v(value)  # noqa: F841
        return self.joined(q, k, self.split(value))


def test_values_that_are_never_gathered() -> None:
    (gathered,) = read_off(GathersKeys, "roles")
    assert gathered.message == "The weights gather keys, and not values: k stands where v is meant."
    (unread,) = read_off(UnreadValues, "roles")
    assert unread.message == "The values are never used: nothing reads v."
    assert not [*read_off(Right, "roles")]


class MaskKept(Projected):
    def __init__(self, width: int, heads: int, mask: bool = False) -> None:
        super().__init__(width, heads)
        self.use_the_mask_that_is_asked_for = mask

    def forward(self, x: Tensor) -> Tensor:
        return self.joined(*(self.split(f(x)) for f in (self.w_q, self.w_k, self.w_v)))


class Moved(Projected):
    def __init__(self, width: int, heads: int, device: str = "cpu") -> None:
        super().__init__(width, heads)
        self.gain = nn.Parameter(torch.ones(width)).to(device)


def test_what_a_constructor_keeps_for_nothing_or_on_a_gpu() -> None:
    (kept,) = read_off(MaskKept, "mask")
    assert "mask=True hides nothing" in kept.message
    (moved,) = read_off(Moved, "registered")
    assert moved.message.startswith("gain is what moving a parameter gives")


class FilledBuffer(Projected):
    mask: Tensor | None

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.register_buffer("mask", None)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split(f(x)) for f in (self.w_q, self.w_k, self.w_v))
        if self.mask is None or len(self.mask) != x.shape[1]:
            self.mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(
                1
            )
        scores = (q @ k.mT / math.sqrt(self.wide)).masked_fill(self.mask, -torch.inf)
        return self.last((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def test_what_a_call_leaves_to_be_saved_does_not_load() -> None:
    (one,) = check(FilledBuffer).errors
    assert one.rule == "reload"
    assert "Unexpected key" in one.message

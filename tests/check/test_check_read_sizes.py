"""Mistakes that sizes, axes and dropouts tell in the code alone, whether or not it can be run."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.check import check
from headwise.check.diagnosis.static_checks import read_off


class Sized(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads, self.dropout = num_heads, 0.1
        self.head_dim = width // num_heads
        self.to_q, self.to_k, self.to_v = (nn.Linear(width, width) for _ in range(3))
        self.scale = self.head_dim**-0.5

    def split(self, rows: Tensor) -> Tensor:
        return rows.view(*rows.shape[:2], self.num_heads, self.head_dim).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split(to(x)) for to in (self.to_q, self.to_k, self.to_v))
        return ((q @ k.mT * self.scale).softmax(-1) @ v).transpose(1, 2).flatten(2)


class RootOfAll(Sized):
    def __init__(self, width: int, num_heads: int, qk_scale: float | None = None) -> None:
        super().__init__(width, num_heads)
        self.deep = width // num_heads
        self.scale = qk_scale or width**-0.5


class RootOfAllAtOnce(Sized):
    def __init__(self, embed: int, num_heads: int) -> None:
        super().__init__(embed, num_heads)
        self.embed = embed
        self.wide = self.embed // self.num_heads

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split(to(x)) for to in (self.to_q, self.to_k, self.to_v))
        weights = torch.softmax(q @ k.mT / math.sqrt(self.embed), -1)
        return (weights @ v).transpose(1, 2).flatten(2)


class OneProjection(Sized):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__(width, num_heads)
        self.query = nn.Linear(width, width)


class CutByView(OneProjection):
    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q = self.query(x).view(b, self.num_heads, t, self.head_dim)
        return (q @ q.mT * self.scale).softmax(-1) @ q


class CutByViewLater(OneProjection):
    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q = self.query(x)
        q = q.reshape((b, self.num_heads, t, self.head_dim))
        return (q @ q.mT * self.scale).softmax(-1) @ q


class Apart(Sized):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split(to(x)) for to in (self.to_q, self.to_k, self.to_v))
        weights = (q @ k.mT * self.scale).softmax(-1)
        return torch.einsum("bhqk, bhvd -> bhqd", weights, v).transpose(1, 2).flatten(2)


class Drops(Sized):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split(to(x)) for to in (self.to_q, self.to_k, self.to_v))
        return F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout)


class DropsByHand(Sized):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split(to(x)) for to in (self.to_q, self.to_k, self.to_v))
        weights = F.dropout((q @ k.mT * self.scale).softmax(-1), self.dropout)
        return (weights @ v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize(
    ("layer", "rule", "said"),
    [
        (RootOfAll, "scale", "the root of width, which the heads share"),
        (RootOfAllAtOnce, "scale", "the root of embed, which the heads share"),
        (CutByView, "head-split", "`view` cuts the heads out of a whole projection"),
        (CutByViewLater, "head-split", "`view` cuts the heads out of a whole projection"),
        (Apart, "definition", "sums k and v each by itself"),
        (Drops, "dropout-in-eval", "is not told whether this is training"),
        (DropsByHand, "dropout-in-eval", "is not told whether this is training"),
    ],
)
def test_sizes_tell(layer: type[nn.Module], rule: str, said: str) -> None:
    (one,) = read_off(layer)
    assert (one.rule, one.ground) == (rule, "any")
    assert said in one.message
    assert "test_check_read_sizes.py" in one.hint


class Inits(Sized):
    """Roots of the whole width that scale no scores."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__(width, num_heads)
        deep = width // num_heads
        nn.init.normal_(self.to_q.weight, std=width**-0.5)
        start = torch.randn(width, deep) * width**-0.5
        self.to_k.weight.data[:, :deep] = start


class Divided(Sized):
    """The width goes by the same name once it is divided."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__(width, num_heads)
        width = width // num_heads
        self.scale = width**-0.5


class OneToken(Sized):
    """A single query may be viewed so."""

    def forward(self, x: Tensor) -> Tensor:
        q = self.to_q(x[:, 0]).view(len(x), self.num_heads, 1, self.head_dim)
        k, v = self.split(self.to_k(x)), self.split(self.to_v(x))
        first = ((q @ k.mT * self.scale).softmax(-1) @ v).transpose(1, 2).flatten(2)
        return torch.cat((first, x[:, 1:]), 1)


class Told(Sized):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split(to(x)) for to in (self.to_q, self.to_k, self.to_v))
        share = self.dropout if self.training else 0.0
        heads = F.scaled_dot_product_attention(q, k, v, dropout_p=share)
        return F.dropout(heads.transpose(1, 2).flatten(2), self.dropout, self.training)


class SummedTogether(Sized):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split(to(x)) for to in (self.to_q, self.to_k, self.to_v))
        weights = torch.einsum("bhqd, bhkd -> bhqk", q, k * self.scale).softmax(-1)
        return torch.einsum("bhqk, bhkd -> bqhd", weights, v).flatten(2)


@pytest.mark.parametrize(
    "layer", [Sized, Inits, Divided, OneToken, Told, SummedTogether], ids=lambda one: one.__name__
)
def test_what_is_right_tells_nothing(layer: type[nn.Module]) -> None:
    assert [*read_off(layer)] == []
    assert check(layer).passed, str(check(layer))


class OwnScale(RootOfAll):
    """Its scale is one head's after all, as the numbers show."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.split(to(x)) for to in (self.to_q, self.to_k, self.to_v))
        heads = F.scaled_dot_product_attention(q, k, v * self.scale)
        return heads.tanh().transpose(1, 2).flatten(2)


def test_numbers_that_are_right_outweigh_what_the_code_seems_to_say() -> None:
    assert check(OwnScale).passed, str(check(OwnScale))


class Needs(nn.Module):
    """Its constructor takes what it needs of its keywords."""

    def __init__(self, **kwargs: int) -> None:
        super().__init__()
        self.num_heads, width = kwargs["num_heads"], kwargs["d_model"]
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).chunk(3, -1)
        q, k, v = (p.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for p in parts)
        heads = F.scaled_dot_product_attention(q, k, v)
        return self.out(heads.transpose(1, 2).flatten(2))


class OfThreeWidths(nn.Module):
    def __init__(self, q_width: int, k_width: int, v_width: int, num_heads: int = 1) -> None:
        super().__init__()
        self.num_heads = num_heads
        widths = (q_width, k_width, v_width)
        self.q, self.k, self.v = (nn.Linear(wide, q_width) for wide in widths)

    def forward(self, x: Tensor) -> Tensor:
        parts = (self.q(x), self.k(x), self.v(x))
        q, k, v = (p.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for p in parts)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class OfOneWidth(OfThreeWidths):
    """Hands three arguments on by place, and the rest by name."""

    def __init__(self, width: int, num_heads: int = 1, **more: int) -> None:
        super().__init__(width, width, width, num_heads=num_heads, **more)


def test_what_is_handed_on_by_place_is_not_asked_for() -> None:
    assert check(OfOneWidth).passed, str(check(OfOneWidth))


class Forgets(Needs):
    def __init__(self, **kwargs: int) -> None:
        super().__init__()


class NoCall(nn.Module):
    def __init__(self, width: int) -> None:
        super.__init__()  # pyright: ignore[reportCallIssue]


def test_keywords_are_read_and_constructors_that_forget_them_are_named() -> None:
    assert check(Needs).passed, str(check(Needs))
    for layer, said in ((Forgets, "KeyError: 'num_heads'"), (NoCall, "super().__init__()")):
        (one,) = check(layer).errors
        assert one.rule == "builds"
        assert said in one.message + one.hint


class ForTheClass(Sized):
    """Only the first token attends."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            self.split(self.to_q(x[:, :1])),
            self.split(self.to_k(x)),
            self.split(self.to_v(x)),
        )
        first = ((q @ k.mT * self.scale).softmax(-1) @ v).transpose(1, 2).flatten(2)
        return torch.cat((first, x[:, 1:]), 1)


def test_one_token_may_attend_alone() -> None:
    assert check(ForTheClass).passed, str(check(ForTheClass))


class Listed(Sized):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__(width, num_heads)
        self.parts = [nn.Linear(width, self.head_dim) for _ in range(num_heads)]


class ListedWeights(Sized):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__(width, num_heads)
        self.tables = [nn.Parameter(torch.randn(width, width)) for _ in range(2)]

    def forward(self, x: Tensor) -> Tensor:
        for number in range(len(self.tables)):
            x = torch.matmul(x, self.tables[number])
        return x


class ListedAndHandedOn(Sized):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__(width, num_heads)
        self.parts = [nn.Linear(width, width) for _ in range(2)]
        self.known = nn.ModuleList(self.parts)


def test_layers_in_a_plain_list_are_read() -> None:
    assert [one.rule for one in read_off(Listed)] == ["registered"]
    (one,) = read_off(ListedWeights)
    assert (one.rule, "nn.ParameterList" in one.hint) == ("registered", True)
    assert [*read_off(ListedAndHandedOn)] == []


class Positions(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(16, width)

    def forward(self, tokens: int) -> Tensor:
        return self.table.weight[:tokens]


class WithItsOwn(Sized):
    """What stands there by default has a width of its own."""

    def __init__(
        self,
        width: int = 36,
        num_heads: int = 4,
        positions: nn.Module = Positions(36),  # noqa: B008
    ) -> None:
        super().__init__(width, num_heads)
        self.positions = positions

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.positions(x.shape[1]))


def test_a_module_that_is_there_by_default_keeps_its_width() -> None:
    verdict = check(WithItsOwn)
    assert verdict.passed, str(verdict)
    assert verdict.subject == "WithItsOwn()"


class DataOfNone(Sized):
    def __init__(self, width: int, num_heads: int = 3, bias: bool = False) -> None:
        super().__init__(width, num_heads)
        self.last = nn.Linear(width, width, bias=bias)
        nn.init.zeros_(self.last.bias.data)


def test_a_constructor_that_fails_with_its_own_defaults_is_a_mistake() -> None:
    (one,) = check(DataOfNone).errors
    assert one.rule == "builds"


def attention_with_weights_of_its_own(x: Tensor, num_heads: int, odd: float) -> Tensor:
    project = nn.Linear(x.shape[-1], x.shape[-1])
    rows = project(x).unflatten(-1, (num_heads, -1)).transpose(1, 2)
    return (rows @ rows.mT * odd).softmax(-1) @ rows


def make_layers(width: int) -> nn.Module:
    first = nn.Linear(width, width)
    return nn.Sequential(first, nn.Linear(width, width))


def test_layers_that_a_call_makes_are_read() -> None:
    (one,) = read_off(attention_with_weights_of_its_own)
    assert (one.rule, "project is made anew" in one.message) == ("registered", True)
    assert [*read_off(make_layers)] == []


class Map(nn.Module):
    """Attention over the pixels of a map [B, C, H, W]."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)

    def attended(self, rows: Tensor) -> Tensor:
        q, k, v = self.qkv(rows).chunk(3, -1)
        return self.out((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v)


class Permuted(Map):
    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        x = x.permute(0, 2, 3, 1)
        x = x.reshape(b, h * w, c)
        return self.attended(x).transpose(1, 2).reshape(b, c, w, h)


class Viewed(Map):
    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.size()
        if h > w:
            x = x.contiguous()
        x = x.view(b, h * w, c)
        return self.attended(x).transpose(1, 2).reshape(b, c, h, w)


class ViewedBack(Map):
    """Its other order is that of height and width alone, which a square has as well."""

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        rows = self.attended(x.view((b, c, w * h)).transpose(1, 2))
        return rows.transpose(1, 2).reshape(b, c, h, w)


def test_axes_that_a_view_puts_into_another_order_are_read() -> None:
    (one,) = read_off(Viewed)
    assert one.rule == check(Viewed).errors[0].rule == "definition"
    assert "axes of x are [b, c, h, w]" in one.message
    assert "x.view(b, h * w, c)" in one.hint
    for kind in (Permuted, ViewedBack):
        assert [*read_off(kind)] == []
        assert check(kind).passed, str(check(kind))

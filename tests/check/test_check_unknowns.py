"""Calls that fail whatever they are given, widths that layers speak of, axes that are written, and
caches of a file's own class."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from einops import rearrange
from torch import Tensor, nn

from headwise.check import check
from headwise.check.target.layouts import listed, said_layout
from headwise.check.target.resolve import resolve


class Attends(nn.Module):
    """Attention that wants a thing of which no name tells anything; subclasses go wrong."""

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads, self.wide = num_heads, d_model // num_heads
        self.qkv, self.out = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)

    def begun(self, x: Tensor, gadget: object) -> Tensor:
        return x

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return torch.einsum("bhtd,bhsd->bhts", q, k) / math.sqrt(self.wide)

    def forward(self, x: Tensor, gadget: object) -> Tensor:
        b, t, _ = x.shape
        parts = self.qkv(self.begun(x, gadget)).chunk(3, -1)
        q, k, v = (part.view(b, t, self.num_heads, -1).transpose(1, 2) for part in parts)
        heads = self.scores(q, k).softmax(-1) @ v
        return self.out(heads.transpose(1, 2).reshape(b, t, -1))


class Summed(Attends):
    def begun(self, x: Tensor, gadget) -> Tensor:
        return x * gadget.strength["all"]

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return torch.einsum("bhtd,bhsd->nhts", q, k)


class Rooted(Attends):
    def begun(self, x: Tensor, gadget) -> Tensor:
        first, second = gadget
        return x + first if second.total() > 0 else x - first

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT / torch.sqrt(self.wide)


class Misspelt(Attends):
    def begun(self, x: Tensor, gadget) -> Tensor:
        return self.qkv(gadget).viewed(2, -1)


class Asking(Attends):
    def begun(self, x: Tensor, gadget) -> Tensor:
        return x * gadget.strength["all"]


class Refusing(Attends):
    def begun(self, x: Tensor, gadget) -> Tensor:
        if not hasattr(gadget, "strength"):
            raise TypeError("a gadget is wanted")
        return x * gadget.strength["all"]


class Flat(Attends):
    def begun(self, x: Tensor, gadget) -> Tensor:
        count, wide = gadget.places
        return x.view(count, wide, -1)


@pytest.mark.parametrize(
    ("kind", "said"),
    [(Summed, "subscript n does not appear"), (Rooted, "must be Tensor, not int")],
)
def test_what_fails_whatever_is_given_is_the_layers_own_fault(kind: type, said: str) -> None:
    verdict = check(kind)
    assert [one.rule for one in verdict.errors] == ["runs"]
    assert "whatever else is given" in verdict.errors[0].message
    assert said in verdict.errors[0].message


def test_a_method_that_no_tensor_has_is_one_too() -> None:
    message = check(Misspelt).errors[0].message
    assert "'Tensor' object has no attribute 'viewed'" in message or "No tensor has" in message


@pytest.mark.parametrize("kind", [Asking, Refusing, Flat])
def test_what_may_go_well_with_another_value_is_asked_for(kind: type) -> None:
    with pytest.raises(ValueError, match="gadget"):
        check(kind)


class Numbered(Attends):
    """Wants a number of flavours, of which no name tells anything; x goes in alone."""

    def __init__(self, d_model: int, num_heads: int, num_flavours: int) -> None:
        super().__init__(d_model, num_heads)
        self.flavours, self.place = num_flavours, 0

    def first(self) -> int:
        return self.place

    def forward(self, x: Tensor) -> Tensor:
        place = self.first()
        return super().forward(x + place[0], None)  # pyright: ignore[reportIndexIssue]


class OfFlavours(Numbered):
    """The number that was made up is at fault: several are meant."""

    def first(self) -> int:
        return self.flavours


def test_what_fails_where_nothing_made_up_stands_is_the_layers_own_fault() -> None:
    (one,) = check(Numbered).errors
    assert (one.rule, "'int' object is not subscriptable" in one.message) == ("runs", True)
    with pytest.raises(ValueError, match="I made up num_flavours"):
        check(OfFlavours)


class Steady(nn.Module):
    """A constructor that no size helps."""

    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(d_model, 3 * d_model)
        self.scale = torch.sqrt(d_model // num_heads)


class Insisting(Steady):
    """One that wants other sizes than are tried."""

    def __init__(self, d_model: int, num_heads: int) -> None:
        self.size = {1000: 1}[d_model] if num_heads != 3 else self.sized(d_model)
        super().__init__(d_model, num_heads)

    def sized(self, d_model: int) -> int:
        return {1000: 1}[d_model]


def test_a_constructor_that_fails_for_all_sizes_alike_is_at_fault() -> None:
    assert [one.rule for one in check(Steady).errors] == ["builds"]
    with pytest.raises(ValueError, match="I do not know how to build this"):
        check(Insisting)


class Wider(nn.Module):
    """Heads of which only the number and the width of one are said."""

    def __init__(self, K: int, d: int) -> None:
        """K: number of attention heads
        d: dimension of each head
        """
        super().__init__()
        self.K, self.d = K, d
        self.q, self.k, self.v, self.o = (nn.Linear(K * d, K * d) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (m(x).unflatten(-1, (self.K, -1)).mT.mT for m in (self.q, self.k, self.v))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        heads = (q @ k.mT / self.d**0.5).softmax(-1) @ v
        return self.o(heads.transpose(1, 2).flatten(2))


def test_the_width_of_x_is_what_its_layers_take() -> None:
    subject = resolve(Wider)
    assert subject.embed_dim == subject.num_heads * (subject.head_dim or 0) == 24
    assert check(Wider).passed


class Listed(Attends):
    def forward(self, inputs: list[Tensor]) -> Tensor:  # type: ignore[override]
        q = inputs[0]
        k = inputs[1]
        v = inputs[2]
        parts = (self.qkv(one).chunk(3, -1)[n] for n, one in enumerate((q, k, v)))
        q, k, v = (one.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for one in parts)
        heads = self.scores(q, k).softmax(-1) @ v
        return self.out(heads.transpose(1, 2).flatten(2))


class Unpacked(Listed):
    def forward(self, inputs: list[Tensor]) -> Tensor:  # type: ignore[override]
        value, key, query = inputs
        return super().forward([query, key, value])


class AlsoListed(Wider):
    """It takes a list where a condition holds, and a tensor elsewhere."""

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim == 4:
            q, k, v = x
            x = q + k + v
        return super().forward(x)


def test_queries_keys_and_values_may_come_as_a_list() -> None:
    assert listed(Listed(24, 3), "inputs") == ["query", "key", "value"]
    assert listed(Unpacked(24, 3), "inputs") == ["value", "key", "query"]
    assert listed(Attends(24, 3), "x") == listed(AlsoListed(3, 8), "x") == []
    for kind in (Listed, Unpacked, AlsoListed):
        assert check(kind).passed, str(check(kind))


class Told(nn.Module):
    """`x: [seq_len, batch, dim]`"""

    def forward(self, x: Tensor) -> Tensor:
        return x


class Commented(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        # x is (B, C, H, W), and layer(x, y) is no shape
        return x


class Made(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        q = x.relu()
        b, c, t, h, w = q.shape
        return q.view(b, c, t, h, w)


class Grid(nn.Module):
    """Attention within the windows of a grid, with a bias for each two tokens of one."""

    over = -1

    def __init__(self, dim: int, window_size: int = 5) -> None:
        super().__init__()
        self.heads, tokens = 3, window_size**2
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim)
        self.register_buffer("pairs", torch.arange(tokens)[:, None] - torch.arange(tokens) + tokens)
        self.table = nn.Embedding(2 * tokens, self.heads)

    def forward(self, x: Tensor) -> Tensor:
        batch, rows, columns, high, wide, _, device, h = *x.shape, x.device, self.heads
        tokens = x.flatten(0, 2).flatten(1, 2).to(device)
        q, k, v = (
            one.unflatten(-1, (h, -1)).transpose(1, 2) for one in self.qkv(tokens).chunk(3, -1)
        )
        scores = q @ k.mT / q.shape[-1] ** 0.5 + self.table(self.pairs).movedim(-1, 0)
        heads = scores.softmax(self.over) @ v
        grid = heads.transpose(1, 2).flatten(2).unflatten(0, (batch, rows, columns))
        return self.out(grid.unflatten(3, (high, wide)))


class GridAstray(Grid):
    over = 1


def test_windows_of_a_grid_are_called_as_such() -> None:
    subject = resolve(Grid)
    assert (subject.caller.layout.axes, subject.room) == ("B11HWE", 25)
    assert check(Grid).passed, str(check(Grid))
    assert check(GridAstray).errors[0].rule == "softmax"


class Arranged(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return rearrange(x, pattern="b c h w -> b (h w) c")


@pytest.mark.parametrize(
    ("kind", "axes"),
    [
        (Told, "TBE"),
        (Commented, "BEHW"),
        (Made, "BE1HW"),
        (Arranged, "BEHW"),
        (lambda: Grid(24), "B11HWE"),
    ],
)
def test_axes_are_read_off_what_is_written(kind: Callable[[], nn.Module], axes: str) -> None:
    layout = said_layout(kind(), "x")
    assert layout is not None
    assert layout.axes == axes


# --- caches ---------------------------------------------------------------------------------------


class OwnCache:
    def __init__(self, n_layers: int, batch_size: int, n_heads: int, head_dim: int) -> None:
        empty = torch.zeros(batch_size, n_heads, 0, head_dim)
        self.keys, self.values = [empty] * n_layers, [empty] * n_layers

    def grown(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.keys[0] = torch.cat((self.keys[0], k), 2)
        self.values[0] = torch.cat((self.values[0], v), 2)
        return self.keys[0], self.values[0]


class WithCache(nn.Module):
    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.qkv, self.out = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)

    def offset(self, keys: int, queries: int) -> int:
        return keys - queries

    def grown(self, kv_cache: OwnCache | None, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return (k, v) if kv_cache is None else kv_cache.grown(k, v)

    def attended(self, x: Tensor, kv_cache: OwnCache | None) -> tuple[Tensor, Tensor, Tensor]:
        parts = self.qkv(x).chunk(3, -1)
        q, k, v = (one.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for one in parts)
        k, v = self.grown(kv_cache, k, v)
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        later = torch.ones_like(scores).triu(1 + self.offset(k.shape[2], q.shape[2])).bool()
        heads = scores.masked_fill(later, -torch.inf).softmax(-1) @ v
        return self.out(heads.transpose(1, 2).flatten(2)), k, v

    def forward(self, x: Tensor, kv_cache: OwnCache | None = None) -> Tensor:
        return self.attended(x, kv_cache)[0]


class Misaligned(WithCache):
    def offset(self, keys: int, queries: int) -> int:
        return 0


class HandsBack(WithCache):
    def grown(self, kv_cache, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if kv_cache is None:
            return k, v
        return torch.cat((kv_cache[0], k), 2), torch.cat((kv_cache[1], v), 2)

    def forward(self, x: Tensor, kv_cache=None):
        out, k, v = self.attended(x, kv_cache)
        return out, (k, v)


class Stays(HandsBack):
    def forward(self, x: Tensor, kv_cache=None):
        out, k, v = self.attended(x, kv_cache)
        return out, (k, v) if kv_cache is None else kv_cache


def test_a_cache_of_the_files_own_class_is_filled() -> None:
    for kind in (WithCache, HandsBack):
        verdict = check(kind)
        assert verdict.passed, str(verdict)
        assert verdict["cache"].severity == "passed"
    assert [one.rule for one in check(Misaligned).errors] == ["cache"]


def test_a_cache_that_never_grows_is_found() -> None:
    finding = check(Stays).errors[0]
    assert finding.rule == "cache"
    assert "no more tokens" in finding.message


# --- what only some layers give or take -----------------------------------------------------------


class Tiled(nn.Module):
    def __init__(self, d_model: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.attention = nn.MultiheadAttention(d_model, num_heads, batch_first=True)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        if attn_mask is not None:
            attn_mask = attn_mask.repeat(self.num_heads, 1, 1)
        return self.attention(x, x, x, attn_mask=attn_mask)[0]


def test_masks_for_pytorchs_layer_are_counted_sequence_by_sequence() -> None:
    finding = check(Tiled).errors[0]
    assert finding.rule == "mask"
    assert "sequence by sequence" in finding.message


class NoSoftmax(Attends):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        b, t, _ = x.shape
        parts = self.qkv(x).chunk(3, -1)
        q, k, v = (part.view(b, t, self.num_heads, -1).transpose(1, 2) for part in parts)
        return self.out((self.scores(q, k) @ v).transpose(1, 2).reshape(b, t, -1))


def test_attention_without_a_softmax() -> None:
    assert check(NoSoftmax).errors[0].rule == "softmax"

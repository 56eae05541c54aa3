"""Mistakes that single tokens show on their way into the heads and out, whatever the weights, and
the orders of axes that the code itself names."""

from __future__ import annotations

import linecache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.check import check
from headwise.check.target.layouts import said_layout
from headwise.check.target.resolve import resolve


class OfMap(nn.Module):
    """Attention over the places of a map, between convolutions and gates, so that no weights can be
    read; subclasses go wrong in one place."""

    def __init__(self, channels: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads, self.wide = num_heads, channels // num_heads
        self.norm = nn.GroupNorm(1, channels)
        self.qkv = nn.Conv2d(channels, 3 * channels, 1)
        self.gate, self.out = nn.Conv2d(channels, channels, 1), nn.Conv2d(channels, channels, 1)

    def rows(self, x: Tensor) -> Tensor:
        return x.flatten(2).mT

    def cut(self, rows: Tensor) -> Tensor:
        return rows.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def normed(self, rows: Tensor) -> Tensor:
        return rows

    def joined(self, heads: Tensor) -> Tensor:
        return heads.transpose(1, 2).flatten(2)

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        parts = self.qkv(self.norm(x)).sigmoid().chunk(3, 1)
        q, k, v = (self.cut(self.rows(part)) for part in parts)
        q, k = self.normed(q), self.normed(k)
        heads = (q @ k.mT / self.wide**0.5).softmax(-1) @ v
        joined = self.joined(heads).mT.reshape(b, c, h, w)
        return x + self.out(joined * self.gate(x).tanh())


class Cut(OfMap):
    def cut(self, rows: Tensor) -> Tensor:
        return rows.reshape(len(rows), self.num_heads, -1, self.wide)


class Joined(OfMap):
    def joined(self, heads: Tensor) -> Tensor:
        return heads.reshape(len(heads), heads.shape[2], -1)


class Scrambled(OfMap):
    def rows(self, x: Tensor) -> Tensor:
        return x.reshape(len(x), -1, x.shape[1])


class OverTokens(OfMap):
    def normed(self, rows: Tensor) -> Tensor:
        return F.normalize(rows, dim=-2)


class OverFeatures(OfMap):
    def normed(self, rows: Tensor) -> Tensor:
        return F.normalize(rows, dim=-1)


class ByEinsum(OfMap):
    """Split and merged within the products, and right."""

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        parts = self.qkv(self.norm(x)).sigmoid().chunk(3, 1)
        q, k, v = (self.rows(part).unflatten(-1, (self.num_heads, -1)) for part in parts)
        scores = torch.einsum("bthd,bshd->bhts", q, k) / self.wide**0.5
        heads = torch.einsum("bhts,bshd->bthd", scores.softmax(-1), v).flatten(2)
        return x + self.out(heads.mT.reshape(b, c, h, w) * self.gate(x).tanh())


class Together(OfMap):
    """Heads in the batch's axis, for one product of all."""

    def cut(self, rows: Tensor) -> Tensor:
        return super().cut(rows).flatten(0, 1)

    def joined(self, heads: Tensor) -> Tensor:
        return super().joined(heads.unflatten(0, (-1, self.num_heads)))


@pytest.mark.parametrize(
    ("layer", "rule", "said"),
    [
        (Cut, "head-split", "read on as [B, H, T, D]"),
        (Joined, "head-merge", "without the transpose"),
        (Scrambled, "definition", "features of one token get into several"),
        (OverTokens, "definition", "normalised over the tokens"),
    ],
)
def test_single_tokens_show_it(layer: type[OfMap], rule: str, said: str) -> None:
    verdict = check(layer)
    assert verdict.errors[0].rule == rule, str(verdict)
    assert said in verdict.errors[0].message


@pytest.mark.parametrize("layer", [OfMap, OverFeatures, ByEinsum, Together])
def test_what_is_right_shows_nothing(layer: type[OfMap]) -> None:
    assert check(layer).passed, str(check(layer))


# --- axes by their names --------------------------------------------------------------------------


def _unpacking(line: str, name: str = "x") -> str | None:
    """The layout that a forward pass with this line is taken to want."""
    file, code = f"<{line}>", f"def forward(self, {name}):\n    {line}\n    return {name}\n"
    linecache.cache[file] = (len(code), None, code.splitlines(True), file)
    space: dict[str, object] = {}
    exec(compile(code, file, "exec"), space)
    made = type("Made", (nn.Module,), {"forward": space["forward"]})
    found = said_layout(made(), name)
    return None if found is None else found.axes


@pytest.mark.parametrize(
    ("line", "axes"),
    [
        ("b, c, h, w = x.shape", "BEHW"),
        ("B, C, H, W = x.size()", "BEHW"),
        ("(n, h, w, _) = x.shape  # channels last", "BHWE"),
        ("batch_size, channels, height, width = x.shape", "BEHW"),
        ("b, t, d = x.shape", "BTE"),
        ("n, b, c = x.shape", "TBE"),
        ("_, n, _ = x.shape", "BTE"),
        ("b, c, n = x.shape", "BET"),
        ("b, c, t, h, w = x.shape", "BE1HW"),
        ("# b, c, h, w = x.shape", "BEHW"),
        ("x = rearrange(x, 'b c h w -> b (h w) c')", "BEHW"),
        ("one, two, three = x.shape", None),
        ("b, h, t, d = x.shape", None),
        ("b, t = x.shape[:2]", None),
        ("b, c, h, w = mask.shape", None),
    ],
)
def test_axes_are_read_off_their_names(line: str, axes: str | None) -> None:
    assert _unpacking(line) == axes


def test_axes_that_the_code_names_are_no_guess() -> None:
    subject = resolve(OfMap)
    assert subject.caller.layout.axes == "BEHW"
    assert subject.guesses == []


class OfWindows(nn.Module):
    """Cuts maps into windows; nothing names the axes, but the norm has weights for maps."""

    def __init__(self, dim: int, heads: int, window_size: int) -> None:
        super().__init__()
        self.heads, self.side = heads, window_size
        self.gain = nn.Parameter(torch.ones(1, dim, 1, 1))
        self.qkv, self.out = nn.Conv2d(dim, 3 * dim, 1), nn.Conv2d(dim, dim, 1)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x * self.gain)
        parts = parts.unfold(2, self.side, self.side).unfold(3, self.side, self.side).flatten(4)
        q, k, v = parts.unflatten(1, (3, self.heads, -1)).permute(1, 0, 2, 4, 5, 6, 3)
        heads = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v
        rows = heads.unflatten(-2, (self.side, self.side)).permute(0, 1, 6, 2, 4, 3, 5)
        return self.out(rows.flatten(5, 6).flatten(3, 4).flatten(1, 2))


def test_weights_for_maps_tell_what_goes_in() -> None:
    verdict = check(OfWindows)
    assert verdict.passed, str(verdict)
    assert "it takes x as [B, E, H, W]" in verdict.notes


class ToMap(nn.Module):
    """A second input, of tokens, beside a map."""

    def __init__(self, channels: int, num_heads: int = 1) -> None:
        super().__init__()
        self.num_heads = num_heads

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        b, m, d = z.shape  # noqa: RUF059
        b, c, h, w = x.shape
        x = x.reshape(b, c, h * w).transpose(1, 2)
        return z + (z @ x.mT / c**0.5).softmax(-1) @ x


def test_another_input_may_have_other_axes() -> None:
    assert check(ToMap).passed, str(check(ToMap))


class Vector(nn.Module):
    """Asks for a GPU, whatever there is."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).chunk(3, -1)
        q, k, v = (p.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for p in parts)
        scale = torch.tensor(q.shape[-1], device="cuda").sqrt().to(x)
        heads = (q @ k.mT / scale).softmax(-1) @ v
        return self.out(heads.transpose(1, 2).flatten(2))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_left_out() -> None:
    """All else is judged; that it runs nowhere else is a mistake by itself."""
    verdict = check(Vector)
    assert [one.rule for one in verdict.errors] == ["move"], str(verdict)
    assert verdict["definition"].severity == "passed"


class Folded(nn.Module):
    """Heads folded into the batch, behind projections with a norm and a ReLU: H of width D."""

    def __init__(self, num_heads: int, d: int) -> None:
        super().__init__()
        self.num_heads, self.d = num_heads, d
        width = num_heads * d
        self.parts = nn.ModuleList(self.part(width) for _ in range(4))

    def part(self, width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(width, width), nn.ReLU())

    def pieces(self) -> int:
        return self.d

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.cat(part(x).split(self.pieces(), -1)) for part in self.parts[:3])
        heads = (q @ k.mT / self.d**0.5).softmax(-1) @ v
        out: Tensor = self.parts[3](torch.cat(heads.split(len(x)), -1))
        return out


class FoldedOtherwise(Folded):
    """D heads of width H, for `split` takes a width and not a number."""

    def pieces(self) -> int:
        return self.num_heads


def test_as_many_heads_as_there_are_and_not_as_its_arguments_say() -> None:
    assert check(Folded).passed, str(check(Folded))
    first = check(FoldedOtherwise).errors[0]
    assert first.rule == "scale", str(check(FoldedOtherwise))
    assert "the root of the number of heads; the textbook divides them by √3" in first.message


class Graph(nn.Module):
    """Scores that are sums of a number of the query's and one of the key's, with a slope."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.proj, self.out = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim)
        self.source = nn.Parameter(torch.randn(num_heads, dim // num_heads))
        self.target = nn.Parameter(torch.randn(num_heads, dim // num_heads))
        self.bend = nn.LeakyReLU(0.2)

    def turned(self, target: Tensor) -> Tensor:
        return target.permute(0, 2, 1)[:, :, None]

    def forward(self, x: Tensor) -> Tensor:
        rows = self.proj(x).unflatten(-1, (self.num_heads, -1))
        source, target = (rows * self.source).sum(-1), (rows * self.target).sum(-1)  # [B, T, H]
        scores = self.bend(source.permute(0, 2, 1)[..., None] + self.turned(target))
        heads = scores.softmax(-1) @ rows.transpose(1, 2)
        out: Tensor = self.out(heads.transpose(1, 2).flatten(2))
        return out


class ReadOnGraph(Graph):
    def turned(self, target: Tensor) -> Tensor:
        return target.reshape(len(target), self.num_heads, 1, -1)


class PlacedGraph(ReadOnGraph):
    """What counts its tokens may have its reasons."""

    def turned(self, target: Tensor) -> Tensor:
        return super().turned(target) + torch.arange(target.shape[1], device=target.device)


def test_order_counts_only_where_something_reads_it() -> None:
    assert check(Graph)["order"].severity == "passed", str(check(Graph))
    assert [one.rule for one in check(ReadOnGraph).errors] == ["order"], str(check(ReadOnGraph))
    assert check(PlacedGraph)["order"].severity == "warning", str(check(PlacedGraph))

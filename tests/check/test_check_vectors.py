"""Layers whose x is no `[B, T, E]`: vectors of samples, maps, volumes and windows."""

from __future__ import annotations

import einops
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.check import check
from headwise.check.target.layouts import said_layout


class OneKey(nn.Module):
    """Each sample's vector of one kind attends to its vector of another: to one key."""

    def __init__(self, text_dim: int = 24, image_dim: int = 5, dim: int = 8) -> None:
        super().__init__()
        self.query = nn.Linear(text_dim, dim)
        self.key = nn.Linear(image_dim, dim)
        self.value = nn.Linear(image_dim, dim)
        self.out = nn.Linear(text_dim + dim, 12)

    def forward(self, text: Tensor, image: Tensor) -> Tensor:
        q, k, v = (f.unsqueeze(1) for f in (self.query(text), self.key(image), self.value(image)))
        weights = F.softmax(torch.bmm(q, k.transpose(1, 2)) / 8**0.5, dim=-1)
        return self.out(torch.cat([text, torch.bmm(weights, v).squeeze(1)], dim=-1))


class AmongSamples(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.w_q, self.w_k, self.w_v = (nn.Linear(dim, dim) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        # x: [batch_size, feature_dim]
        q, k, v = self.w_q(x), self.w_k(x), self.w_v(x)
        weights = torch.softmax(q @ k.transpose(0, 1) / q.shape[-1] ** 0.5, dim=-1)
        return weights @ v


class AmongTokens(AmongSamples):
    """The same of one sequence, `[tokens, dim]`, which is right."""

    def forward(self, x: Tensor) -> Tensor:
        # x: [tokens, dim]
        q, k, v = self.w_q(x), self.w_k(x), self.w_v(x)
        weights = torch.softmax(q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5, dim=-1)
        return weights @ v


@pytest.mark.parametrize(("kind", "way"), [(OneKey, "softmax"), (AmongSamples, "batch")])
def test_vectors_of_samples(kind: type[nn.Module], way: str) -> None:
    verdict = check(kind)
    assert [one.rule for one in verdict.findings if one.severity == "error"] == [way], verdict


def test_vectors_of_one_sequence() -> None:
    assert check(AmongTokens).passed


class Volume(nn.Module):
    """Of `[B, C, D, H, W]`; `turned` puts the features last before they are split."""

    turned = True

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Conv3d(dim, 3 * dim, kernel_size=1)
        self.proj = nn.Conv3d(dim, dim, kernel_size=1)

    def forward(self, x: Tensor) -> Tensor:
        B_, C, D, H, W = x.shape
        qkv = self.qkv(x)
        qkv = qkv.flatten(2).transpose(1, 2) if self.turned else qkv
        parts = qkv.reshape(B_, D * H * W, 3, self.heads, C // self.heads)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-2, -1) * (C // self.heads) ** -0.5).softmax(-1)
        out = (weights @ v).transpose(1, 2).flatten(2).transpose(1, 2)
        return self.proj(out.reshape(B_, C, D, H, W))


class ReadOn(Volume):
    turned = False


class OfChannels(Volume):
    """Channels that attend to channels, of which the order of tokens is none."""

    def forward(self, x: Tensor) -> Tensor:
        B_, C, D, H, W = x.shape
        qkv = self.qkv(x).reshape(B_, 3, self.heads, C // self.heads, -1)
        q, k, v = (F.normalize(one, dim=-1) for one in qkv.unbind(1))
        weights = (q @ k.transpose(-2, -1)).softmax(-1)
        return self.proj((weights @ v).reshape(B_, C, D, H, W))


@pytest.mark.parametrize("kind", [Volume, OfChannels])
def test_volumes(kind: type[nn.Module]) -> None:
    assert check(kind).passed


def test_a_volume_that_is_read_on() -> None:
    verdict = check(ReadOn)
    wrong = {one.rule for one in verdict.findings if one.severity == "error"}
    assert wrong <= {"definition", "order", "head-split"}, verdict
    assert wrong


class Windows(nn.Module):
    """Windows of `[b h w c]`, which `rearrange` cuts."""

    def __init__(self, dim: int, heads: int, window_size: int) -> None:
        super().__init__()
        self.heads, self.side = heads, window_size
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        side = self.side
        pattern = "b (w1 p1) (w2 p2) c -> b (w1 w2) (p1 p2) c"
        rows = einops.rearrange(x, "b (w1 p1) (w2 p2) c -> b (w1 w2) (p1 p2) c", p1=side, p2=side)
        parts = einops.rearrange(self.qkv(rows), "b n t (k h d) -> k b n h t d", k=3, h=self.heads)
        out = F.scaled_dot_product_attention(*parts)
        out = self.out(einops.rearrange(out, "b n h t d -> b n t (h d)"))
        wide = x.shape[1] // side
        left, right = pattern.split(" -> ")
        return einops.rearrange(out, f"{right} -> {left}", w1=wide, p1=side)


def test_windows() -> None:
    assert check(Windows).passed


class Flat(Windows):
    """The same of `[b, (h w), c]`, whose axes other lines name."""

    def forward(self, x: Tensor) -> Tensor:
        side = int(x.shape[1] ** 0.5)
        x = einops.rearrange(x, "b (h w) c -> b h w c", h=side)
        return super().forward(x).flatten(1, 2)


def test_axes_that_a_pattern_tells() -> None:
    told = [said_layout(made, "x") for made in (Windows(8, 2, 2), Flat(8, 2, 2))]
    assert [layout and layout.axes for layout in told] == ["BHWE", "BTE"]
    assert check(Flat).passed


class Words(nn.Module):
    """A map attends to words of another width, `[B, words, W]`."""

    def __init__(self, channels: int, word_width: int = 10) -> None:
        super().__init__()
        self.query = nn.Conv2d(channels, channels, 1)
        self.key, self.value = (nn.Linear(word_width, channels) for _ in range(2))

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        b, c, h, w = x.shape
        q = self.query(x).flatten(2).transpose(1, 2)
        weights = (q @ self.key(words).transpose(1, 2) / c**0.5).softmax(-1)
        return (weights @ self.value(words)).transpose(1, 2).reshape(b, c, h, w)


def test_maps_with_words() -> None:
    assert check(Words).passed


class OfConformations(nn.Module):
    """A vector of each sample that attends to several of another kind: right."""

    def __init__(self, drug_dim: int, protein_dim: int) -> None:
        super().__init__()
        self.query = nn.Linear(drug_dim, protein_dim)

    def forward(self, drug: Tensor, conformations: Tensor) -> Tensor:
        """drug: [batch_size, drug_dim]; conformations: [batch_size, number, protein_dim]"""
        scores = torch.bmm(self.query(drug)[:, None], conformations.transpose(1, 2)).squeeze(1)
        weights = F.softmax(scores / conformations.shape[-1] ** 0.5, dim=1)
        return (conformations * weights.unsqueeze(2)).sum(1)


def test_one_vector_that_attends_to_several() -> None:
    assert check(OfConformations).passed

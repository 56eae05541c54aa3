"""Small models that attend by every road, as the tests of what is unknown share them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

import headwise as hw

B, T, H, D = 2, 7, 2, 8
E = H * D


class Attends(nn.Module):
    """Self-attention around anything that attends: `attend(q, k, v)` on `[B, H, T, D]`."""

    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.attend, self.qkv, self.out = attend, nn.Linear(E, 3 * E), nn.Linear(E, E)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, H, -1)).permute(2, 0, 3, 1, 4)
        return self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))


class Inside(nn.Module):
    """A layer of somebody else, called in self-attention."""

    def __init__(self, layer: nn.Module, **keywords: Any) -> None:
        super().__init__()
        self.layer, self.keywords = layer, keywords

    def forward(self, x: Tensor) -> Tensor:
        found = self.layer(*[x] * (3 if isinstance(self.layer, nn.MultiheadAttention) else 1))
        return found if isinstance(found, Tensor) else found[0]


class Torch(nn.Module):
    """`nn.MultiheadAttention`, with weights or without."""

    def __init__(self, need_weights: bool) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(E, H, batch_first=True)
        self.need_weights = need_weights

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x, x, need_weights=self.need_weights)[0]


class SequenceFirst(nn.Module):
    """Attention by hand on `[T, B, E]`, as older code has it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(E, 3 * E), nn.Linear(E, E)

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        length, rows, _ = x.shape
        q, k, v = (y.reshape(length, rows * H, D).transpose(0, 1) for y in self.qkv(x).chunk(3, -1))
        heads = torch.bmm(torch.softmax(torch.bmm(q, k.mT) * D**-0.5, dim=-1), v)
        return self.out(heads.transpose(0, 1).reshape(length, rows, E)).transpose(0, 1)


def causal(scores: Tensor) -> Tensor:
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(hidden, -torch.inf)


def by_matmul(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.matmul(torch.softmax(causal(q @ k.mT * D**-0.5), dim=-1), v)


def by_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bhtd,bhsd->bhts", q, k) * D**-0.5
    return torch.einsum("bhts,bhsd->bhtd", scores.softmax(-1), v)


def with_smallest(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT * D**-0.5
    table = torch.full(scores.shape[-2:], torch.finfo(scores.dtype).min).triu(1)
    return (scores + table).softmax(-1) @ v


def cleaned(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Weights that are made 0 where they may not be, after the softmax."""
    p = torch.softmax(causal(q @ k.mT * D**-0.5), dim=-1)
    return p.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), 0.0) @ v


def by_flex(q: Tensor, k: Tensor, v: Tensor, score_mod: Any = None) -> Tensor:
    return flex_attention(q.detach(), k.detach(), v.detach(), score_mod=score_mod)


def by_flex_with_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return by_flex(q, k, v, lambda score, b, h, i, j: score + 0.1 * (j - i))


def by_sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def with_noise(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    noise = torch.randn(T, T, generator=torch.Generator().manual_seed(0))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=noise)


def of_transformers(implementation: str) -> nn.Module:
    from transformers import BertConfig
    from transformers.models.bert.modeling_bert import BertLayer

    config: Any = BertConfig(
        hidden_size=E,
        num_attention_heads=H,
        intermediate_size=E,
        attention_probs_dropout_prob=0.0,
        hidden_dropout_prob=0.0,
    )
    config._attn_implementation = implementation
    return Inside(BertLayer(config))


HAND = {
    "matmul": lambda: Attends(by_matmul),
    "einsum": lambda: Attends(by_einsum),
    "smallest": lambda: Attends(with_smallest),
    "cleaned": lambda: Attends(cleaned),
    "sequence first": SequenceFirst,
    "nn.MultiheadAttention, weights": lambda: Torch(True),
}
"""Attention of which only the scores can be seen."""

MODELS: dict[str, Callable[[], nn.Module]] = {
    **HAND,
    "sdpa": lambda: Attends(by_sdpa),
    "sdpa, noise": lambda: Attends(with_noise),
    "nn.MultiheadAttention": lambda: Torch(False),
    "flex": lambda: Attends(by_flex),
    "flex, scores": lambda: Attends(by_flex_with_scores),
    "attend": lambda: Attends(lambda *qkv: hw.attend(*qkv, mask=hw.Causal())),
    "headwise": lambda: Inside(hw.MultiHeadAttention(E, num_heads=H)),
    "transformers, sdpa": lambda: of_transformers("sdpa"),
    "transformers, eager": lambda: of_transformers("eager"),
}


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    if "transformers" in name:
        pytest.importorskip("transformers")
    return MODELS[name]()


def poisoned(model: nn.Module) -> nn.Module:
    """The model with a NaN among the weights that make the queries of head 0."""
    names = ("qkv.weight", "in_proj_weight", "query.weight")
    (weight,) = [p for name, p in model.named_parameters() if name.endswith(names)]
    weight.data[0] = torch.nan
    return model

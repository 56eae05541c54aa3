"""Rollout and relevance, held to products of T×T matrices."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise as hw
from headwise.models import GPT, GPTConfig


def gpt(dtype: torch.dtype = torch.float64) -> GPT:
    sizes = {"vocab_size": 23, "n_positions": 29, "n_embd": 20, "n_layer": 3, "n_head": 2}
    torch.manual_seed(1)
    model = GPT(GPTConfig(**sizes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.to(dtype)


def by_matrices(weights: list[Tensor], slopes: list[Tensor] | None = None) -> Tensor:
    """The whole T×T result of the textbook, from `[B, H, T, T]` of each layer."""
    one = torch.eye(weights[0].shape[-1]).to(weights[0])
    total = one.expand(len(weights[0]), -1, -1)
    for n, layer in enumerate(weights):
        if slopes is None:
            mixed = 0.5 * layer.mean(1) + 0.5 * one
            mixed = mixed / mixed.sum(-1, keepdim=True)
        else:
            mixed = one + (layer * slopes[n]).clamp(min=0).mean(1)
        total = mixed @ total
    return total


class Textbook(nn.Module):
    """Self-attention by hand, whose weights keep their gradients; `way` is how they are used."""

    def __init__(self, way: str, heads: int = 2, width: int = 10, causal: bool = True) -> None:
        super().__init__()
        self.project, self.back = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.way, self.heads, self.causal = way, heads, causal
        self.weights: Tensor = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if self.way == "sdpa":
            out = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        else:
            scores = q @ k.mT * q.shape[-1] ** -0.5
            if self.causal:
                scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
            self.weights = scores.softmax(-1)
            if self.way == "einsum":
                out = torch.einsum("bhij,bhjd->bhid", self.weights, v)
            elif self.way == "mixed einsum":
                out = torch.einsum("bhij,bjhd->bhid", self.weights, v.transpose(1, 2))
            else:
                out = self.weights @ v
        return self.back(out.transpose(1, 2).flatten(2))


class Stack(nn.Module):
    def __init__(self, way: str, causal: bool = True, layers: int = 3) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList(Textbook(way, causal=causal) for _ in range(layers))
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.7)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.layer_norm(layer(x), x.shape[-1:])
        return x


def textbook(x: Tensor, causal: bool) -> tuple[list[Tensor], list[Tensor]]:
    """The weights of each layer, and their gradients for `x[:, -1, 3]` of the output."""
    model = Stack("matmul", causal)
    score = model(x)[:, -1, 3].sum()
    weights = [layer.weights for layer in model.layers]
    return weights, list(torch.autograd.grad(score, weights))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("way", ["sdpa", "matmul", "einsum", "mixed einsum"])
def test_both_are_products_of_matrices(way: str, causal: bool) -> None:
    torch.manual_seed(5)
    x = torch.randn(3, 11, 10, dtype=torch.float64)
    weights, slopes = textbook(x, causal)
    for token in (0, 4, -1):
        found = hw.rollout(Stack(way, causal), x, token)
        torch.testing.assert_close(found, by_matrices(weights)[:, token], rtol=0, atol=1e-10)
        found = hw.relevance(Stack(way, causal), x, token, lambda out: out[:, -1, 3])
        wanted = by_matrices(weights, slopes)[:, token]
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)
    each = torch.tensor([2, 10, -3])
    found = hw.rollout(Stack(way, causal), x, each)
    wanted = by_matrices(weights)[torch.arange(3), each]
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)


def test_float32_and_frozen_parameters_of_the_own_model() -> None:
    ids = torch.randint(23, (2, 29), generator=torch.Generator().manual_seed(0))
    double, single = gpt(), gpt(torch.float32).requires_grad_(False)
    each = [hw.attention_of(double, ids, layer) for layer in range(3)]
    torch.testing.assert_close(
        hw.rollout(single, ids, -1).double(), by_matrices(each)[:, -1], rtol=0, atol=1e-5
    )

    torch.testing.assert_close(
        hw.rollout(single, ids[:1], 20).double(), by_matrices(each)[:1, 20], rtol=0, atol=1e-5
    )

    def score(logits: Tensor) -> Tensor:
        return logits[:, -1, 7]

    wanted = hw.relevance(double, ids, -1, score)
    found = hw.relevance(single, ids, -1, score)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
    assert all(parameter.grad is None for parameter in double.parameters())


def test_padding_sinks_and_shares_of_the_stream() -> None:
    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sinks = torch.tensor([0.3, -1.0]).double()

        def forward(self, x: Tensor) -> Tensor:
            q = x.unflatten(-1, (2, -1)).transpose(1, 2)
            mask = hw.Causal() & hw.Padding(torch.tensor([7, 5]))
            out = hw.attend(q, q, q, mask=mask, sinks=self.sinks)
            return out.transpose(1, 2).flatten(2)

    x = torch.randn(2, 7, 10, dtype=torch.float64)
    q = x.unflatten(-1, (2, -1)).transpose(1, 2)
    scores = (q @ q.mT) * 5**-0.5
    hidden = (
        torch.ones(7, 7).triu(1).bool()
        | (torch.arange(7) >= torch.tensor([[7], [5]]))[:, None, None]
    )
    scores = scores.masked_fill(hidden, -torch.inf)
    sinks = Padded().sinks.view(1, 2, 1, 1).expand(2, 2, 7, 1)
    weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :7]
    found = hw.rollout(Padded(), x, 4)
    torch.testing.assert_close(found, by_matrices([weights])[:, 4], rtol=0, atol=1e-10)
    assert torch.equal(hw.rollout(Padded(), x, 4, residual=1.0), torch.eye(7).double()[[4, 4]])


def test_vision_transformers_and_their_class_token() -> None:
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 24, "intermediate_size": 32, "image_size": 32}
    config = ViTConfig(**sizes, num_hidden_layers=2, num_attention_heads=3, patch_size=8)
    model = ViTForImageClassification(config).eval()
    pixels = torch.randn(2, 3, 32, 32)
    found = hw.rollout(model, {"pixel_values": pixels}, token=0)
    each = [hw.attention_of(model, {"pixel_values": pixels}, layer) for layer in range(2)]
    torch.testing.assert_close(found, by_matrices(each)[:, 0], rtol=0, atol=1e-5)
    relevance = hw.relevance(model, {"pixel_values": pixels}, 0, lambda out: out.logits[:, 1])
    assert relevance[:, 1:].unflatten(1, (4, 4)).shape == (2, 4, 4)  # a heat map


def test_fused_layers_of_pytorch_show_their_values() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(20, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x = torch.randn(2, 7, 20)
    slow = hw.relevance(model, x, 3, lambda out: out[:, 3, 0])  # parameters have gradients
    fast = hw.relevance(model.requires_grad_(False), x, 3, lambda out: out[:, 3, 0])
    torch.testing.assert_close(fast, slow, rtol=1e-5, atol=1e-5)
    assert (slow.sum(1) > 1).all()


def test_wrong_input_is_named() -> None:
    model, ids = gpt(), torch.zeros(2, 5, dtype=torch.long)
    for token in (5, -6, 1.5, torch.tensor([1])):
        with pytest.raises(ValueError, match="must be a position from 0 to 4"):
            hw.rollout(model, ids, token)
    with pytest.raises(ValueError, match=r"residual=2\): give a share from 0 to 1"):
        hw.rollout(model, ids, 0, residual=2)
    with pytest.raises(ValueError, match="no attention was seen"):
        hw.rollout(nn.Linear(2, 2), torch.zeros(1, 2), 0)
    with pytest.raises(ValueError, match="left out all that attended"):
        hw.rollout(model, ids, 0, modules="nothing")
    with pytest.raises(ValueError, match=r"score\(output\) gave \[2, 23\]"):
        hw.relevance(model, ids, 0, lambda logits: logits[:, 0])
    with pytest.raises(ValueError, match="the score has no gradient"):
        hw.relevance(model, ids, 0, lambda logits: logits.detach()[:, 0, 0])
    cross = nn.Transformer(8, 2, 1, 1, 8, batch_first=True).eval()
    with pytest.raises(ValueError, match="choose some with modules"):
        hw.rollout(cross, (torch.randn(1, 5, 8), torch.randn(1, 3, 8)), 0)
    assert hw.rollout(
        cross, (torch.randn(1, 5, 8), torch.randn(1, 3, 8)), 0, modules="encoder.*"
    ).shape == (1, 5)

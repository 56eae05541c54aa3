"""Layers whose mistake only another option of their constructor shows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise import check


class Layer(nn.Module):
    """Has options."""

    def __init__(
        self,
        width: int,
        heads: int,
        head_dim: int | None = None,
        d_out: int | None = None,
        qk_norm: bool = False,
        dropout: float = 0.0,
        fused: bool = False,
        kind: str = "plain",
    ) -> None:
        super().__init__()
        self.dim = head_dim or width // heads
        self.heads, self.dropout, self.fused, self.kind = heads, dropout, fused, kind
        self.qkv = nn.Linear(width, 3 * heads * self.dim)
        self.out = nn.Linear(heads * self.dim, d_out or width)
        self.q_norm, self.k_norm = (
            nn.LayerNorm(self.dim) if qk_norm else nn.Identity() for _ in range(2)
        )
        if kind == "gated":
            self.gate = nn.Linear(width, heads * self.dim)

    def normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def rate(self) -> float:
        return self.dropout if self.training else 0.0

    def merged(self, heads: Tensor) -> Tensor:
        return heads.transpose(1, 2).flatten(2)

    def gated(self, x: Tensor, heads: Tensor) -> Tensor:
        return heads * self.gate(x).sigmoid() if self.kind == "gated" else heads

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, -1)
        )
        q, k = self.normed(q, k)
        if self.fused:
            heads = F.scaled_dot_product_attention(q, k, v, dropout_p=self.rate())
        else:
            weights = (q @ k.mT / self.dim**0.5).softmax(-1)
            heads = F.dropout(weights, self.dropout, self.training) @ v
        return self.out(self.gated(x, self.merged(heads)))


class Options(Layer):
    """All of its options do what they say."""

    def normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return self.q_norm(q), self.k_norm(k)


class OneNorm(Layer):
    def normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return self.q_norm(q), self.q_norm(k)


class DropsAlways(Options):
    def rate(self) -> float:
        return self.dropout


class WidthOfTheInput(Options):
    def forward(self, x: Tensor) -> Tensor:
        self.shape = x.shape
        return super().forward(x)

    def merged(self, heads: Tensor) -> Tensor:
        return heads.transpose(1, 2).reshape(self.shape)


class NoSuchGate(Options):
    def gated(self, x: Tensor, heads: Tensor) -> Tensor:
        return heads * self.unmade_gates(x).sigmoid() if self.kind == "gated" else heads


class Refuses(Options):
    """Says which options do not go."""

    def __init__(self, width: int, heads: int, head_dim: int | None = None) -> None:
        if head_dim is not None and head_dim * heads != width:
            raise ValueError("head_dim must be width / heads")
        super().__init__(width, heads)


@pytest.mark.parametrize(
    ("layer", "rule", "said"),
    [
        (OneNorm, "gradients", "With qk_norm=True: No gradient reaches k_norm.weight"),
        (DropsAlways, "deterministic", "With fused=True: "),
        (WidthOfTheInput, "runs", "With head_dim=12: "),
        (NoSuchGate, "runs", "Nothing defines self.unmade_gates: what uses it fails"),
    ],
)
def test_an_option_that_breaks_a_rule_is_named(layer: type, rule: str, said: str) -> None:
    verdict = check(layer)
    assert [one.rule for one in verdict.findings] == [rule]
    assert verdict.findings[0].message.startswith(said)
    assert not verdict.passed


@pytest.mark.parametrize("layer", [Options, Refuses])
def test_options_that_work_and_those_refused_are_no_mistake(layer: type) -> None:
    assert check(layer).passed


def test_a_layer_that_was_built_has_no_options() -> None:
    assert check(WidthOfTheInput(24, 3)).passed


class NeedsLength(nn.Module):
    """Runs only where it is told a length, though that may be left out."""

    def __init__(self, d_model: int, num_heads: int, max_seq_len: int | None = None) -> None:
        super().__init__()
        self.heads, self.max_seq_len = num_heads, max_seq_len
        self.qkv, self.out = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)
        if max_seq_len is not None:
            later = torch.ones(max_seq_len, max_seq_len).triu(1).bool()
            self.register_buffer("later", later, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, -1)
        )
        scores = q @ k.mT / q.shape[-1] ** 0.5
        scores = scores.masked_fill(self.later[: x.shape[1], : x.shape[1]], -torch.inf)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def test_an_argument_that_cannot_be_left_out_though_it_may() -> None:
    (finding,) = check(NeedsLength).findings
    assert finding.rule == "runs"
    assert finding.message.startswith("With max_seq_len=None: ")
    assert "later" in finding.message


class OneOfTwo(Options):
    """Refuses to be built before one of its flags is set."""

    def __init__(self, width: int, heads: int, own: bool = False, others: bool = False) -> None:
        super().__init__(width, heads)
        assert own ^ others


def test_a_flag_that_a_constructor_insists_on_is_set() -> None:
    verdict = check(OneOfTwo)
    assert verdict.passed
    assert "own=True" in verdict.subject


class PlainMask(Options):
    """Its mask is an attribute, and so stays where it was made."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.later = torch.ones(16, 16).triu(1).bool()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, -1)
        )
        scores = q @ k.mT / self.dim**0.5
        scores = scores.masked_fill(self.later[: x.shape[1], : x.shape[1]], -torch.inf)
        weights = F.dropout(scores.softmax(-1), self.rate(), self.training)
        return self.out(self.merged(weights @ v))


def test_a_plain_tensor_that_stops_a_call_on_another_device_is_a_mistake() -> None:
    verdict = check(PlainMask)
    assert [(one.rule, one.severity) for one in verdict.errors] == [("registered", "error")]


class SumsOverQueries(Options):
    """Values first, and the weights not transposed: each output sums the weights of all queries."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x.relu()).chunk(3, -1)
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        return self.out((v.mT @ weights).mT).relu()


def test_weights_that_are_summed_over_the_queries() -> None:
    verdict = check(SumsOverQueries, width=24, heads=1)
    assert verdict.errors[0].rule == "softmax"
    assert "summed over the queries" in verdict.errors[0].message


class MayHide(nn.Module):
    """Causal where it is asked to be."""

    def __init__(self, d_model: int, num_heads: int, causal: bool = False) -> None:
        super().__init__()
        self.num_heads, self.causal = num_heads, causal
        self.qkv, self.out = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)

    def later(self, tokens: int) -> Tensor:
        return torch.ones(tokens, tokens, dtype=torch.bool).triu(1)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).unflatten(-1, (3, self.num_heads, -1))
        q, k, v = (parts[:, :, n].transpose(1, 2) for n in range(3))
        scores = q @ k.mT / q.shape[-1] ** 0.5
        if self.causal:
            scores = scores.masked_fill(self.later(x.shape[1]).to(x.device), -torch.inf)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class HidesTooLittle(MayHide):
    def later(self, tokens: int) -> Tensor:
        return torch.ones(tokens, tokens, dtype=torch.bool).triu(2)


def test_a_mask_that_only_an_option_switches_on_is_looked_at() -> None:
    assert check(MayHide).passed
    finding = check(HidesTooLittle).errors[0]
    assert finding.rule == "causal-mask"
    assert finding.message.startswith("With causal=True: The mask is off by one")

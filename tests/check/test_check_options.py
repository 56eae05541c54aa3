"""Layers whose mistake only another option of their constructor shows."""

from __future__ import annotations

from typing import ClassVar

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


class KeptForADevice(Options):
    """Its masks are kept where all layers find them, one for each device."""

    kept: ClassVar[dict[tuple[int, torch.device], Tensor]] = {}

    def later(self, x: Tensor) -> Tensor:
        key = x.shape[1], x.device
        if key not in self.kept:
            self.kept[key] = torch.ones(key[0], key[0], device=x.device).triu(1).bool()
        return self.kept[key]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, -1)
        )
        q, k = self.normed(q, k)
        scores = (q @ k.mT / self.dim**0.5).masked_fill(self.later(x), -torch.inf)
        weights = F.dropout(scores.softmax(-1), self.rate(), self.training)
        return self.out(self.gated(x, self.merged(weights @ v)))


class KeptForTheLast(KeptForADevice):
    """It is kept for one device, and made anew for another one."""

    def later(self, x: Tensor) -> Tensor:
        if getattr(self, "last", None) is None or self.last[0] != (x.shape[1], x.device):
            mask = torch.ones(x.shape[1], x.shape[1], device=x.device).triu(1).bool()
            self.last = (x.shape[1], x.device), mask
        return self.last[1]


class MadeForEval(KeptForADevice):
    """It is made as the layer goes into eval mode, and thrown away for training."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.bias = nn.Parameter(torch.zeros(16, 16))
        self.sum: Tensor | None = None

    @torch.no_grad()
    def train(self, mode: bool = True) -> None:  # type: ignore[override]
        super().train(mode)
        self.sum = None if mode else self.bias * 2

    def later(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        both = self.bias * 2 if self.sum is None else self.sum
        ones = torch.ones(n, n, device=x.device)
        return ones.expand_as(both[:n, :n]).triu(1).bool()


class OfAnotherShape(KeptForADevice):
    """A tensor of the CPU takes the shape of one that is elsewhere, and follows it then."""

    def later(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        own = torch.arange(n)[:, None].expand_as(x[0, :, :n]).to(x.device)
        return own < own.mT


@pytest.mark.parametrize("layer", [KeptForADevice, KeptForTheLast, MadeForEval, OfAnotherShape])
def test_what_is_made_anew_for_another_device_is_no_mistake(layer: type[KeptForADevice]) -> None:
    assert [one.rule for one in check(layer, 24, 3).errors] == []


class KeptForTheFirst(KeptForADevice):
    """It is kept for the device of the first call, whatever the next one's is."""

    def later(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        if getattr(self, "_last", None) is None or len(self._last) < n:
            self._last = torch.ones(n, n, device=x.device).triu(1).bool()
        return self._last[:n, :n]


def test_what_a_call_leaves_on_its_device() -> None:
    (one,) = check(KeptForTheFirst, 24, 3).errors
    assert one.rule == "move", str(one)
    assert one.message.startswith("Called once and then moved to another device, it fails")


class SumsOverQueries(Options):
    """Values first, and the weights not transposed: each output sums the weights of all queries."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x.relu()).chunk(3, -1)
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        return self.out((v.mT @ weights).mT).relu()


def test_weights_that_are_summed_over_the_queries() -> None:
    verdict = check(SumsOverQueries, width=24, heads=1)
    assert verdict.errors[0].rule == "softmax"
    assert "summed with the values along another" in verdict.errors[0].message


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


class OneHead(nn.Module):
    """Queries and keys have a width of their own, which nobody gave."""

    def __init__(self, dim_embedding: int, dim_qk: int, dim_v: int) -> None:
        super().__init__()
        self.linear_q = nn.Linear(dim_embedding, dim_qk, bias=False)
        self.linear_k = nn.Linear(dim_embedding, dim_qk, bias=False)
        self.linear_v = nn.Linear(dim_embedding, dim_v, bias=False)
        self.factor = self.root(dim_embedding, dim_qk) ** -0.5

    def root(self, wide: int, own: int) -> int:
        return own

    def forward(self, x: Tensor) -> Tensor:
        scores = self.linear_q(x) @ self.linear_k(x).mT * self.factor
        return scores.softmax(-1) @ self.linear_v(x)


class RootOfTheInput(OneHead):
    def root(self, wide: int, own: int) -> int:
        return wide


def test_the_root_of_the_input_shows_where_queries_have_another_width() -> None:
    assert check(OneHead).passed
    (one,) = check(RootOfTheInput).errors
    assert one.rule == "scale"
    assert one.message.startswith("With dim_qk=28: The scores are divided by √24")


WIDE = 48


class OneOfTheFiles(nn.Module):
    """A single head of any width, for inputs as wide as the file says."""

    def __init__(self, n_embd: int) -> None:
        super().__init__()
        self.key, self.query, self.value = (nn.Linear(WIDE, n_embd) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        k = self.key(x)
        return (self.query(x) @ k.mT / self.root(x, k) ** 0.5).softmax(-1) @ self.value(x)

    def root(self, x: Tensor, k: Tensor) -> int:
        return k.shape[-1]


class RootOfTheFiles(OneOfTheFiles):
    def root(self, x: Tensor, k: Tensor) -> int:
        return x.shape[-1]


def test_the_root_of_the_input_shows_where_a_single_head_has_another_width() -> None:
    assert check(OneOfTheFiles).passed
    (one,) = check(RootOfTheFiles).errors
    assert (one.rule, one.message.startswith("With n_embd=")) == ("scale", True), str(one)


class MaskInPlace(nn.Module):
    """A mask, and what becomes of it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def hidden(self, mask: Tensor) -> Tensor:
        return mask.logical_not()[:, None, None]

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT / q.shape[-1] ** 0.5
        if mask is not None:
            scores = scores.masked_fill(self.hidden(mask), -torch.inf)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Unsqueezes(MaskInPlace):
    def hidden(self, mask: Tensor) -> Tensor:
        return mask.unsqueeze_(1).unsqueeze_(1).logical_not()


class Inverts(MaskInPlace):
    def hidden(self, mask: Tensor) -> Tensor:
        return mask.logical_not_()[:, None, None]


@pytest.mark.parametrize("layer", [Unsqueezes, Inverts])
def test_a_mask_that_a_call_writes_to(layer: type[MaskInPlace]) -> None:
    assert check(MaskInPlace, 24, 3).passed
    assert [one.rule for one in check(layer, 24, 3).errors] == ["input-kept"]


def flagged(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
) -> Tensor:
    """Takes a flag or a mask, and refuses both."""
    if is_causal:
        assert attn_mask is None
        attn_mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    return scores.softmax(-1) @ v


def unmasked(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
) -> Tensor:
    """The same, and hides nothing but what is later."""
    if is_causal:
        return flagged(q, k, v, None, True)
    return flagged(q, k, v)


def test_a_mask_is_tried_without_the_flag_that_goes_in_its_place() -> None:
    assert check(flagged).passed
    assert [one.rule for one in check(unmasked).errors] == ["mask"]


class Listed(MaskInPlace):
    """A dropout that is told in words: its default is no number."""

    def __init__(self, width: int, heads: int, drop: dict[str, float] | None = None) -> None:
        super().__init__(width, heads)
        self.rate = nn.Dropout((drop or {"p": 0.1})["p"])

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.rate(super().forward(x, mask))


def test_a_dropout_that_is_no_number_is_left_alone() -> None:
    assert check(Listed, 24, 3).passed


class ScaleOfItsOwn(nn.Module):
    """The width of a head is worked out, and its scale goes by another that may be given."""

    def __init__(self, embed_dim: int, heads: int, dim_head: int = 8) -> None:
        super().__init__()
        self.heads, self.scale = heads, dim_head**-0.5
        self.qkv, self.proj = nn.Linear(embed_dim, 3 * embed_dim), nn.Linear(embed_dim, embed_dim)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).chunk(3, -1)
        q, k, v = (one.unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in parts)
        weights = (q @ k.mT * self.scale).softmax(-1)
        return self.proj((weights @ v).transpose(1, 2).flatten(2))


def test_a_scale_that_alone_follows_the_width_of_a_head() -> None:
    first = check(ScaleOfItsOwn).errors[0]
    assert (first.rule, "With dim_head=12" in first.message) == ("scale", True)


class Widths(nn.Module):
    """Takes inputs of one width, and works with another."""

    def __init__(self, input_dim: int, embed_dim: int, num_heads: int) -> None:
        super().__init__()
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.qkv, self.out = nn.Linear(input_dim, 3 * embed_dim), nn.Linear(embed_dim, embed_dim)

    def joined(self, heads: Tensor, x: Tensor) -> Tensor:
        return heads.reshape(*x.shape[:2], self.embed_dim)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).chunk(3, -1)
        q, k, v = (one.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for one in parts)
        heads = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return self.out(self.joined(heads, x))


class JoinedToInputs(Widths):
    """As wide as what came in, which need not be as wide as the heads."""

    def joined(self, heads: Tensor, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        return heads.reshape(batch, tokens, width)


def test_inputs_of_another_width() -> None:
    assert check(Widths).passed
    (one,) = check(JoinedToInputs).errors
    assert (one.rule, "With input_dim=48, embed_dim=24" in one.message) == ("runs", True)

"""The oracle: weights are found, attention is rebuilt from them, and mistakes are told apart."""

from collections.abc import Iterator
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

import headwise as hw
from headwise.check import RULES, check
from headwise.check.diagnosis.faults import Fault, faults
from headwise.check.diagnosis.projections import Projections, Unreadable, parts_of, read
from headwise.check.diagnosis.variants import (
    Variant,
    error,
    heads_of,
    rebuild,
    sizes_of,
    weights_from,
)
from headwise.check.target.introspect import rotations
from headwise.tutorial.implementations import fused, per_head, split, variants

E, H, D, T = 20, 6, 5, 7
"""Width of the input, heads, their width, tokens: H · D is not E, and nothing is T."""


def some(**sizes: Any) -> nn.Module:
    """headwise's own layer with random weights and biases, in float64."""
    layer = hw.MultiHeadAttention(**{"embed_dim": E, "num_heads": H, "head_dim": D} | sizes)
    layer = layer.double()
    with torch.no_grad():
        for weight in layer.parameters():
            weight.normal_(std=0.5)
    return layer


# ---- the textbook ----


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("groups", [1, 2, 6])
def test_the_plain_variant_is_attention(groups: int, causal: bool) -> None:
    layer = some(num_kv_heads=groups)
    reading = read(layer, E, H)
    assert (reading.num_kv_heads, reading.head_dim, reading.style) == (groups, D, "fused")
    x = torch.randn(2, T, E, dtype=torch.float64)
    out = layer(x, mask=hw.Causal() if causal else None)
    variant = Variant(mask="causal" if causal else "none")
    torch.testing.assert_close(rebuild(reading, x, variant), out, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(of_its_weights(reading, x, variant), out, rtol=1e-11, atol=1e-11)


def of_its_weights(reading: Projections, x: Tensor, variant: Variant) -> Tensor:
    """The same where heads and weights were made before, as a search does it."""
    heads = heads_of(reading, x, variant)
    weights = weights_from(*heads[:2], variant, sizes_of(reading, x))
    return rebuild(reading, x, variant, heads, weights)


def test_rotary_positions_softcap_and_windows_are_rebuilt() -> None:
    x = torch.randn(2, T, E, dtype=torch.float64)
    layer = some(rope=hw.RoPE(2, base=50.0, interleaved=True), softcap=2.0)
    out = layer(x, mask=hw.Window(3))
    variant = Variant(rope=(2, 50.0, True), softcap=2.0, mask="window 3")
    reading = read(layer, E, H)
    torch.testing.assert_close(rebuild(reading, x, variant), out)
    torch.testing.assert_close(of_its_weights(reading, x, variant), out)


# ---- the mistakes ----


def readings() -> Iterator[tuple[str, Projections]]:
    """A reading of each style, with biases, grouped heads and square matrices among them."""
    yield "grouped", read(some(num_kv_heads=2), E, H)
    torch.manual_seed(2)
    layer = split.MultiHeadAttn(24, 24, 16, 0.0, 3, qkv_bias=True).double()
    yield "split", read(layer, 24, 3)
    layer = fused.GPT2MultiHeadAttention(SimpleNamespace(n_embd=24, n_head=3)).double()
    with torch.no_grad():
        for weight in layer.parameters():
            weight.normal_(std=0.4)
    yield "Conv1D", read(layer, 24, 3)
    yield "per head", read(per_head.MultiHeadedAttentionWrapper(20, 8, 16, 0.0, 3).double(), 20)


Outputs = list[tuple[Fault, Tensor]]


def outputs(reading: Projections) -> tuple[Tensor, Outputs]:
    """The right output for one input, and what every known mistake makes of it."""
    x = torch.randn(2, T, reading.embed_dim, dtype=torch.float64)
    base = Variant(mask="causal")
    found = []
    for mistake in faults(reading, base):
        try:
            found.append((mistake, rebuild(reading, x, mistake.on(base))))
        except (RuntimeError, ValueError):
            continue  # shapes that cannot be: the call would fail
    return rebuild(reading, x, base), found


def hides_enough(mistake: Fault) -> bool:
    """Whether a number hides scores as small as those of this test."""
    fill = mistake.change.get("fill", "")
    return fill.startswith("-") and float(fill) <= -3


ALIKE = ({"√E", "√HD"}, {"E", "HD"})
"""Scales that are one where the heads together are as wide as the input."""


@pytest.mark.parametrize(("style", "reading"), list(readings()), ids=lambda value: str(value)[:10])
def test_every_mistake_is_seen_and_told_from_all_others(style: str, reading: Projections) -> None:
    right, found = outputs(reading)
    assert len(found) > 70
    seen: Outputs = []
    for mistake, out in found:
        # values are as wide as keys here, and a key's bias is nothing to the softmax
        silent = mistake.change in ({"scale": "√Dv"}, {"unbiased": "k"}) or hides_enough(mistake)
        if not silent:
            assert error(out, right) > 1e-3, mistake
            seen.append((mistake, out))
    for (one, a), (other, b) in combinations(seen, 2):
        if a.shape == b.shape and error(a, b) < 1e-6:
            scales = {one.change.get("scale"), other.change.get("scale")}
            assert reading.embed_dim == reading.num_heads * reading.head_dim, (one, other)
            assert scales in ALIKE, (one, other)


@pytest.mark.parametrize(("style", "reading"), list(readings()), ids=lambda value: str(value)[:10])
def test_words_can_be_filled_in(style: str, reading: Projections) -> None:
    names = {part: reading.name(part) for part in "qkvo"}
    sizes = dict.fromkeys(("E", "H", "G", "R", "D", "Dv", "W", "T"), 5)
    for mistake in faults(reading, Variant()):
        for text in (mistake.message, mistake.hint):
            said = text.format(**names, **sizes)
            assert said.endswith((".", "`")), said
            assert "{" not in said
        assert mistake.rule in RULES
        assert RULES[mistake.rule].evidence == "oracle"


class Layer(nn.Module):
    """An ordinary layer, with switches for what the tests below need."""

    def __init__(self, dim: int, num_heads: int, **switches: Any) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        for name, value in switches.items():
            setattr(self, name, value)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        return q, k, v

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT / q.shape[-1] ** 0.5

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        weights = self.scores(q, k).masked_fill(later, -torch.inf).softmax(-1)
        return self.proj((weights @ v).transpose(1, 2).flatten(2))


def test_two_mistakes_at_once_are_both_named() -> None:
    class Twice(Layer):
        def scores(self, q: Tensor, k: Tensor) -> Tensor:
            return q @ k.mT / self.qkv.in_features**0.5

        def forward(self, x: Tensor) -> Tensor:
            return x + super().forward(x)

    verdict = check(Twice, 24, 3)
    assert [one.rule for one in verdict.errors] == ["scale", "residual"]


def test_what_no_known_mistake_explains_is_still_wrong() -> None:
    class Odd(Layer):
        def scores(self, q: Tensor, k: Tensor) -> Tensor:
            return super().scores(q, k) + q.sum(-1, keepdim=True) * k.sum(-1)[..., None, :] * 0.1

    verdict = check(Odd, 24, 3)
    assert not verdict.passed
    assert verdict.errors[0].rule == "definition"
    assert "none of the known mistakes" in verdict.errors[0].message
    assert verdict.errors[0].example is not None


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v


def unscaled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1) @ v


def by_length(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT / k.shape[-2] ** 0.5).softmax(-1) @ v


def over_queries(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-2)
    return weights @ v, weights


def causal_after(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
    return weights.tril() @ v


@pytest.mark.parametrize(
    ("function", "rule", "says"),
    [
        (unscaled, "scale", "not scaled"),
        (by_length, "scale", "sequence length"),
        (over_queries, "softmax", "over the queries"),
        (causal_after, "mask-fill", "after the softmax"),
    ],
)
def test_mistakes_of_plain_functions_are_named(function: Any, rule: str, says: str) -> None:
    first = check(function).errors[0]
    assert first.rule == rule
    assert says in first.message
    assert f"of {__file__.rsplit('/', 1)[-1]}" in first.hint


def test_a_right_function_passes() -> None:
    assert check(plain).passed
    assert check(plain)["definition"].severity == "passed"


# ---- no false alarm ----


class Rotated(Layer):
    """Rotary positions of its own, from tables."""

    def __init__(self, dim: int, num_heads: int, base: float, inner: bool, norm: bool) -> None:
        super().__init__(dim, num_heads, inner=inner)
        width = dim // num_heads
        radians = torch.outer(torch.arange(32.0), base ** (-torch.arange(0, width, 2) / width))
        self.register_buffer("cos", radians.cos(), persistent=False)
        self.register_buffer("sin", radians.sin(), persistent=False)
        self.q_norm = nn.RMSNorm(width) if norm else nn.Identity()
        self.k_norm = nn.RMSNorm(width) if norm else nn.Identity()

    def turned(self, x: Tensor) -> Tensor:
        cos, sin = (table[: x.shape[2]].to(x.dtype) for table in (self.cos, self.sin))
        if self.inner:
            a, b = x[..., ::2], x[..., 1::2]
            return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return super().scores(self.turned(self.q_norm(q)), self.turned(self.k_norm(k)))


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("base", [10000.0, 500.0])
def test_rotary_positions_are_recognised(base: float, inner: bool, norm: bool) -> None:
    verdict = check(Rotated(24, 3, base, inner, norm))
    assert verdict.passed, str(verdict)
    said = verdict["definition"]
    assert said.severity == "passed"
    assert "rotary positions" in said.message
    assert ("norms of queries and keys" in said.message) == norm


@pytest.mark.parametrize("rope", [hw.RoPE(4, base=500.0, interleaved=True), hw.RoPE(8)])
def test_our_own_rotation_is_recognised(rope: hw.RoPE) -> None:
    verdict = check(hw.MultiHeadAttention(24, 3, rope=rope))
    assert verdict["definition"].severity == "passed"
    assert "rotary positions" in verdict["definition"].message


def test_a_mistake_under_rotary_positions_is_named() -> None:
    class Wrong(Rotated):
        def scores(self, q: Tensor, k: Tensor) -> Tensor:
            return super().scores(q, k) * 8**0.5 / 24**0.5

    first = check(Wrong(24, 3, 500.0, True, False)).errors[0]
    assert first.rule == "scale"
    assert "√24" in first.message


@pytest.mark.parametrize(
    ("rotated", "says"),
    [("qkv", "values are rotated"), ("q", "Only the queries"), ("k", "Only the keys")],
)
def test_what_is_rotated_wrongly_is_named(rotated: str, says: str) -> None:
    class Wrong(Rotated):
        def scores(self, q: Tensor, k: Tensor) -> Tensor:
            q, k = (
                self.turned(x) if part in rotated else x
                for part, x in zip("qk", (q, k), strict=True)
            )
            return Layer.scores(self, q, k)

        def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            q, k, v = super().heads(x)
            return q, k, self.turned(v) if "v" in rotated else v

    first = check(Wrong(24, 3, 10000.0, False, False)).errors[0]
    assert first.rule == "rotation"
    assert says in first.message


class Windowed(Layer):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        near = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device)
        return super().scores(q, k).masked_fill(near.tril(-self.window), -torch.inf)


class Capped(Layer):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return self.softcap * torch.tanh(super().scores(q, k) / self.softcap)


class Sloped(Layer):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        place = torch.arange(q.shape[2], device=q.device, dtype=q.dtype)
        far = (place[:, None] - place).abs()
        return super().scores(q, k) - far / torch.tensor(self.alibi_slopes)[:, None, None].to(q)


class Cosine(Layer):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return self.temperature * F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT


class Gated(Layer):
    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__(dim, num_heads)
        self.gate = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.sigmoid(self.gate(x[..., :1].expand_as(x)))


class Block(nn.Module):
    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.attention = nn.MultiheadAttention(dim, num_heads, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm(x)
        return x + self.attention(inner, inner, inner)[0]


OTHERS = {
    "window": (Windowed(24, 3, window=3), "a window of 3 tokens"),
    "softcap": (Capped(24, 3, softcap=2.0), "scores capped at 2"),
    "alibi": (Sloped(24, 3, alibi_slopes=(2.0, 4.0, 8.0)), "cannot be read"),
    "cosine": (Cosine(24, 3, temperature=7.0), "cannot be read"),
    "block": (Block(24, 3), "the norm around it"),
    "norms": (
        Qwen3Attention(
            Qwen3Config(hidden_size=24, num_attention_heads=6, num_key_value_heads=2, head_dim=8),
            0,
        ),
        "norms of queries and keys",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_ingredients_raise_no_alarm(name: str) -> None:
    module, says = OTHERS[name]
    verdict = check(module)
    assert "error" not in {one.severity for one in verdict.results if one.rule == "definition"}
    assert says in verdict["definition"].message
    assert verdict["definition"].severity == ("skipped" if says == "cannot be read" else "passed")


def test_a_gate_is_not_taken_for_a_mistake() -> None:
    assert check(Gated(24, 3))["definition"].severity == "skipped"


def test_a_scale_that_an_attribute_states_is_advice() -> None:
    class Scaled(Layer):
        def scores(self, q: Tensor, k: Tensor) -> Tensor:
            return q @ k.mT * self.scaling

    for scaling in (1.0, 0.0625):
        verdict = check(Scaled(24, 3, scaling=scaling))
        assert verdict.passed
        assert [one.rule for one in verdict.warnings][:1] == ["scale"]


# ---- reading ----


def test_names_say_what_a_projection_is() -> None:
    names = {
        "q": ("q", "wq", "Wq", "W_Q", "to_q", "query", "q_proj", "lin_q", "queries", "W_query"),
        "k": ("k", "wk", "key", "keys", "K", "key_projection"),
        "v": ("v", "Wv", "value_layer", "values"),
        "o": ("o", "wo", "W_o", "out_proj", "c_proj", "dense", "unifyheads", "to_out"),
        "qkv": ("qkv", "Wqkv", "to_qkv", "c_attn", "in_proj_weight", "query_key_value"),
        "kqv": ("kqv", "W_kqv"),
        "kv": ("kv", "to_kv", "key_value"),
        "": ("layer", "linears", "w", "weight", "attn"),
    }
    for parts, many in names.items():
        assert {name: parts_of(name) for name in many} == dict.fromkeys(many, parts)


def test_silent_names_are_settled_by_behaviour() -> None:
    class Silent(nn.Module):
        def __init__(self, dim: int, num_heads: int) -> None:
            super().__init__()
            self.num_heads = num_heads
            self.a, self.b, self.c, self.d = (nn.Linear(dim, dim) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            v, k, q = (
                layer(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
                for layer in (self.a, self.b, self.c)
            )
            out = F.scaled_dot_product_attention(q, k, v)
            return self.d(out.transpose(1, 2).flatten(2))

    verdict = check(Silent, 24, 3)
    assert verdict.passed, str(verdict)
    assert "whichever projection" in verdict["definition"].message


def test_a_square_parameter_may_be_used_either_way() -> None:
    class Turned(per_head.NotebookCausalAttention):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = x @ self.W_q.T, x @ self.W_k.T, x @ self.W_v.T
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    assert check(Turned(24, 16, 0.0))["definition"].severity == "passed"


@pytest.mark.parametrize(
    ("module", "says"),
    [
        (nn.Linear(24, 25), "projection of the queries"),
        (nn.MultiheadAttention(24, 3, kdim=20), "takes 20 features"),
        (nn.MultiheadAttention(25, 5), "takes 25 features|not 24"),
    ],
)
def test_what_cannot_be_read_is_said(module: nn.Module, says: str) -> None:
    with pytest.raises(Unreadable, match=says):
        read(module, 24, 3)


def test_a_rotation_is_read_off_its_tables() -> None:
    assert rotations(Rotated(24, 3, 500.0, True, False), 8)[0] == (8, 500.0, False)
    assert rotations(variants.FusedQKV(24, 3), 8) == []
    module = nn.Module()
    module.register_buffer("freqs_cis", torch.polar(torch.ones(9, 4), _radians(9, 8, 100.0)))
    assert (8, 100.0, True) in rotations(module, 8)


def _radians(tokens: int, width: int, base: float) -> Tensor:
    return torch.outer(torch.arange(float(tokens)), base ** (-torch.arange(0, width, 2) / width))


def test_the_check_leaves_the_module_as_it_was() -> None:
    layer = Layer(24, 3)
    before = {name: weight.clone() for name, weight in layer.state_dict().items()}
    layer.train()
    check(layer)
    assert layer.training
    assert all(torch.equal(before[name], weight) for name, weight in layer.state_dict().items())
    assert all(weight.grad is None for weight in layer.parameters())

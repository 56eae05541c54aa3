"""The definition: weights are read, attention is rebuilt from them, and mistakes are told apart."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

import headwise as hw
from headwise.check import RULES, check, definition
from headwise.check.build import Request, Sizes, resolve
from headwise.check.code import rotations
from headwise.check.definition.faults import Fault, faults, words_of
from headwise.check.definition.projections import Projections, Unreadable, read
from headwise.check.definition.variants import (
    Variant,
    error,
    heads_of,
    rebuild,
    sizes_of,
    weights_from,
)
from headwise.check.masks import learn_causality, learn_forms
from headwise.check.names import parts_of
from headwise.systems import fused, per_head, split, variants

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


# ---- the textbook --------------------------------------------------------------------------------


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


# ---- every mistake of the table ------------------------------------------------------------------


class Made(nn.Module):
    """A layer that computes any variant of attention from its own weights."""

    variant = Variant(mask="causal")

    def __init__(self, heads: int = H, groups: int = H, fused: bool = False, values: int = D):
        super().__init__()
        self.num_heads = heads
        if fused:
            self.c_attn = nn.Linear(E, 3 * heads * D)
        else:
            self.q, self.k = nn.Linear(E, heads * D), nn.Linear(E, groups * D)
            self.v = nn.Linear(E, groups * values)
        self.out = nn.Linear(heads * values, E)

    def forward(self, x: Tensor) -> Tensor:
        return rebuild(read(self, E, self.num_heads), x, self.variant)


class Square(Made):
    """Its matrices are square, so that they may be used the other way round."""

    def __init__(self) -> None:
        super().__init__(heads=5)
        self.q, self.k, self.v, self.out = (nn.Linear(E, E) for _ in range(4))


class Turned(Made):
    """With rotary positions."""

    def __init__(self) -> None:
        super().__init__()
        self.rope = hw.RoPE(4, base=10000.0)


MADE = {
    "apart": Made,
    "grouped": lambda: Made(groups=3, values=3),
    "fused": lambda: Made(fused=True),
    "square": Square,
    "rotary": Turned,
}
RULES_OF = {
    "grouped": ("grouped-heads", "roles"),
    "fused": ("packing", "roles", "head-split", "bias"),
    "square": ("orientation",),
    "rotary": ("rotary",),
}
"""Rules whose rows differ there from those of `apart`, which has them all."""


OPEN = [{"mask": "causal"}, *({"softmax": name} for name in ("heads", "batch", "log"))]
"""Changes of attention that sees all tokens: with a causal mask the last ones leave few numbers."""


def rows() -> Iterator[tuple[str, int, bool]]:
    """Yield every row: the layer on which it is made, its number, and whether it is causal."""
    for style, make in MADE.items():
        layer = make()
        for causal in (True, False) if style == "apart" else (True,):
            base = base_of(style, causal)
            for number, fault in enumerate(faults(read(layer, E, layer.num_heads), base)):
                chosen = style not in RULES_OF or fault.rule in RULES_OF[style]
                if chosen and (fault.change in OPEN) != causal:
                    yield style, number, causal


def base_of(style: str, causal: bool = True) -> Variant:
    rope = (4, 10000.0, False) if style == "rotary" else None
    return Variant(mask="causal" if causal else "none", rope=rope)


SILENT = ({"scale": "√Dv"}, {"unbiased": "k"}, {"turning": "heads"})


def is_silent(fault: Fault) -> bool:
    """Whether a row changes nothing here: values are as wide as keys, a bias of keys adds the same
    to all scores, a number hides what is as small as these scores, and where queries and keys are
    turned by the number of their head, scores stay as they are (a probe finds that)."""
    fill = fault.change.get("fill", "")
    hides = fill.startswith("-") and fill != "-inf" and float(fill) <= -3
    hides = hides or fill == "inf"  # which gives no numbers
    return hides or fault.change in SILENT


@pytest.mark.slow
@pytest.mark.parametrize("style", MADE)
def test_every_row_of_the_table_is_named(style: str) -> None:
    torch.manual_seed(3)
    layer = MADE[style]()
    reading = read(layer, E, layer.num_heads)
    tried = 0
    for place, number, causal in rows():
        if place != style:
            continue
        fault = list(faults(reading, base_of(style, causal)))[number]
        if is_silent(fault):
            continue
        layer.variant = fault.on(base_of(style, causal))
        try:
            layer(torch.ones(2, T, E))
        except (RuntimeError, ValueError):
            continue  # shapes that cannot be
        target = resolve(layer, (), {}, Request(Sizes(E, layer.num_heads, None, causal)))
        learn_causality(target, bool(learn_forms(target)))
        found = definition.run(target)
        wanted = fault.message.format(**words_of(reading, T))
        assert found[0].rule == fault.rule, (fault, found)
        assert found[0].message == wanted or "fill" in fault.change, (fault, found)
        assert found[0].hint
        tried += 1
    assert tried > (70 if style == "apart" else 2)


def outputs(reading: Projections) -> tuple[Tensor, list[tuple[Fault, Tensor]]]:
    """The right output for one input, and what every known mistake makes of it."""
    x = torch.randn(2, T, reading.embed_dim, dtype=torch.float64)
    base = Variant(mask="causal")
    made = []
    for mistake in faults(reading, base):
        try:
            made.append((mistake, rebuild(reading, x, mistake.on(base))))
        except (RuntimeError, ValueError):
            continue  # shapes that cannot be: the call would fail
    return rebuild(reading, x, base), made


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


@pytest.mark.parametrize(("style", "reading"), list(readings()), ids=lambda value: str(value)[:10])
def test_every_mistake_is_seen_and_its_words_filled_in(style: str, reading: Projections) -> None:
    right, made = outputs(reading)
    assert len(made) > 70
    for mistake, out in made:
        if not is_silent(mistake):
            assert error(out, right) > 1e-3, mistake
        for text in (mistake.message, mistake.hint):
            said = text.format(**words_of(reading, T))
            assert said.endswith((".", "`")), said
            assert "{" not in said
        assert RULES[mistake.rule].evidence == "oracle" or mistake.rule == "rotary"


# ---- mistakes in layers --------------------------------------------------------------------------


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

    def hide(self, scores: Tensor) -> Tensor:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        return scores.masked_fill(later, -torch.inf)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        weights = self.hide(self.scores(q, k)).softmax(-1)
        return self.proj((weights @ v).transpose(1, 2).flatten(2))


class ByWidth(Layer):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT / self.qkv.in_features**0.5


class Added(ByWidth):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class Viewed(ByWidth):
    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (
            part.reshape(len(x), self.num_heads, x.shape[1], -1)
            for part in self.qkv(x).chunk(3, -1)
        )
        return q, k, v


class AheadOfTheRoot(ByWidth):
    def hide(self, scores: Tensor) -> Tensor:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(2)
        return scores.masked_fill(later, -torch.inf)


class MergedAtOnce(ByWidth):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        weights = self.hide(self.scores(q, k)).softmax(-1)
        return self.proj((weights @ v).reshape(x.shape))


@pytest.mark.parametrize(
    ("layer", "rules"),
    [
        (ByWidth, ["scale"]),
        (Added, ["scale", "residual"]),
        (Viewed, ["scale", "head-split"]),
        (AheadOfTheRoot, ["causal-mask", "scale"]),
        (MergedAtOnce, ["head-merge", "scale"]),
    ],
)
def test_two_mistakes_at_once_are_both_named(layer: type[nn.Module], rules: list[str]) -> None:
    verdict = check(layer, 24, 3)
    assert sorted(one.rule for one in verdict.errors) == sorted(rules), str(verdict)
    assert all(one.example is not None for one in verdict.errors)


def test_what_no_known_mistake_explains_is_still_wrong() -> None:
    class Odd(Layer):
        def scores(self, q: Tensor, k: Tensor) -> Tensor:
            return super().scores(q, k) + q.sum(-1, keepdim=True) * k.sum(-1)[..., None, :] * 0.1

    (one,) = check(Odd, 24, 3).errors
    assert one.rule == "definition"
    assert "none of the known mistakes" in one.message
    assert one.example is not None


def test_a_number_out_of_the_air_is_found() -> None:
    class Odd(Layer):
        def scores(self, q: Tensor, k: Tensor) -> Tensor:
            return q @ k.mT / 5.0

    class Shining(Layer):
        def hide(self, scores: Tensor) -> Tensor:
            later = torch.ones(scores.shape[-2:], device=scores.device).triu(1).bool()
            return scores.masked_fill(later, -37.0)

    (one,) = check(Odd, 24, 3).errors
    assert (one.rule, "multiplied by 0.2;" in one.message) == ("scale", True)
    first = check(Shining, 24, 3).errors[0]
    assert first.rule == "mask-fill"
    assert "an ordinary number" in first.message


def test_a_scale_that_an_attribute_states_is_advice() -> None:
    class Scaled(Layer):
        def scores(self, q: Tensor, k: Tensor) -> Tensor:
            return q @ k.mT * self.scaling

    for scaling in (1.0, 0.0625):
        verdict = check(Scaled(24, 3, scaling=scaling))
        assert verdict.passed
        assert [one.rule for one in verdict.warnings][:1] == ["scale"]


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
    ("function", "rule", "says", "line"),
    [
        (unscaled, "scale", "not scaled", "(q @ k.mT).softmax"),
        (by_length, "scale", "sequence length", "k.shape[-2] ** 0.5"),
        (over_queries, "softmax", "over the queries", "softmax(-2)"),
        (causal_after, "mask-fill", "after the softmax", "tril"),
    ],
)
def test_mistakes_of_plain_functions_are_named(
    function: Any, rule: str, says: str, line: str
) -> None:
    first = check(function).errors[0]
    assert first.rule == rule
    assert says in first.message


# ---- no false alarm ------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("base", "inner", "norm"),
    [(10000.0, False, False), (500.0, True, False), (10000.0, True, True), (500.0, False, True)],
)
def test_rotary_positions_are_recognised(base: float, inner: bool, norm: bool) -> None:
    verdict = check(Rotated(24, 3, base, inner, norm))
    assert verdict.passed, str(verdict)
    said = verdict["definition"]
    assert said.severity == "passed"
    assert "rotary positions" in said.message
    assert "rotary" in verdict.notes
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
        return super().scores(q, k) - far * torch.tensor(self.alibi_slopes)[:, None, None].to(q)


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


QWEN = Qwen3Config(hidden_size=24, num_attention_heads=6, num_key_value_heads=2, head_dim=8)
OTHERS = {
    "window": (Windowed(24, 3, window=3), "definition gives the same output", "window"),
    "softcap": (Capped(24, 3, softcap=2.0), "scores capped at 2", ""),
    "alibi": (Sloped(24, 3, alibi_slopes=(2.0, 1.0, 0.3)), "cannot be read", ""),
    "cosine": (Cosine(24, 3, temperature=7.0), "cannot be read", ""),
    "gate": (Gated(24, 3), "cannot be read", ""),
    "block": (Block(24, 3), "the norm around it", ""),
    "norms": (
        Qwen3Attention(QWEN, 0),
        "norms of queries and keys",
        "keys are normalized",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_ingredients_raise_no_alarm(name: str) -> None:
    module, says, note = OTHERS[name]
    call = (lambda layer, x: layer(x, tables(x), None)) if name == "norms" else None
    verdict = check(module, call=call)
    assert verdict.passed, str(verdict)
    assert says in verdict["definition"].message
    assert verdict["definition"].severity == ("skipped" if says == "cannot be read" else "passed")
    assert note in " · ".join(verdict.notes)


def tables(x: Tensor) -> tuple[Tensor, Tensor]:
    angles = torch.outer(torch.arange(x.shape[1]), 10000.0 ** (-torch.arange(0, 8, 2) / 8))
    both = torch.cat((angles, angles), -1).to(x)[None]
    return both.cos(), both.sin()


# ---- reading -------------------------------------------------------------------------------------


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
    assert verdict["definition"].severity == "passed"


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
    radians = torch.outer(torch.arange(9.0), 100.0 ** (-torch.arange(0, 8, 2) / 8))
    module.register_buffer("freqs_cis", torch.polar(torch.ones(9, 4), radians))
    assert (8, 100.0, True) in rotations(module, 8)


def test_an_example_can_be_typed_in() -> None:
    example = check(per_head.NotebookCausalAttention, faithful=True)["scale"].example
    assert example is not None
    assert not re.search("random weights", example.source)  # these are the layer's own
    space: dict[str, Any] = {"torch": torch}
    exec(example.source, space)
    torch.manual_seed(0)
    layer = per_head.NotebookCausalAttention(24, 16, 0.0, faithful=True).double().eval()
    shown = torch.tensor(example.actual, dtype=torch.float64)
    assert torch.allclose(layer(space["x"])[0], shown, atol=1e-9)
    assert len(example.actual) == 3

"""RoPE against transformers, against complex numbers, and against what it promises."""

import cmath
import copy
import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama import modeling_llama

from headwise.layers.rope import RoPE

EPS32 = torch.finfo(torch.float32).eps
EPS64 = torch.finfo(torch.float64).eps
B, H, T, D = 2, 3, 7, 10

SCALINGS = {
    "default": {},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 101},
    "yarn_given_factor": {
        "rope_type": "yarn",
        "factor": 5.0,
        "original_max_position_embeddings": 67,
        "attention_factor": 0.7,
        "beta_fast": 11.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
    "yarn_mscale": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 101,
        "mscale": 1.3,
        "mscale_all_dim": 0.7,
    },
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "original_max_position_embeddings": 101,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    },
}


def llama_config(scaling: dict, dim: int = D, base: float = 500.0) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=dim * H,
        num_attention_heads=H,
        head_dim=dim,
        max_position_embeddings=103,
        rope_parameters={"rope_type": "default", **scaling, "rope_theta": base},
    )


def by_complex_numbers(x: torch.Tensor, base: float, first: int = 0) -> torch.Tensor:
    """Meta's reference: features 2i and 2i+1 are one complex number, turned by `e^(i·m·f)`."""
    dim = x.shape[-1]
    out = torch.empty_like(x)
    for t in range(x.shape[2]):
        for pair in range(dim // 2):
            turn = cmath.exp(1j * (first + t) * base ** (-2 * pair / dim))
            number = torch.complex(x[:, :, t, 2 * pair], x[:, :, t, 2 * pair + 1]) * turn
            out[:, :, t, 2 * pair], out[:, :, t, 2 * pair + 1] = number.real, number.imag
    return out


@pytest.mark.parametrize("dim", [4, 10, 22])
@pytest.mark.parametrize("length", [None, 50, 103, 409])
@pytest.mark.parametrize("name", [n for n in SCALINGS if n != "default"])
def test_frequencies_are_those_of_transformers(name, length, dim):
    config = llama_config(SCALINGS[name], dim)
    kind = config.rope_parameters["rope_type"]
    theirs, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=length)
    rope = RoPE.from_config(config)
    ours = rope.frequencies(length or 0)
    # transformers works in float32: the exponent's rounding counts ln(base) times, a few more come
    # from the ramp, each relative to the frequency before interpolation.
    tolerance = (math.log(rope.base) + 4) * EPS32 * RoPE(dim, rope.base).frequencies()
    assert ((ours - theirs).abs() <= tolerance).all()
    assert rope.attention_factor == pytest.approx(factor, rel=1e-15)


def test_dynamic_scaling_starts_only_beyond_the_original_length():
    rope = RoPE(D, scaling={**SCALINGS["dynamic"], "original_max_position_embeddings": 11})
    assert torch.equal(rope.frequencies(11), RoPE(D).frequencies())
    # NTK by hand: twice the length with factor 2 stretches the base by 3 ** (D / (D - 2)).
    stretched = RoPE(D, base=10000.0 * 3 ** (D / (D - 2))).frequencies()
    assert torch.allclose(rope.frequencies(22), stretched, rtol=8 * EPS64)


@pytest.mark.parametrize("name", list(SCALINGS))
@pytest.mark.parametrize("count", [T, 127])
def test_rotation_is_that_of_llama(name, count):
    torch.manual_seed(0)
    config = llama_config(SCALINGS[name])
    q, k = torch.randn(B, H, count, D), torch.randn(B, 1, count, D)
    cos, sin = modeling_llama.LlamaRotaryEmbedding(config)(q, torch.arange(count)[None])
    rope = RoPE.from_config(config)
    # Their angles are float32 products: position × frequency, each with a rounding or two.
    angle_error = (math.log(rope.base) + 4) * EPS32 * count
    for x, theirs in zip((q, k), modeling_llama.apply_rotary_pos_emb(q, k, cos, sin), strict=True):
        tolerance = (2 * angle_error + 4 * EPS32) * x.abs().max() * rope.attention_factor
        assert (rope(x) - theirs).abs().max() <= tolerance


def test_interleaved_is_metas_complex_rotation():
    torch.manual_seed(1)
    x = torch.randn(B, H, T, D, dtype=torch.float64)
    ours = RoPE(D, base=500.0, interleaved=True)(x, offset=5)
    assert torch.allclose(ours, by_complex_numbers(x, 500.0, first=5), rtol=0, atol=64 * EPS64)


def test_interleaved_reads_memory_of_any_alignment():
    x, rope = torch.randn(B, H, T, D, dtype=torch.float64), RoPE(D, interleaved=True)
    shifted = torch.randn(B * H * T * D + 1, dtype=torch.float64)[1:].view(B, H, T, D)
    odd_rows = torch.randn(B, H, T, D + 1, dtype=torch.float64)[..., :D]
    spread = torch.randn(B, H, T, 2 * D, dtype=torch.float64)[..., ::2]
    for place in (shifted, odd_rows, spread):
        assert torch.allclose(rope(place.copy_(x)), rope(x), rtol=0, atol=8 * EPS64)


def test_the_two_conventions_differ_by_an_order_of_features():
    x = torch.randn(B, H, T, D, dtype=torch.float64)
    order = torch.cat(
        (torch.arange(0, D, 2), torch.arange(1, D, 2))
    )  # pairs side by side -> halves
    halves, pairs = RoPE(D), RoPE(D, interleaved=True)
    assert torch.allclose(halves(x[..., order]), pairs(x)[..., order], rtol=0, atol=8 * EPS64)
    assert not torch.allclose(halves(x), pairs(x), atol=1e-3)


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 5000), st.integers(0, 5000), st.integers(0, 5000), st.booleans())
def test_scores_depend_on_the_distance_only(query, key, shift, interleaved):
    torch.manual_seed(query)
    rope = RoPE(D, interleaved=interleaved)
    q, k = torch.randn(2, 1, 1, 1, D, dtype=torch.float64)
    here = (rope(q, query) * rope(k, key)).sum()
    there = (rope(q, query + shift) * rope(k, key + shift)).sum()
    # an angle near 10⁴ is rounded by 10⁴ · eps
    assert abs(here - there) <= 4e4 * EPS64 * q.norm() * k.norm()


def test_offsets():
    torch.manual_seed(2)
    rope, x = RoPE(D), torch.randn(B, H, T, D, dtype=torch.float64)
    whole = rope(torch.cat((x, x), dim=2))
    assert torch.equal(rope(x, offset=T), whole[:, :, T:])
    each = rope(x, offset=torch.tensor([3, -5]))
    assert torch.allclose(each[0], rope(x, offset=3)[0], rtol=0, atol=8 * EPS64)
    first = x[1:, :, :1]
    assert torch.allclose(each[1:, :, :1], rope(first, offset=-5), rtol=0, atol=8 * EPS64)
    assert torch.allclose(rope(rope(first, -5), 5), first, rtol=0, atol=64 * EPS64)


@pytest.mark.parametrize("interleaved", [False, True])
def test_partial_rotation_leaves_the_rest_alone(interleaved):
    x = torch.randn(B, H, T, 11)
    rope = RoPE(6, interleaved=interleaved)
    assert torch.equal(rope(x)[..., 6:], x[..., 6:])
    assert torch.equal(rope(x)[..., :6], rope(x[..., :6]))
    assert torch.equal(rope(x)[:, :, 0], x[:, :, 0])  # position 0 does not turn
    assert not torch.equal(rope(x)[:, :, 1], x[:, :, 1])


def test_a_dynamic_rotation_uses_the_length_it_has_reached():
    scaling = {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 5}
    rope, x = RoPE(D, scaling=scaling), torch.randn(B, H, T, D, dtype=torch.float64)
    stretched = RoPE(D, base=10000.0 * (2 * T / 5 - 1) ** (D / (D - 2)))
    assert torch.allclose(rope(x), stretched(x), rtol=0, atol=64 * EPS64)
    by_rows = rope(x, offset=torch.tensor([0, 0]))
    assert torch.allclose(by_rows, rope(x), rtol=0, atol=8 * EPS64)
    assert torch.equal(rope(x[:, :, :5]), RoPE(D)(x[:, :, :5]))  # and forgets it again


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_is_rounded_once(dtype):
    torch.manual_seed(3)
    x = torch.randn(B, H, 211, D).to(dtype)
    rope = RoPE(D)
    exact = rope(x.double())
    assert rope(x).dtype == dtype
    # computed in float32 (three roundings of terms no larger than |x|·√2), then rounded to dtype
    tolerance = torch.finfo(dtype).eps / 2 * exact.abs() + 6 * EPS32 * x.double().abs().max()
    assert ((rope(x).double() - exact).abs() <= tolerance).all()


@pytest.mark.parametrize("interleaved", [False, True])
def test_gradient(interleaved):
    x = torch.randn(1, 2, 3, 6, dtype=torch.float64, requires_grad=True)
    rope = RoPE(4, interleaved=interleaved)
    assert torch.autograd.gradcheck(lambda y: rope(y, 2), x)
    assert torch.autograd.gradgradcheck(lambda y: rope(y, 2), x)


def test_strided_heads_are_taken_as_they_are():
    rows = torch.randn(B, T, H, D)
    assert torch.equal(RoPE(D)(rows.transpose(1, 2)), RoPE(D)(rows.transpose(1, 2).contiguous()))


def test_tables_of_inference_mode_serve_training_later():
    rope = RoPE(D)
    with torch.inference_mode():
        rope(torch.randn(B, H, T, D))
    x = torch.randn(B, H, T, D, requires_grad=True)
    rope(x).sum().backward()
    assert x.grad is not None


def test_it_is_a_value():
    scaling = {**SCALINGS["linear"]}
    rope = RoPE(D, base=500.0, interleaved=True, scaling=scaling)
    before = rope(torch.ones(1, 1, T, D))
    scaling["factor"] = 99.0  # the caller's mapping is not ours
    for twin in (copy.deepcopy(rope), pickle.loads(pickle.dumps(rope)), eval(repr(rope))):
        assert twin == rope
        assert twin._tables == {}
        assert torch.equal(twin(torch.ones(1, 1, T, D)), before)
    assert rope != RoPE(D, base=500.0, scaling=SCALINGS["linear"])
    assert repr(RoPE(4)) == "RoPE(4, base=10000.0)"


def test_from_config_reads_old_and_new_names():
    old = {
        "hidden_size": 24,
        "num_attention_heads": 3,
        "rope_theta": 77.0,
        "max_position_embeddings": 88,
        "partial_rotary_factor": 0.5,
        "rope_scaling": {"type": "yarn", "factor": None, "original_max_position_embeddings": 11},
    }
    rope = RoPE.from_config(old)
    assert (rope.dim, rope.base, rope.kind) == (4, 77.0, "yarn")
    assert rope.scaling is not None
    assert rope.scaling["factor"] == 8.0  # 88 / 11, as transformers does for DeepSeek
    new = {**old, "rope_scaling": None, "rope_parameters": {"rope_type": "default"}}
    assert RoPE.from_config(new) == RoPE(4, base=77.0)
    layers = {"sliding_attention": {"rope_type": "default"}}
    with pytest.raises(ValueError, match="differ by layer type"):
        RoPE.from_config({**old, "rope_parameters": layers})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dim": 7}, "dim must be an even"),
        ({"dim": 0}, "dim must be an even"),
        ({"dim": 4, "base": 0.0}, "base must be above 0"),
        ({"dim": 4, "scaling": {"rope_type": "yearn"}}, "'yearn' is not one of default, linear"),
        ({"dim": 4, "scaling": {"factor": 2.0}}, "None is not one of"),
        ({"dim": 4, "scaling": {"rope_type": "yarn", "factor": 2.0}}, "needs original_max_pos"),
        ({"dim": 4, "scaling": {"rope_type": "linear", "factor": 0.0}}, "factor must be"),
        ({"dim": 8.0}, "dim must be an even whole number of at least 2"),
        ({"dim": True}, "dim must be an even"),
        ({"dim": 4, "base": math.inf}, "base must be above 0 and finite"),
        ({"dim": 4, "base": math.nan}, "base must be above 0 and finite"),
        ({"dim": 4, "base": "10000"}, "base must be above 0 and finite"),
        ({"dim": 4, "interleaved": "no"}, "interleaved must be True or False, got 'no'"),
        ({"dim": 4, "scaling": "linear"}, "scaling must be None or a mapping"),
        ({"dim": 4, "scaling": {"rope_type": ["linear"]}}, "is not one of default, linear"),
        (
            {"dim": 4, "scaling": {"rope_type": "linear", "factor": "4"}},
            "factor must be a finite number above 0, got '4'",
        ),
        (
            {"dim": 4, "scaling": {**SCALINGS["dynamic"], "original_max_position_embeddings": 0}},
            "original_max_position_embeddings must be a finite number above 0, got 0",
        ),
        ({"dim": 4, "scaling": {**SCALINGS["yarn"], "beta_fast": -1.0}}, "beta_fast must be"),
        ({"dim": 4, "scaling": {**SCALINGS["yarn"], "mscale": "1"}}, "mscale must be"),
        ({"dim": 4, "base": 1.0, "scaling": SCALINGS["yarn"]}, "base must be above 1"),
        ({"dim": 4, "scaling": {**SCALINGS["llama3"], "low_freq_factor": 4.0}}, "must be below"),
        (
            {
                "dim": 2,
                "scaling": {
                    "rope_type": "dynamic",
                    "factor": 2.0,
                    "original_max_position_embeddings": 5,
                },
            },
            "divides by dim - 2",
        ),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_bad_arguments_quote_the_call(arguments, message):
    with pytest.raises(ValueError, match=message) as caught:
        RoPE(**arguments)
    assert str(caught.value).startswith(f"RoPE(dim={arguments['dim']}")


def test_a_head_smaller_than_the_rotation_is_refused():
    with pytest.raises(ValueError, match=r"RoPE\(dim=8\).*\[2, 3, 7, 6\]"):
        RoPE(8)(torch.ones(2, 3, 7, 6))


@pytest.mark.parametrize(
    ("x", "offset", "message"),
    [
        (torch.ones(2, 3, 7, 8), 2.5, r"offset=2.5: give the position of the first token"),
        (torch.ones(2, 3, 7, 8), True, "offset=True: give"),
        (torch.ones(2, 3, 7, 8), torch.tensor([0.5, 1.0]), "offset=torch.float32"),
        (
            torch.ones(2, 3, 7, 8),
            torch.tensor([1, 2, 3]),
            r"offset=.* \[3\]: .* each of 2 batch rows",
        ),
        ([[1.0, 2.0]], 0, "x that is a list, not a torch.Tensor"),
        (torch.ones(7, 8), 0, r"x of shape \[7, 8\]: give queries or keys of heads"),
        (torch.ones(2, 3, 7, 8, dtype=torch.long), 0, "x of torch.int64: give a floating-point"),
        (torch.ones(2, 3, 7, 8).to_sparse(), 0, "x that is torch.sparse_coo"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_what_cannot_be_rotated_is_quoted(x, offset, message):
    with pytest.raises(ValueError, match=r"RoPE\(dim=8\) called with " + message):
        RoPE(8)(x, offset)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "hidden_size must be a whole number, got None"),
        (
            {"hidden_size": 24, "num_attention_heads": "3"},
            "num_attention_heads must be a whole number, got '3'",
        ),
        ({"head_dim": 8, "rope_scaling": "linear"}, "rope_scaling='linear' must be a mapping"),
        (
            {"head_dim": 8, "rope_scaling": {"type": "yarn", "factor": 2.0}},
            "max_position_embeddings must be a whole number, got None",
        ),
    ],
)
def test_a_config_that_lacks_a_size_is_quoted(config, message):
    with pytest.raises(ValueError, match=f"RoPE.from_config: {message}"):
        RoPE.from_config(config)


class Sizes(TorchDispatchMode):
    """The largest tensor that is made."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.largest = max(self.largest, out.numel())
        return out


@pytest.mark.parametrize("offset", [0, 4095, 2_000_000])
def test_rows_are_computed_as_they_are_asked_for(offset):
    rope, x = RoPE(D), torch.randn(1, 1, 1, D)
    with Sizes() as sizes:
        rope(x, offset)
    assert sizes.largest <= 4096 * D


def test_far_rows_are_those_of_a_tensor_offset():
    rope, x = RoPE(D), torch.randn(B, H, T, D)
    for offset in (-3, 0, 120, 4090, 4096, 2_000_000):
        assert torch.equal(rope(x, offset), rope(x, torch.tensor(offset)))
        assert torch.equal(rope(x, offset), rope(x, torch.tensor([offset] * B)))


def test_steps_of_a_long_text_keep_few_rows():
    rope, x = RoPE(D), torch.randn(1, 1, 1, D)
    for offset in range(10_000, 10_100):
        rope(x, offset)
    assert sum(table.numel() for pair in rope._tables.values() for table in pair) <= 20 * D

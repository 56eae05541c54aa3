"""The layer on MAX against torch: Hugging Face's GPT-2 and our own twin, at (2, 8, 768).

Everything is compiled on the CPU, for any batch and any length at once. That is most of the time
that these tests take, and MAX keeps what it compiled in the user's cache.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import GPT2Config
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention

import headwise as hw
from headwise.systems import fused, max_gpt2

B, T, E, H = 2, 8, 768, 12
CONFIG = GPT2Config(n_embd=E, n_head=H, attn_pdrop=0.0, resid_pdrop=0.0)


@pytest.fixture(scope="module")
def theirs() -> GPT2Attention:
    torch.manual_seed(1)
    layer = GPT2Attention(CONFIG, layer_idx=0).eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.04)
    return layer


@pytest.fixture(scope="module")
def layer(theirs: GPT2Attention) -> max_gpt2.GPT2MultiHeadAttention:
    return max_gpt2.load_gpt2(max_gpt2.GPT2MultiHeadAttention(CONFIG), theirs.state_dict())


@pytest.fixture(scope="module")
def run(layer: max_gpt2.GPT2MultiHeadAttention) -> Any:
    return max_gpt2.compile_layer(layer)


@pytest.fixture(scope="module")
def run_cached(layer: max_gpt2.GPT2MultiHeadAttention) -> Any:
    return max_gpt2.compile_cached(layer)


def expected(theirs: GPT2Attention, x: Tensor) -> np.ndarray:
    length = x.shape[1]
    mask = torch.full((1, 1, length, length), -torch.inf).triu(1)
    with torch.no_grad():
        return theirs(x, attention_mask=mask)[0].numpy()


def error(got: np.ndarray, want: np.ndarray | Tensor) -> float:
    assert got.shape == tuple(want.shape)
    return float(np.abs(got - np.asarray(want)).max())


def test_same_output_as_torch(theirs: GPT2Attention, run: Any) -> None:
    x = torch.randn(B, T, E)
    first = run(x)
    want = expected(theirs, x)
    assert error(first, want) < 1e-5 < np.abs(want).max()
    assert error(run(x.numpy()), want) < 1e-5

    twin = fused.GPT2MultiHeadAttention(CONFIG).eval()
    twin.load_state_dict(theirs.state_dict())
    with torch.no_grad():
        assert error(first, twin(x)) < 1e-5

    run(torch.randn(B, T, E))
    assert error(first, want) < 1e-5  # what a call gave is not overwritten by the next


def test_one_compilation_serves_every_length(theirs: GPT2Attention, run: Any) -> None:
    for shape in ((1, 1, E), (3, 13, E)):
        x = torch.randn(shape)
        assert error(run(x), expected(theirs, x)) < 1e-5


def test_a_position_sees_none_after_it(run: Any) -> None:
    x = torch.randn(B, T, E)
    changed = x.clone()
    changed[:, 5:] = torch.randn(B, T - 5, E)
    one, two = run(x), run(changed)
    assert error(one[:, :5], two[:, :5]) < 1e-6
    assert error(one[:, 5:], two[:, 5:]) > 1e-2


def test_cached_in_parts_as_in_one_piece(theirs: GPT2Attention, run_cached: Any) -> None:
    x = torch.randn(B, T, E)
    want = expected(theirs, x)
    key = value = np.zeros((B, H, 0, E // H), np.float32)
    for start, stop in ((0, 3), (3, 4), (4, 8)):
        out, key, value = run_cached(x[:, start:stop], key, value)
        assert key.shape == value.shape == (B, H, stop, E // H)
        assert error(out, want[:, start:stop]) < 1e-5


def test_the_mask_is_aligned_to_the_end() -> None:
    class Masks(max_gpt2.Module):
        def forward(self, new: Any, cached: Any) -> tuple[Any, ...]:
            symbolic = max_gpt2.causal_mask(new.shape[0], cached.shape[0])
            return symbolic, max_gpt2.causal_mask(3, 2), max_gpt2.causal_mask(3, 0)

        __call__ = forward

    masks = Masks().compile(max_gpt2._type("new"), max_gpt2._type("cached"))
    for length, past in ((4, 3), (1, 6), (5, 0)):
        given = (np.zeros(size, np.float32) for size in (length, past))
        got = [max_gpt2._from_max(mask) for mask in masks(*map(max_gpt2._max_tensor, given))]
        for mask, sizes in zip(got, ((length, past), (3, 2), (3, 0)), strict=True):
            assert np.array_equal(mask, fused.causal_mask(*sizes).numpy())
    assert got[1].tolist() == [
        [0, 0, 0, -np.inf, -np.inf],
        [0, 0, 0, 0, -np.inf],
        [0, 0, 0, 0, 0],
    ]


def test_weights_of_any_layout_arrive_turned(layer: max_gpt2.GPT2MultiHeadAttention) -> None:
    ours = hw.MultiHeadAttention(24, num_heads=3)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.normal_()
    state = hw.convert(ours.state_dict(), source="headwise", target="gpt2", num_heads=3)
    small = max_gpt2.GPT2MultiHeadAttention(SimpleNamespace(n_embd=24, n_head=3))
    assert max_gpt2.load_gpt2(small, state | {"bias": torch.ones(1, 1, 9, 9)}) is small
    loaded = {name: np.from_dlpack(tensor) for name, tensor in small.parameters}
    assert np.array_equal(loaded["c_attn.weight"], ours.qkv.weight.detach().numpy())
    assert np.array_equal(loaded["c_attn.bias"], ours.qkv.bias.detach().numpy())
    assert np.array_equal(loaded["c_proj.weight"], ours.out.weight.detach().numpy())
    assert np.array_equal(loaded["c_proj.bias"], ours.out.bias.detach().numpy())


def test_faults_are_named(
    layer: max_gpt2.GPT2MultiHeadAttention, run: Any, run_cached: Any
) -> None:
    with pytest.raises(ValueError, match=r"n_embd=10, n_head=3\): n_embd must be a multiple"):
        max_gpt2.GPT2MultiHeadAttention(SimpleNamespace(n_embd=10, n_head=3))
    with pytest.raises(ValueError, match="scale_attn_weights must be True"):
        max_gpt2.GPT2MultiHeadAttention(GPT2Config(scale_attn_weights=False))
    with pytest.raises(ValueError, match=r"load_gpt2\(n_embd=768\): the state must"):
        max_gpt2.load_gpt2(layer, {"c_attn.weight": np.zeros((3 * E, E))})
    with pytest.raises(ValueError, match=r"\[2, 8, 5\]\): the input must be \[B, T, 768\]"):
        run(np.zeros((B, T, 5)))
    past = np.zeros((B, H, 3, 5))
    with pytest.raises(ValueError, match=r"must be \[2, 12, P, 64\]"):
        run_cached(np.zeros((B, T, E)), past, past)

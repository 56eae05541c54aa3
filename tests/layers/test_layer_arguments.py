"""What the layer says to arguments that it has not, and to values of another kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import headwise as hw

E, H = 96, 6
pytestmark = pytest.mark.usefixtures("unchecked")


def built(**settings: Any) -> hw.MultiHeadAttention:
    return hw.MultiHeadAttention(E, num_heads=H, **settings)


def x() -> torch.Tensor:
    return torch.randn(2, 7, E)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (
            {"batch_first": True},
            r"batch_first=…\): .* omit it: .*\[batch, length, embed",
        ),
        ({"kdim": 8}, "write kv_dim="),
        ({"vdim": 8}, "write kv_dim="),
        ({"add_zero_attn": True}, "sinks=True gives each head"),
        ({"n_heads": 6}, "write num_heads="),
        ({"is_causal": True}, r"give the mask to the call: layer\(x, mask=hw\.Causal\(\)\)"),
        ({"need_weights": True}, r"hw\.attention_of\(layer"),
        ({"dropout_p": 0.1}, "write dropout="),
        ({"num_kv_head": 2}, r"did you mean num_kv_heads=\?"),
    ],
)
def test_settings_of_other_layers_are_answered_with_ours(
    settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(TypeError, match=rf"^MultiHeadAttention\(embed_dim, num_heads, .*{says}"):
        built(**settings)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"rope": True}, r"rope=True\): rope must be a RoPE, such as hw\.RoPE\(16\), or None"),
        ({"rope": hw.RoPE}, "rope must be a RoPE"),
        ({"bias": None}, "must be one bool, or three"),
        ({"bias": 1}, r"bias=\(1, 1, 1\) must be one bool, or three"),
        ({"bias": "no"}, "must be one bool, or three"),
        ({"out_bias": "no"}, "out_bias must be True or False, got 'no'"),
        ({"qk_norm": "rms"}, "qk_norm must be True or False, got 'rms'"),
        ({"sinks": 4}, "sinks must be True or False, got 4"),
    ],
)
def test_settings_of_another_kind_are_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=rf"^MultiHeadAttention\(embed_dim=96.*{says}"):
        built(**settings)


@pytest.mark.parametrize("settings", [{"dim": "a"}, {"dim": 4.0}, {"dim": 4, "base": "a"}])
def test_a_rotation_of_no_numbers_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^RoPE\(dim=.*must be"):
        hw.RoPE(**settings)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"cache": {}}, r"cache must be a KVCache, got \{\}; write cache=hw\.KVCache\(\)"),
        ({"cache": True}, "cache must be a KVCache, got True"),
        ({"cache": hw.KVCache}, "cache must be a KVCache"),
        ({"context": hw.Causal()}, "context is a Causal, .* give the mask by name, mask=…"),
        ({"x": None}, "x is a NoneType, not a torch.Tensor"),
        ({"x": "a text"}, "x is a str"),
    ],
)
def test_what_is_given_of_another_kind_is_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=rf"^MultiHeadAttention\(embed_dim=96.*{says}"):
        built()(**{"x": x(), **given})


def test_q_k_and_v_are_not_given_to_a_layer_that_makes_them() -> None:
    layer = built()
    with pytest.raises(TypeError, match=r"3 positional arguments .* use hw\.attend\(q, k, v\)"):
        layer(x(), x(), x())
    with pytest.raises(TypeError, match=r"3 positional arguments .* by name: mask=…, c"):
        layer(x(), None, hw.Causal())
    with pytest.raises(TypeError, match="itself, both from x or both from context="):
        layer(x(), key=x(), value=x())


@pytest.mark.parametrize("name", ["need_weights", "average_attn_weights", "output_attentions"])
def test_weights_are_asked_for_by_functions_that_take_the_layer(name: str) -> None:
    layer = built()
    with pytest.raises(TypeError, match="there is no such") as refused:
        layer(x(), **{name: True})
    assert "hw.observe" not in str(refused.value)
    assert "hw.watch(layer)" in str(refused.value)
    call = "hw.attention_of(layer, {'x': x, 'mask': mask}, layer=0)"
    assert call in str(refused.value)
    found = eval(call, {"hw": hw, "layer": layer, "x": x(), "mask": hw.Causal()})
    assert found.shape == (2, H, 7, 7)


@pytest.mark.parametrize("name", ["dropout_p", "softmax_scale", "past_key_value"])
def test_a_call_advises_nothing_that_it_refuses(name: str) -> None:
    with pytest.raises(TypeError, match=r"to the layer when it is built|write cache="):
        built()(x(), **{name: 0.1})

"""The attention modules that people bring: equal outputs after conversion, and back bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import headwise as hw
from brought import BUILDERS, Brought, X, randomised


@pytest.mark.parametrize("build", BUILDERS, ids=lambda build: build.__name__)
def test_a_module_of_transformers_and_headwises_layer_are_equal(
    build: Callable[[], Brought],
) -> None:
    case = build()
    randomised(case.module)
    state = case.module.state_dict()
    options = {"num_heads": 4, **case.convert}
    ours = hw.convert(state, source=case.source, target="headwise", **options)
    back = hw.convert(ours, source="headwise", target=case.source, bias=None, **options)
    assert all(torch.equal(back[name], tensor) for name, tensor in state.items())
    assert not any(back[name].any() for name in back.keys() - state.keys())
    layer = hw.MultiHeadAttention(24, 4, **case.layer).eval()
    layer.load_state_dict({name: x for name, x in ours.items() if name not in case.beside})
    mask = case.mask() if callable(case.mask) else case.mask
    with torch.no_grad():
        torch.testing.assert_close(layer(X, mask=mask), case.call(), rtol=1e-5, atol=1e-5)

"""timm's `Attention` with our weights, and theirs with us."""

import importlib
import sys
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any

import pytest
import torch
from carrying import B, E, T, came_back, carry, error, some_layer
from torch import nn

import headwise as hw


def _attention() -> Any:
    """timm's own class, without the rest of timm, which wants torchvision built for this torch."""
    path = None
    for name in ("timm", "timm.layers"):
        found = PathFinder.find_spec(name.rpartition(".")[2], path)
        assert found is not None, f"{name} is not installed"
        package = sys.modules[name] = ModuleType(name)
        package.__path__ = path = list(found.submodule_search_locations or ())
    return importlib.import_module("timm.layers.attention").Attention


Attention = _attention()


def theirs_with(state: dict[str, Any], **options: Any) -> nn.Module:
    module = Attention(E, 3, **options).eval()
    module.load_state_dict({name: torch.tensor(array) for name, array in state.items()})
    return module


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("bias", "out_bias"), [(True, True), (False, True), (False, False)])
def test_self_attention(bias: bool, out_bias: bool, causal: bool) -> None:
    ours = some_layer(num_heads=3, bias=bias, out_bias=out_bias)
    theirs = theirs_with(carry(ours, "timm"), qkv_bias=bias, proj_bias=out_bias)
    x = torch.randn(B, T, E)
    mask = hw.Causal() if causal else None
    assert error(theirs(x, is_causal=causal), ours(x, mask=mask)) < 1e-5
    assert came_back(ours, theirs.state_dict(), "timm")


def test_norms_and_gates_of_theirs_are_refused() -> None:
    options = (
        {"qk_norm": True, "norm_layer": nn.LayerNorm},
        {"scale_norm": True, "norm_layer": nn.LayerNorm},
        {"gated": True},
    )
    for option in options:
        state = Attention(E, 3, qkv_bias=True, **option).state_dict()
        with pytest.raises(ValueError, match=r"norm|gate"):
            hw.convert(state, source="timm", target="headwise", num_heads=3)

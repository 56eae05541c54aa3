"""Checks of arguments; each error is one line that quotes the call."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def check_sizes(call: str, **sizes: int) -> None:
    """Raise ValueError for a size below 1."""
    shown = ", ".join(f"{name}={size}" for name, size in sizes.items())
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{call}({shown}): {name} must be at least 1")


def check_heads(call: str, name: str, width: int, heads_name: str, heads: int) -> None:
    """Raise ValueError if the width is not a multiple of the number of heads."""
    if width % heads:
        raise ValueError(
            f"{call}({name}={width}, {heads_name}={heads}): {name} must be a multiple of "
            f"{heads_name}, as every head takes {name} / {heads_name} features"
        )


def check_dropout(call: str, dropout: float, name: str = "dropout") -> None:
    """Raise ValueError for a probability outside [0, 1)."""
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"{call}({name}={dropout}): {name} must be in [0, 1)")


def check_input(layer: nn.Module, x: Tensor, width: int, context: int | None = None) -> None:
    """Raise ValueError unless x is `[B, T, width]`, and T is no longer than the context."""
    call = f"{type(layer).__name__}(…)({list(x.shape)})"
    if x.ndim != 3 or x.shape[2] != width:
        raise ValueError(f"{call}: the input must be [B, T, {width}]")
    if context is not None and x.shape[1] > context:
        raise ValueError(
            f"{call}: a sequence of {x.shape[1]} tokens does not fit the context of {context}; "
            "shorten it, or build the layer with a longer context"
        )


def mask_may_be_absent(layer: nn.Module) -> None:
    """Let state dicts lack the buffer `mask` or have one of another size: it is not a weight."""
    layer.register_load_state_dict_pre_hook(_keep_mask)


def _keep_mask(layer: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    own, name = layer.get_buffer("mask"), f"{prefix}mask"
    if name not in state or state[name].shape != own.shape:
        state[name] = own

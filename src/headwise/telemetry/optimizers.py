"""Optimizers as callers give them: whether they train a model, and when they have stepped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer


def check_optimizer(said: str, model: nn.Module, optimizer: Any) -> None:
    """Raise ValueError for what is no optimizer, and for one that trains another model alone.

    Accepted is what may be a copy of the model's parameters (a tensor that is no parameter, or one
    of a dtype that the model has none of, as float32 masters are), and any optimizer beside a
    model that is frozen: it may train what the model reads.
    """
    if not (hasattr(optimizer, "param_groups") or hasattr(optimizer, "state")):
        inside = isinstance(getattr(optimizer, "optimizer", None), Optimizer)
        raise ValueError(
            f"{said}: optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}; "
            f"give the one that trains the model{' (.optimizer of what was given)' * inside}."
        )
    stepped = [one for group in getattr(optimizer, "param_groups", ()) for one in group["params"]]
    own = {id(parameter) for parameter in model.parameters()}
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
    if stepped and all(
        isinstance(one, nn.Parameter) and one.dtype in dtypes and id(one) not in own
        for one in stepped
    ):
        raise ValueError(
            f"{said}: optimizer ({type(optimizer).__name__}) holds none of the model's parameters, "
            f"but those of another model, or of this one before they were replaced; give the "
            f"optimizer that trains this model."
        )


def hook_steps(said: str, optimizer: Any, stepped: Callable[[Any], object]) -> Any:
    """Have `stepped` called after each step of an optimizer; return the handle of that hook.

    Raises:
        ValueError: an optimizer that takes no hooks, such as DeepSpeed's.
    """
    try:
        return optimizer.register_step_post_hook(lambda one, *_: stepped(one))
    except AttributeError:  # accelerate's wrapper has hooks only in the optimizer that it holds
        inner = getattr(optimizer, "optimizer", None)
        if isinstance(optimizer, Optimizer) and inner is not None:
            return hook_steps(said, inner, stepped)
        raise ValueError(
            f"{said}: the steps of optimizer, a {type(optimizer).__name__}, cannot be hooked; give "
            f"no optimizer, and call monitor.step() after each step."
        ) from None

"""Checks of optimizers, and hooks on their steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer


def check_optimizer(call: str, model: nn.Module, optimizer: Any) -> None:
    """Raise ValueError for an invalid optimizer, or one that trains only another model.

    Accepted are possible copies of the model's parameters (plain tensors, or another dtype, as
    float32 master weights) and any optimizer of a frozen model: it may train the model's inputs.
    """
    if not (hasattr(optimizer, "param_groups") or hasattr(optimizer, "state")):
        inside = isinstance(getattr(optimizer, "optimizer", None), Optimizer)
        raise ValueError(
            f"{call}: optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}; "
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
            f"{call}: optimizer ({type(optimizer).__name__}) holds none of the model's parameters, "
            f"but those of another model, or of this one before they were replaced; give the "
            f"optimizer that trains this model."
        )


def hook_steps(call: str, optimizer: Any, stepped: Callable[[Any], object]) -> Any:
    """Call `stepped` after each step of an optimizer; return the handle of that hook.

    Raises:
        ValueError: an optimizer that takes no hooks, such as DeepSpeed's.
    """
    try:
        return optimizer.register_step_post_hook(lambda one, *_: stepped(one))
    except AttributeError:  # accelerate's wrapper holds the optimizer that has hooks
        inner = getattr(optimizer, "optimizer", None)
        if isinstance(optimizer, Optimizer) and inner is not None:
            return hook_steps(call, inner, stepped)
        raise ValueError(
            f"{call}: the steps of optimizer, a {type(optimizer).__name__}, cannot be hooked; give "
            f"no optimizer, and call monitor.step() after each step."
        ) from None

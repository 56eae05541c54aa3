"""Wrappers around modules (DDP, `torch.compile`, FSDP), and checks and hooks of optimizers."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ..capture.adapters.graphs import uncompiled_module

_HOLDING = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""The attribute names that only wrappers use for the module they wrap."""

_PREFIX = re.compile(rf"(^|\.)({'|'.join(('module', *_HOLDING))})\.")


def plain_name(model: nn.Module, name: str) -> str:
    """Return the qualified name of a module without the parts that wrappers add.

    >>> plain_name(nn.Sequential(nn.DataParallel(nn.Linear(2, 3))), "0.module")
    '0'
    """
    module, parts = uncompiled_module(model), []
    for part in name.split(".") if name else []:
        if part != _wrapped(module):
            parts.append(part)
        module = uncompiled_module(module.get_submodule(part))
    return ".".join(parts)


def innermost(module: nn.Module) -> nn.Module:
    """Return the module inside all wrappers; the wrappers' own training mode may be stale."""
    while part := _wrapped(module):
        module = module.get_submodule(part)
    return module


def _wrapped(module: nn.Module) -> str:
    """Return the attribute name of the module that a wrapper holds; "" for other modules."""
    for name in _HOLDING:
        if name in module._modules:
            return name
    kinds = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    wraps = isinstance(module, kinds) or type(module).__name__ == "DeepSpeedEngine"
    return "module" if wraps else ""


def bare_name(name: str) -> str:
    """Return a name without the parts that wrappers add.

    >>> bare_name("module.layers.0._checkpoint_wrapped_module.attn"), bare_name("module")
    ('layers.0.attn', 'module')
    """
    while (shorter := _PREFIX.sub(r"\1", name)) != name:
        name = shorter
    return name


# ── optimizers ──────────────────────────────────────────────────────────────────────────────────


def check_optimizer(call: str, model: nn.Module, optimizer: Any) -> None:
    """Raise ValueError for an invalid optimizer, or one that trains only a different model.

    Possible copies of the model's parameters (plain tensors, or another dtype, such as float32
    master weights) are accepted, as is any optimizer for a frozen model: it may train the inputs.
    """
    if not (hasattr(optimizer, "param_groups") or hasattr(optimizer, "state")):
        inside = isinstance(getattr(optimizer, "optimizer", None), Optimizer)
        raise ValueError(
            f"{call}: optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}; "
            f"pass the one that trains the model{' (its .optimizer attribute)' * inside}."
        )
    stepped = [one for group in getattr(optimizer, "param_groups", ()) for one in group["params"]]
    own = {id(parameter) for parameter in model.parameters()}
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.requires_grad}
    if stepped and all(
        isinstance(one, nn.Parameter) and one.dtype in dtypes and id(one) not in own
        for one in stepped
    ):
        raise ValueError(
            f"{call}: optimizer ({type(optimizer).__name__}) holds none of the model's parameters; "
            f"its parameters belong to another model, or were replaced in this one; pass the "
            f"optimizer that trains this model."
        )


def hook_steps(call: str, optimizer: Any, stepped: Callable[[Any], object]) -> Any:
    """Call `stepped` after each step of an optimizer; return the handle of that hook.

    Raises:
        ValueError: the optimizer does not support hooks, such as DeepSpeed's.
    """
    try:
        return optimizer.register_step_post_hook(lambda one, *_: stepped(one))
    except AttributeError:  # accelerate's wrapper holds the optimizer that has hooks
        inner = getattr(optimizer, "optimizer", None)
        if isinstance(optimizer, Optimizer) and inner is not None:
            return hook_steps(call, inner, stepped)
        raise ValueError(
            f"{call}: optimizer is a {type(optimizer).__name__}, whose steps cannot be hooked; "
            f"create the monitor without an optimizer and call monitor.step() after each step."
        ) from None

"""Wrappers around modules (DDP, `torch.compile`, checkpoints, FSDP), and names without them."""

from __future__ import annotations

import re

from torch import nn

from ..capture.adapters.graphs import uncompiled_module

_HOLDING = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
"""The attribute names by which only wrappers hold their module."""

_PREFIX = re.compile(rf"(^|\.)({'|'.join(('module', *_HOLDING))})\.")


def plain_name(model: nn.Module, name: str) -> str:
    """Return the qualified name of a module without the parts of wrappers.

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
    """Return the module inside all wrappers, whose training mode may be stale."""
    while part := _wrapped(module):
        module = module.get_submodule(part)
    return module


def _wrapped(module: nn.Module) -> str:
    """Return the attribute name by which a wrapper holds its module; "" for other modules."""
    for name in _HOLDING:
        if name in module._modules:
            return name
    kinds = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    wraps = isinstance(module, kinds) or type(module).__name__ == "DeepSpeedEngine"
    return "module" if wraps else ""


def bare_name(name: str) -> str:
    """Return a name without the parts of wrappers.

    >>> bare_name("module.layers.0._checkpoint_wrapped_module.attn"), bare_name("module")
    ('layers.0.attn', 'module')
    """
    while (shorter := _PREFIX.sub(r"\1", name)) != name:
        name = shorter
    return name

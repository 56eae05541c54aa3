"""What sort of thing is to be checked: an object, a function of x, or one of q, k and v."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from .call_adapter import tensors_in
from .checked_target import BATCH, TOKENS
from .names import building_role, calling_role
from .signatures import signature


def is_object(thing: Any) -> bool:
    """Whether it is an object with a call of its own, which is no nn.Module."""
    plain = (FunctionType, MethodType, BuiltinFunctionType, functools.partial, type)
    known = callable(thing) and not isinstance(thing, plain)
    return known and any("__call__" in vars(kind) for kind in inspect.getmro(type(thing))[:-1])


def is_factory(thing: Any) -> bool:
    """Whether all that it must be given has a name of a size: it makes what is to be checked.

    >>> is_factory(lambda d_model, num_heads: nn.Identity()), is_factory(lambda q, k, v: q)
    (True, False)
    """
    needed = [p for p in signature(thing) if p.default is p.empty and p.kind not in (2, 4)]
    sizes = all(building_role(p.name, needed=True) is not None for p in needed)
    return inspect.isclass(thing) or (sizes and not is_function_of_qkv(thing, {}))


def is_function_of_x(thing: Any, width: int, arguments: dict[str, Any]) -> bool:
    """Whether it gives tensors for a tensor: its one argument has no name of a size."""
    required = [p for p in signature(thing) if p.default is p.empty and p.name not in arguments]
    names = [p.name for p in required if p.kind <= p.POSITIONAL_OR_KEYWORD]
    if inspect.isclass(thing) or len(names) != 1 or building_role(names[0]) is not None:
        return False
    try:
        return any(True for _ in tensors_in(thing(torch.zeros(BATCH, TOKENS, width))))
    except Exception:  # a factory chokes on a tensor
        return False


def holds_qkv(thing: Any, arguments: Mapping[str, Any]) -> bool:
    """Whether a class is built with queries, keys and values, and its forward wants nothing more.

    >>> class Attention(nn.Module):
    ...     def __init__(self, q, k, v): super().__init__()
    ...     def forward(self): return 0
    >>> holds_qkv(Attention, {})
    True
    """
    if not inspect.isclass(thing) or not issubclass(thing, nn.Module):
        return False
    roles = [calling_role(p.name) for p in signature(thing)[:3] if p.name not in arguments]
    return (
        roles == ["query", "key", "value"] and len(inspect.signature(thing.forward).parameters) < 2
    )


def _has_weights(module: nn.Module) -> bool:
    """Whether a module has parameters, or matrices that should be some."""
    plain = (value for part in module.modules() for value in vars(part).values())
    matrices = (value for value in plain if isinstance(value, Tensor) and value.ndim == 2)
    return any(True for _ in (*module.parameters(), *filter(torch.is_floating_point, matrices)))


def is_function_of_qkv(thing: Any, arguments: dict[str, Any]) -> bool:
    """Whether the first things it takes are tensors, not sizes, and it has no weights of its
    own."""
    module = isinstance(thing, nn.Module)
    if inspect.isclass(thing) or (module and _has_weights(thing)):
        return False
    call = thing.forward if module else thing
    parameters = [p for p in signature(call) if p.name not in arguments]
    if not parameters:  # builtins tell nothing; Python's own factories without arguments do
        return not module and not inspect.isfunction(thing)
    roles = [calling_role(p.name) for p in parameters[:3]]
    if roles[:2] == ["query", "key"] or set(roles) == {"query", "key", "value"}:
        return True
    required = [p for p in parameters if p.default is p.empty and p.kind <= p.POSITIONAL_OR_KEYWORD]
    unknown = [p for p in required if building_role(p.name) is None]
    return len(required) == 3 and len(unknown) >= 2

"""The modes of PyTorch that a call may run in: traces, transforms, forward derivatives.

Most of attention is plain operators, which work in all modes and on tensors without values.
Code that depends on the values of a tensor does not, and must call these functions first.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.autograd.forward_ad
from torch import Tensor
from torch._C import _functorch  # pyright: ignore[reportAttributeAccessIssue]
from torch._subclasses.fake_tensor import FakeTensor


def traced() -> bool:
    """Return True if the call is being recorded for use with other values, or runs without values.

    This is the case in `torch.compile`, `torch.export`, `torch.jit.trace`, `make_fx` and
    `FakeTensorMode`. Decisions made now become part of the trace.
    """
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return True
    if torch._C._len_torch_dispatch_stack() == 0:
        return False
    keys = torch._C._TorchDispatchModeKey
    return any(torch._C._get_dispatch_mode(key) is not None for key in (keys.PROXY, keys.FAKE))


def no_graph() -> AbstractContextManager[object]:
    """Return a context in which computations on detached tensors build no graph.

    It is a null context under export, as PyTorch cannot save such a region if it returns nothing.
    """
    if not torch.is_grad_enabled() or torch.compiler.is_exporting():
        return NOTHING
    return torch.no_grad()


NOTHING = nullcontext()


def transformed() -> bool:
    """Return True under a transform of `torch.func`, whose tensors have no memory of their own."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def batched(*tensors: Tensor | None) -> bool:
    """Return True if `torch.func.vmap` maps over one of these tensors, at any depth."""
    if not transformed():
        return False
    for x in tensors:
        while x is not None and _functorch.is_functorch_wrapped_tensor(x):
            if _functorch.is_batchedtensor(x):
                return True
            x = _functorch.get_unwrapped(x)
    return False


def forward_derivatives() -> bool:
    """Return True in forward-mode differentiation: `torch.func.jvp`, `dual_level`."""
    return torch.autograd.forward_ad._current_level >= 0


def read_at_once(x: Tensor) -> bool:
    """Return True if a tensor's values can be read without waiting for a device."""
    return x.device.type == "cpu" and readable(x)


def readable(x: Tensor) -> bool:
    """Return True if a tensor's values can be read: it has values, and the call is not traced."""
    if traced() or transformed() or x.is_meta or isinstance(x, FakeTensor):
        return False
    return not torch._is_functional_tensor(x)  # pyright: ignore[reportPrivateImportUsage]

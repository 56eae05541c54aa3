"""Layers that take one vector of each sample, `[batch, features]`, and no tokens: the keys that
they attend to are those of other inputs, or one alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .checked_target import Target
from .fills import Place
from .layouts import AXES, written_axes

FEATURES = re.compile(r"dim|feat|hidden|emb|channel|size|width|^[cdeh]$")
"""What people call the second axis of vectors."""


SEQUENCES = re.compile(r"states|outputs|seq|memory|enc|keys|values|bank|hiddens|context")
"""Names of what has an axis of tokens."""


def takes_vectors(target: Any, name: str) -> bool:
    """Whether its author writes of an input `x: [batch, features]`, and of no other axes.

    >>> class Layer(torch.nn.Module):
    ...     def forward(self, x):
    ...         # x: [batch_size, feature_dim]
    ...         return x
    >>> takes_vectors(Layer(), "x")
    True
    """
    said = [*written_axes(target, name)]
    return bool(said) and all(map(_are_of_vectors, said))


def _are_of_vectors(axes: Sequence[str]) -> bool:
    first, *others = axes
    features = len(others) == 1 and FEATURES.search(others[0]) is not None
    return features and re.fullmatch(AXES["B"], first) is not None


def softmax_axis(shape: Sequence[int], args: Any, kwargs: Mapping[str, Any]) -> int:
    """The axis of a softmax, by its call; PyTorch's own choice where it says none."""
    axis = kwargs.get("dim", args[1] if len(args) > 1 else None)
    return (0 if len(shape) in (1, 3) else 1) if axis is None else axis


class _Singles(TorchFunctionMode):
    """Notes whether a softmax runs over an axis of one number."""

    seen = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if getattr(func, "__name__", "") == "softmax" and result.ndim > 1:
            self.seen |= result.shape[softmax_axis(result.shape, args, kwargs)] == 1
        return result


def gives_vectors(subject: Target) -> bool:
    """Whether all that its call is given beside x are vectors, too: no axis of keys was made up."""
    caller, x = subject.caller, subject.input()[0]
    if any(SEQUENCES.search(name.lower()) for name in caller.made_up):
        return False
    others = [caller.fill(name)(Place(x, x)) for name in caller.made_up]
    return all(one.ndim == x.ndim for one in others if isinstance(one, Tensor))


def weighs_one(subject: Target) -> bool:
    """Whether its call, in which all inputs are vectors, takes a softmax of single numbers, which
    become 1."""
    if not gives_vectors(subject):
        return False
    with torch.no_grad(), _Singles() as singles:
        subject(subject.input())
    return singles.seen

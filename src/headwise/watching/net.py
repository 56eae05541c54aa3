"""What is spread out to notice a model's attention, and what the roads share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn, overrides
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from .calls import AttentionCall, Listener
from .foreign import MaskMemo
from .names import Names

Road = Callable[["Net", Any, tuple[Any, ...], dict[str, Any]], Any]
"""Makes the call that was noticed and tells of it: (net, function, args, kwargs) -> its result."""


class _Quiet(threading.local):
    """How many are telling of a call in this thread."""

    depth = 0


_QUIET = _Quiet()


class Net:
    """Who is running, how a call is told, and what is remembered between the steps of one.

    `roads` are the functions that are known to attend, or to be a step of it; those of `always`
    are noticed also while no module runs.
    """

    def __init__(
        self,
        model: nn.Module,
        listener: Listener,
        roads: Mapping[Any, Road],
        always: Mapping[Any, Road],
    ) -> None:
        self.names, self.listener = Names(model, self._begin, self._watching), listener
        self.roads, self.always = roads, always
        self.masks = MaskMemo()
        self.softmaxes = WeakIdKeyDictionary()
        self.contexts: set[StorageWeakRef] = set()
        self.functions = Functions(self)
        self.told = 0

    def _begin(self) -> None:
        """The model is called anew."""
        self.masks.clear()
        self.contexts.clear()

    def _watching(self) -> bool:
        """Whether this thread works for the one that watches: a backward pass takes it along."""
        modes = torch.overrides._get_current_function_mode_stack()
        return torch._C._current_graph_task_id() != -1 and self.functions in modes

    @property
    def open(self) -> bool:
        """Whether calls are to be noticed now: the model runs, and nobody tells of a call."""
        return not _QUIET.depth and self.names.inside

    @contextmanager
    def silence(self) -> Iterator[None]:
        """What is called while this lasts is part of a call that is told, and noticed by nobody."""
        _QUIET.depth += 1
        try:
            yield
        finally:
            _QUIET.depth -= 1

    def tell(self, call: AttentionCall) -> Tensor | None:
        """Let the listener hear of a call; gives what is to take the place of its output."""
        self.told += 1
        self.refuse_transforms()
        call.again = torch._C._current_graph_task_id() != -1
        with self.silence():
            return self.listener(call)

    def refuse_transforms(self) -> None:
        """Raise ValueError under a transform of `torch.func`, whose tensors cannot be looked at."""
        if torch._C._are_functorch_transforms_active():
            raise ValueError(
                f"watch({type(self.names.model).__name__}): {self.names.current!r} runs inside a "
                f"transform of torch.func (vmap, grad, jacrev, jvp, …), and cannot be watched "
                f"there; watch a call without it."
            )


class Functions(TorchFunctionMode):
    """Sees PyTorch's functions, and lets those that are known go their roads."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.net = net

    @contextmanager
    def on(self) -> Iterator[None]:
        """See while this lasts, whatever modes come after this one and outlast it."""
        overrides._push_mode(self)
        try:
            yield
        finally:
            above: list[Any] = []
            if self in overrides._get_current_function_mode_stack():
                while (mode := overrides._pop_mode()) is not self:
                    above.append(mode)
            while above:
                overrides._push_mode(above.pop())

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        net, kwargs = self.net, kwargs or {}
        road = (net.roads if net.open else net.always).get(func)
        return func(*args, **kwargs) if road is None else road(net, func, args, kwargs)

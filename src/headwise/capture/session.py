"""`CaptureSession`: the state of a capture, and the patches that route a model's calls to it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import is_initialized
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from .._text import and_more
from ..core.modes import transformed
from .call import AttentionCall, Listener
from .mask_import import MaskMemo
from .modules import Forward, Modules, Names, why_left_out
from .parts import PendingCall, ResolvedCall, at_end, at_last, read
from .private_torch import in_backward, modes, pop_mode, push_mode
from .ranks import place_of_heads

Interceptor = Callable[["CaptureSession", Any, tuple[Any, ...], dict[str, Any]], Any]
"""Runs an intercepted call and reports it: (net, function, args, kwargs) -> its result."""


class Depth(threading.local):
    """The number of its `with` blocks that this thread is in."""

    now = 0

    def __enter__(self) -> None:
        self.now += 1

    def __exit__(self, *_: object) -> None:
        self.now -= 1


SILENCE = Depth()
"""Inside this, nothing is captured: the code is part of a call that is already captured."""


class CaptureSession:
    """The running modules, their captured calls, and the state between the steps of one call.

    `interceptors` handle functions that attend or are a step of attention; those in `always` are
    handled even while no module runs. `begin` and `elsewhere` are those of `catch()`. `noticed`
    lists the module of every call of a forward that was captured or left out, in order; `complete`
    is True for modules that reported all of their captured calls themselves. If a model is `known`
    to attend only in such modules, no others are followed. `attended` has the outermost module of
    each forward, by its id, and the modules that attended in it; `in_graphs` the calls from graphs
    in this forward, by their sites and modules. `numbers` has the layers' numbers, by the names of
    modules; `heads` the declared heads of a module. Calls of modules that are not `selected` (by
    `modules`) are not passed on. Errors name the public `function`.
    """

    def __init__(
        self,
        function: str,
        model: nn.Module,
        listener: Listener,
        interceptors: Mapping[Any, Interceptor],
        always: Collection[Any],
        begin: Callable[[], None] = lambda: None,
        elsewhere: Callable[[nn.Module], None] | None = None,
        known: dict[int, str] | None = None,
    ) -> None:
        self.function, self.in_full = function, known is None
        moves, elsewhere = elsewhere is None, elsewhere or self._refuse_thread
        followed = (self._begin, self._end, self._watching, elsewhere, known, moves)
        self.names = Names(model, *followed)
        self._away = ExitStack()
        self.begin = begin
        self.listener = listener
        self.interceptors, self.always = interceptors, always
        self.masks = MaskMemo()
        self.softmaxes = WeakIdKeyDictionary()
        self.contexts: set[StorageWeakRef] = set()
        self.exps, self.by_hand = WeakIdKeyDictionary(), WeakIdKeyDictionary()
        self.unfollowed: dict[object, tuple[str, str]] = {}
        self.functions = Functions(self)
        self.noticed: list[str] = []
        self.numbers: dict[str, int] = {}
        self.complete: dict[str, bool] = {}
        self.capture: Callable[[], tuple[Any, Callable[[], None]]] | None = None
        self.run_as_written: Callable[[], None] | None = None
        self.in_graphs: set[tuple[int, int]] = set()
        self.attended: set[tuple[int, frozenset[str]]] = set()
        self.heads: Callable[[str], int | None] = lambda name: None
        self.modules: Modules = None
        self.selected: Callable[[str, int | None], bool] | None = None
        self.not_selected: dict[str, None] = {}

    @property
    def quote(self) -> str:
        """The call that errors quote: `watch(GPT)`."""
        return f"{self.function}({type(self.names.model).__name__})"

    def _refuse_thread(self, model: nn.Module) -> None:
        """Raise RuntimeError: the model starts in a thread that is not watched."""
        why = "compiled code is watched in its own thread"
        if self.names.moves:
            why = "another thread is calling it, and calls are seen one at a time"
        raise RuntimeError(
            f"{type(model).__name__}(…): this model is watched in another thread than the one that "
            f"calls it: {why}; enter headwise.{self.function}() in the thread that calls."
        )

    def _begin(self) -> None:
        """Reset the state at the start of a call of the model."""
        if self.in_full and self.names.away and self.functions not in modes():
            self._away.enter_context(self.functions.on())
        self.masks.clear()
        self.contexts.clear()
        self.unfollowed.clear()
        self.noticed.clear()
        self.in_graphs.clear()
        self._split = "torch.distributed.tensor" in sys.modules and is_initialized()
        self.begin()

    def _end(self, forward: Forward, output: Any) -> None:
        """Resolve the pending calls of a module by its output."""
        outer = self.names.stack[-1] if self.names.stack else None
        if outer is not None and forward.leaf:
            outer.lost |= forward.lost
        emitted = forward.emitted
        if not emitted:
            self._name_unseen(forward, outer)
        if forward.waiting:
            lost = list(forward.lost.values())
            settled, unknown = at_end(forward.waiting, output, lost, forward.reason)
            if outer is None:
                settled += [at_last(waiting) for waiting in unknown]
            else:
                outer.waiting += unknown
            self._resolve(forward, settled)
        if emitted:  # the reasons for its calls come first
            self._name_unseen(forward, outer)
        if outer is None:
            self.attended.add((id(forward.module), frozenset(self.noticed)))
            self._away.close()

    def _name_unseen(self, forward: Forward, outer: Forward | None) -> None:
        """Leave out modules that seem to attend in a way that was not captured.

        Evidence is a softmax over as many keys as queries that no product uses; and, if nothing was
        captured in the module, a softmax written by hand. In modules named attention, the sizes do
        not matter. The results of a module without submodules may be used by the one around it.
        """
        if not (forward.lost or forward.other):
            return
        alone = not forward.emitted and self.names.attends(forward)
        passed = set(self.unfollowed)
        if outer is not None and forward.leaf and not alone:
            outer.other |= {reason: False for reason, likely in forward.other.items() if not likely}
            passed |= {found.mark for found in self.softmaxes.values()}  # still in use
        lost = {mark: x for mark, x in forward.lost.items() if mark not in passed}
        lost = {mark: x for mark, x in lost.items() if alone or x[-1] == x[-2] > 1}
        other = {} if forward.emitted else forward.other
        reasons = [reason for reason, likely in other.items() if alone or likely]
        if lost:
            shapes = and_more([str(list(shape)) for shape in lost.values()])
            reasons.append(f"no product with values was seen of the softmax of {shapes}")
        if reasons:
            reason = and_more(reasons)
            self.leave_out(forward, reason)
            self.unfollowed |= dict.fromkeys(lost, (self.names.name(forward), reason))

    def followed(self, mark: object) -> None:
        """Note that the softmax with this mark was multiplied by values."""
        for forward in self.names.stack:
            forward.lost.pop(mark, None)
        name, reason = self.unfollowed.pop(mark, ("", ""))
        if reason and self.names.left_out.get(name) == reason:
            self.noticed.remove(name)
            del self.names.left_out[name]

    def projected(self, x: Tensor, out: Tensor) -> None:
        """Resolve pending calls by the input of a projection."""
        if x.is_nested or transformed():
            return
        inner, *outer = self.names.stack[:-3:-1]
        for forward in (inner, *outer) if inner.leaf else (inner,):
            forward.read.add((x.shape[:-1].numel(), out.shape[-1]))
        for forward in self.names.stack:
            if forward.waiting:
                with SILENCE, torch.no_grad():
                    settled = read(forward.waiting, x, self.names.current)
                if forward.lost:  # it may still be a part, which the module's output shows
                    settled = [one for one in settled if one.reason]
                self._resolve(forward, settled)

    def _resolve(self, forward: Forward, settled: Sequence[ResolvedCall]) -> None:
        for one in settled:
            forward.waiting = [waiting for waiting in forward.waiting if waiting is not one.call]
            if one.reason:
                forward.reason = one.reason
                self.names.left_out.setdefault(one.call.name, one.reason)
            else:
                one.call.resolve(one.queries)

    def leave_out(self, forward: Forward, reason: str) -> None:
        """Note that attention of a module is not captured, and why."""
        name, forward.emitted, forward.reason = self.names.name(forward), True, reason
        self.noticed.append(name)
        self.names.left_out.setdefault(name, reason)

    def _watching(self) -> bool:
        """Return True if this thread runs a backward pass of a watched call."""
        return in_backward() and self.functions in modes()

    @property
    def open(self) -> bool:
        """True if calls are captured now: the model runs, and no call is being captured."""
        return not SILENCE.now and self.names.inside

    def captures(self, module: nn.Module) -> bool:
        """Return True if calls that this module reports itself are captured now."""
        if self.in_full:
            return self.open
        return not SILENCE.now and self.names.captures(module)

    def emit(
        self,
        call: AttentionCall,
        waiting: PendingCall | None = None,
        among: Forward | None = None,
        module: nn.Module | None = None,
    ) -> Tensor | None:
        """Pass a call to the listener; return the replacement of its output, if any.

        A call that may be incomplete is `waiting` until it is resolved, in the forward `among` (by
        default the innermost). `module` is the module that reported the call without a hook.
        """
        if not self.names.stack:  # without hooks: a part of the model is called alone
            if module is None or in_backward():  # or recomputed for an earlier call
                return None
            with self.names.alone(module):
                return self.emit(call, waiting, among, module)
        among = among or self.names.stack[-1]
        self.noticed.append(call.name)
        self.complete[call.name] = module is not None and self.complete.get(call.name, True)
        among.emitted = True
        if torch._C._are_functorch_transforms_active():
            self.refuse_transforms(call.name)
        call.again, call.waiting = in_backward(), waiting
        call.layer = self.numbers.get(call.name, len(self.numbers))
        if waiting is None:
            self.numbers[call.name] = call.layer
        else:
            waiting.on_complete(lambda _: self._number(call.name))
        if self._split and (place := place_of_heads(module or among.module, call.heads)):
            call.first_head, call.layer_heads = place
        if self.selected is not None and not self.selected(call.name, call.layer):
            self.not_selected[call.name] = new = None
        elif self.in_full:
            with SILENCE, self.functions.off():
                new = self.listener(call)
        else:
            with SILENCE:
                new = self.listener(call)
        if waiting is not None and waiting.total_queries is None:
            waiting.out = waiting.out if new is None else new
            among.waiting.append(waiting)
        return new

    def why_nothing(self) -> str:
        """Return the reason why no attention of the selected modules was captured, as a clause."""
        if self.not_selected and not self.names.left_out:
            return why_left_out(self.modules, self.not_selected)
        return self.names.why_nothing()

    def check_seen(self, seen: object, quote: str) -> None:
        """Raise ValueError if nothing was seen."""
        if not seen:
            raise ValueError(f"{quote}: no attention was seen, for {self.why_nothing()}.")

    def _number(self, name: str) -> None:
        """Assign the next number to a module that attends, if it has none."""
        self.numbers.setdefault(name, len(self.numbers))

    def refuse_transforms(self, name: str | None = None) -> None:
        """Raise ValueError under a transform of `torch.func`, whose tensors have no values."""
        if transformed():
            name = self.names.current if name is None else name
            raise ValueError(
                f"{self.quote}: {name!r} runs inside a transform of torch.func (vmap, "
                f"grad, jacrev, jvp, …), and cannot be watched there; watch a call without it."
            )


class Functions(TorchFunctionMode):
    """Function mode that passes PyTorch's functions to their interceptors."""

    def __init__(self, net: CaptureSession) -> None:
        super().__init__()
        self.net = net

    @contextmanager
    def on(self) -> Iterator[None]:
        """Enable the mode; modes that are entered after it may outlast it."""
        push_mode(self)
        try:
            yield
        finally:
            if self in modes():
                for mode in self._taken_off():
                    push_mode(mode)

    @contextmanager
    def off(self) -> Iterator[None]:
        """Disable the mode; other modes stay enabled."""
        if self not in modes():
            yield
            return
        above = self._taken_off()
        for mode in above:
            push_mode(mode)
        try:
            yield
        finally:
            above = [pop_mode() for _ in above]
            push_mode(self)
            for mode in reversed(above):
                push_mode(mode)

    def _taken_off(self) -> list[Any]:
        """Pop this mode and those above it; return the latter, innermost last."""
        above: list[Any] = []
        while (mode := pop_mode()) is not self:
            above.insert(0, mode)
        return above

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        net, kwargs = self.net, kwargs or {}
        route = net.interceptors.get(func)  # most functions have none
        if route is None or not (func in net.always or net.open):
            return func(*args, **kwargs)
        return route(net, func, args, kwargs)


class RefcountedPatch:
    """A patch of another library that is active while any session of any thread uses it.

    `replace` applies the patch and returns the function that undoes it.
    """

    def __init__(self, replace: Callable[[], Callable[[], None]]) -> None:
        self._replace = replace
        self._restore: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self.everyone: tuple[CaptureSession, ...] = ()  # all sessions of all threads

    @contextmanager
    def activate(self, net: CaptureSession) -> Iterator[None]:
        """Keep the patch active for a session."""
        with self._lock:
            if not self.everyone:
                self._restore = self._replace()
            self.everyone = (*self.everyone, net)
        try:
            yield
        finally:
            with self._lock:
                self.everyone = tuple(other for other in self.everyone if other is not net)
                if not self.everyone:
                    self._restore()

    @property
    def nets(self) -> tuple[CaptureSession, ...]:
        """The sessions that capture now in this thread, outermost first."""
        return tuple(net for net in self.everyone if net.open)

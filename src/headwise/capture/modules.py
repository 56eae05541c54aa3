"""Track the running modules of a model, and name the one that a call belongs to."""

from __future__ import annotations

import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as hooks

from .._text import and_more, brief
from ..core.numbers import as_int
from .head_address import Layer, as_written, is_layer, parse_layer
from .parts import PendingCall
from .private_torch import has_parts, outside_graphs

_CROSS = re.compile(r"cross|enc_?dec|encoder_attn|src_attn", re.IGNORECASE)
"""Names of modules for cross-attention."""

_FOLLOWED: ContextVar[tuple[object, ...]] = ContextVar("_FOLLOWED", default=())
"""The marks of the sessions that watch this task, which the tasks that it starts inherit."""

Modules = Layer | Sequence[Layer] | Callable[[str], bool] | None
"""A selection of modules: patterns of names, numbers of layers, or a function of a name."""


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode; on exit, restore the mode of every module."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


@dataclass(eq=False)
class Forward:
    """A running forward of a module.

    waiting: its calls that are still pending.
    read: the number of positions and the output width of every projection in it.
    lost: the shapes of its softmaxes that have not been multiplied by values yet, by mark.
    other: descriptions of other possible attention in it, each True if it is likely.
    emitted: True if attention in it was emitted or left out.
    reason: the reason why some of it was left out.
    """

    module: nn.Module
    waiting: list[PendingCall] = field(default_factory=list)
    read: set[tuple[int, int]] = field(default_factory=set)
    lost: dict[object, torch.Size] = field(default_factory=dict)
    other: dict[str, bool] = field(default_factory=dict)
    emitted: bool = False
    reason: str = ""

    @property
    def leaf(self) -> bool:
        """True if the module has no submodules: the enclosing module then acts for it."""
        return not has_parts(self.module)


@outside_graphs
def called_in_a_graph() -> None:
    """Break the graph that calls a module; the compiler's `fullgraph` error has this name."""


class Names:
    """The running modules of a model, innermost last.

    They are tracked with global hooks, so that nothing is attached to the model: hooks of a module
    would disable PyTorch's fused encoder layers and be copied with it. `begin` is called whenever
    the outermost module starts, `end` with every forward that has ended and its output. `watching`
    returns True in another thread that works for this one. Otherwise, a model that `moves` is
    followed there if no call is running in this thread; if one is, `elsewhere` is called when the
    model starts there.
    """

    def __init__(
        self,
        model: nn.Module,
        begin: Callable[[], None],
        end: Callable[[Forward, Any], None],
        watching: Callable[[], bool],
        elsewhere: Callable[[nn.Module], None],
        names: dict[int, str] | None,
        moves: bool = False,
    ) -> None:
        self.model = model
        self.stack: list[Forward] = []
        self.calls = 0
        self.left_out: dict[str, str] = {}
        self._begin, self._end, self._watching = begin, end, watching
        self._in_other_thread = elsewhere
        self.names = names or names_of(model)
        self.home: int | None = threading.get_ident()
        self._threads, self.moves = {threading.get_ident()}, moves
        self._busy, self._lock = False, threading.Lock()
        self._mark, self._task = object(), _task()
        self._elsewhere = False

    @property
    def inside(self) -> bool:
        """True if a module of the model is running in the watching thread."""
        return bool(self.stack) and self.here

    @property
    def here(self) -> bool:
        """True in a thread that watches."""
        return threading.get_ident() in self._threads

    @property
    def away(self) -> bool:
        """True in a thread other than the one that began to follow the model."""
        return threading.get_ident() != self.home

    @property
    def current(self) -> str:
        """The name of the innermost module that is running."""
        return self.name(self.stack[-1])

    @property
    def crosses(self) -> bool:
        """True if the name of that module indicates cross-attention."""
        return self.crosses_in(self.stack[-1].module)

    def crosses_in(self, module: nn.Module) -> bool:
        """Return True if a module's name, or else the running one's, indicates cross-attention."""
        name = self.names.get(id(module))
        return _CROSS.search(self.current if name is None else name) is not None

    def common(self, running: Sequence[Forward]) -> list[Forward]:
        """Return the forwards of `running` that still run; if none does, all that run now."""
        both = [now for now, then in zip(self.stack, running, strict=False) if now is then]
        return both or list(self.stack)

    def name(self, forward: Forward) -> str:
        """Return the qualified name of the module of a forward."""
        return self.names[id(forward.module)]

    def attends(self, forward: Forward) -> bool:
        """True if the class of the module is named attention."""
        return _called_attention("", forward.module)

    def name_of(self, module: nn.Module) -> str | None:
        """Return a module's qualified name; `None` if it is not in the model."""
        return self.names.get(id(module))

    @contextmanager
    def marked(self) -> Iterator[None]:
        """Mark this task, and those that it starts, as watching."""
        _FOLLOWED.set((*_FOLLOWED.get(), self._mark))
        try:
            yield
        finally:
            _FOLLOWED.set(tuple(mark for mark in _FOLLOWED.get() if mark is not self._mark))

    @contextmanager
    def following(self) -> Iterator[None]:
        """Follow the modules of the model."""
        before = hooks.register_module_forward_pre_hook(self.enter)
        after = hooks.register_module_forward_hook(self.leave, always_call=True)
        try:
            with self.marked():
                yield
        finally:
            before.remove()
            after.remove()
            self.stack.clear()
            self._busy = False

    def captures(self, module: nn.Module) -> bool:
        """Return True if a module is the model's, and this thread and task watch it."""
        if id(module) not in self.names:
            return False
        if threading.get_ident() not in self._threads:
            return False
        if self.stack:
            return True
        if self._of_another_task():
            self._elsewhere = True
            return False
        return True

    @contextmanager
    def alone(self, module: nn.Module) -> Iterator[None]:
        """Enter a module that runs alone, and leave it afterwards."""
        self.enter(module)
        try:
            yield
        finally:
            self.leave(module)

    def enter(self, module: nn.Module, _: Any = None) -> None:
        """Note that a module starts."""
        if id(module) not in self.names:
            return
        if torch.compiler.is_compiling():
            called_in_a_graph()
        if not self._here():
            if module is self.model:
                self._in_other_thread(module)
            return
        if self._of_another_task():
            self._elsewhere, self._busy = True, bool(self.stack)
            return
        if not self.stack:
            self.calls += 1
            self._begin()
        self.stack.append(Forward(module))

    def leave(self, module: nn.Module, _: Any = None, output: Any = None) -> None:
        """Note that a module has ended, and its output."""
        here = self.stack and threading.get_ident() in self._threads
        if here and self.stack[-1].module is module:
            self._end(self.stack.pop(), output)
            self._busy = bool(self.stack)

    def _here(self) -> bool:
        """Return True in a watched thread; a model that runs in no other thread may move here."""
        here = threading.get_ident()
        if self.stack and here in self._threads:
            return True
        with self._lock:
            if here not in self._threads and self._watching():
                self._threads.add(here)
            elif here not in self._threads and self.moves and not self._busy:
                self._threads = {here}
            mine = here in self._threads
            self._busy |= mine
        return mine

    def _of_another_task(self) -> bool:
        """Return True for an asyncio task that neither watches nor was started by one that does.

        Tasks of one thread alternate, so another task's calls can occur while this one waits.
        """
        if self._mark in _FOLLOWED.get():
            return False
        watching = self._task()
        return watching is not None and not watching.done() and _task()() is not watching

    def why_nothing(self) -> str:
        """Return the reason why no attention was captured, as a clause."""
        if not self.calls and self._elsewhere:
            return "the model was called in a different asyncio task from the one that watches it"
        if not self.calls:
            return "the model was not called"
        if self.left_out:
            return and_more(
                [f"{name or 'the model'}: {why}" for name, why in self.left_out.items()]
            )
        alike = [
            f"{as_written(name) or 'the model'} ({type(module).__name__})"
            for name, module in self.model.named_modules()
            if _called_attention(name, module)
        ]
        if not alike:
            return "none of its modules called a function that is known to attend"
        return (
            f"what {and_more(alike)} computed was no function that is known to attend, "
            f"nor a softmax over the last axis that was multiplied with values"
        )


def names_of(model: nn.Module) -> dict[int, str]:
    """Return the qualified name of each module of a model, by its id."""
    return {id(x): as_written(name) for name, x in model.named_modules()}


def _task() -> Callable[[], Any]:
    """Return a weak reference to the running asyncio task, or a function that returns None."""
    asyncio: Any = sys.modules.get("asyncio")
    try:
        return weakref.ref(asyncio.current_task())
    except (AttributeError, RuntimeError, TypeError):  # not loaded, no loop, no task
        return lambda: None


def _called_attention(name: str, module: nn.Module) -> bool:
    called = f"{name.rpartition('.')[2]} {type(module).__name__}"
    return re.search("att(entio)?n", called, re.IGNORECASE) is not None


def attending(model: nn.Module) -> list[str]:
    """Return the names of the innermost modules whose classes are named attention.

    >>> attending(nn.TransformerEncoderLayer(4, 1))
    ['self_attn']
    """

    def called(module: nn.Module) -> bool:
        kind = type(module).__name__
        return _called_attention("", module) and not kind.endswith(_AROUND)

    return [
        as_written(name)
        for name, module in model.named_modules()
        if called(module) and not any(called(one) for one in module.modules() if one is not module)
    ]


_AROUND = ("Output", "Norm", "Block", "Model", "Mask", "Bias")
"""Suffixes of the names of classes that contain attention but do not attend themselves."""


def chosen(modules: Modules) -> Callable[[str, int | None], bool]:
    """Return a function of a module's name and number: True if `modules` selects it.

    Raises:
        ValueError: something other than names, numbers or a function, such as a module itself.

    >>> [name for n, name in enumerate(("low.attn", "high.attn")) if chosen("high.*")(name, n)]
    ['high.attn']
    >>> [name for n, name in enumerate(("low.attn", "high.attn")) if chosen([0, "L2"])(name, n)]
    ['low.attn']
    """
    if modules is None:
        return lambda name, number: True
    if callable(modules) and not isinstance(modules, nn.Module | type):
        return lambda name, number: modules(name)
    listed = [modules] if isinstance(modules, str | int) else modules
    try:
        layers = [parse_layer(layer) for layer in listed]  # type: ignore[union-attr]
    except (TypeError, ValueError):
        raise ValueError(
            f"modules={type(modules).__name__}: give names such as 'encoder.*', numbers of layers "
            f"such as 2 or 'L2', a list of them, or a function that returns True for a name."
        ) from None
    return lambda name, number: any(is_layer(layer, name, number) for layer in layers)


Heads = int | Mapping[str, int] | None
"""A number of heads, their axis (negative), or a dict of either by patterns of modules' names."""


def declared_heads(heads: Heads) -> Callable[[str], int | None]:
    """Return a function of a module's name: the entry of `heads`, a number or an axis from the end.

    Raises:
        ValueError: something other than whole numbers, or 0, -1 or -2.

    >>> declared = declared_heads({"vision.*": 4})
    >>> declared("vision.attn"), declared("text.attn")
    (4, None)
    """
    given = heads if isinstance(heads, Mapping) else {"*": heads}
    for name, number in given.items() if heads is not None else ():
        if not isinstance(name, str) or as_int(number) is None or number in (0, -1, -2):
            raise ValueError(
                f"heads={heads!r:.80}: give a number of heads, such as 12; their axis counted from "
                f"the end, such as -3 of [batch, heads, length, width]; or a dict of either by "
                f"patterns of modules' names."
            )
    patterns = {as_written(name): number for name, number in given.items()}
    return lambda name: next((n for one, n in patterns.items() if fnmatchcase(name, one)), None)


def why_left_out(modules: Modules, attended: Iterable[str]) -> str:
    """Return the reason why nothing was captured if no attending module was selected."""
    names = [name or "''" for name in attended]
    selection = getattr(modules, "__name__", "…") if callable(modules) else repr(modules)
    return f"modules={selection} left out all that attended: {and_more(names, 5)}"


def check_model(function: str, model: object) -> str:
    """Return the quoted call of `function` for errors: `watch(GPT, …)`.

    Raises:
        ValueError: `model` is not an `nn.Module`.
    """
    if not isinstance(model, nn.Module):
        name = getattr(model, "__name__", type(model).__name__)
        raise ValueError(
            f"{function}({name}, …): {name} is not an nn.Module; pass the model as the first "
            f"argument."
        )
    return f"{function}({type(model).__name__}, …)"


def check_inputs(quote: str, inputs: Any) -> None:
    """Raise ValueError for a text, or a list of texts or numbers, where a model takes tensors."""
    listed = [inputs] if isinstance(inputs, str | bytes) else inputs
    if not isinstance(listed, tuple | list) or not listed:
        return
    if all(isinstance(one, str | bytes) for one in listed):
        raise ValueError(
            f"{quote}: inputs is {brief(inputs)}, a text; give the inputs that the model takes, "
            f"such as tokenizer(text, return_tensors='pt')."
        )
    if all(as_int(one) is not None for one in listed):
        raise ValueError(
            f"{quote}: inputs is {brief(inputs)}, but the items of a list are separate arguments; "
            f"give token ids as a tensor [B, T], such as torch.tensor([ids])."
        )


def call_model(model: nn.Module, inputs: Any) -> Any:
    """Call a model on a dict of keywords, a tuple or list of arguments, or its only argument."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)

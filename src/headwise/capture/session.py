"""Hear of every attention call of a model, or serve those that headwise's kernel is faster at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks

from .adapters.compiled import compiled_functions, refuse_compiled, run_as_written
from .adapters.flex import flex_calls
from .adapters.headwise import own_calls, own_layers
from .adapters.mha import functions as composite_functions
from .adapters.sdpa import accelerated
from .adapters.sdpa import functions as fused_attention
from .adapters.softmax import functions as steps_by_hand
from .adapters.transformers import attention_functions
from .adapters.varlen import functions as varlen_attention
from .backward import functions as backward_passes
from .call import Listener
from .heads import functions as projections
from .known import Known, forget, known, learn, starting
from .modules import Names, names_of
from .net import Functions, Net
from .patches import Replaced
from .private_torch import global_hooks, modes, replace
from .serve import Accelerator, Account


@contextmanager
def catch(
    model: nn.Module,
    listener: Listener,
    begin: Callable[[], None] = lambda: None,
    elsewhere: Callable[[nn.Module], None] | None = None,
    function: str = "watch",
    in_full: bool = True,
) -> Iterator[Net]:
    """Tell `listener` of every attention call that `model` makes in this thread.

    `begin` is called whenever the outermost module starts, `elsewhere` when the model starts in
    another thread; by default that is an error. Errors name the public `function` that listens.
    Everything is restored on exit, also after an exception. With `in_full`, modules are followed
    while they run; else only if it is not known that those which attend tell of it themselves.
    Parts that `torch.compile` has compiled run as they are written meanwhile.

    Raises:
        ValueError: a model, or a part of one, that is compiled by `torch.jit`.
    """
    about = None if in_full else known(model)
    names = None if about is None else about.names
    net = Net(function, model, listener, {}, (), begin, elsewhere, names)
    with ExitStack() as stack:
        if about is None:
            _follow(net, stack)
        else:
            _listen(net, about, stack)
        yield net
    if net.in_full and not in_full:
        learn(net)
    elif about is not None and not net.attended <= about.attended:
        forget(model)


def _listen(net: Net, about: Known, stack: ExitStack) -> None:
    """Hear of the calls that modules of a known model tell of themselves."""
    inner = stack.enter_context(ExitStack())

    def changed() -> None:
        """Follow the model in full from now on."""
        inner.close()
        forget(net.names.model)
        net.in_full, net.names.names = True, names_of(net.names.model)
        _follow(net, stack)

    inner.enter_context(net.names.marked())
    inner.enter_context(attention_functions(net))
    inner.enter_context(own_layers(net, about.modules))
    inner.enter_context(starting(net, about, changed))


def _follow(net: Net, stack: ExitStack) -> None:
    """Follow the modules of a model while they run, and see what they compute."""
    model, always = net.names.model, backward_passes()
    roads = always | projections() | fused_attention() | composite_functions() | steps_by_hand()
    net.roads, net.always = roads | varlen_attention(), always
    stack.enter_context(run_as_written(model))
    refuse_compiled(net.function, model)
    stack.enter_context(net.names.following())
    stack.enter_context(own_layers(net, list(model.modules())))
    stack.enter_context(own_calls(net))
    stack.enter_context(attention_functions(net))
    stack.enter_context(flex_calls(net))
    stack.enter_context(compiled_functions(net))
    stack.enter_context(_FUSED_LAYERS.heard_by(net))
    stack.enter_context(_GLOBAL_HOOKS.heard_by(net))
    stack.enter_context(net.functions.on())


@contextmanager
def served(model: nn.Module, account: Account) -> Iterator[None]:
    """Compute the attention calls that `model` makes in this thread with headwise's kernel.

    What it serves, and what it does not, is counted in `account`.

    Raises:
        ValueError: a model, or a part of one, that is compiled.
    """
    refuse_compiled("accelerate", model)

    def elsewhere(_: nn.Module) -> None:
        account.note("", "forward", "the model was called in another thread")

    always = backward_passes()
    roads = always | fused_attention(accelerated) | composite_functions()
    net = Accelerator(model, account, roads, always, elsewhere)
    with (
        net.names.following(),
        _FUSED_LAYERS.heard_by(net),
        _GLOBAL_HOOKS.heard_by(net),
        compiled_functions(net),
        net.out(),
    ):
        yield


def _let_layers_fuse() -> Callable[[], None]:
    """Let PyTorch take its fused layers as if no function mode of headwise were there."""
    return replace(torch.overrides, "has_torch_function", _has_torch_function)


_FUSED_LAYERS = Replaced(_let_layers_fuse)


def _has_torch_function(tensors: Any) -> bool:
    """`torch.overrides.has_torch_function`, which knows nothing of headwise's own modes."""
    if any(not isinstance(mode, Functions) for mode in modes()):
        return True
    disabled = torch._C._disabled_torch_function_impl
    kinds = {type(tensor) for tensor in tensors} - {Tensor, nn.Parameter}
    return any(getattr(kind, "__torch_function__", disabled) is not disabled for kind in kinds)


def _warn_of_other_hooks() -> Callable[[], None]:
    """Let compiled modules warn of global hooks, which they call twice, only of other libraries.

    Those of headwise may be called twice: names leave out what `torch.compile` puts around.
    """
    return replace(hooks, "_has_any_global_hook", _has_other_global_hook)


_GLOBAL_HOOKS = Replaced(_warn_of_other_hooks)


def _has_other_global_hook() -> bool:
    """Return True if there is a global hook of modules that is not one of `Names`."""
    return any(not isinstance(getattr(hook, "__self__", None), Names) for hook in global_hooks())

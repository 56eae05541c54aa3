"""The private parts of PyTorch that capturing depends on, all in one file.

PyTorch guarantees none of them. `tests/capture/test_private_torch.py` has a test for each, which
fails if PyTorch changes it.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn, overrides
from torch._C._dynamo.eval_frame import set_eval_frame
from torch.nn.modules import module as hooks
from torch.utils._python_dispatch import TorchDispatchMode

_F = TypeVar("_F", bound=Callable[..., Any])

__all__ = ["set_eval_frame"]  # sets the compiler of this thread, and returns the previous one


# ── function modes ──────────────────────────────────────────────────────────────────────────────


def modes() -> list[Any]:
    """Return this thread's function modes, innermost last. Backward passes inherit them."""
    return overrides._get_current_function_mode_stack()


def push_mode(mode: Any) -> None:
    """Push a function mode onto the stack; the order need not be that of `with` blocks."""
    overrides._push_mode(mode)


def pop_mode() -> Any:
    """Take the innermost function mode off the stack."""
    return overrides._pop_mode()


def in_backward() -> bool:
    """Return True if a backward pass is running in this thread."""
    return torch._C._current_graph_task_id() != -1


def unnoticed(modes_of: type, hooks_of: type) -> Callable[[], None]:
    """Make PyTorch ignore function modes of one class and global hooks owned by another class.

    PyTorch uses its fused layers only if no function mode is active, and compiled modules, which
    call global hooks twice, warn about them. Return a function that undoes the change.
    """

    def has_torch_function(tensors: Any) -> bool:
        if any(not isinstance(mode, modes_of) for mode in modes()):
            return True
        disabled = torch._C._disabled_torch_function_impl
        kinds = {type(tensor) for tensor in tensors} - {Tensor, nn.Parameter}
        return any(getattr(kind, "__torch_function__", disabled) is not disabled for kind in kinds)

    def has_any_global_hook() -> bool:
        return any(
            not isinstance(getattr(one, "__self__", None), hooks_of) for one in global_hooks()
        )

    return replace_all(
        (overrides, "has_torch_function", has_torch_function),
        (hooks, "_has_any_global_hook", has_any_global_hook),
    )


# ── functions by other names ────────────────────────────────────────────────────────────────────


def twin(function: Any, **names: Any) -> Callable[..., Any]:
    """Return a copy of a function with some of its global names replaced."""
    found = types.FunctionType(
        function.__code__,
        function.__globals__ | names if names else function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    found.__kwdefaults__ = function.__kwdefaults__
    return found


def without_dispatch(function: Any) -> Callable[..., Any]:
    """Return a copy of a PyTorch function that is not dispatched to function modes itself.

    Inside a mode, only the functions that it calls are intercepted.
    """
    return twin(function, **dict.fromkeys(_DISPATCH_CHECKS, lambda *_: False))


_DISPATCH_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def parameters(function: Any) -> tuple[str, ...]:
    """Return the names of a function's positional parameters, in order."""
    return function.__code__.co_varnames[: function.__code__.co_argcount]


def arguments(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call to an operator, such as `torch.ops.aten.add.Tensor`, by name.

    Missing ones get their default values.
    """
    known = _defaults(operator)
    return known | dict(zip(known, args, strict=False)) | kwargs


@functools.cache
def _defaults(operator: Any) -> dict[str, Any]:
    return {one.name: one.default_value for one in operator._schema.arguments}


def replace(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Replace an attribute, such as a function's `__code__`; return a function that undoes it."""
    inherited = isinstance(owner, type) and name not in vars(owner)
    before = getattr(owner, name)
    setattr(owner, name, value)
    return lambda: delattr(owner, name) if inherited else setattr(owner, name, before)


def replace_all(*changes: tuple[Any, str, Any]) -> Callable[[], None]:
    """Replace several attributes; return a function that undoes it."""
    undo = [replace(*change) for change in changes]

    def restore() -> None:
        for one in undo:
            one()

    return restore


def global_hooks() -> list[Callable[..., Any]]:
    """Return the active global module hooks. Compiled modules warn if there are any."""
    every = (
        hooks._global_backward_pre_hooks,
        hooks._global_backward_hooks,
        hooks._global_forward_pre_hooks,
        hooks._global_forward_hooks,
    )
    return [hook for some in every for hook in some.values()]


# ── fused attention ─────────────────────────────────────────────────────────────────────────────


class LogSumExp(TorchDispatchMode):
    """Mode that records the log-sum-exp of `F.scaled_dot_product_attention`, if its kernel has one.

    The output is bitwise equal: the same kernel runs and also returns the log-sum-exp.
    """

    def __init__(self) -> None:
        super().__init__()
        self._recorded: list[Tensor] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is _WHOLE:  # under torch.inference_mode()
            with self:
                return func.decompose(*args, **(kwargs or {}))
        if func is _EFFICIENT and len(args) > 4:
            args = (*args[:4], True, *args[5:])
        out = func(*args, **(kwargs or {}))
        if func in _WITH_LSE:
            self._recorded.append(out[1])
        return out

    def of(self, heads: int, queries: int) -> Tensor | None:
        """Return the only call's log-sum-exp `[B, H, T]`; `None` if it does not fit these sizes."""
        if len(self._recorded) != 1 or not self._recorded[0].numel():
            return None
        lse = self._recorded[0].detach()
        lse = lse[..., 0] if lse.dim() == 4 else lse
        fits = lse.dim() == 3 and lse.shape[1] == heads and lse.shape[2] >= queries
        return lse[..., :queries] if fits else None


_OPS = torch.ops.aten
_WHOLE = _OPS.scaled_dot_product_attention.default
_EFFICIENT = _OPS._scaled_dot_product_efficient_attention.default
_WITH_LSE = (
    _EFFICIENT,
    _OPS._scaled_dot_product_flash_attention.default,
    _OPS._scaled_dot_product_cudnn_attention.default,
)


# ── the compiler ────────────────────────────────────────────────────────────────────────────────


def uncompiled(code: types.CodeType) -> types.CodeType:
    """Return a copy of a code object with a file name that PyTorch's compiler skips."""
    return code.replace(co_filename="<frozen importlib of headwise>")


def compiler() -> Any:
    """Return PyTorch's compiler, the module with `_callback_from_stance`; `None` if not loaded."""
    return sys.modules.get("torch._dynamo.eval_frame")


def forced_eager() -> bool:
    """Return True under `torch.compiler.set_stance("force_eager")`."""
    loaded = compiler()
    return loaded is not None and loaded._stance.stance == "force_eager"


def compiled(module: nn.Module) -> str:
    """Return a clause that says how a module is compiled; "" if it is not."""
    if "_orig_mod" in module._modules and hasattr(module, "dynamo_ctx"):
        return "compiled by torch.compile"
    forward = vars(module).get("forward")
    if getattr(module, "_compiled_call_impl", None) is not None:
        return "compiled in place by torch.compile"
    if hasattr(forward, "_torchdynamo_orig_callable"):
        return "compiled in place by torch.compile"
    return "compiled by torch.jit" if hasattr(module, "_c") and hasattr(module, "graph") else ""


def compile_with(
    wrap: Callable[[Any, types.FrameType], Any], ended: Callable[[types.FrameType], None]
) -> Callable[[], None]:
    """Make PyTorch's compiler use the callback that `wrap` returns in place of its own.

    `wrap` is called when compiled code starts, and `ended` when it has ended, both with the calling
    frame; `ended` may also be called with other frames. Return a function that undoes it. Graphs
    are cached by backend, that of the original callback unless `compiling_with()` made the new one.
    """
    before, set_frame = compiler()._callback_from_stance, compiler().set_eval_frame

    def set_eval_frame(callback: Any) -> Any:
        previous = set_frame(callback)
        if callback is None:
            ended(sys._getframe(1))
        return previous

    set_eval_frame.__code__ = uncompiled(set_eval_frame.__code__)  # it runs in compiled code

    def callback_from_stance(callback: Any) -> Any:
        original = before(callback)
        if not callable(original):  # nothing is compiled now
            return original
        wrapped = wrap(original, sys._getframe(1))
        if wrapped is not None and not hasattr(wrapped, "_torchdynamo_orig_backend"):
            wrapped._torchdynamo_orig_backend = original
        return wrapped

    return replace_all(
        (compiler(), "_callback_from_stance", callback_from_stance),
        (compiler(), "set_eval_frame", set_eval_frame),
    )


def backend_of(callback: Any) -> Any:
    """Return the backend of a compiler callback."""
    while hasattr(callback, "_torchdynamo_orig_backend"):
        callback = callback._torchdynamo_orig_backend
    return callback


def compiling_with(backend: Callable[..., Any]) -> Any:
    """Return a compiler callback with this backend."""
    return compiler()._create_wrapped_callback(backend)


def more_graphs() -> Any:
    """Return a context with twice the recompile limit: instrumented and plain graphs both count."""
    config: Any = sys.modules["torch._dynamo.config"]
    return config.patch(recompile_limit=2 * config.recompile_limit)


def not_compiled() -> Any:
    """Return the result of a compiler callback for a frame that runs in eager mode."""
    dynamo: Any = sys.modules["torch._dynamo.types"]
    default = dynamo.FrameAction.DEFAULT
    return dynamo.ConvertFrameReturn(dynamo.FrameExecStrategy(default, default), False)


def add_buffer(graph: torch.fx.GraphModule, name: str, tensor: Tensor) -> None:
    """Add a tensor to a graph of the compiler as a buffer."""
    graph.register_buffer(name, tensor)
    sources = getattr(graph, "_param_name_to_source", None)
    if sources is not None:
        from torch._dynamo.source import ConstantSource

        sources[name] = ConstantSource(name)


def example_of(node: torch.fx.Node) -> Any:
    """Return the value that a graph's input had when the compiler recorded it; None if freed."""
    return getattr(node.meta.get("grapharg"), "example", None)


def hint_of(size: torch.SymInt) -> int:
    """Return the value that a dynamic size had when the compiler recorded the graph."""
    return int(size.node.hint)


def skipped(code: types.CodeType) -> bool:
    """Return True if PyTorch's compiler skips this code."""
    return bool(sys.modules["torch._dynamo.trace_rules"].check(code))


def outside_graphs(function: _F) -> _F:
    """Decorate a function so that a call to it breaks the graph, an error with `fullgraph=True`.

    The compiler is loaded when the function first runs, not here.
    """
    return torch._disable_dynamo(function)  # type: ignore[return-value]


def traced() -> bool:
    """Return True if the compiler or `torch.jit.trace` is tracing."""
    return torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None


def autocast() -> bool:
    """Return True if autocast is on for some device."""
    return torch._C._is_any_autocast_enabled()


def has_parts(module: nn.Module) -> bool:
    """Return True if a module has submodules."""
    return bool(module._modules)


def table_of(bias: Any, device: torch.device) -> Tensor:
    """Return the mask that a `CausalBias` represents."""
    return bias._materialize(device)


def version(x: Tensor) -> int:
    """Return PyTorch's count of in-place changes to a tensor."""
    return 0 if x.is_inference() else x._version


# ── scaled gradients ────────────────────────────────────────────────────────────────────────────


def skipped_since_update(scaler: Any) -> bool | None:
    """Return True if a GradScaler has skipped an optimizer step since its last `update()`.

    `None` if no optimizer has stepped since then, or if the scaler does not record it.
    """
    states = getattr(scaler, "_per_optimizer_states", {}).values()
    stepped = [state for state in states if state["stage"].name == "STEPPED"]
    if not stepped:
        return None
    return any(bool(x) for state in stepped for x in state["found_inf_per_device"].values())


# ── collectives ─────────────────────────────────────────────────────────────────────────────────


def store_of_group() -> Any:
    """Return the key-value store of the default process group."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()

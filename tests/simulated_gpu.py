"""A GPU for machines without one: kernels and waits are counted, and the numbers are right.

Tensors of `Gpu` say that they are on `cuda:0`, and so the package takes its GPU paths. Each holds
its numbers in a CPU tensor, on which operators run: views and allocations are free, everything else
counts as one kernel. The host waits where it reads a number, where it copies from one device to the
other, and where the size of a result depends on numbers. The Triton kernels are replaced by the C++
kernel, PyTorch's fused attention by its CPU kernel. Only the forward pass runs: autograd needs a
real device for the backward pass.
"""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map

import headwise
from headwise.capture import serve
from headwise.core import call as calls
from headwise.kernels import ctypes_api as cpu
from headwise.kernels import torch_ops, triton_api
from headwise.kernels.interface import STATISTICS, Problem
from headwise.stats import sampling

aten = torch.ops.aten
DEVICE = torch.device("cuda", 0)
PACKAGE = str(Path(headwise.__file__).parent)

FREE = {
    *("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"),
    *("detach", "alias", "lift_fresh", "_unsafe_view", "_reshape_alias", "set_", "resize_"),
}
WAITS = {
    *("_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2", "unique_dim"),
    *("unique_consecutive", "bincount", "is_nonzero"),
}
FUSED = {f"_scaled_dot_product_{kind}_attention": kind for kind in ("flash", "cudnn", "efficient")}


class OnGpu(Tensor):
    """A tensor that says it is on CUDA, around a CPU tensor."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> OnGpu:
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=DEVICE,
        )
        made.inner = inner
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        return _run(func, args, kwargs or {})

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError("a tensor on cuda:0 has no numpy array")

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"OnGpu({self.inner!r})"


@dataclass
class Count:
    """Kernels and waits, each with the line of the package that it comes from."""

    kernels: list[tuple[str, str]] = field(default_factory=list)
    waits: list[tuple[str, str]] = field(default_factory=list)

    def clear(self) -> None:
        self.kernels.clear()
        self.waits.clear()

    def __str__(self) -> str:
        said = [f"{len(self.kernels)} kernels, {len(self.waits)} waits"]
        for kind, found in (("", self.kernels), ("WAIT ", self.waits)):
            lines = Counter((place, name) for name, place in found)
            said += [f"{n:5} {kind}{name}  {place}" for (place, name), n in sorted(lines.items())]
        return "\n".join(said)


_count: Count | None = None


def _place() -> str:
    """Return the innermost line of the package that runs."""
    frame = sys._getframe(2)
    while frame is not None and not frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back  # type: ignore[assignment]
    if frame is None:
        return "outside"
    return f"{frame.f_code.co_filename[len(PACKAGE) + 1 :]}:{frame.f_lineno}"


def _kernel(name: str) -> None:
    if _count is not None:
        _count.kernels.append((name, _place()))


def _wait(name: str) -> None:
    if _count is not None:
        _count.waits.append((name, _place()))


class _Mode(TorchDispatchMode):
    """Takes in operators whose arguments hold no tensor of the GPU: those that make one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _inner(x: object) -> object:
    if isinstance(x, torch.device):
        return torch.device("cpu")
    return x.inner if isinstance(x, OnGpu) else x


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operator on the CPU, and count it where it is one of the GPU."""
    name = func._schema.name.removeprefix("aten::")
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    before = any(isinstance(x, OnGpu) for x in tensors)
    device = kwargs.get("device")
    after = before if device is None else torch.device(device).type == "cuda"
    inner_args, inner_kwargs = tree_map(_inner, args), tree_map(_inner, kwargs)
    if not before and not after:
        return func(*args, **kwargs)
    if name in FUSED:
        _kernel(name)
        return _fused(FUSED[name], *inner_args, **inner_kwargs)
    if name == "scaled_dot_product_attention":
        return _attention(*args, **kwargs)
    moved = name in ("_to_copy", "copy_") and _crosses(name, args, after)
    if moved:
        if not (kwargs.get("non_blocking") or args[2:] == (True,)):
            _wait("copy to the GPU" if after else "copy to the host")
    else:
        _check_devices(name, tensors)
        _count_operator(func, name, args, kwargs)
    found = func(*inner_args, **inner_kwargs)
    if not after:
        return found
    found = tree_map(lambda x: OnGpu(x) if isinstance(x, Tensor) else x, found)
    return return_and_correct_aliasing(func, args, kwargs, found) if before else found


def _crosses(name: str, args: Any, after: bool) -> bool:
    if name == "copy_":
        return isinstance(args[0], OnGpu) != isinstance(args[1], OnGpu)
    return isinstance(args[0], OnGpu) != after


def _check_devices(name: str, tensors: list[Tensor]) -> None:
    """Refuse what CUDA refuses: tensors of both devices, but for single numbers and indices."""
    if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
        if any(not isinstance(x, OnGpu) and x.dim() for x in tensors):
            _wait("indices copied to the GPU")
        return
    here = any(isinstance(x, OnGpu) for x in tensors)
    if here and any(not isinstance(x, OnGpu) and x.dim() for x in tensors):
        raise RuntimeError(f"aten::{name}: expected all tensors to be on the same device")


def _count_operator(func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> None:
    view = any(x.alias_info is not None and not x.alias_info.is_write for x in func._schema.returns)
    if view or name in FREE:
        return
    if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
        if any(x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1]):
            _wait(f"{name} by a mask")
    elif name in WAITS or (name == "repeat_interleave" and kwargs.get("output_size") is None):
        _wait(name)
    if name != "_local_scalar_dense":
        _kernel(name)


def _fused(kind: str, q: Tensor, k: Tensor, v: Tensor, *rest: Any, **named: Any) -> Any:
    """PyTorch's fused kernels for CUDA, computed by the one for CPUs."""
    bias = None
    if kind != "flash":
        bias, _, *rest = rest  # type: ignore[assignment]
    dropout, causal, *_ = [*rest, *(0.0, False)[len(rest) :]]
    assert not dropout, "the simulated GPU has no dropout"
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    wide = v.shape[-1]
    v = torch.nn.functional.pad(v, (0, q.shape[-1] - wide))
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=bias, scale=named.get("scale")
    )
    lse = lse.float().clone(memory_format=torch.contiguous_format)
    lse = lse[..., None] if kind == "cudnn" else lse
    found = [OnGpu(out[..., :wide]), OnGpu(lse)]
    empty = [OnGpu(torch.empty(0)) for _ in range(5)]
    if kind == "efficient":
        return (*found, *empty[:2])
    return (*found, *empty[:2], q.shape[2], k.shape[2], *empty[2:])


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`F.scaled_dot_product_attention`, which PyTorch without CUDA would make of many kernels."""
    if attn_mask is None:
        return aten._scaled_dot_product_flash_attention(
            q, k, v, dropout_p, is_causal, False, scale=scale
        )[0]  # what it costs to bring a mask into shape is PyTorch's own
    if attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill(~attn_mask, -torch.inf)
    group = q.shape[1] // k.shape[1]
    if group > 1:
        k, v = (x.repeat_interleave(group, 1, output_size=q.shape[1]) for x in (k, v))
    return aten._scaled_dot_product_efficient_attention(
        q, k, v, attn_mask, False, dropout_p, is_causal, scale=scale
    )[0]


def _launch(name: str, problem: Problem, over: str, **rest: Any) -> None:
    """Launch a Triton kernel: the numbers come from the C++ kernel."""
    problem = tree_map(_inner, problem._replace(structs=None))
    if problem.v is not None and problem.v.dtype != problem.q.dtype:  # as of block maps
        wide = {name: getattr(problem, name).float() for name in "qkv"}
        problem = problem._replace(**wide)
    given = {key: _inner(x) for key, x in rest.items()}
    known = name == "forward" and given["lse"] is not None
    _kernel(f"triton {name}{', LSE known' if known else ''}")
    if name == "forward":
        if given["on"] is not None and not int(given["on"]):
            return
        figures = dict(zip(STATISTICS, cpu.forward(problem, 127)[1:], strict=True))
        if known:
            some = figures["lse"] != -torch.inf  # others see no key
            torch.testing.assert_close(
                given["lse"][some], figures["lse"][some], rtol=1e-2, atol=1e-2
            )
        found = {f"{key}_out": x for key, x in figures.items()}
        found["out"] = None if problem.v is None else cpu.forward(problem, 1)[0]
        found["base_out"], found["total_out"] = figures["lse"], torch.ones(())
        for key, x in found.items():
            if given[key] is not None:
                given[key].copy_(x)
    elif name == "sampled":
        figures = dict(zip(STATISTICS, cpu.forward(problem, 127)[1:], strict=True))
        for key, x in figures.items():
            if given[f"{key}_out"] is not None:
                given[f"{key}_out"].copy_(x[..., given["chosen"]])
            if f"every_{key}" in given:
                given[f"every_{key}"].copy_(x)
    elif name == "columns":
        lse = given["base"] + given["total"].log()
        found = cpu.sums(problem, lse, given["weight"], True, None)[0]
        given["received"].copy_(found)
    else:
        raise NotImplementedError(f"the simulated GPU has no {name}")


GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace c10 { namespace impl {
struct NoGuard final : public DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { return Device(DeviceType::CUDA, 0); }
  Device getDevice() const override { return Device(DeviceType::CUDA, 0); }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream stream() const { return Stream(Stream::DEFAULT, Device(DeviceType::CUDA, 0)); }
  Stream getStream(Device) const noexcept override { return stream(); }
  Stream getNewStream(Device, int) const override { return stream(); }
  Stream exchangeStream(Stream) const noexcept override { return stream(); }
  DeviceIndex deviceCount() const noexcept override { return 1; }
};
C10_REGISTER_GUARD_IMPL(CUDA, NoGuard);
}}
"""


@functools.cache
def _guard() -> str:
    """Let PyTorch for CPUs switch to a CUDA device; say what keeps it from that."""
    compiler = shutil.which("c++")
    if torch.version.cuda is not None or torch.version.hip is not None:
        return "PyTorch with CUDA has a guard of its own"
    if compiler is None or cpu.library() is None:
        return "needs a C++ compiler and the native kernel"
    root = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "guard.cpp"), Path(folder, "guard.so")
        source.write_text(GUARD)
        flags = ["-std=c++17", "-shared", "-fPIC", f"-I{root / 'include'}", f"-L{root / 'lib'}"]
        command = [compiler, *flags, str(source), "-Wl,--no-as-needed", "-lc10", "-o", str(library)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return f"the device guard does not compile: {done.stderr[-500:]}"
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    return ""


def needs_guard() -> None:
    """Skip a test where PyTorch cannot be let switch to a CUDA device that is not there."""
    if missing := _guard():
        pytest.skip(missing)


@contextmanager
def simulated() -> Iterator[Count]:
    """Run what is inside with a simulated GPU: `device="cuda"` works there, and is counted."""
    global _count
    needs_guard()
    _count = Count()
    library = torch.library.Library("aten", "IMPL")
    plain = calls._PLAIN | {OnGpu}
    calls.PREPARED.clear()
    try:
        library.impl("scaled_dot_product_attention", _attention, "AutogradCUDA")
        with ExitStack() as stack:

            def patch(*change: Any) -> None:
                stack.enter_context(mock.patch.object(*change))

            patch(serve, "_PLAIN", plain)
            for module in (calls, torch_ops):
                patch(module, "_PLAIN", plain)
            for module in (calls, torch_ops, sampling):
                patch(module, "_len_torch_dispatch_stack", lambda: 0)
            stack.callback(sampling._kept_on.cache_clear)
            patch(aten.scaled_dot_product_attention.default, "decompose", _attention)
            patch(triton_api, "_launch", _launch)
            patch(triton_api, "why_not", lambda *_: "")
            patch(torch.cuda, "_lazy_init", lambda: None)
            patch(torch.cuda, "get_device_capability", lambda *_: (9, 0))
            before = torch._C._only_lift_cpu_tensors()
            torch._C._set_only_lift_cpu_tensors(True)
            stack.callback(torch._C._set_only_lift_cpu_tensors, before)
            stack.enter_context(_Mode())
            yield _count
    finally:
        library._destroy()
        calls.PREPARED.clear()
        _count = None

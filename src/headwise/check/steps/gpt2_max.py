"""Test the step `gpt2` on Modular MAX, if MAX is installed.

Without MAX only the syntax is read. With MAX all parts are traced into one graph and compiled once,
because eager MAX compiles every operation, which takes minutes. The parts are compared with the
PyTorch twin, which has the same weights.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from ..rules import passed
from ..verdict import Finding
from .base import StepCall, StepPart, Trial, Wrong, step
from .modules import GPT, SIZES, E, T, call_part, config, inputs, layer_of, mask_of, wrong_size


def _absent() -> str | None:
    if importlib.util.find_spec("max") and importlib.util.find_spec("max.experimental"):
        return None
    return (
        "Modular MAX is not installed, and headwise does not install it; in an environment "
        "with MAX, all parts are also run"
    )


def _built(trial: Trial) -> Any:
    """Build the layer, give it weights, and run every part that can be run."""
    from max.driver import CPU
    from max.experimental import functional as F
    from max.experimental.tensor import Tensor, default_device

    lazy = F.lazy() if hasattr(F, "lazy") else nullcontext()  # its random weights are never drawn
    with default_device(CPU()), lazy:
        layer = trial.get(GPT)(config())
    draw = np.random.default_rng(0)
    trial.results["weights"] = weights = {
        name: draw.normal(0, 0.3, [int(size) for size in parameter.shape]).astype(np.float32)
        for name, parameter in layer.parameters
    }
    layer.load_state_dict({name: Tensor.from_dlpack(array) for name, array in weights.items()})
    trial.results |= {"layer": layer, "outputs": _outputs(trial, layer)}
    return layer


def _outputs(trial: Trial, layer: Any) -> dict[str, Any]:
    """Return the result of each part, or its exception, from one compiled graph."""
    from max.dtype import DType
    from max.experimental.tensor import Tensor
    from max.graph import DeviceRef, TensorType

    try:
        from max.experimental.nn import Module
    except ImportError:  # MAX 25.7
        from max.nn.module_v3 import Module

    parts = [one.short for one in trial.step.parts if one.name not in trial.blank]
    arrays = {name: one.numpy() for name, one in inputs().items() if name != "in"}
    results: dict[str, Any] = {}
    order: list[str] = []

    class Parts(Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, *given: Any) -> tuple[Any, ...]:
            order.clear()
            outputs = [given[0]]  # a graph has at least one output
            for name in (one for one in parts if one != GPT):
                named = dict(zip(arrays, given, strict=True))
                how = {"dtype": given[0].dtype, "device": given[0].device}
                try:
                    if name == "causal_mask":
                        out = trial.get(name)(T, 0, **how)
                    else:
                        out = call_part(self.layer, name, named)
                except Exception as error:
                    out = error
                if hasattr(out, "shape"):
                    order.append(name)
                    outputs.append(out)
                else:
                    results[name] = out
            return tuple(outputs)

        __call__ = forward

    kinds = (
        TensorType(DType.float32, one.shape, device=DeviceRef.CPU()) for one in arrays.values()
    )
    _, *outs = Parts().compile(*kinds)(*map(Tensor.from_dlpack, arrays.values()))
    tensors = (torch.from_numpy(np.array(np.from_dlpack(out))) for out in outs)
    return results | dict(zip(order, tensors, strict=True))


def _calls(trial: Trial, part: StepPart) -> Iterator[StepCall]:
    """Yield the calls: the parts of the file have run already, those of the twin run now."""

    def call(one: Trial) -> Any:
        if one is trial:
            if not part.owner and part.short == GPT:
                return _built(trial)
            out = trial.results["outputs"][part.short]
            if isinstance(out, Exception):
                raise out
            return out
        if part.short == "causal_mask":
            return mask_of(one, T, 0)
        layer = layer_of(one, GPT)
        for name, own in layer.state_dict().items():
            weight = torch.from_numpy(trial.results["weights"].get(name, own.numpy()))
            own.copy_(weight if weight.shape == own.shape else own)
        return layer if part.short == GPT else call_part(layer, part.short, inputs())

    yield StepCall(call)


def _judge(trial: Trial, twin: Trial, part: StepPart, failed: Any) -> Wrong | None:
    if part.short != GPT or failed is not None:
        return None
    return wrong_size(part, trial.results["layer"], layer_of(twin, GPT))


def _final(trial: Trial) -> list[Finding]:
    message = "The output is that of GPT-2's attention on PyTorch, with the same weights."
    return [passed("definition", message)]


GPT2_MAX = step("gpt2-max", SIZES | {"E": E}, _calls, _final, _judge, _absent)

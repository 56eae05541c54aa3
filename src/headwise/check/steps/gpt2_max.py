"""Follow the step `gpt2` on Modular MAX, for those who have installed it.

Where MAX is not installed, the syntax is read and nothing is run. Where it is, all parts are traced
into one graph that is compiled once: MAX called as it is would compile every operation on its own,
which takes minutes.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import importlib.util
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...tutorial.implementations import fused
from ..diagnosis.projections import read
from ..findings.rules import found, passed
from ..findings.verdict import Finding
from .base import StepPart, Trial, step
from .gpt2 import OWNER, TESTS, B, D, E, H, T, attention_test, calls, config, give, judge_sizes
from .naming import from_heads, from_weights, heads_reading, is_right, named


def _absent() -> str | None:
    if importlib.util.find_spec("max") and importlib.util.find_spec("max.experimental"):
        return None
    return (
        "Modular MAX is not installed here, and headwise does not install it; in an environment "
        "that has it, all parts are run, too"
    )


def _built(trial: Trial, part: StepPart) -> list[Finding]:
    """Builds the layer, gives it weights, and runs every part that can be run."""
    from max.driver import CPU
    from max.experimental import functional as F
    from max.experimental.tensor import Tensor as MaxTensor
    from max.experimental.tensor import default_device

    lazy = F.lazy() if hasattr(F, "lazy") else nullcontext()  # its random weights are never drawn
    with default_device(CPU()), lazy:
        layer = trial.get(OWNER)(config())
    sizes = judge_sizes(layer)
    if any(one.severity == "error" for one in sizes):
        return sizes
    draw = np.random.default_rng(0)
    weights = {
        name: draw.normal(0, 0.04, [int(size) for size in parameter.shape]).astype(np.float32)
        for name, parameter in layer.parameters
    }
    layer.load_state_dict({name: MaxTensor.from_dlpack(array) for name, array in weights.items()})
    x, q, k, v = (draw.standard_normal((B, T, E)), *draw.standard_normal((3, B, H, T, D)))
    inputs = [array.astype(np.float32) for array in (x, q, k, v)]
    outputs = _results(trial, layer, inputs)
    trial.made |= {"weights": weights, "outputs": outputs}
    trial.made["inputs"] = [torch.from_numpy(array) for array in inputs]
    return sizes


def _results(trial: Trial, layer: Any, inputs: list[np.ndarray]) -> dict[str, Any]:
    """What each part gives, or the exception that it raises, from one compiled graph."""
    from max.dtype import DType
    from max.experimental.tensor import Tensor as MaxTensor
    from max.graph import DeviceRef, TensorType

    try:
        from max.experimental.nn import Module
    except ImportError:  # 25.7 keeps it elsewhere
        from max.nn.module_v3 import Module

    parts = {part.short for part in trial.step.parts if part.name not in trial.waiting}
    results: dict[str, Any] = {}
    order: list[str] = []

    class Parts(Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, *given: Any) -> tuple[Any, ...]:
            order.clear()
            outputs = [given[0]]  # a graph has at least one output
            for name, call in calls(trial, self.layer, *given).items():
                if name.partition(" ")[0] not in parts:
                    continue
                try:
                    out = call()
                except Exception as error:
                    out = error
                if hasattr(out, "shape"):
                    order.append(name)
                    outputs.append(out)
                else:
                    results[name] = out
            return tuple(outputs)

        __call__ = forward

    types = [TensorType(DType.float32, array.shape, device=DeviceRef.CPU()) for array in inputs]
    run = Parts().compile(*types)
    _, *arrays = run(*map(MaxTensor.from_dlpack, inputs))
    tensors = (torch.from_numpy(np.array(np.from_dlpack(array))) for array in arrays)
    return results | dict(zip(order, tensors, strict=True))


def _fault(trial: Trial, out: Tensor) -> Finding | None:
    heads = trial.made["inputs"][1:]
    one = named(from_heads(*heads), out, heads_reading(heads[0]), T)
    return one and replace(one, severity="error")


def _whole(trial: Trial, part: StepPart) -> Finding:
    """The output against the twin on PyTorch, with the same weights."""
    twin = fused.GPT2MultiHeadAttention(config()).eval()
    weights = trial.made["weights"]
    names = sorted(dict(twin.named_parameters()))
    if sorted(weights) != names:
        words = {"has": ", ".join(sorted(weights)), "wants": ", ".join(names)}
        return found("step-projections", "names", **words)
    turned = {name: torch.from_numpy(array.T.copy()) for name, array in weights.items()}
    twin.load_state_dict(turned)
    reading = read(twin, E, H)
    variants, out = from_weights(reading, trial.made["inputs"][0]), give(trial, "forward")
    with torch.no_grad():
        if is_right(variants, out):
            said = "The output is that of GPT-2's attention on PyTorch, with the same weights."
            return passed("definition", said)
        return named(variants, out, reading, T) or found("definition", "max")


OWN = {"built": _built, "attn": attention_test(_fault), "whole": _whole}
GPT2_MAX = step("gpt2-max", TESTS | OWN, _absent)

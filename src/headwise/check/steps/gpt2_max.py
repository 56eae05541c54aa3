"""Follow the step `gpt2` on Modular MAX, for those who have installed it.

Where MAX is not installed, the syntax is read and nothing is run. Where it is, all parts are traced
into one graph that is compiled once: MAX called as it is would compile every operation on its own,
which takes minutes.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...tutorial.implementations import fused
from ..diagnosis.projections import read
from ..findings.rules import found, passed
from ..findings.verdict import Finding
from .base import StepPart, Trial, step
from .gpt2_parts import OWNER, TESTS, B, D, E, H, T, attention_test, calls, config, judge_sizes
from .naming import from_heads, from_weights, heads_reading, is_right, named


def _absent() -> str | None:
    if importlib.util.find_spec("max") and importlib.util.find_spec("max.experimental"):
        return None
    return (
        "Modular MAX is not installed here, and headwise does not install it; in an environment "
        "that has it, all parts are run, too"
    )


def _built(trial: Trial, part: StepPart) -> Iterator[Finding]:
    """Builds the layer, gives it weights, and runs every part that can be run."""
    from max.driver import CPU
    from max.experimental import functional as F
    from max.experimental.tensor import Tensor as MaxTensor
    from max.experimental.tensor import default_device

    lazy = F.lazy() if hasattr(F, "lazy") else nullcontext()  # its random weights are never drawn
    with default_device(CPU()), lazy:
        layer = trial.get(OWNER)(config())
    sizes = list(judge_sizes(layer))
    yield from sizes
    if any(one.severity == "error" for one in sizes):
        return
    draw = np.random.default_rng(0)
    weights = {
        name: draw.normal(0, 0.04, [int(size) for size in parameter.shape]).astype(np.float32)
        for name, parameter in layer.parameters
    }
    layer.load_state_dict({name: MaxTensor.from_dlpack(array) for name, array in weights.items()})
    x, q, k, v = (draw.standard_normal((B, T, E)), *draw.standard_normal((3, B, H, T, D)))
    inputs = [array.astype(np.float32) for array in (x, q, k, v)]
    outputs = _results(trial, layer, inputs)

    def give(name: str) -> Any:
        """What the part gave; what it raised is raised again."""
        out = outputs[name]
        if isinstance(out, Exception):
            raise out
        return torch.from_numpy(np.array(out)) if isinstance(out, np.ndarray) else out

    trial.made |= {"weights": weights, "give": give}
    trial.made["inputs"] = [torch.from_numpy(array) for array in inputs]


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
    results |= {name: np.from_dlpack(array) for name, array in zip(order, arrays, strict=True)}
    return results


def _is_right(heads: list[Tensor], out: Tensor) -> bool:
    return is_right(from_heads(*heads), out)


def _named(trial: Trial, part: StepPart) -> Iterator[Finding]:
    heads, out = trial.made["inputs"][1:], trial.made["_attn"]
    one = named(from_heads(*heads), out, heads_reading(heads[0]), T)
    if one is not None:
        said = f"`_attn` does not compute attention. {one.message}"
        yield Finding(one.rule, "error", said, one.hint)


def _whole(trial: Trial) -> Iterator[Finding]:
    """The output against the twin on PyTorch, with the same weights."""
    twin = fused.GPT2MultiHeadAttention(config()).eval()
    weights = trial.made["weights"]
    names = sorted(dict(twin.named_parameters()))
    if sorted(weights) != names:
        words = {"has": ", ".join(sorted(weights)), "wants": ", ".join(names)}
        yield found("step-projections", "names", **words)
        return
    turned = {name: torch.from_numpy(array.T.copy()) for name, array in weights.items()}
    twin.load_state_dict(turned)
    reading = read(twin, E, H)
    give, out = from_weights(reading, trial.made["inputs"][0]), trial.made["give"]("forward")
    with torch.no_grad():
        if is_right(give, out):
            said = "The output is that of GPT-2's attention on PyTorch, with the same weights."
            yield passed("definition", said)
        else:
            yield named(give, out, reading, T) or found("definition", "max")


GPT2_MAX = step(
    "gpt2-max",
    {**TESTS, "built": _built, "attn": attention_test(_is_right, _named)},
    _whole,
    _absent,
    first=OWNER,  # its test runs all others
)

"""The step `gpt2` on Modular MAX, for those who have installed it.

Where MAX is not installed, the syntax is read and nothing is run. Where it is, all parts are traced
into one graph that is compiled once: MAX called as it is would compile every operation on its own,
which takes minutes.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...systems import fused
from ..diagnosis.projections import read
from ..findings.verdict import Finding
from .base import Step, Test, Trial, passed, shape_of, wrong
from .gpt2 import config
from .judges import (
    ATTENTION_HINT,
    B,
    D,
    E,
    H,
    T,
    gpt2_parts,
    judge_mask,
    judge_merge,
    judge_projection,
    judge_sizes,
    judge_split,
)
from .naming import from_heads, from_weights, heads_reading, is_right, named

OWNER = "GPT2MultiHeadAttention"


def _absent() -> str | None:
    if importlib.util.find_spec("max") and importlib.util.find_spec("max.experimental"):
        return None
    return (
        "Modular MAX is not installed here, and headwise does not install it; in an environment "
        "that has it, all parts are run, too"
    )


def _built(trial: Trial) -> Iterator[Finding]:
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
    trial.made["weights"] = weights
    x, q, k, v = (draw.standard_normal((B, T, E)), *draw.standard_normal((3, B, H, T, D)))
    trial.made["inputs"] = [array.astype(np.float32) for array in (x, q, k, v)]
    trial.made["outputs"] = _results(trial, layer, trial.made["inputs"])


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
    found: dict[str, Any] = {}
    order: list[str] = []

    class Parts(Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, *given: Any) -> tuple[Any, ...]:
            order.clear()
            outputs = [given[0]]  # a graph has at least one output
            for name, call in _calls(trial, self.layer, *given).items():
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
                    found[name] = out
            return tuple(outputs)

        __call__ = forward

    types = [TensorType(DType.float32, array.shape, device=DeviceRef.CPU()) for array in inputs]
    run = Parts().compile(*types)
    _, *arrays = run(*map(MaxTensor.from_dlpack, inputs))
    found |= {name: np.from_dlpack(array) for name, array in zip(order, arrays, strict=True)}
    return found


def _calls(
    trial: Trial, layer: Any, x: Any, q: Any, k: Any, v: Any
) -> dict[str, Callable[[], Any]]:
    def mask(queries: int, cached: int) -> Any:
        return trial.get("causal_mask")(queries, cached, dtype=q.dtype, device=q.device)

    return {
        "causal_mask": lambda: mask(T, 0),
        "causal_mask cached": lambda: mask(3, 2),
        "c_attn": lambda: layer.c_attn(x),
        "c_proj": lambda: layer.c_proj(x),
        "_split_heads": lambda: layer._split_heads(x, H, D),
        "_merge_heads": lambda: layer._merge_heads(q, H, D),
        "_attn": lambda: layer._attn(q, k, v),
        "forward": lambda: layer(x),
    }


def _given(trial: Trial, name: str) -> Any:
    """What the part gave; what it raised is raised again."""
    out = trial.made["outputs"][name]
    if isinstance(out, Exception):
        raise out
    return torch.from_numpy(np.array(out)) if isinstance(out, np.ndarray) else out


def _input(trial: Trial, place: int) -> Tensor:
    return torch.from_numpy(trial.made["inputs"][place])


def _mask(trial: Trial) -> Iterator[Finding]:
    mask = _given(trial, "causal_mask")
    cached = trial.made["outputs"]["causal_mask cached"]
    known = isinstance(cached, np.ndarray)
    yield judge_mask(mask, torch.from_numpy(np.array(cached)) if known else torch.zeros(0))


def _projection(name: str, width: int) -> Test:
    def test(trial: Trial) -> Iterator[Finding]:
        yield judge_projection(name, _given(trial, name), width)

    return test


def _split(trial: Trial) -> Iterator[Finding]:
    yield judge_split(_given(trial, "_split_heads"), _input(trial, 0))


def _merge(trial: Trial) -> Iterator[Finding]:
    yield judge_merge(_given(trial, "_merge_heads"), _input(trial, 1))


def _attn(trial: Trial) -> Iterator[Finding]:
    out, heads = _given(trial, "_attn"), [_input(trial, place) for place in (1, 2, 3)]
    if shape_of(out) != str((B, H, T, D)):
        said = (
            f"`_attn` gives {shape_of(out)} for heads of {(B, H, T, D)}; it should keep the shape."
        )
        yield wrong("step-attention", said, ATTENTION_HINT)
        return
    give = from_heads(*heads)
    if is_right(give, out):
        said = f"`_attn` computes attention in every head: {(B, H, T, D)}."
        yield passed("step-attention", said)
        return
    found = named(give, out, heads_reading(heads[0]), T)
    if found is None:
        said = "`_attn` gives the right shape, but other numbers than attention."
        yield wrong("step-attention", said, ATTENTION_HINT)
    else:
        said = f"`_attn` does not compute attention. {found.message}"
        yield Finding(found.rule, "error", said, found.hint)


def _forward(trial: Trial) -> Iterator[Finding]:
    out = _given(trial, "forward")
    if shape_of(out) == str((B, T, E)):
        yield passed("step-forward", f"`forward` keeps the shape: {(B, T, E)}.")
        return
    said = f"`forward` gives {shape_of(out)} for {(B, T, E)}; it should keep the shape."
    yield wrong("step-forward", said, "Return what `c_proj` gives, and nothing beside it.")


def _whole(trial: Trial) -> Iterator[Finding]:
    """The output against the twin on PyTorch, with the same weights."""
    twin = fused.GPT2MultiHeadAttention(config()).eval()
    weights = trial.made["weights"]
    names = sorted(dict(twin.named_parameters()))
    if sorted(weights) != names:
        yield wrong(
            "step-projections",
            f"The layer has {', '.join(sorted(weights))}; GPT-2 has {', '.join(names)}.",
            "`c_attn` and `c_proj` are its only layers, each with a bias.",
        )
        return
    twin.load_state_dict(
        {name: torch.from_numpy(array.T.copy()) for name, array in weights.items()}
    )
    reading = read(twin, E, H)
    give, out = from_weights(reading, _input(trial, 0)), _given(trial, "forward")
    with torch.no_grad():
        if is_right(give, out):
            said = "The output is that of GPT-2's attention on PyTorch, with the same weights."
            yield passed("definition", said)
            return
        found = named(give, out, reading, T)
    yield found or wrong(
        "definition",
        "The output is not that of GPT-2's attention with the same weights.",
        "Every part alone is right: look at what `forward` hands from one to the next.",
    )


_LINEAR = (
    "Write at the top: `from max.experimental.nn import Linear, Module` (25.7: max.nn.module_v3)."
)
_GRAPH = "Write at the top: `from max.graph import Dim, DimLike`."

GPT2_MAX = Step(
    "gpt2-max",
    "the same on Modular MAX",
    gpt2_parts(
        "Linear",
        "`F.split`",
        {
            "causal_mask": _mask,
            OWNER: _built,
            "c_attn": _projection("c_attn", 3 * E),
            "c_proj": _projection("c_proj", E),
            "_split_heads": _split,
            "_merge_heads": _merge,
            "_attn": _attn,
            "forward": _forward,
        },
        builds_first=True,
    ),
    {
        "Linear": _LINEAR,
        "Module": _LINEAR,
        "F": "Write at the top: `from max.experimental import functional as F`.",
        "Tensor": "Write at the top: `from max.experimental.tensor import Tensor`.",
        "DType": "Write at the top: `from max.dtype import DType`.",
        "Device": "Write at the top: `from max.driver import Device`.",
        "Dim": _GRAPH,
        "DimLike": _GRAPH,
        "math": "Write at the top: `import math`.",
        "GPT2Config": "Import it from your earlier step, or leave the annotation out.",
    },
    _whole,
    _absent,
)

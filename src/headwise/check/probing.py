"""Copies of the target, its inputs and the test of equality, shared by all probes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .code import describe
from .target import Result, Target
from .verdict import Example, Finding

Probe = Callable[["Probing"], Finding | None]
"""Test one rule; return None if the rule does not apply."""

TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3}
"""Tolerance for equal outputs, relative to the largest output; 0.1 in half precision. A layer may
compute its softmax in float32 for any dtype."""
NOTHING = 1e-10
"""An influence below this fraction of the largest counts as zero."""


class Failed(Exception):
    """A call raised an error on an input that the layer must accept."""

    def __init__(self, inputs: str, error: Exception) -> None:
        super().__init__(f"The call on {inputs} fails: {describe(error)}")
        self.error = error


class Probing:
    """Shared copies and inputs of the probes.

    Attributes:
        target: with its own weights; random: a copy with random ones; exact: that copy in float64.
        x, out: an input of the usual size, and its output from `exact`.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self.random = target.randomised()
        self.exact = self.random.double()
        self.x = self.exact.input()
        self.tokens = self.x.shape[1]

    @cached_property
    def out(self) -> Tensor:
        return self.call(self.x)

    @cached_property
    def influence(self) -> Tensor:
        """`[T, T]`: which output depends on which token."""
        return self.exact.influence(self.x)

    def result(self, x: Tensor, **given: Any) -> Result:
        """Return the output of `exact`, without a graph.

        Raises:
            Failed: the call raises an error.
        """
        try:
            with torch.no_grad():
                return self.exact.result(x, **given)
        except Exception as error:
            beside = "".join(f", {name}" for name in given)
            raise Failed(f"x {list(x.shape)}{beside}", error) from error

    def call(self, x: Tensor, **given: Any) -> Tensor:
        return self.result(x, **given).out

    def near(self, a: Tensor, b: Tensor, factor: float = 1.0) -> bool:
        """Return True if two outputs are equal up to rounding."""
        if a.shape != b.shape or not bool(a.isfinite().all()):
            return False
        if not a.numel():
            return True
        size = max(float(b.abs().max()), float(a.abs().max()), 1e-30)
        return float((a - b).abs().max()) <= factor * TOLERANCE.get(b.dtype, 0.1) * size

    def changed(self, a: Tensor, b: Tensor) -> bool:
        """Return True if two outputs differ by more than the order of summation explains."""
        return bool((a - b).abs().max() > 1e-6 * b.abs().max().clamp(min=1e-30)) or not bool(
            a.isfinite().all()
        )

    def example(
        self, label: str, two: Callable[[Target, Tensor], tuple[Tensor, Tensor]], batch: int = 1
    ) -> Example | None:
        """Return three tokens on which the outputs of `two(target, x)`, expected and found, differ:
        with the layer's own weights, or with random ones if the difference is too small."""
        for target, beside in ((self.target.double(), ""), (self.exact, "; random weights")):
            x = target.input(tokens=3, batch=batch)
            try:
                with torch.no_grad():
                    expected, actual = two(target, x)
            except Exception:  # it occurred on another input only
                return None
            if not self.near(actual, expected):
                source = f"{target.source(x.shape[1], batch)}  # {label}{beside}"
                return Example.of(source, expected[:1], actual[:1])
        return None

"""Share what probes work with: copies of the target, its inputs, and what counts as equal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ..findings.verdict import Example, Finding
from ..target.call_adapter import Result, ShownCallFails, UnusableResult
from ..target.checked_target import Target
from ..target.errors import told

Probe = Callable[["ProbeContext"], Finding | None]
"""Looks at one rule; None where the rule does not apply."""

TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3}
"""Share of the largest output by which two equal ones may differ; 0.1 in half precision."""

REFUSED = {
    "INTERNAL ASSERT FAILED": "PyTorch fails there by a mistake of its own.",
    "more than 1 value per channel": "Its norm wants more than one number.",
    "No available kernel": "PyTorch has none of the kernels that it allows, on this machine.",
}
"""What PyTorch says in refusing a call that is no mistake, and what that means."""


NOTHING = 1e-12
"""An influence below this share of the largest is none: rounding, where exact zeros are left."""


class Failed(Exception):
    """A call of what is checked raised an error, on an input that it must be able to take."""

    def __init__(self, call: str, error: Exception) -> None:
        odd = isinstance(error, UnusableResult)
        said = f"For {call} it {error}." if odd else f"The call on {call} fails: {told(error)}."
        super().__init__(said)
        self.error = error

    @property
    def no_mistake(self) -> str | None:
        """Why the call that was shown fails by itself, or PyTorch itself refuses it, whatever layer
        makes it; None where neither is so."""
        if isinstance(self.error, ShownCallFails):
            return f"The call that you show fails by itself: {self.error}."
        return next((why for said, why in REFUSED.items() if said in str(self.error)), None)


@contextmanager
def failing(call: str) -> Iterator[None]:
    """Make what is raised within a `Failed` of this call: whatever somebody's code raises."""
    try:
        yield
    except Exception as error:
        raise Failed(call, error) from error


@contextmanager
def noting(subject: Target, note: Callable[[dict[str, Tensor]], None]) -> Iterator[None]:
    """Tell of each call of a module which tensors it is about to get, by the argument's name."""
    assert subject.module is not None
    positional = subject.caller.positional

    def before(_: nn.Module, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        given = {**dict(zip(positional, args, strict=False)), **keywords}
        note({name: one for name, one in given.items() if isinstance(one, Tensor)})

    hook = subject.module.register_forward_pre_hook(before, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


class ProbeContext:
    """What the probes share.

    Attributes:
        subject: as it was given, with its own weights.
        random: a copy with random weights in the subject's dtype: zeros hide nothing there.
        exact: the same in float64, where that works and is wanted.
        x, out: an input of the usual size, and what `exact` gives for it.
        effects: what masks were seen to do, by the argument's name.
        written: arguments that were masks of another shape or of other numbers after a call.
    """

    def __init__(self, subject: Target, exact: bool = True) -> None:
        self.subject = subject
        self.random = subject.randomised()
        self.exact = self.random.double() if exact else self.random.fresh()
        self.x = self.exact.input()
        self.tokens = self.x.shape[1]
        self.effects: dict[str, Any] = {}
        self.written: set[str] = set()

    @cached_property
    def unflagged(self) -> ProbeContext:
        """The same without a flag that hides later tokens: with one, some refuse a mask."""
        form = self.subject.mask_form
        return self if form is None or form.kind != "flag" else self.unmasked

    @cached_property
    def unmasked(self) -> ProbeContext:
        """The same with no mask that is passed to hide later tokens."""
        if self.subject.mask_form is None:
            return self
        return ProbeContext(self.subject.unmasked(), self.exact.dtype != self.subject.dtype)

    @cached_property
    def out(self) -> Tensor:
        return self.call(self.x)

    @cached_property
    def orderless(self) -> bool:
        """Whether the last token does not notice in which order the others stand."""
        swapped = self.x[:, [*range(self.tokens - 2, -1, -1), self.tokens - 1]]
        return self.near(self.call(swapped)[:, -1], self.out[:, -1])

    @cached_property
    def influence(self) -> Tensor:
        """Who depends on whom, `[T, T]`; inputs are small, so that no weight is 0 but by a mask."""
        with failing(f"x {list(self.x[:1].shape)} with gradients"):
            return self.exact.influence(0.1 * self.x)

    @cached_property
    def beyond(self) -> Tensor | Exception:
        """What one token more than the context gives: an output, or the error."""
        longest = self.subject.context_length
        assert longest is not None
        try:
            return self.call(self.random.input(longest + 1, 1, beyond=True), self.random)
        except Failed as failure:
            return failure.error

    def call(self, x: Tensor, subject: Target | None = None) -> Tensor:
        """The output for x, without a graph; `exact`'s where no other subject is named."""
        return self.result(x, subject).out

    def result(
        self,
        x: Tensor,
        subject: Target | None = None,
        source: Tensor | None = None,
        **rest: Any,
    ) -> Result:
        beside = "" if source is None else f" with keys and values from {list(source.shape)}"
        with failing(f"x {list(x.shape)}{beside}"), torch.no_grad():
            return (subject or self.exact).result(x, source, **rest)

    def near(self, a: Tensor, b: Tensor, factor: float = 1.0) -> bool:
        """Whether two outputs are equal but for rounding.

        Many layers take their softmax in float32 whatever the dtype, so float64 is given the
        tolerance of float32; mistakes are far larger.
        """
        if a.shape != b.shape or not a.isfinite().all():
            return False
        size = max(float(b.abs().max()), float(a.abs().max()), 1e-30)
        allowed = factor * TOLERANCE.get(b.dtype, 0.1)
        return float((a - b).abs().max()) <= allowed * size

    def example(
        self,
        said: str,
        two: Callable[[Target, Tensor], tuple[Tensor, Tensor]],
        batch: int = 1,
    ) -> Example | None:
        """Three tokens on which `two(subject, x)`, which gives what is expected and what is found,
        part: with the layer's own weights, or with random ones where it hardly shows with its own.

        `said` says what was done with x.
        """
        for subject, weights in ((self.subject.double(), ""), (self.exact, "; random weights")):
            x = subject.input(tokens=3, batch=batch)
            try:
                with torch.no_grad():
                    expected, actual = two(subject, x)
            except Exception:  # the finding was seen on another input; here there is none to show
                return None
            if not self.near(actual, expected):
                source = f"{subject.source(x.shape[1], batch)}  # {said}{weights}"
                return Example.of(source, expected[:1], actual[:1])
        return None

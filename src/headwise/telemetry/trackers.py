"""Experiment trackers: a scalar for each layer and a histogram for each metric."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from functools import partial
from types import ModuleType
from typing import Any, Protocol, runtime_checkable

import numpy as np

from .figures import Array, HeadMetrics, Heads


@runtime_checkable
class Tracker(Protocol):
    """A logger of recorded metrics."""

    def __call__(
        self, step: int, scalars: dict[str, float], heads: dict[str, Array], alarms: list[str]
    ) -> object:
        """Log `scalars` (a number per layer, by tag), `heads` (the values of all heads) and the
        texts of `alarms`."""


def as_tracker(given: Any) -> Tracker:
    """Return a tracker for a TensorBoard `SummaryWriter`, a W&B or trackio run, or a function.

    A function is called as `function(scalars, step=step)`, like `mlflow.log_metrics`.

    Raises:
        ValueError: the type of `given` is not supported.
    """
    if hasattr(given, "add_scalar") and hasattr(given, "add_histogram"):
        return partial(_tensorboard, given)
    if hasattr(given, "define_metric") and hasattr(given, "log"):
        return _wandb(given)
    module = given.__name__ if isinstance(given, ModuleType) else type(given).__module__ or ""
    if module.partition(".")[0] == "trackio":
        return partial(_trackio, given)
    if callable(given) and not inspect.isclass(given):
        return lambda step, scalars, heads, alarms: given(scalars, step=step)
    raise ValueError(
        f"trackers=[{type(given).__name__}]: pass a TensorBoard SummaryWriter, a run of W&B or "
        f"trackio, or a function with the signature of mlflow.log_metrics(numbers, step=…)."
    )


def logged(
    figures: Mapping[str, HeadMetrics], heads: Heads
) -> tuple[dict[str, float], dict[str, Array]]:
    """Return the scalars and head values to log; values that are not finite are left out."""
    scalars, every = {}, {}
    for name, one in figures.items():
        for layer, value in zip(heads, one.of_layers(heads), strict=True):
            if np.isfinite(value):
                scalars[f"headwise/{name}/{layer or 'model'}"] = float(value)
        values = one.values
        if len(finite := values[np.isfinite(values)]):
            every[f"headwise/{name}"] = finite
    return scalars, every


def _tensorboard(
    writer: Any, step: int, scalars: dict[str, float], heads: dict[str, Array], alarms: list[str]
) -> None:
    for tag, value in scalars.items():
        writer.add_scalar(tag, value, step)
    for tag, values in heads.items():
        writer.add_histogram(tag, values, step)
    if alarms:
        writer.add_text("headwise/alarms", "\n\n".join(alarms), step)


def _wandb(run: Any) -> Tracker:
    """Return a tracker that logs against `headwise/step`, so the run's own steps do not change."""
    defined = False

    def log(
        step: int, scalars: dict[str, float], heads: dict[str, Array], alarms: list[str]
    ) -> None:
        nonlocal defined
        if not defined:
            run.define_metric("headwise/step")
            run.define_metric("headwise/*", step_metric="headwise/step")
            defined = True
        texts = {"headwise/alarms": "\n".join(alarms)} if alarms else {}
        run.log({"headwise/step": step, **scalars, **_histograms("wandb", heads), **texts})

    return log


def _trackio(
    run: Any, step: int, scalars: dict[str, float], heads: dict[str, Array], alarms: list[str]
) -> None:
    run.log({**scalars, **_histograms("trackio", heads)}, step=step)


def _histograms(package: str, heads: dict[str, Array]) -> dict[str, Any]:
    histogram = sys.modules[package].Histogram
    return {f"{tag}/heads": histogram(values) for tag, values in heads.items()}

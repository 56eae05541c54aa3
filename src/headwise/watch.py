"""`watch(model)`: statistics of every head of a model while it runs, without editing it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .attend import Seen, observe, table_rows
from .evidence import Statistic
from .layer import MultiHeadAttention
from .readings import Reading
from .running import Running


class Watched:
    """What a watched model's heads did: `seen[module name]`, and `table()` over all of them."""

    def __init__(self, names: list[str], running: bool = False) -> None:
        self._modules = {name: WatchedModule(name, running) for name in names}

    def __getitem__(self, module: str) -> WatchedModule:
        """The calls of one module, by its qualified name.

        Raises:
            KeyError: a name that is no watched module; the message lists those that are.
        """
        if module not in self._modules:
            raise KeyError(f"{module!r} is not watched; there are: {', '.join(self._modules)}")
        return self._modules[module]

    @property
    def modules(self) -> tuple[str, ...]:
        """The qualified names of the watched modules, in the model's order."""
        return tuple(self._modules)

    def table(self) -> list[dict[str, Any]]:
        """A row per (layer, head): `layer`, `head`, `calls`, and a number per statistic.

        Means are over calls, batch and valid queries; `max_logit` is the maximum;
        `<name>_coverage` is the share of queries that had a target.
        """
        return [row for module in self._modules.values() for row in module.table()]


class WatchedModule:
    """The calls of one attention module: each on its own in `calls`, or all in one `running`."""

    def __init__(self, name: str, running: bool = False) -> None:
        self.name = name
        self.heads = 0
        self.calls: list[dict[str, Reading]] = []
        self.running = Running() if running else None

    def add(self, seen: Seen, first_key: int = 0) -> None:
        """Keep a call's statistics, and nothing else of it."""
        self.heads = seen.out.shape[1]
        if self.running is not None:
            self.running.add(seen, first=first_key)
        else:
            self.calls.append(dict(seen.readings))

    def __getitem__(self, statistic: str) -> Tensor:
        """A statistic's tensor; of several calls of equal shape, one after another in the batch.

        Of a running watch, what `Running` gives: `[H]`, or `[B, H, S]` of sums per key.

        Raises:
            KeyError: nothing of that name was observed.
            ValueError: calls of different shapes, which `calls` holds one by one.
        """
        if self.running is not None and self.running.calls:
            return self.running[statistic]
        if not self.calls:
            raise KeyError(f"{self.name!r} was not called while it was watched")
        if statistic not in self.calls[0]:
            known = ", ".join(self.calls[0])
            raise KeyError(f"{statistic!r} was not observed in {self.name!r}; there are: {known}")
        values = [call[statistic].values for call in self.calls]
        if len({v.shape[1:] for v in values}) > 1:
            shapes = ", ".join(str(list(v.shape)) for v in values)
            raise ValueError(
                f"{self.name!r} was called with different lengths, so {statistic!r} is no one "
                f"tensor ({shapes}); take calls[n][{statistic!r}].values"
            )
        return values[0] if len(values) == 1 else torch.cat(values)

    def table(self) -> list[dict[str, Any]]:
        """A row per head; none if the module was not called."""
        if self.running is not None:
            calls = self.running.calls
            return [
                {"layer": self.name, "head": row["head"], "calls": calls, **row}
                for row in self.running.table()
            ]
        if not self.calls:
            return []
        readings = {name: [call[name] for call in self.calls] for name in self.calls[0]}
        rows = table_rows(readings, self.heads)
        return [
            {"layer": self.name, "head": h, "calls": len(self.calls), **row}
            for h, row in enumerate(rows)
        ]


@contextmanager
def watch(
    model: nn.Module,
    *statistics: Statistic,
    queries: int | Sequence[int] | Tensor | None = None,
    seed: int = 0,
    running: bool = False,
    gradients: bool = False,
) -> Iterator[Watched]:
    """See every head of a model while it runs; its outputs stay bit for bit the same.

    Watches the model's `MultiHeadAttention` layers. Only the statistics are kept; on exit, also
    after an exception, the model is as it was.

    Args:
        model: any module that holds `MultiHeadAttention` layers (or is one).
        statistics: what to take of every call, such as `Entropy()`, `Mass(Previous())`.
        queries: look at so many queries of every call only, or at these, as in `observe()`.
        seed: of the draw.
        running: add calls up as they come (`Running`) in place of keeping each one's statistics:
            memory stays constant over a generation or a data set.
        gradients: keep the graph of LSE, entropy, distance and masses, so that they can stand in a
            loss, as in `observe()`; by default what is seen is detached.

    Raises:
        ValueError: no attention layer in the model; a model that is being watched already;
            `running` together with `gradients`.

    >>> import headwise as hw
    >>> layer = hw.MultiHeadAttention(24, num_heads=3)
    >>> with hw.watch(layer, hw.Entropy()) as seen:
    ...     out = layer(torch.randn(2, 7, 24), mask=hw.Causal())
    >>> [row["head"] for row in seen.table()]
    [0, 1, 2]
    """
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, MultiHeadAttention)
    }
    if not layers:
        raise ValueError(
            f"watch({type(model).__name__}): the model holds no headwise.MultiHeadAttention, "
            f"and no other attention is known."
        )
    for name, layer in layers.items():
        if layer.observer is not None:
            raise ValueError(f"watch({type(model).__name__}): {name!r} is being watched already.")
    if running and gradients:
        raise ValueError(
            f"watch({type(model).__name__}, running=True, gradients=True): sums over calls have no "
            f"gradient; watch the calls of one loss without running."
        )
    watched = Watched(list(layers), running)
    for name, layer in layers.items():
        layer.observer = _observer(watched[name], statistics, queries, seed, gradients)
    try:
        yield watched
    finally:
        for layer in layers.values():
            layer.observer = None


def _observer(
    module: WatchedModule,
    statistics: tuple[Statistic, ...],
    queries: int | Sequence[int] | Tensor | None,
    seed: int,
    gradients: bool,
) -> Any:
    def run(
        layer: MultiHeadAttention, q: Tensor, k: Tensor, v: Tensor, keywords: dict[str, Any]
    ) -> Tensor:
        seen = observe(
            *(q, k, v, *statistics),
            queries=queries,
            seed=seed,
            gradients=gradients,
            projection=layer.projection,
            **keywords,
        )
        module.add(seen, layer.first_key)
        return seen.out

    return run

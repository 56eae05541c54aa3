"""Effects of heads on a loss for each sample, and joining of tables of heads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from .._tables import HeadTable, frame_of
from ..core.numbers import fault_of_flags, format_value
from .head_address import Layer, joined_numbers, module_of

if TYPE_CHECKING:
    from pandas import DataFrame

Rows = list[dict[str, Any]]


@runtime_checkable
class Tabled(Protocol):
    """A source of a table of heads, such as the result of `watch()`."""

    def table(self) -> Rows: ...


class HeadEffects(HeadTable):
    """The effects of every head on a loss: `effects[module][metric]` is `[N, H]`, a row per sample.

    Modules are given by qualified name or layer number. The metrics are `importance` and
    `ablation_estimate` of `importance()`, or `ablation` of `ablation_scan()`, on the CPU in
    float64.
    """

    def __init__(
        self, samples: Mapping[str, Mapping[str, Tensor]], numbers: Mapping[str, int] | None = None
    ) -> None:
        self._samples = {module: dict(figures) for module, figures in samples.items()}
        self.numbers = dict(numbers or {name: n for n, name in enumerate(samples)})

    def __repr__(self) -> str:
        names = dict.fromkeys(name for figures in self._samples.values() for name in figures)
        modules, samples = len(self._samples), self.samples
        return (
            f"<HeadEffects: {modules} module{'s' * (modules != 1)}, {samples} "
            f"sample{'s' * (samples != 1)}; {', '.join(names) or 'no figures'}>"
        )

    def __getitem__(self, module: Layer) -> dict[str, Tensor]:
        """Return the metrics of one module, by its name or the number of the layer: `[N, H]` each.

        Raises:
            KeyError: the module is unknown; the message lists the known ones.
        """
        module = module_of(module, self.numbers)
        if module not in self._samples:
            raise KeyError(f"{module!r} was not seen; there are: {', '.join(self._samples)}")
        return self._samples[module]

    @property
    def modules(self) -> tuple[str, ...]:
        """The qualified names of the modules, in the order of their first calls."""
        return tuple(self._samples)

    @property
    def samples(self) -> int:
        """The number of samples."""
        figures = (figure for module in self._samples.values() for figure in module.values())
        return len(next(figures, ()))

    def table(self, *, normalise: bool = False) -> Rows:
        """Return a row per (layer, head): `layer`, `head`, `module`, and each metric's sample mean.

        `<metric>_se` is its standard error, for two samples or more.

        Args:
            normalise: divide by the metric's l2 norm over the heads of the same module, so that
                layers can be compared (Michel et al. 2019 §4.1, after Molchanov et al. 2017).

        Raises:
            ValueError: `normalise` is neither True nor False.
        """
        if fault := fault_of_flags(normalise=normalise):
            raise ValueError(f"table(normalise={format_value(normalise)}): {fault}.")
        return [
            {"layer": self.numbers[module], **row}
            for module, figures in self._samples.items()
            for row in _module_rows(module, figures, normalise)
        ]

    def to_pandas(self, *, normalise: bool = False) -> DataFrame:
        """Return `table()` as a pandas `DataFrame`, a row per (layer, head).

        Raises:
            ImportError: pandas is not installed.
        """
        return frame_of("effects", lambda: self.table(normalise=normalise))


def _module_rows(module: str, figures: dict[str, Tensor], normalise: bool) -> Rows:
    columns: dict[str, Tensor] = {}
    for name, samples in figures.items():
        mean, count = samples.mean(0), len(samples)
        norm = torch.linalg.vector_norm(mean) if normalise else torch.ones(())
        norm = torch.where(norm > 0, norm, 1.0)
        columns[name] = mean / norm
        if count > 1:
            columns[f"{name}_se"] = samples.std(0) / count**0.5 / norm
    lists = {name: values.tolist() for name, values in columns.items()}
    heads = len(next(iter(lists.values())))
    return [
        {"head": h, "module": module, **{name: values[h] for name, values in lists.items()}}
        for h in range(heads)
    ]


def gather(
    parts: Sequence[tuple[int, Mapping[str, Mapping[str, Tensor]]]], numbers: Mapping[str, int]
) -> HeadEffects:
    """Join batches, each given by its number of samples and its modules' metrics `[B, H]`.

    For a module that did not run in a batch, effects are 0. `numbers` are the layer numbers.
    """
    like = {module: figures for _, part in parts for module, figures in part.items()}
    return HeadEffects(
        {
            module: {
                name: torch.cat(
                    [
                        part[module][name].detach().double().cpu()
                        if module in part
                        else torch.zeros(count, example.shape[1], dtype=torch.float64)
                        for count, part in parts
                    ]
                )
                for name, example in figures.items()
            }
            for module, figures in like.items()
        },
        numbers,
    )


def concatenated(parts: Sequence[HeadEffects]) -> HeadEffects:
    """Concatenate the samples of several results; modules that one lacks have effects of 0."""
    numbers = reduce(joined_numbers, [part.numbers for part in parts])
    samples = [(part.samples, {name: part[name] for name in part.modules}) for part in parts]
    return gather(samples, numbers)


def join_tables(*tables: Tabled | Iterable[Mapping[str, Any]]) -> Rows:
    """Join tables of the same heads: rows with equal `module` and `head` are merged.

    A head not in a table gets none of its metrics. Objects with a `table()` method are accepted.
    Rows without `module` are joined by `layer`, and layers are numbered as in the first table.

    Raises:
        ValueError: two tables have different values of a metric for a head; or an argument is not a
            table of heads.

    >>> looks = [{"layer": 0, "head": 1, "module": "attn", "entropy": 1.5}]
    >>> matters = [{"layer": 0, "head": 1, "module": "attn", "importance": 0.25}]
    >>> join_tables(looks, matters)
    [{'layer': 0, 'head': 1, 'module': 'attn', 'entropy': 1.5, 'importance': 0.25}]
    """
    joined: dict[tuple[Layer, int], dict[str, Any]] = {}
    for row in (dict(row) for table in tables for row in _rows_of(table)):
        module = row.get("module", row["layer"])
        there = joined.setdefault((module, row["head"]), {})
        row["layer"] = there.get("layer", row["layer"])
        clashing = [name for name in row if there.get(name, row[name]) != row[name]]
        if clashing:
            raise ValueError(
                f"join_tables(…): head {row['head']} of {module!r} has more than one "
                f"{clashing[0]}; rename it, or leave it out of one table."
            )
        there.update(row)
    return list(joined.values())


def _rows_of(given: Any) -> Iterable[Mapping[str, Any]]:
    rows = given.table() if isinstance(given, Tabled) else given
    rows = list(rows) if isinstance(rows, Iterable) else [rows]
    if not all(isinstance(row, Mapping) and {"layer", "head"} <= row.keys() for row in rows):
        raise ValueError(
            f"join_tables(…): {type(given).__name__} is not a table of heads; give rows with a "
            f"layer and a head, such as seen.table()."
        )
    return rows

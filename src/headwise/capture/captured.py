"""The results of a watch: modules, their calls, and the table over all of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._io import check_suffix
from .._tables import HeadTable, frame_of
from ..stats.detached import without_graph
from ..stats.moments import Moments
from ..stats.record import Reading
from ..stats.running import Running
from ..stats.tables import (
    HeadSummary,
    check_texts,
    split_each,
    summarise,
    summarise_each,
    summary_rows,
    unavailable,
)
from .bundle import together
from .head_address import Layer, as_written, joined_numbers, module_of
from .io import read_tree, write_tree

if TYPE_CHECKING:
    from pandas import DataFrame


def _not_called() -> str:
    return "the model was not called while it was watched"


class Watched(HeadTable):
    """The statistics of a watched model: `seen[module name]`, and `table()` over all modules.

    Iteration yields the names of modules, like a dict, in the order of their first calls. Results
    of several texts or ranks can be added: `seen + other`, or `sum(...)`.

    `left_out` has the reasons why attention of modules was not captured completely; `unavailable`
    has the reasons why heads lack metrics.

    Args:
        running: accumulate over calls (`Running`) instead of keeping each one.
        why: returns the reason, for error messages, if nothing was captured.

    >>> import headwise as hw
    >>> layer = hw.MultiHeadAttention(24, num_heads=3)
    >>> seen = []
    >>> for length in (5, 7):
    ...     with hw.watch(layer, hw.Entropy()) as one:
    ...         out = layer(torch.randn(2, length, 24), mask=hw.Causal())
    ...     seen.append(one)
    >>> [(row["head"], row["calls"]) for row in sum(seen).table()]
    [(0, 2), (1, 2), (2, 2)]
    """

    def __init__(self, running: bool = False, why: Callable[[], str] | None = None) -> None:
        self.left_out: dict[str, str] = {}
        self._modules: dict[str, WatchedModule] = {}
        self._running, self._why = running, why or _not_called
        self.numbers: dict[str, int] = {}  # of the layers, by the names of modules
        self.drawn: frozenset[int] = frozenset()  # the seeds that queries were drawn with

    def add(
        self,
        module: str,
        readings: Mapping[str, Reading],
        heads: int,
        first_key: int = 0,
        first_head: int = 0,
        queries: tuple[int, int] | None = None,
        lost: bool = False,
        streams: Mapping[str, tuple[int, int]] = MappingProxyType({}),
    ) -> None:
        """Add the readings of a call of `module`.

        Args:
            first_head: the index of the first of these heads in its layer.
            queries: the numbers of observed queries and of all queries, if known.
            lost: True if the call had a graph and the readings have none.
            streams: the ranges of streams of tokens that attend jointly, by name.

        Raises:
            ValueError: heads or statistics differ from those of earlier calls.
        """
        kept = self._modules.get(module)
        if kept is None:
            kept = WatchedModule(module, self._running)
            kept.streams = dict(streams)
        elif kept.streams != streams:
            kept.streams = {}
        kept.add(readings, heads, first_key, first_head, queries)
        kept.lost |= lost
        kept.layer = self.numbers.setdefault(module, len(self.numbers))
        self._modules[module] = kept

    def __getitem__(self, module: Layer) -> WatchedModule:
        """Return the calls of one module, by its qualified name or the number of the layer.

        Raises:
            KeyError: a name that is not that of a watched module; the message lists those that are.
            ValueError: nothing was seen; the message says why.
        """
        self.must_not_be_empty()
        name = module_of(module, self.numbers)
        if name not in self._modules:
            why = self.left_out.get(name)
            there = f"there are: {', '.join(self._modules)}"
            raise KeyError(f"{name!r} was not seen{f', for {why}' if why else ''}; {there}")
        return self._modules[name]

    @property
    def modules(self) -> tuple[str, ...]:
        """The qualified names of the watched modules, in the order of their first calls."""
        return tuple(self._modules)

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __contains__(self, module: object) -> bool:
        return isinstance(module, str) and as_written(module) in self._modules

    def __len__(self) -> int:
        return len(self._modules)

    def __repr__(self) -> str:
        heads = sum(module.heads for module in self._modules.values())
        names = dict.fromkeys(name for seen in self._modules.values() for name in seen.statistics)
        count = f"{len(self)} module{'s' * (len(self) != 1)}"
        out = f"; {len(self.left_out)} left out" if self.left_out else ""
        return f"<Watched: {count}, {heads} heads{out}; {', '.join(names) or 'no figures'}>"

    def table(self, texts: bool = False) -> list[dict[str, Any]]:
        """Return a row per (layer, head): `layer`, `head`, `module`, `calls`, and each metric.

        `layer` is the index of the module among all that attend, in the order of their first calls.

        `queries` is the number of observed queries, out of `of_queries`, over calls and batch,
        padding included. Means are over calls, batch and valid queries; `max_logit` is the maximum
        (`max_logit_sampled` that of sampled queries, a lower bound); `<name>_coverage` is the share
        of queries that had a target; `<name>_se` is the standard error if queries were sampled at
        random and the mean over all of them is not available (`Seen.table`). A row omits metrics
        that are unknown for its head (NaN in tensors); `unavailable` has the reasons.

        Args:
            texts: treat every batch row of every call as a separate text; `<name>_se` is then the
                standard error of the mean over texts: with `n_u` valid queries of mean `m_u` in
                text u of U, `√(U / (U − 1) · Σ n_u² (m_u − m)²) / Σ n_u`. Needs 2 or more texts.

        Raises:
            ValueError: nothing was captured, for the reason in the message; `texts` is neither True
                nor False.
        """
        check_texts(texts)
        self.must_not_be_empty()
        figures = self._figures(texts)
        return [row for name, module in self._modules.items() for row in module.rows(figures[name])]

    def _figures(self, texts: bool = False) -> dict[str, dict[str, HeadSummary | None]]:
        """Return each module's metrics as a number per head, computed for all modules at once."""
        if self._running:
            return {name: module.figures(texts) for name, module in self._modules.items()}
        found: dict[str, dict[str, HeadSummary | None]] = {name: {} for name in self._modules}
        modules, metrics, readings, heads = [*self._modules.values()], [], [], []
        for places, calls in together([module.calls for module in modules]):
            some = [modules[place] for place in places]
            every = [dict(call.items()) for call in calls]
            for metric in some[0].statistics:
                metrics.append((some, metric))
                readings.append([call[metric] for call in every])
                heads.append([module.heads for module in some])
        parts = split_each(summarise_each(readings, texts), heads)
        for (some, metric), each in zip(metrics, parts, strict=True):
            for module, part in zip(some, each, strict=True):
                found[module.name][metric] = part
        return found

    @property
    def unavailable(self) -> dict[str, dict[str, str]]:
        """Return the reasons why heads lack metrics in the table: `[module name][metric]`.

        A metric is unknown if it cannot be computed for a call (such as `Norms()` where only the
        scores are visible), if the attention weights are NaN, or if no query counts in its mean.
        It is NaN in tensors. Modules whose metrics are all known are not listed.

        >>> import headwise as hw
        >>> layer = hw.MultiHeadAttention(24, num_heads=3)
        >>> with hw.watch(layer, hw.Entropy()) as seen:  # one key: the maximum is 0
        ...     out = layer(torch.randn(2, 1, 24))
        >>> seen.unavailable
        {'': {'entropy_share': 'heads 0, 1, 2: no query counts in its mean'}}
        """
        found = {
            name: unavailable(figures, self._modules[name].first_head)
            for name, figures in self._figures().items()
        }
        return {name: reasons for name, reasons in found.items() if reasons}

    def to_pandas(self, texts: bool = False) -> DataFrame:
        """Return `table()` as a pandas `DataFrame`, with NaN for omitted metrics.

        Raises:
            ImportError: pandas is not installed.
            ValueError: nothing was seen.
        """
        return frame_of("seen", lambda: self.table(texts))

    def save(self, path: str | Path) -> None:
        """Write the result atomically to one safetensors file, for `Watched.load`.

        Raises:
            OSError: the folder does not exist, or the path is a folder.
            ValueError: the suffix is that of another format, such as `.csv`.
        """
        path = Path(path)
        check_suffix(
            path,
            "a safetensors file",
            (".safetensors",),
            f"write a table by seen.to_pandas(), such as seen.to_pandas().to_csv({path.name!r})",
        )
        modules = [module.state() for module in self._modules.values()]
        content = {"running": self._running, "modules": modules, "left_out": self.left_out}
        content["drawn"], content["numbers"] = sorted(self.drawn), self.numbers
        write_tree(path, content)

    @classmethod
    def load(cls, path: str | Path) -> Watched:
        """Read a file written by `save`, bit for bit, onto the CPU.

        Raises:
            OSError: the file does not exist, or is a folder.
            ValueError: the file was not written by `save`, or is damaged.

        >>> import headwise as hw, tempfile
        >>> layer = hw.MultiHeadAttention(24, num_heads=3)
        >>> with hw.watch(layer, hw.Entropy()) as seen:
        ...     out = layer(torch.randn(2, 7, 24), mask=hw.Causal())
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     seen.save(f"{folder}/seen.safetensors")
        ...     again = Watched.load(f"{folder}/seen.safetensors")
        >>> torch.equal(again[""]["entropy"], seen[""]["entropy"])
        True
        """
        path = Path(path)
        content = read_tree(path)
        try:
            seen = cls(bool(content["running"]))
            left_out = content.get("left_out", {})
            seen.left_out = {str(name): str(why) for name, why in left_out.items()}
            seen.drawn = frozenset(map(int, content.get("drawn", ())))
            for state in content["modules"]:
                seen._modules[state["name"]] = WatchedModule.of_state(state)
            numbers = content.get("numbers", {name: n for n, name in enumerate(seen)})
            seen.numbers = {name: int(numbers[name]) for name in seen}
            for name, module in seen._modules.items():
                module.layer = seen.numbers[name]
        except (KeyError, TypeError, AttributeError, IndexError, ValueError, RuntimeError) as error:
            raise ValueError(f"{path}: its header is damaged ({error!r})") from None
        return seen

    def __add__(self, other: Watched) -> Watched:
        """Return the union of two results; neither changes. Modules in both get the calls of both.

        Raises:
            ValueError: heads or statistics of a module differ, or only one result is running.
        """
        if not isinstance(other, Watched):
            return NotImplemented
        kinds = {seen._running for seen in (self, other) if seen._modules} or {self._running}
        if len(kinds) > 1:
            raise ValueError(
                "seen + other: one was watched with running=True and the other keeps every call; "
                "watch both alike."
            )
        if self.drawn & other.drawn:
            warnings.warn(
                "seen + other: both sampled queries with the same seed, and so the same ones in "
                "calls of one length: standard errors of the sum are too small; watch each with a "
                "seed=… of its own.",
                stacklevel=2,
            )
        total = Watched(kinds.pop(), self._why)
        total.drawn = self.drawn | other.drawn
        total.left_out = other.left_out | self.left_out
        total.numbers = joined_numbers(self.numbers, other.numbers)
        for seen in (self, other):
            for name, module in seen._modules.items():
                known = total._modules.get(name) or WatchedModule(name, total._running)
                total._modules[name] = known + module
                total._modules[name].layer = total.numbers[name]
        return total

    def __radd__(self, other: object) -> Watched:
        return self + Watched(self._running) if other == 0 else NotImplemented

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_why": _not_called}  # why may hold on to the whole model

    def must_not_be_empty(self) -> None:
        """Raise ValueError with the reason if nothing was captured."""
        if not self._modules:
            raise ValueError(f"no attention was seen: {self._why()}")


class WatchedModule:
    """The calls of one attention module: separate in `calls`, or accumulated in `running`.

    If streams of tokens attend jointly (text and image in Flux, SD3 and Qwen-Image), `streams` has
    the positions `(start, stop)` of each by its name, for `Segments`. They are known if each stream
    has its own output projection and if they are the same in all calls; otherwise `streams` is
    empty. If neither projection is named after the text, the names are those of the projections.
    `registers` are the tokens that no projection reads.
    """

    def __init__(self, name: str, running: bool = False) -> None:
        self.name = name
        self.heads = self.first_head = self.layer = 0
        self.calls: list[Mapping[str, Reading]] = []
        self.running = Running() if running else None
        self.queries: tuple[int, int] | None = (0, 0)
        self._names: tuple[str, ...] = ()
        self.streams: dict[str, tuple[int, int]] = {}
        self.lost = False  # True if calls had a graph and their statistics have none

    def __repr__(self) -> str:
        calls = len(self.calls) if self.running is None else self.running.calls
        count = f"{calls} call{'s' * (calls != 1)}"
        figures = ", ".join(self.statistics) or "no figures"
        return f"<{self.name or 'the model'}: {count}, {self.heads} heads; {figures}>"

    def add(
        self,
        readings: Mapping[str, Reading],
        heads: int,
        first_key: int = 0,
        first_head: int = 0,
        queries: tuple[int, int] | None = None,
    ) -> None:
        """Add the statistics of a call.

        Raises:
            ValueError: heads or statistics differ from those of earlier calls.
        """
        names = tuple(iter(readings))  # without len(), which would list them first
        if self.heads:
            self._must_continue(heads, names, first_head)
        else:
            self.heads, self.first_head, self._names = heads, first_head, names
        self.queries = _both(self.queries, queries)
        if self.running is not None:
            self.running.take(readings, heads, first_key)
        else:
            self.calls.append(readings)

    @property
    def statistics(self) -> tuple[str, ...]:
        """The names of the observed statistics."""
        if self.running is not None:
            return self.running.names
        return self._names

    def _must_continue(self, heads: int, statistics: tuple[str, ...], first_head: int) -> None:
        known = self.statistics
        same = statistics == known or set(statistics) == set(known)
        if self.heads and not (same and (self.heads, self.first_head) == (heads, first_head)):
            own, others = (
                f"{', '.join(names) or 'nothing'} of {count} heads{f' from {first}' * (first > 0)}"
                for names, count, first in (
                    (statistics, heads, first_head),
                    (known, self.heads, self.first_head),
                )
            )
            raise ValueError(
                f"{self.name!r}: {own} cannot be combined with the earlier {others}; watch the "
                f"same statistics of the same model."
            )

    def __add__(self, other: WatchedModule) -> WatchedModule:
        """Return the calls of both; neither changes."""
        self._must_continue(other.heads, other.statistics, other.first_head)
        total = WatchedModule(self.name)
        total.heads, total.first_head = other.heads, other.first_head
        total.queries = _both(self.queries, other.queries)
        both = [one.streams for one in (self, other) if one.heads]
        total.streams = both[0] if both and both[0] == both[-1] else {}
        total.calls, total._names = [*self.calls, *other.calls], self._names or other._names
        if self.running is not None and other.running is not None:
            total.running = self.running + other.running
        return total

    def __getitem__(self, statistic: str) -> Tensor:
        """Return a statistic's tensor; calls of equal shape are concatenated along the batch.

        For a running watch, the result of `Running`: `[H]`, or `[B, H, S]` for sums per key.

        Raises:
            KeyError: the statistic was not observed.
            ValueError: calls have different shapes; use `calls` instead.
        """
        self._must_have(statistic)
        if self.running is not None:
            return self.running[statistic]
        values = [call[statistic].values for call in self.calls]
        if self.lost:
            values = [without_graph(one) for one in values]
        if len({v.shape[1:] for v in values}) > 1:
            shapes = ", ".join(str(list(v.shape)) for v in values)
            raise ValueError(
                f"{self.name!r} was called with different lengths, so {statistic!r} is no one "
                f"tensor ({shapes}); take seen[{self.name!r}].calls[n][{statistic!r}].values"
            )
        return values[0] if len(values) == 1 else torch.cat(values)

    def _must_have(self, statistic: str) -> None:
        if statistic not in self.statistics:
            known = ", ".join(self.statistics) or "nothing"
            raise KeyError(f"{statistic!r} was not observed in {self.name!r}; there are: {known}")

    def sampled(self, statistic: str) -> bool:
        """Return True if the maximum of a statistic is that of sampled queries: a lower bound.

        Raises:
            KeyError: the statistic was not observed.
        """
        if self.running is not None:
            return self.running.sampled(statistic)
        self._must_have(statistic)
        return any(call[statistic].largest and call[statistic].sampled for call in self.calls)

    def table(self, texts: bool = False) -> list[dict[str, Any]]:
        """Return a row per head."""
        check_texts(texts)
        return self.rows(self.figures(texts))

    def rows(self, figures: dict[str, HeadSummary | None]) -> list[dict[str, Any]]:
        """Return a row per head with these metrics."""
        calls = len(self.calls) if self.running is None else self.running.calls
        counts = {} if self.queries is None else dict(zip(_COUNTS, self.queries, strict=True))
        return [
            {
                "layer": self.layer,
                "head": head,
                "module": self.name,
                "calls": calls,
                **counts,
                **row,
            }
            for head, row in enumerate(summary_rows(figures, self.heads), self.first_head)
        ]

    def figures(self, texts: bool = False) -> dict[str, HeadSummary | None]:
        """Return each metric as a number per head; `None` for maps."""
        if self.running is not None:
            return self.running.summaries(texts)
        return {n: summarise([call[n] for call in self.calls], texts) for n in self.statistics}

    @property
    def unavailable(self) -> dict[str, str]:
        """Return the reason for each metric that heads lack in the table, by its name."""
        return unavailable(self.figures(), self.first_head)

    def state(self) -> dict[str, Any]:
        """Return the result as plain values and tensors."""
        calls = [
            {name: _state_of(reading) for name, reading in call.items()} for call in self.calls
        ]
        running = None if self.running is None else self.running.state()
        return {
            "name": self.name,
            "heads": self.heads,
            "first_head": self.first_head,
            "queries": self.queries,
            "streams": self.streams,
            "calls": calls,
            "running": running,
        }

    @classmethod
    def of_state(cls, state: dict[str, Any]) -> WatchedModule:
        """Return the result from its `state()`.

        Raises:
            KeyError, TypeError, AttributeError: the state is invalid.
            ValueError: statistics have other heads.
        """
        result = cls(state["name"])
        for call in state["calls"]:
            readings = {name: _reading_of(saved) for name, saved in call.items()}
            for reading in readings.values():
                _check_reading(reading, state["heads"])
            result.add(readings, state["heads"])
        result.heads, result.first_head = state["heads"], int(state.get("first_head", 0))
        streams = state.get("streams", {}).items()
        result.streams = {str(name): (int(start), int(stop)) for name, (start, stop) in streams}
        counts = state.get("queries")  # older files have none
        result.queries = None if counts is None else (int(counts[0]), int(counts[1]))
        if state["running"] is not None:
            result.running = Running.of_state(state["running"])
            if result.running.heads != result.heads:
                raise ValueError(f"figures of other heads than {result.heads}")
            result.running.table(texts=True)  # raises if its parts are inconsistent
        return result


def _state_of(reading: Reading) -> dict[str, Any]:
    """Return a reading as plain values and tensors."""
    reading = reading.detached()
    return vars(reading) | {"whole": None if reading.whole is None else vars(reading.whole)}


def _reading_of(state: dict[str, Any]) -> Reading:
    """Return a reading from its `_state_of()`; older files lack some of it."""
    whole = state.get("whole")
    reading = Reading(**{name: value for name, value in state.items() if name != "whole"})
    return reading if whole is None else replace(reading, whole=Moments(**whole))


def _check_reading(reading: Reading, heads: int) -> None:
    """Check that the tensors of a reading are consistent.

    Raises:
        AttributeError, IndexError, RuntimeError: a value is not a tensor, or has other sizes.
        ValueError: statistics have other heads or dtypes.
    """
    if reading.values.shape[1] != heads:
        raise ValueError(f"figures of other heads than {heads}")
    for rows in (reading.rows, reading.among):
        if rows is not None and rows.expand(reading.values.shape[:3]).dtype != torch.bool:
            raise ValueError(f"rows that are {rows.dtype}")
    if reading.over is not None:
        reading.over.expand(reading.values.shape)
    if reading.error is not None and reading.error.shape != (heads,):
        raise ValueError(f"errors of other heads than {heads}")
    if reading.weights is not None:
        reading.weights.expand(reading.values.shape[:3])
    if reading.whole is not None:
        rows, of_head = reading.values.shape[:2], reading.values.shape[1:2]
        for name, sums in vars(reading.whole).items():
            wanted = of_head if name in ("squares", "largest", "errors") else rows
            if sums is not None and sums.shape != wanted:
                raise ValueError(f"sums of other heads than {heads}")


_COUNTS = ("queries", "of_queries")
"""The columns of the numbers of observed queries and of all queries."""


def _both(one: tuple[int, int] | None, other: tuple[int, int] | None) -> tuple[int, int] | None:
    """Return the sums of the numbers of queries; `None` if one is unknown."""
    return None if one is None or other is None else (one[0] + other[0], one[1] + other[1])

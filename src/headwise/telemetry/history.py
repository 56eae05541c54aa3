"""`History`: the metrics of all heads recorded during training, in one SQLite file."""

from __future__ import annotations

import json
import math
import os
import sqlite3
import threading
import uuid
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .._io import check_suffix, place_for
from .._tables import frame_of, html_summary
from .._text import Brief
from .figures import FIELDS, Array, HeadMetrics, Heads
from .rules import Alarm, RecordedStep

if TYPE_CHECKING:
    from pandas import DataFrame

_MARK, _VERSION = 0x68647773, 1  # "hdws", SQLite's application id, and the format version
_SUFFIXES = (".sqlite", ".sqlite3", ".db")
_WAIT = 0.25
"""Seconds to wait for a file that another process has locked."""

_TABLES = f"""
PRAGMA application_id = {_MARK};
PRAGMA user_version = {_VERSION};
CREATE TABLE about (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE layers (place INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, heads INTEGER NOT NULL);
CREATE TABLE figures (
    step INTEGER NOT NULL, statistic TEXT NOT NULL, kind TEXT NOT NULL,
    queries INTEGER NOT NULL, of_queries INTEGER NOT NULL, data BLOB NOT NULL,
    PRIMARY KEY (step, statistic));
CREATE TABLE alarms (
    step INTEGER NOT NULL, rule TEXT NOT NULL, statistic TEXT NOT NULL,
    layer TEXT NOT NULL, head INTEGER NOT NULL, value REAL NOT NULL,
    PRIMARY KEY (step, rule, layer, head));
"""
_SCALARS = """CREATE TABLE IF NOT EXISTS scalars (
    step INTEGER NOT NULL, name TEXT NOT NULL, value REAL, PRIMARY KEY (step, name));"""
"""A table that files of earlier versions lack; NULL means NaN."""

Scalar = tuple[int, str, float]
"""A scalar of a step, such as its loss: the step, the name and the value."""


@dataclass(frozen=True, eq=False, repr=False)
class Series(Brief):
    """A metric over the recorded steps: `steps` `[n]`, `values` and `errors` `[n, N]`.

    N counts the heads of all layers, as in `History.heads`. Values are means or maxima, depending
    on `kind`: NaN for heads that were not captured, infinity if not finite. `errors` are the
    standard errors of sampled means, 0 for exact ones. `sampled` `[n]` is True for steps with
    sampled queries.
    """

    kind: str
    steps: npt.NDArray[np.int64]
    values: Array
    errors: Array
    sampled: npt.NDArray[np.bool_]


class History:
    """The metrics recorded during training, in one SQLite file that can be read at any time.

    For every step and statistic the file holds each head's sums, squares and counts, or maxima, so
    batches with unequal padding merge exactly. A `History` only reads; `Monitor` writes.

    Args:
        path: the file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file was not written by a `Monitor`.

    >>> import tempfile, torch, headwise as hw
    >>> model = hw.MultiHeadAttention(24, num_heads=3)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = f"{folder}/heads.sqlite"
    ...     with hw.Monitor(model, every=2, history=path) as monitor:
    ...         for _ in range(4):
    ...             out = model(torch.randn(2, 7, 24), mask=hw.Causal())
    ...             alarms = monitor.step()
    ...     history = hw.History(path)
    ...     history.steps, history["entropy"].values.shape, history.heads[2]
    ([1, 2, 4], (3, 3), ('', 2))
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise FileNotFoundError(f"History({str(path)!r}): there is no such file.")
        self._file = _File(self.path, write=False)

    # ── contents ────────────────────────────────────────────────────────────────────────────────

    @property
    def about(self) -> dict[str, Any]:
        """The versions and settings of the monitor that wrote the file."""
        rows = self._file.read("SELECT name, value FROM about ORDER BY name")
        return {name: json.loads(value) for name, value in rows}

    @property
    def unavailable(self) -> dict[str, dict[str, str]]:
        """The reasons why layers lack metrics: `unavailable[layer][metric]`."""
        return self.about.get("unavailable", {})

    @property
    def layers(self) -> dict[str, int]:
        """The number of heads of each layer, in the order of `heads`."""
        return dict(self._file.read("SELECT name, heads FROM layers ORDER BY place"))

    @property
    def heads(self) -> list[tuple[str, int]]:
        """The layer and the index of each head, in the order of the axis N."""
        return [(layer, head) for layer, heads in self.layers.items() for head in range(heads)]

    @property
    def steps(self) -> list[int]:
        """The recorded steps, ascending."""
        rows = self._file.read("SELECT DISTINCT step FROM figures ORDER BY step")
        return [step for (step,) in rows]

    @property
    def statistics(self) -> list[str]:
        """The names of the recorded metrics."""
        rows = self._file.read("SELECT DISTINCT statistic FROM figures ORDER BY statistic")
        return [name for (name,) in rows]

    @property
    def alarms(self) -> list[Alarm]:
        """Every alarm, by step."""
        rows = self._file.read(
            "SELECT step, rule, statistic, layer, head, value FROM alarms "
            "ORDER BY step, rule, layer, head"
        )
        numbers = {layer: number for number, layer in enumerate(self.layers)}
        return [Alarm(*row[:6], number=numbers.get(row[3], 0)) for row in rows]

    @property
    def scalars(self) -> dict[str, dict[int, float]]:
        """The scalars passed to `Monitor.log`, and the learning rate, by name and step.

        `scalars["loss"][40]` is the loss of step 40.
        """
        found: dict[str, dict[int, float]] = {}
        if self._file.read("SELECT 1 FROM sqlite_master WHERE name = 'scalars'"):
            rows = self._file.read("SELECT name, step, value FROM scalars ORDER BY name, step")
            for name, step, value in rows:
                found.setdefault(name, {})[step] = math.nan if value is None else value
        return found

    def __getitem__(self, statistic: str) -> Series:
        """Return a metric over all recorded steps.

        Raises:
            KeyError: the metric was not recorded; the message lists the recorded ones.
        """
        heads = sum(self.layers.values())  # first, so that no metric has more heads
        rows = [(step, figures.wide(heads)) for step, name, figures in self._rows(statistic, heads)]
        if not rows:
            known = ", ".join(self.statistics) or "nothing yet"
            why = next((r[statistic] for r in self.unavailable.values() if statistic in r), "")
            text = f"was not recorded{f', because {why}' if why else ''}"
            raise KeyError(f"{statistic!r} {text}; there are: {known}")
        kinds = rows[-1][1].kind
        rows = [(step, figures) for step, figures in rows if figures.kind == kinds]
        return Series(
            kinds,
            np.array([step for step, _ in rows]),
            np.stack([figures.values for _, figures in rows]),
            np.stack([figures.errors for _, figures in rows]),
            np.array([figures.sampled for _, figures in rows]),
        )

    def records(self, last: int | None = None, until: int | None = None) -> list[RecordedStep]:
        """Return the recorded steps, oldest first: all, or the `last` ones up to `until`."""
        steps = [step for step in self.steps if until is None or step <= until]
        steps = steps if last is None else steps[len(steps) - min(last, len(steps)) :]
        if not steps:
            return []
        found: dict[int, dict[str, HeadMetrics]] = {step: {} for step in steps}
        for step, name, figures in self._rows(None, sum(self.layers.values()), steps[0]):
            if step in found:
                found[step][name] = figures
        return [RecordedStep(step, figures) for step, figures in found.items()]

    def _rows(
        self, statistic: str | None, heads: int, first: int = 0
    ) -> Iterator[tuple[int, str, HeadMetrics]]:
        rows = self._file.read(
            "SELECT step, statistic, kind, queries, of_queries, data FROM figures "
            "WHERE step >= ? AND (? IS NULL OR statistic = ?) ORDER BY step, statistic",
            (first, statistic, statistic),
        )
        for step, name, kind, queries, of_queries, data in rows:
            numbers = np.frombuffer(zlib.decompress(data), dtype="<f8").astype(np.float64)
            numbers = numbers.reshape(len(FIELDS[kind]), -1)[:, :heads]
            yield step, name, HeadMetrics(kind, numbers, queries, of_queries)

    # ── tables ──────────────────────────────────────────────────────────────────────────────────

    def columns(self) -> dict[str, npt.NDArray[Any]]:
        """Return a table as columns: `step`, `layer`, `head`, `module`, and each metric.

        It has a row for each recorded step and head, like `Watched.table()`. `<name>_se` is the
        standard error of sampled means. A metric that was not recorded is NaN.
        """
        heads, steps = self.heads, np.array(self.steps, dtype=np.int64)
        numbers = {module: layer for layer, module in enumerate(self.layers)}
        layers = [numbers[module] for module, _ in heads]
        columns: dict[str, npt.NDArray[Any]] = {
            "step": np.repeat(steps, len(heads)),
            "layer": np.tile(np.array(layers, dtype=np.int64), len(steps)),
            "head": np.tile(np.array([head for _, head in heads], dtype=np.int64), len(steps)),
            "module": np.tile(np.array([name for name, _ in heads], dtype=object), len(steps)),
        }
        for name in self.statistics:
            series = self[name]
            place = np.searchsorted(steps, series.steps)
            columns[name] = _spread(series.values, place, len(steps))
            if series.sampled.any() and series.kind == "mean":
                columns[f"{name}_se"] = _spread(series.errors, place, len(steps))
        return columns

    def to_pandas(self) -> DataFrame:
        """Return `columns()` as a pandas `DataFrame`.

        Raises:
            ImportError: pandas is not installed.
        """
        return frame_of("history", self.columns, "columns()")

    def to_parquet(self, path: str | os.PathLike[str]) -> None:
        """Write `columns()` to a Parquet file.

        Raises:
            ImportError: pyarrow is not installed.
            OSError: the folder does not exist.
            ValueError: the path has the suffix of another format, such as `.csv`.
        """
        try:
            import pyarrow  # pyright: ignore[reportMissingImports]
            from pyarrow import parquet  # pyright: ignore[reportMissingImports]
        except ImportError:
            raise ImportError(
                "history.to_parquet(…): pyarrow is not installed; run `pip install pyarrow`, or "
                "use history.columns()"
            ) from None
        check_suffix(Path(path), "a Parquet file", (".parquet",))
        parquet.write_table(pyarrow.table(self.columns()), place_for(Path(path)))

    def _repr_html_(self) -> str:
        """Return the alarms, by step, and the metrics of every head at the last step."""
        columns = self.columns()
        last = slice(len(columns["step"]) - sum(self.layers.values()), None)
        values = zip(*(column[last].tolist() for column in columns.values()), strict=True)
        rows = [dict(zip(columns, row, strict=True)) for row in values]
        return html_summary(repr(self), self.alarms, rows)

    def __repr__(self) -> str:
        steps, heads = self.steps, sum(self.layers.values())
        text = f"steps {steps[0]} to {steps[-1]}" if steps else "no step yet"
        return f"<History {str(self.path)!r}: {text}; {heads} heads; {', '.join(self.statistics)}>"


def _spread(values: Array, place: npt.NDArray[np.int64], steps: int) -> Array:
    """Return the rows of a series, flat, with NaN at the steps that it lacks."""
    whole = np.full((steps, values.shape[1]), np.nan)
    whole[place] = values
    return whole.ravel()


class HistoryWriter:
    """Write a `History`; each step is written completely or not at all.

    Args:
        path: the file; it is created if missing.
        after: the number of steps already completed; later steps in the file are replaced.

    Raises:
        OSError: the file cannot be created.
        ValueError: the file is not a history, or has the suffix of another format, such as `.csv`.
    """

    def __init__(self, path: str | os.PathLike[str], after: int, about: Mapping[str, Any]) -> None:
        check_suffix(Path(path), "an SQLite file", _SUFFIXES)
        self.path = place_for(Path(path))
        self._after: int | None = after
        self._about = {**about, "writer": uuid.uuid4().hex}
        self._file = _File(self.path, write=True)
        self._lost: sqlite3.Connection | None = None

    def read(self) -> History | None:
        """Return the history in the file; `None` if there is no file yet."""
        return History(self.path) if self.path.exists() else None

    def restore(self) -> bool:
        """Write all steps again if the file was deleted or replaced; return True if so.

        Raises:
            sqlite3.Error, OSError, ValueError: as for `write()`; the next call tries again.
        """
        self._lost = self._lost or self._file.lost()
        if self._lost is None:
            return False
        try:
            with self._file.transaction() as file:
                self._check_writer(file)
                for name, columns in _COLUMNS.items():
                    rows = self._lost.execute(f"SELECT * FROM {name}")
                    marks = ", ".join("?" * columns)
                    file.executemany(f"INSERT OR IGNORE INTO {name} VALUES ({marks})", rows)
        except BaseException:
            self._file.close()  # the file at the path may be replaced again
            raise
        self._lost.close()
        self._lost = None
        return True

    def write(
        self,
        records: Sequence[tuple[RecordedStep, Sequence[Alarm]]],
        layers: Heads,
        unavailable: Mapping[str, Mapping[str, str]] | None = None,
        scalars: Sequence[Scalar] = (),
    ) -> None:
        """Add records with their alarms, and scalars, in one transaction.

        `unavailable` has the reasons for missing metrics, by layer and metric.

        Raises:
            sqlite3.Error, OSError: the disk is full, the file is locked or missing.
            ValueError: another monitor is writing to the file.
        """
        with self._file.transaction() as file:
            self._take_over(file)
            held = list(file.execute("SELECT name, heads FROM layers ORDER BY place"))
            if held != list(layers.items())[: len(held)]:
                raise ValueError(
                    f"{self.path}: its layers or heads differ from those of this model"
                )
            new = list(enumerate(layers.items()))[len(held) :]
            file.executemany(
                "INSERT INTO layers VALUES (?, ?, ?)", [(n, *layer) for n, layer in new]
            )
            reasons_text = json.dumps(unavailable or {})
            file.execute("INSERT OR REPLACE INTO about VALUES ('unavailable', ?)", (reasons_text,))
            for record, alarms in records:
                for name in ("figures", "alarms"):
                    file.execute(f"DELETE FROM {name} WHERE step = ?", (record.step,))
                file.executemany(
                    "INSERT INTO figures VALUES (?, ?, ?, ?, ?, ?)",
                    [(record.step, *_row(item)) for item in record.figures.items()],
                )
                rows = [astuple(alarm)[:-1] for alarm in alarms]
                file.executemany("INSERT OR REPLACE INTO alarms VALUES (?, ?, ?, ?, ?, ?)", rows)
            file.executemany("INSERT OR REPLACE INTO scalars VALUES (?, ?, ?)", scalars)
        self._after = None

    def _take_over(self, file: sqlite3.Connection) -> None:
        """Remove later steps from the file and register this writer, on the first write."""
        if self._check_writer(file):
            return
        if self._after is not None:
            for name in ("figures", "alarms", "scalars"):
                file.execute(f"DELETE FROM {name} WHERE step > ?", (self._after,))
        if not self._after:
            file.execute("DELETE FROM layers")
        rows = [(name, json.dumps(value)) for name, value in self._about.items()]
        file.executemany("INSERT OR REPLACE INTO about VALUES (?, ?)", rows)

    def _check_writer(self, file: sqlite3.Connection) -> bool:
        """Return True if this writer owns the file.

        Raises:
            ValueError: another monitor owns it.
        """
        writer = file.execute("SELECT value FROM about WHERE name = 'writer'").fetchone()
        own = writer == (json.dumps(self._about["writer"]),)
        if writer and not own and self._after is None:
            raise ValueError(f"{self.path}: another monitor has started writing to it")
        return own

    def close(self) -> None:
        """Close the file; the next write opens it again."""
        self._file.close()


def _row(item: tuple[str, HeadMetrics]) -> tuple[Any, ...]:
    name, figures = item
    data = np.ascontiguousarray(figures.data, dtype="<f8").tobytes()
    packed = zlib.compress(data, 0 if len(data) < _SMALL else 1)
    return name, figures.kind, figures.queries, figures.of_queries, packed


_COLUMNS = {"about": 2, "layers": 3, "figures": 6, "alarms": 6, "scalars": 3}
"""The number of columns of each table."""

_SMALL = 1 << 12
"""The size in bytes below which data is not compressed: compression takes longer than writing."""


class _File:
    """A connection to the file, opened on demand and again after a fork."""

    def __init__(self, path: Path, *, write: bool) -> None:
        self.path, self.write = path, write
        self._lock = threading.Lock()
        self._open: tuple[int, sqlite3.Connection] | None = None
        self._place: os.stat_result | None = None
        if path.exists():
            file = self._connect()
            if write:  # kept open, so that the file can be restored
                self._hold(file)
            else:
                file.close()

    def _connect(self) -> sqlite3.Connection:
        """Open the file; when writing, create missing tables.

        Raises:
            ValueError: the file is not a history.
        """
        mode = "rwc" if self.write else "ro"
        file = sqlite3.connect(
            f"{self.path.absolute().as_uri()}?mode={mode}",
            uri=True,
            timeout=_WAIT,
            isolation_level=None,
            check_same_thread=False,
        )
        try:
            mark, version, tables = _kind(file)
            if (mark, version) != (_MARK, _VERSION) and (mark or tables):
                raise ValueError(
                    f"{self.path}: not a history that this version of headwise can read"
                )
            if self.write:
                mode = "DELETE" if is_remote(self.path) else "WAL"
                file.execute(f"PRAGMA journal_mode = {mode}")
                file.execute(f"PRAGMA synchronous = {'NORMAL' if mode == 'WAL' else 'FULL'}")
                if not tables:
                    file.executescript(f"BEGIN IMMEDIATE;{_TABLES}COMMIT;")
                file.execute(_SCALARS)
        except sqlite3.DatabaseError as error:
            file.close()
            if isinstance(error, sqlite3.OperationalError):  # locked, full, unreadable
                raise
            raise ValueError(f"{self.path}: not a history ({error})") from None
        except BaseException:
            file.close()
            raise
        return file

    def read(self, query: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Return the rows of a query; none if the file has no tables yet."""
        with closing(self._connect()) as file:
            return list(file.execute(query, values)) if _kind(file)[2] else []

    def _hold(self, file: sqlite3.Connection) -> None:
        """Keep a connection open, and remember the identity of its file."""
        self._open, self._place = (os.getpid(), file), self.path.stat()

    def lost(self) -> sqlite3.Connection | None:
        """Return an in-memory copy of a file that is no longer at its path; `None` if it still is.

        The connection is closed: two files at one path would share SQLite's auxiliary files.
        """
        with self._lock:
            if self._open is None or self._open[0] != os.getpid() or self._place is None:
                return None
            with suppress(FileNotFoundError):
                if os.path.samestat(self.path.stat(), self._place):
                    return None
            kept = sqlite3.connect(":memory:", check_same_thread=False)
            self._open[1].backup(kept)
            self._open[1].close()
            self._open = None
            return kept

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Yield a connection in a transaction; commit it at the end, or roll back on an error."""
        with self._lock:
            if self._open is None or self._open[0] != os.getpid():
                self._hold(self._connect())
            assert self._open is not None
            file = self._open[1]
            file.execute("BEGIN IMMEDIATE")
            try:
                yield file
                file.execute("COMMIT")
            except BaseException:
                if file.in_transaction:
                    file.execute("ROLLBACK")
                raise

    def close(self) -> None:
        with self._lock:
            if self._open is not None and self._open[0] == os.getpid():
                self._open[1].close()
            self._open = None

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "write": self.write}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)


def _kind(file: sqlite3.Connection) -> tuple[int, int, int]:
    """Return the mark, the version and the number of tables of a file."""
    mark = file.execute("PRAGMA application_id").fetchone()[0]
    version = file.execute("PRAGMA user_version").fetchone()[0]
    tables = file.execute("SELECT count(*) FROM sqlite_master WHERE type = 'table'").fetchone()[0]
    return mark, version, tables


# ── network file systems ────────────────────────────────────────────────────────────────────────

_REMOTE = set(
    (
        "nfs nfs4 cifs smb3 smbfs 9p afs ceph lustre beegfs gpfs glusterfs ocfs2 gfs2 orangefs "
        "pvfs2 webdav davfs virtiofs wekafs"
    ).split()
)
_MOUNTS = Path("/proc/self/mountinfo")


def is_remote(path: Path) -> bool:
    """Return True if a file is on a network file system or a FUSE file system.

    SQLite's write-ahead log requires shared memory between all readers, which two machines do not
    have. Detected on Linux, and for network names on Windows; elsewhere a file counts as local.
    """
    whole = os.path.realpath(path)
    if whole.startswith("\\\\"):
        return True
    return _MOUNTS.exists() and _is_remote(whole, _MOUNTS.read_text())


def _is_remote(path: str, mounts: str) -> bool:
    """Return True if a path is on a remote mount, by `/proc/self/mountinfo` (proc(5)).

    >>> mounts = "1 0 8:1 / / rw - ext4 /dev/sda1 rw\\n2 1 0:5 / /a\\\\040b rw - nfs4 host:/a rw"
    >>> _is_remote("/a b/heads.sqlite", mounts), _is_remote("/a/heads.sqlite", mounts)
    (True, False)
    """
    longest, kind = -1, ""
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        place = before.split()[4].encode().decode("unicode_escape")
        inside = path == place or path.startswith(place.rstrip("/") + "/")
        if inside and len(place) >= longest:  # of two mounts at one path, the later is on top
            longest, kind = len(place), after.split()[0]
    return kind in _REMOTE or kind.startswith("fuse")

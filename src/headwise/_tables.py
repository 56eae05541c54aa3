"""Tables of heads for notebooks: as HTML, as a pandas data frame, or as a plot."""

from __future__ import annotations

import html
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from pandas import DataFrame

PlotBackend = Literal["plotly", "matplotlib"]

COUNTS = {"layer", "head", "calls", "queries", "of_queries"}  # columns that are not metrics
SHOWN = 200  # the largest number of rows that a notebook shows


class HeadTable(ABC):
    """A result with `table()`, one row per head, which notebooks display as HTML."""

    @abstractmethod
    def table(self) -> list[dict[str, Any]]: ...

    def to_pandas(self) -> DataFrame:
        """Return `table()` as a pandas `DataFrame`, a row per head.

        Raises:
            ImportError: pandas is not installed.
        """
        return frame_of("seen", self.table)

    def plot(self, figure: str | None = None, *, backend: PlotBackend = "plotly") -> Any:
        """Draw one column of `table()`: layers down, heads across.

        Args:
            figure: the name of a column. Default: the first metric.
            backend: `"plotly"` for an interactive plot, `"matplotlib"` for a static one.

        Returns:
            A Plotly or a matplotlib `Figure`.

        Raises:
            ImportError: the library is not installed.
            ValueError: an unknown column or backend.
        """
        return heads_figure(self.table(), figure, backend=backend)

    def _repr_html_(self) -> str:
        try:
            return html_table(self.table())
        except ValueError:  # nothing was recorded
            return html.escape(repr(self))


def frame_of(name: str, table: Callable[[], Any], instead: str = "table()") -> DataFrame:
    """Return a table as a pandas `DataFrame`; an `ImportError` suggests `{name}.{instead}`."""
    try:
        from pandas import DataFrame
    except ImportError:
        raise ImportError(
            f"{name}.to_pandas(): pandas is not installed; run `pip install pandas`, or use "
            f"{name}.{instead}"
        ) from None
    return DataFrame(table())


def html_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as an HTML table, at most `SHOWN` of them.

    >>> html_table([{"head": 0, "entropy": 1.25}, {"head": 1, "entropy": None}]).count("<td>")
    4
    """
    names = list(dict.fromkeys(name for row in rows for name in row))
    head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
    lines = (
        "".join(f"<td>{_written(row.get(name))}</td>" for name in names) for row in rows[:SHOWN]
    )
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    left = f"<p>{SHOWN} of {len(rows):,} rows</p>" if len(rows) > SHOWN else ""
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{left}"


def html_summary(text: str, lines: Sequence[object], rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a paragraph, a list of at most `SHOWN` lines, and a table as HTML."""
    items = "".join(f"<li>{html.escape(str(line))}</li>" for line in lines[:SHOWN])
    return f"<p>{html.escape(text)}</p><ul>{items}</ul>{html_table(rows)}"


def _written(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else html.escape(str(value))


def heads_figure(
    rows: Sequence[Mapping[str, Any]],
    figure: str | None = None,
    titles: Mapping[str, str] | None = None,
    backend: PlotBackend = "plotly",
) -> Any:
    """Draw one column of `rows` as a heat map: layers down, heads across; missing cells are blank.

    Args:
        rows: one dict per head, with `head` and, for several modules, `layer`.
        figure: the name of the column. Default: the first metric.
        titles: titles of columns by name.
        backend: the plotting library.
    """
    if backend not in ("plotly", "matplotlib"):
        raise ValueError(f"plot(backend={backend!r}): backend must be 'plotly' or 'matplotlib'")
    there = [name for name in dict.fromkeys(n for row in rows for n in row) if _is(rows, name)]
    if not there or figure not in (None, *there):
        raise ValueError(f"plot({figure!r}): unknown metric; there are: {', '.join(there) or '–'}")
    name = figure or there[0]
    layers = list(dict.fromkeys(str(row.get("layer", "")) for row in rows))
    cells: list[list[float | None]] = [
        [None] * (1 + max(int(row["head"]) for row in rows)) for _ in layers
    ]
    for row in rows:
        cells[layers.index(str(row.get("layer", "")))][row["head"]] = row.get(name)
    draw = _with_plotly if backend == "plotly" else _with_matplotlib
    try:
        return draw(cells, layers, (titles or {}).get(name, name))
    except ImportError:
        raise ImportError(
            f"plot(): {backend} is not installed; run `pip install {backend}`"
        ) from None


def _with_plotly(cells: list[list[float | None]], layers: Sequence[str], title: str) -> Any:
    from plotly.graph_objects import Figure, Heatmap

    hover = "layer %{y}, head %{x}: %{z:.4g}<extra></extra>"
    heads = Heatmap(z=cells, y=layers, colorscale="Viridis", xgap=2, ygap=2, hovertemplate=hover)
    drawn = Figure(heads)
    drawn.update_layout(title={"text": html.escape(title)}, height=max(240, 120 + 26 * len(layers)))
    drawn.update_xaxes(title={"text": "head"}, dtick=1)
    drawn.update_yaxes(title={"text": "layer"}, type="category", autorange="reversed")
    return drawn


def _with_matplotlib(cells: list[list[float | None]], layers: Sequence[str], title: str) -> Any:
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(2.5 + 0.4 * len(cells[0]), 1.5 + 0.4 * len(layers)), layout="tight")
    axes = drawn.subplots()
    values = [[math.nan if cell is None else cell for cell in line] for line in cells]
    drawn.colorbar(axes.imshow(values, cmap="viridis", aspect="auto"), ax=axes)
    axes.set(title=title, xlabel="head", ylabel="layer", xticks=range(len(cells[0])))
    axes.set_yticks(range(len(layers)), layers)
    return drawn


def _is(rows: Sequence[Mapping[str, Any]], name: str) -> bool:
    """Return True if a column is a metric that can be drawn."""
    if name in COUNTS or name.endswith(("_se", "_coverage")):
        return False
    return any(isinstance(row.get(name), float) for row in rows)

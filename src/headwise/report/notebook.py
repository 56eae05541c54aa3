"""How a `Look` shows itself in notebooks: the page in a frame, its rows as tables and figures."""

from __future__ import annotations

import html
from importlib import import_module
from typing import TYPE_CHECKING, Any

from .._tables import frame_of, heads_figure

if TYPE_CHECKING:
    from pandas import DataFrame
    from plotly.graph_objects import Figure

HEIGHT = 860  # pixels of the frame


class InNotebooks:
    """What a look has for notebooks."""

    rows: list[dict[str, Any]]
    columns: list[dict[str, Any]]

    def to_pandas(self) -> DataFrame:
        """`rows` as a pandas `DataFrame`, a row per head; `labels` are their names.

        Raises:
            ImportError: pandas is not installed.
        """

        def table() -> list[dict[str, Any]]:
            names = [", ".join(one["label"] for one in row["labels"]) for row in self.rows]
            return [{**row, "labels": name} for row, name in zip(self.rows, names, strict=True)]

        return frame_of("look", table)

    def plot(self, figure: str | None = None) -> Figure:
        """Draw one figure of every head as a Plotly figure: layers down, heads across.

        Args:
            figure: a key of `columns`; none: the first.

        Raises:
            ImportError: plotly is not installed.
            ValueError: no such figure.
        """
        keys = [column["key"] for column in self.columns]
        rows = [{key: row.get(key) for key in ("layer", "head", *keys)} for row in self.rows]
        return heads_figure(rows, figure, {one["key"]: one["title"] for one in self.columns})

    def _repr_html_(self) -> str:
        """The page, in a frame of its own."""
        # The page reads looks, so a look asks for it by name.
        page = import_module("headwise.report.page").render_page(self)
        return (
            f'<iframe srcdoc="{html.escape(page)}" title="headwise look" width="100%" '
            f'height="{HEIGHT}" style="border:0" allow="clipboard-write"></iframe>'
        )

"""Small charts as SVG: as little as the page needs, and the same bytes for the same figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from headwise.report.catalog import LABEL_STYLES

COLORS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8a7a00", "#555555")
GREY = "#d9d9d9"
DARK = {  # what colors become where the reader's theme is dark
    "white": "#1a1d22",
    "#fff": "#1a1d22",
    GREY: "#3a404a",
    "#555555": "#a0a8b3",
    "#08306b": "#9ecae1",
    "#e9e9e9": "#2b3038",
    **{style.light: style.dark for style in LABEL_STYLES},
}
THEME = (
    "<style>@media (prefers-color-scheme: dark) { text:not([fill]) { fill: #e7e9ec } "
    + " ".join(
        f'[fill="{light}"] {{ fill: {dark} }} [stroke="{light}"] {{ stroke: {dark} }}'
        for light, dark in DARK.items()
    )
    + " }</style>"
)


@dataclass
class Picture:
    """A sheet of so many pixels, of the reader's theme; the origin is at the upper left."""

    width: int
    height: int
    parts: list[str] = field(default_factory=list)

    def text(
        self,
        x: float,
        y: float,
        words: str,
        anchor: str = "start",
        size: int = 12,
        bold: bool = False,
    ) -> None:
        weight = ' font-weight="bold"' if bold else ""
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"{weight}>'
            f"{escape(words)}</text>"
        )

    def line(self, points: Sequence[tuple[float, float]], color: str, width: float = 1.5) -> None:
        where = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.parts.append(
            f'<polyline points="{where}" fill="none" stroke="{color}" stroke-width="{width}"/>'
        )

    def box(self, x: float, y: float, width: float, height: float, color: str) -> None:
        self.parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
            f'fill="{color}"/>'
        )

    def svg(self) -> str:
        size = f'width="{self.width}" height="{self.height}"'
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" {size} '
                f'viewBox="0 0 {self.width} {self.height}" font-family="sans-serif">',
                THEME,
                f'<rect {size} fill="white"/>',
                *self.parts,
                "</svg>\n",
            ]
        )


@dataclass(frozen=True)
class Axes:
    """A frame on a picture: where it stands, and the values at its edges."""

    left: float
    top: float
    width: float
    height: float
    x: tuple[float, float]
    y: tuple[float, float]

    def at(self, x: float, y: float) -> tuple[float, float]:
        """The pixel of a pair of values."""
        along = (x - self.x[0]) / (self.x[1] - self.x[0])
        up = (y - self.y[0]) / (self.y[1] - self.y[0])
        return self.left + along * self.width, self.top + (1 - up) * self.height


def frame(
    picture: Picture,
    axes: Axes,
    title: str,
    x_ticks: Sequence[float],
    y_ticks: Sequence[float],
    x_name: str = "step",
) -> None:
    """Draw title, grid lines and ticks."""
    picture.text(axes.left, axes.top - 10, title, bold=True)
    for value in y_ticks:
        x, y = axes.at(axes.x[0], value)
        picture.line([(x, y), (x + axes.width, y)], GREY, 1)
        picture.text(x - 6, y + 4, f"{value:g}", "end", 11)
    bottom = axes.top + axes.height
    for value in x_ticks:
        x, _ = axes.at(value, axes.y[0])
        picture.line([(x, bottom), (x, bottom + 4)], "#555555", 1)
        picture.text(x, bottom + 17, f"{value:g}", "middle", 11)
    picture.text(axes.left + axes.width, bottom + 31, x_name, "end", 11)


def curve(
    picture: Picture, axes: Axes, points: Sequence[tuple[float, float]], color: str, width: float
) -> None:
    """Draw a line through pairs of values."""
    picture.line([axes.at(x, y) for x, y in points], color, width)


def legend(
    picture: Picture,
    left: float,
    top: float,
    names: Mapping[str, str],
    step: Callable[[str], float] = lambda name: 26 + 7 * len(name),
) -> None:
    """A row of colored squares with their names."""
    for name, color in names.items():
        picture.box(left, top - 10, 11, 11, color)
        picture.text(left + 16, top, name)
        left += step(name)

"""A page opened in Chromium from its file, and all it says, asks for and pops up meanwhile."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ci import in_ci

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
PHONE = {"viewport": {"width": 375, "height": 812}, "has_touch": True, "is_mobile": True}


@contextmanager
def chromium() -> Iterator[Any]:
    """Debian's Chromium; a skip where there is none, but a failure under CI."""
    path = shutil.which("chromium") or "/usr/bin/chromium"
    if not Path(path).exists():
        if in_ci():
            pytest.fail("Chromium is missing: apt-get install chromium")
        pytest.skip("needs Chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield opened
        opened.close()


def axe_core() -> str:
    """The script of axe-core; a skip where it is not installed, but a failure under CI."""
    if find_spec("axe_playwright_python") is None:
        if in_ci():
            pytest.fail("axe-core is missing: pip install axe-playwright-python")
        pytest.skip("needs axe-playwright-python")
    return resources.files("axe_playwright_python").joinpath("axe.min.js").read_text("utf-8")


def violations(page: Any, *rules: str) -> list[str]:
    """Return what breaks axe-core's rules, or those of them that are named."""
    options = {"resultTypes": ["violations"], **({"runOnly": rules} if rules else {})}
    found = page.evaluate(
        "(options) => axe.run(document, options).then(({ violations }) =>"
        " violations.map(({ id, nodes }) => `${id}: ${nodes[0].html.slice(0, 120)}`))",
        options,
    )
    return sorted(found)


def colors(page: Any, scheme: str) -> None:
    """Ask for light or dark colors, and wait until the view is drawn in them.

    A page hears of it in its next frame; until then it says that it is drawn, in the old ones.
    """
    page.emulate_media(color_scheme=scheme)
    page.evaluate(
        "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
    )
    page.wait_for_selector("main[aria-busy=false]", state="attached")


class Tab:
    """A page of `headwise look` that is open."""

    def __init__(self, browser: Any, file: Path, **context: Any) -> None:
        context.setdefault("viewport", {"width": 1280, "height": 900})
        self.context = browser.new_context(**context)
        self.page = self.context.new_page()
        self.page.set_default_timeout(20_000)
        self.said: list[str] = []
        self.asked: list[str] = []
        self.dialogs: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("dialog", lambda box: (self.dialogs.append(box.message), box.dismiss()))
        self.page.route("**/*", self._route)
        self.session = self.context.new_cdp_session(self.page)
        self.session.send("Performance.enable")
        self.address = file.as_uri()
        self.page.goto(self.address)
        self.page.wait_for_selector("html[data-ready=yes]", timeout=60_000)

    def _route(self, route: Any) -> None:
        self.asked.append(route.request.url)
        route.continue_() if route.request.url.startswith("file:") else route.abort()

    def close(self) -> None:
        self.context.close()
        self.check()

    def check(self) -> None:
        """Nothing may have gone wrong, whatever a test did."""
        said, asked, dialogs = self.said[:], set(self.asked), self.dialogs[:]
        self.said.clear()
        self.dialogs.clear()
        assert said == []
        assert asked == {self.address}
        assert dialogs == []

    def measured(self, name: str) -> float:
        """One of Chromium's own measures of the page, such as `Nodes`."""
        found = self.session.send("Performance.getMetrics")["metrics"]
        return {one["name"]: one["value"] for one in found}[name]

    def drawn(self) -> None:
        """Wait until the view is drawn."""
        self.page.wait_for_selector("main[aria-busy=false]", state="attached")

    def colors(self, scheme: str) -> None:
        """Ask for light or dark colors, and wait until the view is drawn in them."""
        colors(self.page, scheme)

    def show(self, view: str) -> None:
        """Go to a view by its link."""
        link = self.page.locator(f"#nav a[data-view={view}]")
        if not link.is_visible():
            self.page.locator("#more summary").click()
        link.click()
        self.page.locator(f"#view-{view}").wait_for()
        self.drawn()

    def click(self, selector: str, index: int = 0) -> None:
        """Click, and wait until the view is drawn."""
        self.page.locator(selector).nth(index).click()
        self.drawn()

    def press(self, *keys: str) -> None:
        """Press keys one after another, and wait until the view is drawn."""
        for key in keys:
            self.page.keyboard.press(key)
            self.drawn()

    def text(self, selector: str) -> str:
        return self.page.locator(selector).inner_text()

    def texts(self, selector: str) -> list[str]:
        return self.page.locator(selector).all_inner_texts()

    def plotted(self, plot: str, what: str = "grid.z") -> Any:
        """The numbers that a chart was drawn from, typed arrays as lists and NaN as None."""
        plain = "(v) => ArrayBuffer.isView(v) ? [...v] : Array.isArray(v) ? v.map(plain) : v"
        return self.page.evaluate(
            f"(() => {{ const plain = {plain}; "
            f"return plain(document.getElementById('{plot}').chart.{what}) }})()"
        )

    def pixels(self, plot: str) -> np.ndarray:
        """What stands on a chart's canvas: `[height, width, 4]`."""
        flat, width = self.page.evaluate(
            "(id) => { const from = document.querySelector(`#${id} canvas`);"
            "const pixels = from.getContext('2d').getImageData(0, 0, from.width, from.height);"
            "return [[...pixels.data], from.width] }",
            plot,
        )
        return np.array(flat).reshape(-1, width, 4)

    def move(self, plot: str, column: float, row: float, columns: int, rows: int) -> None:
        """Move the pointer onto a cell of a plot of `rows` by `columns`."""
        area = self.page.locator(f"#{plot} .area").first
        area.scroll_into_view_if_needed()
        box = area.bounding_box()
        self.page.mouse.move(
            box["x"] + (column + 0.5) / columns * box["width"],
            box["y"] + (row + 0.5) / rows * box["height"],
            steps=3,
        )

    def click_cell(
        self,
        plot: str,
        column: float,
        row: float,
        columns: int,
        rows: int,
        tip: str | re.Pattern[str],
        where: str = "#tip",
    ) -> None:
        """Click a cell once its tip, or what stands at `where`, has `tip`."""
        self.move(plot, column, row, columns, rows)
        self.page.locator(where, has_text=tip).wait_for()
        self.page.mouse.down()
        self.page.mouse.up()
        self.drawn()
        self.page.mouse.move(2, 2, steps=2)

    def width(self) -> int:
        """How wide the document is."""
        return self.page.evaluate("document.documentElement.scrollWidth")

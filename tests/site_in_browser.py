"""The built site in Chromium: nothing asked of other hosts, nothing said, axe-core content.

`make test-site` runs it, after `make docs`; its name keeps it out of `make test`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from browser import axe_core, chromium

SITE = Path(__file__).parents[1] / "build" / "site"
LIVE = ("gpt", "bert", "compare", "timeline")
KINDS = (
    "index.html",
    "start.html",
    "guides/builders.html",
    "howto/from-bertviz.html",
    "statistics.html",
    "checking.html",
    "claims.html",
    "api/index.html",
    "api/attention.html",
    "api/statistics.html",
    "live/index.html",
    "live/gpt.html",
)


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *said: Any) -> None: ...


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(SITE)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/"
    server.shutdown()


class Visit:
    """A page that is open, what it said and asked for."""

    def __init__(self, browser: Any, address: str, **context: Any) -> None:
        self.context = browser.new_context(viewport={"width": 1280, "height": 900}, **context)
        self.page, self.said, self.asked = self.context.new_page(), [], []
        self.page.set_default_timeout(30_000)
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.address = address

    def open(self, name: str) -> Any:
        self.page.goto(self.address + name)
        self.page.wait_for_load_state("networkidle")
        return self.page

    def others(self) -> list[str]:
        """What was asked of other hosts."""
        own = (self.address, "data:", "blob:", "about:")
        return [url for url in self.asked if not url.startswith(own)]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as opened:
        yield opened


def pages() -> list[str]:
    return sorted(str(file.relative_to(SITE)) for file in SITE.rglob("*.html"))


def test_no_page_asks_others_or_complains(browser: Any, address: str) -> None:
    visit = Visit(browser, address)
    names = [name for name in pages() if name != "404.html"]
    assert len(names) > 50
    for name in names:
        visit.open(name)
        assert visit.said == [], name
        assert visit.others() == [], name


@pytest.mark.parametrize("colors", ["light", "dark"])
def test_axe_core_finds_nothing(browser: Any, address: str, colors: str) -> None:
    visit = Visit(browser, address, color_scheme=colors)
    found = {}
    for name in KINDS:
        page = visit.open(name)
        page.evaluate(axe_core())
        # What is inside the live pages has tests of its own (tests/report).
        result = page.evaluate("axe.run({exclude: [['iframe']]}, {iframes: false})")
        if result["violations"]:
            found[name] = [
                (one["id"], one["nodes"][0]["html"][:200], one["nodes"][0]["failureSummary"])
                for one in result["violations"]
            ]
    assert found == {}


def test_the_live_pages_work_in_their_frames(browser: Any, address: str) -> None:
    visit = Visit(browser, address)
    for name in LIVE:
        frame = visit.open(f"live/{name}.html").frame_locator("iframe.live")
        frame.locator("html[data-ready=yes]").wait_for(state="attached")
        assert visit.said == [], name


def test_the_search_finds_a_name(browser: Any, address: str) -> None:
    page = Visit(browser, address).open("index.html")
    page.locator(".md-search__button").click()
    page.get_by_role("combobox", name="Search").fill("entropy")
    page.get_by_text("hw.EntropyFloor").first.wait_for()


def test_a_phone_scrolls_in_one_direction(browser: Any, address: str) -> None:
    context = browser.new_context(viewport={"width": 375, "height": 812}, is_mobile=True)
    page = context.new_page()
    for name in KINDS:
        page.goto(address + name)
        assert page.evaluate("document.documentElement.scrollWidth") <= 375, name

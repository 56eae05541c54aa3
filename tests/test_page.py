"""The page in a real browser: nothing fetched, nothing broken, the data as `Look` has them."""

from __future__ import annotations

import base64
import gzip
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headwise.corpus import train_tokenizer
from headwise.figures import COLUMNS, NO_LABEL, RULES
from headwise.gpt import GPT, GPTConfig
from headwise.look import Look, finite, look
from headwise.page import LEVELS, PageError, check_out, pack, render_page, write_page

LAYERS, HEADS, TOKENS = 2, 3, 23
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
HOSTILE = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(2)>",
    "</script><script>alert(3)</script>",
    "<!--",
    "&lt;b&gt;",
    "\u2028'\"`${alert(4)}",
    '<a href="javascript:alert(5)">x</a>',
    "$&",
    "@@plotly@@",
]


def tiny_look(tokens: int = TOKENS) -> Look:
    """What a small random model does, with tokens and names that try to be more than text."""
    text = "so much, so much naïve, so naïve and much so, and so on and on\n"
    tokenizer = train_tokenizer([text], vocab_size=263)
    torch.manual_seed(0)
    config = GPTConfig(
        vocab_size=263, n_positions=TOKENS, n_embd=5 * HEADS, n_layer=LAYERS, n_head=HEADS
    )
    model = GPT(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.6)
    seen = look(model, tokenizer, text, context=tokens, model_name="<b>tiny", text_name=HOSTILE[2])
    return replace(seen, tokens=[*seen.tokens[: tokens - len(HOSTILE)], *HOSTILE])


@pytest.fixture(scope="module")
def seen() -> Look:
    return tiny_look()


@pytest.fixture(scope="module")
def page_file(seen: Look, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_page(seen, tmp_path_factory.mktemp("page") / "page.html")


# --- the file --------------------------------------------------------------------------------


def test_the_data_in_the_file_are_those_of_the_look(seen: Look, page_file: Path) -> None:
    text = page_file.read_text("utf-8")
    data = json.loads(_script(text, "data"))
    assert data["rows"] == finite(seen.rows)
    assert data["tokens"] == seen.tokens
    assert data["provenance"] == finite(seen.provenance)
    assert (data["layers"], data["heads"], data["side"]) == (LAYERS, HEADS, TOKENS)
    for layer, expected in seen.maps.items():
        planes = np.frombuffer(
            gzip.decompress(base64.b64decode(_script(text, f"map-{layer}"))), np.uint8
        )
        high, low = planes.astype(int).reshape(2, HEADS, TOKENS, TOKENS)
        np.testing.assert_allclose((256 * high + low) / LEVELS, expected, atol=0.5 / LEVELS + 1e-9)


def test_pack_keeps_the_ends_exactly() -> None:
    planes = np.frombuffer(pack(np.array([[[0.0, 1.0], [1.0 + 1e-6, -1e-9]]])), np.uint8)
    assert (planes[:4].astype(int) * 256 + planes[4:]).tolist() == [0, LEVELS, LEVELS, 0]


def test_the_file_names_no_address_and_states_how_it_was_made(seen: Look, page_file: Path) -> None:
    text = page_file.read_text("utf-8")
    own = re.sub(r'<script type="text/plain".*?</script>', "", text, flags=re.DOTALL)
    assert not re.search(r"https?://|//cdn|<link|\bsrc=(?!x onerror)", own)
    assert "default-src 'none'" in own
    assert str(Path.home()) not in own
    made = json.loads(_script(text, "data"))["made"]
    assert "seed 0" in dict(made)["Random repeats"]
    assert f"torch {torch.__version__}" in dict(made)["Versions"]
    assert "float32" in dict(made)["Numbers"]


def test_the_same_look_gives_the_same_file(seen: Look, page_file: Path) -> None:
    assert render_page(seen) == page_file.read_text("utf-8")


def test_what_comes_from_outside_cannot_end_its_script(page_file: Path) -> None:
    text = page_file.read_text("utf-8")
    assert "<" not in _script(text, "data")
    assert "<title>&lt;b&gt;tiny" in text
    assert "</script><script>alert" not in text


def test_nothing_is_left_behind_where_no_page_can_be(seen: Look, tmp_path: Path) -> None:
    with pytest.raises(PageError, match="there is no folder"):
        write_page(seen, tmp_path / "missing" / "page.html")
    with pytest.raises(PageError, match="it is a folder"):
        check_out(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_page_that_fails_half_way_leaves_the_old_one(
    seen: Look, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "page.html").write_text("old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(PageError, match="No space left"):
        write_page(seen, tmp_path / "page.html")
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
    assert (tmp_path / "page.html").read_text() == "old"


def test_without_plotly_the_message_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(PageError, match=r"pip install 'headwise\[page\]'"):
        check_out(tmp_path / "page.html")


def _script(text: str, name: str) -> str:
    found = re.search(rf'<script type="[^"]*" id="{name}">(.*?)</script>', text, re.DOTALL)
    assert found, name
    return found[1]


# --- the browser -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    chromium = shutil.which("chromium") or "/usr/bin/chromium"
    if not Path(chromium).exists():
        if os.environ.get("CI") == "true":
            pytest.fail("Chromium is missing: apt-get install chromium")
        pytest.skip("needs Chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=chromium, args=FLAGS)
        yield opened
        opened.close()


class Tab:
    """A page opened from its file, and all it said, asked for and popped up meanwhile."""

    def __init__(self, browser: Any, file: Path, **context: Any) -> None:
        context.setdefault("viewport", {"width": 1280, "height": 900})
        self.context = browser.new_context(**context)
        self.page = self.context.new_page()
        self.page.set_default_timeout(8_000)
        self.said: list[str] = []
        self.asked: list[str] = []
        self.dialogs: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("dialog", lambda box: (self.dialogs.append(box.message), box.dismiss()))
        self.page.route("**/*", self._route)
        self.address = file.as_uri()
        self.page.goto(self.address)
        self.page.wait_for_selector("html[data-ready=yes]", timeout=20_000)

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

    def text(self, selector: str) -> str:
        return self.page.locator(selector).inner_text()

    def shown(self, plot: str) -> Any:
        """The numbers that Plotly drew."""
        return self.page.evaluate(f"document.getElementById('{plot}').data[0].z")


@pytest.fixture(scope="module")
def opened(browser: Any, page_file: Path) -> Iterator[Tab]:
    tab = Tab(browser, page_file)
    yield tab
    tab.close()


@pytest.fixture
def tab(opened: Tab) -> Iterator[Tab]:
    """One tab for all tests (Plotly takes seconds to start), with its switches as at first."""
    for name in ("scales", "directions"):
        opened.page.locator(f"#{name} label").nth(0).click()
    opened.page.mouse.move(2, 2)
    yield opened
    opened.check()


@pytest.mark.browser
@pytest.mark.parametrize(
    "wrong",
    [
        "console.warn('x');",
        "new Image().src = 'https://localhost/x.png';",
        "setTimeout(() => { throw new Error('x'); });",
        "alert('x');",
    ],
)
def test_a_wrong_page_would_be_noticed(browser: Any, tmp_path: Path, wrong: str) -> None:
    file = tmp_path / "wrong.html"
    file.write_text(
        f"<!doctype html><script>{wrong}document.documentElement.dataset.ready = 'yes'</script>"
    )
    tab = Tab(browser, file)
    tab.page.wait_for_timeout(100)
    with pytest.raises(AssertionError):
        tab.close()


@pytest.mark.browser
def test_a_fault_is_shown_and_logged(browser: Any, page_file: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.html"
    text = page_file.read_text("utf-8")
    broken.write_text(text.replace('id="map-0">', 'id="map-0">AAAA'))
    page = browser.new_page()
    page.goto(broken.as_uri())
    page.wait_for_selector("#fault:not([hidden])")
    assert page.locator("#fault").inner_text().startswith("The page could not be drawn")
    page.close()


@pytest.mark.browser
def test_every_statistic_can_be_put_on_the_map_of_heads(tab: Tab, seen: Look) -> None:
    chips = tab.page.locator("#statistics label")
    assert chips.count() == 1 + len(COLUMNS)
    labels = [*[rule.label for rule in RULES], NO_LABEL]
    keys = ["label", *[column.key for column in COLUMNS]]
    assert sorted(_values(tab, "statistic")) == sorted(keys)
    for index, key in enumerate(_values(tab, "statistic")):
        chips.nth(index).click()
        expected = [
            [_cell(seen.rows[layer * HEADS + head], key, labels) for head in range(HEADS)]
            for layer in range(LAYERS)
        ]
        assert tab.shown("heads") == expected, key
        assert tab.page.locator("#legend").is_visible() == (key == "label")


def _cell(row: dict[str, Any], key: str, labels: list[str]) -> Any:
    return labels.index(row["label"]) if key == "label" else row[key]


def _values(tab: Tab, name: str) -> list[str]:
    script = f"[...document.getElementsByName('{name}')].map((input) => input.value)"
    return tab.page.evaluate(script)


@pytest.mark.browser
def test_a_head_is_chosen_by_button_key_click_row_and_address(tab: Tab, seen: Look) -> None:
    page = tab.page
    page.locator("#table tbody tr[data-row='0'] button").click()
    _head_is(tab, seen, 0, 0)
    page.locator("#next-head").click()
    _head_is(tab, seen, 0, 1)
    page.locator("#previous-head").click()
    page.locator("#previous-head").click()
    _head_is(tab, seen, LAYERS - 1, HEADS - 1)
    page.locator("#heads").focus()
    page.keyboard.press("ArrowUp")
    _head_is(tab, seen, LAYERS - 2, HEADS - 1)
    page.locator("#heads").focus()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")  # the edge holds
    _head_is(tab, seen, LAYERS - 1, HEADS - 2)
    _click_cell(tab, "heads", column=0, row=1, columns=HEADS, rows=LAYERS)
    _head_is(tab, seen, 1, 0)
    assert page.url.endswith("#1.0")
    page.reload()
    page.wait_for_selector("html[data-ready=yes]")
    _head_is(tab, seen, 1, 0)


def _head_is(tab: Tab, seen: Look, layer: int, head: int) -> None:
    """The figures, the label and the map shown are those of this head."""
    row = seen.rows[layer * HEADS + head]
    title = f"Where layer {layer}, head {head} looks"
    tab.page.locator("#attention-title", has_text=title).wait_for()
    assert tab.text("#head-title") == f"Layer {layer}, head {head}"
    assert tab.text("#head-label").startswith(row["label"])
    values = tab.page.locator("#readout dd").all_inner_texts()
    for column, value in zip(COLUMNS, values, strict=True):
        figure = row[column.key]
        assert value.split()[0] == (f"{figure:.2f}" if figure < 9.995 else f"{figure:.1f}"), (
            column.key
        )
    tab.page.locator("#scales label").nth(1).click()
    shown = tab.shown("attention")
    for query in range(TOKENS):
        assert shown[query][query + 1 :] == [None] * (TOKENS - query - 1)
        expected = seen.maps[layer][head][query, : query + 1]
        np.testing.assert_allclose(shown[query][: query + 1], expected, atol=0.5 / LEVELS + 1e-9)
    assert tab.page.locator("#table tr.chosen").get_attribute("data-row") == str(
        layer * HEADS + head
    )


def _click_cell(tab: Tab, plot: str, column: float, row: float, columns: int, rows: int) -> None:
    _move(tab, plot, column, row, columns, rows)
    place = f"at {row:g}key" if plot == "attention" else f"Layer {row:g}, head {column:g}"
    tab.page.locator("#tip", has_text=place).wait_for()  # Plotly has seen the pointer
    tab.page.mouse.down()
    tab.page.mouse.up()


def _move(tab: Tab, plot: str, column: float, row: float, columns: int, rows: int) -> None:
    area = tab.page.locator(f"#{plot} .nsewdrag").first
    area.scroll_into_view_if_needed()
    box = area.bounding_box()
    tab.page.mouse.move(
        box["x"] + (column + 0.5) / columns * box["width"],
        box["y"] + (row + 0.5) / rows * box["height"],
        steps=3,
    )


@pytest.mark.browser
def test_hovering_names_query_key_and_weight(tab: Tab, seen: Look) -> None:
    tab.page.locator("#table tbody tr[data-row='4']").click()
    _move(tab, "attention", 3, 12, TOKENS, TOKENS)
    tab.page.locator("#tip", has_text="at 12").wait_for()
    lines = tab.text("#tip").splitlines()
    assert lines[0] == f"query {_visible(seen.tokens[12])} at 12"
    assert lines[1] == f"key {_visible(seen.tokens[3])} at 3"
    value = seen.maps[1][1][12, 3]
    shown = lines[2].removeprefix("weight ")
    assert shown == ("<0.001" if value < 0.0005 else f"{value:.3f}")
    tab.page.mouse.move(2, 2, steps=3)
    tab.page.wait_for_selector("#tip", state="hidden")
    _move(tab, "heads", 1, 1, HEADS, LAYERS)
    tab.page.locator("#tip", has_text="Layer 1, head 1").wait_for()


def _visible(token: str) -> str:
    return token.replace(" ", "·").replace("\n", "↵").replace("\u2028", "\\u{2028}")


@pytest.mark.browser
def test_a_token_shows_where_it_looks_and_who_looks_at_it(tab: Tab, seen: Look) -> None:
    page = tab.page
    page.locator("#table tbody tr[data-row='2']").click()
    page.locator("#tokens button[data-token='11']").click()
    weights = seen.maps[0][2]
    _strongest_are(tab, weights[11, :12], seen)
    page.locator("#directions label").nth(1).click()
    _strongest_are(tab, np.concatenate([np.zeros(11), weights[11:, 11]]), seen)
    page.locator("#tokens button[data-token='11']").focus()
    page.keyboard.press("ArrowRight")
    assert page.locator("#tokens button[aria-pressed='true']").get_attribute("data-token") == "12"
    page.keyboard.press("Home")
    page.keyboard.press("ArrowLeft")
    assert page.locator("#tokens [aria-pressed='true']").get_attribute("data-token") == "0"
    page.keyboard.press("End")
    assert page.evaluate("document.activeElement.dataset.token") == str(TOKENS - 1)
    _click_cell(tab, "attention", 2, 7, TOKENS, TOKENS)
    assert page.locator("#tokens [aria-pressed='true']").get_attribute("data-token") == "2"
    page.locator("#directions label").nth(0).click()
    _click_cell(tab, "attention", 2, 7, TOKENS, TOKENS)
    assert page.locator("#tokens [aria-pressed='true']").get_attribute("data-token") == "7"


def _strongest_are(tab: Tab, weights: np.ndarray, seen: Look) -> None:
    order = np.argsort(-weights, kind="stable")[:6]
    shown = tab.page.locator("#strongest li").all()
    for item, other in zip(shown, [o for o in order if weights[o] > 0.5 / LEVELS], strict=True):
        value = weights[other]
        assert item.locator("b").inner_text() == (f"{value:.3f}" if value >= 0.0005 else "<0.001")
        assert item.locator("code").inner_text() == _visible(seen.tokens[other])
    np.testing.assert_allclose(_colours(tab)[: len(weights)], np.sqrt(weights), atol=0.005)


def _colours(tab: Tab) -> list[float]:
    """How strongly each token of the text view is coloured, 0 to 1."""
    buttons = "[...document.querySelectorAll('#tokens button')]"
    return tab.page.evaluate(f"{buttons}.map((b) => Number(b.style.getPropertyValue('--w')))")


@pytest.mark.browser
def test_the_map_zooms_and_comes_back(tab: Tab) -> None:
    page = tab.page
    button = page.locator("#zoom-out")
    assert button.is_disabled()
    _move(tab, "attention", 2, 10, TOKENS, TOKENS)
    page.mouse.down()
    _move(tab, "attention", 8, 16, TOKENS, TOKENS)
    page.mouse.up()
    page.wait_for_selector("#zoom-out:enabled")
    low, high = page.evaluate("document.getElementById('attention').layout.xaxis.range")
    assert 1 < low < 3
    assert 7 < high < 9
    ticks = page.evaluate("document.getElementById('attention').layout.xaxis.tickvals")
    assert ticks == list(range(int(np.ceil(low)), int(high) + 1))  # every token is named now
    button.click()
    assert page.evaluate("document.getElementById('attention').layout.xaxis.range") == [
        -0.5,
        TOKENS - 0.5,
    ]
    assert button.is_disabled()


@pytest.mark.browser
def test_the_scale_of_the_map_switches(tab: Tab) -> None:
    root = np.array(tab.shown("attention"), dtype=float)
    tab.page.locator("#scales label").nth(1).click()
    linear = np.array(tab.shown("attention"), dtype=float)
    np.testing.assert_allclose(root**2, linear, atol=1e-12)


@pytest.mark.browser
def test_every_column_sorts_both_ways(tab: Tab, seen: Look) -> None:
    heads = tab.page.locator("#table th")
    assert heads.count() == 2 + len(COLUMNS)
    for index in range(heads.count()):
        key = heads.nth(index).get_attribute("data-key")
        orders = []
        for _ in range(2):
            heads.nth(index).locator("button").click()
            lines = "[...document.querySelectorAll('#table tbody tr')]"
            rows = tab.page.evaluate(f"{lines}.map((line) => Number(line.dataset.row))")
            values = rows if key == "place" else [seen.rows[row][key] for row in rows]
            orders.append(heads.nth(index).get_attribute("aria-sort"))
            assert values == sorted(values, reverse=orders[-1] == "descending"), key
        assert sorted(orders) == ["ascending", "descending"]
        assert tab.page.locator("#table th[aria-sort]").count() == 1


@pytest.mark.browser
def test_hostile_tokens_stay_text(tab: Tab, seen: Look) -> None:
    page = tab.page
    assert tab.text("#model") == "<b>tiny"
    assert tab.text("#text") == HOSTILE[2]
    first = TOKENS - len(HOSTILE)
    for index, token in enumerate(HOSTILE, start=first):
        button = page.locator(f"#tokens button[data-token='{index}']")
        assert button.evaluate("(node) => node.children.length") == 0
        assert button.text_content() == token.replace("\u2028", "\\u{2028}")
        button.click()
        assert page.locator("#strongest-title code").text_content() == _visible(token)
        _move(tab, "attention", index, index, TOKENS, TOKENS)
    ticks = page.locator("#attention .xaxislayer-above text").all_text_contents()
    assert any(tick.startswith("<script>") for tick in ticks)
    assert page.locator("#attention a, #attention image[href^=x], img").count() == 0
    scripts = page.locator("script").count()
    assert scripts == 1 + LAYERS + 1 + 1 + 1  # data, maps, packed plotly, ours, unpacked plotly


@pytest.mark.browser
def test_the_rule_and_the_formulas_are_on_the_page(tab: Tab) -> None:
    rules = tab.text("#rules")
    for rule in RULES:
        assert rule.label in rules
        assert f"{rule.sign} {rule.threshold:g}" in rules
    assert tab.page.locator("#formulas dt").all_inner_texts() == [c.title for c in COLUMNS]
    assert "seed 0" in tab.text("#made")


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_it_all_without_scrolling_sideways(
    browser: Any, page_file: Path, seen: Look, scheme: str
) -> None:
    tab = Tab(
        browser,
        page_file,
        viewport={"width": 390, "height": 844},
        color_scheme=scheme,
        has_touch=True,
        is_mobile=True,
    )
    assert tab.page.evaluate("document.documentElement.scrollWidth") == 390
    background = tab.page.evaluate("getComputedStyle(document.body).backgroundColor")
    lightness = sum(map(int, re.findall(r"\d+", background)[:3])) / 3
    assert lightness < 40 if scheme == "dark" else lightness > 230
    tab.page.locator("#next-head").tap()
    tab.page.locator("#tokens button[data-token='9']").tap()
    assert tab.page.locator("#tokens [aria-pressed='true']").get_attribute("data-token") == "9"
    assert seen.provenance["notice"] == tab.text("#notice")
    area = tab.page.locator("#heads .nsewdrag").first
    area.scroll_into_view_if_needed()
    box = area.bounding_box()
    tab.page.touchscreen.tap(box["x"] + 0.9 * box["width"], box["y"] + 0.9 * box["height"])
    tab.page.locator("#head-title", has_text=f"Layer {LAYERS - 1}, head {HEADS - 1}").wait_for()
    tab.close()


@pytest.mark.browser
def test_every_control_has_a_name_and_can_be_reached(tab: Tab) -> None:
    nameless = tab.page.evaluate(
        """[...document.querySelectorAll('button, input')].filter((node) =>
             !node.textContent.trim() && !node.getAttribute('aria-label')
             && !node.closest('label')?.textContent.trim()).length"""
    )
    assert nameless == 0
    tab.page.locator("h1").click()  # what Tab reaches next follows the title
    reached = set()
    for _ in range(60):
        tab.page.keyboard.press("Tab")
        reached.add(tab.page.evaluate("document.activeElement.closest('[id]')?.id ?? ''"))
    expected = {"statistics", "heads", "previous-head", "scales", "directions", "tokens", "table"}
    assert expected <= reached


@pytest.mark.browser
def test_a_long_text_is_shown_in_blocks(
    browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headwise.look.MAP_SIDE", 5)
    blocks = tiny_look()
    tab = Tab(browser, write_page(blocks, tmp_path / "blocks.html"))
    assert "a block of 4 or 5 tokens" in tab.text("#attention-what")
    tab.page.locator("#table tbody tr[data-row='0']").click()
    assert len(tab.shown("attention")) == 5
    starts = [0, 5, 10, 14, 19]  # where floor(5 i / 23) steps up
    tab.page.locator("#tokens button[data-token='13']").click()
    assert "at 10–13" in tab.text("#strongest-title")
    expected = [
        np.sqrt(blocks.maps[0][0][2, np.searchsorted(starts, i, "right") - 1]) for i in range(14)
    ]
    np.testing.assert_allclose(_colours(tab)[:14], expected, atol=0.005)
    tab.close()

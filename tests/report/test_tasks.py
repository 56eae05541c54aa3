"""What people come to the page for, by clicks counted and by keys alone; what axe-core finds in
every view."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from browser import PHONE, Tab, axe_core, chromium, colors, violations
from headwise.models import gpt
from headwise.models.corpus import manual_passage
from headwise.report import look
from headwise.report.folders import load_folder
from headwise.report.page import write_page
from looks import decoder, with_repeats

pytestmark = pytest.mark.browser

TEXT = "It is said that it rains. With what it brings, it is said that it rains."
VIEWS = (
    *("heads", "head", "mosaic", "table", "compare"),
    *("composition", "likeness", "scatter", "about"),
)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The page of the built-in model, and one of it and of a look that differs."""
    folder = tmp_path_factory.mktemp("pages")
    model, tokenizer = load_folder(gpt.builtin())
    one = look(model, tokenizer, TEXT, model_name="the built-in model", text_name="a sentence")
    rows = [row | {"entropy": row["entropy"] + 0.1 * row["head"]} for row in one.rows]
    rows[5] = rows[5] | {"labels": [], "induction_random": 0.2}
    other = replace(one, rows=rows, provenance=one.provenance | {"model": "another"})
    return {
        "one": write_page(one, folder / "one.html"),
        "two": write_page(one, folder / "two.html", other=other),
    }


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as opened:
        yield opened


@pytest.fixture
def fresh(browser: Any, files: dict[str, Path]) -> Iterator[Tab]:
    """The page as it opens, which counts the clicks that it gets."""
    tab = Tab(browser, files["one"])
    count_clicks(tab)
    yield tab
    tab.close()


def count_clicks(tab: Tab) -> None:
    """Clicks of a pointer; those that keys cause have no detail."""
    tab.page.evaluate(
        "window.clicks = 0; addEventListener('click', (e) => { clicks += e.detail > 0; }, true)"
    )


def clicks(tab: Tab) -> int:
    return tab.page.evaluate("window.clicks")


def in_sight(tab: Tab, selector: str) -> bool:
    """Whether all of it is on the first screen."""
    box = tab.page.locator(selector).bounding_box()
    size = tab.page.viewport_size
    return box["y"] >= 0 and box["y"] + box["height"] <= size["height"]


def plain(text: str) -> str:
    return " ".join(text.replace("\u202f", "").split())


# --- tasks -----------------------------------------------------------------------------------


def test_the_first_screen_has_the_map_of_every_head(fresh: Tab) -> None:
    assert fresh.page.locator("#heads image").count() == 1
    assert in_sight(fresh, "#heads image")


def test_the_default_page_is_small(tmp_path: Path) -> None:
    seen = look(*load_folder(gpt.builtin()), manual_passage())
    assert write_page(seen, tmp_path / "page.html").stat().st_size < 500_000


def test_which_heads_are_induction_heads_takes_no_click(fresh: Tab) -> None:
    assert fresh.texts("#legend button")[0].split() == ["induction", "3"]
    assert in_sight(fresh, "#legend")
    assert fresh.page.locator("#heads .word", has_text="ind").count() == 3
    told = plain(fresh.text("#glance-labels"))
    assert "attends to the token after another occurrence of its own token" in told


def test_what_the_strongest_head_does_on_my_sentence_takes_no_click(fresh: Tab) -> None:
    """It opens on the proof of its label, and says beside it what it does on the text."""
    assert "attends to the token after its" in fresh.text("#sentence")
    assert fresh.page.locator("#pieces input").nth(1).is_checked()
    aside = fresh.page.locator("#aside", has_text="On the text: Head")
    aside.wait_for()
    assert "to the token after its previous occurrence" in aside.inner_text()
    assert in_sight(fresh, "#sentence")
    assert in_sight(fresh, "#aside")


def test_where_a_head_looks_from_the_second_it_takes_one_search(fresh: Tab) -> None:
    fresh.page.keyboard.press("/")
    fresh.page.keyboard.type("L2H3 it")
    fresh.press("Enter", "Enter")
    fresh.page.locator("#found-by-search", has_text="2 of").wait_for()
    assert plain(fresh.text("#sentence")).startswith("Head L2H3 at it ")
    assert (
        "on=" not in fresh.page.url
    )  # on the text, though the page opened on repeated random tokens
    assert clicks(fresh) == 0


def test_how_a_layer_differs_takes_one_click(browser: Any, files: dict[str, Path]) -> None:
    tab = Tab(browser, files["two"])
    count_clicks(tab)
    assert tab.page.locator("#changes li").count() > 3
    columns = len(tab.plotted("strip", "x.ticks"))
    tab.click_cell("strip", 0, 1, columns, 3, tip="Layer 1")
    assert tab.text("#difference-title").endswith("the heads of layer 1")
    assert len(tab.texts("#difference-table tbody tr")) == 4
    assert clicks(tab) == 1
    tab.close()


def tab_to(tab: Tab, selector: str) -> None:
    """Press Tab until what the selector names has the focus."""
    for _ in range(90):
        tab.page.keyboard.press("Tab")
        if tab.page.evaluate("(one) => document.activeElement.matches(one)", selector):
            return
    pytest.fail(f"Tab does not reach {selector}")


def test_every_task_by_keys_alone(fresh: Tab, browser: Any, files: dict[str, Path]) -> None:
    tab_to(fresh, ".words summary")
    fresh.press("Enter")
    assert fresh.page.locator(".words dl").is_visible()
    tab_to(fresh, "#legend button")  # the induction heads alone
    fresh.press("Enter")
    assert sum(cell is not None for line in fresh.plotted("heads") for cell in line) == 3
    fresh.press("Enter")
    tab_to(fresh, "#heads")
    fresh.press("ArrowRight", "ArrowRight")
    assert fresh.text("#glance-title") == "L1H3"
    tab_to(fresh, "#pieces input")
    fresh.press("ArrowLeft")
    assert plain(fresh.text("#sentence")).startswith("Head L1H3 at")
    tab_to(fresh, "#story-text button[aria-pressed=true]")
    before = fresh.text("#sentence")
    fresh.press("ArrowLeft")
    assert fresh.text("#sentence") != before
    tab_to(fresh, "#glance-open")
    fresh.press("Enter")
    fresh.page.locator("#view-head").wait_for()
    assert clicks(fresh) == 0
    tab = Tab(browser, files["two"])
    tab_to(tab, "#layer-menu")
    tab.press("ArrowDown")
    assert tab.text("#difference-title").endswith("the heads of layer 0")
    tab.close()


def test_on_a_phone_story_and_heads_come_first(browser: Any, files: dict[str, Path]) -> None:
    tab = Tab(browser, files["one"], **PHONE)
    tops = tab.page.evaluate(
        "['sentence', 'story-text', 'all-heads', 'heads', 'cards'].map("
        "(id) => document.getElementById(id).getBoundingClientRect().top)"
    )
    assert tops == sorted(tops)
    assert tops[0] < 560  # on the first screen, below the findings
    assert tops[3] < 1100
    tab.page.locator("#glance-fold summary").tap()  # the map is folded, and drawn when it is opened
    tab.page.locator("#glance canvas").wait_for()
    tab.close()


# --- what opens first ------------------------------------------------------------------------


def test_heads_open_on_their_proof_until_a_token_is_asked_for(fresh: Tab) -> None:
    def on() -> int:
        shown = fresh.page.locator("#pieces input")
        return [shown.nth(n).is_checked() for n in range(2)].index(True)

    fresh.click_cell("heads", 2, 0, 4, 3, tip="L0H2", where="#glance-title")
    assert (fresh.text("#bar-head"), on()) == ("L0H2", 0)  # looks one token back: on the text
    fresh.click_cell("heads", 0, 1, 4, 3, tip="L1H0", where="#glance-title")
    assert (fresh.text("#bar-head"), on()) == ("L1H0", 1)
    fresh.click("#pieces label", 0)
    fresh.click("#story-text button", 7)
    fresh.click_cell("heads", 1, 1, 4, 3, tip="L1H1", where="#glance-title")
    assert on() == 0
    assert fresh.page.url.endswith("#heads/L1H1/7")


def test_the_random_piece_can_be_read_and_both_its_numbers_are_named(fresh: Tab) -> None:
    names = fresh.page.locator("#story-text button").all_text_contents()
    assert len({*names}) * 2 == len(names) == 28
    assert all(name.isalpha() for name in names)
    said = fresh.text("#guide-what")
    assert "On this piece of 14 different random tokens, all made of letters, 0." in said
    assert "is a mean over 8 rows of 50 repeated random tokens." in said
    on = fresh.texts("#cards .on-what")
    assert on[:2] == ["Its map on repeated random tokens", "Its map on the text"]


# --- axe-core --------------------------------------------------------------------------------


def use(tab: Any, view: str) -> None:
    """Work with a view's controls, so that what they show is there too."""
    if view == "heads":
        tab.locator(".words summary").click()
        tab.locator("#more summary").click()
        tab.locator("#pieces label").first.click()
        tab.select_option("#statistic-menu", "entropy")
    elif view == "head":
        tab.locator("#directions label").nth(2).click()
        tab.locator("#scales label").nth(2).click()
        tab.locator("#zoom-in").click()
    elif view == "table":
        tab.locator("#filter").fill("entropi>1")
    elif view == "compare":
        tab.select_option("#layer-menu", "1")
    elif view == "mosaic":
        tab.locator("#mosaic-orders label").nth(1).click()
    elif view == "composition":
        tab.locator("#composition-count").press("End")
    tab.wait_for_selector("main[aria-busy=false]", state="attached")


@pytest.mark.slow
def test_axe_finds_nothing_in_any_view(browser: Any, files: dict[str, Path]) -> None:
    """Opened at three widths and used, light; then dark, where the colors alone are others."""
    context = browser.new_context(color_scheme="light", bypass_csp=True)
    page = context.new_page()
    page.goto(files["two"].as_uri())
    page.wait_for_selector("html[data-ready=yes]")
    page.evaluate(axe_core())
    page.evaluate("document.body.append(Object.assign(new Image(), { id: 'bare' }))")
    assert [one.split(":")[0] for one in violations(page)] == ["image-alt", "region"]  # it can fail
    page.evaluate("document.getElementById('bare').remove()")
    for view in VIEWS:
        page.evaluate("(view) => document.querySelector(`#nav a[data-view=${view}]`).click()", view)
        page.locator(f"#view-{view}").wait_for()
        for width in (375, 860, 1440):
            page.set_viewport_size({"width": width, "height": 900})
            colors(page, "light")
            assert violations(page) == [], (view, width)
            colors(page, "dark")
            assert violations(page, "color-contrast") == [], (view, width, "dark")
        colors(page, "light")
        use(page, view)
        assert violations(page) == [], f"{view}, used"
        colors(page, "dark")
        assert violations(page, "color-contrast") == [], f"{view}, used, dark"
        colors(page, "light")
    context.close()


# --- looks of different lengths --------------------------------------------------------------


def test_figures_that_grow_with_the_length_are_not_ranked(browser: Any, tmp_path: Path) -> None:
    short = with_repeats(decoder(2, 3, 9, scores=False))
    long = decoder(2, 3, 23, scores=False)
    other = replace(long, provenance=long.provenance | {"model": "longer"})
    tab = Tab(browser, write_page(short, tmp_path / "page.html", other=other))
    said = tab.text("#compare-what")
    assert "A has 9 tokens, B has 23." in said
    assert said.endswith("left out of the ranking: entropy; mean distance.")
    shown = {name for _, name in tab.plotted("strip", "x.ticks")}
    assert not shown & {"entropy", "distance"}
    assert "normalized entropy" in shown
    lines = [line.split(" ", 1)[1] for line in map(plain, tab.texts("#changes li"))]
    assert not any(line.startswith(("entropy rose", "entropy fell", "mean dist")) for line in lines)
    assert not any("local" in line for line in lines)  # that label follows the distance
    menu = tab.page.locator("#difference-menu option").evaluate_all(
        "(all) => all.map(o => o.value)"
    )
    assert "entropy" in menu  # it can still be looked at
    tab.close()

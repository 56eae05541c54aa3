"""The page in a real browser: nothing fetched, nothing broken, every view as the look has it."""

from __future__ import annotations

import base64
import gzip
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from browser import Tab, chromium
from headwise.report.findings import opening_head
from headwise.report.page import PageError, check_out, render_page, write_page
from headwise.report.schema import Look
from looks import decoder, words

LAYERS, HEADS, TOKENS = 2, 3, 23
HOSTILE = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(2)>",
    "</script><script>alert(3)</script>",
    "<!--",
    "&lt;b&gt;",
    "<b>x</b>",
    "\u2028'\"`${alert(4)}",
    '<a href="javascript:alert(5)">x</a>',
    "$&",
    "@@styles@@",
]
NONE = "unlabeled"


def hostile_look() -> Look:
    """A small model's look, with tokens and names that try to be more than text."""
    look = decoder(LAYERS, HEADS, [*words(TOKENS - len(HOSTILE), 0), *HOSTILE])
    look.provenance.update(model="<b>tiny", text=HOSTILE[2], loss_text=2.5)
    for row in look.rows:
        row["module"] = f"<i>{row['module']}"
    for named in (*look.rules, *(label for row in look.rows for label in row["labels"])):
        named["label"] = f"<b>{named['label']}"
    for rule in look.rules:
        rule["brief"] = f"<b>{rule['brief']}"
    look.rows[1]["labels"].append(
        {"label": HOSTILE[0], "key": "entropy", "score": 1.0, "threshold": 2.0, "coverage": 1.0}
    )
    return look


@pytest.fixture(scope="module")
def seen() -> Look:
    return hostile_look()


@pytest.fixture(scope="module")
def page_file(seen: Look, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_page(seen, tmp_path_factory.mktemp("page") / "page.html")


# --- the file --------------------------------------------------------------------------------


def results(text: str) -> Any:
    found = re.search(r'<script type="text/plain" id="results">(.*?)</script>', text, re.DOTALL)
    assert found
    return json.loads(gzip.decompress(base64.b64decode(found[1])))


def test_the_file_holds_the_looks_own_document(seen: Look, page_file: Path) -> None:
    (found,) = results(page_file.read_text("utf-8"))
    assert found.pop("title") == f"<b>tiny on {HOSTILE[2]}"
    made = dict(found.pop("made"))
    assert found.pop("finding").startswith("2 of 6 heads are labeled <b>previous token (")
    assert found.pop("opening") == opening_head(seen.rows, seen.rules)
    assert {*found.pop("labeled")} == {one["label"] for row in seen.rows for one in row["labels"]}
    assert found == seen.document()
    assert made["Model"] == "<b>tiny: 2 attention layers, 3 heads each"
    assert made["Versions"].startswith("headwise 0, torch 2")
    assert made["Seed"] == "0"
    assert made["Options"] == "one, two"
    assert "loss_text" not in made


def test_two_looks_are_two_documents(seen: Look) -> None:
    found = results(render_page(seen, other=decoder(1, 2, 5)))
    assert [len(look["rows"]) for look in found] == [LAYERS * HEADS, 2]


def test_the_file_names_no_address(page_file: Path) -> None:
    text = page_file.read_text("utf-8")
    own = re.sub(r'<script type="text/plain".*?</script>', "", text, flags=re.DOTALL)
    own = own.replace("http://www.w3.org/2000/svg", "")  # the name of SVG's elements
    assert not re.search(r"https?://|//cdn|<link|(?<!\.)\bsrc=", own)
    assert "default-src 'none'" in own
    assert str(Path.home()) not in own


def test_the_same_look_gives_the_same_file(seen: Look, page_file: Path) -> None:
    assert render_page(seen) == page_file.read_text("utf-8")


def test_what_comes_from_outside_is_packed_or_escaped(page_file: Path) -> None:
    text = page_file.read_text("utf-8")
    assert "<title>&lt;b&gt;tiny on &lt;/script&gt;" in text
    assert text.count("alert(") == 1  # in the title
    assert "<b>tiny" not in text


def test_nothing_is_left_behind_where_no_page_can_be(seen: Look, tmp_path: Path) -> None:
    with pytest.raises(PageError, match="there is no folder"):
        write_page(seen, tmp_path / "missing" / "page.html")
    with pytest.raises(PageError, match="is a directory"):
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


def test_the_page_is_small(seen: Look, tmp_path: Path) -> None:
    assert write_page(seen, tmp_path / "page.html").stat().st_size < 230_000


# --- the browser -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def opened(browser: Any, page_file: Path) -> Iterator[Tab]:
    tab = Tab(browser, page_file)
    yield tab
    tab.close()


@pytest.fixture
def tab(opened: Tab) -> Iterator[Tab]:
    """One tab for all tests."""
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
    broken.write_text(text.replace('id="results">', 'id="results">AAAA'))
    page = browser.new_page()
    page.goto(broken.as_uri())
    page.wait_for_selector("#fault:not([hidden])")
    assert page.locator("#fault").inner_text().startswith("The page could not be drawn")
    page.close()


def first_label(row: dict[str, Any]) -> str:
    return row["labels"][0]["label"] if row["labels"] else NONE


def has_label(row: dict[str, Any], label: str) -> bool:
    return label in ([one["label"] for one in row["labels"]] or [NONE])


def flat(lines: list[list[Any]]) -> list[Any]:
    return [cell for line in lines for cell in line]


def head_of(look: Look, index: int) -> tuple[Any, int]:
    row = look.rows[index]
    return look.layers[row["layer"]], row["head"]


def figure(value: float, digits: int) -> str:
    return f"{value:.{digits}f}".replace("-", "−")


def weight(value: float) -> str:
    return "<0.001" if 0 < value < 0.0005 else f"{value:.3f}"


def visible(token: str) -> str:
    return token.replace(" ", "·").replace("\n", "↵").replace("\u2028", "\\u{2028}")


def choose(tab: Tab, seen: Look, index: int) -> None:
    """Choose a head by its row in the table, then come back."""
    tab.show("table")
    tab.click(f"#table tbody tr[data-row='{index}'] button")
    row = seen.rows[index]
    assert tab.text("#bar-head") == f"L{row['layer']}H{row['head']}"


@pytest.mark.browser
def test_every_statistic_can_be_put_on_the_map_of_heads(tab: Tab, seen: Look) -> None:
    tab.show("heads")
    keys = ["label", *[column["key"] for column in seen.columns]]
    menu = tab.page.locator("#statistic-menu")
    shown = menu.locator("option").evaluate_all("(all) => all.map((one) => one.value)")
    assert sorted(shown) == sorted(keys)
    labels = [*[rule["label"] for rule in seen.rules], HOSTILE[0], NONE]
    for key in shown:
        menu.select_option(key)
        expected = [
            labels.index(first_label(row)) if key == "label" else row[key] for row in seen.rows
        ]
        assert flat(tab.plotted("heads")) == expected, key
        written = tab.page.locator("#heads .word").all_text_contents()
        assert len(written) == len(seen.rows)
        assert key != "first" or written == [figure(row[key], 2) for row in seen.rows]
        of_labels = key == "label"  # the help and the legend are of what the map shows
        title = next((one["title"] for one in seen.columns if one["key"] == key), "first label")
        assert title in tab.text("#heads-what")
        assert ("color and glyph" in tab.text("#heads-what")) is of_labels
        assert (tab.page.locator("#legend svg.glyph").count() > 0) is of_labels
        assert bool(tab.text("#missing")) is of_labels
    favourites = tab.page.locator("#statistics label")
    assert favourites.count() == 5
    favourites.nth(3).click()
    assert menu.input_value() == "previous"
    assert "statistic=previous" in tab.page.url
    menu.select_option("label")


@pytest.mark.browser
def test_a_label_is_singled_out_in_the_map_the_table_and_the_scatter(tab: Tab, seen: Look) -> None:
    tab.show("heads")
    counts = {name: sum(has_label(row, name) for row in seen.rows) for name in (NONE, HOSTILE[0])}
    for name in [first_label(seen.rows[0]), HOSTILE[0]]:
        button = tab.page.locator("#legend button", has_text=name)
        colored = sum(first_label(row) == name for row in seen.rows)
        further = sum(has_label(row, name) for row in seen.rows) - colored
        tail = f" ({further} as an additional label)" if further else ""
        assert button.text_content() == f"{name} {colored + further}{tail}"
        button.click()
        shown = flat(tab.plotted("heads"))
        mine = [has_label(row, name) for row in seen.rows]
        assert [value is not None for value in shown] == mine
        tab.show("table")
        assert tab.page.locator("#table tbody tr:visible").count() == sum(mine)
        tab.show("scatter")
        assert [not point["faint"] for point in tab.plotted("scatter", "points")] == mine
        tab.show("heads")
        tab.page.locator("#legend button", has_text=name).click()
        assert None not in flat(tab.plotted("heads"))
    assert counts[HOSTILE[0]] == 1


@pytest.mark.browser
def test_a_head_is_chosen_by_row_button_key_click_and_address(tab: Tab, seen: Look) -> None:
    page = tab.page
    choose(tab, seen, 0)
    tab.click("#next-head")
    assert tab.text("#bar-head") == "L0H1"
    tab.click("#previous-head")
    tab.click("#previous-head")
    assert tab.text("#bar-head") == f"L{LAYERS - 1}H{HEADS - 1}"
    tab.show("heads")
    page.locator("#heads").focus()
    tab.press("ArrowUp")
    assert tab.text("#glance-title") == f"L{LAYERS - 2}H{HEADS - 1}"
    tab.press("ArrowRight", "ArrowUp")  # the edges hold
    assert tab.text("#bar-head") == f"L0H{HEADS - 1}"
    tab.press("ArrowLeft", "ArrowDown")
    assert tab.text("#bar-head") == f"L1H{HEADS - 2}"
    tab.click_cell("heads", 0, 1, HEADS, LAYERS, tip="L1H0", where="#glance-title")
    assert tab.text("#bar-head") == "L1H0"
    tab.click("#glance-open")
    page.locator("#view-head").wait_for()
    assert page.url.split("#")[1].startswith("head/L1H0/")
    tab.click("#nav a[data-view=table]")
    page.locator("#view-table").wait_for()
    page.go_back()
    page.locator("#view-head").wait_for()
    page.goto(f"{tab.address}#head/L0H2/7")
    tab.drawn()
    page.locator("#head-title", has_text="L0H2").wait_for()
    assert "at 7 attends to" in tab.text("#strongest-title")
    page.goto(f"{tab.address}#text/0.2/8")  # a link of an earlier page
    tab.drawn()
    assert "at 8 attends to" in tab.text("#strongest-title")
    page.reload()
    page.wait_for_selector("html[data-ready=yes]")
    assert tab.text("#head-title") == "L0H2"
    page.goto(f"{tab.address}#nonsense/9.9/999")
    page.wait_for_timeout(50)
    assert tab.text("#head-title") == "L0H2"


# --- the table -------------------------------------------------------------------------------


@pytest.mark.browser
def test_every_column_sorts_both_ways(tab: Tab, seen: Look) -> None:
    tab.show("table")
    heads = tab.page.locator("#table thead th")
    assert heads.count() == 2 + len(seen.columns)
    labels = [*[rule["label"] for rule in seen.rules], HOSTILE[0], NONE]
    for index in range(heads.count()):
        key = heads.nth(index).get_attribute("data-key") or ""
        orders = []
        for _ in range(2):
            heads.nth(index).locator("button").click()
            lines = "[...document.querySelectorAll('#table tbody tr')]"
            rows = tab.page.evaluate(f"{lines}.map((line) => Number(line.dataset.row))")
            values = [
                row
                if key == "place"
                else labels.index(first_label(seen.rows[row]))
                if key == "label"
                else seen.rows[row][key]
                for row in rows
            ]
            orders.append(heads.nth(index).get_attribute("aria-sort"))
            assert values == sorted(values, reverse=orders[-1] == "descending"), key
        assert sorted(orders) == ["ascending", "descending"]
        assert tab.page.locator("#table th[aria-sort]").count() == 1


@pytest.mark.browser
def test_the_table_shows_figures_coverage_and_errors(tab: Tab, seen: Look) -> None:
    tab.show("table")
    cells = tab.page.locator("#table tbody tr[data-row='1'] td").all_inner_texts()
    row = seen.rows[1]
    assert cells[0].endswith(HOSTILE[0])
    shown = dict(zip([column["key"] for column in seen.columns], cells[1:], strict=True))
    assert shown["first"] == figure(row["first"], 2)
    coverage = f"{row['same_token_coverage']:.0%}".replace("%", "\u202f%")
    assert shown["same_token"] == f"{figure(row['same_token'], 2)} {coverage}"
    assert re.fullmatch(r"−?0\.\d{4} ± 0\.0020", shown["ablation"])
    shared = tab.page.locator("#table th[data-key=previous]").inner_text()
    assert "96\u202f%" in shared  # one coverage for all heads stands in the heading


@pytest.mark.browser
@pytest.mark.parametrize(
    ("words", "holds"),
    [
        ("H.1", lambda row: row["layer"] == 1),
        ("entropy>1.5", lambda row: row["entropy"] > 1.5),
        ("first<0.2 h.0", lambda row: row["first"] < 0.2 and row["layer"] == 0),
        ("ablation<=-0.0001", lambda row: row["ablation"] <= -0.0001),
        ("no such head", lambda row: False),
        ("entropy > 1.5", lambda row: row["entropy"] > 1.5),
        ("first_token<0.2", lambda row: row["first"] < 0.2),  # as a heading calls it
        ("", lambda row: True),
    ],
)
def test_the_table_is_filtered(tab: Tab, seen: Look, words: str, holds: Any) -> None:
    tab.show("table")
    tab.page.locator("#filter").fill(words)
    expected = [index for index, row in enumerate(seen.rows) if holds(row)]
    shown = tab.page.locator("#table tbody tr:visible").evaluate_all(
        "(lines) => lines.map((line) => Number(line.dataset.row)).sort()"
    )
    assert shown == expected
    count = f"{len(expected)} of {len(seen.rows)} heads"
    assert tab.text("#found") == (count if len(expected) < len(seen.rows) else "6 heads")
    assert tab.text("#filter-said") == ("" if expected else "Nothing matches.")


@pytest.mark.browser
def test_a_filter_that_is_not_understood_says_so(tab: Tab) -> None:
    tab.show("table")
    for text, wrong in (("entropi>2", "entropi>2"), ("H.1 first<", "first<"), ("a>b=", "a>b=")):
        tab.page.locator("#filter").fill(text)
        said = tab.text("#filter-said")
        assert said.startswith(f"Not understood: {wrong}. ")
        assert said.endswith("such as entropy>1.")
        assert tab.page.locator("#filter").get_attribute("aria-invalid") == "true"
    tab.page.locator("#filter").fill("")
    assert tab.text("#filter-said") == ""
    assert tab.text("#found") == "6 heads"


@pytest.mark.browser
def test_a_wide_table_says_that_it_goes_on_and_keeps_its_heads_in_sight(
    browser: Any, page_file: Path
) -> None:
    tab = Tab(browser, page_file, viewport={"width": 700, "height": 700})
    tab.show("table")
    box = tab.page.locator("#view-table .scroll")
    assert tab.text("#more-columns").startswith("More columns to the right")
    left = tab.page.locator("#table tbody th").first.bounding_box()["x"]
    box.evaluate("(box) => { box.scrollLeft = box.scrollWidth }")
    tab.page.locator("#more-columns", has_text="the last column").wait_for()
    assert tab.page.locator("#table tbody th").first.bounding_box()["x"] == pytest.approx(
        left, abs=21
    )
    tab.close()
    tab = Tab(browser, page_file, viewport={"width": 1440, "height": 900})
    tab.show("table")
    panel = tab.page.locator("#view-table .panel").bounding_box()
    assert panel["width"] > 1340
    assert tab.width() <= 1440
    assert tab.text("#more-columns") == ""
    tab.close()


@pytest.mark.browser
def test_the_table_is_filtered_by_label(tab: Tab, seen: Look) -> None:
    tab.show("table")
    tab.page.select_option("#only", NONE)
    assert tab.page.locator("#table tbody tr:visible").count() == sum(
        not row["labels"] for row in seen.rows
    )
    tab.page.select_option("#only", "")


# --- one head --------------------------------------------------------------------------------


@pytest.mark.browser
def test_a_head_shows_its_own_map_and_figures(tab: Tab, seen: Look) -> None:
    for index in (1, 4):
        choose(tab, seen, index)
        tab.show("head")
        row, (layer, head) = seen.rows[index], head_of(seen, index)
        assert tab.text("#head-title") == f"L{row['layer']}H{row['head']}"
        labels = tab.texts("#head-labels b")
        assert labels == ([one["label"] for one in row["labels"]] or [NONE])
        tab.click("#scales label", 1)
        shown = tab.plotted("map")
        for query in range(TOKENS):
            assert shown[query][query + 1 :] == [None] * (TOKENS - query - 1)
            np.testing.assert_allclose(
                np.sqrt(shown[query][: query + 1]),
                np.sqrt(layer.maps[head, query, : query + 1]),
                atol=0.5 / 254 + 1e-6,
            )
        tab.click("#scales label", 0)
        root = np.array(tab.plotted("map"), dtype=float)
        np.testing.assert_allclose(root**2, np.array(shown, dtype=float), atol=1e-6)
        tab.click("#scales label", 2)
        rows = np.array(tab.plotted("map"), dtype=float)
        np.testing.assert_allclose(np.nanmax(rows, 1), 1)
        np.testing.assert_allclose(rows * np.nanmax(root, 1, keepdims=True), root, atol=1e-6)
        tab.click("#scales label", 0)
        terms = [text.split(" on ")[0] for text in tab.texts("#readout dt")]
        values = dict(zip(terms, tab.texts("#readout dd"), strict=False))
        assert values["First token"] == figure(row["first"], 2)
        assert values["Entropy"] == f"{figure(row['entropy'], 2)} nats"


@pytest.mark.browser
def test_a_query_shows_its_exact_keys(tab: Tab, seen: Look) -> None:
    choose(tab, seen, 2)
    tab.show("head")
    layer, head = head_of(seen, 2)
    tab.click_cell("map", 3, 12, TOKENS, TOKENS, tip="at 12")
    weights = layer.maps[head, 12, :13]
    keys = np.argsort(-weights, kind="stable")[:10]
    assert tab.texts("#strongest b")[:8] == [weight(v) for v in layer.top_weights[head, 12]]
    assert tab.texts("#strongest code") == [visible(seen.streams[0].tokens[key]) for key in keys]
    where = ["self" if key == 12 else f"{12 - key} back" for key in keys]
    assert tab.texts("#strongest small") == [
        f"{place} · at {key}" for place, key in zip(where, keys, strict=True)
    ]
    rest = 1 - weights[keys].sum()
    said = tab.text("#strongest-rest")
    if rest > 0.01:
        assert float(said.split()[0]) == pytest.approx(rest, abs=0.02)
    tab.page.locator("#map").focus()
    tab.press("ArrowDown")
    assert "at 13 attends to" in tab.text("#strongest-title")
    tab.press("ArrowUp", "ArrowUp")
    assert "at 11 attends to" in tab.text("#strongest-title")
    tab.click("#strongest button", 0)
    assert f"at {layer.top_keys[head, 11, 0]} attends to" in tab.text("#strongest-title")


@pytest.mark.browser
def test_hovering_names_query_key_and_weight(tab: Tab, seen: Look) -> None:
    choose(tab, seen, 4)
    tab.show("head")
    layer, head = head_of(seen, 4)
    tab.move("map", 3, 12, TOKENS, TOKENS)
    tab.page.locator("#tip", has_text="at 12").wait_for()
    lines = tab.text("#tip").splitlines()
    assert lines[0] == f"query {visible(seen.streams[0].tokens[12])} at 12"
    assert lines[1] == f"key {visible(seen.streams[0].tokens[3])} at 3"
    code = round(float(np.sqrt(layer.maps[head, 12, 3])) * 254)
    assert lines[2] == f"weight {weight((code / 254) ** 2)}"
    tab.page.mouse.move(2, 2, steps=3)
    tab.page.wait_for_selector("#tip", state="hidden")


@pytest.mark.browser
def test_the_map_zooms_by_pointer_and_by_button_and_comes_back(tab: Tab) -> None:
    tab.show("head")
    page = tab.page
    assert page.locator("#zoom-whole").is_disabled()
    tab.move("map", 2, 10, TOKENS, TOKENS)
    page.mouse.down()
    tab.move("map", 8, 16, TOKENS, TOKENS)
    page.mouse.up()
    page.wait_for_selector("#zoom-whole:enabled")
    low, high = tab.plotted("map", "x.range")
    assert 1 < low < 3
    assert 7 < high < 9
    ticks = [place for place, _ in tab.plotted("map", "x.ticks")]
    assert ticks == list(range(int(np.ceil(low)), int(high) + 1))  # every token is named now
    page.locator("#zoom-whole").click()
    whole = [-0.5, TOKENS - 0.5]
    assert tab.plotted("map", "x.range") == whole
    page.locator("#zoom-in").click()
    low, high = tab.plotted("map", "x.range")
    assert high - low == pytest.approx(TOKENS / 2)
    page.reload()  # the address keeps it
    page.wait_for_selector("html[data-ready=yes]")
    assert tab.plotted("map", "x.range") == pytest.approx([low, high], abs=0.01)
    page.goto(page.url.split("zoom=")[0] + "zoom=5_99_3_4")  # another head's: the whole map
    tab.drawn()
    assert tab.plotted("map", "x.range") == whole
    page.locator("#zoom-in").click()
    page.locator("#zoom-out").click()
    assert tab.plotted("map", "x.range") == whole
    assert page.locator("#zoom-out").is_disabled()


@pytest.mark.browser
def test_offsets_entropy_and_pairs_are_those_of_the_head(tab: Tab, seen: Look) -> None:
    choose(tab, seen, 5)
    tab.show("head")
    layer, head = head_of(seen, 5)
    names = [name for _, name in tab.plotted("offsets", "x.ticks")]
    assert names == ["0", "1", "2–3", "4–7", "8–15", "16–31"]
    bars = np.array(tab.plotted("offsets", "bars"))[:, 1]
    np.testing.assert_allclose(bars, layer.offsets[head, :6], atol=0.005)
    bound, entropy = (np.array(tab.plotted("entropies", f"lines[{n}].points")) for n in (0, 1))
    np.testing.assert_allclose(entropy[:, 1], layer.entropy[head], atol=0.01)
    np.testing.assert_allclose(bound[:, 1], np.log(np.arange(TOKENS) + 1), atol=1e-6)
    tokens, mass = seen.streams[0].tokens, dict[tuple[str, str], list[float]]()
    for query in range(TOKENS):
        found = zip(layer.top_keys[head, query], layer.top_weights[head, query], strict=True)
        for key, value in found:
            if key >= 0:
                mass.setdefault((tokens[query], tokens[key]), []).append(float(value))
    best = sorted(mass.items(), key=lambda pair: -sum(pair[1]))[:12]
    shown = [float(share.split("\u202f")[0]) for share in tab.texts("#pairs b")]
    assert shown == sorted(shown, reverse=True)  # in the order that they say
    assert shown == [pytest.approx(100 * sum(v) / TOKENS, abs=0.51) for _, v in best]
    assert tab.texts("#pairs code") == [visible(token) for pair, _ in best for token in pair]
    assert tab.texts("#pairs small") == [
        f"{len(v)} times, {weight(sum(v) / len(v))} each" if len(v) > 1 else weight(v[0])
        for _, v in best
    ]
    tab.click("#pairs button", 0)
    assert visible(best[0][0][0]) in tab.text("#strongest-title")


# --- the text --------------------------------------------------------------------------------


def colors(tab: Tab) -> list[float]:
    """How strongly each token is colored, 0 to 1."""
    buttons = "[...document.querySelectorAll('#streams button')]"
    return tab.page.evaluate(f"{buttons}.map((b) => Number(b.style.getPropertyValue('--w')))")


def pressed(tab: Tab) -> str | None:
    return tab.page.locator("#streams [aria-pressed='true']").get_attribute("data-token")


@pytest.mark.browser
def test_a_token_shows_where_it_looks_and_who_looks_at_it(tab: Tab, seen: Look) -> None:
    choose(tab, seen, 2)
    tab.show("head")
    layer, head = head_of(seen, 2)
    tab.click("#streams button[data-token='11']")
    assert "at 11 attends to" in tab.text("#strongest-title")
    np.testing.assert_allclose(colors(tab), np.sqrt(layer.maps[head, 11]), atol=0.003)
    order = np.argsort(-layer.maps[head, 11])[:8]
    assert tab.texts("#strongest b")[:8] == [weight(v) for v in layer.top_weights[head, 11]]
    tokens = seen.streams[0].tokens
    assert tab.texts("#strongest code")[:8] == [visible(tokens[key]) for key in order]
    tab.click("#directions label", 1)
    assert "at 11 is attended to by" in tab.text("#strongest-title")
    np.testing.assert_allclose(colors(tab), np.sqrt(layer.maps[head, :, 11]), atol=0.003)
    tab.click("#directions label", 2)
    received = layer.received[head]
    np.testing.assert_allclose(colors(tab), np.sqrt(received / received.max()), atol=0.003)
    strongest = tokens[int(received.argmax())]
    assert tab.texts("#strongest code")[0] == visible(strongest)
    tab.click("#directions label", 0)


@pytest.mark.browser
def test_all_heads_of_a_layer_are_their_mean(tab: Tab, seen: Look) -> None:
    choose(tab, seen, 1)
    tab.show("head")
    tab.click("#scopes label", 1)
    tab.click("#streams button[data-token='17']")
    assert tab.text("#text-title") == f"Layer 0, mean of its {HEADS} heads"
    np.testing.assert_allclose(colors(tab), np.sqrt(seen.layers[0].maps[:, 17].mean(0)), atol=0.003)
    tab.click("#scopes label", 0)


@pytest.mark.browser
def test_arrow_keys_walk_through_the_text(tab: Tab) -> None:
    tab.show("head")
    tab.click("#streams button[data-token='11']")
    tab.press("ArrowRight")
    assert pressed(tab) == "12"
    tab.press("Home", "ArrowLeft")
    assert pressed(tab) == "0"
    tab.press("End")
    assert tab.page.evaluate("document.activeElement.dataset.token") == str(TOKENS - 1)
    assert pressed(tab) == str(TOKENS - 1)
    assert tab.page.url.split("?")[0].endswith(f"/{TOKENS - 1}")
    tab.page.mouse.move(2, 2)
    tab.page.locator("#streams button[data-token='3']").hover()
    tab.page.locator("#text-scale", has_text="at 3 gets").wait_for()
    assert not tab.page.locator("#tip").is_visible()  # it would cover the tokens beside


# --- mosaic, likeness, scatter ---------------------------------------------------------------


@pytest.mark.browser
def test_all_maps_are_one_picture(tab: Tab, seen: Look) -> None:
    tab.show("mosaic")
    assert tab.page.locator("#mosaic canvas").count() == 1
    z = np.array(tab.plotted("mosaic"), dtype=float)
    step = z.shape[0] // LAYERS
    assert z.shape == (LAYERS * step, HEADS * step)
    for row in seen.rows:
        down, across = row["layer"] * step, row["head"] * step
        tile = z[down : down + TOKENS, across : across + TOKENS]
        expected = np.sqrt(seen.layers[row["layer"]].maps[row["head"]])
        lower = np.tri(TOKENS, dtype=bool)
        np.testing.assert_allclose(tile[lower], expected[lower], atol=0.003)
        assert np.isnan(tile[~lower]).all()
    tab.click_cell("mosaic", 1, 1, HEADS, LAYERS, tip="L1H1")
    assert tab.text("#mosaic-head").startswith("L1H1: ")
    tab.click("#mosaic-orders label", 1)
    labels = [*[rule["label"] for rule in seen.rules], HOSTILE[0], NONE]
    order = sorted(range(6), key=lambda row: (labels.index(first_label(seen.rows[row])), row))
    row = seen.rows[order[0]]
    tip = f"L{row['layer']}H{row['head']}"
    tab.click_cell("mosaic", 0, 0, HEADS, LAYERS, tip=tip)
    assert tab.text("#mosaic-head").startswith(tip)
    tab.click("#mosaic-orders label", 0)
    tab.click("#mosaic-head a")
    tab.page.locator("#view-head").wait_for()
    assert tab.text("#head-title") == tip


@pytest.mark.browser
def test_likeness_is_the_looks_own_in_every_order(tab: Tab, seen: Look) -> None:
    choose(tab, seen, 3)
    tab.show("likeness")
    assert seen.similarity is not None
    for index in range(3):
        tab.click("#likeness-orders label", index)
        names = [name for _, name in tab.plotted("likeness", "y.ticks")]
        order = [HEADS * int(name[1]) + int(name[3]) for name in names]
        assert sorted(order) == list(range(6))
        assert index or order == list(range(6))
        np.testing.assert_allclose(
            tab.plotted("likeness"), seen.similarity[np.ix_(order, order)], atol=0.003
        )
    others = [row for row in np.argsort(-seen.similarity[3]) if row != 3]
    shown = tab.texts("#alike button")
    assert shown == [f"L{seen.rows[row]['layer']}H{seen.rows[row]['head']}" for row in others]
    tab.click("#likeness-orders label", 0)
    tab.click("#alike button", 0)
    assert tab.text("#bar-head") == shown[0]
    tab.click_cell("likeness", 1, 4, 6, 6, tip=re.compile("^L1H1"))
    assert tab.text("#bar-head") == "L1H1"


def ranks(values: list[float]) -> np.ndarray:
    return np.argsort(np.argsort(values))


@pytest.mark.browser
def test_the_scatter_shows_any_two_figures(tab: Tab, seen: Look) -> None:
    tab.show("scatter")
    axes = [tab.page.locator(f"#axis-{name}").input_value() for name in "xy"]
    assert axes == ["previous", "induction_random"]
    for x, y in (("importance", "ablation"), ("entropy", "distance")):
        tab.page.select_option("#axis-x", x)
        tab.page.select_option("#axis-y", y)
        across, up = ([row[key] for row in seen.rows] for key in (x, y))
        points = tab.plotted("scatter", "points")
        assert [(point["x"], point["y"]) for point in points] == list(zip(across, up, strict=True))
        expected = np.corrcoef(ranks(across), ranks(up))[0, 1]
        assert tab.text("#scatter-what") == f"6 heads, rank correlation {expected:.2f} (Spearman)."
        best = seen.rows[int(np.argmax(up))]
        assert tab.texts("#highest button")[0] == f"L{best['layer']}H{best['head']}"
    tab.click("#highest button", 1)
    sizes = [point["size"] for point in tab.plotted("scatter", "points")]
    assert sizes.index(max(sizes)) == int(np.argsort(up)[-2])
    tab.page.select_option("#axis-x", "importance")
    tab.page.select_option("#axis-y", "ablation")
    assert [point["error"][1] for point in tab.plotted("scatter", "points")] == [0.002] * 6


# --- all of it -------------------------------------------------------------------------------


@pytest.mark.browser
def test_the_page_says_what_it_shows(tab: Tab, seen: Look) -> None:
    assert tab.text("#facts") == "6 heads in 2 layers\n23 tokens\n2.50 loss per token (nats)"
    assert tab.text("#notice") == seen.provenance["notice"]
    tab.show("about")
    rules = tab.texts("#rules li")
    for rule, shown in zip(seen.rules, rules, strict=False):
        assert rule["label"] in shown
        assert f"{rule['sign']} {rule['threshold']:g}" in shown
        assert rule["why"] in shown
    assert len(rules) == len(seen.rules) + 1
    titles = [column["title"] for column in seen.columns]
    assert tab.page.locator("#formulas dt").all_inner_texts() == titles
    assert tab.page.locator("#formulas sub").count() > 5
    assert "headwise 0, torch 2" in tab.text("#made")


@pytest.mark.browser
def test_hostile_tokens_stay_text_in_every_view(tab: Tab, seen: Look) -> None:
    page = tab.page
    assert tab.text("#model") == "<b>tiny"
    assert tab.text("#text") == HOSTILE[2]
    choose(tab, seen, 1)
    assert (
        page.locator("#table tbody tr[data-row='1']").get_attribute("title")
        == (seen.rows[1]["module"])
    )
    for view in ("heads", "head", "mosaic", "likeness", "scatter", "about"):
        tab.show(view)
    tab.show("heads")
    tab.page.select_option("#statistic-menu", "label")
    written = page.locator("#heads .word").all_text_contents()
    briefs = {rule["label"]: rule["brief"] for rule in seen.rules} | {NONE: "–"}
    names = [first_label(row) for row in seen.rows]
    for text, name in zip(written, names, strict=True):
        assert text in (name, briefs.get(name, name), "–")
    assert any("<b>" in text for text in written)
    first = TOKENS - len(HOSTILE)
    tab.show("head")
    for index, token in enumerate(HOSTILE, start=first):
        button = page.locator(f"#streams button[data-token='{index}']")
        assert button.evaluate("(node) => node.children.length") == 0
        assert button.text_content() == token.replace("\u2028", "\\u{2028}")
    tab.click(f"#streams button[data-token='{first}']")
    assert page.locator("#strongest-title code").text_content() == HOSTILE[0]
    tab.show("head")
    for index in range(first, TOKENS):
        tab.move("map", index, index, TOKENS, TOKENS)
    ticks = page.locator("#map .x-tick").all_text_contents()
    texts = [visible(token) for token in seen.streams[0].tokens]
    assert ticks == [text if len(text) <= 10 else f"{text[:9]}…" for text in texts]
    foreign = "#map a, image[href^=x], img, #views script, #views b b, #views i i"
    assert page.locator(foreign).count() == 0
    scripts = page.locator("script").count()
    assert scripts == 3  # packed results, the labels' styles, ours


@pytest.mark.browser
def test_every_control_has_a_name_and_can_be_reached(tab: Tab) -> None:
    nameless = tab.page.evaluate(
        """[...document.querySelectorAll('button, input, select, a, [role=img], [role=group]')]
             .filter((node) => !node.textContent.trim() && !node.getAttribute('aria-label')
               && !node.closest('label')?.textContent.trim() && !node.closest('[hidden]'))
             .map((node) => node.outerHTML.slice(0, 90))"""
    )
    assert nameless == []
    bar = {"nav", "search", "previous-head", "bar-head", "next-head"}
    expected = {
        "heads": bar | {"statistic-menu", "statistics", "heads", "legend", "story-text", "cards"},
        "table": {"filter", "only", "table"},
        "head": {"scales", "zoom-in", "map", "directions", "scopes", "streams", "strongest"},
        "mosaic": {"mosaic-orders", "mosaic-head"},
        "likeness": {"likeness-orders", "alike"},
        "scatter": {"axis-x", "axis-y", "highest"},
    }
    for view, ids in expected.items():
        tab.show(view)
        tab.page.locator("h1").click()  # what Tab reaches next follows the title
        reached = set()
        for _ in range(60):
            tab.page.keyboard.press("Tab")
            place = tab.page.evaluate("document.activeElement.closest('[id]')?.id ?? ''")
            reached.add(place)
            if ids <= reached:
                break
        assert ids <= reached, view


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_color_schemes_are_legible(tab: Tab, scheme: str) -> None:
    tab.colors(scheme)
    shades = tab.page.evaluate(
        """['body', '.panel', 'small', 'nav a[aria-current]'].map((selector) => {
             const style = getComputedStyle(document.querySelector(selector));
             return [style.color, style.backgroundColor];
           })"""
    )
    (ink, ground), (_, panel), (muted, _), current = shades
    assert (luminance(ground) < 0.05) == (scheme == "dark")
    for one, other in ((ink, ground), (ink, panel), (muted, panel), (muted, ground), current):
        light, dark = sorted((luminance(one), luminance(other)), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5  # WCAG 2, level AA
    tab.colors("light")


def luminance(color: str) -> float:
    """The relative luminance of `rgb(…)`, as WCAG 2 defines it."""
    parts = np.array([int(part) for part in re.findall(r"\d+", color)[:3]]) / 255
    linear = np.where(parts <= 0.03928, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])

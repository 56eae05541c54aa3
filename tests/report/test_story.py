"""The first screen: heads, the story of one on the text, and the proof of its label."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from browser import Tab, chromium
from headwise.report.page import write_page
from headwise.report.schema import Layer, Look, Stream
from looks import decoder, with_repeats

pytestmark = pytest.mark.browser

TEXT = "so it goes: the cat sat, the  cat\n  ran on"
PIECES = ["so", " it", " goes", ":", " the", " cat", " sat", ",", " the", "  cat", "\n  ran", " on"]
TOKENS = ["so", "it", "goes", ":", "the", "cat", "sat", ",", "the", "cat", "ran", "on"]


def told() -> Look:
    """One layer of three heads: induction, previous token, wide."""
    n = len(TOKENS)
    maps = np.zeros((3, n, n), np.float32)
    maps[0, :, 0] = 1
    maps[0, 8, [0, 5]] = 0.1, 0.9  # the … attends to what followed the first "the"
    maps[0, 9, [0, 6]] = 0.25, 0.75
    maps[1, np.arange(1, n), np.arange(n - 1)] = 1
    maps[1, 0, 0] = 1
    maps[2] = np.tril(np.ones((n, n))) / np.arange(1, n + 1)[:, None]
    top = np.argsort(-maps, axis=-1, kind="stable")
    weights = np.take_along_axis(maps, top, -1)
    layer = Layer(
        "attn",
        "self",
        True,
        0,
        0,
        maps,
        np.where(weights > 0, top, -1),
        weights,
        np.zeros((3, n), np.float32),
        maps.sum(1),
        offsets=np.zeros((3, 12), np.float32),
    )
    base = decoder(1, 3, n)
    scores = [("induction", "induction_random", 0.9), ("previous token", "previous", 1.0), None]
    rows = [
        row
        | {
            "labels": []
            if score is None
            else [{"label": score[0], "key": score[1], "score": score[2], "threshold": 0.4}]
        }
        for row, score in zip(base.rows, scores, strict=True)
    ]
    look = replace(base, rows=rows, layers=[layer], streams=[Stream("text", TOKENS, pieces=PIECES)])
    return with_repeats(look, 8)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def opened(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    tab = Tab(browser, write_page(told(), tmp_path_factory.mktemp("page") / "page.html"))
    yield tab
    tab.close()


@pytest.fixture
def tab(opened: Tab) -> Iterator[Tab]:
    opened.page.goto(f"{opened.address}#heads/L0H0/8")
    opened.drawn()
    opened.page.mouse.move(2, 2)
    yield opened
    opened.check()


def sentence(tab: Tab) -> str:
    return tab.text("#sentence").replace("\u202f", "").replace("\xa0", "")


def test_the_page_opens_on_the_surest_head_and_tells_its_story(browser: Any, tab: Tab) -> None:
    fresh = Tab(browser, Path(tab.address.removeprefix("file://")))
    assert re.fullmatch(
        r"Head L0H0 at r\d attends to the token after its previous occurrence: r\d "
        r"\(90%\), then to r0 \(10%\)\.",
        sentence(fresh),
    )
    assert "on=repeats" in fresh.page.url  # what its label comes from
    aside = fresh.page.locator("#aside", has_text="On the text")
    aside.wait_for()
    assert aside.inner_text().replace("\u202f", "") == (
        "On the text: Head L0H0 at the attends to the token after its previous occurrence: "
        "cat (90%), then to so (10%)."
    )
    assert [text.split() for text in fresh.texts("#legend button")] == [
        ["induction", "1"],
        ["previous", "token", "1"],
        ["unlabeled", "1"],
    ]
    assert fresh.text("#missing") == "Found in no head: first token, self, broad, local."
    fresh.close()


def test_the_text_stands_as_it_was_written(tab: Tab) -> None:
    box = tab.page.locator("#story-text .tokens")
    assert box.text_content() == TEXT
    assert box.locator("button").all_text_contents() == TOKENS
    assert box.locator("button.inside").all_text_contents() == [":", ","]  # goes on in a word
    lines = box.locator("button").evaluate_all("(all) => all.map((one) => one.offsetTop)")
    assert lines[10] > lines[9]  # the line break
    boxes = box.locator("button").evaluate_all("(all) => all.map((one) => one.offsetLeft)")
    assert boxes[10] > boxes[0] + 10  # the indentation


def test_arcs_are_the_strongest_keys_and_the_earlier_place_is_marked(tab: Tab) -> None:
    arcs = tab.page.locator("#story-text .arc").evaluate_all(
        "(all) => all.map((one) => Number(one.dataset.weight))"
    )
    assert sorted(arcs) == [0.1, 0.9]
    assert tab.page.locator("#story-text .seen").get_attribute("data-token") == "4"
    assert tab.page.locator("#story-text [aria-pressed=true]").get_attribute("data-token") == "8"
    thick = tab.page.locator("#story-text .arc path").evaluate_all(
        "(all) => all.map((one) => one.getAttribute('stroke-width')).map(Number)"
    )
    assert thick == pytest.approx([1.4, 4.6], abs=0.01)  # the strongest is drawn last
    assert through_words(tab) == 0
    strengths = tab.page.locator("#story-text button").evaluate_all(
        "(all) => all.map((one) => Number(one.style.getPropertyValue('--w')))"
    )
    np.testing.assert_allclose(
        [strengths.pop(5), strengths.pop(0)], np.sqrt([0.9, 0.1]), atol=0.003
    )
    assert set(strengths) == {0}


def through_words(tab: Tab) -> int:
    """How many points of the arcs lie on letters of tokens that are not their ends."""
    return tab.page.evaluate(
        """() => {
             const box = document.querySelector("#story-text").getBoundingClientRect();
             const words = [...document.querySelectorAll("#story-text button")].map((one) => {
               const { left, right, top, bottom } = one.getBoundingClientRect();
               return { left, right, top: top + 5, bottom: bottom - 5 };
             });
             let found = 0;
             for (const path of document.querySelectorAll("#story-text .arc path")) {
               for (let at = 0; at <= path.getTotalLength(); at += 2) {
                 const { x, y } = path.getPointAtLength(at);
                 const [left, top] = [x + box.left + 1, y + box.top + 1];
                 found += words.some((word) => left > word.left && left < word.right
                   && top > word.top && top < word.bottom);
               }
             }
             return found;
           }"""
    )


def test_arcs_go_between_the_lines_and_beside_them(browser: Any, tmp_path: Path) -> None:
    """Weight on the first token, many lines above: no arc may strike through a word."""
    look = decoder(1, 3, 140, seed=2)
    tab = Tab(browser, write_page(look, tmp_path / "page.html"))
    tab.page.add_style_tag(content="#story-text { max-height: none !important }")
    for token in (20, 75, 139):
        for head in range(3):
            tab.page.goto(f"{tab.address}#heads/0.{head}/{token}")
            tab.drawn()
            assert tab.page.locator("#story-text .arc").count() > 0
            assert through_words(tab) == 0, (head, token)
    tab.close()


def test_pointing_at_a_token_or_a_head_tells_without_a_click(tab: Tab) -> None:
    tab.page.locator("#story-text button[data-token='9']").hover()
    tab.page.locator("#sentence", has_text="75").wait_for()
    assert sentence(tab).startswith("Head L0H0 at cat attends to the token after its previous occ")
    tab.move("heads", 1, 0, 3, 1)
    tab.page.locator("#sentence", has_text="Head L0H1").wait_for()
    assert sentence(tab) == "Head L0H1 at the attends to the previous token: , (100%)."
    tab.page.mouse.move(2, 2, steps=3)
    tab.page.locator("#sentence", has_text="Head L0H0 at the").wait_for()
    assert tab.page.url.endswith("#heads/L0H0/8")  # nothing was chosen


def test_arrow_keys_go_from_token_to_token_and_from_head_to_head(tab: Tab) -> None:
    tab.page.locator("#story-text [aria-pressed=true]").focus()
    tab.press("ArrowRight")
    assert sentence(tab).startswith("Head L0H0 at cat ")
    tab.press("End")
    assert re.fullmatch(
        r"Head L0H0 at on attends here to the first token: so \(100%\)\. "
        r"On average over queries: \d+%\.",  # for its label is another
        sentence(tab),
    )
    tab.page.locator("#heads").focus()
    tab.press("ArrowRight", "ArrowRight")
    assert re.fullmatch(
        r"Head L0H2 at on puts its largest weight on \S+ \(8%\), .+, then on \S+ \(8%\)\. "
        r"Uniform attention would put 8% on each of its 12 keys\.",
        sentence(tab),
    )


def test_a_label_is_proved_on_the_random_piece(tab: Tab) -> None:
    look = told()
    assert "switch to them to see the pattern" in tab.text("#guide-what")
    tab.page.locator("#pieces label").nth(1).click()
    tab.drawn()
    buttons = tab.page.locator("#story-text button")
    assert buttons.all_text_contents() == [f"r{n}" for n in range(8)] * 2
    tops = buttons.evaluate_all("(all) => all.map((one) => one.offsetTop)")
    assert tops[8] > tops[7]  # the second time is a line of its own
    expected = np.sqrt(look.layers[0].repeat[0])
    shown = np.array(tab.plotted("glance"), dtype=float)
    lower = np.tri(16, dtype=bool)
    np.testing.assert_allclose(shown[lower], expected[lower], atol=0.003)
    assert tab.plotted("glance", "guides") == [[1, 8, 8, 15]]
    assert "On this piece of 8 different random tokens, 0.90 of a query’s" in tab.text(
        "#guide-what"
    )
    assert "to the token after its previous occurrence: r" in sentence(tab)
    assert "on=repeats" in tab.page.url
    tab.show("head")
    assert tab.plotted("map", "guides") == [[1, 8, 8, 15]]
    names = [name for _, name in tab.plotted("map", "x.ticks")]
    assert names == [f"r{n}" for n in range(8)] * 2
    assert names == [name for _, name in tab.plotted("map", "y.ticks")]
    tab.page.reload()
    tab.page.wait_for_selector("html[data-ready=yes]")
    assert len(tab.plotted("map")) == 16  # the address keeps it


def test_cards_show_the_best_head_of_each_label(tab: Tab) -> None:
    cards = tab.page.locator("#cards .card")
    assert cards.evaluate_all("(all) => all.map((one) => one.dataset.label)") == [
        "induction",
        "previous token",
    ]
    shown = np.array(tab.plotted("card-0"), dtype=float)
    assert shown.shape == (16, 16)  # on the random piece
    assert tab.plotted("card-1", "guides") == [[0, 1, 10, 11]]
    cards.nth(1).locator("button").first.click()
    tab.drawn()
    assert tab.text("#bar-head") == "L0H1"
    cards.nth(0).locator("button").first.click()
    tab.page.locator("#bar-head", has_text="L0H0").wait_for()
    tab.drawn()
    assert tab.page.locator("#pieces input").nth(1).is_checked()


def test_the_most_important_heads_have_cards(browser: Any, tmp_path: Path) -> None:
    base = told()
    costs = (0.1, -0.2, 1.5)
    rows = [{**row, "ablation": cost} for row, cost in zip(base.rows, costs, strict=True)]
    columns = [one for one in base.columns if one["key"] != "ablation"]
    columns.append({**columns[0], "key": "ablation", "title": "Ablation", "unit": "nats"})
    tab = Tab(browser, write_page(replace(base, rows=rows, columns=columns), tmp_path / "a.html"))
    cards = tab.page.locator("#important .card")
    assert [text.split()[:2] for text in cards.all_inner_texts()] == [
        ["L0H2", "unlabeled"],
        ["L0H0", "induction"],
    ]
    assert "Ablation: +1.5" in cards.first.inner_text()
    cards.first.locator("button").click()
    tab.page.locator("#bar-head", has_text="L0H2").wait_for()
    tab.check()
    tab.close()


def saved(tab: Tab, chart: str, kind: str) -> bytes:
    with tab.page.expect_download() as waiting:
        tab.page.locator(f"#{chart} + .save button", has_text=kind).click()
    return Path(waiting.value.path()).read_bytes()


def test_a_saved_picture_says_what_it_is_of(tab: Tab) -> None:
    tag = "{http://www.w3.org/2000/svg}"
    drawn = ElementTree.fromstring(saved(tab, "glance", "SVG"))
    words = [one.text for one in drawn.iter(f"{tag}text")]
    assert words[0] == "L0H0, induction"
    told = " ".join(words)
    assert "full color is a weight of 1." in told
    assert "made up on words drawn by chance" in told
    assert {"0", "0.25", "1"} < set(words)  # a scale, which the small map has not
    assert drawn.find(f"{tag}title").text.startswith("L0H0, induction. ")
    picture = Image.open(io.BytesIO(saved(tab, "glance", "PNG")))
    assert picture.size == tuple(2 * float(drawn.get(name)) for name in ("width", "height"))
    drawn = ElementTree.fromstring(saved(tab, "heads", "SVG"))
    words = [one.text for one in drawn.iter(f"{tag}text")]
    assert words[0] == "The attention map of every head"
    assert len([*drawn.iter(f"{tag}image")]) == 2  # the cells, and the maps in them
    assert words[-3:] == ["induction", "previous token", "unlabeled"]
    tab.asked[:] = [one for one in tab.asked if not one.startswith("blob:")]


def test_a_picture_is_copied_with_its_words(tab: Tab) -> None:
    button = tab.page.locator("#heads + .save button").nth(2)
    tab.context.grant_permissions(["clipboard-read", "clipboard-write"])
    button.click()
    tab.page.locator("#heads + .save button", has_text="copied").wait_for()
    read = "navigator.clipboard.read().then(([one]) => one.getType('image/png'))"
    flat = tab.page.evaluate(
        f"{read}.then((png) => png.arrayBuffer()).then((bytes) => [...new Uint8Array(bytes)])"
    )
    copied = Image.open(io.BytesIO(bytes(flat)))
    tab.page.locator("#heads + .save button", has_text="copy").wait_for()
    assert copied.tobytes() == Image.open(io.BytesIO(saved(tab, "heads", "PNG"))).tobytes()
    tab.asked[:] = [one for one in tab.asked if not one.startswith("blob:")]


def test_a_head_under_the_pointer_is_a_preview(tab: Tab) -> None:
    chosen = tab.text("#bar-head")
    other = next(name for name in ("L0H0", "L0H1") if name != chosen)
    tab.move("heads", int(other[3]), int(other[1]), 3, 1)
    tab.page.locator("#glance-title", has_text=f"{other} preview; click to select").wait_for()
    assert tab.page.locator("#story.preview").count() == 1
    assert tab.text("#bar-head") == chosen
    tab.page.mouse.move(2, 2)
    tab.page.wait_for_selector("#story:not(.preview)")
    assert tab.text("#glance-title") == chosen


def test_a_copied_link_says_where_it_opens(tab: Tab) -> None:
    buttons = tab.page.locator("#glance + .save button")
    buttons.last.click()
    buttons.filter(has_text=re.compile("^copied; it works only on this machine")).wait_for()


def test_the_search_finds_heads_tokens_and_labels_and_steps_on(tab: Tab) -> None:
    def find(text: str) -> None:
        tab.page.locator("#search").fill(text)
        tab.press("Enter")

    tab.page.locator("#search").fill("cat")
    assert tab.text("#found-by-search") == "2 found; press Enter"
    find("cat")
    assert tab.page.url.split("#")[1] == "heads/L0H0/5"
    assert tab.text("#found-by-search") == "1 of 2"
    tab.press("Enter")
    assert tab.page.url.endswith("/9")
    tab.press("Enter")
    assert tab.page.url.endswith("/5")
    find("L0H2")
    assert tab.text("#bar-head") == "L0H2"
    find("induction")
    assert tab.text("#bar-head") == "L0H0"
    find("l0h1 ran")
    assert (tab.text("#bar-head"), tab.page.url.split("/")[-1]) == ("L0H1", "10")
    find("no such word")
    assert tab.text("#found-by-search") == "not found"
    tab.page.locator("h1").click()
    tab.press("/")
    assert tab.page.evaluate("document.activeElement.id") == "search"
    tab.page.locator("#search").fill("")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_token_can_be_read_on_its_color(tab: Tab, scheme: str) -> None:
    """WCAG 2, level AA: 4.5 to 1, also on the strongest."""
    tab.colors(scheme)
    found = tab.page.locator("#story-text button").evaluate_all(
        """(all) => all.map((one) => {
             const style = getComputedStyle(one);
             const panel = getComputedStyle(one.closest(".story-text")).backgroundColor;
             return [style.color, style.backgroundColor, panel];
           })"""
    )
    for ink, over, under in found:
        assert ratio(ink, blend(over, under)) >= 4.5
    tab.colors("light")


def parts(color: str) -> list[float]:
    return [float(part) for part in re.findall(r"[\d.]+", color)]


def blend(over: str, under: str) -> list[float]:
    r, g, b, *alpha = parts(over)
    share = alpha[0] if alpha else 1
    return [share * a + (1 - share) * b for a, b in zip((r, g, b), parts(under), strict=False)]


def ratio(ink: str, ground: list[float]) -> float:
    def light(color: list[float]) -> float:
        share = np.array(color[:3]) / 255
        linear = np.where(share <= 0.03928, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)
        return float(linear @ [0.2126, 0.7152, 0.0722])

    low, high = sorted((light(parts(ink)), light(ground)))
    return (high + 0.05) / (low + 0.05)


def test_keys_alone_choose_tokens_pieces_and_lists_and_keep_the_focus(tab: Tab) -> None:
    def focused() -> str:
        return tab.page.evaluate("document.activeElement.id || document.activeElement.outerHTML")

    tab.page.locator("#pieces input").first.focus()
    tab.press("ArrowRight")
    tab.page.locator("#story-text button", has_text="r1").first.wait_for()
    assert "on=repeats" in tab.page.url
    assert 'value="repeats"' in focused()
    tab.press("ArrowLeft")
    tab.page.locator("#story-text button", has_text="sat").first.wait_for()
    tab.show("head")
    tab.page.locator("#strongest button").nth(1).focus()
    tab.press("Enter")
    assert tab.page.evaluate("document.activeElement.closest('ol').id") == "strongest"
    tab.page.locator("#more summary").focus()
    tab.press("Enter", "Tab", "Enter")
    tab.page.locator("#view-likeness").wait_for()
    assert tab.page.evaluate("document.activeElement.textContent") == "More"

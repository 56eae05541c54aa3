"""Two looks on one page: what changed in words, layer by layer, and one cursor on both texts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import numpy as np
import pytest

from browser import Tab, chromium
from headwise.report.page import write_page
from headwise.report.schema import Look
from looks import decoder, with_repeats

pytestmark = pytest.mark.browser


def before() -> Look:
    look = with_repeats(decoder(2, 3, 12, scores=False))
    return replace(look, rows=[labelled(row, 0.83) for row in look.rows])


def after() -> Look:
    """Head L1H2 loses induction; the entropy of layer 0 rises by 0.5, 1.0 and 1.5, that of head 1.0
    by less than is shown of it."""
    look = before()
    rows = []
    for row in look.rows:
        if (row["layer"], row["head"]) == (1, 2):
            row = row | {"labels": [], "induction_random": 0.21}
        if row["layer"] == 0:
            row = row | {"entropy": row["entropy"] + 0.5 * (row["head"] + 1)}
        if (row["layer"], row["head"]) == (1, 0):
            row = row | {"entropy": row["entropy"] + 0.0004}
        rows.append(row)
    layers = [replace(layer, maps=layer.maps[:, :, ::-1].copy()) for layer in look.layers]
    return replace(look, rows=rows, layers=layers, provenance=look.provenance | {"model": "after"})


def labelled(row: dict[str, Any], score: float) -> dict[str, Any]:
    """The row with a made-up induction score, and the label in head 1.2 alone."""
    mine = (row["layer"], row["head"]) == (1, 2)
    label = {"label": "induction", "key": "induction_random", "score": score, "threshold": 0.4}
    return row | {"induction_random": score if mine else 0.1, "labels": [label] if mine else []}


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    file = write_page(before(), tmp_path_factory.mktemp("page") / "page.html", other=after())
    with chromium() as browser:
        opened = Tab(browser, file)
        yield opened
        opened.close()


def test_the_first_words_say_what_changed_most(tab: Tab) -> None:
    lines = [" ".join(line.split()) for line in tab.texts("#changes li")]
    assert lines[
        0
    ] == "L1H2 lost induction : induction on repeated random tokens 0.83 → 0.21".replace(" :", ":")
    rows = before().rows
    entropies = [f"{row['entropy']:.2f} → {row['entropy'] + 1.5:.2f} nats" for row in rows[:3]]
    assert lines[1] == f"L0H2 entropy rose, {entropies[2]}"
    assert lines[4:] == ["L1H0 entropy rose by 0.00040 nats"]  # and head 1.1 did not change
    assert tab.text("#changed") == (
        "1 label changed. Label changes come first, then the largest metric changes:"
    )
    assert tab.text("#bar-head") == "L1H2"  # the page begins with it


def test_the_strip_has_each_layers_mean_change(tab: Tab) -> None:
    a, b = before(), after()
    words = tab.plotted("strip", "words")
    keys = [column["key"] for column in a.columns]
    shown = {(word["y"], keys[word["x"]]): word["text"] for word in words}
    assert shown[0, "entropy"] == "+1.00"
    assert shown[1, "induction_random"] == "−0.21"  # a third of −0.62
    assert shown[0, "first"] == shown[1, "entropy"] == "·"
    grid = np.array(tab.plotted("strip"), dtype=float)
    values = [row["entropy"] for look in (a, b) for row in look.rows]
    assert grid[0, keys.index("entropy")] == pytest.approx(1 / (max(values) - min(values)))
    assert grid[1, keys.index("induction_random")] == pytest.approx(-0.62 / 3)


def test_one_click_lists_a_layers_heads_in_pairs(tab: Tab) -> None:
    keys = [column["key"] for column in before().columns]
    tab.click_cell("strip", keys.index("entropy"), 0, len(keys), 2, tip="Layer 0")
    assert tab.text("#difference-title") == "Entropy: the heads of layer 0"
    assert tab.texts("#difference-table th button") == ["L0H2", "L0H1", "L0H0"]
    assert tab.texts("#difference-table td b") == ["+1.50", "+1.00", "+0.50"]
    kept = parse_qs(tab.page.url.split("?")[1])
    assert (kept["change"], kept["layer"]) == (["entropy"], ["0"])
    assert kept["of"][0].startswith("made up on words drawn by chance → after on ")
    tab.page.reload()
    tab.page.wait_for_selector("html[data-ready=yes]")
    assert tab.text("#difference-title") == "Entropy: the heads of layer 0"
    tab.page.select_option("#layer-menu", "")
    tab.drawn()
    assert len(tab.texts("#difference-table tbody tr")) == 6


def test_both_texts_share_one_cursor(tab: Tab) -> None:
    tab.page.goto(f"{tab.address}#compare/L1H2/3")
    tab.drawn()
    tab.page.locator("#both-told-1 button[data-token='7']").hover()
    tab.page.locator("#both-told-0 [aria-pressed=true][data-token='7']").wait_for()
    tokens = before().streams[0].tokens
    for run, look in enumerate((before(), after())):
        assert f" at {tokens[7].strip()} " in tab.text(f"#both-sentence-{run}").replace("·", "")
        shown = tab.page.locator(f"#both-told-{run} button").evaluate_all(
            "(all) => all.map((one) => Number(one.style.getPropertyValue('--w')))"
        )
        expected = np.tril(look.layers[0].maps[2])[7]
        top = np.isin(np.arange(12), look.layers[0].top_keys[2, 7])
        np.testing.assert_allclose(np.array(shown)[~top], np.sqrt(expected)[~top], atol=0.003)
    tab.page.mouse.move(2, 2)
    tab.page.locator("#both-told-0 [aria-pressed=true]:not([data-token='7'])").wait_for()
    tab.click("#both-told-0 button[data-token='4']")
    tab.page.keyboard.press("ArrowRight")
    tab.page.locator("#both-told-1 [aria-pressed=true][data-token='5']").wait_for()
    assert "/5?" in tab.page.url


def test_both_losses_are_shown(tab: Tab, tmp_path: Path) -> None:
    """Where neither has one, nothing is said; where one has none, that."""
    assert tab.texts("#losses li") == []
    a, b = (
        replace(look, provenance=look.provenance | {"loss_text": loss, "loss": "each token"})
        for look, loss in ((before(), 3.214), (after(), 2.987))
    )
    repeats = {"loss_first_copy": 6.5, "loss_second_copy": 0.25}
    b = replace(b, provenance=b.provenance | repeats)
    lines = [
        "A: loss 3.21 nats on each token",
        "B: loss 2.99 nats on each token; on random tokens 6.50 the first time, 0.25 the second",
    ]
    difference = "B − A: −0.23 nats of loss"
    for other, rest in ((b, [lines[1], difference]), (after(), ["B: no loss was measured"])):
        both = Tab(tab.context.browser, write_page(a, tmp_path / "page.html", other=other))
        assert both.texts("#losses li") == [lines[0], *rest]
        both.close()


def test_the_header_names_both(tab: Tab) -> None:
    assert tab.page.locator("#both-names").text_content() == (
        "A made up on words drawn by chance" + "B after on words drawn by chance"
    )
    assert tab.text("h1") == "A made up on words drawn by chance\nB after on words drawn by chance"
    assert tab.texts("#both-names .shown") == ["A made up on words drawn by chance"]
    assert tab.text("#facts").startswith("A is shown:")

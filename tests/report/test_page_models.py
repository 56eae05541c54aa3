"""The page of every kind of model: two streams, images, long texts, 1,024 heads, two runs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from browser import PHONE, Tab, chromium
from headwise.models.gpt import GPT, GPTConfig
from headwise.report import look as see
from headwise.report.page import write_page
from headwise.report.schema import Look, Stream
from looks import blocks, decoder, encoder_decoder, image, large

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as opened:
        yield opened


def choose(tab: Tab, layer: int, head: int) -> None:
    tab.page.goto(f"{tab.address}#{tab.page.url.split('#')[1].split('/')[0]}/{layer}.{head}")
    tab.page.locator("#bar-head", has_text=f"L{layer}H{head}").wait_for()
    tab.drawn()


def colors(tab: Tab, side: str) -> list[float]:
    """How strongly the tokens of a side of cross-attention are colored, 0 to 1."""
    buttons = f"[...document.querySelectorAll('[data-side={side}] button')]"
    return tab.page.evaluate(f"{buttons}.map((b) => Number(b.style.getPropertyValue('--w')))")


# --- an encoder and a decoder ----------------------------------------------------------------


@pytest.fixture(scope="module")
def translator(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    file = write_page(encoder_decoder(), tmp_path_factory.mktemp("page") / "page.html")
    tab = Tab(browser, file)
    yield tab
    tab.close()


def test_layers_of_different_widths_share_one_map_of_heads(translator: Tab) -> None:
    translator.show("heads")
    z = translator.plotted("heads")
    assert [sum(cell is not None for cell in line) for line in z] == [4, 4, 3, 3, 3, 3]
    names = [name for _, name in translator.plotted("heads", "y.ticks")]
    assert names == ["encoder 0", "encoder 1", "decoder 2", "cross 3", "decoder 4", "cross 5"]
    choose(translator, 1, 3)
    translator.page.locator("#heads").focus()
    translator.press("ArrowDown")  # the layer below has three heads only
    assert translator.text("#bar-head") == "L2H2"
    translator.check()


def test_an_encoder_looks_ahead_and_cross_attention_at_the_other_stream(translator: Tab) -> None:
    look = encoder_decoder()
    translator.show("head")
    for layer, shape in ((0, (19, 19)), (3, (11, 19)), (2, (11, 11))):
        choose(translator, layer, 1)
        shown = np.array(translator.plotted("map"), dtype=float)
        assert shown.shape == shape
        visible = np.tri(*shape, dtype=bool) if layer == 2 else np.ones(shape, dtype=bool)
        expected = np.sqrt(look.layers[layer].maps[1])
        np.testing.assert_allclose(shown[visible], expected[visible], atol=0.003)
        assert np.isnan(shown[~visible]).all()
        assert translator.page.locator("#offsets-panel").is_visible() == (layer != 3)
    choose(translator, 3, 1)
    assert translator.text("#head-module").endswith("decoder attends to encoder")
    tokens = look.streams[0].tokens
    key = look.layers[3].top_keys[1, int(translator.page.url.split("/")[-1]), 0]
    assert translator.texts("#strongest code")[0] == tokens[key].replace(" ", "·")
    translator.check()


def test_cross_attention_is_shown_on_both_texts(translator: Tab) -> None:
    maps = encoder_decoder().layers[5].maps[2]
    translator.show("head")
    choose(translator, 5, 2)
    assert translator.texts("#streams h3") == ["decoder: queries", "encoder: keys"]
    translator.click("[data-side=queries] button[data-token='4']")
    np.testing.assert_allclose(colors(translator, "keys"), np.sqrt(maps[4]), atol=0.003)
    assert set(colors(translator, "queries")) == {0}
    assert "at 4 attends to" in translator.text("#strongest-title")
    translator.click("[data-side=keys] button[data-token='17']")
    np.testing.assert_allclose(colors(translator, "queries"), np.sqrt(maps[:, 17]), atol=0.003)
    assert "at 17 is attended to by" in translator.text("#strongest-title")
    translator.click("#directions label", 2)
    received = encoder_decoder().layers[5].received[2]
    shown = colors(translator, "keys")
    np.testing.assert_allclose(shown, np.sqrt(received / received.max()), atol=0.003)
    translator.click("#directions label", 0)
    choose(translator, 0, 0)
    assert translator.page.locator("#streams .tokens").count() == 1
    choose(translator, 2, 0)
    assert translator.page.locator("#streams button").count() == 11
    translator.check()


def test_maps_of_different_sizes_share_one_mosaic(translator: Tab) -> None:
    translator.show("mosaic")
    z = np.array(translator.plotted("mosaic"), dtype=float)
    lines, columns = z.shape[0] // 6, z.shape[1] // 4
    shown = [
        np.isfinite(z[n * lines : (n + 1) * lines, 3 * columns :]).any() for n in range(6)
    ]  # the fourth head
    assert shown == [True, True, False, False, False, False]
    translator.show("likeness")
    translator.show("scatter")
    assert translator.page.locator("#axis-x").input_value() == "previous"
    translator.check()


# --- an image --------------------------------------------------------------------------------


def test_an_image_is_shown_with_its_patches(browser: Any, tmp_path: Path) -> None:
    look = image()
    tab = Tab(browser, write_page(look, tmp_path / "page.html"))
    tab.show("head")
    choose(tab, 1, 3)
    picture = tab.page.locator("#streams .patches img")
    assert picture.evaluate("(image) => [image.naturalWidth, image.naturalHeight]") == [240, 160]
    patches = tab.page.locator("#streams .patches button")
    assert patches.count() == 24
    box, first = picture.bounding_box(), patches.nth(0).bounding_box()
    assert abs(box["width"] - 6 * first["width"]) < 1
    assert abs(box["height"] - 4 * first["height"]) < 1
    tab.click("#streams .patches button", 7)  # row 1, column 1
    maps = look.layers[1].maps[3]
    buttons = "[...document.querySelectorAll('#streams button')]"
    shown = tab.page.evaluate(f"{buttons}.map((b) => Number(b.style.getPropertyValue('--w')))")
    np.testing.assert_allclose(shown, np.sqrt(maps[8]), atol=0.003)
    tab.press("ArrowDown")
    assert tab.page.evaluate("document.activeElement.ariaLabel") == "patch 2,1"
    tab.press("ArrowRight", "Home")
    assert "[CLS]" in tab.text("#strongest-title")
    offsets = np.array(tab.plotted("offsets"), dtype=float)
    expected = np.zeros((7, 11))
    for query in range(24):
        for key in range(24):
            down, right = key // 6 - query // 6, key % 6 - query % 6
            expected[down + 3, right + 5] += maps[query + 1, key + 1] / 24
    np.testing.assert_allclose(offsets, np.sqrt(expected / expected.max()), atol=0.004)
    assert not tab.page.locator("#profile-panel").is_visible()  # "tokens back" says nothing here
    for view in ("head", "mosaic", "table", "about"):
        tab.show(view)
    tab.close()


def test_windows_of_an_image_are_numbered_places(browser: Any, tmp_path: Path) -> None:
    look = image()
    small = decoder(2, 3, [str(place) for place in range(16)], scores=False)
    window = Stream("16 positions", small.streams[0].tokens)
    layers = [replace(layer, queries=1, keys=1, causal=False) for layer in small.layers]
    facts = small.provenance | {"texts": 7}
    seen = replace(small, layers=layers, streams=[*look.streams, window], provenance=facts)
    tab = Tab(browser, write_page(seen, tmp_path / "page.html"))
    assert tab.text("#facts") == "6 heads in 2 layers\n25 tokens of the first image\n7 images"
    tab.show("head")
    assert tab.text("#streams").split() == window.tokens
    assert "attends over 16 positions at a time" in tab.text("#text-what")
    tab.close()


def test_of_many_texts_the_header_counts_the_tokens_of_the_first(
    browser: Any, tmp_path: Path
) -> None:
    look = decoder(1, 2, 5)
    look.provenance["texts"] = 1_234
    tab = Tab(browser, write_page(look, tmp_path / "page.html"))
    assert tab.text("#facts").splitlines()[1:] == ["5 tokens of the first text", "1,234 texts"]
    tab.close()


# --- a long text -----------------------------------------------------------------------------


def test_a_long_text_is_shown_in_blocks_with_exact_keys(browser: Any, tmp_path: Path) -> None:
    look = decoder(1, 2, 23)
    layer = look.layers[0]
    coarse = np.stack([blocks(layer.maps[head], 5) for head in range(2)])
    layers = [
        replace(
            layer,
            maps=coarse,
            top_keys=layer.top_keys[..., :2],
            top_weights=layer.top_weights[..., :2],
        )
    ]
    tab = Tab(browser, write_page(replace(look, layers=layers), tmp_path / "page.html"))
    tab.show("head")
    choose(tab, 0, 1)
    assert "a block of 4 or 5 queries puts on a block of 4 or 5 keys" in tab.text("#head-what")
    assert len(tab.plotted("map")) == 5
    tab.show("head")
    tab.click("#streams button[data-token='13']")
    starts = [0, 5, 10, 14, 19, 23]  # where floor(5 i / 23) steps up
    cell = np.searchsorted(starts, np.arange(23), "right") - 1
    expected = np.where(np.arange(23) <= 13, coarse[1, 2, cell] / np.diff(starts)[cell], 0)
    expected[layer.top_keys[1, 13, :2]] = layer.top_weights[1, 13, :2]
    buttons = "[...document.querySelectorAll('#streams button')]"
    shown = tab.page.evaluate(f"{buttons}.map((b) => Number(b.style.getPropertyValue('--w')))")
    np.testing.assert_allclose(shown, np.sqrt(expected), atol=0.004)
    exact = [text for text in tab.texts("#strongest b") if not text.startswith("≈")]
    assert exact == [f"{value:.3f}" for value in layer.top_weights[1, 13, :2]]
    tab.close()


# --- 1,024 heads -----------------------------------------------------------------------------


def test_a_thousand_heads_are_small_and_drawn_view_by_view(browser: Any, tmp_path: Path) -> None:
    look = large()
    file = write_page(look, tmp_path / "page.html")
    assert file.stat().st_size < 3_000_000
    tab = Tab(browser, file)
    assert tab.page.locator("#heads image").count() == 0  # cells are too small for maps
    assert tab.measured("Nodes") < 6_000  # the text, and nothing of the views that are not open yet
    assert np.array(tab.plotted("heads"), dtype=float).shape == (32, 32)
    for view in ("table", "head", "mosaic", "likeness", "scatter", "about"):
        tab.show(view)
    tab.show("table")
    lines = tab.page.locator("#table tbody tr")
    assert lines.count() == 40  # more are made when they are scrolled to
    lines.last.scroll_into_view_if_needed()
    tab.page.locator("#table tbody tr[data-row='79']").wait_for(state="attached")
    tab.page.locator("#filter").fill("h.31.")
    assert tab.text("#found") == "32 of 1,024 heads"
    tab.click("#table tbody tr[data-row='1023'] button")
    tab.show("head")
    top = look.layers[31].top_weights[31, int(re.split(r"[/?]", tab.page.url)[-2])]
    assert float(tab.texts("#strongest b")[0]) == pytest.approx(top[0], abs=0.003)
    tab.show("mosaic")
    cells = "(({ width, height }) => width * height)(document.querySelector('#mosaic canvas'))"
    assert 500_000 < tab.page.evaluate(cells) < 1_300_000
    tab.click_cell("mosaic", 30, 2, 32, 32, tip="L2H30")
    assert tab.text("#bar-head") == "L2H30"
    tab.close()


@pytest.mark.slow
def test_a_look_at_a_thousand_heads_is_below_three_megabytes(tmp_path: Path) -> None:
    """With all that a look has: maps of repeats, composition, thirty metrics of each head."""
    sizes: dict[str, Any] = {"n_positions": 512, "n_embd": 128, "n_layer": 32, "n_head": 32}
    model = GPT(GPTConfig(vocab_size=2000, **sizes))
    with torch.no_grad():
        for matrix in (one for one in model.parameters() if one.dim() == 2):
            matrix.mul_(8)  # attention that is far from uniform
    ids = torch.randint(2000, (512,))
    seen = see(model, [f" w{n}" for n in range(2000)], ids, ablation=False)
    assert len(seen.rows) == 1024
    assert len(seen.composition["K"]) > 300
    assert write_page(seen, tmp_path / "page.html").stat().st_size < 3_000_000


# --- what opens first ------------------------------------------------------------------------


def test_without_labels_it_opens_on_the_most_important_head(browser: Any, tmp_path: Path) -> None:
    def bare(look: Look) -> Look:
        return replace(look, rows=[row | {"labels": []} for row in look.rows])

    look = bare(decoder(2, 3, 23))
    tab = Tab(browser, write_page(look, tmp_path / "page.html"))
    most = max(look.rows, key=lambda row: row["ablation"])
    assert tab.page.locator("#statistic-menu").input_value() == "ablation"
    assert tab.text("#bar-head") == f"L{most['layer']}H{most['head']}"
    assert tab.text("#finding").startswith("No head has a label. Ablating ")
    tab.close()
    tab = Tab(browser, write_page(bare(decoder(2, 3, 23, scores=False)), tmp_path / "page.html"))
    assert tab.page.locator("#statistic-menu").input_value() == "entropy"
    tab.close()


def test_the_scatter_opens_on_two_metrics_that_vary(browser: Any, tmp_path: Path) -> None:
    look = decoder(2, 3, 23, scores=False)
    still = {"induction_random": 0.01, "previous": 0.3, "entropy": 2.0, "self": 0.1}
    rows = [row | still for row in look.rows]
    tab = Tab(browser, write_page(replace(look, rows=rows), tmp_path / "page.html"))
    tab.show("scatter")
    axes = [tab.page.locator(f"#axis-{name}").input_value() for name in "xy"]
    assert len({*axes, *still}) == 2 + len(still)
    for axis in axes:
        values = [row[axis] for row in rows]
        assert max(values) > 1.1 * min(values)
    tab.close()


# --- the poster ------------------------------------------------------------------------------


def test_the_overview_has_the_map_of_every_head(browser: Any, tmp_path: Path) -> None:
    look = decoder(2, 3, 23)
    tab = Tab(browser, write_page(look, tmp_path / "page.html"))
    flat, width = tab.page.evaluate(POSTER)
    picture = np.array(flat).reshape(-1, width, 4)
    tall, wide = (size // count for size, count in zip(picture.shape, (2, 3), strict=False))
    panel = hex_of(tab.page.evaluate("getComputedStyle(document.documentElement)"
                                     ".getPropertyValue('--panel')"))  # fmt: skip
    for row in look.rows:
        layer, head = row["layer"], row["head"]
        cell = picture[layer * tall : (layer + 1) * tall, head * wide : (head + 1) * wide]
        down, across = (np.flatnonzero((cell[..., 3] > 128).any(axis)) for axis in (1, 0))
        assert len(across) == pytest.approx(len(down), abs=1)
        at = [np.linspace(one[0], one[-1], 47).round().astype(int)[1::2] for one in (down, across)]
        shown = cell[np.ix_(*at)][..., :3]
        expected = np.sqrt(look.layers[layer].maps[head])
        lower = np.tri(23, dtype=bool)
        colors = np.stack([np.interp(expected, STOPS, part) for part in VIRIDIS.T], -1)
        np.testing.assert_allclose(shown[lower], colors[lower], atol=6)
        assert (shown[~lower] == panel).all()
    tab.page.select_option("#statistic-menu", "entropy")
    assert tab.page.locator("#heads image").count() == 0
    tab.close()


POSTER = """async () => {
  const image = new Image();
  image.src = document.querySelector('#heads image').getAttribute('href');
  await image.decode();
  const pen = new OffscreenCanvas(image.width, image.height).getContext('2d');
  pen.drawImage(image, 0, 0);
  return [[...pen.getImageData(0, 0, image.width, image.height).data], image.width];
}"""


def hex_of(color: str) -> list[int]:
    return [*bytes.fromhex(color.strip().removeprefix("#"))]


VIRIDIS = np.array([hex_of(one) for one in (
    "440154 482878 3e4989 31688e 26828e 1f9e89 35b779 6ece58 b5de2b fde725".split()
)])  # fmt: skip
STOPS = np.linspace(0, 1, len(VIRIDIS))


def test_a_single_head_is_a_page_too(browser: Any, tmp_path: Path) -> None:
    tab = Tab(browser, write_page(decoder(1, 1, 2, scores=False), tmp_path / "page.html"))
    for view in ("table", "head", "mosaic", "likeness", "scatter", "about"):
        tab.show(view)
        tab.click("#next-head")
        assert tab.text("#bar-head") == "L0H0"
    tab.close()


# --- two runs --------------------------------------------------------------------------------


def other_run() -> Look:
    """Another look at the same model, which lacks the last layer."""
    found = decoder(2, 3, 23, seed=5)
    keep = [row for row in found.rows if row["layer"] < 1]
    similarity = None if found.similarity is None else found.similarity[:3, :3]
    facts = found.provenance | {"model": "after"}
    return replace(
        found, rows=keep, layers=found.layers[:1], similarity=similarity, provenance=facts
    )


@pytest.fixture(scope="module")
def compared(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    file = tmp_path_factory.mktemp("page") / "page.html"
    tab = Tab(browser, write_page(decoder(2, 3, 23), file, other=other_run()))
    yield tab
    tab.close()


def test_differences_are_those_of_the_same_heads(compared: Tab) -> None:
    a, b = decoder(2, 3, 23), other_run()
    assert compared.page.locator("#view-compare").is_visible()  # what such a page begins with
    assert "3 of 6 heads of A have a match in B" in compared.text("#compare-what")
    for column in a.columns:
        key = column["key"]
        compared.page.select_option("#difference-menu", key)
        compared.drawn()
        changes = [other[key] - one[key] for one, other in zip(a.rows, b.rows, strict=False)]
        shown = compared.plotted("differences")
        np.testing.assert_allclose(shown[0], changes, atol=1e-12)
        assert shown[1] == [None] * 3
        order = np.argsort(-np.abs(changes), kind="stable")
        assert compared.texts("#difference-table th button") == [f"L0H{head}" for head in order]
        first = compared.texts("#difference-table tbody tr:first-child td")[2]
        assert float(first.replace("−", "-")) == pytest.approx(changes[order[0]], abs=0.051)
    compared.check()


def test_maps_of_both_runs_and_their_difference(compared: Tab) -> None:
    compared.show("compare")
    choose(compared, 0, 2)
    maps = [look.layers[0].maps[2] for look in (decoder(2, 3, 23), other_run())]
    lower = np.tri(23, dtype=bool)
    for run, expected in enumerate(maps):
        shown = np.array(compared.plotted(f"both-map-{run}"), dtype=float)
        np.testing.assert_allclose(shown[lower], np.sqrt(expected)[lower], atol=0.003)
    change = np.array(compared.plotted("both-map-2"), dtype=float)
    expected = (maps[1] - maps[0])[lower]
    np.testing.assert_allclose(change[lower] * np.abs(change[lower]), expected, atol=0.006)
    assert "The tokens differ between A and B" in compared.text("#both-what")
    choose(compared, 1, 2)
    assert "Only one of the two has this head" in compared.text("#both-what")
    assert not compared.page.locator("#both-map-1").is_visible()
    compared.check()


def test_every_view_shows_either_run(compared: Tab) -> None:
    choose(compared, 0, 1)
    compared.show("heads")
    assert len(compared.plotted("heads")) == 2
    compared.click("#run label", 1)
    assert len(compared.plotted("heads")) == 1
    assert compared.text("#model") == "after"
    assert compared.text("#bar-head") == "L0H1"
    compared.show("table")
    assert compared.page.locator("#table tbody tr").count() == 3
    compared.show("about")
    assert compared.texts("#made dt").count("Model") == 2
    assert compared.texts("#made dt").count("Numbers") == 1  # alike in both
    compared.show("compare")
    compared.click("#difference-table button", 1)
    assert compared.text("#bar-head") == compared.texts("#difference-table th button")[1]
    compared.click("#run label", 0)
    assert compared.text("#model") == "made up"
    compared.check()


def test_maps_of_other_lengths_have_no_difference(browser: Any, tmp_path: Path) -> None:
    file = write_page(decoder(1, 2, 9), tmp_path / "page.html", other=decoder(1, 2, 7))
    tab = Tab(browser, file)
    assert "The two maps differ in size" in tab.text("#both-what")
    assert not tab.page.locator("#both-map-2").is_visible()
    tab.close()


def test_runs_of_one_name_are_told_apart_and_small_differences_have_digits(
    browser: Any, tmp_path: Path
) -> None:
    one = decoder(1, 4, 9, scores=False)
    changes = [0.25, -0.0021, 3.14e-7, 0.0]
    rows = [row | {"first": row["first"] + by} for row, by in zip(one.rows, changes, strict=True)]
    other = replace(one, rows=rows, provenance=one.provenance | {"dtype": "float16", "seed": 4})
    tab = Tab(browser, write_page(one, tmp_path / "page.html", other=other))
    names = [
        f"made up on words drawn by chance, {end}" for end in ("float32, seed 0", "float16, seed 4")
    ]
    told = [one.get_attribute("title") for one in tab.page.locator("#run label").all()]
    assert told == [f"A: {names[0]}", f"B: {names[1]}"]
    assert tab.text("#compare-what").startswith(f"A {names[0]}; B {names[1]}.")
    tab.page.select_option("#difference-menu", "first")
    tab.drawn()
    shown = tab.texts("#difference-table td b")
    assert shown == ["+0.25", "−0.0021", "+3.1e−7", "0"]
    tab.close()


# --- a phone ---------------------------------------------------------------------------------

VIEWS = ("heads", "table", "head", "mosaic", "likeness", "scatter", "compare", "about")


@pytest.mark.parametrize("kind", ["two runs", "two streams"])
def test_a_phone_shows_every_view_without_scrolling_sideways(
    browser: Any, tmp_path: Path, kind: str
) -> None:
    look = decoder(4, 6, 40) if kind == "two runs" else encoder_decoder()
    other = decoder(4, 6, 40, seed=1) if kind == "two runs" else None
    tab = Tab(browser, write_page(look, tmp_path / "page.html", other=other), **PHONE)
    for view in VIEWS:
        if view == "compare" and other is None:
            continue
        link = tab.page.locator(f"#nav a[data-view={view}]")
        if not link.is_visible():
            tab.page.locator("#more summary").tap()
        link.tap()
        tab.page.locator(f"#view-{view}").wait_for()
        tab.drawn()
        assert tab.width() == 375, view
        for link in tab.page.locator("#nav a:visible").all():  # none is cut
            box = link.bounding_box()
            assert box["x"] >= 0, view
            assert box["x"] + box["width"] <= 375, view
    tab.page.locator("#nav a[data-view=heads]").tap()
    tab.drawn()
    tab.page.locator("#next-head").tap()
    tab.drawn()
    area = tab.page.locator("#heads .area").first
    area.scroll_into_view_if_needed()
    box = area.bounding_box()
    tab.page.touchscreen.tap(box["x"] + 5, box["y"] + 5)
    tab.page.locator("#glance-title", has_text="L0H0").wait_for()
    tab.page.locator("#nav a[data-view=head]").tap()
    tab.page.locator("#streams button[data-token='9']").first.tap()
    tab.drawn()
    assert "at 9 attends to" in tab.text("#strongest-title")
    tab.close()

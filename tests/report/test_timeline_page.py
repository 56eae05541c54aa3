"""The timeline in a real browser: what it shows is what the history holds."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headwise as hw
from browser import PHONE, Tab, axe_core, chromium, colors, violations
from headwise.report.page import render_page
from headwise.report.page.timeline import render_timeline, write_timeline
from headwise.report.timeline import Timeline, Track, read_timeline
from headwise.telemetry import Alarm
from histories import LAYERS, STEPS, drawn, write_history
from looks import decoder

pytestmark = pytest.mark.browser

HEADS = [f"L{layer}H{head}" for layer, count in enumerate(LAYERS.values()) for head in range(count)]
VIRIDIS = ["440154", "482878", "3e4989", "31688e", "26828e", "1f9e89", "35b779", "6ece58", "b5de2b"]
VIRIDIS += ["fde725"]
HOSTILE = "</script><img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Timeline:
    """A small run: at step 20 a figure is not finite and a head was not seen."""
    figures = drawn(20, 5, 0)["entropy"]
    data = figures.data.copy()
    data[:, 1], data[1, 3] = 0, math.nan
    changed = {20: {"entropy": replace(figures, data=data)}}
    folder = tmp_path_factory.mktemp("histories") / "run"
    folder.mkdir()
    scalars = [(step, "loss", 4 / step) for step in range(1, 61)] + [(1, "learning_rate", 0.5)]
    write_history(folder / "monitor.sqlite", changed=changed, scalars=scalars)
    return read_timeline(folder)


@pytest.fixture(scope="module")
def opened(browser: Any, run: Timeline, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    file = write_timeline(run, tmp_path_factory.mktemp("page") / "page.html")
    tab = Tab(browser, file)
    yield tab
    tab.close()


@pytest.fixture
def tab(opened: Tab) -> Iterator[Tab]:
    """One tab for all tests, each from its own address."""
    go(opened, "statistic=entropy&head=0.0&scale=linear&layer=")
    opened.page.mouse.move(2, 2)
    yield opened
    opened.check()


def go(tab: Tab, choice: str) -> None:
    """Follow an address with a choice in it."""
    tab.page.evaluate(
        "(choice) => new Promise((done) => { if (location.hash === choice) return done();"
        "addEventListener('hashchange', () => done(), { once: true }); location.hash = choice; })",
        f"#{choice}",
    )


def chosen(tab: Tab) -> dict[str, str]:
    """What the address keeps."""
    kept = tab.page.evaluate("[...new URLSearchParams(location.hash.slice(1))]")
    return dict(kept)


def written(value: float, digits: int = 4) -> str:
    """A figure as the page writes it."""
    if math.isnan(value):
        return "–"
    if math.isinf(value):
        return "not finite"
    if digits == 4:
        value = float(np.float32(value))
    return f"{float(f'{value:.{digits}g}'):,.12g}".replace("-", "−")


def ticks(tab: Tab, chart: str = "heat") -> list[str]:
    """The names of the rows of a chart, from above."""
    return tab.page.locator(f"#{chart} .y-tick").all_text_contents()


def test_the_loss_is_drawn_below_the_heads(tab: Tab) -> None:
    assert tab.texts("#scalars .scalar-name") == ["loss", "learning rate"]
    line = tab.page.locator("#scalar-0 path[stroke]").first.get_attribute("d")
    assert line.count("L") == 59  # all steps, not the recorded ones alone
    box = tab.page.locator("#scalar-0 svg").bounding_box()
    tab.page.mouse.move(box["x"] + box["width"] - 12, box["y"] + 40)
    assert tab.page.locator("#tip").inner_text() == "step 60: loss 0.06667"


def test_steps_are_zoomed_in_to_and_out_of(tab: Tab) -> None:
    (x, y), (end, _) = cell(tab, 2, 18), cell(tab, 2, 42)
    tab.page.mouse.move(x, y)
    tab.page.mouse.down()
    tab.page.mouse.move(end, y + 1, steps=3)
    tab.page.mouse.up()
    low, high = map(float, chosen(tab)["steps"].split("-"))
    assert abs(low - 18) < 1
    assert abs(high - 42) < 1
    shown = tab.page.locator("#heat .x-tick").all_text_contents()
    assert shown == ["20", "25", "30", "35", "40"]
    tab.page.click("#whole")
    assert "steps" not in chosen(tab)
    assert tab.page.locator("#whole").is_hidden()


def test_heads_are_sorted_by_change_and_by_first_alarm(tab: Tab, run: Timeline) -> None:
    assert ticks(tab) == HEADS
    values = run.tracks["first"].values
    spread = np.nanmax(values, axis=0) - np.nanmin(values, axis=0)
    go(tab, "statistic=first&head=L0H0&sort=change")
    assert ticks(tab) == [HEADS[place] for place in np.argsort(-spread)]
    tab.page.select_option("#sort", "alarm")
    assert ticks(tab)[:2] == ["L1H1", "L0H2"]  # at steps 30 and 50
    tab.page.focus("#heat")
    tab.page.keyboard.press("ArrowUp")
    assert chosen(tab)["sort"] == "alarm"


def test_colors_of_the_change_since_the_first_step(tab: Tab, run: Timeline) -> None:
    go(tab, "statistic=entropy&head=L0H0&scale=change")
    values = run.tracks["entropy"].values
    most = np.nanmax(np.abs(values - values[0])[np.isfinite(values)])
    legend = tab.page.locator("#legend li").first.inner_text()
    bounds = [f"−{written(most)}", f"+{written(most)}"]
    assert legend.split() == [*bounds, *"(change since the first step)".split()]


def figures(tab: Tab) -> dict[str, list[str]]:
    """The table of figures, by statistic."""
    rows = tab.page.locator("#figures tbody tr")
    return {
        row.get_attribute("data-key"): row.locator("td").all_inner_texts() for row in rows.all()
    }


def cell(tab: Tab, head: int, step: float) -> tuple[float, float]:
    """Where a head's step is on the screen."""
    tab.page.evaluate("scrollTo({ top: 0 })")
    box = tab.page.locator("#heat canvas").bounding_box()
    low, high = axis()
    x = box["x"] + (step - low) / (high - low) * box["width"]
    return x, box["y"] + (head + 0.5) / len(HEADS) * box["height"]


def axis() -> tuple[float, float]:
    return 0.0, 65.0  # half a gap after the last step, and never under 0


def picture(tab: Tab) -> np.ndarray:
    """The pixels of the picture `[heads, width, 4]`, from a copy of it."""
    flat, width = tab.page.evaluate(
        "(() => { const [from, to] = [document.querySelector('#heat canvas'),"
        "document.createElement('canvas')]; [to.width, to.height] = [from.width, from.height];"
        "const pen = to.getContext('2d', { willReadFrequently: true }); pen.drawImage(from, 0, 0);"
        "return [[...pen.getImageData(0, 0, to.width, to.height).data], to.width]; })()"
    )
    return np.array(flat).reshape(-1, width, 4)


def at_steps(pixels: np.ndarray, steps: Any, high: float = axis()[1]) -> np.ndarray:
    """The pixels of every head at some steps `[heads, steps, 4]`."""
    return pixels[:, [int(step / high * pixels.shape[1]) for step in steps]]


def viridis(share: float) -> np.ndarray:
    stops = np.array([[int(stop[i : i + 2], 16) for i in (0, 2, 4)] for stop in VIRIDIS])
    at = round(share * 255) / 255 * (len(stops) - 1)
    return np.array([np.interp(at, range(len(stops)), stops[:, part]) for part in range(3)])


# --- what is shown ---------------------------------------------------------------------------


def test_the_page_opens_on_the_first_alarm(browser: Any, run: Timeline, tmp_path: Path) -> None:
    tab = Tab(browser, write_timeline(run, tmp_path / "page.html"))
    assert tab.text("#name") == "run"
    assert tab.texts("#facts li") == [
        "5 heads in 2 layers",
        "1 to 60 steps, 7 recorded",
        "2 alarms in 2 heads",
    ]
    assert chosen(tab) == {"statistic": "max_logit", "head": "L1H1", "step": "30"}
    assert tab.text("#head-title") == "L1H1"
    assert tab.text("#head-module") == "blocks.1.attn"
    assert "123.5 (max_logit > 100)" in tab.text("#head-alarms")
    assert "4 sampled queries" in tab.text("#made")
    tab.close()


def test_every_statistic_can_be_shown_with_its_colors(tab: Tab, run: Timeline) -> None:
    names = tab.page.evaluate("[...document.getElementsByName('statistic')].map((i) => i.value)")
    assert names == list(run.tracks) == ["entropy", "first", "max_logit"]
    for place, name in enumerate(names):
        tab.page.locator("#statistics label").nth(place).click()
        if name == "max_logit":
            tab.page.locator("#scale label", has_text="linear").click()
        values = run.tracks[name].values
        known = values[np.isfinite(values)]
        high = 1.0 if name == "first" else known.max()
        low = known.min() if name == "max_logit" else 0.0
        shown = at_steps(picture(tab), STEPS)
        for column in range(len(STEPS)):
            for head in range(5):
                value, found = values[column, head], shown[head, column]
                if math.isnan(value):
                    assert found[3] == 0
                elif math.isinf(value):
                    assert found.tolist() == [164, 38, 44, 255]
                else:
                    expected = viridis((value - low) / (high - low))
                    np.testing.assert_allclose(found[:3], expected, atol=2.1)
        assert tab.text("#what b").startswith(["Entropy", "First token", "Largest logit"][place])


def test_the_table_has_the_figures_of_the_history(tab: Tab, run: Timeline) -> None:
    for head in range(5):
        for column, step in ((0, 1), (2, 20), (6, 60)):
            go(tab, f"statistic=entropy&head={HEADS[head]}&step={step}")
            assert tab.text("#step-title") == f"At step {step}"
            shown = figures(tab)
            for name, track in run.tracks.items():
                value = track.values[column, head]
                assert shown[name][0] == written(value), (name, head, step)
                middle = np.median(track.values[column][np.isfinite(track.values[column])])
                assert shown[name][2] == written(float(f"{middle:.5g}"))
                error = {"entropy": "± 0.05", "first": "± 0.01"}.get(name, "")
                assert shown[name][1] == (error if math.isfinite(value) else "")


def test_the_curve_is_the_heads_own(tab: Tab, run: Timeline) -> None:
    for key, head in (("first", 2), ("max_logit", 4), ("max_logit", 0)):
        for scale in ("linear", "log"):
            go(tab, f"statistic={key}&head={HEADS[head]}&scale={scale}")
            drawn = tab.page.locator("#curve path.a[data-run]").get_attribute("d")
            points = np.array([part.split() for part in drawn[1:].split("L")], dtype=float)
            values = run.tracks[key].values[:, head]
            up = np.log(values) if scale == "log" else values
            for found, expected in ((points[:, 0], STEPS), (-points[:, 1], up)):
                slope, start = np.polyfit(expected, found, 1)
                assert slope > 0
                np.testing.assert_allclose(found, slope * np.array(expected) + start, atol=0.12)


def test_a_curve_is_broken_where_there_is_no_figure(tab: Tab) -> None:
    for head, lost in ((1, 0), (3, 1)):
        go(tab, f"statistic=entropy&head={HEADS[head]}")
        assert tab.page.locator("#curve path.a[data-run]").get_attribute("d").count("M") == 2
        assert tab.page.locator("#curve path.lost").count() == lost
    assert "not finite" in tab.text("#legend")
    assert "no value" in tab.text("#legend")
    go(tab, "statistic=first")
    assert "not finite" not in tab.text("#legend")


def test_figures_on_both_sides_of_zero_have_two_colors(browser: Any, tmp_path: Path) -> None:
    values = np.array([[-8.0, 0.5, 0.0], [-0.5, 8.0, 800.0]])
    track = Track("maximum", values, None, False)
    run = Timeline(
        "run", {}, [("a", head) for head in range(3)], np.array([1, 2]), {"max_logit": track}, []
    )
    tab = Tab(browser, write_timeline(run, tmp_path / "page.html"))
    shares = {}
    for scale in ("linear", "log"):
        go(tab, f"statistic=max_logit&head=0.1&scale={scale}")
        found = at_steps(picture(tab), [1, 2], 2.5)[:, :, :3].astype(int)
        tilt = (found[..., 0] - found[..., 2]).T  # red over blue
        assert (np.sign(tilt)[np.abs(values) >= 8] == np.sign(values)[np.abs(values) >= 8]).all()
        assert abs(tilt[0, 2]) < 3  # zero
        shares[scale] = tilt[1, 1] / tilt[1, 2]
    assert shares["linear"] < 0.05 < 0.1 < shares["log"]
    assert tab.text("#curve-what") == "Largest logit over the steps"  # no logarithm of a curve
    tab.close()


# --- choosing --------------------------------------------------------------------------------


def test_a_tip_says_what_is_under_the_pointer_and_a_click_chooses_it(
    tab: Tab, run: Timeline
) -> None:
    for head, column in ((0, 0), (2, 4), (4, 6), (3, 2)):
        tab.page.mouse.move(*cell(tab, head, STEPS[column]))
        tip = tab.text("#tip")
        assert HEADS[head] in tip
        assert f"step {STEPS[column]}" in tip
        assert written(run.tracks["entropy"].values[column, head]) in tip
        tab.page.mouse.down()
        tab.page.mouse.up()
        kept = chosen(tab)
        assert kept["head"] == HEADS[head]
        assert kept.get("step", "60") == str(STEPS[column])
        assert figures(tab)["entropy"][0] == written(run.tracks["entropy"].values[column, head])
    tab.page.mouse.move(2, 2)
    assert not tab.page.locator("#tip").is_visible()


def test_keys_go_from_head_to_head_and_step_to_step(tab: Tab) -> None:
    tab.page.locator("#heat").focus()
    for key, head, step in (
        ("ArrowDown", "L0H1", "60"),
        ("ArrowLeft", "L0H1", "50"),
        ("PageDown", "L1H0", "50"),
        ("ArrowUp", "L0H2", "50"),
        ("Home", "L0H2", "1"),
        ("ArrowLeft", "L0H2", "1"),
        ("ArrowRight", "L0H2", "10"),
        ("PageUp", "L0H2", "10"),
        ("End", "L0H2", "60"),
        ("ArrowRight", "L0H2", "60"),
        ("PageDown", "L1H0", "60"),
        ("ArrowDown", "L1H1", "60"),
        ("ArrowDown", "L1H1", "60"),
    ):
        tab.page.keyboard.press(key)
        kept = chosen(tab)
        assert (kept["head"], kept.get("step", "60")) == (head, step), key
    assert tab.text("#said").startswith("L1H1, step 60: Entropy ")
    tab.click("#next-head")
    assert tab.text("#bar-head") == "L0H0"
    tab.click("#previous-head")
    assert tab.text("#bar-head") == "L1H1"


def test_a_click_on_the_curve_chooses_a_step(tab: Tab) -> None:
    line = tab.page.locator("#curve path.a[data-run]").bounding_box()
    tab.page.mouse.click(line["x"] + line["width"] * 19 / 59, line["y"] + line["height"] / 2)
    assert chosen(tab)["step"] == "20"
    assert chosen(tab)["head"] == "L0H0"


def test_the_choice_outlives_a_reload(tab: Tab) -> None:
    tab.page.locator("#statistics label").nth(2).click()
    tab.page.locator("#scale label", has_text="linear").click()
    tab.page.select_option("#layer", "1")
    tab.page.locator("#heat").focus()
    tab.press("ArrowDown", "ArrowLeft")
    kept = chosen(tab)
    assert kept == {
        **{"statistic": "max_logit", "head": "L1H1", "step": "50", "layer": "1"},
        "scale": "linear",
    }
    shown = figures(tab)
    tab.page.reload()
    tab.page.wait_for_selector("html[data-ready=yes]")
    assert chosen(tab) == kept
    assert figures(tab) == shown
    assert tab.page.locator("#scale input:checked").input_value() == "linear"
    assert tab.page.locator("#heat canvas").evaluate("(canvas) => canvas.height") == 2
    tab.page.goto(f"{tab.address}#statistic=none&head=9.9&step=x&layer=length&run=B&scale=cubic")
    tab.page.wait_for_timeout(50)
    assert chosen(tab) == kept  # an address of nothing is not followed
    tab.page.goto(f"{tab.address}#statistic=first&head=9.9&step=x&layer=length&run=B&scale=cubic")
    tab.page.wait_for_timeout(50)
    assert chosen(tab) == {"statistic": "first", "head": "L1H1"}


def test_switches_keep_the_focus(tab: Tab) -> None:
    tab.page.locator("#statistics input").nth(0).focus()
    tab.press("ArrowRight", "ArrowRight")
    assert chosen(tab)["statistic"] == "max_logit"
    tab.page.locator("#figures button").nth(1).focus()
    tab.press("Enter")
    assert chosen(tab)["statistic"] == "first"
    assert tab.page.evaluate("document.activeElement.textContent") == "first"


# --- alarms ----------------------------------------------------------------------------------


def test_alarms_are_marked_listed_and_shown(tab: Tab) -> None:
    rows = tab.page.locator("#alarms tbody tr")
    assert [row.locator("td").all_inner_texts() for row in rows.all()] == [
        ["L1H1", "max_logit 123.5", "max_logit > 100"],
        ["L0H2", "first 0.997", "all sink"],
    ]
    assert tab.texts("#rules li") == [
        "max_logit > 100: layer 1, 1 head, from step 30",
        "all sink: layer 0, 1 head, from step 50",
    ]
    assert tab.page.locator("#heat .alarm.other").get_attribute("d").count("M") == 2
    rows.nth(1).locator("button").click()
    assert chosen(tab)["statistic"] == "first"
    assert (chosen(tab)["head"], chosen(tab)["step"]) == ("L0H2", "50")
    own = tab.page.locator("#heat-marks .alarm:not(.other)")
    assert own.get_attribute("d").count("M") == 1
    x, y = cell(tab, 2, 50)
    box = own.bounding_box()
    assert abs(box["x"] + box["width"] / 2 - x) < 2
    assert abs(box["y"] + box["height"] / 2 - y) < 3
    tab.page.mouse.move(x, y)
    assert "first is 0.997 (all sink)" in tab.text("#tip")


def test_many_alarms_are_counted_and_the_first_are_listed(browser: Any, tmp_path: Path) -> None:
    alarms = [
        Alarm(step, f"rule {n}", "entropy", "blocks.0.attn", head, math.inf if n else 1.0)
        for step in STEPS
        for head in range(3)
        for n in range(15)
    ]
    path = write_history(tmp_path / "heads.sqlite", alarms=alarms)
    tab = Tab(browser, hw.timeline(path, tmp_path / "page.html"))
    assert tab.page.locator("#alarms tbody tr").count() == 200
    assert tab.text("#alarms-rest") == "The first 200 of 315; the history has all alarms."
    assert "entropy not finite" in tab.texts("#alarms td")
    tab.close()


def test_a_run_without_alarms_says_so(browser: Any, tmp_path: Path) -> None:
    path = write_history(tmp_path / "heads.sqlite", [7], {"": 1}, ())
    tab = Tab(browser, hw.timeline(path, tmp_path / "page.html"))
    assert tab.text("#alarms-rest") == "No head broke a rule."
    assert tab.text("#head-module") == "the model itself"
    assert tab.text("#step-title") == "At step 7"
    assert not tab.page.locator("#live").is_visible()
    tab.close()


# --- two runs --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(browser: Any, run: Timeline, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("pair")
    layers = {**LAYERS, HOSTILE: 1}
    other = read_timeline(write_history(folder / "b.sqlite", (1, 20, 40, 90), layers, (), seed=1))
    tab = Tab(browser, write_timeline(run, folder / "page.html", other=other))
    yield tab, run, other
    tab.close()


def test_two_runs_and_their_difference(pair: Any) -> None:
    tab, a, b = pair
    assert tab.text("#name") == "A: run · B: b"
    assert tab.text("#notice") == f"Left out: layers only in B: {HOSTILE}."
    assert chosen(tab)["run"] == "difference"
    go(tab, "statistic=max_logit&head=1.1&step=40&run=difference")
    one, two = a.tracks["max_logit"].values[4, 4], b.tracks["max_logit"].values[2, 4]
    change = float(np.float32(two) - np.float32(one))
    signed = ("+" if change > 0 else "") + written(change)
    assert figures(tab)["max_logit"] == [written(one), written(two), signed]
    assert tab.page.locator("#curve path[data-run]").count() == 2
    assert set(tab.texts("#alarms td:nth-child(2)")) == {"A"}
    tab.page.locator("#heat").focus()
    tab.press("ArrowLeft")
    assert tab.text("#step-title") == "At step 20"  # only steps of both
    assert tab.text("#said").endswith(figures(tab)["max_logit"][2])
    tab.click("#run label", 1)
    tab.page.locator("#heat").focus()
    tab.press("End")
    assert tab.text("#step-title") == "At step 90"
    assert figures(tab)["max_logit"] == ["–", written(b.tracks["max_logit"].values[3, 4]), "–"]
    assert chosen(tab)["run"] == "B"
    tab.check()


def test_a_difference_is_colored_by_its_sign(pair: Any) -> None:
    tab, a, b = pair
    go(tab, "statistic=first&run=difference")
    change = b.tracks["first"].values[2, :5] - a.tracks["first"].values[4]
    shown = at_steps(picture(tab), [40], 100)[:, 0]  # B's last step is 90, and half a gap follows
    assert [red > blue for red, _, blue, _ in shown.tolist()] == (change > 0).tolist()


def test_runs_without_a_common_step_have_no_difference(browser: Any, tmp_path: Path) -> None:
    one = write_history(tmp_path / "a.sqlite", [1, 2])
    other = write_history(tmp_path / "b.sqlite", [3, 4])
    tab = Tab(browser, hw.timeline(one, tmp_path / "page.html", compare=other))
    assert "no recorded step in common" in tab.text("#notice")
    assert tab.texts("#run label") == ["A", "B"]
    tab.click("#run label", 1)
    assert tab.text("#step-title") == "At step 4"
    tab.close()


# --- a training that goes on -----------------------------------------------------------------


def ready(tab: Tab) -> None:
    tab.page.wait_for_selector("html[data-ready=yes]")


def live(browser: Any, path: Path, out: Path) -> Tab:
    """A page that is to be read anew every minute, whose clock stands still."""
    tab = Tab(browser, write_timeline(read_timeline(path), out, reread=60))
    tab.page.clock.install(time=0)
    tab.page.clock.pause_at(1000)  # installed alone, it would go on by itself
    tab.page.reload()
    ready(tab)
    return tab


def test_an_open_page_reads_itself_anew_and_keeps_the_choice(browser: Any, tmp_path: Path) -> None:
    path, out = write_history(tmp_path / "heads.sqlite", [1, 10]), tmp_path / "page.html"
    tab = live(browser, path, out)
    go(tab, "statistic=first&head=1.0")
    assert "reloaded every 60 s" in tab.text("#live")
    assert tab.text("#step-title") == "At step 10"
    tab.page.locator("#heat").focus()
    tab.page.evaluate("scrollTo({ top: 80 })")
    write_history(path, [20], after=10)
    write_timeline(read_timeline(path), out, reread=60)
    with tab.page.expect_navigation():
        tab.page.clock.run_for(61_000)
    ready(tab)
    assert tab.text("#step-title") == "At step 20"  # the last one was chosen, and still is
    assert chosen(tab) == {"statistic": "first", "head": "L1H0"}
    assert tab.page.evaluate("[document.activeElement.id, scrollY]") == ["heat", 80]
    tab.page.locator("#follow").uncheck()
    assert chosen(tab)["follow"] == "no"
    tab.page.evaluate("window.mine = true")
    tab.page.clock.run_for(200_000)
    assert tab.page.evaluate("window.mine")
    tab.page.reload()
    ready(tab)
    assert not tab.page.locator("#follow").is_checked()
    tab.close()


def test_a_page_that_is_in_use_waits(browser: Any, tmp_path: Path) -> None:
    path, out = write_history(tmp_path / "heads.sqlite", [1]), tmp_path / "page.html"
    tab = live(browser, path, out)
    tab.page.evaluate("window.mine = true")
    tab.page.clock.run_for(59_000)
    tab.page.mouse.move(100, 300)
    tab.page.clock.run_for(2_000)
    assert tab.page.evaluate("window.mine")
    with tab.page.expect_navigation():
        tab.page.clock.run_for(2_000)
    ready(tab)
    tab.page.evaluate("window.mine = true")
    tab.page.clock.run_for(100_000)  # nothing was new: the next is in two minutes
    assert tab.page.evaluate("window.mine")
    with tab.page.expect_navigation():
        tab.page.clock.run_for(30_000)
    ready(tab)
    tab.close()


# --- sizes -----------------------------------------------------------------------------------


def large(statistics: int, steps: int = 1000, layers: int = 32, heads: int = 32) -> Timeline:
    """A run of 1,024 heads and 1,000 recorded steps: noise, and a head that grows."""
    names = [(f"transformer.h.{layer}.attn", n) for layer in range(layers) for n in range(heads)]
    values = np.random.default_rng(0).lognormal(0, 1, (steps, len(names)))
    values[:, 700] = np.geomspace(1, 17000, steps)
    track = Track("mean", values, np.full_like(values, 0.01), True)
    tracks = {f"statistic {place}": track for place in range(statistics)}
    alarms = [Alarm(5000, "growth", "statistic 0", "transformer.h.21.attn", 28, 100.0)]
    return Timeline("large", {}, names, np.arange(10, 10 * steps + 1, 10), tracks, alarms)


@pytest.mark.parametrize("statistics", [1, 8])
def test_a_thousand_heads_by_a_thousand_steps(
    statistics: int, browser: Any, tmp_path: Path
) -> None:
    run = large(statistics)
    file = write_timeline(run, tmp_path / "page.html")
    assert file.stat().st_size < 5_000_000
    begun = time.monotonic()
    tab = Tab(browser, file)
    assert time.monotonic() - begun < 30  # a loose bound, for busy machines: it takes a second
    assert tab.page.locator("#heat canvas").evaluate("(canvas) => canvas.height") == 1024
    go(tab, "statistic=statistic 0&head=3.5&step=5000")
    value = figures(tab)["statistic 0"][0]
    if statistics == 1:
        exact = run.tracks["statistic 0"].values[499, 101]
        assert value == written(float(np.float16(exact)), 3)
        assert "Up to 2 columns share a pixel" in tab.text("#pooled")
    else:
        assert "a column covers" in tab.text("#made")
        assert "recorded)" in tab.text("#step-title")
    assert tab.measured("Nodes") < 3_000
    tab.close()


def test_figures_that_share_a_pixel_are_their_mean_or_the_largest(
    browser: Any, tmp_path: Path
) -> None:
    values = np.zeros((4000, 2))
    values[1::2] = 1.0
    tracks = {"a": Track("mean", values, None, False), "b": Track("maximum", values, None, False)}
    run = Timeline("run", {}, [("l", 0), ("l", 1)], np.arange(1, 4001), tracks, [])
    tab = Tab(browser, write_timeline(run, tmp_path / "page.html"))
    for statistic, share in (("a", 0.5), ("b", 1.0)):
        go(tab, f"statistic={statistic}&scale=linear")
        found = picture(tab)[0, 5:-5, :3].mean(0)
        np.testing.assert_allclose(found, viridis(share), atol=12)
    assert "which shows their maximum" in tab.text("#pooled")
    tab.close()


def test_where_nothing_was_recorded_nothing_is_drawn(browser: Any, tmp_path: Path) -> None:
    steps = [*range(10, 110, 10), *range(1000, 1100, 10)]
    path = write_history(tmp_path / "heads.sqlite", steps, alarms=())
    tab = Tab(browser, hw.timeline(path, tmp_path / "page.html"))
    there = picture(tab)[0, :, 3] > 0
    assert there[:5].all()
    assert there[-5:].all()
    assert 0.15 < there.mean() < 0.25
    tab.close()


@pytest.mark.parametrize("options", [PHONE, {"color_scheme": "dark"}])
def test_a_phone_and_a_dark_screen(
    options: dict[str, Any], browser: Any, run: Timeline, tmp_path: Path
) -> None:
    file = write_timeline(run, tmp_path / "page.html", other=run)
    tab = Tab(browser, file, **options)
    assert tab.width() <= (375 if options is PHONE else 1280)
    for place in range(3):
        tab.click("#run label", place)
        assert tab.page.locator("#curve path[data-run]").count() == (2 if place == 2 else 1)
    if options is PHONE:
        tab.page.locator("#heat canvas").scroll_into_view_if_needed()
        box = tab.page.locator("#heat canvas").bounding_box()
        tab.page.touchscreen.tap(box["x"] + 3, box["y"] + 3)
        assert (chosen(tab)["head"], chosen(tab)["step"]) == ("L0H0", "1")
    else:
        tab.page.emulate_media(color_scheme="light")
        assert tab.page.evaluate("getComputedStyle(document.body).backgroundColor") == (
            "rgb(245, 245, 242)"
        )
    tab.close()


def test_a_narrow_screen_hides_nothing(browser: Any, run: Timeline, tmp_path: Path) -> None:
    tab = Tab(browser, write_timeline(run, tmp_path / "page.html", other=run))

    def shown(width: int) -> list[str]:
        tab.page.set_viewport_size({"width": width, "height": 900})
        until = time.monotonic() + 10  # drawn anew in the next frame, it keeps its width till then
        while tab.width() > width and time.monotonic() < until:
            tab.page.wait_for_timeout(20)
        assert tab.width() <= width
        return tab.page.evaluate(
            "[...document.querySelectorAll('[id], #facts li, .chips label')]"
            ".filter((one) => one.checkVisibility()).map((one) => one.id || one.textContent)"
        )

    wide = shown(1440)
    assert {"statistics", "entropy", "4 alarms in 2 heads"} <= {*wide}
    for width in (860, 520, 375):
        assert shown(width) == wide, width
    tab.close()


def test_a_page_has_no_style_of_another(run: Timeline) -> None:
    """An id in a style sheet is one of the page: a rule for another page's would fit by chance."""
    for page in (render_timeline(run), render_page(decoder())):
        style, rest = page.split("</style>")
        selectors = " ".join(re.findall(r"[^{}]+(?={)", style))
        styled = {*re.findall(r"#([\w-]+)", selectors)}
        there = {*re.findall(r"""\bid(?:="|: ")([\w-]+)""", rest)}
        assert len(styled) >= 5
        assert styled <= there, styled - there


@pytest.mark.slow
@pytest.mark.parametrize("runs", [1, 2])
def test_axe_finds_nothing(browser: Any, run: Timeline, runs: int, tmp_path: Path) -> None:
    file = write_timeline(run, tmp_path / "page.html", other=run if runs == 2 else None)
    page = browser.new_context(color_scheme="light", bypass_csp=True).new_page()
    page.goto(file.as_uri())
    page.wait_for_selector("html[data-ready=yes]")
    page.evaluate(axe_core())
    for width in (1440, 860, 375):
        page.set_viewport_size({"width": width, "height": 900})
        for scheme in ("light", "dark"):
            colors(page, scheme)
            assert violations(page) == [], (width, scheme)
    page.context.close()


def test_what_cannot_be_drawn_is_said(browser: Any, run: Timeline, tmp_path: Path) -> None:
    broken = tmp_path / "broken.html"
    text = render_timeline(run)
    broken.write_text(text.replace('id="results">', 'id="results">AAAA'))
    page = browser.new_page()
    page.goto(broken.as_uri())
    page.wait_for_selector("#fault:not([hidden])")
    assert page.locator("#fault").inner_text().startswith("The page could not be drawn")
    page.close()


def test_every_control_has_a_name(tab: Tab) -> None:
    nameless = tab.page.evaluate(
        """[...document.querySelectorAll('button, input, select, [tabindex="0"]')].filter((node) =>
          !(node.textContent.trim() || node.getAttribute('aria-label') || node.labels?.length
            || node.getAttribute('aria-labelledby'))).map((node) => node.outerHTML)"""
    )
    assert nameless == []

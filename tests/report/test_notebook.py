"""Results in notebooks: the page in a frame, tables of heads as HTML, pandas and Plotly."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import headwise as hw
from browser import chromium
from headwise.capture.captured import Watched
from headwise.capture.effects import HeadEffects
from looks import decoder


@pytest.fixture(scope="module")
def layer() -> hw.MultiHeadAttention:
    return hw.MultiHeadAttention(24, num_heads=3)


def cells(text: str) -> list[list[str]]:
    rows = re.findall(r"<tr>(.*?)</tr>", text)
    return [re.findall(r"<t[dh]>(.*?)</t[dh]>", row) for row in rows]


def test_what_was_watched_shows_its_table(layer: hw.MultiHeadAttention) -> None:
    with hw.watch(layer, hw.Entropy()) as seen:
        layer(torch.randn(2, 7, 24), mask=hw.Causal())
    shown = cells(seen._repr_html_())
    rows = seen.table()
    assert shown[0] == list(rows[0])
    entropy = shown[0].index("entropy")
    assert [line[entropy] for line in shown[1:]] == [f"{row['entropy']:.4g}" for row in rows]
    drawn = seen.plot("entropy")
    assert [list(line) for line in drawn.data[0].z] == [[row["entropy"] for row in rows]]
    assert drawn.layout.title.text == "entropy"


def test_nothing_seen_is_said_and_not_raised() -> None:
    assert Watched()._repr_html_() == "&lt;Watched: 0 modules, 0 heads; no figures&gt;"


def test_one_call_shows_its_heads() -> None:
    q, k, v = torch.randn(3, 2, 5, 7, 8)
    seen = hw.observe(q, k, v, hw.Entropy(), mask=hw.Causal())
    assert len(cells(seen._repr_html_())) == 6
    assert list(seen.to_pandas()["entropy"]) == [row["entropy"] for row in seen.table()]
    assert len(seen.plot().data[0].z) == 1
    with pytest.raises(ValueError, match=r"plot\('none'\): unknown metric; there are: entropy"):
        seen.plot("none")


def test_effects_of_layers_of_different_widths_leave_blanks() -> None:
    effects = HeadEffects(
        {"a": {"importance": torch.ones(1, 2)}, "<b>": {"importance": torch.full((1, 3), 2.0)}}
    )
    drawn = effects.plot()
    assert [list(line) for line in drawn.data[0].z] == [[1, 1, None], [2, 2, 2]]
    assert "&lt;b&gt;" in effects._repr_html_()
    assert "<b>" not in effects._repr_html_()


def test_a_verdict_shows_its_findings_as_a_table() -> None:
    verdict = hw.check(hw.MultiHeadAttention, embed_dim=24, num_heads=3)
    shown = verdict._repr_html_()
    assert verdict.summary() in shown
    assert shown.count("<tr>") == len(verdict.results)
    assert "<details>" in shown


def test_a_looks_rows_are_a_data_frame_and_a_figure() -> None:
    look = decoder(2, 3, 9)
    frame = look.to_pandas()
    assert list(frame["entropy"]) == [row["entropy"] for row in look.rows]
    names = [", ".join(one["label"] for one in row["labels"]) for row in look.rows]
    assert list(frame["labels"]) == names
    drawn = look.plot("first")
    assert drawn.layout.title.text == "First token"
    expected = [row["first"] for row in look.rows]
    assert [value for line in drawn.data[0].z for value in line] == expected


@pytest.mark.browser
def test_the_page_works_in_a_notebooks_frame(tmp_path: Path) -> None:
    file = tmp_path / "notebook.html"
    file.write_text(f"<!doctype html><body>{decoder(2, 3, 9)._repr_html_()}", "utf-8")
    said: list[str] = []
    with chromium() as browser:
        page = browser.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto(file.as_uri())
        frame = page.frame_locator("iframe")
        frame.locator("html[data-ready=yes]").wait_for()
        assert frame.locator("#sentence").inner_text().startswith("Head ")
        frame.locator("#nav a[data-view=table]").click()
        frame.locator("#table tbody tr").nth(5).wait_for()
        frame.locator("#table tbody button").nth(4).click()
        frame.locator("#bar-head", has_text="L1H1").click()
        assert frame.locator("#head-title", has_text="L1H1").is_visible()
        assert page.url == file.as_uri()
    assert said == []


def test_plots_without_plotly(layer: hw.MultiHeadAttention) -> None:
    with hw.watch(layer, hw.Entropy()) as seen:
        layer(torch.randn(2, 7, 24), mask=hw.Causal())
    drawn = seen.plot("entropy", backend="matplotlib")
    assert drawn.axes[0].images[0].get_array().tolist() == [
        [row["entropy"] for row in seen.table()]
    ]
    assert drawn.axes[0].get_title() == "entropy"
    with pytest.raises(ValueError, match=r"plot\(backend='pixels'\): backend must be 'plotly' or"):
        seen.plot(backend="pixels")


def test_a_training_shows_itself(layer: hw.MultiHeadAttention, tmp_path: Path) -> None:
    rule = hw.telemetry.Rule("entropy", above=0.0, then=str)
    path = tmp_path / "heads.sqlite"
    with hw.Monitor(layer, every=1, rules=[rule], history=path) as monitor:
        assert "nothing recorded yet" in repr(monitor)
        layer(torch.randn(2, 7, 24), mask=hw.Causal())
        monitor.step()
    want = [f"{value:.4g}" for value in monitor.latest["entropy"].values]
    for shown in (monitor._repr_html_(), hw.History(path)._repr_html_()):
        head, *lines = cells(shown)
        assert [line[head.index("entropy")] for line in lines] == want
        assert shown.count("<li>step 1: L0H") == 3
    page = hw.timeline(path, tmp_path / "page.html")
    assert page == tmp_path / "page.html"
    assert page._repr_html_().startswith('<iframe srcdoc="&lt;!doctype html&gt;')

"""Which heads read what others write: the pairs that a look keeps, and their graph on the page."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from browser import PHONE, Tab, chromium
from headwise.models import gpt
from headwise.report import composition, look
from headwise.report.composition import OF_EACH
from headwise.report.folders import load_folder
from headwise.report.page import write_page
from headwise.report.page.report import provenance_lines
from headwise.report.schema import Look, LookFileError, load
from headwise.research.circuits import circuits

TEXT = "It is said that it rains. With what it brings, it is said that it rains."


@pytest.fixture(scope="module")
def seen() -> Look:
    return look(*load_folder(gpt.builtin()), TEXT)


def named(seen: Look, row: int) -> str:
    return f"L{seen.rows[row]['layer']}H{seen.rows[row]['head']}"


# --- the pairs -------------------------------------------------------------------------------


def test_scores_are_those_of_the_circuits_and_none_larger_is_missing(seen: Look) -> None:
    found = circuits(load_folder(gpt.builtin())[0])
    assert found.heads == [(row["layer"], row["head"]) for row in seen.rows]
    for kind in ("K", "Q", "V"):
        score, pairs = found.composition(kind), seen.composition[kind]
        assert [pair[2] for pair in pairs] == sorted((pair[2] for pair in pairs), reverse=True)
        assert len(pairs) == int((~score.isnan()).sum()) == 48
        for writer, reader, value in pairs:
            assert value == pytest.approx(float(score[writer, reader]), abs=6e-5)
    assert seen.composition["unrelated"] == pytest.approx(128**-0.5)


def test_only_the_strongest_pairs_are_kept_and_some_of_each_head(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(composition, "STRONGEST", 5)
    model, tokenizer = load_folder(gpt.builtin())
    pairs = look(model, tokenizer, TEXT).composition["K"]
    score = circuits(model).composition("K").nan_to_num(0)
    flat = score.flatten().topk(5).indices.tolist()
    assert [[i, j] for i, j, _ in pairs[:5]] == [[n // 12, n % 12] for n in flat]
    assert len(pairs) < 48
    kept = {(i, j) for i, j, _ in pairs}
    for head in range(12):
        for line, place in ((score[head], 0), (score[:, head], 1)):
            best = [n for n in line.topk(OF_EACH).indices.tolist() if line[n] > 0]
            assert {(head, n) if place == 0 else (n, head) for n in best} <= kept


def test_the_induction_heads_read_the_previous_token_head(seen: Look) -> None:
    """The circuit of Olsson et al. 2022: K-composition, found without running the model."""
    labels = [[one["label"] for one in row["labels"]] for row in seen.rows]
    induction = [place for place, names in enumerate(labels) if "induction" in names]
    assert len(induction) == 3
    strongest = {reader: writer for writer, reader, _ in reversed(seen.composition["K"])}
    assert all("previous token" in labels[strongest[reader]] for reader in induction)


def test_heads_of_other_streams_are_not_paired() -> None:
    from transformers import BartConfig, BartForConditionalGeneration

    sizes = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in
             (("layers", 2), ("attention_heads", 4), ("ffn_dim", 40))}  # fmt: skip
    config = BartConfig(vocab_size=60, d_model=24, max_position_embeddings=40, **sizes)
    words = [f"w{n}" for n in range(60)]
    seen = look(BartForConditionalGeneration(config).eval(), words, torch.arange(3, 23))
    for kind in ("K", "Q", "V"):
        assert seen.composition[kind]
        for writer, reader, _ in seen.composition[kind]:
            one, other = (seen.layers[seen.rows[row]["layer"]] for row in (writer, reader))
            assert one.queries == (other.queries if kind == "Q" else other.keys)
    cross = {n for n, layer in enumerate(seen.layers) if layer.kind == "cross"}
    read = {seen.rows[reader]["layer"] for _, reader, _ in seen.composition["V"]}
    assert cross <= read  # cross-attention reads what the encoder writes


def test_a_look_without_pairs_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mix(nn.Module):
        """Attention in no known layout."""

        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Linear(12, 36)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.mix(x).unflatten(-1, (3, 3, 4)).permute(2, 0, 3, 1, 4)
            out = nn.functional.scaled_dot_product_attention(q, k, v)
            return out.transpose(1, 2).flatten(-2)

    odd = nn.Sequential(nn.Embedding(30, 12), Mix(), Mix())
    seen = look(odd, None, torch.arange(20))
    assert "ablation" not in seen.rows[0]  # it returns no logits, so it has no loss
    assert seen.composition["reason"].startswith("not available (")
    line = dict(provenance_lines(seen.document()))["Composition"]
    assert line == seen.composition["reason"]
    one, two = (
        gpt.GPT(gpt.GPTConfig(vocab_size=30, n_positions=24, n_embd=12, n_layer=n, n_head=2))
        for n in (1, 2)
    )
    assert look(one, None, torch.arange(20)).composition == {"reason": "a single layer"}
    monkeypatch.setattr(composition, "LIMIT", 100)
    small = look(two, None, torch.arange(20)).composition
    count = sum(parameter.numel() for parameter in two.parameters())
    assert small == {"reason": f"skipped for 4 heads and {count:,} parameters"}


def test_pairs_are_saved_and_checked(seen: Look, tmp_path: Path) -> None:
    assert load(seen.save(tmp_path / "look.json")).composition == seen.composition
    for pairs in ([[0, 99, 0.5]], [[-1, 5, 0.5]], [[0, 5, "x"]], [[0, 5]], 7):
        wrong = replace(seen, composition=seen.composition | {"K": pairs})
        with pytest.raises(LookFileError):
            load(wrong.save(tmp_path / "wrong.json"))
    with pytest.raises(LookFileError, match="unrelated"):
        load(replace(seen, composition={"K": []}).save(tmp_path / "wrong.json"))


# --- the graph -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as opened:
        yield opened


@pytest.fixture
def tab(browser: Any, seen: Look, tmp_path: Path) -> Iterator[Tab]:
    tab = Tab(browser, write_page(seen, tmp_path / "page.html"))
    tab.page.goto(f"{tab.address}#composition/L1H1/3")
    tab.page.reload()
    tab.page.wait_for_selector("html[data-ready=yes]")
    tab.drawn()
    yield tab
    tab.close()


def listed(tab: Tab) -> list[list[str]]:
    """The lines of the table: writer, reader, score."""
    lines = tab.page.locator("#composition-table tbody tr")
    return [line.locator("button, b").all_inner_texts() for line in lines.all()]


def expected(seen: Look, kind: str, count: int, chosen: int) -> list[list[str]]:
    """The strongest pairs and two of the chosen head's in each place; its own come first."""
    pairs = seen.composition[kind]
    least = seen.composition["unrelated"]
    own = [[p for p in pairs if p[side] == chosen and p[2] > least][:2] for side in (0, 1)]
    shown = [pair for n, pair in enumerate(pairs) if n < count or pair in own[0] + own[1]]
    shown.sort(key=lambda pair: chosen not in pair[:2])
    return [[named(seen, i), named(seen, j), f"{score:.3f}"] for i, j, score in shown]


@pytest.mark.browser
def test_the_graph_and_its_table_show_the_strongest_pairs(tab: Tab, seen: Look) -> None:
    assert listed(tab) == expected(seen, "K", 12, 5)
    lines = tab.plotted("composition", "lines")
    ends = {(*line["points"][0], *line["points"][-1]) for line in lines}
    names = {(f"L{int(b)}H{int(a)}", f"L{int(d)}H{int(c)}") for a, b, c, d in ends}
    assert names == {(writer, reader) for writer, reader, _ in listed(tab)}
    marked = {line["color"] == "--mark" for line in lines}
    assert marked == {True, False}
    assert sum(line["color"] == "--mark" for line in lines) == sum(
        "L1H1" in line for line in listed(tab)
    )
    assert "Two unrelated heads score about 0.088." in tab.text("#composition-what")
    assert tab.page.locator("#composition-table tr.chosen").count() > 2
    for n, kind in ((1, "Q"), (2, "V")):
        tab.click("#composition-kinds label", n)
        assert listed(tab) == expected(seen, kind, 12, 5)
        assert f"kind={kind}" in tab.page.url


@pytest.mark.browser
def test_keys_alone_choose_heads_and_the_number_of_edges(tab: Tab, seen: Look) -> None:
    tab.page.locator("#composition").focus()
    tab.press("ArrowUp", "ArrowRight")
    assert tab.text("#bar-head") == "L0H2"
    assert listed(tab) == expected(seen, "K", 12, 2)
    assert tab.text("#composition-title") == "Strongest pairs, those of L0H2 first"
    tab.page.locator("#composition-count").focus()
    tab.press("Home")
    assert listed(tab) == expected(seen, "K", 1, 2)
    tab.press("End")
    assert listed(tab) == expected(seen, "K", 48, 2)
    tab.page.reload()
    tab.page.wait_for_selector("html[data-ready=yes]")
    assert tab.text("#composition-counted") == "48"
    reader = listed(tab)[0][1]
    tab.click("#composition-table td button")
    assert tab.text("#bar-head") == reader != "L0H2"


@pytest.mark.browser
def test_a_click_chooses_a_head_and_a_phone_shows_it_all(
    tab: Tab, browser: Any, seen: Look, tmp_path: Path
) -> None:
    tab.click_cell("composition", 3, 1, 4, 3, tip="L1H3")
    assert tab.text("#bar-head") == "L1H3"
    phone = Tab(browser, write_page(seen, tmp_path / "phone.html"), **PHONE)
    phone.page.goto(f"{phone.address}#composition/L1H1/3")
    phone.page.locator("#composition svg").wait_for()
    assert phone.width() <= 375
    phone.close()


@pytest.mark.browser
def test_a_page_without_pairs_has_no_such_view(browser: Any, seen: Look, tmp_path: Path) -> None:
    none = replace(seen, composition={"reason": "skipped"})
    tab = Tab(browser, write_page(none, tmp_path / "page.html"))
    assert "Composition" not in tab.texts("#nav a")
    tab.show("about")
    assert "Composition" in tab.texts("#made dt")
    tab.close()

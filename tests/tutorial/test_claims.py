"""The claims page: its tables are those of the recorded runs, and the experiments measure."""

from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import headwise as hw

sys.path.insert(0, str(Path(__file__).parents[2]))  # `benchmarks` is no part of the package

from benchmarks.claims import __main__ as claims
from benchmarks.claims import learn, paths, relations, specialise, wrapper
from benchmarks.claims.relations import OFFSETS, RELATIONS, Sentence, Trials
from benchmarks.pages import runs

pytestmark = pytest.mark.slow

SENTENCES = relations.sentences()
SMALL = relations.Settings(draws=50)


def test_the_tables_are_those_of_the_recorded_runs() -> None:
    page = claims.PAGE.read_text("utf-8")
    assert claims.fill(page) == page, "run `python -m benchmarks.claims --only`"


def test_a_missing_mark_is_an_error() -> None:
    with pytest.raises(ValueError, match="it needs each of"):
        claims.fill("<!-- table: learn -->\n<!-- end of table -->")


def test_every_experiment_runs_and_fills_its_tables(tmp_path: Path) -> None:
    for name, experiment in claims.EXPERIMENTS.items():
        found = experiment.measure(experiment.TOY, lambda line: None)
        runs.keep(claims.record(name, tmp_path), experiment.TOY, found)
    marks = [
        mark for mark in claims.MARK.findall(claims.PAGE.read_text()) if "MiniLM" not in mark[1]
    ]
    page = claims.fill("\n".join("".join(mark[::2]) for mark in marks), tmp_path)
    assert page.count("\n|---") == len(marks) == 5
    assert "nan" not in page


def test_the_records_have_the_settings_in_the_code(tmp_path: Path) -> None:
    for name, experiment in claims.EXPERIMENTS.items():
        path = runs.keep(tmp_path / "run.json", experiment.Settings(), {})
        now, then = (json.loads(p.read_text())["settings"] for p in (path, claims.record(name)))
        config = now.pop("config", {})  # settings that came later leave earlier runs as they were
        assert all(config[key] == value for key, value in then.pop("config", {}).items())
        assert now == then


def test_the_loop_and_split_heads_differ_when_a_weight_does() -> None:
    layers = wrapper.pair(6, 3, 5)
    x, pull = torch.randn(2, 2, 5, 6)
    wrapper.assert_same(layers, x, pull)
    with torch.no_grad():
        next(layers[wrapper.WRAPPER].parameters())[0, 0] += 0.1
    with pytest.raises(AssertionError):
        wrapper.assert_same(layers, x, pull)


def test_operators_count_a_product_and_not_a_view() -> None:
    a = torch.ones(2, 3)
    assert wrapper.operators(lambda: a.T) == 0
    assert wrapper.operators(lambda: a.T @ a) == 1


def test_verdicts_follow_the_interval_over_seeds() -> None:
    # by hand: deviation of (0.5, 0.49, 0.5) is 0.01 / sqrt(3), Student's t with 2 degrees 4.303
    assert learn.compared([0.5, 0.49, 0.5]) == ["+0.497 (+0.482 to +0.511)", "better"]
    assert learn.compared([-0.3, -0.31, -0.3])[1] == "worse"
    assert learn.compared([-0.2, 0.1, 0.1])[1] == "no difference"


def test_labeling_on_the_way_leaves_the_losses_alone() -> None:
    from headwise.models.run import Run

    plain, watched = (Run(replace(specialise.TOY.config, seed=0)) for _ in range(2))
    losses = []
    for _ in range(3):
        specialise.state(watched)
        losses.append((plain.advance(), watched.advance()))
    assert all(one == two for one, two in losses)


def test_equal_heads_have_no_distance() -> None:
    maps = torch.tensor([[[1.0, 0.0], [0.5, 0.5]], [[1.0, 0.0], [0.0, 1.0]]])
    assert specialise.total_variation(maps) == pytest.approx(0.25)
    assert specialise.total_variation(maps[:1].repeat(3, 1, 1)) == 0


def test_a_saturated_head_learns_nothing_and_the_others_do() -> None:
    generator = torch.Generator().manual_seed(0)
    layer = paths.Layer.draw(6, generator)
    x, pull = torch.randn(2, 7, 6, generator=generator, dtype=torch.float64)
    x.requires_grad_()
    plain = paths.score_gradients(layer, x, pull, 2, None)
    sharp = paths.score_gradients(layer, x, pull, 2, torch.tensor([1e9, 1.0]).double())
    assert plain.min() > 0
    assert sharp[0].max() == 0
    assert torch.allclose(sharp[1], plain[1], rtol=1e-12)


# --- relations ------------------------------------------------------------------------------------

WORDS = {
    "determiner": "the a an this that these those every each some any no all both another such "
    "what which most many several",
    "preposition": "about above across after against along among at before behind below beneath "
    "beside between beyond by during for from in into like near of on outside over since than "
    "through to toward under until with within without",
    "coreference": "he him his himself she her herself it its itself they them their",
}
NEARBY = 5  # words between a noun and its determiner or adjective


def mistakes(sentence: Sentence) -> list[str]:
    """Return the rules of relations.md that a sentence's marks break."""
    words = [word.lower() for word in (sentence.text[a:b] for a, b in sentence.spans)]
    found = []
    for relation, pairs in sentence.pairs.items():
        if any(one == two or not words[one][0].isalpha() for one, two in pairs):
            found.append(f"{relation}: a word with itself, or punctuation")
        many = Counter(pairs if relation == "coreference" else [first for first, _ in pairs])
        if many and max(many.values()) > 1:
            found.append(f"{relation}: twice")
        known = WORDS.get(relation, "").split()
        if known and (odd := {words[first] for first, _ in pairs} - set(known)):
            found.append(f"{relation}: {odd}")
    found += [
        f"{relation}: not just before its noun"
        for relation in ("determiner", "adjective")
        if any(not 0 < two - one <= NEARBY for one, two in sentence.pairs[relation])
    ]
    marked = {first for first, _ in sentence.pairs["determiner"]}
    if any(word in ("a", "an", "the") and at not in marked for at, word in enumerate(words)):
        found.append("determiner: an article without a noun")
    return found


def test_sentences_are_unique_balanced_and_follow_the_rules() -> None:
    assert len({one.text for one in SENTENCES}) == len(SENTENCES) >= 150
    for relation in RELATIONS:
        counts = [
            sum(len(one.pairs[relation]) for one in SENTENCES if one.half == half)
            for half in relations.HALVES
        ]
        assert 60 <= max(counts) < 1.3 * min(counts), relation
    assert not [f"{one.text} {rule}" for one in SENTENCES for rule in mistakes(one)]


@pytest.mark.parametrize(
    ("marks", "said"),
    [
        ({"determiner": "The>man"}, "an article without a noun"),
        ({"determiner": "The>man a>dog a>man"}, "determiner: twice"),
        ({"determiner": "The>dog a>man"}, "not just before"),
        ({"determiner": "The>man a>dog", "preposition": "saw>dog"}, "preposition: {'saw'}"),
        ({"determiner": "The>man a>dog", "subject": "man>man"}, "with itself"),
    ],
)
def test_a_mark_that_breaks_a_rule_is_found(marks: dict[str, str], said: str) -> None:
    assert said in " ".join(mistakes(Sentence.read("The old man saw a dog.", **marks)))


@pytest.mark.parametrize(
    ("cell", "said"),
    [("the>man", "stands 2 times"), ("an>man", "stands 0 times"), ("the man", "not word>word")],
)
def test_a_pair_that_cannot_be_read_is_named(cell: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Sentence.read("He saw the man and the boy.", determiner=cell)


MADE = [
    Sentence.read("The old man saw a dog.", determiner="The>man a>dog"),
    Sentence.read("A dog saw the very old man.", determiner="A>dog the>man"),
]


def guesses(*heads: str) -> list[Tensor]:
    """Predictions of heads that attend to every target, to none, or to the next word."""
    found = []
    for sentence in MADE:
        size = len(sentence.spans)
        target = torch.full((size, size), 0.1)
        for word, noun in sentence.pairs["determiner"]:
            target[word, noun] = 0.5
        kinds = {"always": target, "never": -target, "next": torch.eye(size).roll(1, 1)}
        found.append(relations.strongest(torch.stack([kinds[head] for head in heads])[None]))
    return found


def test_heads_and_offsets_are_scored_by_their_hits() -> None:
    found = relations.trials("determiner", False, MADE, guesses("always", "never", "next"))
    assert found.heads[:, 0].mean(0).tolist() == [1.0, 0.0, 0.5]
    assert found.sentence.tolist() == [0, 0, 1, 1]
    by_offset = dict(zip(OFFSETS, found.offsets.mean(0).tolist(), strict=True))
    assert {at: share for at, share in by_offset.items() if share} == {1: 0.5, 2: 0.25, 3: 0.25}
    row = relations.outcome(found, found, SMALL)
    assert (row["head"], row["offset"]) == ("0.0", 1)
    assert (row["hits"], row["offset_hits"][0], row["gain"][0]) == ([1.0, 1.0, 1.0], 0.5, 0.5)
    assert row["offset_misses"] == [2, 2]


def test_only_earlier_targets_count_in_a_causal_model() -> None:
    ahead = guesses("always")
    assert len(relations.trials("determiner", False, MADE, ahead, causal=True).sentence) == 0
    assert len(relations.trials("determiner", True, MADE, ahead, causal=True).sentence) == 4


def test_a_word_does_not_predict_itself() -> None:
    assert relations.strongest(torch.tensor([[0.9, 0.1], [0.0, 1.0]])).tolist() == [1, 0]


def test_tokens_are_assigned_to_words() -> None:
    sentence = Sentence.read("Ann ran far.")
    member = relations.word_of_tokens(["", "A", "nn", " ran", " far", ".", ""], sentence)
    assert member.nonzero().tolist() == [[1, 0], [2, 0], [3, 1], [4, 2], [5, 3]]
    with pytest.raises(ValueError, match="no token of its own"):
        relations.word_of_tokens(["Ann ran", " far", "."], sentence)


def test_word_weights_are_those_of_the_model() -> None:
    model, tokenizer = relations.MODELS["built-in"]()
    sentence = SENTENCES[0]
    weights = relations.word_weights(model, tokenizer, sentence)
    encoded = relations.Vocabulary(tokenizer).encode(sentence.text)
    member = relations.word_of_tokens(encoded.pieces or [], sentence)
    exact = hw.attention_of(model, torch.tensor([encoded.ids]), 1)[0]
    for head in range(4):
        summed = exact[head] @ member  # over the tokens of a key's word
        means = torch.stack([summed[column.bool()].mean(0) for column in member.T])
        torch.testing.assert_close(weights[1, head], means, atol=1e-5, rtol=0)


def test_the_head_is_chosen_on_one_half_alone() -> None:
    def made(best: int) -> Trials:
        heads, offsets = torch.zeros(6, 2, 3), torch.zeros(6, len(OFFSETS))
        heads[:5, best // 3, best % 3] = 1
        offsets[:4, best] = 1
        return Trials(torch.arange(6), heads.double(), offsets.double())

    rows: list[dict[str, Any]] = [
        relations.outcome(made(4), scored, SMALL) for scored in (made(4), made(1))
    ]
    assert [row["head"] for row in rows] == ["1.1", "1.1"]
    assert [row["offset"] for row in rows] == [OFFSETS[4]] * 2
    assert [row["hits"][0] for row in rows] == [pytest.approx(5 / 6), 0.0]


def test_the_interval_covers_as_often_as_it_claims() -> None:
    """Sentences of one to four words that hit or miss together, at a rate of 0.3."""
    generator = torch.Generator().manual_seed(0)
    covered = 0
    for seed in range(100):
        sentence = torch.arange(80).repeat_interleave(torch.arange(80) % 4 + 1)
        hit = (torch.rand(80, generator=generator) < 0.3).double()[sentence]
        settings = replace(SMALL, draws=200, seed=seed)
        _, low, high = relations.intervals(hit[:, None], sentence, settings)[0]
        covered += low <= 0.3 <= high
    assert 88 <= covered <= 99

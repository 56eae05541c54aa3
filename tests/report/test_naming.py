"""Names of heads: heads made to follow each pattern exactly, heads that follow none, every rule."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.capture.captured import Watched
from headwise.report.head_labels import (
    MIN_COVERAGE,
    NO_LABEL,
    NOT_EVALUATED,
    RULES,
    HeadName,
    LabelRule,
    derived,
    is_delimiter,
    label_head,
    name_heads,
    naming_statistics,
    unevaluated_labels,
)
from headwise.stats.patterns import At
from headwise.stats.statistic import Statistic

PERIOD = 23
IDS = torch.randperm(PERIOD).repeat(2)  # each token comes twice
LENGTH = len(IDS)
DELIMITERS = torch.tensor([n % 7 == 3 for n in range(LENGTH)])
GIVEN_UP = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
GIVEN_UP[:, 0] = True


def at(offset: int) -> Tensor:
    """The key so far from each query; the query's own where there is none."""
    keys = torch.eye(LENGTH).roll(offset, dims=1).bool()
    keys &= torch.ones(LENGTH, LENGTH).triu(offset).tril(offset).bool()
    return keys | torch.eye(LENGTH).bool() & ~keys.any(-1, keepdim=True)


def heads() -> dict[str, Tensor]:
    """Which keys each made head looks at, `[T, S]`."""
    place = torch.arange(LENGTH)
    same = IDS[:, None] == IDS
    follower = torch.zeros_like(same)
    follower[:, 1:] = same[:, :-1] & ~torch.eye(LENGTH).bool()[:, :-1]
    near = (place[:, None] - place).abs() <= 3
    return {
        "previous token": at(-1),
        "duplicate token": same & ~torch.eye(LENGTH).bool(),
        "induction": follower,
        "first token": GIVEN_UP,
        "punctuation": DELIMITERS.expand(LENGTH, -1),
        "self": at(0),
        "two back": at(-2),
        "three back": at(-3),
        "next": at(1),
        "two ahead": at(2),
        "three ahead": at(3),
        "local": near,
        "broad": (place % 2 == 0).expand(LENGTH, -1),
        "even": torch.ones_like(same),
        "far": (place[:, None] - place).abs() % 11 == 5,
    }


def made(causal: bool) -> tuple[list[str], list[Tensor], hw.Mask]:
    """q, k and v of heads that look exactly at their keys, evenly: keys are one-hot, q their sum.

    A query none of whose keys is in sight looks at all it sees.
    """
    mask = hw.Causal() if causal else hw.Dense(torch.ones(1, 1, 1, 1, dtype=torch.bool))
    names = [name for name in heads() if not causal or (name[-5:] != "ahead" and name != "next")]
    keys = torch.stack([heads()[name] for name in names])
    if causal:
        keys &= torch.ones(LENGTH, LENGTH).tril().bool()
    q = 40.0 * LENGTH**0.5 * keys.float()[None]
    k = torch.eye(LENGTH).expand_as(q)
    return names, [q, k, k], mask


def seen_of(parts: list[Tensor], statistics: tuple[Statistic, ...], **keywords: Any) -> Watched:
    seen = Watched()
    found = hw.observe(*parts, *statistics, **keywords)
    seen.add("attn", found.readings, parts[0].shape[1])
    return seen


EXPECTED: dict[str, dict[str, str]] = {
    # Labels and the figures that give them, of heads that are bidirectional.
    "previous token": {"previous token": "previous", "local": "distance_absolute"},
    "duplicate token": {"duplicate token": "same_token_random"},
    "induction": {"induction": "induction_random"},
    "first token": {"first token": "first"},
    "punctuation": {"punctuation": "delimiters"},
    "self": {"self": "self", "local": "distance_absolute"},
    "two back": {"positional": "back_2", "local": "distance_absolute"},
    "three back": {"positional": "back_3", "local": "distance_absolute"},
    "next": {"positional": "next", "local": "distance_absolute"},
    "two ahead": {"positional": "ahead_2", "local": "distance_absolute"},
    "three ahead": {"positional": "ahead_3", "local": "distance_absolute"},
    "local": {"local": "distance_absolute"},
    "broad": {"broad": "entropy_share"},
    "even": {},
    "far": {},
}


@pytest.mark.parametrize("causal", [True, False])
def test_heads_made_for_it_get_their_labels_and_no_other(causal: bool) -> None:
    names, parts, mask = made(causal)
    statistics = naming_statistics(IDS, DELIMITERS)
    seen = seen_of(parts, statistics, mask=mask)
    named = name_heads(seen, repeats=seen)  # these ids are random ones that come twice
    assert [(name.module, name.head) for name in named] == [("attn", n) for n in range(len(names))]
    for what, name in zip(names, named, strict=True):
        assert not name.missing
        assert {label.label: label.key for label in name.labels} == EXPECTED[what], what
        for label in name.labels:
            rule = next(rule for rule in RULES if rule.key == label.key)
            assert (label.sign, label.threshold) == (rule.sign, rule.threshold)
            if label.sign == "≥" and label.label != "broad":
                # Whoever finds no key of the pattern in sight is left out of its mean.
                assert label.score == pytest.approx(1.0, abs=1e-4), (what, label)
        assert name.label == next(iter(EXPECTED[what]), NO_LABEL)


def test_coverage_is_the_share_of_queries_that_have_a_target() -> None:
    _, parts, mask = made(causal=True)
    seen = seen_of(parts, naming_statistics(IDS, DELIMITERS), mask=mask)
    labels = {label.label: label for name in name_heads(seen, seen) for label in name.labels}
    assert labels["previous token"].coverage == pytest.approx(1 - 1 / LENGTH)
    assert labels["duplicate token"].coverage == pytest.approx(1 / 2)
    assert labels["induction"].coverage == pytest.approx(1 / 2)  # the follower may be i itself
    assert labels["punctuation"].coverage == pytest.approx(1 - 3 / LENGTH)
    assert labels["first token"].coverage == labels["self"].coverage == 1.0
    assert labels["broad"].coverage == 1.0
    assert labels["broad"].score < 0.9  # of half of the keys, evenly


def test_induction_is_found_on_the_text_where_there_are_no_repeats() -> None:
    names, parts, mask = made(causal=True)
    seen = seen_of(parts, naming_statistics(IDS), mask=mask)
    named = dict(zip(names, name_heads(seen), strict=True))
    for what, key in (("induction", "induction"), ("duplicate token", "same_token")):
        label = named[what].labels[0]
        assert (label.label, label.key) == (what, key)
        assert label.score == pytest.approx(1.0, abs=1e-4)
        assert label.coverage == pytest.approx(1 / 2)
    assert {name.missing for name in named.values()} == {("punctuation",)}
    # It did not happen on the text, but on repeated random tokens.
    other = torch.arange(LENGTH)
    on_text = seen_of(parts, naming_statistics(other), mask=mask)
    both = dict(zip(names, name_heads(on_text, seen), strict=True))
    assert both["induction"].labels[0].key == "induction_random"
    assert both["induction"].labels[0].score == pytest.approx(1.0, abs=1e-4)


def test_a_head_that_follows_nothing_has_no_name() -> None:
    torch.manual_seed(3)
    q, k = (2.0 * torch.randn(1, 8, LENGTH, 16) for _ in "qk")
    for mask in (None, hw.Causal()):
        seen = seen_of([q, k, k], naming_statistics(IDS, DELIMITERS), mask=mask)
        for name in name_heads(seen, seen):
            assert (name.labels, name.label, name.missing) == ((), NO_LABEL, ())


def test_on_a_short_text_not_everything_is_local() -> None:
    q = torch.zeros(1, 2, 7, 4)  # even attention: a mean distance of 1.5 tokens
    k = torch.zeros(1, 2, 7, 4)
    ids, commas = torch.tensor([5, 6, 7, 5, 6, 7, 8]), torch.arange(7) == 4
    seen = seen_of([q, k, k], naming_statistics(ids, commas), mask=hw.Causal())
    row = seen.table()[0]
    assert row["distance_absolute"] == pytest.approx(1.5)
    assert row["distance_share"] == pytest.approx(1.0)
    assert name_heads(seen)[0].label == NO_LABEL  # 3 of 7 keys are near, and the first is a quarter


def test_what_was_not_seen_is_missing_not_denied() -> None:
    _, parts, mask = made(causal=True)
    seen = seen_of(parts, (hw.Mass(hw.Previous()), hw.Distance()), mask=mask)
    name = name_heads(seen)[0]
    assert [label.label for label in name.labels] == ["previous token"]
    assert name.missing == (
        "induction",
        "duplicate token",
        "positional",
        "self",
        "local",
        "first token",
        "punctuation",
        "broad",
    )
    one = name_heads(seen_of(parts, (hw.Mass(At(-2)),), mask=mask))[0]
    assert "positional" not in one.missing  # one offset is enough to judge by
    with pytest.raises(ValueError, match="no attention was seen"):
        name_heads(Watched())


def test_a_head_without_a_label_is_unlabeled_only_where_every_rule_was_evaluated() -> None:
    torch.manual_seed(3)
    q, k = (2.0 * torch.randn(1, 2, LENGTH, 16) for _ in "qk")
    for statistics, missing in (
        ((hw.Entropy(),), {rule.label for rule in RULES if not rule.encoders} - {"broad"}),
        (naming_statistics(), {"induction", "duplicate token", "punctuation"}),
        (naming_statistics(IDS), {"punctuation"}),
        (naming_statistics(IDS, DELIMITERS), set()),
    ):
        for name in name_heads(seen_of([q, k, k], statistics)):
            assert not name.labels
            assert {*name.missing} == missing
            assert name.label == ("not evaluated" if missing else "unlabeled")
            assert ("unlabeled" in repr(name)) == (not missing)
            assert all(label in repr(name) for label in missing)
    assert (NOT_EVALUATED, NO_LABEL) == ("not evaluated", "unlabeled")
    # No token comes twice: no query could have shown induction, so nothing is known of it.
    once = name_heads(seen_of([q, k, k], naming_statistics(torch.arange(LENGTH), DELIMITERS)))[0]
    assert (once.label, once.missing) == ("not evaluated", ("induction", "duplicate token"))
    # A label that holds is said, and what is not known stands beside it.
    _, parts, mask = made(causal=True)
    named = name_heads(seen_of(parts, (hw.Mass(hw.Previous()),), mask=mask))[0]
    assert named.label == "previous token"
    assert "previous token; not evaluated: induction" in repr(named)


@pytest.mark.parametrize(
    ("head", "unknown", "missing"),
    [
        ("first token", "entropy_share", ("first token", "punctuation", "broad")),
        ("first token", "entropy", ("first token", "punctuation", "broad")),
        ("self", "self", ("self",)),
        ("local", "previous", ("previous token",)),
    ],
)
def test_a_metric_that_is_nan_evaluates_no_rule(head: str, unknown: str, missing: Any) -> None:
    """NaN is unknown, not far from uniform and not near: no label is given or denied by it."""
    names, parts, mask = made(causal=True)
    seen = seen_of(parts, naming_statistics(IDS, DELIMITERS), mask=mask)
    row = seen.table()[names.index(head)] | {"distance_absolute": 20.0}
    assert head in [label.label for label in label_head(row)]
    row[unknown] = math.nan
    assert not {label.label for label in label_head(row)} & {head, *missing}
    assert unevaluated_labels(row) == missing


def test_a_table_is_no_watched_model(unchecked: None) -> None:
    parts = made(causal=True)[1]
    seen = seen_of(parts, (hw.LSE(),), mask=hw.Causal())
    for given in ((seen.table(),), (seen, seen.table())):
        with pytest.raises(ValueError, match=r"name_heads\(list\): pass the result of watch\(\)"):
            name_heads(*given)  # type: ignore[arg-type]


def test_repeats_of_other_modules_name_nobody() -> None:
    names, parts, mask = made(causal=True)
    seen = seen_of(parts, naming_statistics(), mask=mask)
    other = Watched()
    found = hw.observe(*parts, *naming_statistics(IDS), mask=mask)
    other.add("elsewhere", found.readings, len(names))
    named = name_heads(seen, other)
    assert len(named) == len(names)
    assert all("induction" in name.missing for name in named)


# ── rules ───────────────────────────────────────────────────────────────────────────────────────


def just(rule: LabelRule, score: float) -> dict[str, float]:
    given = {} if rule.given is None else {rule.given[0]: rule.given[2]}
    return {rule.key: score, f"{rule.key}_coverage": 0.5} | given


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.key)
def test_a_label_holds_from_its_threshold_on(rule: LabelRule) -> None:
    step = 1e-9 if rule.sign == "≥" else -1e-9
    assert rule.given is None or rule.given[0] in ("distance_share", "entropy_gap")
    (label,) = label_head(just(rule, rule.threshold))
    assert (label.label, label.key, label.score) == (rule.label, rule.key, rule.threshold)
    assert (label.sign, label.threshold, label.coverage) == (rule.sign, rule.threshold, 0.5)
    assert not label_head(just(rule, rule.threshold - step))
    for bad in (math.nan, math.inf if rule.sign == "≥" else -math.inf, None):
        assert not label_head(just(rule, bad))  # type: ignore[arg-type]
    few = just(rule, rule.threshold) | {f"{rule.key}_coverage": MIN_COVERAGE}
    assert label_head(few)
    assert not label_head(few | {f"{rule.key}_coverage": MIN_COVERAGE - 1e-9})
    if rule.given is not None:
        key, sign, threshold = rule.given
        beyond = threshold + (1e-9 if sign == "≤" else -1e-9)
        assert not label_head(just(rule, rule.threshold) | {key: beyond})
        assert not label_head({rule.key: rule.threshold})


def test_labels_come_in_the_order_of_the_rules_each_once() -> None:
    everything = {rule.key: rule.threshold for rule in RULES} | {"distance_share": 0.1}
    everything |= {"entropy_gap": 1.0, "induction_random": 0.6, "same_token_random": 0.6}
    in_order = list(dict.fromkeys(rule.label for rule in RULES))
    labels = label_head(everything)
    # The class token is the first token: a head that rests on it is called by one of them.
    assert [label.label for label in labels] == [one for one in in_order if one != "first token"]
    del everything["cls"]
    labels = label_head(everything)
    assert [label.label for label in labels] == [one for one in in_order if one != "[CLS]"]
    assert labels[0].key == "induction_random"
    assert HeadName(0, 0, labels).label == "induction"
    assert label_head({}) == ()
    assert {rule.label for rule in RULES} == {
        "previous token",
        "duplicate token",
        "induction",
        "first token",
        "local",
        "positional",
        "broad",
        "punctuation",
        "self",
        "[CLS]",
        "special tokens",
    }
    assert all(rule.why and rule.source for rule in RULES)


def test_every_rule_has_its_figure() -> None:
    _, parts, mask = made(causal=False)
    seen = seen_of(parts, naming_statistics(IDS, DELIMITERS, DELIMITERS), mask=mask)
    row = seen.table()[0]
    figures = {*row, *derived(row), "cls"}  # looks alone know that the first token is no text's
    for rule in RULES:
        assert {key.removesuffix("_random") for key in rule.keys} <= figures


def test_a_label_on_the_text_outranks_one_barely_met_on_random_tokens() -> None:
    text = {"first": 0.6, "entropy": 1.0, "entropy_share": 0.5}
    for score, first in ((0.41, "first token"), (0.5 + 1e-9, "duplicate token")):
        labels = [label.label for label in label_head(text | {"same_token_random": score})]
        assert labels[0] == first
        assert {*labels} == {"first token", "duplicate token"}
    both = label_head(text | {"same_token_random": 0.41, "same_token": 0.45})
    assert [label.key for label in both] == ["same_token", "first"]
    assert [label.key for label in label_head({"same_token_random": 0.41})] == ["same_token_random"]


def test_figures_made_of_others_are_those_of_the_weights() -> None:
    names, parts, mask = made(causal=False)
    seen = seen_of(parts, naming_statistics(), mask=mask)
    weights = hw.observe(*parts, mask=mask).weights()[0]
    place = torch.arange(LENGTH)
    near = (place[:, None] - place).abs() <= 3
    for row, p in zip(seen.table(), weights, strict=True):
        made_of = derived(row)
        assert made_of["near"] == pytest.approx(float((p * near).sum(-1).mean()), abs=1e-6)
        even = math.log(LENGTH) - row["entropy"]
        if row["entropy"] > 1e-3:
            assert made_of["entropy_gap"] == pytest.approx(even, abs=1e-3)
        else:
            assert made_of["entropy_gap"] > even - 1e-6
    assert derived({"previous": 0.5}) == {}
    assert len(names) > 10


@pytest.mark.parametrize("kind", ["bert", "gpt", "llama"])
def test_random_weights_get_no_labels(kind: str) -> None:
    """At most one head of twenty, over shapes and texts."""
    from transformers import BertConfig, BertModel, LlamaConfig, LlamaModel

    from headwise.models import GPT, GPTConfig

    labelled, heads = 0, 0
    for width, number in ((48, 4), (256, 8)):
        sizes: dict[str, Any] = {
            "vocab_size": 26,
            "hidden_size": width,
            "num_attention_heads": number,
            "num_hidden_layers": 3,
            "intermediate_size": 16,
            "max_position_embeddings": 64,
        }
        torch.manual_seed(width)
        if kind == "bert":
            model = BertModel(BertConfig(**sizes)).eval()
        elif kind == "llama":
            model = LlamaModel(LlamaConfig(**sizes, num_key_value_heads=number // 2)).eval()
        else:
            own: dict[str, Any] = {"vocab_size": 26, "n_positions": 64, "n_layer": 3}
            model = GPT(GPTConfig(n_embd=width, n_head=number, **own)).eval()
        for length in (9, 60):
            ids = torch.randint(26, (1, length))
            last = torch.arange(length)[None] == length - 1
            with torch.no_grad(), hw.watch(model, *naming_statistics(ids, ids < 5, last)) as seen:
                model(ids)
            for row in seen.table():
                figures = row | ({"cls": row["first"]} if kind == "bert" else {})
                labelled += bool(label_head(figures))
                heads += 1
    assert heads == 72
    assert labelled <= heads // 20


def test_what_a_tokenizer_adds_is_named_apart() -> None:
    """A head that rests on [CLS], one on [SEP], one on punctuation: three labels."""
    length, classes, separator, stops = 20, 0, 19, [7, 13]
    weights = torch.full((3, length), 0.1 / length)
    weights[0, classes] = weights[1, separator] = 0.9
    weights[2, stops] = 0.45
    q = torch.zeros(1, 3, length, length)
    q[..., 0] = length**0.5
    k = torch.zeros(1, 3, length, length)
    k[..., 0] = weights.log()
    where = torch.zeros(2, length, dtype=torch.bool)
    where[0, stops], where[1, separator] = True, True
    seen = seen_of([q, k, k], naming_statistics(None, *where))
    assert [name.label for name in name_heads(seen)] == [
        "first token",
        "special tokens",
        "punctuation",
    ]
    rows = [row | ({"cls": row["first"]}) for row in seen.table()]
    assert [label_head(row)[0].label for row in rows] == ["[CLS]", "special tokens", "punctuation"]


def test_delimiters_by_batch_row() -> None:
    q, k = torch.zeros(2, 1, 6, 4), torch.zeros(2, 1, 6, 4)
    where = torch.tensor([[False, True, False, False, False, False], [True] * 3 + [False] * 3])
    seen = hw.observe(q, k, k, *naming_statistics(delimiters=where))
    assert seen["delimiters"][:, 0].tolist() == [
        [pytest.approx(1 / 6)] * 6,
        [pytest.approx(0.5)] * 6,
    ]


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        *((text, True) for text in (",", ".", "...", " ,", "\n", "\n\n", " —", "。", '"', ").")),
        *((text, False) for text in ("", " ", "\t", "a", ".a", "+", "3", "[SEP]", "\\xe2")),
    ],
)
def test_delimiters_are_punctuation_and_line_breaks(text: str, is_one: bool) -> None:
    assert is_delimiter(text) is is_one


# ── the figures behind them ─────────────────────────────────────────────────────────────────────


def test_absolute_distance_by_hand() -> None:
    q, k = torch.zeros(1, 1, 3, 4), torch.zeros(1, 1, 3, 4)
    seen = hw.observe(q, k, k, hw.Distance(absolute=True))
    assert seen["distance"][0, 0].tolist() == pytest.approx([-1, 0, 1])
    assert seen["distance_absolute"][0, 0].tolist() == pytest.approx([1, 2 / 3, 1])
    assert seen["distance_share"][0, 0].tolist() == pytest.approx([1, 1, 1])
    seen = hw.observe(q, k, k, hw.Distance(absolute=True), mask=hw.Causal())
    assert seen["distance_absolute"][0, 0].tolist() == pytest.approx([0, 1 / 2, 1])
    assert seen["distance_share"][0, 0].tolist() == pytest.approx([0, 1, 1])
    assert seen.table()[0]["distance_share"] == pytest.approx(1.0)  # query 0 has no choice


def test_a_sink_that_takes_nearly_all_does_not_bring_keys_nearer() -> None:
    parts = [torch.randn(1, 2, 9, 4) for _ in range(3)]
    for mask in (None, hw.Causal(), hw.ALiBi() & hw.Causal()):
        want = hw.observe(*parts, hw.Distance(absolute=True), mask=mask)
        for height in (5.0, 60.0, 300.0):
            seen = hw.observe(
                *(*parts, hw.Distance(absolute=True)), mask=mask, sinks=torch.full((2,), height)
            )
            for name in ("distance_absolute", "distance_share"):
                torch.testing.assert_close(seen[name], want[name], rtol=1e-3, atol=1e-4)


def test_how_absolute_distance_is_read() -> None:
    q = k = torch.zeros(1, 1, 5, 4)
    for mask, road in [
        (None, "a pass over the scores"),
        (hw.Dense(torch.ones(5, 5).tril().bool()), "a pass over the scores"),
    ]:
        ways = hw.explain(q, k, k, hw.Distance(absolute=True), mask=mask).statistics
        assert ways["distance_absolute"] == ways["distance_share"] == road
    for mask in (hw.Causal(), hw.Window(2), hw.Causal() & hw.Padding(torch.tensor([3]))):
        ways = hw.explain(q, k, k, hw.Distance(absolute=True), mask=mask).statistics
        assert ways["distance_absolute"] == ways["distance"]
        ways = hw.explain(q, k, k, hw.OffsetHistogram(3, ahead=True), mask=mask).statistics
        assert list(ways) == ["offsets", "offsets_ahead"]


def test_offsets_ahead_by_hand() -> None:
    q, k = torch.zeros(1, 1, 3, 4), torch.zeros(1, 1, 3, 4)
    seen = hw.observe(q, k, k, hw.OffsetHistogram(3, ahead=True))
    # Of nine equal pairs three are the query's own, two are one away on each side, one two away.
    assert seen["offsets"][0, 0].tolist() == pytest.approx([3 / 9, 2 / 9, 1 / 9])
    assert seen["offsets_ahead"][0, 0].tolist() == pytest.approx([0, 2 / 9, 1 / 9])
    behind = hw.observe(q, k, k, hw.OffsetHistogram(3))
    assert torch.equal(behind["offsets"], seen["offsets"])

"""Texts shared by ranks: what all saw, merged, is what one process sees."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from over_ranks import RANKS
from torch import Tensor, nn
from worlds import commanded, gloo, values, world

import headwise as hw
from headwise.models import GPT, GPTConfig
from headwise.models.corpus import train_tokenizer
from headwise.report.schema import load

pytestmark = pytest.mark.ranks

SENTENCES = [
    "a",  # too short to be looked at
    "the cat sat on the mat",
    "the dog sat on the log",
    "no no no, yes yes",
    "b",
    "a man a plan a canal",
    "to be or not to be, that is the question",
]


def subject() -> tuple[GPT, Any]:
    torch.manual_seed(1)
    tokenizer = train_tokenizer(SENTENCES, vocab_size=270)
    config = GPTConfig(vocab_size=270, n_positions=40, n_embd=15, n_layer=2, n_head=3)
    return GPT(config).double().eval(), tokenizer


def looked(over_ranks: bool, texts: list[str], effects: bool) -> tuple[list[Any], dict, list]:
    if over_ranks:
        gloo()
    model, tokenizer = subject()
    seen = hw.look(
        model, tokenizer, texts, importance=effects, ablation=effects, over_ranks=over_ranks
    )
    shown = [layer.maps for layer in seen.layers]
    return seen.rows, {k: v for k, v in seen.provenance.items() if k != "versions"}, shown


def assert_same(ours: Any, want: Any, abs: float = 1e-12) -> None:
    """The same figures, to the rounding of float64; everything else is equal."""
    if isinstance(want, dict):
        assert ours.keys() == want.keys()
        for name in want:  # a standard error is a root, which turns 1e-18 into 1e-9
            assert_same(ours[name], want[name], 1e-9 if name.endswith("_se") else abs)
    elif isinstance(want, list):
        assert len(ours) == len(want)
        for one, other in zip(ours, want, strict=True):
            assert_same(one, other)
    elif isinstance(want, float):
        assert ours == pytest.approx(want, abs=abs, rel=1e-12, nan_ok=True)
    else:
        assert ours == want


@pytest.mark.parametrize(("size", "number"), [(2, 7), (4, 7), (4, 3)])
def test_a_look_over_ranks_is_that_of_one_process(size: int, number: int) -> None:
    texts = SENTENCES[:number]  # 3 of them are 2 that can be read: two ranks have none
    rows, facts, maps = looked(False, texts, True)
    assert facts["texts"] == number - (2 if number == 7 else 1)
    for ours in values(size, looked, True, texts, True):
        assert_same(ours[0], rows)
        assert_same(ours[1], facts)
        assert all((a == b).all() for a, b in zip(ours[2], maps, strict=True))


def test_the_command_prints_and_writes_once(tmp_path: Path) -> None:
    model, tokenizer = subject()
    model.save_pretrained(tmp_path / "gpt", tokenizer)
    (tmp_path / "texts").mkdir()
    for number, sentence in enumerate(SENTENCES):
        (tmp_path / "texts" / f"{number}.txt").write_text(sentence)
    call = ["look", "--model", str(tmp_path / "gpt"), "--texts", str(tmp_path / "texts")]
    call += ["--dtype", "float64", "--importance", "--json"]
    printed = {}
    for size in (1, 2):
        saved, page = tmp_path / f"{size}.json", tmp_path / f"{size}.html"
        ended = world(size, commanded, *call, "--save", str(saved), "--out", str(page))
        assert [one.code for one in ended] == [0] * size, ended
        assert [bool(one.out) for one in ended] == [True] + [False] * (size - 1)
        assert ended[0].err.count("page: ") == 1
        assert page.stat().st_size > 10_000
        printed[size] = json.loads(ended[0].out)
        assert len(load(saved).rows) == len(printed[size])
    assert_same(printed[2], printed[1])


def test_the_command_refuses_once(tmp_path: Path) -> None:
    ended = world(2, commanded, "look", "--texts", str(tmp_path / "gone"))
    assert [one.code for one in ended] == [2, 2]
    assert sum(one.err.count("headwise: ") for one in ended) == 1


def batches() -> list[tuple[Tensor, Tensor]]:
    """Batches of unequal length; of some, no row is valid."""
    torch.manual_seed(2)
    lengths = [torch.tensor([5, 3]), torch.tensor([0, 0]), torch.tensor([7, 0])]
    return [(torch.randn(2, 7, 24, dtype=torch.float64), one) for one in lengths]


def layer() -> nn.Module:
    torch.manual_seed(3)
    return hw.MultiHeadAttention(24, num_heads=3).double()


STATISTICS = (hw.Entropy(), hw.MaxLogit(), hw.Mass(hw.Previous()), hw.Received(), hw.Map(4))


def watched(over_ranks: bool, running: bool) -> dict[str, Any]:
    given = batches()
    if over_ranks:
        gloo()
        given = list(hw.parallel.share_of(given))
    model = layer()
    with hw.watch(model, *STATISTICS, running=running) as seen:
        for x, lengths in given:
            model(x, mask=hw.Causal() & hw.Padding(lengths))
    if over_ranks:
        seen = hw.parallel.merged(seen)
    tables = seen.table(), seen.table(texts=True)
    if not running:
        return {"tables": tables, "map": seen[""]["map"].sum(0).numpy()}
    kept = seen[""].running
    assert kept is not None
    figures = {name: kept[name].numpy() for name in ("entropy", "received", "map", "max_logit")}
    deviations = kept.deviation("entropy"), kept.maximum("entropy"), kept.count("entropy")
    return {"tables": tables, **figures, "spread": torch.stack(deviations).numpy()}


@pytest.mark.parametrize("running", [True, False])
@pytest.mark.parametrize("size", RANKS)
def test_what_ranks_watched_is_merged(size: int, running: bool) -> None:
    want = watched(False, running)
    assert not any(math.isnan(x) for row in want["tables"][0] for x in list(row.values())[3:])
    for ours in values(size, watched, True, running):
        assert_same(list(ours.pop("tables")), list(want["tables"]))
        for name, figure in ours.items():
            torch.testing.assert_close(
                torch.from_numpy(figure), torch.from_numpy(want[name]), atol=1e-12, rtol=0
            )


def drew(queries: int | None) -> list[dict[str, Any]]:
    """What all ranks saw of texts of which each has some, of drawn queries or of all."""
    gloo()
    torch.manual_seed(3)  # entropies that differ much from position to position, alike in all texts
    attention = hw.MultiHeadAttention(24, num_heads=3, backend="sdpa").double()
    attention.qkv.weight.data *= 8
    common, texts = torch.randn(1, 200, 24).double(), torch.randn(64, 1, 200, 24).double()
    with torch.no_grad(), hw.watch(attention, hw.Entropy(), queries=queries, running=True) as seen:
        for x in hw.parallel.share_of(common + texts / 8):
            attention(x, mask=hw.Causal())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return hw.parallel.merged(seen).table()


@pytest.mark.parametrize("size", RANKS)
def test_every_rank_draws_queries_of_its_own(size: int) -> None:
    (whole, *_), (some, *_) = values(size, drew, None), values(size, drew, 8)
    for truth, row in zip(whole, some, strict=True):
        assert abs(row["entropy"] - truth["entropy"]) < 3 * row["entropy_se"] < 0.3


def first_draws() -> list[list[float]]:
    gloo()
    found = []
    for keywords in ({}, {"gradients": True}, {"seed": 7}):
        model = layer()
        x = torch.randn(1, 40, 24).double()
        with hw.watch(model, hw.Entropy(), queries=8, **keywords) as seen:  # type: ignore[arg-type]
            model(x, mask=hw.Causal())
        found.append(seen[""]["entropy"].flatten().tolist())
    return found


def test_draws_differ_by_rank_where_nothing_is_learnt_from_them() -> None:
    one, two = values(2, first_draws)
    assert [a == b for a, b in zip(one, two, strict=True)] == [False, True, False]


def mattered(over_ranks: bool) -> list[dict[str, Any]]:
    def loss(model: nn.Module, given: tuple[Tensor, Tensor]) -> Tensor:
        return model(given[0], mask=hw.Causal()).square().mean((1, 2))

    if not over_ranks:
        return hw.importance(layer(), loss, batches()).table()
    gloo()
    mine = list(hw.parallel.share_of(batches()))
    effects = hw.parallel.merged(hw.importance(layer(), loss, mine) if mine else None)
    assert isinstance(effects, hw.capture.HeadEffects)
    return effects.table()


@pytest.mark.parametrize("size", RANKS)
def test_what_heads_matter_to_ranks_is_merged(size: int) -> None:
    want = mattered(False)
    for ours in values(size, mattered, True):
        assert_same(ours, want)


def refused() -> list[str]:
    from torch import distributed as dist

    gloo()
    first = dist.get_rank() == 0
    said = []
    with hw.watch(layer(), hw.Entropy()) as seen:
        pass
    given: Any
    for given in (None, seen if first else hw.Running(), 3):
        try:
            hw.parallel.merged(given)
        except ValueError as error:
            said.append(str(error))
    with hw.watch(model := layer(), hw.Entropy() if first else hw.MaxLogit()) as seen:
        model(torch.zeros(1, 3, 24, dtype=torch.float64))
    try:
        hw.parallel.merged(seen)
    except ValueError as error:
        said.append(str(error))
    return said


def test_what_cannot_be_merged() -> None:
    for said in values(2, refused):
        nothing, apart, other, figures = said
        assert "no rank has a result" in nothing
        assert "ranks gave Running, Watched" in apart
        assert "merged(int): give the result of watch()" in other
        assert "cannot be combined" in figures


def test_without_a_group_nothing_is_shared() -> None:
    assert list(hw.parallel.share_of("abc")) == ["a", "b", "c"]
    running = hw.Running()
    assert hw.parallel.merged(running) is running

"""`explain()` says how a call's statistics are read, and they are read so."""

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.backends import BACKENDS
from headwise.stats import run
from headwise.stats.blocks import Scores
from headwise.stats.mass import _Masses
from headwise.stats.plan import PAIRS, PASS, ROWS
from headwise.stats.record import Record
from headwise.stats.statistic import Statistic
from support import MASKS_WITH_POSITIONS, B, S, T, qkv

FEW = "for few queries it costs less than a call, which pads and copies all keys"
BENT = "softcap is not linear in the scores"


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """What is really done: passes over the scores, calls of a backend, blocks of rows."""
    count: Counter[str] = Counter()

    def spied(name: str, real: Any) -> Any:
        def spy(*args: Any, **keywords: Any) -> Any:
            count[name] += 1
            return real(*args, **keywords)

        return spy

    monkeypatch.setattr(run, "sweep", spied("pass", run.sweep))
    for backend in BACKENDS:
        monkeypatch.setattr(type(backend), "run", spied("call", type(backend).run))
    monkeypatch.setattr(Scores, "row_figures", spied("in_rows", Scores.row_figures))
    for name in ("_within", "_of_pairs", "_of_one_key"):
        monkeypatch.setattr(_Masses, name, spied(f"_mass{name}", getattr(_Masses, name)))
    return count


def sets() -> list[tuple[Statistic, ...]]:
    return [
        (hw.LSE(), hw.MaxLogit(), hw.Sink()),
        (hw.Entropy(),),
        (hw.Distance(),),
        (hw.Entropy(), hw.Distance()),
        (hw.Distance(), hw.TopKeys(2), hw.Entropy()),
        (hw.TopKeys(2), hw.Entropy(), hw.Distance(spread=True)),
        (hw.Received(), hw.OffsetHistogram(), hw.Entropy()),
        (hw.Mass(hw.First()), hw.Mass(hw.Previous()), hw.Map(3), hw.Similarity(4)),
        (hw.Mass(hw.Window(2)), hw.Map(2 * 5 + 1), hw.Entropy()),
    ]


CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 2.0},
    "alibi": {"mask": hw.ALiBi() & hw.Causal()},
    "causal": {"mask": hw.Causal()},
    "one query": {"queries": [3]},
    "softcap, one query": {"softcap": 2.0, "queries": [3]},
}


def by_name(keywords: dict[str, Any]) -> dict[str, Any]:
    """With a backend by name that makes no figures of its own."""
    return {"backend": "blocked" if "softcap" in keywords else "sdpa", **keywords}


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("number", range(len(sets())))
def test_it_is_done_as_it_is_said(
    number: int, call: str, gradients: bool, done: Counter[str]
) -> None:
    statistics, keywords = sets()[number], by_name(CALLS[call])
    q, k, v = (x.requires_grad_(gradients) for x in qkv())
    ways = hw.explain(q, k, v, *statistics, **keywords).statistics
    assert not done  # nothing is computed
    seen = hw.observe(q, k, v, *statistics, **keywords)
    assert list(ways) == list(seen.names)
    passes = [name for name, way in ways.items() if way.startswith(PASS)]
    assert done["pass"] == bool(passes)
    together = "the same for entropy and distance"
    calls = 1 + sum(  # the output, and each identity's own; entropy and its share are one
        int(way.split()[1]) if way.split()[1].isdigit() else 1
        for name, way in ways.items()
        if way.startswith("identity") and name != "entropy_share"
    )
    calls -= ways.get("entropy", "").endswith(together)
    assert done["call"] == calls
    by_rows = [name for name, way in ways.items() if "a gradient is required" in way]
    assert bool(done["in_rows"]) == bool(by_rows)


def test_without_an_output_the_lse_is_one_more_call(done: Counter[str]) -> None:
    q, k, v = qkv()
    keywords = by_name({"mask": hw.Causal(), "output": False})
    for statistics in ((hw.LSE(),), (hw.TopKeys(2), hw.LSE(), hw.Entropy())):
        said = hw.explain(q, k, v, *statistics, **keywords).statistics
        assert said["lse"] == "one more call: there is no output to take it from"
        assert not done
        hw.observe(q, k, v, *statistics, **keywords)
        assert done["call"] == 1
        assert done["pass"] == len(statistics) // 2
        done.clear()


@pytest.mark.parametrize("share", [0.01, 0.5])
def test_crowded_patterns_are_said_to_be_read_in_rows(share: float, done: Counter[str]) -> None:
    q, k, v = (torch.randn(1, 2, 200, 4) for _ in range(3))
    ids = torch.arange(200) % round(1 / share)
    statistic = hw.Mass(hw.SameToken(ids))
    way = hw.explain(q, k, v, statistic, backend="sdpa").statistics["same_token"]
    hw.observe(q, k, v, statistic, backend="sdpa")
    assert way.startswith(ROWS if share == 0.5 else PAIRS)
    assert (done["in_rows"], done["_mass_of_pairs"]) == ((1, 0) if share == 0.5 else (0, 1))


@pytest.mark.parametrize(
    ("statistics", "keywords", "want"),
    [
        ((hw.Entropy(),), {}, {"entropy": "identity: one more call"}),
        (
            (hw.Entropy(), hw.Distance()),
            {},
            {"distance": "identity: one more call: the same for entropy and distance"},
        ),
        ((hw.Entropy(),), {"softcap": 30.0}, {"entropy": f"a pass over the scores: {BENT}"}),
        (
            (hw.Entropy(), hw.Distance()),
            {"softcap": 30.0},
            {"distance": "a pass over the scores: it is needed for entropy anyway"},
        ),
        (
            (hw.Entropy(),),
            {"mask": hw.ALiBi()},
            {"entropy": "a pass over the scores: the scores include a bias"},
        ),
        (
            (hw.Entropy(), hw.Received()),
            {},
            {
                "entropy": "a pass over the scores: it is needed for received anyway",
                "received": "a pass over the scores",
            },
        ),
        ((hw.Entropy(),), {"queries": 1}, {"entropy": f"a pass over the scores: {FEW}"}),
        ((hw.LSE(), hw.Sink()), {}, {"lse": "the kernel's own", "sink": "from the log-sum-exp"}),
        ((hw.Map(7),), {}, {"map": "identity: 2 more calls"}),
        ((hw.Similarity(3),), {}, {"similarity": f"sampled rows of P: 3 of {T}"}),
        ((hw.OutputNorm(),), {}, {"output_norm": "from the output"}),
    ],
    ids=str,
)
def test_the_roads_in_words(
    statistics: tuple[Statistic, ...], keywords: dict[str, Any], want: dict[str, str]
) -> None:
    said = hw.explain(*qkv(), *statistics, **by_name(keywords))
    assert {name: said.statistics[name] for name in want} == want
    for name, way in want.items():
        assert f"  {name}" in str(said)
        assert str(said).splitlines()[-1].endswith(list(said.statistics.values())[-1])
        assert way in str(said)


def test_a_statistic_of_ones_own_need_not_say() -> None:
    class Agreement(hw.Statistic):
        names = ("agreement",)

        def metric(self, record: Record) -> dict[str, hw.stats.Reading]:
            raise AssertionError("nothing is computed")

        def define(self, full: Any) -> dict[str, Tensor]:
            return {}

    said = hw.explain(*qkv(), Agreement())
    assert said.statistics == {"agreement": "as defined by the statistic"}


def test_without_statistics_it_is_about_the_call_alone() -> None:
    said = hw.explain(*qkv(), softcap=2.0)
    assert said.statistics == {}
    assert len(str(said).splitlines()) == len(BACKENDS)


@pytest.mark.usefixtures("unchecked")
def test_faults_are_named() -> None:
    with pytest.raises(ValueError, match=r"explain\(…, <class .*did you mean Entropy\(\)"):
        hw.explain(*qkv(), hw.Entropy)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'sdpa' cannot run this call: softcap"):
        hw.explain(*qkv(), softcap=2.0, backend="sdpa")
    with pytest.raises(ValueError, match="one token per key"):
        hw.explain(*qkv(), hw.Mass(hw.SameToken(torch.zeros(T, dtype=torch.long))))


@pytest.mark.parametrize("name", MASKS_WITH_POSITIONS)
def test_a_key_that_is_no_number_harms_only_who_sees_it(name: str) -> None:
    mask = MASKS_WITH_POSITIONS[name](T, S)
    q, k, v = qkv()
    clean = hw.observe(q, k, v, hw.Entropy(), hw.Distance(), mask=mask)
    k = k.clone()
    k[0, 1, 9] = torch.nan
    allowed = torch.ones(B, 6, T, S, dtype=torch.bool)
    if mask is not None:
        allowed = mask.dense(B, 6, T, S)
    sees = torch.zeros(B, 6, T, dtype=torch.bool)
    sees[0, 2:4] = allowed[0, 2:4, :, 9]
    for more, output in itertools.product(([], [hw.TopKeys(1)]), (True, False)):
        statistics = [hw.Entropy(), hw.Distance(), *more]
        seen = hw.observe(q, k, v, *statistics, mask=mask, output=output, backend="sdpa")
        if name in ("none", "causal"):  # a mask that becomes a bias: NaN − ∞ is NaN in the kernel
            assert torch.equal(seen.lse.isnan(), sees)
        fine = ~seen.lse.isnan()
        for figure in ("entropy", "distance"):
            torch.testing.assert_close(
                seen[figure][fine], clean[figure][fine], rtol=1e-4, atol=1e-4
            )
            assert not (sees & ~seen[figure].isnan()).any()

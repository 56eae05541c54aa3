"""Every statistic against its definition, over drawn calls of every kind a model makes.

Exact means float64 to 1e-10, whatever the scores. In float32 and bfloat16 the statistics may be as
far off as their definition is in float32, times a factor, plus rounding. (Inputs in bfloat16 are
exact in float32, and statistics are computed there.)
"""

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import headwise as hw
from headwise.backends import blocked
from headwise.core.reference import Definition, attention
from headwise.stats.statistic import Statistic

EXACT = 1e-10


def everything(ids: Tensor, width: int) -> list[Statistic]:
    return [
        hw.LSE(),
        hw.Entropy(),
        hw.MaxLogit(),
        hw.Sink(),
        hw.Mass(hw.First(2)),
        hw.Mass(hw.Previous(2)),
        hw.Mass(hw.Self()),
        hw.Mass(hw.SameToken(ids)),
        hw.Mass(hw.FirstOfDocument(ids), name="first of document"),
        hw.Mass(hw.FirstOfDocument(ids, 2), name="two of document"),
        hw.Mass(hw.Induction(ids)),
        hw.Mass(hw.Window(3), name="near"),
        hw.Distance(spread=True),
        hw.Map(4),
        hw.TopKeys(3),
        hw.Received(),
        hw.OffsetHistogram(5),
        hw.Similarity(8, seed=3),
        hw.Norms(),
        hw.OutputNorm(torch.ones(3, width)),
    ]


MASKS = ["none", "causal", "window", "wide", "padding", "left", "documents", "prefix", "random"]
MASKS += ["bias", "forbidding", "alibi", "nothing"]


def mask_of(kind: str, b: int, h: int, t: int, s: int) -> hw.Mask | None:
    lengths = torch.randint(0, s + 1, (b,))
    noise = torch.randn(b, h, t, s, dtype=torch.float64)
    return {
        "none": None,
        "causal": hw.Causal(),
        "window": hw.Window(int(torch.randint(1, s + 1, ()))),
        "wide": hw.Window(s + 50),
        "padding": hw.Causal() & hw.Padding(lengths),
        "left": hw.Causal() & hw.Padding(lengths, side="left"),
        "documents": hw.Causal() & hw.Documents(torch.randint(0, 3, (b, s)).sort().values),
        "prefix": hw.Causal() | hw.Prefix(lengths),
        "random": hw.Dense(noise > 0.5),
        "bias": hw.Causal() & hw.Bias(noise),
        "forbidding": hw.Bias(noise.masked_fill(noise > 0, -math.inf)),
        "alibi": hw.ALiBi() & hw.Causal(),
        "nothing": hw.Dense(torch.zeros(1, 1, 1, 1, dtype=torch.bool)),
    }[kind]


@dataclass(frozen=True)
class Case:
    """A call to be: its sizes, its mask, how large its scores are, and the seed of its numbers."""

    b: int
    heads: tuple[int, int]
    t: int
    s: int
    d: int
    mask: str
    size: float
    softcap: float | None
    sinks: float | None
    symbols: int
    seed: int

    def made(self) -> tuple[dict[str, Any], list[Statistic]]:
        torch.manual_seed(self.seed)
        (h, g), b, t, s, d = self.heads, self.b, self.t, self.s, self.d
        shapes = (b, h, t, d), (b, g, s, d), (b, g, s, d)
        q, k, v = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
        largest = (q @ k.repeat_interleave(h // g, 1).mT).abs().max() * d**-0.5
        # A query's document and token are those of its key position, so there must be one.
        kind = "causal" if self.mask == "documents" and t > s else self.mask
        sinks = None if self.sinks is None else torch.randn(h, dtype=torch.float64) + self.sinks
        call = {"q": q * (self.size / float(largest)), "k": k, "v": v, "sinks": sinks}
        call |= {"mask": mask_of(kind, b, h, t, s), "softcap": self.softcap}
        statistics = everything(torch.randint(0, self.symbols, (b, s)), h * d)
        if t > s:
            statistics = [x for x in statistics if not hasattr(getattr(x, "keys", None), "ids")]
        return call, statistics


cases = st.builds(
    Case,
    b=st.integers(1, 2),
    heads=st.sampled_from([(1, 1), (2, 1), (3, 3), (4, 2)]),
    t=st.integers(1, 13),
    s=st.integers(1, 13),
    d=st.integers(1, 5),
    mask=st.sampled_from(MASKS),
    size=st.sampled_from([0.0, 1.0, 30.0, 1e4]),
    softcap=st.sampled_from([None, None, 2.0, 50.0]),
    sinks=st.sampled_from([None, 0.0, 5.0]),
    symbols=st.sampled_from([1, 3, 300]),
    seed=st.integers(0, 2**31),
)


def alone(statistics: list[Statistic]) -> list[list[Statistic]]:
    """Each by the way of its own: the spread makes a pass, from which the distance comes too."""
    ways = [[statistic] for statistic in statistics]
    return [*ways, [hw.Distance()], [hw.Entropy(), hw.Distance()]]


def definition_of(call: dict[str, Any]) -> Definition:
    return attention(**call)


def figures_of(call: dict[str, Any], statistics: list[Statistic], **keywords: Any) -> hw.stats.Seen:
    parts = dict(call)
    q, k, v = (parts.pop(name) for name in "qkv")
    return hw.observe(q, k, v, *statistics, **parts, **keywords)


@given(cases, st.sampled_from(["auto", "blocked", "eager"]), st.booleans())
@settings(max_examples=70)
def test_exact_in_float64(case: Case, backend: str, gradients: bool) -> None:
    call, statistics = case.made()
    full = definition_of(call)
    call = call | {"q": call["q"].requires_grad_(gradients)}
    together = figures_of(call, statistics, backend=backend)
    for some in alone(statistics):
        seen_alone = figures_of(call, some, backend=backend)
        for name, want in (pair for x in some for pair in x.define(full).items()):
            for seen in (together, seen_alone):
                got = seen[name].detach()
                assert name == "similarity" or not got.isnan().any()  # of heads that see nothing
                if name == "top_keys":
                    check_top_keys(seen, full)
                    continue
                near = {"rtol": EXACT, "atol": EXACT, "equal_nan": True}
                torch.testing.assert_close(got, want, **near, msg=name)


def check_top_keys(seen: hw.stats.Seen, full: Definition) -> None:
    """Among equals any key may come first: each must have the weight that it is listed with."""
    keys, weights = seen["top_keys"], seen["top_weights"].detach()
    found = full.weights.gather(-1, keys.clamp(min=0))
    torch.testing.assert_close(weights, torch.where(keys >= 0, found, 0.0), rtol=EXACT, atol=EXACT)
    seen_keys = full.allowed.sum(-1, keepdim=True).clamp(max=keys.shape[-1])
    assert torch.equal((keys >= 0).sum(-1, keepdim=True), seen_keys)


@given(
    cases,
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from(["auto", "sdpa", "blocked"]),
)
@settings(max_examples=60)
def test_low_precision_is_as_good_as_the_definition(
    case: Case, dtype: torch.dtype, backend: str
) -> None:
    call, statistics = case.made()
    backend = "blocked" if case.softcap and backend == "sdpa" else backend
    call = call | {name: call[name].to(dtype) for name in "qkv"}
    if call["sinks"] is not None:
        call["sinks"] = call["sinks"].float()
    exact = definition_of(call | {name: call[name].double() for name in "qkv"})
    plain = definition_of(call)
    s = call["k"].shape[2]
    # A score may be off by its own rounding, by so much each p is off relatively, and by as much
    # the figures on 0 … 1 that are made of it; others by their scale times that.
    eps = torch.finfo(torch.float32).eps
    size = float(exact.logits[exact.allowed].abs().max()) if exact.allowed.any() else 0.0
    by_scores = 8 * eps * (1 + size)
    scale = {"distance": s, "distance_spread": s, "received": call["q"].shape[2]}
    # The logarithms in an entropy are as large as the scores.
    scale |= {"entropy": 1 + size, "entropy_share": 1 + size}
    for some in (statistics, *alone(statistics)):
        seen = figures_of(call, some, backend=backend)
        for statistic in some:
            wanted, plainly = statistic.define(exact), statistic.define(plain)
            for name, want in wanted.items():
                if name in ("top_keys", "output_norm", "contribution"):
                    continue  # of equal weights any key; the output's own dtype
                got = seen[name]
                assert got.dtype == torch.float32
                assert name == "similarity" or not got.isnan().any()  # of heads that see nothing
                assert torch.equal(got.isinf(), want.isinf())
                assert torch.equal(got.isnan(), want.isnan())
                real = want.isfinite()
                error = float((got - want)[real].abs().max()) if real.any() else 0.0
                allowed = float((plainly[name] - want)[real].abs().max()) if real.any() else 0.0
                bound = by_scores * scale.get(name, 1)
                assert error <= 8 * allowed + bound, (name, error, allowed, bound)


FAR = 2**24 + 4097
"""Keys of which not every position is a number of float32."""


@pytest.mark.parametrize("way", ["identity", "pass"])
def test_positions_are_exact_beyond_2_to_the_24(way: str) -> None:
    # Keys are one feature wide and see each other only near the end, so this costs 70 MB.
    k = torch.zeros(1, 1, FAR, 1)
    q = torch.zeros(1, 1, 3, 1, requires_grad=way == "identity")
    mask = hw.Causal() & hw.Window(4)
    statistics = [hw.Distance(), hw.Mass(hw.Previous()), hw.Mass(hw.Self()), hw.Entropy()]
    if way == "pass":  # these have no gradient
        statistics = [hw.Distance(spread=True), *statistics[1:], hw.TopKeys(4)]
        statistics += [hw.OffsetHistogram(4), hw.Received()]
    said = hw.explain(q, k, k, *statistics, mask=mask, backend="sdpa").statistics
    assert said["distance"].startswith("identity" if way == "identity" else "a pass")
    seen = hw.observe(q, k, k, *statistics, mask=mask, backend="sdpa")
    found = {name: seen[name].detach()[0, 0] for name in seen.names}
    # Each query sees itself and the three before it, alike.
    assert found["distance"].tolist() == [1.5] * 3
    assert found["previous"].tolist() == found["self"].tolist() == [0.25] * 3
    torch.testing.assert_close(found["entropy"], torch.full((3,), math.log(4)))
    weights = seen.weights(keys=slice(FAR - 6, FAR))[0, 0]
    assert weights.tolist() == [
        [0.25] * 4 + [0, 0],
        [0] + [0.25] * 4 + [0],
        [0, 0] + [0.25] * 4,
    ]
    if way == "identity":
        return
    assert found["distance_spread"].tolist() == pytest.approx([math.sqrt(1.25)] * 3)
    assert found["top_keys"].sort().values.tolist() == [
        list(range(FAR - 6 + row, FAR - 2 + row)) for row in range(3)
    ]
    assert found["offsets"].tolist() == [0.25, 0.25, 0.5, 0.0]
    assert found["received"][-6:].tolist() == [0.25, 0.5, 0.75, 0.75, 0.5, 0.25]
    assert not found["received"][:-6].any()


def test_one_query_reads_a_far_distance_exactly() -> None:
    # The largest score is at key 1, the query at the end: the distance is all but the number of
    # keys, and even, so that float32 holds it.
    k = torch.zeros(1, 1, FAR, 1)
    k[:, :, 2] = 100.0
    q = torch.ones(1, 1, 1, 1)
    seen = hw.observe(q, k, k, hw.Distance(), hw.TopKeys(1), scale=1.0, backend="sdpa")
    assert seen["top_keys"].item() == 2
    assert seen["distance"].item() == FAR - 1 - 2


@pytest.mark.parametrize("scores", [5, 60, 1 << 22])
def test_small_blocks_are_as_exact(scores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from headwise.stats import blocks

    monkeypatch.setattr(blocked, "SCORES_AT_A_TIME", scores)
    monkeypatch.setattr(blocks, "SCORES", scores)
    monkeypatch.setattr(blocks, "ROWS", max(1, scores % 7))
    monkeypatch.setattr(blocks, "KEYS", max(1, scores % 11))
    b, h, t, s = 2, 2, 7, 9
    q, k = torch.randn(b, h, t, 3).double(), torch.randn(b, 1, s, 3).double()
    for kind in MASKS:
        for softcap in (None, 2.0):
            call: dict[str, Any] = {"q": q, "k": k, "v": k, "softcap": softcap}
            call |= {"mask": mask_of(kind, b, h, t, s), "sinks": torch.randn(h).double()}
            statistics = everything(torch.randint(0, 3, (b, s)), h * 3)
            full, seen = definition_of(call), figures_of(call, statistics)
            for statistic in statistics:
                for name, want in statistic.define(full).items():
                    if name != "top_keys":
                        near = {"rtol": EXACT, "atol": EXACT, "equal_nan": True}
                        torch.testing.assert_close(seen[name], want, **near, msg=f"{kind} {name}")

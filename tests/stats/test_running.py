"""Statistics that add up over calls equal those of one call that saw everything."""

import math
import re

import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.stats.moments import moments_of
from headwise.stats.statistic import Statistic
from support import B, D, G, H, S, T, qkv

TOL = {"rtol": 1e-10, "atol": 1e-10}


def per_query() -> list[Statistic]:
    return [
        hw.LSE(),
        hw.Entropy(),
        hw.Mass(hw.First(2)),
        hw.Mass(hw.Previous(3)),
        hw.Mass(hw.Window(3), name="near"),
        hw.Distance(spread=True),
        hw.MaxLogit(),
        hw.OutputNorm(),
    ]


def steps(length: int, prefill: int) -> list[tuple[int, int]]:
    return [(0, prefill), *((t, t + 1) for t in range(prefill, length))]


@pytest.mark.parametrize("mask", [hw.Causal(), hw.Window(4), hw.ALiBi() & hw.Causal()], ids=str)
@pytest.mark.parametrize("sinks", [False, True])
def test_a_prefill_and_steps_are_one_call(mask: hw.Mask, sinks: bool) -> None:
    q, k, v = (x.double() for x in qkv(S, S))
    keywords = {"mask": mask, "sinks": torch.randn(H).double() if sinks else None}
    statistics = [*per_query(), hw.Sink(), hw.Received(), hw.OffsetHistogram(4)]
    whole = hw.observe(q, k, v, *statistics, **keywords)
    for prefill in (1, T, S):
        running = hw.Running()
        for start, stop in steps(S, prefill):
            running.add(
                hw.observe(
                    q[:, :, start:stop], k[:, :, :stop], v[:, :, :stop], *statistics, **keywords
                )
            )
        assert running.calls == 1 + S - prefill
        assert running.names == whole.names
        for row, want in zip(running.table(), whole.table(), strict=True):
            assert list(row) == list(want)
            for name, value in row.items():
                assert value == pytest.approx(want[name], rel=1e-10, abs=1e-10), name
        torch.testing.assert_close(running["received"], whole["received"], **TOL)
        torch.testing.assert_close(running["offsets"], whole["offsets"].mean(0), **TOL)
        torch.testing.assert_close(running["max_logit"], whole["max_logit"].amax(0), **TOL)
        for statistic in per_query():
            for name in statistic.names:
                if name == "max_logit":
                    continue
                reading = whole.reading(name)
                assert reading.rows is not None
                rows = reading.rows.expand(reading.values.shape)
                for head in range(H):
                    values = reading.values[:, head][rows[:, head]]
                    mine = [f(name)[head] for f in (running.count, running.__getitem__)]
                    mine += [f(name)[head] for f in (running.deviation, running.maximum)]
                    size = torch.tensor(len(values), dtype=torch.float64)
                    want = [size, values.mean(), values.std(correction=0), values.amax()]
                    torch.testing.assert_close(mine, want, **TOL, msg=name)


def test_by_hand() -> None:
    k = torch.zeros(1, 2, 3, D)
    running = hw.Running()
    for start, stop in ((0, 2), (2, 3)):  # equal scores: rows see 1, 2 and 3 keys alike
        seen = hw.observe(
            k[:, :, start:stop],
            k[:, :, :stop],
            k[:, :, :stop],
            hw.Distance(),
            hw.Received(),
            hw.Mass(hw.Previous()),
            mask=hw.Causal(),
        )
        running.add(seen)
    assert running["received"][0, 1].tolist() == pytest.approx([1 + 1 / 2 + 1 / 3, 5 / 6, 1 / 3])
    assert running["distance"].tolist() == pytest.approx([0.5, 0.5])  # of 0, ½ and 1
    assert running.deviation("distance").tolist() == pytest.approx([math.sqrt(1 / 6)] * 2)
    assert running.maximum("distance").tolist() == pytest.approx([1.0, 1.0])
    assert running.count("distance").tolist() == [3, 3]
    row = running.table()[0]
    assert row["previous"] == pytest.approx((1 / 2 + 1 / 3) / 2)
    assert row["previous_coverage"] == pytest.approx(2 / 3)


def test_rows_that_see_nothing_count_nowhere() -> None:
    q, k, v = (x.double() for x in qkv(S, T))
    whole = hw.observe(q, k, v, hw.Entropy(), hw.Map(2), mask=hw.Causal())
    running = hw.Running()
    empty = hw.observe(q[:, :, :0], k, v, hw.Entropy(), hw.Map(2), mask=hw.Causal())
    dead = hw.observe(q[:, :, :2], k[:, :, :0], v[:, :, :0], hw.Entropy(), hw.Map(2))
    for seen in (empty, dead, whole, empty, dead):
        running.add(seen)
    assert running.table()[0]["entropy"] == pytest.approx(whole.table()[0]["entropy"], rel=1e-12)
    assert running.count("entropy").tolist() == [B * T] * H
    torch.testing.assert_close(
        running.maximum("entropy"), whole["entropy"].amax((0, 2)), rtol=0, atol=0
    )
    alone = hw.Running()
    alone.add(dead)
    assert "entropy" not in alone.table()[0]  # a mean over nothing is not 0
    assert alone.maximum("entropy").tolist() == [-math.inf] * H


def test_a_batch_without_rows_has_a_table() -> None:
    q, k, v = (x.double() for x in qkv(S, T))
    running = hw.Running()
    for rows in (0, B, 0):
        seen = hw.observe(q[:rows], k[:rows], v[:rows], hw.MaxLogit(), hw.Norms(), hw.Entropy())
        running.add(seen)
        table = seen.table()
        assert len(table) == H
        for name in ("max_logit", "query_norm", "key_norm"):
            assert all((row[name] == -math.inf) is (not rows) for row in table)
            assert running.table()[1][name] == (table[1][name] if rows else running[name][1])
        if rows:
            whole = table
    for row, want in zip(running.table(), whole, strict=True):
        assert row == pytest.approx(want)
    layer = hw.MultiHeadAttention(24, 3)
    with hw.watch(layer, hw.MaxLogit()) as watched:
        for x in (torch.randn(0, 7, 24), torch.randn(2, 7, 24)):
            layer(x)
    largest = watched[""].calls[1]["max_logit"].values.amax(0)
    assert [row["max_logit"] for row in watched.table()] == pytest.approx(largest.tolist())


def test_maps_and_similarities_are_weighted_by_their_rows() -> None:
    running, readings = hw.Running(), []
    for batch in (1, 3):
        q, k, v = (torch.randn(batch, n, S, D).double() for n in (H, G, G))
        lengths = torch.randint(3, S, (batch,))
        mask = hw.Causal() & hw.Padding(lengths, side="left")  # the first rows see nothing
        seen = hw.observe(q, k, v, hw.Map(4), hw.Similarity(S), mask=mask)
        running.add(seen)
        readings.append((seen, mask))
    # Every query once, whatever its call: row sums of the map by hand.
    for name in ("map", "similarity"):
        parts = [seen.reading(name) for seen, _ in readings]
        over = [p.over.expand(p.values.shape) for p in parts if p.over is not None]
        total = sum((p.values * n).sum(0) for p, n in zip(parts, over, strict=True))
        count = sum(n.sum(0) for n in over)
        torch.testing.assert_close(running[name], total / count.clamp(min=1), **TOL)
    torch.testing.assert_close(
        running["map"].sum(-1)[:, -1], torch.ones(H, dtype=torch.float64), **TOL
    )


@pytest.mark.parametrize("window", [None, 4])
def test_a_generation_of_a_watched_layer(window: int | None) -> None:
    torch.manual_seed(1)
    layer = hw.MultiHeadAttention(24, H, num_kv_heads=G, sinks=True, rope=hw.RoPE(4)).double()
    x = torch.randn(B, S, 24, dtype=torch.float64)
    mask = hw.Causal() if window is None else hw.Window(window)
    statistics = [hw.Entropy(), hw.Received(), hw.Distance(), hw.Sink(), hw.OffsetHistogram(4)]
    with torch.no_grad():
        with hw.watch(layer, *statistics) as whole:
            layer(x, mask=mask)
        cache = hw.KVCache(window=window)
        with hw.watch(layer, *statistics, running=True) as seen:
            with pytest.raises(ValueError, match="the model was not called"):
                seen.table()
            for start, stop in steps(S, T):
                layer(x[:, start:stop], mask=mask, cache=cache)
    assert not seen[""].calls
    for row, want in zip(seen.table(), whole.table(), strict=True):
        assert list(row) == list(want)
        assert row.pop("calls") == 1 + S - T
        assert want.pop("calls") == 1
        assert row.pop("layer") == want.pop("layer") == 0
        assert row.pop("module") == want.pop("module") == ""
        assert row == pytest.approx(want, rel=1e-10, abs=1e-10)
    torch.testing.assert_close(seen[""]["received"], whole[""]["received"], **TOL)
    torch.testing.assert_close(seen[""]["offsets"], whole[""]["offsets"].mean(0), **TOL)


def test_memory_does_not_grow_with_calls() -> None:
    q, k, v = qkv()
    running = hw.Running()

    def held() -> int:
        parts = [vars(part) for part in running._parts.values()]
        return sum(x.numel() for part in parts for x in part.values() if isinstance(x, Tensor))

    sizes = []
    for _ in range(3):
        running.add(hw.observe(q, k, v, *per_query(), hw.Received(), hw.Map(3), hw.TopKeys(2)))
        sizes.append(held())
    assert len(set(sizes)) == 1


def test_nothing_of_the_graph_is_kept() -> None:
    q, k, v = (x.requires_grad_() for x in qkv())
    running = hw.Running()
    running.add(hw.observe(q, k, v, *per_query(), hw.Received(), hw.Map(3)))
    assert not any(running[name].requires_grad for name in running.names)


def test_faults_are_named() -> None:
    q, k, v = qkv()
    running = hw.Running()
    with pytest.raises(KeyError, match="there are: nothing yet"):
        running["entropy"]
    assert running.table() == []
    running.add(hw.observe(q, k, v, hw.Entropy(), hw.Received(), hw.TopKeys(2), hw.Map(3)))
    with pytest.raises(KeyError, match="'first' was not observed; there are: entropy"):
        running["first"]
    with pytest.raises(KeyError, match="'top_keys' is a list per query"):
        running["top_keys"]
    with pytest.raises(KeyError, match="'map' is not a metric of single queries"):
        running.deviation("map")
    before = running["received"].clone()
    for bad, says in [
        (hw.observe(q[:1], k[:1], v[:1], hw.Entropy(), hw.Received()), "batch of 1 differs"),
        (hw.observe(q, k, v, hw.Received(), hw.Map(4)), re.escape("is [6, 4, 4] for each")),
        (hw.observe(q[:, :3], k, v, hw.Received()), "3 heads.*earlier calls had 6"),
    ]:
        with pytest.raises(ValueError, match=says):
            running.add(bad)
        assert running.calls == 1  # a call that is refused leaves nothing behind
        assert torch.equal(running["received"], before)


def test_states_of_older_versions_are_read() -> None:
    q, k, v = (x.double() for x in qkv(S, S))
    running = hw.Running()
    running.add(hw.observe(q, k, v, hw.Entropy(), hw.Mass(hw.Previous()), mask=hw.Causal()))
    state = running.state()
    parts = []
    for part in state["parts"]:
        moments = part["moments"]
        old = {name: part[name] for name in ("name", "count", "texts", "unknown")}
        old |= {"kind": "queries", "mean": moments["total"] / moments["count"]}
        old |= {"squares": moments["squares"], "maximum": moments["largest"]}
        covered = moments["among"] is not None
        zero = torch.zeros(H).double()
        old |= {"covered": covered, "among": moments["among"] if covered else zero}
        parts.append(old | {"drawn": False, "errors": zero})
    parts.append({"kind": "heads", "name": "own", "count": zero + 2, "total": zero + 6})
    parts[-1]["texts"] = parts[0]["texts"]
    read = hw.Running.of_state({**state, "parts": parts})
    for name in running.names:
        torch.testing.assert_close(read[name], running[name], **TOL)
        torch.testing.assert_close(read.deviation(name), running.deviation(name), **TOL)
        assert torch.equal(read.maximum(name), running.maximum(name))
    assert read["own"].tolist() == [3.0] * H
    table = [
        {n: x for n, x in row.items() if not n.startswith("own")} for row in read.table(texts=True)
    ]
    assert [list(row) for row in table] == [list(row) for row in running.table(texts=True)]
    for row, want in zip(table, running.table(texts=True), strict=True):
        assert row == pytest.approx(want, rel=1e-12)


def test_moments_merge_to_those_of_all() -> None:
    values, rows = torch.randn(2, 3, 9).double(), torch.rand(2, 3, 9) > 0.3
    whole = moments_of(values, rows).heads
    parts = [moments_of(values[..., i], rows[..., i]) for i in (slice(0, 4), slice(4, 9))]
    merged = parts[0].merge(parts[1])
    for name in ("total", "count", "squares", "largest", "mean"):
        torch.testing.assert_close(getattr(merged, name), getattr(whole, name), **TOL)

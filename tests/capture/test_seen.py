"""What was seen: tables over calls and texts, sums of many, files, and what an empty one says."""

from __future__ import annotations

import copy
import itertools
import json
import math
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import fresh
import headwise as hw
from ci import in_ci
from headwise.capture import io as seen_file
from headwise.capture.captured import Watched
from headwise.stats.record import Reading

HEADS = 3


def a_layer(seed: int = 0) -> hw.MultiHeadAttention:
    torch.manual_seed(seed)
    return hw.MultiHeadAttention(24, num_heads=HEADS)


def per_query(ids: Tensor | None = None) -> list[hw.Statistic]:
    found: list[hw.Statistic] = [hw.LSE(), hw.Entropy(), hw.MaxLogit(), hw.Distance(spread=True)]
    found += [hw.Mass(hw.Previous()), hw.Mass(hw.First(), name="tensor")]
    return found if ids is None else [*found, hw.Mass(hw.Induction(ids))]


def text(length: int, batch: int = 1, symbols: int = 4) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, symbols, (batch, length))
    return torch.randn(symbols, 24)[ids], ids


def seen_of(
    layer: torch.nn.Module, texts: list[tuple[Tensor, Tensor]], **keywords: object
) -> Watched:
    """Each text watched on its own, with its own ids, and added up."""
    parts = []
    for x, ids in texts:
        with torch.no_grad(), hw.watch(layer, *per_query(ids), **keywords) as seen:  # type: ignore[arg-type]
            layer(x, mask=hw.Causal())
        parts.append(seen)
    return sum(parts[1:], parts[0])


def same(one: Watched, two: Watched) -> None:
    assert one.modules == two.modules
    assert len(one.table()) == len(two.table())
    for a, b in zip(one.table(), two.table(), strict=True):
        assert list(a) == list(b)
        for name in ("layer", "head", "module"):
            assert a.pop(name) == b.pop(name)
        assert a == pytest.approx(b, rel=1e-12, abs=1e-12)


# ── the table ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("running", [False, True])
def test_means_over_calls_count_every_query_alike(running: bool) -> None:
    layer = a_layer()
    texts = [text(5, batch=2), text(9), text(2)]
    seen = seen_of(layer, texts, running=running)
    rows = seen.table()
    assert [(r["module"], r["head"], r["calls"]) for r in rows] == [("", h, 3) for h in range(3)]
    alone = [seen_of(layer, [one]) for one in texts]
    for head, row in enumerate(rows):
        for name, least in (("entropy", 0), ("previous", 1)):
            values = [one[""][name][:, head, least:].flatten() for one in alone]
            assert row[name] == pytest.approx(float(torch.cat(values).mean()), rel=1e-6)
        assert row["max_logit"] == max(float(one[""]["max_logit"][:, head].max()) for one in alone)
        assert row["previous_coverage"] == pytest.approx((2 * 4 + 8 + 1) / (2 * 5 + 9 + 2))


def by_hand(figures: list[tuple[float, int]]) -> float:
    """The standard error over texts, from the mean and the number of queries of each."""
    figures = [(mean, count) for mean, count in figures if count]
    count = sum(n for _, n in figures)
    mean = sum(m * n for m, n in figures) / count
    squares = sum((n * (m - mean)) ** 2 for m, n in figures)
    return math.sqrt(len(figures) / (len(figures) - 1) * squares) / count


@pytest.mark.parametrize("running", [False, True])
def test_standard_errors_over_texts_are_those_of_the_formula(running: bool) -> None:
    layer = a_layer()
    texts = [text(5, batch=2), text(9), text(2, symbols=50), text(12)]
    seen = seen_of(layer, texts, running=running)
    alone = [seen_of(layer, [one]) for one in texts]
    plain, rows = seen.table(), seen.table(texts=True)
    for head, row in enumerate(rows):
        assert row["max_logit"] == plain[head]["max_logit"]
        assert "max_logit_se" not in row
        assert "entropy_se" not in plain[head]
        for name in ("entropy", "lse", "distance", "induction"):
            assert row[name] == plain[head][name]
            figures = []
            for one in alone:
                reading = one[""].calls[0][name]
                assert reading.rows is not None
                values = reading.values[:, head].double()
                for b, kept in enumerate(reading.rows.expand(reading.values.shape)[:, head]):
                    mean = float(values[b][kept].mean()) if kept.any() else 0.0
                    figures.append((mean, int(kept.sum())))
            assert row[f"{name}_se"] == pytest.approx(by_hand(figures), rel=1e-9), name
    # The text of two tokens has no induction target, so it is none of the texts behind that error.
    assert not any(c["induction"].rows.any() for c in alone[2][""].calls)


@pytest.mark.parametrize("running", [False, True])
def test_of_equally_long_texts_it_is_the_deviation_of_their_means(running: bool) -> None:
    seen = Watched(running)
    means = [1.0, 2.0, 4.0, 5.0]
    for mean in means:
        values = torch.full((1, 2, 3), mean) + torch.tensor([-0.5, 0.0, 0.5])
        seen.add("m", {"x": Reading(values, torch.ones(1, 1, 3, dtype=torch.bool))}, heads=2)
    row = seen.table(texts=True)[1]
    assert row["x"] == pytest.approx(3.0)
    deviation = math.sqrt(sum((m - 3) ** 2 for m in means) / 3)
    assert row["x_se"] == pytest.approx(deviation / math.sqrt(4), rel=1e-12)


@pytest.mark.parametrize("running", [False, True])
def test_one_text_has_no_error_and_equal_texts_none_to_speak_of(running: bool) -> None:
    layer, one = a_layer(), text(7)
    assert "entropy_se" not in seen_of(layer, [one], running=running).table(texts=True)[0]
    row = seen_of(layer, [one] * 5, running=running).table(texts=True)[0]
    assert 0 <= row["entropy_se"] < 1e-9 * row["entropy"]


def test_one_number_a_head_has_an_error_over_texts_too() -> None:
    kept, running = Watched(), Watched(running=True)
    for seen in (kept, running):
        for values in ([[1.0, 5.0], [3.0, 5.0]], [[8.0, 5.0]]):
            seen.add("m", {"x": Reading(torch.tensor(values))}, heads=2)
        first, second = seen.table(texts=True)
        assert first["x"] == pytest.approx(4.0)
        assert first["x_se"] == pytest.approx(math.sqrt((9 + 1 + 16) / 2) / math.sqrt(3))
        assert (second["x"], second["x_se"]) == pytest.approx((5.0, 0.0))


def test_pandas_has_the_same_rows() -> None:
    if not in_ci():
        pytest.importorskip("pandas")
    seen = seen_of(a_layer(), [text(5), text(6)])
    for texts in (False, True):
        frame = seen.to_pandas(texts)
        assert list(frame.columns) == list(seen.table(texts)[0])
        assert frame.to_dict("records") == seen.table(texts)


def test_without_pandas_it_says_so() -> None:
    code = (
        "import sys; sys.modules['pandas'] = None\n"
        "from headwise.capture.captured import Watched\n"
        "try: Watched().to_pandas()\n"
        "except ImportError as error: print(error)"
    )
    done = fresh.run(code)
    assert done.stdout.strip() == (
        "seen.to_pandas(): pandas is not installed; run `pip install pandas`, or use seen.table()"
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("running", [False, True])
def test_tables_do_not_depend_on_the_order_of_memory(running: bool, dtype: torch.dtype) -> None:
    """PyTorch sums along the strides, in another order for each unit of the machine."""
    batch, heads, length = 5, HEADS, 67
    values, sums = torch.randn(2, batch, heads, length, dtype=dtype)
    rows = torch.rand(batch, heads, length) > 0.2

    def table(order: tuple[int, int, int]) -> list[dict[str, Any]]:
        def laid(x: Tensor) -> Tensor:
            back = [order.index(axis) for axis in range(3)]
            return x.permute(order).contiguous().permute(back)

        seen = Watched(running)
        for _ in range(2):
            readings = {
                "a": Reading(laid(values), laid(rows), among=laid(rows | (values > 0))),
                "b": Reading(laid(values)[..., 0]),
                "c": Reading(laid(sums).exp(), over=laid(rows.long())),
            }
            seen.add("m", readings, heads)
        maps = seen["m"]["c"] if running else torch.zeros(1)
        return [*seen.table(), *seen.table(texts=True), {"maps": maps.tolist()}]

    for order in itertools.permutations(range(3)):
        assert table(order) == table((0, 1, 2)), order


# ── sums ────────────────────────────────────────────────────────────────────────────────────────


class Pair(torch.nn.Module):
    """Two attention modules, called in an order that the caller chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = a_layer(1), a_layer(2)

    def forward(self, x: Tensor, order: str) -> None:
        for name in order:
            getattr(self, name)(x, mask=hw.Causal())


@pytest.mark.parametrize("running", [False, True])
def test_what_two_have_seen_is_what_one_would_have(running: bool) -> None:
    model, x = Pair(), torch.randn(2, 6, 24)
    statistics = [*per_query(), hw.Received(), hw.Map(3), hw.OffsetHistogram(3)]
    parts = []
    for order in ("b", "ab", "bb"):
        with torch.no_grad(), hw.watch(model, *statistics, running=running) as seen:
            model(x, order)
        parts.append(seen)
    with torch.no_grad(), hw.watch(model, *statistics, running=running) as whole:
        for order in ("b", "ab", "bb"):
            model(x, order)
    before = [copy.deepcopy(part) for part in parts]
    total = sum(parts)
    assert isinstance(total, Watched)
    assert total.modules == ("b", "a")
    same(total, whole)
    same(parts[0] + parts[1] + parts[2], whole)
    same(parts[0] + (parts[1] + parts[2]), whole)
    assert [row["calls"] for row in total.table()] == [4] * 3 + [1] * 3
    for name in ("received", "map", "offsets"):
        torch.testing.assert_close(total["b"][name], whole["b"][name])
    total.add("c", {"x": Reading(torch.zeros(1, 2))}, heads=2)
    for part, old in zip(parts, before, strict=True):
        same(part, old)  # neither operand changes, whatever becomes of the sum


def test_running_sums_are_those_of_one_that_saw_all() -> None:
    layer = a_layer()
    texts = [text(5, batch=2), text(9, batch=2), text(2, batch=2)]
    runs = [hw.Running() for _ in range(4)]
    for number, (x, ids) in enumerate(texts):
        with torch.no_grad(), hw.watch(layer, *per_query(ids), hw.Received()) as seen:
            layer(x, mask=hw.Causal())
        for run in (runs[number], runs[3]):
            run.take(seen[""].calls[0], HEADS)
    total = sum(runs[:3])
    assert isinstance(total, hw.Running)
    assert total.calls == 3
    for texts_too in (False, True):
        rows = zip(total.table(texts_too), runs[3].table(texts_too), strict=True)
        assert all(row == pytest.approx(want, rel=1e-10) for row, want in rows)
    for name in ("entropy", "induction"):
        for figure in ("deviation", "maximum", "count"):
            got, want = (getattr(run, figure)(name) for run in (total, runs[3]))
            torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(total["received"], runs[3]["received"])
    assert runs[0].calls == 1
    assert (runs[0] + hw.Running()).table() == runs[0].table() == (hw.Running() + runs[0]).table()


@pytest.mark.parametrize("running", [False, True])
def test_nothing_adds_nothing(running: bool) -> None:
    seen, nothing = seen_of(a_layer(), [text(5)], running=running), Watched()
    for total in (seen + nothing, nothing + seen, sum([seen]), sum([nothing, seen, nothing])):
        assert isinstance(total, Watched)
        same(total, seen)
    with pytest.raises(ValueError, match="no attention was seen"):
        (nothing + nothing).table()
    with pytest.raises(TypeError):
        seen + 1  # type: ignore[operator]


def readings(**values: Tensor) -> dict[str, Reading]:
    return {name: Reading(x, torch.ones(1, 1, x.shape[2]).bool()) for name, x in values.items()}


@pytest.mark.parametrize("running", [False, True])
def test_what_does_not_add_up_is_refused(running: bool) -> None:
    one = Watched(running)
    one.add("m", readings(x=torch.zeros(1, 2, 3), y=torch.zeros(1, 2, 3)), heads=2)
    for given, heads in [
        (readings(x=torch.zeros(1, 2, 3)), 2),
        (readings(x=torch.zeros(1, 2, 3), z=torch.zeros(1, 2, 3)), 2),
        (readings(x=torch.zeros(1, 4, 3), y=torch.zeros(1, 4, 3)), 4),
    ]:
        other = Watched(running)
        other.add("m", given, heads)
        own = rf"'m': {', '.join(given)} of {heads} heads"
        says = f"{own} cannot be combined with the earlier x, y of 2 heads"
        for join in (lambda: one + other, lambda: one.add("m", given, heads)):  # noqa: B023
            with pytest.raises(ValueError, match=says):
                join()
        assert one.table()[0]["calls"] == 1
    other = Watched(not running)
    other.add("m", readings(x=torch.zeros(1, 2, 3), y=torch.zeros(1, 2, 3)), heads=2)
    with pytest.raises(ValueError, match="one was watched with running=True"):
        one + other
    elsewhere = Watched(running)
    elsewhere.add("n", readings(z=torch.zeros(1, 4, 3)), heads=4)
    assert (one + elsewhere).modules == ("m", "n")  # another module may have other statistics


def test_running_sums_that_do_not_add_up_are_refused() -> None:
    def run(**given: Reading) -> hw.Running:
        running = hw.Running()
        running.take(given, heads=2)
        return running

    rows = torch.ones(1, 1, 3).bool()
    one = run(x=Reading(torch.zeros(1, 2, 3), rows))
    with pytest.raises(ValueError, match="x of 2 heads and y of 2 heads do not add up"):
        one + run(y=Reading(torch.zeros(1, 2, 3), rows))
    with pytest.raises(ValueError, match="'x' is not the same metric in both"):
        one + run(x=Reading(torch.zeros(1, 2), largest=True))
    keys = run(x=Reading(torch.zeros(1, 2, 3), per_key=True))
    with pytest.raises(ValueError, match="batches of 1 and 4 do not add up"):
        keys + run(x=Reading(torch.zeros(4, 2, 3), per_key=True))
    small, large = (
        run(x=Reading(torch.zeros(1, 2, n, n), over=torch.ones(1, 2, n, 1))) for n in (2, 3)
    )
    with pytest.raises(ValueError, match=r"'x' is \[2, 3, 3\] for each batch row"):
        small + large


# ── files ───────────────────────────────────────────────────────────────────────────────────────


def equal(one: object, two: object) -> bool:
    if isinstance(one, Tensor) and isinstance(two, Tensor):
        alike = one.dtype == two.dtype and one.shape == two.shape
        bits = [x.contiguous().flatten().view(torch.uint8) for x in (one, two)]
        return alike and torch.equal(*bits)
    if isinstance(one, dict) and isinstance(two, dict):
        return list(one) == list(two) and all(equal(one[key], two[key]) for key in one)
    if isinstance(one, list) and isinstance(two, list):
        return len(one) == len(two) and all(equal(a, b) for a, b in zip(one, two, strict=True))
    return type(one) is type(two) and one == two


def states(seen: Watched) -> list[object]:
    return [seen[name].state() for name in seen.modules]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("queries", [None, 3])
@pytest.mark.parametrize("running", [False, True])
def test_a_file_gives_back_every_bit(
    tmp_path: Path, running: bool, queries: int | None, dtype: torch.dtype
) -> None:
    model = Pair().to(dtype)
    statistics = [*per_query(), hw.TopKeys(2), hw.Received(), hw.Map(3), hw.Similarity()]
    with torch.no_grad(), hw.watch(model, *statistics, running=running, queries=queries) as seen:
        model(torch.randn(2, 6, 24, dtype=dtype), "ab")
        model(torch.randn(2, 6, 24, dtype=dtype), "a")
    seen.save(tmp_path / "seen")
    again = Watched.load(str(tmp_path / "seen"))
    assert again.modules == seen.modules
    assert equal(states(again), states(seen))
    assert again.table() == seen.table()
    if queries is not None:
        assert again.table()[0]["distance_spread_se"] > 0
    same(again + seen, seen + seen)
    assert [path.name for path in tmp_path.iterdir()] == ["seen"]


def test_views_infinities_and_empty_tensors_are_kept(tmp_path: Path) -> None:
    seen, rows = Watched(), torch.ones(1, 1, 1, dtype=torch.bool).expand(1, 2, 3)
    values = torch.tensor([-math.inf, 0.0, math.nan]).expand(1, 2, 3)
    whole = torch.randn(2, 2, 3)
    seen.add("", {"tensor": Reading(values, rows), "": Reading(whole[:1], rows)}, heads=2)
    seen.add("", {"tensor": Reading(values[..., :0], rows[..., :0]), "": Reading(whole)}, heads=2)
    seen.save(tmp_path / "seen")
    assert equal(states(Watched.load(tmp_path / "seen")), states(seen))
    Watched().save(tmp_path / "nothing")
    with pytest.raises(ValueError, match="no attention was seen"):
        Watched.load(tmp_path / "nothing").table()


def test_a_file_appears_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import safetensors.torch

    path = tmp_path / "seen"
    seen_of(a_layer(), [text(5)]).save(path)
    before = path.read_bytes()

    def half(tensors: object, name: Path, metadata: object) -> None:
        name.write_bytes(b"half")
        raise OSError("the disk is full")

    monkeypatch.setattr(safetensors.torch, "save_file", half)
    with pytest.raises(OSError, match="disk is full"):
        seen_of(a_layer(), [text(6)]).save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_too_many_calls_for_a_file_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seen_file, "LONGEST_HEADER", 900)
    with pytest.raises(ValueError, match="tensors are more than one safetensors file can list"):
        seen_of(a_layer(), [text(5)]).save(tmp_path / "seen")
    assert not list(tmp_path.iterdir())


def test_other_files_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    path = tmp_path / "seen"
    with pytest.raises(FileNotFoundError, match="there is no such file"):
        Watched.load(path)
    with pytest.raises(IsADirectoryError, match=f"^{re.escape(str(tmp_path))}: is a folder"):
        Watched.load(tmp_path)
    path.write_text("layer,head\n")
    with pytest.raises(ValueError, match="not a safetensors file, or damaged"):
        Watched.load(path)
    save_file({"weight": torch.zeros(2)}, path)
    with pytest.raises(ValueError, match="was not written by save"):
        Watched.load(path)
    header = {"format": "headwise.seen", "version": "9", "content": "{}"}
    save_file({"weight": torch.zeros(2)}, path, metadata=header)
    with pytest.raises(ValueError, match="has version 9, but this headwise reads 1"):
        Watched.load(path)


def test_files_that_have_no_place_are_refused(tmp_path: Path) -> None:
    seen, missing = seen_of(a_layer(), [text(5)]), tmp_path / "missing"
    with pytest.raises(FileNotFoundError, match=f"there is no folder {re.escape(str(missing))}"):
        seen.save(missing / "seen")
    with pytest.raises(
        IsADirectoryError, match=f"^{re.escape(str(tmp_path))} is a directory; name"
    ):
        seen.save(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("running", [False, True])
def test_damage_is_one_error_wherever_it_is(tmp_path: Path, running: bool) -> None:
    from safetensors import safe_open
    from safetensors.torch import save_file

    path = tmp_path / "seen"
    seen_of(a_layer(), [text(5)], running=running).save(path)
    whole = path.read_bytes()
    for size in (0, 7, 8, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="damaged"):
            Watched.load(path)
    path.write_bytes(whole)
    with safe_open(path, framework="pt") as file:
        header = dict(file.metadata())
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    content = json.loads(header["content"])

    def refused(content: object) -> None:
        changed = header | {"content": json.dumps(content)}
        save_file(tensors, path, metadata=changed)
        with pytest.raises(ValueError, match="its header is damaged"):
            Watched.load(path)

    module = content["modules"][0]
    for broken in [[], {}, {"running": running}, {"running": running, "modules": [1]}]:
        refused(broken)
    for change in [{"heads": 2}, {"heads": "x"}, {"calls": 3}, {"running": 3}, {"running": {}}]:
        if not running or "calls" not in change:
            refused(content | {"modules": [module | change]})
    refused(content | {"modules": [{k: v for k, v in module.items() if k != "name"}]})
    refused(json.loads(header["content"].replace('{"tensor": 0}', '{"tensor": 10000}')))
    refused(json.loads(header["content"].replace('{"tensor": 0}', "5")))
    wrong = header | {"content": header["content"][:-1]}
    save_file(tensors, path, metadata=wrong)
    with pytest.raises(ValueError, match="its header is damaged"):
        Watched.load(path)


def test_graphs_do_not_follow_into_a_file(tmp_path: Path) -> None:
    layer = a_layer()
    with hw.watch(layer, hw.Entropy(), gradients=True) as seen:
        layer(torch.randn(1, 5, 24), mask=hw.Causal())
    assert seen[""]["entropy"].requires_grad
    seen.save(tmp_path / "seen")
    assert not Watched.load(tmp_path / "seen")[""]["entropy"].requires_grad


# ── nothing seen ────────────────────────────────────────────────────────────────────────────────


def test_an_empty_one_says_why() -> None:
    for ask in (lambda s: s.table(), lambda s: s["a"], lambda s: s.table(texts=True)):
        with pytest.raises(ValueError, match="seen: the model was not called while it was watched"):
            ask(Watched())
        with pytest.raises(ValueError, match="no attention was seen: it was asleep"):
            ask(Watched(why=lambda: "it was asleep"))
    assert Watched().modules == ()
    seen = seen_of(a_layer(), [text(5)])
    with pytest.raises(KeyError, match="'a' was not seen; there are: "):
        seen["a"]
    with pytest.raises(KeyError, match="'sink' was not observed in ''; there are: lse, entropy"):
        seen[""]["sink"]


def test_it_is_a_collection_of_modules() -> None:
    model = Pair()
    with hw.watch(model, hw.Entropy()) as seen:
        model(torch.randn(1, 5, 24), "bab")
    assert list(seen) == ["b", "a"]
    assert ("a" in seen, "c" in seen, len(seen), len(Watched())) == (True, False, 2, 0)
    assert repr(seen) == f"<Watched: 2 modules, {2 * HEADS} heads; entropy, entropy_share>"
    assert repr(Watched()) == "<Watched: 0 modules, 0 heads; no figures>"


@pytest.mark.parametrize("modules", ["foo.*", ["foo", "bar"], lambda name: False])
def test_modules_that_leave_out_all_that_attended_are_named(modules: Any) -> None:
    model = Pair()
    with hw.watch(model, hw.Entropy(), modules=modules) as seen:
        model(torch.randn(1, 5, 24), "ab")
        said = r"was seen: modules=(foo|'foo\.\*'|\['foo'.*|<lambda>) left out all that "
        with pytest.raises(ValueError, match=rf"{said}attended: a, b$"):
            seen.table()
    with pytest.raises(ValueError, match=rf"{said}attended: a, b$"):
        seen.table()


def test_modules_may_be_several_patterns(unchecked: None) -> None:
    model = Pair()
    with hw.watch(model, hw.Entropy(), modules=["c*", "b"]) as seen:
        model(torch.randn(1, 5, 24), "ab")
    assert seen.modules == ("b",)
    for given in (model.a, -3, 1.5, [model.a], hw.MultiHeadAttention):
        with pytest.raises(ValueError, match="give names such as 'encoder"):
            hw.watch(model, hw.Entropy(), modules=given).__enter__()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("statistics", "queries", "message"),
    [
        ([hw.Entropy(), hw.LSE(), hw.Entropy()], None, "'entropy' is requested twice"),
        ([hw.Mass(hw.Window(3)), hw.Mass(hw.Window(5))], None, "'mass' is requested twice.*name=…"),
        ([hw.LSE()], 0, "queries=0: at least one"),
        ([hw.LSE()], -1, "queries=-1: at least one"),
        ([hw.LSE()], 2.5, "queries=2.5: give a whole number"),
        ([hw.LSE()], True, "queries=True: give a whole number"),
        ([hw.LSE()], [], r"queries=\[\]: give a whole number"),
        ([hw.LSE()], [3, 5, 3], "a query is listed twice"),
        ([hw.LSE()], torch.ones(3, dtype=torch.bool), "give a whole number"),
    ],
)
def test_what_no_call_could_give_is_refused_before_the_model_runs(
    unchecked: None, statistics: list[hw.Statistic], queries: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message) as fault:
        hw.watch(a_layer(), *statistics, queries=queries).__enter__()
    assert "modules=" not in str(fault.value)


@pytest.mark.parametrize("keys", ["previous", hw.Previous, hw.Window, torch.ones(3), 1, None])
def test_masses_of_no_pattern_are_refused(unchecked: None, keys: Any) -> None:
    with pytest.raises(ValueError, match=r"Mass\(.*\): keys must be a pattern or a mask, such as"):
        hw.Mass(keys)


@pytest.mark.parametrize("pattern", [hw.Induction, hw.SameToken])
@pytest.mark.parametrize("ids", [[5, 6], torch.ones(5), torch.ones(5).bool(), "a text"])
def test_patterns_of_no_tokens_are_refused(unchecked: None, pattern: Any, ids: Any) -> None:
    with pytest.raises(ValueError, match=rf"{pattern.__name__}\(.*\): ids must be a tensor of"):
        pattern(ids)


def test_it_can_be_sent_to_another_process() -> None:
    seen = seen_of(a_layer(), [text(5)])
    assert equal(states(pickle.loads(pickle.dumps(seen))), states(seen))
    empty = pickle.loads(pickle.dumps(Watched(why=lambda: "of the model")))
    with pytest.raises(ValueError, match="was not called"):
        empty.table()


def test_calls_of_different_lengths_are_no_one_tensor() -> None:
    seen = seen_of(a_layer(), [text(5), text(6)])
    with pytest.raises(ValueError, match="called with different lengths, so 'entropy' is no one"):
        seen[""]["entropy"]
    both = seen_of(a_layer(), [text(5), text(5, batch=2)])
    assert both[""]["entropy"].shape == (3, HEADS, 5)


# ── transforms ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", ["fused", "by hand", "own", "torch"])
@pytest.mark.parametrize("how", ["vmap", "jacrev", "jvp", "grad"])
def test_transforms_are_refused_by_name(how: str, kind: str) -> None:
    model, x, func = Model(kind), torch.randn(2, 5, 6), torch.func
    asked: dict[str, Any] = {
        "vmap": lambda: func.vmap(model)(x[None]),
        "jacrev": lambda: func.jacrev(model)(x),
        "jvp": lambda: func.jvp(model, (x,), (x,)),
        "grad": lambda: func.grad(lambda x: model(x).sum())(x),
    }
    math = sdpa_kernel(SDPBackend.MATH)  # PyTorch's other ones have no forward derivative
    with math, hw.watch(model, hw.Entropy()) as seen:
        with pytest.raises(ValueError, match=r"'attn' runs inside a transform of torch\.func"):
            asked[how]()
        model(x)
    assert seen.table()[0]["calls"] == 1


class Model(torch.nn.Module):
    """Attention of any kind, without positions."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.attn = kind, torch.nn.Identity()
        if kind == "own":
            self.attn = hw.MultiHeadAttention(6, HEADS)
        elif kind == "torch":
            self.attn = torch.nn.MultiheadAttention(6, HEADS, batch_first=True)
        else:
            self.attn = Plain(kind == "fused")

    def forward(self, x: Tensor) -> Tensor:
        return self.attn(x, x, x)[0] if self.kind == "torch" else self.attn(x)


class Plain(torch.nn.Module):
    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.fused = fused

    def forward(self, x: Tensor) -> Tensor:
        split = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        if self.fused:
            return torch.nn.functional.scaled_dot_product_attention(split, split, split)
        return (split @ split.mT).softmax(-1) @ split


@pytest.mark.parametrize("running", [False, True])
@pytest.mark.parametrize("texts", ["entropy", 1, None])
def test_a_name_is_not_taken_for_a_flag(running: bool, texts: Any) -> None:
    layer = hw.MultiHeadAttention(24, 3)
    with hw.watch(layer, hw.Entropy(), running=running) as seen:
        layer(torch.randn(2, 5, 24))
    tables = [seen.table, seen.to_pandas, seen[""].table]
    if running:
        tables.append(seen[""].running.table)
    for table in tables:
        with pytest.raises(ValueError, match=r"texts must be True or False, got .* every stat"):
            table(texts)


@pytest.mark.parametrize("name", ["y.csv", "y.json", "y.PT"])
def test_a_file_is_not_named_as_one_of_another_format(tmp_path: Path, name: str) -> None:
    layer = hw.MultiHeadAttention(24, 3)
    with hw.watch(layer, hw.Entropy()) as seen:
        layer(torch.randn(2, 5, 24))
    with pytest.raises(ValueError, match=r"name it 'y\.safetensors', or write a table by"):
        seen.save(tmp_path / name)
    assert not list(tmp_path.iterdir())
    for fine in ("y", "y.safetensors", "lr0.01"):
        seen.save(tmp_path / fine)
        assert hw.capture.Watched.load(tmp_path / fine).table() == seen.table()


def test_a_table_takes_one_copy_to_the_host_for_metrics_of_a_kind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layers = torch.nn.Sequential(*(hw.MultiHeadAttention(24, num_heads=3) for _ in range(4)))
    statistics = (hw.Entropy(), hw.Mass(hw.First()), hw.Mass(hw.Previous()), hw.Distance())
    with hw.watch(layers, *statistics) as seen:
        layers(torch.randn(2, 7, 24))
    copies, cpu = [], Tensor.cpu
    monkeypatch.setattr(Tensor, "cpu", lambda x: copies.append(x) or cpu(x))
    rows = seen.table()
    assert len(rows) == 12
    assert len(copies) == 2  # of metrics that have a coverage, and of others
    monkeypatch.undo()
    assert rows == [row for name in seen for row in seen[name].table()]

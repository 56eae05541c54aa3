"""Trainings over ranks, by rows, heads or both: steps, figures and clipping of one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import headwise as hw
from headwise.telemetry import monitor, ranks
from models import E, apart, batch, gpt, loss_of, pair, twins, whole_of

pytestmark = pytest.mark.ranks

LIMIT = 2.0
ROWS = 2


def by_rows(model: Any, mesh: DeviceMesh) -> Any:
    """FSDP2, a group of parameters for each block."""
    for block in model.transformer.h:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def laid(kind: str, mesh: DeviceMesh, dtype: torch.dtype, **sizes: Any) -> tuple[Any, Any, int]:
    """A model alone, the same over ranks, and which of the rows this rank has."""
    number = mesh.get_local_rank()
    whole, parts = twins(lambda: gpt(**sizes), dtype)
    if kind == "rows":
        return whole, by_rows(parts, mesh), number
    if kind == "heads":
        return whole, parallelize_module(parts, mesh, hw.parallel.plan(parts)), 0
    both = init_device_mesh("cpu", (mesh.size() // 2, 2), mesh_dim_names=("rows", "heads"))
    parts = parallelize_module(parts, both["heads"], hw.parallel.plan(parts))
    return whole, by_rows(parts, both["rows"]), both["rows"].get_local_rank()


def groups_of(kind: str, ranks: int) -> int:
    """Over how many ranks the rows are."""
    return {"rows": ranks, "heads": 1, "both": ranks // 2}[kind]


@contextmanager
def alone() -> Iterator[None]:
    """Here a monitor knows of no other rank."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (ranks, monitor):
            patch.setattr(module, "several", lambda: False)
        yield


def trained(model: nn.Module, batches: list[list[Tensor]], **settings: Any) -> tuple[Any, Any]:
    """Train on some rows at each step; the monitor, and what it found at each step."""
    optimizer, found = torch.optim.AdamW(model.parameters(), 1e-2), []
    seeing = hw.Monitor(model, optimizer, every=1, queries=None, rules=(), **settings)
    for step in batches:
        for ids in step:
            (loss_of(model, ids) / len(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(seeing.latest)
    seeing.close()
    return seeing, found


def check_steps(mesh: DeviceMesh, kind: str, clip: float | None) -> None:
    """Weights and figures of three steps are those of one process with the rows of all ranks."""
    sizes = {"n_embd": 18, "n_head": 3} if kind == "rows" else {}
    whole, parts, own = laid(kind, mesh, torch.float64, **sizes)
    groups = groups_of(kind, mesh.size())
    every = [[batch(10 * step + group) for group in range(groups)] for step in range(3)]
    with alone():
        right, wanted = trained(whole, every, clip=clip)
    other, found = trained(parts, [[step[own]] for step in every], clip=clip)
    assert apart(whole, parts) < (1e-8 if clip is None else 1e-6)  # maxima are in float32
    assert other.layers == right.layers
    for one, two in zip(wanted, found, strict=True):
        assert list(one) == list(two)
        for name, figures in one.items():
            same = two[name]
            rows = slice(None) if same.kind == "maximum" else slice(0, 3)
            torch.testing.assert_close(
                torch.tensor(same.data[rows]),
                torch.tensor(figures.data[rows]),
                rtol=1e-6,
                atol=1e-9,
            )
            assert (same.queries, same.of_queries) == (figures.queries, figures.of_queries)


def check_watching(mesh: DeviceMesh, kind: str) -> None:
    """Each rank's table is the one process's, of the rows and heads that the rank has."""
    whole, parts, own = laid(kind, mesh, torch.float64)
    statistics = (hw.Entropy(), hw.MaxLogit(), hw.Mass(hw.Previous()), hw.OutputNorm())
    tables = []
    for model in (whole, parts):
        with hw.watch(model, *statistics) as seen:
            model(batch(own))
        tables.append(seen.table())
    heads = {(row["layer"], row["head"]): row for row in tables[0]}
    for row in tables[1]:
        assert row == pytest.approx(heads[row["layer"], row["head"]], abs=1e-9)
    assert len(tables[1]) == len(heads) // {"rows": 1, "heads": mesh.size(), "both": 2}[kind]


def check_float32(mesh: DeviceMesh, kind: str) -> None:
    """Rounding of the logits is at most four times that of one process."""
    exact, _, _ = laid(kind, mesh, torch.float64)
    whole, parts, own = laid(kind, mesh, torch.float32)
    exact.load_state_dict({n: x.double() for n, x in whole.state_dict().items()})
    right = exact(batch(own))
    one, several = ((model(batch(own)) - right).abs().max() for model in (whole, parts))
    assert float(several) <= 4 * float(one)


class Sometimes(nn.Module):
    """Two layers, of which a call reaches what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = hw.MultiHeadAttention(E, 4), hw.MultiHeadAttention(E, 3)

    def forward(self, x: Tensor, reached: str) -> Tensor:
        for name in reached.split():
            x = x + self.get_submodule(name)(x, mask=hw.Causal())
        return x


def check_uneven(mesh: DeviceMesh) -> None:
    """Ranks that reach a layer late or never, or no layer at all, lose and add nothing."""
    model, same = twins(Sometimes, torch.float64)
    reached = [["low", ""], ["low", "low high"], ["", ""], ["low high", "high"]]
    settings: dict[str, Any] = {"every": 1, "queries": None, "clip": LIMIT, "rules": ()}

    def run(one: Any, numbers: list[int]) -> tuple[Any, list[Any]]:
        optimizer, found = torch.optim.SGD(one.parameters(), 0.0), []
        seeing = hw.Monitor(one, optimizer, **settings)
        for step, by_rank in enumerate(reached):
            for number in numbers:
                drawn = torch.Generator().manual_seed(10 * step + number)
                x = 3 * torch.randn(2, 7, E, generator=drawn, dtype=torch.float64)
                if name := by_rank[min(number, 1)]:
                    one(x, name).square().sum().backward()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                optimizer.step()
            found.append(dict(seeing.latest))
        seeing.close()
        return seeing, found

    with alone():
        right, wanted = run(model, list(range(mesh.size())))
    other, found = run(same, [mesh.get_local_rank()])
    assert apart(model, same) < 1e-6
    assert dict(right.layers) == dict(other.layers)
    for one, two in zip(wanted, found, strict=True):
        assert one.keys() == two.keys()
        for name in one:
            a, b = (torch.tensor(x[name].values) for x in (one, two))
            torch.testing.assert_close(b, a, rtol=1e-6, atol=1e-9, equal_nan=True)


def check_lacking(mesh: DeviceMesh) -> None:
    """A rank without a monitor is named, and the others train on without figures."""
    if mesh.get_local_rank() == 1:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "PATIENCE", timedelta(seconds=1))
        model = hw.MultiHeadAttention(E, 4)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        seeing = hw.Monitor(model, optimizer, every=1)
        model(torch.randn(2, 7, E)).square().mean().backward()
        with pytest.warns(UserWarning, match="rank 1 has no monitor; metrics cover all ranks"):
            optimizer.step()
        model(torch.randn(2, 7, E)).square().mean().backward()
        optimizer.step()
        assert seeing.steps == 2
        seeing.close()
        clipping = hw.Monitor(model, optimizer, every=9, clip=1.0)
        model(torch.randn(2, 7, E)).square().mean().backward()
        with pytest.raises(ValueError, match="rank 1 has no monitor; metrics cover all ranks"):
            optimizer.step()
        clipping.close()


def check_clipping(mesh: DeviceMesh) -> None:
    """Weights over ranks take the factors of one process, under both rules."""
    layers: dict[str, Callable[[], nn.Module]] = {
        "plain": lambda: hw.MultiHeadAttention(E, 4),
        "grouped": lambda: hw.MultiHeadAttention(E, 8, num_kv_heads=4, head_dim=3),
        "one key": lambda: hw.MultiHeadAttention(E, 4, num_kv_heads=1),
        "context": lambda: hw.MultiHeadAttention(E, 4, kv_dim=10, bias=False),
        "gpt2": lambda: gpt().transformer.h[0].attn,
    }
    for name, make in layers.items():
        for rule in ("query", "both"):
            whole, parts = pair(make, mesh, torch.float64)
            given = [torch.randn(2, 7, E, dtype=torch.float64)]
            if name == "context":
                given.append(torch.randn(2, 5, 10, dtype=torch.float64))
            with hw.watch(whole, hw.MaxLogit()) as seen, hw.watch(parts, hw.MaxLogit()) as own:
                whole(*given), parts(*given)
            one = hw.qk_clip_(whole, seen, limit=LIMIT, rule=rule)
            assert bool((one[""] < 1).any())
            if parts.num_heads < whole.num_heads:
                with pytest.raises(ValueError, match=r"hw\.parallel\.largest_logits\(seen\)"):
                    hw.qk_clip_(parts, own, limit=LIMIT, rule=rule)
            every = hw.parallel.largest_logits(own, LIMIT)
            two = hw.qk_clip_(parts, every, limit=LIMIT, rule=rule)
            torch.testing.assert_close(two[""], one[""])
            assert apart(whole, parts) < 1e-12, (name, rule)
            for parameter in parts.parameters():  # what ranks have alike stays alike
                alike_on_all(parameter, mesh)

    _, parts = pair(
        lambda: hw.MultiHeadAttention(E, 4, bias=(True, True, False)), mesh, torch.float64
    )
    with pytest.raises(ValueError, match="a bias of only some of q, k and v"):
        hw.qk_clip_(parts, {"": torch.ones(4)})


def alike_on_all(parameter: Any, mesh: DeviceMesh) -> None:
    if any(place.is_shard() for place in parameter.placements):
        return
    here = parameter.to_local().detach()
    most, least = here.clone(), here.clone()
    torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
    torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN)
    assert torch.equal(most, least)


class Theirs(nn.Module):
    """A layer as others write it: its projections, `num_heads`, and PyTorch's attention."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(E, E) for _ in range(3))
        self.o_proj = nn.Linear(E, E)

    def forward(self, x: Tensor) -> Tensor:
        parts = (part(x).unflatten(-1, (-1, 6)) for part in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (part.transpose(1, 2) for part in parts)
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


def check_others(mesh: DeviceMesh) -> None:
    """Layers that PyTorch's styles lay over ranks: numbers of heads, figures and clipping."""
    whole, parts = twins(Theirs, torch.float64)
    styles = dict.fromkeys(("q_proj", "k_proj", "v_proj"), ColwiseParallel())
    parts = parallelize_module(parts, mesh, {**styles, "o_proj": RowwiseParallel()})
    x, here = torch.randn(2, 7, E, dtype=torch.float64), 4 // mesh.size()
    with hw.watch(whole, hw.Entropy(), hw.MaxLogit()) as seen:
        right = whole(x)
    with hw.watch(parts, hw.Entropy(), hw.MaxLogit()) as own:
        found = parts(x)
    assert torch.allclose(right, found)
    first = here * mesh.get_local_rank()
    wanted = seen.table()[first : first + here]
    for row, right_row in zip(own.table(), wanted, strict=True):
        assert row == pytest.approx(right_row, abs=1e-10)
    optimizer = torch.optim.SGD(parts.parameters(), 0.0)
    with hw.Monitor(parts, optimizer, every=1, queries=None) as seeing:
        parts(x).sum().backward()
        optimizer.step()
    for name in ("entropy", "max_logit"):
        rows = [row[name] for row in seen.table()]
        assert seeing.latest[name].values.tolist() == pytest.approx(rows, abs=1e-9)
    hw.qk_clip_(whole, seen, limit=LIMIT, rule="both")
    with pytest.raises(ValueError, match=r"hw\.parallel\.largest_logits\(seen\)"):
        hw.qk_clip_(parts, own, limit=LIMIT)
    hw.qk_clip_(parts, hw.parallel.largest_logits(own, LIMIT), limit=LIMIT, rule="both")
    assert apart(whole, parts) < 1e-12


def check_ablation(mesh: DeviceMesh) -> None:
    """Heads are taken out by their numbers in the layer, wherever they are."""
    whole, parts = twins(gpt, torch.float64)
    parts = parallelize_module(parts, mesh, hw.parallel.plan(parts))
    for model in (whole, parts):
        model.eval()
    name, ids = "transformer.h.1.attn", batch(2)
    for how in ("zero", "mean"):
        found = []
        for model in (whole, parts):
            with torch.no_grad(), hw.ablate(model, {name: [0, 3]}, how):
                found.append(model(ids))
        assert torch.allclose(*found, atol=1e-10)
    scans = [hw.ablation_scan(model, loss_of, [ids]).table() for model in (whole, parts)]
    for row, right in zip(scans[1], scans[0], strict=True):
        assert row == pytest.approx(right, abs=1e-9)
    with pytest.raises(ValueError, match=r"of the 4 heads of .* are on this rank"):
        hw.importance(parts, loss_of, [ids])


def check_slices(mesh: DeviceMesh) -> None:
    """Why factors multiply whole parameters: an assignment to a slice may do nothing at all."""
    _, parts = pair(lambda: hw.MultiHeadAttention(E, 4), mesh, torch.float64)
    weight = parts.qkv.q
    before = whole_of(weight).clone()
    hw.qk_clip_(parts, {"": torch.tensor([4.0, 0.0, 0.0, 8.0])}, limit=LIMIT)
    after = whole_of(weight)
    rows = torch.tensor([0.5, 1.0, 1.0, 0.25]).repeat_interleave(E // 4)[:, None]
    assert torch.equal(after, before * rows)


def check_compiled(mesh: DeviceMesh, how: str) -> None:
    """Compiled models have the figures of the same ones as they are written."""

    def made(compiled: bool) -> Any:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model: Any = gpt()
        if how == "blocks in FSDP2":
            for block in model.transformer.h if compiled else ():
                block.compile(backend="aot_eager")
            return by_rows(model, mesh)
        if compiled and how == "inside DDP":
            model = torch.compile(model, backend="aot_eager")
        model = nn.parallel.DistributedDataParallel(model)
        around = compiled and how == "around DDP"
        return torch.compile(model, backend="aot_eager") if around else model

    steps = [[batch(10 * step + mesh.get_local_rank())] for step in range(3)]
    right, wanted = trained(made(False), steps)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    other, found = trained(made(True), steps)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > before
    assert other.layers == right.layers
    assert not other.unavailable
    for one, two in zip(wanted, found, strict=True):
        assert list(one) == list(two)
        for name, figures in one.items():
            same, right_one = torch.tensor(two[name].values), torch.tensor(figures.values)
            torch.testing.assert_close(same, right_one, rtol=1e-4, atol=1e-5)


CHECKS: dict[str, Callable[[DeviceMesh], None]] = {
    **{
        f"steps, {kind}, {'clipped' if clip else 'free'}": partial(
            check_steps, kind=kind, clip=clip
        )
        for kind in ("rows", "heads", "both")
        for clip in (None, LIMIT)
    },
    **{f"watching, {k}": partial(check_watching, kind=k) for k in ("rows", "heads", "both")},
    **{f"float32, {k}": partial(check_float32, kind=k) for k in ("rows", "both")},
    **{
        f"compiled, {how}": partial(check_compiled, how=how)
        for how in ("inside DDP", "around DDP", "blocks in FSDP2")
    },
    "uneven": check_uneven,
    "clipping": check_clipping,
    "slices": check_slices,
    "others": check_others,
    "ablation": check_ablation,
    "lacking": check_lacking,  # the last: ranks have made different numbers of monitors after it
}


@pytest.mark.parametrize("name", CHECKS)
def test_over_ranks(name: str, told: dict[str, str]) -> None:
    assert not told[name], told[name]

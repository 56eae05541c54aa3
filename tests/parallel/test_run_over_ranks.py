"""Several ranks train the steps of one process, and what they save goes on with any number."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from moved import Moved
from safetensors.torch import load_file
from torch import Tensor
from worlds import gloo, values

from headwise.models import checkpoint
from headwise.models.checkpoint import CHECKPOINT
from headwise.models.gpt import FolderError, load
from headwise.models.run import Run, TrainConfig, TrainingRanks
from headwise.models.training import train

pytestmark = pytest.mark.ranks

# Rows that no number of ranks divides, and a width with shards of unequal size.
TINY = TrainConfig(
    context=13, layers=2, heads=3, width=15, vocab=263, steps=7, batch=7, warmup=3, lr=0.01
)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"{n} times {n} is {n * n}\n" for n in range(150)))
    return str(path)


def ranks_of(how: str | None) -> TrainingRanks:
    if how is None:
        return TrainingRanks()
    from headwise.parallel.training import DataParallelRanks

    gloo()
    return DataParallelRanks(how)


def three_steps(how: str | None, config: TrainConfig) -> list[dict[str, Any]]:
    """`steps_in` float64 and float32."""
    ranks, before = ranks_of(how), torch.get_default_dtype()
    try:
        return [steps_in(dtype, config, ranks) for dtype in (torch.float64, torch.float32)]
    finally:
        torch.set_default_dtype(before)


def steps_in(dtype: torch.dtype, config: TrainConfig, ranks: TrainingRanks) -> dict[str, Any]:
    """Losses, weights and evaluations of three steps, from weights that float32 holds exactly."""
    torch.set_default_dtype(dtype)
    run = Run(config, ranks=ranks)
    losses = [run.advance() for _ in range(3)]
    held_out, repeats = run.held_out_loss(), run.repeat_losses()
    whole = ranks.full_model(run.model)
    weights = {n: p.detach().double().numpy() for n, p in whole.named_parameters()}
    given = {"losses": losses, "held_out": held_out, "repeats": repeats, "weights": weights}
    return given | {"finite": run.finite()}


def flat(given: dict[str, Any]) -> Tensor:
    return torch.cat([torch.from_numpy(one).flatten() for one in given["weights"].values()])


def numbers(given: dict[str, Any]) -> Tensor:
    read = [*given["losses"], given["held_out"], *given["repeats"]]
    return torch.tensor(read, dtype=torch.float64)


@pytest.mark.parametrize(("how", "size"), [("ddp", 2), ("fsdp", 2), ("fsdp", 4)])
def test_three_steps_are_those_of_one_process(text: str, how: str, size: int) -> None:
    config = replace(TINY, texts=(text,))
    exact, alone = three_steps(None, config)
    for ours, rounded in values(size, three_steps, how, config):
        assert ours["finite"]
        assert ours["weights"].keys() == exact["weights"].keys()
        torch.testing.assert_close(flat(ours), flat(exact), atol=1e-6, rtol=0)
        torch.testing.assert_close(numbers(ours), numbers(exact), atol=1e-6, rtol=0)
        # Adam turns rounding of gradients near 0 into whole steps, here and there: not the largest.
        for pick in (flat, numbers):
            wrong, allowed = ((pick(x) - pick(exact)).norm() for x in (rounded, alone))
            assert wrong <= 4 * allowed + 1e-7 * pick(exact).norm()


def trained(how: str | None, folder: str, config: TrainConfig | None, stop: int | None) -> Any:
    """A part of a run in float64; its summary."""
    torch.set_default_dtype(torch.float64)
    try:
        ranks = ranks_of(how)
        return train(folder, config, resume=config is None, stop_after=stop, ranks=ranks)
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_run_goes_on_with_any_number_of_ranks(text: str, tmp_path: Path) -> None:
    config = replace(TINY, texts=(text,))
    straight = trained(None, str(tmp_path / "straight"), config, None)
    folder = tmp_path / "parts"
    (first, *_) = values(2, trained, "fsdp", str(folder), config, 2)
    assert (first.step, first.finished) == (2, False)
    (place,) = places(folder)
    assert (place / checkpoint.COMPLETE).exists()
    assert not (folder / CHECKPOINT).exists()
    values(4, trained, "ddp", str(folder), None, 2)
    assert places(folder) != [place]  # the old one is gone
    alone = trained(None, str(folder), None, 1)
    assert alone.step == 5
    assert (folder / CHECKPOINT).exists()
    assert not (folder / checkpoint.FOLDER).exists()
    ended = values(2, trained, "fsdp", str(folder), None, None)
    assert all(one.step == 7 and one.finished for one in ended)
    assert len({one.held_out_loss for one in ended}) == 1
    assert ended[0].held_out_loss == pytest.approx(straight.held_out_loss, abs=1e-6)
    ours, want = (load_file(tmp_path / x / "model.safetensors") for x in ("parts", "straight"))
    assert ours.keys() == want.keys()
    for name in want:
        torch.testing.assert_close(ours[name], want[name], atol=1e-6, rtol=0)
    resumed = checkpoint.newest(folder)
    wanted = checkpoint.newest(tmp_path / "straight")
    assert resumed.held == wanted.held
    tensors = [
        {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in one.held.items()}
        for one in (resumed, wanted)
    ]
    resumed.fill(tensors[0])
    wanted.fill(tensors[1])
    for name in tensors[1]:  # the moments too
        torch.testing.assert_close(tensors[0][name], tensors[1][name], atol=1e-6, rtol=0)
    model, _ = load(folder)
    assert model.transformer.wte.weight.dtype == torch.float32  # as any folder is read


def places(folder: Path) -> list[Path]:
    return [one for one in (folder / checkpoint.FOLDER).iterdir() if one.is_dir()]


def test_checkpoints_that_are_none(text: str, tmp_path: Path) -> None:
    folder = tmp_path / "gpt"
    values(2, trained, "fsdp", str(folder), replace(TINY, texts=(text,)), 2)
    pointer = folder / checkpoint.FOLDER / checkpoint.POINTER
    (place,) = places(folder)

    def refused(match: str) -> None:
        with pytest.raises(FolderError, match=match):
            trained(None, str(folder), None, 1)

    metadata = place / checkpoint.COMPLETE
    kept = metadata.read_bytes()
    metadata.unlink()
    refused("damaged or truncated")
    metadata.write_bytes(kept[: len(kept) // 2])
    refused("damaged or truncated")
    metadata.write_bytes(kept)
    data = next(place.glob("*.distcp"))
    whole = data.read_bytes()
    data.write_bytes(whole[: len(whole) // 2])
    refused("damaged or truncated")
    data.write_bytes(whole)
    about = json.loads(pointer.read_text())
    for wrong in ({"step": -1}, {"settings": []}, {"checkpoint": "../gone"}, {"text": "another"}):
        pointer.write_text(json.dumps(about | wrong))
        refused("damaged or truncated|the text differs from that")
    pointer.write_text(json.dumps(about | {"settings": about["settings"] | {"width": 18}}))
    refused("its settings require|larger|sizes")
    pointer.write_text(json.dumps(about))
    shutil.copytree(place, place.parent / "step-9-half")  # of a run that was killed as it saved
    (place.parent / "step-9-half" / checkpoint.COMPLETE).unlink()
    assert trained(None, str(folder), None, 1).step == 3
    assert not pointer.exists()


def test_another_run_replaces_what_others_left(text: str, tmp_path: Path) -> None:
    folder, config = tmp_path / "gpt", replace(TINY, texts=(text,))
    values(2, trained, "ddp", str(folder), config, 4)
    train(folder, replace(config, seed=5), overwrite=True, stop_after=1)
    assert checkpoint.newest(folder).settings["seed"] == 5
    assert not (folder / checkpoint.FOLDER).exists()


def one_step(how: str, text: str) -> dict[str, Any]:
    """What the third step moves; before it, DDP settles its buckets."""
    ranks = ranks_of(how)
    run = Run(replace(TINY, texts=(text,)), ranks=ranks)
    sizes = {name: p.numel() for name, p in run.model.named_parameters()}
    for _ in range(2):
        run.advance()
    with Moved() as moved:
        run.advance()
    of_blocks = sum(size for name, size in sizes.items() if ".h." in name)
    given = {"calls": dict(moved.calls), "bytes": dict(moved.bytes)}
    sizes_of = {"parameters": sum(sizes.values()), "of_blocks": of_blocks, "tensors": len(sizes)}
    return given | sizes_of


def test_what_a_step_moves(text: str) -> None:
    """As docs/scaling.md says: DDP sums 4 bytes a parameter; FSDP2 gathers blocks twice."""
    (ddp, *_), (fsdp, *_) = (values(2, one_step, how, text) for how in ("ddp", "fsdp"))
    loss = 8
    assert ddp["calls"] == {"allreduce": 2}
    assert ddp["bytes"] == {"allreduce": 4 * ddp["parameters"] + loss}
    groups = TINY.layers + 1
    gathered, scattered = "allgather_base", "reduce_scatter_base"
    assert fsdp["calls"] == {
        gathered: groups + TINY.layers,
        scattered: groups,
        "all_reduce": 1,  # the norms of the gradients
        "allreduce": 1,  # the loss
    }
    whole, again = 4 * fsdp["parameters"], 4 * fsdp["of_blocks"]
    padding = 1.1  # rows of the first dimension, which two ranks do not divide
    assert whole + again <= fsdp["bytes"][gathered] <= padding * (whole + again)
    assert whole <= fsdp["bytes"][scattered] <= padding * whole
    assert fsdp["bytes"]["all_reduce"] == 4 * fsdp["tensors"]
    assert fsdp["bytes"]["allreduce"] == loss


def dropped(text: str) -> tuple[list[float], list[float]]:
    """Losses of two equal runs with dropout, whose draws differ from rank to rank."""
    ranks = ranks_of("ddp")
    config = replace(TINY, texts=(text,), dropout=0.5)
    state = torch.get_rng_state()
    runs = [Run(config, ranks=ranks) for _ in range(2)]
    losses = [[run.advance() for _ in range(2)] for run in runs]
    assert torch.equal(torch.get_rng_state(), state)
    return losses[0], losses[1]


def test_dropout_is_a_function_of_seed_step_and_rank(text: str) -> None:
    first, other = values(2, dropped, text)
    assert first[0] == first[1] == other[0]

"""Kill a rank of a training at random moments, and see that its last whole checkpoint goes on.

Example: `PYTHONPATH=tests python tests/parallel/rank_kills.py --kills 20 --seed 1`. Two ranks train
with FSDP2 and save after each step. Half of the kills fall at a random time, of both ranks; the
others fall before a random file operation of one. The exit code is 1 if what is left does not load
on 1, 2 and 4 ranks, bit for bit as it was at some step, or if two ranks that go on with it end
with other weights or moments than two that were left alone.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from worlds import gloo, values, world

from headwise.models import checkpoint, training
from headwise.models.checkpoint import CHECKPOINT, tensors_of
from headwise.models.run import Run, TrainConfig, TrainingRanks
from headwise.parallel.training import DataParallelRanks
from kills import main

STEPS = 4
OPERATIONS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}


def settings(text: str) -> TrainConfig:
    sizes = TrainConfig(context=5, layers=2, heads=3, width=15, vocab=263)
    return replace(sizes, texts=(text,), steps=STEPS, batch=5, warmup=2)


def state(run: Run) -> str:
    """A digest of weights and moments, whole."""
    found = hashlib.sha256()
    for name, tensor in sorted(tensors_of(run.model, run.optimizer).items()):
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # pyright: ignore
        found.update(name.encode())
        found.update(whole.numpy().tobytes())
    return found.hexdigest()


def trained(text: str, folder: str, rank: int, operation: int, seconds: float | None) -> Any:
    """Train and save. A rank dies before a file operation, or all do after some time.

    How long that takes, and in how many file operations of this rank.
    """
    training.SAVE_SECONDS = -1.0
    done = 0

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal done
        if event in OPERATIONS and str(arguments[0]).startswith(f"{folder}/"):
            if (done, int(os.environ["RANK"])) == (operation, rank):
                os.kill(os.getpid(), signal.SIGKILL)
            done += 1

    gloo()
    sys.addaudithook(hear)
    if seconds is not None:
        threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
    begun = time.monotonic()
    training.train(folder, settings(text), ranks=DataParallelRanks("fsdp"))
    return time.monotonic() - begun, done


def straight(text: str) -> list[str]:
    """What a run is at each step."""
    gloo()
    run = Run(settings(text), ranks=DataParallelRanks("fsdp"))
    states = [state(run)]
    for _ in range(STEPS):
        run.advance()
        states.append(state(run))
    return states


def loaded(folders: list[str], alone: bool = False) -> list[tuple[int, str, str]]:
    """The step at which each run goes on, what it is there, and at its end."""
    if not alone:
        gloo()
    found = []
    for folder in folders:
        run = Run.resume(Path(folder), TrainingRanks() if alone else DataParallelRanks("fsdp"))
        step, there = run.step, state(run)
        for _ in range(step, STEPS):
            run.advance()
        found.append((step, there, state(run)))
    return found


def run(kills: int, seed: int) -> int:
    """So many kills; how many of them did harm."""
    draw, harm, done = random.Random(seed), 0, []
    with tempfile.TemporaryDirectory() as place:
        text = Path(place) / "text.txt"
        text.write_text("".join(f"{n} times {n} is {n * n}\n" for n in range(60)))
        wanted = values(2, straight, str(text))[0]
        whole = values(2, trained, str(text), f"{place}/whole", -1, 0, None)
        took, operations = max(seconds for seconds, _ in whole), [count for _, count in whole]
        print(f"seed {seed}: {kills} kills of a run of {took:.2f} s; {operations} file operations")
        while len(done) < kills:
            folder = f"{place}/{len(done)}"
            rank, seconds = draw.randrange(2), draw.uniform(0, took)
            operation = draw.randrange(operations[rank])
            if timed := draw.random() < 0.5:
                ended = world(2, trained, str(text), folder, -1, 0, seconds)
            else:
                ended = world(2, trained, str(text), folder, rank, operation, None)
            if any(one.code == -signal.SIGKILL for one in ended):  # else it was through already
                when = f"both at {seconds:.2f} s" if timed else f"rank {rank} before {operation}"
                done.append((folder, when))
        harm = _harm(done, wanted)
    print(f"{len(done)} kills, {harm} did harm (seed {seed})")
    return harm


def _harm(done: list[tuple[str, str]], wanted: list[str]) -> int:
    """How many of the folders do not go on as they should."""
    pointer = f"{checkpoint.FOLDER}/{checkpoint.POINTER}"
    saved = [folder for folder, _ in done if Path(folder, pointer).exists()]
    ranks = {size: values(size, loaded, saved)[0] for size in (2, 4)}
    ranks[1] = loaded(saved, alone=True)
    harm = 0
    for folder, when in done:
        if folder not in saved:
            print(f"{when}: nothing was saved")
            harm += Path(folder, CHECKPOINT).exists()
            continue
        found = {size: states[saved.index(folder)] for size, states in ranks.items()}
        step, _, end = found[2]
        right = {(step, wanted[step])} == {states[:2] for states in found.values()}
        good = right and end == wanted[STEPS]
        harm += not good
        print(f"{when}: step {step}, {'the same, bit for bit' if good else f'HARM: {found}'}")
    return harm


if __name__ == "__main__":
    sys.exit(main(run, __doc__, usual=20))

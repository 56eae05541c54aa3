"""Kill a monitored training at random moments, resume it, and compare its history with a whole one.

Example: `python tests/monitor_kills.py --kills 50 --seed 1`. Every kill is a line; the exit code is
1 if a history does not open, has a step that is torn or double, or ends in another one than that of
the uninterrupted training. The training saves itself after every third step, so that a resumed one
overwrites what was recorded since. Runs are forked from this process.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import os.path
import random
import sqlite3
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch._dynamo  # forked runs need not import it

import headwise as hw
from kills import ended, forked, killed_at, main
from monitored import LAYERS, H, advance, made

STEPS, EVERY, SAVED = 40, 2, 3
RECORDED = [1, *range(EVERY, STEPS + 1, EVERY)]
STATISTICS = (
    "entropy",
    "entropy_share",
    "first",
    "key_norm",
    "max_logit",
    "output_norm",
    "previous",
    "query_norm",
)
RULES = (hw.telemetry.Rule("first", above=0.0, steps=2, then=lambda alarm: None),)


def train(folder: Path) -> None:
    """Train to the end, from what the folder holds."""
    model, optimizer = made()
    saved, step = folder / "saved.pt", 0
    if saved.exists():
        state = torch.load(saved)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    history = folder / "heads.sqlite"
    settings = {"rules": RULES, "history": history, "step": step, "overwrite": True}
    monitor = hw.Monitor(model, optimizer, EVERY, 4, **settings)  # pyright: ignore
    for number in range(step + 1, STEPS + 1):
        torch.manual_seed(number)
        advance(model, optimizer, number, micro=2)
        if number % SAVED == 0:
            whole = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**whole, "step": number}, folder / "saved.tmp")
            os.replace(folder / "saved.tmp", saved)
    monitor.close()


def faults(path: Path) -> Iterator[str]:
    """What is wrong with the history that a killed training left."""
    if not path.exists():
        return
    file = sqlite3.connect(path)
    if file.execute("PRAGMA integrity_check").fetchall() != [("ok",)]:
        yield "it is damaged"
    file.close()
    history = hw.History(path)
    steps = history.steps
    if steps != RECORDED[: len(steps)]:
        yield f"it has steps {steps}"
    for record in history.records():
        if tuple(sorted(record.figures)) != STATISTICS:
            yield f"step {record.step} is torn: {sorted(record.figures)}"
        if any(f.data.shape[1] != len(LAYERS) * H for f in record.figures.values()):
            yield f"step {record.step} has other heads"


def content(path: Path) -> list[list[tuple[object, ...]]]:
    """All that a history holds, but for who wrote it."""
    file = sqlite3.connect(path)
    tables = [file.execute(f"SELECT * FROM {name}").fetchall() for name in TABLES]
    file.close()
    return [sorted(rows, key=repr) for rows in tables]


TABLES = ("figures", "alarms", "layers")


def run(kills: int, seed: int) -> int:
    """So many kills; how many of them did harm."""
    torch.set_num_threads(1)
    draw, harm, done = random.Random(seed), 0, 0
    with tempfile.TemporaryDirectory() as place:
        wanted = Path(place) / "wanted"
        wanted.mkdir()
        started = time.monotonic()
        assert ended(forked(lambda: train(wanted)))
        seconds = time.monotonic() - started
        whole = content(wanted / "heads.sqlite")
        assert len(whole[0]) == len(RECORDED) * len(STATISTICS)
        assert whole[1], "rules that name nobody tell nothing"
        print(f"seed {seed}: {kills} kills of a run of {STEPS} steps, {seconds:.2f} s", flush=True)
        while done < kills:
            folder = Path(place) / f"killed-{done}"
            folder.mkdir(exist_ok=True)
            for path in folder.iterdir():
                path.unlink()
            moment = draw.uniform(0, seconds)
            if not killed_at(moment, lambda folder=folder: train(folder)):
                continue  # it was through already
            done += 1
            path = folder / "heads.sqlite"
            wrong = list(faults(path))
            left = len(hw.History(path).steps) if path.exists() else 0
            assert ended(forked(lambda folder=folder: train(folder)))
            wrong += [] if content(path) == whole else ["the resumed history is another"]
            harm += bool(wrong)
            verdict = f"HARM: {', '.join(wrong)}" if wrong else "the same in the end"
            print(f"{done}: killed at {moment:.3f} s, {left} steps left: {verdict}", flush=True)
    print(f"{done} kills, {harm} did harm (seed {seed})")
    return harm


if __name__ == "__main__":
    sys.exit(main(run, __doc__, usual=50))

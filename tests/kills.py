"""Kill a training at random moments, resume it, and compare with one that was left alone.

Example: `make kills KILLS=200 SEED=1`. Every kill is a line of the log; the exit code is 1 if a
resumed run has other weights than the uninterrupted one.

Half of the kills fall at a random time, the others between the files of a random save, where they
could do harm. Runs are forked from this process, which has PyTorch loaded and no threads.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import argparse
import json
import random
import secrets
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file

from headwise.models import checkpoint, training
from headwise.models.run import Run, TrainConfig
from headwise.weights.folders import CONFIG, TOKENIZER, WEIGHTS

STEPS = 8
FILES = set(Run.FILES)


def prepare() -> None:
    """Import now whatever a run imports late, and make sure that forking is sound."""
    import safetensors.torch  # noqa: F401
    import tokenizers  # noqa: F401

    torch.set_num_threads(1)
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)])  # imports half of PyTorch
    tasks = Path("/proc/self/task")
    assert not tasks.exists() or len(list(tasks.iterdir())) == 1, "threads do not survive a fork"


def settings(folder: Path) -> TrainConfig:
    text = folder / "text.txt"
    text.write_text("".join(f"{n} times {n} is {n * n}\n" for n in range(60)))
    sizes = {"context": 5, "layers": 2, "heads": 3, "width": 15, "vocab": 263}
    return TrainConfig((str(text),), steps=STEPS, batch=3, warmup=2, dropout=0.1, **sizes)


def forked(work: Callable[[], object]) -> int:
    """Start `work` in a process of its own; its number."""
    sys.stdout.flush()
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        training.SAVE_SECONDS = -1.0  # after every step
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def ended(child: int) -> bool:
    """Wait for a process; whether it came to its end by itself."""
    status = os.waitpid(child, 0)[1]
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        raise SystemExit("a training that was not killed has failed")
    return os.WIFEXITED(status)


def killed_at(moment: float, work: Callable[[], object]) -> bool:
    """Whether the work was still going on at that time, and was killed."""
    child = forked(work)
    time.sleep(moment)
    os.kill(child, signal.SIGKILL)  # one that has ended waits to be asked for, and keeps its number
    return not ended(child)


def killed_before_file(number: int, work: Callable[[], object]) -> bool:
    """Whether the work came to put so many files in place, and was killed before that one."""
    put, left = os.replace, number

    def replace(*arguments: object) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        put(*arguments)  # pyright: ignore

    def patched() -> None:
        os.replace = replace  # pyright: ignore
        work()

    return not ended(forked(patched))


def resumed(folder: Path, config: TrainConfig) -> str:
    """Go on with what a killed run left, to the end; in words, from where."""
    step = None
    if (folder / checkpoint.CHECKPOINT).exists():
        step = checkpoint.read(folder).step
        assert ended(forked(lambda: training.train(folder, resume=True)))
    else:
        assert ended(forked(lambda: training.train(folder, config, overwrite=True)))
    return "begun again, nothing was saved" if step is None else f"resumed from step {step}"


def faults(folder: Path) -> Iterator[str]:
    """What is half-written of the files that are there."""
    for name in FILES & {path.name for path in folder.glob("*")}:
        try:
            if name in (CONFIG, TOKENIZER):
                json.loads((folder / name).read_text())
            else:
                load_file(folder / name)
        except Exception as error:
            yield f"{name} is damaged ({error})"


def differences(folder: Path, wanted: Path) -> Iterator[str]:
    """In what the folder of a resumed run differs from that of an uninterrupted one."""
    for one in sorted({path.name for path in folder.iterdir()} ^ FILES):
        yield f"{one} is {'missing' if one in FILES else 'left over'}"
    for name in (checkpoint.CHECKPOINT, WEIGHTS):
        got, want = load_file(folder / name), load_file(wanted / name)
        if got.keys() != want.keys():
            yield f"{name} has other tensors"
        for key in got.keys() & want.keys():
            if not torch.equal(got[key].view(torch.uint8), want[key].view(torch.uint8)):
                yield f"{key} differs"
    for name in (CONFIG, TOKENIZER):
        if (folder / name).read_bytes() != (wanted / name).read_bytes():
            yield f"{name} differs"


def run(kills: int, seed: int) -> int:
    """So many kills; how many of them did harm."""
    prepare()
    draw, harm, done = random.Random(seed), 0, 0
    with tempfile.TemporaryDirectory() as place:
        wanted, folder = Path(place) / "wanted", Path(place) / "killed"
        config = settings(Path(place))
        started = time.monotonic()
        assert ended(forked(lambda: training.train(wanted, config)))
        whole = time.monotonic() - started
        files = (STEPS + 2) * len(FILES)  # a save at the start, after each step, and at the end
        print(f"seed {seed}: {kills} kills of a run of {STEPS} steps, {whole:.2f} s", flush=True)
        while done < kills:
            shutil.rmtree(folder, ignore_errors=True)
            work = lambda: training.train(folder, config)  # noqa: E731
            if draw.random() < 0.5:
                moment = draw.uniform(0, whole)
                when, dead = f"at {moment:.3f} s", killed_at(moment, work)
            else:
                number = draw.randrange(files)
                when, dead = f"before file {number}", killed_before_file(number, work)
            if not dead:
                continue  # it was through already
            done += 1
            wrong = list(faults(folder))
            how = resumed(folder, config)
            wrong += differences(folder, wanted)
            harm += bool(wrong)
            verdict = f"HARM: {', '.join(wrong)}" if wrong else "the same, bit for bit"
            print(f"{done}: killed {when}, {how}: {verdict}", flush=True)
    print(f"{done} kills, {harm} did harm (seed {seed})")
    return harm


def main(run: Callable[[int, int], int], said: str | None, usual: int) -> int:
    """The command line of a file of kills; its exit code is 1 where one did harm."""
    parser = argparse.ArgumentParser(description=said)
    parser.add_argument("--kills", type=int, default=usual)
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args()
    return bool(run(options.kills, secrets.randbits(32) if options.seed is None else options.seed))


if __name__ == "__main__":
    sys.exit(main(run, __doc__, usual=200))

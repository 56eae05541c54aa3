"""Whole models on headwise's kernel beside the same models on their own sdpa.

    python benchmarks/end_to_end.py [--lengths 512 2048] [--models gpt2 llama bert] [--part forward]

GPT-2 small's size, a Llama of 4 layers of width 1,024 with 16 heads on 4 of keys and values, and a
BERT of 12 layers with padding, of transformers; positions enlarged where the length asks for it.
A BERT's batch is two rows, one of them half padding; over 4,096 tokens one, a quarter padding.
Each runs on `sdpa`, on `attn_implementation="headwise"`, and on sdpa in `hw.accelerate`: forward
passes and training steps (forward, loss, backward, AdamW) in float32 and bfloat16, all by turns.
Before the clock starts, logits agree to 1e-4 in float32 and tokens are generated alike.

The process keeps its memory (KEPT), or the system's work at pages hides what is compared.
The attention alone is timed in the same rounds; from its gain on that and its number of calls comes
the gain that is predicted of the whole, and `share of it` says how much of that was reached. Both
are medians of differences within a round, for a machine that others share drifts between rounds.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

import headwise as hw
import recording
from headwise.tutorial import timing

RESULTS = Path(__file__).parent / "results"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
WORDS = 512
OWN, NAMED, INSIDE = "sdpa", "headwise", "accelerate"
KEPT = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
"""Settings of glibc by which a process keeps memory that it frees.

Without them every large tensor is pages that the system hands out and clears: a tenth to a third
of the time of these models, and never twice the same.
"""


@dataclass(frozen=True)
class Subject:
    """A model to be, and the attention call that each of its layers makes."""

    make: Callable[[int, str], Any]
    layers: int
    heads: int
    kv_heads: int
    causal: bool

    def kept(self, length: int) -> list[int]:
        """Tokens of each row of a batch that are no padding."""
        if self.causal:
            return [length]
        return [length, length // 2] if length <= 4096 else [3 * length // 4]


def gpt2(length: int, implementation: str) -> Any:
    """GPT-2 small's size."""
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=length + 8, bos_token_id=0, eos_token_id=0
    )
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    return transformers.GPT2LMHeadModel._from_config(config, attn_implementation=implementation)


def llama(length: int, implementation: str) -> Any:
    """Four layers of width 1,024, four query heads to each of keys and values."""
    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=length + 8,
    )
    return transformers.LlamaForCausalLM._from_config(config, attn_implementation=implementation)


def bert(length: int, implementation: str) -> Any:
    """BERT base's size."""
    config = transformers.BertConfig(vocab_size=WORDS, max_position_embeddings=length)
    config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
    return transformers.BertForMaskedLM._from_config(config, attn_implementation=implementation)


SUBJECTS = {
    "gpt2": Subject(gpt2, 12, 12, 12, True),
    "llama": Subject(llama, 4, 16, 4, True),
    "bert": Subject(bert, 12, 12, 12, False),
}


def inputs(subject: Subject, length: int) -> dict[str, Any]:
    """Token ids, and which of them are no padding."""
    kept = torch.tensor(subject.kept(length))
    ids = torch.randint(1, WORDS, (len(kept), length), generator=torch.Generator().manual_seed(0))
    if subject.causal:
        return {"input_ids": ids}
    return {"input_ids": ids, "attention_mask": (torch.arange(length) < kept[:, None]).long()}


def step(model: Any, given: dict[str, Any]) -> Callable[[], None]:
    """A training step."""
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-5)

    def work() -> None:
        logits = (
            model(**given, use_cache=False).logits
            if "attention_mask" not in given
            else model(**given).logits
        )
        loss = F.cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), given["input_ids"][:, 1:].flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return work


def forward(model: Any, given: dict[str, Any]) -> Callable[[], None]:
    """A forward pass."""
    model.eval()

    def work() -> None:
        with torch.no_grad():
            model(**given)

    return work


def inside(model: Any, work: Callable[[], None]) -> None:
    with hw.accelerate(model):
        work()


def attention(subject: Subject, length: int, dtype: torch.dtype, train: bool) -> dict[str, Any]:
    """The call of one layer, alone: PyTorch's and headwise's."""
    kept = torch.tensor(subject.kept(length))
    shapes = [(len(kept), n, length, 64) for n in (subject.heads, *2 * [subject.kv_heads])]
    q, k, v = (torch.randn(s).to(dtype).requires_grad_(train) for s in shapes)
    mask: hw.Mask = hw.Causal() if subject.causal else hw.Padding(kept)
    dense = None
    if not subject.causal:
        dense = (torch.arange(length) < kept[:, None])[:, None, None].repeat(1, 1, length, 1)

    def own() -> Any:
        return F.scaled_dot_product_attention(
            q, k, v, dense, is_causal=subject.causal, enable_gqa=subject.heads > subject.kv_heads
        )

    def run(compute: Callable[[], Tensor]) -> None:
        out = compute()
        if train:
            torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

    ours = partial(hw.attend, q, k, v, mask=mask)
    return {"attention, sdpa": partial(run, own), "attention, headwise": partial(run, ours)}


def assert_alike(subject: Subject, models: dict[str, Any], length: int) -> None:
    """Logits and generated tokens agree; in float32."""
    given = inputs(subject, length)
    keep = given.get("attention_mask", torch.ones_like(given["input_ids"])).bool()

    def logits(name: str) -> Tensor:
        return models[name].eval()(**given).logits[keep]

    with torch.no_grad():
        expected = logits(OWN)
        torch.testing.assert_close(logits(NAMED), expected, rtol=0, atol=1e-4)
        if INSIDE in models:
            with hw.accelerate(models[INSIDE]) as account:
                torch.testing.assert_close(logits(INSIDE), expected, rtol=0, atol=1e-4)
            print(f"served {account.served} of {account.served + account.left} calls")
        if subject.causal:
            settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
            own, named = (models[n].generate(given["input_ids"], **settings) for n in (OWN, NAMED))
            assert torch.equal(own, named), "generated tokens differ"


def measure(name: str, length: int, part: str, options: argparse.Namespace) -> Iterator[list[Any]]:
    """One model at one length: the rows of float32, then those of bfloat16."""
    subject, train, ways = SUBJECTS[name], part == "step", options.ways
    torch.manual_seed(0)
    model = subject.make(length, OWN)
    named = subject.make(length, NAMED)
    named.load_state_dict(model.state_dict())
    models = {OWN: model, NAMED: named}
    if INSIDE in ways:
        models[INSIDE] = copy.deepcopy(model)
    assert_alike(subject, models, length)
    given = inputs(subject, length)
    for kind in options.dtypes:
        dtype = DTYPES[kind]
        for one in models.values():
            one.to(dtype)
        works: dict[str, Any] = {
            n: (step if train else forward)(m, given) for n, m in models.items()
        }
        if INSIDE in ways:
            works[INSIDE] = partial(inside, models[INSIDE], works[INSIDE])
        works |= attention(subject, length, dtype, train)
        taken = timing.interleaved(works, options.rounds, least=0.0, within=options.within)
        own = statistics.median(taken[OWN])
        gain = subject.layers * saved(taken, "attention, sdpa", "attention, headwise")
        about = {"model": name, "part": part, "T": length, "dtype": kind}
        about |= {"rounds": len(taken[OWN]), "sdpa seconds": own}
        about["attention"] = timing.ratio(taken, "attention, sdpa", "attention, headwise")
        yield [
            {
                **about,
                "contender": contender,
                "speed": timing.ratio(taken, OWN, contender),
                "predicted": own / (own - gain),
                "share of it": saved(taken, OWN, contender) / gain,
            }
            for contender in ways
        ]


def saved(taken: dict[str, list[float]], beside: str, name: str) -> float:
    """Seconds that `name` takes less than `beside`, the median over the rounds."""
    return statistics.median(a - b for a, b in zip(taken[beside], taken[name], strict=True))


def main() -> None:
    """Measure, show and record."""
    hw.register()
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--models", nargs="+", choices=SUBJECTS, default=list(SUBJECTS))
    parser.add_argument("--part", choices=("forward", "step"), action="append")
    parser.add_argument("--ways", nargs="+", choices=(NAMED, INSIDE), default=[NAMED, INSIDE])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--within", type=float, default=90.0, help="seconds, while 3 rounds fit")
    parser.add_argument("--no-record", action="store_true")
    options = parser.parse_args()
    if not KEPT.items() <= os.environ.items():
        os.execve(sys.executable, sys.orig_argv, os.environ | KEPT)
    rows: list[dict[str, Any]] = []
    for part in options.part or ("forward", "step"):
        for name in options.models:
            for length in options.lengths:
                for found in measure(name, length, part, options):
                    rows += found
                    print(found, flush=True)
    lines = [
        [
            f"{r['model']} T {r['T']} {r['dtype']} {r['part']}, {r['contender']}",
            f"{r['sdpa seconds']:.3f}",
            f"{r['speed'].median:.3f} ({r['speed'].low:.3f} to {r['speed'].high:.3f})",
            f"{r['attention'].median:.2f}",
            f"{r['predicted']:.3f}",
            f"{r['share of it']:.2f}",
        ]
        for r in rows
    ]
    columns = ["", "s on sdpa", "× its speed", "attention", "predicted", "share of it"]
    recording.show("whole models", columns, lines)
    if not options.no_record:
        recording.record("end_to_end", vars(options) | {"memory": KEPT}, rows, RESULTS)


if __name__ == "__main__":
    main()

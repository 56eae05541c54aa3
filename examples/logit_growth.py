"""Logit growth in a small training, and what holds it: warm-up, QK-clip, an entropy floor.

    python examples/logit_growth.py                          # all of it: ten minutes on one core
    python examples/logit_growth.py --seeds 1 --rates 0.03   # two minutes of it

At a high learning rate scores grow without bound: softmax turns into a choice of one key, its
gradient vanishes, and the model learns little more than how often each token occurs. Here a small
GPT is trained on Python's manual, each time from the same weights and on the same batches: plainly,
with warm-up, clipped after every step, with `hw.EntropyFloor` in the loss, and with the last two
together. `hw.Monitor` clips, keeps the figures and names the heads that go wrong; three runs at a
low rate show that it is silent where nothing does.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import headwise as hw
from headwise.models import corpus
from headwise.models.gpt import GPT, GPTConfig, builtin, load
from headwise.telemetry import RULES


@dataclass(frozen=True)
class Method:
    """What is done against the growth: steps of warm-up, a limit to clip at, a floor in nats."""

    warmup: int = 0
    limit: float | None = None
    floor: float | None = None


METHODS = {
    "plain": Method(),
    "warm-up": Method(warmup=100),
    "clip": Method(limit=30.0),
    "floor": Method(floor=0.5),
    "clip and floor": Method(limit=30.0, floor=0.5),
}


@dataclass(frozen=True)
class Settings:
    """Every learning rate is run with every seed and every method, the healthy one plainly."""

    rates: tuple[float, ...] = (0.01, 0.03)
    healthy: float = 0.001
    seeds: int = 3
    steps: int = 400
    layers: int = 2
    heads: int = 4
    width: int = 64
    context: int = 32
    batch: int = 16
    every: int = 10


class Text:
    """The manual as tokens, those to train on and windows that are held out."""

    def __init__(self, context: int) -> None:
        text, tokenizer = corpus.manual(), load(builtin())[1]
        self.vocab = tokenizer.get_vocab_size()
        self.train = corpus.join(tokenizer, text.train)
        held = corpus.join(tokenizer, text.held_out)
        windows = held[: 128 * (context + 1)].view(-1, context + 1)
        self.inputs, self.targets = windows[:, :-1], windows[:, 1:]
        self.context = context

    def batch(self, rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Random windows, and the tokens that follow."""
        last = len(self.train) - self.context
        starts = torch.randint(last, (rows, 1), generator=generator)
        taken = self.train[starts + torch.arange(self.context + 1)]
        return taken[:, :-1], taken[:, 1:]

    @property
    def unigram(self) -> float:
        """The loss of token frequencies alone."""
        return corpus.unigram_loss(self.train, self.targets, self.vocab)


def loss_of(model: GPT, inputs: Tensor, targets: Tensor) -> Tensor:
    """Nats a token."""
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def train(settings: Settings, rate: float, method: Method, seed: int, text: Text) -> dict[str, Any]:
    """A run: marks on the way, the heads that alarms named, its held-out loss at the end."""
    model = untrained(settings, text.vocab, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    floor = None if method.floor is None else hw.EntropyFloor(model, method.floor)
    generator = torch.Generator().manual_seed(seed)
    marks, losses, alarms = [], [], list[hw.telemetry.Alarm]()
    rules = [replace(rule, then=alarms.append) for rule in RULES]
    with hw.Monitor(model, optimizer, settings.every, rules=rules, clip=method.limit) as monitor:
        for step in range(settings.steps):
            for group in optimizer.param_groups:
                group["lr"] = rate * min(1.0, (step + 1) / max(1, method.warmup))
            with floor or nullcontext():
                loss = loss_of(model, *text.batch(settings.batch, generator))
            losses.append(loss.item())
            if floor is not None:
                loss = loss + floor.loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if (step + 1) % settings.every == 0:
                marks.append(mark(step + 1, losses[-settings.every :], monitor.latest))
    model.eval()
    with torch.no_grad():
        held_out = loss_of(model, text.inputs, text.targets).item()
    named = [
        {"step": one.step, "rule": one.rule, "head": f"{one.layer}.{one.head}"} for one in alarms
    ]
    return {"marks": marks, "alarms": named, "held_out": held_out}


def untrained(settings: Settings, vocab: int, seed: int) -> GPT:
    """GPT-2 in small, its weights those of the seed."""
    torch.manual_seed(seed)
    config = GPTConfig(
        vocab_size=vocab,
        n_positions=settings.context,
        n_embd=settings.width,
        n_layer=settings.layers,
        n_head=settings.heads,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    )
    return GPT(config)


def mark(step: int, losses: Sequence[float], latest: Mapping[str, Any]) -> dict[str, Any]:
    """Where the training stands: the loss of the last steps, the heads in the last of them."""
    return {
        "step": step,
        "loss": sum(losses) / len(losses),
        "max_logit": float(latest["max_logit"].values.max()),
        "entropy_share": latest["entropy_share"].values.tolist(),
    }


def measure(settings: Settings) -> list[dict[str, Any]]:
    """All runs, each told in a line when it ends."""
    text, runs = Text(settings.context), []
    asked = [(rate, name) for rate in settings.rates for name in METHODS]
    print("learning rate, seed, method: held-out loss, largest logit, mean entropy share, alarms")
    for rate, name in [*asked, (settings.healthy, "plain")]:
        for seed in range(settings.seeds):
            found = train(settings, rate, METHODS[name], seed, text)
            runs.append({"rate": rate, "seed": seed, "method": name, **found})
            end = found["marks"][-1]
            share = sum(end["entropy_share"]) / len(end["entropy_share"])
            told = f"{found['held_out']:.3f}, {end['max_logit']:,.0f}, {share:.3f}"
            print(f"{rate:g}, {seed}, {name}: {told}, {alarmed(found['alarms'])}", flush=True)
    return runs


def alarmed(alarms: Sequence[dict[str, Any]]) -> str:
    """When the first head was named, and how many were in the end."""
    if not alarms:
        return "no alarm"
    heads = {one["head"] for one in alarms}
    return f"first at step {alarms[0]['step']}, {len(heads)} heads in all"


def main(arguments: list[str] | None = None) -> None:
    """The command, with the process's arguments unless others are given."""
    usual = Settings()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", type=float, nargs="+", default=usual.rates)
    for name in ("seeds", "steps", "layers", "width", "context"):
        parser.add_argument(f"--{name}", type=int, default=getattr(usual, name))
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)  # the model is too small for two
    measure(replace(usual, **vars(chosen) | {"rates": tuple(chosen.rates)}))


if __name__ == "__main__":
    main()

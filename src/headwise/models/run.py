"""A training run in memory: settings, data, model and training steps.

Every random choice is a function of the seed and the step's number, so a run that is stopped and
resumed equals an uninterrupted run, bit for bit on the CPU. Several ranks train the same steps as
one process, each on its share of the rows; only the random numbers of dropout differ.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from ..weights.folders import CONFIG, TOKENIZER, WEIGHTS, FolderError, check_size, read_tokenizer
from . import checkpoint, corpus
from .gpt import GPT, GPTConfig, check_types

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class TrainingRanks:
    """A single training process; the base class for several, each with a part of the model.

    rank, size: the number of this process, and the number of processes.
    """

    rank = 0
    size = 1

    def prepared(self, model: GPT) -> nn.Module:
        """Shard or replicate the model; return the module that a training step calls."""
        return model

    def full_model(self, model: GPT) -> GPT:
        """Gather the model from all shards; every rank must call this."""
        return model

    def shared(self, make: Callable[[], _T]) -> _T:
        """Call the function on rank 0; all ranks return its result or raise its exception."""
        return make()

    def total(self, values: Tensor) -> Tensor:
        """Sum a tensor over ranks; every rank must call this."""
        return values


ALONE = TrainingRanks()
EVALUATED_WINDOWS = 256
EVALUATED_ROWS = 16  # rows per call, on each rank
SHORTEST_PERIOD = 8
LARGEST_SIZE = 2**31 - 1
_T = TypeVar("_T")


@dataclass(frozen=True)
class TrainConfig:
    """Settings of a run; with the defaults, induction heads form within minutes on two cores.

    `repeats` is the fraction of rows that repeat random tokens. `sinusoid_std` and `sinusoid_base`
    are the `std` and `base` of the initial position table (`sinusoids`).

    Raises:
        ValueError: a setting is out of range.
    """

    texts: tuple[str, ...] = ()
    held_out: float = 0.1
    vocab: int = 512
    context: int = 128
    layers: int = 3
    heads: int = 4
    width: int = 128
    steps: int = 2400
    batch: int = 24
    lr: float = 3e-3
    warmup: int = 100
    weight_decay: float = 0.01
    clip: float = 1.0
    dropout: float = 0.0
    repeats: float = 0.5
    sinusoids: bool = True
    sinusoid_std: float = 0.3
    sinusoid_base: float = 20.0
    seed: int = 0
    dtype: str = "auto"
    device: str = "auto"

    def __post_init__(self) -> None:
        if isinstance(self.texts, str):
            raise ValueError(f"texts must be a list of files, got {self.texts!r:.60}")
        check_types(self)
        for name in ("layers", "heads", "width", "steps", "batch"):
            self._require(name, getattr(self, name) >= 1, "at least 1")
        for name in ("context", "batch", "vocab", "layers", "width"):
            self._require(name, getattr(self, name) <= LARGEST_SIZE, f"at most {LARGEST_SIZE}")
        self._require("vocab", self.vocab >= corpus.SMALLEST_VOCAB, "at least 257")
        self._require("context", self.context >= 4, "at least 4")
        self._require("heads", self.width % self.heads == 0, f"a divisor of width={self.width}")
        self._require("warmup", self.warmup >= 0, "at least 0")
        self._require("lr", self.lr > 0, "above 0")
        self._require("clip", self.clip > 0, "above 0")
        self._require("sinusoid_std", self.sinusoid_std > 0, "above 0")
        self._require("sinusoid_base", self.sinusoid_base > 1, "above 1")
        self._require("weight_decay", self.weight_decay >= 0, "at least 0")
        self._require("dropout", 0 <= self.dropout < 1, "at least 0 and below 1")
        self._require("repeats", 0 <= self.repeats <= 1, "between 0 and 1")
        self._require("held_out", 0 < self.held_out < 1, "between 0 and 1")
        self._require(
            "dtype", self.dtype in ("auto", "float32", "bfloat16"), "auto, float32 or bfloat16"
        )

    def _require(self, name: str, holds: bool, rule: str) -> None:
        if not holds:
            raise ValueError(f"{name} must be {rule}, got {getattr(self, name)!r}")

    def learning_rate(self, step: int) -> float:
        """Return the learning rate: linear warm-up, then cosine decay to 0 after the last step.

        >>> config = TrainConfig(steps=110, warmup=10, lr=1.0)
        >>> [round(config.learning_rate(step), 2) for step in (0, 9, 60, 109)]
        [0.1, 1.0, 0.5, 0.0]
        """
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.lr * 0.5 * (1 + math.cos(math.pi * done))


def sinusoids(
    positions: int, width: int, std: float, base: float = 10000.0
) -> Float[Tensor, "P E"]:
    """Return the position table of Vaswani et al. 2017 §3.5 (sines first, then cosines), scaled.

    Wavelengths range from 2π to nearly `base · 2π`. With a smaller base than the 10,000 of the
    paper, more features distinguish neighbors, which suffices for a short context.

    >>> sinusoids(5, 6, std=0.5**0.5)[0].tolist()
    [0.0, 0.0, 0.0, 1.0, 1.0, 1.0]
    """
    half = torch.arange((width + 1) // 2, dtype=torch.float64)
    angles = torch.arange(positions)[:, None] / base ** (2 * half / width)
    table = torch.cat([angles.sin(), angles.cos()], dim=1)[:, :width]
    return (table * std * math.sqrt(2)).float()


class Run:
    """A run in memory: model, optimizer, data and the number of completed steps.

    Each of several ranks has its own run; all ranks must call the collective methods.

    Raises:
        TextError: a text cannot be read or is too short.
        ValueError: the device is not available, or a step has fewer rows than there are ranks.
    """

    FILES = (CONFIG, WEIGHTS, TOKENIZER, checkpoint.CHECKPOINT)
    """The files that `save` writes; several ranks write `checkpoints/` instead of the last one."""

    def __init__(
        self, config: TrainConfig, tokenizer: Tokenizer | None = None, ranks: TrainingRanks = ALONE
    ) -> None:
        if config.batch < ranks.size:
            raise ValueError(
                f"batch must be at least the number of ranks ({ranks.size}), got {config.batch}; "
                f"use a larger batch or fewer ranks"
            )
        self.config, self.ranks = config, ranks
        self.corpus, self.tokenizer = ranks.shared(lambda: _texts(config, tokenizer))
        self.vocab = self.tokenizer.get_vocab_size()
        self.train_ids = corpus.join(self.tokenizer, self.corpus.train)
        self.held_ids = corpus.join(self.tokenizer, self.corpus.held_out)
        self._check_lengths()
        self.inputs, self.targets = windows(self.held_ids, config.context)
        self.device = _device(config.device)
        self.model = self._model().to(self.device)
        self.network = ranks.prepared(self.model)
        self.optimizer = _optimizer(self.model, config)
        self.fingerprint = checkpoint.fingerprint(self.train_ids, self.held_ids)
        self.step = 0

    @classmethod
    def resume(cls, folder: Path, ranks: TrainingRanks = ALONE) -> Run:
        """Resume the run of the folder's checkpoint, written by any number of ranks.

        Raises:
            FolderError: the checkpoint is missing or damaged, or the text has changed since.
        """
        saved = checkpoint.newest(folder)
        config, tokenizer = _settings(saved.settings, saved.path), read_tokenizer(folder)
        held = sum(math.prod(shape) for shape, _ in saved.held.values())
        check_size(_sizes(config, tokenizer).weights, held, str(saved.path))
        run = cls(config, tokenizer, ranks)
        if run.fingerprint != saved.fingerprint:
            raise FolderError(
                f"{folder}: the text differs from that of this run ({run.corpus.source}); "
                f"restore it, or start a new run in another folder"
            )
        saved.restore(run.model, run.optimizer)
        run.step = saved.step
        return run

    def advance(self) -> float:
        """Take one step; return the loss of its batch, in nats per token."""
        config, step, ranks = self.config, self.step, self.ranks
        rate = config.learning_rate(step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        rows = self.batch(step).tensor_split(ranks.size)[ranks.rank].to(self.device)
        share = len(rows) / config.batch
        self.network.train()
        with _seeded(self.device, config.seed, f"dropout{ranks.rank or ''}", step):
            with self._autocast():
                logits = self.network(rows[:, :-1])
            loss = F.cross_entropy(_at_least_float(logits).flatten(0, 1), rows[:, 1:].flatten())
            self.optimizer.zero_grad(set_to_none=True)
            (loss * share * ranks.size).backward()  # ranks' gradients are averaged
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.clip)
        self.optimizer.step()
        self.step += 1
        return float(ranks.total(loss.detach().double() * share))

    def batch(self, step: int) -> Int[Tensor, "B T"]:
        """Return the rows of a step, `context + 1` ids each: windows of the text, then repeats."""
        config = self.config
        generator = torch.Generator().manual_seed(_seed(config.seed, "rows", step))
        repeats = round(config.batch * config.repeats)
        length = config.context + 1
        starts = torch.randint(
            0, len(self.train_ids) - length + 1, (config.batch - repeats, 1), generator=generator
        )
        rows = self.train_ids[starts + torch.arange(length)]
        longest = config.context // 2
        return torch.cat(
            [
                rows,
                corpus.repeated_tokens(
                    repeats,
                    length,
                    self.vocab,
                    generator,
                    shortest=min(SHORTEST_PERIOD, longest),
                    longest=longest,
                ),
            ]
        )

    def held_out_loss(self) -> float:
        """Return the mean loss on the held-out text, in nats per token."""
        return float(self._losses(self.inputs, self.targets).double().mean())

    def repeat_losses(self) -> tuple[float, float]:
        """Return the mean loss on the first and the second copy of random tokens, in nats per
        token."""
        period = self.config.context // 2
        generator = torch.Generator().manual_seed(_seed(self.config.seed, "repeats", -1))
        rows = corpus.repeated_tokens(
            16, 2 * period, self.vocab, generator, shortest=period, longest=period
        )
        losses = self._losses(rows[:, :-1], rows[:, 1:]).double()
        # The first token of the second copy cannot be predicted: nothing marks the start of a copy.
        return float(losses[:, : period - 1].mean()), float(losses[:, period:].mean())

    def save(self, folder: Path) -> None:
        """Write checkpoint, model and tokenizer; each file is written completely or not at all."""
        whole = self.ranks.full_model(self.model)
        if not self.step:  # an earlier run may have used the other format
            self._remove_other(folder)
        self.ranks.shared(lambda: whole.save_pretrained(folder, self.tokenizer))
        about = {"step": self.step, "settings": asdict(self.config), "text": self.fingerprint}
        if self.ranks.size == 1:
            checkpoint.write(folder, self.model, self.optimizer, about)
        else:
            checkpoint.write_sharded(folder, self.model, self.optimizer, about, self.ranks.shared)
        self._remove_other(folder)

    def _remove_other(self, folder: Path) -> None:
        """Remove the checkpoint in the format that this run does not write."""
        if self.ranks.size == 1:
            checkpoint.remove_sharded(folder)
        else:
            self.ranks.shared(lambda: (folder / checkpoint.CHECKPOINT).unlink(missing_ok=True))

    def finite(self) -> bool:
        """Return True if all weights are finite, on all ranks."""
        wrong = sum(int((~_here(p).isfinite()).sum()) for p in self.model.parameters())
        return not float(self.ranks.total(torch.tensor(float(wrong))))

    def _model(self) -> GPT:
        config = self.config
        with _seeded(torch.device("cpu"), config.seed, "weights", -1):
            model = GPT(_sizes(config, self.tokenizer))
        if config.sinusoids:
            table = model.transformer.wpe.weight
            start = sinusoids(
                config.context, config.width, config.sinusoid_std, config.sinusoid_base
            )
            with torch.no_grad():
                table.copy_(start)
        return model

    def _check_lengths(self) -> None:
        need = self.config.context + 1
        if len(self.train_ids) < need:
            raise corpus.TextError(
                f"{self.corpus.source}: {len(self.train_ids)} tokens to train on, but context="
                f"{self.config.context} needs {need}; use more text or a shorter context"
            )
        if len(self.held_ids) < 2:
            raise corpus.TextError(f"{self.corpus.source} is too short to hold out a part")

    def _autocast(self) -> torch.autocast:
        dtype = self.config.dtype
        on = dtype == "bfloat16" or (dtype == "auto" and self.device.type == "cuda")
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=on)

    @torch.no_grad()
    def _losses(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Compute the loss of every target, `[B, T]`; each row runs on one rank."""
        self.model.eval()
        losses, size, rank = torch.zeros(inputs.shape), self.ranks.size, self.ranks.rank
        for rows in torch.arange(len(inputs)).split(EVALUATED_ROWS * size):
            own = rows.tensor_split(size)[rank]
            used = own if len(own) else rows[:1]  # all ranks must run the model equally often
            logits = _at_least_float(self.model(inputs[used].to(self.device)))
            wanted = targets[used].to(self.device)
            loss = F.cross_entropy(logits.transpose(1, 2), wanted, reduction="none")
            losses[own] = loss[: len(own)].to("cpu", losses.dtype)
        return self.ranks.total(losses)


def _texts(config: TrainConfig, tokenizer: Tokenizer | None) -> tuple[corpus.Corpus, Tokenizer]:
    """Read the texts, and train their tokenizer unless it is given."""
    texts = corpus.files(config.texts, config.held_out) if config.texts else None
    texts = texts or corpus.manual(config.held_out)
    return texts, tokenizer or corpus.train_tokenizer(texts.train, config.vocab)


def _at_least_float(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _here(parameter: Tensor) -> Tensor:
    """Return the shard of a parameter on this rank: all of it, unless it is sharded."""
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter  # pyright: ignore


def windows(
    ids: Int[Tensor, " N"], context: int, most: int = EVALUATED_WINDOWS
) -> tuple[Int[Tensor, "B T"], Int[Tensor, "B T"]]:
    """Return consecutive windows of a text, inputs and targets; each token is a target at most
    once.

    There are at most `most` windows, from the start; an incomplete last window is omitted unless
    it is the only one.

    >>> inputs, targets = windows(torch.arange(8), context=3)
    >>> inputs.tolist(), targets.tolist()
    ([[0, 1, 2], [3, 4, 5]], [[1, 2, 3], [4, 5, 6]])
    """
    context = min(context, len(ids) - 1)
    count = min(most, (len(ids) - 1) // context)
    size = count * context
    return ids[:size].view(count, context), ids[1 : size + 1].view(count, context)


def _settings(saved: dict[str, Any], path: Path) -> TrainConfig:
    """Return the settings in a checkpoint.

    Raises:
        FolderError: a setting is unknown or out of range.
    """
    known = {field.name for field in fields(TrainConfig)}
    if unknown := saved.keys() - known:
        raise FolderError(f"{path} was written by another version (setting {sorted(unknown)[0]!r})")
    texts = saved.get("texts", [])
    if not (isinstance(texts, list) and all(isinstance(text, str) for text in texts)):
        raise FolderError(f"{path}: texts must be a list of files, got {texts!r}")
    try:
        return TrainConfig(**{**saved, "texts": tuple(texts)})
    except ValueError as error:
        raise FolderError(f"{path}: {error}") from None


def _sizes(config: TrainConfig, tokenizer: Tokenizer) -> GPTConfig:
    """Return the model configuration for the settings."""
    end = tokenizer.token_to_id(corpus.END_OF_TEXT)
    return GPTConfig(
        vocab_size=tokenizer.get_vocab_size(),
        n_positions=config.context,
        n_embd=config.width,
        n_layer=config.layers,
        n_head=config.heads,
        resid_pdrop=config.dropout,
        embd_pdrop=config.dropout,
        attn_pdrop=0.0,
        initializer_range=config.width**-0.5,  # GPT-2's 0.02 suits width 768; it is slow at 128
        bos_token_id=end,
        eos_token_id=end,
    )


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(f"device must be auto, cpu or cuda, got {name!r}") from None
    if device.type == "meta":
        raise ValueError(f"device={name!r} has no values; use cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={name!r}: PyTorch finds no CUDA device; use cpu")
    return device


def _optimizer(model: GPT, config: TrainConfig) -> torch.optim.AdamW:
    """Create AdamW with weight decay for matrices only: not for biases, norms and the position
    table."""
    named = dict(model.named_parameters())
    spared = {"transformer.wpe.weight"}
    decayed = [p for name, p in named.items() if p.dim() == 2 and name not in spared]
    rest = [p for name, p in named.items() if p.dim() != 2 or name in spared]
    groups = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": rest, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95), fused=True)


def _seed(seed: int, purpose: str, step: int) -> int:
    """Return a separate 32-bit seed for each purpose and step."""
    digest = hashlib.sha256(f"{seed} {purpose} {step}".encode()).digest()
    return int.from_bytes(digest[:4], "little")


@contextlib.contextmanager
def _seeded(device: torch.device, seed: int, purpose: str, step: int) -> Iterator[None]:
    """Seed the global generators, then restore their state."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(_seed(seed, purpose, step))
        yield

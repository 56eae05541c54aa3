"""The input of a forward pass, and the interface to models that read it."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from .._text import one_line
from ..models.corpus import TextError, repeated_tokens
from .head_labels import is_delimiter
from .schema import Stream
from .tokens import AnyTokenizer, Encoded, LookError, TokenStrings, ids_of

DEFAULT_CONTEXT = 2048  # tokens of a text that are read by default
RANDOM_ROWS = 8
RANDOM_PERIOD = 50  # Olsson et al. 2022 repeat 50 random tokens
CANDIDATES = 4096  # the number of sampled tokens to search for tokens of letters
STRETCH = 256  # tokens whose logits are converted to float64 at a time

_CROSS = re.compile(r"cross|enc(oder)?_?(dec|attn)", re.IGNORECASE)


@dataclass(frozen=True, eq=False)
class Part:
    """A stream as tensors: its tokens `[S]` or `[B, S]`, and masks `[S]` of delimiters and
    separators."""

    stream: Stream
    ids: Int[Tensor, "*B S"] | None = None
    delimiters: Bool[Tensor, " S"] | None = None
    separators: Bool[Tensor, " S"] | None = None

    def __len__(self) -> int:
        return len(self.stream.tokens)


@dataclass(frozen=True, eq=False)
class Sample:
    """One forward pass: `inputs`, the keyword arguments; `parts`, the streams that the model reads;
    `labels`, the targets of its loss. `total` is the number of tokens of the whole text.

    `encoder` holds the name prefixes of modules that read the first of two streams. `period` is the
    number of random tokens before they repeat.
    """

    inputs: dict[str, Tensor]
    parts: list[Part]
    total: int
    labels: Tensor | None = None
    encoder: tuple[str, ...] = ()
    period: int = 0

    def place(self, module: str, queries: int, keys: int) -> tuple[str, int, int]:
        """Return `self` or `cross`, and the indices of the streams of a call's queries and keys.

        In an encoder–decoder model, modules inside the encoder read the first stream. In the
        decoder, streams are identified by length, or by module name if the lengths are equal. A
        length that matches no stream adds a new stream of numbered positions.
        """
        if len(self.parts) > 1 and not module.startswith(self.encoder):
            lengths = [len(part) for part in self.parts[:2]]
            cross = keys == lengths[0] and (keys != lengths[1] or bool(_CROSS.search(_end(module))))
            if queries == lengths[1] and cross:
                return "cross", 1, 0
            if queries == lengths[1] == keys:
                return "self", 1, 1
        places = self._of_length(queries), self._of_length(keys)
        return ("self" if places[0] == places[1] else "cross", *places)

    def _of_length(self, length: int) -> int:
        for number, part in enumerate(self.parts):
            if len(part) == length:
                return number
        tokens = [str(position) for position in range(length)]
        self.parts.append(Part(Stream(f"{length} positions", tokens)))
        return len(self.parts) - 1


@contextmanager
def as_look_error(model: nn.Module) -> Iterator[None]:
    """Convert the errors of a model on unsuitable inputs to `LookError`."""
    try:
        yield
    except (RuntimeError, IndexError, TypeError) as error:
        message = one_line(error)
        rows = [one.num_embeddings for one in model.modules() if isinstance(one, nn.Embedding)]
        if isinstance(error, IndexError) and rows:
            tables = " and ".join(f"{number:,}" for number in sorted({*rows}))
            message += (
                f"; its tables have {tables} rows, and a token or position is out of range: "
                f"the tokenizer belongs to another model, or context= is too long"
            )
        raise LookError(f"{type(model).__name__} cannot run on this input: {message}") from error


def _end(module: str) -> str:
    """Return the last two parts of a qualified name."""
    return ".".join(module.split(".")[-2:])


class Subject(ABC):
    """A model to look at: its calling convention and its input.

    kind: a description of the model. loss_of: a description of its loss; empty if it has none.
    longest: the maximum number of tokens that it reads, if limited.
    """

    kind: str
    loss_of: str = ""
    longest: int | None = None

    def __init__(self, model: nn.Module, context: int | None) -> None:
        self.model, self.context = model, context

    @property
    def limit(self) -> int:
        """Return the number of tokens of a text that are read.

        Raises:
            LookError: the context is longer than that of the model, or too short.
        """
        longest = self.longest
        if self.context is None:
            return DEFAULT_CONTEXT if longest is None else min(longest, DEFAULT_CONTEXT)
        if self.context < 2 or (longest is not None and self.context > longest):
            bounds = "2 on" if longest is None else f"2 to {longest}"
            what = "" if longest is None else f"the model's context is {longest} tokens, so "
            raise LookError(f"context {self.context}: {what}pass a number from {bounds}")
        return self.context

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @abstractmethod
    def sample(self, text: Any, name: str) -> Sample:
        """Prepare a text or an image for the model.

        Raises:
            TextError: the text has fewer than two tokens.
        """

    def repeats(
        self,
        seed: int,
        rows: int = RANDOM_ROWS,
        period: int = RANDOM_PERIOD,
        *,
        legible: bool = False,
    ) -> Sample | None:
        """Return rows of at most `period` random tokens, repeated; `None` if no tokens are read.

        legible: use only distinct tokens that consist of letters, if there are enough.
        """
        return None

    @abstractmethod
    def logits(self, sample: Sample) -> Tensor | None:
        """Run the model; return its logits, if it has any."""

    def losses(self, sample: Sample) -> Tensor | None:
        """Run the model; return its loss on each label in nats, `[B, labels]`, if it has one."""
        logits = self.logits(sample)
        return None if logits is None else self.losses_of(sample, logits)

    def losses_of(self, sample: Sample, logits: Tensor) -> Tensor | None:
        """Compute the losses of these logits."""
        return None

    def mean_loss(self, model: nn.Module, sample: Sample) -> Tensor:
        """Return the loss of each row `[B]`, for `importance()` and `ablation_scan()`."""
        losses = self.losses(sample)
        assert losses is not None  # only called for models that have a loss
        return losses.mean(1)


class TokenSubject(Subject):
    """A model that reads tokens."""

    words: AnyTokenizer
    vocab: int
    ends: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())

    def encoded(self, text: Any, name: str) -> Encoded:
        """Encode the text as token ids: at least two, including one that is not a special token.

        Raises:
            LookError: `text` is not a text, or has token ids that the model does not have.
            TextError: the text has fewer than two tokens.
        """
        ids = ids_of(text)
        if ids is not None:
            encoded = self._encoded_ids(ids)
        elif isinstance(text, str):
            encoded = self.words.encode(text, self.limit)
        else:
            raise LookError(
                f"{name} ({type(text).__name__}) is not a string, but {type(self.model).__name__} "
                f"reads text; pass a string (--text FILE) or a list of token ids"
            )
        extra = len(encoded.special)
        own = len(encoded.ids) - extra
        if len(encoded.ids) < 2 or not own:
            added = f" and {extra} that the tokenizer adds" if extra else ""
            raise TextError(
                f"{name}: {own} token(s) long{added}; at least 2 are required; pass a longer text"
            )
        if max(encoded.ids) >= self.vocab or min(encoded.ids) < 0:
            odd = max(encoded.ids) if max(encoded.ids) >= self.vocab else min(encoded.ids)
            size = self.words.size
            which = "" if size is None else f" of {size:,}"
            raise LookError(
                f"{name}: token id {odd} in a model of {self.vocab:,} tokens; the model "
                f"({type(self.model).__name__}) and the tokenizer{which} do not belong together"
            )
        return encoded

    def _encoded_ids(self, ids: list[int]) -> Encoded:
        """Wrap ids that were passed in place of a text."""
        kept = ids[: self.limit]
        special, size = self.words.special, self.words.size
        if size is not None and size <= max(kept, default=0) < self.vocab:
            raise LookError(
                f"the ids contain token {max(kept):,}, but there are strings for {size:,} tokens; "
                f"pass one for each of the model's {self.vocab:,} ids, or a dict {{id: string}}"
            )
        places = tuple(place for place, one in enumerate(kept) if one in special)
        return Encoded(kept, places, len(ids), self.words.pieces(kept))

    def part(
        self, name: str, ids: list[int], special: tuple[int, ...], pieces: list[str] | None = None
    ) -> Part:
        """Return a stream of tokens. Delimiters are found by their text; special tokens are
        separators, except at the first position."""
        tokens = self.words.texts(ids)
        delimiters = [
            is_delimiter(text) and place not in special for place, text in enumerate(tokens)
        ]
        separators = [place > 0 and place in special for place in range(len(ids))]
        return Part(
            Stream(name, tokens, special, pieces=pieces),
            torch.tensor(ids, device=self.device),
            torch.tensor(delimiters, device=self.device),
            torch.tensor(separators, device=self.device) if any(separators) else None,
        )

    def repeats(
        self,
        seed: int,
        rows: int = RANDOM_ROWS,
        period: int = RANDOM_PERIOD,
        *,
        legible: bool = False,
    ) -> Sample:
        return self.sample_of_repeats(*self.twice(seed, rows, period, legible))

    @abstractmethod
    def sample_of_repeats(self, ids: Tensor, before: int, period: int) -> Sample:
        """Prepare rows of `twice()` for the model."""

    def random_part(self, name: str, ids: Tensor) -> Part:
        """Return a stream of rows of random tokens `[B, S]`, with the texts of the first row."""
        row = ids[0].tolist()
        special = tuple(place for place, one in enumerate(row) if one in self.words.special)
        return Part(Stream(name, self.words.texts(row), special), ids)

    def twice(self, seed: int, rows: int, period: int, legible: bool) -> tuple[Tensor, int, int]:
        """Return rows of repeated random tokens, with the tokens that the tokenizer adds before and
        after a text; the number of those before; and the period.

        Special tokens are not sampled.
        """
        before, after = self.ends
        limit = DEFAULT_CONTEXT if self.longest is None else self.longest
        period = max(1, min(period, (limit - len(before) - len(after)) // 2))
        known = min(self.vocab, self.words.size or self.vocab)
        special = self.words.special
        drawable = torch.tensor([number for number in range(known) if number not in special])
        generator = torch.Generator().manual_seed(seed)
        if legible:
            drawable = self._legible(drawable, period, generator)
            period = min(period, len(drawable))
            orders = [torch.randperm(len(drawable), generator=generator) for _ in range(rows)]
            drawn = torch.stack([order[:period].repeat(2) for order in orders]) + 1
        else:
            drawn = repeated_tokens(
                rows, 2 * period, len(drawable) + 1, generator, shortest=period, longest=period
            )
        parts = [drawable[drawn - 1]]
        for place, tokens in ((0, before), (2, after)):
            parts.insert(place, torch.tensor(tokens, dtype=torch.long).expand(rows, -1))
        return torch.cat(parts, 1).to(self.device), len(before), period

    def _legible(self, ids: Tensor, number: int, generator: torch.Generator) -> Tensor:
        """Return the distinct tokens that consist of letters, or all tokens if there are fewer than
        `number`."""
        some = ids[torch.randperm(len(ids), generator=generator)[:CANDIDATES]]
        texts = [text.strip() for text in self.words.texts(some.tolist())]
        letters = {text: place for place, text in enumerate(texts) if text.isalpha()}
        ascii_alone = {text: place for text, place in letters.items() if text.isascii()}
        for found in (ascii_alone, letters):
            if len(found) >= number:
                return some[list(found.values())]
        return ids


def ends_of(words: AnyTokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the tokens that a tokenizer puts before and after a text."""
    if isinstance(words, TokenStrings):
        return (), ()
    encoded = words.encode("a a")
    bare = [place for place in range(len(encoded.ids)) if place not in encoded.special]
    first, last = (bare[0], bare[-1]) if bare else (len(encoded.ids), len(encoded.ids))
    return tuple(encoded.ids[:first]), tuple(encoded.ids[last + 1 :])


def cross_entropy(
    logits: Float[Tensor, "B T V"], labels: Int[Tensor, "B T"]
) -> Float[Tensor, "B T"]:
    """Return the loss on each label, in nats and float64, computed in chunks of tokens."""
    parts = zip(logits.split(STRETCH, 1), labels.split(STRETCH, 1), strict=True)
    return torch.cat(
        [F.cross_entropy(some.mT.double(), of, reduction="none") for some, of in parts], 1
    )

"""Texts for training and inspection: Python's manual, files, byte-level BPE, baselines.

The built-in text is the manual in every CPython, `pydoc_data.topics` (the output of
`help("with")`). It is read at run time, so it depends on the version of Python.
"""

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from jaxtyping import Int
from torch import Tensor

from .._text import must_be_text

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_TEXT = "<|endoftext|>"
SMALLEST_VOCAB = 257  # 256 bytes and the end of a text


class TextError(ValueError):
    """A text that cannot be read or is too short to use."""


@dataclass(frozen=True)
class Corpus:
    """Training documents, held-out documents, and the rule that separates them."""

    train: tuple[str, ...]
    held_out: tuple[str, ...]
    source: str
    rule: str


def manual_topics() -> dict[str, str]:
    """Return the topics of Python's own manual, by name, in alphabetical order.

    Raises:
        TextError: this Python was installed without `pydoc_data`.

    >>> "with" in manual_topics()
    True
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise TextError(
            "this Python has no manual (pydoc_data.topics is missing); name a text file of your own"
        ) from None
    return {name: topics[name].replace("\r\n", "\n") for name in sorted(topics)}


def manual(held_out: float = 0.1) -> Corpus:
    """Return the manual as a corpus; the last fraction `held_out` of topics by name is held out.

    Topics quote one another (`typesseq` contains `typesseq-mutable`), so every paragraph of a
    held-out topic is also removed from the training topics.

    Raises:
        TextError: `held_out` is not between 0 and 1, or no manual is installed.

    >>> corpus = manual()
    >>> any('The "with" statement is used to wrap' in text for text in corpus.train)
    False
    """
    _check_share(held_out)
    topics = manual_topics()
    names = list(topics)
    kept = names[len(names) - math.ceil(held_out * len(names)) :]
    seen = {_words(part) for name in kept for part in _paragraphs(topics[name])}
    train = []
    for name in names[: len(names) - len(kept)]:
        text = "\n\n".join(p for p in _paragraphs(topics[name]) if _words(p) not in seen)
        if text.strip():
            train.append(text)
    version = ".".join(map(str, sys.version_info[:3]))
    return Corpus(
        tuple(train),
        tuple(topics[name] for name in kept),
        f"the manual of CPython {version} (pydoc_data.topics)",
        f"the last {len(kept)} of {len(names)} topics by name "
        f"({kept[0]} to {kept[-1]}) are held out, and their paragraphs are removed from the others",
    )


def manual_passage(topic: str = "with") -> str:
    """Return one topic of the manual; the default is one that `manual` holds out.

    Raises:
        TextError: the topic does not exist.

    >>> manual_passage().startswith("The")
    True
    """
    topics = manual_topics()
    if topic not in topics:
        raise TextError(f"no topic {topic!r} in Python's manual; help('topics') lists them")
    return topics[topic].strip() + "\n"


def files(paths: Sequence[str | Path], held_out: float = 0.1) -> Corpus:
    """Read files as a corpus; the last fraction `held_out` of each, from a line start, is held out.

    Raises:
        TextError: a file is missing, empty or not UTF-8; `held_out` is not between 0 and 1.
    """
    _check_share(held_out)
    train, kept = [], []
    for path in paths:
        text = read_text(path)
        cut = text.find("\n", int(len(text) * (1 - held_out))) + 1
        cut = cut if 0 < cut < len(text) else int(len(text) * (1 - held_out))
        train.append(text[:cut])
        kept.append(text[cut:])
    share = f"{100 * held_out:g} %"
    return Corpus(
        tuple(train),
        tuple(kept),
        ", ".join(str(path) for path in paths),
        f"the last {share} of each file are held out",
    )


def read_text(path: str | Path) -> str:
    """Read the text of a file, or of standard input for `-`.

    Raises:
        TextError: it is missing, a directory, empty (or only white space) or not UTF-8.
    """
    name = "standard input" if str(path) == "-" else str(path)
    try:
        data = sys.stdin.buffer.read() if str(path) == "-" else Path(path).read_bytes()
    except FileNotFoundError:
        raise TextError(f"{name}: no such file") from None
    except IsADirectoryError:
        raise TextError(f"{name} is a directory, not a text file") from None
    except OSError as error:
        raise TextError(f"{name} cannot be read: {error.strerror}") from None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TextError(
            f"{name}: not UTF-8 (byte 0x{data[error.start]:02x} at offset {error.start}); "
            f"convert it first, for example with iconv -f latin1 -t utf8"
        ) from None
    if not text.strip():
        raise TextError(f"{name}: the text is empty")
    return text.replace("\r\n", "\n")


def encode(tokenizer: "Tokenizer", text: str, name: str = "the text") -> list[int]:
    """Encode a text as at least two token ids: attention over one token is always 1.

    Raises:
        TextError: the text has fewer than two tokens.
    """
    must_be_text(text, name)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    if len(ids) < 2:
        raise TextError(f"{name} must have at least 2 tokens, got {len(ids)}; use a longer text")
    return ids


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> "Tokenizer":
    """Train byte-level BPE (Sennrich et al. 2016, on bytes as in GPT-2) on `texts`.

    Any text can be encoded and decoded without change. Id 0 is `<|endoftext|>`. A short text may
    give fewer than `vocab_size` tokens.

    Raises:
        ValueError: `vocab_size` is below 257 (256 bytes and the end of a text).

    >>> tokenizer = train_tokenizer(["no no no, yes yes"], vocab_size=260)
    >>> tokenizer.decode(tokenizer.encode("no, naïve").ids)
    'no, naïve'
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocab_size < SMALLEST_VOCAB:
        raise ValueError(
            f"vocab_size={vocab_size}: byte-level BPE needs at least {SMALLEST_VOCAB} "
            f"(256 bytes and {END_OF_TEXT})"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def join(tokenizer: "Tokenizer", texts: Iterable[str]) -> Int[Tensor, " N"]:
    """Encode texts as one row of ids, each ended by `<|endoftext|>`.

    Raises:
        TextError: the tokenizer has no such token.
    """
    end = tokenizer.token_to_id(END_OF_TEXT)
    if end is None:
        raise TextError(f"the tokenizer has no {END_OF_TEXT}, which must end every text")
    ids: list[int] = []
    for encoding in tokenizer.encode_batch(list(texts), add_special_tokens=False):
        ids += encoding.ids
        ids.append(end)
    return torch.tensor(ids, dtype=torch.long)


def repeated_tokens(
    rows: int,
    length: int,
    vocab_size: int,
    generator: torch.Generator,
    *,
    shortest: int,
    longest: int,
) -> Int[Tensor, "rows length"]:
    """Generate rows that repeat a block of random tokens (Olsson et al. 2022).

    Each row samples a period from `shortest` to `longest`, then that many ids from 1 to
    `vocab_size - 1` (0 ends a text), and repeats them up to `length` ids.

    >>> g = torch.Generator().manual_seed(0)
    >>> row = repeated_tokens(1, 7, 300, g, shortest=3, longest=3)[0]
    >>> bool((row[3:6] == row[:3]).all() and row[6] == row[0])
    True
    """
    if not 1 <= shortest <= longest:
        raise ValueError(
            f"repeated_tokens(shortest={shortest}, longest={longest}): a period has at least one "
            f"token, and shortest must not exceed longest"
        )
    periods = torch.randint(shortest, longest + 1, (rows, 1), generator=generator)
    blocks = torch.randint(1, vocab_size, (rows, longest), generator=generator)
    return blocks.gather(1, torch.arange(length)[None, :] % periods)


def unigram_loss(train: Int[Tensor, " N"], targets: Int[Tensor, "..."], vocab: int) -> float:
    """Return the mean loss, in nats per token, of add-one unigram frequencies of `train` on
    `targets`."""
    counts = torch.bincount(train, minlength=vocab).double() + 1
    return float(-(counts / counts.sum()).log()[targets.flatten()].mean())


def bigram_loss(train: Int[Tensor, " N"], inputs: Tensor, targets: Tensor, vocab: int) -> float:
    """Return the mean loss, in nats per token, of a bigram model of `train`: `targets` after
    `inputs`.

    The model is interpolated Kneser–Ney (Kneser and Ney 1995; Chen and Goodman 1999, eq. 21) with
    the discount `n1 / (n1 + 2·n2)` and a uniform fallback, the strongest such model in common use.
    """
    pairs, counts = torch.unique(train[:-1] * vocab + train[1:], return_counts=True)
    counts = counts.double()
    once, twice = int((counts == 1).sum()), int((counts == 2).sum())
    discount = once / (once + 2 * twice) if once else 0.5
    first, second = pairs // vocab, pairs % vocab

    followers = torch.bincount(first, minlength=vocab).double()  # distinct tokens after each
    preceders = torch.bincount(second, minlength=vocab).double()  # distinct tokens before each
    total = torch.zeros(vocab, dtype=torch.double).index_add_(0, first, counts)
    spare = discount * float((preceders > 0).sum()) / len(pairs)
    lower = (preceders - discount).clamp(min=0) / len(pairs) + spare / vocab

    inputs, targets = inputs.flatten(), targets.flatten()
    wanted = inputs * vocab + targets
    place = torch.searchsorted(pairs, wanted).clamp(max=len(pairs) - 1)
    seen = torch.where(pairs[place] == wanted, counts[place] - discount, 0.0).clamp(min=0)
    history = total[inputs]
    known = history > 0
    safe = history.clamp(min=1)
    mixed = seen / safe + discount * followers[inputs] / safe * lower[targets]
    return float(-torch.where(known, mixed, lower[targets]).log().mean())


def _paragraphs(text: str) -> list[str]:
    return text.split("\n\n")


def _words(text: str) -> str:
    """Return a paragraph with normalized white space, to compare quotations."""
    return " ".join(text.split())


def _check_share(held_out: float) -> None:
    if not 0 < held_out < 1:
        raise TextError(f"held_out must be between 0 and 1, got {held_out}")

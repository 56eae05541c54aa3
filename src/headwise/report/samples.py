"""Read texts or images one at a time and convert them to model inputs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from ..models.corpus import TextError
from .sample import Sample, Subject
from .tokens import ids_of


class Samples:
    """The samples of one text or several; with several, those that are too short are skipped.

    Several ranks divide the samples: rank 0 gets the first text that can be read, and the following
    texts go to the ranks in turn.

    again: True if they can be iterated more than once. number: the number for all ranks, if known.
    read, short: the numbers of this rank's samples that were read and skipped in the last pass.
    """

    def __init__(
        self, subject: Subject, text: Any, name: str, rank: int = 0, ranks: int = 1
    ) -> None:
        self.subject, self.name = subject, name
        one = isinstance(text, str | bytes) or ids_of(text) is not None
        self.many = not one and isinstance(text, Iterable)
        self._texts: Any = text if self.many else [text]
        self._rank, self._ranks = rank, ranks
        self.again = not isinstance(text, Iterator)
        self.number = len(self._texts) if isinstance(self._texts, Sized) else None
        self.read = self.short = 0

    @property
    def first(self) -> Sample:
        """Return the first sample that can be read, of any rank.

        Raises:
            TextError: no text has at least two tokens.
        """
        return self._first[1]

    @cached_property
    def _first(self) -> tuple[int, Sample]:
        """Return the index of the first text that can be read, and its sample."""
        texts, before = iter(self._texts), []
        for number, text in enumerate(texts):
            before.append(text)
            if (sample := self._sample(number, text)) is not None:
                if not self.again:
                    self._texts = chain(before, texts)
                return number, sample
        raise TextError(f"{self.name}: contains no text of at least 2 tokens")

    def _sample(self, number: int, text: Any) -> Sample | None:
        name = f"{self.name}, text {number + 1}" if self.many else self.name
        try:
            return self.subject.sample(text, name)
        except TextError:
            if not self.many:
                raise
            return None

    def _own(self, number: int) -> bool:
        """Return True if a text belongs to this rank."""
        after = number - self._first[0]
        return after % self._ranks == self._rank if after >= 0 else self._rank == 0

    def __len__(self) -> int:
        """Return the number of texts for this rank, including those that are too short."""
        return self.read if self.number is None else sum(map(self._own, range(self.number)))

    def __iter__(self) -> Iterator[Sample]:
        self.read = self.short = 0
        begin, first = self._first
        for number, text in enumerate(self._texts):
            if not self._own(number):
                continue
            sample = self._sample(number, text) if number > begin else None
            sample = first if number == begin else sample
            if sample is None:
                self.short += 1
            else:
                self.read += 1
                yield sample


class TextFile:
    """The texts of a file, one per nonblank line; or of the `.txt` files in a folder, one per
    file, sorted by name.

    Raises:
        TextError: the file or folder does not exist, has no text, or is not UTF-8.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._files = sorted(self.path.glob("*.txt")) if self.path.is_dir() else None
        self._number = sum(1 for _ in self._lines()) if self._files is None else len(self._files)
        if not self._number:
            there = "no .txt file in this folder" if self._files == [] else "the text is empty"
            raise TextError(f"{self.path}: {there}")

    def __len__(self) -> int:
        return self._number

    def __iter__(self) -> Iterator[str]:
        return self._lines() if self._files is None else map(_read_whole, self._files)

    def _lines(self) -> Iterator[str]:
        with _as_text_error(self.path), self.path.open(encoding="utf-8-sig") as file:
            for line in file:
                if line.strip():
                    yield line.rstrip("\n")


def _read_whole(path: Path) -> str:
    with _as_text_error(path):
        return path.read_text(encoding="utf-8-sig")


@contextmanager
def _as_text_error(path: Path) -> Iterator[None]:
    """Convert read errors to `TextError`."""
    try:
        yield
    except FileNotFoundError:
        raise TextError(f"{path}: no such file or folder") from None
    except UnicodeDecodeError as error:
        raise TextError(
            f"{path}: not UTF-8 ({error.reason}); convert it first, for example with "
            f"iconv -f latin1 -t utf8"
        ) from None
    except OSError as error:
        raise TextError(f"{path}: cannot be read ({error.strerror})") from None

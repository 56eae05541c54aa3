"""One text or many, made into what a model reads, one at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from functools import cached_property
from itertools import chain
from typing import Any

from ..models.corpus import TextError
from .other_tokenizers import ids_of
from .sample import Sample, Subject


class Samples:
    """What a model reads of a text, or of each of many. Of many, those that are too short to be
    looked at are passed over.

    Several ranks share them: the first that can be read is of rank 0, and each after it is of the
    next rank.

    again: whether they can be gone through more than once. number: how many there are for all
    ranks, where that is known. read, short: how many of this rank's were looked at and passed over,
    the last time.
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
        """The first that can be read, of whichever rank.

        Raises:
            TextError: no text of at least two tokens.
        """
        return self._found[1]

    @cached_property
    def _found(self) -> tuple[int, Sample]:
        """The number of the first text that can be read, and its sample."""
        texts, before = iter(self._texts), []
        for number, text in enumerate(texts):
            before.append(text)
            if (sample := self._sample(number, text)) is not None:
                if not self.again:
                    self._texts = chain(before, texts)
                return number, sample
        raise TextError(f"{self.name}: no text of at least 2 tokens in it")

    def _sample(self, number: int, text: Any) -> Sample | None:
        name = f"{self.name}, text {number + 1}" if self.many else self.name
        try:
            return self.subject.sample(text, name)
        except TextError:
            if not self.many:
                raise
            return None

    def _own(self, number: int) -> bool:
        """Whether a text is this rank's."""
        after = number - self._found[0]
        return after % self._ranks == self._rank if after >= 0 else self._rank == 0

    def __len__(self) -> int:
        """How many there are for this rank, those that are too short included."""
        return self.read if self.number is None else sum(map(self._own, range(self.number)))

    def __iter__(self) -> Iterator[Sample]:
        self.read = self.short = 0
        begin, first = self._found
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

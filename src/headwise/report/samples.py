"""One text or many, made into what a model reads, one at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from typing import Any

from ..models.data import TextError
from .sample import Sample, Subject

__all__ = ["Samples"]


class Samples:
    """What a model reads of a text, or of each of many. Of many, those that are too short to be
    looked at are passed over.

    again: whether they can be gone through more than once. read, short: how many were looked at
    and passed over, the last time.
    """

    def __init__(self, subject: Subject, text: Any, name: str) -> None:
        self.subject, self.name = subject, name
        self.many = not isinstance(text, str | bytes) and isinstance(text, Iterable)
        self._texts: Any = text if self.many else [text]
        self.again = not isinstance(text, Iterator)
        self.read = self.short = 0

    @property
    def number(self) -> int | None:
        """How many texts there are, where that is known."""
        return len(self._texts) if isinstance(self._texts, Sized) else None

    def __len__(self) -> int:
        return self.read if self.number is None else self.number

    def __iter__(self) -> Iterator[Sample]:
        self.read = self.short = 0
        for number, text in enumerate(self._texts, start=1):
            name = f"{self.name}, text {number}" if self.many else self.name
            try:
                sample = self.subject.sample(text, name)
            except TextError:
                if not self.many:
                    raise
                self.short += 1
                continue
            self.read += 1
            yield sample
        if not self.read:
            raise TextError(f"{self.name}: no text of at least 2 tokens in it")

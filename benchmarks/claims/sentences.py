"""Sentences with relations between their words, marked by hand: `relations.tsv`, read.

`relations.md` says how they were marked.
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).with_name("relations.tsv")
RELATIONS = {
    "subject": ("subject", "verb"),
    "object": ("object", "verb"),
    "adjective": ("adjective", "noun"),
    "determiner": ("determiner", "noun"),
    "preposition": ("preposition", "noun"),
    "coreference": ("pronoun", "antecedent"),
}
"""The columns of pairs, and what the first and the second word of a pair is."""
HALVES = ("choose", "score")
"""What a sentence is for: heads are chosen on one half, and scored on the other."""

_WORD = re.compile(r"\w+(?:[-'’]\w+)*|[^\w\s]")
_PAIR = re.compile(r"([^>/]+)(?:/(\d+))?>([^>/]+)(?:/(\d+))?")


@dataclass(frozen=True)
class Sentence:
    """A text, its words (a punctuation mark is one) as spans of letters, and pairs of words."""

    text: str
    half: str
    spans: tuple[tuple[int, int], ...]
    pairs: dict[str, tuple[tuple[int, int], ...]]

    @property
    def words(self) -> list[str]:
        return [self.text[start:stop] for start, stop in self.spans]

    def targets(self, relation: str, backward: bool = False) -> dict[int, set[int]]:
        """The words that have a target in a relation, each with its targets.

        >>> sentence = sentence_of("Old Ann sold two red hats.", adjective="Old>Ann red>hats")
        >>> sentence.targets("adjective"), sentence.targets("adjective", backward=True)
        ({0: {1}, 4: {5}}, {1: {0}, 5: {4}})
        """
        found: dict[int, set[int]] = {}
        for pair in self.pairs[relation]:
            word, target = reversed(pair) if backward else pair
            found.setdefault(word, set()).add(target)
        return found


@dataclass(frozen=True)
class Direction:
    """A relation, read from the first word of its pairs to the second, or backward."""

    relation: str
    backward: bool = False

    @property
    def title(self) -> str:
        """
        >>> Direction("subject", backward=True).title
        'verb → subject'
        """
        return " → ".join(self.ends)

    @property
    def ends(self) -> tuple[str, str]:
        """What the word is that looks, and what its target is."""
        first, second = RELATIONS[self.relation]
        return (second, first) if self.backward else (first, second)


DIRECTIONS = tuple(Direction(name, back) for name in RELATIONS for back in (False, True))


def read(file: Path = FILE) -> list[Sentence]:
    """Every sentence, in the order of the file.

    Raises:
        ValueError: a line that cannot be read, by its number.
    """
    sentences = []
    with file.open(newline="", encoding="utf-8") as lines:
        table = csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
        for row in table:
            try:
                pairs = {name: row[name] for name in RELATIONS}
                sentences.append(sentence_of(row["sentence"], row["half"], **pairs))
            except (KeyError, AttributeError, ValueError) as error:
                raise ValueError(f"{file.name}, line {table.line_num}: {error}") from None
    return sentences


def sentence_of(text: str, half: str = HALVES[1], **pairs: str) -> Sentence:
    """A sentence, with pairs of words as `relations.tsv` writes them.

    Raises:
        ValueError: a half that is none; a pair that is none, or whose words do not stand there.

    >>> sentence_of("The man saw the sea.", determiner="The>man the>sea").pairs["determiner"]
    ((0, 1), (3, 4))
    >>> sentence_of("He saw the man and the boy.", determiner="the>man the/2>boy")
    Traceback (most recent call last):
    ValueError: the>man: 'the' stands 2 times in 'He saw the man and the boy.'; write the/1
    """
    if half not in HALVES:
        raise ValueError(f"half={half!r} is none of {', '.join(HALVES)}")
    spans = spans_of(text)
    words = [text[start:stop] for start, stop in spans]
    found: dict[str, tuple[tuple[int, int], ...]] = {name: () for name in RELATIONS}
    for name, written in pairs.items():
        found[name] = tuple(_pair(words, one, text) for one in written.split())
    return Sentence(text, half, spans, found)


def spans_of(text: str) -> tuple[tuple[int, int], ...]:
    """Where words and punctuation marks stand; what a hyphen or an apostrophe joins is one word.

    >>> sentence_of("A well-known man's 2 hats.").words
    ['A', 'well-known', "man's", '2', 'hats', '.']
    """
    return tuple(word.span() for word in _WORD.finditer(text))


def _pair(words: list[str], written: str, text: str) -> tuple[int, int]:
    parts = _PAIR.fullmatch(written)
    if parts is None:
        raise ValueError(f"{written!r} is no pair; write word>word, or word/2>word")
    return (
        _place(words, parts[1], parts[2], written, text),
        _place(words, parts[3], parts[4], written, text),
    )


def _place(words: list[str], word: str, number: str | None, written: str, text: str) -> int:
    """Where a word stands: the only one, or that of this number, from 1."""
    places = [place for place, one in enumerate(words) if one == word]
    said = f"{written}: {word!r} stands {len(places)} times in {text!r}"
    if number is None:
        if len(places) > 1:
            raise ValueError(f"{said}; write {word}/1")
        number = "1"
    if not 1 <= int(number) <= len(places):
        raise ValueError(said)
    return places[int(number) - 1]

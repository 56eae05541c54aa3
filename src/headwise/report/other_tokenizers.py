"""Tokens as text without a tokenizer of `tokenizers` or `transformers`: any other one that encodes
and decodes, or a string for each id."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .._text import must_be_text
from .text import Encoded, LookError, Vocabulary, pieces_by_decoding


def words_of(tokenizer: Any, *, add_special: bool = True) -> Words:
    """What a look needs of whatever was given as tokenizer.

    Raises:
        LookError: something that is none.
    """
    if Vocabulary.takes(tokenizer):
        return Vocabulary(tokenizer, add_special=add_special)
    if callable(getattr(tokenizer, "encode", None)) and callable(
        getattr(tokenizer, "decode", None)
    ):
        return OtherTokenizer(tokenizer)
    if tokenizer is None or (
        isinstance(tokenizer, Mapping | Sequence) and not isinstance(tokenizer, str | bytes)
    ):
        return TokenStrings(tokenizer)
    raise _no_tokenizer(tokenizer)


def ids_of(text: Any) -> list[int] | None:
    """Token ids that were given in place of a text: a tensor `[T]`, an array or a list of whole
    numbers; None of anything else.

    >>> ids_of([3, 1, 2]), ids_of(torch.tensor([[3, 1]])), ids_of(["so"]), ids_of("so")
    ([3, 1, 2], [3, 1], None, None)
    """
    if not isinstance(text, Tensor):
        if type(text).__module__ == "numpy":
            text = torch.as_tensor(text)
        elif isinstance(text, list | tuple) and text and all(type(one) is int for one in text):
            text = torch.tensor(text)
        else:
            return None
    whole = not (text.is_floating_point() or text.is_complex() or text.dtype == torch.bool)
    if text.dim() == 2 and len(text) == 1:
        text = text[0]
    return text.tolist() if whole and text.dim() == 1 else None


class OtherTokenizer:
    """Any object that encodes a text as ids and decodes ids as text: tiktoken's, SentencePiece's,
    one of one's own.

    >>> class Letters:
    ...     def encode(self, text): return [ord(one) - 97 for one in text]
    ...     def decode(self, ids): return "".join(chr(97 + one) for one in ids)
    >>> words = OtherTokenizer(Letters())
    >>> words.encode("abba").ids, words.texts([2, 0])
    ([0, 1, 1, 0], ['c', 'a'])
    """

    special: frozenset[int] = frozenset()
    mask: int | None = None
    longest: int | None = None

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    @property
    def size(self) -> int | None:
        """How many ids there are, where the tokenizer says so."""
        for name in ("n_vocab", "vocab_size", "get_vocab_size", "get_piece_size", "__len__"):
            found = getattr(self.tokenizer, name, None)
            found = found() if callable(found) else found
            if isinstance(found, int) and found > 0:
                return found
        return None

    def encode(self, text: str, limit: int | None = None, *, target: bool = False) -> Encoded:
        must_be_text(text, f"{'target' if target else 'text'} {text!r:.80}")
        given = self.tokenizer.encode(text)
        ids = ids_of(getattr(given, "ids", given))
        if ids is None and len(given):
            kind = type(self.tokenizer).__name__
            raise LookError(
                f"{kind}.encode({text!r:.40}) gives {given!r:.60}; a list of token ids is needed"
            )
        ids = ids or []
        kept = ids[:limit]
        return Encoded(kept, (), len(ids), self.pieces(kept))

    def pieces(self, ids: list[int]) -> list[str] | None:
        return pieces_by_decoding(lambda some: str(self.tokenizer.decode(some)), ids, ())

    def texts(self, ids: list[int]) -> list[str]:
        return [self._text(one) for one in ids]

    def _text(self, number: int) -> str:
        # What is drawn at random need not be an id that the tokenizer has.
        try:
            return str(self.tokenizer.decode([number]))
        except (KeyError, IndexError, ValueError, OverflowError):
            return f"<{number}>"


class TokenStrings:
    """A string for each id, in a list or a dict; without any, ids are shown as numbers.

    >>> TokenStrings(["no", "yes"]).texts([1, 0, 7])
    ['yes', 'no', '<7>']
    """

    special: frozenset[int] = frozenset()
    mask: int | None = None
    longest: int | None = None

    def __init__(self, strings: Mapping[int, str] | Sequence[str] | None) -> None:
        self.given = strings
        if isinstance(strings, Mapping):
            self._strings = dict(strings)
        else:
            self._strings = dict(enumerate(strings or ()))
        if not all(isinstance(one, str) for one in self._strings.values()) or not all(
            isinstance(one, int) for one in self._strings
        ):
            raise LookError(
                f"tokenizer={strings!r:.80}: give a string for each id, as a list or as a dict "
                f"{{id: string}}; or the model's tokenizer itself"
            )

    @property
    def size(self) -> int | None:
        """How many ids there are; unknown of a dict, which may have those of one text alone."""
        return len(self._strings) if isinstance(self.given, Sequence) else None

    def encode(self, text: str, limit: int | None = None, *, target: bool = False) -> Encoded:
        raise _no_tokenizer(self.given)

    def pieces(self, ids: list[int]) -> list[str] | None:
        return None

    def texts(self, ids: list[int]) -> list[str]:
        return [self._strings.get(one, f"<{one}>") for one in ids]


Words = Vocabulary | OtherTokenizer | TokenStrings
"""How texts become ids, and ids texts; `Vocabulary` says what each of their parts gives."""


def _no_tokenizer(tokenizer: Any) -> LookError:
    return LookError(
        f"tokenizer={tokenizer!r:.80}: the model reads text, so give its tokenizer itself, any "
        f"that has encode and decode; or token ids as the text, and a string for each id"
    )

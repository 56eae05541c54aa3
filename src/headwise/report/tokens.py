"""Encode texts as tokens and decode tokens, with a tokenizer of any type."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from .._text import must_be_text

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # SentencePiece's notation for a byte without a piece


class LookError(ValueError):
    """Raised if a model cannot read a text, or if the tokenizer does not belong to the model."""


@dataclass(frozen=True)
class Encoded:
    """A text as ids: `special` are the positions of ids that the tokenizer added, `total` is the
    number of ids of the whole text. `pieces` is the original text, cut where tokens end; for a
    tokenizer without offsets, the decoded text, or None if it cannot be cut."""

    ids: list[int]
    special: tuple[int, ...]
    total: int
    pieces: list[str] | None = None


class Vocabulary:
    """A tokenizer from `tokenizers` or `transformers`.

    Raises:
        LookError: the object is not a tokenizer.

    >>> from headwise.models.corpus import train_tokenizer
    >>> words = Vocabulary(train_tokenizer(["no no no, yes yes"], vocab_size=260))
    >>> encoded = words.encode("no, yes", limit=3)
    >>> words.texts(encoded.ids), encoded.total
    (['no', ',', ' '], 4)
    """

    def __init__(self, tokenizer: Any, *, add_special: bool = True) -> None:
        self.tokenizer, self.add_special = tokenizer, add_special
        self._plain = _of_tokenizers(tokenizer)
        if not self.takes(tokenizer):
            raise LookError(
                f"tokenizer={tokenizer!r:.80} is not a tokenizer of tokenizers or transformers"
            )
        if self._plain and (tokenizer.truncation or tokenizer.padding):
            self.tokenizer = type(tokenizer).from_str(tokenizer.to_str())
            self.tokenizer.no_truncation()
            self.tokenizer.no_padding()

    @staticmethod
    def takes(tokenizer: Any) -> bool:
        """Return True for a tokenizer of either library."""
        return _of_tokenizers(tokenizer) or hasattr(tokenizer, "convert_ids_to_tokens")

    @property
    def size(self) -> int:
        """Return the number of ids."""
        return self.tokenizer.get_vocab_size() if self._plain else len(self.tokenizer)

    @property
    def special(self) -> frozenset[int]:
        """Return the ids that represent no text."""
        if self._plain:
            added = self.tokenizer.get_added_tokens_decoder()
            return frozenset(number for number, token in added.items() if token.special)
        return frozenset(self.tokenizer.all_special_ids)

    @property
    def mask(self) -> int | None:
        """Return the id of the mask token."""
        if self._plain:
            found = map(self.tokenizer.token_to_id, ("[MASK]", "<mask>"))
            return next((number for number in found if number is not None), None)
        return self.tokenizer.mask_token_id

    @property
    def longest(self) -> int | None:
        """Return the longest context that the tokenizer allows."""
        most = None if self._plain else self.tokenizer.model_max_length
        return most if most is not None and most < 1_000_000 else None

    def encode(self, text: str, limit: int | None = None, *, target: bool = False) -> Encoded:
        """Encode a text with special tokens, truncated to `limit` ids.

        Args:
            target: encode the text as the target of a model, which some tokenizers do differently.

        Raises:
            ValueError: the string cannot be encoded.
        """
        must_be_text(text, f"{'target' if target else 'text'} {text!r:.80}")
        return (self._encode if self._plain else self._encode_theirs)(text, limit, target)

    def _encode(self, text: str, limit: int | None, target: bool) -> Encoded:
        bare = self.tokenizer.encode(text, add_special_tokens=False)
        extra = self.tokenizer.num_special_tokens_to_add(False) if self.add_special else 0
        total = len(bare.ids) + extra
        if limit is not None and total > limit:
            bare.truncate(max(0, limit - extra))
        done = self.tokenizer.post_process(bare) if self.add_special else bare
        special = _places(done.special_tokens_mask)
        return Encoded(done.ids, special, total, pieces_of(text, done.offsets, special))

    def _encode_theirs(self, text: str, limit: int | None, target: bool) -> Encoded:
        given = {"text_target": text} if target else {"text": text}
        requested = {
            "add_special_tokens": self.add_special,
            "return_special_tokens_mask": True,
            "return_offsets_mapping": bool(getattr(self.tokenizer, "is_fast", False)),
            "verbose": False,
        }
        done = self.tokenizer(**given, **requested, truncation=False)
        total = len(done["input_ids"])
        if limit is not None and total > limit:
            done = self.tokenizer(**given, **requested, truncation=True, max_length=limit)
        ids, special = list(done["input_ids"]), _places(done["special_tokens_mask"])
        if (offsets := done.get("offset_mapping")) is None:
            return Encoded(ids, special, total, self._decoded(ids, special))
        return Encoded(ids, special, total, pieces_of(text, offsets, special))

    def pieces(self, ids: list[int]) -> list[str] | None:
        """Return the text of these tokens, cut where they end; None if it cannot be cut."""
        special = self.special
        return self._decoded(ids, {n for n, one in enumerate(ids) if one in special})

    def _decoded(self, ids: list[int], special: Collection[int]) -> list[str] | None:
        options = {"skip_special_tokens": False}
        if not self._plain:
            options["clean_up_tokenization_spaces"] = False  # it would change earlier text
        decode = getattr(self.tokenizer, "decode", None)
        return decode and pieces_by_decoding(partial(decode, **options), ids, special)

    def texts(self, ids: list[int]) -> list[str]:
        """Return each token as text. Bytes that are not a whole character are written `\\xe2`."""
        if self._plain:
            pieces = [self.tokenizer.id_to_token(number) for number in ids]
        else:
            pieces = self.tokenizer.convert_ids_to_tokens(ids)
        as_bytes = self._in_bytes
        return [
            _piece_text(str(piece or f"<{number}>"), as_bytes)
            for number, piece in zip(ids, pieces, strict=True)
        ]

    @property
    def _in_bytes(self) -> bool:
        """Return True if tokens are written in the characters of byte-level BPE."""
        fast = self.tokenizer if self._plain else getattr(self.tokenizer, "backend_tokenizer", None)
        if fast is None:
            return hasattr(self.tokenizer, "byte_decoder")
        parts = (getattr(fast, "decoder", None), getattr(fast, "pre_tokenizer", None))
        return any(part is not None and b'"ByteLevel"' in part.__getstate__() for part in parts)


def _of_tokenizers(tokenizer: Any) -> bool:
    return type(tokenizer).__module__.partition(".")[0] == "tokenizers"


def token_texts(tokenizer: Any, ids: list[int]) -> list[str]:
    """Return each token as text. Bytes that are not a whole character are written `\\xe2`."""
    return Vocabulary(tokenizer).texts(ids)


def pieces_of(text: str, offsets: Sequence[tuple[int, int]], special: Collection[int]) -> list[str]:
    """Cut a text where its tokens end; each piece includes skipped text before its token.

    If tokens share a character, as bytes do, the first one gets it. The pieces joined are the text
    up to its last token.

    >>> pieces_of("Ah, 'é'", [(0, 0), (0, 2), (2, 3), (4, 5), (5, 6), (5, 6), (6, 7)], {0})
    ['', 'Ah', ',', " '", 'é', '', "'"]
    """
    own = [span for place, span in enumerate(offsets) if place not in special]
    start = own[0][0] if own else 0
    done = start if text[:start].strip() else 0  # for a text that is truncated on the left
    pieces = []
    for place, (_, end) in enumerate(offsets):
        stop = done if place in special else max(done, end)
        pieces.append(text[done:stop])
        done = stop
    return pieces


def pieces_by_decoding(
    decode: Callable[[list[int]], str], ids: Sequence[int], special: Collection[int]
) -> list[str] | None:
    """Cut the decoded text where its tokens end: each piece is what a token adds to earlier text.

    If tokens share a character, the first one gets it.

    Return None if a token changes the text before it.

    >>> words = ["so", " it", " is"]
    >>> decode = lambda ids: "".join(words[n] for n in ids).lstrip()
    >>> pieces_by_decoding(decode, [0, 1, 2], {})
    ['so', ' it', ' is']
    """
    pieces = [""] * len(ids)
    own = [place for place in range(len(ids)) if place not in special]
    begin = done = 0  # the ids from `begin` to `done` determine how the next ones are joined
    for end in range(1, len(own) + 1):
        before, after = (decode([ids[n] for n in own[begin:stop]]) for stop in (done, end))
        if (after == before or after.endswith("\ufffd")) and end < len(own):
            continue  # an incomplete character
        if not after.startswith(before):
            return None
        pieces[own[done]] = after[len(before) :]
        begin, done = done, end
    return pieces


def _places(mask: list[int]) -> tuple[int, ...]:
    return tuple(place for place, added in enumerate(mask) if added)


@cache
def _byte_alphabet() -> dict[str, int]:
    """Return the characters of byte-level BPE: printable bytes represent themselves, other bytes
    are written as characters from U+0100 (Radford et al. 2019)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


def _piece_text(piece: str, in_bytes: bool) -> str:
    letters = _byte_alphabet()
    if in_bytes and all(letter in letters for letter in piece):
        return bytes(letters[letter] for letter in piece).decode("utf-8", "backslashreplace")
    if found := _BYTE.fullmatch(piece):
        return bytes([int(found[1], 16)]).decode("utf-8", "backslashreplace")
    return piece.replace("\u2581", " ")


def tokenizer_of(tokenizer: Any, *, add_special: bool = True) -> AnyTokenizer:
    """Wrap a tokenizer of any type.

    Raises:
        LookError: the object is not a tokenizer.
    """
    if Vocabulary.takes(tokenizer):
        return Vocabulary(tokenizer, add_special=add_special)
    if all(callable(getattr(tokenizer, name, None)) for name in ("encode", "decode")):
        return OtherTokenizer(tokenizer)
    if isinstance(tokenizer, Mapping | Sequence | None) and not isinstance(tokenizer, str | bytes):
        return TokenStrings(tokenizer)
    raise _no_tokenizer(tokenizer)


def ids_of(text: Any) -> list[int] | None:
    """Return token ids that were passed in place of a text: a tensor `[T]`, an array or a list of
    integers; None for anything else.

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
    """Any object that encodes a text as ids and decodes ids as text: from tiktoken, SentencePiece,
    or custom.

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
        """Return the number of ids, if the tokenizer defines it."""
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
                f"{kind}.encode({text!r:.40}) returned {given!r:.60}, not a list of token ids"
            )
        ids = ids or []
        kept = ids[:limit]
        return Encoded(kept, (), len(ids), self.pieces(kept))

    def pieces(self, ids: list[int]) -> list[str] | None:
        return pieces_by_decoding(lambda some: str(self.tokenizer.decode(some)), ids, ())

    def texts(self, ids: list[int]) -> list[str]:
        return [self._text(one) for one in ids]

    def _text(self, number: int) -> str:
        # Ids that are sampled at random may be missing from the tokenizer.
        try:
            return str(self.tokenizer.decode([number]))
        except (KeyError, IndexError, ValueError, OverflowError):
            return f"<{number}>"


class TokenStrings:
    """A string for each id, in a list or a dict; ids without a string are shown as numbers.

    >>> TokenStrings(["no", "yes"]).texts([1, 0, 7])
    ['yes', 'no', '<7>']
    """

    special: frozenset[int] = frozenset()
    mask: int | None = None
    longest: int | None = None

    def __init__(self, strings: Mapping[int, str] | Sequence[str] | None) -> None:
        self.given = strings
        by_id = strings if isinstance(strings, Mapping) else enumerate(strings or ())
        self._strings = dict(by_id)
        if any(
            not (isinstance(i, int) and isinstance(text, str)) for i, text in self._strings.items()
        ):
            raise LookError(
                f"tokenizer={strings!r:.80}: pass a string for each id, as a list or as a dict "
                f"{{id: string}}, or the model's tokenizer"
            )

    @property
    def size(self) -> int | None:
        """Return the number of ids; None for a dict, which may hold only the ids of one text."""
        return len(self._strings) if isinstance(self.given, Sequence) else None

    def encode(self, text: str, limit: int | None = None, *, target: bool = False) -> Encoded:
        raise _no_tokenizer(self.given)

    def pieces(self, ids: list[int]) -> list[str] | None:
        return None

    def texts(self, ids: list[int]) -> list[str]:
        return [self._strings.get(one, f"<{one}>") for one in ids]


AnyTokenizer = Vocabulary | OtherTokenizer | TokenStrings
"""Encoders and decoders of texts; a `Vocabulary` has the settings of each of their parts."""


def _no_tokenizer(tokenizer: Any) -> LookError:
    return LookError(
        f"tokenizer={tokenizer!r:.80}: the model reads text; pass its tokenizer, or any object "
        f"with encode and decode; or pass token ids as the text, and a string for each id"
    )

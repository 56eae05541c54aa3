"""Texts as tokens and tokens as text, with a tokenizer of either kind.

Either is a `tokenizers.Tokenizer` or one of `transformers` (`PreTrainedTokenizerBase`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from .._text import must_be_text

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")  # how SentencePiece writes a byte that it has no piece for


class LookError(ValueError):
    """A model and a text that cannot be looked at together."""


@dataclass(frozen=True)
class Encoded:
    """A text as ids: `special` are the places of those that the tokenizer added, `total` is how
    many there are of the whole text. `pieces` are the text's own letters, cut where tokens end; of
    a tokenizer that does not say where its tokens stand, what it decodes, None where that is in no
    order."""

    ids: list[int]
    special: tuple[int, ...]
    total: int
    pieces: list[str] | None = None


class Vocabulary:
    """A tokenizer, as far as looking at a text needs one.

    Raises:
        LookError: something else than a tokenizer.

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
            raise LookError(f"tokenizer={tokenizer!r:.80} is none of tokenizers or transformers")
        if self._plain and (tokenizer.truncation or tokenizer.padding):
            self.tokenizer = type(tokenizer).from_str(tokenizer.to_str())
            self.tokenizer.no_truncation()
            self.tokenizer.no_padding()

    @staticmethod
    def takes(tokenizer: Any) -> bool:
        """Whether this is a tokenizer of either kind."""
        return _of_tokenizers(tokenizer) or hasattr(tokenizer, "convert_ids_to_tokens")

    @property
    def size(self) -> int:
        """How many ids there are."""
        return self.tokenizer.get_vocab_size() if self._plain else len(self.tokenizer)

    @property
    def special(self) -> frozenset[int]:
        """The ids that stand for no text."""
        if self._plain:
            added = self.tokenizer.get_added_tokens_decoder()
            return frozenset(number for number, token in added.items() if token.special)
        return frozenset(self.tokenizer.all_special_ids)

    @property
    def mask(self) -> int | None:
        """The id that stands for a hidden token."""
        if self._plain:
            found = map(self.tokenizer.token_to_id, ("[MASK]", "<mask>"))
            return next((number for number in found if number is not None), None)
        return self.tokenizer.mask_token_id

    @property
    def longest(self) -> int | None:
        """How long a text the tokenizer says that its model can read."""
        most = None if self._plain else self.tokenizer.model_max_length
        return most if most is not None and most < 1_000_000 else None

    def encode(self, text: str, limit: int | None = None, *, target: bool = False) -> Encoded:
        """The text as ids, with the tokenizer's special tokens, cut so that `limit` are left.

        Args:
            target: it is what a model is to write, for tokenizers that encode that differently.

        Raises:
            ValueError: a string that is no text.
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
        asked = {
            "add_special_tokens": self.add_special,
            "return_special_tokens_mask": True,
            "return_offsets_mapping": bool(getattr(self.tokenizer, "is_fast", False)),
            "verbose": False,
        }
        done = self.tokenizer(**given, **asked, truncation=False)
        total = len(done["input_ids"])
        if limit is not None and total > limit:
            done = self.tokenizer(**given, **asked, truncation=True, max_length=limit)
        ids, special = list(done["input_ids"]), _places(done["special_tokens_mask"])
        offsets = done.get("offset_mapping")
        pieces = (
            self._decoded(ids, special) if offsets is None else pieces_of(text, offsets, special)
        )
        return Encoded(ids, special, total, pieces)

    def pieces(self, ids: list[int]) -> list[str] | None:
        """The text of these tokens, cut where they end; None of a tokenizer that gives none."""
        special = self.special
        return self._decoded(ids, {n for n, one in enumerate(ids) if one in special})

    def _decoded(self, ids: list[int], special: Collection[int]) -> list[str] | None:
        options = {"skip_special_tokens": False}
        if not self._plain:
            options["clean_up_tokenization_spaces"] = False  # it would change what stands before
        decode = getattr(self.tokenizer, "decode", None)
        return decode and pieces_by_decoding(partial(decode, **options), ids, special)

    def texts(self, ids: list[int]) -> list[str]:
        """Each token as text, on its own. Bytes that are no whole character are `\\xe2`."""
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
        """Whether pieces are written in byte-level BPE's letters."""
        fast = self.tokenizer if self._plain else getattr(self.tokenizer, "backend_tokenizer", None)
        if fast is None:
            return hasattr(self.tokenizer, "byte_decoder")
        parts = (getattr(fast, "decoder", None), getattr(fast, "pre_tokenizer", None))
        return any(part is not None and b'"ByteLevel"' in part.__getstate__() for part in parts)


def _of_tokenizers(tokenizer: Any) -> bool:
    return type(tokenizer).__module__.partition(".")[0] == "tokenizers"


def token_texts(tokenizer: Any, ids: list[int]) -> list[str]:
    """Each token as text, on its own. Bytes that are no whole character are written `\\xe2`."""
    return Vocabulary(tokenizer).texts(ids)


def pieces_of(text: str, offsets: Sequence[tuple[int, int]], special: Collection[int]) -> list[str]:
    """The text cut where its tokens end: what each token stands for, and what lies before it.

    Of tokens that share a character, as bytes do, the first has it. Joined, they are the text up to
    its last token.

    >>> pieces_of("Ah, 'é'", [(0, 0), (0, 2), (2, 3), (4, 5), (5, 6), (5, 6), (6, 7)], {0})
    ['', 'Ah', ',', " '", 'é', '', "'"]
    """
    own = [span for place, span in enumerate(offsets) if place not in special]
    start = own[0][0] if own else 0
    done = start if text[:start].strip() else 0  # of a text that is cut on the left
    pieces = []
    for place, (_, end) in enumerate(offsets):
        stop = done if place in special else max(done, end)
        pieces.append(text[done:stop])
        done = stop
    return pieces


def pieces_by_decoding(
    decode: Callable[[list[int]], str], ids: Sequence[int], special: Collection[int]
) -> list[str] | None:
    """The text that a tokenizer decodes, cut where its tokens end: what each token adds to those
    just before it. Of tokens that share a character, the first has it.

    None where what stands before changes with what follows.

    >>> words = ["so", " it", " is"]
    >>> decode = lambda ids: "".join(words[n] for n in ids).lstrip()
    >>> pieces_by_decoding(decode, [0, 1, 2], {})
    ['so', ' it', ' is']
    """
    pieces = [""] * len(ids)
    own = [place for place in range(len(ids)) if place not in special]
    begin = done = 0  # those from `begin` to `done` tell how the next ones are joined
    for end in range(1, len(own) + 1):
        before, after = (decode([ids[n] for n in own[begin:stop]]) for stop in (done, end))
        if (after == before or after.endswith("\ufffd")) and end < len(own):
            continue  # a part of a character
        if not after.startswith(before):
            return None
        pieces[own[done]] = after[len(before) :]
        begin, done = done, end
    return pieces


def _places(mask: list[int]) -> tuple[int, ...]:
    return tuple(place for place, added in enumerate(mask) if added)


@cache
def _byte_of_letter() -> dict[str, int]:
    """Byte-level BPE writes each byte as a letter: printable ones as themselves, the others from
    U+0100 on (Radford et al. 2019)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


def _piece_text(piece: str, in_bytes: bool) -> str:
    letters = _byte_of_letter()
    if in_bytes and all(letter in letters for letter in piece):
        return bytes(letters[letter] for letter in piece).decode("utf-8", "backslashreplace")
    if found := _BYTE.fullmatch(piece):
        return bytes([int(found[1], 16)]).decode("utf-8", "backslashreplace")
    return piece.replace("\u2581", " ")

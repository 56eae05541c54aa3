"""Key/value caches: growing, preallocated, and rolling for windows."""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..core.numbers import LONGEST, as_int, format_value

_SPARE = 64
"""Rows that a growing cache reserves beyond what it needs now."""


class KVCache:
    """The past keys and values of one attention layer; use one cache per layer.

    `KVCache()` grows: its capacity doubles when it is full, so most appends copy no earlier tokens.
    `KVCache(max_length=n)` allocates its memory once, on the first `append`; token n + 1 raises
    ValueError. `KVCache(window=n)` keeps the keys that a mask `Window(n)` can still reach: the last
    n - 1 keys before the next chunk. Its memory does not grow with the text. Masks that address
    keys by index (`Documents`, `Prefix`, `Dense`, `Bias`) then count from the first key returned.

    With gradients off (`torch.no_grad`, `torch.inference_mode`), tokens are written in place and
    `append` returns views. With gradients on, nothing is written in place and results stay
    differentiable, but each call copies the past. Views returned by `append` keep their values
    until `reset` or `rewind`.

    Raises:
        ValueError: `max_length` or `window` is not a whole number or is below 1, or both are given.

    >>> import torch
    >>> cache = KVCache()
    >>> with torch.no_grad():
    ...     k, v = cache.append(torch.ones(1, 2, 5, 3), torch.ones(1, 2, 5, 3))
    ...     k, v = cache.append(torch.zeros(1, 2, 1, 3), torch.zeros(1, 2, 1, 3))
    >>> tuple(k.shape), cache.length
    ((1, 2, 6, 3), 6)
    """

    def __init__(self, *, max_length: int | None = None, window: int | None = None) -> None:
        call = f"KVCache(max_length={format_value(max_length)}, window={format_value(window)})"
        if max_length is not None and window is not None:
            raise ValueError(
                f"{call}: give max_length or window, not both; a window bounds the memory"
            )
        self.max_length = None if max_length is None else _checked(max_length, call)
        self.window = None if window is None else _checked(window, call)
        if self.max_length == LONGEST:
            raise ValueError(f"{call}: too many keys for any memory; use KVCache(), which grows")
        self._seen = 0
        self._room: tuple[Tensor, Tensor] | None = None  # keys and values [B, G, rows, D]
        self._own = False  # False: the room is the caller's or part of a graph, and read-only
        self._start = 0  # the stored tokens are rows _start.._stop of the room
        self._stop = 0

    @property
    def length(self) -> int:
        """The number of tokens so far, including dropped ones: the position of the next token."""
        return self._seen

    @property
    def stored(self) -> int:
        """The number of tokens in the cache; less than `length` only with a window."""
        return self._stop - self._start

    def append(
        self, k: Float[Tensor, "B G T D"], v: Float[Tensor, "B G T D"]
    ) -> tuple[Float[Tensor, "B G S D"], Float[Tensor, "B G S D"]]:
        """Add T tokens and return all keys and values to attend to, in order.

        Args:
            k, v: `[B, G, T, D]` of the new tokens.

        Returns:
            Keys and values `[B, G, S, D]` of all tokens so far or, with a window, of the last
            `window - 1` earlier tokens and the T new ones.

        Raises:
            ValueError: batch size, head count, head dimension, dtype or device differs from before;
                there are more than `max_length` tokens.
        """
        self._check(k, v)
        count = k.shape[2]
        long = self.window is not None and self.stored + count > 2 * self.window
        both = self._joined(k, v) if torch.is_grad_enabled() or long else self._written(k, v)
        self._seen += count
        if self.window is not None:
            self._start = max(self._start, self._stop - (self.window - 1))
        return both

    def reset(self) -> None:
        """Remove all tokens; a preallocated cache keeps its memory."""
        self._seen = self._start = self._stop = 0
        if self.max_length is None or not self._own:
            self._room, self._own = None, False

    def mark(self) -> tuple[Any, ...]:
        """Return the current state for `rewind`; valid until the next `reset` or `select`."""
        return self._seen, self._room, self._own, self._start, self._stop

    def rewind(self, mark: tuple[Any, ...]) -> None:
        """Remove the tokens added after `mark`, such as those of a failed call or a rejected draft.

        >>> import torch
        >>> cache = KVCache()
        >>> mark = cache.mark()
        >>> k, v = cache.append(torch.rand(1, 1, 2, 5), torch.rand(1, 1, 2, 5))
        >>> cache.rewind(mark)
        >>> cache.length
        0
        """
        self._seen, self._room, self._own, self._start, self._stop = mark

    def select(self, index: Int[Tensor, " N"]) -> None:
        """Keep the batch rows `index`, in that order; rows may be repeated or omitted.

        Use it for beam search and to drop finished rows.

        >>> import torch
        >>> cache = KVCache()
        >>> k, v = cache.append(torch.rand(3, 1, 2, 5), torch.rand(3, 1, 2, 5))
        >>> cache.select(torch.tensor([2, 0]))
        >>> cache.append(k[:2], v[:2])[0].shape
        torch.Size([2, 1, 4, 5])
        """
        if self._room is None:
            return
        keys, values = self._room
        index = index.to(keys.device)
        # Memory owned by the cache must stay writable outside inference mode.
        with torch.inference_mode(torch.is_inference_mode_enabled() and not self._own):
            self._room = keys.index_select(0, index), values.index_select(0, index)

    def __repr__(self) -> str:
        limits = {"max_length": self.max_length, "window": self.window}
        parts = [f"{name}={value}" for name, value in limits.items() if value is not None]
        return f"KVCache({', '.join(parts)}): {self._seen} tokens seen, {self.stored} kept"

    def _check(self, k: Tensor, v: Tensor) -> None:
        call = f"KVCache.append(k {list(k.shape)}, v {list(v.shape)})"
        if k.ndim != 4 or k.shape[:3] != v.shape[:3]:
            raise ValueError(f"{call}: both must be [B, G, T, D] with the same B, G and T")
        if self.max_length is not None and self._seen + k.shape[2] > self.max_length:
            raise ValueError(
                f"{call}: the cache holds {self._seen} tokens and max_length={self.max_length}; "
                "make it larger, or use KVCache(), which grows"
            )
        if self._room is None:
            return
        if not self._seen:  # after `reset`: the memory may be kept, but the shape may change
            if not _alike(k, self._room[0]) or not _alike(v, self._room[1]):
                self._room, self._own = None, False
            return
        for name, new, old in (("k", k, self._room[0]), ("v", v, self._room[1])):
            if not _alike(new, old):
                b, g, _, d = old.shape
                raise ValueError(
                    f"{call}: {name} is {new.dtype} on {new.device}, but the cache holds {name} "
                    f"of [B={b}, G={g}, {self.stored} tokens, D={d}], {old.dtype} on {old.device}; "
                    "these must stay the same; use one cache per layer and batch, or call reset()"
                )

    def _written(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write the new tokens after the earlier ones, in place."""
        count = k.shape[2]
        if not self._own or self._room is None or self._stop + count > self._room[0].shape[2]:
            self._move(count, k, v)
        assert self._room is not None
        start, stop = self._start, self._stop + count
        for room, new in zip(self._room, (k, v), strict=True):
            room[:, :, self._stop : stop] = new
        self._stop = stop
        keys, values = self._room
        return keys[:, :, start:stop], values[:, :, start:stop]

    def _move(self, count: int, k: Tensor, v: Tensor) -> None:
        """Allocate memory for `count` more tokens and copy the earlier ones into it.

        Rows returned before are never overwritten, so earlier views keep their values.
        """
        kept = self.stored
        if self.max_length is not None:
            rows = self.max_length
        elif self.window is not None:
            # At most twice the window, so that a move happens once per `window` tokens.
            rows = min(2 * self.window, max(kept + count + _SPARE, 2 * (kept + count)))
        else:
            rows = max(kept + count + _SPARE, 2 * kept)
        with torch.inference_mode(False), torch.no_grad():  # writable later, in either mode
            rooms = [new.new_empty(*new.shape[:2], rows, new.shape[3]) for new in (k, v)]
        if self._room is not None and kept:
            for room, old in zip(rooms, self._room, strict=True):
                room[:, :, :kept] = old[:, :, self._start : self._stop]
        self._room, self._own = (rooms[0], rooms[1]), True
        self._start, self._stop = 0, kept

    def _joined(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Concatenate earlier and new tokens; keep the part that later tokens need."""
        both = k, v
        if self._room is not None and self.stored:
            past = [room[:, :, self._start : self._stop] for room in self._room]
            both = torch.cat((past[0], k), dim=2), torch.cat((past[1], v), dim=2)
        total = both[0].shape[2]
        first = 0 if self.window is None else max(0, total - (self.window - 1))
        self._room, self._own = both, False
        if first:  # a copy: a view would keep the whole chunk in memory
            self._room = both[0][:, :, first:].clone(), both[1][:, :, first:].clone()
        self._start, self._stop = 0, total - first
        return both


def _checked(given: object, call: str) -> int:
    number = as_int(given)
    if number is None:
        raise ValueError(f"{call}: the number of keys must be a whole number")
    if number < 1:
        raise ValueError(f"{call}: the number of keys must be at least 1")
    return number


def _alike(new: Tensor, old: Tensor) -> bool:
    """Return True if everything but the number of tokens matches: sizes, dtype and device."""
    return (
        new.shape[:2] == old.shape[:2]
        and new.shape[3] == old.shape[3]
        and new.dtype == old.dtype
        and new.device == old.device
    )

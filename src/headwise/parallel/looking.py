"""Looking at many texts with several ranks: each looks at a share, and what all saw is merged."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar, overload

import torch

from ..capture.captured import Watched
from ..capture.effects import HeadEffects, concatenated
from ..stats.running import Running
from .group import current

_T = TypeVar("_T")
_Seen = TypeVar("_Seen", Watched, Running, HeadEffects)


def share_of(texts: Iterable[_T]) -> Iterator[_T]:
    """Iterate over this rank's share of texts, or of batches: every N-th of N ranks.

    Without a process group, all of them.

    Raises:
        TypeError: what cannot be iterated over.

    >>> list(share_of(["a", "b", "c"]))
    ['a', 'b', 'c']
    """
    rank, size = _ranks()
    return islice(iter(texts), rank, None, size)


@overload
def merged(seen: _Seen) -> _Seen: ...
@overload
def merged(seen: None) -> Watched | Running | HeadEffects: ...
def merged(seen: Any) -> Any:
    """Merge what all ranks saw, so that every rank has the figures of one process.

    Every rank of the default process group calls this, once its share is looked at. Merged are
    sums, numbers of queries, squares of deviations and maxima, never means; a rank without a valid
    query counts for nothing. Calls that were kept one by one, and the samples of effects, stand in
    the order of ranks. Tensors come to this rank's device.

    Args:
        seen: what `watch()` or `load_seen()` gave; a `Running`; what `importance()` or
            `ablation_scan()` gave; or `None`, of a rank that had no text.

    Raises:
        ValueError: something else; figures that do not add up (of other heads or statistics, or
            sums per key of batches of other sizes); no rank saw anything.

    >>> import torch, headwise as hw
    >>> layer = hw.MultiHeadAttention(24, num_heads=3)
    >>> with hw.watch(layer, hw.Entropy(), running=True) as seen:
    ...     for x in hw.parallel.share_of(torch.randn(4, 2, 7, 24)):
    ...         out = layer(x, mask=hw.Causal())
    >>> hw.parallel.merged(seen).table() == seen.table()  # of one rank
    True
    """
    if not isinstance(seen, Watched | Running | HeadEffects | None):
        raise ValueError(
            f"merged({type(seen).__name__}): give what watch(), observe()'s Running or "
            f"importance() gave, or None where this rank had no text."
        )
    parts = [part for part in gathered(seen) if part is not None]
    kinds = {type(part) for part in parts}
    if len(kinds) != 1:
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        why = f"ranks gave {names}" if kinds else "no rank saw anything"
        raise ValueError(f"merged(…): {why}; give the same kind on all ranks that had texts.")
    if kinds == {HeadEffects}:
        return concatenated(parts)
    return sum(parts) if _ranks()[1] > 1 else seen


def gathered(value: Any) -> list[Any]:
    """Every rank's value, in order of ranks; tensors on this rank's device.

    Every rank must ask, with a group; without one, there is this value alone.
    """
    from torch import distributed as dist

    size = _ranks()[1]
    if size == 1:
        return [value]
    packed = io.BytesIO()
    torch.save(value, packed)
    if (heartbeat := current()) is not None:  # shares are of unequal size
        heartbeat.wait_for_all()
    all_packed: list[Any] = [None] * size
    dist.all_gather_object(all_packed, packed.getvalue())
    return [
        torch.load(io.BytesIO(one), map_location=_here, weights_only=False)  # of our own ranks
        for one in all_packed
    ]


def _here(storage: Any, location: str) -> Any:
    """A storage on this rank's device of the same kind."""
    return storage.cuda() if location.startswith("cuda") else storage


def _ranks() -> tuple[int, int]:
    """This rank, and how many there are."""
    from torch import distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(), dist.get_world_size()

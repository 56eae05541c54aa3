"""Statistics of many texts or heads over several ranks, merged on all of them."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar, overload

import torch
from jaxtyping import Float
from torch import Tensor
from torch import distributed as dist

from ..capture.captured import Watched
from ..capture.effects import HeadEffects, concatenated
from ..stats.running import Running
from ..telemetry.clip import largest_of

_T = TypeVar("_T")
_Seen = TypeVar("_Seen", Watched, Running, HeadEffects)


def share_of(texts: Iterable[_T]) -> Iterator[_T]:
    """Iterate over the texts or batches of this rank: every N-th for N ranks.

    Without a process group, all of them.

    Raises:
        TypeError: `texts` is not iterable.

    >>> list(share_of(["a", "b", "c"]))
    ['a', 'b', 'c']
    """
    rank, size = _rank_and_size()
    return islice(iter(texts), rank, None, size)


@overload
def merged(seen: _Seen) -> _Seen: ...
@overload
def merged(seen: None) -> Watched | Running | HeadEffects: ...
def merged(seen: Any) -> Any:
    """Merge the results of all ranks, so that every rank has the statistics of one process.

    Every rank of the default process group calls this after its texts. Sums, numbers of queries,
    squared deviations and maxima are merged, never means; a rank without a valid query contributes
    nothing. Individual calls and effect samples are ordered by rank. Tensors are on the
    device of this rank.

    Args:
        seen: a `Running` or the result of `watch()`, `Watched.load()`, `importance()` or
            `ablation_scan()`; or `None` on a rank that had no text.

    Raises:
        ValueError: the type is not supported, results cannot be added (heads, statistics or the
            batch sizes of sums per key differ), or no rank has a result.

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
            f"merged({type(seen).__name__}): give the result of watch(), a Running, the result of "
            f"importance() or ablation_scan(), or None where this rank had no text."
        )
    parts = [part for part in gathered(seen) if part is not None]
    kinds = {type(part) for part in parts}
    if len(kinds) != 1:
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        why = f"ranks gave {names}" if kinds else "no rank has a result"
        raise ValueError(f"merged(…): {why}; give the same kind on all ranks that had texts.")
    if kinds == {HeadEffects}:
        return concatenated(parts)
    return sum(parts) if _rank_and_size()[1] > 1 else seen


def gathered(value: Any) -> list[Any]:
    """Return the values of all ranks, in order; tensors on the device of this rank.

    Every rank must call this, if there is a process group; without one, the list has one value.
    """
    size = _rank_and_size()[1]
    if size == 1:
        return [value]
    packed = io.BytesIO()
    torch.save(value, packed)
    all_packed: list[Any] = [None] * size
    dist.all_gather_object(all_packed, packed.getvalue())
    return [
        torch.load(io.BytesIO(one), map_location=_to_this_device, weights_only=False)
        for one in all_packed  # pickled by ranks of this process group
    ]


def largest_logits(seen: Watched, limit: float = 100.0) -> dict[str, Float[Tensor, " H"]]:
    """Return the largest logit of each head over all ranks, for `qk_clip_`; every rank calls this.

    `Monitor(clip=…)` does this with one small collective per step; here, ranks exchange objects.

    Args:
        seen: the result of `watch(model, MaxLogit())` on this rank, or of `MaxLogit(above=limit)`.
            A rank may lack calls of a module, or some of its heads.
        limit: the limit for `qk_clip_`.

    Returns:
        Logits by module name, for all heads of the layer; −inf for heads without a call.

    Raises:
        ValueError: the largest logits are unknown, for example because queries were sampled.
    """
    call = f"largest_logits(seen, limit={limit:g})"
    own = {
        name: (seen[name].first_head, largest_of(seen[name], limit, call).detach().cpu().double())
        for name in seen
    }
    spans: dict[str, list[tuple[int, Tensor]]] = {}
    for given in gathered(own):
        for name, span in given.items():
            spans.setdefault(name, []).append(span)
    largest = {}
    for name, parts in spans.items():
        heads = max(first + len(part) for first, part in parts)
        largest[name] = torch.full((heads,), -torch.inf, dtype=torch.float64)
        for first, part in parts:
            here = largest[name][first : first + len(part)]
            torch.maximum(here, part, out=here)
    return largest


def _to_this_device(storage: Any, location: str) -> Any:
    return storage.cuda() if location.startswith("cuda") else storage


def _rank_and_size() -> tuple[int, int]:
    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(), dist.get_world_size()

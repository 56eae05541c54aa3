"""The largest logits of heads over ranks, for clipping."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch import distributed as dist

from ..capture.captured import Watched
from ..telemetry.clip import largest_of


def largest_logits(seen: Watched, limit: float = 100.0) -> dict[str, Float[Tensor, " H"]]:
    """Each head's largest logit over all ranks, as `qk_clip_` takes it; every rank must call this.

    `Monitor(clip=…)` does the same with one small collective a step; this one exchanges objects.

    Args:
        seen: what `watch(model, MaxLogit())` saw on this rank, or `MaxLogit(above=limit)`. A rank
            may have seen no call of a module, or some heads of it.
        limit: what is to be given to `qk_clip_`.

    Returns:
        By module name, of all heads of its layer; −inf is a head that saw nothing.

    Raises:
        ValueError: the largest logits are not known, as of drawn queries.
    """
    call = f"largest_logits(seen, limit={limit:g})"
    own = {
        name: (seen[name].first_head, largest_of(seen[name], limit, call).detach().cpu())
        for name in seen
    }
    every: list[dict[str, tuple[int, Tensor]] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    found: dict[str, Tensor] = {}
    for given in filter(None, every):
        for name, (first, largest) in given.items():
            before, stop = found.get(name), first + len(largest)
            heads = max(stop, 0 if before is None else len(before))
            whole = torch.full((heads,), -torch.inf, dtype=torch.float64)
            if before is not None:
                whole[: len(before)] = before
            whole[first:stop] = torch.maximum(whole[first:stop], largest.double())
            found[name] = whole
    return found

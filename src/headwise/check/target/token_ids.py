"""Models that take ids of tokens: x goes in behind their embedding.

An embedding is a table of rows; what attends sees the rows alone. So the ids of a call are numbers
of places, and what stands for the embedding gives the features of x for them: gradients, small
changes and whole sequences then go the same way as in a layer.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

FIRST = 3
"""The smallest id: 0, 1 and 2 are padding, begin and end with many."""
OF_IDS = re.compile(
    r"'indices'|index out of range in self|\(expected 2\)|[Ll]ong(Tensor)?\b|long int|"
    r"only integer tensors|must be .*long"
)
"""What is said of numbers that should be ids, or of x with an axis too many."""


class BehindEmbedding(nn.Module):
    """What stands for an embedding: gives the features `[…, E]` that lie at the ids' places."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.embedding_dim, self.num_embeddings = embedding.embedding_dim, embedding.num_embeddings
        self.given: Tensor | None = None  # [N, E], the features of all ids from FIRST on
        # which some ask for its device, or multiply with
        self.register_buffer("weight", embedding.weight.detach().clone(), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        assert self.given is not None
        places = ids - FIRST
        if bool((places < 0).any()):
            raise IndexError("an id was put in that no token of x has")
        return self.given[places]


@contextlib.contextmanager
def behind(target: Any, rows: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """The ids `[…]` of each of some tensors `[…, E]`, for a call within which they stand for their
    features. Where nothing stands for an embedding yet, they are 0 and 1, which any has."""
    modules = target.modules() if isinstance(target, nn.Module) else ()
    standing = [one for one in modules if isinstance(one, BehindEmbedding)]
    flat = [one.reshape(-1, one.shape[-1]) for one in rows]
    ids, first = list[Tensor](), FIRST
    for one, features in zip(rows, flat, strict=True):
        places = torch.arange(first, first + len(features), device=one.device)
        ids.append(places.view(one.shape[:-1]))
        first += len(features)
    for one in standing:
        one.given = torch.cat(flat)
    try:
        yield ids if standing else [one % 2 for one in ids]
    finally:
        for one in standing:
            one.given = None


def put_in(module: nn.Module, x: Tensor, call: Callable[[], Any]) -> int:
    """Put what stands for embeddings in the place of those that a call with ids of x reaches.

    Args:
        call: makes it; it may fail behind them.

    Returns:
        Their width; 0 where there are none, or of several widths.
    """
    found, handles = dict[str, nn.Embedding](), list[Any]()
    with behind(None, [x]) as (ids,):
        pass

    def noting(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def note(one: nn.Module, args: tuple[Any, ...]) -> None:
            taken = args[0] if args else None
            if isinstance(taken, Tensor) and torch.equal(taken.reshape(-1), ids.reshape(-1)):
                assert isinstance(one, nn.Embedding)
                found[name] = one

        return note

    for name, one in module.named_modules():
        if isinstance(one, nn.Embedding) and one.num_embeddings > 1:
            handles.append(one.register_forward_pre_hook(noting(name)))
    try:
        with contextlib.suppress(Exception), torch.no_grad():  # whatever somebody's code raises
            call()
    finally:
        for handle in handles:
            handle.remove()
    widths = {one.embedding_dim for one in found.values()}
    for name, one in found.items() if len(widths) == 1 else ():
        module.set_submodule(name, BehindEmbedding(one))
    return widths.pop() if len(widths) == 1 else 0


def put_alike(module: nn.Module, other: nn.Module) -> None:
    """Put them where another module of its class has them."""
    for name, one in other.named_modules():
        if isinstance(one, BehindEmbedding):
            embedding = module.get_submodule(name)
            assert isinstance(embedding, nn.Embedding)
            module.set_submodule(name, BehindEmbedding(embedding))

"""What a case's call gives in exact arithmetic: the definition in float64, and its derivatives."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from headwise.backends import Call
from headwise.core.index import grid
from headwise.core.reference import Definition, rows

from .case import Inputs


class Truth:
    """Figures, gradients and sums over queries, each under the name by which it is compared."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        self.call = call = inputs.exact_call()
        self.full = full = defined(call)
        self.alive = full.allowed.any(-1)
        figures = figures_of(full, call, inputs.position)
        self.figures = {name: x.detach() for name, x in figures.items()}
        self.p, self.logits = full.weights.detach(), full.logits.detach()
        self.gradients = self._gradients(figures)

    def _gradients(self, figures: dict[str, Tensor]) -> dict[str, Tensor]:
        """Derivatives, by autograd through the definition, in what needs them and has any."""
        leaves = {name: getattr(self.call, name) for name in ("q", "k", "v", "sinks")}
        leaves = {n: x for n, x in leaves.items() if x is not None and x.requires_grad}
        asked = {n: g for n, g in self.inputs.incoming.items() if figures[n].requires_grad}
        if not leaves or not asked:
            return {}
        found = torch.autograd.grad(
            [figures[name] for name in asked],
            list(leaves.values()),
            [g.double() for g in asked.values()],
            allow_unused=True,
        )
        return {
            name: torch.zeros_like(x) if g is None else g
            for (name, x), g in zip(leaves.items(), found, strict=True)
        }

    @cached_property
    def sums(self) -> dict[str, Tensor]:
        """`Σ_i weight_i p_ij`, by keys and by blocks of queries and keys."""
        weight, case = self.inputs.weight, self.inputs.case
        p = self.p if weight is None else self.p * weight.double()[:, None]
        return {"received": p.sum(2), "map": by_blocks(p, *self.inputs.blocks, case.blocks)}


def defined(call: Call) -> Definition:
    """The definition on a call's tensors."""
    return rows(
        call.q,
        call.k,
        call.v,
        call.mask,
        call.extent,
        *grid(call.extent),
        scale=call.scale,
        softcap=call.softcap,
        sinks=call.sinks,
    )


def figures_of(full: Definition, call: Call, position: Tensor) -> dict[str, Tensor]:
    """All figures as the textbook would compute them, from the whole matrix."""
    p, alive = full.weights, full.allowed.any(-1)
    columns = torch.where(alive[..., None], full.logits, 0.0)
    there = full.allowed
    if call.sinks is not None:
        sinks = call.sinks[:, None, None].expand(*p.shape[:3], 1)
        columns = torch.cat([columns, sinks], -1)
        there = torch.cat([there, alive[..., None] & (sinks > -torch.inf)], -1)
    # A softmax's own logarithm: beside scores of 1e20 a log-sum-exp has no digits for it.
    log_p = torch.where(there, torch.log_softmax(columns, -1), 0.0)
    entropy = -torch.where(there, log_p.exp() * log_p, 0.0).sum(-1)
    keys = torch.arange(call.extent.keys)
    away = keys - position[:, None]
    named = {"first": keys == 0, "previous": away == -1, "self": away == 0}
    masses = {name: torch.where(chosen, p, 0.0).sum(-1) for name, chosen in named.items()}
    return {
        "out": full.out,
        "lse": full.lse,
        "max": full.logits.amax(-1),
        "entropy": entropy,
        "ahead": (p * away).sum(-1),
        **masses,
    }


def by_blocks(x: Tensor, of_query: Tensor, of_key: Tensor, blocks: int) -> Tensor:
    """Sums of `[B, H, T, S]` over the queries and keys of each pair of blocks."""
    rows_in = torch.nn.functional.one_hot(of_query, blocks).to(x.dtype)
    keys_in = torch.nn.functional.one_hot(of_key, blocks).to(x.dtype)
    return rows_in.mT @ x @ keys_in

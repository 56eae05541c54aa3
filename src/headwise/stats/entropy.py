"""`Entropy`: `H_i = −Σ_j p_ij log p_ij = lse_i − E[s]`, with attention to the keys as `E[s]`."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from ..core.reference import Definition
from . import identities
from .blocks import RowFigure, entropy_of, near
from .plan import CALL, KERNEL, PASS, ROWS, UNREADABLE, Need, Route, Setting
from .record import Reading, Record
from .run import Work
from .statistic import Statistic


@dataclass(frozen=True)
class Entropy(Statistic):
    """Entropy of each row of P in nats, and as a fraction of its bound `log n_i`: both `[B, H, T]`.

    A row with a single key has entropy 0 and is excluded from the mean of the fraction. A learned
    sink is one more outcome: the entropy includes its `−p log p`, and the bound is `log(n_i + 1)`.

    Source: Zhai et al. 2023 (entropy collapse); the identity: `log p_ij = s_ij − lse_i`.
    """

    names = ("entropy", "entropy_share")
    raw = ("entropy",)
    free = deferred = True

    @property
    def needs(self) -> MappingProxyType[str, Need]:  # type: ignore[override]
        return _NEEDS

    def metric(self, record: Record) -> dict[str, Reading]:
        view, entropy = record.view, record.answers[ENTROPY]
        valid = view.valid_rows

        def bound() -> Tensor:
            outcomes = view.counts + valid if view.has_sinks else view.counts
            return outcomes.to(view.dtype).log().masked_fill(outcomes <= 1, torch.inf)

        most = view.once(("entropy bound", view.has_sinks), bound)
        shared = view.once(("entropy shared", view.has_sinks), lambda: most != torch.inf)
        return {
            "entropy": Reading(entropy, valid),
            "entropy_share": Reading(entropy / most, shared),
        }

    def define(self, full: Definition) -> dict[str, Tensor]:
        entropy = torch.special.entr(full.weights).sum(-1)
        count = full.allowed.sum(-1)
        if full.sink is not None:
            entropy = entropy + torch.special.entr(full.sink)
            count = count + (count > 0)
        share = torch.where(count > 1, entropy / count.clamp(min=2).to(entropy.dtype).log(), 0.0)
        return {"entropy": entropy, "entropy_share": share}


class _Entropy(Need):
    """`−Σ_j p_ij log p_ij` of keys and sink, `[B, H, n]`.

    It takes an extra call with the keys as values if scores are linear in the keys; otherwise it
    comes from blocks of scores.
    """

    name = kernel = "entropy"
    flexible = True

    def route(self, setting: Setting) -> Route:
        if setting.kernel:
            return Route(KERNEL)
        if setting.nonlinear:
            return Route(ROWS, f"{setting.nonlinear}, and a gradient is required")
        return Route(CALL) if setting.readable else Route(ROWS, UNREADABLE)

    def row_figure(self, work: Work) -> RowFigure:
        return entropy_of

    def answer(self, route: Route, work: Work) -> Tensor:
        view, entropy = work.view, None
        if route.kind == CALL:
            entropy = self._by_identity(work)
        elif route.kind == PASS:
            entropy = work.by_head(work.reduced(self).total)
            if view.sinks is not None and work.near:  # else blocks are rows that include the sink
                log_p = (view.sinks[:, None] - work.lse).clamp(-identities.LARGE, 0.0)
                entropy = entropy - torch.exp(log_p) * log_p
        if entropy is None:
            entropy = work.by_rows(self)
        return torch.where(view.valid_rows, entropy.clamp(min=0.0), 0.0)

    @staticmethod
    def _by_identity(work: Work) -> Tensor | None:
        """Return the entropy from an extra call, or `None` if rounding would make it inaccurate."""
        seen, lse = work.keys_seen
        call, sinks = work.view.call, work.view.sinks
        entropy = identities.entropy(lse, call.q, seen[..., : call.q.shape[-1]], call.scale)
        if not near(lse, call.prepared is not None):
            return None
        if not bool((entropy.isfinite() | (lse == -torch.inf)).all()):
            return None
        if sinks is None:
            return entropy
        return identities.with_sink(entropy, work.lse_of_moved_keys, sinks)


ENTROPY = _Entropy()
_NEEDS: MappingProxyType[str, Need] = MappingProxyType(
    {"entropy": ENTROPY, "entropy_share": ENTROPY}
)

"""`OutputNorm`: the norm of each head's output and of its contribution to the layer's output."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.reference import Definition
from .plan import OUTPUT, Need, Route, Setting
from .record import Reading, Record
from .run import Work
from .statistic import Statistic


class _Output(Need):
    """The heads' outputs `[B, H, n, Dv]`, and the weight of the output projection or `None`."""

    name = "output"
    output = True

    def route(self, setting: Setting) -> Route:
        return Route(OUTPUT)

    def answer(self, route: Route, work: Work) -> tuple[Tensor, Tensor | None]:
        weight = work.projection
        return work.out, weight() if callable(weight) else weight


HEAD_OUTPUT = _Output()


class OutputLength(Need):
    """The norm of each head's output, `[B, H, n]`."""

    name = "output_norm"
    output = True

    def route(self, setting: Setting) -> Route:
        return Route(OUTPUT)

    def answer(self, route: Route, work: Work) -> Tensor:
        return torch.linalg.vector_norm(work.out.to(work.view.dtype), dim=-1)


@dataclass(frozen=True, eq=False)
class OutputNorm(Statistic):
    """The norm of each head's output and of its contribution to the layer: both `[B, H, T]`.

    `output_norm` is `‖o_h‖`; `contribution` is `‖W_h o_h‖`, where `W_h` holds the columns of the
    output projection that read head h (Kobayashi et al. 2020). Without a projection, `contribution`
    is NaN and left out of tables.

    Args:
        projection: weight of the output projection, `[O, H · Dv]`; `watch` uses the layer's own.
    """

    projection: Tensor | None = None

    @property
    def names(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("output_norm",) if self.projection is None else ("output_norm", "contribution")

    @property
    def needs(self) -> dict[str, Need]:  # type: ignore[override]
        return dict.fromkeys(self.names, HEAD_OUTPUT)

    def metric(self, record: Record) -> dict[str, Reading]:
        out, known = record[HEAD_OUTPUT]
        out, valid = out.to(record.view.dtype), record.valid_rows
        norm = Reading(torch.linalg.vector_norm(out, dim=-1), valid)
        weight = known if self.projection is None else self.projection
        if weight is None:
            added = norm.without_values("the weight of the output projection is not known")
        else:
            added = Reading(_contribution(out, weight.detach().to(out.device)), valid)
        return {"output_norm": norm, "contribution": added}

    def define(self, full: Definition) -> dict[str, Tensor]:
        out = full.out.to(full.weights.dtype)
        metrics = {"output_norm": torch.linalg.vector_norm(out, dim=-1)}
        if self.projection is not None:
            heads = self.projection.to(out.dtype).unflatten(1, (out.shape[1], -1))
            added = torch.einsum("bhtd,ohd->bhto", out, heads)
            metrics["contribution"] = torch.linalg.vector_norm(added, dim=-1)
        return metrics


def _contribution(out: Tensor, weight: Tensor) -> Tensor:
    """Return `‖W_h o‖`, using R from the QR of `W_h`: O(T·D²) per head, not O(T·D·O)."""
    heads, width = out.shape[1], out.shape[3]
    if weight.dim() != 2 or weight.shape[1] != heads * width:
        raise ValueError(
            f"OutputNorm(projection {list(weight.shape)}): {heads} heads of width {width} need "
            f"[O, {heads * width}]"
        )
    each = weight.to(out.dtype).unflatten(1, (heads, width)).transpose(0, 1)
    triangle = torch.linalg.qr(each, mode="r").R
    return torch.linalg.vector_norm(torch.einsum("bhtd,hed->bhte", out, triangle), dim=-1)

"""Record the attention of generated tokens to a prompt: one row of weights per head and token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import pad

from ..core.index import grid
from ..core.reference import Definition
from ..stats.blocks import Scores
from ..stats.plan import ROWS, Need, Route, Setting
from ..stats.record import Reading, Record
from ..stats.run import Work
from ..stats.segments import Segments
from ..stats.statistic import Statistic
from .call import AttentionCall, ObserveOptions
from .head_address import Layer, is_layer


@dataclass(frozen=True)
class _WholeRows(Need):
    """Whole rows of P, `[B, H, n, S]`, normalized directly, without a log-sum-exp."""

    name = "rows"
    scores = False

    def route(self, setting: Setting) -> Route:
        return Route(ROWS)

    def answer(self, route: Route, work: Work) -> Tensor:
        view = work.view
        call, extent = view.constant, view.extent
        logits, allowed = Scores(call).logits(call.q, call.k, *grid(extent, view.device))
        if view.sinks is not None:
            sink = view.sinks.view(1, -1, 1, 1).expand(*logits.shape[:-1], 1)
            logits = torch.cat([logits, sink], dim=-1)
        weights = torch.softmax(logits, dim=-1)[..., : extent.keys]
        return weights if call.mask.free else weights.masked_fill(~allowed, 0.0)


class _Rows(Statistic):
    """The attention weights of a few queries, `[B, H, n, S]`."""

    names = ("rows",)
    needs: Mapping[str, Need] = {"rows": _WholeRows()}

    def metric(self, record: Record) -> dict[str, Reading]:
        return {"rows": Reading(record[self.needs["rows"]])}

    def define(self, full: Definition) -> dict[str, Tensor]:
        return {"rows": full.weights}


_ROWS_OF_P = _Rows()


@dataclass
class TracedModule:
    """The rows of one module's heads, reduced step by step.

    head_weights: `[H]`, the weight of each head in the sum over heads.
    by_head: `[H, P]`, weights on the prompt, summed over generated tokens.
    keys, weights: for each token, `[H, k]`: the strongest keys of the prompt, in order of weight,
        padded with weights of −1.
    generated: for each token, `[H]`: the largest weight on a generated token.
    masses: for each token, `[H, n]`: the weight on sinks, on generated tokens, and, with segments,
        on each segment (without its sinks) and on the rest of the prompt.
    rows: the complete rows of the heads in `keep`, by head: `[P]` for each token.
    """

    head_weights: Float[Tensor, " H"]
    by_head: Float[Tensor, "H P"]
    keys: list[Int[Tensor, "H k"]] = field(default_factory=list)
    weights: list[Float[Tensor, "H k"]] = field(default_factory=list)
    generated: list[Float[Tensor, " H"]] = field(default_factory=list)
    masses: list[Float[Tensor, "H n"]] = field(default_factory=list)
    rows: dict[int, list[Float[Tensor, " P"]]] = field(default_factory=dict)


class TraceRecorder:
    """Record the rows of the queries that predict a generated token, and no others.

    In the prompt, this is the last query. A row is identified by the position of its query, which
    is the number of keys in the cache.

    Args:
        prompt: the number of tokens of the prompt, P.
        sinks: the positions of its sinks.
        segments: parts of the prompt.
        top: the number of keys to keep for each row.
        weights: the weight of each head in the sum over heads, `[L, H]`. Default: 1.
        keep: the heads whose complete rows are kept, as pairs of layer and head index.
    """

    def __init__(
        self,
        prompt: int,
        sinks: Int[Tensor, " n"],
        segments: Segments | None = None,
        top: int = 8,
        weights: Float[Tensor, "L H"] | None = None,
        keep: Sequence[tuple[Layer, int]] = (),
    ) -> None:
        self.prompt, self.sinks, self.segments = prompt, sinks, segments
        self.top, self.weights, self.keep = min(top, prompt), weights, keep
        self.modules: dict[str, TracedModule] = {}
        self.by_token: list[Float[Tensor, " P"]] = []
        self.members = torch.zeros(prompt, 0, dtype=torch.bool)
        self._segments: Float[Tensor, "P n"] | None = None
        if segments is not None:
            self.members = segments.chosen(prompt, sinks.device)[0].index_fill(0, sinks, False)
            other = (~self.members.any(-1, keepdim=True)).index_fill(0, sinks, False)
            self._segments = torch.cat([self.members, other], dim=-1).float()

    def __call__(self, call: AttentionCall) -> None:
        """Record the row of the call's last query, if it predicts a generated token."""
        keys = call.keys - call.behind
        step = call.first_key + keys - self.prompt
        if call.again or not 0 <= step <= len(self.by_token) or step < len(self.by_token) - 1:
            return  # the text has a different length: a chunk of the prompt, or an encoder's call
        if call.batch > 1 or call.heads < call.all_heads:
            raise ValueError(
                f"{call.name!r} attends in {call.batch} rows, with {call.heads} of its "
                f"{call.all_heads} heads: trace one text, without beams, with all heads here"
            )
        looking = ObserveOptions(torch.tensor([call.queries - 1]))
        row = call.observe([_ROWS_OF_P], looking)["rows"].values[0, :, 0, :keys]
        if step == len(self.by_token):
            self.by_token.append(row.new_zeros(self.prompt))
        call.on_complete(lambda _: self._add(call.name, call.layer, step, call.first_key, row))

    def _add(self, name: str, layer: int, step: int, first: int, row: Float[Tensor, "H S"]) -> None:
        module = self.modules.get(name)
        if module is None:
            weights = self._weights_of(len(self.modules), len(row)).to(row)
            by_head = row.new_zeros(len(row), self.prompt)
            module = self.modules[name] = TracedModule(weights, by_head)
        if len(module.keys) != step:
            raise ValueError(
                f"{name!r} attends {len(module.keys) + 1} times in {step + 1} steps: trace plain "
                f"generation with a cache, in which each module attends once for each token"
            )
        of_prompt, generated = row[:, : max(self.prompt - first, 0)], row[:, self.prompt - first :]
        module.by_head[:, first:] += of_prompt
        self.by_token[step][first:].addmv_(of_prompt.mT, module.head_weights)
        sinks = self.sinks[self.sinks >= first] - first
        masses = [of_prompt[:, sinks].sum(-1, keepdim=True), generated.sum(-1, keepdim=True)]
        if self._segments is not None:
            masses.append(of_prompt @ self._segments[first:].to(row))
        module.masses.append(torch.cat(masses, dim=-1))
        module.generated.append(pad(generated, (0, 1)).amax(-1))
        width = self.top + len(self.sinks)
        best = of_prompt.topk(min(width, of_prompt.shape[1]), dim=-1)
        room = (0, width - best.values.shape[1])
        module.keys.append(pad((best.indices + first).int(), room))
        module.weights.append(pad(best.values, room, value=-1.0))
        for chosen, head in self.keep:
            if is_layer(chosen, name, layer) and head < len(row):
                rows = module.rows.setdefault(head, [])
                rows.append(pad(of_prompt[head], (first, 0)))

    def _weights_of(self, layer: int, heads: int) -> Float[Tensor, " H"]:
        """Return the weights of the heads of a layer in the sum over heads."""
        if self.weights is None:
            return torch.ones(heads)
        if layer >= len(self.weights) or self.weights.shape[1] != heads:
            raise ValueError(
                f"weights {list(self.weights.shape)} have none for {heads} heads of layer {layer}"
            )
        return self.weights[layer]

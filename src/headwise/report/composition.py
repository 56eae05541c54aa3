"""The strongest compositions of a model's heads, from its weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import torch
from torch import Tensor, nn

from ..research.circuits import Composition, circuits
from .schema import Layer

LIMIT = 2e10
"""The largest heads × parameters for which compositions are computed: seconds on two cores."""

STRONGEST = 300
"""The number of pairs kept of each kind."""

OF_EACH = 2
"""The number of pairs kept for each head in any case: of those in which it writes, and of those
in which it reads."""


def composition(
    model: nn.Module,
    rows: Sequence[Mapping[str, Any]],
    layers: Sequence[Layer],
    modules: Mapping[str, str],
) -> dict[str, Any]:
    """Return the pairs of heads with the largest K-, Q- and V-composition, or why there are none.

    Args:
        rows, layers: those of the look.
        modules: the qualified name of each layer's module.

    Returns:
        `K`, `Q` and `V`: lists of `[writer, reader, score]`, as indices into `rows`, largest score
        first. `unrelated`: the expected score of two random heads, `1 / √E`. Only heads that read
        the stream that the writer writes into are paired. If there are no pairs, only `reason`.
    """
    if len(layers) < 2:
        return {"reason": "a single layer"}
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if len(rows) * parameters > LIMIT:
        return {"reason": f"skipped for {len(rows):,} heads and {parameters:,} parameters"}
    shared = Counter(modules.values())
    places = {
        (modules[row["module"]], row["head"]): place
        for place, row in enumerate(rows)
        if shared[modules[row["module"]]] == 1
    }
    try:
        found = circuits(model)
        names = [(one.module, head) for one in found.layers for head in range(len(one.q))]
        known = [number for number, name in enumerate(names) if name in places]
        heads = [places[names[number]] for number in known]
        scores = {
            kind: found.composition(kind)[known][:, known].cpu() for kind in get_args(Composition)
        }
    except Exception as error:  # any model may fail here; the rest of the look is still valid
        return {"reason": f"not available ({error})"}
    of = [layers[rows[head]["layer"]] for head in heads]
    writes, read = (torch.tensor(side) for side in ([o.queries for o in of], [o.keys for o in of]))
    pairs = {
        kind: _strongest(score, writes[:, None] == (writes if kind == "Q" else read), heads)
        for kind, score in scores.items()
    }
    if not any(pairs.values()):
        return {"reason": "no head reads what another one writes"}
    return pairs | {"unrelated": found.layers[0].q.shape[2] ** -0.5}


def _strongest(score: Tensor, paired: Tensor, heads: Sequence[int]) -> list[list[Any]]:
    """Return `[writer, reader, score]` of the strongest pairs, the largest score first."""
    score = torch.where(paired & ~score.isnan(), score, 0.0)
    if not score.any():
        return []
    kept = score >= score.flatten().topk(min(STRONGEST, score.numel())).values[-1]
    for dim in (0, 1):
        kept |= score >= score.topk(min(OF_EACH, len(score)), dim).values.amin(dim, keepdim=True)
    pairs = [
        [heads[i], heads[j], round(float(score[i, j]), 4)]
        for i, j in (kept & (score > 0)).nonzero().tolist()
    ]
    return sorted(pairs, key=lambda pair: -pair[2])

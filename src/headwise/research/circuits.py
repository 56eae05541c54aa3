"""`circuits(model)`: the heads of a model as circuits, from its weights alone."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from .._tables import HeadTable
from ..capture.head_address import HeadAddress, as_written, parse_head
from ..capture.modules import attending, check_model
from ..capture.ranks import number_of_heads
from ..core.masks import Causal
from ..stats.mass import Mass
from ..stats.observe import observe
from ..stats.patterns import Previous
from ..weights.convert import stored_tensors
from ..weights.detect import LayerTensors, detect_shapes, find_layers
from ..weights.layout_table import LAYOUTS
from ..weights.packing import Parts, sizes_of, unpack
from .norms import NormMap, is_norm

Composition = Literal["Q", "K", "V"]

_BEFORE = """ln_1 ln1 input_layernorm input_layer_norm layernorm_before attention_norm attn_norm
    pre_attention_norm self_attn_layer_norm norm1 norm_1 layer_norm1""".split()
"""Names of the norm before attention, a sibling of the attention module."""

_LAST = "ln_f norm norm_f final_layer_norm final_layernorm final_norm ln_final".split()
"""Names of the norm before the unembedding."""


@dataclass(frozen=True, eq=False)
class LayerCircuits:
    """The heads of one layer as factors, which act on columns x of the residual stream.

    The score of (i, j) is `(q x_i) · (k x_j)` times the scale, and the head writes `out v x_j` for
    the key that it attends to. Keys and values of a group are repeated for each of its heads.
    """

    module: str
    layer: int
    q: Float[Tensor, "H D E"]
    k: Float[Tensor, "H D E"]
    v: Float[Tensor, "H Dv E"]
    out: Float[Tensor, "H O Dv"]
    norm: str
    """The name of the norm that is folded into q, k and v; empty if there is none."""
    facts: Mapping[str, list[float]]
    """Metrics by name, a number for each head."""


@dataclass(frozen=True, eq=False)
class HeadCircuit:
    """The circuits of one head: factors `q` `[D, E]`, `k` `[D, E]`, `v` `[Dv, E]`, `out` `[E, Dv]`.

    >>> head = HeadCircuit(*(torch.ones(2, 3) for _ in "qkv"), torch.ones(3, 2))
    >>> head.qk.shape, head.ov.shape
    (torch.Size([3, 3]), torch.Size([3, 3]))
    """

    q: Float[Tensor, "D E"]
    k: Float[Tensor, "D E"]
    v: Float[Tensor, "Dv E"]
    out: Float[Tensor, "E Dv"]

    @property
    def qk(self) -> Float[Tensor, "E E"]:
        """The QK circuit as a matrix: the score of (i, j) is `x_iᵀ qk x_j` times the scale."""
        return self.q.mT @ self.k

    @property
    def ov(self) -> Float[Tensor, "E E"]:
        """The OV circuit as a matrix: the head writes `ov x` for x."""
        return self.out @ self.v


class Circuits(HeadTable):
    """The circuits of every head of a model, the result of `circuits()`.

    `circuits["L1H0"]` has the factors of a head, `circuits.composition("K")` the scores of all
    pairs of heads, `circuits.table()` a row for each head and `circuits.pairs()` one for each pair.

    Attributes:
        layers: the factors of each layer.
        unavailable: the reason why the table lacks a metric, by the metric's name.
    """

    def __init__(self, layers: Sequence[LayerCircuits], unavailable: Mapping[str, str]) -> None:
        self.layers, self.unavailable = tuple(layers), dict(unavailable)

    def __repr__(self) -> str:
        return f"<Circuits: {len(self.layers)} layers, {len(self.heads)} heads>"

    @property
    def heads(self) -> list[tuple[int, int]]:
        """The layer and number of each head, in the order of `composition()`."""
        return [(one.layer, head) for one in self.layers for head in range(len(one.q))]

    def __getitem__(self, head: HeadAddress) -> HeadCircuit:
        """Return the circuits of a head by its address.

        Raises:
            ValueError: the address is invalid, or the head does not exist.
        """
        layer, number = parse_head(head)
        for one in self.layers:
            if layer in (one.layer, one.module) and number < len(one.q):
                return HeadCircuit(one.q[number], one.k[number], one.v[number], one.out[number])
        there = ", ".join(f"L{one.layer} ({one.module or 'the model'})" for one in self.layers)
        raise ValueError(f"circuits[{head!r}]: there is no such head; the layers are {there}.")

    def composition(self, kind: Composition) -> Float[Tensor, "N N"]:
        """Return the composition scores of all pairs of heads, `[N, N]`.

        `[i, j]` scores how much of head i's output head j reads through its queries (`"Q"`), keys
        (`"K"`) or values (`"V"`): `‖W_QKᵀ W_OV‖ / ‖W_QK‖ ‖W_OV‖`, `‖W_QK W_OV‖ / …` or
        `‖W_OV W_OV‖ / …` with Frobenius norms, from 0 to 1. It is NaN if head j is not in a later
        layer than head i. Heads are in the order of `heads`.

        Raises:
            ValueError: the kind is unknown.

        Source: Elhage et al. 2021, "Composition scores".
        """
        if kind not in get_args(Composition):
            raise ValueError(f"composition({kind!r}): give 'Q', 'K' or 'V'.")
        starts = [0]
        for one in self.layers:
            starts.append(starts[-1] + len(one.q))
        found = self.layers[0].q.new_full((starts[-1], starts[-1]), torch.nan)
        for n, first in enumerate(self.layers):
            for m, second in enumerate(self.layers[n + 1 :], n + 1):
                if first.out.shape[1] == second.q.shape[2] == second.v.shape[2]:
                    rows, columns = slice(*starts[n : n + 2]), slice(*starts[m : m + 2])
                    found[rows, columns] = _composition(first, second, kind)
        return found

    def pairs(self, least: float = 0.0) -> list[dict[str, Any]]:
        """Return a row for each pair of heads that can compose: scores `q`, `k` and `v`.

        `from_layer`, `from_head` and `from_module` identify the writing head; `layer`, `head` and
        `module` the reading head. Pairs whose largest score is below `least` are omitted.
        """
        scores = {kind.lower(): self.composition(kind) for kind in get_args(Composition)}
        largest = torch.stack([*scores.values()]).amax(0)
        names = {one.layer: one.module for one in self.layers}
        every = self.heads
        return [
            {
                **{"from_layer": every[i][0], "from_head": every[i][1]},
                **{"from_module": names[every[i][0]]},
                **{"layer": every[j][0], "head": every[j][1], "module": names[every[j][0]]},
                **{kind: float(score[i, j]) for kind, score in scores.items()},
            }
            for i, j in (largest >= least).nonzero().tolist()
        ]

    def table(self) -> list[dict[str, Any]]:
        """Return a row for each head: `layer`, `head`, `module` and its metrics.

        * `qk_norm`, `ov_norm`: Frobenius norms of the QK and OV circuits.
        * `copying`: `Σ λ / Σ |λ|` over the eigenvalues of the OV circuit from tokens to logits,
          `W_U W_OV W_E`: 1 for a head that raises the logit of each token that it attends to
          (Elhage et al. 2021, "Copying").
        * `previous_token`: the mean weight on the previous position if inputs are only the rows of
          the position table.
        """
        return [
            {
                **{"layer": one.layer, "head": head, "module": one.module},
                **{name: values[head] for name, values in one.facts.items()},
            }
            for one in self.layers
            for head in range(len(one.q))
        ]


def circuits(
    model: nn.Module,
    *,
    num_heads: int | None = None,
    fold: bool = True,
    embedding: Float[Tensor, "V E"] | None = None,
    unembedding: Float[Tensor, "V E"] | None = None,
    positions: Float[Tensor, "T E"] | None = None,
    length: int = 256,
) -> Circuits:
    """Read the QK and OV circuits of every head from a model's weights, without running it.

    Layers are numbered from 0 in the order of the model's modules. Circuits are kept in factors: no
    `[E, E]` matrix is built for a head.

    Args:
        model: a model whose attention weights are in one of the layouts of `headwise.weights`.
        num_heads: the number of query heads. Default: from the module or its config.
        fold: fold the gain and the centering of the norm before attention into q, k and v, so that
            they read the residual stream, and those of the last norm into the unembedding. The
            scale of a norm depends on the text and is omitted. False uses the weights unchanged.
        embedding, unembedding, positions: the tables of tokens, of logits and of positions.
            Default: found in the model.
        length: the number of positions over which `previous_token` is averaged.

    Raises:
        ValueError: the layout of the weights is unknown; or the number of heads is unknown or does
            not fit.

    >>> from headwise.models import builtin, load
    >>> model, _ = load(builtin())
    >>> found = circuits(model)
    >>> found
    <Circuits: 3 layers, 12 heads>
    >>> found["L0H1"].q.shape, found.composition("K").shape
    (torch.Size([32, 128]), torch.Size([12, 12]))

    Source: Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits".
    """
    quoted = check_model("circuits", model)
    state = {as_written(name): x.detach() for name, x in model.state_dict().items()}
    shapes = {name: tuple(x.shape) for name, x in state.items()}
    two_fold = any("GPTBigCode" in type(one).__name__ for one in model.modules())
    try:
        layout = LAYOUTS[detect_shapes(shapes, "gpt_bigcode" if two_fold else "nanogpt")]
        layers = find_layers(layout, shapes, quoted)
    except ValueError as error:
        raise ValueError(f"{quoted}: {str(error).removeprefix('detect_layout(…): ')}") from None
    modules = {as_written(name): module for name, module in model.named_modules()}
    tables = _Tables(model, modules, fold, embedding, unembedding, positions, length)
    names = attending(model)
    found = []
    for number, layer in enumerate(layers):
        place = layer.prefix.rstrip("./")
        inside = [name for name in names if f"{name}.".startswith(layer.prefix)]
        owner = modules.get(place)
        heads = num_heads or number_of_heads(*(owner.modules() if owner else ()), model)
        parts, groups = _parts(layer, state, heads, quoted)
        name = inside[0] if len(inside) == 1 else place
        found.append(_layer(name, number, parts, groups, modules, place, tables))
    return Circuits(found, tables.missing)


def _layer(
    name: str,
    number: int,
    parts: Parts,
    groups: Tensor,
    modules: Mapping[str, nn.Module],
    place: str,
    tables: _Tables,
) -> LayerCircuits:
    q, k, v = parts["q.weight"], parts["k.weight"][groups], parts["v.weight"][groups]
    out = parts["out.weight"].transpose(0, 1)
    norm = _norm_before(place, modules) if tables.fold else ""
    facts: dict[str, list[float]] = {}
    weights = [
        x if not norm else NormMap.of(modules[norm], q.shape[2]).read_by(x) for x in (q, k, v)
    ]
    facts["qk_norm"] = _norm_of_product(weights[0].mT, weights[1]).tolist()
    facts["ov_norm"] = _norm_of_product(out, weights[2]).tolist()
    between = tables.from_tokens_to_logits(q.shape[2], out.shape[1])
    if between is not None:
        values = torch.linalg.eigvals(weights[2] @ between.to(out) @ out)
        facts["copying"] = (values.sum(-1).real / values.abs().sum(-1)).tolist()
    if (x := tables.rows_of_positions(q.shape[2])) is not None:
        x = modules[norm](x) if norm else x
        biases = [parts.get(f"{part}.bias", q.new_zeros(1, q.shape[1])) for part in "qk"]
        queries = torch.einsum("te,hde->htd", x.to(q), q) + biases[0][:, None]
        bias = biases[1] if len(biases[1]) == 1 else biases[1][groups]
        keys = torch.einsum("te,hde->htd", x.to(k), k) + bias[:, None]
        options = {"mask": Causal(), "scale": _scale(modules.get(place))}
        seen = observe(
            queries[None], keys[None], keys[None], Mass(Previous()), output=False, **options
        )
        facts["previous_token"] = seen["previous"][0, :, 1:].mean(-1).tolist()
    return LayerCircuits(name, number, weights[0], weights[1], weights[2], out, norm, facts)


def _parts(
    layer: LayerTensors, state: Mapping[str, Tensor], num_heads: int | None, quoted: str
) -> tuple[Parts, Tensor]:
    """Return the parts of a layer in at least float32, and the key/value head of each head."""
    held, patterns = stored_tensors(layer, state.__getitem__)
    alone = any("{n}" in name for name in layer.where)  # heads have tensors of their own
    call = f"{quoted} at {layer.prefix!r}" if layer.prefix else quoted
    sizes = sizes_of(held, patterns, None if alone else num_heads, None, call)
    parts: Parts = {}
    for name, tensor in held.items():
        parts |= unpack(*patterns[name], _wide(tensor), sizes)
    if "out.weight" not in parts:  # the output is the heads' outputs side by side
        square = torch.eye(sizes.heads_width).to(parts["q.weight"])
        parts["out.weight"] = square.unflatten(1, (sizes.num_heads, sizes.value_dim))
    heads, kv = torch.arange(sizes.num_heads), sizes.num_kv_heads
    return parts, heads % kv if layer.layout.turns else heads // (sizes.num_heads // kv)


def _wide(x: Tensor) -> Tensor:
    """Return a weight in at least float32, without a graph."""
    return x.detach().to(torch.promote_types(x.dtype, torch.float32))


def _scale(module: nn.Module | None) -> float | None:
    """Return the scale of the scores, from an attribute of a module, if any."""
    found = [getattr(module, name, None) for name in ("scale", "scaling")]
    return next((x for x in found if isinstance(x, float)), None)


def _norm_before(place: str, modules: Mapping[str, nn.Module]) -> str:
    """Return the name of the norm before an attention module; "" if none is known."""
    parent = place.rpartition(".")[0]
    block = modules.get(parent)
    first = getattr(block, "norm_first", getattr(block, "do_layer_norm_before", True))
    names = (f"{parent}.{name}".removeprefix(".") for name in _BEFORE)
    found = (name for name in names if name in modules and is_norm(modules[name]))
    return next(found, "") if place and first else ""


class _Tables:
    """The tables of a model's tokens, logits and positions, and the reasons for missing ones."""

    def __init__(
        self,
        model: nn.Module,
        modules: Mapping[str, nn.Module],
        fold: bool,
        embedding: Tensor | None,
        unembedding: Tensor | None,
        positions: Tensor | None,
        length: int,
    ) -> None:
        self.fold, self.length, self.missing = fold, length, dict[str, str]()
        self.tokens = self._embedding(model, modules) if embedding is None else embedding
        self.positions = _positions(modules) if positions is None else positions
        self.logits = unembedding if unembedding is not None else self._unembedding(model, modules)
        self._between: Tensor | None = None

    def _embedding(self, model: Any, modules: Mapping[str, nn.Module]) -> Tensor | None:
        find = getattr(model, "get_input_embeddings", lambda: None)
        own: Any = find()
        found = (
            [own]
            if hasattr(own, "weight")
            else _embeddings("wte|tok|word|shared|embed_in", modules)
        )
        return max((one.weight for one in found), key=len, default=None)

    def _unembedding(self, model: Any, modules: Mapping[str, nn.Module]) -> Tensor | None:
        find = getattr(model, "get_output_embeddings", lambda: None)
        head: Any = find() or modules.get("lm_head")
        weight = getattr(head, "weight", None)
        norms = [name for name, module in modules.items() if is_norm(module)]
        if weight is None or not (norms and self.fold):
            return weight
        last = [n for n in norms if n.rpartition(".")[2] in _LAST and not re.search(r"\.\d+\.", n)]
        if len(last) != 1:
            return None
        return NormMap.of(modules[last[0]], weight.shape[1]).read_by(_wide(weight))

    @torch.no_grad()
    def from_tokens_to_logits(self, width: int, out: int) -> Tensor | None:
        """Return `W_Eᵀ W_U` `[E, O]`, computed once for all heads."""
        tables = {
            "a table of tokens": self.tokens,
            "an unembedding after a known last norm": self.logits,
        }
        for what, table in tables.items():
            if table is None:
                self.missing["copying"] = f"{what} was not found; give embedding= and unembedding="
                return None
        assert self.tokens is not None
        assert self.logits is not None
        if (self.tokens.shape[1], self.logits.shape[1]) != (width, out):
            self.missing["copying"] = "tokens or logits have another width than the layer"
            return None
        if self._between is None:
            self._between = _wide(self.tokens).T @ _wide(self.logits)
        return self._between

    def rows_of_positions(self, width: int) -> Tensor | None:
        """Return the first rows of the table of positions, `[T, E]`."""
        if self.positions is None or self.positions.shape[-1] != width:
            self.missing["previous_token"] = (
                "no table of positions was found (rotary positions have none); give positions="
            )
            return None
        return self.positions.detach().reshape(-1, width)[: self.length]


def _positions(modules: Mapping[str, nn.Module]) -> Tensor | None:
    """Return the largest table of positions, without the rows before the first position."""
    found = [
        one.weight[getattr(one, "offset", 0 if one.padding_idx is None else one.padding_idx + 1) :]
        for one in _embeddings("wpe|pos", modules)
    ]
    return max(found, key=len, default=None)


def _embeddings(words: str, modules: Mapping[str, nn.Module]) -> list[nn.Embedding]:
    """Return the embeddings whose own names (after the last dot) contain one of these words."""
    pattern = re.compile(words, re.IGNORECASE)
    return [
        module
        for name, module in modules.items()
        if isinstance(module, nn.Embedding) and pattern.search(name.rpartition(".")[2])
    ]


def _composition(first: LayerCircuits, second: LayerCircuits, kind: Composition) -> Tensor:
    """Return the scores `[H, H']` of writing and reading heads, computed from their factors."""
    reads, other = {
        "Q": (second.q, second.k),
        "K": (second.k, second.q),
        "V": (second.v, second.out.mT),
    }[kind]
    middle = torch.einsum("ndo,mov->mndv", reads, first.out)  # [writes, reads, D, Dv]
    product = _triangle(other.mT) @ middle @ _triangle(first.v.mT)[:, None].mT
    norms = torch.linalg.matrix_norm(product)
    of_first = _norm_of_product(first.out, first.v)
    of_second = _norm_of_product(other.mT, reads)
    return norms / (of_first[:, None] * of_second)


def _triangle(x: Tensor) -> Tensor:
    """Return R `[…, D, D]` of a tall matrix: `‖x y‖ = ‖R y‖` for any y."""
    return torch.linalg.qr(x, mode="r").R


def _norm_of_product(left: Tensor, right: Tensor) -> Tensor:
    """Return `‖left right‖` of each head, for `[H, E, D]` and `[H, D, E]`."""
    return torch.linalg.matrix_norm(_triangle(left) @ _triangle(right.mT).mT)

"""QK-clip: scale down the weights of heads whose largest score exceeds a limit."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ..capture.captured import Watched, WatchedModule
from ..capture.modules import check_model
from ..capture.ranks import number_of_heads
from ..core.numbers import format_value, real
from ..stats.max_logit import ABOVE
from ..weights.projections import QueryKeyProjections, projections_of
from .wrappers import bare_name, check_optimizer, innermost

RULES = ("query", "both")

_NORM = re.compile(
    r"(^|_)(q|k|qk|query|key)_?(layer_?)?(norm|ln|rms)|(norm|ln|rms)_?(q|k|qk|query|key)(_|$)",
    re.IGNORECASE,
)


@torch.no_grad()
def qk_clip_(
    model: nn.Module,
    seen: Watched | Mapping[str, Tensor],
    limit: float = 100.0,
    optimizer: Any = None,
    *,
    rule: str = "query",
) -> dict[str, Float[Tensor, " H"]]:
    """Scale down the weights of heads whose largest score exceeds the limit, to reach the limit.

    `γ_h = min(1, limit / S_h)`, where S_h is the largest score of head h over all micro-batches of
    the step. Call it after the optimizer's step. Weights and biases of the projections are scaled
    in place; the state of the optimizer (its moments) is not changed. On the same input a scaled
    head has γ times its scores, also with rotary positions. Terms added to the scores (ALiBi, a
    bias) and a softcap do not scale: the limit then holds for `scale · q·k` alone.

    Args:
        model: the watched model, with or without wrappers (`module.`, `_orig_mod.` and
            `_checkpoint_wrapped_module.` in names are ignored).
        seen: the result of `watch(model, MaxLogit())` over the step, or of the cheaper
            `MaxLogit(above=limit)`; or the largest scores `[H]` by module name. Heads with −inf had
            no valid query and are not changed, like heads below the limit.
        limit: the largest allowed score, above 0.
        optimizer: the optimizer of these weights. Required for weights in half precision, as it may
            hold float32 master weights, which are scaled too and rounded to the weights:
            `param.main_param`, `optimizer.state[param]` or `param_groups_master`.
        rule: `"query"` scales queries by γ, so that no other head changes. `"both"` scales queries
            and keys by √γ each; a key shared by a group is scaled by √ of the smallest γ of its
            heads, and each query by the remaining factor, so each head is scaled by exactly its γ;
            other heads of the group change only by rounding.

    Returns:
        γ by module name, `[H]` in float64, for modules with a scaled head.

    Raises:
        ValueError: maxima of sampled queries, or maxima that are not finite; normalized queries and
            keys; weights of an unknown layout, sharded by DeepSpeed, or in half precision without
            an optimizer; module names or head counts that do not match the model; an unknown rule;
            an invalid optimizer. No weight is scaled in these cases.

    Modules that share weights are scaled once, by the smallest γ of each head. Ranks with copies of
    a model must all clip by the maxima over all ranks, or the copies diverge.

    With LoRA and DoRA (peft), base weights and adapters are both scaled, so the base must be saved
    too, or the adapters merged. In joint attention of two streams (SD3), both are scaled.

    For multi-head latent attention (names as in transformers), `"query"` scales the rows of the
    head in `q_b_proj`; `"both"` is the rule of Kimi K2: √γ on the parts without positions, and γ on
    the rotated query, whose key all heads share.

    Source: Kimi K2 2025, §2.1.

    >>> import torch, headwise as hw
    >>> _ = torch.manual_seed(0)
    >>> layer, x = hw.MultiHeadAttention(24, num_heads=3), 5.5 * torch.randn(2, 7, 24)
    >>> with hw.watch(layer, hw.MaxLogit()) as before:
    ...     out = layer(x)
    >>> clipped = hw.qk_clip_(layer, before, limit=100.0)
    >>> with hw.watch(layer, hw.MaxLogit()) as after:
    ...     out = layer(x)
    >>> [seen[""]["max_logit"].amax(0).round().tolist() for seen in (before, after)]
    [[94.0, 121.0, 103.0], [94.0, 100.0, 100.0]]
    >>> [round(gamma, 2) for gamma in clipped[""].tolist()]
    [1.0, 0.83, 0.97]
    """
    call = check_model("qk_clip_", model).replace("…", f"…, limit={format_value(limit)}")
    ceiling = real(limit)
    if ceiling is None or not 0 < ceiling < math.inf:
        raise ValueError(f"{call}: limit must be a finite number above 0.")
    if rule not in RULES:
        raise ValueError(f"{call}: there is no rule {rule!r}; there are: {', '.join(RULES)}.")
    if optimizer is not None:
        check_optimizer(call, model, optimizer)
    finder = _WeightsFinder(model, call)
    shared: dict[tuple[int, ...], _ClippedWeights] = {}
    places: dict[str, tuple[_ClippedWeights, slice]] = {}
    for name, largest in _maxima(seen, ceiling, call):
        weights, heads = finder.weights_of(name, len(largest))
        weights = shared.setdefault(weights.scaled(rule), weights)
        factor = torch.where(largest > ceiling, ceiling / largest, 1.0)
        weights.gamma[heads] = torch.minimum(weights.gamma[heads], factor)
        places[name] = weights, heads
    _check_disjoint(shared, call)
    changes = [
        (weights.parameters[name], factor, _master_of(weights.parameters[name], optimizer, call))
        for weights in shared.values()
        if bool((weights.gamma < 1).any())
        for name, factor in weights.factors(rule)
        if bool((factor != 1).any())
    ]
    for parameter, factor, master in changes:
        stepped = parameter if master is None else master
        kind = torch.promote_types(stepped.dtype, torch.float32)
        stepped.mul_(_alike(factor.to(stepped.device, kind), stepped))
        if master is not None:
            parameter.copy_(master)
    factors = ((name, weights.gamma[heads]) for name, (weights, heads) in places.items())
    return {name: gamma for name, gamma in factors if bool((gamma < 1).any())}


# ── the largest scores ──────────────────────────────────────────────────────────────────────────


def _maxima(
    seen: Watched | Mapping[str, Tensor], limit: float, call: str
) -> Iterator[tuple[str, Tensor]]:
    """Yield the largest scores of each module, `[H]` in float64 on the CPU.

    Raises:
        ValueError: there are none, or they are not finite.
    """
    if not isinstance(seen, Watched | Mapping):
        raise ValueError(
            f"{call}: seen is a {type(seen).__name__}; pass the result of watch(model, MaxLogit()) "
            f"or a mapping from module names to largest scores [H]."
        )
    if isinstance(seen, Watched):
        seen.must_not_be_empty()
    if not len(seen):
        raise ValueError(f"{call}: seen is empty; no attention was seen in this step.")
    if isinstance(seen, Watched) and seen.left_out:
        some = "; ".join(f"{name or 'the model'}: {why}" for name, why in seen.left_out.items())
        warnings.warn(
            f"{call}: these modules were not captured and are not clipped: {some}", stacklevel=4
        )
    for name in seen:
        if isinstance(seen, Watched):
            largest = largest_of(seen[name], limit, call)
        else:
            largest = torch.as_tensor(seen[name])
        if largest.dim() != 1:
            raise ValueError(
                f"{call}: the largest scores of {name!r} have shape {list(largest.shape)}; pass "
                f"one number per head, [H]."
            )
        largest = largest.detach().cpu().double()
        wrong = largest.isnan() | (largest == math.inf)
        if bool(wrong.any()):
            head = int(wrong.nonzero()[0])
            raise ValueError(
                f"{call}: the largest score of head {head} in {name!r} is {float(largest[head])}; "
                f"scaling cannot fix this; restore an earlier checkpoint."
            )
        yield name, largest


def largest_of(module: WatchedModule, limit: float, call: str) -> Tensor:
    """Return the exact largest score of each head over all calls."""
    looked_at, there = module.queries or (0, 1)
    some = [name for name in module.statistics if name.startswith(ABOVE)]
    names = [name for name in some if float(name.removeprefix(ABOVE)) <= limit]
    if "max_logit" in module.statistics and looked_at == there:
        names.insert(0, "max_logit")
    if not names:
        why = f"it holds {', '.join(module.statistics) or 'nothing'}"
        if "max_logit" in module.statistics:
            why = "its maxima cover only sampled queries and may be too low"
        raise ValueError(
            f"{call}: the exact largest scores of {module.name!r} were not recorded: {why}; watch "
            f"with MaxLogit(), or with MaxLogit(above={limit:g}), which always covers all queries."
        )
    if module.running is not None:
        return module.running[names[0]]
    tops = [x.amax(0) for one in module.calls if len(x := one[names[0]].values)]
    return torch.stack(tops).amax(0) if tops else torch.full((module.heads,), -math.inf)


# ── the weights ─────────────────────────────────────────────────────────────────────────────────


@dataclass(eq=False)
class _ClippedWeights:
    """The projections of one layer, and the factors of its heads, `[H]`."""

    projections: QueryKeyProjections
    parameters: Mapping[str, nn.Parameter]
    gamma: Tensor

    def scaled(self, rule: str) -> tuple[int, ...]:
        """Return the ids of the weights that a rule scales; modules may share them."""
        names = self.projections.queries + (self.projections.keys if rule == "both" else ())
        return tuple(id(self.parameters[name]) for name in names)

    def factors(self, rule: str) -> Iterator[tuple[str, Tensor]]:
        """Yield the factor of each tensor."""
        of_keys = torch.ones(self.projections.num_kv_heads, dtype=torch.float64)
        groups = torch.tensor([self.projections.group_of(head) for head in range(len(self.gamma))])
        if rule == "both":
            of_keys = of_keys.scatter_reduce(0, groups, self.gamma, "amin").sqrt()
        return self.projections.factors(self.gamma / of_keys[groups], of_keys)


class _WeightsFinder:
    """Find the weights of modules by module names."""

    def __init__(self, model: nn.Module, call: str) -> None:
        self.model, self.call = model, call
        self._bare: dict[str, nn.Module] | None = None

    def module(self, name: str) -> nn.Module:
        """Return the module of that name, without wrappers."""
        try:
            return innermost(self.model.get_submodule(name))
        except AttributeError:
            pass
        if self._bare is None:
            named = self.model.named_modules(remove_duplicate=False)
            self._bare = {bare_name(name): innermost(module) for name, module in named}
        if (bare := bare_name(name)) not in self._bare:
            raise ValueError(f"{self.call}: the model has no module {name!r}.")
        return self._bare[bare]

    def weights_of(self, name: str, heads: int) -> tuple[_ClippedWeights, slice]:
        """Return the query and key weights of a module, and the slice of their heads that it uses.

        They may belong to a parent module, if the module itself has no projections.
        """
        module = self.module(name)
        at = f"{self.call}: in {name!r} ({type(module).__name__})"
        if isinstance(known := number_of_heads(module), int) and known != heads:
            fault = f"{at}: got {heads} largest scores for {known} heads."
            if any(map(_over_ranks, module.parameters())):
                fault += " Pass those of all ranks: hw.parallel.largest_logits(seen)."
            raise ValueError(fault)
        _check_norms(module, at)
        if getattr(module, "head_shard", None) is not None:
            return self._own_weights(module, heads, at)
        own, faults = {id(parameter) for parameter in module.parameters()}, []
        for root in _and_around(name):
            owner = self.module(root)
            named = owner.named_parameters(remove_duplicate=False)
            parameters = {bare_name(n): parameter for n, parameter in named}
            try:
                projections = projections_of(parameters, heads, type(module))
            except ValueError as error:
                faults.append(str(error))
                continue
            if owner is module or own <= {id(parameters[n]) for n in projections.own}:
                _check_norms(owner, at)
                _check_weights(projections, parameters, at)
                if known is None and any(_over_ranks(parameters[n]) for n in projections.queries):
                    raise ValueError(
                        f"{at}: its weights are sharded and its number of heads is unknown; the "
                        f"captured heads may not be all of them."
                    )
                alone = [id(parameters[n]) in own for n in projections.queries]
                first = _first_head(alone, projections.num_heads, heads, at)
                gamma = torch.ones(projections.num_heads, dtype=torch.float64)
                return _ClippedWeights(projections, parameters, gamma), slice(first, first + heads)
        raise ValueError(f"{at}: no known layout: {faults[0]}")

    def _own_weights(self, module: Any, heads: int, at: str) -> tuple[_ClippedWeights, slice]:
        """Return the weights of a module with a known head shard."""
        parameters, gamma = dict(module.named_parameters()), torch.ones(heads, dtype=torch.float64)
        try:
            projections = module.head_shard.projections(module)
        except ValueError as error:
            raise ValueError(f"{at}: {error}.") from None
        _check_weights(projections, parameters, at)
        return _ClippedWeights(projections, parameters, gamma), slice(0, heads)


def _over_ranks(parameter: Tensor) -> bool:
    """Return True for a `DTensor` of PyTorch."""
    return hasattr(parameter, "device_mesh")


def _here(x: Tensor) -> Tensor:
    """Return the shard of a tensor on this rank: all of it, unless it is sharded."""
    return x.to_local() if _over_ranks(x) else x  # type: ignore[operator]


def _alike(factor: Tensor, parameter: Tensor) -> Tensor:
    """Return a factor that can multiply a parameter: replicated if the parameter is sharded.

    Each rank scales its shard without communication. (Assigning to a slice of a sharded parameter
    has no effect.)
    """
    if not _over_ranks(parameter):
        return factor
    from torch.distributed.tensor import DTensor, Replicate

    mesh = parameter.device_mesh  # type: ignore[attr-defined]
    return DTensor.from_local(factor, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _first_head(own: list[bool], total: int, heads: int, at: str) -> int:
    """Return the first head of a module in its layer; each head may have its own module.

    `own` marks the query tensors of the layer that belong to the module.
    """
    if total == heads:
        return 0
    if heads == 1 and any(own):
        return own.index(True)
    raise ValueError(f"{at}: got {heads} largest scores for {total} heads.")


_NORMED = (
    "queries and keys are normalised after their projection, so scaling the projection does not "
    "change the scores; the weights of the norms bound them."
)


def _and_around(name: str, most: int = 3) -> list[str]:
    """Return the names of a module and of the modules that contain it.

    >>> _and_around("layers.0.attn")
    ['layers.0.attn', 'layers.0', 'layers', '']
    """
    names = [name]
    while names[-1] and len(names) <= most:
        names.append(names[-1].rpartition(".")[0])
    return names


def _check_norms(module: nn.Module, at: str) -> None:
    """Raise ValueError if queries or keys are normalized, judging by names of parts and weights."""
    parts = [n for n, m in module.named_modules() if not isinstance(m, nn.Identity)]
    parts += [n for n, _ in module.named_parameters()]
    if norm := next((n for n in parts if _NORM.search(n.rpartition(".")[2])), None):
        raise ValueError(f"{at}: {norm!r} is a norm: {_NORMED}")


def _check_weights(
    projections: QueryKeyProjections, parameters: Mapping[str, nn.Parameter], at: str
) -> None:
    """Raise ValueError for weights that cannot be scaled in place."""
    if projections.normed:
        raise ValueError(f"{at}: {_NORMED}")
    for name in (*projections.queries, *projections.keys):
        parameter = parameters[name]
        if any(hasattr(parameter, x) for x in ("ds_id", "_hp_mapping")):
            raise ValueError(
                f"{at}: {name} is sharded by DeepSpeed, which is not supported; unsharded weights "
                f"and PyTorch's DTensors (FSDP2, hw.parallel.plan) are."
            )
        if parameter.dtype.itemsize < 2 or not parameter.is_floating_point():
            raise ValueError(f"{at}: {name} is {parameter.dtype}; it cannot be scaled in place.")
    of_keys = {id(parameters[name]) for name in projections.keys if name not in projections.queries}
    if of_keys & {id(parameters[name]) for name in projections.queries}:
        raise ValueError(f"{at}: queries and keys share a weight, so scaling it would scale both.")


def _check_disjoint(shared: Mapping[tuple[int, ...], _ClippedWeights], call: str) -> None:
    """Raise ValueError if layers share only some of the scaled weights."""
    owner: dict[int, tuple[int, ...]] = {}
    for key in shared:
        for one in key:
            if owner.setdefault(one, key) != key:
                raise ValueError(
                    f"{call}: two modules share some but not all of the weights to be scaled; "
                    f"scaling one module would also scale the other."
                )


# ── masters ─────────────────────────────────────────────────────────────────────────────────────


def _master_of(parameter: nn.Parameter, optimizer: Any, call: str) -> Tensor | None:
    """Return the float32 master of a half-precision weight; `None` if the optimizer has none.

    Raises:
        ValueError: the weight is in half precision and no optimizer was given.
    """
    if parameter.dtype.itemsize >= 4:
        return None
    if optimizer is None:
        raise ValueError(
            f"{call}: the weights are {parameter.dtype}; their optimizer may hold float32 master "
            f"weights that would undo the clip at its next step; pass optimizer=…."
        )
    state = getattr(optimizer, "state", None)
    kept = state.get(parameter) if isinstance(state, Mapping) else None
    candidates = dict(kept) if isinstance(kept, Mapping) else {}
    candidates["main_param"] = getattr(parameter, "main_param", None)  # Megatron-LM
    groups = getattr(optimizer, "param_groups_master", ())  # apex
    for group, masters in zip(getattr(optimizer, "param_groups", ()), groups, strict=False):
        for one, master in zip(group["params"], masters["params"], strict=False):
            if one is parameter:
                candidates["master"] = master
    for name, value in candidates.items():
        if not isinstance(value, Tensor) or value.dtype != torch.float32:
            continue
        if value.shape != parameter.shape:
            continue
        if "master" in str(name) or torch.equal(_here(value).to(parameter.dtype), _here(parameter)):
            return value
    step = torch.finfo(parameter.dtype).eps
    warnings.warn(
        f"{call}: no float32 master of {parameter.dtype} weights was found in "
        f"{type(optimizer).__name__}; the weights are scaled directly, which rounds γ to steps of "
        f"{step:.2g}: a head may stay above the limit by this fraction.",
        stacklevel=4,
    )
    return None

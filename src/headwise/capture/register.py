"""`attn_implementation="headwise"`: transformers' attention on headwise's kernels.

Only `register()` imports transformers and registers anything. Masks are those of `sdpa`, so that
calls that the kernel does not support can run there. Models that support neither `sdpa` nor a flash
or flex kernel compute attention in their own way; these run on their own `eager` function.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from .mask_import import Copy, MaskMemo
from .serve import BYPASS, AcceleratedCall, AttentionRequest, accelerators, note, serve

_NAME = "headwise"
_SUPPORTS = ("_supports_sdpa", "_supports_flash_attn", "_supports_flex_attn")
"""Attributes of model classes that declare support for standard attention kernels."""

_ROUTE = "headwise_attention"


def headwise_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Any]:
    """Compute attention for a model of transformers; return `[B, T, H, Dv]` and no weights."""
    given = (module, query, key, value, attention_mask)
    plain = textbook(type(module), special(options))
    if torch.compiler.is_compiling():  # the choice depends on values
        return (_sdpa() if plain and not special(options) else _eager)(*given, **options)
    if not plain:
        note(_ROUTE, "the model uses its own kind of attention")
        return _eager(*given, **options)
    served = served_call(*given, options)
    note(_ROUTE, served)
    if isinstance(served, AcceleratedCall):
        return served.out().transpose(1, 2).contiguous(), None
    with BYPASS:  # sdpa would ignore sinks
        return (_eager if special(options) else _sdpa())(*given, **options)


def served_call(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    options: dict[str, Any],
) -> AcceleratedCall | str:
    """Return an accelerated call of the interface, with arguments read as by `sdpa`, plus
    softcap and sinks; or the reason why it is not accelerated."""
    if options.get("cache") is not None:
        return "a paged cache"
    if options.get("output_attentions"):
        return "attention weights are requested (output_attentions=True)"
    if query.dim() != 4 or not (mask is None or (isinstance(mask, Tensor) and mask.dim() == 4)):
        return "a mask of a different kind from sdpa's, or queries with other axes"
    queries = query.shape[2]
    bias = options.get("position_bias")
    causal = causal_by(module, options) and mask is None and queries > 1
    if causal and key.shape[2] > queries:  # a static cache is empty after the first prompt
        key, value = key[:, :, :queries], value[:, :, :queries]
        bias = None if bias is None else bias[..., :queries]
    q, k, v = query, key, value
    if len(q) != len(k):  # a single row of queries may serve the whole batch
        q, k, v = (x.expand(max(len(q), len(k)), -1, -1, -1) for x in (q, k, v))
    call = AttentionRequest(
        q,
        k,
        v,
        mask=mask,
        causal=causal,
        scale=options.get("scaling"),
        dropout=options.get("dropout", 0.0),
        softcap=options.get("softcap"),
        sinks=options.get("s_aux"),
        bias=bias,
    )

    def original() -> Tensor:
        if call.special:
            raise ValueError(
                f'attn_implementation="headwise": the scores of {type(module).__name__} are no '
                f"finite numbers of {query.dtype}."
            )
        return _sdpa()(module, query, key, value, mask, **options)[0].transpose(1, 2)

    nets = accelerators()
    return serve(call, original, nets[-1].masks if nets else _MEANINGS)


def special(options: dict[str, Any]) -> bool:
    """Return True if a call has options that `sdpa` does not support."""
    return options.get("softcap") is not None or options.get("s_aux") is not None


def causal_by(module: nn.Module, options: dict[str, Any]) -> bool:
    """Return True if a call's options, or else its module, say that it is causal."""
    causal = options.get("is_causal")
    return getattr(module, "is_causal", True) if causal is None else bool(causal)


def _sdpa() -> Any:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward


# ── which models ────────────────────────────────────────────────────────────────────────────────


_TEXTBOOK: dict[type[nn.Module], bool] = {}


def textbook(attention: type[nn.Module], kernels_only: bool) -> bool:
    """Return True if a module class attends as kernels do: the models in its file declare support,
    or it passes a softcap or sinks, which only kernels read."""
    if attention not in _TEXTBOOK:
        _TEXTBOOK[attention] = _supported(attention)
    return kernels_only or _TEXTBOOK[attention]


def _supported(attention: type[nn.Module]) -> bool:
    base: Any = sys.modules["transformers.modeling_utils"].PreTrainedModel
    kinds = [
        kind
        for kind in vars(sys.modules[attention.__module__]).values()
        if isinstance(kind, type) and issubclass(kind, base)
    ]
    own = [kind for kind in kinds if kind.__module__ == attention.__module__]
    return not own or any(getattr(kind, name, False) for kind in own for name in _SUPPORTS)


def _eager(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Any]:
    """Run the model's own `eager` function, which takes an additive mask."""
    own = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if own is None or options.get("cache") is not None:
        raise ValueError(
            f'attn_implementation="headwise": {type(module).__name__} has softcap, sinks or '
            f"attention of its own, which requires an eager_attention_forward in its file and no "
            f"paged cache; use another attn_implementation."
        )
    queries, keys = query.shape[2], key.shape[2]
    if mask is None and causal_by(module, options) and queries > 1:
        mask = torch.ones(1, 1, queries, keys, dtype=torch.bool, device=query.device).tril()
    if isinstance(mask, Tensor) and mask.dtype == torch.bool:
        least = torch.finfo(query.dtype).min
        mask = torch.zeros((), dtype=query.dtype, device=query.device).where(mask, least)
    return own(module, query, key, value, mask, **options)


# ── masks ───────────────────────────────────────────────────────────────────────────────────────


class _Meanings(MaskMemo):
    """A cache of converted masks, each kept while its tensor exists; all layers share a mask."""

    def __init__(self) -> None:
        self._of: Any = WeakIdKeyDictionary()

    def of(self, given: Tensor, key: object, find: Any, reads: Any = ()) -> Any:
        """Return `find()`, cached for this tensor and its current values."""
        copy, results = self._of.get(given, (None, {}))
        if copy is None or not copy.same(given):
            copy, results = Copy(given), {}
            self._of[given] = copy, results
        if key not in results:
            results[key] = find()
        return results[key]


_MEANINGS = _Meanings()


# ── registering ─────────────────────────────────────────────────────────────────────────────────


def register() -> None:
    """Import transformers, and register `attn_implementation="headwise"` with it.

    Calls that the kernel does not run go to transformers' own `sdpa`; calls with softcap or sinks,
    which `sdpa` cannot compute, to the backend of `attend()`. `accelerate(model)` around such
    a model reports which calls ran where.

    Raises:
        ImportError: transformers is not installed, or has no `AttentionInterface`.

    >>> import headwise as hw
    >>> hw.register()
    >>> from transformers import LlamaConfig, LlamaModel
    >>> sizes = dict(hidden_size=24, num_attention_heads=4, num_key_value_heads=2)
    >>> config = LlamaConfig(**sizes, intermediate_size=32, num_hidden_layers=1, vocab_size=9)
    >>> LlamaModel._from_config(config, attn_implementation="headwise").config._attn_implementation
    'headwise'
    """
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(_NAME, headwise_attention)
    AttentionMaskInterface.register(_NAME, AttentionMaskInterface()["sdpa"])

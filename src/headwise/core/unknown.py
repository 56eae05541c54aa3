"""Arguments that other libraries' attention has: what is written for them here."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from types import MappingProxyType

_CAUSAL = "for a causal mask write mask=hw.Causal()"
_MASK = (
    "write mask=hw.Dense(m) for a boolean m in which True means 'may attend', mask=hw.Dense(~m) "
    "where True means 'hidden', mask=hw.Bias(m) for numbers that are added to the scores"
)
_PADDING = (
    "write mask=hw.Padding(lengths), or mask=hw.Dense(~m[:, None, None]) for an m [B, S] in which "
    "True means 'hidden'"
)
_WEIGHTS = (
    "hw.observe(q, k, v, …) returns what every head did, and .weights(heads=…) of it the attention"
)
_WRITE = {
    "is_causal": _CAUSAL,
    "causal": _CAUSAL,
    "attn_mask": _MASK,
    "attention_mask": _MASK,
    "attn_bias": "write mask=hw.Bias(b) for numbers that are added to the scores",
    "bias": "write mask=hw.Bias(b) for numbers that are added to the scores",
    "key_padding_mask": _PADDING,
    "dropout_p": "write dropout=",
    "enable_gqa": "leave it out: fewer key and value heads than query heads are seen from shapes",
    "need_weights": _WEIGHTS,
    "average_attn_weights": _WEIGHTS,
    "output_attentions": _WEIGHTS,
    "return_attention": _WEIGHTS,
    "window_size": "write mask=hw.Causal() & hw.Window(n)",
    "sliding_window": "write mask=hw.Causal() & hw.Window(n)",
    "softmax_scale": "write scale=",
    "sm_scale": "write scale=",
}


def refuse_unknown(
    said: str,
    function: Callable[..., object],
    given: Mapping[str, object],
    instead: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Raise TypeError for the first of the arguments given, of which `function` has none.

    `said` is the beginning of the call. Suggested are the parameters that have a default; what is
    written `instead` of an argument, where that is not what is written in `attend`.

    >>> refuse_unknown("attend(…", lambda x, mask=None: x, {"is_causal": True})
    Traceback (most recent call last):
    TypeError: attend(…, is_causal=…): there is no such argument; for a causal mask write
        mask=hw.Causal().
    """
    parameters = inspect.signature(function).parameters.values()
    known = [one.name for one in parameters if one.default is not one.empty]
    for name in given:
        near = get_close_matches(name, known, n=1)
        told = f"did you mean {near[0]}=?" if near else f"there are: {', '.join(known)}."
        write = instead.get(name) or _WRITE.get(name)
        told = f"{write}." if write else told
        raise TypeError(f"{said}, {name}=…): there is no such argument; {told}")

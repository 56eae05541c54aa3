"""Suggestions for attention arguments of other libraries, which headwise names differently."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from types import MappingProxyType
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:  # type checkers report arguments of type Never; runtime checkers lack it
    from typing import Never as Unknown
else:
    Unknown = object

_WRITE = {
    ("is_causal", "causal"): "for a causal mask write mask=hw.Causal()",
    ("attn_mask", "attention_mask"): (
        "write mask=hw.Dense(m) for a boolean m in which True means 'may attend', "
        "mask=hw.Dense(~m) where True means 'hidden', mask=hw.Bias(m) for numbers that are added "
        "to the scores"
    ),
    ("attn_bias", "bias"): "write mask=hw.Bias(b) for numbers that are added to the scores",
    ("key_padding_mask",): (
        "write mask=hw.Padding(lengths), or mask=hw.Dense(~m[:, None, None]) for an m [B, S] in "
        "which True means 'hidden'"
    ),
    ("dropout_p",): "write dropout=",
    ("enable_gqa",): (
        "omit it: fewer key and value heads than query heads are inferred from the shapes"
    ),
    ("need_weights", "average_attn_weights", "output_attentions", "return_attention"): (
        "hw.observe(q, k, v, …) returns statistics of every head, and its .weights(heads=…) the "
        "attention weights"
    ),
    ("window_size", "sliding_window"): "write mask=hw.Causal() & hw.Window(n)",
    ("softmax_scale", "sm_scale"): "write scale=",
}


def refuse_unknown(
    call: str,
    function: Callable[..., object],
    given: Iterable[str],
    instead: Mapping[str, str] = MappingProxyType({}),
    shared: Iterable[str] = (),
) -> NoReturn:
    """Raise TypeError for the first of the given arguments, which `function` does not have.

    `call` is the start of a call; hints in `instead` replace those of `attend`. For names without
    a hint, the message suggests parameters with a default and names in `shared`.

    >>> refuse_unknown("attend(…", lambda x, mask=None: x, {"is_causal": True})
    Traceback (most recent call last):
    TypeError: attend(…, is_causal=…): there is no such argument; for a causal mask write
        mask=hw.Causal().
    """
    name = next(iter(given))
    hint = instead.get(name) or next((text for names, text in _WRITE.items() if name in names), "")
    if not hint:
        parameters = inspect.signature(function).parameters.values()
        known = [*shared, *(one.name for one in parameters if one.default is not one.empty)]
        near = get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}=?" if near else f"there are: {', '.join(known)}."
    else:
        hint += "."
    raise TypeError(f"{call}, {name}=…): there is no such argument; {hint}")

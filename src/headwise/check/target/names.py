"""Look up what people call the same thing: roles of arguments, by the names of `names.toml`.

A constructor's `d_model`, `n_embd` and `hidden_size` are one role, "width"; a call's `attn_mask`
and `causal_mask` are another, "mask".
"""

from __future__ import annotations

import re
import tomllib
from importlib.resources import files

_ROWS = tomllib.loads((files("headwise.check.target") / "names.toml").read_text("utf-8"))
_BUILD, _CALL = (
    {name: role for role, names in _ROWS[kind].items() for name in names.split()}
    for kind in ("build", "call")
)

_OTHER_MASKS = re.compile(
    r"head|context|memory|media|loc|return|value|cross|enc|time|frame|cls|token|pos"
)
"""Names of masks that do not say which keys of x a query sees."""


def building_role(name: str) -> str | None:
    """What a constructor's argument (or a config's field) is for; None where the name is unknown.

    >>> building_role("n_embd"), building_role("NUM_HEADS"), building_role("flavour")
    ('width', 'heads', None)
    """
    bare = name.lower().strip("_")
    role = _BUILD.get(bare)
    return "dropout" if role is None and re.search(r"(^|_)drop(out)?(_|$)", bare) else role


def calling_role(name: str) -> str | None:
    """What an argument of `forward` is for; None for the input itself and unknown names.

    >>> calling_role("Q"), calling_role("attention_mask"), calling_role("hidden_states")
    ('query', 'mask', None)
    """
    bare = name.lower().strip("_")
    if bare in _CALL or "mask" not in bare or _OTHER_MASKS.search(bare):
        return _CALL.get(bare)
    return "padding" if re.search(r"pad|key|kv|src|valid", bare) else "mask"

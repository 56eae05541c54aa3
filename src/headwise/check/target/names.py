"""Look up what people call the same thing: roles of arguments, by the names of `names.toml`.

A constructor's `d_model`, `n_embd` and `hidden_size` are one role, "width"; a call's `attn_mask`
and `causal_mask` are another, "mask".
"""

from __future__ import annotations

import tomllib
from importlib.resources import files

_ROWS = tomllib.loads((files("headwise.check.target") / "names.toml").read_text("utf-8"))
_BUILD, _CALL = (
    {name: role for role, names in _ROWS[kind].items() for name in names.split()}
    for kind in ("build", "call")
)


def building_role(name: str) -> str | None:
    """What a constructor's argument (or a config's field) is for; None where the name is unknown.

    >>> building_role("n_embd"), building_role("NUM_HEADS"), building_role("flavour")
    ('width', 'heads', None)
    """
    return _BUILD.get(name.lower().strip("_"))


def calling_role(name: str) -> str | None:
    """What an argument of `forward` is for; None for the input itself and unknown names.

    >>> calling_role("Q"), calling_role("attention_mask"), calling_role("hidden_states")
    ('query', 'mask', None)
    """
    return _CALL.get(name.lower().strip("_"))

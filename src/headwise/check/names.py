"""Look up the role of an argument by its name, in the tables of `names.toml`.

For example, `d_model`, `n_embd` and `hidden_size` of a constructor have the role "width";
`attn_mask` and `causal_mask` of a call have the role "mask".
"""

from __future__ import annotations

import re
import tomllib
from importlib.resources import files

_TABLES = tomllib.loads((files("headwise.check") / "names.toml").read_text("utf-8"))
_BUILD, _CALL = (
    {name: role for role, names in _TABLES[kind].items() for name in names.split()}
    for kind in ("build", "call")
)
_PARTS = {
    "q": {"q", "query", "queries", "wq", "qw", "qs"},
    "k": {"k", "key", "keys", "wk", "kw", "ks"},
    "v": {"v", "value", "values", "val", "wv", "vw", "vs"},
    "o": set(
        "o wo ow out output outputs proj projection unify unifyheads dense fc fco final combine "
        "combined merge concat mix last".split()
    ),
}
"""Words in the names of projections."""
_OTHER_MASKS = re.compile(r"head|loc|return|value|cls|pos|^q_|query")
"""Words in the names of masks that do not select keys."""
_PATTERNS = {
    "use_cache": r"^(use|return|enable|with|store|save|update|output)_(kv_|past_|present_)*"
    r"(cache|past|present|kv)(_kv)?$",
    "cache": r"^(past_|layer_|self_attn_|attn_|key_value_|kv_)*(kv|key_values?)_?(cache|past)s?$|"
    r"^(layer|attn|self_attn|decoder)_(kv_)?cache$|^incremental_state$|"
    r"^(past|prev|previous|cached)_(kvs?|keys?_values?)$",
    "lengths": r"^(src|tgt|enc|input|text|memory|kv|key|seq|valid|real)_?(lens?|lengths?)$",
}


def _bare(name: str) -> str:
    """Return the normalized name: `numHeads` and `NUM_HEADS` become "num_heads"."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().strip("_")


def building_role(name: str) -> str | None:
    """Return the role of a constructor's argument or of a config's field; None if unknown.

    >>> building_role("n_embd"), building_role("NUM_HEADS"), building_role("flavour")
    ('width', 'heads', None)
    >>> building_role("vit_n_heads"), building_role("resid_drop_rate")
    ('heads', 'dropout')
    """
    bare = _bare(name)
    if (role := _BUILD.get(bare)) is not None:
        return role
    if re.search(r"(^|_)drop(out)?(_|$)", bare):
        return "dropout"
    words = bare.split("_")
    ends = ("_".join(words[n:]) for n in range(1, len(words)))
    known = (_BUILD[end] for end in ends if len(end) > 3 and end in _BUILD)
    return next((role for role in known if role in ("heads", "kv_heads", "head_dim")), None)


def calling_role(name: str) -> str | None:
    """Return the role of an argument of `forward`; None for the input and for unknown names.

    >>> calling_role("Q"), calling_role("attention_mask"), calling_role("hidden_states")
    ('query', 'mask', None)
    """
    bare = _bare(name)
    if bare in _CALL:
        return _CALL[bare]
    for role, pattern in _PATTERNS.items():
        if re.search(pattern, bare):
            return role
    if "mask" not in bare or _OTHER_MASKS.search(bare):
        return None
    if re.search(r"enc|mem|context|cross|kv|src_key", bare):
        return "memory_mask"
    return "padding" if re.search(r"pad|key|valid|token", bare) else "mask"


def parts_of(name: str) -> str:
    """Return the projections that a name refers to: q, k and v in the order they occur, or `o`.

    >>> [parts_of(name) for name in ("W_query", "Wqkv", "c_attn", "key_value", "out_proj", "fc1")]
    ['q', 'qkv', 'qkv', 'kv', 'o', 'o']
    """
    words = [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]
    if words in (["c", "attn"], ["in", "proj"], ["in", "proj", "weight"], ["in", "proj", "bias"]):
        return "qkv"
    parts = ""
    for word in words:
        bare = re.sub(r"^[wb](?=[qkvo]+s?$)|^to(?=[qkv])", "", word)
        if re.fullmatch("[qkv]{2,3}", bare) and len(set(bare)) == len(bare):
            return bare
        parts += next((part for part in "qkv" if {word, bare} & _PARTS[part]), "")
    if parts:
        return parts if len(set(parts)) == len(parts) else ""
    return "o" if any(word in _PARTS["o"] or word in ("bo", "ob") for word in words) else ""

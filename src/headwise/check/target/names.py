"""Look up what people call the same thing: roles of arguments, by the names of `names.toml`.

A constructor's `d_model`, `n_embd` and `hidden_size` are one role, "width"; a call's `attn_mask`
and `causal_mask` are another, "mask".
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection
from importlib.resources import files

_ROWS = tomllib.loads((files("headwise.check.target") / "names.toml").read_text("utf-8"))
_BUILD, _CALL = (
    {name: role for role, names in _ROWS[kind].items() for name in names.split()}
    for kind in ("build", "call")
)

_PARTS = {
    "q": {"q", "query", "queries", "wq", "qw", "qs"},
    "k": {"k", "key", "keys", "wk", "kw", "ks"},
    "v": {"v", "value", "values", "val", "wv", "vw", "vs"},
    "o": set(
        (
            "o wo ow out output outputs proj projection unify unifyheads dense fc fco final "
            "combine combined merge concat mix last"
        ).split()
    ),
}
"""What people call the projections; a name may hold several of these words."""
_OTHER_MASKS = re.compile(
    r"head|context|mem_|memory|media|loc|return|value|cross|enc|time|frame(?!_mask$)|cls|token|pos|^q_|query"
)
"""Names of masks that do not say which keys of x a query sees."""


_OF_KEYS = {"key_dim", "value_dim", "val_dim", "k_dim", "v_dim"}
_NOT_OF_HEADS = set("query_dim q_dim head_dim d_head dim_head head_size head_width".split())

_LENGTHS = re.compile(
    r"(xs?|src|enc(oder)?|inputs?|kv|keys?|mem(ory)?|sources?|texts?|tokens?|audio|speech|wave?|"
    r"feats?|features?|frames?|hidden|valid|real|true|batch)_(lens|lengths)|"
    r"(xs|src|enc|input|text|memory)_len(gth)?"
)
"""Names in a call of how many tokens of each sequence are real."""
_CACHES = {
    "use_cache": r"^(use|return|enable|with|store|save|update|output)_(kv_|past_|present_)*"
    r"(cache|past|present|kv)(_kv)?$",
    "cache": r"^(past_|layer_|self_attn_|attn_|key_value_|kv_)*(kv|key_values?)_?(cache|past)s?$|"
    r"^(layer|attn|self_attn|decoder)_(kv_)?cache$|^incremental_state$|"
    r"^(past|prev|previous|cached)_(kvs?|keys?_values?)$",
}
"""Patterns of names in a call of a cache of keys and values, and of what switches it on."""

_GUESSED = {
    "eps": r"(^|_)eps(ilon)?$",
    "sides": r"_resolution$|(img|image|video|map|grid)_(size|shape)$",
    "flag": r"flash|^(log|return|use|with|is|has|need|do|add|enable|keep|prun)_|_enabled$|"
    r"^output_(?!dim|size|width|filters|channels|feat|d_)",
    "once": r"(^|_)(halo(_size)?|ratio|stride|factor|repeats?|expansion|groups?|dilation|kernel|"
    r"(group|kernel)_size)$",
    "base": r"theta|(^|_)base$",
    "temperature": r"temperature",
    "heads": r"heads?$",
    "head_dim": r"head",
    "count": r"^(max|num|n|nb)_",
    "width": r"^d_|dimension|(^|_)(dim|width|size|channels?|filters?|feat(ure)?s?|hidden|"
    r"emb|embed)(_|$)",
}
"""Patterns of names that say what they are for, the surest first; only where something must be
given."""


def _bare(name: str) -> str:
    """A name as the tables have it: `numHeads` is "num_heads", `NUM_HEADS` as well."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().strip("_")


def building_role(name: str, needed: bool = False, beside: Collection[str] = ()) -> str | None:
    """What a constructor's argument (or a config's field) is for; None where the name is unknown.

    Args:
        needed: whether it must be given, so that a likely role is better than none.
        beside: the names of all arguments: one `key_dim` is a head's width, the other the keys'.

    >>> building_role("n_embd"), building_role("NUM_HEADS"), building_role("flavour")
    ('width', 'heads', None)
    >>> building_role("contextLength"), building_role("numHeads")
    ('context', 'heads')
    >>> building_role("vit_n_heads"), building_role("vit_n_heads", needed=True)
    (None, 'heads')
    >>> building_role("key_dim"), building_role("key_dim", beside=["query_dim", "dim_head"])
    ('head_dim', 'kv_width')
    """
    bare = _bare(name)
    role = _BUILD.get(bare) or _BUILD.get(name.lower())
    if bare in _OF_KEYS and any(one.lower() in _NOT_OF_HEADS for one in beside):
        return "kv_width"
    if bare == "width" and "height" in {_bare(one) for one in beside}:
        return None  # of a map
    if bare == "block_size" and any("halo" in one.lower() for one in beside):
        return "window"  # of a map (Vaswani et al. 2021, HaloNet)
    if role is None and re.search(r"(^|_)drop(out)?(_|$)", bare):
        return "dropout"
    if role is not None or not needed:
        return role
    words = bare.split("_")
    ends = ("_".join(words[n:]) for n in range(1, len(words)))
    known = (_BUILD[end] for end in ends if len(end) > 2 and end in _BUILD)
    guessed = (role for role, pattern in _GUESSED.items() if re.search(pattern, bare))
    return next((role for role in known if role != "causal"), None) or next(guessed, None)


def calling_role(name: str) -> str | None:
    """What an argument of `forward` is for; None for the input itself and unknown names.

    >>> calling_role("Q"), calling_role("attention_mask"), calling_role("hidden_states")
    ('query', 'mask', None)
    >>> calling_role("key_matrix"), calling_role("input_matrix")
    ('key', None)
    """
    bare = _bare(name)
    plain = re.sub(
        r"_(matrix|tensor|vectors?|seq|sequence|tokens|features|embeddings|input)$", "", bare
    )
    if bare not in _CALL and _CALL.get(plain) in ("query", "key", "value"):
        return _CALL[plain]
    if bare not in _CALL and re.search(r"(rotary|rope|rot)_(pos_)?(emb|cache|table)", bare):
        return "rotary"
    if bare not in _CALL and re.search(r"freqs?_(cis|complex)|complex_freq", bare):
        return "complex"
    if bare not in _CALL and _LENGTHS.fullmatch(bare):
        return "lengths"
    for role, pattern in _CACHES.items() if bare not in _CALL else ():
        if re.search(pattern, bare):
            return role
    if bare in _CALL or "mask" not in bare or _OTHER_MASKS.search(bare):
        return _CALL.get(bare)
    return "padding" if re.search(r"pad|key|kv|src|valid|frame", bare) else "mask"


def is_known(name: str) -> bool:
    """Whether an argument of `forward` has one of the usual names, not only one that is like it."""
    return _bare(name) in _CALL


def parts_of(name: str) -> str:
    """Which projections a name speaks of: letters of q, k and v in its order, or `o`, or nothing.

    >>> [parts_of(name) for name in ("W_query", "Wqkv", "c_attn", "key_value", "out_proj", "fc1")]
    ['q', 'qkv', 'qkv', 'kv', 'o', 'o']
    """
    words = [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]
    if words in (["c", "attn"], ["in", "proj"], ["in", "proj", "weight"], ["in", "proj", "bias"]):
        return "qkv"
    said = ""
    for word in words:
        bare = re.sub(r"^[wb](?=[qkvo]+s?$)|^to(?=[qkv])", "", word)
        if re.fullmatch("[qkv]{2,3}", bare) and len(set(bare)) == len(bare):
            return bare
        said += next((part for part in "qkv" if {word, bare} & _PARTS[part]), "")
    if said:
        return said if len(set(said)) == len(said) else ""
    return "o" if any(word in _PARTS["o"] or word in ("bo", "ob") for word in words) else ""

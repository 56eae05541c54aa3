"""The mistakes that people make with projections and heads; rows as in `mistakes.py`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations, product

from .faults import Mistake, of_scores
from .projections import Matrix, Reading
from .variants import Variant


def mistakes(reading: Reading, base: Variant, sure: bool = True) -> Iterator[Mistake]:
    """All that can be made with these projections, the likeliest first.

    Args:
        sure: whether it is known that the base's mask, or none, is the right one.
    """
    yield from of_scores(base, reading.head_dim, sure)
    yield from _splits(reading)
    yield from _merges(reading)
    yield from _packings(reading)
    yield from _roles(reading)
    yield from _turned(reading)
    yield from _biases(reading)
    yield from _groups(reading, base)
    yield from _outputs(reading)
    yield from _rotations(base)


def _splits(reading: Reading) -> Iterator[Mistake]:
    first = "First `x.view(B, T, num_heads, head_dim)`, then `.transpose(1, 2)`."
    view = (
        "`view` only reads the numbers in another rhythm; it moves no axis, so a head of "
        f"`view(B, num_heads, T, head_dim)` gets pieces of several tokens. {first}"
    )
    rows = [
        *(
            Mistake(
                "head-split",
                {"over": "heads", "merge": merge},
                "The heads of one token attend to each other, and tokens not at all: the transpose "
                "is missing before the scores.",
                f"Scores are made of the last two axes, here [num_heads, head_dim]. {first}",
            )
            for merge in ("heads", "view")
        ),
        Mistake(
            "head-split",
            {"split": "view", "merge": "view"},
            "Heads are split by `view` to [B, H, T, D] without a transpose, and joined likewise.",
            view,
        ),
        Mistake(
            "head-split",
            {"split": "view"},
            "Heads are split by `view` to [B, H, T, D] without a transpose: tokens are mixed.",
            view,
        ),
    ]
    strided = (
        f"Head h must be the features h·{reading.head_dim} to (h+1)·{reading.head_dim} − 1 next to "
        "each other: `view(B, T, num_heads, head_dim)`, with the heads before their width."
    )
    done = (
        "Heads are split with a stride: head h takes the features h, h + {H}, h + 2·{H}, … "
        "(`view(B, T, head_dim, num_heads)`, interleaved), and not {D} neighbouring ones"
    )
    rows += [
        Mistake("head-split", {"split": "strided", "merge": "strided"}, f"{done}.", strided),
        Mistake("head-split", {"split": "strided"}, f"{done}.", strided),
    ]
    if reading.num_heads == 1:
        return
    for index, part in enumerate("qkv"):
        for how, said in (("view", "by `view` without a transpose"), ("strided", "with a stride")):
            split = tuple(how if place == index else "heads" for place in range(3))
            word = {"q": "queries", "k": "keys", "v": "values"}[part]
            rows.append(
                Mistake(
                    "head-split",
                    {"split": split},
                    f"Only the {word} are split into heads {said}; the other two are split right.",
                    f"Split all three alike. {first}",
                )
            )
    yield from rows


def _merges(reading: Reading) -> Iterator[Mistake]:
    if reading.num_heads == 1:
        return
    right = "`heads.transpose(1, 2).reshape(B, T, num_heads * head_dim)`"
    rows = (
        (
            "view",
            "Heads are merged without the transpose: [B, H, T, D] is reshaped as if it were "
            "[B, T, H, D], and tokens are mixed.",
            f"Put the tokens before the heads first: {right}.",
        ),
        (
            "strided",
            "Heads are merged with a stride: their features are interleaved, not head after head.",
            f"The heads must stand before their width when they are joined: {right}.",
        ),
        ("sum", "The heads are summed, not joined side by side.", f"Join them: {right}."),
        ("mean", "The heads are averaged, not joined side by side.", f"Join them: {right}."),
        (
            "sum for each",
            "The output projection gets the sum of all heads in the place of every single one.",
            "In an einsum, the head's letter must be the same in both: `bqhd,hdm->bqm`.",
        ),
        ("first", "Only the first head's output is used.", f"Join all heads: {right}."),
        ("last", "Only the last head's output is used.", f"Join all heads: {right}."),
    )
    for name, message, hint in rows:
        yield Mistake("head-merge", {"merge": name}, message, hint)


def _roles(reading: Reading) -> Iterator[Mistake]:
    if not reading.named:
        return
    fused = len(reading.sources) == 1  # then a permutation is another order of packing
    if not fused:
        yield Mistake(
            "roles",
            {"roles": "kqv"},
            "Queries and keys are swapped: {k} makes the queries and {q} the keys.",
            "Write `queries @ keys.transpose(-2, -1)`, queries first, made by {q}.",
        )
    for roles in map("".join, product("qkv", repeat=3)):
        apart = [part for part, whose in zip("qkv", roles, strict=True) if part != whose]
        if len(apart) != 1:
            continue
        part, whose = apart[0], roles["qkv".index(apart[0])]
        made = "" if fused else f": what {{{whose}}} makes is used in their place"
        yield Mistake(
            "roles",
            {"roles": roles},
            f"The {_long(whose)} are taken for the {_long(part)}{made}.",
            f"Look for the {_long(whose)} (`{whose}`) where the {_long(part)} (`{part}`) belong"
            + ("." if fused else f", which {{{part}}} makes."),
        )
    for roles in map("".join, permutations("qkv")):
        if roles not in ("qkv", "kqv") and not fused:
            said = ", ".join(
                f"{{{whose}}} makes the {_long(part)}"
                for part, whose in zip("qkv", roles, strict=True)
            )
            message = f"The projections are mixed up: {said}."
            yield Mistake("roles", {"roles": roles}, message, _NAMES)
    for place, part in enumerate("qkv"):
        yield Mistake(
            "roles",
            {"roles": "qkv"[:place] + "x" + "qkv"[place + 1 :]},
            f"The input itself is taken for the {_long(part)}.",
            f"Use what {{{part}}} makes of it.",
        )
    for part in "vkq":
        yield Mistake(
            "roles",
            {"roles": 3 * part},
            f"Queries, keys and values are one and the same, the {_long(part)}.",
            _NAMES if not fused else "All three parts of {q} must be used.",
        )


_NAMES = "Each projection must do what its name says: {q} queries, {k} keys, {v} values."


def _packings(reading: Reading) -> Iterator[Mistake]:
    packed = [source for source in reading.sources if len(source.parts) > 1]
    if not packed:
        return
    parts = packed[0].parts
    said = ", then ".join(_long(part) for part in parts)
    for order in map("".join, permutations(parts)):
        if order == parts or not packed[0].named:
            continue
        taken = ", then ".join(_long(part) for part in order)
        if order == "kqv":
            taken += " (or queries and keys are swapped in the scores)"
        yield Mistake(
            "packing",
            {"order": order},
            f"{packed[0].name} is unpacked in another order: {taken}.",
            f"It holds {said}: take `{', '.join(parts)}` in this order when you split it. Weights "
            "from elsewhere would otherwise be mixed up.",
        )
    ways = {
        "p n d": "one after the other",
        "n p d": "head by head: each head's queries, keys and values side by side",
        "n d p": "number by number",
        "d p n": "with the heads as the innermost axis",
    }
    known = packed[0].named and reading.packing == "p n d"
    strict = known and packed[0].name.split(".")[-1] in ("c_attn", "in_proj_weight")
    for packing, way in ways.items():
        if packing != reading.packing:
            yield Mistake(
                "packing",
                {"packing": packing},
                f"{packed[0].name} is unpacked {way}, and not {ways[reading.packing]}.",
                f"Split the last axis in {len(parts)} first ({said}), and then each part into "
                "heads; weights in the usual layout do not fit otherwise.",
                "error" if strict else "warning",
            )


def _long(part: str) -> str:
    return {"q": "queries", "k": "keys", "v": "values"}[part]


def _turned(reading: Reading) -> Iterator[Mistake]:
    matrices = [*reading.sources, *([reading.out] if reading.out is not None else [])]
    square = [one for one in matrices if one.weight.shape[0] == one.weight.shape[1]]
    choices: list[tuple[Matrix, ...]] = [(one,) for one in square]
    inner = tuple(one for one in square if one.parts != "o")
    choices += [some for some in dict.fromkeys((tuple(square), inner)) if len(some) > 1]
    for chosen in choices:
        names = " and ".join(one.name for one in chosen)
        yield Mistake(
            "orientation",
            {"turned": "".join(one.parts for one in chosen)},
            f"The weight of {names} is used the other way round.",
            "nn.Linear keeps its weight as [features, inputs] and computes `x @ weight.T`; GPT-2's "
            "Conv1D keeps it as [inputs, features] and computes `x @ weight`. Transpose it, or "
            "call the module itself.",
        )


def _biases(reading: Reading) -> Iterator[Mistake]:
    matrices = [*reading.sources, *([reading.out] if reading.out is not None else [])]
    biased = [one for one in matrices if one.bias is not None]
    choices: list[tuple[Matrix, ...]] = [(one,) for one in biased]
    inner = tuple(one for one in biased if one.parts != "o")
    choices += [some for some in dict.fromkeys((tuple(biased), inner)) if len(some) > 1]
    for chosen in choices:
        names = ", ".join(one.name for one in chosen)
        yield Mistake(
            "bias",
            {"unbiased": "".join(one.parts for one in chosen)},
            f"The bias of {names} is never added.",
            "Add it, or build the projection with bias=False; calling the module adds it.",
        )


def _groups(reading: Reading, base: Variant) -> Iterator[Mistake]:
    heads, groups = reading.num_heads, reading.num_kv_heads
    if 1 < groups < heads and base.share == "repeat":
        yield Mistake(
            "grouped-heads",
            {"share": "tile"},
            "The {G} key/value heads are tiled, not repeated: query head h reads head h % {G}, and "
            "not h // {R}.",
            "Neighbouring query heads share one: `keys.repeat_interleave({R}, dim=1)`, not "
            "`keys.repeat(1, {R}, 1, 1)`.",
        )
    for share, what in (
        ("first", "keys and values"), ("first keys", "keys"), ("first values", "values")
    ):  # fmt: skip
        if groups > 1:
            yield Mistake(
                "grouped-heads",
                {"share": share},
                f"All query heads read the {what} of the first head.",
                "Every head has keys and values of its own; look for a fixed index 0.",
            )


def _outputs(reading: Reading) -> Iterator[Mistake]:
    if reading.out is not None:
        yield Mistake(
            "output-projection",
            {"out": "left out"},
            "The output projection {o} is never applied.",
            "Return `{o}(context)`: without it the heads stay side by side and never mix.",
        )
        yield Mistake(
            "output-projection",
            {"out": "twice"},
            "The output projection {o} is applied twice.",
            "One of the two lines must go.",
        )
    yield Mistake(
        "residual",
        {"residual": "x"},
        "The input is added to the output.",
        "The residual belongs to the block around the attention, `x = x + attention(norm(x))`; "
        "inside, it would be added twice. Return the output alone.",
    )


def _rotations(base: Variant) -> Iterator[Mistake]:
    if base.rope is None:
        return
    rows = (
        ("qkv", "The values are rotated as well, not only queries and keys."),
        ("q", "Only the queries are rotated."),
        ("k", "Only the keys are rotated."),
    )
    for rotated, message in rows:
        yield Mistake(
            "rotation",
            {"rotated": rotated},
            message,
            "Rotate queries and keys, both and nothing else: then a score depends on the distance "
            "of two tokens, and values stay what they are.",
        )

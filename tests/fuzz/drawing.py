"""Cases drawn by Hypothesis: mostly small, some over several blocks, now and then at the limits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import strategies as st

from headwise.kernels.interface import STATISTICS

from .case import DIFFERENTIABLE, Case
from .mask_parts import ADDING, ALLOWING, Parts
from .numbers import DTYPES, KINDS, LAYOUTS, TAME

Choose = Callable[[str, Sequence[Any]], Any]
"""Takes one of several options, given a name that no other choice of the case has."""

SMALL = (1, 2, 3, 5, 7, 8, 11, 13, 16, 17)
MEDIUM = (1, 2, 31, 33, 47, 48, 49, 63, 64, 65, 95, 96, 97)
LARGE = (1, 2, 3, 127, 129, 130, 191, 193, 257, 300)
LONG = (2047, 2049, 3100)  # keys that are split into parts, for few queries
WIDTHS = (*SMALL, 1, 4, 15, 31, 32, 33, 48, 64, 67, 80, 128, 200, 256)
ROOM = 60_000
"""Numbers in the scores, the tensors and the gradients of a case, roughly and at most."""


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A case that there is."""

    def choose(name: str, options: Sequence[Any]) -> Any:
        return draw(_one_of(name, tuple(options)))[1]

    return drawn(choose, draw(st.integers(0, 2**16)))


@functools.cache
def _one_of(name: str, options: tuple[Any, ...]) -> st.SearchStrategy[tuple[str, Any]]:
    # With a name of its own, Hypothesis does not take it for the same choice as another: it would
    # spend five cases of six on copying choices from one place of a case to another.
    return st.sampled_from([(name, option) for option in options])


def drawn(choose: Choose, seed: int) -> Case:
    """The case that comes of these choices."""
    queries, keys = _sizes(choose)
    dim, wide = choose("dim", WIDTHS), choose("wide", WIDTHS)
    batch, kv_heads, group = _heads(choose, queries * keys + 10 * (dim + wide))
    tame = choose("tame", (True, True, False))
    scales = (None, None, None, 0.3, -0.2, 0.0, 0.5, -1.0)
    caps = (None, None, None, 1.5, 30.0)
    sinks = ("", "", "normal", "large")
    if not tame:
        scales = (*scales, 1e-30, -1e-45, 1e4, 1e20, -3e38)
        caps = (*caps, 1e-20, 1e30)
        sinks = (*sinks, "huge", "limits", "none of them", "power")
    kinds = ("normal", "normal", *(TAME if tame else KINDS))
    layouts = ("dense", *LAYOUTS)
    output = choose("output", (True, False))
    case = Case(
        batch,
        kv_heads,
        group,
        queries,
        keys,
        dim,
        wide,
        dtype=choose("dtype", tuple(DTYPES)),
        mask=_parts(choose),
        scale=choose("scale", scales),
        softcap=choose("softcap", caps),
        sinks=choose("sinks", sinks),
        kinds=tuple(choose(f"kind of {x}", kinds) for x in "qkv"),  # type: ignore[arg-type]
        layouts=tuple(choose(f"layout of {x}", layouts) for x in "qkv"),  # type: ignore[arg-type]
        few=choose("few", (False,) * 7 + (True,)),
        figures=_some(choose, "figures", STATISTICS[1:]),
        output=output,
        incoming=_some(choose, "incoming", DIFFERENTIABLE[0 if output else 1 :]),
        incoming_kind=choose("kind of incoming", ("normal", *(TAME if tame else KINDS))),
        incoming_layout=choose("layout of incoming", layouts),
        needed=choose("needed", ("qkvs", "qkvs", "qkvs", "q", "k", "v", "s", "qk", "kv")),
        blocks=choose("blocks", range(1, 10)),
        weighted=choose("weighted", (False, True)),
        threads=choose("threads", (1, 1, 1, 2)),
        seed=seed,
    )
    return case if case.fits() else Case(**(vars(case) | {"queries": min(queries, keys)}))


def _sizes(choose: Choose) -> tuple[int, int]:
    """Queries and keys."""
    size = choose("size", ("small",) * 6 + ("medium", "medium", "large"))
    if size == "large" and choose("long", (False, False, True)):
        return choose("few queries", (1, 2)), choose("many keys", LONG)
    sizes = {"small": SMALL, "medium": MEDIUM, "large": LARGE}[size]
    return choose(f"{size} queries", sizes), choose(f"{size} keys", sizes)


def _heads(choose: Choose, each: int) -> tuple[int, int, int]:
    """Batch, key/value heads and group, as many as there is room for."""
    room, found = ROOM // each, []
    for name in ("batch", "kv_heads", "group"):
        found.append(choose(f"{name}", range(1, max(1, min(3, room)) + 1)))
        room //= found[-1]
    return found[0], found[1], found[2]


def _parts(choose: Choose) -> Parts:
    """Parts of a mask: none, one, or a few combined by `&` and `|`."""
    groups = []
    for i in range(choose("parts", (1, 1, 1, 0, 0, 2, 2, 3))):
        kind = choose(f"part {i}", ("alone", "alone", "adding", "adding", "or"))
        if kind == "adding":
            groups.append((choose(f"adding part {i}", ADDING),))
            continue
        names = "ab" if kind == "or" else "a"
        groups.append(tuple(choose(f"part {i}{name}", ALLOWING) for name in names))
    return tuple(groups)


def _some(choose: Choose, what: str, names: Sequence[str]) -> tuple[str, ...]:
    bits = choose(what, range(2 ** len(names)))
    return tuple(name for bit, name in enumerate(names) if bits >> bit & 1)

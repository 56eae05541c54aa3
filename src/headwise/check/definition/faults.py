"""List the possible mistakes in a layer with given projections: the rows of `faults.toml`."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from itertools import permutations
from typing import Any

from ..verdict import Severity
from .projections import LONG, Matrix, Projections
from .variants import Variant

GROUPS: list[dict[str, Any]] = tomllib.loads(
    (files("headwise.check.definition") / "faults.toml").read_text("utf-8")
)["group"]
Row = Sequence[Any]  # the value of the group's field, then texts for message and hint
FAR_ENOUGH = 1e4
"""A fill below the negative of this is unwise but not a mistake: published models use it."""


@dataclass(frozen=True)
class Fault:
    """One known mistake: the change that it makes to a variant, and its description."""

    rule: str
    change: dict[str, Any]
    message: str
    hint: str
    severity: Severity = "error"

    def on(self, variant: Variant) -> Variant:
        """Return the variant with this mistake."""
        changed = variant.but(**self.change)
        if "fill" in self.change and changed.mask == "none":
            changed = changed.but(mask="causal")
        return changed


def faults(reading: Projections, base: Variant, sure: bool = True) -> Iterator[Fault]:
    """Yield all possible mistakes with these projections, the most likely first.

    Args:
        sure: True if the mask of the base is known to be correct.
    """
    heads, groups, separate = reading.num_heads, reading.num_kv_heads, len(reading.sources) > 1
    can_be = {
        "": True,
        "causal": sure and base.mask == "causal",
        "open": sure and base.mask != "causal",
        "several heads": heads > 1,
        "several keys": groups > 1,
        "grouped": 1 < groups < heads and base.share == "repeat",
        "named": reading.named,
        "apart": reading.named and separate,  # if fused, it is only a packing order
        "fused": reading.named and not separate,
        "projected": reading.out is not None,
        "rotary": base.rope is not None,
    }
    for group in GROUPS:
        if can_be[group.get("when", "")]:
            rows = EACH[group["each"]](reading) if "each" in group else group["rows"]
            yield from _filled(group, rows, reading)
    if base.slopes:
        yield Fault(
            "positions",
            {"slopes": tuple(-one for one in base.slopes)},
            "Slope times distance is added to the scores, so distant keys get more weight.",
            "Subtract it: `scores - slopes[:, None, None] * distance`.",
        )


def fill_of(reading: Projections, fill: float, scale: float) -> Fault:
    """Return the mistake of a finite fill, given as its value after the scaling. The code may fill
    before or after the scaling; the rounder of the two values is reported.
    """
    group = next(group for group in GROUPS if group.get("each") == "finite fills")
    off = {number: abs(float(f"{number:.2g}") / number - 1) for number in (fill, fill / scale)}
    nearest = min(off, key=lambda number: off[number])
    shown = f"−{float(f'{nearest:.2g}'):.10g}" if off[nearest] < 1e-3 else f"about −{fill:.4g}"
    (row,) = _filled(group, [(repr(-fill), shown)], reading)
    unwise = fill > 0.99 * FAR_ENOUGH * min(1.0, scale)
    return replace(row, severity="warning") if unwise else row


def words_of(reading: Projections, tokens: int) -> dict[str, str | int]:
    """Return the values of the names in braces in messages and hints."""
    return {
        **{part: reading.name(part) for part in "qkvo"},
        "E": reading.embed_dim,
        "H": reading.num_heads,
        "G": reading.num_kv_heads,
        "R": reading.num_heads // reading.num_kv_heads,
        "D": reading.head_dim,
        "Dv": reading.value_dim,
        "W": reading.num_heads * reading.head_dim,
        "T": tokens,
    }


def _filled(group: dict[str, Any], rows: Iterable[Row], reading: Projections) -> Iterator[Fault]:
    lenient = group["field"] == "packing" and not _is_strict(reading)
    severity: Severity = "warning" if lenient else "error"
    for value, *words in rows:
        texts = [group["message"], group["hint"]]
        for place, word in enumerate(words):
            texts = [text.replace(f"{{{place}}}", word) for text in texts]
        change = value if isinstance(value, dict) else {group["field"]: value}
        change = {name: tuple(v) if isinstance(v, list) else v for name, v in change.items()}
        yield Fault(group["rule"], change, texts[0], texts[1], severity)


# --- rows that depend on the projections ----------------------------------------------------------


def _fills(scale: float) -> Iterator[Row]:
    for number in (1, 10, 100, 1000, 10000, 100000):
        for value in dict.fromkeys((-float(number), -number * scale)):
            yield repr(value), f"−{number}"


def _packed(reading: Projections) -> Matrix | None:
    return next((source for source in reading.sources if len(source.parts) > 1), None)


def _is_strict(reading: Projections) -> bool:
    """Return True if a name indicates that pretrained weights are loaded, part by part."""
    packed = _packed(reading)
    if packed is None or not packed.named or reading.packing != "p n d":
        return False
    return packed.name.split(".")[-1] in ("c_attn", "in_proj_weight")


def _listed(parts: str) -> str:
    return ", then ".join(LONG[part] for part in parts)


def _orders(reading: Projections) -> Iterator[Row]:
    packed = _packed(reading)
    if packed is None or not packed.named:
        return
    for order in map("".join, permutations(packed.parts)):
        if order != packed.parts:
            also = " (or queries and keys are swapped in the scores)" if order == "kqv" else ""
            letters = ", ".join(packed.parts)
            yield order, _listed(order) + also, letters, packed.name, _listed(packed.parts)


def _packings(reading: Projections) -> Iterator[Row]:
    packed = _packed(reading)
    if packed is None:
        return
    group = next(group for group in GROUPS if group.get("each") == "packings")
    ways = dict(group["rows"])
    for packing, way in ways.items():
        if packing != reading.packing:
            listed, count = _listed(packed.parts), str(len(packed.parts))
            yield packing, way, ways[reading.packing], packed.name, listed, count


def _of(chosen: Iterable[Matrix], joined: str) -> Iterator[Row]:
    """Yield the rows of some matrices: each, all, and all but the output projection."""
    chosen = list(chosen)
    inner = [one for one in chosen if one.parts != "o"]
    several = [some for some in ([chosen] if inner == chosen else [chosen, inner]) if len(some) > 1]
    for some in (*([one] for one in chosen), *several):
        yield "".join(one.parts for one in some), joined.join(one.name for one in some)


def _square_weights(reading: Projections) -> Iterator[Row]:
    square = (one for one in reading.matrices if one.weight.shape[0] == one.weight.shape[1])
    return _of(square, " and ")


def _biases(reading: Projections) -> Iterator[Row]:
    return _of((one for one in reading.matrices if one.bias is not None), ", ")


EACH: dict[str, Callable[[Projections], Iterable[Row]]] = {
    "finite fills": lambda reading: _fills(reading.head_dim**-0.5),
    "added masks": lambda of: [(f"added {x!r}",) for x in dict.fromkeys((1.0, of.head_dim**-0.5))],
    "orders": _orders,
    "packings": _packings,
    "square weights": _square_weights,
    "biases": _biases,
}

"""The report: one look or two as one HTML file that requires no network and no other file.

The page is `report.html`, which `make page` builds from `src/`, with the results inserted. They are
the JSON documents of the looks, compressed; the browser decompresses them. Untrusted text (tokens,
names) is inserted only through `textContent`: a token `<script>` remains text.
"""

from __future__ import annotations

import html
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from headwise._text import escaped
from headwise.report.catalog import LABEL_STYLES
from headwise.report.findings import finding, labeled_heads, opening_head

from .parts import check_out, fill, json_text, packed, part, write_html

# Facts in the header of the page, or in the arrays of the looks.
SHOWN = (
    "title notice loss_text loss_first_copy loss_second_copy tokens_shown layers heads map_side "
    "top_keys"
).split()


SETTINGS = {
    "dtype": "{}",
    "device": "on {}",
    "attention": "{} attention",
    "seed": "seed {}",
    "tokens_shown": "{} tokens",
    "texts": "{} texts",
}
"""The facts that distinguish looks with the same model and text, as format strings."""


def titles(provenances: Sequence[dict[str, Any]]) -> list[str]:
    """Return the title of each look: the given one, or model and text with distinguishing facts.

    >>> same = {"model": "gpt2", "text": "notes", "seed": 0}
    >>> titles([same | {"dtype": name} for name in ("float32", "float16")])
    ['gpt2 on notes, float32', 'gpt2 on notes, float16']
    """
    names = [
        escaped(one.get("title") or f"{one.get('model', 'model')} on {one.get('text', 'text')}")
        for one in provenances
    ]
    if len({*names}) == len(names):
        return names
    differing = [key for key in SETTINGS if len({one.get(key) for one in provenances}) > 1]
    return [
        ", ".join([name, *(SETTINGS[key].format(one[key]) for key in differing if key in one)])
        for name, one in zip(names, provenances, strict=True)
    ]


@runtime_checkable
class Documented(Protocol):
    """Anything with a document, such as a look."""

    def document(self) -> dict[str, Any]: ...


def write_page(
    look: Documented, path: str | os.PathLike[str], *, other: Documented | None = None
) -> Path:
    """Write `look` as one HTML file at `path`; an existing file is replaced in one step.

    With `other`, the page shows both and their difference.

    Raises `PageError` if the folder does not exist or cannot be written. No incomplete file
    remains.
    """
    path = check_out(path)
    return write_html(path, render_page(look, other=other))


def render_page(look: Documented, *, other: Documented | None = None) -> str:
    """Return the page as a string. The same looks give the same string."""
    documents = [one.document() for one in (look, other) if one is not None]
    names = titles([one["provenance"] for one in documents])
    results = [
        one
        | {
            "made": provenance_lines(one),
            "title": name,
            "finding": finding(one["rows"], one["rules"]),
            "labeled": labeled_heads(one["rows"], one["rules"]),
            "opening": opening_head(one["rows"], one["rules"]),
        }
        for one, name in zip(documents, names, strict=True)
    ]
    parts = {
        "title": html.escape(" and ".join(names)),
        "results": packed(results),
        "styles": json_text([asdict(style) for style in LABEL_STYLES]),
    }
    return fill(part("report.html"), parts)


# --- provenance ------------------------------------------------------------------------------


def provenance_lines(look: dict[str, Any]) -> list[tuple[str, str]]:
    """Describe how the look was made, as names and values."""
    facts = dict(look["provenance"])
    versions = facts.pop("versions", None)
    entries = [
        ("Model", _model(look, facts)),
        ("Text", _text(look, facts)),
        ("Repeated random tokens", _repeats(facts)),
        ("Attention", _attention(facts)),
        ("Loss", _loss(facts)),
        ("Numbers", _numbers(facts)),
        ("Maps", facts.pop("map", None) or _maps(look)),
        ("Similarity", facts.pop("similarity", None)),
        ("Composition", look["composition"].get("reason")),
        ("Seed", facts.pop("seed", None)),
    ]
    for shown in SHOWN:
        facts.pop(shown, None)
    others = [(key.replace("_", " ").capitalize(), value) for key, value in facts.items()]
    entries += [*others, ("Versions", versions)]
    return [(name, _words(value)) for name, value in entries if value not in (None, "", [], {})]


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_words(one)}" for key, one in value.items())
    if isinstance(value, list):
        return ", ".join(map(_words, value))
    return f"{value:,}" if isinstance(value, int) and abs(value) > 9999 else str(value)


def _model(look: dict[str, Any], facts: dict[str, Any]) -> str:
    parts = [facts.pop("architecture", ""), f"{len(look['layers'])} attention layers"]
    heads = {layer["maps"]["shape"][0] for layer in look["layers"]}
    parts.append(f"{_range(heads)} heads each")
    for key, words in (("parameters", "{:,} parameters"), ("context", "context {:,} tokens")):
        if (value := facts.pop(key, None)) is not None:
            parts.append(words.format(value))
    return f"{facts.pop('model', 'unnamed')}: {', '.join(filter(None, parts))}"


def _text(look: dict[str, Any], facts: dict[str, Any]) -> str:
    total, texts = facts.pop("tokens", None), facts.pop("texts", None)
    lengths = ", ".join(f"{s['name']} {len(s['tokens']):,} tokens" for s in look["streams"])
    parts = [facts.pop("text", "unnamed"), f"shown: {lengths}"]
    if isinstance(total, int):
        parts.append(f"of {total:,} in total")
    if isinstance(texts, int) and texts > 1:
        parts.append(f"metrics are means over {texts:,} texts, maps are of the first")
    return "; ".join(parts)


def _repeats(facts: dict[str, Any]) -> str | None:
    rows, period = facts.pop("random_rows", None), facts.pop("random_period", None)
    if rows is None or period is None:
        return None
    return f"{rows} rows of {period} repeated random tokens"


def _attention(facts: dict[str, Any]) -> str:
    how = facts.pop("attention", None)
    described = "metrics describe attention weights before dropout (which is off)"
    return f"{how}; {described}" if how else described


def _numbers(facts: dict[str, Any]) -> str | None:
    dtype, device = facts.pop("dtype", None), facts.pop("device", None)
    return f"{dtype} on {device}, statistics in float32 or finer" if dtype else None


def _loss(facts: dict[str, Any]) -> str | None:
    parts = []
    if (text := facts.get("loss_text")) is not None:
        parts.append(f"{text:.2f} nats on {facts.pop('loss', 'each token')}")
    if (first := facts.get("loss_first_copy")) is not None:
        second = facts["loss_second_copy"]
        parts.append(f"on random tokens {first:.2f} the first time, {second:.2f} the second")
    return "; ".join(parts) or None


def _maps(look: dict[str, Any]) -> str:
    sides = {size for layer in look["layers"] for size in layer["maps"]["shape"][1:]}
    return (
        f"{_range(sides)} cells per side, at most one per token; weights are stored with 8 bits, "
        "as square roots, so that small weights keep their precision"
    )


def _range(values: set[int]) -> str:
    low, high = min(values, default=0), max(values, default=0)
    return str(low) if low == high else f"{low} to {high}"

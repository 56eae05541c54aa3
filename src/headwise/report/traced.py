"""The result of `trace()`: its tables, and the data of its page."""

from __future__ import annotations

import html
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .._tables import HeadTable
from .._text import and_more
from ..capture.head_address import head_label
from .codec import finite, pack, pack_whole
from .page.parts import check_out, fill, framed, packed, part, version, write_html

RETRIEVAL = 0.1
"""The minimum score of a retrieval head (Wu et al. 2024, §2)."""

COLUMNS = ("number", "token", "sinks", "other", "generated")
"""The columns of a table of segments other than the segments themselves."""

ENTRIES = 200_000
"""The maximum number of weights in each of the page's three tables of strongest keys (0.8 MB)."""


@dataclass(frozen=True, eq=False, repr=False)
class Trace(HeadTable):
    """The attention of each generated token to each token of its prompt.

    `N` is the number of generated tokens, `P` that of prompt tokens, `A` that of heads, ordered by
    layer and head. Weights are those of the query that predicted a generated token.

    tokens, generated: the texts of prompt and generated tokens; `prompt_ids`, `ids`: their ids.
    by_token: `[N, P]`, summed over heads, weighted by the `weights` given to `trace()`, if any.
    keys, weights: `[N, A, k]`, the k strongest keys of the prompt except sinks; −1 if there are
        fewer.
    copied: `[N, A]`, True if the strongest of all keys lies in the prompt and holds the id that was
        generated.
    masses: `[N, A, n]`: the attention to sinks, to generated tokens, and, if there are segments, to
        each of these and to the rest of the prompt.
    sinks: the positions of the sinks.
    members: `[P, segments]`, True for the tokens of a segment that are not sinks.
    left_out: modules that were not fully observed, and the reasons.
    """

    tokens: list[str]
    generated: list[str]
    prompt_ids: list[int]
    ids: list[int]
    by_token: Float[Tensor, "N P"]
    heads: list[dict[str, Any]]
    of_heads: Float[Tensor, "A P"]
    keys: Int[Tensor, "N A k"]
    weights: Float[Tensor, "N A k"]
    copied: Tensor
    masses: Float[Tensor, "N A n"]
    sinks: list[int]
    head_weights: Float[Tensor, "A"] | None = None
    names: tuple[str, ...] = ()
    members: Bool[Tensor, "P segments"] = field(default_factory=lambda: torch.zeros(0, 0).bool())
    rows: dict[str, Float[Tensor, "N P"]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    inputs: dict[str, Tensor] = field(default_factory=dict)

    def __repr__(self) -> str:
        named = [head_label(row["layer"], row["head"]) for row in self.retrieval]
        return (
            f"<Trace: {len(self.ids):,} generated tokens, {len(self.tokens):,} of the prompt, "
            f"{len(self.heads)} heads; retrieval heads: {and_more(named, 8) if named else 'none'}; "
            f"a notebook shows it; .save_html(path)>"
        )

    @property
    def by_head(self) -> Float[Tensor, "L H P"]:
        """Weights on the prompt, summed over generated tokens.

        Raises:
            ValueError: layers have different numbers of heads; use `of_heads` `[A, P]`.
        """
        layers = len({row["layer"] for row in self.heads})
        if {row["head"] for row in self.heads} != set(range(len(self.heads) // layers)):
            raise ValueError("by_head: layers have different numbers of heads; take of_heads")
        return self.of_heads.unflatten(0, (layers, -1))

    def __getitem__(self, head: str) -> Float[Tensor, "N P"]:
        """Return the rows of a head that was kept, by the address given to `trace()`."""
        if head not in self.rows:
            there = ", ".join(self.rows) or "none"
            raise KeyError(
                f"{head!r} was not kept: give heads=[{head!r}] to trace(); kept: {there}"
            )
        return self.rows[head]

    def table(self) -> list[dict[str, Any]]:
        """Return a row per head: `layer`, `head`, `module`, `copying`, and attention to each part.

        `copying` is the retrieval score: the fraction of generated tokens whose id occurs in the
        prompt for which the head's strongest key lies in the prompt and has that id. It is
        absent if there is no such token. `prompt` (without sinks), `sinks` and `generated` are the
        attention to these parts, averaged over generated tokens.
        """
        there = set(self.prompt_ids)
        inside = torch.tensor([one in there for one in self.ids])
        copying = self.copied[inside].float().mean(0).tolist()
        sinks, generated = self.masses[..., :2].mean(0).unbind(-1)
        prompt = self.of_heads.sum(-1) / len(self.ids) - sinks
        parts = zip(copying, prompt.tolist(), sinks.tolist(), generated.tolist(), strict=True)
        return [
            head
            | ({"copying": score} if inside.any() else {})
            | {"prompt": at, "sinks": sink, "generated": own}
            for head, (score, at, sink, own) in zip(self.heads, parts, strict=True)
        ]

    @property
    def retrieval(self) -> list[dict[str, Any]]:
        """The rows of `table()` for retrieval heads, highest score first.

        These copy at least a tenth of the generated tokens that the prompt contains.
        """
        rows = [row for row in self.table() if row.get("copying", 0.0) >= RETRIEVAL]
        return sorted(rows, key=lambda row: -row["copying"])

    @property
    def segments(self) -> list[dict[str, Any]]:
        """A row per generated token: `number`, `token`, and the attention to each segment.

        It is averaged over heads or, if `trace()` was given `weights`, summed with these weights.
        `sinks` belong to no segment; `other` is the rest of the prompt.
        """
        return self.segment_rows(range(len(self.heads)))

    def segment_rows(self, heads: Sequence[int]) -> list[dict[str, Any]]:
        """Return `segments` over only the given heads, as indices into `self.heads`."""
        chosen = torch.tensor(list(heads), dtype=torch.long)
        masses = self.masses[:, chosen]
        weights = torch.full((len(chosen),), 1 / max(len(chosen), 1))
        if self.head_weights is not None:
            weights = self.head_weights[chosen]
        masses = torch.einsum("nac,a->nc", masses, weights.to(masses))
        names = (
            [*self.names, "other", "sinks", "generated"] if self.names else ["sinks", "generated"]
        )
        return [
            {"number": number, "token": token, **dict(zip(names, mass[2:] + mass[:2], strict=True))}
            for number, (token, mass) in enumerate(
                zip(self.generated, masses.tolist(), strict=True)
            )
        ]

    def strongest(self, token: int | None = None, k: int = 10) -> list[dict[str, Any]]:
        """Return the tokens of the prompt with the most attention: `key`, `token`, `weight`.

        Attention is summed over heads, for one generated token or for all; sinks are left out.
        """
        total = self.by_token.sum(0) if token is None else self.by_token[token]
        total = total.index_fill(0, torch.tensor(self.sinks, dtype=torch.long), -torch.inf)
        best = total.topk(min(k, len(total) - len(self.sinks)))
        return [
            {"key": key, "token": self.tokens[key], "weight": weight}
            for key, weight in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]

    def save_html(self, path: str | os.PathLike[str]) -> Path:
        """Write the page: one HTML file that needs no network; an existing file is replaced.

        Raises:
            PageError: the folder does not exist or cannot be written to.
        """
        return write_html(check_out(path), _page(self))

    def _repr_html_(self) -> str:
        """Return the page in a frame of its own."""
        return framed(_page(self))


# --- the page's data -------------------------------------------------------------------------


def _page(trace: Trace) -> str:
    """Return the page, which `make page` builds from `pages/`, with the data filled in."""
    title = "".join(trace.generated).strip()[:60] or "a generated text"
    parts = {"title": html.escape(title), "results": packed(_document(trace))}
    return fill(part("trace.html"), parts)


def _document(trace: Trace) -> dict[str, Any]:
    """Return the data that the page's script reads."""
    named = [(row["layer"], row["head"]) for row in trace.retrieval]
    place = {(row["layer"], row["head"]): n for n, row in enumerate(trace.heads)}
    chosen = [place[one] for one in named]
    hidden = torch.tensor(trace.sinks, dtype=torch.long)
    by_token = trace.by_token.index_fill(1, hidden, 0.0)
    of_heads = trace.of_heads.index_fill(1, hidden, 0.0)
    count, heads = len(trace.generated), len(trace.heads)
    few = min(trace.keys.shape[-1], ENTRIES // (count * heads))
    return {
        "tokens": trace.tokens,
        "generated": trace.generated,
        "sinks": trace.sinks,
        "sunk": float(trace.masses[..., 0].mean()),
        "weighted": trace.head_weights is not None,
        "heads": [
            [head_label(row["layer"], row["head"]), row["module"], finite(row.get("copying"))]
            for row in trace.table()
        ],
        "retrieval": chosen,
        "total": {
            "all": pack(by_token.sum(0)[None].numpy(), root=True),
            "retrieval": pack(of_heads[chosen].sum(0)[None].numpy(), root=True),
        },
        "by_token": _strongest(by_token),
        "by_head": _strongest(of_heads),
        "by_both": _packed(trace.keys[..., :few], trace.weights[..., :few]) if few else None,
        "segments": {
            "names": [*trace.names, "other", "sinks", "generated"] if trace.names else [],
            "all": _shares(trace, range(heads)),
            "retrieval": _shares(trace, chosen),
        },
        "made": [
            ("Weights", "of the query that predicted each generated token, exact"),
            ("Strongest keys", f"{_shown(by_token)} of a generated token, {_shown(of_heads)} of a "
             f"head, {few} of a token and head; weights are stored with 8 bits"),
            *[("Left out", f"{name}: {why}") for name, why in trace.left_out.items()],
            ("Versions", f"headwise {version('headwise')}, torch {version('torch')}"),
        ],
    }  # fmt: skip


def _shares(trace: Trace, heads: Sequence[int]) -> list[list[float]]:
    """Return the attention to each segment, `[N, segments + 3]`, over some heads."""
    rows = trace.segment_rows(heads) if trace.names and heads else []
    return [[round(value, 5) for value in list(row.values())[2:]] for row in rows]


def _shown(weights: Tensor) -> int:
    """Return the number of weights of each row of `[n, P]` that the page contains."""
    return min(256, weights.shape[1], max(1, ENTRIES // len(weights)))


def _strongest(weights: Tensor) -> dict[str, Any]:
    best = weights.topk(_shown(weights), dim=-1)
    return _packed(best.indices, best.values)


def _packed(keys: Tensor, weights: Tensor) -> dict[str, Any]:
    return {"keys": pack_whole(keys.numpy()), "weights": pack(weights.numpy(), root=True)}

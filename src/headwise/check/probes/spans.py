"""Probe arguments that say which tokens belong together: documents that are packed into one
sequence, and a prompt that is read both ways."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch

from ..findings.rules import found
from ..findings.verdict import Finding
from .probe_context import Failed, ProbeContext

PROMPT = re.compile(
    r"^(prefix|prompt)_?(len(gth)?s?|size|tokens)$|^n(um)?_(prefix|prompt)(_tokens)?$"
)
"""Names of how many tokens are read both ways."""
FIRST = 3
"""Tokens of the first document, and of the prompt."""


def spans(ctx: ProbeContext) -> Finding | None:
    """What comes behind counts for nothing before it, where an argument keeps them apart."""
    caller = ctx.subject.caller
    if caller.custom is not None or ctx.tokens <= FIRST + 1:
        return None
    for name, role in caller.roles.items():
        way = role if role == "documents" else "prompt" if PROMPT.search(name) else ""
        if way and (seen := _leaking(ctx, name, way)) is not None:
            return found("mask", way, name=name, i=seen[0], j=seen[1])
    return None


def _leaking(ctx: ProbeContext, name: str, way: str) -> tuple[int, int] | None:
    """An output that changes with a token of another document, or behind the prompt, where the
    argument changes something at all; `(output, token)`."""
    before, behind = slice(FIRST), slice(FIRST, None)
    sides = [(behind, before), (before, behind)]
    if way == "prompt":  # what follows sees it
        sides.pop()
    for one, other in _values(ctx, way):
        given: dict[str, Any] = {name: one}
        together: dict[str, Any] = {name: other}
        try:
            apart = ctx.result(ctx.x, **given).out
            if ctx.near(apart, ctx.result(ctx.x, **together).out):
                continue
            for part, rest in sides:
                changed = ctx.x.clone()
                changed[:, part] = changed[:, part].flip(-1) + 1
                after = ctx.result(changed, **given).out
                if not ctx.near(after[:, rest], apart[:, rest]):
                    return (0, FIRST) if part is behind else (ctx.tokens - 1, 0)
            return None
        except Failed:
            continue
    return None


def _values(ctx: ProbeContext, way: str) -> Iterator[tuple[Any, Any]]:
    """What keeps two parts of each sequence apart, and what keeps nothing apart."""
    batch, tokens = ctx.x.shape[:2]
    if way == "prompt":
        yield torch.full((batch,), FIRST), torch.full((batch,), tokens)
        yield FIRST, tokens
        return
    ids = (torch.arange(tokens) >= FIRST).long()
    yield ids.expand(batch, -1), torch.zeros(batch, tokens, dtype=torch.long)
    yield ids, torch.zeros(tokens, dtype=torch.long)

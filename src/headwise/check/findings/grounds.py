"""Weigh what a ❌ stands on, so that no guess of the check's own becomes somebody's mistake.

Each finding names the ground that it needs (`Finding.ground`):

- "any": it is read off the code, or no call may do so, whatever was made up for it.
- "call": every layer does so, whatever it computes, when it is called as it is meant to be: by the
  usual call, or by one that was given.
- "weights": attention does so. Attention of another kind may not; so it counts where attention,
  computed from the layer's own weights, gives its numbers, right or under a named mistake, or was
  computed and should have given them.

Numbers that agree also show that a call which was guessed is the right one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from .rules import ALL
from .verdict import NOT_JUDGED, Finding, Ground

AXES = {"head-split", "head-merge", "packing", "orientation"}
"""Rules on which features and tokens stand next to each other: other axes of x, another order."""


def weighed(
    named: Sequence[Finding], probed: Sequence[Finding], called: Sequence[str], built: Sequence[str]
) -> Iterator[list[Finding]]:
    """Make open questions of the errors that lack their ground, among both kinds of findings.

    Args:
        named: what the diagnosis found; probed: what the probes saw.
        called, built: what was guessed for the call and for the constructor, in words.

    >>> said = "The first 2 tokens alone give another output."
    >>> seen = Finding("prefix", "error", said, ground="weights")
    >>> unread = Finding("definition", "skipped", "No parameter looks like a projection.")
    >>> [one.severity for one in [*weighed([unread], [seen], [], [])][1]]
    ['skipped']
    """
    grounds = _grounds(named, called, built)
    guesses = [*called, *built] if "call" not in grounds else []
    proved = {"causality"} if any(_shows_leak(one, grounds) for one in probed) else set[str]()
    for findings in (named, probed):
        yield [
            one if _stands(one, grounds) or one.rule in proved else _unjudged(one, guesses)
            for one in findings
        ]


def _shows_leak(one: Finding, grounds: set[Ground]) -> bool:
    """Whether it says of causal attention that later tokens, by being there, change an output."""
    return one.rule == "prefix" and one.severity == "error" and _stands(one, grounds)


def _grounds(named: Sequence[Finding], called: Sequence[str], built: Sequence[str]) -> set[Ground]:
    definition = next((one.severity for one in named if one.rule == "definition"), "skipped")
    beyond = AXES if any(guess.startswith("x as ") for guess in called) else set[str]()
    mistaken = any(
        one.severity in ("error", "warning")
        and ALL[one.rule].about == "numbers"
        and (one.ground == "weights" or one.example is not None)
        and one.rule not in {"definition", *beyond}
        for one in named
    )
    if definition == "passed" or (mistaken and not built):
        return {"any", "call", "weights"}
    if called or built:
        return {"any"}
    return {"any", "call"} if definition == "skipped" else {"any", "call", "weights"}


def _stands(one: Finding, grounds: set[Ground]) -> bool:
    return one.severity != "error" or one.ground in grounds


def _unjudged(one: Finding, guesses: Sequence[str]) -> Finding:
    said = f"{NOT_JUDGED}, with {', '.join(guesses)}; say what is meant, or show me with --call"
    said = said if guesses else "Its weights were not read, and others' attention may do so"
    return replace(one, severity="skipped", message=f"{said}: {one.message}", hint="", example=None)

"""One list out of what the diagnosis named and what the probes saw.

The mistake that is named comes first. What it explains is no finding of its own, and small advice
waits until nothing is wrong: one thing at a time.
"""

from __future__ import annotations

from dataclasses import replace

from .rules import RULES
from .verdict import Finding

UNNAMED = "definition"
"""The diagnosis' rule where numbers are wrong and no mistake that it knows fits."""

EXPLAINS: dict[str, set[str]] = {
    "dropout-in-eval": {"deterministic", "train-eval", "dropout"},
    "registration": {"registered", "reload", "move", "gradients", "deterministic"},
    "registered": {"reload", "move"},
    "train-eval": {"dropout"},
    "one-token": {"dropout"},
    "finite": {"deterministic", "large-inputs"},
    "causality": {"prefix", "mask"},
}
"""What else follows from a broken rule, beside the rules about numbers."""


COMPARING = {"context", "dropout"}
"""Rules of handling that compare numbers with others, and so fail where these are wrong."""


def joined(named: list[Finding], probed: list[Finding]) -> tuple[Finding, ...]:
    """All results, in the order in which to read them.

    >>> mistake = Finding("scale", "error", "Scores are not divided.")
    >>> seen = Finding("prefix", "error", "The first 2 tokens alone give another output.")
    >>> [(one.rule, one.explained_by) for one in joined([mistake], [seen])]
    [('scale', None), ('prefix', 'scale')]
    """
    vague = [one for one in named if one.rule == UNNAMED and one.severity == "error"]
    sharp = [one for one in named if one not in vague]
    mistakes = [one for one in sharp if one.severity == "error"]
    results = [*sharp, *(_explained(one, mistakes) for one in probed)]
    if any(one.rule == UNNAMED and one.severity == "passed" for one in named):
        results = [_without_doubt(one) for one in results]
    if vague:
        results = _with_vague(vague[0], results, probed)
    results = _after_each_other(results)
    wrong = any(one.severity == "error" and one.explained_by is None for one in results)
    return tuple(_waiting(one) if wrong else one for one in results)


def _bad(one: Finding) -> bool:
    return one.severity in ("error", "warning")


def _explained(one: Finding, mistakes: list[Finding]) -> Finding:
    """Mistakes about numbers that were named explain whatever else is wrong about numbers."""
    reasons = dict.fromkeys(m.rule for m in mistakes if RULES[m.rule].about == "numbers")
    numbers = RULES[one.rule].about == "numbers" or one.rule in COMPARING
    if reasons and _bad(one) and numbers:
        return replace(one, explained_by=" and ".join(reasons))
    return one


def _without_doubt(one: Finding) -> Finding:
    """Where the definition gives the same numbers, positions and all, order counts by right."""
    if one.rule == "order" and _bad(one):
        return Finding("order", "skipped", "It knows positions, so the order of tokens counts.")
    return one


def _with_vague(vague: Finding, results: list[Finding], probed: list[Finding]) -> list[Finding]:
    """Where no mistake could be named, what else was seen says more, and comes first."""
    seen = [one for one in results if _bad(one) and one.explained_by is None]
    told = [one for one in seen if one not in probed or _may_explain(one.rule)]
    errors = [one for one in told if one.severity == "error"]
    if errors:
        return [*results, replace(vague, explained_by=errors[0].rule)]
    if told:  # the order of tokens counts: positions that are put in without a word, perhaps
        return [*results, replace(vague, severity="warning")]
    return [vague, *results]


def _may_explain(rule: str) -> bool:
    return RULES[rule].about == "numbers" or rule == "reload"


def _after_each_other(results: list[Finding]) -> list[Finding]:
    """Marks what follows from another finding, by `EXPLAINS`, or from writing into the input."""
    broken = [one for one in results if _bad(one)]
    reasons: dict[str, str] = {}
    for one in broken:
        for rule in EXPLAINS.get(one.rule, ()):
            reasons.setdefault(rule, one.rule)
    writes = any(one.rule == "input-kept" for one in broken)
    done = []
    for one in results:
        reason = one.explained_by or reasons.get(one.rule)
        if writes and "inplace operation" in one.message:
            reason = "input-kept"
        done.append(replace(one, explained_by=reason) if _bad(one) and reason else one)
    return done


def _waiting(one: Finding) -> Finding:
    """Advice that can wait until nothing is wrong."""
    if one.severity == "warning" and RULES[one.rule].later:
        return Finding(one.rule, "skipped", "Advice that waits until nothing is wrong.")
    return one

"""Make one list out of what the diagnosis named and what the probes saw.

The mistake that is named comes first. What it explains is no finding of its own, and small advice
waits until nothing is wrong: one thing at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from .grounds import weighed
from .rules import RULES, skipped
from .verdict import Finding

UNNAMED = "definition"
"""The diagnosis' rule where numbers are wrong and no mistake that it knows fits."""

LAST = ("dropout-in-eval", "gradients", "move")
"""Rules that wait for a call that fails; of another device, for all else."""

BOTH = {"cache", "rotary"}
"""Rules that are both read off the code and tried."""

COMPARING = {"context", "dropout"}
"""Rules of handling that compare numbers with others, and so fail where these are wrong."""

SURROUNDED = {
    "order": "It knows positions, so the order of tokens counts.",
    "equal-tokens": "The input is added at the end, so equal values give no equal outputs.",
    "one-token": "A norm stands around it.",
}
"""What has reasons where the definition gives the same numbers."""
TURNED = {"rotary": "It turns queries and keys as the definition does; gains behind that count."}
"""The same, where the definition gives them with rotary positions."""


def urgency(one: Finding) -> tuple[bool, bool]:
    """Where a finding stands beside a call that fails: what cannot be built comes first, and last
    what makes numbers wrong and stops no call."""
    return one.rule != "builds", one.rule in ("scale", "mask-fill", *LAST)


def joined(
    named: list[Finding],
    probed: list[Finding],
    called: Sequence[str] = (),
    built: Sequence[str] = (),
) -> tuple[Finding, ...]:
    """Give all results, in the order in which to read them.

    Args:
        named: what the diagnosis found; probed: what the probes saw.
        called, built: what was guessed for the call and for the constructor, in words.

    >>> mistake = Finding("scale", "error", "Scores are not divided.")
    >>> seen = Finding("prefix", "error", "The first 2 tokens alone give another output.")
    >>> [(one.rule, one.explained_by) for one in joined([mistake], [seen])]
    [('scale', None), ('prefix', 'scale')]
    """
    named, probed = weighed(*_once_each(named, probed), called, built)
    unnamed = (one for one in named if one.rule == UNNAMED and one.severity == "error")
    vague = [one for one in unnamed if one.ground != "any"]
    sharp = [one for one in named if one not in vague]
    certain = [one for one in named if one.rule == UNNAMED and one.severity == "passed"]
    turned = any("rotary positions" in one.message for one in certain)
    right = (SURROUNDED if certain else {}) | (TURNED if turned else {})
    errors = dict.fromkeys(one.rule for one in sharp if one.severity == "error")
    reason = " and ".join(rule for rule in errors if RULES[rule].about == "numbers")
    results = [*sharp, *(_explained(one, reason, right) for one in probed)]
    if vague:
        results = _with_vague(vague[0], results, probed)
    results = _after_each_other(results)
    failing = any(one.rule == "runs" and one.severity == "error" for one in results)
    results.sort(key=lambda one: one.rule in LAST and (failing or one.rule == "move"))
    wrong = any(one.severity == "error" and one.explained_by is None for one in results)
    return tuple(_waiting(one) if wrong else one for one in results)


def _once_each(named: list[Finding], probed: list[Finding]) -> tuple[list[Finding], list[Finding]]:
    """Of a rule that was read off the code as well as tried: what was tried counts where it is
    right, and what was read, which knows the line, where it is not."""
    right = {one.rule for one in probed if one.severity == "passed"} & BOTH
    named = [one for one in named if one.rule not in right]
    read = {one.rule for one in named if one.severity == "error"}
    return named, [one for one in probed if one.rule not in read]


def with_other(results: Sequence[Finding], other: Finding) -> tuple[Finding, ...]:
    """All results where another option of the layer breaks a rule that this one keeps."""
    return (other, *(_waiting(one) for one in results if one.rule != other.rule))


def _bad(one: Finding) -> bool:
    return one.severity in ("error", "warning")


def _explained(one: Finding, reason: str, right: Mapping[str, str]) -> Finding:
    """Named mistakes about numbers explain whatever else is wrong about numbers; and where the
    definition gives the same numbers, positions and all, order counts by right."""
    if not _bad(one):
        return one
    if one.rule in right and one.ground != "any":
        return skipped(one.rule, right[one.rule])
    if reason and (RULES[one.rule].about == "numbers" or one.rule in COMPARING):
        return replace(one, explained_by=reason)
    return one


def _with_vague(vague: Finding, results: list[Finding], probed: list[Finding]) -> list[Finding]:
    """Where no mistake could be named, what else was seen says more, and comes first."""

    def may_explain(rule: str) -> bool:
        return RULES[rule].about == "numbers" or rule in ("reload", "deterministic", "registered")

    seen = [one for one in results if _bad(one) and one.explained_by is None]
    told = [one for one in seen if one not in probed or may_explain(one.rule)]
    errors = [one for one in told if one.severity == "error"]
    if [one.rule for one in errors] == ["order"]:  # which names no mistake either
        results = [replace(o, explained_by=UNNAMED) if o is errors[0] else o for o in results]
        return [vague, *results]
    if errors:
        return [*results, replace(vague, explained_by=errors[0].rule)]
    positions = vague.ground != "call"  # which may be put in without a word
    if told and positions:
        return [*results, replace(vague, severity="warning")]
    return [vague, *results]


def _after_each_other(results: list[Finding]) -> list[Finding]:
    """Mark what follows from another finding, or from writing into the input."""
    broken = [one for one in results if _bad(one)]
    reasons = {
        (rule, severity): one.rule
        for one in broken[::-1]
        for rule in RULES[one.rule].explains
        for severity in dict.fromkeys(("warning", one.severity))  # advice explains no mistake
    }
    writes = any(one.rule == "input-kept" for one in broken)
    explained = {one.rule: one.explained_by for one in broken if one.explained_by}
    done = []
    for one in results:
        reason = one.explained_by or reasons.get((one.rule, one.severity))
        if writes and "inplace operation" in one.message:
            reason = "input-kept"
        if not _bad(one) or not reason or explained.get(reason) == one.rule:
            done.append(one)  # what follows from it is no reason for it
            continue
        explained[one.rule] = reason
        done.append(replace(one, explained_by=reason))
    return done


def _waiting(one: Finding) -> Finding:
    """Advice that can wait until nothing is wrong."""
    if one.severity == "warning" and RULES[one.rule].later:
        return skipped(one.rule, "Advice that waits until nothing is wrong.")
    return one

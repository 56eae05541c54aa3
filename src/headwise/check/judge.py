"""Run the probes and the definition, and collect their findings in one list.

The named mistake comes first. Its consequences are not separate findings, and advice is shown after
all errors are fixed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from . import behavior, caches, definition, masks, use
from .code import class_sources, lines_in
from .probing import Failed, Probe, Probing
from .rules import RULES, passed, skipped
from .target import Question, Target
from .verdict import Finding, Verdict

FIRST: dict[str, Probe] = {
    "registered": use.registered,
    "runs": use.runs,
    "finite": behavior.finite,
    "deterministic": use.deterministic,
    "shape": behavior.shape,
}
"""If one of the last three fails, numbers are no longer compared."""
STOPS = ("finite", "deterministic", "shape")
NUMBERS: dict[str, Probe] = {
    "causality": behavior.causality,
    "past-used": behavior.past_used,
    "prefix": behavior.prefix,
    "batch": behavior.batch,
    "equal-tokens": behavior.equal_tokens,
    "one-token": behavior.one_token,
    "order": behavior.order,
    "weights": behavior.weights,
    "rotary": masks.rotary,
    "cross": masks.cross,
    "padding": masks.padding,
    "cache": caches.cache,
    "gradients": use.gradients,
    "large-inputs": behavior.large_inputs,
    "input-kept": use.input_kept,
    "contiguous": use.contiguous,
    "dropout-in-eval": use.dropout_in_eval,
    "dropout": use.dropout,
    "train-eval": use.train_eval,
    "reload": use.reload,
    "move": use.move,
    "context": use.context,
}
MOST = (
    "causal-mask",
    "mask-fill",
    "finite",
    "registered",
    "shared-heads",
    "runs",
    "cross",
    "padding",
    "mask",
)
"""Findings that come first among errors."""


def judged(target: Target) -> Verdict:
    """Return the verdict on a target."""
    masked = masks.learn_forms(target)
    ctx = Probing(target)
    if "allow" in target.takes and not any(one.rule == "mask" for one in masked):
        one = _tried("mask", masks.mask, ctx)
        masked += [] if one is None else [one]
    wrong = any(one.rule == "mask" and one.severity != "passed" for one in masked)
    masks.learn_causality(target, wrong)
    ctx = Probing(target)
    results, stopped = [*masked], ""
    done = {one.rule for one in masked if one.severity == "error"}
    for rule, probe in {**FIRST, **NUMBERS}.items():
        if rule in done:
            continue
        if stopped and rule in NUMBERS:
            results.append(skipped(rule, f"Skipped until `{stopped}` passes."))
            continue
        if (one := _tried(rule, probe, ctx)) is None:
            continue
        results.append(one)
        if rule in STOPS and one.severity == "error" and not stopped:
            stopped = rule
    wrong = any(one.severity == "error" and one.rule in ELSEWHERE for one in results)
    named = [] if stopped == "shape" else definition.run(target, twice=not wrong)
    if stopped == "finite":  # without numbers, only the axis of the softmax can be determined
        named = [one for one in named if one.rule == "softmax"]
    return Verdict(
        target.name, tuple(_joined(target, named, results)), tuple(dict.fromkeys(target.observed))
    )


def _tried(rule: str, probe: Probe, ctx: Probing) -> Finding | None:
    """Return the finding of a probe, or a finding on its failing call."""
    try:
        return probe(ctx)
    except Failed as failure:
        if isinstance(failure.error, Question):
            return skipped(rule, str(failure.error).partition("): ")[2])
        return Finding(rule, "error", f"{failure}.", "Fix the error, so that this call runs.")


def _joined(target: Target, named: Sequence[Finding], probed: Sequence[Finding]) -> list[Finding]:
    """Return all findings in the order in which to read them."""
    right = any(one.rule == "definition" and one.severity == "passed" for one in named)
    unread = any(one.rule == "definition" and one.severity == "skipped" for one in named)
    probed = [_grounded(one, target) if unread else one for one in probed]
    errors = [one for one in (*named, *probed) if one.severity == "error"]
    reasons: dict[str, str] = {}
    for one in sorted(errors, key=lambda one: one.rule == "definition"):
        for rule in RULES[one.rule].explains:
            reasons.setdefault(rule, one.rule)
    results, reported = list[Finding](), set[str]()

    def rank(one: Finding) -> tuple[bool, ...]:
        rule = RULES[one.rule]
        first = one.rule in MOST
        return (
            one.severity != "error",
            one.rule == "definition",
            not first and rule.about != "numbers",
            not first and rule.evidence != "oracle",
        )

    for one in sorted((*named, *probed), key=rank):
        wrong = one.severity in ("error", "warning")
        reason = reasons.get(one.rule)
        if right and wrong and one.rule in ("order", "equal-tokens", "one-token"):
            one = passed(one.rule, "The definition gives the same output.")
        elif wrong and reason and reason != one.rule and reasons.get(reason) != one.rule:
            one = replace(one, explained_by=reason)
        elif one.severity == "warning" and errors:
            one = skipped(one.rule, "Skipped: style advice is shown after all errors are fixed.")
        elif one.severity == "error" and ({one.rule, one.message} & reported):
            continue  # already reported
        reported |= {one.rule, one.message} if one.severity == "error" else set()
        results.append(
            _located(one, target) if wrong and one.severity in ("error", "warning") else one
        )
    return results


ELSEWHERE = ("mask", "padding", "cross", "registered")
"""Rules whose mistakes the definition does not cover: if one fails, no pairs are tried."""
OF_ATTENTION = ("equal-tokens", "one-token", "order")
"""Rules that hold for attention but perhaps not for similar layers."""
NO_TOKENS = re.compile(r"mem(_|or)|null|persist|sink|prefix|bias_[kv]")
"""Names of parameters that are keys or values without a token."""


def _grounded(one: Finding, target: Target) -> Finding:
    """Return the finding, as an error only if the layer is known to be standard attention: if its
    weights could not be read, it may be another kind of attention."""
    if one.severity != "error" or one.rule not in OF_ATTENTION:
        return one
    code = class_sources(target.layer)
    plain = re.search(r"(\bF|torch|functional)\.softmax\(|\.softmax\(|Softmax\(", code)
    more = any(NO_TOKENS.search(name.lower()) for name, _ in target.layer.named_parameters())
    more = more or behavior.knows_positions(target.layer)
    if one.rule == "equal-tokens" and plain and not more:
        return one
    return skipped(
        one.rule, f"Its weights could not be read, and other attention may do this: {one.message}"
    )


def _located(one: Finding, target: Target) -> Finding:
    """Return the finding with a line number, if a pattern of its rule matches a line."""
    if one.explained_by or "line " in one.message:
        return one
    for pattern in one.lines_at or RULES[one.rule].lines:
        lines = [
            line
            for line in lines_in(target.layer, pattern)
            if not line.code.startswith(("#", "def ", "class "))
        ]
        uses = [
            line for line in lines if not line.code.startswith(("self.", "import", '"'))
        ] or lines
        if uses:
            return replace(one, hint=f"{one.hint} Look at {uses[0]}.")
    return one

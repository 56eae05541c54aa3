"""Run all probes, in the order in which their results are read."""

from __future__ import annotations

from ..findings.rules import skipped
from ..findings.verdict import Finding
from ..target.call_adapter import UnusableResult
from ..target.checked_target import Target
from .advice import assert_, buffer, context, half, heads_divide, init, parameter_count
from .arguments import cross, rotary
from .behaviour import (
    batch,
    equal_tokens,
    finite,
    gradients,
    large_inputs,
    one_token,
    order,
    past_used,
    prefix,
    shape,
    weights,
)
from .caches import cache
from .causality import causality
from .masks import mask, padding
from .paths import paths
from .probe_context import Failed, Probe, ProbeContext
from .relative import relative
from .robustness import (
    contiguous,
    deterministic,
    dropout,
    input_kept,
    move,
    registered,
    reload,
    runs,
    train_eval,
)


def _by_rule(*probes: Probe) -> dict[str, Probe]:
    """Probes by their rules, which have their names."""
    return {probe.__name__.strip("_").replace("_", "-"): probe for probe in probes}


FIRST = _by_rule(shape, finite, deterministic)
"""Where one of these fails, numbers are not compared any more."""

NUMBERS = _by_rule(
    causality,
    past_used,
    prefix,
    batch,
    equal_tokens,
    one_token,
    order,
    weights,
    rotary,
    relative,
    mask,
    padding,
    cross,
    cache,
    gradients,
    large_inputs,
    input_kept,
    contiguous,
    reload,
    train_eval,
    dropout,
    paths,
    half,
    context,
)

OTHER_LENGTHS = {"prefix", "equal-tokens", "one-token", "cross", "cache", "context"}
"""Rules that are told by calls with another number of tokens."""

ALWAYS = _by_rule(
    runs,
    registered,
    move,
    heads_divide,
    init,
    parameter_count,
    buffer,
    assert_,
)

PROBES = {**FIRST, **NUMBERS, **ALWAYS}


def run(subject: Target) -> list[Finding]:
    """Try every rule that applies: a finding for each.

    >>> import headwise as hw
    >>> from headwise.check.target.resolve import resolve
    >>> subject = resolve(hw.MultiHeadAttention, 24, num_heads=3)
    >>> {finding.severity for finding in run(subject)} <= {"passed", "skipped"}
    True
    """
    ctx, results = ProbeContext(subject), []
    own = ProbeContext(subject, exact=False) if ctx.exact.dtype != subject.dtype else None
    stopped = ""
    for rule, probe in PROBES.items():
        if stopped and (rule in NUMBERS or (rule in FIRST and stopped == "deterministic")):
            results.append(skipped(rule, f"Not looked at before {stopped} is right."))
            continue
        if subject.only and rule in OTHER_LENGTHS:
            results.append(skipped(rule, f"It takes {ctx.tokens} tokens, and no other number."))
            continue
        said = {done.message for done in results}
        one = _tried(rule, probe, ctx)
        if one is not None and own is not None and rule in NUMBERS and _doubtful(one):
            again = _tried(rule, probe, own)  # what only its float64 shows is no mistake
            one = again if again is None or not _doubtful(again) else one
        if one is not None and one.severity == "error" and one.message in said:
            one = skipped(rule, "The same call fails.")
        if one is None:
            continue
        results.append(one)
        stops = one.severity == "error" or (rule == "deterministic" and one.severity == "skipped")
        if rule in FIRST and stops and not _still_numbers(rule, ctx):
            stopped = one.rule
    return results


def _doubtful(one: Finding) -> bool:
    """Whether it says that something is wrong, or could not be tried."""
    return one.severity == "error" or one.open


def _tried(rule: str, probe: Probe, ctx: ProbeContext) -> Finding | None:
    """What a probe finds; a call that fails is a finding of its own."""
    try:
        return probe(ctx)
    except Failed as failure:
        if failure.no_mistake is not None:
            return skipped(rule, failure.no_mistake)
        return Finding(rule, "error", str(failure), _what_to_do(failure))


def _still_numbers(rule: str, ctx: ProbeContext) -> bool:
    """Whether only a higher dropout changes outputs, so that they can be compared without."""
    try:
        return rule == "deterministic" and ctx.near(ctx.call(ctx.x), ctx.call(ctx.x))
    except Failed:  # which makes no numbers of its own
        return True


def _what_to_do(failure: Failed) -> str:
    if isinstance(failure.error, UnusableResult):
        return (
            "The output must be [B, T, out_dim] for every B and T: look for squeeze() without an "
            "axis, and for sizes that are written as numbers instead of taken from x.shape."
        )
    return "Make this call run: it is one that users make."

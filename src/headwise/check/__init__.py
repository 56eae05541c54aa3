"""Checking an attention that somebody wrote: what is wrong with it, in words.

`check` takes whatever it is given, runs the probes (which need no weights) and the
diagnosis (which reads them), and joins what they found in a `Verdict`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .findings.verdict import Example, Finding, Verdict

if TYPE_CHECKING:
    from .findings.rules import RULES, explain
    from .target.checked_target import Target

__all__ = ["RULES", "Example", "Finding", "Verdict", "check", "explain"]


def __getattr__(name: str) -> Any:
    if name in ("RULES", "explain"):  # their rows are read when somebody asks for them
        from .findings import rules

        return getattr(rules, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def check(
    thing: Any,
    *args: Any,
    embed_dim: int | None = None,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    causal: bool | None = None,
    seed: int = 0,
    call: Callable[[Any, Tensor], Any] | None = None,
    **arguments: Any,
) -> Verdict:
    """Says what is wrong with an attention that somebody wrote, and what to change.

    Args:
        thing: an `nn.Module`; a class or factory, which is built with `args` and `arguments`, and
            what they leave open worked out from the arguments' names; or a function of q, k and v.
        embed_dim, num_heads, num_kv_heads: sizes, where they are known or wanted.
        causal: whether later tokens must be hidden; default: what its behaviour, its name and its
            arguments say. Where the call takes a mask, a causal one is passed.
        seed: of all random numbers.
        call: `call(thing, x)`, for what wants to be called in a way of its own.

    Returns:
        A verdict: `passed`, `findings` and `results`; it prints itself. Nothing that was given is
        changed, and no gradient is left on it.

    Raises:
        ValueError: an argument that cannot be worked out, asked for by name.

    >>> import headwise as hw
    >>> verdict = hw.check(hw.MultiHeadAttention(24, num_heads=3))
    >>> verdict.passed, verdict.findings
    (True, ())
    """
    from .diagnosis.static_checks import read_off
    from .findings.triage import joined, urgency, with_other
    from .probes import run as probe
    from .probes.options import despite_guesses, guesses_that_count, options
    from .probes.rotary_modules import judge_rotary
    from .target.construct import name_of
    from .target.errors import Broken
    from .target.resolve import resolve
    from .target.sizes import BuildSizes

    sizes = {"embed_dim": embed_dim, "num_heads": num_heads, "num_kv_heads": num_kv_heads}
    said = {**arguments, **sizes, "causal": causal, "seed": seed, "call": call}
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.enable_grad():
        torch.manual_seed(seed)
        try:
            own = BuildSizes(embed_dim, num_heads, num_kv_heads)
            if not args and (alone := judge_rotary(thing, arguments, own, call)) is not None:
                return alone
            subject = resolve(thing, *args, **said)
        except Broken as broken:
            fault, read = broken.finding, [*read_off(thing)]
            if fault.rule not in ("builds", "shape"):  # what was read of these says more
                read = [one for one in read if one.rule != fault.rule]
            told = fault.rule == "shape" and any(one.rule == fault.rule for one in read)
            findings = sorted(read if told else [*read, fault], key=urgency)
            return Verdict(name_of(thing), tuple(findings))
        except ValueError:
            if read := sorted(read_off(thing), key=urgency):  # which needs no call
                return Verdict(name_of(thing), tuple(read))
            raise
        named, probed = _diagnosed(subject), probe(subject)
        loose = any(one.severity == "error" and one.ground != "any" for one in (*named, *probed))
        built = [*(guesses_that_count(subject) if loose else ()), *subject.absent]
        probed = despite_guesses(subject, probed) if built else probed
        results = joined(named, probed, subject.guesses, built)
        wrong = any(one.severity == "error" for one in results)
        kept = {"runs", *(one.rule for one in results if one.severity == "passed")}
        if not wrong and (other := options(subject, kept)) is not None:
            results = with_other(results, other)
        return Verdict(subject.name, results, tuple(subject.notes))


def _diagnosed(subject: Target) -> list[Finding]:
    """What the diagnosis finds; where tables of positions that were made up stand in the way, what
    it finds with zeros in them."""
    from .diagnosis import run as diagnose
    from .findings.rules import skipped
    from .target.learnt import silenced

    findings = diagnose(subject)
    caller, names = silenced(subject.caller)
    unread = any(one.rule == "definition" and one.severity == "skipped" for one in findings)
    if not unread or not names or subject.room is not None:
        return findings
    again = diagnose(replace(subject, caller=caller))
    definition = next((one for one in again if one.rule == "definition"), None)
    if any(one.severity == "error" and one is not definition for one in again):
        return again
    if definition is None or definition.severity != "passed":
        return findings
    beside = f"That is with zeros for {', '.join(names)}: what they do was not judged."
    said = skipped("definition", f"{definition.message} {beside}")
    return [said if one is definition else one for one in again]

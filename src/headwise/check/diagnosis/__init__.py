"""Which mistake it is: the variant of attention that gives somebody's output from their weights.

The module's weights are replaced by random ones (zeros hide mistakes), read, and attention is
rebuilt from them by `variants`. Where that is what the module gives, it is right. Where not, the
known mistakes are tried one at a time, then two; the first that gives the module's own output is
named.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from ..findings.rules import found, passed, skipped
from ..findings.verdict import Example, Finding, Ground
from ..target.call_adapter import tensors_in
from ..target.checked_target import Target
from ..target.construct import source_of
from ..target.introspect import names_in, numbers_in
from .call_lines import PLAIN_FUNCTIONS, LineCall, lines_of, lines_run, recorded
from .faults import Fault, words_of
from .fit import FITS, Case, case_of, projections_of, undropped
from .projections import Projections, Unreadable
from .rotations import idle_turns, stretched
from .scores import heads_seen, named_by_scores, scores_of
from .search import FITS_LARGE, leaking, named, stated, textbook
from .static_checks import (
    dropout_in_eval,
    dropout_lost,
    empty_triangle,
    no_output_projection,
    one_small_linear,
    plain_lists,
    read_off,
    samples_mixed,
    shared_heads,
    softmax_astray,
    softmax_missing,
)
from .traced_scale import is_scaled_right, of_units, traced_scale
from .traced_tokens import traced_tokens
from .variants import Variant, error, rebuild, weights_of

OTHER_INGREDIENTS = re.compile(
    r"rope|rotary|rot_?emb|freqs?|(^|_)(cos|sin)(_|$)|alibi|slope|relative|rel_pos|pos_?bias|"
    r"position|soft_?cap|softclamp|window|sink|gate|qk_norm|talking|temperature|mem_kv|num_mem|"
    r"null|lambda|latent|sigma|kernel|(^|_)tau(_|$)|linear_?att|sparse|local|cosine|zero_attn|"
    r"interpretable|(^|_)bias_[kv](_|$)|(group|batch|instance)norm"
)
"""Names of what makes an attention more than projections and a softmax."""
OTHER_FUNCTIONS = set(
    (
        "relu leaky_relu gelu silu elu selu celu softplus sigmoid logsigmoid hardsigmoid tanh "
        "hardtanh hardswish mish group_norm batch_norm instance_norm cumsum cumprod topk sort roll "
        "unfold avg_pool1d avg_pool2d max_pool1d max_pool2d interpolate cdist "
        "gumbel_softmax multinomial bernoulli fft_fft fft_rfft scatter index_add"
    ).split()
)
"""Functions that are called for the same."""
MEANT = re.compile(r"\b(residual|identity|shortcut|skip|\w+_(spare|orig|res|copy))\b")
"""Names that people give an input which is to be added to the output."""
TILED = re.compile(r"#[^\n]*(\btiled?\b|\bh(ead)? ?% ?\w|% ?n_?kv)")
"""What speaks of key/value heads that are tiled on purpose."""
UNSCALED = re.compile(r"gpt_?neo(?!_?x)|t5")
"""Names of designs that leave the scale to the initial weights (Black et al. 2021, GPT-Neo; Raffel
et al. 2020, T5)."""
DROPPING = re.compile("drop")
"""What lines say that drop numbers in training."""
HIDING = re.compile(r"mask|fill|inf")
"""What lines say that hide keys."""
READ = {
    "builds": set(),
    "roles": {"roles"},
    "mask-fill": {"causal-mask", "mask-fill"},
    "mask": {"causal-mask", "mask-fill"},
    "cache": {"causal-mask", "mask-fill"},
    "scale": {"scale"},
    "head-split": {"head-split"},
    "head-merge": {"head-merge"},
    "shared-heads": {"shared-heads"},
    "definition": set(),
    "rotary": set(),
    "rotation": {"rotation"},
    "padding": {"causal-mask", "mask-fill"},
    "move": {"move"},
    "registered": {"registered"},
    "dropout-in-eval": {"dropout-in-eval"},
    "dropout": {"dropout-in-eval"},
    "residual": {"residual"},
    "softmax": {"softmax"},
    "bias": {"bias"},
    "shape": {"shape"},
}
"""Rules that are read off the code where none of these, or none at all, was seen in the numbers."""
GIVEN = {"scale", "head-split", "head-merge", "definition", "rotary", "rotation"}
"""Those that the numbers answer, where the definition gives them and the line was reached."""
SIZELESS = {"√T", "T", "√B", "√D √T", "queries", "heads", "batch", "both", "twice"}
"""Mistakes that no number given to the constructor makes, a guessed one neither."""


def run(subject: Target) -> list[Finding]:
    """What the oracle finds: named mistakes, or that the output is what the definition gives.

    >>> from headwise.tutorial.implementations.split import MultiHeadAttn
    >>> from headwise.check.target.resolve import resolve
    >>> subject = resolve(MultiHeadAttn, d_in=24, d_out=24, num_heads=3)
    >>> [(finding.rule, finding.severity) for finding in run(subject)]
    [('definition', 'passed')]
    """
    with torch.no_grad():
        lists = plain_lists(subject)
        dropping, drops = dropout_in_eval(subject)
        # modules that PyTorch does not know of never hear of eval mode, and drop for that
        thing = subject.caller.target
        read = [*read_off(thing, *READ)]
        judged = _run(subject, bool(lists), drops, not read)
        guessed = _guessed(judged)
        if guessed and any(True for _ in read_off(thing, "definition")):  # which names the line
            judged = [one for one in judged if one not in guessed]
        early = [*_unused(subject, judged), *lists]
        dropping = [] if lists else dropping
        wrong = any(one.severity == "error" and one.rule != "definition" for one in judged)
        # what is wrong in eval mode, too, weighs more than what is dropped there
        findings = [*early, *judged, *dropping] if wrong else [*early, *dropping, *judged]
        done = {one.rule for one in findings if one.severity == "error"}
        right = _is_right(findings)
        if right and any(one.rule in GIVEN for one in read):
            known = lines_run(subject)  # which can do no harm
            of = ((rule, known if rule in GIVEN else ()) for rule in READ)
            read = [one for rule, besides in of for one in read_off(thing, rule, besides=besides)]
        if any(one.rule == "scale" for one in read) and is_scaled_right(subject):
            read = [one for one in read if one.rule != "scale"]
        sure = {one.rule for one in read}  # whatever was made up
        findings = [replace(one, ground="any") if one.rule in sure else one for one in findings]
        named = [one for one in read if not done & (READ[one.rule] or done)]
        return [*named, *findings]


def _guessed(judged: list[Finding]) -> list[Finding]:
    """Two mistakes that explain the numbers together, numbers that none explains, or weights that
    are not summed where they add up to 1: one line may be all that is wrong."""
    errors = [one for one in judged if one.severity == "error"]
    shown = [one for one in errors if one.example is not None]
    traced = [one for one in errors if one.rule == "softmax" and one.example is None]
    unexplained = [one for one in errors if one.rule == "definition"]
    return [*(shown if len(shown) > 1 else unexplained), *traced]


def _unused(subject: Target, judged: list[Finding]) -> list[Finding]:
    """Results that nothing takes. Where the definition gives the same output, and the line hides
    nothing that would still be seen and drops nothing, it is only of no use."""
    findings = [*read_off(subject.caller.target, "unused-result")]
    right = _is_right(judged)
    masked = subject.caller.named("mask") or subject.caller.named("padding")
    seen = masked or not subject.causal
    for number, one in enumerate(findings):
        if right and not (seen and HIDING.search(one.hint)) and not DROPPING.search(one.hint):
            findings[number] = replace(one, severity="warning")
    return findings or dropout_lost(subject)


def _is_right(findings: list[Finding]) -> bool:
    """Whether the definition gives the same numbers."""
    return any((one.rule, one.severity) == ("definition", "passed") for one in findings)


def _run(subject: Target, unread: bool, drops: bool, twice: bool) -> list[Finding]:
    """What the numbers tell.

    Args:
        unread: whether there are layers that PyTorch does not know of.
        drops: whether numbers are dropped in eval mode.
        twice: whether two mistakes at once are looked for.
    """
    try:
        case = _case(subject, drops)
    except Unreadable as reason:
        told = [*_seen_in_a_call(subject), *one_small_linear(subject)]
        return told or ([] if unread else [_unread(str(reason))])
    findings = shared_heads(case.reading)
    bases = list(textbook(subject, case.reading))
    right = next((base for base in bases if case.fits(base)), None)
    if right is None and "heads" not in subject.roles:
        case, bases, right = _with_other_heads(case, bases)
    own = case.subject
    subject = replace(subject, num_heads=own.num_heads, num_kv_heads=own.num_kv_heads)
    if right is not None:
        leak = leaking(case, right)
        leaks = [] if leak is None else [_finding(case, subject, right, leak, large=True)]
        if findings or (leak is not None and leak.severity == "error"):
            return findings + leaks
        beside = [*empty_triangle(subject), *idle_turns(subject)]
        beside += no_output_projection(subject, case.reading)
        beside += _other_weights(case, right)
        return [_passed(case.reading, right), *leaks, *beside]
    sure = subject.causal_from not in ("seen", "unknown")
    mistaken = named(case, bases, sure, twice)
    if mistaken is not None:
        base, faults = mistaken
        odd = len(faults) > 1 or any(one.parts not in "qkv" for one in case.reading.sources)
        if odd and {one.rule for one in faults} == {"packing"}:
            faults = [replace(one, severity="warning") for one in faults]  # a layout of its own
        if {"softmax", "mask-fill"} <= {one.rule for one in faults}:  # along another axis it hides
            faults = [one for one in faults if one.rule != "mask-fill"]  # others, whatever it fills
        changes = {str(value) for one in faults for value in one.change.values()}
        if changes & {"1e9", "inf"}:  # what is hidden gets all: it looks inverted as well
            faults = [one for one in faults if one.rule != "causal-mask"]
        faults.sort(key=lambda one: one.rule not in ("causal-mask", "mask-fill"))  # spoils most
        return findings + [_finding(case, subject, base, one) for one in faults]
    if findings:
        return findings
    by_scores = named_by_scores(case, bases, sure)
    named_alone = [_finding(case, subject, None, one) for one in by_scores]
    return named_alone or [_unexplained(case, subject, bases[0])]


def _other_weights(case: Case, base: Variant) -> list[Finding]:
    """Whether weights come back that are not those which make the output, of all heads or on
    average."""
    x, caller = case.inputs[-1], case.subject.caller
    try:
        asked = dict.fromkeys(caller.named("weights") if caller.custom is None else (), True)
        given = case.subject.result(x, **asked).weights
        used = weights_of(case.reading, x, base)
    except Exception:  # what is checked may raise anything; the probes say what and where
        return []
    if given is None or given.shape[-1] != x.shape[1] or not _is_near(given.sum(-1), 1.0):
        return []
    for made in (used, used.mean(1)):
        if made.numel() == given.numel():
            alike = _is_near(made.flatten().sort()[0], given.detach().flatten().sort()[0])
            return [] if alike else [found("weights", "others")]
    return []


def _is_near(one: Tensor, other: Tensor | float) -> bool:
    """Whether all numbers are the same but for rounding."""
    return bool((one - other).abs().max() < FITS)


def _case(subject: Target, drops: bool) -> Case:
    """The case; where its number of heads cannot be right, with as many as its scores have."""
    if subject.caller.pooled:
        raise Unreadable("it gives one output for all tokens")
    if subject.caller.ids:
        raise Unreadable("more may lie between its embedding and its attention")
    if subject.vectors:
        raise Unreadable("it takes one vector of each sample")
    with contextlib.suppress(Unreadable):
        return case_of(subject, drops)
    heads = heads_seen(subject) or subject.num_heads
    if heads != subject.num_heads:
        with contextlib.suppress(Unreadable):
            return case_of(replace(subject, num_heads=heads, num_kv_heads=None), drops)
    return case_of(subject, drops)  # whose reason counts


def _with_other_heads(
    case: Case, bases: list[Variant]
) -> tuple[Case, list[Variant], Variant | None]:
    """The same with another number of heads, where nobody said it: with one of its own numbers or
    as many as its scores have, if that explains the output; else with as many as the scores have.
    """
    module, width = case.subject.module, case.reading.head_dim * case.reading.num_heads
    said = () if module is None else {int(n) for n in numbers_in(module, "") if n > 1}
    seen, likeliest = heads_seen(case.subject), (case, bases, None)
    for heads in sorted({*said, seen or 0} - {0, case.reading.num_heads}):
        if width % heads:
            continue
        subject = replace(case.subject, num_heads=heads)
        with contextlib.suppress(Unreadable):
            other = replace(case, subject=subject, reading=projections_of(subject))
            others = list(textbook(subject, other.reading))
            if fits := [base for base in others if other.fits(base)]:
                return other, others, fits[0]
            likeliest = (other, others, None) if heads == seen else likeliest
    return likeliest


def _passed(reading: Projections, base: Variant) -> Finding:
    also = []
    if base.rope is not None:
        also.append("rotary positions")
    if {"q", "k"} & set(reading.norms):
        also.append("norms of queries and keys")
    if base.residual:
        also.append("the norm around it")
    if base.softcap is not None:
        also.append(f"scores capped at {base.softcap:g}")
    if base.mask.startswith("window"):
        also.append(f"a window of {base.mask.removeprefix('window ')} tokens")
    beside = f", with {' and '.join(also)}" if also else ""
    unnamed = "" if reading.named else ", whichever projection plays which part"
    said = f"From its own weights ({_projections(reading)}) the definition gives the same output"
    return passed("definition", f"{said}{beside}{unnamed}.")


def _projections(reading: Projections) -> str:
    return ", ".join(matrix.name for matrix in reading.matrices)


def _seen_in_a_call(subject: Target) -> list[Finding]:
    """What shows in what a call does, whatever the weights."""
    return (
        samples_mixed(subject)
        or softmax_astray(subject)
        or softmax_missing(subject)
        or empty_triangle(subject)
        or traced_tokens(subject)
        or stretched(subject)
        or idle_turns(subject)
        or traced_scale(subject)
        or of_units(subject)
    )


def _unread(reason: str) -> Finding:
    said = f"The weights cannot be read, so that only its behaviour was checked: {reason}."
    return skipped("definition", said)


def _finding(
    case: Case, subject: Target, base: Variant | None, fault: Fault, large: bool = False
) -> Finding:
    """What is said of a fault; with no base there is no right output to show beside it."""
    names = words_of(case.reading, case.inputs[1].shape[1])
    message, hint = fault.message.format(**names), fault.hint.format(**names)
    line = lines_of(case.subject, case.inputs[1], fault.rule, fault.odd_one)
    severity = fault.severity
    if fault.change == {"scale": "nothing"}:
        home = type(case.subject.module).__name__.lower()
        meant = UNSCALED.search(home) or stated(case, 1.0) is not None
        severity = "warning" if meant else severity
    if fault.change == {"split": "strided", "merge": "strided"}:  # an order of its own
        severity = "warning"
    said = {"residual": MEANT, "grouped-heads": TILED}.get(fault.rule)
    if said is not None and said.search(source_of(type(case.subject.module))):
        severity = "warning"
    example = None if base is None else _example(case, subject, base, large)
    free = not subject.guesses and SIZELESS & {str(value) for value in fault.change.values()}
    ground: Ground = "any" if free else "weights"
    return Finding(fault.rule, severity, message, hint + line, example, ground=ground)


def _example(case: Case, subject: Target, base: Variant, large: bool = False) -> Example | None:
    """Three tokens: what it gives, and what the textbook gives from the same weights.

    The module's own weights are used where the mistake shows with them, else random ones.
    """
    shows = FITS_LARGE if large else 10 * FITS
    for own, times in product((True, False), (10.0, 100.0, 1e3, 1e4) if large else (1.0,)):
        trial = subject.double() if own else case.subject
        x = trial.input(tokens=min(3, trial.context_length or 3), batch=1, scale=times)
        try:
            actual = undropped(trial, x, case.drops)
        except Exception:  # what is checked may raise anything; the probes say what and where
            continue
        try:
            expected = rebuild(projections_of(trial), x, base)
        except RuntimeError:  # a projection too narrow for all heads: there is no right output
            return None
        if expected.shape != actual.shape or error(actual, expected) < shows:
            continue
        source = subject.source(x.shape[1]) + (f"; x = {times:.0f} * x" if large else "")
        if not own:
            source += "  # with random weights: with its own it hardly shows"
        return Example.of(source, expected, actual)
    return None


def _unexplained(case: Case, subject: Target, base: Variant) -> Finding:
    made = recorded(case.subject, case.inputs[1], case.drops)
    reasons = [*case.reading.extras, *case.subject.caller.tables, *sorted(case.subject.idle)]
    reasons += sorted({call.name for call in made} & OTHER_FUNCTIONS)
    reasons += ["another sequence"] * case.subject.caller.streams
    out, heads = case.reading.out, case.reading.num_heads * case.reading.value_dim
    if out is not None and out.weight.shape[0] > heads:
        reasons.append(f"{out.name}, which takes more than the heads")
    if case.subject.module is not None:
        kinds = [type(child).__name__ for child in case.subject.module.modules()]
        names = dict.fromkeys([*names_in(case.subject.module), *kinds])
        reasons += [name for name in names if OTHER_INGREDIENTS.search(name.lower())]
    if told := _seen_in_a_call(subject):
        return told[0]
    if subject.open_form is not None:
        return _unread("what its mask means was guessed")
    if not any(True for _ in scores_of(case)):
        return _unread("no softmax over tokens was seen")
    if reasons:
        return _unread(f"it has more than projections ({', '.join(reasons[:3])})")
    groups, words = case.reading.num_kv_heads, {"H": case.reading.num_heads}
    if heads_seen(case.subject) == groups < words["H"]:
        return found("grouped-heads", "summed", G=groups, **words)
    words |= {"names": _projections(case.reading)}
    one = found("definition", "unexplained", _example(case, subject, base), **words)
    return replace(one, ground="call") if _is_plain(subject, made) else one


def _is_plain(subject: Target, made: Sequence[LineCall]) -> bool:
    """Whether a call that nobody guessed only projects, moves axes, multiplies and takes a softmax:
    then no positions are put in that would make it another attention."""
    names = {call.name for call in made}
    guessed = subject.guesses or subject.made_up or subject.absent
    shifts = {"cat", "getitem"} <= names
    parts = () if subject.module is None else subject.module.modules()
    own = ((name, value) for part in parts for name, value in vars(part).items())
    held = [*tensors_in([value for name, value in own if name not in ("_parameters", "_modules")])]
    return not (guessed or held or shifts) and names <= PLAIN_FUNCTIONS

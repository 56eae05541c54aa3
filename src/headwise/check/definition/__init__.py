"""Name the mistake: find the variant of attention that gives a layer's output from its weights."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product

import torch
from torch import nn

from ..behavior import _weights_option
from ..code import class_sources, names_in, numbers_in
from ..rules import passed, skipped, violation
from ..target import Target
from ..verdict import Example, Finding
from .faults import Fault, words_of
from .projections import Projections, Unreadable, is_norm
from .search import (
    FEED_FORWARD,
    FITS,
    FITS_LARGE,
    Case,
    case_of,
    leaking,
    named,
    projections_of,
    stated,
    textbook,
)
from .variants import Variant, error, rebuild, weights_of

OTHER_INGREDIENTS = re.compile(
    r"rope|rotary|rot_?emb|freqs?|(^|_)(cos|sin)(_|$)|alibi|slope|relative|rel_pos|pos_?bias|"
    r"position|soft_?cap|softclamp|window|sink|gate|qk_norm|talking|temperature|mem_kv|"
    r"null|lambda|latent|sigma|kernel|(^|_)tau(_|$)|linear_?att|sparse|local|cosine|zero_attn|"
    r"(^|_)bias_[kv](_|$)|(group|batch|instance)norm|relu|gelu|silu|tanh|sigmoid|conv|topk|cumsum"
)
"""Names of ingredients beyond projections and a softmax."""
MEANT = re.compile(r"\b(residual|identity|shortcut|skip|\w+_(spare|orig|res|copy))\b")
"""Names of an input that is intentionally added to the output."""
TILED = re.compile(r"#[^\n]*(\btiled?\b|\bh(ead)? ?% ?\w|% ?n_?kv)")
"""Comments that indicate intentional tiling of key/value heads."""
UNSCALED = re.compile(r"gpt_?neo(?!_?x)|t5")
"""Names of designs whose scale is in the initial weights (GPT-Neo, T5)."""


def run(target: Target, twice: bool = True) -> list[Finding]:
    """Return the named mistakes, or a passed finding if the output equals the definition.

    Args:
        twice: also try pairs of mistakes, which takes longer.
    """
    shared = _shared_heads(target.layer)
    try:
        with torch.no_grad():
            case = case_of(target)
            return [*shared, *_compared(case, target, twice)]
    except Unreadable as reason:
        return [*shared, _unread(str(reason))]


def _shared_heads(layer: nn.Module) -> list[Finding]:
    """Find heads that are the same module."""
    for path, child in layer.named_modules():
        single = isinstance(child, nn.ModuleList) and len({*map(id, child)}) < len(child)
        if single and any(True for _ in child.parameters()):
            return [violation("shared-heads", "one", name=path)]
    return []


def _compared(case: Case, target: Target, twice: bool) -> list[Finding]:
    bases = list(textbook(target, case.reading))
    right = next((base for base in bases if case.fits(base)), None)
    if right is None and "heads" not in target.roles:
        case, bases, right = _with_other_heads(case, bases)
    if right is not None:
        _observe(target, case.reading, right)
        leak = leaking(case, right)
        leaks = [] if leak is None else [_finding(case, target, right, leak, large=True)]
        return [_passed(case.reading, right), *leaks, *_other_weights(case, right)]
    sure = target.causal_from not in ("seen", "unknown")
    mistaken = named(case, bases, sure, twice and not _reasons(case, target))
    if mistaken is None:
        return [_unexplained(case, target, bases[0])]
    base, faults = mistaken
    odd = len(faults) > 1 or any(one.parts not in "qkv" for one in case.reading.sources)
    if odd and {one.rule for one in faults} == {"packing"}:
        faults = [replace(one, severity="warning") for one in faults]  # its own order
    # Along the wrong axis, the mask hides other keys.
    if {"softmax", "mask-fill"} <= {one.rule for one in faults}:
        faults = [one for one in faults if one.rule != "mask-fill"]
    changes = {str(value) for one in faults for value in one.change.values()}
    if changes & {"1e9", "inf"}:  # hidden keys get all the weight, so the mask looks inverted too
        faults = [one for one in faults if one.rule != "causal-mask"]
    faults.sort(key=lambda one: one.rule not in ("causal-mask", "mask-fill"))
    return [_finding(case, target, base, one) for one in faults]


def _observe(target: Target, reading: Projections, right: Variant) -> None:
    grouped = reading.num_kv_heads != reading.num_heads
    groups = f", {reading.num_kv_heads} of keys" * grouped
    target.observed.append(f"{reading.num_heads} heads of {reading.head_dim}{groups}")
    if right.rope is not None:
        target.observed.append("rotary")
    if right.slopes:
        target.observed.append("ALiBi")
    if {"q", "k"} & set(reading.norms):
        target.observed.append("queries and keys are normalized")


def _passed(reading: Projections, base: Variant) -> Finding:
    also = ["rotary positions"] * (base.rope is not None) + ["ALiBi"] * bool(base.slopes)
    also += ["norms of queries and keys"] * bool({"q", "k"} & set(reading.norms))
    also += ["the norm around it"] * bool(base.residual)
    also += [f"scores capped at {base.softcap:g}"] if base.softcap is not None else []
    beside = f", with {' and '.join(also)}" if also else ""
    message = f"The definition gives the same output from its weights ({_projections(reading)})"
    return passed("definition", f"{message}{beside}.")


def _other_weights(case: Case, base: Variant) -> list[Finding]:
    """Find returned weights that differ from the weights in use."""
    x = case.inputs[-1]
    try:
        given = case.target.result(x, **_weights_option(case.target)).weights
        used = weights_of(case.reading, x, base)
    except Exception:  # the probes report it
        return []
    if given is None or given.shape[-1] != x.shape[1]:
        return []
    given = given.detach()
    if bool((given.sum(-1) - 1).abs().max() > FITS):
        return []
    for computed in (used, used.mean(1)):
        if computed.numel() == given.numel():
            a, b = (one.flatten().sort()[0] for one in (computed, given))
            return [] if bool((a - b).abs().max() < FITS) else [violation("weights", "others")]
    return []


def _with_other_heads(
    case: Case, bases: list[Variant]
) -> tuple[Case, list[Variant], Variant | None]:
    """Try the numbers found in the layer as the number of heads, if the user gave none."""
    width = case.reading.head_dim * case.reading.num_heads
    numbers = {int(n) for n in numbers_in(case.target.layer, "") if n > 1}
    for heads in sorted(numbers - {case.reading.num_heads}):
        if width % heads:
            continue
        try:
            target = replace(case.target, num_heads=heads)
            other = replace(case, target=target, reading=projections_of(target))
            others = list(textbook(target, other.reading))
        except Unreadable:
            continue
        if fits := [base for base in others if other.fits(base)]:
            return other, others, fits[0]
    return case, bases, None


def _projections(reading: Projections) -> str:
    return ", ".join(matrix.name for matrix in reading.matrices)


def _unread(reason: str) -> Finding:
    return skipped(
        "definition", f"The weights cannot be read, so only its behavior was checked: {reason}."
    )


def _finding(
    case: Case, target: Target, base: Variant, fault: Fault, large: bool = False
) -> Finding:
    names = words_of(case.reading, case.inputs[1].shape[1])
    severity = fault.severity
    code = class_sources(target.layer)
    if fault.change == {"scale": "nothing"}:
        home = type(target.layer).__name__.lower()
        meant = UNSCALED.search(home) or stated(case, 1.0) is not None
        severity = "warning" if meant else severity
    if fault.change == {"split": "strided", "merge": "strided"}:  # its own order
        severity = "warning"
    intended = {"residual": MEANT, "grouped-heads": TILED}.get(fault.rule)
    if intended is not None and intended.search(code):
        severity = "warning"
    message, hint = fault.message.format(**names), fault.hint.format(**names)
    return Finding(fault.rule, severity, message, hint, _example(case, target, base, large))


def _example(case: Case, target: Target, base: Variant, large: bool = False) -> Example | None:
    """Return an example of three tokens: with the layer's own weights if the mistake shows with
    them, else with random ones."""
    shows = FITS_LARGE if large else 10 * FITS
    for own, times in product((True, False), (10.0, 100.0, 1e3, 1e4) if large else (1.0,)):
        trial = target.double() if own else case.target
        x = times * trial.input(tokens=3, batch=1)
        try:
            actual, expected = trial(x), rebuild(projections_of(trial), x, base)
        except Exception:  # a projection too narrow for all heads: no correct output exists
            continue
        if expected.shape != actual.shape or error(actual, expected) < shows:
            continue
        source = target.source(x.shape[1]) + (f"; x = {times:.0f} * x" if large else "")
        return Example.of(source + "  # with random weights" * (not own), expected, actual)
    return None


def _unexplained(case: Case, target: Target, base: Variant) -> Finding:
    if reasons := _reasons(case, target):
        if reasons == ["exp()"] and "max" in class_sources(target.layer) and _is_uneven(case):
            return violation("equal-tokens", "values")
        return _unread(f"it has more than projections ({', '.join(reasons[:3])})")
    if target.shown:  # the call may differ from the definition
        return _unread("the definition does not give its output in the given call")
    if "x" in case.reading.norms:
        return _unread("the position of its norm is unknown")
    if not case.reading.named:
        return _unread(f"the names do not indicate the roles of {_projections(case.reading)}")
    words = {"H": case.reading.num_heads, "names": _projections(case.reading)}
    return violation("definition", "unexplained", _example(case, target, base), **words)


def _is_uneven(case: Case) -> bool:
    """Return True if outputs differ although all values are equal: values are computed from the
    first half of the features, and only the second half differs."""
    target, half = case.target.fresh(), case.target.embed_dim // 2
    values = next((source.name for source in case.reading.sources if source.parts == "v"), "")
    linear = dict(target.layer.named_modules()).get(values)
    if not isinstance(linear, nn.Linear) or case.reading.norms:
        return False
    x = case.inputs[1].clone()
    x[..., :half] = x[:, :1, :half]
    linear.weight[:, half:] = 0.0
    out = target(x)
    return error(out, out[:, :1].expand_as(out)) > FITS


def _reasons(case: Case, target: Target) -> list[str]:
    """Return the ingredients that may make the output differ from the definition."""
    parts = {
        path: child
        for path, child in target.layer.named_modules()
        if not FEED_FORWARD.fullmatch(path.split(".")[0].lower())
    }
    norms = {path for path, child in parts.items() if is_norm(child)}
    owners = ((name, name.rpartition(".")[0]) for name in case.reading.extras)
    reasons = [name for name, owner in owners if owner in parts and owner not in norms]
    kinds = [type(child).__name__ for child in parts.values()]
    names = dict.fromkeys([*names_in(target.layer), *kinds])
    reasons += [name for name in names if OTHER_INGREDIENTS.search(name.lower())]
    out, heads = case.reading.out, case.reading.num_heads * case.reading.value_dim
    if out is not None and out.weight.shape[0] > heads:
        reasons.append(f"{out.name}, which takes more than the heads")
    calls = re.search(
        r"\b(exp|cumsum|topk|gelu|silu|relu|tanh|sigmoid|roll)\(", class_sources(target.layer)
    )
    reasons += [f"{calls[1]}()"] if calls else []
    return reasons

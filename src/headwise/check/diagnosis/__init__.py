"""Which mistake it is: the variant of attention that gives somebody's output from their weights.

The module's weights are replaced by random ones (zeros hide mistakes), read, and attention is
rebuilt from them by `oracle`. Where that is what the module gives, it is right. Where not, the
known mistakes are tried one at a time, then two; the first that gives the module's own output is
named.
"""

from __future__ import annotations

import re
from itertools import product

import torch

from ..findings.verdict import Example, Finding
from ..target.introspect import names_in
from ..target.subject import Subject
from .call_lines import lines_of
from .faults import Mistake
from .fit import FITS, Case, case_of, read_off, undropped
from .projections import Reading, Unreadable
from .search import FITS_LARGE, leaking, named, stated, textbook
from .static_checks import dropout_in_eval, no_output_projection, plain_lists, shared_heads
from .variants import Variant, error, rebuild

OTHER_INGREDIENTS = re.compile(
    r"rope|rotary|rot_?emb|freqs?|(^|_)(cos|sin)(_|$)|alibi|slope|relative|rel_pos|pos_?bias|"
    r"position|soft_?cap|softclamp|window|sink|gate|qk_norm|talking|temperature|mem_kv|num_mem|"
    r"null|lambda|latent|sigma|kernel|(^|_)tau(_|$)|linear_?att|sparse|local|cosine|zero_attn|"
    r"(^|_)bias_[kv](_|$)"
)
"""Names of what makes an attention more than projections and a softmax."""


def run(subject: Subject) -> list[Finding]:
    """What the oracle finds: named mistakes, or that the output is what the definition gives.

    >>> from headwise.systems.split import MultiHeadAttn
    >>> from headwise.check.target.resolve import take
    >>> subject = take(MultiHeadAttn, d_in=24, d_out=24, num_heads=3)
    >>> [(finding.rule, finding.severity) for finding in run(subject)]
    [('definition', 'passed')]
    """
    with torch.no_grad():
        lists = plain_lists(subject)
        dropping, drops = dropout_in_eval(subject)
        # modules that PyTorch does not know of never hear of eval mode, and drop for that
        return [*lists, *([] if lists else dropping), *_run(subject, bool(lists), drops)]


def _run(subject: Subject, unread: bool, drops: bool) -> list[Finding]:
    try:
        case = case_of(subject, drops)
    except Unreadable as reason:
        return [] if unread else [_unread(str(reason))]
    findings = shared_heads(case.reading)
    bases = list(textbook(subject, case.reading))
    right = next((base for base in bases if case.fits(base)), None)
    if right is not None:
        found = leaking(case, right)
        if found is not None:
            return [*findings, _finding(case, subject, right, found, large=True)]
        return findings or [
            _passed(case.reading, right),
            *no_output_projection(subject, case.reading),
        ]
    mistaken = named(case, bases, subject.causal_from not in ("seen", "unknown"))
    if mistaken is not None:
        base, found = mistaken
        return findings + [_finding(case, subject, base, one) for one in found]
    return findings or [_unexplained(case, subject, bases[0])]


def _passed(reading: Reading, base: Variant) -> Finding:
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
    return Finding(
        "definition",
        "passed",
        f"From its own weights ({_projections(reading)}) the definition gives the same "
        f"output{beside}{unnamed}.",
    )


def _projections(reading: Reading) -> str:
    names = [source.name for source in reading.sources]
    return ", ".join([*names, *([reading.out.name] if reading.out is not None else [])])


def _unread(reason: str) -> Finding:
    return Finding(
        "definition",
        "skipped",
        f"The weights cannot be read, so that only its behaviour was checked: {reason}.",
    )


def _finding(
    case: Case, subject: Subject, base: Variant, found: Mistake, large: bool = False
) -> Finding:
    names = _words(case)
    message, hint = found.message.format(**names), found.hint.format(**names)
    line = lines_of(case.subject, case.inputs[1], found.rule)
    severity = found.severity
    if found.change == {"scale": "nothing"} and stated(case, 1.0) is not None:
        severity = "warning"
    return Finding(found.rule, severity, message, hint + line, _example(case, subject, base, large))


def _words(case: Case) -> dict[str, str | int]:
    reading = case.reading
    return {
        **{part: reading.name(part) for part in "qkvo"},
        "E": reading.embed_dim,
        "H": reading.num_heads,
        "G": reading.num_kv_heads,
        "R": reading.num_heads // reading.num_kv_heads,
        "D": reading.head_dim,
        "Dv": reading.value_dim,
        "W": reading.num_heads * reading.head_dim,
        "T": case.inputs[1].shape[1],
    }


def _example(case: Case, subject: Subject, base: Variant, large: bool = False) -> Example | None:
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
            expected = rebuild(read_off(trial), x, base)
        except RuntimeError:  # a projection too narrow for all heads: there is no right output
            return None
        if expected.shape != actual.shape or error(actual, expected) < shows:
            continue
        source = subject.source(x.shape[1]) + (f"; x = {times:.0f} * x" if large else "")
        if not own:
            source += "  # with random weights: with its own it hardly shows"
        return Example.of(source, expected, actual)
    return None


def _unexplained(case: Case, subject: Subject, base: Variant) -> Finding:
    reasons = list(case.reading.extras)
    if case.subject.module is not None:
        kinds = [type(child).__name__ for child in case.subject.module.modules()]
        names = dict.fromkeys([*names_in(case.subject.module), *kinds])
        reasons += [name for name in names if OTHER_INGREDIENTS.search(name.lower())]
    if reasons:
        return _unread(f"it has more than projections ({', '.join(reasons[:3])})")
    return Finding(
        "definition",
        "error",
        f"The output is not what attention with {case.reading.num_heads} heads gives from its "
        f"weights ({_projections(case.reading)}), and none of the known mistakes explains it.",
        "Compare it line by line with `headwise.systems.split`, on the input below.",
        _example(case, subject, base),
    )

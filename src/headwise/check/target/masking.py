"""Whether a subject is causal, and in which form its call understands a mask."""

from __future__ import annotations

import inspect
import re
from dataclasses import replace

import torch
from torch import Tensor, nn

from .call_adapter import SHAPES, Caller, MaskForm
from .checked_target import Target
from .construct import name_of
from .signatures import signature, source_of

ZERO = 1e-12
"""An influence below this share of the largest is none."""
SMALL = 0.1
"""Size of the inputs here: scores stay small, so that no weight is 0 but by a mask."""
FILL, EVEN = 0.02, 1.5
"""A later token that has less than this share of an earlier one's influence, and no other later
token more than so many times as much, was hidden by one number that is too small."""

NAMED = r"(?<!non)(?<!non_)causal"
"""Names of classes that hide later tokens."""
CAUSAL = re.compile(r"(?<!non-)(?<!non )(?<!non)(?<!not )\b(causal|auto-?regressive)\b")
OPEN = re.compile(
    r"\b(optional(ly)?|if|or|either|whether|both|can be|bidirectional|cross|masks?|supports?)\b"
)
"""What its author writes of a layer that is causal, and of one that may be."""
HIDES = re.compile(r"masked_fill|tri[lu]\(|is_causal|inf\b|finfo|-1e\d|[<>]=? *\w+\[")
"""What code does that hides some tokens."""
MASKS = re.compile(
    r"(causal|subsequent|look_?ahead|future|autoregressive|no_?peek|square).*mask|mask.*(causal|future)"
)
"""Names of functions that make a mask of later tokens."""
CONTEXTS = set(
    "context_length context_len context_size ctx_len ctx_length ctx_size block_size".split()
)
"""Arguments of constructors that speak of text, read from left to right."""


def learn_causality(subject: Target, wanted: bool | None) -> None:
    """Settle `causal`, `causal_from` and the form of a mask that is passed."""
    trial = subject.randomised().double()
    if wanted is False:
        subject.causal_from = "given"
        return
    if _seen_causal(trial):
        subject.causal, subject.causal_from = True, "given" if wanted else "seen"
        return
    subject.mask_form = _causal_form(trial)
    if subject.mask_form is not None:
        subject.causal, subject.causal_from = True, "given" if wanted else "mask"
        subject.notes.append(f"a causal mask is passed as {subject.mask_form}")
    elif wanted or (not subject.caller.named("mask") and _named_causal(subject)) or _said(subject):
        subject.causal, subject.causal_from = True, "given" if wanted else "named"


def _influence(subject: Target, scale: float) -> Tensor | None:
    try:
        found = subject.influence(subject.input(tokens=5, batch=1, scale=scale))
    except Exception:
        return None
    return found.nan_to_num(0.0)


def _leak(subject: Target, scale: float) -> float | None:
    """Influence of later tokens as a share of all influence on other tokens."""
    found = _influence(subject, scale)
    if found is None:
        return None
    later, earlier = found.triu(1).sum(), found.tril(-1).sum()
    return float(later / (later + earlier)) if later + earlier > 0 else 0.0


def _seen_causal(subject: Target) -> bool:
    """Whether the zeros among the influences tell of a causal mask, be it a mistaken one."""
    found = _influence(subject, SMALL)
    if found is None or found.max() == 0 or one_attends(found):
        return False
    none = found <= ZERO * found.max()
    above, below = int(none.triu(1).sum()), int(none.tril(-1).sum())
    pairs = len(found) * (len(found) - 1) // 2
    return above > below or below == pairs > above or _filled(found)


def one_attends(influence: Tensor) -> bool:
    """Whether a single token sees all others, and these only themselves: a token for the class."""
    apart = influence.clone().fill_diagonal_(0.0) > ZERO * influence.max()
    return len(apart) > 2 and int(apart.any(1).sum()) == 1 and int(apart.sum()) == len(apart) - 1


def _filled(influence: Tensor) -> bool:
    """Whether all later tokens count for one tiny share of an earlier one, however far they are.

    Biases of positions give other shares to other distances, and windows end on both sides.
    """
    if len(influence) < 4:
        return False
    inner = influence[1:-1] / influence[1:-1].tril(0).amax(-1, keepdim=True).clamp(min=1e-300)
    every = torch.ones_like(inner, dtype=torch.bool)
    later, earlier = inner[every.triu(2)], inner[every.tril(0)]
    even = later.max() <= EVEN * later.min() and earlier.max() <= EVEN * earlier.min()
    return bool(even and 0 < later.max() <= FILL * earlier.min())


def _causal_form(subject: Target) -> MaskForm | None:
    """The form in which the call understands a causal mask; the nearest where none is exact.

    The nearest is found at the usual size, where scores differ: a fill with 0 hides nothing where
    all scores are small.
    """
    best: tuple[float, MaskForm] | None = None
    open_leak = _leak(subject, 1.0)
    plain = 1.0 if open_leak is None else open_leak  # None: it insists on a mask
    without = _quiet(subject)
    for form in _forms(subject.caller):
        trial = replace(subject, causal=True, mask_form=form)
        out = _quiet(trial)
        if out is None:
            continue
        if without is not None and torch.equal(out, without):
            continue
        hidden, leak = _leak(trial, SMALL), _leak(trial, 1.0)
        if hidden is None or leak is None or not torch.isfinite(out).all():
            continue
        if hidden <= ZERO:
            return form
        nearer = leak < plain and (best is None or leak < best[0])
        if nearer and (without is None or _hides_nothing(subject, form, without)):
            best = leak, form
    return best[1] if best is not None else _said_causal(subject, without)


def _said_causal(subject: Target, without: Tensor | None) -> MaskForm | None:
    """A flag that says causal and changes the output, though later tokens still count, or outputs
    are no numbers with it."""
    for name in subject.caller.named("causal"):
        form = MaskForm(name, "flag")
        out = _quiet(replace(subject, causal=True, mask_form=form))
        if "causal" not in name.lower() or out is None or without is None:
            continue
        if bool(without.isfinite().all()) and not torch.equal(out, without):
            return form
    return None


def _hides_nothing(subject: Target, form: MaskForm, without: Tensor) -> bool:
    """Whether a mask in this form that hides nothing changes nothing; else the form is another
    one, whose axes are broadcast to something else."""
    if form.kind in ("flag", "headwise"):
        return True
    out = _quiet(replace(subject, causal=False, open_form=form))
    return out is not None and torch.allclose(out, without, atol=1e-6, rtol=1e-4)


def _quiet(subject: Target) -> Tensor | None:
    try:
        return subject(subject.input(tokens=5)).detach()
    except Exception:
        return None


def _forms(caller: Caller) -> list[MaskForm]:
    names = caller.named("mask")
    forms = [MaskForm(name, "headwise") for name in names if caller.takes_values(name)]
    forms += [MaskForm(name, "flag") for name in caller.named("causal")]
    kinds = ("may", "hidden", "added", "ones", "later")
    forms += [MaskForm(name, kind, shape) for name in names for kind in kinds for shape in SHAPES]
    return forms


def _named_causal(subject: Target) -> bool:
    """Whether its name, its arguments or a triangular buffer say that it should be causal."""
    target = subject.caller.target
    name = name_of(target).lower()
    if subject.caller.streams:  # the name may speak of the layer's place in a model
        return False
    named = subject.caller.named
    fills = named("lengths") or named("padding")  # which "masked" speaks of
    if re.search(NAMED + r"|decoder" + r"|(?<!un)masked" * (not fills), name):
        return True
    if subject.roles.get("causal") is not None:
        return bool(subject.roles["causal"])
    made = {parameter.name.lower() for parameter in signature(type(target))}
    if made & CONTEXTS and "context" in subject.roles:
        return True
    if not isinstance(target, nn.Module):
        return False
    tables = list(target.buffers())
    for child in target.modules():
        tables += [value for value in vars(child).values() if isinstance(value, Tensor)]
    return any(_triangular(table) for table in tables)


def _said(subject: Target) -> bool:
    """Whether its class's own words say that it is causal, and nothing lets somebody choose."""
    caller = subject.caller
    own = caller.target if inspect.isfunction(caller.target) else type(caller.target)
    doc = vars(own).get("__doc__") if isinstance(own, type) else own.__doc__  # no base class's
    words = inspect.cleandoc(doc if isinstance(doc, str) else "").split("\n\n")[0]
    if caller.streams or caller.named("causal") or subject.roles.get("causal") is not None:
        return False
    hides = HIDES.search(source_of(own)) is not None  # else the words may be another's
    return hides and CAUSAL.search(words.lower()) is not None and not OPEN.search(words.lower())


def shows_next(table: Tensor) -> bool:
    """Whether a square table holds one number for each token, those before it and the one right
    after it, and another for all that come later.

    >>> shows_next(torch.ones(4, 4).tril(1)), shows_next(torch.ones(4, 4).tril())
    (True, False)
    """
    if table.ndim < 2 or table.shape[-1] != table.shape[-2] or table.shape[-1] < 4:
        return False
    square = table.detach().reshape(-1, *table.shape[-2:])[0]
    ones = torch.ones(square.shape, dtype=torch.bool)
    early, late = square[ones.tril(1)], square[ones.triu(2)]
    return bool((early == early[0]).all() and (late == late[0]).all() and early[0] != late[0])


def _triangular(table: Tensor) -> bool:
    """Whether a square table holds one number above its diagonal and another below."""
    if table.ndim < 2 or table.shape[-1] != table.shape[-2] or table.shape[-1] < 2:
        return False
    square = table.detach().reshape(-1, *table.shape[-2:])[0]
    ones = torch.ones(square.shape, dtype=torch.bool)
    above, below = square[ones.triu(1)], square[ones.tril(-1)]
    return bool((above == above[0]).all() and (below == below[0]).all() and above[0] != below[0])

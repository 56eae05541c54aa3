"""Probes of what is computed: they need no weights, only inputs that are changed in one way."""

from __future__ import annotations

import re

import torch
from torch import Tensor, nn

from ..findings.verdict import Example, Finding
from ..target.introspect import SPEAKS_OF_ROPE, names_in
from ..target.subject import Subject
from .probe_context import Failed, Lab, failed, passed, skipped

NOTHING = 1e-30
"""An influence below this share of the largest is none; masks and softmax leave exact zeros."""

UNCHANGED = 1e-6
"""Share by which an output may move that nothing changed: sums may run in another order."""

POSITIONS = re.compile(
    r"rope|rotary|rot_?emb|inv_freq|freqs|alibi|slope|relative|rel_|pos_|position|window|conv"
)
"""Names of what makes the order of tokens count."""

BENT = re.compile("norm|gelu|relu|silu|gate|act", re.IGNORECASE)
"""Classes of children that are not linear."""

QK_NORM = re.compile(r"(?<![a-z])(q|k|qk|query|key)_?(layer)?_?norm|norm_?(q|k|qk)(?![a-z])")
"""Names of norms of queries and keys."""

SINKS = re.compile(r"sink|null_k|mem_k|bias_k|add_zero|zero_attn|memory_k|registers")
"""Names of keys that belong to no token."""


def shape(lab: Lab) -> Finding | None:
    """Other batches, one token, odd lengths; and the dtype."""
    for batch, tokens in ((1, lab.tokens), (2, 1), (1, 1), (3, 5)):
        x = lab.exact.input(tokens, batch)
        out = lab.call(x)
        wanted = [*x.shape[:2], lab.subject.out_dim]
        if list(out.shape) != wanted:
            return failed(
                "shape",
                f"For x {list(x.shape)} the output is {list(out.shape)} and must be {wanted}.",
                "Look for squeeze() without an axis, and for sizes that are written as numbers: "
                "take B and T from x.shape.",
            )
    x = lab.subject.input()
    out = lab.call(x, lab.subject)
    if out.dtype != x.dtype:
        return failed(
            "shape",
            f"For x in {_dtype(x)} the output is in {_dtype(out)}.",
            "Something of another dtype is mixed in; make masks and scales with dtype=x.dtype.",
        )
    return passed("shape")


def finite(lab: Lab) -> Finding | None:
    """No NaN and no infinity for ordinary inputs."""
    if bool(lab.out.isfinite().all()):
        return passed("finite")
    rows = (~lab.out.isfinite()).any(-1).any(0).nonzero().flatten().tolist()
    which = "every token" if len(rows) == lab.tokens else f"token {', '.join(map(str, rows))}"
    hint = "Look for a softmax over scores that are all −inf, a log of 0 or a division by 0."
    if rows == [0] and lab.subject.causal:
        hint = (
            "Token 0 may see nothing, so its softmax is 0/0: the mask hides the diagonal too. "
            "Hide what lies above it, torch.triu(ones, diagonal=1)."
        )
    elif rows == [lab.tokens - 1] and lab.subject.causal:
        hint = (
            "The last token may see nothing: the mask is upside down. Hide the keys that come "
            "later, torch.triu(ones, diagonal=1), not those that come before."
        )
    return failed("finite", f"The output of {which} is NaN or infinite.", hint)


def causality(lab: Lab) -> Finding | None:
    """Zeros of the Jacobian, and changed futures at ordinary and at a thousandfold scale."""
    if not lab.subject.causal:
        return skipped("causality", _not_causal(lab))
    found = lab.influence.nan_to_num(0.0)
    seen = (found.triu(1) > NOTHING * found.max()).nonzero().tolist()
    if seen:
        return _leaks(lab, 1.0, (seen[0][0], seen[0][1]), seen)
    for scale in (1.0, 1000.0):
        late = _sees_future(lab, scale)
        if late is not None:
            return _leaks(lab, scale, late, [])
    return passed("causality")


def _not_causal(lab: Lab) -> str:
    if lab.subject.causal_from == "given":
        return "Not asked for: causal=False."
    return "Every token sees all others. If it is to be causal, say so: causal=True."


def _sees_future(lab: Lab, scale: float) -> tuple[int, int] | None:
    """The first output that a changed future changes, and the first token that was changed."""
    base_x = lab.x * scale
    base = lab.call(base_x)
    for first in range(1, lab.tokens):
        for x, plain in ((base_x, base), (lab.x, lab.out)):
            changed = x.clone()
            noise = lab.exact.input(lab.tokens, len(x), seed=5)[:, first:]
            changed[:, first:] = scale * noise
            out = lab.call(changed)
            size = plain[:, :first].abs().max().clamp(min=1e-30)
            parts = (out[:, :first] - plain[:, :first]).abs().amax((0, 2)) > UNCHANGED * size
            if bool(parts.any()):
                return int(parts.nonzero()[0]), first
    return None


def _leaks(lab: Lab, scale: float, where: tuple[int, int], seen: list[list[int]]) -> Finding:
    i, j = where
    message = f"Output {i} changes when token {j}, which comes later, is changed."
    hint = "Set the scores of later keys to −inf before the softmax."
    pairs = {(a, b) for a, b in seen}
    if scale > 1:
        message = (
            f"With inputs {scale:.0f} times as large, output {i} changes when later tokens "
            f"(from {j}) are changed: the mask hides them only while scores are small."
        )
        hint = (
            "Hide with −inf, or torch.finfo(scores.dtype).min; a number such as −1e4 is too small."
        )
    elif pairs and all(b == a + 1 for a, b in pairs) and len(pairs) == lab.tokens - 1:
        message = "Each token sees the one that comes right after it: the mask is off by one."
        hint = (
            "torch.triu(ones, diagonal=1) hides what comes later; diagonal=2 starts one too late."
        )
    elif pairs and bool((lab.influence.tril(-1) <= NOTHING * lab.influence.max()).all()):
        message = (
            "Tokens see what comes after them, and not what came before: the mask is inverted."
        )
        hint = "Hide where the key is later, torch.triu(ones, diagonal=1); with tril, negate it."
    return failed("causality", message, hint, _leak_example(lab, scale))


def _leak_example(lab: Lab, scale: float) -> Example | None:
    last = min(3, lab.tokens) - 1

    def two(subject: Subject, x: Tensor) -> tuple[Tensor, Tensor]:
        changed = scale * x
        changed[:, -1] *= -1
        return subject(scale * x)[:, :-1], subject(changed)[:, :-1]

    times = f"x = {scale:.0f} * x; " if scale > 1 else ""
    said = f"{times}y = x.clone(); y[:, {last}] *= -1; the outputs before token {last} are compared"
    return lab.example(said, two) if last else None


def past_used(lab: Lab) -> Finding | None:
    """Non-zeros of the Jacobian."""
    if named(lab, re.compile("window")):
        return skipped("past-used", "A window hides tokens that are far away.")
    found = lab.influence.nan_to_num(1.0)
    unseen = found <= NOTHING * found.max()
    unseen = unseen.tril() if lab.subject.causal else unseen
    pairs = unseen.nonzero().tolist()
    if not pairs:
        return passed("past-used")
    total = lab.tokens * (lab.tokens + 1) // 2 if lab.subject.causal else unseen.numel()
    i, j = pairs[0]
    if all(a == b for a, b in pairs):
        which = "its own token"
    elif len(pairs) >= total - lab.tokens:
        which = "any other token"
    else:
        which = f"token {j} ({len(pairs)} such pairs of {total})"
    return failed(
        "past-used",
        f"Output {i} does not depend on {which}.",
        "See that the mask hides later keys only, and that scores are taken between tokens: "
        "q and k must be [B, H, T, D] before q @ k.transpose(-2, -1).",
    )


def prefix(lab: Lab) -> Finding | None:
    """`f(x)[:, :t]` is `f(x[:, :t])`."""
    if not lab.subject.causal:
        return None
    for tokens in range(1, lab.tokens):
        short = lab.call(lab.x[:, :tokens])
        if not lab.near(short, lab.out[:, :tokens]):
            break
    else:
        return passed("prefix")
    last = min(3, lab.tokens) - 1
    which = f"The first {tokens} tokens alone give" if tokens > 1 else "The first token alone gives"
    said = f"f(x[:, :{last}]) and f(x)[:, :{last}] are compared"
    return failed(
        "prefix",
        f"{which} another output than in a sequence of {lab.tokens}.",
        "Something depends on how many tokens there are: scores are divided by the root of the "
        "head's dimension, not of T; and the softmax runs over keys, the last axis.",
        lab.example(said, lambda f, x: (f(x[:, :last]), f(x)[:, :last])),
    )


def batch(lab: Lab) -> Finding | None:
    """Each sequence alone, and the batch in another order."""
    alone = torch.cat([lab.call(row[None]) for row in lab.x])
    if lab.near(alone, lab.out) and lab.near(lab.call(lab.x.flip(0)).flip(0), lab.out):
        return passed("batch")
    said = "f(x[:1]) and f(x)[:1] are compared"
    return failed(
        "batch",
        "A sequence gives another output alone than in a batch.",
        "Batch and tokens were mixed: split heads with view(B, T, H, D).transpose(1, 2), merge "
        "them with transpose(1, 2).reshape(B, T, E), and let the softmax run over the last axis.",
        lab.example(said, lambda f, x: (f(x[:1]), f(x)[:1]), batch=2),
    )


def equal_tokens(lab: Lab) -> Finding | None:
    """Rows of weights sum to 1, so equal values are their own mean."""
    if named(lab, SINKS):
        return skipped("equal-tokens", "It has keys that belong to no token.")
    same = lab.x[:, :1].expand(-1, lab.tokens, -1)
    out, one = lab.call(same), lab.call(lab.x[:, :1])
    if lab.near(out, one.expand_as(out)):
        return _equal_values(lab, same, out) or passed("equal-tokens")

    def two(subject: Subject, x: Tensor) -> tuple[Tensor, Tensor]:
        out = subject(x[:, :1].expand_as(x))
        return subject(x[:, :1]).expand_as(out), out

    return failed(
        "equal-tokens",
        "Where all tokens are equal, outputs differ from that of one such token alone.",
        "The weights of a row must sum to 1 over the keys: softmax over the last axis, the mask "
        "before it, nothing that rescales after it.",
        lab.example("x = x[:, :1].expand(-1, 3, -1)", two),
    )


def _equal_values(lab: Lab, same: Tensor, expected: Tensor) -> Finding | None:
    """The same with different queries and keys, where values are given apart."""
    subject = lab.exact
    if subject.projections is None and not (subject.caller.separate and subject.bare):
        return None
    try:
        with torch.no_grad():
            out = subject.of_values(lab.x, same)
    except Exception as error:
        raise Failed(f"queries and keys {list(lab.x.shape)} and equal values", error) from error
    if lab.near(out, expected):
        return None
    return failed(
        "equal-tokens",
        "Where all values are equal, the output is another value: rows of weights do not sum to 1.",
        "torch.softmax(scores, dim=-1) runs over keys, the last axis; the mask comes before it.",
    )


def one_token(lab: Lab) -> Finding | None:
    """`f(a + b) + f(0)` is `f(a) + f(b)` for sequences of one token."""
    if named(lab, SINKS):
        return skipped("one-token", "It has keys that belong to no token.")
    a, b = (lab.exact.input(1, 2, seed=seed) for seed in (3, 4))
    together = lab.call(a + b) + lab.call(torch.zeros_like(a))
    apart = lab.call(a) + lab.call(b)
    if lab.near(together, apart):
        return passed("one-token")
    other = bent(lab)
    if other:
        return skipped("one-token", f"It holds more than attention: {other}.")
    return failed(
        "one-token",
        "For one token the output is not affine in the input, though its only weight is 1.",
        "Nothing but the softmax may bend: look for an activation, a second softmax, or a softmax "
        "over features.",
    )


def bent(lab: Lab) -> str:
    """The first child that is not linear; norms of queries and keys stand before the softmax."""
    module = lab.subject.module
    for path, child in module.named_modules() if module is not None else ():
        last = path.split(".")[-1]
        kind = type(child).__name__
        leaf = child is not module and not any(True for _ in child.children())
        bends = "gate" in last or (BENT.search(kind) and not isinstance(child, nn.Linear))
        if leaf and bends and not QK_NORM.search(path):
            return kind if BENT.search(kind) else last
    return ""


def order(lab: Lab) -> Finding | None:
    """The last token does not notice in which order the others stand."""
    if lab.tokens < 3:
        return None
    swapped = lab.x[:, [*range(lab.tokens - 2, -1, -1), lab.tokens - 1]]
    if lab.near(lab.call(swapped)[:, -1], lab.out[:, -1]):
        return passed("order")
    module = lab.subject.module
    names = names_in(module) if module is not None else ()
    if named(lab, POSITIONS) or any(SPEAKS_OF_ROPE.search(name.lower()) for name in names):
        return skipped("order", "It knows positions, so the order of tokens counts.")
    return failed(
        "order",
        "The last output changes when the tokens before it stand in another order.",
        "This is right if positions are put in here (RoPE, ALiBi, a window). Otherwise tokens are "
        "mixed with heads or features: split with view(B, T, H, D).transpose(1, 2).",
        severity="warning",
    )


def gradients(lab: Lab) -> Finding | None:
    """Every parameter, and every head's part of it."""
    module = lab.exact.module
    if module is None:
        return None
    own = lab.exact.fresh()
    assert own.module is not None
    named = [(n, p) for n, p in own.module.named_parameters() if p.requires_grad]
    if not named:
        return skipped("gradients", "It has no parameters that are trained.")
    try:
        out = own(lab.x)
        draw = torch.Generator().manual_seed(9)
        along = torch.randn(out.shape, generator=draw, dtype=torch.float64).to(out)
        slopes = torch.autograd.grad((out * along).sum(), [p for _, p in named], allow_unused=True)
    except RuntimeError as error:
        raise Failed(f"x {list(lab.x.shape)} with gradients", error) from error
    missing = [
        fault
        for (name, parameter), slope in zip(named, slopes, strict=True)
        if (fault := _dead(lab, name, parameter, slope))
    ]
    if not missing:
        return passed("gradients")
    return failed(
        "gradients",
        f"No gradient reaches {' and '.join(missing[:3])}{' and more' * (len(missing) > 3)}.",
        "What is not used in forward never learns: is that projection called, and its result "
        "used? detach(), .data, torch.no_grad() and item() cut the gradient too.",
    )


def _dead(lab: Lab, name: str, parameter: Tensor, slope: Tensor | None) -> str:
    """Which part of a parameter has no gradient; empty where all of it has."""
    if slope is None:
        return name
    if parameter.ndim < 2 or POSITIONS.search(name.lower()):
        return ""
    if bool((slope == 0).all()):
        return name
    if bent(lab):  # a ReLU may be closed for all tokens
        return ""
    for axis in range(parameter.ndim):
        others = [n for n in range(parameter.ndim) if n != axis]
        dead = slope.abs().amax(dim=others) == 0
        if bool(dead.any()):
            rows = dead.nonzero().flatten().tolist()
            which = f"{rows[0]} to {rows[-1]}" if len(rows) > 1 else f"{rows[0]}"
            return f"{'rows' if axis == 0 else 'columns'} {which} of {name}{_head(lab, rows)}"
    return ""


def _head(lab: Lab, rows: list[int]) -> str:
    dim = lab.subject.head_dim or 1
    heads = sorted({row // dim % lab.subject.num_heads for row in rows})
    whole = len(rows) % dim == 0 and dim > 1
    return f" (head {', '.join(map(str, heads))})" if whole else ""


def large_inputs(lab: Lab) -> Finding | None:
    """A thousand times the usual size, in the subject's own dtype; outputs and gradients."""
    half = lab.random.dtype.itemsize < 4  # which overflows by itself
    subject = lab.random.to(torch.float32) if half else lab.random
    x = (subject.input() * 1000).requires_grad_(True)
    try:
        out = subject(x)
    except Exception as error:
        raise Failed(f"x {list(x.shape)} * 1000", error) from error
    fine = bool(out.isfinite().all())
    if fine and out.requires_grad:
        try:
            slope = torch.autograd.grad(out.sum(), x, allow_unused=True)[0]
        except RuntimeError as error:
            raise Failed(f"x {list(x.shape)} with gradients", error) from error
        fine = slope is None or bool(slope.isfinite().all())
    if fine:
        return passed("large-inputs")
    return failed(
        "large-inputs",
        "For inputs 1000 times as large the output or its gradient is NaN or infinite.",
        "exp of a large score overflows: use torch.softmax, or subtract the row's maximum first.",
    )


def weights(lab: Lab) -> Finding | None:
    """What comes back as weights: rows over keys, sums of 1, zeros where hidden."""
    found = lab.result(lab.x).weights
    if found is None:
        return None
    rows, columns = found.sum(-1), found.sum(-2)
    one = torch.ones_like(rows)
    if lab.near(rows, one) and bool((found >= 0).all()):
        if lab.subject.causal and bool((found.triu(1).abs() > 1e-6).any()):
            return failed(
                "weights",
                "The weights that come back are not 0 for later tokens.",
                "Return the weights after the mask and the softmax.",
            )
        return passed("weights")
    if lab.near(columns, torch.ones_like(columns)):
        return failed(
            "weights",
            "The columns of the weights sum to 1, not their rows: the softmax runs over queries.",
            "torch.softmax(scores, dim=-1) runs over keys, the last axis.",
        )
    if bool((found >= 0).all()) and bool((found <= 1).all()):
        return failed(
            "weights",
            f"Rows of the weights sum to {rows.min():.3g} and up to {rows.max():.3g}, not to 1.",
            "softmax over the last axis, the mask before it, and nothing after it.",
        )
    return skipped("weights", "The second result is no weights (scores, perhaps).")


def named(lab: Lab, pattern: re.Pattern[str]) -> bool:
    """Whether a parameter, buffer, module or set attribute has such a name."""
    module = lab.subject.module
    if module is None:
        return False
    for child in module.modules():
        if pattern.search(type(child).__name__.lower()):
            return True
        for name, value in vars(child).items():
            off = value is None or (isinstance(value, (bool, int, float)) and not value)
            if not name.startswith("_") and not off and pattern.search(name.lower()):
                return True
        inside = [*child._parameters.items(), *child._buffers.items(), *child._modules.items()]
        if any(value is not None and pattern.search(name.lower()) for name, value in inside):
            return True
    return False


def _dtype(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")

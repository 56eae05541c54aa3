"""Probe the function that a layer computes by changing its inputs; no weights are read."""

from __future__ import annotations

import re
import sys
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from .call import PlainCall
from .code import class_sources, is_users, lines_in, names_in
from .probing import NOTHING, Failed, Probing
from .rules import passed, skipped, violation
from .target import Target
from .verdict import Finding

LARGE = 20.0
"""The factor on inputs that gives scores of several hundred, as in trained models."""
POSITIONS = re.compile(
    r"rope|rotary|rot_?emb|inv_freq|freqs|alibi|slope|relative|rel_|pos_|position|window|conv|"
    r"arange|cumsum|shift|roll|decay|time"
)
"""Names of components that make the order of tokens matter."""
BENT = re.compile("norm|gelu|relu|silu|gate|act|tanh|sigmoid", re.IGNORECASE)
"""Names of classes and child modules that are not linear."""
QK_NORM = re.compile(r"(?<![a-z])(q|k|qk|query|key)_?(layer)?_?norm|norm_?(q|k|qk)(?![a-z])")


def shape(ctx: Probing) -> Finding | None:
    """Try other batch sizes and lengths, and compare the dtypes of input and output."""
    for batch, tokens in ((1, ctx.tokens), (2, 1), (1, 1), (3, 5)):
        x = ctx.exact.input(tokens, batch)
        try:
            out, wanted = ctx.call(x), [*x.shape[:2], ctx.target.out_dim]
        except Failed as failure:
            return violation(
                "shape", "fails", x=list(x.shape), error=str(failure).partition("fails: ")[2]
            )
        if list(out.shape) != wanted:
            return violation("shape", "sizes", x=list(x.shape), out=list(out.shape), wanted=wanted)
    x = ctx.target.input()
    with torch.no_grad():
        out = ctx.target(x)
    if out.dtype != x.dtype:
        names = [str(t.dtype).removeprefix("torch.") for t in (x, out)]
        return violation("shape", "dtype", dtype=names[0], out=names[1])
    return passed("shape")


def finite(ctx: Probing) -> Finding | None:
    """Look for NaN and infinities in ordinary outputs."""
    if bool(ctx.out.isfinite().all()):
        return passed("finite")
    for rule, name in (("padding", "keep"), ("mask", "allow")):
        if name in ctx.target.takes and _finite_if_hidden(ctx, name):
            return violation(rule, "inverted", name=name)
    rows = (~ctx.out.isfinite()).any(-1).any(0).nonzero().flatten().tolist()
    which = "every token" if len(rows) == ctx.tokens else f"token {', '.join(map(str, rows))}"
    ends = {0: "first", ctx.tokens - 1: "last"} if ctx.target.causal and len(rows) == 1 else {}
    way = ends.get(rows[0], "any")
    product = r"\*\s*(float\(\s*[\"']-?inf|-?\s*(torch|math|np|numpy)\.inf)|inf[\"']?\)?\s*\*"
    if way == "any" and lines_in(ctx.exact.layer, product):
        way = "product"
    return violation("finite", way, which=which)


def _finite_if_hidden(ctx: Probing, name: str) -> bool:
    """Return True if outputs are finite when the mask hides all keys: the layer inverts it."""
    keys = ctx.x.shape[:2] if name == "keep" else (ctx.tokens, ctx.tokens)
    try:
        return bool(ctx.call(ctx.x, **{name: torch.zeros(keys, dtype=torch.bool)}).isfinite().all())
    except Failed:
        return False


def causality(ctx: Probing) -> Finding | None:
    """Change later tokens and compare earlier outputs, at ordinary and at larger scales."""
    if not ctx.target.causal:
        return _window(ctx)
    influence = ctx.influence.nan_to_num(0.0)
    seen = (influence.triu(1) > NOTHING * influence.max()).nonzero().tolist()
    if seen:
        return _leak(ctx, 1.0, (seen[0][0], seen[0][1]), seen)
    for scale in (LARGE, 1000.0):
        if (late := _sees_future(ctx, scale)) is not None:
            return _leak(ctx, scale, late, [])
    return passed("causality")


def _window(ctx: Probing) -> Finding | None:
    """Find a window that is open on both sides, in a layer whose docstring indicates causality."""
    influence = ctx.influence.nan_to_num(0.0)
    reach = _band(influence <= NOTHING * influence.max())
    doc = str(type(ctx.exact.layer).__doc__ or "").lower()
    if reach is None or reach[1] == 0 or not re.search(r"before|previous|past|causal|preced", doc):
        return None
    return violation("causality", "window", n=reach[1])


def _band(unseen: Tensor) -> tuple[int, int] | None:
    """Return how many tokens before and after each token are visible, if equal for all tokens."""
    tokens = len(unseen)
    i, j = torch.arange(tokens)[:, None], torch.arange(tokens)[None]
    for before in range(tokens):
        for after in range(tokens):
            if before == after == tokens - 1:
                continue
            if torch.equal(unseen, ~((i - j <= before) & (j - i <= after))):
                return before, after
    return None


def _sees_future(ctx: Probing, scale: float) -> tuple[int, int] | None:
    """Return the first output that later tokens change, and the first token that was changed."""
    large = ctx.x * scale
    for x, plain in ((large, ctx.call(large)), (ctx.x, ctx.out)):
        for first in range(1, ctx.tokens):
            changed = x.clone()
            changed[:, first:] = scale * ctx.exact.input(ctx.tokens, len(x), seed=5)[:, first:]
            out = ctx.call(changed)
            size = plain[:, :first].abs().max().clamp(min=1e-30)
            parts = (out[:, :first] - plain[:, :first]).abs().amax((0, 2)) > 1e-6 * size
            if bool(parts.any()):
                return int(parts.nonzero()[0]), first
    return None


def _leak(ctx: Probing, scale: float, where: tuple[int, int], seen: list[list[int]]) -> Finding:
    (i, j), way = where, "leaks"
    if scale > 1:
        way = "large" if scale == LARGE else "far"
    elif all(b == a + 1 for a, b in seen) and len(seen) == ctx.tokens - 1:
        way = "next"
    elif bool((ctx.influence.tril(-1) <= NOTHING * ctx.influence.max()).all()):
        way = "inverted"
    last = min(3, ctx.tokens) - 1

    def two(target: Target, x: Tensor) -> tuple[Tensor, Tensor]:
        changed = scale * x
        changed[:, -1] *= -1
        return target(scale * x)[:, :-1], target(changed)[:, :-1]

    times = f"x = {scale:.0f} * x; " if scale > 1 else ""
    message = f"{times}y = x.clone(); y[:, {last}] *= -1; compare the outputs before token {last}"
    return violation("causality", way, ctx.example(message, two), i=i, j=j, scale=scale)


def past_used(ctx: Probing) -> Finding | None:
    """Look for tokens that should be visible but have no influence."""
    influence = ctx.influence.nan_to_num(1.0)
    unseen = influence <= NOTHING * influence.max()
    pairs = (unseen.tril() if ctx.target.causal else unseen).nonzero().tolist()
    if not pairs:
        return passed("past-used")
    if (reach := _band(unseen)) is not None and reach[0] > 0:
        message = f"{reach[0]} tokens before" + (f" and {reach[1]} after" if reach[1] else "")
        ctx.target.observed.append(f"a window: each token sees {message}")
        return None
    if not ctx.target.causal and int((~unseen).any(0).sum()) == 1:
        return skipped("past-used", "Each token attends to only one token.")
    i, j = pairs[0]
    total = ctx.tokens * (ctx.tokens + 1) // 2 if ctx.target.causal else unseen.numel()
    which = f"token {j} ({len(pairs)} such pairs of {total})"
    if all(a == b for a, b in pairs):
        which = "its own token"
    elif len(pairs) >= total - ctx.tokens:
        which = "any other token"
    return violation("past-used", "unseen", i=i, which=which)


def prefix(ctx: Probing) -> Finding | None:
    """Compare `f(x)[:, :t]` with `f(x[:, :t])`."""
    if not ctx.target.causal:
        return None
    for tokens in range(1, ctx.tokens):
        if not ctx.near(ctx.call(ctx.x[:, :tokens]), ctx.out[:, :tokens]):
            break
    else:
        return passed("prefix")
    last = min(3, ctx.tokens) - 1
    message = f"compare f(x[:, :{last}]) with f(x)[:, :{last}]"
    example = ctx.example(message, lambda f, x: (f(x[:, :last]), f(x)[:, :last]))
    return violation("prefix", "differs", example, tokens=tokens, all=ctx.tokens)


def batch(ctx: Probing) -> Finding | None:
    """Call the layer on each sequence alone, and on the batch in reverse order."""
    alone = torch.cat([ctx.call(row[None]) for row in ctx.x])
    if ctx.near(alone, ctx.out) and ctx.near(ctx.call(ctx.x.flip(0)).flip(0), ctx.out):
        return passed("batch")
    message = "compare f(x[:1]) with f(x)[:1]"
    return violation(
        "batch", "mixed", ctx.example(message, lambda f, x: (f(x[:1]), f(x)[:1]), batch=2)
    )


def equal_tokens(ctx: Probing) -> Finding | None:
    """Test equal tokens: if rows of weights sum to 1, the mean of equal values is that value."""
    same = ctx.x[:, :1].expand(-1, ctx.tokens, -1)
    out, one = ctx.call(same), ctx.call(ctx.x[:, :1])
    if ctx.near(out, one.expand_as(out)):
        return passed("equal-tokens")

    def two(target: Target, x: Tensor) -> tuple[Tensor, Tensor]:
        out = target(x[:, :1].expand_as(x))
        return target(x[:, :1]).expand_as(out), out

    return violation("equal-tokens", "differs", ctx.example("x = x[:, :1].expand(-1, 3, -1)", two))


def one_token(ctx: Probing) -> Finding | None:
    """Compare `f(a + b) + f(0)` with `f(a) + f(b)` for sequences of one token."""
    a, b = (ctx.exact.input(1, 2, seed=seed) for seed in (3, 4))
    together = ctx.call(a + b) + ctx.call(torch.zeros_like(a))
    if ctx.near(together, ctx.call(a) + ctx.call(b)):
        return passed("one-token")
    gate = re.search(r"sigmoid|tanh|relu|gelu|silu", class_sources(ctx.exact.layer))
    if other := bent(ctx.exact.layer) or (gate and gate[0]):
        return skipped("one-token", f"It contains more than attention: {other}.")
    return violation("one-token", "bends")


def bent(layer: nn.Module) -> str:
    """Return the name of the first nonlinear part, other than norms of queries and keys."""
    for path, child in layer.named_modules():
        last, kind = path.split(".")[-1], type(child).__name__
        leaf = child is not layer and not any(True for _ in child.children())
        bends = "gate" in last or (BENT.search(kind) and not isinstance(child, nn.Linear))
        if leaf and bends and not QK_NORM.search(path):
            return kind if BENT.search(kind) else last
    return ""


def order(ctx: Probing) -> Finding | None:
    """Reverse the order of the tokens before the last one."""
    if ctx.tokens < 3:
        return None
    swapped = ctx.x[:, [*range(ctx.tokens - 2, -1, -1), ctx.tokens - 1]]
    if ctx.near(ctx.call(swapped)[:, -1], ctx.out[:, -1]):
        return _idle(ctx) or passed("order")
    if knows_positions(ctx.exact.layer) or ctx.target.shown:
        return None
    return violation("order", "mixed")


def _idle(ctx: Probing) -> Finding | None:
    """Find rotations that rotate all tokens of a head by the same angle."""
    called = set[str]()

    def note(frame: FrameType, event: str, gave: Any) -> None:
        if event == "call" and is_users(frame.f_code.co_filename):
            this = frame.f_locals.get("self")
            name = frame.f_code.co_name
            called.add(type(this).__name__ if name in ("forward", "__call__") else name)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        ctx.call(ctx.x)
    finally:
        sys.setprofile(before)
    own = {type(ctx.exact.layer).__name__}
    turns = [
        n for n in called - own if re.search(r"rot|rope", n.lower()) and "att" not in n.lower()
    ]
    return violation("rotary", "idle") if turns else None


def knows_positions(layer: nn.Module) -> bool:
    """Return True if any name in a layer or any line of its code mentions positions."""
    code = r"arange|cumsum|linspace|roll\(|flip\(|cos\(|conv"
    named = any(POSITIONS.search(name.lower()) for name in names_in(layer))
    return named or re.search(code, class_sources(layer)) is not None


def weights(ctx: Probing) -> Finding | None:
    """Test the returned weights: rows over keys, sums of 1, zeros at hidden keys."""
    option = _weights_option(ctx.target)
    try:
        result = ctx.result(ctx.x, **option)
    except Failed:  # returning weights may require more arguments
        return None
    given = result.weights
    if given is None:
        return None
    if option and not ctx.near(result.out, ctx.out):
        return violation("weights", "changes", name=next(iter(option["extra"])))
    rows, columns = given.sum(-1), given.sum(-2)
    ones = torch.ones_like(rows)
    if ctx.near(rows, ones) and bool((given >= 0).all()):
        if ctx.target.causal and bool((given.triu(1).abs() > 1e-6).any()):
            return violation("weights", "hidden")
        return passed("weights")
    if ctx.near(columns, ones):
        return violation("weights", "columns")
    if bool((given >= 0).all()) and bool((given <= 1).all()) and bool(rows.any()):
        return violation("weights", "rows", low=float(rows.min()), high=float(rows.max()))
    return None


def _weights_option(target: Target) -> dict[str, Any]:
    """Return the arguments that make a plain call return its weights."""
    names = target.call.named("weights") if isinstance(target.call, PlainCall) else []
    return {"extra": dict.fromkeys(names, True)} if names else {}


def large_inputs(ctx: Probing) -> Finding | None:
    """Test outputs and gradients in float32 for inputs a thousand times the usual size."""
    target = ctx.random
    if target.dtype.itemsize < 4:  # half precision overflows in any case
        return None
    x = (target.input() * 1000).requires_grad_(True)
    try:
        out = target(x)
        fine = bool(out.isfinite().all())
        if fine and out.requires_grad:
            slope = torch.autograd.grad(out.sum(), x, allow_unused=True)[0]
            fine = slope is None or bool(slope.isfinite().all())
    except Exception:  # reported by other probes
        return None
    return passed("large-inputs") if fine else violation("large-inputs", "overflow")

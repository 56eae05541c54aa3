"""Probe what is computed: no weights are needed, only inputs that are changed in one way."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..findings.rules import found, passed, skipped
from ..findings.verdict import Finding
from ..target.call_adapter import Result, tensors_in, tensors_of
from ..target.checked_target import TOKENS, Target
from ..target.construct import source_of
from ..target.errors import told
from ..target.introspect import (
    SPEAKS_OF_ROPE,
    is_called,
    is_pointwise,
    layer_of,
    names_called,
    names_in,
    written_code,
)
from ..target.masking import one_attends
from ..target.shown_call import is_plain, wants_ids
from .backward import wrong_backward
from .probe_context import NOTHING, Failed, ProbeContext, failing, noting

POSITIONS = re.compile(
    r"rope|rotary|rot_?emb|inv_freq|freqs|alibi|(?<!negative_)slope|relative|rel_|pos_|position|"
    r"window|conv"
)
"""Names of what makes the order of tokens count."""
IN_ORDER = re.compile(
    r"arange|linspace|cum(sum|prod)|(?<!trans)(?<!com)pos|rot|rope|rel(?!u)|freq|sin\(|cos\(|conv|"
    r"unfold|pool|interpol|window|local|shift|roll\(|flip|rnn|lstm|gru|dist|decay|alibi|table|"
    r"(?<!negative_)slope|time|delta|stride|index|scan|sort|topk|:-\d|-\d:|\[:, *-?\d",
    re.IGNORECASE,
)
"""What code speaks of that reads the order of tokens, or may."""

REACHES = re.compile(
    r"local|band|neighbo|left|right|radius|span|dilat|attn_len|look_?(back|ahead)|reach"
)
"""Names of how far tokens see, or of attention in which they see so far."""
STOPPED = re.compile("detach|no_grad|stop_grad|inference_mode|requires_grad")
"""Code that stops gradients on purpose."""
BENT = re.compile("norm|gelu|relu|silu|gate|act", re.IGNORECASE)
"""Classes of children that are not linear."""

QK_NORM = re.compile(r"(?<![a-z])(q|k|qk|query|key)_?(layer)?_?norm|norm_?(q|k|qk)(?![a-z])")
"""Names of norms of queries and keys."""

SINKS = re.compile(r"sink|null_k|mem_k|bias_k|add_zero|zero_attn|memory_k|registers")
"""Names of keys that belong to no token."""


def shape(ctx: ProbeContext) -> Finding | None:
    """Other batches, one token, odd lengths; and the dtype."""
    for batch, tokens in ((1, ctx.tokens), (2, 1), (1, 1), (3, 5)):
        x = ctx.exact.input(tokens, batch)
        try:
            out, wanted = ctx.call(x), [*x.shape[:2], ctx.subject.out_dim]
        except Failed as failure:
            if failure.no_mistake is not None:
                continue
            if _goes_in_first(ctx, x):
                said = told(failure.error)
                return found("deterministic", "once", x=list(x.shape), error=said)
            raise
        if list(out.shape) != wanted:
            return found("shape", "sizes", x=list(x.shape), out=list(out.shape), wanted=wanted)
    x = ctx.subject.input()
    out = ctx.call(x, ctx.subject)
    if out.dtype != x.dtype:
        names = (str(t.dtype).removeprefix("torch.") for t in (x, out))
        return found("shape", "dtype", dtype=next(names), out=next(names))
    pooled = "Whatever the batch and the number of tokens, there is one output for all of them."
    return passed("shape", pooled) if ctx.exact.caller.pooled else passed("shape")


def _goes_in_first(ctx: ProbeContext, x: Tensor) -> bool:
    """Whether it takes x if nothing was called before."""
    try:
        ctx.exact.untouched()(x)
    except Exception:  # whatever somebody's code raises
        return False
    return True


def finite(ctx: ProbeContext) -> Finding | None:
    """No NaN and no infinity for ordinary inputs."""
    if bool(ctx.out.isfinite().all()):
        return passed("finite")
    rows = (~ctx.out.isfinite()).any(-1).any(0).nonzero().flatten().tolist()
    which = "every token" if len(rows) == ctx.tokens else f"token {', '.join(map(str, rows))}"
    ends = {0: "first", ctx.tokens - 1: "last"} if ctx.subject.causal and len(rows) == 1 else {}
    return found("finite", ends.get(rows[0], "any"), which=which)


def past_used(ctx: ProbeContext) -> Finding | None:
    """Non-zeros of the Jacobian."""
    if named(ctx, re.compile("window")):
        return skipped("past-used", "A window hides tokens that are far away.")
    influence, narrow = ctx.influence.nan_to_num(1.0), _in_one_line(ctx)
    if narrow:
        with failing("a map of 6 tokens"):
            influence = ctx.exact.influence(0.1 * ctx.exact.input(6, 1)).nan_to_num(1.0)
    if one_attends(influence):
        return skipped("past-used", "One token alone attends to the others.")
    unseen = influence <= NOTHING * influence.max()
    pairs = (unseen.tril() if ctx.subject.causal else unseen).nonzero().tolist()
    if not pairs:
        return passed("past-used")
    if _is_band(unseen) and named(ctx, REACHES):
        return skipped("past-used", "A band hides tokens that are far away.")
    tokens = len(unseen)
    total = tokens * (tokens + 1) // 2 if ctx.subject.causal else unseen.numel()
    i, j = pairs[0]
    which = f"token {j} ({len(pairs)} such pairs of {total})"
    if all(a == b for a, b in pairs):
        which = "its own token"
    elif len(pairs) >= total - tokens:
        which = "any other token"
        if (shown := ctx.subject.caller.custom) is not None and not is_plain(shown):
            return skipped(
                "past-used",
                "No output depends on any other token, in the call that "
                "you show: it may bring keys of its own.",
            )
    elif narrow:
        return skipped("past-used", "It attends along one side of a map.")
    elif {b for _, b in pairs} == {0} and _has_class_token(ctx):
        return skipped("past-used", "The class token is seen by itself alone.")
    return found("past-used", "unseen", i=i, which=which)


def _has_class_token(ctx: ProbeContext) -> bool:
    """Whether its code speaks of a token for the class, which comes first."""
    module = ctx.subject.module
    code = "" if module is None else source_of(type(module))
    return re.search(r"\bcls|class_token", code, re.IGNORECASE) is not None


def _in_one_line(ctx: ProbeContext) -> bool:
    """Whether its tokens lie in a map of one column, in which nothing has neighbours to a side."""
    return {*"HW"} <= {*ctx.exact.caller.layout.axes} and ctx.tokens == TOKENS


def _is_band(unseen: Tensor) -> bool:
    """Whether each token sees those that are near it, as many on each side as any other does."""
    tokens = len(unseen)
    places = torch.arange(tokens)
    away = places[:, None] - places
    near = [not bool(unseen[away == gap].any()) for gap in range(1 - tokens, tokens)]
    far = [bool(unseen[away == gap].all()) for gap in range(1 - tokens, tokens)]
    whole = all(one != two for one, two in zip(near, far, strict=True))
    seen = [gap for gap, one in zip(range(1 - tokens, tokens), near, strict=True) if one]
    return whole and 0 in seen and len(seen) > 2 and seen[-1] - seen[0] == len(seen) - 1


def prefix(ctx: ProbeContext) -> Finding | None:
    """`f(x)[:, :t]` is `f(x[:, :t])`."""
    if not ctx.subject.causal:
        return None
    form = ctx.subject.mask_form
    alike = len(ctx.x) if form is not None and form.shape == "[T, S]" else 0  # taken for [B, S]
    for tokens in (n for n in range(1, ctx.tokens) if n != alike):
        if not ctx.near(ctx.call(ctx.x[:, :tokens]), ctx.out[:, :tokens]):
            break
    else:
        return passed("prefix")
    last = min(3, ctx.tokens) - 1
    said = f"f(x[:, :{last}]) and f(x)[:, :{last}] are compared"
    example = ctx.example(said, lambda f, x: (f(x[:, :last]), f(x)[:, :last]))
    which = f"The first {tokens} tokens alone give" if tokens > 1 else "The first token alone gives"
    return found("prefix", "differs", example, which=which, tokens=ctx.tokens)


def batch(ctx: ProbeContext) -> Finding | None:
    """Each sequence alone, and the batch in another order."""
    alone = torch.cat([ctx.call(row[None]) for row in ctx.x])
    if ctx.near(alone, ctx.out) and ctx.near(ctx.call(ctx.x.flip(0)).flip(0), ctx.out):
        return passed("batch")
    if (name := _of_its_own(ctx)) is not None:
        return skipped("batch", f"The call that you show gives {name} other numbers in each row.")
    said = "f(x[:1]) and f(x)[:1] are compared"
    example = ctx.example(said, lambda f, x: (f(x[:1]), f(x)[:1]), batch=2)
    parts = () if ctx.exact.module is None else ctx.exact.module.modules()
    last = [type(one).__name__ for one in parts if getattr(one, "batch_first", None) is False]
    return found("batch", "inside" if last else "mixed", example, kind=next(iter(last), ""))


def _of_its_own(ctx: ProbeContext) -> str | None:
    """The argument that holds something else for a sequence alone than in a batch, where somebody
    shows the call; None where there is none."""
    shown = ctx.exact.caller.custom
    if shown is None or ctx.exact.module is None or is_plain(shown):
        return None
    places = wants_ids(shown)  # ids are places in the batch
    seen = list[dict[str, Tensor]]()

    def note(given: dict[str, Tensor]) -> None:
        seen.append({n: t for n, t in given.items() if t.is_floating_point() or not places})

    with noting(ctx.exact, note):
        for x in (ctx.x, *(row[None] for row in ctx.x)):
            ctx.call(x)
    if len(seen) != 1 + len(ctx.x):  # it is called several times
        return None
    whole, *rows = seen
    for name, one in whole.items():
        parts = [row[name] for row in rows if name in row]
        batched = bool(parts) and one.ndim > 0 and len(one) == len(ctx.x) == sum(map(len, parts))
        if batched and not torch.equal(torch.cat(parts), one):
            return name
    return None


def equal_tokens(ctx: ProbeContext) -> Finding | None:
    """Rows of weights sum to 1, so equal values are their own mean."""
    same = ctx.x[:, :1].expand(-1, ctx.tokens, -1)
    out, one = ctx.call(same), ctx.call(ctx.x[:, :1])
    if ctx.near(out, one.expand_as(out)):
        return _equal_values(ctx, same, out) or passed("equal-tokens")

    def two(subject: Target, x: Tensor) -> tuple[Tensor, Tensor]:
        out = subject(x[:, :1].expand_as(x))
        return subject(x[:, :1]).expand_as(out), out

    return found("equal-tokens", "tokens", ctx.example("x = x[:, :1].expand(-1, 3, -1)", two))


def _equal_values(ctx: ProbeContext, same: Tensor, expected: Tensor) -> Finding | None:
    """The same with different queries and keys, where values are given apart."""
    subject = ctx.exact
    if subject.projections is None and not (subject.caller.separate and subject.bare):
        return None
    with failing(f"queries and keys {list(ctx.x.shape)} and equal values"), torch.no_grad():
        out = subject.of_values(ctx.x, same)
    added = ctx.near(out - ctx.x, expected - same) if out.shape == ctx.x.shape else False
    near = ctx.near(out, expected) or added or bool(bent(ctx))  # x may be added at the end
    return None if near else found("equal-tokens", "values")


def one_token(ctx: ProbeContext) -> Finding | None:
    """`f(a + b) + f(0)` is `f(a) + f(b)` for sequences of one token."""
    a, b = (ctx.exact.input(1, 2, seed=seed) for seed in (3, 4))
    together = ctx.call(a + b) + ctx.call(torch.zeros_like(a))
    if ctx.near(together, ctx.call(a) + ctx.call(b)):
        return passed("one-token")
    if other := bent(ctx):
        return skipped("one-token", f"It holds more than attention: {other}.")
    return found("one-token", "bends")


def bent(ctx: ProbeContext) -> str:
    """The first child that is not linear; norms of queries and keys stand before the softmax."""
    module = ctx.subject.module
    for path, child in module.named_modules() if module is not None else ():
        last, kind = path.split(".")[-1], type(child).__name__
        leaf = child is not module and not any(True for _ in child.children())
        bends = "gate" in last or (BENT.search(kind) and not isinstance(child, nn.Linear))
        if leaf and bends and not QK_NORM.search(path):
            return kind if BENT.search(kind) else last
    return ""


def order(ctx: ProbeContext) -> Finding | None:
    """The last token does not notice in which order the others stand."""
    if ctx.tokens < 3 or ctx.exact.caller.pooled:  # one token may stand for all
        return None
    if ctx.orderless:
        return passed("order")
    module = ctx.subject.module
    names = names_in(module) if module is not None else ()
    knows = named(ctx, POSITIONS) or any(SPEAKS_OF_ROPE.search(name.lower()) for name in names)
    knowing = skipped("order", "It knows positions, so the order of tokens counts.")
    pointwise = module is not None and is_pointwise(module)
    if ctx.exact.caller.tables or (knows and not pointwise):
        return knowing
    code = written_code(module) if module is not None else ""
    if knows:  # whatever it is called
        code = re.sub(rf"{type(module).__name__}|\w*[Cc]onv\w*", "", code)
        if not code or IN_ORDER.search(code):
            return knowing
    return found("order", "counts" if not code or IN_ORDER.search(code) else "mixed")


def gradients(ctx: ProbeContext) -> Finding | None:
    """Every parameter, and every head's part of it; and a backward that somebody wrote."""
    if (wrong := wrong_backward(ctx)) is not None:
        return wrong
    own = ctx.exact.fresh()
    if own.module is None:
        return None
    named = [(n, p) for n, p in own.module.named_parameters() if p.requires_grad]
    if not named:
        return skipped("gradients", "It has no parameters that are trained.")
    with failing(f"x {list(ctx.x.shape)} with gradients"):
        result, draw = own.result(ctx.x), torch.Generator().manual_seed(9)
        outs = [result.out, *_beside(result)]
        along = [torch.randn(y.shape, generator=draw, dtype=torch.float64).to(y) for y in outs]
        total = torch.stack([(y * a).sum() for y, a in zip(outs, along, strict=True)]).sum()
        slopes = torch.autograd.grad(
            total, [p for _, p in named], retain_graph=True, allow_unused=True
        )
    idle = own.idle
    pairs = zip(named, slopes, strict=True)
    dead = {name: _dead(ctx, name, one, slope) for (name, one), slope in pairs}
    missing = [said for name, said in dead.items() if said and name not in idle]
    missing.sort(key=lambda said: said not in dead)  # whole ones first
    if not missing and idle:
        return skipped("gradients", f"Only another input reaches {', '.join(sorted(idle)[:3])}.")
    if not missing:
        graph = any(one.grad_fn is not None for one in tensors_of(own.module))
        return (_second_step(ctx) if graph else None) or passed("gradients")
    which = f"{' and '.join(missing[:3])}{' and more' * (len(missing) > 3)}"
    code = "".join(map(source_of, {type(part) for part in own.module.modules()}))
    untouched = {name for (name, _), slope in zip(named, slopes, strict=True) if slope is None}
    read, layers = {*names_called(own.module)}, map(layer_of, untouched & {*missing})
    unread = [name for name in layers if not is_called(own.module, name, read)]
    one = found("gradients", "missing", which=which)
    if unread:
        return replace(one, ground="any")  # a guess of a call excuses no such thing
    lost = _unconnected(result, [p for name, p in named if dead[name] == name and name not in idle])
    lost = lost and not STOPPED.search(code)
    shown = own.caller.custom is not None and all(dead[name] == name for name in dead if dead[name])
    return replace(one, ground="call") if lost or shown else one


def _second_step(ctx: ProbeContext) -> Finding | None:
    """That a second step of training goes back through the graph of the first, which a call has
    kept in a cache."""
    own = ctx.exact.fresh()
    assert own.module is not None
    own.module.train()
    try:
        for _ in range(2):
            own(ctx.x).sum().backward()
    except RuntimeError as error:
        said = str(error)
        return found("gradients", "second") if "a second time" in said else None
    except Exception:  # the other probes say what else fails
        return None
    return None


def _unconnected(result: Result, parameters: Sequence[Tensor]) -> bool:
    """Whether there are parameters on which nothing that comes back depends."""
    ends = [y.sum() for y in tensors_in(result.raw) if y.requires_grad]
    if not ends or not parameters:
        return False
    slopes = torch.autograd.grad(ends, parameters, allow_unused=True)
    return any(slope is None for slope in slopes)


def _beside(result: Result) -> list[Tensor]:
    """Other outputs of the same shape, of a second stream."""
    others = [y for y in tensors_in(result.raw) if y.requires_grad and y is not result.weights]
    shape = result.out.shape
    return [y for y in others if y.ndim == len(shape) and y.shape[-1] == shape[-1]][1:]


def _dead(ctx: ProbeContext, name: str, parameter: Tensor, slope: Tensor | None) -> str:
    """Which part of a parameter has no gradient; empty where all of it has."""
    if slope is None:
        return name
    if parameter.ndim < 2 or not parameter.numel() or POSITIONS.search(name.lower()):
        return ""
    if bool((slope == 0).all()):
        return name
    if bent(ctx):  # a ReLU may be closed for all tokens
        return ""
    for axis in range(parameter.ndim):
        others = [n for n in range(parameter.ndim) if n != axis]
        rows = (slope.abs().amax(dim=others) == 0).nonzero().flatten().tolist()
        if rows:
            which = f"{rows[0]} to {rows[-1]}" if len(rows) > 1 else f"{rows[0]}"
            return f"{'rows' if axis == 0 else 'columns'} {which} of {name}{_head(ctx, rows)}"
    return ""


def _head(ctx: ProbeContext, rows: list[int]) -> str:
    dim = ctx.subject.head_dim or 1
    heads = sorted({row // dim % ctx.subject.num_heads for row in rows})
    whole = len(rows) % dim == 0 and dim > 1
    return f" (head {', '.join(map(str, heads))})" if whole else ""


def large_inputs(ctx: ProbeContext) -> Finding | None:
    """A thousand times the usual size, in the subject's own dtype; outputs and gradients."""
    half = ctx.random.dtype.itemsize < 4  # which overflows by itself
    subject = ctx.random.to(torch.float32) if half else ctx.random
    frozen = subject.module is not None and not any(
        p.requires_grad for p in subject.module.parameters()
    )
    if half:
        try:
            subject(subject.input())
        except Exception:  # it computes in its own dtype, whatever it is moved to
            return None
    x = (subject.input() * 1000).requires_grad_(not frozen)
    with failing(f"x {list(x.shape)} * 1000"):
        out = subject(x)
    fine = bool(out.isfinite().all())
    if fine and out.requires_grad:
        with failing(f"x {list(x.shape)} with gradients"):
            slope = torch.autograd.grad(out.sum(), x, allow_unused=True)[0]
        fine = slope is None or bool(slope.isfinite().all())
    return passed("large-inputs") if fine else found("large-inputs", "overflow")


def weights(ctx: ProbeContext) -> Finding | None:
    """What comes back as weights: rows over keys, sums of 1, zeros where hidden."""
    given = ctx.result(ctx.x).weights
    if given is None:
        return None
    rows, columns = given.sum(-1), given.sum(-2)
    if bool((rows == 0).all()):
        return skipped("weights", "The second result is no weights: it is zero.")
    if ctx.near(rows, torch.ones_like(rows)) and bool((given >= 0).all()):
        if ctx.subject.causal and bool((given.triu(1).abs() > 1e-6).any()):
            return found("weights", "hidden")
        return passed("weights")
    if ctx.near(columns, torch.ones_like(columns)):
        return found("weights", "columns")
    if bool((given >= 0).all()) and bool((given <= 1).all()):
        mean = rows.mean()  # 1 where the numbers are right and stand in another order
        way = "order" if ctx.near(mean, torch.ones_like(mean)) else "rows"
        return found("weights", way, low=rows.min(), high=rows.max())
    return skipped("weights", "The second result is no weights (scores, perhaps).")


def named(ctx: ProbeContext, pattern: re.Pattern[str]) -> bool:
    """Whether a parameter, buffer, module or set attribute has such a name."""
    module = ctx.subject.module
    for child in module.modules() if module is not None else ():
        inside = [*child._parameters.items(), *child._buffers.items(), *child._modules.items()]
        names = [type(child).__name__, *(name for name, value in inside if value is not None)]
        for name, value in vars(child).items():
            off = value is None or (isinstance(value, (bool, int, float)) and not value)
            names += [name] * (not name.startswith("_") and not off)
        if any(pattern.search(name.lower()) for name in names):
            return True
    return False

"""Probe what is legal and may be unwise: poor errors, half precision, what is saved."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..findings.rules import found, passed, skipped
from ..findings.verdict import Finding
from ..target.checked_target import Target
from ..target.errors import Broken, told
from .behaviour import BENT, SINKS, bent, named
from .probe_context import Failed, ProbeContext

SETS = re.compile(
    r"init\.\w+_\(|_init_weights|reset_parameters|xavier|kaiming|\.(normal|uniform|trunc_normal)_\(|"
    r"load_(state_dict|model|file)|from_pretrained"
)
"""Code that sets the numbers of weights, or loads them."""

LONGEST = 1024
"""Contexts above this are not tried."""


def context(ctx: ProbeContext) -> Finding | None:
    """One token more than the context holds."""
    longest = ctx.subject.context_length
    if longest is None:
        return None
    if longest > LONGEST:
        return skipped("context", f"A context of {longest} is too long to try.")
    out, words = ctx.beyond, {"tokens": longest + 1, "context": longest}
    if isinstance(out, (ValueError, AssertionError)):
        return passed("context")
    if isinstance(out, Exception):
        return found("context", "error", error=told(out), **words)
    x = ctx.random.input(longest + 1, 1, beyond=True)
    if not ctx.subject.causal or ctx.near(out[:, :longest], ctx.call(x[:, :-1], ctx.random)):
        return passed("context", "A sequence longer than the context works.")
    return found("context", "silent", **words)


def heads_divide(ctx: ProbeContext) -> Finding | None:
    """5 heads for a width that 5 does not divide."""
    given = _uneven(ctx)
    if given is None:
        return None
    if isinstance(given, (ValueError, AssertionError)):
        return passed("heads-divide")
    if isinstance(given, BaseException):
        return found("heads-divide", "error", error=told(given))
    if given.out_dim >= ctx.subject.out_dim:
        return passed("heads-divide", "Any head count works.")
    return found("heads-divide", "silent", out=given.out_dim, wanted=ctx.subject.out_dim)


def _uneven(ctx: ProbeContext) -> Target | BaseException | None:
    """What 5 heads give: a subject, or the error; None where that cannot be tried."""
    roles, width = ctx.subject.roles, ctx.subject.embed_dim
    if "heads" not in roles or width % 5 == 0:
        return None
    changes: dict[str, Any] = {"heads": 5, "kv_heads": 1, "head_dim": max(1, width // 5)}
    try:
        return ctx.subject.rebuilt(**{role: n for role, n in changes.items() if role in roles})
    except Broken as broken:
        return broken.__cause__ or broken
    except ValueError as error:
        return error


def assert_(ctx: ProbeContext) -> Finding | None:
    """assert where a user is at fault."""
    errors: dict[str, Any] = {"a head count that does not divide the width": _uneven(ctx)}
    if (ctx.subject.context_length or LONGEST + 1) <= LONGEST:
        errors["a sequence longer than the context"] = ctx.beyond
    for what, error in errors.items():
        if isinstance(error, AssertionError):
            return found("assert", "used", what=what, error=told(error))
    refused = any(isinstance(error, BaseException) for error in errors.values())
    return passed("assert") if refused else None


def half(ctx: ProbeContext) -> Finding | None:
    """float16: finite, and near float32."""
    subject = ctx.random.to(torch.float16)
    x = subject.input()
    exact = ctx.call(x.to(ctx.x.dtype))
    try:
        out = ctx.call(x, subject)
    except Failed as failure:
        error = told(failure.error)
        if "overflow" in str(failure.error):
            return found("half", "fails", error=error)
        return skipped("half", f"In float16 the call fails: {error}.")
    if bool(out.isfinite().all()) and ctx.near(out.to(exact.dtype), exact, factor=1e7):
        return passed("half")
    return found("half", "far")


def _is_set_later(file: str) -> bool:
    """Whether a file, or another one of its folder, sets numbers of what is built."""
    paths = Path(file).parent.glob("*.py") if file else ()
    return any(SETS.search(path.read_text("utf-8", "replace")) for path in paths)


def init(ctx: ProbeContext) -> Finding | None:
    """Matrices whose initial numbers are all positive, and parameters that nothing sets."""
    module = ctx.subject.module
    if names := ctx.subject.unset:
        one = found("init", "unset", names=", ".join(names[:4]), last=names[0].split(".")[-1])
        file = getattr(sys.modules.get(type(module).__module__), "__file__", None) or ""
        return replace(one, severity="warning") if _is_set_later(file) else one
    parameters = () if module is None else module.named_parameters()
    matrices = [(n, p.detach()) for n, p in parameters if p.ndim >= 2]
    positive = [n for n, p in matrices if p.numel() > 3 and 0 <= p.min() < p.max() < 10 * p.mean()]
    if not matrices:
        return None
    if not positive:
        return passed("init")
    return found("init", "positive", names=", ".join([*positive[:4], *["…"][: len(positive) > 4]]))


def buffer(ctx: ProbeContext) -> Finding | None:
    """Square tables among what is saved."""
    module = ctx.subject.module
    if module is None:
        return None
    parameters = dict(module.named_parameters())
    for name, saved in module.state_dict().items():
        if name in parameters or not isinstance(saved, Tensor) or saved.ndim < 2:
            continue
        size = saved.shape[-1]
        if size == saved.shape[-2] > 1:
            return found("buffer", "saved", name=name, size=size, last=name.split(".")[-1])
    return passed("buffer")


def parameter_count(ctx: ProbeContext) -> Finding | None:
    """As many parameters as projections of these widths have."""
    module, subject = ctx.subject.module, ctx.subject
    if module is None or subject.caller.pooled:
        return None
    beside = [
        one
        for one in module.modules()
        if BENT.search(type(one).__name__) or isinstance(one, nn.Embedding)
    ]
    others = {id(p) for one in beside for p in one.parameters()}
    count = sum(p.numel() for p in module.parameters() if id(p) not in others)
    if not count:
        return None
    E, H, D = subject.embed_dim, subject.num_heads, subject.head_dim
    outs = {subject.out_dim, E}
    dims = {D or 1, max(1, E // H), max(1, subject.out_dim // H)}
    divisors = (n for n in range(1, H + 1) if H % n == 0)
    groups = {subject.num_kv_heads} if subject.num_kv_heads else {H, 1, *divisors}
    wanted = set()
    for dim in dims:
        for G in groups:
            rows = H * dim + 2 * G * dim
            for bias in (0, rows, 2 * G * dim, H * dim, G * dim):
                base = E * rows + bias
                wanted |= {base, *(base + H * dim * O + b for O in outs for b in (0, O))}
    extra = {0, *(2 * dim for dim in dims), *(4 * dim for dim in dims)}
    if any(count - more in wanted for more in extra):
        return passed("parameter-count", f"It has the parameters that attention has: {count:,}.")
    if bent(ctx) or named(ctx, SINKS):
        return skipped("parameter-count", "It holds more than attention.")
    D = D or max(1, E // H)
    words = {"plain": E * 3 * H * D, "out": H * D * subject.out_dim}
    return found("parameter-count", "odd", count=count, H=H, D=D, **words)

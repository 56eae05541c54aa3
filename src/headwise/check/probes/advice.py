"""Probes of what is legal and may be unwise: poor errors, half precision, what is saved."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..findings.verdict import Finding
from ..target.subject import Broken, Subject, told
from .behaviour import BENT, SINKS, bent, named
from .probe_context import Failed, Lab, failed, passed, skipped

LONGEST = 1024
"""Contexts above this are not tried."""


def context(lab: Lab) -> Finding | None:
    """One token more than the context holds."""
    longest = lab.subject.context_length
    if longest is None:
        return None
    if longest > LONGEST:
        return skipped("context", f"A context of {longest} is too long to try.")
    out = lab.beyond
    if isinstance(out, Exception):
        return _refusal("context", out, f"{longest + 1} tokens in a context of {longest}")
    x = lab.random.input(longest + 1, 1, beyond=True)
    if not lab.subject.causal or lab.near(out[:, :longest], lab.call(x[:, :-1], lab.random)):
        return passed("context", "A sequence longer than the context works.")
    return failed(
        "context",
        f"{longest + 1} tokens in a context of {longest} raise no error, and come out wrong.",
        "Check it in forward: if T > self.context_length: raise ValueError(…).",
    )


def _refusal(rule: str, error: BaseException, what: str) -> Finding:
    """Whether an error says what is wrong: a ValueError does, an assert nearly."""
    if isinstance(error, (ValueError, AssertionError)):
        return passed(rule)
    return failed(
        rule,
        f"{what[0].upper()}{what[1:]} end in {told(error)}.",
        "Check it where it can be said: raise ValueError with both numbers.",
        severity="warning",
    )


def heads_divide(lab: Lab) -> Finding | None:
    """5 heads for a width that 5 does not divide."""
    error = _uneven(lab)
    if error is None:
        return None
    if isinstance(error, Subject):
        if error.out_dim >= lab.subject.out_dim:
            return passed("heads-divide", "Any head count works.")
        return failed(
            "heads-divide",
            f"With 5 heads the output is only {error.out_dim} wide instead of "
            f"{lab.subject.out_dim}, and nothing says so.",
            "Raise ValueError in the constructor where the width is no multiple of the heads.",
            severity="warning",
        )
    return _refusal("heads-divide", error, "5 heads that do not divide the width")


def _uneven(lab: Lab) -> Subject | BaseException | None:
    """What 5 heads give: a subject, or the error; None where that cannot be tried."""
    if "heads" not in lab.subject.roles or lab.subject.embed_dim % 5 == 0:
        return None
    changes: dict[str, Any] = {"heads": 5}
    if "kv_heads" in lab.subject.roles:
        changes["kv_heads"] = 1
    if "head_dim" in lab.subject.roles:
        changes["head_dim"] = max(1, lab.subject.embed_dim // 5)
    try:
        return lab.subject.rebuilt(**changes)
    except Broken as broken:
        return broken.__cause__ or broken
    except ValueError as error:
        return error


def asserts(lab: Lab) -> Finding | None:
    """assert where a user is at fault."""
    errors: list[tuple[str, Any]] = [("a head count that does not divide the width", _uneven(lab))]
    if (lab.subject.context_length or LONGEST + 1) <= LONGEST and isinstance(lab.beyond, Exception):
        errors.append(("a sequence longer than the context", lab.beyond))
    for what, error in errors:
        if isinstance(error, AssertionError):
            return failed(
                "assert",
                f"For {what} it uses assert: {told(error)}.",
                "python -O removes assert; write: if …: raise ValueError(f'…').",
                severity="warning",
            )
    return passed("assert") if any(isinstance(e, BaseException) for _, e in errors) else None


def half(lab: Lab) -> Finding | None:
    """float16: finite, and near float32."""
    subject = lab.random.to(torch.float16)
    x = subject.input()
    exact = lab.call(x.to(lab.x.dtype))
    try:
        out = lab.call(x, subject)
    except Failed as failure:
        if "overflow" in str(failure.error):
            return failed(
                "half",
                f"In float16 the call fails: {told(failure.error)}.",
                "A number such as −1e9 does not fit in float16: use float('-inf'), or "
                "torch.finfo(x.dtype).min.",
                severity="warning",
            )
        return skipped("half", f"In float16 the call fails: {told(failure.error)}.")
    if bool(out.isfinite().all()) and lab.near(out.to(exact.dtype), exact, factor=1e7):
        return passed("half")
    return failed(
        "half",
        "In float16 the output is NaN or far from that of float32.",
        "Masks of −1e9 become −inf there, and a row of nothing else is NaN; large sums overflow "
        "at 65,504.",
        severity="warning",
    )


def init(lab: Lab) -> Finding | None:
    """Matrices whose initial numbers are all positive."""
    module = lab.subject.module
    if module is None:
        return None
    matrices = [(n, p.detach()) for n, p in module.named_parameters() if p.ndim >= 2]
    positive = [n for n, p in matrices if p.numel() > 3 and p.min() >= 0 and p.max() > p.min()]
    if not matrices:
        return None
    if not positive:
        return passed("init")
    shown = ", ".join(positive[:4]) + ("" if len(positive) <= 4 else ", …")
    return failed(
        "init",
        f"All initial numbers of {shown} are positive, as torch.rand gives them: scores are large, "
        "and the softmax sees little but the largest.",
        "Use nn.Linear, or nn.init.xavier_uniform_ on the parameter.",
        severity="warning",
    )


def buffer(lab: Lab) -> Finding | None:
    """Square tables among what is saved."""
    module = lab.subject.module
    if module is None:
        return None
    parameters = dict(module.named_parameters())
    for name, saved in module.state_dict().items():
        if name in parameters or not isinstance(saved, Tensor) or saved.ndim < 2:
            continue
        if saved.shape[-1] == saved.shape[-2] > 1:
            size = saved.shape[-1]
            return failed(
                "buffer",
                f"The state_dict holds {name}, {size} × {size} numbers that are no weights.",
                f"register_buffer('{name.split('.')[-1]}', …, persistent=False), or make it in "
                "forward.",
                severity="warning",
            )
    return passed("buffer")


def parameter_count(lab: Lab) -> Finding | None:
    """As many parameters as projections of these widths have."""
    module, subject = lab.subject.module, lab.subject
    if module is None:
        return None
    norms = {
        id(p) for m in module.modules() if BENT.search(type(m).__name__) for p in m.parameters()
    }
    count = sum(p.numel() for p in module.parameters() if id(p) not in norms)
    if not count:
        return None
    E, H = subject.embed_dim, subject.num_heads
    outs = {subject.out_dim, E}
    dims = {subject.head_dim or 1, max(1, E // H), max(1, subject.out_dim // H)}
    groups = {subject.num_kv_heads} if subject.num_kv_heads else {H, 1, *_divisors(H)}
    wanted = set()
    for D in dims:
        for G in groups:
            rows = H * D + 2 * G * D
            for bias in (0, rows, 2 * G * D, H * D, G * D):
                base = E * rows + bias
                wanted |= {base, *(base + H * D * O + b for O in outs for b in (0, O))}
    extra = {0, *(2 * D for D in dims), *(4 * D for D in dims)}
    if any(count - more in wanted for more in extra):
        return passed("parameter-count", f"It has the parameters that attention has: {count:,}.")
    if bent(lab) or named(lab, SINKS):
        return skipped("parameter-count", "It holds more than attention.")
    D = subject.head_dim or max(1, E // H)
    plain = E * 3 * H * D
    return failed(
        "parameter-count",
        f"It has {count:,} parameters; queries, keys and values of {H} heads of {D} features take "
        f"{plain:,}, an output projection {H * D * subject.out_dim:,} more, and biases a little.",
        "Look for projections that are too wide or too narrow, made twice, or never used.",
        severity="warning",
    )


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]

"""Probe the masks, padding, second sequence and positions that a call names.

A shown call defines the meaning of its names, and each is tested. For a plain call, the usual forms
of a mask are tried, and the verdict reports the form that works.
"""

from __future__ import annotations

import re
from dataclasses import replace

import torch
from torch import Tensor, nn

from .call import KEYS, SHAPES, Form, PlainCall
from .code import name_of
from .names import building_role
from .probing import NOTHING, Failed, Probing
from .rules import passed, skipped, violation
from .target import Target
from .verdict import Finding

FEW = {"mask": ("may", "hidden", "ones", "added", "zeros"), "flag": ("flag",)}
NEARLY = 0.02
"""If a hidden token has less than this fraction of a visible one's influence, the mask's fill
is not negative enough."""


def _allow(tokens: int) -> Tensor:
    """Return an irregular mask in which every token sees itself and about half of the others."""
    draw = torch.Generator().manual_seed(3)
    allow = torch.rand(tokens, tokens, generator=draw) > 0.5
    return allow | torch.eye(tokens, dtype=torch.bool)


# --- learning the forms of a plain call -----------------------------------------------------------


def learn_forms(target: Target) -> list[Finding]:
    """Find the forms of the plain call's masks; return findings on masks without a form."""
    call = target.call
    if not isinstance(call, PlainCall):
        return []
    ctx, findings = Probing(target), list[Finding]()
    names = [n for role in ("mask", "padding", "memory_mask", "lengths") for n in call.named(role)]
    for name in names:
        role = call.roles[name]
        if call.cross_only and role == "mask":
            role = "memory_mask"
        tried = _Tried(name)
        for channel, form in _forms(call, name, role):
            if channel in call.forms and tried.exact is None:
                continue
            tried.take(ctx, channel, form)
            if tried.exact is not None:
                break
        if tried.exact is not None:
            channel, form = tried.exact
            call.forms[channel] = form
            target.observed.append(f"{form}")
            if name == "key_padding_mask" and form.kind == "may":
                findings.append(violation("padding", "custom"))
        elif tried.nearest is not None:
            channel, form, why = tried.nearest
            call.forms.setdefault(channel, form)
            rule = "mask" if channel == "allow" else "padding"
            if why is not None:
                findings.append(violation(rule, why, name=name))
        elif tried.ignored and role == "memory_mask" and not call.cross_only:
            both = f"layer(x, {call.memory or 'memory'}=memory, {name}=keep)"
            shown = f"lambda layer, x, memory, keep: {both}"
            message = f"`{name}` changes nothing without another sequence; show a call: {shown}."
            findings.append(skipped("padding", message))
        elif tried.ignored:
            rule = "padding" if role in ("padding", "lengths", "memory_mask") else "mask"
            findings.append(violation(rule, "ignored", name=name))
        elif tried.opened and not tried.square:
            findings.append(violation("causality", "kept", name=name))
        else:
            rule = "padding" if role in ("padding", "lengths", "memory_mask") else "mask"
            words = "keep" if rule == "padding" else "allow"
            shown = f"lambda layer, x, {words}: layer(x, {name}={words})"
            message = f"No usual form of `{name}` works; show a call: {shown}."
            findings.append(skipped(rule, message))
    return findings


def _forms(call: PlainCall, name: str, role: str) -> list[tuple[str, Form]]:
    if role == "lengths":
        return [("keep", Form(name, "lengths"))]
    if "Mask" in str(call.parameters[name].annotation):
        return [("allow", Form(name, "headwise"))]
    keep = [("keep", Form(name, kind, shape)) for kind in FEW["mask"] for shape in KEYS]
    allow = [("allow", Form(name, kind, shape)) for kind in FEW["mask"] for shape in SHAPES]
    if role == "padding":
        return keep
    return keep if role == "memory_mask" else allow + keep


class _Tried:
    """Hold the results of all forms of one argument."""

    def __init__(self, name: str) -> None:
        self.name, self.ignored = name, 0
        self.exact: tuple[str, Form] | None = None
        self.nearest: tuple[str, Form, str | None] | None = None
        self.gap = 1.0
        self.opened = self.square = False

    def take(self, ctx: Probing, channel: str, form: Form) -> None:
        call = ctx.exact.call
        assert isinstance(call, PlainCall)
        own = replace(call, forms={**call.forms, channel: form})
        trial = replace(ctx.exact, call=own)
        keep = channel == "keep"
        batch, tokens = ctx.x.shape[:2]
        full = torch.ones((batch, tokens) if keep else (tokens, tokens), dtype=torch.bool)
        some = _some_padding(ctx, form.kind == "lengths") if keep else _allow(tokens)
        if not keep and ctx.target.causal:
            full, some = full, some.tril()
        try:
            with torch.no_grad():
                plain, open_ = ctx.out, trial(ctx.x, **{channel: full})
                shut = trial(ctx.x, **{channel: some})
        except Exception:
            return
        self.square = self.square or not keep
        if not ctx.near(open_, plain):
            self.opened = self.opened or (keep and _opens(ctx, trial, full))
            return
        if ctx.near(shut, plain):
            self.ignored += 1
            return
        if form.kind == "added":  # a finite fill distinguishes adding from multiplying
            own = replace(call, forms={**call.forms, channel: replace(form, fill=-1e4)})
            trial = replace(ctx.exact, call=own)
        gap, why = _leaks(ctx, trial, channel, some)
        why = why or ("small" if form.kind == "added" and gap > NOTHING else None)
        if gap <= NOTHING:
            self.exact = (channel, form)
        elif gap < self.gap or self.nearest is None:
            self.gap, self.nearest = gap, (channel, form, why)


def _some_padding(ctx: Probing, at_end: bool = False) -> Tensor:
    """Return `[B, S]` with two padding tokens in the last sequence: the last two; in causal
    attention, where no other token sees those, the second and third."""
    keep = torch.ones(ctx.x.shape[:2], dtype=torch.bool)
    hole = _is_causal(ctx) and not at_end
    keep[-1, slice(1, 3) if hole else slice(5, None)] = False
    return keep


def _is_causal(ctx: Probing) -> bool:
    """Return True if later tokens have no influence, for any reason."""
    return bool((ctx.influence.triu(1) <= NOTHING * ctx.influence.max()).all())


def _opens(ctx: Probing, trial: Target, full: Tensor) -> bool:
    """Return True if tokens see later ones only when passed a padding mask that hides nothing."""
    try:
        seen = trial.influence(ctx.x[-1:], keep=full[-1:])
    except Exception:
        return False
    return _is_causal(ctx) and bool((seen > NOTHING * seen.max()).all())


def _leaks(ctx: Probing, trial: Target, channel: str, some: Tensor) -> tuple[float, str | None]:
    """Return the influence of hidden tokens relative to visible ones, and a reason if one is known:
    "queries" (they are hidden instead of keys) or "elsewhere" (other sequences change)."""
    try:
        with torch.no_grad():
            if channel == "keep":
                real = some[-1]
                seen = trial.influence(ctx.x[-1:], keep=some[-1:])
                hidden, visible = seen[real][:, ~real], seen[real][:, real]
                base = trial(ctx.x, keep=some)
                if not ctx.near(base[:-1], ctx.out[:-1]):
                    return 1.0, "elsewhere"
                if ctx.near(base[-1, real], ctx.out[-1, real]):
                    return 1.0, "queries"
            else:
                seen = trial.influence(ctx.x, allow=some)
                lower = torch.ones_like(some)
                lower = lower.tril() if ctx.target.causal else lower
                hidden, visible = seen[~some & lower], seen[some & lower]
    except Exception:
        return 1.0, None
    if not bool(hidden.isfinite().all()):
        return 1.0, None
    share = float(hidden.max() / visible.max().clamp(min=1e-300)) if hidden.numel() else 0.0
    return share, None


# --- causality ------------------------------------------------------------------------------------


def learn_causality(target: Target, wrong: bool) -> None:
    """Determine whether later tokens must be hidden, and why.

    Args:
        wrong: True if the mask argument has a mistake.
    """
    wanted = target.given_causal
    if wanted is False:
        target.causal_from = "given"
        return
    trial = target.randomised().double()
    if _seen_causal(trial):
        target.causal, target.causal_from = True, "given" if wanted else "seen"
        target.observed.insert(0, "causal")
        return
    flag = _flag(trial)
    if flag is not None:
        call = target.call
        assert isinstance(call, PlainCall)
        call.forms["causal"] = flag
    masks = target.takes & {"allow", "causal"}
    if masks and not wrong and not (isinstance(target.call, PlainCall) and target.call.cross_only):
        target.causal, target.causal_from = True, "mask"
        target.observed.insert(0, "sees all tokens (a causal mask is passed here)")
    elif wanted or (not masks and _named_causal(target)):
        target.causal, target.causal_from = True, "given" if wanted else "named"
        target.observed.insert(0, "causal, by its name")
    else:
        target.observed.insert(0, "sees all tokens")


def _flag(target: Target) -> Form | None:
    """Return the flag of a plain call that makes it causal."""
    call = target.call
    if not isinstance(call, PlainCall) or "allow" in call.forms:
        return None
    for name in call.named("causal"):
        form = Form(name, "flag")
        own = replace(call, forms={**call.forms, "causal": form})
        trial = replace(target, call=own, causal=True, causal_from="mask")
        try:
            with torch.no_grad():
                if not torch.equal(trial(trial.input()), target(target.input())):
                    return form
        except Exception:  # tested by another probe
            continue
    return None


def _seen_causal(target: Target) -> bool:
    """Return True if the zeros among the influences indicate a causal mask, even a mistaken one."""
    try:
        with torch.no_grad():
            found = target.influence(target.input(tokens=5, batch=1)).nan_to_num(0.0)
    except Exception:
        return False
    if found.max() == 0:
        return False
    none = found <= NOTHING * found.max()
    above, below = int(none.triu(1).sum()), int(none.tril(-1).sum())
    pairs = len(found) * (len(found) - 1) // 2
    if above == below:
        return False
    return above > below or (below == pairs and above < len(found))


def _named_causal(target: Target) -> bool:
    """Return True if the class name contains "causal", or a flag or triangular buffer exists."""
    layer = target.layer
    name = name_of(layer.function if hasattr(layer, "function") else layer).lower()
    if re.search(r"(?<!non)(?<!non_)causal", name):
        return True
    if "memory" in target.takes:
        return False
    flags = [v for n, v in target.arguments.items() if building_role(n) == "causal"]
    if flags:
        return bool(flags[0])
    tables = list(layer.buffers())
    for child in layer.modules():
        tables += [value for value in vars(child).values() if isinstance(value, Tensor)]
    return any(map(_triangular, tables))


def _triangular(table: Tensor) -> bool:
    """Return True if a square table has one number above its diagonal and a different one below."""
    if table.ndim < 2 or table.shape[-1] != table.shape[-2] or table.shape[-1] < 2:
        return False
    if isinstance(table, nn.Parameter):
        return False
    square = table.detach().reshape(-1, *table.shape[-2:])[0]
    ones = torch.ones(square.shape, dtype=torch.bool)
    above, below = square[ones.triu(1)], square[ones.tril(-1)]
    return bool((above == above[0]).all() and (below == below[0]).all() and above[0] != below[0])


# --- probes ---------------------------------------------------------------------------------------


def mask(ctx: Probing) -> Finding | None:
    """Hide keys with an irregular mask: exactly these must have no influence."""
    if "allow" not in ctx.target.takes:
        return None
    name = _argument(ctx, "allow")
    lower = torch.ones(ctx.tokens, ctx.tokens, dtype=torch.bool)
    if ctx.target.causal and ctx.target.causal_from != "mask":
        lower = lower.tril()
    some = _allow(ctx.tokens) & lower
    try:
        full, shut = ctx.call(ctx.x, allow=lower), ctx.call(ctx.x, allow=some)
    except Failed as failure:
        return violation("mask", "fails", name=name, error=str(failure).partition("fails: ")[2])
    if ctx.near(shut, full):
        return violation("mask", "ignored", name=name)
    if not bool(shut.isfinite().all()):
        return violation("mask", "nan", name=name)
    seen = ctx.exact.influence(ctx.x, allow=some)
    hidden = (seen > NOTHING * seen.max()) & ~some
    if not bool(hidden.any()):
        return passed("mask")
    visible = seen[some & ~torch.eye(ctx.tokens, dtype=torch.bool)]
    if bool((visible <= NOTHING * seen.max()).all()):
        return violation("mask", "inverted", name=name)
    flipped = (seen > NOTHING * seen.max()) & ~some.T
    if not bool(flipped.fill_diagonal_(False).any()):
        return violation("mask", "queries", name=name)
    same = _equal(ctx.x)
    if not ctx.near(ctx.call(same, allow=some), ctx.call(same, allow=lower)):
        return violation("mask", "after", name=name)
    if float(seen[~some & lower].max()) < NEARLY * float(visible.max()) or _is_small(ctx, some):
        return violation("mask", "small", name=name)
    i, j = hidden.nonzero()[0].tolist()
    return violation("mask", "leaks", name=name, i=i, j=j)


def _equal(x: Tensor) -> Tensor:
    """Return copies of the first token: with weights that sum to 1, a mask then changes nothing."""
    return x[:, :1].expand_as(x).clone()


def _is_small(ctx: Probing, some: Tensor) -> bool:
    """Return True if hidden scores are set to a number near 0: with all but one key hidden, hidden
    keys then outweigh a visible one with a large negative score."""
    full = ctx.call(ctx.x, allow=torch.ones_like(some))
    return not ctx.near(ctx.call(ctx.x, allow=some), full)


def padding(ctx: Probing) -> Finding | None:
    """Pad one sequence: its padding must not change the other outputs."""
    if "keep" not in ctx.target.takes:
        return None
    name, cross = _argument(ctx, "keep"), _is_of_memory(ctx)
    call = ctx.target.call
    at_end = isinstance(call, PlainCall) and call.forms["keep"].kind == "lengths"
    keep = _some_padding(ctx, at_end)
    memory = ctx.exact.input(ctx.tokens, len(ctx.x), seed=8) if cross else ctx.x
    real = torch.ones_like(keep[-1]) if cross else keep[-1]  # outputs that must not change

    def out(keys: Tensor, keep: Tensor) -> Tensor:
        return ctx.call(ctx.x, keep=keep, memory=keys) if cross else ctx.call(keys, keep=keep)

    def moved(which: Tensor) -> Tensor:
        keys = memory.clone()
        keys[-1, which] = 3.0
        return keys

    open_ = torch.ones_like(keep)
    try:
        full, base, after = out(memory, open_), out(memory, keep), out(moved(~keep[-1]), keep)
        early = out(moved(keep[-1]), keep)
    except Failed as failure:
        return violation("padding", "fails", name=name, error=str(failure).partition("fails: ")[2])
    if ctx.near(base, full):
        return violation("padding", "ignored", name=name)
    if ctx.near(early[-1], base[-1]) if cross else _hides_real(ctx, keep):
        return violation("padding", "inverted", name=name)
    if not bool(base[-1, real].isfinite().all()) or not bool(base[:-1].isfinite().all()):
        return violation("padding", "nan", name=name)
    if not ctx.near(base[:-1], full[:-1]):
        return violation("padding", "elsewhere", name=name)
    if not ctx.changed(after[-1, real], base[-1, real]):
        return passed("padding")
    if ctx.near(base[-1, real], full[-1, real]):
        return violation("padding", "queries", name=name)
    same = _equal(memory)
    if not ctx.near(out(same, keep)[-1, real], out(same, open_)[-1, real]):
        return violation("padding", "after", name=name)
    plain = out(moved(~keep[-1]), open_)
    gaps = [(one - two)[-1, real].abs().amax(-1) for one, two in ((after, base), (plain, full))]
    if bool((gaps[0] < 0.9 * gaps[1]).all()):
        return violation("padding", "small", name=name)
    return violation("padding", "leaks", name=name)


def _hides_real(ctx: Probing, keep: Tensor) -> bool:
    """Return True if real tokens see padding but no other real token."""
    real, seen = keep[-1], ctx.exact.influence(ctx.x[-1:], keep=keep[-1:])
    among = seen[real][:, real].fill_diagonal_(0.0)
    least = NOTHING * seen.max()
    return bool(among.max() <= least < seen[real][:, ~real].max())


def _is_of_memory(ctx: Probing) -> bool:
    """Return True if `keep` refers to the tokens of another sequence."""
    call = ctx.target.call
    if "memory" not in call.takes or not isinstance(call, PlainCall):
        return "memory" in call.takes
    role = call.roles[call.forms["keep"].argument]
    return call.cross_only or len(call.inputs) == 3 or role == "memory_mask"


def _argument(ctx: Probing, channel: str) -> str:
    """Return the name of the argument that takes a mask."""
    call = ctx.target.call
    return call.forms[channel].argument if isinstance(call, PlainCall) else channel


def cross(ctx: Probing) -> Finding | None:
    """Pass another sequence of a different length."""
    if "memory" not in ctx.target.takes:
        return None
    if ctx.target.causal and ctx.target.causal_from in ("seen", "named") and not ctx.target.shown:
        return None  # self-attention; keys of another sequence have no causal order
    batch, memory = len(ctx.x), ctx.exact.input(11, len(ctx.x), seed=8)
    given = _open(ctx, memory)
    try:
        out = ctx.call(ctx.x, memory=memory, **given)
    except Failed as failure:
        call = ctx.target.call
        optional = isinstance(call, PlainCall) and not call.cross_only and len(call.inputs) == 1
        if optional and isinstance(failure.error, (ValueError, NotImplementedError)):
            return skipped("cross", f"It does not accept another sequence: {failure.error}")
        same = ctx.exact.input(ctx.tokens, batch, seed=8)
        if _mixes(ctx, same):
            return violation("cross", "values")
        error = str(failure).partition("fails: ")[2]
        return violation(
            "cross", "fails", x=list(ctx.x.shape), memory=list(memory.shape), error=error
        )
    if ctx.near(ctx.call(ctx.x, memory=-memory, **given), out):
        return violation("cross", "ignored")
    return violation("cross", "own") if _mixes(ctx, memory) else passed("cross")


def _open(ctx: Probing, memory: Tensor) -> dict[str, Tensor]:
    """Return a mask that hides nothing, if the call takes one."""
    takes = "allow" in ctx.target.takes
    return {"allow": torch.ones(ctx.tokens, memory.shape[1], dtype=torch.bool)} if takes else {}


def _mixes(ctx: Probing, memory: Tensor) -> bool:
    """Return True if outputs depend on other tokens of x although keys come from elsewhere."""
    moved = ctx.x.clone()
    moved[:, 0] += 1.0
    try:
        pair = (ctx.call(x, memory=memory, **_open(ctx, memory)) for x in (ctx.x, moved))
        out, after = pair
    except Failed:
        return False
    return not ctx.near(after[:, 1:], out[:, 1:])


def rotary(ctx: Probing) -> Finding | None:
    """Move all tokens to later positions: only their distances may affect the output."""
    if "start" not in ctx.target.takes or not ctx.target.shown:
        return None
    out = ctx.call(ctx.x, start=5)
    if not ctx.near(out, ctx.out):
        return violation("rotary", "moves", n=5)
    swapped = ctx.x[:, [*range(ctx.tokens - 2, -1, -1), ctx.tokens - 1]]
    if not ctx.target.causal and ctx.near(ctx.call(swapped)[:, -1], ctx.out[:, -1]):
        return violation("rotary", "idle")
    return passed("rotary")

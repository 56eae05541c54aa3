"""Probe how a layer bears its use: moved, saved, trained, called on other memory."""

from __future__ import annotations

import contextlib
import copy
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import takewhile
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from ..diagnosis.call_lines import recorded
from ..diagnosis.static_checks import read_off
from ..findings.rules import found, passed, skipped
from ..findings.verdict import Finding
from ..target.call_adapter import tensors_of
from ..target.checked_target import Target
from ..target.copies import copied, randomise
from ..target.errors import Broken, told
from ..target.introspect import unregistered, written_code
from ..target.shown_call import makes_tensors
from ..target.signatures import source_of
from .behaviour import bent
from .devices import Elsewhere, everything
from .mask_effects import written_masks
from .probe_context import Failed, ProbeContext, failing, noting

GIVEN = 0.25
"""A share to drop that no other is taken for."""


ITERATED = re.compile("spectral_?norm|power_iter", re.IGNORECASE)
"""Code that speaks of norms that are worked out over many calls."""
_TESTS = r"(!=|==|\b(is|in|not)\b)"
COMPARES = re.compile(rf"{_TESTS}.*\.device\b|\.device\b.*{_TESTS}")
"""Code that makes anew for another device what it keeps."""
DRAWN = re.compile("noise|generator|^rng$|rng_key")
"""Names of arguments that are drawn where they are left out."""


def deterministic(ctx: ProbeContext) -> Finding | None:
    """Twice the same in eval mode."""
    for subject in (ctx.exact, ctx.exact.dropping()):
        if subject is not None:
            first, second = (ctx.call(ctx.x, subject).nan_to_num() for _ in range(2))
            if not ctx.near(first, second):
                left = [n for n in subject.caller.parameters if DRAWN.search(n.lower())]
                said = f"It draws numbers where {' and '.join(left)} is not given."
                return skipped("deterministic", said) if left else found("deterministic", "differs")
    if (kept := _kept(ctx)) is not None and not ctx.near(*kept):
        return found("deterministic", "kept")
    return passed("deterministic")


def _kept(ctx: ProbeContext) -> tuple[Tensor, Tensor] | None:
    """What the very first call gives, and the second."""
    module = ctx.exact.uncalled
    if module is None or any(isinstance(p, nn.UninitializedParameter) for p in module.parameters()):
        return None
    own = replace(ctx.exact, caller=replace(ctx.exact.caller, target=copied(module)))
    own = own.randomised().to(ctx.exact.dtype)
    return ctx.call(ctx.x, own).nan_to_num(), ctx.call(ctx.x, own).nan_to_num()


def input_kept(ctx: ProbeContext) -> Finding | None:
    """What goes in is the same after the call."""
    subject, x, others = ctx.exact, ctx.x.clone(), Before()
    if subject.projections is not None:
        heads, dim = subject.num_heads, subject.head_dim or 8
        groups = subject.num_kv_heads or heads
        given = [torch.randn(2, n, 7, dim, dtype=x.dtype) for n in (heads, groups, groups)]
        q, k, v = kept = [t.clone() for t in given]
        subject.attend(q, k, v, **subject.mask_for(x))
    else:
        given, kept = [ctx.x], [x]
        with failing(f"x {list(x.shape)}"), torch.no_grad(), _others(subject) as others:
            subject.caller(x, **subject.mask_for(x))
        for name in subject.caller.named("lengths"):  # what is padded may be set to 0
            full = torch.full((len(x),), x.shape[1])
            with contextlib.suppress(Exception), torch.no_grad():
                subject.caller(x, **subject.mask_for(x), **{name: full - 2})
    if not all(torch.equal(a, b) for a, b in zip(kept, given, strict=True)):
        return found("input-kept", "x" if subject.projections is None else "qkv")
    if written := written_masks(ctx.unflagged):
        return found("input-kept", "mask", name=min(written))
    if (name := next(_changed(others), None)) is not None:
        return found("input-kept", "other", name=name)
    return passed("input-kept")


Before = dict[str, tuple[Tensor, Tensor]]
"""Arguments by their names: each as it is, and a copy from before the call."""


@contextlib.contextmanager
def _others(subject: Target) -> Iterator[Before]:
    """What a call of a module is given beside its inputs; caches are there to be written to."""
    before: Before = {}
    if subject.module is None:
        yield before
        return
    caller = subject.caller
    kept = {*caller.inputs, *caller.named("cache")}

    def note(given: dict[str, Tensor]) -> None:
        others = ((name, value) for name, value in given.items() if name not in kept)
        before.update((name, (value, value.clone())) for name, value in others)

    with noting(subject, note):
        yield before


def _changed(before: Before) -> Iterator[str]:
    for name, (value, kept) in before.items():
        if value.shape != kept.shape or not torch.equal(value.nan_to_num(), kept.nan_to_num()):
            yield name


def contiguous(ctx: ProbeContext) -> Finding | None:
    """The same numbers in another memory order."""
    if ctx.exact.projections is not None:
        return None  # every function of q, k and v gets transposed views in all probes
    for x in (
        ctx.x.transpose(0, 1).contiguous().transpose(0, 1),
        torch.stack((ctx.x, ctx.x), dim=-1)[..., 0],
    ):
        try:
            with torch.no_grad():
                out = ctx.exact.caller(x, **ctx.exact.mask_for(x)).out
        except Exception as error:
            return found("contiguous", "refused", error=told(error))
        if not ctx.near(out, ctx.out):
            return found("contiguous", "differs")
    return passed("contiguous")


# --- registered, moved, saved ---------------------------------------------------------------------


def runs(ctx: ProbeContext) -> Finding | None:
    """Names that nothing defines, on a path that no call here takes."""
    return next(read_off(ctx.subject.caller.target, "runs"), None)


def registered(ctx: ProbeContext) -> Finding | None:
    """No modules, parameters or tensors that nn.Module does not see."""
    module = ctx.subject.module
    if module is None:
        return None
    for name, members in unregistered(module):
        what = "module" if any(isinstance(m, nn.Module) for m in members) else "parameter"
        wanted = "ModuleList" if what == "module" else "ParameterList"
        return found("registered", "list", name=name, what=what, wanted=wanted)
    if made := _made_in_call(ctx):
        return found("registered", "made", name=made, last=made.lower())
    for name in _constants(ctx):
        way = "drawn" if _is_drawn(ctx, name) else "stays" if _stays(ctx, name) else "tensor"
        return found("registered", way, name=name, last=name.split(".")[-1])
    return passed("registered")


def _made_in_call(ctx: ProbeContext) -> str:
    """The class of a module with parameters that a call makes; empty where it makes none."""
    made: list[str] = []

    def note(module: nn.Module, name: str, parameter: Any) -> None:
        made.append(type(module).__name__)

    hook = register_module_parameter_registration_hook(note)
    try:
        ctx.call(ctx.x)
    finally:
        hook.remove()
    return made[0] if made else ""


def _constants(ctx: ProbeContext) -> list[str]:
    """Tensors that are plain attributes, and not what the last call left there."""
    own = ctx.exact.fresh()
    module = own.module
    assert module is not None

    def plain() -> dict[str, tuple[int, int]]:  # written to, it is a cache
        return {
            f"{path}.{name}" if path else name: (id(value), value._version)
            for path, child in module.named_modules()
            for name, value in vars(child).items()
            if isinstance(value, Tensor) and not name.startswith("_")
        }

    before = plain()
    ctx.call(ctx.x + 1.0, own)
    return [name for name, kept in plain().items() if before.get(name) == kept]


def _stays(ctx: ProbeContext, name: str) -> bool:
    """Whether a call on another device fails for a tensor that was there before the first call, in
    a layer that does not say on which it is built."""
    first, kinds = ctx.exact.uncalled, type(ctx.exact.module).mro()[:-2]  # below nn.Module
    code = "".join(source_of(vars(kind).get("__init__")) for kind in kinds)
    if first is None or re.search("device|cuda", code):
        return False
    try:
        kept = isinstance(attrgetter(name)(first), Tensor)
    except AttributeError:  # the call made it
        return False
    return kept and _elsewhere(ctx.random.untouched()) is not None


def _is_drawn(ctx: ProbeContext, name: str) -> bool:
    """Whether another object of the class holds other numbers in a plain tensor, as weights are."""
    try:
        other = ctx.subject.rebuilt(seed=ctx.subject.seed + 1)
    except Broken:  # which `reload` says
        return False
    first = (ctx.subject.uncalled, None if other is None else other.uncalled)
    try:  # a call may leave something behind
        own, new = (attrgetter(name)(module) for module in first)
    except AttributeError:
        return False
    drawn = isinstance(new, Tensor) and own.is_floating_point() and own.shape == new.shape
    return drawn and not torch.equal(own, new)


def move(ctx: ProbeContext) -> Finding | None:
    """To another device, to float64 and to bfloat16."""
    if makes_tensors(ctx.subject.caller.custom):
        return skipped("move", "The call that you show makes tensors, with no device=x.device.")
    own = ctx.random.untouched()
    fault = _elsewhere(own) or _left_behind(ctx)
    fault = fault or _cast(ctx, torch.float64) or _cast(ctx, torch.bfloat16)
    if fault is None and own.mask_form is not None:  # without one, it may make its own
        fault = _elsewhere(ctx.random.untouched().unmasked())
    return fault or passed("move")


def _left_behind(ctx: ProbeContext) -> Finding | None:
    """What is wrong with a call on another device behind one on the CPU, which may have left
    something there for the next."""
    own, x = ctx.random.untouched(), ctx.random.input()
    kinds = {type(one) for one in own.module.modules()} if own.module is not None else set()
    if own.module is None or COMPARES.search("".join(map(source_of, kinds))):
        return None
    before, first = [*tensors_of(own.module)], ctx.call(x, own)
    if {*map(id, tensors_of(own.module))} <= {*map(id, before)}:
        return None
    if not ctx.near(first, ctx.call(x, own)):  # a cache, say
        return None
    fault = _elsewhere(own)
    if fault is None or fault.severity != "error":
        return None
    if (
        _elsewhere(own, *tensors_of(own.module)) is not None
    ):  # what functions keep, for each device perhaps
        return None
    return found("move", "kept", error=fault.message.partition(": ")[2])


def _cast(ctx: ProbeContext, dtype: torch.dtype) -> Finding | None:
    subject, short = ctx.random.to(dtype), str(dtype).removeprefix("torch.")
    try:
        out = ctx.call(subject.input(), subject)
    except Failed as failure:
        return found("move", "fails", dtype=short, error=told(failure.error))
    return None if out.dtype == dtype else found("move", "stays", dtype=short, out=out.dtype)


def _elsewhere(own: Target, *more: Any) -> Finding | None:
    """What is wrong with a first call on another device, where `more` lies as well: tables that a
    call keeps may be kept for one device, and made anew for the next."""
    home = vars(sys.modules.get(type(own.caller.target).__module__, sys))
    if any(isinstance(one, torch.jit.ScriptFunction) for one in home.values()):
        return None  # which tells nobody where its results are
    x = own.input()
    given = own.mask_for(x)
    there = [x, given, *more, *(everything(own.module) if own.module is not None else ())]
    try:
        with torch.no_grad(), Elsewhere(there):
            if own.module is not None:  # what it makes as it goes into eval mode is made there
                own.module.train()
                own.module.eval()
            if own.projections is None:
                own.caller(x, **given)
            else:
                own.result(x)
    except Exception as error:  # only another device is a fault
        if "device" in str(error):
            one = found("move", "device", error=told(error))
            objects = own.mask_form is not None and own.mask_form.kind == "headwise"
            held = own.module is None or objects  # tensors that nothing here can move
            return replace(one, severity="warning") if held else one
    return None


def reload(ctx: ProbeContext) -> Finding | None:
    """A state saved from one copy and loaded into another."""
    module = ctx.random.module
    if module is None:
        return None
    try:
        other = ctx.subject.rebuilt(seed=ctx.subject.seed + 1)
    except Broken as broken:
        return found("reload", "builds", error=broken)
    other = (other or ctx.subject).fresh()
    assert other.module is not None
    randomise(other.module, 17)
    x = ctx.random.input()
    before = ctx.call(x, ctx.random)  # which may leave something to be saved
    loaded = (other, other.untouched())  # what a call kept of other weights is in the first
    try:
        for one in reversed(loaded):
            if one.module is not None:
                one.module.load_state_dict(copy.deepcopy(module.state_dict()))
    except RuntimeError as error:
        return found("reload", "loads", error=str(error).splitlines()[-1].strip())
    if any(ctx.near(ctx.call(x, one), before) for one in loaded):
        return passed("reload")
    return found("reload", "differs")


# --- training -------------------------------------------------------------------------------------


def train_eval(ctx: ProbeContext) -> Finding | None:
    """Training without dropout is eval."""
    own = ctx.exact.training(0.0)
    if own is None:
        return None
    if ctx.near(ctx.call(ctx.x, own), ctx.out):
        return passed("train-eval")
    module = ctx.subject.module
    if module is not None and ITERATED.search(written_code(module)):
        return skipped("train-eval", "A spectral norm goes on with each call in training.")
    return found("train-eval", "differs")


def _keeping(subject: Target) -> str:
    """The layer that drops as much as it is told to keep; nothing where there is none."""
    built = None
    if "dropout" in subject.roles:
        with contextlib.suppress(Broken, ValueError):  # it wants another call
            built = subject.rebuilt(dropout=GIVEN)
    if built is None or built.module is None:
        return ""
    parts = built.module.named_modules()
    drops = [(name, one.p) for name, one in parts if isinstance(one, nn.Dropout)]
    return next((name for name, p in drops if p == 1 - GIVEN), "")


def _overwritten(own: Target) -> str:
    """What its gradient fails of where what drops numbers writes over what others have kept."""
    try:
        with torch.enable_grad():
            own(own.input().requires_grad_(True)).sum().backward()
    except RuntimeError as error:
        return str(error).split(";")[0] if "inplace operation" in str(error) else ""
    except Exception:  # the other probes say what else fails
        return ""
    return ""


def dropout(ctx: ProbeContext) -> Finding | None:
    """Dropout 0.5: it does something in training, and nothing on average."""
    own = ctx.exact.training(0.5)
    if own is None:
        return None
    if (lost := _overwritten(own)) and not _overwritten(ctx.exact):
        return found("dropout", "inplace", error=lost)
    if name := _keeping(ctx.subject):
        return found("dropout", "kept", name=name, given=GIVEN, kept=1 - GIVEN)
    if other := bent(ctx):
        return skipped("dropout", f"It holds more than attention: {other}.")
    x = ctx.exact.input(tokens=5, batch=1)
    rows = max(16, min(256, 2**26 // (x.numel() * x.shape[-1])))
    calls = 16
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(ctx.subject.seed)
        try:
            draws = [ctx.call(x.expand(rows, -1, -1), own) for _ in range(calls)]
        except Failed as failure:
            if isinstance(failure.error, AttributeError):  # it is made for some dropout alone
                return skipped("dropout", "Its dropout has to be said as it is built.")
            raise
    means = torch.stack([draw.mean(0) for draw in draws]).double()
    if bool((means.std(0) == 0).all()):
        return found("dropout", "nothing")
    expected = ctx.call(x)[0].double()
    error = means.std(0) / calls**0.5
    gap = (means.mean(0) - expected).abs()
    if bool((gap <= 9 * error + 1e-6 * expected.abs().max()).all()):
        return passed("dropout")
    first = [*takewhile(lambda call: call.name != "softmax", recorded(own, x, dropless=False))]
    before = [call.square for call in first if call.drops]
    one = found("dropout", "average")  # of scores; queries and keys may be dropped on purpose
    return replace(one, severity="warning") if before and not any(before) else one

"""Probes of how a layer is handled: moved, saved, trained, called on other memory; and advice."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..findings.verdict import Finding
from ..target.names import building_role
from ..target.subject import Broken, Subject, copied, randomise, told
from .behaviour import bent
from .probe_context import Failed, Lab, failed, passed, skipped


def deterministic(lab: Lab) -> Finding | None:
    """Twice the same in eval mode."""
    for subject in (lab.exact, _dropping(lab)):
        if subject is None:
            continue
        first, second = (lab.call(lab.x, subject).nan_to_num() for _ in range(2))
        if not lab.near(first, second):
            break
    else:
        return passed("deterministic")
    return failed(
        "deterministic",
        "In eval mode two calls on the same input give different outputs.",
        "Dropout is active in eval: F.dropout(weights, p) needs training=self.training; or use "
        "nn.Dropout, which model.eval() switches off.",
    )


def _dropping(lab: Lab) -> Subject | None:
    """A copy in eval mode with dropout 0.5; None where it has no dropout."""
    own = None
    if "dropout" in lab.subject.roles:
        with contextlib.suppress(Broken, ValueError):
            own = lab.subject.rebuilt(dropout=0.5)
    own = own.double() if own is not None else _training(lab, 0.5)
    if own is not None and own.module is not None:
        own.module.eval()
    return own if own is not None and own.dtype == lab.exact.dtype else None


def input_kept(lab: Lab) -> Finding | None:
    """x is the same after the call."""
    if lab.exact.projections is not None:
        return _inputs_of_function_kept(lab)
    x = lab.x.clone()
    with torch.no_grad():
        try:
            lab.exact.caller(x, **lab.exact.mask_for(x))
        except Exception as error:
            raise Failed(f"x {list(x.shape)}", error) from error
    if torch.equal(x, lab.x):
        return passed("input-kept")
    return failed(
        "input-kept",
        "After the call, x is no longer what it was.",
        "x += …, x.mul_(…) and x[…] = … write into the caller's tensor: write x = x + ….",
    )


def _inputs_of_function_kept(lab: Lab) -> Finding:
    heads, dim = lab.subject.num_heads, lab.subject.head_dim or 8
    groups = lab.subject.num_kv_heads or heads
    given = [torch.randn(2, n, 7, dim, dtype=lab.x.dtype) for n in (heads, groups, groups)]
    q, k, v = (t.clone() for t in given)
    lab.exact.attend(q, k, v, **lab.exact.mask_for(lab.x))
    kept = all(torch.equal(a, b) for a, b in zip((q, k, v), given, strict=True))
    if kept:
        return passed("input-kept")
    return failed(
        "input-kept",
        "After the call, q, k or v is no longer what it was.",
        "q *= …, scores.mul_(…) on a view and k[…] = … write into the caller's tensor.",
    )


def contiguous(lab: Lab) -> Finding | None:
    """The same numbers in another memory order."""
    if lab.exact.projections is not None:
        return None  # every function of q, k and v gets transposed views in all probes
    for x in (
        lab.x.transpose(0, 1).contiguous().transpose(0, 1),
        torch.stack((lab.x, lab.x), dim=-1)[..., 0],
    ):
        try:
            with torch.no_grad():
                out = lab.exact.caller(x, **lab.exact.mask_for(x)).out
        except Exception as error:
            return failed(
                "contiguous",
                f"An input that is a transposed view is refused: {told(error)}.",
                "Use reshape instead of view.",
                severity="warning",
            )
        if not lab.near(out, lab.out):
            return failed(
                "contiguous",
                "An input in another memory order (a transposed view) gives another output.",
                "Use reshape instead of view or as_strided, or call x.contiguous() first.",
            )
    return passed("contiguous")


# --- registered, moved, saved ---------------------------------------------------------------------


def registered(lab: Lab) -> Finding | None:
    """No modules, parameters or tensors that nn.Module does not see."""
    module = lab.subject.module
    if module is None:
        return None
    loose = list(_loose(module)) + _constants(lab)
    if not loose:
        return passed("registered")
    name, what = loose[0]
    if what == "tensor":
        return failed(
            "registered",
            f"{name} is a plain tensor: .to(device) and .to(dtype) leave it where it is.",
            f"Write self.register_buffer('{name.split('.')[-1]}', …, persistent=False).",
            severity="warning",
        )
    return failed(
        "registered",
        f"{name} is a Python list of {what}s: they are not trained, moved or saved.",
        f"Use nn.{'ModuleList' if what == 'module' else 'ParameterList'} instead of a list.",
    )


def _loose(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Names and kinds of modules and parameters that are not registered."""
    seen = {id(p) for p in (*module.parameters(), *module.modules())}
    for path, child in module.named_modules():
        for name, value in vars(child).items():
            if name.startswith("_"):
                continue
            full = f"{path}.{name}" if path else name
            if isinstance(value, (list, tuple, dict)):
                held = list(value.values()) if isinstance(value, dict) else list(value)
                for kind, of in (("module", nn.Module), ("parameter", nn.Parameter)):
                    if any(isinstance(one, of) and id(one) not in seen for one in held):
                        yield full, kind


def _constants(lab: Lab) -> list[tuple[str, str]]:
    """Tensors that are plain attributes, and not what the last call left there."""
    own = lab.exact.fresh()
    module = own.module
    assert module is not None

    def plain() -> dict[str, int]:
        return {
            f"{path}.{name}" if path else name: id(value)
            for path, child in module.named_modules()
            for name, value in vars(child).items()
            if isinstance(value, Tensor) and not name.startswith("_")
        }

    before = plain()
    lab.call(lab.x + 1.0, own)
    return [(name, "tensor") for name, kept in plain().items() if before.get(name) == kept]


def move(lab: Lab) -> Finding | None:
    """To the device `meta`, to float64 and to bfloat16."""
    fault = _cast(lab, torch.float64) or _cast(lab, torch.bfloat16) or _meta(lab)
    return fault or passed("move")


def _cast(lab: Lab, dtype: torch.dtype) -> Finding | None:
    subject = lab.random.to(dtype)
    x = subject.input()
    short = str(dtype).removeprefix("torch.")
    try:
        out = lab.call(x, subject)
    except Failed as failure:
        return failed(
            "move",
            f"After .to(torch.{short}) the call fails: {told(failure.error)}.",
            "Make masks, scales and positions with dtype=x.dtype, and register as buffers what is "
            "made once.",
            severity="warning",
        )
    if out.dtype == dtype:
        return None
    return failed(
        "move",
        f"After .to(torch.{short}) the output is still {out.dtype}.",
        "Something of a fixed dtype is mixed in; make it with dtype=x.dtype.",
        severity="warning",
    )


def _meta(lab: Lab) -> Finding | None:
    target = copied(lab.random.caller.target)
    if isinstance(target, nn.Module):
        target = target.to("meta")
    own = replace(lab.random, caller=replace(lab.random.caller, target=target))
    try:
        own.result(own.input().to("meta"))
    except Exception as error:  # only another device is a fault: `meta` has no numbers to decide on
        if "device" not in str(error) or "Cannot copy out" in str(error):
            return None
        return failed(
            "move",
            f"On another device the call fails: {told(error)}.",
            "A tensor stays on the CPU: register it with register_buffer, or make it in forward "
            "with device=x.device.",
            severity="warning",
        )
    return None


def reload(lab: Lab) -> Finding | None:
    """A state saved from one copy and loaded into another."""
    module = lab.random.module
    if module is None:
        return None
    try:
        other = lab.subject.rebuilt(seed=lab.subject.seed + 1)
    except Broken as broken:
        return failed(
            "reload", f"Built a second time: {broken}", "See that nothing global changes."
        )
    other = lab.subject.fresh() if other is None else other.fresh()
    assert other.module is not None
    randomise(other.module, 17)
    try:
        other.module.load_state_dict(copy.deepcopy(module.state_dict()))
    except RuntimeError as error:
        return failed(
            "reload",
            f"Its own state_dict does not load: {str(error).splitlines()[-1].strip()}",
            "The names and shapes of parameters must not depend on what was called before.",
        )
    x = lab.random.input()
    if lab.near(lab.call(x, other), lab.call(x, lab.random)):
        return passed("reload")
    return failed(
        "reload",
        "Saved and loaded into a second layer, it gives another output.",
        "Something that matters is no parameter or buffer: nn.Parameter, register_buffer and "
        "nn.ModuleList make it one.",
    )


# --- training -------------------------------------------------------------------------------------


def _set_dropout(module: nn.Module, p: float) -> bool:
    """Sets every dropout of a module; whether there was any."""
    found = False
    for child in module.modules():
        if isinstance(child, nn.modules.dropout._DropoutNd):
            child.p, found = p, True
        for name, value in vars(child).items():
            number = isinstance(value, float) and not isinstance(value, bool)
            if number and building_role(name) == "dropout" and name != "p":
                setattr(child, name, p)
                found = True
    return found


def _training(lab: Lab, p: float) -> Subject | None:
    """A copy in training mode with dropout p; None where it has no dropout."""
    own = lab.exact.fresh()
    if own.module is None:
        return None
    found = _set_dropout(own.module, p)
    if p and not found:
        return None
    own.module.train()
    return own


def train_eval(lab: Lab) -> Finding | None:
    """Training without dropout is eval."""
    own = _training(lab, 0.0)
    if own is None:
        return None
    if lab.near(lab.call(lab.x, own), lab.out):
        return passed("train-eval")
    return failed(
        "train-eval",
        "In training mode the output differs from eval, though nothing is dropped.",
        "Is the mask, the scale or a projection used under `if self.training`? Or is dropout "
        "written with a fixed number, F.dropout(x, 0.1)?",
    )


def dropout(lab: Lab) -> Finding | None:
    """Dropout 0.5: it does something in training, and nothing on average."""
    own = _training(lab, 0.5)
    if own is None:
        return None
    if bent(lab):
        return skipped("dropout", f"It holds more than attention: {bent(lab)}.")
    x = lab.exact.input(tokens=5, batch=1)
    rows = max(16, min(256, 2**26 // (x.numel() * x.shape[-1])))
    calls = 16
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(lab.subject.seed)
        draws = [lab.call(x.expand(rows, -1, -1), own) for _ in range(calls)]
    means = torch.stack([draw.mean(0) for draw in draws]).double()
    if bool((means.std(0) == 0).all()):
        return failed(
            "dropout",
            "Dropout of 0.5 changes nothing in training.",
            "Call it on the weights, after the softmax: weights = self.dropout(weights).",
            severity="warning",
        )
    expected = lab.call(x)[0].double()
    error = means.std(0) / calls**0.5
    gap = (means.mean(0) - expected).abs()
    if bool((gap <= 9 * error + 1e-6 * expected.abs().max()).all()):
        return passed("dropout")
    return failed(
        "dropout",
        "On average over many runs, the output with dropout is not the one without.",
        "Drop weights after the softmax, with nn.Dropout, which divides the others by 1 − p; not "
        "scores, queries or keys before it.",
    )

"""Follow the step `gpt2`: one matrix for q, k and v, heads split and merged by hand.

Parts are judged by what they give, whatever library made it. Where they run one at a time, on
PyTorch, `give` calls them; what a variant has run already stands in `outputs` of `trial.made`. The
inputs are x `[B, T, E]`, and q, k and v `[B, H, T, D]`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from .. import check
from ..files.syntax import quoted
from ..findings.rules import ALL, found, passed
from ..findings.verdict import Finding
from .base import StepPart, Test, Trial, hidden_wrongly, judge_shape, shape_of, step
from .blame import agrees
from .hints import laid
from .naming import from_heads, is_right
from .watching import Given, watched

# The tutorial's sizes, in which no two axes are alike; and those of the whole.
B, T, E, H, D = 2, 8, 768, 12, 64
WIDTH, HEADS = 24, 3
OWNER = "GPT2MultiHeadAttention"
MASKS = (  # in the order of `hidden_wrongly`
    "it hides the token itself, too",
    "it lets every token see the next one",
    "it hides the past and shows the future",
    "it hides the past and the token itself",
    "it hides nothing",
)
LIE = (("right", "t h d"), ("view", "h t d"), ("turns", "t d h"))
"""How a row's numbers lie before the heads are split, and how common mistakes take them."""


def config(width: int = E, heads: int = H) -> Any:
    """GPT-2's own sizes, or small ones; every name that its configuration has."""
    sizes = {"n_embd": width, "n_head": heads, "n_layer": 12, "n_positions": 1024, "n_ctx": 1024}
    drops = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
    rest = {"n_inner": None, "vocab_size": 50257, "layer_norm_epsilon": 1e-5}
    return SimpleNamespace(**sizes, **drops, **rest)


def calls(
    trial: Trial, layer: Any, x: Any, q: Any, k: Any, v: Any
) -> Mapping[str, Callable[..., Any]]:
    """How each part is called."""

    def mask(queries: int, cached: int) -> Any:
        return trial.get("causal_mask")(queries, cached, dtype=q.dtype, device=q.device)

    return {
        "causal_mask": lambda: mask(T, 0),
        "causal_mask cached": lambda: mask(3, 2),
        "c_attn": lambda: layer.c_attn(x),
        "c_proj": lambda: layer.c_proj(x),
        "_split_heads": lambda: layer._split_heads(x, H, D),
        "_merge_heads": lambda: layer._merge_heads(q, H, D),
        "_attn": lambda: layer._attn(q, k, v),
        "forward": lambda: layer(x),
    }


def inputs(trial: Trial) -> list[Tensor]:
    """The inputs of all parts, the same every time."""
    if "inputs" not in trial.made:
        trial.made["inputs"] = [torch.randn(B, T, E), *torch.randn(3, B, H, T, D)]
    return trial.made["inputs"]


def give(trial: Trial, name: str) -> Any:
    """What a part gives for the inputs; what it raises is raised."""
    if "outputs" in trial.made:
        out = trial.made["outputs"][name]
        if isinstance(out, Exception):
            raise out
        return out

    def call(one: Trial) -> Any:
        if one is not trial and "layer" not in one.made and "layer" in trial.made:
            one.made["layer"] = one.get(OWNER)(config()).eval()
            one.made["layer"].load_state_dict(trial.made["layer"].state_dict())
        try:
            return calls(one, one.made.get("layer"), *(x.clone() for x in inputs(trial)))[name]()
        except TypeError:
            if not name.startswith("causal_mask"):
                raise
            # without these keywords is as good
            return one.get("causal_mask")(*((3, 2) if name.endswith("cached") else (T, 0)))

    short = name.partition(" ")[0]
    part = next(one for one in trial.step.parts if one.short == short)
    return watched(trial, part, {"B": B, "T": T, "E": E, "H": H, "D": D}, call)


def _built(trial: Trial, part: StepPart) -> list[Finding]:
    torch.manual_seed(0)
    layer = trial.get(OWNER)(config())
    if not isinstance(layer, nn.Module):
        return [found(part.rule, "module", owner=OWNER)]
    trial.made["layer"] = layer.eval()
    return judge_sizes(layer)


def judge_sizes(layer: Any) -> list[Finding]:
    """The three numbers that the rest of the class is written with."""
    right = {
        "embed_dim": (E, "config.n_embd"),
        "num_heads": (H, "config.n_head"),
        "head_dim": (D, "self.embed_dim // self.num_heads"),
    }
    if hasattr(layer, "split_size"):
        right["split_size"] = (E, "self.embed_dim")
    wrong = []
    for name, (value, source) in right.items():
        if (own := getattr(layer, name, None)) != value or isinstance(own, float):
            words = {"name": name, "value": value, "source": source, "sizes": "GPT-2's sizes"}
            said = "is missing" if own is None else f"is {own}"
            wrong.append(found("step-sizes", "number", said=said, **words))
    return wrong or [passed("step-sizes", f"{E} features are {H} heads of {D}.")]


def _projection(trial: Trial, part: StepPart) -> Finding:
    packed, out = part.short == "c_attn", give(trial, part.short)
    own = getattr(trial.made.get("layer"), part.short, None)
    if isinstance(own, nn.Linear) and own.bias is None:
        return found(part.rule, "names", has=f"no {part.short}.bias", wants="one")
    given, want = (B, T, E), (B, T, 3 * E if packed else E)
    what = "queries, keys and values" if packed else "the output"
    times = "3 * self.embed_dim" if packed else "self.embed_dim"
    hint = f"It is a linear layer from self.embed_dim to {times}, with a bias."
    said = f"`{part.short}` makes {what}: {given} to {want}."
    return judge_shape(part, out, given, want, said, name=part.short, hint=hint)


def _moved(trial: Trial, part: StepPart) -> Finding:
    """`_split_heads`, or `_merge_heads`, which undoes it: shape first, then numbers."""
    x, heads, *_ = inputs(trial)
    if part.short == "_split_heads":
        given, sizes = x, {"t": T, "h": H, "d": D}
        right = {w: rearrange(x.flatten(1), f"b ({lie}) -> b h t d", **sizes) for w, lie in LIE}
    else:
        given = heads
        right = {w: rearrange(heads, f"b h t d -> b ({lie})").view(B, T, E) for w, lie in LIE}
    out, want = give(trial, part.short), tuple(right["right"].shape)
    words = {"got": shape_of(out), "given": tuple(given.shape), "want": want}
    if words["got"] == str(want):
        same = (way for way, other in right.items() if torch.allclose(out, other))
        return found(part.rule, next(same, "numbers"), **words)
    shapes = {(B, T, H, D): "behind", (B, H, D, T): "swapped", (B, H * T, D): "joined"}
    shapes = {str(shape): way for shape, way in (shapes | {words["given"]: "whole"}).items()}
    way = shapes.get(words["got"], "shape")
    return found(part.rule, way if way in ALL[part.rule].ways else "shape", **words)


def _mask(trial: Trial, part: StepPart) -> Finding:
    mask = give(trial, part.short)
    if shape_of(mask) != str((T, T)):
        return found(part.rule, "shape", T=T, got=shape_of(mask), want=(T, T))
    if mask.dtype == torch.bool:
        return found(part.rule, "boolean")
    hidden = mask <= -1e4
    wrong = hidden_wrongly(hidden)
    if not bool((mask[~hidden] == 0).all()) or wrong == len(MASKS):
        return found(part.rule, "numbers")
    if wrong is not None:
        return found(part.rule, "other", said=MASKS[wrong])
    try:  # three new tokens after two that are cached: a mask aligned to the start is a trap
        cached = give(trial, f"{part.short} cached")
        aligned = tuple(cached.shape) == (3, 5) and bool((cached[-1] == 0).all())
    except Exception:
        cached, aligned = None, False
    if isinstance(cached, Tensor) and tuple(cached.shape) != (3, 5):
        at = _mask_at(trial, part, lambda one: one.shape == [*cached.shape])
        said = f"`causal_mask(3, 2)` gives {[*cached.shape]}; it should be [3, 5]{at}."
        hint = "It does no harm in this step. A row for each new query, a column for each key."
        return Finding(part.rule, "warning", said, hint)
    if not aligned:
        return _told_where(found(part.rule, "cached"), _mask_at(trial, part))
    if bool((mask[hidden] > -torch.inf).any()):
        at = _mask_at(trial, part, _is_low)
        return _told_where(found(part.rule, "finite"), at)
    if "outputs" not in trial.made and (got := _other_dtype(trial)) is not None:
        at = _mask_at(trial, part, lambda one: len(one.shape or ()) == 2)
        said = f"`causal_mask` is called with dtype=torch.float64, and gives {got}{at}."
        hint = "Hand it on where the matrix is made: `dtype=dtype, device=device`."
        return Finding(part.rule, "warning", said, hint)
    return passed(part.rule, f"`{part.short}` hides what comes later with -inf, and nothing else.")


def _mask_at(
    trial: Trial, part: StepPart, is_meant: Callable[[Given], bool] = lambda one: False
) -> str:
    """The line that is the first to make something that is meant, or else the one that returns."""
    watch = trial.watch
    if watch is None or watch.function is None:
        return ""
    lines = [one.line for one in watch.given if is_meant(one)]
    return f" ({quoted(trial.path, [*lines, watch.line][0])})"


def _is_low(one: Given) -> bool:
    """Whether a matrix, or a number, holds what hides: a number far below 0."""
    return one.value is not None and bool((one.value.numbers <= -1e4).any())


def _told_where(finding: Finding, at: str) -> Finding:
    return replace(finding, message=f"{finding.message.rstrip('.')}{at}.")


def _other_dtype(trial: Trial) -> torch.dtype | None:
    """What a mask is made of that was to be of float64; None where it is, or takes no dtype."""
    try:
        got = trial.get("causal_mask")(3, 0, dtype=torch.float64, device=None).dtype
    except Exception:  # without this keyword is as good
        return None
    return None if got == torch.float64 else got


def _forward(trial: Trial, part: StepPart) -> Finding:
    out = give(trial, part.short)
    if shape_of(out) != str((B, T, E)):
        return found(part.rule, "kept", got=shape_of(out), given=(B, T, E))
    if agrees(trial, out):
        return passed(part.rule, f"`forward` keeps the shape: {(B, T, E)}.")
    errors = [one for one in _whole(trial, part) if one.severity == "error"]
    return laid(trial, part, errors[0] if errors else None, found(part.rule, "other"))


def attention_test(fault: Callable[[Trial, Tensor], Finding | None]) -> Test:
    """The test of `_attn`: its shape, whether it is right, and the `fault` where it is not."""

    def test(trial: Trial, part: StepPart) -> Finding:
        out, want = give(trial, part.short), (B, H, T, D)
        out = out[0] if isinstance(out, tuple) else out
        if shape_of(out) != str(want):
            return found(part.rule, "shape", got=shape_of(out), want=want, hint=part.hint)
        if is_right(from_heads(*inputs(trial)[1:]), out):
            return passed(part.rule, f"`_attn` computes attention in every head: {want}.")
        if one := fault(trial, out):
            one = replace(one, message=f"`_attn` does not compute attention. {one.message}")
        return laid(trial, part, one, found(part.rule, "numbers", hint=part.hint))

    return test


def _fault(trial: Trial, out: Tensor) -> Finding | None:
    """The mistake in `_attn`, by its name where it has one."""
    small = trial.get(OWNER)(config(WIDTH, HEADS)).eval()

    def attn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = small._attn(q, k, v)
        return out[0] if isinstance(out, tuple) else out

    errors = check(attn, embed_dim=WIDTH, num_heads=HEADS, causal=True).errors
    return errors[0] if errors else None


def _whole(trial: Trial, part: StepPart) -> Iterable[Finding]:
    torch.manual_seed(0)
    layer = trial.get(OWNER)(config(WIDTH, HEADS))
    return check(layer, embed_dim=WIDTH, num_heads=HEADS, causal=True).results


TESTS: dict[str, Test] = {
    "causal_mask": _mask,
    "built": _built,
    "projection": _projection,
    "moved": _moved,
    "attn": attention_test(_fault),
    "forward": _forward,
    "whole": _whole,
}
GPT2 = step("gpt2", TESTS)

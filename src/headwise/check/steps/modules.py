"""Test the steps `per_head`, `split` and `gpt2`, which are written as PyTorch modules."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from .. import check
from ..verdict import Finding
from .base import Step, StepCall, StepPart, Trial, Wrong, step
from .blame import Search
from .tracing import HIDDEN, Watch

# All axes of a tensor have different sizes.
B, T, H, D = 2, 7, 3, 8
E, D_IN, CONTEXT, DROPOUT = H * D, 20, 16, 0.25
SIZES = {"B": B, "T": T, "H": H, "D": D}
HEAD, WRAPPER = "CausalAttention", "MultiHeadedAttentionWrapper"
WHOLE, GPT = "MultiHeadAttn", "GPT2MultiHeadAttention"
OF_HEADS = {"_split_heads": "x", "_merge_heads": "q", "_attn": "qkv"}


def config() -> Any:
    """Return GPT-2's configuration, with all of its fields."""
    drops = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
    rest = {"n_layer": 12, "n_positions": 1024, "n_ctx": 1024, "n_inner": None, **drops}
    rest |= {"vocab_size": 50257, "layer_norm_epsilon": 1e-5}
    return SimpleNamespace(n_embd=E, n_head=H, **rest)


def build(one: Trial, owner: str, d_in: int = D_IN, biased: bool = False) -> nn.Module:
    """Create a layer with the tutorial's arguments; if `biased`, with biases and dropout."""
    kind = one.get(owner)
    if owner == GPT:
        return kind(config())
    widths = {HEAD: (D,), WRAPPER: (D, H), WHOLE: (E, H)}[owner]
    heads = widths[1:]
    takes = biased and "qkv_bias" in inspect.signature(kind).parameters
    dropout = DROPOUT if biased else 0.0
    return kind(d_in, widths[0], CONTEXT, dropout, *heads, **({"qkv_bias": True} if takes else {}))


def layer_of(one: Trial, owner: str, biased: bool = False) -> Any:
    """Return the layer of a trial, with random weights that equal those of its twin."""
    key = f"{owner}, biased" if biased else owner
    if key not in one.results:
        torch.manual_seed(0)
        one.results[key] = build(one, owner, biased=biased)
        for weight in getattr(one.results[key], "parameters", list)():
            nn.init.normal_(weight, std=0.3)
    layer, theirs = one.results[key], one.results.get("of", one)
    linears = [each for each in getattr(layer, "named_modules", list)() if hasattr(each[1], "bias")]
    for name, own in linears if theirs is not one and key in theirs.results else ():
        with contextlib.suppress(Exception), torch.no_grad():  # reported elsewhere
            other = theirs.results[key].get_submodule(name)
            bias = other(torch.zeros(1, own.in_features))
            own.weight.copy_((other(torch.eye(own.in_features)) - bias).T)
            if own.bias is not None:
                own.bias.copy_(bias[0])
    return layer.train(biased) if isinstance(layer, nn.Module) else layer


def inputs() -> dict[str, Tensor]:
    """Return new input tensors for all parts, with the same values in every call."""
    draw = torch.Generator().manual_seed(1)
    sizes = {"in": (B, T, D_IN), "x": (B, T, E), **dict.fromkeys("qkv", (B, H, T, D))}
    return {name: torch.randn(size, generator=draw) for name, size in sizes.items()}


def call_part(layer: Any, name: str, given: dict[str, Any]) -> Any:
    """Call a method or a layer with its inputs; if `_attn` returns a tuple, keep the first item."""
    taken = [given[key] for key in OF_HEADS.get(name, "x")]
    sizes = (H, D) if name in ("_split_heads", "_merge_heads") else ()
    out = (layer if name == "forward" else getattr(layer, name))(*taken, *sizes)
    return out[0] if isinstance(out, tuple) and name == "_attn" else out


def _calls(trial: Trial, part: StepPart) -> Iterator[StepCall]:
    owner, short = part.owner, part.short
    settings = (False, True)[: 1 + (GPT not in (owner, short))]  # biased, with dropout
    if short == "causal_mask":
        yield StepCall(lambda one: mask_of(one, T, 0))
        words = "With 2 cached tokens, "
        yield StepCall(lambda one: mask_of(one, 3, 2), "warning", words, part.hints["cached"][0])
    elif not owner:
        for biased in settings:
            yield StepCall(lambda one, biased=biased: layer_of(one, short, biased))
    elif short in (*OF_HEADS, "forward"):

        def call(one: Trial, biased: bool = False) -> Any:
            layer, given = layer_of(one, owner, biased), inputs()
            given["x"] = given["x" if owner == GPT else "in"]
            torch.manual_seed(0)
            return call_part(layer, short, given)

        yield StepCall(call)
        if settings[1:] and part.name not in trial.blank:  # else the dropout line is unknown
            hint = "Apply dropout once, to the weights: `self.dropout(weights)` after the softmax."
            yield StepCall(lambda one: call(one, True), words="In training, ", hint=hint)


def mask_of(one: Trial, queries: int, cached: int) -> Any:
    """Call `causal_mask`, with `dtype` and `device` if it takes them."""
    how = {"dtype": torch.float32, "device": torch.device("cpu")}
    takes = inspect.signature(one.get("causal_mask")).parameters
    kept = {name: value for name, value in how.items() if name in takes}
    return one.get("causal_mask")(queries, cached, **kept)


def wrong_size(part: StepPart, own: Any, right: Any) -> Wrong | None:
    """Return a fault for the first integer attribute that differs from the twin's, if any."""
    for name, value in vars(right).items():
        got = getattr(own, name, value)
        if type(value) is int and (type(got) is not int or got != value):
            return Wrong(f"{part.name}.{name}", f"`self.{name}` is {got!r}; it should be {value}")
    return None


def _judge(trial: Trial, twin: Trial, part: StepPart, failed: Search | None) -> Wrong | None:
    """Return a fault in the attributes of a class, or in the fill value of a mask."""
    if failed is not None or part.short in (*OF_HEADS, "forward"):
        return None
    if part.short == "causal_mask":
        watch = Watch(trial, part)
        mask = watch.run(lambda one: mask_of(one, T, 0))
        given = [(one.line, one.value) for one in (*watch.events, *watch.returns) if one.value]
        low = [line for line, one in given if bool((one.numbers.clamp(-1e30) < HIDDEN).any())]
        message = "`causal_mask` hides with a large negative number instead of -inf"
        message += ", so keys with large scores stay visible"
        wrong = Wrong((*low, part.name)[0], message, "warning")
        return None if bool(mask.isinf().any()) else wrong
    for biased in (False, True):
        layers = [layer_of(one, part.owner or part.name, biased) for one in (trial, twin)]
        if not part.owner:
            no_module = Wrong(part.name, f"`{part.name}` must be an nn.Module")
            is_module = isinstance(layers[0], nn.Module)
            return wrong_size(part, *layers) if is_module else no_module
        got, want = (_held(layer, part.short) for layer in layers)
        values: list[Any] = [getattr(layer, part.short, None) for layer in layers]
        own, right = values
        given = f" with qkv_bias=True and dropout={DROPOUT}" * (biased and part.owner != GPT)
        is_called = trial.source.calls(trial.names[part.owner], part.short)
        if isinstance(right, nn.Dropout) and own == right.p and not is_called:
            continue  # a probability for F.dropout instead of a module
        if got != want:
            return Wrong(part.name, f"`{part.name}`{given} is {got}; it should be {want}")
        if isinstance(right, Tensor) and not _agree(layers):
            differs = ((own.reshape(right.shape) != 0) != (right != 0)).nonzero().tolist()
            if differs:
                number = own.reshape(right.shape)[tuple(differs[0])]
                message = f"is {number:g} at {differs[0]}; it should be 1 where the key comes later"
                return Wrong(part.name, f"`{part.name}` {message}, and 0 elsewhere")
    return None


def _held(layer: nn.Module, name: str) -> str:
    """Return a description of an attribute: its type and the sizes of its tensors."""
    own: Any = getattr(layer, name, None)
    if name in dict(layer.named_buffers()):
        return f"a buffer of {math.prod(own.shape[-2:])} numbers"
    if not isinstance(own, nn.Module):
        return f"a {type(own).__name__}, neither a module nor a buffer"
    tensors = (*own.parameters(), *own.buffers())
    counts = Counter(str(sorted(one.shape, reverse=True)) for one in tensors)
    held = [f"{count} × {size}" for size, count in counts.items()]
    drops = [f"dropout {one.p:g}" for one in own.modules() if isinstance(one, nn.Dropout)]
    return f"a module of {', '.join(sorted([*held, *drops]))}"


def _agree(layers: list[Any]) -> bool:
    """Return True if two layers compute the same, regardless of attributes."""
    with contextlib.suppress(Exception), torch.no_grad():
        own, right = (layer.eval()(inputs()["in"]) for layer in layers)
        return torch.allclose(own, right, atol=1e-5)
    return False


def _step(name: str, owner: str, **sizes: int) -> Step:
    def final(trial: Trial) -> Iterable[Finding]:
        torch.manual_seed(0)
        return check(build(trial, owner, E), embed_dim=E, num_heads=H, causal=True).results

    return step(name, SIZES | sizes, _calls, final, _judge)


PER_HEAD = _step("per_head", WRAPPER)
SPLIT = _step("split", WHOLE)
GPT2 = _step("gpt2", GPT, E=E)

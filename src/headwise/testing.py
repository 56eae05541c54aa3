"""Assert in a test suite that an attention layer is correct and matches a reference.

from headwise.testing import assert_attention

def test_my_attention():
    assert_attention(
        MyAttention(64, heads=4),
        call=lambda layer, x, keep: layer(x, mask=keep),
        reference=lambda layer, x, keep: slow_attention(layer, x, keep),
    )
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .check import Verdict, check
from .check.build import Request, Sizes, resolve
from .check.call import signature
from .check.masks import learn_causality, learn_forms
from .check.target import Target

__all__ = ["assert_attention"]

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
"""The allowed difference of two results, relative to the largest value; 0.02 in half precision."""


def assert_attention(
    layer: Any,
    *args: Any,
    call: Callable[..., Any] | None = None,
    reference: Callable[..., Any] | None = None,
    tolerance: float | None = None,
    **wanted: Any,
) -> Verdict:
    """Assert that `headwise.check` finds no mistake and that the layer matches a reference.

    Args:
        layer: a module with its weights, or a class with its arguments, as for `headwise.check`.
        call: a function that calls the layer, such as `lambda layer, x, keep: layer(x, mask=keep)`,
            as for `check`. Its parameters `memory`, `keep`, `allow` and `start` are tested.
        reference: a function `lambda layer, x, keep: …` with parameters of `call`, which returns
            the correct output `[B, T, out_dim]` for the same weights. The output and the gradient
            with respect to x are compared for several shapes, with changed later tokens (causality)
            and with changed padded tokens (padding).
        tolerance: the largest difference, relative to the largest value. Default: 1e-4 for float32,
            1e-9 for float64, 0.02 in half precision.
        args, wanted: further arguments of `headwise.check`.

    Returns:
        The verdict, so that a test can inspect its advice.

    Raises:
        AssertionError: the message states the mistake, the fix, and any difference from the
            reference.
        ValueError: a required argument is missing and cannot be inferred.

    >>> import headwise as hw
    >>> mine = torch.nn.MultiheadAttention(24, 3, batch_first=True)
    >>> same = hw.MultiHeadAttention(24, num_heads=3)
    >>> weights = hw.convert(mine.state_dict(), source="torch", target="headwise", num_heads=3)
    >>> _ = same.load_state_dict(weights)
    >>> assert_attention(
    ...     same,
    ...     call=lambda layer, x, keep: layer(x, mask=hw.Padding(keep.sum(-1))),
    ...     reference=lambda layer, x, keep: mine(x, x, x, key_padding_mask=~keep)[0],
    ... ).passed
    True
    """
    __tracebackhide__ = True  # pytest shows the line that called this
    verdict = check(layer, *args, call=call, **wanted)
    if not verdict.passed:
        errors = "\n\n".join(str(one) for one in verdict.errors)
        raise AssertionError(f"{verdict.summary()}\n\n{errors}")
    if reference is not None:
        names = ("embed_dim", "num_heads", "num_kv_heads", "causal")
        sizes = Sizes(**{name: wanted.pop(name, None) for name in names})
        target = resolve(layer, args, wanted, Request(sizes, wanted.pop("seed", 0), call))
        learn_causality(target, any(one.severity == "error" for one in learn_forms(target)))
        allowed = tolerance or TOLERANCE.get(target.dtype, 0.02)
        for case, x, given in _inputs(target):
            _compare(target, reference, case, x, given, allowed)
    return verdict


def _inputs(target: Target) -> Iterator[tuple[str, Tensor, dict[str, Any]]]:
    """Yield a description, an input, and further arguments for each comparison."""
    for batch, tokens in ((2, 7), (1, 1), (3, 5)):
        x = target.input(tokens, batch)
        yield f"x {list(x.shape)}", x, {}
        if batch < 2:
            continue
        later = x.clone()
        later[:, -2:] = 3.0
        yield f"x {list(x.shape)} with other last tokens", later, {}
        draw = torch.Generator().manual_seed(tokens)
        memory = target.input(tokens + 4, batch, seed=8) if "memory" in target.takes else x
        given: dict[str, Any] = {} if memory is x else {"memory": memory}
        if "keep" in target.takes:
            keep = torch.ones(memory.shape[:2], dtype=torch.bool)
            keep[-1, 3:] = False
            yield f"x {list(x.shape)} with padding", x, {**given, "keep": keep}
            if memory is x:
                yield f"x {list(x.shape)} with other padding", later, {"keep": keep}
        if "allow" in target.takes:
            allow = torch.rand(tokens, memory.shape[1], generator=draw) > 0.5
            allow[:, 0] = True
            yield f"x {list(x.shape)} with a mask", x, {**given, "allow": allow}
        elif given:
            yield f"x {list(x.shape)}, memory {list(memory.shape)}", x, given


def _compare(
    target: Target,
    reference: Callable[..., Any],
    case: str,
    x: Tensor,
    given: dict[str, Any],
    tolerance: float,
) -> None:
    """Compare the output and the gradient with respect to x.

    Raises:
        AssertionError: they differ.
    """
    __tracebackhide__ = True
    names = [one.name for one in signature(reference)]
    mine, other = (x.clone().requires_grad_(True) for _ in range(2))
    values = {
        name: given.get(name, _usual(name, x, given)) for name in names if name in target.takes
    }
    first = (target.layer,) if names[:1] == ["layer"] else ()
    rows = (
        given["keep"]
        if "keep" in given and "memory" not in given
        else torch.ones(x.shape[:2]).bool()
    )
    found, right = target(mine, **values), reference(*first, other, **values)
    if found.shape != right.shape:
        raise AssertionError(
            f"{case}: the output is {list(found.shape)}, the reference's {list(right.shape)}"
        )
    pairs = [("the output", found[rows], right[rows])]
    along = torch.randn(found[rows].shape, generator=torch.Generator().manual_seed(1)).to(found)
    if found.requires_grad and right.requires_grad:
        slope = torch.autograd.grad((found[rows] * along).sum(), mine)[0]
        wanted = torch.autograd.grad((right[rows] * along).sum(), other)[0]
        pairs.append(("the gradient at x", slope, wanted))
    for name, one, two in pairs:
        gap, size = (one - two).detach().abs(), two.detach().abs().max().clamp(min=1e-30)
        rounding = 16 * torch.finfo(one.dtype).eps  # a gradient may be 0 up to rounding
        if not bool(gap.max() <= tolerance * size + rounding):  # also True for NaN
            raise AssertionError(
                f"{case}: {name} differs from the reference by {float(gap.max() / size):.2g} of "
                f"its largest value (allowed: {tolerance:g})"
            )


def _usual(name: str, x: Tensor, given: dict[str, Any]) -> Any:
    memory = given.get("memory", x)
    if name == "keep":
        return torch.ones(memory.shape[:2], dtype=torch.bool)
    if name == "allow":
        return torch.ones(x.shape[1], memory.shape[1], dtype=torch.bool)
    return {"memory": x, "start": 0}.get(name)

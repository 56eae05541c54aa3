"""Check the code of an attention layer and report its mistakes.

`check` wraps its argument in a `Target`, probes its behavior, compares it with the definition and
collects the findings in a `Verdict`. It tests the inputs that the call takes, and asks for a call
instead of guessing one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from .verdict import Example, Finding, Verdict

if TYPE_CHECKING:
    from .rules import RULES, explain

__all__ = ["RULES", "Example", "Finding", "Verdict", "check", "explain"]


def __getattr__(name: str) -> Any:
    if name in ("RULES", "explain"):  # loaded on first use
        from . import rules

        return getattr(rules, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def check(
    thing: Any,
    *args: Any,
    embed_dim: int | None = None,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    causal: bool | None = None,
    seed: int = 0,
    call: Callable[..., Any] | None = None,
    **arguments: Any,
) -> Verdict:
    """Check an attention layer and report what to change.

    Args:
        thing: an `nn.Module`; a class or factory, which is built with `args` and `arguments` and
            with default values for its other arguments; or a function of q, k and v.
        embed_dim, num_heads, num_kv_heads: known or required sizes.
        causal: True if later tokens must be hidden. By default it follows from the behavior, a
            flag, a triangular buffer or "causal" in the name.
        seed: the seed of all random numbers.
        call: the call, such as `lambda layer, x, keep: layer(x, mask=keep)`. x is `[B, T, E]`. Its
            other parameters are tested: `memory` `[B, S, E]`, another sequence; `keep` `[B, S]`,
            True = real token; `allow` `[T, S]`, True = may attend; `start`, the position of the
            first token; `past`, the result of the previous call (None at first).

    Returns:
        A verdict with `passed`, `findings` and `results`, which can be printed. The arguments are
        not changed and get no gradients.

    Raises:
        ValueError: a required argument or call cannot be guessed.

    >>> import headwise as hw
    >>> verdict = hw.check(hw.MultiHeadAttention(24, num_heads=3))
    >>> verdict.passed, verdict.findings
    (True, ())
    """
    from .build import Broken, Request, Sizes, resolve
    from .code import name_of
    from .judge import judged

    sizes = Sizes(embed_dim, num_heads, num_kv_heads, causal)
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.enable_grad():
        torch.manual_seed(seed)
        try:
            target = resolve(thing, args, arguments, Request(sizes, seed, call))
        except Broken as broken:
            return Verdict(name_of(thing), (broken.finding,))
        return judged(target)

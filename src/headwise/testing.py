"""For tests of an attention: fails with the words of `headwise.check`.

from headwise.testing import assert_attention

def test_my_attention():
    assert_attention(MyAttention, embed_dim=24, num_heads=3, causal=True)
"""

from __future__ import annotations

from typing import Any

from .check import Verdict, check

__all__ = ["assert_attention"]


def assert_attention(thing: Any, *args: Any, **wishes: Any) -> Verdict:
    """Passes where `headwise.check` finds nothing wrong; warnings do not fail.

    Args:
        thing, args, wishes: as for `headwise.check`.

    Returns:
        The verdict, so that a test may look at its warnings.

    Raises:
        AssertionError: what is wrong, in words, with what to change and the smallest example.
        ValueError: an argument that cannot be worked out, asked for by name.

    >>> import headwise as hw
    >>> assert_attention(hw.MultiHeadAttention, embed_dim=24, num_heads=3).warnings
    ()
    """
    __tracebackhide__ = True  # pytest shows the line that called this, not this one
    verdict = check(thing, *args, **wishes)
    if not verdict.passed:
        found = "\n\n".join(str(one) for one in verdict.errors)
        raise AssertionError(f"{verdict.summary()}\n\n{found}")
    return verdict

"""Numbers from callers, as Python or NumPy types; booleans do not count as numbers."""

from __future__ import annotations

import math
import numbers
from collections.abc import Collection

import torch
from torch import Tensor

from .modes import batched

LONGEST = 1 << 62
"""More keys than a tensor can have, and small enough for 64-bit sums and differences."""


def as_int(value: object) -> int | None:
    """Return a whole number, at most `LONGEST`; `None` for anything else: True, 2.0, "2", a tensor.

    >>> as_int(3), as_int(2**70) == LONGEST, as_int(True), as_int(2.0)
    (3, True, None, None)
    """
    if type(value) is not int and (
        not isinstance(value, numbers.Integral) or isinstance(value, bool)
    ):
        return None
    found = int(value)
    return found if found < LONGEST else LONGEST


def whole_numbers(given: object) -> list[int] | None:
    """Return the whole numbers in a list, a range, a tensor or an array; `None` for others.

    >>> whole_numbers(range(2)), whole_numbers(torch.tensor([3])), whole_numbers([0.5])
    ([0, 1], [3], None)
    """
    listed = given.tolist() if isinstance(given, Tensor) else given
    if not isinstance(listed, Collection) or isinstance(listed, str | bytes):
        return None
    found = [number for one in listed if (number := as_int(one)) is not None]
    return found if len(found) == len(listed) else None


def fault_of_flags(**flags: object) -> str | None:
    """Return a description of the first argument that is neither True nor False.

    >>> fault_of_flags(running=True, padding="no")
    "padding must be True or False, got 'no'"
    """
    for name, value in flags.items():
        if not isinstance(value, bool):
            return f"{name} must be True or False, got {format_value(value)}"
    return None


def check_whole(of: object, name: str, least: int = -LONGEST) -> None:
    """Raise ValueError for a field that is not a whole number or is less than `least`."""
    value = getattr(of, name)
    if (number := as_int(value)) is None or number < least:
        bound = "" if least == -LONGEST else f", at least {least}"
        raise ValueError(
            f"{type(of).__name__}({format_value(value)}): {name} must be a whole number{bound}."
        )


def real(value: object) -> float | None:
    """Return a number as a float, infinite if it overflows; `None` for anything else.

    For example, it is `None` for True, "2", 1j, and tensors with several values or a gradient.

    >>> real(2), real(10**400), real("2"), real(False)
    (2.0, inf, None, None)
    """
    if type(value) is float:
        return value
    if isinstance(value, Tensor):
        fixed = value.is_floating_point() and not value.requires_grad
        single = value.layout == torch.strided and value.numel() == 1
        return float(value) if fixed and single and not (value.is_meta or batched(value)) else None
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    try:
        return float(value)
    except OverflowError:  # whole numbers and fractions beyond the range of a float
        return math.inf


def fault_of_eps(eps: object) -> str | None:
    """Return a description of what is wrong with the eps of the norms of q and k."""
    found = real(eps)
    if found is not None and 0.0 <= found < math.inf:
        return None
    return f"qk_norm_eps must be a finite number of at least 0, got {format_value(eps)}"


def format_value(value: object) -> str:
    """Return a value as one short line."""
    if isinstance(value, Tensor) and value.numel() != 1:
        return f"{value.dtype} {list(value.shape)}"
    if isinstance(value, int) and value.bit_length() > 128:  # Python refuses to print long ones
        return f"a whole number of {value.bit_length()} bits"
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"a {type(value).__name__}"

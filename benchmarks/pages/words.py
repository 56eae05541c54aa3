"""Tables and phrases of generated pages."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence


def prose(text: str) -> str:
    """Return a paragraph in lines of at most 100 letters.

    >>> prose('two\\n   lines')
    'two lines'
    """
    line = " ".join(text.split())
    return textwrap.fill(line, 100, break_long_words=False, break_on_hyphens=False)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table.

    >>> print(table(["a", "b"], [["1", "2"]]))
    | a | b |
    |---|---|
    | 1 | 2 |
    """
    lines = [list(head), *map(list, rows)]
    drawn = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([drawn[0], "|---" * len(head) + "|", *drawn[1:]])


def and_list(words: Iterable[str]) -> str:
    """
    >>> and_list(["1", "2", "4"])
    '1, 2 and 4'
    """
    *others, last = words
    return f"{', '.join(others)} and {last}" if others else last


def interval(middle: float, margin: float) -> str:
    """
    >>> interval(0.0123, 0.02)
    '+0.012 (−0.008 to +0.032)'
    """
    return f"{signed(middle)} ({signed(middle - margin)} to {signed(middle + margin)})"


def signed(value: float) -> str:
    """
    >>> signed(-0.5)
    '−0.500'
    """
    return f"{value:+.3f}".replace("-", "−")


def percent(share: float) -> str:
    """
    >>> percent(0.8751), percent(0.0123), percent(0.01), percent(0.00004)
    ('88 %', '1.2 %', '1 %', '0.004 %')
    """
    digits = 2 if share < 0.995 else 3
    return f"{float(f'{100 * share:.{digits}g}'):g} %" if share > 1e-3 else f"{100 * share:.1g} %"


def spread(ratio: Mapping[str, float]) -> str:
    """Return a ratio with its quartiles.

    >>> spread({"median": 1.5, "low": 1.25, "high": 2.0})
    '1.50 (1.25 to 2.00)'
    """
    return f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"

"""When a head is named: rules as data, and the alarms that they raise over a history."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from ..core.numbers import real, said, whole
from .figures import MAXIMUM, Array, Figures, Heads

Bools = npt.NDArray[np.bool_]

_LEAST_WINDOW = 5
"""A jump is one from so many recorded steps at least."""


@dataclass(frozen=True)
class Alarm:
    """A rule that a head broke at a step: `value` is the figure that broke it.

    >>> print(Alarm(40, "max_logit > 100", "max_logit", "h.2.attn", 3, 817.25))
    step 40: head 3 of h.2.attn: max_logit is 817.2 (max_logit > 100)
    """

    step: int
    rule: str
    statistic: str
    layer: str
    head: int
    value: float

    def __str__(self) -> str:
        layer = self.layer or "the model"
        said = f"{self.statistic} is {self.value:.4g} ({self.rule})"
        return f"step {self.step}: head {self.head} of {layer}: {said}"


@dataclass(frozen=True)
class Rule:
    """A limit for a figure of every head; a head that breaks it, and did not before, is named.

    Give one of `above`, `below` and `jump`. A figure that is not finite breaks `above`. Maxima of a
    few queries are lower bounds, and break nothing.

    Args:
        statistic: the figure's name, such as `"max_logit"` or `"entropy_share"`.
        above, below: the limit, in the figure's unit.
        jump: so many robust deviations (1.4826 · MAD) from the median of the `window` recorded
            steps before, 5 at least; of figures that hardly move, a thousandth of the median
            counts as one.
        steps: broken at so many recorded steps in a row.
        window: recorded steps that a jump is measured by.
        name: what it is called in alarms; by default, what it says.
        then: `"warn"`; `"stop"`, which saves first; or a function that is given the alarm.

    Raises:
        ValueError: no limit or two, or a number out of its range.

    >>> Rule("entropy_share", below=0.01, steps=3).name
    'entropy_share < 0.01 at 3 recorded steps'

    Source: Zhai et al. 2023 (entropy collapse), Dehghani et al. 2023 (logit growth), Xiao et al.
    2023 (sinks), Iglewicz and Hoaglin 1993 (median and MAD).
    """

    statistic: str
    above: float | None = None
    below: float | None = None
    jump: float | None = None
    steps: int = 1
    window: int = 20
    name: str = ""
    then: str | Callable[[Alarm], object] = "warn"

    def __post_init__(self) -> None:
        if not isinstance(self.statistic, str):
            self._refuse("the statistic must be the name of a metric, such as 'entropy'.")
        given = [n for n in ("above", "below", "jump") if getattr(self, n) is not None]
        if len(given) != 1:
            named = " and ".join(given) or "none of them"
            self._refuse(f"{named} given; give one of above, below and jump.")
        limit = real(getattr(self, given[0]))
        if limit is None or not math.isfinite(limit):
            self._refuse(f"{given[0]}={said(getattr(self, given[0]))}: give a finite number.")
        steps, window = whole(self.steps) or 0, whole(self.window) or 0
        if steps < 1 or window < _LEAST_WINDOW or (self.jump is not None and limit <= 0):
            self._refuse(
                f"whole numbers of steps ≥ 1 and window ≥ {_LEAST_WINDOW}, and jump > 0 are needed."
            )
        if not callable(self.then) and self.then not in ("warn", "stop"):
            self._refuse(f"then={self.then!r}: give 'warn', 'stop' or a function of the alarm.")
        if not isinstance(self.name, str):
            self._refuse(f"name={said(self.name)}: give a text.")
        if not self.name:
            object.__setattr__(self, "name", self._said())

    def _refuse(self, why: str) -> NoReturn:
        raise ValueError(f"Rule({said(self.statistic)}, …): {why}")

    def _said(self) -> str:
        if self.jump is not None:
            said = f"{self.statistic} jumps by {self.jump:g} deviations"
        else:
            limit = f"> {self.above:g}" if self.above is not None else f"< {self.below:g}"
            said = f"{self.statistic} {limit}"
        return said + (f" at {self.steps} recorded steps" if self.steps > 1 else "")

    @property
    def reach(self) -> int:
        """How many recorded steps the rule looks at: one more tells whether an alarm is news."""
        return self.steps + 1 + (self.window if self.jump is not None else 0)

    def broken(self, series: Array) -> Bools:
        """Where the last row of `[n, N]` recorded figures breaks the rule; NaN where there is none.

        Figures that were there and are not finite are given as infinite.
        """
        now = series[-1]
        if self.above is not None:
            return now > self.above
        if self.below is not None:
            return now < self.below
        before = series[-1 - self.window : -1]
        if len(before) < _LEAST_WINDOW:
            return np.zeros(len(now), dtype=bool)
        middle = np.median(before, axis=0)
        with np.errstate(invalid="ignore"):  # infinite figures
            spread = 1.4826 * np.median(np.abs(before - middle), axis=0)
            return np.abs(now - middle) > self.jump * np.maximum(spread, 1e-3 * np.abs(middle))


RULES: tuple[Rule, ...] = (
    Rule("max_logit", above=100.0),
    Rule("entropy_share", below=0.005, steps=3, name="entropy collapse"),
    Rule("first", above=0.995, steps=3, name="all sink"),
    Rule("output_norm", below=1e-4, steps=3, name="dead head"),
    Rule("entropy", above=1e3, name="not a finite number"),  # no entropy is as large
)
"""The rules of a `Monitor` that is given none."""


@dataclass(frozen=True)
class Record:
    """What was recorded at a step, by the statistic's name."""

    step: int
    figures: Mapping[str, Figures]


def alarms_at(rules: Sequence[Rule], records: Sequence[Record], heads: Heads) -> list[Alarm]:
    """The alarms of the last of these records, oldest first, which hold all that rules look at.

    A head is named when it has broken a rule at `steps` records in a row, and had not at the one
    before these: so a head that stays beyond a limit is named once.
    """
    names: list[tuple[str, int]] = []
    found = []
    for rule in rules:
        last = records[-1].figures.get(rule.statistic)
        if last is None or (rule.jump is None and not rule.broken(last.values[None]).any()):
            continue  # which is so of most, and spares what came before
        series = _series(rule.statistic, records, sum(heads.values()))
        if series is None or len(series) < rule.steps:
            continue
        ends = range(len(series), max(0, len(series) - rule.steps - 1), -1)
        broken = [rule.broken(series[:end]) for end in ends]
        news = np.logical_and.reduce(broken[: rule.steps])
        if len(broken) > rule.steps:
            news &= ~broken[-1]
        if not news.any():
            continue
        names = names or [(layer, head) for layer, n in heads.items() for head in range(n)]
        for place in np.flatnonzero(news):
            value = float(series[-1, place])
            found.append(Alarm(records[-1].step, rule.name, rule.statistic, *names[place], value))
    return found


def _series(statistic: str, records: Sequence[Record], heads: int) -> Array | None:
    """The recorded figures `[n, N]` that may break rules; `None` if the last record has none."""
    found = [record.figures.get(statistic) for record in records]
    usable = [
        f for f in found if f is not None and (f.kind != MAXIMUM or f.queries == f.of_queries)
    ]
    if not usable or usable[-1] is not found[-1]:
        return None
    return np.stack(
        [f.values if f.data.shape[1] == heads else f.wide(heads).values for f in usable]
    )

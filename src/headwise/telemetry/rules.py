"""Rules as data, and the alarms that they raise over a history."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from ..capture.head_address import head_label
from ..core.numbers import as_int, format_value, real
from .figures import MAXIMUM, Array, HeadMetrics, Heads

Bools = npt.NDArray[np.bool_]

_LEAST_WINDOW = 5
"""The minimum number of recorded steps before a jump."""


@dataclass(frozen=True)
class Alarm:
    """A head broke a rule at a step; `value` is its metric, `number` the index of its layer.

    >>> print(Alarm(40, "max_logit > 100", "max_logit", "h.2.attn", 3, 817.25, 2))
    step 40: L2H3 (h.2.attn): max_logit is 817.2 (max_logit > 100)
    """

    step: int
    rule: str
    statistic: str
    layer: str
    head: int
    value: float
    number: int = field(default=0, compare=False)

    def __str__(self) -> str:
        head = head_label(self.number, self.head)
        head += f" ({self.layer})" if self.layer else ""
        return f"step {self.step}: {head}: {self.statistic} is {self.value:.4g} ({self.rule})"


@dataclass(frozen=True)
class Rule:
    """A limit for a metric of every head; it raises an alarm when a head starts to break it.

    Give one of `above`, `below` and `jump`. A value that is not finite breaks `above`. Maxima of
    sampled queries are lower bounds and break no rule.

    Args:
        statistic: the name of the metric, such as `"max_logit"` or `"entropy_share"`.
        above, below: the limit, in the unit of the metric.
        jump: the limit, in robust deviations (1.4826 · MAD) from the median of the previous
            `window` recorded steps, at least 5. A deviation is at least a thousandth of the median.
        steps: the number of consecutive recorded steps that must break the limit.
        window: the number of recorded steps that a jump is compared with, at least 5.
        name: the name in alarms; by default a description.
        then: `"warn"`; `"stop"`, which saves first; or a function that is called with the alarm.

    Raises:
        ValueError: no limit or more than one is given, or a number is out of range.

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
            self._refuse(f"{named} given; pass exactly one of above, below and jump.")
        limit = real(getattr(self, given[0]))
        if limit is None or not math.isfinite(limit):
            self._refuse(
                f"{given[0]}={format_value(getattr(self, given[0]))}: give a finite number."
            )
        steps, window = as_int(self.steps) or 0, as_int(self.window) or 0
        if steps < 1 or window < _LEAST_WINDOW or (self.jump is not None and limit <= 0):
            self._refuse(
                f"steps must be an integer ≥ 1, window an integer ≥ {_LEAST_WINDOW}, "
                f"and jump above 0."
            )
        if not callable(self.then) and self.then not in ("warn", "stop"):
            self._refuse(f"then={self.then!r}: give 'warn', 'stop' or a function of the alarm.")
        if not isinstance(self.name, str):
            self._refuse(f"name={format_value(self.name)}: give a text.")
        if not self.name:
            object.__setattr__(self, "name", self._description())

    def _refuse(self, why: str) -> NoReturn:
        raise ValueError(f"Rule({format_value(self.statistic)}, …): {why}")

    def _description(self) -> str:
        if self.jump is not None:
            text = f"{self.statistic} jumps by {self.jump:g} deviations"
        else:
            limit = f"> {self.above:g}" if self.above is not None else f"< {self.below:g}"
            text = f"{self.statistic} {limit}"
        return text + (f" at {self.steps} recorded steps" if self.steps > 1 else "")

    @property
    def reach(self) -> int:
        """The number of recorded steps that the rule needs, with one more to detect a new alarm."""
        return self.steps + 1 + (self.window if self.jump is not None else 0)

    def broken(self, series: Array) -> Bools:
        """Return True for heads whose last value of `[n, N]` breaks the rule; NaN never does.

        Other values that are not finite must be passed as infinity.
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
        with np.errstate(invalid="ignore"):  # infinite values
            spread = 1.4826 * np.median(np.abs(before - middle), axis=0)
            return np.abs(now - middle) > self.jump * np.maximum(spread, 1e-3 * np.abs(middle))


RULES: tuple[Rule, ...] = (
    Rule("max_logit", above=100.0),
    Rule("entropy_share", below=0.005, steps=3, name="entropy collapse"),
    Rule("first", above=0.995, steps=3, name="all sink"),
    Rule("output_norm", below=1e-4, steps=3, name="dead head"),
    Rule("entropy", above=1e3, name="not a finite number"),  # larger than any entropy
)
"""The default rules of a `Monitor`."""


@dataclass(frozen=True)
class RecordedStep:
    """The metrics of one step, by the name of the statistic."""

    step: int
    figures: Mapping[str, HeadMetrics]


def alarms_at(rules: Sequence[Rule], records: Sequence[RecordedStep], heads: Heads) -> list[Alarm]:
    """Return the alarms of the last record; the records are oldest first.

    A head raises an alarm when it has broken a rule at exactly `steps` records in a row, so only
    once while it stays beyond a limit.
    """
    names: list[tuple[str, int, int]] = []
    found = []
    for rule in rules:
        last = records[-1].figures.get(rule.statistic)
        if last is None or (rule.jump is None and not rule.broken(last.values[None]).any()):
            continue  # the usual case, without reading earlier records
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
        names = names or [
            (layer, head, number)
            for number, (layer, n) in enumerate(heads.items())
            for head in range(n)
        ]
        for place in np.flatnonzero(news):
            layer, head, number = names[place]
            about = records[-1].step, rule.name, rule.statistic
            found.append(Alarm(*about, layer, head, float(series[-1, place]), number))
    return found


def _series(statistic: str, records: Sequence[RecordedStep], heads: int) -> Array | None:
    """Return the values `[n, N]` that can break rules; `None` if the last record has none."""
    found = [record.figures.get(statistic) for record in records]
    usable = [
        f for f in found if f is not None and (f.kind != MAXIMUM or f.queries == f.of_queries)
    ]
    if not usable or usable[-1] is not found[-1]:
        return None
    return np.stack(
        [f.values if f.data.shape[1] == heads else f.wide(heads).values for f in usable]
    )

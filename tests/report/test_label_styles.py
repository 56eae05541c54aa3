"""Colors and glyphs of labels: told apart by every eye, and legible in both themes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from colors import BLIND, apart, contrast, seen
from headwise.report.catalog import LABEL_STYLES
from headwise.report.head_labels import NO_LABEL, RULES

PANELS = {"light": "#ffffff", "dark": "#1a1d22"}


def test_the_difference_of_colors_is_the_published_one() -> None:
    """Pairs of Sharma, Wu and Dalal 2005, table 1."""
    for one, other, expected in [
        ((50, 2.6772, -79.7751), (50, 0, -82.7485), 2.0425),
        ((50, 2.5, 0), (50, 0, -2.5), 4.3065),
        ((2.0776, 0.0795, -1.1350), (0.9033, -0.0636, -0.5514), 0.9082),
        ((90.8027, -2.0831, 1.4410), (91.1528, -1.6435, 0.0447), 1.4441),
    ]:
        assert apart(np.array(one), np.array(other)) == pytest.approx(expected, abs=1e-4)


def test_every_label_has_a_style_and_a_glyph_of_its_own() -> None:
    assert {style.label for style in LABEL_STYLES} == {rule.label for rule in RULES} | {NO_LABEL}
    assert len({style.glyph for style in LABEL_STYLES}) == len(LABEL_STYLES)


@pytest.mark.parametrize("theme", PANELS)
@pytest.mark.parametrize("blindness", [None, *BLIND])
def test_labels_are_told_apart_by_color(theme: str, blindness: str | None) -> None:
    """Old pairs at 4.3 and 5.9 would fail, and two reds that all eyes saw at 16."""
    least = 17 if blindness is None else 12
    colors = {style.label: seen(getattr(style, theme), blindness) for style in LABEL_STYLES}
    for one, other in itertools.combinations(colors, 2):
        assert apart(colors[one], colors[other]) >= least, (one, other)


@pytest.mark.parametrize("theme", PANELS)
def test_labels_stand_out_from_the_page(theme: str) -> None:
    for style in LABEL_STYLES:
        assert contrast(getattr(style, theme), PANELS[theme]) >= 3, style.label

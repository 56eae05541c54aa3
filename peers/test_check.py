"""`headwise.check` on x-transformers' `Attention`: right, whatever its options."""

from typing import Any

import pytest
from x_transformers.x_transformers import Attention

import headwise as hw


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("flash", [True, False])
@pytest.mark.parametrize("groups", [1, 2, 6])
def test_grouped_heads_are_right(groups: int, flash: bool, causal: bool) -> None:
    sizes = {"heads": 6, "kv_heads": groups, "dim_head": 4, "causal": causal, "flash": flash}
    verdict = hw.check(Attention(24, **sizes), causal=causal)
    # its fused path is not handed the `causal` of a call (attend.py), which the check says
    found = [one for one in verdict.errors if one.message[:26] != "causal=True hides nothing:"]
    assert not found, str(verdict)
    assert verdict.passed or (flash and not causal)
    assert verdict["definition"].severity == "passed"


@pytest.mark.parametrize(
    "options",
    [
        {"num_mem_kv": 2},
        {"qk_norm": True},
        {"gate_values": True},
        {"dropout": 0.1},
        {"one_kv_head": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_its_options_are_no_mistakes(options: dict[str, Any]) -> None:
    verdict = hw.check(Attention(24, heads=3, dim_head=8, causal=True, **options))
    assert verdict.passed, str(verdict)


def test_its_class_is_built_from_names() -> None:
    assert hw.check(Attention, dim=24, heads=3).passed

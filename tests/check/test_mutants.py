"""Every mistake in the table is caught and named first; right implementations are left alone."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headwise.check import Verdict, check
from mutants import STYLES, Mutant, Style, load
from mutants.table import EQUAL, MUTANTS

SILENT = {"registered", "shared-heads"}
"""Rules of mutants that compute the right thing from the wrong weights."""
BARE = SILENT | {"dropout-in-eval", "deterministic", "finite"}
"""Rules that no example of two outputs shows."""


def built(source: str, style: Style, folder: Path, **sizes: Any) -> nn.Module:
    """An instance in float64 and eval mode; the same weights for the same seed."""
    made = load(source, style.name, folder)
    torch.manual_seed(1)
    arguments = {k: v for k, v in (style.arguments | sizes).items() if k != "causal"}
    if not arguments:  # this style takes a config
        from types import SimpleNamespace

        config = SimpleNamespace(n_embd=24, n_head=3, block_size=16, dropout=0.2)
        return made(config).double().eval()
    return made(**arguments).double().eval()


def output(module: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return module(x).nan_to_num()


def checked(mutant: Mutant, folder: Path) -> Verdict:
    thing = load(mutant.source(), STYLES[mutant.style].name, folder)
    return check(thing, **mutant.arguments)


@pytest.mark.parametrize("style", STYLES.values(), ids=STYLES)
def test_the_right_ones_pass(style: Style, tmp_path: Path) -> None:
    verdict = check(load(style.source(), style.name, tmp_path), **style.arguments)
    assert verdict.findings == (), str(verdict)
    assert verdict["definition"].severity == "passed"


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.id)
def test_the_first_finding_names_the_mistake(mutant: Mutant, tmp_path: Path) -> None:
    verdict = checked(mutant, tmp_path)
    assert verdict.passed == (mutant.severity == "warning")
    first = verdict.findings[0]
    assert (first.rule, first.severity) == (mutant.rule, mutant.severity), str(verdict)
    assert re.search(mutant.says, first.message), first.message
    assert first.hint
    if (
        mutant.rule not in SILENT | {"dropout-in-eval", "deterministic", "finite"}
        and not mutant.also
    ):
        assert first.example is not None
        assert 1 <= len(first.example.expected) <= 3


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.id)
def test_a_mutant_is_another_function_of_the_same_weights(mutant: Mutant, tmp_path: Path) -> None:
    if mutant.rule in SILENT:
        pytest.skip("it computes the right thing, and keeps its weights in the wrong way")
    style = STYLES[mutant.style]
    sizes = mutant.sizes
    if "attn_dropout" in style.source() and mutant.rule == "dropout-in-eval":
        sizes = {"attn_dropout": 0.2}
    right = built(style.source(), style, tmp_path, **sizes)
    wrong = built(mutant.source(), style, tmp_path, **sizes)
    with torch.no_grad():
        for weight in right.parameters():
            weight.normal_(std=0.5)
    if not mutant.also:  # else a projection has another shape, and keeps weights of its own
        wrong.load_state_dict(right.state_dict())
    x = torch.randn(2, 7, mutant.arguments.get("d_in", 24), dtype=torch.float64)
    inputs = (x, 100 * x)  # a mask of −10000 is one while scores are small
    assert any((output(right, x) - output(wrong, x)).abs().max() > 1e-3 for x in inputs)


@pytest.mark.parametrize("equal", EQUAL, ids=lambda equal: equal.id)
def test_what_is_equal_is_no_mistake(equal: Mutant, tmp_path: Path) -> None:
    assert equal.says  # why it is equal
    style = STYLES[equal.style]
    right = built(style.source(), style, tmp_path)
    same = built(equal.source(), style, tmp_path)
    same.load_state_dict(right.state_dict())
    x = torch.randn(2, 7, 24, dtype=torch.float64)
    torch.testing.assert_close(output(same, x), output(right, x), rtol=1e-9, atol=1e-9)
    assert checked(equal, tmp_path)["definition"].severity == "passed"


def test_the_table_is_large_and_wide() -> None:
    assert len(MUTANTS) >= 100
    assert len({mutant.id for mutant in MUTANTS}) == len(MUTANTS)
    per_style = [sum(mutant.style == style for mutant in MUTANTS) for style in STYLES]
    assert min(per_style) >= 5
    for rule in {mutant.rule for mutant in MUTANTS}:
        assert rule not in ("", "definition")


def test_a_hint_quotes_the_line(tmp_path: Path) -> None:
    mutant = next(one for one in MUTANTS if one.id == "split: scaled by √T")
    hint = checked(mutant, tmp_path).findings[0].hint
    line = next(
        number
        for number, text in enumerate(mutant.source().splitlines(), 1)
        if "num_tokens**0.5" in text
    )
    assert f"Look at line {line}, " in hint
    assert "attn_scores / num_tokens**0.5" in hint

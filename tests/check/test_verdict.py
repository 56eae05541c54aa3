"""Verdicts: what follows from what, how they print, JSON, notebooks and colors."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

import headwise as hw
from headwise.check import RULES, Example, Finding, Verdict, check, explain
from headwise.check.build import Request, Sizes, resolve
from headwise.check.judge import _joined
from headwise.layers.attention import MultiHeadAttention
from headwise.systems.per_head import NotebookCausalAttention
from headwise.systems.split import MultiHeadAttn

WRONG = check(NotebookCausalAttention, faithful=True)
RIGHT = check(MultiHeadAttn)


def test_the_notebooks_attention_has_one_mistake() -> None:
    (scale,) = WRONG.errors
    assert "root of the sequence length" in scale.message
    assert "keys.shape[1]" in scale.hint
    assert scale.example is not None
    assert not WRONG.passed
    assert WRONG["prefix"].explained_by == scale.rule == "scale"
    assert check(NotebookCausalAttention).passed


def test_a_verdict_survives_json() -> None:
    for verdict in (WRONG, RIGHT):
        text = verdict.to_json()
        assert Verdict.from_json(text) == verdict
        assert str(Verdict.from_json(text)) == str(verdict)
    data = json.loads(WRONG.to_json())
    assert data["passed"] is False
    assert [one["rule"] for one in data["findings"]] == ["scale"]
    assert set(data["findings"][0]) == {
        *("rule", "severity", "message", "hint", "example", "explained_by"),
    }
    assert {one["rule"] for one in data["results"]} >= {"scale", "prefix", "batch", "causality"}
    assert data["unchecked"] == [one.rule for one in WRONG.unchecked]
    assert data["notes"] == list(WRONG.notes)
    odd = Example("x", [[math.nan, 1.0]], [[math.inf, 1.0]], "token 0")
    json.loads(Verdict("f", (Finding("finite", "error", "NaN", example=odd),)).to_json())


def test_a_verdict_fits_on_one_screen() -> None:
    for verdict in (WRONG, RIGHT):
        assert len(str(verdict).splitlines()) < 12
        assert repr(verdict) == f"<Verdict: {verdict.summary()}; print() shows all>"
    first, *lines = str(WRONG).splitlines()
    assert first.startswith("NotebookCausalAttention(dim=24,")
    assert first.endswith(": 1 mistake")
    assert lines[0].startswith("❌ scale: ")
    assert lines[0].endswith("found)")
    assert lines[1].startswith("   Fix: ")
    assert lines[-1].startswith("Observed: causal")
    assert lines[-1].endswith("rules hold (--all lists them)")
    assert str(WRONG).count("❌") == 1
    assert "✅" not in str(WRONG)
    assert "prefix" not in str(WRONG)


def test_every_rule_is_listed_on_demand() -> None:
    text = "\n".join(WRONG.lines(every=True))
    assert "torch.manual_seed(0); x = torch.randn(1, 3, 24, dtype=torch.float64)" in text
    assert "token  expected" in text
    assert "↳ prefix: " in text
    assert "This follows from scale." in text
    assert "✅ batch: Each sequence gives the same output alone as in a batch." in text
    assert text.endswith("rules hold")


def test_what_was_not_tested_is_said() -> None:
    frozen = check(MultiHeadAttention(24, 3).requires_grad_(False))
    assert "– Not tested: gradients. It has no trainable parameters." in str(frozen)
    assert [one.rule for one in frozen.unchecked] == ["gradients"]

    class Shapeless(nn.Module):
        def __init__(self, dim: int) -> None:
            super().__init__()
            self.q = nn.Linear(dim, dim)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.q(x)[:1].expand_as(x) * torch.nan

    text = str(check(Shapeless, 24))
    assert "rules: Skipped until `finite` passes." in text


def test_the_observed_contract_is_stated() -> None:
    assert "causal · 3 heads of 8" in str(RIGHT)
    grouped = check(hw.MultiHeadAttention(48, 6, num_kv_heads=3, rope=hw.RoPE(8)), causal=False)
    assert "6 heads of 8, 3 of keys · rotary" in str(grouped)


def test_colors_and_notebooks() -> None:
    console = Console(width=300, record=True, file=io.StringIO(), force_terminal=True)
    console.print(WRONG)
    text = console.export_text(styles=True)
    assert "❌ scale: " in text
    assert "\x1b[1;31m" in text  # the first line, bold and red
    page = WRONG._repr_html_()
    assert page.count("<table>") == 2
    assert "<details><summary>" in page
    assert "<code>scale</code>" in page
    assert "Observed: causal" in page
    odd = Verdict("f(<b>)", (Finding("scale", "error", "1 < 2", "a & b"),))
    assert "f(&lt;b&gt;)" in odd._repr_html_()
    assert "1 &lt; 2" in odd._repr_html_()


def test_numbers_are_printed_with_as_many_digits_as_they_need() -> None:
    example = Example.of(
        "x = …", torch.tensor([[1.0, 2.0], [1e6, 0.0]]), torch.tensor([[1.0, 2.0], [5.0, 1e-8]])
    )
    assert example.where == "token 1, feature 0: 1.00e+06 expected, 5.0000 found"
    lines = list(example.lines())
    assert lines[0] == "x = …"
    assert "all features" in lines[1]
    assert lines[3].endswith("←")
    wide = Example.of("x", torch.zeros(1, 9), torch.arange(9.0)[None])
    assert "features 5 to 8" in "\n".join(wide.lines())


def test_rules_and_lessons() -> None:
    with pytest.raises(KeyError, match="'color' was not tested; the tested rules are"):
        RIGHT["color"]
    for verdict in (WRONG, RIGHT):
        for one in verdict.results:
            assert one.rule in RULES
            assert explain(one.rule).startswith(f"{one.rule}: ")


def test_the_same_seed_gives_the_same_verdict() -> None:
    assert check(MultiHeadAttn, seed=3) == check(MultiHeadAttn, seed=3)


def test_a_check_makes_so_many_calls() -> None:
    """What takes a check's time."""
    tokens: list[int] = []

    class Counted(MultiHeadAttn):
        def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            tokens.append(x.shape[:-1].numel())
            return super().forward(x, *args, **kwargs)

    assert check(Counted, 768, 768, 256, 0.1, 12).passed
    assert len(tokens) < 250
    assert sum(tokens) < 6000


def test_the_public_names() -> None:
    assert hw.check is check


# ---- what follows from what ----------------------------------------------------------------------


def error(rule: str, message: str = "") -> Finding:
    return Finding(rule, "error", message or f"{rule} is wrong")


def joined(named: list[Finding], probed: list[Finding]) -> list[Finding]:
    target = resolve(MultiHeadAttn, (), {}, Request(Sizes()))
    return _joined(target, named, probed)


def told(findings: list[Finding]) -> list[tuple[str, str | None]]:
    return [(one.rule, one.explained_by) for one in findings]


def test_what_follows_from_a_named_mistake_is_no_finding() -> None:
    found = joined([error("mask-fill")], [error("causality"), error("reload"), error("prefix")])
    assert sorted(told(found)) == [
        ("causality", "mask-fill"),
        ("mask-fill", None),
        ("prefix", "mask-fill"),
        ("reload", None),
    ]
    assert found[0].rule == "mask-fill"
    two = joined([error("head-split"), error("softmax")], [error("batch")])
    assert told(two)[-1][1] in ("head-split", "softmax")
    assert [one.explained_by for one in two][:2] == [None, None]


def test_what_has_nothing_to_do_with_it_stays() -> None:
    found = joined([error("scale")], [error("padding"), error("cache"), error("move")])
    assert not [one for one in found if one.explained_by]


def test_what_no_mistake_explains_yields_to_what_was_seen() -> None:
    vague = error("definition")
    assert told(joined([vague], [])) == [("definition", None)]
    assert told(joined([vague], [error("batch")])) == [("batch", None), ("definition", "batch")]
    order = Finding("order", "warning", "the order counts")
    right = Finding("definition", "passed", "the definition, with rotary positions")
    assert [one.severity for one in joined([right], [order])] == ["passed", "passed"]


def test_one_fault_in_handling_explains_its_followers() -> None:
    found = joined([], [error("registered"), error("reload"), error("move")])
    assert told(found) == [("registered", None), ("reload", "registered"), ("move", "registered")]


@pytest.mark.parametrize("severity", ["error", "warning"])
def test_no_two_findings_explain_each_other(severity: Any) -> None:
    for first in RULES:
        for second in RULES[first].explains:
            both = [replace(error(one), severity=severity) for one in (first, second)]
            found = joined([], both)
            assert any(one.explained_by is None for one in found if one.severity != "passed")


def test_advice_waits_until_nothing_is_wrong() -> None:
    advice = Finding("context", "warning", "too long")
    assert joined([], [advice])[0].severity == "warning"
    (_, waits) = joined([error("scale")], [advice])
    assert waits.severity == "skipped"
    assert waits.message == "Skipped: style advice is shown after all errors are fixed."


def test_one_failing_call_is_one_finding() -> None:
    same = "The call on x [2, 7, 24] fails: RuntimeError: no"
    found = joined([], [error("batch", same), error("cross", same), error("prefix", same)])
    assert [one.severity for one in found].count("error") == 1

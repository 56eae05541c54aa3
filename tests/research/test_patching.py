"""Patching against hooks by hand; its estimate against finite differences; detectors by T×T."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headwise as hw
from headwise.capture import Shift
from headwise.models import GPT, GPTConfig
from headwise.research import detect_heads


def gpt() -> GPT:
    torch.manual_seed(1)
    model = GPT(GPTConfig(vocab_size=23, n_positions=29, n_embd=20, n_layer=2, n_head=2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.eval().double()


GENERATOR = torch.Generator().manual_seed(0)
CLEAN, CORRUPTED = torch.randint(23, (2, 3, 7), generator=GENERATOR)


def metric(logits: Tensor) -> Tensor:
    return logits[:, -1, 5] - logits[:, -1, 9]


def by_hand(model: GPT, layer: int, head: int, places: list[int]) -> Tensor:
    """The metric where what `c_proj` reads of a head is the clean run's."""
    project, kept = model.transformer.h[layer].attn.c_proj, list[Tensor]()
    handle = project.register_forward_pre_hook(lambda _, x: kept.append(x[0]))
    model(CLEAN)
    handle.remove()

    def replace(_: nn.Module, x: tuple[Tensor, ...]) -> tuple[Tensor]:
        new = x[0].clone()
        new[:, places, head * 10 : head * 10 + 10] = kept[0][:, places, head * 10 : head * 10 + 10]
        return (new,)

    handle = project.register_forward_pre_hook(replace)
    found = metric(model(CORRUPTED))
    handle.remove()
    return found


def test_patched_runs_are_those_of_hooks() -> None:
    model, seen = gpt(), list[float]()
    whole = hw.patch(model, CLEAN, CORRUPTED, metric, report=seen.append)
    each = hw.patch(model, CLEAN, CORRUPTED, metric, positions=True)
    torch.testing.assert_close(whole.clean, metric(model(CLEAN)))
    torch.testing.assert_close(whole.corrupted, metric(model(CORRUPTED)))
    assert seen == [0.25, 0.5, 0.75, 1.0]
    for layer in range(2):
        for head in range(2):
            wanted = by_hand(model, layer, head, list(range(7)))
            torch.testing.assert_close(whole.patched[layer, head][:, 0], wanted, rtol=0, atol=1e-10)
            for place in range(7):
                wanted = by_hand(model, layer, head, [place])
                found = each.patched[layer, head][:, place]
                torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10)
    row = each.table()[-1]
    assert (row["layer"], row["head"], row["position"]) == (1, 1, 6)
    assert row["effect"] == pytest.approx(row["patched"] - each.corrupted.mean().item())
    gap = (each.clean - each.corrupted).mean().item()
    assert row["restored"] == pytest.approx(row["effect"] / gap)


def test_the_estimate_is_the_derivative() -> None:
    model = gpt()
    found = hw.patch(model, CLEAN, CORRUPTED, metric, positions=[0, -1])
    source, before = hw.head_outputs(model, CLEAN), hw.head_outputs(model, CORRUPTED)
    assert found.estimate is not None
    assert found.positions == [0, 6]
    for layer in range(2):
        for n, place in enumerate([0, 6]):
            change = source[layer, 1] - before[layer, 1]
            step = 1e-6
            with (
                torch.no_grad(),
                hw.edit(model, {(layer, 1): Shift(step * change, positions=place)}),
            ):
                moved = metric(model(CORRUPTED))
            wanted = (moved - metric(model(CORRUPTED))) / step
            torch.testing.assert_close(
                found.estimate[layer, 1][:, n], wanted.detach(), rtol=1e-4, atol=1e-6
            )
    one = hw.patch(model, CLEAN, CORRUPTED, lambda out: metric(out).mean())
    assert one.patched["L0H1"].shape == one.estimate["L0H1"].shape == (1, 1)
    several = hw.patch(model, CLEAN, CORRUPTED, metric)
    assert one.table()[0]["estimate"] == pytest.approx(several.table()[0]["estimate"])


def test_wrong_input_is_named() -> None:
    model = gpt()
    with pytest.raises(ValueError, match="give texts of the same length"):
        hw.patch(model, CLEAN, CORRUPTED[:, :5], metric)
    with pytest.raises(ValueError, match=r"metric\(output\) gave \[3, 23\]"):
        hw.patch(model, CLEAN, CORRUPTED, lambda out: out[:, -1])
    with pytest.raises(ValueError, match="must be True, False or positions from 0 to 6"):
        hw.patch(model, CLEAN, CORRUPTED, metric, positions=[7])
    with pytest.raises(ValueError, match="is in training mode"):
        hw.patch(model.train(), CLEAN, CORRUPTED, metric)


def score(weights: Tensor, ids: Tensor, kind: str, measure: str, bos: bool, own: bool) -> Tensor:
    """The score of TransformerLens 4.3's `head_detector` for weights `[T, T]`, by its steps."""
    length = len(ids)
    pattern = torch.zeros(length, length).double()
    if kind == "previous_token_head":
        pattern[1:, :-1] = torch.eye(length - 1).double()
    else:
        same = (ids[:, None] == ids).double().fill_diagonal_(0).tril()
        pattern = same if kind == "duplicate_token_head" else same.roll(1, 1)
        if kind == "induction_head":
            pattern[:, 0] = 0
            pattern = pattern.tril()
    differences = (weights - pattern).abs() if measure == "abs" else weights.clone()
    if bos:
        differences[:, 0] = 0
    if own:
        differences.fill_diagonal_(0)
    if measure == "abs":
        return 1 - differences.mean() * length
    return (differences * pattern).sum() / differences.sum()


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("measure", ["mul", "abs"])
@pytest.mark.parametrize("kind", ["previous_token_head", "duplicate_token_head", "induction_head"])
def test_detectors(kind: Any, measure: Any, bos: bool, own: bool) -> None:
    model = gpt()
    ids = torch.randint(4, (2, 13), generator=torch.Generator().manual_seed(2))
    found = detect_heads(
        model, ids, kind, measure=measure, exclude_bos=bos, exclude_current_token=own
    )
    for layer in range(2):
        weights = hw.attention_of(model, ids, layer)
        for row in range(2):
            for head in range(2):
                wanted = score(weights[row, head], ids[row], kind, measure, bos, own)
                torch.testing.assert_close(found[layer, head][row], wanted, rtol=0, atol=1e-10)
    with pytest.raises(ValueError, match="give mul or abs"):
        detect_heads(model, ids, kind, measure="sum")  # type: ignore[arg-type]

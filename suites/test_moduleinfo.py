"""PyTorch's ModuleInfo inputs of `nn.MultiheadAttention` and the transformer layers, watched.

Outputs are bit for bit those of the module alone, and the statistics of `nn.MultiheadAttention`
are those of the weights that it returns.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.common_modules import ModuleInfo, ModuleInput, module_db

import headwise as hw

INFOS = {
    info.name.removeprefix("nn."): info
    for info in module_db
    if "MultiheadAttention" in info.name or "Transformer" in info.name
}
DTYPES = [torch.float32, torch.float64]


def inputs(info: ModuleInfo, dtype: torch.dtype, training: bool) -> Iterator[ModuleInput]:
    torch.manual_seed(0)
    yield from info.module_inputs_func(
        info, device="cpu", dtype=dtype, requires_grad=False, training=training
    )


def module_of(
    info: ModuleInfo, given: ModuleInput, dtype: torch.dtype, training: bool
) -> nn.Module:
    torch.manual_seed(1)
    made = given.constructor_input
    return info.module_cls(*made.args, **made.kwargs).to(dtype).train(training)


def run(module: nn.Module, given: ModuleInput, **more: Any) -> Any:
    torch.manual_seed(2)  # the same numbers are dropped, watched or not
    return module(*given.forward_input.args, **given.forward_input.kwargs | more)


def same(one: Any, two: Any) -> bool:
    """Whether outputs are equal bit for bit, NaN included."""
    if isinstance(one, Tensor):
        return torch.equal(one.isnan(), two.isnan()) and torch.equal(
            one.nan_to_num(), two.nan_to_num()
        )
    if isinstance(one, tuple):
        return all(same(a, b) for a, b in zip(one, two, strict=True))
    return one is two is None


@pytest.mark.parametrize("grad", [True, False], ids=["grad", "no grad"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", INFOS)
def test_outputs_stay(
    name: str, dtype: torch.dtype, training: bool, grad: bool, count: Callable[..., None]
) -> None:
    info = INFOS[name]
    options: list[dict[str, bool]] = [{}]
    if name == "MultiheadAttention":
        options = [
            {"need_weights": need, "average_attn_weights": average}
            for need, average in ((False, False), (True, True), (True, False))
        ]
    for given, more in product(inputs(info, dtype, training), options):
        module = module_of(info, given, dtype, training)
        with nullcontext() if grad else torch.no_grad():
            alone = run(module, given, **more)
            with hw.watch(module, hw.Entropy(), hw.Mass(hw.First(1)), hw.MaxLogit()) as seen:
                watched = run(module, given, **more)
        assert same(alone, watched), (given.constructor_input, given.forward_input, more)
        assert len(seen) >= 1
        count(cases=1)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_statistics_are_those_of_the_weights(
    dtype: torch.dtype, training: bool, count: Callable[..., None]
) -> None:
    info = INFOS["MultiheadAttention"]
    for given in inputs(info, dtype, training):
        module = module_of(info, given, dtype, training)
        statistics = hw.Entropy(), hw.Mass(hw.First(1)), hw.Received()
        with hw.watch(module, *statistics, padding=False) as seen, torch.no_grad():
            _, weights = run(module, given, need_weights=True, average_attn_weights=False)
        figures = seen[seen.modules[0]]
        weights = weights.unsqueeze(0)  # keys without a position come last in both
        entropy = torch.special.entr(weights).sum(-1)
        for ours, theirs in (
            (figures["entropy"], entropy),
            (figures["first"], weights[..., 0]),
            (figures["received"], weights.sum(-2)),
        ):
            assert ours.shape == theirs.shape
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
        count(compared=1)

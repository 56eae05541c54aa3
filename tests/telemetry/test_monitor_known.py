"""`Monitor` on models whose modules tell of their attention: followed without hooks, to the same
records."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks
from torch.utils.checkpoint import checkpoint

import headwise as hw
import headwise.capture.known
from headwise.capture import catch
from headwise.capture.known import known
from headwise.capture.private_torch import modes
from headwise.core.observers import observers
from hugging_cases import CASES
from journeys import moves
from monitored import B, E, Fused, H, batch

Records = list[dict[str, Any]]
UNSEEN = ("bloom", "falcon", "gpt-j")
"""Models with attention code of their own, which only hooks and a function mode see."""


def records(
    model: nn.Module, call: Callable[[], Tensor], steps: int = 3, micro: int = 2, **settings: Any
) -> tuple[Records, list[bool]]:
    """What is recorded of some steps, and whether each was followed without hooks."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    found, light = [], []
    with hw.Monitor(model, optimizer, every=1, rules=(), **settings) as monitor:
        for step in range(steps):
            torch.manual_seed(step)
            for _ in range(micro):
                call().backward()
            light.append(not modes() and not hooks._global_forward_pre_hooks)
            optimizer.step()
            optimizer.zero_grad()
            found.append(dict(monitor.latest))
    return found, light


def check_equal(some: Records, others: Records) -> None:
    for one, other in zip(some, others, strict=True):
        assert list(one) == list(other)
        for name, figures in one.items():
            np.testing.assert_array_equal(figures.data, other[name].data, err_msg=name)
            looked_at = (figures.queries, figures.of_queries)
            assert looked_at == (other[name].queries, other[name].of_queries)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("padded", "queries"), [(False, 4), (True, None)])
def test_records_are_those_of_a_model_that_is_followed_in_full(
    name: str, padded: bool, queries: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[name]
    inputs = case.inputs(padded)

    def run() -> tuple[Records, list[bool]]:
        model = case.model().train()
        return records(model, lambda: model(**inputs)[0].square().mean(), queries=queries)

    found, light = run()
    monkeypatch.setattr(catch, "learn", lambda net: None)
    in_full, never = run()
    assert never == [False] * 3
    assert light == ([False] * 3 if name in UNSEEN else [False, True, True])
    assert found[-1]["entropy"].present.any()
    check_equal(found, in_full)


@pytest.fixture(autouse=True)
def _of_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the models of these tests for those of a library, which attend in one way."""
    libraries = (*headwise.capture.known._LIBRARIES, __name__)
    monkeypatch.setattr("headwise.capture.known._LIBRARIES", libraries)


class Own(nn.Module):
    """A model of headwise's layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([hw.MultiHeadAttention(E, H, dropout=0.1) for _ in range(3)])
        self.kept: Callable[..., Any] | None = None

    def forward(self, x: Tensor, first: int = 0) -> Tensor:
        for layer in self.layers[first:]:
            more = layer(x) if self.kept is None else self.kept(layer, x)
            x = x + more
        return x


@pytest.mark.parametrize("reentrant", [None, True, False])
def test_headwise_layers_need_no_hooks(
    reentrant: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run() -> tuple[Records, list[bool]]:
        torch.manual_seed(0)
        model = Own()
        if reentrant is not None:
            model.kept = lambda layer, x: checkpoint(layer, x, use_reentrant=reentrant)
        return records(model, lambda: model(batch(1)).square().mean(), maxima=True)

    found, light = run()
    monkeypatch.setattr(catch, "learn", lambda net: None)
    check_equal(found, run()[0])
    assert light == [False, True, True]


def trained(model: Own, optimizer: torch.optim.Optimizer, **arguments: Any) -> None:
    model(batch(1), **arguments).square().mean().backward()
    optimizer.step()


def test_a_model_that_changes_before_a_forward_is_followed_in_full_from_there_on() -> None:
    model = Own()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with hw.Monitor(model, optimizer, every=1) as monitor:
        trained(model, optimizer)
        assert not modes()
        model.layers.append(Fused())
        trained(model, optimizer)
        assert tuple(monitor.layers) == tuple(f"layers.{n}" for n in range(4))
        assert monitor.latest["entropy"].present.all()
        model.layers[3].register_forward_hook(lambda *_: None)
        trained(model, optimizer)
        assert monitor.latest["entropy"].present.all()
    assert type(model).__call__ is nn.Module.__call__
    assert not observers


def test_a_forward_in_which_other_modules_attend_makes_the_next_one_followed_in_full() -> None:
    model = Own()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with hw.Monitor(model, optimizer, every=1):
        trained(model, optimizer)
        assert known(model) is not None
        trained(model, optimizer, first=1)
        assert known(model) is None
        trained(model, optimizer, first=1)
        assert modes()  # layer 0 may attend in another way
        trained(model, optimizer)
        assert known(model) is not None
        assert not modes()


def test_a_part_that_is_called_alone_is_recorded() -> None:
    model = Own()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with hw.Monitor(model, optimizer, every=1) as monitor:
        trained(model, optimizer)
        assert not modes()
        model.layers[1](batch(1)).sum().backward()
        optimizer.step()
        assert monitor.latest["entropy"].present.tolist() == [False] * H + [True] * H + [False] * H
        model.eval()
        model.layers[1](batch(1))
        model.train()
        trained(model, optimizer)
        assert monitor.latest["entropy"].of_queries == 3 * B * batch(1).shape[1]


def test_evaluation_and_copies_are_not_counted(tmp_path: Path) -> None:
    model = Own()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with hw.Monitor(model, optimizer, every=1) as monitor:
        trained(model, optimizer)
        assert not modes()
        twin = copy.deepcopy(model)
        torch.save(model, tmp_path / "model.pt")
        twin(batch(2)).sum().backward()
        with torch.no_grad():
            model(batch(3))
        model.eval()(batch(4))
        trained(model.train(), optimizer)
        assert monitor.latest["entropy"].of_queries == 3 * B * batch(1).shape[1]
    loaded = torch.load(tmp_path / "model.pt", weights_only=False).eval()
    assert torch.equal(twin.eval()(batch(2)), loaded(batch(2)))


def test_readings_that_wait_do_not_keep_the_outputs_of_heads() -> None:
    length = 37
    of_heads = (B, H, length, E // H)
    model = Own()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with hw.Monitor(model, optimizer, every=1, queries=None):
        for _ in range(2):
            model(batch(1, length=length)).square().mean().backward()
            gc.collect()
            kept = [x for x in gc.get_objects() if type(x) is Tensor and x.shape == of_heads]
            assert kept == []
            optimizer.step()


def test_a_step_takes_few_moves_between_files() -> None:
    layer = hw.MultiHeadAttention(E, H)
    of_layer = torch.optim.SGD(layer.parameters(), lr=0.0)

    def step() -> None:
        layer(batch(1), mask=hw.Causal()).sum().backward()
        of_layer.step()

    with hw.Monitor(layer, of_layer, every=1):
        assert moves(step) <= 305

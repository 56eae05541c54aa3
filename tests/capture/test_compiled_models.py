"""Compiled models: who refuses them, what their modules are called, and no warning of hooks."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headwise as hw
from monitored import LAYERS, H, Model, T, batch, made


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean((1, 2))


def entered(context: AbstractContextManager[Any]) -> None:
    with context:
        pass


def watched(model: nn.Module) -> object:
    with hw.watch(model, hw.Entropy()) as seen:
        model(batch(0))
    return seen.table()


def ablated(model: nn.Module) -> object:
    with hw.ablate(model, {LAYERS[0]: [0]}):
        return model(batch(0)).tolist()


WATCH: dict[str, Callable[[Any], object]] = {
    "watch": watched,
    "ablate": ablated,
    "importance": lambda model: hw.importance(model, loss, [batch(0)]).table(),
    "ablation_scan": lambda model: hw.ablation_scan(model, loss, [batch(0)]).table(),
    "attention_of": lambda model: hw.attention_of(model, batch(0), layer=LAYERS[0]).tolist(),
}
REFUSE: dict[str, Callable[[Any], object]] = {
    "accelerate": lambda model: entered(hw.accelerate(model)),
    "EntropyFloor": lambda model: entered(hw.EntropyFloor(model)),
}


@pytest.fixture(autouse=True)
def _no_graphs() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def whole() -> Any:
    return torch.compile(made()[0], backend="eager")


def in_part() -> Model:
    model, _ = made()
    model.blocks[0] = torch.compile(model.blocks[0], backend="eager")
    return model


@pytest.mark.slow
@pytest.mark.parametrize("name", WATCH)
@pytest.mark.parametrize("build", [whole, in_part])
def test_a_compiled_model_is_watched_in_graphs_or_as_written(
    name: str, build: Callable[[], Any]
) -> None:
    model, plain = build().eval(), made()[0].eval()
    frames = torch._dynamo.utils.counters["frames"]
    with torch.no_grad():
        before = model(batch(0))
    graphs = dict(frames)
    assert graphs["ok"] > 0
    assert WATCH[name](model) == WATCH[name](plain)
    with torch.no_grad():
        assert torch.equal(model(batch(0)), before)
    captured = name == "watch" and build is whole
    assert frames["ok"] - graphs["ok"] == captured  # else no graph was made anew


@pytest.mark.parametrize("name", REFUSE)
def test_whoever_refuses_a_compiled_model_names_itself_first_of_all(name: str) -> None:
    done = "accelerated" if name == "accelerate" else "watched"
    for model, where in ((whole(), "the model"), (in_part(), "'blocks.0'")):
        said = f"{name}({type(model).__name__}): {where} is compiled by torch.compile, and compiled"
        with pytest.raises(ValueError, match=re.escape(f"{said} code cannot be {done};")):
            REFUSE[name](model)


def test_the_monitor_refuses_a_traced_part_by_its_own_name() -> None:
    model = nn.Sequential(torch.jit.trace(nn.Linear(2, 2), torch.randn(1, 2)))
    with pytest.raises(ValueError, match=r"^Monitor\(Sequential\): '0' is compiled by torch\.jit"):
        hw.Monitor(model)


def test_another_thread_is_refused_for_a_compiled_model() -> None:
    said = r"watched in its own thread; enter headwise\.ablate\(\) in the thread that calls"
    plain, model = made()[0].eval(), in_part()
    with ThreadPoolExecutor(1) as thread, hw.ablate(model, {LAYERS[0]: [0]}):
        with pytest.raises(RuntimeError, match=said):
            thread.submit(model, batch(0)).result()
        model(batch(0))
    with hw.ablate(plain, {LAYERS[0]: [0]}):
        ablated = plain(batch(0))
    with ThreadPoolExecutor(1) as thread, hw.ablate(plain, {LAYERS[0]: [0]}):
        assert torch.equal(thread.submit(plain, batch(0)).result(), ablated)
    assert not torch.equal(plain(batch(0)), ablated)


@pytest.mark.parametrize("build", [whole, in_part])
@pytest.mark.parametrize("given", ["as written", "as named"])
def test_names_have_nothing_of_the_compiler_in_them(build: Callable[[], Any], given: str) -> None:
    model, plain = build().eval(), made()[0].eval()
    x = batch(0)
    raw = next(n for n, m in model.named_modules() if isinstance(m, hw.MultiHeadAttention))
    assert "_orig_mod" in raw
    name = LAYERS[0] if given == "as written" else raw
    with torch.compiler.set_stance("force_eager"):
        with hw.watch(model, hw.Entropy(), modules=name) as seen:
            model(x)
        assert seen.modules == LAYERS[:1]
        assert name in seen
        assert seen[name]["entropy"].shape[1] == H
        with hw.ablate(model, {name: [1]}):
            out = model(x)
        with hw.ablate(plain, {LAYERS[0]: [1]}):
            assert torch.equal(out, plain(x))
        with pytest.raises(ValueError, match=r"no module 'blocks\.0\.won'") as refused:
            entered(hw.ablate(model, {"blocks.0.won": [1]}))
        assert f"{LAYERS[0]!r}" in str(refused.value)
        assert "_orig_mod" not in str(refused.value)
        assert hw.importance(model, loss, [x]).modules == LAYERS
        assert hw.attention_of(model, x, layer=name).shape[1:] == (H, T, T)
        with pytest.raises(ValueError, match=r"those that attend: 'blocks\.0\.own'"):
            hw.attention_of(model, x, layer="blocks.0.won")


def test_a_compiled_layer_is_clipped_by_the_name_that_it_was_watched_by() -> None:
    layer = torch.compile(hw.MultiHeadAttention(24, H), backend="eager")
    with torch.compiler.set_stance("force_eager"), hw.watch(layer, hw.MaxLogit()) as seen:
        layer(50 * batch(0))
    assert hw.qk_clip_(layer, seen, limit=1.0)[""].shape == (H,)


def test_pytorch_warns_of_the_hooks_of_others_alone() -> None:
    model = whole()
    with torch.compiler.set_stance("force_eager"), hw.watch(model):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model(batch(0))
        other = nn.modules.module.register_module_forward_pre_hook(lambda module, x: None)
        try:
            with pytest.warns(UserWarning, match="there are global hooks"):
                model(batch(0))
        finally:
            other.remove()

    with warnings.catch_warnings(), hw.Monitor(model, every=1) as monitor:
        warnings.simplefilter("error")
        model(batch(0))
        monitor.step()

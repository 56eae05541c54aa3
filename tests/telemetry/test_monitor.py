"""`Monitor`: it records what `watch` sees of a step's forwards, and changes nothing."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.nn.modules import module as hooks
from torch.utils.checkpoint import checkpoint

import headwise as hw
from headwise.core.observers import observers
from headwise.integrations import MonitorCallback
from headwise.telemetry import Alarm, Rule
from headwise.telemetry.wrappers import plain_name
from monitored import LAYERS, B, E, Fused, H, Model, T, advance, batch, made, seen_in

EXACT: dict[str, Any] = {"every": 1, "queries": None}


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    """Whatever a test does, nothing of a monitor stays behind."""
    yield
    assert not hooks._global_forward_pre_hooks
    assert not torch.overrides._get_current_function_mode_stack()
    assert torch._dynamo.eval_frame._stance.stance == "default"


def trained(
    monitored: bool, steps: int = 4, model: Any = None, **settings: Any
) -> tuple[dict[str, Tensor], Tensor]:
    """The weights after a training, and the random numbers that come next."""
    model, optimizer = made() if model is None else model
    torch.manual_seed(7)
    monitor = hw.Monitor(model, optimizer, **settings) if monitored else None
    for number in range(steps):
        advance(model, optimizer, number, micro=2)
    if monitor is not None:
        monitor.close()
    return dict(model.state_dict()), torch.rand(3)


@pytest.mark.parametrize(
    "settings",
    [
        {"every": 2, "queries": 4},
        {"every": 1, "queries": None},
        {"every": 3, "maxima": True},
        {"every": 2, "clip": 1e4},
        {"every": 2, "probe": torch.ones(B, T, E)},
    ],
    ids=["sampled", "whole", "maxima", "clip", "probe"],
)
def test_a_monitored_training_is_the_same_bit_for_bit(settings: dict[str, Any]) -> None:
    weights, drawn = trained(False)
    monitored, after = trained(True, **settings)
    assert torch.equal(after, drawn)
    assert all(torch.equal(monitored[name], weights[name]) for name in weights)


def test_what_is_recorded_is_what_watch_sees_of_all_micro_batches() -> None:
    model, optimizer = made()
    model.blocks.eval()  # no dropout, so that a second look sees the same; the model trains
    statistics = (hw.Entropy(), hw.Mass(hw.Previous()), hw.MaxLogit())
    seen = seen_in(model, [batch(10), batch(11)], *statistics)
    with hw.Monitor(model, optimizer, **EXACT, statistics=statistics) as monitor:
        advance(model, optimizer, 1, micro=2)
    table = seen.table()
    for name in ("entropy", "entropy_share", "previous", "max_logit"):
        figures = monitor.latest[name]
        assert not figures.sampled
        want = [row[name] for row in table]
        np.testing.assert_allclose(figures.values, want, rtol=1e-12, err_msg=name)
    entropy = monitor.latest["entropy"]
    assert list(seen) == list(LAYERS)
    assert entropy.data[0].tolist() == [2 * B * T] * len(LAYERS) * H
    values = torch.cat([call["entropy"].values for call in seen[LAYERS[0]].calls]).double()
    squares = (values - values.mean((0, 2), keepdim=True)).square().sum((0, 2))
    np.testing.assert_allclose(entropy.data[2][:H], squares, rtol=1e-9)


def test_unequal_padding_merges_by_queries_not_by_batches() -> None:
    layer = hw.MultiHeadAttention(E, H)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    lengths = torch.tensor([T, 2])
    with hw.Monitor(layer, optimizer, **EXACT, statistics=[hw.Entropy()]) as monitor:
        for padding in (None, hw.Padding(lengths)):
            mask = hw.Causal() if padding is None else hw.Causal() & padding
            layer(batch(1), mask=mask).sum().backward()
        optimizer.step()
    with hw.watch(layer, hw.Entropy()) as seen:
        layer(batch(1), mask=hw.Causal())
        layer(batch(1), mask=hw.Causal() & hw.Padding(lengths))
    figures = monitor.latest["entropy"]
    assert figures.data[0].tolist() == [2 * T + T + 2] * H
    np.testing.assert_allclose(figures.values, [row["entropy"] for row in seen.table()])


@pytest.mark.parametrize(("every", "want"), [(1, [1, 2, 3, 4, 5, 6]), (3, [1, 3, 6]), (50, [1])])
def test_recorded_are_the_first_step_and_every_so_many(
    tmp_path: Path, every: int, want: list[int]
) -> None:
    model, optimizer = made()
    with hw.Monitor(model, optimizer, every, history=tmp_path / "heads.sqlite"):
        for number in range(6):
            advance(model, optimizer, number)
    assert hw.History(tmp_path / "heads.sqlite").steps == want


def test_without_an_optimizer_the_loop_tells() -> None:
    model, optimizer = made()
    told, other = hw.Monitor(model, **EXACT), hw.Monitor(model, optimizer, **EXACT)
    for number in range(2):
        advance(model, optimizer, number)
        assert told.step() == []
    assert told.steps == other.steps == 2
    for name, figures in told.latest.items():
        np.testing.assert_array_equal(figures.data, other.latest[name].data)
    with pytest.raises(ValueError, match="leave this call out"):
        other.step()
    told.close()
    other.close()


def test_drawn_queries_have_errors_and_maxima_are_of_all() -> None:
    layer = Fused()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    statistics = (hw.Entropy(), hw.MaxLogit(), hw.Norms())
    settings: dict[str, Any] = {"every": 1, "statistics": statistics}
    sampled = hw.Monitor(layer, optimizer, queries=8, **settings)
    exact = hw.Monitor(layer, optimizer, queries=None, **settings)
    length = 200
    layer(batch(1, length=length)).sum().backward()
    optimizer.step()
    for monitor in (sampled, exact):
        monitor.close()
    some, every = sampled.latest["entropy"], exact.latest["entropy"]
    assert (some.queries, some.of_queries) == (B * 8, B * length)
    np.testing.assert_allclose(some.data[0], B * length)  # what they stand for
    assert (np.abs(some.values - every.values) < 5 * some.errors).all()
    assert (some.errors > 0).all()
    assert (every.errors == 0).all()
    for name in ("max_logit", "query_norm", "key_norm"):
        assert not sampled.latest[name].sampled
        np.testing.assert_array_equal(sampled.latest[name].data, exact.latest[name].data)


def test_each_forward_and_step_draws_its_own_queries_and_a_training_can_be_repeated() -> None:
    def run() -> list[list[float]]:
        model, optimizer = made()
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        model.blocks.eval()
        found = []
        with hw.Monitor(model, optimizer, every=1, queries=2, statistics=[hw.Entropy()]) as one:
            for _ in range(3):
                advance(model, optimizer, 0)
                found.append(one.latest["entropy"].values.tolist())
        return found

    first = run()
    assert first == run()
    assert first[0] != first[1] != first[2]


# ── forwards that train, and others ─────────────────────────────────────────────────────────────


@pytest.mark.parametrize("where", ["before", "between", "after"])
def test_evaluation_is_not_counted(where: str) -> None:
    def evaluate(model: Model) -> None:
        model.eval()
        model(batch(99))  # with gradients, as some do
        with torch.no_grad():
            model(batch(98))
        model.train()
        with torch.no_grad():
            model(batch(97))  # such as generation in the middle

    def run(with_evaluation: bool) -> dict[str, Any]:
        model, optimizer = made()
        with hw.Monitor(model, optimizer, every=1, queries=2) as monitor:
            torch.manual_seed(5)
            for part in ("before", "between", "after"):
                if part == where and with_evaluation:
                    with torch.random.fork_rng():
                        evaluate(model)
                if part != "after":
                    model(batch(3)).square().mean().backward()
            optimizer.step()
        return dict(monitor.latest)

    plain, other = run(False), run(True)
    for name in plain:
        np.testing.assert_array_equal(plain[name].data, other[name].data)


class Attention(nn.Module):
    """A softmax that no product with values follows: it is left out."""

    def forward(self, x: Tensor) -> Tensor:
        return (x @ x.mT).softmax(-1).sum(-1, keepdim=True) + x


def in_eval_mode(model: nn.Module) -> Any:
    model.eval()
    return lambda x: model(x)


def without_gradients(model: nn.Module) -> Any:
    def call(x: Tensor) -> Tensor:
        with torch.no_grad():
            model(x)
        return (x * next(model.parameters()).sum()).sum()

    return call


def in_another_thread(model: nn.Module) -> Any:
    def call(x: Tensor) -> Tensor:
        _in_another_thread(lambda: model(x))
        return next(model.parameters()).sum()

    return call


def of_a_copy(model: nn.Module) -> Any:
    copied = copy.deepcopy(model)
    return lambda x: copied(x).sum() + next(model.parameters()).sum()


def with_parts(*parts: nn.Module) -> Any:
    return nn.Sequential(nn.Linear(E, E), *parts)


NOTHING: list[tuple[Any, Any, dict[str, Any], str]] = [
    (nn.Linear(E, E), None, {}, "no attention was seen: none of its modules called a function"),
    (made()[0], in_eval_mode, {}, r"the model ran in eval mode \(call model\.train\(\)\)"),
    (made()[0], without_gradients, {}, "the model ran without gradients"),
    (made()[0], in_another_thread, {}, "there was only a forward in another thread"),
    (made()[0], of_a_copy, {}, "no attention was seen: the model was not called"),
    (made()[0], None, {"modules": "blocks.7.*"}, r"left out all that attended: blocks\.0\.own, b"),
    (made()[0], None, {"statistics": [hw.Map(4)], "rules": ()}, "'map' cannot be recorded"),
    (with_parts(Attention()), None, {}, "left out: 1 is not monitored: no product with values"),
]


@pytest.mark.parametrize("every", [1, 100])
@pytest.mark.parametrize(("model", "calls", "settings", "why"), NOTHING)
def test_after_three_steps_that_give_nothing_the_true_reason_is_told_once(
    model: nn.Module, calls: Any, settings: dict[str, Any], why: str, every: int
) -> None:
    model = copy.deepcopy(model).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    call = model if calls is None else calls(model)
    with hw.Monitor(model, optimizer, every=every, **settings) as monitor:
        with warnings.catch_warnings(record=True) as before:
            warnings.simplefilter("always")
            _ = [advance(call, optimizer, number) for number in range(2)]
        assert not any("nothing was recorded" in str(one.message) for one in before)
        with pytest.warns(UserWarning, match=f"nothing was recorded in 3 optimizer steps: .*{why}"):
            advance(call, optimizer, 2)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            _ = [advance(call, optimizer, number) for number in range(3, 7)]
    assert monitor.steps == 7
    assert not monitor.latest


def test_a_step_that_gives_nothing_is_made_up_for_by_the_next(tmp_path: Path) -> None:
    model, optimizer = made()
    path = tmp_path / "heads.sqlite"
    with warnings.catch_warnings(), hw.Monitor(model, optimizer, every=5, history=path):
        warnings.simplefilter("error")
        optimizer.step()  # as some loops do to begin with
        for number in range(5):
            advance(model, optimizer, number)
    assert hw.History(path).steps == [2, 5]


def test_of_a_part_that_is_left_out_the_rest_is_recorded() -> None:
    model = with_parts(hw.MultiHeadAttention(E, H), Attention())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for modules, warned in ((None, True), ("1", False)):
        with (
            warnings.catch_warnings(record=True) as said,
            hw.Monitor(model, optimizer, **EXACT, modules=modules) as monitor,
        ):
            warnings.simplefilter("always")
            _ = [advance(model, optimizer, number) for number in range(2)]
        assert tuple(monitor.layers) == ("1",)
        assert ["2 is not monitored" in str(one.message) for one in said] == [True] * warned


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("whole", [True, False])
def test_checkpointed_activations_are_counted_once(reentrant: bool, whole: bool) -> None:
    kept: Callable[..., Any] = partial(checkpoint, use_reentrant=reentrant)

    def run(checkpointed: bool) -> tuple[dict[str, Any], list[Tensor]]:
        parts = checkpointed and not whole
        model, optimizer = made(lambda block, x: kept(block, x)) if parts else made()
        call = partial(kept, model) if checkpointed and whole else model
        torch.manual_seed(3)
        with hw.Monitor(model, optimizer, **EXACT) as monitor:
            advance(call, optimizer, 0, micro=2)
        return dict(monitor.latest), list(model.parameters())

    (plain, weights), (again, others) = run(False), run(True)
    for name in plain:
        np.testing.assert_array_equal(plain[name].data, again[name].data, err_msg=name)
    assert all(torch.equal(a, b) for a, b in zip(weights, others, strict=True))


@pytest.mark.parametrize("kind", list(CheckpointImpl))
def test_names_are_free_of_wrappers(kind: CheckpointImpl) -> None:
    model, _ = made()
    model.blocks[1] = checkpoint_wrapper(model.blocks[1], checkpoint_impl=kind)
    wrapped = nn.DataParallel(model)  # without a device, it runs the model itself
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.0)
    with hw.Monitor(wrapped, optimizer, **EXACT, maxima=True) as monitor:
        advance(wrapped, optimizer, 0)
        assert tuple(monitor.maxima) == LAYERS
    assert tuple(monitor.layers) == LAYERS


def test_a_part_that_is_called_module_keeps_its_name() -> None:
    model = nn.ModuleDict({"module": nn.ModuleDict({"_orig": nn.Linear(2, 2)})})
    assert plain_name(model, "module._orig") == "module._orig"


def test_autocast() -> None:
    model, optimizer = made()
    weights, _ = trained(False)
    for monitored in (False, True):
        model, optimizer = made()
        torch.manual_seed(7)
        monitor = hw.Monitor(model, optimizer, **EXACT) if monitored else None
        for number in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(batch(number)).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        if monitor is None:
            weights = {name: x.clone() for name, x in model.state_dict().items()}
        else:
            monitor.close()
            assert np.isfinite(monitor.latest["entropy"].values).all()
    assert all(torch.equal(x, weights[name]) for name, x in model.state_dict().items())


def test_calls_of_one_forward_have_draws_of_their_own() -> None:
    class Often(nn.Module):
        """A layer that is called many times, as those that models share are."""

        def __init__(self) -> None:
            super().__init__()
            self.own = hw.MultiHeadAttention(E, H, backend="sdpa")
            self.own.qkv.weight.data *= 8  # entropies that differ from position to position

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([self.own(x, mask=hw.Causal()) for _ in range(50)]).sum(0)

    torch.manual_seed(0)
    model, x = Often(), torch.randn(1, 200, E)
    found = []
    for queries in (None, 8):
        with hw.Monitor(model, every=1, queries=queries) as monitor:
            model(x)
            monitor.step()
        found.append(monitor.latest["entropy"])
    whole, some = found
    assert (abs(some.values - whole.values) < 3 * some.errors).all()
    assert (some.errors < 0.2).all()


# ── steps that a GradScaler skips ───────────────────────────────────────────────────────────────


def scaled_step(
    model: Any,
    optimizer: torch.optim.Optimizer,
    scaler: Any,
    number: int,
    bad: bool,
    between: Callable[[], object] = lambda: None,
) -> None:
    loss = model(batch(number)).square().mean()
    scaler.scale(loss * torch.inf if bad else loss).backward()
    scaler.step(optimizer)
    between()
    scaler.update()
    optimizer.zero_grad()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("told", ["", "after update", "before update"])
def test_a_skipped_step_is_forgotten(fused: bool, told: str) -> None:
    def run(skip: bool) -> tuple[dict[str, Any], int, dict[str, Tensor]]:
        model, _ = made()
        model.blocks.eval()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        hears = None if told else optimizer
        with hw.Monitor(model, hears, **EXACT, maxima=True, scaler=scaler) as monitor:
            for number, bad in enumerate((False, False, True, False)):
                if bad and not skip:
                    continue
                if told == "before update":
                    scaled_step(model, optimizer, scaler, number, bad, monitor.step)
                else:
                    scaled_step(model, optimizer, scaler, number, bad)
                if told == "after update":
                    monitor.step()
            return dict(monitor.latest), monitor.steps, monitor.maxima

    (plain, steps, maxima), (skipped, same, others) = run(False), run(True)
    assert steps == same == 3
    for name in plain:
        np.testing.assert_allclose(skipped[name].data, plain[name].data, rtol=1e-4, err_msg=name)
    assert all(torch.allclose(maxima[name], others[name]) for name in LAYERS)


@pytest.mark.parametrize("every", [1, 100])
def test_told_before_the_update_each_step_counts_as_what_it_was(every: int) -> None:
    model, optimizer = made()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=1)
    counted: list[int] = []
    with hw.Monitor(model, every=every, scaler=scaler) as monitor:

        def told() -> None:
            monitor.step()
            counted.append(monitor.steps)

        bad = (False, True, False, True, True, False, False)
        for number, skipped in enumerate(bad):
            scaled_step(model, optimizer, scaler, number, skipped, told)
    assert counted == [1, 1, 2, 2, 2, 3, 4]


def test_maxima_of_a_skipped_step_are_gone() -> None:
    model, optimizer = made()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with hw.Monitor(model, every=100, maxima=True, scaler=scaler) as monitor:
        for number, bad in enumerate((False, True)):
            scaled_step(model, optimizer, scaler, number, bad)
            monitor.step()
            assert bool(monitor.maxima) is not bad
        assert monitor.steps == 1


# ── maxima ──────────────────────────────────────────────────────────────────────────────────────


def test_maxima_are_exact_over_all_micro_batches_of_every_step() -> None:
    model, optimizer = made()
    model.blocks.eval()
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    seen = seen_in(model, [batch(20), batch(21)], hw.MaxLogit())
    with hw.Monitor(model, every=100, maxima=True) as monitor:
        for number in (1, 2):
            for part in range(2):
                model(batch(number * 10 + part)).sum().backward()
            live = monitor.maxima
            optimizer.step()
            monitor.step()
    for name in LAYERS:
        want = seen[name]["max_logit"].amax(0)
        torch.testing.assert_close(live[name].float(), want)
        torch.testing.assert_close(monitor.maxima[name].float(), want)


def test_maxima_are_empty_where_they_were_not_taken() -> None:
    model, optimizer = made()
    with hw.Monitor(model, optimizer, every=100) as monitor:
        advance(model, optimizer, 0)
        assert tuple(monitor.maxima) == LAYERS  # recorded
        advance(model, optimizer, 1)
        assert monitor.maxima == {}


@pytest.mark.parametrize(
    ("rule", "statistics"),
    [
        (Rule("max_logit", below=1e4), [hw.Entropy()]),
        (Rule("max_logit", above=-1e4), [hw.MaxLogit(above=1e4)]),
        (Rule("max_logit", below=1e4), [hw.MaxLogit(above=1e4)]),
    ],
)
def test_a_rule_for_the_largest_logit_fires_whatever_else_is_recorded(
    rule: Rule, statistics: list[Any]
) -> None:
    model, optimizer = made()
    found: list[Alarm] = []
    rules = [replace(rule, then=found.append)]
    with hw.Monitor(model, optimizer, every=1, statistics=statistics, rules=rules):
        advance(model, optimizer, 0)
    assert len(found) == len(LAYERS) * H


def test_alarms_ask_for_exact_scores_only_above_their_limit() -> None:
    statistics = (hw.Entropy(),)
    for limit, some in ((1e4, False), (-1e4, True)):
        model, optimizer = made()
        rules = [Rule("max_logit", above=limit, then=lambda alarm: None)]
        with hw.Monitor(model, optimizer, every=1, statistics=statistics, rules=rules) as monitor:
            advance(model, optimizer, 0)
        assert bool(monitor.alarms) is some
        assert np.isfinite(monitor.latest["max_logit"].values).all() == some


# ── compiled models ─────────────────────────────────────────────────────────────────────────────


class Counter:
    """A backend of `torch.compile` that counts its graphs."""

    def __init__(self) -> None:
        self.graphs, self.calls = 0, 0

    def __call__(self, graph: Any, _: Any) -> Any:
        self.graphs += 1

        def run(*inputs: Any) -> Any:
            self.calls += 1
            return graph(*inputs)

        return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "first"),
    [
        ("wrapped", "monitor"),
        ("wrapped", "compile"),
        ("in place", "compile"),
        ("a part", "monitor"),
        ("the step", "monitor"),
    ],
)
def test_compiled_models_stay_compiled_on_recorded_steps(how: str, first: str) -> None:
    """Where parts attend outside of graphs, these steps run as they are written."""

    def run(monitored: bool) -> tuple[int, int, Any]:
        torch._dynamo.reset()
        model, _ = made()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        backend, monitor, called = Counter(), None, model

        def compiled() -> Any:
            if how == "in place":
                model.compile(backend=backend)
            elif how == "a part":
                model.blocks[0] = torch.compile(model.blocks[0], backend=backend)
            else:
                return torch.compile(model, backend=backend)
            return model

        if first == "compile" and how != "the step":
            called = compiled()
        if monitored:
            monitor = hw.Monitor(called, optimizer, every=3, queries=2)
        if first == "monitor" and how != "the step":
            called = compiled()
        if how == "the step":

            @torch.compile(backend=backend)
            def called(x: Tensor) -> Tensor:
                return model(x)

        for number in range(7):
            advance(called, optimizer, number)
        if monitor is not None:
            monitor.close()
        return backend.graphs, backend.calls, monitor

    graphs, calls, _ = run(False)
    others, fewer, monitor = run(True)
    if how == "a part":
        assert others == graphs > 0
        assert fewer * 7 == calls * 4  # but for steps 1, 3 and 6
    else:
        assert others == 2 * graphs > 0  # one with the operator, one without
        assert fewer == calls
    assert tuple(monitor.layers) == LAYERS
    assert monitor.latest["entropy"].of_queries == B * T * len(LAYERS)


@pytest.mark.filterwarnings("ignore:headwise")
def test_a_monitor_is_never_part_of_a_graph() -> None:
    model, _ = made()
    monitor = hw.Monitor(model, every=2)
    monitor.pause()  # else all code would run as it is written

    def step(x: Tensor) -> Tensor:
        monitor.step()
        return x + 1

    def make(x: Tensor) -> Tensor:
        hw.Monitor(model).close()
        return x + 1

    for function in (step, make):
        torch._dynamo.reset()
        whole = torch.compile(function, fullgraph=True, backend="eager")
        with pytest.raises(torch._dynamo.exc.Unsupported, match="Monitor"):
            whole(torch.ones(2))
        assert torch.equal(
            torch.compile(function, backend="eager")(torch.ones(2)), torch.full((2,), 2)
        )
    assert monitor.steps == 1
    monitor.close()


def test_a_compiled_optimizer_tells_of_its_steps() -> None:
    torch._dynamo.reset()
    model, optimizer = made()
    taken = torch.compile(lambda: optimizer.step(), backend="eager")
    with hw.Monitor(model, optimizer, **EXACT) as monitor:
        for number in range(3):
            model(batch(number)).square().mean().backward()
            taken()
        assert monitor.steps == 3
    assert monitor.latest["entropy"].data[0].tolist() == [B * T] * len(LAYERS) * H


# ── what must not happen ────────────────────────────────────────────────────────────────────────


def test_a_statistic_that_fails_costs_a_warning() -> None:
    class Failing(hw.Statistic):
        names = ("failing",)

        def metric(self, record: Any) -> dict[str, Any]:
            raise RuntimeError("no such thing")

        def define(self, full: Any) -> dict[str, Any]:
            return {}

    weights, _ = trained(False)
    with pytest.warns(UserWarning, match=r"blocks\.0\.own is not monitored: no such thing"):
        monitored, _ = trained(True, every=1, statistics=[hw.Entropy(), Failing()])
    assert all(torch.equal(monitored[name], weights[name]) for name in weights)


def test_a_forward_in_another_thread_does_not_stop_the_training() -> None:
    model, optimizer = made()
    monitor = hw.Monitor(model, optimizer, **EXACT)
    with pytest.warns(UserWarning, match="in another thread"):
        _in_another_thread(lambda: model(batch(1)))
    advance(model, optimizer, 1)
    assert monitor.latest["entropy"].data[0].tolist() == [B * T] * len(LAYERS) * H
    monitor.close()


def _in_another_thread(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def test_copies_and_saved_models_do_not_take_the_monitor_along(tmp_path: Path) -> None:
    model, optimizer = made(wrap=_plainly)
    with hw.Monitor(model, optimizer, every=1):
        model(batch(1)).sum().backward()
        twin = copy.deepcopy(model)
        torch.save(model, tmp_path / "model.pt")
        optimizer.step()
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    assert torch.equal(twin.eval()(batch(2)), loaded.eval()(batch(2)))
    assert not observers


def _plainly(block: nn.Module, x: Tensor) -> Tensor:
    return block(x)


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"every": 0}, "every must be an integer ≥ 1, got 0"),
        ({"every": 2.5}, "every must be an integer ≥ 1, got 2.5"),
        ({"queries": 1}, "queries must be an integer ≥ 2"),
        ({"clip": -1.0}, "clip must be a limit for logits above 0, got -1.0"),
        ({"step": -1}, "an integer ≥ 0, got -1"),
        ({"seed": "1"}, "seed must be an integer, got '1'"),
        (
            {"statistics": hw.Entropy()},
            "statistics must be a list, also for a single element, got Entropy()",
        ),
        ({"rules": ["entropy"]}, "rules must contain Rule(…) objects, got 'entropy'"),
        ({"statistics": [hw.Entropy]}, "not a statistic; did you mean Entropy()"),
        ({"statistics": [hw.Entropy(), hw.Entropy()]}, "'entropy' is given twice"),
        ({"rules": [Rule("entropy", below=1.0, then="stop")]}, "pass save="),
        (
            {"rules": [Rule("entropy", below=0.1)] * 2},
            "two rules are named 'entropy < 0.1'",
        ),
        ({"trackers": [3]}, "pass a TensorBoard SummaryWriter"),
        ({"maxima": "no"}, "maxima must be True or False, got 'no'"),
        ({"save": 3}, "save must be a function that saves a checkpoint, got 3"),
        ({"scaler": 3}, "scaler must be a GradScaler, got 3"),
        ({"probe": "a text"}, "probe must be a batch for the model"),
        ({"rules": [Rule("entropie", below=1.0)]}, "did you mean 'entropy'"),
        (
            {"rules": [Rule("self", above=0.9)]},
            "'self' is not recorded, so the rule would never fire; Recorded statistics: entropy, e",
        ),
        (
            {"rules": [Rule("first", above=0.9)], "statistics": [hw.Entropy()]},
            "Recorded statistics: entropy, entropy_share, max_logit; add others with statistics",
        ),
        ({"rules": [Rule("probe/entropy", below=0.1)]}, "did you mean 'entropy'"),
        (
            {"rules": [Rule("max_logit_above_5", above=9.0)]},
            "did you mean 'max_logit'",
        ),
        ({"optimizer": torch.optim.SGD(nn.Linear(2, 2).parameters())}, "SGD) holds none of the"),
        ({"optimizer": 100}, "optimizer must be a torch.optim.Optimizer, got int; pass the one"),
        (
            {"optimizer": torch.optim.lr_scheduler.StepLR(made()[1], 1)},
            "got StepLR; pass the one that trains the model (its .optimizer attribute).",
        ),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], rule: str) -> None:
    model, _ = made()
    with pytest.raises(ValueError, match=r"Monitor|trackers") as refused:
        hw.Monitor(model, **settings)
    assert rule in str(refused.value)


class Accelerated(torch.optim.Optimizer):
    """As accelerate wraps optimizers: `Optimizer.__init__` never runs."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups

    def step(self, closure: Any = None) -> None:
        self.optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad()


def some_layers(model: Model) -> Any:
    model.blocks[0].requires_grad_(False)
    return torch.optim.SGD(model.blocks[1].parameters(), lr=0.0)


def low_rank(model: Model) -> Any:
    model.requires_grad_(False)
    model.added = nn.Linear(2, 2)  # type: ignore[assignment]
    return torch.optim.SGD(model.added.parameters(), lr=0.0)


def a_prompt(model: Model) -> Any:
    model.requires_grad_(False)
    return torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.0)


def groups(model: Model) -> Any:
    of_another = {"params": list(nn.Linear(2, 2).parameters()), "lr": 0.5}
    return torch.optim.SGD([of_another, {"params": list(model.blocks.parameters())}], lr=0.0)


def masters(model: Model) -> Any:
    copies = [p.detach().clone().requires_grad_() for p in model.parameters()]
    return torch.optim.SGD(copies, lr=0.0)


def masters_of_halves(model: Model) -> Any:
    copies = [nn.Parameter(p.detach().float()) for p in model.bfloat16().parameters()]
    return torch.optim.SGD(copies, lr=0.0)


def wrapped(model: Model) -> Any:
    return Accelerated(torch.optim.SGD(model.parameters(), lr=0.0))


@pytest.mark.parametrize(
    "optimizer_of",
    [some_layers, low_rank, a_prompt, groups, masters, masters_of_halves, wrapped],
)
def test_an_optimizer_that_may_train_the_model_is_accepted(optimizer_of: Any) -> None:
    model, _ = made()
    optimizer = optimizer_of(model)
    dtype = next(model.parameters()).dtype
    with hw.Monitor(model, optimizer, every=1) as monitor:
        model(batch(0).to(dtype)).square().mean().backward()
        optimizer.step()
    assert monitor.steps == 1
    assert tuple(monitor.layers) == LAYERS


def test_an_optimizer_that_takes_no_hooks_is_refused_by_what_it_lacks() -> None:
    model, optimizer = made()

    class DeepSpeeds:
        param_groups = optimizer.param_groups

    with pytest.raises(
        ValueError,
        match="a DeepSpeeds, whose steps cannot be hooked; create the monitor without an optimizer",
    ):
        hw.Monitor(model, DeepSpeeds())  # type: ignore[arg-type]


def test_qk_clip_refuses_the_optimizer_of_another_model_in_the_same_words() -> None:
    model, _ = made()
    other = torch.optim.SGD(nn.Linear(2, 2).parameters())
    largest = {LAYERS[0]: torch.full((H,), 200.0)}
    for optimizer in (other, torch.optim.lr_scheduler.StepLR(other, 1)):
        said = []
        for refusing in (
            lambda one: hw.Monitor(model, one),
            lambda one: hw.qk_clip_(model, largest, optimizer=one),
        ):
            with pytest.raises(ValueError, match="optimizer") as refused:
                refusing(optimizer)
            said.append(str(refused.value).partition("optimizer")[2])
        assert said[0] == said[1]


def test_a_trainers_callback_refuses_what_a_monitor_has_not() -> None:
    with pytest.raises(TypeError, match=r"MonitorCallback\(evry=…\): .*; did you mean every=\?"):
        MonitorCallback(evry=3)
    with pytest.raises(TypeError, match=r"MonitorCallback\(zzz=…\): .*; there are: every, que"):
        MonitorCallback(zzz=3)


def test_default_rules_are_those_whose_metrics_are_recorded(tmp_path: Path) -> None:
    model, _ = made()
    path = tmp_path / "heads.sqlite"
    with hw.Monitor(model, every=1, statistics=[hw.Entropy()], history=path) as monitor:
        model(batch(0)).sum().backward()
        monitor.step()
    kept = ["max_logit > 100", "entropy collapse", "not a finite number"]
    assert hw.History(path).about["rules"] == kept


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Monitor\(int, …\): int is not an nn.Module"):
        hw.Monitor(3)  # type: ignore[arg-type]


def test_a_probe_is_free_of_the_noise_of_the_data() -> None:
    model, optimizer = made()
    model.blocks[0].own.eval()
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    probe = {"x": batch(5)}
    with hw.Monitor(model, optimizer, every=1, queries=4, probe=probe) as monitor:
        found = []
        for number in range(2):
            advance(model, optimizer, number)
            found.append(monitor.latest["probe/entropy"].values)
    np.testing.assert_array_equal(found[0], found[1])
    assert model.training
    assert model.blocks[1].training
    assert not model.blocks[0].own.training
    assert monitor.latest["probe/entropy"].of_queries == B * T * len(LAYERS)


def test_modules_can_be_chosen() -> None:
    model, optimizer = made()
    with hw.Monitor(model, optimizer, **EXACT, modules="blocks.1.*") as monitor:
        advance(model, optimizer, 0)
    assert tuple(monitor.layers) == LAYERS[2:]


def test_means_of_all_queries_are_recorded_as_exact_beside_drawn_ones(tmp_path: Path) -> None:
    layer = hw.MultiHeadAttention(16, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
    path = tmp_path / "heads.sqlite"
    with hw.Monitor(layer, optimizer, every=1, queries=4, history=path):
        for _ in range(2):
            layer(torch.randn(2, 11, 16), mask=hw.Causal()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    history = hw.History(path)
    assert not np.any(history["entropy"].sampled)
    assert [name for name in history.columns() if name.endswith("_se")] == ["output_norm_se"]

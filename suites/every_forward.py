"""Watch every forward of a model, and compare it with the one that nobody watches.

As a plugin it watches tests that run outside of this folder:

    PYTHONPATH=suites python -m pytest -p every_forward …/test/nn/test_multihead_attention.py
"""

import copy
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import headwise as hw

RUNNING = threading.local()
Count = Callable[..., None]
KINDS = (
    PreTrainedModel,
    nn.MultiheadAttention,
    nn.Transformer,
    nn.TransformerDecoder,
    nn.TransformerDecoderLayer,
    nn.TransformerEncoder,
    nn.TransformerEncoderLayer,
)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    with watched(lambda **numbers: item.user_properties.extend(numbers.items())):
        yield


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    counts: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, number in getattr(report, "user_properties", ()):
                counts[name] += number if report.when == "call" else 0
    for name, number in counts.items():
        terminalreporter.write_line(f"{number:10,} {name}")


@contextmanager
def watched(count: Count) -> Iterator[None]:
    """While this lasts, models run twice, watched and alone, and must give the same bits.

    The statistics of transformers' models with `eager` attention must be those of the weights that
    they return.
    """
    alone = nn.Module.__call__

    def call(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if getattr(RUNNING, "inside", False) or not comparable(model):
            return alone(model, *args, **kwargs)
        RUNNING.inside = True
        try:
            return twice(model, alone, args, kwargs, count)
        finally:
            RUNNING.inside = False

    with ExitStack() as patches:
        for kind in KINDS:
            patches.enter_context(patch.object(kind, "__call__", call, create=True))
        yield


def comparable(model: nn.Module) -> bool:
    """Whether there are numbers to compare: no fake or meta tensors, and nothing is traced."""
    meta = any(p.is_meta for p in model.parameters())
    return not (meta or torch.compiler.is_compiling() or torch.jit.is_tracing())


def twice(model: nn.Module, alone: Callable[..., Any], args: Any, kwargs: Any, count: Count) -> Any:
    random = torch.get_rng_state()
    try:
        copied = caches(args), caches(kwargs)
    except RuntimeError:  # a cache inside a graph cannot be copied
        count(**{"forwards with a cache inside a graph": 1})
        return alone(model, *args, **kwargs)
    eager = caches(kwargs)
    failure = seen = first = None
    try:
        with hw.watch(model, hw.Entropy(), hw.Mass(hw.First(1))) as seen:
            first = alone(model, *copied[0], **copied[1])
    except Exception as error:
        failure = error
    torch.set_rng_state(random)
    second = alone(model, *args, **kwargs)  # raises what it would alone
    if failure is not None:
        raise AssertionError(f"only the watched {type(model).__name__} failed") from failure
    assert same(first, second), f"{type(model).__name__}: other outputs when watched"
    assert same(copied, (args, kwargs)), f"{type(model).__name__}: other caches when watched"
    count(**{"forwards": 1, "forwards without attention": 0 if len(seen or ()) else 1})
    if (
        isinstance(model, PreTrainedModel)
        and model.config._attn_implementation == "eager"
        and not model.training
        and not args
    ):
        compare_layers(model, alone, eager, count)
    return second


def compare_layers(
    model: PreTrainedModel, alone: Callable[..., Any], kwargs: Any, count: Count
) -> None:
    """Compare entropies with those of the weights that the model returns, layer by layer."""
    kwargs = kwargs | {"output_attentions": True, "return_dict": True}
    random = torch.get_rng_state()
    try:
        with torch.no_grad(), hw.watch(model, hw.Entropy(), padding=False) as seen:
            result = alone(model, **kwargs)
    except TypeError:  # a model that does not return weights
        return
    finally:
        torch.set_rng_state(random)
    theirs = weights_of(result)
    readings = [call["entropy"] for name in seen for call in seen[name].calls]
    if len(theirs) != len(readings):
        count(**{"forwards whose weights are not one a layer": 1})
        return
    sinks = any(name.endswith("sinks") for name, _ in model.named_parameters())
    for reading, weights in zip(readings, theirs, strict=True):
        if weights.shape[:3] != reading.values.shape:
            count(**{"layers of another shape": 1})
            continue
        weights = weights.double()
        entropy = torch.special.entr(weights).sum(-1)
        if sinks:  # they are left out of the weights, and take what these lack
            entropy += torch.special.entr((1 - weights.sum(-1)).clamp(0))
        rows = reading.rows.expand(entropy.shape)
        tolerance = 1e-5 if model.dtype == torch.float32 else 2e-2
        torch.testing.assert_close(
            (reading.values * rows).double(), entropy * rows, atol=tolerance, rtol=tolerance
        )
        count(**{"layers compared": 1, "queries compared": int(rows.sum())})


def weights_of(result: Any) -> list[Tensor]:
    """The weights that a model returns, in the order of its calls."""
    names = ("encoder_attentions", "decoder_attentions", "cross_attentions", "attentions")
    encoder, decoder, cross, own = ([*(result.get(name) or ())] for name in names)
    decoder = decoder or own
    if cross and len(cross) == len(decoder):
        decoder = [weights for pair in zip(decoder, cross, strict=True) for weights in pair]
    found = [*encoder, *decoder]
    return [] if any(weights is None for weights in found) else found


def caches(value: Any) -> Any:
    """The same arguments with copies of the caches among them, which a forward adds to."""
    if isinstance(value, dict):
        return {name: caches(part) for name, part in value.items()}
    if isinstance(value, tuple):
        return tuple(caches(part) for part in value)
    if isinstance(value, Tensor) or not hasattr(value, "__dict__") or isinstance(value, nn.Module):
        return value
    return copy.deepcopy(value)


def same(one: Any, two: Any) -> bool:
    """Whether outputs are equal bit for bit, NaN included."""
    if isinstance(one, Tensor) and one.is_nested:
        return isinstance(two, Tensor) and two.is_nested and same(one.unbind(), two.unbind())
    if isinstance(one, Tensor):
        return (
            isinstance(two, Tensor)
            and one.shape == two.shape
            and one.dtype == two.dtype
            and torch.equal(one.isnan(), two.isnan())
            and torch.equal(one.nan_to_num(), two.nan_to_num())
        )
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(one[name], two[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(same, one, two))
    if hasattr(one, "__dict__") and not isinstance(one, nn.Module | type):
        return type(one) is type(two) and same(vars(one), vars(two))
    return one is two or type(one) is type(two)

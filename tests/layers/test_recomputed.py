"""Activation checkpointing under `watch()`: what is computed again is as it was, counted once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaModel

import headwise as hw
from support import BACKENDS

B, H, T, E = 2, 3, 11, 24
IDS = torch.arange(T) * 7 % 5

STATISTICS: dict[str, hw.Statistic] = {
    "lse": hw.LSE(),
    "entropy": hw.Entropy(),
    "max_logit": hw.MaxLogit(),
    "first": hw.Mass(hw.First()),
    "first 3": hw.Mass(hw.First(3)),
    "previous": hw.Mass(hw.Previous()),
    "self": hw.Mass(hw.Self()),
    "next": hw.Mass(hw.At(1)),
    "same token": hw.Mass(hw.SameToken(IDS)),
    "induction": hw.Mass(hw.Induction(IDS)),
    "mask": hw.Mass(hw.Window(3)),
    "sink": hw.Sink(),
    "distance": hw.Distance(spread=True, absolute=True),
    "map": hw.Map(3),
    "top": hw.TopKeys(3),
    "received": hw.Received(),
    "offsets": hw.OffsetHistogram(4, ahead=True),
    "similarity": hw.Similarity(4),
    "norms": hw.Norms(),
    "max_logit above": hw.MaxLogit(above=0.2),
    "output": hw.OutputNorm(),
}


APART = [statistic for name, statistic in STATISTICS.items() if name != "first 3"]
"""All that have names of their own: the other is called as `first` is."""


class Sdpa(nn.Module):
    """A layer that calls PyTorch's own attention."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(E, 3 * E), nn.Linear(E, E)

    def forward(self, x: Tensor, mask: hw.Mask | None = None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, H, -1)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(out.transpose(1, 2).flatten(2))


class Hugging(nn.Module):
    """A model of transformers, which checkpoints its layers itself."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=7,
            hidden_size=E,
            intermediate_size=E,
            num_hidden_layers=2,
            num_attention_heads=H,
            num_key_value_heads=1,
        )
        self.model = LlamaModel(config)
        if reentrant is not None:
            keywords = {"use_reentrant": reentrant}
            enable = getattr(self.model, "activation_checkpointing_enable", None)
            (enable or self.model.gradient_checkpointing_enable)(keywords)  # newer and older

    def forward(self, x: Tensor) -> Tensor:
        return self.model(inputs_embeds=x, use_cache=False).last_hidden_state


class Checkpointed(nn.Module):
    """A layer whose activations are not kept; with `reentrant=None` they are."""

    def __init__(self, layer: nn.Module, mask: hw.Mask, reentrant: bool | None) -> None:
        super().__init__()
        self.layer, self.mask, self.reentrant = layer, mask, reentrant

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            return self.layer(x, mask=self.mask)
        return checkpoint(self.layer, x, mask=self.mask, use_reentrant=self.reentrant)  # type: ignore[return-value]


class Reentrant(Checkpointed):
    """The same for a function that takes no keywords."""

    def forward(self, x: Tensor) -> Tensor:
        def layer(x: Tensor) -> Tensor:
            return self.layer(x, mask=self.mask)

        return checkpoint(layer, x, use_reentrant=True)  # type: ignore[return-value]


def own(backend: str, **keywords: Any) -> Callable[[], nn.Module]:
    return lambda: hw.MultiHeadAttention(E, H, backend=backend, **keywords)


def made(layer: nn.Module, reentrant: bool | None, mask: hw.Mask | None = None) -> nn.Module:
    if isinstance(layer, Hugging):
        again = Hugging(reentrant).train()
        again.load_state_dict(layer.state_dict())
        return again
    kind = Reentrant if reentrant else Checkpointed
    return kind(layer, mask or hw.Causal(), reentrant)


def step(model: nn.Module, loss: Callable[[], Tensor] | None = None) -> list[Tensor]:
    """Output and gradients of a training step."""
    torch.manual_seed(0)
    x = torch.linspace(-2, 2, B * T * E).view(B, T, E).sin().requires_grad_()
    for parameter in model.parameters():
        parameter.grad = None
    out = model(x)
    total = out.float().square().sum()
    (total if loss is None else total + loss()).backward()
    grads = [y.grad for y in (x, *model.parameters())]
    return [out.detach(), *(grad for grad in grads if grad is not None)]


def assert_unchanged(
    model: nn.Module, plain: list[Tensor], *statistics: hw.Statistic, **keywords: Any
) -> None:
    """Watched, a step gives the same bits, and every call counts once."""
    with hw.watch(model, *statistics, **keywords) as seen:
        watched = step(model)
    assert len(plain) == len(watched)
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
    assert {row["calls"] for row in seen.table()} == {1}


LAYERS: dict[str, Callable[[], nn.Module]] = {
    **{name: own(name) for name in BACKENDS},
    "F.sdpa": Sdpa,
    "transformers": lambda: Hugging(None),
}


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("layer", LAYERS)
def test_each_statistic_leaves_no_trace(layer: str, reentrant: bool) -> None:
    model = made(LAYERS[layer](), reentrant)
    plain = step(model)
    for statistic in STATISTICS.values():
        assert_unchanged(model, plain, statistic)
        assert_unchanged(model, plain, statistic, queries=4)
    assert_unchanged(model, plain, *APART, queries=[0, 5, 10], running=True)


OTHERS = {
    "sinks": (dict(sinks=True), None),
    "padding": ({}, hw.Padding(torch.tensor([4, T]))),
    "bias": ({}, hw.Bias(torch.randn(T, T).triu(-3))),
    "bfloat16": (dict(dtype=torch.bfloat16), None),
    "dropout": (dict(dropout=0.3), None),
}


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("other", OTHERS)
def test_all_statistics_leave_no_trace(other: str, backend: str, reentrant: bool) -> None:
    keywords, mask = OTHERS[other]
    if other == "dropout" and backend == "sdpa":  # which has none
        backend = "auto"
    layer = own(backend, **keywords)()
    if other == "bfloat16":
        layer = nn.Sequential(layer)  # which casts what it is given
        layer.forward = lambda x, mask: layer[0](x.bfloat16(), mask=mask)  # type: ignore[method-assign]
    model = made(layer, reentrant, mask)
    plain = step(model)
    assert_unchanged(model, plain, *APART)
    assert_unchanged(model, plain, *APART, queries=4)


@pytest.mark.parametrize("layer", LAYERS)
def test_a_loss_of_statistics_is_computed_again_with_them(layer: str) -> None:
    statistics = (hw.Entropy(), hw.LSE(), hw.Mass(hw.Previous()), hw.Distance(), hw.Map(3))
    kept = LAYERS[layer]()
    steps = []
    for reentrant in (None, False):
        model = made(kept, reentrant)
        for queries in (None, 4):
            with hw.watch(model, *statistics, gradients=True, queries=queries) as seen:

                def of_statistics(seen: Any = seen) -> Tensor:
                    names = ("entropy", "lse", "previous", "distance", "map")
                    figures = [seen[module][name] for module in seen for name in names]
                    return sum((figure.square().sum() for figure in figures), 0)

                steps.append(step(model, of_statistics))
            assert {row["calls"] for row in seen.table()} == {1}
    for plain, again in zip(steps[:2], steps[2:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))


@pytest.mark.parametrize("layer", LAYERS)
def test_a_loss_of_statistics_without_graph_is_refused(layer: str) -> None:
    model = made(LAYERS[layer](), True)
    plain = step(model)
    said = "is computed again.*use_reentrant=False"
    with hw.watch(model, hw.Entropy(), gradients=True), pytest.raises(ValueError, match=said):
        step(model)
    assert_unchanged(model, plain, hw.Entropy())  # and all is as before


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_output_keeps_its_graph_where_its_length_is_asked_for(backend: str) -> None:
    """Padded queries are left out of the statistics, which then come from a call of their own."""
    layer = own(backend)()
    model = made(layer, None, hw.Padding(torch.tensor([4, T])))
    with hw.watch(model, hw.OutputNorm()):
        model(torch.randn(B, T, E)).sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())


def test_without_gradients_the_log_sum_exp_has_none_either() -> None:
    q = torch.randn(B, H, T, 8, requires_grad=True)
    for backend in BACKENDS:
        seen = hw.observe(q, q, q, hw.Entropy(), backend=backend, gradients=False)
        assert seen.out.requires_grad
        assert not seen.lse.requires_grad

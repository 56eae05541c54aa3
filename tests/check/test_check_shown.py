"""Calls and arguments that somebody shows, because the check asked or could not know."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headwise.check import check
from headwise.check.files import check_file
from headwise.check.target.shown_call import makes_tensors

LAYER = """
import torch
from torch import nn

class Attention(nn.Module):
    def __init__(self, dim, heads, activation, kind="plain"):
        super().__init__()
        self.heads, self.kind, self.activation = heads, kind, activation()
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x, positions):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.parts(x))
        scores = q @ k.mT / q.shape[-1] ** 0.5 + positions - positions.mT
        return self.proj(self.activation(scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

    def parts(self, x):
        return self.qkv(x).chunk(3, -1)
"""
SHOWN = "lambda layer, x: layer(x, 0.1 * torch.arange(x.shape[1], device=x.device)[:, None])"


@pytest.mark.parametrize("activation", ["nn.Identity", "torch.nn.Identity", "type(nn.Identity())"])
def test_an_argument_may_be_an_expression(tmp_path: Path, activation: str) -> None:
    path = tmp_path / "attention.py"
    path.write_text(LAYER.replace("import torch\n", "import torch\ntype = type\n"))
    arguments = {"activation": activation, "kind": "plain.old"}  # a word with a point in it
    verdict = check_file(str(path), arguments, call=SHOWN)
    assert verdict.passed, str(verdict)


def test_an_expression_that_fails_is_told(tmp_path: Path) -> None:
    path = tmp_path / "attention.py"
    path.write_text(LAYER)
    with pytest.raises(ValueError, match=r"--activation 'nn\.Identiti': AttributeError"):
        check_file(str(path), {"activation": "nn.Identiti"})


class Attention(nn.Module):
    """Right, with tokens first, and a table that it must be given."""

    def __init__(self, dim: int, heads: int, head_dim: int = 8, value: bool = True) -> None:
        super().__init__()
        self.heads, self.value = heads, value
        self.q, self.k, self.v = (nn.Linear(dim, heads * head_dim) for _ in range(3))
        self.o = nn.Linear(heads * head_dim, dim)

    def forward(self, flavour: dict[str, Tensor]) -> Tensor:
        x = flavour["x"]
        parts = (self.q(x), self.k(x), self.v(x) if self.value else x)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in parts)
        out = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v
        return self.o(out.transpose(1, 2).flatten(2) + 0 * flavour.get("more", x))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda layer, x: layer({"x": x}, 3), "takes 2 positional arguments but 3 were given"),
        (lambda layer, x: layer({"x": x[:, :, None] @ x}), "RuntimeError"),
        (lambda layer, x: layer({"x": x.nothing}), "has no attribute 'nothing'"),
    ],
)
def test_a_call_that_fails_by_itself_is_no_mistake_of_the_layer(
    call: Callable[..., Any], said: str
) -> None:
    with pytest.raises(ValueError, match=f"call that you show fails before it reaches it.*{said}"):
        check(Attention, 24, 3, call=call)


def test_a_layer_that_fails_in_the_call_that_is_shown_is_at_fault() -> None:
    verdict = check(Attention, 24, 3, call=lambda layer, x: layer({"y": x}))
    assert [one.rule for one in verdict.errors] == ["runs"], str(verdict)


def test_what_is_shown_is_called_with_the_sizes_that_it_was_shown_for() -> None:
    """Other options are still tried; one that leaves a projection out is no mistake."""
    verdict = check(Attention, 24, 3, call=lambda layer, x: layer({"x": x.reshape(-1, 7, 24)}))
    assert not [one for one in verdict.errors if "With" in one.message], str(verdict)


def test_tensors_that_the_call_makes_are_no_fault_of_the_layer() -> None:
    def call(layer: nn.Module, x: Tensor) -> Tensor:
        table: Tensor = layer({"x": x, "more": torch.ones(1, 1, 24)})
        return table

    assert makes_tensors(call)
    verdict = check(Attention, 24, 3, call=call)
    assert verdict["move"].severity == "skipped"
    assert verdict.passed, str(verdict)
    assert not makes_tensors(lambda layer, x: layer(x, torch.ones(3, device=x.device)))


class Timed(Attention):
    """Each sequence has a time of its own."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, heads)
        self.time = nn.Linear(1, dim)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward({"x": x + self.time(time.to(x.dtype)[:, None, None])})


class Mixed(Timed):
    def forward(self, x: Tensor, time: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x + x.mean(0, keepdim=True), time)


def test_rows_of_the_call_that_is_shown_are_no_fault_of_the_layer() -> None:
    def counted(layer: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = layer(x, torch.arange(len(x), device=x.device))
        return out

    def alike(layer: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = layer(x, torch.ones(len(x), device=x.device))
        return out

    one = check(Timed, 24, 3, call=counted)["batch"]
    assert (one.severity, "gives time other numbers" in one.message) == ("skipped", True)
    assert check(Timed, 24, 3, call=alike)["batch"].severity == "passed"
    assert check(Mixed, 24, 3, call=alike)["batch"].severity == "error"


ON_RANK = """
import os
import torch
from torch import nn

class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.rank = heads, int(os.environ["LOCAL_RANK"])
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1)
        )
        scores = q @ k.mT / q.shape[-1] ** 0.5
        return self.proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
"""


def test_a_variable_of_the_environment_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    path = tmp_path / "attention.py"
    path.write_text(ON_RANK)
    for given in ({}, {"dim": "24", "heads": "3"}):
        with pytest.raises(ValueError, match="it reads LOCAL_RANK of the environment"):
            check_file(str(path), given)
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert check_file(str(path), {}).passed


def window(size: int, shift: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1) @ v[..., shift:] / size


def test_a_function_is_called_as_is_shown() -> None:
    verdict = check(window, call=lambda f, x: f(1, 0, x / 24**0.5, x, x))
    assert verdict.passed, str(verdict)
    assert verdict.subject.startswith("window"), verdict.subject
    with pytest.raises(ValueError, match="division by zero"):
        check(window, call=lambda f, x: 1 / 0)


def made(dim: int, num_heads: int) -> nn.Module:
    return Attention(dim, num_heads)


def test_what_makes_a_layer_makes_it_for_the_call_that_is_shown() -> None:
    verdict = check(made, call=lambda layer, x: layer({"x": x}))
    assert verdict.passed, str(verdict)
    assert verdict.subject == "made(dim=24, num_heads=3)"


class OfMaps(nn.Module):
    """Its width is that of a map, with several numbers."""

    def __init__(self, dim: tuple[int, ...], num_patches: int) -> None:
        super().__init__()
        self.width = dim[0] * dim[1]
        self.qkv = nn.Linear(self.width, 3 * self.width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x.flatten(2)).chunk(3, -1)
        return ((q @ k.mT / self.width**0.5).softmax(-1) @ v).unflatten(-1, x.shape[2:])


def test_a_width_of_several_numbers() -> None:
    verdict = check(
        OfMaps,
        dim=(4, 6),
        embed_dim=24,
        call=lambda layer, x: layer(x.unflatten(-1, (4, 6))).flatten(2),
    )
    assert verdict.passed, str(verdict)


class OneKey(nn.Module):
    """Attends to a single key, so that neither queries nor keys count."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(dim, dim) for _ in range(3))
        self.norm = nn.LayerNorm(dim)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        q, k, v = self.q(first)[:, None], self.k(second)[:, None], self.v(second)[:, None]
        return self.norm(((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v)[:, 0] + first)


def test_what_learns_nothing_in_the_call_that_is_shown_is_a_mistake() -> None:
    verdict = check(OneKey, 24, call=lambda layer, x: layer(x.mean(1), x.mean(1)))
    assert [one.rule for one in verdict.errors] == ["gradients"], str(verdict)


class Heads(nn.Module):
    """Right; what goes in beside x has one number for each feature."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor, gain: Tensor) -> Tensor:
        q, k, v = (
            one.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for one in self.qkv(x * gain).chunk(3, -1)
        )
        out = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v
        return self.proj(out.transpose(1, 2).flatten(2))

    def scored(self, x: Tensor) -> Tensor:
        q, k, _ = self.qkv(x).unflatten(-1, (self.heads, -1)).transpose(1, 2).chunk(3, -1)
        return (q @ k.mT).softmax(-1)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda layer, x: layer(x, torch.rand(24)), r"draws random numbers \(rand\)"),
        (lambda layer, x: layer.train()(x, x), r"sets the mode \(train\)"),
        (lambda layer, x: layer(x, x[:, :1, :5]), r"fails in the layer.*show another call"),
        (lambda layer, x: layer.scored(x), r"\[2, 3, 7, 7\].*weights perhaps"),
        (lambda layer, x: layer(x[:1] * 0, 1.0), "the same for any x"),
        (lambda layer, x: layer(x, 1.0)[[0, 1]], r"with x \[1, 7, 24\].*any number of sequences"),
    ],
)
def test_another_call_is_asked_for(call: Callable[..., Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check(Heads, 24, 3, call=call)


def test_a_call_may_be_any_callable() -> None:
    def call(gain: float, layer: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = layer(x, gain)
        return out

    assert check(Heads, 24, 3, call=functools.partial(call, 1.0)).passed


def test_a_call_may_fit_one_number_of_tokens() -> None:
    verdict = check(Heads, 24, 3, call=lambda layer, x: layer(x, torch.ones(7, 1, device=x.device)))
    assert verdict.passed, str(verdict)
    assert verdict["one-token"].severity == "skipped"
    assert any("goes with 7 tokens, and not with 5" in one for one in verdict.notes)


class NoBatch(Heads):
    """Drops the axis of a batch of one."""

    def forward(self, x: Tensor, gain: Tensor) -> Tensor:
        batch, tokens, width = x.squeeze().shape
        return super().forward(x.view(batch, tokens, width), gain)


def test_the_layers_own_failure_with_other_sizes_is_a_mistake() -> None:
    verdict = check(NoBatch, 24, 3, call=lambda layer, x: layer(x, torch.ones_like(x)))
    assert [one.rule for one in verdict.errors] == ["shape"], str(verdict)


class Started(Heads):
    """Wants to be told first."""

    def start(self, gain: Tensor) -> None:
        self.gain = gain

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(x, self.gain)


def test_a_method_that_has_to_be_called_first_is_named() -> None:
    with pytest.raises(ValueError, match=r"reads gain, set by start alone.*layer\.start\("):
        check(Started, 24, 3)
    shown = check(
        Started, 24, 3, call=lambda layer, x: (layer.start(x[..., :1] * 0 + 1), layer(x))[-1]
    )
    assert shown.passed, str(shown)


def test_a_package_that_is_not_there_is_asked_for_in_any_call() -> None:
    def call(layer: nn.Module, x: Tensor) -> Tensor:
        import nowhere  # type: ignore[import-not-found]

        return nowhere.call(layer, x)

    with pytest.raises(ValueError, match="No module named 'nowhere'"):
        check(Heads, 24, 3, call=call)


def test_modules_of_the_repository_may_be_named(tmp_path: Path) -> None:
    parts = tmp_path / "parts"
    parts.mkdir()
    (tmp_path / ".git").mkdir()
    (parts / "tables.py").write_text(
        "import torch\n\ndef places(n):\n    return 0.1 * torch.arange(n)[:, None]\n"
    )
    path = tmp_path / "attention.py"
    path.write_text(LAYER)
    call = "lambda layer, x: layer(x, parts.tables.places(x.shape[1]))"
    verdict = check_file(str(path), {"activation": "nn.Identity"}, call=call)
    assert verdict.passed, str(verdict)
    assert verdict["move"].severity == "skipped"


def test_names_of_a_calls_arguments_are_no_modules(tmp_path: Path) -> None:
    path = tmp_path / "attention.py"
    path.write_text(LAYER)
    (tmp_path / "layer.py").write_text("raise SystemExit(3)\n")
    call = SHOWN.replace("layer(x,", "layer.forward(x,")
    assert check_file(str(path), {"activation": "nn.Identity"}, call=call).passed


def test_an_expression_that_cannot_be_evaluated_is_no_word(tmp_path: Path) -> None:
    path = tmp_path / "attention.py"
    path.write_text(LAYER)
    with pytest.raises(ValueError, match=r"--kind 'made\(3\)': NameError"):
        check_file(str(path), {"activation": "nn.Identity", "kind": "made(3)"}, call=SHOWN)


def test_a_constructor_is_asked_about_as_long_as_something_is_made_up() -> None:
    def build(flavour: int, dim: int = 24) -> nn.Module:
        if flavour < 50:
            raise ValueError("flavour is too small")
        return Heads(dim, 3)

    with pytest.raises(ValueError, match=r"--flavour …"):
        check(build, dim=24)

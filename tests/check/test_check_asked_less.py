"""What a layer is called with, and what is held against it then."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor, nn

from headwise.check import check
from headwise.check.target.names import calling_role
from headwise.check.target.resolve import resolve


class Base(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.to_q, self.to_kv = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim)
        self.out = nn.Linear(dim, dim)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (one.unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in (q, k, v))
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class NormOfContext(Base):
    """A flag that speaks of a context is no length of one."""

    def __init__(self, dim: int, heads: int, norm_context: bool = False) -> None:
        super().__init__(dim, heads)
        self.norm = nn.LayerNorm(dim) if norm_context else nn.Identity()

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        other = x if context is None else self.norm(context)
        return self.attend(self.to_q(x), *self.to_kv(other).chunk(2, -1))


class NonCausal(Base):
    """Attention of every token to all others (non causal)."""

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(self.to_q(x), *self.to_kv(x).chunk(2, -1))


class Luong(nn.Module):
    """Gives weights and nothing else, one number for each token."""

    def __init__(self, method: str, hidden_size: int) -> None:
        super().__init__()
        if method not in ["dot", "general"]:
            raise ValueError(method)
        self.method, self.attn = method, nn.Linear(hidden_size, hidden_size)

    def forward(self, hidden: Tensor, encoder_outputs: Tensor) -> Tensor:
        keys = encoder_outputs if self.method == "dot" else self.attn(encoder_outputs)
        return (hidden * keys).sum(2).t().softmax(1).unsqueeze(1)


class Held(nn.Module):
    """Is built with queries, keys and values."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        super().__init__()
        self.q, self.k, self.v = q, k, v

    def forward(self) -> Tensor:
        return (self.q @ self.k.mT / self.q.shape[-1] ** 0.5).softmax(-1) @ self.v


class HeldUnscaled(Held):
    def forward(self) -> Tensor:
        return (self.q @ self.k.mT).softmax(-1) @ self.v


class Haloed(Base):
    """Hides what it should show, whatever the number is that was made up."""

    def __init__(self, dim: int, heads: int, halo_size: int) -> None:
        super().__init__(dim, heads)
        self.halo = halo_size

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.pad(x, (0, 0, self.halo, self.halo))[:, self.halo : -self.halo]
        return self.out(self.to_q(x).tanh() * self.to_kv(x).chunk(2, -1)[1].sigmoid())


@pytest.mark.parametrize("layer", [NormOfContext, NonCausal])
def test_what_is_right(layer: type[nn.Module]) -> None:
    verdict = check(layer)
    assert verdict.passed, verdict
    assert not resolve(layer).causal


def test_weights_alone_are_no_output() -> None:
    with pytest.raises(ValueError, match="how to call"):
        check(Luong)


def test_a_class_that_holds_its_queries_is_a_function_of_them() -> None:
    assert check(Held).passed
    assert check(HeldUnscaled).errors[0].rule == "scale"


def test_what_comes_whatever_was_made_up_stands_on_no_guess() -> None:
    verdict = check(Haloed)
    assert "past-used" in [one.rule for one in verdict.errors], verdict


def test_sizes_that_take_all_memory_are_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def copied(target: object) -> object:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1")

    monkeypatch.setattr(sys.modules["headwise.check.target.module_target"], "copied", copied)
    with pytest.raises(ValueError, match="more memory than there is"):
        check(NonCausal)


def test_names_of_lengths() -> None:
    assert {calling_role(name) for name in ("xs_lens", "src_len", "memory_lengths")} == {"lengths"}
    assert calling_role("kv_len") != "lengths"


class HeadsApart(Base):
    """Forgets to join the heads, and takes another sequence under a name of its own."""

    def forward(self, x: Tensor, somewhere: Tensor) -> Tensor:
        q, k, v = self.to_q(x), *self.to_kv(somewhere).chunk(2, -1)
        q, k, v = (one.unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in (q, k, v))
        return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v


class TooWide(Base):
    """A table as wide as all heads together, with rows that must be told."""

    def __init__(self, dim: int, heads: int, max_rows: int) -> None:
        super().__init__(dim, heads)
        self.table = nn.Parameter(torch.randn(heads, max_rows, dim))

    def forward(self, x: Tensor) -> Tensor:
        q = self.to_q(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        bias = q @ self.table[:, : x.shape[1]].mT
        k, v = self.to_kv(x).chunk(2, -1)
        return self.attend(self.to_q(x), k, v) + bias.sum()


def test_heads_apart_are_wrong_whatever_was_guessed() -> None:
    first = check(HeadsApart).errors[0]
    assert first.rule == "shape"
    assert "Join the heads again" in first.hint


def test_a_number_that_changes_nothing_is_not_at_fault() -> None:
    first = check(TooWide).errors[0]
    assert first.rule == "runs"
    assert "self.table" in first.message

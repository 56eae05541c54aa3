"""Caches of keys and values, in the forms in which people write them: a right one passes, and one
whose mask, positions or storing are wrong does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headwise.check import check
from headwise.layers.kv_cache import KVCache

Kept = tuple[Tensor, Tensor]


class Layer(nn.Module):
    """Causal attention; a subclass says where keys and values of the tokens before are kept."""

    moved = True  # whether the mask moves with what is cached

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads, self.head_dim = n_heads, d_model // n_heads
        self.w_q, self.w_k, self.w_v = (nn.Linear(d_model, d_model) for _ in range(3))
        self.w_o = nn.Linear(d_model, d_model)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (
            layer(x).view(*x.shape[:2], self.n_heads, self.head_dim).transpose(1, 2)
            for layer in (self.w_q, self.w_k, self.w_v)
        )
        return q, k, v

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.transpose(-2, -1) / self.head_dim**0.5
        new, whole = scores.shape[-2:]
        if new > 1:
            ones = torch.ones(new, whole, dtype=torch.bool, device=q.device)
            before = whole - new if self.moved else 0
            scores = scores.masked_fill(ones.triu(1 + before), float("-inf"))
        return self.w_o((scores.softmax(dim=-1) @ v).transpose(1, 2).flatten(2))


def join(past: Any, k: Tensor, v: Tensor) -> Kept:
    return torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)


class HandedBack(Layer):
    """What comes back goes in again."""

    def forward(self, x: Tensor, past: Kept | None = None) -> tuple[Tensor, Kept]:
        q, k, v = self.project(x)
        if past is not None:
            k, v = join(past, k, v)
        return self.attend(q, k, v), (k, v)


class IfAsked(HandedBack):
    """It comes back where a flag is set."""

    def forward(self, x: Tensor, layer_past: Any = None, use_cache: bool = False) -> Any:
        out, present = super().forward(x, layer_past)
        return (out, present) if use_cache else out


class Stacked(Layer):
    """Keys and values in one tensor."""

    def forward(self, x: Tensor, kv_cache: Tensor | None = None) -> tuple[Tensor, Tensor]:
        q, k, v = self.project(x)
        if kv_cache is not None:
            k, v = join(kv_cache, k, v)
        return self.attend(q, k, v), torch.stack((k, v))


class InADictionary(HandedBack):
    """The call fills a dictionary."""

    def forward(self, x: Tensor, cache: dict[str, Tensor] | None = None) -> Tensor:
        q, k, v = self.project(x)
        if cache is not None:
            if cache:
                k, v = join((cache["k"], cache["v"]), k, v)
            cache.update(k=k, v=v)
        return self.attend(q, k, v)


class InAList(Layer):
    """The call fills a list."""

    def forward(self, x: Tensor, kv_cache: list[Tensor] | None = None) -> Tensor:
        q, k, v = self.project(x)
        if kv_cache is not None:
            if len(kv_cache) > 0:
                k, v = join(kv_cache, k, v)
            kv_cache[:] = [k, v]
        return self.attend(q, k, v)


class OwnCache:
    """A cache of the file's own class."""

    def __init__(self) -> None:
        self.kept: Kept | None = None

    def update(self, k: Tensor, v: Tensor) -> Kept:
        self.kept = (k, v) if self.kept is None else join(self.kept, k, v)
        return self.kept


class OfItsOwnClass(Layer):
    def forward(self, x: Tensor, cache: OwnCache | None = None) -> Tensor:
        q, k, v = self.project(x)
        if cache is not None:
            k, v = cache.update(k, v)
        return self.attend(q, k, v)


class InABuffer(Layer):
    """Written to by each call that has the flag, from where the chunk begins."""

    def __init__(self, d_model: int, n_heads: int, max_batch_size: int, max_len: int) -> None:
        super().__init__(d_model, n_heads)
        for name in ("k_kept", "v_kept"):
            rows = torch.zeros(max_batch_size, n_heads, max_len, self.head_dim)
            self.register_buffer(name, rows, persistent=False)

    def forward(self, x: Tensor, start_pos: int = 0, use_cache: bool = False) -> Tensor:
        q, k, v = self.project(x)
        if use_cache:
            end = start_pos + x.shape[1]
            self.k_kept[: len(x), :, start_pos:end] = k
            self.v_kept[: len(x), :, start_pos:end] = v
            k, v = self.k_kept[: len(x), :, :end], self.v_kept[: len(x), :, :end]
        return self.attend(q, k, v)


FORMS = (HandedBack, IfAsked, Stacked, InADictionary, InAList, OfItsOwnClass, InABuffer)


@pytest.mark.parametrize("form", FORMS)
def test_a_cache_is_used_and_its_mask_compared(form: type[Layer]) -> None:
    right = check(form)
    assert right.passed, str(right)
    assert right["cache"].severity == "passed", right["cache"].message
    assert "cache" in right.notes
    wrong = check(type(form.__name__, (form,), {"moved": False}))
    assert wrong["cache"].severity in ("error", "skipped"), str(wrong)
    if form in (HandedBack, Stacked, InABuffer):  # it cannot be meant otherwise
        (one,) = wrong.errors
        assert one.rule == "cache"
        assert "its mask is not aligned to the end" in one.message
        assert one.example is not None
        assert one.example.token == 3


class Turned(Layer):
    """With rotary positions, which go on where the cache ends."""

    goes_on, twice = True, False

    def forward(self, x: Tensor, past: Kept | None = None) -> tuple[Tensor, Kept]:
        q, k, v = self.project(x)
        first = past[0].shape[2] if past is not None and self.goes_on else 0
        if self.twice:
            kept = k if past is None else torch.cat((past[0], k), 2)
            values = v if past is None else torch.cat((past[1], v), 2)
            turned = self.rotate(kept, 0)
            return self.attend(self.rotate(q, first), turned, values), (turned, values)
        q, k = self.rotate(q, first), self.rotate(k, first)
        if past is not None:
            k, v = join(past, k, v)
        return self.attend(q, k, v), (k, v)

    def rotate(self, rows: Tensor, first: int) -> Tensor:
        places = torch.arange(first, first + rows.shape[2], device=rows.device)
        half = rows.shape[-1] // 2
        angles = places[:, None] * 10000.0 ** -(torch.arange(half, device=rows.device) / half)
        cos, sin = angles.cos().to(rows), angles.sin().to(rows)
        a, b = rows[..., :half], rows[..., half:]
        return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


class InFront(HandedBack):
    """New keys stand before the old ones, and new values behind."""

    def forward(self, x: Tensor, past: Kept | None = None) -> tuple[Tensor, Kept]:
        q, k, v = self.project(x)
        if past is not None:
            k, v = torch.cat((k, past[0]), 2), torch.cat((past[1], v), 2)
        return self.attend(q, k, v), (k, v)


class Forgets(HandedBack):
    def forward(self, x: Tensor, past: Kept | None = None) -> tuple[Tensor, Kept]:
        return super().forward(x, None)


class FromTheFront(HandedBack):
    """Each chunk sees the first keys, a single token as well."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.transpose(-2, -1) / self.head_dim**0.5
        ones = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device)
        weights = scores.masked_fill(ones.triu(1), float("-inf")).softmax(dim=-1)
        return self.w_o((weights @ v).transpose(1, 2).flatten(2))


class OnTheWrongAxis(HandedBack):
    def forward(self, x: Tensor, past: Kept | None = None) -> tuple[Tensor, Kept]:
        q, k, v = self.project(x)
        if past is not None:
            k, v = torch.cat((past[0], k), 1), torch.cat((past[1], v), 1)
        return self.attend(q, k, v), (k, v)


@pytest.mark.parametrize(
    ("layer", "says"),
    [
        (type("Turned", (Turned,), {"goes_on": False}), "keys are kept, but positions restart"),
        (type("Turned", (Turned,), {"twice": True}), "From the second chunk on the output differs"),
        (InFront, "From the second chunk on the output differs"),
        (FromTheFront, "each chunk's tokens see the first keys"),
        (Forgets, "Earlier chunks have no effect"),
        (OnTheWrongAxis, "The second chunk fails"),
    ],
)
def test_what_is_wrong_is_said(layer: type[Layer], says: str) -> None:
    (one,) = check(layer).errors
    assert (one.rule, one.message[: len(says)]) == ("cache", says) or says in one.message, one
    assert one.hint


def test_positions_go_on_behind_a_cache() -> None:
    verdict = check(Turned)
    assert verdict.findings == (), str(verdict)
    assert verdict["cache"].severity == "passed"
    assert "rotary" in verdict.notes


# ---- shown ---------------------------------------------------------------------------------------


class UnderAnotherName(HandedBack):
    def forward(self, x: Tensor, of_old: Kept | None = None, first: int = 0) -> Any:  # type: ignore[override]
        out, kept = super().forward(x, of_old)
        return {"out": out, "state": kept}


def shown(layer: nn.Module, x: Tensor, past: Any) -> Any:
    return layer(x, past["state"] if past else None)


def test_a_call_shows_how_a_cache_is_used() -> None:
    verdict = check(UnderAnotherName, call=shown)
    assert verdict.passed, str(verdict)
    assert verdict["cache"].severity == "passed"
    wrong = type("UnderAnotherName", (UnderAnotherName,), {"moved": False})
    assert [one.rule for one in check(wrong, call=shown).errors] == ["cache"]
    forgets = check(UnderAnotherName, call=lambda layer, x, past: layer(x))
    assert "Earlier chunks have no effect" in forgets["cache"].message


# ---- what must stay silent -----------------------------------------------------------------------


class OfConstructor(Layer):
    """Switched on as it is built."""

    def __init__(self, d_model: int, n_heads: int, kv_cache: bool = False) -> None:
        super().__init__(d_model, n_heads)
        self.kv_cache = kv_cache
        self.kept: Kept | None = None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)
        if self.kv_cache and self.kept is not None:
            k, v = join(self.kept, k, v)
        self.kept = k, v
        return self.attend(q, k, v)


class OnlyGivesThem(Layer):
    """Keys and values come back and cannot go in."""

    def forward(self, x: Tensor, return_kv: bool = False) -> Any:
        q, k, v = self.project(x)
        out = self.attend(q, k, v)
        return (out, (k, v)) if return_kv else out


class OnlyPlaced(Turned):
    """Knows where a chunk begins, and keeps nothing."""

    def forward(self, x: Tensor, offset: int = 0) -> Tensor:  # type: ignore[override]
        q, k, v = self.project(x)
        return self.attend(self.rotate(q, offset), self.rotate(k, offset), v)


class OfAKindOfItsOwn(Layer):
    def forward(self, x: Tensor, cache: Any = None) -> Tensor:
        if cache is not None:
            raise NotImplementedError("a cache of a kind of its own")
        q, k, v = self.project(x)
        return self.attend(q, k, v)


class OfOurs(Layer):
    """A cache of headwise's."""

    def forward(self, x: Tensor, cache: KVCache | None = None) -> Tensor:
        q, k, v = self.project(x)
        if cache is not None:
            k, v = cache.append(k, v)
        return self.attend(q, k, v)


class OneByOne(HandedBack):
    """Takes one new token at a time, and says so."""

    def forward(self, x: Tensor, past: Kept | None = None) -> tuple[Tensor, Kept]:
        if past is not None and x.shape[1] > 1:
            raise ValueError("one token at a time")
        return super().forward(x, past)


@pytest.mark.parametrize(
    "layer", [OfConstructor, OnlyGivesThem, OnlyPlaced, OfAKindOfItsOwn, OfOurs, OneByOne]
)
def test_what_is_used_in_another_way_is_let_be(layer: type[Layer]) -> None:
    verdict = check(layer)
    assert verdict.errors == (), str(verdict)


def test_keys_of_an_earlier_call_are_no_part_of_the_next() -> None:
    first = check(OfConstructor, kv_cache=True).errors[0]
    assert first.rule in ("deterministic", "runs", "shape"), first

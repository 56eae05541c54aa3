"""Caches of keys and values, in the forms in which people write them: a right one passes, and one
whose mask, positions or storing are wrong does not."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headwise.check import check

Kept = tuple[Tensor, Tensor]


class Layer(nn.Module):
    """Causal attention; a subclass says where keys and values of the tokens before are kept."""

    moved = True  # whether the mask moves with what is cached

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.head_dim = d_model // n_heads
        self.w_q, self.w_k, self.w_v = (nn.Linear(d_model, d_model) for _ in range(3))
        self.w_o = nn.Linear(d_model, d_model)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (
            layer(x).view(*x.shape[:2], self.n_heads, self.head_dim).transpose(1, 2)
            for layer in (self.w_q, self.w_k, self.w_v)
        )
        return q, k, v

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.head_dim)
        new, whole = scores.shape[-2:]
        if new > 1:
            ones = torch.ones(new, whole, dtype=torch.bool, device=q.device)
            before = whole - new if self.moved else 0
            scores = scores.masked_fill(ones.triu(1 + before), float("-inf"))
        mixed = scores.softmax(dim=-1) @ v
        return self.w_o(mixed.transpose(1, 2).flatten(2))


def join(past: Any, k: Tensor, v: Tensor) -> Kept:
    return torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)


class InABuffer(Layer):
    """Written to by each call, trained or not."""

    def __init__(self, d_model: int, n_heads: int, max_batch_size: int, max_len: int) -> None:
        super().__init__(d_model, n_heads)
        for name in ("k_kept", "v_kept"):
            rows = torch.zeros(max_batch_size, n_heads, max_len, self.head_dim)
            self.register_buffer(name, rows, persistent=False)

    def forward(self, x: Tensor, start_pos: int = 0) -> Tensor:
        q, k, v = self.project(x)
        end = start_pos + x.shape[1]
        for kept, new in ((self.k_kept, k), (self.v_kept, v)):
            kept[: len(x), :, start_pos:end] = self.stored(new)
        return self.attend(q, self.k_kept[: len(x), :, :end], self.v_kept[: len(x), :, :end])

    def stored(self, new: Tensor) -> Tensor:
        return new


def test_a_second_step_of_training_goes_through_the_first() -> None:
    one = check(InABuffer)["gradients"]
    assert (one.severity, "second step" in one.message) == ("warning", True)


class OfConstructor(Layer):
    """Switched on as it is built."""

    def __init__(self, d_model: int, n_heads: int, kv_cache: bool = False) -> None:
        super().__init__(d_model, n_heads)
        self.kv_cache = kv_cache
        self.k_cache: Tensor | None = None
        self.v_cache: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)
        if self.kv_cache and self.k_cache is not None and self.v_cache is not None:
            k, v = join((self.k_cache, self.v_cache), k, v)
        self.k_cache, self.v_cache = k, v
        return self.attend(q, k, v)


class Forgets(OfConstructor):
    """With a method that empties it, and what it counted."""

    def reset_cache(self) -> None:
        self.k_cache = self.v_cache = None


class OfNumber(OfConstructor):
    """By a number."""

    def __init__(self, d_model: int, n_heads: int, cache_mode: int = 0) -> None:
        super().__init__(d_model, n_heads, cache_mode == 1)


class OfAttribute(Layer):
    """Switched on by an attribute."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__(d_model, n_heads)
        self.use_cache = False
        self.cache: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)
        if self.use_cache:
            if self.cache:
                k, v = join((self.cache["k"], self.cache["v"]), k, v)
            self.cache = {"k": k, "v": v}
        return self.attend(q, k, v)


class StillCounts(OfAttribute):
    """Whose method forgets the keys, and perhaps not how many there were."""

    forgets = True

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__(d_model, n_heads)
        self.seen = 0
        self.places = nn.Embedding(32, d_model)

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x + self.steps(x))
        self.seen += x.shape[1] if self.use_cache else 0
        return out

    def steps(self, x: Tensor) -> Tensor:
        return self.places(torch.arange(self.seen, self.seen + x.shape[1], device=x.device))

    def clear_cache(self) -> None:
        self.cache = {}
        self.seen = 0 if self.forgets else self.seen


class Inferring(Layer):
    """Switched on in the call, by a word of its own."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__(d_model, n_heads)
        shape = (4, 16, n_heads, self.head_dim)
        self.register_buffer("cache_k", torch.zeros(shape), persistent=False)
        self.register_buffer("cache_v", torch.zeros(shape), persistent=False)

    def forward(self, x: Tensor, start_pos: int = 0, inference: bool = False) -> Tensor:
        q, k, v = self.project(x)
        if inference:
            rows, end = len(x), start_pos + x.shape[1]
            cache_k, cache_v = self.get_buffer("cache_k"), self.get_buffer("cache_v")
            cache_k[:rows, start_pos:end] = k.transpose(1, 2)
            cache_v[:rows, start_pos:end] = v.transpose(1, 2)
            k = cache_k[:rows, :end].transpose(1, 2)
            v = cache_v[:rows, :end].transpose(1, 2)
        return self.attend(q, k, v)


class SetUp(Layer):
    """Made by a method."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__(d_model, n_heads)
        self.kept: tuple[Tensor, Tensor] | None = None
        self.seen = 0

    def setup_cache(self, max_batch_size: int, max_len: int, dtype: Any = torch.float32) -> None:
        shape = (max_batch_size, self.n_heads, max_len, self.head_dim)
        device = self.w_q.weight.device
        self.kept = torch.zeros(shape, device=device), torch.zeros(shape, device=device)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)
        if self.kept is not None:
            end = self.seen + x.shape[1]
            self.kept = tuple(one.to(k) for one in self.kept)  # type: ignore[assignment]
            for held, new in zip(self.kept or (), (k, v), strict=True):
                held[: len(x), :, self.seen : end] = new
            k, v = (one[: len(x), :, :end] for one in self.kept or ())
            self.seen = end
        return self.attend(q, k, v)


class Apart(Layer):
    """Keys and values go in apart, and come back together."""

    def forward(
        self, x: Tensor, past_key: Tensor | None = None, past_value: Tensor | None = None
    ) -> tuple[Tensor, Kept]:
        q, k, v = self.project(x)
        if past_key is not None and past_value is not None:
            k, v = join((past_key, past_value), k, v)
        return self.attend(q, k, v), (k, v)


class InAList(Layer):
    """A list that the call fills."""

    def forward(self, x: Tensor, kv_cache: list[Tensor] | None = None) -> Tensor:
        q, k, v = self.project(x)
        if kv_cache is not None:
            if len(kv_cache) > 0:
                k, v = join(kv_cache, k, v)
            kv_cache[:] = [k, v]
        return self.attend(q, k, v)


class InADictionary(Layer):
    """A dictionary that the call looks into, and must be given."""

    def forward(self, x: Tensor, kv_cache: dict[str, Any]) -> Tensor:
        q, k, v = self.project(x)
        if kv_cache["k"] is not None:
            k, v = join((kv_cache["k"], kv_cache["v"]), k, v)
        kv_cache["k"], kv_cache["v"] = k, v
        return self.attend(q, k, v)


class OnlyIfGiven(Layer):
    """What comes back is None where nothing went in; at first there are keys of no tokens."""

    def forward(self, x: Tensor, layer_cache: Kept | None = None) -> tuple[Tensor, Kept | None]:
        q, k, v = self.project(x)
        if layer_cache is None:
            return self.attend(q, k, v), None
        k, v = join(layer_cache, k, v)
        return self.attend(q, k, v), (k, v)


class Preset(Layer):
    """Room for all tokens goes in, and where the chunk begins."""

    def forward(self, x: Tensor, kv_cache: Kept | None = None, start_pos: int = 0) -> Tensor:
        q, k, v = self.project(x)
        if kv_cache is not None:
            end = start_pos + x.shape[1]
            kv_cache[0][:, :, start_pos:end] = k
            kv_cache[1][:, :, start_pos:end] = v
            k, v = kv_cache[0][:, :, :end], kv_cache[1][:, :, :end]
        return self.attend(q, k, v)


class ByLayer(Layer):
    """A dictionary of all layers' caches."""

    def __init__(self, d_model: int, n_heads: int, layer_idx: int = 0) -> None:
        super().__init__(d_model, n_heads)
        self.layer_idx = layer_idx

    def forward(self, x: Tensor, past_kv: dict[int, Kept] | None = None) -> Tensor:
        q, k, v = self.project(x)
        if past_kv is not None:
            if self.layer_idx in past_kv:
                k, v = join(past_kv[self.layer_idx], k, v)
            past_kv[self.layer_idx] = (k, v)
        return self.attend(q, k, v)


class TableCache:
    """A cache of its own class, which holds room for all tokens of one sequence."""

    def __init__(self, n_heads: int, head_dim: int, max_len: int = 16) -> None:
        self.k, self.v = (torch.zeros(1, n_heads, max_len, head_dim) for _ in "kv")

    def update(self, start: int, k: Tensor, v: Tensor) -> Kept:
        end = start + k.shape[2]
        self.k[:, :, start:end], self.v[:, :, start:end] = k, v
        return self.k[:, :, :end], self.v[:, :, :end]


class Placed(Layer):
    """A cache of its own class in an attribute."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__(d_model, n_heads)
        self.kv_cache: TableCache | None = None

    def forward(self, x: Tensor, offset: int = 0) -> Tensor:
        q, k, v = self.project(x)
        if self.kv_cache is not None:
            k, v = self.kv_cache.update(offset, k, v)
        return self.attend(q, k, v)


FORMS: tuple[type[Layer], ...] = (
    OfConstructor,
    Forgets,
    OfNumber,
    OfAttribute,
    Inferring,
    SetUp,
    Apart,
    InAList,
    InADictionary,
    OnlyIfGiven,
    Preset,
    ByLayer,
    Placed,
)


@pytest.mark.parametrize("form", FORMS)
def test_a_cache_is_driven_and_its_mask_compared(form: type[Layer]) -> None:
    right = check(form)
    assert right["cache"].severity == "passed", right["cache"].message
    assert not right.errors
    first = check(type(form.__name__, (form,), {"moved": False})).errors[0]
    assert first.rule == "cache"
    assert "the mask must be aligned to the end" in first.hint


def test_what_is_emptied_must_be_empty() -> None:
    assert not check(StillCounts).errors
    first = check(type("StillCounts", (StillCounts,), {"forgets": False})).errors[0]
    assert (first.rule, "empties its cache" in first.message) == ("cache", True)


class Turned(OfConstructor):
    """With rotary positions, which go on where the cache ends."""

    goes_on = True

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)
        first = 0
        if self.kv_cache and self.k_cache is not None and self.goes_on:
            first = self.k_cache.shape[2]
        q, k = self.rotate(q, first), self.rotate(k, first)
        if self.kv_cache and self.k_cache is not None and self.v_cache is not None:
            k, v = join((self.k_cache, self.v_cache), k, v)
        if self.kv_cache:
            self.k_cache, self.v_cache = k, v
        return self.attend(q, k, v)

    def rotate(self, rows: Tensor, first: int) -> Tensor:
        places = torch.arange(first, first + rows.shape[2], device=rows.device)
        half = rows.shape[-1] // 2
        angles = places[:, None] * 10000.0 ** -(torch.arange(half, device=rows.device) / half)
        cos, sin = angles.cos().to(rows), angles.sin().to(rows)
        a, b = rows[..., :half], rows[..., half:]
        return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


class TurnedAgain(Turned):
    """Whose cached keys are turned a second time with each chunk."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)
        first = self.k_cache.shape[2] if self.kv_cache and self.k_cache is not None else 0
        if self.kv_cache and self.k_cache is not None and self.v_cache is not None:
            k, v = join((self.k_cache, self.v_cache), k, v)
        q, k = self.rotate(q, first), self.rotate(k, 0)
        if self.kv_cache:
            self.k_cache, self.v_cache = k, v
        return self.attend(q, k, v)


class GrowsTwice(OfConstructor):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)
        if self.kv_cache:
            if self.k_cache is not None and self.v_cache is not None:
                k, v = join((self.k_cache, self.v_cache), k, v)
                k, v = join((self.k_cache, self.v_cache), k, v)
            self.k_cache, self.v_cache = k, v
        return self.attend(q, k, v)


def test_positions_go_on_behind_a_cache() -> None:
    assert check(Turned)["cache"].severity == "passed"
    for wrong in (type("Turned", (Turned,), {"goes_on": False}), TurnedAgain, GrowsTwice):
        first = check(wrong).errors[0]
        assert (first.rule, first.message[:20]) == ("cache", "With kv_cache=True: ")


class NeverEmptied(Layer):
    """Keeps the keys of all calls, of any sequence."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__(d_model, n_heads)
        self.kept: Kept | None = None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)
        if self.kept is not None:
            k, v = join(self.kept, k, v)
        self.kept = k, v
        return self.attend(q, k, v)


def test_keys_of_an_earlier_call_are_named() -> None:
    first = check(NeverEmptied).errors[0]
    assert first.rule == "deterministic"
    assert "as long as nothing was called before" in first.message


# --- what must stay silent ------------------------------------------------------------------------


class CachesItsTable(Layer):
    """A cache of something else."""

    def __init__(self, d_model: int, n_heads: int, cache_weights: bool = False) -> None:
        super().__init__(d_model, n_heads)
        self.cache_weights = cache_weights
        self.cached: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)
        if self.cache_weights:
            self.cached = (q @ k.transpose(-2, -1)).softmax(-1)
        return self.attend(q, k, v)


class KeepsItsTable(Layer):
    """A table that is made of a parameter, once for each length."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__(d_model, n_heads)
        self.slope = nn.Parameter(torch.ones(d_model), requires_grad=False)
        self.kept: dict[tuple[int, torch.device], Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        key = x.shape[1], x.device
        if key not in self.kept:
            self.kept[key] = torch.arange(key[0]).to(x)[:, None] / 16 * self.slope
        q, k, v = self.project(x + self.kept[key])
        return self.attend(q, k, v)


class OneByOne(OfConstructor):
    """Takes one new token at a time, and says so."""

    def forward(self, x: Tensor) -> Tensor:
        if self.kv_cache and self.k_cache is not None and x.shape[1] > 1:
            raise ValueError("one token at a time")
        return super().forward(x)


class WithAPlace(OfConstructor):
    """Whose positions are told under a name that nobody knows."""

    def forward(self, x: Tensor, angle: Any = None) -> Tensor:
        turned = x if angle is None else x * angle
        return super().forward(turned)


class Halved(OfConstructor):
    """Keeps fewer digits."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)
        if self.kv_cache:
            if self.k_cache is not None and self.v_cache is not None:
                k, v = join((self.k_cache.to(k), self.v_cache.to(v)), k, v)
            self.k_cache, self.v_cache = k.bfloat16(), v.bfloat16()
        return self.attend(q, k, v)


@pytest.mark.parametrize("layer", [CachesItsTable, KeepsItsTable, OneByOne, WithAPlace, Halved])
def test_what_is_used_in_another_way_is_let_be(layer: type[Layer]) -> None:
    assert not check(layer).errors


class OnlyGivesThem(Layer):
    """Keys and values come back and cannot go in."""

    def forward(self, x: Tensor, return_kv: bool = False) -> Any:
        q, k, v = self.project(x)
        out = self.attend(q, k, v)
        return (out, (k, v)) if return_kv else out


class OnlyPlaced(Turned):
    """Knows where a chunk begins, and keeps nothing."""

    def __init__(self, d_model: int, n_heads: int) -> None:
        super().__init__(d_model, n_heads)

    def forward(self, x: Tensor, offset: int = 0) -> Tensor:
        q, k, v = self.project(x)
        return self.attend(self.rotate(q, offset), self.rotate(k, offset), v)


class UnderAnotherName(Layer):
    """A cache under a name that nobody knows."""

    def forward(self, x: Tensor, memory_of_old: Any = None, use_cache: bool = False) -> Any:
        q, k, v = self.project(x)
        if memory_of_old is not None:
            k, v = join(memory_of_old, k, v)
        out = self.attend(q, k, v)
        return (out, (k, v)) if use_cache else out


class OfAnotherSequence(Layer):
    """Keeps the keys of another sequence, which are all there from the first call on."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, cache: Kept | None = None) -> Any:
        queries, keys, values = (
            layer(one).unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
            for layer, one in ((self.w_q, q), (self.w_k, k), (self.w_v, v))
        )
        if cache is not None:
            keys, values = cache
        return self.attend(queries, keys, values), (keys, values)


@pytest.mark.parametrize("layer", [OnlyGivesThem, OnlyPlaced, UnderAnotherName, OfAnotherSequence])
def test_a_flag_or_a_place_alone_is_no_cache(layer: type[Layer]) -> None:
    assert not check(layer).errors


class Threefold(Layer):
    """Queries, keys and values go in apart; keys and values come back with those before them."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, past: Kept | None = None
    ) -> tuple[Tensor, Kept]:
        q, k, v = (
            layer(one).view(*one.shape[:2], self.n_heads, self.head_dim).transpose(1, 2)
            for layer, one in ((self.w_q, query), (self.w_k, key), (self.w_v, value))
        )
        if past is not None:
            k, v = self.behind(past, k, v)
        return self.attend(q, k, v), (k, v)

    def behind(self, past: Kept, k: Tensor, v: Tensor) -> Kept:
        return join(past, k, v)


class ValuesBefore(Threefold):
    """New values stand before the old ones, and new keys behind."""

    def behind(self, past: Kept, k: Tensor, v: Tensor) -> Kept:
        return torch.cat((past[0], k), 2), torch.cat((v, past[1]), 2)


class OnlyTheNew(Layer):
    """What comes back is the chunk's own part, which the caller puts behind the rest."""

    def forward(self, x: Tensor, layer_past: Tensor | None = None) -> tuple[Tensor, Tensor]:
        q, k, v = self.project(x)
        present = torch.stack((k, v))
        if layer_past is not None:
            k, v = self.behind(layer_past, k, v)
        return self.attend(q, k, v), present

    def behind(self, past: Tensor, k: Tensor, v: Tensor) -> Kept:
        return join(past, k, v)


class OnlyTheNewBefore(OnlyTheNew):
    def behind(self, past: Tensor, k: Tensor, v: Tensor) -> Kept:
        return torch.cat((past[0], k), 2), torch.cat((v, past[1]), 2)


@pytest.mark.parametrize(
    ("right", "wrong"), [(Threefold, ValuesBefore), (OnlyTheNew, OnlyTheNewBefore)]
)
def test_values_stand_beside_their_keys(right: type[Layer], wrong: type[Layer]) -> None:
    assert check(right, 24, 4)["cache"].severity == "passed"
    assert "the output differs from token 3 on" in check(wrong, 24, 4)["cache"].message

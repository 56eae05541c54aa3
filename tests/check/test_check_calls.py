"""How a layer is called when it is checked: masks in every form, caches, positions, small rooms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headwise.check import Finding, check
from headwise.check.findings.triage import joined
from headwise.check.target.call_adapter import KINDS, SHAPES, MaskForm
from headwise.check.target.names import building_role, calling_role
from headwise.check.target.resolve import resolve

UNDERSTOOD: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "may": lambda scores, mask: scores.masked_fill(~mask, -torch.inf),
    "hidden": lambda scores, mask: scores.masked_fill(mask, -torch.inf),
    "added": lambda scores, mask: scores + mask,
    "ones": lambda scores, mask: scores.masked_fill(mask < 0.5, -torch.inf),
    "later": lambda scores, mask: scores.masked_fill(mask > 0.5, -torch.inf),
}
BROADCAST: dict[str, Callable[[Tensor], Tensor]] = {
    "[T, S]": lambda mask: mask[None, None],
    "[1, 1, T, S]": lambda mask: mask,
    "[B, 1, T, S]": lambda mask: mask,
    "[B, T, S]": lambda mask: mask[:, None],
    "[1, T, S]": lambda mask: mask[:, None],
    "[B, H, T, S]": lambda mask: mask,
    "[B·H, T, S]": lambda mask: mask.unflatten(0, (-1, 3)),
    "[B, S]": lambda mask: mask[:, None, None],
    "[B, 1, 1, S]": lambda mask: mask,
}
AXES = {"[T, S]": 2, "[B, T, S]": 3, "[1, T, S]": 3, "[B·H, T, S]": 3, "[B, S]": 2}


class Layer(nn.Module):
    """Right attention; a subclass says what else its call takes."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))

    def split(self, rows: Tensor) -> Tensor:
        return rows.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def attend(self, x: Tensor, hide: Callable[[Tensor], Tensor] = lambda scores: scores) -> Tensor:
        q, k, v = self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))
        return self.finish(q, k, v, hide)

    def finish(
        self, q: Tensor, k: Tensor, v: Tensor, hide: Callable[[Tensor], Tensor] = lambda s: s
    ) -> Tensor:
        weights = torch.softmax(hide(q @ k.mT / q.shape[-1] ** 0.5), dim=-1)
        return self.o((weights @ v).transpose(1, 2).flatten(2))


def later(scores: Tensor) -> Tensor:
    tokens, keys = scores.shape[-2:]
    return torch.ones(tokens, keys, dtype=torch.bool, device=scores.device).triu(1 + keys - tokens)


def causal(scores: Tensor) -> Tensor:
    return scores.masked_fill(later(scores), -torch.inf)


def masked(kind: str, shape: str, argument: str) -> type[Layer]:
    """A layer that understands its mask in one form only."""

    def take_mask(scores: Tensor, mask: Tensor | None) -> Tensor:
        if mask is None:
            return scores
        if (mask.dtype == torch.bool) != (kind in ("may", "hidden")):
            raise TypeError(f"the mask is {mask.dtype}")
        if mask.ndim != AXES.get(shape, 4):
            raise ValueError(f"the mask has {mask.ndim} axes")
        if shape == "[B, H, T, S]" and mask.shape[1] == 1:
            raise ValueError("the mask needs an axis for the heads")
        return UNDERSTOOD[kind](scores, BROADCAST[shape](mask))

    space: dict[str, Any] = {"Layer": Layer, "take_mask": take_mask}
    code = f"""class Hiding(Layer):
    def forward(self, x, {argument}=None):
        return self.attend(x, lambda scores: take_mask(scores, {argument}))"""
    exec(code, space)
    return space["Hiding"]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", UNDERSTOOD)
def test_every_form_of_a_causal_mask_is_found(kind: str, shape: str) -> None:
    subject = resolve(masked(kind, shape, "attn_mask"))
    assert subject.causal
    assert subject.mask_form is not None
    assert subject.mask_form.argument == "attn_mask"
    assert (subject.mask_form.kind in ("may", "hidden")) == (kind in ("may", "hidden"))
    found = subject.double().influence(subject.double().input(tokens=5, batch=1))
    assert bool((found.triu(1) == 0).all())
    assert bool((found.tril() > 0).sum() == 15)


@pytest.mark.parametrize("shape", ["[B, S]", "[B, 1, 1, S]"])
@pytest.mark.parametrize("kind", UNDERSTOOD)
def test_every_form_of_a_padding_mask_is_found(kind: str, shape: str) -> None:
    verdict = check(masked(kind, shape, "key_padding_mask"))
    assert verdict.passed
    assert verdict["padding"].severity == "passed"
    assert "key_padding_mask" in verdict["padding"].message


def test_lengths_and_flags_are_passed() -> None:
    class Lengths(Layer):
        def forward(self, x: Tensor, valid_lens: Tensor | None) -> Tensor:
            if valid_lens is None:
                return self.attend(x)
            real = torch.arange(x.shape[1]) < valid_lens[:, None]
            return self.attend(x, lambda s: s.masked_fill(~real[:, None, None], -1e6))

    class Flag(Layer):
        def forward(self, x: Tensor, is_causal: bool = False) -> Tensor:
            return self.attend(x, causal) if is_causal else self.attend(x)

    assert "how many tokens" in check(Lengths)["padding"].message
    subject = resolve(Flag)
    assert (subject.causal, subject.causal_from) == (True, "mask")
    assert not resolve(Flag, causal=False).causal


def test_the_nearest_form_is_taken_where_none_hides_everything() -> None:
    class ZeroFill(Layer):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            if mask is None:
                return self.attend(x)
            return self.attend(x, lambda s: s.masked_fill(mask == 0, 0.0))

    subject = resolve(ZeroFill)
    assert subject.mask_form is not None
    assert subject.mask_form.kind == "may"
    verdict = check(ZeroFill)
    assert not verdict.passed
    assert verdict["causality"].severity == "error"


def test_positions_that_say_nothing_are_passed() -> None:
    class Rotated(Layer):
        def forward(self, x: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> Tensor:
            cos, sin = position_embeddings

            def turn(t: Tensor) -> Tensor:
                first, second = t.chunk(2, dim=-1)
                return t * cos + torch.cat((-second, first), dim=-1) * sin

            q, k = turn(self.split(self.q(x))), turn(self.split(self.k(x)))
            return self.finish(q, k, self.split(self.v(x)), causal)

    class Complex(Layer):
        def forward(self, x: Tensor, start_pos: int, freqs_cis: Tensor) -> Tensor:
            assert start_pos == 0
            assert freqs_cis.shape == (x.shape[1], 4)

            def turn(t: Tensor) -> Tensor:
                pairs = torch.view_as_complex(t.unflatten(-1, (-1, 2)).contiguous())
                return torch.view_as_real(pairs * freqs_cis).flatten(-2).to(t)

            q, k = turn(self.split(self.q(x))), turn(self.split(self.k(x)))
            return self.finish(q, k, self.split(self.v(x)), causal)

    class Numbered(Layer):
        def forward(self, x: Tensor, position_ids: Tensor) -> Tensor:
            assert position_ids.tolist() == [list(range(x.shape[1]))]
            return self.attend(x, causal)

    for layer in (Rotated, Complex, Numbered):
        assert check(layer).passed


class KeptInside(Layer):
    """A cache of its own, switched on by a flag."""

    start = 0

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, heads)
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor, use_cache: bool = False) -> Tensor:
        q, k, v = self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))
        if use_cache:
            if self.kept:
                k, v = (torch.cat(pair, 2) for pair in zip(self.kept, (k, v), strict=True))
            self.kept = [k, v]
        return self.finish(q, k, v, self.hide)

    def hide(self, scores: Tensor) -> Tensor:
        return causal(scores)


class KeptInsideMasksFromTheFront(KeptInside):
    def hide(self, scores: Tensor) -> Tensor:
        ones = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
        return scores.masked_fill(ones.triu(1), -torch.inf)


class InADictionary(Layer):
    def forward(self, x: Tensor, cache: dict[str, Tensor] | None = None) -> Tensor:
        q, k, v = self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))
        if cache is not None:
            if cache:
                k, v = torch.cat((cache["k"], k), 2), torch.cat((cache["v"], v), 2)
            cache.update(k=k, v=v)
        return self.finish(q, k, v, causal)


class HandedBack(Layer):
    def forward(self, x: Tensor, layer_past: Any = None, use_cache: bool = False) -> Any:
        q, k, v = self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))
        if layer_past is not None:
            k, v = torch.cat((layer_past[0], k), 2), torch.cat((layer_past[1], v), 2)
        out = self.finish(q, k, v, causal)
        return (out, (k, v)) if use_cache else out


class Unknown(Layer):
    def forward(self, x: Tensor, cache: Any = None) -> Tensor:
        if cache is not None:
            raise NotImplementedError("a cache of a kind of its own")
        return self.attend(x, causal)


@pytest.mark.parametrize(
    ("layer", "severity"),
    [
        (KeptInside, "passed"),
        (KeptInsideMasksFromTheFront, "error"),
        (InADictionary, "passed"),
        (HandedBack, "passed"),
        (Unknown, "skipped"),
    ],
)
def test_caches_of_every_kind_are_used(layer: type[Layer], severity: str) -> None:
    verdict = check(layer)
    assert verdict["cache"].severity == severity
    assert verdict.passed == (severity != "error")


def test_a_small_room_is_found() -> None:
    class Small(Layer):
        def __init__(self, dim: int, heads: int) -> None:
            super().__init__(dim, heads)
            self.register_buffer("lower", torch.ones(5, 5).tril(), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            lower = self.get_buffer("lower")[: x.shape[1], : x.shape[1]]
            return self.attend(x, lambda scores: scores.masked_fill(lower == 0, -torch.inf))

    subject = resolve(Small)
    assert subject.most_tokens == 4
    assert subject.input().shape == (2, 4, 24)
    assert check(Small).passed


def test_results_of_every_shape_are_read() -> None:
    class Reversed(Layer):
        def forward(self, x: Tensor) -> Any:
            q, k, v = self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))
            weights = torch.softmax(causal(q @ k.mT / q.shape[-1] ** 0.5), dim=-1)
            out = self.o((weights @ v).transpose(1, 2).flatten(2))
            return {"weights": weights, "nothing": None, "out": [out]}

    subject = resolve(Reversed)
    assert subject.out_dim == 24
    weights = subject.weights(subject.input())
    assert weights is not None
    assert weights.shape == (2, 3, 7, 7)
    assert check(Reversed)["weights"].severity == "passed"


def test_functions_that_fail_end_in_a_verdict() -> None:
    def crossed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(q @ k, dim=-1) @ v

    def summed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (torch.softmax(q @ k.mT, dim=-1) @ v).sum(-1).sum(-1)

    verdict = check(crossed)
    assert [one.rule for one in verdict.findings] == ["runs"]
    assert "torch.softmax(q @ k, dim=-1) @ v" in verdict.findings[0].message
    assert [one.rule for one in check(summed).findings] == ["shape"]


def test_mask_forms_say_what_they_are() -> None:
    assert str(MaskForm("mask", "hidden")) == "mask (True where a key is hidden, [T, S])"
    assert str(MaskForm("is_causal", "flag")) == "is_causal (True for causal attention)"
    allowed = torch.tensor([[[True, False], [True, True]]])
    assert MaskForm("m", "added").make(allowed, torch.float32).tolist() == [[0, -torch.inf], [0, 0]]
    assert MaskForm("m", "later", "[B, S]").make(allowed, torch.float32).tolist() == [[0, 1]]
    assert MaskForm("m", "may", "[B, H, T, S]").make(allowed, torch.float32, 3).shape == (
        1,
        3,
        2,
        2,
    )
    assert set(UNDERSTOOD) <= set(KINDS)


def test_names_without_a_role_have_none() -> None:
    assert building_role("colour") is None
    assert building_role("_N_Embd") == "width"
    assert calling_role("x") is None
    assert calling_role("KEY_PADDING_MASK") == "padding"


def error(rule: str, message: str = "wrong") -> Finding:
    return Finding(rule, "error", message)


def test_what_follows_from_a_named_mistake_is_no_finding() -> None:
    results = joined([error("scale")], [error("causality"), error("reload"), error("prefix")])
    assert [(one.rule, one.explained_by) for one in results] == [
        ("scale", None),
        ("causality", "scale"),
        ("reload", None),
        ("prefix", "scale"),
    ]
    assert joined([error("scale")], [error("dropout")])[1].explained_by == "scale"
    two = joined([error("scale"), error("head-split")], [error("batch")])
    assert two[-1].explained_by == "scale and head-split"


def test_what_no_mistake_explains_yields_to_what_was_seen() -> None:
    vague = replace(error("definition"), ground="weights")
    assert [one.rule for one in joined([vague], [])] == ["definition"]
    seen = joined([vague], [error("batch")])
    assert [(one.rule, one.explained_by) for one in seen] == [
        ("batch", None),
        ("definition", "batch"),
    ]
    order = Finding("order", "warning", "the order counts")
    right = Finding("definition", "passed", "the definition, with rotary positions")
    assert [one.severity for one in joined([right], [order])] == ["passed", "skipped"]
    assert [one.severity for one in joined([vague], [order])] == ["warning", "warning"]
    plain = replace(vague, ground="call")  # where no positions can be put in
    assert [one.severity for one in joined([plain], [order])] == ["error", "skipped"]


def test_one_fault_in_handling_explains_its_followers() -> None:
    results = joined([], [error("input-kept"), error("causality", "an inplace operation")])
    assert results[1].explained_by == "input-kept"
    results = joined([error("registered")], [error("reload"), error("move")])
    assert [one.explained_by for one in results] == [None, "registered", "registered"]
    advice = Finding("registered", "warning", "a plain tensor")
    results = joined([], [advice, error("move"), Finding("reload", "warning", "other numbers")])
    assert [one.explained_by for one in results] == [None, "registered", None]

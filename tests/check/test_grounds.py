"""What a ❌ stands on: what was guessed is never held against somebody's layer."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headwise.check import check
from headwise.check.findings.rules import RULES
from headwise.check.findings.triage import joined
from headwise.check.findings.verdict import Finding
from headwise.check.target.call_adapter import Caller
from headwise.check.target.fills import SURE
from headwise.check.target.names import calling_role
from headwise.check.target.resolve import resolve


class Pages(nn.Module):
    """Right attention over the rows of pages `[B, P, T, E]`, each row with all of its page."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        _, _, _, width = x.shape
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(2, 3) for t in self.split(x))
        heads = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v
        return self.proj(heads.transpose(2, 3).reshape(*x.shape[:3], width))

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.qkv(x).chunk(3, -1)


def test_axes_are_found_where_tokens_are_mixed_and_sequences_are_not() -> None:
    subject = resolve(Pages)
    assert str(subject.caller.layout) == "[B, 1, T, E]"
    assert subject.guesses == ["x as [B, 1, T, E]"]
    assert check(Pages).passed

    class Columns(Pages):
        """The same over the first axis."""

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.permute(1, 2, 0, 3)).permute(2, 0, 1, 3)

    assert str(resolve(Columns).caller.layout) == "[T, 1, B, E]"
    verdict = check(Columns)
    assert verdict.passed
    assert verdict["definition"].severity == "passed"


def test_a_mistake_whose_numbers_agree_stands_though_the_call_was_guessed() -> None:
    class Unscaled(Pages):
        def split(self, x: Tensor) -> tuple[Tensor, ...]:
            q, k, v = super().split(x)
            return q * 8**0.5, k, v

    assert check(Unscaled).errors[0].rule == "scale"


class Other(Pages):
    """Attention of another kind: a learnt kernel in the softmax's place."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, heads)
        self.kernel = nn.Parameter(torch.randn(dim // heads, 5))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(-3, -2) for t in self.split(x))
        q, k = ((t @ self.kernel).relu() for t in (q, k))
        heads = q @ (k.mT @ v)  # its weights do not sum to 1
        return self.proj(heads.transpose(-3, -2).flatten(-2))


def test_attention_of_another_kind_is_not_held_to_the_textbook() -> None:
    class Plain(Other):
        def forward(self, x: Tensor) -> Tensor:
            assert x.ndim == 3
            return super().forward(x)

    verdict = check(Plain)
    assert verdict.passed
    assert verdict["equal-tokens"].severity == "skipped"
    assert "not read" in verdict["equal-tokens"].message
    assert "definition" in [one.rule for one in verdict.unchecked]

    class Mixed(Plain):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + x.mean(0)

    assert check(Mixed).errors[0].rule == "batch"  # which no layer may


def test_an_activation_behind_it_is_no_mistake() -> None:
    class Bent(Pages):
        def forward(self, x: Tensor) -> Tensor:
            assert x.ndim == 3
            return super().forward(x[:, None])[:, 0].relu()

    verdict = check(Bent)
    assert verdict.passed
    assert "relu" in verdict["definition"].message


def test_what_breaks_in_a_guessed_call_stays_open() -> None:
    class Paged(Other):
        def forward(self, x: Tensor) -> Tensor:
            assert x.ndim == 4
            return super().forward(x) * torch.arange(len(x))[:, None, None, None]

    verdict = check(Paged)
    assert verdict.passed
    assert "batch" in [one.rule for one in verdict.unchecked]
    assert "x as [B, 1, T, E]" in verdict["batch"].message
    assert "batch" in [
        one.rule for one in check(Paged, call=lambda layer, x: layer(x[:, None])[:, 0]).errors
    ]


class Scaled(nn.Module):
    """A function of q, k and v that is a module, with what it is called with in others' code."""

    def __init__(self, temperature: float, over: int = -1) -> None:
        super().__init__()
        self.temperature, self.over = temperature, over

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.mT / self.temperature).softmax(self.over) @ v


def test_a_module_of_qkv_without_weights_is_a_function() -> None:
    verdict = check(Scaled)
    assert verdict.passed
    assert verdict["definition"].severity == "passed"
    assert check(Scaled(8**0.5)).passed
    assert check(Scaled(8**0.5, over=-2)).errors[0].rule == "softmax"


def test_a_function_may_merge_the_heads() -> None:
    def merging(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v).transpose(1, 2).flatten(2)

    def mixing(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v
        return heads.reshape(len(q), q.shape[2], -1)

    assert check(merging, num_heads=3)["definition"].severity == "passed"
    assert check(mixing, num_heads=3).errors[0].rule == "head-merge"


def test_names_that_tell_nothing_are_tried_and_what_follows_is_not_judged() -> None:
    class Named(Pages):
        def __init__(self, dim: int, heads: int, zork: int, flurb: bool) -> None:
            super().__init__(dim, heads)
            self.zork = zork if flurb else 1
            self.proj = getattr(nn, "Linear")(zork, dim)  # noqa: B009

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x[:, None])[:, 0] * self.zork

    subject = resolve(Named)
    assert subject.made_up == {"zork": 24}
    assert check(Named).passed


@pytest.mark.parametrize(
    "wanted", ["import nowhere_to_be_found", "raise RuntimeError('install it')"]
)
def test_what_the_layer_itself_refuses_is_asked_for(wanted: str) -> None:
    class Refusing(Pages):
        def forward(self, x: Tensor) -> Tensor:
            if wanted.startswith("import"):
                import nowhere_to_be_found  # noqa: F401 # pyright: ignore
            raise RuntimeError("install it")

    with pytest.raises(ValueError, match=r"nowhere_to_be_found|install it") as asked:
        check(Refusing)
    assert ("pip install" in str(asked.value)) == wanted.startswith("import")


class Lost(Pages):
    def forward(self, x: Tensor) -> Tensor:
        scores = self.qkv(x)
        scores.masked_fill(scores > 0, 0.0)
        raise NotImplementedError


def test_the_source_is_read_where_nothing_can_be_called() -> None:
    assert [one.rule for one in check(Lost).errors] == ["unused-result"]


# --- every value that nobody gave is on record ----------------------------------------------------


def test_whatever_a_call_is_given_is_a_guess_unless_its_role_is_sure() -> None:
    names: dict[str, str] = {}
    for line in "mask is_causal position_ids pos_emb rel_pos_bias cos freqs_cis h hw t".split():
        names[calling_role(line) or ""] = line
    assert len(names) == 10
    for role, name in names.items():
        call = eval(f"lambda x, {name}: x")
        assert (name in Caller(call, head_dim=8).guesses) == (role not in SURE), name
    assert Caller(lambda x, pos_emb=None: x).guesses == []
    assert Caller(lambda x, rope=None: x, head_dim=8).guesses == ["rope"]
    assert Caller(lambda x, rope: x, extra={"rope": 1}).guesses == []


class Flat(nn.Module):
    """Right attention of `[B, T, E]`, in pieces."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def attend(self, x: Tensor, hidden: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.three(x))
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(hidden, -1e9)
        return self.proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

    def three(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.qkv(x).chunk(3, -1)


def test_a_mask_that_is_insisted_on_is_a_guess_too() -> None:
    class Patches(Flat):
        """Later patches are hidden, and those that `patch_mask` says."""

        def forward(self, x: Tensor, patch_mask: Tensor) -> Tensor:
            later = torch.ones(x.shape[1], x.shape[1]).triu(1).bool()
            return self.attend(x, later | patch_mask.bool()[:, None, None])

    assert resolve(Patches).guesses == ["patch_mask"]
    assert check(Patches).passed


def test_tables_that_a_function_can_do_without_are_left_out_where_they_do_not_go_in() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, rope: Any = None) -> Tensor:
        if rope is not None:
            q, k = q * rope.wide, k / rope.wide
        return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v

    verdict = check(attend)
    assert verdict.passed
    assert verdict["definition"].severity == "passed"

    def broken(q: Tensor, k: Tensor, v: Tensor, *, rope: Tensor) -> Tensor:
        return attend(q, k, v, rope)

    with pytest.raises(ValueError, match="I do not know how to call this"):
        check(broken)


def test_how_heads_are_cut_is_not_judged_where_axes_were_guessed() -> None:
    class Channels(nn.Module):
        """Each head takes every third channel of `[B, E, T]`, and gives neighbouring ones."""

        def __init__(self, dim: int, heads: int) -> None:
            super().__init__()
            self.heads = heads
            self.q, self.k, self.v, self.out = (nn.Conv1d(dim, dim, 1) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (one(x).unflatten(1, (-1, self.heads)) for one in (self.q, self.k, self.v))
            scores = torch.einsum("bdhn,bdhm->bhnm", q, k) / q.shape[1] ** 0.5
            heads = torch.einsum("bhnm,bdhm->bdhn", scores.softmax(-1), v)
            return self.out(heads.transpose(1, 2).flatten(1, 2))

    verdict = check(Channels)
    assert verdict.passed
    assert "head-split" in [one.rule for one in verdict.unchecked]


def test_a_result_with_an_axis_of_1_says_that_x_lacks_one() -> None:
    class Points(Pages):
        """The rows of each point; x without points goes in as points of one row."""

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.reshape(*x.shape[:2], -1, x.shape[-1]))

    assert str(resolve(Points).caller.layout) == "[B, 1, T, E]"
    assert check(Points).passed


def test_what_is_built_on_a_guess_and_fails_is_asked_for() -> None:
    class Narrow(Flat):
        def __init__(self, dim: int, heads: int, shrink_ratio: int) -> None:
            super().__init__(dim, heads)
            self.first = nn.Linear(dim // (2 * shrink_ratio), dim)

        def forward(self, x: Tensor) -> Tensor:
            return self.first(x)

    with pytest.raises(ValueError, match="I made up shrink_ratio=1, and with it the call fails"):
        check(Narrow)


def test_a_mask_of_a_usual_name_is_no_guess() -> None:
    class Mixed(Flat):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.attend(x + x.flip(0), ~mask.bool()[:, None, None])

    assert resolve(Mixed).guesses == []
    assert check(Mixed)["batch"].severity == "error"


class NotHere(BaseException):
    """How some libraries say that a package is not there."""


def test_a_call_that_ends_in_no_usual_error_is_asked_for() -> None:
    class Kernel(Flat):
        def forward(self, x: Tensor) -> Tensor:
            raise NotHere

    with pytest.raises(ValueError, match="I do not know how to call this"):
        check(Kernel)


def test_rotary_positions_that_the_definition_has_are_right() -> None:
    turned = Finding("definition", "passed", "the same output, with rotary positions and norms.")
    shifted = Finding("rotary", "error", "The output changes.", ground="weights")
    assert joined([turned], [shifted])[1].severity == "skipped"
    plain = Finding("definition", "passed", "the same output.")
    assert joined([plain], [shifted])[1].severity == "error"


@pytest.mark.parametrize("severity", ["error", "warning"])
@pytest.mark.parametrize("named", [True, False])
def test_no_two_findings_explain_each_other(severity: Any, named: bool) -> None:
    for first, second in itertools.permutations(RULES, 2):
        found = [Finding(first, "error", "One."), Finding(second, severity, "Two.")]
        results = joined(found[:1], found[1:]) if named else joined([], found)
        assert any(one.severity == "error" and one.explained_by is None for one in results)

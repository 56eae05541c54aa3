"""What is learnt of a call before anything is judged: lengths, words, groups, masks, tables."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headwise.check import check
from headwise.check.target.checked_target import told
from headwise.check.target.resolve import resolve


class Base(nn.Module):
    """Right attention in pieces; each subclass puts them together in a way of its own."""

    def __init__(self, dim: int, heads: int, groups: int | None = None) -> None:
        super().__init__()
        self.heads, self.wide = heads, dim // heads
        self.groups = groups or heads
        self.to_q, self.proj = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.to_k, self.to_v = (nn.Linear(dim, self.groups * self.wide) for _ in range(2))

    def cut(self, rows: Tensor) -> Tensor:
        return rows.unflatten(-1, (-1, self.wide)).transpose(1, 2)

    def scores(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        keys = self.cut(self.to_k(x if context is None else context))
        return self.cut(self.to_q(x)) @ keys.mT / self.wide**0.5

    def gathered(self, scores: Tensor, x: Tensor) -> Tensor:
        heads = scores.softmax(-1) @ self.cut(self.to_v(x))
        return self.proj(heads.transpose(1, 2).flatten(2))


class Window(Base):
    """A bias for each pair of places in a window, so that only whole windows go in."""

    def __init__(self, dim: int, window_size: tuple[int, int], heads: int) -> None:
        super().__init__(dim, heads)
        height, width = window_size
        self.table = nn.Parameter(torch.zeros(heads, height * width, height * width))

    def forward(self, x: Tensor) -> Tensor:
        return self.gathered(self.scores(x) + self.table, x)


def test_a_number_of_tokens_that_is_insisted_on_is_learnt_from_the_error() -> None:
    subject = resolve(Window)
    assert (subject.only, subject.room) == (True, 10)
    assert subject.input(tokens=3).shape == (2, 10, 24)
    verdict = check(Window)
    assert verdict.passed
    assert [one.rule for one in verdict.unchecked] == ["definition"]
    assert "it takes 10 tokens, and no other number" in verdict.notes
    assert verdict["one-token"].severity == "skipped"
    assert verdict["batch"].severity == "passed"


def test_a_wrong_window_is_is_seen_but_not_judged() -> None:
    class Mixed(Window):
        def forward(self, x: Tensor) -> Tensor:
            return self.gathered(self.scores(x) + self.table, x.flip(0))

    verdict = check(Mixed)
    assert verdict.passed
    assert "batch" in [one.rule for one in verdict.unchecked]
    assert "10 tokens" in verdict["batch"].message


def test_a_word_is_taken_from_what_the_code_compares_it_with() -> None:
    class Worded(Base):
        def __init__(self, dim: int, heads: int, kind: str, extra: bool) -> None:
            super().__init__(dim, heads)
            if kind not in ("plain", "fancy"):
                raise ValueError(kind)
            assert extra is False

        def forward(self, x: Tensor) -> Tensor:
            return self.gathered(self.scores(x), x)

    verdict = check(Worded)
    assert verdict.passed
    assert "kind='plain', extra=False" in verdict.subject


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there to move to")
def test_a_constructor_that_moves_to_a_gpu_is_built_without_one() -> None:
    class Moving(Base):
        def __init__(self, dim: int, heads: int) -> None:
            super().__init__(dim, heads)
            self.register_buffer("zeros", torch.zeros(3, device="cuda").cuda(), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.gathered(self.scores(x), x)

    assert check(Moving).passed


@dataclass
class Options:
    dim: int = 512
    n_heads: int = 8
    n_kv_heads: int | None = None
    max_seq_len: int = 2048


class Grouped(Base):
    """Heads share keys and values, and the number of them stands in a config alone."""

    def __init__(self, args: Options) -> None:
        super().__init__(args.dim, args.n_heads, args.n_kv_heads or args.n_heads)

    def shared(self, rows: Tensor) -> Tensor:
        return self.cut(rows).repeat_interleave(self.heads // self.groups, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.cut(self.to_q(x)), self.shared(self.to_k(x)), self.shared(self.to_v(x))
        heads = (q @ k.mT / self.wide**0.5).softmax(-1) @ v
        return self.proj(heads.transpose(1, 2).flatten(2))


class Tiled(Grouped):
    def shared(self, rows: Tensor) -> Tensor:
        return self.cut(rows).repeat(1, self.heads // self.groups, 1, 1)


def test_groups_that_a_config_speaks_of_are_fewer_than_heads() -> None:
    subject = resolve(Grouped)
    assert (subject.num_heads, subject.num_kv_heads) == (6, 3)
    assert check(Grouped).passed
    assert check(Tiled).errors[0].rule == "grouped-heads"


def test_a_mask_that_fits_one_sequence_alone_is_a_mistake() -> None:
    class Alone(Base):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            scores = self.scores(x)
            if mask is not None:  # [B, T, T] against [B, H, T, T]
                seen = mask.flatten(1)
                pairs = seen[:, None, :] * seen[:, :, None]
                scores.masked_fill_(~pairs, -1e30)
            return self.gathered(scores, x)

    first = check(Alone).errors[0]
    assert first.rule == "mask"
    assert "works for one sequence alone" in first.message
    assert "mask[:, None, None, :]" in first.hint


def test_a_mask_may_leave_out_the_first_token() -> None:
    class Token(Base):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            scores = self.scores(x)
            if mask is not None:
                seen = nn.functional.pad(mask, (1, 0), value=True)
                assert seen.shape[-1] == scores.shape[-1]
                scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
            return self.gathered(scores, x)

    verdict = check(Token)
    assert verdict.passed
    assert "[B, S - 1]" in verdict["padding"].message


class Across(Base):
    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        return self.gathered(self.scores(x, context), x if context is None else context)


class KeysFromX(Base):
    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        return self.gathered(self.scores(x), x if context is None else context)


class Beside(Base):
    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        rows = x if context is None else torch.cat((x, context), 1)
        return self.gathered(self.scores(x, rows), rows)


@pytest.mark.parametrize(
    ("layer", "severity"), [(Across, "passed"), (KeysFromX, "error"), (Beside, "skipped")]
)
def test_keys_come_from_the_other_sequence(layer: type[Base], severity: str) -> None:
    verdict = check(layer)
    assert verdict["cross"].severity == severity, str(verdict)
    assert verdict.passed == (severity != "error")


def test_a_bias_that_must_be_given_says_nothing() -> None:
    class Biased(Base):
        def forward(self, x: Tensor, relative_pos: Tensor) -> Tensor:
            return self.gathered(self.scores(x) + relative_pos, x)

    verdict = check(Biased)
    assert verdict.passed
    assert verdict["definition"].severity == "passed"


def test_a_name_that_says_not_causal_is_not_causal() -> None:
    class NonCausalAttention(Base):
        def forward(self, x: Tensor) -> Tensor:
            return self.gathered(self.scores(x), x)

    class CausalAttention(NonCausalAttention):
        pass

    assert check(NonCausalAttention).passed
    assert check(CausalAttention).errors[0].rule == "causal-mask"


class Keeping(Base):
    """A cache of its own, written at `start_pos`, and tables that are handed in."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, heads)
        self.kept = [torch.zeros(4, heads, 32, self.wide) for _ in range(2)]

    def forward(self, x: Tensor, start_pos: int, freqs_cis: Tensor) -> Tensor:
        def turned(t: Tensor) -> Tensor:
            pairs = torch.view_as_complex(t.float().unflatten(-1, (-1, 2)))
            return torch.view_as_real(pairs * freqs_cis).flatten(-2).to(t)

        q, k, v = (self.cut(to(x)) for to in (self.to_q, self.to_k, self.to_v))
        if start_pos:
            before = (kept[: len(x), :, :start_pos].to(x) for kept in self.kept)
            k, v = (torch.cat(pair, 2) for pair in zip(before, (turned(k), v), strict=True))
        else:
            k = turned(k)
        heads = (turned(q) @ k.mT / self.wide**0.5).softmax(-1) @ v
        return self.proj(heads.transpose(1, 2).flatten(2))


def test_later_positions_do_not_reach_into_a_cache() -> None:
    verdict = check(Keeping)
    assert verdict["rotary"].severity == "passed", str(verdict)


def test_what_stood_in_a_failing_line_is_told(tmp_path: Path) -> None:
    code = (
        "from torch import nn\n\n\nclass Odd(nn.Module):\n    def __init__(self):\n"
        "        super().__init__()\n        self.out = nn.Linear(6, 6)\n\n"
        "    def forward(self, x):\n        return self.out(x)\n"
    )
    path = tmp_path / "odd.py"
    path.write_text(code)
    space: dict[str, Any] = {}
    exec(compile(code, str(path), "exec"), space)
    with pytest.raises(RuntimeError) as caught:
        space["Odd"]()(torch.ones(2, 5))
    assert told(caught.value).endswith(
        "(line 10 of odd.py: `return self.out(x)`; self.out takes 6 features; x is [2, 5])"
    )

"""What is learnt of a call before anything is judged: lengths, words, groups, masks, tables."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.check import check
from headwise.check.files import check_file
from headwise.check.target.errors import told
from headwise.check.target.layouts import batch_axis
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


class OfOneLength(Base):
    """Written for sequences of one length."""

    def __init__(self, hidden_size: int, num_heads: int, sequence_length: int) -> None:
        super().__init__(hidden_size, num_heads)
        self.sequence_length = sequence_length

    def cut(self, rows: Tensor) -> Tensor:
        n = len(rows)
        return rows.reshape(n, self.sequence_length, self.heads, self.wide).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.gathered(self.scores(x), x)


class OfNoMore(OfOneLength):
    """Written for as many as a sequence may have at most, which others need not have."""

    def __init__(self, hidden_size: int, num_heads: int, max_len: int) -> None:
        super().__init__(hidden_size, num_heads, max_len)
        self.max_len = max_len

    def cut(self, rows: Tensor) -> Tensor:
        return rows.reshape(len(rows), self.max_len, self.heads, self.wide).transpose(1, 2)


def test_a_length_that_all_sequences_have() -> None:
    subject = resolve(OfOneLength)
    assert (subject.only, subject.room) == (True, 16)
    assert check(OfOneLength).passed
    assert [one.rule for one in check(OfNoMore).errors] == ["runs"]


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


class Sided(Window):
    """Keeps the sides of its window."""

    def __init__(self, dim: int, window_size: tuple[int, int], heads: int) -> None:
        super().__init__(dim, window_size, heads)
        self.window_size = window_size


class SidedMixed(Sided):
    def forward(self, x: Tensor) -> Tensor:
        return self.gathered(self.scores(x) + self.table, x.flip(0))


def test_a_window_whose_sides_are_kept_is_judged() -> None:
    assert resolve(Sided).guesses == []
    assert check(Sided).passed
    assert [one.rule for one in check(SidedMixed).errors] == ["batch"]


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


class Distances(Across):
    """Adds a number for each distance, made for as many keys as there are queries."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, heads)
        self.table = nn.Embedding(33, heads)

    def scores(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        far = (places[:, None] - places).clamp(-16, 16) + 16
        return super().scores(x, context) + self.table(far).permute(2, 0, 1)


class Beside(Base):
    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        rows = x if context is None else torch.cat((x, context), 1)
        return self.gathered(self.scores(x, rows), rows)


@pytest.mark.parametrize(
    ("layer", "severity"),
    [
        (Across, "passed"),
        (KeysFromX, "error"),
        (Distances, "error"),
        (Beside, "skipped"),
    ],
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


# --- windows, maps and other sequences ------------------------------------------------------------


class Mapped(Base):
    """Attention in the windows of a map `[B, H, W, E]`."""

    def __init__(self, dim: int, heads: int, window_size: int, shifted: bool) -> None:
        super().__init__(dim, heads)
        self.window_size = window_size
        assert not shifted

    def forward(self, x: Tensor) -> Tensor:
        batch, height, width, _ = x.shape
        side = self.window_size
        rows = x.unflatten(1, (height // side, side)).unflatten(3, (width // side, side))
        rows = rows.transpose(2, 3).reshape(-1, side * side, x.shape[-1])
        out = self.gathered(self.scores(rows), rows)
        out = out.reshape(batch, height // side, width // side, side, side, -1).transpose(2, 3)
        return out.reshape(x.shape)


def test_windows_of_a_map_get_a_map_of_their_size() -> None:
    subject = resolve(Mapped)
    assert subject.caller.layout.axes == "BHWE"  # as its code says
    assert (subject.room, subject.guesses) == (16, [])  # a window of its own size
    assert check(Mapped).passed


def test_height_and_width_are_nearly_square() -> None:
    class Pooled(Base):
        """Keys of a map at half its height and width."""

        def forward(self, x: Tensor, nx: int | None = None, ny: int | None = None) -> Tensor:
            assert nx is not None
            assert ny is not None
            image = x.mT.unflatten(-1, (nx, ny))
            small = nn.functional.avg_pool2d(image, 2).flatten(2).mT
            return self.gathered(self.scores(x, small), small)

    subject = resolve(Pooled)
    assert subject.room == 16
    assert {"nx", "ny"} <= set(subject.guesses)
    assert check(Pooled).passed


def test_an_argument_of_an_unknown_name_may_be_keys_and_values_side_by_side() -> None:
    class Fed(nn.Module):
        """Queries alone are projected."""

        def __init__(self, dim: int, heads: int) -> None:
            super().__init__()
            self.heads, self.q, self.out = heads, nn.Linear(dim, dim), nn.Linear(dim, dim)

        def forward(self, x: Tensor, stuff: Tensor) -> Tensor:
            q, k, v = (
                t.unflatten(-1, (self.heads, -1)).transpose(1, 2)
                for t in (self.q(x), *stuff.tensor_split([x.shape[-1]], -1))
            )
            heads = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v
            return self.out(heads.transpose(1, 2).flatten(2))

    assert resolve(Fed).guesses == ["stuff"]
    assert check(Fed).passed


def test_key_dim_beside_a_width_of_heads_is_no_width_of_heads() -> None:
    class Crossing(nn.Module):
        def __init__(self, query_dim: int, key_dim: int, heads: int, dim_head: int) -> None:
            super().__init__()
            self.heads = heads
            self.q, self.kv = (
                nn.Linear(query_dim, heads * dim_head),
                nn.Linear(key_dim, 2 * heads * dim_head),
            )
            self.out = nn.Linear(heads * dim_head, query_dim)

        def forward(self, x: Tensor, key: Tensor) -> Tensor:
            parts = (self.q(x), *self.kv(key).chunk(2, -1))
            q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in parts)
            heads = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v
            return self.out(heads.transpose(1, 2).flatten(2))

    verdict = check(Crossing)
    assert verdict.passed
    assert "query_dim=24, key_dim=24, heads=3, dim_head=8" in verdict.subject


@dataclass
class BlockOptions:
    """Fields whose words only others compare, and one for each stage."""

    tokens_per_block: int
    kind: str
    dim: int = 48
    num_heads: list[int] | tuple[int, ...] = (4, 8)


def test_fields_of_a_config_are_words_and_lists_where_others_take_them_so() -> None:
    class Chosen(Base):
        def __init__(self, config: BlockOptions, stage_idx: int) -> None:
            super().__init__(config.dim, config.num_heads[stage_idx])
            if config.kind not in ("plain", "fancy"):
                raise ValueError(config.kind)
            self.most = config.tokens_per_block

        def forward(self, x: Tensor) -> Tensor:
            return self.gathered(self.scores(x), x)

    subject = resolve(Chosen)
    assert subject.num_heads == 4
    assert subject.made_up["kind"] == "plain"


class Leaves(Base):
    """Leaves Python where others raise."""

    def __init__(self, dim: int, heads: int) -> None:
        if heads == 3:
            sys.exit("not by three")
        super().__init__(dim, heads)

    def forward(self, query_matrix: Tensor, key_matrix: Tensor, value_matrix: Tensor) -> Tensor:
        return self.gathered(self.scores(query_matrix, key_matrix), value_matrix)


def test_a_constructor_that_leaves_python_is_tried_with_other_sizes() -> None:
    subject = resolve(Leaves)
    assert subject.num_heads != 3
    assert [*subject.caller.inputs] == ["query_matrix", "key_matrix", "value_matrix"]


class Configured(Base):
    """Takes its sizes from a configuration within another one, and a number beside it."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config.transformer.hidden_size, config.transformer.num_heads)
        self.layer = layer_idx

    def forward(self, x: Tensor) -> Tensor:
        return self.gathered(self.scores(x), x)


def test_a_configuration_may_hold_another_one() -> None:
    assert resolve(Configured).num_heads == 3
    subject = resolve(Configured, layer_idx=5)
    assert subject.module is not None
    assert subject.module.layer == 5


def test_fields_for_other_parts_of_a_model_are_not_asked_for(tmp_path: Path) -> None:
    fields = "width: int\n    n_heads: int\n    device: str\n    q_lora_rank: int\n    topk: int\n"
    (tmp_path / "sizes.py").write_text(
        f"from dataclasses import dataclass\n\n\n@dataclass\nclass Sizes:\n    {fields}"
    )
    path = tmp_path / "latent.py"
    path.write_text(
        "import torch\nfrom torch import nn\nfrom sizes import Sizes\n\n\n"
        "class Latent(nn.Module):\n    def __init__(self, config: Sizes):\n"
        "        super().__init__()\n        self.heads = config.n_heads\n"
        "        self.down = nn.Linear(config.width, config.q_lora_rank)\n"
        "        self.up = nn.Linear(config.q_lora_rank, config.width)\n"
        "        self.kv = nn.Linear(config.width, 2 * config.width)\n"
        "        self.to(torch.device(config.device))\n\n"
        "    def forward(self, x):\n"
        "        parts = self.up(self.down(x)), *self.kv(x).chunk(2, -1)\n"
        "        q, k, v = (one.unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in parts)\n"
        "        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)\n"
        "        return (weights @ v).transpose(1, 2).flatten(2)\n"
    )
    assert check_file(f"{path}:Latent").passed


class MaskOfEachHead(Base):
    """Each head takes its own rows of the mask, those of the whole batch."""

    def forward(self, x: Tensor, attn_mask: Tensor) -> Tensor:
        scores = self.scores(x).unbind(1)
        heads = [rows + attn_mask[i * len(x) :][: len(x)] for i, rows in enumerate(scores)]
        return self.gathered(torch.stack(heads, 1), x)


def test_a_mask_that_goes_in_by_chance_gives_way_to_one_that_goes_in_with_any_sizes() -> None:
    subject = resolve(MaskOfEachHead)
    assert subject.open_form is not None
    assert subject.open_form.shape == "[B·H, T, S]"
    assert not check(MaskOfEachHead).errors


class BatchSecond(Base):
    """Takes `[T, B, E]`, as its code says, and cuts it for the heads of each token."""

    def parts(self, x: Tensor) -> tuple[Tensor, ...]:
        batch = x.size(1)
        made = (part(x) for part in (self.to_q, self.to_k, self.to_v))
        return tuple(
            rows.view(-1, batch, self.heads, self.wide).permute(1, 2, 0, 3) for rows in made
        )

    def forward(self, x: Tensor) -> Tensor:
        batch_size = x.size(1)
        q, k, v = self.parts(x)
        heads = (q @ k.mT / self.wide**0.5).softmax(-1) @ v
        return self.proj(heads.permute(2, 0, 1, 3).reshape(-1, batch_size, self.heads * self.wide))


class BatchMixed(BatchSecond):
    """Heads are brought before the batch, so that sequences attend to each other."""

    def forward(self, x: Tensor) -> Tensor:
        batch_size = x.size(1)
        q, k, v = (rows.permute(2, 1, 0, 3) for rows in self.parts(x))
        heads = (q @ k.mT / self.wide**0.5).softmax(-1) @ v
        return self.proj(heads.transpose(1, 2).reshape(-1, batch_size, self.heads * self.wide))


class NotBatchFirst(nn.Module):
    """Its code names the batch first, and PyTorch's own layer within takes it second."""

    def __init__(self, dim: int, num_heads: int, batch_first: bool = False) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(dim, num_heads, batch_first=batch_first)

    def forward(self, x: Tensor) -> Tensor:
        batch, _, _ = x.shape
        return self.attention(x, x, x)[0][:batch]


class Turned(NotBatchFirst):
    """It is turned before its axes get names."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        batch = x.shape[1]
        return self.attention(x, x, x)[0][:, :batch].transpose(0, 1)


def test_a_batch_that_comes_first_by_its_own_name_is_taken_at_its_word() -> None:
    (one,) = check(NotBatchFirst).errors
    assert (one.rule, "batch_first=True" in one.hint) == ("batch", True)
    assert check(Turned).passed
    assert resolve(Turned).caller.layout.axes == "BTE"
    assert batch_axis(Turned(24, 3), "x") is None


def test_a_batch_that_comes_second_by_its_own_name_is_taken_at_its_word() -> None:
    assert resolve(BatchSecond).caller.layout.axes == "TBE"
    assert check(BatchSecond).passed
    assert check(BatchMixed).errors[0].rule == "batch"


class Joined(Base):
    """Heads are joined once, or twice."""

    def __init__(self, dim: int, heads: int, times: int = 1) -> None:
        super().__init__(dim, heads)
        self.times = times

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        heads = self.scores(query, key).softmax(-1) @ self.cut(self.to_v(value))
        for _ in range(self.times):
            batch, _, tokens, _ = heads.shape
            heads = heads.transpose(1, 2).reshape(batch, tokens, -1)
        return self.proj(heads)


class JoinedTwice(Joined):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, heads, 2)


def test_what_fails_behind_the_softmax_is_the_layers_own() -> None:
    assert check(Joined, dim=24, heads=3).passed
    (one,) = check(JoinedTwice, dim=24, heads=3).errors
    assert (one.rule, "expected 4, got 3" in one.message) == ("runs", True)


@dataclass
class Sizes:
    dim: int = 24
    n_heads: int = 3


class Reads(Base):
    def __init__(self, config: Sizes) -> None:
        super().__init__(config.dim, config.n_local_heads)  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return self.gathered(self.scores(x), x)


def test_a_field_that_its_own_configuration_lacks() -> None:
    (one,) = check(Reads).errors
    assert one.rule == "builds"
    assert "'Sizes' object has no attribute 'n_local_heads'" in one.message
    assert "did you mean" not in one.message


def test_functions_that_give_no_layer() -> None:
    def layers(dim: int = 24) -> list[nn.Module]:
        return [nn.Linear(dim, dim)]

    def shown(dim: int = 24) -> None:
        nn.Linear(dim, dim)

    with pytest.raises(ValueError, match="it gives a list for sizes"):
        check(layers)
    (one,) = check(shown).errors
    assert one.message == "shown gives a NoneType, which cannot be called."


class Classifier(nn.Module):
    """A whole model: tokens go in, as whole numbers."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(11, dim), Joined(dim, heads)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.embedding(x)
        return self.layer(tokens, tokens, tokens)


def test_x_goes_in_behind_the_embedding_of_a_model() -> None:
    verdict = check(Classifier, dim=24, heads=3)
    assert verdict.passed, str(verdict)
    assert "it takes ids of tokens: x goes in behind its embedding, [B, T, 24]" in verdict.notes


class BatchSaid(nn.Module):
    """Batch first: (batch, seq, dim) -> (batch, seq, dim)."""

    def __init__(self, dim: int, num_heads: int, batch_first: bool = False) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(dim, num_heads, batch_first=batch_first)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0]


def test_a_batch_that_comes_first_by_what_is_written_is_taken_at_its_word() -> None:
    (one,) = check(BatchSaid).errors
    assert (one.rule, "batch_first=True" in one.hint) == ("batch", True)
    assert check(BatchSaid(24, 3, batch_first=True)).passed


class Processor(Base):
    """Is handed the layer that it works for, as those of diffusers are."""

    def forward(self, attn: Any, hidden_states: Tensor) -> Tensor:
        if attn.spatial_norm is not None:
            hidden_states = attn.spatial_norm(hidden_states)
        return self.gathered(self.scores(hidden_states), hidden_states)


class OfIds(Base):
    """A model whose tokens are made whole numbers."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, heads)
        self.embedding = nn.Embedding(11, dim)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x.long())
        return self.gathered(self.scores(x), x)


class OfMaps(Base):
    """A map whose axes are said nowhere, twice as high as it is wide."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.permute(0, 2, 3, 1).reshape(len(x), 2, -1, 12)
        return self.gathered(self.scores(rows), rows)


def test_ids_may_be_made_of_what_goes_in() -> None:
    verdict = check(OfIds, dim=24, heads=3)
    assert verdict.passed, str(verdict)


@pytest.mark.parametrize("kind", [Processor, OfMaps])
def test_what_was_not_meant_to_be_a_sequence_is_asked_for(kind: type[Base]) -> None:
    with pytest.raises(ValueError, match="call"):
        check(kind, dim=24, heads=3)


class FeaturesFirst(nn.Module):
    """[B, E, T], with a layer inside that takes the second axis for the batch."""

    def __init__(self, in_channels: int, n_head: int, batch_first: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(in_channels)
        self.attn = nn.MultiheadAttention(in_channels, n_head, batch_first=batch_first)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(x.transpose(1, 2))
        return self.attn(rows, rows, rows)[0].transpose(1, 2)


def test_sequences_that_are_mixed_in_the_only_layout_that_goes_in() -> None:
    found = [one for one in check(FeaturesFirst).errors if one.explained_by is None]
    assert [one.rule for one in found] == ["batch"]
    assert check(FeaturesFirst(24, 3, batch_first=True)).passed


class Unheeding(nn.MultiheadAttention):
    """Takes batch_first, and always wants time first."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:  # type: ignore[override]
        own = F.multi_head_attention_forward(
            query,
            key,
            value,
            self.embed_dim,
            self.num_heads,
            self.in_proj_weight,
            self.in_proj_bias,
            None,
            None,
            False,
            0.0,
            self.out_proj.weight,
            self.out_proj.bias,
            need_weights=False,
        )
        return own[0]


def test_an_order_of_axes_that_is_promised_is_kept() -> None:
    assert check(Unheeding(24, 3)).passed
    assert "batch" in {one.rule for one in check(Unheeding(24, 3, batch_first=True)).errors}

"""What a layer is handed and nobody named: tables, flags, weights, modules. Each is learnt from the
code, and what is reached by it is judged, too."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn

from headwise.check import check
from headwise.check.diagnosis import run
from headwise.check.files.loading import candidates
from headwise.check.target.functions import weights_taken
from headwise.check.target.learnt import silenced
from headwise.check.target.resolve import resolve


def named(layer: type[nn.Module]) -> str:
    """The mistake that the diagnosis names; "right" where the definition gives the same."""
    subject = resolve(layer)
    found = run(replace(subject, caller=silenced(subject.caller)[0]))
    right = [one.severity for one in found] == ["passed"]
    return "right" if right else next(one.rule for one in found if one.severity == "error")


class Relative(nn.Module):
    """Relative positions as Transformer-XL has them: a table of distances and two biases of heads
    are handed in; time comes first."""

    scaled, axis = True, -1

    def __init__(self, d_model: int, n_head: int) -> None:
        super().__init__()
        self.n_head, self.d_head = n_head, d_model // n_head
        self.qkv_net, self.o_net = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)
        self.r_net = nn.Linear(d_model, d_model, bias=False)

    def forward(self, w: Tensor, r: Tensor, r_w_bias: Tensor, r_r_bias: Tensor) -> Tensor:
        time, batch, wide = w.shape
        cut = (self.n_head, self.d_head)
        q, k, v = (part.view(time, batch, *cut) for part in self.qkv_net(w).chunk(3, -1))
        far = self.r_net(r).view(r.size(0), *cut)
        content = torch.einsum("ibhd,jbhd->bhij", q + r_w_bias, k)
        places = torch.einsum("ibhd,jhd->bhij", q + r_r_bias, far)
        places = nn.functional.pad(places, (1, 0)).view(batch, self.n_head, time + 1, time)
        scores = content + places[:, :, 1:].view_as(content)
        scores = scores / self.d_head**0.5 if self.scaled else scores
        heads = torch.einsum("bhij,jbhd->ibhd", scores.softmax(self.axis), v)
        return self.o_net(heads.reshape(time, batch, wide))


class RelativeUnscaled(Relative):
    scaled = False


class RelativeOverQueries(Relative):
    axis = -2


def test_tables_of_positions_are_learnt_from_how_far_the_call_gets() -> None:
    subject = resolve(Relative)
    assert subject.guesses == ["r", "r_w_bias", "r_r_bias"]
    assert str(subject.caller.layout) == "[T, B, E]"
    verdict = check(Relative)
    assert verdict.passed, str(verdict)
    assert [one.rule for one in verdict.unchecked] == ["definition"]
    assert "zeros for r, r_w_bias, r_r_bias" in verdict["definition"].message


@pytest.mark.parametrize(
    ("layer", "rule"), [(RelativeUnscaled, "scale"), (RelativeOverQueries, "softmax")]
)
def test_a_mistake_beside_such_tables_is_named(layer: type[nn.Module], rule: str) -> None:
    assert named(layer) == rule


class Told(nn.Module):
    """What must be given may be None, or is a flag, as the code itself says."""

    factor = 1.0

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor, sequence_tags, first_blank) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, -1)
        )
        scores = q @ k.mT / q.shape[-1] ** 0.5 * self.factor
        if sequence_tags is not None:
            same = sequence_tags[:, None, :, None] == sequence_tags[:, None, None]
            scores = scores.masked_fill(~same, -torch.inf)
        heads = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        if first_blank:
            heads = torch.cat((torch.zeros_like(heads[:, :1]), heads[:, 1:]), 1)
        return self.out(heads)


class ToldTwice(Told):
    factor = 8.0**-0.5


def test_what_the_code_tests_is_none_or_a_flag() -> None:
    assert named(Told) == "right"
    assert named(ToldTwice) == "scale"


class Turned(nn.Module):
    """What turns queries and keys is handed in, and a bias for all heads of all sequences."""

    over = -1

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor, rope, position_ids, graph_bias) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, -1)
        )
        scores = rope(q, position_ids) @ rope(k, position_ids).mT / q.shape[-1] ** 0.5
        scores = scores + graph_bias.view(len(x), self.heads, *scores.shape[2:])
        return self.out((scores.softmax(self.over) @ v).transpose(1, 2).flatten(2))


class TurnedOverQueries(Turned):
    over = -2


def test_a_function_may_be_handed_in_and_a_bias_of_all_heads() -> None:
    verdict = check(Turned)
    assert verdict.passed, str(verdict)
    assert not check(TurnedOverQueries).passed


class OfMemory(nn.Module):
    """A mask of the other sequence must be given, and a cross attention uses it at once."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.dim = heads, dim
        self.q, self.kv = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, query: Tensor, memory: Tensor, memory_mask: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.q(query), *self.kv(memory).split(self.dim, -1))
        )
        scores = q @ k.mT / q.shape[-1] ** 0.5
        weights = scores.masked_fill(~memory_mask.unsqueeze(1), -torch.inf).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


def test_a_mask_of_memory_that_is_insisted_on_hides_nothing() -> None:
    subject = resolve(OfMemory)
    assert subject.open_form is not None
    assert subject.open_form.argument == "memory_mask"
    assert named(OfMemory) == "right"


# --- functions that are handed their weights ------------------------------------------------------


def attention_of(x, w_qkv, w_o, n_heads):
    q, k, v = (
        part.unflatten(-1, (n_heads, -1)).transpose(1, 2) for part in (x @ w_qkv).chunk(3, -1)
    )
    weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
    return (weights @ v).transpose(1, 2).flatten(2) @ w_o


def unscaled_of(x, w_q, w_k, w_v, w_o, n_heads):
    q, k, v = (
        (x @ weight).unflatten(-1, (n_heads, -1)).transpose(1, 2) for weight in (w_q, w_k, w_v)
    )
    return ((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2) @ w_o


def in_pieces(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor,
    in_proj_bias: Tensor,
    bias_k: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor,
    over: int = -1,
) -> Tensor:
    """With time first, and with what PyTorch's own function takes."""
    assert embed_dim_to_check == query.shape[-1]
    assert bias_k is None
    assert not add_zero_attn
    weights, biases = in_proj_weight.chunk(3), in_proj_bias.chunk(3)
    q, k, v = (
        nn.functional.linear(rows, weight, bias).unflatten(-1, (num_heads, -1)).permute(1, 2, 0, 3)
        for rows, weight, bias in zip((query, key, value), weights, biases, strict=True)
    )
    scores = nn.functional.dropout(q @ k.mT / q.shape[-1] ** 0.5, dropout_p)
    heads = (scores.softmax(over) @ v).permute(2, 0, 1, 3).flatten(2)
    return nn.functional.linear(heads, out_proj_weight, out_proj_bias)


def over_queries(
    query, key, value, embed_dim, num_heads, in_proj_weight, in_proj_bias, out_proj_weight, b_o
):
    given = (embed_dim, num_heads, in_proj_weight, in_proj_bias, None, False, 0.0)
    return in_pieces(query, key, value, *given, out_proj_weight, b_o, over=-2)


def test_a_function_holds_the_weights_that_it_is_handed() -> None:
    for function in (attention_of, in_pieces):
        verdict = check(function)
        assert verdict.passed, str(verdict)
        assert verdict["definition"].severity == "passed"
    assert check(unscaled_of).errors[0].rule == "scale"
    assert check(over_queries).errors[0].rule == "softmax"
    with pytest.raises(ValueError, match="I made up the weights"):
        check(lambda x, W_qkv, W_o: x @ W_qkv @ W_o)


def test_what_names_a_weight() -> None:
    assert weights_taken(unscaled_of) == {"w_q": "q", "w_k": "k", "w_v": "v", "w_o": "o"}
    assert weights_taken(lambda q, k, v, window, key_width: q) == {}
    assert weights_taken(attention_of, ["w_qkv"]) == {}
    assert {"attention_of", "in_pieces"} <= set(candidates(sys.modules[__name__]))


# --- what a constructor is handed -----------------------------------------------------------------


class Projecting(nn.Module):
    def __init__(self, query_proj, key_proj, value_proj) -> None:
        super().__init__()
        self.query_proj = query_proj
        self.key_proj = key_proj
        self.value_proj = value_proj

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return self.query_proj(q), self.key_proj(k), self.value_proj(v)


class Weighing(nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return (query @ key.mT / query.shape[-1] ** 0.5).softmax(-1) @ value


class OfParts(nn.Module):
    """All that it computes with is handed in, by classes of its file."""

    def __init__(self, nhead, projecting, attention_layer, norm, out_proj) -> None:
        super().__init__()
        self.nhead = nhead
        self.projecting = projecting
        self.attention_layer = attention_layer
        self.norm = norm
        self.out_proj = out_proj

    def merged(self, heads: Tensor) -> Tensor:
        return heads.transpose(1, 2).flatten(2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        parts = (one.unflatten(-1, (self.nhead, -1)) for one in self.projecting(x, x, x))
        return self.out_proj(self.merged(self.attention_layer(*(p.transpose(1, 2) for p in parts))))


class OfPartsUnmerged(OfParts):
    def merged(self, heads: Tensor) -> Tensor:
        return heads.reshape(heads.shape[0], heads.shape[2], -1)


class Distances(nn.Module):
    """An embedding of distances is handed in."""

    def __init__(self, emb: int, heads: int, pos_embedding) -> None:
        super().__init__()
        self.heads = heads
        self.pos = pos_embedding  # of 2 T − 1 distances
        self.qkv, self.out = nn.Linear(emb, 3 * emb), nn.Linear(emb, emb)

    def forward(self, x: Tensor) -> Tensor:
        here = torch.arange(x.shape[1])
        far = self.pos(here[:, None] - here + x.shape[1] - 1).mean(-1)
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, -1)
        )
        weights = (q @ k.mT / q.shape[-1] ** 0.5 + far).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


def test_modules_that_are_handed_in_are_those_of_the_file() -> None:
    assert named(OfParts) == "right"
    assert named(OfPartsUnmerged) == "head-merge"
    assert check(Distances).passed


class Framed(Told):
    """A window of frames, height and width, and a size whose name ends like an attention's."""

    def __init__(self, dim: int, heads: int, window_size, d_attention) -> None:
        super().__init__(dim, heads)
        frames, height, width = window_size
        self.table = nn.Parameter(torch.zeros(frames * height * width, d_attention // 2 * 2))

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(x + self.table.mean(-1)[:, None], None, False)


def test_windows_of_frames_and_sizes_of_odd_names() -> None:
    subject = resolve(Framed)
    assert subject.room == 10
    assert "window_size=(1, 2, 5), d_attention=24" in subject.name


@dataclass
class WholeConfig:
    model_type = "whole"
    layers: int = 2


class Configured(Told):
    """Its sizes lie in a second configuration, a dictionary."""

    def __init__(self, config: WholeConfig, module_config) -> None:
        super().__init__(module_config["hidden_size"], module_config["num_attention_heads"])
        self.layers = config.layers

    def forward(self, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(x, None, False)


def test_a_configuration_of_an_unknown_kind_answers_to_all() -> None:
    assert named(Configured) == "right"

"""Layers of headwise in place of `nn.MultiheadAttention`: called alike, with equal results."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headwise as hw

E, H, T, S, B = 24, 4, 7, 5, 2


def mha(**options: Any) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    made = nn.MultiheadAttention(E, H, dtype=torch.float64, **options)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=0.4)
    return made


def close(got: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)


# ── from_torch ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "options", [{}, {"bias": False}, {"kdim": 10, "vdim": 10}, {"dropout": 0.1}]
)
def test_a_layer_of_torchs_weights(options: dict[str, Any]) -> None:
    theirs = mha(batch_first=True, **options).eval()
    layer = hw.MultiHeadAttention.from_torch(theirs)
    x = torch.randn(B, T, E, dtype=torch.float64)
    context = torch.randn(B, S, theirs.kdim, dtype=torch.float64)
    close(layer(x, context), theirs(x, context, context)[0])
    if theirs.kdim == E:
        hidden = torch.ones(T, T).triu(1).bool()
        close(layer(x, mask=hw.Causal()), theirs(x, x, x, attn_mask=hidden)[0])
    assert layer.dropout == theirs.dropout
    assert layer.training == theirs.training
    with torch.no_grad():  # a copy: the other module stays
        layer.out.weight.zero_()
    assert theirs.out_proj.weight.any()


class Their(nn.MultiheadAttention):
    """A subclass, whose forward may be another."""


@pytest.mark.parametrize(
    ("module", "says"),
    [
        (mha(kdim=10, vdim=9), "kdim=10 is not vdim=9"),
        (mha(add_bias_kv=True), "add_bias_kv=True"),
        (mha(add_zero_attn=True), "add_zero_attn=True"),
        (Their(E, H), "a subclass may compute something different"),
        (nn.Linear(E, E), "give an nn.MultiheadAttention"),
    ],
)
def test_what_no_layer_can_hold_is_refused(module: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        hw.MultiHeadAttention.from_torch(module)


def test_input_without_a_batch() -> None:
    layer = hw.MultiHeadAttention(E, H, kv_dim=10)
    x, context = torch.randn(T, E), torch.randn(S, 10)
    assert torch.equal(layer(x, context), layer(x[None], context[None])[0])
    layer = hw.MultiHeadAttention(E, H, num_kv_heads=2, rope=hw.RoPE(6))
    cache = hw.KVCache()
    with torch.no_grad():
        parts = [layer(part, mask=hw.Causal(), cache=cache) for part in (x[:4], x[4:])]
        torch.testing.assert_close(torch.cat(parts), layer(x, mask=hw.Causal()))
    with pytest.raises(ValueError, match=r"x must be \[B, T, 24\] or \[T, 24\]"):
        layer(torch.randn(T, E + 1))


# ── replace_attention_ ──────────────────────────────────────────────────────────────────────────


def masks(batched: bool) -> list[dict[str, Any]]:
    """Arguments of masks; True and −inf are hidden, and no row is hidden as a whole."""
    torch.manual_seed(1)
    hidden = torch.rand(T, S) < 0.4
    hidden[:, 0] = False
    padding = torch.zeros((B, S) if batched else (S,), dtype=torch.bool)
    padding[..., -2:] = True
    heads = B * H if batched else H
    each = torch.randn(heads, T, S, dtype=torch.float64)
    return [
        {},
        {"attn_mask": hidden},
        {"attn_mask": each},
        {"attn_mask": each > 1e9},
        {"key_padding_mask": padding},
        {"key_padding_mask": padding.double() * -3},
        {"key_padding_mask": padding, "attn_mask": hidden},
    ]


@pytest.mark.parametrize("which", range(7))
@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize(
    "options",
    [{"batch_first": True}, {}, {"kdim": 10, "vdim": 9, "batch_first": True}, {"bias": False}],
    ids=str,
)
def test_a_call_is_torchs(options: dict[str, Any], batched: bool, which: int) -> None:
    model = nn.ModuleDict({"attn": mha(**options)})
    theirs = model["attn"]
    assert isinstance(theirs, nn.MultiheadAttention)
    shapes = [(T, E), (S, theirs.kdim), (S, theirs.vdim)]
    given = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    if batched:
        given = [torch.stack([x, x.flip(0)], 0 if theirs.batch_first else 1) for x in given]
    assert hw.replace_attention_(model) == ("attn",)
    ours: Any = model["attn"]
    mask = masks(batched)[which]
    for more in ({}, {"average_attn_weights": False}, {"need_weights": False}):
        got, wanted = ours(*given, **mask, **more), theirs(*given, **mask, **more)
        close(got[0], wanted[0])
        assert (got[1] is None) == (wanted[1] is None)
        if got[1] is not None:
            close(got[1], wanted[1])


def encoder(**options: Any) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(E, H, 16, batch_first=True, dtype=torch.float64, **options)
    return nn.TransformerEncoder(layer, 2)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_encoders_go_on(norm_first: bool, training: bool) -> None:
    theirs = encoder(norm_first=norm_first, dropout=0.0).train(training)
    ours = copy.deepcopy(theirs)
    assert hw.replace_attention_(ours) == ("layers.0.self_attn", "layers.1.self_attn")
    x = torch.randn(B, T, E, dtype=torch.float64)
    padding = torch.zeros(B, T, dtype=torch.bool)
    padding[0, 5:] = True
    causal = nn.Transformer.generate_square_subsequent_mask(T, dtype=torch.float64)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            close(ours(x), theirs(x))
            close(ours(x, mask=causal, is_causal=True), theirs(x, mask=causal, is_causal=True))
            close(ours(x, mask=causal), theirs(x, mask=causal))
            got, wanted = (one(x, src_key_padding_mask=padding) for one in (ours, theirs))
            close(got[~padding], wanted[~padding])


def test_heads_are_seen_where_pytorch_would_have_fused_the_layer() -> None:
    model = encoder().eval()
    hw.replace_attention_(model)
    x = torch.randn(B, T, E, dtype=torch.float64)
    with torch.no_grad(), hw.watch(model, hw.Entropy()) as seen:
        model(x, src_key_padding_mask=torch.zeros(B, T, dtype=torch.bool))
    assert list(seen) == ["layers.0.self_attn", "layers.1.self_attn"]
    with torch.no_grad(), hw.ablate(model, ["L1H2"]):
        model(x)


def test_a_decoder_goes_on_and_learns_the_same() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerDecoderLayer(E, H, 16, dropout=0.0, dtype=torch.float64)
    theirs = nn.TransformerDecoder(layer, 2)
    ours = copy.deepcopy(theirs)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (theirs, ours)]
    assert len(hw.replace_attention_(ours)) == 4
    x, memory = (torch.randn(n, B, E, dtype=torch.float64) for n in (T, S))
    causal = nn.Transformer.generate_square_subsequent_mask(T, dtype=torch.float64)
    for _ in range(2):  # an optimizer that was there before has the same parameters
        for one, optimizer in zip((theirs, ours), optimizers, strict=True):
            optimizer.zero_grad()
            one(x, memory, tgt_mask=causal, tgt_is_causal=True).square().mean().backward()
            optimizer.step()
    states = theirs.state_dict(), ours.state_dict()
    assert states[0].keys() == states[1].keys()
    for name, tensor in states[0].items():
        close(states[1][name], tensor)
    theirs.load_state_dict(states[1])


class Block(nn.Module):
    """A block of torchvision's ViT."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attention = nn.MultiheadAttention(E, H, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.self_attention(x, x, x, need_weights=False)
        return x


def test_a_module_of_two_names_stays_one() -> None:
    model: Any = nn.Sequential(Block(), Block())
    model[1].self_attention = model[0].self_attention
    x = torch.randn(B, T, E)
    wanted = model(x)
    assert len(hw.replace_attention_(model)) == 2
    assert model[0].self_attention is model[1].self_attention
    torch.testing.assert_close(model(x), wanted)
    attention = model[0].self_attention
    before = attention.in_proj_weight.clone()
    attention.reset_parameters()
    assert not torch.equal(attention.in_proj_weight, before)
    assert not attention.in_proj_bias.any()


def test_a_query_that_sees_nothing_gives_no_nan() -> None:
    model: Any = nn.ModuleList([mha(batch_first=True)])
    hw.replace_attention_(model)
    x = torch.randn(B, T, E, dtype=torch.float64)
    hidden = torch.zeros(T, T, dtype=torch.bool)
    hidden[2] = True
    out, weights = model[0](x, x, x, attn_mask=hidden)
    assert not weights[:, 2].any()
    close(out[:, 2], model[0].out_proj.bias.expand(B, E))


def hooked() -> nn.Module:
    model = encoder()
    model.layers[1].self_attn.register_forward_hook(lambda *_: None)
    return model


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (nn.Linear(E, E), "it has no nn.MultiheadAttention"),
        (mha(), r"hw.MultiHeadAttention.from_torch\(…\) builds a layer from it"),
        (nn.Sequential(mha(), Their(E, H)), "at '1', give an nn.MultiheadAttention; a subclass"),
        (nn.Sequential(mha(), mha(add_bias_kv=True)), "at '1', it was built with add_bias_kv"),
        (hooked(), r"at 'layers.1.self_attn', it has forward hooks"),
        (3, "give a model"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_all_are_replaced_or_none(model: Any, says: str) -> None:
    kinds = [type(m) for m in model.modules()] if isinstance(model, nn.Module) else []
    with pytest.raises(ValueError, match=says):
        hw.replace_attention_(model)
    assert kinds == ([type(m) for m in model.modules()] if kinds else [])


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"is_causal": True}, "is_causal is a hint about attn_mask"),
        ({"attn_mask": torch.zeros(3, 3)}, r"attn_mask \[3, 3\] must be \[7, 7\] or \[8, 7, 7\]"),
        ({"key_padding_mask": torch.zeros(3, 3)}, r"key_padding_mask \[3, 3\] must be \[2, 7\]"),
        (
            {"attn_mask": torch.zeros(T, T, dtype=torch.int)},
            "masks must be bool or float, got torch.int32",
        ),
    ],
)
def test_calls_that_do_not_fit(more: dict[str, Any], says: str) -> None:
    model: Any = nn.ModuleList([mha(batch_first=True)])
    hw.replace_attention_(model)
    x = torch.randn(B, T, E, dtype=torch.float64)
    with pytest.raises(ValueError, match=says):
        model[0](x, x, x, **more)
    with pytest.raises(ValueError, match="must have the widths"):
        model[0](x[..., 1:], x, x)
    with pytest.raises(ValueError, match="must all be 2-D or 3-D"):
        model[0](x, x[0], x)

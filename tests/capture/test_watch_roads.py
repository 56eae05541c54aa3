"""Every road by which PyTorch's models attend: what is seen is what the textbook says of it."""

import importlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fresh
import headwise as hw
from headwise.capture.ablate import ablate
from headwise.capture.catch import catch
from support import truth

B, T, S, H, D = 2, 7, 11, 4, 4
E = H * D
STATISTICS = (hw.LSE(), hw.Entropy(), hw.MaxLogit(), hw.Mass(hw.Previous()), hw.Mass(hw.First()))
STATISTICS += (hw.Received(), hw.Map(3), hw.Distance(), hw.OffsetHistogram(4), hw.TopKeys(2))
STATISTICS += (hw.Similarity(),)


class Attends(nn.Module):
    """Projections around anything that attends: `attend(q, k, v)` on `[B, H, T, D]`."""

    def __init__(self, attend: Callable[..., Tensor], groups: int = H) -> None:
        super().__init__()
        self.attend, self.groups, self.num_heads = attend, groups, H
        self.q, self.kv = nn.Linear(E, E), nn.Linear(E, 2 * groups * D)
        self.out = nn.Linear(E, E)
        self.split: tuple[Tensor, ...] = ()

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        k, v = self.kv(x if context is None else context).chunk(2, -1)
        self.split = q, k, v = [y.unflatten(-1, (-1, D)).transpose(1, 2) for y in (self.q(x), k, v)]
        return self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))


def watched(model: nn.Module, *args: Any, statistics: Any = STATISTICS, **kwargs: Any) -> Any:
    """What is seen of a model; its outputs and random numbers are held to be as without."""
    torch.manual_seed(3)
    plain, number = model(*args, **kwargs), torch.rand(())
    torch.manual_seed(3)
    with hw.watch(model, *statistics) as seen:
        out = model(*args, **kwargs)
    assert torch.equal(number, torch.rand(()))
    pairs = [(plain, out)] if isinstance(plain, Tensor) else zip(plain, out, strict=True)
    for one, other in pairs:
        assert one is other or torch.equal(one, other)
    return seen


def assert_as_defined(readings: Any, full: Any) -> None:
    """Each statistic on P is what was read, to float32's rounding."""
    for statistic in STATISTICS:
        for name, wanted in statistic.define(full).items():
            got = readings[name].values.double()
            torch.testing.assert_close(got, wanted.double(), rtol=1e-5, atol=1e-5, msg=name)


def heads_of(model: nn.Module, *args: Any, **kwargs: Any) -> list[Tensor]:
    """The heads' outputs that are told of."""
    told: list[Tensor] = []
    with catch(model, lambda call: told.append(call.out)):
        model(*args, **kwargs)
    return told


# ── scaled_dot_product_attention ────────────────────────────────────────────────────────────────

NOISE = torch.randn(B, H, T, S, generator=torch.Generator().manual_seed(0))
TABLE = NOISE[:, :1] > -0.5
SDPA: dict[str, tuple[int, int, Any, hw.Mask | None]] = {
    "plain": (T, T, {}, None),
    "causal": (T, T, {"is_causal": True}, hw.Causal()),
    "causal, fewer queries": (T, S, {"is_causal": True}, hw.Dense(torch.ones(T, S).tril() > 0)),
    "causal, more queries": (S, T, {"is_causal": True}, hw.Dense(torch.ones(S, T).tril() > 0)),
    "scale": (T, T, {"scale": 0.3}, None),
    "boolean": (T, S, {"attn_mask": TABLE}, hw.Dense(TABLE)),
    "boolean of two axes": (T, S, {"attn_mask": TABLE[0, 0]}, hw.Dense(TABLE[0, 0])),
    "per head": (T, S, {"attn_mask": NOISE > 0}, hw.Dense(NOISE > 0)),
    "bias": (T, S, {"attn_mask": NOISE}, hw.Bias(NOISE)),
    "additive": (T, T, {"attn_mask": torch.full((T, T), -1e9).triu(1)}, hw.Causal()),
}


@pytest.mark.parametrize("case", SDPA)
@pytest.mark.parametrize("groups", [H, 2, 1])
def test_fused_attention(case: str, groups: int) -> None:
    t, s, options, mask = SDPA[case]
    gqa: Any = {"enable_gqa": groups < H}
    model = Attends(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **options, **gqa), groups
    )
    context = None if t == s else torch.randn(B, s, E)
    seen = watched(model, torch.randn(B, t, E), context)
    full = truth(*model.split, mask=mask, scale=options.get("scale"))
    if case == "causal, fewer queries":  # keys that nobody may see are cut off
        full = truth(model.split[0], *(x[:, :, :t] for x in model.split[1:]), mask=hw.Causal())
    assert_as_defined(seen[""].calls[0], full)


def test_keys_and_values_may_have_groups_of_their_own() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k[:, :1], v, enable_gqa=True)

    model = Attends(attend, 2)
    seen = watched(model, torch.randn(B, T, E))
    q, k, v = model.split
    wide = k[:, :1].expand(B, H, T, -1), v.repeat_interleave(H // 2, 1)
    assert_as_defined(seen[""].calls[0], truth(q, *wide))


@pytest.mark.parametrize("make", ["causal_upper_left", "causal_lower_right"])
@pytest.mark.parametrize("keys", [T, S])
def test_a_causal_bias_is_the_mask_it_stands_for(make: str, keys: int) -> None:
    bias = getattr(importlib.import_module("torch.nn.attention.bias"), make)(T, keys)
    model = Attends(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, bias))
    seen = watched(model, torch.randn(B, T, E), None if keys == T else torch.randn(B, keys, E))
    q, k, v = model.split
    if make == "causal_upper_left":  # keys that nobody may see are cut off
        k, v = k[:, :, :T], v[:, :, :T]
    assert_as_defined(seen[""].calls[0], truth(q, k, v, mask=hw.Causal()))


def three(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    mask = torch.ones(T, T).tril().bool().expand(B * H, T, T)
    return F.scaled_dot_product_attention(q, k, v, mask).unflatten(0, (B, H))


def five(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x[:, None] for x in (q, k, v))
    mask = torch.ones(T, T).tril().bool().expand(B, 1, H, T, T)
    return F.scaled_dot_product_attention(q, k, v, mask)[:, 0]


def operator(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.ops.aten.scaled_dot_product_attention(q, k, v, is_causal=True)


@pytest.mark.parametrize("attend", [three, five, operator])
def test_fused_attention_with_other_axes(attend: Callable[..., Tensor]) -> None:
    model = Attends(attend)
    x = torch.randn(B, T, E)
    seen = watched(model, x)
    assert_as_defined(seen[""].calls[0], truth(*model.split, mask=hw.Causal()))
    with ablate(model, {"": [1]}):
        without = model(x)
    heads = attend(*model.split).index_fill(1, torch.tensor([1]), 0.0)
    assert torch.equal(without, model.out(heads.transpose(1, 2).flatten(2)))


# ── headwise's own functions, in modules of others ──────────────────────────────────────────────

OWN: dict[str, tuple[int, int, dict[str, Any]]] = {
    "plain": (T, T, {}),
    "causal": (T, T, {"mask": hw.Causal(), "scale": 0.3}),
    "the end of a sequence": (T, S, {"mask": hw.Causal()}),
    "bias, softcap and sinks": (
        T,
        T,
        {"mask": hw.Bias(NOISE[..., :T]), "softcap": 2.0, "sinks": torch.tensor([0.3, 1, -2, 0])},
    ),
    "another sequence's padding": (T, S, {"mask": hw.Padding(torch.tensor([S, 3]))}),
    "dropout": (T, T, {"dropout": 0.4}),
}


@pytest.mark.parametrize("function", [hw.attend, hw.observe])
@pytest.mark.parametrize("case", OWN)
@pytest.mark.parametrize("groups", [H, 2])
def test_own_functions_in_modules_of_others(
    function: Callable[..., Any], case: str, groups: int
) -> None:
    t, s, options = OWN[case]

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found = function(q, k, v, **options)
        return found if isinstance(found, Tensor) else found.out

    model = Attends(run, groups)
    context = None if t == s else torch.randn(B, s, E)
    x = torch.randn(B, t, E)
    seen = watched(
        nn.Sequential(nn.Identity(), model) if t == s else model, x, *[context][t == s :]
    )
    where = seen["1" if t == s else ""]
    (call,) = where.calls
    asked = {name: options[name] for name in ("scale", "softcap", "sinks") if name in options}
    assert_as_defined(call, truth(*model.split, mask=options.get("mask"), **asked))
    if case == "dropout":
        return
    with ablate(model, {"": [1]}):
        without = model(x, context)
    heads = run(*model.split).index_fill(1, torch.tensor([1]), 0.0)
    assert torch.equal(without, model.out(heads.transpose(1, 2).flatten(2)))


def test_own_functions_on_a_part_of_a_sequence() -> None:
    options: Any = {"mask": hw.Causal(), "first_query": 2}
    model = Attends(lambda q, k, v: hw.attend(q, k, v, **options))
    seen = watched(model, torch.randn(B, T, E), torch.randn(B, S, E))
    want = hw.observe(*model.split, hw.Mass(hw.Previous()), **options)
    torch.testing.assert_close(seen[""]["previous"], want["previous"].detach())


def test_own_layers_are_told_of_once() -> None:
    model = nn.Sequential(hw.MultiHeadAttention(E, H), Attends(hw.attend))
    x = torch.randn(B, T, E)
    told: list[str] = []
    with catch(model, lambda call: told.append(call.name)), hw.watch(model) as seen:
        model(x)
        hw.attend(*torch.randn(3, B, H, T, D))  # not of the model
    assert told == ["0", "1"]
    assert [len(seen[name].calls) for name in seen.modules] == [1, 1]


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_fused_attention_on_nested_tensors(layout: torch.layout) -> None:
    warnings.simplefilter("ignore")
    lengths = [3, T]

    class Nested(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.layout is torch.jagged:
                x = x.unflatten(-1, (H, D)).transpose(1, 2)
            return F.scaled_dot_product_attention(x, x, x).transpose(1, 2)

    rows = [torch.randn(length, E) for length in lengths]
    if layout is torch.jagged:
        x = torch.nested.nested_tensor(rows, layout=layout)
    else:
        x = torch.nested.nested_tensor([row.view(-1, H, D).transpose(0, 1) for row in rows])
    model = Nested()
    with torch.no_grad():
        plain = model(x)
        with hw.watch(model, hw.LSE()) as seen:
            out = model(x)
        with ablate(model, {"": [1]}):
            without = model(x)
    for one, other, row, lse in zip(
        plain.unbind(), out.unbind(), rows, seen[""]["lse"], strict=True
    ):
        assert torch.equal(one, other)
        heads = row.view(1, -1, H, D).transpose(1, 2)
        full = truth(heads, heads, heads)
        torch.testing.assert_close(lse[:, : len(row)].double(), full.lse[0], atol=1e-5, rtol=1e-5)
        assert bool(lse[:, len(row) :].isneginf().all())
    for one, other in zip(plain.unbind(), without.unbind(), strict=True):
        expected = one.index_fill(1, torch.tensor([1]), 0.0)
        torch.testing.assert_close(other, expected)


def test_autocast_is_seen_as_it_computes() -> None:
    model = Attends(lambda q, k, v: F.scaled_dot_product_attention(q, k, v))
    kept: list[torch.dtype] = []
    model.attend = lambda q, k, v: F.scaled_dot_product_attention(q.float(), k.float(), v.float())
    with torch.autocast("cpu", torch.bfloat16):
        seen = watched(model, torch.randn(B, T, E))
        with catch(model, lambda call: kept.append(call.q.dtype)):  # type: ignore[attr-defined]
            model(torch.randn(B, T, E))
    assert kept == [torch.bfloat16]
    assert seen[""]["entropy"].dtype == torch.float32


def test_dropout_is_the_models_own() -> None:
    attend = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.3)  # noqa: E731
    model = Attends(attend)
    seen = watched(model, torch.randn(B, T, E))
    assert_as_defined(seen[""].calls[0], truth(*model.split))


# ── padding ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("form", ["bool", "float"])
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("causal", [False, True])
def test_padded_queries_count_in_no_mean(form: str, side: str, causal: bool) -> None:
    real = torch.ones(B, T, dtype=torch.bool)
    real[0, 4:] = False
    real = real if side == "right" else real.flip(1)
    allowed = real[:, None, None].expand(B, 1, T, T)
    if causal:
        allowed = allowed & torch.ones(T, T).tril().bool()
    mask = allowed if form == "bool" else torch.zeros(B, 1, T, T).masked_fill(~allowed, -1e9)
    model = Attends(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask))
    seen = watched(model, torch.randn(B, T, E))
    entropy = seen[""]["entropy"]
    rows = seen[""].calls[0]["entropy"].rows.expand(B, H, T)
    assert torch.equal(rows, real[:, None].expand(B, H, T))
    assert bool((entropy[~rows] == 0).all())
    full = truth(*model.split, mask=hw.Dense(allowed))
    wanted = hw.Entropy().define(full)["entropy"]
    torch.testing.assert_close(entropy.double()[rows], wanted[rows], atol=1e-5, rtol=1e-5)
    mean = wanted[:, 1][real].mean().item()
    assert seen.table()[1]["entropy"] == pytest.approx(mean, abs=1e-5)


def test_padding_of_another_sequence_leaves_the_queries_alone() -> None:
    real = torch.arange(S) < torch.tensor([[S], [5]])
    model = Attends(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, real[:, None, None]))
    seen = watched(model, torch.randn(B, T, E), torch.randn(B, S, E))
    assert_as_defined(seen[""].calls[0], truth(*model.split, mask=hw.Dense(real[:, None, None])))


def test_a_static_cache_is_empty_behind_the_last_query() -> None:
    allowed = torch.arange(S) <= torch.arange(T)[:, None] + 2
    model = Attends(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, allowed))
    seen = watched(model, torch.randn(B, T, E), torch.randn(B, S, E))
    q, k, v = model.split
    full = truth(q, k[:, :, : T + 2], v[:, :, : T + 2], mask=hw.Causal())
    assert_as_defined(seen[""].calls[0], full)


@pytest.mark.parametrize("forbidden", [-torch.inf, -1e9])
@pytest.mark.parametrize("queries", [T, 1])
def test_a_static_cache_of_attention_by_hand(queries: int, forbidden: float) -> None:
    hidden = torch.arange(S) > torch.arange(queries)[:, None] + 2
    model = Attends(lambda q, k, v: F.softmax((q @ k.mT).masked_fill(hidden, forbidden), -1) @ v)
    seen = watched(model, torch.randn(B, queries, E), torch.randn(B, S, E))
    q, k, v = model.split
    k, v = k[:, :, : queries + 2], v[:, :, : queries + 2]
    assert_as_defined(seen[""].calls[0], truth(q, k, v, mask=hw.Causal(), scale=1.0))


def strict(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, torch.ones(T, T).tril(-1).bool())


def strict_by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).masked_fill(torch.ones(T, T).triu() > 0, -1e9).softmax(-1) @ v


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = hw.MultiHeadAttention(E, H)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, mask=hw.Dense(torch.ones(T, T).tril(-1).bool()))


def counted(seen: hw.capture.Watched) -> Tensor:
    """Which queries count in a model of one layer, `[B, H, T]`."""
    rows = seen[seen.modules[0]].calls[0]["lse"].rows
    assert rows is not None
    return rows.expand(B, H, T)


@pytest.mark.parametrize("model", [Attends(strict), Attends(strict_by_hand), Own()])
def test_padding_is_counted_where_that_is_asked(model: nn.Module) -> None:
    x = torch.randn(B, T, E)
    for padding, last in ((True, False), (False, True)):
        with hw.watch(model, hw.LSE(), padding=padding) as seen:
            model(x)
        rows = counted(seen)
        assert bool(rows[:, :, 1:-1].all())
        assert bool((rows[:, :, -1] == last).all())
        assert not rows[:, :, 0].any()  # that one sees no key at all
    with hw.watch(model, hw.LSE()) as outer, hw.watch(model, hw.LSE(), padding=False) as inner:
        model(x)
    assert counted(outer).sum() < counted(inner).sum()


@pytest.mark.parametrize("mask", [hw.Padding(torch.tensor([4, T])), None])
def test_headwises_own_layer_leaves_padding_out(mask: hw.Mask | None) -> None:
    layer = hw.MultiHeadAttention(E, H)
    x = torch.randn(B, T, E)
    seen = watched(layer, x, mask=mask)
    alive = seen[""].calls[0]["lse"].rows.expand(B, H, T).sum((1, 2))
    assert alive.tolist() == ([4 * H, T * H] if mask else [T * H] * 2)
    crossing = hw.MultiHeadAttention(E, H)
    seen = watched(crossing, x, torch.randn(B, T, E), mask=hw.Padding(torch.tensor([4, T])))
    assert bool(seen[""].calls[0]["lse"].rows.all())


# ── nn.MultiheadAttention ───────────────────────────────────────────────────────────────────────

EXTRA = ("add_bias_kv", "add_zero_attn")
PAD = torch.arange(T) >= torch.tensor([[T], [5]])
LATER = torch.ones(T, T).triu(1).bool()
MHA: dict[str, tuple[dict[str, Any], tuple[int, ...], dict[str, Any]]] = {
    "plain": ({}, (T, T), {}),
    "padded": ({}, (T, T), {"key_padding_mask": PAD}),
    "causal": ({}, (T, T), {"attn_mask": LATER}),
    "both": ({"bias": False}, (T, T), {"attn_mask": LATER, "key_padding_mask": PAD}),
    "additive": ({}, (T, T), {"attn_mask": NOISE[..., :T].flatten(0, 1)}),
    "cross": ({}, (T, S), {}),
    "cross of equal length, padded": ({}, (T, -T), {"key_padding_mask": PAD}),
    "batch first": ({"batch_first": True}, (T, T), {"key_padding_mask": PAD}),
    "bias_kv": ({"add_bias_kv": True}, (T, T), {"key_padding_mask": PAD, "attn_mask": LATER}),
    "zero": ({"add_zero_attn": True}, (T, T), {}),
    "widths": ({"kdim": 5, "vdim": 3}, (T, S), {}),
}


@pytest.mark.parametrize("case", MHA)
@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("mode", ["train", "eval", "fused"])
def test_multihead_attention(case: str, weights: bool, mode: str) -> None:
    options, (t, s), masks = MHA[case]
    model = nn.MultiheadAttention(E, H, dropout=0.1, **options).train(mode == "train")
    query = torch.randn(t, B, E)
    key = value = query if s == t else torch.randn(abs(s), B, E)
    if "kdim" in options:
        key, value = torch.randn(s, B, 5), torch.randn(s, B, 3)
    if "batch_first" in options:
        query = key = value = query.transpose(0, 1)
    given = (query, key, value)
    with torch.set_grad_enabled(mode != "fused"):
        seen = watched(model, *given, need_weights=weights, **masks)
        p = model.eval()(*given, average_attn_weights=False, **masks)[1].double()
    own = query is key
    real = ~PAD if own and "key_padding_mask" in masks else torch.ones(B, t, dtype=torch.bool)
    rows = seen[""].calls[0]["entropy"].rows.expand(B, H, t)
    assert torch.equal(rows, real[:, None].expand(B, H, t))
    wanted = torch.special.entr(p).sum(-1)
    got = seen[""]["entropy"].double()
    torch.testing.assert_close(got[rows], wanted[rows], atol=1e-5, rtol=1e-5)
    received = torch.where(rows[..., None], p, 0.0).sum(2)
    torch.testing.assert_close(seen[""]["received"].double(), received, atol=1e-5, rtol=1e-5)
    told = heads_of(model, *given, need_weights=weights, **masks)[0].transpose(1, 2).flatten(2)
    out = model(*given, **masks)[0]
    out = out if "batch_first" in options else out.transpose(0, 1)
    torch.testing.assert_close(model.out_proj(told)[real], out[real])


@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("behind", [("add_bias_kv",), ("add_zero_attn",), (*EXTRA,)], ids=str)
def test_keys_without_a_position_stay_where_the_model_has_them(
    behind: tuple[str, ...], weights: bool
) -> None:
    torch.manual_seed(0)
    model = nn.MultiheadAttention(E, H, batch_first=True, **dict.fromkeys(behind, True)).eval()
    x, ids = torch.randn(B, T, E), torch.tensor([3, 5, 3, 5, 9, 3, 5])
    given = {"query": x, "key": x, "value": x, "need_weights": weights}
    p = model(x, x, x, average_attn_weights=False)[1]
    torch.testing.assert_close(hw.attention_of(model, given, ""), p)
    follows = F.pad(ids[:, None] == ids[:-1], (1, 0))  # what followed the token elsewhere
    follows &= torch.arange(T) != torch.arange(T)[:, None] + 1
    wanted = {
        "first": p[..., 0],
        "all": p[..., :T].sum(-1),
        "self": p.diagonal(0, -2, -1),
        "next": F.pad(p[..., :T].diagonal(1, -2, -1), (0, 1)),
        "induction": (p[..., :T] * follows).sum(-1),
    }
    patterns = [hw.First(), hw.Self(), hw.At(1), hw.Induction(ids)]
    statistics = [hw.Mass(pattern) for pattern in patterns]
    statistics += [hw.Mass(hw.First(T + 3), "all"), hw.Received(), hw.TopKeys(1)]
    seen = watched(model, statistics=statistics, **given)[""]
    for name, mass in wanted.items():
        torch.testing.assert_close(seen[name], mass, atol=1e-6, rtol=1e-5, msg=name)
    torch.testing.assert_close(seen["received"], p.sum(2))
    assert torch.equal(seen["top_keys"][..., 0], p.argmax(-1))


class Fairseq(nn.Module):
    """Attention written out with a learned key behind the others, as in fairseq and ESM-1."""

    num_heads = H

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(E, 3 * E), nn.Linear(E, E)
        self.bias_k, self.bias_v = nn.Parameter(torch.randn(E)), nn.Parameter(torch.randn(E))
        self.weights = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        k, v = (
            torch.cat([one, bias.expand(len(x), 1, E)], 1)
            for one, bias in ((k, self.bias_k), (v, self.bias_v))
        )
        q, k, v = (one.unflatten(-1, (H, D)).transpose(1, 2) for one in (q, k, v))
        self.weights = (q @ k.mT * D**-0.5).softmax(-1)
        return self.out((self.weights @ v).transpose(1, 2).flatten(2))


def test_a_learned_key_behind_the_others_has_no_position() -> None:
    model, x = Fairseq(), torch.randn(B, T, E)
    seen = watched(model, x, statistics=[hw.Mass(p) for p in (hw.First(), hw.Self(), hw.At(1))])
    p = model.weights
    torch.testing.assert_close(seen[""]["first"], p[..., 0])
    torch.testing.assert_close(seen[""]["self"], p.diagonal(0, -2, -1))
    torch.testing.assert_close(
        seen[""]["next"], F.pad(p[..., :T].diagonal(1, -2, -1), (0, 1)), atol=1e-6, rtol=1e-5
    )


@pytest.mark.parametrize("memory", [1, 2, 12])
@pytest.mark.parametrize("cached", [0, 2])
@pytest.mark.parametrize("by_hand", [True, False])
def test_queries_stand_before_keys_that_every_query_sees(
    memory: int, cached: int, by_hand: bool
) -> None:
    """Texts padded right, with keys of a cache before the sequence and memory keys behind it."""
    real = torch.arange(T) < torch.tensor([[T], [4]])
    later = torch.arange(cached + T) <= torch.arange(T)[:, None] + cached
    seen_by = later & F.pad(real, (cached, 0), value=True)[:, None]
    allowed = F.pad(seen_by, (0, memory), value=True)[:, None]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if by_hand:
            return (q @ k.mT * D**-0.5).masked_fill(~allowed, -torch.inf).softmax(-1) @ v
        return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)

    model = Attends(attend)
    statistics = [hw.LSE(), hw.Mass(hw.Self()), hw.Mass(hw.First())]
    context = torch.randn(B, cached + T + memory, E)
    call = watched(model, torch.randn(B, T, E), context, statistics=statistics)[""].calls[0]
    rows = call["lse"].rows.expand(B, H, T)
    assert torch.equal(rows, real[:, None].expand(B, H, T))
    q, k, _ = model.split
    p = (q @ k.mT * D**-0.5).masked_fill(~allowed, -torch.inf).softmax(-1)
    for name, mass in (("self", p.diagonal(cached, -2, -1)), ("first", p[..., 0])):
        torch.testing.assert_close(call[name].values[rows], mass[rows], atol=1e-6, rtol=1e-5)


def test_one_text_without_a_batch() -> None:
    model, x = nn.MultiheadAttention(E, H), torch.randn(T, E)
    seen = watched(model, x, x, x)
    p = model(x, x, x, average_attn_weights=False)[1]
    wanted = torch.special.entr(p).sum(-1)[None]
    torch.testing.assert_close(seen[""]["entropy"], wanted, atol=1e-5, rtol=1e-5)


def test_heads_know_their_projection() -> None:
    model, x = nn.MultiheadAttention(E, H), torch.randn(T, B, E)
    out = heads_of(model, x, x, x)[0]
    parts = model.out_proj.weight.unflatten(1, (H, D))
    added = torch.einsum("bhtd,ohd->bhto", out, parts)
    for options in ({}, {"need_weights": False}):
        seen = watched(model, x, x, x, statistics=[hw.OutputNorm()], **options)
        torch.testing.assert_close(seen[""]["output_norm"], out.norm(dim=-1))
        torch.testing.assert_close(seen[""]["contribution"], added.norm(dim=-1))


# ── PyTorch's transformers ──────────────────────────────────────────────────────────────────────


def encoder(norm_first: bool, nested: bool = True, batch_first: bool = True) -> nn.Module:
    warnings.simplefilter("ignore")
    layer = nn.TransformerEncoderLayer(
        E, H, 2 * E, dropout=0.1, norm_first=norm_first, batch_first=batch_first
    )
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("masks", ["none", "padded", "padded, not nested", "causal", "random"])
def test_encoders_fused_and_not(norm_first: bool, masks: str) -> None:
    model = encoder(norm_first, nested="not" not in masks).eval()
    options: dict[str, Any] = {}
    if "padded" in masks:
        options = {"src_key_padding_mask": PAD}
    elif masks == "causal":
        options = {"mask": nn.Transformer.generate_square_subsequent_mask(T), "is_causal": True}
    elif masks == "random":
        options = {"mask": NOISE[0, 0, :, :T] > 0.5}
    x = torch.randn(B, T, E)
    plain = watched(model, x, **options)  # with gradients PyTorch itself takes the long way
    with torch.no_grad():
        fused = watched(model, x, **options)
        with ablate(model, {"layers.*.self_attn": [1]}):
            without = model(x, **options)
    assert fused.modules == plain.modules == ("layers.0.self_attn", "layers.1.self_attn")
    for module in fused.modules:
        for name, reading in fused[module].calls[0].items():
            other = plain[module].calls[0][name]
            torch.testing.assert_close(
                reading.values, other.values.detach(), atol=2e-5, rtol=1e-4, msg=name
            )
            assert (reading.rows is None) == (other.rows is None)
    real = ~PAD if "padded" in masks else torch.ones(B, T, dtype=torch.bool)
    with ablate(model, {"layers.*.self_attn": [1]}):
        long_way = model(x, **options)
    torch.testing.assert_close(without[real], long_way.detach()[real], atol=1e-5, rtol=1e-4)
    assert not torch.allclose(without[real], model(x, **options).detach()[real], atol=1e-3)


def test_fused_layers_are_still_taken() -> None:
    model, x = encoder(False).eval(), torch.randn(B, T, E)
    heads, roads = nn.MultiheadAttention(E, H, batch_first=True).eval(), []
    with catch(model, lambda call: roads.append(call.route)):
        model(x)
        with torch.no_grad():
            model(x)
    with torch.no_grad(), catch(heads, lambda call: roads.append(call.route)):
        heads(x, x, x)
    long, fused = "scaled_dot_product_attention", "transformer_encoder_layer"
    assert roads == [long, long, fused, fused, "multi_head_attention"]


def test_a_watch_within_an_ablation_sees_what_it_left_of_a_fused_layer() -> None:
    model, x = encoder(False).eval(), torch.randn(B, T, E)
    asked, head = hw.OutputNorm(), {"layers.0.self_attn": [1]}
    with torch.no_grad(), ablate(model, head), hw.watch(model, asked) as inside:
        model(x)
    with torch.no_grad(), hw.watch(model, asked) as outside, ablate(model, head):
        model(x)
    assert [row["output_norm"] > 0 for row in inside.table()[:H]] == [True, False, True, True]
    assert all(row["output_norm"] > 0 for row in outside.table()[:H])


@pytest.mark.parametrize("training", [True, False])
def test_encoder_and_decoder(training: bool) -> None:
    warnings.simplefilter("ignore")
    model = nn.Transformer(E, H, 1, 1, 2 * E, batch_first=True).train(training)
    later = nn.Transformer.generate_square_subsequent_mask(T)
    given = {"tgt_mask": later, "src_key_padding_mask": torch.arange(S) >= torch.tensor([[S], [5]])}
    given["memory_key_padding_mask"] = given["src_key_padding_mask"]
    with torch.set_grad_enabled(training):
        seen = watched(model, torch.randn(B, S, E), torch.randn(B, T, E), **given)
    names = ["encoder.layers.0.self_attn", "decoder.layers.0.self_attn"]
    assert seen.modules == (*names, "decoder.layers.0.multihead_attn")
    alive = [seen[name].calls[0]["lse"].rows.expand(B, H, -1) for name in seen.modules]
    assert [rows.sum().item() for rows in alive] == [H * (S + 5), B * H * T, B * H * T]


# ── written out by hand ─────────────────────────────────────────────────────────────────────────


def scores(q: Tensor, k: Tensor, forbidden: float = -torch.inf) -> Tensor:
    later = torch.ones(q.shape[2], k.shape[2]).triu(1).bool()
    return (q @ k.mT * D**-0.5).masked_fill(later, forbidden)


def nanogpt(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.dropout(F.softmax(scores(q, k), dim=-1), 0.2) @ v


def annotated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.matmul(scores(q, k, -1e9).softmax(-1), v)


def in_float32(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    p = torch.softmax(scores(q, k, -1e4), -1, dtype=torch.float32).type_as(q)
    return torch.einsum("b h i j, b h j d -> b i h d", p, v).transpose(1, 2)


def flattened(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    p = F.softmax(scores(q, k).view(B * H, T, T), dim=-1)
    return torch.bmm(p.view(B, H, T, T).flatten(0, 1), v.flatten(0, 1)).unflatten(0, (B, H))


def spelled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    p = torch.softmax(scores(q, k), dim=3)
    return torch.einsum("...jd,...ij->...id", v, p)


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    groups = q.unflatten(1, (2, 2))
    later = torch.ones(T, T).triu(1).bool()
    p = (groups @ k[:, ::2, None].mT * D**-0.5).masked_fill(later, -torch.inf).softmax(-1)
    return (p @ v[:, ::2, None]).flatten(1, 2)


def grouped_and_spelled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bgrid,bgjd->bgrij", q.unflatten(1, (2, 2)), k[:, ::2]) * D**-0.5
    p = scores.masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf).softmax(-1)
    return torch.einsum("bgrij,bgjd->bigrd", p, v[:, ::2]).flatten(2, 3).transpose(1, 2)


HANDS = [nanogpt, annotated, in_float32, flattened, spelled, grouped, grouped_and_spelled]


@pytest.mark.parametrize("attend", HANDS)
def test_attention_by_hand(attend: Callable[..., Tensor]) -> None:
    model = Attends(attend)
    x = torch.randn(B, T, E)
    seen = watched(model, x)
    q, k, v = model.split
    if "grouped" in attend.__name__:
        k, v = k[:, ::2], v[:, ::2]
    assert_as_defined(seen[""].calls[0], truth(q, k, v, mask=hw.Causal()))
    torch.manual_seed(1)
    heads = heads_of(model, x)[0]
    torch.manual_seed(1)
    assert torch.equal(heads, attend(*model.split))
    torch.manual_seed(1)
    with ablate(model, {"": [2]}):
        without = model(x)
    heads = heads.index_fill(1, torch.tensor([2]), 0.0)
    assert torch.equal(without, model.out(heads.transpose(1, 2).flatten(2)))


def kept_in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    p = F.dropout(scores(q, k, -1e9).softmax(-1), 0.2, inplace=True)
    return p @ v


def by_table(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k).softmax(-1) * torch.ones(T, T).tril() @ v


def refilled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k).softmax(-1).masked_fill(torch.ones(T, T).triu(1) > 0, 0.0) @ v


def by_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (scores(q, k).softmax(-1) * torch.tensor([1.0, 0.0, 1.0, 2.0]).view(H, 1, 1) * 0.5) @ v


def heads_in_front(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    return (scores(q, k).softmax(-1) @ v).transpose(0, 1)


def heads_in_front_and_spelled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    p = scores(q.transpose(0, 1), k.transpose(0, 1)).softmax(-1)
    return torch.einsum("hbij,bhjd->bhid", p, v)


def heads_in_front_and_flattened(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    p = scores(q.transpose(0, 1), k.transpose(0, 1)).softmax(-1).flatten(0, 1)
    return torch.bmm(p, v.transpose(0, 1).flatten(0, 1)).unflatten(0, (H, B)).transpose(0, 1)


KEPT = [kept_in_place, by_table, refilled, by_head]
KEPT += [heads_in_front, heads_in_front_and_spelled, heads_in_front_and_flattened]


@pytest.mark.parametrize("attend", KEPT)
def test_what_leaves_the_probabilities_and_where_heads_stand(
    attend: Callable[..., Tensor],
) -> None:
    test_attention_by_hand(attend)


def test_rows_that_attend_to_nothing_may_be_filled_with_zeros() -> None:
    hidden = torch.ones(T, T).triu(1).bool()
    hidden[:, 5:] = hidden[5:] = True  # two are padding, of which softmax makes uniform rows

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        p = (q @ k.mT * D**-0.5).masked_fill(hidden, -1e9).softmax(-1)
        return p.masked_fill(hidden, 0.0) @ v

    model = Attends(attend)
    seen = watched(model, torch.randn(B, T, E))
    assert_as_defined(seen[""].calls[0], truth(*model.split, mask=hw.Dense(~hidden)))


def scores_cleared(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    a = scores(q, k, -1e9)
    p = a.softmax(-1)
    a.zero_()
    return p @ v


def scores_reused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    a = scores(q, k, -1e9)
    torch.softmax(a, -1, out=a)
    return a @ v


def masked_afterwards(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    p = (q @ k.mT).softmax(-1)
    p *= torch.ones(T, T).tril()
    return p @ v


def masked_through_a_view(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    p = (q @ k.mT).softmax(-1).view(B * H, T, T)
    p[:, 1] = 0
    return p.view(B, H, T, T) @ v


def masked_by_a_product(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1) * torch.ones(T, T).tril() @ v


def masked_into_itself(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    p = (q @ k.mT).softmax(-1)
    return torch.mul(p, torch.ones(T, T).tril(), out=p) @ v


def filled_afterwards(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1).masked_fill(torch.ones(T, T).triu(1) > 0, 0.0) @ v


def normalised_anew(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    p = (q @ k.mT).softmax(-1)
    p *= torch.ones(T, T).tril()
    p /= p.sum(-1, keepdim=True)
    return torch.einsum("bhij,bhjd->bhid", p, v)


def linear(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q.softmax(-1) @ (k.softmax(-2).mT @ v)


def linear_and_spelled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    context = torch.einsum("bhnd,bhne->bhde", k.softmax(dim=2), v)
    return torch.einsum("bhnd,bhde->bhne", q.softmax(-1), context)


OTHERS = [scores_cleared, scores_reused, masked_afterwards, masked_through_a_view]
OTHERS += [masked_by_a_product, masked_into_itself, filled_afterwards, normalised_anew]
OTHERS += [linear, linear_and_spelled]


@pytest.mark.parametrize("attend", OTHERS)
def test_what_is_no_softmax_of_its_scores_times_values_is_not_seen(
    attend: Callable[..., Tensor],
) -> None:
    model = Attends(attend)
    with torch.no_grad():
        assert heads_of(model, torch.randn(B, T, E)) == []


def test_a_softmax_over_queries_spoils_no_other_attention() -> None:
    named: Any = {"axis": -1}  # as NumPy says it

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        v = v * (k.softmax(-2).mT @ v).sum() * (torch.eye(T).to_sparse() @ v[0, 0]).sum()
        return torch.softmax(scores(q, k), **named) @ v

    model = Attends(attend)
    x = torch.randn(B, T, E)
    assert_as_defined(watched(model, x)[""].calls[0], truth(*model.split, mask=hw.Causal()))


class Inner(nn.Module):
    """Attention on what a module around it has split."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.softmax(q @ k.mT * D**-0.5, -1) @ v


class Attention(nn.Module):
    """Keeps the number of heads, and leaves attending to `inner`, on axes that `split` makes."""

    def __init__(self, split: Callable[[Tensor], Tensor], n_heads: int = H) -> None:
        super().__init__()
        self.inner, self.n_heads, self.split = Inner(), n_heads, split

    def forward(self, x: Tensor) -> Tensor:
        q = self.split(x.unflatten(-1, (self.n_heads, -1)))
        return self.inner(q, q, q)


@pytest.mark.parametrize(
    "split", [lambda x: x.transpose(1, 2).flatten(0, 1), lambda x: x.permute(2, 0, 1, 3)]
)
def test_the_module_around_says_how_many_heads_there_are(split: Callable[..., Tensor]) -> None:
    x = torch.randn(B, T, E)
    heads = x.unflatten(-1, (H, D)).transpose(1, 2)
    seen = watched(nn.Sequential(Attention(split)), x)
    assert_as_defined(seen["0.inner"].calls[0], truth(heads, heads, heads))


def test_a_head_to_a_module() -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(E, 3 * D)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).chunk(3, -1)
            return F.softmax(q @ k.mT, -1) @ v

    class MultiHeadAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.num_heads, self.heads = 2, nn.ModuleList([Head(), Head()])

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([head(x) for head in self.heads], -1)

    seen = watched(MultiHeadAttention(), torch.randn(B, T, E))
    assert [(row["module"], row["head"]) for row in seen.table()] == [
        ("heads.0", 0),
        ("heads.1", 0),
    ]


def test_a_softmax_that_is_no_attention_is_none() -> None:
    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.words = nn.Linear(E, H), nn.Linear(E, S)
            self.embedding = nn.Parameter(torch.randn(S, E))

        def forward(self, x: Tensor) -> Tensor:
            gate = self.gate(x).softmax(-1)
            mixed = torch.einsum("bte,bth->bthe", x, gate).sum(2)
            soft = self.words(mixed).softmax(-1) @ self.embedding  # a table, no keys of the batch
            return soft * self.words(x).log_softmax(-1).mean()

    model = Router()
    told = heads_of(model, torch.randn(B, T, E))
    assert told == []


def test_wrapped_softmax_and_product_have_the_name_of_what_holds_both() -> None:
    class Product(nn.Module):
        def forward(self, one: Tensor, other: Tensor) -> Tensor:
            return one @ other

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.product, self.softmax = Product(), nn.Softmax(-1)

        def forward(self, x: Tensor) -> Tensor:
            q = x.unflatten(-1, (H, D)).transpose(1, 2)
            return self.product(self.softmax(self.product(q, q.mT)), q)

    assert watched(nn.Sequential(Attention()), torch.randn(B, T, E)).modules == ("0",)


@pytest.mark.parametrize("flash", [False, True])
def test_x_transformers(flash: bool) -> None:
    library = pytest.importorskip("x_transformers")
    layers = library.Decoder(dim=E, depth=1, heads=H, attn_dim_head=D, attn_flash=flash)
    model = library.TransformerWrapper(num_tokens=S, max_seq_len=T, attn_layers=layers)
    ids = torch.randint(S, (B, T))
    seen = watched(model, ids)
    (name,) = seen.modules
    assert "attend" in name
    if not flash:
        _, kept = model(ids, return_intermediates=True)
        p = kept.attn_intermediates[0].post_softmax_attn.double()
        wanted = torch.special.entr(p).sum(-1)
        torch.testing.assert_close(seen[name]["entropy"].double(), wanted, atol=1e-5, rtol=1e-5)
        assert seen[name]["lse"].shape == (B, H, T)


# ── gradients, samples ──────────────────────────────────────────────────────────────────────────

ROADS: dict[str, Callable[..., Tensor]] = {
    "sdpa": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    "by hand": annotated,
}


@pytest.mark.parametrize("road", ROADS)
def test_what_is_seen_can_stand_in_a_loss(road: str) -> None:
    model, x = Attends(ROADS[road]).double(), torch.randn(B, T, E).double()
    asked = (hw.LSE(), hw.Entropy(), hw.Mass(hw.Previous()), hw.Distance())
    with hw.watch(model, *asked, gradients=True) as seen:
        model(x)
    loss = sum(seen[""][name].sin().sum() for s in asked for name in s.names)
    assert isinstance(loss, Tensor)
    got = torch.autograd.grad(
        loss, list(model.q.parameters()) + list(model.kv.parameters()), allow_unused=True
    )
    model(x)
    full = truth(*model.split, mask=hw.Causal())
    wanted_loss = sum(v.sin().sum() for s in asked for v in s.define(full).values())
    assert isinstance(wanted_loss, Tensor)
    wanted = torch.autograd.grad(
        wanted_loss, list(model.q.parameters()) + list(model.kv.parameters()), allow_unused=True
    )
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other)
    with hw.watch(model, hw.Entropy()) as seen:
        model(x)
    assert not seen[""]["entropy"].requires_grad


@pytest.mark.parametrize("road", ROADS)
def test_a_few_queries(road: str) -> None:
    model, x = Attends(ROADS[road]), torch.randn(B, T, E)
    every = watched(model, x)
    with hw.watch(model, *STATISTICS[:5], queries=[1, 5]) as seen:
        model(x)
    torch.testing.assert_close(seen[""]["lse"], every[""]["lse"][:, :, [1, 5]])
    torch.testing.assert_close(seen[""]["entropy"], every[""]["entropy"][:, :, [1, 5]])
    with hw.watch(model, *STATISTICS[:5], queries=3, running=True) as seen:
        model(x)
        model(x)
    row, whole = seen.table()[0], every.table()[0]
    assert row["calls"] == 2
    for name in ("first", "previous"):  # masses of so few are those of all queries
        assert row[name] == pytest.approx(whole[name], abs=1e-5)
    with hw.watch(model, hw.Distance(spread=True), queries=3, running=True) as seen:
        model(x)
        model(x)
    assert seen.table()[0]["distance_spread_se"] > 0


@pytest.mark.parametrize("attend", [strict, strict_by_hand])
def test_transforms_are_refused_by_name_whatever_the_mask(attend: Callable[..., Tensor]) -> None:
    model = Attends(attend)
    with hw.watch(model, hw.LSE()), pytest.raises(ValueError, match="inside a transform of torch"):
        torch.func.jacrev(model)(torch.randn(B, T, E))


# ── flex_attention and varlen_attn, each in a process of its own ────────────────────────────────


def run(code: str) -> None:
    done = fresh.run(code)
    assert done.returncode == 0, done.stderr[-3000:]


FLEX = """
import warnings; warnings.simplefilter("ignore")
import torch, headwise as hw
from torch import nn
from torch.nn.attention.flex_attention import flex_attention, create_block_mask
from headwise.core.reference import attention
from headwise.capture.ablate import ablate
from headwise.capture.catch import catch

code, masks = flex_attention.__code__, create_block_mask.__code__
compiled_masks = torch.compile(create_block_mask, backend="eager")
blocks = create_block_mask(lambda b, h, i, j: i >= j, None, None, 16, 16, device="cpu")
table = torch.randn(4, 32)

def biased(score, b, h, i, j):
    return score + table[h, i - j + 16]

def capped(score, b, h, i, j):
    return 2.0 * torch.tanh(score / 2.0)

class Flex(nn.Module):
    def __init__(self, function, score_mod, block_mask):
        super().__init__()
        self.options = dict(score_mod=score_mod, block_mask=block_mask, enable_gqa=True)
        self.function, self.qkv = function, nn.Linear(64, 128)

    def forward(self, x):
        parts = self.qkv(x).split([64, 32, 32], -1)
        self.split = [y.unflatten(-1, (-1, 16)).transpose(1, 2) for y in parts]
        if self.options["block_mask"] == "compiled":
            rows = lambda b, h, i, j: i >= j
            self.options["block_mask"] = compiled_masks(rows, None, None, 16, 16, device="cpu")
        return self.function(*self.split, **self.options)

x, i = torch.randn(2, 16, 64), torch.arange(16)
bias = hw.Bias(table[torch.arange(4)[:, None, None], (i[:, None] - i)[None] + 16])
cases = [(None, blocks, {"mask": hw.Causal()}), (biased, None, {"mask": bias}),
         (capped, blocks, {"mask": hw.Causal(), "softcap": 2.0})]
asked = (hw.LSE(), hw.Entropy(), hw.Mass(hw.Self()), hw.Received())
compiled = torch.compile(flex_attention, backend="eager")
made = (None, "compiled", {"mask": hw.Causal()})
for n, (score_mod, block_mask, keywords) in enumerate([*cases, cases[0], made]):
    model = Flex(compiled if n == len(cases) else flex_attention, score_mod, block_mask)
    with torch.no_grad():
        plain = model(x)
        model.options["block_mask"] = block_mask
        with hw.watch(model, *asked) as seen:
            assert torch.equal(model(x), plain)
        full = attention(*(y.double() for y in model.split), **keywords)
        for statistic in asked:
            for name, wanted in statistic.define(full).items():
                torch.testing.assert_close(seen[""][name].double(), wanted, atol=1e-5, rtol=1e-5)
        with ablate(model, {"": [1]}):
            without = model(x)
    assert torch.equal(without, plain.index_fill(1, torch.tensor([1]), 0.0))
    assert flex_attention.__code__ is code
    assert create_block_mask.__code__ is masks
"""


def test_flex_attention_as_it_is_and_compiled() -> None:
    run(FLEX)


VARLEN = """
import torch, headwise as hw
from torch import nn
from torch.nn.attention.varlen import varlen_attn
from headwise.core.reference import attention
from headwise.capture.ablate import ablate

def band(queries, keys, left, right):
    i, j = torch.arange(queries)[:, None] + keys - queries, torch.arange(keys)
    return (j >= i - (left if left >= 0 else 99)) & (j <= i + (right if right >= 0 else 99))

def parts(of_q, of_k, used):
    for n, (a, b) in enumerate(zip(of_q[:-1].tolist(), of_q[1:].tolist())):
        start = int(of_k[n])
        yield slice(a, b), slice(start, int(of_k[n + 1]) if used is None else start + int(used[n]))

def full(q, k, v, rows, keys, window, scale):
    q, k, v = (x.transpose(0, 1)[None] for x in (q[rows], k[keys], v[keys]))
    mask = hw.Dense(band(q.shape[2], k.shape[2], *window))
    return attention(q.double(), k.double(), v.double(), mask=mask, scale=scale)

# PyTorch has the kernel for CUDA alone: here is one for the CPU.
@torch.library.register_kernel("torch_attn::_varlen_attn", "cpu")
def kernel(q, k, v, of_q, of_k, max_q, max_k, is_causal=False, scale=None, window_size=None,
           enable_gqa=False, seqused_k=None, block_table=None, num_splits=None):
    out = torch.zeros_like(q)
    for rows, keys in parts(of_q, of_k, seqused_k):
        found = full(q, k, v, rows, keys, window_size, scale).out[0].transpose(0, 1)
        out[rows] = found.to(q.dtype)
    return out, torch.zeros(q.shape[1], len(q)), torch.zeros(2, dtype=torch.uint64)

class Varlen(nn.Module):
    def forward(self, q, k, v, of_q, of_k, **options):
        return varlen_attn(q, k, v, of_q, of_k, 9, 9, enable_gqa=True, **options)

model = Varlen()
of_q, of_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 3, 8, 9], [0, 5, 10, 13]))
q = torch.randn(9, 4, 8)
asked = (hw.LSE(), hw.Entropy(), hw.Mass(hw.Self()), hw.Distance())
for window in (-1, -1), (-1, 0), (2, 0), (1, 1):
    for same in True, False:
        k, v = torch.randn(2, 9 if same else 13, 2, 8)
        ends = of_q if same else of_k
        for used in (None,) if same else (None, torch.tensor([4, 5, 2], dtype=torch.int32)):
            given, options = (q, k, v, of_q, ends), {"window_size": window, "seqused_k": used}
            plain = model(*given, **options)
            with hw.watch(model, *asked) as seen:
                assert torch.equal(model(*given, **options), plain)
            for n, (rows, keys) in enumerate(parts(of_q, ends, used)):
                call = seen[""].calls[0 if same else n]
                for statistic in asked:
                    wanted = statistic.define(full(q, k, v, rows, keys, window, None))
                    for name, value in wanted.items():
                        got = call[name].values
                        got = got[:, :, rows] if same else got
                        torch.testing.assert_close(got.double(), value, atol=1e-5, rtol=1e-5)
            with ablate(model, {"": [1]}):
                without = model(*given, **options)
            assert torch.equal(without, plain.index_fill(1, torch.tensor([1]), 0.0))
"""


def test_varlen_attention() -> None:
    run(VARLEN)

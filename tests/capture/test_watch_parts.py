"""`watch()` where heads, batch rows and blocks can be mistaken, and where a call is only a part."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise as hw
from headwise.capture.ablate import ablate
from headwise.capture.catch import catch
from headwise.capture.importance import ablation_scan, importance
from headwise.capture.reference import ablation_reference
from support import truth

B, T, H, D = 2, 12, 3, 4
BLOCK = 4
N = T // BLOCK
ASKED = (hw.Entropy(), hw.LSE(), hw.Mass(hw.Previous()), hw.Received(), hw.Distance())

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Attends(nn.Module):
    """Projections around `attend(q, k, v)` on `[B, T, H, D]`, which gives the same."""

    def __init__(self, attend: Attend, heads: int = H, says: bool = True, joins: bool = True):
        super().__init__()
        self.attend, self.joins = attend, joins
        self.heads_ = heads
        if says:
            self.num_heads = heads
        self.qkv, self.out = nn.Linear(heads * D, 3 * heads * D), nn.Linear(heads * D, heads * D)
        self.split: tuple[Tensor, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        self.split = q, k, v = self.qkv(x).unflatten(-1, (3, self.heads_, D)).unbind(-3)
        y = self.attend(q, k, v).flatten(2)
        return self.out(y) if self.joins else y


def seen_of(model: nn.Module, x: Tensor) -> hw.capture.Watched:
    """What is seen of a model, whose output stays as it is."""
    plain = model(x)
    with hw.watch(model, *ASKED) as seen:
        assert torch.equal(model(x), plain)
    return seen


def heads(x: Tensor) -> Tensor:
    """`[B, T, H, D]` as `[B, H, T, D]`."""
    return x.transpose(1, 2)


def assert_seen_rightly(
    model: Attends, seen: hw.capture.Watched, mask: hw.Mask | None = None
) -> None:
    """Entropies and the like are those of the whole matrix, over all calls of the module."""
    full = truth(*map(heads, model.split), mask=mask, scale=1.0)
    calls = seen[""].calls
    for statistic in (hw.Entropy(), hw.LSE(), hw.Mass(hw.Previous()), hw.Distance()):
        for name, wanted in statistic.define(full).items():
            got = torch.cat([call[name].values for call in calls], 2).double()
            torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5, msg=name)
    row = seen.table()[0]
    assert row["queries"] == row["of_queries"] == full.lse[:, 0].numel()


def assert_left_out(seen: hw.capture.Watched, *words: str) -> None:
    """The module is not in the table, and the reason is given."""
    assert seen.modules == ()
    assert "" in seen.left_out
    for word in words:
        assert word in seen.left_out[""], seen.left_out
    with pytest.raises(ValueError, match="no attention was seen: the model: "):
        seen.table()


def left_out_or_right(model: Attends, seen: hw.capture.Watched) -> None:
    if seen.modules:
        assert_seen_rightly(model, seen)
    else:
        assert seen.left_out


# ── blocks ──────────────────────────────────────────────────────────────────────────────────────


def hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1) @ v


def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, scale=1.0)


def blocks_as_axis(attend: Attend, order: str) -> Attend:
    """Each block of the sequence attends to itself; blocks are an axis of the scores."""

    def local(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.unflatten(1, (-1, BLOCK)) for x in (q, k, v))  # b n w h d
        axes = {"bhn": (0, 3, 1, 2, 4), "bnh": (0, 1, 3, 2, 4), "hbn": (3, 0, 1, 2, 4)}[order]
        back = [axes.index(axis) for axis in range(5)]
        return attend(*(x.permute(axes) for x in (q, k, v))).permute(back).flatten(1, 2)

    return local


def blocks_as_rows(attend: Attend) -> Attend:
    def local(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (heads(x.unflatten(1, (-1, BLOCK)).flatten(0, 1)) for x in (q, k, v))
        return heads(attend(q, k, v)).unflatten(0, (-1, T // BLOCK)).flatten(1, 2)

    return local


def blocks_after_rows_and_heads(attend: Attend) -> Attend:
    def local(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (heads(x).flatten(0, 1).unflatten(1, (-1, BLOCK)) for x in (q, k, v))
        return attend(q, k, v).flatten(1, 2).unflatten(0, (-1, q.shape[0] // B)).transpose(1, 2)

    return local


BLOCKS = [
    *(lambda attend, order=order: blocks_as_axis(attend, order) for order in ("bhn", "bnh", "hbn")),
    blocks_as_rows,
    blocks_after_rows_and_heads,
]


@pytest.mark.parametrize("attend", [hand, fused])
@pytest.mark.parametrize("local", BLOCKS)
@pytest.mark.parametrize("number", [1, N, H + 1])
@pytest.mark.parametrize("says", [True, False])
@pytest.mark.parametrize("joins", [True, False])
def test_blocks_are_no_heads_and_no_rows(
    attend: Attend, local: Callable[[Attend], Attend], number: int, says: bool, joins: bool
) -> None:
    torch.manual_seed(0)
    model = Attends(local(attend), number, says, joins)
    assert_left_out(seen_of(model, torch.randn(B, T, number * D)))


@pytest.mark.parametrize("local", BLOCKS)
def test_as_many_texts_as_a_block_has_queries(local: Callable[[Attend], Attend]) -> None:
    """Where `[4, 16]` positions could be four queries of sixteen texts."""
    torch.manual_seed(0)
    for width in (H, BLOCK):
        model = Attends(local(hand), width)
        x = torch.randn(BLOCK, T, width * D)
        if local is not blocks_after_rows_and_heads:
            assert_left_out(seen_of(model, x))


@pytest.mark.parametrize("overlap", ["keys", "padding"])
def test_blocks_that_see_their_neighbours(overlap: str) -> None:
    def local(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        length = q.shape[1]
        q, k, v = (F.pad(x, (0, 0, 0, 0, 0, -length % BLOCK)) for x in (q, k, v))
        q, k, v = (x.unflatten(1, (-1, BLOCK)) for x in (q, k, v))
        k, v = (torch.cat([x.roll(1, 1), x, x.roll(-1, 1)], 2) for x in (k, v))
        p = torch.einsum("bnqhd,bnkhd->bnhqk", q, k).softmax(-1)
        return torch.einsum("bnhqk,bnkhd->bnqhd", p, v).flatten(1, 2)[:, :length]

    model = Attends(local)
    length = T if overlap == "keys" else T - 1
    assert_left_out(seen_of(model, torch.randn(B, length, H * D)), "blocks")


# ── groups, and where heads stand ───────────────────────────────────────────────────────────────

G, REP = 2, 3


def groups_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    p = (heads(q).unflatten(1, (G, REP)) @ heads(k)[:, ::REP, None].mT).softmax(-1)
    return heads((p @ heads(v)[:, ::REP, None]).flatten(1, 2))


def groups_last(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Scores `[B, rep, G, T, S]`, as others write grouped queries."""
    q = q.unflatten(2, (G, REP)).permute(0, 3, 2, 1, 4)
    p = (q @ heads(k)[:, None, ::REP].mT).softmax(-1)
    return (p @ heads(v)[:, None, ::REP]).permute(0, 3, 2, 1, 4).flatten(2, 3)


def groups_last_and_spelled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q = q.unflatten(2, (G, REP)).permute(0, 3, 2, 1, 4)
    p = torch.einsum("brgid,bgjd->brgij", q, heads(k)[:, ::REP]).softmax(-1)
    out = torch.einsum("brgij,bgjd->brgid", p, heads(v)[:, ::REP])
    return out.permute(0, 3, 2, 1, 4).flatten(2, 3)


@pytest.mark.parametrize("attend", [groups_first, groups_last, groups_last_and_spelled])
@pytest.mark.parametrize("says", [True, False])
def test_heads_of_groups(attend: Attend, says: bool) -> None:
    torch.manual_seed(0)
    model, x = Attends(attend, G * REP, says), torch.randn(B, T, G * REP * D)
    seen = seen_of(model, x)
    q, k, v = model.split
    model.split = q, *(y[:, :, ::REP].repeat_interleave(REP, 2) for y in (k, v))
    assert_seen_rightly(model, seen)
    with ablate(model, {"": [4]}):
        without = model(x)
    y = attend(*model.split).index_fill(2, torch.tensor([4]), 0.0)
    assert torch.equal(without, model.out(y.flatten(2)))


def heads_first(contiguous: bool, flat: bool) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.permute(2, 0, 1, 3) for x in (q, k, v))
        if contiguous:
            q, k, v = (x.contiguous() for x in (q, k, v))
        if flat:
            shape = q.shape[:2]
            q, k, v = (x.flatten(0, 1) for x in (q, k, v))
            return (
                torch.bmm(torch.bmm(q, k.mT).softmax(-1), v).unflatten(0, shape).permute(1, 2, 0, 3)
            )
        return hand(q, k, v).permute(1, 2, 0, 3)

    return attend


@pytest.mark.parametrize("says", [True, False])
@pytest.mark.parametrize("batch", [B, H, H + 2])
@pytest.mark.parametrize(("contiguous", "flat"), [(False, False), (True, False), (True, True)])
def test_heads_before_the_batch(says: bool, batch: int, contiguous: bool, flat: bool) -> None:
    torch.manual_seed(0)
    model = Attends(heads_first(contiguous, flat), says=says)
    seen = seen_of(model, torch.randn(batch, T, H * D))
    if not contiguous or (batch != H and not flat and says):
        assert_seen_rightly(model, seen)
    else:
        left_out_or_right(model, seen)


@pytest.mark.parametrize("says", [True, False])
@pytest.mark.parametrize("attend", [hand, fused])
def test_as_many_heads_as_texts_stand_where_they_mostly_do(attend: Attend, says: bool) -> None:
    torch.manual_seed(0)
    model = Attends(lambda q, k, v: heads(attend(*map(heads, (q, k, v)))), says=says)
    for batch in (H, B):
        assert_seen_rightly(model, seen_of(model, torch.randn(batch, T, H * D)))


@pytest.mark.parametrize("says", [True, False])
def test_one_axis_of_rows_and_heads(says: bool) -> None:
    """As many as the projections say, where the module says nothing."""
    torch.manual_seed(0)

    def flat(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (heads(x).flatten(0, 1) for x in (q, k, v))
        return heads(torch.bmm(torch.bmm(q, k.mT).softmax(-1), v).unflatten(0, (-1, H)))

    model = Attends(flat, says=says)
    for batch in (1, B, H):
        assert_seen_rightly(model, seen_of(model, torch.randn(batch, T, H * D)))


def test_one_axis_of_which_nothing_tells_the_heads_is_left_out() -> None:
    class Bare(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            q = heads(x.unflatten(-1, (H, D))).flatten(0, 1)
            return heads(hand(q, q, q).unflatten(0, (-1, H))).flatten(2)

    assert_left_out(seen_of(Bare(), torch.randn(B, T, H * D)), "an unknown number of heads")


def test_a_loop_over_heads_is_one_head_with_many_calls() -> None:
    def loop(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.stack([hand(q[:, :, h], k[:, :, h], v[:, :, h]) for h in range(H)], 2)

    torch.manual_seed(0)
    for batch in (B, H):  # as many texts as heads are no heads
        model = Attends(loop)
        seen = seen_of(model, torch.randn(batch, T, H * D))
        assert [row["calls"] for row in seen.table()] == [H]
        full = truth(*map(heads, model.split), scale=1.0)
        for h, call in enumerate(seen[""].calls):
            got = call["entropy"].values[:, 0].double()
            wanted = hw.Entropy().define(full)["entropy"][:, h]
            torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


# ── chunks of queries, shares of keys ───────────────────────────────────────────────────────────


def by_chunks(attend: str, causal: bool, cut: bool = False) -> Attend:
    """Some queries at a time; with `cut`, only the keys that they may see are multiplied."""

    def chunked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (heads(x) for x in (q, k, v))
        parts = []
        for start in range(0, T, BLOCK):
            stop = start + BLOCK if cut else T
            here, k_, v_ = q[:, :, start : start + BLOCK], k[:, :, :stop], v[:, :, :stop]
            allowed = torch.arange(stop) <= torch.arange(start, start + BLOCK)[:, None]
            allowed = allowed if causal else torch.ones_like(allowed)
            if attend == "fused":
                y = F.scaled_dot_product_attention(here, k_, v_, allowed, scale=1.0)
            else:
                y = (here @ k_.mT).masked_fill(~allowed, -torch.inf).softmax(-1) @ v_
            parts.append(y)
        return heads(torch.cat(parts, 2))

    return chunked


@pytest.mark.parametrize("attend", ["hand", "fused"])
@pytest.mark.parametrize("joins", [True, False])
def test_chunks_of_queries_stand_where_their_mask_says(attend: str, joins: bool) -> None:
    torch.manual_seed(0)
    for cut in (False, True):
        model = Attends(by_chunks(attend, causal=True, cut=cut), joins=joins)
        seen = seen_of(model, torch.randn(B, T, H * D))
        assert_seen_rightly(model, seen, hw.Causal())
        assert [row["calls"] for row in seen.table()] == [N] * H
    model = Attends(by_chunks(attend, causal=False), joins=joins)
    assert_left_out(seen_of(model, torch.randn(B, T, H * D)), "whose positions are unknown")


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("spelled", [True, False])
def test_shares_of_the_keys_are_not_told(weighted: bool, spelled: bool) -> None:
    """A softmax that is made chunk by chunk of the keys, and put together afterwards."""

    def shares(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (heads(x) for x in (q, k, v))
        made, sums = [], []
        for k_, v_ in zip(k.split(BLOCK, 2), v.split(BLOCK, 2), strict=True):
            scores = q @ k_.mT
            p = scores.softmax(-1)
            made.append(torch.einsum("bhij,bhjd->bhid", p, v_) if spelled else p @ v_)
            sums.append(scores.logsumexp(-1, keepdim=True))
        weights = torch.stack(sums).softmax(0) if weighted else torch.ones(N, 1, 1, 1, 1) / N
        return heads((weights * torch.stack(made)).sum(0))

    torch.manual_seed(0)
    assert_left_out(seen_of(Attends(shares), torch.randn(B, T, H * D)), "some of the keys")


def test_a_softmax_that_runs_along_the_keys_is_not_told() -> None:
    def online(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (heads(x) for x in (q, k, v))
        top = torch.full((*q.shape[:3], 1), -torch.inf)
        total, out = torch.zeros_like(top), torch.zeros_like(q)
        for k_, v_ in zip(k.split(BLOCK, 2), v.split(BLOCK, 2), strict=True):
            scores = q @ k_.mT
            new = torch.maximum(top, scores.amax(-1, keepdim=True))
            p, old = (scores - new).exp(), (top - new).exp()
            total, out = total * old + p.sum(-1, keepdim=True), out * old + p @ v_
            top = new
        return heads(out / total)

    assert seen_of(Attends(online), torch.randn(B, T, H * D)).modules == ()


def test_another_softmax_of_the_same_queries_is_missed() -> None:
    """Half of what the heads put out is attention in a band, which nobody can follow."""

    def both(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        band = torch.einsum("bihd,bjhd->bihj", q, k)[..., :5].softmax(-1)
        near = sum(band[..., j, None] * v.roll(j, 1) for j in range(5))
        return heads(hand(*map(heads, (q, k, v)))) + near

    model = Attends(both, joins=False)
    assert_left_out(seen_of(model, torch.randn(B, T, H * D)), "1 more softmax of its queries")


def with_global_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A band for most queries, as products of slices; all keys for the first."""
    band = torch.einsum("bihd,bjhd->bihj", q, k)[..., :5].softmax(-1)
    near = torch.stack([band[..., j, None] * v.roll(j, 1) for j in range(5)]).sum(0)
    first = heads(hand(*(heads(x) for x in (q[:, :1], k, v))))
    return torch.cat([first, near[:, 1:]], 1)


def test_what_is_seen_in_part_is_neither_told_nor_ablated_nor_important() -> None:
    torch.manual_seed(0)
    model, x = (
        nn.ModuleList([Attends(with_global_queries), Attends(whole)]),
        torch.randn(2, T, H * D),
    )
    model.forward = lambda x: model[1](model[0](x))  # type: ignore[method-assign]
    model.eval()

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).square().mean((1, 2))

    with hw.watch(model, hw.Entropy()) as seen:
        model(x)
    assert seen.modules == ("1",)
    assert "sees 2 of 24 queries" in seen.left_out["0"]
    assert "1 left out" in repr(seen)
    with pytest.raises(KeyError, match=r"'0' was not seen, for the softmax of .* there are: 1"):
        seen["0"]
    refused = pytest.raises(ValueError, match="'0' was not ablated as a whole: the softmax of")
    with refused, ablate(model, {"0": [1]}):
        model(x)
    with ablate(model, {"1": [1]}):
        model(x)
    for effects in (importance(model, loss, [x]), ablation_scan(model, loss, [x])):
        assert {row["module"] for row in effects.table()} == {"1"}
    assert ablation_reference(model, loss, [x]).modules == ("1",)
    alone = Attends(with_global_queries)
    for fails in (importance, ablation_scan, ablation_reference):
        with pytest.raises(ValueError, match="no attention was seen, for the model: the softmax"):
            fails(alone.eval(), loss, [x])


def whole(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return heads(hand(*map(heads, (q, k, v))))


# ── how many queries of how many ────────────────────────────────────────────────────────────────


def counts(seen: hw.capture.Watched) -> set[tuple[int, int]]:
    return {(row["queries"], row["of_queries"]) for row in seen.table()}


@pytest.mark.parametrize("running", [False, True])
def test_queries_seen_of_those_there_are(running: bool, tmp_path: Any) -> None:
    models = [Attends(whole), nn.MultiheadAttention(H * D, H), hw.MultiHeadAttention(H * D, H)]
    models += [Attends(lambda q, k, v: heads(fused(*map(heads, (q, k, v)))))]
    x = torch.randn(B, T, H * D)
    for model in models:
        given = (x.transpose(0, 1),) * 3 if isinstance(model, nn.MultiheadAttention) else (x,)
        for queries, looked_at in ((None, T), (5, 5), ([1, 3], 2), (99, T)):
            with hw.watch(model, hw.Entropy(), queries=queries, running=running) as seen:
                model(*given)
                model(*given)
            assert counts(seen) == {(2 * B * looked_at, 2 * B * T)}
        assert counts(seen + seen) == {(4 * B * T, 4 * B * T)}
        seen.left_out["other"] = "a reason"
        seen.save(tmp_path / "seen")
        again = hw.capture.Watched.load(tmp_path / "seen")
        assert again.table() == seen.table()
        assert again.left_out == (seen + seen).left_out == {"other": "a reason"}


def test_a_class_token_is_one_query_of_many() -> None:
    class ClassAttention(Attends):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).unflatten(-1, (3, H, D)).unbind(-3)
            first = heads(hand(*map(heads, (q[:, :1], k, v)))).flatten(2)
            return torch.cat([first, x[:, 1:]], 1)

    seen = seen_of(ClassAttention(whole), torch.randn(B, T, H * D))
    assert counts(seen) == {(B, B * T)}


@pytest.mark.parametrize("pooled", [lambda y: y.mean(1), lambda y: y.mean(), lambda y: {"y": y}])
def test_a_module_that_gives_something_else_is_seen(pooled: Callable[[Tensor], Any]) -> None:
    class Pools(Attends):
        def forward(self, x: Tensor) -> Any:
            return pooled(super().forward(x))

    torch.manual_seed(0)
    model = Pools(whole, joins=False)
    with hw.watch(model, *ASKED) as seen:
        model(torch.randn(B, T, H * D))
    assert_seen_rightly(model, seen)


def test_images_have_positions_along_two_axes() -> None:
    class Image(nn.Module):
        """Attention among the pixels of a feature map, with convolutions."""

        num_heads = H

        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Conv2d(H * D, 3 * H * D, 1), nn.Conv2d(H * D, H * D, 1)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).flatten(2).unflatten(1, (3, H, D)).unbind(1)
            y = hand(*(z.mT for z in (q, k, v)))
            return self.out(y.mT.reshape(x.shape))

    seen = seen_of(Image(), torch.randn(B, H * D, 3, 5))
    assert counts(seen) == {(B * 15, B * 15)}


def test_windows_that_are_cut_outside_are_texts_by_themselves() -> None:
    class Windows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = Attends(whole)

        def forward(self, x: Tensor) -> Tensor:
            y = self.attention(x.unflatten(1, (-1, BLOCK)).flatten(0, 1))
            return y.unflatten(0, (-1, N)).flatten(1, 2)

    torch.manual_seed(0)
    model = Windows()
    seen = seen_of(model, torch.randn(B, T, H * D))
    assert seen["attention"]["entropy"].shape == (B * N, H, BLOCK)
    assert counts(seen) == {(B * T, B * T)}
    assert math.isclose(
        seen.table()[0]["entropy"], float(seen["attention"]["entropy"][:, 0].mean()), rel_tol=1e-6
    )


def test_what_is_told_at_once_needs_no_end() -> None:
    """A listener hears of whole calls before the module ends, of others when it does."""
    order: list[str] = []
    for model in (Attends(whole, joins=False), nn.MultiheadAttention(H * D, H)):
        hook = model.register_forward_hook(lambda *_: order.append("end"))
        x = torch.randn(T, B, H * D)

        def listen(call: Any) -> None:
            call.on_complete(lambda queries: order.append(f"{queries} queries"))

        with catch(model, listen):
            model(x) if isinstance(model, Attends) else model(x, x, x)
        hook.remove()
    assert sorted(order[:2]) == ["24 queries", "end"]
    assert order[2:] == ["24 queries", "end"]


# ── what is not followed ────────────────────────────────────────────────────────────────────────


class Pixels(nn.Module):
    """Attention of one head with the values first, as in SHSA, in a class of another name."""

    def __init__(self, rebound: bool = False) -> None:
        super().__init__()
        self.qkv, self.out = nn.Conv2d(D, 3 * D, 1), nn.Conv2d(D, D, 1)
        self.rebound = rebound
        self.weights = torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).flatten(2).chunk(3, 1)
        p = (q.mT @ k).softmax(-1)
        if self.rebound:
            p = p.transpose(-2, -1) * 1.0
            return self.out((v @ p).reshape(x.shape))
        self.weights = p
        return self.out((v @ p.transpose(-2, -1)).reshape(x.shape))


def test_values_may_come_first_in_the_product() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Pixels())
    seen = seen_of(model, torch.randn(B, D, 3, 5))
    wanted = torch.special.entr(model[0].weights).sum(-1)[:, None]
    torch.testing.assert_close(seen["0"]["entropy"], wanted, atol=1e-6, rtol=1e-5)
    x = torch.randn(B, D, 3, 5)
    with ablate(model, {"0": [0]}):
        without = model(x)
    assert torch.equal(without, model[0].out(torch.zeros_like(x)))


def test_a_square_softmax_that_is_not_followed_is_named_whatever_its_class() -> None:
    seen = seen_of(nn.Sequential(Pixels(rebound=True)), torch.randn(B, D, 3, 5))
    assert seen.modules == ()
    assert seen.left_out == {
        "0": f"no product with values was seen of the softmax of [{B}, 15, 15]"
    }


def over_another_axis(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    p = torch.einsum("bihd,bjhd->bijh", q, k).softmax(2)
    return torch.einsum("bijh,bjhd->bihd", p, v)


def by_exp(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = torch.einsum("bihd,bjhd->bhij", q, k).exp()
    return torch.einsum("bhij,bjhd->bihd", e / e.sum(-1, keepdim=True), v)


def by_exp_and_divided_last(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = torch.einsum("bihd,bjhd->bhij", q, k).exp_()
    return torch.einsum("bhij,bjhd->bihd", e, v) / e.sum(-1).mT[..., None]


def averaged_over_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    p = torch.einsum("bihd,bjhd->bhij", q, k).softmax(-1).mean(1)
    return torch.einsum("bij,bjhd->bihd", p, v)


def tied_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    p = torch.einsum("rihd,rjhd->hij", q, k).softmax(-1)
    return torch.einsum("hij,rjhd->rihd", p, v)


def along_edges(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    source, target = torch.ones(T, T).tril().nonzero().T
    out = []
    for q_, k_, v_ in zip(q, k, v, strict=True):
        e = (q_[source] * k_[target]).sum(-1).exp()  # [edges, H]
        total = torch.zeros(T, H).scatter_add_(0, source[:, None].expand(-1, H), e)
        p = e / total[source]
        out.append(torch.zeros(T, H, D).index_add(0, source, p[..., None] * v_[target]))
    return torch.stack(out)


def one_by_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    texts = zip(q.unbind(), k.unbind(), v.unbind(), strict=True)
    return torch.stack(
        [
            torch.stack([hand(*one) for one in zip(*(x.unbind(1) for x in text), strict=True)], 1)
            for text in texts
        ]
    )


UNFOLLOWED = {
    one_by_one: f"the softmax of [{T}, {T}] has no axes of batch rows and heads",
    over_another_axis: f"the softmax of [{B}, {T}, {T}, {H}] is over axis 2, not the last",
    by_exp: f"a softmax of [{B}, {H}, {T}, {T}] is written out with exp()",
    by_exp_and_divided_last: f"a softmax of [{B}, {H}, {T}, {T}] is written out with exp()",
    averaged_over_heads: "no product with values was seen of the softmax of [2, 3, 12, 12]",
    tied_rows: "the softmax of [3, 12, 12] weighs several vectors of each key at once",
    along_edges: "is summed by scatter_add_(), as in a softmax over the edges of a graph",
}


@pytest.mark.parametrize("attend", UNFOLLOWED, ids=lambda attend: attend.__name__)
def test_attention_that_cannot_be_followed_is_left_out_with_a_reason(attend: Attend) -> None:
    torch.manual_seed(0)
    assert_left_out(seen_of(Attends(attend), torch.randn(B, T, H * D)), UNFOLLOWED[attend])


def test_a_product_in_a_module_further_out_is_followed() -> None:
    class Weights(nn.Module):
        """Gives probabilities, which nothing in it is multiplied with."""

        def __init__(self) -> None:
            super().__init__()
            self.qk = nn.Linear(H * D, 2 * H * D)

        def forward(self, x: Tensor) -> Tensor:
            q, k = self.qk(x).unflatten(-1, (2, H, D)).unbind(-3)
            return (heads(q) @ heads(k).mT).softmax(-1)

    class Around(nn.Module):
        num_heads = H

        def __init__(self) -> None:
            super().__init__()
            self.weights, self.v, self.out = Weights(), nn.Linear(H * D, H * D), nn.Linear(H * D, 5)

        def forward(self, x: Tensor) -> Tensor:
            v = heads(self.v(x).unflatten(-1, (H, D)))
            return self.out(heads(self.weights(x) @ v).flatten(2))

    seen = seen_of(Around(), torch.randn(B, T, H * D))
    assert (seen.modules, seen.left_out) == (("",), {})


def test_gates_and_temperatures_are_not_taken_for_attention() -> None:
    class Gates(nn.Module):
        """Softmaxes over classes and experts, exponentials that scale."""

        def __init__(self) -> None:
            super().__init__()
            self.gate, self.scale = nn.Linear(H * D, 5), nn.Parameter(torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            gate = self.gate(x).softmax(-1)
            mixed = torch.einsum("btk,btd->btkd", gate, x).sum(2) * self.scale.exp()
            mixed = mixed + torch.einsum("btk,ked->bted", gate, x.new_ones(5, 2, H * D)).sum(2)
            return mixed / (1 + (-x).exp()) + x.softmax(1)

    model = Gates()
    with hw.watch(model, hw.Entropy()) as seen:
        model(torch.randn(B, T + 1, H * D))
    assert (len(seen), seen.left_out) == (0, {})


# ── what somebody tells of the heads ────────────────────────────────────────────────────────────


def folded(attend: Attend) -> Attend:
    """Batch rows and heads in one axis."""

    def local(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = attend(*(heads(x).flatten(0, 1) for x in (q, k, v)))
        return heads(out.unflatten(0, (-1, q.shape[2])))

    return local


def rows_second(attend: Attend) -> Attend:
    def local(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(*(x.permute(2, 0, 1, 3) for x in (q, k, v))).permute(1, 2, 0, 3)

    return local


@pytest.mark.parametrize("attend", [hand, fused])
@pytest.mark.parametrize(
    ("local", "told"),
    [(folded, H), (folded, {"": H}), (rows_second, H), (rows_second, -4), (rows_second, {"*": -4})],
)
@pytest.mark.parametrize("number", [H, B])
def test_the_number_of_heads_or_their_axis_can_be_told(
    attend: Attend, local: Callable[[Attend], Attend], told: Any, number: int
) -> None:
    torch.manual_seed(0)
    if number == B and told not in (-4, {"*": -4}):
        told = {"": B} if isinstance(told, dict) else B
    model, x = (
        Attends(local(attend), number, says=False, joins=False),
        torch.randn(B, T, number * D),
    )
    plain = model(x)
    with hw.watch(model, *ASKED, heads=told) as seen:
        assert torch.equal(model(x), plain)
    if number == B and local is rows_second and told == B:
        left_out_or_right(model, seen)  # as many batch rows as heads: the axis would tell
    else:
        assert_seen_rightly(model, seen)
    if told == -4:
        with hw.watch(model, *ASKED) as seen:
            model(x)
        left_out_or_right(model, seen)


def test_heads_that_cannot_be_are_refused() -> None:
    model, x = (
        Attends(lambda q, k, v: heads(fused(*map(heads, (q, k, v))))),
        torch.randn(B, T, H * D),
    )
    for told in (0, -1, -2, 2.5, True, "3", {"": 0}, {3: 3}):
        with pytest.raises(ValueError, match=r"heads=.*give a number of heads, such as 12"):
            hw.watch(model, heads=told).__enter__()  # type: ignore[arg-type]
    for told, words in ((7, "no axis of 7 heads"), (-5, "no axis -5 before its last two")):
        with hw.watch(model, heads=told), pytest.raises(ValueError, match=words):
            model(x)

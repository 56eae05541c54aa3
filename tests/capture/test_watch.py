"""`watch()`: what it gives, that it changes nothing, and that it cleans up."""

import asyncio
import contextlib
import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.modules import module as hooks
from torch.utils.checkpoint import checkpoint

import fresh
import headwise as hw
from headwise.capture.ablate import ablate
from headwise.capture.catch import catch
from headwise.capture.mask_import import as_mask, without_padding
from headwise.core.masks import Dense
from headwise.core.observers import observers
from headwise.core.shapes import Extent

E, HEADS, T = 12, 3, 7


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.low = hw.MultiHeadAttention(E, HEADS)
        self.high = hw.MultiHeadAttention(E, HEADS, num_kv_heads=1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.low(x, mask=hw.Causal())
        return x + self.high(x, mask=hw.Causal())


def test_sees_every_head_and_changes_nothing() -> None:
    model, x = Two(), torch.randn(2, T, E)
    plain = model(x)
    with hw.watch(model, hw.Entropy(), hw.Mass(hw.Previous()), hw.Map(4)) as seen:
        watched = model(x)
    assert torch.equal(plain, watched)
    table = seen.table()
    assert [(row["module"], row["head"]) for row in table] == [
        (name, head) for name in ("low", "high") for head in range(HEADS)
    ]
    entropy = seen["low"]["entropy"]
    assert entropy.shape == (2, HEADS, T)
    assert table[0]["entropy"] == pytest.approx(entropy[:, 0].mean().item())
    assert table[0]["previous_coverage"] == pytest.approx((T - 1) / T)
    assert seen["high"]["map"].shape == (2, HEADS, 4, 4)
    assert "map" not in table[0]
    assert not observers
    assert seen.modules == ("low", "high")


def test_what_the_layer_does_is_what_is_seen() -> None:
    layer, x = hw.MultiHeadAttention(E, HEADS), torch.randn(2, T, E)
    with hw.watch(layer, hw.Entropy()) as seen:
        layer(x, mask=hw.Window(3))
    q, k, v = layer.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
    by_hand = hw.observe(q, k, v, hw.Entropy(), mask=hw.Window(3))
    torch.testing.assert_close(seen[""]["entropy"], by_hand["entropy"])


def test_several_calls_add_up() -> None:
    model = Two()
    one, two = torch.randn(2, T, E), torch.randn(1, T + 4, E)
    with hw.watch(model, hw.Entropy(), hw.MaxLogit(), hw.Mass(hw.Previous())) as seen:
        model(one)
        model(two)
    row = seen.table()[0]
    assert row["calls"] == 2
    first, second = (call["entropy"].values[:, 0].flatten() for call in seen["low"].calls)
    assert row["entropy"] == pytest.approx(torch.cat([first, second]).mean().item())
    assert row["max_logit"] == max(
        call["max_logit"].values[:, 0].max().item() for call in seen["low"].calls
    )
    assert row["previous_coverage"] == pytest.approx((2 * (T - 1) + T + 3) / (2 * T + T + 4))
    with pytest.raises(ValueError, match="different lengths"):
        seen["low"]["entropy"]
    with hw.watch(model, hw.Entropy()) as seen:
        model(one)
        model(one)
    assert seen["low"]["entropy"].shape == (4, HEADS, T)


class Fused(nn.Module):
    """A layer that attends through PyTorch's function, with a mask of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(E, 3 * E), nn.Linear(E, E)
        self.mask: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask)
        return self.out(y.transpose(1, 2).flatten(2))


def state() -> tuple[object, ...]:
    """What a watch changes while it lasts, outside the model."""
    return (
        torch.overrides.has_torch_function,
        len(torch.overrides._get_current_function_mode_stack()),
        len(hooks._global_forward_hooks),
        len(hooks._global_forward_pre_hooks),
    )


def own(model: nn.Module) -> list[hw.MultiHeadAttention]:
    return [layer for layer in model.modules() if isinstance(layer, hw.MultiHeadAttention)]


def test_everything_is_restored_after_an_exception() -> None:
    class Fails(Fused):
        def forward(self, x: Tensor) -> Tensor:
            super().forward(x)
            raise RuntimeError("in the model")

    model, before = nn.Sequential(Two(), Fails()), state()
    with hw.watch(model, hw.Entropy()):
        assert state() != before
    with pytest.raises(RuntimeError, match="in the model"), hw.watch(model, hw.Entropy()) as seen:
        model(torch.randn(2, T, E))
    assert state() == before
    assert not observers
    assert seen.modules == ("0.low", "0.high", "1")
    with pytest.raises(ZeroDivisionError), catch(model, lambda call: 1 // 0):  # type: ignore[arg-type]
        model(torch.randn(2, T, E))
    assert state() == before
    assert not observers
    assert not model[1]._forward_hooks
    assert not model[1]._forward_pre_hooks
    with hw.watch(model, hw.LSE()) as seen:  # a call that failed leaves nobody running
        with pytest.raises(RuntimeError, match="in the model"):
            model(torch.randn(2, T, E))
        model[0](torch.randn(2, T, E))
    assert {row["module"]: row["calls"] for row in seen.table()} == {
        "0.low": 2,
        "0.high": 2,
        "1": 1,
    }


def test_watches_within_each_other_and_within_ablations() -> None:
    for model in (Two(), nn.Sequential(Fused(), Fused())):
        low, high = "0" if isinstance(model, nn.Sequential) else "low", None
        x = torch.randn(2, T, E)
        plain = model(x)
        with hw.watch(model, hw.Entropy()) as outer, hw.watch(model, hw.OutputNorm()) as inner:
            assert torch.equal(model(x), plain)
        assert outer.modules == inner.modules
        with ablate(model, {low: [1]}), hw.watch(model, hw.OutputNorm()) as inside:
            one = model(x)
        with hw.watch(model, hw.OutputNorm()) as outside, ablate(model, {low: [1]}):
            other = model(x)
        assert torch.equal(one, other)
        assert not torch.equal(one, plain)
        assert inside.table()[1]["output_norm"] == 0
        assert outside.table()[1] == inner.table()[1]
        high = HEADS + 1  # a head of the next layer, which reads what the first left
        assert outside.table()[high] == inside.table()[high]
        assert outside.table()[high] != inner.table()[high]


@pytest.mark.usefixtures("unchecked")
def test_faults_are_named() -> None:
    model = Two()
    with pytest.raises(ValueError, match="no gradient; watch the calls"):
        hw.watch(model, running=True, gradients=True).__enter__()
    with pytest.raises(ValueError, match="not a statistic; did you mean Entropy"):
        hw.watch(model, hw.Entropy).__enter__()  # type: ignore[arg-type]
    with hw.watch(model) as seen:
        model(torch.randn(2, T, E))
        with pytest.raises(KeyError, match="there are: low, high"):
            seen["middle"]


def test_a_model_in_which_nothing_was_seen_says_why() -> None:
    class CosineAttention(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            p = (x @ x.mT).relu()
            return p / p.sum(-1, keepdim=True) @ x

    with hw.watch(Two(), hw.Entropy()) as seen:
        pass
    with pytest.raises(ValueError, match="the model was not called"):
        seen.table()
    model = nn.Sequential(CosineAttention())
    with hw.watch(model, hw.Entropy()) as seen:
        model(torch.randn(2, T, E))
    with pytest.raises(ValueError, match=r"0 \(CosineAttention\) computed was no function"):
        seen.table()
    model = nn.Sequential(nn.Linear(E, E))
    with hw.watch(model, hw.Entropy()) as seen:
        model(torch.randn(2, T, E))
    with pytest.raises(ValueError, match="none of its modules called a function"):
        seen.table()


def test_statistics_that_fit_some_modules_only() -> None:
    model = nn.Sequential(Fused(), Fused())
    ids = torch.randint(5, (2, T + 1))
    said = r"in '0' \(queries 7, keys 7\).*one token per key.*modules="
    with pytest.raises(ValueError, match=said), hw.watch(model, hw.Mass(hw.Induction(ids))):
        model(torch.randn(2, T, E))
    for modules in ("1", "L1", 1, ["x", 1], lambda name: name == "1"):
        with hw.watch(model, hw.Entropy(), modules=modules) as seen:
            model(torch.randn(2, T, E))
        assert seen.modules == ("1",)
        assert {row["layer"] for row in seen.table()} == {1}
        assert seen[1] is seen["L1"] is seen["1"]


def test_a_part_that_is_called_by_itself_has_its_name() -> None:
    model = nn.Sequential(Fused(), Fused())
    with hw.watch(model, hw.Entropy()) as seen:
        model[1](torch.randn(2, T, E))
    assert seen.modules == ("1",)
    other = Fused()
    with hw.watch(model, hw.Entropy()) as seen:
        other(torch.randn(2, T, E))
    assert seen.modules == ()


def test_only_statistics_are_kept() -> None:
    kept: list[weakref.ref[Tensor]] = []

    class Layer(Fused):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
            scores = q @ k.mT
            p = F.softmax(scores, -1)
            out = F.scaled_dot_product_attention(q, k, p @ v)
            kept[:] = [weakref.ref(y) for y in (scores, q, k, v, p, out)]
            return out

    model = Layer()
    with hw.watch(model, hw.Entropy(), hw.Received()) as seen:
        with torch.no_grad():
            model(torch.randn(2, T, E))
        gc.collect()
        assert [ref() for ref in kept] == [None] * 6
        out = model(torch.randn(2, T, E))
        gc.collect()
        assert kept[0]() is None  # which the graph of `out` does without
    assert len(seen[""].calls) == 4
    assert out.requires_grad


def test_a_mask_that_changes_in_place_is_another_mask() -> None:
    model = nn.Sequential(Fused(), Fused())
    model[0].mask = model[1].mask = mask = torch.ones(T, T, dtype=torch.bool)

    def forbid(*_: object) -> None:
        mask[:, 3:] = False

    model[0].register_forward_hook(forbid)
    with torch.no_grad(), hw.watch(model, hw.Received()) as seen:
        model(torch.randn(2, T, E))
    assert bool((seen["0"]["received"] > 0).all())
    assert bool((seen["1"]["received"][..., 3:] == 0).all())


@pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
def test_without_gradients(without: type) -> None:
    model, x = nn.Sequential(Fused(), nn.MultiheadAttention(E, HEADS), Two()), torch.randn(2, T, E)
    model.forward = lambda x: model[2](model[1](*[model[0](x)] * 3)[0])  # type: ignore[method-assign]
    with without():
        plain = model(x)
        with hw.watch(model, hw.Entropy()) as seen:
            assert torch.equal(model(x), plain)
    assert seen.modules == ("0", "1", "2.low", "2.high")


# ── threads, recomputation, compiled models ─────────────────────────────────────────────────────


def in_thread(work: Callable[[], object]) -> list[BaseException]:
    """Do something in another thread; what it raised."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return raised


def test_threads() -> None:
    model, other, x = Fused(), Fused(), torch.randn(2, T, E)
    with hw.watch(model, hw.Entropy()) as seen:
        assert in_thread(lambda: model(x)) == []  # as by a streamer
        assert in_thread(lambda: other(x)) == []

        def watch_the_other() -> None:
            with hw.watch(other, hw.Entropy()) as its:
                other(x)
                other(x)
            assert its.table()[0]["calls"] == 2

        assert in_thread(watch_the_other) == []
        model(x)
        assert in_thread(lambda: model(x)) == []
    assert seen.table()[0]["calls"] == 3
    model(x)
    assert in_thread(lambda: model(x)) == []
    assert seen.table()[0]["calls"] == 3


@pytest.mark.parametrize("fails", [False, True])
def test_threads_that_call_at_once_are_refused(fails: bool) -> None:
    class Slow(Fused):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            raised.extend(in_thread(lambda: model(x)))
            if fails:
                raise ArithmeticError
            return out

    raised: list[BaseException] = []
    model, x = Slow(), torch.randn(2, T, E)
    with hw.watch(model, hw.Entropy()) as seen:
        for where in (in_thread, lambda work: work()):
            with contextlib.suppress(ArithmeticError):
                where(lambda: model(x))
    assert ["another thread is calling it" in str(error) for error in raised] == [True, True]
    assert seen.table()[0]["calls"] == 2


@torch.no_grad()
def test_what_another_thread_makes_is_seen_as_in_its_own() -> None:
    encoder = nn.TransformerEncoderLayer(E, HEADS, batch_first=True).eval()
    for model in (encoder, Fused(), hw.MultiHeadAttention(E, HEADS)):
        x = torch.randn(2, T, E)
        plain = model(x)
        for _ in range(2):  # followed in full, and, where that is learned, as a known model
            with hw.watch(model, hw.Entropy()) as own:
                model(x)
            with hw.watch(model, hw.Entropy()) as seen, ThreadPoolExecutor(1) as thread:
                assert torch.equal(thread.submit(model, x).result(), plain)
                modes = torch.overrides._get_current_function_mode_stack
                assert thread.submit(modes).result() == []  # nothing stays behind
            assert torch.equal(seen[0]["entropy"], own[0]["entropy"])


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", [Fused, lambda: hw.MultiHeadAttention(E, HEADS)])
def test_what_is_recomputed_counts_once_and_is_ablated_twice(
    reentrant: bool, kind: Callable[[], nn.Module]
) -> None:
    class Model(nn.Module):
        def __init__(self, again: bool) -> None:
            super().__init__()
            self.layer, self.again = kind(), again

        def forward(self, x: Tensor) -> Tensor:
            if self.again:
                return checkpoint(self.layer, x, use_reentrant=reentrant)
            return self.layer(x)

    model, plain = Model(True), Model(False)
    plain.load_state_dict(model.state_dict())
    x = torch.randn(2, T, E, requires_grad=True)
    gradients: list[Tensor] = []
    for each in (plain, model):
        with ablate(each, {"layer": [1]}), hw.watch(each, hw.Entropy()) as seen:
            out = each(x)
            out.square().sum().backward()
        gradients.append(
            torch.cat([p.grad.flatten() for p in each.layer.parameters() if p.grad is not None])
        )
        assert seen.table()[0]["calls"] == 1
    torch.testing.assert_close(*gradients)
    if reentrant:
        return
    with ablate(model, {"layer": [1]}):
        again = torch.autograd.grad(model(x).square().sum(), list(model.layer.parameters()))
    torch.testing.assert_close(torch.cat([grad.flatten() for grad in again]), gradients[0])
    with hw.watch(model, hw.Entropy(), gradients=True) as seen:
        out = model(x)
        (out.square().sum() + seen["layer"]["entropy"].sum()).backward()
    assert seen.table()[0]["calls"] == 1


def test_compiled_models_and_functions() -> None:
    run = """
import re, torch, headwise as hw
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

class SelfAttention(nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.attend = attend

    def forward(self, x):
        return self.attend(x, x, x)

def attend(q, k, v):
    return scaled_dot_product_attention(q.sin(), k, v)

def fails(model, words, x=torch.randn(1, 2, 3, 4)):
    try:
        with hw.watch(model, hw.Entropy()):
            model(x)
    except ValueError as error:
        assert re.search(words, str(error)), error
    else:
        raise SystemExit("not refused: " + words)

def works(model, name, x=torch.randn(1, 2, 3, 4)):
    plain = model(x)
    frames = torch._dynamo.utils.counters["frames"]["ok"]
    for _ in range(2):
        with hw.watch(model, hw.Entropy()) as seen:
            assert torch.equal(model(x), plain)
        assert seen.modules == (name,), seen
        assert torch.equal(model(x), plain)
    assert torch._dynamo.utils.counters["frames"]["ok"] == frames + 1

whole = torch.compile(SelfAttention(attend), backend="eager")
part = nn.Sequential(torch.compile(SelfAttention(attend), backend="eager"))
in_place = nn.Sequential(SelfAttention(attend))
in_place[0].compile(backend="eager")
forward = nn.Sequential(SelfAttention(attend))
forward[0].forward = torch.compile(forward[0].forward, backend="eager")
function = nn.Sequential(SelfAttention(torch.compile(attend, backend="eager")))
for model, name in ((whole, ""), (part, "0"), (in_place, "0"), (forward, "0")):
    works(model, name)
script = nn.Sequential(torch.jit.trace(nn.Linear(2, 2), torch.randn(1, 2)))
fails(script, "'0' is compiled by torch.jit", torch.randn(1, 2))
x = torch.randn(1, 2, 3, 4)
function(x)
# PyTorch before 2.12 puts a frame of its own, `inner`, around functions that are in no file.
fails(function, "'0' calls '(attend|inner)'.*compiled by torch.compile.*force_eager")
function(x)

# Compiled code that calls the model, of which the model knows nothing: as one graph, or as several.
model = nn.Sequential(SelfAttention(attend))
for whole_graph, words in (True, "the model is called by '<lambda>'"), (False, "calls "):
    for ran in (False, True):
        torch._dynamo.reset()
        step = torch.compile(lambda x: model(x) + 1, backend="eager", fullgraph=whole_graph)
        if ran:
            step(x)
        with hw.watch(model) as seen:
            assert torch.equal(step(x), attend(x, x, x) + 1)
        assert seen.modules == ("0",)
        try:
            with hw.accelerate(model):
                torch.testing.assert_close(step(x), model(x) + 1)
            assert not whole_graph
        except ValueError as error:
            assert re.search(f"{words}.*torch.compile.*accelerated", str(error)), error
        assert torch.equal(step(x), model(x) + 1)
# A compiled function that does not call the model is compiled and runs as ever.
other = torch.compile(lambda x: attend(x, x, x), backend="eager", fullgraph=True)
for spread in (hw.watch, hw.accelerate):
    torch._dynamo.reset()
    with spread(model):
        model(x)
        assert torch.equal(other(x), attend(x, x, x))
# What a model compiles of its own attention runs under accelerate, too.
with hw.accelerate(function):
    torch.testing.assert_close(function(x), attend(x, x, x))

with torch.compiler.set_stance("force_eager"):
    plain = function(x)
    with hw.watch(function, hw.Entropy()) as seen:
        assert torch.equal(function(x), plain)
assert seen.modules == ("0",)
"""
    done = fresh.run(run)
    assert done.returncode == 0, done.stderr


# ── masks of others ─────────────────────────────────────────────────────────────────────────────


@given(data=st.data())
def test_a_mask_means_what_its_tensor_says(data: st.DataObject) -> None:
    queries, keys = data.draw(st.sampled_from([(1, 1), (3, 3), (3, 5), (5, 3), (1, 4)]))
    extent = Extent(2, 3, 3, queries, keys)
    shape = [data.draw(st.sampled_from([1, n])) for n in (2, 3, queries)] + [keys]
    shape = shape[data.draw(st.integers(0, 2)) :]
    kind = data.draw(st.sampled_from(["random", "causal", "range", "all", "none"]))
    i, j = torch.arange(queries)[:, None], torch.arange(keys)
    allowed = torch.rand(shape, generator=torch.Generator().manual_seed(len(kind))) > 0.4
    if kind == "causal":
        allowed = j <= i + keys - queries
    elif kind == "range":
        first, last = sorted(data.draw(st.tuples(*[st.integers(0, keys)] * 2)))
        allowed = ((j >= first) & (j < last)).expand(shape)
    elif kind != "random":
        allowed = torch.full(shape, kind == "all")
    if data.draw(st.booleans()):
        allowed = allowed.expand(*[1] * (4 - allowed.dim()), *allowed.shape).expand(2, 3, -1, -1)
    given_ = allowed
    bias = torch.zeros(allowed.shape)
    if (form := data.draw(st.sampled_from(["bool", "zeros", "bias"]))) != "bool":
        if form == "bias":
            bias = torch.randn(allowed.shape, generator=torch.Generator().manual_seed(3))
        low = data.draw(st.sampled_from([-torch.inf, torch.finfo(torch.float32).min, -1e9]))
        given_ = bias.masked_fill(~allowed, low)
    mask = as_mask(given_, extent)
    whole = (2, 3, queries, keys)
    assert torch.equal(mask.dense(*whole), allowed.expand(whole))
    added = mask.bias(i, j[None], extent)
    seen = allowed.expand(whole)
    wanted = torch.where(seen, bias, 0.0)
    got = torch.zeros(()) if added is None else torch.where(seen, added, 0.0)
    assert torch.equal(got.expand(whole), wanted)
    assert kind == "random" or not isinstance(mask, Dense)
    pairs = (i[None, None].expand(2, 1, -1, -1), j.view(1, 1, 1, -1).expand(2, 1, -1, -1))
    found = mask.allowed(*pairs, extent)
    if found is not None:
        assert torch.equal(found.expand(whole), allowed.expand(whole))


@given(data=st.data())
def test_padding_is_what_no_query_sees(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 5), min_size=2, max_size=2))
    extent = Extent(2, 3, 3, 5, 5)
    real = torch.arange(5) < torch.tensor(lengths)[:, None]
    if data.draw(st.booleans()):
        real = real.flip(1)
    table = real[:, None, None].expand(2, 1, 5, 5)
    if data.draw(st.booleans()):
        table = table & torch.ones(5, 5).tril().bool()
    noise = torch.randn(2, 1, 5, 5)
    for given_ in (table, noise.masked_fill(~table, -torch.inf), table & (noise > -0.5)):
        mask = without_padding(as_mask(given_, extent), extent, torch.device("cpu"))
        allowed = given_ if given_.dtype == torch.bool else table
        seen = allowed.any(2)[:, 0]
        wanted = allowed & seen[:, None, :, None]
        assert torch.equal(mask.dense(2, 3, 5, 5), wanted.expand(2, 3, 5, 5))


def test_copies_and_pickles_are_not_watched() -> None:
    model = Two()
    with hw.watch(model, hw.Entropy()) as seen:
        twin = copy.deepcopy(model)
        again = pickle.loads(pickle.dumps(model))
        assert observers
        twin(torch.randn(2, T, E))
        again(torch.randn(2, T, E))
    assert not seen
    assert not observers


def test_gradients_flow_while_watched() -> None:
    model, x = Two(), torch.randn(2, T, E)
    model(x).square().sum().backward()
    plain = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    with hw.watch(model, hw.Entropy()):
        model(x).square().sum().backward()
    watched = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))


def test_watches_that_end_in_another_order_leave_nothing_behind() -> None:
    before = torch.overrides.has_torch_function
    first, second = (hw.watch(Two(), hw.Entropy()) for _ in range(2))
    opened, closed = threading.Event(), threading.Event()

    def other() -> None:
        with second:
            opened.set()
            closed.wait(60)

    thread = threading.Thread(target=other)
    with first:
        thread.start()
        assert opened.wait(60)
    assert torch.overrides.has_torch_function is not before
    closed.set()
    thread.join()
    assert torch.overrides.has_torch_function is before


# ── asyncio ─────────────────────────────────────────────────────────────────────────────────────


class Everyway(nn.Module):
    """headwise's own layer, PyTorch's function, and attention by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.fused, self.hand = hw.MultiHeadAttention(E, HEADS), Fused(), ByHand()

    def forward(self, x: Tensor) -> Tensor:
        return self.hand(self.fused(self.own(x)))


class ByHand(Fused):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        return self.out((F.softmax(q @ k.mT, -1) @ v).transpose(1, 2).flatten(2))


def calls(seen: hw.capture.Watched) -> set[int]:
    return {row["calls"] for row in seen.table()}


@pytest.mark.parametrize("ends_first", [0, 1])
def test_tasks_that_take_turns_count_their_own_calls(ends_first: int) -> None:
    model, x, before = Everyway(), torch.randn(2, T, E), state()
    found: dict[int, hw.capture.Watched] = {}

    async def other(number: int, turns: int) -> None:
        with hw.watch(model, hw.Entropy()) as seen:
            for _ in range(turns):
                await asyncio.sleep(0)
                model(x)
            await asyncio.gather(*[asyncio.create_task(child()) for _ in range(number)])
            await asyncio.sleep(0)
        found[number] = seen
        await asyncio.sleep(0)
        model(x)  # nobody's

    async def child() -> None:
        await asyncio.sleep(0)
        model(x)

    async def main() -> None:
        turns = (2, 5) if ends_first == 0 else (5, 2)
        await asyncio.gather(other(0, turns[0]), other(1, turns[1]))

    asyncio.run(main())
    expected = {0: {2}, 1: {6}} if ends_first == 0 else {0: {5}, 1: {3}}
    assert {number: calls(seen) for number, seen in found.items()} == expected
    assert [seen.modules for seen in found.values()] == [("own", "fused", "hand")] * 2
    assert state() == before
    assert not observers


def test_a_watch_around_all_tasks_sees_all_of_them() -> None:
    model, x = Everyway(), torch.randn(2, T, E)

    async def work() -> None:
        await asyncio.sleep(0)
        model(x)

    async def main() -> None:
        await asyncio.gather(work(), work(), work())

    with hw.watch(model, hw.Entropy()) as seen:
        asyncio.run(main())
    assert calls(seen) == {3}


def test_calls_of_another_task_are_named() -> None:
    model, x = Everyway(), torch.randn(2, T, E)

    async def main() -> hw.capture.Watched:
        begun = asyncio.Event()

        async def stranger() -> None:
            await begun.wait()
            model(x)

        task = asyncio.create_task(stranger())
        with hw.watch(model, hw.Entropy()) as seen:
            begun.set()
            await task
        return seen

    with pytest.raises(ValueError, match="called in a different asyncio task"):
        asyncio.run(main()).table()


def test_watches_that_end_in_the_order_in_which_they_began() -> None:
    model, x, before = Everyway(), torch.randn(2, T, E), state()
    one, two = hw.watch(model, hw.Entropy()), hw.watch(model, hw.Entropy())
    first, second = one.__enter__(), two.__enter__()
    model(x)
    one.__exit__(None, None, None)
    model(x)
    two.__exit__(None, None, None)
    model(x)
    assert (calls(first), calls(second)) == ({1}, {2})
    assert state() == before
    assert not observers


def test_a_compiler_that_was_watched_in_turns_is_given_back() -> None:
    from torch._dynamo import eval_frame

    before = eval_frame._callback_from_stance
    one, two = hw.watch(Fused(), hw.Entropy()), hw.watch(Fused(), hw.Entropy())
    one.__enter__()
    two.__enter__()
    one.__exit__(None, None, None)
    assert eval_frame._callback_from_stance is not before
    two.__exit__(None, None, None)
    assert eval_frame._callback_from_stance is before


def test_compiled_code_runs_as_written_until_the_last_watch_ends() -> None:
    from torch._dynamo import eval_frame

    before = eval_frame._stance.stance
    one, two = (hw.watch(torch.compile(Fused()), hw.Entropy(), gradients=True) for _ in range(2))
    one.__enter__()
    two.__enter__()
    one.__exit__(None, None, None)
    assert eval_frame._stance.stance == "force_eager"
    two.__exit__(None, None, None)
    assert eval_frame._stance.stance == before

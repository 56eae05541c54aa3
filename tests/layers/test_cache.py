"""KVCache: what it returns, keeps and refuses; and that decoding gives what one forward gives."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headwise.core.masks import Causal, Dense, Padding, Window
from headwise.layers.attention import MultiHeadAttention
from headwise.layers.kv_cache import KVCache
from headwise.layers.rope import RoPE

B, G, D = 2, 3, 5
MODES = {
    "grad": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Uninitialised memory reads as NaN, so a row that was never written shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.empty(1).isnan().all()
    yield
    torch.use_deterministic_algorithms(before)


def tokens(count: int, seed: int = 0, batch: int = B) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, batch, G, count, D, generator=generator)
    return k, v


def chunks_of(k: torch.Tensor, sizes: list[int]) -> list[slice]:
    assert sum(sizes) == k.shape[2]
    ends = list(itertools.accumulate(sizes))
    return [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]


sizes_and_modes = st.lists(
    st.tuples(st.integers(0, 23), st.sampled_from(sorted(MODES))), min_size=1, max_size=12
)


@settings(deadline=None, max_examples=60)
@given(sizes_and_modes, st.sampled_from(["growing", "static"]))
def test_every_append_returns_the_whole_past(calls, kind):
    sizes = [size for size, _ in calls]
    k, v = tokens(sum(sizes))
    cache = KVCache() if kind == "growing" else KVCache(max_length=max(1, sum(sizes)))
    for rows, (_, mode) in zip(chunks_of(k, sizes), calls, strict=True):
        with MODES[mode]():
            keys, values = cache.append(k[:, :, rows], v[:, :, rows])
        assert torch.equal(keys, k[:, :, : rows.stop])
        assert torch.equal(values, v[:, :, : rows.stop])
        assert cache.length == cache.stored == rows.stop


@settings(deadline=None, max_examples=60)
@given(sizes_and_modes, st.integers(1, 13))
def test_a_rolling_cache_returns_what_a_window_can_reach(calls, window):
    sizes = [size for size, _ in calls]
    k, v = tokens(sum(sizes))
    cache = KVCache(window=window)
    for rows, (_, mode) in zip(chunks_of(k, sizes), calls, strict=True):
        with MODES[mode]():
            keys, values = cache.append(k[:, :, rows], v[:, :, rows])
        first = max(0, rows.start - (window - 1))
        assert torch.equal(keys, k[:, :, first : rows.stop])
        assert torch.equal(values, v[:, :, first : rows.stop])
        assert cache.length == rows.stop
        assert cache.stored == min(rows.stop, window - 1)


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"max_length": 97}, {"window": 7}])
def test_views_handed_out_keep_their_values(options):
    k, v = tokens(97)
    cache, seen = KVCache(**options), []
    for t in range(97):
        keys, values = cache.append(k[:, :, t : t + 1], v[:, :, t : t + 1])
        seen.append((keys, values, keys.clone(), values.clone()))
    for keys, values, keys_then, values_then in seen:
        assert torch.equal(keys, keys_then)
        assert torch.equal(values, values_then)


@torch.no_grad()
def test_growing_moves_the_past_rarely():
    k, v = tokens(1000)
    cache, places = KVCache(), set()
    for t in range(1000):
        keys, _ = cache.append(k[:, :, t : t + 1], v[:, :, t : t + 1])
        places.add(keys.data_ptr())
    assert len(places) <= 6  # 65 rows, then doubling beyond 1000


@torch.no_grad()
def test_a_static_cache_never_moves():
    k, v = tokens(31)
    cache, places = KVCache(max_length=31), set()
    for rows in chunks_of(k, [17, 1, 1, 12]):
        places.add(cache.append(k[:, :, rows], v[:, :, rows])[0].data_ptr())
    cache.reset()
    places.add(cache.append(k[:, :, :2], v[:, :, :2])[0].data_ptr())
    assert len(places) == 1


@torch.no_grad()
@pytest.mark.parametrize("first", [1, 700])
def test_a_rolling_cache_holds_memory_for_its_window_only(first):
    k, v = tokens(700 + first)
    cache = KVCache(window=11)
    cache.append(k[:, :, :first], v[:, :, :first])
    for t in range(first, 700 + first):
        keys, _ = cache.append(k[:, :, t : t + 1], v[:, :, t : t + 1])
        room = keys.untyped_storage().nbytes() // (B * G * D * keys.element_size())
        assert room <= 2 * 11


def test_gradients_reach_every_chunk():
    k, v = (x.requires_grad_() for x in tokens(13))
    weight = torch.randn(B, G, 13, D)
    cache = KVCache()
    for rows in chunks_of(k, [5, 1, 7]):
        keys, values = cache.append(k[:, :, rows], v[:, :, rows])
    (keys * values * weight).sum().backward()
    assert torch.allclose(k.grad, v.detach() * weight)
    assert torch.allclose(v.grad, k.detach() * weight)


def test_a_backward_pass_survives_later_tokens():
    """What autograd saved of the cache must not be written over by the next append."""
    k, v = tokens(9)
    q = torch.randn(B, G, 4, D, requires_grad=True)
    cache = KVCache()
    with torch.no_grad():
        cache.append(k[:, :, :4], v[:, :, :4])
    keys, _ = cache.append(k[:, :, 4:6], v[:, :, 4:6])  # k itself needs no gradient
    scores = q @ keys.transpose(-1, -2)
    with torch.no_grad():
        cache.append(k[:, :, 6:], v[:, :, 6:])
    scores.sum().backward()
    assert torch.allclose(q.grad, k[:, :, :6].sum(2, keepdim=True).expand_as(q), atol=1e-5)


@pytest.mark.parametrize("mode", sorted(MODES))
@pytest.mark.parametrize("options", [{}, {"max_length": 17}, {"window": 6}])
def test_select_reorders_repeats_and_drops_rows(options, mode):
    (k, v), index = tokens(11, batch=3), torch.tensor([2, 0, 0, 1])
    cache = KVCache(**options)
    with MODES[mode]():
        cache.append(k[:, :, :9], v[:, :, :9])
        cache.select(index)
    with torch.no_grad():
        keys, values = cache.append(k[index, :, 9:], v[index, :, 9:])
    first = max(0, 9 - 5) if "window" in options else 0
    assert torch.equal(keys, k[index, :, first:])
    assert torch.equal(values, v[index, :, first:])
    KVCache().select(index)  # an empty cache has nothing to reorder


@pytest.mark.parametrize("options", [{}, {"max_length": 17}, {"window": 6}])
def test_reset_forgets_and_takes_another_shape(options):
    cache = KVCache(**options)
    with torch.no_grad():
        cache.append(*tokens(5))
        cache.reset()
        assert cache.length == cache.stored == 0
        k, v = tokens(4, seed=1, batch=7)
        keys, values = cache.append(k.bfloat16(), v.bfloat16())
    assert torch.equal(keys, k.bfloat16())
    assert torch.equal(values, v.bfloat16())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_length": 0}, r"KVCache\(max_length=0, window=None\): .* at least 1"),
        ({"window": 0}, r"KVCache\(max_length=None, window=0\): .* at least 1"),
        ({"max_length": 3, "window": 3}, "not both"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        KVCache(**options)


@pytest.mark.parametrize("mode", sorted(MODES))
def test_a_full_static_cache_refuses_and_stays_as_it_was(mode):
    k, v = tokens(11)
    cache = KVCache(max_length=11)
    with MODES[mode]():
        cache.append(k[:, :, :9], v[:, :, :9])
        with pytest.raises(ValueError, match=r"k \[2, 3, 3, 5\].*9 tokens and max_length=11"):
            cache.append(k[:, :, :3], v[:, :, :3])
        keys, _ = cache.append(k[:, :, 9:], v[:, :, 9:])
    assert torch.equal(keys, k)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x[:1],
        lambda x: x[:, :2],
        lambda x: x[..., :4],
        lambda x: x.double(),
        lambda x: x.to("meta"),
    ],
    ids=["batch", "heads", "head_dim", "dtype", "device"],
)
def test_tokens_of_another_kind_are_refused(change):
    k, v = tokens(4)
    cache = KVCache()
    cache.append(k, v)
    with pytest.raises(ValueError, match=r"the cache holds k of \[B=2, G=3, 4 tokens, D=5\]"):
        cache.append(change(k), change(v))
    assert cache.length == 4


def test_repr_says_what_it_holds():
    cache = KVCache(window=3)
    cache.append(*tokens(7))
    assert repr(cache) == "KVCache(window=3): 7 tokens seen, 2 kept"


# ── through the layer ───────────────────────────────────────────────────────────────────────────

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 7}
NTK = {"rope_type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 11}
LAYERS = {
    "plain": {},
    "grouped": {"num_kv_heads": 3, "bias": (True, False, True)},
    "rope": {"num_kv_heads": 1, "rope": RoPE(8), "qk_norm": True},
    "interleaved": {"rope": RoPE(6, interleaved=True), "softcap": 2.0},
    "yarn": {"num_kv_heads": 2, "rope": RoPE(8, scaling=YARN)},
    "ntk": {
        "num_kv_heads": 2,
        "rope": RoPE(8, scaling={**NTK, "original_max_position_embeddings": 23}),
    },
}
CACHES = {
    "growing": (KVCache, Causal()),
    "static": (lambda: KVCache(max_length=23), Causal()),
    "rolling": (lambda: KVCache(window=5), Window(5)),
    "growing_windowed": (KVCache, Causal() & Window(5)),
}
CHUNKS = {
    "tokens": [1] * 23,
    "prefill_then_tokens": [17] + [1] * 6,
    "chunks": [3, 11, 2, 7],
    "mixed": [1, 13, 1, 1, 5, 2],
}


def layer_of(name: str) -> MultiHeadAttention:
    torch.manual_seed(0)
    return MultiHeadAttention(29, 6, head_dim=8, dtype=torch.float64, **LAYERS[name])


@pytest.mark.parametrize("mode", ["grad", "inference"])
@pytest.mark.parametrize("sizes", CHUNKS)
@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("name", LAYERS)
def test_chunks_and_tokens_give_what_one_forward_gives(name, kind, sizes, mode):
    layer, (make, mask) = layer_of(name), CACHES[kind]
    x, cache = torch.randn(B, 23, 29, dtype=torch.float64), make()
    whole = layer(x, mask=mask).detach()
    with MODES[mode]():
        parts = [layer(part, mask=mask, cache=cache) for part in x.split(CHUNKS[sizes], dim=1)]
        found = torch.cat(parts, dim=1)
    assert torch.allclose(found, whole, rtol=0, atol=1e-13 * float(whole.abs().max() + 1))
    assert cache.length == 23


def test_gradients_through_a_cache_are_those_of_one_forward():
    layer, x = layer_of("rope"), torch.randn(B, 13, 29, dtype=torch.float64)
    parameters, cache = list(layer.parameters()), KVCache(window=5)
    whole = layer(x, mask=Window(5)).square().sum()
    parts = [layer(part, mask=Window(5), cache=cache) for part in x.split([6, 1, 6], dim=1)]
    pieces = sum(part.square().sum() for part in parts)
    ours, theirs = (torch.autograd.grad(loss, parameters) for loss in (pieces, whole))
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-12 * float(b.abs().max() + 1))


@pytest.mark.parametrize("window", [None, 7])
def test_ntk_scaling_beyond_its_length_decodes_as_the_text_so_far_would(window):
    """Every key turns anew as the text grows, so each token sees the angles of its own length."""
    torch.manual_seed(0)
    layer = MultiHeadAttention(29, 6, head_dim=8, rope=RoPE(8, scaling=NTK), dtype=torch.float64)
    x, cache = torch.randn(B, 23, 29, dtype=torch.float64), KVCache(window=window)
    mask = Causal() if window is None else Window(window)
    with torch.no_grad():
        for t in range(23):
            token = layer(x[:, t : t + 1], mask=mask, cache=cache)
            whole = layer(x[:, : t + 1], mask=mask)[:, -1:]
            assert torch.allclose(token, whole, rtol=0, atol=1e-13 * float(whole.abs().max() + 1))


def test_left_padded_prompts_decode_as_each_would_alone():
    layer, lengths = layer_of("rope"), [4, 9]
    x, cache = torch.randn(B, 12, 29, dtype=torch.float64), KVCache()
    with torch.no_grad():
        real = torch.tensor(lengths)
        parts = [layer(x[:, :9], mask=Causal() & Padding(real, "left"), cache=cache)]
        for t in (9, 10, 11):
            mask = Causal() & Padding(real + t - 8, "left")
            parts.append(layer(x[:, t : t + 1], mask=mask, cache=cache))
        found = torch.cat(parts, dim=1)
        for row, length in enumerate(lengths):
            alone = layer(x[row : row + 1, 9 - length :], mask=Causal())
            assert torch.allclose(found[row, 9 - length :], alone[0], rtol=0, atol=1e-13)


def test_a_cache_is_refused_beside_a_context_or_another_batch():
    layer, x = layer_of("plain"), torch.randn(B, 7, 29, dtype=torch.float64)
    cache = KVCache()
    with pytest.raises(ValueError, match=r"context \[2, 7, 29\]\): a cache continues x"):
        layer(x, x, cache=cache)
    layer(x, mask=Causal(), cache=cache)
    with pytest.raises(ValueError, match=r"k \[1, 6, 7, 8\].*holds k of \[B=2, G=6, 7 tokens, D=8"):
        layer(x[:1], mask=Causal(), cache=cache)


@pytest.mark.parametrize("settings", [{}, {"max_length": 9}, {"window": 3}], ids=str)
@pytest.mark.parametrize("grad", [False, True])
def test_a_call_that_fails_leaves_the_cache_as_it_was(settings, grad):
    layer, x = layer_of("plain"), torch.randn(B, 7, 29, dtype=torch.float64)
    mask = Window(3)
    wrong = Dense(torch.ones(2, 2, dtype=torch.bool))
    with torch.set_grad_enabled(grad):
        cache = KVCache(**settings)
        layer(x[:, :4], mask=mask, cache=cache)
        with pytest.raises(ValueError, match="must broadcast"):
            layer(x[:, 4:], mask=wrong, cache=cache)
        assert cache.length == 4
        rest = layer(x[:, 4:], mask=mask, cache=cache)
    assert torch.allclose(rest, layer(x, mask=mask)[:, 4:], rtol=0, atol=1e-13)

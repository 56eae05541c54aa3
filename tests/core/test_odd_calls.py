"""Odd inputs: each gives the right answer on every backend, or one clear line of ours."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable
from fractions import Fraction
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.core.reference import attention
from support import BACKENDS, B, D, G, H, assert_as_good, qkv, truth

pytestmark = pytest.mark.usefixtures("unchecked")

N = 5  # queries and keys
NAMES = ["auto", *BACKENDS]
FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "attend": hw.attend,
    "observe": lambda *parts, **keywords: hw.observe(*parts, **keywords).out,
}
FLOAT = torch.finfo(torch.float32)


def long(*numbers: int) -> Tensor:
    return torch.tensor(numbers)


def full(number: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full((N, N), number, dtype=dtype)


# ── what is refused, by all alike ───────────────────────────────────────────────────────────────

LEARNED = torch.tensor(0.5, requires_grad=True)
NUMBERS: list[tuple[dict[str, Any], str]] = [
    *(({"scale": x}, "scale must be a finite number") for x in (math.nan, math.inf, -math.inf)),
    *(({"scale": x}, "scale must be a finite number") for x in (True, "2", 1j, [1.0], 2**2000)),
    *(({"scale": x}, "scale must be a finite number") for x in (1e39, -1e300, torch.ones(2))),
    ({"scale": 10**5000}, "scale must be.*a whole number of 16610 bits"),
    ({"scale": LEARNED}, "scale has a gradient"),
    *(({"softcap": x}, "softcap must be above 0") for x in (math.nan, math.inf, 0, 0.0, -1.0)),
    *(({"softcap": x}, "softcap must be above 0") for x in (True, "2", 1j, [1.0], 1e39, 1e-46)),
    *(({"dropout": x}, "dropout must be at least 0") for x in (math.nan, math.inf, True, False)),
    *(({"dropout": x}, "dropout must be at least 0") for x in (1.5, 1, -0.1, "0.1", None, 1j)),
    *(({"backend": x}, "backend must be one of 'auto'") for x in (None, 1, "", "AUTO", [], {})),
    ({"sinks": torch.full((H,), math.inf)}, "sinks must be finite.* got inf for head 0"),
    (
        {"sinks": torch.zeros(H).index_fill(0, long(2), math.nan)},
        "sinks must be finite.* got nan for head 2",
    ),
    ({"sinks": torch.full((H,), 1e300, dtype=torch.float64)}, "sinks must be finite.* got inf"),
    ({"sinks": torch.zeros(H).to_sparse()}, r"sinks is torch\.sparse_coo"),
    *(({"mask": x}, "must be a headwise mask") for x in (5, True, "causal", hw.Causal)),
]


def parts_with(**changes: Any) -> dict[str, Any]:
    return dict(zip("qkv", qkv(N, N), strict=True)) | changes


def nested(layout: torch.layout) -> Tensor:
    rows = [torch.randn(3, H, D), torch.randn(N, H, D)]
    return torch.nested.nested_tensor(rows, layout=layout).transpose(1, 2)


KINDS: list[tuple[Callable[[], dict[str, Any]], str]] = [
    (lambda: {"q": [[1.0]]}, "q is a list, not a torch.Tensor"),
    (lambda: {"k": None}, "k is a NoneType"),
    (lambda: {"v": np.zeros((B, G, N, D))}, "v is a ndarray"),
    (lambda: {"q": torch.zeros(B, H, N, D).to_sparse()}, r"q is torch\.sparse_coo; give a dense"),
    (lambda: {"k": torch.zeros(B, G, N, D).to_mkldnn()}, r"k is torch\._mkldnn; give a dense"),
    (lambda: {"q": nested(torch.strided)}, r"q is a nested tensor; pad .* mask=Padding\(lengths\)"),
    (lambda: {"k": nested(torch.jagged)}, r"k is a nested tensor; .*mask=Documents\(ids\)"),
    (
        lambda: {"q": torch.quantize_per_tensor(torch.zeros(B, H, N, D), 0.1, 0, torch.qint8)},
        r"q is quantized.*dequantize\(\)",
    ),
    (lambda: {"q": torch.zeros(B, H, N, D, dtype=torch.complex64)}, "needs a floating-point dtype"),
    (lambda: {"q": torch.zeros(B, H, N, D, device="meta")}, "q is on meta, k on cpu"),
    (lambda: {"mask": hw.Padding(long(1, 2).to("meta"))}, "a tensor on meta, without values"),
]


@pytest.mark.parametrize("function", ["attend", "observe", "explain"])
@pytest.mark.parametrize(("change", "says"), NUMBERS, ids=[" ".join(x) for x, _ in NUMBERS])
def test_odd_numbers_are_refused_by_all_backends(change: dict, says: str, function: str) -> None:
    for backend in NAMES:
        with pytest.raises(ValueError, match=says) as caught:
            getattr(hw, function)(**parts_with(**({"backend": backend} | change)))
        is_clear(caught.value, "" if {"backend", "mask"} & change.keys() else function)


@pytest.mark.parametrize("function", ["attend", "observe", "explain"])
@pytest.mark.parametrize(("change", "says"), KINDS, ids=[says for _, says in KINDS])
def test_odd_tensors_are_refused_by_all_backends(
    change: Callable[[], dict], says: str, function: str
) -> None:
    for backend in NAMES:
        with pytest.raises(ValueError, match=says) as caught:
            getattr(hw, function)(**parts_with(**({"backend": backend} | change())))
        is_clear(caught.value, function)


def is_clear(error: BaseException, function: str = "") -> None:
    """One line of ours, that quotes the call where it is given its name."""
    assert type(error) is ValueError
    assert "\n" not in str(error)
    assert str(error).startswith(f"{function}(q " if function else "")
    assert Path(hw.__file__).parent in Path(last_file(error)).parents


def last_file(error: BaseException) -> str:
    return traceback.extract_tb(error.__traceback__)[-1].filename


@pytest.mark.parametrize(
    ("make", "says"),
    [
        *((lambda x=x: hw.Window(x), "whole number of keys") for x in (True, 2.5, "2", None, 0)),
        (lambda: hw.Window(torch.tensor(3)), "whole number of keys"),
        *((lambda x=x: hw.Prefix(x), "at least 0") for x in (True, 2.5, "2", None, -1)),
        (lambda: hw.Prefix(torch.tensor([1.0, 2.0])), "give whole numbers"),
        (lambda: hw.Prefix(torch.tensor([True])), "give whole numbers"),
        (lambda: hw.Padding(torch.tensor([2.5, 1.0])), "give whole numbers"),
        (lambda: hw.Padding(torch.tensor([True, False])), "give whole numbers"),
        (lambda: hw.Documents(torch.tensor([0.0, math.nan])), "give whole numbers"),
        (lambda: hw.Dense(torch.ones(3, 3).bool().to_sparse()), "give a dense tensor"),
        (lambda: hw.Bias(import_module("torch.nn.attention.bias").causal_lower_right(3, 5)),
         "its memory holds no mask; give Causal"),
        (lambda: hw.Dense(np.ones((9, 9), dtype=bool)), r"Dense\(a ndarray\): give a torch.Tensor"),
        (lambda: hw.Documents(torch.tensor(0)).dense(keys=1), "one document number per key"),
        (lambda: hw.Documents(torch.zeros(1, 2, 3).long()).dense(keys=3), "one document number"),
        *((lambda x=x: hw.KVCache(max_length=x), "whole number") for x in (True, 2.0, "3")),
        *((lambda x=x: hw.KVCache(window=x), "whole number") for x in (True, 2.0, "3")),
        (lambda: hw.KVCache(max_length=2**70), "too many keys"),
        *((lambda x=x: layer(embed_dim=x), "must be a whole number") for x in (True, 24.0, "24")),
        (lambda: layer(num_kv_heads=True), "num_kv_heads must be a whole number"),
        *((lambda x=x: layer(scale=x), "scale must be a finite") for x in (math.nan, "1", True)),
        *((lambda x=x: layer(softcap=x), "softcap must be above 0") for x in (math.inf, True)),
        *((lambda x=x: layer(dropout=x), "dropout must be") for x in (math.nan, True, "0.1")),
        (lambda: layer()([[1.0]]), "x is a list, not a torch.Tensor"),
        (lambda: layer()(nested(torch.jagged)), "x is a nested tensor"),
        (lambda: layer()(torch.zeros(1, 2, 24), nested(torch.jagged)), "context is a nested"),
    ],
)  # fmt: skip
def test_odd_masks_caches_and_layers_are_refused(make: Callable[[], object], says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        make()
    is_clear(caught.value)


def layer(embed_dim: Any = 24, **options: Any) -> hw.MultiHeadAttention:
    return hw.MultiHeadAttention(embed_dim, 4, **options)


@pytest.mark.parametrize(
    ("queries", "says"),
    [
        *((x, "a whole number of queries") for x in (True, 2.0, "3", [], {}, [1.0], [True])),
        *((x, "a whole number of queries") for x in (Ellipsis, [None], [[1, 2]], long(3)[0])),
        *((x, "there are 5 queries") for x in ([2**70], [N], [-N - 1])),
        *((x, "at least one query") for x in (0, -1, np.int64(0))),
        ([1, 1], "listed twice"),
    ],
    ids=str,
)
def test_odd_queries_are_refused(queries: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        hw.observe(*qkv(N, N), hw.Entropy(), queries=queries)
    is_clear(caught.value)


def test_numbers_of_numpy_count_as_pythons_own() -> None:
    q, k, v = qkv(N, N)

    def seen(queries: Any) -> list[int]:
        return hw.observe(q, k, v, hw.Entropy(), queries=queries).queries.tolist()

    assert seen(np.int64(3)) == seen(3)  # and not the query number 3
    assert seen(np.array([0, 2])) == seen(range(0, 3, 2)) == [0, 2]
    for backend in BACKENDS:
        for one, two in [
            ({"mask": hw.Window(np.int64(2))}, {"mask": hw.Window(2)}),
            ({"mask": hw.Prefix(np.int32(2))}, {"mask": hw.Prefix(2)}),
            ({"scale": np.float32(0.5)}, {"scale": Fraction(1, 2)}),
            ({"scale": torch.tensor(0.5)}, {"scale": 0.5}),
        ]:
            got = hw.attend(q, k, v, backend=backend, **one)
            assert torch.equal(got, hw.attend(q, k, v, backend=backend, **two))
    for seed in (True, None, "x", 1.5, -(2**70)):
        with pytest.raises(ValueError, match="seed="):
            hw.observe(q, k, v, queries=2, seed=seed)


# ── what is served, or refused, but never wrong ─────────────────────────────────────────────────


def strided(heads: int, *strides: int) -> Tensor:
    shape = (B, heads, N, D)
    room = 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    return torch.randn(room).as_strided(shape, strides)


SERVED: dict[str, Callable[[], dict[str, Any]]] = {
    "a window of 2^70": lambda: {"mask": hw.Window(2**70)},
    "a window of 2^64 and 3": lambda: {"mask": hw.Window(2**64 + 3)},
    "a window of 2^63 - 1": lambda: {"mask": hw.Window(2**63 - 1) & hw.Causal()},
    "a prefix of 2^70": lambda: {"mask": hw.Causal() | hw.Prefix(2**70)},
    "a prefix of nothing": lambda: {"mask": hw.Prefix(0)},
    "prefixes beyond": lambda: {"mask": hw.Prefix(long(1, -9)) & hw.Prefix(long(2**62, 9))},
    "padding beyond": lambda: {"mask": hw.Padding(long(9, -1))},
    "padding beyond on the left": lambda: {"mask": hw.Padding(long(2**62, -1), side="left")},
    "padding in bytes": lambda: {"mask": hw.Padding(long(1, 2).to(torch.uint8), side="left")},
    "documents as booleans": lambda: {"mask": hw.Documents(long(1, 1, 0, 0, 0).bool())},
    "no sink": lambda: {"sinks": torch.full((H,), -math.inf)},
    "sinks of all sizes": lambda: {"sinks": torch.linspace(-3e38, 3e38, H)},
    "a scale of nothing": lambda: {"scale": 1e-310},
    "a softcap of everything": lambda: {"softcap": 1e38},
    "a scale and a softcap": lambda: {"scale": 1e38, "softcap": 30.0},
    "a bias of the smallest number": lambda: {"mask": hw.Bias(full(FLOAT.min))},
    "a bias of the largest number": lambda: {"mask": hw.Bias(full(FLOAT.max)) & hw.Causal()},
    "half a row of the smallest number": lambda: {
        "mask": hw.Bias(full(FLOAT.min).tril(-1)) & hw.Causal()
    },
    "a bias beyond float32": lambda: {"mask": hw.Bias(full(-1e300, torch.float64))},
    "the smallest number twice": lambda: {
        "mask": hw.Bias(full(FLOAT.min)) & hw.Bias(full(FLOAT.min)) & hw.Causal()
    },
    "an infinite bias": lambda: {"mask": hw.Bias(full(math.inf))},
    "a bias that is no number": lambda: {"mask": hw.Bias(full(0.0).fill_diagonal_(math.nan))},
    "a scale of 1e38": lambda: {"scale": 1e38},
    "scores of 1e10": lambda: {"scale": 1e10},
    "scores beyond float32": lambda: {
        "q": torch.ones(B, H, N, D) * 1e30, "k": torch.ones(B, G, N, D) * 1e30
    },
    "scores below float32": lambda: {
        "q": torch.ones(B, H, N, D) * 1e30, "k": torch.ones(B, G, N, D) * -1e30
    },
    "overlapping queries": lambda: {"q": strided(H, 1, 1, 1, 1)},
    "queries that share rows": lambda: {"q": strided(H, 20, N, 1, 1)},
    "overlapping keys and values": lambda: {
        "k": strided(G, 1, 1, 1, 1), "v": strided(G, 2, 3, 1, 1)
    },
    "one query many times": lambda: {"q": strided(H, 0, 0, 0, 1)},
    "one number many times": lambda: {"q": strided(H, 0, 0, 0, 0), "v": strided(G, 0, 0, 0, 0)},
}  # fmt: skip


@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("name", SERVED)
def test_an_odd_call_gives_the_right_answer_or_one_clear_line(name: str, function: str) -> None:
    call = parts_with() | SERVED[name]()
    parts = call.pop("q"), call.pop("k"), call.pop("v")
    exact, plain = truth(*parts, **call), attention(*parts, **call)
    for backend in NAMES:
        try:
            out = FUNCTIONS[function](*parts, backend=backend, **call)
        except ValueError as error:
            is_clear(error, "" if "cannot run this call" in str(error) else function)
            continue
        if torch.isfinite(plain.out).all():
            assert_as_good(out, plain.out, exact.out, torch.float32, ulps=24.0)
        else:  # beyond what float32 can tell, but not beyond telling
            torch.testing.assert_close(out.double(), exact.out, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"scale": 1e38}, r"the scores of query \d .*scale \(1e\+38\)"),
        ({"mask": hw.Bias(full(0.0).index_fill(0, long(3), math.inf))}, "scores of query 3 "),
        ({"mask": hw.Bias(full(0.0).index_fill(0, long(2), math.nan))}, "scores of query 2 "),
    ],
    ids=["scale", "infinity", "nan"],
)
def test_scores_that_are_no_finite_numbers_are_refused(
    backend: str, change: dict, says: str
) -> None:
    q, k, v = (x.abs() for x in qkv(N, N))
    for function in FUNCTIONS.values():
        with pytest.raises(ValueError, match=says):
            function(q, k, v, backend=backend, **change)
    some = change | {"queries": [1, 2, 3], "output": False, "backend": backend}
    with pytest.raises(ValueError, match=says):
        hw.observe(q, k, v, hw.Entropy(), **some)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_infinite_in_q_itself_goes_on(backend: str) -> None:
    """A model that has diverged shows as much, in the rows where it has."""
    q, k, v = qkv(N, N)
    q[1, 2, 3] = math.inf
    out = hw.attend(q, k, v, mask=hw.Causal(), backend=backend)
    assert out.isnan().any(-1).nonzero().tolist() == [[1, 2, 3]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("which", "qkv")
def test_rows_that_overlap_have_gradients_too(which: str, dtype: torch.dtype) -> None:
    many = 40  # enough for the kernel's products in blocks
    parts = {name: torch.randn(B, H, many, 8).to(dtype) for name in "qkv"}
    room = torch.randn(2000).to(dtype).requires_grad_()
    parts[which] = room.as_strided((B, H, many, 8), (7, 5, 3, 1))
    found = []
    for backend in ("sdpa", "eager"):
        out = hw.attend(**parts, backend=backend)
        found.append((out, *torch.autograd.grad(out.float().square().sum(), room)))
    loose = {"rtol": 0.05, "atol": 0.05 * float(found[1][1].abs().max())}
    exact = {} if dtype == torch.float32 else loose
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, **exact)


def test_sinks_of_minus_infinity_have_a_gradient_of_nothing() -> None:
    q, k, v = qkv(N, N)
    for backend in BACKENDS:
        sinks = torch.tensor([-math.inf, 0.0] * (H // 2), requires_grad=True)
        out = hw.attend(q, k, v, sinks=sinks, backend=backend)
        (grad,) = torch.autograd.grad(out.square().sum(), sinks)
        assert grad[::2].tolist() == [0.0] * (H // 2)
        assert (grad[1::2] != 0).all()


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int16, torch.uint16], ids=str)
@pytest.mark.parametrize("ids", [[0, 0, 1, 1, 1], [1, 0, 0, 0, 1], [1, 1, 0, 0, 0]], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_documents_of_any_whole_numbers(name: str, ids: list[int], dtype: torch.dtype) -> None:
    parts = qkv(N, N)
    mask, same = (hw.Documents(torch.tensor(ids).to(kind)) for kind in (dtype, torch.long))
    got = hw.observe(*parts, hw.Entropy(), mask=mask & hw.Causal(), backend=name)
    want = hw.observe(*parts, hw.Entropy(), mask=same & hw.Causal(), backend="eager")
    torch.testing.assert_close(got.out, want.out)
    torch.testing.assert_close(got["entropy"], want["entropy"])


ONE, NO_IDS = torch.ones(1, 1, 1, 1), torch.zeros(0, dtype=torch.long)
WITHOUT_KEYS: dict[str, Callable[[int], hw.Mask | None]] = {
    "none": lambda t: None,
    "causal": lambda t: hw.Causal(),
    "dense": lambda t: hw.Dense(ONE.expand(1, 1, t, 1) > 0),
    "one dense": lambda t: hw.Dense(ONE > 0) & hw.Causal(),
    "bias": lambda t: hw.Bias(ONE.expand(1, 6, t, 1)),
    "documents": lambda t: hw.Documents(NO_IDS),
    "documents by row": lambda t: hw.Documents(NO_IDS[None]),
}


@pytest.mark.parametrize(
    ("mask", "t"),  # (every query needs the document of its key)
    [(x, t) for x in WITHOUT_KEYS for t in (0, N) if not (t and x.startswith("documents"))],
)
@pytest.mark.parametrize("name", ["auto", "blocked", "eager"])
def test_calls_without_keys_have_every_statistic(name: str, mask: str, t: int) -> None:
    asked = (hw.Entropy(), hw.MaxLogit(), hw.Norms(), hw.Received(), hw.Map(3), hw.TopKeys(2))
    asked += (hw.Similarity(), hw.Mass(hw.First()), hw.Mass(hw.Window(2)), hw.Distance(spread=True))
    asked += (hw.OffsetHistogram(4), hw.OutputNorm())
    parts = qkv(t, 0)
    for queries in (None, 3):
        seen = hw.observe(*parts, *asked, mask=WITHOUT_KEYS[mask](t), backend=name, queries=queries)
        assert not seen.out.any()
        assert (seen.lse == -torch.inf).all()
        for figure in seen.names:
            values = seen[figure]
            if figure in ("similarity", "contribution"):  # no query attends; no projection is known
                assert values.isnan().all(), figure
                continue
            empty = {"max_logit": -torch.inf, "top_keys": -1}.get(figure, 0)
            assert (values == empty).all(), figure
        assert len(seen.table()) == 6

"""The rungs: equal to the definition, equal to each other, at home with their sources' states."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import headwise as hw
from headwise.core.reference import attention
from headwise.systems import functional, fused, per_head, split, variants
from support import DV, D, H, S, T

F64 = torch.float64
State = dict[str, Tensor]
PACKED = (variants.FusedQKV, variants.Einsum, variants.SDPAMask, variants.SDPAFlag)
CAUSAL: dict[str, Callable[[], nn.Module]] = {
    "per head": lambda: per_head.MultiHeadedAttentionWrapper(D, 3, T, 0.0, H),
    "notebook": lambda: per_head.NotebookMultiHead(D, T, 0.0, H),
    "split": lambda: split.MultiHeadAttn(D, 2 * H, T, 0.0, H),
    "fused": lambda: gpt2(D, 1),
    **{kind.__name__: lambda kind=kind: kind(D, 1) for kind in PACKED},
    "torch": lambda: variants.TorchAttention(D, 1),
    "torch, weights": lambda: variants.TorchAttention(D, 1, weights=True),
}


def gpt2(width: int, heads: int, **more: Any) -> fused.GPT2MultiHeadAttention:
    config: Any = SimpleNamespace(n_embd=width, n_head=heads, **more)
    return fused.GPT2MultiHeadAttention(config)


# --- one set of weights for all -------------------------------------------------------------------


def weights(width: int, bias: bool) -> State:
    """Random weights in the layout `functional`."""
    state = {f"W_{part}.weight": torch.randn(width, width, dtype=F64) for part in "qkvo"}
    if bias:
        state |= {f"W_{part}.bias": torch.randn(width, dtype=F64) for part in "qkvo"}
    return state


def converted(state: State, target: str, heads: int) -> State:
    return hw.convert(state, source="functional", target=target, num_heads=heads)


def textbook(state: State, heads: int, x: Tensor) -> Tensor:
    """Projections around the definition, written out."""

    def project(part: str, rows: Tensor) -> Tensor:
        return rows @ state[f"W_{part}.weight"].T + state.get(f"W_{part}.bias", torch.tensor(0.0))

    q, k, v = (project(part, x).unflatten(-1, (heads, -1)).transpose(1, 2) for part in "qkv")
    out = attention(q, k, v, mask=hw.Causal()).out
    return project("o", out.transpose(1, 2).flatten(2))


class Joined(nn.Module):
    """The wrapper with the output projection that it has none of."""

    def __init__(self, width: int, heads: int, length: int, bias: bool) -> None:
        super().__init__()
        self.inner = per_head.MultiHeadedAttentionWrapper(
            width, width // heads, length, 0.0, heads, bias
        )
        self.W_o = nn.Linear(width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.W_o(self.inner(x))


def joined(state: State, width: int, heads: int, length: int, bias: bool) -> Joined:
    made = Joined(width, heads, length, bias).double()
    identity = {"W_o.weight": torch.eye(width, dtype=F64)}
    if bias:
        identity["W_o.bias"] = torch.zeros(width, dtype=F64)
    made.inner.load_state_dict(converted(state | identity, "per_head", heads))
    made.W_o.load_state_dict(
        {name[4:]: tensor for name, tensor in state.items() if name.startswith("W_o.")}
    )
    return made


def rungs(state: State, width: int, heads: int, length: int, bias: bool) -> dict[str, nn.Module]:
    """Every rung with these weights, by the layout that it has."""
    made: dict[str, nn.Module] = {
        "split": split.MultiHeadAttn(width, width, length, 0.0, heads, qkv_bias=bias),
        "functional": functional.MultiHead(width, heads, bias=bias),
        "gpt2": gpt2(width, heads),
        "torch": variants.TorchAttention(width, heads, bias=bias),
        "headwise": variants.Einsum(width, heads, bias=bias),
    }
    for layout, module in made.items():
        module.double().load_state_dict(converted(state, layout, heads))
    made["torch, weights"] = variants.TorchAttention(width, heads, bias, weights=True).double()
    made["torch, weights"].load_state_dict(converted(state, "torch", heads))
    for kind in PACKED:
        made[kind.__name__] = kind(width, heads, bias).double()
        made[kind.__name__].load_state_dict(converted(state, "headwise", heads))
    return made


def run(module: nn.Module, x: Tensor) -> Tensor:
    if isinstance(module, functional.MultiHead):
        return module(x, mask=torch.ones(x.shape[1], x.shape[1]).tril().bool())[0]
    return module(x)


def layout_of(name: str) -> str:
    return {"torch, weights": "torch"}.get(name, name if name.islower() else "headwise")


sizes = st.fixed_dictionaries(
    {
        "batch": st.integers(1, 3),
        "length": st.integers(1, 9),
        "heads": st.integers(1, 4),
        "dim": st.integers(1, 5),
        "bias": st.booleans(),
    }
)


@given(sizes)
def test_every_rung_is_the_definition_and_so_are_its_gradients(size: dict[str, Any]) -> None:
    heads, length, bias = size["heads"], size["length"], size["bias"]
    width = heads * size["dim"]
    state = weights(width, bias)
    x = torch.randn(size["batch"], length, width, dtype=F64, requires_grad=True)
    pull = torch.randn_like(x)
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in state.items()}
    expected = textbook(leaves, heads, x)
    exact = torch.autograd.grad(expected, [x, *leaves.values()], pull)
    made = rungs(state, width, heads, length, bias)
    for name, module in made.items():
        out = run(module, x)
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-10, msg=name)
        (grad,) = torch.autograd.grad(out, x, pull, retain_graph=True)
        torch.testing.assert_close(grad, exact[0], rtol=0, atol=1e-8, msg=name)
        out.backward(pull)
        # Conversion only moves numbers, so it moves gradients as well as weights.
        grads = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
        assert len(grads) == len(list(module.parameters()))
        back = hw.convert(grads, source=layout_of(name), target="functional", num_heads=heads)
        for weight, want in zip(leaves, exact[1:], strict=True):
            torch.testing.assert_close(
                back[weight], want, rtol=0, atol=1e-8, msg=f"{name} {weight}"
            )
    module = joined(state, width, heads, length, bias)
    out = module(x)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-10)
    out.backward(pull)
    torch.testing.assert_close(module.W_o.weight.grad, exact[1 + list(leaves).index("W_o.weight")])
    inner: Any = module.inner.heads[0]
    first = inner.W_query.weight.grad
    want = exact[1 + list(leaves).index("W_q.weight")][: size["dim"]]
    torch.testing.assert_close(first, want, rtol=0, atol=1e-8)
    torch.testing.assert_close(x.grad, exact[0] * (1 + len(made)), rtol=0, atol=1e-7)


@given(sizes, st.integers(1, 7), st.integers(0, 3))
def test_inputs_of_another_width_and_a_longer_context(
    size: dict[str, Any], d_in: int, spare: int
) -> None:
    heads, dim, length = size["heads"], size["dim"], size["length"]
    wrapper = per_head.MultiHeadedAttentionWrapper(
        d_in, dim, length + spare, 0.0, heads, size["bias"]
    ).double()
    x = torch.randn(size["batch"], length, d_in, dtype=F64)
    modules: Any = wrapper.heads
    parts = [[h.W_query(x), h.W_key(x), h.W_value(x)] for h in modules]
    q, k, v = (torch.stack([part[n] for part in parts], dim=1) for n in range(3))
    expected = attention(q, k, v, mask=hw.Causal()).out.transpose(1, 2).flatten(2)
    torch.testing.assert_close(wrapper(x), expected, rtol=0, atol=1e-10)

    joint = split.MultiHeadAttn(d_in, heads * dim, length + spare, 0.0, heads, size["bias"])
    joint.double().load_state_dict(
        hw.convert(wrapper.state_dict(), source="per_head", target="split"), strict=True
    )
    torch.testing.assert_close(joint(x), expected, rtol=0, atol=1e-10)


# --- the notebook ---------------------------------------------------------------------------------


@pytest.mark.parametrize("faithful", [False, True])
def test_the_notebook_right_and_wrong(faithful: bool) -> None:
    layer: Any = per_head.NotebookMultiHead(D, 11, 0.0, num_heads=3, faithful=faithful).double()
    x = torch.randn(2, T, D, dtype=F64)
    divisor = T**0.5 if faithful else D**0.5
    later = torch.ones(T, T).triu(1).bool()
    expected = []
    for head in layer.heads:
        scores = (x @ head.W_q) @ (x @ head.W_k).mT / divisor
        expected.append(scores.masked_fill(later, -torch.inf).softmax(-1) @ (x @ head.W_v))
    torch.testing.assert_close(layer(x), torch.cat(expected, -1), rtol=0, atol=1e-10)


def test_the_notebooks_faults_matter() -> None:
    wrong: Any = per_head.NotebookMultiHead(16, T, 0.0, num_heads=3, faithful=True)
    right: Any = per_head.NotebookMultiHead(16, T, 0.0, num_heads=3)
    assert min(head.W_q.min() for head in wrong.heads) >= 0
    assert min(head.W_q.min() for head in right.heads) < 0
    x = torch.randn(2, T, 16)
    right.load_state_dict(wrong.state_dict())
    assert not torch.allclose(right(x), wrong(x), atol=1e-3)


def test_the_notebook_is_known_to_convert() -> None:
    layer = per_head.NotebookMultiHead(D, T, 0.0, num_heads=3).double()
    as_split = split.MultiHeadAttn(D, 3 * D, T, 0.0, num_heads=3).double()
    as_split.load_state_dict(hw.convert(layer.state_dict(), source="notebook", target="split"))
    x = torch.randn(2, T, D, dtype=F64)
    torch.testing.assert_close(as_split(x), layer(x), rtol=0, atol=1e-10)


# --- the tutorials' shapes and states -------------------------------------------------------------


@pytest.mark.parametrize(
    ("layer", "shape", "expected"),
    [
        (per_head.CausalAttention(3, 2, 6, 0.0), (2, 6, 3), (2, 6, 2)),
        (per_head.MultiHeadedAttentionWrapper(3, 2, 6, 0.0, num_heads=2), (2, 6, 3), (2, 6, 4)),
        (per_head.NotebookMultiHead(5, 6, 0.0, num_heads=3), (2, 6, 5), (2, 6, 15)),
        (split.MultiHeadAttn(3, 2, 6, 0.0, num_heads=2), (2, 6, 3), (2, 6, 2)),
        (split.MultiHeadAttn(768, 768, 1024, 0.0, num_heads=12), (1, 4, 768), (1, 4, 768)),
        (gpt2(768, 12), (1, 4, 768), (1, 4, 768)),
    ],
)
def test_shapes_are_those_of_the_tutorials(
    layer: nn.Module, shape: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    assert layer(torch.randn(shape)).shape == expected


def test_states_have_the_tutorials_names() -> None:
    head = {"mask", "W_query.weight", "W_key.weight", "W_value.weight"}
    biases = {"W_query.bias", "W_key.bias", "W_value.bias"}
    wrapper = per_head.MultiHeadedAttentionWrapper(3, 2, 6, 0.0, 2).state_dict()
    assert set(wrapper) == {f"heads.{n}.{name}" for n in (0, 1) for name in head}
    joint = split.MultiHeadAttn(4, 4, 6, 0.0, 2, qkv_bias=True).state_dict()
    assert set(joint) == head | biases | {"out_proj.weight", "out_proj.bias"}
    assert torch.equal(joint["mask"], torch.ones(6, 6).triu(1))
    notebook = per_head.NotebookMultiHead(5, 6, 0.0, 1).state_dict()
    assert set(notebook) == {f"heads.0.{name}" for name in ("mask", "W_q", "W_k", "W_v")}
    attn = gpt2(12, 3).state_dict()
    assert {name: tuple(tensor.shape) for name, tensor in attn.items()} == {
        "c_attn.weight": (12, 36),
        "c_attn.bias": (36,),
        "c_proj.weight": (12, 12),
        "c_proj.bias": (12,),
    }


@pytest.mark.parametrize("name", ["per head", "notebook", "split"])
@pytest.mark.parametrize("nested", [False, True])
def test_a_state_loads_with_its_mask_and_without(name: str, nested: bool) -> None:
    source, target = (
        nn.ModuleDict({"attn": made}) if nested else made
        for made in (CAUSAL[name](), CAUSAL[name]())
    )
    state = source.state_dict()
    bare = {key: tensor for key, tensor in state.items() if not key.endswith("mask")}
    assert bare.keys() < state.keys()
    x = torch.randn(2, T, D)
    for given_state in (state, bare):
        before = dict(given_state)
        assert target.load_state_dict(given_state, strict=True) is not None
        assert dict(given_state) == before
        a, b = (part["attn"] if nested else part for part in (source, target))  # type: ignore[index]
        assert torch.equal(a(x), b(x))
    bare.pop(next(iter(bare)))
    with pytest.raises(RuntimeError, match="Missing key"):
        target.load_state_dict(bare)


def test_a_copy_keeps_its_own_mask() -> None:
    layer = split.MultiHeadAttn(4, 4, T, 0.0, 2)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        state = {key: tensor for key, tensor in layer.state_dict().items() if key != "mask"}
        with torch.no_grad():
            layer.mask.zero_()
        twin.load_state_dict(state)
        assert twin.mask.sum() == T * (T - 1) / 2
        with torch.no_grad():
            layer.mask.copy_(twin.mask)


# --- functional -----------------------------------------------------------------------------------


def test_cross_attention_with_widths_of_its_own() -> None:
    layer = functional.MultiHead(12, h=H, d_k=D, d_v=DV, bias=True).double()
    x, context = torch.randn(2, T, 12, dtype=F64), torch.randn(2, S, 12, dtype=F64)
    values = torch.randn(2, S, 12, dtype=F64)
    out, seen = layer(x, context, values)
    q, k, v = (
        linear(rows).unflatten(-1, (H, -1)).transpose(1, 2)
        for linear, rows in ((layer.W_q, x), (layer.W_k, context), (layer.W_v, values))
    )
    exact = attention(q, k, v)
    expected = layer.W_o(exact.out.transpose(1, 2).flatten(2))
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(seen, exact.weights, rtol=0, atol=1e-10)
    assert seen.shape == (2, H, T, S)
    torch.testing.assert_close(seen.sum(-1), torch.ones(2, H, T, dtype=F64))
    assert torch.equal(layer(x, context)[0], layer(x, context, context)[0])
    assert torch.equal(layer(x)[0], layer(x, x, x)[0])


@pytest.mark.parametrize("shape", [(T, S), (1, 1, T, S), (2, 1, T, S), (1, H, T, S), (2, H, T, S)])
def test_masks_and_queries_that_may_see_nothing(shape: tuple[int, ...]) -> None:
    layer = functional.MultiHead(12, h=H, bias=True).double()
    layer.W_o.bias.data.zero_()
    mask = torch.rand(shape) > 0.6
    mask[..., 2, :] = False
    x = torch.randn(2, T, 12, dtype=F64, requires_grad=True)
    context = torch.randn(2, S, 12, dtype=F64, requires_grad=True)
    out, seen = layer(x, context, mask=mask)
    q, k, v = (
        linear(rows).unflatten(-1, (H, -1)).transpose(1, 2)
        for linear, rows in ((layer.W_q, x), (layer.W_k, context), (layer.W_v, context))
    )
    exact = attention(q, k, v, mask=hw.Dense(mask if mask.ndim == 4 else mask[None, None]))
    torch.testing.assert_close(seen, exact.weights, rtol=0, atol=1e-10)
    assert (seen[:, :, 2] == 0).all()
    assert (out[:, 2] == 0).all()
    assert (seen.masked_select(~mask.expand(seen.shape)) == 0).all()
    rows = exact.allowed.any(-1).double()
    torch.testing.assert_close(seen.sum(-1), rows, rtol=0, atol=1e-12)
    grads = torch.autograd.grad(out.square().sum(), [x, context])
    assert all(grad.isfinite().all() for grad in grads)
    assert (grads[0][:, 2] == 0).all()
    want = layer.W_o(exact.out.transpose(1, 2).flatten(2)).square().sum()
    for got, grad in zip(grads, torch.autograd.grad(want, [x, context]), strict=True):
        torch.testing.assert_close(got, grad, rtol=0, atol=1e-8)


def test_any_leading_dimensions() -> None:
    Q, K, V = torch.randn(2, 3, T, D), torch.randn(3, S, D), torch.randn(2, 1, S, DV)
    mask = torch.rand(3, 1, S) > 0.3
    out, seen = functional.scaled_dot_product_attention(Q, K, V, mask)
    assert out.shape == (2, 3, T, DV)
    assert seen.shape == (2, 3, T, S)
    for b in range(2):
        for h in range(3):
            one = functional.scaled_dot_product_attention(Q[b, h], K[h], V[b, 0], mask[h])
            torch.testing.assert_close(out[b, h], one[0])
            torch.testing.assert_close(seen[b, h], one[1])
    batches = torch.randn(2, 3, T, 12)
    layer = functional.MultiHead(12, h=2)
    out, seen = layer(batches)
    torch.testing.assert_close(out[1], layer(batches[1])[0])
    assert seen.shape == (2, 3, 2, T, T)


# --- fused ----------------------------------------------------------------------------------------


def test_the_mask_is_aligned_to_the_end() -> None:
    inf = torch.inf
    assert fused.causal_mask(3, 0).tolist() == [[0, -inf, -inf], [0, 0, -inf], [0, 0, 0]]
    assert fused.causal_mask(2, 2).tolist() == [[0, 0, 0, -inf], [0, 0, 0, 0]]
    assert fused.causal_mask(1, 4).tolist() == [[0, 0, 0, 0, 0]]
    half = fused.causal_mask(2, 1, dtype=torch.float16)
    assert half.dtype == torch.float16
    for length, past in ((T, 0), (T, 4), (1, 9)):
        whole = fused.causal_mask(length + past, 0)
        assert torch.equal(fused.causal_mask(length, past), whole[past:])


@pytest.mark.parametrize("chunks", [[T], [3, 4], [1] * T, [5, 1, 1]])
def test_a_cache_changes_nothing(chunks: list[int]) -> None:
    layer = gpt2(15, 3, n_positions=T).double()
    nn.init.normal_(layer.c_attn.bias)
    x = torch.randn(2, T, 15, dtype=F64)
    keys = values = torch.empty(2, 3, 0, 5, dtype=F64)
    parts = []
    for chunk in x.split(chunks, dim=1):
        out, keys, values = layer.attend_cached(chunk, keys, values)
        parts.append(out)
    torch.testing.assert_close(torch.cat(parts, 1), layer(x), rtol=0, atol=1e-10)
    assert keys.shape == values.shape == (2, 3, T, 5)


def test_hugging_faces_layer_loads_and_gives_the_same() -> None:
    from transformers import GPT2Config
    from transformers.models.gpt2.modeling_gpt2 import GPT2Attention

    eager: dict[str, Any] = {"attn_implementation": "eager"}
    config: Any = GPT2Config(n_embd=60, n_head=5, n_positions=32, **eager)
    theirs: Any = GPT2Attention(config, layer_idx=0).eval()
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.1)
    ours = fused.GPT2MultiHeadAttention(config).eval()
    old = {
        "bias": torch.ones(1, 1, 32, 32, dtype=torch.bool).tril(),
        "masked_bias": torch.tensor(-1e4),
    }
    x = torch.randn(2, 23, 60)
    later = torch.full((23, 23), torch.finfo(torch.float32).min).triu(1)[None, None]
    expected = theirs(x, attention_mask=later)[0]
    for state in (theirs.state_dict(), theirs.state_dict() | old):
        ours.load_state_dict(state, strict=True)
        torch.testing.assert_close(ours(x), expected, rtol=0, atol=1e-6)
    whole = nn.ModuleDict({"attn": ours})
    nested = {f"attn.{name}": tensor for name, tensor in (theirs.state_dict() | old).items()}
    assert not whole.load_state_dict(nested, strict=True).missing_keys
    theirs.load_state_dict(ours.state_dict(), strict=True)
    assert ours.train().attn_dropout.p == 0.1
    assert not torch.equal(ours(x), ours(x))


# --- variants -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", PACKED)
@pytest.mark.parametrize("bias", [True, False])
def test_variants_load_headwises_own_state(kind: type[variants.Packed], bias: bool) -> None:
    ours = hw.MultiHeadAttention(30, 3, bias=bias).double()
    theirs = kind(30, 3, bias=bias).double()
    theirs.load_state_dict(ours.state_dict(), strict=True)
    x = torch.randn(2, T, 30, dtype=F64)
    torch.testing.assert_close(theirs(x), ours(x, mask=hw.Causal()), rtol=0, atol=1e-10)


# --- all of them ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CAUSAL)
def test_the_future_is_never_seen(name: str) -> None:
    layer = CAUSAL[name]().double()
    x = torch.randn(2, T, D, dtype=F64)
    changed = x.clone()
    changed[:, 4:] = torch.randn(2, T - 4, D, dtype=F64)
    assert torch.equal(layer(x)[:, :4], layer(changed)[:, :4])
    assert not torch.equal(layer(x)[:, 4:], layer(changed)[:, 4:])


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("scale", [0.0, 1e4])
def test_outputs_and_gradients_are_finite(name: str, scale: float) -> None:
    layer = CAUSAL[name]()
    x = (scale * torch.randn(2, T, D)).requires_grad_()
    out = layer(x)
    out.sum().backward()
    assert out.isfinite().all()
    assert x.grad is not None
    assert x.grad.isfinite().all()
    assert layer(torch.randn(2, 1, D)).shape[1] == 1


@pytest.mark.parametrize("layer", [
    per_head.CausalAttention(D, 3, T, 0.5),
    per_head.NotebookCausalAttention(D, T, 0.5),
    split.MultiHeadAttn(D, 6, T, 0.5, 2),
    gpt2(6, 2, attn_pdrop=0.5),
])  # fmt: skip
def test_dropout_is_of_the_weights_and_only_in_training(layer: nn.Module) -> None:
    width = D if not isinstance(layer, fused.GPT2MultiHeadAttention) else 6
    x = torch.randn(2, T, width)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))
    # Over many draws the mean is the output without: weights that stay are scaled up.
    exact = layer(x[:1])
    layer.train()
    mean = layer(x[:1].expand(4000, -1, -1)).mean(0, keepdim=True)
    torch.testing.assert_close(mean, exact, rtol=0, atol=0.15)


# --- refusals -------------------------------------------------------------------------------------

one = torch.randn(2, T, 12)
BAD: list[tuple[Callable[[], Any], str]] = [
    (
        lambda: split.MultiHeadAttn(12, 12, T, 0.0, num_heads=5),
        r"MultiHeadAttn\(d_out=12, num_heads=5\): d_out must be a multiple of num_heads",
    ),
    (
        lambda: split.MultiHeadAttn(12, 12, T, 0.0, num_heads=3)(torch.randn(2, T + 1, 12)),
        "a sequence of 8 tokens does not fit the context of 7",
    ),
    (
        lambda: per_head.CausalAttention(12, 3, T, 0.0)(torch.randn(2, T + 2, 12)),
        "a sequence of 9 tokens does not fit the context of 7",
    ),
    (
        lambda: per_head.NotebookMultiHead(12, T, 0.0, 2)(torch.randn(2, T + 3, 12)),
        "a sequence of 10 tokens does not fit the context of 7",
    ),
    (lambda: gpt2(12, 3, n_positions=5)(one), "a sequence of 7 tokens does not fit .* of 5"),
    (
        lambda: split.MultiHeadAttn(12, 12, T, 0.0, 3)(torch.randn(T, 12)),
        r"MultiHeadAttn\(…\)\(\[7, 12\]\): the input must be \[B, T, 12\]",
    ),
    (
        lambda: per_head.CausalAttention(12, 3, T, 0.0)(torch.randn(2, T, 11)),
        r"the input must be \[B, T, 12\]",
    ),
    (lambda: split.MultiHeadAttn(12, 12, T, 1.0, 3), r"dropout must be in \[0, 1\)"),
    (lambda: per_head.CausalAttention(12, 3, T, -0.1), r"dropout must be in \[0, 1\)"),
    (lambda: per_head.NotebookMultiHead(12, T, 2.0, 1), r"dropout must be in \[0, 1\)"),
    (lambda: gpt2(12, 3, attn_pdrop=1.5), r"attn_pdrop must be in \[0, 1\)"),
    (lambda: split.MultiHeadAttn(0, 12, T, 0.0, 3), "d_in must be at least 1"),
    (lambda: split.MultiHeadAttn(12, 12, 0, 0.0, 3), "context_length must be at least 1"),
    (lambda: per_head.MultiHeadedAttentionWrapper(3, 2, T, 0.0, 0), "num_heads must be at least 1"),
    (lambda: per_head.NotebookMultiHead(5, T, 0.0, 0), "num_heads must be at least 1"),
    (lambda: functional.MultiHead(12, 5), "d_model must be a multiple of h"),
    (lambda: functional.MultiHead(12, 3, d_k=0), "d_k must be at least 1"),
    (lambda: gpt2(12, 5), "n_embd must be a multiple of n_head"),
    (lambda: gpt2(12, 3, scale_attn_weights=False), "scale_attn_weights must be True"),
    (
        lambda: gpt2(12, 3, scale_attn_by_inverse_layer_idx=True),
        "scale_attn_by_inverse_layer_idx must be False",
    ),
    (
        lambda: gpt2(12, 3).attend_cached(one, torch.randn(2, 3, 5, 4), torch.randn(2, 3, 6, 4)),
        r"past_key and past_value must be \[2, 3, P, 4\]",
    ),
    (
        lambda: gpt2(12, 3, n_positions=10).attend_cached(one, *torch.randn(2, 2, 3, 4, 4)),
        "4 cached and 7 new tokens do not fit the context of 10",
    ),
    (lambda: functional.MultiHead(12, 3)(torch.randn(2, T, 11)), r"Q must be \[..., length, 12\]"),
    (
        lambda: functional.MultiHead(12, 3)(one, mask=torch.ones(2, T, T).bool()),
        "have an axis for the heads",
    ),
    (
        lambda: functional.MultiHead(12, 3)(one, mask=torch.ones(T, T)),
        "the mask must be bool, True where a query may attend, got torch.float32",
    ),
    (
        lambda: functional.MultiHead(12, 3)(one, mask=torch.ones(T, S).bool()),
        r"must broadcast to \[..., T, S\] = \[2, 3, 7, 7\]",
    ),
    (
        lambda: functional.MultiHead(12, 3)(one, mask=torch.ones(5, 3, T, T).bool()),
        r"must broadcast to \[..., T, S\] = \[2, 3, 7, 7\]",
    ),
    (
        lambda: functional.scaled_dot_product_attention(one, one[..., :5], one),
        "Q and K must have the same d_k",
    ),
    (
        lambda: functional.scaled_dot_product_attention(one, one, one[:, :5]),
        "K and V must have the same length",
    ),
    (
        lambda: functional.scaled_dot_product_attention(one, torch.randn(3, T, 12), one),
        "leading axes of Q, K and V do not broadcast",
    ),
    (lambda: variants.FusedQKV(12, 5), r"FusedQKV\(.*embed_dim must be a multiple of num_heads"),
    (lambda: variants.TorchAttention(12, 0), "num_heads must be at least 1"),
    (lambda: variants.SDPAFlag(12, 3)(torch.randn(2, T, 11)), r"must be \[B, T, 12\]"),
]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("call", "message"), BAD, ids=[message[:40] for _, message in BAD])
def test_refusals_say_what_is_wrong(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)

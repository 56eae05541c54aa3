"""MultiHeadAttention against einsum by hand, and what it promises besides."""

import copy
import io
import math
from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fresh
from headwise.core import observers
from headwise.core.masks import Bias, Causal, Dense, Padding, Window
from headwise.layers.attention import MultiHeadAttention
from headwise.layers.rope import RoPE

B, T, S, D, E, C, O = 2, 7, 11, 10, 17, 13, 19  # H 6 and G 2 or 3 below

CONFIGS = {
    "plain": {},
    "grouped": {"num_kv_heads": 2},
    "multi_query": {"num_kv_heads": 1},
    "no_bias": {"bias": False},
    "only_q_bias": {"bias": (True, False, False)},
    "only_k_bias": {"bias": (False, True, False), "num_kv_heads": 3},
    "no_k_bias": {"bias": (True, False, True), "out_bias": False},
    "no_q_bias": {"bias": (False, True, True), "num_kv_heads": 2},
    "only_v_bias": {"bias": (False, False, True)},
    "only_out_bias": {"bias": False, "out_bias": True},
    "out_dim": {"out_dim": O},
    "scale_and_softcap": {"scale": 0.9, "softcap": 1.5},
    "qk_norm": {"qk_norm": True, "num_kv_heads": 2},
    "rope": {"rope": RoPE(D, base=50.0)},
    "everything": {
        "num_kv_heads": 3,
        "rope": RoPE(6, base=50.0, interleaved=True),
        "qk_norm": True,
        "softcap": 2.0,
        "out_dim": O,
        "bias": (True, False, True),
    },
}


def make(seed: int = 0, **options) -> MultiHeadAttention:
    """A float64 layer whose every parameter is random, biases and norms too."""
    torch.manual_seed(seed)
    options = {"head_dim": D, "dtype": torch.float64, **options}
    layer = MultiHeadAttention(E, 6, **options)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return layer


def inputs(*shape: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def sections(layer: MultiHeadAttention) -> dict[str, tuple[Tensor, Tensor | float]]:
    """Weight and bias of q, k and v, taken from the documented layout: q's rows, k's, v's."""
    rows = {"q": layer.num_heads * D, "k": layer.num_kv_heads * D, "v": layer.num_kv_heads * D}
    if layer.kv_dim == layer.embed_dim:
        weights = dict(zip(rows, layer.qkv.weight.split(list(rows.values())), strict=True))
        bias = layer.qkv.bias
        shared = list(rows)
    else:
        k, v = layer.kv.weight.chunk(2)
        weights, bias, shared = {"q": layer.q.weight, "k": k, "v": v}, layer.kv.bias, ["k", "v"]
    bias = layer.some_bias if bias is None else bias
    found, start = {name: (weight, 0.0) for name, weight in weights.items()}, 0
    for name, on in zip("qkv", layer.bias, strict=True):
        if name in shared and on:
            assert bias is not None
            found[name] = weights[name], bias[start : start + rows[name]]
            start += rows[name]
    assert start == (0 if bias is None else len(bias))  # no element of a bias is unused
    if "q" not in shared and layer.bias[0]:
        found["q"] = layer.q.weight, layer.q.bias
    return found


def turned(x: Tensor, rope: RoPE) -> Tensor:
    """The rotation by its definition: pair i of position t turns by `t · base^(−2i/dim)`."""
    x = x.clone()
    half = rope.dim // 2
    steps = torch.arange(x.shape[2], dtype=x.dtype)
    for i in range(half):
        one, two = (2 * i, 2 * i + 1) if rope.interleaved else (i, i + half)
        angle = steps * rope.base ** (-2 * i / rope.dim)
        a, b = x[..., one].clone(), x[..., two].clone()
        x[..., one] = a * angle.cos() - b * angle.sin()
        x[..., two] = a * angle.sin() + b * angle.cos()
    return x


def by_hand(
    layer: MultiHeadAttention,
    x: Tensor,
    context: Tensor | None = None,
    allowed: Tensor | None = None,
) -> Tensor:
    """The textbook, with einsum, from the layer's own weights."""
    source = x if context is None else context
    made = {}
    for name, (weight, bias) in sections(layer).items():
        rows = torch.einsum("bte,re->btr", x if name == "q" else source, weight) + bias
        made[name] = rows.unflatten(-1, (-1, D)).transpose(1, 2)
    for name in "qk":
        norm = layer.get_submodule(f"{name}_norm") if layer.q_norm is not None else None
        if isinstance(norm, nn.RMSNorm):
            size = made[name].square().mean(-1, keepdim=True)
            made[name] = made[name] / (size + 1e-6).sqrt() * norm.weight
        if layer.rope is not None:
            made[name] = turned(made[name], layer.rope)
    k, v = (made[name].repeat_interleave(6 // layer.num_kv_heads, dim=1) for name in "kv")
    scale = D**-0.5 if layer.scale is None else layer.scale
    scores = torch.einsum("bhtd,bhsd->bhts", made["q"], k) * scale
    if layer.softcap is not None:
        scores = layer.softcap * (scores / layer.softcap).tanh()
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -math.inf)
    heads = torch.einsum("bhts,bhsd->bthd", scores.softmax(-1), v)
    out = torch.einsum("btr,or->bto", heads.flatten(2), layer.out.weight)
    return out if layer.out.bias is None else out + layer.out.bias


def close(ours: Tensor, theirs: Tensor) -> bool:
    """Equal in float64 up to the rounding of sums of a few hundred terms."""
    ours, theirs = ours.detach(), theirs.detach()
    return torch.allclose(ours, theirs, rtol=0, atol=1e-12 * float(theirs.abs().max() + 1))


@pytest.mark.parametrize("name", CONFIGS)
def test_self_attention_and_its_gradients_by_hand(name):
    layer, x = make(**CONFIGS[name]), inputs(B, T, E).requires_grad_()
    ours = layer(x, mask=Causal())
    theirs = by_hand(layer, x, allowed=torch.ones(T, T, dtype=torch.bool).tril())
    assert ours.shape == (B, T, layer.out_dim)
    assert close(ours, theirs)
    pull = inputs(*ours.shape, seed=2)
    wanted = {"x": x, **dict(layer.named_parameters())}
    mine = torch.autograd.grad((ours * pull).sum(), list(wanted.values()))
    his = torch.autograd.grad((theirs * pull).sum(), list(wanted.values()))
    for parameter, a, b in zip(wanted, mine, his, strict=True):
        assert close(a, b), parameter


@pytest.mark.parametrize("kv_dim", [E, C])
@pytest.mark.parametrize("name", [n for n in CONFIGS if "rope" not in CONFIGS[n]])
def test_cross_attention_by_hand(name, kv_dim):
    layer = make(**CONFIGS[name], kv_dim=kv_dim)
    x, context = inputs(B, T, E), inputs(B, S, kv_dim, seed=3)
    assert close(layer(x, context), by_hand(layer, x, context))
    for parameter in layer.parameters():  # every parameter is used
        parameter.grad = None
    layer(x, context, mask=Dense(torch.rand(T, S) < 0.7)).square().sum().backward()
    assert all(p.grad is not None for p in layer.parameters())


def test_masks_reach_attention():
    layer, x = make(num_kv_heads=2), inputs(B, T, E)
    mask = Window(3) & Padding(torch.tensor([5, 7])) & Bias(inputs(6, 1, T, seed=4))
    behind = torch.arange(T)[:, None] - torch.arange(T)
    allowed = (behind >= 0) & (behind < 3)
    allowed = allowed & (torch.arange(T) < torch.tensor([5, 7])[:, None])[:, None, None]
    heads = make(num_kv_heads=2)
    ours = layer(x, mask=mask)
    q, k, v = heads._project(x, None)
    k, v = (y.repeat_interleave(3, dim=1) for y in (k, v))
    scores = q @ k.mT * D**-0.5 + inputs(6, 1, T, seed=4)
    weights = scores.masked_fill(~allowed, -math.inf).softmax(-1).nan_to_num(0.0)
    assert close(ours, heads.out((weights @ v).transpose(1, 2).flatten(2)))


def test_one_product_for_q_k_v_and_no_copies():
    class Count(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.calls: Counter[str] = Counter()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.calls[func.overloadpacket.__name__] += 1
            return func(*args, **(kwargs or {}))

    layer, x = make(dtype=torch.float32), inputs(B, T, E).float()
    with torch.no_grad(), Count() as own:
        layer(x, mask=Causal())
    with torch.no_grad(), Count() as cross:
        layer(x, x)
    assert own.calls["addmm"] + own.calls["mm"] == 2
    assert cross.calls["addmm"] + cross.calls["mm"] == 3
    copies = {"copy_", "clone", "_to_copy", "cat", "contiguous"}
    assert not copies & set(own.calls) | copies & set(cross.calls)
    q, k, v = layer._project(x, None)
    assert q.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
    assert [y.shape[1] for y in (q, k, v)] == [6, 6, 6]


def test_dropout_is_for_training_only():
    x = inputs(B, T, E)
    layer, same = make(dropout=0.5), make()
    layer.eval()
    assert torch.equal(layer(x, mask=Causal()), same(x, mask=Causal()))
    layer.train()
    first, second = layer(x, mask=Causal()), layer(x, mask=Causal())
    assert not torch.allclose(first, second)
    torch.manual_seed(0)
    mean = sum(layer(x, mask=Causal()) for _ in range(100)) / 100
    spread = (first - same(x, mask=Causal())).abs().max() / 100**0.5
    assert (mean - same(x, mask=Causal())).abs().max() < 8 * spread


def test_an_observer_takes_the_place_of_attend():
    layer, x, calls = make(softcap=3.0, dropout=0.1).eval(), inputs(B, T, E), []

    def observer(call, backend, run):
        keywords = {"mask": call.mask, "softcap": call.softcap, "dropout": call.dropout}
        keywords |= {"sinks": call.sinks, "backend": backend}
        calls.append((observers.HERE.source, call.q.shape, call.k.shape, call.v.shape, keywords))
        return torch.zeros_like(call.q)

    mask = Causal()
    observers.observers.append(observer)
    try:
        out = layer(x, mask=mask)
    finally:
        observers.observers.remove(observer)
    assert torch.equal(out, layer.out.bias.expand_as(out))
    keywords = {"mask": mask, "softcap": 3.0, "dropout": 0.0, "sinks": None, "backend": "auto"}
    assert calls == [((layer, True, 0), (B, 6, T, D), (B, 6, T, D), (B, 6, T, D), keywords)]
    assert observers.HERE.source is None


@pytest.mark.parametrize("name", CONFIGS)
def test_copies_and_saved_states(name):
    layer, x = make(**CONFIGS[name]), inputs(B, T, E)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    other = make(seed=9, **CONFIGS[name])
    assert not torch.equal(other(x), layer(x))
    other.load_state_dict(torch.load(file), strict=True)
    assert torch.equal(other(x), layer(x))
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))


def test_it_starts_as_xavier_uniform_with_zero_biases():
    layer = MultiHeadAttention(64, 6, head_dim=20, num_kv_heads=2, bias=(True, True, False))
    layer.out_bias = True
    assert layer.some_bias is not None
    assert layer.some_bias.shape == (160,)
    weights = [*layer.qkv.weight.split([120, 40, 40]), layer.out.weight]
    for weight in weights:
        bound = (6 / sum(weight.shape)) ** 0.5
        assert 0.95 * bound < weight.abs().max() <= bound
    assert not layer.some_bias.any()
    assert not layer.out.bias.any()
    before = {name: p.clone() for name, p in layer.named_parameters()}
    layer.reset_parameters()
    assert not torch.equal(before["qkv.weight"], layer.qkv.weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_is_as_good_as_the_textbooks(dtype):
    layer = make(**CONFIGS["everything"])
    x, seen = inputs(B, T, E), torch.ones(T, T, dtype=torch.bool).tril()
    low, low_x = copy.deepcopy(layer).to(dtype), x.to(dtype)
    exact = by_hand(copy.deepcopy(low).double(), low_x.double(), allowed=seen)
    ours = (low(low_x, mask=Causal()) - exact).abs().max()
    theirs = (by_hand(low, low_x, allowed=seen) - exact).abs().max()
    assert low(low_x, mask=Causal()).dtype == dtype
    assert ours <= 2 * theirs


def test_autocast():
    layer, x = make(**CONFIGS["everything"], dtype=torch.float32), inputs(B, T, E).float()
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x, mask=Causal())
    assert out.dtype == torch.bfloat16
    exact = layer(x, mask=Causal())
    assert (out - exact).abs().max() < 8 * torch.finfo(torch.bfloat16).eps * exact.abs().max()


def test_other_devices():
    layer = make(device="meta")
    assert {p.device.type for p in layer.parameters()} == {"meta"}
    assert layer._project(torch.empty(B, T, E, device="meta"), None)[0].is_meta


COMPILED = """
import torch, headwise as hw
layer = hw.MultiHeadAttention(24, 3, num_kv_heads=1, qk_norm=True, rope=hw.RoPE(8),
                              bias=(True, False, True), dtype=torch.float64)
compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
for shape in (2, 7, 24), (3, 11, 24):
    x = torch.randn(shape, dtype=torch.float64)
    torch.testing.assert_close(compiled(x, mask=hw.Causal()), layer(x, mask=hw.Causal()))
compiled(x, mask=hw.Causal()).sum().backward()
assert layer.qkv.weight.grad is not None
"""


def test_compilation_without_a_graph_break():
    """In a process of its own: the shape checks of the test run cannot be traced."""
    ran = fresh.run(COMPILED)
    assert ran.returncode == 0, ran.stderr


def test_repr_names_what_is_not_usual():
    layer = MultiHeadAttention(12, 3, num_kv_heads=1, bias=False, rope=RoPE(4), softcap=30.0)
    assert layer.extra_repr() == (
        "embed_dim=12, num_heads=3, num_kv_heads=1, bias=(False, False, False), "
        "rope=RoPE(4, base=10000.0), softcap=30.0"
    )
    assert MultiHeadAttention(12, 3).extra_repr() == "embed_dim=12, num_heads=3"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((10, 3, {}), r"embed_dim=10, num_heads=3\): embed_dim must be a multiple of num_heads"),
        ((12, 6, {"num_kv_heads": 4}), "num_kv_heads=4.*num_heads must be a multiple of num_kv"),
        ((12, 0, {}), "num_heads must be at least 1"),
        ((12, 3, {"head_dim": 0}), "head_dim must be at least 1"),
        ((12, 3, {"dropout": 1.0}), "dropout must be"),
        ((12, 3, {"softcap": 0.0}), "softcap must be above 0"),
        ((12, 3, {"rope": RoPE(6)}), "rope.dim is larger than head_dim=4"),
    ],
)
def test_bad_sizes_quote_the_call(arguments, message):
    embed_dim, num_heads, options = arguments
    with pytest.raises(ValueError, match=message) as caught:
        MultiHeadAttention(embed_dim, num_heads, **options)
    assert str(caught.value).startswith(f"MultiHeadAttention(embed_dim={embed_dim}, num_heads=")


@pytest.mark.usefixtures("unchecked")
def test_bad_calls_quote_the_call():
    layer, other = make(), make(kv_dim=C)
    x, context = inputs(B, T, E), inputs(B, S, E)
    with pytest.raises(ValueError, match=r"x \[2, 7, 13\]\): x must be \[B, T, 17\]"):
        layer(inputs(B, T, 13))
    with pytest.raises(ValueError, match=r"x \[17\]\): x must be"):
        layer(x[0, 0])
    with pytest.raises(ValueError, match="kv_dim=13 requires a context"):
        other(x)
    with pytest.raises(
        ValueError, match=r"context \[2, 11, 17\]\): context must be \[B=2, S, 13\]"
    ):
        other(x, context)
    with pytest.raises(ValueError, match=r"context must be \[B=2"):
        layer(x, context[:1])
    with pytest.raises(ValueError, match="no common positions"):
        make(rope=RoPE(4))(x, context)

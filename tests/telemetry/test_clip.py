"""QK-clip: clipped heads stand at the limit, all others are bit for bit as they were."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise as hw
from headwise.systems import per_head
from headwise.weights.convert import stored_tensors
from headwise.weights.detect import find_layers
from headwise.weights.layout_table import LAYOUTS
from headwise.weights.layout_types import LayerSizes
from headwise.weights.packing import refusals, sizes_of, unpack, written

B, T, H, D, E = 2, 7, 4, 6, 24
LIMIT = 100.0


def maxima(model: nn.Module, *inputs: Any, **keywords: Any) -> hw.capture.Watched:
    with torch.no_grad(), hw.watch(model, hw.MaxLogit()) as seen:
        model(*inputs, **keywords)
    return seen


def largest(seen: hw.capture.Watched, name: str) -> Tensor:
    return seen[name]["max_logit"].amax(0)


def some_clipped(tops: Tensor) -> float:
    """A limit between the largest scores of the heads: some are above it, some are not."""
    limit = float(tops.median()) * 1.01
    assert limit > 0
    assert 0 < int((tops > limit).sum()) < len(tops)
    return limit


def assert_clipped(model: nn.Module, name: str, *inputs: Any, rule: str = "query") -> Tensor:
    """Clip, and look at the heads again; what was returned for the module."""
    before = maxima(model, *inputs)
    tops = largest(before, name)
    limit = some_clipped(tops)
    gammas = hw.qk_clip_(model, before, limit=limit, rule=rule)
    after = largest(maxima(model, *inputs), name)
    clipped = tops > limit
    torch.testing.assert_close(
        after[clipped], torch.full_like(after[clipped], limit), rtol=1e-3, atol=0
    )
    if rule == "query":
        assert torch.equal(after[~clipped], tops[~clipped])
    else:
        torch.testing.assert_close(after, tops.clamp(max=limit), rtol=1e-3, atol=0)
    torch.testing.assert_close(gammas[name], (limit / tops.double()).clamp(max=1.0))
    return gammas[name]


# ── every layout ────────────────────────────────────────────────────────────────────────────────


class Stored(nn.Module):
    """A module whose weights are in a layout, and which reads them by the table itself."""

    def __init__(self, layout: str, sizes: LayerSizes, biases: bool) -> None:
        super().__init__()
        self.layout, self.sizes = LAYOUTS[layout], sizes
        parts = {
            f"{p}.weight": torch.randn(sizes.heads_of(p), sizes.dim_of(p), sizes.input_of(p))
            for p in "qkv"
        }
        parts["out.weight"] = torch.randn(sizes.out_width, sizes.num_heads, sizes.value_dim)
        if biases:
            parts |= {f"{p}.bias": torch.randn(sizes.heads_of(p), sizes.dim_of(p)) for p in "qkv"}
            parts["out.bias"] = torch.randn(sizes.out_width)
        form = next((f for f in self.layout.forms if not refusals(parts, sizes, f)), None)
        if form is None:  # heads that are joined without an output projection
            del parts["out.weight"]
            parts.pop("out.bias", None)
            form = next(f for f in self.layout.forms if not refusals(parts, sizes, f))
        for name, tensor in written(parts, sizes, form):
            *path, last = name.replace("/", ".").split(".")
            owner: nn.Module = self
            for step in path:
                if not hasattr(owner, step):
                    owner.add_module(step, nn.Module())
                owner = getattr(owner, step)
            owner.register_parameter(last, nn.Parameter(tensor))

    def parts(self) -> dict[str, Tensor]:
        """The parts, in the order in which the module's heads are."""
        state = {name: p.detach().clone() for name, p in self.named_parameters()}
        shapes = {name: tuple(p.shape) for name, p in state.items()}
        (layer,) = find_layers(self.layout, shapes, "test")
        tensors, patterns = stored_tensors(layer, state.__getitem__)
        sizes = sizes_of(tensors, patterns, self.sizes.num_heads, None, "test")
        assert sizes.num_kv_heads == self.sizes.num_kv_heads
        found: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            found |= unpack(*patterns[name], tensor, sizes)
        return found

    def forward(self, x: Tensor) -> Tensor:
        parts, group = self.parts(), self.sizes.num_heads // self.sizes.num_kv_heads
        q, k, v = (torch.einsum("bti,ndi->bntd", x, parts[f"{p}.weight"]) for p in "qkv")
        if "q.bias" in parts:
            q, k, v = (  # Whisper's keys have no bias
                y + parts[f"{p}.bias"][:, None] if f"{p}.bias" in parts else y
                for p, y in zip("qkv", (q, k, v), strict=True)
            )
        if self.layout.turns:
            k, v = (y.repeat(1, group, 1, 1) for y in (k, v))
        else:
            k, v = (y.repeat_interleave(group, 1) for y in (k, v))
        return F.scaled_dot_product_attention(q, k, v)


class StoredAsGPTBigCode(Stored):
    """Its names are nanoGPT's, so that only its class tells."""


def modules(biases: bool, kv_heads: int) -> list[Any]:
    """Every layout that holds such heads, with its sizes."""
    found = []
    for name, layout in LAYOUTS.items():
        # Heads as wide as the input where they must be so.
        width = D if name == "notebook" else E
        sizes = LayerSizes(
            H, kv_heads, D, D, width, width, width, H * D if name != "notebook" else E
        )
        parts = {
            f"{p}.weight": torch.zeros(sizes.heads_of(p), D, width, device="meta") for p in "qkv"
        }
        if biases:
            parts |= {f"{p}.bias": torch.ones(sizes.heads_of(p), D) for p in "qkv"}
        if any(not refusals(parts, sizes, form) for form in layout.forms):
            found.append(pytest.param(name, sizes, biases, id=f"{name}-{kv_heads}-{biases}"))
    return found


def stored_in(layout: str, sizes: LayerSizes, biases: bool) -> Stored:
    kind = StoredAsGPTBigCode if layout == "gpt_bigcode" else Stored
    return kind(layout, sizes, biases)


CASES = [*modules(True, H), *modules(False, H), *modules(True, 2), *modules(False, 2)]
CASES += modules(True, 1)


def test_cases_are_all_layouts() -> None:
    assert {case.values[0] for case in CASES} == set(LAYOUTS)
    grouped = {case.values[0] for case in CASES if case.values[1].num_kv_heads == 2}
    assert {"headwise", "llama", "internlm2", "x_transformers"} <= grouped


@pytest.mark.parametrize(("layout", "sizes", "biases"), CASES)
def test_every_layout(layout: str, sizes: LayerSizes, biases: bool) -> None:
    torch.manual_seed(0)
    model = stored_in(layout, sizes, biases)
    x, before = torch.randn(B, T, sizes.embed_dim), model.parts()
    gamma = assert_clipped(model, "", x).float()
    after = model.parts()
    assert after.keys() == before.keys()
    for name, old in before.items():
        scaled = name in ("q.weight", "q.bias")
        want = old * gamma.view(-1, *[1] * (old.dim() - 1)) if scaled else old
        assert torch.equal(after[name], want), name
    assert not biases or "q.bias" in before


@pytest.mark.parametrize(("layout", "sizes", "biases"), CASES)
def test_every_layout_with_half_on_keys(layout: str, sizes: LayerSizes, biases: bool) -> None:
    torch.manual_seed(1)
    model = stored_in(layout, sizes, biases)
    x, before = torch.randn(B, T, sizes.embed_dim), model.parts()
    gamma = assert_clipped(model, "", x, rule="both").float()
    after, shared = model.parts(), sizes.num_heads // sizes.num_kv_heads
    heads = torch.arange(H)
    groups = heads % sizes.num_kv_heads if model.layout.turns else heads // shared
    of_keys = torch.stack([gamma[groups == g].min().sqrt() for g in range(sizes.num_kv_heads)])
    for name, old in before.items():
        want = {"q": gamma / of_keys[groups], "k": of_keys}.get(name.split(".")[0])
        want = old if want is None else old * want.view(-1, *[1] * (old.dim() - 1))
        torch.testing.assert_close(after[name], want, rtol=1e-6, atol=0)


# ── modules that people have ────────────────────────────────────────────────────────────────────


def randomised(module: nn.Module, deviation: float = 0.6) -> nn.Module:
    """With weights large enough for heads to differ, biases too."""
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) * deviation)
    return module.eval()


OWN: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: hw.MultiHeadAttention(E, H),
    "grouped": lambda: hw.MultiHeadAttention(E, H, num_kv_heads=2),
    "rotated": lambda: hw.MultiHeadAttention(E, H, rope=hw.RoPE(D), bias=False),
    "sinks, of a scale of its own": lambda: hw.MultiHeadAttention(E, H, sinks=True, scale=0.7),
    "in PyTorch": lambda: nn.TransformerEncoderLayer(E, H, batch_first=True),
}


@pytest.mark.parametrize("rule", ["query", "both"])
@pytest.mark.parametrize("name", OWN)
def test_layers(name: str, rule: str) -> None:
    model = randomised(OWN[name]())
    where = "self_attn" if name == "in PyTorch" else ""
    assert_clipped(model, where, torch.randn(B, T, E), rule=rule)


@pytest.mark.parametrize("kdim", [None, 10])
def test_torchs_own_attention(kdim: int | None) -> None:
    model = randomised(nn.MultiheadAttention(E, H, batch_first=True, kdim=kdim, vdim=kdim))
    context = torch.randn(B, T, kdim or E)
    assert_clipped(model, "", torch.randn(B, T, E), context, context)


def test_cross_attention_of_another_width() -> None:
    model = randomised(hw.MultiHeadAttention(E, H, kv_dim=10))
    assert_clipped(model, "", torch.randn(B, T, E), torch.randn(B, 5, 10))


def test_a_module_that_only_attends_inside_one_that_projects() -> None:
    class Inner(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in ("wq", "wk", "wv", "wo"):
                self.add_module(name, nn.Linear(E, E, bias=False))
            self.inner = Inner()

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (
                m(x).unflatten(-1, (H, D)).transpose(1, 2) for m in (self.wq, self.wk, self.wv)
            )
            return self.wo(self.inner(q, k, v).transpose(1, 2).flatten(2))

    model = randomised(nn.Sequential(nn.Linear(E, E), Attention()))
    assert_clipped(model, "1.inner", torch.randn(B, T, E))


def test_a_block_that_attends_itself() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.mlp = nn.LayerNorm(E), nn.Sequential(nn.Linear(E, E), nn.ReLU())
            self.qkv, self.proj = nn.Linear(E, 3 * E), nn.Linear(E, E)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, H, D)).permute(2, 0, 3, 1, 4)
            out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            return self.mlp(x + self.proj(out))

    assert_clipped(randomised(nn.Sequential(Block(), Block())), "0", torch.randn(B, T, E))


def test_heads_that_are_modules_of_their_own() -> None:
    model = randomised(per_head.MultiHeadedAttentionWrapper(E, D, T, 0.0, H, qkv_bias=True))
    x = torch.randn(B, T, E)
    before = maxima(model, x)
    assert list(before) == [f"heads.{n}" for n in range(H)]
    tops = torch.stack([largest(before, name)[0] for name in before])
    limit = some_clipped(tops)
    gammas = hw.qk_clip_(model, before, limit=limit)
    after = maxima(model, x)
    for name, top in zip(before, tops, strict=True):
        now = largest(after, name)
        if top > limit:
            assert float(now) == pytest.approx(limit, rel=1e-3)
            assert gammas[name].tolist() == pytest.approx([limit / float(top)])
        else:
            assert now == top
            assert name not in gammas


LATENT = {
    **{"kv_lora_rank": 9, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5},
    **{"n_routed_experts": 2, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 1},
    **{"first_k_dense_replace": 2, "moe_intermediate_size": 8},
}
EAGER = {"attn_implementation": "eager"}
BIGCODE = {"n_embd": E, "n_head": H, "n_layer": 2}
HUGGING: dict[str, tuple[str, dict[str, Any], str]] = {
    "GPT2": ("GPT2Model", {"n_embd": E, "n_head": H, "n_layer": 2}, "h.1.attn"),
    "GPTBigCode": ("GPTBigCodeModel", BIGCODE | {"multi_query": False}, "h.0.attn"),
    "GPTBigCode, one key head": ("GPTBigCodeModel", BIGCODE | {"multi_query": True}, "h.0.attn"),
    "BERT": ("BertModel", {}, "encoder.layer.1.attention.self"),
    "Llama, grouped": ("LlamaModel", {"num_key_value_heads": 2}, "layers.1.self_attn"),
    "Qwen 2": ("Qwen2Model", {"num_key_value_heads": 2}, "layers.0.self_attn"),
    "GPT-NeoX": ("GPTNeoXModel", {}, "layers.1.attention"),
    "Bloom": ("BloomModel", {"n_head": H, "n_layer": 2} | EAGER, "h.1.self_attention"),
    "Falcon": ("FalconModel", {"multi_query": True, "alibi": False}, "h.0.self_attention"),
    "ViT": ("ViTModel", {"image_size": 12, "patch_size": 4}, ""),
    "DeepSeek": ("DeepseekV3Model", LATENT | {"q_lora_rank": 10}, "layers.1.self_attn"),
    "DeepSeek, q in one": ("DeepseekV3Model", LATENT | {"q_lora_rank": None}, "layers.0.self_attn"),
}


def hugging(kind: str, options: dict[str, Any]) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = {
        **{"hidden_size": E, "num_attention_heads": H, "num_hidden_layers": 2, "vocab_size": 40},
        **{"intermediate_size": 32, "attn_implementation": "sdpa"},
    }
    made = getattr(transformers, kind.removesuffix("Model") + "Config")(**config | options)
    return randomised(getattr(transformers, kind)(made), 0.4)


@pytest.mark.parametrize("rule", ["query", "both"])
@pytest.mark.parametrize("name", HUGGING)
def test_models_of_transformers(name: str, rule: str) -> None:
    kind, options, where = HUGGING[name]
    model = hugging(kind, options)
    given = torch.randn(B, 3, 12, 12) if name == "ViT" else torch.randint(3, 40, (B, T))
    before = maxima(model, given)
    where = where or before.modules[0]
    state = {n: p.clone() for n, p in model.state_dict().items()}
    tops = largest(before, where)
    only = {where: tops}
    limit = some_clipped(tops)
    hw.qk_clip_(model, only, limit=limit, rule=rule)
    changed = [n for n, p in model.state_dict().items() if not torch.equal(p, state[n])]
    assert changed
    block = where.removesuffix(".self")
    assert all(n.startswith(block) for n in changed)
    if name == "Bloom":  # its scores have a bias of their own, which is not scaled
        return
    after = largest(maxima(model, given), where)
    torch.testing.assert_close(after, tops.clamp(max=limit), rtol=1e-3, atol=0)
    if rule == "query":
        assert torch.equal(after[tops <= limit], tops[tops <= limit])


# ── what counts as the largest score ────────────────────────────────────────────────────────────


def wide() -> tuple[nn.Module, Tensor]:
    return randomised(hw.MultiHeadAttention(E, H)), 3 * torch.randn(B, T, E)


def test_all_micro_batches_count() -> None:
    model, x = wide()
    parts = [x[:1], 2 * x[1:], 0.1 * x]
    with hw.watch(model, hw.MaxLogit()) as one:
        for part in parts:
            model(part)
    with hw.watch(model, hw.MaxLogit(), running=True) as running:
        for part in parts:
            model(part)
    several = sum(maxima(model, part) for part in parts)
    tops = torch.stack([largest(maxima(model, part), "") for part in parts]).amax(0)
    state = {n: p.clone() for n, p in model.state_dict().items()}
    for seen in (one, running, several, {"": tops}):
        model.load_state_dict(state)
        gammas = hw.qk_clip_(model, seen, limit=LIMIT)
        torch.testing.assert_close(gammas[""], (LIMIT / tops.double()).clamp(max=1))


@pytest.mark.parametrize("queries", [None, 2])
def test_decisions_are_the_same_from_the_bound_first(queries: int | None) -> None:
    for seed, size in ((0, 0.02), (1, 0.5), (2, 3.0)):
        torch.manual_seed(seed)
        model = randomised(nn.TransformerEncoderLayer(E, H, batch_first=True), 0.5)
        x = size * torch.randn(B, T, E)
        limit = float(largest(maxima(model, x), "self_attn").mean())
        state = {n: p.clone() for n, p in model.state_dict().items()}
        wanted = hw.qk_clip_(model, maxima(model, x), limit=limit)
        clipped = {n: p.clone() for n, p in model.state_dict().items()}
        model.load_state_dict(state)
        with torch.no_grad(), hw.watch(model, hw.MaxLogit(above=limit), queries=queries) as seen:
            model(x)
        got = hw.qk_clip_(model, seen, limit=limit)
        assert got.keys() == wanted.keys() == {"self_attn"}
        torch.testing.assert_close(got["self_attn"], wanted["self_attn"], rtol=1e-5, atol=0)
        assert torch.equal(got["self_attn"] < 1, wanted["self_attn"] < 1)
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(tensor, clipped[name], rtol=1e-5, atol=0)


@pytest.mark.parametrize("top", [-math.inf, -500.0, 0.0, LIMIT])
def test_there_may_be_nothing_to_clip(top: float) -> None:
    model, _ = wide()
    state = {n: p.clone() for n, p in model.state_dict().items()}
    assert hw.qk_clip_(model, {"": torch.full((H,), top)}, limit=LIMIT) == {}
    assert all(torch.equal(p, state[n]) for n, p in model.state_dict().items())


def test_sampled_maxima_decide_nothing() -> None:
    model, x = wide()
    with hw.watch(model, hw.MaxLogit(), queries=2) as seen:
        model(x)
    with pytest.raises(ValueError, match="sampled queries and may be too low"):
        hw.qk_clip_(model, seen)
    with hw.watch(model, hw.MaxLogit(above=200.0)) as seen:
        model(x)
    with pytest.raises(ValueError, match=r"it holds max_logit_above_200; watch with MaxLogit"):
        hw.qk_clip_(model, seen, limit=100.0)
    with hw.watch(model, hw.Entropy()) as seen:
        model(x)
    with pytest.raises(ValueError, match="it holds entropy, entropy_share"):
        hw.qk_clip_(model, seen)


def test_of_no_attention_nothing_is_known() -> None:
    model, _ = wide()
    with hw.watch(model, hw.MaxLogit()) as seen:
        pass
    with pytest.raises(ValueError, match="the model was not called"):
        hw.qk_clip_(model, seen)
    with pytest.raises(ValueError, match="seen is empty"):
        hw.qk_clip_(model, {})


# ── refusals: nothing is scaled then ────────────────────────────────────────────────────────────

TOPS = torch.tensor([50.0, 150.0, 120.0, 90.0])


def refused(model: nn.Module, message: str, seen: Any = None, **keywords: Any) -> None:
    state = {n: p.clone() for n, p in model.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        hw.qk_clip_(model, {"": TOPS} if seen is None else seen, **keywords)
    assert all(torch.equal(p, state[n]) for n, p in model.state_dict().items())


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_largest_scores_that_are_no_numbers(wrong: float) -> None:
    tops = TOPS.clone()
    tops[2] = wrong
    refused(wide()[0], rf"head 2 in '' is {wrong}; scaling cannot fix this", {"": tops})


@pytest.mark.parametrize("limit", [0.0, -1.0, math.nan, math.inf, "high", None])
def test_limits(limit: Any) -> None:
    refused(wide()[0], r"limit must be a finite number above 0", limit=limit)


def test_arguments() -> None:
    model = wide()[0]
    refused(model, "no rule 'keys'; there are: query, both", rule="keys")
    refused(model, "seen is a list", [1.0])
    refused(model, "no module 'attn'", {"attn": TOPS})
    refused(model, "3 largest scores for 4 heads", {"": TOPS[:3]})
    refused(model, "one number per head", {"": TOPS[None]})


class Named(nn.Module):
    """Weights under some names, and nothing else."""

    def __init__(self, *names: str, width: int = E) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, nn.Linear(E, width, bias=False))


def test_normalised_queries_and_keys() -> None:
    refused(
        hw.MultiHeadAttention(E, H, qk_norm=True),
        "'q_norm' is a norm: queries and keys are normalised",
    )
    named = Named("wq", "wk", "wv", "wo")
    named.add_module("q_layernorm", nn.LayerNorm(D, elementwise_affine=False))
    refused(named, "'q_layernorm' is a norm: queries and keys are normalised")
    named.q_layernorm = nn.Identity()  # as in timm, where there is none
    hw.qk_clip_(named, {"": TOPS})


def test_unknown_and_latent_layouts() -> None:
    refused(Named("first", "second"), "no known layout: it has no own weights")
    refused(Named("query_down", "query_up"), "no known layout: none of the known layouts has")
    refused(Named("q_proj", "k_proj", "v_proj", "o_proj", "query_global"), "no known layout")
    latent = Named("q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", width=25)
    refused(latent, "latent attention of these shapes does not have 4 heads")
    refused(hw.MultiHeadAttention(E, H, bias=(True, False, True)), "a bias of only some of q, k")


def test_a_weight_of_queries_and_keys() -> None:
    model = Named("wq", "wk", "wv", "wo")
    model.wk.weight = model.wq.weight
    refused(model, "queries and keys share a weight")


def test_another_attention_around_is_not_taken() -> None:
    model = Named("wq", "wk", "wv", "wo")
    model.add_module("inner", Named("to_queries"))
    refused(model, "no known layout", {"inner": TOPS})


# ── shared weights, wrappers ────────────────────────────────────────────────────────────────────


def test_shared_weights_are_scaled_once() -> None:
    model = nn.ModuleList([hw.MultiHeadAttention(E, H) for _ in range(3)])
    model[1].qkv = model[0].qkv
    old = [layer.qkv.weight.detach().clone() for layer in model]
    tops = {"0": torch.tensor([50.0, 200, 50, 50]), "1": torch.tensor([50.0, 400, 50, 200])}
    gammas = hw.qk_clip_(model, tops | {"2": torch.full((H,), 50.0)}, limit=LIMIT)
    want = torch.tensor([1, 0.25, 1, 0.5])
    assert all(torch.equal(gammas[name].float(), want) for name in "01")
    assert "2" not in gammas
    rows = torch.cat([want.repeat_interleave(D), torch.ones(2 * E)])[:, None]
    assert torch.equal(model[0].qkv.weight, old[0] * rows)
    assert torch.equal(model[2].qkv.weight, old[2])


def test_weights_that_are_shared_in_part() -> None:
    model = nn.ModuleList([Named("wq", "wk", "wv", "wo") for _ in range(2)])
    model[1].wk.weight = model[0].wk.weight
    tops = {"0": TOPS, "1": 3 * TOPS}
    refused(model, "share some but not all of the weights", tops, rule="both")
    gammas = hw.qk_clip_(model, tops)  # keys are not touched
    assert torch.equal(gammas["1"], (100 / (3 * TOPS.double())).clamp(max=1))


def test_names_go_through_wrappers() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    class Wrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    bare = nn.Sequential(nn.Linear(E, E), hw.MultiHeadAttention(E, H))
    bare[1].qkv = checkpoint_wrapper(bare[1].qkv)
    inner = bare[1]
    bare[1] = checkpoint_wrapper(inner)
    for model, names in (
        (Wrapper(bare), ("1", "module.1", "module.1._checkpoint_wrapped_module")),
        (torch.compile(bare), ("1", "_orig_mod.1")),
        (bare, ("1", "module.1", "1._checkpoint_wrapped_module")),
    ):
        for name in names:
            inner.reset_parameters()
            old = inner.qkv.weight.detach().clone()
            hw.qk_clip_(model, {name: TOPS}, limit=LIMIT)  # type: ignore[arg-type]
            gamma = (LIMIT / TOPS).clamp(max=1).repeat_interleave(D)[:, None]
            torch.testing.assert_close(inner.qkv.weight[:E], old[:E] * gamma)
            assert torch.equal(inner.qkv.weight[E:], old[E:])


# ── optimizers ──────────────────────────────────────────────────────────────────────────────────


def test_the_optimizers_state_is_left_alone() -> None:
    model, x = wide()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(x).square().mean().backward()
    optimizer.step()
    state = {n: s.clone() for n, s in optimizer.state[model.qkv.weight].items()}
    assert hw.qk_clip_(model, maxima(model, x), limit=10.0, optimizer=optimizer)
    for name, value in optimizer.state[model.qkv.weight].items():
        assert torch.equal(value, state[name])


def halves(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    return randomised(hw.MultiHeadAttention(E, H, out_bias=False, bias=False)).to(dtype)


def just_above() -> dict[str, Tensor]:
    return {"": torch.full((H,), 100.13)}  # a γ of 0.9987


class Masters(torch.optim.SGD):
    """An optimizer of float32 masters, which it rounds to the weights at every step."""

    def __init__(self, model: nn.Module, where: str) -> None:
        super().__init__(model.parameters(), lr=0.0)
        self.masters = {p: p.detach().float() * (1 + 1e-4) for p in model.parameters()}
        for p, master in self.masters.items():
            p.data.copy_(master)
            if where == "state":
                self.state[p]["exp_avg"] = torch.zeros_like(master)
                self.state[p]["fp32"] = master
            elif where == "weight":
                p.main_param = master  # type: ignore[attr-defined]
        if where == "groups":
            groups = [{"params": [self.masters[p] for p in g["params"]]} for g in self.param_groups]
            self.param_groups_master = groups

    def step(self, closure: Any = None) -> None:
        for p, master in self.masters.items():
            p.data.copy_(master)


@pytest.mark.parametrize("where", ["state", "weight", "groups"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_float32_masters_are_scaled(where: str, dtype: torch.dtype) -> None:
    model = halves(dtype)
    optimizer = Masters(model, where)
    master = optimizer.masters[model.qkv.weight]
    old, moments = master.clone(), optimizer.state[model.qkv.weight].get("exp_avg")
    gamma = hw.qk_clip_(model, just_above(), limit=LIMIT, optimizer=optimizer)[""].float()
    rows = torch.cat([gamma.repeat_interleave(D), torch.ones(2 * E)])[:, None]
    assert torch.equal(master, old * rows)
    optimizer.step()
    assert torch.equal(model.qkv.weight, (old * rows).to(dtype))
    assert moments is None or not moments.any()


def test_weights_under_float32_without_masters() -> None:
    model = halves()
    refused(model, "weights are torch.bfloat16; their optimizer may hold float32 master")
    optimizer = torch.optim.AdamW(model.parameters())
    old = model.qkv.weight.detach().clone()
    with pytest.warns(UserWarning, match="no float32 master of torch.bfloat16 .* in AdamW"):
        hw.qk_clip_(model, just_above(), limit=LIMIT, optimizer=optimizer)
    assert torch.equal(model.qkv.weight, old)  # as the warning says: 0.9987 rounds to 1
    with pytest.warns(UserWarning, match=r"rounds γ to steps of 0\.0078"):
        hw.qk_clip_(model, {"": torch.full((H,), 200.0)}, limit=LIMIT, optimizer=optimizer)
    assert torch.equal(model.qkv.weight[:E], old[:E] / 2)


def test_nothing_is_scaled_where_a_later_layer_is_refused() -> None:
    model = nn.ModuleList([hw.MultiHeadAttention(E, H), halves()])
    refused(model, "pass optimizer=", {"0": TOPS, "1": TOPS})


def test_weights_of_some_ranks_are_refused() -> None:
    model = Named("wq", "wk", "wv", "wo")
    model.wq.weight.ds_id = 3  # type: ignore[attr-defined]  # as DeepSpeed marks them
    refused(model, "wq.weight is sharded by DeepSpeed")


def test_modules_that_were_not_seen_are_named() -> None:
    model, x = wide()
    seen = maxima(model, x)
    seen.left_out["far"] = "its keys are compressed"
    with pytest.warns(UserWarning, match="not clipped: far: its keys are"):
        hw.qk_clip_(model, seen)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hw.qk_clip_(model, maxima(model, x))

"""Weights of other libraries' attention in headwise's layer, clipped and pruned: the real modules.

`tests/weights/test_model_layouts.py` has their names and shapes as data.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peft
import pytest
import timm
import torch
from diffusers.models.attention_processor import Attention, JointAttnProcessor2_0
from diffusers.models.transformers.transformer_flux import FluxAttention
from esm.multihead_attention import MultiheadAttention
from torch import Tensor, nn

import headwise as hw

E, H, D = 24, 4, 6
SIZES: dict[str, Any] = {"query_dim": E, "heads": H, "dim_head": D}
TWO: dict[str, Any] = {
    "added_kv_proj_dim": E,
    "out_dim": E,
    "context_pre_only": False,
    "bias": True,
}
X, TEXT, CONTEXT = torch.randn(2, 8, E), torch.randn(2, 5, E), torch.randn(2, 5, 10)


def randomised(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    return module.eval()


def sd3(norm: str | None = None) -> nn.Module:
    return Attention(**SIZES, **TWO, processor=JointAttnProcessor2_0(), qk_norm=norm)


BUILDERS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "UNet": (lambda: Attention(**SIZES, cross_attention_dim=10), "diffusers"),
    "SD3": (sd3, "diffusers"),
    "SD3.5": (lambda: sd3("rms_norm"), "diffusers"),
    "Flux": (lambda: FluxAttention(**SIZES, **TWO), "diffusers"),
    "Flux, single": (lambda: FluxAttention(**SIZES, bias=True, pre_only=True), "diffusers"),
    "ESM-1b": (lambda: MultiheadAttention(E, H, self_attention=True), "bart"),
    "ESM-2": (
        lambda: MultiheadAttention(E, H, self_attention=True, use_rotary_embeddings=True),
        "bart",
    ),
}


@pytest.mark.parametrize("name", BUILDERS)
def test_there_and_back(name: str) -> None:
    build, source = BUILDERS[name]
    state = randomised(build()).state_dict()
    assert hw.detect_layout(state) == source
    ours = hw.convert(state, target="headwise", num_heads=H, qk_norm_eps=1e-6)
    back = hw.convert(ours, target=source, num_heads=H)
    weights = {name: x for name, x in state.items() if not name.endswith("inv_freq")}
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[name], x) for name, x in weights.items())


@pytest.mark.parametrize("rotary", [False, True])
def test_fair_esm(rotary: bool) -> None:
    theirs = randomised(MultiheadAttention(E, H, self_attention=True, use_rotary_embeddings=rotary))
    layer = hw.MultiHeadAttention(E, H, rope=hw.RoPE(D) if rotary else None)
    layer.load_state_dict(hw.convert(theirs.state_dict(), target="headwise", num_heads=H))
    x = X.transpose(0, 1)
    torch.testing.assert_close(layer(X), theirs(x, x, x)[0].transpose(0, 1), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="with fewer heads its forward fails"):
        hw.prune_(theirs, ["L0H1"])


def test_cross_attention_of_unet() -> None:
    theirs = randomised(Attention(**SIZES, cross_attention_dim=10))
    layer = hw.MultiHeadAttention(E, H, kv_dim=10, bias=False, out_bias=True)
    layer.load_state_dict(hw.convert(theirs.state_dict(), target="headwise", num_heads=H))
    torch.testing.assert_close(layer(X, CONTEXT), theirs(X, CONTEXT), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rule", ["query", "both"])
def test_joint_attention_is_clipped(rule: str) -> None:
    model = randomised(sd3())

    def tops() -> tuple[Tensor, Any]:
        with torch.no_grad(), hw.watch(model, hw.MaxLogit()) as seen:
            model(X, encoder_hidden_states=TEXT)
        return seen[""]["max_logit"].amax(0), seen

    before, seen = tops()
    limit = float(before.median())
    hw.qk_clip_(model, seen, limit=limit, rule=rule)
    torch.testing.assert_close(tops()[0], before.clamp(max=limit), rtol=1e-4, atol=1e-4)
    for other in (sd3("rms_norm"), FluxAttention(**SIZES, **TWO)):
        with pytest.raises(ValueError, match="normalised after their projection"):
            hw.qk_clip_(other, {"": torch.full((H,), 200.0)})


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["q_proj", "v_proj"]},
        {"target_modules": ["q_proj", "k_proj"], "use_dora": True},
        {"target_modules": ["k_proj", "o_proj"], "lora_bias": True},
    ],
    ids=str,
)
def test_peft_is_clipped(options: dict[str, Any]) -> None:
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=E, num_attention_heads=H, num_key_value_heads=2, num_hidden_layers=2,
        intermediate_size=8, vocab_size=40, attention_bias=True,
    )  # fmt: skip
    model = peft.get_peft_model(
        transformers.LlamaForCausalLM(config),
        peft.LoraConfig(r=2, init_lora_weights=False, **options),
    )
    randomised(model)
    ids = torch.randint(0, 40, (2, 7))

    def tops() -> tuple[Tensor, Any]:
        with torch.no_grad(), hw.watch(model, hw.MaxLogit()) as seen:
            model(input_ids=ids)
        return seen["L0"]["max_logit"].amax(0), seen

    for rule in ("query", "both"):
        before, seen = tops()
        limit = float(before.median())
        hw.qk_clip_(model, seen, limit=limit, rule=rule)
        torch.testing.assert_close(tops()[0], before.clamp(max=limit), rtol=1e-4, atol=1e-4)


def vit() -> tuple[nn.Module, Any, Any]:
    size = {"img_size": 32, "depth": 2, "num_classes": 3}
    return timm.create_model("vit_tiny_patch16_224", **size), ["L0H0", "L1H2"], None


def swin() -> tuple[nn.Module, Any, Any]:
    size = {"img_size": 56, "embed_dim": 24, "depths": (2, 2), "num_heads": (2, 4)}
    model = timm.create_model("swin_tiny_patch4_window7_224", num_classes=3, **size)
    return model, {"layers.0.blocks.0.attn": [0]}, None


PRUNED: dict[str, Callable[[], tuple[nn.Module, Any, Any]]] = {
    "ViT": vit,
    "Swin": swin,
    "UNet": lambda: (Attention(**SIZES, cross_attention_dim=10), ["L0H1"], CONTEXT),
    "SD3.5": lambda: (sd3("rms_norm"), ["L0H1"], TEXT),
    "Flux": lambda: (FluxAttention(**SIZES, **TWO), ["L0H1"], TEXT),
}


@pytest.mark.parametrize("name", PRUNED)
def test_a_pruned_module_gives_what_an_ablated_one_gives(name: str) -> None:
    model, heads, context = PRUNED[name]()
    randomised(model)
    image = torch.randn(2, 3, 56 if name == "Swin" else 32, 56 if name == "Swin" else 32)

    def call() -> Any:
        with torch.no_grad():
            return model(image) if context is None else model(X, encoder_hidden_states=context)

    with hw.ablate(model, heads):
        wanted = call()
    hw.prune_(model, heads)
    torch.testing.assert_close(call(), wanted, rtol=1e-5, atol=1e-5)


def test_flux_without_an_output_projection_is_refused() -> None:
    with pytest.raises(ValueError, match="no output projection"):
        hw.prune_(FluxAttention(**SIZES, bias=True, pre_only=True), ["L0H1"])

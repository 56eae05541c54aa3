"""Attention modules of transformers from small configs, and headwise's layer that equals each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

import headwise as hw

X = torch.randn(2, 7, 24, generator=torch.Generator().manual_seed(0))
CAUSAL = torch.full((7, 7), -torch.inf).triu(1)[None, None]
PLACES = torch.arange(7)[None]


def in_transformers(kind: str, name: str, file: str = "modeling") -> Any:
    """An object of the modeling or configuration file of one kind of model."""
    return getattr(import_module(f"transformers.models.{kind}.{file}_{kind}"), name)


def config_of(kind: str, name: str, **more: Any) -> Any:
    """A small config, which runs in eager attention."""
    sizes = {"hidden_size": 24, "num_attention_heads": 4, "num_hidden_layers": 2}
    config = in_transformers(kind, name, "configuration")(**sizes | more)
    config._attn_implementation = "eager"
    return config


def randomised(module: nn.Module) -> nn.Module:
    """With weights and biases that are all different, so that none can be mixed up."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    return module.eval()


@dataclass
class Brought:
    """A module, its layout, a call of it, and how headwise's layer and its call are built."""

    module: nn.Module
    source: str
    call: Callable[[], Tensor]
    layer: dict[str, Any] = field(default_factory=dict)
    mask: Any = None
    convert: dict[str, Any] = field(default_factory=dict)
    beside: tuple[str, ...] = ()


def opt() -> Brought:
    config = config_of("opt", "OPTConfig", ffn_dim=8, word_embed_proj_dim=24)
    module = in_transformers("opt", "OPTAttention")(config, 0)
    return Brought(module, "bart", lambda: module(X, attention_mask=CAUSAL)[0], {}, hw.Causal())


def opt_without_biases() -> Brought:
    config = config_of("opt", "OPTConfig", ffn_dim=8, word_embed_proj_dim=24, enable_bias=False)
    module = in_transformers("opt", "OPTAttention")(config, 0)
    call = lambda: module(X, attention_mask=CAUSAL)[0]  # noqa: E731
    return Brought(module, "bart", call, {"bias": False}, hw.Causal())


def bart() -> Brought:
    config = config_of("bart", "BartConfig", d_model=24)
    module = in_transformers("bart", "BartAttention")(24, 4, config=config)
    return Brought(module, "bart", lambda: module(X)[0])


def clip() -> Brought:
    module = in_transformers("clip", "CLIPAttention")(config_of("clip", "CLIPVisionConfig"))
    return Brought(module, "bart", lambda: module(X)[0])


def siglip() -> Brought:
    config = config_of("siglip", "SiglipVisionConfig")
    module = in_transformers("siglip", "SiglipAttention")(config)
    return Brought(module, "bart", lambda: module(X)[0])


def whisper() -> Brought:
    config = config_of("whisper", "WhisperConfig", d_model=24)
    module = in_transformers("whisper", "WhisperAttention")(24, 4, config=config)
    return Brought(module, "whisper", lambda: module(X)[0])


def esm() -> Brought:
    config = config_of("esm", "EsmConfig", position_embedding_type="rotary", vocab_size=9)
    module = in_transformers("esm", "EsmAttention")(config)
    embedding = in_transformers("esm", "EsmRotaryEmbedding")(config)
    norm = module.LayerNorm

    def call() -> Tensor:
        places = embedding(X, PLACES)
        module.LayerNorm = nn.Identity()
        try:
            return module(X, position_embeddings=places) - X
        finally:
            module.LayerNorm = norm

    beside = ("LayerNorm.weight", "LayerNorm.bias")
    return Brought(module, "bert", call, {"rope": hw.RoPE(6)}, beside=beside)


def gptj() -> Brought:
    config = config_of("gptj", "GPTJConfig", rotary_dim=4, n_positions=16)
    module = in_transformers("gptj", "GPTJAttention")(config, 0)
    call = lambda: module(X, attention_mask=CAUSAL, position_ids=PLACES)[0]  # noqa: E731
    layer = {"rope": hw.RoPE(4), "bias": False}
    return Brought(module, "gptj", call, layer, hw.Causal(), {"rotary_dim": 4})


def rotated(kind: str, prefix: str, config: Any, name: str = "Attention") -> Callable[[], Tensor]:
    """The call of a decoder's attention, and its module as the call's default."""
    module = in_transformers(kind, f"{prefix}{name}")(config, 0)
    embedding = in_transformers(kind, f"{prefix}RotaryEmbedding")(config)

    def call(module: nn.Module = module) -> Tensor:
        places = embedding(X, PLACES)
        return module(X, position_embeddings=places, attention_mask=CAUSAL)[0]

    return call


def phi() -> Brought:
    config = config_of("phi", "PhiConfig", num_key_value_heads=2, head_dim=6)
    config.rope_parameters["partial_rotary_factor"] = 0.67
    call = rotated("phi", "Phi", config)
    layer = {"num_kv_heads": 2, "rope": hw.RoPE(4)}
    return Brought(call.__defaults__[0], "phi", call, layer, hw.Causal())  # type: ignore[attr-defined]


def phi3() -> Brought:
    config = config_of("phi3", "Phi3Config", num_key_value_heads=2, pad_token_id=0)
    call = rotated("phi3", "Phi3", config)
    layer = {"num_kv_heads": 2, "rope": hw.RoPE(6), "bias": False}
    return Brought(call.__defaults__[0], "phi3", call, layer, hw.Causal())  # type: ignore[attr-defined]


def t5() -> Brought:
    config = config_of("t5", "T5Config", d_model=24, num_heads=4, d_kv=5)
    module = in_transformers("t5", "T5Attention")(config, True, 0)

    def call() -> Tensor:
        return module(X)[0]

    with torch.no_grad():
        module.relative_attention_bias.weight.normal_()
    layer = {"head_dim": 5, "bias": False, "scale": 1.0}
    beside = ("relative_attention_bias.weight",)
    bias = lambda: hw.Bias(module.compute_bias(7, 7))  # noqa: E731
    return Brought(module, "t5", call, layer, bias, beside=beside)


def distilbert() -> Brought:
    config = config_of("distilbert", "DistilBertConfig", dim=24, n_heads=4)
    module = in_transformers("distilbert", "DistilBertSelfAttention")(config)
    return Brought(module, "distilbert", lambda: module(X)[0])


def modernbert() -> Brought:
    config = config_of("modernbert", "ModernBertConfig", vocab_size=9, pad_token_id=0)
    module = in_transformers("modernbert", "ModernBertAttention")(config, 0)
    embedding = in_transformers("modernbert", "ModernBertRotaryEmbedding")(config)
    kind = config.layer_types[0]
    call = lambda: module(X, position_embeddings=embedding(X, PLACES, kind))[0]  # noqa: E731
    base = config.rope_parameters[kind]["rope_theta"]
    return Brought(module, "modernbert", call, {"rope": hw.RoPE(6, base=base), "bias": False})


def dinov2() -> Brought:
    module = in_transformers("dinov2", "Dinov2Attention")(config_of("dinov2", "Dinov2Config"))
    return Brought(module, "vit", lambda: module(X)[0])


def falcon() -> Brought:
    config = config_of(
        "falcon", "FalconConfig", num_kv_heads=2, new_decoder_architecture=True, alibi=False
    )
    module = in_transformers("falcon", "FalconAttention")(config, 0)
    embedding = in_transformers("falcon", "FalconRotaryEmbedding")(config)

    def call() -> Tensor:
        places = embedding(X, PLACES)
        return module(X, None, CAUSAL, position_embeddings=places)[0]

    layer = {"num_kv_heads": 2, "rope": hw.RoPE(6), "bias": False}
    return Brought(module, "falcon", call, layer, hw.Causal())


BUILDERS = (
    opt,
    opt_without_biases,
    bart,
    clip,
    siglip,
    whisper,
    esm,
    gptj,
    phi,
    phi3,
    t5,
    distilbert,
    modernbert,
    dinov2,
    falcon,
)
"""Each builds one case."""

"""Small configurations of every model type of transformers, and inputs for them."""

from __future__ import annotations

import inspect
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

B, T, VOCABULARY, SIDE = 2, 9, 99, 32

WIDTHS = "hidden_size d_model n_embd embed_dim projection_dim text_hidden_size encoder_hidden_size"
SMALL = dict.fromkeys(WIDTHS.split(), 32) | {
    "vocab_size": VOCABULARY, "intermediate_size": 36, "ffn_dim": 36, "d_ff": 36, "mlp_dim": 36,
    "encoder_ffn_dim": 36, "decoder_ffn_dim": 36, "moe_intermediate_size": 36, "n_inner": 36,
    "num_hidden_layers": 2, "num_layers": 2, "n_layer": 2, "n_layers": 2, "encoder_layers": 2,
    "decoder_layers": 2, "num_decoder_layers": 2, "num_encoder_layers": 2, "depth": 2,
    "num_attention_heads": 4, "num_heads": 4, "n_head": 4, "n_heads": 4, "num_key_value_heads": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "d_kv": 8, "head_dim": 8,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "max_position_embeddings": 64, "n_positions": 64, "image_size": SIDE, "patch_size": 8,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "qk_head_dim": 16, "v_head_dim": 8,
    "q_lora_rank": 16, "kv_lora_rank": 16, "rotary_dim": 4, "num_mel_bins": 16,
    "max_source_positions": 20, "num_frames": 2, "tubelet_size": 2, "window_size": 4,
}  # fmt: skip
"""What such a configuration has, by the names that configurations use."""


def small(kind: type[PreTrainedConfig]) -> dict[str, Any]:
    """Return the arguments of a small configuration of this class, those of its parts too."""
    found: dict[str, Any] = {}
    for name, value in vars(kind()).items():
        if isinstance(value, PreTrainedConfig):
            found[name] = small(type(value)) | {"model_type": value.model_type}
        elif name in SMALL and type(value) is int:
            found[name] = SMALL[name]
        elif name.endswith("token_id") and type(value) is int and value >= VOCABULARY:
            found[name] = 1
        elif isinstance(value, dict) and "mrope_section" in value:
            found[name] = value | {"mrope_section": [2, 1, 1]}
    return found


def model_of(kind: str) -> nn.Module:
    """Return a model of this type with a small configuration and random weights."""
    config_class = CONFIG_MAPPING[kind]
    config = config_class(**small(config_class))
    with torch.device("meta"):
        size = sum(x.numel() for x in AutoModel.from_config(config).parameters())
    if size > 20_000_000:
        raise ValueError(f"{size} parameters")
    return AutoModel.from_config(config).eval()


def inputs_of(model: Any) -> dict[str, Tensor]:
    """Return inputs that a model takes: texts, the second of which is padded, pictures, sounds.

    Raises:
        ValueError: it takes none of these.
    """
    names = inspect.signature(model.forward).parameters
    config = getattr(model.config, "vision_config", model.config)
    mask = torch.ones(B, T, dtype=torch.long)
    mask[1, 6:] = 0
    pictures = torch.randn(B, getattr(config, "num_channels", 3), SIDE, SIDE)
    frames = torch.randn(B, 2, 3, SIDE, SIDE)
    texts = {"input_ids": torch.randint(5, VOCABULARY, (B, T)), "attention_mask": mask}
    bins = getattr(model.config, "num_mel_bins", 16)
    for given in (
        texts,
        texts | {"pixel_values": pictures},
        {"pixel_values": pictures},
        {"pixel_values": frames},
        {"input_values": torch.randn(B, 2000)},
        {"input_features": torch.randn(B, bins, 40)},
        {"input_features": torch.randn(B, 40, bins)},
    ):
        given = given | {"decoder_input_ids": texts["input_ids"][:, :5]}
        given = {name: x for name, x in given.items() if name in names}
        with suppress(Exception), torch.no_grad():  # anything says that these are not its inputs
            if any(name in given for name in ("input_ids", model.main_input_name)):
                model(**given)
                return given
    raise ValueError(f"{type(model).__name__} takes none of these inputs")

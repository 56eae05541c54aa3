"""Small models of transformers with random weights, and what their heads do, by hand."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import headwise as hw

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")

B, T, SOURCE, VOCAB = 2, 11, 13, 37
PADDED = 3
BLOCKS = 4

Inputs = dict[str, Any]

SIZES = {
    **{"hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 2},
    **{"intermediate_size": 32, "vocab_size": VOCAB, "max_position_embeddings": 64},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}


def tokens(length: int = T, side: str | None = None, prefix: str = "") -> Inputs:
    """Random token ids; the second text is shorter, and padded at this side."""
    given: Inputs = {f"{prefix}input_ids": torch.randint(3, VOCAB, (B, length))}
    if side is not None:
        real = torch.ones(B, length, dtype=torch.long)
        real[1, slice(PADDED) if side == "left" else slice(-PADDED, None)] = 0
        given[f"{prefix}attention_mask"] = real
    return given


@dataclass(frozen=True)
class Case:
    """A model, what it is called with, and under which names its attentions are to be seen."""

    name: str
    where: dict[str, str]
    options: dict[str, Any]
    side: str = "left"
    default: str = "sdpa"
    given: str = "tokens"

    def model(self, kind: str = "Model", **options: Any) -> Any:
        """The model in eval mode, always with the same weights."""
        torch.manual_seed(1)
        config = getattr(transformers, f"{self.name}Config")
        made = config(**(SIZES | self.options | options))
        model = getattr(transformers, self.name + kind)(made)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if weight.dim() == 2:  # large enough for heads to differ
                    weight.normal_(0.0, 0.2)
                elif "sinks" in name:
                    weight.normal_()
        return model.eval()

    def inputs(self, padded: bool) -> Inputs:
        """What the model is called with, always the same."""
        torch.manual_seed(2)
        side = self.side if padded else None
        if self.given == "pixels":
            return {"pixel_values": torch.randn(B, 3, 12, 12)}
        if self.given == "sound":
            sound = torch.randn(B, 8, 2 * SOURCE)
            return {"input_features": sound} | tokens(T, side, "decoder_")
        if self.given == "pairs":
            return tokens(SOURCE, side) | tokens(T, side, "decoder_")
        return tokens(T, side)


def only(name: str, where: str, side: str = "left", **options: Any) -> Case:
    """A model of one stack."""
    return Case(name, {"attentions": where}, options, side)


def pair(name: str, where: tuple[str, str, str], given: str = "pairs", **options: Any) -> Case:
    """A model of an encoder and a decoder."""
    outputs = ("encoder_attentions", "decoder_attentions", "cross_attentions")
    return Case(name, dict(zip(outputs, where, strict=True)), options, "right", given=given)


LAYERS = "layers.{}.self_attn"
BERTS = "encoder.layer.{}.attention.self"
T5 = (
    "encoder.block.{}.layer.0.SelfAttention",
    "decoder.block.{}.layer.0.SelfAttention",
    "decoder.block.{}.layer.1.EncDecAttention",
)
BARTS = (
    "encoder.layers.{}.self_attn",
    "decoder.layers.{}.self_attn",
    "decoder.layers.{}.encoder_attn",
)
GROUPS = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
TWO = {
    **{"d_model": 24, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 32},
    **{"encoder_attention_heads": 3, "decoder_attention_heads": 3, "decoder_ffn_dim": 32},
}
EXPERTS = GROUPS | {"num_local_experts": 2, "num_experts_per_tok": 1}
FIVE = {
    **{"d_model": 24, "d_kv": 8, "d_ff": 32, "num_heads": 3, "num_layers": 2},
    "decoder_start_token_id": 1,
}
LATENT = {
    **(GROUPS | {"num_key_value_heads": 4, "head_dim": 4, "first_k_dense_replace": 2}),
    **{"q_lora_rank": 8, "kv_lora_rank": 8},
    **{"qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6},
}
SOUND = {
    **TWO,
    **{"num_mel_bins": 8, "max_source_positions": SOURCE, "max_target_positions": 32},
    **{"decoder_start_token_id": 1},
}

CASES = {
    "gpt2": only("GPT2", "h.{}.attn", n_embd=24, n_head=3, n_layer=2, n_positions=64),
    "llama": only("Llama", LAYERS, **GROUPS),
    "qwen3": only("Qwen3", LAYERS, **GROUPS),
    "mistral": only("Mistral", LAYERS, **GROUPS, sliding_window=4),
    "gemma2": replace(
        only("Gemma2", LAYERS, **GROUPS, sliding_window=5, attn_logit_softcapping=3.0),
        default="eager",
    ),
    "gpt-oss": replace(only("GptOss", LAYERS, **EXPERTS, sliding_window=5), default="eager"),
    "bert": only("Bert", BERTS, "right"),
    "t5": pair("T5", T5, **FIVE),
    "bart": pair("Bart", BARTS, **TWO),
    "whisper": pair("Whisper", BARTS, "sound", **SOUND),
    "vit": replace(only("ViT", "layers.{}.attention", image_size=12, patch_size=4), given="pixels"),
    "qwen2": only("Qwen2", LAYERS, **GROUPS),
    "phi3": only("Phi3", LAYERS, **GROUPS),
    "mixtral": only("Mixtral", LAYERS, **EXPERTS),
    "deepseek": only("DeepseekV3", LAYERS, **LATENT),
    "gpt-neox": only("GPTNeoX", "layers.{}.attention", rotary_pct=0.5),
    "opt": only("OPT", "decoder.layers.{}.self_attn", ffn_dim=32, word_embed_proj_dim=24),
    "modernbert": only("ModernBert", "layers.{}.attn", "right", local_attention=6),
    "roberta": only("Roberta", BERTS, "right"),
    "distilbert": only(
        "DistilBert", "transformer.layer.{}.attention", "right", dim=24, n_heads=3, n_layers=2
    ),
    # Attention code of their own, which asks no interface.
    "bloom": replace(
        only("Bloom", "h.{}.self_attention", hidden_size=24, n_head=3, n_layer=2), default="eager"
    ),
    "falcon": only("Falcon", "h.{}.self_attention"),
    "gpt-j": replace(
        only("GPTJ", "h.{}.attn", n_embd=24, n_head=3, n_layer=2, n_positions=64, rotary_dim=4),
        default="eager",
    ),
}

STATISTICS = (
    hw.Entropy(),
    hw.Mass(hw.First()),
    hw.Mass(hw.Previous()),
    hw.Mass(hw.Self()),
    hw.Distance(),
    hw.Received(),
    hw.Map(BLOCKS),
)


def by_hand(p: Tensor, valid: Tensor) -> dict[str, Tensor]:
    """Each head's figures from its whole matrix P `[B, H, T, S]`, over valid queries `[B, T]`."""
    p = torch.where(valid[:, None, :, None], p.double(), 0.0)
    queries, keys = p.shape[2:]
    i, j = torch.arange(queries)[:, None] + keys - queries, torch.arange(keys)[None]
    rest = (valid[:, None].double() - p.sum(-1)).clamp(min=0)  # what a learned sink took
    rest = torch.where(rest > 1e-6, rest, 0.0)
    count = valid.sum().item()
    figures = {
        "entropy": (torch.special.entr(p).sum(-1) + torch.special.entr(rest)).sum((0, 2)) / count,
        "distance": (p * (i - j)).sum((0, 2, 3)) / count,
        "received": p.sum(2),
    }
    for name, chosen in (("first", j == 0), ("previous", j == i - 1), ("self", j == i)):
        mass = torch.where(chosen, p, 0.0).sum(-1)
        targets = ((p > 0) & chosen).any(-1)
        figures[name] = mass.sum((0, 2)) / targets.sum((0, 2)).clamp(min=1)
    block = torch.nn.functional.one_hot(torch.arange(queries) * BLOCKS // queries, BLOCKS).double()
    of_key = torch.nn.functional.one_hot(torch.arange(keys) * BLOCKS // keys, BLOCKS).double()
    each = (valid.double() @ block).clamp(min=1)[:, None, :, None]
    figures["map"] = block.T @ p @ of_key / each
    return figures


def apart(seen: Any, module: str, p: Tensor, valid: Tensor) -> float:
    """The largest difference between what was seen of a module and P by hand."""
    rows = [row for row in seen.table() if row["module"] == module]
    assert [row["head"] for row in rows] == list(range(p.shape[1]))
    worst = 0.0
    for name, figure in by_hand(p, valid).items():
        got = seen[module][name] if figure.dim() > 1 else torch.tensor([row[name] for row in rows])
        assert got.shape == figure.shape, name
        worst = max(worst, (got.double() - figure).abs().max().item())
    return worst


def valid_queries(output: str, inputs: Inputs, p: Tensor) -> Tensor:
    """The queries that are no padding. Of a decoder that attends to an encoder, all count."""
    prefix = {"decoder_attentions": "decoder_", "cross_attentions": "none_"}.get(output, "")
    mask = inputs.get(f"{prefix}attention_mask")
    return torch.ones(len(p), p.shape[2], dtype=torch.bool) if mask is None else mask.bool()

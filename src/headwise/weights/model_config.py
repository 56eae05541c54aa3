"""Attention options in the `config.json` beside a model's weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .folders import CONFIG
from .layout_types import ADDING_ONE, NORMED_VALUES, WITHOUT_WEIGHTS

_HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads", "decoder_attention_heads")
_KV_HEADS = ("num_key_value_heads", "n_kv_heads", "num_kv_heads")
_EPS = ("rms_norm_eps", "layer_norm_eps")
_SHARES = ("partial_rotary_factor", "rotary_pct", "rope_pct")

_WORDS = {"vision": "vis"}
"""Words in the names of a part's layers, if they differ from the part's name."""

_SHARE_OF = {
    "bamba": 0.5,
    "glm": 0.5,
    "gpt_neox": 0.25,
    "gpt_neox_japanese": 1.0,
    "nemotron": 0.5,
    "persimmon": 0.5,
    "phi": 0.5,
    "stablelm": 0.25,
}
"""The fraction of a head that is rotated, by model type, if the config does not state it."""

_NEIGHBOURS = (
    "blt cohere cohere2 cohere2_moe ernie4_5 ernie4_5_moe ernie4_5_vl_moe glm glm4 glm4v glm_ocr "
    "helium llama4 llama4_text moonshine moonshine_streaming"
).split()
"""Model types in transformers that use Llama's names but rotate pairs of adjacent features."""


_OTHER_NORMS = {
    ADDING_ONE: "gemma3 gemma3_text minimax_m3_vl minimax_m3_vl_text qwen3_5 qwen3_5_moe "
    "qwen3_5_moe_text qwen3_5_text qwen3_next qwen4_exp qwen4_exp_text step3p5 step3p7 t5gemma2 "
    "t5gemma2_decoder t5gemma2_encoder t5gemma2_text",
    NORMED_VALUES: "diffusion_gemma diffusion_gemma_text embedding_gemma2 embedding_gemma2_text "
    "gemma3n gemma3n_text gemma4 gemma4_text gemma4_unified gemma4_unified_text",
    WITHOUT_WEIGHTS: "llama4 llama4_text nanochat",
}
"""Model types in transformers whose norms of q and k differ from those of Qwen 3."""


@dataclass(frozen=True)
class ModelConfig:
    """The attention options in a config; None if missing.

    Attributes:
        num_heads, num_kv_heads: head counts.
        layout: the layout of the weights, if names and shapes alone do not determine it.
        rotary_dim: the number of features per head to permute between the two rotary orders.
        rotary_shares: instead, these features as fractions of a head; several if layers differ.
        qk_norm_eps: the eps of norms of queries and keys.
        other_norms: how the norms differ, if they are not RMS norms multiplied by the weight.
        parts: the options of parts of the model, by a word in the names of their layers.
    """

    num_heads: int | None = None
    num_kv_heads: int | None = None
    layout: str | None = None
    rotary_dim: int | None = None
    rotary_shares: frozenset[float] = frozenset()
    qk_norm_eps: float | None = None
    other_norms: str | None = None
    parts: Mapping[str, ModelConfig] = field(default_factory=dict)

    def at(self, prefix: str) -> ModelConfig:
        """Return the options of the part of a model that a layer belongs to.

        >>> config = {"text_config": {"num_heads": 4}, "vision_config": {"num_heads": 3}}
        >>> config = ModelConfig.of(config)
        >>> config.at("model.visual.blocks.0.attn").num_heads, config.at("model.0.attn").num_heads
        (3, 4)
        """
        found = [part for word, part in self.parts.items() if word in prefix]
        return found[0] if found else self.parts.get("text", self)

    @classmethod
    def read_beside(cls, weights: Path) -> ModelConfig:
        """Read the config beside a weight file or in a folder, if there is one."""
        path = (weights if weights.is_dir() else weights.parent) / CONFIG
        try:
            config = json.loads(path.read_text()) if path.is_file() else None
        except (OSError, ValueError, RecursionError):
            return cls()
        return cls.of(config) if isinstance(config, dict) else cls()

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> ModelConfig:
        """Read a config.

        >>> ModelConfig.of({"model_type": "gpt_neox", "rotary_pct": 0.25}).rotary_shares
        frozenset({0.25})
        """
        kind = config.get("model_type")
        other = next(
            (effect for effect, kinds in _OTHER_NORMS.items() if kind in kinds.split()), None
        )
        parts = {
            _WORDS.get(name, name): cls.of(config[f"{name}_config"])
            for name in ("vision", "audio", "speech", "encoder", "decoder", "text")
            if isinstance(config.get(f"{name}_config"), Mapping)
        }
        for name in ("encoder", "decoder"):
            count = config.get(f"{name}_attention_heads")
            if type(count) is int:
                parts[f"{name}."] = cls(count)
        turned = 0 if kind in _NEIGHBOURS else _first(config, ("rotary_dim",), int)
        return cls(
            _first(config, _HEADS, int),
            _first(config, _KV_HEADS, int),
            "gpt_bigcode" if kind == "gpt_bigcode" else None,
            turned,
            frozenset() if turned is not None else _shares(config, kind),
            _first(config, _EPS, float),
            other if config.get("use_qk_norm") is not False else None,
            parts,
        )


def _shares(config: Mapping[str, Any], kind: object) -> frozenset[float]:
    """Return the rotated fractions of a head in all layers, from a config or its model type."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling")
    scaling = scaling if isinstance(scaling, Mapping) else {}
    each = [one for one in scaling.values() if isinstance(one, Mapping)] or [scaling]
    whole = _first(config, _SHARES, float)
    shares = {_first(one, _SHARES, float) or whole for one in each}
    if shares == {None}:
        usual = _SHARE_OF.get(kind) if isinstance(kind, str) else None
        return frozenset() if usual is None else frozenset({usual})
    return frozenset(1.0 if share is None else share for share in shares)


def _first(config: Mapping[str, Any], names: tuple[str, ...], kind: type) -> Any:
    """Return the first of these entries that is a number of that type."""
    kinds = (int, float) if kind is float else (int,)
    return next((config[name] for name in names if type(config.get(name)) in kinds), None)

"""transformers' common tests of models, from its sdist, with every forward watched.

The sdist has the tests that all models share but not those of each model, so the sizes of the
models are ours. Of the shared tests those are run that compute attention.
"""

import sys
import unittest
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from every_forward import watched
from sources import source
from transformers import AutoConfig, PretrainedConfig

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 99}
ONES = SIZES | {"intermediate_size": 37, "max_position_embeddings": 64}
GROUPED = ONES | {"num_key_value_heads": 2}
BART = {
    **{"encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 37},
    **{"decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 37},
    **{"d_model": 32, "vocab_size": 99, "max_position_embeddings": 64},
}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 99},
    "llama": GROUPED,
    "mistral": GROUPED | {"sliding_window": 5},
    "qwen3": GROUPED | {"head_dim": 8},
    "gemma2": GROUPED | {"head_dim": 8, "sliding_window": 5},
    "gpt_oss": GROUPED | {"head_dim": 8, "intermediate_size": 32, "num_local_experts": 4},
    "gpt_neox": ONES,
    "olmo2": GROUPED,
    "opt": ONES | {"ffn_dim": 37, "word_embed_proj_dim": 32},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 99},
    "bert": ONES,
    "roberta": ONES | {"pad_token_id": 1},
    "electra": ONES | {"embedding_size": 32},
    "t5": {"d_model": 32, "d_kv": 8, "d_ff": 37, "num_layers": 2, "num_heads": 4, "vocab_size": 99},
    "bart": BART,
    "vit": SIZES | {"intermediate_size": 37, "image_size": 30, "patch_size": 10},
}
"""Models by their type, with every axis as small as it goes."""

RUN = [
    "attention_outputs",
    "batching_equivalence",
    "can_set_attention_dynamically",
    "determinism",
    "eager_matches_batched_and_grouped_inference",
    "eager_matches_sdpa_inference",
    "feed_forward_chunking",
    "hidden_states_output",
    "inputs_embeds",
    "inputs_embeds_matches_input_ids",
    "model_outputs_equivalence",
    "retain_grad_hidden_states_attentions",
    "save_load",
    "sliding_window_mask",
    "training",
    "training_gradient_checkpointing",
    "training_gradient_checkpointing_use_reentrant_false",
    "training_gradient_checkpointing_use_reentrant_true",
]
"""Those of the shared tests that compute attention."""


def load_common() -> ModuleType:
    """transformers' `tests/test_modeling_common.py`, without the parts that its sdist lacks."""
    package = ModuleType("transformers_tests")
    package.__path__ = [str(source("transformers") / "tests")]
    sys.modules[package.__name__] = package
    for name, mixin in (
        ("exporters.test_export", "ExportTesterMixin"),
        ("generation.test_utils", "GenerationTesterMixin"),
    ):
        module = ModuleType(f"{package.__name__}.{name}")
        setattr(module, mixin, type(mixin, (), {}))
        parent = module.__name__.rpartition(".")[0]
        sys.modules[parent] = sys.modules.get(parent) or ModuleType(parent)
        sys.modules[module.__name__] = module
    return __import__(f"{package.__name__}.test_modeling_common", fromlist=["ModelTesterMixin"])


COMMON = load_common()


class Tester:
    """Sizes and inputs of one model, as transformers' tests ask for them."""

    batch_size, is_training = 3, True
    num_hidden_layers, num_attention_heads, hidden_size = 2, 4, 32
    num_masks, mask_length = 4, 9  # of the patches of an image

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.seq_length = 10 if kind == "vit" else 7
        self.encoder_seq_length = self.decoder_seq_length = self.key_length = self.seq_length

    def get_config(self) -> PretrainedConfig:
        return AutoConfig.for_model(self.kind, **MODELS[self.kind])

    def prepare_config_and_inputs_for_common(self) -> tuple[PretrainedConfig, dict[str, Any]]:
        config = self.get_config()
        if self.kind == "vit":
            return config, {"pixel_values": torch.rand(self.batch_size, 3, 30, 30)}
        shape = self.batch_size, self.seq_length
        inputs = {
            "input_ids": torch.randint(3, 99, shape),
            "attention_mask": torch.ones(shape, dtype=torch.long),
        }
        if config.is_encoder_decoder:
            inputs |= {f"decoder_{name}": value.clone() for name, value in inputs.items()}
        return config, inputs


def classes(kind: str) -> tuple[type, ...]:
    """The plain model and the one with a language head."""
    config = Tester(kind).get_config()
    mappings = (
        transformers.MODEL_MAPPING,
        transformers.MODEL_FOR_CAUSAL_LM_MAPPING,
        transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
        transformers.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
    )
    found = [mapping[type(config)] for mapping in mappings if type(config) in mapping]
    if config.is_encoder_decoder:  # without their decoders alone
        found = [model for model in found if "CausalLM" not in model.__name__]
    return tuple(found)


class Watched:
    """What every case has: a tester, model classes, and a watch around each forward."""

    kind: str

    def setUp(self) -> None:
        self.model_tester = Tester(self.kind)

    @pytest.fixture(autouse=True)
    def _watch(self, count: Callable[..., None]) -> Iterator[None]:
        with watched(count):
            yield


def shared_tests(kind: str) -> type[unittest.TestCase]:
    """The shared tests for one model."""
    mixin = COMMON.ModelTesterMixin
    left = {
        name: None
        for name in dir(mixin)
        if name.startswith("test_") and not any(meant(name, run) for run in RUN)
    }
    options = {
        "kind": kind,
        "all_model_classes": classes(kind),
        "is_encoder_decoder": kind in ("t5", "bart"),
        "__module__": __name__,
    }
    return type(f"Test_{kind}", (Watched, mixin, unittest.TestCase), left | options)


def meant(name: str, run: str) -> bool:
    """Whether a test is that one, or one of its parametrised cases."""
    rest = name.removeprefix(f"test_{run}")
    return rest != name and (not rest or rest[1:2].isdigit())


globals().update({f"Test_{kind}": shared_tests(kind) for kind in MODELS})

"""TransformerLens on GPT-2s of ours: the same numbers for circuits."""

import copy
import os
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.models import builtin

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before the imports that read it
from transformer_lens.model_bridge import TransformerBridge
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel


@cache
def random_gpt2() -> Any:
    torch.manual_seed(0)
    sizes = {"n_embd": 24, "n_layer": 3, "n_head": 3, "n_positions": 64, "vocab_size": 512}
    model = GPT2LMHeadModel(GPT2Config(**sizes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


@cache
def trained() -> Any:
    return AutoModelForCausalLM.from_pretrained(builtin()).eval()


@cache
def lens(model: Any, fold: bool = False) -> Any:
    """A copy of the model in TransformerLens' terms."""
    theirs = TransformerBridge.boot_transformers(
        str(builtin()),
        hf_model=copy.deepcopy(model),
        tokenizer=AutoTokenizer.from_pretrained(builtin()),
        device="cpu",
    )
    theirs.enable_compatibility_mode(
        disable_warnings=True,
        fold_ln=fold,
        center_writing_weights=False,
        center_unembed=False,
        fold_value_biases=False,
    )
    return theirs


MODELS = pytest.mark.parametrize("make", [random_gpt2, trained])


@MODELS
@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize("kind", ["Q", "K", "V"])
def test_composition(make: Any, fold: bool, kind: Any) -> None:
    model = make()
    wanted = lens(model, fold).all_composition_scores(kind).scores
    ours = hw.circuits(model, fold=fold).composition(kind).view(wanted.shape)
    after = ~ours.isnan()
    assert after.any()
    torch.testing.assert_close(ours[after], wanted[after], rtol=1e-5, atol=1e-5)
    assert not wanted[~after].any()


@MODELS
def test_copying(make: Any) -> None:
    model = make()
    theirs = lens(model, fold=True)
    circuit: Any = theirs.W_E @ theirs.W_V @ theirs.W_O @ theirs.W_U
    values: Tensor = torch.linalg.eigvals(circuit)
    wanted = values.sum(-1).real / values.abs().sum(-1)
    ours = torch.tensor([row["copying"] for row in hw.circuits(model).table()])
    torch.testing.assert_close(ours, wanted.flatten(), rtol=0, atol=2e-3)  # of V × V eigenvalues

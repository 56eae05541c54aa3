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
from headwise.research import detect_heads, logit_attribution

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before the imports that read it
from transformer_lens import patching
from transformer_lens.head_detector import detect_head
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


TEXT = "The with statement is used to wrap the execution of a block. The with statement is used"


@MODELS
def test_logit_attribution(make: Any) -> None:
    model = make()
    theirs = lens(model, fold=True)
    ids = torch.randint(512, (2, 11), generator=torch.Generator().manual_seed(1))
    _, cache = theirs.run_with_cache(ids)
    right, wrong = torch.tensor([7, 300]), torch.tensor([9, 11])
    stack = cache.stack_head_results(apply_ln=False)
    wanted = cache.logit_attrs(
        stack, right[:, None].expand(ids.shape), wrong[:, None].expand(ids.shape)
    )
    for position in (0, 5, 10):

        def difference(out: Any, position: int = position) -> Tensor:
            rows, logits = torch.arange(2), out.logits[:, position]
            return logits[rows, right] - logits[rows, wrong]

        found = logit_attribution(model, {"input_ids": ids}, difference)
        ours = torch.cat([found[name].transpose(0, 1) for name in found.modules])
        torch.testing.assert_close(ours[..., position], wanted[..., position], rtol=1e-5, atol=1e-5)
        ours[..., position] = 0
        assert not ours.any()


def two_texts() -> tuple[Tensor, Tensor]:
    clean = torch.randint(512, (2, 9), generator=torch.Generator().manual_seed(2))
    corrupted = clean.clone()
    corrupted[:, 3] = torch.tensor([17, 400])
    return clean, corrupted


def last_logit(logits: Tensor) -> Tensor:
    return logits[:, -1, 7] - logits[:, -1, 9]


@MODELS
@pytest.mark.parametrize("positions", [False, True])
def test_patched_logits(make: Any, positions: bool) -> None:

    model, (clean, corrupted) = make(), two_texts()
    theirs = lens(model)
    _, cache = theirs.run_with_cache(clean)
    scan = (
        patching.get_act_patch_attn_head_out_by_pos
        if positions
        else patching.get_act_patch_attn_head_out_all_pos
    )
    wanted = scan(theirs, corrupted, cache, lambda logits: last_logit(logits).mean())
    found = hw.patch(
        model,
        {"input_ids": clean},
        {"input_ids": corrupted},
        lambda out: last_logit(out.logits),
        positions=positions,
    )
    ours = torch.stack([found.patched[name].mean(0) for name in found.patched.modules])
    ours = ours.transpose(1, 2) if positions else ours[..., 0]
    torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-5)


@MODELS
def test_attribution_patching(make: Any) -> None:
    model, (clean, corrupted) = make(), two_texts()
    theirs = lens(model)
    _, cache = theirs.run_with_cache(clean)
    before: dict[str, Tensor] = {}
    slopes: dict[str, Tensor] = {}

    def forward(z: Tensor, hook: Any) -> None:
        before[hook.name] = z.detach()

    def backward(slope: Tensor, hook: Any) -> None:
        slopes[hook.name] = slope.detach()

    at = lambda name: name.endswith("hook_z")  # noqa: E731
    with theirs.hooks(fwd_hooks=[(at, forward)], bwd_hooks=[(at, backward)]):
        last_logit(theirs(corrupted)).sum().backward()
    wanted = torch.stack(
        [((cache[name] - before[name]) * slopes[name]).sum(-1) for name in before]
    )  # L, B, T, H
    found = hw.patch(
        model,
        {"input_ids": clean},
        {"input_ids": corrupted},
        lambda out: last_logit(out.logits),
        positions=True,
    )
    assert found.estimate is not None
    ours = torch.stack([found.estimate[name] for name in found.estimate.modules])
    torch.testing.assert_close(ours, wanted.transpose(2, 3), rtol=1e-5, atol=1e-5)


@MODELS
@pytest.mark.parametrize("kind", ["previous_token_head", "duplicate_token_head", "induction_head"])
@pytest.mark.parametrize("options", [{}, {"exclude_bos": True}, {"exclude_current_token": True}])
@pytest.mark.parametrize("measure", ["mul", "abs"])
def test_detectors(make: Any, kind: Any, options: dict[str, bool], measure: Any) -> None:

    model = make()
    theirs = lens(model)
    ids = theirs.to_tokens(TEXT)
    wanted = detect_head(theirs, TEXT, kind, error_measure=measure, **options)
    found = detect_heads(model, ids, kind, measure=measure, inputs={"input_ids": ids}, **options)
    ours = torch.stack([found[name][0] for name in found.modules])
    atol = 1e-5 if measure == "mul" else 5.1e-4  # theirs is rounded to three digits
    torch.testing.assert_close(ours, wanted, rtol=0, atol=atol)

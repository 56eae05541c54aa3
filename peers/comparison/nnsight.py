"""nnsight: any PyTorch model, traced."""

from __future__ import annotations

from collections.abc import Callable

import torch
from nnsight import NNsight
from torch import Tensor

from . import shared

PACKAGES = ["nnsight==0.8.1", "transformers==5.23.0"]


def weights() -> str:
    model, inputs = shared.bert()
    wanted = model(**inputs, output_attentions=True).attentions[1].detach()
    traced = NNsight(model)
    with torch.no_grad(), traced.trace(**inputs):
        found = traced.encoder.layer[1].attention.self.output[1].save()
    return f"yes, of eager attention ({shared.agree(found, wanted)})"


def entropies(length: int) -> Callable[[], list[Tensor]]:
    traced, tokens = NNsight(shared.gpt(length)), shared.ids(length)

    def run() -> list[Tensor]:
        with torch.no_grad(), traced.trace(tokens):
            first = torch.special.entr(traced.transformer.h[0].attn.output[1]).sum(-1).save()
            second = torch.special.entr(traced.transformer.h[1].attn.output[1]).sum(-1).save()
        return [first, second]

    return run


def own_module() -> str:
    own, x = shared.Own(), torch.randn(2, 17, 24)
    traced = NNsight(own)
    with torch.no_grad(), traced.trace(x):
        qkv = traced.qkv.output.save()
    assert torch.equal(qkv, own.qkv(x))
    return "its inputs and outputs; weights by hand from q and k"


def training() -> str:
    model = shared.gpt(32)
    traced, tokens = NNsight(model), shared.ids(32)
    with traced.trace(tokens, labels=tokens):
        found = torch.special.entr(traced.transformer.h[0].attn.output[1]).sum(-1).save()
        loss = traced.output.loss.save()
    loss.backward()
    assert found.shape == (1, 4, 32)
    assert model.transformer.wte.weight.grad.abs().sum() > 0
    return "by a trace of one's own"


def gradients() -> str:
    model = shared.gpt(32)
    traced = NNsight(model)
    with traced.trace(shared.ids(32)):
        pattern = traced.transformer.h[0].attn.output[1].save()
    shared.with_gradient(pattern).sum().backward()
    assert model.transformer.h[0].attn.c_attn.weight.grad.abs().sum() > 0
    return "yes, through the matrix"


def ablation() -> str:
    model, tokens = shared.gpt(32), shared.ids(32)
    traced = NNsight(model)
    with torch.no_grad(), traced.trace(tokens):
        traced.transformer.h[0].attn.c_proj.input[:, :, 64:96] = 0
        without = traced.output.logits.save()
    assert not torch.allclose(model(tokens).logits, without)
    return "yes: assign to a slice of the projection's input"


def patching() -> str:
    model = shared.gpt(32)
    traced = NNsight(model)
    clean, other = shared.ids(32), shared.ids(32).roll(1)
    with torch.no_grad(), traced.trace(clean):
        kept = traced.transformer.h[0].attn.c_proj.input.save()
    with torch.no_grad(), traced.trace(other):
        traced.transformer.h[0].attn.c_proj.input[:, :, 64:96] = kept[:, :, 64:96]
        patched = traced.output.logits.save()
    assert not torch.allclose(model(other).logits, patched)
    return "yes, of any value inside a model"

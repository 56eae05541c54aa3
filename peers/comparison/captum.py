"""captum: attribution for any PyTorch model."""

from __future__ import annotations

from collections.abc import Callable

import torch
from captum.attr import IntegratedGradients, LayerActivation, LayerFeatureAblation
from torch import Tensor

from . import shared

PACKAGES = ["captum==0.9.0", "transformers==5.23.0"]


def weights() -> str:
    model, inputs = shared.bert()
    wanted = model(**inputs, output_attentions=True).attentions[1].detach()
    module = model.encoder.layer[1].attention.self
    states = LayerActivation(lambda ids: model(ids).last_hidden_state, module)
    found = states.attribute(inputs["input_ids"])[1]
    return f"yes, as an activation of eager attention ({shared.agree(found, wanted)})"


def entropies(length: int) -> Callable[[], list[Tensor]]:
    model, tokens = shared.gpt(length), shared.ids(length)

    def run() -> list[Tensor]:
        with torch.no_grad():
            found = []
            for block in model.transformer.h:
                layer = LayerActivation(lambda ids: model(ids).logits, block.attn)
                found.append(shared.entropies(layer.attribute(tokens)[1]))
        return found

    return run


def ablation() -> str:
    model, tokens = shared.gpt(32), shared.ids(32)
    ablator = LayerFeatureAblation(
        lambda ids: model(ids).logits[:, -1, 0], model.transformer.h[0].attn.c_proj
    )
    groups = (torch.arange(128) // 32)[None, None].expand(1, 32, 128)
    found = ablator.attribute(tokens, layer_mask=groups, attribute_to_layer_input=True)
    assert found[0, 0, ::32].unique().numel() == 4  # one effect a head
    return "yes: `LayerFeatureAblation` with a mask of the heads"


def attribution() -> str:
    own, x = shared.Own(), torch.randn(1, 17, 24)
    method = IntegratedGradients(lambda x: own(x)[:, -1, 0])
    found, error = method.attribute(x, n_steps=64, return_convergence_delta=True)
    assert found.shape == x.shape
    assert float(error.abs().max()) < 0.05
    return "yes, of inputs; many methods"

"""inseq: attribution of generated text."""

from __future__ import annotations

from typing import Any

import inseq
import torch

from . import shared

PACKAGES = ["inseq==0.7.1", "transformers==5.23.0"]


def attributed(method: str, **settings: Any) -> Any:
    model, tokenizer = shared.trained()
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token or "<|endoftext|>"
    loaded = inseq.load_model(model, method, tokenizer=tokenizer)
    text = "The with statement wraps"
    given = {"generation_args": {"max_new_tokens": 4}, "show_progress": False, **settings}
    return loaded.attribute(text, **given)


def weights() -> str:
    found = attributed("attention").sequence_attributions[0].target_attributions
    assert found.dim() == 4  # source, target, layer, head
    return "yes, of eager attention, for generated tokens"


def attribution() -> str:
    found = attributed("integrated_gradients", n_steps=8)
    scores = found.sequence_attributions[0].target_attributions
    assert bool(torch.nan_to_num(scores).abs().sum() > 0)
    return "yes, of each generated token"


def page() -> str:
    found = attributed("saliency")
    html = found.show(return_html=True, display=False)
    return f"yes: a heatmap of tokens ({shared.addresses(html)})"

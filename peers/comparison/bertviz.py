"""BertViz: views of weights that a model gives."""

from __future__ import annotations

import torch
from bertviz import head_view, model_view

from . import shared

PACKAGES = ["bertviz==1.4.1", "transformers==5.23.0", "setuptools", "ipython"]


def weights() -> str:
    return "takes them from `output_attentions=True`"


def page() -> str:
    model, inputs = shared.bert()
    with torch.no_grad():
        found = model(**inputs, output_attentions=True).attentions
    tokens = [str(number) for number in inputs["input_ids"][0].tolist()]
    pages = [view(found, tokens, html_action="return").data for view in (head_view, model_view)]
    assert all("attention" in one for one in pages)
    return f"yes: head and model views ({shared.addresses(''.join(pages))})"

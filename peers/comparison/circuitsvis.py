"""CircuitsVis: views for notebooks."""

from __future__ import annotations

import torch
from circuitsvis.attention import attention_heads

from . import shared

PACKAGES = ["circuitsvis==1.43.3", "transformers==5.23.0"]


def weights() -> str:
    return "takes them as an array"


def page() -> str:
    model, inputs = shared.bert()
    with torch.no_grad():
        found = model(**inputs, output_attentions=True).attentions[1][0]
    tokens = [str(number) for number in inputs["input_ids"][0].tolist()]
    html = str(attention_heads(found, tokens))
    return f"yes: the heads of a layer ({shared.addresses(html)})"

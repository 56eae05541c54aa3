"""Which way a model is read: by what it is."""

from __future__ import annotations

import sys
from typing import Any

from .images import Images
from .plain import Plain
from .sample import LookError, Subject
from .transformers import EncoderDecoder, Text


def subject_of(
    model: Any,
    tokenizer: Any,
    *,
    context: int | None = None,
    seed: int = 0,
    target: str | None = None,
) -> Subject:
    """How `model` is to be called and what it reads. Arguments are as in `look()`.

    Raises:
        LookError: a model that reads neither tokens nor an image; arguments that do not fit it.
    """
    kind = type(model).__name__
    theirs = getattr(sys.modules.get("transformers"), "PreTrainedModel", None)
    if theirs is None or not isinstance(model, theirs):
        subject: Subject = Plain(model, tokenizer, context)
    elif hasattr(model, "get_text_features"):
        towers = [
            f"model.{name}" for name, one in model.named_children() if isinstance(one, theirs)
        ]
        raise LookError(
            f"{kind} has a tower for texts and one beside it; look at one of them "
            f"({' or '.join(towers)}), or at a folder that its save_pretrained() writes"
        )
    elif model.main_input_name == "pixel_values":
        subject = Images(model, tokenizer, context)
    elif model.main_input_name != "input_ids":
        raise LookError(
            f"{kind} reads {model.main_input_name}, and a text or an image is what can be looked "
            f"at; hw.watch(model, …) sees the heads of every model"
        )
    elif model.config.is_encoder_decoder:
        return EncoderDecoder(model, tokenizer, context, target)
    else:
        subject = Text(model, tokenizer, context, seed)
    if target is not None:
        raise LookError(
            f"target {target!r}: {kind} has no decoder that could read it; leave it out"
        )
    return subject

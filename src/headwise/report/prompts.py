"""Read prompts in any form as token ids, with the text of each token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from .._text import brief
from .tokens import AnyTokenizer, ids_of


@dataclass(frozen=True, eq=False)
class Prompt:
    """A prompt: its ids, its tokens as text, the inputs of `generate`, and its messages.

    If a prompt is `written`, its joined tokens are its text.
    """

    ids: list[int]
    tokens: list[str]
    inputs: dict[str, Any]
    written: bool = False
    messages: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def places(self) -> Tensor:
        """Return the positions of the tokens that are not padding."""
        mask = self.inputs.get("attention_mask")
        if not isinstance(mask, Tensor):
            return torch.arange(len(self.ids))
        return mask.reshape(-1).cpu().nonzero()[:, 0]


def read_prompt(quoted: str, tokenizer: Any, words: AnyTokenizer, given: Any) -> Prompt:
    """Read a prompt: a text, messages, token ids, or the inputs of `generate`.

    Raises:
        ValueError: anything else, an empty prompt, or several prompts. Errors quote the call.
    """
    inputs: dict[str, Any] = {}
    tokens, messages, written = None, {}, True
    if isinstance(given, str):
        encoded = words.encode(given)
        ids, tokens = encoded.ids, encoded.pieces
    elif isinstance(given, list | tuple) and given and all(isinstance(x, Mapping) for x in given):
        ids, messages = _of_chat(quoted, tokenizer, list(given))
    elif isinstance(given, Mapping):
        inputs = dict(given)
        ids, written = ids_of(inputs.get("input_ids")), False
    else:
        ids, written = ids_of(given), False
    if not ids:
        raise ValueError(
            f"{quoted}: prompt is {brief(given)}; give one text that is not empty, messages as a "
            f"list of dicts, token ids, or a dict with input_ids [1, T]."
        )
    inputs.setdefault("input_ids", torch.tensor([ids]))
    inputs.setdefault("attention_mask", torch.ones(1, len(ids), dtype=torch.long))
    tokens = tokens or token_texts(words, ids, written)
    return Prompt(ids, tokens, inputs, written, messages)


def token_texts(words: AnyTokenizer, ids: list[int], written: bool) -> list[str]:
    """Return the text of each token; if `written`, the decoded text, cut where tokens end."""
    return (written and words.pieces(ids)) or words.texts(ids)


def _of_chat(
    quoted: str, tokenizer: Any, messages: list[Mapping[str, Any]]
) -> tuple[list[int], dict[str, tuple[int, int]]]:
    """Return the ids of a chat, and the range of each message if the template adds them in turn."""
    apply = getattr(tokenizer, "apply_chat_template", None)
    if apply is None:
        raise ValueError(f"{quoted}: {type(tokenizer).__name__} has no chat template; give a text.")

    def ids_of_chat(some: list[Mapping[str, Any]], whole: bool) -> list[int]:
        return list(
            apply(some, add_generation_prompt=whole, tokenize=True, return_dict=True)["input_ids"]
        )

    ids = ids_of_chat(messages, True)
    ranges, start = {}, 0
    for number, message in enumerate(messages):
        try:
            until = ids_of_chat(messages[: number + 1], False)
        except Exception:  # a template may reject a chat, such as one without a question
            return ids, {}
        if ids[: len(until)] != until:
            return ids, {}
        ranges[f"{number} {message.get('role', 'message')}"] = (start, len(until))
        start = len(until)
    return ids, ranges


def text_range(quoted: str, prompt: Prompt, name: str, text: str) -> tuple[int, int]:
    """Return the range of tokens that holds the first occurrence of a text in a prompt.

    Raises:
        ValueError: it does not occur.
    """
    begin = "".join(prompt.tokens).find(text) if text else -1
    if begin < 0:
        raise ValueError(
            f"{quoted}: the text of segment {name!r}, {text!r:.60}, does not occur in the prompt "
            f"as it is tokenized; give its range of tokens (start, stop)."
        )
    ends = list(accumulate(map(len, prompt.tokens)))
    start = next(n for n, end in enumerate(ends) if end > begin)
    stop = next(n for n, end in enumerate(ends) if end >= begin + len(text)) + 1
    return start, stop

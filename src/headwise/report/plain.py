"""Models that are called with token ids alone: headwise's GPT, and any module of one's own."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..models.gpt import GPT
from .other_tokenizers import words_of
from .sample import LookError, Sample, TokenSubject, cross_entropy


class Plain(TokenSubject):
    """A model called as `model(ids)`. If it gives logits of every token, they are taken for those
    of the token after it."""

    kind = "a model of token ids"
    loss_of = "each token after the first"

    def __init__(self, model: nn.Module, tokenizer: Any, context: int | None) -> None:
        super().__init__(model, context)
        self.words = words_of(tokenizer, add_special=False)
        # Where the tokenizer does not say, the first table of a model is mostly that of its tokens.
        tables = [one.num_embeddings for one in model.modules() if isinstance(one, nn.Embedding)]
        size = self.words.size or (tables[0] if tables else None)
        if size is None:
            raise LookError(
                f"tokenizer={tokenizer!r:.80}: it does not say how many tokens there are, nor does "
                f"{type(model).__name__}; give it a vocab_size"
            )
        self.vocab = size
        if isinstance(model, GPT):
            self.kind = "GPT-2, a causal language model"
            self.longest, self.vocab = model.config.n_positions, model.config.vocab_size

    def sample(self, text: Any, name: str) -> Sample:
        encoded = self.encoded(text, name)
        part = self.part("text", encoded.ids, encoded.special, encoded.pieces)
        assert part.ids is not None
        return Sample({"ids": part.ids[None]}, [part], encoded.total, labels=part.ids[None])

    def sample_of_repeats(self, ids: Tensor, before: int, period: int) -> Sample:
        part = self.random_part("text", ids)
        return Sample({"ids": ids}, [part], ids.shape[1], labels=ids, period=period)

    def logits(self, sample: Sample) -> Tensor | None:
        given = self.model(sample.inputs["ids"])
        given = given[0] if isinstance(given, tuple | list) else given
        given = getattr(given, "logits", given)
        like = (*sample.inputs["ids"].shape, self.vocab)
        # A padded vocabulary gives more logits than there are tokens.
        fits = isinstance(given, Tensor) and given.dim() == 3 and given.shape[:2] == like[:2]
        return given if fits and given.shape[2] >= like[2] else None

    def losses_of(self, sample: Sample, logits: Tensor) -> Tensor:
        assert sample.labels is not None
        return cross_entropy(logits[:, :-1], sample.labels[:, 1:])

"""Adapters for models: modules that read token ids, and models of `transformers`."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch
from torch import Tensor, nn

from ..models.gpt import GPT
from .images import Images
from .sample import LookError, Sample, Subject, TokenSubject, cross_entropy, ends_of
from .tokens import AnyTokenizer, tokenizer_of


class Plain(TokenSubject):
    """A model called as `model(ids)`. If it returns logits for every token, they are taken as
    predictions of the next token."""

    kind = "a model of token ids"
    loss_of = "each token after the first"

    def __init__(self, model: nn.Module, tokenizer: Any, context: int | None) -> None:
        super().__init__(model, context)
        self.words = tokenizer_of(tokenizer, add_special=False)
        # If the tokenizer has no size, use the first embedding table, usually that of the tokens.
        tables = [one.num_embeddings for one in model.modules() if isinstance(one, nn.Embedding)]
        size = self.words.size or (tables[0] if tables else None)
        if size is None:
            raise LookError(
                f"tokenizer={tokenizer!r:.80}: neither it nor {type(model).__name__} has a "
                f"vocabulary size; set its attribute vocab_size"
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
        # With a padded vocabulary there are more logits than tokens.
        fits = isinstance(given, Tensor) and given.dim() == 3 and given.shape[:2] == like[:2]
        return given if fits and given.shape[2] >= like[2] else None

    def losses_of(self, sample: Sample, logits: Tensor) -> Tensor:
        assert sample.labels is not None
        return cross_entropy(logits[:, :-1], sample.labels[:, 1:])


HIDDEN = 0.15  # the fraction of tokens that are masked (Devlin et al. 2018)
WRITTEN = 48  # tokens that an encoder–decoder model generates if no target is given

_LENGTHS = (
    "max_position_embeddings",
    "n_positions",
    "max_sequence_length",
    "max_seq_len",
    "max_encoder_position_embeddings",
    "max_decoder_position_embeddings",
)


class TransformersSubject(TokenSubject):
    """A model of `transformers` that reads `input_ids`."""

    model: Any

    def __init__(self, model: Any, tokenizer: Any, context: int | None) -> None:
        super().__init__(model, context)
        self.words = tokenizer_of(tokenizer)
        self.vocab = model.get_input_embeddings().weight.shape[0]
        self.ends = ends_of(self.words)
        self.longest = longest_of(model, self.words)
        known = inspect.signature(model.forward).parameters
        self.options = {"use_cache": False} if "use_cache" in known else {}

    def logits(self, sample: Sample) -> Tensor | None:
        return getattr(self.model(**sample.inputs, **self.options), "logits", None)


class Text(TransformersSubject):
    """A causal language model, or an encoder."""

    def __init__(self, model: Any, tokenizer: Any, context: int | None, seed: int) -> None:
        super().__init__(model, tokenizer, context)
        self.seed = seed
        self.masked = type(model).__name__.endswith("ForMaskedLM")
        self.causal = not self.masked and model.can_generate()
        self.kind = "an encoder"
        if self.causal:
            self.kind, self.loss_of = "a causal language model", "each token after the first"
        elif self.masked and self.words.mask is not None:
            self.kind = "a masked language model"
            self.loss_of = f"{HIDDEN:.0%} of the tokens, masked at random"

    def sample(self, text: Any, name: str) -> Sample:
        encoded = self.encoded(text, name)
        part = self.part("text", encoded.ids, encoded.special, encoded.pieces)
        assert part.ids is not None
        return Sample(_inputs(part.ids[None]), [part], encoded.total, labels=part.ids[None])

    def sample_of_repeats(self, ids: Tensor, before: int, period: int) -> Sample:
        part, labels = self.random_part("text", ids), ids[:, before:]
        return Sample(_inputs(ids), [part], ids.shape[1], labels, period=period)

    def losses(self, sample: Sample) -> Tensor | None:
        if self.masked and self.loss_of:
            return self._losses_of_hidden(sample)
        return super().losses(sample)

    def losses_of(self, sample: Sample, logits: Tensor) -> Tensor | None:
        if not self.causal:
            return None
        assert sample.labels is not None
        logits = logits[:, -sample.labels.shape[1] :]
        return cross_entropy(logits[:, :-1], sample.labels[:, 1:])

    def _losses_of_hidden(self, sample: Sample) -> Tensor:
        """Return the losses on some masked tokens of a text, the same ones each time."""
        ids, special = sample.inputs["input_ids"], set(sample.parts[0].stream.special)
        places = torch.tensor([n for n in range(ids.shape[1]) if n not in special])
        generator = torch.Generator().manual_seed(self.seed)
        order = torch.randperm(len(places), generator=generator)
        hidden = places[order[: max(1, round(HIDDEN * len(places)))]].sort().values
        given = ids.clone()
        given[:, hidden] = self.words.mask or 0
        logits = self.model(**{**sample.inputs, "input_ids": given}, **self.options).logits
        return cross_entropy(logits[:, hidden], ids[:, hidden])


class EncoderDecoder(TransformersSubject):
    """A model whose encoder reads the text and whose decoder reads the target so far.

    The decoder reads the tokens of the target, shifted right. Without a target, at most `WRITTEN`
    tokens are generated greedily.
    """

    kind = "an encoder–decoder language model"
    loss_of = "each token of the target"

    def __init__(self, model: Any, tokenizer: Any, context: int | None, target: str | None) -> None:
        super().__init__(model, tokenizer, context)
        self.target = target
        if not model.can_generate():
            self.loss_of = ""
            if target is None:
                raise LookError(
                    f"{type(model).__name__}: it has no language-model head to generate a target; "
                    f"pass the input of its decoder: target=, or --target"
                )
        self.inside = tuple(
            f"{name}." for name, module in model.named_modules() if module is model.get_encoder()
        )

    def sample(self, text: Any, name: str) -> Sample:
        encoded = self.encoded(text, name)
        read = self.part("encoder", encoded.ids, encoded.special, encoded.pieces)
        assert read.ids is not None
        labels, pieces = self._labels(read.ids[None], name)
        given = self._to_the_right(labels)
        special = tuple(n for n, one in enumerate(given[0].tolist()) if one in self.words.special)
        shifted = None if pieces is None else ["", *pieces[:-1]]
        write = self.part("decoder", given[0].tolist(), special, shifted)
        inputs = _inputs(read.ids[None]) | {"decoder_input_ids": given}
        return Sample(inputs, [read, write], encoded.total, labels, self.inside)

    def sample_of_repeats(self, ids: Tensor, before: int, period: int) -> Sample:
        given = self._to_the_right(ids[:, before : before + 2 * period])
        parts = [self.random_part("encoder", ids), self.random_part("decoder", given)]
        inputs = _inputs(ids) | {"decoder_input_ids": given}
        return Sample(inputs, parts, ids.shape[1], None, self.inside, period)

    def losses_of(self, sample: Sample, logits: Tensor) -> Tensor | None:
        if sample.labels is None:
            return None
        return cross_entropy(logits, sample.labels)

    def _labels(self, ids: Tensor, name: str) -> tuple[Tensor, list[str] | None]:
        """Return the decoder's target `[1, T]` and its text, split into tokens."""
        if self.target is not None:
            encoded = self.words.encode(self.target, self.limit, target=True)
            if len(encoded.ids) < 2 or max(encoded.ids) >= self.vocab:
                raise LookError(f"target of {name}: fewer than two tokens that the model has")
            return torch.tensor(encoded.ids, device=self.device)[None], encoded.pieces
        most = min(WRITTEN, self.limit - 1)
        written = self.model.generate(
            **_inputs(ids), do_sample=False, num_beams=1, min_new_tokens=2, max_new_tokens=most
        )
        labels = written[:, 1:]  # the first is the start token of every decoder
        return labels, self.words.pieces(labels[0].tolist())

    def _to_the_right(self, labels: Tensor) -> Tensor:
        sources = (getattr(self.model, "generation_config", None), self.model.config)
        names = ("decoder_start_token_id", "bos_token_id")
        starts = [getattr(config, name, None) for name in names for config in sources]
        start = next((one for one in starts if one is not None), 0)
        first = torch.full_like(labels[:, :1], start)
        return torch.cat([first, labels[:, :-1]], 1)


def _inputs(ids: Tensor) -> dict[str, Tensor]:
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def longest_of(model: Any, words: AnyTokenizer) -> int | None:
    """Return the longest context that a model's config, position table and tokenizer allow.

    Rows of a position table up to its padding index are not usable (RoBERTa).
    """
    config = model.config.get_text_config()
    lengths = [getattr(config, name, None) for name in _LENGTHS]
    found = [one for one in [*lengths, words.longest] if isinstance(one, int) and one > 1]
    found += [
        module.num_embeddings - module.padding_idx - 1
        for name, module in model.named_modules()
        if name.endswith("position_embeddings")
        and isinstance(module, nn.Embedding)
        and module.padding_idx is not None
    ]
    return min(found, default=None)


def subject_of(
    model: Any,
    tokenizer: Any,
    *,
    context: int | None = None,
    seed: int = 0,
    target: str | None = None,
) -> Subject:
    """Return the adapter for a model. Arguments are as in `look()`.

    Raises:
        LookError: the model reads neither tokens nor images, or does not support an argument.
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
            f"{kind} has separate towers for text and other inputs; pass one of them "
            f"({' or '.join(towers)}), or a folder written by its save_pretrained()"
        )
    elif model.main_input_name == "pixel_values":
        subject = Images(model, tokenizer, context)
    elif model.main_input_name != "input_ids":
        raise LookError(
            f"{kind} reads {model.main_input_name}, but only text and images are supported; "
            f"hw.watch(model, …) captures the heads of any model"
        )
    elif model.config.is_encoder_decoder:
        return EncoderDecoder(model, tokenizer, context, target)
    else:
        subject = Text(model, tokenizer, context, seed)
    if target is not None:
        raise LookError(f"target {target!r}: {kind} has no decoder to read it; leave target out")
    return subject

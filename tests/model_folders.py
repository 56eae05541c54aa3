"""Folders of small random models of `transformers`, with tokenizers trained on a line of text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

from headwise.models.corpus import train_tokenizer

TEXT = "so much, so much naïve. so naïve and much so, and so on and on.\n"
HEADS, WIDTH = 2, 16

NAMES = ("llama", "bert", "t5", "bart", "vit")


def write_folder(name: str, folder: Path, **changes: Any) -> Path:
    """Write the model of that name, with attention far from even, and its tokenizer."""
    import transformers

    make, reader = _MAKERS[name]
    torch.manual_seed(0)
    tokenizer = reader()
    model = make(transformers, tokenizer, changes)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5)
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_picture(path: Path) -> Path:
    """A small picture of noise."""
    from PIL import Image

    noise = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)
    return path


def _fast(tokenizer: Tokenizer, **special: str) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def _bytes_after_start() -> Any:
    tokenizer = train_tokenizer([TEXT], vocab_size=280)
    start = "<|endoftext|>"
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{start} $A", special_tokens=[(start, 0)]
    )  # pyright: ignore
    return _fast(tokenizer, bos_token=start, eos_token=start)


def _word_pieces(special: list[str], template: str) -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token=special[1]))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()  # pyright: ignore
    trainer = trainers.WordPieceTrainer(vocab_size=80, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[(token, n) for n, token in enumerate(special)]
    )  # pyright: ignore
    return tokenizer


def _between_cls_and_sep() -> Any:
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    return _fast(
        _word_pieces(special, "[CLS] $A [SEP]"),
        **{f"{token[1:-1].lower()}_token": token for token in special},
    )


def _before_end() -> Any:
    special = ["<pad>", "<unk>", "</s>"]
    tokenizer = _word_pieces(special, "$A </s>")
    return _fast(tokenizer, pad_token="<pad>", unk_token="<unk>", eos_token="</s>")


def _pixels() -> Any:
    from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

    return ViTImageProcessorPil(size={"height": 32, "width": 24})


def _llama(tf: Any, tokenizer: Any, changes: dict[str, Any]) -> Any:
    sizes = {"hidden_size": 20, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6}
    rest = {"intermediate_size": 32, "num_hidden_layers": 2, "max_position_embeddings": 96}
    ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    config = tf.LlamaConfig(vocab_size=len(tokenizer), **(sizes | rest | ends | changes))
    return tf.LlamaForCausalLM(config)


def _bert(tf: Any, tokenizer: Any, changes: dict[str, Any]) -> Any:
    sizes = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "intermediate_size": 32}
    rest = {"num_hidden_layers": 2, "max_position_embeddings": 64}
    return tf.BertForMaskedLM(tf.BertConfig(vocab_size=len(tokenizer), **(sizes | rest | changes)))


def _t5(tf: Any, tokenizer: Any, changes: dict[str, Any]) -> Any:
    sizes = {"d_model": WIDTH, "d_kv": 8, "d_ff": 32, "num_heads": HEADS, "num_layers": 1}
    ends = {"decoder_start_token_id": 0, "eos_token_id": 2, "pad_token_id": 0}
    config = tf.T5Config(vocab_size=len(tokenizer), **(sizes | ends | changes))
    return tf.T5ForConditionalGeneration(config)


def _bart(tf: Any, tokenizer: Any, changes: dict[str, Any]) -> Any:
    sizes = {
        f"{part}_{what}": value
        for part in ("encoder", "decoder")
        for what, value in (("layers", 1), ("attention_heads", HEADS), ("ffn_dim", 32))
    }
    ends = {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}
    rest = {"d_model": WIDTH, "max_position_embeddings": 64, "forced_eos_token_id": None}
    config = tf.BartConfig(vocab_size=len(tokenizer), **(sizes | ends | rest | changes))
    return tf.BartForConditionalGeneration(config)


def _vit(tf: Any, tokenizer: Any, changes: dict[str, Any]) -> Any:
    sizes = {"hidden_size": WIDTH, "num_attention_heads": HEADS, "intermediate_size": 32}
    rest = {"num_hidden_layers": 1, "image_size": (32, 24), "patch_size": 8}
    return tf.ViTForImageClassification(tf.ViTConfig(**(sizes | rest | changes)))


_MAKERS: dict[str, Any] = {
    "llama": (_llama, _bytes_after_start),
    "bert": (_bert, _between_cls_and_sep),
    "t5": (_t5, _before_end),
    "bart": (_bart, _before_end),
    "vit": (_vit, _pixels),
}

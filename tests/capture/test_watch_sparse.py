"""`watch()` on transformers' models of sparse attention, of which products show only a part."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import headwise as hw
from hugging_cases import transformers

LENGTH, WRITTEN = 64, 9
ALONE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
ALONE |= {"intermediate_size": 48, "vocab_size": 99, "max_position_embeddings": 130}
PAIR = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "vocab_size": 99}
PAIR |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
PAIR |= {"encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4, "vocab_size": 99}
T5 |= {"num_layers": 2, "num_decoder_layers": 2, "local_radius": 4, "global_block_size": 4}
BLOCKS = {"attention_type": "block_sparse", "block_size": 4, "num_random_blocks": 2}
WRITER = ("decoder.layers.{}.self_attn", "decoder.layers.{}.encoder_attn")
T5_WRITER = ("decoder.block.{}.layer.0.SelfAttention", "decoder.block.{}.layer.1.EncDecAttention")

SPARSE: dict[str, tuple[str, dict[str, Any], str, tuple[str, ...], str]] = {
    "longformer": (
        "Longformer",
        ALONE | {"attention_window": [8, 8]},
        "encoder.layer.{}.attention.self",
        (),
        "sees 2 of 128 queries",
    ),
    "led": (
        "LED",
        PAIR | {"attention_window": [8, 8]},
        "encoder.layers.{}.self_attn.longformer_self_attn",
        WRITER,
        "sees 2 of 128 queries",
    ),
    "big bird": (
        "BigBird",
        ALONE | BLOCKS,
        "encoder.layer.{}.attention.self",
        (),
        "sees 32 of 128 queries",
    ),
    "big bird pegasus": (
        "BigBirdPegasus",
        PAIR | BLOCKS,
        "encoder.layers.{}.self_attn.self",
        WRITER,
        "sees 32 of 128 queries",
    ),
    "pegasus x": (
        "PegasusX",
        PAIR | {"num_global_tokens": 4, "block_size": 16},
        "encoder.layers.{}.self_attn",
        WRITER,
        "sees 8 of",
    ),
    "long t5, local": (
        "LongT5",
        T5 | {"encoder_attention_type": "local"},
        "encoder.block.{}.layer.0.LocalSelfAttention",
        T5_WRITER,
        "cannot be distinguished",
    ),
    "long t5, global": (
        "LongT5",
        T5 | {"encoder_attention_type": "transient-global"},
        "encoder.block.{}.layer.0.TransientGlobalSelfAttention",
        T5_WRITER,
        "cannot be distinguished",
    ),
}


@pytest.mark.parametrize("name", SPARSE)
@torch.no_grad()
def test_a_part_is_left_out_with_the_reason(name: str) -> None:
    kind, sizes, sparse, dense, reason = SPARSE[name]
    config = getattr(transformers, f"{kind}Config")(**sizes)
    model = getattr(transformers, f"{kind}Model")(config).eval()
    inputs = {"input_ids": torch.randint(5, 99, (2, LENGTH))}
    if "attention_window" in sizes:
        inputs["global_attention_mask"] = torch.arange(LENGTH).expand(2, -1).lt(1).long()
    if dense:
        inputs["decoder_input_ids"] = torch.randint(5, 99, (2, WRITTEN))
    plain = model(**inputs)
    with hw.watch(model, hw.Entropy()) as seen:
        watched = model(**inputs)
    for one, other in zip(plain.to_tuple(), watched.to_tuple(), strict=True):
        if isinstance(one, Tensor):
            assert torch.equal(one, other)
    layers = range(2)
    assert set(seen.left_out) == {sparse.format(n) for n in layers}
    assert all(reason in said for said in seen.left_out.values()), seen.left_out
    assert set(seen.modules) == {template.format(n) for template in dense for n in layers}
    if not dense:
        with pytest.raises(
            ValueError, match=f"no attention was seen: {sparse.format(0)}: .*{reason}"
        ):
            seen.table()
        return
    counts = {(row["queries"], row["of_queries"]) for row in seen.table()}
    assert counts == {(2 * WRITTEN, 2 * WRITTEN)}

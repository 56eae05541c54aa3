"""`trace()`: what generated tokens attended to in their prompt, held to eager's weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers
from torch import Tensor

import headwise as hw
from browser import Tab, chromium
from headwise.models import builtin, load
from headwise.report.faithful import faithfulness, fit_weights, log_probability
from headwise.report.trace import Trace

TOKENS = 6
GENERATE: dict[str, Any] = dict(min_new_tokens=TOKENS, do_sample=False, pad_token_id=0)
SMALL: dict[str, Any] = dict(
    vocab_size=40, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
)  # fmt: skip


def llama(**more: Any) -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, **more)).eval()


def eager(model: Any, inputs: dict[str, Any], layers: int = 2, **options: Any) -> list[Tensor]:
    """The weights `[L, H, S]` of the query that predicts each token, by transformers' eager."""
    model.set_attn_implementation("eager")
    out = model.generate(
        **inputs, **GENERATE, max_new_tokens=TOKENS, return_dict_in_generate=True,
        output_attentions=True, **options,
    )  # fmt: skip
    return [torch.stack([one[0, :, -1] for one in step[-layers:]]) for step in out.attentions]


def holds(traced: Trace, rows: list[Tensor]) -> None:
    """The trace is what these rows give by its definition."""
    length = len(traced.prompt_ids)
    close: dict[str, Any] = dict(rtol=1e-4, atol=1e-5)
    whole = torch.zeros(len(rows), *rows[0].shape[:2], length + len(rows))
    for step, row in enumerate(rows):
        whole[step, ..., : row.shape[-1]] = row
    prompt = whole[..., :length]
    torch.testing.assert_close(traced.by_token, prompt.sum((1, 2)), **close)
    torch.testing.assert_close(traced.by_head, prompt.sum(0), **close)
    best = whole.flatten(1, 2).argmax(-1)
    ids = torch.tensor([*traced.prompt_ids, *[-1] * len(rows)])
    assert torch.equal(traced.copied, ids[best] == torch.tensor(traced.ids)[:, None])
    shown = prompt.flatten(1, 2).index_fill(-1, torch.tensor(traced.sinks), -1.0)
    k = traced.keys.shape[-1]
    torch.testing.assert_close(traced.weights, shown.topk(k).values.clamp(min=0), **close)
    torch.testing.assert_close(
        traced.masses[..., 0].flatten(),
        whole.flatten(1, 2)[..., traced.sinks].sum(-1).flatten(),
        **close,
    )
    torch.testing.assert_close(
        traced.masses[..., 1], whole.flatten(1, 2)[..., length:].sum(-1), **close
    )


def test_rows_are_those_of_eager() -> None:
    model, ids = llama(), torch.randint(3, 40, (1, 11))
    plain = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, **GENERATE
    )
    traced = hw.trace(model, None, ids, max_new_tokens=TOKENS, heads=["L1H2"], **GENERATE)
    assert traced.ids == plain[0, 11:].tolist()
    rows = eager(model, {"input_ids": ids})
    holds(traced, rows)
    kept = torch.stack([row[1, 2, :11] for row in rows])
    torch.testing.assert_close(traced["L1H2"], kept, rtol=1e-4, atol=1e-5)
    with pytest.raises(KeyError, match="heads="):
        traced["L0H0"]


def test_behind_padding() -> None:
    model, ids = llama(), torch.randint(3, 40, (1, 11))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    traced = hw.trace(model, None, inputs, max_new_tokens=TOKENS, sinks=2, **GENERATE)
    assert traced.sinks == [4, 5]
    holds(traced, eager(model, inputs))
    assert float(traced.by_token[:, :4].sum()) == 0


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("length", [5, 12])
def test_sliding_windows(length: int, cache: str) -> None:
    torch.manual_seed(0)
    config = transformers.MistralConfig(**SMALL, sliding_window=8)
    model: Any = transformers.MistralForCausalLM(config).eval()
    ids = torch.randint(3, 40, (1, length))
    options: dict[str, Any] = {} if cache == "dynamic" else {"cache_implementation": cache}
    traced = hw.trace(model, None, ids, max_new_tokens=TOKENS, **GENERATE, **options)
    rows = eager(model, {"input_ids": ids}, use_cache=False)
    holds(traced, rows)


def test_other_caches_and_chunks() -> None:
    ways: list[dict[str, Any]] = [
        {"cache_implementation": "static"},
        {"prefill_chunk_size": 4},
        {"use_cache": False},
    ]
    for options in ways:
        model, ids = llama(), torch.randint(3, 40, (1, 11))
        traced = hw.trace(model, None, ids, max_new_tokens=TOKENS, **GENERATE, **options)
        holds(traced, eager(model, {"input_ids": ids}))


def test_segments_for_each_token() -> None:
    model, ids = llama(), torch.randint(3, 40, (1, 11))
    parts: dict[str, Any] = {"first": (0, 4), "odd": torch.arange(11) % 2 == 1}
    traced = hw.trace(model, None, ids, max_new_tokens=TOKENS, segments=parts, **GENERATE)
    assert [row["number"] for row in traced.segments] == list(range(TOKENS))
    for row, of_eager in zip(traced.segments, eager(model, {"input_ids": ids}), strict=True):
        mean = of_eager.mean((0, 1))
        wanted = {
            "sinks": mean[0], "first": mean[1:4].sum(), "odd": mean[1:11:2].sum(),
            "other": mean[4:11:2].sum(), "generated": mean[11:].sum(),
        }  # fmt: skip
        for name, value in wanted.items():
            assert row[name] == pytest.approx(float(value), abs=1e-5)


def test_weights_of_heads() -> None:
    model, ids = llama(), torch.randint(3, 40, (1, 11))
    weights = torch.randn(2, 4)
    traced = hw.trace(
        model, None, ids, max_new_tokens=TOKENS, weights=weights, segments={"a": (2, 5)}, **GENERATE
    )
    for row, by_token, segments in zip(
        eager(model, {"input_ids": ids}), traced.by_token, traced.segments, strict=True
    ):
        wanted = torch.einsum("lhs,lh->s", row, weights)
        torch.testing.assert_close(by_token, wanted[:11], rtol=1e-4, atol=1e-5)
        assert segments["a"] == pytest.approx(float(wanted[2:5].sum()), abs=1e-5)


def test_models_that_see_images() -> None:
    torch.manual_seed(0)
    config = cast(Any, transformers.Qwen2VLConfig)(
        text_config=SMALL | {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}},
        vision_config=dict(
            depth=1, embed_dim=16, num_heads=2, mlp_ratio=1, patch_size=4, hidden_size=32,
            spatial_merge_size=2, temporal_patch_size=2,
        ),
        image_token_id=39, video_token_id=38, vision_start_token_id=37, vision_end_token_id=36,
    )  # fmt: skip
    model: Any = transformers.Qwen2VLForConditionalGeneration(config).eval()
    for length in (12, 16):  # the encoder attends over 16 patches
        ids = torch.randint(3, 30, (1, length))
        ids[:, 2] = 37
        ids[:, 3:7] = 39
        ids[:, 7] = 36
        inputs = {
            "input_ids": ids, "attention_mask": torch.ones_like(ids),
            "pixel_values": torch.randn(16, 3 * 2 * 4 * 4),
            "image_grid_thw": torch.tensor([[1, 4, 4]]),
            "mm_token_type_ids": (ids == 39).long(),
        }  # fmt: skip
        model.set_attn_implementation("sdpa")
        traced = hw.trace(model, None, inputs, max_new_tokens=TOKENS, **GENERATE)
        assert traced.names == ("image",)
        image = traced.by_head[..., 3:7].sum() / TOKENS / len(traced.heads)
        mean = sum(row["image"] for row in traced.segments) / TOKENS
        assert mean == pytest.approx(float(image), abs=1e-5)
        assert {row["module"] for row in traced.heads} == {
            f"model.language_model.layers.{n}.self_attn" for n in (0, 1)
        }
        assert bool(traced.left_out) == (length == 16)
        holds(traced, eager(model, inputs))


def passage(seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(400, generator=generator)[:24].add(100).tolist()


@pytest.mark.parametrize("seed", range(4))
def test_retrieval_heads_are_the_induction_heads(seed: int) -> None:
    model, tokenizer = load(builtin())
    text = passage(seed)
    traced = hw.trace(model, tokenizer, text + text[:8], max_new_tokens=16)
    assert traced.ids == text[8:]
    named = {(row["layer"], row["head"]) for row in traced.retrieval}
    with hw.watch(model, hw.Mass(hw.Induction(torch.tensor([text + text])))) as seen:
        model(torch.tensor([text + text]))
    induction = {(row["layer"], row["head"]) for row in seen.table() if row["induction"] > 0.5}
    assert induction
    assert induction <= named
    places = [n for n, row in enumerate(traced.heads) if (row["layer"], row["head"]) in named]
    weight = traced.of_heads[places].index_fill(1, torch.tensor(traced.sinks), 0.0)
    assert weight[:, 8:24].sum() >= 0.8 * weight.sum()


def test_texts_and_documents() -> None:
    model, tokenizer = load(builtin())
    one, two = "The with statement wraps a block. ", "A class has a name. "
    traced = hw.trace(
        model, tokenizer, one + two + "The", segments={"one": one, "two": two}, max_new_tokens=4
    )
    assert "".join(traced.tokens) == one + two + "The"
    assert list(traced.segments[0])[2:4] == ["one", "two"]
    ends = torch.tensor([len(piece) for piece in traced.tokens]).cumsum(0)
    begins = torch.cat([torch.zeros(1), ends[:-1]])  # a token may lie in both
    mean = traced.by_token[0].index_fill(0, torch.tensor([0]), 0.0) / len(traced.heads)
    for name, start, stop in (("one", 0, len(one)), ("two", len(one), len(one + two))):
        wanted = mean[(ends > start) & (begins < stop)].sum()
        assert traced.segments[0][name] == pytest.approx(float(wanted), abs=1e-5)


class Chat:
    """A tokenizer of letters with a chat template."""

    def encode(self, text: str) -> list[int]:
        return [ord(one) % 37 + 3 for one in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(97 + one % 26) for one in ids)

    def apply_chat_template(self, messages: Any, add_generation_prompt: bool, **_: Any) -> Any:
        text = "".join(f"<{one['role']}>{one['content']}" for one in messages)
        return {"input_ids": self.encode(text + "<a>" * add_generation_prompt)}


def test_messages_are_segments() -> None:
    messages = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]
    traced = hw.trace(llama(), Chat(), messages, max_new_tokens=TOKENS, **GENERATE)
    assert traced.names == ("0 system", "1 user")
    lengths = [len("<system>be kind"), len("<user>hi")]
    start, (a, b) = traced.by_token[0] / 8, lengths
    assert traced.segments[0]["0 system"] == pytest.approx(float(start[1:a].sum()), abs=1e-5)
    assert traced.segments[0]["1 user"] == pytest.approx(float(start[a : a + b].sum()), abs=1e-5)


@pytest.mark.parametrize(
    ("prompt", "options", "words"),
    [
        ("", {}, "one text that is not empty"),
        (torch.zeros(2, 3, dtype=torch.long), {}, "prompt is int64"),
        ([5, 6, 7], {"sinks": -1}, "sinks=-1"),
        ([5, 6, 7], {"heads": ["L9H0"]}, "no head 'L9H0'"),
        ([5, 6, 7], {"heads": ["x"]}, "give its layer and number"),
        ([5, 6, 7], {"segments": {"a": "not there"}}, "does not occur in the prompt"),
        ([5, 6, 7], {"segments": {"sinks": (0, 2)}}, "called 'sinks'"),
        ([5, 6, 7], {"weights": torch.ones(2, 3)}, r"weights \[2, 3\]"),
        ([5, 6, 7], {"num_beams": 2}, "2 rows"),
    ],
    ids=str,
)
def test_what_cannot_be_traced_is_refused(prompt: Any, options: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        hw.trace(llama(), Chat(), prompt, max_new_tokens=3, **options)


def test_models_that_do_not_generate_are_refused() -> None:
    with pytest.raises(ValueError, match="no generate"):
        hw.trace(hw.MultiHeadAttention(24, num_heads=3), None, [1, 2])
    config = cast(Any, transformers.T5Config)(
        d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2, vocab_size=40,
        decoder_start_token_id=0,
    )  # fmt: skip
    with pytest.raises(ValueError, match="encoder–decoder"):
        hw.trace(transformers.T5ForConditionalGeneration(config), None, [1, 2])


@pytest.mark.browser
def test_the_page_shows_one_token_of_some_heads(tmp_path: Path) -> None:
    model, tokenizer = load(builtin())
    text = passage()
    parts = {"copy": (8, 24)}
    traced = hw.trace(model, tokenizer, text + text[:8], max_new_tokens=16, segments=parts)
    with chromium() as browser:
        tab = Tab(browser, traced.save_html(tmp_path / "page.html"))
        page = tab.page

        def shaded() -> list[float]:
            """The weight of each token of the prompt, relative to the largest."""
            style = "spans => spans.map((one) => Number(one.style.getPropertyValue('--w')) ** 2)"
            return page.eval_on_selector_all("#prompt > span", style)

        total = traced.by_token.sum(0)
        total[0] = 0
        assert shaded() == pytest.approx((total / total.max()).tolist(), abs=0.02)
        page.select_option("#heads", label="retrieval heads")
        page.click("#generated button:nth-child(5)")
        assert shaded().index(1.0) == 12  # the token after the previous copy
        assert page.text_content("#notice").startswith("The first token is a sink: it receives 2")
        row = page.text_content("#segments tr.chosen td")
        heads = [traced.heads.index({k: one[k] for k in ("layer", "head", "module")})
                 for one in traced.retrieval]  # fmt: skip
        assert float(row) == pytest.approx(traced.segment_rows(heads)[4]["copy"], abs=1e-3)
        page.select_option("#heads", label="L0H2: transformer.h.0.attn")
        own = torch.zeros(32).index_put((traced.keys[4, 2],), traced.weights[4, 2])
        assert shaded() == pytest.approx((own / own.max()).tolist(), abs=0.02)
        tab.close()


def test_the_page_of_a_long_prompt_is_small() -> None:
    count, heads, length = 64, 32, 32_768
    generator = torch.Generator().manual_seed(0)
    by_token = torch.rand(count, length, generator=generator)
    keys = torch.randint(1, length, (count, heads, 8), generator=generator)
    traced = Trace(
        tokens=[f" w{n * 7919 % 10007}" for n in range(length)],
        generated=["so "] * count,
        prompt_ids=list(range(length)),
        ids=[1] * count,
        by_token=by_token,
        heads=[{"layer": n // 8, "head": n % 8, "module": f"m.{n // 8}"} for n in range(heads)],
        of_heads=torch.rand(heads, length, generator=generator),
        keys=keys,
        weights=torch.rand(count, heads, 8, generator=generator),
        copied=torch.ones(count, heads, dtype=torch.bool),
        masses=torch.rand(count, heads, 2, generator=generator),
        sinks=[0],
    )
    assert len(traced._repr_html_()) < 3_000_000


# --- faithfulness ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gpt2() -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(builtin())


def copied(model: Any, seed: int, number: int, weights: Tensor | None = None) -> Trace:
    """Four passages, and the start of one of them."""
    generator = torch.Generator().manual_seed(seed)
    ids = (100 + torch.randperm(400, generator=generator)[:80]).tolist()
    parts = {f"{n}": (20 * n, 20 * n + 20) for n in range(4)}
    prompt = ids + ids[20 * number : 20 * number + 8]
    return hw.trace(
        model, load(builtin())[1], prompt, segments=parts, max_new_tokens=12, weights=weights
    )


def test_hidden_segments_are_seen_by_no_token(gpt2: Any) -> None:
    traced = copied(gpt2, 0, 1)
    ids = torch.tensor([traced.prompt_ids + traced.ids])
    visible = torch.ones(100, 100).tril().bool()
    visible[:, 1:20] = visible[:, 60:80] = False  # the first token is a sink, and stays
    for hidden, mask in (((), torch.ones(100, 100).tril().bool()), ((0, 3), visible)):
        bias = torch.zeros(1, 1, 100, 100).masked_fill(~mask, torch.finfo(torch.float32).min)
        with torch.no_grad():
            logs = gpt2(ids, attention_mask=bias).logits.log_softmax(-1)[0, 87:99]
        wanted = logs.gather(-1, ids[0, 88:, None]).sum()
        assert log_probability(gpt2, traced, hidden) == pytest.approx(float(wanted), abs=1e-3)


def test_weights_predict_what_hiding_does(gpt2: Any) -> None:
    weights = fit_weights(gpt2, [copied(gpt2, seed, seed) for seed in range(3)], ablations=8)
    assert weights.shape == (3, 4)
    for seed, number in ((12, 2), (11, 1), (10, 0)):
        rows = {
            row["hidden"]: row for row in faithfulness(gpt2, copied(gpt2, seed, number, weights))
        }
        assert rows["weights"]["segments"] == [str(number)]
        assert rows["weights"]["fall"] >= rows["attention"]["fall"] - 1e-3
        assert rows["weights"]["fall"] > max(rows["recent"]["fall"], rows["random"]["fall"]) + 10


def test_what_cannot_be_held_to_ablations_is_refused(gpt2: Any) -> None:
    plain = hw.trace(gpt2, None, [5, 6, 7], max_new_tokens=2)
    for call in (lambda: fit_weights(gpt2, [plain]), lambda: fit_weights(gpt2, [])):
        with pytest.raises(ValueError, match=r"segments|traces"):
            call()
    with pytest.raises(ValueError, match="has 0 segments"):
        faithfulness(gpt2, plain)
    own, tokenizer = load(builtin())
    traced = hw.trace(own, tokenizer, [5, 6, 7], segments={"a": (1, 2), "b": (2, 3)})
    with pytest.raises(ValueError, match="no attention_mask"):
        faithfulness(own, traced)

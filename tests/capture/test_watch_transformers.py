"""`watch()` on transformers' models, beside what `eager` gives with `output_attentions=True`."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

import headwise as hw
from hugging_cases import (
    CASES,
    SOURCE,
    STATISTICS,
    B,
    Inputs,
    T,
    apart,
    tokens,
    transformers,
    valid_queries,
)


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_what_is_seen_is_what_eager_gives(name: str, padded: bool) -> None:
    case = CASES[name]
    inputs = case.inputs(padded)
    truth = case.model(attn_implementation="eager")(**inputs, output_attentions=True)
    for options in [{}, {"attn_implementation": "eager"}]:
        model = case.model(**options)
        implementation = options.get("attn_implementation", case.default)
        assert model.config._attn_implementation == implementation
        plain = model(**inputs)
        with hw.watch(model, *STATISTICS) as seen:
            watched = model(**inputs)
        for one, other in zip(plain.to_tuple(), watched.to_tuple(), strict=True):
            if isinstance(one, Tensor):
                assert torch.equal(one, other)
        names = {template.format(n) for template in case.where.values() for n in range(2)}
        assert set(seen.modules) == names
        for output, template in case.where.items():
            for n, p in enumerate(truth[output]):
                module = template.format(n)
                difference = apart(seen, module, p, valid_queries(output, inputs, p))
                assert difference < 1e-5, (implementation, module, difference)
                assert len(seen[module].calls) == 1


WRITERS = [
    ("gpt2", "LMHeadModel", "growing", True),
    ("llama", "ForCausalLM", "static", False),
    ("mistral", "ForCausalLM", "growing", True),
    ("gemma2", "ForCausalLM", "static", True),
    ("gpt-oss", "ForCausalLM", "growing", True),
    ("t5", "ForConditionalGeneration", "static", True),
    ("bart", "ForConditionalGeneration", "growing", True),
]


@pytest.mark.parametrize(("name", "kind", "cache", "padded"), WRITERS)
def test_the_steps_of_a_generation_are_the_rows_of_the_whole(
    name: str, kind: str, cache: str, padded: bool
) -> None:
    case, new = CASES[name], 7
    model = case.model(kind)
    inputs = {n: x for n, x in case.inputs(padded).items() if not n.startswith("decoder")}
    options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
    options |= {"cache_implementation": cache} if cache == "static" else {}
    statistics = (hw.Entropy(), hw.Distance(), hw.Mass(hw.Previous()), hw.Received())
    plain = model.generate(**inputs, **options)
    with hw.watch(model, *statistics) as seen:
        written = model.generate(**inputs, **options)
    assert torch.equal(plain, written)
    if "encoder_attentions" in case.where:
        whole: Inputs = inputs | {"decoder_input_ids": written}
    else:
        real = inputs.get("attention_mask", torch.ones(B, T, dtype=torch.long))
        real = torch.cat([real, torch.ones(B, new, dtype=torch.long)], 1)
        whole = {"input_ids": written, "attention_mask": real}
        if name == "gpt2":  # places are counted from the first real token
            whole["position_ids"] = (real.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad(), hw.watch(model, *statistics) as together:
        model(**whole)
    assert seen.modules == together.modules
    for module in seen.modules:
        calls, once = seen[module].calls, together[module].calls[0]
        if ".encoder" in f".{module}" and "encoder_attn" not in module:
            assert len(calls) == 1
            continue
        assert len(calls) == new
        crosses = "ncDec" in module or "encoder_attn" in module
        for key in ["entropy"] if crosses else ["entropy", "distance", "previous"]:
            steps = torch.cat([call[key].values for call in calls], 2)
            wanted = once[key].values[:, :, : steps.shape[2]]
            rows = once[key].rows.expand_as(once[key].values)[:, :, : steps.shape[2]]
            got = torch.cat([call[key].rows.expand_as(call[key].values) for call in calls], 2)
            assert torch.equal(got, rows), (module, key)
            assert (steps - wanted).where(rows, 0.0).abs().max() < 2e-5, (module, key)
        for n, call in enumerate(calls):  # what a static cache holds beyond is no key
            keys = call["received"].values.shape[2]
            assert keys == SOURCE if crosses else keys <= once["received"].values.shape[2] - new + n
            valid = call["entropy"].rows.expand_as(call["entropy"].values).sum(2).float()
            if name != "gpt-oss":
                torch.testing.assert_close(call["received"].values.sum(2), valid)


@torch.no_grad()
def test_sums_of_keys_stay_with_their_tokens() -> None:
    """Where a cache with a window has dropped keys."""
    model = CASES["mistral"].model("ForCausalLM")
    for cache in ("dynamic", "static"):
        options = {"cache_implementation": cache, "do_sample": False, "max_new_tokens": 7}
        inputs = tokens()
        with hw.watch(model, hw.Received(), running=True) as seen:
            written = model.generate(**inputs, **options, min_new_tokens=7)
        with hw.watch(model, hw.Received()) as whole:
            model(written[:, :-1])
        for module in whole.modules:
            wanted = whole[module]["received"].double()
            torch.testing.assert_close(seen[module]["received"], wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["t5", "bart"])
@torch.no_grad()
def test_padding_of_the_source_is_none_of_the_target(name: str) -> None:
    model = CASES[name].model()
    inputs = tokens(T, "right") | tokens(T, None, "decoder_")  # as many queries as keys
    with hw.watch(model, hw.Entropy()) as seen:
        model(**inputs)
    for module in seen.modules:
        rows = seen[module].calls[0]["entropy"].rows
        rows = rows.expand(B, 3, T)
        encodes = module.startswith("encoder")
        assert torch.equal(rows[:, 0], inputs["attention_mask"].bool()) == encodes, module
        assert rows.all() != encodes


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_training_is_left_as_it_is(implementation: str) -> None:
    model = CASES["llama"].model("ForCausalLM", attention_dropout=0.2).train()
    model.set_attn_implementation(implementation)
    ids = tokens()["input_ids"]

    def step() -> tuple[Tensor, list[Tensor | None]]:
        torch.manual_seed(3)
        model.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss, [weight.grad for weight in model.parameters()] + [torch.rand(3)]

    loss, gradients = step()
    with hw.watch(model, hw.Entropy()) as seen:
        watched, same = step()
    assert torch.equal(loss, watched)
    for one, other in zip(gradients, same, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)
    assert len(seen.modules) == 2
    assert not seen["model.layers.0.self_attn"]["entropy"].requires_grad
    # Before dropout: what a head does does not depend on what was dropped of it.
    with torch.no_grad(), hw.watch(model.eval(), hw.Entropy()) as still:
        model(input_ids=ids)
    first = (run["model.layers.0.self_attn"]["entropy"] for run in (seen, still))
    torch.testing.assert_close(*first)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@torch.no_grad()
def test_low_precision_is_no_other_function(dtype: torch.dtype) -> None:
    names = ("gemma2", "llama") + (("gpt-oss",) if dtype.itemsize == 2 else ())
    for name in names:
        model, inputs = CASES[name].model().to(dtype), CASES[name].inputs(True)
        model.set_attn_implementation("eager")
        truth = model(**inputs, output_attentions=True)["attentions"]
        with hw.watch(model, *STATISTICS) as seen:
            model(**inputs)
        valid = valid_queries("attentions", inputs, truth[0])
        small = 1e-5 if dtype == torch.float64 else 64 * torch.finfo(dtype).eps
        assert apart(seen, "layers.0.self_attn", truth[0], valid) < small * T


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@torch.no_grad()
def test_under_autocast(implementation: str) -> None:
    # Its norms and the cast, which no cache undoes, make q and k of another dtype than v.
    model, inputs = CASES["qwen3"].model(), CASES["qwen3"].inputs(True) | {"use_cache": False}
    model.set_attn_implementation(implementation)
    with hw.watch(model, hw.Entropy()) as full:
        model(**inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = model(**inputs)[0]
        with hw.watch(model, hw.Entropy()) as seen:
            assert torch.equal(model(**inputs)[0], plain)
    for one, other in zip(full.table(), seen.table(), strict=True):
        assert one["entropy"] == pytest.approx(other["entropy"], abs=0.05)


@torch.no_grad()
def test_sampled_queries_and_sums() -> None:
    model, inputs = CASES["mistral"].model(), CASES["mistral"].inputs(True)
    with hw.watch(model, hw.Entropy()) as whole:
        model(**inputs)
    with (
        hw.watch(model, hw.Entropy(), queries=[4, 9]) as some,
        hw.watch(model, hw.Entropy(), running=True) as sums,
    ):
        model(**inputs)
    for module in whole.modules:
        drawn, all_of_them = some[module]["entropy"], whole[module]["entropy"]
        torch.testing.assert_close(drawn, all_of_them[:, :, [4, 9]], atol=1e-6, rtol=1e-6)
    for one, other in zip(whole.table(), sums.table(), strict=True):
        assert one["entropy"] == pytest.approx(other["entropy"], abs=1e-6)


@torch.no_grad()
def test_each_thread_sees_its_own_model() -> None:
    models = [CASES["llama"].model() for _ in range(2)]
    inputs = CASES["llama"].inputs(True)
    inside = threading.Barrier(2, timeout=30)
    found: dict[int, int] = {}

    def run(n: int) -> None:
        with torch.no_grad(), hw.watch(models[n], hw.Entropy()) as seen:
            inside.wait()
            for _ in range(n + 1):
                models[n](**inputs)
            inside.wait()
        found[n] = seen.table()[0]["calls"]

    threads = [threading.Thread(target=run, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {0: 1, 1: 2}
    from transformers import AttentionInterface

    assert "__getitem__" not in vars(AttentionInterface)
    assert AttentionInterface.get_interface.__module__.startswith("transformers")


# ── models of their own kind ────────────────────────────────────────────────────────────────────


@torch.no_grad()
def test_bridgetower_is_causal_nowhere() -> None:
    """One class attends with `is_causal` and without, and eager attention ignores it."""
    torch.manual_seed(0)
    text = {"hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 2, "vocab_size": 37}
    text |= {"intermediate_size": 32, "max_position_embeddings": 64}
    vision = {"hidden_size": 64, "image_size": 16, "patch_size": 8, "num_hidden_layers": 2}
    sizes = {"hidden_size": 24, "num_attention_heads": 3, "num_hidden_layers": 2}
    config = transformers.BridgeTowerConfig(text_config=text, vision_config=vision, **sizes)
    model = transformers.BridgeTowerModel(config).eval()
    kept: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        return lambda _, __, out: kept.update({name: out[1]})

    for name, part in model.named_modules():
        if isinstance(part, torch.nn.Linear):
            part.weight.normal_(0.0, 0.3)
        if type(part).__name__ in ("BridgeTowerSelfAttention", "BridgeTowerCrossAttention"):
            part.register_forward_hook(keep(name))
    inputs = {
        "input_ids": torch.randint(3, 37, (2, 7)),
        "attention_mask": torch.ones(2, 7, dtype=torch.long),
        "pixel_values": torch.randn(2, 3, 16, 16),
    }
    with hw.watch(model, hw.Entropy()) as seen:
        model(**inputs)
    assert {model.get_submodule(name).is_causal for name in kept} == {True, False}
    for name, p in kept.items():
        wanted = torch.special.entr(p.double()).sum(-1)
        got = seen[name]["entropy"].double()
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5, msg=name)


@pytest.mark.parametrize("padded", [False, True])
@torch.no_grad()
def test_compressed_keys_stand_behind_the_sequence(padded: bool) -> None:
    """DeepSeek-V4 attends to keys of whole blocks of tokens, which it puts behind the others."""
    made = getattr(transformers, "DeepseekV4Config", None)
    if made is None:
        pytest.skip("this transformers has no DeepSeek-V4")
    torch.manual_seed(0)
    kinds = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
    config = made(
        **{"vocab_size": 99, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4},
        **{"head_dim": 16, "q_lora_rank": 16, "o_lora_rank": 16, "o_groups": 2},
        **{"intermediate_size": 32, "moe_intermediate_size": 16, "n_routed_experts": 4},
        **{"num_experts_per_tok": 2, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 4},
        **{"num_hash_layers": 1, "layer_types": kinds, "sliding_window": 8},
        **{"compress_rates": dict(zip(kinds[1:], (4, 8), strict=True)), "qk_rope_head_dim": 8},
    )
    model = transformers.DeepseekV4Model(config).eval()
    for weight in model.parameters():
        if weight.is_floating_point():
            weight.normal_(0.0, 0.3)
    ids = torch.randint(3, 99, (2, 16))
    real = torch.ones(2, 16, dtype=torch.long)
    if padded:
        real[1, -5:] = 0
    names = [f"layers.{n}.self_attn" for n in range(3)]
    with hw.watch(model, hw.LSE(), hw.Mass(hw.Self()), hw.Mass(hw.First())) as seen:
        out = model(ids, attention_mask=real, use_cache=False, output_attentions=True)
    for name, p in zip(names, out.attentions, strict=True):
        call = seen[name].calls[0]
        rows = call["lse"].rows.expand(2, 4, 16)
        assert torch.equal(rows, real[:, None].bool().expand(2, 4, 16))
        for figure, mass in (("self", p.diagonal(0, -2, -1)), ("first", p[..., 0])):
            torch.testing.assert_close(
                call[figure].values[rows], mass[rows], atol=1e-6, rtol=1e-5, msg=name
            )
    steps, cache = [slice(0, 10), slice(10, 15), slice(15, 16)], None
    with hw.watch(model, hw.Mass(hw.Self())) as seen:
        outs = []
        for step in steps:
            outs.append(model(ids[:, step], past_key_values=cache, output_attentions=True))
            cache = outs[-1].past_key_values
    for layer, name in enumerate(names):
        for step, call, out in zip(steps, seen[name].calls, outs, strict=True):
            p, first = out.attentions[layer], min(step.start, 7)  # a window keeps 7 keys before
            own = p.diagonal(first, -2, -1)
            torch.testing.assert_close(call["self"].values, own, atol=1e-6, rtol=1e-5, msg=name)


@pytest.mark.parametrize("batch", [1, 3, 7, 14])
@torch.no_grad()
def test_xlnet_is_seen_whatever_the_size_of_the_batch(batch: int) -> None:
    sizes = {"vocab_size": 37, "d_model": 24, "n_layer": 1, "n_head": 3, "d_inner": 32}
    torch.manual_seed(0)
    model = transformers.XLNetModel(transformers.XLNetConfig(**sizes)).eval()
    ids = torch.randint(3, 37, (batch, 7))
    with hw.watch(model, hw.Entropy()) as seen:
        p = model(ids, output_attentions=True).attentions[0]
    wanted = torch.special.entr(p.double()).sum(-1)
    got = seen["layer.0.rel_attn"]["entropy"].double()
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)
    target = torch.eye(7)[-1:].expand(batch, 1, 7)
    with hw.watch(model, hw.Entropy()) as seen:  # a second stream of the same queries
        model(ids, perm_mask=torch.eye(7).expand(batch, 7, 7), target_mapping=target)
    assert "7, 7] is one of 2 products of the same queries" in seen.left_out["layer.0.rel_attn"]

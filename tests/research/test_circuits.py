"""Circuits from weights, held to matrices of the residual stream's width."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headwise as hw
from headwise.models import GPT, GPTConfig, builtin, load


def gpt(**sizes: Any) -> GPT:
    given = {"vocab_size": 23, "n_positions": 13, "n_embd": 20, "n_layer": 3, "n_head": 2} | sizes
    torch.manual_seed(1)
    model = GPT(GPTConfig(**given)).eval().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def matrices(model: GPT, layer: int) -> tuple[Tensor, ...]:
    """W_Q, W_K, W_V `[H, D, E]` and W_O `[H, E, D]` as GPT-2 stores them, norms folded."""
    block = model.transformer.h[layer]
    heads = model.config.n_head
    q, k, v = block.attn.c_attn.weight.T.chunk(3)
    out = block.attn.c_proj.weight.T.unflatten(1, (heads, -1)).transpose(0, 1)
    e = q.shape[1]
    fold = torch.diag(block.ln_1.weight) @ (torch.eye(e).double() - 1 / e)
    return *(x.unflatten(0, (heads, -1)) @ fold for x in (q, k, v)), out


def test_composition_is_that_of_whole_matrices() -> None:
    model = gpt()
    found = hw.circuits(model)
    each = [matrices(model, layer) for layer in range(3)]
    norm = torch.linalg.matrix_norm
    for first in range(3):
        for second in range(3):
            for h in range(2):
                for g in range(2):
                    _, _, v, out = (x[h] for x in each[first])
                    q2, k2, v2, out2 = (x[g] for x in each[second])
                    ov, qk, ov2 = out @ v, q2.T @ k2, out2 @ v2
                    wanted = {
                        "Q": norm(qk.T @ ov) / norm(qk) / norm(ov),
                        "K": norm(qk @ ov) / norm(qk) / norm(ov),
                        "V": norm(ov2 @ ov) / norm(ov2) / norm(ov),
                    }
                    for kind, value in wanted.items():
                        score = found.composition(kind)[first * 2 + h, second * 2 + g]
                        if second <= first:
                            assert score.isnan()
                        else:
                            torch.testing.assert_close(score, value, rtol=1e-10, atol=0)


def test_metrics_of_heads_are_those_of_definitions() -> None:
    model = gpt()
    rows = hw.circuits(model, length=13).table()
    last = model.transformer.ln_f.weight
    unembed = model.lm_head.weight * last
    unembed = unembed - unembed.mean(1, keepdim=True)
    for row in rows:
        q, k, v, out = (x[row["head"]] for x in matrices(model, row["layer"]))
        assert row["qk_norm"] == pytest.approx(torch.linalg.matrix_norm(q.T @ k).item(), rel=1e-10)
        assert row["ov_norm"] == pytest.approx(torch.linalg.matrix_norm(out @ v).item(), rel=1e-10)
        values = torch.linalg.eigvals(unembed @ out @ v @ model.transformer.wte.weight.T)
        wanted = (values.sum().real / values.abs().sum()).item()
        assert row["copying"] == pytest.approx(wanted, abs=1e-9)
    block, heads = model.transformer.h[1], 2
    x = block.ln_1(model.transformer.wpe.weight)
    q, k, _ = (
        y.unflatten(1, (heads, -1)).transpose(0, 1) for y in block.attn.c_attn(x).chunk(3, 1)
    )
    scores = (q @ k.mT) * 10**-0.5
    weights = scores.masked_fill(torch.ones(13, 13).triu(1).bool(), -torch.inf).softmax(-1)
    wanted = weights.diagonal(-1, 1, 2).mean(1)
    found = [row["previous_token"] for row in rows if row["layer"] == 1]
    torch.testing.assert_close(
        torch.tensor(found, dtype=torch.float64), wanted.detach(), rtol=1e-10, atol=0
    )


def test_unfolded_weights_are_those_of_the_model() -> None:
    model = gpt()
    found = hw.circuits(model, fold=False)
    q = model.transformer.h[2].attn.c_attn.weight.T[10:20]
    assert torch.equal(found["L2H1"].q, q)
    head = found["L1H0"]
    torch.testing.assert_close(head.qk, head.q.T @ head.k)
    torch.testing.assert_close(head.ov, head.out @ head.v)


def test_other_layouts_and_groups() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=3,
        vocab_size=31,
    )
    torch.manual_seed(0)
    llama = LlamaForCausalLM(config).double().eval()
    with torch.no_grad():
        llama.model.layers[1].input_layernorm.weight.normal_()
    found = hw.circuits(llama)
    attention = llama.model.layers[1].self_attn
    gain = llama.model.layers[1].input_layernorm.weight
    k = attention.k_proj.weight.unflatten(0, (3, 4))[5 // 2] * gain
    torch.testing.assert_close(
        found["L1H5"].k, k.detach(), rtol=1e-6, atol=1e-6
    )  # its norm is in float32
    row = found.table()[-1]
    assert (row["layer"], row["head"], row["module"]) == (1, 5, "model.layers.1.self_attn")
    assert "copying" in row
    assert "previous_token" not in row
    assert "rotary" in found.unavailable["previous_token"]

    layer = nn.TransformerEncoderLayer(20, 2, 16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    found = hw.circuits(encoder)  # post-norm: what q reads is not the norm's
    assert torch.equal(found["L1H1"].q, encoder.layers[1].self_attn.in_proj_weight[10:20].detach())
    assert found.pairs()[0]["from_module"] == "layers.0.self_attn"
    assert set(found.unavailable) == {"copying", "previous_token"}


def test_numbers_are_those_that_a_watch_gives() -> None:
    model, tokenizer = load(builtin())
    ids = torch.tensor([tokenizer.encode("The with statement").ids])
    with torch.no_grad(), hw.watch(model) as seen:
        model(ids)
    assert seen.modules == tuple(dict.fromkeys(r["module"] for r in hw.circuits(model).table()))


def test_wrong_input_is_named() -> None:
    with pytest.raises(ValueError, match=r"circuits\(Linear, …\): none of the known layouts"):
        hw.circuits(nn.Linear(3, 3))
    with pytest.raises(ValueError, match=r"does not fit num_heads=3"):
        hw.circuits(gpt(), num_heads=3)
    with pytest.raises(ValueError, match=r"give 'Q', 'K' or 'V'"):
        hw.circuits(gpt()).composition("q")
    with pytest.raises(ValueError, match=r"circuits\['L9H0'\]: there is no such head"):
        hw.circuits(gpt())["L9H0"]

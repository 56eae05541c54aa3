"""Head outputs, their parts of logits and weighted norms, held to hand-written definitions."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headwise as hw
from headwise.models import GPT, GPTConfig
from headwise.research import logit_attribution, weighted_norms


def gpt(**sizes: Any) -> GPT:
    given = {"vocab_size": 23, "n_positions": 29, "n_embd": 20, "n_layer": 3, "n_head": 2} | sizes
    torch.manual_seed(1)
    model = GPT(GPTConfig(**given)).eval().double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


IDS = torch.randint(23, (2, 11), generator=torch.Generator().manual_seed(0))


def test_outputs_have_every_address_of_a_head() -> None:
    model = gpt()
    outputs = hw.head_outputs(model, IDS)
    name = "transformer.h.2.attn"
    for address in ("L2H1", (2, 1), (name, 1), f"{name}:1"):
        assert torch.equal(outputs[address], outputs["L2"][:, 1])
    assert torch.equal(outputs[name], outputs[2])
    attention = model.transformer.h[2].attn
    found: list[Tensor] = []
    handle = attention.c_proj.register_forward_pre_hook(lambda _, x: found.append(x[0]))
    model(IDS)
    handle.remove()
    assert torch.equal(outputs["L2"].transpose(1, 2).flatten(2), found[0])
    row = outputs.table()[5]
    assert (row["layer"], row["head"], row["module"]) == (2, 1, name)
    length = outputs["L2H1"].norm(dim=-1).mean().item()
    assert row["output_norm"] == pytest.approx(length, rel=1e-6)
    with pytest.raises(KeyError, match="no such layer"):
        outputs["L7H0"]
    with pytest.raises(KeyError, match="has the heads 0 to 1"):
        outputs["L2H2"]


def test_attribution_is_the_projection_of_what_a_head_writes() -> None:
    model = gpt()
    stream: list[Tensor] = []
    handle = model.transformer.ln_f.register_forward_hook(lambda _, x, out: stream.append(x[0]))
    logits = model(IDS)
    handle.remove()
    outputs = hw.head_outputs(model, IDS)
    found = logit_attribution(model, IDS, lambda out: out[:, -1, 5] - out[:, -1, 9])
    norm = model.transformer.ln_f
    scale = (stream[0].var(-1, unbiased=False, keepdim=True) + norm.eps).sqrt()
    direction = model.lm_head.weight[5] - model.lm_head.weight[9]
    for layer in range(3):
        weight = model.transformer.h[layer].attn.c_proj.weight.unflatten(0, (2, 10))
        for head in range(2):
            written = outputs[layer, head] @ weight[head]
            centered = written - written.mean(-1, keepdim=True)
            wanted = (centered / scale * norm.weight) @ direction
            part = found[layer, head]
            torch.testing.assert_close(part[:, -1], wanted[:, -1], rtol=0, atol=1e-10)
            assert not part[:, :-1].any()
    # Without MLPs, with the embeddings and biases, the parts are the whole.
    rest = model.transformer.wte(IDS) + model.transformer.wpe(torch.arange(11))
    for block in model.transformer.h:
        rest = rest + block.attn.c_proj.bias
    with torch.no_grad():
        for block in model.transformer.h:
            block.mlp.c_proj.weight.zero_()
            block.mlp.c_proj.bias.zero_()
    stream.clear()
    handle = norm.register_forward_hook(lambda _, x, out: stream.append(x[0]))
    logits = model(IDS)
    handle.remove()
    scale = (stream[0].var(-1, unbiased=False, keepdim=True) + norm.eps).sqrt()
    direct = (rest - rest.mean(-1, keepdim=True)) / scale * norm.weight + norm.bias
    found = logit_attribution(model, IDS, lambda out: out[:, :, 5].sum(1))
    parts = sum(found[layer].sum(1) for layer in range(3))
    torch.testing.assert_close(
        parts + direct @ model.lm_head.weight[5], logits[..., 5], rtol=0, atol=1e-9
    )
    row = found.table()[0]
    assert row["attribution"] == pytest.approx(found["L0H0"].sum(1).mean().item())


def test_attribution_of_rms_norms_and_none_and_post_norm() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 24, "intermediate_size": 32, "vocab_size": 31}
    llama = LlamaForCausalLM(
        LlamaConfig(**sizes, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    ).eval()
    with torch.no_grad():
        llama.model.norm.weight.normal_()
    stream: list[Tensor] = []
    handle = llama.model.norm.register_forward_hook(lambda _, x, out: stream.append(x[0]))
    llama(IDS)
    handle.remove()
    found = logit_attribution(llama, IDS, lambda out: out.logits[:, -1, 5])
    outputs = hw.head_outputs(llama, IDS)
    weight = llama.model.layers[1].self_attn.o_proj.weight.unflatten(1, (4, 6))[:, 3]
    scale = (stream[0].square().mean(-1, keepdim=True) + 1e-6).sqrt()
    wanted = (outputs["L1H3"] @ weight.T / scale * llama.model.norm.weight) @ llama.lm_head.weight[
        5
    ]
    torch.testing.assert_close(found["L1H3"][:, -1], wanted[:, -1], rtol=1e-4, atol=1e-5)

    post = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(20, 2, 16, batch_first=True), 2, enable_nested_tensor=False
    )
    with pytest.raises(ValueError, match="no head has a direct path"):
        logit_attribution(post.eval(), torch.randn(2, 5, 20), lambda out: out[:, 0, 0])
    layer = hw.MultiHeadAttention(20, num_heads=2)
    x = torch.randn(2, 5, 20)
    found = logit_attribution(layer, x, lambda out: out[:, 3, 7])
    whole = layer(x)[:, 3, 7] - layer.out.bias[7]
    torch.testing.assert_close(found["L0"].sum((1, 2)), whole.detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weighted_norms_are_those_of_the_matrix(dtype: torch.dtype) -> None:
    model = gpt().to(dtype)
    found = weighted_norms(model, IDS)
    of_token = weighted_norms(model, IDS, token=-2)
    for layer in range(3):
        weights = hw.attention_of(model, IDS, layer)
        block = model.transformer.h[layer]
        captured: list[Tensor] = []
        handle = block.attn.c_attn.register_forward_hook(
            lambda _, x, out, c=captured: c.append(out)
        )
        model(IDS)
        handle.remove()
        v = captured[0].chunk(3, -1)[2].unflatten(-1, (2, 10)).transpose(1, 2)
        out = block.attn.c_proj.weight.unflatten(0, (2, 10))
        lengths = (v @ out).norm(dim=-1)
        matrix = (weights * lengths[:, :, None]).detach()
        near = {"rtol": 1e-10, "atol": 1e-10} if dtype == torch.float64 else {}
        torch.testing.assert_close(
            found[layer], matrix.sum(2), **(near or {"rtol": 1e-5, "atol": 1e-5})
        )
        torch.testing.assert_close(
            of_token[layer], matrix[:, :, -2], **(near or {"rtol": 1e-5, "atol": 1e-5})
        )


def test_weighted_norms_of_a_projection_in_another_module() -> None:
    from transformers import BertConfig, BertModel

    sizes: Any = {"hidden_size": 20, "intermediate_size": 28, "vocab_size": 23}
    config = BertConfig(num_attention_heads=2, num_hidden_layers=2, **sizes)
    model: Any = BertModel(config, add_pooling_layer=False).eval()
    found = weighted_norms(model, {"input_ids": IDS}, token=3)
    states = model(IDS, output_hidden_states=True).hidden_states
    for number, block in enumerate(model.encoder.layer):
        v = block.attention.self.value(states[number]).unflatten(-1, (2, 10)).transpose(1, 2)
        out = block.attention.output.dense.weight.unflatten(1, (2, 10)).permute(1, 2, 0)
        weights = hw.attention_of(model, {"input_ids": IDS}, number)
        wanted = weights[:, :, 3] * (v @ out).norm(dim=-1)
        torch.testing.assert_close(found[number], wanted, rtol=1e-5, atol=1e-5)


def test_wrong_input_is_named() -> None:
    with pytest.raises(ValueError, match=r"head_outputs\(Linear, …\): no attention was seen"):
        hw.head_outputs(nn.Linear(2, 2), torch.zeros(1, 2))
    with pytest.raises(ValueError, match="inputs is 'a text'"):
        hw.head_outputs(gpt(), "a text")
    with pytest.raises(ValueError, match="position from 0 to 10"):
        weighted_norms(gpt(), IDS, token=11)
    with pytest.raises(ValueError, match="the score has no gradient"):
        logit_attribution(gpt(), IDS, lambda out: out.detach().sum())

"""QK-clip on the attention that people bring, under adapters of PEFT, and on joint attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise as hw
from brought import BUILDERS, Brought, randomised

E, H, D, T = 24, 4, 6, 7
X = 2 * torch.randn(2, T, E, generator=torch.Generator().manual_seed(3))


def assert_clipped(
    model: nn.Module, call: Callable[[], Any], rule: str, biased: bool = False
) -> Any:
    """Clip some heads, look again, and return the names of the tensors that changed."""

    def tops() -> Tensor:
        with torch.no_grad(), hw.watch(model, hw.MaxLogit()) as seen:
            call()
        (name,) = list(seen)
        return seen[name]["max_logit"].amax(0), seen

    state = {name: x.clone() for name, x in model.state_dict().items()}
    before, seen = tops()
    limit = float(before.sort().values[1:3].mean())
    assert limit > 0
    (gamma,) = hw.qk_clip_(model, seen, limit=limit, rule=rule).values()
    assert 0 < int((gamma < 1).sum()) < len(gamma)
    after, _ = tops()
    if not biased:  # what is added to the scores is not scaled
        torch.testing.assert_close(after, before.clamp(max=limit), rtol=1e-3, atol=1e-4)
    return {name for name, x in model.state_dict().items() if not torch.equal(x, state[name])}


@pytest.mark.parametrize("rule", ["query", "both"])
@pytest.mark.parametrize("build", BUILDERS, ids=lambda build: build.__name__)
def test_modules_of_transformers(build: Callable[[], Brought], rule: str) -> None:
    case = build()
    model = randomised(case.module)
    assert assert_clipped(model, case.call, rule, biased=build.__name__ == "t5")


# ── adapters ────────────────────────────────────────────────────────────────────────────────────


class Adapted(nn.Module):
    """A linear layer with an adapter, with the names and the sum of peft 0.21.2.

    LoRA is `base(x) + B A x`; DoRA multiplies the rows of `W + B A` to norms that are learned; IA3
    multiplies what the base gives.
    """

    def __init__(self, base: nn.Linear, kind: str) -> None:
        super().__init__()
        self.base_layer, self.kind = base, kind
        rows, inputs = base.weight.shape
        if kind == "ia3":
            self.ia3_l = nn.ParameterDict({"default": nn.Parameter(torch.rand(rows) + 0.5)})
            return
        self.lora_A = nn.ModuleDict({"default": nn.Linear(inputs, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, rows, bias=kind == "lora with bias")})
        if kind == "dora":
            self.lora_magnitude_vector = nn.ModuleDict({"default": nn.Module()})
            magnitude: Any = self.lora_magnitude_vector["default"]
            magnitude.weight = nn.Parameter(torch.rand(rows) + 0.5)
        if kind == "vera":
            self.vera_lambda_b = nn.ParameterDict({"default": nn.Parameter(torch.ones(rows))})

    def forward(self, x: Tensor) -> Tensor:
        base: Any = self.base_layer
        if self.kind == "ia3":
            return base(x) * self.ia3_l["default"]
        if self.kind != "dora":
            return base(x) + self.lora_B["default"](self.lora_A["default"](x))
        weight = base.weight + self.lora_B["default"].weight @ self.lora_A["default"].weight
        rows = self.lora_magnitude_vector["default"].weight / weight.norm(dim=1)
        return F.linear(x, rows[:, None] * weight, base.bias)


def adapted(kind: str, names: str) -> nn.Module:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaModel

    config = LlamaConfig(
        hidden_size=E,
        num_attention_heads=H,
        num_key_value_heads=2,
        num_hidden_layers=1,
        intermediate_size=8,
        vocab_size=9,
        attention_bias=True,
    )
    model: Any = LlamaModel(config)
    attention = model.layers[0].self_attn
    for name in names.split():
        setattr(attention, name, Adapted(getattr(attention, name), kind))
    return randomised(model)


@pytest.mark.parametrize("rule", ["query", "both"])
@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("lora", "q_proj v_proj"),
        ("lora", "q_proj k_proj v_proj o_proj"),
        ("lora with bias", "k_proj"),
        ("dora", "q_proj k_proj"),
        ("ia3", "k_proj v_proj"),
    ],
)
def test_base_and_adapter_are_scaled(kind: str, names: str, rule: str) -> None:
    model = adapted(kind, names)
    changed = assert_clipped(model, lambda: model(inputs_embeds=X), rule)
    scaled = "q_proj k_proj" if rule == "both" else "q_proj"
    both = [name for name in scaled.split() if name in names.split() and kind != "ia3"]
    for name in both:
        assert f"layers.0.self_attn.{name}.lora_B.default.weight" in changed
        assert f"layers.0.self_attn.{name}.base_layer.weight" in changed
    assert not any(part in name for name in changed for part in ("lora_A", "v_proj", "ia3_l"))


def test_other_adapters_are_refused() -> None:
    model = adapted("vera", "q_proj")
    with torch.no_grad(), hw.watch(model, hw.MaxLogit()) as seen:
        model(inputs_embeds=X)
    with pytest.raises(ValueError, match=r"PEFT adapters of the kind 'vera_lambda_b' .*cannot be"):
        hw.qk_clip_(model, seen, limit=0.1)


# ── joint attention ─────────────────────────────────────────────────────────────────────────────


class Joint(nn.Module):
    """SD3's attention by the names of diffusers 0.42.1; with norms, that of Flux and SD3.5."""

    def __init__(self, norms: bool) -> None:
        super().__init__()
        for name in "to_q to_k to_v add_q_proj add_k_proj add_v_proj to_add_out".split():
            self.add_module(name, nn.Linear(E, E))
        self.to_out = nn.ModuleList([nn.Linear(E, E)])
        self.heads = H
        for name in "norm_q norm_k norm_added_q norm_added_k".split() if norms else ():
            self.add_module(name, nn.RMSNorm(D))

    def forward(self, image: Tensor, text: Tensor) -> tuple[Tensor, Tensor]:
        def rows(image_by: str, text_by: str) -> Tensor:
            both = self.get_submodule(image_by)(image), self.get_submodule(text_by)(text)
            return torch.cat(both, 1).unflatten(-1, (H, D)).transpose(1, 2)

        q, k, v = rows("to_q", "add_q_proj"), rows("to_k", "add_k_proj"), rows("to_v", "add_v_proj")
        out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        first = image.shape[1]
        return self.to_out[0](out[:, :first]), self.get_submodule("to_add_out")(out[:, first:])


@pytest.mark.parametrize("rule", ["query", "both"])
def test_both_streams_are_scaled(rule: str) -> None:
    model = randomised(Joint(norms=False))
    image, text = X, torch.randn(2, 5, E)
    changed = assert_clipped(model, lambda: model(image, text), rule)
    parts = {"to_q", "add_q_proj"} | ({"to_k", "add_k_proj"} if rule == "both" else set())
    assert {name.split(".")[0] for name in changed} == parts


def test_norms_of_queries_and_keys_are_refused() -> None:
    model = Joint(norms=True)
    with pytest.raises(ValueError, match=r"'norm_q'.*are normalised after their projection"):
        hw.qk_clip_(model, {"": torch.full((H,), 200.0)})

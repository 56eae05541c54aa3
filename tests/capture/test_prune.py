"""Heads that are removed for good: the model gives what it gives with these heads ablated."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import headwise as hw
from brought import BUILDERS, Brought, randomised

E, H, T = 24, 4, 7
X = torch.randn(2, T, E, generator=torch.Generator().manual_seed(1))


def assert_pruned(
    model: nn.Module, heads: Any, call: Callable[[], Any], named: Any = None
) -> dict[str, int]:
    """The heads do something; without them the model gives what it gives when they are ablated."""
    model.eval()
    size = sum(x.numel() for x in model.parameters())
    with torch.no_grad():
        whole = call()
        with hw.ablate(model, heads if named is None else named):
            wanted = call()
        left = hw.prune_(model, heads)
        got = call()
    assert float((whole - wanted).abs().max()) > 1e-3
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    assert sum(x.numel() for x in model.parameters()) < size
    return left


@pytest.mark.parametrize("build", BUILDERS, ids=lambda build: build.__name__)
def test_modules_of_transformers(build: Callable[[], Brought]) -> None:
    case = build()
    model = randomised(case.module)
    grouped = build.__name__ in ("phi", "phi3", "falcon")
    heads = {"": [0, 1]} if grouped else {"": [1]}
    if build.__name__ == "phi3":  # alone: nothing else builds it
        with pytest.raises(ValueError, match="reads the number of its heads from the config"):
            hw.prune_(model, heads)
        return
    (left,) = assert_pruned(model, "L0H1" if not grouped else ["L0H0", (0, 1)], case.call).values()
    assert left == (2 if grouped else 3)
    with hw.watch(model, hw.Entropy()) as seen:
        case.call()
    assert [seen[name].heads for name in seen] == [left]


OWN: dict[str, tuple[Callable[[], nn.Module], Any, int]] = {
    "plain": (lambda: hw.MultiHeadAttention(E, H), [0, 2], 2),
    "groups": (lambda: hw.MultiHeadAttention(E, H, num_kv_heads=2, qk_norm=True), [2, 3], 2),
    "one of each group": (lambda: hw.MultiHeadAttention(E, H, num_kv_heads=2), [1, 2], 2),
    "of one key": (lambda: hw.MultiHeadAttention(E, H, num_kv_heads=1, rope=hw.RoPE(6)), [3], 3),
    "sinks": (lambda: hw.MultiHeadAttention(E, H, sinks=True, head_dim=5), [0], 3),
}


@pytest.mark.parametrize("name", OWN)
def test_headwises_layer(name: str) -> None:
    build, heads, left = OWN[name]
    layer = randomised(build())
    assert assert_pruned(layer, {"": heads}, lambda: layer(X, mask=hw.Causal())) == {"": left}
    cache = hw.KVCache()
    with torch.no_grad():
        parts = [layer(X[:, t : t + 1], mask=hw.Causal(), cache=cache) for t in range(T)]
        torch.testing.assert_close(torch.cat(parts, 1), layer(X, mask=hw.Causal()))


def test_cross_attention_of_another_width() -> None:
    layer, context = randomised(hw.MultiHeadAttention(E, H, kv_dim=10)), torch.randn(2, 5, 10)
    assert_pruned(layer, ["L0H3"], lambda: layer(X, context))


def test_pytorchs_layers_become_headwises() -> None:
    layer = nn.TransformerEncoderLayer(E, H, 16, batch_first=True)
    model = randomised(nn.TransformerEncoder(layer, 2))
    left = assert_pruned(model, ["L0H0", "L1H1", (1, 2)], lambda: model(X))
    assert left == {"layers.0.self_attn": 3, "layers.1.self_attn": 2}
    assert model.state_dict()["layers.1.self_attn.in_proj_weight"].shape == (36, E)


def decoder(kind: str, **more: Any) -> Any:
    import transformers

    sizes = {"num_hidden_layers": 2, "intermediate_size": 8, "vocab_size": 40}
    config = getattr(transformers, f"{kind}Config")(
        **{"hidden_size": E, "num_attention_heads": H, **sizes, "pad_token_id": 0, **more}
    )
    name = "Model" if kind == "Bert" else "LMHeadModel" if kind == "GPT2" else "ForCausalLM"
    return randomised(getattr(transformers, kind + name)(config))


IDS = torch.randint(1, 30, (2, T), generator=torch.Generator().manual_seed(2))


def of(model: Any) -> Callable[[], Tensor]:
    return lambda: model(input_ids=IDS)[0]


@pytest.mark.parametrize(
    ("kind", "more", "heads"),
    [
        ("Llama", {"num_key_value_heads": 2}, ["L0H0", "L0H1", "L1H2", "L1H3"]),
        ("Qwen3", {"num_key_value_heads": 2, "head_dim": 6}, {"model.layers.*": [0, 1]}),
        ("Phi3", {}, ["L0H1", "L1H3"]),
    ],
)
def test_a_config_that_can_say_it_does(
    kind: str, more: dict[str, Any], heads: Any, tmp_path: Any
) -> None:
    model = decoder(kind, **more)
    if isinstance(heads, dict):
        heads = {"*.self_attn": heads["model.layers.*"]}
    left = assert_pruned(model, heads, of(model))
    assert model.config.num_attention_heads == next(iter(left.values()))
    assert not hasattr(model.config, "pruned_heads")
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(of(again)(), of(model)())
        assert torch.equal(
            *(m.generate(IDS, max_new_tokens=3, do_sample=False) for m in (again, model))
        )


@pytest.mark.parametrize(
    ("kind", "more"),
    [("Bert", {}), ("GPT2", {"n_positions": 16}), ("Llama", {"num_key_value_heads": 4})],
)
def test_a_config_that_cannot_say_it_lists_the_heads(
    kind: str, more: dict[str, Any], tmp_path: Any
) -> None:
    from safetensors.torch import load_file
    from transformers import AutoConfig

    model = decoder(kind, **more)
    first, second = (name for name in hw.prune_(copy.deepcopy(model), ["L0H0", "L1H0"]))
    assert_pruned(model, ["L0H1"], of(model))
    assert_pruned(model, ["L0H1", (second, 3)], of(model))  # numbers begin again at 0
    gone = dict(model.config.pruned_heads)
    assert list(gone.values()) == [[1, 2], [3]]
    model.save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match="mismatched"):
        type(model).from_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    again = type(model)(config).eval()
    assert hw.prune_(again, config.pruned_heads) == {first: 2, second: 3}
    again.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=False)
    assert again.config.pruned_heads == gone
    with torch.no_grad():
        assert torch.equal(of(again)(), of(model)())


def t5() -> Any:
    from transformers import T5Config, T5Model

    config = T5Config(d_model=E, d_kv=6, d_ff=8, num_heads=H, num_layers=2, vocab_size=40)
    return randomised(T5Model(config))


def test_t5_shares_the_position_biases_of_its_first_layer() -> None:
    model = t5()
    with pytest.raises(ValueError, match=r"remove the same heads of all 2 layers"):
        hw.prune_(model, ["L0H1"])
    names = "encoder.block.*.SelfAttention", "decoder.block.*.SelfAttention", "*.EncDecAttention"
    heads = {name: [1] for name in names}
    call = lambda: model(input_ids=IDS, decoder_input_ids=IDS)[0]  # noqa: E731
    assert set(assert_pruned(model, heads, call).values()) == {3}
    assert model.config.num_heads == 3


def llava() -> Any:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig
    from transformers import LlavaForConditionalGeneration as Llava

    sizes = {"hidden_size": E, "num_hidden_layers": 2, "intermediate_size": 8}
    vision = CLIPVisionConfig(**sizes, num_attention_heads=3, image_size=8, patch_size=4)
    text = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, vocab_size=40)
    return randomised(Llava(LlavaConfig(vision_config=vision, text_config=text, image_token_id=39)))


def test_a_model_of_two_layouts() -> None:
    model = llava()
    ids = torch.tensor([[1, *[39] * 4, 2, 3]])
    image = torch.randn(1, 3, 8, 8)
    call = lambda: model(input_ids=ids, pixel_values=image)[0]  # noqa: E731
    with pytest.raises(ValueError, match=r"it has several stacks.*give names of modules"):
        hw.prune_(model, ["L0H1"])
    vision, text = (
        "model.vision_tower.encoder.layers.0.self_attn",
        "*language_model.layers.1.self_attn",
    )
    left = assert_pruned(model, {vision: [1], text: [0, 1]}, call)
    assert list(left.values()) == [2, 2]


class Nano(nn.Module):
    """Takes the width of a head from that of its input, as nanoGPT does."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(E, 3 * E), nn.Linear(E, E)
        self.n_head = H

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.n_head, E // self.n_head)).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = map(self.heads, self.c_attn(x).chunk(3, -1))
        out = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.c_proj(out.transpose(1, 2).flatten(2))


class Stubborn(Nano):
    """Divides its rows into three heads whatever it says."""

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (3, -1)).transpose(1, 2)


class Silent(Nano):
    """Says neither how many heads it has nor how wide they are."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = self.__dict__.pop("n_head")
        self.config = type("Config", (), {"n_head": H})()


class Scaled(Nano):
    """Has something of its own of every head."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(H, 1, 1))


def bloom() -> Any:
    from transformers import BloomConfig, BloomModel

    return BloomModel(BloomConfig(hidden_size=E, n_head=H, n_layer=2, vocab_size=40))


def quantized() -> nn.Module:
    layer = hw.MultiHeadAttention(E, H)
    layer.out.weight = nn.Parameter(torch.ones(E, E, dtype=torch.int8), requires_grad=False)
    return layer


def wrapped(module: nn.Module) -> nn.Module:
    return nn.ModuleDict({"attn": module})


GROUPED = hw.MultiHeadAttention(E, H, num_kv_heads=2)


@pytest.mark.parametrize(
    ("model", "heads", "says"),
    [
        (GROUPED, ["L0H0"], r"2 heads share a key and a value each, and of their groups 1, 2"),
        (GROUPED, {"": [0, 1, 2, 3]}, "all of its 4 heads; keep at least one"),
        (GROUPED, ["L0H4"], "it has the heads 0 to 3, and no 4"),
        (GROUPED, ["L1H0"], r"no attention of a known layout is 1; there are 1: ''"),
        (GROUPED, ["L0"], "head 'L0': give its layer and number"),
        (GROUPED, {"attn": [0]}, "the model has no module 'attn'"),
        (nn.Linear(3, 3), ["L0H0"], "none of the known layouts has the names weight, bias"),
        (wrapped(Nano()), {"attn": [0]}, "with fewer heads its forward fails .*input's"),
        (wrapped(Stubborn()), {"attn": [0]}, "its output differs from that with zeros"),
        (wrapped(Silent()), {"attn": [0]}, "none of its attributes is known to hold the number"),
        (wrapped(Scaled()), {"attn": [0]}, "does not contain attn.gain"),
        (bloom(), ["L0H0"], "takes ALiBi biases of each head"),
        (quantized(), ["L0H0"], r"in '' .*: out.weight is quantized or sharded"),
    ],
)
def test_refusals_change_nothing(model: nn.Module, heads: Any, says: str) -> None:
    before = [(name, x) for name, x in model.named_parameters()]
    with pytest.raises(ValueError, match=says) as caught:
        hw.prune_(model, heads)
    assert "\n" not in str(caught.value)
    after = list(model.named_parameters())
    assert [name for name, _ in after] == [name for name, _ in before]
    assert all(x is y for (_, x), (_, y) in zip(before, after, strict=True))

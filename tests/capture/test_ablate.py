"""`ablate()`: a head that is out gives nothing, or nothing about the text, and no other changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import headwise as hw
from headwise.capture.ablate import ablate
from headwise.capture.call import AttentionCall
from headwise.capture.catch import catch
from headwise.capture.reference import AblationReference, ablation_reference
from headwise.core.observers import observers

B, T, HEADS, D = 3, 7, 5, 4
E = HEADS * D


class Plain(nn.Module):
    """Attention as PyTorch's users write it."""

    def __init__(self, by_hand: bool = False) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(E, 3 * E), nn.Linear(E, E)
        self.by_hand = by_hand

    def forward(self, x: Tensor, allowed: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, D)).permute(2, 0, 3, 1, 4)
        if self.by_hand:
            scores = q @ k.transpose(-2, -1) * D**-0.5
            if allowed is not None:
                scores = scores.masked_fill(~allowed, -torch.inf)
            y = F.softmax(scores, dim=-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        return self.proj(y.transpose(1, 2).reshape(x.shape))


class Two(nn.Module):
    """Two layers with a residual stream."""

    def __init__(self, layer: Callable[[], nn.Module] = Plain) -> None:
        super().__init__()
        self.low: Any = layer()
        self.high: Any = layer()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.low(x)
        return x + self.high(x)


class Torch(nn.Module):
    """`nn.MultiheadAttention` with its heads' weights asked for, or not."""

    def __init__(self, need_weights: bool) -> None:
        super().__init__()
        self.attn: Any = nn.MultiheadAttention(E, HEADS, batch_first=True)
        self.need_weights = need_weights

    def forward(self, x: Tensor) -> Tensor:
        return self.attn(x, x, x, need_weights=self.need_weights)[0]


@contextmanager
def before(projection: nn.Module, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """By hand: change what an output projection reads."""
    handle = projection.register_forward_pre_hook(lambda _, given: (change(given[0]), *given[1:]))
    try:
        yield
    finally:
        handle.remove()


def without(*heads: int, size: int = D) -> Callable[[Tensor], Tensor]:
    """What an output projection reads, with the slices of these heads at 0."""

    def change(merged: Tensor) -> Tensor:
        split = merged.clone().unflatten(-1, (-1, size))
        split[..., list(heads), :] = 0
        return split.flatten(-2)

    return change


def outputs(model: nn.Module, *given: Any) -> dict[str, Tensor]:
    """What every module's heads give, `[B, H, T, D]`."""
    found: dict[str, Tensor] = {}

    def listen(call: AttentionCall) -> None:
        found[call.name] = call.out.detach().clone()

    with torch.no_grad(), catch(model, listen):
        model(*given)
    return found


# --- a head that is out: by hand, on every kind of model -------------------------------------


@pytest.mark.parametrize("heads", [[0], [4], [1, 3], [0, 1, 2, 3, 4], []])
def test_own_layer(heads: list[int]) -> None:
    layer = hw.MultiHeadAttention(E, HEADS, num_kv_heads=1)
    x = torch.randn(B, T, E)
    with before(layer.out, without(*heads)):
        by_hand = layer(x, mask=hw.Causal())
    with ablate(layer, {"": heads}):
        ablated = layer(x, mask=hw.Causal())
    assert torch.equal(ablated, by_hand)
    assert torch.equal(ablated, layer(x, mask=hw.Causal())) == (not heads)


@pytest.mark.parametrize("by_hand", [False, True], ids=["sdpa", "softmax"])
def test_attention_written_by_hand(by_hand: bool) -> None:
    model, x = Two(lambda: Plain(by_hand)), torch.randn(B, T, E)
    with before(model.low.proj, without(2)), before(model.high.proj, without(0, 4)):
        expected = model(x)
    with ablate(model, {"low": [2], "high": [0, 4]}):
        ablated = model(x)
    assert torch.equal(ablated, expected)


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_torch_layer(need_weights: bool, training: bool) -> None:
    model: Any = Torch(need_weights).train(training)
    x = torch.randn(B, T, E)
    with torch.no_grad():
        with ablate(model, {"attn": [1, 3]}):
            ablated = model(x)
        model.attn.out_proj.weight.view(E, HEADS, D)[:, [1, 3]] = 0
        torch.testing.assert_close(ablated, model(x))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_torch_encoder_with_its_fast_path(padded: bool, norm_first: bool) -> None:
    block = nn.TransformerEncoderLayer(6 * D, 6, 16, batch_first=True, norm_first=norm_first)
    encoder: Any = nn.TransformerEncoder(block, 2, enable_nested_tensor=not norm_first).eval()
    x = torch.randn(B, T, 6 * D)
    lengths = torch.tensor([T, 4, 6] if padded else [T, T, T])
    empty = torch.arange(T) >= lengths[:, None] if padded else None
    with torch.no_grad():
        with ablate(encoder, {"layers.0.self_attn": [2], "layers.1.self_attn": [0]}):
            ablated = encoder(x, src_key_padding_mask=empty)
        plain = encoder(x, src_key_padding_mask=empty)
        for layer, head in ((0, 2), (1, 0)):
            encoder.layers[layer].self_attn.out_proj.weight.view(6 * D, 6, D)[:, head] = 0
        by_hand = encoder(x, src_key_padding_mask=empty)
    assert ablated.shape == by_hand.shape
    for row, length in enumerate(lengths):
        torch.testing.assert_close(ablated[row, :length], by_hand[row, :length])
    assert not torch.allclose(ablated, plain)


def pretend(name: str, way: str) -> Any:
    """A small model of `transformers` with random weights, `HEADS` heads of `D`."""
    transformers = pytest.importorskip("transformers")
    common = {"vocab_size": 50, "attn_implementation": way}
    bert = {"hidden_size": E, "num_attention_heads": HEADS, "intermediate_size": 16}
    settings = {
        "GPT2": {"n_layer": 2, "n_head": HEADS, "n_embd": E, "n_positions": 16},
        "Llama": {**bert, "num_hidden_layers": 2, "num_key_value_heads": 1, "head_dim": D},
        "Bert": {**bert, "num_hidden_layers": 2},
        "T5": {
            **{"d_model": E, "d_kv": D, "d_ff": 16, "num_heads": HEADS},
            **{"num_layers": 2, "decoder_start_token_id": 0},
        },
    }
    config = getattr(transformers, f"{name}Config")(**common, **settings[name])
    return getattr(transformers, f"{name}Model")(config).eval()


@pytest.mark.parametrize("way", ["sdpa", "eager"])
@pytest.mark.parametrize(
    ("name", "module", "projection"),
    [
        ("GPT2", "h.1.attn", "h.1.attn.c_proj"),
        ("Llama", "layers.0.self_attn", "layers.0.self_attn.o_proj"),
        ("Bert", "encoder.layer.0.attention.self", "encoder.layer.0.attention.output.dense"),
        ("T5", "encoder.block.1.layer.0.SelfAttention", "encoder.block.1.layer.0.SelfAttention.o"),
        ("T5", "decoder.block.0.layer.0.SelfAttention", "decoder.block.0.layer.0.SelfAttention.o"),
        (
            "T5",
            "decoder.block.1.layer.1.EncDecAttention",
            "decoder.block.1.layer.1.EncDecAttention.o",
        ),
    ],
)
def test_models_of_transformers(name: str, module: str, projection: str, way: str) -> None:
    model = pretend(name, way)
    real = torch.tensor([[1] * T, [1] * 4 + [0] * 3, [1] * 6 + [0]])
    given = {"input_ids": torch.randint(0, 50, (B, T)), "attention_mask": real}
    if name == "T5":
        given["decoder_input_ids"] = torch.randint(0, 50, (B, 4))
    with torch.no_grad():
        plain = model(**given).last_hidden_state
        with before(model.get_submodule(projection), without(0, 3)):
            by_hand = model(**given).last_hidden_state
        with ablate(model, {module: [0, 3]}):
            assert torch.equal(model(**given).last_hidden_state, by_hand)
        assert not torch.allclose(by_hand, plain)
        assert torch.equal(model(**given).last_hidden_state, plain)


def test_x_transformers() -> None:
    x_transformers = pytest.importorskip("x_transformers")
    for flash in (False, True):
        model = x_transformers.Decoder(
            dim=E, depth=2, heads=HEADS, attn_dim_head=D, attn_flash=flash
        ).eval()
        x = torch.randn(B, T, E)
        with torch.no_grad():
            name = next(iter(outputs(model, x)))
            projection = model.get_submodule(name.rpartition(".")[0]).to_out
            with before(projection, without(1)):
                by_hand = model(x)
            with ablate(model, {name: [1]}):
                assert torch.equal(model(x), by_hand)


def test_other_heads_and_layers_below_are_untouched() -> None:
    model, x = Two(), torch.randn(B, T, E)
    plain = outputs(model, x)
    with ablate(model, {"low": [1], "high": [0]}, how="mean"):
        ablated = outputs(model, x)
    others = [0, 2, 3, 4]
    assert torch.equal(ablated["low"][:, others], plain["low"][:, others])
    assert not torch.allclose(ablated["low"][:, 1], plain["low"][:, 1])
    assert not torch.allclose(ablated["high"][:, 1], plain["high"][:, 1])  # it reads what is left


def test_patterns_and_tensors_of_heads() -> None:
    model, x = Two(), torch.randn(B, T, E)
    with ablate(model, {"low": [0], "high": [0, 1]}):
        one_by_one = model(x)
    with ablate(model, {"*": torch.tensor([0]), "h*": range(1, 2)}):
        assert torch.equal(model(x), one_by_one)


# --- what takes a head's place ---------------------------------------------------------------


def allowed(lengths: list[int]) -> Tensor:
    """Causal attention of right-padded texts, in which padding attends to nothing."""
    real = torch.arange(T) < torch.tensor(lengths)[:, None]
    causal = torch.ones(T, T, dtype=torch.bool).tril()
    return causal & real[:, None, None, :] & real[:, None, :, None]


@pytest.mark.parametrize("padded", [False, True])
def test_mean_of_the_call_itself(padded: bool) -> None:
    model, x = Plain(), torch.randn(B, T, E)
    lengths = [T, 2, 5] if padded else [T] * B
    mask = allowed(lengths)
    plain = outputs(model, x, mask)[""]
    with ablate(model, {"": [1, 4]}, how="mean"):
        ablated = outputs(model, x, mask)[""]
    for head in (1, 4):
        rows = [plain[b, head, t] for b, length in enumerate(lengths) for t in range(length)]
        mean = torch.stack(rows).mean(0)
        torch.testing.assert_close(ablated[:, head], mean.expand(B, T, D))
    assert torch.equal(ablated[:, 2], plain[:, 2])


def test_padding_that_attends_is_put_in_nowhere() -> None:
    model, name = pretend("Bert", "sdpa"), "encoder.layer.0.attention.self"
    lengths = [T, 2, 5]
    real = (torch.arange(T) < torch.tensor(lengths)[:, None]).long()
    ids = torch.randint(0, 50, (B, T))
    plain = outputs(model, ids, real)[name]
    assert (plain[1, 3, 2:] != 0).all()
    with ablate(model, {name: [3]}, how="mean"):
        ablated = outputs(model, ids, real)[name]
    rows = [plain[b, 3, t] for b, length in enumerate(lengths) for t in range(length)]
    mean = torch.stack(rows).mean(0)
    torch.testing.assert_close(ablated[:, 3], mean.expand(B, T, D))
    with ablate(model, {name: [3]}, how="resample"):
        ablated = outputs(model, ids, real)[name]
    assert torch.equal(ablated[0, 3, 2:5], plain[2, 3, 2:5])
    assert (ablated[0, 3, 5:] == 0).all()


def test_mean_of_reference_texts() -> None:
    model, x = Two(), torch.randn(B, T, E)
    texts = [torch.randn(2, T + 4, E), torch.randn(1, 3, E)]
    reference = ablation_reference(model, lambda model, text: model(text), texts)
    assert reference.modules == ("low", "high")
    given = [outputs(model, text)["high"] for text in texts]
    mean = torch.cat([out[:, 3].flatten(0, 1) for out in given]).mean(0)
    torch.testing.assert_close(reference.mean("high")[3].float(), mean)
    with ablate(model, {"high": [3]}, how="mean", reference=reference):
        ablated = outputs(model, x)["high"]
    torch.testing.assert_close(ablated[:, 3], mean.expand(B, T, D))


def donors(ablated: Tensor, plain: Tensor) -> list[list[int]]:
    """For every row and query, which row of `plain` `[N, T, D]` gave what there is."""
    same = (ablated[:, None] == plain[None]).all(-1)
    assert (same.sum(1) == 1).all()
    return same.long().argmax(1).tolist()


def test_resampling_from_other_rows() -> None:
    model, x = Two(), torch.randn(6, T, E)
    plain = outputs(model, x)
    before_draw = torch.random.get_rng_state()
    with ablate(model, {"low": [1, 2], "high": [2]}, how="resample", seed=1):
        first = outputs(model, x)
        second = outputs(model, x)
    with ablate(model, {"low": [1, 2]}, how="resample", seed=1):
        again = outputs(model, x)
    with ablate(model, {"low": [1, 2]}, how="resample", seed=2):
        other = outputs(model, x)
    assert torch.equal(torch.random.get_rng_state(), before_draw)
    assert torch.equal(first["low"], again["low"])
    found = donors(first["low"][:, 1], plain["low"][:, 1])
    assert all(len(set(row)) == 1 and row[0] != b for b, row in enumerate(found))
    assert donors(first["low"][:, 2], plain["low"][:, 2]) == found
    assert donors(second["low"][:, 1], plain["low"][:, 1]) != found  # every call draws anew
    assert donors(other["low"][:, 1], plain["low"][:, 1]) != found


def test_all_layers_resample_from_the_same_texts() -> None:
    model, x = Two(), torch.randn(6, T, E)
    plain = outputs(model, x)
    with ablate(model, {"high": [0]}, how="resample"):
        high = donors(outputs(model, x)["high"][:, 0], plain["high"][:, 0])
    with ablate(model, {"low": [0]}, how="resample"):
        low = donors(outputs(model, x)["low"][:, 0], plain["low"][:, 0])
    assert low == high


def test_resampling_skips_padding() -> None:
    model, x = Plain(), torch.randn(B, T, E)
    mask = allowed([T, 2, 5])
    plain = outputs(model, x, mask)[""]
    seen = set()
    for seed in range(8):
        with ablate(model, {"": [0]}, how="resample", seed=seed):
            ablated = outputs(model, x, mask)[""][:, 0]
        short = [row[:2] for row in donors(ablated[:, :2], plain[:, 0, :2])]
        seen |= {row[0] for row in short}
        assert torch.equal(ablated[0, 2:5], plain[2, 0, 2:5])  # row 1 is padding there
        assert torch.equal(ablated[1, 5:], plain[0, 0, 5:])
        assert (ablated[0, 5:] == 0).all()  # nobody else is as long
    assert seen == {0, 1, 2}


def test_resampling_from_reference_texts() -> None:
    model, x = Plain(), torch.randn(B, T, E)
    texts = [torch.randn(2, T, E), torch.randn(2, T + 1, E), torch.randn(2, T, E)]
    reference = ablation_reference(model, lambda model, text: model(text), texts, rows=True)
    given = torch.cat([outputs(model, text)[""] for text in (texts[0], texts[2])])
    with ablate(model, {"": [3]}, how="resample", reference=reference):
        found = donors(outputs(model, x)[""][:, 3], given[:, 3])
        assert donors(outputs(model, x[:1])[""][:, 3], given[:, 3])  # a batch of one will do
    assert all(len(set(row)) == 1 for row in found)


def test_reference_is_taken_without_gradients() -> None:
    model = Plain()
    reference = ablation_reference(model, lambda model, x: model(x).sum(), [torch.randn(B, T, E)])
    assert not reference.mean("").requires_grad


# --- gradients, nesting, restoring -----------------------------------------------------------


@pytest.mark.parametrize("how", ["zero", "mean", "resample"])
def test_gradients_flow_through_what_is_left(how: Any) -> None:
    layer, x = Plain(), torch.randn(B, T, E)
    with ablate(layer, {"": [1]}, how=how):
        layer(x).square().sum().backward()
    gradient = layer.qkv.weight.grad
    assert gradient is not None
    for part in gradient.view(3, HEADS, D, E):
        assert (part[1] == 0).all()
        assert (part[[0, 2, 3, 4]].abs().sum((1, 2)) > 0).all()


def test_gradients_equal_those_by_hand() -> None:
    model, x = Two(), torch.randn(B, T, E)
    with before(model.low.proj, without(1)):
        model(x).square().sum().backward()
    by_hand = [p.grad for p in model.parameters()]
    model.zero_grad()
    with ablate(model, {"low": [1]}):
        model(x).square().sum().backward()
    for parameter, expected in zip(model.parameters(), by_hand, strict=True):
        torch.testing.assert_close(parameter.grad, expected)


def test_a_checkpointed_model_is_ablated_again_in_backward() -> None:
    class Checkpointed(Two):
        def forward(self, x: Tensor) -> Tensor:
            for layer in (self.low, self.high):
                x = x + checkpoint(layer, x, use_reentrant=False)
            return x

    model, x = Checkpointed(), torch.randn(B, T, E)
    plain = Two()
    plain.load_state_dict(model.state_dict())
    for one in (plain, model):
        with ablate(one, {"low": [1], "high": [2]}, how="resample"):
            one(x).square().sum().backward()
    for ours, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, expected.grad)


@pytest.mark.parametrize("layer", [Plain, lambda: hw.MultiHeadAttention(E, HEADS)])
def test_watching_an_ablated_model(layer: Callable[[], nn.Module]) -> None:
    model, x = Two(layer), torch.randn(B, T, E)
    with ablate(model, {"low": [0, 2]}), hw.watch(model, hw.OutputNorm()) as inside:
        ablated = model(x)
    with hw.watch(model, hw.OutputNorm()) as outside, ablate(model, {"low": [0, 2]}):
        assert torch.equal(model(x), ablated)
    norms = {(row["module"], row["head"]): row["output_norm"] for row in inside.table()}
    assert [h for h in range(HEADS) if norms["low", h] == 0] == [0, 2]
    assert all(norms["high", h] > 0 for h in range(HEADS))
    whole = {(row["module"], row["head"]): row["output_norm"] for row in outside.table()}
    assert whole["low", 0] > 0  # what the head gave, before it was taken out
    assert whole["high", 1] == pytest.approx(norms["high", 1])


def test_ablations_nest() -> None:
    model, x = Two(), torch.randn(B, T, E)
    with ablate(model, {"low": [0, 2], "high": [1]}):
        at_once = model(x)
    with ablate(model, {"low": [0]}), ablate(model, {"low": [2], "high": [1]}):
        assert torch.equal(model(x), at_once)


def test_everything_is_restored_after_an_exception() -> None:
    model, x = Two(lambda: hw.MultiHeadAttention(E, HEADS)), torch.randn(B, T, E)
    plain = model(x)
    with pytest.raises(ZeroDivisionError), ablate(model, {"low": [0]}):
        model(x / (1 // 0))
    assert torch.equal(model(x), plain)
    with pytest.raises(ValueError, match="no 5"), ablate(model, {"low": [5]}):
        model(x)
    assert torch.equal(model(x), plain)
    assert not observers


# --- faults ----------------------------------------------------------------------------------


def run(model: nn.Module, heads: Any, size: int = B, **keywords: Any) -> None:
    with ablate(model, heads, **keywords):
        model(torch.randn(size, T, E))


@pytest.mark.parametrize(
    ("heads", "keywords", "message"),
    [
        ({"middle": [0]}, {}, r"no module 'middle'; the nearest names are: .*'low'"),
        ({"low": [0, 7, 5]}, {}, r"'low' has the heads 0 to 4, and no 5, 7"),
        ({"low": [-1]}, {}, r"heads of 'low' must be a list of numbers from 0"),
        ({"low": 3}, {}, r"must be a list of numbers"),
        ({"low": [True, False]}, {}, r"must be a list of numbers"),
        ({"low": [0.5]}, {}, r"must be a list of numbers"),
        ({"low.proj": [0]}, {}, r"'low.proj', which did not attend; those that did: 'low', 'high'"),
        ({"low": [0]}, {"how": "noise"}, r"one of zero, mean, resample"),
        ({"low": [0]}, {"reference": AblationReference()}, r"zeros need no reference"),
        ({"low": [0]}, {"how": "resample", "size": 1}, r"batch of one"),
        ({"low": [0]}, {"how": "mean", "reference": AblationReference()}, r"did not reach 'low'"),
        ([{"layer": "low", "head": 2}], {}, r"head {'layer': 'low', 'head': 2}: give its layer"),
        ("low", {}, r"ablate\(Two, 'low', .*head 'low': give its layer and number from 0"),
        (3, {}, r"head 3: give its layer and number from 0, such as \(2, 9\), 'L2H9'"),
        (("low", -1), {}, r"head .* give its layer and number"),
        (
            "L2H0",
            {},
            r"nothing was ablated in layer 2, which did not attend; those that did: ",
        ),
        ("L1H5", {}, r"'high' has the heads 0 to 4, and no 5"),
        ({1.5: [1]}, {}, r"layer 1\.5: give its number from 0"),
        ({"low": [0]}, {"how": "mean", "reference": {"low": 0}}, r"got dict"),
    ],
)
def test_faults_are_named(
    unchecked: None, heads: Any, keywords: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        run(Two(), heads, **keywords)


@pytest.mark.parametrize(
    "heads",
    [
        "L1H2",
        (1, 2),
        ("high", 2),
        "high:2",
        ["L1H2"],
        [("hi*", 2)],
        {1: [2]},
        {"L1": torch.tensor([2])},
        {"high": (2,), "L1": [2]},
    ],
)
def test_a_head_has_one_address(heads: Any) -> None:
    model, x = Two(), torch.randn(B, T, E)
    with ablate(model, {"high": [2]}):
        expected = model(x)
    with ablate(model, heads):
        assert torch.equal(model(x), expected)


def test_several_heads_by_their_addresses() -> None:
    model, x = Two(), torch.randn(B, T, E)
    with ablate(model, {"low": [0], "high": [1, 2]}):
        expected = model(x)
    for heads in (["L0H0", (1, 1), "high:2"], (("low", 0), ("high", 1), ("high", 2))):
        with ablate(model, heads):
            assert torch.equal(model(x), expected)


def test_a_model_that_is_not_called_is_named() -> None:
    with pytest.raises(ValueError, match="the model was not called"), ablate(Two(), {"low": [0]}):
        pass


def test_faults_of_references() -> None:
    model, text = Two(), torch.randn(B, T + 2, E)

    def call(model: nn.Module, x: Tensor) -> Tensor:
        return model(x)

    means = ablation_reference(model, call, [text])
    with pytest.raises(ValueError, match="rows=True"):
        run(model, {"low": [0]}, how="resample", reference=means)
    rows = ablation_reference(model, call, [text], rows=True)
    with pytest.raises(ValueError, match=r"with 7 queries, and the reference has calls with 9"):
        run(model, {"low": [0]}, how="resample", reference=rows)
    other = ablation_reference(Two(lambda: hw.MultiHeadAttention(E, 2)), call, [text])
    with pytest.raises(ValueError, match=r"5 heads of width 4, and the reference 2 of width 10"):
        run(model, {"low": [0]}, how="mean", reference=other)
    with pytest.raises(ValueError, match="no attention was seen"):
        ablation_reference(model, call, [])


def test_what_is_no_model_is_named(unchecked: None) -> None:
    for function, given in (
        (lambda: hw.watch(run, hw.Entropy()).__enter__(), "watch"),  # type: ignore[arg-type]
        (lambda: ablate(run, {"low": [0]}).__enter__(), "ablate"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ValueError, match=rf"{given}\(run, …\): run is not an nn.Module"):
            function()

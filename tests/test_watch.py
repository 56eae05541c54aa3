"""`watch()`: what it gives, that it changes nothing, and that it cleans up."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

import headwise as hw

E, HEADS, T = 12, 3, 7


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.low = hw.MultiHeadAttention(E, HEADS)
        self.high = hw.MultiHeadAttention(E, HEADS, num_kv_heads=1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.low(x, mask=hw.Causal())
        return x + self.high(x, mask=hw.Causal())


def test_sees_every_head_and_changes_nothing() -> None:
    model, x = Two(), torch.randn(2, T, E)
    plain = model(x)
    with hw.watch(model, hw.Entropy(), hw.Mass(hw.Previous()), hw.Map(4)) as seen:
        watched = model(x)
    assert torch.equal(plain, watched)
    table = seen.table()
    assert [(row["layer"], row["head"]) for row in table] == [
        (name, head) for name in ("low", "high") for head in range(HEADS)
    ]
    entropy = seen["low"]["entropy"]
    assert entropy.shape == (2, HEADS, T)
    assert table[0]["entropy"] == pytest.approx(entropy[:, 0].mean().item())
    assert table[0]["previous_coverage"] == pytest.approx((T - 1) / T)
    assert seen["high"]["map"].shape == (2, HEADS, 4, 4)
    assert "map" not in table[0]
    assert model.low.observer is None
    assert seen.modules == ("low", "high")


def test_what_the_layer_does_is_what_is_seen() -> None:
    layer, x = hw.MultiHeadAttention(E, HEADS), torch.randn(2, T, E)
    with hw.watch(layer, hw.Entropy()) as seen:
        layer(x, mask=hw.Window(3))
    q, k, v = layer.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
    by_hand = hw.observe(q, k, v, hw.Entropy(), mask=hw.Window(3))
    torch.testing.assert_close(seen[""]["entropy"], by_hand["entropy"])


def test_several_calls_add_up() -> None:
    model = Two()
    one, two = torch.randn(2, T, E), torch.randn(1, T + 4, E)
    with hw.watch(model, hw.Entropy(), hw.MaxLogit(), hw.Mass(hw.Previous())) as seen:
        model(one)
        model(two)
    row = seen.table()[0]
    assert row["calls"] == 2
    first, second = (call["entropy"].values[:, 0].flatten() for call in seen["low"].calls)
    assert row["entropy"] == pytest.approx(torch.cat([first, second]).mean().item())
    assert row["max_logit"] == max(
        call["max_logit"].values[:, 0].max().item() for call in seen["low"].calls
    )
    assert row["previous_coverage"] == pytest.approx((2 * (T - 1) + T + 3) / (2 * T + T + 4))
    with pytest.raises(ValueError, match="different lengths"):
        seen["low"]["entropy"]
    with hw.watch(model, hw.Entropy()) as seen:
        model(one)
        model(one)
    assert seen["low"]["entropy"].shape == (4, HEADS, T)


def test_everything_is_restored_after_an_exception() -> None:
    model = Two()
    with pytest.raises(RuntimeError), hw.watch(model, hw.Entropy()):
        raise RuntimeError
    assert model.low.observer is None
    assert model.high.observer is None


def test_faults_are_named() -> None:
    with pytest.raises(ValueError, match="no other attention is known"), hw.watch(nn.Linear(2, 2)):
        pass
    model = Two()
    with hw.watch(model) as seen:
        with pytest.raises(ValueError, match="watched already"), hw.watch(model):
            pass
        with pytest.raises(KeyError, match="there are: low, high"):
            seen["middle"]
        with pytest.raises(KeyError, match="was not called"):
            seen["low"]["entropy"]
    assert seen.table() == []


def test_copies_and_pickles_are_not_watched() -> None:
    model = Two()
    with hw.watch(model, hw.Entropy()):
        twin = copy.deepcopy(model)
        again = pickle.loads(pickle.dumps(model))
        assert model.low.observer is not None
    assert twin.low.observer is None
    assert again.high.observer is None


def test_gradients_flow_while_watched() -> None:
    model, x = Two(), torch.randn(2, T, E)
    model(x).square().sum().backward()
    plain = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    with hw.watch(model, hw.Entropy()):
        model(x).square().sum().backward()
    watched = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))

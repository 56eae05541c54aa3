"""Calls as people first write them: each is answered with one line that says what to write."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import headwise as hw
from headwise.capture.modules import attending
from headwise.capture.watch import DEFAULT
from headwise.models import builtin, load
from headwise.stats.detached import Detached

B, H, T, S, D = 2, 3, 7, 5, 4


@pytest.fixture
def qkv() -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(B, H, T, D), torch.randn(B, H, S, D), torch.randn(B, H, S, D)


# --- arguments of other libraries ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"is_causal": True}, r"is_causal=…\): there is no such argument; .* mask=hw.Causal\(\)\."),
        ({"attn_mask": None}, r"mask=hw.Dense\(m\) .* mask=hw.Dense\(~m\) .* mask=hw.Bias\(m\)"),
        ({"key_padding_mask": None}, r"mask=hw.Padding\(lengths\)"),
        ({"dropout_p": 0.1}, "write dropout="),
        ({"need_weights": True}, r"\.weights\(heads=…\)"),
        ({"maks": None}, r"did you mean mask=\?"),
        ({"zzz": None}, "there are: mask, "),
    ],
)
def test_arguments_of_others_are_answered_with_ours(
    qkv: tuple[Tensor, Tensor, Tensor], given: dict[str, Any], says: str
) -> None:
    layer = hw.MultiHeadAttention(24, num_heads=3)
    for call in (
        lambda: hw.attend(*qkv, **given),
        lambda: hw.observe(*qkv, hw.Entropy(), **given),
        lambda: hw.explain(*qkv, **given),
    ):
        with pytest.raises(TypeError, match=says):
            call()
    with pytest.raises(TypeError, match=r"MultiHeadAttention\.forward\(x, .*there is no such"):
        layer(torch.randn(2, 7, 24), **given)


@pytest.mark.parametrize(
    ("mask", "says"),
    [
        (hw.Causal, r"must be a headwise mask, got the class Causal; write mask=Causal\(\)\."),
        (hw.Window, r"write mask=Window\(…\)"),
        ("causal", r"must be a headwise mask, such as headwise.Causal\(\), got the string .causal"),
        (
            torch.ones(T, S, dtype=torch.bool),
            r"Dense\(mask\) where True means 'may attend', .*Dense\(~mask\) where True means 'hid",
        ),
        (torch.zeros(T, S), r"torch.float32 tensor \[7, 5\]; .*Bias\(mask\) adds"),
    ],
)
def test_a_mask_that_is_none_is_answered_with_one(
    qkv: tuple[Tensor, Tensor, Tensor], mask: Any, says: str, unchecked: None
) -> None:
    for call in (hw.attend, hw.observe):
        with pytest.raises(ValueError, match=says) as raised:
            call(*qkv, mask=mask)
        assert "\n" not in str(raised.value)


# --- watching and ablating -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: hw.First(2.5), r"First\(2\.5\): count must be a whole number, at least 1\."),
        (lambda: hw.First(0), r"First\(0\): count must be .* at least 1\."),
        (lambda: hw.Previous("1"), r"Previous\('1'\): .* at least 1\."),
        (lambda: hw.At(0.5), r"At\(0\.5\): offset must be a whole number\."),
        (lambda: hw.TopKeys(2.5), r"TopKeys\(2\.5\): k must be a whole number, at least 1\."),
        (lambda: hw.Map(True), r"Map\(True\): blocks must be a whole number, at least 1\."),
        (lambda: hw.OffsetHistogram(1), r"OffsetHistogram\(1\): .* at least 2\."),
        (lambda: hw.Received(2.5), r"Received\(2\.5\): .* at least 1\."),
        (lambda: hw.Similarity(0), r"Similarity\(0\): .* at least 1\."),
    ],
)
def test_what_counts_something_is_a_whole_number(
    make: Callable[[], object], says: str, unchecked: None
) -> None:
    with pytest.raises(ValueError, match=says):
        make()


@pytest.mark.parametrize("given", ["no", None, 1])
def test_a_flag_is_true_or_false(
    qkv: tuple[Tensor, Tensor, Tensor], given: Any, unchecked: None
) -> None:
    says = f"must be True or False, got {given!r}"
    for flag in ("output", "gradients"):
        with pytest.raises(ValueError, match=f"observe.*{flag} {says}"):
            hw.observe(*qkv, **{flag: given})
    for flag in ("running", "gradients", "padding"):
        with pytest.raises(ValueError, match=rf"watch\(Identity, …\): {flag} {says}"):
            hw.watch(nn.Identity(), **{flag: given}).__enter__()


def test_entries_are_named_by_whole_numbers(
    qkv: tuple[Tensor, Tensor, Tensor], unchecked: None
) -> None:
    seen = hw.observe(*qkv)
    right: list[Any] = [1, np.int64(1), [1], torch.tensor([1]), np.array([1]), range(1, 2)]
    for one in right:
        assert torch.equal(seen.weights(heads=one), seen.weights()[:, [1]])
    wrong: list[Any] = [[0.5], 1.0, "1", True]
    for one in wrong:
        with pytest.raises(ValueError, match=r"weights\(queries=.*\): give a whole number"):
            seen.weights(queries=one)


def test_watching_without_statistics_takes_some() -> None:
    layer, x = hw.MultiHeadAttention(24, num_heads=3), torch.randn(2, 7, 24)
    with torch.no_grad(), hw.watch(layer) as bare, hw.watch(layer, *DEFAULT) as asked:
        layer(x, mask=hw.Causal())
    assert bare.table() == asked.table()
    assert {"entropy", "first", "previous", "self"} <= bare.table()[0].keys()


def test_ablate_suggests_modules_that_attend() -> None:
    from transformers import BertConfig, BertModel

    sizes: dict[str, Any] = {"hidden_size": 12, "num_attention_heads": 3, "intermediate_size": 8}
    model = BertModel(BertConfig(vocab_size=20, num_hidden_layers=2, **sizes)).eval()
    ids = torch.randint(20, (1, 6))
    with torch.no_grad(), hw.watch(model) as seen:
        model(ids)
    assert attending(model) == list(seen.modules)
    with pytest.raises(ValueError, match="of those that attend, the nearest are") as raised:
        hw.ablate(model, {"encoder.layer.0.attn": [0]}).__enter__()
    told = str(raised.value).partition("nearest are: ")[2].rstrip(".").split(", ")
    assert set(told) == {repr(name) for name in seen.modules}
    with pytest.raises(ValueError, match=r"are: '0'; hw\.watch\(model\) lists those"):
        hw.ablate(nn.Sequential(nn.Linear(2, 2)), {"attn": [0]}).__enter__()


# --- statistics without a graph ------------------------------------------------------------------


def _statistics_without_graph() -> list[Tensor]:
    layer, x = hw.MultiHeadAttention(24, num_heads=3), torch.randn(2, 7, 24)
    with hw.watch(layer, hw.Entropy()) as seen:
        layer(x)
    q = torch.randn(B, H, T, D, requires_grad=True)
    observed = hw.observe(q, q, q, hw.Entropy(), gradients=False)
    return [seen[""]["entropy"], observed["entropy"]]


def test_a_backward_pass_through_detached_statistics_names_its_cause() -> None:
    for entropy in _statistics_without_graph():
        assert isinstance(entropy, Detached)
        for wrong in (
            lambda entropy=entropy: (entropy.mean() * 2).backward(),
            lambda entropy=entropy: torch.autograd.backward([entropy.sum()]),
            lambda entropy=entropy: torch.autograd.grad(entropy.sum(), [torch.ones(1)]),
        ):
            with pytest.raises(RuntimeError, match=r"hw\.watch\(model, …, gradients=True\)"):
                wrong()
        weight = torch.ones(1, requires_grad=True)
        with pytest.warns(UserWarning, match="gradients=True"):
            loss = weight.sum() + entropy.mean()
        assert type(loss) is Tensor
        loss.backward()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            (weight.sum() + entropy.mean().detach()).backward()


def test_detached_statistics_are_tensors_in_all_else() -> None:
    for entropy in _statistics_without_graph():
        plain = entropy.as_subclass(Tensor)
        assert repr(entropy) == repr(plain)
        assert f"{entropy.mean():.3f}" == f"{plain.mean():.3f}"
        assert torch.equal(entropy, plain)
        assert (entropy.numpy() == plain.numpy()).all()
        assert type(entropy.detach()) is type(copy.deepcopy(entropy)) is Tensor
        file = io.BytesIO()
        torch.save(entropy, file)
        file.seek(0)
        assert torch.equal(torch.load(file, weights_only=True), plain)


def test_statistics_that_have_no_gradient_to_lose_are_plain_tensors() -> None:
    layer, x = hw.MultiHeadAttention(24, num_heads=3), torch.randn(2, 7, 24)
    with torch.no_grad(), hw.watch(layer, hw.Entropy()) as quiet:
        layer(x)
    with hw.watch(layer, hw.Entropy(), gradients=True) as kept:
        layer(x)
    assert type(quiet[""]["entropy"]) is type(kept[""]["entropy"]) is Tensor
    kept[""]["entropy"].mean().backward()


# --- attention weights ---------------------------------------------------------------------------


class Own(nn.Module):
    """Causal attention by hand, whose weights are there to be compared with."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(H * D, 3 * H * D), nn.Linear(H * D, H * D)
        self.weights: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        b, t, e = x.shape
        q, k, v = (part.view(b, t, H, D).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        hidden = torch.ones(t, t, dtype=torch.bool).triu(1)
        self.weights = ((q @ k.mT) * D**-0.5).masked_fill(hidden, -torch.inf).softmax(-1)
        return self.out((self.weights @ v).transpose(1, 2).reshape(b, t, e))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_attention_of_is_the_models_own(dtype: torch.dtype) -> None:
    model = nn.Sequential(Own(), Own()).to(dtype).train()
    x = torch.randn(B, T, H * D, dtype=dtype) * 3
    tolerance: dict[str, Any] = {"rtol": 0, "atol": 1e-6 if dtype is torch.float32 else 1e-13}
    for layer, number in (("0", 0), ("1", 1)):
        whole = hw.attention_of(model, x, layer)
        own = model[number].weights.detach()
        assert (whole.shape, whole.dtype, whole.requires_grad) == ((B, H, T, T), dtype, False)
        torch.testing.assert_close(whole, own, **tolerance)
        for same in (number, f"L{number}"):
            torch.testing.assert_close(hw.attention_of(model, x, same), whole)
        for same in (f"L{number}H2", (number, 2), (layer, 2), f"{layer}:2"):
            torch.testing.assert_close(hw.attention_of(model, x, same), whole[:, 2])
        torch.testing.assert_close(hw.attention_of(model, (x,), layer, 1), own[:, 1], **tolerance)
        some = hw.attention_of(model, {"input": x}, layer, torch.tensor([2, 0]))
        torch.testing.assert_close(some, own[:, [2, 0]], **tolerance)
    assert model.training


def test_attention_of_a_fused_kernel_is_the_definitions() -> None:
    model, tokenizer = load(builtin())
    ids = torch.tensor([tokenizer.encode("The cat sat on the mat").ids])
    kept: list[Tensor] = []
    rounding: list[float] = []  # of a score in float32, twice: s and the log-sum-exp
    inner = model.transformer.h[1].attn
    attend = inner._attend

    def keep(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
        scores = q.double() @ k.double().mT * q.shape[-1] ** -0.5
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        kept.append(scores.masked_fill(hidden, -torch.inf).softmax(-1))
        rounding.append(2 * torch.finfo(torch.float32).eps * float(scores.abs().max()))
        return attend(q, k, v, *rest)

    inner._attend = keep
    weights = hw.attention_of(model, ids, "transformer.h.1.attn", [0, 3])
    torch.testing.assert_close(weights.double(), kept[0][:, [0, 3]], rtol=0, atol=rounding[0])


@pytest.mark.parametrize(
    ("layer", "head", "says"),
    [
        ("low", 0, r"no such layer; those that attend: '0', '1'"),
        (2, 0, r"layer=2, head=0\): no such layer; those that attend"),
        (1.5, 0, r"layer 1\.5: give its number from 0, such as 2 or 'L2', or the name of"),
        ("L5H0", None, "no such layer; those that attend"),
        ("L1H0", 1, "the address already names a head"),
        ((0, 3), None, r"'0' has the heads 0 to 2"),
        ("0", 3, r"'0' has the heads 0 to 2"),
        ("0", [0, -1], r"'0' has the heads 0 to 2"),
        ("0", [], r"'0' has the heads 0 to 2"),
        (
            "0",
            1.0,
            r"attention_of\(Sequential, …, layer='0', head=1\.0\): '0' has the heads 0 to 2",
        ),
    ],
)
def test_what_attention_of_cannot_give_is_named(
    layer: Any, head: Any, says: str, unchecked: None
) -> None:
    with pytest.raises(ValueError, match=says):
        hw.attention_of(nn.Sequential(Own(), Own()), torch.randn(B, T, H * D), layer, head)


class Twice(nn.Module):
    """One layer on a text and on its end, and one whose attention cannot be followed."""

    def __init__(self) -> None:
        super().__init__()
        self.lost, self.own = Lost(), Own()

    def forward(self, x: Tensor) -> Tensor:
        return self.own(self.own(self.lost(x))[:, 2:])


class Lost(nn.Module):
    """Heads that share the average of their weights."""

    def forward(self, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (H, D)).transpose(1, 2)
        return x + (heads @ heads.mT).softmax(-1).mean(1) @ x


def test_attention_of_says_how_to_get_one_of_several_calls() -> None:
    model, x = Twice(), torch.randn(B, T, H * D)
    with pytest.raises(
        ValueError,
        match=r"layer='own', head=None\): 'own' is called with different lengths; give one of "
        r"its calls: nth=0 gives \[2, 3, 7, 7\], nth=1 gives \[2, 3, 5, 5\]; or watch and take "
        r"seen\['own'\]\.calls",
    ):
        hw.attention_of(model, x, "own")
    for nth, keys in enumerate((T, T - 2)):
        assert hw.attention_of(model, x, 0, nth=nth).shape == (B, H, keys, keys)
    with pytest.raises(ValueError, match="it is called 2 times, so there is no call 2"):
        hw.attention_of(model, x, "own", nth=2)


def test_attention_of_says_why_a_layer_is_left_out() -> None:
    says = r"'lost' is left out: no product with values was seen of the softmax of \[2, 3, 7, 7\]"
    with pytest.raises(ValueError, match=says):
        hw.attention_of(Twice(), torch.randn(B, T, H * D), "lost")


def test_a_long_text_is_not_written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headwise.capture.attention_weights.MOST_BYTES", 4 * B * T * T)
    model, x = nn.Sequential(Own()), torch.randn(B, T, H * D)
    assert hw.attention_of(model, x, "0", 1).shape == (B, T, T)
    with pytest.raises(ValueError, match=r"2 heads × 7 queries × 7 keys .* Map\(n\) or TopKeys"):
        hw.attention_of(model, x, "0", [0, 1])


# --- reprs ---------------------------------------------------------------------------------------


def test_what_is_returned_says_what_it_is_in_a_line() -> None:
    layer, x = hw.MultiHeadAttention(24, num_heads=3), torch.randn(2, 130, 24)
    ids = torch.randint(5, (2, 130))
    with torch.no_grad(), hw.watch(layer, hw.Mass(hw.SameToken(ids))) as seen:
        layer(x)
    one = hw.observe(*torch.randn(3, 2, 3, 130, 4), hw.Entropy())
    running = hw.Running()
    running.add(one)
    shown = [
        seen,
        seen[""],
        seen[""].calls[0],
        one,
        one.readings,
        one.reading("entropy"),
        running,
        hw.capture.ablation_reference(layer, lambda layer, x: layer(x), [x]),
        hw.importance(layer, lambda layer, x: layer(x).mean((1, 2)), [x]),
        hw.Dense(torch.ones(130, 130, dtype=torch.bool)) & hw.Causal(),
        hw.Bias(torch.zeros(130, 130)) & hw.Padding(torch.tensor([5, 6] * 40)),
        hw.Documents(ids) | hw.Prefix(torch.arange(130)),
        hw.Mass(hw.Induction(ids)),
        hw.explain(*torch.randn(3, 2, 3, 130, 4), hw.Entropy()),
        hw.check(layer),
        hw.report.HeadName(0, 3),
    ]
    for thing in shown:
        assert "\n" not in repr(thing), type(thing)
        assert len(repr(thing)) < 200, repr(thing)
    assert "entropy" in repr(one)

    class Bare(hw.Mask):
        pass

    assert "Bare object" in repr(Bare())  # no dataclass
    assert "bool [130, 130]" in repr(shown[9])


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        ("a text", r"inputs is 'a text', a text; give .* tokenizer\(text, return_tensors='pt'\)"),
        (["a text", "another"], "a text; give the inputs that the model takes"),
        ([4, 2], r"items of a list are separate arguments; give token ids as a tensor \[B, T\]"),
    ],
)
def test_attention_of_a_text_says_what_to_give(inputs: Any, says: str) -> None:
    layer = hw.MultiHeadAttention(24, num_heads=3)
    with pytest.raises(ValueError, match=rf"^attention_of\(MultiHeadAttention, .*{says}"):
        hw.attention_of(layer, inputs, layer=0)
    x = torch.randn(2, 7, 24)
    for given in (x, (x,), [x, None], {"x": x}):
        assert hw.attention_of(layer, given, layer=0).shape == (2, 3, 7, 7)


def test_flags_and_seeds_of_another_kind_are_refused() -> None:
    layer, x = hw.MultiHeadAttention(24, num_heads=3), torch.randn(2, 7, 24)

    def loss(model: Any, x: Tensor) -> Tensor:
        return model(x).square().mean((1, 2))

    with pytest.raises(ValueError, match="rows must be True or False, got 'all'"):
        hw.capture.ablation_reference(layer, loss, [x], rows="all")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="normalise must be True or False, got 'importance'"):
        hw.importance(layer, loss, [x]).table(normalise="importance")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="seed='a'"), hw.watch(layer, seed="a"):  # type: ignore[arg-type]
        pass

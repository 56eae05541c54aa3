"""`edit()` against hand-written attention, on the kinds of models that `watch()` sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise as hw
from headwise.capture import Gate, Knockout, Replace, Scale, Shift

B, T, H, G, D = 2, 7, 6, 3, 5
Change = Callable[[str, Tensor], Tensor]


class Grouped(nn.Module):
    """Grouped heads on a chosen road, and the same by hand with `changed` parts."""

    def __init__(self, road: str = "attend", mask: hw.Mask | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.route, self.mask = road, mask
        self.sinks = torch.randn(H).double() if road == "attend" else None
        self.project = nn.Linear(H * D, (H + 2 * G) * D).double()
        self.out = nn.Linear(H * D, H * D).double()

    def parts(self, x: Tensor) -> list[Tensor]:
        every = self.project(x).unflatten(-1, (-1, D)).transpose(1, 2)
        return list(every.split([H, G, G], 1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.parts(x)
        if self.route == "attend":
            out = hw.attend(q, k, v, mask=self.mask, sinks=self.sinks)
        elif self.route == "sdpa":
            given = None if self.mask is None else self.mask.dense(queries=T, keys=T)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=given, enable_gqa=True)
        else:
            k, v = (y.repeat_interleave(H // G, 1) for y in (k, v))
            scores = q @ k.mT * D**-0.5
            if self.mask is not None:
                given = self.mask.dense(queries=T, keys=T)
                scores = scores.masked_fill(~given, -torch.inf)
            out = scores.softmax(-1) @ v
        return self.out(out.transpose(1, 2).flatten(2))

    def by_hand(
        self, x: Tensor, change: Callable[[str, Tensor], Tensor], hidden: Any = None
    ) -> Any:
        """The output where `change(part, [B, H, T, D])` has edited each part of every head."""
        q, k, v = self.parts(x)
        k, v = (y.repeat_interleave(H // G, 1) for y in (k, v))
        q, k, v = (change(name, y) for name, y in (("query", q), ("key", k), ("value", v)))
        scores = q @ k.mT * D**-0.5
        i, j = torch.arange(T)[:, None], torch.arange(T)
        if self.mask is not None:
            extent = hw.core.shapes.Extent(B, H, H, T, T)
            bias = self.mask.bias(i, j, extent)
            scores = scores if bias is None else scores + bias
            scores = scores.masked_fill(~self.mask.dense(B, H, T, T), -torch.inf)
        if hidden is not None:
            scores = scores.masked_fill(hidden, -torch.inf)
        if self.sinks is not None:
            scores = torch.cat([scores, self.sinks.view(1, H, 1, 1).expand(B, H, T, 1)], -1)
        out = change("output", scores.softmax(-1)[..., :T] @ v)
        return self.out(out.transpose(1, 2).flatten(2))


def at_head(
    head: int, part: str, new: Callable[[Tensor], Tensor]
) -> Callable[[str, Tensor], Tensor]:
    def change(name: str, x: Tensor) -> Tensor:
        if name != part:
            return x
        return torch.cat([x[:, :head], new(x[:, head : head + 1]), x[:, head + 1 :]], 1)

    return change


CASES = [
    ("attend", hw.Causal()),
    ("attend", hw.ALiBi() & hw.Causal()),
    ("sdpa", hw.Causal()),
    ("sdpa", None),
    ("matmul", hw.Causal()),
]
X = torch.randn(B, T, H * D, generator=torch.Generator().manual_seed(1)).double()


@pytest.mark.parametrize("part", ["output", "query", "key", "value"])
@pytest.mark.parametrize(("road", "mask"), CASES)
def test_every_edit_of_every_part(road: str, mask: hw.Mask | None, part: Any) -> None:
    model = Grouped(road, mask)
    vector, source = torch.randn(D).double(), torch.randn(B, T, D).double()
    edits: list[tuple[Any, Callable[[Tensor], Tensor]]] = [
        (Scale(0.5, at=part), lambda x: 0.5 * x),
        (Shift(vector, at=part), lambda x: x + vector),
        (Gate(torch.tensor(2.0).double(), at=part), lambda x: 2 * x),
        (Replace(source, at=part), lambda x: source[:, None]),
        (Replace(0.25, at=part, positions=[1, -1]), lambda x: at_positions(x, 0.25)),
    ]
    for change, by_hand in edits:
        if road == "matmul" and part in ("query", "key"):
            with (
                pytest.raises(ValueError, match="only the scores of this attention are visible"),
                hw.edit(model, {"L0H4": change}),
            ):
                model(X)
            continue
        with hw.edit(model, {"L0H4": change}):
            found = model(X)
        wanted = model.by_hand(X, at_head(4, part, by_hand))
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
        assert not torch.equal(found, model(X))


def at_positions(x: Tensor, value: float) -> Tensor:
    x = x.clone()
    x[:, :, [1, -1]] = value
    return x


@pytest.mark.parametrize(("road", "mask"), CASES)
def test_knock_outs_are_masks(road: str, mask: hw.Mask | None) -> None:
    model = Grouped(road, mask)
    hidden = torch.zeros(1, H, T, T, dtype=torch.bool)
    hidden[:, 2, 5, [0, 3]] = True
    hidden[:, 4, :, 1] = True
    pairs = {"L0H2": Knockout(queries=5, keys=[0, 3]), "L0H4": Knockout(keys=1)}
    with hw.edit(model, pairs):
        found = model(X)
    wanted = model.by_hand(X, lambda name, x: x, hidden)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def test_edits_of_a_head_are_made_in_order_and_layers_have_all_heads() -> None:
    model = Grouped("sdpa")
    shift = torch.ones(D).double()
    with hw.edit(model, {"L0H1": [Shift(shift), Scale(2.0), Scale(0.0, at="query")]}):
        found = model(X)

    def change(name: str, x: Tensor) -> Tensor:
        x = at_head(1, "output", lambda y: 2 * (y + shift))(name, x)
        return at_head(1, "query", lambda y: 0 * y)(name, x)

    torch.testing.assert_close(found, model.by_hand(X, change), rtol=0, atol=1e-12)
    gate = torch.rand(H).double()
    with hw.edit(model, {"L0": Gate(gate), ("", 3): Scale(3.0)}):
        found = model(X)
    gate = gate.clone()
    gate[3] *= 3
    wanted = model.by_hand(X, lambda n, x: x * gate[:, None, None] if n == "output" else x)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("part", ["output", "query", "key", "value"])
@pytest.mark.parametrize("road", ["attend", "sdpa"])
def test_gradients_of_a_gate_are_finite_differences(road: str, part: Any) -> None:
    model = Grouped(road, hw.Causal())

    def loss(gate: Tensor) -> Tensor:
        with hw.edit(model, {"L0H4": Gate(gate, at=part)}):
            return model(X).square().sum()

    gate = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(loss(gate), gate)
    step = 1e-6
    with torch.no_grad():
        wanted = (loss(gate + step) - loss(gate - step)) / (2 * step)
    torch.testing.assert_close(slope, wanted, rtol=1e-6, atol=1e-6)
    weight = model.project.weight
    loss(gate).backward()
    assert weight.grad is not None


def models() -> dict[str, tuple[nn.Module, Any]]:
    """Models of several libraries, and inputs for them."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    ids = {"input_ids": torch.randint(31, (2, T))}
    llama: dict[str, Any] = {"hidden_size": 24, "intermediate_size": 32, "vocab_size": 31}
    gpt2: dict[str, Any] = {"n_embd": 24, "n_layer": 2, "n_head": 4, "vocab_size": 31}
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(24, 4, 16, batch_first=True), 2, enable_nested_tensor=False
    )
    found: dict[str, tuple[nn.Module, Any]] = {
        f"gpt2 {kind}": (GPT2LMHeadModel(GPT2Config(**gpt2, attn_implementation=kind)), ids)
        for kind in ("eager", "sdpa")
    }
    found["llama"] = (
        LlamaForCausalLM(
            LlamaConfig(**llama, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
        ),
        ids,
    )
    found["encoder"] = (encoder, torch.randn(2, T, 24))
    found["frozen encoder"] = (encoder, torch.randn(2, T, 24))
    layer = nn.MultiheadAttention(24, 4, batch_first=True)
    x = torch.randn(2, T, 24)
    found["nn.MultiheadAttention"] = (layer, (x, x, x))
    found["own layer"] = (hw.MultiHeadAttention(24, num_heads=4), x)
    return {name: (model.eval(), inputs) for name, (model, inputs) in found.items()}


@pytest.mark.parametrize("name", list(models()))
def test_other_heads_stay_bit_for_bit(name: str) -> None:
    model, inputs = models()[name]
    if name == "frozen encoder":  # PyTorch's fused layers
        model.requires_grad_(False)
    before = hw.head_outputs(model, inputs)
    for part in ("output", "query", "key", "value"):
        edits = {"L0H1": Scale(0.5, at=part)}  # type: ignore[arg-type]
        with hw.edit(model, edits):
            after = hw.head_outputs(model, inputs)
        assert torch.equal(after["L0"][:, [0, 2, 3]], before["L0"][:, [0, 2, 3]])
        assert not torch.equal(after["L0H1"], before["L0H1"])
    where = {"L0H1": Shift(torch.ones(6), positions=[])}
    with torch.no_grad():
        with hw.edit(model, where):
            after = first(run(model, inputs))
        # Where a head is edited, PyTorch's fused layers are computed in steps: other rounding.
        near = 1e-5 if "ncoder" in name or name.startswith("nn.") else 0.0
        torch.testing.assert_close(after, first(run(model, inputs)), rtol=0, atol=near)


def run(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def first(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output
    return output.logits if hasattr(output, "logits") else output[0]


def test_outputs_of_another_run_are_a_source() -> None:
    model = Grouped("sdpa", hw.Causal())
    other = torch.randn(B, T, H * D).double()
    source = hw.head_outputs(model, other)
    with hw.edit(model, {"L0": Replace(source)}):
        torch.testing.assert_close(model(X), model(other), rtol=0, atol=1e-12)
    with hw.edit(model, {"L0H2": Replace(source)}):
        found = model(X)
    wanted = model.by_hand(X, at_head(2, "output", lambda x: source["L0H2"][:, None]))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("edits", "message"),
    [
        ({"L0H9": Scale(2.0)}, "has the heads 0 to 5, and no 9"),
        ({"L3H0": Scale(2.0)}, "nothing was edited in layer 3"),
        ({"low": Scale(2.0)}, "the model has no module 'low'"),
        ({"L0H0": 2.0}, "2.0 is not an edit; give Scale"),
        ({"L0H0": Shift(torch.zeros(3))}, "size of tensor|Shift gives"),
        ({"L0H0": Replace(torch.zeros(2, 3))}, r"Replace gives \[2, 3\] for the output"),
        ({"L0H0": Replace({})}, "has nothing for a head"),
        ({"L0H0": Scale(0.0, positions=9)}, "positions 9 must be whole numbers from 0 to 6"),
        ({"L0H0": Knockout(keys=-8)}, "positions -8 must be whole numbers"),
        ({(1, 2, 3): Scale(0.0)}, "give its layer and number"),
    ],
)
def test_wrong_edits_are_named(edits: Any, message: str) -> None:
    model = Grouped("sdpa")
    with pytest.raises((ValueError, RuntimeError), match=message), hw.edit(model, edits):
        model(X)
    with pytest.raises(ValueError, match="at must be one of"):
        Scale(1.0, at="keys")  # type: ignore[arg-type]

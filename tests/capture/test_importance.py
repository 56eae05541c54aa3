"""`importance()` against finite differences, `ablation_scan()` against loops by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import headwise as hw
from ci import in_ci
from headwise.capture.ablate import ablate
from headwise.capture.call import AttentionCall
from headwise.capture.catch import catch
from headwise.capture.effects import HeadEffects, join_tables
from headwise.capture.importance import ablation_scan, importance
from headwise.capture.reference import ablation_reference
from headwise.core.observers import observers

B, T, HEADS, D = 3, 7, 5, 4
E = HEADS * D


class Plain(nn.Module):
    """Attention as PyTorch's users write it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(E, 3 * E), nn.Linear(E, E)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, D)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(x.shape))


class Own(nn.Module):
    """headwise's own layer."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = hw.MultiHeadAttention(E, HEADS, num_kv_heads=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.attn(x, mask=hw.Causal())


class Model(nn.Module):
    """Two layers, each called as often as `order` says, and a loss for each sample."""

    def __init__(self, layer: Callable[[], nn.Module] = Plain, order: str = "lh") -> None:
        super().__init__()
        self.low: Any = layer()
        self.high: Any = layer()
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        for which in self.order:
            x = x + (self.low if which == "l" else self.high)(x)
        return x.tanh()


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, target = batch
    return (model(x) - target).square().mean((1, 2))


def mean_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return loss(model, batch).mean()


def batches(*sizes: int, dtype: torch.dtype = torch.float64) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(n, T, E, dtype=dtype), torch.randn(n, T, E, dtype=dtype)) for n in sizes]


def slopes(model: nn.Module, name: str, run: Callable[[], Tensor], heads: int) -> Tensor:
    """By finite differences: how each sample's loss moves with a gate on each head, `[B, H]`."""
    step, found = 1e-5, []
    for head in range(heads):
        ends = []
        for gate in (1 + step, 1 - step):

            def scale(call: AttentionCall, gate: float = gate, head: int = head) -> Tensor | None:
                gates = torch.ones(call.heads, dtype=torch.float64)
                gates[head] = gate
                return call.out * gates[:, None, None] if call.name == name else None

            with torch.no_grad(), catch(model, scale):
                ends.append(run())
        found.append((ends[0] - ends[1]) / (2 * step))
    return torch.stack(found, 1)


def check(model: nn.Module, loss: Callable[..., Tensor], given: list[Any], heads: int) -> None:
    effects = importance(model, loss, given)
    for name in effects.modules:
        parts = [slopes(model, name, lambda b=b: loss(model, b), heads) for b in given]
        exact = torch.cat(parts)
        figures = effects[name]
        torch.testing.assert_close(figures["importance"], exact.abs(), rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(figures["ablation_estimate"], -exact, rtol=1e-6, atol=1e-9)
    rows = {(row["module"], row["head"]): row for row in effects.table()}
    assert len(rows) == heads * len(effects.modules)
    for (name, head), row in rows.items():
        samples = effects[name]["importance"][:, head]
        assert row["importance"] == pytest.approx(samples.mean().item())
        assert row["importance_se"] == pytest.approx(samples.std().item() / len(samples) ** 0.5)


# --- by gradient -----------------------------------------------------------------------------


@pytest.mark.parametrize("layer", [Plain, Own])
@pytest.mark.parametrize("order", ["lh", "lhhl"], ids=["once", "several calls"])
def test_importance_is_the_slope_of_a_gate(layer: Any, order: str) -> None:
    check(Model(layer, order).double(), loss, batches(B, 2), HEADS)


@pytest.mark.parametrize("frozen", [False, True])
def test_importance_of_torch_layers(frozen: bool) -> None:
    block = nn.TransformerEncoderLayer(E, HEADS, 16, batch_first=True, dropout=0.0)
    encoder = nn.TransformerEncoder(block, 2, enable_nested_tensor=False).double().eval()
    encoder.requires_grad_(not frozen)  # PyTorch then takes its fused layer
    check(encoder, loss, batches(B), HEADS)


def test_importance_of_a_transformers_model() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=2, n_head=HEADS, n_embd=E, vocab_size=50, n_positions=16
    )
    model = transformers.GPT2LMHeadModel(config).double().eval()

    def next_token(model: Any, ids: Tensor) -> Tensor:
        logits = model(ids).logits[:, :-1].transpose(1, 2)
        return F.cross_entropy(logits, ids[:, 1:], reduction="none").mean(1)

    check(model, next_token, [torch.randint(0, 50, (B, T)) for _ in range(2)], HEADS)


def test_samples_do_not_cancel_in_a_batch() -> None:
    model, (batch,) = Model().double(), batches(4)
    together = importance(model, loss, [batch]).table()
    singly = importance(model, loss, [(batch[0][i : i + 1], batch[1][i : i + 1]) for i in range(4)])
    for row, alone in zip(together, singly.table(), strict=True):
        assert row == pytest.approx(alone)
    assert any(row["importance"] > 1.01 * abs(row["ablation_estimate"]) for row in together)


def test_one_number_is_the_mean_over_samples() -> None:
    model, given = Model().double(), batches(B, 2)
    for row, same in zip(
        importance(model, loss, given).table(),
        importance(model, mean_loss, given).table(),
        strict=True,
    ):
        assert row == pytest.approx(same)


def test_rows_of_windows_belong_to_their_samples() -> None:
    class Windows(Plain):
        def forward(self, x: Tensor) -> Tensor:  # windows of 4 tokens, as rows of the batch
            return super().forward(x.unflatten(1, (-1, 4)).flatten(0, 1)).view(x.shape)

    model = Windows().double()
    given = (torch.randn(B, 12, E).double(), torch.randn(B, 12, E).double())
    check(model, loss, [given], HEADS)


def test_the_model_is_left_as_it_was() -> None:
    model, given = Model(Own).double(), batches(B)
    model.low.train(False)
    loss(model, given[0]).sum().backward()
    kept = [(p, p.grad, p.grad.clone()) for p in model.parameters() if p.grad is not None]
    assert kept
    with torch.no_grad():
        whole = importance(model, loss, given)
    assert (model.training, model.low.training, model.high.training) == (True, False, True)
    assert all(p.grad is grad and torch.equal(grad, copy) for p, grad, copy in kept)
    model.requires_grad_(False)
    frozen = importance(model, loss, given)
    assert not any(p.requires_grad for p in model.parameters())
    for name in whole.modules:
        torch.testing.assert_close(frozen[name]["importance"], whole[name]["importance"])
    assert not observers


@pytest.mark.parametrize("frozen", [False, True])
def test_recomputed_activations_count_once(frozen: bool) -> None:
    class Checkpointed(Model):
        def forward(self, x: Tensor) -> Tensor:
            for layer in (self.low, self.high):
                x = x + checkpoint(layer, x, use_reentrant=False)
            return x.tanh()

    model, given = Checkpointed().double().requires_grad_(not frozen), batches(B)
    plain = Model().double()
    plain.load_state_dict(model.state_dict())
    found, expected = importance(model, loss, given), importance(plain, loss, given)
    for name in expected.modules:
        torch.testing.assert_close(found[name]["importance"], expected[name]["importance"])


def test_heads_of_an_ablated_model() -> None:
    model, given = Model().double(), batches(B)
    with ablate(model, {"low": [1]}):
        effects = importance(model, loss, given)
    assert (effects["low"]["importance"][:, 1] == 0).all()
    assert (effects["low"]["importance"][:, 0] > 0).all()


def test_modules_that_a_batch_does_not_reach() -> None:
    model = Model().double()

    def sometimes(model: Any, batch: Any) -> Tensor:
        model.order = "l" if len(batch[0]) == 2 else "lh"
        return loss(model, batch)

    given = batches(2, B)
    found = importance(model, sometimes, given)
    assert (found["high"]["importance"][:2] == 0).all()
    assert (found["high"]["importance"][2:] > 0).all()
    model.eval()
    scanned = ablation_scan(model, sometimes, given)["high"]["ablation"]
    assert scanned.shape == (2 + B, HEADS)
    assert (scanned[:2] == 0).all()


# --- by measurement --------------------------------------------------------------------------


def by_hand(model: Model, given: list[tuple[Tensor, Tensor]], name: str, head: int) -> Tensor:
    """What each sample's loss gains when the projection reads 0 of a head."""

    def zero(_: Any, args: tuple[Tensor]) -> tuple[Tensor]:
        split = args[0].clone().unflatten(-1, (HEADS, D))
        split[..., head, :] = 0
        return (split.flatten(-2),)

    with torch.no_grad():
        whole = torch.cat([loss(model, batch) for batch in given])
        layer: Any = model.get_submodule(name)
        handle = layer.proj.register_forward_pre_hook(zero)
        less = torch.cat([loss(model, batch) for batch in given])
        handle.remove()
    return less - whole


def test_scan_equals_loops_by_hand() -> None:
    model, given = Model().double().eval(), batches(B, 2)
    told: list[float] = []
    effects = ablation_scan(model, loss, given, report=told.append)
    assert effects.modules == ("low", "high")
    for row in effects.table():
        gained = by_hand(model, given, row["module"], row["head"])
        assert torch.equal(effects[row["module"]]["ablation"][:, row["head"]], gained)
        assert row["ablation"] == pytest.approx(gained.mean().item())
        assert row["ablation_se"] == pytest.approx(gained.std().item() / len(gained) ** 0.5)
    assert told == pytest.approx([n / (4 * HEADS) for n in range(1, 4 * HEADS + 1)])
    assert not any(p.requires_grad and p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("modules", ["h*", ["middle", "h*"], lambda name: name != "low"])
def test_scan_of_some_modules(modules: Any) -> None:
    model, given = Model().double().eval(), batches(B)
    effects = ablation_scan(model, loss, given, modules=modules)
    assert effects.modules == ("high",)
    whole = ablation_scan(model, loss, given)["high"]["ablation"]
    assert torch.equal(effects["high"]["ablation"], whole)


def test_scan_of_one_number_counts_batches() -> None:
    model, given = Model().double().eval(), batches(B, B)
    single = ablation_scan(model, loss, given)["low"]["ablation"]
    effects = ablation_scan(model, mean_loss, iter(given))["low"]["ablation"]
    torch.testing.assert_close(effects, single.unflatten(0, (2, B)).mean(1))


def test_scan_with_means_and_other_texts() -> None:
    model, given = Model().double().eval(), batches(B)
    reference = ablation_reference(model, loss, batches(4), rows=True)
    for how in ("mean", "resample"):
        effects = ablation_scan(model, loss, given, how, reference=reference, seed=3)
        with (
            torch.no_grad(),
            ablate(model, {"high": [2]}, how=how, reference=reference, seed=3),
        ):
            less = loss(model, given[0])
        gained = effects["high"]["ablation"][:, 2]
        torch.testing.assert_close(gained, less - loss(model, given[0]).detach())


def test_the_estimate_is_exact_where_the_loss_is_linear_in_a_head() -> None:
    model = Plain().double().eval()
    weights = torch.randn(T, E).double()

    def linear(model: Any, x: Tensor) -> Tensor:
        return (model(x) * weights).sum((1, 2))

    given = [torch.randn(B, T, E).double()]
    table = join_tables(
        importance(model, linear, given).table(), ablation_scan(model, linear, given).table()
    )
    for row in table:
        assert row["ablation_estimate"] == pytest.approx(row["ablation"])
        assert row["ablation_estimate_se"] == pytest.approx(row["ablation_se"])


# --- tables ----------------------------------------------------------------------------------


def test_a_head_of_each_table_in_one_row(unchecked: None) -> None:
    model, given = Model().double().eval(), batches(B)
    with hw.watch(model, hw.Entropy()) as seen:
        loss(model, given[0])
    effects = importance(model, loss, given)
    some = ablation_scan(model, loss, given, modules="high")
    table = join_tables(seen.table(), effects.table(), some.table())
    assert [(row["module"], row["head"]) for row in table] == [
        (name, head) for name in ("low", "high") for head in range(HEADS)
    ]
    assert all({"entropy", "calls", "importance", "importance_se"} <= set(row) for row in table)
    assert ["ablation" in row for row in table] == [False] * HEADS + [True] * HEADS
    assert "importance" not in seen.table()[0]
    assert join_tables(seen, effects, some) == table
    assert [row["layer"] for row in table] == [0] * HEADS + [1] * HEADS
    assert {row["layer"] for row in some.table()} == {1}  # as it is in the others
    assert some["L1"] is some[1] is some["high"]
    assert ablation_scan(model, loss, given, modules=[1]).table() == some.table()
    for no_table in (["low", "high"], [{"layer": "low"}], 3):
        with pytest.raises(ValueError, match="is not a table of heads; give rows with a"):
            join_tables(effects, no_table)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="head 0 of 'low' has more than one importance"):
        join_tables(effects.table(), [{"layer": "low", "head": 0, "importance": -1.0}])


def test_pandas_has_the_same_rows() -> None:
    if not in_ci():
        pytest.importorskip("pandas")
    effects = importance(Model().double(), loss, batches(B))
    for normalise in (False, True):
        frame = effects.to_pandas(normalise=normalise)
        assert frame.to_dict("records") == effects.table(normalise=normalise)


def test_normalised_by_layer() -> None:
    samples = torch.tensor([[3.0, 4.0, 0.0], [3.0, 4.0, 0.0]])
    none = torch.zeros(1, 2)
    effects = HeadEffects({"low": {"importance": samples}, "high": {"importance": none}})
    rows = effects.table(normalise=True)
    assert [row["importance"] for row in rows] == pytest.approx([0.6, 0.8, 0, 0, 0])
    assert [row.get("importance_se") for row in rows] == [0, 0, 0, None, None]
    assert [row["importance"] for row in effects.table()] == [3, 4, 0, 0, 0]
    with pytest.raises(KeyError, match="'middle' was not seen; there are: low, high"):
        effects["middle"]


# --- faults ----------------------------------------------------------------------------------


def _tokens(model: Any, batch: Any) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean(-1)


def _number(model: Any, batch: Any) -> Any:
    return mean_loss(model, batch).item()


def _not_finite(model: Any, batch: Any) -> Tensor:
    return loss(model, batch) / 0


def _without_model(model: Any, batch: Any) -> Tensor:
    return batch[0].mean((1, 2))


def _detached(model: Any, batch: Any) -> Tensor:
    return loss(model, batch).detach()


def _without_gradients(model: Any, batch: Any) -> Tensor:
    with torch.no_grad():
        return loss(model, batch)


def _in_inference_mode(model: Any, batch: Any) -> Tensor:
    with torch.inference_mode():
        return loss(model, batch)


def _of_another_size(model: Any, batch: Any) -> Tensor:
    return loss(model, batch)[:2]


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (_tokens, r"gave \[3, 7\]; it must give"),
        (_number, r"gave float; it must give"),
        (_not_finite, r"is not finite"),
        (_without_model, r"no attention was seen"),
        (_detached, r"must not be detached"),
        (_without_gradients, r"runs 'low' without gradients\."),
        (_in_inference_mode, r"runs 'low' without gradients \(torch.inference_mode\)"),
        (_of_another_size, r"the loss has 2 samples, and 'low' was called with a batch of 3"),
    ],
)
def test_faults_of_importance(unchecked: None, loss: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        importance(Model().double(), loss, batches(B))


def test_faults_of_batches(unchecked: None) -> None:
    with pytest.raises(ValueError, match="there are no batches"):
        importance(Model(), loss, [])

    def mixed(model: Any, batch: Any) -> Tensor:
        return model.low(batch[0]).mean() + model.high(batch[0][:1]).mean()

    with torch.inference_mode(), pytest.raises(ValueError, match=r"torch.inference_mode\(\) is on"):
        importance(Model().double(), loss, batches(B))
    with pytest.raises(ValueError, match=r"different sizes \({'low': 3, 'high': 1}\)"):
        importance(Model().double(), mixed, batches(B))


@pytest.mark.parametrize(
    ("loss", "keywords", "message"),
    [
        (_tokens, {}, r"gave \[3, 7\]; it must give"),
        (_not_finite, {}, r"is not finite"),
        (_without_model, {}, r"no attention was seen"),
        (loss, {"modules": "middle"}, r"modules='middle' left out all that attended: low, high"),
        (loss, {"how": "noise"}, r"one of zero, mean, resample"),
    ],
)
def test_faults_of_the_scan(
    unchecked: None, loss: Any, keywords: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ablation_scan(Model().double().eval(), loss, batches(B), **keywords)


@pytest.mark.parametrize("function", [importance, ablation_scan, ablation_reference])
def test_what_is_given_in_another_place_is_named(unchecked: None, function: Any) -> None:
    model, ids = Model().eval(), torch.randn(B, T, E)
    name = function.__name__
    for single in (ids, {"input_ids": ids}, "a text", 3):
        said = rf"{name}\(Model, …\): batches must be .* {type(single).__name__} is none.*\[batch\]"
        with pytest.raises(ValueError, match=said):
            function(model, loss, single)
    with pytest.raises(ValueError, match=rf"{name}\(loss, …\): loss is not an nn.Module"):
        function(loss, model, batches(B))
    with pytest.raises(ValueError, match=r"loss must be a function.* list is none"):
        function(model, batches(B), loss)


def test_the_scan_refuses_training_mode() -> None:
    model = Model().eval()
    model.high.train()
    with pytest.raises(ValueError, match="high is in training mode"):
        ablation_scan(model, loss, batches(B))

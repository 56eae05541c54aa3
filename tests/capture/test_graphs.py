"""Compiled models whose attention calls are captured in their graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import headwise as hw

B, T, E, H = 4, 16, 24, 4  # as many batch rows as heads: nothing but their use tells them apart
STATISTICS = (hw.Entropy(), hw.MaxLogit(), hw.Mass(hw.First()), hw.Mass(hw.Previous()))


@pytest.fixture(autouse=True)
def _no_graphs() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def graphs() -> tuple[int, int]:
    return counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


class FusedAttention(nn.Module):
    """Self-attention by PyTorch's function."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(E, 3 * E), nn.Linear(E, E)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, H, -1)).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(heads.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, own: bool) -> None:
        super().__init__()
        self.norm, self.own = nn.LayerNorm(E), own
        self.attn = hw.MultiHeadAttention(E, H) if own else FusedAttention()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + (self.attn(y, mask=hw.Causal() & hw.Window(5)) if self.own else self.attn(y))


class GPT(nn.Module):
    def __init__(self, own: bool = False, reentrant: bool | None = None) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(19, E), nn.Linear(E, 19)
        self.blocks = nn.ModuleList([Block(own), Block(own)])
        self.reentrant = reentrant

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            if self.reentrant is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


IDS = torch.arange(B * T).view(B, T) * 7 % 19


def loss_of(model: Any, ids: Tensor = IDS) -> Tensor:
    return F.cross_entropy(model(ids).flatten(0, 1), ids.roll(-1, 1).flatten())


def step(model: Any, loss: Callable[[Any], Tensor] = loss_of) -> list[Tensor]:
    """The loss and all gradients."""
    found = loss(model)
    found.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    for p in model.parameters():
        p.grad = None
    return [found.detach(), *gradients]


def same(one: Any, other: Any, close: float = 2e-6) -> None:
    """Both tables hold the same."""
    assert len(one.table()) > 0
    assert one.left_out == other.left_out
    for row, wanted in zip(one.table(), other.table(), strict=True):
        for name, value in wanted.items():
            if isinstance(value, float):
                value = pytest.approx(value, rel=close, abs=close, nan_ok=True)
            assert row[name] == value


def check(model: Any, loss: Callable[[Any], Tensor] = loss_of, backend: str = "aot_eager") -> None:
    """Watched, a compiled model computes the same, in as many graphs, and shows the same."""
    compiled = torch.compile(model, backend=backend)
    plain, (number, breaks) = step(compiled, loss), graphs()
    with hw.watch(model, *STATISTICS) as wanted:
        step(model, loss)
    for _ in range(2):
        with hw.watch(compiled, *STATISTICS) as seen:
            watched = step(compiled, loss)
        assert all(map(torch.equal, watched, plain))
        same(seen, wanted)
        assert all(map(torch.equal, step(compiled, loss), plain))
        assert graphs() == (2 * number, 2 * breaks)


@pytest.mark.slow
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_a_model_of_ones_own(own: bool, reentrant: bool | None) -> None:
    check(GPT(own, reentrant))


def test_by_inductor() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # of several, each adds to an embedding's gradient when it gets there
    try:
        check(GPT(), backend="inductor")
    finally:
        torch.set_num_threads(threads)


def transformers_model(name: str) -> tuple[nn.Module, Callable[[Any], Tensor]]:
    import transformers as hf

    sizes = {"hidden_size": E, "num_hidden_layers": 2, "num_attention_heads": H}
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    wide = {"intermediate_size": 2 * E}
    if name == "gpt2":
        still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        config = hf.GPT2Config(vocab_size=19, n_embd=E, n_layer=2, n_head=H, **still)
        return hf.GPT2Model(config), lambda m: m(IDS, use_cache=False)[0].square().mean()
    if name == "llama":
        config = hf.LlamaConfig(vocab_size=19, num_key_value_heads=2, **sizes, **wide)
        return hf.LlamaModel(config), lambda m: m(IDS, use_cache=False)[0].square().mean()
    if name == "bert":
        real = torch.ones(B, T, dtype=torch.long)
        real[1, 9:] = real[3, 4:] = 0
        model = hf.BertModel(hf.BertConfig(vocab_size=19, **sizes, **wide, **still))
        return model, lambda m: m(IDS, attention_mask=real)[0].square().mean()
    config = hf.ViTConfig(**sizes, **wide, **still, image_size=8, patch_size=4)
    image = torch.linspace(-1, 1, B * 3 * 64).view(B, 3, 8, 8).sin()
    return hf.ViTModel(config), lambda m: m(image)[0].square().mean()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "vit"])
def test_models_of_transformers(name: str) -> None:
    pytest.importorskip("transformers")
    check(*transformers_model(name))


@pytest.mark.slow
def test_other_lengths_are_compiled_no_more_often_than_without() -> None:
    model = GPT()
    compiled = torch.compile(model, backend="aot_eager")
    lengths = [IDS[:, :size] for size in (16, 12, 9, 14)]
    for ids in lengths:
        compiled(ids)
    number, _ = graphs()
    with hw.watch(compiled, *STATISTICS) as seen:
        for ids in lengths:
            compiled(ids)
    with hw.watch(model, *STATISTICS) as wanted:
        for ids in lengths:
            model(ids)
    same(seen, wanted)
    assert graphs() == (2 * number, 0)


# ── what is compiled ────────────────────────────────────────────────────────────────────────────


def blocks_in_place(model: GPT) -> Any:
    for block in model.blocks:
        block.compile(backend="aot_eager")
    return model


def blocks_wrapped(model: GPT) -> Any:
    for number, block in enumerate(model.blocks):
        model.blocks[number] = torch.compile(block, backend="aot_eager")
    return model


def in_place(model: GPT) -> Any:
    model.compile(backend="aot_eager")
    return model


def around(model: GPT) -> Any:
    return torch.compile(lambda ids: model(ids), backend="aot_eager")


def wrapped(model: GPT) -> Any:
    return torch.compile(model, backend="aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize("how", [wrapped, in_place, blocks_in_place, blocks_wrapped, around])
@pytest.mark.parametrize("own", [False, True])
def test_whole_models_parts_that_share_a_graph_and_functions(how: Any, own: bool) -> None:
    """The model itself is watched, whatever was compiled, and wherever that is."""
    model = GPT(own)
    with hw.watch(model, *STATISTICS) as wanted, torch.no_grad():
        out = model(IDS)
    called = how(model)
    with torch.no_grad():
        called(IDS)
        before = graphs()[0]
        for _ in range(2):
            with hw.watch(model, *STATISTICS) as seen:
                assert torch.equal(called(IDS), out)
            same(seen, wanted)
    assert graphs() == (2 * before, 0)
    assert seen.modules == ("blocks.0.attn", "blocks.1.attn")


class Attends(nn.Module):
    """Attention by a function of the layer and its input."""

    num_heads = H

    def __init__(self, attend: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.qkv, self.out, self.attend = nn.Linear(E, 3 * E), nn.Linear(E, E), attend

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.qkv(x).view(B, T, 3, H, E // H).permute(2, 0, 3, 1, 4).unbind(0)

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(self, x)


def joined(y: Tensor) -> Tensor:
    return y.transpose(1, 2).flatten(2)


def heads_first(layer: Any, x: Tensor) -> Tensor:
    q, k, v = (y.transpose(0, 1) for y in layer.split(x))
    return layer.out(F.scaled_dot_product_attention(q, k, v).permute(1, 2, 0, 3).flatten(2))


def rows_and_heads_in_one_axis(layer: Any, x: Tensor) -> Tensor:
    q, k, v = (y.flatten(0, 1) for y in layer.split(x))
    return layer.out(joined(F.scaled_dot_product_attention(q, k, v).view(B, H, T, E // H)))


def queries_in_chunks(layer: Any, x: Tensor) -> Tensor:
    q, k, v = layer.split(x)
    parts = [F.scaled_dot_product_attention(part, k, v) for part in q.split(8, 2)]
    return layer.out(joined(torch.cat(parts, 2)))


def blocks_of_a_sequence(layer: Any, x: Tensor) -> Tensor:
    q, k, v = (y.reshape(B, H, 4, T // 4, E // H) for y in layer.split(x))
    out = F.scaled_dot_product_attention(q, k, v).reshape(B, H, T, E // H)
    return layer.out(joined(out))


def windows_as_rows(layer: Any, x: Tensor) -> Tensor:
    rows = layer.qkv(x).view(4 * B, T // 4, 3, H, E // H).permute(2, 0, 3, 1, 4)
    out = F.scaled_dot_product_attention(*rows.unbind(0))
    return layer.out(out.transpose(1, 2).reshape(B, T, E))


def one_query(layer: Any, x: Tensor) -> Tensor:
    q, k, v = layer.split(x)
    return layer.out(joined(F.scaled_dot_product_attention(q[:, :, :1], k, v)))


@pytest.mark.parametrize(
    "attend",
    [
        heads_first,
        rows_and_heads_in_one_axis,
        queries_in_chunks,
        blocks_of_a_sequence,
        windows_as_rows,
        one_query,
    ],
)
@pytest.mark.parametrize("inside", [False, True])
def test_heads_and_partial_calls_are_told_apart_as_in_eager(attend: Any, inside: bool) -> None:
    layer: Any = Attends(attend)
    model = nn.Sequential(layer, nn.LayerNorm(E)) if inside else layer
    x = torch.randn(B, T, E)
    with torch.no_grad():
        with hw.watch(model, hw.Entropy()) as wanted:
            out = model(x)
        compiled = torch.compile(model, backend="aot_eager")
        with hw.watch(compiled, hw.Entropy()) as seen:
            assert torch.equal(compiled(x), out)
    assert graphs() == (1, 0)
    assert seen.left_out == wanted.left_out
    assert bool(seen) is bool(wanted)
    if wanted:
        same(seen, wanted)


# ── what is captured only as it is written ──────────────────────────────────────────────────────


def by_hand(layer: Any, x: Tensor) -> Tensor:
    q, k, v = layer.split(x)
    weights = (q @ k.transpose(-2, -1) * (E // H) ** -0.5).softmax(-1)
    return layer.out(joined(F.dropout(weights, 0.0) @ v))


@pytest.mark.parametrize(
    "build",
    [
        lambda: Attends(by_hand),
        lambda: nn.TransformerEncoderLayer(E, H, 2 * E, dropout=0.0, batch_first=True),
        lambda: nn.TransformerEncoderLayer(E, H, 2 * E, batch_first=True).eval(),
    ],
)
@pytest.mark.parametrize("who", ["compiled", "inside"])
def test_other_ways_to_attend_run_as_they_are_written(build: Any, who: str) -> None:
    model, x = build(), torch.randn(B, T, E)
    compiled = torch.compile(model, backend="aot_eager")
    with torch.no_grad():
        with hw.watch(model, hw.Entropy()) as wanted:
            out = model(x)
        for _ in range(2):
            with hw.watch(compiled if who == "compiled" else model, hw.Entropy()) as seen:
                torch.testing.assert_close(compiled(x), out)
            same(seen, wanted)
        assert graphs() == (0, 0)
        compiled(x)
        assert graphs() == (1, 0)


def test_a_graph_that_modules_share_tells_them_apart() -> None:
    """A break in the model's forward lets blocks be compiled one by one, in one graph."""

    class Broken(GPT):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.embedding(ids)
            for block in self.blocks:
                torch._dynamo.graph_break()
                x = block(x)
            return self.head(x)

    model = Broken()
    compiled = torch.compile(model, backend="aot_eager")
    with hw.watch(model, *STATISTICS) as wanted:
        model(IDS)
    for _ in range(2):
        with hw.watch(compiled, *STATISTICS) as seen:
            compiled(IDS)
        same(seen, wanted)


@pytest.mark.parametrize("teacher_first", [False, True])
def test_a_graph_that_models_share_tells_of_the_one_that_is_watched(teacher_first: bool) -> None:
    student, teacher = GPT(), GPT()
    run = torch.compile(lambda model, ids: model(ids), backend="aot_eager")
    turns = [teacher, student] if teacher_first else [student, teacher]
    with hw.watch(student, *STATISTICS) as wanted:
        student(IDS)
    for _ in range(2):
        with hw.watch(student, *STATISTICS) as seen:
            for model in turns:
                run(model, IDS)
        same(seen, wanted)
    with hw.watch(teacher, *STATISTICS) as seen, hw.watch(student, *STATISTICS) as other:
        for model in turns:
            run(model, IDS)
    same(other, wanted)
    with hw.watch(teacher, *STATISTICS) as wanted:
        teacher(IDS)
    same(seen, wanted)


def test_without_a_parameter_a_second_call_of_a_shared_graph_is_left_out() -> None:
    class Bare(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x)

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attentions = nn.ModuleList([Bare(), Bare()])

        def forward(self, x: Tensor) -> Tensor:
            for attention in self.attentions:
                torch._dynamo.graph_break()
                x = attention(x)
            return x

    model, x = Two(), torch.randn(B, H, T, E)
    compiled = torch.compile(model, backend="aot_eager")
    with hw.watch(compiled, hw.Entropy()) as seen:
        compiled(x)
    assert sum(row["calls"] for row in seen.table()) == H
    assert "that identifies the one that attends" in next(iter(seen.left_out.values()))


@pytest.mark.slow
def test_models_that_are_monitored_side_by_side_stay_compiled() -> None:
    """As of a generator and a discriminator: by functions, each with an optimizer."""
    models = [GPT(), GPT(own=True)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    compiled = [torch.compile(model, backend="aot_eager") for model in models]
    pairs = zip(models, optimizers, strict=True)
    monitors = [hw.Monitor(model, optimizer, every=2) for model, optimizer in pairs]
    for _ in range(3):
        for model, optimizer in zip(compiled, optimizers, strict=True):
            loss_of(model).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert graphs()[1] == 0
    for monitor in monitors:
        assert monitor.latest["entropy"].present.all()
        assert list(monitor.layers) == ["blocks.0.attn", "blocks.1.attn"]
        monitor.close()


def test_a_module_that_did_not_run_in_the_graphs_is_named() -> None:
    class Skipping(GPT):
        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.blocks[0](self.embedding(ids)))

    compiled = torch.compile(Skipping(own=True), backend="aot_eager")
    with hw.watch(compiled, hw.Entropy()) as seen:
        compiled(IDS)
    assert seen.modules == ("blocks.0.attn",)
    assert list(seen.left_out) == ["blocks.1.attn"]
    assert "it did not run" in seen.left_out["blocks.1.attn"]


def test_a_graph_that_cannot_be_read_runs_as_it_is_written(monkeypatch: Any) -> None:
    from headwise.capture.adapters import graph_sites

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("of another version of PyTorch")

    monkeypatch.setattr(graph_sites, "leading", broken)
    model = GPT()
    compiled = torch.compile(model, backend="aot_eager")
    with hw.watch(model, *STATISTICS) as wanted:
        model(IDS)
    with hw.watch(compiled, *STATISTICS) as seen:
        compiled(IDS)
    same(seen, wanted)
    assert graphs() == (0, 0)


def test_layers_under_autocast() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(hw.MultiHeadAttention(E, H) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x, mask=hw.Causal())
            return x

    model, x = Two(), torch.randn(B, T, E)
    compiled = torch.compile(model, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        with hw.watch(model, *STATISTICS) as wanted:
            model(x)
        with hw.watch(compiled, *STATISTICS) as seen:
            compiled(x)
    same(seen, wanted, 2e-2)


def test_a_part_is_not_watched_beside_its_compiled_model() -> None:
    model = GPT()
    compiled = torch.compile(model, backend="aot_eager")
    refused = pytest.raises(ValueError, match="a part of it is watched")
    with hw.watch(compiled, hw.Entropy()), hw.watch(model.blocks[1], hw.Entropy()), refused:
        compiled(IDS)


def test_parts_without_a_name_run_as_they_are_written() -> None:
    layers = [Attends(one_query), Attends(heads_first)]
    model, x = nn.Sequential(*layers[::-1]), torch.randn(B, T, E)
    with hw.watch(model, hw.Entropy()) as wanted:
        model(x)
    model[1].compile(backend="aot_eager")
    with hw.watch(model, hw.Entropy()) as seen:
        model(x)
    same(seen, wanted)
    assert graphs() == (0, 0)


def test_the_projection_of_transformers_layers_is_known() -> None:
    pytest.importorskip("transformers")
    model, loss = transformers_model("llama")
    compiled = torch.compile(model, backend="aot_eager")
    with hw.watch(model, hw.OutputNorm()) as wanted:
        loss(model)
    with hw.watch(compiled, hw.OutputNorm()) as seen:
        loss(compiled)
    assert "contribution" in seen.table()[0]
    same(seen, wanted, 1e-5)


def test_a_watch_that_is_opened_inside_compiled_code_follows_its_model_afterwards() -> None:
    """Its compiled calls are captured, and then calls of the model as it is written are seen."""
    model, other = GPT(), GPT()
    inner = torch.compile(lambda: other(IDS), backend="eager")
    calls: list[int] = []

    @torch.compiler.disable
    def look(out: Tensor) -> Tensor:
        with hw.watch(other, hw.Entropy()) as seen:
            inner()
            other(IDS)
        calls.append(seen.table()[0]["calls"])
        return out

    outer = torch.compile(lambda: look(model(IDS)) + 1, backend="eager")
    with torch.no_grad():
        for _ in range(2):
            with hw.watch(model, hw.Entropy()) as seen:
                outer()
                model(IDS)
            assert seen.table()[0]["calls"] == 2
    assert calls == [2, 2]

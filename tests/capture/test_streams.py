"""Streams of tokens that attend together: joined before attention, and split after it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise as hw
from headwise.capture.parts import PendingCall, read, streams_of
from support import truth

B, H, C = 2, 4, 32
IMAGE, TEXT, REGISTERS = 8, 5, 3
METRICS = ("importance", "ablation")


class Sdpa(nn.Module):
    """PyTorch's function in a module of its own."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1) @ v


class Product(nn.Linear):
    """A projection that is not `F.linear`."""

    def forward(self, input: Tensor) -> Tensor:
        rows = torch.addmm(self.bias, input.flatten(0, -2), self.weight.T)
        return rows.view(*input.shape[:-1], -1)


class Joint(nn.Module):
    """Attention of image and text, each with projections of its own, as in Flux and SD3."""

    def __init__(
        self,
        attend: str = "sdpa",
        gives: str = "both",
        text_first: bool = True,
        registers: int = 0,
        projection: type[nn.Linear] = nn.Linear,
        says: bool = True,
    ) -> None:
        super().__init__()
        if says:
            self.heads = H
        self.gives, self.text_first = gives, text_first
        self.qkv, self.text_qkv = nn.Linear(C, 3 * C), nn.Linear(C, 3 * C)
        self.out, self.text_out = projection(C, C), projection(C, C)
        self.registers = nn.Parameter(torch.randn(1, registers, C))
        if attend == "module":
            self.inner = Sdpa()
        functions = {"sdpa": F.scaled_dot_product_attention, "own": hw.attend, "by hand": by_hand}
        self.attend = functions.get(attend) or self.inner
        self.joined: list[Tensor] = []

    def forward(self, image: Tensor, text: Tensor | None = None) -> Any:
        added = self.registers.shape[1]
        image = torch.cat([self.registers.expand(len(image), -1, -1), image], 1)
        streams = [self.qkv(image)]
        if text is not None:
            streams.insert(0 if self.text_first else 1, self.text_qkv(text))
        lengths = [stream.shape[1] for stream in streams]
        whole = torch.cat(streams, 1).unflatten(-1, (3, H, -1))
        self.joined = [x.transpose(1, 2) for x in whole.unbind(2)]
        outs = self.attend(*self.joined).transpose(1, 2).flatten(2).split(lengths, 1)
        image = self.out(outs[-1 if self.text_first else 0][:, added:])
        if text is None or self.gives == "one":
            return image
        text = self.text_out(outs[0 if self.text_first else 1])
        if self.gives == "dict":
            return {"hidden_states": image, "encoder_hidden_states": text}
        return image, text


class Net(nn.Module):
    """A block, and its output as a loss."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, image: Tensor, text: Tensor | None = None) -> Tensor:
        out = self.block(image, text)
        parts = out.values() if isinstance(out, dict) else out if isinstance(out, tuple) else [out]
        return sum((part.square().mean() for part in parts), torch.zeros(()))


CASES: list[dict[str, Any]] = [
    *({"attend": attend, "gives": gives} for attend in ("sdpa", "module", "own", "by hand")
      for gives in ("both", "one")),
    {"gives": "dict", "text_first": False},
    {"registers": REGISTERS},
    {"registers": REGISTERS, "attend": "by hand", "text_first": False},
    {"says": False},
    {"says": False, "gives": "one", "attend": "by hand"},
    {"projection": Product},
    {"projection": Product, "attend": "module"},
]  # fmt: skip


def inputs() -> tuple[Tensor, Tensor]:
    return torch.randn(B, IMAGE, C), torch.randn(B, TEXT, C)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_streams_that_attend_together(case: dict[str, Any]) -> None:
    block = Joint(**case)
    model, given = Net(block), inputs()
    with torch.no_grad():
        plain = model(*given)
        with hw.watch(model, hw.Entropy(), hw.Received(), hw.Mass(hw.Self())) as seen:
            assert torch.equal(model(*given), plain)
    name = "block.inner" if case.get("attend") == "module" else "block"
    assert seen.left_out == {}
    assert list(seen) == [name]
    full = truth(*block.joined)
    for statistic in (hw.Entropy(), hw.Received(), hw.Mass(hw.Self())):
        for metric, wanted in statistic.define(full).items():
            got = seen[name][metric].double()
            torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


def test_registers_alone() -> None:
    block = Joint(registers=REGISTERS)
    with hw.watch(block, hw.Entropy()) as seen:
        block(torch.randn(B, IMAGE, C))
    assert seen[""]["entropy"].shape == (B, H, REGISTERS + IMAGE)


@pytest.mark.parametrize("gives", ["both", "one"])
@pytest.mark.parametrize("attend", ["sdpa", "module", "by hand"])
def test_heads_of_joint_attention_are_ablated_and_ranked(attend: str, gives: str) -> None:
    block = Joint(attend, gives)
    model, given = Net(block), inputs()
    name = "block.inner" if attend == "module" else "block"
    with torch.no_grad():
        with hw.ablate(model, {name: [1]}):
            ablated = model(*given)
        for projection in (block.out, block.text_out):
            projection.weight.view(C, H, -1)[:, 1] = 0.0
        torch.testing.assert_close(model(*given), ablated)
    for effects in (
        hw.importance(model.eval(), lambda model, batch: model(*batch), [given]),
        hw.ablation_scan(model, lambda model, batch: model(*batch), [given]),
    ):
        moved = [next(v for k, v in row.items() if k in METRICS) for row in effects.table()]
        assert moved[1] == 0.0  # nothing reads it any more
        assert all(moved[head] != 0.0 for head in (0, 2, 3))


def test_positions_that_are_no_stream_are_left_out() -> None:
    class Thinned(Joint):
        def forward(self, image: Tensor, text: Tensor | None = None) -> Tensor:
            q, k, v = self.qkv(image).unflatten(-1, (3, H, -1)).transpose(1, 3).unbind(2)
            out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            return self.out(out[:, ::2])

    block = Thinned()
    with hw.watch(block, hw.Entropy()) as seen:
        block(torch.randn(B, IMAGE, C))
    assert list(seen) == []
    assert seen.left_out[""].endswith("has 16 queries, but its module returns 8 positions")


def test_a_monitor_records_streams(tmp_path: Path) -> None:
    model = Net(Joint())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with hw.Monitor(model, optimizer, every=1, history=tmp_path / "run.hw") as monitor:
        model(*inputs()).sum().backward()
        optimizer.step()
    assert hw.History(tmp_path / "run.hw").layers == {"block": H}
    assert not monitor.unavailable


def test_weights_of_joint_attention() -> None:
    block = Joint()
    weights = hw.attention_of(block, inputs(), "")
    assert weights.shape == (B, H, TEXT + IMAGE, TEXT + IMAGE)
    q, k, _ = block.joined
    torch.testing.assert_close(weights, (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1).detach())


def test_compiled_streams() -> None:
    model, given = Net(Joint()), inputs()
    with torch.no_grad():
        with hw.watch(model, hw.Entropy()) as eager:
            model(*given)
        compiled: Any = torch.compile(model, backend="aot_eager")
        with hw.watch(compiled, hw.Entropy()) as seen:
            compiled(*given)
    assert seen.left_out == {}
    torch.testing.assert_close(
        next(iter(seen[name] for name in seen))["entropy"], eager["block"]["entropy"]
    )


# ── the streams by name ─────────────────────────────────────────────────────────────────────────

NAMED: list[tuple[dict[str, Any], dict[str, tuple[int, int]]]] = [
    *(({"attend": attend}, {"text": (0, 5), "image": (5, 13)})
      for attend in ("sdpa", "module", "own", "by hand")),
    ({"gives": "dict", "text_first": False}, {"image": (0, 8), "text": (8, 13)}),
    ({"gives": "one"}, {"rest": (0, 5), "out": (5, 13)}),
    ({"registers": REGISTERS}, {"text": (0, 5), "registers": (5, 8), "image": (8, 16)}),
    ({"registers": REGISTERS, "text_first": False},
     {"registers": (0, 3), "image": (3, 11), "text": (11, 16)}),
    ({"projection": Product}, {}),  # the outputs' lengths alone do not tell their order
]  # fmt: skip


@pytest.mark.parametrize(("case", "streams"), NAMED, ids=str)
def test_streams_have_names_where_their_projections_tell(
    case: dict[str, Any], streams: dict[str, tuple[int, int]]
) -> None:
    model = Net(Joint(**case))
    with hw.watch(model, hw.Entropy()) as seen, torch.no_grad():
        for _ in range(2):
            model(*inputs())
    (module,) = (seen[name] for name in seen)
    assert module.streams == streams
    assert list(module.streams) == list(streams)


def test_attention_between_streams_is_that_of_the_weights() -> None:
    block, given = Joint(), inputs()
    with torch.no_grad(), hw.watch(block, hw.Entropy()) as seen:
        block(*given)
    streams = seen[""].streams
    image = range(*streams["image"])
    with torch.no_grad(), hw.watch(block, hw.Segments(streams), queries=image) as seen:
        block(*given)
    weights = truth(*block.joined).weights[:, :, TEXT:]
    for row in seen.table():
        of_head = weights[:, row["head"]]
        assert row["text"] == pytest.approx(of_head[..., :TEXT].sum(-1).mean().item(), abs=1e-5)
        assert row["image"] == pytest.approx(of_head[..., TEXT:].sum(-1).mean().item(), abs=1e-5)


def test_streams_that_change_have_no_range() -> None:
    block, (image, text) = Joint(), inputs()
    with torch.no_grad(), hw.watch(block, hw.Entropy()) as seen:
        block(image, text)
        block(image, text[:, 1:])
    assert seen[""].streams == {}


@pytest.mark.parametrize(
    ("reads", "streams"),
    [
        ({"a.img_out": (0, 3), "a.txt_out": (3, 7)}, {"image": (0, 3), "text": (3, 7)}),
        ({"a.low": (1, 3), "a.high": (3, 6)},
         {"registers 0": (0, 1), "low": (1, 3), "high": (3, 6), "registers 1": (6, 7)}),
        ({"a": (0, 3)}, {"stream 0": (0, 3), "rest": (3, 7)}),
        ({"a.low": (0, 4), "a.high": (3, 7)}, {}),
    ],
)  # fmt: skip
def test_names_of_streams(
    reads: dict[str, tuple[int, int]], streams: dict[str, tuple[int, int]]
) -> None:
    made = torch.randn(B, H, 7, C // H)
    call = PendingCall("a", "", made, made.shape, 7)
    for name, (start, stop) in reads.items():
        read([call], made.transpose(1, 2).flatten(2)[:, start:stop], name)
    assert streams_of(call) == streams


def test_equal_tokens_do_not_tell_where_a_stream_begins() -> None:
    made = torch.ones(B, H, 7, C // H)
    call = PendingCall("a", "", made, made.shape, 7)
    read([call], torch.ones(B, 3, C), "a.out")
    assert streams_of(call) == {}


def test_streams_are_saved_and_added(tmp_path: Path) -> None:
    block = Joint()
    watched = []
    for _ in range(2):
        with torch.no_grad(), hw.watch(block, hw.Entropy()) as seen:
            block(*inputs())
        watched.append(seen)
    seen = watched[0]
    wanted = {"text": (0, TEXT), "image": (TEXT, TEXT + IMAGE)}
    assert (watched[0] + watched[1])[""].streams == wanted
    seen.save(tmp_path / "seen.safetensors")
    assert type(seen).load(tmp_path / "seen.safetensors")[""].streams == wanted

"""headwise, asked what its peers are asked."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import headwise as hw

from . import shared

PACKAGES = ["."]


def weights() -> str:
    model, inputs = shared.bert("sdpa")
    eager, _ = shared.bert()
    wanted = eager(**inputs, output_attentions=True).attentions[1][:, 3]
    return f"yes, from sdpa ({shared.agree(hw.attention_of(model, inputs, 1, 3), wanted)})"


def entropies(length: int) -> Callable[[], list[Tensor]]:
    model, tokens = shared.gpt(length, "sdpa"), shared.ids(length)

    def run() -> list[Tensor]:
        with torch.no_grad(), hw.watch(model, hw.Entropy()) as seen:
            model(tokens)
        return [seen[name]["entropy"] for name in seen.modules]

    return run


def own_module() -> str:
    own, x = shared.Own(), torch.randn(2, 17, 24)
    with torch.no_grad(), hw.watch(own, hw.Entropy()) as seen:
        out = own(x)
    assert torch.equal(out, own(x))
    return f"yes ({shared.agree(seen['']['entropy'], shared.entropies(own.weights(x)))})"


def training() -> str:
    own, x = shared.Own(), torch.randn(2, 17, 24)
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
    monitor = hw.Monitor(own, optimizer, every=2)
    for _ in range(4):
        own(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    monitor.close()
    assert monitor.latest["entropy"].values.shape == (3,)
    return "yes: `Monitor`, with alarms, a history and trackers"


def gradients() -> str:
    own, x = shared.Own(), torch.randn(2, 17, 24)
    with hw.watch(own, hw.Entropy(), gradients=True) as seen:
        own(x)
    (found,) = torch.autograd.grad(seen[""]["entropy"].sum(), [own.qkv.weight])
    (wanted,) = torch.autograd.grad(shared.with_gradient(own.weights(x)).sum(), [own.qkv.weight])
    return f"yes, without the matrix ({shared.agree(found, wanted, 1e-3)})"


def ablation() -> str:
    model, inputs = shared.bert("sdpa")
    with torch.no_grad():
        whole = model(**inputs).last_hidden_state
        with hw.ablate(model, {"encoder.layer.1.attention.self": [3]}):
            without = model(**inputs).last_hidden_state
    assert not torch.allclose(whole, without)
    return "yes: `ablate`, one line; zero, mean or resampled"


def patching() -> str:
    return "heads' outputs only, resampled from the batch"


def attribution() -> str:
    own, x = shared.Own(), torch.randn(2, 17, 24)
    found = hw.importance(own, lambda own, x: own(x).square().mean((1, 2)), [x])
    assert len(found.table()) == 3
    return "of heads (`importance`); none of inputs"


def page() -> str:
    model, tokenizer = shared.trained("sdpa")
    html = hw.look(model, tokenizer, shared.TEXT)._repr_html_()
    return f"yes: one page of views ({shared.addresses(html)})"


def probes() -> str:
    model, _ = shared.trained("sdpa")
    once = torch.randint(512, (4, 40), generator=torch.Generator().manual_seed(0))
    tokens = torch.cat([once, once], 1)
    with torch.no_grad(), hw.watch(model, hw.Mass(hw.Induction(tokens))) as seen:
        model(tokens)
    best = max(row["induction"] for row in seen.table())
    assert best > 0.9
    return f"yes: `Mass` of a pattern, named heads; induction {best:.2f}"


def layer() -> str:
    x = torch.randn(2, 17, 24)
    made = hw.MultiHeadAttention(24, num_heads=6, num_kv_heads=2)
    assert made(x, mask=hw.Causal() & hw.Window(4)).shape == x.shape
    return "yes: `MultiHeadAttention`: groups, windows, RoPE, cache"

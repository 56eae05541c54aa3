"""How callers make the mask that they hand to a layer, in its file and beside it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from headwise.check.diagnosis.read_makers import _ones
from headwise.check.files import check_file
from headwise.check.files.syntax import Source

LAYER = """
import torch
from torch import nn


class SelfAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x, mask=None):
        q, k, v = (
            one.unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in self.qkv(x).chunk(3, -1)
        )
        scores = q @ k.mT / q.shape[-1] ** 0.5
        if mask is not None:
            scores = scores.masked_fill({filled}, -1e9)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
"""
MODEL = """
from torch import nn
from attention import SelfAttention


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.attention, self.norm = SelfAttention(dim, heads), nn.LayerNorm(dim)

    def forward(self, x, pad_mask):
        pad_mask = pad_mask[:, None, None]
        return x + self.attention(self.norm(x), pad_mask)


class Model(nn.Module):
    def __init__(self, vocabulary, dim, heads, depth, pad=0):
        super().__init__()
        self.embedding, self.pad = nn.Embedding(vocabulary, dim), pad
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))

    def forward(self, tokens):
        mask = (tokens {compared} self.pad)
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return x
"""


@pytest.mark.parametrize("filled", ["mask", "mask == 0"])
@pytest.mark.parametrize("compared", ["==", "!="])
def test_a_mask_is_taken_as_it_is_made(filled: str, compared: str, tmp_path: Path) -> None:
    (tmp_path / "attention.py").write_text(LAYER.replace("{filled}", filled))
    (tmp_path / "model.py").write_text(MODEL.replace("{compared}", compared))
    found = check_file(f"{tmp_path}/attention.py:SelfAttention").errors
    if (filled == "mask") == (compared == "=="):
        assert not found
    else:
        assert "is taken the other way round than it is made, `tokens" in found[0].message
        assert "model.py" in found[0].hint


@pytest.mark.parametrize(
    ("code", "ones"),
    [
        ("tokens != self.pad_id", "seen"),
        ("src.eq(PAD).unsqueeze(1)", "hidden"),
        ("torch.arange(n)[None] < lengths[:, None]", "seen"),
        ("torch.arange(n)[None] >= lengths[:, None]", "hidden"),
        ("torch.tril(torch.ones(t, t))", "seen"),
        ("torch.tril(torch.ones(t, t)) == 0", "hidden"),
        ("1 - torch.triu(torch.ones(t, t), diagonal=1)", "seen"),
        ("torch.triu(torch.ones(t, t), diagonal=1).bool()", "hidden"),
        ("(src != pad) & torch.tril(torch.ones(t, t)).bool()", "seen"),
        ("(src == pad) | later", "hidden"),
        ("(src != pad) | later", ""),
        ("~made", "hidden"),
        ("self.helper(x)", "seen"),
        ("batch['attention_mask'].to(device)", "seen"),
        ("torch.full((t, t), -1e9).triu(1)", ""),
        ("x > 0", ""),
    ],
)
def test_what_the_ones_of_a_mask_say(code: str, ones: str) -> None:
    text = (
        "class A:\n    def helper(self, x):\n        keep = x != PAD\n        return keep\n\n"
        f"    def forward(self, x):\n        made = x != pad\n        return {code}\n"
    )
    source = Source(text)
    function = source.function("A.forward")
    assert isinstance(function, ast.FunctionDef)
    value = function.body[-1]
    assert isinstance(value, ast.Return)
    assert value.value is not None
    scope = {"made": function.body[0].value}  # type: ignore[attr-defined]
    assert _ones(value.value, scope, source) == ones

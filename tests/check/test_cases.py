"""Layers that the checker's authors had not seen, wrong and right, and what it must say of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from authored import loaded
from headwise.check import Verdict, check

CASES = Path(__file__).parent / "cases"
X, KEEP, BOTH = (
    "lambda layer, x: layer(x)",
    "lambda layer, x, keep: layer(x, keep)",
    "lambda layer, x, memory, keep: layer(x, memory, keep)",
)
START = (
    "lambda layer, x, start: layer(x, precompute_freqs_cis(layer.head_dim, 64)"
    "[start : start + x.shape[1]])"
)

WRONG = {
    "s01_noslice": (X, "runs", r"line 19, `att = att.masked_fill\(self.tril == 0"),
    "s02_padinv": (KEEP, "padding", r"`keep` is inverted"),
    "s03_gqatile": ("", "grouped-heads", r"3 value heads are tiled .* Look at line 21"),
    "s04_ropeaxis": ("", "rotary", r"the order of the tokens does not matter"),
    "s05_nanmask": ("", "finite", r"0 · ∞ is NaN.*\n.*Look at line 17"),
    "s06_cachedim": ("", "cache", r"see the first keys.*\n.*Look at line 19"),
    "s07_pylist": (
        "",
        "scale",
        r"divided by √24, the root of the whole.*Look at line 14",
    ),
    "s08_alibi": ("", "positions", r"Slope times distance is added"),
    "s09_window": ("", "causality", r"each token sees 3 tokens that come after it"),
    "s10_llama": (START, "rotary", r"Keys and queries are rotated in opposite directions"),
    "s11_crossmask": ("", "cross", r"another sequence \[2, 11, 24\] the call fails.*line 17"),
    "s12_block": ("", "mask-fill", r"The mask comes after the softmax"),
}
RIGHT = {"u06_right": "", "u09_right": "", "u10_right": BOTH, "u11_llama_right": START}
ASKED = {"s01_noslice": "fix line 19", "s10_llama": "`freqs_cis`", "u10_right": BOTH}


def verdict_of(case: str, call: str, folder: Path, *changes: tuple[str, str]) -> Verdict:
    """Return the verdict on a case, with pieces of its text exchanged."""
    text = (CASES / f"{case}.py").read_text("utf-8")
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return judged(text, call, folder)


def judged(text: str, call: str, folder: Path, **arguments: Any) -> Verdict:
    thing, names = loaded(text, folder)
    return check(thing, call=eval(call, names) if call else None, **arguments)


@pytest.mark.parametrize("case", WRONG)
def test_the_mistake_is_found_first(case: str, tmp_path: Path) -> None:
    call, rule, says = WRONG[case]
    verdict = verdict_of(case, call, tmp_path)
    first = verdict.errors[0]
    assert first.rule == rule, str(verdict)
    assert re.search(says, str(first), re.DOTALL), str(verdict)
    others = {"s07_pylist": ["move"], "s12_block": ["scale"]}
    assert [one.rule for one in verdict.errors[1:]] == others.get(case, []), str(verdict)


@pytest.mark.parametrize("case", RIGHT)
def test_a_right_one_is_not_accused(case: str, tmp_path: Path) -> None:
    verdict = verdict_of(case, RIGHT[case], tmp_path)
    assert verdict.findings == (), str(verdict)
    assert verdict["definition"].severity == "passed"


@pytest.mark.parametrize("case", ASKED)
def test_it_asks_for_a_call(case: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(ASKED[case])) as caught:
        verdict_of(case, "", tmp_path)
    assert '--call "lambda layer, x' in str(caught.value)


# ---- Messages to get right -----------------------------------------------------------------------


def test_values_of_the_decoder(tmp_path: Path) -> None:
    change = ("v = self.v(enc).view(B, S,", "v = self.v(dec).view(B, T,")
    (one,) = verdict_of("u10_right", BOTH, tmp_path, change).errors
    assert one.rule == "cross"
    assert "Values come from the wrong sequence" in one.message


def test_the_line_that_divides(tmp_path: Path) -> None:
    scale = verdict_of("s12_block", "", tmp_path).errors[1]
    assert scale.rule == "scale"
    assert "Look at line 21, " in scale.hint


def test_positions_that_restart(tmp_path: Path) -> None:
    change = ("P0 = 0 if kv_cache is None else kv_cache[0].shape[2]", "P0 = 0")
    (one,) = verdict_of("u06_right", "", tmp_path, change).errors
    assert one.rule == "cache"
    assert "keys are kept, but positions restart at 0" in one.message
    assert "Look at line 28, " in one.hint
    assert "token 3" in str(one)


@pytest.mark.parametrize("call", ["", KEEP])
def test_a_mask_on_the_axis_of_the_queries(call: str, tmp_path: Path) -> None:
    change = ("mask[:, None, None, :] == 1", "mask[:, None, :, None] == 0")
    (one,) = verdict_of("s02_padinv", call, tmp_path, change).errors
    assert one.rule in ("padding", "mask")
    assert "hides queries instead of keys" in one.message


@pytest.mark.parametrize("call", ["", KEEP])
def test_a_fill_that_is_too_small(call: str, tmp_path: Path) -> None:
    changes = (("mask[:, None, None, :] == 1", "mask[:, None, None, :] == 0"), ("-1e9", "-1e-9"))
    (one,) = verdict_of("s02_padinv", call, tmp_path, *changes).errors
    assert one.rule in ("padding", "mask")
    assert "keep a share of the weight" in one.message
    assert "Look at line 25, " in one.hint


def test_a_complex_buffer_is_no_mistake(tmp_path: Path) -> None:
    changes = (
        (
            "        self.wo = nn.Linear(args.n_heads * self.head_dim, args.dim, bias=False)\n",
            "        self.wo = nn.Linear(args.n_heads * self.head_dim, args.dim, bias=False)\n"
            '        self.register_buffer("freqs_cis", precompute_freqs_cis(self.head_dim, 64))\n',
        ),
        ("def forward(self, x, freqs_cis, mask=None)", "def forward(self, x, mask=None)"),
        ("apply_rotary_emb(q, k, freqs_cis)", "apply_rotary_emb(q, k, self.freqs_cis[:t])"),
    )
    verdict = verdict_of("u11_llama_right", "", tmp_path, *changes)
    assert verdict.findings == (), str(verdict)
    assert "rotary" in verdict.notes


MASKED = ("class MultiHeadAttention", "class MaskedAttention")


def test_a_class_that_is_called_masked_need_not_be_causal(tmp_path: Path) -> None:
    verdict = verdict_of("s02_padinv", "", tmp_path, MASKED)
    assert verdict.passed, str(verdict)
    assert "sees all tokens" in verdict.notes


def test_a_class_that_is_called_causal_must_be(tmp_path: Path) -> None:
    text = (CASES / "s03_gqatile.py").read_text("utf-8")
    text = text.replace("class GQA", "class CausalGQA").replace(", is_causal=True", "")
    assert judged(text, "", tmp_path).errors[0].rule == "causal-mask"


def test_unpacked_lists_are_registered(tmp_path: Path) -> None:
    change = (
        "(nn.Linear(d_model, d_model) for _ in range(4))",
        "[nn.Linear(d_model, d_model) for _ in range(4)]",
    )
    assert verdict_of("u10_right", BOTH, tmp_path, change).findings == ()


def test_a_softmax_over_heads_in_another_order(tmp_path: Path) -> None:
    text = """
import torch
from torch import nn

class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        q, k, v = (z.unflatten(-1, (self.heads, -1)) for z in self.qkv(x).chunk(3, -1))
        scores = torch.einsum("bqhd,bkhd->bqkh", q, k) / q.shape[-1] ** 0.5
        return self.out(torch.einsum("bqkh,bkhd->bqhd", scores.softmax(dim=-1), v).flatten(2))
"""
    (one,) = judged(text, "", tmp_path).errors
    assert one.rule == "softmax"
    assert "runs over the heads" in one.message
    assert "dim=2 of [B, queries, keys, H]" in one.hint
    assert "dim=1" not in str(one)
    assert "Look at line 14, " in one.hint
    assert judged(text.replace("softmax(dim=-1)", "softmax(dim=2)"), "", tmp_path).passed


NUMPY = """
import numpy as np

def attention(q, k, v):
    scores = q @ np.swapaxes(k, -1, -2) / np.sqrt(q.shape[-1])
    e = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True) @ v
"""


def test_numpy_is_said_to_be_no_tensors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="NumPy"):
        judged(NUMPY, "", tmp_path)

"""Evidence that comes from the check's own call, or from a part that the call does not reach, is no
mistake; what nobody can reach, is one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_check_conventions import Base
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from headwise.check import check
from mutants import load


class OnlyAnotherUses(Base):
    """A norm that only another sequence goes through, and a parameter without numbers."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, heads)
        self.context_norm = nn.LayerNorm(dim)
        self.extra = nn.Parameter(torch.zeros(2, 0, dim))

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        source = x if context is None else self.context_norm(context)
        empty = self.extra[:1].expand(len(source), -1, -1)
        return self.to_out(self.attend(x, torch.cat((source, empty), 1)))


class OutOnlyForText(Base):
    """An output projection that another path applies."""

    def forward(self, x: Tensor, text: bool = False) -> Tensor:
        out = self.attend(x, x)
        return self.to_out(out) if text else out


class Forgotten(Base):
    """An output projection that no line applies."""

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x, x)


class OnlyInFloat64(Base):
    """A fill that is infinite in float64 alone, where 0 times it is NaN."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        out = self.attend(x, x)
        if mask is not None:
            keys = (1.0 - mask[:, None, None].float()) * torch.finfo(x.dtype).min
            q, k, v = (
                f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
                for f in (self.to_q, self.to_k, self.to_v)
            )
            scores = q @ k.mT / q.shape[-1] ** 0.5 + keys
            out = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        return self.to_out(out)


class SpeaksOfTheOther(Base):
    """Attends to its own tokens and to a text's; its mask is the text's."""

    def forward(self, x: Tensor, text: Tensor, text_mask: Tensor | None = None) -> Tensor:
        source = torch.cat((x, text), 1)
        hidden = None
        if text_mask is not None:
            own = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
            hidden = ~torch.cat((own, text_mask.bool()), 1)[:, None, None]
        return self.to_out(self.attend(x, source, hidden))


class BuiltForItself(Base):
    """Attends to another sequence only if it was built for that, and must be given one."""

    def __init__(self, dim: int, heads: int, encoder_decoder_attention: bool = False) -> None:
        super().__init__(dim, heads)
        self.encoder_decoder = encoder_decoder_attention

    def forward(self, x: Tensor, context: Tensor | None) -> Tensor:
        return self.to_out(self.attend(x, context if self.encoder_decoder else x))


class KernelForGPUs(Base):
    """In training it drops weights, and allows a kernel alone that no CPU has for that."""

    def __init__(self, dim: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__(dim, heads)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        drop = self.dropout if self.training else 0.0
        q, k, v = (
            f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for f in (self.to_q, self.to_k, self.to_v)
        )
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = F.scaled_dot_product_attention(q, k, v, dropout_p=drop)
        return self.to_out(out.transpose(1, 2).flatten(2))


class Packed(Base):
    """Takes sequences that lie behind each other, and where each begins."""

    def forward(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        sizes = (cu_seqlens[1:] - cu_seqlens[:-1]).tolist()
        outs = [self.attend(one[None], one[None])[0] for one in x.split(sizes)]
        return self.to_out(torch.cat(outs))


class OtherNames(Base):
    def __init__(self, d_token: int, vit_n_heads: int, norm_eps: float, use_norm: bool) -> None:
        super().__init__(d_token, vit_n_heads)
        assert not use_norm
        assert norm_eps < 1e-3

    def forward(self, x_q: Tensor, x_k: Tensor) -> Tensor:
        return self.to_out(self.attend(x_q, x_k))


class HandsOn(OtherNames):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


class HandsWithin(nn.Module):
    """What its constructor hands on goes to a layer inside."""

    def __init__(self, width: int, **settings: Any) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(width), OtherNames(width, **settings)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.norm(x)
        out: Tensor = self.inner(rows, rows)
        return out


class GivenModules(nn.Module):
    def __init__(self, q_proj: nn.Module, kv_proj: nn.Module, out_proj: nn.Module, heads: int):
        super().__init__()
        self.q_proj, self.kv_proj, self.out_proj, self.heads = q_proj, kv_proj, out_proj, heads

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            rows.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for rows in (self.q_proj(x), *self.kv_proj(x).chunk(2, -1))
        )
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        return self.out_proj((weights @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    "layer",
    [
        OnlyAnotherUses,
        OnlyInFloat64,
        SpeaksOfTheOther,
        BuiltForItself,
        KernelForGPUs,
        Packed,
        OtherNames,
        HandsOn,
        HandsWithin,
    ],
)
def test_what_the_call_makes_up_is_no_mistake(layer: type[nn.Module]) -> None:
    verdict = check(layer)
    assert verdict.passed, str(verdict)


def test_modules_that_are_handed_in_are_linear() -> None:
    assert check(GivenModules)["definition"].severity == "passed"


def test_what_only_another_input_reaches_is_said_first() -> None:
    for layer, name in ((OnlyAnotherUses, "context_norm.weight"), (OutOnlyForText, "to_out")):
        verdict = check(layer)
        assert verdict.passed, str(verdict)
        assert "right as far as seen" in verdict.summary()
        assert f"Only another input reaches {name}" in verdict.summary().replace(
            "context_norm.bias, ", ""
        )


def test_what_no_line_speaks_of_is_a_mistake() -> None:
    assert "output-projection" in {one.rule for one in check(Forgotten).errors}


RIGHT = """
import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.to_q, self.to_k, self.to_v, self.to_out = (
            nn.Linear(d_model, d_model) for _ in range(4)
        )

    def turned(self, x, start, sign=1.0):
        half = x.shape[-1] // 2
        rope = 100.0 ** -(torch.arange(half) / half)
        angle = sign * (start + torch.arange(x.shape[-2]))[:, None] * rope
        a, b = x[..., :half], x[..., half:]
        return torch.cat((a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()), -1)

    def forward(self, x, past=None, fused=False):
        if fused:
            return flash(x)
        B, T, E = x.shape
        q, k, v = (
            f(x).view(B, T, self.num_heads, -1).transpose(1, 2)
            for f in (self.to_q, self.to_k, self.to_v)
        )
        start = 0 if past is None else past[0].shape[2]
        q, k = self.turned(q, start), self.turned(k, start)
        if past is not None:
            k, v = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
        S = k.shape[2]
        scores = q @ k.mT / q.shape[-1] ** 0.5
        scores = scores.masked_fill(torch.ones(T, S).triu(S - T + 1).bool(), -torch.inf)
        out = (scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, E)
        return self.to_out(out), (k, v)
"""
DEFINED = ("            return flash(x)", "            return self.to_out(x), None")
TURNED = "q, k = self.turned(q, start), self.turned(k, start)"
ROWS = [
    ((), "runs", "Nothing defines the name flash"),
    ((DEFINED, ("scores = scores.masked_fill", "scores.masked_fill")), "unused-result", "masked"),
    ((DEFINED, ("self.turned(k, start)", "self.turned(k, start, -1.0)")), "rotary", "one distance"),
    ((DEFINED, (TURNED, ""), ("triu(S - T + 1)", "triu(1)")), "cache", "the first key alone"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("changes", "rule", "words"), ROWS, ids=[row[1] for row in ROWS])
def test_what_is_wrong_on_any_path_is_said(
    changes: tuple[tuple[str, str], ...], rule: str, words: str, tmp_path: Path
) -> None:
    source = RIGHT
    for old, new in changes:
        assert old in source
        source = source.replace(old, new)
    path = tmp_path / "mine.py"
    path.write_text(source)
    verdict = check(load(source, "Attention", tmp_path), num_heads=2, embed_dim=24)
    first = verdict.errors[0]
    assert first.rule == rule, str(verdict)
    assert words in first.message


class NoModule:
    def __init__(self, d_model: int) -> None:
        self.w_q, self.w_k, self.w_v = (nn.Linear(d_model, d_model) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.w_q(x), self.w_k(x), self.w_v(x)
        return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v


def test_a_class_that_holds_layers_and_is_none() -> None:
    (one,) = check(NoModule).errors
    assert one.rule == "registered"
    assert "NoModule is no nn.Module, but holds some (w_q, w_k, w_v)" in one.message


class BuiltThere(nn.Module):
    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.w_q, self.w_k = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)
        self.w_v = nn.Linear(d_model, d_model).cuda()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.w_q(x), self.w_k(x), self.w_v(x)
        return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v


def test_a_part_that_is_built_on_a_gpu() -> None:
    one = check(BuiltThere).errors[0]
    assert one.rule == "move"
    assert "`nn.Linear(d_model, d_model).cuda()`" in one.message

"""Layers of two paths, and layers that remember: what only another call or flag shows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise import check


class TwoPaths(nn.Module):
    """Takes PyTorch's fused function where it is told to."""

    def __init__(self, width: int, heads: int, flash: bool = False) -> None:
        super().__init__()
        self.heads, self.flash = heads, flash
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, -1)
        )
        return self.out((self.fused if self.flash else self.plain)(q, k, v))

    def plain(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        tokens = q.shape[2]
        later = torch.ones(tokens, tokens, device=q.device).triu(1).bool()
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(later, -torch.inf)
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)

    def fused(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return heads.transpose(1, 2).flatten(2)


class GivesWeights(TwoPaths):
    """Weights come back beside the output, on the path that has them."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        out = super().forward(x)
        return out, self.beside(x) if self.flash else self.weights(x)

    def weights(self, x: Tensor) -> Tensor:
        q, k, _ = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, -1)
        )
        later = torch.ones(x.shape[1], x.shape[1], device=x.device).triu(1).bool()
        return (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(later, -torch.inf).softmax(-1)

    def beside(self, x: Tensor) -> Tensor | None:
        return None


class GivesHeads(GivesWeights):
    def beside(self, x: Tensor) -> Tensor | None:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


def test_what_comes_back_in_the_place_of_weights() -> None:
    assert check(GivesWeights, 24, 3).passed
    (one,) = check(GivesHeads, 24, 3).errors
    assert "With flash=True something else comes back in the place of the weights" in one.message


class SeesAll(TwoPaths):
    def fused(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class MergesNothing(TwoPaths):
    def fused(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (one.transpose(1, 2) for one in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v)


class FindsOut(SeesAll):
    """Looks by itself whether PyTorch has the function."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.flash = not hasattr(F, "scaled_dot_product_attention")


class MadeForOnePath(TwoPaths):
    """Has its mask where it needs it alone."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__(width, heads)
        self.flash = hasattr(F, "scaled_dot_product_attention")
        if not self.flash:
            self.register_buffer("later", torch.ones(99, 99).triu(1).bool(), persistent=False)

    def plain(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        hidden = self.later[: q.shape[2], : q.shape[2]]
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(hidden, -torch.inf)
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


class NoSuchKernel(TwoPaths):
    def fused(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        raise RuntimeError("No available kernel. Aborting execution.")


class BatchFirst(nn.Module):
    """Sequences first, or tokens first."""

    wrong = False

    def __init__(self, embed_dim: int, num_heads: int, batch_first: bool = False) -> None:
        super().__init__()
        self.heads, self.batch_first = num_heads, batch_first
        self.qkv, self.out = nn.Linear(embed_dim, 3 * embed_dim), nn.Linear(embed_dim, embed_dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.batch_first else x.transpose(0, 1)
        parts = (
            p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in self.qkv(x).chunk(3, -1)
        )
        heads = F.scaled_dot_product_attention(*parts)
        if self.batch_first and self.wrong:
            return self.out(heads.reshape(x.shape))
        out = self.out(heads.transpose(1, 2).flatten(2))
        return out if self.batch_first else out.transpose(0, 1)


class MergedWrongly(BatchFirst):
    wrong = True


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (TwoPaths, None),
        (SeesAll, "With flash=True the same weights give another output."),
        (MergesNothing, "With flash=True the same call fails"),
        (FindsOut, "With self.flash the other way"),
        (MadeForOnePath, None),
        (NoSuchKernel, None),
        (BatchFirst, None),
        (MergedWrongly, "With batch_first=True the same weights give another output."),
    ],
)
def test_both_paths_are_tried(layer: type[nn.Module], said: str | None) -> None:
    verdict = check(layer)
    assert [one.rule for one in verdict.errors] == ["paths"] * (said is not None), str(verdict)
    assert said is None or verdict.errors[0].message.startswith(said)


class Remembers(TwoPaths):
    """Keeps what its first call made, and adds it once more to later ones."""

    wrong = True
    kept: Tensor | None = None

    def plain(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        tokens = q.shape[2]
        scores = q @ k.mT / q.shape[-1] ** 0.5
        if self.kept is None or self.kept.shape[-1] < tokens:
            self.kept = torch.ones(tokens, tokens, device=q.device).cumsum(1) / 9
            scores = scores + self.kept
        else:
            kept = self.kept[:tokens, :tokens].to(q.device)
            scores = scores + (2 if self.wrong else 1) * kept
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)

    def fused(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.plain(q, k, v)


class RemembersRightly(Remembers):
    wrong = False


def test_a_first_call_and_a_second_give_the_same() -> None:
    (one,) = check(Remembers).errors
    assert (one.rule, one.message.split(" gives")[0]) == ("deterministic", "The first call")
    assert check(RemembersRightly).passed


class MaskedPaths(nn.Module):
    """Hides where the mask is True; the fused kernel takes the opposite."""

    def __init__(self, d_model: int, num_heads: int, flash: bool = False) -> None:
        super().__init__()
        self.num_heads, self.flash = num_heads, flash
        self.qkv, self.out = nn.Linear(d_model, 3 * d_model), nn.Linear(d_model, d_model)

    def turned(self, hidden: Tensor) -> Tensor:
        return ~hidden

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        parts = self.qkv(x).chunk(3, -1)
        q, k, v = (one.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for one in parts)
        hidden = None if mask is None else mask[:, None, None]
        if self.flash:
            seen = None if hidden is None else self.turned(hidden)
            heads = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        else:
            scores = q @ k.mT / q.shape[-1] ** 0.5
            scores = scores if hidden is None else scores.masked_fill(hidden, -torch.inf)
            heads = scores.softmax(-1) @ v
        return self.out(heads.transpose(1, 2).flatten(2))


class NotTurned(MaskedPaths):
    def turned(self, hidden: Tensor) -> Tensor:
        return hidden


def test_both_paths_follow_the_same_mask() -> None:
    assert check(MaskedPaths)["paths"].severity == "passed"
    finding = check(NotTurned).errors[0]
    assert finding.rule == "paths"
    assert "With flash=True the same weights follow another mask" in finding.message


USE_FLASH = 0


class OfTheFile(TwoPaths):
    """The file says which path is taken."""

    def forward(self, x: Tensor) -> Tensor:
        self.flash = bool(USE_FLASH)
        return super().forward(x)


class SeesAllIfTheFileSaysSo(OfTheFile):
    def fused(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def test_a_constant_of_the_file_chooses_a_path() -> None:
    assert check(OfTheFile, 24, 3)["paths"].severity == "passed"
    verdict = check(SeesAllIfTheFileSaysSo, 24, 3)
    assert "With USE_FLASH = 1" in verdict["paths"].message
    assert USE_FLASH == 0

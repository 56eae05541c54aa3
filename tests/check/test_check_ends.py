"""What a call takes in and gives back, and gradients that somebody wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headwise.check import check
from headwise.check.files.loading import load
from headwise.check.target.errors import Broken

pytestmark = pytest.mark.usefixtures("imports")


class Attend(torch.autograd.Function):
    """Attention with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        ctx.save_for_backward(q, k, v, weights)
        return weights @ v

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return Attend.slopes(ctx, grads[0], 1.0)

    @staticmethod
    def slopes(ctx: Any, grad: Tensor, share: float) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, weights = ctx.saved_tensors
        of_weights = grad @ v.mT
        inner = share * (of_weights * weights).sum(-1, keepdim=True)
        of_scores = weights * (of_weights - inner) / q.shape[-1] ** 0.5
        return of_scores @ k, of_scores.mT @ q, weights.mT @ grad


class AttendWrong(Attend):
    """The same, whose softmax has no sum in its gradient."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return Attend.slopes(ctx, grads[0], 0.0)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return Attend.apply(q, k, v)


def attend_wrong(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return AttendWrong.apply(q, k, v)


def test_a_backward_of_somebody_s_own_is_held_against_its_forward() -> None:
    verdict = check(attend)
    assert verdict.passed, str(verdict)
    one = check(attend_wrong).errors[0]
    assert one.rule == "gradients"
    assert "The backward of AttendWrong gives wrong gradients" in one.message


HEAD = """
import torch
from torch import nn


class Layer(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.heads = num_heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def split(self, x):
        b, t, e = x.shape
        return self.qkv(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)

"""

NO_RETURN = """
    def forward(self, x):
        q, k, v = self.split(x)
        weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        x = self.out((weights @ v).transpose(1, 2).flatten(2))
"""

BESIDE = """
    def forward(self, x, key_padding_mask):
        q, k, v = self.split(x)
        scores = q @ k.mT / q.shape[-1] ** 0.5
        scores = scores.masked_fill(padding_mask[:1, None, None, : x.shape[1]], -torch.inf)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


padding_mask = torch.zeros(1, 50) == 1
"""

ALONE = """
    def forward(self, x):
        q, k, v = self.split(x)
        attn = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        y = torch.einsum("bhqk,bhkd->bhkd", attn, v)
        return self.out(y.transpose(1, 2).flatten(2))
"""

APART = """
    def forward(self, x):
        q, k, v = self.split(x)
        attn = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        y = torch.einsum("bhqk,bhvd->bhqd", [attn, v])
        return self.out(y.transpose(1, 2).flatten(2))
"""


@pytest.mark.parametrize(
    ("wrong", "rule", "said", "mended"),
    [
        (
            NO_RETURN,
            "shape",
            "without a `return`",
            ("        x = self.out", "        return self.out"),
        ),
        (BESIDE, "mask", "is read in its place", ("padding_mask[:1", "key_padding_mask[:")),
        (ALONE, "definition", "sums q of attn", ("->bhkd", "->bhqd")),
        (APART, "definition", "each by itself", ("bhvd", "bhkd")),
    ],
    ids=["no return", "a mask beside", "weights alone", "sums apart"],
)
def test_lines_are_read(
    wrong: str, rule: str, said: str, mended: tuple[str, str], tmp_path: Path
) -> None:
    def verdict(body: str, name: str) -> Any:
        path = tmp_path / f"{name}.py"
        path.write_text(HEAD + body, "utf-8")
        return check(load(path).Layer, dim=24, num_heads=3)

    one = verdict(wrong, "wrong").errors[0]
    assert (one.rule, said in one.message) == (rule, True), one.message
    right = verdict(wrong.replace(*mended), "mended")
    assert right.passed, str(right)


class Looks(nn.Module):
    """Causal by its mask, and its values hold their neighbours."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q, self.k, self.out = (nn.Linear(dim, dim) for _ in range(3))
        self.v = nn.Conv1d(dim, dim, 3, padding=1)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        v = self.v(value.mT).mT
        parts = (self.q(query), self.k(key), v)
        q, k, v = (one.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for one in parts)
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(mask, -torch.inf)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def test_what_shows_in_a_beginning_alone_is_a_leak() -> None:
    assert [one.rule for one in check(Looks, 24, 3).errors] == ["causality"]


class Slots(nn.Module):
    """Queries that are drawn where nobody gives their noise, and compete for the tokens."""

    def __init__(self, dim: int, slots: int = 5) -> None:
        super().__init__()
        self.slots = slots
        self.q, self.k, self.v = (nn.Linear(dim, dim) for _ in range(3))

    def forward(self, x: Tensor, noise: Tensor | None = None) -> Tensor:
        if noise is None:
            noise = torch.randn(len(x), self.slots, x.shape[-1]).to(x)
        weights = (self.q(noise) @ self.k(x).mT / x.shape[-1] ** 0.5).softmax(-1)
        return weights @ self.v(x)


def test_what_is_drawn_by_an_argument_is_no_mistake() -> None:
    verdict = check(Slots, 24)
    assert verdict.passed, str(verdict)
    assert "It draws numbers where noise is not given" in str(verdict)


def test_a_library_that_cannot_be_imported_is_named(tmp_path: Path) -> None:
    home = tmp_path / "site-packages"
    home.mkdir()
    (home / "half_there.py").write_text("raise RuntimeError('no such operator')\n", "utf-8")
    path = tmp_path / "layer.py"
    path.write_text(f"import sys\nsys.path.append({str(home)!r})\nimport half_there\n", "utf-8")
    with pytest.raises(Broken) as raised:
        load(path)
    assert "It is half_there that fails, not this file" in raised.value.finding.hint


NO_NAME = """
    def forward(self, x, mask=None):
        q, k, v = self.split(x)
        scores = q @ k.mT / q.shape[-1] ** 0.5
        if mask is not None:
            attn = attn.masked_fill(mask == 0, -torch.inf)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
"""

DROPPED_ROWS = """
    def forward(self, x, mask=None):
        q, k, v = self.split(x)
        scores = q @ k.mT / q.shape[-1] ** 0.5
        if mask is not None:
            both = mask[:, None, :, None] & mask[:, None, None, :]
            scores = scores + torch.zeros_like(scores).masked_fill(~both, -torch.inf)
            weights = scores.softmax(-1).nan_to_num(0.0)
        else:
            weights = scores.softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))
"""

HANDED_UP = """
class Other(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__(dim, num_heads)
        self.out = nn.Linear(dim, dim)

    def forward(self, x):
        return self.out((x @ x.mT / x.shape[-1] ** 0.5).softmax(-1) @ x)
"""


@pytest.mark.parametrize(
    ("wrong", "rule", "said"),
    [
        (NO_NAME, ("runs", "mask"), "attn"),
        (DROPPED_ROWS, ("mask", "padding"), "gradients are NaN"),
    ],
    ids=["a name that is not set", "rows that are hidden"],
)
def test_masks_that_go_wrong_beside_the_output(
    wrong: str, rule: tuple[str, str], said: str, tmp_path: Path
) -> None:
    path = tmp_path / "masked.py"
    path.write_text(HEAD + wrong, "utf-8")
    one = check(load(path).Layer, dim=24, num_heads=3).errors[0]
    assert one.rule in rule
    assert said in one.message


def test_arguments_that_go_to_module_itself(tmp_path: Path) -> None:
    path = tmp_path / "handed_up.py"
    path.write_text("import torch\nfrom torch import nn\n" + HANDED_UP, "utf-8")
    one = check(load(path).Other, dim=24, num_heads=3).errors[0]
    assert one.rule == "builds"
    assert "hands arguments on to nn.Module" in one.message

"""`headwise check --step gpt2` where MAX is installed: every part is run, in one compiled graph."""

from pathlib import Path

import pytest

from headwise.check.steps import check_step
from headwise.check.steps.base import template
from headwise.check.verdict import Verdict
from headwise.systems import max_gpt2

FILLED = {
    "    # Tensor.constant, F.broadcast_to and F.band_part are useful here.\n    return None": (
        '    hidden = Tensor.constant(float("-inf"), dtype=dtype, device=device)\n'
        "    hidden = F.broadcast_to(hidden, shape=(sequence_length, keys))\n"
        "    return F.band_part(hidden, num_lower=None, num_upper=0, exclude=True)"
    ),
    "self.c_attn = None": "self.c_attn = Linear(self.embed_dim, 3 * self.embed_dim)",
    "self.c_proj = None": "self.c_proj = Linear(self.embed_dim, self.embed_dim)",
    'to [B, H, T, D]."""\n        return None': (
        'to [B, H, T, D]."""\n'
        "        parts = [*tensor.shape[:-1], num_heads, attn_head_size]\n"
        "        return tensor.reshape(parts).transpose(-3, -2)"
    ),
    '[B, H, T, D] to [B, T, E]."""\n        return None': (
        '[B, H, T, D] to [B, T, E]."""\n'
        "        tensor = tensor.transpose(-3, -2)\n"
        "        return tensor.reshape([*tensor.shape[:-2], num_heads * attn_head_size])"
    ),
    "scores = None": "scores = query @ key.transpose(-1, -2) / math.sqrt(self.head_dim)",
    "weights = None": (
        "mask = causal_mask(query.shape[-2], 0, dtype=query.dtype, device=query.device)\n"
        "        weights = F.softmax(scores + mask)"
    ),
    "query, key, value = None, None, None": (
        "parts = F.split(self.c_attn(hidden_states), [self.split_size] * 3, axis=-1)\n"
        "        query, key, value = (\n"
        "            self._split_heads(part, self.num_heads, self.head_dim) for part in parts\n"
        "        )"
    ),
    "heads = None": "heads = self._attn(query, key, value)",
    "project.\n        return None": (
        "project.\n        return self.c_proj("
        "self._merge_heads(heads, self.num_heads, self.head_dim))"
    ),
}


def followed(tmp_path: Path, *changes: tuple[str, str]) -> Verdict:
    text = template("gpt2-max")
    for old, new in (*FILLED.items(), *changes):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path = tmp_path / "mine.py"
    path.write_text(text)
    return check_step("gpt2", str(path))


def test_the_ladders_rung_passes() -> None:
    verdict = check_step("gpt2", max_gpt2.__file__)
    assert not verdict.findings, str(verdict)
    assert "[2, 3, 7, 8]" in verdict["step-split"].message
    assert verdict["definition"].severity == "passed"


def test_a_filled_template_passes(tmp_path: Path) -> None:
    verdict = followed(tmp_path)
    assert not verdict.findings, str(verdict)
    assert verdict["definition"].severity == "passed"


@pytest.mark.parametrize(
    ("old", "new", "rule"),
    [
        (" / math.sqrt(self.head_dim)", "", "step-attention"),
        ("num_upper=0, exclude=True", "num_upper=1, exclude=True", "step-mask"),
    ],
)
def test_a_wrong_part_is_named(old: str, new: str, rule: str, tmp_path: Path) -> None:
    verdict = followed(tmp_path, (old, new))
    assert [one.rule for one in verdict.errors] == [rule], str(verdict)


def test_parts_run_while_others_are_blank(tmp_path: Path) -> None:
    blank = ("self.c_proj = Linear(self.embed_dim, self.embed_dim)", "self.c_proj = None")
    verdict = followed(tmp_path, blank)
    assert [one.rule for one in verdict.errors] == ["step-blanks"]
    assert verdict["step-attention"].severity == "passed"
    with pytest.raises(KeyError):
        verdict["step-forward"]  # which uses what is blank

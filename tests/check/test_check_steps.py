"""Step mode: one blank at a time, the line at fault in the first finding, the ladder passes."""

from __future__ import annotations

import difflib
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import fresh
from headwise.check.files import judged
from headwise.check.sandbox import Limits, Outcome
from headwise.check.steps import STEPS, _child, check_step
from headwise.check.steps.base import template
from headwise.check.syntax import ParsedFile
from headwise.check.verdict import Verdict
from headwise.cli import main

SYSTEMS = Path(__file__).parents[2] / "src" / "headwise" / "systems"
SOLUTIONS = {
    "scalar": "scalar.py",
    "per_head": "per_head.py",
    "split": "split.py",
    "gpt2": "fused.py",
    "gpt2-max": "max_gpt2.py",
}

# What a learner writes in the place of each blank, by the line that has it.
QKV_SPLIT = "self.W_{0}(x).view(B, T, self.num_heads, self.head_dim).transpose(1, 2)"
MASK = (
    '        self.register_buffer("mask", torch.triu(torch.ones(context_length, context_length), '
    "1), persistent=False)"
)
LINEARS = {
    f"        self.W_{name} = None": f"        self.W_{name} = "
    "nn.Linear(d_in, d_out, bias=qkv_bias)"
    for name in ("query", "key", "value")
}
MODULE_LIST = (
    "nn.ModuleList(CausalAttention(d_in, d_out, context_length, dropout, qkv_bias) "
    "for _ in range(num_heads))"
)
FILLED: dict[str, dict[str, str]] = {
    "gpt2": {
        'length].\n    """\n    return None': 'length].\n    """\n'
        "    mask = torch.full((sequence_length, num_tokens + sequence_length), -torch.inf)\n"
        "    return mask.to(device, dtype).triu(num_tokens + 1)",
        "self.c_attn = None": "self.c_attn = nn.Linear(self.embed_dim, 3 * self.embed_dim)",
        "self.c_proj = None": "self.c_proj = nn.Linear(self.embed_dim, self.embed_dim)",
        'to [B, H, T, D]."""\n        return None': 'to [B, H, T, D]."""\n'
        "        tensor = tensor.view(*tensor.shape[:-1], num_heads, attn_head_size)\n"
        "        return tensor.transpose(-3, -2)",
        '[B, H, T, D] to [B, T, E]."""\n        return None': '[B, H, T, D] to [B, T, E]."""\n'
        "        tensor = tensor.transpose(-3, -2)\n"
        "        return tensor.reshape(*tensor.shape[:-2], num_heads * attn_head_size)",
        "scores = None": "scores = query @ key.transpose(-1, -2) / key.shape[-1] ** 0.5",
        "weights = None": "mask = causal_mask(query.shape[-2], 0, dtype=query.dtype, "
        "device=query.device)\n        weights = torch.softmax(scores + mask, dim=-1)",
        "query, key, value = None, None, None": "parts = self.c_attn(hidden_states)"
        ".split(self.split_size, dim=-1)\n        query, key, value = (self._split_heads(part, "
        "self.num_heads, self.head_dim) for part in parts)",
        "heads = None": "heads = self._attn(query, key, value)",
        "project.\n        return None": "project.\n        return self.c_proj("
        "self._merge_heads(heads, self.num_heads, self.head_dim))",
    },
    "per_head": {
        **LINEARS,
        "        self.dropout = None": "        self.dropout = nn.Dropout(dropout)",
        "        self.mask = None": MASK,
        "queries = None": "queries = self.W_query(x)",
        "keys = None": "keys = self.W_key(x)",
        "values = None": "values = self.W_value(x)",
        "scores = None": "scores = queries @ keys.transpose(1, 2)",
        "weights = None\n        return None": "T = x.shape[1]\n"
        "        scores = scores.masked_fill(self.mask.bool()[:T, :T], -torch.inf)\n"
        "        weights = torch.softmax(scores / keys.shape[-1] ** 0.5, dim=-1)\n"
        "        return self.dropout(weights) @ values",
        "self.heads = None": f"self.heads = {MODULE_LIST}",
        'num_heads * d_out]."""\n        return None': 'num_heads * d_out]."""\n'
        "        return torch.cat([head(x) for head in self.heads], dim=-1)",
    },
    "split": {
        **LINEARS,
        "        self.out_proj = None": "        self.out_proj = nn.Linear(d_out, d_out)",
        "        self.dropout = None": "        self.dropout = nn.Dropout(dropout)",
        "        self.mask = None": MASK,
        "queries = None": f"queries = {QKV_SPLIT.format('query')}",
        "keys = None": f"keys = {QKV_SPLIT.format('key')}",
        "values = None": f"values = {QKV_SPLIT.format('value')}",
        "scores = None": "scores = queries @ keys.transpose(2, 3)",
        "weights = None": "scores = scores.masked_fill(self.mask.bool()[:T, :T], -torch.inf)\n"
        "        weights = torch.softmax(scores / keys.shape[-1] ** 0.5, dim=-1)",
        "context = None": "context = (self.dropout(weights) @ values).transpose(1, 2)"
        ".reshape(B, T, self.d_out)",
    },
    "scalar": {
        'weight."""\n    return None': 'weight."""\n    return [dot(row, x) for row in weight]',
        "exps = None\n    return None": "top = max(score.data for score in scores)\n"
        "    exps = [(score - top).exp() for score in scores]\n"
        "    total = sum(exps, Value(0.0))\n    return [e / total for e in exps]",
        "query = None": "query = linear(x, wq)",
        "key = None": "key = linear(x, wk)\n    keys.append(key)",
        "value = None": "value = linear(x, wv)\n    values.append(value)",
        "scores = None": "scores = [dot(query[hs : hs + head_dim], key[hs : hs + head_dim]) "
        "* head_dim**-0.5 for key in keys]",
        "shares = None": "shares = softmax(scores)",
        "out = None": "out = [dot(shares, [value[d] for value in values]) "
        "for d in range(hs, hs + head_dim)]",
    },
}


def filled(name: str, *changes: tuple[str, str], only: tuple[str, ...] | None = None) -> str:
    """A template with its blanks filled, all or `only` these, and then changed."""
    text = template(name)
    for blank, code in FILLED[name].items():
        if only is None or blank.strip() in only:
            assert text.count(blank) == 1, blank
            text = text.replace(blank, code)
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    return text


Follow = Callable[..., Verdict]


@pytest.fixture
def follow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Follow]:
    """Follow a step as the sandbox does, in this process, on files that do no harm."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)

    def run(name: str, text: str, level: int = 1) -> Verdict:
        path = tmp_path / f"attempt{len(list(tmp_path.iterdir()))}.py"
        path.write_text(text)
        messages: list[Any] = []
        _child(messages.append, str(path), name, level)
        json.dumps(messages)
        return judged(Outcome(messages), path, Limits())

    yield run
    for name in set(sys.modules) - before:
        if name.startswith(("attempt", "earlier")):
            del sys.modules[name]


def line_told(verdict: Verdict) -> int:
    """The first line that the first finding names."""
    first = verdict.findings[0]
    found = re.search(r"\b[Ll]ine (\d+)", f"{first.message} {first.hint}")
    assert found, str(verdict)
    return int(found[1])


def changed(right: str, wrong: str) -> set[int]:
    """The lines of a text that differ from a right one; of a deletion, those around it."""
    lines = [text.splitlines() for text in (right, wrong)]
    blocks = difflib.SequenceMatcher(None, *lines, autojunk=False).get_opcodes()
    spans = (range(a, b) if b > a else (a - 1, a) for tag, _, _, a, b in blocks if tag != "equal")
    return {n + 1 for span in spans for n in span}


# --- the templates --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STEPS)
def test_every_blank_of_a_template_is_found_and_told_one_at_a_time(
    name: str, follow: Follow
) -> None:
    text = template(name)
    source = ParsedFile(text)
    blanks = [blank for part in STEPS[name].parts for blank in source.blanks(part.name)]
    nones = {
        number
        for number, line in enumerate(text.splitlines(), 1)
        if re.search(r"(= |return )None", line.partition("#")[0]) and "def " not in line
    }
    assert {blank.line for blank in blanks} == nones
    for level in (1, 2, 3):
        verdict = follow(name, text, level)
        (only,) = verdict.errors
        assert only.rule == "step-blanks"
        assert line_told(verdict) == min(nones)
        assert f"{len(nones)} blanks are left" in only.message
        assert only.hint
        assert ("--hint" in str(verdict)) == (level < 3)
        assert "Traceback" not in str(verdict)


@pytest.mark.parametrize("name", FILLED)
def test_the_hints_say_what_then_how_and_then_show_the_line(name: str) -> None:
    source = ParsedFile(template(name))
    for part in STEPS[name].parts:
        for blank in (one for one in source.blanks(part.name) if part.fill[one.key]):
            what, how, line = (part.hint(blank.key, level) for level in (1, 2, 3))
            assert len({what, how, line}) == 3, (part.name, blank.key)
            assert line.startswith("Write")
            assert "`" not in what or "(" not in what  # no code yet


@pytest.mark.parametrize("name", FILLED)
def test_a_file_written_by_the_third_hints_is_right(name: str, follow: Follow) -> None:
    lines, source = template(name).splitlines(), ParsedFile(template(name))
    parts = {part.name: part for part in STEPS[name].parts}
    blanks = [(blank, part) for part in parts.values() for blank in source.blanks(part.name)]
    met = set[int]()
    for blank, part in blanks:
        text = part.hint(blank.key, 3).removeprefix("Write:").removeprefix("Write `")
        indent = re.match(" *", lines[blank.line - 1])[0]  # type: ignore[index]
        code = [one.strip(" ") for one in text.removesuffix("`.").strip().splitlines()]
        whole = textwrap.dedent(text.removesuffix("`.").lstrip("\n")) or "\n".join(code)
        if blank.line not in met:
            lines[blank.line - 1] = textwrap.indent(whole, indent)
        met.add(blank.line)
    verdict = follow(name, "\n".join(lines))
    assert not verdict.findings, str(verdict)


@pytest.mark.parametrize("name", FILLED)
def test_a_filled_template_is_right(name: str, follow: Follow) -> None:
    verdict = follow(name, filled(name))
    assert not verdict.findings, str(verdict)
    rules = {one.rule for one in verdict.results}
    assert {part.rule for part in STEPS[name].parts} <= rules
    assert "step-whole" in rules or "definition" in rules


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("name", SOLUTIONS)
def test_the_ladders_solutions_pass(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    step = "gpt2" if name == "gpt2-max" else name
    code = main(["check", "--step", step, str(SYSTEMS / SOLUTIONS[name]), "--json"])
    data = json.loads(capsys.readouterr().out)
    assert (code, data["passed"]) == (0, True), data["findings"]
    assert {one["rule"] for one in data["findings"]} <= {"buffer"}
    if name == "gpt2-max":
        assert "step gpt2-max" in data["subject"]


# --- half-filled ----------------------------------------------------------------------------------


def test_a_part_can_be_right_while_the_others_are_blank(follow: Follow) -> None:
    split = 'to [B, H, T, D]."""\n        return None'
    verdict = follow("gpt2", filled("gpt2", only=(split,)))
    assert verdict["step-split"].severity == "passed"
    assert "[2, 3, 7, 8]" in verdict["step-split"].message
    assert [one.rule for one in verdict.errors] == ["step-blanks"]
    assert "everything written so far is correct" in verdict["step-whole"].message


@pytest.mark.parametrize("name", FILLED)
def test_right_lines_are_never_blamed_for_blanks_around_them(name: str, follow: Follow) -> None:
    text = template(name)
    blanks = sorted((blank.strip() for blank in FILLED[name]), key=text.index)
    halves = blanks[:-1], blanks[: len(blanks) // 2], blanks[1:]
    for only in halves if name != "scalar" else halves[:2]:
        verdict = follow(name, filled(name, only=tuple(only)))
        assert {one.rule for one in verdict.errors} == {"step-blanks"}, str(verdict)


def test_the_first_fault_is_told_and_the_rest_waits(follow: Follow) -> None:
    wrong = filled(
        "gpt2", ("triu(num_tokens + 1)", "triu(num_tokens)"), ("scores + mask", "scores")
    )
    verdict = follow("gpt2", wrong)
    assert [one.rule for one in verdict.errors] == ["step-mask"]
    assert verdict["step-whole"].message == "Skipped until this is fixed."


EARLY = [  # the step, the blanks that are filled, what is wrong in the first of them
    ("per_head", ("self.mask = None",), ("torch.triu", "torch.tril")),
    ("per_head", ("weights = None\n        return None",), ("dim=-1", "dim=1")),
    ("split", ("queries = None",), (").transpose(1, 2)", ")")),
    (
        "split",
        ("queries = None",),
        ("T, self.num_heads, self.head_dim).tr", "self.num_heads, T, self.head_dim).tr"),
    ),
    ("split", ("scores = None",), ("keys.transpose(2, 3)", "keys")),
    ("scalar", ("key = None", "value = None", "scores = None"), ("* head_dim**-0.5 ", "")),
]


@pytest.mark.parametrize(("name", "only", "change"), EARLY)
def test_a_part_is_compared_before_the_last_blank_is_filled(
    name: str, only: tuple[str, ...], change: tuple[str, str], follow: Follow
) -> None:
    right, wrong = filled(name, only=only), filled(name, change, only=only)
    assert {one.rule for one in follow(name, right).errors} == {"step-blanks"}
    assert line_told(follow(name, wrong)) in changed(right, wrong)


NAMES_MISSING = [
    ("from torch import nn\n", "", r"Line \d+ uses `nn`", "from torch import nn"),
    ("import torch\n", "", r"Line \d+ uses `torch`", "import torch"),
    ("nn.Module):", "Module):", r"Line \d+ uses `Module`", "nn.Module"),
    ("self.split_size, dim", "split_size, dim", "uses `split_size`", "mean `self.split_size`?"),
    ("torch.softmax(scores + mask", "torch.softmax(scors + mask", "uses `scors`", "mean `scores`?"),
]


@pytest.mark.parametrize(("old", "new", "message", "hint"), NAMES_MISSING)
def test_names_without_a_meaning_are_told(
    old: str, new: str, message: str, hint: str, follow: Follow
) -> None:
    verdict = follow("gpt2", filled("gpt2").replace(old, new, 1))
    found = verdict["step-imports"]
    assert found.severity == "error"
    assert re.search(message, found.message)
    assert hint in found.hint


@pytest.mark.parametrize(
    ("old", "new", "part"),
    [
        ("def _split_heads", "def split_heads", "_split_heads"),
        ("class GPT2MultiHeadAttention", "class Attention", "GPT2MultiHeadAttention"),
        ("def causal_mask", "def mask_of", "causal_mask"),
        ("        self.c_proj = nn", "        self.proj = nn", "c_proj"),
    ],
)
def test_parts_that_are_not_there_are_named(old: str, new: str, part: str, follow: Follow) -> None:
    verdict = follow("gpt2", filled("gpt2", (old, new)))
    assert f"`{part}` is not defined yet" in verdict["step-parts"].message
    assert "Traceback" not in str(verdict)


def test_parts_may_come_from_elsewhere(follow: Follow, tmp_path: Path) -> None:
    sys.path.insert(0, str(tmp_path))
    whole = filled("gpt2")
    start, end = whole.index("def causal_mask"), whole.index("class GPT2")
    (tmp_path / "earlier_step.py").write_text("import torch\n" + whole[start:end])
    text = whole[:start] + "from earlier_step import causal_mask\n" + whole[end:]
    verdict = follow("gpt2", text)
    assert not verdict.findings, str(verdict)
    moved = whole.index("    def _split_heads"), whole.index("    def _attn")
    (tmp_path / "earlier_heads.py").write_text(
        "from torch import nn\nclass Heads(nn.Module):\n" + whole[slice(*moved)]
    )
    text = "from earlier_heads import Heads\n" + whole[: moved[0]] + whole[moved[1] :]
    verdict = follow("gpt2", text.replace("Attention(nn.Module)", "Attention(Heads)"))
    assert not verdict.findings, str(verdict)
    assert verdict["step-split"].severity == "passed"


def test_call_serves_for_forward(follow: Follow) -> None:
    verdict = follow("gpt2", filled("gpt2", ("def forward(", "def __call__(")))
    assert not [one for one in verdict.errors if one.rule == "step-parts"]
    assert verdict["step-forward"].severity == "passed"


# --- wrong parts ----------------------------------------------------------------------------------

WRONG: dict[str, list[tuple[str, str]]] = {  # what is changed, into what; the line is told
    "gpt2": [
        ("return tensor.transpose(-3, -2)", "return tensor"),
        (
            "tensor = tensor.view(*tensor.shape[:-1], num_heads, attn_head_size)\n        "
            "return tensor.transpose(-3, -2)",
            "return tensor.view(tensor.shape[0], num_heads, -1, attn_head_size)",
        ),
        (
            "num_heads, attn_head_size)\n        return tensor.transpose(-3, -2)",
            "attn_head_size, num_heads)\n        return tensor.permute(0, 3, 1, 2)",
        ),
        ("return tensor.transpose(-3, -2)", "return 2 * tensor.transpose(-3, -2)"),
        (
            "tensor = tensor.transpose(-3, -2)\n        return "
            "tensor.reshape(*tensor.shape[:-2], num_heads * attn_head_size)",
            "return tensor.reshape(tensor.shape[0], -1, num_heads * attn_head_size)",
        ),
        ("return tensor.reshape(*tensor.shape[:-2], num_heads * attn_head_size)", "return tensor"),
        ("triu(num_tokens + 1)", "triu(num_tokens)"),
        ("triu(num_tokens + 1)", "triu(num_tokens + 2)"),
        ("triu(num_tokens + 1)", "tril(num_tokens - 1)"),
        ("triu(num_tokens + 1)", "triu(num_tokens + 1) == 0"),
        ("triu(num_tokens + 1)", "triu(num_tokens + 1)[None]"),
        ("3 * self.embed_dim", "2 * self.embed_dim"),
        (" / key.shape[-1] ** 0.5", ""),
        ("key.shape[-1] ** 0.5", "key.shape[-2] ** 0.5"),
        ("scores + mask", "scores"),
        ("scores + mask, dim=-1", "scores + mask, dim=-2"),
        ("return weights @ value", "return weights"),
        ("query, key, value = (", "key, query, value = ("),
        ("query, key, value = (", "query, value, key = ("),
        ("config.n_head\n", "config.n_heads\n"),
        ("// self.num_heads", "// 2"),
        ("return self.c_proj(", "return ("),
        ("(nn.Module)", ""),
        ("return self.c_proj(", "return hidden_states, self.c_proj("),
        ("embed_dim // self.num_heads", "embed_dim / self.num_heads"),
        ("split_size = self.embed_dim", "split_size = self.head_dim"),
        ("3 * self.embed_dim)", "3 * self.embed_dim, bias=False)"),
        ("_split_heads(self, tensor", "_split_heads(tensor"),
        (" / key.shape[-1] ** 0.5", "\n        scores / key.shape[-1] ** 0.5"),
        ("self._attn(query, key, value)", "self._attn(key, query, value)"),
        ("_merge_heads(heads, self", "_merge_heads(query, self"),
        (
            "return self.c_proj(self._merge",
            "merged = heads\n        return self.c_proj(merged)  # (self._merge",
        ),
        ("scores + mask", "scores * mask"),
        (
            "weights = torch.softmax(scores + mask",
            "scores = scores * mask\n        weights = torch.softmax(scores",
        ),
        (
            "sequence_length, num_tokens + sequence_length), -torch.inf)",
            "num_tokens + sequence_length, num_tokens + sequence_length), -torch.inf)",
        ),
        ("triu(num_tokens + 1)", "triu(1)"),
        ("-torch.inf)\n", "-1e9)\n"),
    ],
    "per_head": [
        (
            "torch.cat([head(x) for head in self.heads], dim=-1)",
            "sum(head(x) for head in self.heads)",
        ),
        (
            "nn.ModuleList(CausalAttention(d_in, d_out, context_length, dropout, qkv_bias) "
            "for _ in range(num_heads))",
            "[CausalAttention(d_in, d_out, context_length, dropout) for _ in range(num_heads)]",
        ),
        (
            "nn.ModuleList(CausalAttention(d_in, d_out, context_length, dropout, qkv_bias) "
            "for _ in range(num_heads))",
            "nn.ModuleList([CausalAttention(d_in, d_out, context_length, dropout)] * num_heads)",
        ),
        ("keys.shape[-1] ** 0.5", "keys.shape[1] ** 0.5"),
        (
            'self.register_buffer("mask", torch.triu(torch.ones(context_length, '
            "context_length), 1), persistent=False)",
            "self.mask = torch.triu(torch.ones(context_length, context_length), 1)",
        ),
        (
            'self.register_buffer("mask", torch.triu(torch.ones(context_length, '
            "context_length), 1), persistent=False)",
            'self.register_buffer("mask", torch.tril(torch.ones(context_length, '
            "context_length), 1), persistent=False)",
        ),
        ("context_length), 1)", "context_length), 0)"),
        ("torch.ones(context_length, context_length)", "torch.ones(d_in, d_in)"),
        (
            'self.register_buffer("mask", torch.triu(torch.ones(context_length, '
            "context_length), 1), persistent=False)",
            "self.mask = nn.Parameter(torch.ones(context_length, context_length).triu(1))",
        ),
        ("d_out, bias=qkv_bias)", "d_out, bias=False)"),
        ("dropout, qkv_bias)", "dropout)"),
        ("nn.Dropout(dropout)", "nn.Dropout()"),
        ("nn.Dropout(dropout)", "dropout"),
        ("= scores.masked_fill", "; scores.masked_fill"),
        (".bool()[:T, :T]", ".bool()"),
        ("keys.transpose(1, 2)", "keys"),
        ("self.heads], dim=-1)", "self.heads], dim=1)"),
        ("self.W_query(x)", "self.W_querry(x)"),
        ("self.W_query(x)", "W_query(x)"),
        ("self.W_key = nn", "W_key = nn"),
        ("W_key = nn.Linear(d_in, d_out", "W_key = nn.Linear(d_out, d_in"),
        ("queries @ keys.transpose(1, 2)", "queries * keys"),
        ("queries @ keys.transpose(1, 2)", "keys @ queries.transpose(1, 2)"),
        ("T = x.shape[1]", "T = x.shape[0]"),
        ("torch.softmax(scores / keys.shape[-1] ** 0.5, dim=-1)", "scores / keys.shape[-1] ** 0.5"),
        (
            "(d_in, d_out, context_length, dropout, qkv_bias) for",
            "(d_in, d_out // num_heads, context_length, dropout, qkv_bias) for",
        ),
        (
            "(d_in, d_out, context_length, dropout, qkv_bias) for",
            "(d_in, d_out, dropout, context_length, qkv_bias) for",
        ),
        ("[head(x) for", "[self.heads[0](x) for"),
        ("queries = self", "x *= 1.1\n        queries = self"),
        ("values = self", "x.mul_(2)\n        values = self"),
        (
            "return self.dropout(weights) @ values",
            "weights = self.dropout(scores)\n        return weights @ values",
        ),
        ("self.W_key(x)", "self.W_key(x),"),
        ("queries = self", "x = queries = self"),
        ("torch.softmax(scores / keys.shape[-1] ** 0.5, dim=-1)", "scores"),
        ("self.dropout(weights)", "nn.Dropout(0.1)(weights)"),
        ("self.W_query = nn", "self.W_querys = nn"),
        (
            "return torch.cat([head(x) for head in self.heads], dim=-1)",
            "outs = []\n        for head in self.heads:\n            outs.append(head(x))\n  "
            "          return torch.cat(outs, dim=-1)",
        ),
    ],
    "split": [
        (
            "self.W_key(x).view(B, T, self.num_heads, self.head_dim).transpose(1, 2)",
            "self.W_key(x).view(B, self.num_heads, T, self.head_dim)",
        ),
        (".transpose(1, 2).reshape(B, T, self.d_out)", ".reshape(B, T, self.d_out)"),
        ("self.out_proj = nn.Linear(d_out, d_out)", "self.out_proj = nn.Linear(d_out, 2 * d_out)"),
        ("/ keys.shape[-1] ** 0.5", "/ self.d_out ** 0.5"),
        ("self.head_dim).transpose(1, 2)", "self.head_dim)"),
        (
            "scores.masked_fill(self.mask.bool()[:T, :T], -torch.inf)",
            "scores + self.mask[:T, :T] * -torch.inf",
        ),
        ("nn.Linear(d_in, d_out,", "nn.Linear(d_in, d_in,"),
        ("(B, T, self.num_heads", "(B, T, num_heads"),
        ("B, T, _ = x", "T, B, _ = x"),
        ("head_dim = d_out // num_heads", "head_dim = d_in // num_heads"),
        (
            "self.W_key(x).view(B, T, self.num_heads, self.head_dim).transpose(1, 2)",
            "self.W_query(x).view(B, T, self.num_heads, self.head_dim).transpose(1, 2)",
        ),
        ("self.dropout(weights)", "self.dropout(self.dropout(weights))"),
        ("@ values)", "@ keys)"),
        (".transpose(1, 2).reshape(B", ".transpose(2, 3).reshape(B"),
        (".reshape(B", ".view(B"),
        (
            "context = (self.dropout(weights) @ values)",
            "context = weights @ values\n        context = self.dropout(context)",
        ),
    ],
    "scalar": [
        ("* head_dim**-0.5 ", ""),
        ("query[hs : hs + head_dim]", "query[:head_dim]"),
        ("    keys.append(key)\n", ""),
        ("return linear(joined, wo)", "return joined"),
        ("(score - top).exp()", "score.exp()"),
        ("e / total for e in exps", "e for e in exps"),
        ("dot(row, x) for row in weight", "dot(row, x) + 1 for row in weight"),
        ("query = linear(x, wq)", "query = linear(x, wk)"),
        ("(score - top).exp()", "Value((score - top).exp().data)"),
        ("[dot(row, x) for row in weight]", "dot(weight[0], x)"),
        ("hs + head_dim)]\n        joined", "hs + 3)]\n        joined"),
        ("joined += out", "joined = out"),
        ("in keys]", "in keys[:-1]]"),
        ("dot(query[", "dot(quary["),
        (
            "return [dot(row, x) for row in weight]",
            "out = []\n    for row in weight:\n        out.append(dot(row, x))\n        return out",
        ),
        ("total = sum(exps", "total = sum(scores"),
        ("exps = [(score - top).exp()", "exps = [(score - top)"),
        ("exps = [(score - top).exp()", "exps = [(score - top).exp"),
        ("top = max(", "top = min("),
        ("key = linear(x, wk)", "key = linear(query, wk)"),
        ("query = linear(x, wq)", "query = linear(wq, x)"),
        ("values.append(value)", "values.append(key)"),
        ("* head_dim**-0.5 for", "* n_head**-0.5 for"),
        (
            "dot(query[hs : hs + head_dim], key[hs : hs + head_dim]) ",
            "dot(query[h : h + head_dim], key[h : h + head_dim]) ",
        ),
        ("hs = h * head_dim", "hs = h * n_head"),
        ("len(x) // n_head", "len(x) / n_head"),
        ("for value in values]", "for value in keys]"),
        ("shares, [value[d]", "shares, [query[d]"),
        ("joined = []\n    for h in range(n_head):", "FOR\n        joined = []"),
        ("joined += out", "joined = out + joined"),
        ("(joined, wo)", "(joined, wv)"),
        (
            "scores = [dot(query[hs : hs + head_dim]",
            "part = query[hs : hs + 3]\n        scores = [dot(part",
        ),
    ],
}


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        pytest.param(name, *row, id=f"{name}-{number}")
        for name, rows in WRONG.items()
        for number, row in enumerate(rows)
    ],
)
def test_the_first_finding_names_the_line_at_fault(
    name: str, old: str, new: str, follow: Follow
) -> None:
    right, wrong = filled(name), filled(name, (old, new))
    verdict = follow(name, wrong)
    assert verdict.findings
    assert line_told(verdict) in changed(right, wrong), str(verdict)
    assert "That is headwise's fault" not in str(verdict)


CURES = [
    ("per_head", "        super().__init__()\n", "", "Begin `__init__` with `super().__init__()`"),
    ("split", ".reshape(B", ".view(B", "write `.reshape(…)`"),
    ("per_head", "self.W_key(x)", "self.W_key(x),", "a tuple"),
    ("per_head", "self.W_query(x)", "self.W_querry(x)", "Did you mean `W_query`?"),
    ("gpt2", " / key.shape[-1] ** 0.5", "", "each is 2.828 times the correct value"),
    ("gpt2", "key, value = (self", "value, key = (self", "` should hold"),
    ("scalar", "(score - top).exp()", "(score.data - top)", "no gradient passes"),
]


@pytest.mark.parametrize(("name", "old", "new", "words"), CURES)
def test_what_differs_and_what_to_do_about_it_is_told(
    name: str, old: str, new: str, words: str, follow: Follow
) -> None:
    first = follow(name, filled(name, (old, new))).findings[0]
    assert words in f"{first.message} {first.hint}"


def test_other_ways_to_write_a_step_are_right(follow: Follow) -> None:
    by_number = filled(
        "scalar",
        (
            "query = linear(x, wq)",
            "query = [q * (len(x) // n_head) ** -0.5 for q in linear(x, wq)]",
        ),
        (
            FILLED["scalar"]["scores = None"],
            "scores = [0.0] * len(keys)\n        for t in range(len(keys)):\n            "
            "for d in range(hs, hs + head_dim):\n                "
            "scores[t] = query[d] * keys[t][d] + scores[t]",
        ),
    )
    verdict = follow("scalar", by_number)
    assert not verdict.findings, str(verdict)
    wrong = by_number.replace("keys[t][d]", "keys[t][d - hs]")
    assert "`scores[t] = query[d] * keys[t][d - hs]" in str(follow("scalar", wrong).errors[0])


def test_a_mask_for_the_start_is_only_a_warning(follow: Follow) -> None:
    verdict = follow("gpt2", filled("gpt2", ("triu(num_tokens + 1)", "triu(1)")))
    assert verdict.passed
    assert [one.rule for one in verdict.warnings] == ["step-mask"]
    assert "has no effect in this step" in verdict.warnings[0].hint
    verdict = follow("gpt2", filled("gpt2", ("-torch.inf)\n", "-1e9)\n")))
    assert verdict.passed
    assert "instead of -inf" in str(verdict["step-mask"])


def test_text_decides_nothing(follow: Follow) -> None:
    """Comments, strings and other ways to write the same change no verdict."""
    text = filled(
        "gpt2",
        ("        self.c_attn", "        # self.c_attn = None\n        self.c_attn"),
        (
            "tensor.transpose(-3, -2)\n\n    def _merge",
            "tensor.permute(0, 2, 1, 3)\n\n    def _merge",
        ),
        (
            "tensor.reshape(*tensor.shape[:-2], num_heads * attn_head_size)",
            "tensor.flatten(-2)",
        ),
        ("key.transpose(-1, -2)", "key.mT"),
        ("torch.softmax(scores + mask, dim=-1)", "(scores + mask).softmax(-1)"),
        ("self.c_attn(hidden_states)", "self.c_attn.forward(hidden_states)"),
    )
    verdict = follow("gpt2", text)
    assert not verdict.findings, str(verdict)
    hidden = filled(
        "gpt2", ("return tensor.transpose(-3, -2)", "return tensor  # transpose(-3, -2)")
    )
    assert follow("gpt2", hidden).errors[0].rule == "step-split"


# --- MAX ------------------------------------------------------------------------------------------

WITHOUT_MAX = """
import sys, json
from importlib.machinery import PathFinder
real = PathFinder.find_spec
PathFinder.find_spec = classmethod(
    lambda kind, name, *rest: None if name.split(".")[0] == "max" else real(name, *rest)
)
from headwise.check.steps import _child
_child(lambda message: print(json.dumps(message)), sys.argv[1], "gpt2")
"""


def test_without_max_the_step_says_so_and_reads_the_syntax(tmp_path: Path) -> None:
    path = tmp_path / "attempt.py"
    text = template("gpt2-max").replace("self.c_proj = None", "self.c_proj = Linear(1, 1)")
    for blank in ("query, key, value = None, None, None", "heads = None"):
        text = text.replace(blank, "query = key = value = heads = self.c_attn(hidden_states)")
    path.write_text(text.replace("project.\n        return None", "project.\n        return heads"))
    done = fresh.run(WITHOUT_MAX, str(path))
    assert done.returncode == 0, done.stderr
    messages = [json.loads(line) for line in done.stdout.splitlines()]
    verdict = judged(Outcome(messages), path, Limits())
    assert "step gpt2-max, by its syntax alone" in verdict.subject
    assert "Modular MAX is not installed" in verdict["step-whole"].message
    (only,) = verdict.errors
    assert "`causal_mask` still returns None (6 blanks are left)" in only.message


# --- the command ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STEPS)
def test_new_writes_a_template_once(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.py"
    assert main(["check", "--new", name, str(path)]) == 0
    assert f"headwise check --step {name} {path}" in capsys.readouterr().out
    assert path.read_text() == template(name)
    path.write_text("mine")
    assert main(["check", "--new", name, str(path)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert path.read_text() == "mine"


@pytest.mark.usefixtures("forked")
def test_a_step_in_a_file_that_hangs_keeps_what_was_found(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        template("gpt2").replace("self.head_dim = ", "while True: pass\n        self.head_dim = ")
    )
    verdict = check_step("gpt2", str(path), Limits(seconds=2.0))
    assert verdict.errors[0].rule == "file-time"
    assert re.search(
        r"while `GPT2MultiHeadAttention` was tested, at line \d+ in `__init__`: `while",
        verdict.errors[0].message,
    )
    assert verdict["step-imports"].severity == "passed"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--step", "gpt3", "mine.py"],
            "did you mean gpt2? The steps are scalar, per_head, split, gpt2, gpt2-max",
        ),
        (["--new", "gpt3", "mine.py"], "there is no such step"),
        (["--new", "gpt2", "mine.txt"], "ends in .py"),
        (["--new", "gpt2", "gone/mine.py"], "there is no folder"),
        (["--step", "gpt2", "gone.py"], "gone.py: no such file"),
        (["--step", "gpt2"], "no file was given, as in: headwise check --step gpt2 mine.py"),
        (["--step", "per-head", "here.py"], "did you mean per_head?"),
        (["here.py", "--stp", "gpt2"], "did you mean --step?"),
        (["--step", "gpt2", "--new", "gpt2", "mine.py"], "give only one of them"),
        (["--step", "gpt2", "here.py", "--d_in", "3"], "leave out d_in"),
        (["--step", "gpt2", "here.py:Name"], "omit :Name"),
        (["--step", "gpt2", "here.py", "--hint", "4"], "--hint 4: the levels are 1, 2 and 3"),
        (["here.py", "--hint", "2"], "--hint 2: needs --step"),
        (
            ["--step", "here.py"],
            "is a file, not a step; the steps are scalar, per_head, split, gpt2",
        ),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("here.py").write_text("")
    assert main(["check", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert message in err


@pytest.mark.usefixtures("forked")
def test_a_steps_file_is_followed_by_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["check", "--new", "per_head", "mine.py"]) == 0
    assert main(["check", "mine.py"]) == 2
    assert "or check its step: headwise check --step per_head mine.py" in capsys.readouterr().err
    assert main(["check", "--step", "split", "mine.py"]) == 1
    said = capsys.readouterr().out
    assert "This looks like a file for `--step per_head`." in said
    assert "No placeholder is left" not in said
    assert main(["check", "--step", "mine.py"]) == 2
    assert "for this file: headwise check --step per_head mine.py" in capsys.readouterr().err
    assert main(["check", "--explain", "Scale"]) == 0
    assert capsys.readouterr().out.startswith("scale: ")
    assert main(["check", "--explain", "rules"]) == 0
    assert "step-mask: The mask hides later keys" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("option", "listed"),
    [
        ("--new", "  per_head  One module per head"),
        ("--step", "  scalar    Attention in plain Python"),
        ("--explain", "  step-mask          The mask hides later keys"),
    ],
)
def test_an_option_alone_lists_what_it_takes(
    option: str, listed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", option]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(
        f"headwise: {option}: give one of these values, as in: headwise check {option} "
    )
    assert listed in err


def test_a_file_in_another_encoding_says_where_and_what_to_do(
    follow: Follow, tmp_path: Path
) -> None:
    path, messages = tmp_path / "mine.py", []
    path.write_bytes("x = 1\n# caf\xe9\n".encode("latin-1"))
    _child(messages.append, str(path), "gpt2")
    first = judged(Outcome(messages), path, Limits()).errors[0]
    assert "not UTF-8 text (line 2: byte 0xe9)" in first.message
    assert "Save it as UTF-8" in first.hint


# --- the syntax -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ("pass", ["`f` has no body yet"]),
        ("'''Says what.'''", ["`f` has no body yet"]),
        ("...", ["`f` has no body yet"]),
        ("raise NotImplementedError('later')", ["`f` has no body yet"]),
        ("return None", ["`f` still returns None"]),
        ("return", ["`f` still returns None"]),
        ("a = None; return x @ a", ["`a` is still None"]),
        ("a, b = None, None; return a @ b", ["`a` is still None", "`b` is still None"]),
        ("a = b = None; return a @ b", ["`a` is still None", "`b` is still None"]),
        ("a: int = None; return a", ["`a` is still None"]),
        ("a = None; a = a * 2; return a", ["`a` is still None"]),
        ("x @ x", ["`f` returns nothing"]),
        ("return x", []),
        ("a = None\n    for a in x: pass\n    return a", []),
        ("a = None\n    if x: a = x\n    return a", []),
        ("a, b = None, x; return a", ["`a` is still None"]),
        ("a, b = x; return a", []),
        ("if x is None: return None\n    return x", []),
        ("def g(): return None\n    return g", []),
        ("yield x", []),
        ("raise ValueError('no')", ["`f` returns nothing"]),
    ],
)
def test_blanks_of_functions(body: str, found: list[str]) -> None:
    assert [blank.text for blank in ParsedFile(f"def f(x):\n    {body}\n").blanks("f")] == found


@pytest.mark.parametrize(
    ("line", "is_blank"),
    [
        ("self.a = None", True),
        ("self.a: int = None", True),
        ("self.a, self.b = None, 1", True),
        ("self.register_buffer('a', None)", True),
        ("self.a = 1", False),
        ("self.a = None; self.a = 1", False),
        ("self.register_buffer('a', x)", False),
        ("self.a = None if x else 1", False),
    ],
)
def test_blanks_of_attributes(line: str, is_blank: bool) -> None:
    text = f"class Base:\n    def __init__(self, x):\n        {line}\nclass A(Base): pass\n"
    for part in ("Base.a", "A.a"):
        assert bool(ParsedFile(text).blanks(part)) == is_blank
        assert ParsedFile(text).line(part) == 3


UNBOUND: Mapping[str, dict[str, int]] = {
    "x = y": {"y": 1},
    "def f():\n    return g()\ndef g(): pass": {},
    "import a.b\na.b": {},
    "from a import *\nx": {},
    "def f(x=z): return x": {"z": 1},
    "def f():\n    global a\n    a = 1\na": {},
    "[i for i in range(3)]; lambda k: k + j": {"j": 1},
    "class A(B):\n    c = D\n    def f(self): return __class__": {"B": 1, "D": 2},
    "try:\n    import x\nexcept ImportError as e:\n    x = None\nx": {},
    "def f(x: Unknown): pass": {"Unknown": 1},
    "def f(x): return x\ndef g(): return [x for y in z]": {"x": 2, "z": 2},
    "from __future__ import annotations\ndef f(x: Unknown): pass": {},
    "match 1:\n    case n: n": {},
    "if (w := 1): w\nwith open('') as f: f\nprint(__name__, __file__)": {},
}


@pytest.mark.parametrize("text", UNBOUND)
def test_unbound_names(text: str) -> None:
    assert ParsedFile(text).unbound == UNBOUND[text]


def test_nothing_is_unbound_in_files_that_run() -> None:
    for path in sorted(SYSTEMS.parent.rglob("*.py")):
        assert ParsedFile(path.read_text(), str(path)).unbound == {}, path

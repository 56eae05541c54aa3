"""Step mode: half-filled files get hints, wrong parts their mistake's name, the ladder passes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from headwise.check.files import judged
from headwise.check.files.sandbox import Limits, Outcome
from headwise.check.files.syntax import Source
from headwise.check.findings.verdict import Verdict
from headwise.check.steps import STEPS, _child, check_step, template
from headwise.cli import main

SYSTEMS = Path(__file__).parents[2] / "src" / "headwise" / "tutorial" / "implementations"
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

    def run(name: str, text: str) -> Verdict:
        path = tmp_path / f"attempt{len(list(tmp_path.iterdir()))}.py"
        path.write_text(text)
        messages: list[Any] = []
        _child(messages.append, str(path), name)
        json.dumps(messages)
        return judged(Outcome(messages), path, Limits())

    yield run
    for name in set(sys.modules) - before:
        if name.startswith(("attempt", "earlier")):
            del sys.modules[name]


def said(verdict: Verdict) -> str:
    return str(verdict)


# --- the templates --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STEPS)
def test_every_blank_of_a_template_has_its_hint(name: str, follow: Follow) -> None:
    text = template(name)
    source = Source(text)
    blanks = [blank for part in STEPS[name].parts for blank in source.blanks(part.name)]
    nones = {
        number
        for number, line in enumerate(text.splitlines(), 1)
        if re.search(r"(= |return )None", line.partition("#")[0]) and "def " not in line
    }
    assert {blank.line for blank in blanks} == nones
    verdict = follow(name, text)
    found = [one for one in verdict.errors if one.rule == "step-blanks"]
    assert [one.message.split(":")[0] for one in found] == sorted(
        {f"Line {blank.line}" for blank in blanks}, key=lambda line: int(line.split()[1])
    )
    assert all(one.hint for one in found)
    assert {one.rule for one in verdict.errors} == {"step-blanks"}
    assert "Traceback" not in said(verdict)


@pytest.mark.parametrize("name", FILLED)
def test_a_filled_template_is_right(name: str, follow: Follow) -> None:
    verdict = follow(name, filled(name))
    assert not verdict.findings, said(verdict)
    assert not [
        one for one in verdict.results if one.severity == "skipped" and "waits" in one.message
    ]
    rules = {one.rule for one in verdict.results}
    assert {part.rule for part in STEPS[name].parts if part.test} <= rules
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
    assert "(2, 8, 768) to (2, 12, 8, 64)" in verdict["step-split"].message
    assert not verdict.passed
    mask = 'length].\n    """\n    return None'
    verdict = follow("gpt2", filled("gpt2", only=(mask,)))
    assert verdict["step-mask"].severity == "passed"


def test_headwises_code_stands_in_the_blanks_while_the_rest_is_tried(follow: Follow) -> None:
    everything = tuple(blank.strip() for blank in FILLED["gpt2"])
    verdict = follow("gpt2", filled("gpt2", only=everything[1:]))  # all but causal_mask
    assert [one.rule for one in verdict.errors] == ["step-blanks"]
    for rule in ("step-split", "step-merge", "step-attention", "step-forward"):
        assert verdict[rule].severity == "passed"
    assert "is right, as far as it goes" in verdict["step-whole"].message


@pytest.mark.parametrize("name", ["per_head", "split", "gpt2"])
def test_right_lines_are_never_blamed_for_blanks_below_them(name: str, follow: Follow) -> None:
    text = template(name)
    blanks = sorted((blank.strip() for blank in FILLED[name]), key=text.index)
    for left in (1, 2):
        verdict = follow(name, filled(name, only=tuple(blanks[:-left])))
        assert {one.rule for one in verdict.errors} == {"step-blanks"}, str(verdict)


def test_what_uses_a_wrong_part_waits_for_it(follow: Follow) -> None:
    verdict = follow("gpt2", filled("gpt2", ("triu(num_tokens + 1)", "triu(num_tokens)")))
    assert [one.rule for one in verdict.errors] == ["step-mask"]
    assert verdict["step-attention"].message == "`_attn` waits for `causal_mask`."
    assert verdict["step-forward"].message == "`forward` waits for `_attn`."
    verdict = follow("per_head", filled("per_head", ("        super().__init__()\n", "")))
    assert [one.rule for one in verdict.errors] == ["step-sizes"]
    assert "Begin `__init__` with `super().__init__()`" in verdict.errors[0].hint
    waits = [one.message for one in verdict.results if "waits" in one.message]
    assert waits == ["`MultiHeadedAttentionWrapper` waits for `CausalAttention`."]


def test_what_a_helper_uses_is_used(follow: Follow) -> None:
    helped = filled(
        "gpt2",
        (
            "for part in parts)",
            "for part in parts)\n        return query, key, value\n\n    def _x("
            "self, query, key, value):",
        ),
        (
            "def forward(self, hidden_states):",
            "def forward(self, hidden_states):\n        return "
            "self._x(*self._project(hidden_states))\n\n    def _project(self, hidden_states):",
        ),
    )
    assert not follow("gpt2", helped).findings
    wrong = helped.replace("return tensor.transpose(-3, -2)", "return tensor")
    verdict = follow("gpt2", wrong)
    assert [one.rule for one in verdict.errors] == ["step-split"]
    assert verdict["step-forward"].message == "`forward` waits for `_split_heads`."


NAMES_MISSING = [
    ("from torch import nn\n", "", r"Line \d+ uses `nn`", "from torch import nn"),
    ("import torch\n", "", r"Line \d+ uses `torch`", "import torch"),
    ("nn.Module):", "Module):", r"Line \d+ uses `Module`", "nn.Module"),
    (
        "self.split_size, dim",
        "split_size, dim",
        r"uses `split_size`",
        "Did you mean `self.split_size`?",
    ),
]


@pytest.mark.parametrize(("old", "new", "message", "hint"), NAMES_MISSING)
def test_imports_are_read_off_the_syntax(
    old: str, new: str, message: str, hint: str, follow: Follow
) -> None:
    text = filled("gpt2")
    verdict = follow("gpt2", text.replace(old, new, 1))
    found = verdict["step-imports"]
    assert found.severity == "error"
    assert re.search(message, found.message)
    assert hint in found.hint
    assert "nothing can be run before" in said(verdict)


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
    assert f"`{part}` is not there yet" in verdict["step-parts"].message
    assert "Traceback" not in said(verdict)


def test_parts_may_come_from_elsewhere(follow: Follow, tmp_path: Path) -> None:
    sys.path.insert(0, str(tmp_path))
    whole = filled("gpt2")
    start, end = whole.index("def causal_mask"), whole.index("class GPT2")
    (tmp_path / "earlier_step.py").write_text("import torch\n" + whole[start:end])
    text = whole[:start] + "from earlier_step import causal_mask\n" + whole[end:]
    verdict = follow("gpt2", text)
    assert not verdict.findings, said(verdict)
    moved = whole.index("    def _split_heads"), whole.index("    def _attn")
    (tmp_path / "earlier_heads.py").write_text(
        "from torch import nn\nclass Heads(nn.Module):\n" + whole[slice(*moved)]
    )
    text = "from earlier_heads import Heads\n" + whole[: moved[0]] + whole[moved[1] :]
    verdict = follow("gpt2", text.replace("Attention(nn.Module)", "Attention(Heads)"))
    assert not verdict.findings, said(verdict)
    assert verdict["step-split"].severity == "passed"


def test_call_serves_for_forward(follow: Follow) -> None:
    verdict = follow("gpt2", filled("gpt2", ("def forward(", "def __call__(")))
    assert not [one for one in verdict.errors if one.rule == "step-parts"]
    assert verdict["step-forward"].severity == "passed"


# --- wrong parts ----------------------------------------------------------------------------------

WRONG: dict[str, list[tuple[str, str, str, str]]] = {
    "gpt2": [  # what is changed, into what, the rule of the first finding, words of it
        ("return tensor.transpose(-3, -2)", "return tensor", "step-split", "still stand after the"),
        (
            "tensor = tensor.view(*tensor.shape[:-1], num_heads, attn_head_size)\n"
            "        return tensor.transpose(-3, -2)",
            "return tensor.view(tensor.shape[0], num_heads, -1, attn_head_size)",
            "step-split",
            "mixes tokens with features",
        ),
        (
            "num_heads, attn_head_size)\n        return tensor.transpose(-3, -2)",
            "attn_head_size, num_heads)\n        return tensor.permute(0, 3, 1, 2)",
            "step-split",
            "take their features in turns",
        ),
        (
            "return tensor.transpose(-3, -2)",
            "return 2 * tensor.transpose(-3, -2)",
            "step-split",
            "other numbers",
        ),
        (
            "tensor = tensor.transpose(-3, -2)\n        return tensor.reshape(*tensor.shape[:-2], "
            "num_heads * attn_head_size)",
            "return tensor.reshape(tensor.shape[0], -1, num_heads * attn_head_size)",
            "step-merge",
            "without moving the heads back",
        ),
        (
            "return tensor.reshape(*tensor.shape[:-2], num_heads * attn_head_size)",
            "return tensor",
            "step-merge",
            "now reshape the last two axes",
        ),
        ("triu(num_tokens + 1)", "triu(num_tokens)", "step-mask", "hides the token itself"),
        ("triu(num_tokens + 1)", "triu(num_tokens + 2)", "step-mask", "see the next one"),
        ("triu(num_tokens + 1)", "tril(num_tokens - 1)", "step-mask", "shows the future"),
        ("triu(num_tokens + 1)", "triu(num_tokens + 1) == 0", "step-mask", "True and False"),
        ("triu(num_tokens + 1)", "triu(num_tokens + 1)[None]", "step-mask", "not (8, 8)"),
        ("3 * self.embed_dim", "2 * self.embed_dim", "step-projections", "3 * self.embed_dim"),
        (" / key.shape[-1] ** 0.5", "", "scale", "not scaled at all"),
        ("key.shape[-1] ** 0.5", "key.shape[-2] ** 0.5", "scale", "sequence length"),
        ("scores + mask", "scores", "mask", ""),
        ("scores + mask, dim=-1", "scores + mask, dim=-2", "softmax", ""),
        ("return weights @ value", "return weights", "step-attention", "keep the shape"),
        ("query, key, value = (", "key, query, value = (", "packing", "another order"),
        ("query, key, value = (", "query, value, key = (", "packing", "another order"),
        ("config.n_head\n", "config.n_heads\n", "step-sizes", "n_heads"),
        ("// self.num_heads", "// 2", "step-sizes", "`self.head_dim` is 384"),
        ("return self.c_proj(", "return (", "", ""),
        ("(nn.Module)", "", "step-sizes", ""),
        ("return self.c_proj(", "return hidden_states, self.c_proj(", "step-forward", "a tuple"),
        ("        super().__init__()\n", "", "step-sizes", "before Module.__init__"),
    ],
    "per_head": [
        (
            "torch.cat([head(x) for head in self.heads], dim=-1)",
            "sum(head(x) for head in self.heads)",
            "step-forward",
            "gives (2, 7, 8)",
        ),
        (
            MODULE_LIST,
            "[CausalAttention(d_in, d_out, context_length, dropout) for _ in range(num_heads)]",
            "step-heads",
            "ModuleList",
        ),
        (
            MODULE_LIST,
            "nn.ModuleList([CausalAttention(d_in, d_out, context_length, dropout)] * num_heads)",
            "step-heads",
            "same head several times",
        ),
        ("keys.shape[-1] ** 0.5", "keys.shape[1] ** 0.5", "scale", "sequence length"),
        (
            MASK.strip(),
            "self.mask = torch.triu(torch.ones(context_length, context_length), 1)",
            "step-mask",
            "plain tensor",
        ),
        (MASK.strip(), MASK.strip().replace("triu", "tril"), "step-mask", "Line 24"),
        ("context_length), 1)", "context_length), 0)", "step-mask", "does not see itself"),
        ("torch.ones(context_length, context_length)", "torch.ones(d_in, d_in)", "step-mask", "20"),
        (
            MASK.strip(),
            "self.mask = nn.Parameter(torch.ones(context_length, context_length).triu(1))",
            "step-mask",
            "trained and saved",
        ),
        (
            "d_out, bias=qkv_bias)",
            "d_out, bias=False)",
            "step-projections",
            "has no bias, whatever",
        ),
        ("dropout, qkv_bias)", "dropout)", "step-heads", "without its own `qkv_bias`"),
        ("nn.Dropout(dropout)", "nn.Dropout()", "step-parts", "drops 0.5 of all weights"),
        ("nn.Dropout(dropout)", "dropout", "step-parts", "is 0.25 and no layer"),
        ("= scores.masked_fill", "; scores.masked_fill", "step-parts", "thrown away"),
        (".bool()[:T, :T]", ".bool()", "step-forward", "self.mask[:T, :T].bool()"),
        ("keys.transpose(1, 2)", "keys", "step-forward", "`queries @ keys.transpose(-2, -1)`"),
        ("self.heads], dim=-1)", "self.heads], dim=1)", "step-forward", "torch.cat([...], dim=-1)"),
        ("self.W_query(x)", "self.W_querry(x)", "step-forward", "Did you mean `W_query`?"),
        ("self.W_query(x)", "W_query(x)", "step-imports", "Did you mean `self.W_query`?"),
    ],
    "split": [
        (
            QKV_SPLIT.format("key"),
            "self.W_key(x).view(B, self.num_heads, T, self.head_dim)",
            "split",
            "",
        ),
        (".transpose(1, 2).reshape(B, T, self.d_out)", ".reshape(B, T, self.d_out)", "merge", ""),
        (
            "self.out_proj = nn.Linear(d_out, d_out)",
            "self.out_proj = nn.Linear(d_out, 2 * d_out)",
            "step-projections",
            "not (2, 7, 24)",
        ),
        ("/ keys.shape[-1] ** 0.5", "/ self.d_out ** 0.5", "scale", ""),
        (
            "self.head_dim).transpose(1, 2)",
            "self.head_dim)",
            "step-forward",
            "`queries` is [2, 7, 3, 8]; it should be [B, H, T, D], here [2, 3, 7, 8] (line 37",
        ),
        (
            "scores.masked_fill(self.mask.bool()[:T, :T], -torch.inf)",
            "scores + self.mask[:T, :T] * -torch.inf",
            "step-forward",
            "`scores` holds NaN from here on (line 43",
        ),
        ("nn.Linear(d_in, d_out,", "nn.Linear(d_in, d_in,", "step-projections", "not (2, 7, 24)"),
        ("(B, T, self.num_heads", "(B, T, num_heads", "step-imports", "Line 37 uses `num_heads`"),
    ],
    "scalar": [
        ("* head_dim**-0.5 ", "", "scale", "not scaled at all"),
        ("query[hs : hs + head_dim]", "query[:head_dim]", "step-attention", "other numbers"),
        ("    keys.append(key)\n", "", "step-attention", "0 keys and 1 values"),
        ("return linear(joined, wo)", "return joined", "out", ""),
        ("(score - top).exp()", "score.exp()", "step-softmax", "overflows"),
        ("e / total for e in exps", "e for e in exps", "step-softmax", "add up to"),
        ("dot(row, x) for row in weight", "dot(row, x) + 1 for row in weight", "step-linear", ""),
        ("query = linear(x, wq)", "query = linear(x, wk)", "", ""),
        ("* head_dim**-0.5 ", "", "scale", "`/ head_dim ** 0.5`. Look at line"),
        (
            "(score - top).exp()",
            "Value((score - top).exp().data)",
            "step-softmax",
            "cuts the graph",
        ),
        ("[dot(row, x) for row in weight]", "dot(weight[0], x)", "step-linear", "one number; it"),
        (
            "hs + head_dim)]\n        joined",
            "hs + 3)]\n        joined",
            "step-attention",
            "list of 3",
        ),
        (
            "joined += out",
            "joined = out",
            "step-attention",
            "`joined` is a list of 4; it should be",
        ),
        ("in keys]", "in keys[:-1]]", "step-attention", "`scores` is a list of 0; it should be"),
        ("dot(query[", "dot(quary[", "step-imports", "Did you mean `query`?"),
    ],
}


@pytest.mark.parametrize(
    ("name", "old", "new", "rule", "words"),
    [
        pytest.param(name, *row, id=f"{name}-{number}")
        for name, rows in WRONG.items()
        for number, row in enumerate(rows)
    ],
)
def test_a_wrong_part_is_named(
    name: str, old: str, new: str, rule: str, words: str, follow: Follow
) -> None:
    verdict = follow(name, filled(name, (old, new)))
    assert not verdict.passed
    first = verdict.errors[0]
    print(verdict)
    assert rule in first.rule
    assert words in f"{first.message} {first.hint}"
    assert "That is headwise's fault" not in said(verdict)


SCORES = "dot(query[hs : hs + head_dim], key[hs : hs + head_dim]) "
HEAD = "(d_in, d_out, context_length, dropout, qkv_bias) for"
SOFTMAX = "torch.softmax(scores / keys.shape[-1] ** 0.5, dim=-1)"
FOR = "for h in range(n_head):"
ATTEND = "self._attn(query, key, value)"
AT_FAULT = {  # the line at fault, by its code; what is changed, into what
    "scalar": [
        (
            "        return out",
            "return [dot(row, x) for row in weight]",
            "out = []\n    for row in weight:\n        out.append(dot(row, x))\n        return out",
        ),
        ("total = sum(scores", "total = sum(exps", "total = sum(scores"),
        ("exps = ", "exps = [(score - top).exp()", "exps = [(score - top)"),
        ("exps = ", "exps = [(score - top).exp()", "exps = [(score - top).exp"),
        ("exps = ", "top = max(", "top = min("),
        ("key = linear", "key = linear(x, wk)", "key = linear(query, wk)"),
        ("query = linear", "query = linear(x, wq)", "query = linear(wq, x)"),
        ("values.append(key)", "values.append(value)", "values.append(key)"),
        ("scores = [", "* head_dim**-0.5 for", "* n_head**-0.5 for"),
        ("scores = [", SCORES, SCORES.replace("hs", "h")),
        ("hs = h", "hs = h * head_dim", "hs = h * n_head"),
        ("head_dim = len", "len(x) // n_head", "len(x) / n_head"),
        ("out = [", "for value in values]", "for value in keys]"),
        ("out = [", "shares, [value[d]", "shares, [query[d]"),
        (
            "        joined = []",
            "joined = []\n    for h in range(n_head):",
            "FOR\n        joined = []",
        ),
        ("joined = out", "joined += out", "joined = out + joined"),
        ("return linear(joined", "(joined, wo)", "(joined, wv)"),
    ],
    "per_head": [
        ("W_key = nn", "self.W_key = nn", "W_key = nn"),
        ("self.W_key =", "W_key = nn.Linear(d_in, d_out", "W_key = nn.Linear(d_out, d_in"),
        ("scores = queries", "queries @ keys.transpose(1, 2)", "queries * keys"),
        ("scores = keys", "queries @ keys.transpose(1, 2)", "keys @ queries.transpose(1, 2)"),
        ("T = x.shape", "T = x.shape[1]", "T = x.shape[0]"),
        ("return weights @", "self.dropout(weights) @ values", "weights @ values"),
        ("weights = scores", SOFTMAX, "scores / keys.shape[-1] ** 0.5"),
        ("self.heads =", HEAD, HEAD.replace("d_out", "d_out // num_heads")),
        ("self.heads =", HEAD, HEAD.replace("context_length, dropout", "dropout, context_length")),
        ("return torch.cat", "[head(x) for", "[self.heads[0](x) for"),
    ],
    "split": [
        ("T, B, _", "B, T, _ = x", "T, B, _ = x"),
        ("self.head_dim =", "head_dim = d_out // num_heads", "head_dim = d_in // num_heads"),
        ("keys =", QKV_SPLIT.format("key"), QKV_SPLIT.format("query")),
        ("context =", "self.dropout(weights)", "self.dropout(self.dropout(weights))"),
        ("context =", "@ values)", "@ keys)"),
        ("context =", ".transpose(1, 2).reshape(B", ".transpose(2, 3).reshape(B"),
        (  # right in an unusual way, and wrong further down
            "weights =",
            QKV_SPLIT.format("query"),
            f"{QKV_SPLIT.format('query')} / self.head_dim**0.5",
            SOFTMAX,
            "torch.softmax(scores, dim=-2)",
        ),
    ],
    "gpt2": [
        ("self.head_dim =", "embed_dim // self.num_heads", "embed_dim / self.num_heads"),
        ("self.split_size =", "split_size = self.embed_dim", "split_size = self.head_dim"),
        ("self.c_attn =", "3 * self.embed_dim)", "3 * self.embed_dim, bias=False)"),
        ("def _split_heads", "_split_heads(self, tensor", "_split_heads(tensor"),
        ("scores / key", " / key.shape[-1] ** 0.5", "\n        scores / key.shape[-1] ** 0.5"),
        ("heads = self._attn", ATTEND, "self._attn(key, query, value)"),
        ("return self.c_proj(", "_merge_heads(heads, self", "_merge_heads(query, self"),
        (
            "merged = heads",
            "return self.c_proj(self._merge",
            "merged = heads\n        return self.c_proj(merged)  # (self._merge",
        ),
    ],
}


@pytest.mark.parametrize(
    ("name", "code", "changes"),
    [(name, row[0], row[1:]) for name, rows in AT_FAULT.items() for row in rows],
)
def test_the_line_at_fault_is_told(
    name: str, code: str, changes: tuple[str, ...], follow: Follow
) -> None:
    text = filled(name, *zip(changes[::2], changes[1::2], strict=True))
    line = next(n for n, one in enumerate(text.splitlines(), 1) if code in one)
    first = follow(name, text).errors[0]
    told = f"{first.message} {first.hint}"
    assert re.search(rf"line {line}\b", told, re.IGNORECASE), told


DROP = "weights = self.dropout(weights)\n        return weights @ values"
AGAIN = "\n        context = self.dropout(context)"
LATE = "context = (self.dropout(weights) @ values)"
WHOLE = "sequence_length, num_tokens + sequence_length), -torch.inf)"
CURES = [  # the step, what is changed, into what, the line told of, by its code, and words
    ("per_head", "queries = self", "x *= 1.1\n        queries = self", "x *= 1.1", "the caller's"),
    ("per_head", "values = self", "x.mul_(2)\n        values = self", "x.mul_", "written into"),
    (
        "per_head",
        "return self.dropout(weights) @ values",
        DROP.replace("(weights)", "(scores)"),
        "(scores)",
        "Did you mean `weights = self.dropout(weights)`?",
    ),
    ("per_head", "values = self", "keys = self", "keys = self.W_v", "did you mean `values` there?"),
    ("per_head", "self.W_key(x)", "self.W_key(x),", "keys =", "makes a tuple: take it away"),
    ("per_head", "queries = self", "x = queries = self", "x = q", "needs `x` as it was given"),
    (
        "per_head",
        "torch.softmax(scores / keys.shape[-1] ** 0.5, dim=-1)",
        "scores",
        "weights =",
        "",
    ),
    (
        "per_head",
        "self.dropout(weights)",
        "nn.Dropout(0.1)(weights)",
        "nn.Dropout(0.1)",
        "each call",
    ),
    ("per_head", "self.W_query = nn", "self.W_querys = nn", "self.W_querys", "mean `W_query`?"),
    (
        "per_head",
        "return torch.cat([head(x) for head in self.heads], dim=-1)",
        "outs = []\n        for head in self.heads:\n            outs.append(head(x))\n"
        "            return torch.cat(outs, dim=-1)",
        "return torch.cat",
        "indent it as far as the `for`",
    ),
    ("split", ".reshape(B", ".view(B", "context =", "write `.reshape(…)`"),
    (
        "split",
        LATE,
        f"context = weights @ values{AGAIN}",
        "self.dropout(context)",
        "it is at work in",
    ),
    (
        "scalar",
        "scores = [dot(query[hs : hs + head_dim]",
        "part = query[hs : hs + 3]\n        scores = [dot(part",
        "part = ",
        "k[hs : hs + head_dim])`, over",
    ),
    ("scalar", "top = max(", "top = min(", "top = min", "exp overflows"),
    ("scalar", "(score - top).exp()", "Value((score - top).exp().data)", "exps = [", "the graph"),
    ("gpt2", "scores + mask", "scores * mask", "weights =", ""),
    (
        "gpt2",
        "weights = torch.softmax(scores + mask",
        "scores = scores * mask\n        weights = torch.softmax(scores",
        "scores = scores *",
        "Add the mask: `scores + causal_mask(…)`",
    ),
    (
        "gpt2",
        " / key.shape[-1] ** 0.5",
        "",
        "scores = query",
        "Nothing divides the scores",
    ),
    (
        "gpt2",
        WHOLE,
        f"num_tokens + {WHOLE}",
        "mask = torch.full",
        "gives [5, 5]; it should be [3, 5]",
    ),
    ("gpt2", "triu(num_tokens + 1)", "triu(1)", ".triu(1)", "not aligned to the end"),
    ("gpt2", "-torch.inf)\n", "-1e9)\n", "-1e9", "rather than -inf"),
    (
        "gpt2",
        "mask.to(device, dtype)",
        "mask.to(device)",
        "mask = torch.full",
        "gives torch.float32",
    ),
]


@pytest.mark.parametrize(("name", "old", "new", "code", "words"), CURES)
def test_a_slip_is_told_with_its_line_and_its_cure(
    name: str, old: str, new: str, code: str, words: str, follow: Follow
) -> None:
    text = filled(name, (old, new))
    lines = [n for n, one in enumerate(text.splitlines(), 1) if code in one]
    first = follow(name, text).findings[0]
    told = f"{first.message} {first.hint}"
    assert any(re.search(rf"line {line}\b", told, re.IGNORECASE) for line in lines), told
    assert words in told


def test_blanks_wait_for_what_headwises_code_in_them_uses(follow: Follow) -> None:
    only = (*(blank.strip() for blank in LINEARS), "self.mask = None", "queries = None")
    for name in ("per_head", "split"):
        verdict = follow(
            name, filled(name, ("context_length), 1)", "context_length), -1)"), only=only)
        )
        wrong = [one for one in verdict.errors if one.rule != "step-blanks"]
        assert [one.rule for one in wrong] == ["step-mask"]
        assert "`forward` waits for `mask`." in said(verdict)


def test_a_mask_after_the_softmax_is_named(follow: Follow) -> None:
    old, new = "torch.softmax(scores + mask, dim=-1)", "torch.softmax(scores, dim=-1) + mask"
    late = "torch.softmax(scores, dim=-1)\n        weights = weights + mask"
    first = follow("gpt2", filled("gpt2", (old, late))).errors[0]
    assert "the softmax sees scores that are not masked" in first.hint
    assert "comes too late: `weights = weights + mask`" in first.hint
    first = follow("gpt2", filled("gpt2", (old, new))).errors[0]
    assert "The mask is added after the softmax" in first.hint


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
    assert not verdict.findings, said(verdict)
    wrong = by_number.replace("keys[t][d]", "keys[t][d - hs]")
    assert "`scores[t] = query[d] * keys[t][d - hs]" in str(follow("scalar", wrong).errors[0])


EARLY = [  # the step, the blanks that are filled (the first of them wrongly), rule and words
    ("per_head", ("self.mask = None",), ("torch.triu", "torch.tril"), "step-mask", "Line 24"),
    ("per_head", ("weights = None\n        return None",), ("dim=-1", "dim=1"), "softmax", ""),
    (
        "split",
        ("queries = None",),
        (").transpose(1, 2)", ")"),
        "step-forward",
        "`queries` is [2, 7",
    ),
    (
        "split",
        ("queries = None",),
        ("T, self.num_heads, self.head_dim).transpose(1, 2)", "self.num_heads, T, self.head_dim)"),
        "split",
        "",
    ),
    ("split", ("scores = None",), ("keys.transpose(2, 3)", "keys"), "step-forward", "line 41"),
    (
        "scalar",
        ("key = None", "value = None", "scores = None"),
        ("* head_dim**-0.5 ", ""),
        "scale",
        "not scaled at all",
    ),
]


@pytest.mark.parametrize(("name", "only", "change", "rule", "words"), EARLY)
def test_a_part_is_compared_before_the_last_blank_is_filled(
    name: str,
    only: tuple[str, ...],
    change: tuple[str, str],
    rule: str,
    words: str,
    follow: Follow,
) -> None:
    right = follow(name, filled(name, only=only))
    assert {one.rule for one in right.errors} == {"step-blanks"}
    first = follow(name, filled(name, change, only=only)).results
    wrong = [one for one in first if one.severity == "error" and one.rule != "step-blanks"]
    assert wrong
    assert rule in wrong[0].rule
    assert words in wrong[0].message


def test_a_mask_for_the_start_is_only_a_warning(follow: Follow) -> None:
    verdict = follow("gpt2", filled("gpt2", ("triu(num_tokens + 1)", "triu(1)")))
    assert verdict.passed
    assert [one.rule for one in verdict.warnings] == ["step-mask"]
    assert "does no harm in this step" in verdict.warnings[0].hint
    verdict = follow("gpt2", filled("gpt2", ("-torch.inf)\n", "-1e9)\n")))
    assert verdict.passed
    assert "rather than -inf" in str(verdict["step-mask"])


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
    assert not verdict.findings, said(verdict)
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
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_MAX, str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    messages = [json.loads(line) for line in done.stdout.splitlines()]
    verdict = judged(Outcome(messages), path, Limits())
    assert "step gpt2-max, by its syntax alone" in verdict.subject
    assert "Modular MAX is not installed here" in verdict["step-whole"].message
    lines = [one.message for one in verdict.errors]
    assert any("`self.c_attn` is still None" in line for line in lines)
    assert not any("c_proj` is still None" in line for line in lines)
    assert verdict["step-forward"].severity == "warning"
    unused = "`forward` does not use `_split_heads` and `_attn` and `_merge_heads` and `c_proj`."
    assert verdict["step-forward"].message == unused


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
    assert "is there already" in capsys.readouterr().err
    assert path.read_text() == "mine"


def test_a_step_in_a_file_that_hangs_keeps_what_was_found(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        template("gpt2").replace("self.head_dim = ", "while True: pass\n        self.head_dim = ")
    )
    verdict = check_step("gpt2", str(path), Limits(seconds=2.0))
    assert verdict.errors[0].rule == "file-time"
    assert re.search(
        r"while `GPT2MultiHeadAttention` was tried, at line \d+ in `__init__`: `while",
        verdict.errors[0].message,
    )
    assert len([one for one in verdict.errors if one.rule == "step-blanks"]) == 10


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--step", "gpt3", "mine.py"],
            "did you mean gpt2? There are scalar, per_head, split, gpt2, gpt2-max",
        ),
        (["--new", "gpt3", "mine.py"], "there is no such step"),
        (["--new", "gpt2", "mine.txt"], "ends in .py"),
        (["--new", "gpt2", "gone/mine.py"], "there is no folder"),
        (["--step", "gpt2", "gone.py"], "gone.py: no such file"),
        (["--step", "gpt2"], "no file was named; as in: headwise check --step gpt2 mine.py"),
        (["--step", "per-head", "here.py"], "did you mean per_head?"),
        (["here.py", "--stp", "gpt2"], "did you mean --step?"),
        (["--step", "gpt2", "--new", "gpt2", "mine.py"], "give one of them"),
        (["--step", "gpt2", "here.py", "--d_in", "3"], "leave out d_in"),
        (["--step", "gpt2", "here.py:Name"], "leave out :Name"),
        (
            ["--step", "here.py"],
            "is a file, and no step; the steps are scalar, per_head, split, gpt2",
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
    assert "or follow its step: headwise check --step per_head mine.py" in capsys.readouterr().err
    assert main(["check", "--step", "split", "mine.py"]) == 1
    said = capsys.readouterr().out
    assert "This looks like a file for `--step per_head`." in said
    assert "No placeholder is left" not in said
    assert main(["check", "--step", "mine.py"]) == 2
    assert "for this file: headwise check --step per_head mine.py" in capsys.readouterr().err
    assert main(["check", "--explain", "Scale"]) == 0
    assert capsys.readouterr().out.startswith("scale: ")
    assert main(["check", "--explain", "rules"]) == 0
    assert "step-mask: The mask hides what comes later" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("option", "listed"),
    [
        ("--new", "  per_head  One module a head"),
        ("--step", "  scalar    Attention in plain Python"),
        ("--explain", "  step-mask          The mask hides what comes later"),
    ],
)
def test_an_option_alone_lists_what_it_takes(
    option: str, listed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", option]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"headwise: {option}: name one of these, as in: headwise check {option} ")
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
    assert [blank.says for blank in Source(f"def f(x):\n    {body}\n").blanks("f")] == found


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
        assert bool(Source(text).blanks(part)) == is_blank
        assert Source(text).line(part) == 3


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
    assert Source(text).unbound == UNBOUND[text]


def test_nothing_is_unbound_in_files_that_run() -> None:
    for path in sorted(SYSTEMS.parent.rglob("*.py")):
        assert Source(path.read_text(), str(path)).unbound == {}, path

"""`look()` against attention written out by hand, and the rule that names a head."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor

from headwise import figures
from headwise import look as look_module
from headwise.corpus import TextError, repeated_tokens, train_tokenizer
from headwise.figures import COLUMNS, NO_LABEL, RULES, name_head
from headwise.gpt import GPT, GPTConfig, load
from headwise.look import LookError, finite, look, map_side, table, token_texts

LAYERS, HEADS, DIM, CONTEXT, VOCAB = 2, 3, 5, 23, 263
TEXT = "so much, so much naïve, so naïve and much so, and so on and on\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model whose attention is far from even, as a folder."""
    torch.manual_seed(0)
    config = GPTConfig(
        vocab_size=VOCAB,
        n_positions=CONTEXT,
        n_embd=HEADS * DIM,
        n_layer=LAYERS,
        n_head=HEADS,
    )
    model = GPT(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.6)
    path = tmp_path_factory.mktemp("models") / "tiny"
    model.save_pretrained(path, train_tokenizer([TEXT], vocab_size=VOCAB))
    return path


@pytest.fixture
def model(folder: Path) -> GPT:
    return GPT.from_pretrained(folder, dtype=torch.float64)


@pytest.fixture(scope="module")
def tokenizer(folder: Path):
    return load(folder)[1]


def by_hand(model: GPT, ids: Tensor) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """GPT-2 as the paper writes it, one head at a time: P and the scores of every layer, logits."""
    w = {name: value.detach() for name, value in model.state_dict().items()}

    def norm(x: Tensor, name: str) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        deviation = (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return centred / deviation * w[name + ".weight"] + w[name + ".bias"]

    x = w["transformer.wte.weight"][ids] + w["transformer.wpe.weight"][: ids.shape[1]]
    hidden = torch.ones(ids.shape[1], ids.shape[1]).triu(1).bool()
    maps, scores = [], []
    for layer in range(LAYERS):
        name = f"transformer.h.{layer}"
        y = norm(x, f"{name}.ln_1") @ w[f"{name}.attn.c_attn.weight"]
        q, k, v = (y + w[f"{name}.attn.c_attn.bias"]).split(HEADS * DIM, dim=-1)
        s, p, out = [], [], []
        for head in range(HEADS):
            part = slice(head * DIM, (head + 1) * DIM)
            s.append((q[..., part] @ k[..., part].mT / DIM**0.5).masked_fill(hidden, -math.inf))
            p.append(s[-1].softmax(-1))
            out.append(p[-1] @ v[..., part])
        x = x + torch.cat(out, -1) @ w[f"{name}.attn.c_proj.weight"] + w[f"{name}.attn.c_proj.bias"]
        y = norm(x, f"{name}.ln_2") @ w[f"{name}.mlp.c_fc.weight"] + w[f"{name}.mlp.c_fc.bias"]
        y = torch.nn.functional.gelu(y, approximate="tanh")
        x = x + y @ w[f"{name}.mlp.c_proj.weight"] + w[f"{name}.mlp.c_proj.bias"]
        maps.append(torch.stack(p, 1))
        scores.append(torch.stack(s, 1))
    return maps, scores, norm(x, "transformer.ln_f") @ w["transformer.wte.weight"].T


def mass(p: Tensor, ids: list[list[int]], pattern: str) -> tuple[float, float]:
    """A mass and its coverage in plain loops over rows, queries and keys. `p` is [B, T, T]."""
    found, rows = [], 0
    for b, tokens in enumerate(ids):
        for i, token in enumerate(tokens):
            keys = {
                "first": [0],
                "previous": [i - 1] if i else [],
                "self": [i],
                "same_token": [j for j in range(i) if tokens[j] == token],
                "induction": [j for j in range(1, i + 1) if tokens[j - 1] == token],
            }[pattern]
            rows += 1
            if keys:
                found.append(sum(float(p[b, i, j]) for j in keys))
    return (sum(found) / len(found) if found else math.nan), len(found) / rows


def test_figures_and_maps_equal_attention_written_by_hand(model: GPT, tokenizer) -> None:
    seen = look(model, tokenizer, TEXT)
    ids = torch.tensor(tokenizer.encode(TEXT).ids[:CONTEXT])[None]
    maps, scores, _ = by_hand(model, ids)
    assert [(r["layer"], r["head"]) for r in seen.rows] == [
        (0, 0),
        (0, 1),
        (0, 2),
        (1, 0),
        (1, 1),
        (1, 2),
    ]
    place = torch.arange(CONTEXT)
    for row in seen.rows:
        p, s = maps[row["layer"]][:, row["head"]], scores[row["layer"]][:, row["head"]]
        torch.testing.assert_close(
            torch.tensor(seen.maps[row["layer"]][row["head"]]), p[0], rtol=0.0, atol=1e-12
        )
        entropy = -torch.where(p > 0, p * p.log(), 0.0).sum(-1)[0]
        assert row["entropy"] == pytest.approx(float(entropy.mean()), abs=1e-12)
        share = float((entropy[1:] / (place[1:] + 1).double().log()).mean())
        assert row["entropy_share"] == pytest.approx(share, abs=1e-12)
        distance = float((p[0] * (place[:, None] - place)).sum(-1).mean())
        assert row["distance"] == pytest.approx(distance, abs=1e-12)
        assert row["max_logit"] == pytest.approx(float(s.max()), abs=1e-12)
        for pattern in ("first", "previous", "self", "same_token", "induction"):
            expected, coverage = mass(p, ids.tolist(), pattern)
            assert row[pattern] == pytest.approx(expected, abs=1e-12), pattern
            assert row[f"{pattern}_coverage"] == pytest.approx(coverage, abs=1e-7), pattern
        assert 0 < row["induction_coverage"] < 1
        assert row["module"] == f"transformer.h.{row['layer']}.attn"


def test_figures_on_random_repeats_equal_attention_written_by_hand(model: GPT, tokenizer) -> None:
    seen = look(model, tokenizer, TEXT, seed=5)
    period = CONTEXT // 2
    generator = torch.Generator().manual_seed(5)
    ids = repeated_tokens(8, 2 * period, VOCAB, generator, shortest=period, longest=period)
    maps, _, logits = by_hand(model, ids)
    for row in seen.rows:
        for pattern in ("previous", "same_token", "induction"):
            p = maps[row["layer"]][:, row["head"]]
            expected, coverage = mass(p, ids.tolist(), pattern)
            assert row[f"{pattern}_random"] == pytest.approx(expected, abs=1e-12), pattern
            assert row[f"{pattern}_random_coverage"] == pytest.approx(coverage, abs=1e-7), pattern
    log_p = logits.log_softmax(-1)
    loss = [[-float(log_p[b, t - 1, ids[b, t]]) for t in range(1, 2 * period)] for b in range(8)]
    first = np.mean([row[: period - 1] for row in loss])
    second = np.mean([row[period:] for row in loss])
    assert seen.provenance["loss_first_copy"] == pytest.approx(first, abs=1e-11)
    assert seen.provenance["loss_second_copy"] == pytest.approx(second, abs=1e-11)
    other = look(model, tokenizer, TEXT, seed=6)
    assert other.rows[0]["induction_random"] != seen.rows[0]["induction_random"]
    assert other.rows[0]["induction"] == seen.rows[0]["induction"]


def test_a_long_text_is_shown_in_blocks(
    model: GPT, tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(look_module, "MAP_SIDE", 5)
    seen = look(model, tokenizer, TEXT)
    ids = torch.tensor(tokenizer.encode(TEXT).ids[:CONTEXT])[None]
    block = [i * 5 // CONTEXT for i in range(CONTEXT)]
    for layer, p in enumerate(by_hand(model, ids)[0]):
        expected = torch.zeros(HEADS, 5, 5, dtype=torch.float64)
        for i in range(CONTEXT):
            for j in range(CONTEXT):
                expected[:, block[i], block[j]] += p[0, :, i, j] / block.count(block[i])
        torch.testing.assert_close(torch.tensor(seen.maps[layer]), expected, rtol=0.0, atol=1e-12)
    assert seen.provenance["map_side"] == 5


@pytest.mark.parametrize("tokens", [2, 255, 256, 257, 1021, 50_000])
@pytest.mark.parametrize("heads", [1, 6, 144, 1200])
def test_map_side_is_exact_where_it_can_be_and_bounded(tokens: int, heads: int) -> None:
    side = map_side(tokens, heads)
    assert side <= min(tokens, 256)
    assert heads * side**2 <= look_module.MAP_CELLS
    if tokens <= 256 and heads * tokens**2 <= look_module.MAP_CELLS:
        assert side == tokens


def test_context_is_obeyed_and_said(model: GPT, tokenizer) -> None:
    whole = len(tokenizer.encode(TEXT).ids)
    assert whole > CONTEXT
    seen = look(model, tokenizer, TEXT, context=7)
    assert len(seen.tokens) == 7
    assert seen.maps[1].shape == (HEADS, 7, 7)
    assert f"first 7 of the text's {whole} tokens" in seen.provenance["notice"]
    assert "asked for" in seen.provenance["notice"]
    assert "the model's context" in look(model, tokenizer, TEXT).provenance["notice"]
    assert look(model, tokenizer, "so much").provenance["notice"] is None


@pytest.mark.parametrize("context", [-1, 0, 1, CONTEXT + 1])
def test_a_context_that_the_model_lacks_is_refused(model: GPT, tokenizer, context: int) -> None:
    with pytest.raises(LookError, match=f"context {context}: .* from 2 to {CONTEXT}"):
        look(model, tokenizer, TEXT, context=context)


@pytest.mark.parametrize("text", ["", "s"])
def test_a_text_of_fewer_than_two_tokens_is_refused(model: GPT, tokenizer, text: str) -> None:
    with pytest.raises(TextError, match="at least 2"):
        look(model, tokenizer, text)


def test_a_damaged_model_is_named_not_drawn(model: GPT, tokenizer) -> None:
    with torch.no_grad():
        model.get_parameter("transformer.h.1.attn.c_attn.weight")[0, 0] = math.nan
    with pytest.raises(LookError, match="attention of layer 1 is not finite"):
        look(model, tokenizer, TEXT, model_name="tiny")


def test_the_model_is_left_as_it_was(model: GPT, tokenizer) -> None:
    model.train()
    look(model, tokenizer, TEXT)
    assert model.training
    assert all(getattr(m, "observer", None) is None for m in model.modules())


def test_progress_is_reported_layer_by_layer(model: GPT, tokenizer) -> None:
    shares: list[float] = []
    look(model, tokenizer, TEXT, report=shares.append)
    assert shares == [0.25, 0.5, 0.75, 1.0]
    look(model, tokenizer, TEXT)
    assert len(shares) == 4


def test_a_figure_without_any_target_is_null_not_zero(model: GPT, tokenizer) -> None:
    seen = look(model, tokenizer, "abcdef")
    assert [row["same_token_coverage"] for row in seen.rows] == [0.0] * 6
    rows = json.loads(seen.to_json())
    assert [row["same_token"] for row in rows] == [None] * 6
    assert rows == finite(seen.rows)
    assert all(
        isinstance(row[c.key], float)
        for row in rows
        for c in COLUMNS
        if "same" not in c.key and c.key != "induction"
    )


def test_tokens_are_decoded_one_by_one(tokenizer) -> None:
    ids = tokenizer.encode("so\n €é\x00").ids
    texts = token_texts(tokenizer, ids)
    assert "".join(texts).startswith("so\n ")
    assert "\\xe2" in "".join(texts)  # € was never merged into one token
    assert "\x00" in texts
    assert token_texts(tokenizer, [0]) == ["<|endoftext|>"]
    text = "so much\n\tnaïve"
    assert (
        "".join(token_texts(tokenizer, tokenizer.encode(text).ids)).replace("\\xc3\\xaf", "ï")
        == text
    )


def test_every_byte_has_its_letter() -> None:
    from tokenizers.pre_tokenizers import ByteLevel

    letters = look_module._byte_of_letter()
    assert sorted(letters.values()) == list(range(256))
    assert set(letters) == set(ByteLevel.alphabet())
    for text in ("é", "\n", " ", "\u00ad"):
        piece = ByteLevel(add_prefix_space=False).pre_tokenize_str(text)[0][0]
        assert look_module._piece_text(piece) == text


# --- the rule --------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.label)
def test_a_label_holds_from_its_threshold_on(rule: figures.Rule) -> None:
    step = 1e-6 if rule.sign == "≥" else -1e-6
    name = name_head({rule.key: rule.threshold, f"{rule.key}_coverage": 0.5})
    assert (name.label, name.key, name.score, name.coverage) == (
        rule.label,
        rule.key,
        rule.threshold,
        0.5,
    )
    assert name_head({rule.key: rule.threshold - step}).label == NO_LABEL


def test_the_first_rule_that_holds_names_the_head() -> None:
    everything = {
        "induction_random": 0.4,
        "same_token_random": 0.9,
        "previous": 0.9,
        "first": 0.9,
        "self": 0.9,
        "entropy_share": 0.9,
        "distance": 1.0,
    }
    for rule in RULES:
        assert name_head(everything).label == rule.label
        del everything[rule.key]
    assert name_head(everything) == figures.HeadName(NO_LABEL)


@pytest.mark.parametrize("score", [None, math.nan, -math.inf])
def test_a_missing_figure_names_nothing(score: float | None) -> None:
    assert name_head({rule.key: score for rule in RULES}).label == NO_LABEL


def test_labels_in_rows_follow_the_rule(model: GPT, tokenizer) -> None:
    for row in look(model, tokenizer, TEXT).rows:
        name = name_head(row)
        assert (row["label"], row["label_key"], row["label_score"]) == (
            name.label,
            name.key,
            name.score,
        )


# --- the terminal ----------------------------------------------------------------------------


def test_the_table_shows_every_figure_and_says_what_a_narrow_one_leaves_out(
    model: GPT, tokenizer
) -> None:
    seen = look(model, tokenizer, TEXT)
    wide, left_out = table(seen, 120)
    assert left_out == []
    assert len(wide.columns) == 2 + len(COLUMNS)
    narrow, left_out = table(seen, 80)
    assert len(narrow.columns) + len(left_out) == 2 + len(COLUMNS)
    text = _printed(narrow, 80)
    assert max(map(len, text.splitlines())) <= 80
    for row in seen.rows:
        assert f"{row['layer']}.{row['head']} {row['label']}" in text
        assert f"{row['entropy']:.2f}" in text
    assert f"{100 * seen.rows[0]['same_token_coverage']:.0f}%" in text


def test_a_missing_figure_is_a_dash_in_the_table(model: GPT, tokenizer) -> None:
    seen = look(model, tokenizer, TEXT)
    bare = replace(seen, rows=[{**row, "distance": math.nan, "first": None} for row in seen.rows])
    lines = _printed(table(bare, 120)[0], 120).splitlines()
    assert [line.count("–") for line in lines if line.strip().startswith(("0.", "1."))] == [2] * 6


def _printed(drawn, width: int) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(drawn)
    return capture.get()


# --- the command -----------------------------------------------------------------------------


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of `headwise look`."""
    from headwise.cli import main

    code = main(["look", *map(str, arguments)])
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "notes [draft].txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def test_the_command_prints_a_table_and_writes_the_page(
    folder: Path, text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    code, out, err = run(capsys, "--model", folder, "--text", text_file, "--out", page)
    assert (code, err) == (0, "")
    assert out.startswith(f"tiny on notes [draft].txt: {CONTEXT} tokens\n")
    assert "Only the first 23 of the text's" in out
    assert out.rstrip().endswith(f"page: {page}")
    for row in look(*load(folder), TEXT).rows:
        assert f"{row['layer']}.{row['head']} {row['label']}" in out
    html = page.read_text("utf-8")
    assert str(tmp_path) not in html
    assert str(folder) not in html


def test_json_is_all_there_is_on_standard_output(
    folder: Path, text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    code, out, err = run(
        capsys, "--model", folder, "--text", text_file, "--json", "--out", page, "--context", 7
    )
    seen = look(*load(folder), TEXT, context=7)
    assert code == 0
    assert json.loads(out) == finite(seen.rows)
    assert err == f"page: {page}\n"
    assert page.exists()
    page.unlink()
    code, out, err = run(capsys, "--model", folder, "--text", text_file, "--json", "--seed", 3)
    assert (code, err) == (0, "")
    assert [path.name for path in tmp_path.iterdir()] == [text_file.name]
    assert json.loads(out) == finite(look(*load(folder), TEXT, seed=3).rows)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--model", "{tmp}/missing"], "missing: no such folder"),
        (["--model", "{tmp}"], "config.json"),
        (["--text", "{tmp}/missing.txt"], "missing.txt: no such file"),
        (["--text", "{tmp}"], "is a folder"),
        (["--text", "{tmp}/empty.txt"], "the text is empty"),
        (["--text", "{tmp}/latin.txt"], "not UTF-8"),
        (["--text", "{tmp}/short.txt"], "at least 2"),
        (["--context", "24"], "from 2 to 23"),
        (["--context", "1"], "from 2 to 23"),
        (["--context", "many"], "--context"),
        (["--out", "{tmp}/missing/page.html"], "there is no folder"),
        (["--out", "{tmp}"], "it is a folder"),
        (["--colour", "red"], "--colour"),
    ],
)
def test_bad_input_gives_one_line_and_code_2(
    folder: Path,
    text_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    says: str,
) -> None:
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "latin.txt").write_bytes("naïve".encode("latin-1"))
    (tmp_path / "short.txt").write_text("s")
    before = sorted(path.name for path in tmp_path.iterdir())
    given: dict[str, object] = {
        "--model": folder,
        "--text": text_file,
        "--out": tmp_path / "page.html",
    }
    for name, value in zip(arguments[::2], arguments[1::2], strict=True):
        given[name] = value.format(tmp=tmp_path)
    code, out, err = run(capsys, *(part for pair in given.items() for part in pair))
    assert (code, out) == (2, "")
    assert says in err
    assert err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_pipe_is_read_and_named(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    piped = io.TextIOWrapper(io.BytesIO(TEXT.encode()), encoding="utf-8")
    monkeypatch.setattr("sys.stdin", piped)
    page = tmp_path / "page.html"
    code, out, _ = run(capsys, "--model", folder, "--text", "-", "--out", page)
    assert code == 0
    assert out.startswith("tiny on standard input: ")

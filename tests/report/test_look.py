"""`look()` at headwise's own GPT, against attention written out by hand; what a terminal shows."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from rich.text import Text
from torch import Tensor

from headwise.core.observers import observers
from headwise.models.corpus import TextError, repeated_tokens, train_tokenizer
from headwise.models.gpt import GPT, GPTConfig, load
from headwise.report import LookError, codec, look, token_texts
from headwise.report.catalog import COLUMNS, LABEL_STYLES
from headwise.report.codec import finite
from headwise.report.compare import similarity
from headwise.report.head_labels import NO_LABEL, label_head
from headwise.report.terminal import module_lines, summary, table
from headwise.report.tokens import _byte_alphabet, _piece_text

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
    maps, scores, logits = by_hand(model, ids)
    loss = torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:])
    assert seen.provenance["loss_text"] == pytest.approx(float(loss), abs=1e-11)
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
        layer, entropy = seen.layers[row["layer"]], -torch.where(p > 0, p * p.log(), 0.0).sum(-1)[0]
        np.testing.assert_allclose(layer.maps[row["head"]], p[0], atol=1e-7)
        np.testing.assert_allclose(layer.entropy[row["head"]], entropy, atol=1e-6)
        np.testing.assert_allclose(layer.received[row["head"]], p[0].sum(0), atol=1e-5)
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
        assert row["module"] == layer.name == f"transformer.h.{row['layer']}.attn"
        assert (layer.kind, layer.causal, layer.queries, layer.keys) == ("self", True, 0, 0)


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
    monkeypatch.setattr(codec, "MAP_SIDE", 5)
    seen = look(model, tokenizer, TEXT)
    ids = torch.tensor(tokenizer.encode(TEXT).ids[:CONTEXT])[None]
    block = [i * 5 // CONTEXT for i in range(CONTEXT)]
    for layer, p in enumerate(by_hand(model, ids)[0]):
        expected = torch.zeros(HEADS, 5, 5, dtype=torch.float64)
        for i in range(CONTEXT):
            for j in range(CONTEXT):
                expected[:, block[i], block[j]] += p[0, :, i, j] / block.count(block[i])
        np.testing.assert_allclose(seen.layers[layer].maps, expected, atol=1e-7)
    assert seen.provenance["map_side"] == 5


def test_top_keys_and_mass_by_offset_equal_attention_written_by_hand(model: GPT, tokenizer) -> None:
    seen = look(model, tokenizer, TEXT)
    ids = torch.tensor(tokenizer.encode(TEXT).ids[:CONTEXT])[None]
    apart = torch.arange(CONTEXT)[:, None] - torch.arange(CONTEXT)
    assert seen.offsets == [0, 1, 2, 4, 8, 16]  # nobody looks ahead
    for layer, p in zip(seen.layers, by_hand(model, ids)[0], strict=True):
        for head in range(HEADS):
            for i in range(CONTEXT):
                best = sorted(range(i + 1), key=lambda j: -float(p[0, head, i, j]))
                keys = [j for j in layer.top_keys[head, i].tolist() if j >= 0]
                assert keys == best[: len(keys)]
                assert len(keys) == min(i + 1, layer.top_keys.shape[2])
        ends = [*seen.offsets[1:], CONTEXT]
        expected = [
            torch.where((apart >= start) & (apart < end), p[0], 0.0).sum((1, 2)) / CONTEXT
            for start, end in zip(seen.offsets, ends, strict=True)
        ]
        np.testing.assert_allclose(layer.offsets, torch.stack(expected, 1), atol=1e-7)


def test_similarity_of_all_heads_written_by_hand(model: GPT, tokenizer) -> None:
    seen = look(model, tokenizer, TEXT)
    ids = torch.tensor(tokenizer.encode(TEXT).ids[:CONTEXT])[None]
    heads = torch.cat([p[0] for p in by_hand(model, ids)[0]])
    assert seen.similarity is not None
    for a in range(LAYERS * HEADS):
        for b in range(LAYERS * HEADS):
            expected = float((heads[a] * heads[b]).sqrt().sum(-1).mean())
            assert seen.similarity[a, b] == pytest.approx(expected, abs=1e-6)
    other = replace(seen.layers[1], queries=1, keys=1)
    apart = similarity([seen.layers[0], other])
    assert np.isnan(apart[:HEADS, HEADS:]).all()
    assert np.isfinite(apart[HEADS:, HEADS:]).all()


def test_a_mass_that_is_lost_to_a_sink_keeps_equal_heads_alike(model: GPT, tokenizer) -> None:
    seen = look(model, tokenizer, TEXT)
    half = replace(seen.layers[0], maps=seen.layers[0].maps[[0, 0]] * 0.5)
    np.testing.assert_allclose(similarity([half]), 1.0, atol=1e-6)


def test_context_is_obeyed_and_said(model: GPT, tokenizer) -> None:
    whole = len(tokenizer.encode(TEXT).ids)
    assert whole > CONTEXT
    seen = look(model, tokenizer, TEXT, context=7)
    assert len(seen.streams[0].tokens) == 7
    assert seen.layers[1].maps.shape == (HEADS, 7, 7)
    assert f"first 7 of the text's {whole} tokens" in seen.provenance["notice"]
    assert "this is the given context" in seen.provenance["notice"]
    assert "the model's context" in look(model, tokenizer, TEXT).provenance["notice"]
    assert look(model, tokenizer, "so much").provenance["notice"] is None


@pytest.mark.parametrize("given", [{"context": 2.5}, {"context": "9"}, {"seed": 0.5}])
def test_what_is_no_whole_number_is_refused(
    model: GPT, tokenizer, given: dict[str, Any], unchecked: None
) -> None:
    with pytest.raises(LookError, match=r"look\(…\): (context|seed) must be an integer"):
        look(model, tokenizer, TEXT, **given)


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
    with pytest.raises(LookError, match=r"layer 1 \(transformer.h.1.attn\) is not finite"):
        look(model, tokenizer, TEXT, model_name="tiny")


def test_the_model_is_left_as_it_was(model: GPT, tokenizer) -> None:
    model.train()
    look(model, tokenizer, TEXT)
    assert model.training
    assert not observers


def test_progress_is_reported_layer_by_layer(model: GPT, tokenizer) -> None:
    told: list[tuple[str, float]] = []
    look(model, tokenizer, TEXT, report=lambda *said: told.append(said))
    heads = [("ablation", step / 6) for step in range(1, 7)]  # of a small model, without_dispatch
    assert told == [("looking", step / 6) for step in range(1, 7)] + heads
    look(model, tokenizer, [TEXT, TEXT, TEXT], report=lambda *said: told.append(said))
    assert told[12:] == [("looking", step / 10) for step in range(1, 11)]


def test_a_figure_without_any_target_is_null_not_zero(model: GPT, tokenizer) -> None:
    seen = look(model, tokenizer, "abcdef")
    assert [row["same_token_coverage"] for row in seen.rows] == [0.0] * 6
    assert [row["same_token"] for row in seen.rows] == [None] * 6
    absent = {"same_token", "induction", "importance", "ablation_estimate"}
    absent |= {"next", "ahead_2", "ahead_3", "delimiters", "separators", "cls"}
    keys = {column.key for column in COLUMNS}
    for row in seen.rows:
        assert {key for key in keys if row.get(key) is None} == absent
    assert {column["key"] for column in seen.columns} == keys - absent


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

    letters = _byte_alphabet()
    assert sorted(letters.values()) == list(range(256))
    assert set(letters) == set(ByteLevel.alphabet())
    for text in ("é", "\n", " ", "\u00ad"):
        piece = ByteLevel(add_prefix_space=False).pre_tokenize_str(text)[0][0]
        assert _piece_text(piece, True) == text
        assert _piece_text(text, False) == text
    assert _piece_text("\u2581so", False) == " so"
    assert [_piece_text(f"<0x{byte}>", False) for byte in ("0A", "E2")] == ["\n", "\\xe2"]


@pytest.mark.parametrize(("text", "few"), [("so on " * 9, True), (TEXT, False)])
def test_a_text_of_few_different_tokens_is_said_to_be_one(
    model: GPT, tokenizer, text: str, few: bool
) -> None:
    seen = look(model, tokenizer, text, context=13)
    ids = tokenizer.encode(text).ids[:13]
    equal = np.mean([ids[i] == ids[j] for i in range(13) for j in range(13) if i != j])
    said = (
        f"The text has only {len(set(ids))} different tokens: uniform attention would put "
        f"{equal:.0%} of its weight on equal ones"
    )
    assert seen.provenance["notice"].startswith("Only the first 13 of")
    assert (said in seen.provenance["notice"]) == few
    assert (said in summary(seen, [])[1]) == few


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("{model}", None, TEXT), r"tokenizer=None: the model reads text; pass its tokenizer"),
        (("{model}", "gpt2", TEXT), r"tokenizer='gpt2': the model reads text"),
        (("gpt2", "{tokenizer}", TEXT), r"look\('gpt2', …\): model must be a module"),
        (("{model}", "{tokenizer}", b"x"), r"text \(bytes\) is not a string, but GPT reads text"),
        (("{model}", "{tokenizer}", None), r"text \(NoneType\) is not a string"),
        (("{model}", "{tokenizer}", [TEXT, b"x"]), r"text, text 2 \(bytes\) is not a string"),
    ],
)
def test_arguments_of_another_kind_are_refused(
    model: GPT, tokenizer, unchecked: None, arguments: tuple[Any, ...], says: str
) -> None:
    there = {"{model}": model, "{tokenizer}": tokenizer}
    given = [there.get(one, one) if isinstance(one, str) else one for one in arguments]
    with pytest.raises(LookError, match=says):
        look(*given)


def test_labels_in_rows_follow_the_rules(model: GPT, tokenizer) -> None:
    for row in look(model, tokenizer, TEXT).rows:
        labels = label_head(row)
        assert [label["label"] for label in row["labels"]] == [one.label for one in labels]
        for label, one in zip(row["labels"], labels, strict=True):
            assert label["score"] == row[label["key"]] == one.score
            assert label["coverage"] == row.get(f"{label['key']}_coverage", 1.0)


# --- the terminal ----------------------------------------------------------------------------


def test_the_table_shows_every_figure_and_says_what_a_narrow_one_leaves_out(
    model: GPT, tokenizer
) -> None:
    seen = look(model, tokenizer, TEXT)
    figures = len(seen.columns)
    wide, left_out = table(seen, 160)
    assert left_out == []
    assert len(wide.columns) == 2 + figures
    for width in (120, 80):
        narrow, left_out = table(seen, width)
        assert len(narrow.columns) + len(left_out) == 2 + figures
        text = _printed(narrow, width)
        assert max(map(len, text.splitlines())) <= width
        for row in seen.rows:
            assert f"L{row['layer']}H{row['head']} {first_label(row)}" in text
            assert f"{row['entropy']:.2f}" in text
    text = _printed(wide, 160)
    assert f"{100 * seen.rows[0]['same_token_coverage']:.0f}%" in text


def first_label(row: dict[str, Any]) -> str:
    return row["labels"][0]["label"] if row["labels"] else NO_LABEL


def test_all_labels_are_told_where_there_is_room(model: GPT, tokenizer) -> None:
    seen = look(model, tokenizer, TEXT)
    labels = [{"label": name} for name in ("previous token", "local", "[i]")]
    named = replace(seen, rows=[{**seen.rows[0], "labels": labels}])
    assert "previous token, local, [i]" in _printed(table(named, 200)[0], 200)
    assert "previous token +2" in _printed(table(named, 120)[0], 120)


@pytest.mark.parametrize(("ground", "theme"), [("", "dark"), ("0;15", "light"), ("15;0", "dark")])
def test_labels_have_the_palettes_colors(
    model: GPT, tokenizer, monkeypatch: pytest.MonkeyPatch, ground: str, theme: str
) -> None:
    monkeypatch.setenv("COLORFGBG", ground)
    seen = look(model, tokenizer, TEXT)
    labels = [{"label": name} for name in ("previous token", "local")]
    drawn, _ = table(replace(seen, rows=[{**seen.rows[0], "labels": labels}]), 200)
    (label,) = drawn.columns[1]._cells
    assert isinstance(label, Text)
    colors = {style.label: getattr(style, theme) for style in LABEL_STYLES}
    assert label.plain == "previous token, local"
    assert [str(span.style) for span in label.spans] == [
        colors["previous token"],
        colors["local"],
    ]


def test_the_layers_of_several_kinds_are_told_apart(model: GPT, tokenizer) -> None:
    seen = look(model, tokenizer, TEXT)
    assert module_lines(seen) == []
    layers = [
        replace(seen.layers[0], name=name)
        for name in ("enc.0.attn", "enc.1.attn", "dec.0.self", "dec.0.cross", "dec.1.self")
    ]
    assert module_lines(replace(seen, layers=layers)) == [
        "0–1: enc.*.attn",
        "2, 4: dec.*.self",
        "3: dec.0.cross",
    ]


def test_a_missing_figure_is_a_dash_in_the_table(model: GPT, tokenizer) -> None:
    seen = look(model, tokenizer, TEXT)
    missing = ({"distance": math.nan, "first": None}, {"distance": math.nan})
    bare = replace(seen, rows=[{**row, **missing[row["layer"]]} for row in seen.rows])
    lines = _printed(table(bare, 160)[0], 160).splitlines()
    heads = [line.split() for line in lines if line.strip().startswith(("L0H", "L1H"))]
    dashes = sorted((head[0][1], head.count("–")) for head in heads)
    assert dashes == [("0", 2)] * 3 + [("1", 1)] * 3


def _printed(drawn, width: int) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(drawn)
    return capture.get()


# --- the command -----------------------------------------------------------------------------


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of `headwise look`."""
    from headwise.cli.main import main

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
        assert f"L{row['layer']}H{row['head']} {first_label(row)}" in out
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
        (["--model", "{tmp}/missing"], "missing does not exist"),
        (["--model", "{tmp}"], "config.json"),
        (["--text", "{tmp}/missing.txt"], "missing.txt: no such file"),
        (["--text", "{tmp}"], "is a directory"),
        (["--text", "{tmp}/empty.txt"], "the text is empty"),
        (["--text", "{tmp}/latin.txt"], "not UTF-8"),
        (["--text", "{tmp}/short.txt"], "at least 2"),
        (["--context", "24"], "from 2 to 23"),
        (["--context", "1"], "from 2 to 23"),
        (["--context", "many"], "--context"),
        (["--out", "{tmp}/missing/page.html"], "there is no folder"),
        (["--out", "{tmp}"], "is a directory"),
        (["--color", "red"], "--color"),
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

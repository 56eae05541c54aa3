"""ObserveOptions at models of `transformers`: the figures against their own attention matrices."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import ByT5Tokenizer

import headwise as hw
from headwise.capture.ablate import ablate
from headwise.models.corpus import TextError
from headwise.report import LookError, look
from headwise.report.folders import load_folder
from headwise.report.head_labels import is_delimiter
from headwise.report.samples import TextFile
from headwise.report.schema import Look, load
from headwise.report.subjects import subject_of
from headwise.report.terminal import summary
from headwise.report.tokens import Vocabulary, pieces_by_decoding
from headwise.weights.folders import FolderError
from model_folders import NAMES, TEXT, write_folder, write_picture

TARGET = "much naïve and on"
TEXTS = [TEXT, "and so much", "so", "", "naïve and naïve and so on, much on and so"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("models")
    write_picture(base / "picture.png")
    return {name: write_folder(name, base / name) for name in NAMES}


def loaded(folder: Path) -> tuple[Any, Any]:
    return load_folder(folder, dtype=torch.float64)


def read(folder: Path) -> Any:
    """What the folder's model is given to read."""
    return folder.parent / "picture.png" if folder.name == "vit" else TEXT


def theirs(model: Any, inputs: dict[str, Tensor]) -> list[tuple[str, int, int, Tensor]]:
    """The attention matrices that the model gives itself when it runs eagerly: the kind, the
    streams of queries and keys, and P `[H, T, S]`, in the order in which they are computed."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.no_grad():
        out = model(**inputs, output_attentions=True)
    model.set_attn_implementation(before)
    if not model.config.is_encoder_decoder:
        return [("self", 0, 0, p[0]) for p in out.attentions]
    found = [("self", 0, 0, p[0]) for p in out.encoder_attentions]
    for own, cross in zip(out.decoder_attentions, out.cross_attentions, strict=True):
        found += [("self", 1, 1, own[0]), ("cross", 1, 0, cross[0])]
    return found


def by_hand(p: Tensor, kind: str, tokens: list[int] | None, marks: list[bool]) -> dict[str, float]:
    """Figures of one head, in plain loops. `p` is [T, S], without padding."""
    rows, keys = range(p.shape[0]), range(p.shape[1])
    entropy = [-sum(float(x) * math.log(x) for x in row if x > 0) for row in p.tolist()]
    found = {"entropy": entropy, "first": [float(p[i, 0]) for i in rows]}
    if tokens is not None:
        # Of queries that have one in sight.
        there = [[float(p[i, j]) for j in keys if marks[j]] for i in rows]
        found["delimiters"] = [sum(masses) for masses in there if any(masses)]
    if kind == "self":
        found["self"] = [float(p[i, i]) for i in rows]
        found["previous"] = [float(p[i, i - 1]) for i in rows if i]
        found["back_2"] = [float(p[i, i - 2]) for i in rows if i > 1]
        found["next"] = [float(p[i, i + 1]) for i in rows if i + 1 in keys]
        found["distance"] = [sum(float(p[i, j]) * (i - j) for j in keys) for i in rows]
        found["distance_absolute"] = [sum(float(p[i, j]) * abs(i - j) for j in keys) for i in rows]
    return {name: sum(values) / len(values) for name, values in found.items() if values}


@pytest.mark.parametrize("name", NAMES)
def test_figures_maps_and_positions_equal_the_models_own_matrices(
    folders: dict[str, Path], name: str
) -> None:
    model, tokenizer = loaded(folders[name])
    target = TARGET if name in ("t5", "bart") else None
    seen = look(model, tokenizer, read(folders[name]), target=target, seed=3)
    subject = subject_of(model, tokenizer, target=target)
    sample = subject.sample(read(folders[name]), "it")
    matrices = theirs(model, sample.inputs)
    assert len(seen.layers) == len(matrices)
    rows = iter(seen.rows)
    for number, (layer, (kind, queries, keys, p)) in enumerate(
        zip(seen.layers, matrices, strict=True)
    ):
        assert (layer.kind, layer.queries, layer.keys) == (kind, queries, keys)
        assert layer.causal == (kind == "self" and (name == "llama" or queries == 1))
        np.testing.assert_allclose(layer.maps, p, atol=1e-6)
        np.testing.assert_allclose(layer.received, p.sum(1), atol=1e-5)
        entropy = torch.special.entr(p).sum(-1)
        np.testing.assert_allclose(layer.entropy, entropy, atol=1e-5)
        k = layer.top_keys.shape[-1]
        order = p.sort(dim=-1, descending=True, stable=True).values[..., :k]
        np.testing.assert_allclose(layer.top_weights[..., : order.shape[-1]], order, atol=1e-6)
        picked = np.take_along_axis(p.numpy(), layer.top_keys.clip(0).astype(np.int64), -1)
        np.testing.assert_allclose(
            np.where(layer.top_keys < 0, 0, picked), layer.top_weights, atol=1e-6
        )
        part = sample.parts[keys]
        ids = None if part.ids is None else part.ids.tolist()
        marks = [] if part.delimiters is None else part.delimiters.tolist()
        for head in range(layer.heads):
            row = next(rows)
            assert (row["layer"], row["head"], row["module"]) == (number, head, layer.name)
            for key, value in by_hand(p[head], kind, ids, marks).items():
                if layer.causal and key == "next":
                    assert key not in row
                else:  # Llama's own softmax is in float32
                    assert row[key] == pytest.approx(value, abs=1e-6), key
            assert ("distance" in row) == (kind == "self")
    assert next(rows, None) is None


@pytest.mark.parametrize("name", ["bert", "t5"])
def test_mass_by_offset_on_both_sides(folders: dict[str, Path], name: str) -> None:
    model, tokenizer = loaded(folders[name])
    target = TARGET if name == "t5" else None
    seen = look(model, tokenizer, TEXT, target=target)
    sample = subject_of(model, tokenizer, target=target).sample(TEXT, "it")
    assert seen.offsets == sorted(seen.offsets)
    assert {-3, -1, 0, 1, 2} <= set(seen.offsets)
    for layer, (kind, *_, p) in zip(seen.layers, theirs(model, sample.inputs), strict=True):
        if kind == "cross":
            assert layer.offsets is None
            continue
        length = p.shape[-1]
        apart = torch.arange(length)[:, None] - torch.arange(length)
        ends = [*seen.offsets[1:], 10**9]
        expected = [
            torch.where((apart >= start) & (apart < end), p, 0.0).sum((1, 2)) / length
            for start, end in zip(seen.offsets, ends, strict=True)
        ]
        assert layer.offsets is not None
        np.testing.assert_allclose(layer.offsets, torch.stack(expected, 1), atol=1e-6)


def test_what_is_read_has_its_words(folders: dict[str, Path]) -> None:
    streams = {
        name: look(*load_folder(folders[name]), read(folders[name]), target=target).streams
        for name, target in (("llama", None), ("bert", None), ("t5", TARGET), ("vit", None))
    }
    assert streams["llama"][0].tokens[:4] == ["<|endoftext|>", "so", " much", ","]
    assert streams["llama"][0].special == (0,)
    assert "".join(streams["llama"][0].tokens[1:]).replace("\\xc3\\xaf", "ï") == TEXT
    (text,) = streams["bert"]
    assert [text.tokens[0], text.tokens[1], text.tokens[-1]] == ["[CLS]", "so", "[SEP]"]
    assert text.special == (0, len(text.tokens) - 1)
    assert "naïve" in text.tokens  # not bytes, though ï is a letter of byte-level BPE
    encoder, decoder = streams["t5"]
    assert (encoder.name, decoder.name) == ("encoder", "decoder")
    assert encoder.tokens[-1] == "</s>"
    assert decoder.tokens[0] == "<pad>"
    assert decoder.tokens[1:] == ["much", "naïve", "and", "on"]  # not </s>, which comes last
    assert decoder.pieces == ["", "much", " naïve", " and", " on"]  # the target's own text
    (image,) = streams["vit"]
    assert image.grid == (4, 3)
    assert image.tokens[:3] == ["[CLS]", "0,0", "0,1"]
    assert image.tokens[-1] == "3,2"
    assert image.picture is not None
    assert image.picture.startswith(b"\x89PNG")


@pytest.mark.parametrize("text", ["naïve, so much\n  and 日本 on", "so"])
def test_a_tokenizer_without_offsets_gives_the_text_all_the_same(text: str) -> None:
    """A byte a token, in a tokenizer that does not say where its tokens stand."""
    words = Vocabulary(ByT5Tokenizer())
    encoded = words.encode(text)
    assert encoded.pieces is not None
    assert "".join(encoded.pieces) == text
    assert len(encoded.pieces) == len(encoded.ids) == len(text.encode()) + 1
    assert [piece for piece in encoded.pieces if piece] == list(text)
    assert encoded.pieces[-1] == ""  # </s>
    assert words.pieces(encoded.ids) == encoded.pieces


@pytest.mark.parametrize("tokens", [["[MASK]", "so"], ["so", "<mask>"], ["so", "much"]])
def test_the_token_that_hides_others_is_known_whatever_its_id(tokens: list[str]) -> None:
    words = Vocabulary(Tokenizer(WordLevel({text: n for n, text in enumerate(tokens)}, "so")))
    hidden = [n for n, text in enumerate(tokens) if text in ("[MASK]", "<mask>")]
    assert words.mask == (hidden[0] if hidden else None)


def test_a_tokenizer_that_changes_what_stands_before_has_no_pieces() -> None:
    def decode(ids: list[int]) -> str:
        return "".join(chr(97 + number) for number in reversed(ids))

    assert pieces_by_decoding(decode, [0, 1, 2], ()) is None
    assert pieces_by_decoding(decode, [], ()) == []


def test_the_piece_that_is_shown_can_be_read(folders: dict[str, Path]) -> None:
    for name in ("llama", "bert", "t5"):
        model, tokenizer = loaded(folders[name])
        (piece, *_) = look(model, tokenizer, TEXT, target=TARGET if name == "t5" else None).repeats
        bare = [token for n, token in enumerate(piece.tokens) if n not in piece.special]
        period = len(bare) // 2
        assert bare[:period] == bare[period:]
        assert len({*bare}) == period  # none comes twice in a period


def test_the_picture_kept_is_what_the_model_sees(folders: dict[str, Path]) -> None:
    import io

    from PIL import Image

    model, processor = load_folder(folders["vit"])
    seen = look(model, processor, folders["vit"].parent / "picture.png")
    assert seen.streams[0].picture is not None
    kept = np.asarray(Image.open(io.BytesIO(seen.streams[0].picture)), dtype=np.float64)
    with Image.open(folders["vit"].parent / "picture.png") as image:
        pixels = processor(image.convert("RGB"), return_tensors="pt")["pixel_values"][0]
    expected = (pixels * 0.5 + 0.5).permute(1, 2, 0).numpy() * 255
    assert kept.shape == (32, 24, 3)
    assert np.abs(kept - expected).max() <= 0.51


def test_without_a_target_the_model_writes_it(folders: dict[str, Path]) -> None:
    model, tokenizer = loaded(folders["bart"])
    seen = look(model, tokenizer, TEXT)
    ids = tokenizer(TEXT, return_tensors="pt")
    with torch.no_grad():
        written = torch.tensor([[2]])
        while written.shape[1] < 49:
            logits = model(**ids, decoder_input_ids=written).logits[:, -1]
            if written.shape[1] < 3:  # at least two tokens
                logits[:, 2] = -math.inf
            written = torch.cat([written, logits.argmax(-1, keepdim=True)], 1)
            if written[0, -1] == 2:
                break
        logits = model(**ids, decoder_input_ids=written[:, :-1]).logits
    assert seen.streams[1].tokens == tokenizer.convert_ids_to_tokens(written[0, :-1])
    assert seen.streams[1].pieces is not None
    assert "".join(seen.streams[1].pieces).split() == [
        token for token in seen.streams[1].tokens if token not in tokenizer.all_special_tokens
    ]
    loss = torch.nn.functional.cross_entropy(logits[0], written[0, 1:])
    assert seen.provenance["loss_text"] == pytest.approx(float(loss), abs=1e-9)


def test_the_loss_of_a_causal_and_of_a_masked_model(folders: dict[str, Path]) -> None:
    model, tokenizer = loaded(folders["llama"])
    ids = tokenizer(TEXT, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        expected = model(input_ids=ids, labels=ids).loss
    seen = look(model, tokenizer, TEXT)
    assert seen.provenance["loss_text"] == pytest.approx(float(expected), abs=1e-6)
    model, tokenizer = loaded(folders["bert"])
    ids = tokenizer(TEXT, return_tensors="pt")["input_ids"]
    bare = torch.arange(1, ids.shape[1] - 1)
    order = torch.randperm(len(bare), generator=torch.Generator().manual_seed(4))
    hidden = bare[order[: round(0.15 * len(bare))]]
    given = ids.index_fill(1, hidden, tokenizer.mask_token_id)
    with torch.no_grad():
        logits = model(input_ids=given).logits[0, hidden]
    expected = torch.nn.functional.cross_entropy(logits, ids[0, hidden])
    seen = look(model, tokenizer, TEXT, seed=4)
    assert seen.provenance["loss_text"] == pytest.approx(float(expected), abs=1e-9)
    assert "masked" in seen.provenance["loss"]


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_streams_of_equal_length_are_told_apart(folders: dict[str, Path], name: str) -> None:
    model, tokenizer = loaded(folders[name])
    seen = look(model, tokenizer, "so much", target="much so")
    assert [len(stream.tokens) for stream in seen.streams] == [3, 3]
    sample = subject_of(model, tokenizer, target="much so").sample("so much", "it")
    matrices = theirs(model, sample.inputs)
    for layer, (kind, queries, keys, p) in zip(seen.layers, matrices, strict=True):
        assert (layer.kind, layer.queries, layer.keys) == (kind, queries, keys)
        np.testing.assert_allclose(layer.maps, p, atol=1e-6)


def test_a_text_of_added_tokens_alone_is_too_short(folders: dict[str, Path]) -> None:
    model, tokenizer = load_folder(folders["bert"])
    with pytest.raises(TextError, match=r"0 token.* and 2 that the tokenizer adds; at least 2"):
        look(model, tokenizer, "")
    assert look(model, tokenizer, "so").streams[0].tokens == ["[CLS]", "so", "[SEP]"]


def test_a_long_text_is_cut_between_the_added_tokens(folders: dict[str, Path]) -> None:
    model, tokenizer = load_folder(folders["bert"])
    seen = look(model, tokenizer, TEXT, context=5)
    assert seen.streams[0].tokens == ["[CLS]", "so", "much", ",", "[SEP]"]
    assert "this is the given context" in seen.provenance["notice"]
    long = look(model, tokenizer, TEXT * 9)
    assert len(long.streams[0].tokens) == 64
    assert "this is the model's context" in long.provenance["notice"]
    model, tokenizer = load_folder(folders["t5"])  # its positions have no end
    long = look(model, tokenizer, TEXT * 130, target=TARGET)
    assert len(long.streams[0].tokens) == 2048
    assert "--context" in long.provenance["notice"]
    assert len(long.layers[0].maps[0]) < 300


def test_random_repeats_stand_between_the_tokenizers_own_tokens(folders: dict[str, Path]) -> None:
    for name, before, after in (("llama", [0], []), ("bert", [2], [3]), ("t5", [], [2])):
        model, tokenizer = load_folder(folders[name])
        subject = subject_of(model, tokenizer)
        sample = subject.repeats(5)
        assert sample is not None
        ids = sample.inputs["input_ids"]
        period = sample.period
        assert ids.shape == (8, len(before) + 2 * period + len(after))
        assert ids.shape[1] <= (subject.longest or 10**9)
        for row in ids.tolist():
            assert row[: len(before)] == before
            assert row[len(before) + 2 * period :] == after
            body = row[len(before) : len(before) + 2 * period]
            assert body[:period] == body[period:]
            assert not set(body) & set(tokenizer.all_special_ids)


def test_figures_on_random_repeats_equal_the_models_own(folders: dict[str, Path]) -> None:
    model, tokenizer = loaded(folders["bert"])
    seen = look(model, tokenizer, TEXT, seed=5)
    sample = subject_of(model, tokenizer, seed=5).repeats(5)
    assert sample is not None
    ids = sample.inputs["input_ids"].tolist()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        layers = model(**sample.inputs, output_attentions=True).attentions
    for row in seen.rows:
        p = layers[row["layer"]][:, row["head"]]
        masses = []
        for b, tokens in enumerate(ids):
            for i, token in enumerate(tokens):
                keys = [j for j, other in enumerate(tokens) if other == token and j != i]
                masses += [sum(float(p[b, i, j]) for j in keys)] if keys else []
        assert row["same_token_random"] == pytest.approx(np.mean(masses), abs=1e-9)


# --- many texts --------------------------------------------------------------------------------


def test_means_and_standard_errors_over_texts(folders: dict[str, Path]) -> None:
    model, tokenizer = loaded(folders["llama"])
    seen = look(model, tokenizer, TEXTS)
    assert seen.provenance["texts"] == 4
    assert seen.provenance["too_short"] == 1  # "" is the start token alone
    looks = [look(model, tokenizer, text) for text in TEXTS if text]
    sizes = np.array([len(one.streams[0].tokens) for one in looks], dtype=float)
    for place, row in enumerate(seen.rows):
        each = np.array([one.rows[place]["entropy"] for one in looks])
        mean = (sizes * each).sum() / sizes.sum()
        assert row["entropy"] == pytest.approx(mean, abs=1e-9)
        n = len(looks)
        error = math.sqrt(n / (n - 1) * (sizes**2 * (each - mean) ** 2).sum()) / sizes.sum()
        assert row["entropy_se"] == pytest.approx(error, abs=1e-9)
        largest = max(one.rows[place]["max_logit"] for one in looks)
        assert row["max_logit"] == pytest.approx(largest, abs=1e-9)
        # Of a mass, queries with a target count; texts without any have no say.
        targets = sizes * [one.rows[place]["same_token_coverage"] for one in looks]
        masses = [one.rows[place]["same_token"] or 0.0 for one in looks]
        assert row["same_token"] == pytest.approx((targets * masses).sum() / targets.sum())
        assert row["same_token_coverage"] == pytest.approx(targets.sum() / sizes.sum())
    first = look(model, tokenizer, TEXTS[0])
    for one, other in zip(seen.layers, first.layers, strict=True):
        np.testing.assert_array_equal(one.maps, other.maps)
    losses = [(len(one.streams[0].tokens) - 1, one.provenance["loss_text"]) for one in looks]
    mean = sum(n * loss for n, loss in losses) / sum(n for n, _ in losses)
    assert seen.provenance["loss_text"] == pytest.approx(mean, abs=1e-9)
    assert not any("entropy_se" in row for row in first.rows)


def test_texts_are_held_one_at_a_time(folders: dict[str, Path]) -> None:
    """An iterator is asked for a text only when the one before is done with."""
    model, tokenizer = load_folder(folders["llama"])
    forwards: list[int] = []
    model.register_forward_hook(lambda *_: forwards.append(1))
    asked: list[int] = []

    def texts() -> Any:
        for text in TEXTS:
            asked.append(len(forwards))
            yield text

    seen = look(model, tokenizer, texts())
    assert seen.rows == look(model, tokenizer, TEXTS).rows
    assert asked == [0, 2, 3, 4, 4]  # the first is run twice: to see what there is, and to look
    with pytest.raises(LookError, match="iterator"):
        look(model, tokenizer, iter(TEXTS), importance=True)


def test_texts_of_a_file_and_of_a_folder(tmp_path: Path) -> None:
    file = tmp_path / "texts"
    file.write_text("one\n\n  two \r\nthree", encoding="utf-8")
    texts = TextFile(file)
    assert (len(texts), list(texts), list(texts)) == (3, ["one", "  two ", "three"], [*texts])
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in ("b.txt", "a.txt", "c.md"):
        (folder / name).write_text(f"{name}\nsecond line\n", encoding="utf-8")
    assert list(TextFile(folder)) == ["a.txt\nsecond line\n", "b.txt\nsecond line\n"]
    assert len(TextFile(folder)) == 2
    (folder / "b.txt").write_bytes("naïve".encode("latin-1"))
    with pytest.raises(TextError, match=r"b\.txt: not UTF-8"):
        list(TextFile(folder))
    for name, data in (("empty", b"\n \n"), ("latin", "naïve".encode("latin-1"))):
        (tmp_path / name).write_bytes(data)
    for name, says in (("empty", "empty"), ("latin", "not UTF-8"), ("gone", "no such file")):
        with pytest.raises(TextError, match=says):
            TextFile(tmp_path / name)


# --- what heads do to the loss ------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "bert", "t5", "vit"])
def test_importance_and_ablation_are_columns(folders: dict[str, Path], name: str) -> None:
    model, tokenizer = loaded(folders[name])
    shares: list[tuple[str, float]] = []
    seen = look(
        model,
        tokenizer,
        read(folders[name]),
        target=TARGET if name == "t5" else None,
        importance=True,
        ablation=True,
        report=lambda doing, share: shares.append((doing, share)),
    )
    assert {"importance", "ablation", "ablation_estimate"} <= {c["key"] for c in seen.columns}
    assert [doing for doing, _ in shares] == sorted(
        (doing for doing, _ in shares), key=["looking", "importance", "ablation"].index
    )
    assert max(share for doing, share in shares if doing == "looking") == 1.0
    assert shares[-1] == ("ablation", 1.0)
    row = seen.rows[-1]
    subject = subject_of(model, tokenizer, target=TARGET if name == "t5" else None)
    with torch.no_grad():
        sample = subject.sample(read(folders[name]), "it")
        whole = subject.mean_loss(model, sample)
        with ablate(model, {row["module"]: [row["head"]]}):
            without = subject.mean_loss(model, sample)
    assert row["ablation"] == pytest.approx(float(without - whole), abs=1e-9)
    assert row["importance"] == pytest.approx(abs(row["ablation_estimate"]), abs=1e-12)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_model_without_a_loss_goes_without_importance_and_says_how_to_give_one(
    folders: dict[str, Path],
) -> None:
    from transformers import BertModel

    _, tokenizer = load_folder(folders["bert"])
    model = BertModel.from_pretrained(folders["bert"]).eval()
    bare = look(model, tokenizer, TEXT, importance=True, ablation=True)
    assert bare.provenance["loss_text"] is None
    assert not {"importance", "ablation"} & bare.rows[0].keys()
    assert "BertModel has no loss" in bare.provenance["notice"]
    assert "BertForMaskedLM" in bare.provenance["notice"]
    assert "loss=lambda model, inputs" in bare.provenance["notice"]

    def loss(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        return model(**inputs).last_hidden_state.square().mean()

    seen = look(model, tokenizer, TEXT, importance=True, ablation=True, loss=loss)
    found = hw.importance(model, loss, [dict(tokenizer(TEXT, return_tensors="pt"))]).table()
    assert [r["importance"] for r in seen.rows] == pytest.approx([r["importance"] for r in found])
    assert all(isinstance(row["ablation"], float) for row in seen.rows)


def test_what_is_not_shown_is_named(folders: dict[str, Path]) -> None:
    """An encoder whose attention is in blocks: its layers are left out, the decoder's are not."""
    from transformers import LongT5Config, LongT5ForConditionalGeneration

    _, tokenizer = loaded(folders["t5"])
    sizes = {"d_model": 12, "d_kv": 4, "d_ff": 16, "num_heads": 3, "num_layers": 2}
    ends = {"decoder_start_token_id": 0, "eos_token_id": 2, "pad_token_id": 0}
    blocks = {"encoder_attention_type": "local", "local_radius": 4}
    config = LongT5Config(vocab_size=len(tokenizer), **sizes, **ends, **blocks)
    model = LongT5ForConditionalGeneration(config)
    seen = look(model, tokenizer, TEXT)
    assert {layer.name.split(".")[0] for layer in seen.layers} == {"decoder"}
    notice = seen.provenance["notice"]
    assert "Not shown: encoder.block.*.layer.*.LocalSelfAttention: the softmax of" in notice
    assert notice.count("Not shown") == 1


# --- other models -------------------------------------------------------------------------------


def test_a_module_of_ones_own(folders: dict[str, Path]) -> None:
    """A decoder that is called with ids alone, as nanoGPT and its kin are."""
    _, tokenizer = load_folder(folders["llama"])

    class Own(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(len(tokenizer), 12)
            self.qkv, self.head = torch.nn.Linear(12, 36), torch.nn.Linear(12, len(tokenizer))

        def forward(self, ids: Tensor) -> Tensor:
            q, k, v = self.qkv(self.embed(ids)).unflatten(-1, (3, 3, 4)).permute(2, 0, 3, 1, 4)
            attend = torch.nn.functional.scaled_dot_product_attention
            out = attend(q, k, v, is_causal=True)
            return self.head(out.transpose(1, 2).flatten(2))

    model = Own()
    seen = look(model, tokenizer, TEXT)
    assert (len(seen.rows), seen.layers[0].causal) == (3, True)
    ids = torch.tensor(tokenizer(TEXT, add_special_tokens=False)["input_ids"])
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(model(ids[None])[0, :-1], ids[1:])
    assert seen.provenance["loss_text"] == pytest.approx(float(loss), abs=1e-5)
    assert seen.streams[0].special == ()


def test_layers_that_share_their_weights_are_layers(tmp_path: Path) -> None:
    from transformers import AlbertConfig, AlbertForMaskedLM

    _, tokenizer = load_folder(write_folder("bert", tmp_path / "bert"))
    config = AlbertConfig(
        vocab_size=len(tokenizer),
        embedding_size=8,
        hidden_size=12,
        num_hidden_layers=3,
        num_attention_heads=3,
        intermediate_size=16,
    )
    seen = look(AlbertForMaskedLM(config).eval(), tokenizer, TEXT)
    assert [(row["layer"], row["head"]) for row in seen.rows] == [
        (layer, head) for layer in range(3) for head in range(3)
    ]
    assert [layer.name.rpartition(" (")[2] for layer in seen.layers][1:] == ["call 2)", "call 3)"]


def test_modes_are_left_as_they_were(folders: dict[str, Path]) -> None:
    model, tokenizer = load_folder(folders["bert"])
    model.train()
    model.bert.encoder.eval()
    modes = [module.training for module in model.modules()]
    look(model, tokenizer, TEXT)
    assert [module.training for module in model.modules()] == modes


def test_models_of_sound_are_refused() -> None:
    from transformers import WhisperConfig, WhisperModel

    config = WhisperConfig(
        vocab_size=20,
        d_model=8,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=8,
        decoder_ffn_dim=8,
        pad_token_id=0,
    )
    with pytest.raises(LookError, match="reads input_features"):
        look(WhisperModel(config), None, TEXT)


def test_models_with_two_towers_are_refused_and_their_towers_looked_at(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import CLIPConfig, CLIPModel

    sizes = {"hidden_size": 12, "intermediate_size": 16, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 3}
    _, tokenizer = load_folder(folders["bert"])
    _, processor = load_folder(folders["vit"])
    model = CLIPModel(
        CLIPConfig(
            text_config=sizes | {"vocab_size": len(tokenizer)},
            vision_config=sizes | {"image_size": 32, "patch_size": 8},
            projection_dim=8,
        )
    )
    model.save_pretrained(tmp_path / "clip")
    tokenizer.save_pretrained(tmp_path / "clip")
    picture = folders["vit"].parent / "picture.png"
    for what in (("--text", folders["bert"] / "config.json"), ("--image", picture)):
        code, out, err = run(capsys, "--model", tmp_path / "clip", *what, "--json")
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert "CLIPModel has separate towers" in err
        assert "model.text_model or model.vision_model" in err
    assert len(look(model.text_model, tokenizer, TEXT).rows) == 3
    processor.size = {"height": 32, "width": 32}
    seen = look(model.vision_model, processor, picture)
    assert (len(seen.rows), len(seen.streams[0].tokens)) == (3, 17)


def test_what_is_no_image_and_what_reads_none_is_refused(folders: dict[str, Path]) -> None:
    model, processor = load_folder(folders["vit"])
    _, tokenizer = load_folder(folders["bert"])
    picture = folders["vit"].parent / "picture.png"
    for reader, given, says in (
        (processor, b"x", r"text \(bytes\) is not an image"),
        (processor, TEXT, r"text \(str\) is not an image"),
        (None, picture, "tokenizer=None: ViTForImageClassification reads images"),
        (tokenizer, picture, "pass its image processor"),
    ):
        with pytest.raises(LookError, match=says):
            look(model, reader, given)


def test_windows_are_places_of_their_own(folders: dict[str, Path]) -> None:
    """What the terminal counts, the page counts too: the image's tokens, not a window's."""
    from transformers import SwinConfig, SwinModel

    _, processor = load_folder(folders["vit"])
    processor.size = {"height": 32, "width": 32}
    config = SwinConfig(
        image_size=32, patch_size=4, embed_dim=8, depths=[1], num_heads=[2], window_size=4
    )
    seen = look(SwinModel(config), processor, folders["vit"].parent / "picture.png")
    assert [(one.name, len(one.tokens)) for one in seen.streams] == [
        ("image", 64),
        ("16 positions", 16),
    ]
    assert "64 tokens of an image" in summary(seen, [])[0]


# --- the command --------------------------------------------------------------------------------


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of `headwise look`."""
    from headwise.cli.main import main

    code = main(["look", *map(str, arguments)])
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.mark.parametrize("name", NAMES)
def test_the_command_takes_every_folder(
    folders: dict[str, Path], name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "notes.txt"
    text.write_text(TEXT, encoding="utf-8")
    what = ("--image", read(folders[name])) if name == "vit" else ("--text", text)
    page, saved = tmp_path / "page.html", tmp_path / "look.json"
    code, out, err = run(capsys, "--model", folders[name], *what, "--out", page, "--save", saved)
    assert (code, err) == (0, "")
    seen = look(*load_folder(folders[name]), read(folders[name]))
    assert out.startswith(f"{name} on {Path(what[1]).name}: ")
    for row in seen.rows:
        assert f"L{row['layer']}H{row['head']} " in out
        assert f" {row['entropy']:.2f} " in out
    kept = load(saved)
    assert kept.rows == seen.rows
    assert [layer.name for layer in kept.layers] == [layer.name for layer in seen.layers]
    assert load(page).rows == seen.rows
    if name == "bart":
        assert "layer 2: model.decoder.layers.0.encoder_attn" in out


def test_texts_importance_ablation_and_json(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("so much naïve, so on\n\nand so much\n", encoding="utf-8")
    asked = ("--model", folders["llama"], "--texts", texts, "--dtype", "float64")
    code, out, err = run(capsys, *asked, "--importance", "--ablation", "--json")
    assert (code, err) == (0, "")
    rows = json.loads(out)
    assert len(rows) == 8
    for row in rows:
        for key in ("entropy", "first", "importance", "ablation"):
            assert isinstance(row[key], float)
            assert row[f"{key}_se"] > 0
    code, out, _ = run(capsys, *asked, "--out", tmp_path / "page.html")
    assert code == 0
    assert "of the first of 2 texts" in out


def test_two_results_are_compared(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, tokenizer = load_folder(folders["llama"])
    one = look(model, tokenizer, TEXT, text_name="one").save(tmp_path / "one.json")
    seen = look(model, tokenizer, "and on, and on", text_name="other")
    other = seen.save(tmp_path / "other.json")
    page = tmp_path / "both.html"
    code, out, err = run(capsys, "--compare", one, other, "--out", page)
    assert (code, err) == (0, "")
    assert out.startswith("A: llama on one\nB: llama on other\n")
    a, b = (load(path).provenance["loss_text"] for path in (one, other))
    assert out.splitlines()[2] == f"Loss: {a:.2f} → {b:.2f} nats on each token after the first"
    assert page.exists()
    half = look(model.half(), tokenizer, TEXT, text_name="one").save(tmp_path / "half.json")
    model.float()
    code, out, err = run(capsys, "--compare", one, half, "--out", page)
    assert (code, err) == (0, "")
    assert out.startswith("A: llama on one, float32\nB: llama on one, float16\n")
    assert not re.search(r"[-+]?\b0\.00\b", out)
    assert re.search(r" [-+]\d(\.\d+)?e-\d ", out)
    code, out, err = run(capsys, "--compare", one, other, "--json")
    assert (code, err) == (0, "")
    rows = json.loads(out)
    for row, before, after in zip(rows, load(one).rows, seen.rows, strict=True):
        assert row["first"] == pytest.approx(after["first"] - before["first"], abs=1e-12)
        assert row["labels"] == [
            [label["label"] for label in of["labels"]] for of in (before, after)
        ]
    bert = look(*load_folder(folders["bert"]), TEXT).save(tmp_path / "bert.json")
    code, out, err = run(capsys, "--compare", one, bert, "--json")
    assert (code, out) == (2, "")
    assert "no head in common" in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--model", "{llama}", "--context", "97"], "from 2 to 96"),
        (["--model", "{llama}", "--image", "{llama}/config.json"], "reads text"),
        (["--model", "{llama}", "--text", "{text}", "--texts", "{text}"], "give only one of them"),
        (["--model", "{llama}", "--text", "{text}", "--target", "so"], "no decoder"),
        (["--model", "{vit}", "--image", "{llama}/config.json"], "cannot be read as an image"),
        (["--model", "{vit}", "--image", "{tmp}/gone.png"], "gone.png: no such file"),
        (["--model", "{vit}", "--text", "{text}"], "reads images"),
        (
            ["--model", "{llama}", "--text", "{text}", "--dtype", "int8"],
            "--dtype must be one of float32, float16, bfloat16, float64, got int8",
        ),
        (["--model", "{llama}", "--text", "{text}", "--device", "tpu"], "--device must be cpu"),
        (["--model", "{llama}", "--texts", "{tmp}/gone"], "gone: no such file"),
        (["--compare", "{tmp}/gone", "{tmp}/gone"], "gone: cannot be read (No such file"),
        (["--compare", "{text}", "{text}"], "text"),
        (["--compare", "{text}", "{text}", "--model", "{llama}"], "--compare"),
        (["--model", "{llama}", "--text", "{text}", "--save", "{tmp}/no/a.json"], "cannot write"),
    ],
)
def test_bad_input_gives_one_line_and_code_2(
    folders: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    says: str,
) -> None:
    text = tmp_path / "text"
    text.write_text(TEXT, encoding="utf-8")
    names = {name: str(folder) for name, folder in folders.items()}
    given = [part.format(tmp=tmp_path, text=text, **names) for part in arguments]
    code, out, err = run(capsys, *given, "--out", tmp_path / "page.html")
    assert (code, out) == (2, "")
    assert says in err
    assert err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["text"]


def changed(folder: Path, to: Path, **changes: Any) -> Path:
    """A copy of a folder with another config."""
    import shutil

    shutil.copytree(folder, to)
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(config | changes))
    return to


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"architectures": ["LlamaForSpam"]}, "not a model of transformers"),
        ({"architectures": ["x'; rm"]}, "must be a list of class names"),
        ({"architectures": ["pipeline"]}, "not a model of transformers"),
        (
            {"architectures": ["Own"], "model_type": "own", "auto_map": {"AutoModel": "own.Own"}},
            "code in a model's folder is not run",
        ),
        ({"num_hidden_layers": 3}, "model.layers.2.input_layernorm.weight"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers=1,000,000,000,000, but the weights"),
        ({"num_labels": 10**12}, "num_labels=1,000,000,000,000, but the weights have"),
        ({"vocab_size": 40}, "embed_tokens"),
        ({"num_attention_heads": "many"}, "transformers cannot read it"),
    ],
)
def test_a_folder_that_cannot_be_read_is_one_line(
    folders: dict[str, Path], tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    folder = changed(folders["llama"], tmp_path / "changed", **changes)
    (folder / "own.py").write_text("raise SystemExit('this was run')")
    with pytest.raises(FolderError) as error:
        load_folder(folder)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_a_config_may_have_more_labels_than_there_are_weights(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    model, _ = load_folder(folders["llama"])
    numbers = sum(weight.numel() for weight in model.parameters())
    folder = changed(folders["llama"], tmp_path / "labels", num_labels=2 * numbers)
    assert load_folder(folder)[0].config.num_labels == 2 * numbers


def test_pickled_damaged_and_missing_files(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = changed(folders["bert"], tmp_path / "bert")
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(FolderError, match=r"model\.safetensors: damaged or truncated"):
        load_folder(folder)
    weights.rename(folder / "pytorch_model.bin")
    with pytest.raises(FolderError, match=r"pickled weights.*BertForMaskedLM"):
        load_folder(folder)
    weights.write_bytes(whole)
    for path in folder.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(FolderError, match=r"no tokenizer; copy the model's tokenizer\.json"):
        load_folder(folder)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(FolderError, match="transformers cannot read it"):
        load_folder(folder)
    folder = changed(folders["llama"], tmp_path / "llama")
    for path in folder.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(FolderError, match=r"no tokenizer; copy the model's tokenizer\.json"):
        load_folder(folder)
    folder = changed(folders["vit"], tmp_path / "vit")
    for path in folder.glob("*processor*"):
        path.unlink()
    with pytest.raises(FolderError, match=r"no image processor; copy .* preprocessor_config\.json"):
        load_folder(folder)


def test_a_tokenizer_of_another_model_is_refused(folders: dict[str, Path]) -> None:
    model, _ = load_folder(folders["bert"])
    _, tokenizer = load_folder(folders["llama"])
    with pytest.raises(LookError, match="do not belong together"):
        look(model, tokenizer, TEXT)


def test_delimiters_are_told_by_their_text(folders: dict[str, Path]) -> None:
    model, tokenizer = load_folder(folders["bert"])
    part = subject_of(model, tokenizer).sample(TEXT, "it").parts[0]
    assert part.delimiters is not None
    assert part.separators is not None
    told, added = (
        [token for token, mark in zip(part.stream.tokens, marks, strict=True) if mark]
        for marks in (part.delimiters, part.separators)
    )
    assert set(told) == {",", "."}
    assert all(map(is_delimiter, told))
    assert added == ["[SEP]"]  # [CLS] is the first token, and has a figure of its own
    (row, *_) = look(model, tokenizer, TEXT).rows
    assert row["cls"] == row["first"]
    assert "separators" in row
    decoder = [r for r in look(*load_folder(folders["llama"]), TEXT).rows if "cls" in r]
    assert not decoder


def test_a_look_goes_through_a_file_and_back(folders: dict[str, Path]) -> None:
    seen = look(*load_folder(folders["t5"]), TEXT, target=TARGET)
    again = Look.from_json(seen.to_json())
    assert again.rows == seen.rows
    assert again.offsets == seen.offsets
    assert seen.similarity is not None
    assert again.similarity is not None
    np.testing.assert_allclose(again.similarity, seen.similarity, atol=0.003)


def test_nothing_optional_is_needed_for_gpt2(folders: dict[str, Path], tmp_path: Path) -> None:
    """In a process without transformers, plotly and pillow: the built-in model, and clear words."""
    code = f"""
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("transformers", "plotly", "PIL"):
            raise ModuleNotFoundError(f"{{name}} is blocked", name=name)
sys.meta_path.insert(0, Blocked())
from headwise.cli import main
assert main(["look", "--json", "--context", "9"]) == 0
assert main(["look", "--json", "--model", {str(folders["bert"])!r}]) == 2
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)) == 12
    assert "pip install 'headwise[hf]'" in done.stderr
    assert sum(line.startswith("headwise: ") for line in done.stderr.splitlines()) == 1

"""A look as a file: what comes back is what was saved, and nothing else is taken for a look."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headwise.report.codec import budget, gzip_b64, pack, pack_whole, ungzip_b64, unpack
from headwise.report.page import write_page
from headwise.report.schema import Look, LookFileError, load
from looks import decoder, encoder_decoder, image, large

LOOKS = {"decoder": decoder(), "encoder and decoder": encoder_decoder(), "image": image()}


@pytest.fixture(params=LOOKS, ids=lambda name: name.replace(" ", "-"))
def look(request: pytest.FixtureRequest) -> Look:
    return LOOKS[request.param]


def test_what_is_read_is_what_was_saved(look: Look, tmp_path: Path) -> None:
    found = load(look.save(tmp_path / "look.json"))
    assert (found.rows, found.provenance) == (look.rows, look.provenance)
    assert (found.columns, found.rules, found.offsets) == (look.columns, look.rules, look.offsets)
    for one, other in zip(found.streams, look.streams, strict=True):
        assert one.__dict__ == other.__dict__
    for one, other in zip(found.layers, look.layers, strict=True):
        names = ("name", "kind", "causal", "queries", "keys", "heads")
        assert all(getattr(one, name) == getattr(other, name) for name in names)
        assert (one.top_keys == other.top_keys).all()
        # Square roots in 254 steps are off by half a step, so weights by at most a step of theirs.
        step = 1 / 254
        np.testing.assert_allclose(np.sqrt(one.maps), np.sqrt(other.maps), atol=step / 2 + 1e-6)
        np.testing.assert_allclose(one.top_weights, other.top_weights, atol=0.5 / 65534 + 1e-7)
        for name in ("entropy", "received"):
            largest = getattr(other, name).max()
            np.testing.assert_allclose(
                getattr(one, name), getattr(other, name), atol=largest * step
            )
        assert (one.offsets is None) == (other.offsets is None) == (other.kind == "cross")
    assert found.similarity is not None
    assert look.similarity is not None
    np.testing.assert_allclose(found.similarity, look.similarity, atol=0.5 / 254 + 1e-6)


def test_saving_again_changes_nothing(look: Look) -> None:
    once = Look.from_json(look.to_json())
    assert Look.from_json(once.to_json()).to_json() == once.to_json()
    again = Look.from_json(once.to_json())
    for one, other in zip(once.layers, again.layers, strict=True):
        np.testing.assert_allclose(one.maps, other.maps, atol=1e-6)


def test_a_page_is_read_as_a_look(look: Look, tmp_path: Path) -> None:
    page = write_page(look, tmp_path / "page.html")
    assert load(page).to_json() == Look.from_json(look.to_json()).to_json()


def test_figures_that_are_no_numbers_are_null() -> None:
    look = decoder(1, 2, 5)
    look.rows[0]["entropy"] = math.nan
    assert Look.from_json(look.to_json()).rows[0]["entropy"] is None


def test_queries_that_attend_to_nothing_stay_unknown() -> None:
    look = decoder(1, 2, 5)
    entropy = look.layers[0].entropy.copy()
    entropy[1, :2] = math.nan
    similarity = np.array([[1.0, math.nan], [math.nan, 1.0]])
    changed = replace(look, layers=[replace(look.layers[0], entropy=entropy)])
    found = Look.from_json(replace(changed, similarity=similarity).to_json())
    assert np.isnan(found.layers[0].entropy).tolist() == [[False] * 5, [True] * 2 + [False] * 3]
    assert found.similarity is not None
    assert np.isnan(found.similarity).tolist() == [[False, True], [True, False]]


def test_a_large_look_is_kept_in_blocks() -> None:
    look = large(layers=16, heads=32, tokens=320)
    limit = budget(512, 320)
    assert limit.positions < 320
    found = Look.from_json(look.to_json()).layers[0]
    assert found.entropy.shape == found.received.shape == (32, limit.positions)
    first = math.ceil(320 / limit.positions)  # tokens in the first block
    expected = look.layers[0].received[:, :first].mean(1)
    np.testing.assert_allclose(found.received[:, 0], expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(("heads", "tokens"), [(1, 2), (12, 128), (144, 1024), (1024, 512)])
def test_a_budget_is_kept(heads: int, tokens: int) -> None:
    found = budget(heads, tokens)
    assert 2 <= found.map_side <= min(256, tokens)
    assert heads * found.map_side**2 <= 800_000
    assert heads * tokens * found.top_keys <= 600_000
    assert 2 <= found.positions <= tokens
    assert heads * found.positions <= 50_000
    assert found.top_keys >= 1


def test_a_budget_of_too_many_tokens_keeps_no_single_keys() -> None:
    assert budget(1024, 4096).top_keys == 0


# --- files that hold no look -----------------------------------------------------------------


def changed(**values: Any) -> str:
    return json.dumps(json.loads(decoder(1, 2, 5).to_json()) | values)


def without_layers() -> str:
    made = json.loads(decoder(1, 2, 5).to_json())
    return json.dumps({key: value for key, value in made.items() if key != "layers"})


def with_damaged_maps(data: str) -> str:
    made = json.loads(decoder(1, 2, 5).to_json())
    made["layers"][0]["maps"]["data"] = data
    return json.dumps(made)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not a look that headwise saved"),
        ("{", "not a look that headwise saved"),
        ("[1, 2]", "does not begin with the format 'headwise look 1'"),
        ('{"format": "other"}', "does not begin with the format"),
        (without_layers(), "'layers' is missing"),
        (changed(layers=[]), "2 rows do not match the number of heads"),
        (changed(rows="none"), "rows is str, expected list"),
        (changed(streams=[]), "list index out of range"),
        (with_damaged_maps("AAAA"), "packed data are damaged"),
        (with_damaged_maps("*"), "packed data are damaged"),
        (with_damaged_maps(gzip_b64(b"1")), "1 bytes do not match shape \\[2, 5, 5\\]"),
        ("<html></html>", "not a look that headwise saved"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_another_file_is_refused_in_one_sentence(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(LookFileError, match=message) as refused:
        load(path)
    assert str(refused.value).startswith(str(path))
    assert "\n" not in str(refused.value)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(LookFileError, match="not UTF-8 text"):
        load(path)


def test_a_page_of_two_looks_is_refused(tmp_path: Path) -> None:
    page = write_page(decoder(), tmp_path / "page.html", other=decoder(seed=1))
    with pytest.raises(LookFileError, match="a page that compares 2 looks; pass a file or"):
        load(page)


def test_a_save_that_fails_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "look.json"
    path.write_text("old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        decoder(1, 2, 5).save(path)
    assert [one.name for one in tmp_path.iterdir()] == ["look.json"]
    assert path.read_text() == "old"


# --- grids -----------------------------------------------------------------------------------


def test_the_ends_of_a_grid_are_exact() -> None:
    values = np.array([[0.0, 0.3, 1.0], [0.0, 0.0, 0.0], [math.nan, 5.0, 1e-9]])
    for root in (False, True):
        found = unpack(pack(values, root=root))
        assert found[:2, 0].tolist() == [0.0, 0.0]
        assert (found[0, 2], found[2, 1]) == (1.0, 5.0)
        assert np.isnan(found[2, 0])
        assert found[1].tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("highest", [3, 254, 255, 65534, 65535, 70_000])
def test_whole_numbers_come_back_exactly(highest: int) -> None:
    values = np.array([[-1, 0, highest]])
    assert unpack(pack_whole(values)).tolist() == values.tolist()


def test_the_same_bytes_give_the_same_text() -> None:
    assert gzip_b64(b"heads") == gzip_b64(b"heads")
    assert ungzip_b64(gzip_b64(b"heads")) == b"heads"

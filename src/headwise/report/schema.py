"""The result of `look()`: the data on every head that pages and tables show."""

from __future__ import annotations

import base64
import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from .._io import write_whole
from .._tables import PlotBackend, frame_of, heads_figure
from .._text import Brief
from .codec import BYTE, TWO_BYTES, budget, finite, pack, pack_whole, pooled, ungzip_b64, unpack
from .page.parts import framed
from .page.report import render_page, titles

if TYPE_CHECKING:
    from pandas import DataFrame

FORMAT = "headwise look 1"

_DAMAGE = (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError)
"""The errors that reading a damaged document raises."""

FINE_ENTRIES = 150_000  # up to this number of top weights, each has a resolution of 1/65534
FINE_PAIRS = 512**2 // 2  # up to this many pairs of heads, similarity has a resolution of 1/254


FACTS = {
    **dict.fromkeys(("model", "text", "title", "architecture"), str),
    **dict.fromkeys(("parameters", "context", "tokens", "texts"), int | None),
    "versions": dict,
}
"""The types of facts in the provenance that pages rely on."""


class LookFileError(ValueError):
    """Raised if a file does not hold a look; the message names the file, the reason and a fix."""


@dataclass(frozen=True, eq=False, repr=False)
class Stream(Brief):
    """A sequence of queries or keys: the tokens of a text, or the patches of an image.

    name: `"text"`, `"encoder"`, `"decoder"`, `"image"`.
    tokens: each token as text; bytes that are not whole characters as `\\xe2`. For an image, its
        special tokens by name and its patches as `row,column`.
    special: the indices of the tokens that the tokenizer added (`[CLS]`, `<s>`).
    grid: for an image, the rows and columns of its patches, which are the stream's last tokens.
    picture: for an image, a PNG of it, at most a few hundred pixels per side.
    pieces: the original text, cut where tokens end; the pieces joined are the text. The piece is
        empty for tokens that the tokenizer added and for later bytes of a character. For tokenizers
        without offsets, and for generated text, it is the decoded text; None if there is no text.
    """

    name: str
    tokens: list[str]
    special: tuple[int, ...] = ()
    grid: tuple[int, int] | None = None
    picture: bytes | None = None
    pieces: list[str] | None = None


@dataclass(frozen=True, eq=False, repr=False)
class Layer(Brief):
    """One attention module on the first text: the attention of its H heads from T queries to S
    keys.

    queries, keys: the indices of their streams in `Look.streams`.
    maps: `[H, n, m]` in 0…1. If n = T and m = S, the attention weights; else means over blocks:
        token i is in block `i · n // T`; a cell is the mean over the queries of a block of their
        total weight on a block of keys, so rows sum to 1 (minus the weight on a learned sink).
    top_keys, top_weights: `[H, T, k]`, the keys that each query attends to most, with their
        exact weights, in descending order; −1 and 0 if there are fewer keys.
    offsets: `[H, b]`, the fraction of the weight in each distance bin; `Look.offsets` has the first
        distance of each bin; None for cross-attention.
    entropy: `[H, T]`, in nats; NaN for queries without a visible key.
    received: `[H, S]`, the attention that each key receives, summed over queries.
    repeat: `[H, n, n]`, the attention weights on the short piece of repeated random tokens in
        `Look.repeats`; None for cross-attention and for images.
    visible: `[T]`, the number of keys that each query may attend to; None for all keys or,
        if `causal`, for all keys up to the query.

    In files, and when read from them, arrays have 8 bits per number (16 for top weights of small
    models). For large models, entropy and received are means over blocks of tokens (`budget()`).
    """

    name: str
    kind: Literal["self", "cross"]
    causal: bool
    queries: int
    keys: int
    maps: np.ndarray
    top_keys: np.ndarray
    top_weights: np.ndarray
    entropy: np.ndarray
    received: np.ndarray
    offsets: np.ndarray | None = None
    repeat: np.ndarray | None = None
    visible: np.ndarray | None = None

    @property
    def heads(self) -> int:
        """Return the number of heads."""
        return self.maps.shape[0]


@dataclass(frozen=True, eq=False, repr=False)
class Look:
    """The metrics and maps of every head of a model on one text or many.

    rows: one dict per head, in order of layer and head: `layer` (index in `layers`), `head`,
        `module` (its qualified name), `labels` (a list of dicts `label`, `key`, `score`,
        `threshold`, `coverage`; empty for an unlabeled head), then a number for each of `columns`,
        with `<name>_coverage` (fraction of queries with a target) and `<name>_se` (standard error
        over texts), if defined. A metric that a head lacks is None.
    layers: each attention module on the first text.
    streams: the streams that were read; `Layer.queries` and `Layer.keys` are indices into them.
    offsets: the first distance of each bin of `Layer.offsets`; each bin ends where the next begins.
    similarity: `[N, N]` for all heads in the order of rows; 1 for equal maps; None if not computed.
    repeats: the short piece of random tokens of `Layer.repeat`, for each of `streams` that has one.
    composition: the pairs of heads with the largest composition of each kind, `"K"`, `"Q"` and
        `"V"`: lists of `[writer, reader, score]`, indices into `rows`, the largest score first; and
        `"unrelated"`, the expected score of two random heads. Or `"reason"`, why there are none.
    columns, rules: the definitions of metrics and labels (dicts of `catalog.Column` and
        `LabelRule`), so that the data can be read without this version of headwise.
    provenance: facts about model, texts and settings; plain strings, numbers, lists and dicts.
    """

    rows: list[dict[str, Any]]
    layers: list[Layer]
    streams: list[Stream]
    provenance: dict[str, Any]
    columns: list[dict[str, Any]] = field(default_factory=list)
    rules: list[dict[str, Any]] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    similarity: np.ndarray | None = None
    repeats: list[Stream] = field(default_factory=list)
    composition: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        name = titles([self.provenance])[0]
        heads, layers = len(self.rows), len(self.layers)
        return (
            f"<Look: {name}, {heads} head{'s' * (heads != 1)} in {layers} "
            f"layer{'s' * (layers != 1)}; a notebook shows it; .save(path), .to_pandas()>"
        )

    def to_pandas(self) -> DataFrame:
        """Return `rows` as a pandas `DataFrame`, a row per head; `labels` are lists of names.

        Raises:
            ImportError: pandas is not installed.
        """

        def table() -> list[dict[str, Any]]:
            names = [", ".join(one["label"] for one in row["labels"]) for row in self.rows]
            return [{**row, "labels": name} for row, name in zip(self.rows, names, strict=True)]

        return frame_of("look", table)

    def plot(self, metric: str | None = None, *, backend: PlotBackend = "plotly") -> Any:
        """Draw one metric of every head: layers down, heads across.

        Args:
            metric: a key of `columns`. Default: the first.
            backend: `"plotly"` for an interactive figure, `"matplotlib"` for a static one.

        Returns:
            A Plotly or a matplotlib `Figure`.

        Raises:
            ImportError: the library is not installed.
            ValueError: the metric or the backend does not exist.
        """
        keys = [column["key"] for column in self.columns]
        rows = [{key: row.get(key) for key in ("layer", "head", *keys)} for row in self.rows]
        titles = {one["key"]: one["title"] for one in self.columns}
        return heads_figure(rows, metric, titles, backend)

    def _repr_html_(self) -> str:
        """Return the page in an iframe."""
        return framed(render_page(self))

    def document(self) -> dict[str, Any]:
        """Return the content of `to_json()` as a dict."""
        return {
            "format": FORMAT,
            "provenance": finite(self.provenance),
            "columns": self.columns,
            "rules": self.rules,
            "rows": finite(self.rows),
            "offsets": self.offsets,
            "streams": [_stream(stream) for stream in self.streams],
            "layers": [_layer(self, layer) for layer in self.layers],
            "similarity": _similarity(self.similarity),
            "repeats": [_stream(stream) for stream in self.repeats],
            "composition": self.composition,
        }

    def to_json(self) -> str:
        """Return the look as one JSON document; numbers that are not finite are `null`.

        Rows are exact. Arrays are grids (see `headwise.report.codec`) with the resolution given in
        `Layer`.
        """
        return json.dumps(self.document(), ensure_ascii=False, allow_nan=False)

    @staticmethod
    def from_json(text: str) -> Look:
        """Return the look in a document that `to_json` wrote.

        Raises:
            LookFileError: the text is not such a document.
        """
        try:
            return _look_of(json.loads(text))
        except (*_DAMAGE, MemoryError) as error:
            raise LookFileError(f"not a look that headwise saved ({_explain(error)})") from error

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write `to_json()` to a file, completely or not at all."""
        # A lone surrogate cannot be encoded in UTF-8; JSON has an escape for it.
        path, content = Path(path), self.to_json().encode("utf-8", "backslashreplace")
        write_whole(path.parent, {path.name: lambda part: part.write_bytes(content)})
        return path


def load(path: str | os.PathLike[str]) -> Look:
    """Read the look in a file that `Look.save` wrote, or in a page of `headwise look`.

    Raises:
        LookFileError: the file does not exist, contains no look, or is a page that compares two.
    """
    try:
        text = Path(path).read_bytes().decode("utf-8")
        if found := re.search(r'<script type="text/plain" id="results">([^<]*)</script>', text):
            text = _only_one(json.loads(ungzip_b64(found[1])))
        return Look.from_json(text)
    except OSError as error:
        raise LookFileError(f"{path}: cannot be read ({error.strerror})") from error
    except _DAMAGE as error:
        raise LookFileError(
            f"{path}: {_explain(error)}; pass a file or a page written by `headwise look`"
        ) from error


def _only_one(looks: list[dict[str, Any]]) -> str:
    _must_be(list, looks, "the data of the page")
    if len(looks) != 1:
        raise LookFileError(f"a page that compares {len(looks)} looks")
    return json.dumps(looks[0])


def _explain(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"{error} is missing"
    return "not UTF-8 text" if isinstance(error, UnicodeDecodeError) else str(error)


# --- as a document ---------------------------------------------------------------------------


def _stream(stream: Stream) -> dict[str, Any]:
    picture = stream.picture and base64.b64encode(stream.picture).decode("ascii")
    grid = stream.grid and list(stream.grid)
    return vars(stream) | {"special": list(stream.special), "grid": grid, "picture": picture}


_PLAIN = ("name", "kind", "causal", "queries", "keys")
"""The fields of a layer that are stored unchanged."""


def _layer(look: Look, layer: Layer) -> dict[str, Any]:
    heads = sum(other.heads for other in look.layers)
    tokens = max(layer.top_keys.shape[1], layer.received.shape[1])
    positions = budget(heads, tokens).positions
    fine = heads * layer.top_weights[0].size <= FINE_ENTRIES
    small = layer.repeat is not None and heads * layer.repeat[0].size <= FINE_ENTRIES
    levels = TWO_BYTES if small else BYTE
    return {
        **{key: getattr(layer, key) for key in _PLAIN},
        "maps": pack(layer.maps, root=True),
        "top_keys": pack_whole(layer.top_keys),
        "top_weights": pack(layer.top_weights, TWO_BYTES if fine else BYTE),
        "entropy": pack(pooled(layer.entropy, positions)),
        "received": pack(pooled(layer.received, positions), root=True),
        "offsets": None if layer.offsets is None else pack(layer.offsets, root=True),
        "repeat": None if layer.repeat is None else pack(layer.repeat, levels, root=True),
        "visible": None if layer.visible is None else layer.visible.tolist(),
    }


def _similarity(values: np.ndarray | None) -> dict[str, Any] | None:
    """Return the pairs above the diagonal; the matrix is symmetric, its diagonal 1."""
    if values is None:
        return None
    above = values[np.triu_indices(len(values), 1)]
    return {"heads": len(values), **pack(above[None], BYTE if above.size <= FINE_PAIRS else 31)}


def _look_of(document: dict[str, Any]) -> Look:
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ValueError(f"it does not begin with the format {FORMAT!r}")
    _check_kinds(document)
    look = Look(
        rows=document["rows"],
        layers=[_layer_of(layer) for layer in document["layers"]],
        streams=[_stream_of(stream) for stream in document["streams"]],
        provenance=document["provenance"],
        columns=document["columns"],
        rules=document["rules"],
        offsets=document["offsets"],
        similarity=_similarity_of(document["similarity"]),
        repeats=[_stream_of(stream) for stream in document.get("repeats", [])],
        composition=document.get("composition", {}),
    )
    if len(look.rows) != sum(layer.heads for layer in look.layers):
        raise ValueError(f"{len(look.rows)} rows do not match the number of heads")
    for layer in look.layers:
        read = look.streams[layer.queries], look.streams[layer.keys]
        if layer.top_keys.shape[1] != len(read[0].tokens):
            raise ValueError(f"the queries of {layer.name} do not match the number of tokens")
        repeat = layer.repeat
        if repeat is not None and len(look.repeats[layer.queries].tokens) != len(repeat[0]):
            raise ValueError(f"{layer.name}: its map of repeats does not match their tokens")
    return look


def _check_kinds(document: dict[str, Any]) -> None:
    """Check the types of the values in a document.

    Raises:
        KeyError, TypeError: a value is missing or has the wrong type.
    """
    for part in ("rows", "columns", "rules", "offsets", "streams", "layers"):
        _must_be(list, document[part], part)
    _must_be(dict, document["provenance"], "provenance")
    for name, value in document["provenance"].items():
        _must_be(FACTS.get(name, object), value, name)
    for column in document["columns"]:
        _must_be(str, column["key"], "a column's key")
    for row in document["rows"]:
        figures = dict(row)
        for name, kind in (("layer", int), ("head", int), ("module", str), ("labels", list)):
            _must_be(kind, figures.pop(name), name)
        for label in row["labels"]:
            _must_be(str, label["label"], "a label")
        for name, value in figures.items():
            _must_be(int | float | None, value, name)
    for stream in [*document["streams"], *document.get("repeats", [])]:
        _must_be(str, stream["name"], "a stream's name")
        for token in [*stream["tokens"], *(stream.get("pieces") or [])]:
            _must_be(str, token, "a token")
    for writer, reader, score in _pairs(document.get("composition", {})):
        _must_be(int | float, score, "a score of composition")
        if not 0 <= min(writer, reader) <= max(writer, reader) < len(document["rows"]):
            raise TypeError(f"composition pairs rows {writer} and {reader}, which do not exist")
    for layer in document["layers"]:
        _must_be(str, layer["name"], "a layer's name")
        if min(layer["queries"], layer["keys"]) < 0:
            raise TypeError(f"{layer['name']} has a negative stream index")


def _pairs(composition: dict[str, Any]) -> list[list[Any]]:
    if composition and "reason" not in composition:
        _must_be(float, composition["unrelated"], "the score of unrelated heads")
    return [pair for kind in "KQV" for pair in composition.get(kind, [])]


def _must_be(kind: Any, value: Any, name: str) -> None:
    if not isinstance(value, kind):
        wanted = getattr(kind, "__name__", kind)
        raise TypeError(f"{name} is {type(value).__name__}, expected {wanted}")


def _stream_of(document: dict[str, Any]) -> Stream:
    picture = document["picture"] and base64.b64decode(document["picture"])
    grid = document["grid"] and (document["grid"][0], document["grid"][1])
    pieces = document.get("pieces")
    if pieces is not None and len(pieces) != len(document["tokens"]):
        raise ValueError(f"{len(pieces)} pieces of text do not match the number of tokens")
    return Stream(
        document["name"], document["tokens"], tuple(document["special"]), grid, picture, pieces
    )


def _layer_of(document: dict[str, Any]) -> Layer:
    arrays = ("maps", "top_keys", "top_weights", "entropy", "received")
    fields = {key: document[key] for key in _PLAIN}
    fields |= {key: unpack(document[key]) for key in arrays}
    for key in ("offsets", "repeat"):  # files of earlier versions have no repeat
        fields[key] = None if document.get(key) is None else unpack(document[key])
    fields["visible"] = None if document.get("visible") is None else np.array(document["visible"])
    return Layer(**fields)


def _similarity_of(document: dict[str, Any] | None) -> np.ndarray | None:
    if document is None:
        return None
    values = np.eye(document["heads"], dtype=np.float32)
    values[np.triu_indices(document["heads"], 1)] = unpack(document)[0]
    return np.maximum(values, values.T)

"""Looks made up for tests of the page: valid in every array, of all kinds of models, by seed."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from typing import Any

import numpy as np

from headwise.report.codec import budget
from headwise.report.schema import Layer, Look, Stream

WORDS = ["the", "of", "and", "a", "to", "in", "is", "that", "for", "it", "as", "was", "with", "who"]
COLUMNS = [
    ("entropy", "Entropy", "entropy", "nats", "H_{i} = −Σ_{j} p_{ij} ln p_{ij}"),
    ("entropy_share", "Normalized entropy", "normalized entropy", "share", "H_{i} / ln n_{i}"),
    ("first", "First token", "first", "share", "p_{i0}"),
    ("previous", "Previous token", "previous", "share", "p_{i,i−1}"),
    ("self", "Itself", "self", "share", "p_{ii}"),
    ("same_token", "Same token", "same", "share", "Σ_{j} p_{ij} over j < i with t_{j} = t_{i}"),
    (
        "induction_random",
        "Induction on repeated random tokens",
        "induction",
        "share",
        "Σ_{j} p_{ij}",
    ),
    ("distance", "Mean distance", "distance", "tokens", "Σ_{j} p_{ij} |i − j|"),
    ("importance", "Importance by gradient", "importance", "nats", "E |⟨o_{h}, ∂L/∂o_{h}⟩|"),
    ("ablation", "Change of the loss when ablated", "ablation", "nats", "L_{without h} − L"),
]
RULES = [
    ("induction", "ind.", "induction_random", "≥", 0.4, "looks at what came next last time"),
    ("previous token", "prev.", "previous", "≥", 0.4, "looks one token back"),
    ("first token", "first", "first", "≥", 0.5, "rests on the first token: a sink"),
    ("self", "self", "self", "≥", 0.4, "stays on its own token"),
    ("broad", "broad", "entropy_share", "≥", 0.8, "spreads nearly evenly over all it can see"),
    ("local", "local", "distance", "≤", 6.0, "stays within a few tokens"),
]
OFFSETS = [0, *(1 << b for b in range(11))]


def decoder(
    layers: int = 2,
    heads: int = 3,
    tokens: list[str] | int = 23,
    seed: int = 0,
    scores: bool = True,
    fine: bool = True,
) -> Look:
    """A causal language model; `scores` for importance and ablation; `fine` for maps by token."""
    shown = words(tokens, seed) if isinstance(tokens, int) else tokens
    kinds = [("self", True, 0, 0, heads)] * layers
    names = [f"transformer.h.{n}.attn" for n in range(layers)]
    return made_up(names, kinds, [Stream("text", shown)], seed, scores, fine)


def large(layers: int = 32, heads: int = 32, tokens: int = 512, seed: int = 3) -> Look:
    """A model of 1,024 heads. One layer's arrays stand for all of them, which costs a file as much
    as others would: each layer is packed on its own."""
    draw = np.random.default_rng(seed)
    sizes = budget(layers * heads, tokens)
    made = [
        parts(attention(draw, tokens, tokens, causal=True), sizes.map_side, sizes.top_keys)
        for _ in range(heads)
    ]
    joined = [np.stack(part) for part in zip(*made, strict=True)]
    small = decoder(layers, heads, 12, seed)
    names = [layer.name for layer in small.layers]
    shares = draw.uniform(size=(layers * heads, layers * heads))
    return replace(
        small,
        layers=[Layer(name, "self", True, 0, 0, *joined[:5], offsets=joined[5]) for name in names],
        streams=[Stream("text", words(tokens, seed))],
        similarity=np.maximum((shares + shares.T) / 2, np.eye(layers * heads)),
    )


def encoder_decoder(seed: int = 1) -> Look:
    """An encoder of 4 heads that looks both ways, a decoder of 3 heads with cross-attention."""
    encoder = Stream("encoder", ["<s>", *words(17, seed), "</s>"], (0, 18))
    streams = [encoder, Stream("decoder", ["<s>", *words(10, seed + 1)], (0,))]
    kinds = [("self", False, 0, 0, 4)] * 2
    names = [f"model.encoder.layers.{n}.self_attn" for n in range(2)]
    for n in range(2):
        kinds += [("self", True, 1, 1, 3), ("cross", False, 1, 0, 3)]
        names += [f"model.decoder.layers.{n}.{part}_attn" for part in ("self", "encoder")]
    return made_up(names, kinds, streams, seed, scores=False)


def image(seed: int = 2) -> Look:
    """A vision transformer: a class token and 4 × 6 patches of a picture."""
    patches = [f"{row},{column}" for row in range(4) for column in range(6)]
    stream = Stream("image", ["[CLS]", *patches], (0,), (4, 6), picture())
    kinds = [("self", False, 0, 0, 5)] * 3
    names = [f"vit.encoder.layer.{n}.attention" for n in range(3)]
    return made_up(names, kinds, [stream], seed, scores=False)


def words(count: int, seed: int) -> list[str]:
    """Tokens as a tokenizer gives them: a space before a word, some of them line ends."""
    drawn = np.random.default_rng(seed).choice(WORDS, count)
    return [f" {word}" if n % 11 else f"{word}\n" for n, word in enumerate(drawn)]


def picture() -> bytes:
    """A sky, a sun and a hill, as PNG."""
    from PIL import Image

    y, x = np.mgrid[0:160, 0:240]
    sky = np.stack([90 + y // 2, 140 + y // 3, 210 - y // 4], -1)
    sky[(x - 180) ** 2 + (y - 45) ** 2 < 600] = (250, 205, 70)
    sky[y > 120 - 30 * np.sin(x / 50)] = (60, 120, 70)
    content = io.BytesIO()
    Image.fromarray(sky.astype(np.uint8)).save(content, "png")
    return content.getvalue()


def made_up(
    names: list[str],
    kinds: list[Any],
    streams: list[Stream],
    seed: int,
    scores: bool = True,
    fine: bool = True,
) -> Look:
    """A look whose every array follows from one random attention matrix a head."""
    draw = np.random.default_rng(seed)
    total = sum(kind[4] for kind in kinds)
    sizes = budget(total, max(len(stream.tokens) for stream in streams))
    layers, rows = [], []
    for number, (name, (kind, causal, queries, keys, heads)) in enumerate(
        zip(names, kinds, strict=True)
    ):
        lengths = len(streams[queries].tokens), len(streams[keys].tokens)
        weights = [attention(draw, *lengths, causal) for _ in range(heads)]
        made = [parts(p, sizes.map_side if not fine else 1024, sizes.top_keys) for p in weights]
        joined = [np.stack(part) for part in zip(*made, strict=True)]
        offsets = joined.pop() if kind == "self" else None
        layers.append(Layer(name, kind, causal, queries, keys, *joined[:5], offsets=offsets))
        for head, p in enumerate(weights):
            figures = measured(p, kind, draw, scores)
            row = {"layer": number, "head": head, "module": name, "labels": labels(figures)}
            rows.append(row | figures)
    columns = ("key", "title", "short", "unit", "formula")
    rules = ("label", "brief", "key", "sign", "threshold", "why")
    shown = COLUMNS if scores else COLUMNS[:-2]
    maps = np.stack([squared(layer.maps[h]) for layer in layers for h in range(layer.heads)])
    long = np.linalg.norm(maps, axis=1, keepdims=True)
    return Look(
        rows=rows,
        layers=layers,
        streams=streams,
        provenance={
            "model": "made up",
            "text": "words drawn by chance",
            "notice": "Only the first tokens of the text are shown: the context ends there.",
            "seed": seed,
            "dtype": "float32",
            "device": "cpu",
            "similarity": "cosine of the maps",
            "versions": {"headwise": "0", "torch": "2"},
            "options": ["one", "two"],
        },
        columns=[
            dict(zip(columns, column, strict=True)) | {"brief": column[2], "meaning": "Made up."}
            for column in shown
        ],
        rules=[dict(zip(rules, rule, strict=True)) for rule in RULES],
        offsets=OFFSETS,
        similarity=(maps / long) @ (maps / long).T,
    )


def attention(draw: np.random.Generator, queries: int, keys: int, causal: bool) -> np.ndarray:
    """A matrix `[T, S]` of weights with a leaning of its own: back, first, near, onto, or wide."""
    i, j = np.arange(queries)[:, None], np.arange(keys)
    place = i * keys / queries
    leaning = draw.integers(6)
    logits = draw.normal(0, draw.uniform(0.3, 2.5), (queries, keys)).astype(np.float32)
    strength = draw.uniform(2, 9)
    if leaning == 0:
        logits += strength * (np.abs(place - 1 - j) < 0.6)
    elif leaning == 1:
        logits += strength * (j == 0)
    elif leaning == 2:
        logits -= np.abs(place - j) / strength
    elif leaning == 3:
        logits += strength * (draw.random(keys) < 0.06)
    elif leaning == 4:
        logits += strength * (np.abs(place - j) < 0.6)
    if causal:
        logits[j > i] = -np.inf
    p = np.exp(logits - logits.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


def parts(p: np.ndarray, side: int, k: int) -> list[np.ndarray]:
    """The map, top keys and weights, entropy, received and offsets of one matrix."""
    queries, keys = p.shape
    top = np.argsort(-p, axis=1, kind="stable")[:, :k]
    weights = np.take_along_axis(p, top, 1)
    logs = np.log(np.where(p > 0, p, 1))
    distance = np.arange(queries)[:, None] - np.arange(keys)
    bins = np.searchsorted(OFFSETS, np.maximum(distance, 0), side="right") - 1
    behind = np.where(distance >= 0, p, 0).ravel()
    far = np.bincount(bins.ravel(), behind, minlength=len(OFFSETS)) / queries
    shown = np.where(weights > 0, top, -1)
    return [blocks(p, side), shown, weights, -(p * logs).sum(1), p.sum(0), far]


def blocks(p: np.ndarray, side: int) -> np.ndarray:
    """Means over blocks of queries of the mass on blocks of keys."""
    for axis in (0, 1):
        length = p.shape[axis]
        n = min(length, side)
        starts = np.ceil(np.arange(n) * length / n).astype(int)
        p = np.add.reduceat(p, starts, axis=axis)
        if axis == 0:
            p = p / np.diff([*starts, length])[:, None]
    return p


def squared(drawn: np.ndarray, side: int = 8) -> np.ndarray:
    """A map as one row of numbers, of one size for all."""
    index = [np.arange(side) * n // side for n in drawn.shape]
    return np.sqrt(drawn[np.ix_(*index)]).ravel() + 1e-3


def measured(
    p: np.ndarray, kind: str, draw: np.random.Generator, scores: bool
) -> dict[str, float | None]:
    """Figures of a head, some with coverage, some with standard errors, some missing."""
    entropy = float(-(p * np.log(np.where(p > 0, p, 1))).sum(1).mean())
    figures: dict[str, float | None] = {
        "entropy": entropy,
        "entropy_share": entropy / math.log(p.shape[1]),
        "first": float(p[:, 0].mean()),
    }
    if kind == "self":
        i = np.arange(len(p))
        figures |= {
            "previous": float(p[i[1:], i[:-1]].mean()),
            "previous_coverage": 1 - 1 / len(p),
            "self": float(p[i, i].mean()),
            "same_token": float(draw.beta(1, 12)),
            "same_token_coverage": float(draw.uniform(0.3, 0.4)),
            "induction_random": float(draw.beta(0.4, 2)),
            "induction_random_coverage": 0.5,
            "distance": float((p * np.abs(i[:, None] - i)).sum(1).mean()),
        }
    if scores:
        figures["importance"] = float(draw.exponential(0.02))
        figures["ablation"] = float(draw.normal(figures["importance"], 0.01))
        figures["ablation_se"] = 0.002
    return dict.fromkeys((column[0] for column in COLUMNS[:-2]), None) | figures


def labels(figures: dict[str, float | None]) -> list[dict[str, Any]]:
    """Those of the rules that hold."""
    found = []
    for label, _, key, sign, threshold, _ in RULES:
        score = figures.get(key)
        if score is not None and (score >= threshold if sign == "≥" else score <= threshold):
            coverage = figures.get(f"{key}_coverage", 1.0)
            names = {"label": label, "key": key, "score": score, "threshold": threshold}
            found.append(names | {"sign": sign, "coverage": coverage})
    return found


def with_repeats(look: Look, period: int = 5) -> Look:
    """The same look with a piece that comes twice, on which head h looks at what followed with
    weight 0.9, 0.8, … and at the first token else."""
    tokens = [f" r{n}" for n in range(period)] * 2
    layers = []
    for layer in look.layers:
        maps = np.zeros((layer.heads, 2 * period, 2 * period), np.float32)
        for head in range(layer.heads):
            maps[head, :, 0] = 1
            for query in range(period, 2 * period):
                maps[head, query, 0] = 0.1 * (head + 1)
                maps[head, query, query - period + 1] = 1 - 0.1 * (head + 1)
        layers.append(replace(layer, repeat=maps if layer.kind == "self" else None))
    repeats = [Stream(stream.name, tokens) for stream in look.streams]
    return replace(look, layers=layers, repeats=repeats)

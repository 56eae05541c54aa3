"""What each head of a model does on a text: the figures, the labels, the maps."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .corpus import encode, repeated_tokens
from .figures import COLUMNS, NO_LABEL, RULES, Column, HeadName, Rule, name_head
from .gpt import GPT
from .layer import MultiHeadAttention
from .patterns import First, Induction, Previous, SameToken, Self
from .statistics import Distance, Entropy, Map, Mass, MaxLogit
from .watch import Watched, watch

if TYPE_CHECKING:
    from rich.table import Table
    from tokenizers import Tokenizer

__all__ = [
    "COLUMNS",
    "NO_LABEL",
    "RULES",
    "Column",
    "HeadName",
    "Look",
    "LookError",
    "Rule",
    "finite",
    "look",
    "name_head",
    "summary",
    "table",
    "token_texts",
]

MAP_SIDE = 256  # the most cells on a side of a map
MAP_CELLS = 16_000_000  # the most cells of all maps together: about 32 MB before packing
RANDOM_ROWS = 8
RANDOM_PERIOD = 50  # Olsson et al. 2022 repeat 50 random tokens


class LookError(ValueError):
    """A model and a text that cannot be looked at together."""


@dataclass(frozen=True)
class Look:
    """What every head of a model does on a text.

    rows: one dict a head, in order of layer and head: `layer`, `head`, `module`, `label`, and
        `label_key`, `label_score`, `label_coverage` (what gave the label), then a number for each
        of `COLUMNS` and `<name>_coverage` for those that a query can lack; None without any target.
    maps: for each layer [H, n, n], queries by keys, each row summing to 1. With n tokens the map is
        the attention itself; with more, cells are blocks of tokens.
    tokens: the tokens shown, as text; bytes that are not whole characters as `\\xe2`.
    provenance: how it was made; plain strings and numbers.
    """

    rows: list[dict[str, Any]]
    maps: dict[int, np.ndarray]
    tokens: list[str]
    provenance: dict[str, Any]

    def to_json(self) -> str:
        """The rows as a JSON array. A figure that is not a number is `null`."""
        return json.dumps(finite(self.rows), indent=2, ensure_ascii=False, allow_nan=False)


def look(
    model: GPT,
    tokenizer: Tokenizer,
    text: str,
    *,
    model_name: str = "model",
    text_name: str = "text",
    context: int | None = None,
    seed: int = 0,
    report: Callable[[float], None] | None = None,
) -> Look:
    """See what each head of `model` does on the first `context` tokens of `text`.

    Every figure is a statistic of `watch()`. Those named `…_random` are taken on random tokens that
    come twice (Olsson et al. 2022); `seed` draws these, and nothing else is random.

    Args:
        context: how many tokens to look at, at most the model's own context, the default.
        report: called with the share of the work that is done, after each layer.

    Raises:
        LookError: a `context` that the model does not have; attention that is not finite.
        TextError: a text shorter than two tokens.

    >>> from headwise.corpus import train_tokenizer
    >>> from headwise.gpt import GPTConfig
    >>> tokenizer = train_tokenizer(["no no no, yes yes"], vocab_size=260)
    >>> config = GPTConfig(vocab_size=260, n_positions=12, n_embd=10, n_layer=2, n_head=5)
    >>> seen = look(GPT(config), tokenizer, "no, yes")
    >>> len(seen.rows), seen.maps[1].shape == (5, len(seen.tokens), len(seen.tokens))
    (10, True)
    """
    longest = model.config.n_positions
    limit = longest if context is None else context
    if not 2 <= limit <= longest:
        raise LookError(
            f"context {limit}: the model's context is {longest} tokens, "
            f"so give a number from 2 to {longest}"
        )
    ids = encode(tokenizer, text, text_name)
    shown = torch.tensor(ids[:limit])[None]
    sizes = model.config.n_layer, model.config.n_head
    side = map_side(shown.shape[1], sizes[0] * sizes[1])

    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode(), _reported(model, report):
            on_text, text_loss = _run_on_text(model, shown, side)
            known = min(model.config.vocab_size, tokenizer.get_vocab_size())
            on_random, first_loss, second_loss, period = _run_on_repeats(model, known, seed)
    finally:
        model.train(was_training)

    maps = {n: on_text[name]["map"][0].cpu().numpy() for n, name in enumerate(on_text.modules)}
    for layer, drawn in maps.items():
        if not np.isfinite(drawn).all():
            raise LookError(
                f"{model_name}: the attention of layer {layer} is not finite; "
                f"the model's weights hold NaN or overflow"
            )
    provenance = {
        "model": model_name,
        "text": text_name,
        "layers": sizes[0],
        "heads": sizes[1],
        "parameters": sum(p.numel() for p in model.parameters()),
        "context": longest,
        "tokens": len(ids),
        "tokens_shown": shown.shape[1],
        "notice": _notice(len(ids), limit, longest),
        "map_side": side,
        "loss_text": text_loss,
        "loss_first_copy": first_loss,
        "loss_second_copy": second_loss,
        "random_rows": RANDOM_ROWS,
        "random_period": period,
        "seed": seed,
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        "device": next(model.parameters()).device.type,
        "versions": _versions(),
    }
    return Look(_rows(on_text, on_random), maps, token_texts(tokenizer, ids[:limit]), provenance)


@contextmanager
def _reported(model: GPT, report: Callable[[float], None] | None) -> Iterator[None]:
    """Call `report` after each attention layer of the two runs."""
    layers = [m for m in model.modules() if isinstance(m, MultiHeadAttention)]
    done = count(1)

    def passed(*_: object) -> None:
        if report is not None:
            report(next(done) / (2 * len(layers)))

    hooks = [layer.register_forward_hook(passed) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def map_side(tokens: int, heads: int) -> int:
    """How many cells a map has on a side: one a token, or fewer where that would be too many.

    >>> map_side(100, 32), map_side(300, 32), map_side(1024, 12 * 12), map_side(1024, 48 * 25)
    (100, 150, 256, 114)
    """
    most = min(MAP_SIDE, max(2, math.isqrt(MAP_CELLS // heads)))
    return math.ceil(tokens / math.ceil(tokens / most))


def token_texts(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """Each token as text, on its own. Bytes that are no whole character are written `\\xe2`."""
    return [_piece_text(tokenizer.id_to_token(i) or f"<{i}>") for i in ids]


@cache
def _byte_of_letter() -> dict[str, int]:
    """Byte-level BPE writes each byte as a letter: printable ones as themselves, the others from
    U+0100 on (Radford et al. 2019)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


def _piece_text(piece: str) -> str:
    letters = _byte_of_letter()
    if any(letter not in letters for letter in piece):
        return piece.replace("\u2581", " ")  # a vocabulary of characters, not of bytes
    return bytes(letters[letter] for letter in piece).decode("utf-8", "backslashreplace")


def _run_on_text(model: GPT, ids: Tensor, side: int) -> tuple[Watched, float]:
    tokens = ids[0]
    statistics = (
        Entropy(),
        MaxLogit(),
        Mass(First()),
        Mass(Previous()),
        Mass(Self()),
        Mass(SameToken(tokens)),
        Mass(Induction(tokens)),
        Distance(),
        Map(side),
    )
    with watch(model, *statistics) as seen:
        logits = model(ids)
    return seen, float(_losses(logits, ids).mean())


def _run_on_repeats(
    model: GPT, vocab: int, seed: int
) -> tuple[Watched, float | None, float | None, int]:
    """The same on random tokens and their repeat, with the losses on either copy."""
    period = min(RANDOM_PERIOD, model.config.n_positions // 2)
    generator = torch.Generator().manual_seed(seed)
    ids = repeated_tokens(
        RANDOM_ROWS, 2 * period, vocab, generator, shortest=period, longest=period
    )
    with watch(model, Mass(Previous()), Mass(SameToken(ids)), Mass(Induction(ids))) as seen:
        losses = _losses(model(ids), ids)
    if period < 2:
        return seen, None, None, period
    # Nothing foretells that a copy begins, so its first token does not count.
    first, second = losses[:, : period - 1], losses[:, period:]
    return seen, float(first.mean()), float(second.mean()), period


def _losses(logits: Tensor, ids: Tensor) -> Tensor:
    """The loss on each token but the first, in nats: `[B, T − 1]`."""
    return F.cross_entropy(logits[:, :-1].mT.double(), ids[:, 1:], reduction="none")


def _rows(on_text: Watched, on_random: Watched) -> list[dict[str, Any]]:
    layers = {name: n for n, name in enumerate(on_text.modules)}
    rows = []
    for text, random in zip(on_text.table(), on_random.table(), strict=True):
        figures = dict(_figures(text, "")) | dict(_figures(random, "_random"))
        name = name_head(figures)
        rows.append(
            {
                "layer": layers[text["layer"]],
                "head": text["head"],
                "module": text["layer"],
                "label": name.label,
                "label_key": name.key,
                "label_score": name.score,
                "label_coverage": name.coverage,
                **figures,
            }
        )
    return rows


def _figures(row: Mapping[str, Any], ending: str) -> Iterator[tuple[str, float | None]]:
    """The row's figures that are shown, `ending` put after the name; None without any target."""
    for column in COLUMNS:
        key = column.key.removesuffix(ending) if ending else column.key
        if column.key != key + ending or key not in row:
            continue
        coverage = row.get(f"{key}_coverage")
        yield column.key, None if coverage == 0 else row[key]
        if coverage is not None:
            yield f"{column.key}_coverage", coverage


def _notice(tokens: int, limit: int, longest: int) -> str | None:
    """What part of a long text is shown, in words; None if all of it is."""
    if tokens <= limit:
        return None
    why = "the model's context" if limit == longest else "the context asked for"
    return f"Only the first {limit:,} of the text's {tokens:,} tokens are shown: {why} ends there."


def _versions() -> dict[str, str]:
    found = {"Python": platform.python_version()}
    for package in ("headwise", "torch", "tokenizers"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:  # run from a source tree
            found[package] = "unknown"
    return found


def finite(value: Any) -> Any:
    """The same nested value with None for infinities and NaN, which JSON cannot hold.

    >>> finite({"a": [1.0, float("nan")], "b": "text"})
    {'a': [1.0, None], 'b': 'text'}
    """
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


# The order in which a narrow terminal goes without columns; they stay in --json and on the page.
_SPARE = ("previous_random", "same_token_random", "self", "entropy_share", "max_logit", "distance")


def table(seen: Look, width: int = 120) -> tuple[Table, list[str]]:
    """The rows as a rich table no wider than `width`, and the titles of columns left out for it."""
    from rich import box
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table

    console = Console(width=1000)
    spare = list(_SPARE)
    left_out: list[str] = []
    columns = list(COLUMNS)
    while True:
        drawn = Table(box=box.SIMPLE_HEAD, padding=0, header_style="bold")
        drawn.add_column("head", justify="right", no_wrap=True)
        drawn.add_column("label", no_wrap=True)
        for column in columns:
            drawn.add_column(_heading(seen, column), justify="right", no_wrap=True)
        for row in seen.rows:
            figures = (_figure(row.get(column.key)) for column in columns)
            drawn.add_row(f"{row['layer']}.{row['head']}", row["label"], *figures)
        if Measurement.get(console, console.options, drawn).maximum <= width or not spare:
            return drawn, left_out
        gone = spare.pop(0)
        left_out.append(next(column.title for column in columns if column.key == gone))
        columns = [column for column in columns if column.key != gone]


def summary(seen: Look, left_out: list[str]) -> tuple[str, str]:
    """What a terminal says above the table and below it."""
    facts = seen.provenance
    before = f"{facts['model']} on {facts['text']}: {facts['tokens_shown']:,} tokens"
    losses = [f"{facts['loss_text']:.2f} nats a token"]
    if facts["loss_first_copy"] is not None:
        losses.append(
            f"on random tokens {facts['loss_first_copy']:.2f}, "
            f"on their repeat {facts['loss_second_copy']:.2f}"
        )
    before += f"\nloss: {'; '.join(losses)}"
    after = (
        "Means over queries; the percentage is the share of queries that have such a key.\n"
        "rand.: on random tokens that come twice. The page says what each figure means."
    )
    if left_out:
        after += f"\nLeft out of this narrow terminal: {'; '.join(left_out)} (see --json)."
    if facts["notice"]:
        after += f"\n{facts['notice']}"
    return before, after


def _heading(seen: Look, column: Column) -> str:
    """The column's name and, where all heads agree on it, its coverage."""
    lines = column.brief.split()
    if column.key.endswith("_random"):
        lines.append("rand.")
    covered = {row.get(f"{column.key}_coverage") for row in seen.rows}
    coverage = covered.pop() if len(covered) == 1 else None
    if coverage is not None and coverage < 0.995:
        lines.append(f"{100 * coverage:.0f}%")
    return "\n".join(lines)


def _figure(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return "–"
    return f"{value:.2f}" if abs(value) < 9.995 else f"{value:.1f}"

"""`look()`: a report on what every head of a model does on a text."""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .._text import escaped
from ..capture.importance import ablation_scan
from ..capture.importance import importance as importance_of
from ..capture.modules import evaluating
from ..core.numbers import as_int, format_value
from .codec import budget, short_period
from .collect import (
    ONE_RANK,
    Collected,
    Place,
    Ranks,
    Resolution,
    behind_only,
    bins_of,
    collect,
    collect_on_repeats,
    collect_short_repeat,
    survey,
)
from .compare import FORMULA, similarity
from .composition import composition
from .folders import name_of
from .head_labels import RULES
from .page.parts import version
from .rows import columns_of, rows_of
from .sample import RANDOM_ROWS, LookError, Sample, Subject, TokenSubject
from .samples import Samples
from .schema import Look, Stream
from .subjects import subject_of

Report = Callable[[str, float], None]
Loss = Callable[[nn.Module, dict[str, Tensor]], Tensor]
ABLATION_LIMIT = 1e11
"""The largest heads × parameters × tokens for which heads are ablated by default, in seconds."""

EQUAL_PAIRS = 0.1  # fraction of pairs; prose has 0.01 to 0.03 for subword tokens, 0.07 for letters


def look(
    model: nn.Module,
    tokenizer: Any,
    text: Any,
    *,
    target: str | None = None,
    context: int | None = None,
    seed: int = 0,
    importance: bool = False,
    ablation: bool | None = None,
    loss: Loss | None = None,
    model_name: str | None = None,
    text_name: str = "text",
    title: str | None = None,
    report: Report | None = None,
    over_ranks: bool = False,
) -> Look:
    """Report what each head of `model` does on a text, on many texts, or on an image.

    Every metric is a statistic of `watch()`: its mean over all valid queries of all texts, with the
    standard error over texts if there are several. Maps, top keys and other arrays describe the
    first text. Metrics named `…_random` are measured on repeated random tokens (Olsson et al.
    2022).

    Args:
        model: a causal language model, an encoder, an encoder–decoder model or a vision transformer
            of `transformers`; headwise's `GPT`; or any module that is called with only token ids
            `[1, T]`.
        tokenizer: the model's tokenizer, from `tokenizers` or `transformers`, or any object with
            `encode(text)` and `decode(ids)`. If `text` is token ids, it may also be a string for
            each id (a list or a dict) or None. For images: the image processor.
        text: a string, token ids `[T]` (a tensor or a list) or an image (from Pillow, or the `Path`
            of a file); or an iterable of several texts or images, which are read one at a time.
        target: the input of the decoder of an encoder–decoder model. Default: at most 48 tokens
            that the model generates greedily.
        context: the number of tokens of a text to read. Default: the model's context, but at most
            2,048.
        seed: the seed of the random tokens, and of the tokens masked for masked language models.
        importance: also compute `importance()` of every head, for the loss on the texts. If the
            model has no loss, it is skipped and the notice of the page explains why.
        ablation: also run `ablation_scan()`, which takes a forward pass for each head and text.
            Default: run it on a single text if that is fast (`ABLATION_LIMIT`).
        loss: a loss for importance and ablation, `loss(model, inputs)`, that returns a scalar for
            one text. `inputs` is the dict passed to the model (`input_ids` and `attention_mask`, or
            `pixel_values`; `ids` for other modules). Default: the model's loss on the text.
        model_name, text_name: the names in the result. Default for the model: the name under which
            `transformers` loaded it, or its class.
        title: the title of the page. Default: both names.
        report: a function that is called with the current task (`"looking"`, `"importance"`,
            `"ablation"`) and the completed fraction, if the number of texts is known.
        over_ranks: divide the texts among the ranks of the default process group. Every rank must
            call this with all texts, and gets the same result as a single process would.

    Raises:
        LookError: the model cannot read the input, the tokenizer belongs to another model, or
            attention is not finite.
        TextError: no text has at least two tokens.

    >>> from headwise.models.corpus import train_tokenizer
    >>> from headwise.models import GPT, GPTConfig
    >>> tokenizer = train_tokenizer(["no no no, yes yes"], vocab_size=260)
    >>> config = GPTConfig(vocab_size=260, n_positions=12, n_embd=10, n_layer=2, n_head=5)
    >>> seen = look(GPT(config), tokenizer, "no, yes")
    >>> len(seen.rows), seen.layers[1].maps.shape
    (10, (5, 4, 4))
    """
    if not isinstance(model, nn.Module):
        raise LookError(
            f"look({model!r:.80}, …): model must be a module, such as the result of "
            f"from_pretrained(); to read a folder, use `headwise look --model FOLDER`"
        )
    for name, value in (("context", context), ("seed", seed)):
        if value is not None and as_int(value) is None:
            raise LookError(f"look(…): {name} must be an integer, got {format_value(value)}")
    subject = subject_of(model, tokenizer, context=context, seed=seed, target=target)
    shared = Ranks.over_ranks() if over_ranks else ONE_RANK
    samples = Samples(subject, text, text_name, shared.rank, shared.size)
    report_progress = report or (lambda doing, share: None)
    model_name = _name_of(model) if model_name is None else model_name
    lacking = None
    if importance or ablation:
        _require_reiterable(samples)
    mean_loss = subject.mean_loss if loss is None else _user_loss(loss)
    with evaluating(model), torch.no_grad():
        collected, first, facts = _collect_all(subject, samples, seed, report_progress, shared)
        repeats = _on_a_short_repeat(subject, seed, collected)
        effects, own = [], samples.read > 0  # a rank may have no text
        if loss is None and facts["loss_text"] is None:
            lacking = _no_loss_notice(subject) if importance or ablation else None
            importance, ablation = False, False
        if ablation is None:
            work = facts["heads"] * facts["parameters"] * facts["tokens_shown"]
            ablation = samples.number == 1 and loss is None and work <= ABLATION_LIMIT
        if importance:
            report_progress("importance", 0.0)
            slopes = importance_of(model, mean_loss, samples) if own else None
            effects.append(shared.merged(slopes).table())
        if ablation:
            scan = None
            if own:
                shown = partial(report_progress, "ablation")
                scan = ablation_scan(model, mean_loss, samples, report=shown)
            effects.append(shared.merged(scan).table())
    streams = [part.stream for part in first.parts]
    rows = rows_of(collected, streams, effects, errors=facts["texts"] > 1)
    layers, offsets = behind_only(collected.layers)
    facts["notice"] = " ".join(filter(None, (facts["notice"], lacking))) or None
    return Look(
        rows=rows,
        layers=layers,
        streams=streams,
        provenance={
            "model": escaped(model_name),
            "text": escaped(text_name),
            **({} if title is None else {"title": escaped(title)}),
            **facts,
            "seed": seed,
            "similarity": FORMULA,
            "versions": _versions(),
        },
        columns=columns_of(rows),
        rules=[asdict(rule) for rule in RULES],
        offsets=offsets,
        similarity=similarity(layers),
        repeats=repeats,
        composition=composition(model, rows, layers, collected.modules),
    )


def _collect_all(
    subject: Subject, samples: Samples, seed: int, report_progress: Report, shared: Ranks
) -> tuple[Collected, Sample, dict[str, Any]]:
    """Run the model on all texts and repeated tokens; return the data, the first text and facts."""
    first, repeats = samples.first, subject.repeats(seed)
    places = survey(subject.model, lambda: subject.logits(first))
    resolution = resolution_of(places)
    own = None if samples.number is None else len(samples)
    # two runs on repeated random tokens: many rows for the metrics, a short one for display
    collected = Collected(_steps(report_progress, len(places), own, 2 * (repeats is not None)))
    total, number = 0.0, 0
    for sample in samples:
        drawn = resolution if sample is first else None
        gathered = partial(collect, subject.model, sample, collected, resolution=drawn)
        losses = _run(subject, sample, gathered)
        if losses is None and subject.loss_of:  # from a separate forward pass, with masked tokens
            losses = subject.losses(sample)
        if losses is not None:
            total, number = total + float(losses.sum()), number + losses.numel()
    total, number, read, short = shared.sums(total, number, samples.read, samples.short)
    shared.merge(collected)
    skipped = _skipped_modules(collected.seen.left_out)
    facts = {
        **_facts_of(subject, first, (int(read), int(short)), skipped),
        "layers": len(places),
        "heads": sum(place.heads for place in places),
        "map_side": resolution.map_side,
        "top_keys": resolution.top_keys,
        "loss_text": total / number if number else None,
    }
    return collected, first, facts | _on_repeats(subject, repeats, collected)


def _on_repeats(subject: Subject, repeats: Sample | None, collected: Collected) -> dict[str, Any]:
    """Run the model on repeated random tokens; return its loss on each copy."""
    if repeats is None:
        return {}
    losses = _run(subject, repeats, partial(collect_on_repeats, subject.model, repeats, collected))
    facts = {"random_rows": RANDOM_ROWS, "random_period": repeats.period}
    copies: list[float | None] = [None, None]
    if losses is not None and repeats.period > 1:
        # The start of a copy is unpredictable, so its first token is excluded.
        start, stop = repeats.period, 2 * repeats.period - 1
        copies = [float(part.mean()) for part in (losses[:, : start - 1], losses[:, start:stop])]
    return {**facts, "loss_first_copy": copies[0], "loss_second_copy": copies[1]}


def _on_a_short_repeat(subject: Subject, seed: int, collected: Collected) -> list[Stream]:
    """Run the model on one short repeated sequence and keep its maps; return its tokens."""
    heads = sum(layer.heads for layer in collected.layers)
    repeat = subject.repeats(seed, 1, short_period(heads), legible=True)
    if repeat is None:
        return []
    _run(subject, repeat, partial(collect_short_repeat, subject.model, repeat, collected))
    return [part.stream for part in repeat.parts]


def _run(
    subject: Subject, sample: Sample, gathered: Callable[[Callable[[], None]], None]
) -> Tensor | None:
    """Run a forward pass and collect its calls; return its losses."""
    given: list[Tensor | None] = []

    def forward() -> None:
        logits = subject.logits(sample)
        given.append(None if logits is None else subject.losses_of(sample, logits))

    gathered(forward)
    return given[0]


def resolution_of(places: Sequence[Place]) -> Resolution:
    """Return the resolution at which these calls are drawn."""
    tokens = max(max(place.queries, place.keys) for place in places)
    most = budget(sum(place.heads for place in places), tokens)
    return Resolution(most.map_side, most.top_keys, bins_of(tokens))


def _steps(
    report_progress: Report, calls: int, texts: int | None, repeats: int
) -> Callable[[], None]:
    """Return a callback that reports progress after each attention call."""
    done = count(1)

    def passed() -> None:
        if texts is not None:
            report_progress("looking", min(1.0, next(done) / (calls * (texts + repeats))))

    return passed


def _name_of(model: nn.Module) -> str:
    """Return the name under which `transformers` loaded a model, or its class."""
    name = str(getattr(getattr(model, "config", None), "name_or_path", "") or "")
    if not name:
        return type(model).__name__
    return name_of(name) if Path(name).is_dir() else name


def _user_loss(loss: Loss) -> Callable[[nn.Module, Sample], Tensor]:
    """Adapt a user's loss to `importance()` and `ablation_scan()`."""
    return lambda model, sample: loss(model, sample.inputs)


def _no_loss_notice(subject: Subject) -> str:
    """Return the notice that importance and ablation are missing, and how to get them."""
    kind = type(subject.model).__name__
    head = re.sub(r"Model$", "", kind)
    return (
        f"Importance and ablation were skipped: {kind} has no loss on its input. Load the model "
        f"with its language-model head (a folder whose config.json names {head}ForMaskedLM), or "
        f"pass a loss in Python: hw.look(…, importance=True, loss=lambda model, inputs: …)."
    )


def _require_reiterable(samples: Samples) -> None:
    """Raise LookError for texts that cannot be iterated twice."""
    if not samples.again:
        raise LookError(
            f"importance and ablation read {samples.name} a second time, which an iterator does "
            f"not allow; pass a list"
        )


def _facts_of(
    subject: Subject, first: Sample, texts: tuple[int, int], unseen: Sequence[str]
) -> dict[str, Any]:
    """Return facts about the model and the texts, such as the numbers of texts read and skipped."""
    model, (read, short) = subject.model, texts
    weights = next(model.parameters())
    notices = _truncated(first, subject), _vocabulary_mismatch(subject), _repetitive(first)
    return {
        "kind": subject.kind,
        "architecture": type(model).__name__,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "context": subject.longest,
        "attention": getattr(getattr(model, "config", None), "_attn_implementation", "headwise"),
        "texts": read,
        **({"too_short": short} if short else {}),
        "tokens": first.total,
        "tokens_shown": len(first.parts[0]),
        "notice": " ".join(filter(None, (*notices, *unseen))) or None,
        "loss": subject.loss_of,
        "dtype": str(weights.dtype).removeprefix("torch."),
        "device": weights.device.type,
    }


def _truncated(first: Sample, subject: Subject) -> str | None:
    """Return the notice that a text is truncated, or None."""
    shown = len(first.parts[0])
    if first.total <= shown:
        return None
    why = "this is the given context"
    if shown == subject.longest:
        why = "this is the model's context"
    elif subject.context is None:
        why = "for more, set the context (--context)"
    return f"Only the first {shown:,} of the text's {first.total:,} tokens are shown: {why}."


def _vocabulary_mismatch(subject: Subject) -> str | None:
    """Return the notice that a tokenizer has more tokens than the model, or None."""
    if not isinstance(subject, TokenSubject):
        return None
    size = subject.words.size
    if size is None or size <= subject.vocab:
        return None
    return (
        f"The tokenizer has {size:,} tokens but {type(subject.model).__name__} has "
        f"{subject.vocab:,}: check that they belong together."
    )


def _skipped_modules(left_out: dict[str, str]) -> list[str]:
    """Return a sentence for each kind of module whose attention is not shown."""
    kinds: dict[str, list[str]] = {}
    for name in left_out:
        kinds.setdefault(re.sub(r"\d+", "*", name), []).append(name)
    return [
        f"Not shown: {escaped(kind if len(names) > 1 else names[0])}: {left_out[names[0]]}."
        for kind, names in kinds.items()
    ]


def _repetitive(first: Sample) -> str | None:
    """Return the notice that a text has few different tokens, or None.

    Uniform attention's weight on equal tokens is the fraction of position pairs with equal tokens.
    """
    ids = first.parts[0].ids
    if ids is None:
        return None
    times = ids.unique(return_counts=True)[1]
    equal = float((times * (times - 1)).sum()) / max(1, len(ids) * (len(ids) - 1))
    if equal <= EQUAL_PAIRS:
        return None
    return (
        f"The text has only {len(times)} different tokens: uniform attention would put {equal:.0%} "
        f"of its weight on equal ones, so same-token and induction metrics are unreliable."
    )


def _versions() -> dict[str, str]:
    packages = ("headwise", "torch", "tokenizers", "transformers")
    return {"Python": platform.python_version(), **{name: version(name) for name in packages}}

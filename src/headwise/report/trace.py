"""`trace()`: the attention of a generated text to its prompt, token by token."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from .._text import and_more
from ..capture.catch import catch
from ..capture.head_address import HeadAddress, as_written, head_label, is_layer, parse_head
from ..capture.modules import check_model
from ..capture.trace import TracedModule, TraceRecorder
from ..core.numbers import as_int
from ..models import generation, gpt
from ..stats.segments import Segments
from .prompts import Prompt, read_prompt, text_range, token_texts
from .tokens import tokenizer_of
from .traced import COLUMNS, Trace


def trace(
    model: nn.Module,
    tokenizer: Any,
    prompt: Any,
    *,
    max_new_tokens: int = 64,
    segments: Segments | Mapping[str, Any] | None = None,
    sinks: int = 1,
    heads: Collection[HeadAddress] = (),
    weights: Float[Tensor, "L H"] | None = None,
    **options: Any,
) -> Trace:
    """Generate a text and record how much each of its tokens attended to each token of the prompt.

    The model generates with its own `generate`, cache and attention kernel, and its output is the
    same as without tracing. The weights of a generated token are those of the query that predicted
    it: one exact row of P per head; in the pass over the prompt, only the last row. Rows are summed
    immediately, so memory does not grow with generated tokens × heads × prompt length.

    Args:
        model: a causal model of transformers, or a `headwise.models.GPT`.
        tokenizer: a tokenizer of any kind; None if the prompt is given as token ids.
        prompt: a text; messages, as a list of dicts for the tokenizer's chat template; token ids,
            as a list or a tensor `[T]` or `[1, T]`; or the inputs of `generate`, as a dict with
            `input_ids`, such as a processor's output for a text with images.
        max_new_tokens: the maximum number of tokens to generate.
        segments: parts of the prompt, as in `hw.Segments`; or, by name, texts that occur in it.
            By default, the messages or, if there are none, the images (by the model's image token).
        sinks: the number of tokens at the prompt's start that are attention sinks (Xiao et al.
            2023); they are counted separately and left out of segments and pictures.
        heads: heads whose rows are kept for each generated token, such as `["L1H0"]`.
        weights: each head's weight in the sum over heads, `[L, H]`, as from `fit_weights()`; by
            default 1.
        options: further options of `generate`, such as `do_sample=False`.

    Raises:
        ValueError: the model cannot generate or is an encoder–decoder; the prompt is invalid; a
            segment's text does not occur in the prompt; a head does not exist; or generation is not
            token by token for a single text, as with beams, assisted decoding or no cache.

    >>> import torch, headwise as hw
    >>> from headwise.models import builtin, load
    >>> model, tokenizer = load(builtin())
    >>> generator = torch.Generator().manual_seed(0)
    >>> passage = (100 + torch.randperm(400, generator=generator)[:24]).tolist()
    >>> traced = hw.trace(model, tokenizer, passage + passage[:8], max_new_tokens=16)
    >>> traced.ids == passage[8:]                                   # it repeats the passage
    True
    >>> [(row["layer"], row["head"]) for row in traced.retrieval]   # the heads that copied it
    [(1, 0), (1, 1), (1, 3), (1, 2)]

    Source: Wu et al. 2024, "Retrieval Head Mechanistically Explains Long-Context Factuality".
    """
    quoted = check_model("trace", model)
    words = tokenizer_of(tokenizer)
    given = read_prompt(quoted, tokenizer, words, prompt)
    if (number := as_int(sinks)) is None or number < 0:
        raise ValueError(f"{quoted}: sinks={sinks!r:.60} must be a whole number, 0 or more.")
    device = next(model.parameters()).device
    places = given.places[:number].to(device)
    found = _segments(quoted, model, given, segments)
    keep = [parse_head(one) for one in heads]
    recorder = TraceRecorder(len(given.ids), places, found, weights=weights, keep=keep)
    with catch(model, recorder, function="trace", in_full=False) as net:
        ids = _generate(quoted, model, given, max_new_tokens, options)
    if len(recorder.by_token) != len(ids):
        raise ValueError(
            f"{quoted}: {len(ids)} tokens were generated behind {len(given.ids)} of the prompt, "
            f"and attention was seen for {len(recorder.by_token)}: trace one text, generated token "
            f"by token" + ("." if recorder.modules else f" ({net.names.why_nothing()}).")
        )
    left_out = net.names.left_out | _partial(quoted, recorder)
    modules = sorted(recorder.modules.items(), key=lambda one: net.numbers[one[0]])
    for address, (layer, head) in zip(heads, keep, strict=True):
        if not any(
            is_layer(layer, name, net.numbers[name]) and head in one.rows for name, one in modules
        ):
            raise ValueError(f"{quoted}: no head {address!r}; there are {_there(modules)}.")
    return _traced(words, given, ids, recorder, modules, net.numbers, places, left_out)


# --- inputs ----------------------------------------------------------------------------------


def _segments(quoted: str, model: nn.Module, prompt: Prompt, given: Any) -> Segments | None:
    """Return the given segments of a prompt or, by default, its messages or its images."""
    if isinstance(given, Segments):
        found = given
    elif given or prompt.messages:
        given = given or prompt.messages
        if not isinstance(given, Mapping):
            raise ValueError(f"{quoted}: segments={given!r:.60} must be a dict or hw.Segments.")
        found = Segments({
            name: text_range(quoted, prompt, name, one) if isinstance(one, str) else one
            for name, one in given.items()
        })  # fmt: skip
    else:
        try:
            return Segments.of_tokens(torch.tensor(prompt.ids), model)
        except ValueError:  # there are no images
            return None
    if taken := [name for name in found.names if name in COLUMNS]:
        raise ValueError(
            f"{quoted}: a segment is called {taken[0]!r}, as a column of the table is."
        )
    return found


def _generate(
    quoted: str, model: Any, prompt: Prompt, max_new_tokens: int, options: Mapping[str, Any]
) -> list[int]:
    """Generate with the model; return the new ids, including the end of text."""
    given: dict[str, Any] = {"max_new_tokens": max_new_tokens, **options}
    if isinstance(model, gpt.GPT):
        (done,) = generation.generate(model, [prompt.ids], **given)
        end = model.config.eos_token_id
        return done.ids + ([end] if done.reason == "end" and end is not None else [])
    if not callable(getattr(model, "generate", None)):
        raise ValueError(f"{quoted}: it has no generate(); give a causal model of transformers.")
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise ValueError(
            f"{quoted}: it is an encoder–decoder, whose prompt is read by cross-attention; watch "
            f"that by hw.watch(model, hw.Segments(…))."
        )
    device = next(model.parameters()).device
    inputs = {
        name: one.to(device) if isinstance(one, Tensor) else one
        for name, one in prompt.inputs.items()
    }
    out = model.generate(**inputs, **given)
    rows = getattr(out, "sequences", out)
    if len(rows) != 1:
        raise ValueError(f"{quoted}: {len(rows)} texts were generated; trace one.")
    return rows[0, len(prompt.ids) :].tolist()


# --- results ---------------------------------------------------------------------------------


def _partial(quoted: str, recorder: TraceRecorder) -> dict[str, str]:
    """Remove modules that attended only in the pass over the prompt, such as an encoder's."""
    steps, left_out = len(recorder.by_token), {}
    for name, module in list(recorder.modules.items()):
        if len(module.keys) == steps:
            continue
        if len(module.keys) > 1:
            raise ValueError(
                f"{quoted}: {name!r} attended for {len(module.keys)} of {steps} tokens."
            )
        recorder.by_token[0] -= module.head_weights @ module.by_head
        left_out[name] = "it attended while the prompt was read, and for no token after it"
        del recorder.modules[name]
    return left_out


def _there(modules: Sequence[tuple[str, TracedModule]]) -> str:
    names = [f"{name}: heads 0 to {len(module.by_head) - 1}" for name, module in modules]
    return and_more(names, 8)


def _traced(
    words: Any,
    prompt: Prompt,
    ids: list[int],
    recorder: TraceRecorder,
    modules: Sequence[tuple[str, TracedModule]],
    numbers: Mapping[str, int],
    sinks: Tensor,
    left_out: dict[str, str],
) -> Trace:
    every = [module for _, module in modules]

    def joined(name: str) -> Tensor:
        """Return a tensor of every module, joined to `[N, A, …]` on the CPU."""
        return torch.cat([torch.stack(getattr(one, name)) for one in every], dim=1).cpu()

    keys, weights, sinks = joined("keys").long(), joined("weights"), sinks.cpu()
    in_prompt = weights[..., 0] >= joined("generated")
    held = torch.tensor(prompt.ids)[keys[..., 0]] == torch.tensor(ids)[:, None]
    weights = weights.masked_fill(torch.isin(keys, sinks), -1.0)
    order = weights.argsort(dim=-1, descending=True, stable=True)[..., : recorder.top]
    weights, keys = weights.gather(-1, order), keys.gather(-1, order)
    heads = [
        {"layer": numbers[name], "head": head, "module": as_written(name)}
        for name, module in modules
        for head in range(len(module.by_head))
    ]
    weighted = torch.cat([one.head_weights for one in every]).cpu()
    return Trace(
        tokens=prompt.tokens,
        generated=token_texts(words, ids, prompt.written),
        prompt_ids=prompt.ids,
        ids=ids,
        by_token=torch.stack(recorder.by_token).cpu(),
        heads=heads,
        of_heads=torch.cat([one.by_head for one in every]).cpu(),
        keys=keys.masked_fill(weights < 0, -1),
        weights=weights.clamp(min=0.0),
        copied=in_prompt & held,
        masses=joined("masses"),
        sinks=sinks.tolist(),
        head_weights=None if recorder.weights is None else weighted,
        names=() if recorder.segments is None else recorder.segments.names,
        members=recorder.members.cpu(),
        rows={
            head_label(numbers[name], head): torch.stack(rows).cpu()
            for name, module in modules
            for head, rows in module.rows.items()
        },
        left_out=left_out,
        inputs=prompt.inputs,
    )

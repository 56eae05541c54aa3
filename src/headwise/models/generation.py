"""Text generation: greedy or sampled, streamed, in batches of prompts of unequal length."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .._text import must_be_text
from ..core.masks import Padding
from ..core.numbers import as_int, format_value, real
from ..layers.kv_cache import KVCache
from .gpt import GPT

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Reason = Literal["length", "end", "stop", "context"]
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # decoded from bytes of an incomplete character


@dataclass(frozen=True)
class Generation:
    """The continuation of one prompt, and the reason why it ended.

    `reason` is `"length"` (`max_new_tokens`), `"end"` (the model's end of text), `"stop"` (a stop
    string) or `"context"` (no position is left). `ids` are the new tokens without the end of text;
    `text`, if there is a tokenizer, ends before the stop string, and `ids` then end before it too.
    """

    ids: list[int]
    text: str
    reason: Reason


@dataclass(frozen=True)
class Piece:
    """One new token of one row.

    `text` is the text that has become final since the previous piece of the row: incomplete
    characters and a possible start of a stop string are held back. `done` is set in the last piece
    of a row.
    """

    row: int
    id: int
    text: str
    done: Generation | None = None


@dataclass(frozen=True)
class Sampling:
    """Parameters for sampling the next token. Temperature 0 selects the most likely token.

    The filters apply in the order of the fields, each to the result of the previous one, as in
    `transformers`. `top_k` keeps the k most likely tokens; `top_p` the smallest set of most likely
    tokens with at least that probability (Holtzman et al. 2020); `min_p` the tokens with at least
    that fraction of the highest probability (Nguyen et al. 2024).

    Raises:
        ValueError: a value out of range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p"):
            if (value := getattr(self, name)) is not None and real(value) is None:
                raise ValueError(f"{name} must be a number, got {format_value(value)}")
        if self.temperature != 0 and not 1e-3 <= self.temperature < float("inf"):
            raise ValueError(
                f"temperature must be 0 (greedy) or at least 0.001, got {self.temperature}"
            )
        if self.top_k is not None:
            _check_count("top_k", self.top_k)
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be between 0 and 1, got {self.min_p}")

    def filtered(self, logits: Float[Tensor, "B V"]) -> Float[Tensor, "B V"]:
        """Return logits to sample from, in float32; −inf for tokens that a filter removes.

        >>> logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
        >>> Sampling(temperature=1.0, top_k=2).filtered(logits).tolist()
        [[-inf, -inf, 2.0, 3.0]]
        """
        logits = logits.float()
        if self.temperature > 0:
            logits = logits / self.temperature
        if self.top_k is not None:
            least = logits.topk(min(self.top_k, logits.shape[-1])).values[:, -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        if self.top_p is not None:
            ascending, order = logits.sort(descending=False)
            out = ascending.softmax(-1).cumsum(-1) <= 1 - self.top_p
            out[:, -1] = False
            logits = logits.masked_fill(out.scatter(1, order, out), -torch.inf)
        if self.min_p is not None:
            chances = logits.softmax(-1)
            out = chances < self.min_p * chances.amax(-1, keepdim=True)
            logits = logits.masked_fill(out, -torch.inf)
        return logits

    def choose(
        self, logits: Float[Tensor, "B V"], generators: Sequence[torch.Generator]
    ) -> list[int]:
        """Choose the next token of each row; each row is sampled with its own (CPU) generator."""
        if self.temperature == 0:
            return logits.argmax(-1).tolist()
        chances = self.filtered(logits).softmax(-1).cpu()
        return [
            int(torch.multinomial(row, 1, generator=generator))
            for row, generator in zip(chances, generators, strict=True)
        ]


def _check_count(name: str, value: object) -> None:
    if (count := as_int(value)) is None or count < 1:
        rule = "an integer" if count is None else "at least 1"
        raise ValueError(f"{name} must be {rule}, got {format_value(value)}")


def generate(
    model: GPT,
    prompts: Sequence[str] | Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 100,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int = 0,
    stop: Sequence[str] = (),
    tokenizer: Tokenizer | None = None,
    use_cache: bool = True,
    on_piece: Callable[[Piece], None] | None = None,
) -> list[Generation]:
    """Generate a continuation of each prompt.

    Rows are independent: their lengths differ, each ends on its own, and each is sampled with its
    own generator (row r with `seed + r`), so a row's text does not depend on other rows. A row ends
    at the model's end of text, at a stop string, after `max_new_tokens`, or when prompt and new
    tokens fill the model's context (`reason == "context"`); the context never slides.

    Args:
        model: any `GPT`.
        prompts: texts (with `tokenizer`), or rows of token ids.
        max_new_tokens: the maximum number of new tokens in a row.
        temperature, top_k, top_p, min_p: as in `Sampling`; greedy by default.
        seed: the seed of sampling.
        stop: strings that end a row; they require a tokenizer and may span tokens.
        tokenizer: converts ids to text.
        use_cache: cache keys and values; without a cache, every token recomputes the whole row,
            with the same result.
        on_piece: called with every new token (`stream` is the iterator form).

    Raises:
        ValueError: no prompt, an empty prompt, a prompt that fills the context, ids outside the
            vocabulary, a setting out of range, or text or `stop` without a tokenizer.

    >>> from headwise.models import GPTConfig
    >>> model = GPT(GPTConfig(vocab_size=11, n_positions=7, n_embd=6, n_layer=1, n_head=3))
    >>> [row.reason for row in generate(model, [[1, 2, 3], [4]], max_new_tokens=5)]
    ['context', 'length']
    """
    done: dict[int, Generation] = {}
    for piece in stream(
        model,
        prompts,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        stop=stop,
        tokenizer=tokenizer,
        use_cache=use_cache,
    ):
        if on_piece is not None:
            on_piece(piece)
        if piece.done is not None:
            done[piece.row] = piece.done
    return [done[row] for row in sorted(done)]


def stream(
    model: GPT,
    prompts: Sequence[str] | Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 100,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int = 0,
    stop: Sequence[str] = (),
    tokenizer: Tokenizer | None = None,
    use_cache: bool = True,
) -> Iterator[Piece]:
    """Generate token by token: `generate` as an iterator of `Piece` objects.

    Arguments are checked immediately, before the first piece is generated.

    Raises:
        ValueError: as in `generate`.
    """
    sampling = Sampling(temperature, top_k, top_p, min_p)
    _check_count("max_new_tokens", max_new_tokens)
    if isinstance(stop, str) or not all(isinstance(one, str) and one for one in stop):
        raise ValueError(f"stop must be a list of non-empty strings, got {stop!r}")
    if stop and tokenizer is None:
        raise ValueError(f"stop={list(stop)!r} requires a tokenizer")
    if as_int(seed) is None:
        raise ValueError(f"seed must be an integer, got {format_value(seed)}")
    rows = []
    for number, ids in enumerate(_as_ids(prompts, tokenizer)):
        room = _room(model, number, ids)
        last_reason: Reason = "length" if max_new_tokens <= room else "context"
        generator = torch.Generator().manual_seed(seed + number)
        limit = min(max_new_tokens, room)
        rows.append(_Row(number, ids, limit, last_reason, generator, tokenizer, tuple(stop)))
    if not rows:
        raise ValueError("prompts is empty; it must contain at least one prompt")
    return _run(model, rows, sampling, use_cache)


@dataclass
class _Row:
    """One prompt and its new tokens."""

    number: int
    prompt: list[int]
    limit: int
    limit_reason: Reason
    generator: torch.Generator
    tokenizer: Tokenizer | None
    stop: tuple[str, ...]
    new: list[int] = field(default_factory=list)
    shown: int = 0  # characters of the text already returned

    @property
    def ids(self) -> list[int]:
        return self.prompt + self.new

    def take(self, id: int, end: int | None) -> Piece:
        """Append a token; return a piece with the text that became final since the last one."""
        if id == end:
            return self._last(id, self.new, self._decode(self.new), "end")
        self.new.append(id)
        text = self._decode(self.new)
        cut = self._stops_at(text)
        if cut is not None:
            kept = len(self.new)
            while not text[:cut].startswith(self._decode(self.new[:kept])):
                kept -= 1
            return self._last(id, self.new[:kept], text[:cut], "stop")
        if len(self.new) == self.limit:
            return self._last(id, self.new, text, self.limit_reason)
        final = text[: self._final_length(text)]
        piece = Piece(self.number, id, final[self.shown :])
        self.shown = max(self.shown, len(final))
        return piece

    def _last(self, id: int, ids: list[int], text: str, reason: Reason) -> Piece:
        done = Generation(list(ids), text, reason)
        return Piece(self.number, id, text[self.shown :], done)

    def _decode(self, ids: list[int]) -> str:
        return "" if self.tokenizer is None else self.tokenizer.decode(ids)

    def _stops_at(self, text: str) -> int | None:
        """Return the index of the first stop string; none begins before `shown`."""
        places = [place for s in self.stop if (place := text.find(s, self.shown)) >= 0]
        return min(places, default=None)

    def _final_length(self, text: str) -> int:
        """Return the number of characters that no later token can change or cut."""
        final = len(text.rstrip(_UNFINISHED))
        for s in self.stop:
            for length in range(min(len(s) - 1, len(text)), 0, -1):
                if text.endswith(s[:length]):
                    final = min(final, len(text) - length)
                    break
        return final


def _run(model: GPT, rows: list[_Row], sampling: Sampling, use_cache: bool) -> Iterator[Piece]:
    end = model.config.eos_token_id
    cache = model.new_cache() if use_cache else None
    while rows:
        logits = _next_logits(model, rows, cache)
        if logits.isnan().any():
            raise ValueError("the model's logits are NaN: its weights are NaN or overflow")
        chosen = sampling.choose(logits, [row.generator for row in rows])
        running = []
        for index, (row, id) in enumerate(zip(rows, chosen, strict=True)):
            piece = row.take(id, end)
            if piece.done is None:
                running.append(index)
            yield piece
        if cache is not None and 0 < len(running) < len(rows):
            for part in cache:
                part.select(torch.tensor(running))
        rows = [rows[index] for index in running]


@torch.no_grad()
def _next_logits(
    model: GPT, rows: Sequence[_Row], cache: list[KVCache] | None
) -> Float[Tensor, "B V"]:
    """Compute the logits after the last token of each row; with a filled cache, only it is run."""
    device = model.transformer.wte.weight.device
    lengths = torch.tensor([len(row.ids) for row in rows])
    past = cache[0].length if cache is not None else 0
    if past:
        ids = torch.tensor([row.new[-1:] for row in rows])
    else:
        ids = _left_padded([row.ids for row in rows])
    keys = past + ids.shape[1]
    # The first real key of row b is in column `keys - lengths[b]`: that is its position 0.
    columns = torch.arange(past, keys)
    positions = (columns - (keys - lengths)[:, None]).clamp(min=0)
    padded = bool((lengths < keys).any())
    mask = Padding(lengths.to(device), side="left") if padded else None
    with _evaluating(model):
        return model.next_logits(
            ids.to(device), cache=cache, mask=mask, positions=positions.to(device)
        )


@contextlib.contextmanager
def _evaluating(model: GPT) -> Iterator[None]:
    """Disable dropout, then restore it, because a caller may train between two tokens."""
    if not model.training:
        yield
        return
    model.eval()
    try:
        yield
    finally:
        model.train()


def _left_padded(rows: Sequence[Sequence[int]]) -> Int[Tensor, "B T"]:
    """Return rows of ids, the short ones padded with 0 on the left."""
    longest = max(map(len, rows))
    return torch.tensor([[0] * (longest - len(row)) + list(row) for row in rows])


def _as_ids(
    prompts: Sequence[str] | Sequence[Sequence[int]], tokenizer: Tokenizer | None
) -> Iterator[list[int]]:
    if isinstance(prompts, str):
        raise ValueError(f"prompts must be a list with one entry per row, got {prompts!r}")
    for prompt in prompts:
        if not isinstance(prompt, str):
            try:
                yield [operator.index(id) for id in prompt]
            except TypeError:
                raise ValueError(
                    f"a prompt must be a text or a list of token ids, got {format_value(prompt)}"
                ) from None
        elif tokenizer is None:
            raise ValueError(f"prompt {prompt!r} is text and requires a tokenizer; else pass ids")
        else:
            must_be_text(prompt, f"prompt {prompt!r}")
            yield tokenizer.encode(prompt, add_special_tokens=False).ids


def _room(model: GPT, number: int, ids: Sequence[int]) -> int:
    """Return the number of tokens that fit after the prompt."""
    vocab, context = model.config.vocab_size, model.config.n_positions
    if not ids:
        raise ValueError(f"prompt {number} is empty; it must have at least one token")
    for id in ids:
        if not 0 <= id < vocab:
            raise ValueError(f"prompt {number} contains id {id}, outside the vocabulary of {vocab}")
    if len(ids) >= context:
        raise ValueError(
            f"prompt {number} has {len(ids)} tokens, and the model's context of {context} "
            f"leaves no room after it; shorten the prompt"
        )
    return context - len(ids)

"""Writing on: against `transformers`, with and without cache, filters, stop strings, streaming."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import transformers

from headwise.models import generation
from headwise.models.corpus import train_tokenizer
from headwise.models.generation import Generation, Piece, Sampling, generate, stream
from headwise.models.gpt import GPT, GPTConfig

PROMPTS = [[5, 9, 1], [7], [3, 3, 8, 2, 11, 6, 4], [12, 10]]


def model_of(vocab: int = 53, positions: int = 41, **more: Any) -> GPT:
    """A model that has opinions: random weights, larger than training starts from."""
    torch.manual_seed(3)
    config = GPTConfig(
        vocab_size=vocab,
        n_positions=positions,
        n_embd=15,
        n_layer=2,
        n_head=3,
        initializer_range=0.6,
        **more,
    )
    return GPT(config).eval()


class Scripted(GPT):
    """Writes the given ids, whatever it reads."""

    def __init__(self, script: list[int], vocab: int, positions: int = 97) -> None:
        super().__init__(GPTConfig(vocab, positions, n_embd=6, n_layer=1, n_head=3))
        self.script = script
        self.start: int | None = None

    def next_logits(self, ids: Any, **keywords: Any) -> torch.Tensor:
        positions = keywords["positions"][:, -1]
        if self.start is None:
            self.start = int(positions[0])
        logits = torch.zeros(len(ids), self.config.vocab_size)
        for row, position in enumerate(positions.tolist()):
            logits[row, self.script[position - self.start]] = 1.0
        return logits


@pytest.fixture(scope="module")
def tokenizer():
    """260 tokens: bytes, the end, and ` the`, `he`, ` t`."""
    return train_tokenizer([" the the the"], 260)


def test_greedy_tokens_equal_those_of_transformers(tmp_path) -> None:
    ours = model_of()
    ours.save_pretrained(tmp_path)
    theirs: Any = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    longest = max(map(len, PROMPTS))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in PROMPTS])
    attended = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in PROMPTS])
    wanted = theirs.generate(
        ids,
        attention_mask=attended,
        do_sample=False,
        max_new_tokens=23,
        pad_token_id=0,
        eos_token_id=None,
    )[:, longest:]
    got = generate(ours, PROMPTS, max_new_tokens=23)
    assert [row.ids for row in got] == wanted.tolist()
    assert {row.reason for row in got} == {"length"}
    assert len({tuple(row.ids) for row in got}) == len(PROMPTS)  # the prompts matter
    for prompt, row in zip(PROMPTS, got, strict=True):
        alone = theirs.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=23, eos_token_id=None
        )
        assert row.ids == alone[0, len(prompt) :].tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_cache_and_neighbours_change_nothing(temperature: float) -> None:
    model = model_of().double()
    together = generate(model, PROMPTS, max_new_tokens=23, temperature=temperature, seed=5)
    recomputed = generate(
        model, PROMPTS, max_new_tokens=23, temperature=temperature, seed=5, use_cache=False
    )
    assert together == recomputed
    for row, prompt in enumerate(PROMPTS):
        alone = generate(model, [prompt], max_new_tokens=23, temperature=temperature, seed=5 + row)
        assert alone == [together[row]]


def test_rows_end_each_on_their_own() -> None:
    free = generate(model_of(), PROMPTS, max_new_tokens=23)
    end = free[0].ids[4]
    model = model_of(eos_token_id=end)
    for use_cache in (True, False):
        rows = generate(model, PROMPTS, max_new_tokens=23, use_cache=use_cache)
        for row, whole in zip(rows, free, strict=True):
            cut = whole.ids.index(end) if end in whole.ids else None
            assert row.ids == whole.ids[:cut]
            assert row.reason == ("length" if cut is None else "end")
        assert len({len(row.ids) for row in rows}) > 1


def test_the_context_ends_a_row_and_says_so() -> None:
    model = model_of(positions=11)
    rows = generate(model, PROMPTS, max_new_tokens=9)
    assert [len(row.ids) for row in rows] == [8, 9, 4, 9]
    assert [row.reason for row in rows] == ["context", "length", "context", "length"]
    assert rows == generate(model, PROMPTS, max_new_tokens=9, use_cache=False)
    full = generate(model_of(positions=11).double(), [[1] * 10], max_new_tokens=3)
    assert (len(full[0].ids), full[0].reason) == (1, "context")


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"temperature": 0.7}, [("TemperatureLogitsWarper", 0.7)]),
        ({"temperature": 1.0, "top_k": 5}, [("TopKLogitsWarper", 5)]),
        ({"temperature": 1.0, "top_k": 99}, [("TopKLogitsWarper", 99)]),
        ({"temperature": 1.0, "top_p": 0.6}, [("TopPLogitsWarper", 0.6)]),
        ({"temperature": 1.0, "top_p": 0.01}, [("TopPLogitsWarper", 0.01)]),
        ({"temperature": 1.0, "min_p": 0.2}, [("MinPLogitsWarper", 0.2)]),
        (
            {"temperature": 1.7, "top_k": 11, "top_p": 0.8, "min_p": 0.1},
            [
                ("TemperatureLogitsWarper", 1.7),
                ("TopKLogitsWarper", 11),
                ("TopPLogitsWarper", 0.8),
                ("MinPLogitsWarper", 0.1),
            ],
        ),
    ],
)
def test_filters_equal_those_of_transformers(
    ours: dict[str, Any], theirs: list[tuple[str, float]]
) -> None:
    torch.manual_seed(0)
    logits = 3 * torch.randn(7, 53)
    logits[0] = 0.0  # a tie of all
    wanted = logits
    for name, value in theirs:
        wanted = getattr(transformers, name)(value)(torch.zeros(7, 1), wanted)
    got = Sampling(**ours).filtered(logits)
    torch.testing.assert_close(got, wanted, atol=1e-6, rtol=0)


def test_draws_follow_the_filtered_probabilities() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0, -50.0]])
    sampling = Sampling(temperature=2.0, top_k=3)
    generator = torch.Generator().manual_seed(0)
    draws = [sampling.choose(logits, [generator])[0] for _ in range(4000)]
    shares = torch.bincount(torch.tensor(draws), minlength=4) / 4000
    chances = torch.softmax(torch.tensor([0.5, 1.0, 1.5, -torch.inf]), 0)
    # Five standard deviations of a share of 4,000 draws are under 0.04.
    torch.testing.assert_close(shares, chances, atol=0.04, rtol=0)


def test_seeds() -> None:
    model = model_of()
    options: dict[str, Any] = {"max_new_tokens": 19, "temperature": 1.5}
    state = torch.get_rng_state()
    a = generate(model, PROMPTS, seed=1, **options)
    assert a == generate(model, PROMPTS, seed=1, **options)
    assert a != generate(model, PROMPTS, seed=2, **options)
    assert torch.equal(torch.get_rng_state(), state)


def write(script: list[int], tokenizer, **options: Any) -> tuple[Generation, list[Piece]]:
    pieces: list[Piece] = []
    model = Scripted([*script, *[0] * 9], 260)
    options = {"max_new_tokens": len(script), **options}
    rows = generate(model, [[1]], tokenizer=tokenizer, on_piece=pieces.append, **options)
    assert "".join(piece.text for piece in pieces) == rows[0].text
    assert [piece.done for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert pieces[-1].done == rows[0]
    return rows[0], pieces


def test_a_stop_string_across_tokens(tokenizer) -> None:
    script = tokenizer.encode("ab\n\ncd").ids
    assert len(script) == 6
    done, pieces = write(script, tokenizer, stop=["\n\nc"])
    assert (done.text, done.reason, done.ids) == ("ab", "stop", script[:2])
    assert [piece.text for piece in pieces] == ["a", "b", "", "", ""]


def test_a_stop_string_within_a_token(tokenizer) -> None:
    script = tokenizer.encode("x the end").ids
    the = tokenizer.token_to_id("Ġthe")
    assert script[1] == the
    done, _ = write(script, tokenizer, stop=["he"])
    assert (done.text, done.reason) == ("x t", "stop")
    assert done.ids == script[:1]  # ` the` does not lie wholly before the cut


def test_what_only_looked_like_a_stop_string_is_given_out(tokenizer) -> None:
    done, pieces = write(tokenizer.encode("ababac!").ids, tokenizer, stop=["abac?", "!!"])
    assert (done.text, done.reason) == ("ababac!", "length")
    assert [piece.text for piece in pieces] == ["", "", "", "ab", "", "", "abac!"]


def test_the_first_of_several_stop_strings(tokenizer) -> None:
    script = tokenizer.encode("one two three").ids
    done, _ = write(script, tokenizer, stop=["three", "two", "never"])
    assert done.text == "one "
    done, _ = write(script, tokenizer, stop=["never"])
    assert (done.text, done.reason) == ("one two three", "length")


def test_characters_of_several_bytes_come_whole(tokenizer) -> None:
    script = tokenizer.encode("é€🙂.").ids
    assert len(script) == 10
    done, pieces = write(script, tokenizer)
    assert done.text == "é€🙂."
    assert [piece.text for piece in pieces] == ["", "é", "", "", "€", "", "", "", "🙂", "."]
    done, _ = write(script[:-2], tokenizer)
    assert done.text == "é€\N{REPLACEMENT CHARACTER}"


def test_the_end_of_text_is_not_written(tokenizer) -> None:
    model = Scripted([*tokenizer.encode("ab").ids, 0, 70], 260)
    model.config = GPTConfig(260, 97, n_embd=6, n_layer=1, n_head=3, eos_token_id=0)
    (done,) = generate(model, ["x"], tokenizer=tokenizer)
    assert (done.text, done.reason, len(done.ids)) == ("ab", "end", 2)


def test_texts_and_ids_are_the_same_prompts(tokenizer) -> None:
    model = model_of(vocab=260)
    ids = [tokenizer.encode(text).ids for text in ("the", "a the the")]
    texts = generate(model, ["the", "a the the"], max_new_tokens=7, tokenizer=tokenizer)
    assert texts == generate(model, ids, max_new_tokens=7, tokenizer=tokenizer)
    assert texts[1].text == tokenizer.decode(texts[1].ids)
    assert generate(model, ids, max_new_tokens=7)[0].text == ""


def test_stream_comes_token_by_token() -> None:
    pieces = stream(model_of(), PROMPTS[:2], max_new_tokens=3)
    assert [(piece.row, piece.done is not None) for piece in pieces] == [
        (0, False),
        (1, False),
        (0, False),
        (1, False),
        (0, True),
        (1, True),
    ]


def test_a_model_in_training_mode_writes_without_dropout_and_stays_so() -> None:
    model = model_of(resid_pdrop=0.5)
    want = generate(model, PROMPTS, max_new_tokens=5)
    model.train()
    assert generate(model, PROMPTS, max_new_tokens=5) == want
    assert model.training
    assert model.transformer.drop.training


def test_no_graph_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    choose = Sampling.choose

    def spy(self: Sampling, logits: torch.Tensor, generators: Any) -> list[int]:
        seen.append(logits.requires_grad)
        return choose(self, logits, generators)

    monkeypatch.setattr(generation.Sampling, "choose", spy)
    generate(model_of(), PROMPTS, max_new_tokens=2)
    assert seen == [False, False]


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([], {}, "prompts is empty"),
        ([[1], []], {}, "prompt 1 is empty"),
        ([[1, 53]], {}, "prompt 0 contains id 53, outside the vocabulary of 53"),
        ([[-1]], {}, "prompt 0 contains id -1"),
        ([[1] * 41], {}, "prompt 0 has 41 tokens, and the model's context of 41 leaves no"),
        ("text", {}, "must be a list with one entry per row"),
        (["text"], {}, "prompt 'text' is text and requires a tokenizer"),
        ([[1]], {"stop": ["a"]}, r"stop=['a'] requires a tokenizer"),
        ([1, 2], {}, "a prompt must be a text or a list of token ids, got 1"),
        ([[1.5]], {}, "a prompt must be a text or a list of token ids, got [1.5]"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        ([[1]], {"seed": 0.5}, "seed must be an integer, got 0.5"),
        ([[1]], {"stop": [3]}, "must be a list of non-empty strings"),
        ([[1]], {"top_p": "0.5"}, "top_p must be a number, got '0.5'"),
        ([[1]], {"max_new_tokens": 2.5}, "max_new_tokens must be an integer, got 2.5"),
        ([[1]], {"top_k": "3"}, "top_k must be an integer, got '3'"),
        (
            [[1]],
            {"temperature": -0.1},
            "temperature must be 0 (greedy) or at least 0.001, got -0.1",
        ),
        ([[1]], {"temperature": float("nan")}, "temperature must be 0"),
        ([[1]], {"top_k": 0}, "top_k must be at least 1, got 0"),
        ([[1]], {"top_p": 0.0}, "top_p must be above 0"),
        ([[1]], {"min_p": 1.1}, "min_p must be between 0 and 1, got 1.1"),
    ],
)
def test_bad_calls_are_named_at_once(prompts: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        stream(model_of(), prompts, **options)


def test_an_empty_stop_string(tokenizer) -> None:
    with pytest.raises(ValueError, match="non-empty strings"):
        stream(model_of(), [[1]], stop=["a", ""], tokenizer=tokenizer)


def test_models_and_prompts_that_cannot_be_gone_on_from():
    model = GPT(GPTConfig(vocab_size=11, n_positions=7, n_embd=6, n_layer=1, n_head=3))
    with pytest.raises(ValueError, match=r"greedy\) or at least 0\.001"):
        generate(model, [[1]], temperature=1e-45)
    with torch.no_grad():
        model.transformer.wte.weight.fill_(torch.nan)
    with pytest.raises(ValueError, match="logits are NaN"):
        generate(model, [[1]])

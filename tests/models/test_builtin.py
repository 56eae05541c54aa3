"""What the built-in model's card says of it, measured."""

import pytest
import torch

from headwise.models import corpus
from headwise.models.gpt import GPT, builtin, load
from headwise.models.run import windows
from headwise.report import look
from headwise.report.schema import Look


@pytest.fixture(scope="module")
def seen() -> Look:
    model, tokenizer = load(builtin())
    return look(model, tokenizer, corpus.manual_passage())


def test_it_is_small_and_has_heads_to_look_at() -> None:
    files = [path for path in builtin().iterdir() if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 4_000_000
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= {
        path.name for path in files
    }
    config = GPT.from_pretrained(builtin()).config
    assert 2 <= config.n_layer <= 4
    assert 4 <= config.n_head <= 8


def test_held_out_loss_is_well_under_the_bigram_baseline() -> None:
    model, tokenizer = load(builtin())
    text = corpus.manual()
    train, held = corpus.join(tokenizer, text.train), corpus.join(tokenizer, text.held_out)
    inputs, targets = windows(held, model.config.n_positions, most=64)
    with torch.no_grad():
        logits = model(inputs)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()
    vocab = tokenizer.get_vocab_size()
    assert loss < corpus.bigram_loss(train, inputs, targets, vocab) - 0.4
    assert loss < corpus.unigram_loss(train, targets, vocab) - 2


def test_there_is_a_previous_token_head(seen: Look) -> None:
    assert max(row["previous"] for row in seen.rows) >= 0.5
    assert max(row["previous_random"] for row in seen.rows) >= 0.5


def test_there_is_an_induction_head(seen: Look) -> None:
    assert max(row["induction_random"] for row in seen.rows) >= 0.6
    first, second = seen.provenance["loss_first_copy"], seen.provenance["loss_second_copy"]
    assert second <= first - 3


def test_transformers_reads_it() -> None:
    from transformers import GPT2LMHeadModel

    ids = torch.randint(0, 300, (2, 50))
    with torch.no_grad():
        theirs = GPT2LMHeadModel.from_pretrained(builtin()).eval()(ids).logits
        ours = GPT.from_pretrained(builtin())(ids)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)

"""Whole models that take ids of tokens: x goes in behind their embedding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from headwise.check import check

NOTE = "it takes ids of tokens: x goes in behind its embedding, [B, T, 24]"


class Layer(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.kv, self.proj = (nn.Linear(dim, n * dim) for n in (1, 2, 1))

    def forward(self, x: Tensor, source: Tensor, hidden: Tensor | None = None) -> Tensor:
        parts = (self.q(x), *self.kv(source).chunk(2, -1))
        q, k, v = (one.unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in parts)
        scores = q @ k.mT / q.shape[-1] ** 0.5
        if hidden is not None:
            scores = scores.masked_fill(hidden, float("-inf"))
        return self.proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class GPT(nn.Module):
    """Rows of a table, positions, causal layers, logits by the table's own weights."""

    offset, last = 1, False

    def __init__(self, vocab_size: int, n_embd: int, n_head: int, n_layer: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, n_embd), nn.Embedding(16, n_embd)
        self.layers = nn.ModuleList([Layer(n_embd, n_head) for _ in range(n_layer)])
        self.head = nn.Linear(n_embd, vocab_size, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        _, tokens = idx.shape
        x = self.wte(idx) + self.wpe(torch.arange(tokens, device=idx.device))
        later = torch.ones(tokens, tokens, device=idx.device).triu(self.offset).bool()
        for layer in self.layers:
            x = x + layer(x, x, later)
        logits = self.head(x[:, [-1]] if self.last and targets is None else x)
        if targets is None:
            return logits, None
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Leaky(GPT):
    """One key too many is seen."""

    offset = 2


class OfTheLast(GPT):
    """As nanoGPT has it: logits of the last token alone, where nothing is learnt."""

    last = True


class Padded(nn.Module):
    """An encoder that tells padding by its ids."""

    def __init__(self, vocab_size: int, dim: int, heads: int) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(vocab_size, dim), Layer(dim, heads)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) * self.embedding.embedding_dim**0.5
        return self.layer(x, x, (ids == 0)[:, None, None])


class Translator(nn.Module):
    """Two embeddings, of the source and of what is written; one layer crosses."""

    def __init__(self, src_vocab_size: int, tgt_vocab_size: int, d_model: int, heads: int) -> None:
        super().__init__()
        self.source, self.target = (
            nn.Embedding(n, d_model) for n in (src_vocab_size, tgt_vocab_size)
        )
        self.encoder, self.decoder, self.cross = (Layer(d_model, heads) for _ in range(3))

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        memory, x = self.source(src), self.target(tgt)
        memory = self.encoder(memory, memory)
        later = torch.ones(x.shape[1], x.shape[1], device=x.device).triu(1).bool()
        return self.cross(self.decoder(x, x, later), memory)


@pytest.mark.parametrize("kind", [GPT, OfTheLast, Padded, Translator])
def test_a_right_model_passes(kind: type[nn.Module]) -> None:
    verdict = check(kind)
    assert verdict.passed, str(verdict)
    assert NOTE in verdict.notes
    assert verdict.unchecked  # its weights are read by nobody


def test_a_model_that_sees_a_later_token() -> None:
    (one,) = check(Leaky).errors
    assert one.rule == "causality", one
    assert check(GPT)["causality"].severity == "passed"


def test_what_was_given_stays_as_it_was() -> None:
    model = GPT(11, 24, 3, 1)
    before = {name: one.clone() for name, one in model.state_dict().items()}
    assert check(model).passed
    assert type(model.wte) is nn.Embedding
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())


def test_a_call_that_is_shown_may_want_ids() -> None:
    verdict = check(Leaky, call=lambda model, ids: model(ids)[0])
    assert [one.rule for one in verdict.errors] == ["causality"], str(verdict)
    assert NOTE in verdict.notes
    with pytest.raises(ValueError, match=r"no nn\.Embedding gets the ids as they are"):
        check(Layer, 24, 3, call=lambda layer, ids: layer(ids, ids))

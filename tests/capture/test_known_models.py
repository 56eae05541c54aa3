"""Models that were watched before: what is seen of them, without hooks and a function mode."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as hooks
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import headwise as hw
from headwise.capture import known
from headwise.capture.private_torch import modes
from hugging_cases import CASES
from journeys import moves

STATISTICS = (hw.Entropy(), hw.MaxLogit(), hw.Mass(hw.First()), hw.Distance(absolute=True))


def is_known(model: nn.Module) -> bool:
    return known.known(model) is not None


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_the_second_watch_sees_what_the_first_saw(name: str) -> None:
    model = CASES[name].model()
    for padded in (False, True):
        inputs = CASES[name].inputs(padded)
        known.forget(model)
        with hw.watch(model, *STATISTICS) as first:
            plain = model(**inputs)[0]
        with hw.watch(model, *STATISTICS) as second:
            assert torch.equal(model(**inputs)[0], plain)
        assert first.table() == second.table()
        assert first.left_out == second.left_out


@torch.no_grad()
def test_a_known_model_runs_as_if_nobody_watched() -> None:
    model, inputs = CASES["llama"].model(), CASES["llama"].inputs(False)
    assert not is_known(model)
    with hw.watch(model) as seen:
        model(**inputs)
        assert modes()
    assert is_known(model)
    with hw.watch(model) as again:
        assert not modes()
        assert not hooks._global_forward_pre_hooks
        model(**inputs)
    assert again.modules == seen.modules
    with hw.watch(model.layers[0], gradients=True):
        assert modes()


@torch.no_grad()
def test_a_table_of_a_layer_takes_few_moves_between_files() -> None:
    model, inputs = CASES["llama"].model(num_hidden_layers=1), CASES["llama"].inputs(False)

    def watched() -> None:
        with hw.watch(model) as seen:
            model(**inputs)
        seen.table()

    assert moves(watched) <= 220


@torch.no_grad()
def test_what_has_changed_is_followed_in_full() -> None:
    model, inputs = CASES["llama"].model(), CASES["llama"].inputs(False)

    def watched() -> hw.capture.Watched:
        with hw.watch(model, hw.Entropy()) as seen:
            model(**inputs)
        return seen

    before = watched().table()
    model.set_attn_implementation("eager")
    assert not is_known(model)
    after = watched().table()
    assert is_known(model)
    assert after[0]["entropy"] == pytest.approx(before[0]["entropy"], abs=1e-5)
    model.layers[1] = CASES["llama"].model().layers[1]
    assert not is_known(model)
    watched()
    model.layers[1].self_attn.forward = model.layers[1].self_attn.forward
    assert not is_known(model)


@torch.no_grad()
def test_what_changes_under_a_watch_is_followed_in_full() -> None:
    model, inputs = CASES["llama"].model(), CASES["llama"].inputs(False)
    with hw.watch(model):
        model(**inputs)

    class Attending(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q = x.unflatten(-1, (4, 8)).transpose(1, 2)
            out = nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
            return x + 0 * out.transpose(1, 2).flatten(2)

    with hw.watch(model, hw.Entropy()) as seen:
        assert not modes()
        model.layers[1].mlp = nn.Sequential(Attending())
        model(**inputs)
        assert modes()
        model(**inputs)
    assert set(seen) == {"layers.0.self_attn", "layers.1.self_attn", "layers.1.mlp.0"}
    assert {len(seen[name].calls) for name in seen} == {2}
    assert not modes()
    assert not is_known(model)


@torch.no_grad()
def test_modules_that_attend_otherwise_keep_a_model_unknown() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = CASES["llama"].model()
            width = self.model.config.hidden_size
            self.own_attention = nn.MultiheadAttention(width, 2, batch_first=True)

        def forward(self, also: bool, **inputs: torch.Tensor) -> torch.Tensor:
            out = self.model(**inputs)[0]
            return self.own_attention(out, out, out)[0] if also else out

    both, inputs = Both().eval(), CASES["llama"].inputs(False)
    with hw.watch(both):
        both(False, **inputs)
    assert not is_known(both)  # its own attention may be called next time
    with hw.watch(both) as seen:
        both(True, **inputs)
    assert "own_attention" in seen.modules
    assert not is_known(both)


@torch.no_grad()
def test_another_thread_and_a_part_are_heard() -> None:
    model, inputs = CASES["llama"].model(), CASES["llama"].inputs(False)
    for _ in range(2):
        found: list[BaseException] = []

        def run(found: list[BaseException] = found) -> None:
            try:
                model(**inputs)
            except RuntimeError as error:
                found.append(error)

        with hw.watch(model) as seen:
            thread = threading.Thread(target=run)
            thread.start()
            thread.join()
            model(**inputs)
        assert found == []
        assert len(seen[seen.modules[0]].calls) == 2
    with hw.watch(model) as seen:
        pass
    with pytest.raises(ValueError, match="the model was not called"):
        seen.table()


@torch.no_grad()
def test_another_way_to_attend_is_left_out_and_followed_next_time() -> None:
    model, inputs = CASES["llama"].model(), CASES["llama"].inputs(False)
    with hw.watch(model):
        model(**inputs)
    function = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def doubled(*args: Any, **kwargs: Any) -> Any:
        return 2 * function(*args, **kwargs)[0], None

    ALL_ATTENTION_FUNCTIONS["sdpa"] = doubled
    try:
        with hw.watch(model) as seen:
            model(**inputs)
        assert len(seen) == 0
        assert "watch the model again" in seen.left_out["layers.0.self_attn"]
        assert not is_known(model)
    finally:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = function
    for _ in range(2):
        with hw.watch(model) as seen:
            model(**inputs)
        assert len(seen) == 2


@torch.no_grad()
def test_transforms_of_functions_are_refused_by_name() -> None:
    model, inputs = CASES["llama"].model(), CASES["llama"].inputs(False)
    with hw.watch(model):
        model(**inputs)
    embedded = model.embed_tokens(inputs["input_ids"])
    with hw.watch(model), pytest.raises(ValueError, match=r"'layers\.0\.self_attn' runs inside"):
        torch.func.vmap(lambda x: model(inputs_embeds=x[None])[0])(embedded)


class Mixed(nn.Module):
    """A layer of headwise, and attention by hand in some forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = hw.MultiHeadAttention(16, 2)

    def forward(self, x: Tensor, extra: bool = False) -> Tensor:
        x = self.layer(x, mask=hw.Causal())
        if extra:
            h = x.unflatten(2, (2, 8)).transpose(1, 2)
            x = x + F.scaled_dot_product_attention(h, h, h).transpose(1, 2).flatten(2)
        return x


def test_forwards_that_people_write_are_followed_in_full() -> None:
    model, x = Mixed(), torch.randn(2, 5, 16)
    for extra in (False, True, False, True):
        with hw.watch(model) as seen:
            model(x, extra)
        assert set(seen.modules) == ({"", "layer"} if extra else {"layer"})

"""Model types of transformers: those that build small and take texts, pictures or sounds."""

from __future__ import annotations

from pathlib import Path

import pytest

from small import inputs_of, model_of
from watching import Case, assert_left_out, assert_seen

SEEN = (Path(__file__).parent / "transformers_types.txt").read_text().split()

LEFT_OUT = {  # how many calls are seen nevertheless, and the reason
    "deepseek_v4": (2, "no product with values was seen"),  # mixes of streams
    "groupvit": (16, "is over axis -2, not the last"),  # patches are assigned to groups
    "inkling2_text": (0, "does not return softmax"),  # sinks for each query
    "led": (4, "no product with values was seen"),  # windows, in parts
    "longformer": (0, "no product with values was seen"),
    "pegasus_x": (4, "no product with values was seen of 1 more softmax"),  # global and local
    "sew-d": (0, "no product with values was seen"),  # DeBERTa's, as TorchScript
    "swiftformer": (0, "no product with values was seen"),  # one weight for each position
}


def case(kind: str) -> Case:
    model = model_of(kind)
    inputs = inputs_of(model)
    return model, lambda model: model(**inputs)


@pytest.mark.parametrize("kind", SEEN)
def test_models_are_seen(kind: str) -> None:
    assert_seen(case(kind))


@pytest.mark.parametrize("kind", LEFT_OUT)
def test_models_are_left_out(kind: str) -> None:
    seen, reason = LEFT_OUT[kind]
    assert_left_out(case(kind), reason, seen)

"""Settings of the peers' tests: everything on the CPU, Keras on torch."""

import os

import pytest
import torch

os.environ["KERAS_BACKEND"] = "torch"
os.environ["JAX_PLATFORMS"] = "cpu"


@pytest.fixture(autouse=True)
def _fresh_random_numbers() -> None:
    torch.manual_seed(0)

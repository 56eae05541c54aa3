"""Settings of the coverage tests: one thread a worker, no network, and a torchvision that loads."""

import os

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"
torch.set_num_threads(1)

# PyPI's torchvision is compiled for PyTorch with CUDA. On CPUs its library does not load, and its
# Python code registers fake kernels of two operators that are then missing: it needs no more than
# their declarations.
if not torch.cuda.is_available():
    DECLARED = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        DECLARED.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


@pytest.fixture(autouse=True)
def _fresh_random_numbers() -> None:
    torch.manual_seed(0)

"""Settings of the trainers' tests: on the CPU, and nothing leaves this machine."""

import os
from pathlib import Path

import pytest
import torch

os.environ |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "HF_HUB_OFFLINE": "1"}
os.environ |= {"TRACKIO_OFFLINE": "1", "ACCELERATE_USE_CPU": "1", "TOKENIZERS_PARALLELISM": "false"}


@pytest.fixture(autouse=True)
def _apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)

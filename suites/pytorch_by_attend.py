"""A plugin for pytest: PyTorch's own test files with `attend` for scaled_dot_product_attention.

    PYTHONPATH=suites BACKEND=auto python -m pytest -p pytorch_by_attend …/test/test_transformers.py

`BACKEND=none` changes nothing: what fails then fails without headwise. `EVERY=41` keeps each 41st
of the three thousand cases of `test_scaled_dot_product_fused_attention_mask_vs_math_cpu`. What
headwise does not take, or the backend of that name, goes to PyTorch and is counted with the reason.
"""

import os
import sys
from collections import Counter
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from adapters import reasons, scaled_dot_product_attention
from torch import Tensor
from torch.nn.attention.bias import CausalBias

BACKEND = os.environ.get("BACKEND", "auto")
EVERY = int(os.environ.get("EVERY", "1"))
PYTORCHS = F.scaled_dot_product_attention
SERVED: Counter[str] = Counter()


def attended(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    tensors = query, key, value
    options: dict[str, Any] = {
        "attn_mask": attn_mask,
        "dropout_p": dropout_p,
        "is_causal": is_causal,
        "scale": scale,
        "enable_gqa": enable_gqa,
    }
    if isinstance(attn_mask, CausalBias):  # it knows PyTorch's function, not this one
        if is_causal:
            return CausalBias._dispatch(*tensors, **options)  # an error
        options["attn_mask"] = attn_mask = attn_mask._materialize(query.device)
    if torch.compiler.is_compiling():  # what is asked and counted below would leave the graph
        return scaled_dot_product_attention(*tensors, **options, backend=BACKEND)
    why = left(*tensors, attn_mask, dropout_p)
    if why is None:
        try:
            why = "; ".join(reasons(*tensors, **options, backend=BACKEND)) or None
        except ValueError as error:  # no such call: PyTorch's own words are asked for
            why = f"refused: {str(error).partition(': ')[2]}"
    SERVED["by headwise" if why is None else f"by PyTorch: {why}"] += 1
    if why is not None:
        return PYTORCHS(*tensors, **options)
    # Random numbers are drawn like the output: in another order of memory they would be others.
    return scaled_dot_product_attention(*tensors, **options, backend=BACKEND).contiguous()


def left(query: Tensor, key: Tensor, value: Tensor, mask: Any, dropout: float) -> str | None:
    """Why a call is none of headwise's."""
    if any(x.is_nested for x in (query, key, value)):
        return "nested tensors"
    if any(type(x) not in (Tensor, torch.nn.Parameter) for x in (query, key, value)) or (
        mask is not None and type(mask) is not Tensor
    ):
        return "subclasses of tensors"
    if dropout:
        return "dropout, which is compared number by number"
    kernels = torch.backends.cuda
    if not (kernels.flash_sdp_enabled() or kernels.mem_efficient_sdp_enabled()):
        return "asked of its math kernel, the reference"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    many = [item for item in items if "fused_attention_mask_vs_math" in item.name]
    dropped = {id(item) for n, item in enumerate(many) if n % EVERY}
    items[:] = [item for item in items if id(item) not in dropped]


def pytest_configure(config: pytest.Config) -> None:
    # It compiles an extension for a device of its own.
    name = "test_cpp_extensions_open_device_registration"
    stub = ModuleType(name)
    stub.generate_faked_module = stub.remove_build_path = lambda *_: None
    stub.generate_faked_module_methods = lambda *_: None
    sys.modules[name] = stub
    if BACKEND != "none":
        F.scaled_dot_product_attention = attended


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for why, number in SERVED.most_common():
        terminalreporter.write_line(f"{number:8,} calls {why}")

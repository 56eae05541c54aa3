"""Which unit computes, and whether the kernel or PyTorch does: static rules."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import headwise as hw
from headwise.backends import Call, choose
from headwise.core.call import PREPARED
from headwise.kernels import ctypes_api as cpu

UNITS = ("amx", "avx512bf16", "avx512", "avx2", "plain")

pytestmark = pytest.mark.skipif(cpu.library() is None, reason=cpu.why_not() or "-")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stand in for a machine whose best unit is another one."""

    def stand_in(best: str) -> None:
        found = cpu.library()
        assert found is not None
        other = dataclasses.replace(found, sets=UNITS, best=best)
        monkeypatch.setattr(cpu, "_LIBRARY", other)
        PREPARED.clear()

    yield stand_in
    PREPARED.clear()


def test_the_richest_unit_with_code_for_the_dtype(machine: Any) -> None:
    found = {}
    for best in UNITS:
        machine(best)
        found[best] = [cpu.unit(dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32)]
    assert found == {
        "amx": ["amx", "avx512", "avx512"],
        "avx512bf16": ["avx512bf16", "avx512", "avx512"],
        "avx512": ["avx512"] * 3,
        "avx2": ["avx2"] * 3,
        "plain": ["plain"] * 3,
    }


def test_a_unit_chosen_by_name_goes_first() -> None:
    with cpu.instructions("plain"):
        assert cpu.unit(torch.float32) == "plain"


@pytest.mark.parametrize("queries", [1, 64])
def test_the_kernel_serves_every_call_but_float32_without_vectors(
    machine: Any, queries: int
) -> None:
    def call(dtype: torch.dtype, **options: float) -> Call:
        k = torch.zeros(1, 1, 300, 64, dtype=dtype)
        return Call.of(k[:, :, :queries], k, k, **options)

    for best in UNITS:
        machine(best)
        float32 = "sdpa" if best == "plain" else "native"
        assert choose(call(torch.float32)).name == float32
        assert choose(call(torch.bfloat16)).name == "native"
        assert choose(call(torch.float16)).name == "native"
        assert choose(call(torch.float32), "native").name == "native"
        assert choose(call(torch.float32, dropout=0.5)).name == "native"


def test_explain_names_the_unit(machine: Any) -> None:
    q = torch.zeros(1, 1, 2, 64)
    machine("avx2")
    assert hw.explain(q, q, q).unit == "avx2"
    assert "→ native   can run this call with avx2" in str(hw.explain(q, q, q))
    double = hw.explain(q.double(), q.double(), q.double())
    assert double.unit == ""

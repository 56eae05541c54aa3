"""flash-attention's own tests against its own reference, with `attend` in place of its kernels.

Its grid has half a million cells. What is kept of each axis is written here; `CELLS=500` draws so
many more of each function's cells, with no more than 1,100 queries or keys. The bounds are its own,
such as twice the error of the same formulas in the inputs' dtype. Cells take the backends in turn.
"""

import os
import random
from collections.abc import Callable, Iterator
from itertools import cycle, product
from typing import Any
from unittest.mock import patch

import flash_attention
import pytest
from sources import source

from headwise.backends import BACKENDS

THEIRS = flash_attention.load_tests(source("flash_attn"))
NAMES = [*(backend.name for backend in BACKENDS), "auto"]
BACKENDS_FOR = {
    "any cell": NAMES,
    "many queries": [name for name in NAMES if name != "sdpa"],
    "softcap": ["blocked", "eager", "auto"],
}
"""PyTorch's kernel adds up the gradients of keys and values in the inputs' dtype, one block of
queries after another: with more than a few blocks it is outside of the bounds without headwise."""
FEW = 128
CELLS, LONGEST = int(os.environ.get("CELLS", "0")), 1100

Cell = dict[str, Any]
Axes = dict[str, list[Any]]

ALWAYS: Axes = {
    "dropout_p": [0.0],
    "deterministic": [False],
    "num_splits": [0],
    "rotary_fraction": [0.0],
    "rotary_interleaved": [False],
}
"""What no cell varies; the reasons are in `README.md`."""

KEPT: dict[str, Axes] = {
    "output": {
        "kvpacked": [False],
        "d": [59],
        "seqlen_q,seqlen_k": [(113, 203), (512, 256)],
    },
    "varlen_output": {"kvpacked": [True], "d": [59], "seqlen_q,seqlen_k": [(113, 203)]},
    "qkvpacked": {"d": [32, 111], "seqlen": [97, 128]},
    "varlen_qkvpacked": {"d": [59], "seqlen": [97]},
    "causal": {"d": [64], "seqlen_q,seqlen_k": [(1, 239), (127, 513)]},
    "varlen_causal": {"d": [64], "seqlen_q,seqlen_k": [(127, 513)]},
    "splitkv": {"d": [32], "seqlen_q,seqlen_k": [(3, 799), (256, 256)]},
    "kvcache": {"mha_type": ["gqa"], "d": [59], "seqlen_q,seqlen_k": [(1, 339), (64, 256)]},
    "bwd_overflow": {},
    "bwd_transpose": {"d": [64], "seqlen": [97, 128]},
    "bwd_varlen_overflow": {},
    "deterministic": {"d": [40], "seqlen_q,seqlen_k": [(113, 203)]},
    "varlen_deterministic": {"d": [32], "seqlen_q,seqlen_k": [(1, 239), (3, 799)]},
}
"""What a run keeps of the other axes, by function."""


def axes(function: str) -> Axes:
    """Every axis of a function's grid with its values, less what no cell varies."""
    marks = getattr(THEIRS, f"test_flash_attn_{function}").pytestmark
    theirs = {mark.args[0]: list(mark.args[1]) for mark in marks}
    assert all(set(ALWAYS[name]) <= set(theirs[name]) for name in ALWAYS.keys() & theirs.keys())
    return theirs | {name: ALWAYS[name] for name in ALWAYS.keys() & theirs.keys()}


def kept(function: str) -> list[Cell]:
    """The cells of a function that every run has."""
    theirs, chosen = axes(function), KEPT[function]
    assert all(set(values) <= set(theirs[name]) for name, values in chosen.items())
    return cells(theirs | chosen)


def drawn(function: str, many: int) -> list[Cell]:
    """Cells of the whole grid, drawn with a seed."""
    every = [c for c in cells(axes(function)) if longest(c) <= LONGEST]
    return random.Random(0).sample(every, min(many, len(every)))


def cells(grid: Axes) -> list[Cell]:
    found = []
    for values in product(*grid.values()):
        cell: Cell = {}
        for names, value in zip(grid, values, strict=True):
            many = names.split(",")
            cell |= dict(zip(many, value if len(many) > 1 else [value], strict=True))
        found.append(cell)
    return found


def longest(cell: Cell) -> int:
    return max([n for name, n in cell.items() if name in ("seqlen", "seqlen_q", "seqlen_k")] or [0])


def label(value: object) -> str:
    return ",".join(map(str, value.values())) if isinstance(value, dict) else str(value)


GRID = [
    (function, cell)
    for function in KEPT
    for cell in (drawn(function, CELLS) if CELLS else kept(function))
]


def test_none_of_its_tests_is_forgotten() -> None:
    theirs = {name for name in vars(THEIRS) if name.startswith("test_")}
    assert theirs == {f"test_flash_attn_{name}" for name in (*KEPT, "race_condition")}


def in_turn() -> Iterator[tuple[str, Cell, str]]:
    """Every cell with a backend, each of those that serve it in turn."""
    turns = {name: cycle(names) for name, names in BACKENDS_FOR.items()}
    for function, cell in GRID:
        queries = max(cell.get("seqlen_q", 0), cell.get("seqlen", 0))
        kind = "any cell" if queries <= FEW else "many queries"
        yield function, cell, next(turns["softcap" if cell.get("softcap") else kind])


@pytest.mark.parametrize(("function", "cell", "backend"), in_turn(), ids=label)
def test_cell(function: str, cell: Cell, backend: str, count: Callable[..., None]) -> None:
    with patch.object(flash_attention, "BACKEND", backend):
        getattr(THEIRS, f"test_flash_attn_{function}")(**cell)
    count(**{f"on {backend}": 1})

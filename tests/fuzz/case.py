"""A random call of the native kernel as a value: short to print, and the same call each time."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

import torch
from torch import Tensor

from headwise.backends import Call
from headwise.core.mask_algebra import Mask, Rows
from headwise.core.masks import as_mask
from headwise.core.shapes import Extent
from headwise.kernels.interface import STATISTICS

from .mask_parts import Parts, in_double, mask_of
from .numbers import DTYPES, LAYOUTS, generator, numbers

DIFFERENTIABLE = ("out", *(name for name in STATISTICS if name != "max"))
"""What a call gives that has a gradient."""


@dataclass(frozen=True)
class Case:
    """Sizes, masks, numbers and layouts of a call, and what is asked of it."""

    batch: int = 1
    kv_heads: int = 1
    group: int = 1
    queries: int = 1
    keys: int = 1
    dim: int = 1
    wide: int = 1
    dtype: str = "float32"
    mask: Parts = ()
    scale: float | None = None
    softcap: float | None = None
    sinks: str = ""  # their kind of numbers, or none
    kinds: tuple[str, str, str] = ("normal", "normal", "normal")  # of the numbers in q, k and v
    layouts: tuple[str, str, str] = ("dense", "dense", "dense")
    few: bool = False  # some of the queries only, as where statistics are sampled
    figures: tuple[str, ...] = ()  # that are wished beside the log-sum-exp
    output: bool = True
    incoming: tuple[str, ...] = ()  # what a gradient comes in for
    incoming_kind: str = "normal"
    incoming_layout: str = "dense"
    needed: str = "qkvs"  # which of q, k, v and the sinks want a gradient
    blocks: int = 1  # of a block map
    weighted: bool = False  # whether queries count differently in sums over them
    threads: int = 1  # 2: also on two, with the same bits
    seed: int = 0

    def __repr__(self) -> str:
        told = [f for f in fields(self) if getattr(self, f.name) != f.default]
        return f"Case({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in told)})"

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    def fits(self) -> bool:
        """Whether there is such a call: documents need a key for each query."""
        documents = any("documents" in name for group in self.mask for name in group)
        return self.queries <= self.keys or not documents


class Inputs:
    """The tensors of a case, and the call on them or on the same numbers in float64."""

    def __init__(self, case: Case) -> None:
        self.case, self.dtype = case, DTYPES[case.dtype]
        b, h, g = case.batch, case.heads, case.kv_heads
        whole = Extent(b, h, g, case.queries, case.keys)
        self.mask = mask_of(case.mask, whole, generator(case.seed, 0))
        q, self.k, self.v = (
            LAYOUTS[layout](numbers(kind, shape, self.dtype, generator(case.seed, stream)))
            for stream, (layout, kind, shape) in enumerate(
                zip(
                    case.layouts,
                    case.kinds,
                    [
                        (b, h, case.queries, case.dim),
                        (b, g, case.keys, case.dim),
                        (b, g, case.keys, case.wide),
                    ],
                    strict=True,
                ),
                start=1,
            )
        )
        self.rows = None
        if case.few:
            random = generator(case.seed, 4)
            chosen = torch.rand(case.queries, generator=random) < 0.5
            chosen[int(torch.randint(0, case.queries, (), generator=random))] = True
            self.rows = chosen.nonzero()[:, 0]
        self.q = q if self.rows is None else q[:, :, self.rows]
        self.extent = Extent(b, h, g, self.q.shape[2], case.keys)
        self.whole = whole
        self.sinks = _sinks(case) if case.sinks else None

    def call(self, grad: bool = False) -> Call:
        """The call on tensors that the kernel reads."""
        return self._call(self.mask, grad, lambda x: x)

    def exact_call(self) -> Call:
        """The call on the same numbers in float64, with gradients."""
        return self._call(in_double(self.mask), True, Tensor.double)

    def _call(self, mask: Mask | None, grad: bool, change) -> Call:
        def leaf(x: Tensor, name: str) -> Tensor:
            return change(x).detach().requires_grad_(grad and name in self.case.needed)

        case, sees = self.case, as_mask(mask)
        if self.rows is not None:
            sees = Rows(sees, self.rows, self.whole)
        sinks = None if self.sinks is None else leaf(self.sinks, "s")
        q, k, v = leaf(self.q, "q"), leaf(self.k, "k"), leaf(self.v, "v")
        call = Call.of(q, k, v, mask=sees, scale=case.scale, softcap=case.softcap, sinks=sinks)
        assert call.extent == self.extent
        return call

    @cached_property
    def position(self) -> Tensor:
        """The key position of each query `[T]`."""
        rows = torch.arange(self.case.queries) if self.rows is None else self.rows
        return rows + self.whole.offset

    @cached_property
    def incoming(self) -> dict[str, Tensor]:
        """The gradient that comes in for each result that is asked for."""
        found = {}
        for stream, name in enumerate(DIFFERENTIABLE, start=6):
            if name not in self.case.incoming:
                continue
            random = generator(self.case.seed, stream)
            shape = (*self.q.shape[:3], self.case.wide if name == "out" else 1)
            dtype = self.dtype if name == "out" else torch.float32
            x = LAYOUTS[self.case.incoming_layout](
                numbers(self.case.incoming_kind, shape, dtype, random)
            )
            found[name] = x if name == "out" else x[..., 0]
        return found

    @cached_property
    def weight(self) -> Tensor | None:
        """What each query counts in sums over queries `[T]`."""
        if not self.case.weighted:
            return None
        return torch.randn(self.extent.queries, generator=generator(self.case.seed, 5))

    @cached_property
    def blocks(self) -> tuple[Tensor, Tensor]:
        """The block of every query and of every key, ascending."""
        n = self.case.blocks
        return tuple(torch.arange(s) * n // s for s in (self.extent.queries, self.extent.keys))  # type: ignore[return-value]


def _sinks(case: Case) -> Tensor:
    random = generator(case.seed, 15)
    if case.sinks == "none of them":
        return torch.full((case.heads,), -torch.inf)
    return numbers(case.sinks, (1, 1, 1, case.heads), torch.float32, random).flatten()

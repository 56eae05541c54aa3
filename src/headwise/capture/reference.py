"""Head outputs over reference texts: their means, or the outputs themselves, for `ablate`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from ..core.numbers import fault_of_flags
from ..stats.lse import LSE
from .call import AttentionCall, ObserveOptions
from .catch import catch
from .head_address import Layer, joined_numbers, module_of
from .modules import check_model


class AblationReference:
    """The outputs of heads over reference texts, before the output projection."""

    def __init__(self, rows: bool = False) -> None:
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, Tensor] = {}
        self._rows: dict[str, list[tuple[Tensor, Tensor]]] | None = {} if rows else None
        self.numbers: dict[str, int] = {}  # layer numbers by module name

    def __repr__(self) -> str:
        rows = "" if self._rows is None else ", with rows"
        return f"<AblationReference: means of {len(self._sums)} modules{rows}>"

    def add(self, call: AttentionCall) -> None:
        """Add a call's head outputs once the call is known to be complete."""
        name, parts = call.name, self._parts(call)
        call.on_complete(lambda _: self._join(name, *parts))

    def take(self, call: AttentionCall) -> None:
        """Add a call's head outputs immediately."""
        self._join(call.name, *self._parts(call))

    def _parts(self, call: AttentionCall) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]:
        """Return the sums and counts of a call's outputs, and the outputs if they are kept."""
        out, valid = call.out.detach(), valid_queries(call)
        total = torch.where(valid[..., None], out.double(), 0.0).sum((0, 2))
        return total, valid.sum((0, 2)), None if self._rows is None else (out.clone(), valid)

    def _join(
        self, name: str, total: Tensor, count: Tensor, rows: tuple[Tensor, Tensor] | None
    ) -> None:
        if name in self._sums:
            total, count = total + self._sums[name], count + self._counts[name]
        self._sums[name], self._counts[name] = total, count
        if self._rows is not None and rows is not None:
            self._rows.setdefault(name, []).append(rows)

    @property
    def modules(self) -> tuple[str, ...]:
        """The qualified names of the modules, in the order of their first calls."""
        return tuple(self._sums)

    def mean(self, module: Layer) -> Float[Tensor, "H Dv"]:
        """Return each head's mean output over batch and valid queries of all calls, in float64.

        The module is given by its qualified name or layer number.

        Raises:
            ValueError: the module did not run on the reference texts.
        """
        module = self._name(module)
        return self._sums[module] / self._counts[module].clamp(min=1)[:, None]

    def rows(
        self, module: Layer, queries: int
    ) -> tuple[Float[Tensor, "N H T Dv"], Bool[Tensor, "N H T"]]:
        """Return the outputs of all calls with this number of queries, and the valid queries.

        Raises:
            ValueError: the module did not run on the reference texts; outputs were not kept; or no
                call has this number of queries.
        """
        module = self._name(module)
        if self._rows is None:
            raise ValueError(
                "ablation_reference(…) kept means alone; to resample, give "
                "ablation_reference(…, rows=True)."
            )
        kept = self._rows[module]
        fitting = [pair for pair in kept if pair[0].shape[2] == queries]
        if not fitting:
            lengths = ", ".join(map(str, sorted({out.shape[2] for out, _ in kept})))
            raise ValueError(
                f"ablate(…): {module!r} is called with {queries} queries, and the reference has "
                f"calls with {lengths}; resample from texts of the same length."
            )
        outs, valid = zip(*fitting, strict=True)
        return torch.cat(outs), torch.cat(valid)

    def _name(self, module: Layer) -> str:
        module = module_of(module, self.numbers)
        if module not in self._sums:
            raise ValueError(
                f"ablate(…): the reference texts did not reach {module!r}; they reached: "
                f"{', '.join(self._sums) or 'nothing'}."
            )
        return module


def ablation_reference(
    model: nn.Module,
    loss: Callable[[Any, Any], object],
    batches: Iterable[Any],
    *,
    rows: bool = False,
) -> AblationReference:
    """Record the output of every head over reference texts, for `ablate(…, reference=…)`.

    Args:
        model: any model that `watch()` supports.
        loss: a function that calls the model on a batch, `loss(model, batch)`, as in
            `importance()`. Its result is ignored. It runs without gradients.
        batches: the reference texts, in any form that `loss` accepts.
        rows: keep the outputs themselves (as large as the hidden states), for `how="resample"`;
            means are `[H, Dv]` per module.

    Raises:
        ValueError: no attention was captured; `batches` is a single batch; `rows` is not a flag.

    >>> import headwise as hw
    >>> layer = hw.MultiHeadAttention(24, num_heads=3)
    >>> texts = [torch.randn(2, 7, 24), torch.randn(2, 5, 24)]
    >>> reference = ablation_reference(layer, lambda model, x: model(x), texts)
    >>> reference.mean("").shape
    torch.Size([3, 8])
    """
    quote = check_given("ablation_reference", model, loss, batches)
    if fault := fault_of_flags(rows=rows):
        raise ValueError(f"{quote}: {fault}.")
    kept, why = AblationReference(rows), "there are no batches"
    for batch in batches:
        with torch.no_grad(), catch(model, kept.add, function="ablation_reference") as net:
            loss(model, batch)
        kept.numbers = joined_numbers(kept.numbers, net.numbers)
        why = net.names.why_nothing()
    if not kept.modules:
        raise ValueError(f"{quote}: no attention was seen, for {why}.")
    return kept


def check_given(function: str, model: object, loss: object, batches: object) -> str:
    """Return the quoted call `function(model, loss, batches)` for errors.

    Raises:
        ValueError: the model is not a module, the loss is not callable, or `batches` is not an
            iterable of batches.
    """
    quote = check_model(function, model)
    if not callable(loss):
        raise ValueError(
            f"{quote}: loss must be a function, loss(model, batch), and "
            f"{type(loss).__name__} is none."
        )
    single = isinstance(batches, Tensor | Mapping | str)
    if single or not (hasattr(batches, "__iter__") or hasattr(batches, "__getitem__")):
        raise ValueError(
            f"{quote}: batches must be an iterable of batches, such as a list or a DataLoader, and "
            f"{type(batches).__name__} is none; did you mean [batch], a list of it?"
        )
    return quote


def valid_queries(call: AttentionCall) -> Bool[Tensor, "B H T"]:
    """Return the queries that count in a mean, without padding, as in `watch()`."""
    rows = call.observe((LSE(),), ObserveOptions())["lse"].rows
    assert rows is not None  # LSE is per query
    return rows.expand(call.out.shape[:3])


def drawn(
    shape: torch.Size, outs: Tensor, valid: Tensor, heads: Tensor, seed: int, own: bool
) -> Float[Tensor, "B h T Dv"]:
    """Return, for every batch row, the head outputs of another row at the same positions.

    Each row draws an order of donors and uses the first; at positions where that donor has no valid
    query, it uses the next donor that has one, or 0 if none has.

    Args:
        shape: the shape of the call's output, `[B, H, T, Dv]`.
        outs: the outputs of the donors, `[N, H, T, Dv]`.
        valid: the valid queries of the donors, `[N, H, T]`.
        heads: the indices of the heads, `[h]`.
        seed: the seed of the sample.
        own: True if the donors are the call's own rows; then no row is its own donor.
    """
    batch, _, queries, _ = shape
    generator = torch.Generator().manual_seed(seed)
    keys = torch.rand(batch, len(outs), generator=generator, dtype=torch.float64)
    if own:
        keys.fill_diagonal_(torch.inf)
    order = keys.argsort(1)[:, : len(outs) - own].to(outs.device)[:, :, None, None]
    row, time = heads[:, None], torch.arange(queries, device=outs.device)
    donor = order[:, 0].expand(batch, len(heads), queries)
    for after in order[:, 1:].unbind(1):
        lacking = ~valid[donor, row, time]
        if not lacking.any():
            break
        donor = torch.where(lacking, after, donor)
    given = valid[donor, row, time][..., None]
    return torch.where(given, outs[donor, row, time], 0.0)

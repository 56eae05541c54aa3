"""Statistics of every head in one call: `observe()`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Unpack

import torch
from jaxtyping import Float
from torch import Tensor

from ..backends import Call, Native, choose
from ..core.call import OPTIONS, AttendOptions
from ..core.modes import batched, no_graph, readable
from ..core.numbers import fault_of_flags
from ..core.observers import observers
from ..core.shapes import no_autocast, quote
from ..core.unknown import refuse_unknown
from .lse import LSE
from .plan import Need, Plan, Setting, plan
from .record import Record
from .run import Work, nonlinear, run
from .sampling import QuerySample, draw
from .seen import Readings, Seen
from .statistic import Statistic, Statistics, check_statistics
from .view import View


def observe(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B G S D"],
    v: Float[Tensor, "B G S Dv"],
    *statistics: Statistic,
    backend: str = "auto",
    queries: int | Sequence[int] | Tensor | None = None,
    seed: int = 0,
    output: bool | Float[Tensor, "B H T Dv"] = True,
    gradients: bool = True,
    projection: Float[Tensor, "O HDv"] | None = None,
    **options: Unpack[AttendOptions],
) -> Seen:
    """Compute attention and exact statistics of every head, without the T×T matrix.

    The output equals that of `attend()` bit for bit. Statistics describe the probabilities before
    dropout and are computed in at least float32. (`backend="sdpa"` on CPUs takes the log-sum-exp
    in half precision from PyTorch's kernel, whose exponential is accurate to 1e-4.) With learned
    sinks, `lse` and entropies cover keys and sink; masses, distances, maps, top keys and received
    attention count keys only, so they sum to 1 minus the weight of the sink.

    Args:
        statistics: such as `Entropy()`, `MaxLogit()`, `Mass(First(1))`.
        queries: the number of queries to sample, or a list of queries; `seen.queries` holds them in
            ascending order. Default: all. A sample contains the first queries (an eighth of the
            number), the last two, and one from each of a number of intervals between them, whose
            length grows with the position. The output always covers all queries.
        seed: seed of the sample. Give each call its own if results are added up (`Running`): the
            same seed samples the same queries in calls of equal length.
        output: False omits the attention output, for calls that need only statistics; with sampled
            queries, this costs a fraction of a full call. A tensor is a precomputed output.
        gradients: make LSE, entropy, distance and masses differentiable in q, k and sinks if these
            require gradients, so that they can be part of a loss; False detaches them.
        projection: weight of the output projection `[O, H · Dv]`, for `OutputNorm`.
        options: `mask`, `scale`, `softcap`, `dropout`, `sinks` and `first_query`, as in `attend()`.

    Returns:
        A `Seen`: `seen.out`, `seen.lse`, and `seen[name]` for each statistic.

    Raises:
        ValueError: for the same reasons as `attend()`; a statistic is given twice or does not fit
            the call; a flag is neither True nor False.
        TypeError: for the same reasons as `attend()`.

    >>> from headwise.core.masks import Causal
    >>> from headwise.stats.entropy import Entropy
    >>> q = k = v = torch.zeros(1, 2, 4, 8)
    >>> seen = observe(q, k, v, Entropy(), mask=Causal())
    >>> seen["entropy"][0, 0].exp()  # equal scores: query i attends to i + 1 keys uniformly
    tensor([1., 2., 3., 4.])
    """
    if unknown := [option for option in options if option not in OPTIONS]:
        refuse_unknown("observe(q, k, v", observe, unknown, shared=OPTIONS)
    call = Call.of(q, k, v, function="observe", **options)
    if call.prepared is None and batched(q, k, v, call.sinks, *call.mask.tensors()):
        raise ValueError(
            f"{quote(q, k, v, 'observe')} runs inside torch.func.vmap, which is not supported; "
            f"call observe() outside vmap, with the calls stacked along the batch axis."
        )
    precomputed = isinstance(output, Tensor)
    if not (isinstance(output, (bool, Tensor)) and isinstance(gradients, bool)):
        fault = fault_of_flags(output=precomputed or output, gradients=gradients)
        raise ValueError(f"{quote(q, k, v, 'observe')}: {fault}.")
    sample = None if queries is None else draw(queries, call.extent.queries, seed, call.q.device)
    requested = Statistics.of(statistics)
    work, readings = read(call, requested, sample, backend, output, gradients, projection)
    record, call = readings.record, work.view.original
    out = work.precomputed if record.out is None else record.out
    seen = Seen(record, readings, out, work.keeps_graph and not work.view.gradients)
    if torch.compiler.is_compiling():
        return seen
    seen.changed = partial(_changed, call, _changes(call))
    if record.lse is None:
        seen.again = partial(_scored, call, sample, work.chosen.name, gradients)
    if observers and record.out is not None:
        seen.output = observers[0](call, backend, record.out)
    return seen


def read(
    call: Call,
    statistics: Statistics,
    sample: QuerySample | None = None,
    backend: str = "auto",
    output: bool | Tensor = True,
    gradients: bool = True,
    projection: Tensor | Callable[[], Tensor | None] | None = None,
    strict: bool = True,
    lse: Tensor | None = None,
) -> tuple[Work, Readings]:
    """Run a checked call, hidden from active watches, and answer the needs of statistics.

    Arguments are those of `observe()`, plus the log-sum-exp `[B, H, T]` of the kernel that computed
    the output, if known (any value for queries that see no key). Without `strict`, scores that
    overflow raise no error: their rows are NaN, as for a NaN in q or k. Calls of watched models use
    this mode.

    Raises:
        ValueError: a statistic is given twice or does not fit the call; with `strict`, scores of
            finite q and k are not finite.
    """
    if output is True and call.dropout:
        call = call.drawn()
    keeps_graph = (call.prepared is None or torch.is_grad_enabled()) and call.needs_grad
    view = View(call, sample, gradients and keeps_graph)
    work = Work(view, keeps_graph, output, projection, strict, lse)
    if torch._C._is_any_autocast_enabled():
        with no_autocast(view.device):
            return work, _read(work, statistics, backend)
    return work, _read(work, statistics, backend)


def _read(work: Work, statistics: Statistics, backend: str) -> Readings:
    work.make_call(planned(work, statistics, backend, "observe"))
    if work.view.gradients or not torch.is_grad_enabled():
        return Readings(run(work), statistics)
    with no_graph():
        return Readings(run(work), statistics)


def _scored(call: Call, sample: QuerySample | None, backend: str, gradients: bool) -> Record:
    """Run a call for its log-sum-exp only."""
    named = sample and QuerySample(sample.rows, None)
    return read(call, Statistics.of((LSE(),)), named, backend, False, gradients)[1].record


def _changed(call: Call, before: tuple[int, ...]) -> bool:
    """Return True if the values of a call's tensors may have changed."""
    return -1 in before or _changes(call) != before


def _changes(call: Call) -> tuple[int, ...]:
    """Return how often each tensor of a call was changed in place; −1 if this is not tracked."""
    tensors = [call.q, call.k, call.sinks]
    if call.prepared is None:  # otherwise its mask holds no tensor
        tensors += call.mask.tensors()
    return tuple([-1 if x.is_inference() else x._version for x in tensors if x is not None])


def planned(work: Work, statistics: Statistics, backend: str, function: str) -> Plan:
    """Choose the backend of a call and return its plan; both are cached for equal calls.

    Raises:
        ValueError: an argument is not a statistic; a backend cannot run the call.
    """
    view, prepared, about = work.view, work.view.prepared, None
    if prepared is not None and statistics.free and type(backend) is str:
        some = None if view.rows is None else len(view.rows)
        known = work.known_lse is not None
        options = work.output, work.keeps_graph, view.gradients, some, view.has_sinks, known
        about = statistics, backend, *options
        if about in prepared.plans:
            work.chosen, found = prepared.plans[about]
            return found
    work.chosen = choose(view.original, backend, work.keeps_graph)
    check_statistics(statistics.each, function)
    found = plan(_setting_of(work, statistics.needs), statistics.needs)
    if prepared is not None and about is not None:
        prepared.plans[about] = work.chosen, found
    return found


def _setting_of(work: Work, needs: Sequence[Need]) -> Setting:
    """Return the properties of a call that the routes of its needs depend on."""
    view = work.view
    call = view.original
    by_call = work.chosen if work.output or work.knows_lse(needs) else work.backend
    can_read = readable(call.q)
    return Setting(
        extent=view.extent,
        dim=call.q.shape[-1],
        output=work.output,
        kernel=isinstance(by_call, Native),
        kernel_pass=any(need.passes for need in needs) and isinstance(work.backend, Native),
        nonlinear=nonlinear(call),
        gradients=view.gradients,
        sinks=call.sinks is not None,
        behind=any(need.via is not None for need in needs) and _only_behind(view),
        readable=can_read,
        whole=view.rows is None,
        near=can_read,
        direct=view.rows is None
        and not work.keeps_graph
        and isinstance(work.chosen, Native)
        and (view.device.type == "cuda" or view.dtype is call.q.dtype),
    )


def _only_behind(view: View) -> bool:
    """Return True if each query sees one range of keys up to its position, and there is no sink."""
    if view.original.sinks is not None or view.mask.looks_ahead(view.extent):
        return False
    found = view.mask.key_ranges(view.extent, view.device)
    if found is None or view.mask.free or not readable(view.original.q):
        return found is not None
    return bool((found[1] <= view.positions + 1).all())  # whatever the mask

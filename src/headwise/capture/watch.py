"""`watch(model)`: statistics of every head of a model while it runs, without editing it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..core.numbers import as_int, fault_of_flags
from ..stats.entropy import Entropy
from ..stats.mass import Mass
from ..stats.patterns import First, Previous, Self
from ..stats.sampling import check_queries
from ..stats.statistic import Statistic, Statistics, check_statistics
from .bundle import Bundles
from .call import AttentionCall, ObserveOptions, seed_of_rank
from .captured import Watched
from .catch import catch
from .modules import Heads, Modules, check_model, declared_heads
from .parts import streams_of

DEFAULT: tuple[Statistic, ...] = (Entropy(), Mass(First()), Mass(Previous()), Mass(Self()))
"""The default statistics of `watch()`, which the log-sum-exp provides almost for free."""


@contextmanager
def watch(
    model: nn.Module,
    *statistics: Statistic,
    queries: int | Sequence[int] | Tensor | None = None,
    seed: int = 0,
    running: bool = False,
    gradients: bool = False,
    modules: Modules = None,
    padding: bool = True,
    heads: Heads = None,
) -> Iterator[Watched]:
    """Record statistics of every head of a model while it runs; outputs stay bit for bit the same.

    Captures attention through `F.scaled_dot_product_attention`, `nn.MultiheadAttention` and
    PyTorch's transformer layers (including the fused ones used in evaluation), `flex_attention`,
    `varlen_attn`, transformers models with any `attn_implementation`, headwise's own layer,
    `attend` and `observe` in any module, and a softmax over the last axis that is multiplied by
    values. Only the statistics are kept. On exit, even after an exception, the model is restored.
    Calls in any thread are captured, one at a time, such as those of `generate` in a streamer's
    thread. Models compiled by `torch.compile` stay compiled: calls to
    `F.scaled_dot_product_attention` and to headwise are captured in their graphs. Graphs that
    attend in other ways run in eager mode.

    If queries and keys belong to one sequence, a key that no query may attend to is padding. The
    query at its position counts as a query without visible keys and is excluded from every mean.

    Args:
        model: any module.
        statistics: the statistics of every call, such as `Entropy()`, `Mass(Previous())`; by
            default those of `DEFAULT`: entropy, and the weight on the first token, on the previous
            token and on the query's own.
        queries: how many queries to sample in each call, or which ones, as in `observe()`.
        seed: the seed of the samples; every call of a module and every rank derives its own from it
            (with `gradients`, all use the same), so that sampling errors average out over calls.
            Use a different seed for each result that is added to others later.
        running: accumulate over calls (`Running`) instead of keeping the statistics of each one, so
            that memory stays constant over a generation or a data set.
        gradients: keep the graph of LSE, entropy, distance and masses, so that they can be used in
            a loss, as in `observe()`; by default statistics are detached. Activation checkpointing
            must then use `use_reentrant=False`.
        modules: watch only these: a pattern of qualified names such as `"encoder.*"`, the number of
            a layer (2 or `"L2"`), a list of them, or a function that returns True for a name. Use
            this for statistics that fit only some modules.
        padding: False counts every query. Required for strictly causal masks, sparse graphs, and
            cross-attention by sdpa with as many keys as queries, whose unattended keys cannot be
            distinguished from padding.
        heads: the number of heads, such as 12, if the head axis of a function's tensors is
            ambiguous; or the axis from the end, such as -3 of `[batch, heads, length, width]`; or a
            dict from patterns of module names to either.

    Raises:
        ValueError: the model, or a part of it, is compiled by `torch.jit`; a statistic is given
            twice; a flag is neither True nor False; no call can have these `queries`; `running` is
            used with `gradients`; while the model runs, statistics do not fit a call (the error has
            the module's name), `torch.func` transforms it, or `gradients` is used with reentrant
            activation checkpointing.
        RuntimeError: the model is called while another thread is calling it; or it is compiled, and
            another thread calls it.

    >>> import torch, headwise as hw
    >>> layer = torch.nn.TransformerEncoderLayer(24, nhead=2, batch_first=True).eval()
    >>> with hw.watch(layer, hw.Entropy()) as seen, torch.no_grad():
    ...     out = layer(torch.randn(2, 7, 24))
    >>> [(row["layer"], row["head"], row["module"]) for row in seen.table()]
    [(0, 0, 'self_attn'), (0, 1, 'self_attn')]
    """
    check_model("watch", model)
    kind = type(model).__name__
    statistics = statistics or DEFAULT
    if fault := fault_of_flags(running=running, gradients=gradients, padding=padding):
        raise ValueError(f"watch({kind}, …): {fault}.")
    if running and gradients:
        raise ValueError(
            f"watch({kind}, running=True, gradients=True): sums over calls have no gradient; watch "
            f"the calls of one loss without running."
        )
    if as_int(seed) is None:
        raise ValueError(f"watch({kind}, …, seed={seed!r:.80}): give a whole number.")
    figures: list[str] = []
    if statistics is not DEFAULT:
        check_statistics(statistics, "watch")
        figures = [name for statistic in statistics for name in statistic.names]
    twice = [name for name in figures if figures.count(name) > 1]
    if twice:
        raise ValueError(
            f"watch({kind}, …): {twice[0]!r} is requested twice; leave one out, or give a mass a "
            f"name of its own, Mass(…, name=…)."
        )
    if queries is not None:
        check_queries(queries)
    requested = Statistics.of(statistics)
    looking = ObserveOptions(queries, seed, gradients, padding)
    declared = None if heads is None else declared_heads(heads)
    bundles = Bundles()
    observe = AttentionCall.observe if running or gradients else bundles.observe
    with_graph: set[str] = set()  # modules with a call that was captured with its graph
    calls: Counter[str] = Counter()

    def listen(call: AttentionCall) -> None:
        # Calls that backward recomputes were counted before; only their graphs must be rebuilt.
        if call.again and not gradients:
            return
        if call.again and call.name not in with_graph:
            raise ValueError(
                f"watch({kind}, …, gradients=True): {call.name!r} is computed again in backward "
                f"and had no graph at first, as under reentrant activation checkpointing: its "
                f"statistics would have no gradient; checkpoint with use_reentrant=False."
            )
        drawn = looking
        if queries is not None and not gradients:
            drawn = looking.of_call(calls[call.name])
            calls[call.name] += 1
        try:
            readings = observe(call, requested, drawn)
        except ValueError as error:
            raise ValueError(
                f"watch({kind}, …): in {call.name!r} (queries {call.queries}, keys {call.keys}): "
                f"{error} If it fits other modules, give modules=…, such as modules='encoder.*'."
            ) from error
        if call.again:
            return
        batch, heads, every, _ = call.q.shape
        looked_at = batch * every
        if queries is not None:
            looked_at = batch * looking.looked_at(every)
            if looking.draws(every):
                watched.drawn |= {seed if gradients else seed_of_rank(seed)}
        graph = torch.is_grad_enabled()
        result = (call.name, readings, heads, call.first_key, call.first_head)
        lost = graph and not gradients
        if (waiting := call.waiting) is None:
            watched.add(*result, (looked_at, batch * every), lost)
        else:
            waiting.on_complete(
                lambda total: watched.add(*result, (looked_at, total), lost, streams_of(waiting))
            )
        if graph:
            with_graph.add(call.name)

    quote, session = "", None

    def why() -> str:
        return quote if session is None else session.why_nothing()

    watched = Watched(running, why)
    with catch(model, listen, in_full=gradients, modules=modules) as net:
        session, net.heads = net, declared or net.heads
        watched.left_out, watched.numbers = net.names.left_out, net.numbers
        try:
            yield watched
        finally:  # the result holds no reference to the model
            bundles.close()
            quote, session = "" if watched else why(), None

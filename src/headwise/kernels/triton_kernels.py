"""Triton kernels for CUDA: attention with the statistics of its rows, gradients, and column sums.

A program takes a block of queries (or keys) of one head and iterates over the visible keys (or
queries), with an online softmax (Milakov and Gimelshein 2018; Dao et al. 2022). Along with the sum
of the weights it keeps `Σ p (s − m)` and `Σ p (j − position)`, relative to the running maximum m,
so that large logits lose no precision. GPUs compute 2ˣ, so if a score is just `scale · q·k`, the
scale includes log₂ e. Only `triton_api` calls these kernels.
"""

# Triton reads the annotations of kernels, so this file must not import `annotations` from
# `__future__`. Triton knows which branches are taken, so variables they define are not unbound.
# pyright: reportPossiblyUnboundVariable=false

from typing import Any, NamedTuple

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)

FAR: tl.constexpr = tl.constexpr(2048.0)
"""The log-sum-exp above which weights computed from it would be off by more than 1e-4."""

LENGTHS = ["queries", "keys", "offset"]
"""Arguments that change from call to call: kernels are not specialized on their values."""


class Constants(NamedTuple):
    """Constants of a compiled kernel: the causal flag, widths of heads and sizes of blocks."""

    CAUSAL: bool
    D: int
    DV: int
    BD: int
    """The number of columns of a head in the first piece; `BE`: in the second piece, if any."""
    BE: int
    BV: int
    EVEN: bool
    """True if the columns of a head fill their blocks; `EVEN_V`: the same for the values."""
    EVEN_V: bool
    EXACT: bool
    """True if products of queries and keys use three passes of TF32, which keep the precision of
    float32; `EXACT_V`: the same for products of weights and values."""
    EXACT_V: bool
    BM: int
    BN: int


class Scoring(NamedTuple):
    """The mask, bias and scale of one head, which turn products into scores."""

    b: Any
    h: Any
    keys: Any
    position: Any
    offset: Any
    low: Any
    low_at: Any
    high: Any
    high_at: Any
    window: Any
    allowed: Any
    allowed_at: Any
    bias: Any
    bias_at: Any
    slopes: Any
    scale: Any
    softcap: Any


class Queries(NamedTuple):
    """A block of queries: their indices, key positions and ranges of keys."""

    i: Any
    pos: Any
    low: Any
    high: Any


class Incoming(NamedTuple):
    """The softmax of each row, and incoming gradients, as the backward pass reads them."""

    base: Any
    total: Any
    constant: Any
    entropy: Any
    ahead: Any
    first: Any
    previous: Any
    self: Any


# ── loading and storing ─────────────────────────────────────────────────────────────────────────


@triton.jit
def _cells(x, row, at, column):
    """Return the addresses of rows and columns of a matrix with the strides `at[2:]`."""
    return x + row[:, None].to(tl.int64) * at[2] + column[None, :] * at[3]


@triton.jit
def _load(
    x, row, rows, at, columns, BLOCK: tl.constexpr, EVEN: tl.constexpr, CHECK: tl.constexpr = True,
    FIRST: tl.constexpr = 0,
):  # fmt: skip
    """Load rows `row` `[n, BLOCK]` of a tensor whose last two strides are `at[2:]`; 0 outside it.

    The columns are those from `FIRST` on.
    """
    d = FIRST + tl.arange(0, BLOCK)
    place = _cells(x, row, at, d)
    if CHECK:
        inside = ((row >= 0) & (row < rows))[:, None]
        if not EVEN:
            inside = inside & (d < columns)[None, :]
        return tl.load(place, mask=inside, other=0.0)
    if EVEN:
        return tl.load(place)
    return tl.load(place, mask=(d < columns)[None, :], other=0.0)


@triton.jit
def _load_heads(x, row, rows, at, CHECK: tl.constexpr, C: tl.constexpr):
    """Load rows of queries or keys in two pieces; without a second, return the first twice."""
    first = _load(x, row, rows, at, C.D, C.BD, C.EVEN or C.BE > 0, CHECK)
    more = first
    if C.BE > 0:
        more = _load(x, row, rows, at, C.D, C.BE, C.EVEN, CHECK, C.BD)
    return first, more


@triton.jit
def _store_heads(x, row, rows, at, first, more, C: tl.constexpr):
    """Store rows of a gradient in their two pieces."""
    d = tl.arange(0, C.BD)
    inside = (row < rows)[:, None]
    value = first.to(x.dtype.element_ty)
    tl.store(_cells(x, row, at, d), value, mask=inside & (d < C.D)[None, :])
    if C.BE > 0:
        d = C.BD + tl.arange(0, C.BE)
        value = more.to(x.dtype.element_ty)
        tl.store(_cells(x, row, at, d), value, mask=inside & (d < C.D)[None, :])


@triton.jit
def _dot(a, b, acc, EXACT: tl.constexpr):
    """Return `a · b`, added to `acc` if it is given."""
    return tl.dot(a, b, acc, input_precision="tf32x3" if EXACT else "tf32")


@triton.jit
def _products(q, more_q, k, more_k, C: tl.constexpr):
    """Return `q·k` of queries and keys in their two pieces."""
    dot = _dot(q, tl.trans(k), None, C.EXACT)
    if C.BE > 0:
        dot = _dot(more_q, tl.trans(more_k), dot, C.EXACT)
    return dot


@triton.jit
def _add_products(acc, more_acc, weights, x, more, C: tl.constexpr):
    """Add `weights · x` to an accumulator in two pieces."""
    weights = weights.to(x.dtype)
    acc = _dot(weights, x, acc, C.EXACT)
    if C.BE > 0:
        more_acc = _dot(weights, more, more_acc, C.EXACT)
    return acc, more_acc


@triton.jit
def _zeros(BLOCK: tl.constexpr, C: tl.constexpr):
    """Return an accumulator of zeros in two pieces."""
    acc = tl.full([BLOCK, C.BD], 0.0, tl.float32)
    more = acc
    if C.BE > 0:
        more = tl.full([BLOCK, C.BE], 0.0, tl.float32)
    return acc, more


# ── scores ──────────────────────────────────────────────────────────────────────────────────────


@triton.jit
def _edge(i, edge, at, by, otherwise):
    """Return one edge of each query's range of keys, clamped to the sequence."""
    if edge is not None:
        value = tl.load(edge + by.b * at[0] + by.h * at[1] + i.to(tl.int64) * at[2])
        return tl.minimum(tl.maximum(value, 0), by.keys).to(tl.int32)
    return tl.zeros_like(i) + otherwise


@triton.jit
def _queries(i, by):
    """Return the queries `i` with their positions and ranges."""
    pos = i + by.offset if by.position is None else tl.load(by.position + i).to(tl.int32)
    low = _edge(i, by.low, by.low_at, by, 0)
    return Queries(i, pos, low, _edge(i, by.high, by.high_at, by, by.keys))


@triton.jit
def _upright(rows):
    """Return the queries with a second axis of size 1 added to each field."""
    return Queries(rows.i[:, None], rows.pos[:, None], rows.low[:, None], rows.high[:, None])


@triton.jit
def _unit(by):
    """Return the factor that turns scores into logarithms to base 2.

    Adding a large bias may round q·k away entirely. This rounding must occur before anything is
    subtracted from the score, but multiplying by log₂ e would be fused with the next operation.
    """
    if (by.softcap is None) and (by.bias is None) and (by.slopes is None):
        return tl.constexpr(1.0)
    return LOG2E


@triton.jit
def _scores(dot, rows, j, by, MASKED: tl.constexpr, CAUSAL: tl.constexpr):
    """Return scores in their unit, −inf where hidden, and the tanh of softcap."""
    bend = dot
    if (by.softcap is None) and (by.bias is None) and (by.slopes is None):
        s = dot * (by.scale * LOG2E)
    else:
        s = dot * by.scale
        if by.softcap is not None:
            small = tl.exp2(-2.0 * LOG2E * tl.abs(s / by.softcap))
            size = (1.0 - small) / (1.0 + small)
            bend = tl.where(s < 0, -size, size)
            s = bend * by.softcap
        if by.slopes is not None:
            s -= tl.load(by.slopes + by.h) * tl.abs(rows.pos - j).to(tl.float32)
        if by.bias is not None:
            place = by.bias + by.b * by.bias_at[0] + by.h * by.bias_at[1]
            place += rows.i.to(tl.int64) * by.bias_at[2]
            s += tl.load(place + j.to(tl.int64) * by.bias_at[3], mask=j < by.keys, other=0.0)
    if MASKED:
        ok = (j >= 0) & (j < by.keys) & (j >= rows.low) & (j < rows.high)
        if CAUSAL:
            ok &= j <= rows.pos
        if by.window is not None:
            ok &= j > rows.pos - by.window
        if by.allowed is not None:
            place = by.allowed + by.b * by.allowed_at[0] + by.h * by.allowed_at[1]
            place += rows.i.to(tl.int64) * by.allowed_at[2]
            ok &= tl.load(place + j.to(tl.int64) * by.allowed_at[3], mask=j < by.keys, other=0) != 0
        s = tl.where(ok, s, float("-inf"))
    return s, bend


# ── forward ─────────────────────────────────────────────────────────────────────────────────────


@triton.jit
def _key_span(rows, by, C: tl.constexpr):
    """Return the edges of three spans of keys for a block of queries.

    They contain all visible keys. In the second span, all queries see all keys; the first span is
    empty without a window or a lower edge.
    """
    start = tl.maximum(tl.min(rows.low), 0)
    stop = tl.minimum(tl.max(rows.high), by.keys)
    open_start, open_stop = tl.max(rows.low), tl.minimum(tl.min(rows.high), by.keys)
    if C.CAUSAL:
        stop = tl.minimum(stop, tl.max(rows.pos) + 1)
        open_stop = tl.minimum(open_stop, tl.min(rows.pos) + 1)
    if by.window is not None:
        start = tl.maximum(start, tl.min(rows.pos) + 1 - by.window)
        open_start = tl.maximum(open_start, tl.max(rows.pos) + 1 - by.window)
    start = start // C.BN * C.BN
    open_start = tl.maximum(start, (tl.maximum(open_start, 0) + C.BN - 1) // C.BN * C.BN)
    open_stop = tl.maximum(open_stop, 0) // C.BN * C.BN
    if (by.allowed is not None) or (by.bias is not None):
        open_stop = open_start
    closed = open_stop <= open_start
    open_start = tl.where(closed, start, open_start)
    open_stop = tl.where(closed, start, open_stop)
    return start, open_start, open_stop, stop


@triton.jit
def _sweep(
    m, base, total, moment, ahead, acc, q, more, rows, k, k_at, v, v_at, start, stop, by,
    KNOWN: tl.constexpr, MAX: tl.constexpr, ENTROPY: tl.constexpr, AHEAD: tl.constexpr,
    MASKED: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Accumulate sums over keys `start` to `stop`; if the base is KNOWN, nothing is rescaled."""
    unit = _unit(by)
    upright = _upright(rows)
    # Only the address of a block's first key changes in the loop; it is computed in 64 bits.
    column, k_step = tl.arange(0, C.BN), by.b * 0 + k_at[2]
    if v is not None:
        v_step = by.b * 0 + v_at[2]
    for n in range(start, stop, C.BN):
        j = n + column
        keys, more_keys = _load_heads(k + n * k_step, column, by.keys - n, k_at, MASKED, C)
        dot = _products(q, more, keys, more_keys, C)
        s, _ = _scores(dot, upright, j[None, :], by, MASKED, C.CAUSAL)
        if KNOWN:
            if MAX:
                m = tl.maximum(m, tl.max(s, 1))
            x = s - base[:, None]
            p = tl.exp2(x * unit)
            if ENTROPY:
                each = p * x
                if MASKED:
                    each = tl.where(p > 0, each, 0.0)
                moment += tl.sum(each, 1)
            if AHEAD:  # the distance to the block's first key is the same for the whole row
                away = column.to(tl.float32)[None, :]
                ahead += tl.sum(p * away, 1) + tl.sum(p, 1) * (n - rows.pos).to(tl.float32)
        else:
            top = tl.maximum(m, tl.max(s, 1))
            lowest = tl.where(top == float("-inf"), 0.0, top)
            x = s - lowest[:, None]
            p = tl.exp2(x * unit)
            shrink = tl.exp2((m - lowest) * unit)
            if ENTROPY:
                moved = tl.where(m == float("-inf"), 0.0, m - lowest)
                each = p * x
                if MASKED:
                    each = tl.where(p > 0, each, 0.0)
                moment = shrink * (moment + total * moved) + tl.sum(each, 1)
            if AHEAD:
                away = (j[None, :] - upright.pos).to(tl.float32)
                ahead = shrink * ahead + tl.sum(p * away, 1)
            total = shrink * total + tl.sum(p, 1)
            if v is not None:
                values = _load(v + n * v_step, column, by.keys - n, v_at, C.DV, C.BV, C.EVEN_V)
                acc = _dot(p.to(values.dtype), values, acc * shrink[:, None], C.EXACT_V)
            m = top
    return m, total, moment, ahead, acc


@triton.jit
def _add_sink(m, total, moment, ahead, acc, sink, unit):
    """Accumulate one more score, which has no key."""
    top = tl.maximum(m, sink)
    base = tl.where(top == float("-inf"), 0.0, top)
    shrink, own = tl.exp2((m - base) * unit), tl.exp2((sink - base) * unit)
    moved = tl.where(m == float("-inf"), 0.0, m - base)
    moment = shrink * (moment + total * moved) + tl.where(own > 0, own * (sink - base), 0.0)
    total = tl.where(total == 0, 0.0, shrink * total + own)
    return top, total, moment, shrink * ahead, acc * shrink[:, None]


@triton.jit
def _store_single(to, place, stored, q, more, rows, j, base, total, k, k_at, by, C: tl.constexpr):
    """Store the weight of one key `j` for each query, if it is requested."""
    if to is not None:
        keys, more_keys = _load_heads(k, j, by.keys, k_at, True, C)
        dot = tl.sum(q.to(tl.float32) * keys.to(tl.float32), 1)
        if C.BE > 0:
            dot += tl.sum(more.to(tl.float32) * more_keys.to(tl.float32), 1)
        inside = tl.minimum(tl.maximum(j, 0), by.keys - 1)
        s, _ = _scores(dot, rows, inside, by, True, C.CAUSAL)
        weight = tl.exp2((s - base) * _unit(by)) / total
        weight = tl.where((inside == j) & (s != float("-inf")), weight, 0.0)
        tl.store(to + place, weight, mask=stored)


@triton.jit
def _forward(
    program, chosen, count, q, k, v, q_at, k_at, v_at, sinks, heads, group, queries, terms,
    lse, out, out_at, base_out, total_out, lse_out, max_out, entropy_out, ahead_out, first_out,
    previous_out, self_out, BM: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Compute output and statistics of a block of queries, from all or only the `chosen` queries.

    `terms` are the fields of `Scoring` after `b` and `h`. If `lse` is given, weights are computed
    from it, and there is no output; blocks in which it is so large that weights would lose
    precision take two passes. `base_out` and `total_out` are the base of the scores and the sum of
    the weights relative to it: the log-sum-exp and 1, or the largest score and that sum.
    """
    KNOWN: tl.constexpr = lse is not None
    MAX: tl.constexpr = max_out is not None
    ENTROPY: tl.constexpr = entropy_out is not None
    AHEAD: tl.constexpr = ahead_out is not None
    blocks = tl.cdiv(count, BM)
    bh = program // blocks
    b, h = (bh // heads).to(tl.int64), (bh % heads).to(tl.int64)
    by = Scoring(b, h, *terms)
    block = blocks - 1 - program % blocks  # blocks that see the most keys come first
    row = block * BM + tl.arange(0, BM)
    i = tl.minimum(row, count - 1)
    if chosen is not None:
        i = tl.load(chosen + i).to(tl.int32)
    rows = _queries(i, by)
    q += b * q_at[0] + h * q_at[1]
    k += b * k_at[0] + (h // group) * k_at[1]
    if v is not None:
        v += b * v_at[0] + (h // group) * v_at[1]
    here, more = _load_heads(q, i, queries, q_at, False, C)

    unit = _unit(by)
    natural = unit * LN2  # scores times this are natural logarithms
    m = tl.full([BM], float("-inf"), tl.float32)
    base = tl.full([BM], 0.0, tl.float32)
    total = tl.full([BM], 0.0, tl.float32)
    moment = tl.full([BM], 0.0, tl.float32)
    ahead = tl.full([BM], 0.0, tl.float32)
    acc = tl.full([BM, C.BV], 0.0, tl.float32)
    if sinks is not None:
        sink = tl.load(sinks + h).to(tl.float32) / natural
    spans = _key_span(rows, by, C)
    if KNOWN:
        known = tl.load(lse + bh.to(tl.int64) * queries + i)
        size = tl.abs(known)
        base = tl.where(size == float("inf"), float("inf"), known / natural)
        total += 1.0
        again = tl.max(tl.where((size > FAR) & (size != float("inf")), 1, 0)) > 0
        if again:
            top, weight, _, _, _ = _sweep(
                m, base, total * 0.0, moment, ahead, acc, here, more, rows, k, k_at, None, v_at,
                spans[0], spans[3], by, False, False, False, False, True, C,
            )  # fmt: skip
            if sinks is not None:
                top, weight, _, _, _ = _add_sink(top, weight, moment, ahead, acc, sink, unit)
            base = tl.where(top == float("-inf"), float("inf"), top)
            total = tl.where(weight == 0, 1.0, weight)
    if (not KNOWN) or MAX or ENTROPY or AHEAD:
        LEFT: tl.constexpr = (by.window is not None) or (by.low is not None)
        OPEN: tl.constexpr = (by.allowed is None) and (by.bias is None)
        for part in tl.static_range(3):
            if (part == 2) or ((part == 0) and LEFT) or ((part == 1) and OPEN):
                m, total, moment, ahead, acc = _sweep(
                    m, base, total, moment, ahead, acc, here, more, rows, k, k_at, v, v_at,
                    spans[part], spans[part + 1], by, KNOWN, MAX, ENTROPY, AHEAD, part != 1, C,
                )  # fmt: skip

    largest = m * natural
    if KNOWN:
        dead = known == float("-inf")
        if sinks is not None:
            own = tl.exp2((sink - base) * unit)
            moment += tl.where(own > 0, own * (sink - base), 0.0)
        # NaN scores give NaN statistics.
        total = tl.where(size < float("inf"), total, float("nan"))
        m = base
    else:
        dead = total == 0
        if sinks is not None:
            m, total, moment, ahead, acc = _add_sink(m, total, moment, ahead, acc, sink, unit)
    weight = tl.where(dead, 1.0, total)
    stored = row < count
    place = bh.to(tl.int64) * count + row
    if out is not None:
        d = tl.arange(0, C.BV)
        cells = _cells(out + b * out_at[0] + h * out_at[1], row, out_at, d)
        acc = tl.where(dead[:, None], 0.0, acc / weight[:, None])  # pyright: ignore[reportIndexIssue]
        tl.store(cells, acc.to(out.dtype.element_ty), mask=stored[:, None] & (d < C.DV)[None, :])
    if lse_out is not None:
        value = tl.where(dead, float("-inf"), m * natural + tl.log2(weight) * LN2)
        tl.store(lse_out + place, value, mask=stored)
    if base_out is not None:
        value = tl.where(dead, float("-inf"), m * natural)
        tl.store(base_out + place, tl.where(again, value, known), mask=stored)
        tl.store(total_out + place, weight, mask=stored)
    if MAX:
        tl.store(max_out + place, largest, mask=stored)
    if ENTROPY:
        entropy = tl.log2(weight) * LN2 - moment / weight * natural
        entropy = tl.where(entropy < 0, 0.0, entropy)
        tl.store(entropy_out + place, tl.where(dead, 0.0, entropy), mask=stored)
    if AHEAD:
        tl.store(ahead_out + place, tl.where(dead, 0.0, ahead / weight), mask=stored)
    singles = place, stored, here, more, rows
    _store_single(first_out, *singles, tl.zeros_like(i), m, weight, k, k_at, by, C)
    _store_single(previous_out, *singles, rows.pos - 1, m, weight, k, k_at, by, C)
    _store_single(self_out, *singles, rows.pos, m, weight, k, k_at, by, C)


@triton.jit(do_not_specialize=LENGTHS)
def forward(
    q, k, v, q_at, k_at, v_at, position, low, low_at, high, high_at, allowed, allowed_at, bias,
    bias_at, slopes, sinks, heads, group, queries, keys, offset, window, scale, softcap,
    on, lse, out, out_at, base_out, total_out, lse_out, max_out, entropy_out, ahead_out, first_out,
    previous_out, self_out, C: tl.constexpr,
):  # fmt: skip
    """Compute output and statistics of a block of queries; if `on` is 0, do nothing."""
    if on is not None:  # noqa: SIM102 (Triton must know whether there is something to load)
        if tl.load(on) == 0:
            return
    terms = (
        keys, position, offset, low, low_at, high, high_at, window, allowed, allowed_at, bias,
        bias_at, slopes, scale, softcap,
    )  # fmt: skip
    _forward(
        tl.program_id(0), None, queries, q, k, v, q_at, k_at, v_at, sinks, heads, group, queries,
        terms, lse, out, out_at, base_out, total_out, lse_out, max_out, entropy_out, ahead_out,
        first_out, previous_out, self_out, C.BM, C,
    )  # fmt: skip


@triton.jit(do_not_specialize=[*LENGTHS, "count", "programs"])
def sampled(
    q, k, q_at, k_at, position, low, low_at, high, high_at, allowed, allowed_at, bias, bias_at,
    slopes, sinks, heads, group, queries, keys, offset, window, scale, softcap, lse,
    chosen, count, programs, lse_out, max_out, entropy_out, ahead_out, first_out, previous_out,
    self_out, every_max, every_first, every_previous, every_self,
    FEW: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Compute statistics of the `chosen` queries, and others (`every_…`) of all queries.

    The first `programs` programs take the chosen queries, in small blocks because there are few.
    The log-sum-exp of all queries is known.
    """
    terms = (
        keys, position, offset, low, low_at, high, high_at, window, allowed, allowed_at, bias,
        bias_at, slopes, scale, softcap,
    )  # fmt: skip
    program = tl.program_id(0)
    if program < programs:
        _forward(
            program, chosen, count, q, k, None, q_at, k_at, None, sinks, heads, group, queries,
            terms, lse, None, None, None, None, lse_out, max_out, entropy_out, ahead_out, first_out,
            previous_out, self_out, FEW, C,
        )  # fmt: skip
    else:
        _forward(
            program - programs, None, queries, q, k, None, q_at, k_at, None, sinks, heads, group,
            queries, terms, lse, None, None, None, None, None, every_max, None, None, every_first,
            every_previous, every_self, C.BM, C,
        )  # fmt: skip


# ── backward, and sums over queries ─────────────────────────────────────────────────────────────


@triton.jit
def _base(rows, at, outside, natural):
    """Return the base of each row's scores, in their unit; ∞ where there are no weights."""
    base = tl.load(rows.base + at) / natural
    return tl.where(outside | (base == float("-inf")), float("inf"), base)


@triton.jit
def _weights(above, incoming, at, unit):
    """Return the softmax of scores above their row's base."""
    return tl.exp2(above * unit) * (1.0 / tl.load(incoming.total + at))[:, None]


@triton.jit
def _change(p, above, pos, j, at, change, incoming):
    """Return `dS = P ∘ (dP + constant − g_H above + g_J (j − position) + …)`; `change` is dP.

    `above` are scores relative to the base of their row, as natural logarithms. `pos` and `j` are
    `[n, 1]` and `[1, n]`.
    """
    change += tl.load(incoming.constant + at)[:, None]
    if incoming.entropy is not None:
        change -= tl.load(incoming.entropy + at)[:, None] * tl.where(p > 0, above, 0.0)
    if incoming.ahead is not None:
        change += tl.load(incoming.ahead + at)[:, None] * (j - pos).to(tl.float32)
    if incoming.first is not None:
        change += tl.where(j == 0, tl.load(incoming.first + at)[:, None], 0.0)
    if incoming.previous is not None:
        change += tl.where(j == pos - 1, tl.load(incoming.previous + at)[:, None], 0.0)
    if incoming.self is not None:
        change += tl.where(j == pos, tl.load(incoming.self + at)[:, None], 0.0)
    return p * change


@triton.jit
def _queries_sweep(
    acc, more_acc, q, more, g, at, base, rows, k, k_at, v, v_at, start, stop, by, incoming,
    VALUES: tl.constexpr, MASKED: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Accumulate the gradient of a block of queries over the keys from `start` to `stop`."""
    unit = _unit(by)
    upright = _upright(rows)
    column, k_step = tl.arange(0, C.BN), by.b * 0 + k_at[2]
    if VALUES:
        v_step = by.b * 0 + v_at[2]
    for n in range(start, stop, C.BN):
        j = (n + column)[None, :]
        keys, more_keys = _load_heads(k + n * k_step, column, by.keys - n, k_at, MASKED, C)
        dot = _products(q, more, keys, more_keys, C)
        s, bend = _scores(dot, upright, j, by, MASKED, C.CAUSAL)
        above = s - base[:, None]
        p = _weights(above, incoming, at, unit)
        change = tl.full([C.BM, C.BN], 0.0, tl.float32)
        if VALUES:
            values = _load(v + n * v_step, column, by.keys - n, v_at, C.DV, C.BV, C.EVEN_V, MASKED)
            change = _dot(g, tl.trans(values), None, C.EXACT)
        change = _change(p, above * unit * LN2, upright.pos, j, at, change, incoming)
        if by.softcap is not None:
            change *= 1.0 - bend * bend
        acc, more_acc = _add_products(acc, more_acc, change, keys, more_keys, C)
    return acc, more_acc


@triton.jit(do_not_specialize=LENGTHS)
def backward_queries(
    q, k, v, q_at, k_at, v_at, position, low, low_at, high, high_at, allowed, allowed_at, bias,
    bias_at, slopes, heads, group, queries, keys, offset, window, scale, softcap,
    base, total, g_out, g_at, constant, g_entropy, g_ahead, g_first, g_previous, g_self, g_q, gq_at,
    C: tl.constexpr,
):  # fmt: skip
    """Compute the gradient with respect to a block of queries."""
    blocks = tl.cdiv(queries, C.BM)
    program = tl.program_id(0)
    bh = program // blocks
    b, h = (bh // heads).to(tl.int64), (bh % heads).to(tl.int64)
    by = Scoring(
        b, h, keys, position, offset, low, low_at, high, high_at, window, allowed, allowed_at, bias,
        bias_at, slopes, scale, softcap,
    )  # fmt: skip
    incoming = Incoming(base, total, constant, g_entropy, g_ahead, g_first, g_previous, g_self)
    row = (blocks - 1 - program % blocks) * C.BM + tl.arange(0, C.BM)
    i = tl.minimum(row, queries - 1)
    rows = _queries(i, by)
    k += b * k_at[0] + (h // group) * k_at[1]
    here, more = _load_heads(q + b * q_at[0] + h * q_at[1], i, queries, q_at, False, C)
    at = bh.to(tl.int64) * queries + i
    lowest = _base(incoming, at, row >= queries, _unit(by) * LN2)
    g = here
    if g_out is not None:
        v += b * v_at[0] + (h // group) * v_at[1]
        g_out += b * g_at[0] + h * g_at[1]
        g = _load(g_out, i, queries, g_at, C.DV, C.BV, C.EVEN_V, False)
    spans = _key_span(rows, by, C)
    acc, more_acc = _zeros(C.BM, C)
    VALUES: tl.constexpr = g_out is not None
    LEFT: tl.constexpr = (window is not None) or (low is not None)
    OPEN: tl.constexpr = (allowed is None) and (bias is None)
    for part in tl.static_range(3):
        if (part == 2) or ((part == 0) and LEFT) or ((part == 1) and OPEN):
            acc, more_acc = _queries_sweep(
                acc, more_acc, here, more, g, at, lowest, rows, k, k_at, v, v_at, spans[part],
                spans[part + 1], by, incoming, VALUES, part != 1, C,
            )  # fmt: skip
    g_q += b * gq_at[0] + h * gq_at[1]
    _store_heads(g_q, row, queries, gq_at, acc * scale, more_acc * scale, C)


@triton.jit
def _query_span(n, queries, by, CLOSED: tl.constexpr, C: tl.constexpr):
    """Return the edges of three spans of queries for the keys from `n` on.

    They contain all queries that may see one of these keys; in the second, all see all of them.
    Cells beyond the last query or key have weight 0 or are not stored.
    """
    start, stop = n * 0, n * 0 + queries
    open_start, open_stop = start, stop
    if by.position is None:
        if C.CAUSAL:
            start = tl.maximum(n - by.offset, 0) // C.BM * C.BM
            open_start = (tl.maximum(n + C.BN - 1 - by.offset, 0) + C.BM - 1) // C.BM * C.BM
        if by.window is not None:
            stop = tl.minimum(stop, n + C.BN - 1 + by.window - by.offset)
            last = tl.maximum(n + by.window - by.offset, 0)
            open_stop = tl.minimum(stop, last // C.BM * C.BM)
    closed = open_stop <= open_start
    if CLOSED:
        closed = stop == stop
    return start, tl.where(closed, stop, open_start), tl.where(closed, stop, open_stop), stop


@triton.jit
def _overlap(rows, n, by, MASKED: tl.constexpr, C: tl.constexpr):
    """Return False if, by its ranges, a block of queries sees none of the keys from `n` on."""
    if MASKED and ((by.low is not None) or (by.high is not None)):
        return (tl.max(rows.high) > n) & (tl.min(rows.low) < n + C.BN)
    return tl.constexpr(True)


@triton.jit
def _keys_sweep(
    acc, more_acc, acc_v, column, k, more, values, n, start, stop, q, q_at, g_out, g_at, queries,
    first_row, by, incoming, weight, GRADIENT: tl.constexpr, COLUMN: tl.constexpr,
    MASKED: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Accumulate gradients and received weights of a block of keys over the queries from `start` to
    `stop`."""
    unit = _unit(by)
    j, step, q_step = (n + tl.arange(0, C.BN))[None, :], tl.arange(0, C.BM), by.b * 0 + q_at[2]
    if g_out is not None:
        g_step = by.b * 0 + g_at[2]
    for t in range(start, stop, C.BM):
        row = t + step
        rows = _queries(tl.minimum(row, queries - 1), by)
        if _overlap(rows, n, by, MASKED, C):
            at = first_row + rows.i
            base = _base(incoming, at, row >= queries, unit * LN2)
            here, more_here = _load_heads(q + t * q_step, step, queries - t, q_at, True, C)
            upright = _upright(rows)
            dot = _products(here, more_here, k, more, C)
            s, bend = _scores(dot, upright, j, by, MASKED, C.CAUSAL)
            above = s - base[:, None]
            p = _weights(above, incoming, at, unit)
            if COLUMN:
                if weight is not None:
                    column += tl.sum(p * tl.load(weight + rows.i)[:, None], 0)
                else:
                    column += tl.sum(p, 0)
            if GRADIENT:
                change = tl.full([C.BM, C.BN], 0.0, tl.float32)
                if g_out is not None:
                    g = _load(g_out + t * g_step, step, queries - t, g_at, C.DV, C.BV, C.EVEN_V)
                    acc_v = _dot(tl.trans(p).to(g.dtype), g, acc_v, C.EXACT)
                    change = _dot(g, tl.trans(values), None, C.EXACT)
                change = _change(p, above * unit * LN2, upright.pos, j, at, change, incoming)
                if by.softcap is not None:
                    change *= 1.0 - bend * bend
                change = tl.trans(change)
                acc, more_acc = _add_products(acc, more_acc, change, here, more_here, C)
    return acc, more_acc, acc_v, column


@triton.jit(do_not_specialize=LENGTHS)
def over_queries(
    q, k, v, q_at, k_at, v_at, position, low, low_at, high, high_at, allowed, allowed_at, bias,
    bias_at, slopes, heads, group, queries, keys, offset, window, scale, softcap,
    base, total, g_out, g_at, constant, g_entropy, g_ahead, g_first, g_previous, g_self,
    g_k, gk_at, g_v, gv_at, weight, received, C: tl.constexpr,
):  # fmt: skip
    """Compute sums over the queries for a block of keys.

    These are the gradients of the keys and values, summed over all query heads that read them, and
    the attention received from each query head, `Σ_i weight_i p_ij`. A program takes all of these
    heads if a gradient is computed, otherwise one head.
    """
    GRADIENT: tl.constexpr = g_k is not None
    COLUMN: tl.constexpr = received is not None
    CLOSED: tl.constexpr = (
        (position is not None) or (low is not None) or (high is not None) or (allowed is not None)
    )
    blocks = tl.cdiv(keys, C.BN)
    program = tl.program_id(0)
    members = 1
    if GRADIENT:
        members = group
    unit = program // blocks
    b = (unit // (heads // members)).to(tl.int64)
    first_head = (unit % (heads // members) * members).to(tl.int64)
    kv = first_head // group
    n = program % blocks * C.BN
    j = n + tl.arange(0, C.BN)
    here, more = _load_heads(k + b * k_at[0] + kv * k_at[1], j, keys, k_at, True, C)
    values = here
    if g_out is not None:
        v += b * v_at[0] + kv * v_at[1]
        values = _load(v, j, keys, v_at, C.DV, C.BV, C.EVEN_V)
    acc, more_acc = _zeros(C.BN, C)
    acc_v = tl.full([C.BN, C.BV], 0.0, tl.float32)
    incoming = Incoming(base, total, constant, g_entropy, g_ahead, g_first, g_previous, g_self)
    for member in range(0, members):
        h = first_head + member
        by = Scoring(
            b, h, keys, position, offset, low, low_at, high, high_at, window, allowed, allowed_at,
            bias, bias_at, slopes, scale, softcap,
        )  # fmt: skip
        q_head = q + b * q_at[0] + h * q_at[1]
        g_head = g_out
        if g_out is not None:
            g_head = g_out + b * g_at[0] + h * g_at[1]
        column = tl.full([C.BN], 0.0, tl.float32)
        spans = _query_span(n, queries, by, CLOSED, C)
        EDGES: tl.constexpr = C.CAUSAL or (window is not None) or CLOSED
        for part in tl.static_range(3):
            if (
                ((part == 0) and EDGES)
                or ((part == 1) and (not CLOSED))
                or ((part == 2) and (window is not None))
            ):
                acc, more_acc, acc_v, column = _keys_sweep(
                    acc, more_acc, acc_v, column, here, more, values, n, spans[part],
                    spans[part + 1], q_head, q_at, g_head, g_at, queries,
                    (b * heads + h) * queries, by, incoming, weight, GRADIENT, COLUMN, part != 1, C,
                )  # fmt: skip
        if COLUMN:
            tl.store(received + (b * heads + h) * keys + j, column, mask=j < keys)
    if GRADIENT:
        g_k += b * gk_at[0] + kv * gk_at[1]
        _store_heads(g_k, j, keys, gk_at, acc * scale, more_acc * scale, C)
    if g_v is not None:
        d = tl.arange(0, C.BV)
        cells = _cells(g_v + b * gv_at[0] + kv * gv_at[1], j, gv_at, d)
        stored = (j < keys)[:, None] & (d < C.DV)[None, :]
        tl.store(cells, acc_v.to(g_v.dtype.element_ty), mask=stored)

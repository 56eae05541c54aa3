"""Triton kernels for CUDA: attention with every figure of its rows, gradients, and column sums.

A program takes a block of queries (or of keys) of one head and goes over the keys (or queries) that
it may meet, with an online softmax (Milakov and Gimelshein 2018; Dao et al. 2022). Beside the sum
of the weights it keeps `Σ p (s − m)` and `Σ p (j − position)`, relative to the running maximum m,
so that nothing is lost where logits are large. Hardware has 2ˣ: where a score is `scale · q·k` and
no more, log₂ e is in the scale. Only `triton_api` calls these.
"""

# Triton reads the annotations of kernels itself: no `from __future__ import annotations` here. It
# knows which branches are taken, and so that what these define is there.
# pyright: reportPossiblyUnboundVariable=false

import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)

FAR: tl.constexpr = tl.constexpr(2048.0)
"""The log-sum-exp from which on weights taken from it would be off by more than 1e-4."""

LENGTHS = ["queries", "keys", "offset"]
"""Arguments that change from call to call: no kernel is compiled for some of their values."""


@triton.jit
def _cells(x, row, at, column):
    """The addresses of rows and columns of a matrix with the strides `at[2:]`."""
    return x + row[:, None].to(tl.int64) * at[2] + column[None, :] * at[3]


@triton.jit
def _load(
    x, row, rows, at, columns, BLOCK: tl.constexpr, EVEN: tl.constexpr, CHECK: tl.constexpr = True,
    FIRST: tl.constexpr = 0,
):  # fmt: skip
    """`[n, BLOCK]`: rows `row` of a tensor whose last two strides are `at[2:]`; 0 outside of it.

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
def _products(
    q, more, k, row, keys, k_at, D, BD: tl.constexpr, BE: tl.constexpr, EVEN: tl.constexpr,
    CHECK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`q·k` of queries and the keys `row`; a head wider than `BD` has `BE` columns `more`."""
    keys_here = _load(k, row, keys, k_at, D, BD, EVEN or BE > 0, CHECK)
    dot = tl.dot(q, tl.trans(keys_here), input_precision=PRECISION)
    if BE > 0:
        keys_here = _load(k, row, keys, k_at, D, BE, EVEN, CHECK, BD)
        dot = tl.dot(more, tl.trans(keys_here), dot, input_precision=PRECISION)
    return dot


@triton.jit
def _heads(
    q, row, rows, q_at, D, BD: tl.constexpr, BE: tl.constexpr, EVEN: tl.constexpr,
    CHECK: tl.constexpr,
):  # fmt: skip
    """Rows of queries or keys in their two pieces; without a second, the first again."""
    found = _load(q, row, rows, q_at, D, BD, EVEN or BE > 0, CHECK)
    more = found
    if BE > 0:
        more = _load(q, row, rows, q_at, D, BE, EVEN, CHECK, BD)
    return found, more


@triton.jit
def _position(i, position, offset):
    """Where queries stand among the keys."""
    if position is not None:
        return tl.load(position + i).to(tl.int32)
    return i + offset


@triton.jit
def _edge(i, edge, at, b, h, keys, otherwise):
    """A range's edge for each query, within the sequence."""
    if edge is not None:
        found = tl.load(edge + b * at[0] + h * at[1] + i.to(tl.int64) * at[2])
        return tl.minimum(tl.maximum(found, 0), keys).to(tl.int32)
    return tl.zeros_like(i) + otherwise


@triton.jit
def _unit(softcap, bias, slopes):
    """Scores times this are logarithms to base 2.

    A bias may leave nothing of q·k in a score. That rounding must be done before anything is taken
    from the score, and a product with log₂ e would be fused with what comes after it.
    """
    if (softcap is None) and (bias is None) and (slopes is None):
        return tl.constexpr(1.0)
    return LOG2E


@triton.jit
def _scores(
    dot, i, pos, j, low, high, b, h, keys, window, scale, softcap,
    allowed, allowed_at, bias, bias_at, slopes, CAUSAL: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Scores in their unit, −inf where hidden, and the tanh of softcap; of axes that broadcast."""
    bend = dot
    if (softcap is None) and (bias is None) and (slopes is None):
        s = dot * (scale * LOG2E)
    else:
        s = dot * scale
        if softcap is not None:
            small = tl.exp2(-2.0 * LOG2E * tl.abs(s / softcap))
            size = (1.0 - small) / (1.0 + small)
            bend = tl.where(s < 0, -size, size)
            s = bend * softcap
        if slopes is not None:
            s -= tl.load(slopes + h) * tl.abs(pos - j).to(tl.float32)
        if bias is not None:
            place = bias + b * bias_at[0] + h * bias_at[1] + i.to(tl.int64) * bias_at[2]
            s += tl.load(place + j.to(tl.int64) * bias_at[3], mask=j < keys, other=0.0)
    if MASKED:
        ok = (j >= 0) & (j < keys) & (j >= low) & (j < high)
        if CAUSAL:
            ok &= j <= pos
        if window is not None:
            ok &= j > pos - window
        if allowed is not None:
            place = allowed + b * allowed_at[0] + h * allowed_at[1] + i.to(tl.int64) * allowed_at[2]
            ok &= tl.load(place + j.to(tl.int64) * allowed_at[3], mask=j < keys, other=0) != 0
        s = tl.where(ok, s, float("-inf"))
    return s, bend


@triton.jit
def _span(
    pos, low, high, keys, window, allowed, bias, CAUSAL: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Of a block of queries: the first and last key in sight, and between which all see all."""
    start = tl.maximum(tl.min(low), 0)
    stop = tl.minimum(tl.max(high), keys)
    open_start, open_stop = tl.max(low), tl.minimum(tl.min(high), keys)
    if CAUSAL:
        stop = tl.minimum(stop, tl.max(pos) + 1)
        open_stop = tl.minimum(open_stop, tl.min(pos) + 1)
    if window is not None:
        start = tl.maximum(start, tl.min(pos) + 1 - window)
        open_start = tl.maximum(open_start, tl.max(pos) + 1 - window)
    start = start // BLOCK * BLOCK
    open_start = tl.maximum(start, (tl.maximum(open_start, 0) + BLOCK - 1) // BLOCK * BLOCK)
    open_stop = tl.maximum(open_stop, 0) // BLOCK * BLOCK
    if (allowed is not None) or (bias is not None):
        open_stop = open_start
    closed = open_stop <= open_start
    open_start = tl.where(closed, start, open_start)
    open_stop = tl.where(closed, start, open_stop)
    return start, open_start, open_stop, stop


@triton.jit
def _sweep(
    m, base, total, spread, ahead, acc, q, more, i, pos, low, high, b, h, k, k_at, v, v_at, keys,
    start, stop, window, scale, softcap, allowed, allowed_at, bias, bias_at, slopes, D, DV,
    KNOWN: tl.constexpr, MAX: tl.constexpr, ENTROPY: tl.constexpr, AHEAD: tl.constexpr,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
    BE: tl.constexpr, BV: tl.constexpr, EVEN: tl.constexpr, EVEN_V: tl.constexpr,
    PRECISION: tl.constexpr, PRECISION_V: tl.constexpr,
):  # fmt: skip
    """Take in the keys from `start` to `stop`; where the base is KNOWN, nothing is rescaled."""
    unit = _unit(softcap, bias, slopes)
    # Only the address of a block's first key changes in the loop, and that in 64 bits.
    column, k_step = tl.arange(0, BN), b * 0 + k_at[2]
    if v is not None:
        v_step = b * 0 + v_at[2]
    for n in range(start, stop, BN):
        j = n + column
        dot = _products(
            q, more, k + n * k_step, column, keys - n, k_at, D, BD, BE, EVEN, MASKED, PRECISION
        )
        s, _ = _scores(
            dot, i[:, None], pos[:, None], j[None, :], low[:, None], high[:, None], b, h, keys,
            window, scale, softcap, allowed, allowed_at, bias, bias_at, slopes, CAUSAL, MASKED,
        )  # fmt: skip
        if KNOWN:
            if MAX:
                m = tl.maximum(m, tl.max(s, 1))
            x = s - base[:, None]
            p = tl.exp2(x * unit)
            if ENTROPY:
                each = p * x
                if MASKED:
                    each = tl.where(p > 0, each, 0.0)
                spread += tl.sum(each, 1)
            if AHEAD:  # the distance to the block's first key is the same for all of a row
                away = column.to(tl.float32)[None, :]
                ahead += tl.sum(p * away, 1) + tl.sum(p, 1) * (n - pos).to(tl.float32)
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
                spread = shrink * (spread + total * moved) + tl.sum(each, 1)
            if AHEAD:
                away = (j[None, :] - pos[:, None]).to(tl.float32)
                ahead = shrink * ahead + tl.sum(p * away, 1)
            total = shrink * total + tl.sum(p, 1)
            if v is not None:
                values = _load(v + n * v_step, column, keys - n, v_at, DV, BV, EVEN_V)
                acc = tl.dot(
                    p.to(values.dtype), values, acc * shrink[:, None], input_precision=PRECISION_V
                )
            m = top
    return m, total, spread, ahead, acc


@triton.jit
def _add_sink(m, total, spread, ahead, acc, sink, unit):
    """Take in one more score, which has no key."""
    top = tl.maximum(m, sink)
    base = tl.where(top == float("-inf"), 0.0, top)
    shrink, own = tl.exp2((m - base) * unit), tl.exp2((sink - base) * unit)
    moved = tl.where(m == float("-inf"), 0.0, m - base)
    spread = shrink * (spread + total * moved) + tl.where(own > 0, own * (sink - base), 0.0)
    total = tl.where(total == 0, 0.0, shrink * total + own)
    return top, total, spread, shrink * ahead, acc * shrink[:, None]


@triton.jit
def _single(
    q, more, i, pos, j, low, high, m, total, b, h, k, k_at, keys, window, scale, softcap, allowed,
    allowed_at, bias, bias_at, slopes, D,
    CAUSAL: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """The weight of one key `j` for each query."""
    keys_here, rest = _heads(k, j, keys, k_at, D, BD, BE, EVEN, True)
    dot = tl.sum(q.to(tl.float32) * keys_here.to(tl.float32), 1)
    if BE > 0:
        dot += tl.sum(more.to(tl.float32) * rest.to(tl.float32), 1)
    inside = tl.minimum(tl.maximum(j, 0), keys - 1)
    s, _ = _scores(
        dot, i, pos, inside, low, high, b, h, keys, window, scale, softcap, allowed, allowed_at,
        bias, bias_at, slopes, CAUSAL, True,
    )  # fmt: skip
    weight = tl.exp2((s - m) * _unit(softcap, bias, slopes)) / total
    return tl.where((inside == j) & (s != float("-inf")), weight, 0.0)


@triton.jit
def _rows(
    place, chosen, count, q, k, v, q_at, k_at, v_at, position, low, low_at, high, high_at, allowed,
    allowed_at, bias, bias_at, slopes, sinks, heads, group, queries, keys, offset, window, scale,
    softcap, D, DV, lse, out, out_at, top_out, total_out, lse_out, max_out, entropy_out, ahead_out,
    first_out, previous_out, self_out,
    CAUSAL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BV: tl.constexpr, EVEN: tl.constexpr, EVEN_V: tl.constexpr, PRECISION: tl.constexpr,
    PRECISION_V: tl.constexpr,
):  # fmt: skip
    """Output and figures of a block of queries, of all or of those that are `chosen`.

    Where `lse` is given, weights are taken from it, and there is no output; rows in which it is so
    large that weights would lose digits are gone over twice. `top_out` and `total_out` are what
    scores are taken relative to and the sum of the weights then: the log-sum-exp and 1, or the
    largest score.
    """
    KNOWN: tl.constexpr = lse is not None
    MAX: tl.constexpr = max_out is not None
    ENTROPY: tl.constexpr = entropy_out is not None
    AHEAD: tl.constexpr = ahead_out is not None
    blocks = tl.cdiv(count, BM)
    bh = place // blocks
    b, h = (bh // heads).to(tl.int64), (bh % heads).to(tl.int64)
    block = blocks - 1 - place % blocks  # those that see most come first
    wanted = block * BM + tl.arange(0, BM)
    i = tl.minimum(wanted, count - 1)
    if chosen is not None:
        i = tl.load(chosen + i).to(tl.int32)
    pos = _position(i, position, offset)
    lows, highs = _edge(i, low, low_at, b, h, keys, 0), _edge(i, high, high_at, b, h, keys, keys)
    q += b * q_at[0] + h * q_at[1]
    k += b * k_at[0] + (h // group) * k_at[1]
    if v is not None:
        v += b * v_at[0] + (h // group) * v_at[1]
    rows, more = _heads(q, i, queries, q_at, D, BD, BE, EVEN, False)

    unit = _unit(softcap, bias, slopes)
    natural = unit * LN2  # scores times this are natural logarithms
    m = tl.full([BM], float("-inf"), tl.float32)
    base = tl.zeros([BM], tl.float32)
    total = tl.zeros([BM], tl.float32)
    spread = tl.zeros([BM], tl.float32)
    ahead = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, BV], tl.float32)
    if sinks is not None:
        sink = tl.load(sinks + h).to(tl.float32) / natural
    start, open_start, open_stop, stop = _span(
        pos, lows, highs, keys, window, allowed, bias, CAUSAL, BN
    )
    if KNOWN:
        known = tl.load(lse + bh.to(tl.int64) * queries + i)
        size = tl.abs(known)
        base = tl.where(size == float("inf"), float("inf"), known / natural)
        total += 1.0
        again = tl.max(tl.where((size > FAR) & (size != float("inf")), 1, 0)) > 0
        if again:
            top, weight, _, _, _ = _sweep(
                m, base, total * 0.0, spread, ahead, acc, rows, more, i, pos, lows, highs, b, h, k,
                k_at, None, v_at, keys, start, stop, window, scale, softcap, allowed, allowed_at,
                bias, bias_at, slopes, D, DV, False, False, False, False, CAUSAL, True, BN, BD, BE,
                BV, EVEN, EVEN_V, PRECISION, PRECISION_V,
            )  # fmt: skip
            if sinks is not None:
                top, weight, _, _, _ = _add_sink(top, weight, spread, ahead, acc, sink, unit)
            base = tl.where(top == float("-inf"), float("inf"), top)
            total = tl.where(weight == 0, 1.0, weight)
    if (not KNOWN) or MAX or ENTROPY or AHEAD:
        if (window is not None) or (low is not None):
            m, total, spread, ahead, acc = _sweep(
                m, base, total, spread, ahead, acc, rows, more, i, pos, lows, highs, b, h, k, k_at,
                v, v_at, keys, start, open_start, window, scale, softcap, allowed, allowed_at, bias,
                bias_at, slopes, D, DV, KNOWN, MAX, ENTROPY, AHEAD, CAUSAL, True, BN, BD, BE, BV,
                EVEN, EVEN_V, PRECISION, PRECISION_V,
            )  # fmt: skip
        if (allowed is None) and (bias is None):
            m, total, spread, ahead, acc = _sweep(
                m, base, total, spread, ahead, acc, rows, more, i, pos, lows, highs, b, h, k, k_at,
                v, v_at, keys, open_start, open_stop, window, scale, softcap, allowed, allowed_at,
                bias, bias_at, slopes, D, DV, KNOWN, MAX, ENTROPY, AHEAD, CAUSAL, False, BN, BD, BE,
                BV, EVEN, EVEN_V, PRECISION, PRECISION_V,
            )  # fmt: skip
        m, total, spread, ahead, acc = _sweep(
            m, base, total, spread, ahead, acc, rows, more, i, pos, lows, highs, b, h, k, k_at, v,
            v_at, keys, open_stop, stop, window, scale, softcap, allowed, allowed_at, bias, bias_at,
            slopes, D, DV, KNOWN, MAX, ENTROPY, AHEAD, CAUSAL, True, BN, BD, BE, BV, EVEN, EVEN_V,
            PRECISION, PRECISION_V,
        )  # fmt: skip

    largest = m * natural
    if KNOWN:
        dead = known == float("-inf")
        if sinks is not None:
            own = tl.exp2((sink - base) * unit)
            spread += tl.where(own > 0, own * (sink - base), 0.0)
        # What comes of scores that are no numbers is none, either.
        total = tl.where(size < float("inf"), total, float("nan"))
        m = base
    else:
        dead = total == 0
        if sinks is not None:
            m, total, spread, ahead, acc = _add_sink(m, total, spread, ahead, acc, sink, unit)
    weight = tl.where(dead, 1.0, total)
    stored = wanted < count
    figure = bh.to(tl.int64) * count + wanted
    if out is not None:
        d = tl.arange(0, BV)
        cells = _cells(out + b * out_at[0] + h * out_at[1], wanted, out_at, d)
        gone = dead[:, None]  # pyright: ignore[reportIndexIssue]
        acc = tl.where(gone, 0.0, acc / weight[:, None])
        tl.store(cells, acc.to(out.dtype.element_ty), mask=stored[:, None] & (d < DV)[None, :])
    if lse_out is not None:
        found = tl.where(dead, float("-inf"), m * natural + tl.log2(weight) * LN2)
        tl.store(lse_out + figure, found, mask=stored)
    if top_out is not None:
        top = tl.where(dead, float("-inf"), m * natural)
        tl.store(top_out + figure, tl.where(again, top, known), mask=stored)
        tl.store(total_out + figure, weight, mask=stored)
    if MAX:
        tl.store(max_out + figure, largest, mask=stored)
    if ENTROPY:
        entropy = tl.log2(weight) * LN2 - spread / weight * natural
        entropy = tl.where(entropy < 0, 0.0, entropy)
        tl.store(entropy_out + figure, tl.where(dead, 0.0, entropy), mask=stored)
    if AHEAD:
        tl.store(ahead_out + figure, tl.where(dead, 0.0, ahead / weight), mask=stored)
    if first_out is not None:
        single = _single(
            rows, more, i, pos, tl.zeros_like(i), lows, highs, m, weight, b, h, k, k_at, keys,
            window, scale, softcap, allowed, allowed_at, bias, bias_at, slopes, D, CAUSAL, BD, BE,
            EVEN,
        )  # fmt: skip
        tl.store(first_out + figure, single, mask=stored)
    if previous_out is not None:
        single = _single(
            rows, more, i, pos, pos - 1, lows, highs, m, weight, b, h, k, k_at, keys, window,
            scale, softcap, allowed, allowed_at, bias, bias_at, slopes, D, CAUSAL, BD, BE, EVEN,
        )  # fmt: skip
        tl.store(previous_out + figure, single, mask=stored)
    if self_out is not None:
        single = _single(
            rows, more, i, pos, pos, lows, highs, m, weight, b, h, k, k_at, keys, window,
            scale, softcap, allowed, allowed_at, bias, bias_at, slopes, D, CAUSAL, BD, BE, EVEN,
        )  # fmt: skip
        tl.store(self_out + figure, single, mask=stored)


@triton.jit(do_not_specialize=LENGTHS)
def forward(
    q, k, v, q_at, k_at, v_at, position, low, low_at, high, high_at, allowed, allowed_at, bias,
    bias_at, slopes, sinks, heads, group, queries, keys, offset, window, scale, softcap, D, DV,
    on, lse, out, out_at, top_out, total_out, lse_out, max_out, entropy_out, ahead_out, first_out,
    previous_out, self_out,
    CAUSAL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    BV: tl.constexpr, EVEN: tl.constexpr, EVEN_V: tl.constexpr, PRECISION: tl.constexpr,
    PRECISION_V: tl.constexpr,
):  # fmt: skip
    """Output and figures of a block of queries (`_rows`); with 0 in `on`, nothing is done."""
    if on is not None:  # noqa: SIM102 (Triton must know whether there is something to load)
        if tl.load(on) == 0:
            return
    _rows(
        tl.program_id(0), None, queries, q, k, v, q_at, k_at, v_at, position, low, low_at, high,
        high_at, allowed, allowed_at, bias, bias_at, slopes, sinks, heads, group, queries, keys,
        offset, window, scale, softcap, D, DV, lse, out, out_at, top_out, total_out, lse_out,
        max_out, entropy_out, ahead_out, first_out, previous_out, self_out, CAUSAL, BM, BN, BD, BE,
        BV, EVEN, EVEN_V, PRECISION, PRECISION_V,
    )  # fmt: skip


@triton.jit(do_not_specialize=[*LENGTHS, "count", "programs"])
def sampled(
    q, k, q_at, k_at, position, low, low_at, high, high_at, allowed, allowed_at, bias, bias_at,
    slopes, sinks, heads, group, queries, keys, offset, window, scale, softcap, D, lse,
    chosen, count, programs, lse_out, max_out, entropy_out, ahead_out, first_out, previous_out,
    self_out, every_max, every_first, every_previous, every_self,
    CAUSAL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, FEW: tl.constexpr, BD: tl.constexpr,
    BE: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Figures of the queries `chosen`, by the first `programs`; by the others, those of `every`.

    The log-sum-exp of every query is known. Blocks of chosen queries are small, as these are few.
    """
    place = tl.program_id(0)
    if place < programs:
        _rows(
            place, chosen, count, q, k, None, q_at, k_at, None, position, low, low_at, high,
            high_at, allowed, allowed_at, bias, bias_at, slopes, sinks, heads, group, queries, keys,
            offset, window, scale, softcap, D, 0, lse, None, None, None, None, lse_out, max_out,
            entropy_out, ahead_out, first_out, previous_out, self_out, CAUSAL, FEW, BN, BD, BE, 16,
            EVEN, True, PRECISION, PRECISION,
        )  # fmt: skip
    else:
        _rows(
            place - programs, None, queries, q, k, None, q_at, k_at, None, position, low, low_at,
            high, high_at, allowed, allowed_at, bias, bias_at, slopes, sinks, heads, group, queries,
            keys, offset, window, scale, softcap, D, 0, lse, None, None, None, None, None,
            every_max, None, None, every_first, every_previous, every_self, CAUSAL, BM, BN, BD, BE,
            16, EVEN, True, PRECISION, PRECISION,
        )  # fmt: skip


@triton.jit
def _base(top, at, gone, natural):
    """What a row's scores are taken relative to, in their unit; ∞ where there are no weights."""
    base = tl.load(top + at) / natural
    return tl.where(gone | (base == float("-inf")), float("inf"), base)


@triton.jit
def _weights(above, total, at, unit):
    """The softmax of scores above their row's base, whose weights have this total."""
    return tl.exp2(above * unit) * (1.0 / tl.load(total + at))[:, None]


@triton.jit
def _change(
    p, above, pos, j, at, change, constant, g_entropy, g_ahead, g_first, g_previous, g_self
):
    """`dS = P ∘ (dP + constant − g_H above + g_J (j − position) + …)`; `change` is dP.

    Scores are `above` what the constant is relative to, as natural logarithms.
    """
    change += tl.load(constant + at)[:, None]
    if g_entropy is not None:
        finite = tl.where(p > 0, above, 0.0)
        change -= tl.load(g_entropy + at)[:, None] * finite
    if g_ahead is not None:
        change += tl.load(g_ahead + at)[:, None] * (j[None, :] - pos[:, None]).to(tl.float32)
    if g_first is not None:
        change += tl.where(j[None, :] == 0, tl.load(g_first + at)[:, None], 0.0)
    if g_previous is not None:
        change += tl.where(j[None, :] == pos[:, None] - 1, tl.load(g_previous + at)[:, None], 0.0)
    if g_self is not None:
        change += tl.where(j[None, :] == pos[:, None], tl.load(g_self + at)[:, None], 0.0)
    return p * change


@triton.jit
def _queries_sweep(
    acc, rows, g, i, pos, lows, highs, base, at, b, h, k, k_at, v, v_at, keys, start, stop, window,
    scale, softcap, allowed, allowed_at, bias, bias_at, slopes, D, DV, total, g_out, constant,
    g_entropy, g_ahead, g_first, g_previous, g_self,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BD: tl.constexpr, BV: tl.constexpr, EVEN: tl.constexpr, EVEN_V: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Add what the keys from `start` to `stop` give to the gradient in a block of queries."""
    unit = _unit(softcap, bias, slopes)
    column, k_step = tl.arange(0, BN), b * 0 + k_at[2]
    if g_out is not None:
        v_step = b * 0 + v_at[2]
    for n in range(start, stop, BN):
        j = n + column
        keys_here = _load(k + n * k_step, column, keys - n, k_at, D, BD, EVEN, MASKED)
        dot = tl.dot(rows, tl.trans(keys_here), input_precision=PRECISION)
        s, bend = _scores(
            dot, i[:, None], pos[:, None], j[None, :], lows[:, None], highs[:, None], b, h, keys,
            window, scale, softcap, allowed, allowed_at, bias, bias_at, slopes, CAUSAL, MASKED,
        )  # fmt: skip
        above = s - base[:, None]
        p = _weights(above, total, at, unit)
        change = tl.zeros([BM, BN], tl.float32)
        if g_out is not None:
            values = _load(v + n * v_step, column, keys - n, v_at, DV, BV, EVEN_V, MASKED)
            change = tl.dot(g, tl.trans(values), input_precision=PRECISION)
        change = _change(
            p, above * (unit * LN2), pos, j, at, change, constant, g_entropy, g_ahead, g_first,
            g_previous, g_self,
        )  # fmt: skip
        if softcap is not None:
            change *= 1.0 - bend * bend
        acc = tl.dot(change.to(keys_here.dtype), keys_here, acc, input_precision=PRECISION)
    return acc


@triton.jit(do_not_specialize=LENGTHS)
def backward_queries(
    q, k, v, q_at, k_at, v_at, position, low, low_at, high, high_at, allowed, allowed_at, bias,
    bias_at, slopes, heads, group, queries, keys, offset, window, scale, softcap, D, DV,
    top, total, g_out, g_at, constant, g_entropy, g_ahead, g_first, g_previous, g_self, g_q, gq_at,
    CAUSAL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
    EVEN: tl.constexpr, EVEN_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient in a block of queries."""
    unit = _unit(softcap, bias, slopes)
    natural = unit * LN2
    blocks = tl.cdiv(queries, BM)
    place = tl.program_id(0)
    bh = place // blocks
    b, h = (bh // heads).to(tl.int64), (bh % heads).to(tl.int64)
    wanted = (blocks - 1 - place % blocks) * BM + tl.arange(0, BM)
    i = tl.minimum(wanted, queries - 1)
    pos = _position(i, position, offset)
    lows, highs = _edge(i, low, low_at, b, h, keys, 0), _edge(i, high, high_at, b, h, keys, keys)
    q += b * q_at[0] + h * q_at[1]
    k += b * k_at[0] + (h // group) * k_at[1]
    rows = _load(q, i, queries, q_at, D, BD, EVEN, False)
    at = bh.to(tl.int64) * queries + i
    base = _base(top, at, wanted >= queries, natural)
    g = rows
    if g_out is not None:
        v += b * v_at[0] + (h // group) * v_at[1]
        g_out += b * g_at[0] + h * g_at[1]
        g = _load(g_out, i, queries, g_at, DV, BV, EVEN_V, False)
    start, open_start, open_stop, stop = _span(
        pos, lows, highs, keys, window, allowed, bias, CAUSAL, BN
    )
    acc = tl.zeros([BM, BD], tl.float32)
    if (window is not None) or (low is not None):
        acc = _queries_sweep(
            acc, rows, g, i, pos, lows, highs, base, at, b, h, k, k_at, v, v_at, keys, start,
            open_start, window, scale, softcap, allowed, allowed_at, bias, bias_at, slopes, D, DV,
            total, g_out, constant, g_entropy, g_ahead, g_first, g_previous, g_self, CAUSAL, True,
            BM, BN, BD, BV, EVEN, EVEN_V, PRECISION,
        )  # fmt: skip
    if (allowed is None) and (bias is None):
        acc = _queries_sweep(
            acc, rows, g, i, pos, lows, highs, base, at, b, h, k, k_at, v, v_at, keys, open_start,
            open_stop, window, scale, softcap, allowed, allowed_at, bias, bias_at, slopes, D, DV,
            total, g_out, constant, g_entropy, g_ahead, g_first, g_previous, g_self, CAUSAL, False,
            BM, BN, BD, BV, EVEN, EVEN_V, PRECISION,
        )  # fmt: skip
    acc = _queries_sweep(
        acc, rows, g, i, pos, lows, highs, base, at, b, h, k, k_at, v, v_at, keys, open_stop, stop,
        window, scale, softcap, allowed, allowed_at, bias, bias_at, slopes, D, DV, total, g_out,
        constant, g_entropy, g_ahead, g_first, g_previous, g_self, CAUSAL, True, BM, BN, BD, BV,
        EVEN, EVEN_V, PRECISION,
    )  # fmt: skip
    d = tl.arange(0, BD)
    cells = _cells(g_q + b * gq_at[0] + h * gq_at[1], wanted, gq_at, d)
    stored = (wanted < queries)[:, None] & (d < D)[None, :]
    tl.store(cells, (acc * scale).to(g_q.dtype.element_ty), mask=stored)


@triton.jit
def _meeting(
    n, queries, position, offset, window, CLOSED: tl.constexpr, CAUSAL: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Of the keys from `n` on: the first and last query that may see some, and between which all
    see all. What lies beyond the last query or key weighs nothing, or is not stored."""
    start, stop = n * 0, n * 0 + queries
    open_start, open_stop = start, stop
    if position is None:
        if CAUSAL:
            start = tl.maximum(n - offset, 0) // BM * BM
            open_start = (tl.maximum(n + BN - 1 - offset, 0) + BM - 1) // BM * BM
        if window is not None:
            stop = tl.minimum(stop, n + BN - 1 + window - offset)
            open_stop = tl.minimum(stop, tl.maximum(n + window - offset, 0) // BM * BM)
    closed = open_stop <= open_start
    if CLOSED:
        closed = stop == stop
    return start, tl.where(closed, stop, open_start), tl.where(closed, stop, open_stop), stop


@triton.jit
def _met(lows, highs, n, low, high, MASKED: tl.constexpr, BN: tl.constexpr):
    """False where a block of queries sees none of the keys from `n` on, by its ranges."""
    if MASKED and ((low is not None) or (high is not None)):
        return (tl.max(highs) > n) & (tl.min(lows) < n + BN)
    return tl.constexpr(True)


@triton.jit
def _keys_sweep(
    acc_k, acc_v, keys_here, values, n, start, stop, b, h, first_row, q, q_at, position, low,
    low_at, high, high_at, offset, queries, keys, window, scale, softcap, allowed, allowed_at, bias,
    bias_at, slopes, D, DV, top, total, g_out, g_at, constant, g_entropy, g_ahead, g_first,
    g_previous, g_self,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BD: tl.constexpr, BV: tl.constexpr, EVEN: tl.constexpr, EVEN_V: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Add what the queries from `start` to `stop` give to the gradient in a block of keys."""
    unit = _unit(softcap, bias, slopes)
    natural = unit * LN2
    j, row, q_step = n + tl.arange(0, BN), tl.arange(0, BM), b * 0 + q_at[2]
    if g_out is not None:
        g_step = b * 0 + g_at[2]
    for t in range(start, stop, BM):
        wanted = t + row
        i = tl.minimum(wanted, queries - 1)
        lows, highs = (
            _edge(i, low, low_at, b, h, keys, 0),
            _edge(i, high, high_at, b, h, keys, keys),
        )
        if _met(lows, highs, n, low, high, MASKED, BN):
            at = first_row + i
            pos = _position(i, position, offset)
            base = _base(top, at, wanted >= queries, natural)
            rows = _load(q + t * q_step, row, queries - t, q_at, D, BD, EVEN)
            dot = tl.dot(rows, tl.trans(keys_here), input_precision=PRECISION)
            s, bend = _scores(
                dot, i[:, None], pos[:, None], j[None, :], lows[:, None], highs[:, None], b, h,
                keys, window, scale, softcap, allowed, allowed_at, bias, bias_at, slopes, CAUSAL,
                MASKED,
            )  # fmt: skip
            above = s - base[:, None]
            p = _weights(above, total, at, unit)
            change = tl.zeros([BM, BN], tl.float32)
            if g_out is not None:
                g = _load(g_out + t * g_step, row, queries - t, g_at, DV, BV, EVEN_V)
                acc_v = tl.dot(tl.trans(p).to(g.dtype), g, acc_v, input_precision=PRECISION)
                change = tl.dot(g, tl.trans(values), input_precision=PRECISION)
            change = _change(
                p, above * natural, pos, j, at, change, constant, g_entropy, g_ahead, g_first,
                g_previous, g_self,
            )  # fmt: skip
            if softcap is not None:
                change *= 1.0 - bend * bend
            acc_k = tl.dot(tl.trans(change).to(rows.dtype), rows, acc_k, input_precision=PRECISION)
    return acc_k, acc_v


@triton.jit(do_not_specialize=LENGTHS)
def backward_keys(
    q, k, v, q_at, k_at, v_at, position, low, low_at, high, high_at, allowed, allowed_at, bias,
    bias_at, slopes, heads, group, queries, keys, offset, window, scale, softcap, D, DV,
    top, total, g_out, g_at, constant, g_entropy, g_ahead, g_first, g_previous, g_self,
    g_k, gk_at, g_v, gv_at,
    CAUSAL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
    EVEN: tl.constexpr, EVEN_V: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient in a block of keys and their values, from all query heads that read them."""
    CLOSED: tl.constexpr = (
        (position is not None) or (low is not None) or (high is not None) or (allowed is not None)
    )
    blocks = tl.cdiv(keys, BN)
    place = tl.program_id(0)
    bg = place // blocks
    kv_heads = heads // group
    b, kv = (bg // kv_heads).to(tl.int64), (bg % kv_heads).to(tl.int64)
    n = place % blocks * BN
    j = n + tl.arange(0, BN)
    k += b * k_at[0] + kv * k_at[1]
    keys_here = _load(k, j, keys, k_at, D, BD, EVEN)
    values = keys_here
    if g_out is not None:
        v += b * v_at[0] + kv * v_at[1]
        values = _load(v, j, keys, v_at, DV, BV, EVEN_V)
    acc_k = tl.zeros([BN, BD], tl.float32)
    acc_v = tl.zeros([BN, BV], tl.float32)
    start, open_start, open_stop, stop = _meeting(
        n, queries, position, offset, window, CLOSED, CAUSAL, BM, BN
    )
    for member in range(0, group):
        h = kv * group + member
        q_head = q + b * q_at[0] + h * q_at[1]
        first_row = (b * heads + h) * queries
        g_head = g_out
        if g_out is not None:
            g_head = g_out + b * g_at[0] + h * g_at[1]
        if CAUSAL or (window is not None) or CLOSED:
            acc_k, acc_v = _keys_sweep(
                acc_k, acc_v, keys_here, values, n, start, open_start, b, h, first_row, q_head,
                q_at, position, low, low_at, high, high_at, offset, queries, keys, window, scale,
                softcap, allowed, allowed_at, bias, bias_at, slopes, D, DV, top, total, g_head,
                g_at, constant, g_entropy, g_ahead, g_first, g_previous, g_self, CAUSAL, True, BM,
                BN, BD, BV, EVEN, EVEN_V, PRECISION,
            )  # fmt: skip
        if not CLOSED:
            acc_k, acc_v = _keys_sweep(
                acc_k, acc_v, keys_here, values, n, open_start, open_stop, b, h, first_row, q_head,
                q_at, position, low, low_at, high, high_at, offset, queries, keys, window, scale,
                softcap, allowed, allowed_at, bias, bias_at, slopes, D, DV, top, total, g_head,
                g_at, constant, g_entropy, g_ahead, g_first, g_previous, g_self, CAUSAL, False, BM,
                BN, BD, BV, EVEN, EVEN_V, PRECISION,
            )  # fmt: skip
        if window is not None:
            acc_k, acc_v = _keys_sweep(
                acc_k, acc_v, keys_here, values, n, open_stop, stop, b, h, first_row, q_head,
                q_at, position, low, low_at, high, high_at, offset, queries, keys, window, scale,
                softcap, allowed, allowed_at, bias, bias_at, slopes, D, DV, top, total, g_head,
                g_at, constant, g_entropy, g_ahead, g_first, g_previous, g_self, CAUSAL, True, BM,
                BN, BD, BV, EVEN, EVEN_V, PRECISION,
            )  # fmt: skip
    d = tl.arange(0, BD)
    inside = (j < keys)[:, None]
    cells = _cells(g_k + b * gk_at[0] + kv * gk_at[1], j, gk_at, d)
    tl.store(cells, (acc_k * scale).to(g_k.dtype.element_ty), mask=inside & (d < D)[None, :])
    if g_v is not None:
        d = tl.arange(0, BV)
        cells = _cells(g_v + b * gv_at[0] + kv * gv_at[1], j, gv_at, d)
        tl.store(cells, acc_v.to(g_v.dtype.element_ty), mask=inside & (d < DV)[None, :])


@triton.jit
def _columns_sweep(
    found, keys_here, rest, n, start, stop, b, h, first_row, q, q_at, position, low, low_at, high,
    high_at, offset, queries, keys, window, scale, softcap, allowed, allowed_at, bias, bias_at,
    slopes, D, top, total, weight,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BD: tl.constexpr, BE: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the weights that the queries from `start` to `stop` give to a block of keys."""
    unit = _unit(softcap, bias, slopes)
    j, row, q_step = n + tl.arange(0, BN), tl.arange(0, BM), b * 0 + q_at[2]
    for t in range(start, stop, BM):
        wanted = t + row
        i = tl.minimum(wanted, queries - 1)
        lows, highs = (
            _edge(i, low, low_at, b, h, keys, 0),
            _edge(i, high, high_at, b, h, keys, keys),
        )
        if _met(lows, highs, n, low, high, MASKED, BN):
            at = first_row + i
            pos = _position(i, position, offset)
            base = _base(top, at, wanted >= queries, unit * LN2)
            rows, more = _heads(q + t * q_step, row, queries - t, q_at, D, BD, BE, EVEN, True)
            dot = tl.dot(rows, tl.trans(keys_here), input_precision=PRECISION)
            if BE > 0:
                dot = tl.dot(more, tl.trans(rest), dot, input_precision=PRECISION)
            s, _ = _scores(
                dot, i[:, None], pos[:, None], j[None, :], lows[:, None], highs[:, None], b, h,
                keys, window, scale, softcap, allowed, allowed_at, bias, bias_at, slopes, CAUSAL,
                MASKED,
            )  # fmt: skip
            p = _weights(s - base[:, None], total, at, unit)
            if weight is not None:
                p *= tl.load(weight + i)[:, None]
            found += tl.sum(p, 0)
    return found


@triton.jit(do_not_specialize=LENGTHS)
def columns(
    q, k, q_at, k_at, position, low, low_at, high, high_at, allowed, allowed_at, bias, bias_at,
    slopes, heads, group, queries, keys, offset, window, scale, softcap, D,
    top, total, weight, received,
    CAUSAL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr,
    EVEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`Σ_i weight_i p_ij` of a block of keys of one query head."""
    CLOSED: tl.constexpr = (
        (position is not None) or (low is not None) or (high is not None) or (allowed is not None)
    )
    blocks = tl.cdiv(keys, BN)
    place = tl.program_id(0)
    bh = place // blocks
    b, h = (bh // heads).to(tl.int64), (bh % heads).to(tl.int64)
    n = place % blocks * BN
    j = n + tl.arange(0, BN)
    q += b * q_at[0] + h * q_at[1]
    k += b * k_at[0] + (h // group) * k_at[1]
    keys_here, more = _heads(k, j, keys, k_at, D, BD, BE, EVEN, True)
    first_row = bh.to(tl.int64) * queries
    found = tl.zeros([BN], tl.float32)
    start, open_start, open_stop, stop = _meeting(
        n, queries, position, offset, window, CLOSED, CAUSAL, BM, BN
    )
    if CAUSAL or (window is not None) or CLOSED:
        found = _columns_sweep(
            found, keys_here, more, n, start, open_start, b, h, first_row, q, q_at,
            position, low, low_at, high, high_at, offset, queries, keys, window, scale, softcap,
            allowed, allowed_at, bias, bias_at, slopes, D, top, total, weight, CAUSAL, True, BM,
            BN, BD, BE, EVEN, PRECISION,
        )  # fmt: skip
    if not CLOSED:
        found = _columns_sweep(
            found, keys_here, more, n, open_start, open_stop, b, h, first_row, q, q_at, position,
            low, low_at, high, high_at, offset, queries, keys, window, scale, softcap, allowed,
            allowed_at, bias, bias_at, slopes, D, top, total, weight, CAUSAL, False, BM,
            BN, BD, BE, EVEN, PRECISION,
        )  # fmt: skip
    if window is not None:
        found = _columns_sweep(
            found, keys_here, more, n, open_stop, stop, b, h, first_row, q, q_at,
            position, low, low_at, high, high_at, offset, queries, keys, window, scale, softcap,
            allowed, allowed_at, bias, bias_at, slopes, D, top, total, weight, CAUSAL, True, BM,
            BN, BD, BE, EVEN, PRECISION,
        )  # fmt: skip
    tl.store(received + bh.to(tl.int64) * keys + j, found, mask=j < keys)

// Output and all statistics of a row in one pass over the scores. Each score is computed once, in blocks of
// queries (lanes) by keys (rows), with a running maximum (Milakov and Gimelshein 2018; Dao et al. 2022,
// algorithm 1). Besides Σ p, it sums p·(s − max) for the entropy and p·(j − j0) for E[j].
#pragma once

#include "dropout.hpp"
#include "tiles.hpp"

namespace HW_ISA {

// Sums of one block of queries over the keys so far, relative to the running maximum `top`: Σp, Σp(s − top)
// and Σp(j − position). Scores are the results of products and finish_scores, so that the largest is exactly
// `top` and its weight exactly 1, for any size.
struct Running {
  alignas(64) float top[BQ], sum[BQ], scores[BQ], ahead[BQ];
  alignas(64) float factor[BQ];                              // factor of the last change of the maximum
  alignas(64) float first[BQ], previous[BQ], self[BQ];       // scores at these keys

  void clear() {
    for (int i = 0; i < BQ; i++) {
      top[i] = first[i] = previous[i] = self[i] = -INF;
      sum[i] = scores[i] = ahead[i] = 0.f;
    }
  }
};

static HW_INLINE Digits digits_of(const Call &c) { return Digits(c.unit * LOG2_E); }

static HW_INLINE vf base_of(vf top) { return select(top == splat(-INF), vf{}, top); }

// Applies the softmax to N vectors of a block's scores: scores[key][lane] are replaced by weights
// 2^((s − top) · digits) and written to `weights` in the layout of products. Returns true if some top changed.
template <class In, int N, bool ALL>
static HW_INLINE bool soften(const Lanes &lanes, Running &run, const Drops &drops, int v0, int32_t j0, int n,
                             const Digits &digits, bool open, const int8_t *start, const int8_t *stop,
                             float *scores, typename In::element *weights) {
  auto idle = [&](int k, int v) { return !open && (v0 + v < start[k] || v0 + v >= stop[k]); };
  vf best[N];
  for (int v = 0; v < N; v++) best[v] = splat(-INF);
  for (int k = 0; k < n; k++) {
    float *row = scores + (int64_t)k * BQ + v0 * W;
    for (int v = 0; v < N; v++) {
      if (idle(k, v)) continue;
      if (!open)
        store(row + v * W, select(lanes.sees(v0 + v, j0 + k), load<vf>(row + v * W), splat(-INF)));
      best[v] = larger(load<vf>(row + v * W), best[v]);
    }
  }
  vf base[N], sum[N], es[N], ej[N];
  bool changed = false;
  for (int v = 0; v < N; v++) {
    const int at = (v0 + v) * W;
    vf old = load<vf>(run.top + at), top = larger(old, best[v]);
    base[v] = base_of(top);
    vf moved = select(old == splat(-INF), vf{}, larger(digits.least, old - base[v]));
    vf shrink = select(old == splat(-INF), vf{}, weight(old - base[v], digits));
    store(run.top + at, top);
    store(run.factor + at, shrink);
    changed |= any_of(shrink != splat(1.f));
    vf total = load<vf>(run.sum + at);
    if (ALL) {
      store(run.scores + at, shrink * fma(moved, total, load<vf>(run.scores + at)));
      store(run.ahead + at, shrink * load<vf>(run.ahead + at));
    }
    store(run.sum + at, shrink * total);
    sum[v] = es[v] = ej[v] = vf{};
  }
  vf step{};
  for (int k = 0; k < n; k += In::Product::step) {
    vf p[In::Product::step][N];
    for (int i = 0; i < In::Product::step; i++) {
      const float *row = scores + (int64_t)(k + i) * BQ + v0 * W;
      for (int v = 0; v < N; v++) {
        if (k + i >= n || idle(k + i, v)) {
          p[i][v] = vf{};
          continue;
        }
        vf t = load<vf>(row + v * W) - base[v];
        p[i][v] = weight(t, digits);
        sum[v] += p[i][v];
        if (ALL) {
          es[v] = fma(p[i][v], larger(digits.least, t), es[v]);
          ej[v] = fma(p[i][v], step, ej[v]);
        }
        if (drops.any) p[i][v] = drops.keep(p[i][v], j0 + k + i, v0 + v);
      }
      step += 1.f;
    }
    for (int v = 0; v < N; v++) In::keep_over_keys(p[0][v], p[In::Product::step - 1][v], weights, k, v0 + v);
  }
  for (int v = 0; v < N; v++) {
    const int at = (v0 + v) * W;
    store(run.sum + at, load<vf>(run.sum + at) + sum[v]);
    if (ALL) {
      store(run.scores + at, load<vf>(run.scores + at) + es[v]);
      vf start_at = __builtin_convertvector(splat(j0) - load<vi>(lanes.position + at), vf);
      store(run.ahead + at, load<vf>(run.ahead + at) + fma(start_at, sum[v], ej[v]));
    }
  }
  return changed;
}

// Records the scores of each lane at key 0, before its position and at it, if they are in this block.
static inline void note_scores(const Call &c, const Lanes &lanes, Running &run, int32_t j0, int n,
                               const float *scores) {
  for (int v = 0; v < lanes.vectors; v++) {
    const int at = v * W;
    const vi low = load<vi>(lanes.low + at), high = load<vi>(lanes.high + at);
    if (c.first && j0 == 0)
      store(run.first + at, select((low == 0) & (high > 0), load<vf>(scores + at), load<vf>(run.first + at)));
    auto note = [&](float *to, vi j) {
      const vi there = (j >= j0) & (j < j0 + n) & (low <= j) & (j < high);
      if (any_of(there)) store(to + at, gathered(load<vf>(to + at), there, scores + at, (j - j0) * BQ + lanes_of()));
    };
    const vi position = load<vi>(lanes.position + at);
    if (c.self) note(run.self, position);
    if (c.previous) note(run.previous, position - 1);
  }
}

// Computes the results from the sums over all keys and the sinks; `share` is the factor of each output row, which
// compensates for dropout. The lanes' rows of the results are consecutive from row0 on.
template <bool ALL>
static inline void finish_rows(const Call &c, const Running &run, int64_t row0, int n, float *share) {
  const Digits digits = digits_of(c), plain(LOG2_E);
  const vf none = splat(-INF);
  alignas(64) float sinks[BQ] = {};
  for (int i = 0; c.sinks && i < n; i++) sinks[i] = c.sinks[(row0 + i) / c.queries % c.heads];
  for (int v = 0; v * W < n; v++) {
    const int at = v * W, count = (int)least(W, n - at);
    vf sum = load<vf>(run.sum + at), es = load<vf>(run.scores + at) * c.unit, old = load<vf>(run.top + at);
    // A row without weights has no visible key, unless all of its scores have overflowed.
    vi dead = sum == vf{};
    if (any_of(dead))
      for (int i = 0; i < count; i++)
        if (dead[i] && sees_some_key(c, (row0 + at + i) / c.queries / c.heads, (row0 + at + i) / c.queries % c.heads,
                                     (row0 + at + i) % c.queries))
          dead[i] = 0, sum[i] = NAN;
    const vf highest = old * c.unit;
    vf top = select(old == none, vf{}, highest), shrink = splat(1.f);
    if (c.sinks) {
      const vf sink = load<vf>(sinks + at);
      vf lower = top;
      top = larger(sink, top);
      lower -= top;
      shrink = weight(lower, plain);
      vf own = weight(sink - top, plain);
      es = fma(own, larger(plain.least, sink - top), shrink * fma(larger(plain.least, lower), sum, es));
      sum = fma(sum, shrink, own);
    }
    // If the largest score is ±inf, weights are undefined.
    sum = select((top - top == vf{}) | dead, sum, splat(NAN));
    vf logs = log_positive(select(dead, splat(1.f), sum)), inverse = 1.f / select(dead, splat(1.f), sum);
    logs = select(sum == sum, logs, sum);
    vf scale = select(dead, vf{}, shrink * inverse);
    store(share + at, scale * c.inverse);
    auto put = [&](float *to, vf x, float of_dead) {
      x = select(dead, splat(of_dead), x);
      if (to && count == W)
        store(to + row0 + at, x);
      else if (to)
        __builtin_memcpy(to + row0 + at, &x, count * sizeof(float));
    };
    if (ALL) {
      vf entropy = fma(es, -inverse, logs);
      put(c.entropy, select(entropy < vf{}, vf{}, entropy), 0.f);
      put(c.ahead, load<vf>(run.ahead + at) * scale, 0.f);
    }
    auto of_key = [&](const float *score) {
      const vf one = splat(1.f), p = scale * weight(load<vf>(score + at) - base_of(old), digits);
      return select(p > one, one, p); // rounding may exceed 1
    };
    if (c.first) put(c.first, of_key(run.first), 0.f);
    if (c.previous) put(c.previous, of_key(run.previous), 0.f);
    if (c.self) put(c.self, of_key(run.self), 0.f);
    put(c.lse, top + logs, -INF);
    put(c.max, highest, -INF);
    if (any_of(sum != sum)) c.control.found(HW_NO_NUMBER);
  }
}

// ── a block of queries ──────────────────────────────────────────────────────────────────────────

template <class In> struct Workspace {
  typedef typename In::element E;
  static constexpr int ROWS = BQ > In::BK ? BQ : In::BK; // queries or keys
  Lanes &lanes;
  Running &run;
  float *scores, *out, *turned; // with tiles, sums are transposed: [d][lane]
  E *queries, *rows, *values, *weights;
  uint32_t *drops; // of a block, with dropout

  Workspace(headwise::Scratch &s, const Call &c)
      : lanes(*s.take<Lanes>(1)), run(*s.take<Running>(1)), scores(s.take<float>(In::BK * BQ)),
        out(s.take<float>(BQ * padded(c.value_dim))), turned(s.take<float>(In::TILES ? BQ * padded(c.value_dim) : 0)),
        queries(s.take<E>(padded(In::depth(c.dim)) * BQ)),
        rows(s.take<E>(In::across_room(c.dim, ROWS))), values(s.take<E>(values_room(c))),
        weights(s.take<E>(In::block_room(In::BK))), drops(s.take<uint32_t>(Drops::room(c, In::BK))) {}

  static int64_t values_room(const Call &c) {
    if constexpr (In::TILES)
      return In::turned_room(c.value_dim);
    else
      return In::down_room(c.value_dim, In::BK);
  }
  static int64_t bytes(const Call &c) {
    typedef headwise::Scratch S;
    return S::size_of<Lanes>(1) + S::size_of<Running>(1) + S::size_of<float>(In::BK * BQ) +
           (In::TILES ? 2 : 1) * S::size_of<float>(BQ * padded(c.value_dim)) + S::size_of<E>(padded(In::depth(c.dim)) * BQ) +
           S::size_of<E>(In::across_room(c.dim, ROWS)) + S::size_of<E>(values_room(c)) +
           S::size_of<E>(In::block_room(In::BK)) + S::size_of<uint32_t>(Drops::room(c, In::BK));
  }
};

// Multiplies each row of the output by its factor; rows with factor 0 become 0 even if they are not finite.
static inline void rescale(float *out, int64_t wide, const float *factors, int n) {
  for (int i = 0; i < n; i++) {
    float *row = out + i * wide;
    if (factors[i] == 0.f)
      for (int64_t d = 0; d < wide; d += W) store(row + d, vf{});
    else if (factors[i] != 1.f)
      for (int64_t d = 0; d < wide; d += W) store(row + d, load<vf>(row + d) * factors[i]);
  }
}

// The same for a transposed output: [d][lane].
static inline void rescale_turned(float *out, int64_t wide, const float *factors, int vectors) {
  for (int v = 0; v < vectors; v++) {
    const vf factor = load<vf>(factors + v * W);
    if (!any_of(factor != splat(1.f))) continue;
    for (int64_t d = 0; d < wide; d++) {
      float *at = out + d * BQ + v * W;
      store(at, select(factor == vf{}, vf{}, load<vf>(at) * factor));
    }
  }
}

// Writes the output of n rows from their sums, multiplied by the row factors.
static inline void finish_out(const Call &c, float *out, int64_t wide, const float *share, int n) {
  rescale(out, wide, share, n);
  vf all{}; // NaN if any is not finite
  for (int i = 0; i < n; i++)
    for (int64_t d = 0; share[i] == share[i] && d < wide; d += W) all += load<vf>(out + i * wide + d) * 0.f;
  if (any_of(all != all)) c.control.found(HW_OVERFLOW);
}

// Adds weights times values of a block to the output of n lanes, if some values are not finite: key by key,
// because a weight of 0 would not hide them from rows that may not see them.
template <class In>
static void add_seen_values(const Call &c, Workspace<In> &w, int n, int32_t j0, int keys,
                            const typename In::element *weights, Matrix<typename In::element> v) {
  for (int i = 0; i < n; i++)
    for (int j = (int)most(0, w.lanes.low[i] - j0); j < least(keys, w.lanes.high[i] - j0); j++) {
      const float p = In::weight(weights, j, i);
      for (int64_t d = 0; d < c.value_dim; d++) w.out[i * padded(c.value_dim) + d] += p * In::number(v, j, d);
    }
}

// Adds weights times values of a block to the output of n lanes.
template <class In>
static inline void add_values(const Call &c, Workspace<In> &w, int64_t b, int64_t g, int n, int32_t j0, int keys,
                              bool open, const typename In::element *weights) {
  typedef typename In::Product Product;
  constexpr int STEP = Product::step;
  const int64_t wide = padded(c.value_dim);
  const Matrix<typename In::element> v =
      In::down(c, c.v, place(c.v_stride, b, g, j0), c.v_stride[2], keys, c.value_dim, w.values);
  if (!open && !In::finite(v, keys, wide)) return add_seen_values(c, w, n, j0, keys, weights, v);
  for (int i = 0; i < n; i += MR) {
    const int size = (int)least(MR, n - i);
    int32_t from = 0, to = keys;
    if (!open) {
      w.lanes.keys_of(i, i + size, j0, j0 + keys, from, to);
      from = (from - j0) / STEP, to = (to - j0 + STEP - 1) / STEP;
    } else {
      to = (keys + STEP - 1) / STEP;
    }
    if (to > from)
      product<Product, true>(size, (int)(wide / W), weights + (int64_t)from * BQ + i, 1, BQ,
                             v.data + from * v.stride, v.stride, w.out + i * wide, wide, to - from);
  }
}

#if HW_TILES
static inline void add_values(const Call &c, Workspace<InTiles> &w, int64_t b, int64_t g, int n, int32_t j0, int keys,
                              bool open, uint32_t *weights) {
  const int64_t wide = padded(c.value_dim), at = place(c.v_stride, b, g, j0);
  InTiles::clear_keys(weights, keys);
  const bool finite = InTiles::turn_pairs(c.v, at, c.v_stride[2], keys, c.value_dim, w.values);
  if (finite || open)
    InTiles::add((int)wide, w.lanes.vectors, w.values, InTiles::BK / 2, weights, BQ, w.turned, BQ,
                InTiles::pairs_of(keys));
  else // a weight of 0 does not hide them
    for (int i = 0; i < n; i++)
      for (int32_t j = (int32_t)most(j0, w.lanes.low[i]); j < least(j0 + keys, w.lanes.high[i]); j++) {
        const float p = from_bf16((uint16_t)(weights[(j - j0) / 2 * BQ + i] >> ((j - j0) % 2 * 16)));
        const uint16_t *row = (const uint16_t *)c.v + at + (j - j0) * c.v_stride[2];
        for (int64_t d = 0; d < c.value_dim; d++) w.turned[d * BQ + i] += p * from_bf16(row[d]);
      }
}
#endif

// Sums over the keys [first, last) that the lanes may see, into `w.run` and `w.out` (both cleared here).
template <class In, bool ALL>
static void over_keys(const Call &c, int64_t b, int64_t h, int64_t i0, int n, int32_t first, int32_t last,
                      Workspace<In> &w) {
  constexpr int BK = In::BK, GROUP = In::GROUP;
  typename In::element *const weights = In::over_keys(w.scores, w.weights);
  const int64_t g = h / (c.heads / c.kv_heads), wide = c.v ? padded(c.value_dim) : 0;
  const Digits digits = digits_of(c);
  const int depth = (int)In::depth(c.dim);
  headwise::Steps steps(c.control);
  Drops drops(c, b, h, i0, w.drops);
  w.run.clear();
  if (In::TILES)
    __builtin_memset(w.turned, 0, wide * BQ * sizeof(float));
  else
    __builtin_memset(w.out, 0, n * wide * sizeof(float));
  int8_t start[BK], stop[BK];
  for (int32_t j0 = first; j0 < last && !steps.stopped(); j0 += BK) {
    const int keys = (int)least(BK, last - j0);
    const bool open = w.lanes.open(j0, j0 + keys);
    const Matrix<typename In::element> k =
        In::across(c, c.k, place(c.k_stride, b, g, j0), c.k_stride[2], keys, c.dim, w.rows);
    for (int r = 0; r < keys; r += GROUP) {
      const int size = (int)least(GROUP, keys - r);
      int from = 0, to = w.lanes.vectors;
      if (!open) w.lanes.active(j0 + r, j0 + r + size, from, to);
      for (int i = r; i < r + size; i++) start[i] = (int8_t)from, stop[i] = (int8_t)to;
      In::dots(size, to - from, k.data + r * k.stride, k.stride, w.queries + from * W,
               w.scores + (int64_t)r * BQ + from * W, depth);
    }
    if (!c.plain) finish_scores(c, w.lanes, b, h, i0, n, j0, keys, w.scores, nullptr);
    if (c.first || c.previous || c.self) note_scores(c, w.lanes, w.run, j0, keys, w.scores);
    drops.draw(w.lanes, j0, keys, open);
    bool changed = false;
    int at = 0;
    for (; at + NV <= w.lanes.vectors; at += NV)
      changed |= soften<In, NV, ALL>(w.lanes, w.run, drops, at, j0, keys, digits, open, start, stop, w.scores, weights);
    for (; at < w.lanes.vectors; at++)
      changed |= soften<In, 1, ALL>(w.lanes, w.run, drops, at, j0, keys, digits, open, start, stop, w.scores, weights);
    if (!c.v) continue;
    if (changed && j0 > first) {
      if (In::TILES)
        rescale_turned(w.turned, wide, w.run.factor, w.lanes.vectors);
      else
        rescale(w.out, wide, w.run.factor, n);
    }
    add_values(c, w, b, g, n, j0, keys, open, weights);
  }
  if (In::TILES && c.v) turn_back(w.turned, wide, n, w.out);
}

// The same over part `split` of `splits` of the keys that a block of queries may see.
template <class In, bool ALL>
static void pass_over(const Call &c, int64_t b, int64_t h, int64_t i0, int n, int64_t split, int64_t splits,
                      Workspace<In> &w) {
  [[maybe_unused]] const typename In::Session session;
  w.lanes.set(c, b, h, i0, n);
  In::lay(c, c.q, place(c.q_stride, b, h, i0), c.q_stride[2], n, c.dim, w.rows, w.queries);
  if (c.sign != 1.f) In::change_sign(c, w.queries, c.dim);
  const int64_t first = w.lanes.first, all = w.lanes.last - first;
  over_keys<In, ALL>(c, b, h, i0, n, (int32_t)(first + all * split / splits),
                     (int32_t)(first + all * (split + 1) / splits), w);
}

// Adds the sums over other keys, `part` and `more`, to `run` and `out`.
static inline void merge(const Call &c, Running &run, float *out, const Running &part, const float *more, int n,
                         int64_t wide) {
  const Digits digits = digits_of(c);
  alignas(64) float kept[BQ], added[BQ];
  for (int at = 0; at < n; at += W) {
    vf old = load<vf>(run.top + at), other = load<vf>(part.top + at), top = larger(old, other);
    vf none = splat(-INF), base = base_of(top);
    auto joined = [&](const Running &r, vf its, vf &factor, float *room, vf &scores) {
      vf moved = select(its == none, vf{}, larger(digits.least, its - base));
      factor = select(its == none, vf{}, weight(its - base, digits));
      store(room + at, factor);
      scores = factor * fma(moved, load<vf>(r.sum + at), load<vf>(r.scores + at));
    };
    vf first, second, one, two;
    joined(run, old, first, kept, one);
    joined(part, other, second, added, two);
    store(run.top + at, top);
    store(run.scores + at, one + two);
    store(run.sum + at, first * load<vf>(run.sum + at) + second * load<vf>(part.sum + at));
    store(run.ahead + at, first * load<vf>(run.ahead + at) + second * load<vf>(part.ahead + at));
    store(run.first + at, larger(load<vf>(run.first + at), load<vf>(part.first + at)));
    store(run.previous + at, larger(load<vf>(run.previous + at), load<vf>(part.previous + at)));
    store(run.self + at, larger(load<vf>(run.self + at), load<vf>(part.self + at)));
  }
  for (int i = 0; i < n; i++)
    for (int64_t d = i * wide; d < (i + 1) * wide; d += W)
      store(out + d, load<vf>(out + d) * kept[i] + load<vf>(more + d) * added[i]);
}

// Runs tasks whose keys are split into parts, and combines these in order. A body has `tasks`, `splits`, `rows`
// (maximum per task) and the bytes of `room`; sum(task, split, room) returns a Part, finish(task, …) writes.
struct Part {
  Running &run;
  float *out;
};

template <class Body> static int in_parts(const Call &c, const Body &body) {
  typedef headwise::Scratch Scratch;
  const int64_t splits = body.splits, wide = c.v ? padded(c.value_dim) : 0;
  if (splits == 1) {
    auto work = [&](int64_t task, Scratch &room) {
      Part part = body.sum(task, 0, room);
      body.finish(task, part.run, part.out);
    };
    const bool done = headwise::for_each_task(c.control, body.tasks, c.threads, body.bytes, work);
    return done ? HW_OK : HW_NO_MEMORY;
  }
  const int64_t out_bytes = Scratch::size_of<float>(body.rows * wide), bytes = Scratch::size_of<Running>(1) + out_bytes;
  Scratch parts(body.tasks * splits * bytes);
  if (!parts) return HW_NO_MEMORY;
  char *start = parts.take<char>(0);
  auto part_of = [&](int64_t number) {
    return Part{*(Running *)(start + number * bytes), (float *)(start + (number + 1) * bytes - out_bytes)};
  };
  auto work = [&](int64_t number, Scratch &room) {
    Part part = body.sum(number / splits, number % splits, room), kept = part_of(number);
    kept.run = part.run;
    __builtin_memcpy(kept.out, part.out, out_bytes);
  };
  auto join = [&](int64_t task, Scratch &) {
    Part all = part_of(task * splits);
    for (int64_t split = 1; split < splits; split++) {
      Part more = part_of(task * splits + split);
      merge(c, all.run, all.out, more.run, more.out, (int)body.rows, wide);
    }
    body.finish(task, all.run, all.out);
  };
  const bool done = headwise::for_each_task(c.control, body.tasks * splits, c.threads, body.bytes, work) &&
                    headwise::for_each_task(c.control, body.tasks, c.threads, 64, join);
  return done ? HW_OK : HW_NO_MEMORY;
}

constexpr int64_t TASKS = 64, SPLIT = 1024; // fewer tasks than TASKS are split into parts of at least SPLIT keys

template <class In, bool ALL> struct Forward {
  const Call &c;
  const int64_t blocks, wide, rows, tasks, splits, bytes;

  explicit Forward(const Call &call)
      : c(call), blocks((c.queries + BQ - 1) / BQ), wide(c.v ? padded(c.value_dim) : 0),
        rows(least(BQ, c.queries)), tasks(c.batch * c.heads * blocks),
        splits(most(1, least(TASKS / tasks, c.keys / SPLIT))), bytes(Workspace<In>::bytes(c)) {}

  // A block of queries of a head; the long blocks of a causal head come first.
  struct Place {
    int64_t b, h, i0;
    int n;
  };
  Place place_of(int64_t task) const {
    const int64_t i0 = (blocks - 1 - task % blocks) * BQ, head = task / blocks;
    return {head / c.heads, head % c.heads, i0, (int)least(BQ, c.queries - i0)};
  }

  Part sum(int64_t task, int64_t split, headwise::Scratch &room) const {
    const Place p = place_of(task);
    Workspace<In> w(room, c);
    pass_over<In, ALL>(c, p.b, p.h, p.i0, p.n, split, splits, w);
    return {w.run, w.out};
  }

  void finish(int64_t task, const Running &run, float *out) const {
    const Place p = place_of(task);
    alignas(64) float share[BQ];
    finish_rows<ALL>(c, run, (p.b * c.heads + p.h) * c.queries + p.i0, p.n, share);
    if (!c.v) return;
    finish_out(c, out, wide, share, p.n);
    for (int i = 0; i < p.n; i++)
      write_row(c, out + i * wide, c.value_dim, c.out, place(c.out_stride, p.b, p.h, p.i0 + i));
  }
};

template <class In> static int forward_in(const Call &c) {
  if (c.entropy || c.ahead) return in_parts(c, Forward<In, true>(c));
  return in_parts(c, Forward<In, false>(c));
}

} // namespace HW_ISA

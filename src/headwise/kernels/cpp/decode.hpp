// Few queries on many keys, as in decoding, where the time is that of reading keys and values once. All
// queries that share a key/value head (T of each head of the group) process a key together. A score is a
// dot product along the features, which are in lanes; W scores are reduced together.
#pragma once

#include "forward.hpp"

namespace HW_ISA {

template <class Product, bool ALL> struct Decode {
  typedef typename Product::right number; // the element type of keys and values
  static constexpr int ROWS = 8;      // maximum number of queries per key
  static constexpr int KEYS = 64;     // per block
  static constexpr int AHEAD = 16;    // keys that are prefetched
  static constexpr int KV = KEYS / W; // vectors of a block's scores

  const Call &c;
  const int64_t group, wide, value_wide, rows, tasks, splits, bytes;

  static bool serves(const Call &c) {
    return c.heads / c.kv_heads * c.queries <= ROWS && c.dim % W == 0 && (!c.v || c.value_dim % W == 0);
  }

  explicit Decode(const Call &call)
      : c(call), group(c.heads / c.kv_heads), wide(padded(c.dim)), value_wide(c.v ? padded(c.value_dim) : 0),
        rows(group * c.queries), tasks(c.batch * c.kv_heads),
        splits(most(1, least(TASKS / tasks, c.keys / SPLIT))),
        bytes(headwise::Scratch::size_of<Room>(1) + headwise::Scratch::size_of<float>(rows * wide) +
              headwise::Scratch::size_of<float>(rows * value_wide)) {}

  struct Room {
    Running run;
    alignas(64) float scores[ROWS * KEYS];
    vf sum[ROWS], entropy[ROWS], ahead[ROWS];
    float top[ROWS];
    int32_t low[ROWS], high[ROWS], position[ROWS];
  };

  HW_INLINE int64_t head_of(int64_t g, int64_t row) const { return g * group + row / c.queries; }
  HW_INLINE int64_t query_of(int64_t row) const { return row % c.queries; }

  // scores[row][key] for R rows and n keys, n up to KEYS; keys beyond n repeat the last.
  template <int R>
  HW_INLINE void dots(const float *q, const number *k, int64_t stride, int n, float *scores) const {
    for (int j0 = 0; j0 < n; j0 += W) {
      vf part[R][W];
      for (int j = 0; j < W; j++) {
        const number *key = k + least(j0 + j, n - 1) * stride;
        for (int64_t d = 0; d < wide; d += 64 / (int64_t)sizeof(number)) __builtin_prefetch(key + AHEAD * stride + d);
        vf sum[R] = {};
        for (int64_t d = 0; d < wide; d += W) {
          vf x = Product::lanes(key + d);
          for (int r = 0; r < R; r++) sum[r] = fma(load<vf>(q + r * wide + d), x, sum[r]);
        }
        for (int r = 0; r < R; r++) part[r][j] = sum[r];
      }
      for (int r = 0; r < R; r++) store(scores + r * KEYS + j0, sums_of(part[r]));
    }
  }

  // Replaces one row's scores of a block by weights; returns the factor for the row's previous sums.
  HW_INLINE float soften(Room &w, int64_t b, int64_t g, int row, int32_t j0, int n, const Digits &digits) const {
    float *scores = w.scores + row * KEYS;
    const int64_t h = head_of(g, row), i = query_of(row);
    if (!c.plain) finish_row(c, c.scale, b, h, i, j0, n, scores);
    const int32_t low = w.low[row], high = w.high[row];
    const bool open = low <= j0 && j0 + KEYS <= high && n == KEYS;
    const vi lane = lanes_of();
    vf best = splat(-INF);
    for (int v = 0; v < KV; v++) {
      if (!open) {
        vi j = lane + (j0 + v * W);
        vi seen = (j >= splat(low)) & (j < splat((int32_t)least(high, j0 + n)));
        store(scores + v * W, select(seen, load<vf>(scores + v * W), splat(-INF)));
      }
      best = larger(load<vf>(scores + v * W), best);
    }
    auto note = [&](float *to, int64_t j) {
      if (j >= j0 && j < j0 + n && low <= j && j < high) to[row] = scores[j - j0];
    };
    if (c.first) note(w.run.first, 0);
    if (c.previous) note(w.run.previous, w.position[row] - 1);
    if (c.self) note(w.run.self, w.position[row]);
    const float old = w.top[row], found = largest_of(best), top = found > old ? found : old;
    const float base = top == -INF ? 0.f : top, moved = old == -INF ? 0.f : old - base;
    float shrink = 1.f;
    if (old == -INF)
      shrink = 0.f;
    else if (moved != 0.f)
      shrink = weight(splat(moved), digits)[0];
    w.top[row] = top;
    vf sum = w.sum[row] * shrink, es = shrink * fma(larger(digits.least, splat(moved)), w.sum[row], w.entropy[row]);
    vf ej = w.ahead[row] * shrink;
    vf away = __builtin_convertvector(lane + (j0 - w.position[row]), vf);
    for (int v = 0; v < KV; v++) {
      vf t = load<vf>(scores + v * W) - base;
      vf p = weight(t, digits);
      sum += p;
      if (ALL) {
        es = fma(p, larger(digits.least, t), es);
        ej = fma(p, away, ej);
        away += (float)W;
      }
      store(scores + v * W, p);
    }
    w.sum[row] = sum;
    if (ALL) w.entropy[row] = es, w.ahead[row] = ej;
    return shrink;
  }

  Part sum(int64_t task, int64_t split, headwise::Scratch &scratch) const {
    const int64_t b = task / c.kv_heads, g = task % c.kv_heads;
    Room &w = *scratch.take<Room>(1);
    float *queries = scratch.take<float>(rows * wide), *out = scratch.take<float>(rows * value_wide);
    const Digits digits = digits_of(c);
    headwise::Steps steps(c.control);
    w.run.clear();
    __builtin_memset(out, 0, rows * value_wide * sizeof(float));
    int64_t first = c.keys, last = 0;
    for (int r = 0; r < rows; r++) {
      const int64_t h = head_of(g, r), i = query_of(r);
      int64_t low, high;
      range_of(c, b, h, i, low, high);
      if (low < high) first = least(first, low), last = most(last, high);
      w.low[r] = (int32_t)low, w.high[r] = (int32_t)high, w.position[r] = (int32_t)position_of(c, i);
      w.sum[r] = w.entropy[r] = w.ahead[r] = vf{}, w.top[r] = -INF;
      read_row(c, c.q, place(c.q_stride, b, h, i), c.dim, wide, queries + r * wide);
      if (c.sign != 1.f)
        for (int64_t d = 0; d < wide; d++) queries[r * wide + d] *= c.sign;
    }
    const int64_t all = most(0, last - first);
    const int32_t from = (int32_t)(first + all * split / splits), to = (int32_t)(first + all * (split + 1) / splits);
    for (int32_t j0 = from; j0 < to && !steps.stopped(); j0 += KEYS) {
      const int n = (int)least(KEYS, to - j0);
      const number *k = (const number *)c.k + place(c.k_stride, b, g, j0);
      int r = 0;
      for (; r + 4 <= rows; r += 4) dots<4>(queries + r * wide, k, c.k_stride[2], n, w.scores + r * KEYS);
      for (; r + 2 <= rows; r += 2) dots<2>(queries + r * wide, k, c.k_stride[2], n, w.scores + r * KEYS);
      for (; r < rows; r++) dots<1>(queries + r * wide, k, c.k_stride[2], n, w.scores + r * KEYS);
      const number *v = c.v ? (const number *)c.v + place(c.v_stride, b, g, j0) : nullptr;
      for (r = 0; r < rows; r++) {
        const float shrink = soften(w, b, g, r, j0, n, digits);
        if (shrink != 1.f && v)
          for (int64_t d = 0; d < value_wide; d += W)
            store(out + r * value_wide + d, load<vf>(out + r * value_wide + d) * shrink);
      }
      for (r = 0; v && r < rows; r += MR)
        product<Product, true>((int)least(MR, rows - r), (int)(value_wide / W), w.scores + r * KEYS, KEYS, 1, v,
                               c.v_stride[2], out + r * value_wide, value_wide, n);
    }
    for (int r = 0; r < rows; r++) {
      w.run.top[r] = w.top[r];
      w.run.sum[r] = sum_of(w.sum[r]);
      w.run.scores[r] = sum_of(w.entropy[r]);
      w.run.ahead[r] = sum_of(w.ahead[r]);
    }
    return {w.run, out};
  }

  void finish(int64_t task, const Running &run, float *out) const {
    const int64_t b = task / c.kv_heads, g = task % c.kv_heads;
    alignas(64) float share[BQ];
    finish_rows<ALL>(c, run, (b * c.heads + g * group) * c.queries, (int)rows, share);
    if (!c.v) return;
    finish_out(c, out, value_wide, share, (int)rows);
    for (int64_t r = 0; r < rows; r++)
      write_row(c, out + r * value_wide, c.value_dim, c.out, place(c.out_stride, b, head_of(g, r), query_of(r)));
  }
};

template <class Product> static int decode_by(const Call &c) {
  if (c.entropy || c.ahead) return in_parts(c, Decode<Product, true>(c));
  return in_parts(c, Decode<Product, false>(c));
}

} // namespace HW_ISA

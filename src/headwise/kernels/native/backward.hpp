// Gradients of the output and of every differentiable statistic, in one pass of five products:
// dS = P ∘ (dP + a·log p + b·(j − i) + point terms − D), where a and b carry the gradients of entropy
// and E[j − i], point terms those of single weights, and D everything that is the same along a row.
// Each task sums dK and dV of some keys of its own; dQ is summed per split of the keys, in order.
#pragma once

#include "forward.hpp"

namespace HW_ISA {

struct Backward {
  static constexpr int BK = 48;           // keys to a block
  static constexpr int64_t CHUNK = 2048;  // keys whose gradients are summed side by side
  static constexpr int64_t TASKS = 32;    // heads are split over keys to come to so many

  const Call &c;
  const int64_t group, wide, value_wide, chunks, splits;
  const float scale; // with its sign
  const bool values, stats;
  float *partial = nullptr; // [splits, B, H, T, wide]: sums of dQ, where one task has not all keys

  explicit Backward(const Call &call)
      : c(call), group(c.heads / c.kv_heads), wide(padded(c.dim)), value_wide(padded(c.value_dim)),
        chunks((c.keys + CHUNK - 1) / CHUNK),
        splits(most(1, least(chunks, TASKS / (c.batch * c.kv_heads)))), scale(c.sign * c.scale),
        values(c.v && c.grad_out),
        stats(c.grad_entropy || c.grad_ahead || c.grad_first || c.grad_previous || c.grad_self) {}

  // Per query of a block: what dS needs to know.
  struct Coefficients {
    alignas(64) float lse[BQ], row[BQ], entropy[BQ], ahead[BQ], first[BQ], previous[BQ], self[BQ];
  };

  struct Room {
    Lanes &lanes;
    Coefficients &co;
    float *scores, *slopes, *capped, *queries, *grads, *query_rows, *grad_rows, *out_rows, *key_rows, *value_rows,
        *dq, *dk, *dv;

    Room(headwise::Scratch &s, const Backward &w)
        : lanes(*s.take<Lanes>(1)), co(*s.take<Coefficients>(1)), scores(s.take<float>(BK * BQ)),
          slopes(s.take<float>(BK * BQ)), capped(s.take<float>(BK * BQ)), queries(s.take<float>(w.wide * BQ)),
          grads(s.take<float>(w.value_wide * BQ)), query_rows(s.take<float>(BQ * w.wide)),
          grad_rows(s.take<float>(BQ * w.value_wide)), out_rows(s.take<float>(BQ * w.value_wide)),
          key_rows(s.take<float>(BK * w.wide)), value_rows(s.take<float>(BK * w.value_wide)),
          dq(s.take<float>(BQ * w.wide)), dk(s.take<float>(w.chunk_size() * w.wide)),
          dv(s.take<float>(w.chunk_size() * w.value_wide)) {}
  };

  int64_t chunk_size() const { return least(CHUNK, c.keys); }

  int64_t bytes() const {
    typedef headwise::Scratch S;
    return S::size_of<Lanes>(1) + S::size_of<Coefficients>(1) + 3 * S::size_of<float>(BK * BQ) +
           3 * S::size_of<float>(BQ * wide) + 3 * S::size_of<float>(BQ * value_wide) + S::size_of<float>(BK * wide) +
           S::size_of<float>(BK * value_wide) + S::size_of<float>(chunk_size() * wide) +
           S::size_of<float>(chunk_size() * value_wide);
  }

  Rows gradients(Room &w, int64_t b, int64_t h, int64_t i0, int n) const {
    if (!values) return {};
    return rows_at(c, c.grad_out, place(c.grad_out_stride, b, h, i0), c.grad_out_stride[2], n, c.value_dim,
                   value_wide, w.grad_rows);
  }

  // D, and the factors of what varies along a row, zeros in lanes beyond n; the task that has key 0 also
  // sees to the sinks.
  void coefficients(Room &w, int64_t b, int64_t h, int64_t i0, int n, const Rows &grad, bool sinks) const {
    Coefficients &co = w.co;
    __builtin_memset(&co, 0, sizeof co);
    const int64_t row0 = (b * c.heads + h) * c.queries + i0;
    Rows out{};
    if (values)
      out = rows_at(c, c.out, place(c.out_stride, b, h, i0), c.out_stride[2], n, c.value_dim, value_wide, w.out_rows);
    for (int i = 0; i < n; i++) {
      const int64_t at = row0 + i;
      const bool dead = c.lse[at] == -INF;
      co.lse[i] = dead ? 0.f : c.lse[at] * LOG2_E;
      if (dead) continue;
      float all = 0.f;
      if (values) {
        vf sum{};
        for (int64_t d = 0; d < value_wide; d += W)
          sum = fma(load<vf>(grad.data + i * grad.stride + d), load<vf>(out.data + i * out.stride + d), sum);
        all = sum_of(sum);
      }
      auto mean = [&](const float *gradient, const float *value, float *to, float factor) {
        if (!gradient) return;
        to[i] = factor * gradient[at];
        all += gradient[at] * value[at];
      };
      if (c.grad_lse) all -= c.grad_lse[at];
      mean(c.grad_entropy, c.entropy, co.entropy, -LN_2);
      mean(c.grad_ahead, c.ahead, co.ahead, 1.f);
      mean(c.grad_first, c.first, co.first, 1.f);
      mean(c.grad_previous, c.previous, co.previous, 1.f);
      mean(c.grad_self, c.self, co.self, 1.f);
      co.row[i] = all;
      if (sinks) {
        float digits = c.sinks[h] * LOG2_E - co.lse[i], p = digits < LEAST ? 0.f : std::exp2(digits);
        c.grad_sinks[at] = p * (co.entropy[i] * (digits < LEAST ? LEAST : digits) - all);
      }
    }
    if (sinks)
      for (int i = 0; i < n; i++)
        if (c.lse[row0 + i] == -INF) c.grad_sinks[row0 + i] = 0.f;
  }

  // scores[key][lane] become weights, slopes (dP on entry) become dS · scale, for one key.
  template <bool STATS>
  HW_INLINE void one_key(Room &w, int32_t key, int k, int from, int to, bool open, float digits) const {
    const Coefficients &co = w.co;
    for (int v = from; v < to; v++) {
      const int at = v * W;
      const int64_t place = (int64_t)k * BQ + at;
      vf t = fma(load<vf>(w.scores + place), splat(digits), -load<vf>(co.lse + at));
      if (!open) t = select(w.lanes.sees(v, key), t, splat(-INF));
      vf p = weight(t);
      vf ds = -load<vf>(co.row + at);
      if (values) ds += load<vf>(w.slopes + place);
      if (STATS) {
        ds = fma(load<vf>(co.entropy + at), larger(splat(LEAST), t), ds);
        vi ahead = splat(key) - load<vi>(w.lanes.position + at);
        ds = fma(load<vf>(co.ahead + at), __builtin_convertvector(ahead, vf), ds);
        if (key == 0) ds += load<vf>(co.first + at);
        ds += select(ahead == 0, load<vf>(co.self + at), vf{});
        ds += select(ahead == -1, load<vf>(co.previous + at), vf{});
      }
      ds *= p;
      if (c.softcap != 0) {
        vf share = load<vf>(w.capped + place) * (1.f / c.softcap);
        ds *= 1.f - share * share;
      }
      store(w.scores + place, p);
      store(w.slopes + place, ds * scale);
    }
  }

  // One block of queries of one head against the keys [c0, c1): adds to w.dk, w.dv and w.dq.
  void block(Room &w, int64_t b, int64_t h, int64_t i0, int n, int32_t c0, int32_t c1) const {
    const int64_t g = h / group;
    const bool plain = plain_scores(c);
    const float digits = digits_of(c);
    Rows q = rows_at(c, c.q, place(c.q_stride, b, h, i0), c.q_stride[2], n, c.dim, wide, w.query_rows);
    lay(q.data, q.stride, n, wide, w.queries);
    if (c.sign != 1.f)
      for (int64_t i = 0; i < wide * BQ; i++) w.queries[i] *= c.sign;
    const Rows grad = gradients(w, b, h, i0, n);
    if (values) lay(grad.data, grad.stride, n, value_wide, w.grads);
    coefficients(w, b, h, i0, n, grad, c.grad_sinks && c0 == 0);
    const int32_t first = (int32_t)most(c0, w.lanes.first), last = (int32_t)least(c1, w.lanes.last);
    int starts[BK / MR + 1], stops[BK / MR + 1];
    for (int32_t j0 = first; j0 < last; j0 += BK) {
      const int keys = (int)least(BK, last - j0);
      const bool open = w.lanes.open(j0, j0 + keys);
      Rows k = rows_at(c, c.k, place(c.k_stride, b, g, j0), c.k_stride[2], keys, c.dim, wide, w.key_rows);
      Rows v{};
      if (values)
        v = rows_at(c, c.v, place(c.v_stride, b, g, j0), c.v_stride[2], keys, c.value_dim, value_wide, w.value_rows);
      for (int r = 0; r < keys; r += MR) {
        const int size = (int)least(MR, keys - r);
        int from = 0, to = w.lanes.vectors;
        if (!open) w.lanes.active(j0 + r, j0 + r + size, from, to);
        starts[r / MR] = from, stops[r / MR] = to;
        const int64_t at = (int64_t)r * BQ + from * W;
        product<Float, false>(size, to - from, k.data + r * k.stride, k.stride, 1, w.queries + from * W, BQ,
                              w.scores + at, BQ, (int)c.dim);
        if (values)
          product<Float, false>(size, to - from, v.data + r * v.stride, v.stride, 1, w.grads + from * W, BQ,
                                w.slopes + at, BQ, (int)c.value_dim);
      }
      if (!plain) finish_scores(c, w.lanes, b, h, i0, n, j0, keys, w.scores, c.softcap != 0 ? w.capped : nullptr);
      for (int r = 0; r < keys; r++) {
        const int from = starts[r / MR], to = stops[r / MR];
        if (stats)
          one_key<true>(w, j0 + r, r, from, to, open, digits);
        else
          one_key<false>(w, j0 + r, r, from, to, open, digits);
      }
      for (int r = 0; r < keys; r += MR) {
        const int size = (int)least(MR, keys - r);
        const int from = starts[r / MR] * W, to = (int)least(n, stops[r / MR] * W);
        const int64_t at = (int64_t)r * BQ + from, key = j0 + r - c0;
        if (to <= from) continue;
        if (values && c.grad_v)
          product<Float, true>(size, (int)(value_wide / W), w.scores + at, BQ, 1, grad.data + from * grad.stride,
                               grad.stride, w.dv + key * value_wide, value_wide, to - from);
        if (c.grad_k)
          product<Float, true>(size, (int)(wide / W), w.slopes + at, BQ, 1, q.data + from * q.stride, q.stride,
                               w.dk + key * wide, wide, to - from);
      }
      if (!c.grad_q) continue;
      // Keys that nobody in a vector may see were left out above: there, dS is 0.
      for (int r = 0; r < keys; r++)
        for (int v = 0; v < w.lanes.vectors; v++)
          if (v < starts[r / MR] || v >= stops[r / MR]) store(w.slopes + (int64_t)r * BQ + v * W, vf{});
      for (int i = 0; i < n; i += MR) {
        const int size = (int)least(MR, n - i);
        int32_t from = j0, to = j0 + keys;
        if (!open) w.lanes.keys_of(i, i + size, j0, j0 + keys, from, to);
        if (to > from)
          product<Float, true>(size, (int)(wide / W), w.slopes + (int64_t)(from - j0) * BQ + i, 1, BQ,
                               k.data + (from - j0) * k.stride, k.stride, w.dq + i * wide, wide, to - from);
      }
    }
  }

  // The chunks split, split + splits, … of one key/value head.
  void task(int64_t number, headwise::Scratch &scratch) const {
    const int64_t split = number % splits, b = number / splits / c.kv_heads, g = number / splits % c.kv_heads;
    Room w(scratch, *this);
    for (int64_t chunk = split; chunk < chunks; chunk += splits) {
      const int64_t c0 = chunk * CHUNK, c1 = least(c0 + CHUNK, c.keys);
      __builtin_memset(w.dk, 0, (c1 - c0) * wide * sizeof(float));
      __builtin_memset(w.dv, 0, (c1 - c0) * value_wide * sizeof(float));
      for (int64_t h = g * group; h < (g + 1) * group; h++)
        for (int64_t i0 = 0; i0 < c.queries; i0 += BQ) {
          const int n = (int)least(BQ, c.queries - i0);
          w.lanes.set(c, b, h, i0, n);
          __builtin_memset(w.dq, 0, n * wide * sizeof(float));
          const bool meets = w.lanes.first < c1 && c0 < w.lanes.last;
          if (meets)
            block(w, b, h, i0, n, (int32_t)c0, (int32_t)c1);
          else if (chunk == 0 && c.grad_sinks)
            coefficients(w, b, h, i0, n, gradients(w, b, h, i0, n), true);
          if (!c.grad_q) continue;
          if (!partial) {
            for (int i = 0; i < n; i++)
              write_row(c, w.dq + i * wide, c.dim, c.grad_q, place(c.grad_q_stride, b, h, i0 + i));
          } else if (meets) {
            float *sum = partial + (((split * c.batch + b) * c.heads + h) * c.queries + i0) * wide;
            for (int64_t d = 0; d < n * wide; d += W) store(sum + d, load<vf>(sum + d) + load<vf>(w.dq + d));
          }
        }
      for (int64_t j = c0; j < c1; j++) {
        if (c.grad_k) write_row(c, w.dk + (j - c0) * wide, c.dim, c.grad_k, place(c.grad_k_stride, b, g, j));
        if (c.grad_v)
          write_row(c, w.dv + (j - c0) * value_wide, c.value_dim, c.grad_v, place(c.grad_v_stride, b, g, j));
      }
    }
  }

  int run() {
    const int64_t rows = c.batch * c.heads * c.queries;
    if (c.grad_q && chunks > 1) {
      partial = (float *)std::calloc((size_t)(splits * rows * wide), sizeof(float));
      if (!partial) return HW_NO_MEMORY;
    }
    auto work = [&](int64_t number, headwise::Scratch &room) { task(number, room); };
    bool done = headwise::for_each_task(c.batch * c.kv_heads * splits, c.threads, bytes(), work);
    if (done && partial) {
      auto join = [&](int64_t number, headwise::Scratch &room) {
        float *sum = room.take<float>(wide);
        for (int64_t row = number * BQ; row < least((number + 1) * BQ, rows); row++) {
          __builtin_memcpy(sum, partial + row * wide, wide * sizeof(float));
          for (int64_t split = 1; split < splits; split++)
            for (int64_t d = 0; d < wide; d += W)
              store(sum + d, load<vf>(sum + d) + load<vf>(partial + (split * rows + row) * wide + d));
          const int64_t head = row / c.queries;
          write_row(c, sum, c.dim, c.grad_q,
                    place(c.grad_q_stride, head / c.heads, head % c.heads, row % c.queries));
        }
      };
      done = headwise::for_each_task((rows + BQ - 1) / BQ, c.threads, headwise::Scratch::size_of<float>(wide), join);
    }
    std::free(partial);
    return done ? HW_OK : HW_NO_MEMORY;
  }
};

static int backward(const hw_call &call) {
  const Call c(call);
  return Backward(c).run();
}

} // namespace HW_ISA

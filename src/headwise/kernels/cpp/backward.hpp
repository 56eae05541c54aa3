// Gradients of the output and of every differentiable statistic, in one pass of five products:
// dS = P ∘ (dP + a·log p + b·(j − i) + point terms − D), where a and b carry the gradients of entropy
// and E[j − i], the point terms those of single weights, and D all terms that are constant along a row.
// Each task sums dK and dV of its own keys; dQ is summed per split of the keys, in order.
#pragma once

#include "dropout.hpp"
#include "norms.hpp"

#include <type_traits>

namespace HW_ISA {

template <class In> struct Backward {
  typedef typename In::element E;
  typedef typename In::Product Product;
  static constexpr int STEP = Product::step;
  static constexpr int GROUP = In::GROUP; // keys per product
  static_assert(GROUP % STEP == 0, "the keys of a pair are in one product");
  static constexpr int BK = In::BK;       // keys per block
  static constexpr int64_t CHUNK = 2048;  // keys whose gradients are accumulated together
  static constexpr int64_t TASKS = 32;    // minimum number of tasks; heads are split over keys to reach it

  const Call &c;
  const int64_t group, wide, value_wide, chunks, splits;
  const float scale; // with its sign
  const bool values, stats;
  Norms<In> norms;
  float *partial = nullptr; // [splits, B, H, T, wide]: partial sums of dQ, if the keys of a head are split

  explicit Backward(const Call &call)
      : c(call), group(c.heads / c.kv_heads), wide(padded(c.dim)), value_wide(padded(c.value_dim)),
        chunks((c.keys + CHUNK - 1) / CHUNK),
        splits(most(1, least(chunks, TASKS / (c.batch * c.kv_heads)))), scale(c.sign * c.scale),
        values(c.v && c.grad_out),
        stats(c.grad_entropy || c.grad_ahead || c.grad_first || c.grad_previous || c.grad_self), norms(c) {}

  // Factors of dS for each query of a block.
  struct Coefficients {
    alignas(64) float top[BQ], rest[BQ], row[BQ], entropy[BQ], ahead[BQ], first[BQ], previous[BQ], self[BQ];
    bool raised; // true if some top is not 0
  };

  // Blocks are [key][lane]; queries and grads are transposed, query_rows and grad_rows are not.
  struct Room {
    headwise::Steps steps;
    Lanes *lanes;
    Coefficients *co;
    float *scores, *slopes, *capped, *out_grads, *out, *dq, *dk, *dv;
    float *turned; // dQ, with tiles: [d][lane]
    E *queries, *grads, *query_rows, *grad_rows, *keys, *key_rows, *values, *rows;
    E *weights, *over_lanes, *over_keys; // P, and dS twice
    uint32_t *drops; // of a block, with dropout

    explicit Room(headwise::Control &control) : steps(control) {}

    // Allocates from `s`, or counts the bytes if `s` is NULL.
    int64_t take(headwise::Scratch *s, const Backward &w) {
      int64_t bytes = 0;
      auto piece = [&](auto *&at, int64_t count) {
        typedef std::remove_reference_t<decltype(*at)> T;
        bytes += headwise::Scratch::size_of<T>(count);
        if (s) at = s->take<T>(count);
      };
      const int64_t dim = w.c.dim, value_dim = w.values ? w.c.value_dim : 0;
      piece(lanes, 1), piece(co, 1);
      piece(scores, BK * BQ), piece(slopes, BK * BQ), piece(capped, w.c.softcap != 0 ? BK * BQ : 0);
      piece(queries, padded(In::depth(dim)) * BQ), piece(grads, padded(In::depth(value_dim)) * BQ);
      piece(query_rows, In::down_room(dim, BQ)), piece(grad_rows, In::down_room(value_dim, BQ));
      piece(keys, In::across_room(dim, BK)), piece(key_rows, w.keys_room());
      piece(values, In::across_room(value_dim, BK));
      piece(weights, In::block_room(BK)), piece(over_lanes, In::block_room(BK)), piece(over_keys, In::block_room(BK));
      piece(rows, In::across_room(most(dim, value_dim), BQ)), piece(drops, Drops::room(w.c, BK));
      piece(out_grads, BQ * padded(value_dim)), piece(out, BQ * padded(value_dim));
      piece(dq, BQ * w.wide), piece(turned, In::TILES ? BQ * w.wide : 0);
      piece(dk, w.chunk_room() * w.wide), piece(dv, w.chunk_room() * w.value_wide);
      return bytes;
    }
  };

  // Keys of a chunk; tiles add zeros to some rows after the last.
  int64_t chunk_room() const { return least(CHUNK, c.keys) + (In::TILES ? GROUP : 0); }
  int64_t keys_room() const {
    if constexpr (In::TILES)
      return In::turned_room(c.dim);
    else
      return In::down_room(c.dim, BK);
  }

  // D, and the factors of the terms that vary along a row, zeros in lanes beyond n. The task with key 0
  // also computes the gradients of the sinks.
  void coefficients(Room &w, int64_t b, int64_t h, int64_t i0, int n, bool sinks) const {
    Coefficients &co = *w.co;
    __builtin_memset(&co, 0, sizeof co);
    for (int i = n; i < BQ; i++) co.rest[i] = INF; // no weight, for any score of the last query
    const int64_t row0 = (b * c.heads + h) * c.queries + i0;
    Rows out{}, grad{};
    if (values) {
      out = rows_at(c, c.out, place(c.out_stride, b, h, i0), c.out_stride[2], n, c.value_dim, value_wide, w.out);
      grad = rows_at(c, c.grad_out, place(c.grad_out_stride, b, h, i0), c.grad_out_stride[2], n, c.value_dim,
                     value_wide, w.out_grads);
    }
    for (int i = 0; i < n; i++) {
      const int64_t at = row0 + i;
      if (c.lse[at] == -INF) continue; // no visible key
      co.top[i] = norms.top(at), co.rest[i] = norms.rest(at);
      co.raised |= co.top[i] != 0.f;
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
      mean(c.grad_entropy, c.entropy, co.entropy, -c.unit);
      mean(c.grad_ahead, c.ahead, co.ahead, 1.f);
      mean(c.grad_first, c.first, co.first, 1.f);
      mean(c.grad_previous, c.previous, co.previous, 1.f);
      mean(c.grad_self, c.self, co.self, 1.f);
      co.row[i] = all;
      if (sinks) {
        const float log_p = norms.of_sink(c.sinks[h], at), p = std::exp(log_p);
        c.grad_sinks[at] = p == 0.f ? 0.f : p * ((c.grad_entropy ? -c.grad_entropy[at] * log_p : 0.f) - all);
      }
    }
    if (sinks)
      for (int i = 0; i < n; i++)
        if (c.lse[row0 + i] == -INF) c.grad_sinks[row0 + i] = 0.f;
  }

  // For keys k … k + STEP − 1 of the n in a block, replaces scores by weights and slopes (dP on entry) by
  // dS · scale, in the layout of products.
  template <bool STATS>
  HW_INLINE void soften(Room &w, const Drops &drops, int32_t j0, int k, int n, int from, int to, bool open,
                        const Digits &digits) const {
    const Coefficients &co = *w.co;
    for (int v = from; v < to; v++) {
      const int at = v * W;
      vf p[STEP], ds[STEP];
      for (int i = 0; i < STEP; i++) {
        if (k + i >= n) {
          p[i] = ds[i] = vf{};
          continue;
        }
        const int64_t place = (int64_t)(k + i) * BQ + at;
        const int32_t key = j0 + k + i;
        vf t = above(load<vf>(w.scores + place), load<vf>(co.rest + at));
        if (!open) t = select(w.lanes->sees(v, key), t, splat(-INF));
        p[i] = weight(t, digits);
        vf slope = -load<vf>(co.row + at);
        if (values) {
          vf worth = load<vf>(w.slopes + place);
          slope += drops.any ? drops.keep(worth * c.inverse, key, v) : worth;
        }
        if (STATS) {
          slope = fma(load<vf>(co.entropy + at), larger(digits.least, t), slope);
          vi ahead = splat(key) - load<vi>(w.lanes->position + at);
          slope = fma(load<vf>(co.ahead + at), __builtin_convertvector(ahead, vf), slope);
          if (key == 0) slope += load<vf>(co.first + at);
          slope += select(ahead == 0, load<vf>(co.self + at), vf{});
          slope += select(ahead == -1, load<vf>(co.previous + at), vf{});
        }
        if (c.softcap != 0) {
          vf share = load<vf>(w.capped + place) * (1.f / c.softcap);
          slope *= 1.f - share * share;
        }
        // Scores and slopes of hidden keys may be NaN, for example if an incoming gradient is close to overflow.
        ds[i] = select(p[i] == vf{}, vf{}, slope * p[i] * scale);
        if (drops.any) p[i] = drops.keep(p[i] * c.inverse, key, v);
      }
      In::keep_over_lanes(p[0], p[STEP - 1], w.weights, k, v);
      In::keep_over_lanes(ds[0], ds[STEP - 1], w.over_lanes, k, v);
      if (STEP > 1) In::keep_over_keys(ds[0], ds[STEP - 1], w.over_keys, k, v);
    }
  }

  // Accumulates one block of queries of one head and the keys [c0, c1) into w.dk, w.dv and w.dq.
  void block(Room &w, int64_t b, int64_t h, int64_t i0, int n, int32_t c0, int32_t c1) const {
    const int64_t g = h / group, q_at = place(c.q_stride, b, h, i0), grad_at = place(c.grad_out_stride, b, h, i0);
    const Digits digits = digits_of(c);
    In::lay(c, c.q, q_at, c.q_stride[2], n, c.dim, w.rows, w.queries);
    if (c.sign != 1.f) In::change_sign(c, w.queries, c.dim);
    Matrix<E> q{}, grad{};
    if (c.grad_k) q = In::down(c, c.q, q_at, c.q_stride[2], n, c.dim, w.query_rows);
    if (values) In::lay(c, c.grad_out, grad_at, c.grad_out_stride[2], n, c.value_dim, w.rows, w.grads);
    if (values && c.grad_v) grad = In::down(c, c.grad_out, grad_at, c.grad_out_stride[2], n, c.value_dim, w.grad_rows);
    coefficients(w, b, h, i0, n, c.grad_sinks && c0 == 0);
    const int32_t first = (int32_t)most(c0, w.lanes->first), last = (int32_t)least(c1, w.lanes->last);
    Drops drops(c, b, h, i0, w.drops);
    int starts[BK / GROUP], stops[BK / GROUP]; // vectors that see some of the GROUP keys
    for (int32_t j0 = first; j0 < last && !w.steps.stopped(); j0 += BK) {
      const int keys = (int)least(BK, last - j0);
      const bool open = w.lanes->open(j0, j0 + keys);
      const int64_t k_at = place(c.k_stride, b, g, j0), v_at = place(c.v_stride, b, g, j0);
      for (int r = 0; r < keys; r += GROUP) {
        starts[r / GROUP] = 0, stops[r / GROUP] = w.lanes->vectors;
        if (!open) w.lanes->active(j0 + r, j0 + (int)least(r + GROUP, keys), starts[r / GROUP], stops[r / GROUP]);
      }
      // to[key][lane] = left · right
      auto dots = [&](const Matrix<E> &left, const E *right, int64_t width, float *to) {
        for (int r = 0; r < keys; r += GROUP) {
          const int from = starts[r / GROUP];
          In::dots((int)least(GROUP, keys - r), stops[r / GROUP] - from, left.data + r * left.stride, left.stride,
                   right + from * W, to + (int64_t)r * BQ + from * W, (int)In::depth(width));
        }
      };
      dots(In::across(c, c.k, k_at, c.k_stride[2], keys, c.dim, w.keys), w.queries, c.dim, w.scores);
      if (values)
        dots(In::across(c, c.v, v_at, c.v_stride[2], keys, c.value_dim, w.values), w.grads,
             c.value_dim, w.slopes);
      if (!c.plain) finish_scores(c, *w.lanes, b, h, i0, n, j0, keys, w.scores, c.softcap != 0 ? w.capped : nullptr);
      for (int k = 0; w.co->raised && k < keys; k++)
        for (int v = starts[k / GROUP]; v < stops[k / GROUP]; v++) {
          float *at = w.scores + (int64_t)k * BQ + v * W;
          store(at, load<vf>(at) - load<vf>(w.co->top + v * W));
        }
      drops.draw(*w.lanes, j0, keys, open);
      for (int k = 0; k < keys; k += STEP) {
        if (stats)
          soften<true>(w, drops, j0, k, keys, starts[k / GROUP], stops[k / GROUP], open, digits);
        else
          soften<false>(w, drops, j0, k, keys, starts[k / GROUP], stops[k / GROUP], open, digits);
      }
      clear_unseen(w, keys, starts, stops);
      if (values && c.grad_v) to_keys(w.weights, grad, n, keys, starts, stops, value_wide, w.dv + (j0 - c0) * value_wide);
      if (c.grad_k) to_keys(w.over_lanes, q, n, keys, starts, stops, wide, w.dk + (j0 - c0) * wide);
      if (c.grad_q) to_queries(w, k_at, n, j0, keys, open);
    }
    if (In::TILES && c.grad_q) turn_back(w.turned, wide, n, w.dq);
  }

  // Products skip keys that no lane of a vector may see: there, P and dS are 0.
  void clear_unseen(Room &w, int keys, const int *starts, const int *stops) const {
    auto clear = [&](int k, int v) {
      if (c.grad_q) In::keep_over_keys(vf{}, vf{}, w.over_keys, k, v);
      if (!In::TILES) return;
      In::keep_over_lanes(vf{}, vf{}, w.weights, k, v);
      In::keep_over_lanes(vf{}, vf{}, w.over_lanes, k, v);
    };
    for (int k = 0; k < keys; k += STEP)
      for (int v = 0; v < (In::TILES ? VQ : w.lanes->vectors); v++)
        if (v < starts[k / GROUP] || v >= stops[k / GROUP]) clear(k, v);
    if constexpr (In::TILES)
      for (int k = (keys + 1) / STEP * STEP; k < 2 * In::pairs_of(keys); k += STEP)
        for (int v = 0; v < VQ; v++) clear(k, v);
  }

  // to[key] += Σ block[key][lane] · rows[lane]
  void to_keys(const E *block, const Matrix<E> &rows, int n, int keys, const int *starts,
               const int *stops, int64_t width, float *to) const {
    if constexpr (In::TILES) {
      In::add(In::whole(keys), (int)(width / W), block, BQ / STEP, rows.data, rows.stride, to, width,
                  In::pairs_of(n));
      return;
    }
    for (int r = 0; r < keys; r += GROUP) {
      const int from = starts[r / GROUP] * W / STEP, end = ((int)least(n, stops[r / GROUP] * W) + STEP - 1) / STEP;
      if (end > from)
        product<Product, true>((int)least(GROUP, keys - r), (int)(width / W), block + r * (BQ / STEP) + from,
                               BQ / STEP, 1, rows.data + from * rows.stride, rows.stride, to + r * width, width,
                               end - from);
    }
  }

  // dQ[lane] += Σ dS[key][lane] · K[key]
  void to_queries(Room &w, int64_t k_at, int n, int32_t j0, int keys, bool open) const {
    if constexpr (In::TILES) {
      In::turn_pairs(c.k, k_at, c.k_stride[2], keys, c.dim, w.key_rows);
      In::add((int)wide, w.lanes->vectors, w.key_rows, BK / 2, w.over_keys, BQ, w.turned, BQ, In::pairs_of(keys));
      return;
    }
    const Matrix<E> k = In::down(c, c.k, k_at, c.k_stride[2], keys, c.dim, w.key_rows);
    for (int i = 0; i < n; i += MR) {
      const int size = (int)least(MR, n - i);
      int32_t from = j0, to = j0 + keys;
      if (!open) w.lanes->keys_of(i, i + size, j0, j0 + keys, from, to);
      from = (from - j0) / STEP, to = (to - j0 + STEP - 1) / STEP;
      if (to > from)
        product<Product, true>(size, (int)(wide / W), w.over_keys + (int64_t)from * BQ + i, 1, BQ,
                               k.data + from * k.stride, k.stride, w.dq + i * wide, wide, to - from);
    }
  }

  // The chunks split, split + splits, … of one key/value head.
  void task(int64_t number, headwise::Scratch &scratch) const {
    const int64_t split = number % splits, b = number / splits / c.kv_heads, g = number / splits % c.kv_heads;
    Room w(c.control);
    w.take(&scratch, *this);
    [[maybe_unused]] const typename In::Session session;
    w.weights = In::over_lanes(w.scores, w.weights), w.over_lanes = In::over_lanes(w.slopes, w.over_lanes);
    w.over_keys = In::over_keys(w.slopes, w.over_keys);
    for (int64_t chunk = split; chunk < chunks; chunk += splits) {
      const int64_t c0 = chunk * CHUNK, c1 = least(c0 + CHUNK, c.keys);
      if (c.grad_k) __builtin_memset(w.dk, 0, (c1 - c0) * wide * sizeof(float));
      if (c.grad_v) __builtin_memset(w.dv, 0, (c1 - c0) * value_wide * sizeof(float));
      for (int64_t h = g * group; h < (g + 1) * group; h++)
        for (int64_t i0 = 0; i0 < c.queries && !w.steps.stopped(); i0 += BQ) {
          const int n = (int)least(BQ, c.queries - i0);
          w.lanes->set(c, b, h, i0, n);
          __builtin_memset(w.dq, 0, n * wide * sizeof(float));
          if (In::TILES) __builtin_memset(w.turned, 0, BQ * wide * sizeof(float));
          const bool meets = w.lanes->first < c1 && c0 < w.lanes->last;
          if (meets)
            block(w, b, h, i0, n, (int32_t)c0, (int32_t)c1);
          else if (chunk == 0 && c.grad_sinks)
            coefficients(w, b, h, i0, n, true);
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
    if (!norms.make()) return HW_NO_MEMORY;
    if (c.grad_q && chunks > 1) {
      partial = (float *)std::calloc((size_t)(splits * rows * wide), sizeof(float));
      if (!partial) return HW_NO_MEMORY;
    }
    auto work = [&](int64_t number, headwise::Scratch &room) { task(number, room); };
    const int64_t bytes = Room(c.control).take(nullptr, *this);
    bool done = headwise::for_each_task(c.control, c.batch * c.kv_heads * splits, c.threads, bytes, work);
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
      done = headwise::for_each_task(c.control, (rows + BQ - 1) / BQ, c.threads,
                                     headwise::Scratch::size_of<float>(wide), join);
    }
    std::free(partial);
    return done ? HW_OK : HW_NO_MEMORY;
  }
};

} // namespace HW_ISA

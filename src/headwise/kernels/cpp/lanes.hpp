// A block of queries in vector lanes: their positions, and the keys that each may see.
#pragma once

#include "headwise.h"
#include "simd.hpp"
#include "team.hpp"

namespace HW_ISA {

constexpr int BQ = 64;       // queries per block
constexpr int VQ = BQ / W;   // vectors per block

static HW_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static HW_INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

// A call with a positive scale, whose sign is moved to the queries. Plain products are scaled when they enter
// the softmax: a score in the kernel times `unit` is a score of the call.
struct Call : hw_call {
  headwise::Control &control;
  float sign, unit;
  float inverse; // 1 / (share of weights that dropout keeps)
  bool plain; // products are only scaled, by a number that is not extreme
  Call(const hw_call &c, headwise::Control &shared)
      : hw_call(c), control(shared), sign(c.scale > 0 ? 1.f : c.scale < 0 ? -1.f : 0.f) {
    scale = sign == 0 ? 1.f : sign * c.scale;
    plain = softcap == 0 && !allowed && !bias && !slopes && scale >= 0x1p-64f && scale <= 0x1p64f;
    unit = plain ? scale : 1.f;
    inverse = 65536.f / (float)(65536 - dropped);
  }
};

// Elements of a tensor with one axis per stride.
static HW_INLINE int64_t place(const int64_t stride[3], int64_t b, int64_t h, int64_t t) {
  return b * stride[0] + h * stride[1] + t * stride[2];
}

// A position, clamped so that differences of positions cannot overflow.
static HW_INLINE int64_t position_of(const Call &c, int64_t i) {
  return most(-(INT32_MAX / 2), least(c.position ? c.position[i] : i + c.offset, INT32_MAX - 1));
}

// The keys [low, high) of one query; an empty range is [0, 0).
static inline void range_of(const Call &c, int64_t b, int64_t h, int64_t i, int64_t &low, int64_t &high) {
  low = 0;
  high = c.keys;
  if (c.causal) {
    int64_t position = position_of(c, i);
    high = least(high, position + 1);
    if (c.window) low = most(low, position + 1 - c.window);
  }
  if (c.low) low = most(low, c.low[place(c.low_stride, b, h, i)]);
  if (c.high) high = least(high, c.high[place(c.high_stride, b, h, i)]);
  if (high <= low) low = high = 0;
}

// Queries i0 … i0 + n − 1 of a head. Lanes beyond n repeat the keys of the last one and contain zeros.
struct Lanes {
  alignas(64) int32_t position[BQ], low[BQ], high[BQ];
  int32_t vector_low[VQ], vector_high[VQ]; // the outermost keys of each vector's lanes
  int32_t first, last;                     // … and of all
  int32_t open_from, open_to;              // keys that every lane may see according to ranges
  int vectors;                             // that hold queries

  void set(const Call &c, int64_t b, int64_t h, int64_t i0, int n) {
    vectors = (n + W - 1) / W;
    first = INT32_MAX, last = 0, open_from = 0, open_to = INT32_MAX;
    for (int v = 0; v < VQ; v++) vector_low[v] = INT32_MAX, vector_high[v] = 0;
    for (int i = 0; i < vectors * W; i++) {
      int64_t from, to, query = i0 + least(i, n - 1);
      position[i] = (int32_t)position_of(c, query);
      range_of(c, b, h, query, from, to);
      low[i] = (int32_t)from, high[i] = (int32_t)to;
      open_from = (int32_t)most(open_from, from), open_to = (int32_t)least(open_to, to);
      if (to == from) continue;
      int v = i / W;
      vector_low[v] = (int32_t)least(vector_low[v], from);
      vector_high[v] = (int32_t)most(vector_high[v], to);
    }
    for (int v = 0; v < VQ; v++) {
      first = (int32_t)least(first, vector_low[v]);
      last = (int32_t)most(last, vector_high[v]);
    }
    if (last == 0) first = 0;
  }

  bool open(int32_t from, int32_t to) const { return open_from <= from && to <= open_to; }

  // The vectors [start, stop) with a lane that may see one of the keys [from, to).
  void active(int32_t from, int32_t to, int &start, int &stop) const {
    start = stop = 0;
    for (int v = 0; v < vectors; v++)
      if (vector_low[v] < to && from < vector_high[v]) {
        if (stop == 0) start = v;
        stop = v + 1;
      }
  }

  HW_INLINE vi sees(int v, int32_t key) const {
    vi j = splat(key);
    return (j >= load<vi>(low + v * W)) & (j < load<vi>(high + v * W));
  }

  // The keys that some of the lanes [start, stop) may see, within [from, to).
  void keys_of(int start, int stop, int32_t from, int32_t to, int32_t &lowest, int32_t &highest) const {
    lowest = to, highest = from;
    for (int i = start; i < stop; i++) {
      if (low[i] == high[i]) continue;
      lowest = (int32_t)least(lowest, most(low[i], from));
      highest = (int32_t)most(highest, least(high[i], to));
    }
    if (highest <= lowest) lowest = highest = from;
  }
};

// Loads `count` of W elements of a float32 table.
static HW_INLINE vf read_some(const float *from, int64_t stride, int count) {
  if (stride == 1 && count == W) return load<vf>(from);
  vf x{};
  for (int i = 0; i < count; i++) x[i] = from[i * stride];
  return x;
}

static HW_INLINE vf read_some(const uint8_t *from, int64_t stride, int count) {
  typedef uint8_t vb __attribute__((vector_size(W)));
  if (stride == 1 && count == W) return __builtin_convertvector(__builtin_convertvector(load<vb>(from), vi), vf);
  vf x{};
  for (int i = 0; i < count; i++) x[i] = from[i * stride];
  return x;
}

// scores[key][lane] = join(score, table[query][key]): blocks of W × W entries of the table are transposed
// (or broadcast, if all queries share them).
template <class Read, class Join>
static HW_INLINE void each_turned(int vectors, int queries, int n, bool shared, float *scores, const Read &read,
                                  const Join &join) {
  for (int k = 0; k < n; k += W) {
    const int count = (int)least(W, n - k);
    const vf all = shared ? read(0, k, count) : vf{};
    for (int v = 0; v < vectors; v++) {
      vf x[W];
      if (!shared) {
        for (int i = 0; i < W; i++) x[i] = read((int)least(v * W + i, queries - 1), k, count);
        turn(x);
      }
      for (int i = 0; i < count; i++) {
        float *at = scores + (int64_t)(k + i) * BQ + v * W;
        store(at, join(load<vf>(at), shared ? splat(all[i]) : x[i]));
      }
    }
  }
}

// Applies softcap, biases and tables of allowed pairs to scores [key][lane] at keys j0 … j0 + n − 1 and the
// vectors that may see them. If `capped` is not NULL, it receives the scores after softcap, before biases.
static inline void finish_scores(const Call &c, const Lanes &lanes, int64_t b, int64_t h, int64_t i0,
                                 int queries, int32_t j0, int n, float *scores, float *capped) {
  const float slope = c.slopes ? c.slopes[h] : 0.f;
  for (int k = 0; k < n; k++) {
    float *row = scores + (int64_t)k * BQ;
    for (int v = 0; v < lanes.vectors; v++) {
      vf s = load<vf>(row + v * W) * c.scale;
      if (c.softcap != 0) s = tanh_of(s * (1.f / c.softcap)) * c.softcap;
      if (capped) store(capped + (int64_t)k * BQ + v * W, s);
      if (c.slopes) {
        vi away = load<vi>(lanes.position + v * W) - splat(j0 + k);
        away = away < 0 ? -away : away;
        s = fma(splat(-slope), __builtin_convertvector(away, vf), s);
      }
      store(row + v * W, s);
    }
  }
  if (c.bias) {
    const int64_t *st = c.bias_stride;
    const float *from = c.bias + b * st[0] + h * st[1] + i0 * st[2] + j0 * st[3];
    auto read = [&](int i, int k, int count) { return read_some(from + i * st[2] + k * st[3], st[3], count); };
    auto add = [](vf s, vf bias) { return select(bias == splat(-INF), bias, s + bias); }; // for any s
    each_turned(lanes.vectors, queries, n, st[2] == 0, scores, read, add);
  }
  if (c.allowed) {
    const int64_t *st = c.allowed_stride;
    const uint8_t *from = c.allowed + b * st[0] + h * st[1] + i0 * st[2] + j0 * st[3];
    auto read = [&](int i, int k, int count) { return read_some(from + i * st[2] + k * st[3], st[3], count); };
    auto hide = [](vf s, vf seen) { return select(seen != vf{}, s, splat(-INF)); };
    each_turned(lanes.vectors, queries, n, st[2] == 0, scores, read, hide);
  }
}

// The same for one query's contiguous scores at the n keys from j0 on; `factor` scales them. The results are
// bit for bit those of the function above.
static inline void finish_row(const Call &c, float factor, int64_t b, int64_t h, int64_t i, int32_t j0, int n,
                              float *scores) {
  const vi position = splat((int32_t)position_of(c, i));
  for (int at = 0; at < n; at += W) {
    vf s = load<vf>(scores + at) * factor;
    if (c.softcap != 0) s = tanh_of(s * (1.f / c.softcap)) * c.softcap;
    if (c.slopes) {
      vi away = position - (lanes_of() + (j0 + at));
      away = away < 0 ? -away : away;
      s = fma(splat(-c.slopes[h]), __builtin_convertvector(away, vf), s);
    }
    store(scores + at, s);
  }
  if (c.bias) {
    const int64_t *st = c.bias_stride;
    const float *line = c.bias + b * st[0] + h * st[1] + i * st[2] + j0 * st[3];
    for (int j = 0; j < n; j++) {
      const float bias = line[j * st[3]];
      scores[j] = bias == -INF ? bias : scores[j] + bias;
    }
  }
  if (c.allowed) {
    const int64_t *st = c.allowed_stride;
    const uint8_t *line = c.allowed + b * st[0] + h * st[1] + i * st[2] + j0 * st[3];
    for (int j = 0; j < n; j++)
      if (!line[j * st[3]]) scores[j] = -INF;
  }
}

// Returns true if the mask allows a query to see some key.
static inline bool sees_some_key(const Call &c, int64_t b, int64_t h, int64_t i) {
  int64_t low, high;
  range_of(c, b, h, i, low, high);
  if (!c.allowed && !c.bias) return low < high;
  const int64_t *sa = c.allowed_stride, *sb = c.bias_stride;
  const uint8_t *allowed = c.allowed ? c.allowed + b * sa[0] + h * sa[1] + i * sa[2] : nullptr;
  const float *bias = c.bias ? c.bias + b * sb[0] + h * sb[1] + i * sb[2] : nullptr;
  for (int64_t j = low; j < high; j++)
    if ((!allowed || allowed[j * sa[3]]) && (!bias || bias[j * sb[3]] != -INF)) return true;
  return false;
}

// ── tensors of any dtype ────────────────────────────────────────────────────────────────────────

static HW_INLINE int64_t padded(int64_t width) { return (width + W - 1) / W * W; }

// One row of a tensor in float32, padded with zeros to `wide`.
static inline void read_row(const Call &c, const void *tensor, int64_t at, int64_t width, int64_t wide,
                            float *to) {
  if (c.dtype == HW_FLOAT32)
    __builtin_memcpy(to, (const float *)tensor + at, width * sizeof(float));
  else
    widen((const uint16_t *)tensor + at, to, width, c.dtype == HW_BFLOAT16);
  for (int64_t d = width; d < wide; d++) to[d] = 0.f;
}

static inline void write_row(const Call &c, const float *from, int64_t width, void *tensor, int64_t at) {
  if (c.dtype == HW_FLOAT32)
    __builtin_memcpy((float *)tensor + at, from, width * sizeof(float));
  else
    narrow(from, (uint16_t *)tensor + at, width, c.dtype == HW_BFLOAT16);
}

// Rows of a tensor for the micro-kernels: in place if possible, otherwise copied to `room`
// [rows][wide] and padded with zeros to `wide`.
struct Rows {
  const float *data;
  int64_t stride;
};

static inline Rows rows_at(const Call &c, const void *tensor, int64_t at, int64_t stride, int rows,
                           int64_t width, int64_t wide, float *room) {
  if (c.dtype == HW_FLOAT32 && wide == width) return {(const float *)tensor + at, stride};
  for (int r = 0; r < rows; r++) read_row(c, tensor, at + r * stride, width, wide, room + r * wide);
  return {room, wide};
}

// ── transposed rows ─────────────────────────────────────────────────────────────────────────────

// to[d][lane] from rows[lane][d]; lanes beyond n are zeros. `width` is a multiple of W.
static inline void turn_rows(const float *rows, int64_t stride, int n, int64_t width, float *to) {
  for (int v = 0; v < VQ; v++)
    for (int64_t d = 0; d < width; d += W) {
      vf x[W];
#pragma GCC unroll 16
      for (int i = 0; i < W; i++) x[i] = v * W + i < n ? load<vf>(rows + (v * W + i) * stride + d) : vf{};
      turn(x);
#pragma GCC unroll 16
      for (int i = 0; i < W; i++) store(to + (d + i) * BQ + v * W, x[i]);
    }
}

} // namespace HW_ISA

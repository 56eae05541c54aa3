// Compares the kernel with plain attention in double precision on random calls, with every instruction set that
// this machine supports. `make sanitize` builds it, so that sanitizers check every access of the kernel: each
// tensor ends at the end of its memory, gaps in inputs are NaN, and results are initialized with NaN.
//
//   driver [seed [case [count]]]    only this case, or so many from it on
#include "headwise.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#ifndef __has_feature
#define __has_feature(x) 0 // g++ has macros instead
#endif
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || __has_feature(address_sanitizer) || \
    __has_feature(thread_sanitizer)
#include <sanitizer/common_interface_defs.h>
#define SANITIZED
#endif

// Memory that was never written is NaN for the kernel, too.
extern "C" const char *__asan_default_options() { return "malloc_fill_byte=255:max_malloc_fill_size=1073741824"; }

namespace {

constexpr double INF = std::numeric_limits<double>::infinity();
constexpr float NOT = std::numeric_limits<float>::quiet_NaN();
constexpr double MOST = std::numeric_limits<float>::max();
constexpr int DRAWN = 320;

std::string &now = *new std::string; // the running case; read when a sanitizer ends the process, so never destroyed

// Splitmix64: the same samples on every platform.
class Random {
public:
  Random(uint64_t seed, uint64_t number) : state_(seed * 1000003 + number) { next(); }
  uint64_t next() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
  }
  double real() { return (double)(next() >> 11) * 0x1p-53; }
  int64_t from(int64_t low, int64_t high) { return low + (int64_t)(next() % (uint64_t)(high - low + 1)); }
  bool chance(double share) { return real() < share; }
  double normal() { // nearly
    double sum = -2;
    for (int i = 0; i < 4; i++) sum += real();
    return sum * std::sqrt(3.0);
  }
  template <size_t N> int64_t of(const int64_t (&list)[N]) { return list[from(0, N - 1)]; }

private:
  uint64_t state_;
};

// ── tensors ─────────────────────────────────────────────────────────────────────────────────────

constexpr double UNIT[] = {0x1p-24, 0x1p-8, 0x1p-11}; // the relative error of rounding to a dtype

// Converts a half with so many mantissa bits and this lowest exponent to a number, and a number to the nearest half.
struct Half {
  int bits, least;
  double number(uint16_t x) const {
    const int exponent = (x & 0x7fff) >> bits, rest = x & ((1 << bits) - 1);
    const bool last = exponent == (0x7fff >> bits);
    const double size = last     ? (rest ? NOT : INF)
                        : exponent ? std::ldexp((1 << bits) + rest, least - bits + exponent - 1)
                                   : std::ldexp(rest, least - bits);
    return x & 0x8000 ? -size : size;
  }
  uint16_t nearest(double x) const {
    const double size = std::fabs(x);
    const int exponent = size == 0 ? least : std::max(least, std::ilogb(size));
    const int found = ((exponent - least) << bits) + (int)std::nearbyint(std::ldexp(size, bits - exponent));
    return (uint16_t)(found | (std::signbit(x) ? 0x8000 : 0));
  }
};
constexpr Half BFLOAT16{7, -126}, FLOAT16{10, -14};

// A view [B, H, T, width] of memory that ends with its last element.
struct Tensor {
  int64_t dtype = HW_FLOAT32, size[4] = {}, stride[4] = {0, 0, 0, 1}, start = 0;
  std::shared_ptr<std::vector<uint8_t>> memory;

  int64_t bytes() const { return dtype == HW_FLOAT32 ? 4 : 2; }
  uint8_t *data() const { return memory->data() + start * bytes(); }
  int64_t count() const { return size[0] * size[1] * size[2] * size[3]; }
  void allocate(int64_t numbers) {
    memory = std::make_shared<std::vector<uint8_t>>((size_t)((start + numbers) * bytes()), 0xff); // 0xff…: NaN
  }
  double get(int64_t at) const {
    if (dtype == HW_FLOAT32) {
      float x;
      std::memcpy(&x, data() + at * 4, 4);
      return x;
    }
    uint16_t x;
    std::memcpy(&x, data() + at * 2, 2);
    return (dtype == HW_BFLOAT16 ? BFLOAT16 : FLOAT16).number(x);
  }
  void set(int64_t at, double number) {
    if (dtype == HW_FLOAT32) {
      const float x = (float)number;
      std::memcpy(data() + at * 4, &x, 4);
      return;
    }
    const uint16_t x = (dtype == HW_BFLOAT16 ? BFLOAT16 : FLOAT16).nearest(number);
    std::memcpy(data() + at * 2, &x, 2);
  }
  std::vector<double> numbers() const;
};

// Calls visit(index of an element) in order.
template <class Visit> void each(const int64_t size[4], const int64_t stride[4], const Visit &visit) {
  for (int64_t a = 0; a < size[0]; a++)
    for (int64_t b = 0; b < size[1]; b++)
      for (int64_t c = 0; c < size[2]; c++)
        for (int64_t d = 0; d < size[3]; d++) visit(a * stride[0] + b * stride[1] + c * stride[2] + d * stride[3]);
}

std::vector<double> Tensor::numbers() const {
  std::vector<double> found;
  found.reserve((size_t)count());
  each(size, stride, [&](int64_t at) { found.push_back(get(at)); });
  return found;
}

// Strides for four axes in a random order, with gaps, and with shared axes (stride 0) at the given probabilities,
// one for batches and heads and one for rows; and the number of elements that they span. `dense`: the last axis is
// innermost, without gaps.
int64_t lay_out(Random &r, const int64_t size[4], int64_t stride[4], bool dense, double share, double rows_share) {
  int order[] = {3, 2, 1, 0};
  for (int i = dense ? 1 : 0; i < 3; i++)
    if (r.chance(0.4)) std::swap(order[i], order[r.from(i, 3)]);
  int64_t step = 1, span = 1;
  for (int axis : order) {
    const bool fixed = dense && axis == 3;
    stride[axis] = step;
    if (!fixed && r.chance(axis < 2 ? share : rows_share)) {
      stride[axis] = 0;
      continue;
    }
    if (!fixed && size[axis] == 1 && r.chance(0.3)) stride[axis] = r.from(0, 999); // has no effect
    span += (size[axis] - 1) * stride[axis];
    step *= size[axis];
    if (r.chance(0.2)) step += r.from(1, 5);
  }
  return span;
}

Tensor drawn(Random &r, int64_t dtype, int64_t b, int64_t h, int64_t t, int64_t width, double share) {
  Tensor x;
  x.dtype = dtype;
  const int64_t size[] = {b, h, t, width};
  std::copy(size, size + 4, x.size);
  x.start = r.chance(0.3) ? r.from(1, 3) : 0; // tensors are only aligned to elements
  x.allocate(lay_out(r, x.size, x.stride, true, share, 0));
  return x;
}

Tensor dense(int64_t b, int64_t h, int64_t t, int64_t width = 1) {
  Tensor x;
  const int64_t size[] = {b, h, t, width}, stride[] = {h * t * width, t * width, width, 1};
  std::copy(size, size + 4, x.size);
  std::copy(stride, stride + 4, x.stride);
  x.allocate(x.count());
  return x;
}

// ── calls ───────────────────────────────────────────────────────────────────────────────────────

enum Figure { LSE, MAX, ENTROPY, AHEAD, FIRST, PREVIOUS, SELF, FIGURES };
const char *const NAMES[] = {"lse", "max", "entropy", "ahead", "first", "previous", "self"};

struct Spec {
  int64_t batch = 1, kv_heads = 1, group = 1, queries = 1, keys = 1, dim = 1, value_dim = 1, dtype = HW_FLOAT32;
  int64_t window = 0, offset = 0, blocks = 1, dropped = 0;
  double scale = 1, softcap = 0;
  bool values = true, fused = false, causal = false, sampled = false, low = false, high = false, allowed = false,
       bias = false, slopes = false, sinks = false;
  double huge = 0; // added to the scores of some keys: next to it, everything else is rounded away
  double share = 0;
  double keep = 1; // probability that each result or gradient is requested

  int64_t heads() const { return kv_heads * group; }
  double volume() const { return (double)(batch * heads() * queries * keys) * (double)(dim + value_dim + 8); }
};

// Sizes near those of vectors, register tiles and blocks.
constexpr int64_t WIDTHS[] = {1,  2,  3,  4,  5,  7,  8,  15, 16,  17,  24,  31,  32,  33,
                              48, 63, 64, 65, 80, 96, 97, 112, 127, 128, 129, 192, 255, 256};
constexpr int64_t LENGTHS[] = {1,  2,  3,  4,  5,  6,   7,   8,   12,  16,  17,  31,  33,  47,  48, 49,
                               63, 64, 65, 95, 96, 97, 100, 127, 128, 129, 144, 191, 193, 256, 257, 300};

Spec draw_spec(Random &r) {
  Spec s;
  s.batch = r.of({1, 1, 1, 2, 3});
  s.kv_heads = r.of({1, 1, 2, 3});
  s.group = r.of({1, 1, 2, 3, 4, 8});
  auto length = [&] { return r.chance(0.5) ? r.of(LENGTHS) : r.from(1, 300); };
  s.queries = r.chance(0.3) ? r.from(1, 8) : length();
  s.keys = r.chance(0.2) ? s.queries : length();
  auto width = [&] { return r.chance(0.6) ? r.of(WIDTHS) : r.from(1, 256); };
  s.dim = width();
  s.value_dim = r.chance(0.5) ? s.dim : width();
  const bool deep = r.chance(0.07);
  if (deep) s.keys = r.from(1024, 5000), s.batch = 1, s.group = std::min<int64_t>(s.group, 3);
  const double most = r.chance(0.1) ? 3e6 : deep ? 1e6 : 4e5;
  for (int64_t *sizes[] = {&s.queries, &s.dim, &s.value_dim, &s.batch, &s.kv_heads, &s.group}; s.volume() > most;) {
    int64_t &size = *sizes[r.from(0, 5)];
    size = (size + 1) / 2;
    if (!deep && r.chance(0.3)) s.keys = (s.keys + 1) / 2;
  }
  s.dtype = r.of({HW_FLOAT32, HW_FLOAT32, HW_BFLOAT16, HW_FLOAT16});
  s.fused = r.chance(0.5); // if there are as many queries as keys
  s.values = r.chance(0.85);
  s.scale = (double)r.of({1, 1, 1, 3, 10}) / std::sqrt((double)s.dim);
  s.scale *= (double)r.of({1, 1, 1, 1, 1, 1, -1, -1, 0});
  s.softcap = r.chance(0.2) ? r.of({1, 2, 15, 50}) : 0;
  s.causal = r.chance(0.45);
  if (s.causal && r.chance(0.4)) s.window = r.chance(0.5) ? r.from(1, 8) : r.from(1, s.keys + 3);
  s.offset = r.chance(0.5) ? s.keys - s.queries : r.chance(0.5) ? 0 : r.from(-5, s.keys + 5);
  s.sampled = r.chance(0.2);
  s.low = r.chance(0.2), s.high = r.chance(0.2), s.allowed = r.chance(0.2);
  s.bias = r.chance(0.2), s.slopes = r.chance(0.2), s.sinks = r.chance(0.25);
  s.keep = r.chance(0.4) ? 1 : r.chance(0.5) ? 0.8 : 0.3;
  s.blocks = r.from(1, std::min<int64_t>(9, s.keys));
  if (s.bias && r.chance(0.4)) {
    const double sizes[] = {1e25, 1e30, 3e38, MOST};
    s.huge = sizes[r.from(0, 3)] * (r.chance(0.7) ? -1 : 1), s.share = r.of({2, 50, 100}) / 100.0;
  }
  if (r.chance(0.25)) s.dropped = r.of({1, 6554, 32768, 60000, 65535});
  return s;
}

// Cases that are always tested.
const std::function<void(Spec &)> CORNERS[] = {
    [](Spec &) {}, // one query, one key, one element
    [](Spec &s) { s.queries = 65, s.keys = 129, s.dim = s.value_dim = 256; },
    [](Spec &s) { s.queries = 64, s.keys = 48, s.dim = 16, s.value_dim = 1, s.dtype = HW_BFLOAT16; },
    [](Spec &s) { s.queries = 64, s.keys = 97, s.dim = 1, s.value_dim = 256, s.dtype = HW_FLOAT16; },
    // decoding on many keys: splits
    [](Spec &s) { s.keys = 5000, s.kv_heads = 2, s.group = 4, s.dim = s.value_dim = 64, s.dtype = HW_BFLOAT16; },
    [](Spec &s) {
      s.keys = 4999, s.queries = 3, s.group = 2, s.dim = s.value_dim = 32;
      s.causal = true, s.offset = 4990;
    },
    [](Spec &s) {
      s.keys = 3000, s.queries = 2, s.dim = s.value_dim = 16;
      s.causal = s.sinks = true, s.window = 1500, s.offset = 2990;
    },
    // many keys for blocks of queries: splits, and the chunks of gradients
    [](Spec &s) { s.keys = 5000, s.queries = 70, s.dim = 7, s.value_dim = 5; },
    [](Spec &s) { s.keys = 4097, s.queries = 9, s.dim = 33, s.value_dim = 17, s.dtype = HW_BFLOAT16, s.sinks = true; },
    [](Spec &s) {
      s.keys = 4500, s.queries = 66, s.dim = 3, s.dtype = HW_FLOAT16;
      s.causal = s.sampled = s.slopes = true;
    },
    [](Spec &s) { s.keys = 2048, s.queries = 17, s.dim = 5, s.value_dim = 9, s.kv_heads = 40, s.low = s.high = true; },
    [](Spec &s) {
      s.keys = 2049, s.queries = 5, s.dim = 9, s.value_dim = 3, s.group = 2;
      s.causal = true, s.window = 3, s.offset = 2046;
    },
    // no visible key, with and without sinks
    [](Spec &s) { s.queries = 70, s.keys = 50, s.dim = 8, s.causal = s.sinks = true, s.offset = -200; },
    [](Spec &s) { s.queries = 2, s.keys = 2500, s.dim = s.value_dim = 16, s.causal = true, s.offset = -200; },
    // statistics only
    [](Spec &s) { s.queries = 130, s.keys = 5, s.dim = 4, s.values = false, s.low = s.high = true; },
    [](Spec &s) { s.queries = 4, s.keys = 3000, s.dim = 16, s.values = false, s.bias = s.allowed = true; },
    // the largest possible scores: all of them, with equal weights, or some
    [](Spec &s) {
      s.queries = s.keys = 130, s.dim = s.value_dim = 16, s.bias = s.causal = true;
      s.huge = -MOST, s.share = 1;
    },
    [](Spec &s) {
      s.queries = 2, s.keys = 2500, s.dim = s.value_dim = 16, s.bias = s.sinks = true;
      s.huge = -1e30, s.share = 1;
    },
    [](Spec &s) {
      s.queries = 70, s.keys = 2500, s.dim = 7, s.value_dim = 9, s.group = 2, s.bias = s.allowed = s.sinks = true;
      s.huge = MOST, s.share = 0.5;
    },
    [](Spec &s) {
      s.queries = 90, s.keys = 90, s.dim = s.value_dim = 8, s.dtype = HW_BFLOAT16, s.bias = s.slopes = true;
      s.huge = 1e30, s.share = 0.02, s.softcap = 5, s.scale = -1;
    },
    // all at once
    [](Spec &s) {
      s.batch = 2, s.kv_heads = 2, s.group = 3, s.queries = s.keys = 67, s.dim = s.value_dim = 16;
      s.dtype = HW_BFLOAT16, s.window = 40, s.softcap = 10, s.scale = -2;
      s.fused = s.causal = s.low = s.high = s.allowed = s.bias = s.slopes = s.sinks = true;
    },
    // dropout: in decoding, with splits and chunks, with blocks that begin at any key, and all at once
    [](Spec &s) { s.keys = 2500, s.kv_heads = 2, s.group = 4, s.dim = s.value_dim = 16, s.dropped = 6554; },
    [](Spec &s) {
      s.keys = 4501, s.queries = 67, s.dim = 7, s.value_dim = 5;
      s.causal = true, s.window = 3001, s.offset = 4434, s.dropped = 30000;
    },
    [](Spec &s) {
      s.batch = 2, s.kv_heads = 2, s.group = 3, s.queries = s.keys = 131, s.dim = s.value_dim = 16;
      s.dtype = HW_BFLOAT16, s.window = 41, s.softcap = 10, s.dropped = 6554;
      s.fused = s.causal = s.sampled = s.low = s.allowed = s.bias = s.slopes = s.sinks = true;
    },
};
constexpr int FIXED = sizeof CORNERS / sizeof CORNERS[0];

struct Numbers {
  std::vector<double> q, k, v, sinks; // dense
};

// The inputs of one call, for the kernel and for the reference.
struct Case {
  Spec s;
  hw_call call{};
  Tensor q, k, v, grad_out;
  Numbers numbers;
  std::vector<int64_t> position, low, high;
  std::vector<uint8_t> allowed;
  std::vector<float> bias, slopes, sinks, weight, grad_of[FIGURES];
  std::vector<double> out_gradients;
  std::vector<int32_t> query_block, key_block;
  bool wanted[FIGURES] = {}, with_grad_out = false, wants[4] = {}; // grad_q, grad_k, grad_v, grad_sinks

  Case(Random &r, const Spec &spec) : s(spec) {
    sizes();
    tensors(r);
    masks(r);
    gradients(r);
    blocks(r);
    call.seed = r.next();
  }
  Case(const Case &) = delete; // the call points into it
  std::string words() const;

private:
  void sizes() {
    call.batch = s.batch, call.heads = s.heads(), call.kv_heads = s.kv_heads;
    call.queries = s.queries, call.keys = s.keys, call.dim = s.dim, call.value_dim = s.values ? s.value_dim : 0;
    call.dtype = s.dtype, call.threads = 1;
    call.scale = (float)s.scale, call.softcap = (float)s.softcap;
    call.causal = s.causal, call.window = s.window, call.offset = s.offset, call.dropped = s.dropped;
  }

  void tensors(Random &r) {
    s.fused = s.fused && s.queries == s.keys && s.values;
    if (s.fused) { // [B, T, all heads of q, k, v]
      const int64_t widths[] = {s.heads() * s.dim, s.kv_heads * s.dim, s.kv_heads * s.value_dim};
      const int64_t row = widths[0] + widths[1] + widths[2];
      Tensor *const all[] = {&q, &k, &v};
      for (int i = 0, start = 0; i < 3; start += (int)widths[i++]) {
        const int64_t width = i == 2 ? s.value_dim : s.dim;
        const int64_t size[] = {s.batch, i ? s.kv_heads : s.heads(), s.keys, width};
        const int64_t stride[] = {s.keys * row, width, row, 1};
        std::copy(size, size + 4, all[i]->size);
        std::copy(stride, stride + 4, all[i]->stride);
        all[i]->dtype = s.dtype;
        if (i == 0)
          q.allocate(s.batch * s.keys * row);
        else
          all[i]->memory = q.memory;
        all[i]->start = start;
      }
    } else {
      q = drawn(r, s.dtype, s.batch, s.heads(), s.queries, s.dim, 0.1);
      k = drawn(r, s.dtype, s.batch, s.kv_heads, s.keys, s.dim, 0.1);
      if (s.values) v = drawn(r, s.dtype, s.batch, s.kv_heads, s.keys, s.value_dim, 0.1);
    }
    auto fill = [&](Tensor &x, const void *&data, int64_t stride[3], std::vector<double> &numbers) {
      if (!x.memory) return;
      each(x.size, x.stride, [&](int64_t at) { x.set(at, r.normal()); });
      data = x.data();
      std::copy(x.stride, x.stride + 3, stride);
      numbers = x.numbers();
    };
    fill(q, call.q, call.q_stride, numbers.q);
    fill(k, call.k, call.k_stride, numbers.k);
    fill(v, call.v, call.v_stride, numbers.v);
    if (s.values) grad_out = drawn(r, s.dtype, s.batch, s.heads(), s.queries, s.value_dim, 0.1);
    fill(grad_out, call.grad_out, call.grad_out_stride, out_gradients);
    with_grad_out = s.values && r.chance(std::max(s.keep, 0.7));
    if (!with_grad_out) call.grad_out = nullptr;
  }

  void masks(Random &r) {
    const int64_t all[] = {s.batch, s.heads(), s.queries, s.keys}, rows[] = {s.batch, s.heads(), s.queries, 1};
    int64_t stride[4];
    if (s.sampled) {
      for (int64_t i = 0; i < s.queries; i++) position.push_back(r.from(-3, s.keys + 3));
      call.position = position.data();
    }
    const bool empty = r.chance(0.3);
    auto range = [&](bool given, std::vector<int64_t> &edges, const int64_t *&data, int64_t its_stride[3], bool up) {
      if (!given) return;
      edges.resize((size_t)lay_out(r, rows, stride, true, 0.5, 0.05), INT64_MIN);
      each(rows, stride, [&](int64_t at) {
        const int64_t away = r.chance(0.7) ? r.from(-2, s.keys / 2) : r.from(-2, empty ? s.keys + 2 : s.keys / 2);
        edges[(size_t)at] = up ? s.keys - away : away;
      });
      data = edges.data();
      std::copy(stride, stride + 3, its_stride);
    };
    range(s.low, low, call.low, call.low_stride, false);
    range(s.high, high, call.high, call.high_stride, true);
    if (s.allowed) {
      allowed.resize((size_t)lay_out(r, all, call.allowed_stride, false, 0.5, 0.05), 0xff);
      const double share = r.of({5, 50, 90}) / 100.0;
      each(all, call.allowed_stride, [&](int64_t at) { allowed[(size_t)at] = r.chance(share); });
      call.allowed = allowed.data();
    }
    if (s.bias) {
      bias.resize((size_t)lay_out(r, all, call.bias_stride, false, 0.5, 0.05), NOT);
      const double share = r.of({0, 10, 95}) / 100.0;
      each(all, call.bias_stride, [&](int64_t at) {
        bias[(size_t)at] = r.chance(share) ? -(float)INF : (float)(2 * r.normal());
        if (s.huge != 0 && r.chance(s.share)) bias[(size_t)at] = (float)s.huge;
      });
      call.bias = bias.data();
    }
    for (int64_t h = 0; s.slopes && h < s.heads(); h++) slopes.push_back((float)std::exp2(-r.from(0, 8)));
    if (s.slopes) call.slopes = slopes.data();
    for (int64_t h = 0; s.sinks && h < s.heads(); h++)
      sinks.push_back(r.chance(0.1) ? -(float)INF : r.chance(0.1) ? 100.f : (float)(3 * r.normal()));
    if (s.sinks) call.sinks = sinks.data();
    numbers.sinks.assign(sinks.begin(), sinks.end());
  }

  void gradients(Random &r) {
    const int64_t rows = s.batch * s.heads() * s.queries;
    wanted[LSE] = r.chance(std::max(s.keep, 0.9));
    for (int f = MAX; f < FIGURES; f++) wanted[f] = r.chance(s.keep);
    const float **const given[] = {&call.grad_lse, nullptr, &call.grad_entropy, &call.grad_ahead, &call.grad_first,
                                   &call.grad_previous, &call.grad_self};
    for (int f = LSE; f < FIGURES; f++) {
      if (f == MAX || !wanted[f] || !r.chance(std::max(0.6, s.keep))) continue;
      const double size = f == AHEAD ? 4.0 / (double)s.keys : 1;
      for (int64_t i = 0; i < rows; i++) grad_of[f].push_back((float)(size * r.normal()));
      *given[f] = grad_of[f].data();
    }
    for (bool &want : wants) want = r.chance(s.keep);
    wants[2] = wants[2] && s.values;
    wants[3] = wants[3] && s.sinks;
  }

  void blocks(Random &r) {
    auto ascending = [&](int64_t n) {
      std::vector<int32_t> found;
      for (int64_t i = 0; i < n; i++) found.push_back((int32_t)r.from(0, s.blocks - 1));
      std::sort(found.begin(), found.end());
      return found;
    };
    query_block = ascending(s.queries), key_block = ascending(s.keys);
    for (int64_t i = 0, weighted = r.chance(0.5); weighted && i < s.queries; i++)
      weight.push_back(r.chance(0.2) ? 0.f : (float)r.normal());
  }
};

std::string Case::words() const {
  char text[200];
  const char *const dtypes[] = {"float32", "bfloat16", "float16"};
  std::snprintf(text, sizeof text, "%s B %ld H %ld G %ld T %ld S %ld D %ld Dv %ld scale %.3g", dtypes[s.dtype],
                (long)s.batch, (long)s.heads(), (long)s.kv_heads, (long)s.queries, (long)s.keys, (long)s.dim,
                (long)s.value_dim, s.scale);
  std::string all = text;
  const std::pair<bool, const char *> flags[] = {
      {s.fused, "fused"}, {!s.values, "no values"}, {s.causal, "causal"}, {s.window, "window"}, {s.sampled, "sampled"},
      {s.low, "low"},     {s.high, "high"},         {s.allowed, "table"}, {s.bias, "bias"},     {s.slopes, "slopes"},
      {s.sinks, "sinks"}, {s.softcap != 0, "softcap"}, {s.huge != 0, "huge"}, {s.dropped, "dropout"}};
  for (const auto &[on, name] : flags)
    if (on) all += std::string(", ") + name;
  return all;
}

// ── the reference ───────────────────────────────────────────────────────────────────────────────

// The value of each element of a result, and the tolerance for a float32 kernel.
struct Near {
  std::vector<double> is, off;
  explicit Near(int64_t count = 0) : is((size_t)count), off((size_t)count) {}
  void set(int64_t at, double number, double slack) { is[(size_t)at] = number, off[(size_t)at] = slack; }
  void add(int64_t at, double number, double slack) { is[(size_t)at] += number, off[(size_t)at] += slack; }
};

// The number of roundings by which every sum below may be off, relative to the sum of magnitudes: errors
// accumulate like a random walk, and in vectors of partial sums.
constexpr double ROUND = 0x1p-24;
double summed(int64_t terms) { return ROUND * (4 + std::sqrt((double)terms)); }

// The effect of rounding on a score; after a huge number is added, a score is that number in float32 and double.
double rounded(double score) { return std::fabs(score) < 1e25 ? ROUND * std::fabs(score) : 0; }

// The row of one query: its weights and everything they derive from.
struct Row {
  std::vector<double> capped, score, score_off, p, log_p, p_off; // p_off is relative
  std::vector<double> keep;                                      // the factor of dropout
  double top, lse, lse_off, sink, sink_log, sink_off;
  int64_t position;
  bool dead;
};

// Philox4x32-7 as published: word `number` of the four.
uint32_t philox(std::array<uint32_t, 4> x, uint64_t seed, int number) {
  uint32_t key[] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
  for (int round = 0; round < 7; round++, key[0] += 0x9E3779B9, key[1] += 0xBB67AE85) {
    const uint64_t of_0 = 0xD2511F53ull * x[0], of_2 = 0xCD9E8D57ull * x[2];
    x = {(uint32_t)(of_2 >> 32) ^ x[1] ^ key[0], (uint32_t)of_2, (uint32_t)(of_0 >> 32) ^ x[3] ^ key[1],
         (uint32_t)of_0};
  }
  return x[(size_t)number];
}

double kept(const hw_call &c, int64_t b, int64_t h, int64_t i, int64_t j) {
  if (c.dropped == 0) return 1;
  const uint32_t word = philox({(uint32_t)(j / 4), (uint32_t)(i / 2), (uint32_t)h, (uint32_t)b}, c.seed,
                               (i % 2 == 0 ? 1 : 0) + (j % 4 < 2 ? 0 : 2));
  const int64_t half = (int16_t)(uint16_t)(j % 2 == 0 ? word : word >> 16);
  return half < c.dropped - 32768 ? 0 : 65536.0 / (double)(65536 - c.dropped);
}

bool attends(const hw_call &c, int64_t b, int64_t h, int64_t i, int64_t j, int64_t position) {
  if (c.causal && j > position) return false;
  if (c.window && j <= position - c.window) return false;
  if (c.low && j < c.low[b * c.low_stride[0] + h * c.low_stride[1] + i * c.low_stride[2]]) return false;
  if (c.high && j >= c.high[b * c.high_stride[0] + h * c.high_stride[1] + i * c.high_stride[2]]) return false;
  const int64_t *st = c.allowed_stride;
  return !c.allowed || c.allowed[b * st[0] + h * st[1] + i * st[2] + j * st[3]];
}

void row_of(const hw_call &c, const Numbers &x, int64_t b, int64_t h, int64_t i, Row &row) {
  const int64_t S = c.keys, g = h / (c.heads / c.kv_heads);
  const double *q = &x.q[(size_t)(((b * c.heads + h) * c.queries + i) * c.dim)];
  const double *k = &x.k[(size_t)((b * c.kv_heads + g) * S * c.dim)];
  for (auto *list : {&row.capped, &row.score, &row.score_off, &row.p, &row.log_p, &row.p_off, &row.keep})
    list->assign((size_t)S, 0.0);
  for (int64_t j = 0; j < S; j++) row.keep[j] = kept(c, b, h, i, j);
  row.position = c.position ? c.position[i] : i + c.offset;
  row.top = -INF;
  for (int64_t j = 0; j < S; j++, k += c.dim) {
    row.score[j] = -INF;
    if (!attends(c, b, h, i, j, row.position)) continue;
    double dot = 0, size = 0;
    for (int64_t d = 0; d < c.dim; d++) dot += q[d] * k[d], size += std::fabs(q[d] * k[d]);
    double s = c.scale * dot, off = summed(c.dim) * std::fabs((double)c.scale) * size;
    if (c.softcap != 0) {
      s = c.softcap * std::tanh(s / c.softcap);
      off += 4 * ROUND * std::fabs(s);
    }
    row.capped[j] = s;
    if (c.slopes) {
      const double away = c.slopes[h] * std::fabs((double)(row.position - j));
      s -= away, off += ROUND * away;
    }
    if (c.bias) {
      const int64_t *st = c.bias_stride;
      const double bias = c.bias[b * st[0] + h * st[1] + i * st[2] + j * st[3]];
      s += bias, off = std::fabs(bias) < 1e25 ? off + rounded(bias) : 0;
    }
    row.score[j] = s, row.score_off[j] = off + rounded(s);
    row.top = std::max(row.top, s);
  }
  row.dead = row.top == -INF;
  row.lse = -INF, row.lse_off = 0, row.sink = 0, row.sink_log = -INF, row.sink_off = 0;
  if (row.dead) return;
  const double sink = c.sinks ? x.sinks[(size_t)h] : -INF, top = std::max(row.top, sink);
  double sum = std::exp(sink - top);
  for (int64_t j = 0; j < S; j++) sum += std::exp(row.score[j] - top);
  row.lse = top + std::log(sum);
  const double always = 2 * (rounded(row.top) + rounded(top)) + summed(S), log_sum = std::log(sum);
  if (sink > -INF) {
    row.sink_log = sink - top - log_sum, row.sink = std::exp(row.sink_log);
    row.sink_off = always + ROUND * std::fabs(sink), row.lse_off = row.sink * row.sink_off;
  }
  for (int64_t j = 0; j < S; j++) {
    if (row.score[j] == -INF) continue;
    row.log_p[j] = row.score[j] - top - log_sum, row.p[j] = std::exp(row.log_p[j]);
    row.p_off[j] = row.score_off[j] + rounded(row.score[j]) + always;
    row.lse_off += row.p[j] * row.p_off[j];
  }
  row.sink_off += row.lse_off + rounded(row.lse);
  for (double &off : row.p_off) off += row.lse_off + rounded(row.lse);
  row.lse_off += ROUND * std::fabs(row.lse);
}

// Statistics of a row, with their tolerances.
void figures_of(const Row &row, double figure[FIGURES], double off[FIGURES]) {
  std::fill(figure, figure + FIGURES, 0.0), std::fill(off, off + FIGURES, 0.0);
  figure[LSE] = row.lse, off[LSE] = row.lse_off, figure[MAX] = row.top;
  if (row.dead) return;
  const double top = std::max(row.top, row.sink_log + row.lse);
  // As a sum of p·(score − top), and log Σ p.
  double &entropy = figure[ENTROPY], parts = 1;
  auto adds = [&](double p, double log_p, double score) {
    if (p > 0) entropy -= p * log_p, parts += p * std::fabs(score - top);
  };
  adds(row.sink, row.sink_log, row.sink_log + row.lse);
  for (size_t j = 0; j < row.p.size(); j++) adds(row.p[j], row.log_p[j], row.score[j]);
  off[ENTROPY] = summed((int64_t)row.p.size()) * parts;
  if (row.sink > 0) off[ENTROPY] += row.sink * row.sink_off * std::fabs(row.sink_log + entropy);
  for (int64_t j = 0; j < (int64_t)row.p.size(); j++) {
    if (row.score[j] == -INF) continue;
    const double p = row.p[j], p_off = p * row.p_off[j], away = (double)(j - row.position);
    off[MAX] = std::max(off[MAX], row.score_off[j] + ROUND * std::fabs(row.top) - (row.top - row.score[j]));
    off[ENTROPY] += p_off * std::fabs(row.log_p[j] + entropy); // the change of the entropy with a score
    figure[AHEAD] += p * away;
    off[AHEAD] += p_off * (std::fabs(away) + 64); // distances are summed from a block's first key
    const bool here[] = {j == 0, j == row.position - 1, j == row.position};
    for (int i = 0; i < 3; i++)
      if (here[i]) figure[FIRST + i] = p, off[FIRST + i] = p_off;
  }
}

struct Reference {
  Near out, figure[FIGURES], grad_q, grad_k, grad_v, grad_sinks, received, map;
};

// Gradients of Σ gradient · result for a row: dS = p (c − Σ p c) for everything that is linear in the weights,
// with the derivative c for each weight; p for the log-sum-exp, and −p (log p + entropy) for the entropy.
void backward_row(const Case &a, const Row &row, int64_t b, int64_t h, int64_t i, Reference &to) {
  const hw_call &c = a.call;
  const int64_t at = (b * c.heads + h) * c.queries + i, g = h / (c.heads / c.kv_heads), S = c.keys, Dv = c.value_dim;
  const double *q = &a.numbers.q[(size_t)(at * c.dim)], *grad = nullptr, *values = nullptr;
  const double *keys = &a.numbers.k[(size_t)((b * c.kv_heads + g) * S * c.dim)];
  double figure[FIGURES], off[FIGURES], gradient[FIGURES] = {};
  figures_of(row, figure, off);
  if (row.dead) return;
  for (int f = 0; f < FIGURES; f++)
    if (!a.grad_of[f].empty()) gradient[f] = a.grad_of[f][(size_t)at];
  // Constant along the row: Σ p c, from results that were rounded before.
  double mean = 0, mean_off = 0;
  for (int f = ENTROPY; f < FIGURES; f++) {
    if (f > ENTROPY) mean += gradient[f] * figure[f];
    mean_off += std::fabs(gradient[f]) * (off[f] + 4 * ROUND * std::fabs(figure[f]));
  }
  mean_off += 4 * ROUND * std::fabs(gradient[LSE]);
  if (a.with_grad_out) {
    grad = &a.out_gradients[(size_t)(at * Dv)], values = &a.numbers.v[(size_t)((b * c.kv_heads + g) * S * Dv)];
    for (int64_t d = 0; d < Dv; d++) {
      const double out = to.out.is[(size_t)(at * Dv + d)];
      mean += grad[d] * out;
      mean_off += std::fabs(grad[d]) * (to.out.off[(size_t)(at * Dv + d)] + summed(Dv) * std::fabs(out));
    }
  }
  auto entropy = [&](double log_p) { return gradient[ENTROPY] * (log_p + figure[ENTROPY]); };
  to.grad_sinks.set(at, row.sink > 0 ? row.sink * (gradient[LSE] - mean - entropy(row.sink_log)) : 0,
                    row.sink * (row.sink_off * std::fabs(gradient[LSE] - mean - entropy(row.sink_log)) + mean_off +
                                std::fabs(gradient[ENTROPY]) * row.sink_off));
  if (row.sink == 0) to.grad_sinks.set(at, 0, 0);
  for (int64_t j = 0; j < S; j++) {
    if (row.score[j] == -INF) continue;
    const double away = (double)(j - row.position), p = row.p[j], *k = keys + j * c.dim;
    double worth = gradient[AHEAD] * away, worth_off = 2 * ROUND * std::fabs(worth);
    if (j == 0) worth += gradient[FIRST];
    if (j == row.position - 1) worth += gradient[PREVIOUS];
    if (j == row.position) worth += gradient[SELF];
    if (grad) {
      const double *v = values + j * Dv;
      double dot = 0, size = 0;
      for (int64_t d = 0; d < Dv; d++) dot += grad[d] * v[d], size += std::fabs(grad[d] * v[d]);
      worth += row.keep[j] * dot, worth_off += row.keep[j] * summed(Dv) * size;
    }
    const double inner = worth - mean + gradient[LSE] - entropy(row.log_p[j]);
    worth_off += mean_off + std::fabs(gradient[ENTROPY]) * (row.p_off[j] + ROUND * std::fabs(row.log_p[j]));
    double ds = p * inner, ds_off = p * (row.p_off[j] * std::fabs(inner) + worth_off + 4 * ROUND * std::fabs(worth));
    if (c.softcap != 0) {
      const double share = row.capped[j] / c.softcap, slope = 1 - share * share;
      ds_off = ds_off * slope + (std::fabs(ds) + ds_off) * (8 * ROUND + 2 * row.score_off[j] / c.softcap);
      ds *= slope;
    }
    ds *= c.scale, ds_off *= std::fabs((double)c.scale);
    // With bfloat16 values, weights and the gradients of their scores may be bfloat16, too.
    const double half = c.dtype == HW_BFLOAT16 ? UNIT[c.dtype] : 0, size = std::fabs(ds);
    const double kq = half + summed(S), kk = half + summed(c.queries * c.heads / c.kv_heads);
    const int64_t of_k = ((b * c.kv_heads + g) * S + j) * c.dim, of_v = ((b * c.kv_heads + g) * S + j) * Dv;
    for (int64_t d = 0; d < c.dim; d++) {
      to.grad_q.add(at * c.dim + d, ds * k[d], (ds_off + kq * size) * std::fabs(k[d]));
      to.grad_k.add(of_k + d, ds * q[d], (ds_off + kk * size) * std::fabs(q[d]));
    }
    for (int64_t d = 0; grad && d < Dv; d++)
      to.grad_v.add(of_v + d, row.keep[j] * p * grad[d], row.keep[j] * p * (row.p_off[j] + kk) * std::fabs(grad[d]));
  }
}

Reference reference_of(const Case &a) {
  const hw_call &c = a.call;
  const int64_t rows = c.batch * c.heads * c.queries, S = c.keys, Dv = c.v ? c.value_dim : 0, n = a.s.blocks;
  const double unit = UNIT[c.dtype], least = c.dtype == HW_FLOAT16 ? 0x1p-25 : 0;
  Reference to;
  to.out = Near(rows * Dv);
  for (Near &figure : to.figure) figure = Near(rows);
  to.grad_q = Near(rows * c.dim), to.grad_k = Near(c.batch * c.kv_heads * S * c.dim);
  to.grad_v = Near(c.batch * c.kv_heads * S * Dv), to.grad_sinks = Near(rows);
  to.received = Near(c.batch * c.heads * S), to.map = Near(c.batch * c.heads * n * n);
  Row row;
  for (int64_t at = 0; at < rows; at++) {
    const int64_t head = at / c.queries, b = head / c.heads, h = head % c.heads, i = at % c.queries;
    const int64_t g = h / (c.heads / c.kv_heads);
    row_of(c, a.numbers, b, h, i, row);
    double figure[FIGURES], off[FIGURES];
    figures_of(row, figure, off);
    for (int f = 0; f < FIGURES; f++) to.figure[f].set(at, figure[f], off[f]);
    const double *v = Dv ? &a.numbers.v[(size_t)((b * c.kv_heads + g) * S * Dv)] : nullptr;
    const double counts = a.weight.empty() ? 1 : a.weight[(size_t)i];
    for (int64_t j = 0; j < S; j++) {
      if (row.p[j] == 0) continue;
      // With bfloat16 values, weights may be bfloat16, too.
      const double p = row.p[j], p_off = p * row.p_off[j], v_off = p_off + (c.dtype == HW_BFLOAT16 ? p * unit : 0);
      for (int64_t d = 0; d < Dv; d++)
        to.out.add(at * Dv + d, row.keep[j] * p * v[j * Dv + d], row.keep[j] * v_off * std::fabs(v[j * Dv + d]));
      const double more = std::fabs(counts) * (p_off + p * summed(c.queries));
      to.received.add(head * S + j, counts * p, more);
      // Keys are added to a map one by one, so equal weights have equal rounding errors.
      to.map.add((head * n + a.query_block[(size_t)i]) * n + a.key_block[(size_t)j], counts * p,
                 more + std::fabs(counts) * p * ROUND * (double)S);
    }
    for (int64_t d = at * Dv; d < (at + 1) * Dv; d++) {
      double &its = to.out.off[(size_t)d];
      its += unit * (std::fabs(to.out.is[(size_t)d]) + its) + (row.dead ? 0 : least);
    }
    backward_row(a, row, b, h, i, to);
  }
  for (Near *gradient : {&to.grad_q, &to.grad_k, &to.grad_v})
    for (size_t d = 0; d < gradient->is.size(); d++)
      gradient->off[d] += unit * (std::fabs(gradient->is[d]) + gradient->off[d]) + (gradient->off[d] > 0 ? least : 0);
  return to;
}

// ── gradients of the reference and finite differences ───────────────────────────────────────────

double loss(const Case &a, const Numbers &x) {
  const hw_call &c = a.call;
  double sum = 0;
  Row row;
  for (int64_t at = 0; at < c.batch * c.heads * c.queries; at++) {
    const int64_t head = at / c.queries, b = head / c.heads, h = head % c.heads, g = h / (c.heads / c.kv_heads);
    double figure[FIGURES], off[FIGURES];
    row_of(c, x, b, h, at % c.queries, row);
    if (row.dead) continue;
    figures_of(row, figure, off);
    for (int f = 0; f < FIGURES; f++)
      if (!a.grad_of[f].empty()) sum += a.grad_of[f][(size_t)at] * figure[f];
    for (int64_t j = 0; a.with_grad_out && j < c.keys; j++)
      for (int64_t d = 0; d < c.value_dim; d++)
        sum += a.out_gradients[(size_t)(at * c.value_dim + d)] * row.p[j] * row.keep[j] *
               x.v[(size_t)(((b * c.kv_heads + g) * c.keys + j) * c.value_dim + d)];
  }
  return sum;
}

struct Fault {
  std::string what;
};

template <class... Any> [[noreturn]] void fail(const char *format, Any... values) {
  char text[400];
  std::snprintf(text, sizeof text, format, values...);
  throw Fault{text};
}

// Compares the slope of the loss along a random direction; returns 1 if it was compared.
int check_gradients(Random &r, const Case &a, const Reference &known) {
  if (a.s.volume() > 3e4 || a.s.huge != 0) return 0;
  constexpr double STEP = 1e-5;
  Numbers up = a.numbers, down = a.numbers;
  double slope = 0, size = 0;
  auto move = [&](std::vector<double> &above, std::vector<double> &below, const std::vector<double> &gradient) {
    for (size_t d = 0; d < above.size(); d++) {
      if (std::isinf(above[d])) continue;
      const double by = r.normal();
      above[d] += STEP * by, below[d] -= STEP * by;
      slope += gradient[d] * by, size += std::fabs(gradient[d] * by);
    }
  };
  std::vector<double> sinks(up.sinks.size());
  for (size_t at = 0; !sinks.empty() && at < known.grad_sinks.is.size(); at++)
    sinks[at / (size_t)a.call.queries % sinks.size()] += known.grad_sinks.is[at];
  move(up.q, down.q, known.grad_q.is);
  move(up.k, down.k, known.grad_k.is);
  move(up.v, down.v, known.grad_v.is);
  move(up.sinks, down.sinks, sinks);
  const double found = (loss(a, up) - loss(a, down)) / (2 * STEP);
  if (!(std::fabs(found - slope) <= 1e-5 * (size + 1e-2)))
    fail("the reference's own gradient is %.9g, differences say %.9g", slope, found);
  return 1;
}

// ── runs ────────────────────────────────────────────────────────────────────────────────────────

// Largest errors, relative to the tolerances.
struct Report {
  enum Kind { OUT, LOGS, FIGURE, POINT, GRADIENT, SUM, HALF, KINDS }; // HALF: out and gradients of halves
  double worst[KINDS] = {};
  int cases = 0, calls = 0; // compared calls: up to one of each function per case
};
const char *const KINDS[] = {"out", "lse, max", "entropy, ahead", "single weights", "gradients", "sums", "halves"};

struct Result {
  std::string name;
  Tensor tensor;
  const Near *near;
  Report::Kind kind;
};

void check(const Result &result, Report &report) {
  const Tensor &x = result.tensor;
  double &worst = report.worst[result.kind];
  int64_t i = 0;
  std::vector<uint8_t> ours(x.memory->size());
  each(x.size, x.stride, [&](int64_t at) {
    const double found = x.get(at), is = result.near->is[(size_t)i], off = result.near->off[(size_t)i];
    std::memset(&ours[(size_t)((x.start + at) * x.bytes())], 1, (size_t)x.bytes());
    constexpr double TINY = 1e-30; // weights below 2^-126 are 0
    if (std::isinf(is) ? found != is : !(std::fabs(found - is) <= off + TINY)) {
      const int64_t last = x.size[3], row = i / last, head = row / x.size[2];
      fail("%s[%ld, %ld, %ld, %ld] is %.9g, not %.9g ± %.2g", result.name.c_str(), (long)(head / x.size[1]),
           (long)(head % x.size[1]), (long)(row % x.size[2]), (long)(i % last), found, is, off);
    }
    if (off > 0) worst = std::max(worst, std::fabs(found - is) / (off + TINY));
    i++;
  });
  for (size_t byte = 0; byte < ours.size(); byte++)
    if (!ours[byte] && (*x.memory)[byte] != 0xff)
      fail("%s: byte %ld, in a gap, was written", result.name.c_str(), (long)byte);
}

int teams = 0;

// A host that counts, and that requests a stop at the `patience`th poll.
std::atomic<int> left{0}, asked{0}, patience{INT32_MAX};
std::thread::id caller;

void *leave() {
  left++, caller = std::this_thread::get_id();
  return &left;
}
void enter(void *token) { left -= token == &left ? 1 : 1000; }
int stop() {
  if (left != 0 || std::this_thread::get_id() != caller) patience = -1; // it must be entered, on its thread
  return ++asked >= patience;
}
constexpr hw_host HOST = {leave, enter, stop};

// A runtime that provides one thread, for any request.
void small_team(void (*body)(void *), void *data, unsigned, unsigned) {
  teams++;
  body(data);
}

// Runs on 1, 2 and 5 threads, and on a team that is smaller than requested; the bits must be the same.
void run(int (*function)(const hw_call *, int), hw_call call, int isa, std::vector<Result> &results, Report &report) {
  std::vector<std::vector<uint8_t>> kept;
  report.calls++;
  for (int threads : {1, 2, 5, 3}) {
    for (Result &result : results) std::fill(result.tensor.memory->begin(), result.tensor.memory->end(), 0xff);
    call.threads = threads, call.host = threads == 2 ? nullptr : &HOST;
    hw_use_team(threads == 3 ? (void *)small_team : nullptr);
    const int code = function(&call, isa);
    hw_use_team(nullptr);
    if (code != HW_OK) fail("returned %d", code);
    if (left != 0 || patience < 0) fail("the host was not left as it was found");
    for (size_t i = 0; i < results.size(); i++) {
      const std::vector<uint8_t> &bytes = *results[i].tensor.memory;
      if (threads == 1) {
        check(results[i], report);
        kept.push_back(bytes);
      } else if (bytes != kept[i]) {
        fail("%s is not the same on %d threads", results[i].name.c_str(), threads);
      }
    }
  }
}

template <class Pointer> Pointer *place(std::vector<Result> &results, const Result &result) {
  results.push_back(result);
  return (Pointer *)results.back().tensor.data();
}

void run_case(Random r, const Case &a, const Reference &known, int isa, Report &report) {
  const std::string where = now;
  const Spec &s = a.s;
  const bool half = s.dtype != HW_FLOAT32;
  const Report::Kind of_out = half ? Report::HALF : Report::OUT, of_gradient = half ? Report::HALF : Report::GRADIENT;
  hw_call c = a.call;
  std::vector<Result> forward, backward, sums;
  auto strided = [&](std::vector<Result> &to, const char *name, void *&data, int64_t stride[3], int64_t heads,
                     int64_t rows, int64_t width, const Near &near) {
    Tensor x = drawn(r, s.dtype, s.batch, heads, rows, width, 0);
    std::copy(x.stride, x.stride + 3, stride);
    data = place<void>(to, {name, x, &near, &to == &forward ? of_out : of_gradient});
  };
  if (c.v) strided(forward, "out", c.out, c.out_stride, c.heads, c.queries, s.value_dim, known.out);
  float **const figures[] = {&c.lse, &c.max, &c.entropy, &c.ahead, &c.first, &c.previous, &c.self};
  for (int f = 0; f < FIGURES; f++) {
    if (!a.wanted[f]) continue;
    const Report::Kind kind = f <= MAX ? Report::LOGS : f <= AHEAD ? Report::FIGURE : Report::POINT;
    *figures[f] = place<float>(forward, {NAMES[f], dense(c.batch, c.heads, c.queries), &known.figure[f], kind});
  }
  now = where + " hw_forward";
  run(hw_forward, c, isa, forward, report);
  report.cases++;
  if (!c.lse) return;

  if (a.wants[0]) strided(backward, "grad_q", c.grad_q, c.grad_q_stride, c.heads, c.queries, c.dim, known.grad_q);
  if (a.wants[1]) strided(backward, "grad_k", c.grad_k, c.grad_k_stride, c.kv_heads, c.keys, c.dim, known.grad_k);
  if (a.wants[2]) strided(backward, "grad_v", c.grad_v, c.grad_v_stride, c.kv_heads, c.keys, s.value_dim, known.grad_v);
  if (a.wants[3])
    c.grad_sinks =
        place<float>(backward, {"grad_sinks", dense(c.batch, c.heads, c.queries), &known.grad_sinks, of_gradient});
  now = where + " hw_backward";
  run(hw_backward, c, isa, backward, report);

  hw_call reading = c; // hw_sums ignores values
  reading.v = nullptr, reading.out = nullptr, reading.value_dim = 0;
  reading.weight = a.weight.empty() ? nullptr : a.weight.data();
  if (r.chance(0.7))
    reading.received =
        place<float>(sums, {"received", dense(c.batch, c.heads, c.keys), &known.received, Report::SUM});
  if (r.chance(0.7)) {
    reading.query_block = a.query_block.data(), reading.key_block = a.key_block.data(), reading.blocks = s.blocks;
    reading.map = place<float>(sums, {"map", dense(c.batch, c.heads, s.blocks * s.blocks), &known.map, Report::SUM});
  }
  now = where + " hw_sums";
  run(hw_sums, reading, isa, sums, report);
}

// ── invalid calls ───────────────────────────────────────────────────────────────────────────────

void check_refusals(int isa) {
  Random r(0, 0);
  Spec s;
  s.queries = s.keys = 3, s.group = 2, s.dim = s.value_dim = 4, s.sinks = true;
  const Case a(r, s);
  std::vector<float> room(1000, NOT);
  hw_call good = a.call;
  good.out = room.data();
  good.lse = good.entropy = good.ahead = good.first = good.previous = good.self = room.data();
  good.grad_out = good.grad_entropy = good.grad_ahead = good.grad_first = good.grad_previous = room.data();
  good.grad_self = good.grad_sinks = good.received = good.map = room.data();
  good.query_block = good.key_block = a.query_block.data(), good.blocks = 1;
  typedef int (*Function)(const hw_call *, int);
  typedef std::vector<Function> Functions;
  const Functions all = {hw_forward, hw_backward, hw_sums}, forward = {hw_forward}, backward = {hw_backward};
  const Functions sums = {hw_sums};
  int number = 0;
  auto refused = [&](const Functions &functions, const std::function<void(hw_call &)> &spoil) {
    hw_call call = good;
    spoil(call);
    for (Function function : functions)
      if (int code = function(&call, isa); code != HW_BAD_CALL) fail("refusal %d: returned %d", number, code);
    number++;
  };
  for (int64_t hw_call::*size : {&hw_call::batch, &hw_call::heads, &hw_call::kv_heads, &hw_call::queries,
                                 &hw_call::keys, &hw_call::dim, &hw_call::threads})
    for (int64_t bad : {0, -1}) refused(all, [&](hw_call &c) { c.*size = bad; });
  refused(all, [](hw_call &c) { c.kv_heads = 2, c.heads = 3; });
  refused(all, [](hw_call &c) { c.keys = INT32_MAX; });
  refused(all, [](hw_call &c) { c.q = nullptr; });
  refused(all, [](hw_call &c) { c.k = nullptr; });
  refused(all, [](hw_call &c) { c.window = 2; });
  refused(all, [](hw_call &c) { c.dtype = HW_FLOAT16 + 1; });
  refused(all, [](hw_call &c) { c.dtype = -1; });
  refused(forward, [](hw_call &c) { c.out = nullptr; });
  refused(forward, [](hw_call &c) { c.value_dim = 0; });
  refused(backward, [](hw_call &c) { c.lse = nullptr; });
  refused(backward, [](hw_call &c) { c.out = nullptr; });
  refused(backward, [](hw_call &c) { c.v = nullptr; });
  refused(backward, [](hw_call &c) { c.v = nullptr, c.grad_out = nullptr, c.grad_v = c.out; });
  refused(backward, [](hw_call &c) { c.sinks = nullptr; });
  for (float *hw_call::*figure :
       {&hw_call::entropy, &hw_call::ahead, &hw_call::first, &hw_call::previous, &hw_call::self})
    refused(backward, [&](hw_call &c) { c.*figure = nullptr; });
  refused(sums, [](hw_call &c) { c.lse = nullptr; });
  refused(sums, [](hw_call &c) { c.query_block = nullptr; });
  refused(sums, [](hw_call &c) { c.key_block = nullptr; });
  refused(sums, [](hw_call &c) { c.blocks = 0; });
  const std::vector<int32_t> bad = {0, 0, 1}, worse = {-1, 0, 0};
  refused(sums, [&](hw_call &c) { c.query_block = bad.data(); });
  refused(sums, [&](hw_call &c) { c.key_block = worse.data(); });
  refused(all, [](hw_call &c) { c.scale = NOT; });
  refused(all, [](hw_call &c) { c.scale = (float)INF; });
  for (int64_t dropped : {-1, 65536}) refused(all, [&](hw_call &c) { c.dropped = dropped; });
  refused(all, [](hw_call &c) { c.softcap = -1; });
  refused(all, [](hw_call &c) { c.softcap = (float)INF; });
  for (Function function : all)
    if (function(nullptr, isa) != HW_BAD_CALL) fail("no call at all was not refused");
  for (float x : room)
    if (x == x) fail("a refused call wrote results");
}

// ── calls at the limits of float32, and calls that are stopped ──────────────────────────────────

// Inputs of one head: `T` queries, `S` keys, width `D`.
struct Plain {
  int64_t T, S, D;
  std::vector<float> q, k, v, out, lse;
  hw_call call{};
  Plain(int64_t t, int64_t s, int64_t d)
      : T(t), S(s), D(d), q((size_t)(t * d)), k((size_t)(s * d)), v((size_t)(s * d), 1.f), out((size_t)(t * d), NOT),
        lse((size_t)t, NOT) {
    call.batch = call.heads = call.kv_heads = 1;
    call.queries = T, call.keys = S, call.dim = call.value_dim = D, call.threads = 1, call.scale = 1;
    call.q = q.data(), call.k = k.data(), call.v = v.data(), call.out = out.data(), call.lse = lse.data();
    for (int64_t *stride : {call.q_stride, call.k_stride, call.v_stride, call.out_stride}) stride[2] = D;
  }
};

// If the scores of one row, or a sum of values, exceed float32, other results are unaffected.
void check_limits(int isa) {
  for (int64_t queries : {3, 70}) { // few, many
    for (float sign : {1.f, -1.f}) {
      Plain a(queries, 100, 16);
      std::fill(a.k.begin(), a.k.end(), 1e30f);
      for (int64_t d = 0; d < a.D; d++) a.q[(size_t)(2 * a.D + d)] = sign * 1e30f;
      if (int code = hw_forward(&a.call, isa); code != HW_NO_NUMBER) fail("overflowing scores: returned %d", code);
      for (int64_t i = 0; i < queries; i++) {
        const float lse = a.lse[(size_t)i], out = a.out[(size_t)(i * a.D)];
        const bool fine = i == 2 ? lse != lse && out != out : std::fabs(lse - std::log(100.f)) < 1e-5f && out == 1.f;
        if (!fine) fail("overflowing scores: row %ld is %g, with %g", (long)i, out, lse);
      }
    }
    Plain a(queries, 100, 16);
    std::fill(a.v.begin(), a.v.end(), 3e38f);
    if (int code = hw_forward(&a.call, isa); code != HW_OVERFLOW) fail("overflowing values: returned %d", code);
  }
}

void check_stop(int isa) {
  constexpr int64_t LONG = 40000; // takes minutes if it is not stopped
  Plain a(LONG, LONG, 64);
  a.call.host = &HOST;
  std::vector<float> grad_out(a.out.size()), grad_q(a.q.size()), grad_k(a.k.size()), received((size_t)LONG);
  a.call.grad_out = grad_out.data(), a.call.grad_q = grad_q.data(), a.call.grad_k = grad_k.data();
  for (int64_t *stride : {a.call.grad_out_stride, a.call.grad_q_stride, a.call.grad_k_stride}) stride[2] = a.D;
  a.call.received = received.data();
  std::fill(a.lse.begin(), a.lse.end(), 10.f);
  typedef int (*Function)(const hw_call *, int);
  for (Function function : {(Function)hw_sums, (Function)hw_backward, (Function)hw_forward})
    for (int threads : {1, 3}) {
      a.call.threads = threads;
      patience = 2, asked = 0;
      const int code = function(&a.call, isa);
      if (code != HW_STOPPED || asked != 2 || left != 0) fail("a call that was stopped: returned %d", code);
    }
  patience = INT32_MAX;
}

// Names, sizes, and return values for missing instruction sets.
void check_interface() {
  if (hw_interface() != HW_INTERFACE || hw_call_size() != (int64_t)sizeof(hw_call)) fail("another interface");
  const int count = hw_isa_count();
  const hw_call none{};
  for (int isa = 0; isa <= count + 1; isa++) {
    if ((isa < count) != (hw_isa_name(isa)[0] != 0) || (isa >= count && hw_isa_here(isa)))
      fail("set %d of %d", isa, count);
    const int code = hw_isa_here(isa) ? HW_BAD_CALL : HW_NO_SUCH_ISA;
    if (hw_forward(&none, isa) != code || hw_backward(&none, isa) != code || hw_sums(&none, isa) != code)
      fail("set %d: an empty call returned something other than %d", isa, code);
  }
  if (hw_forward(&none, -1) != HW_BAD_CALL) fail("there is no best instruction set");
}

[[maybe_unused]] void say_where() { std::fprintf(stderr, "driver: FAILED in %s\n", now.c_str()); }

} // namespace

int main(int argc, char **argv) {
#ifdef SANITIZED
  __sanitizer_set_death_callback(say_where);
#endif
  const uint64_t seed = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 1;
  const int first = argc > 2 ? std::atoi(argv[2]) : 0;
  const int count = argc > 3 ? std::atoi(argv[3]) : argc > 2 ? 1 : FIXED + DRAWN;
  std::vector<Report> reports((size_t)hw_isa_count());
  int differences = 0;
  try {
    now = "the interface";
    check_interface();
    for (int number = first; number < first + count; number++) {
      Random r(seed, (uint64_t)number);
      Spec spec;
      if (number < FIXED) {
        CORNERS[number](spec);
        spec.scale /= std::sqrt((double)spec.dim);
      } else {
        spec = draw_spec(r);
      }
      const Case a(r, spec);
      const std::string where =
          "seed " + std::to_string(seed) + ", case " + std::to_string(number) + " (" + a.words() + "):";
      now = where + " reference";
      const Reference known = reference_of(a);
      differences += check_gradients(r, a, known);
      for (int isa = 0; isa < hw_isa_count(); isa++) {
        if (!hw_isa_here(isa)) continue;
        now = where + " " + hw_isa_name(isa);
        run_case(r, a, known, isa, reports[(size_t)isa]);
      }
    }
    for (int isa = 0; isa < hw_isa_count(); isa++) {
      now = std::string("refusals, limits, stops: ") + hw_isa_name(isa);
      if (!hw_isa_here(isa)) continue;
      check_refusals(isa);
      check_limits(isa);
      check_stop(isa);
    }
    if (first == 0 && count >= FIXED + DRAWN && (differences < 10 || teams == 0)) fail("the cases do not reach what they should");
  } catch (const Fault &fault) {
    std::fprintf(stderr, "driver: FAILED in %s: %s\n", now.c_str(), fault.what.c_str());
    return 1;
  }
  for (int isa = 0; isa < hw_isa_count(); isa++) {
    const Report &report = reports[(size_t)isa];
    std::printf("%-10s ", hw_isa_name(isa));
    if (!hw_isa_here(isa)) {
      std::printf(" not on this machine\n");
      continue;
    }
    std::printf("%4d cases, %d calls; largest errors, as shares of what is allowed:", report.cases, report.calls);
    for (int kind = 0; kind < Report::KINDS; kind++)
      std::printf("%s %s %.2f", kind ? "," : "", KINDS[kind], report.worst[kind]);
    std::printf("\n");
  }
  return 0;
}

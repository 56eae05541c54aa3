// Operands of products, read from tensors as float32 or as pairs of bfloat16. `across` returns rows as the left
// operand of a sum over their width; `lay` transposes rows for the right operand of the same product; `down`
// returns the right operand of a product that sums over the rows.
#pragma once

#include "gemm.hpp"
#include "lanes.hpp"

namespace HW_ISA {

template <class E> struct Matrix {
  const E *data;
  int64_t stride;
};

// Scores of at most GROUP rows by `vectors` of lanes: to[row][lanes] = Σ left[row] · right[][lanes].
template <class Product> struct InRegisters {
  static constexpr bool TILES = false;
  static constexpr int GROUP = MR; // rows per product
  struct Session {};               // state of a task during products

  static void dots(int rows, int vectors, const typename Product::left *left, int64_t stride,
                   const typename Product::right *right, float *to, int depth) {
    product<Product, false>(rows, vectors, left, stride, 1, right, BQ, to, BQ, depth);
  }
};

// All operands in float32; half precision is widened when read.
struct InFloat : InRegisters<Float> {
  static constexpr int BK = 48; // keys per block
  typedef Float Product;
  typedef float element;

  static int64_t depth(int64_t width) { return width; } // elements of a sum over a row
  static int64_t across_room(int64_t width, int rows) { return rows * padded(width); }
  static int64_t down_room(int64_t width, int rows) { return rows * padded(width); }
  static int64_t block_room(int) { return 0; }

  static Matrix<float> across(const Call &c, const void *tensor, int64_t at, int64_t stride, int n, int64_t width,
                              float *room) {
    Rows rows = rows_at(c, tensor, at, stride, n, width, width, room);
    return {rows.data, rows.stride};
  }
  static Matrix<float> down(const Call &c, const void *tensor, int64_t at, int64_t stride, int n, int64_t width,
                            float *room) {
    Rows rows = rows_at(c, tensor, at, stride, n, width, padded(width), room);
    return {rows.data, rows.stride};
  }
  static void lay(const Call &c, const void *tensor, int64_t at, int64_t stride, int n, int64_t width, float *room,
                  float *to) {
    Matrix<float> rows = down(c, tensor, at, stride, n, width, room);
    turn_rows(rows.data, rows.stride, n, padded(width), to);
  }
  static void change_sign(const Call &c, float *laid, int64_t width) {
    for (int64_t i = 0; i < width * BQ; i++) laid[i] *= c.sign;
  }

  // For the result of `down`: true if all elements are finite; and one element.
  static bool finite(Matrix<float> rows, int n, int64_t wide) {
    vf all{}; // NaN if any is not finite
    for (int i = 0; i < n; i++)
      for (int64_t d = 0; d < wide; d += W) all += load<vf>(rows.data + i * rows.stride + d) * 0.f;
    return !any_of(all != all);
  }
  static float number(Matrix<float> rows, int row, int64_t d) { return rows.data[row * rows.stride + d]; }
  static float weight(const float *weights, int key, int lane) { return weights[(int64_t)key * BQ + lane]; }

  // Converts a block [key][lane] of scores in place to an operand: to be summed over keys …
  static float *over_keys(float *scores, float *) { return scores; }
  static HW_INLINE void keep_over_keys(vf x, vf, float *block, int k, int v) {
    store(block + (int64_t)k * BQ + v * W, x);
  }
  // … or over lanes.
  static float *over_lanes(float *scores, float *) { return scores; }
  static HW_INLINE void keep_over_lanes(vf x, vf, float *block, int k, int v) { keep_over_keys(x, x, block, k, v); }
};

#if HW_PAIRS
// Pairs of bfloat16, for the instruction that multiplies and adds two of them in float32.
struct InPairs : InRegisters<Pair> {
  static constexpr int BK = 96; // keys per block
  typedef Pair Product;
  typedef uint32_t element;

  static int64_t depth(int64_t width) { return (width + 1) / 2; }
  static int64_t across_room(int64_t width, int rows) { return rows * padded(depth(width)); }
  static int64_t down_room(int64_t width, int rows) { return (rows + 1) / 2 * padded(width); }
  static int64_t block_room(int keys) { return (keys + 1) / 2 * BQ; }

  // Rows of `wide` pairs, in place if possible, padded with zeros.
  static Matrix<uint32_t> pairs(const void *tensor, int64_t at, int64_t stride, int n, int64_t width, int64_t wide,
                                uint32_t *room) {
    const uint16_t *from = (const uint16_t *)tensor + at;
    if (width == 2 * wide && stride % 2 == 0 && (uintptr_t)from % 4 == 0)
      return {(const uint32_t *)from, stride / 2};
    for (int i = 0; i < n; i++) {
      uint16_t *row = (uint16_t *)(room + i * wide);
      __builtin_memcpy(row, from + i * stride, width * sizeof(uint16_t));
      __builtin_memset(row + width, 0, (2 * wide - width) * sizeof(uint16_t));
    }
    return {room, wide};
  }
  static Matrix<uint32_t> across(const Call &, const void *tensor, int64_t at, int64_t stride, int n, int64_t width,
                                 uint32_t *room) {
    return pairs(tensor, at, stride, n, width, depth(width), room);
  }
  // to[row / 2][d]: the elements of an even row and of the next.
  static Matrix<uint32_t> down(const Call &, const void *tensor, int64_t at, int64_t stride, int n, int64_t width,
                               uint32_t *room) {
    const int64_t wide = padded(width);
    const uint16_t *from = (const uint16_t *)tensor + at;
    for (int k = 0; k < n; k += 2) {
      const uint16_t *even = from + k * stride, *odd = even + stride;
      uint32_t *to = room + k / 2 * wide;
      int64_t d = 0;
      for (; d + W <= width; d += W) {
        vu low = __builtin_convertvector(load<vh>(even + d), vu);
        vu high = k + 1 < n ? __builtin_convertvector(load<vh>(odd + d), vu) : vu{};
        store(to + d, low | (high << 16));
      }
      for (; d < wide; d++) to[d] = d < width ? even[d] | (k + 1 < n ? (uint32_t)odd[d] << 16 : 0) : 0;
    }
    return {room, wide};
  }
  static void lay(const Call &, const void *tensor, int64_t at, int64_t stride, int n, int64_t width, uint32_t *room,
                  uint32_t *to) {
    const int64_t wide = padded(depth(width));
    Matrix<uint32_t> found = pairs(tensor, at, stride, n, width, wide, room);
    turn_rows((const float *)found.data, found.stride, n, wide, (float *)to); // moves bits only
  }
  static void change_sign(const Call &c, uint32_t *laid, int64_t width) {
    for (int64_t i = 0; i < depth(width) * BQ; i++) laid[i] = c.sign == 0.f ? 0 : laid[i] ^ 0x80008000;
  }

  // For the result of `down`: true if all elements are finite; and one element.
  static bool finite(Matrix<uint32_t> rows, int n, int64_t wide) {
    vf all{}; // NaN if any is not finite
    for (int i = 0; i < (n + 1) / 2; i++)
      for (int64_t d = 0; d < wide; d += W) {
        const vu pairs = load<vu>(rows.data + i * rows.stride + d);
        all += (vf)(pairs << 16) * 0.f + (vf)(pairs & 0xffff0000u) * 0.f;
      }
    return !any_of(all != all);
  }
  static float number(Matrix<uint32_t> rows, int row, int64_t d) {
    return from_bf16((uint16_t)(rows.data[row / 2 * rows.stride + d] >> (row % 2 * 16)));
  }
  static float weight(const uint32_t *weights, int key, int lane) {
    return from_bf16((uint16_t)(weights[(int64_t)(key / 2) * BQ + lane] >> (key % 2 * 16)));
  }

  static uint32_t *over_keys(float *, uint32_t *room) { return room; }
  static uint32_t *over_lanes(float *, uint32_t *room) { return room; }
#if defined(__AVX512BF16__)
  static HW_INLINE void keep_over_keys(vf even, vf odd, uint32_t *block, int k, int v) {
    const __m512i zip = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22,
                                         6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    store(block + (int64_t)(k / 2) * BQ + v * W, _mm512_permutexvar_epi16(zip, both(even, odd)));
  }
  static HW_INLINE void keep_over_lanes(vf even, vf odd, uint32_t *block, int k, int v) {
    const __m512i rows = both(even, odd);
    uint32_t *to = block + ((int64_t)k * BQ + v * W) / 2;
    store(to, _mm512_castsi512_si256(rows));
    store(to + BQ / 2, _mm512_extracti64x4_epi64(rows, 1));
  }
  static HW_INLINE __m512i both(vf even, vf odd) {
    return (__m512i)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
  }
#else
  static HW_INLINE void keep_over_keys(vf even, vf odd, uint32_t *block, int k, int v) {
    const vu low = __builtin_convertvector(narrow(even), vu), high = __builtin_convertvector(narrow(odd), vu);
    store(block + (int64_t)(k / 2) * BQ + v * W, low | (high << 16));
  }
  static HW_INLINE void keep_over_lanes(vf even, vf odd, uint32_t *block, int k, int v) {
    uint32_t *to = block + ((int64_t)k * BQ + v * W) / 2;
    store(to, narrow(even));
    store(to + BQ / 2, narrow(odd));
  }
  static HW_INLINE vh narrow(vf x) { return (vh)vcvt_bf16_f32((float32x4_t)x); }
#endif
};
#endif

} // namespace HW_ISA

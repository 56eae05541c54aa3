// Small matrix products of the form C[r][lanes] (+)= Σ_k A[r, k] · B[k][lanes], with each element of A
// broadcast over the lanes. A may be traversed in either direction, so it is never transposed.
#pragma once

#include "simd.hpp"

namespace HW_ISA {

// Element types of a product: float32, one k at a time …
struct Float {
  typedef float left, right;
  static constexpr int step = 1; // number of k per element
  static HW_INLINE void add(vf &c, vf a, vf b) { c = fma(a, b, c); }
  static HW_INLINE vf row(const left *p) { return splat(*p); }
  static HW_INLINE vf lanes(const right *p) { return load<vf>(p); }
  typedef vf vector;
};

// … float32 times half precision, which is widened when loaded …
struct ByBFloat : Float {
  typedef uint16_t right;
  static HW_INLINE vf lanes(const right *p) { return widened(load<vh>(p), true); }
};

struct ByHalf : Float {
  typedef uint16_t right;
  static HW_INLINE vf lanes(const right *p) { return widened(load<vh>(p), false); }
};

#if HW_PAIRS
// … or pairs of bfloat16, (k, k + 1) in one 32-bit element, summed in float32.
struct Pair {
  typedef uint32_t left, right;
  static constexpr int step = 2;
  typedef vi vector;
  static HW_INLINE void add(vf &c, vi a, vi b) {
#if defined(__AVX512BF16__)
    c = (vf)_mm512_dpbf16_ps((__m512)c, (__m512bh)a, (__m512bh)b);
#else
    c = (vf)vbfdotq_f32((float32x4_t)c, (bfloat16x8_t)a, (bfloat16x8_t)b);
#endif
  }
  static HW_INLINE vi row(const left *p) {
    int32_t x;
    __builtin_memcpy(&x, p, 4);
    return splat(x);
  }
  static HW_INLINE vi lanes(const right *p) { return load<vi>(p); }
};
#endif

// R rows and N vectors of C in registers. `a_row` and `a_k` are A's strides, `b_k` and `c_row`
// those of B and C, all in elements.
template <class E, int R, int N, bool ADD>
static HW_INLINE void tile(const typename E::left *a, int64_t a_row, int64_t a_k,
                           const typename E::right *b, int64_t b_k, float *c, int64_t c_row, int k) {
  vf sum[R][N];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) sum[r][n] = ADD ? load<vf>(c + r * c_row + n * W) : vf{};
  for (int i = 0; i < k; i++) {
    typename E::vector lanes[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) lanes[n] = E::lanes(b + n * W);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      typename E::vector row = E::row(a + r * a_row);
#pragma GCC unroll 8
      for (int n = 0; n < N; n++) E::add(sum[r][n], row, lanes[n]);
    }
    a += a_k;
    b += b_k;
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) store(c + r * c_row + n * W, sum[r][n]);
}

template <class E, int N, bool ADD>
static HW_INLINE void rows_of(int r, const typename E::left *a, int64_t a_row, int64_t a_k,
                              const typename E::right *b, int64_t b_k, float *c, int64_t c_row, int k) {
  static_assert(MR <= 6, "a case for each number of rows");
  switch (r) {
  case 1: return tile<E, 1, N, ADD>(a, a_row, a_k, b, b_k, c, c_row, k);
  case 2: return tile<E, 2, N, ADD>(a, a_row, a_k, b, b_k, c, c_row, k);
  case 3: return tile<E, 3, N, ADD>(a, a_row, a_k, b, b_k, c, c_row, k);
  case 4: return tile<E, 4, N, ADD>(a, a_row, a_k, b, b_k, c, c_row, k);
  case 5: return tile<E, 5, N, ADD>(a, a_row, a_k, b, b_k, c, c_row, k);
  default: return tile<E, 6, N, ADD>(a, a_row, a_k, b, b_k, c, c_row, k);
  }
}

// The same for at most MR rows and any number of vectors.
template <class E, bool ADD>
static void product(int rows, int vectors, const typename E::left *a, int64_t a_row, int64_t a_k,
                    const typename E::right *b, int64_t b_k, float *c, int64_t c_row, int k) {
  for (; vectors >= NV; vectors -= NV, b += NV * W, c += NV * W)
    rows_of<E, NV, ADD>(rows, a, a_row, a_k, b, b_k, c, c_row, k);
  switch (vectors) {
  case 1: return rows_of<E, 1, ADD>(rows, a, a_row, a_k, b, b_k, c, c_row, k);
  case 2: return rows_of<E, 2 % NV ? 2 : 1, ADD>(rows, a, a_row, a_k, b, b_k, c, c_row, k);
  case 3: return rows_of<E, 3 % NV ? 3 : 1, ADD>(rows, a, a_row, a_k, b, b_k, c, c_row, k);
  default: return;
  }
}

} // namespace HW_ISA

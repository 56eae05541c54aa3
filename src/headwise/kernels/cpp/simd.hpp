// Vectors of this unit's instruction set, by the compiler's vector extensions; intrinsics are used only
// for instructions that these cannot express.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

// Defined if there is an instruction that multiplies and adds pairs of bfloat16.
#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define HW_PAIRS 1
#else
#define HW_PAIRS 0
#endif

#define HW_INLINE inline __attribute__((always_inline))

namespace HW_ISA {

// W lanes per vector; the micro-kernel uses MR × NV vectors, limited by the number of registers.
#if defined(__AVX512F__)
constexpr int W = 16, MR = 6, NV = 4;
#elif defined(__AVX2__)
constexpr int W = 8, MR = 6, NV = 2;
#elif defined(__ARM_FEATURE_SVE_BITS) && __ARM_FEATURE_SVE_BITS == 256
constexpr int W = 8, MR = 6, NV = 4;
#elif defined(__aarch64__)
constexpr int W = 4, MR = 6, NV = 4;
#else
constexpr int W = 4, MR = 3, NV = 4;
#endif

typedef float vf __attribute__((vector_size(W * 4), aligned(W * 4)));
typedef int32_t vi __attribute__((vector_size(W * 4), aligned(W * 4)));
typedef uint32_t vu __attribute__((vector_size(W * 4), aligned(W * 4)));
typedef uint16_t vh __attribute__((vector_size(W * 2), aligned(W * 2)));

constexpr float INF = __builtin_inff(), MOST = __FLT_MAX__;

template <class V, class T> static HW_INLINE V load(const T *p) {
  V v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}

template <class V, class T> static HW_INLINE void store(T *p, V v) { __builtin_memcpy(p, &v, sizeof v); }

static HW_INLINE vf splat(float x) {
#if defined(__AVX512F__)
  return (vf)_mm512_set1_ps(x);
#elif defined(__AVX2__)
  return (vf)_mm256_set1_ps(x);
#else
  return x - vf{}; // −0 stays −0
#endif
}

static HW_INLINE vi splat(int32_t x) {
#if defined(__AVX512F__)
  return (vi)_mm512_set1_epi32(x);
#elif defined(__AVX2__)
  return (vi)_mm256_set1_epi32(x);
#else
  return x + vi{};
#endif
}

// `a` where the mask (of comparisons: all bits or none) is set, else `b`.
static HW_INLINE vf select(vi mask, vf a, vf b) { return mask ? a : b; }

// The smaller of both; `b` where either is NaN.
static HW_INLINE vf smaller(vf a, vf b) {
#if defined(__AVX512F__)
  return (vf)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (vf)_mm256_min_ps((__m256)a, (__m256)b);
#else
  return a < b ? a : b;
#endif
}

// The larger of both; `b` where either is NaN.
static HW_INLINE vf larger(vf a, vf b) {
#if defined(__AVX512F__)
  return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}

static HW_INLINE vf fma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c; // contracted if there is an instruction for it
#endif
}

// Returns true if some lane of a mask is set.
static HW_INLINE bool any_of(vi mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif defined(__AVX2__)
  return _mm256_movemask_ps((__m256)mask) != 0;
#else
  int32_t found = 0;
  for (int i = 0; i < W; i++) found |= mask[i];
  return found != 0;
#endif
}

// 0, 1, 2, …
static HW_INLINE vi lanes_of() {
  vi lane;
  for (int i = 0; i < W; i++) lane[i] = i;
  return lane;
}

// from[index] where the mask is set, elsewhere `other`.
static HW_INLINE vf gathered(vf other, vi mask, const float *from, vi index) {
#if defined(__AVX512F__)
  __mmask16 set = _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask);
  return (vf)_mm512_mask_i32gather_ps((__m512)other, set, (__m512i)index, from, 4);
#else
  for (int i = 0; i < W; i++)
    if (mask[i]) other[i] = from[index[i]];
  return other;
#endif
}

constexpr float LOG2_E = 1.44269504f, LN_2 = 0.69314718f;

// 2^(u·by) for u·by from −126 to 127, within about 1 ulp: 2^n · 2^r with n the nearest integer (least squares of
// the relative error, reweighted until it is level: 2e-9). With AVX-512, n is the nearest sixteenth, and powers of
// its fraction are held in a register, which saves two products. `by` costs nothing, as it is part of required sums.
static HW_INLINE vf exp2_in_range(vf u, vf by) {
#if defined(__AVX512F__)
  const __m512 sixteenths =
      _mm512_setr_ps(1.f, 1.04427373f, 1.09050775f, 1.13878859f, 1.18920708f, 1.24185777f, 1.29683955f, 1.35425556f,
                     1.41421354f, 1.47682619f, 1.54221082f, 1.61049032f, 1.68179286f, 1.75625217f, 1.8340081f, 1.91520655f);
  const vf whole = splat(786432.f); // a sum with it has sixteenths in its last four bits
  vf sum = fma(u, by, whole), n = sum - whole, r = fma(u, by, -n);
  vf power = (vf)_mm512_permutexvar_ps((__m512i)sum, sixteenths);
  vf p = fma(splat(5.550595e-2f), r, splat(2.4023429e-1f));
  p = fma(p, r, splat(6.9314718e-1f));
  return (vf)_mm512_scalef_ps((__m512)fma(p, power * r, power), (__m512)n); // by 2^floor(n)
#else
  const vf whole = splat(12582912.f); // the last bits of the sum are the nearest integer
  vf n = fma(u, by, whole) - whole, r = fma(u, by, -n);
  vf p = splat(1.535336e-4f);
  p = fma(p, r, splat(1.3398875e-3f));
  p = fma(p, r, splat(9.618437e-3f));
  p = fma(p, r, splat(5.5503324e-2f));
  p = fma(p, r, splat(2.4022648e-1f));
  p = fma(p, r, splat(6.931472e-1f));
  p = fma(p, r, splat(1.f));
  vi power = (__builtin_convertvector(n, vi) + 127) << 23;
  return p * (vf)power;
#endif
}

// The factor from logarithms of weights to binary digits, and the least digits whose weight is not 0, as 2 to
// anything below −126 is 0.
struct Digits {
  vf by, least;
  explicit Digits(float factor) : by(splat(factor)), least(splat(factor > 126.f / MOST ? -126.f / factor : -MOST)) {}
};

// A weight 2^(u · digits.by): exactly 0 below digits.least (so for −inf), NaN for NaN.
static HW_INLINE vf weight(vf u, const Digits &digits) {
#if defined(__AVX512F__)
  __mmask16 there = _mm512_cmp_ps_mask((__m512)u, (__m512)digits.least, _CMP_NLT_UQ);
  return (vf)_mm512_maskz_mov_ps(there, (__m512)exp2_in_range(u, digits.by));
#else
  return (vf)((vi)exp2_in_range(larger(digits.least, u), digits.by) & ~(vi)(u < digits.least));
#endif
}

// log(x) for positive normal x, within about 1 ulp (coefficients of Cephes' logf).
static HW_INLINE vf log_positive(vf x) {
  vi bits = (vi)x;
  vi exponent = (bits >> 23) - 126;
  vf m = (vf)((bits & 0x007fffff) | 0x3f000000); // in [0.5, 1)
  vi small = m < splat(0.707106781f);
  vf e = __builtin_convertvector(exponent + small, vf);
  m = select(small, m + m, m) - 1.f;
  vf z = m * m;
  vf p = splat(7.0376836292e-2f);
  p = fma(p, m, splat(-1.1514610310e-1f));
  p = fma(p, m, splat(1.1676998740e-1f));
  p = fma(p, m, splat(-1.2420140846e-1f));
  p = fma(p, m, splat(1.4249322787e-1f));
  p = fma(p, m, splat(-1.6668057665e-1f));
  p = fma(p, m, splat(2.0000714765e-1f));
  p = fma(p, m, splat(-2.4999993993e-1f));
  p = fma(p, m, splat(3.3333331174e-1f));
  vf y = m * z * p;
  y = fma(e, splat(-2.12194440e-4f), y);
  y = fma(z, splat(-0.5f), y);
  return fma(e, splat(0.693359375f), m + y);
}

// tanh(x), within about 2 ulp: a polynomial near 0 (as in Cephes' tanhf), 1 − 2 / (exp(2|x|) + 1) elsewhere.
static HW_INLINE vf tanh_of(vf x) {
  vf a = (vf)((vi)x & 0x7fffffff);
  vf z = x * x;
  vf p = splat(-5.70498872745e-3f);
  p = fma(p, z, splat(2.06390887954e-2f));
  p = fma(p, z, splat(-5.37397155531e-2f));
  p = fma(p, z, splat(1.33314422036e-1f));
  p = fma(p, z, splat(-3.33332819422e-1f));
  vf near = fma(p * z, x, x);
  vf capped = a > splat(9.f) ? splat(9.f) : a;
  vf far = 1.f - 2.f / (exp2_in_range(capped, splat(2 * LOG2_E)) + 1.f);
  far = (vf)((vi)far | ((vi)x & (vi)splat((int32_t)0x80000000)));
  vf found = select(a < splat(0.625f), near, far);
  return select(x == x, found, x);
}

// Interleaves the low halves of two vectors, and the high halves.
#if defined(__AVX512F__)
static HW_INLINE void interleave(vf a, vf b, vf &low, vf &high) {
  const __m512i l = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i h = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  low = (vf)_mm512_permutex2var_ps((__m512)a, l, (__m512)b);
  high = (vf)_mm512_permutex2var_ps((__m512)a, h, (__m512)b);
}
#elif defined(__AVX2__)
static HW_INLINE void interleave(vf a, vf b, vf &low, vf &high) {
  __m256 even = _mm256_unpacklo_ps((__m256)a, (__m256)b), odd = _mm256_unpackhi_ps((__m256)a, (__m256)b);
  low = (vf)_mm256_permute2f128_ps(even, odd, 0x20);
  high = (vf)_mm256_permute2f128_ps(even, odd, 0x31);
}
#else
static HW_INLINE void interleave(vf a, vf b, vf &low, vf &high) {
  for (int i = 0; i < W / 2; i++) {
    low[2 * i] = a[i], low[2 * i + 1] = b[i];
    high[2 * i] = a[W / 2 + i], high[2 * i + 1] = b[W / 2 + i];
  }
}
#endif

// Transposes W × W elements: log2(W) times, the first half is interleaved with the second.
static HW_INLINE void turn(vf x[W]) {
#pragma GCC unroll 4
  for (int stage = 1; stage < W; stage *= 2) {
    vf y[W];
#pragma GCC unroll 16
    for (int i = 0; i < W / 2; i++) interleave(x[i], x[i + W / 2], y[2 * i], y[2 * i + 1]);
#pragma GCC unroll 16
    for (int i = 0; i < W; i++) x[i] = y[i];
  }
}

// The sums of W vectors, one per lane.
static HW_INLINE vf sums_of(vf x[W]) {
#pragma GCC unroll 4
  for (int half = W / 2; half > 0; half /= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < half; i++) {
      vf low, high;
      interleave(x[i], x[i + half], low, high);
      x[i] = low + high;
    }
  }
  return x[0];
}

static HW_INLINE float sum_of(vf v) {
  float part[W];
  store(part, v);
  for (int width = W / 2; width; width /= 2)
    for (int i = 0; i < width; i++) part[i] += part[i + width];
  return part[0];
}

static HW_INLINE float largest_of(vf v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#else
  float found = v[0];
  for (int i = 1; i < W; i++) found = v[i] > found ? v[i] : found;
  return found;
#endif
}

// ── half precision ──────────────────────────────────────────────────────────────────────────────

static HW_INLINE float from_bf16(uint16_t x) {
  uint32_t bits = (uint32_t)x << 16;
  float f;
  __builtin_memcpy(&f, &bits, 4);
  return f;
}

static HW_INLINE uint16_t to_bf16(float x) { // to nearest, ties to even; NaN stays NaN
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  if (x != x) return (uint16_t)((bits >> 16) | 0x40);
  return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static inline float from_fp16(uint16_t x) {
#if defined(__F16C__)
  return _cvtsh_ss(x);
#else
  uint32_t sign = (uint32_t)(x & 0x8000) << 16, rest = x & 0x7fff, bits;
  if (rest >= 0x7c00) {
    bits = sign | 0x7f800000 | ((rest & 0x3ff) << 13);
  } else if (rest >= 0x400) {
    bits = sign | ((rest + (112 << 10)) << 13);
  } else {
    float f = (float)rest * 5.9604644775390625e-8f; // 2^-24
    __builtin_memcpy(&bits, &f, 4);
    bits |= sign;
  }
  float f;
  __builtin_memcpy(&f, &bits, 4);
  return f;
#endif
}

static inline uint16_t to_fp16(float x) {
#if defined(__F16C__)
  return _cvtss_sh(x, 0);
#else
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  uint32_t sign = (bits >> 16) & 0x8000, rest = bits & 0x7fffffff;
  if (rest > 0x7f800000) return (uint16_t)(sign | 0x7e00);
  if (rest >= 0x47800000) return (uint16_t)(sign | 0x7c00);
  if (rest < 0x38800000) { // subnormal: an addition rounds at 2^-24
    float f, half = 0.5f;
    __builtin_memcpy(&f, &rest, 4);
    f += half;
    uint32_t sum;
    __builtin_memcpy(&sum, &f, 4);
    return (uint16_t)(sign | (sum - 0x3f000000));
  }
  rest += 0xc8000fff + ((rest >> 13) & 1);
  return (uint16_t)(sign | (rest >> 13));
#endif
}

static HW_INLINE vf widened(vh x, bool bfloat) {
  if (bfloat) return (vf)(__builtin_convertvector(x, vu) << 16);
#if defined(__AVX512F__)
  return (vf)_mm512_cvtph_ps((__m256i)x);
#elif defined(__F16C__)
  return (vf)_mm256_cvtph_ps((__m128i)x);
#else
  vf y;
  for (int i = 0; i < W; i++) y[i] = from_fp16(x[i]);
  return y;
#endif
}

// Converts n elements of a tensor's dtype to float32 and back.
static inline void widen(const uint16_t *from, float *to, int64_t n, bool bfloat) {
  int64_t i = 0;
  for (; i + W <= n; i += W) store(to + i, widened(load<vh>(from + i), bfloat));
  for (; i < n; i++) to[i] = bfloat ? from_bf16(from[i]) : from_fp16(from[i]);
}

static inline void narrow(const float *from, uint16_t *to, int64_t n, bool bfloat) {
  int64_t i = 0;
  if (bfloat) {
    for (; i + W <= n; i += W) {
      vu bits = load<vu>(from + i);
      vf x = (vf)bits;
      vu rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
      vu nan = (bits >> 16) | 0x40;
      store(to + i, __builtin_convertvector((vu)(x == x ? (vi)rounded : (vi)nan), vh));
    }
    for (; i < n; i++) to[i] = to_bf16(from[i]);
    return;
  }
#if defined(__AVX512F__)
  for (; i + 16 <= n; i += 16)
    store(to + i, _mm512_cvtps_ph(_mm512_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
  for (; i + 8 <= n; i += 8)
    store(to + i, _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
#endif
  for (; i < n; i++) to[i] = to_fp16(from[i]);
}

} // namespace HW_ISA

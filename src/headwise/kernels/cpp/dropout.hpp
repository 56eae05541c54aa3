// Dropout: Philox4x32 (Salmon, Moraes, Dror and Shaw 2011) on seed, batch, head, query and key, so that every
// unit, thread and order of blocks drops the same weights, and the backward pass drops them again. It uses 7
// rounds, the fewest that pass BigCrush (their table 2); FlashAttention uses as many.
//
// The seed is the generator's key, and its counter is (key / 4, query / 2, head, batch). Of the four words, even
// queries use the second and the fourth, odd ones the first and the third; each word has one half for each of two
// keys, the low half for the even key. A weight is dropped if its half, as a signed number, is below dropped − 2^15.
#pragma once

#include "lanes.hpp"

namespace HW_ISA {

typedef uint64_t vq __attribute__((vector_size(W * 4), aligned(W * 4))); // one sample per lane, its words in low halves

// Returns the low halves times a number.
static HW_INLINE vq times(vq x, uint32_t factor) {
#if defined(__AVX512F__)
  return (vq)_mm512_mul_epu32((__m512i)x, _mm512_set1_epi64(factor));
#elif defined(__AVX2__)
  return (vq)_mm256_mul_epu32((__m256i)x, _mm256_set1_epi64x(factor));
#elif defined(__SSE2__)
  return (vq)_mm_mul_epu32((__m128i)x, _mm_set1_epi64x(factor));
#else
  return (x & 0xffffffff) * (uint64_t)factor;
#endif
}

// The dropout masks of a block of queries for up to BK keys.
struct Drops {
  static constexpr uint32_t M0 = 0xD2511F53, M1 = 0xCD9E8D57;
  static constexpr int ROUNDS = 7;

  static int64_t room(const Call &c, int keys) { return c.dropped ? (keys / 2 + 2) * BQ : 0; } // words

  const bool any;
  const vi limit;
  uint32_t *const words; // [pair of keys][lane]
  uint32_t key0[ROUNDS], key1[ROUNDS], head, batch;
  vq pairs[VQ]; // the second round's product with M0, the same for all keys
  int32_t first = 0; // pair of keys

  Drops(const Call &c, int64_t b, int64_t h, int64_t i0, uint32_t *words)
      : any(c.dropped != 0), limit(splat((int32_t)((c.dropped - 32768) * 65536))), words(words) {
    if (!any) return;
    for (int r = 0; r < ROUNDS; r++) {
      key0[r] = (uint32_t)c.seed + (uint32_t)r * 0x9E3779B9u;
      key1[r] = (uint32_t)(c.seed >> 32) + (uint32_t)r * 0xBB67AE85u;
    }
    const uint64_t product = (uint64_t)M1 * (uint32_t)h;
    head = (uint32_t)product, batch = (uint32_t)b ^ key1[0];
    for (int v = 0; v < VQ; v++) {
      vq pair;
      for (int l = 0; l < W / 2; l++) pair[l] = (uint32_t)(i0 / 2 + v * (W / 2) + l) ^ (product >> 32) ^ key0[0];
      pairs[v] = times(pair, M0);
    }
  }

  // Samples for keys j0 … j0 + n − 1 and the lanes that may see them. The parts of the first three rounds that
  // are the same for all queries or all keys are computed separately.
  void draw(const Lanes &lanes, int32_t j0, int n, bool open) {
    if (!any) return;
    first = (j0 & ~3) / 2;
    for (int32_t j = j0 & ~3; j < j0 + n; j += 4) {
      int from = 0, to = lanes.vectors;
      if (!open) lanes.active(j, j + 4, from, to);
      const uint64_t one = (uint64_t)M0 * (uint32_t)(j / 4);
      const uint64_t two = (uint64_t)M1 * ((uint32_t)(one >> 32) ^ batch);
      const uint64_t three = (uint64_t)M0 * ((uint32_t)(two >> 32) ^ head ^ key0[1]);
      const uint64_t in_two = (uint32_t)one ^ key1[1], even = (uint32_t)two ^ key0[2], odd = (three >> 32) ^ key1[2];
      uint32_t *to_words = words + (j / 2 - first) * BQ;
      for (int v = from; v < to; v++) {
        vq x1 = times((pairs[v] >> 32) ^ in_two, M1), x0 = (x1 >> 32) ^ even, x2 = pairs[v] ^ odd;
        vq x3 = vq{} + (uint64_t)(uint32_t)three;
#pragma GCC unroll 8
        for (int r = 3; r < ROUNDS - 1; r++) { // high halves are unused
          vq low = times(x0, M0), high = times(x2, M1);
          x0 = (high >> 32) ^ x1 ^ (uint64_t)key0[r], x2 = (low >> 32) ^ x3 ^ (uint64_t)key1[r];
          x1 = high, x3 = low;
        }
        store(to_words + v * W, times(x2, M1) ^ ((x1 ^ (uint64_t)key0[ROUNDS - 1]) << 32));
        store(to_words + BQ + v * W, times(x0, M0) ^ ((x3 ^ (uint64_t)key1[ROUNDS - 1]) << 32));
      }
    }
  }

  // Returns the weights of a sampled key, 0 if dropped.
  HW_INLINE vf keep(vf p, int32_t key, int v) const {
    vi word = load<vi>(words + (key / 2 - first) * BQ + v * W);
    if (key % 2 == 0) word <<= 16;
    return select(word < limit, vf{}, p);
  }
};

} // namespace HW_ISA

// Bfloat16 in AMX tiles: 16 rows of 16 pairs, multiplied by 16 pairs of 16 lanes and summed in float32. Layouts
// are those of pairs, except for left operands of sums over keys, where values and keys are transposed.
#pragma once

#include "operands.hpp"

#if defined(__AMX_BF16__) && defined(__AMX_TILE__)
#define HW_TILES 1
#else
#define HW_TILES 0
#endif

namespace HW_ISA {

// Rows [n][wide] from [d][lane].
static inline void turn_back(const float *turned, int64_t wide, int n, float *rows) {
  for (int i = 0; i < n; i += W)
    for (int64_t d = 0; d < wide; d += W) {
      vf x[W];
#pragma GCC unroll 16
      for (int e = 0; e < W; e++) x[e] = load<vf>(turned + (d + e) * BQ + i);
      turn(x);
      for (int e = 0; e < W && i + e < n; e++) store(rows + (i + e) * wide + d, x[e]);
    }
}

#if HW_TILES

// Tiles 0 to 3 hold sums, 4 holds rows, 5 to 7 hold lanes.
template <int N, bool ADD>
static HW_INLINE void tile_of(const uint32_t *a, int64_t a_row, const uint32_t *b, int64_t b_k, float *c,
                              int64_t c_row, int pairs) {
  const int64_t by_a = a_row * 4, by_b = b_k * 4, by_c = c_row * 4;
  if (ADD) {
    _tile_loadd(0, c, by_c);
    if (N > 1) _tile_loadd(1, c + 16, by_c);
    if (N > 2) _tile_loadd(2, c + 32, by_c);
    if (N > 3) _tile_loadd(3, c + 48, by_c);
  } else {
    _tile_zero(0);
    if (N > 1) _tile_zero(1);
    if (N > 2) _tile_zero(2);
    if (N > 3) _tile_zero(3);
  }
  for (int k = 0; k < pairs; k += 16, a += 16, b += 16 * b_k) {
    _tile_loadd(4, a, by_a);
    _tile_loadd(5, b, by_b);
    _tile_dpbf16ps(0, 4, 5);
    if (N > 1) {
      _tile_loadd(6, b + 16, by_b);
      _tile_dpbf16ps(1, 4, 6);
    }
    if (N > 2) {
      _tile_loadd(7, b + 32, by_b);
      _tile_dpbf16ps(2, 4, 7);
    }
    if (N > 3) {
      _tile_loadd(5, b + 48, by_b);
      _tile_dpbf16ps(3, 4, 5);
    }
  }
  _tile_stored(0, c, by_c);
  if (N > 1) _tile_stored(1, c + 16, by_c);
  if (N > 2) _tile_stored(2, c + 32, by_c);
  if (N > 3) _tile_stored(3, c + 48, by_c);
}

// C[row][lanes] (+)= Σ A[row][pair] · B[pair][lanes]; rows and pairs are multiples of 16.
template <bool ADD>
static void tiles(int rows, int vectors, const uint32_t *a, int64_t a_row, const uint32_t *b, int64_t b_k, float *c,
                  int64_t c_row, int pairs) {
  for (int v = 0; v < vectors; v += 4)
    for (int r = 0; r < rows; r += 16) {
      const uint32_t *left = a + r * a_row, *right = b + v * W;
      float *to = c + r * c_row + v * W;
      switch (vectors - v) {
      case 1: tile_of<1, ADD>(left, a_row, right, b_k, to, c_row, pairs); break;
      case 2: tile_of<2, ADD>(left, a_row, right, b_k, to, c_row, pairs); break;
      case 3: tile_of<3, ADD>(left, a_row, right, b_k, to, c_row, pairs); break;
      default: tile_of<4, ADD>(left, a_row, right, b_k, to, c_row, pairs);
      }
    }
}

struct InTiles : InPairs {
  static constexpr bool TILES = true;
  static constexpr int BK = 128, GROUP = 16;

  static int whole(int rows) { return (rows + 15) / 16 * 16; }
  static int pairs_of(int rows) { return whole((rows + 1) / 2); }
  static int64_t depth(int64_t width) { return padded((width + 1) / 2); }
  static int64_t across_room(int64_t width, int rows) { return whole(rows) * depth(width); }
  static int64_t down_room(int64_t width, int rows) { return pairs_of(rows) * padded(width); }
  static int64_t block_room(int keys) { return pairs_of(keys) * BQ; }

  // The thread's tiles, 16 rows of 64 bytes each; the previous configuration is restored afterwards.
  class Session {
    alignas(64) uint8_t theirs[64];

  public:
    Session() {
      alignas(64) uint8_t ours[64] = {1}; // palette 1
      for (int i = 0; i < 8; i++) ours[16 + 2 * i] = 64, ours[48 + i] = 16;
      _tile_storeconfig(theirs);
      _tile_loadconfig(ours);
    }
    ~Session() { _tile_loadconfig(theirs); }
    Session(const Session &) = delete;
  };

  static void dots(int rows, int vectors, const uint32_t *left, int64_t stride, const uint32_t *right, float *to,
                   int depth) {
    tiles<false>(whole(rows), vectors, left, stride, right, BQ, to, BQ, depth);
  }

  // C += A · B, with the layouts of tiles().
  static void add(int rows, int vectors, const uint32_t *a, int64_t a_row, const uint32_t *b, int64_t b_k, float *c,
                  int64_t c_row, int pairs) {
    tiles<true>(rows, vectors, a, a_row, b, b_k, c, c_row, pairs);
  }

  static Matrix<uint32_t> across(const Call &, const void *tensor, int64_t at, int64_t stride, int n, int64_t width,
                                 uint32_t *room) {
    const int64_t wide = depth(width);
    if (n == whole(n)) return pairs(tensor, at, stride, n, width, wide, room);
    for (int i = 0; i < whole(n); i++) {
      uint16_t *row = (uint16_t *)(room + i * wide);
      __builtin_memset(row, 0, wide * sizeof(uint32_t));
      if (i < n) __builtin_memcpy(row, (const uint16_t *)tensor + at + i * stride, width * sizeof(uint16_t));
    }
    return {room, wide};
  }

  // As for pairs, padded with zeros to whole tiles.
  static Matrix<uint32_t> down(const Call &c, const void *tensor, int64_t at, int64_t stride, int n, int64_t width,
                               uint32_t *room) {
    const Matrix<uint32_t> found = InPairs::down(c, tensor, at, stride, n, width, room);
    const int some = (n + 1) / 2;
    __builtin_memset(room + some * found.stride, 0, (pairs_of(n) - some) * found.stride * sizeof(uint32_t));
    return found;
  }

  // to[d][pair of rows], BK / 2 pairs per line, padded with zeros to whole tiles. False if some element is not finite.
  static bool turn_pairs(const void *tensor, int64_t at, int64_t stride, int n, int64_t width, uint32_t *to) {
    const uint16_t *from = (const uint16_t *)tensor + at;
    vi odd{};
    for (int r = 0; r < 2 * pairs_of(n); r += 2 * W)
      for (int64_t d = 0; d < width; d += W) {
        vf x[W];
        const int count = (int)least(W, width - d);
        auto row = [&](int i) {
          if (i >= n) return vu{};
          const uint16_t *numbers = from + i * stride + d;
          if (count == W) return (vu)__builtin_convertvector(load<vh>(numbers), vu);
          vh some{};
          __builtin_memcpy(&some, numbers, count * sizeof(uint16_t));
          return (vu)__builtin_convertvector(some, vu);
        };
#pragma GCC unroll 16
        for (int i = 0; i < W; i++) {
          const vu pair = row(r + 2 * i) | (row(r + 2 * i + 1) << 16);
          odd |= (vi)((pair & 0x7f80) == 0x7f80) | (vi)((pair & 0x7f800000) == 0x7f800000);
          x[i] = (vf)pair;
        }
        turn(x);
#pragma GCC unroll 16
        for (int i = 0; i < W; i++) store(to + (d + i) * (BK / 2) + r / 2, x[i]);
      }
    return !any_of(odd);
  }
  static int64_t turned_room(int64_t width) { return padded(width) * (BK / 2); }

  // Sets the weights of the keys after the n of a block to 0, up to whole tiles.
  static void clear_keys(uint32_t *block, int n) {
    const int some = (n + 1) / 2;
    __builtin_memset(block + some * BQ, 0, (pairs_of(n) - some) * BQ * sizeof(uint32_t));
  }
};

#endif

} // namespace HW_ISA

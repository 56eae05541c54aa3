// Sums of P over queries, given the log-sum-exp: the weight that every key receives, and maps by blocks. Here
// keys are lanes and queries are rows, so that a key's sum takes one addition per weight.
#pragma once

#include "norms.hpp"

namespace HW_ISA {

template <class In> struct Sums {
  typedef typename In::element E;
  typedef headwise::Scratch Scratch;
  static constexpr int ROWS = 48; // queries per block

  const Call &c;
  const int64_t tiles; // tiles of BQ keys
  Norms<In> norms;

  explicit Sums(const Call &call) : c(call), tiles((c.keys + BQ - 1) / BQ), norms(c) {}

  struct Room {
    E *keys, *rows;
    float *scores;
    Room(Scratch &s, const Call &c)
        : keys(s.take<E>(padded(In::depth(c.dim)) * BQ)), rows(s.take<E>(In::across_room(c.dim, BQ))),
          scores(s.take<float>(ROWS * BQ)) {}
    static int64_t bytes(const Call &c) {
      return Scratch::size_of<E>(padded(In::depth(c.dim)) * BQ) + Scratch::size_of<E>(In::across_room(c.dim, BQ)) +
             Scratch::size_of<float>(ROWS * BQ);
    }
  };

  // One tile of keys of one head, over all queries.
  void tile_of(Room &w, int64_t b, int64_t h, int64_t tile) const {
    const int32_t j0 = (int32_t)(tile * BQ);
    const int n = (int)least(BQ, c.keys - j0);
    const int64_t g = h / (c.heads / c.kv_heads), head = b * c.heads + h;
    const Digits digits = digits_of(c);
    headwise::Steps steps(c.control);
    float *map = c.map ? c.map + head * c.blocks * c.blocks : nullptr;
    vi lanes[VQ];
    vf received[VQ] = {}, run[VQ] = {};
    for (int v = 0; v < VQ; v++)
      for (int i = 0; i < W; i++) lanes[v][i] = j0 + v * W + i;
    int32_t block = -1; // the block of queries of `run`
    auto flush = [&] {
      alignas(64) float sums[BQ];
      for (int v = 0; v < VQ; v++) store(sums + v * W, run[v]), run[v] = vf{};
      for (int j = 0; block >= 0 && j < n;) { // first sums the keys of one block, then adds them to the map
        const int32_t of = c.key_block[j0 + j];
        float part = 0.f;
        for (; j < n && c.key_block[j0 + j] == of; j++) part += sums[j];
        map[block * c.blocks + of] += part;
      }
    };
    bool laid = false;
    for (int64_t i0 = 0; i0 < c.queries && !steps.stopped(); i0 += ROWS) {
      const int rows = (int)least(ROWS, c.queries - i0);
      int32_t low[ROWS], high[ROWS];
      int from = rows, to = 0;
      for (int i = 0; i < rows; i++) {
        int64_t first, last;
        range_of(c, b, h, i0 + i, first, last);
        low[i] = (int32_t)first, high[i] = (int32_t)last;
        if (first < j0 + n && j0 < last) from = (int)least(from, i), to = i + 1;
      }
      if (from >= to) continue;
      if (!laid) {
        In::lay(c, c.k, place(c.k_stride, b, g, j0), c.k_stride[2], n, c.dim, w.rows, w.keys);
        if (c.sign != 1.f) In::change_sign(c, w.keys, c.dim);
        laid = true;
      }
      Matrix<E> q =
          In::across(c, c.q, place(c.q_stride, b, h, i0 + from), c.q_stride[2], to - from, c.dim, w.rows);
      for (int i = from; i < to; i += MR)
        product<typename In::Product, false>((int)least(MR, to - i), VQ, q.data + (i - from) * q.stride, q.stride, 1,
                                             w.keys, BQ, w.scores + (int64_t)i * BQ, BQ, (int)In::depth(c.dim));
      vf part[VQ] = {};
      for (int i = from; i < to; i++) {
        float *row = w.scores + (int64_t)i * BQ;
        const int64_t at = head * c.queries + i0 + i;
        if (c.lse[at] == -INF) continue;
        if (!c.plain) finish_row(c, c.scale, b, h, i0 + i, j0, n, row);
        const bool open = low[i] <= j0 && j0 + BQ <= high[i];
        const vf rest = splat(norms.rest(at)), counts = splat(c.weight ? c.weight[i0 + i] : 1.f);
        if (const float top = norms.top(at); top != 0.f)
          for (int v = 0; v < VQ; v++) store(row + v * W, load<vf>(row + v * W) - top);
        if (map && c.query_block[i0 + i] != block) {
          flush();
          block = c.query_block[i0 + i];
        }
        for (int v = 0; v < VQ; v++) {
          vf t = above(load<vf>(row + v * W), rest);
          if (!open) t = select((lanes[v] >= splat(low[i])) & (lanes[v] < splat(high[i])), t, splat(-INF));
          vf p = weight(t, digits) * counts;
          part[v] += p;
          if (map) run[v] += p;
        }
      }
      for (int v = 0; v < VQ; v++) received[v] += part[v];
    }
    if (map) flush();
    if (!c.received) return;
    alignas(64) float sums[BQ];
    for (int v = 0; v < VQ; v++) store(sums + v * W, received[v]);
    __builtin_memcpy(c.received + head * c.keys + j0, sums, n * sizeof(float));
  }

  int run() {
    if (!norms.make()) return HW_NO_MEMORY;
    // Entries of a map are sums over several tiles, so one task has all tiles of a head.
    const int64_t at_a_time = c.map ? tiles : 1, parts = (tiles + at_a_time - 1) / at_a_time;
    auto work = [&](int64_t task, Scratch &scratch) {
      Room w(scratch, c);
      const int64_t head = task / parts, first = task % parts * at_a_time;
      if (c.map) __builtin_memset(c.map + head * c.blocks * c.blocks, 0, c.blocks * c.blocks * sizeof(float));
      for (int64_t tile = first; tile < least(tiles, first + at_a_time); tile++)
        tile_of(w, head / c.heads, head % c.heads, tile);
    };
    const bool done = headwise::for_each_task(c.control, c.batch * c.heads * parts, c.threads, Room::bytes(c), work);
    return done ? HW_OK : HW_NO_MEMORY;
  }
};

} // namespace HW_ISA

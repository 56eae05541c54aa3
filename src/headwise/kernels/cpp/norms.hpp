// The normalization of each row of weights, from its log-sum-exp. If that is large, float32 has no digits left
// for the log of a sum (for n equal scores of −3e38 it is −3e38 again, and no weight is 1/n). Such rows are
// processed again to get their largest score and the log of their sum separately.
#pragma once

#include "forward.hpp"

namespace HW_ISA {

// The log of a weight from its score (minus the row's top) and the rest. No weight exceeds 1: if products of a
// score cancel, another order of summation gives another score, which may be above the row's sum.
static HW_INLINE vf above(vf score, vf rest) { return smaller(vf{}, score - rest); }

// A row's weights are 2^((score − top − rest) · digits), with scores in the units of the kernel.
template <class In> class Norms {
public:
  static constexpr float LARGE = 4096.f; // log-sum-exp from which its rounding is visible in the weights

  explicit Norms(const Call &call) : c(call), blocks((c.queries + BQ - 1) / BQ) {}
  ~Norms() { std::free(found_); }
  Norms(const Norms &) = delete;

  // Computes the normalization; returns false if memory cannot be allocated.
  bool make() {
    const int64_t rows = c.batch * c.heads * c.queries;
    bool any = false;
    for (int64_t row = 0; row < rows && !any; row++) any = large(c.lse[row]);
    if (!any) return true;
    found_ = (float *)std::malloc((size_t)(2 * rows) * sizeof(float));
    if (!found_) return false;
    Call scores = c; // and nothing else
    scores.v = nullptr, scores.value_dim = 0, scores.first = scores.previous = scores.self = nullptr;
    auto work = [&](int64_t task, headwise::Scratch &room) { block(scores, task, room); };
    return headwise::for_each_task(c.control, c.batch * c.heads * blocks, c.threads, Workspace<In>::bytes(scores), work);
  }

  bool large(float lse) const { return lse > LARGE || (lse < -LARGE && lse != -INF); }
  float top(int64_t row) const { return large(c.lse[row]) ? found_[2 * row] : 0.f; }
  float rest(int64_t row) const { return large(c.lse[row]) ? found_[2 * row + 1] : c.lse[row] / c.unit; }

  // The log of a sink's weight.
  float of_sink(float sink, int64_t row) const {
    return large(c.lse[row]) ? above_top(sink, top(row)) - rest(row) * c.unit : sink - c.lse[row];
  }

private:
  // The excess of a sink over a row's top, at most the value at which it takes all the weight, as more would
  // leave no digits for the log of a sum.
  float above_top(float sink, float top) const {
    const float above = sink - top * c.unit;
    return above < 200.f ? above : 200.f;
  }

  const Call &c;
  const int64_t blocks;
  float *found_ = nullptr;

  void block(const Call &scores, int64_t task, headwise::Scratch &room) {
    const int64_t i0 = task % blocks * BQ, head = task / blocks, b = head / c.heads, h = head % c.heads;
    const int n = (int)least(BQ, c.queries - i0);
    const int64_t row0 = head * c.queries + i0;
    bool any = false;
    for (int i = 0; i < n; i++) any |= large(c.lse[row0 + i]);
    if (!any) return;
    Workspace<In> w(room, scores);
    pass_over<In, false>(scores, b, h, i0, n, 0, 1, w);
    for (int i = 0; i < n; i++) {
      const float top = w.run.top[i] == -INF ? 0.f : w.run.top[i];
      float sum = w.run.sum[i], above = 0.f;
      if (c.sinks) {
        const float sink = above_top(c.sinks[h], top);
        above = sink > 0.f ? sink : 0.f;
        sum = sum * std::exp(-above) + std::exp(sink - above);
      }
      found_[2 * (row0 + i)] = top;
      found_[2 * (row0 + i) + 1] = (above + std::log(sum)) / c.unit;
    }
  }
};

} // namespace HW_ISA

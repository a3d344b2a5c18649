// SPDX-License-Identifier: Apache-2.0
// The end of a row, its stats, and the sink: an additional term of each row's sum. The sink is
// added after the loop over tiles, from its maximum (natural units) and sum, so a sum of 0 still
// marks a row without visible keys.
#pragma once

#include "cuda/attention/params.h"
#include "cuda/tile/numbers.cuh"
#include "cuda/tile/vectors.cuh"

namespace pt::cuda {

// Return the sink, or -inf without sinks. +inf becomes half of the largest float; NaN stays.
PT_DEVICE float sink_of(const AttentionProblem& p, int h) {
  constexpr float most = 1.7014118e38f;
  const float sink = p.sinks ? load_one(p.sinks + h) : minus_infinity();
  return sink > most ? most : sink;
}

// Add the sink to a row's maximum and sum; return alpha, the rescale of older sums.
PT_DEVICE float add_sink(float sink, float& row_max, float& sum) {
  const float top = fmaxf(row_max, sink), alpha = ptx::exp2((row_max - top) * kLog2e);
  sum = ptx::fma_rn(sum, alpha, ptx::exp2((sink - top) * kLog2e)), row_max = top;
  return alpha;
}

// If a query sees a key, lse > sink: return lse raised by an ulp or two if rounding made them
// equal. So lse shows which queries see no key.
PT_DEVICE float above_sink(float lse, float sink) {
  if (sink == minus_infinity()) return lse;
  const float least = sink + fmaxf(fabsf(sink) * 1.1920929e-7f, 1.17549435e-38f);
  return lse < least ? least : lse;
}

// Return the factor of a partial's sum and values in a merge, from the maxima of the partial and
// the row in natural units. A partial without visible keys has a sum of 0.
PT_DEVICE float weight_of_part(float part_max, float part_sum, float row_max) {
  if (part_sum == 0.0f) return 0.0f;
  return ptx::exp2((part_max - row_max) * kLog2e);
}

// Results of a row.
struct RowEnd {
  float factor;             // multiplies the row's outputs
  float row_max, log2_sum;  // +inf and 0 without visible keys
  float lse;
};
// From the row's maximum in natural units and its sum (0 without visible keys); rows past the last
// query have no results.
PT_DEVICE RowEnd end_row(const AttentionProblem& p, int h, bool is_query, float row_max,
                         float sum) {
  const float sink = sink_of(p, h);
  if (!is_query || sum == 0.0f) return {0.0f, infinity(), 0.0f, is_query ? sink : minus_infinity()};
  float scale = p.keep_scale;
  if (sink != minus_infinity()) scale *= add_sink(sink, row_max, sum);
  const float log2_sum = ptx::log2(sum);
  return {ptx::div_rn(scale, sum), row_max, log2_sum,
          above_sink(ptx::fma_rn(log2_sum, kLn2, row_max), sink)};
}

// Row stats: the maximum in natural units (or lse; +inf for a row without visible keys), log2 of
// the sum, and delta.
struct RowStats {
  float row_max, log2_sum, delta;
};
PT_DEVICE RowStats read_row_stats(const AttentionBackward& g, int64_t at, bool here) {
  return {here ? load_one(g.row_max + at) : infinity(),
          here && g.log2_sum ? load_one(g.log2_sum + at) : 0.0f,
          here ? load_one(g.delta + at) : 0.0f};
}

}  // namespace pt::cuda

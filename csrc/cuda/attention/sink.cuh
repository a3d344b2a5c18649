// SPDX-License-Identifier: Apache-2.0
// How a row of attention ends, and a head's sink: one more term of each row's sum. It is added at the end, from its maximum (natural units)
// and sum, so that the loops over tiles know nothing of it and a row that saw nothing is still known by a sum of 0.
#pragma once

#include "cuda/attention/problem.h"
#include "cuda/tile/numbers.cuh"
#include "cuda/tile/vectors.cuh"

namespace pt::cuda {

// -inf for none. +inf counts as half of the largest number; a NaN stays.
PT_DEVICE float sink_of(const AttentionProblem& p, int h) {
  constexpr float most = 1.7014118e38f;
  const float sink = p.sinks ? load_one(p.sinks + h) : minus_infinity();
  return sink > most ? most : sink;
}

// Adds it to a row's maximum and sum, and returns what older sums are multiplied by.
PT_DEVICE float add_sink(float sink, float& row_max, float& sum) {
  const float top = fmaxf(row_max, sink), alpha = ptx::exp2((row_max - top) * kLog2e);
  sum = ptx::fma_rn(sum, alpha, ptx::exp2((sink - top) * kLog2e)), row_max = top;
  return alpha;
}

// The lse of a query that sees a key is above its sink, by one or two ulp if rounding lost the difference: so lse tells which see none.
PT_DEVICE float above_sink(float lse, float sink) {
  if (sink == minus_infinity()) return lse;
  const float least = sink + fmaxf(fabsf(sink) * 1.1920929e-7f, 1.17549435e-38f);
  return lse < least ? least : lse;
}

// By what the sum and the values of a part of a row's keys are multiplied where parts are put together: from the part's own maximum, in
// natural units, and the row's. A part in which the row saw nothing has a sum of 0.
PT_DEVICE float weight_of_part(float part_max, float part_sum, float row_max) {
  if (part_sum == 0.0f) return 0.0f;
  return ptx::exp2((part_max - row_max) * kLog2e);
}

// What a row leaves.
struct RowEnd {
  float factor;             // by which its outputs are multiplied
  float row_max, log2_sum;  // +inf and 0 if it saw nothing
  float lse;
};
// From its maximum in natural units and its sum, 0 if it saw nothing; rows past the last query are none.
PT_DEVICE RowEnd end_row(const AttentionProblem& p, int h, bool is_query, float row_max, float sum) {
  const float sink = sink_of(p, h);
  if (!is_query || sum == 0.0f) return {0.0f, infinity(), 0.0f, is_query ? sink : minus_infinity()};
  float scale = p.keep_scale;
  if (sink != minus_infinity()) scale *= add_sink(sink, row_max, sum);
  const float log2_sum = ptx::log2(sum);
  return {ptx::div_rn(scale, sum), row_max, log2_sum, above_sink(ptx::fma_rn(log2_sum, kLn2, row_max), sink)};
}

}  // namespace pt::cuda

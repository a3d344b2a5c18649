// SPDX-License-Identifier: Apache-2.0
// Attention forward of few queries: the splits of each row put together, in order.
//
//   m = max_s m_s;  l = sum_s l_s e^(m_s - m);  out = sum_s o_s e^(m_s - m) / l * keep_scale;  lse = m + ln l
//
// A warp has a row, a lane two neighbouring columns of every 64. A split in which the row saw nothing has l_s = 0, and is not read.
#pragma once

#include "cuda/attention/sequence.cuh"
#include "cuda/attention/sink.cuh"
#include "cuda/attention/splits.h"
#include "cuda/tile/reduce.cuh"

namespace pt::cuda {

PT_DEVICE Sum2 load_two(const float* p) {
  const uint64_t both = ptx::ld_global_u64(p);
  return {ptx::bits_float(uint32_t(both)), ptx::bits_float(uint32_t(both >> 32))};
}

// By what a split's sum and values are multiplied.
PT_DEVICE float weight_of_split(const Sum2& stats, float row_max) {
  if (stats.b == 0.0f) return 0.0f;
  return PT_FAULT(splits_merged_without_their_maxima) ? 1.0f : ptx::exp2((stats.a - row_max) * kLog2e);
}

template <class K>
__global__ void __launch_bounds__(kMergeThreads, 1) attention_fwd_merge_kernel(const __grid_constant__ AttentionForward f) {
  constexpr int kColumns = K::head_dim / 64;  // pairs of a lane
  const AttentionProblem& p = f.p;
  const int of_group = p.group * p.num_queries, lane = lane_id();
  const int64_t row = int64_t(blockIdx.x) * (kMergeThreads / 32) + int(threadIdx.x) / 32;
  if (row >= int64_t(p.sequences) * p.heads * p.num_queries) return;
  const int in_group = int(row % of_group), i = in_group / p.group;
  const int64_t group = row / of_group;
  const int b = int(group / (p.heads / p.group)), h = int(group % (p.heads / p.group)) * p.group + in_group % p.group;
  const Sequence s(p, b);
  if (i >= (p.cu_queries ? s.num_q : p.num_queries)) return;

  const int splits = f.split.splits - PT_FAULT(the_last_split_left_out);
  const auto stats_of = [&](int split) { return load_two(f.split.stats + 2 * (row * f.split.splits + split)); };
  float row_max = minus_infinity(), sum = 0.0f;
  for (int split = lane; split < splits; split += 32) {
    const Sum2 stats = stats_of(split);
    if (stats.b != 0.0f) row_max = fmaxf(row_max, stats.a);
  }
  PT_UNROLL
  for (int d = 1; d < 32; d *= 2) row_max = fmaxf(row_max, ptx::shfl_xor(row_max, d));
  for (int split = lane; split < splits; split += 32) {
    const Sum2 stats = stats_of(split);
    sum = ptx::fma_rn(stats.b, weight_of_split(stats, row_max), sum);
  }
  sum = LaneTeam(32).sum({sum, 0.0f}).a;

  Sum2 values[kColumns] = {};
  for (int split = 0; split < splits; ++split) {
    const Sum2 stats = stats_of(split);
    if (stats.b == 0.0f) continue;
    const float weight = weight_of_split(stats, row_max);
    const float* const of_split = f.split.values + (row * f.split.splits + split) * p.value_dim;
    PT_UNROLL
    for (int n = 0; n < kColumns; ++n) {
      const int column = 64 * n + 2 * lane;
      if (column >= p.value_dim) continue;
      const Sum2 more = load_two(of_split + column);
      values[n] = {ptx::fma_rn(more.a, weight, values[n].a), ptx::fma_rn(more.b, weight, values[n].b)};
    }
  }

  const RowEnd end = end_row(p, h, i < s.num_q, row_max, sum);
  const int64_t index = s.row_q + i;
  if (lane == 0) store_one(f.lse + row_stat_at(f.at, b, h, index), end.lse);
  with_type(p.dtype, [&](auto t) {
    auto* const out = static_cast<decltype(t)*>(f.out.data) + b * f.out.stride.batch + h * f.out.stride.head + index * f.out.stride.row;
    PT_UNROLL
    for (int n = 0; n < kColumns; ++n) {
      const int column = 64 * n + 2 * lane;
      const float x = end.factor == 0.0f ? 0.0f : values[n].a * end.factor, y = end.factor == 0.0f ? 0.0f : values[n].b * end.factor;
      if (column < f.out.columns) store_one(out + column, x);
      if (column + 1 < f.out.columns) store_one(out + column + 1, y);
    }
  });
}

}  // namespace pt::cuda

// SPDX-License-Identifier: Apache-2.0
// Reductions over blocks, each in a fixed order: fwd_merge merges the splits of split KV, and
// bwd_reduce_partials adds the gradients of ALiBi's slopes and of T5's table from bwd_dq's
// partials, and those of sinks from row stats.
//
// fwd_merge, for each row:
//
//   m = max_s m_s;  l = sum_s l_s e^(m_s - m);  out = sum_s o_s e^(m_s - m) / l * keep_scale
//   lse = m + ln l
//
// One block per row. Each warp takes every kMergeWarps-th split, and a lane four neighboring
// columns of every 128, so a row waits for memory only twice: for stats and for values. A split
// without visible keys has l_s = 0 and no values; its memory is not used.
#pragma once

#include "cuda/attention/scheduler.cuh"
#include "cuda/attention/softmax.cuh"
#include "cuda/tile/fragments.cuh"
#include "cuda/tile/reduce.cuh"

namespace pt::cuda {

// The weights of a row's splits, and its maximum and sum. Every warp has them; a lane holds splits
// lane and lane + 32.
struct SplitWeights {
  static constexpr int kPerLane = kMostSplits / 32;
  static constexpr float kNone = -1.0f;  // split without values; a weight of 0 may belong to a NaN
  float weight[kPerLane], row_max = minus_infinity(), sum = 0.0f;

  PT_DEVICE SplitWeights(const float* stats, int splits) {
    float maximum[kPerLane], sums[kPerLane];
    PT_UNROLL
    for (int n = 0; n < kPerLane; ++n) {
      const int split = 32 * n + lane_id();
      const uint64_t both = split < splits ? ptx::ld_global_u64(stats + 2 * split) : 0;
      maximum[n] = ptx::bits_float(uint32_t(both)), sums[n] = ptx::bits_float(uint32_t(both >> 32));
      if (sums[n] != 0.0f) row_max = fmaxf(row_max, maximum[n]);
    }
    PT_UNROLL
    for (int d = 1; d < 32; d *= 2) row_max = fmaxf(row_max, ptx::shfl_xor(row_max, d));
    PT_UNROLL
    for (int n = 0; n < kPerLane; ++n) {
      weight[n] = sums[n] == 0.0f ? kNone : weight_of_part(maximum[n], sums[n], row_max);
      sum = ptx::fma_rn(sums[n], weight[n], sum);
    }
    sum = LaneTeam(32).sum({sum, 0.0f}).a;
  }
  // Return a split's weight; every lane calls this.
  PT_DEVICE float of(int split) const {
    float x = weight[0];
    PT_UNROLL
    for (int n = 1; n < kPerLane; ++n) x = split < 32 * n ? x : weight[n];
    return ptx::shfl(x, split % 32);
  }
};

// x[n] += weight * values of splits first, first + kMergeWarps, ..., columns 128 n + 4 lane to + 3.
constexpr int kMergeWarps = kMergeThreads / 32, kSplitsAtOnce = 8;
template <int N>
PT_DEVICE void add_splits(float (&x)[N][4], const float* values, const SplitWeights& weights,
                          int first, int splits, int columns) {
  for (int group = first; group < splits; group += kMergeWarps * kSplitsAtOnce) {
    PT_UNROLL
    for (int n = 0; n < N; ++n) {
      if (128 * n >= columns) continue;
      const int column = 128 * n + 4 * lane_id();
      float weight[kSplitsAtOnce];
      ptx::Words4 more[kSplitsAtOnce];
      PT_UNROLL
      for (int i = 0; i < kSplitsAtOnce; ++i) {
        const int split = group + kMergeWarps * i;
        weight[i] = weights.of(split % kMostSplits);
        if (split >= splits || column >= columns) weight[i] = SplitWeights::kNone;
        // A select, because a branch would wait for the weight.
        more[i] = ptx::ld_global_v4(values + (weight[i] < 0.0f ? 0 : split * columns + column));
      }
      PT_UNROLL
      for (int i = 0; i < kSplitsAtOnce; ++i) {
        PT_UNROLL
        for (int k = 0; k < 4; ++k)
          x[n][k] = weight[i] < 0.0f
                        ? x[n][k]
                        : ptx::fma_rn(ptx::bits_float(more[i].w[k]), weight[i], x[n][k]);
      }
    }
  }
}

template <class K>
__global__ void __launch_bounds__(kMergeThreads, 1)
    attention_fwd_merge_kernel(const __grid_constant__ AttentionForward f) {
  constexpr int N = K::head_dim / 128;
  const AttentionProblem& p = f.p;
  const int64_t row = blockIdx.x;
  const int warp = int(threadIdx.x) / 32, splits = f.split.splits;
  const SplitWeights weights(f.split.stats + 2 * row * f.split.splits, splits);
  float x[N][4] = {};
  add_splits(x, f.split.values + row * f.split.splits * p.value_dim, weights, warp, splits,
             p.value_dim);
  const auto place = [&](int of_warp, int column) {
    return ptx::dynamic_smem() + (of_warp * K::head_dim + column) * 4;
  };
  PT_UNROLL
  for (int n = 0; n < N; ++n)
    ptx::st_shared_v4_f32(place(warp, 128 * n + 4 * lane_id()), x[n][0], x[n][1], x[n][2], x[n][3]);

  const int of_group = p.group * p.num_queries, in_group = int(blockIdx.x % uint32_t(of_group)),
            i = in_group / p.group;
  const int group = int(blockIdx.x / uint32_t(of_group)), key_heads = p.heads / p.group;
  const int b = group / key_heads, h = group % key_heads * p.group + in_group % p.group;
  const Sequence s(p, b);
  ptx::syncthreads();
  if (i >= (p.cu_queries ? s.num_q : p.num_queries)) return;

  const RowEnd end = end_row(p, h, i < s.num_q, weights.row_max, weights.sum);
  const int64_t index = s.row_q + i;
  if (threadIdx.x == 0) store_one(f.lse + row_stat_at(f.at, b, h, index), end.lse);
  with_type(p.dtype, [&](auto t) {
    auto* const out = static_cast<decltype(t)*>(f.out.data) + b * f.out.stride.batch +
                      h * f.out.stride.head + index * f.out.stride.row;
    for (int column = int(threadIdx.x); column < f.out.columns; column += kMergeThreads) {
      float sum = 0.0f;
      PT_UNROLL
      for (int w = 0; w < kMergeWarps; ++w) sum += ptx::ld_shared_f32(place(w, column));
      store_one(out + column, end.factor == 0.0f ? 0.0f : sum * end.factor);
    }
  });
}

// One block per head, in a fixed order.
PT_DEVICE void sum_over_queries(const AttentionDsinks& f) {
  const AttentionProblem& p = f.p;
  const int h = int(blockIdx.x);
  const float sink = sink_of(p, h);
  float sum = 0.0f;
  for (int b = 0; b < p.sequences; ++b) {
    const Sequence s(p, b);
    for (int i = int(threadIdx.x); i < s.num_q; i += kReduceThreads) {
      const int64_t at = row_stat_at(f.at, b, h, s.row_q + i);
      const float lse = load_one(f.lse + at);
      if (lse <= sink) {
        if (f.d_lse) sum += load_one(f.d_lse + at);
      } else {
        const float log2_sum = f.log2_sum ? load_one(f.log2_sum + at) : 0.0f;
        const float weight =
            ptx::exp2(ptx::fma_rn(sink - load_one(f.row_max + at), kLog2e, -log2_sum));
        sum = ptx::fma_rn(-weight, load_one(f.delta + at), sum);
      }
    }
  }
  BlockTeam team(0);
  sum = team.sum({sum, 0.0f}).a;
  if (threadIdx.x == 0) store_one(f.sums + h, sink == minus_infinity() ? 0.0f : sum);
}

// One warp per output.
template <class K>
__global__ void __launch_bounds__(kReduceThreads)
    attention_bwd_reduce_partials_kernel(const __grid_constant__ AttentionReducePartials f) {
  if (f.sinks.sums) return sum_over_queries(f.sinks);
  const int number = int(blockIdx.x) * 4 + int(threadIdx.x) / 32;
  if (number >= f.outputs * f.heads) return;
  const int u = number / f.heads, h = number % f.heads;
  const auto bound = [&](int i) {
    return f.ranges ? int(ptx::ld_global_u32(f.ranges + 2 * u + i)) : i;
  };
  const int lo = bound(0), hi = bound(1);
  float sum = 0.0f;
  for (int x = lane_id(); x < f.sequences * f.tiles; x += 32) {
    const float* part =
        f.partials + ((int64_t(x / f.tiles) * f.heads + h) * f.tiles + x % f.tiles) * f.width;
    for (int w = lo; w < hi; ++w) sum += load_one(part + w);
  }
  sum = LaneTeam(32).sum({sum, 0.0f}).a;
  if (lane_id() == 0) store_one(f.sums + number, sum);
}

}  // namespace pt::cuda

// SPDX-License-Identifier: Apache-2.0
// Reductions over blocks, each in a fixed order: bwd_reduce_partials adds the gradients of ALiBi's
// slopes and of T5's table from bwd_dq's partials, and those of sinks from row stats.
#pragma once

#include "cuda/attention/scheduler.cuh"
#include "cuda/attention/softmax.cuh"
#include "cuda/tile/fragments.cuh"
#include "cuda/tile/reduce.cuh"

namespace pt::cuda {

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

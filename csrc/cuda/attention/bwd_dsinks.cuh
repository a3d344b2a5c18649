// SPDX-License-Identifier: Apache-2.0
// Attention backward, the gradient of sinks: a sum over the row stats of a head, which the other passes have left as they read them.
#pragma once

#include "cuda/attention/sequence.cuh"
#include "cuda/attention/sink.cuh"
#include "cuda/tile/reduce.cuh"

namespace pt::cuda {

// A block for each head, in a fixed order.
template <class K>
__global__ void __launch_bounds__(kDsinksThreads) attention_bwd_dsinks_kernel(const __grid_constant__ AttentionDsinks f) {
  const AttentionProblem& p = f.p;
  const int h = int(blockIdx.x);
  if (h >= p.heads) return;
  const float sink = sink_of(p, h);
  float sum = 0.0f;
  for (int b = 0; b < p.sequences; ++b) {
    const Sequence s(p, b);
    for (int i = int(threadIdx.x); i < s.num_q; i += kDsinksThreads) {
      const int64_t at = row_stat_at(f.at, b, h, s.row_q + i);
      const float lse = load_one(f.lse + at);
      if (lse <= sink) {
        if (f.d_lse && !PT_FAULT(sinks_alone_without_lses_gradient)) sum += load_one(f.d_lse + at);
      } else {
        const float log2_sum = f.log2_sum ? load_one(f.log2_sum + at) : 0.0f;
        const float weight = ptx::exp2(ptx::fma_rn(sink - load_one(f.row_max + at), kLog2e, -log2_sum));
        sum = ptx::fma_rn(PT_FAULT(the_sign_of_the_sinks_gradient) ? weight : -weight, load_one(f.delta + at), sum);
      }
    }
  }
  BlockTeam team(0);
  sum = team.sum({sum, 0.0f}).a;
  if (threadIdx.x == 0) store_one(f.sums + h, sink == minus_infinity() ? 0.0f : sum);
}

}  // namespace pt::cuda

// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/sm90/bwd_fused.cuh"

#include "cuda/attention/sm80/plan.h"
#include "cuda/attention/sm90/kernels.h"
#include "cuda/attention/sm90/launch.cuh"

namespace pt::cuda {

void sm90_attention_backward_fused(const AttentionBackward& g, const Sm90Plan& plan,
                                   uint32_t* turns, void* stream) {
  const AttentionProblem& p = g.p;
  const Sm90Fused args = {{map_operands(g, plan.tile.streamed, plan.tile.rows()), g, plan.order},
                          turns};
  const auto run = [&](auto t, auto kind) {
    using T = decltype(t);
    using K = decltype(kind);
    launch(sm90_attention_bwd_fused_kernel<T, K>, dim3(unsigned(plan.blocks)), plan.tile.threads(),
           plan.smem_bytes, stream, args);
    launch(sm90_convert_dq_kernel<T, K::head_dim>,
           dim3(attention_blocks(p.sequences, p.heads, (p.num_queries + 63) / 64)), 128, 0, stream,
           g);
  };
  with_half(p, [&](auto t) {
    if (plan.head_class == 64) turns ? run(t, Fused<64, true>{}) : run(t, Fused<64, false>{});
    else turns ? run(t, Fused<128, true>{}) : run(t, Fused<128, false>{});
  });
}

}  // namespace pt::cuda

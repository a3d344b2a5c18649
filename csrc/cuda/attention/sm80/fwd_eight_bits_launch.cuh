// SPDX-License-Identifier: Apache-2.0
// The forward kernels for eight-bit keys and values and one query dtype, included by the files that
// compile them.
#pragma once

#include "cuda/attention/sm80/fwd_split.cuh"
#include "cuda/attention/sm80/kernels.h"
#include "cuda/launch.cuh"

namespace pt::cuda {

template <class T>
void sm80_attention_forward_eight_bits_as(const AttentionForward& f, const Sm80Plan& plan,
                                          void* stream) {
  const dim3 grid(attention_blocks(f.p.sequences, f.p.heads, tiles_of(f.p.num_queries, plan.tile)));
  const auto run = [&](auto kernel) {
    launch(kernel, grid, plan.tile.threads(), plan.smem_bytes, stream, f);
  };
  if constexpr (sizeof(T) == 4) run(attention_fwd_kernel<T, EightBitKind<256>>);
  else
    run(plan.head_class == 128 ? attention_fwd_kernel<T, EightBitKind<128>>
                               : attention_fwd_kernel<T, EightBitKind<256>>);
}

template <class T>
void sm80_attention_split_eight_bits_as(const AttentionForward& f, const SplitPlan& plan,
                                        void* stream) {
  const dim3 grid(attention_blocks(f.p.sequences, f.p.heads / f.p.group,
                                   int64_t(plan.row_tiles) * plan.splits));
  const Sm80Plan& kernel = plan.kernel;
  const auto run = [&](auto k) {
    launch(k, grid, kernel.tile.threads(), kernel.smem_bytes, stream, f, split_grid(f.p, plan));
  };
  if constexpr (sizeof(T) == 4) run(attention_fwd_split_kernel<T, EightBitSplitKind<256>>);
  else
    run(kernel.head_class == 128 ? attention_fwd_split_kernel<T, EightBitSplitKind<128>>
                                 : attention_fwd_split_kernel<T, EightBitSplitKind<256>>);
}

}  // namespace pt::cuda

// SPDX-License-Identifier: Apache-2.0
// The forward kernels of one dtype, included by the files that compile them.
#pragma once

#include "cuda/attention/sm80/fwd_split.cuh"
#include "cuda/attention/sm80/kernels.h"
#include "cuda/device.h"
#include "cuda/launch.cuh"

namespace pt::cuda {

template <class T>
void sm80_attention_forward_as(const AttentionForward& f, const Sm80Plan& plan, void* stream) {
  const unsigned all =
      attention_blocks(f.p.sequences, f.p.heads, tiles_of(f.p.num_queries, plan.tile));
  const dim3 grid(recompute_blocks(f.recompute, all, multiprocessors()));
  const auto run = [&](auto kernel) {
    launch(kernel, grid, plan.tile.threads(), plan.smem_bytes, stream, f);
  };
  if constexpr (sizeof(T) == 4) {
    run(plan.head_class == 64 ? attention_fwd_kernel<T, Kind<64, true>>
                              : attention_fwd_kernel<T, Kind<256, true>>);
  } else if (plan.has_score_mod) {
    run(plan.head_class == 64    ? attention_fwd_kernel<T, Kind<64, true>>
        : plan.head_class == 128 ? attention_fwd_kernel<T, Kind<128, true>>
                                 : attention_fwd_kernel<T, Kind<256, true>>);
  } else {
    run(plan.head_class == 64    ? attention_fwd_kernel<T, Kind<64, false>>
        : plan.head_class == 128 ? attention_fwd_kernel<T, Kind<128, false>>
                                 : attention_fwd_kernel<T, Kind<256, false>>);
  }
}

template <class T>
void sm80_attention_split_as(const AttentionForward& f, const SplitPlan& plan, void* stream) {
  const dim3 grid(attention_blocks(f.p.sequences, f.p.heads / f.p.group,
                                   int64_t(plan.row_tiles) * plan.splits));
  const Sm80Plan& kernel = plan.kernel;
  const auto run = [&](auto k) {
    launch(k, grid, kernel.tile.threads(), kernel.smem_bytes, stream, f, split_grid(f.p, plan));
  };
  if constexpr (sizeof(T) == 4) {
    run(attention_fwd_split_kernel<T, SplitKind<256, true>>);
  } else if (!kernel.has_score_mod) {
    run(kernel.head_class == 64 ? attention_fwd_split_kernel<T, SplitKind<64, false>>
                                : attention_fwd_split_kernel<T, SplitKind<128, false>>);
  } else {
    run(kernel.head_class == 64    ? attention_fwd_split_kernel<T, SplitKind<64, true>>
        : kernel.head_class == 128 ? attention_fwd_split_kernel<T, SplitKind<128, true>>
                                   : attention_fwd_split_kernel<T, SplitKind<256, true>>);
  }
}

}  // namespace pt::cuda

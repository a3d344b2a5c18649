// SPDX-License-Identifier: Apache-2.0
// The backward kernels of one dtype, included by the files that compile them.
#pragma once

#include <type_traits>

#include "cuda/attention/sm80/bwd_dbias.cuh"
#include "cuda/attention/sm80/bwd_dkdv.cuh"
#include "cuda/attention/sm80/bwd_dq.cuh"
#include "cuda/attention/sm80/kernels.h"
#include "cuda/device.h"
#include "cuda/launch.cuh"

namespace pt::cuda {

// Call run(kind) for the plan's kernel; see plan_sm80.
template <class T, Pass pass, class F>
void with_kind(const Sm80Plan& plan, F run) {
  if constexpr (std::is_same_v<T, ptx::bf16>) {
    if (!plan.has_score_mod && plan.head_class == 64) return run(Kind<64, false>{});
    if constexpr (pass == Pass::BwdDq) {
      if (!plan.has_score_mod) return run(Kind<128, false>{});
    }
  }
  if (plan.head_class == 64) return run(Kind<64, true>{});
  if constexpr (sizeof(T) == 2) {
    if (plan.head_class == 128) return run(Kind<128, true>{});
  }
  run(Kind<256, true>{});
}

template <class T>
void sm80_attention_bwd_dq_as(const AttentionBackward& g, const Sm80Plan& plan, void* stream) {
  const unsigned all =
      attention_blocks(g.p.sequences, g.p.heads, tiles_of(g.p.num_queries, plan.tile));
  const dim3 grid(recompute_blocks(g.recompute, all, multiprocessors()));
  with_kind<T, Pass::BwdDq>(plan, [&](auto kind) {
    launch(attention_bwd_dq_kernel<T, decltype(kind)>, grid, plan.tile.threads(), plan.smem_bytes,
           stream, g);
  });
}

template <class T>
void sm80_attention_bwd_dkdv_as(const AttentionBackward& g, const Sm80Plan& plan, void* stream) {
  const int64_t tiles = tiles_of(g.p.num_keys + g.p.key_start % 32, plan.tile);
  const dim3 grid(recompute_blocks(g.recompute,
                                   attention_blocks(g.p.sequences, g.p.heads / g.p.group, tiles),
                                   multiprocessors()));
  with_kind<T, Pass::BwdDkdv>(plan, [&](auto kind) {
    launch(attention_bwd_dkdv_kernel<T, decltype(kind)>, grid, plan.tile.threads(), plan.smem_bytes,
           stream, g);
  });
}

template <class T>
void sm80_attention_bwd_dbias_as(const AttentionDbias& f, const Sm80Plan& plan, void* stream) {
  const AttentionProblem& p = f.b.p;
  const int64_t query_tiles = tiles_of(p.num_queries, plan.tile);
  const int64_t key_tiles =
      (p.num_keys + p.key_start % 32 + plan.tile.columns - 1) / plan.tile.columns;
  const auto of = [&](int d, int64_t n) { return f.sizes[d] == 1 ? 1 : n; };
  const dim3 grid(
      attention_blocks(of(0, p.sequences), of(1, p.heads), of(2, query_tiles) * of(3, key_tiles)));
  launch(attention_bwd_dbias_kernel<T, Kind<256, true>>, grid, plan.tile.threads(), plan.smem_bytes,
         stream, f);
}

}  // namespace pt::cuda

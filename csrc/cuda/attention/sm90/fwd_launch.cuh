// SPDX-License-Identifier: Apache-2.0
// The sm_90a forward kernels of one dtype, included by the files that compile them.
#pragma once

#include <type_traits>

#include "cuda/attention/sm90/fwd.cuh"
#include "cuda/attention/sm90/kernels.h"
#include "cuda/attention/sm90/launch.cuh"

namespace pt::cuda {

template <class T, class K>
void forward_kind(const AttentionForward& f, const Sm90Plan& plan, void* stream) {
  constexpr Sm90Tile kTile = K::forward_tile;
  const AttentionProblem& p = f.p;
  const int rows = kTile.rows();
  const Sm90Forward args{map_rows(p, p.q, false, p.head_dim, rows),
                         map_rows(p, p.k, true, p.head_dim, kTile.streamed),
                         map_rows(p, p.v, true, p.value_dim, kTile.streamed), f, plan.order};
  launch(sm90_attention_fwd_kernel<T, K>, dim3(unsigned(plan.blocks)), kTile.threads(),
         plan.smem_bytes, stream, args);
}

// Call run(kind) for the plan's kernel.
template <class F>
void with_forward_kind(const Sm90Plan& plan, F run) {
  const auto of_class = [&](auto head_dim) {
    constexpr int D = decltype(head_dim)::value;
    if (plan.has_score_mod)
      plan.elementwise_mask ? run(Hopper<D, true, true>{}) : run(Hopper<D, true>{});
    else plan.elementwise_mask ? run(Hopper<D, false, true>{}) : run(Hopper<D, false>{});
  };
  if (plan.tile.consumers == 3) run(ThreeConsumers{});
  else if (plan.head_class == 64) of_class(std::integral_constant<int, 64>{});
  else if (plan.head_class == 128) of_class(std::integral_constant<int, 128>{});
  else of_class(std::integral_constant<int, 256>{});
}

template <class T>
void sm90_attention_forward_as(const AttentionForward& f, const Sm90Plan& plan, void* stream) {
  with_forward_kind(plan, [&](auto kind) { forward_kind<T, decltype(kind)>(f, plan, stream); });
}

}  // namespace pt::cuda

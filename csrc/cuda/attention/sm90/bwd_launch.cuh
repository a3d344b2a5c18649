// SPDX-License-Identifier: Apache-2.0
// The sm_90a backward kernels of one dtype, included by the files that compile them, one pass each.
#pragma once

#include <type_traits>

#include "cuda/attention/sm90/bwd_dkdv_hdim256.cuh"
#include "cuda/attention/sm90/bwd_dq.cuh"
#include "cuda/attention/sm90/kernels.h"
#include "cuda/attention/sm90/launch.cuh"

namespace pt::cuda {

// Call run(kind) for the plan's kernel.
template <class F>
void with_backward_kind(const Sm90Plan& plan, F run) {
  const auto of_class = [&](auto columns) {
    constexpr int D = decltype(columns)::value;
    if (plan.elementwise_mask)
      plan.has_score_mod ? run(Hopper<D, true, true>{}) : run(Hopper<D, false, true>{});
    else plan.has_score_mod ? run(Hopper<D, true, false>{}) : run(Hopper<D, false, false>{});
  };
  if (plan.head_class == 64) of_class(std::integral_constant<int, 64>{});
  else if (plan.head_class == 128) of_class(std::integral_constant<int, 128>{});
  else if (plan.elementwise_mask) run(Hopper<256, false, true>{});
  else plan.has_score_mod ? run(Hopper<256, true, false>{}) : run(Hopper<256, false, false>{});
}

template <class T>
void sm90_attention_bwd_dq_as(const AttentionBackward& g, const Sm90Plan& plan, void* stream) {
  const Sm90Backward args = {map_operands(g, plan.tile.rows(), plan.tile.streamed), g, plan.order};
  with_backward_kind(plan, [&](auto kind) {
    launch(sm90_attention_bwd_dq_kernel<T, decltype(kind)>, dim3(unsigned(plan.blocks)),
           plan.tile.threads(), plan.smem_bytes, stream, args);
  });
}

template <class T>
void sm90_attention_bwd_dkdv_as(const AttentionBackward& g, const Sm90Plan& plan, void* stream) {
  const Sm90Backward args = {map_operands(g, plan.tile.streamed, plan.tile.rows()), g, plan.order};
  with_backward_kind(plan, [&](auto kind) {
    launch(sm90_attention_bwd_dkdv_kernel<T, decltype(kind)>, dim3(unsigned(plan.blocks)),
           plan.tile.threads(), plan.smem_bytes, stream, args);
  });
}

}  // namespace pt::cuda

// SPDX-License-Identifier: Apache-2.0
// The sm_90a kernels of mask and bias gradients for one dtype, included by the files that compile
// them.
#pragma once

#include "cuda/attention/sm90/bwd_dbias.cuh"
#include "cuda/attention/sm90/kernels.h"
#include "cuda/attention/sm90/launch.cuh"

namespace pt::cuda {

template <class T>
void sm90_attention_bwd_dbias_as(const AttentionDbias& f, const Sm90Plan& plan, void* stream) {
  const Sm90Dbias args = {map_operands(f.b, plan.tile.rows(), plan.tile.streamed), f, plan.order};
  const auto run = [&](auto kind) {
    launch(sm90_attention_bwd_dbias_kernel<T, decltype(kind)>, dim3(unsigned(plan.blocks)),
           plan.tile.threads(), plan.smem_bytes, stream, args);
  };
  if (plan.head_class == 64) run(Hopper<64, true, true>{});
  else if (plan.head_class == 128) run(Hopper<128, true, true>{});
  else run(Hopper<256, true, true>{});
}

}  // namespace pt::cuda

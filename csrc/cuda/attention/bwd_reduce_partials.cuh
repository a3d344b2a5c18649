// SPDX-License-Identifier: Apache-2.0
// Attention backward, what comes after the pass for d_query: the gradients of ALiBi's slopes and of T5's table.
#pragma once

#include "cuda/attention/problem.h"
#include "cuda/tile/fragments.cuh"
#include "cuda/tile/reduce.cuh"

namespace pt::cuda {

// A warp for each number.
template <class K>
__global__ void __launch_bounds__(128) attention_bwd_reduce_partials_kernel(const __grid_constant__ AttentionReducePartials f) {
  const int number = int(blockIdx.x) * 4 + int(threadIdx.x) / 32;
  if (number >= f.outputs * f.heads) return;
  const int u = number / f.heads, h = number % f.heads;
  const auto bound = [&](int i) { return f.ranges ? int(ptx::ld_global_u32(f.ranges + 2 * u + i)) : i; };
  const int lo = bound(0), hi = bound(1);
  float sum = 0.0f;
  for (int x = lane_id(); x < f.sequences * f.tiles; x += 32) {
    const float* part = f.partials + ((int64_t(x / f.tiles) * f.heads + h) * f.tiles + x % f.tiles) * f.width;
    for (int w = lo; w < hi; ++w) sum += load_one(part + w);
  }
  sum = LaneTeam(32).sum({sum, 0.0f}).a;
  if (lane_id() == 0) store_one(f.sums + number, sum);
}

}  // namespace pt::cuda

// SPDX-License-Identifier: Apache-2.0
// Choice of a norm's kernel and number of threads. Pure functions of the problem, reachable from
// Python as pytransformer._C.cuda_layer_norm_plan.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/dtype.h"
#include "cuda/layer_norm/config.h"

namespace pt::cuda {

struct LayerNormShape {
  int64_t rows;
  int columns;
  DType x, residual_out;  // residual_out's dtype: x's dtype in a plain norm
  bool aligned;           // as in LayerNormProblem
};

struct LayerNormPlan {
  LayerNormKernel kernel;
  int lanes;    // lanes per row; a block's threads unless kernel is Lanes
  int threads;  // threads per block
  int64_t blocks;
  uint32_t smem_bytes;

  int rows_per_block() const { return threads / lanes; }
};

// Return true if the pair of dtypes has a typed kernel; other pairs use the kernel for any dtype.
inline bool has_typed_kernel(DType x, DType residual_out) {
  return x == residual_out || residual_out == DType::f32;
}

inline const LayerNormConfig& config_of(LayerNormKernel kernel, const LayerNormConfigs& configs) {
  return kernel == LayerNormKernel::Lanes   ? configs.lanes
         : kernel == LayerNormKernel::Block ? configs.block
                                            : configs.any;
}

inline LayerNormPlan plan_layer_norm(const LayerNormShape& s, const LayerNormConfigs& configs,
                                     bool backward, int multiprocessors) {
  const auto up = [](int64_t n, int64_t to) { return (n + to - 1) / to * to; };
  const auto threads_for = [&](const LayerNormConfig& c) {
    return int(std::clamp<int64_t>(
        up(s.columns, 32 * kVectorColumns * c.vectors) / (kVectorColumns * c.vectors), 32,
        c.max_threads));
  };
  LayerNormPlan plan{};
  const bool typed = s.aligned && has_typed_kernel(s.x, s.residual_out);
  if (typed && s.columns <= configs.lanes.max_columns()) {
    // Short rows share a warp, because fewer lanes per row need fewer reduction steps.
    plan.kernel = LayerNormKernel::Lanes;
    plan.lanes = s.columns <= 128 ? 8 : s.columns <= 256 ? 16 : 32;
    plan.threads = configs.lanes.max_threads;
  } else {
    plan.kernel = typed && s.columns <= configs.block.max_columns() ? LayerNormKernel::Block
                                                                    : LayerNormKernel::Any;
    plan.threads = plan.lanes = threads_for(config_of(plan.kernel, configs));
    plan.smem_bytes = uint32_t(up(plan.threads / 32 * 8, 16)) * 2;  // the two buffers of BlockTeam
  }
  // Float32 weight and, forward, bias; or one row of partial sums per team at the end of backward.
  const LayerNormConfig& config = config_of(plan.kernel, configs);
  const int rows_of_floats = plan.kernel == LayerNormKernel::Any ? 0
                             : backward                          ? plan.rows_per_block()
                                                                 : 2;
  plan.smem_bytes += uint32_t(rows_of_floats * config.max_columns(plan.lanes)) * 4;
  // The grid is as large as fits on the GPU at once: each block loops over rows, loads the next
  // before this row's reductions, and writes partial sums. The kernel for any dtype loads nothing
  // ahead in forward, so it has one block per row, up to the grid's limit.
  const int64_t needed = (s.rows + plan.rows_per_block() - 1) / plan.rows_per_block();
  const int64_t at_once = int64_t(multiprocessors) * std::max(1, config.at_once / plan.threads);
  plan.blocks = std::min<int64_t>(
      needed, plan.kernel == LayerNormKernel::Any && !backward ? int64_t(1) << 30 : at_once);
  return plan;
}

inline LayerNormPlan plan_forward(const LayerNormShape& s, int multiprocessors) {
  return plan_layer_norm(s, kLayerNormForward, false, multiprocessors);
}
inline LayerNormPlan plan_backward(const LayerNormShape& s, int multiprocessors) {
  return plan_layer_norm(s, kLayerNormBackward, true, multiprocessors);
}

}  // namespace pt::cuda

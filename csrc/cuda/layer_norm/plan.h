// Which kernel computes a norm, with how many threads: pure functions of the problem, reachable from Python as
// pytransformer._C.cuda_norm_plan.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/layer_norm/config.h"
#include "cuda/tile/dtype.h"

namespace pt::cuda {

struct NormShape {
  int64_t rows;
  int columns;
  DType x, stream;  // stream: of residual_out; x's dtype in a plain norm
  bool aligned;     // as NormProblem's
};

struct NormPlan {
  NormKernel kernel;
  int lanes;    // that share a row; a block's threads unless kernel is Lanes
  int threads;  // of a block
  int64_t blocks;
  uint32_t smem_bytes;

  int rows_per_block() const { return threads / lanes; }
};

// Pairs of dtypes that have kernels of their own; others go to the kernel for any.
inline bool has_typed_kernel(DType x, DType stream) { return x == stream || stream == DType::f32; }

inline NormPlan plan_norm(const NormShape& s, const NormConfigs& configs, bool backward, int multiprocessors) {
  const auto up = [](int64_t n, int64_t to) { return (n + to - 1) / to * to; };
  const auto threads_for = [&](const NormConfig& c) {
    return int(std::clamp<int64_t>(up(s.columns, 32 * kVectorColumns * c.vectors) / (kVectorColumns * c.vectors), 32, c.max_threads));
  };
  NormPlan plan{};
  const bool typed = s.aligned && has_typed_kernel(s.x, s.stream);
  if (typed && s.columns <= configs.lanes.max_columns()) {
    // Short rows share a warp: fewer lanes for a row need fewer steps for its sums.
    plan.kernel = NormKernel::Lanes;
    plan.lanes = s.columns <= 128 ? 8 : s.columns <= 256 ? 16 : 32;
    plan.threads = configs.lanes.max_threads;
    if (backward) plan.smem_bytes = uint32_t(plan.rows_per_block()) * uint32_t(s.columns) * 4;
  } else {
    plan.kernel = typed && s.columns <= configs.block.max_columns() ? NormKernel::Block : NormKernel::Any;
    plan.threads = plan.lanes = threads_for(plan.kernel == NormKernel::Block ? configs.block : configs.any);
    plan.smem_bytes = uint32_t(up(plan.threads / 32 * 8, 16)) * 2;  // the two buffers of BlockTeam
  }
  const int64_t needed = (s.rows + plan.rows_per_block() - 1) / plan.rows_per_block();
  // Forward: a block for each few rows, as many as a grid may have. Backward: as many as run at once, since each leaves partial sums.
  const int64_t at_once = int64_t(multiprocessors) * std::max(1, 1024 / plan.threads / 2);
  plan.blocks = std::min<int64_t>(needed, backward ? at_once : int64_t(1) << 30);
  return plan;
}

inline NormPlan plan_forward(const NormShape& s, int multiprocessors) { return plan_norm(s, kNormForward, false, multiprocessors); }
inline NormPlan plan_backward(const NormShape& s, int multiprocessors) { return plan_norm(s, kNormBackward, true, multiprocessors); }

}  // namespace pt::cuda

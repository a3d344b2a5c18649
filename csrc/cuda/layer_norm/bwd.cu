// SPDX-License-Identifier: Apache-2.0
#include "cuda/launch.cuh"
#include "cuda/layer_norm/bwd.cuh"
#include "cuda/layer_norm/kernels.h"

namespace pt::cuda {

template <class T, class S>
static void backward_typed(const LayerNormBackward& f, const LayerNormPlan& plan, void* stream) {
  const auto kernel = plan.kernel == LayerNormKernel::Lanes ? layer_norm_bwd_kernel<T, S, Lanes>
                                                            : layer_norm_bwd_kernel<T, S, Block>;
  launch(kernel, dim3(unsigned(plan.blocks)), plan.threads, plan.smem_bytes, stream, f);
}

void layer_norm_backward(const LayerNormBackward& f, const LayerNormPlan& plan, void* stream) {
  if (plan.kernel == LayerNormKernel::Any)
    return launch(layer_norm_bwd_any_kernel<Any>, dim3(unsigned(plan.blocks)), plan.threads,
                  plan.smem_bytes, stream, f);
  const bool float_residual_out = f.h.dtype == DType::f32;
  switch (f.d_out.dtype) {
    case DType::f32: return backward_typed<float, float>(f, plan, stream);
    case DType::bf16:
      return float_residual_out ? backward_typed<ptx::bf16, float>(f, plan, stream)
                                : backward_typed<ptx::bf16, ptx::bf16>(f, plan, stream);
    case DType::f16:
      return float_residual_out ? backward_typed<ptx::f16, float>(f, plan, stream)
                                : backward_typed<ptx::f16, ptx::f16>(f, plan, stream);
    case DType::f64: return;  // rejected by the binding
  }
}

void layer_norm_reduce(const LayerNormReduce& r, void* stream) {
  const dim3 grid{unsigned((r.columns + 31) / 32), 2, 1};
  launch(layer_norm_reduce_kernel, grid, 32 * kReduceWarps, 32 * kReduceWarps * 4, stream, r);
}

}  // namespace pt::cuda

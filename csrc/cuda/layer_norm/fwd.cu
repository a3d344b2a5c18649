// SPDX-License-Identifier: Apache-2.0
#include "cuda/launch.cuh"
#include "cuda/layer_norm/fwd.cuh"
#include "cuda/layer_norm/kernels.h"

namespace pt::cuda {

template <class T, class S>
static void forward_typed(const LayerNormForward& f, const LayerNormPlan& plan, void* stream) {
  const auto kernel = plan.kernel == LayerNormKernel::Lanes ? layer_norm_fwd_kernel<T, S, Lanes>
                                                            : layer_norm_fwd_kernel<T, S, Block>;
  launch(kernel, dim3(unsigned(plan.blocks)), plan.threads, plan.smem_bytes, stream, f);
}

void layer_norm_forward(const LayerNormForward& f, const LayerNormPlan& plan, void* stream) {
  if (plan.kernel == LayerNormKernel::Any)
    return launch(layer_norm_fwd_any_kernel<Any>, dim3(unsigned(plan.blocks)), plan.threads,
                  plan.smem_bytes, stream, f);
  const bool float_residual_out = f.residual_out.data && f.residual_out.dtype == DType::f32;
  switch (f.x.dtype) {
    case DType::f32: return forward_typed<float, float>(f, plan, stream);
    case DType::bf16:
      return float_residual_out ? forward_typed<ptx::bf16, float>(f, plan, stream)
                                : forward_typed<ptx::bf16, ptx::bf16>(f, plan, stream);
    case DType::f16:
      return float_residual_out ? forward_typed<ptx::f16, float>(f, plan, stream)
                                : forward_typed<ptx::f16, ptx::f16>(f, plan, stream);
    case DType::f64: return;  // rejected by the binding
  }
}

}  // namespace pt::cuda

#include "cuda/cross_entropy/bwd.cuh"
#include "cuda/cross_entropy/kernels.h"
#include "cuda/matmul/sm90_launch.cuh"

namespace pt::cuda {

void sm90_d_logits(const DLogitsProblem& f, const MatmulPlan& plan, void* stream) {
  const float share = f.labels.on_each / float(f.product.columns);
  const DLogits epilogue{{f.bias}, f.labels, f.lse, f.g, f.d_logits, f.bias_parts, share};
  with_half(f.product.dtype, [&](auto t) { launch_matmul<decltype(t), NT>(f.product, epilogue, plan, stream); });
}

}  // namespace pt::cuda

#include "cuda/matmul/epilogue.cuh"
#include "cuda/matmul/kernels.h"
#include "cuda/matmul/sm90_launch.cuh"

namespace pt::cuda {

void sm90_linear(const LinearProblem& l, const MatmulPlan& plan, void* stream) {
  const Product& p = l.product;
  const Linear epilogue{l.bias, l.out};
  with_half(p.dtype, [&](auto t) {
    using T = decltype(t);
    if (p.a[0].transposed) launch_matmul<T, TN>(p, epilogue, plan, stream);
    else if (p.b[0].transposed) launch_matmul<T, NT>(p, epilogue, plan, stream);
    else launch_matmul<T, NN>(p, epilogue, plan, stream);
  });
}

}  // namespace pt::cuda

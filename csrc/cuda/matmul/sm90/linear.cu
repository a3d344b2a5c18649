// SPDX-License-Identifier: Apache-2.0
#include "cuda/matmul/kernels.h"
#include "cuda/matmul/sm90/epilogue.cuh"
#include "cuda/matmul/sm90/launch.cuh"

namespace pt::cuda {

void sm90_linear(const LinearProblem& l, const MatmulPlan& plan, void* stream) {
  launch_plain(l.product, Linear{{l.bias}, l.out}, plan, stream);
}

}  // namespace pt::cuda

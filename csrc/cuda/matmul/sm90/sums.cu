// SPDX-License-Identifier: Apache-2.0
#include "cuda/matmul/kernels.h"
#include "cuda/matmul/sm90/epilogue.cuh"
#include "cuda/matmul/sm90/launch.cuh"

namespace pt::cuda {

void sm90_sums(const SumsProblem& s, const MatmulPlan& plan, void* stream) {
  launch_plain(s.product, Sums{s.out, s.add}, plan, stream);
}

}  // namespace pt::cuda

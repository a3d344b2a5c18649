// SPDX-License-Identifier: Apache-2.0
// The launchers of plain products for sm_90a, of problems that `plan` took. They run on the current device, in order with the stream, and
// throw std::runtime_error.
#pragma once

#include "cuda/matmul/sm90/plan.h"

namespace pt::cuda {

void sm90_linear(const LinearProblem& p, const MatmulPlan& plan, void* stream);
void sm90_sums(const SumsProblem& p, const MatmulPlan& plan, void* stream);

}  // namespace pt::cuda

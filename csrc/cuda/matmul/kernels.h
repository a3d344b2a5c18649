// SPDX-License-Identifier: Apache-2.0
// The launchers of sm_90a gemms without a fused op, for problems that `plan_matmul` supports. They
// run on the current device in stream order and throw std::runtime_error.
#pragma once

#include "cuda/matmul/sm90/plan.h"

namespace pt::cuda {

void sm90_linear(const LinearProblem& p, const MatmulPlan& plan, void* stream);
void sm90_sums(const SumsProblem& p, const MatmulPlan& plan, void* stream);

}  // namespace pt::cuda

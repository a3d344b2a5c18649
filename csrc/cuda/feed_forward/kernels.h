// SPDX-License-Identifier: Apache-2.0
// The launchers, for gemms that `plan_matmul` supports. They run on the current device in stream
// order and throw std::runtime_error.
#pragma once

#include "cuda/feed_forward/problem.h"
#include "cuda/matmul/sm90/plan.h"

namespace pt::cuda {

void sm90_hidden(const HiddenProblem& f, const MatmulPlan& plan, void* stream);
void sm90_d_hidden(const HiddenGradient& f, const MatmulPlan& plan, void* stream);

}  // namespace pt::cuda

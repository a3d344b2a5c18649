// SPDX-License-Identifier: Apache-2.0
// The launchers, for gemms that `plan_matmul` supports. They run on the current device in stream
// order and throw std::runtime_error.
#pragma once

#include "cuda/cross_entropy/problem.h"
#include "cuda/cross_entropy/sm90/plan.h"

namespace pt::cuda {

void sm90_logit_partials(const LogitPartials& f, const MatmulPlan& plan, void* stream);
void sm90_loss(const LossProblem& f, const CrossEntropyPlan& plan, void* stream);
void sm90_d_logits_in_place(const ExponentialsProblem& f, void* stream);
void sm90_scale(const ScaleProblem& f, void* stream);
void sm90_d_logits(const DLogitsProblem& f, const MatmulPlan& plan, void* stream);

}  // namespace pt::cuda

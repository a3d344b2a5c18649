// SPDX-License-Identifier: Apache-2.0
// The launchers for the binding. They run on the current device in stream order and throw
// std::runtime_error.
#pragma once

#include "cuda/rotary/plan.h"
#include "cuda/rotary/problem.h"

namespace pt::cuda {

void rotary_forward(const RotaryProblem& p, const RotaryForward& f, const RotaryPlan& plan,
                    void* stream);
void rotary_backward(const RotaryProblem& p, const RotaryBackward& f, const RotaryPlan& plan,
                     void* stream);
void append_kv(const RotaryProblem& p, const AppendKV& f, const RotaryPlan& plan, void* stream);

}  // namespace pt::cuda

// SPDX-License-Identifier: Apache-2.0
// The launchers for the binding. They run on the current device in stream order and throw
// std::runtime_error.
#pragma once

#include "cuda/layer_norm/plan.h"
#include "cuda/layer_norm/problem.h"

namespace pt::cuda {

void layer_norm_forward(const LayerNormForward& f, const LayerNormPlan& plan, void* stream);
void layer_norm_backward(const LayerNormBackward& f, const LayerNormPlan& plan, void* stream);
void layer_norm_reduce(const LayerNormReduce& r, void* stream);

}  // namespace pt::cuda

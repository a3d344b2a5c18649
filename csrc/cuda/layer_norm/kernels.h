// The launchers, called by the torch edge. They run on the current device, in order with the stream, and throw std::runtime_error.
#pragma once

#include "cuda/layer_norm/plan.h"
#include "cuda/layer_norm/problem.h"

namespace pt::cuda {

void norm_forward(const NormForward& f, const NormPlan& plan, void* stream);
void norm_backward(const NormBackward& f, const NormPlan& plan, void* stream);
void norm_reduce(const NormReduce& r, void* stream);

}  // namespace pt::cuda

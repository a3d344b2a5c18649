// The launchers of the kernels for sm_90a, of problems that `plan` took. They run on the current device, in order with the stream, and
// throw std::runtime_error.
#pragma once

#include "cuda/attention/sm90_plan.h"

namespace pt::cuda {

void sm90_attention_forward(const AttentionForward& f, const Sm90Plan& plan, void* stream);
void sm90_attention_backward_queries(const AttentionBackward& g, const Sm90Plan& plan, void* stream);
void sm90_attention_backward_keys(const AttentionBackward& g, const Sm90Plan& plan, void* stream);
void sm90_attention_backward_fused(const AttentionBackward& g, const Sm90Plan& plan, void* stream);

}  // namespace pt::cuda

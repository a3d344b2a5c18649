// SPDX-License-Identifier: Apache-2.0
// The launchers of the sm_90a kernels, for problems that their plan supports. They run on the
// current device in stream order and throw std::runtime_error.
#pragma once

#include "cuda/attention/sm90/plan.h"
#include "cuda/ptx/platform.cuh"

namespace pt::cuda {

// Call run(T{}) for the problem's 16-bit element type.
template <class F>
void with_half(const AttentionProblem& p, F run) {
  if (p.dtype == DType::bf16) run(ptx::bf16{});
  else run(ptx::f16{});
}

// One dtype each, compiled in separate files: fwd_bf16.cu and so on.
template <class T>
void sm90_attention_forward_as(const AttentionForward& f, const Sm90Plan& plan, void* stream);
template <class T>
void sm90_attention_bwd_dq_as(const AttentionBackward& g, const Sm90Plan& plan, void* stream);
template <class T>
void sm90_attention_bwd_dkdv_as(const AttentionBackward& g, const Sm90Plan& plan, void* stream);
template <class T>
void sm90_attention_bwd_dbias_as(const AttentionDbias& f, const Sm90Plan& plan, void* stream);

// turns: zeros, or null.
void sm90_attention_backward_fused(const AttentionBackward& g, const Sm90Plan& plan,
                                   uint32_t* turns, void* stream);

}  // namespace pt::cuda

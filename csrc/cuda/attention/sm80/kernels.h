// SPDX-License-Identifier: Apache-2.0
// The launchers of the portable kernels. They run on the current device, in order with the stream, and throw std::runtime_error.
#pragma once

#include "cuda/attention/sm80/plan.h"

namespace pt::cuda {

// Of one dtype, each compiled in a file of its own: fwd_bf16.cu and so on.
template <class T>
void sm80_attention_forward_as(const AttentionForward& f, const Sm80Plan& plan, void* stream);
template <class T>
void sm80_attention_split_as(const AttentionForward& f, const SplitPlan& plan, void* stream);
// The same over keys and values in eight bits: fwd_eight_bits_bf16.cu and so on.
template <class T>
void sm80_attention_forward_eight_bits_as(const AttentionForward& f, const Sm80Plan& plan, void* stream);
template <class T>
void sm80_attention_split_eight_bits_as(const AttentionForward& f, const SplitPlan& plan, void* stream);
template <class T>
void sm80_attention_bwd_dq_as(const AttentionBackward& g, const Sm80Plan& plan, void* stream);
template <class T>
void sm80_attention_bwd_dkdv_as(const AttentionBackward& g, const Sm80Plan& plan, void* stream);
template <class T>
void sm80_attention_bwd_dbias_as(const AttentionDbias& f, const Sm80Plan& plan, void* stream);

}  // namespace pt::cuda

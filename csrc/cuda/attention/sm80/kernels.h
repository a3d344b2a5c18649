// SPDX-License-Identifier: Apache-2.0
// The launchers of the portable kernels. They run on the current device in stream order and throw
// std::runtime_error.
#pragma once

#include "cuda/attention/sm80/plan.h"

namespace pt::cuda {

// One dtype each, compiled in separate files: fwd_bf16.cu and so on.
template <class T>
void sm80_attention_forward_as(const AttentionForward& f, const Sm80Plan& plan, void* stream);
template <class T>
void sm80_attention_split_as(const AttentionForward& f, const SplitPlan& plan, void* stream);
// For eight-bit keys and values: fwd_eight_bits_bf16.cu and so on.
template <class T>
void sm80_attention_forward_eight_bits_as(const AttentionForward& f, const Sm80Plan& plan,
                                          void* stream);
template <class T>
void sm80_attention_split_eight_bits_as(const AttentionForward& f, const SplitPlan& plan,
                                        void* stream);
template <class T>
void sm80_attention_bwd_dq_as(const AttentionBackward& g, const Sm80Plan& plan, void* stream);
template <class T>
void sm80_attention_bwd_dkdv_as(const AttentionBackward& g, const Sm80Plan& plan, void* stream);
template <class T>
void sm80_attention_bwd_dbias_as(const AttentionDbias& f, const Sm80Plan& plan, void* stream);

}  // namespace pt::cuda

// SPDX-License-Identifier: Apache-2.0
// The launchers, each with its pass's plan: those that the binding calls, which choose between the
// portable and the sm_90a kernels, and those of one dtype. They run on the current device in stream
// order and throw std::runtime_error.
#pragma once

#include "cuda/attention/plan.h"

namespace pt::cuda {

void attention_key_padding(const AttentionKeyPadding& f, void* stream);
void attention_pair_bits(const AttentionPairBits& f, void* stream);
// Compute block states, or block lists: see AttentionMaskLists.
void attention_mask_lists(const AttentionMaskLists& f, void* stream);
// f.recompute is the plan's, with flags.
void attention_forward(const AttentionForward& f, const PassPlan& plan, void* stream);
void attention_backward_preprocess(const AttentionPreprocess& r, void* stream);
void attention_backward_dq(const AttentionBackward& g, const PassPlan& plan, void* stream);
void attention_backward_dkdv(const AttentionBackward& g, const PassPlan& plan, void* stream);
// Compute d_query, d_key and d_value at once. Blocks add d_query to g.dq_accum, whose size is in
// the plan: in the order given by `turns` (zeros, size in the plan), or in any order if `turns` is
// null, and then g.dq_accum contains zeros.
void attention_backward_fused(const AttentionBackward& g, const BackwardPlan& plan, uint32_t* turns,
                              void* stream);
void attention_backward_dbias(const AttentionDbias& f, const PassPlan& plan, void* stream);
void attention_backward_dsinks(const AttentionDsinks& f, void* stream);
void attention_backward_reduce_partials(const AttentionReducePartials& f, void* stream);

// The portable kernels of one dtype. The build generates the files that compile them: see
// INSTANTIATIONS in csrc/cuda_build.py.
template <class T>
void sm80_attention_forward_as(const AttentionForward& f, const Sm80Plan& plan, void* stream);
template <class T>
void sm80_attention_split_as(const AttentionForward& f, const SplitPlan& plan, void* stream);
// For eight-bit keys and values.
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

// The sm_90a kernels of one dtype, for problems that their plan supports.
template <class T>
void sm90_attention_forward_as(const AttentionForward& f, const Sm90Plan& plan, void* stream);
template <class T>
void sm90_attention_bwd_dq_as(const AttentionBackward& g, const Sm90Plan& plan, void* stream);
template <class T>
void sm90_attention_bwd_dkdv_as(const AttentionBackward& g, const Sm90Plan& plan, void* stream);
template <class T>
void sm90_attention_bwd_dbias_as(const AttentionDbias& f, const Sm90Plan& plan, void* stream);
// turns: zeros, or null.
template <class T>
void sm90_attention_bwd_fused_as(const AttentionBackward& g, const Sm90Plan& plan, uint32_t* turns,
                                 void* stream);

}  // namespace pt::cuda

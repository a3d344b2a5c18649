// SPDX-License-Identifier: Apache-2.0
// The launchers for the binding, each with its pass's plan. They run on the current device in
// stream order and throw std::runtime_error.
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

}  // namespace pt::cuda

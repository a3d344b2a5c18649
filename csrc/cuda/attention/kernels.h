// SPDX-License-Identifier: Apache-2.0
// The launchers, called by the binding, each with its pass's plan. They run on the current device, in order with the stream, and throw
// std::runtime_error.
#pragma once

#include "cuda/attention/plan.h"

namespace pt::cuda {

void attention_key_padding(const AttentionKeyPadding& f, void* stream);
void attention_pair_bits(const AttentionPairBits& f, void* stream);
// States of blocks, or lists of them: see AttentionMaskLists.
void attention_mask_lists(const AttentionMaskLists& f, void* stream);
// f.recompute is the plan's, with flags.
void attention_forward(const AttentionForward& f, const PassPlan& plan, void* stream);
void attention_backward_preprocess(const AttentionPreprocess& r, void* stream);
void attention_backward_dq(const AttentionBackward& g, const PassPlan& plan, void* stream);
void attention_backward_dkdv(const AttentionBackward& g, const PassPlan& plan, void* stream);
// d_query, d_key and d_value at once, the first added across blocks: to g.dq_accum, of as many numbers as the plan says. In order, by
// `turns`, as many zeros as the plan says; or, if that is null, in any order, and then the numbers are zeros.
void attention_backward_fused(const AttentionBackward& g, const BackwardPlan& plan, uint32_t* turns, void* stream);
void attention_backward_dbias(const AttentionDbias& f, const PassPlan& plan, void* stream);
void attention_backward_dsinks(const AttentionDsinks& f, void* stream);
void attention_backward_reduce_partials(const AttentionReducePartials& f, void* stream);

}  // namespace pt::cuda

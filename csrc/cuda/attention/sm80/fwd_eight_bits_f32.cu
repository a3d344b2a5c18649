// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/sm80/fwd_split.cuh"

template void pt::cuda::sm80_attention_forward_eight_bits_as<float>(const AttentionForward&,
                                                                    const Sm80Plan&, void*);
template void pt::cuda::sm80_attention_split_eight_bits_as<float>(const AttentionForward&,
                                                                  const SplitPlan&, void*);

// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/sm90/bwd_fused.cuh"

template void pt::cuda::sm90_attention_bwd_fused_as<pt::ptx::bf16>(const AttentionBackward&,
                                                                   const Sm90Plan&, uint32_t*,
                                                                   void*);
template void pt::cuda::sm90_attention_bwd_fused_as<pt::ptx::f16>(const AttentionBackward&,
                                                                  const Sm90Plan&, uint32_t*,
                                                                  void*);

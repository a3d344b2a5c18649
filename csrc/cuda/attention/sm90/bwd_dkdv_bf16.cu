// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/sm90/bwd_dkdv.cuh"

template void pt::cuda::sm90_attention_bwd_dkdv_as<pt::ptx::bf16>(const AttentionBackward&,
                                                                  const Sm90Plan&, void*);

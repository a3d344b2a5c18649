// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/sm90/bwd_dbias.cuh"

template void pt::cuda::sm90_attention_bwd_dbias_as<pt::ptx::bf16>(const AttentionDbias&,
                                                                   const Sm90Plan&, void*);

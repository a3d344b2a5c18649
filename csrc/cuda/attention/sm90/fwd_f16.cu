// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/sm90/fwd.cuh"

template void pt::cuda::sm90_attention_forward_as<pt::ptx::f16>(const AttentionForward&,
                                                                const Sm90Plan&, void*);

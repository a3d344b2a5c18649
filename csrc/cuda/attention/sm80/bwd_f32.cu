// SPDX-License-Identifier: Apache-2.0
#include "cuda/attention/sm80/bwd_dbias.cuh"
#include "cuda/attention/sm80/bwd_dkdv.cuh"
#include "cuda/attention/sm80/bwd_dq.cuh"

namespace pt::cuda {

template void sm80_attention_bwd_dq_as<float>(const AttentionBackward&, const Sm80Plan&, void*);
template void sm80_attention_bwd_dkdv_as<float>(const AttentionBackward&, const Sm80Plan&, void*);
template void sm80_attention_bwd_dbias_as<float>(const AttentionDbias&, const Sm80Plan&, void*);

}  // namespace pt::cuda

#include "cuda/attention/sm90_bwd_dense_launch.cuh"

template void pt::cuda::sm90_attention_dense_as<pt::ptx::bf16>(const AttentionDense&, const Sm90Plan&, void*);

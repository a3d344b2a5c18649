#include "cuda/attention/sm80/fwd_launch.cuh"

template void pt::cuda::attention_forward_as<float>(const AttentionForward&, const AttentionPlan&, void*);

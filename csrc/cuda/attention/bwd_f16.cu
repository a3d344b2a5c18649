#include "cuda/attention/bwd_launch.cuh"

namespace pt::cuda {

template void attention_queries_as<ptx::f16>(const AttentionBackward&, const AttentionPlan&, void*);
template void attention_keys_as<ptx::f16>(const AttentionBackward&, const AttentionPlan&, void*);
template void attention_dense_as<ptx::f16>(const AttentionDense&, const AttentionPlan&, void*);

}  // namespace pt::cuda

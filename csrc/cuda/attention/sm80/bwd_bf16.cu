#include "cuda/attention/sm80/bwd_launch.cuh"

namespace pt::cuda {

template void attention_bwd_dq_as<ptx::bf16>(const AttentionBackward&, const AttentionPlan&, void*);
template void attention_bwd_dkdv_as<ptx::bf16>(const AttentionBackward&, const AttentionPlan&, void*);
template void attention_bwd_dbias_as<ptx::bf16>(const AttentionDbias&, const AttentionPlan&, void*);

}  // namespace pt::cuda

// SPDX-License-Identifier: Apache-2.0
#include <type_traits>

#include "cuda/cross_entropy/kernels.h"
#include "cuda/cross_entropy/sm90/fwd.cuh"
#include "cuda/matmul/sm90/launch.cuh"

namespace pt::cuda {

void sm90_logit_partials(const LogitPartials& f, const MatmulPlan& plan, void* stream) {
  const int64_t tiles = (f.product.columns + kClassTile - 1) / kClassTile;
  with_half(f.product.dtype, [&](auto t) {
    const auto run = [&](const auto& epilogue) {
      launch_matmul<decltype(t), NT>(f.product, epilogue, plan, stream);
    };
    const float cap = f.softcap;
    if (cap != 0)
      return run(RowPartials<true, false>{
          {cap, 1 / cap}, {}, {f.bias}, f.labels, f.partials, f.picked, tiles});
    if constexpr (std::is_same_v<decltype(t), ptx::bf16>)
      if (f.exponentials.data)
        return run(RowPartials<false, true>{
            {}, {f.exponentials}, {f.bias}, f.labels, f.partials, f.picked, tiles});
    run(RowPartials<false, false>{{}, {}, {f.bias}, f.labels, f.partials, f.picked, tiles});
  });
}

void sm90_loss(const LossProblem& f, const CrossEntropyPlan& plan, void* stream) {
  launch(cross_entropy_loss_kernel, dim3(unsigned(plan.blocks)), 32 * kLossWarps, plan.smem_bytes,
         stream, f);
}

}  // namespace pt::cuda

// SPDX-License-Identifier: Apache-2.0
#include <type_traits>

#include "cuda/cross_entropy/kernels.h"
#include "cuda/cross_entropy/sm90/bwd.cuh"
#include "cuda/matmul/sm90/launch.cuh"

namespace pt::cuda {

void sm90_d_logits(const DLogitsProblem& f, const MatmulPlan& plan, void* stream) {
  const int64_t classes = f.product.columns;
  const float share = f.labels.on_each / float(classes);
  const auto launch_with = [&](auto options) {
    constexpr bool kOptions = !std::is_same_v<decltype(options), DLogitsOptions<false>>;
    const DLogits<kOptions> epilogue{{f.bias},   f.labels,        f.row_max, f.log_sum, f.g,
                                     f.d_logits, f.bias_partials, share,     options};
    with_half(f.product.dtype,
              [&](auto t) { launch_matmul<decltype(t), NT>(f.product, epilogue, plan, stream); });
  };
  if (!f.p_factor) return launch_with(DLogitsOptions<false>{});
  const float inverse = f.softcap != 0 ? 1 / f.softcap : 0.0f;
  launch_with(DLogitsOptions<true>{f.p_factor, {f.softcap, inverse}});
}

}  // namespace pt::cuda

// SPDX-License-Identifier: Apache-2.0
#include "cuda/feed_forward/kernels.h"
#include "cuda/feed_forward/sm90/fwd.cuh"
#include "cuda/feed_forward/sm90/launch.cuh"

namespace pt::cuda {

void sm90_hidden(const HiddenProblem& f, const MatmulPlan& plan, void* stream) {
  with_kind(f.product, f.activation, [&](auto t, auto activation) {
    using T = decltype(t);
    constexpr Activation A = decltype(activation)::value;
    if (f.product.gated) {
      const Hidden<A, true> epilogue{f.dropout, {f.b1, f.gate_bias}, f.hidden, f.pre, f.gate};
      launch_matmul<T, GatedNT>(f.product, epilogue, plan, stream);
    } else {
      const Hidden<A, false> epilogue{f.dropout, {f.b1}, f.hidden, f.pre, f.gate};
      launch_matmul<T, NT>(f.product, epilogue, plan, stream);
    }
  });
}

}  // namespace pt::cuda

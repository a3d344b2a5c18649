// SPDX-License-Identifier: Apache-2.0
#include "cuda/feed_forward/kernels.h"
#include "cuda/feed_forward/sm90/bwd.cuh"
#include "cuda/feed_forward/sm90/launch.cuh"

namespace pt::cuda {

void sm90_d_hidden(const HiddenGradient& f, const MatmulPlan& plan, void* stream) {
  const Matrix panels[] = {f.pre, f.gate};
  with_kind(f.product, f.activation, [&](auto t, auto activation) {
    using T = decltype(t);
    constexpr Activation A = decltype(activation)::value;
    const auto run = [&](auto epilogue) {
      epilogue = {f.dropout, f.d_pre, f.d_gate, f.hidden, f.b1_partials, f.gate_bias_partials};
      launch_matmul<T, NN>(f.product, epilogue, plan, stream, panels);
    };
    if (f.gate.data) run(DHidden<A, true>{});
    else run(DHidden<A, false>{});
  });
}

}  // namespace pt::cuda

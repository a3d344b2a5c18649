#include "cuda/feed_forward/fwd.cuh"
#include "cuda/feed_forward/kernels.h"
#include "cuda/feed_forward/launch.cuh"

namespace pt::cuda {

void sm90_hidden(const HiddenProblem& f, const MatmulPlan& plan, void* stream) {
  with_kind(f.product, f.activation, [&](auto t, auto activation) {
    using T = decltype(t);
    constexpr Activation A = decltype(activation)::value;
    const auto run = [&](auto epilogue, auto operands) {
      epilogue = {f.dropout, f.b1, f.gate_bias, f.hidden, f.pre, f.gate};
      launch_matmul<T, decltype(operands)>(f.product, epilogue, plan, stream);
    };
    if (f.product.gated) run(Hidden<A, true>{}, GatedNT{});
    else run(Hidden<A, false>{}, NT{});
  });
}

}  // namespace pt::cuda

// SPDX-License-Identifier: Apache-2.0
// Dispatch of the launchers on dtype and activation.
#pragma once

#include <type_traits>

#include "cuda/feed_forward/problem.h"
#include "cuda/matmul/sm90/launch.cuh"

namespace pt::cuda {

template <Activation A>
using ActivationTag = std::integral_constant<Activation, A>;

// Call run(T{}, tag) for the element type and the activation.
template <class F>
void with_kind(const Product& p, Activation activation, F run) {
  with_half(p.dtype, [&](auto t) {
    switch (activation) {
      case Activation::relu: return run(t, ActivationTag<Activation::relu>{});
      case Activation::gelu: return run(t, ActivationTag<Activation::gelu>{});
      case Activation::gelu_tanh: return run(t, ActivationTag<Activation::gelu_tanh>{});
      case Activation::silu: return run(t, ActivationTag<Activation::silu>{});
    }
  });
}

}  // namespace pt::cuda

// SPDX-License-Identifier: Apache-2.0
// The softcap of logits, z = cap tanh(u / cap), as a part of an epilogue.
#pragma once

#include "cuda/tile/tanh.cuh"

namespace pt::cuda {

// Base of an epilogue. Empty without a softcap, so that a kernel without one keeps its parameters'
// places.
template <bool kSoftcap>
struct Softcap {};
template <>
struct Softcap<true> {
  float cap, inverse;

  PT_DEVICE float capped(float u) const { return cap * tanh_of(u * inverse); }
};

}  // namespace pt::cuda

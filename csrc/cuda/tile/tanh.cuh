// SPDX-License-Identifier: Apache-2.0
// tanh, for the softcaps of attention and cross entropy.
#pragma once

#include "cuda/tile/numbers.cuh"

namespace pt::cuda {

// tanh to 2e-7 relative: a fitted odd polynomial below 0.6, 1 - 2 / (1 + e^2x) above.
PT_DEVICE float tanh_of(float x) {
  const float z = x * x, size = x < 0 ? -x : x;
  float p = ptx::fma_rn(z, -0.005894480914075617f, 0.020795446692862346f);
  p = ptx::fma_rn(p, z, -0.05378369286235975f);
  p = ptx::fma_rn(p, z, 0.1333192275238217f);
  p = ptx::fma_rn(p, z, -0.3333329796161276f);
  const float large = 1.0f - ptx::div_rn(2.0f, 1.0f + ptx::exp2(size * (2 * kLog2e)));
  return size < 0.6f ? ptx::fma_rn(x * z, p, x) : x < 0 ? -large : large;
}

}  // namespace pt::cuda

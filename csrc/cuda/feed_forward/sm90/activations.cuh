// SPDX-License-Identifier: Apache-2.0
// Activations and their derivatives, accurate enough for 16-bit results.
#pragma once

#include "cuda/feed_forward/problem.h"
#include "cuda/ptx/arithmetic.cuh"

namespace pt::cuda {

struct ValueSlope {
  float value, slope;
};

PT_DEVICE float sigmoid(float x) {
  constexpr float kLog2e = 1.4426950408889634f;
  return ptx::rcp(1.0f + ptx::exp2(-kLog2e * x));
}

// Return act(x) and act'(x); the compiler removes an unused one. NaN stays NaN.
template <Activation A>
PT_DEVICE ValueSlope activate(float x) {
  if constexpr (A == Activation::relu) {
    return {x <= 0.0f ? 0.0f : x, x > 0.0f ? 1.0f : 0.0f};
  } else if constexpr (A == Activation::silu) {
    const float s = sigmoid(x);
    return {x * s, ptx::fma_rn(x * s, 1.0f - s, s)};
  } else if constexpr (A == Activation::gelu_tanh) {
    // x sigmoid(2 u) = x (1 + tanh u) / 2 with u = sqrt(2 / pi) (x + 0.044715 x^3). Clamped to 32,
    // where it is saturated and the square is finite.
    constexpr float kLinear = 1.5957691216057308f, kCubic = 0.044715f * kLinear;
    const float c = x > 32.0f ? 32.0f : x < -32.0f ? -32.0f : x, square = c * c;
    const float s = sigmoid(c * ptx::fma_rn(kCubic, square, kLinear));
    const float cubic = 3.0f * kCubic;
    return {x * s, ptx::fma_rn(c * s, (1.0f - s) * ptx::fma_rn(cubic, square, kLinear), s)};
  } else {
    // x Phi(x) with the tail Q(t) = exp(-t^2 / 2) u P(u), u = 1 / (1 + 0.3 t). P is a fit of Mills'
    // ratio on [0, 14] with relative error 8.3e-6 (csrc/cpu/feed_forward/activations.h has a
    // float32 fit).
    constexpr float kP[] = {-0.0771019757f, 0.216050282f, -0.016962748f,
                            0.144204095f,   0.113740027f, 0.120074406f};
    constexpr float kHalfLog2e = 0.7213475204444817f, kDensity = 0.3989422804014327f;
    const float t = x < 0.0f ? -x : x, e = ptx::exp2(-kHalfLog2e * x * x),
                u = ptx::rcp(ptx::fma_rn(0.3f, t, 1.0f));
    float p = kP[0];
    PT_UNROLL
    for (int i = 1; i < 6; ++i) p = ptx::fma_rn(p, u, kP[i]);
    const float q = e * (p * u), cdf = x < 0.0f ? q : 1.0f - q;
    return {x * cdf, ptx::fma_rn(x * kDensity, e, cdf)};
  }
}

}  // namespace pt::cuda

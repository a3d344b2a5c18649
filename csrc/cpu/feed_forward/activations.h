// SPDX-License-Identifier: Apache-2.0
// Activations and their derivatives, on vectors of float and double.
#pragma once

#include <cmath>

#include "cpu/core/traits.h"
#include "cpu/feed_forward/problem.h"

namespace pt {
namespace PT_ISA {

template <class V>
struct ValueSlope {
  V value, slope;
};

#if defined(__FMA__)
// a * b + c in one rounding, by intrinsic: for a * b - ab with ab = a * b, GCC's contraction gives
// 0.
INLINE vf fma_by_name(vf a, vf b, vf c) {
#if defined(__AVX512F__)
  return fma(a, b, c);
#else
  return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#endif
}
#endif

// exp(-x^2 / 2) for 0 <= x <= 20. x^2 is a sum of two floats: its rounding alone would cost 5e-6 at
// x = 13.
#if defined(__FMA__)
INLINE
#else  // GCC 12 for aarch64 fails on it inline (internal error)
inline __attribute__((noinline))
#endif
vf exp_minus_half_square(vf x) {
  constexpr double k = -0.5 * kLog2e;
#if defined(__FMA__)
  constexpr float high = float(k), low = float(k - double(high));
  const vf square = x * x, rest = fma_by_name(x, x, -square);
  const vf z = square * set1<vf>(high);
  const vf correction =
      fma_by_name(square, set1<vf>(high), -z) + fma(square, set1<vf>(low), rest * set1<vf>(high));
#else  // double preserves the rounding error
  vf z, correction;
  for (int i = 0; i < kWidth<vf>; i++) {
    const double exponent = k * x[i] * x[i];
    z[i] = float(exponent), correction[i] = float(exponent - z[i]);
  }
#endif
  return exp2v<5>(z) * fma(correction, set1<vf>(float(kLn2)), set1<vf>(1.f));
}

// P[0] x^(N - 1) + ... + P[N - 1]
template <int N>
INLINE vf polynomial(const float (&P)[N], vf x) {
  vf p = set1<vf>(P[0]);
  UNROLL for (int i = 1; i < N; i++) p = fma(p, x, set1<vf>(P[i]));
  return p;
}

// x Phi(x), with the normal distribution function Phi, and its derivative Phi(x) + x phi(x). The
// upper tail is Q(t) = exp(-t^2 / 2) u P(u), u = 1 / (1 + 0.3 t), with a polynomial P fitted to
// Mills' ratio on [0, 14.5] to a relative error of 3.5e-9. Phi(x) = Q(-x) for x < 0, so that gelu
// has a relative accuracy of 2 eps where erf would cancel.
// HALF, for results rounded to 16 bits: error 2.4e-5, 1.6e-5 from P and 5e-6 from rounding t^2 at
// 13. It takes half the time, which was 7 % of a step of 1024 x 512 x 2048 in bfloat16.
template <bool HALF>
INLINE ValueSlope<vf> gelu(vf x) {
  constexpr float P[] = {-0.0206235521f, 0.112436063f,  -0.228214651f, 0.191785926f, -0.0794246359f,
                         0.0961574379f,  0.0783894444f, 0.110235468f,  0.119571809f, 0.11968669f};
  constexpr float R[] = {-0.0731040463f, 0.204289377f, -0.00389137212f,
                         0.13740705f,    0.11537759f,  0.119929418f};
  const vf t = vmin(set1<vf>(20.f), vabs(x)),
           u = set1<vf>(1.f) / fma(set1<vf>(0.3f), t, set1<vf>(1.f));
  const vf e =
      HALF ? exp2v<4>(vf(t * t * set1<vf>(float(-0.5 * kLog2e)))) : exp_minus_half_square(t);
  const vf q = e * ((HALF ? polynomial(R, u) : polynomial(P, u)) * u), cdf = x < 0 ? q : 1 - q;
  return {x * cdf, fma(x, e * set1<vf>(0.3989422804014327f), cdf)};
}
template <bool>
INLINE ValueSlope<vd> gelu(vd x) {
  ValueSlope<vd> r;
  for (int i = 0; i < kWidth<vd>; i++) {
    const double cdf = 0.5 * std::erfc(-x[i] * 0.70710678118654752440);
    r.value[i] = x[i] * cdf;
    r.slope[i] = cdf + x[i] * 0.39894228040143267794 * std::exp(-0.5 * x[i] * x[i]);
  }
  return r;
}

template <class V>
INLINE V sigmoid(V x) {
  return 1 / (1 + exp2v<5>(V(x * set1<V>(scalar_of<V>(-kLog2e)))));
}

// x sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3), which equals x (1 + tanh u) / 2. Saturated
// beyond |x| = 40.
template <class V>
INLINE ValueSlope<V> gelu_tanh(V x) {
  using A = scalar_of<V>;
  const V c = vmin(set1<V>(40), vmax(set1<V>(-40), x)), square = c * c;
  const V s = sigmoid(V(c * fma(set1<V>(A(2 * 0.79788456080286535588 * 0.044715)), square,
                                set1<V>(A(2 * 0.79788456080286535588)))));
  const V slope = fma(set1<V>(A(6 * 0.79788456080286535588 * 0.044715)), square,
                      set1<V>(A(2 * 0.79788456080286535588)));
  return {x * s, fma(c * s, (1 - s) * slope, s)};
}
template <class V>
INLINE ValueSlope<V> silu(V x) {
  const V c = vmin(set1<V>(1000), vmax(set1<V>(-1000), x)), s = sigmoid(c);
  return {x * s, fma(c * s, 1 - s, s)};
}
template <class V>
INLINE ValueSlope<V> relu(V x) {
  return {vmax(V{}, x), x > 0 ? set1<V>(1) : V{}};
}

// Call f(function from V to ValueSlope<V>) for the traits T of the results, once per row.
template <class T, class F>
INLINE void with_activation(Activation a, const F& f) {
  constexpr bool half = sizeof(typename T::elem) == 2;
  switch (a) {
    case Activation::relu: return f([](auto x) { return relu(x); });
    case Activation::gelu: return f([](auto x) { return gelu<half>(x); });
    case Activation::gelu_tanh: return f([](auto x) { return gelu_tanh(x); });
    case Activation::silu: return f([](auto x) { return silu(x); });
  }
}

}  // namespace PT_ISA
}  // namespace pt

// SPDX-License-Identifier: Apache-2.0
// tanh and its derivative, for the softcaps of attention and cross entropy.
#pragma once

#include "cpu/core/vec.h"

namespace pt {
namespace PT_ISA {

// t = tanh(y) and slope = 1 - t^2, each to a few roundings.
INLINE void tanh_and_slope(vf y, vf* t, vf* slope) {
  const vf a = vabs(y), e = exp2v<5>(vf(vmin(set1<vf>(20.f), a) * float(2 * kLog2e)));
  const vf u = 2.f / (e + 1.f), z = y * y;  // 1 - tanh(a) = u
  // odd polynomial near 0 (Cephes tanhf)
  vf p = fma(set1<vf>(-5.70498872745e-3f), z, set1<vf>(2.06390887954e-2f));
  p = fma(p, z, set1<vf>(-5.37397155531e-2f)), p = fma(p, z, set1<vf>(1.33314422036e-1f)),
  p = fma(p, z, set1<vf>(-3.33332819422e-1f));
  const vf small = fma(vf(p * z), y, y), large = (vf)((vi32)(1.f - u) | ((vi32)y & INT32_MIN));
  const vi32 near = a < 0.625f;
  *t = a != a ? a : near ? small : large;
  *slope = a != a ? a : near ? 1.f - small * small : u * (2.f - u);
}
INLINE void tanh_and_slope(vd y, vd* t, vd* slope) {
  for (int i = 0; i < kWidth<vd>; i++) {
    const double a = __builtin_fabs(y[i]), e = __builtin_expm1(2 * min(a, 300.)), u = 2 / (e + 2);
    (*t)[i] = __builtin_copysign(e / (e + 2), y[i]), (*slope)[i] = u * (2 - u);
    if (a != a) (*t)[i] = (*slope)[i] = a;
  }
}

}  // namespace PT_ISA
}  // namespace pt

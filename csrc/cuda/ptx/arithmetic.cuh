// SPDX-License-Identifier: Apache-2.0
// Floating-point instructions and conversions.
#pragma once

#include "cuda/ptx/platform.cuh"

namespace pt::ptx {

// "Floating-Point Instructions: ex2". 2^x within 2^-22 relative; subnormal results are flushed.
PT_DEVICE float exp2(float x) {
#if defined(PT_EMULATE)
  return emu::flush(::exp2f(x));
#else
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#endif
}

// "Floating-Point Instructions: lg2". log2(x) within 2^-22.6 absolute or 2 ulp; subnormal x counts
// as 0.
PT_DEVICE float log2(float x) {
#if defined(PT_EMULATE)
  return ::log2f(emu::flush(x));
#else
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#endif
}

// "Floating-Point Instructions: sqrt", correctly rounded.
PT_DEVICE float sqrt_rn(float x) {
#if defined(PT_EMULATE)
  return std::sqrt(x);
#else
  float y;
  asm("sqrt.rn.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#endif
}

// "Floating-Point Instructions: div", correctly rounded.
PT_DEVICE float div_rn(float a, float b) {
#if defined(PT_EMULATE)
  return a / b;
#else
  float y;
  asm("div.rn.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
#endif
}

// "Floating-Point Instructions: rcp". 1 / x within 1 ulp; subnormal x counts as 0, and subnormal
// results are flushed.
PT_DEVICE float rcp(float x) {
#if defined(PT_EMULATE)
  return emu::flush(1.0f / emu::flush(x));
#else
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#endif
}

// "Floating-Point Instructions: fma".
PT_DEVICE float fma_rn(float a, float b, float c) {
#if defined(PT_EMULATE)
  return std::fma(a, b, c);
#else
  float y;
  asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(y) : "f"(a), "f"(b), "f"(c));
  return y;
#endif
}

// "Data Movement and Conversion Instructions: cvt", round to nearest even. `low` becomes the low
// half; every NaN becomes 0x7fff.
PT_DEVICE uint32_t pack_bf16(float low, float high) {
#if defined(PT_EMULATE)
  return emu::to_bf16(low) | uint32_t(emu::to_bf16(high)) << 16;
#else
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
#endif
}

// "Data Movement and Conversion Instructions: cvt", round to nearest even; every NaN becomes
// 0x7fff.
PT_DEVICE uint32_t pack_f16(float low, float high) {
#if defined(PT_EMULATE)
  return emu::to_f16(low) | uint32_t(emu::to_f16(high)) << 16;
#else
  uint32_t packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
#endif
}

// Like pack_f16, but saturates to float16's largest finite value; a NaN stays NaN.
PT_DEVICE uint32_t pack_f16_finite(float low, float high) {
#if defined(PT_EMULATE)
  return emu::to_f16(emu::saturate_f16(low)) | uint32_t(emu::to_f16(emu::saturate_f16(high))) << 16;
#else
  uint32_t packed;
  asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
#endif
}

// "Data Movement and Conversion Instructions: prmt", of one word. Each nibble of the selector names
// a byte of x, 0 to 3; 8 + the byte repeats its highest bit.
template <uint32_t Selector>
PT_DEVICE uint32_t prmt(uint32_t x) {
#if defined(PT_EMULATE)
  uint32_t y = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t nibble = Selector >> 4 * i & 15, byte = x >> 8 * (nibble & 3) & 255;
    y |= (nibble < 8 ? byte : byte < 128 ? 0 : 255) << 8 * i;
  }
  return y;
#else
  uint32_t y;
  asm("prmt.b32 %0, %1, 0, %2;" : "=r"(y) : "r"(x), "n"(Selector));
  return y;
#endif
}

// "Data Movement and Conversion Instructions: cvt", exact.
PT_DEVICE float widen(f16 x) {
#if defined(PT_EMULATE)
  return emu::from_f16(x.bits);
#else
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
#endif
}

// Exact; a shift.
PT_DEVICE float widen(bf16 x) { return bits_float(uint32_t(x.bits) << 16); }

}  // namespace pt::ptx

// SPDX-License-Identifier: Apache-2.0
// GPU number formats on the CPU.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace emu {

inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
inline float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

// .ftz: flush subnormals to zero, preserving the sign.
inline float flush(float x) {
  return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0f, x) : x;
}

inline float from_bf16(uint16_t bits) { return float_of(uint32_t(bits) << 16); }
// Convert without F16C: the compiler would call a libgcc function per gemm operand, 4 % of the
// emulator's time.
inline float from_f16(uint16_t bits) {
  const uint32_t magnitude = uint32_t(bits & 0x7fff) << 13;
  const bool finite = (bits & 0x7c00) != 0x7c00;
  // Rebias the exponent; exact, subnormals included.
  const float scaled = float_of(magnitude) * 0x1p112f;
  const uint32_t quiet = bits & 0x3ff ? 0x400000 : 0;
  return float_of((finite ? bits_of(scaled) : magnitude | 0x7f800000 | quiet) |
                  uint32_t(bits & 0x8000) << 16);
}

// Round to nearest even; every NaN becomes 0x7fff, as in cvt.rn.
inline uint16_t to_bf16(float x) {
  const uint32_t u = bits_of(x);
  return x != x ? 0x7fff : uint16_t((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
inline float saturate_f16(float x) {
  return x > 65504.0f ? 65504.0f : x < -65504.0f ? -65504.0f : x;
}
inline uint16_t to_f16(float x) {
  if (x != x) return 0x7fff;
  const _Float16 rounded = _Float16(x);
  uint16_t bits;
  std::memcpy(&bits, &rounded, 2);
  return bits;
}

}  // namespace emu

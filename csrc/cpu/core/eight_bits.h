// SPDX-License-Identifier: Apache-2.0
// Exact widening of int8 and float8_e4m3fn, one number per float lane.
#pragma once

#include "cpu/core/traits.h"

namespace pt {
namespace PT_ISA {

constexpr int kFloatLanes = kVecBytes / int(sizeof(float));

INLINE vf int8_to_float(const uint8_t* p) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtepi32_ps(
      _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__AVX2__)
  return (vf)_mm256_cvtepi32_ps(
      _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
  vi32 x{};
  for (int i = 0; i < kFloatLanes; i++) x[i] = int8_t(p[i]);
  return __builtin_convertvector(x, vf);
#endif
}

// Convert through float16: shifted to float16's fields, the bits are 2^-8 of the number, subnormals
// included. float16 conversion reads subnormals even if the thread flushes them. 0x7f is NaN.
INLINE vf e4m3_to_float(const uint8_t* p) {
#if defined(__AVX512F__)
  const __m256i x = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __m256i size = _mm256_slli_epi16(_mm256_and_si256(x, _mm256_set1_epi16(0x7f)), 7);
  const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(x, _mm256_set1_epi16(0x80)), 8);
  const __m256i nan = _mm256_cmpeq_epi16(size, _mm256_set1_epi16(0x3f80));
  const __m256i half = _mm256_or_si256(_mm256_or_si256(size, sign),
                                       _mm256_and_si256(nan, _mm256_set1_epi16(0x7c00)));
  return (vf)_mm512_cvtph_ps(half) * 256.f;
#elif defined(__AVX2__) && defined(__F16C__)
  const __m128i x = _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  const __m128i size = _mm_slli_epi16(_mm_and_si128(x, _mm_set1_epi16(0x7f)), 7);
  const __m128i sign = _mm_slli_epi16(_mm_and_si128(x, _mm_set1_epi16(0x80)), 8);
  const __m128i nan = _mm_cmpeq_epi16(size, _mm_set1_epi16(0x3f80));
  const __m128i half =
      _mm_or_si128(_mm_or_si128(size, sign), _mm_and_si128(nan, _mm_set1_epi16(0x7c00)));
  return (vf)_mm256_cvtph_ps(half) * 256.f;
#else
  vi32 x{};
  for (int i = 0; i < kFloatLanes; i++) x[i] = p[i];
  const vi32 size = x & 0x7f;
  const vf normal = (vf)((size << 20) + (120 << 23)),
           small = __builtin_convertvector(size, vf) * 0x1p-9f;
  const vi32 bits = size < 8 ? (vi32)small : (vi32)normal;
  return (vf)((size == 0x7f ? bits | 0x7fc00000 : bits) | (x & 0x80) << 24);
#endif
}

INLINE void put(float* to, vf v) { storeu(to, v); }
template <class E>
INLINE void put(E* to, vf v) {
  from_float(to, v);
}

#if defined(__AVX512BF16__)
// Widen 32 numbers to bfloat16. e4m3 uses integer operations, twice as fast as through float:
// normal numbers get a new exponent, and the eight other values come from a table.
template <bool INT8>
INLINE __m512i widen_pairs(const uint8_t* p) {
  if constexpr (INT8) {
    return (__m512i)_mm512_cvtne2ps_pbh((__m512)int8_to_float(p + kFloatLanes),
                                        (__m512)int8_to_float(p));
  } else {
    alignas(64) static const uint16_t kSubnormal[32] = {0,      0x3b00, 0x3b80, 0x3bc0,
                                                        0x3c00, 0x3c20, 0x3c40, 0x3c60};
    const __m512i x = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    const __m512i size = _mm512_and_si512(x, _mm512_set1_epi16(0x7f)),
                  sign = _mm512_slli_epi16(_mm512_xor_si512(x, size), 8);
    const __m512i normal =
        _mm512_add_epi16(_mm512_slli_epi16(size, 4), _mm512_set1_epi16(120 << 7));
    const __mmask32 small = _mm512_testn_epi16_mask(x, _mm512_set1_epi16(0x78));
    const __mmask32 nan = _mm512_cmpeq_epi16_mask(size, _mm512_set1_epi16(0x7f));
    const __m512i number =
        _mm512_mask_permutexvar_epi16(normal, small, size, _mm512_load_si512(kSubnormal));
    return _mm512_or_si512(_mm512_mask_mov_epi16(number, nan, _mm512_set1_epi16(0x7fc0)), sign);
  }
}
#endif

template <bool INT8, class E>
INLINE void widen_row(const uint8_t* row, int64_t d, E* to) {
  const auto widened = [](const uint8_t* p) { return INT8 ? int8_to_float(p) : e4m3_to_float(p); };
  int64_t c = 0;
#if defined(__AVX512BF16__)
  if constexpr (std::is_same_v<E, bf16>)
    for (; c + 2 * kFloatLanes <= d; c += 2 * kFloatLanes)
      _mm512_storeu_si512(to + c, widen_pairs<INT8>(row + c));
#endif
  for (; c + kFloatLanes <= d; c += kFloatLanes) put(to + c, widened(row + c));
  if (c == d) return;
  uint8_t rest[kFloatLanes] = {};
  for (int64_t i = 0; c + i < d; i++) rest[i] = row[c + i];
  put(to + c, widened(rest));
}

// Widen d numbers and zero the rest of the last vector of floats.
template <class E>
INLINE void widen_row(bool int8, const uint8_t* row, int64_t d, E* to) {
  int8 ? widen_row<true>(row, d, to) : widen_row<false>(row, d, to);
}

}  // namespace PT_ISA
}  // namespace pt

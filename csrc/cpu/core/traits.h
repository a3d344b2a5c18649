// SPDX-License-Identifier: Apache-2.0
// Dtypes in the kernels: conversions of 16-bit numbers, and the traits T of operands, sums and
// micro-kernels.
#pragma once

#include "cpu/core/vec.h"

namespace pt {
namespace PT_ISA {

// 16-bit conversions, one number per float lane. Stores round to nearest even and preserve NaN. Use
// the widening instruction explicitly: GCC 12 emits four that compete for one port.
INLINE vi32 widen(const void* p) {
#if defined(__AVX512F__)
  return (vi32)_mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
#else
  return __builtin_convertvector(*static_cast<const vu16_half*>(p), vi32);
#endif
}
// Narrow to the lower halves. The upper halves are 0.
INLINE void narrow(void* p, vi32 v) {
#if defined(__AVX512F__)
  _mm256_storeu_si256(static_cast<__m256i*>(p), _mm512_cvtepi32_epi16((__m512i)v));
#else
  *static_cast<vu16_half*>(p) = __builtin_convertvector(v, vu16_half);
#endif
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// Byte shuffles within 128-bit lanes. to_floats: word i becomes the upper half of float i in lane
// 0, and word i + 4 in lane 1. to_words: the upper halves move to the lower 8 bytes of lane 0 and
// the upper 8 of lane 1. One of Zen 2's four vector ports shifts; shuffles instead of shifts save
// bf16 norms an eighth of their time. The other constants are for rounding. Weak: with few free
// registers, GCC 12 rebuilds a known constant per vector through a general register; it reads these
// as memory operands.
// shuffle bytes of a word; -1: zeros
constexpr int word_bytes(int word) { return word < 0 ? 0x8080 : 0x100 + 0x202 * word; }
constexpr int two_words(int low, int high) {
  return int(unsigned(word_bytes(low)) | unsigned(word_bytes(high)) << 16);
}
struct Bf16Constants {
  vi32 to_floats, to_words, tie, half, quiet, upper;
};
extern const Bf16Constants kBf16 __attribute__((weak));
const Bf16Constants kBf16 = {
    {two_words(-1, 0), two_words(-1, 1), two_words(-1, 2), two_words(-1, 3), two_words(-1, 4),
     two_words(-1, 5), two_words(-1, 6), two_words(-1, 7)},
    {two_words(1, 3), two_words(5, 7), two_words(-1, -1), two_words(-1, -1), two_words(-1, -1),
     two_words(-1, -1), two_words(1, 3), two_words(5, 7)},
    vi32{} + 0x1ffff,
    vi32{} + 0x8000,
    vi32{} + 0x400000,
    vi32{} + -0x10000};
#endif

INLINE vf to_float(const bf16* p) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  const __m256i twice =
      _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return (vf)_mm256_shuffle_epi8(twice, (__m256i)kBf16.to_floats);
#elif defined(__SSE2__) && !defined(__AVX512F__)
  // Interleave with zeros in one instruction. GCC 12 widens and shifts in six.
  return (vf)_mm_unpacklo_epi16(_mm_setzero_si128(),
                                _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#else
  return (vf)(widen(p) << 16);
#endif
}
INLINE vf to_float(const f16* p) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__F16C__)
  return (vf)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  const vi32 h = widen(p), em = (h & 0x7fff) << 13, sign = (h & 0x8000) << 16;
  // 2^112 moves the exponent, subnormals included
  const vf scaled = (vf)em * 5.192296858534828e33f;
  return (vf)((em >= 0x0f800000 ? em | 0x7f800000 : (vi32)scaled) | sign);
#endif
}
#if defined(__AVX2__) && !defined(__AVX512F__)
// Round to bfloat16 in the upper halves.
INLINE vi32 round_bf16(vf v) {
  // -1: halfway to the next number, and even
  const vi32 x = (vi32)v, even = (x & kBf16.tie) == kBf16.half;
  return v == v ? x + kBf16.half + even : x | kBf16.quiet;
}
INLINE void store_upper_halves(bf16* p, vi32 x) {
  const __m256i words = _mm256_shuffle_epi8((__m256i)x, (__m256i)kBf16.to_words);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm256_castsi256_si128(words) | _mm256_extracti128_si256(words, 1));
}
#endif

INLINE void from_float(bf16* p, vf v) {
#if defined(__AVX512BF16__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh((__m512)v));
#elif defined(__AVX2__) && !defined(__AVX512F__)
  store_upper_halves(p, round_bf16(v));
#else
  const vi32 x = (vi32)v, rounded = v == v ? x + 0x7fff + ((x >> 16) & 1) : x | 0x400000;
  narrow(p, (rounded >> 16) & 0xffff);
#endif
}
// Round, store, and return the value that to_float would read back.
INLINE vf from_float_and_back(bf16* p, vf v) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  const vi32 x = round_bf16(v);
  store_upper_halves(p, x);
  return (vf)(x & kBf16.upper);
#else
  from_float(p, v);
  return to_float(p);
#endif
}
INLINE void from_float(f16* p, vf v) {
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__F16C__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
  const vi32 x = (vi32)v, a = x & 0x7fffffff;
  const vi32 normal = (a - 0x38000000 + 0xfff + ((a >> 13) & 1)) >> 13;
  const vi32 small = (vi32)((vf)a + 0.5f) - 0x3f000000;  // the sum rounds like the subnormal
  vi32 r = a < 0x38800000 ? small : normal;
  r = a >= 0x47800000 ? (a > 0x7f800000 ? vi32{} + 0x7e00 : vi32{} + 0x7c00) : r;
  narrow(p, r | ((x >> 16) & 0x8000));
#endif
}

// Scope in which this thread flushes subnormal results to 0. Each costs an assist of over 100
// cycles on x86, and a softmax row with far-away keys (ALiBi) has many of them.
class FlushSubnormals {
 public:
#if defined(__SSE__)
  FlushSubnormals() : saved_(__builtin_ia32_stmxcsr()) { __builtin_ia32_ldmxcsr(saved_ | 0x8000); }
  ~FlushSubnormals() { __builtin_ia32_ldmxcsr(saved_); }

 private:
  const unsigned saved_;
#else
  FlushSubnormals() {}
#endif
};

// Products of the micro-kernel: c += a * b, with a vector of packed elements b and one broadcast
// packed element a.
template <class A>
struct PlainDot {
  using acc = A;
  using packed = A;
  using vec = typename Lanes<A>::vec;
  using uvec = vec;
  static INLINE uvec broadcast(const packed* p) { return set1<vec>(*p); }
  static INLINE vec dot(vec c, uvec a, uvec b) { return fma(a, b, c); }
};

template <class E>
struct Native {  // shared by float and double: operands are numbers of acc
  using acc = E;
  using opnd = E;
  using packed = E;
  using Dot = PlainDot<E>;
  using vec = typename Dot::vec;
  using uvec = vec;
  static constexpr int pack = 1, width = kVecBytes / int(sizeof(E)), exp_degree = 5;
  static INLINE vec dot(vec c, uvec a, uvec b) { return fma(a, b, c); }
  // Store 2 * width numbers, aligned.
  static INLINE void store_pair(opnd* p, vec lo, vec hi) { store(p, lo), store(p + width, hi); }
};

// Operands converted to float on load.
template <class E>
struct Float : Native<float> {
  using elem = E;
  static constexpr int exp_degree = sizeof(E) == 2 ? 4 : 5;
  // Load all lanes if n >= width, else the first n and zeros. Never touches memory past n.
  static INLINE vec load(const elem* p, int64_t n = width) {
    if constexpr (std::is_same_v<E, float>) {
#if defined(__AVX512F__)
      return (vec)_mm512_maskz_loadu_ps(mask_n<vec>(n), p);
#else
      if (n >= width) return loadu(p);
#endif
    } else {
      if (n >= width) return to_float(p);
    }
    elem t[width] = {};
    for (int64_t i = 0; i < n; i++) t[i] = p[i];
    if constexpr (std::is_same_v<E, float>) return loadu(t);
    else return to_float(t);
  }
  static INLINE void store(elem* p, int64_t n, vec v) {
    elem t[width];
    elem* to = n >= width ? p : t;
    if constexpr (std::is_same_v<E, float>) storeu(to, v);
    else from_float(to, v);
    if (n < width)
      for (int64_t i = 0; i < n; i++) p[i] = t[i];
  }
  static INLINE uvec load_units(const elem* p, int64_t n) { return load(p, n); }
};

struct Double : Native<double> {
  using elem = double;
  static INLINE vec load(const elem* p, int64_t n = width) {
    if (n >= width) return loadu(p);
    elem t[width] = {};
    for (int64_t i = 0; i < n; i++) t[i] = p[i];
    return loadu(t);
  }
  static INLINE void store(elem* p, int64_t n, vec v) {
    if (n >= width) return storeu(p, v);
    for (int64_t i = 0; i < n; i++) p[i] = v[i];
  }
  static INLINE uvec load_units(const elem* p, int64_t n) { return load(p, n); }
};

#if defined(__AVX512BF16__)
// bf16 pairs along k, multiplied by vdpbf16ps.
struct Bf16Dot {
  using acc = float;
  using packed = uint32_t;
  using vec = vf;
  using uvec = vi32;
  static INLINE uvec broadcast(const packed* p) { return (uvec)_mm512_set1_epi32(int(*p)); }
  static INLINE vec dot(vec c, uvec a, uvec b) {
    return (vec)_mm512_dpbf16_ps((__m512)c, (__m512bh)a, (__m512bh)b);
  }
};
struct Bf16Pair {
  using elem = bf16;
  using acc = float;
  using opnd = bf16;
  using packed = uint32_t;
  using Dot = Bf16Dot;    // micro-kernel
  using Pairs = Bf16Dot;  // vectors
  using vec = vf;
  using uvec = vi32;
  // exp_degree: exponentials are rounded to opnd anyway.
  static constexpr int pack = 2, width = 16, exp_degree = 4;
  static INLINE vec dot(vec c, uvec a, uvec b) { return Dot::dot(c, a, b); }
  static INLINE __mmask32 mask32(int64_t n) {
    return n >= 32 ? ~__mmask32(0) : n <= 0 ? 0 : (__mmask32(1) << n) - 1;
  }
  // Masked loads are fast everywhere; masked stores are slow on Zen and serve only tails.
  static INLINE vec load(const elem* p, int64_t n = width) {
    return (vec)_mm512_slli_epi32(
        _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask_n<vec>(n), p)), 16);
  }
  static INLINE void store(elem* p, int64_t n, vec v) {
    if (n >= width) from_float(p, v);
    else _mm256_mask_storeu_epi16(p, mask_n<vec>(n), (__m256i)_mm512_cvtneps_pbh((__m512)v));
  }
  static INLINE uvec load_units(const elem* p, int64_t n) {
    return (uvec)_mm512_maskz_loadu_epi16(mask32(n), p);
  }
  static INLINE uvec pair(vec lo, vec hi) {
    return (uvec)_mm512_cvtne2ps_pbh((__m512)hi, (__m512)lo);
  }
  static INLINE void store_pair(opnd* p, vec lo, vec hi) {
    _mm512_store_si512(p, (__m512i)pair(lo, hi));
  }
};
// Interleave columns i of two bf16 rows into packed elements.
INLINE void interleave(vi32 a, vi32 b, vi32* lo, vi32* hi) {
  alignas(64) static const uint16_t idx[2][32] = {
      {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
       8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47},
      {16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55,
       24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63}};
  *lo = (vi32)_mm512_permutex2var_epi16((__m512i)a, _mm512_load_si512(idx[0]), (__m512i)b);
  *hi = (vi32)_mm512_permutex2var_epi16((__m512i)a, _mm512_load_si512(idx[1]), (__m512i)b);
}
#endif

// Bf16: traits of a bf16 tensor on this instruction set (AMX: amx.h).
#if !defined(__AVX512BF16__)
using Bf16 = Float<bf16>;
#elif !defined(__AMX_BF16__)
using Bf16 = Bf16Pair;
#endif

#if !defined(__AMX_BF16__)
struct WorkerState {  // no per-thread setup without AMX
  WorkerState() {}
};
#endif

}  // namespace PT_ISA
}  // namespace pt
